"""Exact GRU and LSTM for recurrent reinforcement learning in JAX: one launch runs the whole time loop and its resets.

`rms_norm` and `layer_norm` are norms for the layers around a recurrence.
"""

from jaxrnn.norms import layer_norm, rms_norm
from jaxrnn.recurrent import gru, lstm
from jaxrnn.reference import GRUParams, LSTMParams

__version__ = "0.1.0"

__all__ = ["GRUParams", "LSTMParams", "gru", "layer_norm", "lstm", "rms_norm"]
