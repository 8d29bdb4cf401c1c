"""The launch of RMSNorm or LayerNorm, forward or backward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn._bridge.launch_kind import ROW_STATISTICS, ROW_WEIGHTS, SUMMED_OUTPUTS, Output, RowLaunchKind
from jaxrnn._bridge.primitive import bind
from jaxrnn.numerics import rounded_sum

if TYPE_CHECKING:
    from jax import Array


def launch_norm(
    norm: str, direction: str, arrays: dict[str, Array | None], outputs: Sequence[Output], *, epsilon: float,
    may_use_xla: bool = False,
) -> dict[str, Array]:  # fmt: skip
    """Launches the kernel of a norm, `norm` "rms" or "layer", as `launch` does. `torch_bridge.norms` names its arrays.

    Weights and their gradients are `[S, N]`, statistics are `[S, *rows]`, and all others are `[S, *rows, N]`.
    """
    kind = NormKind(
        outputs=tuple(outputs), may_use_xla=may_use_xla, norm=norm, direction=direction, epsilon=epsilon
    )  # fmt: skip
    return bind(kind, arrays)


def _forward(arrays: Mapping[str, Array], epsilon: float, centered: bool) -> dict[str, Array]:
    """Returns the outputs of the forward launch by name, in float32."""
    total = rounded_sum(arrays["x"], arrays["residual"]) if "residual" in arrays else arrays["x"]
    x = total.astype(jnp.float32)
    mean = jnp.mean(x, axis=-1) if centered else jnp.zeros(x.shape[:-1])
    y = x - mean[..., None]
    rstd = jax.lax.rsqrt(jnp.mean(y * y, axis=-1) + epsilon)
    y = y * rstd[..., None]
    if "weight" in arrays:
        y = y * arrays["weight"][:, None].astype(jnp.float32)
    if "bias" in arrays:
        y = y + arrays["bias"][:, None].astype(jnp.float32)
    return {"y": y, "total": x, "mean": mean, "rstd": rstd}


def _backward(arrays: Mapping[str, Array], centered: bool) -> dict[str, Array]:
    """Returns the outputs of the backward launch by name, in float32."""
    x = arrays["x"].astype(jnp.float32)
    dy, rstd = arrays["dy"].astype(jnp.float32), arrays["rstd"][..., None]
    normal = (x - arrays["mean"][..., None] if centered else x) * rstd
    d = dy * arrays["weight"][:, None].astype(jnp.float32) if "weight" in arrays else dy
    dx = d - normal * jnp.mean(d * normal, axis=-1, keepdims=True)
    if centered:
        dx = dx - jnp.mean(d, axis=-1, keepdims=True)
    dx = dx * rstd
    if "dtotal" in arrays:
        dx = dx + arrays["dtotal"].astype(jnp.float32)
    return {"dx": dx, "dweight": jnp.sum(dy * normal, axis=1), "dbias": jnp.sum(dy, axis=1)}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class NormKind(RowLaunchKind):
    """The kind of `launch_norm`."""

    name = "norm"

    norm: Any
    direction: Any
    epsilon: float

    def shape_of(self, output: Any, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        shape: tuple[int, ...] = arrays["x"].shape  # [S, *rows, N]
        if output.name in SUMMED_OUTPUTS:
            return (shape[0], shape[-1])
        return shape[:-1] if output.name in ROW_STATISTICS else shape

    def choose(self, arrays: Mapping[str, Any], device: Any) -> Any:
        from torch_bridge.norms import Launch, Problem

        models, *rows, columns = arrays["x"].shape
        problem = Problem(
            self.norm, self.direction, models, math.prod(rows), columns, self.epsilon, self.dtypes(arrays)
        )
        return Launch(problem, device)

    def in_xla(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        centered = self.norm == "layer"
        results = _forward(arrays, self.epsilon, centered) if self.direction == "fwd" else _backward(arrays, centered)
        return {output.name: results[output.name].astype(output.dtype) for output in self.outputs}

    def describe(self) -> tuple[str, str]:
        return f"{self.norm}_norm", self.direction

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name in ROW_WEIGHTS + SUMMED_OUTPUTS:
            return ("models", "columns")
        last = () if name in ROW_STATISTICS else ("columns",)
        return ("models", *(f"rows_{k}" for k in range(1, rank - len(last))), *last)
