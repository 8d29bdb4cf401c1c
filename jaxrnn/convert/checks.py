"""Checks of shapes and activations; each raises ValueError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn.cells import LAYOUTS
from jaxrnn.checks import check_array
from jaxrnn.checks import describe as describe_value
from jaxrnn.convert.arrays import alternatives, describe, read_array
from jaxrnn.convert.layout import layout_of

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells import Layout

    Shapes = dict[str, tuple[int, ...]]

_POINTS = np.linspace(-6, 6, 25, dtype=np.float32)
# The functions of jaxrnn's cells, and the points at which others are compared with them: relu6 is relu up to 6.
_FUNCTIONS: dict[str, tuple[Callable[..., Array], np.ndarray[Any, Any]]] = {
    "sigmoid": (jax.nn.sigmoid, _POINTS),
    "tanh": (jnp.tanh, _POINTS),
    "relu": (jax.nn.relu, np.concatenate([_POINTS, 100 * _POINTS])),
}


def find_layout(
    caller: str, arrays: Mapping[str, Array], ih: str, hh: str, layouts: Sequence[Layout], *, transposed: bool = False,
    blocks: bool = False,
) -> tuple[Layout, int, int]:  # fmt: skip
    """Returns `(layout, D, H)` of one of `layouts` from two matrices, `[D, nH]` and `[H, nH]` unless `transposed`.

    With `blocks`, the second may be N blocks `[N, H / N, nH / N]`.
    """
    w_ih, w_hh = arrays[ih], arrays[hh]
    count = w_hh.shape[0] if blocks and (w_ih.ndim, w_hh.ndim) == (2, 3) else 1
    if not blocks or (w_ih.ndim, w_hh.ndim) != (2, 3):
        check_matrices(caller, arrays, ih, hh)
    hidden, wide = w_hh.shape[:-3:-1] if transposed else w_hh.shape[-2:]
    for layout in layouts:
        if count and hidden and wide == layout.cell.gates * hidden:
            return layout, w_ih.shape[1 if transposed else 0], count * hidden
    wanted = [f"{_recurrent_shape(layout, transposed)} ({layout.title})" for layout in layouts]
    raise ValueError(f"{caller}: {hh} must be {alternatives(wanted)}, got {w_hh.shape}")


def _recurrent_shape(layout: Layout, transposed: bool = False) -> str:
    wide = f"{layout.cell.gates}H" if layout.cell.gates > 1 else "H"
    return f"[{wide}, H]" if transposed else f"[H, {wide}]"


def recurrent_shape(w_hh: Array, hidden: int, wide: int) -> tuple[int, ...]:
    """Returns `(H, nH)`, or `(N, H / N, nH / N)` if `w_hh` is N blocks."""
    if w_hh.ndim == 2:
        return hidden, wide
    blocks = w_hh.shape[0]
    return blocks, hidden // blocks, wide // blocks


def check_matrices(caller: str, arrays: Mapping[str, Array], ih: str, hh: str) -> None:
    """Raises ValueError unless both arrays have two axes."""
    check_no_blocks(caller, hh, arrays[ih], arrays[hh])
    if arrays[ih].ndim != 2 or arrays[hh].ndim != 2:
        raise ValueError(f"{caller}: {ih} and {hh} must be matrices, got {arrays[ih].shape} and {arrays[hh].shape}")


def check_no_blocks(caller: str, name: str, w_ih: Array, w_hh: Array) -> None:
    """Raises ValueError if the recurrent weights `name` of one model have three axes: they are blocks."""
    if w_ih.ndim == 2 and w_hh.ndim == 3:
        raise ValueError(
            f"{caller}: {name} must be a matrix, got {w_hh.shape}, the blocks of a block-diagonal matrix, which such a "
            "cell does not have; make the matrix of each gate dense with jax.scipy.linalg.block_diag(*blocks)"
        )


def check_shapes(caller: str, arrays: Mapping[str, Array], shapes: Shapes) -> None:
    """Raises ValueError unless every array is named in `shapes` and has the shape given there."""
    for name, x in arrays.items():
        if name not in shapes:
            raise ValueError(f"{caller}: such a cell has no {name}; got {describe(arrays)}")
        if x.shape != shapes[name]:
            sizes = ", ".join(f"{other} {y.shape}" for other, y in arrays.items() if other != name)
            raise ValueError(f"{caller}: {name} must be {shapes[name]} with {sizes}; got {x.shape}")


def check_params(caller: str, params: Any, *, framework: str = "", projected: bool = False) -> Layout:
    """Returns the layout of `params`; raises ValueError unless these are parameters whose shapes agree.

    Args:
      caller: the name of the public function.
      params: the parameters.
      framework: the framework to convert to, by its name in `Layout.missing`.
      projected: whether that can have a projection.
    """
    layout = layout_of(params)
    if layout is None:
        names = alternatives([layout.cell.params.__name__ for layout in LAYOUTS])
        raise ValueError(
            f"{caller}: params must be {names}, got {describe_value(params)}; no other class has a conversion"
        )
    optional = {"w_hr"}
    arrays = {f"params.{name}": x for name, x in params._asdict().items() if x is not None or name not in optional}
    for name, x in arrays.items():
        check_array(f"{caller}: {name}", x)
    w_hr = arrays.get("params.w_hr")
    if w_hr is not None and not projected:
        raise ValueError(f"{caller} cannot convert a projection, params.w_hr: only to_torch can")
    if w_hr is not None and w_hr.ndim != 2:
        raise ValueError(f"{caller}: params.w_hr must be a matrix, got {w_hr.shape}")
    cell, blocks = layout.cell, params.w_hh.shape[0] if params.w_hh.ndim == 3 else 1
    if params.w_hh.ndim == 3:
        _check_blocks(caller, layout, params)
    else:
        check_matrices(caller, arrays, "params.w_ih", "params.w_hh")
    width, wide = params.w_hh.shape[-2:]
    if w_hr is None and (not width or not blocks or wide != cell.gates * width):
        form = _recurrent_shape(layout) if params.w_hh.ndim == 2 else _block_shape(layout)
        raise ValueError(
            f"{caller}: params.w_hh of {type(params).__name__} must be {form}, got {params.w_hh.shape}"
        )  # fmt: skip
    hidden = blocks * width if w_hr is None else w_hr.shape[0]
    shapes = cell.shapes(params.w_ih.shape[0], hidden)
    if w_hr is not None:
        shapes |= {"w_hh": (w_hr.shape[1], cell.gates * hidden), "w_hr": w_hr.shape}
    if params.w_hh.ndim == 3:
        shapes["w_hh"] = params.w_hh.shape
    check_shapes(caller, arrays, {f"params.{name}": shape for name, shape in shapes.items()})
    if framework in layout.missing:
        raise ValueError(f"{caller}: {layout.missing[framework]}")
    return layout


def _block_shape(layout: Layout) -> str:
    gates = f"{layout.cell.gates}H" if layout.cell.gates > 1 else "H"
    return f"[N, H / N, {gates} / N]"


def _check_blocks(caller: str, layout: Layout, params: Any) -> None:
    """Raises ValueError if recurrent weights with three axes are no blocks: of several models, or with a projection."""
    shape = params.w_hh.shape
    if params.w_ih.ndim == 3:
        raise ValueError(
            f"{caller}: params.w_hh must be {_recurrent_shape(layout)}, got {shape}, the stacked weights of several "
            "models; convert them one by one, or with jax.vmap if the result has JAX arrays"
        )
    if getattr(params, "w_hr", None) is not None:
        raise ValueError(
            f"{caller}: params.w_hh must be a matrix with a projection, params.w_hr, got {shape}, the blocks of a "
            "block-diagonal matrix; jaxrnn.lstm cannot run both"
        )
    if params.w_ih.ndim != 2:
        raise ValueError(f"{caller}: params.w_ih must be a matrix, got {params.w_ih.shape}")


def expect(caller: str, params: Any, into: Any) -> Any:
    """Returns `params`; raises ValueError unless they have the class `into`, or that is None."""
    known = [layout.cell.params for layout in LAYOUTS]
    if into is not None and into not in known:
        names = alternatives([one.__name__ for one in known])
        raise ValueError(f"{caller}: into must be {names}, got {describe_value(into)}; no other class has a conversion")
    if into is not None and type(params) is not into:
        raise ValueError(
            f"{caller}: into must be {type(params).__name__}, the class of these weights, got {into.__name__}; leave "
            "it out to get the class of the weights"
        )
    return params


def check_activations(caller: str, cell: Any, layout: Layout, *, gate: str, activation: str) -> None:
    """Raises ValueError if a cell's functions have other values than those that jaxrnn computes in their place.

    Args:
      caller: the name of the public function.
      cell: the cell; without one of the attributes, that function is not checked.
      layout: its layout.
      gate: the attribute of the cell that jaxrnn computes as sigmoid.
      activation: the attribute of the cell that jaxrnn computes as one of `layout.activations`.
    """
    for name, expected in ((gate, ("sigmoid",)), (activation, layout.activations)):
        function = getattr(cell, name, None)
        if function is not None and not any(_is_equal(caller, name, function, one) for one in expected):
            raise ValueError(
                f"{caller}: {name} is {getattr(function, '__name__', function)!r}, but jaxrnn's cells use "
                f"{alternatives(expected)}"
            )


def _is_equal(caller: str, name: str, function: Any, expected: str) -> bool:
    """Whether the attribute `name` of a cell has the values of the function called `expected`."""
    known, points = _FUNCTIONS[expected]
    if function is known:
        return True
    with jax.ensure_compile_time_eval():
        got, want = np.asarray(read_array(caller, name, function(jnp.asarray(points)))), np.asarray(known(points))
    return np.allclose(got, want, rtol=1e-6, atol=1e-5)
