"""The stacks, and their base class: layers, directions, dropout and norms between layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, TypedDict, overload

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax import Array
from jax.typing import ArrayLike
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.checks import Caller, Implementation, check_flags, check_norm_and_constants, check_size
from jaxrnn.modules import Carry, ReturnsCarry
from jaxrnn.nnx.cells import (
    KERNEL_INIT,
    RECURRENT_KERNEL_INIT,
    FusedCell,
    GRUCell,
    NormGRUCell,
    OptimizedLSTMCell,
    ProjectedLSTMCell,
    SimpleCell,
    packed_params,
    reason_to_scan,
    recurrence_of,
)
from jaxrnn.nnx.norms import LayerNorm, RMSNorm
from jaxrnn.nnx.rnn import Rngs
from torch_bridge.docstrings import inherit_descriptions


class LearnedCarry(nnx.Module):
    """The carry that sequences and episodes of one cell start from: a parameter `[H]` for each array of the carry."""

    def __init__(self, widths: dict[str, int], init: Initializer, dtype: Dtype, rngs: nnx.Rngs) -> None:
        self.names = tuple(widths)
        for name, width in widths.items():
            setattr(self, name, nnx.Param(init(rngs.params(), (width,), dtype)))

    def __call__(self) -> Carry:
        """Returns an array `[H]`, or a pair `(c, h)` of such arrays."""
        return modules.one_or_tuple([getattr(self, name)[...] for name in self.names])


class StackOptions(TypedDict, total=False):
    """The options of `FusedStack` that every stack has, except `return_carry` and `rngs`."""

    num_layers: int
    dropout_rate: float
    bidirectional: bool
    time_major: bool
    reverse: bool
    keep_order: bool
    learned_carry: bool
    dtype: Dtype | None
    param_dtype: Dtype
    kernel_init: Initializer
    recurrent_kernel_init: Initializer
    bias_init: Initializer
    carry_init: Initializer
    precision: jax.lax.PrecisionLike
    implementation: Implementation
    remat: bool
    norm: str | Callable[..., nnx.Module] | None
    num_blocks: int


class CallOptions(TypedDict, total=False):
    """The keyword arguments of `FusedStack.__call__`, except `return_carry`."""

    initial_carry: Any
    seq_lengths: ArrayLike | None
    time_major: bool | None
    reverse: bool | None
    keep_order: bool | None
    deterministic: bool | None
    rngs: Rngs
    resets: ArrayLike | None
    reset_carry: Any


class FusedStack(nnx.Module, Generic[ReturnsCarry]):
    """The base class of the stacks, each with the cell `_cell`."""

    return_carry: ReturnsCarry

    _cell: ClassVar[type[FusedCell[Any]]] = FusedCell

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers: int = 1,
        dropout_rate: float = 0.0,
        bidirectional: bool = False,
        time_major: bool = False,
        return_carry: ReturnsCarry = False,  # type: ignore[assignment]
        reverse: bool = False,
        keep_order: bool = False,
        learned_carry: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        kernel_init: Initializer = KERNEL_INIT,
        recurrent_kernel_init: Initializer = RECURRENT_KERNEL_INIT,
        bias_init: Initializer = jax.nn.initializers.zeros,
        carry_init: Initializer = jax.nn.initializers.zeros,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
        remat: bool = False,
        norm: str | Callable[..., nnx.Module] | None = None,
        num_blocks: int = 1,
        rngs: nnx.Rngs,
    ) -> None:
        caller = self._caller()
        check_size(caller("in_features"), in_features)
        check_size(caller("hidden_features"), hidden_features)
        modules.check_stack(caller, num_layers, dropout_rate, bidirectional, reverse, norm)
        modules.check_rngs(caller, rngs)
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.num_layers = num_layers
        self.dropout_rate = dropout_rate
        self.bidirectional = bidirectional
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.learned_carry = learned_carry
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.carry_init = carry_init
        self.precision = precision
        self.implementation = implementation
        self.remat = remat
        self.num_blocks = num_blocks
        directions = 2 if bidirectional else 1
        layers = [
            [
                self._make_cell(
                    in_features if k == 0 else directions * self._widths()["h"],
                    hidden_features,
                    dtype=dtype,
                    param_dtype=param_dtype,
                    kernel_init=kernel_init,
                    recurrent_kernel_init=recurrent_kernel_init,
                    bias_init=bias_init,
                    num_blocks=num_blocks,
                    rngs=rngs,
                )
                for _ in range(directions)
            ]
            for k in range(num_layers)
        ]
        self.layers = nnx.List([layer[0] for layer in layers])
        if bidirectional:
            self.layers_reverse = nnx.List([layer[1] for layer in layers])
        if learned_carry:
            make = functools.partial(LearnedCarry, self._widths(), carry_init, param_dtype, rngs)
            self.carries = nnx.List([make() for _ in range(num_layers)])
            if bidirectional:
                self.carries_reverse = nnx.List([make() for _ in range(num_layers)])
        if isinstance(norm, nnx.Module):
            raise ValueError(
                f"{caller('norm')} must make a module for each layer, got a module; pass its class or a function"
            )
        if isinstance(norm, str):
            options: Any = {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation}
            norm = functools.partial({"rms": RMSNorm, "layer": LayerNorm}[norm], **options)
        make_norm: Any = norm
        width = directions * self._widths()["h"]
        self.norms: nnx.List[Any] | None = (
            None if norm is None else nnx.List([make_norm(width, rngs=rngs) for _ in range(num_layers - 1)])
        )
        if dropout_rate > 0.0:
            self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)

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

    def __call__(
        self,
        inputs: Any,
        *,
        initial_carry: Any = None,
        seq_lengths: Any = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        deterministic: bool | None = None,
        rngs: Rngs = None,
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
          seq_lengths: `[*batch]` integers from 0 to T. Others raise an error, or are clipped if they are traced. The
            returned carry is the one at the end of each sequence (`initial_carry` if its length is 0), and the backward
            direction starts at that end. Inputs beyond the end are not used; outputs there are meaningless and are
            not zeroed. May be combined with `resets`.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          deterministic: whether to disable dropout; by default `eval()` and `train()` of this module set it.
          rngs: the random number generators of dropout, by default those given to the constructor, and of a random
            `carry_init`.
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
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        caller = self._caller()
        modules.check_stack(caller, self.num_layers, self.dropout_rate, self.bidirectional, reverse)
        (time_major,) = check_flags(caller, time_major=time_major)
        modules.check_inputs(caller, inputs, time_major)
        modules.check_width(caller("xs"), "in_features", self.in_features, inputs.shape[-1])
        modules.check_dtypes(self)
        modules.check_reset_carry(resets, reset_carry, caller)

        def between(k: int, xs: Array) -> Array:
            if self.norms is not None:
                xs = self.norms[k](xs)
            return self.dropout(xs, deterministic=deterministic, rngs=rngs) if self.dropout_rate > 0.0 else xs

        if self.learned_carry and reset_carry is None:
            reset_carry = self._learned()
        shape = inputs.shape[1:] if time_major else (*inputs.shape[:-2], inputs.shape[-1])
        make = functools.partial(self.initialize_carry, shape, rngs)
        from_zeros = modules.starts_from_zeros(self, [jax.nn.initializers.zeros], [FusedStack])
        initial_carry, reset_carry = modules.default_carries(make, initial_carry, resets, reset_carry, from_zeros)
        layers = self._by_layer("layers")
        for reason in (reason_to_scan(cell) for layer in layers for cell in layer):
            if reason is not None:
                raise NotImplementedError(f"{caller.name}: a stack cannot run {reason}; use one RNN per layer instead")
        structure = self._widths(), self.num_layers, self.bidirectional
        return modules.run_stack(
            [[(recurrence_of(cell), packed_params(cell)) for cell in layer] for layer in layers],
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
            keep_order=self.keep_order if keep_order is None else keep_order,
            return_carry=self.return_carry if return_carry is None else return_carry,
            precision=self.precision,
            implementation=self.implementation,
            remat=self.remat,
            caller=caller,
        )

    def initialize_carry(self, input_shape: tuple[int, ...], rngs: Rngs = None) -> tuple[Any, ...]:
        """Returns the carry of a new sequence: the result of `carry_init`, or the learned carry.

        Args:
          input_shape: the shape of the inputs of one step, `[*batch, D]`.
          rngs: the random number generator of `carry_init`, needed unless `carry_init` is zeros.

        Returns:
          A tuple with an entry for each layer, `[*batch, H]` or, for an LSTM, `(c, h)`; if `bidirectional`, a pair
          (forward, backward) of these. The arrays have the dtype `param_dtype`.

        Raises:
          ValueError: `input_shape` is no shape; or `carry_init` is not zeros, and `rngs` is None.
        """
        modules.check_input_shape(self, input_shape, "input_shape, rngs")
        if self.learned_carry:
            return modules.broadcast_carry(self._learned(), input_shape[:-1])
        if self.carry_init is jax.nn.initializers.zeros:
            next_key: Callable[[], Array] = functools.partial(jax.random.key, 0)
        elif rngs is None:
            raise ValueError(
                f"{self._caller()('rngs')} must be an nnx.Rngs, got None, because a carry_init that is not zeros needs "
                "rngs; pass rngs=nnx.Rngs(carry=seed)"
            )
        else:
            next_key = rngs.carry if isinstance(rngs, nnx.Rngs) else rngs

        def make(cell: Any) -> Carry:
            shapes = [(*input_shape[:-1], width) for width in self._widths().values()]
            return modules.one_or_tuple([self.carry_init(next_key(), shape, self.param_dtype) for shape in shapes])

        return self._as_carry("layers", make)

    def _caller(self) -> Caller:
        """Returns how messages name the stack and its arguments."""
        return modules.caller_of(self, xs="inputs", carry="initial_carry", reset_state="reset_carry")

    def _widths(self) -> dict[str, int]:
        """Returns the widths of the arrays of a cell's carry by name; the hidden state is the last."""
        return {"h": self.hidden_features}

    def _make_cell(self, *args: Any, **options: Any) -> FusedCell[Any]:
        """Creates one cell."""
        return self._cell(*args, **options)

    def _learned(self) -> Any:
        """Returns the learned carry, with arrays `[H]`."""
        return self._as_carry("carries", lambda one: one())

    def _by_layer(self, name: str) -> list[tuple[Any, ...]]:
        """Returns the modules at `name` by layer and direction."""
        lists = [getattr(self, name), *([getattr(self, f"{name}_reverse")] if self.bidirectional else [])]
        return list(zip(*lists, strict=True))

    def _as_carry(self, name: str, make: Callable[[Any], Carry]) -> Any:
        """Returns the carry whose entry for each module at `name` is `make(module)`."""
        entries = [tuple(map(make, layer)) for layer in self._by_layer(name)]
        return tuple(entry if self.bidirectional else entry[0] for entry in entries)


class GRU(FusedStack[ReturnsCarry]):
    """A stack of GRUs like `torch.nn.GRU`, with layers, directions, dropout between layers, and episode resets.

    `layers[k]` is the `GRUCell` of layer k, and `layers_reverse[k]` is the `GRUCell` of its backward direction. The
    outputs concatenate the directions: forward, then backward.

    Args:
      in_features: D, the width of the inputs.
      hidden_features: H, the width of every layer and direction.
      num_layers: the number of layers; each runs over the outputs of the previous layer.
      dropout_rate: the rate of the dropout on the outputs of every layer but the last. Each step has its own mask.
        With one layer it has no effect, and a warning says so.
      bidirectional: whether each layer also runs from the last step to the first, with separate weights.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`. Neither layout is transposed.
      return_carry: whether to return `(carry, outputs)` instead of `outputs`.
      reverse: whether to run all layers from the last step to the first. Outputs are in the order computed, last step
        first.
      keep_order: whether to return the outputs in the order of the inputs when `reverse` is set.
      learned_carry: whether sequences and, by default, episodes start from learned parameters of width H, which
        `carry_init` initializes. They are `carries[k].h`, and also `carries[k].c` for an LSTM; those of the backward
        direction are in `carries_reverse[k]`.
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
        "rms" and "layer" create an `RMSNorm` or a `LayerNorm` at `norms[k]`, where k is the layer whose outputs it
        normalizes. A class or a function creates another module when called as `norm(width, rngs=rngs)`. None means no
        norm.
      num_blocks: N, the number of blocks (heads) of the recurrent weights of every layer and direction. The H / N
        consecutive units of a block read the states of their own block alone, and all inputs. N must divide H.
      rngs: the random number generators of the parameters and of dropout.

    Raises:
      ValueError: an argument has an invalid value, or both `bidirectional` and `reverse` are set.

    Examples:
      Two layers, and a second chunk of the sequences, which goes on from the carry of the first:

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import GRU
      >>> rnn = GRU(3, 4, num_layers=2, time_major=True, return_carry=True, rngs=nnx.Rngs(0))
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2))
      >>> carry, ys = rnn(xs, resets=resets)
      >>> carry, ys = rnn(xs, initial_carry=carry, resets=resets)
      >>> ys.shape, [h.shape for h in carry]
      ((5, 2, 4), [(2, 4), (2, 4)])
    """

    _cell = GRUCell


@inherit_descriptions(GRU)
class LSTM(FusedStack[ReturnsCarry]):
    """A stack of LSTMs like `torch.nn.LSTM`: `GRU` with the cell `OptimizedLSTMCell` and carries `(c, h)`.

    Args:
      proj_size: P, the width to which `layers[k].proj` projects hidden states, and so outputs; c stays H wide. None
        means no projection. The weight is `params.w_hr` in `jaxrnn.lstm`. It excludes `num_blocks` > 1.

    Raises:
      ValueError: an argument has an invalid value, both `bidirectional` and `reverse` are set, or both `proj_size` and
        `num_blocks` > 1 are given.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import LSTM
      >>> rnn = LSTM(3, 4, num_layers=2, return_carry=True, rngs=nnx.Rngs(0))
      >>> carry, ys = rnn(jnp.ones((2, 5, 3)), resets=jnp.zeros((2, 5)))
      >>> (c, h), second = carry  # a pair for each layer
      >>> ys.shape, c.shape, h.shape
      ((2, 5, 4), (2, 4), (2, 4))
    """

    _cell = OptimizedLSTMCell

    @modules.passes_options_to(FusedStack.__init__)
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        proj_size: int | None = None,
        return_carry: ReturnsCarry = False,  # type: ignore[assignment]
        rngs: nnx.Rngs,
        **options: Unpack[StackOptions],
    ) -> None:
        if proj_size is not None:
            check_size(f"{type(self).__name__}: proj_size", proj_size)
        modules.check_blocks_without_projection(self._caller(), options.get("num_blocks", 1), proj_size)
        self.proj_size = proj_size
        # mypy takes each type of return_carry by itself
        super().__init__(in_features, hidden_features, return_carry=return_carry, rngs=rngs, **options)  # type: ignore[arg-type]

    def _widths(self) -> dict[str, int]:
        """Returns the widths of c and h by name."""
        return {"c": self.hidden_features, "h": self.hidden_features if self.proj_size is None else self.proj_size}

    def _make_cell(self, *args: Any, **options: Any) -> FusedCell[Any]:
        """Creates one cell, with a projection if `proj_size` is set."""
        if self.proj_size is None:
            return self._cell(*args, **options)
        return ProjectedLSTMCell(*args, proj_size=self.proj_size, **options)


@inherit_descriptions(GRU)
class SimpleRNN(FusedStack[ReturnsCarry]):
    """A stack of simple RNNs like `torch.nn.RNN`: `GRU` with the cell `SimpleCell`.

    Args:
      activation_fn: tanh or relu; another function raises NotImplementedError in the call.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import SimpleRNN
      >>> rnn = SimpleRNN(3, 4, activation_fn=nnx.relu, rngs=nnx.Rngs(0))
      >>> rnn(jnp.ones((2, 5, 3)), resets=jnp.zeros((2, 5))).shape
      (2, 5, 4)
    """

    _cell = SimpleCell

    @modules.passes_options_to(FusedStack.__init__)
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation_fn: Callable[[Array], Array] = nnx.tanh,
        return_carry: ReturnsCarry = False,  # type: ignore[assignment]
        rngs: nnx.Rngs,
        **options: Unpack[StackOptions],
    ) -> None:
        modules.check_function(self._caller(), "activation_fn", activation_fn)
        self.activation_fn = activation_fn
        # mypy takes each type of return_carry by itself
        super().__init__(in_features, hidden_features, return_carry=return_carry, rngs=rngs, **options)  # type: ignore[arg-type]

    def _make_cell(self, *args: Any, **options: Any) -> FusedCell[Any]:
        """Creates one cell."""
        return self._cell(*args, activation_fn=self.activation_fn, **options)


@inherit_descriptions(GRU)
class NormGRU(FusedStack[ReturnsCarry]):
    """A stack of GRUs whose gates see a norm of inputs and state: `GRU` with the cell `NormGRUCell`.

    The norm inside the cells is `cell_norm`; `norm` is between layers.

    Args:
      cell_norm: `norm` of the cells, "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance of that norm.
      update_bias: what is added to the update gate before its activation.
      num_blocks: must be 1, because the norm sees all units.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import NormGRU
      >>> rnn = NormGRU(3, 4, num_layers=2, cell_norm="layer", rngs=nnx.Rngs(0))
      >>> rnn(jnp.ones((2, 5, 3)), resets=jnp.zeros((2, 5))).shape
      (2, 5, 4)
    """

    _cell = NormGRUCell

    @modules.passes_options_to(FusedStack.__init__)
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        cell_norm: Literal["rms", "layer"] = "rms",
        epsilon: float = 1e-4,
        update_bias: float = -1.0,
        return_carry: ReturnsCarry = False,  # type: ignore[assignment]
        rngs: nnx.Rngs,
        **options: Unpack[StackOptions],
    ) -> None:
        check_norm_and_constants(modules.caller_of(self, norm="cell_norm"), cell_norm, epsilon, update_bias)
        modules.check_blocks_without_norm(self._caller(), options.get("num_blocks", 1))
        self.cell_norm = cell_norm
        self.epsilon = epsilon
        self.update_bias = update_bias
        # mypy takes each type of return_carry by itself
        super().__init__(in_features, hidden_features, return_carry=return_carry, rngs=rngs, **options)  # type: ignore[arg-type]

    def _make_cell(self, *args: Any, **options: Any) -> FusedCell[Any]:
        """Creates one cell."""
        options |= {"norm": self.cell_norm, "epsilon": self.epsilon, "update_bias": self.update_bias}
        return self._cell(*args, **options)
