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
      input_size: D, the width of the input.
      hidden_size: H, the width of every layer and direction.
      num_layers: the number of layers; each runs over the outputs of the previous layer.
      bias: whether each direction of a layer has the biases `bias_ih_l{k}` and `bias_hh_l{k}`.
      batch_first: whether inputs are `[B, T, D]` or, by default, `[T, B, D]`. States have the same shape with both.
      dropout: the rate of the dropout on the outputs of every layer but the last while the module trains.
      bidirectional: whether each layer also runs from the last step to the first, with separate weights.
      proj_size: must be None: only an LSTM has a projection.
      device: the device of the parameters.
      dtype: the dtype of the parameters.
      precision: precision of float32 products in the time loop on a GPU: "tf32"; "tf32x3", which has the accuracy of
        float32; or None: "tf32" if `torch.backends.cuda.matmul` allows it and H is above 32, else "tf32x3".
      implementation: "triton" (the kernels, which need an NVIDIA GPU), "torch" (PyTorch operations), or None: the
        kernels where they can run, elsewhere PyTorch operations. A call raises NotImplementedError if the named one
        cannot run the input.
      num_blocks: N, the number of blocks (heads) of the recurrent weights. The H / N consecutive units of a block read
        the states of their own block alone, and all inputs. With N > 1, `weight_hh_l0` and its like, which have F rows
        otherwise, are `[N, F / N, H / N]`, the rows of a block ordered by gate. Their initial values are those of a
        module of H / N units: uniform between -1 / sqrt(H / N) and 1 / sqrt(H / N).

    Raises:
      ValueError: the precision or the implementation is unknown, `num_blocks` is not a positive integer that divides H,
        or `torch.nn` rejects an argument.
      TypeError: `hidden_size` is not an integer.

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
