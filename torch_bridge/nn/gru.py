"""The module `GRU`."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torch_bridge import cells
from torch_bridge.functional import Implementation
from torch_bridge.nn.forward import forward
from torch_bridge.nn.recurrent import Device, RecurrentModule
from torch_bridge.rnn_ops import Precision


class GRU(RecurrentModule):
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

    Example:
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
          input: `[T, B, D]` (`[B, T, D]` if `batch_first`), `[T, D]`, or a `PackedSequence`, in the dtype of the
            weights.
          hx: `[layers * directions, B, H]` (`[layers * directions, H]` if unbatched), in the dtype of the input or in
            float32; or None for zeros.
          resets: `[T, B]` (`[B, T]`, `[T]`), any dtype; nonzero at the first step of an episode, that is, the
            *previous* step's done. With packed inputs, a `PackedSequence` with the same lengths and order, whose data
            has an entry for every step. A backward direction starts an episode at the episode's last step.
          reset_state: the state at the start of an episode: None (zeros), `[layers * directions, H]`, a value for each
            sequence in the shape of `hx`, or a value for every step in the shape `[layers * directions, T, B, H]`
            (`[..., B, T, H]`, `[..., T, H]`). It is differentiable.

        Returns:
          `(output, h_n)`, see `torch.nn.GRU`: `[T, B, directions * H]` (`[B, T, ...]`, `[T, ...]`, packed) and
          `[layers * directions, B, H]`, in the dtype of `hx`.

        Raises:
          ValueError: resets or reset states have other shapes or dtypes, or lengths of a `PackedSequence` exceed the
            steps of its data; see also `torch.nn.GRU`.
          RuntimeError: see `torch.nn.GRU`.
          NotImplementedError: see `torch_bridge.functional.gru`; also for packed inputs with a reset state for every
            step.
        """
        ys, (h_n,) = forward(self, cells.GRU, input, None if hx is None else (hx,), resets, (reset_state,))
        return ys, h_n
