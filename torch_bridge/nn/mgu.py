"""The module `MGU`."""

from __future__ import annotations

import torch
from torch.nn import Parameter

from torch_bridge import cells
from torch_bridge.cells import CellSpec
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional import Implementation
from torch_bridge.nn.gru import GRU
from torch_bridge.nn.recurrent import Device
from torch_bridge.nn.single_state import SingleStateModule
from torch_bridge.rnn_ops import Precision


@inherit_descriptions(GRU)
class MGU(SingleStateModule):
    """Minimal gated units with episode resets, in the form of `torch.nn.GRU`; `torch.nn` has no such module.

    Parameters have the names of those of `torch.nn.GRU`, with 2H rows instead of 3H, gates ordered f, n. Their initial
    values are uniform between -1 / sqrt(H) and 1 / sqrt(H).

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import MGU
      >>> rnn = MGU(3, 4)
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
            raise ValueError("proj_size argument is only supported for LSTM, not MGU")
        self._is_built = False
        # torch.nn.RNNBase accepts the modes of torch.nn only
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device,
            dtype=dtype, precision=precision, implementation=implementation,
        )  # fmt: skip
        self.mode, self._is_built = "MGU", True
        for name, w in [*self.named_parameters()]:
            setattr(self, name, Parameter(w.detach()[: cells.MGU.gates * self.hidden_size].clone()))
        self._init_flat_weights()
        self.reset_parameters()
        self.make_blocks(num_blocks)

    def reset_parameters(self) -> None:
        """Draws all parameters uniformly between -1 / sqrt(H) and 1 / sqrt(H)."""
        if self._is_built:  # else they have a GRU's rows still, and drawing those would take other random numbers
            super().reset_parameters()

    @property
    def _cell(self) -> CellSpec:
        """The cell, an entry of `torch_bridge.cells.CELLS`."""
        return cells.MGU
