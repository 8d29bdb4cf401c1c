"""A user's program with the modules of `jaxrnn.nnx`."""

from typing import Any, Literal, assert_type

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

import jaxrnn
from jaxrnn.nnx import GRU, LSTM, RNN, GRUCell, LSTMCell, NormGRU, NormGRUCell, OptimizedLSTMCell, SimpleCell, SimpleRNN

T, B, D, H = 5, 2, 3, 4
xs, resets, h = jnp.ones((T, B, D)), jnp.zeros((T, B), bool), jnp.zeros((B, H))
States = tuple[Array, Array]
rngs = nnx.Rngs(0)


class Agent(nnx.Module):
    """Keeps its modules as attributes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rnn = LSTM(D, H, num_layers=2, time_major=True, return_carry=True, norm="layer", rngs=rngs)
        self.norm = jaxrnn.nnx.RMSNorm(H, epsilon=1e-5, rngs=rngs)

    def __call__(self, xs: Array, resets: Array) -> Array:
        carry, ys = self.rnn(xs, resets=resets)
        assert_type(carry, tuple[Any, ...])
        assert_type(ys, Array)
        return self.norm(ys)


assert_type(Agent(rngs)(xs, resets), Array)

assert_type(GRUCell(D, H, precision="highest", rngs=rngs)(h, xs[0]), tuple[Array, Array])
assert_type(SimpleCell(D, H, residual=False, rngs=rngs)(h, xs[0]), tuple[Array, Array])
assert_type(LSTMCell(D, H, gate_fn=nnx.sigmoid, rngs=rngs)((h, h), np.ones((B, D))), tuple[States, Array])
assert_type(OptimizedLSTMCell(D, H, dtype=jnp.bfloat16, rngs=rngs)((h, h), xs[0]), tuple[States, Array])

assert_type(GRU(D, H, rngs=rngs), GRU[Literal[False]])
assert_type(GRU(D, H, time_major=True, rngs=rngs)(xs, resets=np.zeros((T, B))), Array)
assert_type(GRU(D, H, bidirectional=True, return_carry=True, rngs=rngs)(xs), tuple[tuple[Any, ...], Array])
assert_type(LSTM(D, H, proj_size=2, rngs=rngs)(xs, return_carry=True), tuple[tuple[Any, ...], Array])
assert_type(SimpleRNN(D, H, activation_fn=nnx.relu, return_carry=True, rngs=rngs)(xs, return_carry=False), Array)
assert_type(NormGRU(D, H, cell_norm="layer", rngs=rngs)(xs), Array)
assert_type(NormGRUCell(D, H, norm="layer", epsilon=1e-3, rngs=rngs)(h, xs[0]), tuple[Array, Array])
assert_type(LSTM(D, H, num_blocks=2, rngs=rngs)(xs), Array)
assert_type(SimpleRNN(D, H, num_blocks=2, return_carry=True, rngs=rngs)(xs), tuple[tuple[Any, ...], Array])
assert_type(GRUCell(D, H, num_blocks=2, rngs=rngs)(h, xs[0]), tuple[Array, Array])
assert_type(SimpleCell(D, H, num_blocks=2, rngs=rngs)(h, xs[0]), tuple[Array, Array])
assert_type(RNN(GRUCell(D, H, rngs=rngs))(xs), Array)
assert_type(RNN(nnx.GRUCell(D, H, rngs=rngs), return_carry=True)(xs, reverse=True), tuple[Any, Array])
assert_type(RNN(LSTMCell(D, H, rngs=rngs))(xs, return_carry=True), tuple[Any, Array])
assert_type(GRU(D, H, rngs=rngs).initialize_carry((B, D)), tuple[Any, ...])

convert = jaxrnn.convert
assert_type(convert.from_nnx(nnx.GRUCell(D, H, rngs=rngs)), jaxrnn.GRUParams)
assert_type(convert.from_nnx(LSTMCell(D, H, rngs=rngs)), jaxrnn.LSTMParams)
assert_type(convert.from_nnx(nnx.OptimizedLSTMCell(D, H, rngs=rngs)), jaxrnn.LSTMParams)
assert_type(convert.from_nnx(SimpleCell(D, H, num_blocks=2, rngs=rngs)), jaxrnn.SimpleParams)
assert_type(convert.from_nnx(nnx.state(GRUCell(D, H, rngs=rngs)), into=jaxrnn.GRUParams), jaxrnn.GRUParams)


def of_both(flag: bool) -> None:
    assert_type(GRU(D, H, return_carry=flag, rngs=rngs)(xs), Array | tuple[tuple[Any, ...], Array])
    assert_type(RNN(GRUCell(D, H, rngs=rngs))(xs, return_carry=flag), Array | tuple[Any, Array])


of_both(True)
of_both(False)
assert_type(jaxrnn.nnx.LayerNorm(H, use_bias=False, rngs=rngs)(h), Array)
assert_type(jaxrnn.nnx.LayerNorm(H, rngs=rngs)(h, residual=h), tuple[Array, Array])
assert_type(jaxrnn.nnx.RMSNorm(H, rngs=rngs)(h, None, residual=h), tuple[Array, Array])


def mistakes() -> None:
    """Type checkers reject each of these lines; a comment that suppresses nothing is an error."""
    GRU(D, H)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    GRU(D, H, layers=2, rngs=rngs)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    LSTM(D, H, proj=2, rngs=rngs)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    GRUCell(D, H, residual=True, rngs=rngs)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    NormGRUCell(D, H, gate_fn=nnx.sigmoid, rngs=rngs)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    SimpleCell(D, H, gate_fn=nnx.sigmoid, rngs=rngs)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    jaxrnn.nnx.RMSNorm(H, use_bias=True, rngs=rngs)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    jaxrnn.nnx.RMSNorm(H)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
