"""The LSTM: its cells, its stack and its entry."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxrnn import modules
from jaxrnn.cells import LSTMParams
from jaxrnn.linen.fused_cell import CellEntry, DenseParams, FusedCell
from jaxrnn.linen.stack import FusedStack
from jaxrnn.modules import ReturnsCarry


class FusedLSTMCell(FusedCell[tuple[Array, Array]]):
    """The base class of the two LSTM cells."""

    @property
    def recurrence(self) -> str:
        """The name of the recurrence of `jaxrnn` that computes the cell."""
        return "lstm"

    @nn.compact
    def packed_params(self, input_features: int, hidden: int, proj_size: int | None = None) -> LSTMParams:
        """Returns the parameters for `jaxrnn.lstm`, creating missing ones. A projection adds `proj` to Flax's names."""
        width = hidden if proj_size is None else proj_size
        inputs = [self.gate_params(f"i{gate}", input_features, hidden, use_bias=False) for gate in "ifgo"]
        recurrent = [self.gate_params(f"h{gate}", width, hidden, use_bias=True) for gate in "ifgo"]
        (w_ih, _), (w_hh, b) = zip(*inputs, strict=True), zip(*recurrent, strict=True)
        params = LSTMParams(*(jnp.concatenate(x, axis=-1) for x in (w_ih, w_hh, b)))
        if proj_size is None:
            return params
        dense = DenseParams(proj_size, False, self.kernel_init, self.bias_init, self.param_dtype, name="proj")
        return params._replace(w_hr=dense(hidden)[0])


class LSTMCell(FusedLSTMCell, nn.LSTMCell):
    """`flax.linen.LSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Attributes:
      features: H. All attributes are those of `GRUCell`.
    """


class OptimizedLSTMCell(FusedLSTMCell, nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell` computed by `jaxrnn.lstm`. It differs from `LSTMCell` of this module only in name.

    Attributes:
      features: H. All attributes are those of `GRUCell`.
    """


class LSTM(FusedStack[ReturnsCarry]):
    """A stack of LSTMs like `torch.nn.LSTM`: `GRU` with the cell `OptimizedLSTMCell` and carries `(c, h)`.

    Attributes:
      features: H. All attributes not listed here are those of `GRU`.
      proj_size: P, the width to which `layers_{k}/proj` projects hidden states, and so outputs; c stays H wide. None
        means no projection. The weight is `params.w_hr` in `jaxrnn.lstm`. It excludes `num_blocks` > 1.
    """

    proj_size: int | None = None

    _cell = OptimizedLSTMCell

    @nn.nowrap
    def check(self, reverse: bool) -> None:
        """Raises ValueError unless the attributes describe a valid stack."""
        if self.proj_size is not None:
            modules.check_sizes(self, "proj_size")
        modules.check_blocks_without_projection(self.caller(), self.num_blocks, self.proj_size)
        super().check(reverse)

    @nn.nowrap
    def widths(self) -> tuple[int, ...]:
        """Returns the widths of c and h."""
        return self.features, self.features if self.proj_size is None else self.proj_size

    @nn.nowrap
    def packed_params(self, cell: Any, input_features: int) -> LSTMParams:
        """Returns the parameters of one cell, creating missing ones."""
        return cell.packed_params(input_features, self.features, self.proj_size)


ENTRY = CellEntry(
    replacements={nn.LSTMCell: LSTMCell, nn.OptimizedLSTMCell: OptimizedLSTMCell},
    cell_types={"lstm": LSTMCell, "optimized_lstm": OptimizedLSTMCell, "optimised_lstm": OptimizedLSTMCell},
    reason_to_scan=modules.reason_to_scan_gates,
)
