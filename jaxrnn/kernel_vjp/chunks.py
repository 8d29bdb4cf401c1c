"""Chunks of time: with `remat`, a pass recomputes and holds the residuals of one chunk at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import sharding
from jaxrnn.cells import Cell

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array


# Maximum bytes of a chunk under `remat`: input projections, residuals and states. A chunk then takes several times the
# 10 to 30 us of its launches, and is small beside the arrays of a call that is large enough to need `remat`. `vmap`
# multiplies the bytes, because the number of steps is chosen before. On an H100, a pass of GRU 2048,256,128 in TF32
# takes 5.7 ms and 1.28 GB with 2^28 bytes, 5.1 ms and 1.45 GB with 2^29, and 5.0 ms and 1.78 GB with 2^30.
_CHUNK_BYTES = 2**28


# Minimum steps of a chunk, however many sequences there are: loading the weights on chip takes as long as a few steps.
_CHUNK_STEPS = 16


def chunk_steps(cell: Cell, xs: Array | jax.ShapeDtypeStruct, hidden: int) -> int:
    """Returns the steps per chunk under `remat`: all steps if they fit in one chunk, else the maximum that fits.

    A divisor of the steps is preferred, if there is one above half of that maximum: all chunks are then equal.
    """
    groups, steps, batch = xs.shape[:3]
    # the bytes of the input projections, the residuals and the states, all counted in float32
    step_bytes = 4 * groups * batch * hidden * (2 * cell.gates + len(cell.states))
    maximum = max(_CHUNK_STEPS, _CHUNK_BYTES // step_bytes)
    if maximum >= steps:
        return steps
    return next((size for size in range(maximum, maximum // 2, -1) if steps % size == 0), maximum)


def in_chunks(
    run: Callable[[Any, Any, Any], tuple[Any, Any, Any]], carry: Any, sequences: Any, size: int, last_first: bool
) -> tuple[Any, Any, Any]:
    """Runs `run` on chunks of time of `sequences` `[G, T, ...]`, one after the other.

    Args:
      run: takes the carry, a chunk of the sequences, and the chunk's first step. It returns the carry, a tree to sum
        over all chunks, and a tree to concatenate along time.
      carry: what the first call of `run` gets.
      sequences: a tree of arrays `[G, T, ...]`.
      size: the number of steps of a chunk.
      last_first: whether the last chunk in time is the first to run.

    Returns:
      The carry that the last call returned, the sums, and the concatenated arrays.
    """
    steps = jax.tree.leaves(sequences)[0].shape[1]
    if size == steps:
        return run(carry, sequences, 0)
    full_chunks, remainder = divmod(steps, size)
    # trailing axes are flattened: for a batch axis of size one, XLA may choose either of two layouts, and would copy
    # the inputs of the loop
    flat = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1), sequences)

    def slice_chunk(start: Any, length: int) -> Any:
        """Returns the `length` steps of the sequences from step `start` on."""

        def slice_leaf(x: Array, flat_x: Array) -> Array:
            chunk = jax.lax.dynamic_slice_in_dim(flat_x, start, length, axis=1)
            return chunk.reshape(x.shape[0], length, *x.shape[2:])

        return jax.tree.map(slice_leaf, sequences, flat)

    _, sums, parts = jax.eval_shape(lambda carry: run(carry, slice_chunk(0, size), 0), carry)
    joined = jax.tree.map(lambda x: jnp.zeros((x.shape[0], steps, *x.shape[2:]), x.dtype), parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    loop_state = carry, *sharding.unify_varying_axes((zeros, joined), sequences)

    def run_chunk(loop_state: Any, start: Any, length: int) -> Any:
        """Runs the chunk of `length` steps from step `start` on, and adds its results to the sums and `joined`."""
        carry, sums, joined = loop_state
        carry, terms, parts = run(carry, slice_chunk(start, length), start)
        # updated in place: a scan would stack its outputs, which XLA transposes if there is more than one group
        joined = jax.tree.map(lambda x, p: jax.lax.dynamic_update_slice_in_dim(x, p, start, axis=1), joined, parts)
        return carry, jax.tree.map(jnp.add, sums, terms), joined

    if remainder:  # runs before the loop: XLA would copy the arrays of the loop to write another chunk after it
        loop_state = run_chunk(loop_state, full_chunks * size if last_first else 0, remainder)

    def run_kth_full_chunk(k: Any, loop_state: Any) -> Any:
        # `start` is computed from the loop's counter: only then does XLA pass slices to a launch without copying them
        start = (full_chunks - 1 - k) * size if last_first else remainder + k * size
        return run_chunk(loop_state, start, size)

    return jax.lax.fori_loop(0, full_chunks, run_kth_full_chunk, loop_state)
