"""The module `NormGRU`."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_bridge.cells import CellSpec
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional import Direction, Implementation
from torch_bridge.functional.norm_gru import cell_of, check_constants, check_norm
from torch_bridge.functional.norm_weights import NormWeights, fold
from torch_bridge.nn.gru import GRU
from torch_bridge.nn.recurrent import Device
from torch_bridge.nn.single_state import SingleStateModule
from torch_bridge.rnn_ops import Precision


@inherit_descriptions(GRU)
class NormGRU(SingleStateModule):
    """The GRU of DreamerV3, whose gates see a norm of inputs and state, in the form of `torch.nn.GRU`.

    `torch.nn` has no such module. Weights and biases have the names and shapes of those of `torch.nn.GRU`, with gates
    ordered r, n, u. Layer k also has the scales of the norm, `scale_i_l{k}` for its inputs and `scale_h_l{k} [H]` for
    its state, and with `norm="layer"` the shifts `shift_i_l{k}` and `shift_h_l{k}`; those of a backward direction end
    in `_reverse`. Initial values are uniform between -1 / sqrt(H) and 1 / sqrt(H), but ones for scales and zeros for
    shifts. `functional.norm_gru` has the formula.

    Args:
      norm: "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance.
      update_bias: what is added to the update gate before its activation.
      num_blocks: must be 1, because the norm sees all units.

    Raises:
      ValueError: the norm, the precision or the implementation is unknown, there are several blocks, or `torch.nn`
        rejects an argument.

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import NormGRU
      >>> rnn = NormGRU(3, 4, norm="layer")
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
        norm: Literal["rms", "layer"] = "rms",
        epsilon: float = 1e-4,
        update_bias: float = -1.0,
        precision: Precision = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
    ) -> None:
        if proj_size is not None:
            raise ValueError("proj_size argument is only supported for LSTM, not NormGRU")
        cell_of(norm)  # raises ValueError if it is unknown
        check_constants(epsilon, update_bias)
        if num_blocks != 1:
            raise ValueError(
                f"num_blocks must be 1, because the norm of a NormGRU sees all units, got {num_blocks!r}: use GRU for "
                "blocks"
            )
        self.norm, self.epsilon, self.update_bias = norm, epsilon, update_bias
        # torch.nn.RNNBase accepts the modes of torch.nn only
        super().__init__(
            "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device,
            dtype=dtype, precision=precision, implementation=implementation,
        )  # fmt: skip
        self.mode = "NormGRU"
        for name, w in [*self.named_parameters()]:
            if name.startswith("weight"):  # weight_ih_l0 [3H, D] has scale_i_l0 [D]
                end = name.removeprefix("weight_ih").removeprefix("weight_hh")
                operand, width = name[len("weight_")], w.shape[1]
                setattr(self, f"scale_{operand}{end}", Parameter(w.new_ones(width)))
                if norm == "layer":
                    setattr(self, f"shift_{operand}{end}", Parameter(w.new_zeros(width)))

    def reset_parameters(self) -> None:
        """Draws weights and biases uniformly between -1 / sqrt(H) and 1 / sqrt(H); scales are ones, shifts zeros."""
        bound = 1 / math.sqrt(self.hidden_size)
        for name, x in self.named_parameters():
            if name.startswith("scale"):
                torch.nn.init.ones_(x)
            elif name.startswith("shift"):
                torch.nn.init.zeros_(x)
            else:
                torch.nn.init.uniform_(x, -bound, bound)

    def fold_norm(self, one: Direction, suffix: str, input: Tensor) -> Direction:
        """Returns a direction whose weights and bias contain the norm, given that of the parameters with a suffix.

        Raises ValueError unless the norm's parameters fit the others, and have the dtype and device of the input.
        """
        parameters = NormWeights(*(getattr(self, name + suffix, None) for name in NormWeights._fields))
        check_norm(self._cell, "the input", input, one, parameters, suffix)
        return fold(self._cell, one, parameters, self.update_bias)

    def extra_repr(self) -> str:
        """Returns the arguments as `torch.nn` shows them, and the norm."""
        return super().extra_repr() + f", norm={self.norm}"

    @property
    def _cell(self) -> CellSpec:
        """The cell, an entry of `torch_bridge.cells.CELLS`."""
        return cell_of(self.norm)
