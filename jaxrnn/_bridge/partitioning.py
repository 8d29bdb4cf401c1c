"""The partitioning of a launch over a mesh of `Auto` axes, over which XLA shards independent problems."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jaxrnn._bridge.launch_kind import SUMMED_OUTPUTS, LaunchKind

if TYPE_CHECKING:
    from jax import Array


class PartitionedCallback:
    """The host callback of a launch in a program that XLA partitions: it calls the callback of the launch's shard.

    XLA identifies callbacks by their index in the program. The callbacks are counted before XLA compiles the program,
    but shards are lowered while it compiles, so this slot is registered first. A launch in a function that is called
    twice may have shards of two shapes.
    """

    index: int

    def __init__(self) -> None:
        self.callbacks: dict[tuple[tuple[int, ...], ...], Callable[..., Any]] = {}

    def __call__(self, ctx: Any, *buffers: Any) -> Any:
        if len(self.callbacks) == 1:
            (callback,) = self.callbacks.values()
        else:
            inputs = len(next(iter(self.callbacks)))
            callback = self.callbacks[tuple(tuple(x.shape) for x in buffers[:inputs])]
        return callback(ctx, *buffers)


def run_partitioned(kind: LaunchKind, slot: PartitionedCallback | None, arrays: dict[str, Array]) -> dict[str, Array]:
    """Computes a launch by a `custom_partitioning`: XLA may shard each of its independent axes separately.

    `slot` is None if launches use no host callbacks.
    """
    inputs = tuple(arrays)
    names = (*inputs, *(output.name for output in kind.outputs))
    # devices add up their sums in float32
    outputs_of_shard = tuple(
        output._replace(dtype=jnp.dtype(jnp.float32)) if output.name in SUMMED_OUTPUTS else output
        for output in kind.outputs
    )
    kind_of_shard = dataclasses.replace(kind, outputs=outputs_of_shard)

    def axes_of(operands: Any, results: Any) -> list[tuple[str, ...]]:
        return [kind.axes_of(name, len(x.shape)) for name, x in zip(names, (*operands, *results), strict=True)]

    def rule(_: Any, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
        axes = axes_of(operands, results)
        arrays = [" ".join(dims) for dims in axes]
        in_order = dict.fromkeys(axis for dims in axes for axis in dims)
        replicated = tuple(axis for axis in in_order if not kind.is_shardable(axis))
        text = f"{', '.join(arrays[: len(inputs)])} -> {', '.join(arrays[len(inputs) :])}"
        return text, {"need_replication_factors": replicated}

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        axes = axes_of(operands, results)
        placements = [
            {axis: at for axis, at in zip(dims, x.sharding.spec, strict=False) if kind.is_shardable(axis)}
            for dims, x in zip(axes, (*operands, *results), strict=True)
        ]
        # the shardings agree, except that some arrays may be replicated
        shared = max(placements, key=lambda axes: _num_shards(mesh, *axes.values()))
        if getattr(kind, "reverse", None) == "bidirectional" and operands[0].shape[0] % (
            2 * _num_shards(mesh, shared.get("models"))
        ):
            shared["models"] = None  # the parity of a model's index on its device decides its direction
        lengths = {
            axis: length
            for dims, x in zip(axes, (*operands, *results), strict=True)
            for axis, length in zip(dims, x.shape, strict=True)
        }
        for axis in shared:
            added_up = any(axis not in dims for dims in axes[len(inputs) :])
            if added_up and lengths[axis] % _num_shards(mesh, shared[axis]):
                shared[axis] = None  # XLA pads the last shard with arbitrary values, which a sum would include
        shardings = [NamedSharding(mesh, PartitionSpec(*map(shared.get, dims))) for dims in axes]
        # the mesh axes over which each result must be summed
        sums = [_mesh_axes(*(at for axis, at in shared.items() if axis not in dims)) for dims in axes[len(inputs) :]]
        return (
            mesh,
            functools.partial(local, slot, sums),
            tuple(shardings[len(inputs) :]),
            tuple(shardings[: len(inputs)]),
        )

    def local(slot: PartitionedCallback | None, sums: list[list[str]] | None, *operands: Array) -> tuple[Array, ...]:
        shard = kind.merge_models(dict(zip(inputs, operands, strict=True)))
        results = [*kind.split_models(kind_of_shard.bind_shard(slot, shard), shard).values()]
        if sums is not None:
            results = [jax.lax.psum(x, tuple(over)) if over else x for x, over in zip(results, sums, strict=True)]
        return tuple(x.astype(output.dtype) for x, output in zip(results, kind.outputs, strict=True))

    on_devices = custom_partitioning(functools.partial(local, None, None))
    on_devices.def_partition(partition, sharding_rule=rule, decode_shardings=True)
    return kind.merge_models(kind.by_name(on_devices(*kind.split_models(arrays, arrays).values())))


def _mesh_axes(*axes: Any) -> list[str]:
    """Returns the mesh axes that these entries of a `PartitionSpec` name."""
    return [name for axis in axes if axis is not None for name in (axis if isinstance(axis, tuple) else (axis,))]


def _num_shards(mesh: Any, *axes: Any) -> int:
    """Returns the number of shards that these entries of a `PartitionSpec` make."""
    return math.prod(mesh.shape[name] for name in _mesh_axes(*axes))
