"""The table of kernels by cell. `torch_bridge.tiling` contains their tilings."""

import importlib
from dataclasses import dataclass
from typing import Any

from torch_bridge.kernels.gru import gru_bwd_kernel, gru_fwd_kernel
from torch_bridge.kernels.lstm import lstm_bwd_kernel, lstm_fwd_kernel


@dataclass(frozen=True)
class CellKernels:
    """The plain kernels of one cell.

    Attributes:
      fwd: the forward kernel.
      bwd: the backward kernel.
    """

    fwd: Any
    bwd: Any


CELLS = {
    "gru": CellKernels(fwd=gru_fwd_kernel, bwd=gru_bwd_kernel),
    "lstm": CellKernels(fwd=lstm_fwd_kernel, bwd=lstm_bwd_kernel),
}


def kernel(cell: str, direction: str, variant: str) -> Any:
    """Returns a cell's kernel for a direction: if in Gluon, `fwd_kernel` or `bwd_kernel` of `{cell}_{variant}`."""
    if variant == "plain":
        return getattr(CELLS[cell], direction)
    return getattr(importlib.import_module(f"torch_bridge.kernels.{cell}_{variant}"), f"{direction}_kernel")
