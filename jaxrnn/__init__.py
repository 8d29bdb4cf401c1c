"""Exact GRU and LSTM for recurrent reinforcement learning in JAX: the whole time loop in one launch, resets inside.

`rms_norm` and `layer_norm` normalise what stands around them.
"""

from jaxrnn.norms import layer_norm, rms_norm
from jaxrnn.recurrent import gru, lstm
from jaxrnn.reference import GRUParams, LSTMParams

__version__ = "0.1.0"

__all__ = ["GRUParams", "LSTMParams", "gru", "layer_norm", "lstm", "rms_norm"]
