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
from jaxrnn._bridge.partitioning import PartitionedCallback, partitioned
from jaxrnn._bridge.primitive import launch_p, launch_shard_p

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn._bridge.launch_kind import LaunchKind

logger = logging.getLogger("jaxrnn")

# Up to this size, a barrier separates the operands and results of a launch from slices of a scan's inputs and outputs.
# XLA would fuse these slices with the launch, and would not capture the fusion in its CUDA graphs, which costs 8 to 25
# us per iteration (H200).
_UNFUSED_SLICE_BYTES = 2**22


def _prevent_slice_fusion(arrays: Sequence[Any]) -> list[Any]:
    """Returns `arrays`, the small ones behind a barrier, so that XLA copies slices and does not fuse them."""
    small = [k for k, x in enumerate(arrays) if math.prod(x.shape) * x.dtype.itemsize <= _UNFUSED_SLICE_BYTES]
    results = list(arrays)
    for k, x in zip(small, jax.lax.optimization_barrier([arrays[k] for k in small]), strict=True):
        results[k] = x
    return results


def shard_function(
    find_device: Callable[[], tuple[Any, Sequence[int]]], choose_method: Callable[[], Method]
) -> Callable[..., list[Array]]:
    """Returns the function that computes a shard. Tracing it compiles the kernel for all local devices.

    The compiled function launches the kernel by the method that `choose_method` returns when it is traced.
    """

    def compute_shard(*arrays: Array, kind: LaunchKind, **params: Any) -> list[Array]:
        device, ordinals = find_device()
        launch = kind.choose(arrays, params, device)
        record = record_of(kind, launch, arrays, params)
        if record is None:  # XLA computes a product in place of the launch, which neither `explain` nor the log names
            return kind.in_xla(arrays, params)
        logger.debug("%s", record)
        with jax.named_scope(record.scope):
            if launch is None:
                return kind.in_xla(arrays, params)
            return add_launch(launch, ordinals, arrays, kind, params)

    def add_launch(
        launch: Any, ordinals: Sequence[int], arrays: tuple[Array, ...], kind: LaunchKind, params: dict[str, Any]
    ) -> list[Array]:
        results, method = kind.types([x.shape for x in arrays], params), choose_method()
        # outside of the barriers, so that XLA can drop a cast and its inverse in the launch of the gradient
        array_dtypes = kind.array_dtypes(launch)
        arrays = tuple(
            x.astype(array_dtypes.get(name, x.dtype)) for name, x in zip(params["inputs"], arrays, strict=True)
        )
        arrays = tuple(kind.operands(launch, arrays, params))
        results = [
            jax.ShapeDtypeStruct(x.shape, jnp.dtype(array_dtypes.get(output.name, x.dtype)))
            for output, x in zip(params["outputs"], results, strict=True)
        ]
        if method.captured:
            arrays = tuple(_prevent_slice_fusion(arrays))
        inputs, outputs = list(params["inputs"]), [output.name for output in params["outputs"]]
        aliases = {inputs.index(output.over): k for k, output in enumerate(params["outputs"]) if output.over}
        for name, length, dtype, zeroed in launch.workspaces:
            if zeroed:  # an input that is aliased to an output, so that XLA knows that the kernel writes to it
                arrays = (*arrays, jnp.zeros((length,), dtype))
                inputs.append(name)
                aliases[len(arrays) - 1] = len(results)
            results.append(jax.ShapeDtypeStruct((length,), dtype))
            outputs.append(name)
        function = method.call(launch, ordinals, inputs, outputs, results, aliases)
        written = list(function(*arrays)[: len(params["outputs"])])
        written = _prevent_slice_fusion(written) if method.captured else written
        return [x.astype(output.dtype) for output, x in zip(params["outputs"], written, strict=True)]

    return compute_shard


def _lower_shard(
    compute_shard: Callable[..., list[Array]], ctx: Any, *operands: Any, slot: PartitionedCallback | None, **params: Any
) -> Any:
    """Lowers the launch of a shard; registers its callback in `slot` if the surrounding program is already lowered."""
    lower = mlir.lower_fun(compute_shard, multiple_results=True)
    if slot is None:
        return lower(ctx, *operands, **params)
    # `slot.index` is an index into the callbacks of the whole program, and these are those of the shard's module
    callbacks = ctx.module_context.host_callbacks
    while len(callbacks) < slot.index:
        ctx.module_context.add_host_callback(None)
    results = lower(ctx, *operands, **params)
    if len(callbacks) > slot.index:  # false if XLA computes the shard
        slot.callbacks[tuple(aval.shape for aval in ctx.avals_in)] = callbacks[slot.index]
    return results


def _lower(ctx: Any, *operands: Any, kind: LaunchKind, mesh_marker: Any, **params: Any) -> Any:
    """Lowers a launch: on a mesh of `Auto` axes to a `custom_partitioning` that XLA may shard, else for one device."""
    del mesh_marker  # an argument only so that JAX passes the mesh: see `primitive`
    mesh = getattr(ctx.module_context.axis_context, "abstract_mesh", None)  # none inside `shard_map` and `pmap`
    managed = mesh is not None and mesh.size > 1 and all(axis == AxisType.Auto for axis in mesh.axis_types)
    if any(0 in aval.shape for aval in ctx.avals_out):  # `vmap` over an axis of length zero: all results are empty
        zeros = lambda *_: [jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out]  # noqa: E731
        return mlir.lower_fun(zeros, multiple_results=True)(ctx, *operands)
    if not managed or not getattr(jax.config, "jax_use_shardy_partitioner", True):
        function = functools.partial(_on_one_device, kind, params)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
    slot = None
    if any(
        _METHODS[platform]().uses_host_callbacks for platform in ctx.module_context.platforms if platform in _METHODS
    ):
        slot = PartitionedCallback()
        slot.index = len(ctx.module_context.host_callbacks)
        ctx.module_context.add_host_callback(slot)
    return mlir.lower_fun(partitioned(kind, slot, params), multiple_results=True)(ctx, *operands)


def _on_one_device(kind: LaunchKind, params: dict[str, Any], *arrays: Array) -> Sequence[Array]:
    """Computes the results of `launch_p` by one launch on one device."""
    return kind.merge_model_axis(kind.bind_shard(None, kind.split_model_axis(arrays, params), params), params)


def _lower_cpu_shard(compute_shard: Callable[..., list[Array]], ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers the launch of a shard for the CPU.

    Triton's interpreter launches the kernel. Otherwise XLA computes the results if the caller permits it, or if the
    program is for several platforms. Otherwise `_lower_shard` raises, because the call names "triton".
    """
    if runs_interpreter() or not (params["may_use_xla"] or len(ctx.module_context.platforms) > 1):
        return _lower_shard(compute_shard, ctx, *operands, **params)

    def in_xla(*arrays: Array, kind: LaunchKind, slot: Any, **params: Any) -> list[Array]:
        return kind.in_xla(arrays, params)

    return mlir.lower_fun(in_xla, multiple_results=True)(ctx, *operands, **params)


_METHODS: dict[str, Callable[[], Method]] = {"cuda": cuda_method, "cpu": interpreted_method}
mlir.register_lowering(launch_p, _lower)
for _platform, _device, _lower_for in (("cuda", cuda_device, _lower_shard), ("cpu", cpu_device, _lower_cpu_shard)):
    _function = shard_function(_device, _METHODS[_platform])
    mlir.register_lowering(launch_shard_p, functools.partial(_lower_for, _function), platform=_platform)
