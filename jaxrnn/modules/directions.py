"""One layer of a stack, which runs in one direction or in two."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn.modules.lengths import carry_at_end
from jaxrnn.modules.recurrence import run, run_both
from jaxrnn.modules.resets import add_reset_at_end, join_reset_carries, resets_of_reversed
from jaxrnn.numerics import is_reset

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.modules.carries import Carry
    from jaxrnn.modules.recurrence import Recurrence, Results


class Direction(NamedTuple):
    """One direction of one layer.

    Attributes:
      cell: the cell or its name, as `modules.run` takes it.
      params: the weights.
      carry: `[*batch, H]`, or `(c, h)`: the carry before the first step.
      reset_carry: the carry that an episode starts from, as the `reset_state` of `jaxrnn.gru`.
    """

    cell: Recurrence
    params: Any
    carry: Carry
    reset_carry: Carry | None


def run_bidirectional(
    layer: Sequence[Direction],
    xs: Array,
    resets: Sequence[Array | None],
    reset_carries: Sequence[Carry | None],
    *,
    time_axis: int,
    return_states: bool,
    **options: Any,
) -> list[Results]:
    """Runs a forward and a backward direction over the same `xs`.

    Arguments with one element per direction have the order forward, backward. Returns the result of `run` for each.
    """
    cells, params, carry, _ = zip(*layer, strict=True)
    forward, backward = zip(cells, (jax.tree.map(jnp.result_type, state) for state in carry), strict=True)
    if forward != backward:  # the directions of one launch must have the same cell and dtypes
        return [
            run(direction.cell, direction.params, direction.carry, xs, resets=reset, reset_state=state, reverse=reverse,
                return_states=return_states, **options)
            for direction, reset, state, reverse in zip(layer, resets, reset_carries, (False, True), strict=True)
        ]  # fmt: skip
    if any(reset is not None for reset in resets):
        no_resets = jnp.zeros(xs.shape[:-1], bool)
        options["resets"] = tuple(no_resets if reset is None else is_reset(reset) for reset in resets)
    options["reset_state"] = join_reset_carries(carry, reset_carries, time_axis)
    return run_both(cells[0], params, carry, xs, return_states=return_states, **options)


def run_layer(
    layer: Sequence[Direction],
    xs: Array,
    *,
    resets: Array | None,
    seq_lengths: Array | None,
    time_major: bool,
    reverse: bool,
    return_carry: bool,
    **options: Any,
) -> tuple[tuple[Carry, ...], Array]:
    """Runs one layer, of one direction or two.

    Returns `(carries by direction, outputs)`; the outputs are in the order of the inputs. The carries are valid only if
    `return_carry`, and not for sequences of length 0.
    """
    time_axis = 0 if time_major else xs.ndim - 2
    backward = [reverse] if len(layer) == 1 else [False, True]
    all_resets, reset_carries = [], []
    for direction, is_backward in zip(layer, backward, strict=True):
        reset, state = resets, None if resets is None else direction.reset_carry
        if is_backward and reset is not None and not reverse:
            reset = resets_of_reversed(reset, seq_lengths, time_axis)
        if is_backward and seq_lengths is not None:
            reset, state = add_reset_at_end(reset, state, direction.carry, seq_lengths, xs, time_axis)
        all_resets.append(reset)
        reset_carries.append(state)

    # a forward loop runs past the end of short sequences, so it must return all carries; a backward loop ends at step 0
    options |= {"time_major": time_major, "return_states": return_carry and seq_lengths is not None and not reverse}
    if len(layer) == 2:
        results = run_bidirectional(layer, xs, all_resets, reset_carries, time_axis=time_axis, **options)
    else:
        (direction,), (reset,), (state,) = layer, all_resets, reset_carries
        results = [
            run(direction.cell, direction.params, direction.carry, xs, resets=reset, reset_state=state,
                reverse=reverse, **options)
        ]  # fmt: skip

    carries = []
    for direction, (last, _, every), is_backward in zip(layer, results, backward, strict=True):
        if return_carry and seq_lengths is not None and not is_backward:
            last = jax.tree.map(functools.partial(carry_at_end, seq_lengths, time_axis), direction.carry, every)
        carries.append(last)
    outputs = [ys for _, ys, _ in results]
    return tuple(carries), outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)
