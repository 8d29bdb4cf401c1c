"""The modules `RMSNorm` and `LayerNorm`."""

from __future__ import annotations

from typing import Any, overload

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import modules
from jaxrnn.checks import Implementation


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm` computed by `jaxrnn.rms_norm`, with the same parameters, initial values and results.

    `reduction_axes` and `feature_axes` must be the last axis. Other axes, `mask`, `axis_name`, `axis_index_groups` and
    `force_float32_reductions=False` raise NotImplementedError.

    Attributes:
      epsilon: added to the mean square, inside the root. All attributes not listed here are Flax's.
      dtype: the dtype of the result; None uses the dtype to which inputs and parameters promote. The norm is computed
        in float32.
      use_fast_variance: has no effect: the variance is always the mean of squared differences.
      implementation: as in `jaxrnn.rms_norm`.
    """

    implementation: Implementation = None

    @overload
    def __call__(self, x: ArrayLike, *, residual: None = None, mask: ArrayLike | None = None) -> Array: ...

    @overload
    def __call__(self, x: ArrayLike, *, residual: ArrayLike, mask: ArrayLike | None = None) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self, x: ArrayLike, *, residual: ArrayLike | None, mask: ArrayLike | None = None
    ) -> Array | tuple[Array, Array]: ...

    @nn.compact
    def __call__(self, x: ArrayLike, *, residual: ArrayLike | None = None, mask: ArrayLike | None = None) -> Any:
        """Normalises the last axis.

        Args:
          x: `[*rows, N]`.
          residual: an array with the shape and dtype of `x`, added to `x` first, in the same pass.
          mask: an argument of Flax's norm; must be None.

        Returns:
          `y`, which has the shape of `x`. With a residual, `(y, x + residual)`; the sum has the dtype of `x`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this input, or only Flax supports the value of an
            attribute; the message says which.
        """
        return run_norm(self, "rms", x, residual, mask)


class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` computed by `jaxrnn.layer_norm`, with the same parameters, initial values and results.

    Attributes:
      epsilon: added to the variance, inside the root. All other attributes are those of `RMSNorm`.
    """

    implementation: Implementation = None

    @overload
    def __call__(self, x: ArrayLike, *, residual: None = None, mask: ArrayLike | None = None) -> Array: ...

    @overload
    def __call__(self, x: ArrayLike, *, residual: ArrayLike, mask: ArrayLike | None = None) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self, x: ArrayLike, *, residual: ArrayLike | None, mask: ArrayLike | None = None
    ) -> Array | tuple[Array, Array]: ...

    @nn.compact
    def __call__(self, x: ArrayLike, *, residual: ArrayLike | None = None, mask: ArrayLike | None = None) -> Any:
        """Normalises the last axis; arguments, results and errors are those of `RMSNorm`."""
        return run_norm(self, "layer", x, residual, mask)


def run_norm(norm: Any, kind: str, x: Any, residual: Any, mask: Any) -> Any:
    """Normalises `x` with the parameters of a bound module, creating missing ones."""
    x = jnp.asarray(x)
    if x.ndim == 0:
        raise ValueError("x must be [*rows, N], got a scalar")
    modules.check_norm(norm, mask, x.ndim)
    scale, bias = (
        norm.param(name, getattr(norm, f"{name}_init"), x.shape[-1:], norm.param_dtype)
        if getattr(norm, f"use_{name}", False)
        else None
        for name in ("scale", "bias")
    )
    dtype = canonicalize_dtype(x, scale, bias, dtype=norm.dtype)
    options = {"epsilon": norm.epsilon, "implementation": norm.implementation}
    return modules.normalize(kind, x, scale, bias, residual, dtype, **options)
