"""The pair of primitives that every launch of a kernel binds. `launch_kind` says what kinds of launches there are."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive

from jaxrnn import sharding

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn._bridge.launch_kind import LaunchKind


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


# A call traces `launch_p`, whose rules are in `tracing`. Its lowering, in `lowering`, emits `launch_shard_p`, which
# launches the shard of one device; on a single device there is one shard. The parameter `kind` says what is launched,
# and `inputs` names the operands. Only `bind` and the rules handle operands by position: what they call takes and
# returns arrays by name.
launch_p, launch_shard_p = _primitive("jaxrnn_launch"), _primitive("jaxrnn_launch_shard")


@functools.cache
def _mesh_marker() -> Any:
    """Returns a jaxpr that, as a parameter of a primitive, makes JAX pass devices and mesh to its lowering rule.

    JAX does so for primitives in whose parameters it finds a `custom_partitioning`. The jaxpr is never lowered, so its
    partitioning is never computed. It is made once, because launches with equal parameters are compiled once.
    """
    identity = custom_partitioning(lambda x: x)
    identity.def_partition(lambda mesh, x, y: (mesh, lambda x: x, y.sharding, (x.sharding,)), sharding_rule="->")
    return jax.make_jaxpr(lambda x: identity(x))(0.0)


def bind(kind: LaunchKind, arrays: Mapping[str, Array | None]) -> dict[str, Array]:
    """Binds a launch to its arrays by name; those that are None are left out. Returns its outputs by name."""
    present = {name: x for name, x in arrays.items() if x is not None}
    # `shard_map` takes results of a primitive without a rule as equal on all devices; they vary as the inputs do
    return sharding.unify_varying_axes(bind_batched(kind, present), present)


def bind_batched(kind: LaunchKind, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Binds a launch in its rule for `vmap`, where no array is None.

    It does not make results vary: in the program that is batched, `bind` has put an operation after the launch that
    does.
    """
    return kind.by_name(launch_p.bind(*arrays.values(), kind=kind, inputs=tuple(arrays), mesh_marker=_mesh_marker()))
