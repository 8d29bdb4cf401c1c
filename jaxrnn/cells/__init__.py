"""The cells in JAX: a file for each cell, with its weights and its arithmetic, and the table of all cells."""

from jaxrnn.cells.base import Cell
from jaxrnn.cells.gru import GRU, GRUParams
from jaxrnn.cells.lstm import LSTM, LSTMParams
from jaxrnn.cells.mgu import MGU, MGUParams
from jaxrnn.cells.norm_gru import LAYER_NORM_GRU, RMS_NORM_GRU, NormGRUParams, norm_gru_cell
from jaxrnn.cells.simple import SIMPLE_RELU, SIMPLE_TANH, SimpleParams

Params = GRUParams | LSTMParams | MGUParams | SimpleParams | NormGRUParams
CELLS = {cell.name: cell for cell in (GRU, LSTM, MGU, SIMPLE_TANH, SIMPLE_RELU, RMS_NORM_GRU, LAYER_NORM_GRU)}

__all__ = [
    "CELLS", "GRU", "LAYER_NORM_GRU", "LSTM", "MGU", "RMS_NORM_GRU", "SIMPLE_RELU", "SIMPLE_TANH", "Cell", "GRUParams",
    "LSTMParams", "MGUParams", "NormGRUParams", "Params", "SimpleParams", "norm_gru_cell",
]  # fmt: skip
