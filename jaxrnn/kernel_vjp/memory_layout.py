"""The layout of arrays in memory: the one in which matrix products read them fastest, where XLA would keep another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

if TYPE_CHECKING:
    from jax import Array

# The identity, whose result is row-major in memory.
row_major_p = Primitive("jaxrnn_row_major")


def features_first(x: Array) -> Array:
    """Transposes `x [*rows, N]` to `[N, *rows]` in memory too, so that the rows a product sums over are contiguous.

    XLA does not copy for a plain transpose: it passes the layout of `x` to the product. On Hopper, tensor cores read
    TF32 operands from shared memory only if the axis that is summed over is contiguous, and a product in which neither
    operand has that layout runs at half the speed.
    """
    return row_major_p.bind(jnp.moveaxis(x, -1, 0))


def _in_row_major(x: Array) -> Array:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _batch(args: tuple[Array], axes: tuple[int]) -> tuple[Array, int]:
    return row_major_p.bind(jnp.moveaxis(args[0], axes[0], 0)), 0


def _lower(ctx: Any, x: Any) -> Any:
    """Fixes the layout, except on a mesh that XLA partitions over: XLA would gather the shards of such an array."""
    context = ctx.module_context.axis_context
    if hasattr(context, "manual_axes"):  # inside `shard_map`
        on_one_device = context.manual_axes == frozenset(context.mesh.axis_names)
    else:
        on_one_device = getattr(context, "num_devices", None) == 1
    return mlir.lower_fun(_in_row_major, multiple_results=False)(ctx, x) if on_one_device else [x]


row_major_p.def_abstract_eval(lambda x: x)
row_major_p.def_impl(lambda x: x)  # an eager call keeps the layout, which changes no value
batching.primitive_batchers[row_major_p] = _batch
mlir.register_lowering(row_major_p, _lower)
