"""LSTM in PyTorch operations. `torch_bridge.kernels.cells.lstm` explains its local gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bridge.steps.cell import Tensors

AUTOCASTS_STATES_ON_CPU = True


def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
    before = states[1]
    a_i, a_f, a_g, a_o = gates.chunk(4, -1)
    i, f, g, o = torch.sigmoid(a_i), torch.sigmoid(a_f), torch.tanh(a_g), torch.sigmoid(a_o)
    c = torch.addcmul(f * before, i, g)
    tanh_c = torch.tanh(c)
    return (o * tanh_c, c), (i, f, g, o, tanh_c, before)


def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
    i, f, g, o, tanh_c, before = activations
    local_grads = g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)
    return local_grads, (o * (1 - tanh_c * tanh_c), f)


def grad_step(dstates: Tensors, local_grads: Tensor, factors: Tensors) -> tuple[Tensor, Tensors]:
    dh, dc = dstates
    return local_grads * torch.stack((dc, dc, dc, dh), -2), (dc * factors[1],)


def single_step(
    x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> Tensors:
    return torch.lstm_cell(x, states, w_ih, w_hh, b_ih, b_hh)
