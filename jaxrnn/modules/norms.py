"""Norms with the options of Flax's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrnn import context, norms
from jaxrnn.checks import Caller, check_implementation, check_size
from jaxrnn.choice import Choice, record
from jaxrnn.modules.checks import check_rngs
from jaxrnn.modules.reasons import reason_for_complex

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike


def check_norm_options(module: Any, num_features: Any, options: Mapping[str, Any]) -> None:
    """Raises ValueError unless the width and the generators of an NNX norm are valid."""
    caller = Caller(type(module).__name__)
    check_size(caller("num_features"), num_features)
    if "rngs" in options:
        check_rngs(caller, options["rngs"])


def option_of_flax(module: Any, mask: Array | None, x: Array) -> str | None:
    """Returns the option of Flax's norm that the functions of `jaxrnn` do not have, as `name=value`, or None.

    They compute a norm of the last axis, of every element, in float32, on one device.
    """
    if reason_for_complex(module, x) is not None:
        return "complex numbers"
    rank = x.ndim
    given = {name: getattr(module, name) for name in ("reduction_axes", "feature_axes")}
    wrong = {name: axes for name, axes in given.items() if not _axes(axes) or {*_axes(axes)} - {-1, rank - 1}}
    given = {name: getattr(module, name) for name in ("axis_name", "axis_index_groups")}
    wrong |= {name: value for name, value in given.items() if value is not None}
    if not getattr(module, "force_float32_reductions", True):
        wrong["force_float32_reductions"] = False
    if mask is not None:
        return "a mask"
    return next((f"{name}={value}" for name, value in wrong.items()), None)


def run_flax(module: Any, option: str, x: Array, residual: Array | None, run: Callable[[Array], Array]) -> Any:
    """Runs Flax's own norm on `x + residual`, for an `option_of_flax`; returns what `normalize` returns.

    Raises:
      ValueError: no implementation has the name that the module has, or the residual is not like `x`.
      NotImplementedError: the module asks for the kernels.
    """
    caller = Caller(type(module).__name__)
    check_implementation(module.implementation, caller)
    if (module.implementation or context.default()) == "triton":
        raise NotImplementedError(
            f"{caller.name}: the Triton implementation normalizes the last axis, every element of it, in float32, on "
            f'one device, and this norm has {option}; use implementation=None or "xla", which run Flax\'s own norm'
        )
    record(Choice("norm", option, "xla", "Flax's own norm runs it", f"cannot run a norm with {option}", marked=False))
    if residual is None:
        return run(x)
    total = norms.add_residual(*_floating(x, residual), caller=caller)
    return run(total), total


def _axes(axes: int | Sequence[int]) -> Sequence[int]:
    return (axes,) if isinstance(axes, int) else axes


def normalize(
    kind: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    residual: Array | None,
    dtype: DTypeLike,
    module: Any,
    **options: Any,
) -> Any:
    """Runs `jaxrnn.rms_norm` or `jaxrnn.layer_norm` with y in `dtype`; integers become float32, as in Flax.

    Messages name `module`.
    """
    caller = Caller(type(module).__name__, {"weight": "scale"})
    x, residual = _floating(x, residual)
    return norms.normalize(kind, x, scale, bias, residual, dtype=dtype, caller=caller, **options)


def _floating(x: Array, residual: Array | None) -> tuple[Array, Any]:
    """Returns both arrays, in float32 if `x` is not floating-point."""
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x, residual
    if residual is not None and not jnp.issubdtype(jnp.result_type(residual), jnp.inexact):
        residual = jnp.asarray(residual, jnp.float32)
    return x.astype(jnp.float32), residual
