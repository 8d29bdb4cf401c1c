"""The states before each step, which the gradients of weights and recomputed residuals need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn import sharding
from jaxrnn.call import Call
from jaxrnn.kernel_vjp.spec import KernelSpec
from jaxrnn.numerics import is_reset

if TYPE_CHECKING:
    from jax import Array


class History(NamedTuple):
    """The states of a chunk of time, by name, as far as they were saved.

    Attributes:
      after: those after each step, `[G, T, B, H]`.
      before: that before the chunk, `[G, B, H]`, without resets applied.
      previous: those before each step, `[G, T, B, H]`, with resets applied; empty if they are not needed.
    """

    after: dict[str, Array]
    before: dict[str, Array]
    previous: dict[str, Array]


def history_of(
    spec: KernelSpec, call: Call, chunk: Call, saved: dict[str, Array], saved_chunk: dict[str, Array], start: Any, *,
    each_step: bool,
) -> History:  # fmt: skip
    """Returns the states of the chunk of `call` that begins at step `start`; `previous` only if `each_step`."""
    history = History({}, {}, {})
    reset_states = chunk.reset_states or [None] * len(call.states)
    for s, state, reset_state in zip(spec.cell.states, call.states, reset_states, strict=True):
        if f"{s}s" in saved:
            history.after[s] = saved_chunk[f"{s}s"]
            history.before[s] = _state_before(spec, saved[f"{s}s"], state, start, chunk.xs.shape[1])
            if each_step:
                history.previous[s] = states_before(spec, chunk, history.after[s], history.before[s], reset_state)
    return history


def _state_before(spec: KernelSpec, history: Array, state: Array, start: Any, size: int) -> Array:
    """Returns the state `[G, B, H]` before the first of `size` steps from `start` on, without resets applied."""
    steps = history.shape[1]
    if size == steps:
        return state
    at = start + size if spec.reverse else start - 1
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
    spec: KernelSpec, forward: Array, backward: Array, state: Array, in_reverse: Array | None
) -> Array:  # fmt: skip
    """Shifts `forward` or, if the recurrence goes in reverse, `backward` by one step in its order, `state` first."""
    if in_reverse is not None:
        return jnp.where(in_reverse, _shift_one_step(backward, state, True), _shift_one_step(forward, state, False))
    if spec.reverse is True:
        return _shift_one_step(backward, state, True)
    return _shift_one_step(forward, state, False)


def states_before_segments(
    spec: KernelSpec, history: Array, state: Array, count: int, in_reverse: Array | None
) -> Array:  # fmt: skip
    """Returns the states `[G, count, B, H]` before `count` segments of equal length; `state` precedes the first step.

    Resets are not applied. Forward in time, a segment starts from the last state of the segment before it; in reverse,
    from the first state of the segment after it.
    """
    length = history.shape[1] // count
    return _shift_in_order(spec, history[:, length - 1 :: length], history[:, ::length], state, in_reverse)


def states_before(
    spec: KernelSpec, chunk: Call, history: Array, state: Array, reset_state: Array | None
) -> Array:  # fmt: skip
    """Returns the states `[G, T, B, H]` before each step, with resets applied; `state` precedes the first step."""
    previous = _shift_in_order(spec, history, history, state, chunk.in_reverse)
    if chunk.resets is None:
        return previous
    new = jnp.zeros_like(previous)
    if reset_state is not None:
        new = reset_state if spec.reset_state == "stepped" else reset_state[:, None]
    return jnp.where(is_reset(chunk.resets)[..., None], new, previous)
