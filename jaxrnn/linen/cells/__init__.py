"""The list of the cells that can be fused. Each cell has a file; the other rooms find the cells in this list."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn

from jaxrnn import modules
from jaxrnn.linen.cells import gru, lstm, mgu, norm_gru, simple
from jaxrnn.linen.fused_cell import CellEntry

ENTRIES = (gru.ENTRY, lstm.ENTRY, mgu.ENTRY, simple.ENTRY, norm_gru.ENTRY)

# By class of Flax, the class that replaces it.
REPLACEMENTS = {theirs: ours for entry in ENTRIES for theirs, ours in entry.replacements.items()}

# The classes that `ScannedRNN.cell_type` can name.
CELL_TYPES = {name: cell for entry in ENTRIES for name, cell in entry.cell_types.items()}

_ENTRY_OF: dict[type[nn.RNNCellBase], CellEntry] = {
    cell: entry for entry in ENTRIES for cell in (*entry.replacements, *entry.cell_types.values())
}


def starts_from_zeros(cell: nn.RNNCellBase) -> bool:
    """Whether `cell.initialize_carry` is known to return zeros."""
    return modules.starts_from_zeros(cell, [nn.initializers.zeros], _ENTRY_OF)


def reason_to_scan(cell: nn.RNNCellBase, arrays: Any = None) -> str | None:
    """Returns why `cell` has to run under `nn.scan` on carry and inputs `arrays`, or None if it can be fused."""
    if (entry := _ENTRY_OF.get(type(cell))) is None:
        return modules.reason_to_scan_unlisted(cell, REPLACEMENTS)
    return modules.reason_to_scan_options(cell, REPLACEMENTS, _defaults, arrays) or entry.reason_to_scan(cell)


def _defaults(cls: Any) -> dict[str, Any]:
    """Returns the options of a class, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(cls)}
