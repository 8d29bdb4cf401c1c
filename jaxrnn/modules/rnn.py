"""Everything that Flax's `RNN` does around the loop over time: lengths, the order of the outputs and the results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxrnn.checks import check_flags
from jaxrnn.modules.lengths import (
    carry_at_end,
    checked_seq_lengths,
    flip_sequences,
    initial_if_empty,
    is_valid_step,
    without_padding,
    zeros_if_empty,
)
from jaxrnn.modules.resets import check_steps, flip_reset_carry
from jaxrnn.numerics import is_reset

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.checks import Caller
    from jaxrnn.modules.carries import Carry


def run_over_time(
    run: Callable[..., tuple[Carry, Array, Carry | None]],
    inputs: Array,
    carry: Carry,
    *,
    resets: Array | None,
    reset_carry: Carry | None,
    seq_lengths: Array | None,
    feature_axes: int,
    time_major: bool,
    reverse: bool,
    keep_order: bool,
    return_carry: bool,
    caller: Caller,
) -> Array | tuple[Carry, Array]:
    """Runs a loop and does what `nn.RNN` does around it: handles lengths, the order of the outputs and the results.

    The loop is `run(carry, inputs, resets=, reset_carry=, reverse=, return_states=)`. It returns the same tuple as
    `modules.run`. Messages name `caller`.
    """
    time_major, reverse, keep_order, return_carry = check_flags(
        caller, time_major=time_major, reverse=reverse, keep_order=keep_order, return_carry=return_carry
    )
    batch_and_time = inputs.shape[: inputs.ndim - feature_axes]
    time_axis = 0 if time_major else len(batch_and_time) - 1
    batch = batch_and_time[:time_axis] + batch_and_time[time_axis + 1 :]
    seq_lengths = checked_seq_lengths(seq_lengths, batch, inputs.shape[time_axis], caller)
    check_steps(resets, reset_carry, carry, batch_and_time, time_major, caller)

    start = carry
    if seq_lengths is not None:
        # NaN in padding would reach the gradients of the weights; finite padding gives what it gives in Flax's `RNN`
        valid = without_padding(inputs, seq_lengths, time_axis), zeros_if_empty(seq_lengths, carry)
        select = lambda x, y: x if x is y else jnp.where(jnp.isfinite(x), x, y)  # noqa: E731
        inputs, start = jax.tree.map(select, (inputs, carry), valid)
        if resets is not None:
            resets = is_reset(jnp.asarray(resets)) & is_valid_step(seq_lengths, batch_and_time, time_axis)

    def flip(x: Array) -> Array:
        return flip_sequences(x, seq_lengths, len(batch), time_axis)

    flip_inputs = reverse and seq_lengths is not None
    if flip_inputs:
        inputs, resets = flip(inputs), None if resets is None else flip(resets)
        reset_carry = flip_reset_carry(flip, reset_carry, carry)
    last, outputs, carries = run(
        start,
        inputs,
        resets=resets,
        reset_carry=reset_carry,
        reverse=reverse and not flip_inputs,
        return_states=return_carry and seq_lengths is not None,
    )
    in_order = not flip_inputs
    if reverse and keep_order != in_order:
        outputs = flip(outputs)
    if not return_carry:
        return outputs
    if seq_lengths is not None:
        last = jax.tree.map(functools.partial(carry_at_end, seq_lengths, time_axis), start, carries)
        last = initial_if_empty(seq_lengths, carry, last)
    return last, outputs
