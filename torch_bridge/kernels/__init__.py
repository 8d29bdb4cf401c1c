"""The table of cells' kernels. Their tilings are data in `torch_bridge.config`."""

import importlib
from dataclasses import dataclass
from typing import Any

from torch_bridge.kernels.gru import gru_bwd_kernel, gru_fwd_kernel
from torch_bridge.kernels.lstm import lstm_bwd_kernel, lstm_fwd_kernel


@dataclass(frozen=True)
class CellKernels:
    """Kernels of one cell.

    Attributes:
      fwd: forward.
      bwd: backward.
    """

    fwd: Any
    bwd: Any


CELLS = {
    "gru": CellKernels(fwd=gru_fwd_kernel, bwd=gru_bwd_kernel),
    "lstm": CellKernels(fwd=lstm_fwd_kernel, bwd=lstm_bwd_kernel),
}


def kernel(cell: str, direction: str, variant: str) -> Any:
    """The kernel of a cell and direction: in Gluon, `fwd_kernel` or `bwd_kernel` of the module `{cell}_{variant}`."""
    if variant == "plain":
        return getattr(CELLS[cell], direction)
    return getattr(importlib.import_module(f"torch_bridge.kernels.{cell}_{variant}"), f"{direction}_kernel")
