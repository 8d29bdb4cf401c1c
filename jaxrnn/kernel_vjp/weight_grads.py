"""The gradients of weights and biases: products over all steps, by XLA or in one launch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxrnn import _bridge
from jaxrnn.cells import base
from jaxrnn.kernel_vjp import memory_layout
from jaxrnn.kernel_vjp.spec import RecurrenceSpec
from torch_bridge import rules

if TYPE_CHECKING:
    from jax import Array


def weight_grads(
    static: RecurrenceSpec, xs: Array, h_prev: Array, scale: Array | None, x_mean: Array | None, dxp: Array,
    hidden_grads: dict[str, Array],
) -> dict[str, Array]:  # fmt: skip
    """Returns the gradients of weights and biases by params field, from the states before each step, `h_prev`.

    `dxp` contains the factors `scale` of a norm, but the biases are added after the norm. Without a norm, `scale` is
    None. For LayerNorm, `xs` are without their mean `x_mean`, which is subtracted from the states too.
    """
    cell, spec = static.cell, "gtbx,gtby->xy"
    xs, h_prev = xs.astype(static.operand_dtype), h_prev.astype(static.operand_dtype)
    inputs, hidden = xs.shape[-1], h_prev.shape[-1]

    def contract(x: Array, y: Array, width: int) -> Array:
        """Returns `x^T @ y`, summed over groups, steps and batch, where `x` has the given number of features."""
        # as for the products of the loop: XLA may multiply so few features and units in full float32
        narrow = max(width, hidden) <= rules.FULL_PRECISION_WIDTH
        precision = jax.lax.Precision.HIGHEST if narrow else static.precision
        return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)

    if static.uses_tf32 and _bridge.is_features_first_profitable(math.prod(xs.shape[:-1]), dxp.shape[-1]):
        xs, h_prev, spec = memory_layout.features_first(xs), memory_layout.features_first(h_prev), "xgtb,gtby->xy"
    contract_states = functools.partial(contract, h_prev, width=hidden)
    grads = {
        "w_ih": contract(xs, dxp, inputs),
        cell.bias: base.bias_grad(dxp if scale is None else dxp.astype(jnp.float32) / scale),
        **base.recurrent_grads(cell, contract_states, dxp, hidden_grads),
    }  # fmt: skip
    if x_mean is not None:
        grads["w_hh"] -= base.bias_grad(x_mean * dxp.astype(jnp.float32))[None]
    return grads


def has_weight_grads_launch(static: RecurrenceSpec, xs: Array, hidden: int) -> bool:
    """Whether one launch computes the gradients of weights and biases, which needs all steps in one direction."""
    if static.reverse == "bidirectional":
        return False
    if static.operand_dtype == jnp.float32 and not static.uses_tf32:
        return False
    cell = static.cell
    return _bridge.is_weight_grads_launch_profitable(
        xs.shape, hidden, cell.gates * hidden, static.operand_dtype, last_gate_separate=cell.last_gate_separate,
        normed=bool(cell.norm),
    )  # fmt: skip


def launch_weight_grads(
    static: RecurrenceSpec,
    xs: Array,
    hs: Array,
    h0: Array,
    resets: Array | None,
    reset_h: Array | None,
    scale: Array | None,
    x_mean: Array | None,
    dxp: Array,
    hidden_grads: dict[str, Array],
) -> dict[str, Array]:
    """Returns the gradients of `weight_grads` by one launch, from the states after each step, `hs`.

    `reset_h` are the reset states, or None for zeros. `scale` and `x_mean` are those of `weight_grads`.
    """
    cell, dtype = static.cell, static.operand_dtype
    arrays: dict[str, Array | None] = {"x": xs.astype(dtype), "hs": hs.astype(dtype), "h0": h0.astype(dtype)}
    arrays |= {"reset": resets, "reset_h": None if reset_h is None else reset_h.astype(dtype), "scale": scale}
    arrays |= {"x_mean": x_mean, "dxp": dxp} | hidden_grads
    models = {name: None if x is None else x[None] for name, x in arrays.items()}
    grads = _bridge.launch_weight_grads(models, reverse=static.reverse is True, may_use_xla=static.may_use_xla)
    return {cell.bias if name == "bias" else name: x[0] for name, x in grads.items()}
