"""The module `RNN`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torch_bridge.functional.rnn import cell_of
from torch_bridge.nn.forward import forward
from torch_bridge.nn.recurrent import RecurrentModule


class RNN(RecurrentModule):
    """`torch.nn.RNN` with episode resets.

    Args:
      args: the arguments of `torch.nn.RNN`: those of `GRU`, with `nonlinearity="tanh"` (or `"relu"`) after
        `num_layers`.
      precision: see `GRU`.
      implementation: see `GRU`.
      num_blocks: see `GRU`.
      kwargs: see `args`.

    Raises:
      ValueError: see `GRU` and `torch.nn.RNN`.
      TypeError: see `torch.nn.RNN`.

    Example:
      >>> import torch
      >>> from torch_bridge.nn import RNN
      >>> rnn = RNN(3, 4, nonlinearity="relu")
      >>> xs, resets = torch.randn(5, 2, 3), torch.zeros(5, 2)
      >>> ys, h_n = rnn(xs, resets=resets)
      >>> ys, h_n = rnn(xs, h_n, resets=resets)  # goes on from there
      >>> ys.shape
      torch.Size([5, 2, 4])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "proj_size" in kwargs:
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        if len(args) > 3:
            self.nonlinearity, args = args[3], args[:3] + args[4:]
        else:
            self.nonlinearity = kwargs.pop("nonlinearity", "tanh")
        cell_of(self.nonlinearity)  # raises ValueError if it is unknown
        super().__init__(f"RNN_{self.nonlinearity.upper()}", *args, **kwargs)

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
          `(output, h_n)`, see `torch.nn.RNN`.

        Raises:
          ValueError: see `GRU.forward`.
          RuntimeError: see `torch.nn.RNN`.
          NotImplementedError: see `GRU.forward`.
        """
        if not isinstance(input, PackedSequence) and input.dim() not in (2, 3):  # in the words of torch.nn.RNN
            raise ValueError(f"RNN: Expected input to be 2D or 3D, got {input.dim()}D tensor instead")
        cell = cell_of(self.nonlinearity)
        ys, (h_n,) = forward(self, cell, input, None if hx is None else (hx,), resets, (reset_state,))
        return ys, h_n
