"""The module `RNN`."""

from __future__ import annotations

import torch

from torch_bridge.cells import CellSpec
from torch_bridge.functional import Implementation
from torch_bridge.functional.rnn import cell_of
from torch_bridge.nn.recurrent import Device
from torch_bridge.nn.single_state import SingleStateModule
from torch_bridge.rnn_ops import Precision


class RNN(SingleStateModule):
    """`torch.nn.RNN` with episode resets.

    Args:
      input_size: D.
      hidden_size: H. All arguments not listed here are those of `torch.nn.RNN`.
      num_layers: see `torch.nn.RNN`.
      nonlinearity: see `torch.nn.RNN`.
      bias: see `torch.nn.RNN`.
      batch_first: see `torch.nn.RNN`.
      dropout: see `torch.nn.RNN`.
      bidirectional: see `torch.nn.RNN`.
      proj_size: must be None: only an LSTM has a projection.
      device: see `torch.nn.RNN`.
      dtype: see `torch.nn.RNN`.
      precision: see `GRU`.
      implementation: see `GRU`.
      num_blocks: see `GRU`.

    Raises:
      ValueError: see `GRU` and `torch.nn.RNN`.
      TypeError: see `torch.nn.RNN`.

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import RNN
      >>> rnn = RNN(3, 4, nonlinearity="relu")
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
        nonlinearity: str = "tanh",
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
        self.nonlinearity = nonlinearity
        cell_of(self.nonlinearity)  # raises ValueError if it is unknown
        super().__init__(
            f"RNN_{nonlinearity.upper()}", input_size, hidden_size, num_layers, bias, batch_first, dropout,
            bidirectional, device=device, dtype=dtype, precision=precision, implementation=implementation,
            num_blocks=num_blocks,
        )  # fmt: skip

    @property
    def _cell(self) -> CellSpec:
        """The cell, an entry of `torch_bridge.cells.CELLS`."""
        return cell_of(self.nonlinearity)
