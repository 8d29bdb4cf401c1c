"""The forward pass of a recurrent module for packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from torch_bridge import recording
from torch_bridge.cells import CellSpec
from torch_bridge.functional.call import Direction
from torch_bridge.functional.sharding import check_local
from torch_bridge.nn.checks import check_resets, check_states
from torch_bridge.nn.stack import call_of, directions_of, is_backward, resets_of_reversed, run_stack, widths_of


def forward_packed(
    rnn: Any, cell: CellSpec, packed: PackedSequence, hx: Any, resets: Any, reset_states: tuple[Tensor | None, ...]
) -> tuple[PackedSequence, tuple[Tensor, ...]]:
    """Runs over the padding too, which changes no result: it comes last, or, backward, a reset discards its states."""
    data, batch_sizes, order, inverse = packed
    check_local("a PackedSequence", data)
    _check_steps("the input", packed)
    check_states(rnn, data, hx, batch_sizes)
    count = rnn.num_layers * directions_of(rnn)
    states = hx or tuple(data.new_zeros((count, int(batch_sizes[0]), width)) for width in widths_of(rnn, cell))
    if resets is not None:
        if not isinstance(resets, PackedSequence) or not _have_same_order(packed, resets):
            raise ValueError(
                "resets of a PackedSequence must be a PackedSequence of the same lengths, in the same order: pass "
                "input._replace(data=...), or pack_sequence(..., enforce_sorted=...) as for the input"
            )
        if resets.data.dim() != 1:
            raise ValueError(f"the data of resets must be [steps], got {tuple(resets.data.shape)}")
        _check_steps("resets", resets)
    if any(x is not None and x.dim() > 3 for x in reset_states):
        raise NotImplementedError("packed inputs cannot have a reset state for every step: use pad_packed_sequence")

    def sort(x: Tensor | None, order: Tensor | None = order) -> Any:
        return x if x is None or order is None or x.dim() < 3 else x.index_select(1, order)

    xs, lengths = _pad(data, batch_sizes)
    last = lengths.to(xs.device) - 1
    if resets is not None:
        resets, _ = _pad((resets.data != 0).to(torch.uint8), batch_sizes)
    reset_states = tuple(map(sort, reset_states))
    check_resets(rnn, cell, tuple(xs.shape[:2]), xs.shape[1:2], resets, reset_states)
    call = call_of(rnn, cell, xs, False, [*map(sort, states)], (resets, resets), reset_states)
    directions = [_start_at_end(one, last, xs) if is_backward(rnn, i) else one for i, one in enumerate(call.directions)]
    ys, outcomes = run_stack(rnn, call._replace(directions=directions, cells=len(cell.states) > 1))

    results = []
    sequence = torch.arange(xs.shape[1], device=xs.device)
    for i, out in enumerate(outcomes):
        ends = out.last
        if not is_backward(rnn, i):  # a backward loop ends at the first step of every sequence
            ends = tuple(x[last, sequence] for x in (out.hs, out.cs) if x is not None)
        results.append(ends)
    h_n = tuple(sort(torch.stack(x), inverse) for x in zip(*results, strict=True))
    return PackedSequence(_pack(ys, lengths, data.shape[0]), batch_sizes, order, inverse), h_n


def _pad(data: Tensor, batch_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `pad_packed_sequence` of a `PackedSequence`; without values if a listener traces the call."""
    if recording.listener() is None:
        return pad_packed_sequence(PackedSequence(data, batch_sizes))
    steps, sequences = len(batch_sizes), int(batch_sizes[0])
    return data[torch.zeros(steps, sequences, dtype=torch.int64)], torch.zeros(sequences, dtype=torch.int64)


def _pack(ys: Tensor, lengths: Tensor, rows: int) -> Tensor:
    """Returns the data of `pack_padded_sequence`, of `rows` rows; without values if a listener traces the call."""
    if recording.listener() is None:
        return pack_padded_sequence(ys, lengths).data
    return ys.flatten(0, 1)[torch.zeros(rows, dtype=torch.int64)]


def _have_same_order(one: PackedSequence, other: PackedSequence) -> bool:
    """Returns whether two packed sequences have the same lengths, and the same sequence at the same place."""
    if not torch.equal(one.batch_sizes, other.batch_sizes):
        return False
    if one.sorted_indices is other.sorted_indices or recording.listener() is not None:
        return True
    count = int(one.batch_sizes[0])
    orders = [torch.arange(count) if x is None else x.cpu() for x in (one.sorted_indices, other.sorted_indices)]
    return torch.equal(*orders)


def _check_steps(name: str, packed: PackedSequence) -> None:
    """Raises ValueError unless the data has a row for every step of every sequence."""
    steps, rows = int(packed.batch_sizes.sum()), packed.data.shape[0]
    if steps != rows:
        raise ValueError(
            f"the lengths of {name} add up to {steps} steps, and its data has {rows}: no length may exceed the padded "
            "length T of what pack_padded_sequence is given, which does not check it"
        )


def _start_at_end(one: Direction, last: Tensor, xs: Tensor) -> Direction:
    """Returns `one` with a reset to its initial states at each sequence's last step, where a backward loop begins."""
    end = torch.arange(xs.shape[0], device=xs.device)[:, None] == last
    if one.resets is None:
        return one._replace(resets=end, reset_states=one.states)
    begins = resets_of_reversed(one.resets, 0, last)
    states = []
    for first, new in zip(one.states, one.reset_states, strict=True):
        assert first is not None
        states.append(torch.where(end[..., None], first, torch.zeros_like(first) if new is None else new))
    return one._replace(resets=begins | end, reset_states=tuple(states))
