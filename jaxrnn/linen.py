"""Flax linen modules over the functions of `jaxrnn`: the attributes, parameters and initial values of Flax's own.

| instead of                                                       | import                                            |
| ---------------------------------------------------------------- | ------------------------------------------------- |
| `ScannedRNN` of purejaxrl, JaxMARL, Craftax_Baselines, Kinetix,  | `ScannedRNN`                                      |
| Stoix, Mava                                                      |                                                   |
| `ScannedRNN` of JaxMARL's Q-learning and of purejaxql            | `HiddenFirstScannedRNN as ScannedRNN`             |
| `nn.RNN`                                                         | `RNN`                                             |
| `ResetRNN` of jaxued                                             | `ResetRNN`                                        |
| `nn.GRUCell`, `nn.LSTMCell`, `nn.OptimizedLSTMCell`              | `GRUCell`, `LSTMCell`, `OptimizedLSTMCell`        |
| `nn.RMSNorm`, `nn.LayerNorm`                                     | `RMSNorm`, `LayerNorm`                            |

Resets, wherever a module takes them: `resets[t]` is nonzero if step t begins an episode. It is the done that step
t - 1 returned, the one stored beside the observation of step t; the done of step t belongs to `resets[t + 1]`.
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
from jaxrnn.checks import Implementation, must_scan
from jaxrnn.reference import GRUParams, LSTMParams

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
    """The parameters of an `nn.Dense`, without its product."""

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
    """What the cells here add to Flax's, which come after this class in their bases."""

    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    def __call__(self, carry: Carry, inputs: Array) -> tuple[Carry, Array]:
        """Takes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM; H is read from it, as in Flax.
          inputs: `[*batch, D]`; its batch axes and those of the carry broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the wider of the dtype computed in and that of the carry.

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
        """Kernel and bias under the name that Flax's cells have for one gate's product with x (`i*`) or h (`h*`)."""
        return DenseParams(
            features=hidden,
            use_bias=use_bias,
            kernel_init=self.kernel_init if name.startswith("i") else self.recurrent_kernel_init,
            bias_init=self.bias_init,
            param_dtype=self.param_dtype,
            name=name,
        )(input_features)

    def run(self, carry: Carry, xs: Array, **options: Any) -> tuple[Carry, Array, Carry | None]:
        """`modules.run` with these parameters."""
        h = jax.tree.leaves(carry)[-1]
        params = self.packed_params(xs.shape[-1], h.shape[-1])
        dtype = canonicalize_dtype(xs, h, *params, dtype=self.dtype)
        return modules.run(modules.cast(params, dtype), carry, jnp.asarray(xs, dtype), **options)


class GRUCell(FusedCell, nn.GRUCell):
    """`flax.linen.GRUCell` over `jaxrnn.gru`: the same parameters, initial values and results.

    `RNN` and `ScannedRNN` run it over time in one call; called by itself it takes one step.

    Attributes:
      features: H, for `initialize_carry`; further attributes as in Flax.
      gate_fn: anything but sigmoid, or `activation_fn` anything but tanh, runs as Flax's own cell, under `nn.scan`.
      dtype: what matrices are multiplied in. The carry keeps its own dtype: float32 with `dtype=jnp.bfloat16`.
      precision: of the multiplications, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; "triton" raises NotImplementedError with another `gate_fn` or `activation_fn`.
    """

    @nn.compact
    def packed_params(self, input_features: int, hidden: int) -> GRUParams:
        """The parameters as `jaxrnn.gru` takes them, created if missing; b_hr and b_hz there are none."""
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
        """`modules.run` with these parameters."""
        if isinstance(carry, (tuple, list)):
            raise ValueError(f"the carry of a GRU is one array [*batch, H], got a {type(carry).__name__}")
        return super().run(carry, xs, **options)


class FusedLSTMCell(FusedCell):
    """What the two LSTM cells share."""

    @nn.compact
    def packed_params(self, input_features: int, hidden: int, proj_size: int | None = None) -> LSTMParams:
        """The parameters as `jaxrnn.lstm` takes them, created if missing; with a projection, `proj` beside Flax's."""
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
        """`modules.run` with these parameters."""
        if not isinstance(carry, (tuple, list)) or len(carry) != 2:
            raise ValueError(f"the carry of an LSTM is a pair (c, h), got {type(carry).__name__}")
        return super().run(carry, xs, **options)


class LSTMCell(FusedLSTMCell, nn.LSTMCell):
    """`flax.linen.LSTMCell` over `jaxrnn.lstm`: the same parameters, initial values and results. Carry `(c, h)`.

    Attributes:
      features: as all attributes, as in `GRUCell`.
    """


class OptimizedLSTMCell(FusedLSTMCell, nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell` over `jaxrnn.lstm`; from `LSTMCell` here it differs in its name alone.

    Attributes:
      features: as all attributes, as in `GRUCell`.
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
    """Why `cell` can only run step by step, under `nn.scan`; None if it can run as `jaxrnn.gru` or `jaxrnn.lstm`."""
    if type(cell) not in FUSED and type(cell) not in FUSED.values():
        return f"a {type(cell).__name__}; GRUCell, LSTMCell and OptimizedLSTMCell, here or in flax.linen, can be fused"
    if not modules.has_usual_activations(cell):
        return "a cell with another gate_fn than sigmoid or another activation_fn than tanh"
    if any(scan_options[name] != default for name, default in SCAN_OPTIONS.items()):
        return f"an RNN with other {', '.join(SCAN_OPTIONS)} than by default"
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
    """Runs a bound cell over time, fused if it can be; returns `(carry, ys, carries of every step if wanted)`."""
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
        scope: Any = cell.scope  # shared, so that the parameters stay where Flax's cell has them
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
    """What `cell` starts from, for a batch as in `xs`."""
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
    """Runs any cell with `nn.scan`; returns as `run_cell` does."""
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
    """`flax.linen.RNN` with episode resets, in one launch: runs `cell` over time, its parameters under `cell/`.

        rnn = RNN(GRUCell(128), time_major=True, return_carry=True)
        carry, ys = rnn.apply(variables, xs, initial_carry=carry, resets=resets)

    GRU, LSTM and OptimizedLSTM cells, those here or Flax's, run as `jaxrnn.gru` or `jaxrnn.lstm`. Any other cell, one
    with its own `gate_fn` or `activation_fn`, and an RNN with its own `variable_axes`, `variable_broadcast`,
    `variable_carry` or `split_rngs` run under `nn.scan`; they take `resets` too.

    Attributes:
      cell: the cell.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`; no transpose either way.
      return_carry: return `(carry, outputs)` instead of `outputs`.
      reverse: run from the last step to the first. Outputs come in the order computed, last step first.
      keep_order: with `reverse`, return the outputs in the order of the inputs.
      unroll: steps to a loop iteration of `nn.scan`, where that is what runs.
      precision: of the matmuls, as in `jaxrnn.gru`; None takes the cell's.
      implementation: as in `jaxrnn.gru`; None takes the cell's, and always works.
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
        """Runs the cell over `inputs`, starting afresh wherever `resets` is nonzero.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`.
          initial_carry: what the first step sees, `[*batch, H]` or a pair `(c, h)`; by default `cell.initialize_carry`.
          init_key: the key for `cell.initialize_carry`, which ignores it unless `carry_init` is random.
          seq_lengths: `[*batch]` integers. The carry returned is the one at the end of each sequence (`initial_carry`
            if its length is 0); outputs after it are not zeroed. `reverse` leaves padding at the end.
          return_carry: overrides the attribute, as do `time_major`, `reverse` and `keep_order`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
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
    """`flax.linen.RMSNorm` over `jaxrnn.rms_norm`: the same parameters, initial values and results.

    `reduction_axes` and `feature_axes` must be the last axis, and there is no `mask`, `axis_name`, `axis_index_groups`
    or `force_float32_reductions=False`: these raise NotImplementedError.

    Attributes:
      epsilon: added to the mean square, inside the root; further attributes as in Flax.
      dtype: of the result; None: what inputs and parameters promote to. It is computed in float32.
      use_fast_variance: changes nothing: the variance is always the mean of squared differences.
      implementation: as in `jaxrnn.rms_norm`.
    """

    implementation: Implementation = None

    @nn.compact
    def __call__(self, x: Array, *, residual: Array | None = None, mask: Array | None = None) -> Any:
        """Normalises the last axis.

        Args:
          x: `[*rows, N]`.
          residual: of the shape and dtype of `x`, added to it first, in the same pass.
          mask: Flax's; None.

        Returns:
          `y`, of the shape of `x`; with a residual `(y, x + residual)`, the latter in the dtype of `x`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this input, or an attribute is one that Flax alone
            has; the message says which.
        """
        return run_norm(self, "rms", x, residual, mask)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` over `jaxrnn.layer_norm`: the same parameters, initial values and results.

    Attributes:
      epsilon: as all attributes, as in `RMSNorm`.
    """

    implementation: Implementation = None

    @nn.compact
    def __call__(self, x: Array, *, residual: Array | None = None, mask: Array | None = None) -> Any:
        """Normalises the last axis; everything is as in `RMSNorm`."""
        return run_norm(self, "layer", x, residual, mask)


def run_norm(norm: Any, kind: str, x: Array, residual: Array | None, mask: Array | None) -> Any:
    """Normalises `x`, with the parameters of a bound module, created if missing."""
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
    """The carry of a GRU or an LSTM of its arrays."""
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


class FusedStack(nn.Module):
    """What the stacks share."""

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
        """Runs all layers over `inputs`, starting afresh wherever `resets` is nonzero.

        A carry is a tuple with an entry for each layer. An entry is `[*batch, H]` or, for an LSTM, `(c, h)`; if
        `bidirectional`, a pair of such: forward, backward.

        Args:
          inputs: `[*batch, T, D]`, or `[T, *batch, D]` if `time_major`. Any number of batch axes.
          initial_carry: what each direction's first step sees; by default what `initialize_carry` returns.
          init_key: the key for `initialize_carry`, which ignores it unless `carry_init` is random.
          seq_lengths: `[*batch]` integers. The carry returned is the one at the end of each sequence (`initial_carry`
            if its length is 0), and the backward direction starts there; outputs after it mean nothing and are not
            zeroed. May come with `resets`.
          return_carry: overrides the attribute, as do `time_major`, `reverse`, `keep_order` and `deterministic`.
          time_major: see the attribute.
          reverse: see the attribute.
          keep_order: see the attribute.
          deterministic: see the attribute.
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
            modules.by_direction("initial_carry", initial_carry, *structure),
            inputs,
            resets=resets,
            reset_carry=None if reset_carry is None else modules.by_direction("reset_carry", reset_carry, *structure),
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
        """Returns the carry of a new sequence: what `carry_init` makes, or the learned one.

        Args:
          rng: the key for `carry_init`.
          input_shape: of the inputs of one step, `[*batch, D]`.

        Raises:
          ValueError: the carry is learned, and the module has no parameters at hand: use
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
                "the carry is learned, a parameter: use stack.apply(variables, rng, input_shape, "
                'method="initialize_carry")'
            )
        return modules.broadcast_carry(self.for_each(self.learned), input_shape[:-1])

    @nn.nowrap
    def widths(self) -> tuple[int, ...]:
        """The widths of the arrays of a cell's carry, that of the hidden state last."""
        return (self.features,)

    @nn.nowrap
    def packed_params(self, cell: Any, input_features: int) -> Any:
        """The parameters of one of the cells, created if missing."""
        return cell.packed_params(input_features, self.features)

    @nn.nowrap
    def names(self) -> list[list[str]]:
        """The names of the cells, by layer and direction."""
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        return [[f"layers_{k}{suffix}" for suffix in suffixes] for k in range(self.num_layers)]

    @nn.nowrap
    def for_each(self, make: Callable[[str], Carry]) -> Any:
        """The carry of which `make` gives the entry for every cell, by its name."""
        entries = [tuple(map(make, names)) for names in self.names()]
        return tuple(entry if self.bidirectional else entry[0] for entry in entries)

    @nn.compact
    def learned(self, name: str) -> Carry:
        """The learned carry of a cell, `[H]` or a pair of such."""
        states = zip(("c", "h")[-len(self.widths()) :], self.widths(), strict=True)
        return one_or_pair(
            [self.param(f"{name}_carry_{x}", self.carry_init, (width,), self.param_dtype) for x, width in states]
        )

    @nn.nowrap
    def make_norm(self, name: str) -> nn.Module:
        """What normalises the outputs of one of the layers."""
        if isinstance(self.norm, nn.Module):
            raise ValueError("norm must make a module for each layer: pass its class or a function, not a module")
        if callable(self.norm):
            return self.norm(name=name)
        make = {"rms": RMSNorm, "layer": LayerNorm}[str(self.norm)]
        return make(dtype=self.dtype, param_dtype=self.param_dtype, implementation=self.implementation, name=name)

    @nn.nowrap
    def make_cell(self, **options: Any) -> Any:
        """One of the cells."""
        names = "features", "dtype", "param_dtype", "kernel_init", "recurrent_kernel_init", "bias_init"
        return self._cell(**{name: getattr(self, name) for name in names}, **options)


class GRU(FusedStack):
    """A stack of GRUs as `torch.nn.GRU` has it: layers, directions, dropout between layers; and episode resets.

        gru = GRU(128, num_layers=2, time_major=True, return_carry=True)
        carry, ys = gru.apply(variables, xs, initial_carry=carry, resets=resets)

    The parameters of layer k are those of a `GRUCell`, at `layers_{k}` and, of the backward direction, at
    `layers_{k}_reverse`. In the outputs the directions are concatenated: forward, then backward.

    Attributes:
      features: H, the width of every layer and direction.
      num_layers: how many layers there are, each over the outputs of the one before.
      dropout_rate: of the dropout over the outputs of every layer but the last; a new mask for every step.
      bidirectional: whether each layer also runs from the last step to the first, with weights of its own.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`; no transpose either way.
      return_carry: return `(carry, outputs)` instead of `outputs`.
      reverse: run all layers from the last step to the first. Outputs come in the order computed, last step first.
      keep_order: with `reverse`, return the outputs in the order of the inputs.
      deterministic: leave dropout out; with a `dropout_rate`, to be given here or at the call.
      learned_carry: sequences and, by default, episodes start from parameters of width H, which `carry_init` makes:
        `layers_{k}_carry_h`, or `layers_{k}_carry_c` and `layers_{k}_carry_h` of an LSTM, and the like for `_reverse`.
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
        "layer" for a `RMSNorm` or `LayerNorm`, its parameters at `norm_{k}`, where k is the layer whose outputs it
        takes; or what makes another module, `norm(name=name)`, as a class does. None: nothing.
    """

    _cell = GRUCell


class LSTM(FusedStack):
    """A stack of LSTMs as `torch.nn.LSTM` has it: `GRU` with the cell `OptimizedLSTMCell` and carries `(c, h)`.

    Attributes:
      features: H, as all attributes not named here as in `GRU`.
      proj_size: P, if hidden states, and so outputs, shall be projected to P units, with `layers_{k}/proj`; c stays H
        wide. As `params.w_hr` in `jaxrnn.lstm`.
    """

    proj_size: int | None = None

    _cell = OptimizedLSTMCell

    @nn.nowrap
    def widths(self) -> tuple[int, ...]:
        """The widths of c and h."""
        return self.features, self.features if self.proj_size is None else self.proj_size

    @nn.nowrap
    def packed_params(self, cell: Any, input_features: int) -> LSTMParams:
        """The parameters of one of the cells, created if missing."""
        return cell.packed_params(input_features, self.features, self.proj_size)


class ResetRNN(nn.Module):
    """jaxued's module of this name: `carry, ys = ResetRNN(cell)((xs, resets), initial_carry=carry)`, time first.

    It has no parameters of its own: those of the cell are where the cell is made, `OptimizedLSTMCell_0` in the module
    around. Cells run as in `RNN`, fused if they can be.

    Attributes:
      cell: the cell, one of those here or of Flax's.
      precision: of the matmuls, as in `jaxrnn.gru`; None takes the cell's.
      implementation: as in `jaxrnn.gru`; None takes the cell's, and always works.
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
        """Runs the cell over time, starting from `reset_carry` wherever `resets` is nonzero.

        Args:
          inputs: `(xs, resets)`: `xs [T, *batch, D]`, and `resets [T, *batch]` of any dtype, nonzero where step t is
            the first of an episode: the done that step t - 1 returned, not that of step t.
          initial_carry: `[*batch, H]`, for an LSTM `(c, h)`; by default `reset_carry`, that of the first step if there
            is one for every step.
          reset_carry: what an episode starts from, by default `cell.initialize_carry`: `[H]`, `[*batch, H]` or
            `[T, *batch, H]`, or a pair of such for an LSTM. Takes gradients.

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
    """The reset carry of the first step, of the shape of `like [*batch, H]`."""
    return jnp.broadcast_to(reset_carry if jnp.ndim(reset_carry) <= like.ndim else reset_carry[0], like.shape)


class OnClassOrInstance:
    """Makes a function a method of its first argument, be that an instance or the class itself."""

    nowrap = True  # Flax wraps no method that says so

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return functools.partial(self.function, owner if instance is None else instance)


def zero_carry(rnn: Any, batch_size: int | Sequence[int], hidden_size: int | None = None) -> Carry:
    """Returns the carry of a new episode, zeros. Works on the class, and on an instance: it then knows its attributes.

    Args:
      rnn: the class or the instance.
      batch_size: an int, or a tuple of all batch axes.
      hidden_size: H; by default `hidden_state_dim`.
    """
    batch = tuple(batch_size) if isinstance(batch_size, Sequence) else (batch_size,)
    hidden_size = rnn.hidden_state_dim if hidden_size is None else hidden_size
    if hidden_size is None:
        raise ValueError("initialize_carry takes (batch_size, hidden_size), unless hidden_state_dim is set")
    cell = cell_class(rnn.cell_type)(features=hidden_size, param_dtype=rnn.param_dtype, parent=None)
    return cell.initialize_carry(jax.random.key(0), (*batch, hidden_size))


def zero_carry_hidden_first(rnn: Any, hidden_size: int, *batch_size: int) -> Carry:
    """`zero_carry` with arguments the other way round: `(hidden_size, *batch_size)`."""
    return zero_carry(rnn, batch_size, hidden_size)


class ScannedRNN(nn.Module):
    """The recurrent module of JAX RL agents: `carry, ys = ScannedRNN()(carry, (ins, resets))`.

    Replaces the class of this name that JaxMARL, Craftax_Baselines, Kinetix, Stoix and Mava carry: changing the import
    changes neither the parameters (`ScannedRNN_0/GRUCell_1/...`), nor their initial values, nor the results. purejaxrl
    and popjaxrl have them at `ScannedRNN_0/GRUCell_0/...`: set `cell_name`.
    H is the width of the carry, whatever that of the inputs. Rollouts call it with T = 1, updates with whole sequences.

    For another cell set `cell_type`. Where `initialize_carry` is called on the class, set it there too:

        class ScannedRNN(jaxrnn.linen.ScannedRNN):
            cell_type: str = "lstm"

    Attributes:
      hidden_state_dim: H, if `initialize_carry` shall know it; the carry must then have this width.
      cell_type: "gru", "lstm", "optimized_lstm", "mgu", "simple", or a class of cells. Only GRU and LSTMs are fused.
      cell_name: where the cell's parameters are, by default `GRUCell_1` for "gru", `LSTMCell_1` for "lstm", and so on:
        the classes this one replaces create two cells, of which the second has parameters. Where a class makes no
        dummy cell, makes it with `parent=None`, or after the other, the name is "GRUCell_0".
      dtype: what matrices are multiplied in; the carry keeps its own. None: what inputs and parameters promote to.
      param_dtype: of the parameters and the carry that `initialize_carry` makes.
      precision: of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; None always works.
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
        """Runs over time, starting from zeros wherever `resets` is nonzero.

        Args:
          carry: `[*batch, H]`, for an LSTM `(c, h)`; `initialize_carry` makes one.
          x: `(ins, resets)`: `ins [T, *batch, D]`, and `resets [T, *batch]` of any dtype, nonzero where step t is the
            first of an episode: the done that step t - 1 returned, not that of step t.

        Returns:
          `(carry, ys [T, *batch, H])`.

        Raises:
          ValueError: shapes or dtypes disagree, or the parameters are of another cell, or under another name.
          NotImplementedError: the named implementation cannot run this cell or input; the message says why.
        """
        if not isinstance(x, (tuple, list)) or len(x) != 2:
            raise ValueError(
                f"ScannedRNN takes (carry, (ins, resets)), got {type(x).__name__} instead of (ins, resets)"
            )
        ins, resets = x
        if not (states := jax.tree.leaves(carry)) or not all(jnp.ndim(state) for state in states):
            raise ValueError("carry must be [*batch, H], for an LSTM (c, h): initialize_carry makes one")
        hidden = states[-1].shape[-1]
        if self.hidden_state_dim not in (None, hidden):
            raise ValueError(f"the carry must be {self.hidden_state_dim} wide, as hidden_state_dim says, got {hidden}")
        make = cell_class(self.cell_type)
        name = f"{make.__name__}_{self._cell_index}" if self.cell_name is None else self.cell_name
        self._check_name(name)
        cell = make(features=hidden, dtype=self.dtype, param_dtype=self.param_dtype, name=name)
        carry, ys, _ = run_cell(
            cell, carry, ins, resets=resets, precision=self.precision, implementation=self.implementation
        )
        return carry, ys

    def _check_name(self, name: str) -> None:
        """Refuses parameters of a class that has another cell, or has it under another name."""
        given = self.variables.get("params", {})
        if given and name not in given and not self.is_mutable_collection("params"):
            raise ValueError(
                f"the parameters given to {type(self).__name__} are under {', '.join(given)}, not under {name}: "
                "subclass it, and set cell_type to their kind of cell and cell_name to the name that they are under"
            )

    initialize_carry = OnClassOrInstance(zero_carry)


class HiddenFirstScannedRNN(ScannedRNN):
    """`ScannedRNN` as JaxMARL's Q-learning and purejaxql have it.

    `initialize_carry(hidden_size, *batch_size)`, and parameters under `ScannedRNN_0/GRUCell_0`. purejaxql's LSTM:

        class ScannedRNN(jaxrnn.linen.HiddenFirstScannedRNN):
            cell_type: str = "optimized_lstm"
    """

    _cell_index = 0

    initialize_carry = OnClassOrInstance(zero_carry_hidden_first)


# Flax names parameters after the class.
HiddenFirstScannedRNN.__name__ = "ScannedRNN"


def cell_class(cell_type: str | type[nn.RNNCellBase]) -> Any:
    """The class of cells that `cell_type` is or names."""
    if not isinstance(cell_type, str):
        return cell_type
    if cell_type not in CELL_TYPES:
        raise ValueError(f"cell_type must be a class of cells or one of {', '.join(CELL_TYPES)}, got {cell_type!r}")
    return CELL_TYPES[cell_type]
