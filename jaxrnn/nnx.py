"""Flax NNX modules that run the functions of `jaxrnn`, with the arguments, parameters and initial values of Flax.

| instead of                                             | import                                     |
| ------------------------------------------------------ | ------------------------------------------ |
| `nnx.RNN`                                              | `RNN`                                      |
| `nnx.GRUCell`, `nnx.LSTMCell`, `nnx.OptimizedLSTMCell` | `GRUCell`, `LSTMCell`, `OptimizedLSTMCell` |
| `nnx.RMSNorm`, `nnx.LayerNorm`                         | `RMSNorm`, `LayerNorm`                     |

`nnx.Bidirectional` accepts an `RNN` of this module. `GRU` and `LSTM` are stacks of layers.

All modules follow one convention for resets: `resets[t]` is nonzero if step t is the first of an episode. It is the
done flag that step t - 1 returned, which is stored with the observation of step t. The done flag of step t belongs to
`resets[t + 1]`.
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
from jaxrnn.cells import GRUParams, LSTMParams
from jaxrnn.checks import Implementation, must_scan

Carry = Any  # an array [*batch, H], or (c, h) for an LSTM
Rngs = nnx.Rngs | nnx.RngStream | None

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "LayerNorm", "OptimizedLSTMCell", "RMSNorm"]


class FusedCell(nnx.RNNCellBase):
    """The base class that precedes Flax's class among the bases of each cell and replaces its computation."""

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
        """Computes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM.
          inputs: `[*batch, D]`; the batch axes of inputs and carry are broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the dtype to which the computation dtype and the carry's dtype promote.

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
    """`flax.nnx.GRUCell` computed by `jaxrnn.gru`, with the same parameters, initial values and results.

    Flax's cell has no recurrent bias of n, unlike `linen.GRUCell`, and this cell has none while Flax's has none. If the
    bias exists, as `hn_bias` ([flax#5595](https://github.com/google/flax/pull/5595)) or in `dense_h`, it is used.

    Attributes:
      in_features: D.
      hidden_features: H. All arguments and attributes not listed here are Flax's.
      gate_fn: with a function other than sigmoid, or an `activation_fn` other than tanh, Flax's own cell runs, and in
        an `RNN` it runs under `nnx.scan`.
      dtype: the dtype of the matmul operands. The carry keeps its own dtype, so it may be float32 with
        `dtype=jnp.bfloat16`.
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; "triton" raises NotImplementedError with another `gate_fn` or `activation_fn`.
    """


class LSTMCell(FusedCell, nnx.LSTMCell):
    """`flax.nnx.LSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Attributes:
      in_features: D. All attributes are those of `GRUCell`.
    """


class OptimizedLSTMCell(FusedCell, nnx.OptimizedLSTMCell):
    """`flax.nnx.OptimizedLSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Attributes:
      in_features: D. All attributes are those of `GRUCell`.
    """


class ProjectedLSTMCell(OptimizedLSTMCell):
    """The cell of an `LSTM` with a projection: `proj` maps H units to P, and `dense_h` takes the P units."""

    def __init__(self, in_features: int, hidden_features: int, *, proj_size: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(in_features, hidden_features, rngs=rngs, **options)
        dtypes: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
        inits: Any = {"kernel_init": options["recurrent_kernel_init"], "bias_init": options["bias_init"]}
        self.dense_h = nnx.Linear(proj_size, 4 * hidden_features, **inits, **dtypes)
        self.proj = nnx.Linear(hidden_features, proj_size, use_bias=False, kernel_init=options["kernel_init"], **dtypes)


GATES = ["ii", "if_", "ig", "io"], ["hi", "hf", "hg", "ho"]
# The layers of each cell that can be fused: those that multiply x, then those that multiply h.
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
    """Returns the parameters of a cell that can be fused, as `jaxrnn.gru` or `jaxrnn.lstm` takes them."""

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
    """Calls `modules.run` with the parameters of a cell that can be fused, after checking the carry's structure."""
    params = packed_params(cell)
    if isinstance(params, GRUParams) and isinstance(carry, (tuple, list)):
        raise ValueError(f"the carry of a GRU is one array [*batch, H], got a {type(carry).__name__}")
    if isinstance(params, LSTMParams) and (not isinstance(carry, (tuple, list)) or len(carry) != 2):
        raise ValueError(f"the carry of an LSTM is a pair (c, h), got {type(carry).__name__}")
    dtype = dtypes.canonicalize_dtype(xs, jax.tree.leaves(carry)[-1], *params, dtype=cell.dtype)
    return modules.run(modules.cast(params, dtype), carry, jnp.asarray(xs, dtype), **options)


def reason_to_scan(cell: Any) -> str | None:
    """Returns why `cell` has to run under `nnx.scan`, or None if `jaxrnn.gru` or `jaxrnn.lstm` can run it."""
    if type(cell) not in LAYERS:
        return f"a {type(cell).__name__} (only GRUCell, LSTMCell and OptimizedLSTMCell of jaxrnn or Flax can be fused)"
    if not modules.has_usual_activations(cell):
        return "a cell whose gate_fn is not sigmoid or whose activation_fn is not tanh"
    if getattr(cell, "promote_dtype", dtypes.promote_dtype) is not dtypes.promote_dtype:
        return "a cell with its own promote_dtype"
    for name in (name for names in LAYERS[type(cell)] for name in names):
        layer = getattr(cell, name)
        if type(layer) is not nnx.Linear or layer.dot_general is not jax.lax.dot_general:
            return f"a cell whose {name} is not a plain nnx.Linear"
    known = {name for names in LAYERS[type(cell)] for name in names}
    known.add("hn_bias" if isinstance(cell, nnx.GRUCell) else "proj")
    if unknown := sorted(nnx.state(cell, nnx.Param).keys() - known):
        return f"a cell with the parameter {unknown[0]}, which jaxrnn does not support"
    return None


class RNN(nnx.RNN):
    """`flax.nnx.RNN` with episode resets: runs `cell` over time in one launch.

        rnn = RNN(GRUCell(64, 128, rngs=rngs), time_major=True, return_carry=True)
        carry, ys = rnn(xs, initial_carry=carry, resets=resets)

    `jaxrnn.gru` and `jaxrnn.lstm` run the GRU, LSTM and OptimizedLSTM cells of this module and of Flax. `nnx.scan` runs
    any other cell, a cell with another `gate_fn`, `activation_fn`, `promote_dtype` or layers, and an RNN whose
    `state_axes` or `broadcast_rngs` is not the default; these take `resets` too.

    Attributes:
      cell: the cell.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`. Neither layout is transposed.
      return_carry: whether to return `(carry, outputs)` instead of `outputs`.
      reverse: whether to run from the last step to the first. Outputs are in the order computed, last step first.
      keep_order: whether to return the outputs in the order of the inputs when `reverse` is set.
      unroll: the number of steps per loop iteration of `nnx.scan`, if `nnx.scan` runs the cell.
      state_axes: the scan axes of the cell's state in `nnx.scan`.
      broadcast_rngs: the filter of the random states that `nnx.scan` broadcasts over the steps.
      rngs: the random number generator of `cell.initialize_carry`.
      precision: the precision of the matmuls, as in `jaxrnn.gru`; None uses the cell's.
      implementation: as in `jaxrnn.gru`; None uses the cell's. If both are None, one that can run the cell is chosen.
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
        """Runs the cell over `inputs` and restarts it at every step where `resets` is nonzero.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`.
          initial_carry: the carry before the first step, `[*batch, H]` or a pair `(c, h)`; by default
            `cell.initialize_carry`.
          seq_lengths: `[*batch]` integers. The returned carry is the one at the end of each sequence (`initial_carry`
            if its length is 0). Outputs beyond the end are not zeroed. With `reverse`, padding stays at the end.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          rngs: the random number generator of `cell.initialize_carry`; by default the attribute.
          resets: `[*batch, T]`, or `[T, *batch]` if `time_major`, any dtype; nonzero at the first step of an episode,
            that is, the *previous* step's done flag. That step starts from `reset_carry`. With `reverse`, the first
            step of an episode is the one computed first, which is its last in time.
          reset_carry: the carry that an episode starts from, by default `cell.initialize_carry`. It is `[H]`,
            `[*batch, H]` or a value per step `[*batch, T, H]` (`[T, *batch, H]`), or a pair of such arrays for an LSTM.
            It is differentiable.

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
        """Runs the cell over time, fused if possible; returns `(carry, ys, carries of all steps or None)`."""
        precision = getattr(self.cell, "precision", None) if self.precision is None else self.precision
        implementation = getattr(self.cell, "implementation", None)
        implementation = implementation if self.implementation is None else self.implementation
        reason = reason_to_scan(self.cell)
        if self.broadcast_rngs is not None or self.state_axes != DEFAULT_STATE_AXES:
            reason = "an RNN with non-default state_axes or broadcast_rngs"
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
        """Runs any cell with `nnx.scan`; returns what `run` returns."""
        shape = xs.shape[: xs.ndim - self.cell.num_feature_axes]
        stepped, reset = modules.with_resets(carry, resets, reset_carry, shape, time_axis)
        broadcast_rngs = nnx.All(nnx.RngState, self.broadcast_rngs)
        state_axes = nnx.StateAxes({broadcast_rngs: None, **self.state_axes})  # type: ignore[misc]

        # as in Flax's `RNN`, every call has new random numbers, and the scan carries the cell's state
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


# Flax versions with `nnx.compat` have an `nnx.scan` that does not accept modules with carried state.
graph_scan: Any = getattr(nnx, "compat", nnx).scan
DEFAULT_STATE_AXES = nnx.StateAxes({...: nnx.Carry})  # type: ignore[arg-type]


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` computed by `jaxrnn.rms_norm`, with the same parameters, initial values and results.

    `reduction_axes` and `feature_axes` must be the last axis. Other axes, `mask`, `axis_name` and `axis_index_groups`
    raise NotImplementedError.

    Attributes:
      num_features: N.
      epsilon: added to the mean square, inside the root. All arguments and attributes not listed here are Flax's.
      dtype: the dtype of the result, to which inputs are rounded first; None uses the dtype to which inputs and
        parameters promote. The norm is computed in float32.
      use_fast_variance: has no effect: the variance is always the mean of squared differences.
      implementation: as in `jaxrnn.rms_norm`.
    """

    def __init__(self, num_features: int, *, implementation: Implementation = None, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.implementation = implementation

    def __call__(self, x: Array, mask: Array | None = None, *, residual: Array | None = None) -> Any:
        """Normalises the last axis.

        Args:
          x: `[*rows, N]`.
          mask: an argument of Flax's norm; must be None.
          residual: an array with the shape and dtype of `x`, added to `x` first, in the same pass. With a residual,
            neither array is rounded to `dtype`.

        Returns:
          `y`, which has the shape of `x`. With a residual, `(y, x + residual)`; the sum has the dtype of `x`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this input, or only Flax supports the value of an
            attribute; the message says which.
        """
        return run_norm(self, "rms", x, residual, mask, ("scale",))


class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` computed by `jaxrnn.layer_norm`, with the same parameters, initial values and results.

    Attributes:
      num_features: N. All attributes are those of `RMSNorm`; `epsilon` is added to the variance.
    """

    def __init__(self, num_features: int, *, implementation: Implementation = None, **options: Any) -> None:
        super().__init__(num_features, **options)
        self.implementation = implementation

    def __call__(self, x: Array, *, mask: Array | None = None, residual: Array | None = None) -> Any:
        """Normalises the last axis; arguments, results and errors are those of `RMSNorm`."""
        return run_norm(self, "layer", x, residual, mask, ("scale", "bias"))


def run_norm(norm: Any, kind: str, x: Array, residual: Array | None, mask: Array | None, names: tuple[str, ...]) -> Any:
    """Normalises `x` with those parameters among `names` that the module has."""
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError("x must be [*rows, N], got a scalar")
    modules.check_norm(norm, mask, x.ndim)
    given = [None if getattr(norm, name) is None else getattr(norm, name)[...] for name in names]
    promoted = norm.promote_dtype((x, *given), dtype=norm.dtype)
    dtype = dtypes.canonicalize_dtype(*promoted, dtype=norm.dtype)
    # the norm reads inputs in their own dtype if promotion would only widen them
    is_wider = norm.promote_dtype is dtypes.promote_dtype and jnp.promote_types(x.dtype, dtype) == dtype
    if residual is None and not is_wider:
        x = promoted[0]
    scale, bias = (*promoted[1:], None)[:2]
    options = {"epsilon": norm.epsilon, "implementation": norm.implementation}
    return modules.normalize(kind, x, scale, bias, residual, dtype, **options)


class LearnedCarry(nnx.Module):
    """The carry that sequences and episodes of one cell start from: a parameter `[H]` for each array of the carry."""

    def __init__(self, widths: dict[str, int], init: Initializer, dtype: Dtype, rngs: nnx.Rngs) -> None:
        self.names = tuple(widths)
        for name, width in widths.items():
            setattr(self, name, nnx.Param(init(rngs.params(), (width,), dtype)))

    def __call__(self) -> Carry:
        """Returns an array `[H]`, or a pair `(c, h)` of such arrays."""
        carry = tuple(getattr(self, name)[...] for name in self.names)
        return carry if len(carry) > 1 else carry[0]


class FusedStack(nnx.Module):
    """The base class of the stacks `GRU` and `LSTM`."""

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
        """Runs all layers over `inputs` and restarts them at every step where `resets` is nonzero.

        A carry is a tuple with one entry per layer. An entry is `[*batch, H]` or, for an LSTM, `(c, h)`. If
        `bidirectional`, an entry is a pair (forward, backward) of these.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`. Any number of batch axes.
          initial_carry: the carry before the first step of each direction; by default the result of
            `initialize_carry`.
          seq_lengths: `[*batch]` integers. The returned carry is the one at the end of each sequence (`initial_carry`
            if its length is 0), and the backward direction starts at that end. Outputs beyond the end are meaningless
            and are not zeroed. May be combined with `resets`.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          deterministic: whether to disable dropout; by default `eval()` and `train()` of this module set it.
          rngs: the random number generators of dropout, by default those given to the constructor, and of a random
            `carry_init`.
          resets: `[*batch, T]`, or `[T, *batch]` if `time_major`, any dtype; nonzero at the first step of an episode,
            that is, the *previous* step's done flag. Every layer starts that step from `reset_carry`. The backward
            direction of a bidirectional stack starts an episode from `reset_carry` at the last step of the episode,
            which precedes the next step that `resets` marks; so neither direction sees another episode. With `reverse`,
            as in `RNN`, `resets` is nonzero at the step of an episode that is computed first, its last in time.
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
                raise NotImplementedError(f"a stack cannot run {reason}: use one RNN per layer instead")
        structure = tuple(self.widths().values()), self.num_layers, self.bidirectional
        return modules.run_stack(
            [[packed_params(cell) for cell in layer] for layer in layers],
            modules.group_by_direction("initial_carry", initial_carry, *structure),
            inputs,
            resets=resets,
            reset_carry=None
            if reset_carry is None
            else modules.group_by_direction("reset_carry", reset_carry, *structure),
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
        """Returns the carry of a new sequence: the result of `carry_init`, or the learned carry.

        Args:
          input_shape: the shape of the inputs of one step, `[*batch, D]`.
          rngs: the random number generator of `carry_init`, needed unless `carry_init` is zeros.

        Raises:
          ValueError: `carry_init` is not zeros, and `rngs` is None.
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
        """Returns the widths of the arrays of a cell's carry by name; the hidden state is the last."""
        return {"h": self.hidden_features}

    def make_cell(self, *args: Any, **options: Any) -> FusedCell:
        """Creates one cell."""
        return self._cell(*args, **options)

    def learned(self) -> Any:
        """Returns the learned carry, with arrays `[H]`."""
        return self.as_carry("carries", lambda one: one())

    def by_layer(self, name: str) -> list[tuple[Any, ...]]:
        """Returns the modules at `name` by layer and direction."""
        lists = [getattr(self, name), *([getattr(self, f"{name}_reverse")] if self.bidirectional else [])]
        return list(zip(*lists, strict=True))

    def as_carry(self, name: str, make: Callable[[Any], Carry]) -> Any:
        """Returns the carry whose entry for each module at `name` is `make(module)`."""
        entries = [tuple(map(make, layer)) for layer in self.by_layer(name)]
        return tuple(entry if self.bidirectional else entry[0] for entry in entries)


class GRU(FusedStack):
    """A stack of GRUs like `torch.nn.GRU`, with layers, directions, dropout between layers, and episode resets.

        gru = GRU(64, 128, num_layers=2, time_major=True, return_carry=True, rngs=nnx.Rngs(0))
        carry, ys = gru(xs, initial_carry=carry, resets=resets)

    `layers[k]` is the `GRUCell` of layer k, and `layers_reverse[k]` is the `GRUCell` of its backward direction. The
    outputs concatenate the directions: forward, then backward.

    Attributes:
      in_features: D, the width of the inputs.
      hidden_features: H, the width of every layer and direction.
      num_layers: the number of layers; each runs over the outputs of the previous layer.
      dropout_rate: the rate of the dropout on the outputs of every layer but the last. Each step has its own mask.
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
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; None chooses one that can run the input.
      remat: as in `jaxrnn.gru`.
      norm: the norm of the outputs of every layer but the last. It normalises both directions together, before dropout.
        "rms" and "layer" create an `RMSNorm` or a `LayerNorm` at `norms[k]`, where k is the layer whose outputs it
        normalises. A class or a function creates another module when called as `norm(width, rngs=rngs)`. None means no
        norm.
      rngs: the random number generators of the parameters and of dropout.

    Raises:
      ValueError: an argument has an invalid value, or both `bidirectional` and `reverse` are set.
    """

    _cell = GRUCell


class LSTM(FusedStack):
    """A stack of LSTMs like `torch.nn.LSTM`: `GRU` with the cell `OptimizedLSTMCell` and carries `(c, h)`.

    Attributes:
      in_features: D. All attributes not listed here are those of `GRU`.
      proj_size: P, the width to which `layers[k].proj` projects hidden states, and so outputs; c stays H wide. None
        means no projection. The weight is `params.w_hr` in `jaxrnn.lstm`.
    """

    _cell = OptimizedLSTMCell

    def __init__(self, in_features: int, hidden_features: int, *, proj_size: int | None = None, **options: Any) -> None:
        self.proj_size = proj_size
        super().__init__(in_features, hidden_features, **options)

    def widths(self) -> dict[str, int]:
        """Returns the widths of c and h by name."""
        return {"c": self.hidden_features, "h": self.hidden_features if self.proj_size is None else self.proj_size}

    def make_cell(self, *args: Any, **options: Any) -> FusedCell:
        """Creates one cell, with a projection if `proj_size` is set."""
        if self.proj_size is None:
            return self._cell(*args, **options)
        return ProjectedLSTMCell(*args, proj_size=self.proj_size, **options)
