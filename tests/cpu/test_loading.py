"""Loading of kernels starts when a launch is traced; kernels are compiled in parallel, each of them once."""

import functools
import gc
import re
import subprocess
import sys
import threading
import time
import types
import weakref
from concurrent.futures import wait
from pathlib import Path

import calls
import jax
import jax.numpy as jnp
import pytest
from cases import Case
from pretended import pretend_gpus
from programs import recurrence, seeds

import jaxrnn
from jaxrnn import norms

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def h200(monkeypatch):
    """Makes tracing see an H200, whose launches are callbacks.

    Returns the loads that are begun and completed there, in the order of these events.
    """
    from torch_bridge import compiler, gpu
    from torch_bridge.tiling import Device

    events = []
    jax.clear_caches()  # what an earlier test traced would begin nothing
    pretend_gpus(monkeypatch, Device(90, 132, 232_448, name="H200"))
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    monkeypatch.setattr(gpu, "can_capture_early_launches", lambda: True)
    monkeypatch.setattr(compiler, "begin_loading", lambda *what: events.append(("begin", what)))
    monkeypatch.setattr(compiler, "ensure_loaded", lambda *what: events.append(("load", what)))
    return events


def norm(shape, implementation="triton"):
    def loss(x, weight):
        return jnp.sum(jnp.sin(jaxrnn.rms_norm(x, weight, implementation=implementation)))

    return jax.grad(loss, (0, 1)), jax.random.normal(jax.random.key(0), shape), jnp.ones(shape[-1:])


PROGRAMS = {
    "gru": (recurrence, Case("gru", T=128, B=64, H=128, D=128), 5),  # projection, two loops, weight gradients, sum
    "lstm": (recurrence, Case("lstm", T=2, B=4, H=48), 2),
    "seeds": (seeds, Case("gru", T=2, B=4, H=48), 2),
    "norm": (norm, (2, 3, 256), 3),
}


@pytest.mark.quick("name")
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_loaded_kernel_was_begun_when_it_was_traced(name, h200):
    make, of, count = PROGRAMS[name]
    function, *args = make(of)
    traced = jax.jit(function).trace(*args)
    begun = {what for _, what in h200}
    assert {kind for kind, _ in h200} == {"begin"} and len(begun) == count
    traced.lower(lowering_platforms=("cuda",))
    assert {what for kind, what in h200 if kind == "load"} == begun


@pytest.mark.parametrize("name", PROGRAMS)
def test_tracing_for_the_native_launch_begins_to_compile_and_loads_nothing(name, h200, monkeypatch):
    monkeypatch.setenv("JAXRNN_LAUNCH", "native")
    make, of, count = PROGRAMS[name]
    function, *args = make(of)
    jax.jit(function).trace(*args)
    assert len({what for _, what in h200}) == count
    assert {(kind, what[0]) for kind, what in h200} == {("begin", None)}  # onto no device


@pytest.mark.parametrize("sequences", [132, 133])
def test_residuals_are_cast_outside_of_barriers(h200, sequences):
    """Between barriers XLA could not drop a cast. Beyond 264 sequences in two models, `local_grads` are float16."""
    function, arrays = seeds(Case("gru", T=20, B=sequences, H=48))
    text = jax.jit(function).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    held = [re.findall(r"\dx192x(\w+)>", line) for line in barriers]
    assert [each for each in held if each] == ([["f32"]] * 2 if sequences == 132 else [["f16"]] * 2)


def test_only_kernels_of_the_sizes_that_vmap_gives_are_begun(h200):
    """16 models of 64 sequences have other tilings than one."""
    function, arrays = recurrence(Case("gru", T=128, B=64, H=128, D=128))
    many = {name: jnp.stack([x] * 16) for name, x in arrays.items()}
    traced = jax.jit(jax.vmap(function)).trace(many)
    begun = {what for _, what in h200}
    traced.lower(lowering_platforms=("cuda",))
    assert begun == {what for kind, what in h200 if kind == "load"}
    h200.clear()
    jax.jit(function).trace(arrays)
    assert {what for _, what in h200} - begun


def test_empty_arrays_compile_nothing(h200):
    function, x, weight = norm((2, 256))
    traced = jax.jit(jax.vmap(function)).trace(jnp.ones((0, *x.shape)), jnp.ones((0, *weight.shape)))
    assert "kind=norm" in str(traced.jaxpr)
    traced.lower(lowering_platforms=("cuda",))
    assert not h200


def test_tracing_for_the_cpu_begins_nothing(h200):
    function, args = recurrence(PROGRAMS["lstm"][1])
    with jax.default_device("cpu"):
        jax.jit(function).trace(args)
    assert not h200


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_arrays_on_the_cpu_run_xla_unless_kernels_are_named(name, h200, monkeypatch):
    """A program is traced for the default device, the GPU, before JAX knows where its arrays are."""
    monkeypatch.setattr(norms, "_MIN_KERNEL_ELEMENTS", 0)
    make, of, _ = PROGRAMS[name]
    function, *args = make(of, None)
    got = jax.jit(function)(*args)
    assert {kind for kind, _ in h200} == {"begin"}
    calls.assert_close(got, jax.jit(make(of, "xla")[0])(*args), 2.0**-10)
    with pytest.raises(NotImplementedError, match="need a GPU, but this call is compiled for the CPU"):
        jax.jit(make(of, "triton")[0])(*args)


def test_load_begins_all_kernels_before_it_waits_for_the_first(h200):
    from torch_bridge import gpu, weight_grads

    arrays = tuple((name, "float32") for name in ("x", "hs", "h0", "dxp", "dhn"))
    problem = weight_grads.Problem(1, 1, 2, 64, 128, 128, 384, arrays)
    weight_grads.Launch(problem, gpu.device(0)).load(0)
    assert [kind for kind, _ in h200] == ["begin", "begin", "load", "load"]


@pytest.fixture
def loading(monkeypatch):
    """Returns the module `compiler`, with a device onto which everything can be loaded, and two compiling threads."""
    from torch_bridge import compiler

    compilers = threading.Semaphore(2)
    monkeypatch.setattr(compiler, "_cores", lambda: 2)
    monkeypatch.setattr(compiler, "_compilers", lambda: compilers)
    monkeypatch.setattr(compiler, "load_kernel", lambda compiled, ordinal: (compiled, ordinal))
    monkeypatch.setattr(compiler, "_loading", {})
    return compiler


def test_kernels_are_compiled_in_parallel_and_once(loading):
    together, compiled = threading.Barrier(2, timeout=60), []

    def compile(name):
        compiled.append(name)
        together.wait()
        return name

    for name in ("a", "b", "a"):
        loading.begin_loading(0, compile, name)
    while len(compiled) < 2:
        time.sleep(0.01)
    assert [loading.ensure_loaded(0, compile, name) for name in ("a", "b", "a")] == [("a", 0), ("b", 0), ("a", 0)]
    assert sorted(compiled) == ["a", "b"]


def test_a_kernel_is_loaded_onto_each_device(loading):
    assert [loading.ensure_loaded(ordinal, str, 7) for ordinal in (0, 1)] == [("7", 0), ("7", 1)]


def test_a_needed_kernel_overtakes_queued_kernels(loading):
    """The queued kernels may belong to a program that is never lowered."""
    go_on, threads = threading.Event(), {}

    def compile(name):
        threads[name] = threading.current_thread()
        if name != "needed":
            assert go_on.wait(60)
        return name

    for name in ("a", "b", "needed"):
        loading.begin_loading(0, compile, name)
    try:
        assert loading.ensure_loaded(0, compile, "needed") == ("needed", 0)
    finally:
        go_on.set()
    assert [loading.ensure_loaded(0, compile, name) for name in ("a", "b")] == [("a", 0), ("b", 0)]
    assert threads["needed"] is threading.current_thread() not in (threads["a"], threads["b"])


def start_no_more(thread):
    """Raises what `Thread.start` raises at interpreter exit from Python 3.12 on."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


@pytest.mark.parametrize("why", ["one core", "the main thread has ended"])
def test_without_threads_a_kernel_is_compiled_when_it_is_needed(why, loading, monkeypatch):
    if why == "one core":
        monkeypatch.setattr(loading, "_cores", lambda: 1)
    else:
        monkeypatch.setattr(threading.Thread, "start", start_no_more)
    compiled = []
    loading.begin_loading(0, compiled.append, 7)
    assert compiled == []
    assert loading.ensure_loaded(0, compiled.append, 7) == (None, 0)
    assert compiled == [7]


def test_an_error_is_raised_where_the_kernel_is_needed_and_the_next_call_retries(loading):
    answers = ["interrupted", "out of registers", "out of memory", None]

    def compile():
        if answer := answers.pop(0):
            raise RuntimeError(answer)
        return "a kernel"

    loading.begin_loading(0, compile)
    wait(loading._loading.values())  # a job that failed in a thread is done again by the caller
    for text in ("out of registers", "out of memory"):
        with pytest.raises(RuntimeError, match=text):
            loading.ensure_loaded(0, compile)
    assert loading.ensure_loaded(0, compile) == ("a kernel", 0)


@pytest.mark.parametrize("state", ["never begun", "in progress", "failed", "loaded"])
def test_a_kernel_is_loaded_once_its_job_has_succeeded(state, loading):
    go_on = threading.Event()

    def compile():
        assert go_on.wait(60)
        if state == "failed":
            raise RuntimeError("out of memory")

    if state != "never begun":
        loading.begin_loading(0, compile)
    if state != "in progress":
        go_on.set()
        wait(loading._loading.values())
    assert loading.is_loaded(0, compile) == (state == "loaded")
    go_on.set()
    wait(loading._loading.values())


def test_a_capture_launches_loaded_kernels_of_shapes_that_no_cache_remembers(loading, monkeypatch):
    """The operators remember 4096 shapes. A kernel is loaded for every number of steps and sequences."""
    import torch

    from benchmarks.problems import make_problem
    from torch_bridge import launch, op_common
    from torch_bridge.recurrences import Launch
    from torch_bridge.tiling import Device

    pretend_gpus(monkeypatch, *[Device(80, 108, 166_912)] * 2)
    compiled = []
    monkeypatch.setattr(launch, "compile_call", lambda *what: compiled.append(what))
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    few, more = (make_problem("gru", "fwd", "tf32", 32, batch) for batch in (8, 16))
    capturing.append("yes")
    with pytest.raises(RuntimeError, match="not loaded yet"):
        op_common.load(Launch, few, 0)
    capturing.clear()
    op_common.load(Launch, few, 0)
    capturing.append("yes")
    for problem in (few, more):
        assert op_common.load(Launch, problem, 0).problem == problem
    assert len(compiled) == 1
    with pytest.raises(RuntimeError, match="not loaded yet"):
        op_common.load(Launch, few, 1)


def test_an_interrupt_of_one_thread_is_not_raised_in_threads_that_wait_for_the_kernel(loading):
    begun, go_on, results = threading.Event(), threading.Event(), {}
    interrupts = [KeyboardInterrupt("of the first thread")]

    def compile():
        begun.set()
        assert go_on.wait(60)
        if interrupts:
            raise interrupts.pop()
        return "a kernel"

    def load(name):
        try:
            results[name] = loading.ensure_loaded(0, compile)
        except BaseException as error:
            results[name] = repr(error)

    threads = [threading.Thread(target=load, args=(name,)) for name in ("first", "second", "third")]
    threads[0].start()
    assert begun.wait(60)
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.2)  # until both wait for the first
    go_on.set()
    for thread in threads:
        thread.join(60)
    loaded = ("a kernel", 0)
    assert results == {"first": "KeyboardInterrupt('of the first thread')", "second": loaded, "third": loaded}


def test_an_error_is_raised_in_all_threads_that_wait_for_the_kernel(loading):
    begun, go_on, results, compiled = threading.Event(), threading.Event(), [], []

    def compile():
        compiled.append(None)
        begun.set()
        assert go_on.wait(60)
        raise RuntimeError("out of memory")

    def load():
        try:
            loading.ensure_loaded(0, compile)
        except RuntimeError as error:
            results.append(str(error))

    threads = [threading.Thread(target=load) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    time.sleep(0.2)  # until it waits for the first
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert (results, len(compiled)) == (["out of memory"] * 2, 1)


@pytest.mark.parametrize("where", ["here", "in a thread"])
def test_a_failed_compilation_keeps_no_arrays_alive(where, loading):
    """The exception keeps no arrays alive, neither of the call that failed nor of a call that waited for it."""
    begun, go_on = threading.Event(), threading.Event()

    class Activations:
        pass

    def compile():
        begun.set()
        assert go_on.wait(60)
        raise RuntimeError("out of memory")

    def step():
        activations = Activations()
        kept.append(weakref.ref(activations))
        if where == "here":
            go_on.set()
        else:
            threading.Timer(0.1, go_on.set).start()  # while `ensure_loaded` waits for the job
        loading.ensure_loaded(0, compile)

    kept = []
    if where == "in a thread":
        loading.begin_loading(0, compile)
        assert begun.wait(60)
    with pytest.raises(RuntimeError, match="out of memory"):
        step()
    gc.collect()
    assert kept[0]() is None
    assert loading._loading == {}


# The beginning of each program that `run_by_itself` runs: a slow `compile`, and two compiling threads.
BY_ITSELF = """
import os, sys, threading, time
from torch_bridge import compiler
compiler._cores = lambda: 2
compiler.load_kernel = lambda compiled, ordinal: compiled
parent = os.getpid()

def compile(number):
    print("compiles", number, flush=True)
    time.sleep(0.5 if os.getpid() == parent else 0)
    return number
"""


def run_by_itself(code):
    command = [sys.executable, "-c", BY_ITSELF + code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_queued_compilations_are_dropped_at_interpreter_exit():
    lines = run_by_itself("""
for number in range(20):
    compiler.begin_loading(0, compile, number)
time.sleep(0.2)
""")
    assert 1 <= len(lines) <= 4


@pytest.mark.parametrize("held", ["a kernel", "_parsing", "_loading_lock", "interpreter_lock", "_compilers()"])
def test_a_forked_process_does_not_wait_for_threads_of_its_parent(held):
    """The child has none of its parent's threads, so it would wait forever for their locks and results."""
    lines = run_by_itself(f"""
held = {held!r}
ready = threading.Event()

def hold():
    names = [held] if held != "_compilers()" else [held, held]
    for name in names:
        eval("compiler." + name).acquire()
    ready.set()
    time.sleep(2)
    for name in names:
        eval("compiler." + name).release()

if held == "a kernel":
    compiler.begin_loading(0, compile, 1)
    time.sleep(0.2)
else:
    threading.Thread(target=hold).start()
    ready.wait()
pid = os.fork()
if pid == 0:
    with compiler._parsing, compiler.interpreter_lock:
        loaded = compiler.ensure_loaded(0, compile, 1)
        print("child has", loaded, compiler.run_in_background(int, "2").result(timeout=10), flush=True)
    os._exit(0)
end = time.monotonic() + 60
while os.waitpid(pid, os.WNOHANG) == (0, 0):
    if time.monotonic() > end:
        os.kill(pid, 9)
        sys.exit("the child hangs")
    time.sleep(0.05)
""")
    assert "child has 1 2" in lines


def test_triton_is_hashed_while_its_driver_is_compiled_if_no_kernel_is_stored(loading, monkeypatch, tmp_path):
    import triton

    from torch_bridge import compiler, gpu

    called, begun = threading.Event(), []
    monkeypatch.setattr(triton.runtime.cache, "triton_key", called.set)
    monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=types.SimpleNamespace(utils=None)))
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    assert gpu.DriverCheck()() is None
    assert called.wait(60)
    (tmp_path / "cache" / "key").mkdir(parents=True)
    monkeypatch.setattr(compiler, "run_in_background", begun.append)
    assert gpu.DriverCheck()() is None
    assert not begun


def test_a_failure_of_the_driver_is_retried_and_a_success_is_not(monkeypatch):
    """A full disk or a busy GPU may pass; a failed attempt may run the C compiler, so not every call makes one."""
    import triton

    from torch_bridge import gpu

    now, answers = [100.0], [OSError("no space left on device"), OSError("no space left on device"), None]

    class Driver:
        @property
        def active(self):
            if answer := answers.pop(0):
                raise answer
            return types.SimpleNamespace(utils=None)

    monkeypatch.setattr(triton.runtime, "driver", Driver())
    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    check = gpu.DriverCheck()
    assert check() == check() == "OSError: no space left on device"
    now[0] += gpu.RETRY_SECONDS
    assert check() == "OSError: no space left on device"
    assert len(answers) == 1
    now[0] += gpu.RETRY_SECONDS
    assert check() is None and check() is None
    assert not answers


def test_operators_launch_kernels_again_after_a_failure_of_the_driver(monkeypatch):
    import torch

    from torch_bridge import availability, gpu, norm_ops
    from torch_bridge.rnn_ops import implementation
    from torch_bridge.tiling import Device

    pretend_gpus(monkeypatch, Device())
    for module in (implementation, norm_ops):  # with caches of this test, not of what ran before
        again = availability.cached_reason(module._unsupported.__wrapped__)
        monkeypatch.setattr(module, "_unsupported", again)
    device, reasons = torch.device("cuda:0"), ["RuntimeError: out of memory"] * 2 + [None] * 2
    monkeypatch.setattr(gpu, "driver_fails", lambda: reasons.pop(0))
    ask = (
        lambda: implementation._unsupported(None, device, torch.float32),
        lambda: norm_ops._unsupported(None, device, torch.float32),
    )
    assert all("cannot load kernels here (RuntimeError: out of memory)" in each() for each in ask)
    assert [each() for each in ask] == [None, None]
    assert [each() for each in ask] == [None, None]  # from the cache
    assert not reasons


@pytest.mark.compile_only
def test_kernels_compiled_in_parallel_are_the_same(monkeypatch, tmp_path):
    import triton

    from benchmarks.problems import make_problem
    from torch_bridge import compiler
    from torch_bridge.launch import compile_call
    from torch_bridge.recurrences import Launch
    from torch_bridge.tiling import Device

    device = Device(90, 132, 232_448)
    problems = [make_problem(cell, way, "tf32", 64, 64) for cell in ("gru", "lstm") for way in ("fwd", "bwd")]
    made = [kernel.key for problem in problems for kernel in Launch(problem, device).kernels]
    monkeypatch.setattr(compiler, "load_kernel", lambda compiled, _: compiled)
    monkeypatch.setattr(compiler, "_cores", lambda: len(made))
    monkeypatch.setattr(compiler, "_compilers", functools.cache(compiler._compilers.__wrapped__))
    monkeypatch.setattr(compiler, "_loading", {})
    ptx = []
    for folder, begin in (("together", compiler.begin_loading), ("alone", compiler.ensure_loaded)):
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / folder))
        compiler._loading.clear()
        for one in made:
            begin(0, compile_call, one, 90)
        assert not any(future.exception() for future in compiler._loading.values())
        ptx.append([compiler.ensure_loaded(0, compile_call, one, 90).asm["ptx"] for one in made])
        assert len(list((tmp_path / folder).iterdir())) == len(made)  # no kernel came from another cache
    assert ptx[0] == ptx[1]
