"""The orders of time and batch, and of an LSTM's carry, that the table in docs/layouts.md gives for each API."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxrnn
import jaxrnn.linen
import jaxrnn.nnx

T, B, D, H = 3, 2, 5, 4
ROWS = re.findall(
    r"^\| (.+?) \| (.+?) \| (.+?) \| `(\(\w, \w\))` \|$",
    (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(),
    re.MULTILINE,
)
TIME_FIRST = {"xs": jnp.ones((T, B, D)), "resets": jnp.zeros((T, B), bool)}
BATCH_FIRST = {"xs": jnp.ones((B, T, D)), "resets": jnp.zeros((B, T), bool)}
# With weights of zero, a step halves the cell state and ignores the hidden state.
CARRY = jnp.ones((B, H)), jnp.zeros((B, H))


def row(name):
    (found,) = (row for row in ROWS if row[0].startswith(f"`{name}`"))
    return found


def test_functions():
    _, inputs, resets, carry = row("jaxrnn.gru")
    assert "`[T, *batch, D]`; `[*batch, T, D]` with `time_major=False`" in inputs and carry == "(c, h)"
    assert resets == "`[T, *batch]`; `[*batch, T]`"
    params = jaxrnn.LSTMParams(jnp.zeros((D, 4 * H)), jnp.zeros((H, 4 * H)), jnp.zeros(4 * H))
    for options, arrays, shape in (({}, TIME_FIRST, (T, B, H)), ({"time_major": False}, BATCH_FIRST, (B, T, H))):
        (c, h), ys = jaxrnn.lstm(params, CARRY, **arrays, **options)
        assert ys.shape == shape
        assert jnp.all(c == 0.5**T)
        assert jnp.allclose(h, 0.5 * jnp.tanh(0.5**T))


def test_modules_of_agents_are_time_first():
    _, inputs, resets, carry = row("jaxrnn.linen.ScannedRNN")
    assert (inputs, resets, carry) == ("`[T, *batch, D]`", "`[T, *batch]`", "(c, h)")
    scanned = jaxrnn.linen.ScannedRNN(cell_type="lstm")
    reset = jaxrnn.linen.ResetRNN(jaxrnn.linen.OptimizedLSTMCell(H))
    pair = TIME_FIRST["xs"], TIME_FIRST["resets"]
    for (_, ys), _ in (
        scanned.init_with_output(jax.random.key(0), CARRY, pair),
        jaxrnn.linen.HiddenFirstScannedRNN(cell_type="lstm").init_with_output(jax.random.key(0), CARRY, pair),
        reset.init_with_output(jax.random.key(0), pair, initial_carry=CARRY),
    ):
        assert ys.shape == (T, B, H)


@pytest.mark.parametrize("time_major", [False, True])
def test_rnn_and_stacks_are_batch_first_unless_time_major(time_major):
    _, inputs, resets, _ = row("RNN")
    assert inputs == "`[*batch, T, D]`, as in Flax; `[T, *batch, D]` with `time_major=True`"
    assert resets == "`[*batch, T]`; `[T, *batch]`"
    options = {"time_major": True} if time_major else {}
    arrays, shape = (TIME_FIRST, (T, B, H)) if time_major else (BATCH_FIRST, (B, T, H))
    for module in (jaxrnn.linen.RNN(jaxrnn.linen.GRUCell(H), **options), jaxrnn.linen.GRU(H, **options)):
        ys, _ = module.init_with_output(jax.random.key(0), arrays["xs"], resets=arrays["resets"])
        assert ys.shape == shape
    rngs = nnx.Rngs(0)
    for module in (
        jaxrnn.nnx.RNN(jaxrnn.nnx.GRUCell(D, H, rngs=rngs), **options, rngs=rngs),
        jaxrnn.nnx.GRU(D, H, **options, rngs=rngs),
    ):
        assert module(arrays["xs"], resets=arrays["resets"]).shape == shape


@pytest.mark.torch
@pytest.mark.parametrize("batch_first", [False, True])
def test_torch_bridge_is_time_first_unless_batch_first(batch_first):
    import torch

    from torch_bridge import functional, nn

    _, inputs, resets, carry = row("torch_bridge.nn.GRU")
    assert inputs == "`[T, B, D]`, as in `torch.nn`; `[B, T, D]` with `batch_first=True`" and carry == "(h, c)"
    assert resets == "`[T, B]`; `[B, T]`"
    _, inputs, _, carry = row("torch_bridge.functional.gru")
    assert inputs == "`[T, *batch, D]`; `[*batch, T, D]` with `batch_first=True`" and carry == "(h, c)"
    options, first = ({"batch_first": True}, (B, T)) if batch_first else ({}, (T, B))
    xs, resets, zeros = torch.ones(*first, D), torch.zeros(first, dtype=torch.bool), torch.zeros
    ys, (h, c) = nn.LSTM(D, H, **options)(xs, resets=resets)
    assert ys.shape == (*first, H) and h.shape == c.shape == (1, B, H)
    state = zeros(B, H), torch.ones(B, H)  # (h, c)
    ys, (h, c) = functional.lstm(xs, state, zeros(4 * H, D), zeros(4 * H, H), resets=resets, **options)
    assert ys.shape == (*first, H)
    torch.testing.assert_close(c, torch.full((B, H), 0.5**T))


@pytest.mark.torch
def test_trajectories_are_batch_first():
    import torch

    from torch_bridge import nn

    _, inputs, resets, carry = row("torch_bridge.nn.run_trajectories")
    assert (inputs, resets, carry) == ("`[B, T, D]`, as in TorchRL", "`is_init [B, T, 1]`", "(h, c)")
    rnn, is_init = nn.LSTM(D, H, batch_first=True), torch.zeros(B, T, 1, dtype=torch.bool)
    for parameter in rnn.parameters():
        torch.nn.init.zeros_(parameter)
    hidden, cell = torch.zeros(B, T, 1, H), torch.ones(B, T, 1, H)
    ys, _, cell = nn.run_trajectories(rnn, torch.ones(B, T, D), is_init, hidden, cell)
    assert ys.shape == (B, T, H)
    torch.testing.assert_close(cell[:, -1], torch.full((B, 1, H), 0.5**T))
