"""MGU in PyTorch operations. `torch_bridge.kernels.cells.mgu` explains its local gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from torch_bridge.steps.cell import Tensors

AUTOCASTS_STATES_ON_CPU = False


def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
    assert last is not None
    (h,), (x_n, h_n) = states, last
    f = torch.sigmoid(gates)
    n = torch.tanh(torch.addcmul(x_n, f, h_n))
    return (torch.addcmul(n, f, h - n),), (f, n, h_n, h)


def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
    f, n, h_n, h = activations
    f_n = (1 - f) * (1 - n * n)
    return ((h - n + f_n * h_n) * f * (1 - f), f_n, f_n * f), (f,)


def grad_step(dstates: Tensors, local_grads: Tensor, factors: Tensors) -> tuple[Tensor, Tensors]:
    (dh,) = dstates
    return local_grads * dh.unsqueeze(-2), (dh * factors[0],)


def single_step(
    x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> Tensors:
    x_f, x_n = linear(x, w_ih, b_ih).chunk(2, -1)
    h_f, h_n = linear(states[0], w_hh, b_hh).chunk(2, -1)
    return step(x_f + h_f, (x_n, h_n), states)[0]
