"""The cells in JAX: a file for each cell, with its weights and its arithmetic, and the table of all cells."""

from jaxrnn.cells.base import Cell
from jaxrnn.cells.gru import GRU, GRUParams
from jaxrnn.cells.lstm import LSTM, LSTMParams
from jaxrnn.cells.mgu import MGU, MGUParams

CELLS = {cell.name: cell for cell in (GRU, LSTM, MGU)}

__all__ = ["CELLS", "GRU", "LSTM", "MGU", "Cell", "GRUParams", "LSTMParams", "MGUParams"]
