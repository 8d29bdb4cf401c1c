"""The base class of the stacks: layers, directions, dropout and norms between layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, TypedDict, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PRNGKey
from jax import Array
from jax.typing import ArrayLike
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.checks import Caller, Implementation, check_flags
from jaxrnn.linen.fused_cell import FusedCell
from jaxrnn.linen.norms import LayerNorm, RMSNorm
from jaxrnn.modules import Carry, ReturnsCarry


class CallOptions(TypedDict, total=False):
    """The keyword arguments of `FusedStack.__call__`, except `return_carry`."""

    initial_carry: Any
    init_key: PRNGKey | None
    seq_lengths: ArrayLike | None
    time_major: bool | None
    reverse: bool | None
    keep_order: bool | None
    deterministic: bool | None
    resets: ArrayLike | None
    reset_carry: Any


class FusedStack(nn.Module, Generic[ReturnsCarry]):
    """The base class of the stacks. A subclass sets `_cell`, the class of its cells.

    `jaxrnn.linen.GRU` documents the attributes.
    """

    features: int
    num_layers: int = 1
    dropout_rate: float = 0.0
    bidirectional: bool = False
    time_major: bool = False
    return_carry: ReturnsCarry = False  # type: ignore[assignment]
    reverse: bool = False
    keep_order: bool = False
    deterministic: bool | None = None
    learned_carry: bool = False
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    recurrent_kernel_init: Initializer = nn.initializers.orthogonal()
    bias_init: Initializer = nn.initializers.zeros
    carry_init: Initializer = nn.initializers.zeros
    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None
    remat: bool = False
    norm: str | Callable[..., nn.Module] | None = None
    num_blocks: int = dataclasses.field(default=1, kw_only=True)

    _cell: ClassVar[type[FusedCell[Any]]] = FusedCell

    @overload
    def __call__(
        self: FusedStack[Literal[False]],
        inputs: ArrayLike,
        *,
        return_carry: None = None,
        **options: Unpack[CallOptions],
    ) -> Array: ...

    @overload
    def __call__(
        self: FusedStack[Literal[True]], inputs: ArrayLike, *, return_carry: None = None, **options: Unpack[CallOptions]
    ) -> tuple[tuple[Any, ...], Array]: ...

    @overload
    def __call__(self, inputs: ArrayLike, *, return_carry: Literal[False], **options: Unpack[CallOptions]) -> Array: ...

    @overload
    def __call__(
        self, inputs: ArrayLike, *, return_carry: Literal[True], **options: Unpack[CallOptions]
    ) -> tuple[tuple[Any, ...], Array]: ...

    @overload
    def __call__(
        self, inputs: ArrayLike, *, return_carry: bool | None = None, **options: Unpack[CallOptions]
    ) -> Array | tuple[tuple[Any, ...], Array]: ...

    @nn.compact
    def __call__(
        self,
        inputs: Any,
        *,
        initial_carry: Any = None,
        init_key: PRNGKey | None = None,
        seq_lengths: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        deterministic: bool | None = None,
        resets: Any = None,
        reset_carry: Any = None,
    ) -> Any:
        """Runs all layers over `inputs` and restarts them at every step where `resets` is nonzero.

        A carry is a tuple with one entry per layer. An entry is `[*batch, H]` or, for an LSTM, `(c, h)`. If
        `bidirectional`, an entry is a pair (forward, backward) of these.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`. Any number of batch axes.
          initial_carry: the carry before the first step of each direction; by default the result of
            `initialize_carry`.
          init_key: the key for `initialize_carry`, which ignores the key unless `carry_init` is random.
          seq_lengths: `[*batch]` integers from 0 to T. Others raise an error, or are clipped if they are traced. The
            returned carry is the one at the end of each sequence (`initial_carry` if its length is 0), and the backward
            direction starts at that end. Inputs beyond the end are not used; outputs there are meaningless and are
            not zeroed. May be combined with `resets`.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          deterministic: see the attribute; Flax raises ValueError if both the attribute and this argument are set.
          resets: `[*batch, T]`, or `[T, *batch]` if `time_major`, real; nonzero at the first step of an episode,
            that is, the *previous* step's done flag. Every layer starts that step from `reset_carry`. The backward
            direction of a bidirectional stack starts an episode from `reset_carry` at the last step of the episode,
            which precedes the next step that `resets` marks; so neither direction sees another episode. With `reverse`,
            `resets` is nonzero at the step of each episode that the loop computes first: the episode's last in time.
          reset_carry: the carry that an episode starts from, by default the result of `initialize_carry`. It has the
            structure of a carry, and its arrays may also be `[H]` or a value per step, `[*batch, T, H]`
            (`[T, *batch, H]`). From values per step, a direction reads the one of the step at which it starts the
            episode. It is differentiable.

        Returns:
          `outputs [*batch, T, H]` (`[T, *batch, H]`), or `(carry, outputs)` if `return_carry`. If `bidirectional`,
          outputs are 2 H wide: forward, then backward.

        Raises:
          ValueError: shapes, dtypes or structures disagree.
          NotImplementedError: the named implementation cannot run this input; the message says why.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        caller = self.caller()
        self.check(reverse)
        (time_major,) = check_flags(caller, time_major=time_major)
        modules.check_inputs(caller, inputs, time_major)
        modules.check_reset_carry(resets, reset_carry, caller)

        def between(k: int, xs: Array) -> Array:
            """Returns the inputs of layer k + 1: the outputs of layer k after norm and dropout."""
            if self.norm is not None:
                xs = self.make_norm(f"norm_{k}")(xs)
            if self.dropout_rate == 0.0:
                return xs
            is_off = nn.merge_param("deterministic", self.deterministic, deterministic)
            return nn.Dropout(self.dropout_rate)(xs, deterministic=is_off)

        layers, width = [], inputs.shape[-1]
        for names in self.cell_names():
            cells = [self.make_cell(name=name) for name in names]
            layers.append([(cell.recurrence, self.packed_params(cell, width)) for cell in cells])
            width = len(names) * self.widths()[-1]
        shape = inputs.shape[1:] if time_major else (*inputs.shape[:-2], inputs.shape[-1])
        if self.learned_carry:
            learned = self.make_carry(self.learned_cell_carry)
            make = functools.partial(modules.broadcast_carry, learned, shape[:-1])
            reset_carry = learned if reset_carry is None else reset_carry
        else:
            key = jax.random.key(0) if init_key is None else init_key
            make = functools.partial(self.initialize_carry, key, shape)
        from_zeros = modules.starts_from_zeros(self, [nn.initializers.zeros], [FusedStack])
        initial_carry, reset_carry = modules.default_carries(make, initial_carry, resets, reset_carry, from_zeros)
        structure = self.named_widths(), self.num_layers, self.bidirectional
        return modules.run_stack(
            layers,
            modules.group_by_direction(caller("carry"), initial_carry, *structure),
            inputs,
            resets=resets,
            reset_carry=None
            if reset_carry is None
            else modules.group_by_direction(caller("reset_state"), reset_carry, *structure),
            seq_lengths=seq_lengths,
            between=between,
            dtype=self.dtype,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
            return_carry=return_carry,
            precision=self.precision,
            implementation=self.implementation,
            remat=self.remat,
            caller=caller,
        )

    @nn.nowrap
    def initialize_carry(self, rng: PRNGKey, input_shape: tuple[int, ...]) -> tuple[Any, ...]:
        """Returns the carry of a new sequence: the result of `carry_init`, or the learned carry.

        Args:
          rng: the key for `carry_init`.
          input_shape: the shape of the inputs of one step, `[*batch, D]`.

        Returns:
          A tuple with an entry for each layer, `[*batch, H]` or, for an LSTM, `(c, h)`; if `bidirectional`, a pair
          (forward, backward) of these. The arrays have the dtype `param_dtype`.

        Raises:
          ValueError: a size is not valid; or the carry is learned and the module is not bound to parameters: use
            `stack.apply(variables, rng, input_shape, method="initialize_carry")`.
        """
        modules.check_sizes(self, "features", "num_layers")
        modules.check_input_shape(self, input_shape, "rng, input_shape")
        if not self.learned_carry:
            # two keys for each cell, because the carry of an LSTM has two arrays
            keys = iter(jax.random.split(rng, 2 * self.num_layers * (1 + self.bidirectional)))
            shapes = [(*input_shape[:-1], width) for width in self.widths()]
            return self.make_carry(
                lambda name: modules.one_or_tuple(
                    [self.carry_init(next(keys), shape, self.param_dtype) for shape in shapes]
                )
            )
        if self.scope is None:
            raise ValueError(
                f"{type(self).__name__}: learned_carry must be False for a stack without variables, got True; call "
                'stack.apply(variables, rng, input_shape, method="initialize_carry")'
            )
        return modules.broadcast_carry(self.make_carry(self.learned_cell_carry), input_shape[:-1])

    @nn.nowrap
    def check(self, reverse: bool) -> None:
        """Raises ValueError unless the attributes describe a valid stack."""
        modules.check_sizes(self, "features")
        modules.check_dtypes(self)
        modules.check_stack(self.caller(), self.num_layers, self.dropout_rate, self.bidirectional, reverse, self.norm)
        modules.check_num_blocks(self.caller(), self.num_blocks, self.features)

    @nn.nowrap
    def caller(self) -> Caller:
        """Returns how messages name the stack and its arguments."""
        return modules.caller_of(self, xs="inputs", carry="initial_carry", reset_state="reset_carry")

    @nn.nowrap
    def widths(self) -> tuple[int, ...]:
        """Returns the widths of the arrays of a cell's carry; the hidden state is the last."""
        return (self.features,)

    @nn.nowrap
    def named_widths(self) -> dict[str, int]:
        """Returns `widths` by name of the array."""
        recurrence = self.make_cell(parent=None).recurrence
        return dict(zip(modules.state_names(recurrence), self.widths(), strict=True))

    @nn.nowrap
    def packed_params(self, cell: Any, input_features: int) -> Any:
        """Returns the parameters of one cell, creating missing ones."""
        return cell.packed_params(input_features, self.features)

    @nn.nowrap
    def cell_names(self) -> list[list[str]]:
        """Returns the names of the cells by layer and direction."""
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        return [[f"layers_{k}{suffix}" for suffix in suffixes] for k in range(self.num_layers)]

    @nn.nowrap
    def make_carry(self, make: Callable[[str], Carry]) -> Any:
        """Returns the carry whose entry for each cell is `make(name of the cell)`."""
        entries = [tuple(map(make, names)) for names in self.cell_names()]
        return tuple(entry if self.bidirectional else entry[0] for entry in entries)

    @nn.compact
    def learned_cell_carry(self, name: str) -> Carry:
        """Returns the learned carry of a cell, `[H]` or a pair of such arrays; creates it if missing."""
        states = self.named_widths().items()
        return modules.one_or_tuple(
            [self.param(f"{name}_carry_{x}", self.carry_init, (width,), self.param_dtype) for x, width in states]
        )

    @nn.nowrap
    def make_norm(self, name: str) -> nn.Module:
        """Creates the norm of the outputs of one layer."""
        if isinstance(self.norm, nn.Module):
            raise ValueError(
                f"{self.caller()('norm')} must make a module for each layer, got a module; pass its class or a function"
            )
        if callable(self.norm):
            return self.norm(name=name)
        make = {"rms": RMSNorm, "layer": LayerNorm}[str(self.norm)]
        return make(dtype=self.dtype, param_dtype=self.param_dtype, implementation=self.implementation, name=name)

    @nn.nowrap
    def cell_options(self) -> dict[str, Any]:
        """Returns the attributes of every cell."""
        names = (
            "features", "dtype", "param_dtype", "kernel_init", "recurrent_kernel_init", "bias_init", "num_blocks",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    @nn.nowrap
    def make_cell(self, **options: Any) -> Any:
        """Creates one cell."""
        return self._cell(**self.cell_options(), **options)
