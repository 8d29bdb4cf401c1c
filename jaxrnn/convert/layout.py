"""The layouts of cells, and the packing of matrices and biases into parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrnn.cells import LAYOUTS

if TYPE_CHECKING:
    from typing import TypeVar

    from jax import Array

    from jaxrnn.cells import Layout, Params

    ParamsT = TypeVar("ParamsT", bound=Params)


def layout_of(params: Any) -> Layout | None:
    """Returns the layout of parameters, or None if they belong to no cell that can be converted."""
    return next((layout for layout in LAYOUTS if isinstance(params, layout.cell.params)), None)


def layouts_of(framework: str) -> tuple[Layout, ...]:
    """Returns the layouts of the cells whose weights a framework can have."""
    return tuple(layout for layout in LAYOUTS if framework not in layout.missing)


def pack(
    layout: Layout,
    w_ih: Array,
    w_hh: Array,
    b_i: Array | None = None,
    b_h: Array | None = None,
    *,
    b_hn: Array | None = None,
    order: tuple[str, ...] | None = None,
) -> Any:
    """Returns the parameters of a cell of n gates. Biases that are always added become one; missing ones are zeros.

    Args:
      layout: the layout of the cell.
      w_ih: `[D, nH]`.
      w_hh: `[H, nH]`, or N blocks `[N, H / N, nH / N]`.
      b_i: `[nH]`, the bias of the input projection.
      b_h: `[nH]`, the bias of the hidden product.
      b_hn: `[H]`, a bias that is added to the hidden product of a separate last gate, like the last part of `b_h`.
      order: the order of the gates in all arguments but `b_hn`, by default that of `layout`.
    """
    if order is not None:
        w_ih, w_hh = (reorder(w, order, layout.gates) for w in (w_ih, w_hh))
        b_i, b_h = (None if b is None else reorder(b, order, layout.gates) for b in (b_i, b_h))
    cell, zeros = layout.cell, jnp.zeros(w_ih.shape[-1:], w_ih.dtype)
    if not cell.last_gate_separate:
        present = [b for b in (b_i, b_h) if b is not None]
        bias = sum(present[1:], start=present[0]) if present else zeros
        return cell.params(w_ih=w_ih, w_hh=w_hh, **{cell.bias: bias})
    summed = (cell.gates - 1) * (len(zeros) // cell.gates)
    bias = zeros if b_i is None else b_i
    if b_h is not None:
        bias = jnp.concatenate([bias[:summed] + b_h[:summed], bias[summed:]])
        b_hn = b_h[summed:] if b_hn is None else b_h[summed:] + b_hn
    b_hn = zeros[summed:] if b_hn is None else b_hn
    return cell.params(w_ih=w_ih, w_hh=w_hh, b_hn=b_hn, **{cell.bias: bias})


def biases_of(layout: Layout, params: Any) -> tuple[Array, Array | None]:
    """Returns the bias `[nH]` of the input projection, and `b_hn [H]`, which is None if no gate is separate."""
    return getattr(params, layout.cell.bias), params.b_hn if layout.cell.last_gate_separate else None


def two_biases(layout: Layout, params: Params) -> tuple[Array, Array]:
    """Returns the biases of the input projection and of the hidden product, each `[nH]`, as cuDNN has them."""
    bias, b_hn = biases_of(layout, params)
    if b_hn is None:
        return bias, jnp.zeros_like(bias)
    return bias, jnp.concatenate([jnp.zeros(bias.shape[0] - b_hn.shape[0], b_hn.dtype), b_hn])


def reorder(x: Array, came: tuple[str, ...], wanted: tuple[str, ...]) -> Array:
    """Returns `x [..., nH]` with its gates reordered."""
    if came == wanted:
        return x
    gates = dict(zip(came, jnp.split(x, len(came), axis=-1), strict=True))
    return jnp.concatenate([gates[gate] for gate in wanted], axis=-1)


def without_blocks(params: Any) -> Any:
    """Returns the parameters with recurrent weights `[H, nH]`: blocks stand on the diagonal of zeros, for each gate."""
    if params.w_hh.ndim == 2:
        return params
    blocks, size, wide = params.w_hh.shape
    gates, index = wide // size, jnp.arange(blocks)
    dense = jnp.zeros((blocks, size, gates, blocks, size), params.w_hh.dtype)
    dense = dense.at[index, :, :, index].set(params.w_hh.reshape(blocks, size, gates, size))
    return params._replace(w_hh=dense.reshape(blocks * size, gates * blocks * size))
