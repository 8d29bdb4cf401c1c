"""GRU and LSTM time loops in plain PyTorch operations: what runs where the kernels cannot, on any device and dtype.

Arguments are those of the kernels: sequences `[G, T, B, W]`, G groups of B sequences, each group time first; states
`[G, B, H]`; weights `[S, ...]`, where each of the S models owns G / S consecutive groups. `order` says which way a
model goes through time: "forward", "reverse", or "both": models of even index forward, of odd index in reverse.

Gates and states are float32, or float64 where the weights are, whatever the dtype of the operands. Nothing is written
in place, so autograd can differentiate the forward loops as often as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What states and gates are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Time:
    """How S models go through T steps of `[G, T, B, W]` arrays: the i-th step that each of them takes."""

    def __init__(self, order: str, models: int, groups: int, steps: int, batch: int):
        self.order, self.models, self.steps, self.batch = order, models, steps, batch
        self.per_model = groups // models

    def at(self, x: Tensor, i: int) -> Tensor:
        """`[S, N, W]` the inputs of the i-th step, for the N = G / S * B sequences of a model."""
        x = x.reshape(self.models, self.per_model, self.steps, self.batch, *x.shape[3:])
        if self.order == "both":
            last = self.steps - 1
            step = torch.stack([x[s, :, last - i if s % 2 else i] for s in range(self.models)])
        else:
            step = x[:, :, self.steps - 1 - i if self.order == "reverse" else i]
        return step.reshape(self.models, self.per_model * self.batch, *x.shape[4:])

    def join(self, steps: Sequence[Tensor]) -> Tensor:
        """`[G, T, B, W]` of what the steps gave, in the order that they were taken."""
        shape = self.models, self.per_model, self.batch, *steps[0].shape[2:]
        x = torch.stack([step.reshape(shape) for step in steps], 2)
        if self.order == "reverse":
            x = x.flip(2)
        elif self.order == "both":
            x = torch.stack([x[s].flip(1) if s % 2 else x[s] for s in range(self.models)])
        return x.reshape(self.models * self.per_model, self.steps, self.batch, *x.shape[4:])

    def state(self, x: Tensor) -> Tensor:
        """`[S, N, H]` of `[G, B, H]`."""
        return x.reshape(self.models, self.per_model * self.batch, x.shape[-1])

    def groups(self, x: Tensor) -> Tensor:
        """`[G, B, H]` of `[S, N, H]`."""
        return x.reshape(self.models * self.per_model, self.batch, x.shape[-1])


def _time(sequence: Tensor, w_hh: Tensor, order: str) -> _Time:
    groups, steps, batch = sequence.shape[:3]
    return _Time(order, w_hh.shape[0], groups, steps, batch)


def _select(time: _Time, i: int, starts: Tensor | None, state: Tensor | None, carry: Tensor) -> Tensor:
    """The state that the i-th step sees: a select, so that what is not finite does not leak."""
    if starts is None:
        return carry
    if state is None:
        new = torch.zeros_like(carry)
    else:
        new = (time.at(state, i) if state.ndim == 4 else time.state(state)).to(carry.dtype)
    return torch.where(time.at(starts, i)[..., None], new, carry)


def _starts(resets: Tensor | None) -> Tensor | None:
    return None if resets is None else resets != 0


def _product(w: Tensor, operand: torch.dtype) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, y) -> x + y @ w for every model, with both operands rounded to `operand`."""
    return lambda x, y: torch.baddbmm(x, y.to(operand).to(x.dtype), w)


class GRUResults(NamedTuple):
    """What the GRU's forward loop gives: `factors` and `keep` are None where nothing is saved."""

    hs: Tensor  # [G, T, B, H]
    h_last: Tensor  # [G, B, H]
    factors: Tensor | None  # [G, T, B, 4H] of each unit dr, dz, dn, dh_n over dh
    keep: Tensor | None  # [G, T, B, H] z


def gru(
    xp: Tensor, w_hh: Tensor, b_hn: Tensor, h0: Tensor, resets: Tensor | None, reset_h: Tensor | None,
    order: str, save: bool,
) -> GRUResults:  # fmt: skip
    """As `torch_bridge.kernels.gru.gru_fwd_kernel`; states in the dtype that they are computed in."""
    time, dtype, starts = _time(xp, w_hh, order), accumulation_dtype(w_hh.dtype), _starts(resets)
    hidden, operand = h0.shape[-1], w_hh.dtype
    w = w_hh.to(dtype).mT
    bias = torch.nn.functional.pad(b_hn.to(dtype), (2 * hidden, 0))[:, None].expand(-1, time.per_model * time.batch, -1)
    product = _product(w, operand)
    h = time.state(h0).to(dtype)
    hs, before, gates = [], [], []
    for i in range(time.steps):
        h = _select(time, i, starts, reset_h, h)
        a_r, a_z, a_n = product(bias, h).chunk(3, -1)
        x_r, x_z, x_n = time.at(xp, i).to(dtype).chunk(3, -1)
        r, z = torch.sigmoid(x_r + a_r), torch.sigmoid(x_z + a_z)
        n = torch.tanh(x_n + r * a_n)
        if save:
            before.append(h)
            gates.append((r, z, n, a_n))
        h = n + z * (h - n)
        hs.append(h)
    factors = keep = None
    if save:
        previous = time.join(before)
        r, keep, n, a_n = (time.join(gate) for gate in zip(*gates, strict=True))
        f_n = (1 - keep) * (1 - n * n)
        each = f_n * a_n * r * (1 - r), (previous - n) * keep * (1 - keep), f_n, f_n * r
        factors = torch.stack(each, -1).flatten(-2)
    return GRUResults(time.join(hs), time.groups(h), factors, keep)


class GRUGradients(NamedTuple):
    """What the GRU's backward loop gives."""

    dxp: Tensor  # [G, T, B, 3H]
    dhn: Tensor  # [G, T, B, H] of W_hn h + b_hn
    dh0: Tensor  # [G, B, H]
    dreset_h: Tensor | None  # [G, T, B, H] of each step's reset state


def gru_backward(
    w_hh: Tensor, factors: Tensor, keep: Tensor, resets: Tensor | None, dhs: Tensor, dh_last: Tensor,
    order: str, reset_gradients: bool,
) -> GRUGradients:  # fmt: skip
    """As `torch_bridge.kernels.gru.gru_bwd_kernel`."""
    time, dtype, starts = _time(dhs, w_hh, order), accumulation_dtype(w_hh.dtype), _starts(resets)
    factors = factors.unflatten(-1, (-1, 4)).to(dtype)
    product = _product(w_hh.to(dtype), w_hh.dtype)
    dh = time.state(dh_last).to(dtype)
    all_dh, recurrent, dreset_h = [], [], []
    for i in reversed(range(time.steps)):
        dh = dh + time.at(dhs, i).to(dtype)
        f_r, f_z, _, f_hn = time.at(factors, i).unbind(-1)
        d = torch.cat((dh * f_r, dh * f_z, dh * f_hn), -1)
        all_dh.append(dh)
        recurrent.append(d)
        dh = product(dh * time.at(keep, i).to(dtype), d)
        if starts is not None:
            start, zeros = time.at(starts, i)[..., None], torch.zeros_like(dh)
            if reset_gradients:
                dreset_h.append(torch.where(start, dh, zeros))
            dh = torch.where(start, zeros, dh)
    hidden = keep.shape[-1]
    d = time.join(recurrent[::-1])
    dn = time.join(all_dh[::-1]) * factors[..., 2]
    dxp = torch.cat((d[..., : 2 * hidden], dn), -1)
    stepped = time.join(dreset_h[::-1]) if dreset_h else None
    return GRUGradients(dxp, d[..., 2 * hidden :].contiguous(), time.groups(dh), stepped)


class LSTMResults(NamedTuple):
    """What the LSTM's forward loop gives: `factors`, `through` and `keep` are None where nothing is saved."""

    hs: Tensor  # [G, T, B, H]
    cs: Tensor  # [G, T, B, H]
    h_last: Tensor  # [G, B, H]
    c_last: Tensor  # [G, B, H]
    factors: Tensor | None  # [G, T, B, 4H] of each unit di, df, dg over dc and do over dh
    through: Tensor | None  # [G, T, B, H] dc over dh
    keep: Tensor | None  # [G, T, B, H] f


def lstm(
    xp: Tensor, w_hh: Tensor, h0: Tensor, c0: Tensor, resets: Tensor | None, reset_h: Tensor | None,
    reset_c: Tensor | None, order: str, save: bool,
) -> LSTMResults:  # fmt: skip
    """As `torch_bridge.kernels.lstm.lstm_fwd_kernel`; states in the dtype that they are computed in."""
    time, dtype, starts = _time(xp, w_hh, order), accumulation_dtype(w_hh.dtype), _starts(resets)
    product = _product(w_hh.to(dtype).mT, w_hh.dtype)
    h, c = time.state(h0).to(dtype), time.state(c0).to(dtype)
    hs, cs, before, gates = [], [], [], []
    for i in range(time.steps):
        h, c = _select(time, i, starts, reset_h, h), _select(time, i, starts, reset_c, c)
        a_i, a_f, a_g, a_o = product(time.at(xp, i).to(dtype), h).chunk(4, -1)
        g_i, g_f, g_g, g_o = torch.sigmoid(a_i), torch.sigmoid(a_f), torch.tanh(a_g), torch.sigmoid(a_o)
        if save:
            before.append(c)
            gates.append((g_i, g_f, g_g, g_o))
        c = g_f * c + g_i * g_g
        h = g_o * torch.tanh(c)
        hs.append(h)
        cs.append(c)
    all_c = time.join(cs)
    factors = through = keep = None
    if save:
        previous = time.join(before)
        g_i, keep, g_g, g_o = (time.join(gate) for gate in zip(*gates, strict=True))
        tanh_c = torch.tanh(all_c)
        each = (
            g_g * g_i * (1 - g_i), previous * keep * (1 - keep), g_i * (1 - g_g * g_g), tanh_c * g_o * (1 - g_o),
        )  # fmt: skip
        factors = torch.stack(each, -1).flatten(-2)
        through = g_o * (1 - tanh_c * tanh_c)
    return LSTMResults(time.join(hs), all_c, time.groups(h), time.groups(c), factors, through, keep)


class LSTMGradients(NamedTuple):
    """What the LSTM's backward loop gives."""

    dxp: Tensor  # [G, T, B, 4H]
    dh0: Tensor  # [G, B, H]
    dc0: Tensor  # [G, B, H]
    dreset_h: Tensor | None  # [G, T, B, H] of each step's reset state
    dreset_c: Tensor | None  # as dreset_h


def lstm_backward(
    w_hh: Tensor, factors: Tensor, through: Tensor, keep: Tensor, resets: Tensor | None, dhs: Tensor,
    dcs: Tensor | None, dh_last: Tensor, dc_last: Tensor, order: str, reset_gradients: bool,
) -> LSTMGradients:  # fmt: skip
    """As `torch_bridge.kernels.lstm.lstm_bwd_kernel`."""
    time, dtype, starts = _time(dhs, w_hh, order), accumulation_dtype(w_hh.dtype), _starts(resets)
    factors = factors.unflatten(-1, (-1, 4))
    product = _product(w_hh.to(dtype), w_hh.dtype)
    dh, dc = time.state(dh_last).to(dtype), time.state(dc_last).to(dtype)
    gates, dreset_h, dreset_c = [], [], []
    for i in reversed(range(time.steps)):
        dh = dh + time.at(dhs, i).to(dtype)
        dc = dc + dh * time.at(through, i).to(dtype)
        if dcs is not None:
            dc = dc + time.at(dcs, i).to(dtype)
        f_i, f_f, f_g, f_o = time.at(factors, i).to(dtype).unbind(-1)
        d = torch.cat((dc * f_i, dc * f_f, dc * f_g, dh * f_o), -1)
        gates.append(d)
        dc = dc * time.at(keep, i).to(dtype)
        dh = product(torch.zeros_like(dh), d)
        if starts is not None:
            start, zeros = time.at(starts, i)[..., None], torch.zeros_like(dh)
            if reset_gradients:
                dreset_h.append(torch.where(start, dh, zeros))
                dreset_c.append(torch.where(start, dc, zeros))
            dh, dc = torch.where(start, zeros, dh), torch.where(start, zeros, dc)
    stepped_h, stepped_c = (time.join(d[::-1]) if d else None for d in (dreset_h, dreset_c))
    return LSTMGradients(time.join(gates[::-1]), time.groups(dh), time.groups(dc), stepped_h, stepped_c)
