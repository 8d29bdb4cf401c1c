"""The norm of inputs and state, `[x, h]` of n = D + H elements, that the gates of some cells see.

The gates are `s (x @ w_ih + h @ w_hh) + bias` with the factor `s = (variance + epsilon)^-1/2`, `scale` in the code. For
RMSNorm, the variance is the mean of squares. `Cell.prepare` has folded the parameters of the norm into these weights:
`w_ih` and `w_hh` are multiplied by its scales, and the bias contains its shifts. For LayerNorm the weights are also
centered: their mean over the n rows is subtracted, which replaces the subtraction of the mean from `[x, h]`. The
product with the inputs therefore needs no state, and a step needs of the state its sum of squares and, for LayerNorm,
its sum.

Each column of centered weights has a sum of zero over all n rows, so any number may be subtracted from all of `[x, h]`.
The mean m of x is subtracted: a large mean, times weights that are rounded to 16 bits or to TF32, would be a large
error. The product with the inputs is that of x - m. The product with the state would be that of h - m: it is that of h,
and m times the sums of `w_hh` is subtracted from the gates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn.cells.base import interleave
from jaxrnn.numerics import broadcast_to_rank, matmul

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells.base import Cell


def input_statistics(cell: Cell, xs: Array, hidden: int, dtype: Any = jnp.float32) -> dict[str, Array]:
    """Returns by name, `[..., 1]`, what the norm needs of inputs `[..., D]` besides their product.

    "x_norm" is the part of `variance + epsilon` that follows from the inputs alone. "x_mean" is their mean; RMSNorm has
    none.
    """
    xs, mean = center(cell, xs.astype(dtype), dtype)
    x_norm = jnp.sum(xs * xs, axis=-1, keepdims=True) / (xs.shape[-1] + hidden) + cell.epsilon
    return {"x_norm": x_norm} if mean is None else {"x_norm": x_norm, "x_mean": mean}


def center(cell: Cell, xs: Array, dtype: Any = jnp.float32) -> tuple[Array, Array | None]:
    """Returns the inputs that `w_ih` multiplies, and their mean.

    For RMSNorm these are `xs` as they are, and None. For LayerNorm they are `xs` without their mean, in `dtype`, and
    the mean, `[..., 1]`.
    """
    if cell.norm == "rms":
        return xs, None
    xs = xs.astype(dtype)
    # the mean of no inputs is 0; `jnp.mean` would return NaN
    mean = jnp.sum(xs, axis=-1, keepdims=True) if xs.shape[-1] == 0 else jnp.mean(xs, axis=-1, keepdims=True)
    return xs - mean, mean


def project(cell: Cell, params: Any, xs: Array, precision: jax.lax.PrecisionLike, dtype: Any = jnp.float32) -> Array:
    """Returns the input projection, `[..., gates * H]`: the product of the inputs of `center` and `w_ih`.

    Unlike that of `base.project`, it has no bias, which `normalize` adds after the norm.
    """
    centered, _ = center(cell, xs, dtype)
    return matmul(centered.astype(jnp.result_type(xs, params.w_ih)), params.w_ih, precision, dtype)


def sum_of_weights(params: Any, dtype: Any = jnp.float32) -> Array:
    """Returns the sums of `w_hh` over its rows, `[gates * H]`, by which LayerNorm multiplies the inputs' mean."""
    return params.w_hh.astype(dtype).sum(axis=0)


def scale_and_mean(h: Array, statistics: Mapping[str, Array], width: int) -> tuple[Array, Array | float]:
    """Returns the factor s of a step and the mean of `[x, h]`, `[..., 1]`.

    Args:
      h: the state before the step.
      statistics: what `input_statistics` returns for the inputs of the step. Without "x_mean", the mean is 0.
      width: n, the number of elements of `[x, h]`.
    """
    hidden, x_norm = h.shape[-1], statistics["x_norm"]
    squares = jnp.sum(h * h, axis=-1, keepdims=True)
    if "x_mean" not in statistics:
        return jax.lax.rsqrt(x_norm + squares / width), 0.0
    mean = jnp.mean(h, axis=-1, keepdims=True)
    difference = mean - statistics["x_mean"]
    # the squares around a common mean are those around the mean of x, those around the mean of h, and what lies between
    # the two means: H D / n times the square of their difference
    variance = x_norm + (squares - hidden * mean**2) / width + difference**2 * (hidden * (width - hidden) / width**2)
    return jax.lax.rsqrt(variance), statistics["x_mean"] + difference * (hidden / width)


def normalize(sums: Sequence[Array], scale: Array, bias: Array) -> tuple[list[Array], list[Array]]:
    """Returns two lists by gate: `s (xp + hp)`, and the gates, `s (xp + hp) + bias`.

    Args:
      sums: the sums `xp + hp` by gate, `[..., H]` each.
      scale: s, `[..., 1]`.
      bias: `[gates * H]`.
    """
    normalized = [x * scale for x in sums]
    biases = jnp.split(bias.astype(scale.dtype), len(sums), axis=-1)
    return normalized, [x + broadcast_to_rank(b, x) for x, b in zip(normalized, biases, strict=True)]


def residuals_of(
    cell: Cell, activations: tuple[Array, ...], h: Array, normalized: Sequence[Array], scale: Array, mean: Array | float
) -> dict[str, Array]:
    """Returns the residuals of a step by name, in float32, with "scale".

    Behind the local gradients of its gates, each unit has one more: the derivative of its new state by log s.

    Args:
      cell: the cell.
      activations: as `Cell.step` returns them.
      h: the state before the step.
      normalized: as `normalize` returns them.
      scale: s.
      mean: the mean of `[x, h]`.
    """
    local_grads, (carry_gate,) = cell.compute_residuals(activations, (h,))
    norm_grad = sum(f * x for f, x in zip(local_grads, normalized, strict=True))
    return {
        "local_grads": interleave(cell, (*local_grads, jnp.asarray(norm_grad))), "norm_state": (h - mean) * scale,
        "carry_gate": carry_gate, "scale": scale,
    }  # fmt: skip


def log_scale_grad(cell: Cell, residuals: dict[str, Array], dh: Array) -> Array:
    """Returns the gradient of log s of a step, `[..., 1]`: "dnorm", the D of `torch_bridge.kernels.loops.streamed`.

    Args:
      cell: the cell.
      residuals: what `residuals_of` returns for the step.
      dh: the gradient of the state after the step, `[..., H]`.
    """
    width = dict(cell.residuals)["local_grads"]
    norm_grad = residuals["local_grads"].reshape(*dh.shape, width)[..., cell.gates]
    return jnp.sum(dh * norm_grad, axis=-1, keepdims=True)


def input_grads_through_statistics(dnorm: Array, scale: Array, h: Array | None, x: Array, hidden: int) -> Array:
    """Returns the part of the gradient of a step's inputs `[..., D]` that flows through the norm's statistics.

    Args:
      dnorm: what `log_scale_grad` returns for the step, `[..., 1]`.
      scale: s, `[..., 1]`.
      h: the state before the step, or None for RMSNorm, which subtracts no mean.
      x: the inputs, with their mean.
      hidden: the number of units.
    """
    width = x.shape[-1] + hidden
    dvariance = -0.5 * scale**2 * dnorm  # s = variance^-1/2, so d log s / d variance = -s^2 / 2
    if h is not None:
        x = x - (jnp.sum(x, axis=-1, keepdims=True) + jnp.sum(h, axis=-1, keepdims=True)) / width
    return x * (dvariance * (2 / width))
