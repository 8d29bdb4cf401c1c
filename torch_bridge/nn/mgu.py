"""The module `MGU`."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from torch_bridge import cells
from torch_bridge.functional import Implementation
from torch_bridge.nn.forward import forward
from torch_bridge.nn.recurrent import Device, RecurrentModule
from torch_bridge.rnn_ops import Precision


class MGU(RecurrentModule):
    """Minimal gated units with episode resets, in the form of `torch.nn.GRU`; `torch.nn` has no such module.

    Parameters have the names of those of `torch.nn.GRU`, with 2H rows instead of 3H, gates ordered f, n. Their initial
    values are uniform between -1 / sqrt(H) and 1 / sqrt(H).

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
      precision: see `GRU`.
      implementation: see `GRU`.

    Raises:
      ValueError: see `torch.nn.GRU`.
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
    ) -> None:
        if proj_size is not None:
            raise ValueError("proj_size argument is only supported for LSTM, not MGU")
        # torch.nn.RNNBase accepts the modes of torch.nn only
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device,
            dtype=dtype, precision=precision, implementation=implementation,
        )  # fmt: skip
        self.mode = "MGU"
        for name, w in [*self.named_parameters()]:
            setattr(self, name, Parameter(w.detach()[: cells.MGU.gates * self.hidden_size].clone()))
        self._init_flat_weights()

    @overload
    def forward(
        self,
        input: Tensor,
        hx: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        reset_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: Tensor | None = None,
        *,
        resets: PackedSequence | None = None,
        reset_state: Tensor | None = None,
    ) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self, input: Any, hx: Tensor | None = None, *, resets: Any = None, reset_state: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """Runs the stack, starting afresh wherever `resets` is nonzero.

        Args:
          input: see `GRU.forward`.
          hx: see `GRU.forward`.
          resets: see `GRU.forward`.
          reset_state: see `GRU.forward`.

        Returns:
          `(output, h_n)`, see `torch.nn.GRU`.

        Raises:
          ValueError: see `GRU.forward`.
          RuntimeError: see `torch.nn.GRU`.
          NotImplementedError: see `GRU.forward`.
        """
        ys, (h_n,) = forward(self, cells.MGU, input, None if hx is None else (hx,), resets, (reset_state,))
        return ys, h_n
