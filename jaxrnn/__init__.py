"""Exact GRU and LSTM for recurrent reinforcement learning in JAX: one launch runs the whole time loop and its resets.

`mgu` and `simple_rnn` run smaller cells in the same way. `rms_norm` and `layer_norm` are norms for the layers around a
recurrence.
"""

from jaxrnn.cells import GRUParams, LSTMParams, MGUParams, NormGRUParams, SimpleParams
from jaxrnn.functions.gru import gru
from jaxrnn.functions.lstm import lstm
from jaxrnn.functions.mgu import mgu
from jaxrnn.functions.norm_gru import norm_gru
from jaxrnn.functions.simple_rnn import simple_rnn
from jaxrnn.norms import layer_norm, rms_norm

__version__ = "0.1.0"

__all__ = [
    "GRUParams", "LSTMParams", "MGUParams", "NormGRUParams", "SimpleParams", "gru", "layer_norm", "lstm", "mgu",
    "norm_gru", "rms_norm", "simple_rnn",
]  # fmt: skip
