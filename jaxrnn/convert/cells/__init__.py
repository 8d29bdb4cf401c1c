"""The table of cells whose weights can be converted."""

from __future__ import annotations

from typing import Any

from jaxrnn.convert.cells.gru import GRU
from jaxrnn.convert.cells.lstm import LSTM
from jaxrnn.convert.cells.mgu import MGU
from jaxrnn.convert.cells.simple import SIMPLE
from jaxrnn.convert.layout import Layout

LAYOUTS = (GRU, LSTM, MGU, SIMPLE)


def layout_of(params: Any) -> Layout | None:
    """Returns the layout of parameters, or None if they belong to no cell."""
    return next((layout for layout in LAYOUTS if isinstance(params, layout.cell.params)), None)


def cells_of(framework: str) -> tuple[Layout, ...]:
    """Returns the layouts of the cells whose weights a framework can have."""
    return tuple(layout for layout in LAYOUTS if framework not in layout.missing)
