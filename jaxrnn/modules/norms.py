"""Norms with the options of Flax's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrnn import norms
from jaxrnn.checks import Caller, check_size
from jaxrnn.modules.checks import check_rngs

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike


# The names that the argument `norm` of the stacks accepts.
NORMS = ("rms", "layer")


def check_norm_options(module: Any, num_features: Any, options: Mapping[str, Any]) -> None:
    """Raises ValueError unless the width and the generators of an NNX norm are valid."""
    caller = Caller(type(module).__name__)
    check_size(caller("num_features"), num_features)
    if "rngs" in options:
        check_rngs(caller, options["rngs"])


def check_norm(module: Any, mask: Array | None, rank: int) -> None:
    """Raises NotImplementedError unless Flax's options ask for a norm of the last axis, in float32, on one device."""
    given = {name: getattr(module, name) for name in ("reduction_axes", "feature_axes")}
    wrong = {name: axes for name, axes in given.items() if not _axes(axes) or {*_axes(axes)} - {-1, rank - 1}}
    given = {name: getattr(module, name) for name in ("axis_name", "axis_index_groups")} | {"mask": mask}
    wrong |= {name: value for name, value in given.items() if value is not None}
    if not getattr(module, "force_float32_reductions", True):
        wrong["force_float32_reductions"] = False
    for name, value in wrong.items():
        kind = type(module).__name__
        shown = "an array" if name == "mask" else value
        raise NotImplementedError(
            f"{kind}: {name} cannot be {shown}, because jaxrnn normalises the last axis, in float32, on one device; "
            f"use Flax's own {kind} instead"
        )


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
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.float32)
        if residual is not None and not jnp.issubdtype(jnp.result_type(residual), jnp.inexact):
            residual = jnp.asarray(residual, jnp.float32)
    return norms.normalize(kind, x, scale, bias, residual, dtype=dtype, caller=caller, **options)
