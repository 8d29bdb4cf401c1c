"""GRU whose gates see a norm of `[x, h]`, as in DreamerV3 (Hafner et al. 2023). Gates are ordered r, n, u.

r = s(a_r), n = tanh(r a_n), u = s(a_u), h' = u n + (1 - u) h.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrnn.cells.base import Cell
from jaxrnn.numerics import accumulation_dtype
from torch_bridge import cells as specs

if TYPE_CHECKING:
    from jaxrnn.cells.base import States


class NormGRUParams(NamedTuple):
    """Weights of a GRU whose gates see a norm of inputs and state; gates ordered r, n, u.

    Attributes:
      w_ih: `[D, 3H]` input weights.
      w_hh: `[H, 3H]` recurrent weights.
      b: `[3H]` bias.
      scale_i: `[D]` scales of the norm for the inputs, or None for ones.
      scale_h: `[H]` scales of the norm for the state, or None for ones.
      shift_i: `[D]` shifts of the norm for the inputs, or None for zeros.
      shift_h: `[H]` shifts of the norm for the state, or None for zeros.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> params = jaxrnn.NormGRUParams(jnp.ones((3, 12)), jnp.ones((4, 12)), jnp.zeros(12), scale_i=jnp.ones(3))
      >>> jax.tree.map(jnp.shape, params)._asdict()
      {'w_ih': (3, 12), 'w_hh': (4, 12), 'b': (12,), 'scale_i': (3,), 'scale_h': None, 'shift_i': None, 'shift_h': None}
    """

    w_ih: Array
    w_hh: Array
    b: Array
    scale_i: Array | None = None
    scale_h: Array | None = None
    shift_i: Array | None = None
    shift_h: Array | None = None


def _step(gates: Sequence[Array], x_last: Any, states: States) -> tuple[States, tuple[Array, ...]]:
    a_r, a_n, a_u = gates
    r, u = jax.nn.sigmoid(a_r), jax.nn.sigmoid(a_u)
    n = jnp.tanh(r * a_n)
    return (u * n + (1 - u) * states[0],), (a_n, r, n, u)


def _compute_residuals(activations: tuple[Array, ...], states: States) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    a_n, r, n, u = activations
    f = u * (1 - n * n)
    return (f * a_n * r * (1 - r), f * r, (n - states[0]) * u * (1 - u)), (1 - u,)


def _grad_step(
    dstates: States, local_grads: tuple[Array, ...], factors: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return tuple(dstates[0] * f for f in local_grads), (dstates[0] * factors[0],)


def _fold(cell: Cell, params: NormGRUParams) -> NormGRUParams:
    """Returns weights and bias that contain the norm's scales and shifts, centered for LayerNorm."""
    dtype = accumulation_dtype(*(x for x in params if x is not None))
    w_ih, w_hh, b = (x.astype(dtype) for x in (params.w_ih, params.w_hh, params.b))
    shifts = [
        jnp.matmul(x.astype(dtype), w, precision="highest")
        for x, w in ((params.shift_i, w_ih), (params.shift_h, w_hh))
        if x is not None
    ]
    w_ih, w_hh = (
        w if scale is None else w * scale.astype(dtype)[:, None]
        for w, scale in ((w_ih, params.scale_i), (w_hh, params.scale_h))
    )
    if cell.norm == "layer":
        mean = (w_ih.sum(axis=0) + w_hh.sum(axis=0)) / (w_ih.shape[0] + w_hh.shape[0])
        w_ih, w_hh = w_ih - mean[None], w_hh - mean[None]
    reset_and_new, update = jnp.split(sum(shifts, start=b), [2 * w_hh.shape[0]])
    b = jnp.concatenate([reset_and_new, update + cell.update_bias])
    return NormGRUParams(w_ih.astype(params.w_ih.dtype), w_hh.astype(params.w_hh.dtype), b)


_OPTIONAL = (("scale_i", "D"), ("scale_h", "H"), ("shift_i", "D"), ("shift_h", "H"))
RMS_NORM_GRU = Cell(
    **vars(specs.RMS_NORM_GRU), title="a normed GRU", function="norm_gru", params=NormGRUParams, bias="b", step=_step,
    compute_residuals=_compute_residuals, grad_step=_grad_step, optional=_OPTIONAL[:2], prepare=_fold,
    epsilon=1e-4, update_bias=-1.0,
)  # fmt: skip
LAYER_NORM_GRU = Cell(
    **vars(specs.LAYER_NORM_GRU), title="a normed GRU", function="norm_gru", params=NormGRUParams, bias="b", step=_step,
    compute_residuals=_compute_residuals, grad_step=_grad_step, optional=_OPTIONAL, prepare=_fold,
    epsilon=1e-4, update_bias=-1.0,
)  # fmt: skip


def norm_gru_cell(norm: str, epsilon: float, update_bias: float) -> Cell:
    """Returns the cell with the norm "rms" or "layer" and these constants."""
    cell = {"rms": RMS_NORM_GRU, "layer": LAYER_NORM_GRU}[norm]
    return dataclasses.replace(cell, epsilon=float(epsilon), update_bias=float(update_bias))
