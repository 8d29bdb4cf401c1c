"""The cell table: what a cell needs to be launched. Its tilings are data in `torch_bridge.config`."""

from dataclasses import dataclass
from typing import Any

from torch_bridge.kernels.gru import gru_bwd_kernel, gru_fwd_kernel
from torch_bridge.kernels.lstm import lstm_bwd_kernel, lstm_fwd_kernel


@dataclass(frozen=True)
class CellKernels:
    """Kernels of one cell."""

    fwd: Any
    bwd: Any


CELLS = {
    "gru": CellKernels(fwd=gru_fwd_kernel, bwd=gru_bwd_kernel),
    "lstm": CellKernels(fwd=lstm_fwd_kernel, bwd=lstm_bwd_kernel),
}
