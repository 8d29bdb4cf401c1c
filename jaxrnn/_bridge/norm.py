"""The launch of RMSNorm or LayerNorm, forward or backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn._bridge.launch_kind import (
    ROW_STATISTICS,
    ROW_WEIGHTS,
    SUMMED_OUTPUTS,
    NamedOutput,
    RowLaunchKind,
    dtypes_of,
)
from jaxrnn._bridge.primitive import bind
from jaxrnn.numerics import rounded_sum

if TYPE_CHECKING:
    from jax import Array


def launch_norm(
    norm: str, direction: str, arrays: dict[str, Array | None], outputs: Sequence[NamedOutput], *, epsilon: float,
    may_use_xla: bool = False,
) -> dict[str, Array]:  # fmt: skip
    """Launches the kernel of a norm, `norm` "rms" or "layer", as `launch` does. `torch_bridge.norms` names its arrays.

    Weights and their gradients are `[S, N]`, statistics are `[S, *rows]`, and all others are `[S, *rows, N]`.
    """
    return bind(NORM, arrays, outputs, norm=norm, direction=direction, epsilon=epsilon, may_use_xla=may_use_xla)


def _forward(arrays: dict[str, Array], epsilon: float, centered: bool) -> dict[str, Array]:
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


def _backward(arrays: dict[str, Array], centered: bool) -> dict[str, Array]:
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


class NormKind(RowLaunchKind):
    """The kind of `launch_norm`."""

    name = "norm"

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        like = dict(zip(params["inputs"], shapes, strict=True))["x"]  # [S, *rows, N]
        return [
            jax.ShapeDtypeStruct(
                (like[0], like[-1]) if output.name in SUMMED_OUTPUTS
                else like[:-1] if output.name in ROW_STATISTICS
                else like,
                output.dtype,
            )
            for output in params["outputs"]
        ]  # fmt: skip

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        from torch_bridge.norms import Launch, Problem

        models, rows, columns = dict(zip(params["inputs"], arrays, strict=True))["x"].shape
        problem = Problem(
            params["norm"], params["direction"], models, rows, columns, params["epsilon"], dtypes_of(arrays, params)
        )
        return Launch(problem, device)

    def in_xla(self, arrays: Sequence[Array], params: dict[str, Any]) -> list[Array]:
        by_name = dict(zip(params["inputs"], arrays, strict=True))
        centered = params["norm"] == "layer"
        if params["direction"] == "fwd":
            results = _forward(by_name, params["epsilon"], centered)
        else:
            results = _backward(by_name, centered)
        return [results[output.name].astype(output.dtype) for output in params["outputs"]]

    def describe(self, params: dict[str, Any]) -> tuple[str, str]:
        return f"{params['norm']}_norm", params["direction"]

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name in ROW_WEIGHTS + SUMMED_OUTPUTS:
            return ("models", "columns")
        last = () if name in ROW_STATISTICS else ("columns",)
        return ("models", *(f"rows_{k}" for k in range(1, rank - len(last))), *last)


NORM = NormKind()
