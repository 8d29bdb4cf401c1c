"""The list of the cells that can be fused. Each cell has a file; the other rooms find the cells in this list."""

from jaxrnn.nnx.cells import gru, lstm, norm_gru, simple

ENTRIES = (gru.ENTRY, lstm.ENTRY, simple.ENTRY, norm_gru.ENTRY)

# By class, of Flax and of this package, the entry of its cell.
ENTRY_OF = {cell: entry for entry in ENTRIES for cell in entry.layers}

# The classes of Flax that have a fused replacement of the same name.
REPLACED = [cell for entry in ENTRIES for cell in entry.replaced]
