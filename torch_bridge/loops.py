"""Time loops in plain PyTorch operations, on any device and dtype, for use where the kernels cannot run.

There is one loop forward and one backward for every cell, whose arithmetic is in `torch_bridge.steps`. The arguments
are those of the kernels: sequences `[G, T, B, W]`, where each of the G groups holds B sequences, time first; states
`[G, B, H]`; and weights `[S, ...]`, where each of the S models owns G / S consecutive groups. `order` is the direction
in which a model goes through time: "forward", "reverse", or "bidirectional" (models of even index forward, models of
odd index in reverse).

Gates and states are float32, or float64 if the weights are, whatever the dtype of the operands. Nothing is written in
place, so autograd can differentiate the forward loop to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bridge import op_common, steps
from torch_bridge.cells import CellSpec


class Norm(NamedTuple):
    """What a loop needs of the norm of `[x, h]` that the gates see; `kernels.loops.streamed` explains it.

    Attributes:
      width: the number of elements of `[x, h]`.
      bias: `[S, gates * H]`, added after the norm.
      x_norm: `[G, T, B]`, the part of variance + epsilon that follows from the inputs.
      w_sum: `[S, gates * H]`, the sums of `w_hh` over the state, or None if the norm is RMSNorm.
      x_mean: `[G, T, B]`, the mean of the inputs, or None if the norm is RMSNorm.
    """

    width: int
    bias: Tensor
    x_norm: Tensor
    w_sum: Tensor | None = None
    x_mean: Tensor | None = None


class _TimeSteps:
    """The split of `[G, T, B, ...]` arrays like `sequence` into the steps of a time loop over the S models of `w_hh`.

    A step is `[S, N, ...]`, with the N = G / S * B sequences of each model, so that one batched product multiplies the
    states of each model by its weights. Steps are in the order in which the loop runs them. In a bidirectional run,
    where models differ in that order, the models that go in reverse are flipped in time.

    Attributes:
      steps: T.
      batch: B.
      order: the direction through time.
      models: S.
      per_model: G / S, the number of groups of each model.
    """

    def __init__(self, sequence: Tensor, w_hh: Tensor, order: str):
        groups, self.steps, self.batch = sequence.shape[:3]
        self.order, self.models, self.per_model = order, w_hh.shape[0], groups // w_hh.shape[0]

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Returns the steps `[S, N, ...]` of an array `[G, T, B, ...]`."""
        if self.per_model != 1:
            x = x.unflatten(0, (self.models, self.per_model)).transpose(1, 2)
            x = x.squeeze(3) if self.batch == 1 else x.flatten(2, 3)
        if self.order == "bidirectional":
            x = self._flip_odd(x)
        steps = x.unbind(1)
        return steps[::-1] if self.order == "reverse" else steps

    def join(self, steps: Sequence[Tensor]) -> Tensor:
        """Inverts `split`: returns `[G, T, B, ...]` from the results of the steps."""
        x = torch.stack(list(reversed(steps) if self.order == "reverse" else steps), 1)
        if self.order == "bidirectional":
            x = self._flip_odd(x)
        if self.per_model != 1:
            x = x.unflatten(2, (self.per_model, self.batch)).transpose(1, 2).flatten(0, 1)
        return x

    def _flip_odd(self, x: Tensor) -> Tensor:
        """Flips the models of odd index in time; time is the axis after that of the models."""
        return torch.stack([one.flip(0) if s % 2 else one for s, one in enumerate(x)])

    def zip_steps(self, sequences: Sequence[Tensor | None]) -> list[tuple[Any, ...]]:
        """Returns a tuple for each step, with an element for each sequence, None if the sequence is None."""
        each = [[None] * self.steps if x is None else self.split(x) for x in sequences]
        return [*zip(*each, strict=True)] if each else [()] * self.steps

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
        """Returns for each step the states that episodes start from, `[S, N, H]`.

        Args:
          x: `[G, B, H]`, `[G, T, B, H]`, or None for zeros.
          like: the state before the first step, `[S, N, H]`.
        """
        if x is None:
            return [torch.zeros_like(like)] * self.steps
        x = x.to(like.dtype)
        return self.split(x) if x.ndim == 4 else [self.state(x)] * self.steps


def _product(w: Tensor, operand_dtype: torch.dtype) -> Callable[[Tensor | None, Tensor], Tensor]:
    """Returns `(x, y) -> x + y @ w`, batched over models, which rounds y to `operand_dtype`, that of the given weights.

    If `x` is None, the function returns `y @ w`.
    """
    rounds = operand_dtype != w.dtype

    def product(x: Tensor | None, y: Tensor) -> Tensor:
        if rounds:
            y = y.to(operand_dtype).to(w.dtype)
        return torch.bmm(y, w) if x is None else torch.baddbmm(x, y, w)

    return product


def _scale_and_mean(h: Tensor, x_norm: Tensor, x_mean: Tensor | None, width: int) -> tuple[Tensor, Tensor | float]:
    """Returns the factor of a step's norm and the mean of `[x, h]`, which is 0 for RMSNorm; arrays are `[S, N, 1]`."""
    squares = (h * h).sum(-1, keepdim=True)
    if x_mean is None:
        return torch.rsqrt(x_norm + squares / width), 0.0
    hidden, mean = h.shape[-1], h.mean(-1, keepdim=True)
    difference = mean - x_mean
    variance = x_norm + (squares - hidden * mean * mean) / width
    variance = variance + difference * difference * (hidden * (width - hidden) / width**2)
    return torch.rsqrt(variance), x_mean + difference * (hidden / width)


def forward(
    xp: Tensor, w_hh: Tensor, b_hn: Tensor | None, states: Sequence[Tensor], resets: Tensor | None,
    reset_states: Sequence[Tensor | None], norm: Norm | None = None, *, cell: CellSpec, order: str, cells: bool,
    save: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """Computes what `torch_bridge.kernels.loops.streamed.forward_kernel` does.

    Args:
      xp: `[G, T, B, gates * H]`.
      w_hh: `[S, gates * H, H]`.
      b_hn: `[S, H]` if the last gate is separate, else None.
      states: `[G, B, H]` for each state of the cell.
      resets: `[G, T, B]` or None.
      reset_states: for each state `[G, B, H]`, `[G, T, B, H]`, or None for zeros.
      norm: the arrays of the norm, if the cell has one.
      cell: an entry of the cell table.
      order: the direction through time.
      cells: whether to return every state of every step, instead of the hidden states only.
      save: whether to return residuals.

    Returns:
      Results by their names in `CellSpec.forward_outputs`, in the dtype of the computation.
    """
    time, dtype = _TimeSteps(xp, w_hh, order), op_common.accumulation_dtype(w_hh.dtype)
    arithmetic, product = steps.CELLS[cell.name], _product(w_hh.to(dtype).mT, w_hh.dtype)
    carry = tuple(time.state(x).to(dtype) for x in states)
    new_states = zip(*(time.new_states(new, x) for new, x in zip(reset_states, carry, strict=True)), strict=True)
    xp, bias = xp.to(dtype), None
    x_lasts: Sequence[Tensor | None] = [None] * time.steps
    if b_hn is not None:
        # the last gate is separate: its hidden product gets b_hn, and `step` takes its input projection
        xp, last_xp = xp.split((xp.shape[-1] - b_hn.shape[-1], b_hn.shape[-1]), -1)
        x_lasts = time.split(last_xp)
        # the bias of all hidden products, zero except for the last gate's
        bias = pad(b_hn.to(dtype), (xp.shape[-1], 0))[:, None].expand(-1, carry[0].shape[1], -1)
    history, saved, normed = [], [], []
    statistics = () if norm is None else (norm.x_norm, norm.x_mean)
    norm_inputs = time.zip_steps([None if x is None else x.to(dtype)[..., None] for x in statistics])
    for x, x_last, start, new, norm_of_step in zip(
        time.split(xp), x_lasts, time.starts(resets), new_states, norm_inputs, strict=True
    ):
        if start is not None:
            carry = tuple([torch.where(start, *each) for each in zip(new, carry, strict=True)])
        if x_last is None:
            gates, last = product(x, carry[0]), None
            if norm is not None:
                x_norm, x_mean = norm_of_step
                if norm.w_sum is not None:
                    gates = gates - x_mean * norm.w_sum.to(dtype)[:, None]
                scale, mean = _scale_and_mean(carry[0], x_norm, x_mean, norm.width)
                normed.append((gates * scale, (carry[0] - mean) * scale, scale))
                gates = normed[-1][0] + norm.bias.to(dtype)[:, None]
        else:
            products, h_last = product(bias, carry[0]).split((x.shape[-1], x_last.shape[-1]), -1)
            gates, last = x + products, (x_last, h_last)
        carry, activations = arithmetic.step(gates, last, carry)
        history.append(carry)
        if save:
            saved.append(activations)
    returned = cell.states if cells else cell.states[:1]
    results = {f"{s}s": time.join(each) for s, each in zip(returned, zip(*history, strict=True), strict=False)}
    results |= {f"{s}_last": time.groups(x) for s, x in zip(cell.states, carry, strict=True)}
    if save:
        local_grads, factors = arithmetic.residuals([time.join(each) for each in zip(*saved, strict=True)])
        if norm is not None:
            normalized, norm_state, scale = (time.join(each) for each in zip(*normed, strict=True))
            each_gate = zip(local_grads, normalized.chunk(cell.gates, -1), strict=True)
            local_grads = *local_grads, torch.stack([f * y for f, y in each_gate]).sum(0)
            factors = norm_state, *factors
            results["scale"] = scale.squeeze(-1)
        (name, width), *others = cell.residuals
        padding = [torch.zeros_like(local_grads[0])] * (width - len(local_grads))
        results[name] = torch.stack([*local_grads, *padding], -1).flatten(-2)
        results |= {name: x for (name, _), x in zip(others, factors, strict=True)}
    return results


def backward(
    w_hh: Tensor, residuals: Mapping[str, Tensor], resets: Tensor | None, dsequences: Sequence[Tensor | None],
    dlast: Sequence[Tensor], *, cell: CellSpec, order: str, reset_gradients: bool, norm_width: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Computes what `torch_bridge.kernels.loops.streamed.backward_kernel` does.

    Args:
      w_hh: `[S, gates * H, H]`.
      residuals: by name, what `CellSpec.saved` lists.
      resets: `[G, T, B]` or None.
      dsequences: the gradients of each state at every step, `[G, T, B, H]` or None for zeros.
      dlast: the gradients of each state after the last step, `[G, B, H]`.
      cell: an entry of the cell table.
      order: the direction through time.
      reset_gradients: whether to return the gradient of each step's reset states.
      norm_width: the number of elements that the cell's norm sees, or 0.

    Returns:
      Results by name: "dxp" `[G, T, B, gates * H]`; if the last gate is separate, "dhn" `[G, T, B, H]`, the gradient of
      its hidden product; with a norm, "dnorm" `[G, T, B]`, the D of `kernels.loops.streamed`; and for the state "h",
      and others likewise, "dh0" `[G, B, H]` and "dreset_h" `[G, T, B, H]`.
    """
    (name, width), *others = cell.residuals
    time, dtype = _TimeSteps(residuals[name], w_hh, order), op_common.accumulation_dtype(w_hh.dtype)
    product, grad_step = _product(w_hh.to(dtype), w_hh.dtype), steps.CELLS[cell.name].grad_step
    by_gate = residuals[name].unflatten(-1, (-1, width)).to(dtype).unbind(-1)
    if cell.last_gate_separate:
        # The stored order of a GRU is r, z, n (of the input projection), n (of the hidden product); an MGU has f for r
        # and z. With n of the input projection moved to the front, those of the hidden products are one slice, `[1:]`.
        by_gate = (by_gate[cell.gates - 1], *by_gate[: cell.gates - 1], by_gate[cell.gates])
    else:
        norm_grads = by_gate[cell.gates] if cell.norm else None
        by_gate = by_gate[: cell.gates]
    local_grads = time.split(torch.stack(by_gate, -2))
    factors = time.zip_steps([residuals[name].to(dtype) for name, _ in others if name != "norm_state"])
    norm_inputs = (norm_grads, residuals["norm_state"], residuals["scale"][..., None]) if cell.norm else ()
    each_norm = time.zip_steps([None if x is None else x.to(dtype) for x in norm_inputs])
    gradients = time.zip_steps([None if d is None else d.to(dtype) for d in dsequences])
    dstates = tuple(time.state(d).to(dtype) for d in dlast)
    zeros = torch.zeros_like(dstates[0])
    dgates, dnorms, dresets = [], [], []  # of each step, the last step first
    for local, factor, dys, start, norm in reversed(
        [*zip(local_grads, factors, gradients, time.starts(resets), each_norm, strict=True)]
    ):
        dstates = tuple([d if dy is None else d + dy for d, dy in zip(dstates, dys, strict=True)])
        if len(dstates) > 1:
            dstates = dstates[0], torch.addcmul(dstates[1], dstates[0], factor[0])
        d, carried = grad_step(dstates, local, factor)
        if norm:
            norm_grad, norm_state, scale = norm
            dnorms.append((dstates[0] * norm_grad).sum(-1, keepdim=True))
            d = d * scale.unsqueeze(-2)
            carried = (carried[0] - norm_state * (scale * dnorms[-1] / norm_width),)
        dgates.append(d)
        operand = (d[..., 1:, :] if cell.last_gate_separate else d).flatten(-2)
        if len(dstates) > 1:
            dstates = product(None, operand), *carried
        else:
            dstates = (product(carried[0] if carried else None, operand),)
        if start is not None:
            if reset_gradients:
                dresets.append([torch.where(start, d, zeros) for d in dstates])
            dstates = tuple([torch.where(start, zeros, d) for d in dstates])
    d = time.join(dgates[::-1])
    if cell.last_gate_separate:
        results = {"dxp": torch.cat((d[..., 1:-1, :], d[..., :1, :]), -2).flatten(-2), "dhn": d[..., -1, :]}
    else:
        results = {"dxp": d.flatten(-2)}
    if dnorms:
        results["dnorm"] = time.join(dnorms[::-1]).squeeze(-1)
    results |= {f"d{s}0": time.groups(d) for s, d in zip(cell.states, dstates, strict=True)}
    for s, each in zip(cell.states, zip(*dresets[::-1], strict=True), strict=False):  # there may be none
        results[f"dreset_{s}"] = time.join(each)
    return results
