"""The stacks, and their base class: layers, directions, dropout and norms between layers."""

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
from jaxrnn.cells import LSTMParams
from jaxrnn.checks import Caller, Implementation, check_flags, check_norm_and_constants
from jaxrnn.linen.cells import FusedCell, GRUCell, MGUCell, NormGRUCell, OptimizedLSTMCell, SimpleCell
from jaxrnn.linen.norms import LayerNorm, RMSNorm
from jaxrnn.modules import Carry, ReturnsCarry
from torch_bridge.docstrings import inherit_descriptions


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


class GRU(FusedStack[ReturnsCarry]):
    """A stack of GRUs like `torch.nn.GRU`, with layers, directions, dropout between layers, and episode resets.

    Layer k has the parameters of a `GRUCell` at `layers_{k}`; those of its backward direction are at
    `layers_{k}_reverse`. The outputs concatenate the directions: forward, then backward.

    Attributes:
      features: H, the width of every layer and direction.
      num_layers: the number of layers; each runs over the outputs of the previous layer.
      dropout_rate: the rate of the dropout on the outputs of every layer but the last. Each step has its own mask.
        With one layer it has no effect, and a warning says so.
      bidirectional: whether each layer also runs from the last step to the first, with separate weights.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`. Neither layout is transposed.
      return_carry: whether to return `(carry, outputs)` instead of `outputs`.
      reverse: whether to run all layers from the last step to the first. Outputs are in the order computed, last step
        first.
      keep_order: whether to return the outputs in the order of the inputs when `reverse` is set.
      deterministic: whether to disable dropout. With a nonzero `dropout_rate`, set it either here or in the call.
      learned_carry: whether sequences and, by default, episodes start from learned parameters of width H, which
        `carry_init` initializes. They are `layers_{k}_carry_h`, and also `layers_{k}_carry_c` for an LSTM; those of the
        backward direction are `layers_{k}_reverse_carry_h` and `layers_{k}_reverse_carry_c`.
      dtype: the dtype of the matmul operands; the carry keeps its own dtype. None uses the dtype to which inputs, carry
        and parameters promote.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      kernel_init: the initializer of the input weights.
      recurrent_kernel_init: the initializer of the recurrent weights.
      bias_init: the initializer of the biases.
      carry_init: the initializer of the carry that sequences and episodes start from.
      precision: the precision of the matmuls, as `jax.lax.dot_general` takes it; None means
        `jax_default_matmul_precision`.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. NotImplementedError is raised if the named one cannot run it.
      remat: whether the backward pass recomputes what it needs of the gates, in chunks of time, instead of the forward
        pass saving it.
      norm: the norm of the outputs of every layer but the last. It normalizes both directions together, before dropout.
        "rms" and "layer" create an `RMSNorm` or a `LayerNorm` with its parameters at `norm_{k}`, where k is the layer
        whose outputs it normalizes. A class or a function creates another module when called as `norm(name=name)`. None
        means no norm.
      num_blocks: N, the number of blocks (heads) of the recurrent weights of every layer and direction. The H / N
        consecutive units of a block read the states of their own block alone, and all inputs. N must divide H.

    Examples:
      Two layers, and a second chunk of the sequences, which goes on from the carry of the first:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import GRU
      >>> rnn = GRU(4, num_layers=2, time_major=True, return_carry=True)
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> carry, ys = rnn.apply(variables, xs, resets=resets)
      >>> carry, ys = rnn.apply(variables, xs, initial_carry=carry, resets=resets)
      >>> ys.shape, [h.shape for h in carry]
      ((5, 2, 4), [(2, 4), (2, 4)])
    """

    _cell = GRUCell


@inherit_descriptions(GRU)
class LSTM(FusedStack[ReturnsCarry]):
    """A stack of LSTMs like `torch.nn.LSTM`: `GRU` with the cell `OptimizedLSTMCell` and carries `(c, h)`.

    Attributes:
      proj_size: P, the width to which `layers_{k}/proj` projects hidden states, and so outputs; c stays H wide. None
        means no projection. The weight is `params.w_hr` in `jaxrnn.lstm`. It excludes `num_blocks` > 1.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import LSTM
      >>> rnn, xs, resets = LSTM(4, num_layers=2, return_carry=True), jnp.ones((2, 5, 3)), jnp.zeros((2, 5))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> carry, ys = rnn.apply(variables, xs, resets=resets)
      >>> (c, h), second = carry  # a pair for each layer
      >>> ys.shape, c.shape, h.shape
      ((2, 5, 4), (2, 4), (2, 4))
    """

    proj_size: int | None = None

    _cell = OptimizedLSTMCell

    @nn.nowrap
    def check(self, reverse: bool) -> None:
        """Raises ValueError unless the attributes describe a valid stack."""
        if self.proj_size is not None:
            modules.check_sizes(self, "proj_size")
        modules.check_blocks_without_projection(self.caller(), self.num_blocks, self.proj_size)
        super().check(reverse)

    @nn.nowrap
    def widths(self) -> tuple[int, ...]:
        """Returns the widths of c and h."""
        return self.features, self.features if self.proj_size is None else self.proj_size

    @nn.nowrap
    def packed_params(self, cell: Any, input_features: int) -> LSTMParams:
        """Returns the parameters of one cell, creating missing ones."""
        return cell.packed_params(input_features, self.features, self.proj_size)


@inherit_descriptions(GRU)
class MGU(FusedStack[ReturnsCarry]):
    """A stack of minimal gated units: `GRU` with the cell `MGUCell`.

    Attributes:
      bias_init: the initializer of the biases of n, which is `activation_bias_init` of the cell.
      forget_bias_init: the initializer of the biases of the forget gate.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import MGU
      >>> rnn, xs, resets = MGU(4, bidirectional=True), jnp.ones((2, 5, 3)), jnp.zeros((2, 5))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> rnn.apply(variables, xs, resets=resets).shape  # of both directions
      (2, 5, 8)
    """

    forget_bias_init: Initializer = nn.initializers.ones

    _cell = MGUCell

    @nn.nowrap
    def cell_options(self) -> dict[str, Any]:
        """Returns the attributes of every cell."""
        options = super().cell_options()
        inits = {"forget_bias_init": self.forget_bias_init, "activation_bias_init": options.pop("bias_init")}
        return options | inits


@inherit_descriptions(GRU)
class SimpleRNN(FusedStack[ReturnsCarry]):
    """A stack of simple RNNs like `torch.nn.RNN`: `GRU` with the cell `SimpleCell`.

    Attributes:
      activation_fn: tanh or relu; another function raises NotImplementedError.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import SimpleRNN
      >>> rnn, xs, resets = SimpleRNN(4, activation_fn=jax.nn.relu), jnp.ones((2, 5, 3)), jnp.zeros((2, 5))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> rnn.apply(variables, xs, resets=resets).shape
      (2, 5, 4)
    """

    activation_fn: Callable[[Array], Array] = nn.tanh

    _cell = SimpleCell

    @nn.nowrap
    def check(self, reverse: bool) -> None:
        """Raises ValueError unless the attributes describe a valid stack, NotImplementedError for an activation."""
        super().check(reverse)
        modules.check_function(self.caller(), "activation_fn", self.activation_fn)
        if (reason := SimpleCell._reason_of_formula(self.make_cell(parent=None))) is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: a stack cannot run {reason}; use one RNN per layer instead"
            )

    @nn.nowrap
    def cell_options(self) -> dict[str, Any]:
        """Returns the attributes of every cell."""
        return super().cell_options() | {"activation_fn": self.activation_fn}


@inherit_descriptions(GRU)
class NormGRU(FusedStack[ReturnsCarry]):
    """A stack of GRUs whose gates see a norm of inputs and state: `GRU` with the cell `NormGRUCell`.

    The norm inside the cells is `cell_norm`; `norm` is between layers.

    Attributes:
      num_blocks: must be 1, because the norm sees all units; ValueError is raised otherwise.
      cell_norm: `norm` of the cells, "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance of that norm.
      update_bias: what is added to the update gate before its activation.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import NormGRU
      >>> rnn, xs, resets = NormGRU(4, num_layers=2, cell_norm="layer"), jnp.ones((2, 5, 3)), jnp.zeros((2, 5))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> rnn.apply(variables, xs, resets=resets).shape
      (2, 5, 4)
    """

    cell_norm: Literal["rms", "layer"] = dataclasses.field(default="rms", kw_only=True)
    epsilon: float = dataclasses.field(default=1e-4, kw_only=True)
    update_bias: float = dataclasses.field(default=-1.0, kw_only=True)

    _cell = NormGRUCell

    @nn.nowrap
    def check(self, reverse: bool) -> None:
        """Raises ValueError unless the attributes describe a valid stack."""
        super().check(reverse)
        check_norm_and_constants(
            modules.caller_of(self, norm="cell_norm"), self.cell_norm, self.epsilon, self.update_bias
        )
        modules.check_blocks_without_norm(self.caller(), self.num_blocks)

    @nn.nowrap
    def cell_options(self) -> dict[str, Any]:
        """Returns the attributes of every cell."""
        own = {"norm": self.cell_norm, "epsilon": self.epsilon, "update_bias": self.update_bias}
        return super().cell_options() | own
