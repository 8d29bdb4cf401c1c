"""Time loops in plain PyTorch operations, on any device and dtype, for use where the kernels cannot run.

There is one loop forward and one backward for every cell, whose arithmetic is in `torch_bridge.steps`. The arguments
are those of the kernels, see `torch_bridge.calls`.

Gates and states are float32, or float64 if the weights are, whatever the dtype of the operands. Nothing is written in
place, so autograd can differentiate the forward loop to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_bridge import op_common, steps
from torch_bridge.calls import BackwardCall, ForwardCall
from torch_bridge.steps import Tensors


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
        steps = self._by_model(x).unbind(1)
        return steps[::-1] if self.order == "reverse" else steps

    def join(self, steps: Sequence[Tensor]) -> Tensor:
        """Inverts `split`: returns `[G, T, B, ...]` from the results of the steps."""
        return self._by_group(torch.stack(list(reversed(steps) if self.order == "reverse" else steps), 1))

    def stack(self, x: Tensor) -> Tensor:
        """Returns the steps of an array `[G, T, B, ...]` as one array `[T, S, N, ...]`."""
        x = self._by_model(x).transpose(0, 1)
        return x.flip(0) if self.order == "reverse" else x

    def unstack(self, x: Tensor) -> Tensor:
        """Inverts `stack`."""
        x = x.flip(0) if self.order == "reverse" else x
        return self._by_group(x.transpose(0, 1))

    def _by_model(self, x: Tensor) -> Tensor:
        """Reshapes `[G, T, B, ...]` to `[S, T, N, ...]`, and flips models in time."""
        if self.per_model != 1:
            x = x.unflatten(0, (self.models, self.per_model)).transpose(1, 2)
            x = x.squeeze(3) if self.batch == 1 else x.flatten(2, 3)
        return self._flip_odd(x) if self.order == "bidirectional" else x

    def _by_group(self, x: Tensor) -> Tensor:
        """Inverts `_by_model`."""
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


# A step of a time loop. It gets the states before it, `[S, N, H]`, and its arrays by name; it returns the states after
# it, and what the loop collects of every step.
_Step = Callable[[Tensors, Mapping[str, Tensor]], tuple[Tensors, Sequence[Tensor]]]


def unrolled(
    step: _Step, states: Tensors, sequences: Mapping[str, Tensor], constants: Mapping[str, Tensor], time: _TimeSteps
) -> tuple[Tensors, list[Tensor]]:
    """Runs a loop over time in Python, of which a compiler sees every step.

    Args:
      step: the step.
      states: the states before the first step, `[S, N, H]` each.
      sequences: arrays `[G, T, B, ...]`, of which each step gets its own `[S, N, ...]`.
      constants: arrays that every step gets as they are.
      time: splits the sequences.

    Returns:
      The states after the last step, and what `step` returned of every step, `[G, T, B, ...]` each.
    """
    collected, arrays = [], dict(constants)
    for arrays_of_step in zip(*map(time.split, sequences.values()), strict=True):
        arrays.update(zip(sequences, arrays_of_step, strict=True))
        states, outputs = step(states, arrays)
        collected.append(outputs)
    return states, [time.join(outputs) for outputs in zip(*collected, strict=True)]


def scanned(
    step: _Step, states: Tensors, sequences: Mapping[str, Tensor], constants: Mapping[str, Tensor], time: _TimeSteps
) -> tuple[Tensors, list[Tensor]]:
    """Does what `unrolled` does as one operator of a traced program, for any number of steps, and without gradients."""
    count, names = len(states), (*sequences, *constants)

    def body(*arrays: Tensor) -> Tensors:
        after, outputs = step(arrays[:count], dict(zip(names, arrays[count:], strict=True)))
        return *after, *(x.clone() for x in outputs)  # no two results may share memory

    arrays = states, map(time.stack, sequences.values()), constants.values()
    results = torch.ops.higher_order.scan(body, *([x.detach() for x in each] for each in arrays))
    return tuple(results[:count]), [time.unstack(x) for x in results[count:]]


def _add_product(x: Tensor | None, y: Tensor, w: Tensor, operand_dtype: torch.dtype) -> Tensor:
    """Returns `x + y @ w`, batched over models, or `y @ w` if `x` is None; `y` is rounded to `operand_dtype` first."""
    if operand_dtype != w.dtype:
        y = y.to(operand_dtype).to(w.dtype)
    return torch.bmm(y, w) if x is None else torch.baddbmm(x, y, w)


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


def forward(x: ForwardCall, loop: Callable[..., tuple[Tensors, list[Tensor]]] = unrolled) -> dict[str, Tensor]:
    """Computes what `torch_bridge.kernels.loops.streamed.forward_kernel` does, by `unrolled` or `scanned`.

    Returns results by their names in `CellSpec.forward_outputs`, in the dtype of the computation.
    """
    cell, xp, w_hh, b_hn, norm = x.cell, x.xp, x.w_hh, x.b_hn, x.norm
    time, dtype = _TimeSteps(xp, w_hh, x.order), op_common.accumulation_dtype(w_hh.dtype)
    arithmetic, before = steps.CELLS[cell.name], tuple(time.state(h).to(dtype) for h in x.states)
    new_states = [f"new_{s}" for s in cell.states]
    sequences, constants = {"xp": xp.to(dtype)}, {"w": w_hh.to(dtype).mT}
    if b_hn is not None:
        # the last gate is separate: its hidden product gets b_hn, and `step` takes its input projection
        hidden = b_hn.shape[-1]
        sequences["xp"], sequences["last"] = sequences["xp"].split((xp.shape[-1] - hidden, hidden), -1)
        # the bias of all hidden products, zero except for the last gate's
        bias = pad(b_hn.to(dtype), (xp.shape[-1] - hidden, 0))
        constants["bias"] = bias[:, None].expand(-1, before[0].shape[1], -1)
    if x.resets is not None:
        sequences["starts"] = (x.resets != 0)[..., None]
        for name, new, state in zip(new_states, x.reset_states, before, strict=True):
            if new is not None and new.ndim == 4:
                sequences[name] = new.to(dtype)
            else:
                constants[name] = torch.zeros_like(state) if new is None else time.state(new.to(dtype))
    if norm is not None:
        constants["norm_bias"] = norm.bias.to(dtype)[:, None]
        sequences["x_norm"] = norm.x_norm.to(dtype)[..., None]
        if norm.w_sum is not None and norm.x_mean is not None:
            constants["w_sum"] = norm.w_sum.to(dtype)[:, None]
            sequences["x_mean"] = norm.x_mean.to(dtype)[..., None]

    def step(states: Tensors, arrays: Mapping[str, Tensor]) -> tuple[Tensors, Sequence[Tensor]]:
        if "starts" in arrays:
            starts = arrays["starts"]
            states = tuple([torch.where(starts, arrays[new], h) for new, h in zip(new_states, states, strict=True)])
        normalized: Tensors = ()
        last = None
        if cell.last_gate_separate:
            products = _add_product(arrays["bias"], states[0], arrays["w"], w_hh.dtype)
            products, last_product = products.split((arrays["xp"].shape[-1], arrays["last"].shape[-1]), -1)
            gates, last = arrays["xp"] + products, (arrays["last"], last_product)
        else:
            gates = _add_product(arrays["xp"], states[0], arrays["w"], w_hh.dtype)
        if norm is not None:
            if "w_sum" in arrays:
                gates = gates - arrays["x_mean"] * arrays["w_sum"]
            scale, mean = _scale_and_mean(states[0], arrays["x_norm"], arrays.get("x_mean"), norm.width)
            normalized = gates * scale, (states[0] - mean) * scale, scale
            gates = normalized[0] + arrays["norm_bias"]
        states, activations = arithmetic.step(gates, last, states)
        return states, (*states[: len(x.returned)], *((*normalized, *activations) if x.save else ()))

    after, collected = loop(step, before, sequences, constants, time)
    results = {f"{s}s": each_step for s, each_step in zip(x.returned, collected, strict=False)}
    results |= {f"{s}_last": time.groups(x) for s, x in zip(cell.states, after, strict=True)}
    if x.save:
        saved = collected[len(x.returned) :]
        if norm is None:
            local_grads, factors = arithmetic.residuals(saved)
        else:
            normalized, norm_state, scale, *activations = saved
            local_grads, factors = arithmetic.residuals(activations)
            each_gate = zip(local_grads, normalized.chunk(cell.gates, -1), strict=True)
            local_grads = *local_grads, torch.stack([f * y for f, y in each_gate]).sum(0)
            factors = norm_state, *factors
            results["scale"] = scale.squeeze(-1)
        (name, width), *others = cell.residuals
        padding = [torch.zeros_like(local_grads[0])] * (width - len(local_grads))
        results[name] = torch.stack([*local_grads, *padding], -1).flatten(-2)
        results |= {name: x for (name, _), x in zip(others, factors, strict=True)}
    return results


def backward(x: BackwardCall) -> dict[str, Tensor]:
    """Computes what `torch_bridge.kernels.loops.streamed.backward_kernel` does.

    Returns results by name: "dxp" `[G, T, B, gates * H]`; if the last gate is separate, "dhn" `[G, T, B, H]`, the
    gradient of its hidden product; with a norm, "dnorm" `[G, T, B]`, the D of `kernels.loops.streamed`; and for the
    state "h", and others likewise, "dh0" `[G, B, H]` and "dreset_h" `[G, T, B, H]`.
    """
    cell, w_hh, residuals = x.cell, x.w_hh, x.residuals
    (name, width), *others = cell.residuals
    time, dtype = _TimeSteps(x.sequence, w_hh, x.order), op_common.accumulation_dtype(w_hh.dtype)
    w, grad_step = w_hh.to(dtype), steps.CELLS[cell.name].grad_step
    by_gate = residuals[name].unflatten(-1, (-1, width)).to(dtype).unbind(-1)
    if cell.last_gate_separate:
        # The last gate is stored twice: that of the input projection, then that of the hidden product. With the first
        # moved to the front, those of the hidden products are one slice, `[1:]`.
        by_gate = (by_gate[cell.gates - 1], *by_gate[: cell.gates - 1], by_gate[cell.gates])
    else:
        norm_grads = by_gate[cell.gates] if cell.norm else None
        by_gate = by_gate[: cell.gates]
    local_grads = time.split(torch.stack(by_gate, -2))
    factors = time.zip_steps([residuals[name].to(dtype) for name, _ in others if name != "norm_state"])
    norm_inputs = (norm_grads, residuals["norm_state"], residuals["scale"][..., None]) if cell.norm else ()
    each_norm = time.zip_steps([None if y is None else y.to(dtype) for y in norm_inputs])
    gradients = time.zip_steps([None if d is None else d.to(dtype) for d in x.dsequences])
    zeros = w_hh.new_zeros((time.models, time.per_model * time.batch, w_hh.shape[-1]), dtype=dtype)
    dstates = tuple(zeros if d is None else time.state(d).to(dtype) for d in x.dlast)
    dgates, dnorms, dresets = [], [], []  # of each step, the last step first
    for local, factor, dys, start, norm in reversed(
        [*zip(local_grads, factors, gradients, time.starts(x.resets), each_norm, strict=True)]
    ):
        dstates = tuple([d if dy is None else d + dy for d, dy in zip(dstates, dys, strict=True)])
        if len(dstates) > 1:
            dstates = dstates[0], torch.addcmul(dstates[1], dstates[0], factor[0])
        d, carried = grad_step(dstates, local, factor)
        if norm:
            norm_grad, norm_state, scale = norm
            dnorms.append((dstates[0] * norm_grad).sum(-1, keepdim=True))
            d = d * scale.unsqueeze(-2)
            carried = (carried[0] - norm_state * (scale * dnorms[-1] / x.norm_width),)
        dgates.append(d)
        operand = (d[..., 1:, :] if cell.last_gate_separate else d).flatten(-2)
        if len(dstates) > 1:
            dstates = _add_product(None, operand, w, w_hh.dtype), *carried
        else:
            dstates = (_add_product(carried[0] if carried else None, operand, w, w_hh.dtype),)
        if start is not None:
            if x.reset_gradients:
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
