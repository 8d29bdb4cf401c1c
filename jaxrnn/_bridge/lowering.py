"""The lowering of a launch: compiles its kernel, and adds the call that launches it to the program."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AxisType

from jaxrnn._bridge.availability import cpu_device, cuda_device, runs_interpreter
from jaxrnn._bridge.launch_record import record_of
from jaxrnn._bridge.method import Method, cuda_method, interpreted_method
from jaxrnn._bridge.partitioning import PartitionedCallback, run_partitioned
from jaxrnn._bridge.primitive import launch_p, launch_shard_p

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn._bridge.launch_kind import LaunchKind

logger = logging.getLogger("jaxrnn")

# Up to this size, a barrier separates the operands and results of a launch from slices of a scan's inputs and outputs.
# XLA would fuse these slices with the launch, and would not capture the fusion in its CUDA graphs, which costs 8 to 25
# us per iteration (H200).
_UNFUSED_SLICE_BYTES = 2**22


def _prevent_slice_fusion(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns `arrays`, the small ones behind a barrier, so that XLA copies slices and does not fuse them."""
    small = [name for name, x in arrays.items() if math.prod(x.shape) * x.dtype.itemsize <= _UNFUSED_SLICE_BYTES]
    return arrays | dict(zip(small, jax.lax.optimization_barrier([arrays[name] for name in small]), strict=True))


def _lower_by_name(
    function: Callable[..., dict[str, Array]], ctx: Any, *operands: Any, inputs: Sequence[str], **params: Any
) -> Any:
    """Lowers a function of a launch's arrays by name, which returns the results by name."""

    def flat(*arrays: Array) -> list[Array]:
        return [*function(dict(zip(inputs, arrays, strict=True)), **params).values()]

    return mlir.lower_fun(flat, multiple_results=True)(ctx, *operands)


def shard_function(
    find_device: Callable[[], tuple[Any, Sequence[int]]], choose_method: Callable[[], Method]
) -> Callable[..., dict[str, Array]]:
    """Returns the function that computes a shard. Tracing it compiles the kernel for all local devices.

    The compiled function launches the kernel by the method that `choose_method` returns when it is traced.
    """

    def compute_shard(arrays: dict[str, Array], kind: LaunchKind) -> dict[str, Array]:
        device, ordinals = find_device()
        launch = kind.choose(arrays, device)
        record = record_of(kind, launch, arrays)
        if record is None:  # XLA computes a product in place of the launch, which neither `explain` nor the log names
            return kind.in_xla(arrays)
        logger.debug("%s", record)
        with jax.named_scope(record.scope):
            return kind.in_xla(arrays) if launch is None else add_launch(launch, ordinals, arrays, kind)

    def add_launch(
        launch: Any, ordinals: Sequence[int], arrays: dict[str, Array], kind: LaunchKind
    ) -> dict[str, Array]:
        results, method, dtypes = kind.types(arrays), choose_method(), kind.array_dtypes(launch)
        # outside of the barriers, so that XLA can drop a cast and its inverse in the launch of the gradient
        arrays = kind.operands(launch, {name: x.astype(dtypes.get(name, x.dtype)) for name, x in arrays.items()})
        results = {
            name: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtypes.get(name, x.dtype))) for name, x in results.items()
        }
        if method.captured:
            arrays = _prevent_slice_fusion(arrays)
        aliases = {output.over: output.name for output in kind.outputs if output.over}
        for name, length, dtype, zeroed in launch.workspaces:
            if zeroed:  # an input that is aliased to an output, so that XLA knows that the kernel writes to it
                arrays = arrays | {name: jnp.zeros((length,), dtype)}
                aliases[name] = name
            results[name] = jax.ShapeDtypeStruct((length,), dtype)
        inputs, names = [*arrays], [*results]
        positions = {inputs.index(over): names.index(name) for over, name in aliases.items()}
        written = kind.by_name(method.call(launch, ordinals, arrays, results, positions)[: len(kind.outputs)])
        written = _prevent_slice_fusion(written) if method.captured else written
        return {output.name: written[output.name].astype(output.dtype) for output in kind.outputs}

    return compute_shard


def _lower_shard(
    compute_shard: Callable[..., dict[str, Array]], ctx: Any, *operands: Any, slot: PartitionedCallback | None,
    **params: Any,
) -> Any:  # fmt: skip
    """Lowers the launch of a shard; registers its callback in `slot` if the surrounding program is already lowered."""
    if slot is None:
        return _lower_by_name(compute_shard, ctx, *operands, **params)
    # `slot.index` is an index into the callbacks of the whole program, and these are those of the shard's module
    callbacks = ctx.module_context.host_callbacks
    while len(callbacks) < slot.index:
        ctx.module_context.add_host_callback(None)
    results = _lower_by_name(compute_shard, ctx, *operands, **params)
    if len(callbacks) > slot.index:  # false if XLA computes the shard
        slot.callbacks[tuple(aval.shape for aval in ctx.avals_in)] = callbacks[slot.index]
    return results


def _lower(ctx: Any, *operands: Any, kind: LaunchKind, inputs: Sequence[str], mesh_marker: Any) -> Any:
    """Lowers a launch: on a mesh of `Auto` axes to a `custom_partitioning` that XLA may shard, else for one device."""
    del mesh_marker  # an argument only so that JAX passes the mesh: see `primitive`
    mesh = getattr(ctx.module_context.axis_context, "abstract_mesh", None)  # none inside `shard_map` and `pmap`
    managed = mesh is not None and mesh.size > 1 and all(axis == AxisType.Auto for axis in mesh.axis_types)
    if any(0 in aval.shape for aval in ctx.avals_out):  # `vmap` over an axis of length zero: all results are empty
        zeros = lambda *_: [jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out]  # noqa: E731
        return mlir.lower_fun(zeros, multiple_results=True)(ctx, *operands)
    if not managed or not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return _lower_by_name(functools.partial(kind.bind_shard, None), ctx, *operands, inputs=inputs)
    slot = None
    if any(
        _METHODS[platform]().uses_host_callbacks for platform in ctx.module_context.platforms if platform in _METHODS
    ):
        slot = PartitionedCallback()
        slot.index = len(ctx.module_context.host_callbacks)
        ctx.module_context.add_host_callback(slot)
    return _lower_by_name(functools.partial(run_partitioned, kind, slot), ctx, *operands, inputs=inputs)


def _lower_cpu_shard(
    compute_shard: Callable[..., dict[str, Array]], ctx: Any, *operands: Any, kind: LaunchKind, inputs: Sequence[str],
    slot: PartitionedCallback | None,
) -> Any:  # fmt: skip
    """Lowers the launch of a shard for the CPU.

    Triton's interpreter launches the kernel. Otherwise XLA computes the results if the caller permits it, or if the
    program is for several platforms. Otherwise `_lower_shard` raises, because the call names "triton".
    """
    if runs_interpreter() or not (kind.may_use_xla or len(ctx.module_context.platforms) > 1):
        return _lower_shard(compute_shard, ctx, *operands, kind=kind, inputs=inputs, slot=slot)
    return _lower_by_name(kind.in_xla, ctx, *operands, inputs=inputs)


_METHODS: dict[str, Callable[[], Method]] = {"cuda": cuda_method, "cpu": interpreted_method}
mlir.register_lowering(launch_p, _lower)
for _platform, _device, _lower_for in (("cuda", cuda_device, _lower_shard), ("cpu", cpu_device, _lower_cpu_shard)):
    _function = shard_function(_device, _METHODS[_platform])
    mlir.register_lowering(launch_shard_p, functools.partial(_lower_for, _function), platform=_platform)
