"""Cells of Flax with one dense layer per operand and gate, which are named like `ir`: operand i or h, and the gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrnn.convert.arrays import describe, read_arrays
from jaxrnn.convert.checks import check_shapes, recurrent_shape
from jaxrnn.convert.layout import biases_of, pack

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells import Layout, Params


def dense_names(layout: Layout) -> list[str]:
    """Returns the names of a cell's layers."""
    return [operand + gate for operand in "ih" for gate in layout.gates]


def from_dense(caller: str, layout: Layout, tree: Mapping[str, Any]) -> Params:
    """Returns the parameters from one dense layer per operand and gate; a missing bias is zero.

    The kernels of the state may be blocks.
    """
    names = dense_names(layout)
    named = {f"{name}.{part}": x for name in names for part, x in read_dense(caller, name, tree[name]).items()}
    arrays = read_arrays(caller, named, named)
    first = [arrays[f"{operand}{layout.gates[0]}.kernel"] for operand in "ih"]
    if first[0].ndim != 2 or first[1].ndim not in (2, 3):
        remedy = "; convert stacked weights of several models with jax.vmap" if first[0].ndim == 3 else ""
        raise ValueError(
            f"{caller}: kernels must be [D, H] and [H, H], got {first[0].shape} and {first[1].shape}{remedy}"
        )
    (inputs, hidden), square = first[0].shape, recurrent_shape(first[1], *[first[0].shape[1]] * 2)
    shapes: dict[str, tuple[int, ...]] = {f"{name}.bias": (hidden,) for name in names}
    shapes |= {f"{name}.kernel": (inputs, hidden) if name[0] == "i" else square for name in names}
    check_shapes(caller, arrays, shapes)

    def bias(operand: str) -> Array | None:
        found = [arrays.get(f"{operand}{gate}.bias") for gate in layout.gates]
        present = [x for x in found if x is not None]
        zeros = jnp.zeros(hidden, jnp.result_type(*present)) if present else None
        return None if zeros is None else jnp.concatenate([zeros if x is None else x for x in found])

    def kernel(operand: str) -> Array:
        return jnp.concatenate([arrays[f"{operand}{gate}.kernel"] for gate in layout.gates], axis=-1)

    return pack(layout, kernel("i"), kernel("h"), bias("i"), bias("h"))


def to_dense(layout: Layout, params: Params) -> dict[str, dict[str, Array]]:
    """Returns the layers of a cell by name. Biases that Flax does not have are left out."""
    bias, b_hn = biases_of(layout, params)
    by_gate = [jnp.split(x, len(layout.gates), axis=-1) for x in (params.w_ih, params.w_hh, bias)]
    tree: dict[str, dict[str, Array]] = {}
    for gate, w_ih, w_hh, b in zip(layout.gates, *by_gate, strict=True):
        tree |= {f"i{gate}": {"kernel": w_ih}, f"h{gate}": {"kernel": w_hh}}
        tree[layout.biased_operand + gate]["bias"] = b
    if b_hn is not None:
        tree[f"h{layout.gates[-1]}"]["bias"] = b_hn
    return tree


def read_dense(caller: str, name: str, entry: Any) -> dict[str, Any]:
    """Returns kernel and bias of a dense layer by name; the layer is a module or a mapping."""
    if not isinstance(entry, Mapping) and not hasattr(entry, "kernel"):
        raise ValueError(f"{caller}: {name} must be a layer with a kernel, got {describe(entry)}; pass its parameters")
    if not isinstance(entry, Mapping):
        entry = {part: x for part in ("kernel", "bias") if (x := getattr(entry, part, None)) is not None}
    elif not entry.keys() <= {"kernel", "bias"}:
        raise ValueError(f"{caller}: {name} must have a kernel and may have a bias, got {describe(entry)}")
    if "kernel" not in entry:
        raise ValueError(f"{caller}: {name} has no kernel, only {describe(entry)}")
    return dict(entry)
