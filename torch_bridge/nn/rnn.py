"""The module `RNN`."""

from __future__ import annotations

import torch

from torch_bridge.cells import CellSpec
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional import Implementation
from torch_bridge.functional.rnn import cell_of
from torch_bridge.nn.gru import GRU
from torch_bridge.nn.recurrent import Device
from torch_bridge.nn.single_state import SingleStateModule
from torch_bridge.rnn_ops import Precision


@inherit_descriptions(GRU)
class RNN(SingleStateModule):
    """`torch.nn.RNN` with episode resets.

    Args:
      nonlinearity: "tanh" or "relu".

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
