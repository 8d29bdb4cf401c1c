"""The norm of inputs and state, `[x, h]` of n = D + H elements, that the gates of some cells see.

The gates are `s (x @ w_ih + h @ w_hh) + bias` with `s = (variance + epsilon)^-1/2`. The weights contain the scales of
the norm and, for LayerNorm, are centered: their mean over the n inputs is subtracted, which replaces the subtraction of
the mean from `[x, h]`. The bias contains the shifts. The product with the inputs therefore needs no state, and a step
needs of the state its sum of squares and, for LayerNorm, its sum.

Each column of centered weights has a sum of zero over all n rows, so any number may be subtracted from all of `[x, h]`.
The mean m of x is subtracted: a large mean, times weights that are rounded to 16 bits or to TF32, would be a large
error. The product with the inputs is that of x - m, and m times the sums of `w_hh` is subtracted from the gates.
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
    """Returns by name, `[..., 1]`, what the norm needs of inputs `[..., D]`.

    "x_norm" is the part of `variance + epsilon` that follows from the inputs alone, "x_mean" is their mean, for
    LayerNorm.
    """
    xs, mean = center(cell, xs.astype(dtype), dtype)
    x_norm = jnp.sum(xs * xs, axis=-1, keepdims=True) / (xs.shape[-1] + hidden) + cell.epsilon
    return {"x_norm": x_norm} if mean is None else {"x_norm": x_norm, "x_mean": mean}


def center(cell: Cell, xs: Array, dtype: Any = jnp.float32) -> tuple[Array, Array | None]:
    """Returns the inputs that weights multiply, for LayerNorm without their mean and in `dtype`, and the mean.

    The mean is `[..., 1]`, 0 of no inputs, and None for RMSNorm.
    """
    if cell.norm == "rms":
        return xs, None
    xs = xs.astype(dtype)
    mean = jnp.sum(xs, axis=-1, keepdims=True) if xs.shape[-1] == 0 else jnp.mean(xs, axis=-1, keepdims=True)
    return xs - mean, mean


def project(cell: Cell, params: Any, xs: Array, precision: jax.lax.PrecisionLike, dtype: Any = jnp.float32) -> Array:
    """Returns the product of `center`'s inputs and `w_ih`, `[..., gates * H]`."""
    centered, _ = center(cell, xs, dtype)
    return matmul(centered.astype(jnp.result_type(xs, params.w_ih)), params.w_ih, precision, dtype)


def sum_of_weights(params: Any, dtype: Any = jnp.float32) -> Array:
    """Returns the sums of `w_hh` over the state, `[gates * H]`, by which LayerNorm multiplies the inputs' mean."""
    return params.w_hh.astype(dtype).sum(axis=0)


def scale_and_mean(h: Array, statistics: Mapping[str, Array], width: int) -> tuple[Array, Array | float]:
    """Returns s and the mean of `[x, h]`, `[..., 1]`; the mean is 0 without "x_mean"."""
    hidden, variance = h.shape[-1], statistics["x_norm"]
    squares = jnp.sum(h * h, axis=-1, keepdims=True)
    if "x_mean" not in statistics:
        return jax.lax.rsqrt(variance + squares / width), 0.0
    mean = jnp.mean(h, axis=-1, keepdims=True)
    apart = mean - statistics["x_mean"]
    variance = variance + (squares - hidden * mean**2) / width + apart**2 * (hidden * (width - hidden) / width**2)
    return jax.lax.rsqrt(variance), statistics["x_mean"] + apart * (hidden / width)


def normalize(sums: Sequence[Array], scale: Array, bias: Array) -> tuple[list[Array], list[Array]]:
    """Returns `s (xp + hp)` by gate, and the gates, which add `bias [gates * H]`, given the sums `xp + hp`."""
    normalized = [one * scale for one in sums]
    biases = jnp.split(bias.astype(scale.dtype), len(sums), axis=-1)
    return normalized, [x + broadcast_to_rank(b, x) for x, b in zip(normalized, biases, strict=True)]


def residuals_of(
    cell: Cell, activations: tuple[Array, ...], h: Array, normalized: Sequence[Array], scale: Array, mean: Array | float
) -> dict[str, Array]:
    """Returns the residuals of a step by name, in float32, with "scale".

    Args:
      cell: the cell.
      activations: as `Cell.step` returns them.
      h: the state before the step.
      normalized: as `normalize` returns them.
      scale: s.
      mean: the mean of `[x, h]`.
    """
    local_grads, (carry_gate,) = cell.compute_residuals(activations, (h,))
    of_norm = sum(f * x for f, x in zip(local_grads, normalized, strict=True))
    return {
        "local_grads": interleave(cell, (*local_grads, jnp.asarray(of_norm))), "norm_state": (h - mean) * scale,
        "carry_gate": carry_gate, "scale": scale,
    }  # fmt: skip


def gradient(cell: Cell, residuals: dict[str, Array], dh: Array) -> Array:
    """Returns D `[..., 1]` of a step: the sum over units of `dh`, the gradient of its output, times the norm's own."""
    width = dict(cell.residuals)["local_grads"]
    of_norm = residuals["local_grads"].reshape(*dh.shape, width)[..., cell.gates]
    return jnp.sum(dh * of_norm, axis=-1, keepdims=True)


def input_grads_through_statistics(dnorm: Array, scale: Array, h: Array | None, x: Array, hidden: int) -> Array:
    """Returns the part of the gradient of a step's inputs `[..., D]` that flows through the norm's statistics.

    Args:
      dnorm: `[..., 1]` the sum over units of the gradient of the step's output times the norm's local gradient.
      scale: s, `[..., 1]`.
      h: the state before the step, or None for RMSNorm.
      x: the inputs.
      hidden: the number of units.
    """
    width = x.shape[-1] + hidden
    dvariance = -0.5 * scale**2 * dnorm
    if h is not None:
        x = x - (jnp.sum(x, axis=-1, keepdims=True) + jnp.sum(h, axis=-1, keepdims=True)) / width
    return x * (dvariance * (2 / width))
