"""Weights from and to Haiku."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import jax.numpy as jnp

from jaxrnn.convert.arrays import describe, keys_of, read_arrays, remedy_for
from jaxrnn.convert.checks import check_params, check_shapes, expect, find_layout
from jaxrnn.convert.layout import biases_of, layouts_of, pack, reorder, two_biases, without_blocks

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells import LSTMParams, Params, simple
    from jaxrnn.convert.layout import ParamsT

LSTM, VANILLA_RNN = (next(x for x in layouts_of("haiku") if x.haiku == name) for name in ("LSTM", "VanillaRNN"))
# The layers of hk.VanillaRNN: of the inputs, and of the state.
VANILLA_LAYERS = ("linear", "linear_1")
# The order of the gates of hk.LSTM, which adds 1 to its forget gate.
GATES = ("i", "g", "f", "o")
FORGET = LSTM.gates.index("f")


@overload
def from_haiku(params: Mapping[str, Any], *, into: type[ParamsT]) -> ParamsT: ...


@overload
def from_haiku(params: Mapping[str, Any], *, into: None = ...) -> Params: ...


def from_haiku(params: Mapping[str, Any], *, into: type[Any] | None = None) -> Params:
    """Returns the weights of `haiku.LSTM` or `haiku.VanillaRNN`.

    Haiku orders the gates of an LSTM i, g, f, o, has one matrix for inputs and state, and adds 1 to the forget gate;
    here `b` includes that 1. A VanillaRNN gives `SimpleParams`, whose `b` is the sum of its biases.
    `jaxrnn.simple_rnn` runs them with `activation="relu"`.

    Args:
      params: parameters of the linear layer in the LSTM, `{"w": [D + H, 4H], "b": [4H]}`, or a mapping with only these,
        `{"lstm/linear": {"w": ..., "b": ...}}`. Of a VanillaRNN, a mapping with only its two layers,
        `{"vanilla_rnn/linear": {"w": [D, H], "b": [H]}, "vanilla_rnn/linear_1": {"w": [H, H], "b": [H]}}`; with
        `double_bias=False` the second has no "b".
      into: the class of the parameters, such as `jaxrnn.GRUParams`. It tells type checkers the class of the result, and
        weights of another cell raise.

    Returns:
      `LSTMParams` or `SimpleParams`, with arrays in the dtypes of the source.

    Raises:
      ValueError: the parameters are of `hk.GRU`, which computes something else, of another module, or of several; or
        shapes are wrong; or the weights are not those of `into`.

    Examples:
      >>> import haiku as hk
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> def unroll(xs):
      ...     core = hk.LSTM(4)
      ...     return hk.dynamic_unroll(core, xs, core.initial_state(2))[0]
      >>> network, xs, zeros = hk.transform(unroll), jnp.ones((5, 2, 3)), jnp.zeros((2, 4))
      >>> weights = network.init(jax.random.key(0), xs)
      >>> _, ys = jaxrnn.lstm(convert.from_haiku(weights), (zeros, zeros), xs)
      >>> bool(jnp.allclose(ys, network.apply(weights, None, xs), atol=1e-2))
      True
    """
    if len(keys_of(params)) == 1:
        (params,) = params.values()
    if keys_of(params) == {"w_i", "w_h", "b"}:
        raise ValueError(
            "from_haiku: hk.GRU applies the reset gate before the matrix product, W_h (r * h), but jaxrnn.gru applies "
            "it after, r * (W_h h + b_hn), as cuDNN, PyTorch and Flax do. Weights cannot be converted: train a new GRU"
        )
    if _is_vanilla_rnn(params):
        return expect("from_haiku", _from_vanilla_rnn(params), into)
    if keys_of(params) != {"w", "b"}:
        raise ValueError(
            "from_haiku: params must be the parameters of the linear layer in an hk.LSTM, w and b, like "
            "params['lstm/linear'], or a mapping with the two layers of an hk.VanillaRNN, like vanilla_rnn/linear and "
            "vanilla_rnn/linear_1; "
            f"got {describe(params)}{remedy_for('from_haiku', params)}"
        )
    arrays = read_arrays("from_haiku", params, ("w", "b"))
    w, gates = arrays["w"], len(GATES)
    hidden = w.shape[-1] // gates if w.ndim else 0
    if w.ndim != 2 or hidden == 0 or w.shape[1] != gates * hidden or w.shape[0] < hidden:
        raise ValueError(f"from_haiku: w of an hk.LSTM is [D + H, 4H], got {w.shape}")
    check_shapes("from_haiku", arrays, {"w": w.shape, "b": (gates * hidden,)})
    packed: LSTMParams = pack(LSTM, w[:-hidden], w[-hidden:], arrays["b"], order=GATES)
    return expect("from_haiku", packed._replace(b=_add_to_forget_gate(packed.b, 1)), into)


@overload
def to_haiku(params: LSTMParams) -> dict[str, Array]: ...


@overload
def to_haiku(params: simple.Params) -> dict[str, dict[str, Array]]: ...


@overload
def to_haiku(params: Params) -> dict[str, Any]: ...


def to_haiku(params: Params) -> dict[str, Any]:
    """Returns the parameters of the linear layer in `haiku.LSTM`, or of both layers in `haiku.VanillaRNN`.

    The 1 that the LSTM adds to its forget gate is subtracted from the bias. The second bias of a VanillaRNN is zero.

    Args:
      params: the weights.

    Returns:
      `w [D + H, 4H]` and `b [4H]` of an LSTM, or for both layers of a VanillaRNN, `linear` and `linear_1`, such a
      mapping with `w [D, H]` or `[H, H]` and `b [H]`, in the dtypes of `params`.

    Raises:
      ValueError: `params` are `GRUParams`, since `hk.GRU` computes something else, or `MGUParams`, since Haiku has no
        MGU; or their shapes disagree.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> from jaxrnn import convert
      >>> of_lstm = jaxrnn.LSTMParams(jnp.ones((3, 16)), jnp.ones((4, 16)), jnp.zeros(16))
      >>> jax.tree.map(jnp.shape, {"lstm/linear": convert.to_haiku(of_lstm)})
      {'lstm/linear': {'b': (16,), 'w': (7, 16)}}
      >>> of_rnn = jaxrnn.SimpleParams(w_ih=jnp.ones((3, 4)), w_hh=jnp.eye(4), b=jnp.zeros(4))
      >>> sorted({f"vanilla_rnn/{name}": layer for name, layer in convert.to_haiku(of_rnn).items()})
      ['vanilla_rnn/linear', 'vanilla_rnn/linear_1']
    """
    layout = check_params("to_haiku", params, framework="haiku")
    params = without_blocks(params)
    if layout is VANILLA_RNN:
        b_i, b_h = two_biases(layout, params)
        return dict(zip(VANILLA_LAYERS, ({"w": params.w_ih, "b": b_i}, {"w": params.w_hh, "b": b_h}), strict=True))
    b = _add_to_forget_gate(biases_of(layout, params)[0], -1)
    w = jnp.concatenate([reorder(x, layout.gates, GATES) for x in (params.w_ih, params.w_hh)])
    return {"w": w, "b": reorder(b, layout.gates, GATES)}


def _is_vanilla_rnn(params: Any) -> bool:
    """Whether the keys are the names of the two layers of one VanillaRNN."""
    prefix = str(next(iter(params), "")).rpartition("/")[0] if isinstance(params, Mapping) else ""
    return keys_of(params) == {f"{prefix}/{name}".lstrip("/") for name in VANILLA_LAYERS}


def _from_vanilla_rnn(params: Mapping[str, Mapping[str, Any]]) -> Params:
    layers = [params[name] for name in sorted(params)]
    named = {
        f"{name}.{part}": x for name, layer in zip(VANILLA_LAYERS, layers, strict=True) for part, x in layer.items()
    }
    w_ih, w_hh, b_i, b_h = (f"{name}.{part}" for part in "wb" for name in VANILLA_LAYERS)
    arrays = read_arrays("from_haiku", named, (w_ih, w_hh, *(name for name in named if name not in (w_ih, w_hh))))
    layout, inputs, hidden = find_layout("from_haiku", arrays, w_ih, w_hh, (VANILLA_RNN,))
    shapes = {w_ih: (inputs, hidden), w_hh: (hidden, hidden), b_i: (hidden,), b_h: (hidden,)}
    check_shapes("from_haiku", arrays, shapes)
    return pack(layout, arrays[w_ih], arrays[w_hh], arrays.get(b_i), arrays.get(b_h))


def _add_to_forget_gate(b: Array, value: int) -> Array:
    gates = jnp.split(b, len(LSTM.gates))
    gates[FORGET] += value
    return jnp.concatenate(gates)
