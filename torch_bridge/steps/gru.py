"""GRU in PyTorch operations. `torch_bridge.kernels.cells.gru` explains its local gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bridge.steps.cell import Tensors

AUTOCASTS_STATES_ON_CPU = False


def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
    assert last is not None
    (h,), (x_n, h_n) = states, last
    rz = torch.sigmoid(gates)
    r, z = rz.chunk(2, -1)
    n = torch.tanh(torch.addcmul(x_n, r, h_n))
    return (torch.addcmul(n, z, h - n),), (rz, n, h_n, h)


def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
    rz, n, h_n, h = activations
    r, z = rz.chunk(2, -1)
    f_n = (1 - z) * (1 - n * n)
    return (f_n * h_n * r * (1 - r), (h - n) * z * (1 - z), f_n, f_n * r), (z,)


def grad_step(dstates: Tensors, local_grads: Tensor, factors: Tensors) -> tuple[Tensor, Tensors]:
    (dh,) = dstates
    return local_grads * dh.unsqueeze(-2), (dh * factors[0],)


def single_step(
    x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> Tensors:
    return (torch.gru_cell(x, states[0], w_ih, w_hh, b_ih, b_hh),)
