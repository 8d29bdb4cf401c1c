"""The reasons why a Flax cell cannot be fused and has to run under Flax's scan, as parts of error messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxrnn.modules.activations import is_sigmoid, is_tanh


def reason_to_scan_unlisted(cell: Any, replaced: Iterable[type]) -> str:
    """Returns why a cell of another class than the fused ones cannot be fused.

    Args:
      cell: the cell.
      replaced: the classes of Flax that have a fused replacement of the same name.
    """
    *names, last = (one.__name__ for one in replaced)
    return f"a {type(cell).__name__} (only {', '.join(names)} and {last} of jaxrnn or Flax can be fused)"


def reason_to_scan_gates(cell: Any) -> str | None:
    """Returns why a gated Flax cell cannot be fused, or None if its activations are sigmoid and tanh."""
    if is_sigmoid(cell.gate_fn) and is_tanh(cell.activation_fn):
        return None
    return "a cell whose gate_fn is not sigmoid or whose activation_fn is not tanh"


def reason_for_complex(module: Any, arrays: Any) -> str | None:
    """Returns the reason if a module of Flax computes with complex numbers, which Flax's own can, or None."""
    dtypes = getattr(module, "dtype", None), getattr(module, "param_dtype", None)
    return "complex numbers" if has_complex(arrays) or any(map(_is_complex, dtypes)) else None


def has_complex(arrays: Any) -> bool:
    """Whether there is a complex array in a tree."""
    return any(_is_complex(getattr(x, "dtype", None)) for x in jax.tree.leaves(arrays))


def _is_complex(dtype: Any) -> bool:
    try:
        return dtype is not None and bool(jnp.issubdtype(dtype, jnp.complexfloating))
    except TypeError:  # no dtype of JAX: other checks say so
        return False


# The options of Flax's cells that `jaxrnn` computes or checks, or that do not change what a cell computes.
_OPTIONS = frozenset(
    (
        "activation_bias_init", "activation_fn", "bias_init", "carry_init", "dtype", "features", "forget_bias_init",
        "gate_fn", "hidden_features", "in_features", "kernel_init", "name", "param_dtype", "parent", "promote_dtype",
        "recurrent_kernel_init", "reset_gate", "residual",
    )
)  # fmt: skip


def reason_to_scan_options(
    cell: Any, replaced: Iterable[type], defaults_of: Callable[[Any], Mapping[str, Any]], arrays: Any
) -> str | None:
    """Returns why a cell cannot be fused because of its options, or of complex numbers, or None.

    Args:
      cell: the cell.
      replaced: the classes of Flax that have a fused replacement; those of them that the cell is of are asked.
      defaults_of: returns the options of a class, with their defaults.
      arrays: the carry and the inputs.
    """
    for of_flax in replaced:
        if isinstance(cell, of_flax):
            reason = _unknown_option(cell, defaults_of(of_flax)) or reason_for_complex(cell, arrays)
            if reason is not None:
                return reason
    return None


def _unknown_option(cell: Any, defaults: Mapping[str, Any]) -> str | None:
    """Returns the reason if a Flax cell has an option that `jaxrnn` does not know, or None.

    `defaults` are the options of the class with their defaults. Every value but the default may change the result.
    """
    unknown = (name for name in defaults if name not in _OPTIONS and hasattr(cell, name))
    changed = next((name for name in unknown if getattr(cell, name) is not defaults[name]), None)
    return None if changed is None else f"a cell with the option {changed}, which jaxrnn does not know"
