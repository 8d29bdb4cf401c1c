"""The modules `RMSNorm` and `LayerNorm`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Required, TypedDict, overload

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PromoteDtypeFn
from jax import Array
from jax.typing import ArrayLike
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.checks import Implementation
from torch_bridge.docstrings import inherit_descriptions


class RMSNormOptions(TypedDict, total=False):
    """The arguments of the constructor of Flax's `RMSNorm`; their defaults are Flax's."""

    epsilon: float
    dtype: Dtype | None
    param_dtype: Dtype
    use_scale: bool
    scale_init: Initializer
    reduction_axes: int | Sequence[int]
    feature_axes: int | Sequence[int]
    axis_name: str | None
    axis_index_groups: Any
    use_fast_variance: bool
    promote_dtype: PromoteDtypeFn
    rngs: Required[nnx.Rngs]
    scale_metadata: Mapping[str, Any]


class LayerNormOptions(RMSNormOptions, total=False):
    """The arguments of the constructor of Flax's `LayerNorm`."""

    use_bias: bool
    bias_init: Initializer
    bias_metadata: Mapping[str, Any]


class RMSNorm(nnx.RMSNorm):
    """`flax.nnx.RMSNorm` computed by `jaxrnn.rms_norm`, with the same parameters, initial values and results.

    `jaxrnn.rms_norm` normalizes the last axis. With `reduction_axes` or `feature_axes` other than the last axis, a
    `mask`, `axis_name`, `axis_index_groups` or another `promote_dtype`, Flax's own norm runs.

    Args:
      num_features: N.
      epsilon: added to the mean square, inside the root.
      dtype: the dtype of the result, to which inputs are rounded first; None uses the dtype to which inputs and
        parameters promote. The norm is computed in float32.
      param_dtype: the dtype of the parameters.
      use_scale: whether the result is multiplied by a parameter `scale`, `[N]`.
      scale_init: the initializer of `scale`.
      reduction_axes: the axes over which the mean square is computed.
      feature_axes: the axes of the parameters.
      axis_name: the name of a mapped axis over which statistics are averaged too, or None.
      axis_index_groups: groups of indices of that axis that are averaged apart, or None.
      use_fast_variance: has no effect unless Flax's own norm runs: `jaxrnn` always computes the variance as the mean of
        squared differences.
      promote_dtype: the function that converts inputs and parameters to one dtype.
      implementation: "triton" (one pass of a kernel; needs an NVIDIA GPU), "xla", or None, which picks the fastest that
        can run the input. NotImplementedError is raised if the named one cannot run it; "triton" cannot if Flax's own
        norm would run.
      rngs: the random number generators of the parameters.
      scale_metadata: metadata of `scale`, such as its sharding.

    Raises:
      ValueError: an argument has an invalid value.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import RMSNorm
      >>> norm, x = RMSNorm(4, rngs=nnx.Rngs(0)), jnp.arange(8.0).reshape(2, 4)
      >>> y, total = norm(x, residual=x)
      >>> y.shape, bool((total == 2 * x).all())
      ((2, 4), True)
    """

    def __init__(
        self, num_features: int, *, implementation: Implementation = None, **options: Unpack[RMSNormOptions]
    ) -> None:
        modules.check_norm_options(self, num_features, options)
        super().__init__(num_features, **options)
        self.implementation = implementation

    @overload
    def __call__(self, x: ArrayLike, mask: ArrayLike | None = None, *, residual: None = None) -> Array: ...

    @overload
    def __call__(self, x: ArrayLike, mask: ArrayLike | None = None, *, residual: ArrayLike) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self, x: ArrayLike, mask: ArrayLike | None = None, *, residual: ArrayLike | None
    ) -> Array | tuple[Array, Array]: ...

    def __call__(self, x: ArrayLike, mask: ArrayLike | None = None, *, residual: ArrayLike | None = None) -> Any:
        """Normalizes the last axis, or `reduction_axes`.

        Args:
          x: `[*rows, N]`.
          mask: booleans of a shape that broadcasts to that of `x`, or None. Mean and variance are those of the elements
            where it is true; every element is normalized.
          residual: an array with the shape and dtype of `x`, added to `x` first, in the same pass. With a residual,
            neither array is rounded to `dtype`; Flax's own norm rounds their sum to it.

        Returns:
          `y`, which has the shape of `x`. With a residual, `(y, x + residual)`; the sum has the dtype of `x`.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this input or these attributes; the message says why.
        """
        return run_norm(self, "rms", x, residual, mask, super().__call__, ("scale",))


@inherit_descriptions(RMSNorm)
class LayerNorm(nnx.LayerNorm):
    """`flax.nnx.LayerNorm` computed by `jaxrnn.layer_norm`, with the same parameters, initial values and results.

    Args:
      epsilon: added to the variance, inside the root.
      use_bias: whether a parameter `bias`, `[N]`, is added to the result.
      bias_init: the initializer of `bias`.
      bias_metadata: metadata of `bias`, such as its sharding.

    Raises:
      ValueError: an argument has an invalid value.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import LayerNorm
      >>> norm, x = LayerNorm(4, rngs=nnx.Rngs(0)), jnp.arange(8.0).reshape(2, 4)
      >>> y, total = norm(x, residual=x)
      >>> y.shape, bool((total == 2 * x).all())
      ((2, 4), True)
    """

    def __init__(
        self, num_features: int, *, implementation: Implementation = None, **options: Unpack[LayerNormOptions]
    ) -> None:
        modules.check_norm_options(self, num_features, options)
        super().__init__(num_features, **options)
        self.implementation = implementation

    @overload
    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None, residual: None = None) -> Array: ...

    @overload
    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None, residual: ArrayLike) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self, x: ArrayLike, *, mask: ArrayLike | None = None, residual: ArrayLike | None
    ) -> Array | tuple[Array, Array]: ...

    @inherit_descriptions(RMSNorm.__call__)
    def __call__(self, x: ArrayLike, *, mask: ArrayLike | None = None, residual: ArrayLike | None = None) -> Any:
        """Normalizes the last axis, or `reduction_axes`."""
        return run_norm(self, "layer", x, residual, mask, super().__call__, ("scale", "bias"))


def run_norm(
    norm: Any,
    kind: str,
    x: Any,
    residual: Any,
    mask: Any,
    flax_norm: Callable[..., Any],
    names: tuple[str, ...],
) -> Any:
    """Normalizes `x` with those parameters among `names` that the module has."""
    name = type(norm).__name__
    x = modules.as_array(f"{name}: x", x)
    if x.ndim == 0:
        raise ValueError(f"{name}: x must be [*rows, N], got a scalar; add the axes that are missing")
    option = modules.option_of_flax(norm, mask, x)
    if norm.promote_dtype is not dtypes.promote_dtype:
        option = "its own promote_dtype"
    if option is not None:
        return modules.run_flax(norm, option, x, residual, functools.partial(flax_norm, mask=mask))
    modules.check_dtypes(norm)
    modules.check_width(f"{name}: x", "num_features", norm.num_features, x.shape[-1])
    given = [None if getattr(norm, name) is None else getattr(norm, name)[...] for name in names]
    promoted = norm.promote_dtype((x, *given), dtype=norm.dtype)
    dtype = dtypes.canonicalize_dtype(*promoted, dtype=norm.dtype)
    # the norm reads inputs in their own dtype if promotion would only widen them
    if residual is None and jnp.promote_types(x.dtype, dtype) != dtype:
        x = promoted[0]
    scale, bias = (*promoted[1:], None)[:2]
    options = {"epsilon": norm.epsilon, "implementation": norm.implementation}
    return modules.normalize(kind, x, scale, bias, residual, dtype, norm, **options)
