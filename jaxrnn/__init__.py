"""Exact GRU and LSTM for recurrent reinforcement learning in JAX: one launch runs the whole time loop and its resets.

`rms_norm` and `layer_norm` are norms for the layers around a recurrence.
"""

from jaxrnn.cells import GRUParams, LSTMParams, MGUParams
from jaxrnn.functions.gru import gru
from jaxrnn.functions.lstm import lstm
from jaxrnn.functions.mgu import mgu
from jaxrnn.norms import layer_norm, rms_norm

__version__ = "0.1.0"

__all__ = ["GRUParams", "LSTMParams", "MGUParams", "gru", "layer_norm", "lstm", "mgu", "rms_norm"]
