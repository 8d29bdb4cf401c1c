"""Kernels on their way to a device: begun when a launch is traced, compiled side by side, each of them once."""

import functools
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor, wait

import cases
import jax
import jax.numpy as jnp
import pytest
from cases import Case
from pretended import pretend_gpus

import jaxrnn

pytestmark = pytest.mark.torch


@pytest.fixture
def h200(monkeypatch):
    """Makes this process one with an H200, as far as tracing can see; what is begun and loaded there, in its order."""
    from torch_bridge import launch
    from torch_bridge.config import Device

    events = []
    pretend_gpus(monkeypatch, Device(90, 132, 232_448, name="H200"))
    monkeypatch.setattr(launch, "_records_early_launches", lambda: True)
    monkeypatch.setattr(launch, "_begin_loading", lambda *what: events.append(("begin", what)))
    monkeypatch.setattr(launch, "_loaded", lambda *what: events.append(("load", what)))
    return events


def recurrence(case):
    arrays = {name: x for name, x in cases.make_inputs(case).items() if x is not None}
    return functools.partial(cases._with_gradients, case, "triton"), arrays


def seeds(case):
    function, arrays = recurrence(case)
    return jax.vmap(function), {name: jnp.stack([x, x]) for name, x in arrays.items()}


def norm(shape):
    def loss(x, weight):
        return jnp.sum(jaxrnn.rms_norm(x, weight, implementation="triton") ** 2)

    return jax.grad(loss, (0, 1)), jnp.ones(shape), jnp.ones(shape[-1:])


PROGRAMS = {
    "gru": (recurrence, Case("gru", T=128, B=64, H=128, D=128), 5),  # projection, loops, weights' gradients, their sum
    "lstm": (recurrence, Case("lstm", T=2, B=4, H=48), 2),
    "seeds": (seeds, Case("gru", T=2, B=4, H=48), 2),
    "norm": (norm, (2, 3, 256), 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_loaded_was_begun_when_it_was_traced(name, h200):
    make, of, count = PROGRAMS[name]
    function, *args = make(of)
    traced = jax.jit(function).trace(*args)
    begun = {what for _, what in h200}
    assert {kind for kind, _ in h200} == {"begin"} and len(begun) == count
    traced.lower(lowering_platforms=("cuda",))
    assert {what for kind, what in h200 if kind == "load"} == begun


def test_of_nothing_nothing_is_compiled(h200):
    function, x, weight = norm((2, 256))
    traced = jax.jit(jax.vmap(function)).trace(jnp.ones((0, *x.shape)), jnp.ones((0, *weight.shape)))
    assert "jaxrnn_norm" in str(traced.jaxpr)
    traced.lower(lowering_platforms=("cuda",))
    assert not h200


def test_for_the_cpu_nothing_is_begun(h200):
    function, args = recurrence(PROGRAMS["lstm"][1])
    with jax.default_device("cpu"):
        jax.jit(function).trace(args)
    assert not h200


def test_all_kernels_of_a_call_are_begun_before_the_first_is_waited_for(h200):
    from torch_bridge import launch, weight_grads

    arrays = tuple((name, "float32") for name in ("x", "hs", "h0", "dxp", "dhn"))
    problem = weight_grads.Problem(1, 1, 2, 64, 128, 128, 384, arrays)
    weight_grads.Launch(problem, launch.device(0)).load(0)
    assert [kind for kind, _ in h200] == ["begin", "begin", "load", "load"]


@pytest.fixture
def loading(monkeypatch):
    """The module, with a device on which everything can be loaded, and two threads."""
    from torch_bridge import launch

    with ThreadPoolExecutor(2) as threads:
        monkeypatch.setattr(launch, "_cores", lambda: 2)
        monkeypatch.setattr(launch, "_compilers", lambda: threads)
        monkeypatch.setattr(launch, "load_kernel", lambda compiled, ordinal: (compiled, ordinal))
        monkeypatch.setattr(launch, "_loading", {})
        yield launch


def test_kernels_are_compiled_side_by_side_and_once(loading):
    together, compiled = threading.Barrier(2, timeout=60), []

    def compile(name):
        compiled.append(name)
        together.wait()
        return name

    for name in ("a", "b", "a"):
        loading._begin_loading(0, compile, name)
    while len(compiled) < 2:
        time.sleep(0.01)
    assert [loading._loaded(0, compile, name) for name in ("a", "b", "a")] == [("a", 0), ("b", 0), ("a", 0)]
    assert sorted(compiled) == ["a", "b"]


def test_a_kernel_is_loaded_onto_each_device(loading):
    assert [loading._loaded(ordinal, str, 7) for ordinal in (0, 1)] == [("7", 0), ("7", 1)]


def test_what_is_needed_overtakes_what_waits(loading):
    """As what was begun for a program that is never lowered."""
    go_on, threads = threading.Event(), {}

    def compile(name):
        threads[name] = threading.current_thread()
        if name != "needed":
            assert go_on.wait(60)
        return name

    for name in ("a", "b", "needed"):
        loading._begin_loading(0, compile, name)
    try:
        assert loading._loaded(0, compile, "needed") == ("needed", 0)
    finally:
        go_on.set()
    assert [loading._loaded(0, compile, name) for name in ("a", "b")] == [("a", 0), ("b", 0)]
    assert threads["needed"] is threading.current_thread() not in (threads["a"], threads["b"])


@pytest.mark.parametrize("why", ["one core", "the main thread is over"])
def test_without_threads_a_kernel_is_compiled_when_it_is_needed(why, loading, monkeypatch):
    if why == "one core":
        monkeypatch.setattr(loading, "_cores", lambda: 1)
    else:
        loading._compilers().shutdown()
    compiled = []
    loading._begin_loading(0, compiled.append, 7)
    assert compiled == []
    assert loading._loaded(0, compiled.append, 7) == (None, 0)
    assert compiled == [7]


def test_an_error_is_raised_where_the_kernel_is_needed_and_the_next_call_tries_again(loading):
    answers = ["interrupted", "out of registers", "out of memory", None]

    def compile():
        if answer := answers.pop(0):
            raise RuntimeError(answer)
        return "a kernel"

    loading._begin_loading(0, compile)
    wait(loading._loading.values())  # what failed in a thread is done here
    for text in ("out of registers", "out of memory"):
        with pytest.raises(RuntimeError, match=text):
            loading._loaded(0, compile)
    assert loading._loaded(0, compile) == ("a kernel", 0)


def test_triton_is_hashed_beside_the_first_c_compiler(loading, monkeypatch):
    import triton

    called = threading.Event()
    monkeypatch.setattr(triton.runtime.cache, "triton_key", called.set)
    monkeypatch.setattr(triton.runtime, "driver", types.SimpleNamespace(active=types.SimpleNamespace(utils=None)))
    assert loading.driver_fails.__wrapped__() is None
    assert called.wait(60)


@pytest.mark.compile_only
def test_compiled_side_by_side_kernels_are_the_same(monkeypatch, tmp_path):
    import triton

    from benchmarks.launches import make_problem
    from torch_bridge import launch
    from torch_bridge.config import Device

    device = Device(90, 132, 232_448)
    problems = [make_problem(cell, way, "tf32", 64, 64) for cell in ("gru", "lstm") for way in ("fwd", "bwd")]
    made = [launch.Launch(problem, device).specialization for problem in problems]
    monkeypatch.setattr(launch, "load_kernel", lambda compiled, _: compiled)
    monkeypatch.setattr(launch, "_cores", lambda: len(made))
    monkeypatch.setattr(launch, "_compilers", functools.cache(launch._compilers.__wrapped__))
    monkeypatch.setattr(launch, "_loading", {})
    ptx = []
    for folder, begin in (("together", launch._begin_loading), ("alone", launch._loaded)):
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / folder))
        launch._loading.clear()
        for one in made:
            begin(0, launch.Specialization.compile, one)
        assert not any(future.exception() for future in launch._loading.values())
        ptx.append([launch._loaded(0, launch.Specialization.compile, one).asm["ptx"] for one in made])
        assert len(list((tmp_path / folder).iterdir())) == len(made)  # nothing came from another cache
    assert ptx[0] == ptx[1]
