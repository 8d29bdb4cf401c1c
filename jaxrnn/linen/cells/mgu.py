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
      features: H. All attributes not listed here are those of `GRUCell` or Flax's.
      reset_gate: if False, which is another formula, Flax's own cell runs, and in an `RNN` it runs under `nn.scan`.
      implementation: as in `jaxrnn.mgu`; "triton" raises NotImplementedError for a cell that Flax runs.
    """

    @property
    def recurrence(self) -> str:
        """The name of the recurrence of `jaxrnn` that computes the cell."""
        return "mgu"

    @nn.compact
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
      features: H. All attributes not listed here are those of `GRU`.
      bias_init: the initializer of the biases of n, which is `activation_bias_init` of the cell.
      forget_bias_init: the initializer of the biases of the forget gate.
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
