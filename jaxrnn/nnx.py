"""Flax NNX modules over the functions of `jaxrnn`: the arguments, parameters and initial values of Flax's own.

| instead of                                             | import                                     |
| ------------------------------------------------------ | ------------------------------------------ |
| `nnx.RNN`                                              | `RNN`                                      |
| `nnx.GRUCell`, `nnx.LSTMCell`, `nnx.OptimizedLSTMCell` | `GRUCell`, `LSTMCell`, `OptimizedLSTMCell` |
| `nnx.RMSNorm`, `nnx.LayerNorm`                         | `RMSNorm`, `LayerNorm`                     |

`nnx.Bidirectional` takes an `RNN` from here. `GRU` and `LSTM` are stacks of layers.

Resets, wherever a module takes them: `resets[t]` is nonzero if step t begins an episode. It is the done that step
t - 1 returned, the one stored beside the observation of step t; the done of step t belongs to `resets[t + 1]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer
from jax import Array

from jaxrnn import modules
from jaxrnn.checks import Implementation, must_scan
from jaxrnn.reference import GRUParams, LSTMParams

Carry = Any  # an array [*batch, H], or (c, h) for an LSTM
Rngs = nnx.Rngs | nnx.RngStream | None

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "LayerNorm", "OptimizedLSTMCell", "RMSNorm"]


class FusedCell(nnx.RNNCellBase):
    """What the cells here add to Flax's, which come after this class in their bases."""

    dtype: Dtype | None
    param_dtype: Dtype

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, hidden_features, **options)  # type: ignore[call-arg]
        self.precision = precision
        self.implementation = implementation

    def __call__(self, carry: Carry, inputs: Array) -> tuple[Carry, Array]:
        """Takes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM.
          inputs: `[*batch, D]`; its batch axes and those of the carry broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the wider of the dtype computed in and that of the carry.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell.
        """
        if must_scan(reason_to_scan(self), self.precision, self.implementation, "nnx.scan"):
            return super().__call__(carry, inputs)
        dtype = jnp.result_type(inputs, self.param_dtype) if self.dtype is None else self.dtype
        carry = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), carry)
        carry, inputs = modules.broadcast_batch_axes(carry, inputs)
        options = {"precision": self.precision, "implementation": self.implementation}
        carry, ys, _ = run_fused(self, carry, inputs[None], **options)
        return carry, ys[0]


class GRUCell(FusedCell, nnx.GRUCell):
    """`flax.nnx.GRUCell` over `jaxrnn.gru`: the same parameters, initial values and results.

    Flax's has no recurrent bias of n, unlike `linen.GRUCell`, and so has this one, for as long as Flax's has none. One
    that is there, as `hn_bias` ([flax#5595](https://github.com/google/flax/pull/5595)) or in `dense_h`, is used.

    Attributes:
      in_features: D.
      hidden_features: H; further arguments and attributes as in Flax.
      gate_fn: anything but sigmoid, or `activation_fn` anything but tanh, runs as Flax's own cell, under `nnx.scan`.
      dtype: what matrices are multiplied in. The carry keeps its own dtype: float32 with `dtype=jnp.bfloat16`.
      precision: of the multiplications, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; "triton" raises NotImplementedError with another `gate_fn` or `activation_fn`.
    """


class LSTMCell(FusedCell, nnx.LSTMCell):
    """`flax.nnx.LSTMCell` over `jaxrnn.lstm`: the same parameters, initial values and results. Carry `(c, h)`.

    Attributes:
      in_features: as all attributes, as in `GRUCell`.
    """


class OptimizedLSTMCell(FusedCell, nnx.OptimizedLSTMCell):
    """`flax.nnx.OptimizedLSTMCell` over `jaxrnn.lstm`: the same parameters, initial values and results. Carry `(c, h)`.

    Attributes:
      in_features: as all attributes, as in `GRUCell`.
    """


class ProjectedLSTMCell(OptimizedLSTMCell):
    """A cell of `LSTM` with a projection: `dense_h` takes P units, and `proj` gives them."""

    def __init__(self, in_features: int, hidden_features: int, *, proj_size: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(in_features, hidden_features, rngs=rngs, **options)
        dtypes: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
        inits: Any = {"kernel_init": options["recurrent_kernel_init"], "bias_init": options["bias_init"]}
        self.dense_h = nnx.Linear(proj_size, 4 * hidden_features, **inits, **dtypes)
        self.proj = nnx.Linear(hidden_features, proj_size, use_bias=False, kernel_init=options["kernel_init"], **dtypes)


GATES = ["ii", "if_", "ig", "io"], ["hi", "hf", "hg", "ho"]
# The layers of the cells that can be fused: for the product with x, and for that with h.
LAYERS: dict[type, tuple[list[str], list[str]]] = {
    nnx.GRUCell: (["dense_i"], ["dense_h"]),
    nnx.LSTMCell: GATES,
    nnx.OptimizedLSTMCell: (["dense_i"], ["dense_h"]),
    GRUCell: (["dense_i"], ["dense_h"]),
    LSTMCell: GATES,
    OptimizedLSTMCell: (["dense_i"], ["dense_h"]),
    ProjectedLSTMCell: (["dense_i"], ["dense_h"]),
}
KERNEL_INIT, RECURRENT_KERNEL_INIT = nnx.initializers.lecun_normal(), nnx.initializers.orthogonal()


def packed_params(cell: Any) -> GRUParams | LSTMParams:
    """The parameters of a cell that can be fused, as `jaxrnn.gru` or `jaxrnn.lstm` takes them."""

    def packed(layers: list[str], name: str) -> Any:
        parts = [getattr(getattr(cell, layer), name) for layer in layers]
        return None if parts[0] is None else jnp.concatenate([part[...] for part in parts], axis=-1)

    of_x, of_h = LAYERS[type(cell)]
    w_ih, w_hh, b_i, b_h = packed(of_x, "kernel"), packed(of_h, "kernel"), packed(of_x, "bias"), packed(of_h, "bias")
    if not isinstance(cell, nnx.GRUCell):
        return LSTMParams(w_ih, w_hh, b_h, packed(["proj"], "kernel") if isinstance(cell, ProjectedLSTMCell) else None)
    hn_bias = getattr(cell, "hn_bias", None)
    b_hn = jnp.zeros(cell.hidden_features, b_i.dtype) if hn_bias is None else hn_bias[...]
    if b_h is None:
        return GRUParams(w_ih, w_hh, b_i, b_hn)
    of_rz, of_n = jnp.split(b_h, [2 * cell.hidden_features])
    return GRUParams(w_ih, w_hh, b_i.at[: of_rz.size].add(of_rz), b_hn + of_n)


def run_fused(cell: Any, carry: Carry, xs: Array, **options: Any) -> tuple[Carry, Array, Carry | None]:
    """`modules.run` with the parameters of a cell that can be fused."""
    params = packed_params(cell)
    if isinstance(params, GRUParams) and isinstance(carry, (tuple, list)):
        raise ValueError(f"the carry of a GRU is one array [*batch, H], got a {type(carry).__name__}")
    if isinstance(params, LSTMParams) and (not isinstance(carry, (tuple, list)) or len(carry) != 2):
        raise ValueError(f"the carry of an LSTM is a pair (c, h), got {type(carry).__name__}")
    dtype = dtypes.canonicalize_dtype(xs, jax.tree.leaves(carry)[-1], *params, dtype=cell.dtype)
    return modules.run(modules.cast(params, dtype), carry, jnp.asarray(xs, dtype), **options)


def reason_to_scan(cell: Any) -> str | None:
    """Why `cell` can only run step by step, under `nnx.scan`; None if it can run as `jaxrnn.gru` or `jaxrnn.lstm`."""
    if type(cell) not in LAYERS:
        return f"a {type(cell).__name__}; GRUCell, LSTMCell and OptimizedLSTMCell, here or in flax.nnx, can be fused"
    if not modules.has_usual_activations(cell):
        return "a cell with another gate_fn than sigmoid or another activation_fn than tanh"
    if getattr(cell, "promote_dtype", dtypes.promote_dtype) is not dtypes.promote_dtype:
        return "a cell with its own promote_dtype"
    for name in (name for names in LAYERS[type(cell)] for name in names):
        layer = getattr(cell, name)
        if type(layer) is not nnx.Linear or layer.dot_general is not jax.lax.dot_general:
            return f"a cell whose {name} is not a plain nnx.Linear"
    known = {name for names in LAYERS[type(cell)] for name in names}
    known.add("hn_bias" if isinstance(cell, nnx.GRUCell) else "proj")
    if unknown := sorted(nnx.state(cell, nnx.Param).keys() - known):
        return f"a cell with the parameter {unknown[0]}, which jaxrnn does not know"
    return None


class RNN(nnx.RNN):
    """`flax.nnx.RNN` with episode resets, in one launch: runs `cell` over time.

        rnn = RNN(GRUCell(64, 128, rngs=rngs), time_major=True, return_carry=True)
        carry, ys = rnn(xs, initial_carry=carry, resets=resets)

    GRU, LSTM and OptimizedLSTM cells, those here or Flax's, run as `jaxrnn.gru` or `jaxrnn.lstm`. Any other cell, one
    with its own `gate_fn`, `activation_fn`, `promote_dtype` or layers, and an RNN with its own `state_axes` or
    `broadcast_rngs` run under `nnx.scan`; they take `resets` too.

    Attributes:
      cell: the cell.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`; no transpose either way.
      return_carry: return `(carry, outputs)` instead of `outputs`.
      reverse: run from the last step to the first. Outputs come in the order computed, last step first.
      keep_order: with `reverse`, return the outputs in the order of the inputs.
      unroll: steps to a loop iteration of `nnx.scan`, where that is what runs.
      state_axes: of the cell's state, where `nnx.scan` runs.
      broadcast_rngs: as `state_axes`.
      rngs: for `cell.initialize_carry`.
      precision: of the matmuls, as in `jaxrnn.gru`; None takes the cell's.
      implementation: as in `jaxrnn.gru`; None takes the cell's, and always works.
    """

    def __init__(
        self,
        cell: nnx.RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: Mapping[str, Any] | None = None,
        broadcast_rngs: Any = None,
        rngs: nnx.Rngs | nnx.RngStream | bool = True,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
    ) -> None:
        super().__init__(
            cell,
            time_major=time_major,
            return_carry=return_carry,
            reverse=reverse,
            keep_order=keep_order,
            unroll=unroll,
            state_axes=state_axes,
            broadcast_rngs=broadcast_rngs,
            rngs=rngs,
        )
        self.precision = precision
        self.implementation = implementation

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Carry | None = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Rngs = None,
        resets: Array | None = None,
        reset_carry: Carry | None = None,
    ) -> Any:
        """Runs the cell over `inputs`, starting afresh wherever `resets` is nonzero.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`.
          initial_carry: what the first step sees, `[*batch, H]` or a pair `(c, h)`; by default `cell.initialize_carry`.
          seq_lengths: `[*batch]` integers. The carry returned is the one at the end of each sequence (`initial_carry`
            if its length is 0); outputs after it are not zeroed. `reverse` leaves padding at the end.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          rngs: for `cell.initialize_carry`; by default the attribute.
          resets: `[*batch, T]`, or `[T, *batch]` if `time_major`, any dtype; nonzero at the first step of an episode,
            that is, the *previous* step's done. That step sees `reset_carry`. With `reverse` the first step of an
            episode is the one computed first, its last in time.
          reset_carry: what an episode starts from, by default `cell.initialize_carry`: `[H]`, `[*batch, H]` or one for
            every step `[*batch, T, H]` (`[T, *batch, H]`), or a pair of such for an LSTM. Takes gradients.

        Returns:
          `outputs [*batch, T, H]` (`[T, *batch, H]`), or `(carry, outputs)` if `return_carry`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell or input; the message says why.
        """
        time_major = self.time_major if time_major is None else time_major
        modules.check_reset_carry(resets, reset_carry)
        carry_init = getattr(self.cell, "carry_init", None)
        is_random = carry_init is not None and carry_init is not jax.nn.initializers.zeros
        if initial_carry is None or (resets is not None and reset_carry is None and is_random):
            time_axis = 0 if time_major else inputs.ndim - self.cell.num_feature_axes - 1
            rngs = self.rngs if rngs is None else rngs
            rngs = rngs.carry.fork() if isinstance(rngs, nnx.Rngs) else rngs
            default = self.cell.initialize_carry(inputs.shape[:time_axis] + inputs.shape[time_axis + 1 :], rngs)
            if resets is not None and reset_carry is None and is_random:
                reset_carry = default
            initial_carry = default if initial_carry is None else initial_carry
        return modules.run_over_time(
            functools.partial(self.run, time_major=time_major),
            inputs,
            initial_carry,
            resets=resets,
            reset_carry=reset_carry,
            seq_lengths=seq_lengths,
            feature_axes=self.cell.num_feature_axes,
            time_major=time_major,
            reverse=self.reverse if reverse is None else reverse,
            keep_order=self.keep_order if keep_order is None else keep_order,
            return_carry=self.return_carry if return_carry is None else return_carry,
        )

    def run(
        self,
        carry: Carry,
        xs: Array,
        *,
        resets: Array | None,
        reset_carry: Carry | None,
        reverse: bool,
        time_major: bool,
        return_carries: bool,
    ) -> tuple[Carry, Array, Carry | None]:
        """Runs the cell over time, fused if it can be; returns `(carry, ys, carries of every step if wanted)`."""
        precision = getattr(self.cell, "precision", None) if self.precision is None else self.precision
        implementation = getattr(self.cell, "implementation", None)
        implementation = implementation if self.implementation is None else self.implementation
        reason = reason_to_scan(self.cell)
        if self.broadcast_rngs is not None or self.state_axes != DEFAULT_STATE_AXES:
            reason = "an RNN with other state_axes or broadcast_rngs than by default"
        if must_scan(reason, precision, implementation, "nnx.scan"):
            time_axis = 0 if time_major else xs.ndim - self.cell.num_feature_axes - 1
            return self.scan(carry, xs, time_axis, resets, reset_carry, reverse, return_carries)
        return run_fused(
            self.cell,
            carry,
            xs,
            resets=resets,
            reset_state=reset_carry,
            reverse=reverse,
            time_major=time_major,
            return_carries=return_carries,
            precision=precision,
            implementation=implementation,
        )

    def scan(
        self,
        carry: Carry,
        xs: Array,
        time_axis: int,
        resets: Array | None,
        reset_carry: Carry | None,
        reverse: bool,
        return_carries: bool,
    ) -> tuple[Carry, Array, Carry | None]:
        """Runs any cell with `nnx.scan`; returns as `run` does."""
        shape = xs.shape[: xs.ndim - self.cell.num_feature_axes]
        stepped, reset = modules.with_resets(carry, resets, reset_carry, shape, time_axis)
        broadcast_rngs = nnx.All(nnx.RngState, self.broadcast_rngs)
        state_axes = nnx.StateAxes({broadcast_rngs: None, **self.state_axes})  # type: ignore[misc]

        # as Flax's does it: random numbers are new at every call, and the cell's state is what the scan carries
        @nnx.split_rngs(splits=1, only=self.broadcast_rngs, squeeze=True)
        @graph_scan(in_axes=(state_axes, nnx.Carry, 0), out_axes=(nnx.Carry, 0), unroll=self.unroll, reverse=reverse)
        def run(cell: Any, carry: Carry, inputs: Any) -> tuple[Carry, tuple[Array, Carry | None]]:
            x, *of_step = inputs
            carry, y = cell(reset(carry, *of_step), x)
            return carry, (y, carry if return_carries else None)

        time_first = [None if x is None else jnp.moveaxis(x, time_axis, 0) for x in (xs, resets)]
        carry, outputs = run(self.cell, carry, (*time_first, stepped))
        ys, carries = jax.tree.map(lambda x: jnp.moveaxis(x, 0, time_axis), outputs)
        return carry, ys, carries


# `nnx.compat` came with a `nnx.scan` that no longer takes modules whose state is carried.
graph_scan: Any = getattr(nnx, "compat", nnx).scan
DEFAULT_STATE_AXES = nnx.StateAxes({...: nnx.Carry})  # type: ignore[arg-type]


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` over `jaxrnn.rms_norm`: the same parameters, initial values and results.

    `reduction_axes` and `feature_axes` must be the last axis, and there is no `mask`, `axis_name` or
    `axis_index_groups`: these raise NotImplementedError.

    Attributes:
      num_features: N.
      epsilon: added to the mean square, inside the root; further arguments and attributes as in Flax.
      dtype: of the result, and what inputs are rounded to first; None: what inputs and parameters promote to. It is
        computed in float32.
      use_fast_variance: changes nothing: the variance is always the mean of squared differences.
      implementation: as in `jaxrnn.rms_norm`.
    """

    def __init__(self, num_features: int, *, implementation: Implementation = None, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.implementation = implementation

    def __call__(self, x: Array, mask: Array | None = None, *, residual: Array | None = None) -> Any:
        """Normalises the last axis.

        Args:
          x: `[*rows, N]`.
          mask: Flax's; None.
          residual: of the shape and dtype of `x`, added to it first, in the same pass. Neither is rounded to `dtype`.

        Returns:
          `y`, of the shape of `x`; with a residual `(y, x + residual)`, the latter in the dtype of `x`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this input, or an attribute is one that Flax alone
            has; the message says which.
        """
        return run_norm(self, "rms", x, residual, mask, ("scale",))


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` over `jaxrnn.layer_norm`: the same parameters, initial values and results.

    Attributes:
      num_features: as all attributes, as in `RMSNorm`.
    """

    def __init__(self, num_features: int, *, implementation: Implementation = None, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.implementation = implementation

    def __call__(self, x: Array, *, mask: Array | None = None, residual: Array | None = None) -> Any:
        """Normalises the last axis; everything is as in `RMSNorm`."""
        return run_norm(self, "layer", x, residual, mask, ("scale", "bias"))


def run_norm(norm: Any, kind: str, x: Array, residual: Array | None, mask: Array | None, names: tuple[str, ...]) -> Any:
    """Normalises `x` with the parameters of these names of a module, those that it has."""
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError("x must be [*rows, N], got a scalar")
    modules.check_norm(norm, mask, x.ndim)
    given = [None if getattr(norm, name) is None else getattr(norm, name)[...] for name in names]
    promoted = norm.promote_dtype((x, *given), dtype=norm.dtype)
    dtype = dtypes.canonicalize_dtype(*promoted, dtype=norm.dtype)
    # inputs that promotion only widens are read as they are
    is_wider = norm.promote_dtype is dtypes.promote_dtype and jnp.promote_types(x.dtype, dtype) == dtype
    if residual is None and not is_wider:
        x = promoted[0]
    scale, bias = (*promoted[1:], None)[:2]
    options = {"epsilon": norm.epsilon, "implementation": norm.implementation}
    return modules.normalize(kind, x, scale, bias, residual, dtype, **options)


class LearnedCarry(nnx.Module):
    """What sequences and episodes of one cell start from: a parameter `[H]` for each array of its carry."""

    def __init__(self, widths: dict[str, int], init: Initializer, dtype: Dtype, rngs: nnx.Rngs) -> None:
        self.names = tuple(widths)
        for name, width in widths.items():
            setattr(self, name, nnx.Param(init(rngs.params(), (width,), dtype)))

    def __call__(self) -> Carry:
        """Returns `[H]`, or `(c, h)` of such."""
        carry = tuple(getattr(self, name)[...] for name in self.names)
        return carry if len(carry) > 1 else carry[0]


class FusedStack(nnx.Module):
    """What the stacks share."""

    _cell: ClassVar[type[FusedCell]] = FusedCell
    proj_size: int | None = None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        num_layers: int = 1,
        dropout_rate: float = 0.0,
        bidirectional: bool = False,
        time_major: bool = False,
        return_carry: bool = False,
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
        rngs: nnx.Rngs,
    ) -> None:
        modules.check_stack(num_layers, dropout_rate, bidirectional, reverse, self.proj_size, norm)
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
        directions = 2 if bidirectional else 1
        layers = [
            [
                self.make_cell(
                    in_features if k == 0 else directions * self.widths()["h"],
                    hidden_features,
                    dtype=dtype,
                    param_dtype=param_dtype,
                    kernel_init=kernel_init,
                    recurrent_kernel_init=recurrent_kernel_init,
                    bias_init=bias_init,
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
            make = functools.partial(LearnedCarry, self.widths(), carry_init, param_dtype, rngs)
            self.carries = nnx.List([make() for _ in range(num_layers)])
            if bidirectional:
                self.carries_reverse = nnx.List([make() for _ in range(num_layers)])
        if isinstance(norm, nnx.Module):
            raise ValueError("norm must make a module for each layer: pass its class or a function, not a module")
        if isinstance(norm, str):
            options: Any = {"dtype": dtype, "param_dtype": param_dtype, "implementation": implementation}
            norm = functools.partial({"rms": RMSNorm, "layer": LayerNorm}[norm], **options)
        make_norm: Any = norm
        width = directions * self.widths()["h"]
        self.norms: nnx.List[Any] | None = (
            None if norm is None else nnx.List([make_norm(width, rngs=rngs) for _ in range(num_layers - 1)])
        )
        if dropout_rate > 0.0:
            self.dropout = nnx.Dropout(dropout_rate, rngs=rngs)

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Any = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        deterministic: bool | None = None,
        rngs: Rngs = None,
        resets: Array | None = None,
        reset_carry: Any = None,
    ) -> Any:
        """Runs all layers over `inputs`, starting afresh wherever `resets` is nonzero.

        A carry is a tuple with an entry for each layer. An entry is `[*batch, H]` or, for an LSTM, `(c, h)`; if
        `bidirectional`, a pair of such: forward, backward.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`. Any number of batch axes.
          initial_carry: what each direction's first step sees; by default what `initialize_carry` returns.
          seq_lengths: `[*batch]` integers. The carry returned is the one at the end of each sequence (`initial_carry`
            if its length is 0), and the backward direction starts there; outputs after it mean nothing and are not
            zeroed. May come with `resets`.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          deterministic: leave dropout out; by default as `eval()` and `train()` of this module say.
          rngs: for dropout, by default those given when the module was made; and for a random `carry_init`.
          resets: `[*batch, T]`, or `[T, *batch]` if `time_major`, any dtype; nonzero at the first step of an episode,
            that is, the *previous* step's done. That step sees `reset_carry`, in every layer. The backward direction of
            a bidirectional stack starts an episode from `reset_carry` at its last step, the one before the next that
            `resets` marks, so that neither direction sees another episode. With `reverse`, as in `RNN`, `resets` is
            nonzero at the step of an episode that is computed first, its last in time.
          reset_carry: what an episode starts from: as a carry, or with `[H]` or a value for every step `[*batch, T, H]`
            (`[T, *batch, H]`) in place of its arrays. Of those a direction takes the value of the step that it starts
            the episode at. By default what `initialize_carry` returns. Takes gradients.

        Returns:
          `outputs [*batch, T, H]` (`[T, *batch, H]`), or `(carry, outputs)` if `return_carry`. If `bidirectional`,
          outputs are 2 H wide: forward, then backward.

        Raises:
          ValueError: shapes, dtypes or structures disagree.
          NotImplementedError: the named implementation cannot run this; the message says why.
        """
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        modules.check_stack(self.num_layers, self.dropout_rate, self.bidirectional, reverse)
        modules.check_reset_carry(resets, reset_carry)

        def between(k: int, xs: Array) -> Array:
            if self.norms is not None:
                xs = self.norms[k](xs)
            return self.dropout(xs, deterministic=deterministic, rngs=rngs) if self.dropout_rate > 0.0 else xs

        is_random = self.carry_init is not jax.nn.initializers.zeros and not self.learned_carry
        if initial_carry is None or (is_random and resets is not None and reset_carry is None):
            shape = inputs.shape[1:] if time_major else (*inputs.shape[:-2], inputs.shape[-1])
            default = self.initialize_carry(shape, rngs)
            initial_carry = default if initial_carry is None else initial_carry
            if is_random and resets is not None and reset_carry is None:
                reset_carry = default
        if self.learned_carry and reset_carry is None:
            reset_carry = self.learned()
        layers = self.by_layer("layers")
        for reason in (reason_to_scan(cell) for layer in layers for cell in layer):
            if reason is not None:
                raise NotImplementedError(f"a stack cannot run {reason}: chain RNNs of such cells")
        structure = tuple(self.widths().values()), self.num_layers, self.bidirectional
        return modules.run_stack(
            [[packed_params(cell) for cell in layer] for layer in layers],
            modules.by_direction("initial_carry", initial_carry, *structure),
            inputs,
            resets=resets,
            reset_carry=None if reset_carry is None else modules.by_direction("reset_carry", reset_carry, *structure),
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
        )

    def initialize_carry(self, input_shape: tuple[int, ...], rngs: Rngs = None) -> Any:
        """Returns the carry of a new sequence: what `carry_init` makes, or the learned one.

        Args:
          input_shape: of the inputs of one step, `[*batch, D]`.
          rngs: for `carry_init`, if it is not zeros.

        Raises:
          ValueError: `carry_init` is not zeros, and there are no `rngs`.
        """
        if self.learned_carry:
            return modules.broadcast_carry(self.learned(), input_shape[:-1])
        if self.carry_init is jax.nn.initializers.zeros:
            next_key: Callable[[], Array] = functools.partial(jax.random.key, 0)
        elif rngs is None:
            raise ValueError("a carry_init that is not zeros needs rngs: pass rngs=nnx.Rngs(carry=seed)")
        else:
            next_key = rngs.carry if isinstance(rngs, nnx.Rngs) else rngs

        def make(cell: Any) -> Carry:
            shapes = [(*input_shape[:-1], width) for width in self.widths().values()]
            carry = tuple(self.carry_init(next_key(), shape, self.param_dtype) for shape in shapes)
            return carry if len(carry) > 1 else carry[0]

        return self.as_carry("layers", make)

    def widths(self) -> dict[str, int]:
        """The widths of the arrays of a cell's carry, that of the hidden state last."""
        return {"h": self.hidden_features}

    def make_cell(self, *args: Any, **options: Any) -> FusedCell:
        """One of the cells."""
        return self._cell(*args, **options)

    def learned(self) -> Any:
        """The learned carry, with arrays `[H]`."""
        return self.as_carry("carries", lambda one: one())

    def by_layer(self, name: str) -> list[tuple[Any, ...]]:
        """The modules at `name`, by layer and direction."""
        lists = [getattr(self, name), *([getattr(self, f"{name}_reverse")] if self.bidirectional else [])]
        return list(zip(*lists, strict=True))

    def as_carry(self, name: str, make: Callable[[Any], Carry]) -> Any:
        """The carry of which `make` gives the entry for each of the modules at `name`."""
        entries = [tuple(map(make, layer)) for layer in self.by_layer(name)]
        return tuple(entry if self.bidirectional else entry[0] for entry in entries)


class GRU(FusedStack):
    """A stack of GRUs as `torch.nn.GRU` has it: layers, directions, dropout between layers; and episode resets.

        gru = GRU(64, 128, num_layers=2, time_major=True, return_carry=True, rngs=nnx.Rngs(0))
        carry, ys = gru(xs, initial_carry=carry, resets=resets)

    `layers[k]` is the `GRUCell` of layer k and `layers_reverse[k]` that of its backward direction. In the outputs the
    directions are concatenated: forward, then backward.

    Attributes:
      in_features: D, the width of the inputs.
      hidden_features: H, the width of every layer and direction.
      num_layers: how many layers there are, each over the outputs of the one before.
      dropout_rate: of the dropout over the outputs of every layer but the last; a new mask for every step.
      bidirectional: whether each layer also runs from the last step to the first, with weights of its own.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`; no transpose either way.
      return_carry: return `(carry, outputs)` instead of `outputs`.
      reverse: run all layers from the last step to the first. Outputs come in the order computed, last step first.
      keep_order: with `reverse`, return the outputs in the order of the inputs.
      learned_carry: sequences and, by default, episodes start from parameters of width H, which `carry_init` makes:
        `carries[k].h`, of an LSTM `carries[k].c` too, and the like in `carries_reverse`.
      dtype: what matrices are multiplied in; the carry keeps its own. None: what inputs and parameters promote to.
      param_dtype: of the parameters and the carry that `initialize_carry` makes.
      kernel_init: of the input weights.
      recurrent_kernel_init: of the recurrent weights.
      bias_init: of the biases.
      carry_init: of what sequences and episodes start from.
      precision: of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; None always works.
      remat: as in `jaxrnn.gru`.
      norm: normalises the outputs of every layer but the last, both directions together, before dropout: "rms" or
        "layer" for a `RMSNorm` or `LayerNorm`, at `norms[k]`, where k is the layer whose outputs it takes; or what
        makes another module, `norm(width, rngs=rngs)`, as a class does. None: nothing.
      rngs: for the parameters, then for dropout.

    Raises:
      ValueError: there is no such stack.
    """

    _cell = GRUCell


class LSTM(FusedStack):
    """A stack of LSTMs as `torch.nn.LSTM` has it: `GRU` with the cell `OptimizedLSTMCell` and carries `(c, h)`.

    Attributes:
      in_features: as all attributes not named here, as in `GRU`.
      proj_size: P, if hidden states, and so outputs, shall be projected to P units, with `layers[k].proj`; c stays H
        wide. As `params.w_hr` in `jaxrnn.lstm`.
    """

    _cell = OptimizedLSTMCell

    def __init__(self, in_features: int, hidden_features: int, *, proj_size: int | None = None, **options: Any) -> None:
        self.proj_size = proj_size
        super().__init__(in_features, hidden_features, **options)

    def widths(self) -> dict[str, int]:
        """The widths of c and h."""
        return {"c": self.hidden_features, "h": self.hidden_features if self.proj_size is None else self.proj_size}

    def make_cell(self, *args: Any, **options: Any) -> FusedCell:
        """One of the cells."""
        if self.proj_size is None:
            return self._cell(*args, **options)
        return ProjectedLSTMCell(*args, proj_size=self.proj_size, **options)
