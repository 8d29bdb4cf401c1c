"""The states before each step, which the gradients of weights and recomputed residuals need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import sharding
from jaxrnn.kernel_vjp.spec import RecurrenceSpec
from jaxrnn.numerics import is_reset

if TYPE_CHECKING:
    from jax import Array


def state_before(static: RecurrenceSpec, history: Array, state: Array, start: Any, size: int) -> Array:
    """Returns the state `[G, B, H]` before the first of `size` steps from `start` on, without resets applied."""
    steps = history.shape[1]
    if size == steps:
        return state
    at = start + size if static.reverse else start - 1
    before = jax.lax.dynamic_index_in_dim(history, jnp.clip(at, 0, steps - 1), axis=1, keepdims=False)
    return jnp.where((at < 0) | (at == steps), state, before)


def _shift_one_step(history: Array, state: Array, reverse: bool) -> Array:
    """Returns `history` shifted one step later in the order of `reverse`, with `state` first.

    XLA compiles padding to one pass at memory bandwidth; a concatenation takes 2.5 times as long (H200).
    """
    steps = history.shape[1]
    low, high, first = (-1, 1, steps - 1) if reverse else (1, -1, 0)
    zero = sharding.unify_varying_axes(jnp.zeros((), history.dtype), history)
    later = jax.lax.pad(history, zero, ((0, 0, 0), (low, high, 0), (0, 0, 0), (0, 0, 0)))
    return jnp.where((jnp.arange(steps) == first)[:, None, None], state[:, None], later)


def _shift_in_order(
    static: RecurrenceSpec, forward: Array, backward: Array, state: Array, in_reverse: Array | None
) -> Array:  # fmt: skip
    """Shifts `forward` or, if the recurrence goes in reverse, `backward` by one step in its order, `state` first."""
    if in_reverse is not None:
        return jnp.where(in_reverse, _shift_one_step(backward, state, True), _shift_one_step(forward, state, False))
    if static.reverse is True:
        return _shift_one_step(backward, state, True)
    return _shift_one_step(forward, state, False)


def states_before_segments(
    static: RecurrenceSpec, history: Array, state: Array, count: int, in_reverse: Array | None
) -> Array:  # fmt: skip
    """Returns the states `[G, count, B, H]` before `count` segments of equal length; `state` precedes the first step.

    Resets are not applied. Forward in time, a segment starts from the last state of the segment before it; in reverse,
    from the first state of the segment after it.
    """
    length = history.shape[1] // count
    return _shift_in_order(static, history[:, length - 1 :: length], history[:, ::length], state, in_reverse)


def states_before(
    static: RecurrenceSpec, history: Array, state: Array, resets: Array | None, reset_state: Array | None,
    in_reverse: Array | None,
) -> Array:  # fmt: skip
    """Returns the states `[G, T, B, H]` before each step, with resets applied; `state` precedes the first step."""
    previous = _shift_in_order(static, history, history, state, in_reverse)
    if resets is None:
        return previous
    new = jnp.zeros_like(previous)
    if reset_state is not None:
        new = reset_state if static.reset_state == "stepped" else reset_state[:, None]
    return jnp.where(is_reset(resets)[..., None], new, previous)
