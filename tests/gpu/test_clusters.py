"""Exchange in a cluster of programs: all results have the bits of exchange through L2.

`tests/compiled/test_emulated_loops.py` compares single launches; here are the two ways to launch, the transformations
of JAX around them, PyTorch's functions and modules, and CUDA graphs. On a GPU without clusters, both runs exchange
through L2.
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
from torch_calls import torch

import torch_bridge.rnn_ops.kernels
from torch_bridge import gpu, nn
from torch_bridge.tiling.candidates import heuristic
from torch_bridge.tiling.split_registers import SplitRegisters

pytestmark = pytest.mark.gpu

STEPS, BATCH = 40, 5
# Clusters of 3, 4, 10 and 16 programs, of which all units exist or not.
WIDTHS = (192, 250, 320, 512)


@contextlib.contextmanager
def clusters_at_once(clusters):
    """Replaces `Device.clusters`; yields how many programs the clusters of new launches have."""
    found, in_pieces, device = set(), SplitRegisters.in_pieces, gpu.device

    def recorded(config, problem, device):
        config = in_pieces(config, problem, device)
        found.add(config.cluster)
        return config

    def changed(ordinal=0):
        return dataclasses.replace(device(ordinal), clusters=clusters)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(gpu, "device", changed))
        patches.enter_context(mock.patch.object(SplitRegisters, "in_pieces", recorded))
        for cache in (heuristic, torch_bridge.rnn_ops.kernels._launch):
            cache.cache_clear()
            patches.callback(cache.cache_clear)
        yield found


def assert_same_results(run, clusters=None):
    """Asserts that `run()` has the same results in clusters as through L2, and that launches had clusters."""
    device = gpu.device(0)
    with clusters_at_once(clusters or device.clusters) as found:
        in_clusters = run()
    assert (max(found) > 1) == (device.capability >= 90)
    with clusters_at_once(()) as found:
        through_l2 = run()
    assert found == {1}
    calls.assert_same(in_clusters, through_l2)


def assert_same_bits(function, *args):
    """Asserts the same of a function of JAX, which is compiled anew for each."""
    assert_same_results(lambda: jax.device_get(jax.jit(lambda *xs: function(*xs))(*args)))


def arguments(cell, hidden, **options):
    return calls.arguments(cell, **({"batch": (BATCH,), "steps": STEPS, "hidden": hidden} | options))


def runner(cell, **options):
    return calls.runner(cell, "triton", precision="default", **options)


def test_the_driver_tells_how_many_clusters_run_at_once():
    device = gpu.device(0)
    if device.capability < 90:
        assert device.clusters == ()
        return
    none, alone, *others = device.clusters
    assert (none, alone, len(others)) == (0, device.multiprocessors, 15)
    assert others == sorted(others, reverse=True) and 0 < others[0] <= alone // 2
    assert device.clusters_at_once(8) > 0  # as every such GPU has


@pytest.mark.parametrize("resets", ["some", "all", "none"])
@pytest.mark.parametrize(("cell", "hidden"), [*itertools.product(calls.EVERY_CELL, WIDTHS)])
def test_outputs_and_gradients(cell, hidden, resets):
    params, carry, xs, some, state = arguments(cell, hidden, stepped=hidden == 250)
    resets = {"some": some, "all": jnp.ones_like(some), "none": jnp.zeros_like(some)}[resets]
    assert_same_bits(calls.with_gradients(runner(cell)), params, carry, xs, resets, state)


@pytest.mark.parametrize("options", [{"reverse": True}, {"remat": True}, {"time_major": False}], ids=str)
@pytest.mark.parametrize(("cell", "hidden"), [("gru", 192), ("lstm", 320), ("layer_norm_gru", 256)])
def test_options(cell, hidden, options):
    args = arguments(cell, hidden, time_major=options.get("time_major", True))
    assert_same_bits(calls.with_gradients(runner(cell, **options)), *args)


@pytest.mark.parametrize("method", ["native", "callback"])
@pytest.mark.parametrize(("cell", "hidden"), [("gru", 256), ("lstm", 192), ("gru", 320)])
def test_every_method_of_launching(cell, hidden, method, monkeypatch):
    monkeypatch.setenv("JAXRNN_LAUNCH", method)
    assert_same_bits(calls.with_gradients(runner(cell)), *arguments(cell, hidden))


@pytest.mark.parametrize(("cell", "hidden"), [("gru", 256), ("lstm", 192)])
def test_models_of_vmap_and_both_directions(cell, hidden):
    args = arguments(cell, hidden, lead=(3,))
    assert_same_bits(jax.vmap(calls.with_gradients(runner(cell))), *args)
    params, carry, xs, resets, _ = arguments(cell, hidden)

    def both(params, carry, xs):
        two, options = ((params, params), (carry, carry)), {"implementation": "triton", "precision": "default"}
        return calls.run_bidirectional(cell, *two, xs, resets=(resets, resets), **options)

    assert_same_bits(calls.with_gradients(lambda p, c, x, *_: both(p, c, x)), params, carry, xs, 0.0, 0.0)


@pytest.mark.parametrize(
    ("cell", "hidden", "batch"), [("gru", 256, 253), ("lstm", 256, 253), ("gru", 320, 93), ("gru", 512, 61)]
)
def test_clusters_that_do_not_all_run_at_once(cell, hidden, batch):
    """Some then begin when others have ended. The last tile of a model has five sequences."""
    args = arguments(cell, hidden, batch=(batch,), steps=9)
    assert_same_results(
        lambda: jax.device_get(jax.jit(calls.with_gradients(runner(cell)))(*args)), clusters=(1000,) * 17
    )


@pytest.mark.parametrize(("cell", "batch", "hidden"), [("gru", 8, 256), ("lstm", 8, 192), ("gru", 1, 512)])
def test_pieces_of_long_sequences(cell, batch, hidden):
    params, carry, xs, _, state = arguments(cell, hidden, batch=(batch,), steps=300)
    resets = jnp.asarray(np.random.default_rng(0).random((300, batch)) < 0.05, jnp.float32)
    assert_same_bits(calls.with_gradients(runner(cell)), params, carry, xs, resets, state)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_carry_of_nan_does_not_pass_a_reset(cell):
    params, carry, xs, resets, state = arguments(cell, 256)
    carry, resets = jax.tree.map(lambda x: x.at[1].set(jnp.nan), carry), resets.at[3].set(1)
    assert_same_results(
        lambda: jax.device_get(jax.jit(lambda *xs: runner(cell)(*xs))(params, carry, xs, resets, state))
    )


def test_one_kernel_runs_every_length():
    """Words of an earlier launch, of which there may be more or fewer, mean nothing to the next one."""
    call = calls.with_gradients(runner("gru"))

    def run():
        jitted = jax.jit(lambda *xs: call(*xs))
        lengths = [arguments("gru", 256, steps=steps) for steps in (STEPS, STEPS + 3, 9, STEPS)]
        return jax.device_get([jitted(*args) for args in lengths])

    assert_same_results(run)


@pytest.mark.parametrize(
    "case",
    [
        Case("gru", STEPS, BATCH, 192, reset_state="bh", models=2),
        Case("gru", STEPS, BATCH, 300, reset_state="tbh", reverse=True, time_major=False),
        Case("lstm", STEPS, BATCH, 256, dtype="bf16", carry_dtype="bf16", reset_state="h", models=2),
        Case("lstm", STEPS, BATCH, 512, cells=True), Case("layer_norm_gru", STEPS, BATCH, 192, reset_state="h"),
    ],
    ids=str,
)  # fmt: skip
def test_functions_of_pytorch(case):
    inputs = cases.make_inputs(case)
    assert_same_results(lambda: torch_calls.run(case, inputs, "triton", "cuda"))


@pytest.mark.parametrize(
    ("kind", "hidden", "options"),
    [("GRU", 256, {}), ("GRU", 320, {"num_layers": 2, "bidirectional": True}), ("LSTM", 192, {"num_layers": 2})],
    ids=str,
)
def test_modules_of_pytorch_eager_and_in_a_cuda_graph(kind, hidden, options):
    torch.manual_seed(0)
    rnn = getattr(nn, kind)(5, hidden, precision="tf32", implementation="triton", **options).to("cuda")
    xs = torch.randn(STEPS, BATCH, 5, device="cuda").requires_grad_()
    resets = torch.rand(STEPS, BATCH, device="cuda") < 0.2

    def run():
        step = functools.partial(torch_calls.with_gradients, rnn, [xs, *rnn.parameters()], xs, resets=resets)
        eager = torch_calls.arrays(step())
        captured = torch_calls.capture(step)
        for _ in range(3):
            calls.assert_same(torch_calls.arrays(torch_calls.replay(*captured)), eager)
        return eager

    assert_same_results(run)
