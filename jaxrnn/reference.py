"""GRU and LSTM over `jax.lax.scan`: the semantics of every path, the CPU path, and the oracle of the tests.

Gates accumulate in float32 (float64 if an operand has it) and so does the carry between steps; what is returned has
the dtype of the carry that came in. Arguments are taken as valid: `jaxrnn.gru` and `jaxrnn.lstm` check them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
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


def gru_step(h: Array, xp: Array, params: GRUParams, operand_dtype: DTypeLike, precision: Precision) -> Array:
    """One GRU step from the input projection `xp [..., 3H]` (Cho et al. 2014, in the variant of cuDNN, PyTorch, Flax).

    r = s(xp_r + W_hr h), z = s(xp_z + W_hz h), n = tanh(xp_n + r (W_hn h + b_hn)), h' = (1 - z) n + z h.
    """
    x_r, x_z, x_n = jnp.split(xp, 3, axis=-1)
    h_r, h_z, h_n = jnp.split(matmul(h.astype(operand_dtype), params.w_hh, precision, xp.dtype), 3, axis=-1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    n = jnp.tanh(x_n + r * (h_n + params.b_hn.astype(xp.dtype)))
    return (1 - z) * n + z * h


def lstm_step(
    c: Array, h: Array, xp: Array, params: LSTMParams, operand_dtype: DTypeLike, precision: Precision
) -> tuple[Array, Array]:
    """One LSTM step from the input projection `xp [..., 4H]` (Hochreiter & Schmidhuber 1997, with forget gates).

    i, f, o = s(xp + W h), g = tanh(xp_g + W_hg h), c' = f c + i g, h' = o tanh(c').
    """
    i, f, g, o = jnp.split(xp + matmul(h.astype(operand_dtype), params.w_hh, precision, xp.dtype), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


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


def _time_first(x: Array | None, time_axis: int) -> Array | None:
    return x if x is None else jnp.moveaxis(x, time_axis, 0)


def _per_step(reset_state: Array | None, carry: Array, time_major: bool) -> tuple[Array | None, Array | None]:
    """Splits a reset state into `(fixed, per step with time first)`, one of them None."""
    if reset_state is None or reset_state.ndim <= carry.ndim:
        return reset_state, None
    return None, _time_first(reset_state, 0 if time_major else -2)


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
    xp = matmul(xs, params.w_ih, precision, dtype) + params.b_ih.astype(dtype)
    xp = _time_first(xp, 0 if time_major else -2)
    if resets is not None:
        resets = expand_resets(_time_first(resets, 0 if time_major else -1), xp.ndim)

    def step(h: Array, inputs: tuple[Array, Array | None, Array | None]) -> tuple[Array, Array]:
        xp_t, reset, state = inputs
        h = _select_reset(reset, fixed if state is None else state, h)
        h = gru_step(h, xp_t, params, operand_dtype, precision)
        return h, h.astype(carry.dtype)

    last, ys = jax.lax.scan(step, carry.astype(dtype), (xp, resets, stepped), reverse=reverse)
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
    xp = matmul(xs, params.w_ih, precision, dtype) + params.b.astype(dtype)
    xp = _time_first(xp, 0 if time_major else -2)
    if resets is not None:
        resets = expand_resets(_time_first(resets, 0 if time_major else -1), xp.ndim)

    def step(carry: tuple[Array, Array], inputs: tuple[Array, Array | None, Array | None, Array | None]):
        c, h = carry
        xp_t, reset, state_c, state_h = inputs
        c = _select_reset(reset, fixed_c if state_c is None else state_c, c)
        h = _select_reset(reset, fixed_h if state_h is None else state_h, h)
        c, h = lstm_step(c, h, xp_t, params, operand_dtype, precision)
        return (c, h), (h.astype(h0.dtype), c.astype(c0.dtype) if return_cells else None)

    init = (c0.astype(dtype), h0.astype(dtype))
    (c, h), (hs, cs) = jax.lax.scan(step, init, (xp, resets, stepped_c, stepped_h), reverse=reverse)
    hs, cs = (x if time_major or x is None else jnp.moveaxis(x, 0, -2) for x in (hs, cs))
    return (c.astype(c0.dtype), h.astype(h0.dtype)), (hs, cs) if return_cells else hs
