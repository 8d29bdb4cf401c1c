"""Dtypes and matrix products of a recurrence, and the selection of the states from which episodes start."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def accumulation_dtype(*dtypes: DTypeLike) -> jnp.dtype:
    """Returns the dtype in which gates and carry are computed: float64 if any operand is float64, else float32."""
    wide = jnp.float64 in map(jnp.result_type, dtypes)  # one by one: `jax_numpy_dtype_promotion` may forbid promotion
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def matmul(x: Array, w: Array, precision: jax.lax.PrecisionLike, dtype: DTypeLike) -> Array:
    """Returns `x @ w`: casts both operands to their common dtype, and accumulates and returns in `dtype`."""
    operand_dtype = jnp.result_type(x, w)
    return jnp.matmul(
        x.astype(operand_dtype), w.astype(operand_dtype), precision=precision, preferred_element_type=dtype
    )


def broadcast_to_rank(b: Array, x: Array) -> Array:
    """Returns `b [N]` in the dtype and rank of `x [*axes, N]`: `jax_numpy_rank_promotion` may require equal ranks."""
    return jax.lax.expand_dims(b.astype(x.dtype), range(x.ndim - 1))


def rounded_sum(x: Array, y: Array) -> Array:
    """Returns `x + y`, rounded to their dtype for every consumer: XLA may omit a rounding to 16 bits and back."""
    info = jnp.finfo(x.dtype)
    if info.bits > 16:
        return x + y
    total = x.astype(jnp.float32) + y.astype(jnp.float32)
    return jax.lax.reduce_precision(total, exponent_bits=info.nexp, mantissa_bits=info.nmant).astype(x.dtype)


def cast_clamped(x: Array, dtype: DTypeLike) -> Array:
    """Casts `x` to `dtype`; for float16, values beyond its range are clamped."""
    return (jnp.clip(x, -65504.0, 65504.0) if dtype == jnp.float16 else x).astype(dtype)


def is_reset(resets: Array) -> Array:
    """Returns `resets` as booleans. Nonzero, NaN included, means reset."""
    return resets if resets.dtype == bool else resets != 0


def expand_resets(resets: Array, ndim: int) -> Array:
    """Returns `is_reset(resets)` with trailing axes of size one added, `ndim` axes in all."""
    resets = is_reset(resets)
    return resets.reshape(resets.shape + (1,) * (ndim - resets.ndim))


def select_reset(reset: Array | None, reset_state: Array | None, state: Array) -> Array:
    """Returns the state that a step sees, by a select: in a product, a NaN or infinite state would pass a reset."""
    if reset is None:
        return state
    new = jnp.zeros_like(state) if reset_state is None else reset_state.astype(state.dtype)
    return jnp.where(reset, new, state)
