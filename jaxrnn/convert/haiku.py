"""Weights from and to Haiku."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrnn.convert.arrays import describe, keys_of, read_arrays
from jaxrnn.convert.checks import check_params, check_shapes
from jaxrnn.convert.layout import GRU, LSTM, biases_of, pack, reorder

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells import LSTMParams

# The order of the gates of hk.LSTM, which adds 1 to its forget gate.
GATES = ("i", "g", "f", "o")
FORGET = LSTM.gates.index("f")

# Why Haiku cannot have the weights of a cell.
MISSING = {
    GRU: "hk.GRU applies the reset gate before the matrix product and cannot compute this GRU. Call jaxrnn.gru inside "
    "hk.transform, with parameters from hk.get_parameter",
}


def from_haiku(params: Mapping[str, Any]) -> LSTMParams:
    """Returns the weights of `haiku.LSTM`.

    Haiku orders gates i, g, f, o, has one matrix for inputs and state, and adds 1 to the forget gate; here `b` includes
    that 1.

    Args:
      params: parameters of the linear layer in the LSTM, `{"w": [D + H, 4H], "b": [4H]}`, or a mapping with only these,
        `{"lstm/linear": {"w": ..., "b": ...}}`.

    Raises:
      ValueError: the parameters are of `hk.GRU`, which computes something else, of another module, or of several; or
        shapes are wrong.
    """
    if len(keys_of(params)) == 1:
        (params,) = params.values()
    if keys_of(params) == {"w_i", "w_h", "b"}:
        raise ValueError(
            "from_haiku: hk.GRU applies the reset gate before the matrix product, W_h (r * h), but jaxrnn.gru applies "
            "it after, r * (W_h h + b_hn), as cuDNN, PyTorch and Flax do. Weights cannot be converted: train a new GRU"
        )
    if keys_of(params) != {"w", "b"}:
        raise ValueError(
            "from_haiku takes the parameters of the linear layer in an hk.LSTM, w and b, like params['lstm/linear'], "
            f"got {describe(params)}"
        )
    arrays = read_arrays("from_haiku", params, ("w", "b"))
    w, gates = arrays["w"], len(GATES)
    hidden = w.shape[-1] // gates if w.ndim else 0
    if w.ndim != 2 or hidden == 0 or w.shape[1] != gates * hidden or w.shape[0] < hidden:
        raise ValueError(f"from_haiku: w of an hk.LSTM is [D + H, 4H], got {w.shape}")
    check_shapes("from_haiku", arrays, {"w": w.shape, "b": (gates * hidden,)})
    packed: LSTMParams = pack(LSTM, w[:-hidden], w[-hidden:], arrays["b"], order=GATES)
    return packed._replace(b=_add_to_forget_gate(packed.b, 1))


def to_haiku(params: LSTMParams) -> dict[str, Array]:
    """Returns the parameters of the linear layer in `haiku.LSTM`, with its forget-gate 1 subtracted from the bias.

        {"lstm/linear": to_haiku(params)}

    Raises:
      ValueError: `params` are `GRUParams`, since `hk.GRU` computes something else.
    """
    layout = check_params("to_haiku", params, missing=MISSING)
    b = _add_to_forget_gate(biases_of(layout, params)[0], -1)
    w = jnp.concatenate([reorder(x, layout.gates, GATES) for x in (params.w_ih, params.w_hh)])
    return {"w": w, "b": reorder(b, layout.gates, GATES)}


def _add_to_forget_gate(b: Array, value: int) -> Array:
    gates = jnp.split(b, len(LSTM.gates))
    gates[FORGET] += value
    return jnp.concatenate(gates)
