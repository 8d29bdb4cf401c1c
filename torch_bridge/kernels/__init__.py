"""The kernels. Of a recurrence, `loops` has the time loops by family, and `cells` the arithmetic of each cell."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from torch_bridge.kernels.cells import gru, lstm, mgu, norm_gru, simple_relu, simple_tanh

# The arithmetic of each cell in `torch_bridge.cells.CELLS`.
CELLS: dict[str, ModuleType] = {
    "gru": gru, "lstm": lstm, "mgu": mgu, "simple_tanh": simple_tanh, "simple_relu": simple_relu,
    "rms_norm_gru": norm_gru, "layer_norm_gru": norm_gru,
}  # fmt: skip


def loop_kernel(loop: str, direction: str) -> Any:
    """Returns the kernel of a family of time loops for a direction, "fwd" or "bwd"."""
    module = importlib.import_module(f"{__name__}.loops.{loop}")  # not at the top: a process runs few families
    return module.forward_kernel if direction == "fwd" else module.backward_kernel
