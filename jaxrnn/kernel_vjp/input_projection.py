"""The product of the inputs and their weights, before the loop."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import _bridge
from jaxrnn.cells import base, norm
from jaxrnn.kernel_vjp.spec import RecurrenceSpec

if TYPE_CHECKING:
    from jax import Array


def possible_first_steps(
    static: RecurrenceSpec, in_reverse: Array | None, start: Any, size: int, steps: int
) -> list[tuple[int, Any]]:
    """Returns where in a chunk the loop may begin, as `(index in the chunk, whether the loop begins there)`.

    The chunk has `size` of all `steps` and begins at step `start`.
    """
    if in_reverse is not None:
        return [(0, ~in_reverse), (size - 1, in_reverse)]
    return [(size - 1, start + size == steps) if static.reverse else (0, start == 0)]


def input_projection(
    static: RecurrenceSpec, params: Any, xs: Array, first: Array | None, first_steps: list[tuple[int, Any]]
) -> Array:
    """Returns the input projection `[G, T, B, gates * H]`, with `first` added at the step where the loop begins.

    Its dtype is float32, or float16 where that makes kernels with bfloat16 operands faster.
    """
    cell, dtype = static.cell, static.operand_dtype
    inputs, gates = params.w_ih.shape
    by_kernel = (static.uses_tf32 or dtype == jnp.bfloat16) and first is None and not cell.norm
    if by_kernel and _bridge.may_launch_projection(math.prod(xs.shape[:-1]), inputs, gates, dtype):
        bias = getattr(params, cell.bias).astype(jnp.float32)
        return _bridge.launch_projection(
            xs.astype(dtype), params.w_ih.astype(dtype), bias, jnp.float32 if static.uses_tf32 else jnp.float16,
            precision=static.precision, or_product=True, may_use_xla=static.may_use_xla,
        )  # fmt: skip
    xp = (norm if cell.norm else base).project(cell, params, xs, static.precision)
    if first is not None:
        for at, is_first in first_steps:  # XLA updates xp in place
            step = xp[:, at : at + 1] + jnp.where(is_first, first, jnp.zeros_like(first))[:, None]
            xp = jax.lax.dynamic_update_slice_in_dim(xp, step, at, axis=1)
    return xp
