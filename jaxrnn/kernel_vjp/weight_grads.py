"""The gradients of weights and biases: products over all steps, by XLA or in one launch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxrnn import _bridge
from jaxrnn.call import Call
from jaxrnn.cells import base
from jaxrnn.kernel_vjp import memory_layout
from jaxrnn.kernel_vjp.history import History
from jaxrnn.kernel_vjp.spec import KernelSpec
from torch_bridge import rules

if TYPE_CHECKING:
    from jax import Array


def weight_grads(
    spec: KernelSpec, xs: Array, h_prev: Array, scale: Array | None, x_mean: Array | None, dxp: Array,
    hidden_grads: dict[str, Array],
) -> dict[str, Array]:  # fmt: skip
    """Returns the gradients of weights and biases by params field, from the states before each step, `h_prev`.

    `dxp` contains the factors `scale` of a norm, but the biases are added after the norm. Without a norm, `scale` is
    None. For LayerNorm, `xs` are without their mean `x_mean`, which is subtracted from the states too.
    """
    cell, axes = spec.cell, "gtbx,gtby->xy"
    xs, h_prev = xs.astype(spec.operand_dtype), h_prev.astype(spec.operand_dtype)
    inputs, hidden = xs.shape[-1], h_prev.shape[-1]

    def contract(x: Array, y: Array, width: int) -> Array:
        """Returns `x^T @ y`, summed over groups, steps and batch, where `x` has the given number of features."""
        # as for the products of the loop: XLA may multiply so few features and units in full float32
        narrow = max(width, hidden) <= rules.FULL_PRECISION_WIDTH
        precision = jax.lax.Precision.HIGHEST if narrow else spec.precision
        return jnp.einsum(axes, x, y, precision=precision, preferred_element_type=jnp.float32)

    if spec.uses_tf32 and _bridge.is_features_first_profitable(math.prod(xs.shape[:-1]), dxp.shape[-1]):
        xs, h_prev, axes = memory_layout.features_first(xs), memory_layout.features_first(h_prev), "xgtb,gtby->xy"
    contract_states = functools.partial(contract, h_prev, width=hidden)
    grads = {
        "w_ih": contract(xs, dxp, inputs),
        cell.bias: base.bias_grad(dxp if scale is None else dxp.astype(jnp.float32) / scale),
        **base.recurrent_grads(cell, contract_states, dxp, hidden_grads),
    }  # fmt: skip
    if x_mean is not None:
        grads["w_hh"] -= base.bias_grad(x_mean * dxp.astype(jnp.float32))[None]
    return grads


def has_weight_grads_launch(spec: KernelSpec, xs: Array) -> bool:
    """Whether one launch computes the gradients of weights and biases, which needs all steps in one direction."""
    if spec.reverse == "bidirectional":
        return False
    if spec.operand_dtype == jnp.float32 and not spec.uses_tf32:
        return False
    cell = spec.cell
    return _bridge.is_weight_grads_launch_profitable(
        xs.shape, spec.hidden, cell.gates * spec.hidden, spec.operand_dtype, last_gate_separate=cell.last_gate_separate,
        normed=bool(cell.norm),
    )  # fmt: skip


def launch_weight_grads(
    spec: KernelSpec, chunk: Call, history: History, scale: Array | None, x_mean: Array | None, dxp: Array,
    hidden_grads: dict[str, Array],
) -> dict[str, Array]:  # fmt: skip
    """Returns the gradients of `weight_grads` by one launch, from the states after each step.

    `scale`, `x_mean` and the inputs of the chunk are those of `weight_grads`.
    """
    cell, dtype = spec.cell, spec.operand_dtype
    arrays: dict[str, Array | None] = {"x": chunk.xs.astype(dtype), "hs": history.after["h"].astype(dtype)}
    reset_h = chunk.reset_states[0].astype(dtype) if chunk.reset_states else None
    arrays |= {"h0": history.before["h"].astype(dtype), "reset": chunk.resets, "reset_h": reset_h, "scale": scale}
    arrays |= {"x_mean": x_mean, "dxp": dxp} | hidden_grads
    models = {name: None if x is None else x[None] for name, x in arrays.items()}
    grads = _bridge.launch_weight_grads(models, reverse=spec.reverse is True, may_use_xla=spec.may_use_xla)
    return {cell.bias if name == "bias" else name: x[0] for name, x in grads.items()}
