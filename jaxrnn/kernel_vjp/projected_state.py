"""Exact reduction of an LSTM with a projection (Sak et al. 2014) to an LSTM without, which the kernels run.

Let m_t = o_t * tanh(c_t) of H units and h_t = m_t @ w_hr of P units. The recurrent product of a step is

    h_{t-1} @ w_hh = m_{t-1} @ (w_hr @ w_hh)

The loop is therefore that of an LSTM of H units with the recurrent weights w_hr @ w_hh [H, 4H], and one product over
all steps computes h after the loop. The initial state of a sequence or an episode is an h, which need not be the
projection of any m. There the loop starts from m = 0, and the product of the initial h and w_hh is added to the input
projection of that step.

A step multiplies by 4 H^2 elements instead of 5 H P, but latency bounds the loop at the widths that fit on chip. Since
|w_hr @ w_hh| <= |w_hr| |w_hh|, magnitudes do not grow. The product of the weights is rounded once; a loop with both
weights would round each of w_hr, w_hh and h once. Weights in 16 bits are exact in such a loop, but their product is not
exact in 16 bits, so the product and m are multiplied as float32.

Sak, Senior, Beaufays: Long short-term memory recurrent neural network architectures for large scale acoustic modeling,
Interspeech 2014.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrnn import sharding
from jaxrnn.cells import LSTMParams
from jaxrnn.numerics import expand_resets, matmul

if TYPE_CHECKING:
    from jax import Array


class UnprojectedLSTM(NamedTuple):
    """An LSTM without a projection; if m are its hidden states, those of the LSTM with the projection are `m @ w_hr`.

    Attributes:
      params: `w_ih [D, 4H]`, `w_hh [H, 4H]` in float32, `b [4H]`; D grows by P if episodes start from a reset state.
      m0: `[*batch, H]` zeros in float32.
      xs: `[T, *batch, D]` (`[*batch, T, D]`), with the same D.
      first: `[*batch, 4H]` to add to the input projection of the step that is computed first; None if `xs` contains the
        initial state.
    """

    params: LSTMParams
    m0: Array
    xs: Array
    first: Array | None


def product(x: Array, w: Array, precision: jax.lax.PrecisionLike) -> Array:
    """Returns `x @ w` in float32, with barriers that keep XLA from merging it with another product.

    XLA merges two products that share an operand, in their gradients too, into one that its GPU compiler may be unable
    to compile: under `vmap` over last axes it fails with "No supported config found" (jaxlib 0.11.2).
    """
    x, w = jax.lax.optimization_barrier((x, w))
    return jax.lax.optimization_barrier(matmul(x, w, precision, jnp.float32))


@functools.partial(jax.jit, static_argnames=("time_major", "precision"), inline=True)
def without_projection(
    params: LSTMParams, h0: Array, xs: Array, resets: Array | None, reset_h: Array | None, *,
    in_reverse: bool | Array, time_major: bool, precision: jax.lax.PrecisionLike,
) -> UnprojectedLSTM:  # fmt: skip
    """Returns the LSTM that replaces the one with `params`, `h0` and `reset_h`; its episodes start from m = 0.

    Args:
      params: the weights, with `w_hr [H, P]` and `w_hh [P, 4H]`.
      h0: `[*batch, P]`.
      xs: `[T, *batch, D]` (`[*batch, T, D]` if not `time_major`).
      resets: None, or an array with the shape of `xs` without D.
      reset_h: None (zeros), `[P]`, `[*batch, P]` or `[T, *batch, P]` (`[*batch, T, P]`); None without `resets`.
      in_reverse: whether the last step is computed first; an array if that is known at run time only.
      time_major: whether time is the first axis, see `xs`.
      precision: precision of the product of `h0` and `w_hh`.
    """
    params, h0, xs, resets, reset_h = sharding.replicate_all((params, h0, xs, resets, reset_h))
    w_ih, w_hh, b = params[:3]
    w_hr = cast("Array", params.w_hr)
    (hidden, width), operand_dtype = w_hr.shape, jnp.result_type(xs, w_ih, w_hh)
    recurrent = product(w_hr.astype(jnp.float32), w_hh.astype(jnp.float32), jax.lax.Precision.HIGHEST)

    # selects instead of products keep a NaN in h0 from crossing the start of an episode
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
        return UnprojectedLSTM(wide, m0, jnp.concatenate([xs, starts], axis=-1), None)
    if resets is not None:
        h0 = jnp.where((resets & begins).any(axis), jnp.zeros_like(h0), h0)
    first = product(h0.astype(operand_dtype), w_hh, precision)
    return UnprojectedLSTM(LSTMParams(w_ih, recurrent, b), m0, xs, first)
