"""The function `rnn`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torch_bridge.cells import SIMPLE_RELU, SIMPLE_TANH, CellSpec
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional.call import Call, Direction, Implementation
from torch_bridge.functional.gru import gru
from torch_bridge.functional.layer import run_direction
from torch_bridge.rnn_ops import Precision

# The cell of each nonlinearity.
CELLS = {"tanh": SIMPLE_TANH, "relu": SIMPLE_RELU}


def cell_of(nonlinearity: Any) -> CellSpec:
    """Returns the cell with a nonlinearity. Raises the error of `torch.nn.RNN` if there is none."""
    if nonlinearity not in (*CELLS,):  # it may have no hash
        raise ValueError(f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'.")
    return CELLS[nonlinearity]


@inherit_descriptions(gru)
def rnn(
    xs: Tensor,
    h0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    nonlinearity: str = "tanh",
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    reverse: bool = False,
    batch_first: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> tuple[Tensor, Tensor]:
    """Runs a simple RNN (Elman, 1990) over time, starting afresh wherever `resets` is nonzero.

    With f the nonlinearity, as in `torch.nn.RNN`:

        h = reset_state if resets[t] else h
        h' = f(W_ih x + b_ih + W_hh h + b_hh)

    Args:
      w_ih: `[H, D]`.
      w_hh: `[H, H]`, or `[N, H / N, H / N]` for N blocks, see `gru`.
      b_ih: `[H]` or None.
      b_hh: `[H]` or None.
      nonlinearity: "tanh" or "relu".

    Raises:
      ValueError: the nonlinearity is unknown; see also `gru`.

    Examples:
      >>> import torch
      >>> from torch_bridge import functional
      >>> xs, w_ih, w_hh = torch.randn(5, 2, 3), torch.randn(4, 3), torch.randn(4, 4)
      >>> ys, h_n = functional.rnn(xs, None, w_ih, w_hh, nonlinearity="relu")
      >>> ys.shape, h_n.shape
      (torch.Size([5, 2, 4]), torch.Size([2, 4]))
    """
    cell = cell_of(nonlinearity)
    one = Direction(w_ih, w_hh, b_ih, b_hh, None, (h0,), resets, (reset_state,))
    out = run_direction(Call(cell, xs, [one], reverse, batch_first, False, precision, implementation))
    return out.hs, out.last[0]
