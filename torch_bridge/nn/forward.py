"""The forward pass of a recurrent module, for one sequence, a batch or a packed batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torch_bridge.cells import CellSpec
from torch_bridge.functional.layout import stack
from torch_bridge.nn.checks import check_resets, check_states, check_tensors
from torch_bridge.nn.packed import forward_packed
from torch_bridge.nn.stack import call_of, resets_of_reversed, run_stack


def run_module(
    rnn: Any, cell: CellSpec, input: Any, hx: Any, resets: Any, reset_states: tuple[Tensor | None, ...]
) -> tuple[Any, tuple[Tensor, ...]]:
    """Returns the outputs and the last states `[layers * directions, B, width]`, as `torch.nn` does."""
    check_tensors(rnn, cell, input, hx, resets, reset_states)
    if isinstance(input, PackedSequence):
        return forward_packed(rnn, cell, input, hx, resets, reset_states)
    if input.dim() not in (2, 3):
        kind = rnn.mode.partition("_")[0]  # an RNN's mode has its activation, and torch.nn.RNN has words of its own
        rank = f"{input.dim()}D tensor" if kind == "RNN" else f"{input.dim()}D"
        raise ValueError(f"{kind}: Expected input to be 2D or 3D, got {rank} instead")
    if hx is not None and any(x.dim() != input.dim() for x in hx):
        kind, ranks = "batched 3-D" if input.dim() == 3 else "unbatched 2-D", [f"{x.dim()}-D" for x in hx]
        if len(ranks) == 1:
            raise RuntimeError(f"For {kind} input, hx should also be {input.dim()}-D but got {ranks[0]} tensor")
        raise RuntimeError(
            f"For {kind} input, hx and cx should also be {input.dim()}-D but got ({', '.join(ranks)}) tensors"
        )
    if input.dim() == 3:
        return _forward_batch(rnn, cell, input, hx, resets, reset_states)
    axis = 0 if rnn.batch_first else 1
    check_resets(rnn, cell, tuple(input.shape[:1]), (), resets, reset_states)
    ys, last = _forward_batch(
        rnn, cell, input.unsqueeze(axis), hx and tuple(x.unsqueeze(1) for x in hx),
        None if resets is None else resets.unsqueeze(axis),
        tuple(x if x is None or x.dim() < 3 else x.unsqueeze(1 + axis) for x in reset_states),
    )  # fmt: skip
    return ys.squeeze(axis), tuple(x.squeeze(1) for x in last)


def _forward_batch(
    rnn: Any, cell: CellSpec, xs: Tensor, hx: Any, resets: Tensor | None, reset_states: tuple[Tensor | None, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    time = 1 if rnn.batch_first else 0
    check_states(rnn, xs, hx, None)
    if xs.shape[time] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    check_resets(rnn, cell, tuple(xs.shape[:2]), (xs.shape[1 - time],), resets, reset_states)
    backward = None if resets is None or not rnn.bidirectional else resets_of_reversed(resets, time)
    call = call_of(rnn, cell, xs, rnn.batch_first, hx, (resets, backward), reset_states)
    ys, outcomes = run_stack(rnn, call)
    return ys, tuple(stack(x) for x in zip(*(one.last for one in outcomes), strict=True))
