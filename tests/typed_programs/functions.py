"""A user's program with the functions of `jaxrnn`."""

from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxrnn

T, B, D, H = 5, 2, 3, 4
xs, zeros, resets = jnp.ones((T, B, D)), jnp.zeros((B, H)), jnp.zeros((T, B), bool)
gru_params = jaxrnn.GRUParams(jnp.ones((D, 3 * H)), jnp.ones((H, 3 * H)), jnp.ones(3 * H), jnp.ones(H))
lstm_params = jaxrnn.LSTMParams(w_ih=jnp.ones((D, 4 * H)), w_hh=jnp.ones((H, 4 * H)), b=jnp.ones(4 * H))
mgu_params = jaxrnn.MGUParams(jnp.ones((D, 2 * H)), jnp.ones((H, 2 * H)), jnp.ones(2 * H), jnp.ones(H))
simple_params = jaxrnn.SimpleParams(jnp.ones((D, H)), jnp.ones((H, H)), jnp.ones(H))
States = tuple[Array, Array]

assert_type(gru_params.w_ih, Array)
assert_type(lstm_params.w_hr, Array | None)
assert_type(jaxrnn.gru(gru_params, zeros, xs, resets=resets), tuple[Array, Array])
assert_type(jaxrnn.mgu(mgu_params, zeros, xs, reverse=True), tuple[Array, Array])
assert_type(jaxrnn.simple_rnn(simple_params, zeros, xs, activation="relu"), tuple[Array, Array])
assert_type(jaxrnn.lstm(lstm_params, (zeros, zeros), xs), tuple[States, Array])
assert_type(jaxrnn.lstm(lstm_params, (zeros, zeros), xs, return_cells=False), tuple[States, Array])
assert_type(jaxrnn.lstm(lstm_params, (zeros, zeros), xs, return_cells=True), tuple[States, tuple[Array, Array]])
(c, h), (hs, cs) = jaxrnn.lstm(lstm_params, (zeros, zeros), xs, resets=resets, return_cells=True)
assert_type(cs, Array)


def run_lstm(cells: bool) -> Array:
    """The caller decides, so the result has both types."""
    _, outputs = jaxrnn.lstm(lstm_params, (zeros, zeros), xs, return_cells=cells)
    assert_type(outputs, Array | tuple[Array, Array])
    return outputs[0] if isinstance(outputs, tuple) else outputs


assert run_lstm(True).shape == run_lstm(False).shape == (T, B, H)

# an episode of an LSTM may start from a hidden state and zero cells
jaxrnn.lstm(lstm_params, (zeros, zeros), xs, resets=resets, reset_state=(None, jnp.ones(H)))

# arrays of NumPy
carry, ys = jaxrnn.gru(
    gru_params, np.zeros((B, H), np.float32), np.ones((T, B, D), np.float32), resets=np.zeros((T, B)),
    reset_state=np.ones(H, np.float32),
)  # fmt: skip
assert_type(ys, Array)

x, weight = jnp.ones((B, H)), jnp.ones(H)
assert_type(jaxrnn.rms_norm(x), Array)
assert_type(jaxrnn.rms_norm(x, weight, weight, epsilon=1e-5), Array)
assert_type(jaxrnn.rms_norm(x, weight, residual=x), tuple[Array, Array])
assert_type(jaxrnn.layer_norm(np.ones((B, H), np.float32), weight), Array)
assert_type(jaxrnn.layer_norm(x, residual=x, implementation="xla"), tuple[Array, Array])


def norm(residual: Array | None) -> None:
    assert_type(jaxrnn.rms_norm(x, residual=residual), Array | tuple[Array, Array])
    assert_type(jaxrnn.layer_norm(x, residual=residual), Array | tuple[Array, Array])


norm(None)
norm(x)


def loss(params: jaxrnn.GRUParams) -> Array:
    return jaxrnn.gru(params, zeros, xs, precision="highest")[1].mean()


grads = jax.jit(jax.grad(loss))(gru_params)
assert grads.w_ih.shape == (D, 3 * H)

convert = jaxrnn.convert
assert_type(convert.from_linen(convert.to_linen(gru_params), into=jaxrnn.GRUParams), jaxrnn.GRUParams)
assert_type(convert.from_keras(convert.to_keras(lstm_params), into=jaxrnn.LSTMParams), jaxrnn.LSTMParams)
assert_type(convert.to_haiku(lstm_params), dict[str, Array])
assert_type(convert.to_haiku(simple_params), dict[str, dict[str, Array]])
assert_type(convert.from_haiku(convert.to_haiku(simple_params), into=jaxrnn.SimpleParams), jaxrnn.SimpleParams)
assert_type(convert.to_linen(gru_params, dense=True), dict[str, dict[str, Array]])
jaxrnn.gru(convert.from_equinox(convert.to_equinox(gru_params), into=jaxrnn.GRUParams), zeros, xs)

# a mapping says nothing about the cell, so the caller has to
converted = convert.from_linen(convert.to_linen(gru_params))
assert isinstance(converted, jaxrnn.GRUParams)
jaxrnn.gru(converted, zeros, xs)


def mistakes() -> None:
    """Type checkers reject each of these lines; a comment that suppresses nothing is an error."""
    jaxrnn.gru(lstm_params, zeros, xs)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jaxrnn.lstm(lstm_params, zeros, xs)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    jaxrnn.gru(gru_params, zeros, xs, implementation="cuda")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    jaxrnn.mgu(mgu_params, zeros, xs, return_cells=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    jaxrnn.gru(convert.from_linen({}), zeros, xs)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    convert.from_linen({}, into=jaxrnn.gru)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    jaxrnn.rms_norm(x, weights=weight)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
