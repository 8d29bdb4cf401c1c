"""Weights from and to Equinox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from jaxrnn.convert.arrays import read_arrays
from jaxrnn.convert.checks import check_params, check_shapes, expect, find_layout
from jaxrnn.convert.layout import biases_of, layouts_of, pack, without_blocks

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells import Params, gru, lstm
    from jaxrnn.convert.layout import ParamsT


@overload
def from_equinox(cell: Any, *, into: type[ParamsT]) -> ParamsT: ...


@overload
def from_equinox(cell: Mapping[str, Any], *, into: None = ...) -> Params: ...


@overload
def from_equinox(cell: gru.EquinoxCell, *, into: None = ...) -> gru.Params: ...


@overload
def from_equinox(cell: lstm.EquinoxCell, *, into: None = ...) -> lstm.Params: ...


@overload
def from_equinox(cell: Any, *, into: None = ...) -> Params: ...


def from_equinox(cell: Any, *, into: type[Any] | None = None) -> Params:
    """Returns the weights of `equinox.nn.GRUCell` or `LSTMCell`, whose formulas and order of gates are the same.

    Args:
      cell: the cell, or a mapping with its arrays: `weight_ih [3H|4H, D]`, `weight_hh [3H|4H, H]`, `bias [3H|4H]`, and
        `bias_n [H]` for a GRU. Biases that are None (`use_bias=False`) give zeros.
      into: the class of the parameters, such as `jaxrnn.GRUParams`. It tells type checkers the class of the result, and
        weights of another cell raise.

    Returns:
      `GRUParams` or `LSTMParams`, with arrays in the dtypes of the source.

    Raises:
      ValueError: the module is another one, or shapes are wrong; or the weights are not those of `into`.

    Examples:
      >>> import equinox as eqx
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> cell, xs = eqx.nn.GRUCell(3, 4, key=jax.random.key(0)), jnp.ones((5, 3))
      >>> _, ys = jaxrnn.gru(convert.from_equinox(cell), jnp.zeros(4), xs)
      >>> bool(jnp.allclose(ys[0], cell(xs[0], jnp.zeros(4)), atol=1e-2))
      True
    """
    names = ("weight_ih", "weight_hh", "bias", "bias_n")
    get = cell.get if isinstance(cell, Mapping) else lambda name: getattr(cell, name, None)
    given = {name: x for name in names if (x := get(name)) is not None}
    arrays = read_arrays("from_equinox", given, (*names[:2], *(name for name in names[2:] if name in given)), cell)
    layout, inputs, hidden = find_layout(
        "from_equinox", arrays, "weight_ih", "weight_hh", layouts_of("equinox"), transposed=True
    )
    wide = layout.cell.gates * hidden
    shapes: dict[str, tuple[int, ...]] = {"weight_ih": (wide, inputs), "weight_hh": (wide, hidden), "bias": (wide,)}
    if layout.cell.last_gate_separate:
        shapes["bias_n"] = (hidden,)
    check_shapes("from_equinox", arrays, shapes)
    bias, bias_n = (arrays.get(name) for name in names[2:])
    params = pack(layout, arrays["weight_ih"].T, arrays["weight_hh"].T, bias, b_hn=bias_n)
    return expect("from_equinox", params, into)


def to_equinox(params: Params) -> dict[str, Array]:
    """Returns the arrays of `equinox.nn.GRUCell` or `LSTMCell` (with `use_bias=True`), by attribute.

    Args:
      params: the weights.

    Returns:
      `weight_ih [nH, D]`, `weight_hh [nH, H]` and `bias [nH]` for n gates, and `bias_n [H]` for a GRU, in the dtypes of
      `params`.

    Raises:
      ValueError: `params` are neither `GRUParams` nor `LSTMParams`, since Equinox has no other cells, or their shapes
        disagree.

    Examples:
      >>> import equinox as eqx
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> params = jaxrnn.LSTMParams(jnp.ones((3, 16)), jnp.ones((4, 16)), jnp.zeros(16))
      >>> cell, arrays = eqx.nn.LSTMCell(3, 4, key=jax.random.key(0)), convert.to_equinox(params)
      >>> cell = eqx.tree_at(lambda cell: [getattr(cell, name) for name in arrays], cell, list(arrays.values()))
      >>> bool((cell.weight_ih == params.w_ih.T).all())
      True
    """
    layout = check_params("to_equinox", params, framework="equinox")
    params = without_blocks(params)
    bias, b_hn = biases_of(layout, params)
    arrays = {"weight_ih": params.w_ih.T, "weight_hh": params.w_hh.T, "bias": bias}
    return arrays if b_hn is None else arrays | {"bias_n": b_hn}
