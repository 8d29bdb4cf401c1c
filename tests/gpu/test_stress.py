"""Runs the kernels for minutes: many launches, threads, streams, parallel branches, large arrays, no memory left.

`make stress` runs these tests, on a GPU that nothing else uses; other runs leave them out.
"""

import concurrent.futures
import os
import time
from pathlib import Path

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from stress import PROBLEMS, problem, repeated, same

import jaxrnn

pytestmark = [pytest.mark.gpu, pytest.mark.stress]

LAUNCHES = 10**6


@pytest.fixture(autouse=True, params=["native", "callback"])
def method(request, monkeypatch):
    """Launches by each method in turn."""
    monkeypatch.setenv("JAXRNN_LAUNCH", request.param)
    jax.clear_caches()
    return request.param


def used_memory():
    """Returns the bytes in use on the device and by this process on the host.

    A thread of XLA may free the last arrays after the host has their values, so the device's bytes are read until they
    stay the same for a while.
    """
    readings = [None, jax.local_devices()[0].memory_stats()["bytes_in_use"]]
    while readings[-1] != readings[-2]:
        time.sleep(0.2)
        readings.append(jax.local_devices()[0].memory_stats()["bytes_in_use"])
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return readings[-1], resident


@pytest.mark.parametrize("sizes", PROBLEMS, ids=str)
def test_many_captured_launches_give_the_same_bits_in_flat_memory(sizes):
    run, arguments = problem(*sizes)
    want = jax.jit(run)(*arguments)
    times, count = 10, LAUNCHES // 2 // len(PROBLEMS) // 10  # a run launches a forward and a backward kernel
    program = repeated(run, count)
    assert int(program(want, *arguments)) == count
    device, host = used_memory()
    for _ in range(times - 1):
        assert int(program(want, *arguments)) == count
    after = used_memory()
    assert after[0] == device and after[1] - host < 2**24


def test_threads_launch_different_programs_at_the_same_time():
    """Programs that wait for one another, of several launches at once, must not wait for ever."""
    programs = []
    for sizes in PROBLEMS:
        run, arguments = problem(*sizes)
        programs.append((repeated(run, 500), jax.jit(run)(*arguments), arguments))

    def work(k):
        program, want, arguments = programs[k % len(programs)]
        return [int(program(want, *arguments)) for _ in range(20)]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [[500] * 20] * 6


def test_parallel_branches_of_a_program():
    """XLA may run branches that do not depend on one another on streams of their own."""
    runs = [problem(*sizes) for sizes in PROBLEMS * 2]

    def together(arguments):
        return [run(*each) for (run, _), each in zip(runs, arguments, strict=True)]

    arguments = [each for _, each in runs]
    want = [jax.jit(run)(*each) for run, each in runs]
    program = repeated(lambda *arguments: together(arguments), 1000)
    for _ in range(5):
        assert int(program(want, *arguments)) == 1000


@pytest.mark.torch
def test_graphs_of_pytorch_on_two_streams():
    """Kernels whose programs wait for one another run on both streams, beside those of JAX."""
    import torch

    from torch_bridge.nn import GRU

    run, arguments = problem(*PROBLEMS[1])
    jitted = jax.jit(run)
    want = jitted(*arguments)
    graphs = []
    for hidden in (512, 1024):
        rnn, xs = GRU(64, hidden, device="cuda"), torch.randn(4, 8, 64, device="cuda")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.no_grad():
            expected = rnn(xs)[0].clone()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                ys = rnn(xs)[0]
        graphs.append((stream, graph, ys, expected, rnn, xs))  # the graph reads the memory of the weights and inputs
    for _ in range(2000):
        for stream, graph, ys, *_ in graphs:
            with torch.cuda.stream(stream):
                ys.zero_()
                graph.replay()
        got = jitted(*arguments)
    torch.cuda.synchronize()
    for _, _, ys, expected, *_ in graphs:
        assert torch.equal(ys, expected)
    assert bool(same(got, want))


def test_arrays_beyond_2_to_the_31_elements():
    """The last sequences of a large batch have the bits that they have in a batch of their own tile."""
    steps, batch, hidden, few = 48, 2**17, 128, 128
    assert steps * batch * 3 * hidden > 2**31
    params, carry, xs, _, _ = calls.arguments("gru", batch=(few,), steps=steps, hidden=hidden, dtype=jnp.bfloat16)
    # with weights of standard deviation 1, as they are, a rounding of the state grows to its own size in these steps
    params = jax.tree.map(lambda w: w / hidden**0.5, params)
    run = jax.jit(lambda xs, carry: jaxrnn.gru(params, carry, xs, implementation="triton")[1])
    many = run(jnp.tile(xs, (1, batch // few, 1)), jnp.tile(carry, (batch // few, 1)))
    few_alone = np.asarray(many[:, :few], np.float32)
    for start in (batch // 2, batch - few):
        np.testing.assert_array_equal(np.asarray(many[:, start : start + few], np.float32), few_alone)
    want = jax.jit(lambda xs, carry: jaxrnn.gru(params, carry, xs, implementation="xla")[1])(xs, carry)
    calls.assert_close(few_alone, np.asarray(want, np.float32), 2.0**-7)


def test_a_launch_works_after_memory_ran_out():
    run, arguments = problem(*PROBLEMS[1])
    jitted = jax.jit(run)
    want = jitted(*arguments)
    params, carry, xs, _, _ = calls.arguments("gru", batch=(1,), steps=1, hidden=1024)
    huge = jax.jit(
        lambda xs, carry: jaxrnn.gru(
            params, jnp.broadcast_to(carry, (2**18, 1024)), jnp.broadcast_to(xs, (512, 2**18, xs.shape[-1])),
            implementation="triton",
        )[1]
    )  # fmt: skip
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"RESOURCE_EXHAUSTED|out of memory"):
            jax.block_until_ready(huge(xs, carry))
        assert bool(same(jitted(*arguments), want))
