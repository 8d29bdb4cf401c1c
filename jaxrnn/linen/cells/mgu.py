"""The minimal gated unit: its cell, its stack and its entry."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax.typing import Initializer
from jax import Array

from jaxrnn import modules
from jaxrnn.cells import MGUParams
from jaxrnn.linen.fused_cell import CellEntry, FusedCell
from jaxrnn.linen.stack import FusedStack
from jaxrnn.modules import ReturnsCarry


class MGUCell(FusedCell[Array], nn.MGUCell):
    """`flax.linen.MGUCell` computed by `jaxrnn.mgu`, with the same parameters, initial values and results.

    Attributes:
      features: H.
      gate_fn: as in `GRUCell`.
      activation_fn: as in `GRUCell`.
      kernel_init: as in `GRUCell`.
      recurrent_kernel_init: as in `GRUCell`.
      forget_bias_init: the initializer of the biases of the forget gate.
      activation_bias_init: the initializer of the biases of n.
      dtype: as in `GRUCell`.
      param_dtype: as in `GRUCell`.
      carry_init: as in `GRUCell`.
      reset_gate: if False, which is another formula, Flax's own cell runs, and in an `RNN` it runs under `nn.scan`.
      precision: as in `GRUCell`.
      implementation: as in `jaxrnn.mgu`; "triton" raises NotImplementedError for a cell that Flax runs.
      num_blocks: as in `GRUCell`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import MGUCell
      >>> cell, x = MGUCell(features=4), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), carry, x)
      >>> carry, y = cell.apply(variables, carry, x)
      >>> y.shape
      (2, 4)
    """

    @property
    def recurrence(self) -> str:
        """The name of the recurrence of `jaxrnn` that computes the cell."""
        return "mgu"

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int) -> MGUParams:
        """Returns the parameters for `jaxrnn.mgu`, creating missing ones. The cell has no bias b_hf."""
        inits = {"f": self.forget_bias_init, "n": self.activation_bias_init}
        inputs = [self.gate_params(f"i{gate}", input_features, hidden, True, init) for gate, init in inits.items()]
        recurrent = [self.gate_params(f"h{gate}", hidden, hidden, gate == "n", inits["n"]) for gate in inits]
        kernels, biases = zip(*inputs, strict=True)
        recurrent_kernels, (_, b_hn) = zip(*recurrent, strict=True)
        return MGUParams(
            w_ih=jnp.concatenate(kernels, axis=-1),
            w_hh=jnp.concatenate(recurrent_kernels, axis=-1),
            b_ih=jnp.concatenate(biases, axis=-1),
            b_hn=b_hn,
        )


class MGU(FusedStack[ReturnsCarry]):
    """A stack of minimal gated units: `GRU` with the cell `MGUCell`.

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
      bias_init: the initializer of the biases of n, which is `activation_bias_init` of the cell.
      carry_init: as in `GRU`.
      precision: as in `GRU`.
      implementation: as in `GRU`.
      remat: as in `GRU`.
      norm: as in `GRU`.
      forget_bias_init: the initializer of the biases of the forget gate.
      num_blocks: as in `GRU`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import MGU
      >>> rnn, xs, resets = MGU(4, bidirectional=True), jnp.ones((2, 5, 3)), jnp.zeros((2, 5))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> rnn.apply(variables, xs, resets=resets).shape  # of both directions
      (2, 5, 8)
    """

    forget_bias_init: Initializer = nn.initializers.ones

    _cell = MGUCell

    @nn.nowrap
    def cell_options(self) -> dict[str, Any]:
        """Returns the attributes of every cell."""
        options = super().cell_options()
        inits = {"forget_bias_init": self.forget_bias_init, "activation_bias_init": options.pop("bias_init")}
        return options | inits


def reason_to_scan(cell: Any) -> str | None:
    """Returns why a cell cannot be fused, or None."""
    return modules.reason_to_scan_gates(cell) or (None if cell.reset_gate else "an MGUCell with reset_gate=False")


ENTRY = CellEntry(replacements={nn.MGUCell: MGUCell}, cell_types={"mgu": MGUCell}, reason_to_scan=reason_to_scan)
