"""Pieces of sequences between resets, side by side: all results have the bits of a run of whole sequences.

`tests/compiled/test_emulated_loops.py` compares single launches; here are the transformations of JAX around them,
PyTorch's functions and modules, and meshes.
"""

import contextlib
import dataclasses
import functools
import itertools
from unittest import mock

import calls
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch_calls
from cases import Case
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, place
from torch_calls import torch

import torch_bridge.rnn_ops.kernels
from torch_bridge import nn
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
            patches.enter_context(mock.patch.object(loop, "fewest_steps", lambda config, problem: 0))
        patches.enter_context(mock.patch.object(split_registers, "FEWEST_PIECES", 2))
        patches.enter_context(mock.patch.object(Tiling, "in_pieces", changed))
        for cache in caches:
            cache.cache_clear()
            patches.callback(cache.cache_clear)
        yield found


def whole(config):
    return dataclasses.replace(config, pieces=1) if config.pieces > 1 else config


def assert_same_results(run):
    """Asserts that `run()` has the same results with pieces as without, and that launches had pieces."""
    with tilings(lambda config: config) as found:
        cut = run()
    assert max(found) > 1
    with tilings(whole):
        want = run()
    calls.assert_same(cut, want)


def assert_same_bits(function, *args):
    """Asserts the same of a function of JAX, which is compiled anew for each."""
    assert_same_results(lambda: jax.device_get(jax.jit(lambda *xs: function(*xs))(*args)))


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


CASES = [
    Case("gru", STEPS, BATCH, 20, precision="highest", reset_state="h", models=2),
    Case("gru", STEPS, BATCH, 64, reset_state="tbh", reverse=True, time_major=False),
    Case("gru", STEPS, BATCH, 192, reset_state="bh", models=2),
    Case("lstm", STEPS, BATCH, 64, precision="highest", cells=True, reset_dtype="float32"),
    Case("lstm", STEPS, BATCH, 100, dtype="bf16", carry_dtype="bf16", reset_state="h", models=2),
    Case("lstm", STEPS, BATCH, 300, reset_state="tbh", reverse=True, cells=True),
    Case("mgu", STEPS, BATCH, 100), Case("layer_norm_gru", STEPS, BATCH, 192, reset_state="h"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_functions_of_pytorch(case):
    inputs = cases.make_inputs(case)
    assert_same_results(lambda: torch_calls.run(case, inputs, "triton", "cuda"))


@pytest.mark.parametrize(
    ("kind", "hidden", "options"),
    [
        ("GRU", 64, {}), ("GRU", 192, {"num_layers": 2, "bidirectional": True}), ("LSTM", 20, {"bidirectional": True}),
        ("LSTM", 192, {"num_layers": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_modules_of_pytorch_eager_and_in_a_cuda_graph(kind, hidden, options):
    """Replays a graph with other resets than those of its capture: a replay finds the pieces anew."""
    torch.manual_seed(0)
    rnn = getattr(nn, kind)(5, hidden, precision="tf32", implementation="triton", **options).to("cuda")
    xs = torch.randn(STEPS, BATCH, 5, device="cuda").requires_grad_()
    resets, others = torch.rand(2, STEPS, BATCH, device="cuda") < 0.2

    def run():
        resets_of_graph = others.clone()
        step = functools.partial(torch_calls.with_gradients, rnn, [xs, *rnn.parameters()], xs)
        eager = torch_calls.arrays(step(resets=resets))
        captured = torch_calls.capture(lambda: step(resets=resets_of_graph))
        resets_of_graph.copy_(resets)
        calls.assert_same(torch_calls.arrays(torch_calls.replay(*captured)), eager)
        return eager

    assert_same_results(run)


@pytest.mark.parametrize("kind", ["shard_map", "auto", "explicit"])
@pytest.mark.parametrize(("cell", "hidden"), [("gru", 64), ("lstm", 20), ("gru", 192)])
def test_shards_of_a_mesh(cell, hidden, kind):
    """Runs the same number of sequences on each GPU, of which there may be one."""
    args = calls.arguments(cell, batch=(BATCH * len(jax.devices()),), steps=STEPS, hidden=hidden)
    call, mesh = runner(cell, hidden), make_mesh(AxisType.Explicit if kind == "explicit" else AxisType.Auto)
    state, sequence = P("data"), P(None, "data")
    specs = P(), state, sequence, sequence, P()
    if kind == "shard_map":
        call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(state, sequence))

    def loss(*args):
        outputs = call(*args)
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(outputs)), outputs

    assert_same_bits(jax.value_and_grad(loss, range(5), has_aux=True), *place(mesh, specs, args))
