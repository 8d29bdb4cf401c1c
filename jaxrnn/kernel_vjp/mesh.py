"""Arguments on an explicit mesh: which axes may be sharded, and how the others are placed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from jaxrnn import sharding

if TYPE_CHECKING:
    from jax import Array


def batch_spec(xs: Array, time_major: bool) -> tuple[Any, ...]:
    """Returns how each batch axis of `xs` is sharded over an explicit mesh; an empty tuple if none is."""
    spec = sharding.spec_of(xs)
    batch = spec[1:-1] if time_major else spec[:-2]
    return batch if any(axis is not None for axis in batch) else ()


def check_only_batch_axes_sharded(xs: Array, time_major: bool) -> None:
    """Raises NotImplementedError if the time or feature axis of `xs` is sharded over an explicit mesh."""
    spec = sharding.spec_of(xs)
    if any(axis is not None for axis in (spec[0] if time_major else spec[-2], spec[-1])):
        raise NotImplementedError(
            f"the Triton implementation needs time and features unsharded, but xs is sharded as {spec}: use "
            'jax.reshard to shard xs over batch axes only, or pass implementation="xla"'
        )


def partition_specs(
    batch: tuple[Any, ...], time_major: bool, params: Any, states: Any, resets: Any, reset_states: Any
) -> tuple[tuple[Any, ...], PartitionSpec, PartitionSpec]:
    """Returns the specs of a recurrence sharded over its batch axes: of its arguments, a state and a sequence."""
    everywhere, state = PartitionSpec(), PartitionSpec(*batch, None)
    sequence = PartitionSpec(None, *batch, None) if time_major else PartitionSpec(*batch, None, None)
    by_rank = {1: everywhere, len(state): state, len(sequence): sequence}
    specs = (
        jax.tree.map(lambda _: everywhere, params),
        jax.tree.map(lambda _: state, states),
        sequence,
        jax.tree.map(lambda _: PartitionSpec(*sequence[:-1]), resets),
        jax.tree.map(lambda x: by_rank[x.ndim], reset_states),
    )
    return specs, state, sequence


def reshard_arguments(
    params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, time_major: bool
) -> tuple[Any, ...]:
    """Reshards the arguments of a recurrence for XLA on an explicit mesh: batch axes are sharded as those of `xs`.

    Time, features and params are replicated. JAX does not reshard there by itself, but `lax.scan` must return a carry
    with the sharding that it came in with.
    """
    arguments = params, states, xs, resets, reset_states
    batch = batch_spec(xs, time_major)
    if not batch:
        return sharding.replicate_all(arguments)
    specs, _, _ = partition_specs(batch, time_major, params, states, resets, reset_states)
    return sharding.reshard(arguments, jax.typeof(xs).sharding.mesh, specs)
