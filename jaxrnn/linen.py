"""Flax linen modules that run the functions of `jaxrnn`, with the attributes, parameters and initial values of Flax.

| instead of                                                       | import                                            |
| ---------------------------------------------------------------- | ------------------------------------------------- |
| `ScannedRNN` of purejaxrl, JaxMARL, Craftax_Baselines, Kinetix,  | `ScannedRNN`                                      |
| Stoix, Mava                                                      |                                                   |
| `ScannedRNN` of JaxMARL's Q-learning and of purejaxql            | `HiddenFirstScannedRNN as ScannedRNN`             |
| `nn.RNN`                                                         | `RNN`                                             |
| `ResetRNN` of jaxued                                             | `ResetRNN`                                        |
| `nn.GRUCell`, `nn.LSTMCell`, `nn.OptimizedLSTMCell`              | `GRUCell`, `LSTMCell`, `OptimizedLSTMCell`        |
| `nn.RMSNorm`, `nn.LayerNorm`                                     | `RMSNorm`, `LayerNorm`                            |

All modules follow one convention for resets: `resets[t]` is nonzero if step t is the first of an episode. It is the
done flag that step t - 1 returned, which is stored with the observation of step t. The done flag of step t belongs to
`resets[t + 1]`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer, PRNGKey
from jax import Array

from jaxrnn import modules
from jaxrnn.cells import GRUParams, LSTMParams
from jaxrnn.checks import Implementation, must_scan

Carry = Any  # an array [*batch, H], or (c, h) for an LSTM

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "GRUCell",
    "HiddenFirstScannedRNN",
    "LSTMCell",
    "LayerNorm",
    "OptimizedLSTMCell",
    "RMSNorm",
    "ResetRNN",
    "ScannedRNN",
]


class DenseParams(nn.Module):
    """The parameters of an `nn.Dense`, without the matrix product."""

    features: int
    use_bias: bool
    kernel_init: Initializer
    bias_init: Initializer
    param_dtype: Dtype

    @nn.compact
    def __call__(self, input_features: int) -> tuple[Array, Array | None]:
        """Returns `(kernel [input_features, features], bias [features] or None)`."""
        kernel = self.param("kernel", self.kernel_init, (input_features, self.features), self.param_dtype)
        if not self.use_bias:
            return kernel, None
        return kernel, self.param("bias", self.bias_init, (self.features,), self.param_dtype)


class FusedCell(nn.RNNCellBase):
    """The base class that precedes Flax's class among the bases of each cell and replaces its computation."""

    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    def __call__(self, carry: Carry, inputs: Array) -> tuple[Carry, Array]:
        """Computes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM. H is the width of the carry, as in Flax.
          inputs: `[*batch, D]`; the batch axes of inputs and carry are broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the dtype to which the computation dtype and the carry's dtype promote.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell.
        """
        if must_scan(reason_to_scan(self, SCAN_OPTIONS), self.precision, self.implementation, "nn.scan"):
            return super().__call__(carry, inputs)
        dtype = jnp.result_type(inputs, self.param_dtype) if self.dtype is None else self.dtype
        carry = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), carry)
        carry, inputs = modules.broadcast_batch_axes(carry, inputs)
        options = {"precision": self.precision, "implementation": self.implementation}
        carry, ys, _ = self.run(carry, inputs[None], **options)
        return carry, ys[0]

    def gate_params(self, name: str, input_features: int, hidden: int, use_bias: bool) -> tuple[Array, Array | None]:
        """Returns kernel and bias of one gate, under Flax's name for its product with x (`i*`) or h (`h*`)."""
        return DenseParams(
            features=hidden,
            use_bias=use_bias,
            kernel_init=self.kernel_init if name.startswith("i") else self.recurrent_kernel_init,
            bias_init=self.bias_init,
            param_dtype=self.param_dtype,
            name=name,
        )(input_features)

    def run(self, carry: Carry, xs: Array, **options: Any) -> tuple[Carry, Array, Carry | None]:
        """Calls `modules.run` with the parameters of this cell."""
        h = jax.tree.leaves(carry)[-1]
        params = self.packed_params(xs.shape[-1], h.shape[-1])
        dtype = canonicalize_dtype(xs, h, *params, dtype=self.dtype)
        return modules.run(modules.cast(params, dtype), carry, jnp.asarray(xs, dtype), **options)


class GRUCell(FusedCell, nn.GRUCell):
    """`flax.linen.GRUCell` computed by `jaxrnn.gru`, with the same parameters, initial values and results.

    `RNN` and `ScannedRNN` run the cell over time in one call. A call of the cell itself computes one step.

    Attributes:
      features: H, the width of the carry that `initialize_carry` returns. All attributes not listed here are Flax's.
      gate_fn: with a function other than sigmoid, or an `activation_fn` other than tanh, Flax's own cell runs, and in
        an `RNN` it runs under `nn.scan`.
      dtype: the dtype of the matmul operands. The carry keeps its own dtype, so it may be float32 with
        `dtype=jnp.bfloat16`.
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; "triton" raises NotImplementedError with another `gate_fn` or `activation_fn`.
    """

    @nn.compact
    def packed_params(self, input_features: int, hidden: int) -> GRUParams:
        """Returns the parameters for `jaxrnn.gru`, creating missing ones. The cell has no biases b_hr and b_hz."""
        inputs = [self.gate_params(f"i{gate}", input_features, hidden, use_bias=True) for gate in "rzn"]
        recurrent = [self.gate_params(f"h{gate}", hidden, hidden, use_bias=gate == "n") for gate in "rzn"]
        kernels, biases = zip(*inputs, strict=True)
        recurrent_kernels, (_, _, b_hn) = zip(*recurrent, strict=True)
        return GRUParams(
            w_ih=jnp.concatenate(kernels, axis=-1),
            w_hh=jnp.concatenate(recurrent_kernels, axis=-1),
            b_ih=jnp.concatenate(biases, axis=-1),
            b_hn=b_hn,
        )

    def run(self, carry: Carry, xs: Array, **options: Any) -> tuple[Carry, Array, Carry | None]:
        """Calls `modules.run` after checking the structure of the carry."""
        if isinstance(carry, (tuple, list)):
            raise ValueError(f"the carry of a GRU is one array [*batch, H], got a {type(carry).__name__}")
        return super().run(carry, xs, **options)


class FusedLSTMCell(FusedCell):
    """The base class of the two LSTM cells."""

    @nn.compact
    def packed_params(self, input_features: int, hidden: int, proj_size: int | None = None) -> LSTMParams:
        """Returns the parameters for `jaxrnn.lstm`, creating missing ones. A projection adds `proj` to Flax's names."""
        width = hidden if proj_size is None else proj_size
        inputs = [self.gate_params(f"i{gate}", input_features, hidden, use_bias=False) for gate in "ifgo"]
        recurrent = [self.gate_params(f"h{gate}", width, hidden, use_bias=True) for gate in "ifgo"]
        (w_ih, _), (w_hh, b) = zip(*inputs, strict=True), zip(*recurrent, strict=True)
        params = LSTMParams(*(jnp.concatenate(x, axis=-1) for x in (w_ih, w_hh, b)))
        if proj_size is None:
            return params
        dense = DenseParams(proj_size, False, self.kernel_init, self.bias_init, self.param_dtype, name="proj")
        return params._replace(w_hr=dense(hidden)[0])

    def run(self, carry: Carry, xs: Array, **options: Any) -> tuple[Carry, Array, Carry | None]:
        """Calls `modules.run` after checking the structure of the carry."""
        if not isinstance(carry, (tuple, list)) or len(carry) != 2:
            raise ValueError(f"the carry of an LSTM is a pair (c, h), got {type(carry).__name__}")
        return super().run(carry, xs, **options)


class LSTMCell(FusedLSTMCell, nn.LSTMCell):
    """`flax.linen.LSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Attributes:
      features: H. All attributes are those of `GRUCell`.
    """


class OptimizedLSTMCell(FusedLSTMCell, nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell` computed by `jaxrnn.lstm`. It differs from `LSTMCell` of this module only in name.

    Attributes:
      features: H. All attributes are those of `GRUCell`.
    """


FUSED: dict[type[nn.RNNCellBase], type[FusedCell]] = {
    nn.GRUCell: GRUCell,
    nn.LSTMCell: LSTMCell,
    nn.OptimizedLSTMCell: OptimizedLSTMCell,
}
CELL_TYPES: dict[str, type[nn.RNNCellBase]] = {
    "gru": GRUCell,
    "lstm": LSTMCell,
    "optimized_lstm": OptimizedLSTMCell,
    "optimised_lstm": OptimizedLSTMCell,
    "mgu": nn.MGUCell,
    "simple": nn.SimpleCell,
}
SCAN_OPTIONS = {
    "variable_axes": {},
    "variable_broadcast": "params",
    "variable_carry": False,
    "split_rngs": {"params": False},
}


def reason_to_scan(cell: nn.RNNCellBase, scan_options: Mapping[str, Any]) -> str | None:
    """Returns why `cell` has to run under `nn.scan`, or None if `jaxrnn.gru` or `jaxrnn.lstm` can run it."""
    if type(cell) not in FUSED and type(cell) not in FUSED.values():
        return f"a {type(cell).__name__} (only GRUCell, LSTMCell and OptimizedLSTMCell of jaxrnn or Flax can be fused)"
    if not modules.has_usual_activations(cell):
        return "a cell whose gate_fn is not sigmoid or whose activation_fn is not tanh"
    if any(scan_options[name] != default for name, default in SCAN_OPTIONS.items()):
        return f"an RNN with non-default {', '.join(SCAN_OPTIONS)}"
    return None


def run_cell(
    cell: nn.RNNCellBase,
    carry: Carry,
    xs: Array,
    *,
    resets: Array | None,
    reset_carry: Carry | None = None,
    reverse: bool = False,
    time_major: bool = True,
    return_carries: bool = False,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation = None,
    init_key: PRNGKey | None = None,
    scan_options: Mapping[str, Any] = SCAN_OPTIONS,
) -> tuple[Carry, Array, Carry | None]:
    """Runs a bound cell over time, fused if possible; returns `(carry, ys, carries of all steps or None)`."""
    precision = getattr(cell, "precision", None) if precision is None else precision
    implementation = getattr(cell, "implementation", None) if implementation is None else implementation
    time_axis = 0 if time_major else xs.ndim - cell.num_feature_axes - 1
    modules.check_reset_carry(resets, reset_carry)
    if resets is not None and reset_carry is None and getattr(cell, "carry_init", None) is not nn.initializers.zeros:
        reset_carry = initial_carry_of(cell, init_key, xs, time_axis)
    if must_scan(reason_to_scan(cell, scan_options), precision, implementation, "nn.scan"):
        return scan_cell(cell, carry, xs, time_axis, resets, reset_carry, reverse, return_carries, scan_options)
    if type(cell) in FUSED:
        names = (field.name for field in dataclasses.fields(cell) if field.name not in ("parent", "name"))
        scope: Any = cell.scope  # shared, so that the parameters keep the path of Flax's cell
        cell = FUSED[type(cell)](**{name: getattr(cell, name) for name in names}, parent=scope.rewound())
    return cell.run(
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


def initial_carry_of(cell: nn.RNNCellBase, key: PRNGKey | None, xs: Array, time_axis: int) -> Carry:
    """Returns `cell.initialize_carry` for the batch axes of `xs`."""
    key = jax.random.key(0) if key is None else key
    return cell.initialize_carry(key, xs.shape[:time_axis] + xs.shape[time_axis + 1 :])


def scan_cell(
    cell: nn.RNNCellBase,
    carry: Carry,
    xs: Array,
    time_axis: int,
    resets: Array | None,
    reset_carry: Carry | None,
    reverse: bool,
    return_carries: bool,
    scan_options: Mapping[str, Any],
) -> tuple[Carry, Array, Carry | None]:
    """Runs any cell with `nn.scan`; returns what `run_cell` returns."""
    shape = xs.shape[: xs.ndim - cell.num_feature_axes]
    stepped, reset = modules.with_resets(carry, resets, reset_carry, shape, time_axis)

    def step(cell: nn.RNNCellBase, carry: Carry, inputs: Any) -> tuple[Carry, tuple[Array, Carry | None]]:
        x, *of_step = inputs
        carry, y = cell(reset(carry, *of_step), x)
        return carry, (y, carry if return_carries else None)

    time_first = [None if x is None else jnp.moveaxis(x, time_axis, 0) for x in (xs, resets)]
    carry, outputs = nn.scan(step, reverse=reverse, **scan_options)(cell, carry, (*time_first, stepped))
    ys, carries = jax.tree.map(lambda x: jnp.moveaxis(x, 0, time_axis), outputs)
    return carry, ys, carries


class RNN(nn.RNN):
    """`flax.linen.RNN` with episode resets: runs `cell` over time in one launch. Its parameters are under `cell/`.

        rnn = RNN(GRUCell(128), time_major=True, return_carry=True)
        carry, ys = rnn.apply(variables, xs, initial_carry=carry, resets=resets)

    `jaxrnn.gru` and `jaxrnn.lstm` run the GRU, LSTM and OptimizedLSTM cells of this module and of Flax. `nn.scan` runs
    any other cell, a cell with another `gate_fn` or `activation_fn`, and an RNN whose `variable_axes`,
    `variable_broadcast`, `variable_carry` or `split_rngs` is not the default; these take `resets` too.

    Attributes:
      cell: the cell.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`. Neither layout is transposed.
      return_carry: whether to return `(carry, outputs)` instead of `outputs`.
      reverse: whether to run from the last step to the first. Outputs are in the order computed, last step first.
      keep_order: whether to return the outputs in the order of the inputs when `reverse` is set.
      unroll: the number of steps per loop iteration of `nn.scan`, if `nn.scan` runs the cell.
      precision: the precision of the matmuls, as in `jaxrnn.gru`; None uses the cell's.
      implementation: as in `jaxrnn.gru`; None uses the cell's. If both are None, one that can run the cell is chosen.
    """

    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Carry | None = None,
        init_key: PRNGKey | None = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        resets: Array | None = None,
        reset_carry: Carry | None = None,
    ) -> Array | tuple[Carry, Array]:
        """Runs the cell over `inputs` and restarts it at every step where `resets` is nonzero.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`.
          initial_carry: the carry before the first step, `[*batch, H]` or a pair `(c, h)`; by default
            `cell.initialize_carry`.
          init_key: the key for `cell.initialize_carry`, which ignores the key unless `carry_init` is random.
          seq_lengths: `[*batch]` integers. The returned carry is the one at the end of each sequence (`initial_carry`
            if its length is 0). Outputs beyond the end are not zeroed. With `reverse`, padding stays at the end.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
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
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        time_axis = 0 if time_major else inputs.ndim - self.cell.num_feature_axes - 1
        carry = initial_carry_of(self.cell, init_key, inputs, time_axis) if initial_carry is None else initial_carry
        run = functools.partial(
            run_cell,
            self.cell,
            time_major=time_major,
            precision=self.precision,
            implementation=self.implementation,
            init_key=init_key,
            scan_options={"unroll": self.unroll} | {name: getattr(self, name) for name in SCAN_OPTIONS},
        )
        return modules.run_over_time(
            run,
            inputs,
            carry,
            resets=resets,
            reset_carry=reset_carry,
            seq_lengths=seq_lengths,
            feature_axes=self.cell.num_feature_axes,
            time_major=time_major,
            reverse=reverse,
            keep_order=keep_order,
            return_carry=return_carry,
        )


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm` computed by `jaxrnn.rms_norm`, with the same parameters, initial values and results.

    `reduction_axes` and `feature_axes` must be the last axis. Other axes, `mask`, `axis_name`, `axis_index_groups` and
    `force_float32_reductions=False` raise NotImplementedError.

    Attributes:
      epsilon: added to the mean square, inside the root. All attributes not listed here are Flax's.
      dtype: the dtype of the result; None uses the dtype to which inputs and parameters promote. The norm is computed
        in float32.
      use_fast_variance: has no effect: the variance is always the mean of squared differences.
      implementation: as in `jaxrnn.rms_norm`.
    """

    implementation: Implementation = None

    @nn.compact
    def __call__(self, x: Array, *, residual: Array | None = None, mask: Array | None = None) -> Any:
        """Normalises the last axis.

        Args:
          x: `[*rows, N]`.
          residual: an array with the shape and dtype of `x`, added to `x` first, in the same pass.
          mask: an argument of Flax's norm; must be None.

        Returns:
          `y`, which has the shape of `x`. With a residual, `(y, x + residual)`; the sum has the dtype of `x`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this input, or only Flax supports the value of an
            attribute; the message says which.
        """
        return run_norm(self, "rms", x, residual, mask)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` computed by `jaxrnn.layer_norm`, with the same parameters, initial values and results.

    Attributes:
      epsilon: added to the variance, inside the root. All other attributes are those of `RMSNorm`.
    """

    implementation: Implementation = None

    @nn.compact
    def __call__(self, x: Array, *, residual: Array | None = None, mask: Array | None = None) -> Any:
        """Normalises the last axis; arguments, results and errors are those of `RMSNorm`."""
        return run_norm(self, "layer", x, residual, mask)


def run_norm(norm: Any, kind: str, x: Array, residual: Array | None, mask: Array | None) -> Any:
    """Normalises `x` with the parameters of a bound module, creating missing ones."""
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError("x must be [*rows, N], got a scalar")
    modules.check_norm(norm, mask, x.ndim)
    scale, bias = (
        norm.param(name, getattr(norm, f"{name}_init"), x.shape[-1:], norm.param_dtype)
        if getattr(norm, f"use_{name}", False)
        else None
        for name in ("scale", "bias")
    )
    dtype = canonicalize_dtype(x, scale, bias, dtype=norm.dtype)
    options = {"epsilon": norm.epsilon, "implementation": norm.implementation}
    return modules.normalize(kind, x, scale, bias, residual, dtype, **options)


def one_or_pair(arrays: Sequence[Array]) -> Carry:
    """Returns the only array, for a GRU's carry, or the tuple of both, for an LSTM's."""
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


class FusedStack(nn.Module):
    """The base class of the stacks `GRU` and `LSTM`."""

    features: int
    num_layers: int = 1
    dropout_rate: float = 0.0
    bidirectional: bool = False
    time_major: bool = False
    return_carry: bool = False
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

    _cell: ClassVar[type[FusedCell]] = FusedCell

    @nn.compact
    def __call__(
        self,
        inputs: Array,
        *,
        initial_carry: Any = None,
        init_key: PRNGKey | None = None,
        seq_lengths: Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        deterministic: bool | None = None,
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
          init_key: the key for `initialize_carry`, which ignores the key unless `carry_init` is random.
          seq_lengths: `[*batch]` integers. The returned carry is the one at the end of each sequence (`initial_carry`
            if its length is 0), and the backward direction starts at that end. Outputs beyond the end are meaningless
            and are not zeroed. May be combined with `resets`.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          deterministic: see the attribute; Flax raises ValueError if both the attribute and this argument are set.
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
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        modules.check_stack(
            self.num_layers, self.dropout_rate, self.bidirectional, reverse, getattr(self, "proj_size", None), self.norm
        )
        modules.check_reset_carry(resets, reset_carry)

        def between(k: int, xs: Array) -> Array:
            if self.norm is not None:
                xs = self.make_norm(f"norm_{k}")(xs)
            if self.dropout_rate == 0.0:
                return xs
            is_off = nn.merge_param("deterministic", self.deterministic, deterministic)
            return nn.Dropout(self.dropout_rate)(xs, deterministic=is_off)

        layers, width = [], inputs.shape[-1]
        for names in self.names():
            cells = [self.make_cell(name=name) for name in names]
            layers.append([self.packed_params(cell, width) for cell in cells])
            width = len(names) * self.widths()[-1]
        shape = inputs.shape[1:] if time_major else (*inputs.shape[:-2], inputs.shape[-1])
        if self.learned_carry:
            learned = self.for_each(self.learned)
            default = modules.broadcast_carry(learned, shape[:-1])
            reset_carry = learned if reset_carry is None else reset_carry
        else:
            default = self.initialize_carry(jax.random.key(0) if init_key is None else init_key, shape)
            if reset_carry is None and self.carry_init is not nn.initializers.zeros:
                reset_carry = default
        initial_carry = default if initial_carry is None else initial_carry
        structure = self.widths(), self.num_layers, self.bidirectional
        return modules.run_stack(
            layers,
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
            keep_order=keep_order,
            return_carry=return_carry,
            precision=self.precision,
            implementation=self.implementation,
            remat=self.remat,
        )

    @nn.nowrap
    def initialize_carry(self, rng: PRNGKey, input_shape: tuple[int, ...]) -> Any:
        """Returns the carry of a new sequence: the result of `carry_init`, or the learned carry.

        Args:
          rng: the key for `carry_init`.
          input_shape: the shape of the inputs of one step, `[*batch, D]`.

        Raises:
          ValueError: the carry is learned and the module is not bound to parameters: use
            `stack.apply(variables, rng, input_shape, method="initialize_carry")`.
        """
        if not self.learned_carry:
            keys = iter(jax.random.split(rng, 2 * self.num_layers * (1 + self.bidirectional)))
            shapes = [(*input_shape[:-1], width) for width in self.widths()]
            return self.for_each(
                lambda name: one_or_pair([self.carry_init(next(keys), shape, self.param_dtype) for shape in shapes])
            )
        if self.scope is None:
            raise ValueError(
                "the learned carry is a parameter of the stack: call stack.apply(variables, rng, input_shape, "
                'method="initialize_carry")'
            )
        return modules.broadcast_carry(self.for_each(self.learned), input_shape[:-1])

    @nn.nowrap
    def widths(self) -> tuple[int, ...]:
        """Returns the widths of the arrays of a cell's carry; the hidden state is the last."""
        return (self.features,)

    @nn.nowrap
    def packed_params(self, cell: Any, input_features: int) -> Any:
        """Returns the parameters of one cell, creating missing ones."""
        return cell.packed_params(input_features, self.features)

    @nn.nowrap
    def names(self) -> list[list[str]]:
        """Returns the names of the cells by layer and direction."""
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        return [[f"layers_{k}{suffix}" for suffix in suffixes] for k in range(self.num_layers)]

    @nn.nowrap
    def for_each(self, make: Callable[[str], Carry]) -> Any:
        """Returns the carry whose entry for each cell is `make(name of the cell)`."""
        entries = [tuple(map(make, names)) for names in self.names()]
        return tuple(entry if self.bidirectional else entry[0] for entry in entries)

    @nn.compact
    def learned(self, name: str) -> Carry:
        """Returns the learned carry of a cell, `[H]` or a pair of such arrays; creates it if missing."""
        states = zip(("c", "h")[-len(self.widths()) :], self.widths(), strict=True)
        return one_or_pair(
            [self.param(f"{name}_carry_{x}", self.carry_init, (width,), self.param_dtype) for x, width in states]
        )

    @nn.nowrap
    def make_norm(self, name: str) -> nn.Module:
        """Creates the norm of the outputs of one layer."""
        if isinstance(self.norm, nn.Module):
            raise ValueError("norm must make a module for each layer: pass its class or a function, not a module")
        if callable(self.norm):
            return self.norm(name=name)
        make = {"rms": RMSNorm, "layer": LayerNorm}[str(self.norm)]
        return make(dtype=self.dtype, param_dtype=self.param_dtype, implementation=self.implementation, name=name)

    @nn.nowrap
    def make_cell(self, **options: Any) -> Any:
        """Creates one cell with the attributes of the stack."""
        names = "features", "dtype", "param_dtype", "kernel_init", "recurrent_kernel_init", "bias_init"
        return self._cell(**{name: getattr(self, name) for name in names}, **options)


class GRU(FusedStack):
    """A stack of GRUs like `torch.nn.GRU`, with layers, directions, dropout between layers, and episode resets.

        gru = GRU(128, num_layers=2, time_major=True, return_carry=True)
        carry, ys = gru.apply(variables, xs, initial_carry=carry, resets=resets)

    Layer k has the parameters of a `GRUCell` at `layers_{k}`; those of its backward direction are at
    `layers_{k}_reverse`. The outputs concatenate the directions: forward, then backward.

    Attributes:
      features: H, the width of every layer and direction.
      num_layers: the number of layers; each runs over the outputs of the previous layer.
      dropout_rate: the rate of the dropout on the outputs of every layer but the last. Each step has its own mask.
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
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; None chooses one that can run the input.
      remat: as in `jaxrnn.gru`.
      norm: the norm of the outputs of every layer but the last. It normalises both directions together, before dropout.
        "rms" and "layer" create an `RMSNorm` or a `LayerNorm` with its parameters at `norm_{k}`, where k is the layer
        whose outputs it normalises. A class or a function creates another module when called as `norm(name=name)`. None
        means no norm.
    """

    _cell = GRUCell


class LSTM(FusedStack):
    """A stack of LSTMs like `torch.nn.LSTM`: `GRU` with the cell `OptimizedLSTMCell` and carries `(c, h)`.

    Attributes:
      features: H. All attributes not listed here are those of `GRU`.
      proj_size: P, the width to which `layers_{k}/proj` projects hidden states, and so outputs; c stays H wide. None
        means no projection. The weight is `params.w_hr` in `jaxrnn.lstm`.
    """

    proj_size: int | None = None

    _cell = OptimizedLSTMCell

    @nn.nowrap
    def widths(self) -> tuple[int, ...]:
        """Returns the widths of c and h."""
        return self.features, self.features if self.proj_size is None else self.proj_size

    @nn.nowrap
    def packed_params(self, cell: Any, input_features: int) -> LSTMParams:
        """Returns the parameters of one cell, creating missing ones."""
        return cell.packed_params(input_features, self.features, self.proj_size)


class ResetRNN(nn.Module):
    """jaxued's `ResetRNN`, time-major: `carry, ys = ResetRNN(cell)((xs, resets), initial_carry=carry)`.

    It has no parameters of its own. The parameters of the cell belong to the module that creates the cell, for example
    at `OptimizedLSTMCell_0`. Cells run as in `RNN`, fused if possible.

    Attributes:
      cell: the cell, of this module or of Flax.
      precision: the precision of the matmuls, as in `jaxrnn.gru`; None uses the cell's.
      implementation: as in `jaxrnn.gru`; None uses the cell's. If both are None, one that can run the cell is chosen.
    """

    cell: nn.RNNCellBase
    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    @nn.compact
    def __call__(
        self,
        inputs: tuple[Array, Array],
        *,
        initial_carry: Carry | None = None,
        reset_carry: Carry | None = None,
    ) -> tuple[Carry, Array]:
        """Runs the cell over time and restarts it from `reset_carry` at every step where `resets` is nonzero.

        Args:
          inputs: `(xs, resets)`: `xs [T, *batch, D]`, and `resets [T, *batch]` of any dtype, nonzero where step t is
            the first of an episode: the done flag that step t - 1 returned, not that of step t.
          initial_carry: `[*batch, H]`, or `(c, h)` for an LSTM; by default `reset_carry`, whose first step is used if
            it has a value per step.
          reset_carry: the carry that an episode starts from, by default `cell.initialize_carry`. It is `[H]`,
            `[*batch, H]` or `[T, *batch, H]`, or a pair of such arrays for an LSTM. It is differentiable.

        Returns:
          `(carry, ys [T, *batch, H])`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell or input; the message says why.
        """
        if not isinstance(inputs, (tuple, list)) or len(inputs) != 2:
            raise ValueError(f"ResetRNN takes ((xs, resets)), got {type(inputs).__name__} instead of (xs, resets)")
        xs, resets = inputs
        carry = initial_carry
        if carry is None:
            carry = initial_carry_of(self.cell, None, xs, 0)
            if reset_carry is not None:
                carry = jax.tree.map(first_reset_carry, carry, reset_carry)
        carry, ys, _ = run_cell(
            self.cell,
            carry,
            xs,
            resets=resets,
            reset_carry=reset_carry,
            precision=self.precision,
            implementation=self.implementation,
        )
        return carry, ys


def first_reset_carry(like: Array, reset_carry: Array) -> Array:
    """Returns the reset carry of the first step, broadcast to the shape of `like [*batch, H]`."""
    return jnp.broadcast_to(reset_carry if jnp.ndim(reset_carry) <= like.ndim else reset_carry[0], like.shape)


class ClassOrInstanceMethod:
    """A descriptor that makes a function a method of both the class and its instances: its first argument is either."""

    nowrap = True  # Flax does not wrap methods with this attribute

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return functools.partial(self.function, owner if instance is None else instance)


def zero_carry(rnn: Any, batch_size: int | Sequence[int], hidden_size: int | None = None) -> Carry:
    """Returns the zero carry of a new episode, for a class or for an instance with its own attributes.

    Args:
      rnn: the class or the instance.
      batch_size: an int, or a tuple with the sizes of all batch axes.
      hidden_size: H; by default `hidden_state_dim`.
    """
    batch = tuple(batch_size) if isinstance(batch_size, Sequence) else (batch_size,)
    hidden_size = rnn.hidden_state_dim if hidden_size is None else hidden_size
    if hidden_size is None:
        raise ValueError("hidden_size is missing: pass it to initialize_carry, or set hidden_state_dim")
    cell = cell_class(rnn.cell_type)(features=hidden_size, param_dtype=rnn.param_dtype, parent=None)
    return cell.initialize_carry(jax.random.key(0), (*batch, hidden_size))


def zero_carry_hidden_first(rnn: Any, hidden_size: int, *batch_size: int) -> Carry:
    """Returns `zero_carry`, but takes the arguments in the order `(hidden_size, *batch_size)`."""
    return zero_carry(rnn, batch_size, hidden_size)


class ScannedRNN(nn.Module):
    """The recurrent module of JAX RL agents: `carry, ys = ScannedRNN()(carry, (ins, resets))`.

    It replaces the `ScannedRNN` of JaxMARL, Craftax_Baselines, Kinetix, Stoix and Mava: changing the import changes
    neither the parameters (`ScannedRNN_0/GRUCell_1/...`), nor their initial values, nor the results. purejaxrl and
    popjaxrl have the parameters at `ScannedRNN_0/GRUCell_0/...`: set `cell_name` for these.
    H is the width of the carry and may differ from D. Rollouts call the module with T = 1, and updates call it with
    whole sequences.

    Set `cell_type` for another cell. If `initialize_carry` is called on the class, set `cell_type` in a subclass:

        class ScannedRNN(jaxrnn.linen.ScannedRNN):
            cell_type: str = "lstm"

    Attributes:
      hidden_state_dim: H, the default `hidden_size` of `initialize_carry`; if set, the carry must have this width.
      cell_type: "gru", "lstm", "optimized_lstm", "mgu", "simple", or a cell class. Only GRUs and LSTMs are fused.
      cell_name: the name of the cell's parameters, by default `GRUCell_1` for "gru", `LSTMCell_1` for "lstm", and so
        on. The classes that this one replaces create a dummy cell first, and only the second cell has parameters. If
        your class creates no dummy cell, creates it with `parent=None` or creates it second, the name is "GRUCell_0".
      dtype: the dtype of the matmul operands; the carry keeps its own dtype. None uses the dtype to which inputs, carry
        and parameters promote.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; None chooses one that can run the cell.
    """

    hidden_state_dim: int | None = None
    cell_type: str | type[nn.RNNCellBase] = "gru"
    cell_name: str | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    _cell_index = 1

    @nn.compact
    def __call__(self, carry: Carry, x: tuple[Array, Array]) -> tuple[Carry, Array]:
        """Runs the cell over time and restarts it from zeros at every step where `resets` is nonzero.

        Args:
          carry: `[*batch, H]`, or `(c, h)` for an LSTM; `initialize_carry` returns one.
          x: `(ins, resets)`: `ins [T, *batch, D]`, and `resets [T, *batch]` of any dtype, nonzero where step t is the
            first of an episode: the done flag that step t - 1 returned, not that of step t.

        Returns:
          `(carry, ys [T, *batch, H])`.

        Raises:
          ValueError: shapes or dtypes disagree, or the parameters belong to another cell or have another name.
          NotImplementedError: the named implementation cannot run this cell or input; the message says why.
        """
        if not isinstance(x, (tuple, list)) or len(x) != 2:
            raise ValueError(
                f"ScannedRNN takes (carry, (ins, resets)), got {type(x).__name__} instead of (ins, resets)"
            )
        ins, resets = x
        if not (states := jax.tree.leaves(carry)) or not all(jnp.ndim(state) for state in states):
            raise ValueError("carry must be [*batch, H], or a pair (c, h) for an LSTM: initialize_carry returns one")
        hidden = states[-1].shape[-1]
        if self.hidden_state_dim not in (None, hidden):
            raise ValueError(f"the width of carry must be hidden_state_dim = {self.hidden_state_dim}, got {hidden}")
        make = cell_class(self.cell_type)
        name = f"{make.__name__}_{self._cell_index}" if self.cell_name is None else self.cell_name
        self._check_name(name)
        cell = make(features=hidden, dtype=self.dtype, param_dtype=self.param_dtype, name=name)
        carry, ys, _ = run_cell(
            cell, carry, ins, resets=resets, precision=self.precision, implementation=self.implementation
        )
        return carry, ys

    def _check_name(self, name: str) -> None:
        """Raises ValueError if the given parameters belong to another cell or have another name."""
        given = self.variables.get("params", {})
        if given and name not in given and not self.is_mutable_collection("params"):
            raise ValueError(
                f"the parameters given to {type(self).__name__} are under {', '.join(given)}, not under {name}: "
                "subclass ScannedRNN, and set cell_type to the cell of these parameters and cell_name to their name"
            )

    initialize_carry = ClassOrInstanceMethod(zero_carry)


class HiddenFirstScannedRNN(ScannedRNN):
    """The `ScannedRNN` of JaxMARL's Q-learning and of purejaxql.

    It has `initialize_carry(hidden_size, *batch_size)`, and its parameters are under `ScannedRNN_0/GRUCell_0`. The
    following class replaces purejaxql's LSTM:

        class ScannedRNN(jaxrnn.linen.HiddenFirstScannedRNN):
            cell_type: str = "optimized_lstm"
    """

    _cell_index = 0

    initialize_carry = ClassOrInstanceMethod(zero_carry_hidden_first)


# Flax names parameters after the class, and the class that this one replaces is named ScannedRNN.
HiddenFirstScannedRNN.__name__ = "ScannedRNN"


def cell_class(cell_type: str | type[nn.RNNCellBase]) -> Any:
    """Returns the cell class that `cell_type` is or names."""
    if not isinstance(cell_type, str):
        return cell_type
    if cell_type not in CELL_TYPES:
        raise ValueError(f"cell_type must be a cell class or one of {', '.join(CELL_TYPES)}, got {cell_type!r}")
    return CELL_TYPES[cell_type]
