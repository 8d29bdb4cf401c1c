"""The cell table of the JAX side: it holds what the Triton implementation needs of each cell besides its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn.reference import GRUParams, LSTMParams, broadcast_to_rank, gru_cell, lstm_cell, matmul
from torch_bridge import cells as specs
from torch_bridge.cells import CellSpec

if TYPE_CHECKING:
    from jax import Array


@dataclass(frozen=True)
class Cell(CellSpec):
    """One entry of the table: a `torch_bridge.cells.CellSpec` with the cell's arithmetic in JAX.

    Attributes:
      step: maps (params, xp, h_prev @ w_hh, states before the step by name) to the states after it.
      compute_residuals: maps (params, xp, h_prev @ w_hh, states before each step by name) to the residuals in float32.
      grad_step: maps (residuals, gradients of the states after the step by name) to the gradients `[..., gates * H]` of
        xp and of h_prev @ w_hh, and to the gradients of the states before the step without the part that flows through
        h_prev @ w_hh.
      history: the states before each step that `compute_residuals` needs.
      bias: the params field that is added to the input projection.
      hidden_biases: maps params to the arrays besides `w_hh` that the forward kernel takes, by name.
      recurrent_grads: maps (h_prev^T @ ..., dxp, hidden grads) to the gradients of the recurrent params by field.
    """

    step: Callable[[Any, Array, Array, dict[str, Array]], dict[str, Array]]
    compute_residuals: Callable[[Any, Array, Array, dict[str, Array]], dict[str, Array]]
    grad_step: Callable[[dict[str, Array], dict[str, Array]], tuple[Array, Array, dict[str, Array]]]
    history: tuple[str, ...]
    bias: str
    hidden_biases: Callable[[Any], dict[str, Array]]
    recurrent_grads: Callable[[Callable[[Array], Array], Array, dict[str, Array]], dict[str, Array]]


def _sum(x: Array) -> Array:
    return jnp.sum(x, axis=(0, 1, 2), dtype=jnp.float32)


def _separate(local_grads: Array, count: int) -> list[Array]:
    """Inverts `_interleave`."""
    return list(jnp.unstack(local_grads.reshape(*local_grads.shape[:-1], -1, count), axis=-1))


def _interleave(local_grads: Sequence[Array]) -> Array:
    """Interleaves four arrays `[..., H]` into one, `[..., 4H]`."""
    return jnp.stack(local_grads, axis=-1).reshape(*local_grads[0].shape[:-1], -1)


def _gru_step(params: GRUParams, xp: Array, hp: Array, previous: dict[str, Array]) -> dict[str, Array]:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = jnp.split(xp, 3, axis=-1), jnp.split(hp, 3, axis=-1)
    return {"h": gru_cell(x_r + h_r, x_z + h_z, x_n, h_n + broadcast_to_rank(params.b_hn, h_n), previous["h"])}


def _gru_residuals(params: GRUParams, xp: Array, hp: Array, previous: dict[str, Array]) -> dict[str, Array]:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = jnp.split(xp, 3, axis=-1), jnp.split(hp, 3, axis=-1)
    r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
    h_n = h_n + broadcast_to_rank(params.b_hn, h_n)
    n = jnp.tanh(x_n + r * h_n)
    f_n = (1 - z) * (1 - n * n)
    local_grads = f_n * h_n * r * (1 - r), (previous["h"] - n) * z * (1 - z), f_n, f_n * r
    return {"local_grads": _interleave(local_grads), "carry_gate": z}


def _gru_grad_step(saved: dict[str, Array], dstates: dict[str, Array]) -> tuple[Array, Array, dict[str, Array]]:
    dh = dstates["h"]
    dr, dz, dn, dhn = (dh * f for f in _separate(saved["local_grads"], 4))
    return jnp.concatenate((dr, dz, dn), -1), jnp.concatenate((dr, dz, dhn), -1), {"h": dh * saved["carry_gate"]}


def _gru_recurrent_grads(
    contract: Callable[[Array], Array], dxp: Array, hidden_grads: dict[str, Array]
) -> dict[str, Array]:
    # one product with all of dxp and one with dhn: XLA would copy the r and z columns of dxp to multiply these alone
    dhn = hidden_grads["dhn"]
    width = 2 * dhn.shape[-1]
    return {"w_hh": jnp.concatenate([contract(dxp)[:, :width], contract(dhn)], axis=-1), "b_hn": _sum(dhn)}


def _lstm_step(params: LSTMParams, xp: Array, hp: Array, previous: dict[str, Array]) -> dict[str, Array]:
    i, f, g, o = jnp.split(xp + hp, 4, axis=-1)
    c, h = lstm_cell(i, f, g, o, previous["c"])
    return {"h": h, "c": c}


def _lstm_residuals(params: LSTMParams, xp: Array, hp: Array, previous: dict[str, Array]) -> dict[str, Array]:
    i, f, g, o = jnp.split(xp + hp, 4, axis=-1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    tanh_c = jnp.tanh(f * previous["c"] + i * g)
    local_grads = g * i * (1 - i), previous["c"] * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)
    return {"local_grads": _interleave(local_grads), "dc_dh": o * (1 - tanh_c * tanh_c), "carry_gate": f}


def _lstm_grad_step(saved: dict[str, Array], dstates: dict[str, Array]) -> tuple[Array, Array, dict[str, Array]]:
    dh = dstates["h"]
    dc = dstates["c"] + dh * saved["dc_dh"]
    f_i, f_f, f_g, f_o = _separate(saved["local_grads"], 4)
    gates = jnp.concatenate((dc * f_i, dc * f_f, dc * f_g, dh * f_o), -1)
    return gates, gates, {"h": jnp.zeros_like(dh), "c": dc * saved["carry_gate"]}


GRU = Cell(
    **vars(specs.GRU),
    step=_gru_step,
    compute_residuals=_gru_residuals,
    grad_step=_gru_grad_step,
    history=("h",),
    bias="b_ih",
    hidden_biases=lambda params: {"b_hn": params.b_hn},
    recurrent_grads=_gru_recurrent_grads,
)
LSTM = Cell(
    **vars(specs.LSTM),
    step=_lstm_step,
    compute_residuals=_lstm_residuals,
    grad_step=_lstm_grad_step,
    history=("h", "c"),
    bias="b",
    hidden_biases=lambda params: {},
    recurrent_grads=lambda contract, dxp, _: {"w_hh": contract(dxp)},
)
CELLS = {cell.name: cell for cell in (GRU, LSTM)}


def project(cell: Cell, params: Any, xs: Array, precision: Any) -> Array:
    """Returns the input projection `xs @ w_ih + bias`, `[..., gates * H]` in float32."""
    product = matmul(xs, params.w_ih, precision, jnp.float32)
    return product + broadcast_to_rank(getattr(params, cell.bias), product)


def bias_grad(dxp: Array) -> Array:
    """Returns the gradient of the bias that is added to the input projection."""
    return _sum(dxp)
