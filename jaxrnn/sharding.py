"""Runs functions on each device's shard of arrays, reshards arrays, and makes their types agree in `shard_map`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jax import Array


def _varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes that `x` varies over inside `shard_map`; elsewhere there are none."""
    aval = jax.typeof(x)
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma  # renamed in JAX 0.10


def unify_varying_axes(tree: Any, *others: Any) -> Any:
    """Makes each array of `tree` vary over all axes that any of `tree` or `others` varies over: see `jax.lax.pcast`."""
    axes = frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves((tree, *others))))

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - _varying_axes(x)))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # before JAX 0.9

    return jax.tree.map(vary, tree)


def _reshard_array(x: Array, sharding: NamedSharding) -> Array:
    reshard = jax.reshard if hasattr(jax, "reshard") else jax.sharding.reshard  # before JAX 0.9
    return reshard(x, sharding)


def spec_of(x: Array) -> tuple[Any, ...]:
    """Returns the spec of each axis of `x` on an explicit mesh, None for an axis that is not sharded."""
    spec = tuple(getattr(jax.typeof(x).sharding, "spec", ()))
    return spec + (None,) * (x.ndim - len(spec))


def _explicit_mesh(tree: Any) -> Any:
    """Returns the explicit mesh of the first array of `tree` that is on one, or None."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def on_explicit_mesh(tree: Any) -> bool:
    """Returns whether any array of `tree` is on an explicit mesh."""
    return _explicit_mesh(tree) is not None


def reshard(tree: Any, mesh: Any, specs: Any) -> Any:
    """Reshards each array of `tree` over an explicit mesh by its spec in `specs`, unless it already has that sharding.

    A None in place of an array stays None, whatever its spec is.
    """

    def to(x: Array | None, spec: PartitionSpec) -> Array | None:
        if x is None:
            return None
        there = jax.typeof(x).sharding.mesh == mesh and spec_of(x) == (*spec, *(None,) * (x.ndim - len(spec)))
        return x if there else _reshard_array(x, NamedSharding(mesh, spec))

    return jax.tree.map(to, tree, specs, is_leaf=lambda x: x is None)


def replicate(tree: Any) -> Any:
    """Replicates each array of `tree` on all devices of the explicit mesh that it is sharded over."""

    def gather(x: Array) -> Array:
        sharding = jax.typeof(x).sharding
        if all(axis is None for axis in sharding.spec):
            return x
        return _reshard_array(x, NamedSharding(sharding.mesh, PartitionSpec()))

    return jax.tree.map(gather, tree)


def replicate_all(tree: Any) -> Any:
    """Replicates each array of `tree` on all devices of the explicit mesh that any of them is on.

    Unlike `replicate`, it moves arrays that are on no mesh, which needs `jax.jit`. Under `vmap` over a sharded axis,
    arrays that were made inside are on no mesh. XLA cannot combine them with those on the mesh.
    """
    mesh = _explicit_mesh(tree)
    return tree if mesh is None else reshard(tree, mesh, jax.tree.map(lambda _: PartitionSpec(), tree))


def stack(arrays: Sequence[Array], axis: int = 0) -> Array:
    """Stacks arrays, all on one mesh or on none, of which `vmap` over a sharded axis may map only some.

    The rule of `jnp.stack` for `vmap` (JAX 0.11) does not shard the others; that of a concatenation does.
    """
    return jnp.concatenate([jnp.expand_dims(x, axis) for x in arrays], axis=axis)


def reshard_like(xs: Array, axes: int, time_axis: int, carry: Any, resets: Any, reset_carry: Any) -> tuple[Any, ...]:
    """Reshards what a loop over `xs` takes to match the batch axes of `xs` on an explicit mesh.

    JAX does not reshard there by itself, but the carry of a loop must keep its sharding.

    Args:
      xs: the inputs, whose first `axes` axes are batch axes and the time axis.
      axes: see `xs`.
      time_axis: the index of the time axis.
      carry: a list of arrays whose leading axes are the batch axes.
      resets: `[*batch, T]`, with time at `time_axis`, or None.
      reset_carry: a list of arrays like those of `carry`, without batch axes, or with a time axis too, or None.

    Returns:
      `(carry, resets, reset_carry)`.
    """
    mesh = _explicit_mesh((xs, carry, resets, reset_carry))
    if mesh is None:
        return carry, resets, reset_carry
    lead = list(spec_of(xs)[:axes])
    lead[time_axis] = None
    sequence = PartitionSpec(*lead)
    state = PartitionSpec(*lead[:time_axis], *lead[time_axis + 1 :])

    def of_carry(x: Array) -> PartitionSpec:
        return state if x.ndim >= len(state) else PartitionSpec()  # such as a counter of a cell of the user

    def of_reset_carry(new: Array, old: Array) -> PartitionSpec:
        return sequence if new.ndim > old.ndim else of_carry(old) if new.ndim == old.ndim else PartitionSpec()

    tree = carry, resets, reset_carry
    specs = (
        [of_carry(x) for x in carry],
        sequence,
        [None if new is None else of_reset_carry(new, old) for new, old in zip(reset_carry, carry, strict=True)],
    )
    # under `jit` with `xs`, so that arrays that are on no mesh can be moved
    return jax.jit(lambda _, tree: reshard(tree, mesh, specs), keep_unused=True)(xs, tree)


_SHARDED_TWICE = (
    "the Triton implementation cannot run under vmap over an axis that is sharded over an explicit mesh if a shard_map "
    "or a batch axis uses another axis of that mesh: put the whole computation into one jax.shard_map over both axes "
    'of the mesh, or pass implementation="xla"'
)
# Arguments of a `shard_map` pass through this primitive, which raises under `vmap` over a sharded axis: JAX would
# replicate the arguments on every device there.
enter_p = Primitive("jaxrnn_enter")


def _batch_enter(arrays: Sequence[Array], axes: Sequence[int]) -> tuple[Array, int]:
    if jax.typeof(arrays[0]).sharding.spec[axes[0]] is not None:
        raise NotImplementedError(_SHARDED_TWICE)
    return enter_p.bind(*arrays), axes[0]


enter_p.def_abstract_eval(lambda x: x)
enter_p.def_impl(lambda x: x)
batching.primitive_batchers[enter_p] = _batch_enter
mlir.register_lowering(enter_p, lambda _, x: [x])
ad.deflinear2(enter_p, lambda cotangent, _: [cotangent])


def shard_over_mesh(run: Callable[..., Any], mesh: Any, specs: Any, results: Any, arguments: Any) -> Any:
    """Runs `run` on each device's shard of `arguments`, which are resharded to `specs` on an explicit mesh first.

    `results` are the specs of the results.

    Raises:
      NotImplementedError: `vmap` maps over a sharded axis.
    """
    arguments = jax.tree.map(
        lambda x, spec: _reshard_array(enter_p.bind(x), NamedSharding(mesh, spec)), arguments, specs
    )
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=results)(*arguments)


def shard_over_vmapped_axes(run: Callable[..., Any], *arguments: Any) -> Any:
    """Runs `run(*arguments)` on pytrees of arrays; has no derivative.

    Under `vmap` over axes that are sharded over an explicit mesh, each device runs its shard of these axes. JAX's own
    rules for the operations of `run` would need a mesh that is set around the program, or would compute everything on
    every device.

    Raises:
      NotImplementedError: `vmap` maps over a sharded axis, and a `shard_map` uses another axis of the mesh.
    """
    arrays = jax.tree.leaves(arguments)
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None:
        return run(*arguments)
    return _shard_over_vmapped_axes(run, mesh, [()] * len(arrays), ())(*arguments)


def _shard_over_vmapped_axes(run: Callable[..., Any], mesh: Any, specs: list[tuple[Any, ...]], results: Any) -> Any:
    """Returns `run` on each device of `mesh`; `specs` and `results` are specs of leading axes that `vmap` added."""

    @custom_vmap
    def call(*arguments: Any) -> Any:
        if AxisType.Manual in mesh.axis_types:
            return run(*arguments)
        in_specs = jax.tree.unflatten(jax.tree.structure(arguments), [PartitionSpec(*spec) for spec in specs])

        def local(*arguments: Any) -> Any:
            arguments = unify_varying_axes(arguments)
            return unify_varying_axes(run(*arguments), arguments)

        return shard_over_mesh(local, mesh, in_specs, PartitionSpec(*results), arguments)

    @call.def_vmap
    def rule(_: int, batched: Any, *arguments: Any) -> Any:
        batched = tuple(batched)  # JAX passes a list
        flags = jax.tree.leaves(batched)
        mapped = [jax.typeof(x) for x, flag in zip(jax.tree.leaves(arguments), flags, strict=True) if flag]
        leads = [x.sharding.spec[0] for x in mapped]
        over = next((lead for lead in leads if lead is not None), None)
        if over is not None and AxisType.Manual in mesh.axis_types:
            raise NotImplementedError(_SHARDED_TWICE)
        in_axes = jax.tree.map(lambda flag: 0 if flag else None, batched)
        further = [(over, *spec) if flag else spec for spec, flag in zip(specs, flags, strict=True)]
        outputs = _shard_over_vmapped_axes(jax.vmap(run, in_axes), mesh, further, (over, *results))(*arguments)
        return outputs, jax.tree.map(lambda _: True, outputs)

    return call
