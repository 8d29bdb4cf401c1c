"""The cell table: what the Triton implementation needs to know of a cell besides its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn.reference import GRUParams, LSTMParams, matmul

if TYPE_CHECKING:
    from jax import Array


@dataclass(frozen=True)
class Cell:
    """One entry of the cell table.

    Attributes:
      name: of the kernels in `torch_bridge.kernels.CELLS`.
      gates: width of the input projection over H.
      states: what is carried, the hidden state first.
      saved_state: the state whose history the backward kernel reads.
      hidden_grads: further outputs `[G, T, B, H]` of the backward kernel: gradients of what `w_hh` feeds and `xp` not.
      bias: the params field added to the input projection.
      hidden_biases: params -> arrays besides `w_hh` that the forward kernel takes, by name.
      activations: (params, xp, h_prev @ w_hh) -> gates as the forward kernel saves them, `[..., gates saved * H]`.
      recurrent_grads: (h_prev^T @ ..., dxp, hidden grads) -> gradients of the recurrent params by field.
    """

    name: str
    gates: int
    states: tuple[str, ...]
    saved_state: str
    hidden_grads: tuple[str, ...]
    bias: str
    hidden_biases: Callable[[Any], dict[str, Array]]
    activations: Callable[[Any, Array, Array], Array]
    recurrent_grads: Callable[[Callable[[Array], Array], Array, dict[str, Array]], dict[str, Array]]


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=(0, 1, 2), dtype=jnp.float32)


def _gru_activations(params: GRUParams, xp: Array, hp: Array) -> Array:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = jnp.split(xp, 3, axis=-1), jnp.split(hp, 3, axis=-1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    h_n = h_n + params.b_hn.astype(h_n.dtype)
    return jnp.concatenate([r, z, jnp.tanh(x_n + r * h_n), h_n], axis=-1)


def _gru_recurrent_grads(
    contract: Callable[[Array], Array], dxp: Array, hidden_grads: dict[str, Array]
) -> dict[str, Array]:
    # one product with all of dxp and one with dhn: taking only the r and z columns of dxp would copy them first
    dhn = hidden_grads["dhn"]
    width = 2 * dhn.shape[-1]
    return {"w_hh": jnp.concatenate([contract(dxp)[:, :width], contract(dhn)], axis=-1), "b_hn": _sum(dhn)}


def _lstm_activations(params: LSTMParams, xp: Array, hp: Array) -> Array:
    i, f, g, o = jnp.split(xp + hp, 4, axis=-1)
    return jnp.concatenate([jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)], axis=-1)


GRU = Cell(
    name="gru",
    gates=3,
    states=("h",),
    saved_state="h",
    hidden_grads=("dhn",),
    bias="b_ih",
    hidden_biases=lambda params: {"b_hn": params.b_hn},
    activations=_gru_activations,
    recurrent_grads=_gru_recurrent_grads,
)
LSTM = Cell(
    name="lstm",
    gates=4,
    states=("h", "c"),
    saved_state="c",
    hidden_grads=(),
    bias="b",
    hidden_biases=lambda params: {},
    activations=_lstm_activations,
    recurrent_grads=lambda contract, dxp, _: {"w_hh": contract(dxp)},
)


def project(cell: Cell, params: Any, xs: Array, precision: Any) -> Array:
    """The input projection `[..., gates * H]` in float32: `xs @ w_ih + bias`."""
    return matmul(xs, params.w_ih, precision, jnp.float32) + getattr(params, cell.bias).astype(jnp.float32)


def bias_grad(dxp: Array) -> Array:
    """Gradient of the bias that is added to the input projection."""
    return _sum(dxp)
