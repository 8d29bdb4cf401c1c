"""The simple RNN (Elman): its cell, its stack and its entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
from jax import Array

from jaxrnn import modules
from jaxrnn.cells import SimpleParams
from jaxrnn.linen.fused_cell import CellEntry, FusedCell
from jaxrnn.linen.stack import FusedStack
from jaxrnn.modules import ReturnsCarry


class SimpleCell(FusedCell[Array], nn.SimpleCell):
    """`flax.linen.SimpleCell` computed by `jaxrnn.simple_rnn`, with the same parameters, initial values and results.

    Attributes:
      features: H.
      activation_fn: tanh or relu. With another function, Flax's own cell runs, and in an `RNN` it runs under `nn.scan`.
      kernel_init: as in `GRUCell`.
      recurrent_kernel_init: as in `GRUCell`.
      bias_init: as in `GRUCell`.
      dtype: the dtype of the matmul operands. None uses the dtype to which inputs, carry and parameters promote. The
        carry keeps its own dtype, whereas Flax's cell casts it to `dtype`.
      param_dtype: as in `GRUCell`.
      carry_init: as in `GRUCell`.
      residual: if True, which is another formula, Flax's own cell runs, and in an `RNN` it runs under `nn.scan`.
      precision: as in `GRUCell`.
      implementation: as in `jaxrnn.simple_rnn`; "triton" raises NotImplementedError for a cell that Flax runs.
      num_blocks: as in `GRUCell`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import SimpleCell
      >>> cell, x = SimpleCell(features=4, activation_fn=jax.nn.relu), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), carry, x)
      >>> carry, y = cell.apply(variables, carry, x)
      >>> y.shape
      (2, 4)
    """

    @property
    def recurrence(self) -> str:
        """The name of the recurrence of `jaxrnn` that computes the cell."""
        return "simple_relu" if modules.is_relu(self.activation_fn) else "simple_tanh"

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int) -> SimpleParams:
        """Returns the parameters for `jaxrnn.simple_rnn`, creating missing ones."""
        b: Any  # a gate without a bias has None
        w_ih, b = self.gate_params("i", input_features, hidden, use_bias=True)
        w_hh, _ = self.gate_params("h", hidden, hidden, use_bias=False)
        return SimpleParams(w_ih=w_ih, w_hh=w_hh, b=b)


class SimpleRNN(FusedStack[ReturnsCarry]):
    """A stack of simple RNNs like `torch.nn.RNN`: `GRU` with the cell `SimpleCell`.

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
      activation_fn: tanh or relu; another function raises NotImplementedError.
      num_blocks: as in `GRU`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import SimpleRNN
      >>> rnn, xs, resets = SimpleRNN(4, activation_fn=jax.nn.relu), jnp.ones((2, 5, 3)), jnp.zeros((2, 5))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> rnn.apply(variables, xs, resets=resets).shape
      (2, 5, 4)
    """

    activation_fn: Callable[[Array], Array] = nn.tanh

    _cell = SimpleCell

    @nn.nowrap
    def check(self, reverse: bool) -> None:
        """Raises ValueError unless the attributes describe a valid stack, NotImplementedError for an activation."""
        super().check(reverse)
        modules.check_function(self.caller(), "activation_fn", self.activation_fn)
        if (reason := reason_to_scan(self.make_cell(parent=None))) is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: a stack cannot run {reason}; use one RNN per layer instead"
            )

    @nn.nowrap
    def cell_options(self) -> dict[str, Any]:
        """Returns the attributes of every cell."""
        return super().cell_options() | {"activation_fn": self.activation_fn}


def reason_to_scan(cell: Any) -> str | None:
    """Returns why a cell cannot be fused, or None."""
    if not modules.is_tanh(cell.activation_fn) and not modules.is_relu(cell.activation_fn):
        return "a cell whose activation_fn is neither tanh nor relu"
    return "a SimpleCell with residual=True" if cell.residual else None


ENTRY = CellEntry(
    replacements={nn.SimpleCell: SimpleCell}, cell_types={"simple": SimpleCell}, reason_to_scan=reason_to_scan
)
