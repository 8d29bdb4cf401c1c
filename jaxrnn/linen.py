"""Flax linen modules over `jaxrnn.gru` and `jaxrnn.lstm`: same attributes, parameters and initial values as Flax's.

| instead of                                                                  | import                       |
| --------------------------------------------------------------------------- | ---------------------------- |
| `ScannedRNN` of purejaxrl, JaxMARL, Craftax_Baselines, Kinetix, Stoix, Mava | `ScannedRNN`                 |
| `nn.GRUCell`, `nn.LSTMCell`, `nn.OptimizedLSTMCell`                         | `GRUCell`, and so on         |

Resets, wherever a module takes them: `resets[t]` says that step t begins an episode, so it is the done of step t - 1.
The done that step t itself returns belongs to `resets[t + 1]`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype

from jaxrnn.recurrent import gru, lstm
from jaxrnn.reference import GRUParams, LSTMParams

if TYPE_CHECKING:
    from flax.typing import Dtype, Initializer
    from jax import Array

    from jaxrnn.recurrent import Implementation

__all__ = ["GRUCell", "LSTMCell", "OptimizedLSTMCell", "ScannedRNN"]

SIGMOIDS = (nn.sigmoid, jax.lax.logistic)
TANHS = (nn.tanh, jax.lax.tanh)


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


def gate_params(
    cell: nn.RNNCellBase, name: str, input_features: int, hidden: int, use_bias: bool
) -> tuple[Array, Array | None]:
    """Kernel and bias of one gate, under the names that Flax's cells have for them."""
    return DenseParams(
        features=hidden,
        use_bias=use_bias,
        kernel_init=cell.kernel_init if name.startswith("i") else cell.recurrent_kernel_init,
        bias_init=cell.bias_init,
        param_dtype=cell.param_dtype,
        parent=cell,
        name=name,
    )(input_features)


def lstm_params(cell: nn.RNNCellBase, input_features: int, hidden: int) -> LSTMParams:
    """`LSTMParams` of `cell`, whose compact method is running."""
    inputs, recurrent = [], []
    for gate in "ifgo":
        inputs.append(gate_params(cell, f"i{gate}", input_features, hidden, use_bias=False)[0])
        recurrent.append(gate_params(cell, f"h{gate}", hidden, hidden, use_bias=True))
    kernels, biases = zip(*recurrent, strict=True)
    return LSTMParams(jnp.concatenate(inputs, -1), jnp.concatenate(kernels, -1), jnp.concatenate(biases, -1))


class GRUCell(nn.GRUCell):
    """`flax.linen.GRUCell` over `jaxrnn.gru`: the same parameters, initial values and results.

    `RNN` and `ScannedRNN` run it over time in one call; called by itself it takes one step.

    Attributes:
      precision: of its matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`. With another `gate_fn` or `activation_fn` than sigmoid and tanh, None and
        "xla" run Flax's own cell, and "triton" raises NotImplementedError.
    """

    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    @nn.compact
    def packed_params(self, input_features: int, hidden: int) -> GRUParams:
        """The parameters as `jaxrnn.gru` takes them, for inputs of width `input_features`; made if missing."""
        inputs, recurrent = [], []
        for gate in "rzn":
            inputs.append(gate_params(self, f"i{gate}", input_features, hidden, use_bias=True))
            recurrent.append(gate_params(self, f"h{gate}", hidden, hidden, use_bias=gate == "n"))
        kernels, biases = zip(*inputs, strict=True)
        recurrent_kernels, (_, _, b_hn) = zip(*recurrent, strict=True)
        return GRUParams(*(jnp.concatenate(x, -1) for x in (kernels, recurrent_kernels, biases)), b_hn)

    def run(self, carry: Array, xs: Array, **options: Any) -> tuple[Array, Array, Array | None]:
        """Runs over time: `jaxrnn.gru` with `return_carries`; returns `(carry, ys, carries or None)`."""
        return_carries = options.pop("return_carries", False)
        xs, params = cast_operands(self, xs, carry, self.packed_params(xs.shape[-1], carry.shape[-1]))
        carry, ys = gru(params, carry, xs, **options)
        return carry, ys, ys if return_carries else None

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """Takes one step: `(carry [*batch, H], inputs [*batch, D]) -> (carry, output)`."""
        if refuse_fused(self, self.implementation):
            return super().__call__(carry, inputs)
        return step_cell(self, carry, inputs)


class LSTMCell(nn.LSTMCell):
    """`flax.linen.LSTMCell` over `jaxrnn.lstm`: the same parameters, initial values and results.

    `RNN` and `ScannedRNN` run it over time in one call; called by itself it takes one step.

    Attributes:
      precision: of its matmuls, as in `jaxrnn.lstm`.
      implementation: as in `GRUCell`.
    """

    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    @nn.compact
    def packed_params(self, input_features: int, hidden: int) -> LSTMParams:
        """The parameters as `jaxrnn.lstm` takes them, for inputs of width `input_features`; made if missing."""
        return lstm_params(self, input_features, hidden)

    def run(self, carry: Any, xs: Array, **options: Any) -> tuple[Any, Array, Any]:
        """Runs over time: `jaxrnn.lstm` with `return_carries`; returns `(carry, ys, carries or None)`."""
        return run_lstm(self, carry, xs, **options)

    def __call__(self, carry: tuple[Array, Array], inputs: Array) -> tuple[tuple[Array, Array], Array]:
        """Takes one step: `((c, h), inputs [*batch, D]) -> ((c, h), output)`, each `[*batch, H]`."""
        if refuse_fused(self, self.implementation):
            return super().__call__(carry, inputs)
        return step_cell(self, carry, inputs)


class OptimizedLSTMCell(nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell` over `jaxrnn.lstm`; here it differs from `LSTMCell` in its name only.

    Attributes:
      precision: of its matmuls, as in `jaxrnn.lstm`.
      implementation: as in `GRUCell`.
    """

    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    @nn.compact
    def packed_params(self, input_features: int, hidden: int) -> LSTMParams:
        """The parameters as `jaxrnn.lstm` takes them, for inputs of width `input_features`; made if missing."""
        return lstm_params(self, input_features, hidden)

    def run(self, carry: Any, xs: Array, **options: Any) -> tuple[Any, Array, Any]:
        """Runs over time: `jaxrnn.lstm` with `return_carries`; returns `(carry, ys, carries or None)`."""
        return run_lstm(self, carry, xs, **options)

    def __call__(self, carry: tuple[Array, Array], inputs: Array) -> tuple[tuple[Array, Array], Array]:
        """Takes one step: `((c, h), inputs [*batch, D]) -> ((c, h), output)`, each `[*batch, H]`."""
        if refuse_fused(self, self.implementation):
            return super().__call__(carry, inputs)
        return step_cell(self, carry, inputs)


FUSED = {nn.GRUCell: GRUCell, nn.LSTMCell: LSTMCell, nn.OptimizedLSTMCell: OptimizedLSTMCell}


def run_lstm(cell: LSTMCell | OptimizedLSTMCell, carry: Any, xs: Array, **options: Any) -> tuple[Any, Array, Any]:
    """`run` of the two LSTM cells."""
    return_carries = options.pop("return_carries", False)
    hidden = jax.tree.leaves(carry)[-1]
    xs, params = cast_operands(cell, xs, hidden, cell.packed_params(xs.shape[-1], hidden.shape[-1]))
    carry, ys = lstm(params, carry, xs, return_cells=return_carries, **options)
    if not return_carries:
        return carry, ys, None
    hs, cs = ys
    return carry, hs, (cs, hs)


def cast_operands(cell: nn.RNNCellBase, xs: Array, h: Array, params: Any) -> tuple[Array, Any]:
    """Casts inputs and weights to the dtype Flax computes in; biases are added in float32, as the gates are."""
    dtype = canonicalize_dtype(xs, h, *params, dtype=cell.dtype)
    bias_dtype = jnp.promote_types(dtype, jnp.float32)
    cast = (x.astype(dtype if name.startswith("w") else bias_dtype) for name, x in params._asdict().items())
    return xs.astype(dtype), type(params)(*cast)


def step_cell(cell: Any, carry: Any, inputs: Array) -> tuple[Any, Array]:
    """One step as a sequence of length one. As in Flax, the carry is promoted to the dtype computed in."""
    dtype = cell.dtype if cell.dtype is not None else jnp.result_type(inputs, cell.param_dtype)
    carry = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), carry)
    options = {"precision": cell.precision, "implementation": cell.implementation}
    carry, ys, _ = cell.run(carry, inputs[None], **options)
    return carry, ys[0]


def refuse_fused(cell: nn.RNNCellBase, implementation: Implementation) -> str | None:
    """Why `cell` cannot run as `jaxrnn.gru` or `jaxrnn.lstm`, or None. Raises if `implementation` insists on it."""
    if type(cell) not in FUSED and type(cell) not in FUSED.values():
        reason = f"it runs GRU, LSTM and OptimizedLSTM cells of jaxrnn.linen or flax.linen, not {type(cell).__name__}"
    elif cell.gate_fn not in SIGMOIDS or cell.activation_fn not in TANHS:
        reason = "its gates are sigmoid and tanh; this cell has another gate_fn or activation_fn"
    else:
        return None
    if implementation == "triton":
        raise NotImplementedError(f'implementation="triton" cannot run this cell: {reason}; None runs it with nn.scan')
    return reason


def fused_cell(cell: nn.RNNCellBase) -> Any:
    """`cell`, or for a bound cell of Flax its counterpart here, on the same parameters."""
    if type(cell) not in FUSED:
        return cell
    fields = (field.name for field in dataclasses.fields(cell) if field.name not in ("parent", "name"))
    return FUSED[type(cell)](**{name: getattr(cell, name) for name in fields}, parent=cell.scope.rewound())


def run_cell(
    cell: nn.RNNCellBase,
    carry: Any,
    xs: Array,
    *,
    resets: Array | None,
    reset_carry: Any,
    reverse: bool,
    time_major: bool,
    return_carries: bool,
    precision: jax.lax.PrecisionLike,
    implementation: Implementation,
    scan_options: dict[str, Any] | None = None,
) -> tuple[Any, Array, Any]:
    """Runs a bound cell over time, fused if it can be; returns `(carry, ys, carries or None)`."""
    if implementation is None:
        implementation = getattr(cell, "implementation", None)
    time_axis = 0 if time_major else xs.ndim - cell.num_feature_axes - 1
    if resets is not None and reset_carry is None and getattr(cell, "carry_init", None) is not nn.initializers.zeros:
        reset_carry = cell.initialize_carry(jax.random.key(0), xs.shape[:time_axis] + xs.shape[time_axis + 1 :])
    if refuse_fused(cell, implementation):
        return scan_cell(
            cell, carry, xs, time_axis, resets, reset_carry, reverse, return_carries, scan_options or SCAN_OPTIONS
        )
    cell = fused_cell(cell)
    return cell.run(
        carry,
        xs,
        resets=resets,
        reset_state=reset_carry,
        reverse=reverse,
        time_major=time_major,
        return_carries=return_carries,
        precision=cell.precision if precision is None else precision,
        implementation=implementation,
    )


SCAN_OPTIONS = {"variable_broadcast": "params", "split_rngs": {"params": False}}


def scan_cell(
    cell: nn.RNNCellBase,
    carry: Any,
    xs: Array,
    time_axis: int,
    resets: Array | None,
    reset_carry: Any,
    reverse: bool,
    return_carries: bool,
    scan_options: dict[str, Any],
) -> tuple[Any, Array, Any]:
    """Runs any cell with `nn.scan`; returns `(carry, ys, carries or None)`."""
    raise NotImplementedError


class BoundToClassOrInstance:
    """A function whose first argument is the instance it is taken from, or else the class."""

    nowrap = True  # Flax leaves it as it is

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        return functools.partial(self.function, owner if instance is None else instance)


def _initialize_carry(rnn: Any, batch_size: int | Sequence[int], hidden_size: int | None = None) -> Any:
    batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
    hidden_size = rnn.hidden_state_dim if hidden_size is None else hidden_size
    cell = cell_class(rnn.cell_type)(features=hidden_size, param_dtype=rnn.param_dtype, parent=None)
    return cell.initialize_carry(jax.random.key(0), (*batch, hidden_size))


CELL_TYPES = {"gru": GRUCell, "lstm": LSTMCell, "optimized_lstm": OptimizedLSTMCell}


def cell_class(cell_type: str | type[nn.RNNCellBase]) -> Any:
    """The class of cells that `cell_type` names."""
    if not isinstance(cell_type, str):
        return cell_type
    if cell_type not in CELL_TYPES:
        raise ValueError(f"cell_type must be a class of cells or one of {sorted(CELL_TYPES)}, got {cell_type!r}")
    return CELL_TYPES[cell_type]


class ScannedRNN(nn.Module):
    """The reset-aware RNN of recurrent RL agents: `carry, ys = ScannedRNN()(carry, (ins, resets))`."""

    hidden_state_dim: int | None = None
    cell_type: str | type[nn.RNNCellBase] = "gru"
    cell_name: str | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    @nn.compact
    def __call__(self, carry: Any, x: tuple[Array, Array]) -> tuple[Any, Array]:
        """Runs over time: `(carry, (ins [T, *batch, D], resets [T, *batch])) -> (carry, ys [T, *batch, H])`."""
        ins, resets = x
        hidden = jax.tree.leaves(carry)[-1].shape[-1]
        make_cell = cell_class(self.cell_type)
        name = self.cell_name or f"{make_cell.__name__}_1"
        cell = make_cell(features=hidden, dtype=self.dtype, param_dtype=self.param_dtype, name=name)
        carry, ys, _ = run_cell(
            cell,
            carry,
            ins,
            resets=resets,
            reset_carry=None,
            reverse=False,
            time_major=True,
            return_carries=False,
            precision=self.precision,
            implementation=self.implementation,
        )
        return carry, ys

    initialize_carry = BoundToClassOrInstance(_initialize_carry)
