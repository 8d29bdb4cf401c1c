"""Arrays laid out in memory as products take them fastest, where XLA would leave them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from jax import Array

features_first_p = Primitive("jaxrnn_features_first")


def features_first(x: Array) -> Array:
    """`x [*rows, N]` as `[N, *rows]`, in memory too: to sum over rows a product then reads what lies side by side.

    Of a plain transpose XLA makes no copy: it tells the product how `x` lies. Tensor cores take TF32 from shared memory
    only as it is summed over, and a product of which both operands lie otherwise has half the speed (Hopper).
    """
    return features_first_p.bind(x, lead=0)


def _transposed(x: Array, *, lead: int) -> Array:
    return jnp.moveaxis(x, -1, lead)


def _laid_out(x: Array, *, lead: int) -> Array:
    return with_layout_constraint(_transposed(x, lead=lead), Layout(tuple(range(x.ndim))))


def _abstract(x: Any, *, lead: int) -> Any:
    def permuted(axes: Any) -> tuple[Any, ...]:
        return (*axes[:lead], axes[-1], *axes[lead:-1])

    spec = tuple(x.sharding.spec) + (None,) * (len(x.shape) - len(x.sharding.spec))
    return x.update(shape=permuted(x.shape), sharding=x.sharding.update(spec=PartitionSpec(*permuted(spec))))


def _batch(args: tuple[Array], axes: tuple[int], *, lead: int) -> tuple[Array, int]:
    return features_first_p.bind(jnp.moveaxis(args[0], axes[0], 0), lead=lead + 1), 0


def _lower(ctx: Any, x: Any, *, lead: int) -> Any:
    """On a mesh that XLA partitions over, a transpose: of an array whose layout is fixed it would gather the parts."""
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):  # inside `shard_map`
        whole = context.manual_axes == frozenset(context.mesh.axis_names)
    else:
        whole = getattr(context, "num_devices", None) == 1
    return mlir.lower_fun(_laid_out if whole else _transposed, multiple_results=False)(ctx, x, lead=lead)


features_first_p.def_abstract_eval(_abstract)
features_first_p.def_impl(_transposed)
batching.primitive_batchers[features_first_p] = _batch
mlir.register_lowering(features_first_p, _lower)
