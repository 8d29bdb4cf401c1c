"""The pointwise part of each cell in PyTorch operations: what `torch_bridge.loops` computes between its products.

`cell.Cell` is the contract, that of `torch_bridge.kernels.cells` on tensors. Gates and local gradients come in one
tensor each, so that a cell can apply one operation to several of them: for small batches, the time of a step is the
host time of its operations. Nothing is written in place, so autograd can differentiate `step` to any order.
"""

from __future__ import annotations

from torch_bridge.steps import gru, lstm, mgu, norm_gru, simple_relu, simple_tanh
from torch_bridge.steps.cell import Cell, SingleStep

# The arithmetic of cells in `torch_bridge.cells.CELLS`.
CELLS: dict[str, Cell] = {
    "gru": gru, "lstm": lstm, "mgu": mgu, "simple_tanh": simple_tanh, "simple_relu": simple_relu,
    "rms_norm_gru": norm_gru, "layer_norm_gru": norm_gru,
}  # fmt: skip
# What computes one step of a cell without a launch, for the cells that have it.
SINGLE_STEPS: dict[str, SingleStep] = {
    "gru": gru.single_step, "lstm": lstm.single_step, "mgu": mgu.single_step, "simple_tanh": simple_tanh.single_step,
    "simple_relu": simple_relu.single_step,
}  # fmt: skip
