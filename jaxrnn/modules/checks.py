"""Checks of what a user of the modules passes: cells, inputs, carries and sizes; each raises ValueError."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrnn.checks import (
    Caller,
    check_array,
    check_float_dtype,
    check_promotes,
    check_rank,
    check_real,
    check_size,
    describe,
    package_of,
    shown,
)
from jaxrnn.modules.reasons import has_complex
from jaxrnn.modules.recurrence import check_carry

if TYPE_CHECKING:
    from jaxrnn.modules.carries import Carry
    from jaxrnn.modules.recurrence import Recurrence


def caller_of(module: Any, *, has_time_major: bool = True, **arguments: str) -> Caller:
    """Returns how messages name a module and, by argument of the functions of `jaxrnn`, its arguments."""
    return Caller(type(module).__name__, arguments, has_time_major)


def check_cell(caller: Caller, cell: Any, base: type, example: str) -> None:
    """Raises ValueError unless `cell` is a cell of the framework whose cells derive from `base`, or has its attributes.

    Args:
      caller: what the user called.
      cell: what was given as a cell.
      base: the base class of the cells.
      example: the arguments of a cell's class.
    """
    framework = "nnx" if ".nnx" in base.__module__ else "linen"
    has_attributes = not isinstance(cell, type) and hasattr(cell, "num_feature_axes")
    if isinstance(cell, base) or (has_attributes and package_of(cell) in (f"flax.{framework}", None)):
        return
    if isinstance(cell, type):
        remedy = f"make an instance, such as {cell.__name__ if issubclass(cell, base) else 'GRUCell'}({example})"
    elif hasattr(cell, "num_layers"):
        remedy = "call the stack itself, which runs over time"
    else:
        remedy = f"make one, such as jaxrnn.{framework}.GRUCell({example})"
    raise ValueError(
        f"{caller('cell')} must be a cell, an instance of flax.{framework}.RNNCellBase, got {describe(cell)}; {remedy}"
    )


def check_inputs(
    caller: Caller, inputs: Any, time_major: Any, feature_axes: int = 1, carry: Carry | None = None
) -> None:
    """Raises ValueError unless the inputs are one array with a time axis, and real if the initial `carry` is."""
    check_array(caller("xs"), inputs)
    check_promotes(caller("xs"), inputs)
    if not has_complex(carry):
        check_real(caller("xs"), inputs)
    check_rank(caller("xs"), inputs, bool(time_major), feature_axes)


def check_pair(caller: Caller, argument: str, pair: Any, carry: Carry | None) -> tuple[Any, Any]:
    """Returns inputs and resets; raises ValueError unless `pair` is the two of them, in this order.

    The inputs are checked with the initial `carry`.
    """
    inputs = caller.bare("xs")
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        remedy = "pass resets too, which are the dones of the previous steps, and the carry before them"
        if isinstance(pair, (tuple, list)) and len(pair) > 2:
            remedy = "leave out the others"
        raise ValueError(f"{caller(argument)} must be the pair ({inputs}, resets), got {describe(pair)}; {remedy}")
    xs, resets = pair
    check_inputs(caller, xs, time_major=True, carry=carry)
    if resets is not None:
        check_real(caller("resets"), resets)
        if np.ndim(resets) == xs.ndim + 1:
            raise ValueError(f"{caller(argument)} must be ({inputs}, resets), got (resets, {inputs}); swap them")
    return xs, resets


def check_step(caller: Caller, recurrence: Recurrence, carry: Carry, inputs: Any) -> None:
    """Raises ValueError unless carry and inputs of one step are arrays, and the carry has its structure."""
    check_carry(recurrence, carry, caller)
    check_real(caller("xs"), inputs)
    check_promotes(caller("xs"), inputs)
    if np.ndim(inputs) < 1:
        raise ValueError(f"{caller('xs')} must be [*batch, D], got a scalar; add the axes that are missing")


def check_width(name: str, term: str, expected: Any, got: Any) -> None:
    """Raises ValueError unless an array is as wide as `term`, the argument of the module that determines its width."""
    if expected != got:
        raise ValueError(
            f"{name} must have the width {term} = {expected}, got {got}; make the module with {term}={got}, or pass an "
            f"array of width {expected}"
        )


def check_sizes(module: Any, *names: str) -> None:
    """Raises ValueError unless these attributes of a module are positive integers."""
    for name in names:
        check_size(f"{type(module).__name__}: {name}", getattr(module, name))


def check_input_shape(module: Any, input_shape: Any, arguments: str) -> None:
    """Raises ValueError unless `input_shape`, an argument of `initialize_carry(arguments)`, is a shape with a width."""
    if not isinstance(input_shape, (tuple, list)) or not input_shape or not are_sizes(input_shape):
        raise ValueError(
            f"{type(module).__name__}: input_shape must be the shape of one step's inputs, (*batch, D), got "
            f"{shown(input_shape)}; call initialize_carry({arguments})"
        )


def are_sizes(shape: Any) -> bool:
    """Whether a shape has dimensions that are not negative, some of them possibly symbolic."""
    no_size = (float, str, tuple, list, type(None))
    return not any(isinstance(size, no_size) or np.ndim(size) or bool(size < 0) for size in shape)


def check_dtypes(module: Any) -> None:
    """Raises ValueError unless `dtype` and `param_dtype` of a module are floating-point dtypes or None."""
    for name in ("dtype", "param_dtype"):
        check_float_dtype(f"{type(module).__name__}: {name}", getattr(module, name))


def check_unroll(caller: Caller, unroll: Any) -> None:
    """Raises ValueError unless `unroll` is a boolean or an integer that is not negative, as `jax.lax.scan` takes it."""
    if not isinstance(unroll, (bool, np.bool_)):
        check_size(caller("unroll"), unroll, least=0)


def check_rngs(caller: Caller, rngs: Any) -> None:
    """Raises ValueError unless `rngs` makes keys of parameters, as an `nnx.Rngs` does."""
    if isinstance(rngs, (int, jax.Array, np.ndarray)) or rngs is None:
        raise ValueError(f"{caller('rngs')} must be an nnx.Rngs, got {shown(rngs)}; pass nnx.Rngs(seed)")


def check_function(caller: Caller, name: str, function: Any) -> None:
    """Raises ValueError unless an argument is a function."""
    if not callable(function):
        raise ValueError(f"{caller(name)} must be a function, got {shown(function)}; pass jax.nn.relu, for example")


def as_array(name: str, x: Any) -> jax.Array:
    """Returns `x`, an array or numbers in lists, as a JAX array; raises ValueError if it is none."""
    try:
        array = jax.numpy.asarray(x)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be an array, got {describe(x)}; pass an array of numbers") from None
    check_array(name, array)
    check_promotes(name, array)
    return array
