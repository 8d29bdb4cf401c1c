"""Episode resets: checks, resets for a loop over any cell, and resets for a loop in reverse."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn import sharding
from jaxrnn.checks import Caller, check_array, check_resets, describe
from jaxrnn.modules.lengths import is_last_step
from jaxrnn.numerics import expand_resets, is_reset, select_reset

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.modules.carries import Carry


def check_reset_carry(resets: Array | None, reset_carry: Carry | None, caller: Caller) -> None:
    """Raises ValueError if `reset_carry` is given without `resets`."""
    if resets is None and reset_carry is not None:
        raise ValueError(f"{caller('reset_state')} is given but resets is None; pass resets, or leave it out")


def check_steps(
    resets: Array | None,
    reset_carry: Carry | None,
    carry: Carry,
    batch_and_time: tuple[int, ...],
    time_major: bool,
    caller: Caller,
) -> None:
    """Raises ValueError unless the arrays with a time axis have the batch and time axes of the inputs.

    The check precedes the reversal of sequences, which would repeat the entries of an array that has too few.
    """
    check_resets(resets, batch_and_time, time_major, caller.bare("xs"), caller)
    if not _has_same_structure(reset_carry, carry):  # no reset carry, or one that the loop rejects
        return
    for new, old in zip(jax.tree.leaves(reset_carry, is_leaf=_is_none), jax.tree.leaves(carry), strict=True):
        if new is not None:
            check_array(caller("reset_state"), new)
        if _has_time_axis(new, old) and jnp.shape(new)[: len(batch_and_time)] != batch_and_time:
            axes = "[T, *batch, H]" if time_major else "[*batch, T, H]"
            raise ValueError(
                f"{caller('reset_state')} must be {axes} with batch and time {batch_and_time} as in "
                f"{caller.bare('xs')}, got {jnp.shape(new)}"
            )


def _is_none(x: Any) -> bool:
    return x is None


def _has_same_structure(reset_carry: Carry | None, carry: Carry) -> bool:
    """Whether a reset carry has the structure of a carry; None in place of an array means zeros."""
    structures: Any = jax.tree.structure(reset_carry, is_leaf=_is_none), jax.tree.structure(carry)
    return bool(structures[0] == structures[1])


def _has_time_axis(new: Array | None, old: Array) -> bool:
    """Whether an array of a reset carry has a time axis, and so more axes than the array of the carry."""
    return new is not None and jnp.ndim(new) > jnp.ndim(old)


def first_reset_carry(carry: Carry, reset_carry: Carry, caller: Caller) -> Carry:
    """Returns the carry that the first step starts from: `reset_carry`, or its first step if it has a time axis.

    Its arrays are broadcast to the shapes of `carry`; a time axis is the first one. None in place of an array means
    zeros, as does a time axis without steps.

    Raises:
      ValueError: it has another structure, or shapes that cannot be broadcast to those of `carry`.
    """

    def first(new: Array | None, old: Array) -> Array:
        if new is not None and _has_time_axis(new, old):
            new = new[0] if jnp.shape(new)[0] else None
        return jnp.zeros_like(old) if new is None else jnp.broadcast_to(new, old.shape)

    if _has_same_structure(reset_carry, carry):
        with contextlib.suppress(ValueError):  # shapes that cannot be broadcast
            return jax.tree.map(first, reset_carry, carry, is_leaf=_is_none)
    expected, got = (jax.tree.map(jnp.shape, one) for one in (carry, reset_carry))
    raise ValueError(
        f"{caller('reset_state')} must have the structure of the carry and shapes that can be broadcast to "
        f"{expected}, got {got}; pass what initialize_carry of the module returns"
    )


def flip_reset_carry(flip: Callable[[Array], Array], reset_carry: Carry | None, carry: Carry) -> Carry | None:
    """Applies `flip` to those arrays of a reset carry that have a time axis."""
    if not _has_same_structure(reset_carry, carry):  # no reset carry, or one that the loop rejects
        return reset_carry
    return jax.tree.map(
        lambda new, old: flip(new) if _has_time_axis(new, old) else new, reset_carry, carry, is_leaf=_is_none
    )


class Loop(NamedTuple):
    """What a loop over the steps of any cell starts from.

    Attributes:
      carry: the carry before the first step.
      inputs: the inputs of all steps, time first: `(xs, resets or None, values per step of the reset carry)`.
      start: `start(carry, reset, stepped)`, with `reset` and `stepped` of one step, returns the carry from which the
        step starts.
    """

    carry: Carry
    inputs: tuple[Array, Array | None, list[Array]]
    start: Callable[[Carry, Array | None, list[Array]], Carry]


def prepare_loop(
    carry: Carry,
    xs: Array,
    resets: Array | None,
    reset_carry: Carry | None,
    params: Any,
    feature_axes: int,
    time_axis: int,
    caller: Caller,
) -> Loop:
    """Prepares a loop over the steps of any cell.

    Args:
      carry: the carry before the first step, a pytree of arrays.
      xs: the inputs.
      resets: an array with all batch axes and the time axis, or None.
      reset_carry: a pytree like `carry`, or None for zeros, also in place of an array. Its arrays may lack the batch
        axes, or have a time axis as well.
      params: the arrays of the cell.
      feature_axes: the number of axes of `xs` that are neither batch axes nor the time axis.
      time_axis: the index of the time axis.
      caller: what the user called, for error messages.
    """
    shape = xs.shape[: xs.ndim - feature_axes]
    check_resets(resets, shape, time_axis == 0, caller.bare("xs"), caller)
    leaves: list[Array]
    treedef: Any
    leaves, treedef = jax.tree.flatten(carry)
    try:
        new_leaves = [None] * len(leaves) if reset_carry is None else treedef.flatten_up_to(reset_carry)
    except ValueError:
        raise ValueError(
            f"{caller('reset_state')} must have the structure of the carry, {describe(carry)}, got "
            f"{describe(reset_carry)}; pass what initialize_carry of the module returns"
        ) from None
    if resets is not None:  # zeros made in the loop would be on no mesh
        new_leaves = [jnp.zeros_like(old) if new is None else new for new, old in zip(new_leaves, leaves, strict=True)]
    leaves, xs, resets, new_leaves = jax.tree.map(jnp.asarray, (leaves, xs, resets, new_leaves))
    leaves, resets, new_leaves = sharding.reshard_like(xs, len(shape), time_axis, leaves, resets, new_leaves)
    leaves = sharding.unify_varying_axes(leaves, (xs, resets, new_leaves, params))
    is_stepped = [new is not None and new.ndim > old.ndim for new, old in zip(new_leaves, leaves, strict=True)]

    def start(carry: Carry, reset: Array | None, stepped: list[Array]) -> Carry:
        if reset is None:
            return carry
        rest = iter(stepped)
        new = [next(rest) if is_one else fixed for fixed, is_one in zip(new_leaves, is_stepped, strict=True)]
        states = zip(new, jax.tree.leaves(carry), strict=True)
        return treedef.unflatten([select_reset(expand_resets(reset, old.ndim), one, old) for one, old in states])

    stepped = [new for new, is_one in zip(new_leaves, is_stepped, strict=True) if is_one]
    time_first = jax.tree.map(lambda x: jnp.moveaxis(x, time_axis, 0), (xs, resets, stepped))
    return Loop(treedef.unflatten(leaves), time_first, start)


def like_before(after: Carry, before: Carry) -> Carry:
    """Returns the carry after a step in the dtypes of the one before, which the carry of a loop keeps."""
    structures: Any = jax.tree.structure(after), jax.tree.structure(before)
    if structures[0] != structures[1]:
        return after  # the loop says what is wrong

    def like(new: Array, old: Array) -> Array:
        dtypes = [jnp.result_type(x) for x in (new, old)]  # a cell may return a number of Python
        return jnp.asarray(new, dtypes[1]) if all(jnp.issubdtype(one, jnp.floating) for one in dtypes) else new

    return jax.tree.map(like, after, before)


def join_reset_carries(
    carry: tuple[Carry, Carry], reset_carries: Sequence[Carry | None], time_axis: int
) -> Carry | None:
    """Returns the reset carries of two directions as one `reset_state` of a bidirectional function, or None.

    Args:
      carry: the carries of both directions, which have the same dtypes.
      reset_carries: the carries that an episode starts from, by direction; None means zeros.
      time_axis: the index of the time axis.
    """
    if all(one is None for one in reset_carries):
        return None
    zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x)[-1:], jnp.result_type(x)), carry)
    given = [new if one is None else one for one, new in zip(reset_carries, zeros, strict=True)]
    pairs = jax.tree.map(functools.partial(_broadcast_reset_states, time_axis=time_axis), *given)
    structure: Any = jax.tree.structure(given[0])
    return jax.tree.transpose(structure, None, pairs)


def _broadcast_reset_states(x: Array, y: Array, time_axis: int) -> tuple[Array, Array]:
    """Broadcasts two reset states, each `[H]`, `[*batch, H]` or a value per step, to one shape and dtype."""
    largest, dtype = max(x, y, key=jnp.ndim), jnp.result_type(x, y)

    def broadcast(x: Array) -> Array:
        if 1 < jnp.ndim(x) < largest.ndim:
            x = jnp.expand_dims(x, time_axis)
        return jnp.broadcast_to(jnp.asarray(x, dtype), largest.shape)

    return broadcast(x), broadcast(y)


def resets_of_reversed(resets: Array, seq_lengths: Array | None, time_axis: int) -> Array:
    """Returns the resets of a loop that runs from the last step to the first: the mask of each episode's last step.

    The mask excludes the end of a sequence's last episode, because the loop itself starts there.
    """
    next_begins = jnp.roll(is_reset(resets), -1, axis=time_axis)
    return next_begins & ~is_last_step(seq_lengths, resets.shape, time_axis)


def add_reset_at_end(
    resets: Array | None, reset_carry: Carry | None, carry: Carry, seq_lengths: Array, xs: Array, time_axis: int
) -> tuple[Array, Carry]:
    """Returns `(resets, reset carry)` with which a backward loop starts from `carry` at the end of each sequence.

    The reset at the end discards what the loop has computed from padding.
    """
    at_end = is_last_step(seq_lengths, xs.shape[:-1], time_axis)
    if resets is None:
        return at_end, carry
    resets = is_reset(resets)

    def of_every_step(initial: Array, new: Array) -> Array:
        if jnp.ndim(new) == initial.ndim:
            new = jnp.expand_dims(new, time_axis)
        return jnp.where((at_end & ~resets)[..., None], jnp.expand_dims(initial, time_axis), new)

    new = jax.tree.map(jnp.zeros_like, carry) if reset_carry is None else reset_carry
    return at_end | resets, jax.tree.map(of_every_step, carry, new)
