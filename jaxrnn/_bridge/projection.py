"""The launch of an input projection, and when it is profitable."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrnn._bridge import availability
from jaxrnn._bridge.launch_kind import Output, RowLaunchKind
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
    kind = ProjectionKind(
        outputs=(Output("xp", jnp.dtype(dtype)),), may_use_xla=may_use_xla, precision=precision,
        or_product=or_product,
    )  # fmt: skip
    return bind(kind, arrays)["xp"][0]


def may_launch_projection(rows: Any, inputs: int, gates: int, dtype: Any) -> bool:
    """Returns whether a kernel for this input projection exists and is faster than XLA from some number of rows on.

    `vmap` may add rows or models, so `launch_projection` compares the number of rows when the launch is lowered. The
    result is False for a symbolic number of rows.
    """
    from torch_bridge import input_projections

    problem = input_projections.Problem(1, _MANY_ROWS, inputs, gates, (("x", str(jnp.dtype(dtype))),))
    return isinstance(rows, int) and input_projections.is_profitable(problem, availability.chosen_device())


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ProjectionKind(RowLaunchKind):
    """The kind of `launch_projection`."""

    name = "projection"

    precision: Any
    or_product: bool

    def shape_of(self, output: Any, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        return (*arrays["x"].shape[:-1], arrays["bias"].shape[-1])

    def choose(self, arrays: Mapping[str, Any], device: Any) -> Any:
        from torch_bridge.input_projections import Launch, Problem, is_profitable

        models, *rows, inputs = arrays["x"].shape
        problem = Problem(models, math.prod(rows), inputs, arrays["bias"].shape[-1], self.dtypes(arrays))
        return None if self.or_product and not is_profitable(problem, device) else Launch(problem, device)

    def in_xla(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        (output,) = self.outputs
        product = jnp.einsum(
            "srd,sgd->srg", arrays["x"], arrays["w_ih_t"], precision=self.precision, preferred_element_type=jnp.float32
        )
        return {output.name: cast_clamped(product + arrays["bias"][:, None], output.dtype)}

    def operands(self, launch: Any, arrays: dict[str, Array]) -> dict[str, Array]:
        """Rounds weights in float32 to TF32; the kernel rounds the inputs."""
        return map_weights(round_to_tf32, arrays, ("w_ih_t",))

    def describe(self) -> tuple[str, str]:
        return "input projection", "fwd"

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name == "w_ih_t":
            return ("models", "gates", "columns")
        if name == "bias":
            return ("models", "gates")
        return ("models", *(f"rows_{k}" for k in range(1, rank - 1)), "columns" if name == "x" else "gates")
