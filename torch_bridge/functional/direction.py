"""One direction of a recurrent layer: its arguments and its results."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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


def blocks_of(w_hh: Tensor) -> int:
    """Returns the number of blocks of recurrent weights, 1 for a matrix."""
    return w_hh.shape[0] if w_hh.ndim == 3 else 1


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
