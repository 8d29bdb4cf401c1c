"""The reasons why a Flax cell cannot be fused and has to run under Flax's scan, as parts of error messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
