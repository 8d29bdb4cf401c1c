"""Arguments on an explicit mesh: which axes may be sharded, and how the others are placed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from jaxrnn import sharding
from jaxrnn.call import Call

if TYPE_CHECKING:
    from jax import Array


def batch_spec(xs: Array, time_major: bool) -> tuple[Any, ...]:
    """Returns how each batch axis of `xs` is sharded over an explicit mesh; an empty tuple if none is."""
    spec = sharding.spec_of(xs)
    batch_axes = spec[1:-1] if time_major else spec[:-2]
    return batch_axes if any(axis is not None for axis in batch_axes) else ()


def check_only_batch_axes_sharded(xs: Array, time_major: bool) -> None:
    """Raises NotImplementedError if the time or feature axis of `xs` is sharded over an explicit mesh."""
    spec = sharding.spec_of(xs)
    if any(axis is not None for axis in (spec[0] if time_major else spec[-2], spec[-1])):
        raise NotImplementedError(
            f"the Triton implementation needs time and features unsharded, but xs is sharded as {spec}: use "
            'jax.reshard to shard xs over batch axes only, or pass implementation="xla"'
        )


def partition_specs(
    batch_axes: tuple[Any, ...], time_major: bool, call: Call
) -> tuple[Call, PartitionSpec, PartitionSpec]:
    """Returns three things for a call sharded over its batch axes: the specs of its arrays, of a state, of a sequence.

    `batch_axes` is what `batch_spec` returns, and not empty.
    """
    replicated, state = PartitionSpec(), PartitionSpec(*batch_axes, None)
    sequence = PartitionSpec(None, *batch_axes, None) if time_major else PartitionSpec(*batch_axes, None, None)
    # a reset state is `[H]`, `[*batch, H]` or one for each step
    by_rank = {1: replicated, len(state): state, len(sequence): sequence}
    specs = Call(
        params=jax.tree.map(lambda _: replicated, call.params),
        states=jax.tree.map(lambda _: state, call.states),
        xs=sequence,  # type: ignore[arg-type]
        resets=jax.tree.map(lambda _: PartitionSpec(*sequence[:-1]), call.resets),
        reset_states=jax.tree.map(lambda x: by_rank[x.ndim], call.reset_states),
    )
    return specs, state, sequence


def reshard_call(call: Call, time_major: bool) -> Call:
    """Reshards a call for `lax.scan` on an explicit mesh: batch axes are sharded as those of `xs`.

    Time, features and params are replicated. `lax.scan` must return a carry with the sharding that it came in with, and
    on an explicit mesh JAX does not reshard by itself.
    """
    batch_axes = batch_spec(call.xs, time_major)
    if not batch_axes:
        return sharding.replicate_all(call)
    specs, _, _ = partition_specs(batch_axes, time_major, call)
    return sharding.reshard(call, jax.typeof(call.xs).sharding.mesh, specs)
