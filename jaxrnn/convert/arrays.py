"""Arrays of any framework as JAX arrays, and descriptions of mappings for error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax import Array


def read_arrays(source: str, given: Mapping[str, Any], names: Any, whole: Any = None) -> dict[str, Array]:
    """Returns the arrays called `names`; raises ValueError if one is missing."""
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{source}: no {', '.join(missing)} in {describe(given if whole is None else whole)}")
    return {name: read_array(source, name, given[name]) for name in names}


def read_array(source: str, name: str, x: Any) -> Array:
    """Returns `x` as a JAX array of the same dtype that shares no memory with a writable array."""
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):  # x is a variable of NNX, or of Keras on JAX
        x = x.__jax_array__()
    elif hasattr(x, "detach"):  # x is a PyTorch tensor; NumPy alone has no bfloat16, and float32 represents it exactly
        x = x.detach().cpu()
        x = x.float().numpy().astype(jnp.bfloat16) if str(x.dtype) == "torch.bfloat16" else x.numpy()
    elif hasattr(x, "value") and not callable(x.value):  # x is a box of linen or a variable of Keras
        return read_array(source, name, x.value)
    array = x if isinstance(x, jax.Array) else np.array(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{source}: {name} must be floating point, got {array.dtype} ({type(x).__name__})")
    if isinstance(array, jax.Array):
        return array
    converted = jnp.asarray(array)
    if converted.dtype != array.dtype:
        raise ValueError(
            f"{source}: {name} is {array.dtype}, which JAX would convert to {converted.dtype}: set jax_enable_x64, or "
            "convert it first"
        )
    return converted


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Returns a contiguous, writable copy."""
    return np.array(x, order="C")


def keys_of(tree: Any) -> set[str]:
    """Returns the keys of a mapping, and none of anything else."""
    return set(tree) if isinstance(tree, Mapping) else set()


def describe(tree: Any) -> str:
    """Returns a description for messages: the keys of a mapping, or the type of anything else."""
    if not isinstance(tree, Mapping):
        return f"a {type(tree).__name__}"
    names = [str(name) for name in tree]
    return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "") if names else "nothing"


def alternatives(names: Sequence[str]) -> str:
    """Returns `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
