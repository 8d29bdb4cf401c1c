"""Simple cell with a ReLU in PyTorch operations. `kernels.cells.simple_relu` explains its local gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bridge.steps.cell import Tensors

AUTOCASTS_STATES_ON_CPU = True


def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
    h = torch.relu(gates)
    return (h,), (h,)


def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
    (h,) = activations
    return ((h > 0).to(h.dtype),), ()


def grad_step(dstates: Tensors, local_grads: Tensor, factors: Tensors) -> tuple[Tensor, Tensors]:
    return local_grads * dstates[0].unsqueeze(-2), ()


def single_step(
    x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> Tensors:
    return (torch.rnn_relu_cell(x, states[0], w_ih, w_hh, b_ih, b_hh),)
