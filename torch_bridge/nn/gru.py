"""The module `GRU`."""

from __future__ import annotations

import torch

from torch_bridge import cells
from torch_bridge.cells import CellSpec
from torch_bridge.functional import Implementation
from torch_bridge.nn.recurrent import Device
from torch_bridge.nn.single_state import SingleStateModule
from torch_bridge.rnn_ops import Precision


class GRU(SingleStateModule):
    """`torch.nn.GRU` with episode resets.

    Args:
      input_size: D.
      hidden_size: H. All arguments not listed here are those of `torch.nn.GRU`.
      num_layers: see `torch.nn.GRU`.
      bias: see `torch.nn.GRU`.
      batch_first: see `torch.nn.GRU`.
      dropout: see `torch.nn.GRU`.
      bidirectional: see `torch.nn.GRU`.
      proj_size: must be None: only an LSTM has a projection.
      device: see `torch.nn.GRU`.
      dtype: see `torch.nn.GRU`.
      precision: precision of float32 products in the time loop, see `torch_bridge.functional.gru`.
      implementation: see `torch_bridge.functional.gru`.
      num_blocks: N, the number of blocks (heads) of the recurrent weights, see `w_hh` of `torch_bridge.functional.gru`.
        With N > 1, `weight_hh_l0` and its like are `[N, 3H / N, H / N]`. Their initial values are uniform between
        -1 / sqrt(H / N) and 1 / sqrt(H / N), as in a module of H / N units.

    Raises:
      ValueError: the precision or the implementation is unknown, or `num_blocks` is not a positive integer that
        divides H; see also `torch.nn.GRU`.
      TypeError: see `torch.nn.GRU`.

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import GRU
      >>> rnn = GRU(3, 4, num_layers=2)
      >>> xs, resets = torch.randn(5, 2, 3), torch.zeros(5, 2)
      >>> ys, h_n = rnn(xs, resets=resets)
      >>> ys, h_n = rnn(xs, h_n, resets=resets)  # goes on from there
      >>> ys.shape
      torch.Size([5, 2, 4])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
    ) -> None:
        if proj_size is not None:
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device,
            dtype=dtype, precision=precision, implementation=implementation, num_blocks=num_blocks,
        )  # fmt: skip

    @property
    def _cell(self) -> CellSpec:
        """The cell, an entry of `torch_bridge.cells.CELLS`."""
        return cells.GRU
