"""Arguments without forward-mode and second derivatives: these raise an error that names the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

if TYPE_CHECKING:
    from jax import Array


def refuse_to_differentiate(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        'the Triton kernels have no forward-mode and no second derivative: pass implementation="xla"'
    )


# The tangents of arguments pass through this primitive. Reverse mode transposes it and never evaluates it. Forward mode
# evaluates it, and so raises before `custom_vjp` can raise a TypeError that names no remedy.
tangent_p = Primitive("jaxrnn_tangent")
tangent_p.def_abstract_eval(lambda tangent: tangent)
tangent_p.def_impl(refuse_to_differentiate)
batching.primitive_batchers[tangent_p] = lambda tangents, axes: (tangent_p.bind(*tangents), *axes)
mlir.register_lowering(tangent_p, refuse_to_differentiate)
ad.deflinear2(tangent_p, lambda cotangent, _: [cotangent])


@jax.custom_jvp
def _transposable(x: Array) -> Array:
    return x


@_transposable.defjvp
def _transposable_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], tangent_p.bind(tangents[0])


def reverse_mode_only(tree: Any) -> Any:
    """Returns `tree` with floating-point arrays whose forward-mode derivative raises NotImplementedError."""

    def mark(x: Array) -> Array:
        differentiable = isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
        return _transposable(x) if differentiable else x

    return jax.tree.map(mark, tree)
