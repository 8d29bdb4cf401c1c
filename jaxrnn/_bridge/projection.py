"""The launch of an input projection, and when it is profitable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn._bridge import availability
from jaxrnn._bridge.launch_kind import NamedOutput, RowLaunchKind, dtypes_of
from jaxrnn._bridge.primitive import bind
from jaxrnn._bridge.recurrence import map_weights, round_to_tf32
from jaxrnn.numerics import cast_clamped

if TYPE_CHECKING:
    from jax import Array


# A number of rows that is far above every threshold of `input_projections.is_profitable`.
_MANY_ROWS = 2**30


def launch_projection(
    x: Array, w_ih: Array, bias: Array, dtype: Any, *, precision: Any = None, or_product: bool = False,
    may_use_xla: bool = False,
) -> Array:  # fmt: skip
    """Launches an input projection: returns `x @ w_ih + bias`, `[*rows, W]`, in `dtype`, float32 or float16.

    x is `[*rows, D]`, w_ih is `[D, W]` in the dtype of x, and bias is `[W]` in float32. Products of float32 run in
    TF32, and D is then at most 128. With `or_product`, XLA computes the results where its product, in `precision`, is
    faster; this is decided when the launch is lowered, because `vmap` adds rows or models. With `may_use_xla`, XLA
    computes the results on a CPU.
    """
    arrays: dict[str, Array | None] = {"x": x[None], "w_ih_t": w_ih.T[None], "bias": bias[None]}
    return bind(
        PROJECTION, arrays, [NamedOutput("xp", jnp.dtype(dtype))], precision=precision, or_product=or_product,
        may_use_xla=may_use_xla,
    )["xp"][0]  # fmt: skip


def may_launch_projection(rows: Any, inputs: int, gates: int, dtype: Any) -> bool:
    """Returns whether a kernel for this input projection exists and is faster than XLA from some number of rows on.

    `vmap` may add rows or models, so `launch_projection` compares the number of rows when the launch is lowered. The
    result is False for a symbolic number of rows.
    """
    from torch_bridge import input_projections

    problem = input_projections.Problem(1, _MANY_ROWS, inputs, gates, (("x", str(jnp.dtype(dtype))),))
    return isinstance(rows, int) and input_projections.is_profitable(problem, availability.chosen_device())


def _problem(arrays: Sequence[Any], params: dict[str, Any]) -> Any:
    """Returns the `torch_bridge` problem of a shard."""
    from torch_bridge.input_projections import Problem

    by_name = dict(zip(params["inputs"], arrays, strict=True))
    (models, rows, inputs), gates = by_name["x"].shape, by_name["bias"].shape[-1]
    return Problem(models, rows, inputs, gates, dtypes_of(arrays, params))


class ProjectionKind(RowLaunchKind):
    """The kind of `launch_projection`."""

    name = "projection"

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        by_name = dict(zip(params["inputs"], shapes, strict=True))
        shape = (*by_name["x"][:-1], by_name["bias"][-1])
        return [jax.ShapeDtypeStruct(shape, output.dtype) for output in params["outputs"]]

    def prefers_xla(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> bool:
        from torch_bridge import input_projections

        return params["or_product"] and not input_projections.is_profitable(_problem(arrays, params), device)

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        from torch_bridge import input_projections

        return input_projections.Launch(_problem(arrays, params), device)

    def in_xla(self, arrays: Sequence[Array], params: dict[str, Any]) -> list[Array]:
        by_name, (output,) = dict(zip(params["inputs"], arrays, strict=True)), params["outputs"]
        product = jnp.einsum(
            "srd,sgd->srg", by_name["x"], by_name["w_ih_t"], precision=params["precision"],
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return [cast_clamped(product + by_name["bias"][:, None], output.dtype)]

    def operands(self, launch: Any, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Rounds weights in float32 to TF32; the kernel rounds the inputs."""
        return map_weights(round_to_tf32, arrays, params, ("w_ih_t",))

    def describe(self, params: dict[str, Any]) -> tuple[str, str]:
        return "input projection", "fwd"

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name == "w_ih_t":
            return ("models", "gates", "columns")
        if name == "bias":
            return ("models", "gates")
        return ("models", *(f"rows_{k}" for k in range(1, rank - 1)), "columns" if name == "x" else "gates")


PROJECTION = ProjectionKind()
