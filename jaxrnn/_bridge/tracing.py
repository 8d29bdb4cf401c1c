"""Defines how JAX traces the launch primitives: types of results, eager evaluation, `vmap`, and early compilation."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import batching
from jax.sharding import NamedSharding, PartitionSpec

from jaxrnn import context
from jaxrnn._bridge import availability
from jaxrnn._bridge.method import cuda_method
from jaxrnn._bridge.primitive import launch_p, launch_shard_p

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn._bridge.launch_kind import LaunchKind


# Whether `trace_ahead` is tracing.
_ahead = contextvars.ContextVar("_ahead", default=False)


def trace_ahead(function: Callable[..., Any], *operands: Any) -> tuple[ClosedJaxpr, Any]:
    """Returns the jaxpr of a function and the types of its results, and compiles nothing.

    A `jax.vmap` around the function may still change its launches. `compile_launches` compiles them when they have
    their sizes.
    """
    token = _ahead.set(True)
    try:
        return jax.make_jaxpr(function, return_shape=True)(*operands)
    finally:
        _ahead.reset(token)


def compile_launches(jaxpr: Jaxpr) -> None:
    """Starts to compile the launches of a jaxpr."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is launch_p:
            _compile_in_background(eqn.params["kind"], types_of_arrays(eqn))
        for body in bodies(eqn.params.values()):
            compile_launches(body)


def types_of_arrays(eqn: Any) -> dict[str, Any]:
    """Returns the types of the arrays that an equation launches a kernel on, by name."""
    return {name: x.aval for name, x in zip(eqn.params["inputs"], eqn.invars, strict=True)}


def bodies(values: Any) -> Iterator[Jaxpr]:
    """Yields the jaxprs among the parameters of an equation."""
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from bodies(value)


def _compile_in_background(kind: LaunchKind, arrays: dict[str, Any]) -> None:
    """Starts to compile a launch when it is traced, so that all kernels of a program compile in parallel.

    The work is wasted if this launch is not lowered: if JAX only evaluates shapes, if it traces a body again for `vmap`
    or gradients, or if shards on a mesh of `Auto` axes have another tiling.
    """
    if (
        _ahead.get()
        or availability.runs_interpreter()
        or context.listener() is not None
        or not availability.on_gpu()
        or not all(isinstance(n, int) and n for x in arrays.values() for n in x.shape)
    ):
        return
    device, ordinals = availability.cuda_device()
    launch = kind.choose(arrays, device)
    if launch is not None:
        cuda_method().begin(launch, ordinals)


def _abstract_eval(
    *avals: Any, kind: LaunchKind, inputs: Sequence[str], slot: Any = None
) -> list[jax.core.ShapedArray]:
    mesh = avals[0].sharding.mesh
    return [
        jax.core.ShapedArray(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*(None,) * len(x.shape))))
        for x in kind.types(dict(zip(inputs, avals, strict=True))).values()
    ]


def _trace(*avals: Any, kind: LaunchKind, inputs: Sequence[str], mesh_marker: Any) -> list[jax.core.ShapedArray]:
    _compile_in_background(kind, dict(zip(inputs, avals, strict=True)))
    return _abstract_eval(*avals, kind=kind, inputs=inputs)


@functools.lru_cache(maxsize=1024)
def _jitted(**params: Any) -> Callable[..., list[Array]]:
    return jax.jit(functools.partial(launch_p.bind, **params))


def _run(*arrays: Array, **params: Any) -> list[Array]:
    with jax.disable_jit(False):  # under `disable_jit`, bind would call this function again
        return _jitted(**params)(*arrays)


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None], *, kind: LaunchKind, inputs: Sequence[str], mesh_marker: Any
) -> tuple[list[Array], list[int]]:
    mapped = {name: axis for name, axis in zip(inputs, axes, strict=True) if axis is not None}
    results, axis = kind.batch(dict(zip(inputs, operands, strict=True)), mapped)
    return [*results.values()], [axis] * len(results)


launch_p.def_abstract_eval(_trace)
launch_p.def_impl(_run)
launch_shard_p.def_abstract_eval(_abstract_eval)
batching.primitive_batchers[launch_p] = _batch
