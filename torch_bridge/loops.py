"""GRU and LSTM time loops in plain PyTorch operations, on any device and dtype, for use where the kernels cannot run.

The arguments are those of the kernels: sequences `[G, T, B, W]`, where each of the G groups holds B sequences, time
first; states `[G, B, H]`; and weights `[S, ...]`, where each of the S models owns G / S consecutive groups. `order` is
the direction in which a model goes through time: "forward", "reverse", or "bidirectional" (models of even index
forward, models of odd index in reverse).

Gates and states are float32, or float64 if the weights are, whatever the dtype of the operands. Nothing is written in
place, so autograd can differentiate the forward loops to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_bridge import op_common


class _TimeSteps:
    """The split of `[G, T, B, ...]` arrays like `sequence` into the steps of a time loop over the S models of `w_hh`.

    A step is `[S, N, ...]`, with the N = G / S * B sequences of each model.
    """

    def __init__(self, sequence: Tensor, w_hh: Tensor, order: str):
        groups, self.steps, self.batch = sequence.shape[:3]
        self.order, self.models, self.per_model = order, w_hh.shape[0], groups // w_hh.shape[0]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Returns the steps in the order in which the loop runs them."""
        x = x.reshape(self.models, self.per_model, self.steps, self.batch, *x.shape[3:])
        if self.batch == 1:
            x = x.squeeze(3).transpose(1, 2)
        else:
            x = x.transpose(1, 2).reshape(self.models, self.steps, -1, *x.shape[4:])
        if self.order == "bidirectional":
            x = self._flip_odd(x)
        steps = x.unbind(1)
        return steps[::-1] if self.order == "reverse" else steps

    def join(self, steps: Sequence[Tensor]) -> Tensor:
        """Returns `[G, T, B, ...]` from the results of the steps, given in the order in which the loop ran them."""
        x = torch.stack(list(reversed(steps) if self.order == "reverse" else steps), 1)
        if self.order == "bidirectional":
            x = self._flip_odd(x)
        x = x.reshape(self.models, self.steps, self.per_model, self.batch, *x.shape[3:]).transpose(1, 2)
        return x.reshape(self.models * self.per_model, self.steps, self.batch, *x.shape[4:])

    def _flip_odd(self, x: Tensor) -> Tensor:
        return torch.stack([one.flip(0) if s % 2 else one for s, one in enumerate(x)])

    def state(self, x: Tensor) -> Tensor:
        """Reshapes `[G, B, H]` to `[S, N, H]`."""
        return x.reshape(self.models, self.per_model * self.batch, x.shape[-1])

    def groups(self, x: Tensor) -> Tensor:
        """Reshapes `[S, N, H]` to `[G, B, H]`."""
        return x.reshape(self.models * self.per_model, self.batch, x.shape[-1])

    def starts(self, resets: Tensor | None) -> Sequence[Tensor | None]:
        """Returns for each step `[S, N, 1]`, true where an episode starts, or None if there are no resets."""
        return [None] * self.steps if resets is None else self.split((resets != 0)[..., None])

    def new_states(self, x: Tensor | None, like: Tensor) -> Sequence[Tensor]:
        """Returns for each step the states that episodes start from."""
        if x is None:
            return [torch.zeros_like(like)] * self.steps
        x = x.to(like.dtype)
        return self.split(x) if x.ndim == 4 else [self.state(x)] * self.steps


def _product(w: Tensor, operand: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns `(x, y) -> x + y @ w`, batched over models, which rounds y to `operand`, the dtype of the weights."""
    return lambda x, y: torch.baddbmm(x, y.to(operand).to(x.dtype), w)


class GRUResults(NamedTuple):
    """The results of the GRU's forward loop. The last two are None if no residuals are saved."""

    hs: Tensor  # [G, T, B, H]
    h_last: Tensor  # [G, B, H]
    local_grads: Tensor | None  # [G, T, B, 4H] dr/dh, dz/dh, dn/dh and dh_n/dh, adjacent for each unit
    carry_gate: Tensor | None  # [G, T, B, H] z


def gru(
    xp: Tensor, w_hh: Tensor, b_hn: Tensor, h0: Tensor, resets: Tensor | None, reset_h: Tensor | None,
    order: str, save: bool,
) -> GRUResults:  # fmt: skip
    """Computes what `torch_bridge.kernels.gru.gru_fwd_kernel` does. Returns states in the computation's dtype."""
    time, dtype = _TimeSteps(xp, w_hh, order), op_common.accumulation_dtype(w_hh.dtype)
    hidden = h0.shape[-1]
    product = _product(w_hh.to(dtype).mT, w_hh.dtype)
    h = time.state(h0).to(dtype)
    bias = torch.nn.functional.pad(b_hn.to(dtype), (2 * hidden, 0))[:, None].expand(-1, h.shape[1], -1)
    hs, before, gates = [], [], []
    for x, start, new in zip(time.split(xp.to(dtype)), time.starts(resets), time.new_states(reset_h, h), strict=True):
        if start is not None:
            h = torch.where(start, new, h)
        x_rz, x_n = x.split((2 * hidden, hidden), -1)
        a_rz, a_n = product(bias, h).split((2 * hidden, hidden), -1)
        rz = torch.sigmoid(x_rz + a_rz)
        r, z = rz.chunk(2, -1)
        n = torch.tanh(torch.addcmul(x_n, r, a_n))
        if save:
            before.append(h)
            gates.append((rz, n, a_n))
        h = torch.addcmul(n, z, h - n)
        hs.append(h)
    local_grads = carry_gate = None
    if save:
        previous = time.join(before)
        rz, n, a_n = (time.join(gate) for gate in zip(*gates, strict=True))
        r, carry_gate = (gate.contiguous() for gate in rz.chunk(2, -1))
        f_n = (1 - carry_gate) * (1 - n * n)
        each = f_n * a_n * r * (1 - r), (previous - n) * carry_gate * (1 - carry_gate), f_n, f_n * r
        local_grads = torch.stack(each, -1).flatten(-2)
    return GRUResults(time.join(hs), time.groups(h), local_grads, carry_gate)


class GRUGradients(NamedTuple):
    """The results of the GRU's backward loop."""

    dxp: Tensor  # [G, T, B, 3H]
    dhn: Tensor  # [G, T, B, H] gradient of W_hn h + b_hn
    dh0: Tensor  # [G, B, H]
    dreset_h: Tensor | None  # [G, T, B, H] gradient of each step's reset state


def gru_backward(
    w_hh: Tensor, local_grads: Tensor, carry_gate: Tensor, resets: Tensor | None, dhs: Tensor, dh_last: Tensor,
    order: str, reset_gradients: bool,
) -> GRUGradients:  # fmt: skip
    """Computes what `torch_bridge.kernels.gru.gru_bwd_kernel` does."""
    time, dtype = _TimeSteps(dhs, w_hh, order), op_common.accumulation_dtype(w_hh.dtype)
    product = _product(w_hh.to(dtype), w_hh.dtype)
    f_r, f_z, f_n, f_hn = local_grads.unflatten(-1, (-1, 4)).to(dtype).unbind(-1)
    sequences = (torch.cat((f_r, f_z, f_hn), -1), carry_gate.to(dtype), dhs.to(dtype))
    steps = [*zip(*map(time.split, sequences), time.starts(resets), strict=True)]
    dh = time.state(dh_last).to(dtype)
    zeros = torch.zeros_like(dh)
    all_dh, recurrent, dreset_h = [], [], []
    for f, z, dy, start in reversed(steps):
        dh = dh + dy
        d = f * dh.repeat(1, 1, 3)
        all_dh.append(dh)
        recurrent.append(d)
        dh = product(dh * z, d)
        if start is not None:
            if reset_gradients:
                dreset_h.append(torch.where(start, dh, zeros))
            dh = torch.where(start, zeros, dh)
    hidden = carry_gate.shape[-1]
    d = time.join(recurrent[::-1])
    dxp = torch.cat((d[..., : 2 * hidden], time.join(all_dh[::-1]) * f_n), -1)
    stepped = time.join(dreset_h[::-1]) if dreset_h else None
    return GRUGradients(dxp, d[..., 2 * hidden :].contiguous(), time.groups(dh), stepped)


class LSTMResults(NamedTuple):
    """The results of the LSTM's forward loop. The last three are None if no residuals are saved."""

    hs: Tensor  # [G, T, B, H]
    cs: Tensor  # [G, T, B, H]
    h_last: Tensor  # [G, B, H]
    c_last: Tensor  # [G, B, H]
    local_grads: Tensor | None  # [G, T, B, 4H] di/dc, df/dc, dg/dc and do/dh, adjacent for each unit
    dc_dh: Tensor | None  # [G, T, B, H] dc/dh
    carry_gate: Tensor | None  # [G, T, B, H] f


def lstm(
    xp: Tensor, w_hh: Tensor, h0: Tensor, c0: Tensor, resets: Tensor | None, reset_h: Tensor | None,
    reset_c: Tensor | None, order: str, save: bool,
) -> LSTMResults:  # fmt: skip
    """Computes what `torch_bridge.kernels.lstm.lstm_fwd_kernel` does. Returns states in the computation's dtype."""
    time, dtype = _TimeSteps(xp, w_hh, order), op_common.accumulation_dtype(w_hh.dtype)
    product = _product(w_hh.to(dtype).mT, w_hh.dtype)
    h, c = time.state(h0).to(dtype), time.state(c0).to(dtype)
    new = time.new_states(reset_h, h), time.new_states(reset_c, c)
    hs, cs, before, gates = [], [], [], []
    for x, start, new_h, new_c in zip(time.split(xp.to(dtype)), time.starts(resets), *new, strict=True):
        if start is not None:
            h, c = torch.where(start, new_h, h), torch.where(start, new_c, c)
        a_i, a_f, a_g, a_o = product(x, h).chunk(4, -1)
        gate = torch.sigmoid(a_i), torch.sigmoid(a_f), torch.tanh(a_g), torch.sigmoid(a_o)
        if save:
            before.append(c)
            gates.append(gate)
        c = torch.addcmul(gate[1] * c, gate[0], gate[2])
        h = gate[3] * torch.tanh(c)
        hs.append(h)
        cs.append(c)
    all_c = time.join(cs)
    local_grads = dc_dh = carry_gate = None
    if save:
        previous, tanh_c = time.join(before), torch.tanh(all_c)
        g_i, carry_gate, g_g, g_o = (time.join(gate) for gate in zip(*gates, strict=True))
        each = (
            g_g * g_i * (1 - g_i), previous * carry_gate * (1 - carry_gate), g_i * (1 - g_g * g_g),
            tanh_c * g_o * (1 - g_o),
        )  # fmt: skip
        local_grads = torch.stack(each, -1).flatten(-2)
        dc_dh = g_o * (1 - tanh_c * tanh_c)
    return LSTMResults(time.join(hs), all_c, time.groups(h), time.groups(c), local_grads, dc_dh, carry_gate)


class LSTMGradients(NamedTuple):
    """The results of the LSTM's backward loop."""

    dxp: Tensor  # [G, T, B, 4H]
    dh0: Tensor  # [G, B, H]
    dc0: Tensor  # [G, B, H]
    dreset_h: Tensor | None  # [G, T, B, H] gradient of each step's reset state
    dreset_c: Tensor | None  # as dreset_h


def lstm_backward(
    w_hh: Tensor, local_grads: Tensor, dc_dh: Tensor, carry_gate: Tensor, resets: Tensor | None, dhs: Tensor,
    dcs: Tensor | None, dh_last: Tensor, dc_last: Tensor, order: str, reset_gradients: bool,
) -> LSTMGradients:  # fmt: skip
    """Computes what `torch_bridge.kernels.lstm.lstm_bwd_kernel` does."""
    time, dtype = _TimeSteps(dhs, w_hh, order), op_common.accumulation_dtype(w_hh.dtype)
    product = _product(w_hh.to(dtype), w_hh.dtype)
    by_gate = torch.cat(local_grads.unflatten(-1, (-1, 4)).to(dtype).unbind(-1), -1)
    dh, dc = time.state(dh_last).to(dtype), time.state(dc_last).to(dtype)
    zeros = torch.zeros_like(dh)
    dcs_each = [None] * time.steps if dcs is None else time.split(dcs.to(dtype))
    sequences = (by_gate, dc_dh.to(dtype), carry_gate.to(dtype), dhs.to(dtype))
    steps = [*zip(*map(time.split, sequences), dcs_each, time.starts(resets), strict=True)]
    gates, dreset_h, dreset_c = [], [], []
    for f, o, z, dy, dcy, start in reversed(steps):
        dh = dh + dy
        dc = torch.addcmul(dc if dcy is None else dc + dcy, dh, o)
        d = f * torch.cat((dc, dc, dc, dh), -1)
        gates.append(d)
        dc, dh = dc * z, product(zeros, d)
        if start is not None:
            if reset_gradients:
                dreset_h.append(torch.where(start, dh, zeros))
                dreset_c.append(torch.where(start, dc, zeros))
            dh, dc = torch.where(start, zeros, dh), torch.where(start, zeros, dc)
    stepped_h, stepped_c = (time.join(d[::-1]) if d else None for d in (dreset_h, dreset_c))
    return LSTMGradients(time.join(gates[::-1]), time.groups(dh), time.groups(dc), stepped_h, stepped_c)
