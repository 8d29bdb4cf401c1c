"""The modules `RMSNorm` and `LayerNorm`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

import flax.linen as nn
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import modules
from jaxrnn.checks import Implementation
from torch_bridge.docstrings import inherit_descriptions


class RMSNorm(nn.RMSNorm):
    """`flax.linen.RMSNorm` computed by `jaxrnn.rms_norm`, with the same parameters, initial values and results.

    `jaxrnn.rms_norm` normalizes the last axis. With `reduction_axes` or `feature_axes` other than the last axis, a
    `mask`, `axis_name`, `axis_index_groups` or `force_float32_reductions=False`, Flax's own norm runs.

    Attributes:
      epsilon: added to the mean square, inside the root.
      dtype: the dtype of the result; None uses the dtype to which inputs and parameters promote. The norm is computed
        in float32.
      param_dtype: the dtype of the parameters.
      use_scale: whether the result is multiplied by a parameter `scale`, `[N]`.
      scale_init: the initializer of `scale`.
      reduction_axes: the axes over which the mean square is computed.
      feature_axes: the axes of the parameters.
      axis_name: the name of a mapped axis over which statistics are averaged too, or None.
      axis_index_groups: groups of indices of that axis that are averaged apart, or None.
      use_fast_variance: has no effect unless Flax's own norm runs: `jaxrnn` always computes the variance as the mean of
        squared differences.
      force_float32_reductions: whether statistics are computed in float32 at least.
      implementation: "triton" (one pass of a kernel; needs an NVIDIA GPU), "xla", or None, which picks the fastest that
        can run the input. NotImplementedError is raised if the named one cannot run it; "triton" cannot if Flax's own
        norm would run.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import RMSNorm
      >>> norm, x = RMSNorm(), jnp.arange(8.0).reshape(2, 4)
      >>> variables = norm.init(jax.random.key(0), x)
      >>> y, total = norm.apply(variables, x, residual=x)
      >>> y.shape, bool((total == 2 * x).all())
      ((2, 4), True)
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
        """Normalizes the last axis, or `reduction_axes`.

        Args:
          x: `[*rows, N]`.
          residual: an array with the shape and dtype of `x`, added to `x` first, in the same pass.
          mask: booleans of a shape that broadcasts to that of `x`, or None. Mean and variance are those of the elements
            where it is true; every element is normalized.

        Returns:
          `y`, which has the shape of `x`. With a residual, `(y, x + residual)`; the sum has the dtype of `x`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this input or these attributes; the message says why.
        """
        return run_norm(self, "rms", x, residual, mask, super().__call__)


@inherit_descriptions(RMSNorm)
class LayerNorm(nn.LayerNorm):
    """`flax.linen.LayerNorm` computed by `jaxrnn.layer_norm`, with the same parameters, initial values and results.

    Attributes:
      epsilon: added to the variance, inside the root.
      use_bias: whether a parameter `bias`, `[N]`, is added to the result.
      bias_init: the initializer of `bias`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import LayerNorm
      >>> norm, x = LayerNorm(), jnp.arange(8.0).reshape(2, 4)
      >>> variables = norm.init(jax.random.key(0), x)
      >>> y, total = norm.apply(variables, x, residual=x)
      >>> y.shape, bool((total == 2 * x).all())
      ((2, 4), True)
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
    @inherit_descriptions(RMSNorm.__call__)
    def __call__(self, x: ArrayLike, *, residual: ArrayLike | None = None, mask: ArrayLike | None = None) -> Any:
        """Normalizes the last axis, or `reduction_axes`."""
        return run_norm(self, "layer", x, residual, mask, super().__call__)


def run_norm(norm: Any, kind: str, x: Any, residual: Any, mask: Any, flax_norm: Callable[..., Any]) -> Any:
    """Normalizes `x` with the parameters of a bound module, creating missing ones."""
    name = type(norm).__name__
    x = modules.as_array(f"{name}: x", x)
    if x.ndim == 0:
        raise ValueError(f"{name}: x must be [*rows, N], got a scalar; add the axes that are missing")
    if (option := modules.option_of_flax(norm, mask, x)) is not None:
        # without Flax's wrapper, so that `capture_intermediates` and interceptors see one call
        call = functools.partial(inspect.unwrap(flax_norm), norm, mask=mask)
        return modules.run_flax(norm, option, x, residual, call)
    modules.check_dtypes(norm)
    for parameter in ("scale", "bias"):
        if norm.has_variable("params", parameter):
            shape = jnp.shape(nn.meta.unbox(norm.get_variable("params", parameter)))
            if len(shape) == 1 and shape != x.shape[-1:]:
                raise ValueError(
                    f"{name}: x must have the width of the parameter {parameter}, {shape[0]}, got {x.shape[-1]}; pass "
                    "an array of that width, or call init with this one"
                )
    scale, bias = (
        norm.param(name, getattr(norm, f"{name}_init"), x.shape[-1:], norm.param_dtype)
        if getattr(norm, f"use_{name}", False)
        else None
        for name in ("scale", "bias")
    )
    dtype = canonicalize_dtype(x, scale, bias, dtype=norm.dtype)
    options = {"epsilon": norm.epsilon, "implementation": norm.implementation}
    return modules.normalize(kind, x, scale, bias, residual, dtype, norm, **options)
