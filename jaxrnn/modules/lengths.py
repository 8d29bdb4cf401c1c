"""Sequences of different lengths: their reversal, their ends, and the carries there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn.checks import Caller, check_array

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.modules.carries import Carry


def checked_seq_lengths(seq_lengths: Any, batch: tuple[int, ...], steps: Any, caller: Caller) -> Array | None:
    """Returns lengths as int32, or None.

    Lengths that are traced or on another host are clipped to 0 to `steps`, and so are all if `steps` is symbolic.

    Raises:
      ValueError: there is not one integer per sequence, or a length is not between 0 and `steps`, where both are known.
    """
    if seq_lengths is None:
        return None
    if isinstance(seq_lengths, int) and not isinstance(seq_lengths, bool):  # one sequence without batch axes
        seq_lengths = np.asarray(seq_lengths)
    name = caller("seq_lengths")
    check_array(name, seq_lengths)
    if jnp.shape(seq_lengths) != batch:
        raise ValueError(
            f"{name} must be [*batch] = {batch} as in {caller.bare('xs')}, got {jnp.shape(seq_lengths)}; pass the "
            "length of each sequence, not a mask"
        )
    if not jnp.issubdtype(jnp.result_type(seq_lengths), jnp.integer):
        raise ValueError(f"{name} must be integers, got {jnp.result_type(seq_lengths)}; convert it first")
    if _is_known(seq_lengths) and isinstance(steps, int):
        values = np.asarray(seq_lengths)
        if wrong := values[(values < 0) | (values > steps)].tolist():
            raise ValueError(f"{name} must be between 0 and T = {steps}, got {wrong[0]}; clip it, or pad the sequences")
        return jnp.asarray(seq_lengths, jnp.int32)
    lengths = jnp.asarray(seq_lengths)
    if lengths.dtype.itemsize < 4:  # an int8 cannot represent a bound of 128 steps
        lengths = lengths.astype(jnp.int32)
    return jnp.clip(lengths, 0, steps).astype(jnp.int32)


def _is_known(x: Any) -> bool:
    """Whether the values of an array are known while tracing, on this host."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def flip_sequences(xs: Array, seq_lengths: Array | None, batch: int, time_axis: int) -> Array:
    """Reverses time separately in the first `seq_lengths [*batch]` steps and in the rest, as `nn.RNN` does.

    Args:
      xs: an array whose leading axes are `batch` batch axes and the time axis.
      seq_lengths: the lengths, or None to reverse all steps.
      batch: the number of batch axes.
      time_axis: the index of the time axis.
    """
    if seq_lengths is None or xs.shape[time_axis] == 0:
        return jnp.flip(xs, time_axis)
    steps = xs.shape[time_axis]
    last_first = jnp.arange(steps - 1, -1, -1).reshape([steps if axis == time_axis else 1 for axis in range(batch + 1)])
    index = (last_first + jnp.expand_dims(seq_lengths, time_axis)) % steps
    return jnp.take_along_axis(xs, index.reshape(index.shape + (1,) * (xs.ndim - index.ndim)), axis=time_axis)


def carry_at_end(seq_lengths: Array, time_axis: int, initial: Array, carries: Array) -> Array:
    """Returns the carry after `seq_lengths [*batch]` steps, at least one, from the carries of all steps.

    If there are no steps, it is `initial`.
    """
    if carries.shape[time_axis] == 0:
        return initial
    index = jnp.expand_dims(seq_lengths, range(seq_lengths.ndim, initial.ndim))
    at = jnp.expand_dims(jnp.maximum(index, 1) - 1, time_axis)
    return jnp.take_along_axis(carries, at, axis=time_axis, mode="clip").squeeze(time_axis)


def zeros_if_empty(seq_lengths: Array, carry: Carry) -> Carry:
    """Returns a carry with zeros for sequences of length 0.

    What has no batch axes, or is not of floating point, stays as it is: it has no NaN, or the cell is to say what is
    wrong.
    """

    def one(x: Array) -> Array:
        is_float = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)
        has_batch = jnp.shape(x)[: seq_lengths.ndim] == seq_lengths.shape
        return jnp.where(_is_empty(seq_lengths, x), 0, x) if is_float and has_batch else x

    return jax.tree.map(one, carry)


def initial_if_empty(seq_lengths: Array, initial: Carry, last: Carry) -> Carry:
    """Returns the last carry, for sequences of length 0 the initial one."""
    return jax.tree.map(lambda x, y: jnp.where(_is_empty(seq_lengths, y), x, y), initial, last)


def _is_empty(seq_lengths: Array, like: Array) -> Array:
    return jnp.expand_dims(seq_lengths == 0, range(seq_lengths.ndim, jnp.ndim(like)))


def is_last_step(seq_lengths: Array | None, shape: tuple[int, ...], time_axis: int) -> Array:
    """Returns a mask of the last step of each sequence, broadcastable to `shape`, which has batch and time axes."""
    lengths = shape[time_axis] if seq_lengths is None else jnp.expand_dims(seq_lengths, time_axis)
    return _steps(shape, time_axis) == lengths - 1


def is_valid_step(seq_lengths: Array, shape: tuple[int, ...], time_axis: int) -> Array:
    """Returns a mask of the steps before the end of each sequence, of `shape`, which has batch and time axes."""
    return _steps(shape, time_axis) < jnp.expand_dims(seq_lengths, time_axis)


def without_padding(xs: Array, seq_lengths: Array, time_axis: int) -> Array:
    """Returns `xs` with zeros beyond the end of each sequence, where there may be NaN."""
    is_valid = is_valid_step(seq_lengths, xs.shape[: seq_lengths.ndim + 1], time_axis)
    return jnp.where(jnp.expand_dims(is_valid, range(is_valid.ndim, xs.ndim)), xs, 0)


def _steps(shape: tuple[int, ...], time_axis: int) -> Array:
    """Returns the index of each step, broadcastable to `shape`, which has batch and time axes."""
    return jnp.arange(shape[time_axis]).reshape([-1 if axis == time_axis else 1 for axis in range(len(shape))])
