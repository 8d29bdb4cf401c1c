"""The module `LSTM`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torch_bridge import cells
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional import Implementation
from torch_bridge.functional.lstm import split_state_pair
from torch_bridge.nn.forward import forward
from torch_bridge.nn.gru import GRU
from torch_bridge.nn.recurrent import Device, RecurrentModule
from torch_bridge.nn.single_state import SingleStateModule
from torch_bridge.rnn_ops import Precision


@inherit_descriptions(GRU)
class LSTM(RecurrentModule):
    """`torch.nn.LSTM` with episode resets.

    Args:
      proj_size: P, the width to which hidden states are projected; 0 for no projection.
      num_blocks: N, the number of blocks (heads) of the recurrent weights. The H / N consecutive units of a block read
        the states of their own block alone, and all inputs. With N > 1, `weight_hh_l0` and its like are
        `[N, 4H / N, H / N]`, and their initial values are those of a module of H / N units. It excludes `proj_size`.

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import LSTM
      >>> rnn = LSTM(3, 4)
      >>> xs, resets = torch.randn(5, 2, 3), torch.zeros(5, 2)
      >>> ys, state = rnn(xs, resets=resets)
      >>> ys, state = rnn(xs, state, resets=resets)  # goes on from there
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
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
    ) -> None:
        super().__init__(
            "LSTM", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size,
            device=device, dtype=dtype, precision=precision, implementation=implementation, num_blocks=num_blocks,
        )  # fmt: skip

    get_expected_cell_size = torch.nn.LSTM.get_expected_cell_size
    check_forward_args = torch.nn.LSTM.check_forward_args  # type: ignore[assignment]  # as in torch.nn
    permute_hidden = torch.nn.LSTM.permute_hidden  # type: ignore[assignment]

    if TYPE_CHECKING:

        @overload  # type: ignore[override]  # its states are pairs
        def __call__(
            self,
            input: Tensor,
            hx: tuple[Tensor, Tensor] | None = None,
            *,
            resets: Tensor | None = None,
            reset_state: tuple[Tensor | None, Tensor | None] | None = None,
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...

        @overload
        def __call__(
            self,
            input: PackedSequence,
            hx: tuple[Tensor, Tensor] | None = None,
            *,
            resets: PackedSequence | None = None,
            reset_state: tuple[Tensor | None, Tensor | None] | None = None,
        ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102

    @overload
    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        resets: Tensor | None = None,
        reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...

    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        resets: PackedSequence | None = None,
        reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]: ...

    @inherit_descriptions(SingleStateModule.forward)
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
          hx: `(h, c)`, each `[layers * directions, B, H]` (`[layers * directions, H]` if unbatched), in the dtype of
            the input or in float32; or None for zeros. The width of h is `proj_size` if that is given.
          reset_state: `(h, c)` at the start of an episode: None (zeros), or a pair of None or arrays, each
            `[layers * directions, H]`, a value for each sequence in the shape of `hx`, or a value for every step in the
            shape `[layers * directions, T, B, H]` (`[..., B, T, H]`, `[..., T, H]`). It is differentiable.

        Returns:
          `(output, (h_n, c_n))`, the hidden states of the last layer, `[T, B, directions * H]` (`[B, T, ...]`,
          `[T, ...]`, packed), and the last states, in the shape and the dtype of `hx`.
        """
        if hx is not None:
            hx = split_state_pair("hx", hx)
        ys, (h_n, c_n) = forward(self, cells.LSTM, input, hx, resets, split_state_pair("reset_state", reset_state))
        return ys, (h_n, c_n)
