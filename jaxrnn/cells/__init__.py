"""The cells in JAX: a file for each cell, with its weights and its arithmetic, and the table of all cells."""

from jax.export import register_namedtuple_serialization

from jaxrnn.cells.base import Cell, Layout
from jaxrnn.cells.gru import GRU, GRU_LAYOUT, GRUParams
from jaxrnn.cells.lstm import LSTM, LSTM_LAYOUT, LSTMParams
from jaxrnn.cells.mgu import MGU, MGU_LAYOUT, MGUParams
from jaxrnn.cells.norm_gru import LAYER_NORM_GRU, RMS_NORM_GRU, NormGRUParams, norm_gru_cell
from jaxrnn.cells.simple import SIMPLE_LAYOUT, SIMPLE_RELU, SIMPLE_TANH, SimpleParams

Params = GRUParams | LSTMParams | MGUParams | SimpleParams | NormGRUParams
CELLS = {cell.name: cell for cell in (GRU, LSTM, MGU, SIMPLE_TANH, SIMPLE_RELU, RMS_NORM_GRU, LAYER_NORM_GRU)}
# The layouts of the cells whose weights can be converted.
LAYOUTS = (GRU_LAYOUT, LSTM_LAYOUT, MGU_LAYOUT, SIMPLE_LAYOUT)

# An exported program names the types of its arguments.
for _params in {cell.params for cell in CELLS.values()}:
    register_namedtuple_serialization(_params, serialized_name=f"jaxrnn.{_params.__name__}")

__all__ = [
    "CELLS", "GRU", "LAYER_NORM_GRU", "LAYOUTS", "LSTM", "MGU", "RMS_NORM_GRU", "SIMPLE_RELU",
    "SIMPLE_TANH", "Cell", "GRUParams", "LSTMParams", "Layout", "MGUParams", "NormGRUParams", "Params", "SimpleParams",
    "norm_gru_cell",
]  # fmt: skip
