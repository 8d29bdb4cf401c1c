"""Conversion of `GRUParams` and `LSTMParams` from and to the GRU and LSTM weights of other frameworks.

| framework                             | into jaxrnn      | out of it                               |
| ------------------------------------- | ---------------- | --------------------------------------- |
| PyTorch: modules, cells, state dicts  | `from_torch`     | `to_torch`: NumPy arrays by name        |
| Flax linen: parameters of a cell      | `from_linen`     | `to_linen`: the tree of a cell          |
| Flax NNX: a cell or its state         | `from_nnx`       | `to_nnx`: a tree for `nnx.update`       |
| Equinox: a cell                       | `from_equinox`   | `to_equinox`: arrays by attribute       |
| Haiku: parameters of `hk.LSTM`        | `from_haiku`     | `to_haiku`: the same                    |
| Keras: a layer, a cell or its weights | `from_keras`     | `to_keras`: a list for `set_weights`    |

All of these compute the same as `jaxrnn.gru` and `jaxrnn.lstm`, with gates in another order, matrices transposed and
biases in other places. Weights are moved and not changed, except that biases which the framework always adds are added
here, and that Haiku's constant for the forget gate moves into the bias. Dtypes are kept. A cell that computes something
else raises ValueError with the reason.

None of the frameworks is imported: their arrays are converted, and their modules are read by attribute. JAX arrays may
be traced, so that a program that trains a Flax cell can convert its weights inside `jit` and `grad`, and stacked
weights inside `vmap`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn.cells import GRUParams, LSTMParams

if TYPE_CHECKING:
    from jax import Array

    Params = GRUParams | LSTMParams
    Shapes = dict[str, tuple[int, ...]]

__all__ = [
    "from_equinox",
    "from_haiku",
    "from_keras",
    "from_linen",
    "from_nnx",
    "from_torch",
    "to_equinox",
    "to_haiku",
    "to_keras",
    "to_linen",
    "to_nnx",
    "to_torch",
]

# The letters of the gates, in the order of `GRUParams` and `LSTMParams`.
GRU_GATES, LSTM_GATES = "rzn", "ifgo"


def from_torch(source: Any, *, layer: int | None = None, reverse: bool | None = None, prefix: str = "") -> Params:
    """Returns the weights of one layer and direction of `torch.nn.GRU` or `LSTM`, or of a `GRUCell` or `LSTMCell`.

    Formula and order of gates are the same. `bias_ih` and `bias_hh` are added where PyTorch always adds them: for all
    gates of an LSTM, and for r and z of a GRU. A module without biases gives zeros.

    Args:
      source: the module, or its state dict, of tensors (on any device, bfloat16 too) or arrays: `weight_ih_l0
        [3H|4H, D]`, `weight_hh_l0 [3H|4H, H]`, `bias_ih_l0` and `bias_hh_l0 [3H|4H]`; with `proj_size` `weight_hh_l0
        [4H, P]` and `weight_hr_l0 [P, H]`; a cell's names have no `_l0`.
      layer: index of the layer; optional if there is only one.
      reverse: True for the weights of a bidirectional module's backward direction (run them with `reverse=True`), False
        for those of the forward direction; optional if there is only one direction.
      prefix: prefix of the names in the state dict of a larger model, like "rnn.".

    Raises:
      ValueError: there are no such weights, several fit, or shapes are wrong.
    """
    state = source.state_dict() if hasattr(source, "state_dict") else source
    if not isinstance(state, Mapping):
        raise ValueError(f"from_torch takes a module or its state dict, got {type(source).__name__}")
    suffix = _torch_suffix(state, layer, reverse, prefix)
    names = [f"{prefix}{name}{suffix}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    has_bias = names[2] in state or names[3] in state
    projection = f"{prefix}weight_hr{suffix}"
    projected = projection in state
    arrays = _arrays("from_torch", state, names[: 4 if has_bias else 2] + [projection] * projected)
    if projected:
        if arrays[projection].ndim != 2 or arrays[names[0]].ndim != 2:
            raise ValueError(f"from_torch: {projection} and {names[0]} must be matrices")
        (width, hidden), inputs, order = arrays[projection].shape, arrays[names[0]].shape[1], LSTM_GATES
    else:
        hidden, inputs, order = _sizes("from_torch", arrays, names[0], names[1], transposed=True)
        width = hidden
    wide = len(order) * hidden
    shapes = dict(zip(names, ((wide, inputs), (wide, width), (wide,), (wide,)), strict=True))
    _check_shapes("from_torch", arrays, shapes | ({projection: (width, hidden)} if projected else {}))
    b_i, b_h = (arrays.get(name) for name in names[2:])
    params = _pack(order, arrays[names[0]].T, arrays[names[1]].T, b_i, b_h)
    return params._replace(w_hr=arrays[projection].T) if isinstance(params, LSTMParams) and projected else params


def to_torch(
    params: Params, *, layer: int | None = 0, reverse: bool = False, prefix: str = ""
) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the weights for `torch.nn.GRU` or `LSTM`: copies as NumPy arrays, by PyTorch's names.

        module.load_state_dict({name: torch.from_numpy(x) for name, x in to_torch(params).items()})

    `bias_hh` is zero except for a GRU's b_hn. PyTorch does not accept NumPy's bfloat16: pass `x.astype("float32")`,
    which `load_state_dict` rounds to the module's bfloat16, with the same bits.

    Args:
      params: the weights.
      layer: index in the names: `weight_ih_l0` for 0, and `weight_ih`, the name in a cell, for None.
      reverse: whether to use the names of the backward direction, like `weight_ih_l0_reverse`.
      prefix: prefix of the names.

    Raises:
      ValueError: `params` are neither `GRUParams` nor `LSTMParams`, or their shapes disagree.
    """
    if layer is None and reverse:
        raise ValueError("to_torch: the weights of a cell (layer=None) have no direction: do not pass reverse")
    _check_params("to_torch", params, projected=True)
    suffix = "" if layer is None else f"_l{layer}" + "_reverse" * reverse
    b_i, b_h = _two_biases(params)
    arrays = {"weight_ih": params.w_ih.T, "weight_hh": params.w_hh.T, "bias_ih": b_i, "bias_hh": b_h}
    if isinstance(params, LSTMParams) and params.w_hr is not None:
        arrays["weight_hr"] = params.w_hr.T
    return {f"{prefix}{name}{suffix}": _numpy(x) for name, x in arrays.items()}


def from_linen(tree: Any) -> Params:
    """Returns the weights of `flax.linen.GRUCell`, `LSTMCell` or `OptimizedLSTMCell`, or of a cell of `jaxrnn.linen`.

    Parameters do not include attributes: a `gate_fn` or `activation_fn` other than the default cannot be detected here.
    Do not convert such a cell.

    Args:
      tree: the parameters of the cell, or its variables: `{"ir": {"kernel": [D, H], "bias": [H]}, ...}`. In the
        variables of a larger module the cell is at a path like `variables["params"]["ScannedRNN_0"]["GRUCell_1"]`, or,
        in an `nn.RNN`, under "cell".

    Raises:
      ValueError: these are not the parameters of such a cell.
    """
    if isinstance(tree, Mapping) and "params" in tree:  # tree holds all variables of a module
        tree = tree["params"]
    for order in (GRU_GATES, LSTM_GATES):
        if _keys(tree) == set(_dense_names(order)):
            return _from_dense("from_linen", order, tree)
    raise ValueError(
        f"from_linen takes the parameters of a GRUCell ({', '.join(_dense_names(GRU_GATES))}) or of an LSTMCell or "
        f"OptimizedLSTMCell ({', '.join(_dense_names(LSTM_GATES))}), got {_describe(tree)}"
    )


def to_linen(params: Params) -> dict[str, dict[str, Array]]:
    """Returns the parameters of `flax.linen.GRUCell`, or of `LSTMCell` and `OptimizedLSTMCell`, which share a format.

        cell.apply({"params": to_linen(params)}, carry, x)

    Raises:
      ValueError: `params` are neither `GRUParams` nor `LSTMParams`, or their shapes disagree.
    """
    order = _check_params("to_linen", params)
    w_ih, w_hh = (jnp.split(w, len(order), axis=-1) for w in (params.w_ih, params.w_hh))
    tree = {f"i{gate}": {"kernel": w} for gate, w in zip(order, w_ih, strict=True)}
    tree |= {f"h{gate}": {"kernel": w} for gate, w in zip(order, w_hh, strict=True)}
    operand, bias = ("i", params.b_ih) if isinstance(params, GRUParams) else ("h", params.b)
    for gate, b in zip(order, jnp.split(bias, len(order)), strict=True):
        tree[operand + gate]["bias"] = b
    if isinstance(params, GRUParams):
        tree["hn"]["bias"] = params.b_hn
    return tree


def from_nnx(source: Any) -> Params:
    """Returns the weights of `flax.nnx.GRUCell`, `LSTMCell` or `OptimizedLSTMCell`.

    Flax's NNX GRUCell has no b_hn ([flax#5594](https://github.com/google/flax/issues/5594)), and `b_hn` is then zeros.
    If a cell has one, as `hn_bias [H]` or in the bias of `dense_h [3H]`, it is converted.

    Args:
      source: the cell, its `nnx.State`, or a mapping like it: `{"dense_i": {"kernel": [D, 3H|4H], ...}, "dense_h":
        ...}`, or `{"ii": {"kernel": [D, H]}, "if_": ..., ...}`. For an `nnx.RNN`, pass `rnn.cell`.

    Raises:
      ValueError: the cell is another one, or has another `gate_fn` or `activation_fn`. A state does not show those two.
    """
    _check_activations("from_nnx", source, gate="gate_fn", activation="activation_fn")
    tree = _nnx_tree("from_nnx", source)
    if "ii" in tree:
        return _from_dense("from_nnx", LSTM_GATES, {name.rstrip("_"): entry for name, entry in tree.items()})
    named = {f"{name}.{part}": x for name in ("dense_i", "dense_h") for part, x in tree[name].items()}
    if "hn_bias" in tree:
        named["hn_bias"] = tree["hn_bias"]
    arrays = _arrays("from_nnx", named, named)
    hidden, inputs, order = _sizes("from_nnx", arrays, "dense_i.kernel", "dense_h.kernel")
    wide = len(order) * hidden
    shapes: Shapes = {"dense_i.kernel": (inputs, wide), "dense_h.kernel": (hidden, wide)}
    shapes |= {"dense_i.bias": (wide,), "dense_h.bias": (wide,)}
    if order == GRU_GATES:
        shapes["hn_bias"] = (hidden,)
    _check_shapes("from_nnx", arrays, shapes)
    biases = (arrays.get(name) for name in ("dense_i.bias", "dense_h.bias", "hn_bias"))
    return _pack(order, arrays["dense_i.kernel"], arrays["dense_h.kernel"], *biases)


def to_nnx(params: Params, cell: Any) -> dict[str, Any]:
    """Returns the values of `params` as a tree of arrays with the structure of `cell`.

        nnx.update(cell, to_nnx(params, cell))

    Args:
      params: the weights.
      cell: the cell or its state, which determines the structure and whether there is a b_hn; or the name of one of
        Flax's classes, "GRUCell" (without b_hn), "LSTMCell" or "OptimizedLSTMCell".

    Raises:
      ValueError: `b_hn` is not zero and the cell has none; the cell is another one, or has other sizes.
    """
    order = _check_params("to_nnx", params)
    given = None if isinstance(cell, str) else _nnx_tree("to_nnx", cell)
    if given is not None:
        cell = "GRUCell" if order == GRU_GATES else "LSTMCell" if "ii" in given else "OptimizedLSTMCell"
    fitting = ("GRUCell",) if order == GRU_GATES else ("LSTMCell", "OptimizedLSTMCell")
    if cell not in fitting:
        raise ValueError(f"to_nnx: {type(params).__name__} are for {' or '.join(fitting)}, got {cell!r}")
    tree: dict[str, Any]
    if cell == "LSTMCell":
        tree = {"if_" if name == "if" else name: entry for name, entry in to_linen(params).items()}
    elif isinstance(params, LSTMParams):
        tree = {"dense_i": {"kernel": params.w_ih}, "dense_h": {"kernel": params.w_hh, "bias": params.b}}
    else:
        tree = {"dense_i": {"kernel": params.w_ih, "bias": params.b_ih}, "dense_h": {"kernel": params.w_hh}}
        if given is not None and "hn_bias" in given:
            tree["hn_bias"] = params.b_hn
        elif given is not None and given["dense_h"].get("bias") is not None:
            tree["dense_h"]["bias"] = _two_biases(params)[1]
        elif isinstance(params.b_hn, jax.core.Tracer):
            raise ValueError("to_nnx: Flax's NNX GRUCell has no b_hn, and inside jit b_hn cannot be checked to be zero")
        elif np.any(np.asarray(params.b_hn) != 0):
            raise ValueError(
                "to_nnx: b_hn is not zero, but Flax's NNX GRUCell has no b_hn (flax#5594) and cannot compute this GRU. "
                "Linen's GRUCell can"
            )
    if given is not None:
        _check_fits("to_nnx", tree, given)
    return tree


def from_equinox(cell: Any) -> Params:
    """Returns the weights of `equinox.nn.GRUCell` or `LSTMCell`, whose formulas and order of gates are the same.

    Args:
      cell: the cell, or a mapping with its arrays: `weight_ih [3H|4H, D]`, `weight_hh [3H|4H, H]`, `bias [3H|4H]`, and
        `bias_n [H]` for a GRU. Biases that are None (`use_bias=False`) give zeros.

    Raises:
      ValueError: the module is another one, or shapes are wrong.
    """
    names = ("weight_ih", "weight_hh", "bias", "bias_n")
    get = cell.get if isinstance(cell, Mapping) else lambda name: getattr(cell, name, None)
    given = {name: x for name in names if (x := get(name)) is not None}
    arrays = _arrays("from_equinox", given, (*names[:2], *(name for name in names[2:] if name in given)), cell)
    hidden, inputs, order = _sizes("from_equinox", arrays, *names[:2], transposed=True)
    wide = len(order) * hidden
    shapes: Shapes = {"weight_ih": (wide, inputs), "weight_hh": (wide, hidden), "bias": (wide,)}
    if order == GRU_GATES:
        shapes["bias_n"] = (hidden,)
    _check_shapes("from_equinox", arrays, shapes)
    bias, bias_n = (arrays.get(name) for name in names[2:])
    return _pack(order, arrays["weight_ih"].T, arrays["weight_hh"].T, bias, b_hn=bias_n)


def to_equinox(params: Params) -> dict[str, Array]:
    """Returns the arrays of `equinox.nn.GRUCell` or `LSTMCell` (with `use_bias=True`), by attribute.

        arrays = to_equinox(params)
        cell = eqx.tree_at(lambda cell: [getattr(cell, name) for name in arrays], cell, list(arrays.values()))

    Raises:
      ValueError: `params` are neither `GRUParams` nor `LSTMParams`, or their shapes disagree.
    """
    _check_params("to_equinox", params)
    arrays = {"weight_ih": params.w_ih.T, "weight_hh": params.w_hh.T}
    if isinstance(params, LSTMParams):
        return arrays | {"bias": params.b}
    return arrays | {"bias": params.b_ih, "bias_n": params.b_hn}


def from_haiku(params: Mapping[str, Any]) -> LSTMParams:
    """Returns the weights of `haiku.LSTM`.

    Haiku orders gates i, g, f, o, has one matrix for inputs and state, and adds 1 to the forget gate; here `b` includes
    that 1.

    Args:
      params: parameters of the linear layer in the LSTM, `{"w": [D + H, 4H], "b": [4H]}`, or a mapping with only these,
        `{"lstm/linear": {"w": ..., "b": ...}}`.

    Raises:
      ValueError: the parameters are of `hk.GRU`, which computes something else, of another module, or of several; or
        shapes are wrong.
    """
    if len(_keys(params)) == 1:
        (params,) = params.values()
    if _keys(params) == {"w_i", "w_h", "b"}:
        raise ValueError(
            "from_haiku: hk.GRU applies the reset gate before the matrix product, W_h (r * h), but jaxrnn.gru applies "
            "it after, r * (W_h h + b_hn), as cuDNN, PyTorch and Flax do. Weights cannot be converted: train a new GRU"
        )
    if _keys(params) != {"w", "b"}:
        raise ValueError(
            "from_haiku takes the parameters of the linear layer in an hk.LSTM, w and b, like params['lstm/linear'], "
            f"got {_describe(params)}"
        )
    arrays = _arrays("from_haiku", params, ("w", "b"))
    w = arrays["w"]
    hidden = w.shape[-1] // 4 if w.ndim else 0
    if w.ndim != 2 or hidden == 0 or w.shape[1] != 4 * hidden or w.shape[0] < hidden:
        raise ValueError(f"from_haiku: w of an hk.LSTM is [D + H, 4H], got {w.shape}")
    _check_shapes("from_haiku", arrays, {"w": w.shape, "b": (4 * hidden,)})
    packed = _pack("igfo", w[:-hidden], w[-hidden:], arrays["b"])
    return packed._replace(b=_add_to_forget_gate(packed.b, 1))


def to_haiku(params: LSTMParams) -> dict[str, Array]:
    """Returns the parameters of the linear layer in `haiku.LSTM`, with its forget-gate 1 subtracted from the bias.

        {"lstm/linear": to_haiku(params)}

    Raises:
      ValueError: `params` are `GRUParams`, since `hk.GRU` computes something else.
    """
    _check_params("to_haiku", params)
    if isinstance(params, GRUParams):
        raise ValueError(
            "to_haiku: hk.GRU applies the reset gate before the matrix product and cannot compute this GRU. Call "
            "jaxrnn.gru inside hk.transform, with parameters from hk.get_parameter"
        )
    w = jnp.concatenate([_reorder(x, LSTM_GATES, "igfo") for x in (params.w_ih, params.w_hh)])
    return {"w": w, "b": _reorder(_add_to_forget_gate(params.b, -1), LSTM_GATES, "igfo")}


def from_keras(source: Any) -> Params:
    """Returns the weights of Keras' `GRU` (with `reset_after=True`, the default) or `LSTM`, or of their cells.

    Keras orders the gates of a GRU z, r, h; it orders those of an LSTM as here, i, f, c, o. The two biases of a GRU are
    added for r and z. `unit_forget_bias` affects the initial value only: a step adds no constant.

    Args:
      source: the layer or cell, built; or the result of its `get_weights()`: `kernel [D, 3H|4H]`, `recurrent_kernel
        [H, 3H|4H]` and `bias [2, 3H]` of a GRU, `[4H]` of an LSTM. Missing biases are zeros. Pass a GRU without biases
        as a layer, because its weights do not show `reset_after`.

    Raises:
      ValueError: `reset_after` is False, which computes something else; activations are not sigmoid and tanh (a list of
        weights does not show them); there are several cells; the layer is not built; or shapes are wrong.
    """
    given, reset_after = _keras_weights(source)
    names = ("kernel", "recurrent_kernel", "bias")
    arrays = _arrays("from_keras", given, (*names[:2], *(name for name in names[2:] if name in given)), source)
    hidden, inputs, order = _sizes("from_keras", arrays, *names[:2])
    wide, bias = len(order) * hidden, arrays.get("bias")
    if order == LSTM_GATES:
        _check_shapes(
            "from_keras", arrays, {"kernel": (inputs, wide), "recurrent_kernel": (hidden, wide), "bias": (wide,)}
        )
        return _pack(order, arrays["kernel"], arrays["recurrent_kernel"], bias)
    if reset_after is False or (bias is not None and bias.shape == (wide,)):
        raise ValueError(
            "from_keras: a GRU with reset_after=False applies the reset gate before the matrix product, but jaxrnn.gru "
            "applies it after. Weights cannot be converted: train a new GRU with reset_after=True"
        )
    if reset_after is None and bias is None:
        raise ValueError(
            "from_keras: a GRU's weights without biases do not tell whether reset_after is True, which is required: "
            "pass the layer instead of its weights"
        )
    _check_shapes(
        "from_keras", arrays, {"kernel": (inputs, wide), "recurrent_kernel": (hidden, wide), "bias": (2, wide)}
    )
    b_i, b_h = (None, None) if bias is None else bias
    return _pack("zrn", arrays["kernel"], arrays["recurrent_kernel"], b_i, b_h)


def to_keras(params: Params) -> list[np.ndarray[Any, Any]]:
    """Returns kernel, recurrent kernel and bias for Keras' `GRU` (with `reset_after=True`) or `LSTM`: NumPy copies.

        layer.set_weights(to_keras(params))

    Raises:
      ValueError: `params` are neither `GRUParams` nor `LSTMParams`, or their shapes disagree.
    """
    _check_params("to_keras", params)
    if isinstance(params, LSTMParams):
        return [_numpy(x) for x in (params.w_ih, params.w_hh, params.b)]
    biases = jnp.stack(_two_biases(params))
    return [_numpy(_reorder(x, GRU_GATES, "zrn")) for x in (params.w_ih, params.w_hh, biases)]


def _pack(
    order: str,
    w_ih: Array,
    w_hh: Array,
    b_i: Array | None = None,
    b_h: Array | None = None,
    b_hn: Array | None = None,
) -> Any:
    """Returns the parameters from `w_ih [D, nH]`, `w_hh [H, nH]` and any of the biases `[nH]`, `[nH]` and `[H]`."""
    canonical = GRU_GATES if len(order) == 3 else LSTM_GATES
    w_ih, w_hh = (_reorder(w, order, canonical) for w in (w_ih, w_hh))
    b_i, b_h = (None if b is None else _reorder(b, order, canonical) for b in (b_i, b_h))
    zeros = jnp.zeros(w_ih.shape[-1:], w_ih.dtype)
    if canonical == LSTM_GATES:
        present = [b for b in (b_i, b_h) if b is not None]
        return LSTMParams(w_ih, w_hh, sum(present[1:], start=present[0]) if present else zeros)
    rz = 2 * w_hh.shape[0]
    b_ih = zeros if b_i is None else b_i
    if b_h is not None:
        b_ih = jnp.concatenate([b_ih[:rz] + b_h[:rz], b_ih[rz:]])
        b_hn = b_h[rz:] if b_hn is None else b_h[rz:] + b_hn
    return GRUParams(w_ih, w_hh, b_ih, zeros[rz:] if b_hn is None else b_hn)


def _reorder(x: Array, came: str, wanted: str) -> Array:
    """Returns `x [..., nH]` with its gates reordered."""
    if came == wanted:
        return x
    gates = dict(zip(came, jnp.split(x, len(came), axis=-1), strict=True))
    return jnp.concatenate([gates[gate] for gate in wanted], axis=-1)


def _add_to_forget_gate(b: Array, value: int) -> Array:
    i, f, g, o = jnp.split(b, 4)
    return jnp.concatenate([i, f + value, g, o])


def _two_biases(params: Params) -> tuple[Array, Array]:
    """Returns the biases of the input projection and of the hidden product, each `[nH]`, as cuDNN has them."""
    if isinstance(params, LSTMParams):
        return params.b, jnp.zeros_like(params.b)
    rz = 2 * params.b_hn.shape[0]
    return params.b_ih, jnp.concatenate([jnp.zeros(rz, params.b_hn.dtype), params.b_hn])


def _from_dense(source: str, order: str, tree: Mapping[str, Any]) -> Params:
    """Returns the parameters from one dense layer per operand and gate; a missing bias is zero."""
    named = {
        f"{name}.{part}": x
        for name in _dense_names(order)
        for part, x in _dense_arrays(source, name, tree[name]).items()
    }
    arrays = _arrays(source, named, named)
    first = [arrays[f"{operand}{order[0]}.kernel"] for operand in "ih"]
    if any(x.ndim != 2 for x in first):
        raise ValueError(f"{source}: kernels must be [D, H] and [H, H], got {first[0].shape} and {first[1].shape}")
    (inputs, _), (hidden, _) = (x.shape for x in first)
    shapes: Shapes = {f"{name}.bias": (hidden,) for name in _dense_names(order)}
    shapes |= {f"{name}.kernel": (inputs if name[0] == "i" else hidden, hidden) for name in _dense_names(order)}
    _check_shapes(source, arrays, shapes)

    def bias(operand: str) -> Array | None:
        found = [arrays.get(f"{operand}{gate}.bias") for gate in order]
        present = [x for x in found if x is not None]
        zeros = jnp.zeros(hidden, jnp.result_type(*present)) if present else None
        return None if zeros is None else jnp.concatenate([zeros if x is None else x for x in found])

    w_ih, w_hh = (jnp.concatenate([arrays[f"{operand}{gate}.kernel"] for gate in order], axis=-1) for operand in "ih")
    return _pack(order, w_ih, w_hh, bias("i"), bias("h"))


def _dense_names(order: str) -> list[str]:
    return [operand + gate for operand in "ih" for gate in order]


def _torch_suffix(state: Mapping[str, Any], layer: int | None, reverse: bool | None, prefix: str) -> str:
    """Returns the suffix of `weight_ih` in the names of the requested layer and direction; "" for a cell."""
    pattern = re.compile(r"(?P<prefix>.*?)weight_ih(?P<suffix>_l(?P<layer>\d+)(?P<reverse>_reverse)?)?")
    found = [match for name in state if (match := pattern.fullmatch(name))]
    here = [match for match in found if match["prefix"] == prefix]
    if not here:
        prefixes = sorted({repr(match["prefix"]) for match in found})
        hint = f"; pass prefix={' or '.join(prefixes)}" if prefixes else ""
        raise ValueError(
            f"from_torch: expected {prefix}weight_ih_l0 (of a GRU or LSTM) or {prefix}weight_ih (of a cell), got "
            f"{_describe(state)}{hint}"
        )
    choices = [(int(match["layer"] or 0), bool(match["reverse"]), match["suffix"] or "") for match in here]
    layers, directions = {choice[0] for choice in choices}, {choice[1] for choice in choices}
    if layer is None and len(layers) > 1:
        raise ValueError(f"from_torch: there are {len(layers)} layers; pass one of layer=0 to layer={max(layers)}")
    if reverse is None and len(directions) > 1:
        raise ValueError("from_torch: the module is bidirectional; choose a direction with reverse=False or True")
    for index, backward, suffix in choices:
        if layer in (None, index) and reverse in (None, backward):
            return suffix
    raise ValueError(f"from_torch: there are no weights for layer={layer}, reverse={reverse}; got {_describe(state)}")


def _nnx_tree(source: str, cell: Any) -> dict[str, Any]:
    """Returns the parameters of an NNX cell by name: a layer's as a dict, others unchanged."""
    entries = dict(cell) if isinstance(cell, Mapping) else getattr(cell, "__dict__", {})
    if not isinstance(cell, Mapping):  # drops attributes that are not parameters
        entries = {name: x for name, x in entries.items() if hasattr(x, "kernel") or hasattr(x, "__jax_array__")}
    entries.pop("rngs", None)
    fused, apart = ["dense_i", "dense_h"], [name if name != "if" else "if_" for name in _dense_names(LSTM_GATES)]
    layers = next((names for names in (fused, apart) if entries.keys() >= set(names)), [])
    known = {*layers, "hn_bias"} if layers is fused else set(layers)
    if not layers or not entries.keys() <= known:
        raise ValueError(
            f"{source} takes an nnx.GRUCell or OptimizedLSTMCell ({', '.join(fused)}) or an nnx.LSTMCell "
            f"({', '.join(apart)}), or the state of one; got a {type(cell).__name__} with {_describe(entries)}"
        )
    return {name: _dense_arrays(source, name, x) if name in layers else x for name, x in entries.items()}


def _check_fits(source: str, tree: dict[str, Any], given: dict[str, Any]) -> None:
    """Raises ValueError unless the cell `given` has the weights in `tree`, in these shapes, and no others."""

    def shapes(tree: dict[str, Any]) -> Shapes:
        layers = {name: entry if isinstance(entry, Mapping) else {"": entry} for name, entry in tree.items()}
        named = {f"{name}.{part}".rstrip("."): x for name, entry in layers.items() for part, x in entry.items()}
        return {name: tuple(x.shape) for name, x in named.items()}

    ours, theirs = shapes(tree), shapes(given)
    if ours != theirs:
        names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        differ = ", ".join(f"{name} is {theirs.get(name)} there, {ours.get(name)} here" for name in names)
        raise ValueError(f"{source}: the shapes of the cell (there) and of params (here) differ: {differ}")


def _keras_weights(source: Any) -> tuple[dict[str, Any], bool | None]:
    """Returns kernels and bias by name, and `reset_after`, or None if `source` does not show it."""
    if isinstance(source, Sequence):
        if len(source) not in (2, 3):
            raise ValueError(
                f"from_keras takes the kernel, recurrent kernel and bias of one layer, got {len(source)} arrays; "
                "convert layers one by one"
            )
        return dict(zip(("kernel", "recurrent_kernel", "bias"), source, strict=False)), None
    if hasattr(source, "forward_layer"):
        raise ValueError("from_keras: a Bidirectional layer has two; pass its forward_layer or its backward_layer")
    cell = getattr(source, "cell", source)
    if hasattr(cell, "cells"):
        raise ValueError("from_keras: the source has several cells; pass one element of its cells")
    if getattr(cell, "built", True) is False:
        raise ValueError(f"from_keras: the {type(source).__name__} has no weights yet; build it or call it once")
    _check_activations("from_keras", cell, gate="recurrent_activation", activation="activation")
    names = ("kernel", "recurrent_kernel", "bias")
    return {name: x for name in names if (x := getattr(cell, name, None)) is not None}, getattr(
        cell, "reset_after", None
    )


def _check_activations(source: str, cell: Any, *, gate: str, activation: str) -> None:
    """Raises ValueError if a cell's functions in place of sigmoid and tanh have other values."""
    x = np.linspace(-6, 6, 25, dtype=np.float32)
    for name, expected in ((gate, jax.nn.sigmoid), (activation, jnp.tanh)):
        function = getattr(cell, name, expected)
        if function is expected:
            continue
        with jax.ensure_compile_time_eval():
            got, want = np.asarray(_array(source, name, function(jnp.asarray(x)))), np.asarray(expected(x))
        if not np.allclose(got, want, rtol=0, atol=1e-5):
            raise ValueError(
                f"{source}: {name} is {getattr(function, '__name__', function)!r}, but jaxrnn's cells use "
                f"{expected.__name__}"
            )


def _sizes(
    source: str, arrays: dict[str, Array], ih: str, hh: str, *, transposed: bool = False
) -> tuple[int, int, str]:
    """Returns `(H, D, gates)` from the two matrices, `[D, nH]` and `[H, nH]` unless they are `transposed`."""
    w_ih, w_hh = arrays[ih], arrays[hh]
    if w_ih.ndim != 2 or w_hh.ndim != 2:
        raise ValueError(f"{source}: {ih} and {hh} must be matrices, got {w_ih.shape} and {w_hh.shape}")
    hidden, wide = w_hh.shape[::-1] if transposed else w_hh.shape
    orders = {3 * hidden: GRU_GATES, 4 * hidden: LSTM_GATES}
    if not hidden or wide not in orders:
        layout = ("[3H, H]", "[4H, H]") if transposed else ("[H, 3H]", "[H, 4H]")
        raise ValueError(f"{source}: {hh} must be {layout[0]} (GRU) or {layout[1]} (LSTM), got {w_hh.shape}")
    return hidden, w_ih.shape[1 if transposed else 0], orders[wide]


def _check_shapes(source: str, arrays: dict[str, Array], shapes: Shapes) -> None:
    """Raises ValueError unless every array is named in `shapes` and has the shape given there."""
    for name, x in arrays.items():
        if name not in shapes:
            raise ValueError(f"{source}: such a cell has no {name}; got {_describe(arrays)}")
        if x.shape != shapes[name]:
            sizes = ", ".join(f"{other} {y.shape}" for other, y in arrays.items() if other != name)
            raise ValueError(f"{source}: {name} must be {shapes[name]} with {sizes}; got {x.shape}")


def _check_params(source: str, params: Any, projected: bool = False) -> str:
    """Returns the order of gates; raises ValueError unless `params` are parameters whose shapes agree.

    A projection is accepted only if `projected`.
    """
    if not isinstance(params, (GRUParams, LSTMParams)):
        raise ValueError(f"{source} takes GRUParams or LSTMParams, got {type(params).__name__}")
    arrays = {f"params.{name}": x for name, x in params._asdict().items() if x is not None}
    if "params.w_hr" in arrays:
        if not projected:
            raise ValueError(f"{source} cannot convert a projection, params.w_hr: only to_torch can")
        if arrays["params.w_hr"].ndim != 2:
            raise ValueError(f"{source}: params.w_hr must be a matrix, got {arrays['params.w_hr'].shape}")
        hidden, width = arrays["params.w_hr"].shape
        shapes = {"params.w_ih": (params.w_ih.shape[0], 4 * hidden), "params.w_hh": (width, 4 * hidden)}
        _check_shapes(source, arrays, shapes | {"params.b": (4 * hidden,), "params.w_hr": (hidden, width)})
        return LSTM_GATES
    hidden, inputs, order = _sizes(source, arrays, "params.w_ih", "params.w_hh")
    expected = GRU_GATES if isinstance(params, GRUParams) else LSTM_GATES
    if order != expected:
        raise ValueError(
            f"{source}: params.w_hh of {type(params).__name__} must be [H, {len(expected)}H], got {params.w_hh.shape}"
        )
    wide = len(order) * hidden
    _check_shapes(
        source, arrays, {"params.w_ih": (inputs, wide), "params.w_hh": (hidden, wide), "params.b_ih": (wide,)}
        | {"params.b_hn": (hidden,), "params.b": (wide,)},
    )  # fmt: skip
    return order


def _dense_arrays(source: str, name: str, entry: Any) -> dict[str, Any]:
    """Returns kernel and bias of a dense layer by name; the layer is a module or a mapping."""
    if not isinstance(entry, Mapping):
        entry = {part: x for part in ("kernel", "bias") if (x := getattr(entry, part, None)) is not None}
    elif not entry.keys() <= {"kernel", "bias"}:
        raise ValueError(f"{source}: {name} must have a kernel and may have a bias, got {_describe(entry)}")
    if "kernel" not in entry:
        raise ValueError(f"{source}: {name} has no kernel, only {_describe(entry)}")
    return dict(entry)


def _arrays(source: str, given: Mapping[str, Any], names: Any, whole: Any = None) -> dict[str, Array]:
    """Returns the arrays called `names`; raises ValueError if one is missing."""
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{source}: no {', '.join(missing)} in {_describe(given if whole is None else whole)}")
    return {name: _array(source, name, given[name]) for name in names}


def _array(source: str, name: str, x: Any) -> Array:
    """Returns `x` as a JAX array of the same dtype that shares no memory with a writable array."""
    if not isinstance(x, jax.Array) and hasattr(x, "__jax_array__"):  # x is a variable of NNX, or of Keras on JAX
        x = x.__jax_array__()
    elif hasattr(x, "detach"):  # x is a PyTorch tensor; NumPy alone has no bfloat16, and float32 represents it exactly
        x = x.detach().cpu()
        x = x.float().numpy().astype(jnp.bfloat16) if str(x.dtype) == "torch.bfloat16" else x.numpy()
    elif hasattr(x, "value") and not callable(x.value):  # x is a box of linen or a variable of Keras
        return _array(source, name, x.value)
    array = x if isinstance(x, jax.Array) else np.array(x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{source}: {name} must be floating point, got {array.dtype} ({type(x).__name__})")
    if isinstance(array, jax.Array):
        return array
    converted = jnp.asarray(array)
    if converted.dtype != array.dtype:
        raise ValueError(
            f"{source}: {name} is {array.dtype}, which JAX would convert to {converted.dtype}: set jax_enable_x64, or "
            "convert it first"
        )
    return converted


def _numpy(x: Array) -> np.ndarray[Any, Any]:
    """Returns a contiguous, writable copy."""
    return np.array(x, order="C")


def _keys(tree: Any) -> set[str]:
    return set(tree) if isinstance(tree, Mapping) else set()


def _describe(tree: Any) -> str:
    """Returns a description for messages: the keys of a mapping, or the type of anything else."""
    if not isinstance(tree, Mapping):
        return f"a {type(tree).__name__}"
    names = [str(name) for name in tree]
    return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "") if names else "nothing"
