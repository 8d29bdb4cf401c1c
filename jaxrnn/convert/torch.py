"""Weights from and to `torch.nn`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from jaxrnn.checks import check_size
from jaxrnn.convert.arrays import alternatives, describe, read_arrays, remedy_for, to_numpy
from jaxrnn.convert.checks import check_params, check_shapes, expect, find_layout, recurrent_shape
from jaxrnn.convert.layout import layouts_of, pack, two_biases, without_blocks

if TYPE_CHECKING:
    import numpy as np

    from jaxrnn.cells import Params, gru, lstm, simple
    from jaxrnn.convert.layout import ParamsT


OTHERWISE = "; pass a torch.nn.GRU, LSTM, RNN or one of their cells, or a module of torch_bridge.nn"
_PROJECTED = next(layout for layout in layouts_of("torch") if "w_hr" in layout.cell.params._fields)
# The cells that PyTorch or `torch_bridge.nn` has, for messages.
_TITLES = alternatives([layout.title for layout in layouts_of("torch")])


@overload
def from_torch(
    source: Any, *, layer: int | None = ..., reverse: bool | None = ..., prefix: str = ..., into: type[ParamsT]
) -> ParamsT: ...


@overload
def from_torch(
    source: Mapping[str, Any], *, layer: int | None = ..., reverse: bool | None = ..., prefix: str = ...,
    into: None = ...,
) -> Params: ...  # fmt: skip


@overload
def from_torch(
    source: gru.TorchModule, *, layer: int | None = ..., reverse: bool | None = ..., prefix: str = ...,
    into: None = ...,
) -> gru.Params: ...  # fmt: skip


@overload
def from_torch(
    source: lstm.TorchModule, *, layer: int | None = ..., reverse: bool | None = ..., prefix: str = ...,
    into: None = ...,
) -> lstm.Params: ...  # fmt: skip


@overload
def from_torch(
    source: simple.TorchModule, *, layer: int | None = ..., reverse: bool | None = ..., prefix: str = ...,
    into: None = ...,
) -> simple.Params: ...  # fmt: skip


@overload
def from_torch(
    source: Any, *, layer: int | None = ..., reverse: bool | None = ..., prefix: str = ..., into: None = ...
) -> Params: ...


def from_torch(
    source: Any, *, layer: int | None = None, reverse: bool | None = None, prefix: str = "",
    into: type[Any] | None = None,
) -> Params:  # fmt: skip
    """Returns the weights of one layer and direction of `torch.nn.GRU`, `LSTM` or `RNN`, or of one of their cells.

    Formula and order of gates are the same. `bias_ih` and `bias_hh` are added where PyTorch always adds them: for all
    gates of an LSTM, for r and z of a GRU, for f of an MGU, and in an RNN. A module without biases gives zeros. An RNN
    gives `SimpleParams`, which `jaxrnn.simple_rnn` runs with `activation=module.nonlinearity`. The modules of
    `torch_bridge.nn` have the same parameters; with `num_blocks`, `w_hh` has the blocks. Weights of 2H rows are read as
    those of `torch_bridge.nn.MGU`, gates ordered f, n, and give `MGUParams`.

    Args:
      source: the module, or its state dict, of tensors (on any device, bfloat16 too) or arrays, for n = 3 gates of a
        GRU, 4 of an LSTM, 2 of an MGU, 1 of an RNN: `weight_ih_l0 [nH, D]`, `weight_hh_l0 [nH, H]`, `bias_ih_l0` and
        `bias_hh_l0 [nH]`; with `proj_size` `weight_hh_l0 [4H, P]` and `weight_hr_l0 [P, H]`; a cell's names have no
        `_l0`.
      layer: index of the layer; optional if there is only one.
      reverse: True for the weights of a bidirectional module's backward direction (run them with `reverse=True`), False
        for those of the forward direction; optional if there is only one direction.
      prefix: prefix of the names in the state dict of a larger model, like "rnn.".
      into: the class of the parameters, such as `jaxrnn.GRUParams`. It tells type checkers the class of the result, and
        weights of another cell raise.

    Returns:
      `GRUParams`, `LSTMParams`, `MGUParams` or `SimpleParams` of D inputs and H units, with JAX arrays in the dtypes of
      the source.

    Raises:
      ValueError: there are no such weights, several fit, shapes are wrong, or the weights are not those of `into`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import torch
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> module, xs = torch.nn.GRU(3, 4, num_layers=2), torch.randn(5, 2, 3)
      >>> first, second = (convert.from_torch(module, layer=k, into=jaxrnn.GRUParams) for k in range(2))
      >>> _, ys = jaxrnn.gru(first, jnp.zeros((2, 4)), xs.numpy())
      >>> _, ys = jaxrnn.gru(second, jnp.zeros((2, 4)), ys)
      >>> np.allclose(ys, module(xs)[0].detach(), atol=1e-2)
      True
    """
    state = source.state_dict() if hasattr(source, "state_dict") and not isinstance(source, type) else source
    if not isinstance(state, Mapping):
        remedy = remedy_for("from_torch", source, OTHERWISE)
        raise ValueError(f"from_torch: source must be a module or its state dict, got {describe(source)}{remedy}")
    if not isinstance(prefix, str):
        raise ValueError(f"from_torch: prefix must be a string, got {describe(prefix)}; leave it out if there is none")
    suffix = _suffix(state, layer, reverse, prefix)
    if f"{prefix}scale_i{suffix}" in state:
        raise ValueError(
            f"from_torch: source must be a {_TITLES}, got {describe(state)}; jaxrnn.convert has no functions for cells "
            "with a norm"
        )
    names = [f"{prefix}{name}{suffix}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    has_bias = names[2] in state or names[3] in state
    projection = f"{prefix}weight_hr{suffix}"
    projected = projection in state
    arrays = read_arrays("from_torch", state, names[: 4 if has_bias else 2] + [projection] * projected)
    if projected:
        if arrays[projection].ndim != 2 or arrays[names[0]].ndim != 2:
            raise ValueError(f"from_torch: {projection} and {names[0]} must be matrices")
        (width, hidden), inputs, layout = arrays[projection].shape, arrays[names[0]].shape[1], _PROJECTED
    else:
        layout, inputs, hidden = find_layout(
            "from_torch", arrays, names[0], names[1], layouts_of("torch"), transposed=True, blocks=True
        )
        width = hidden
    wide = layout.cell.gates * hidden
    square = recurrent_shape(arrays[names[1]], wide, width)
    shapes = dict(zip(names, ((wide, inputs), square, (wide,), (wide,)), strict=True))
    check_shapes("from_torch", arrays, shapes | ({projection: (width, hidden)} if projected else {}))
    b_i, b_h = (arrays.get(name) for name in names[2:])
    params = pack(layout, arrays[names[0]].T, arrays[names[1]].mT, b_i, b_h)
    return expect("from_torch", params._replace(w_hr=arrays[projection].T) if projected else params, into)


def to_torch(
    params: Params, *, layer: int | None = 0, reverse: bool = False, prefix: str = "", dense: bool = False
) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the weights for `torch.nn.GRU`, `LSTM` or `RNN`: copies as NumPy arrays, by PyTorch's names.

    `MGUParams` become the weights of `torch_bridge.nn.MGU`, because `torch.nn` has no MGU. `bias_hh` is zero except for
    the b_hn of a GRU or MGU. PyTorch does not accept NumPy's bfloat16: pass `x.astype("float32")`,
    which `load_state_dict` rounds to the module's bfloat16, with the same bits.

    Args:
      params: the weights.
      layer: index in the names: `weight_ih_l0` for 0, and `weight_ih`, the name in a cell, for None.
      reverse: whether to use the names of the backward direction, like `weight_ih_l0_reverse`.
      prefix: prefix of the names.
      dense: whether to make N blocks of recurrent weights a matrix that is zero outside of the blocks, for a module of
        `torch.nn`, or one of `torch_bridge.nn` without blocks. Without it, the weights are those of a module of
        `torch_bridge.nn` with `num_blocks=N`.

    Returns:
      By name, `weight_ih_l0 [nH, D]`, `weight_hh_l0 [nH, H]`, `bias_ih_l0 [nH]` and `bias_hh_l0 [nH]` for n gates, and
      with a projection `weight_hr_l0 [P, H]`, in the dtypes of `params`.

    Raises:
      ValueError: `params` are not those of such a module, or their shapes disagree.

    Examples:
      >>> import jax.numpy as jnp
      >>> import torch
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> params = jaxrnn.SimpleParams(w_ih=jnp.ones((3, 4)), w_hh=jnp.eye(4), b=jnp.zeros(4))
      >>> weights = {name: torch.from_numpy(x) for name, x in convert.to_torch(params).items()}
      >>> module = torch.nn.RNN(3, 4)
      >>> module.load_state_dict(weights)
      <All keys matched successfully>
    """
    if layer is not None:
        check_size("to_torch: layer", layer, least=0)
    if layer is None and reverse:
        raise ValueError("to_torch: the weights of a cell (layer=None) have no direction: do not pass reverse")
    layout = check_params("to_torch", params, framework="torch", projected=True)
    params = without_blocks(params) if dense else params
    suffix = "" if layer is None else f"_l{layer}" + "_reverse" * reverse
    b_i, b_h = two_biases(layout, params)
    arrays = {"weight_ih": params.w_ih.T, "weight_hh": params.w_hh.mT, "bias_ih": b_i, "bias_hh": b_h}
    w_hr = getattr(params, "w_hr", None)
    if w_hr is not None:
        arrays["weight_hr"] = w_hr.T
    return {f"{prefix}{name}{suffix}": to_numpy("to_torch", x) for name, x in arrays.items()}


def _suffix(state: Mapping[str, Any], layer: int | None, reverse: bool | None, prefix: str) -> str:
    """Returns the suffix of `weight_ih` in the names of the requested layer and direction; "" for a cell."""
    pattern = re.compile(r"(?P<prefix>.*?)weight_ih(?P<suffix>_l(?P<layer>\d+)(?P<reverse>_reverse)?)?")
    found = [match for name in state if (match := pattern.fullmatch(name))]
    here = [match for match in found if match["prefix"] == prefix]
    if not here:
        prefixes = sorted({repr(match["prefix"]) for match in found})
        hint = f"; pass prefix={' or '.join(prefixes)}" if prefixes else remedy_for("from_torch", state, OTHERWISE)
        raise ValueError(
            f"from_torch: source must have {prefix}weight_ih_l0 (of a {_TITLES}) or {prefix}weight_ih (of a GRUCell, "
            f"for example), got {describe(state)}{hint}"
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
    raise ValueError(
        f"from_torch: there are no weights for layer={layer!r}, reverse={reverse!r}; got {describe(state)}"
    )
