"""Checks of the arguments of a recurrent module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torch_bridge.cells import CellSpec
from torch_bridge.functional.checks import (
    check_reset_flags,
    check_reset_state,
    check_state_dtype,
    check_tensor,
    name_of_reset_state,
)
from torch_bridge.nn.stack import directions_of, widths_of


def check_tensors(rnn: Any, input: Any, hx: tuple[Any, ...] | None) -> None:
    """Raises ValueError unless the input and the initial states are tensors, or the input is packed."""
    if not isinstance(input, PackedSequence):
        check_tensor("input", input, optional=False)
    if hx is None:
        return
    if len(hx) == 1 and isinstance(hx[0], (tuple, list)):
        raise ValueError(f"hx of {rnn.mode} must be one tensor, got {type(hx[0]).__name__}: only an LSTM has a pair")
    for x in hx:
        check_tensor("hx", x, optional=False)


def checked_states(rnn: Any, cell: CellSpec, input: Tensor, hx: Any, batch: int, batch_sizes: Any) -> Any:
    """Returns the initial states, zeros if `hx` is None. Raises the errors of `torch.nn`."""
    if hx is None:
        count = rnn.num_layers * directions_of(rnn)
        hx = tuple(input.new_zeros((count, batch, width)) for width in widths_of(rnn, cell))
    rnn.check_forward_args(input, hx if len(hx) > 1 else hx[0], batch_sizes)
    for x in hx:
        check_state_dtype("hx", x, "the input", input, rnn.weight_ih_l0)
    return hx


def check_resets(
    rnn: Any, cell: CellSpec, outer: tuple[int, ...], batch: tuple[int, ...], resets: Any, reset_states: Sequence[Any]
) -> None:
    """Raises ValueError unless resets and reset states are tensors with shapes that `forward` accepts."""
    check_reset_flags(resets, outer, ", the time and batch axes of the input")
    count = rnn.num_layers * directions_of(rnn)
    for state, width, x in zip(cell.states, widths_of(rnn, cell), reset_states, strict=True):
        name = name_of_reset_state(cell, state)
        check_reset_state(name, x)
        if x is None:
            continue
        if resets is None:
            raise ValueError("reset_state is given but resets is None: pass resets, or leave reset_state out")
        shapes = dict.fromkeys(((count, width), (count, *batch, width), (count, *outer, width)))
        if tuple(x.shape) not in shapes:
            *others, last = map(str, shapes)
            raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {tuple(x.shape)}")
