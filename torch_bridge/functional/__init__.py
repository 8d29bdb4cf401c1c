"""Functions of weights in the layout of `torch.nn`: recurrent layers with episode resets, and norms.

They convert their arguments to the canonical form of `torch_bridge.rnn_ops` and `norm_ops`, without copies, and call
the operators there.
"""

import torch_bridge._require_torch  # noqa: F401
from torch_bridge.functional.call import Direction, DirectionResult, Implementation
from torch_bridge.functional.gru import gru
from torch_bridge.functional.layer import run_layer
from torch_bridge.functional.lstm import lstm
from torch_bridge.functional.mgu import mgu
from torch_bridge.functional.norm_gru import norm_gru
from torch_bridge.functional.norms import layer_norm, rms_norm
from torch_bridge.functional.rnn import rnn

__all__ = [
    "Direction",
    "DirectionResult",
    "Implementation",
    "gru",
    "layer_norm",
    "lstm",
    "mgu",
    "norm_gru",
    "rms_norm",
    "rnn",
    "run_layer",
]
