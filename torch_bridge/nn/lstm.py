"""The module `LSTM`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bridge import cells
from torch_bridge.functional.lstm import split_state_pair
from torch_bridge.nn.forward import forward
from torch_bridge.nn.recurrent import RecurrentModule


class LSTM(RecurrentModule):
    """`torch.nn.LSTM` with episode resets.

    Args:
      args: the arguments of `torch.nn.LSTM`: those of `GRU`, and `proj_size=0`.
      precision: see `GRU`.
      implementation: see `GRU`.
      num_blocks: see `GRU`; more than 1 excludes `proj_size`.
      kwargs: see `args`.

    Raises:
      ValueError: see `GRU` and `torch.nn.LSTM`.
      TypeError: see `torch.nn.LSTM`.

    Example:
      >>> import torch
      >>> from torch_bridge.nn import LSTM
      >>> rnn = LSTM(3, 4)
      >>> xs, resets = torch.randn(5, 2, 3), torch.zeros(5, 2)
      >>> ys, state = rnn(xs, resets=resets)
      >>> ys, state = rnn(xs, state, resets=resets)  # goes on from there
      >>> ys.shape
      torch.Size([5, 2, 4])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)

    get_expected_cell_size = torch.nn.LSTM.get_expected_cell_size
    check_forward_args = torch.nn.LSTM.check_forward_args  # type: ignore[assignment]  # as in torch.nn
    permute_hidden = torch.nn.LSTM.permute_hidden  # type: ignore[assignment]

    def forward(
        self,
        input: Any,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        resets: Any = None,
        reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> tuple[Any, tuple[Tensor, Tensor]]:
        """Runs the stack, starting afresh wherever `resets` is nonzero.

        Args:
          input: see `GRU.forward`.
          hx: `(h, c)`, each like `hx` of `GRU.forward`; the width of h is `proj_size` if that is given.
          resets: see `GRU.forward`.
          reset_state: None (zeros) or `(h, c)`, each like `reset_state` of `GRU.forward`.

        Returns:
          `(output, (h_n, c_n))`, see `torch.nn.LSTM`.

        Raises:
          ValueError: see `GRU.forward`.
          RuntimeError: see `torch.nn.LSTM`.
          NotImplementedError: see `GRU.forward`.
        """
        if hx is not None:
            hx = split_state_pair("hx", hx)
        ys, (h_n, c_n) = forward(self, cells.LSTM, input, hx, resets, split_state_pair("reset_state", reset_state))
        return ys, (h_n, c_n)
