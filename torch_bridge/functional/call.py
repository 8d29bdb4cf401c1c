"""A call of a layer: its arrays and options, made where arguments are checked and passed whole; and its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from torch_bridge.cells import CellSpec
from torch_bridge.rnn_ops import Precision

Implementation = Literal["triton", "torch"] | None
"""The type of the argument `implementation`, which `gru` describes."""


class Direction(NamedTuple):
    """The weights, initial states and resets of one direction of a layer.

    Attributes:
      w_ih: `[gates * H, D]`.
      w_hh: `[gates * H, H]`; `[4H, P]` with a projection; `[N, gates * H / N, H / N]` for N blocks.
      b_ih: `[gates * H]` or None.
      b_hh: `[gates * H]` or None.
      w_hr: `[P, H]`, the projection of an LSTM, or None.
      states: `(h0,)` or `(h0, c0)`, each `[*batch, width]` or None for zeros.
      resets: `[T, *batch]` (`[*batch, T]`) or None.
      reset_states: for each state None (zeros), `[width]`, `[*batch, width]`, or a value for every step.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None
    states: tuple[Tensor | None, ...]
    resets: Tensor | None
    reset_states: tuple[Tensor | None, ...]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Returns the arrays in one tuple."""
        return (*self[:5], *self.states, self.resets, *self.reset_states)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor | None], states: int) -> Direction:
        """Returns the direction, with so many states, whose `tensors()` these are."""
        of_states, (resets, *reset_states) = tensors[5 : 5 + states], tensors[5 + states :]
        return cls._make((*tensors[:5], tuple(of_states), resets, tuple(reset_states)))


class Call(NamedTuple):
    """The arrays and the options of a call of a layer.

    Attributes:
      cell: an entry of the cell table.
      xs: `[T, *batch, D]`, or `[*batch, T, D]` if `batch_first`; shared by the directions.
      directions: one, or two with the same shapes.
      reverse: whether a single direction runs from the last step to the first.
      batch_first: the layout of every array with a time axis.
      cells: whether to return the cell states of all steps.
      precision: see `gru`.
      implementation: see `gru`.
      epsilon: what the norm of the cell adds to the variance, if it has a norm. The weights of each direction are then
        those that `norm_weights.fold` returns.
    """

    cell: CellSpec
    xs: Tensor
    directions: Sequence[Direction]
    reverse: bool = False
    batch_first: bool = False
    cells: bool = False
    precision: Precision = None
    implementation: Implementation = None
    epsilon: float = 0.0


class DirectionResult(NamedTuple):
    """The results of one direction of a layer.

    Attributes:
      hs: the hidden states of all steps, `[T, *batch, width]` (`[*batch, T, width]`).
      cs: the cell states of all steps, or None if they were not requested.
      last: the last of each state, `[*batch, width]`.
    """

    hs: Tensor
    cs: Tensor | None
    last: tuple[Tensor, ...]
