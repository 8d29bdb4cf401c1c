"""Weights from and to Keras."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import jax.numpy as jnp

from jaxrnn.convert.arrays import describe, read_arrays, remedy_for, to_numpy
from jaxrnn.convert.checks import check_activations, check_params, check_shapes, expect, find_layout
from jaxrnn.convert.layout import biases_of, layouts_of, pack, reorder, two_biases, without_blocks

if TYPE_CHECKING:
    import numpy as np

    from jaxrnn.cells import Params
    from jaxrnn.convert.layout import ParamsT

WEIGHTS = ("kernel", "recurrent_kernel", "bias")


@overload
def from_keras(source: Any, *, into: type[ParamsT]) -> ParamsT: ...


@overload
def from_keras(source: Any, *, into: None = ...) -> Params: ...


def from_keras(source: Any, *, into: type[Any] | None = None) -> Params:
    """Returns the weights of Keras' `GRU` (with `reset_after=True`, the default), `LSTM`, `SimpleRNN` or their cells.

    Keras orders the gates of a GRU z, r, h; it orders those of an LSTM as here, i, f, c, o. The two biases of a GRU are
    added for r and z. `unit_forget_bias` affects the initial value only: a step adds no constant. A SimpleRNN gives
    `SimpleParams`, which `jaxrnn.simple_rnn` runs with the activation of the layer, "tanh" or "relu".

    Args:
      source: the layer or cell, built; or the result of its `get_weights()`, for n = 3 gates of a GRU, 4 of an LSTM, 1
        of a SimpleRNN: `kernel [D, nH]`, `recurrent_kernel [H, nH]` and `bias [nH]`, of a GRU `[2, 3H]`. Missing biases
        are zeros. Pass a GRU without biases as a layer, because its weights do not show `reset_after`.
      into: the class of the parameters, such as `jaxrnn.GRUParams`. It tells type checkers the class of the result, and
        weights of another cell raise.

    Returns:
      `GRUParams`, `LSTMParams` or `SimpleParams`, with arrays in the dtypes of the source.

    Raises:
      ValueError: `reset_after` is False, which computes something else; activations are not sigmoid and tanh, or those
        of a SimpleRNN neither tanh nor relu (a list of weights does not show them); there are several cells; the layer
        is not built; or shapes are wrong; or the weights are not those of `into`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import keras
      >>> import numpy as np
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> layer, xs = keras.layers.GRU(4, return_sequences=True), np.ones((2, 5, 3), np.float32)
      >>> expected = layer(xs)
      >>> _, ys = jaxrnn.gru(convert.from_keras(layer), jnp.zeros((2, 4)), xs, time_major=False)
      >>> np.allclose(ys, expected, atol=1e-2)
      True
    """
    if isinstance(source, (str, Mapping)):
        raise ValueError(
            f"from_keras: source must be a layer, or the list that its get_weights() returns, got "
            f"{'a string' if isinstance(source, str) else 'a mapping with ' + describe(source)}; pass the layer"
            f"{remedy_for('from_keras', source)}"
        )
    cell = None if isinstance(source, Sequence) else _cell(source)
    given = _weights(source if cell is None else cell)
    arrays = read_arrays("from_keras", given, (*WEIGHTS[:2], *(name for name in WEIGHTS[2:] if name in given)), source)
    layout, inputs, hidden = find_layout("from_keras", arrays, *WEIGHTS[:2], layouts_of("keras"))
    check_activations("from_keras", cell, layout, gate="recurrent_activation", activation="activation")
    wide, bias = layout.cell.gates * hidden, arrays.get("bias")
    if layout.cell.last_gate_separate:
        _check_reset_after(getattr(cell, "reset_after", None), bias, wide)
    shapes = {"kernel": (inputs, wide), "recurrent_kernel": (hidden, wide)}
    check_shapes("from_keras", arrays, shapes | {"bias": (2, wide) if layout.cell.last_gate_separate else (wide,)})
    b_i, b_h = bias if bias is not None and bias.ndim == 2 else (bias, None)
    params = pack(layout, arrays["kernel"], arrays["recurrent_kernel"], b_i, b_h, order=layout.keras)
    return expect("from_keras", params, into)


def to_keras(params: Params) -> list[np.ndarray[Any, Any]]:
    """Returns kernel, recurrent kernel and bias for Keras' `GRU` (`reset_after=True`), `LSTM` or `SimpleRNN`, copied.

    Args:
      params: the weights.

    Returns:
      NumPy arrays `[D, nH]`, `[H, nH]` and `[nH]` for n gates; the bias of a GRU is `[2, 3H]`. They have the dtypes of
      `params`.

    Raises:
      ValueError: `params` are not those of such a layer, or their shapes disagree.

    Examples:
      >>> import jax.numpy as jnp
      >>> import keras
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> params = jaxrnn.SimpleParams(w_ih=jnp.ones((3, 4)), w_hh=jnp.eye(4), b=jnp.zeros(4))
      >>> layer = keras.layers.SimpleRNN(4)
      >>> layer.build((None, None, 3))
      >>> layer.set_weights(convert.to_keras(params))
      >>> [tuple(weight.shape) for weight in layer.weights]
      [(3, 4), (4, 4), (4,)]
    """
    layout = check_params("to_keras", params, framework="keras")
    params = without_blocks(params)
    bias = biases_of(layout, params)[0]
    if layout.cell.last_gate_separate:
        bias = jnp.stack(two_biases(layout, params))
    return [to_numpy("to_keras", reorder(x, layout.gates, layout.keras)) for x in (params.w_ih, params.w_hh, bias)]


def _weights(source: Any) -> dict[str, Any]:
    """Returns the arrays of a cell or of a list of weights by name."""
    if not isinstance(source, Sequence):
        return {name: x for name in WEIGHTS if (x := getattr(source, name, None)) is not None}
    if len(source) not in (2, 3):
        raise ValueError(
            f"from_keras: source must be the kernel, recurrent kernel and bias of one layer, got {len(source)} arrays; "
            "convert layers one by one"
        )
    return dict(zip(WEIGHTS, source, strict=False))


def _cell(source: Any) -> Any:
    """Returns the one cell of a layer; raises ValueError if there are several, or if it is not built."""
    if hasattr(source, "forward_layer"):
        raise ValueError("from_keras: a Bidirectional layer has two; pass its forward_layer or its backward_layer")
    cell = getattr(source, "cell", source)
    if hasattr(cell, "cells"):
        raise ValueError("from_keras: the source has several cells; pass one element of its cells")
    if getattr(cell, "built", True) is False:
        raise ValueError(f"from_keras: the {type(source).__name__} has no weights yet; build it or call it once")
    return cell


def _check_reset_after(reset_after: bool | None, bias: Any, wide: int) -> None:
    """Raises ValueError unless a GRU is known to have `reset_after=True`; None means that the source is no layer."""
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
