"""GRU and LSTM over `jax.lax.scan`: the semantics of every path, the CPU path, and the oracle of the tests.

Gates accumulate in float32 (float64 if an operand has it) and so does the carry between steps; what is returned has
the dtype of the carry that came in. Arguments are taken as valid: `jaxrnn.gru` and `jaxrnn.lstm` check them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array
    from jax.typing import DTypeLike

    Precision = jax.lax.PrecisionLike


class GRUParams(NamedTuple):
    """Weights of a GRU; gates ordered r, z, n.

    Attributes:
      w_ih: `[D, 3H]` input weights.
      w_hh: `[H, 3H]` recurrent weights.
      b_ih: `[3H]` bias of the three gates; the recurrent biases of r and z are added into it.
      b_hn: `[H]` recurrent bias of n, inside the product with r.
    """

    w_ih: Array
    w_hh: Array
    b_ih: Array
    b_hn: Array


class LSTMParams(NamedTuple):
    """Weights of an LSTM; gates ordered i, f, g, o.

    Attributes:
      w_ih: `[D, 4H]` input weights.
      w_hh: `[H, 4H]` recurrent weights.
      b: `[4H]` bias; nothing is added for the forget gate.
    """

    w_ih: Array
    w_hh: Array
    b: Array


def accumulation_dtype(*dtypes: DTypeLike) -> jnp.dtype:
    """The dtype gates and carry are computed in: float32, or float64 where an operand is."""
    return jnp.result_type(jnp.float32, *dtypes)


def matmul(x: Array, w: Array, precision: Precision, dtype: DTypeLike) -> Array:
    """`x @ w` with both operands in their common dtype, accumulated and returned in `dtype`."""
    operand_dtype = jnp.result_type(x, w)
    return jnp.matmul(
        x.astype(operand_dtype), w.astype(operand_dtype), precision=precision, preferred_element_type=dtype
    )


def gru_cell(a_r: Array, a_z: Array, x_n: Array, h_n: Array, h: Array) -> Array:
    """One GRU step from its preactivations (Cho et al. 2014, in the variant of cuDNN, PyTorch, Flax).

    r = s(a_r), z = s(a_z), n = tanh(x_n + r h_n), h' = (1 - z) n + z h.
    """
    r, z = jax.nn.sigmoid(a_r), jax.nn.sigmoid(a_z)
    n = jnp.tanh(x_n + r * h_n)
    return (1 - z) * n + z * h


def lstm_cell(i: Array, f: Array, g: Array, o: Array, c: Array) -> tuple[Array, Array]:
    """One LSTM step from its preactivations (Hochreiter & Schmidhuber 1997, with forget gates).

    c' = s(f) c + s(i) tanh(g), h' = s(o) tanh(c').
    """
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


def for_platform(
    project: Callable[[Array], Array], cell: Callable[..., Any], xs: Array
) -> tuple[Array, Callable[[Array], Array], Callable[..., Any]]:
    """Arranges a time loop for the default backend; results are the same, to rounding.

    Args:
      project: inputs to input projection, of one step or of many.
      cell: the pointwise part of a step.
      xs: inputs of all steps.

    Returns:
      `(inputs, project, cell)` for the loop: what it scans over, and the functions that a step calls.
    """
    if jax.default_backend() != "cpu":
        # one large matmul before the loop: a GRU is 1.7x as fast as Flax's, which projects in the loop, on an H200
        return project(xs), lambda xp: xp, cell
    # in the loop, and gates recomputed backward: both keep memory traffic down. T=128 B=64 H=128 on one EPYC core,
    # forward / gradient in ms: GRU 20 / 64, LSTM 25 / 102; as off the CPU 36 / 114, 52 / 167; Flax 19 / 85, 25 / 120
    return xs, project, jax.checkpoint(cell, prevent_cse=False)


def expand_resets(resets: Array, ndim: int) -> Array:
    """`resets` as booleans, with trailing axes of length one up to `ndim`. Nonzero (NaN too) means reset."""
    resets = resets != 0
    return resets.reshape(resets.shape + (1,) * (ndim - resets.ndim))


def _select_reset(reset: Array | None, reset_state: Array | None, carry: Array) -> Array:
    """The carry a step sees: a select, never a product, so that a NaN or infinite carry does not leak."""
    if reset is None:
        return carry
    new = jnp.zeros_like(carry) if reset_state is None else reset_state.astype(carry.dtype)
    return jnp.where(reset, new, carry)


def _per_step(reset_state: Array | None, carry: Array, time_major: bool) -> tuple[Array | None, Array | None]:
    """Splits a reset state into `(fixed, per step with time first)`, one of them None."""
    if reset_state is None or reset_state.ndim <= carry.ndim:
        return reset_state, None
    return None, jnp.moveaxis(reset_state, 0 if time_major else -2, 0)


def gru(
    params: GRUParams,
    carry: Array,
    xs: Array,
    *,
    resets: Array | None = None,
    reset_state: Array | None = None,
    reverse: bool = False,
    time_major: bool = True,
    precision: Precision = None,
) -> tuple[Array, Array]:
    """`jaxrnn.gru` as a `lax.scan`; see there for shapes."""
    dtype = accumulation_dtype(carry, xs, *params)
    operand_dtype = jnp.result_type(xs, params.w_ih)
    fixed, stepped = _per_step(reset_state, carry, time_major)
    if resets is not None:
        resets = expand_resets(jnp.moveaxis(resets, 0 if time_major else -1, 0), xs.ndim)

    def project(x: Array) -> Array:
        return matmul(x, params.w_ih, precision, dtype) + params.b_ih.astype(dtype)

    inputs, project_step, cell = for_platform(project, gru_cell, xs)

    def step(h: Array, inputs: tuple[Array, Array | None, Array | None]) -> tuple[Array, Array]:
        x, reset, state = inputs
        h = _select_reset(reset, fixed if state is None else state, h)
        x_r, x_z, x_n = jnp.split(project_step(x), 3, axis=-1)
        h_r, h_z, h_n = jnp.split(matmul(h.astype(operand_dtype), params.w_hh, precision, dtype), 3, axis=-1)
        h = cell(x_r + h_r, x_z + h_z, x_n, h_n + params.b_hn.astype(dtype), h)
        return h, h.astype(carry.dtype)

    inputs = jnp.moveaxis(inputs, 0 if time_major else -2, 0)
    last, ys = jax.lax.scan(step, carry.astype(dtype), (inputs, resets, stepped), reverse=reverse)
    return last.astype(carry.dtype), ys if time_major else jnp.moveaxis(ys, 0, -2)


def lstm(
    params: LSTMParams,
    carry: tuple[Array, Array],
    xs: Array,
    *,
    resets: Array | None = None,
    reset_state: tuple[Array, Array] | None = None,
    reverse: bool = False,
    time_major: bool = True,
    return_cells: bool = False,
    precision: Precision = None,
) -> tuple[tuple[Array, Array], Array | tuple[Array, Array]]:
    """`jaxrnn.lstm` as a `lax.scan`; see there for shapes."""
    c0, h0 = carry
    dtype = accumulation_dtype(c0, h0, xs, *params)
    operand_dtype = jnp.result_type(xs, params.w_ih)
    reset_c, reset_h = (None, None) if reset_state is None else reset_state
    fixed_c, stepped_c = _per_step(reset_c, c0, time_major)
    fixed_h, stepped_h = _per_step(reset_h, h0, time_major)
    if resets is not None:
        resets = expand_resets(jnp.moveaxis(resets, 0 if time_major else -1, 0), xs.ndim)

    def project(x: Array) -> Array:
        return matmul(x, params.w_ih, precision, dtype) + params.b.astype(dtype)

    inputs, project_step, cell = for_platform(project, lstm_cell, xs)

    def step(
        carry: tuple[Array, Array], inputs: tuple[Array, Array | None, Array | None, Array | None]
    ) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        c, h = carry
        x, reset, state_c, state_h = inputs
        c = _select_reset(reset, fixed_c if state_c is None else state_c, c)
        h = _select_reset(reset, fixed_h if state_h is None else state_h, h)
        preactivations = project_step(x) + matmul(h.astype(operand_dtype), params.w_hh, precision, dtype)
        c, h = cell(*jnp.split(preactivations, 4, axis=-1), c)
        return (c, h), (h.astype(h0.dtype), c.astype(c0.dtype)) if return_cells else (h.astype(h0.dtype),)

    inputs = jnp.moveaxis(inputs, 0 if time_major else -2, 0)
    init = (c0.astype(dtype), h0.astype(dtype))
    (c, h), ys = jax.lax.scan(step, init, (inputs, resets, stepped_c, stepped_h), reverse=reverse)
    if not time_major:
        ys = tuple(jnp.moveaxis(y, 0, -2) for y in ys)
    return (c.astype(c0.dtype), h.astype(h0.dtype)), (ys[0], ys[1]) if return_cells else ys[0]
