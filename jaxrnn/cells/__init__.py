"""The cells in JAX: a file for each cell, with its weights and its arithmetic, and the table of all cells."""

from jaxrnn.cells.base import Cell
from jaxrnn.cells.gru import GRU, GRUParams
from jaxrnn.cells.lstm import LSTM, LSTMParams
from jaxrnn.cells.mgu import MGU, MGUParams
from jaxrnn.cells.simple import SIMPLE_RELU, SIMPLE_TANH, SimpleParams

Params = GRUParams | LSTMParams | MGUParams | SimpleParams
CELLS = {cell.name: cell for cell in (GRU, LSTM, MGU, SIMPLE_TANH, SIMPLE_RELU)}

__all__ = [
    "CELLS", "GRU", "LSTM", "MGU", "SIMPLE_RELU", "SIMPLE_TANH", "Cell", "GRUParams", "LSTMParams", "MGUParams",
    "Params", "SimpleParams",
]  # fmt: skip
