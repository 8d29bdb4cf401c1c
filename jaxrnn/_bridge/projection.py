"""The launch of an input projection, and when it is profitable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn._bridge import availability
from jaxrnn._bridge.launch_kind import NamedOutput, RowLaunchKind, dtypes_of
from jaxrnn._bridge.primitive import bind

if TYPE_CHECKING:
    from jax import Array


def launch_projection(x: Array, w_ih: Array, bias: Array, dtype: Any, *, may_use_xla: bool = False) -> Array:
    """Launches an input projection: returns `x @ w_ih + bias`, `[*rows, W]`, in `dtype`, float32 or float16.

    x is `[*rows, D]`, w_ih is `[D, W]` in the dtype of x, and bias is `[W]` in float32. Products of float32 run in
    TF32: `w_ih` must already be rounded to it, and D is then at most 128. With `may_use_xla`, XLA computes the results
    on a CPU.
    """
    arrays: dict[str, Array | None] = {"x": x[None], "w_ih_t": w_ih.T[None], "bias": bias[None]}
    return bind(PROJECTION, arrays, [NamedOutput("xp", jnp.dtype(dtype))], may_use_xla=may_use_xla)["xp"][0]


def is_projection_profitable(rows: Any, inputs: int, gates: int, dtype: Any) -> bool:
    """Whether `launch_projection` supports `rows` rows here and is faster than XLA's product and sum.

    It is never profitable for a symbolic number of rows.
    """
    from torch_bridge import input_projections

    if not isinstance(rows, int):
        return False
    problem = input_projections.Problem(1, rows, inputs, gates, (("x", str(jnp.dtype(dtype))),))
    return input_projections.is_profitable(problem, availability.chosen_device())


class ProjectionKind(RowLaunchKind):
    """The kind of `launch_projection`."""

    name = "projection"

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        by_name = dict(zip(params["inputs"], shapes, strict=True))
        shape = (*by_name["x"][:-1], by_name["bias"][-1])
        return [jax.ShapeDtypeStruct(shape, output.dtype) for output in params["outputs"]]

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        from torch_bridge.input_projections import Launch, Problem

        by_name = dict(zip(params["inputs"], arrays, strict=True))
        (models, rows, inputs), gates = by_name["x"].shape, by_name["bias"].shape[-1]
        return Launch(Problem(models, rows, inputs, gates, dtypes_of(arrays, params)), device)

    def in_xla(self, arrays: Sequence[Array], params: dict[str, Any]) -> list[Array]:
        by_name, (output,) = dict(zip(params["inputs"], arrays, strict=True)), params["outputs"]
        product = jnp.einsum("srd,sgd->srg", by_name["x"], by_name["w_ih_t"], preferred_element_type=jnp.float32)
        return [(product + by_name["bias"][:, None]).astype(output.dtype)]

    def describe(self, params: dict[str, Any]) -> tuple[str, str]:
        return "input projection", "fwd"

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name == "w_ih_t":
            return ("models", "gates", "columns")
        if name == "bias":
            return ("models", "gates")
        return ("models", *(f"rows_{k}" for k in range(1, rank - 1)), "columns" if name == "x" else "gates")


PROJECTION = ProjectionKind()
