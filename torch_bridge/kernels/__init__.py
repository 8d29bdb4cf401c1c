"""The cell table: what a cell needs to be launched. Its tilings are data in `torch_bridge.config`."""

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
      hopper: the module that has them in Gluon as `fwd_kernel` and `bwd_kernel`, for one program that holds all units;
        where programs share them, that name and `_split`. Or None.
    """

    fwd: Any
    bwd: Any
    hopper: str | None = None

    def kernel(self, direction: str, hopper: bool, split: bool) -> Any:
        """The kernel of a direction."""
        if not hopper:
            return getattr(self, direction)
        module = importlib.import_module(f"torch_bridge.kernels.{self.hopper}{'_split' if split else ''}")
        return getattr(module, f"{direction}_kernel")


CELLS = {
    "gru": CellKernels(fwd=gru_fwd_kernel, bwd=gru_bwd_kernel, hopper="gru_sm90"),
    "lstm": CellKernels(fwd=lstm_fwd_kernel, bwd=lstm_bwd_kernel, hopper="lstm_sm90"),
}
