"""Weights from and to Flax linen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxrnn.convert.arrays import describe, keys_of
from jaxrnn.convert.checks import check_params
from jaxrnn.convert.dense import dense_names, from_dense, to_dense
from jaxrnn.convert.layout import GRU, LSTM

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.convert.layout import Params

# The classes of each cell, with an article.
CELLS = {GRU: "a GRUCell", LSTM: "an LSTMCell or OptimizedLSTMCell"}


def from_linen(tree: Any) -> Params:
    """Returns the weights of `flax.linen.GRUCell`, `LSTMCell` or `OptimizedLSTMCell`, or of a cell of `jaxrnn.linen`.

    Parameters do not include attributes: a `gate_fn` or `activation_fn` other than the default cannot be detected here.
    Do not convert such a cell.

    Args:
      tree: the parameters of the cell, or its variables: `{"ir": {"kernel": [D, H], "bias": [H]}, ...}`. In the
        variables of a larger module the cell is at a path like `variables["params"]["ScannedRNN_0"]["GRUCell_1"]`, or,
        in an `nn.RNN`, under "cell".

    Raises:
      ValueError: these are not the parameters of such a cell.
    """
    if isinstance(tree, Mapping) and "params" in tree:  # tree holds all variables of a module
        tree = tree["params"]
    for layout in CELLS:
        if keys_of(tree) == set(dense_names(layout)):
            return from_dense("from_linen", layout, tree)
    wanted = [f"of {classes} ({', '.join(dense_names(layout))})" for layout, classes in CELLS.items()]
    raise ValueError(f"from_linen takes the parameters {' or '.join(wanted)}, got {describe(tree)}")


def to_linen(params: Params) -> dict[str, dict[str, Array]]:
    """Returns the parameters of `flax.linen.GRUCell`, or of `LSTMCell` and `OptimizedLSTMCell`, which share a format.

        cell.apply({"params": to_linen(params)}, carry, x)

    Raises:
      ValueError: `params` are neither `GRUParams` nor `LSTMParams`, or their shapes disagree.
    """
    return to_dense(check_params("to_linen", params), params)
