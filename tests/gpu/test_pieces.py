"""Pieces of sequences between resets, side by side: all results have the bits of a run of whole sequences.

`tests/compiled/test_emulated_loops.py` compares single launches; here are the transformations around them.
"""

import contextlib
import dataclasses
import itertools
from unittest import mock

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import torch_bridge.rnn_ops.kernels
from torch_bridge.tiling import split_registers
from torch_bridge.tiling.candidates import heuristic
from torch_bridge.tiling.config import Tiling
from torch_bridge.tiling.fma import Fma
from torch_bridge.tiling.resident import Resident

pytestmark = pytest.mark.gpu

STEPS, BATCH = 50, 3
# The hidden units of the loops "fma", "resident" and "split_registers", and of two tilings of the last.
WIDTHS = (20, 64, 100, 192, 300)


LOOPS = (Fma, Resident, split_registers.SplitRegisters)


@contextlib.contextmanager
def tilings(change):
    """Changes the tilings that launches get, also of few steps and pieces; yields the numbers of pieces they had."""
    found, in_pieces = [], Tiling.in_pieces

    def changed(config, problem, device):
        cut = in_pieces(config, problem, device)
        found.append(cut.pieces)
        return change(cut)

    caches = (heuristic, torch_bridge.rnn_ops.kernels._launch)
    with contextlib.ExitStack() as patches:
        for loop in LOOPS:
            patches.enter_context(mock.patch.object(loop, "fewest_steps", 0))
        patches.enter_context(mock.patch.object(split_registers, "FEWEST_PIECES", 2))
        patches.enter_context(mock.patch.object(Tiling, "in_pieces", changed))
        for cache in caches:
            cache.cache_clear()
            patches.callback(cache.cache_clear)
        yield found


def whole(config):
    return dataclasses.replace(config, pieces=1) if config.pieces > 1 else config


def assert_same_bits(function, *args):
    """Asserts that a function has the same results with pieces as without, and that launches had pieces."""
    with tilings(lambda config: config) as found:
        cut = jax.device_get(jax.jit(lambda *xs: function(*xs))(*args))
    assert max(found) > 1
    with tilings(whole):
        want = jax.device_get(jax.jit(lambda *xs: function(*xs))(*args))
    calls.assert_same(cut, want)


def arguments(cell, hidden, **options):
    return calls.arguments(cell, batch=(BATCH,), steps=STEPS, hidden=hidden, **options)


OPTIONS = [
    {}, {"reverse": True}, {"remat": True}, {"time_major": False}, {"precision": "default", "reverse": True},
    {"remat": True, "reverse": True},
]  # fmt: skip


def runner(cell, hidden, **options):
    """Returns a call at the highest precision or, of the widths whose kernels are not cut there, at the default one."""
    return calls.runner(cell, "triton", **({"precision": "default"} if hidden == 192 else {}) | options)


@pytest.mark.parametrize("resets", ["some", "all", "none"])
@pytest.mark.parametrize(
    ("cell", "hidden"),
    [*itertools.product(calls.EVERY_CELL, WIDTHS), (calls.PROJECTED, 20), (calls.PROJECTED, 64)],  # "fma" runs these
)
def test_outputs_and_gradients(cell, hidden, resets):
    params, carry, xs, some, state = arguments(cell, hidden, stepped=hidden == 64)
    resets = {"some": some, "all": jnp.ones_like(some), "none": jnp.zeros_like(some)}[resets]
    call = calls.runner(cell, "triton", precision="default")
    assert_same_bits(calls.with_gradients(call), params, carry, xs, resets, state)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("cell", "hidden"), [("gru", 20), ("lstm", 64), ("gru", 192), ("layer_norm_gru", 100)])
def test_options(cell, hidden, options):
    args = arguments(cell, hidden, time_major=options.get("time_major", True))
    assert_same_bits(calls.with_gradients(runner(cell, hidden, **options)), *args)


@pytest.mark.parametrize(("cell", "hidden"), [("gru", 64), ("lstm", 192), ("mgu", 20)])
def test_models_of_vmap_and_both_directions(cell, hidden):
    args = arguments(cell, hidden, lead=(2,))
    assert_same_bits(jax.vmap(calls.with_gradients(runner(cell, hidden))), *args)
    params, carry, xs, resets, _ = arguments(cell, hidden)

    def both(params, carry, xs):
        two = ((params, params), (carry, carry))
        return calls.run_bidirectional(cell, *two, xs, resets=(resets, resets), implementation="triton")

    assert_same_bits(calls.with_gradients(lambda p, c, x, *_: both(p, c, x)), params, carry, xs, 0.0, 0.0)


@pytest.mark.parametrize("method", ["native", "callback"])
def test_every_method_of_launching(method, monkeypatch):
    monkeypatch.setenv("JAXRNN_LAUNCH", method)
    args = arguments("gru", 64)
    assert_same_bits(calls.with_gradients(calls.runner("gru", "triton")), *args)


def test_one_sequence_of_many_episodes():
    rng = np.random.default_rng(0)
    params, carry, xs, _, state = calls.arguments("gru", batch=(1,), steps=1024, hidden=512)
    resets = jnp.asarray(rng.random((1024, 1)) < 0.05, jnp.float32)
    call = calls.runner("gru", "triton", precision="default")
    assert_same_bits(calls.with_gradients(call), params, carry, xs, resets, state)
