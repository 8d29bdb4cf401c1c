"""`GRU`, `LSTM` and `RNN` with episode resets, `RMSNorm` and `LayerNorm`: replacements for the modules of `torch.nn`.

Constructors, parameters, initial values, state dicts and outputs are those of `torch.nn`; so are the errors of the
recurrent modules. In addition, `forward` takes `resets` and `reset_state`, or a `residual`. `MGU` and `NormGRU` are
modules in the form of `GRU`; `torch.nn` has none. `run_trajectories` takes the inputs of TorchRL's recurrent modules.
"""

import torch_bridge._require_torch  # noqa: F401
from torch_bridge.nn.layers import GRU, LSTM, MGU, RNN, NormGRU
from torch_bridge.nn.norms import LayerNorm, RMSNorm
from torch_bridge.nn.trajectories import run_trajectories

__all__ = ["GRU", "LSTM", "MGU", "RNN", "LayerNorm", "NormGRU", "RMSNorm", "run_trajectories"]
