"""Runs the kernels for minutes: many launches, threads, streams, parallel branches, large arrays, failures.

`make stress` runs these tests, on a GPU that nothing else uses; other runs leave them out.
"""

import concurrent.futures
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrnn

pytestmark = [pytest.mark.gpu, pytest.mark.stress]

ROOT = Path(__file__).resolve().parents[2]
LAUNCHES = 10**6
# Cell, batch, steps and units: a problem of few programs, and two of programs that wait for one another.
PROBLEMS = [("gru", 4, 2, 32), ("lstm", 4, 2, 512), ("gru", 16, 2, 1024)]


@pytest.fixture(autouse=True, params=["native", "callback"])
def method(request, monkeypatch):
    """Launches by each method in turn."""
    monkeypatch.setenv("JAXRNN_LAUNCH", request.param)
    jax.clear_caches()
    return request.param


def problem(cell, batch, steps, hidden):
    """Returns a function that computes outputs and gradients with the kernels, and its arguments."""
    *arguments, _, _ = calls.arguments(cell, batch=(batch,), steps=steps, hidden=hidden)
    call = calls.runner(cell, "triton", precision=None)

    def run(params, carry, xs):
        def loss(params, xs):
            last, ys = call(params, carry, xs, None, None)
            return jnp.sum(ys**2), (last, ys)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, xs)

    return run, arguments


def used_memory():
    """Returns the bytes in use on the device and by this process on the host."""
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return jax.local_devices()[0].memory_stats()["bytes_in_use"], resident


def same(got, want):
    return jnp.stack([jnp.all(x == y) for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]).all()


def repeated(run, count):
    """Returns a program that runs `run` `count` times in a loop, and counts the runs with the bits of `want`."""

    def loop(want, *arguments):
        def turn(_, state):
            equal, arguments = state
            got = run(*arguments)
            # the next run's arguments depend on this run's results, so that no run can leave the loop
            zero = jnp.where(same(got, got), 0.0, 1.0)
            arguments = jax.tree.map(lambda x: x + zero.astype(x.dtype), arguments)
            return equal + same(got, want), arguments

        return jax.lax.fori_loop(0, count, turn, (jnp.int32(0), arguments))[0]

    return jax.jit(loop)


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


PROGRAM = """
import os, signal, sys, threading, time
import jax, test_stress
run, arguments = test_stress.problem("lstm", 4, 2, 512)
want = jax.jit(run)(*arguments)
program = test_stress.repeated(run, 20_000)
assert int(program(want, *arguments)) == 20_000
stopped = 0
for k in range(10):
    threading.Timer(0.05 * (k + 1), os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        while True:
            assert int(program(want, *arguments)) == 20_000
    except KeyboardInterrupt:
        stopped += 1
assert int(program(want, *arguments)) == 20_000
print("stopped", stopped, "times")
"""


def test_an_interrupt_leaves_the_process_usable():
    folders = map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "gpu"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "stopped 10 times" in done.stdout, done.stderr
