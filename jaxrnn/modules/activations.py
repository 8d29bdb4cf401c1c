"""The activations of Flax cells: which of them the functions of `jaxrnn` compute."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array


_SIGMOIDS = (jax.nn.sigmoid, jax.lax.logistic)
_TANHS = (jax.nn.tanh, jax.lax.tanh)


def is_sigmoid(function: Any) -> bool:
    """Whether an activation is known to be sigmoid."""
    return _is_one_of(function, _SIGMOIDS)


def is_tanh(function: Any) -> bool:
    """Whether an activation is known to be tanh."""
    return _is_one_of(function, _TANHS)


def is_relu(function: Any) -> bool:
    """Whether an activation is known to be relu."""
    relu: Any = (
        jax.nn.relu
    )  # a `jax.custom_jvp`: `copy.deepcopy` copies it, but not its rule, which is a plain function
    return function is relu or (type(function) is type(relu) and function.jvp is relu.jvp)


def _is_one_of(function: Any, known: tuple[Callable[..., Array], ...]) -> bool:
    """Whether an activation is one of the known functions, or a copy that `copy.deepcopy` of a module made of one."""
    if any(function is activation for activation in known):
        return True
    jitted: Any = type(jax.nn.sigmoid)  # `copy.deepcopy` copies jitted functions, but returns plain functions unchanged
    if type(function) is not jitted or (program := _scalar_jaxpr(function)) is None:
        return False
    return program in [_scalar_jaxpr(activation) for activation in known if type(activation) is jitted]


@functools.lru_cache(maxsize=256)
def _scalar_jaxpr(function: Callable[..., Array]) -> str | None:
    """Returns the jaxpr of a scalar function as text, without enclosing `jit`s but with custom gradients and effects.

    Returns None if the function cannot be traced with one scalar, for example because it needs an axis.
    """
    try:
        jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), jnp.float32)).jaxpr
    except Exception:  # an arbitrary function may raise anything
        return None
    while len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name in ("jit", "pjit"):
        jaxpr = jaxpr.eqns[0].params["jaxpr"].jaxpr
    return str(jaxpr)
