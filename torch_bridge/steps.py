"""The pointwise part of each cell in PyTorch operations: what `torch_bridge.torch_loop` computes between its products.

`Cell` is the contract, that of `torch_bridge.kernels.cells` on tensors, where each cell's file explains its local
gradients. Gates and local gradients come in one tensor each, so that a cell can apply one operation to several of them:
for small batches, the time of a step is the host time of its operations. Nothing is written in place, so autograd can
differentiate `step` to any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from torch_bridge import cells

Tensors = tuple[Tensor, ...]


class Cell:
    """The functions of a cell. N is the number of sequences of each of the S models."""

    # Whether autocast on the CPU converts states in `torch.nn`. On a GPU it converts those of every cell.
    AUTOCASTS_STATES_ON_CPU = False

    @staticmethod
    def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the new states, and the activations that `residuals` needs.

        Args:
          gates: the gates before their activations, `[S, N, gates * H]`: the sums of input projection and hidden
            product. If the last gate is separate (`torch_bridge.cells.CellSpec.last_gate_separate`), they are those of
            the other gates.
          last: the input projection and the hidden product of the last gate, each `[S, N, H]`, if that gate is
            separate, else None.
          states: the states that the step starts from, each `[S, N, H]`.
        """
        raise NotImplementedError

    @staticmethod
    def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Returns local gradients and factors, like `residuals` in `torch_bridge.kernels.cells`.

        The activations are those of all steps, stacked.
        """
        raise NotImplementedError

    @staticmethod
    def grad_step(dstates: Tensors, local_grads: Tensor, factors: Tensors) -> tuple[Tensor, Tensors]:
        """Returns the gradients of the gates, in the form of `local_grads`, and what goes straight to the last state.

        The second result is a tuple of one or no element. This one is that of all cells with one state.

        Args:
          dstates: the gradients of the states after the step, each `[S, N, H]`.
          local_grads: `[S, N, count, H]`, in the order of the gates' hidden products. If the last gate is separate, the
            local gradient of its input projection comes before all of these.
          factors: the residuals after `local_grads`, except for "norm_state", each `[S, N, H]`.
        """
        (dh,) = dstates
        return local_grads * dh.unsqueeze(-2), tuple([dh * carried for carried in factors])

    @staticmethod
    def single_step(
        x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
    ) -> Tensors:
        """Returns the new states, given the inputs of one step, `[N, D]`; a cell with a norm has no such function.

        It runs PyTorch's own cell, or PyTorch operations if there is none, and no operator of this package.
        """
        raise NotImplementedError


class GRU(Cell):
    @staticmethod
    def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
        assert last is not None
        (h,), (x_n, h_n) = states, last
        rz = torch.sigmoid(gates)
        r, z = rz.chunk(2, -1)
        n = torch.tanh(torch.addcmul(x_n, r, h_n))
        return (torch.addcmul(n, z, h - n),), (rz, n, h_n, h)

    @staticmethod
    def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        rz, n, h_n, h = activations
        r, z = rz.chunk(2, -1)
        f_n = (1 - z) * (1 - n * n)
        return (f_n * h_n * r * (1 - r), (h - n) * z * (1 - z), f_n, f_n * r), (z,)

    @staticmethod
    def single_step(
        x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
    ) -> Tensors:
        return (torch.gru_cell(x, states[0], w_ih, w_hh, b_ih, b_hh),)


class LSTM(Cell):
    AUTOCASTS_STATES_ON_CPU = True

    @staticmethod
    def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
        before = states[1]
        a_i, a_f, a_g, a_o = gates.chunk(4, -1)
        i, f, g, o = torch.sigmoid(a_i), torch.sigmoid(a_f), torch.tanh(a_g), torch.sigmoid(a_o)
        c = torch.addcmul(f * before, i, g)
        tanh_c = torch.tanh(c)
        return (o * tanh_c, c), (i, f, g, o, tanh_c, before)

    @staticmethod
    def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        i, f, g, o, tanh_c, before = activations
        local_grads = g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)
        return local_grads, (o * (1 - tanh_c * tanh_c), f)

    @staticmethod
    def grad_step(dstates: Tensors, local_grads: Tensor, factors: Tensors) -> tuple[Tensor, Tensors]:
        dh, dc = dstates
        return local_grads * torch.stack((dc, dc, dc, dh), -2), (dc * factors[1],)

    @staticmethod
    def single_step(
        x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
    ) -> Tensors:
        return torch.lstm_cell(x, states, w_ih, w_hh, b_ih, b_hh)


class MGU(Cell):
    @staticmethod
    def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
        assert last is not None
        (h,), (x_n, h_n) = states, last
        f = torch.sigmoid(gates)
        n = torch.tanh(torch.addcmul(x_n, f, h_n))
        return (torch.addcmul(n, f, h - n),), (f, n, h_n, h)

    @staticmethod
    def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        f, n, h_n, h = activations
        f_n = (1 - f) * (1 - n * n)
        return ((h - n + f_n * h_n) * f * (1 - f), f_n, f_n * f), (f,)

    @staticmethod
    def single_step(
        x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
    ) -> Tensors:
        x_f, x_n = linear(x, w_ih, b_ih).chunk(2, -1)
        h_f, h_n = linear(states[0], w_hh, b_hh).chunk(2, -1)
        return MGU.step(x_f + h_f, (x_n, h_n), states)[0]


class SimpleTanh(Cell):
    AUTOCASTS_STATES_ON_CPU = True

    @staticmethod
    def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
        h = torch.tanh(gates)
        return (h,), (h,)

    @staticmethod
    def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        (h,) = activations
        return (1 - h * h,), ()

    @staticmethod
    def single_step(
        x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
    ) -> Tensors:
        return (torch.rnn_tanh_cell(x, states[0], w_ih, w_hh, b_ih, b_hh),)


class SimpleReLU(Cell):
    AUTOCASTS_STATES_ON_CPU = True

    @staticmethod
    def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
        h = torch.relu(gates)
        return (h,), (h,)

    @staticmethod
    def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        (h,) = activations
        return ((h > 0).to(h.dtype),), ()

    @staticmethod
    def single_step(
        x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
    ) -> Tensors:
        return (torch.rnn_relu_cell(x, states[0], w_ih, w_hh, b_ih, b_hh),)


class NormGRU(Cell):
    @staticmethod
    def step(gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
        (h,), (a_r, a_n, a_u) = states, gates.chunk(3, -1)
        r, u = torch.sigmoid(a_r), torch.sigmoid(a_u)
        n = torch.tanh(r * a_n)
        return (torch.addcmul(h, u, n - h),), (a_n, r, n, u, h)

    @staticmethod
    def residuals(activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        a_n, r, n, u, h = activations
        f = u * (1 - n * n)
        return (f * a_n * r * (1 - r), f * r, (n - h) * u * (1 - u)), (1 - u,)


# The arithmetic of each cell in `torch_bridge.cells.CELLS`.
CELLS: dict[str, type[Cell]] = {
    "gru": GRU, "lstm": LSTM, "mgu": MGU, "simple_tanh": SimpleTanh, "simple_relu": SimpleReLU,
    "rms_norm_gru": NormGRU, "layer_norm_gru": NormGRU,
}  # fmt: skip
# The functions that compute one step without a launch, by the name of the cell; a cell with a norm has none.
SINGLE_STEPS = {name: cell.single_step for name, cell in CELLS.items() if not cells.CELLS[name].norm}
