"""Weights from and to Flax NNX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import jax
import numpy as np

from jaxrnn.convert.arrays import alternatives, describe, read_arrays, remedy_for
from jaxrnn.convert.checks import check_activations, check_params, check_shapes, expect, find_layout, recurrent_shape
from jaxrnn.convert.dense import dense_names, from_dense, read_dense, to_dense
from jaxrnn.convert.layout import biases_of, layouts_of, pack, two_biases, without_blocks

if TYPE_CHECKING:
    from jaxrnn.cells import Layout, Params, gru, lstm, simple
    from jaxrnn.convert.layout import ParamsT

CELLS = layouts_of("nnx")
# A fused layer is the one of an operand, for all gates. This class has a layer per operand and gate instead.
UNFUSED_CLASS = "LSTMCell"
UNFUSED = next(layout for layout in CELLS if UNFUSED_CLASS in layout.nnx)
FUSED_LAYERS = ["dense_i", "dense_h"]
# Flax appends "_" to the name that is a keyword of Python.
UNFUSED_LAYERS = ["if_" if name == "if" else name for name in dense_names(UNFUSED)]


@overload
def from_nnx(source: Any, *, into: type[ParamsT]) -> ParamsT: ...


@overload
def from_nnx(source: Mapping[str, Any], *, into: None = ...) -> Params: ...


@overload
def from_nnx(source: gru.NNXCell, *, into: None = ...) -> gru.Params: ...


@overload
def from_nnx(source: lstm.NNXCell, *, into: None = ...) -> lstm.Params: ...


@overload
def from_nnx(source: simple.NNXCell, *, into: None = ...) -> simple.Params: ...


@overload
def from_nnx(source: Any, *, into: None = ...) -> Params: ...


def from_nnx(source: Any, *, into: type[Any] | None = None) -> Params:
    """Returns the weights of `flax.nnx.GRUCell`, `LSTMCell`, `OptimizedLSTMCell` or `SimpleCell`.

    The cells of `jaxrnn.nnx` have the same parameters; with `num_blocks`, `w_hh` has the blocks. Flax's NNX GRUCell has
    no b_hn ([flax#5594](https://github.com/google/flax/issues/5594)), and `b_hn` is then zeros. If a cell has one, as
    `hn_bias [H]` or in the bias of `dense_h [3H]`, it is converted. A SimpleCell gives `SimpleParams`, which
    `jaxrnn.simple_rnn` runs with the activation of the cell, "tanh" or "relu".

    Args:
      source: the cell, its `nnx.State`, or a mapping like it: `{"dense_i": {"kernel": [D, nH], ...}, "dense_h": ...}`
        for n = 3 gates of a GRU, 4 of an LSTM, 1 of a simple cell, or `{"ii": {"kernel": [D, H]}, "if_": ..., ...}`.
        For an `nnx.RNN`, pass `rnn.cell`.
      into: the class of the parameters, such as `jaxrnn.GRUParams`. It tells type checkers the class of the result, and
        weights of another cell raise.

    Returns:
      `GRUParams`, `LSTMParams` or `SimpleParams`, with arrays in the dtypes of the source.

    Raises:
      ValueError: the cell is another one, has another `gate_fn` or `activation_fn`, or has `residual=True`. A state
        does not show these three; or the weights are not those of `into`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> rnn, xs = nnx.RNN(nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0)), time_major=True), jnp.ones((5, 2, 3))
      >>> params, zeros = convert.from_nnx(rnn.cell), jnp.zeros((2, 4))
      >>> _, ys = jaxrnn.lstm(params, (zeros, zeros), xs)
      >>> bool(jnp.allclose(ys, rnn(xs), atol=1e-2))
      True
    """
    tree = _tree("from_nnx", source)
    if _is_unfused(tree):
        _check_formula("from_nnx", source, UNFUSED)
        dense = {name.rstrip("_"): entry for name, entry in tree.items()}
        return expect("from_nnx", from_dense("from_nnx", UNFUSED, dense), into)
    named = {f"{name}.{part}": x for name in FUSED_LAYERS for part, x in tree[name].items()}
    if "hn_bias" in tree:
        named["hn_bias"] = tree["hn_bias"]
    arrays = read_arrays("from_nnx", named, named)
    layout, inputs, hidden = find_layout("from_nnx", arrays, "dense_i.kernel", "dense_h.kernel", CELLS, blocks=True)
    _check_formula("from_nnx", source, layout)
    wide = layout.cell.gates * hidden
    shapes: dict[str, tuple[int, ...]] = {"dense_i.kernel": (inputs, wide)}
    shapes["dense_h.kernel"] = recurrent_shape(arrays["dense_h.kernel"], hidden, wide)
    shapes |= {"dense_i.bias": (wide,), "dense_h.bias": (wide,)}
    if layout.cell.last_gate_separate:
        shapes["hn_bias"] = (hidden,)
    check_shapes("from_nnx", arrays, shapes)
    b_i, b_h, b_hn = (arrays.get(name) for name in ("dense_i.bias", "dense_h.bias", "hn_bias"))
    params = pack(layout, arrays["dense_i.kernel"], arrays["dense_h.kernel"], b_i, b_h, b_hn=b_hn)
    return expect("from_nnx", params, into)


def to_nnx(params: Params, cell: Any) -> dict[str, Any]:
    """Returns the values of `params` as a tree of arrays with the structure of `cell`.

    Args:
      params: the weights. N blocks of recurrent weights fit a cell of `jaxrnn.nnx` with `num_blocks=N`. For a cell
        without blocks, they become a matrix that is zero outside of the blocks.
      cell: the cell or its state, which determines the structure and whether there is a b_hn; or the name of one of
        Flax's classes, "GRUCell" (without b_hn), "LSTMCell", "OptimizedLSTMCell" or "SimpleCell".

    Returns:
      The kernel and the bias of each layer of the cell, in the dtypes of `params`.

    Raises:
      ValueError: `b_hn` is not zero and the cell has none; the cell is another one, has other sizes, or computes
        something else, as for `from_nnx`; NNX has no such cell.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> params = jaxrnn.SimpleParams(w_ih=jnp.ones((3, 4)), w_hh=jnp.eye(4), b=jnp.zeros(4))
      >>> cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))
      >>> nnx.update(cell, convert.to_nnx(params, cell))
      >>> bool((cell.dense_i.kernel[...] == params.w_ih).all())
      True
    """
    layout = check_params("to_nnx", params, framework="nnx")
    entries = None if isinstance(cell, str) else _tree("to_nnx", cell)
    if entries is None or not _has_blocks(entries):
        params = without_blocks(params)
    unfused = cell == UNFUSED_CLASS if entries is None else _is_unfused(entries)
    if (entries is None and cell not in layout.nnx) or (unfused and layout is not UNFUSED):
        got = repr(cell) if entries is None else f"a {type(cell).__name__} with {describe(entries)}"
        raise ValueError(f"to_nnx: {type(params).__name__} are for {alternatives(layout.nnx)}, got {got}")
    if entries is not None:
        _check_formula("to_nnx", cell, layout)
    tree: dict[str, Any]
    if unfused:
        tree = {"if_" if name == "if" else name: entry for name, entry in to_dense(layout, params).items()}
    else:
        tree = {"dense_i": {"kernel": params.w_ih}, "dense_h": {"kernel": params.w_hh}}
        tree[f"dense_{layout.biased_operand}"]["bias"] = biases_of(layout, params)[0]
        _add_recurrent_bias(tree, layout, params, {} if entries is None else entries)
    if entries is not None:
        _check_fits(tree, entries)
    return tree


def _add_recurrent_bias(tree: dict[str, Any], layout: Layout, params: Params, entries: dict[str, Any]) -> None:
    """Adds the bias of the hidden product if `entries` has one.

    Raises:
      ValueError: it has none, and b_hn is not known to be zero.
    """
    b_hn = biases_of(layout, params)[1]
    if b_hn is not None and "hn_bias" in entries:
        tree["hn_bias"] = b_hn
    elif layout.biased_operand == "i" and entries.get("dense_h", {}).get("bias") is not None:
        tree["dense_h"]["bias"] = two_biases(layout, params)[1]
    elif isinstance(b_hn, jax.core.Tracer):
        raise ValueError("to_nnx: Flax's NNX GRUCell has no b_hn, and inside jit b_hn cannot be checked to be zero")
    elif b_hn is not None and np.any(np.asarray(b_hn) != 0):
        raise ValueError(
            "to_nnx: b_hn is not zero, but Flax's NNX GRUCell has no b_hn (flax#5594) and cannot compute this GRU. "
            "Linen's GRUCell can"
        )


def _check_formula(caller: str, cell: Any, layout: Layout) -> None:
    """Raises ValueError if a cell shows that it computes something else. A state shows nothing."""
    check_activations(caller, cell, layout, gate="gate_fn", activation="activation_fn")
    if getattr(cell, "residual", False):
        raise ValueError(
            f"{caller}: the {type(cell).__name__} has residual=True, which adds h to the hidden product, but "
            f"{layout.function} does not. Set residual=False; trained weights then compute the same if you add the "
            "identity matrix to dense_h.kernel"
        )
    for name in (*FUSED_LAYERS, *UNFUSED_LAYERS):
        product = getattr(getattr(cell, name, None), "dot_general", jax.lax.dot_general)
        if product is not jax.lax.dot_general:
            raise ValueError(
                f"{caller}: {name} of the {type(cell).__name__} has its own dot_general, and {layout.function} "
                "computes jax.lax.dot_general; set it to that if the weights alone are meant"
            )


def _has_blocks(tree: Mapping[str, Any]) -> bool:
    """Returns whether the recurrent weights of a cell are blocks."""
    layer = tree["hi" if _is_unfused(tree) else FUSED_LAYERS[1]]
    return np.ndim(layer["kernel"]) == 3


def _is_unfused(tree: Mapping[str, Any]) -> bool:
    return UNFUSED_LAYERS[0] in tree


def _tree(caller: str, cell: Any) -> dict[str, Any]:
    """Returns the parameters of a cell by name: a layer's as a dict, others unchanged.

    Raises:
      ValueError: it has other entries than the layers of one of Flax's cells and perhaps "hn_bias".
    """
    entries = _entries(cell)
    layers = next((names for names in (FUSED_LAYERS, UNFUSED_LAYERS) if entries.keys() >= set(names)), [])
    known = {*layers, "hn_bias"} if layers is FUSED_LAYERS else set(layers)
    if not layers or not entries.keys() <= known:
        fused = alternatives([name for layout in CELLS for name in layout.nnx if name != UNFUSED_CLASS])
        raise ValueError(
            f"{caller}: {'cell' if caller == 'to_nnx' else 'source'} must be an nnx.{fused} "
            f"({', '.join(FUSED_LAYERS)}) or an nnx.{UNFUSED_CLASS} ({', '.join(UNFUSED_LAYERS)}), or the "
            f"state of one; got {_described(cell, entries)}"
        )
    return {name: read_dense(caller, name, x) if name in layers else x for name, x in entries.items()}


def _entries(cell: Any) -> dict[str, Any]:
    """Returns the layers, norms and parameters of a cell or of its state by name."""
    if isinstance(cell, Mapping):
        return {name: x for name, x in dict(cell).items() if name != "rngs"}
    kept = ("kernel", "scale", "__jax_array__")  # attributes of layers, norms and parameters
    attributes = getattr(cell, "__dict__", {}).items()
    return {name: x for name, x in attributes if name != "rngs" and any(hasattr(x, known) for known in kept)}


def _described(cell: Any, entries: Mapping[str, Any]) -> str:
    """Returns a description of what is no cell, and what to pass instead."""
    remedy = remedy_for("from_nnx", cell, "; pass the cell itself")
    if "norm_i" in entries:
        remedy = "; jaxrnn.convert has no functions for cells with a norm"
    for name, of in (("cell", "its cell"), ("layers", "an element of its layers")):
        if hasattr(cell, name) and not isinstance(cell, type):
            remedy = f"; pass {of}"
    named = isinstance(cell, type) or cell is None
    return f"{describe(cell) if named else f'a {type(cell).__name__} with {describe(entries)}'}{remedy}"


def _check_fits(tree: dict[str, Any], entries: dict[str, Any]) -> None:
    """Raises ValueError unless a cell with these entries has the weights in `tree`, in these shapes, and no others."""

    def shapes(tree: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        layers = {name: entry if isinstance(entry, Mapping) else {"": entry} for name, entry in tree.items()}
        named = {f"{name}.{part}".rstrip("."): x for name, entry in layers.items() for part, x in entry.items()}
        return {name: tuple(x.shape) for name, x in named.items()}

    ours, theirs = shapes(tree), shapes(entries)
    if ours != theirs:
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        differ = ", ".join(f"{name} is {theirs.get(name)} there, {ours.get(name)} here" for name in names)
        raise ValueError(f"to_nnx: the shapes of the cell (there) and of params (here) differ: {differ}")
