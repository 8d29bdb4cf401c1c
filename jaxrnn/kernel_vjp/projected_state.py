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
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import sharding
from jaxrnn.call import Call, RecurrenceSpec
from jaxrnn.cells import LSTMParams
from jaxrnn.numerics import expand_resets, matmul
from torch_bridge import rules

if TYPE_CHECKING:
    from jax import Array


def precision_of(spec: RecurrenceSpec, call: Call) -> Any:
    """Returns the precision of the products with the projection: full float32 where XLA multiplies so few units so."""
    w_hr = call.params.w_hr
    widths = w_hr.shape if call.operand_dtype == jnp.float32 else w_hr.shape[:1]
    return jax.lax.Precision.HIGHEST if min(widths) <= rules.FULL_PRECISION_WIDTH else spec.precision


def is_from_last(spec: RecurrenceSpec, call: Call) -> bool | Array:
    """Returns whether the last step is computed first; an array if that is known at run time only."""
    return spec.reverse is True if call.in_reverse is None else call.in_reverse


def product(x: Array, w: Array, precision: jax.lax.PrecisionLike) -> Array:
    """Returns `x @ w` in float32, with barriers that keep XLA from merging it with another product.

    XLA merges two products that share an operand, in their gradients too, into one that its GPU compiler may be unable
    to compile: under `vmap` over last axes it fails with "No supported config found" (jaxlib 0.11.2).
    """
    x, w = jax.lax.optimization_barrier((x, w))
    return jax.lax.optimization_barrier(matmul(x, w, precision, jnp.float32))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def without_projection(spec: RecurrenceSpec, call: Call) -> Call:
    """Returns the call of the LSTM without a projection whose hidden states m give those of `call` as `m @ w_hr`.

    Its episodes start from m = 0, and its recurrent weights are float32. If episodes of `call` start from a hidden
    state that is not zero, `xs` contains that and the initial hidden state as P further inputs. Otherwise `first`
    contains the product of the initial hidden state.
    """
    (h0, c0), (reset_h, reset_c) = call.states, call.reset_states
    params, h0, xs, resets, reset_h = sharding.replicate_all((call.params, h0, call.xs, call.resets, reset_h))
    w_ih, w_hh, b, w_hr = params
    (hidden, width), operand_dtype = w_hr.shape, call.operand_dtype
    recurrent = product(w_hr.astype(jnp.float32), w_hh.astype(jnp.float32), jax.lax.Precision.HIGHEST)

    # selects instead of products keep a NaN in h0 from crossing the start of an episode
    m0 = jnp.zeros((*h0.shape[:-1], hidden), jnp.float32)
    axis = 0 if spec.time_major else xs.ndim - 2
    steps = jax.lax.broadcasted_iota(jnp.int32, (*xs.shape[:-1], 1), axis)
    begins = steps == jnp.where(is_from_last(spec, call), xs.shape[axis] - 1, 0)
    if resets is not None:
        is_start = expand_resets(resets, xs.ndim)
    first = None
    if resets is not None and reset_h is not None:
        if reset_h.ndim <= h0.ndim:
            reset_h = jnp.expand_dims(jnp.broadcast_to(reset_h, h0.shape), axis)
        starts = jnp.where(begins, jnp.expand_dims(h0, axis), jnp.zeros((width,), h0.dtype)).astype(operand_dtype)
        starts = jnp.where(is_start, reset_h.astype(operand_dtype), starts)
        w_ih, xs = jnp.concatenate([w_ih, w_hh]), jnp.concatenate([xs, starts], axis=-1)
    else:
        if resets is not None:
            h0 = jnp.where((is_start & begins).any(axis), jnp.zeros_like(h0), h0)
        first = product(h0.astype(operand_dtype), w_hh, spec.precision)
    return call._replace(
        params=LSTMParams(w_ih, recurrent, b), states=(sharding.unify_varying_axes(m0, xs), c0), xs=xs,
        reset_states=(None, reset_c), first=first,
    )  # fmt: skip
