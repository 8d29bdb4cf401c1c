"""Arrays of any framework as JAX arrays, and descriptions of mappings for error messages."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn.checks import CONVERTERS, package_of
from jaxrnn.checks import describe as describe_value

if TYPE_CHECKING:
    from jax import Array


def read_arrays(caller: str, arrays: Mapping[str, Any], names: Collection[str], whole: Any = ...) -> dict[str, Array]:
    """Returns the arrays called `names`; raises ValueError if one is missing.

    The message describes `whole`, which is what the user passed; by default that is `arrays`.
    """
    missing = [name for name in names if name not in arrays]
    if missing:
        whole = arrays if whole is ... else whole
        raise ValueError(f"{caller}: no {', '.join(missing)} in {describe(whole)}{remedy_for(caller, whole)}")
    return {name: read_array(caller, name, arrays[name]) for name in names}


def read_array(caller: str, name: str, x: Any) -> Array:
    """Returns `x` as a JAX array of the same dtype that shares no memory with a writable array.

    Raises ValueError if `x` is no array of floating-point numbers, or if JAX would change its dtype.
    """
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):  # x is a variable of NNX, or of Keras on JAX
        x = x.__jax_array__()
    elif getattr(x, "is_meta", False):
        raise ValueError(f"{caller}: {name} must have values, got a tensor on the device meta; load the weights first")
    elif hasattr(x, "detach"):  # x is a PyTorch tensor; NumPy alone has no bfloat16, and float32 represents it exactly
        x = x.detach().cpu()
        x = x.float().numpy().astype(jnp.bfloat16) if str(x.dtype) == "torch.bfloat16" else x.numpy()
    elif hasattr(x, "value") and not callable(x.value):  # x is a box of linen or a variable of Keras
        return read_array(caller, name, x.value)
    try:
        array = x if isinstance(x, jax.Array) else np.array(x)
    except ValueError:
        array = np.array(None)  # rows have different lengths; an array of objects is refused below
    if array.dtype.kind in "OUS":
        raise ValueError(f"{caller}: {name} must be floating point, got {describe_value(x)}; pass an array of numbers")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{caller}: {name} must be floating point, got {array.dtype}; convert it first")
    if isinstance(array, jax.Array):
        return array
    converted = jnp.asarray(array)
    if converted.dtype != array.dtype:
        raise ValueError(
            f"{caller}: {name} is {array.dtype}, which JAX would convert to {converted.dtype}: set jax_enable_x64, or "
            "convert it first"
        )
    return converted


def to_numpy(caller: str, x: Array) -> np.ndarray[Any, Any]:
    """Returns a contiguous, writable copy; raises ValueError if the values are not known."""
    if isinstance(x, jax.core.Tracer):
        raise ValueError(
            f"{caller}: params must have known values, got traced arrays; call {caller} outside of jax.jit"
        )
    return np.array(x, order="C")


def keys_of(tree: Any) -> set[str]:
    """Returns the keys of a mapping, and none of anything else."""
    return set(tree) if isinstance(tree, Mapping) else set()


def describe(tree: Any) -> str:
    """Returns a description for messages: the keys of a mapping, and the type or the shape of anything else."""
    if not isinstance(tree, Mapping):
        named = describe_value(tree)
        return f"a {named}" if named == type(tree).__name__ else named  # a type has an article, a shape has none
    names = [str(name) for name in tree]
    if not names:
        return "nothing"
    return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "")


def remedy_for(caller: str, x: Any, otherwise: str = "") -> str:
    """Returns the end of a message: "; use ..." with the function that converts `x`.

    If no function does, or if that is `caller` itself, returns `otherwise`.

    Args:
      caller: the name of the public function.
      x: what was given to it: a module, parameters of jaxrnn, or weights in a mapping.
      otherwise: what to pass instead, after a semicolon.
    """
    if isinstance(x, type):
        return "; pass an instance"
    if hasattr(x, "_fields"):
        return "; parameters of jaxrnn are converted already"
    package = package_of(x)
    if package is None and isinstance(x, Mapping):
        if any("weight_ih" in str(name) for name in x):
            package = "torch"
        elif "params" in x or any(isinstance(one, Mapping) and "kernel" in one for one in x.values()):
            package = "flax.nnx" if "dense_i" in x or "if_" in x else "flax.linen"  # names of NNX alone
    converter = None if package is None else CONVERTERS[package]
    if converter in (None, caller):
        return otherwise
    parameters = " with the parameters of its cell" if converter == "from_linen" and not isinstance(x, Mapping) else ""
    return f"; use {converter}{parameters}"


def alternatives(names: Sequence[str]) -> str:
    """Returns `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
