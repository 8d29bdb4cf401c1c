"""The LSTM: its cells, its stack and its entry."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxrnn import modules
from jaxrnn.cells import LSTMParams
from jaxrnn.linen.fused_cell import CellEntry, FusedCell
from jaxrnn.linen.stack import FusedStack
from jaxrnn.modules import ReturnsCarry


class FusedLSTMCell(FusedCell[tuple[Array, Array]]):
    """The base class of the two LSTM cells."""

    @property
    def recurrence(self) -> str:
        """The name of the recurrence of `jaxrnn` that computes the cell."""
        return "lstm"

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int, proj_size: int | None = None) -> LSTMParams:
        """Returns the parameters for `jaxrnn.lstm`, creating missing ones. A projection adds `proj` to Flax's names."""
        width = hidden if proj_size is None else proj_size
        inputs = [self.gate_params(f"i{gate}", input_features, hidden, use_bias=False) for gate in "ifgo"]
        recurrent = [self.gate_params(f"h{gate}", width, hidden, use_bias=True) for gate in "ifgo"]
        (w_ih, _), (w_hh, b) = zip(*inputs, strict=True), zip(*recurrent, strict=True)
        params = LSTMParams(*(jnp.concatenate(x, axis=-1) for x in (w_ih, w_hh, b)))
        if proj_size is None:
            return params
        return params._replace(w_hr=self.layer_param("proj", "kernel", self.kernel_init, (hidden, proj_size)))


class LSTMCell(FusedLSTMCell, nn.LSTMCell):
    """`flax.linen.LSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Attributes:
      features: H.
      gate_fn: as in `GRUCell`.
      activation_fn: as in `GRUCell`.
      kernel_init: as in `GRUCell`.
      recurrent_kernel_init: as in `GRUCell`.
      bias_init: as in `GRUCell`.
      dtype: as in `GRUCell`.
      param_dtype: as in `GRUCell`.
      carry_init: as in `GRUCell`.
      precision: as in `GRUCell`.
      implementation: as in `GRUCell`.
      num_blocks: as in `GRUCell`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import LSTMCell
      >>> cell, x = LSTMCell(features=4), jnp.ones((2, 3))
      >>> c, h = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), (c, h), x)
      >>> (c, h), y = cell.apply(variables, (c, h), x)
      >>> c.shape, h.shape, y.shape
      ((2, 4), (2, 4), (2, 4))
    """


class OptimizedLSTMCell(FusedLSTMCell, nn.OptimizedLSTMCell):
    """`flax.linen.OptimizedLSTMCell` computed by `jaxrnn.lstm`. It differs from `LSTMCell` of this module only in name.

    Attributes:
      features: H.
      gate_fn: as in `GRUCell`.
      activation_fn: as in `GRUCell`.
      kernel_init: as in `GRUCell`.
      recurrent_kernel_init: as in `GRUCell`.
      bias_init: as in `GRUCell`.
      dtype: as in `GRUCell`.
      param_dtype: as in `GRUCell`.
      carry_init: as in `GRUCell`.
      precision: as in `GRUCell`.
      implementation: as in `GRUCell`.
      num_blocks: as in `GRUCell`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import OptimizedLSTMCell
      >>> cell, x = OptimizedLSTMCell(features=4), jnp.ones((2, 3))
      >>> c, h = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), (c, h), x)
      >>> (c, h), y = cell.apply(variables, (c, h), x)
      >>> c.shape, h.shape, y.shape
      ((2, 4), (2, 4), (2, 4))
    """


class LSTM(FusedStack[ReturnsCarry]):
    """A stack of LSTMs like `torch.nn.LSTM`: `GRU` with the cell `OptimizedLSTMCell` and carries `(c, h)`.

    Attributes:
      features: H.
      num_layers: as in `GRU`.
      dropout_rate: as in `GRU`.
      bidirectional: as in `GRU`.
      time_major: as in `GRU`.
      return_carry: as in `GRU`.
      reverse: as in `GRU`.
      keep_order: as in `GRU`.
      deterministic: as in `GRU`.
      learned_carry: as in `GRU`.
      dtype: as in `GRU`.
      param_dtype: as in `GRU`.
      kernel_init: as in `GRU`.
      recurrent_kernel_init: as in `GRU`.
      bias_init: as in `GRU`.
      carry_init: as in `GRU`.
      precision: as in `GRU`.
      implementation: as in `GRU`.
      remat: as in `GRU`.
      norm: as in `GRU`.
      proj_size: P, the width to which `layers_{k}/proj` projects hidden states, and so outputs; c stays H wide. None
        means no projection. The weight is `params.w_hr` in `jaxrnn.lstm`. It excludes `num_blocks` > 1.
      num_blocks: as in `GRU`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import LSTM
      >>> rnn, xs, resets = LSTM(4, num_layers=2, return_carry=True), jnp.ones((2, 5, 3)), jnp.zeros((2, 5))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> carry, ys = rnn.apply(variables, xs, resets=resets)
      >>> (c, h), second = carry  # a pair for each layer
      >>> ys.shape, c.shape, h.shape
      ((2, 5, 4), (2, 4), (2, 4))
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
