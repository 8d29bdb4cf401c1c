"""GRU whose gates see a norm, in PyTorch operations. `kernels.cells.norm_gru` explains its local gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bridge.steps.cell import Tensors

AUTOCASTS_STATES_ON_CPU = False


def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
    (h,), (a_r, a_n, a_u) = states, gates.chunk(3, -1)
    r, u = torch.sigmoid(a_r), torch.sigmoid(a_u)
    n = torch.tanh(r * a_n)
    return (torch.addcmul(h, u, n - h),), (a_n, r, n, u, h)


def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
    a_n, r, n, u, h = activations
    f = u * (1 - n * n)
    return (f * a_n * r * (1 - r), f * r, (n - h) * u * (1 - u)), (1 - u,)


def grad_step(dstates: Tensors, local_grads: Tensor, factors: Tensors) -> tuple[Tensor, Tensors]:
    (dh,) = dstates
    return local_grads * dh.unsqueeze(-2), (dh * factors[0],)
