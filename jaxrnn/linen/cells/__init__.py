"""The list of the cells that can be fused. Each cell has a file; the other rooms find the cells in this list."""

from __future__ import annotations

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


def reason_to_scan(cell: nn.RNNCellBase) -> str | None:
    """Returns why `cell` has to run under `nn.scan`, or None if it can be fused."""
    if (entry := _ENTRY_OF.get(type(cell))) is not None:
        return entry.reason_to_scan(cell)
    return modules.reason_to_scan_unlisted(cell, REPLACEMENTS)
