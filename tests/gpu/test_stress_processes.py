"""Runs kernels in processes that are interrupted, forked, ended early, run side by side, or checked by a sanitizer.

`make stress` runs these tests, on a GPU that nothing else uses; other runs leave them out.
"""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import child
import pytest
import sanitized

pytestmark = [pytest.mark.gpu, pytest.mark.stress, pytest.mark.torch]

SANITIZED = Path(sanitized.__file__)
METHODS = pytest.mark.parametrize("method", ["native", "callback"])


def begin(program, method="native", **changes):
    """Starts a process that runs a program."""
    return subprocess.Popen(
        [sys.executable, "-c", program], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=child.environment(JAXRNN_LAUNCH=method, **changes),
    )  # fmt: skip


def assert_says(process, text, timeout=300):
    """Checks that a process ends well and prints a text, and returns all that it prints."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0 and text in out, err
    return out


def assert_stops(process, times):
    """Checks that interrupts stopped a process `times` times, and that at most one of them had to be repeated."""
    out = assert_says(process, f"stopped {times} times, ")
    assert re.search(rf"^stopped {times} times, [01] at the second interrupt$", out, re.MULTILINE), out


RUNNING = """
import time
import interrupts, jax, stress
run, arguments = stress.problem("lstm", 4, 2, 512)
want = jax.jit(run)(*arguments)
program = stress.repeated(run, 20_000)
assert int(program(want, *arguments)) == 20_000
sent = interrupts.Interrupts()

def run_for_seconds():
    end = time.monotonic() + 5
    while time.monotonic() < end:
        assert int(program(want, *arguments)) == 20_000

for k in range(10):
    sent.send(run_for_seconds, 0.05 * (k + 1))
assert int(program(want, *arguments)) == 20_000
sent.say()
"""


@METHODS
def test_an_interrupt_while_kernels_run_leaves_the_process_usable(method):
    assert_stops(begin(RUNNING, method), 10)


COMPILING = """
import calls, interrupts, jax, stress
sent = interrupts.Interrupts()
for k in range(6):
    sizes = "gru", 4, 2, 64 * (k + 1)
    run, arguments = stress.problem(*sizes)
    sent.send(lambda: jax.jit(run)(*arguments), 0.4 * (k + 1))
    once, again = (jax.jit(run)(*arguments) for _ in range(2))  # what was interrupted
    assert bool(stress.same(once, again))
    xla, _ = stress.problem(*sizes, implementation="xla")
    with jax.default_matmul_precision("highest"):
        calls.assert_close(jax.jit(run)(*arguments), jax.jit(xla)(*arguments), 1e-4)
sent.say()
"""


@METHODS
def test_an_interrupt_while_kernels_compile_leaves_the_process_usable(method, tmp_path):
    """Nothing is in Triton's cache, so compilation takes seconds."""
    assert_stops(begin(COMPILING, method, TRITON_CACHE_DIR=str(tmp_path)), 6)


RECORDING = """
import time
import interrupts, torch
from torch_bridge.nn import GRU
sent = interrupts.Interrupts()
with torch.no_grad():
    rnn, xs = GRU(64, 512, device="cuda"), torch.randn(4, 8, 64, device="cuda")
    expected = rnn(xs)[0].clone()
    torch.cuda.synchronize()

    def record(times):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(times):
                ys = rnn(xs)[0]
        return graph, ys

    times = 500
    began = time.perf_counter()
    record(times)
    seconds = time.perf_counter() - began
    for k in range(5):
        sent.send(lambda: record(times), seconds * (0.3 + 0.1 * k))
        graph, ys = record(1)
        ys.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(ys, expected)
sent.say()
"""


def test_an_interrupt_while_a_graph_is_recorded_leaves_the_process_usable():
    assert_stops(begin(RECORDING), 5)


FORKING = """
import os, warnings
import jax, stress
run, arguments = stress.problem("lstm", 4, 2, 512)
want = jax.jit(run)(*arguments)
program = stress.repeated(run, 1000)
warnings.simplefilter("ignore")  # JAX warns of forks
for k in range(20):
    result = program(want, *arguments)
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert int(result) == 1000
print("forked")
"""


@METHODS
def test_a_fork_while_kernels_run_changes_nothing(method):
    assert_says(begin(FORKING, method), "forked")


LEAVING = """
import jax, stress
run, arguments = stress.problem("lstm", 4, 2, 512)
want = jax.jit(run)(*arguments)
result = stress.repeated(run, 50_000)(want, *arguments)
others = [jax.jit(other).trace(*given) for other, given in map(lambda n: stress.problem("gru", 4, 2, n), (40, 72, 300))]
print("leaving", flush=True)
"""


@METHODS
def test_a_process_can_end_while_kernels_run_and_compile(method, tmp_path):
    assert_says(begin(LEAVING, method, TRITON_CACHE_DIR=str(tmp_path)), "leaving", timeout=120)


COUNTING = """
import jax, stress
for sizes in stress.PROBLEMS:
    run, arguments = stress.problem(*sizes)
    want = jax.jit(run)(*arguments)
    program = stress.repeated(run, 500)
    for _ in range(20):
        assert int(program(want, *arguments)) == 500
print("equal bits")
"""


@METHODS
def test_a_compiled_program_gives_the_same_bits_without_flags_of_xla(method):
    """Elsewhere, the tests set a flag with which two compilations give the same bits, too."""
    assert_says(begin(COUNTING, method, XLA_FLAGS=""), "equal bits")


@METHODS
def test_four_processes_share_a_gpu(method):
    """Programs of two of the problems wait for one another, while the GPU switches between processes."""
    for process in [begin(COUNTING, method) for _ in range(4)]:
        assert_says(process, "equal bits")


@pytest.fixture(scope="module")
def sanitized_run(tmp_path_factory):
    """Returns the path of compute-sanitizer, and the environment of `sanitized.py`, whose programs are all compiled.

    Under the sanitizer, a compilation by XLA can take minutes.
    """
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    assert found, "this test needs compute-sanitizer, of the CUDA toolkit, in PATH; -k 'not sanitizer' leaves it out"
    environment = child.environment(
        PYTORCH_NO_CUDA_MEMORY_CACHING="1", XLA_PYTHON_CLIENT_ALLOCATOR="platform",
        XLA_FLAGS="--xla_gpu_autotune_level=0", JAX_COMPILATION_CACHE_DIR=str(tmp_path_factory.mktemp("jax")),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0", JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )  # fmt: skip
    subprocess.run([sys.executable, SANITIZED, "compile"], env=environment, check=True, timeout=900)
    return found, environment


def is_of_a_mailbox(record):
    """Returns whether a hazard of racecheck is between stores and polls of a word that a cluster exchanges.

    These are relaxed accesses of the scope of the cluster, which may race: a word says by itself whether it is new.
    Racecheck knows barriers alone.
    """
    from torch_bridge.kernels.loops import cluster_common, split_common

    def lines_of(*functions):
        found = set()
        for function in functions:
            lines, first = inspect.getsourcelines(function.fn)
            name = Path(inspect.getsourcefile(function.fn)).name
            found |= {(name, line) for line in range(first, first + len(lines))}
        return found

    places = {
        "Read": lines_of(split_common.receive),
        "Write": lines_of(cluster_common.send_numbered_to, cluster_common.send_to_all, cluster_common.send_pairs_to),
    }
    accesses = re.findall(r"(Read|Write) access at \S+ in (\S+):(\d+)", record)
    kinds = {kind for kind, _, _ in accesses}
    return kinds == set(places) and all((name, int(line)) in places[kind] for kind, name, line in accesses)


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_the_sanitizer_finds_no_fault_in_any_kind_of_kernel(tool, sanitized_run):
    """Every array has memory of its own, so that an access out of bounds is found.

    The launch asks each kernel for a parameter after its last, to learn their number, and memcheck reports that call.
    Racecheck reports the words of clusters (`is_of_a_mailbox`).
    """
    sanitizer, environment = sanitized_run
    checked = [option for part in sanitized.KERNELS for option in ("--kernel-name", f"kernel_substring={part}")]
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--print-limit", "100000", *checked, sys.executable, SANITIZED],
        env=environment, capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    said = done.stdout[:3000] + done.stdout[-3000:] + done.stderr[-2000:]
    assert done.returncode == 0 and "launches of time loops" in done.stdout, said
    summaries = re.findall(r"SUMMARY: (\d+) (?:errors?|hazards?)", done.stdout)
    records = done.stdout.split("Race reported between")[1:]
    others = [record for record in records if not is_of_a_mailbox(record)]
    assert not others, others[0][:3000]
    expected = len(records) + done.stdout.count("on CUDA API call to cuFuncGetParamInfo")
    assert summaries == [str(expected)], said
