"""The launch of RMSNorm or LayerNorm, forward or backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from jaxrnn._bridge.launch_kind import ROW_STATISTICS, ROW_WEIGHTS, WEIGHT_GRADS, NamedOutput, RowLaunchKind, dtypes_of
from jaxrnn._bridge.primitive import bind

if TYPE_CHECKING:
    from jax import Array


def launch_norm(
    norm: str, direction: str, arrays: dict[str, Array | None], outputs: Sequence[NamedOutput], *, epsilon: float
) -> dict[str, Array]:
    """Launches the kernel of a norm, `norm` "rms" or "layer", as `launch` does. `torch_bridge.norms` names its arrays.

    Weights and their gradients are `[S, N]`, statistics are `[S, *rows]`, and all others are `[S, *rows, N]`.
    """
    return bind(NORM, arrays, outputs, norm=norm, direction=direction, epsilon=epsilon)


class NormKind(RowLaunchKind):
    """The kind of `launch_norm`."""

    name = "norm"

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        like = dict(zip(params["inputs"], shapes, strict=True))["x"]  # [S, *rows, N]
        return [
            jax.ShapeDtypeStruct(
                (like[0], like[-1]) if output.name in WEIGHT_GRADS
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

    def describe(self, params: dict[str, Any]) -> tuple[str, str]:
        return f"{params['norm']}_norm", params["direction"]

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name in ROW_WEIGHTS + WEIGHT_GRADS:
            return ("models", "columns")
        last = () if name in ROW_STATISTICS else ("columns",)
        return ("models", *(f"rows_{k}" for k in range(1, rank - len(last))), *last)


NORM = NormKind()
