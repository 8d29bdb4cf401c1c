"""A user's program with the modules of `jaxrnn.linen`."""

from typing import Any, Literal, assert_type

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import jaxrnn
from jaxrnn.linen import GRU, LSTM, MGU, RNN, GRUCell, LSTMCell, NormGRU, NormGRUCell, ResetRNN, SimpleRNN

T, B, D, H = 5, 2, 3, 4
xs, resets = jnp.ones((T, B, D)), jnp.zeros((T, B), bool)
States = tuple[Array, Array]


class LSTMOfReadme(jaxrnn.linen.ScannedRNN):
    cell_type: str = "lstm"


class FlaxLSTM(jaxrnn.linen.HiddenFirstScannedRNN):
    cell_type: type[nn.RNNCellBase] = nn.OptimizedLSTMCell


class Named(jaxrnn.linen.ScannedRNN):
    cell_type: str = "optimized_lstm"
    cell_name: str | None = "LSTM_0"


LSTMOfReadme.initialize_carry(B, H)
LSTMOfReadme(hidden_state_dim=H).initialize_carry((B,))
FlaxLSTM.initialize_carry(H, B)
jaxrnn.linen.ScannedRNN(cell_type=nn.GRUCell, dtype=jnp.bfloat16, implementation="xla")


class Agent(nn.Module):
    """Calls the modules as an agent does."""

    @nn.compact
    def __call__(self, xs: Array, flag: bool) -> Array:
        _, ys = LSTMOfReadme()(LSTMOfReadme.initialize_carry(B, H), (xs, np.zeros((T, B))))
        assert_type(ys, Array)
        assert_type(ResetRNN(GRUCell(H))((xs, resets))[1], Array)

        cell = GRUCell(features=H, dtype=jnp.float32, precision="highest", name="cell")
        assert_type(cell(jnp.zeros((B, H)), xs[0]), tuple[Array, Array])
        assert_type(LSTMCell(H)((jnp.zeros((B, H)), jnp.zeros((B, H))), xs[0]), tuple[States, Array])

        assert_type(GRU(H), GRU[Literal[False]])
        assert_type(GRU(H, time_major=True)(xs), Array)
        assert_type(GRU(H, 2, 0.0, time_major=True, norm="rms", name="two")(xs, resets=resets), Array)
        assert_type(GRU(H, time_major=True, return_carry=True)(xs), tuple[tuple[Any, ...], Array])
        assert_type(LSTM(H, time_major=True, proj_size=2)(xs, return_carry=True), tuple[tuple[Any, ...], Array])
        assert_type(MGU(H, time_major=True, return_carry=True)(xs, return_carry=False), Array)
        assert_type(NormGRU(H, time_major=True, cell_norm="layer")(xs), Array)
        assert_type(NormGRUCell(H, norm="layer")(jnp.zeros((B, H)), xs[0]), tuple[Array, Array])
        assert_type(SimpleRNN(H, return_carry=flag)(xs), Array | tuple[tuple[Any, ...], Array])
        assert_type(SimpleRNN(H)(xs, return_carry=flag), Array | tuple[tuple[Any, ...], Array])

        assert_type(LSTM(H, num_blocks=2, time_major=True)(xs), Array)
        assert_type(GRUCell(H, num_blocks=2)(jnp.zeros((B, H)), xs[0]), tuple[Array, Array])
        assert_type(jaxrnn.linen.ScannedRNN(num_blocks=2)(jnp.zeros((B, H)), (xs, resets))[1], Array)

        assert_type(RNN(GRUCell(H))(xs), Array)
        assert_type(RNN(nn.GRUCell(H), return_carry=True)(xs, seq_lengths=np.ones(T, np.int32)), tuple[Any, Array])
        assert_type(RNN(GRUCell(H), reverse=True)(xs, return_carry=True), tuple[Any, Array])
        assert_type(RNN(GRUCell(H), return_carry=flag)(xs), Array | tuple[Any, Array])

        y = jaxrnn.linen.RMSNorm(epsilon=1e-5)(ys)
        assert_type(y, Array)
        y, total = jaxrnn.linen.LayerNorm(use_bias=False)(y, residual=ys)
        assert_type(total, Array)
        return y


def mistakes() -> None:
    """Type checkers reject each of these lines; a comment that suppresses nothing is an error."""
    GRU(H, layers=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    GRU(H, num_layers="2")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    GRU(H)(xs, reset=resets)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    LSTMCell(H)(jnp.zeros((B, H)), xs[0])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    LSTMOfReadme()(None, xs)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    LSTMOfReadme.initialize_carry()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


ys, variables = Agent().init_with_output(jax.random.key(0), xs, False)
assert ys.shape == (T, B, H)
