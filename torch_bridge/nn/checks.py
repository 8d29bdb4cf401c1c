"""Checks of the arguments of a recurrent module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torch_bridge import op_common
from torch_bridge.cells import CellSpec
from torch_bridge.functional.checks import (
    check_reset_flags,
    check_reset_state,
    check_state_dtype,
    check_tensor,
    name_of_reset_state,
)
from torch_bridge.nn.stack import directions_of, widths_of


def check_tensors(
    rnn: Any, cell: CellSpec, input: Any, hx: tuple[Any, ...] | None, resets: Any, reset_states: Sequence[Any]
) -> None:
    """Raises ValueError unless the arguments of `forward` are tensors on one device; input and resets may be packed."""
    if hx is not None and len(hx) == 1 and isinstance(hx[0], (tuple, list)):
        raise ValueError(f"hx of {rnn.mode} must be one tensor, got {type(hx[0]).__name__}: only an LSTM has a pair")
    if isinstance(input, PackedSequence):
        input, resets = input.data, resets.data if isinstance(resets, PackedSequence) else None
    check_tensor("input", input, optional=False)
    for x in hx or ():
        _check_tensor("hx", x, input)
    if resets is not None:
        _check_tensor("resets", resets, input)
    for state, x in zip(cell.states, reset_states, strict=True):
        if x is not None:
            _check_tensor(name_of_reset_state(cell, state), x, input)


def _check_tensor(name: str, x: Any, input: Tensor) -> None:
    """Raises ValueError unless an argument is a tensor on the device of the input."""
    check_tensor(name, x, optional=False)
    if x.device != input.device:
        op_common.check_devices("the input", input, {name: x})


def check_states(rnn: Any, input: Tensor, hx: tuple[Tensor, ...] | None, batch_sizes: Any) -> None:
    """Raises the errors of `torch.nn` for the input and the initial states, and ValueError for dtypes of these."""
    if hx is None:
        rnn.check_input(input, batch_sizes)
        return
    rnn.check_forward_args(input, hx if len(hx) > 1 else hx[0], batch_sizes)
    for x in hx:
        check_state_dtype("hx", x, "the input", input)


def check_resets(
    rnn: Any, cell: CellSpec, outer: tuple[int, ...], batch: tuple[int, ...], resets: Any, reset_states: Sequence[Any]
) -> None:
    """Raises ValueError unless resets and reset states have shapes that `forward` accepts."""
    check_reset_flags(resets, outer, lambda: ", the time and batch axes of the input")
    count = rnn.num_layers * directions_of(rnn)
    for state, width, x in zip(cell.states, widths_of(rnn, cell), reset_states, strict=True):
        if x is not None:
            shapes = (count, width), (count, *batch, width), (count, *outer, width)
            check_reset_state(name_of_reset_state(cell, state), x, resets, shapes)
