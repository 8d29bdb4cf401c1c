"""Runs a step of any cell with its residuals, as the forward kernels do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxrnn.cells import base, norm
from jaxrnn.numerics import broadcast_to_rank

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells.base import Cell, States


def run_step(
    cell: Cell, xp: Array, hp: Array, biases: Mapping[str, Array], states: States,
    statistics: Mapping[str, Array], norm_width: int,
) -> tuple[States, dict[str, Array]]:  # fmt: skip
    """Returns the states after a step and, by name, its residuals; XLA drops those that are not used.

    Args:
      cell: the cell.
      xp: the input projection, `[..., gates * H]`.
      hp: the hidden product, `[..., gates * H]`.
      biases: what is added after the products, by name: "b_hn" `[H]`, the bias of the hidden product of a last gate
        that is separate, as the GRU's; "bias" `[gates * H]`, which is added after a norm. With "w_sum" `[gates * H]`,
        the sums of `w_hh`, a LayerNorm's mean of the inputs is subtracted from the state too; see `norm`.
      states: the states before the step, `[..., H]`; the first one is h.
      statistics: for a norm, what `norm.input_statistics` returns for the inputs.
      norm_width: for a norm, D + H, the number of elements of `[x, h]`.
    """
    if "w_sum" in biases:
        xp = xp - statistics["x_mean"] * broadcast_to_rank(biases["w_sum"], xp)
    # x_last is the input projection of a separate last gate, else None
    gates, x_last = base.add_gates(cell, xp, hp, biases.get("b_hn"))
    if not cell.norm:
        after, activations = cell.step(gates, x_last, states)
        return after, base.residuals_of(cell, activations, states)
    scale, mean = norm.scale_and_mean(states[0], statistics, norm_width)
    # no mean: the weights of a LayerNorm are centered before the products
    normalized, gates = norm.normalize(gates, scale, biases["bias"])
    after, activations = cell.step(gates, x_last, states)
    return after, norm.residuals_of(cell, activations, states[0], normalized, scale, mean)
