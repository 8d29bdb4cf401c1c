"""What JAX needs to know of a cell: its entry in the shared table, its weights and its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn.numerics import broadcast_to_rank, matmul
from torch_bridge.cells import CellSpec

if TYPE_CHECKING:
    from jax import Array

    States = tuple[Array, ...]


@dataclass(frozen=True)
class Cell(CellSpec):
    """One entry of the table: a `torch_bridge.cells.CellSpec` with the cell's weights and its arithmetic in JAX.

    The three functions compute what those of the same cell in `torch_bridge.kernels.cells` compute, on arrays
    `[..., H]`. States and gradients of states are tuples in the order of `states`.

    Attributes:
      title: the cell in an error message, with an article.
      function: the name of the function of `jaxrnn` that runs it.
      params: the `NamedTuple` of the weights: `w_ih [D, gates * H]`, `w_hh [H, gates * H]`, the field that `bias`
        names, and `b_hn [H]` if the last gate is separate.
      bias: the field `[gates * H]` of `params` that is added to the input projection.
      step: maps (gates, input projection of a separate last gate, states) to (new states, activations). The gates are
        sums of input projection and hidden product, except for a separate last gate, which is the hidden product.
      compute_residuals: maps (activations, states before the step) to (local gradients, factors), both tuples.
      grad_step: maps (gradients of the states after the step, local gradients, factors) to the gradients of the gates,
        followed by that of the hidden product of a separate last gate, and to a tuple with the gradient that goes
        straight to the last of the previous states, if there is one.
      activations_from_states: maps the states after a step to its activations, if these follow from the states alone.
        Residuals that `remat` recomputes then need no matrix products.
      optional: fields of `params` that may be None, each with what its one axis is, "D" or "H".
      prepare: maps (the cell, the caller's weights) to the weights that the loop multiplies, without optional fields.
      epsilon: what a norm adds to the variance.
      update_bias: what `prepare` adds to the bias of the last gate.
    """

    title: str
    function: str
    params: type[Any]
    bias: str
    step: Callable[[Sequence[Array], Any, States], tuple[States, tuple[Array, ...]]]
    compute_residuals: Callable[[tuple[Array, ...], States], tuple[tuple[Array, ...], tuple[Array, ...]]]
    grad_step: Callable[
        [States, tuple[Array, ...], tuple[Array, ...]], tuple[tuple[Array, ...], tuple[Array, ...]]
    ]  # fmt: skip
    activations_from_states: Callable[[States], tuple[Array, ...]] | None = None
    optional: tuple[tuple[str, str], ...] = ()
    prepare: Callable[[Cell, Any], Any] | None = None
    epsilon: float = 0.0
    update_bias: float = 0.0

    def shapes(self, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights by name, for D inputs and H units."""
        wide = self.gates * hidden
        shapes: dict[str, tuple[int, ...]] = {"w_ih": (inputs, wide), "w_hh": (hidden, wide), self.bias: (wide,)}
        return shapes | ({"b_hn": (hidden,)} if self.last_gate_separate else {})

    def optional_shapes(self, params: Any, inputs: int, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the optional weights that `params` has, by name."""
        given = {name: axis for name, axis in self.optional if getattr(params, name) is not None}
        return {name: (inputs if axis == "D" else hidden,) for name, axis in given.items()}

    @property
    def count(self) -> int:
        """The number of local gradients."""
        return self.gates + 1 if self.last_gate_separate else self.gates


@dataclass(frozen=True, eq=False)
class Layout:
    """The layout of a cell's weights, here and in the frameworks that `jaxrnn.convert` converts from and to.

    Attributes:
      cell: the cell; one of them if several differ in their activation alone.
      gates: the names of its gates in Flax, in the order of `cell.params`; a single gate has an empty name.
      linen: its classes in `flax.linen`, with an article.
      activations: the activations of the last gate that jaxrnn computes.
      biased_operand: the operand, i or h, whose layers in Flax have the bias of all gates.
      required_bias: a layer in linen without whose bias the cell computes something else, and the reason.
      nnx: its classes in `flax.nnx`.
      keras: its gates in the order of Keras.
      haiku: its class in Haiku.
      missing: by framework, why that framework cannot have the weights.
    """

    cell: Cell
    gates: tuple[str, ...]
    linen: str
    activations: tuple[str, ...] = ("tanh",)
    biased_operand: str = "i"
    required_bias: tuple[str, str] | None = None
    nnx: tuple[str, ...] = ()
    keras: tuple[str, ...] = ()
    haiku: str = ""
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The cell in an error message, without an article."""
        return self.cell.title.partition(" ")[2]

    @property
    def function(self) -> str:
        """The function of jaxrnn that runs the weights."""
        return f"jaxrnn.{self.cell.function}"


def project(cell: Cell, params: Any, xs: Array, precision: jax.lax.PrecisionLike) -> Array:
    """Returns the input projection `xs @ w_ih + bias`, `[..., gates * H]` in float32, of a cell without a norm."""
    product = matmul(xs, params.w_ih, precision, jnp.float32)
    return product + broadcast_to_rank(getattr(params, cell.bias), product)


def add_gates(cell: Cell, xp: Array, hp: Array, b_hn: Array | None) -> tuple[list[Array], Array | None]:
    """Returns the gates and `x_last`, as `Cell.step` takes them, from `xp` and `hp = h @ w_hh`, `[..., gates * H]`."""
    x, h = jnp.split(xp, cell.gates, axis=-1), jnp.split(hp, cell.gates, axis=-1)
    if not cell.last_gate_separate or b_hn is None:
        return [one + other for one, other in zip(x, h, strict=True)], None
    sums = [one + other for one, other in zip(x[:-1], h[:-1], strict=True)]
    return [*sums, h[-1] + broadcast_to_rank(b_hn, h[-1])], x[-1]


def residuals_of(cell: Cell, activations: tuple[Array, ...], states: States) -> dict[str, Array]:
    """Returns the residuals of a step by name, in float32, from its activations and the states before it."""
    local_grads, factors = cell.compute_residuals(activations, states)
    names = [name for name, _ in cell.residuals if name != "local_grads"]
    return {"local_grads": interleave(cell, local_grads), **dict(zip(names, factors, strict=True))}


def gradients_of(
    cell: Cell, residuals: dict[str, Array], dstates: States
) -> tuple[tuple[Array, ...], tuple[Array | None, ...]]:
    """Returns the gradients of `Cell.grad_step` for a step, and by state what goes straight to the state before it.

    Args:
      cell: the cell.
      residuals: the residuals of the step by name, in float32.
      dstates: the gradients of the states after the step.
    """
    factors = tuple(residuals[name] for name, _ in cell.residuals if name not in ("local_grads", "norm_state"))
    if len(cell.states) > 1:
        dstates = (dstates[0], dstates[1] + dstates[0] * residuals["dc_dh"])
    grads, carried = cell.grad_step(dstates, separate(cell, residuals["local_grads"]), factors)
    return grads, (None,) * (len(cell.states) - len(carried)) + carried


def tangents_of(
    cell: Cell, residuals: dict[str, Array], gates: Sequence[Array], x_last: Array | None, before: States
) -> States:
    """Returns the tangents of the states after a step, of a cell without a norm: the transpose of `gradients_of`.

    Args:
      cell: the cell.
      residuals: the residuals of the step by name, in float32.
      gates, x_last: the tangents of what `Cell.step` takes, as `add_gates` returns it.
      before: the tangents of the states before the step, without what they change by the gates.
    """
    changes = tuple(gates) if x_last is None else (*gates[:-1], x_last, gates[-1])
    (_, carried), transpose = jax.vjp(lambda *after: gradients_of(cell, residuals, after), *before)
    passed_on = tuple(None if d is None else x for d, x in zip(carried, before, strict=True))
    return transpose((changes, passed_on))


def hidden_gradients(cell: Cell, grads: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the gradients of the hidden products by gate, given the gradients from `Cell.grad_step`."""
    return grads[: cell.gates - 1] + grads[cell.gates :] if cell.last_gate_separate else grads


def interleave(cell: Cell, local_grads: Sequence[Array]) -> Array:
    """Returns local gradients `[..., H]` side by side by unit, with zeros up to the width in the table."""
    width = dict(cell.residuals)["local_grads"]
    padded = [*local_grads, *[jnp.zeros_like(local_grads[0])] * (width - len(local_grads))]
    return jnp.stack(padded, axis=-1).reshape(*local_grads[0].shape[:-1], -1)


def separate(cell: Cell, local_grads: Array) -> tuple[Array, ...]:
    """Inverts `interleave`."""
    width = dict(cell.residuals)["local_grads"]
    return tuple(jnp.unstack(local_grads.reshape(*local_grads.shape[:-1], -1, width), axis=-1))[: cell.count]


def bias_grad(dxp: Array) -> Array:
    """Returns the gradient of a bias of gates, given that of all steps' gates, `[G, T, B, N]`."""
    return jnp.sum(dxp, axis=(0, 1, 2), dtype=jnp.float32)


def recurrent_grads(
    cell: Cell, contract: Callable[[Array], Array], dxp: Array, hidden_grads: dict[str, Array]
) -> dict[str, Array]:
    """Returns the gradients of the recurrent weights by name.

    Args:
      cell: the cell.
      contract: maps gradients `[G, T, B, N]` to their product with the states before each step, `[H, N]`.
      dxp: the gradients of the gates.
      hidden_grads: by name the gradient of a separate last gate's hidden product.
    """
    if not cell.last_gate_separate:
        return {"w_hh": contract(dxp)}
    # one product with all of dxp and one with dhn: XLA would copy the other columns of dxp to multiply these alone
    dhn = hidden_grads["dhn"]
    width = (cell.gates - 1) * dhn.shape[-1]
    return {"w_hh": jnp.concatenate([contract(dxp)[:, :width], contract(dhn)], axis=-1), "b_hn": bias_grad(dhn)}
