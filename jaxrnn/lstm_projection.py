"""The LSTM with a projection (Sak et al. 2014) as an LSTM without: how the kernels run it, exactly.

With m_t = o_t * tanh(c_t) of H units and h_t = m_t @ w_hr of P, a step takes from the one before it

    h_{t-1} @ w_hh = m_{t-1} @ (w_hr @ w_hh)

So the loop is that of an LSTM of H units with the recurrent weights w_hr @ w_hh [H, 4H], and h is one product over all
steps, after it. What a sequence or an episode starts from is an h, and need not be the projection of any m: there the
loop starts from m = 0, and the input projection of that step has the start's product with w_hh added.

A step multiplies by 4 H^2 numbers and not by 5 H P: the loop is bound by latency at the widths that fit on chip.
|w_hr @ w_hh| <= |w_hr| |w_hh|: nothing grows, and it is rounded once, as are w_hr, w_hh and h in a loop with both.
Weights in 16 bits are exact in such a loop, and their product is not: so it and m are multiplied as float32.

Sak, Senior, Beaufays: Long short-term memory recurrent neural network architectures for large scale acoustic modeling,
Interspeech 2014.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrnn.reference import LSTMParams, expand_resets, matmul

if TYPE_CHECKING:
    from jax import Array


class Plain(NamedTuple):
    """An LSTM without a projection, whose hidden states m give those with one: `m @ w_hr`.

    Attributes:
      params: `w_ih [D, 4H]`, `w_hh [H, 4H]` in float32, `b [4H]`; D grows by P where episodes start from a state.
      m0: `[*batch, H]` zeros in float32.
      xs: `[T, *batch, D]` (`[*batch, T, D]`).
      first: `[*batch, 4H]` to be added to the input projection of the step that is computed first, or None: in `xs`.
    """

    params: LSTMParams
    m0: Array
    xs: Array
    first: Array | None


def product(x: Array, w: Array, precision: jax.lax.PrecisionLike) -> Array:
    """`x @ w` in float32, kept apart from every other product.

    XLA merges two that have an operand in common, also in their gradients, into one that its GPU compiler may then find
    no way to run: under `vmap` over last axes it gives up with "No supported config found" (jaxlib 0.11.2).
    """
    x, w = jax.lax.optimization_barrier((x, w))
    return jax.lax.optimization_barrier(matmul(x, w, precision, jnp.float32))


def without_projection(
    params: LSTMParams, h0: Array, xs: Array, resets: Array | None, reset_h: Array | None, *,
    in_reverse: bool | Array, time_major: bool, precision: jax.lax.PrecisionLike,
) -> Plain:  # fmt: skip
    """The LSTM that takes the place of the one with `params`, `h0` and `reset_h`, of which episodes start from m = 0.

    Args:
      params: with `w_hr [H, P]` and `w_hh [P, 4H]`.
      h0: `[*batch, P]`.
      xs: `[T, *batch, D]` (`[*batch, T, D]` if not `time_major`).
      resets: None or as `xs` without D.
      reset_h: None (zeros), `[P]`, `[*batch, P]` or `[T, *batch, P]` (`[*batch, T, P]`); None without `resets`.
      in_reverse: whether the last step is computed first; an array where it is known at run time alone.
      time_major: see `xs`.
      precision: of the product of `h0` and `w_hh`.
    """
    w_ih, w_hh, b = params[:3]
    w_hr = cast("Array", params.w_hr)
    (hidden, width), operand_dtype = w_hr.shape, jnp.result_type(xs, w_ih, w_hh)
    recurrent = product(w_hr.astype(jnp.float32), w_hh.astype(jnp.float32), jax.lax.Precision.HIGHEST)

    # selects, no products: a NaN in h0 ends where an episode starts
    m0 = jnp.zeros((*h0.shape[:-1], hidden), jnp.float32)
    axis = 0 if time_major else xs.ndim - 2
    steps = jax.lax.broadcasted_iota(jnp.int32, (*xs.shape[:-1], 1), axis)
    begins = steps == jnp.where(in_reverse, xs.shape[axis] - 1, 0)
    if resets is not None:
        resets = expand_resets(resets, xs.ndim)
    if resets is not None and reset_h is not None:
        if reset_h.ndim <= h0.ndim:
            reset_h = jnp.expand_dims(jnp.broadcast_to(reset_h, h0.shape), axis)
        starts = jnp.where(begins, jnp.expand_dims(h0, axis), jnp.zeros((width,), h0.dtype)).astype(operand_dtype)
        starts = jnp.where(resets, reset_h.astype(operand_dtype), starts)
        wide = LSTMParams(jnp.concatenate([w_ih, w_hh]), recurrent, b)
        return Plain(wide, m0, jnp.concatenate([xs, starts], axis=-1), None)
    if resets is not None:
        h0 = jnp.where((resets & begins).any(axis), jnp.zeros_like(h0), h0)
    first = product(h0.astype(operand_dtype), w_hh, precision)
    return Plain(LSTMParams(w_ih, recurrent, b), m0, xs, first)
