"""Tests `benchmarks`, mostly without a GPU: cases, providers against the oracle, statistics, tables, figures, JSON."""

import argparse
import concurrent.futures
import dataclasses
import functools
import io
import itertools
import os
import re
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import cases, harness, machine, norms, plot, providers, report, scans, suites, tilings, timing
from benchmarks.cases import Case
from benchmarks.oracle import Oracle, check, errors, tolerance
from benchmarks.results import AccuracyRow, AgentRow, Report, Row
from benchmarks.settings import Settings
from torch_bridge import tiling

ROOT = Path(__file__).parents[2]
MACHINE = {"gpu": "NVIDIA H200", "driver": "580.1", "jax": "0.11.2", "commit": "abc"}


def test_command_line_knows_every_suite():
    assert set(command.SUITES) == set(suites.SUITES)


def test_labels_tell_the_cases_of_a_suite_apart():
    """Results have the labels alone. `find` looks for a case in all suites of recurrences."""
    of_sizes = *cases.HEADLINE, *cases.SMALL, *cases.SWEEP, *cases.EPISODES, *cases.DERIVATIVES
    for case in (*of_sizes, *cases.VMAP, *cases.TORCH, cases.TORCH_STEP):
        assert cases.find(str(case)) == case
    for table in (cases.NORMS, cases.CHOICE):
        assert len({str(case) for case in table}) == len(table)
    assert str(cases.NormCase("rms", "bwd", "bf16", 8192, 4096)) == "RMSNorm bwd bf16 8192x4096"
    assert str(Case("gru", 5, 4, 12, reset_rate=0.3, reset_state="BH")) == "GRU 5,4,12 resets 30 % from [B,H]"
    assert str(Case("gru", 5, 4, 12, episode=3)) == "GRU 5,4,12 episodes of 3"
    assert str(Case("gru", 5, 4, 12, derivative="hvp")) == "GRU 5,4,12 hvp"
    with pytest.raises(ValueError, match="no case 'GRU 1,2,3'"):
        cases.find("GRU 1,2,3")


TINY = [Case("gru", 5, 4, 12, reset_rate=0.3), Case("lstm", 5, 4, 12, reset_rate=0.3)]
OTHER_CELLS = [Case(cell, 5, 4, 12, reset_rate=0.3) for cell in dict.fromkeys(case.cell for case in cases.CELLS)]
OTHER_CELLS.remove(TINY[0])
RESET_STATES = [
    (name, Case(cell, 5, 4, 12, reset_rate=0.3, reset_state=axes)) for name, cell, axes in [
        ("jaxrnn-xla", "gru", "H"), ("jaxrnn-xla", "gru", "BH"), ("jaxrnn-xla", "lstm", "TBH"),
        ("hoisted-scan", "lstm", "H"), ("hoisted-scan", "lstm", "BH"), ("hoisted-scan", "gru", "TBH"),
    ]
]  # fmt: skip
DERIVATIVES = [dataclasses.replace(case, derivative=name) for case in TINY for name in ("jvp", "hvp")]
ON_TORCH = ["torch-cudnn", "torch-cudnn-packed", "torch_bridge", "torch-cell"]
ON_TORCH += ["torch-cudnn-bf16", "torch-cudnn-packed-bf16"]
CHECKED = [
    *itertools.product(("jaxrnn-xla", "flax", "hoisted-scan", "jaxrnn-linen"), (*TINY, *OTHER_CELLS)),
    *itertools.product(ON_TORCH, TINY),
    *RESET_STATES,
    *itertools.product(("jaxrnn", "jaxrnn-xla", "flax", "hoisted-scan"), DERIVATIVES),
    *itertools.product(("jaxrnn-xla", "flax"), [Case("gru", 3, 5, 8, reset_rate=0.2, models=2)]),
]
MARKS = dict.fromkeys(ON_TORCH, pytest.mark.torch) | dict.fromkeys(("jaxrnn", "jaxrnn-linen"), pytest.mark.interpret)


@functools.cache
def numbers_and_truth(case):
    inputs = providers.Inputs(cases.make_inputs(case))
    assert 0 < inputs.numpy["resets"].sum() < inputs.numpy["resets"].size
    return inputs, Oracle(case, inputs.jax)


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(name, case, id=f"{name}-{case}", marks=MARKS.get(name, [])) for name, case in CHECKED],
)
def test_provider_passes_the_check(name, case):
    provider = providers.PROVIDERS[name]
    assert provider.unavailable() is None
    if provider.unsupported(case):
        assert name == "flax" and case.cell in ("rms_norm_gru", "layer_norm_gru")
        return
    inputs, truth = numbers_and_truth(case)
    checked = check(provider, ready(provider.build(case, inputs)), truth)
    assert checked.status == "measured", checked.reason
    rounds = provider.precision == "bf16" or jax.default_backend() == "gpu"
    assert checked.error < (tolerance(case.cell, "bf16") if rounds else 2e-6)


def test_flax_is_not_measured_with_reset_states():
    unsupported = {providers.PROVIDERS["flax"].unsupported(case) for _, case in RESET_STATES}
    assert unsupported == {"is measured with episodes that start from zeros"}


def ready(built):
    if isinstance(built, providers.Ready):
        return built
    return providers.Ready(lambda: built.jitted(*built.args), built.canonical)


RELU = Case("simple_relu", 5, 4, 12, reset_rate=0.3)


@pytest.mark.parametrize(("case", "error", "timed"), [
    (TINY[0], 0.008, True), (TINY[0], 0.02, False), (RELU, 0.02, True), (RELU, 0.06, False),
], ids=str)  # fmt: skip
def test_check_applies_the_tolerance_of_the_cell(case, error, timed):
    """A ReLU's gradients are off by 0.02 in TF32, in every implementation; wrong results by 0.1 or more."""
    inputs, truth = numbers_and_truth(case)
    provider = providers.PROVIDERS["jaxrnn-xla"]
    assert provider.precision == "tf32"
    one = ready(provider.build(case, inputs))
    wrong = dataclasses.replace(one, canonical=lambda x: {k: (1 + error) * y for k, y in one.canonical(x).items()})
    checked = check(provider, wrong, truth)
    assert (checked.status == "measured") == timed
    if not timed:
        assert checked.status == "wrong" and checked.value is None and checked.error_of in checked.reason
        assert checked.reason.endswith(f"more than {tolerance(case.cell, 'tf32'):g}")


@pytest.fixture
def torch_on_the_cpu(monkeypatch):
    """Times PyTorch's passes by the host's clock, and compiles them without Inductor; yields the requested modes."""
    import torch

    compile, modes = torch.compile, []

    def without_inductor(module, *, fullgraph, mode=None):
        assert fullgraph
        modes.append(mode)
        return compile(module, fullgraph=True, backend="aot_eager")

    def clock(run, *, own_graphs=False):
        return dataclasses.replace(timing.host_clock(run, lambda: None), method="" if own_graphs else timing.REPLAYS)

    monkeypatch.setattr(torch, "compile", without_inductor)
    monkeypatch.setattr(timing, "torch_clock", clock)
    yield modes
    torch.compiler.reset()


INDUCTOR = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@INDUCTOR
@pytest.mark.torch
def test_modules_for_pytorch_are_checked_and_timed_beside_others(monkeypatch, torch_on_the_cpu):
    pair = TINY[0], dataclasses.replace(TINY[1], reset_rate=0.0)
    monkeypatch.setattr(cases, "TORCH", pair)
    settings = Settings(seconds=0.01, rounds=2, skip=("jaxrnn", "torchrl"))
    rows = list(suites.torch(settings, lambda _: None))
    names = ["torch_bridge", "torch_bridge-compiled", "torch_bridge-cudagraphs", "torch-cudnn", "torch-cudnn-packed"]
    assert [(row.case, row.provider) for row in rows] == [(str(case), name) for case in pair for name in names]
    for row in rows:
        assert row.status == "measured" and row.ours == "torch_bridge" and row.unit == "ms" and row.value > 0, row
        assert row.error < 2e-6 or jax.default_backend() == "gpu"
    assert torch_on_the_cpu == [None, "reduce-overhead"] * 2
    assert [row.note for row in rows] == ["", "", "", "without resets", "", *[""] * 5]
    assert "torch_bridge" not in {provider.name for provider in suites.compared(Settings())}
    assert "torch_bridge" in {provider.name for provider in suites.compared(Settings(only=("torch_bridge",)))}


def test_derivatives_are_timed_beside_peers_that_raise_for_them(monkeypatch):
    monkeypatch.setattr(cases, "DERIVATIVES", DERIVATIVES[:2])
    monkeypatch.setattr(providers.Provider, "unavailable", lambda self: None)
    rows = list(suites.derivatives(Settings(seconds=0.01, rounds=2, skip=("jaxrnn",)), lambda _: None))
    names = [name for name in suites.DERIVATIVES if name != "jaxrnn"]
    assert [(row.case, row.provider) for row in rows] == [*itertools.product(map(str, DERIVATIVES[:2]), names)]
    for row in rows:
        raises = row.provider.startswith("torch")
        assert row.status == ("unsupported" if raises else "measured") and (row.value is None) == raises, row
    assert {row.error_of for row in rows[:3]} <= {"ys", "dys"} and rows[6].error_of.startswith("d")
    table = printed(Report("derivatives", MACHINE, {}, rows))
    assert "GRU 5,4,12 resets 30 % hvp" in table
    assert table.count("unsupported: raises for derivatives beyond the first gradient") == 4


@INDUCTOR
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # PyTorch's own first capture is empty
@pytest.mark.gpu
def test_modules_for_pytorch_are_timed_on_the_gpu(monkeypatch):
    """The clock times replays of a CUDA graph, except for the provider that replays CUDA graphs of its own."""
    import torch

    torch.cuda.set_device(0)  # JAX leaves the GPU current that it used last
    settings = Settings(seconds=0.02, rounds=2, skip=("torchrl",))
    monkeypatch.setattr(cases, "TORCH", (Case("gru", 64, 16, 64), Case("lstm", 64, 16, 64, reset_rate=0.0)))
    rows = list(suites.torch(settings, lambda _: None))
    assert [row for row in rows if row.status != "measured"] == []
    for row in rows:
        if row.provider in ("torch_bridge", "torch-cudnn"):
            assert row.method == timing.REPLAYS
        assert ("its own CUDA graphs" in row.method) == (row.provider == "torch_bridge-cudagraphs")
        assert 0.01 < row.value < 100 and row.error < tolerance("gru", "tf32")
    rows = list(suites.torch_step(settings, lambda _: None))
    assert [row for row in rows if row.status != "measured"] == []
    for row in rows:
        assert 1 < row.value < 10_000 and row.wall > 1
    assert {row.provider for row in rows if "device " in row.note} >= {"torch_bridge", "torch-cudnn"}


@pytest.mark.gpu
def test_captured_pass_does_not_depend_on_earlier_captures():
    """cuBLAS's workspace must be in memory of the graph. The test uses a separate process, which a fault would kill."""
    code = """
        import torch

        from benchmarks import timing

        def product():  # cuBLAS splits so long a sum into parts, which it adds up in its workspace
            return a.T @ b

        a, b = torch.randn(2, 2**18, 64, device="cuda")
        before, method = timing.capture(product)
        assert method == timing.REPLAYS
        replay, _ = timing.capture(product)
        del before
        torch._C._cuda_clearCublasWorkspaces()  # as torch.compile does before it records
        torch.cuda.empty_cache()
        replay()
        torch.cuda.synchronize()
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.gpu
def test_a_pass_that_cannot_be_captured_leaves_random_numbers_to_others():
    """The test uses a separate process, whose random generator a fault would break."""
    code = """
        import torch

        from benchmarks import timing

        x = torch.randn(8, device="cuda")
        run, method = timing.capture(lambda: x.cpu())  # waits for the device, which no capture allows
        assert "not captured" in method
        run()
        torch.rand(8, device="cuda")
        replay, method = timing.capture(lambda: torch.nn.functional.dropout(x))
        assert method == timing.REPLAYS
        replay()
        torch.cuda.synchronize()
    """
    ran = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.torch
def test_modules_for_pytorch_get_resets_only_if_the_case_has_them(monkeypatch):
    from torch_bridge.nn import stack

    given, original = [], stack.run

    def run(call):
        given.extend(one.resets for one in call.directions)
        return original(call)

    monkeypatch.setattr(stack, "run", run)
    for rate in (0.3, 0.0):
        case = dataclasses.replace(TINY[0], reset_rate=rate)
        providers.PROVIDERS["torch_bridge"].build(case, providers.Inputs(cases.make_inputs(case))).run()
    assert given[0].any() and given[1:] == [None]


@INDUCTOR
@pytest.mark.torch
def test_step_of_pytorch_reports_host_time_and_device_time(monkeypatch, torch_on_the_cpu):
    import torch

    graded = []
    monkeypatch.setattr(cases, "TORCH_STEP", Case("gru", 5, 1, 12, reset_rate=0.5))
    monkeypatch.setattr(timing, "synchronize", lambda: graded.append(torch.is_grad_enabled()))
    fake = dataclasses.replace(providers.PROVIDERS["torchrl"], needs=("no_such_module",))
    monkeypatch.setitem(providers.PROVIDERS, "torchrl", fake)
    *rows, missing = suites.torch_step(Settings(seconds=0.01, rounds=2), lambda _: None)
    assert [row.provider for row in [*rows, missing]] == list(suites.TORCH_STEP)
    assert missing.status == "unavailable" and {row.unit for row in [*rows, missing]} == {"us"}
    for row in rows:
        assert row.case == "a GRU step, B=5, H=12" and row.status == "measured" and row.error_of == "ys"
        assert 0.1 < row.low <= row.value <= row.high < 1e6 and row.wall > 0.1
        assert ("device" in row.note) == (row.provider != "torch_bridge-cudagraphs")
    assert rows[4].note.startswith("without resets; device ") and torch.is_grad_enabled()
    assert len(graded) > 10 and not any(graded)


@pytest.mark.torch
def test_wrong_step_is_not_timed(monkeypatch, torch_on_the_cpu):
    case, provider = Case("gru", 5, 1, 12, reset_rate=0.5), providers.PROVIDERS["torch_bridge"]

    def build(case, inputs):
        return provider.build(dataclasses.replace(case, reset_rate=0.0), inputs)

    (row,) = harness.time_steps(case, [dataclasses.replace(provider, build=build)], Settings())
    assert row.status == "wrong" and row.value is None and row.reason.startswith("not timed: ys is off by")


def test_provider_with_its_own_graphs_is_checked_on_the_third_call():
    inputs, truth = numbers_and_truth(TINY[0])
    flax = providers.PROVIDERS["flax"]
    built, calls = ready(flax.build(TINY[0], inputs)), []

    def run():
        """Returns wrong results from the third call on."""
        calls.append(None)
        return jax.tree.map(lambda x: x * (1.0 if len(calls) < 3 else 2.0), built.run())

    assert check(flax, providers.Ready(run, built.canonical), truth).status == "measured"
    calls.clear()
    row = check(flax, providers.Ready(run, built.canonical, own_graphs=True), truth)
    assert row.status == "wrong" and len(calls) == 3


DOT = r" dot\(| custom-call\(.*matmul"


@pytest.mark.parametrize("case", [TINY[0], *DERIVATIVES[:2]], ids=str)
@pytest.mark.parametrize("name", ["jaxrnn-xla", "flax", "hoisted-scan"])
def test_looped_passes_compute_everything_in_every_iteration(name, case):
    """XLA must hoist nothing out of the loop, as it hoists input projections if the loop does not carry the weights."""
    inputs, truth = numbers_and_truth(case)
    provider = providers.PROVIDERS[name]
    built = provider.build(case, inputs)
    many = harness.trace_loop(built, 3)()
    checked = check(provider, providers.Ready(many, built.canonical), truth)
    assert checked.status == "measured", checked.reason
    once = built.jitted.lower(*built.args).compile().as_text()
    before, entry = many.func.as_text().split("ENTRY ")
    assert not re.search(DOT, entry) and "while(" in entry
    assert len(re.findall(DOT, before)) >= len(re.findall(DOT, once)) > 1


def test_a_loop_that_is_wrong_or_cannot_be_compiled_becomes_a_row(monkeypatch):
    monkeypatch.setattr(harness, "_LOOPED_SECONDS", 60.0)
    monkeypatch.setattr(harness, "_MOST_PASSES", 3)
    inputs, truth = numbers_and_truth(TINY[0])
    chosen = [providers.PROVIDERS[name] for name in ("flax", "jaxrnn-xla")]
    prepared, _ = harness.prepare(chosen, TINY[0], inputs, Settings())
    flax = prepared["flax"]

    def fails(*_):
        raise RuntimeError("no space left")

    def doubles(_):
        return lambda: lambda: jax.tree.map(lambda x: 2 * x, flax.run())

    for loop, status in ((fails, "failed"), (lambda _: fails, "failed"), (doubles, "wrong")):
        broken = dataclasses.replace(flax, loop=loop)
        rows, clocks = harness.checked_clocks(chosen, prepared | {"flax": broken}, truth)
        assert rows["flax"].status == status
        assert status == "wrong" or rows["flax"].reason == "RuntimeError: no space left"
        assert {name: clock.method for name, clock in clocks.items()} == {
            "jaxrnn-xla": "jitted calls, enqueued, of 3 passes in a loop"
        }


@pytest.fixture
def spend(monkeypatch):
    """Replaces the clock by one that only the function that this returns advances."""
    now = [0.0]

    def spend(seconds):
        now[0] += seconds
        return ()

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return spend


def test_clock_of_loops_counts_passes(spend):
    clock = timing.jax_clock(lambda: spend(3.0), lambda: spend(8.0), 4)
    assert clock.batch(6) == 12.0 and clock.batch(8) == 16.0 and clock.batch(1) == 2.0 and clock.single() == 3.0


def test_host_clock_excludes_waiting(spend):
    order = []
    clock = timing.host_clock(lambda: spend(0.25) or order.append("call"), lambda: spend(8.0) or order.append("wait"))
    calls = 2 * timing.ENQUEUED + 3
    assert clock.batch(calls) == 0.25 * calls
    n = timing.ENQUEUED + 1
    assert [order[0], order[n], order[2 * n], order[-1]] == ["wait"] * 4
    assert order.count("wait") == 4 and order.count("call") == calls
    assert clock.single() == 8.25


def test_errors_report_nan_and_reject_other_shapes_and_names():
    want = {"ys": jax.numpy.ones((2, 3))}
    assert errors({"ys": jax.numpy.full((2, 3), 1.5)}, want)["ys"] == pytest.approx((0.5, 0.5))
    assert np.isnan(errors({"ys": jax.numpy.full((2, 3), np.nan)}, want)["ys"][0])
    with pytest.raises(ValueError, match="shape"):
        errors({"ys": jax.numpy.ones((3, 2))}, want)
    with pytest.raises(ValueError, match="want ys"):
        errors({"dxs": jax.numpy.ones((2, 3))}, want)


def test_every_provider_of_a_timed_case_has_a_row(monkeypatch):
    """Two providers are measured; one has no such cell, one is not installed, and one raises.

    First calls are made before anything is compiled: their time is limited, and compiling would take some of it.
    """
    fake = dataclasses.replace(providers.PROVIDERS["flax"], name="absent", needs=("no_such_module",))

    def raises(case, inputs):
        raise RuntimeError("out of order\nsecond line")

    broken = dataclasses.replace(fake, name="broken", needs=(), build=raises)
    chosen = [providers.PROVIDERS[name] for name in ("jaxrnn-xla", "flax", "jax-cudnn-lstm")] + [fake, broken]
    settings = Settings(seconds=0.01, rounds=3)
    monkeypatch.setattr(harness, "_AT_ONCE", 2)
    order, compile_in = [], harness.compile_in
    monkeypatch.setattr(harness.FirstCalls, "problem", lambda *_: order.append("first call"))
    monkeypatch.setattr(harness, "compile_in", lambda *args: (order.append("compile"), compile_in(*args))[1])
    several = harness.time_cases(TINY, chosen, settings, lambda case: {"jaxrnn-xla": case.B})
    rows, *others = several
    assert [{row.case for row in rows} for rows in others] == [{str(case)} for case in TINY[1:]]
    assert [row.provider for row in rows] == [provider.name for provider in chosen]
    assert [row.status for row in rows] == ["measured", "measured", "unsupported", "unavailable", "failed"]
    assert rows[0].target == TINY[0].B and rows[0].unit == "ms" and rows[0].calls >= 3
    assert rows[0].low <= rows[0].value <= rows[0].high and rows[0].wall > 0
    assert order[0] == "first call" and "first call" not in order[order.index("compile") :]
    assert rows[3].reason == "no_such_module not installed" and rows[4].reason == "RuntimeError: out of order"


def test_compile_times_a_first_call_and_one_after_another_process(monkeypatch):
    calls = []

    def run(provider, case, *, limit, cold=False, caches="", profile=""):
        calls.append((provider, cold, caches))
        return harness.first_call.FirstCall(4.0 if cold or not calls[-2][2] else 0.5)

    monkeypatch.setattr(harness.first_call, "run", run)
    monkeypatch.setattr(providers.Provider, "unavailable", lambda self: None)
    chosen = Settings(only=("jaxrnn", "torch-cudnn"), rows=("GRU 64,128,128",))
    rows = {(row.case, row.provider): row for row in suites.compile(chosen, lambda _: None)}
    first, second = "GRU 64,128,128", "GRU 64,128,128, second process"
    assert {key: (row.value, row.target) for key, row in rows.items()} == {
        (first, "jaxrnn"): (4.0, 4.0), (second, "jaxrnn"): (0.5, 1.0), (first, "torch-cudnn"): (4.0, None)
    }  # fmt: skip
    (_, cold, none), (_, _, before), (_, _, after), _ = calls
    assert cold and not none and before == after != ""


def test_a_second_process_is_not_timed_if_the_first_one_fails(monkeypatch):
    failed = harness.first_call.FirstCall(None, "failed", "no memory")
    monkeypatch.setattr(harness.first_call, "run", lambda *_, **__: failed)
    assert harness.first_call.run_twice("jaxrnn", cases.COMPILE[0], limit=1.0) == failed


def test_unfinished_first_call_skips_the_provider_in_wider_cases(monkeypatch):
    calls = []

    def never(name, case, limit, cold=False, profile=""):
        calls.append(case)
        return harness.first_call.FirstCall(None, "unfinished", f"first call unfinished after {limit:g} s")

    monkeypatch.setattr(harness.first_call, "run", never)
    first_calls, slow = harness.FirstCalls(Settings(first_call_limit=7.0)), providers.PROVIDERS["torchrl"]
    wide, wider = Case("gru", 64, 128, 256), Case("lstm", 1, 128, 512)
    assert first_calls.problem(slow, wide) == ("unfinished", "first call unfinished after 7 s")
    assert first_calls.problem(slow, wider)[0] == "skipped"
    assert first_calls.problem(providers.PROVIDERS["flax"], wide) is None
    assert calls == [wide]


def test_ppo_has_a_row_for_each_number_of_devices(monkeypatch):
    """Trains on one device, and on two if there are two. The last row needs one more than there are, and says so."""
    here = len(jax.devices())
    splits = [cases.Split(8, 1), *([cases.Split(16, 2)] if here > 1 else []), cases.Split(8 * (here + 1), here + 1)]
    assert str(cases.Split(1024, 1)) == "PPO, 1024 envs on 1 GPU" and str(splits[-1]).endswith(f" on {here + 1} GPUs")
    monkeypatch.setitem(suites.PPO_IMPLEMENTATIONS, "jaxrnn", "none")
    monkeypatch.setattr(cases, "PPO_SPLITS", splits)
    monkeypatch.setattr(cases, "PPO_STEPS_AN_ENV", 512)
    settings = Settings(only=("jaxrnn",), rows=(" GPU",))
    *rows, missing = suites.ppo(settings, lambda _: None)
    assert [(row.envs, row.gpus) for row in [*rows, missing]] == splits
    assert [row.case for row in [*rows, missing]] == [str(split) for split in splits]
    for row in rows:
        assert row.status == "measured" and row.value > 0 and row.unit == "steps/s" and row.provider == "jaxrnn"
        assert (row.trained, row.steps, row.returned_low) == (1, 512 * row.envs, None) and 0 < row.returned <= 1
    for row in rows[1:]:
        assert row.note == f"{row.value / rows[0].value:.2f}x 1 GPU"
    assert missing.status == "unavailable" and missing.value is None and not report.broken(missing)
    assert missing.reason == f"needs {here + 1} GPUs, {here} here"
    assert f"unavailable: {missing.reason}" in printed(Report("ppo", MACHINE, {}, [*rows, missing]))


@pytest.fixture
def small_agents(monkeypatch):
    """Makes the suite train two agents for a few updates, with a dense layer as every recurrence."""
    example, training = suites.load_example()
    config = functools.partial(example.Config, unroll=1, hidden=8, epochs=1, minibatches=1)
    config.rollout_steps = example.Config.rollout_steps
    monkeypatch.setattr(
        suites, "load_example", lambda: (argparse.Namespace(Config=config, make_ppo=example.make_ppo), training)
    )
    for name in suites.PPO_IMPLEMENTATIONS:
        monkeypatch.setitem(suites.PPO_IMPLEMENTATIONS, name, "none")
    monkeypatch.setattr(cases, "PPO_AGENTS", {cases.Agents(8): 4.0, cases.Agents(8, 2): 5.0})
    for name, value in {"SPLITS": (), "SEEDS": 2, "UPDATES": 4, "UPDATES_A_CALL": 2}.items():
        monkeypatch.setattr(cases, f"PPO_{name}", value)
    return training, config, example.make_ppo


def test_ppo_has_a_row_for_each_recurrence_with_its_return_and_its_share(small_agents):
    training, config, make_ppo = small_agents
    settings = Settings(seconds=0.01, rounds=2, skip=("jaxrnn-xla",))
    rows = list(suites.ppo(settings, lambda _: None))
    names = ("flax", "jaxrnn", "no recurrence")
    assert [(row.case, row.provider) for row in rows] == [
        (case, name) for case in ("PPO, 8 envs", "PPO, 2 seeds of 8 envs") for name in names
    ]
    steps = 4 * 8 * config.rollout_steps
    want = training.train(make_ppo, config(implementation="none", num_envs=8, num_seeds=2, total_steps=steps))
    low, high = training.interval(want.final_return)
    for row in rows:
        assert (row.status, row.unit, row.task, row.envs) == ("measured", "steps/s", "StatelessCartPole", 8)
        assert row.low <= row.value <= row.high and row.calls >= 2 and row.gpus == 1
        assert (row.trained, row.steps) == (2, steps)
        np.testing.assert_allclose(
            [row.returned, row.returned_low, row.returned_high], [want.final_return.mean(), low, high], rtol=1e-5
        )
        none = next(other for other in rows if other.case == row.case and other.provider == "no recurrence")
        assert row.share == row.value / none.value
    assert [row.seeds for row in rows] == [1] * 3 + [2] * 3
    assert [row.target for row in rows] == [None, 4.0, None, None, 5.0, None]


def test_a_recurrence_that_fails_is_a_row_beside_the_others(small_agents, monkeypatch):
    monkeypatch.setitem(suites.PPO_IMPLEMENTATIONS, "jaxrnn", "auto")
    monkeypatch.setattr(suites._bridge, "unsupported", lambda *_: "is out of order")
    settings = Settings(seconds=0.01, rounds=2, only=("jaxrnn", "flax"), rows=("PPO, 8",))
    flax, ours = suites.ppo(settings, lambda _: None)
    assert flax.status == "measured" and flax.share is None
    assert ours.status == "failed" and report.broken(ours) and ours.share is None and ours.returned is None
    assert ours.reason == "NotImplementedError: the Triton implementation is out of order"


def row_of_agents(seeds, *updates):
    """Returns the row of two agents, given for each update the episodes that each has ended, and their total return."""
    _, training = suites.load_example()
    outputs = [
        types.SimpleNamespace(episodes=np.array(episodes)[:, None], total_return=np.array(total)[:, None])
        for episodes, total in updates
    ]
    config = types.SimpleNamespace(num_envs=8, rollout_steps=2)
    calls = training.Calls(None, outputs, [1.0, 2.0, 4.0][: len(outputs)], 0.0, True)
    row, spread = AgentRow("PPO", "jaxrnn", seeds=seeds), timing.Spread.of([0.5], 3)
    return suites.agent_row(row, spread, 32, "", training, training.Result(config, "task", calls))


def test_a_row_has_the_curve_of_agents_that_train_at_once():
    one, both = (row_of_agents(n, ((4, 4), (0, 4)), ((4, 4), (2, 4)), ((4, 4), (4, 4))) for n in (1, 2))
    assert one.curve is None and (one.value, one.returned, one.trained) == (64.0, 1.0, 2)
    assert both.curve == {
        "steps": [16, 32, 48], "seconds": [1, 2, 4], "mean": [0.5, 0.75, 1.0], "low": [0, 0.5, 1.0], "high": [1, 1, 1]
    }  # fmt: skip


@pytest.mark.parametrize(("ended", "returned", "means"), [(2, 0.5, [None, 0.5]), (0, None, [None, None])])
def test_a_row_has_the_returns_of_the_agents_that_ended_an_episode_or_none(ended, returned, means, tmp_path):
    row = row_of_agents(2, ((0, 0), (0, 1)), ((0, ended), (0, 1)))
    assert (row.returned, row.returned_low, row.returned_high) == (returned,) * 3
    assert row.curve["mean"] == row.curve["low"] == row.curve["high"] == means
    assert "NaN" not in Report("ppo", MACHINE, {}, [row]).save(tmp_path).read_text()
    shown = [line.get_ydata() for line in plot.learning(Report.load(tmp_path / "ppo.json")).axes[0].lines]
    np.testing.assert_array_equal(shown, [np.array(means, float)])
    plot.draw(tmp_path)


def test_ppo_fails_where_a_scan_would_replace_the_kernels(monkeypatch):
    monkeypatch.setattr(suites._bridge, "unsupported", lambda *_: None)
    monkeypatch.setattr(suites._bridge, "is_preferred", lambda steps: False)
    monkeypatch.setattr(cases, "PPO_SPLITS", (cases.Split(8, 1),))
    monkeypatch.setattr(cases, "PPO_STEPS_AN_ENV", 512)
    (row,) = suites.ppo(Settings(rows=("on 1 GPU",)), lambda _: None)
    assert row.status == "failed" and report.broken(row)
    assert row.reason.startswith("NotImplementedError: the Triton implementation is not what implementation=None")


def test_add_keeps_existing_rows_of_the_same_commit(monkeypatch, tmp_path):
    """Rows of another commit are dropped, because they no longer hold."""
    new = [AgentRow("PPO, 16 seeds of 64 envs", name, unit="steps/s", value=16_000.0) for name in ("flax", "jaxrnn")]
    monkeypatch.setitem(suites.SUITES, "ppo", lambda settings, progress: iter(new))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "TRITON_CACHE_AUTOTUNING"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    arguments = ["ppo", "--out", str(tmp_path), "--commit"]
    kept = [
        AgentRow("PPO, 64 envs", "jaxrnn", unit="steps/s", value=1.0),
        AgentRow("PPO, 16 seeds of 64 envs", "flax", value=2.0),
    ]
    Report("ppo", machine.describe("abc"), {}, kept).save(tmp_path)
    assert command.main([*arguments, "abc", "--rows", "seeds", "--add"]) == 0
    assert Report.load(tmp_path / "ppo.json").rows == [kept[0], *new]
    assert command.main([*arguments, "abd", "--rows", "seeds", "--add"]) == 0
    assert Report.load(tmp_path / "ppo.json").rows == new


def test_clocks_are_interleaved():
    order = []

    def clock(name, seconds):
        return timing.Clock(lambda calls: order.append(name) or calls * seconds, lambda: 2 * seconds, "pretended")

    spreads = timing.interleave({"a": clock("a", 0.25), "b": clock("b", 0.5)}, rounds=3, seconds=3.0)
    assert [order[i] for i in range(4, len(order), 2)] == ["a", "b"] * 3
    assert spreads["a"][0] == timing.Spread(0.25, 0.25, 0.25, 12) and spreads["b"][1].median == 1.0
    assert timing.Spread.of([1.0, 2.0, 3.0, 4.0, 5.0], 5) == timing.Spread(3.0, 2.0, 4.0, 5)


@pytest.mark.parametrize("fails_at", [1, 4], ids=["first_call", "second_round"])
def test_a_clock_that_raises_fails_alone(fails_at):
    made = {"good": 0, "bad": 0}

    def clock(name):
        def single():
            made[name] += 1
            return 1.0

        def batch(calls):
            made[name] += 1
            if name == "bad" and made[name] >= fails_at:
                raise MemoryError("out of memory")
            return float(calls)

        return timing.Clock(batch, single, "pretended")

    rows = {name: Row("case", name) for name in made}
    harness.time_rows(
        rows, {name: clock(name) for name in made}, Settings(rounds=2, seconds=2.0), lambda _: None, scale=1.0
    )
    assert (rows["good"].value, rows["good"].status) == (1.0, "measured")
    assert (rows["bad"].status, rows["bad"].reason) == ("failed", "MemoryError: out of memory")
    assert made["bad"] == fails_at


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_episodes_cover_every_step_once(rate):
    resets = np.random.default_rng(0).random((11, 4)) < rate
    sequence, start, length, first = providers.episodes(resets)
    covered = sorted((b, t) for b, s, n in zip(sequence, start, length, strict=True) for t in range(s, s + n))
    assert covered == [(b, t) for b in range(4) for t in range(11)]
    assert (np.diff(length) <= 0).all()
    for b, s, goes_on in zip(sequence, start, first, strict=True):
        assert goes_on == (s == 0 and not resets[0, b]) and (s == 0 or resets[s, b])


def rows_of(case, **values):
    return [
        Row(str(case), name, ours=providers.PROVIDERS[name].ours, value=x, low=x, high=x) for name, x in values.items()
    ]


def headline():
    rows = []
    for k, case in enumerate(cases.HEADLINE):
        rows += rows_of(case, jaxrnn=1.0 + k, flax=8.0 + 8 * k)
        rows += rows_of(case, **{"jaxrnn-bf16": 0.5, "torch-cudnn-bf16": 2.0})
        rows.append(Row(str(case), "torchrl", "unavailable", "torchrl not installed"))
    rows[0] = dataclasses.replace(rows[0], target=2.0, error=1e-4, error_of="dw_hh")
    return Report("headline", MACHINE, {"seconds": 0.3}, rows)


def printed(result):
    console = report.Console(width=200, record=True, file=io.StringIO())
    console.print(report.table(result))
    return console.export_text()


def test_table_has_ratios_targets_and_reasons():
    lines = printed(headline()).split("\n")
    ours, flax, cudnn, torchrl = (
        next(line for line in lines if f" {name} " in line)
        for name in ("jaxrnn", "flax", "torch-cudnn-bf16", "torchrl")
    )
    assert "2.00 met" in ours and "1.0e-04 dw_hh" in ours
    assert "8.00x" in flax and "4.00x" in cudnn  # torch-cudnn-bf16 is compared with jaxrnn-bf16
    assert "unavailable: torchrl not installed" in torchrl
    assert machine.line(MACHINE) == "NVIDIA H200, driver 580.1, jax 0.11.2, commit abc"
    assert any(machine.line(MACHINE) in line for line in lines)


@pytest.mark.parametrize("unit", ["steps/s", "of copy"])
def test_larger_figures_are_better(unit):
    rows = [Row("case", "jaxrnn", unit=unit, value=500.0, target=400.0), Row("case", "flax", unit=unit, value=100.0)]
    assert report.advantage(rows[1], rows) == 5.0
    assert report.met(rows[0]) and report.met(rows[1]) is None


@pytest.mark.interpret
def test_accuracy_has_a_row_for_every_array_and_says_what_failed(monkeypatch):
    monkeypatch.setattr(cases, "ACCURACY", TINY)
    monkeypatch.setattr(suites, "ACCURACY_AT_ONCE", 1)
    monkeypatch.setattr(suites, "PRECISIONS", {"default": ("f32", "default", 2.0**-24), "none": ("f32", "no", 1.0)})
    rows = list(suites.accuracy(Settings(), lambda _: None))
    arrays = {case.cell: ["ys", "dxs", *(f"d{name}" for name in case.weights)] for case in TINY}
    for case in TINY:
        *found, failed = [row for row in rows if row.case == str(case)]
        assert sorted(row.array for row in found) == sorted(arrays[case.cell])
        assert all(row.rms <= 2 * row.xla_rms + row.allowance and 0 < row.max < 1e-5 for row in found)
        assert failed.precision == "none" and failed.array == "all" and "precision" in failed.reason


def test_accuracy_table_flags_errors_above_twice_those_of_xla():
    rows = [
        AccuracyRow("GRU", "default", "ys", rms=1.9e-4, xla_rms=1e-4, max=1e-3, xla_max=1e-3),
        AccuracyRow("GRU", "default", "dxs", rms=2.1e-4, xla_rms=1e-4, max=1e-3, xla_max=1e-3),
        AccuracyRow("GRU", "default", "db_hn", rms=2.1e-4, xla_rms=1e-4, max=1e-3, xla_max=1e-3, allowance=2e-5),
        AccuracyRow("GRU", "default", "dw_hh", rms=float("nan"), xla_rms=1e-4, max=1e-3, xla_max=1e-3),
        AccuracyRow("GRU", "high", "all", reason="RuntimeError: no"),
    ]
    assert [row.good for row in rows] == [True, False, True, False, False]
    assert [report.broken(row) for row in rows] == [False, True, False, True, True]
    text = printed(Report("accuracy", MACHINE, {}, rows))
    assert text.count("OVER 2x") == 2 and text.count("within 2x") == 2 and "RuntimeError: no" in text


def test_results_are_the_same_after_saving_and_loading_and_have_a_line_for_each_row(tmp_path):
    accuracy = Report("accuracy", MACHINE, {}, [AccuracyRow("GRU", "high", "ys", 1e-7, 1e-7, 1e-7, 1e-7)])
    for result in (headline(), accuracy):
        path = result.save(tmp_path)
        assert Report.load(path) == result
        assert sum('"case"' in line for line in path.read_text().splitlines()) == len(result.rows)


def test_targets_are_those_of_now():
    old = Row("GRU 64,128,128", "jaxrnn", value=0.25, target=0.35)
    now = cases.HEADLINE[Case("gru", 64, 128, 128)].tf32
    assert report.target_of(old) == now < 0.25 and report.met(old) is False
    assert report.target_of(dataclasses.replace(old, target=None)) is None
    assert report.target_of(dataclasses.replace(old, provider="jaxrnn-default")) == 0.35


def test_caption_lists_the_cases_of_another_commit():
    rows = [
        dataclasses.replace(row, note="without resets; at 1234567" if "LSTM" in row.case else "it was at 7654321 once")
        for row in headline().rows
    ]
    result = Report("headline", MACHINE, {}, rows)
    lstms = [str(case) for case in cases.HEADLINE if "LSTM" in str(case)]
    assert result.commits()["1234567"] == lstms and set(result.commits()) == {"abc", "1234567"}
    assert report.measured_on(result).endswith(f"commit 1234567 ({'; '.join(lstms)}) and abc (all others)")
    assert report.versions(result) == "NVIDIA H200, driver 580.1, jax 0.11.2"


def scripts():
    speeds = {"jaxrnn": 30.0, "flax": 10.0, "no recurrence": 40.0}
    return Report(
        "scripts", MACHINE, {}, [Row(case, name, value=x) for case in plot.SCRIPTS for name, x in speeds.items()]
    )


def test_figures_are_drawn_for_light_and_dark_pages(tmp_path):
    headline().save(tmp_path)
    rows = [row for case in cases.SMALL for row in rows_of(case, jaxrnn=1.0, flax=3.0)]
    Report("small", MACHINE, {}, rows).save(tmp_path)
    names = ["headline-light.svg", "headline-dark.svg", "small-light.svg", "small-dark.svg"]
    assert [image.name for image in plot.draw(tmp_path)] == names
    scripts().save(tmp_path)
    images = plot.draw(tmp_path)
    assert [image.name for image in images] == ["speedup-light.svg", "speedup-dark.svg", *names]
    for image in images:
        text = image.read_text()
        assert ("fill: #ffffff" in text, "fill: #0d1117" in text) == ("light" in image.name, "dark" in image.name)
        assert "abc" not in text  # no commit in a figure for users
    before = [image.read_bytes() for image in images]
    assert [image.read_bytes() for image in plot.draw(tmp_path)] == before


def test_bars_have_the_ratio_to_flax_and_the_limit():
    above, below = plot.speedup(scripts(), headline()).axes
    assert [text.get_text() for text in above.texts] == ["3.0x of 4.0x"] * len(plot.SCRIPTS)
    assert [text.get_text() for text in below.texts] == ["8.0x"] * len(plot.ALONE)


def test_learning_curves_are_drawn_over_steps_and_over_seconds(tmp_path):
    curve = {"steps": [10.0, 20.0], "seconds": [1.0, 2.0], "mean": [0.1, 0.9], "low": [0.0, 0.8], "high": [0.2, 1.0]}
    rows = [
        AgentRow("PPO, 16 seeds", "flax", value=1e6, trained=16, curve=curve),
        AgentRow("PPO, 16 seeds", "jaxrnn", value=1e7, trained=16, curve=curve | {"seconds": [0.1, 0.2]}),
        AgentRow("PPO, 64 envs", "jaxrnn", value=1e6),
    ]
    result = Report("ppo", MACHINE, {}, rows)
    result.save(tmp_path)
    assert [image.name for image in plot.draw(tmp_path)] == ["learning-light.svg", "learning-dark.svg"]
    panels = plot.learning(Report.load(tmp_path / "ppo.json")).axes
    lines = [[(line.get_label(), [*line.get_xdata()]) for line in axes.lines] for axes in panels]
    labels = "jaxrnn: 10.0 M steps/s", "Flax: 1.00 M steps/s"
    assert lines[0] == [(label, [10.0, 20.0]) for label in labels]
    assert lines[1] == [*zip(labels, ([0.1, 0.2], [1.0, 2.0]), strict=True)]
    Report("ppo", MACHINE, {}, rows[2:]).save(tmp_path)
    assert plot.draw(tmp_path) == []  # no row has a curve


def test_dots_have_the_ratio_to_ours_and_gaps_have_a_reason():
    absent, slow = (str(case) for case in list(cases.HEADLINE)[1:3])
    rows = [row for row in headline().rows if (row.case, row.provider) not in ((absent, "flax"), (slow, "flax"))]
    rows.append(Row(slow, "flax", "unfinished", "first call unfinished after 25 s"))
    (axes,) = plot.headline(Report("headline", MACHINE, {}, rows)).axes
    ours, flax = (dots.get_offsets() for dots in axes.collections)
    assert [x for x, _ in ours] == [1.0] * len(cases.HEADLINE) and [x for x, _ in flax] == [8.0] * (
        len(cases.HEADLINE) - 2
    )
    gaps = [text.get_text() for text in axes.texts]
    assert gaps[1:3] == ["Flax ScannedRNN: not measured", "Flax ScannedRNN: first call unfinished"]
    assert not any(gaps[:1] + gaps[3:])


@pytest.mark.parametrize(("suite", "chosen"), [("headline", cases.HEADLINE), ("episodes", cases.EPISODES)])
def test_figures_show_our_default_if_nothing_else_of_ours_was_measured(suite, chosen, tmp_path):
    def drawn(ours):
        rows = [row for case in chosen for row in rows_of(case, **{ours: 2.0, "flax": 8.0})]
        Report(suite, MACHINE, {}, rows).save(tmp_path)
        return {path.name: path.read_bytes() for path in plot.draw(tmp_path)}

    images = drawn("jaxrnn")
    assert [*images] == [f"{suite}-light.svg", f"{suite}-dark.svg"]
    assert drawn("jaxrnn-default") == images


def test_lines_have_a_marker_each_and_stop_where_a_figure_is_missing():
    rows = [row for case in cases.SMALL for row in rows_of(case, jaxrnn=1.0, flax=3.0) if case.B != 8 or case.T != 128]
    (axes,) = plot.small(Report("small", MACHINE, {}, rows)).axes
    assert len({line.get_marker() for line in axes.lines}) == len(axes.lines) == 2
    for line in axes.lines:
        assert [int(x) for x in line.get_xdata()] == [1, 2, 4, 8, 16, 32, 64]
        assert [int(x) for x, y in zip(*line.get_data(), strict=True) if np.isnan(y)] == [8]
    rows = [row for case in cases.EPISODES if case.reset_rate != 0.1 for row in rows_of(case, jaxrnn=1.0, flax=3.0)]
    (axes,) = plot.episodes(Report("episodes", MACHINE, {}, rows)).axes
    for line in axes.lines:
        assert [(x, np.isnan(y)) for x, y in zip(*line.get_data(), strict=True)] == [(0, False), (1, False), (10, True)]
    for styles in (plot.STYLES, plot.NORM_STYLES):
        assert len({marker for _, marker, *_ in styles.values()}) == len(styles)


@pytest.mark.parametrize(
    ("x", "text"), [(0.0012345, "0.00123"), (0.35, "0.350"), (9.16, "9.16"), (37.1, "37.1"), (490_000, "490,000")]
)
def test_numbers_have_three_significant_digits(x, text):
    assert report.number(x) == text


def test_command_line_is_parsed():
    """Options may be anywhere, and lists of them in one option or several."""
    options = command.parse_arguments(
        ["small", "--only", "jaxrnn,flax", "--rows", "GRU 8,", "acting", "--only", "jaxrnn-triton", "--seconds", "0.1"]
    )
    assert options.view is None and options.commit is None and options.suites == ["small", "acting"]
    assert options.settings == Settings(seconds=0.1, only=("jaxrnn", "flax", "jaxrnn-triton"), rows=("GRU 8,",))
    assert options.settings.wants("flax") and not options.settings.wants("torchrl")
    assert options.settings.wants_case("GRU 8,1024,256") and not options.settings.wants_case("GRU 64,128,128")
    options = command.parse_arguments([])
    assert options.suites == command.SUITES and options.settings == Settings()
    for arguments in (["show", "--out", "x", "headline"], ["--out", "x", "show", "headline"]):
        options = command.parse_arguments(arguments)
        assert (options.view, options.suites, options.out) == ("show", ["headline"], Path("x"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("no-such-suite", "no suite no-such-suite; there are headline"),
        ("plot small", "plot takes no suites"),
        ("--only flax show --add", "show does not take --only, --add; the options that it takes: --out, --as"),
        ("pages --out x", "pages does not take --out; the options that it takes: none"),
        ("--rounds 0", "rounds must be at least 1, got 0"),
        ("--seconds -1", "seconds must be above 0 and finite, got -1.0"),
        ("--first-call-limit nan", "first_call_limit must be above 0 and finite, got nan"),
        ("norm --skip flax,nope", "no provider nope; there are jaxrnn"),
    ],
)
def test_invalid_command_line_exits_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        command.parse_arguments(arguments.split())
    assert error.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.torch] * (name == "tilings")) for name in command.SUITES if name != "ppo"],
)
def test_rows_option_applies_to_every_suite(name):
    """Suites prepare nothing for cases that `--rows` excludes."""
    assert list(suites.SUITES[name](Settings(rows=("no such case",)), None)) == []


def test_missing_results_exit_with_a_message(tmp_path):
    for what in (["show", "small"], ["plot"]):
        with pytest.raises(SystemExit, match=r"no results of .*: measure first"):
            command.main([*what, "--out", str(tmp_path)])
    headline().save(tmp_path)
    assert command.main(["plot", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"suite": "headline", "rows": [1]}', "\xff"])
def test_damaged_results_exit_with_their_path(text, tmp_path):
    path = tmp_path / "headline.json"
    path.write_text(text, encoding="latin-1")
    for what in ("show", "plot"):
        with pytest.raises(SystemExit, match=f"^{re.escape(str(path))} does not hold a suite's results"):
            command.main([what, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=re.escape(str(path))):
        headline().others(tmp_path)


def run_command(*arguments, **options):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    line = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(line, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, **options)


def test_closed_output_pipe_exits_without_a_traceback(tmp_path):
    headline().save(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    result = run_command("show", "--out", tmp_path, stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_measuring_without_a_gpu_exits_with_a_message():
    result = run_command("norm")
    assert result.returncode == 1 and "an NVIDIA GPU" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer JAX warns about Pallas's use of Triton
def test_launch_in_a_scan_is_timed_on_the_gpu():
    rows = list(suites.dispatch(Settings(seconds=0.1, rounds=20), lambda _: None))
    assert [row for row in rows if row.status != "measured"] == []
    *captured, launch = [row for row in rows if row.case == rows[0].case]
    us = {row.provider: row.value for row in captured}
    ours, native, longer = (f"and {name}" for name in (scans.OURS, scans.NATIVE, scans.TWO_STEPS))
    assert us.keys() == scans.dispatch().keys() and us[scans.FIVE] < us[ours] < us[longer]
    assert launch.value == us[ours] - us[native]
    alone = {row.provider: row.value for row in rows if row.case.endswith("not captured")}
    # what a launch adds to a captured iteration against what it takes alone: other programs on the GPU slow down the
    # kernels of an iteration, but not the host, which is what bounds a launch that is not captured
    assert alone.keys() == scans.dispatch_alone().keys() and us[ours] - us[scans.FIVE] < alone[scans.OURS]
    on_two = {row.provider: row.value for row in rows if row.case.endswith("on 2 GPUs")}
    if jax.device_count() > 1:
        assert on_two.keys() == scans.dispatch_on_two_devices().keys()
        assert on_two[scans.OURS] < on_two[scans.SUM_OURS]
    else:
        assert on_two == {}


@pytest.mark.interpret
def test_two_devices_run_launches_and_add_up_what_they_wrote(monkeypatch):
    monkeypatch.setattr(scans, "DISPATCH_ITERATIONS", 2)
    programs = scans.dispatch_on_two_devices()
    program, (h,) = programs[scans.SUM_OURS]
    start = np.asarray(h)
    want = np.broadcast_to(0.99**2 * start.mean(0), h.shape)
    np.testing.assert_allclose(jax.jit(program)(h), want, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(jax.jit(programs[scans.OURS][0])(h), 0.99**2 * start, rtol=1e-6)


# Norms.


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_norms_are_checked_and_timed(kind, direction, dtype):
    case = cases.NormCase(kind, direction, dtype, 40, 24)
    settings = Settings(rounds=2, skip=("torch-compile", "jaxrnn"))
    rows = list(norms.norm(settings, lambda _: None, [case]))
    assert [row.provider for row in rows] == ["torch_bridge", "torch", "xla", "copy"]
    for row in rows:
        assert row.status == "measured", row.reason
        assert row.unit == "of copy" and row.calls == 8 and row.us > 0 and row.case == str(case)
        assert 0 < row.low <= row.value <= row.high
    assert rows[-1].value == 1 and rows[-1].error is None
    assert all(row.error < (1e-5 if dtype == "f32" else 1e-2) for row in rows[:-1])


@pytest.mark.torch
def test_wrong_or_failed_norm_is_a_row():
    import torch

    case = cases.NormCase("layer", "bwd", "f32", 40, 24)

    def wrong(case, inputs):
        eager = norms.build_eager(case, inputs)
        return dataclasses.replace(eager, run=lambda: [x * 1.01 if i == 2 else x for i, x in enumerate(eager.run())])

    def broken(case, inputs):
        raise RuntimeError("out of order\nsecond line")

    def not_a_number(case, inputs):
        eager = norms.build_eager(case, inputs)
        return dataclasses.replace(eager, run=lambda: [torch.full_like(x, torch.nan) for x in eager.run()])

    def does_not_compile():
        raise RuntimeError("does not compile")

    _, _, _, eager, xla, copy = norms.ALL
    builds = {"torch_bridge": wrong, "broken": broken, "nan": not_a_number}
    chosen = [*itertools.starmap(providers.Provider, builds.items()), xla, copy]
    arrays, settings = norms.make_arrays(case, "cpu"), Settings(rounds=1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        inputs = norms.Inputs(arrays, timing.HostStopwatch(), {("xla", case): pool.submit(does_not_compile)})
    rows = norms.time_case(case, chosen, inputs, norms.Truth(case, arrays), settings)
    assert [row.status for row in rows] == ["wrong", "failed", "wrong", "failed", "measured"]
    assert rows[0].error_of == "dbias" and "dbias is off by 0.01" in rows[0].reason and report.broken(rows[0])
    assert rows[3].reason == "RuntimeError: does not compile"
    alone = norms.time_case(case, [eager], inputs, norms.Truth(case, arrays), settings)
    assert alone[0].status == "failed" and "no copy to compare with" in alone[0].reason


@pytest.mark.torch
def test_share_of_a_copy_is_compared_with_its_target_and_drawn(tmp_path):
    rows = []
    for case in cases.NORMS:
        for name, value, target in (("torch_bridge", 0.9, case.target), ("torch", 0.3, None)):
            row = Row(str(case), name, ours="torch_bridge", unit="of copy", value=value, low=value, high=value)
            rows.append(dataclasses.replace(row, target=target, note="9 us"))
    result = Report("norm", MACHINE, {}, rows)
    result.save(tmp_path)
    assert all(text in printed(result) for text in ("0.920 missed", "0.850 met", "3.00x"))
    assert [image.name for image in plot.draw(tmp_path)] == ["norm-light.svg", "norm-dark.svg"]


@pytest.mark.compile_only
def test_kernels_of_the_norm_suite_compile():
    from torch_bridge.norms import Launch
    from torch_bridge.tiling import Device

    for kind in ("rms", "layer"):
        problems = norms.problems(cases.NormCase(kind, "bwd", "bf16", 8192, 512))
        assert [problem.direction for problem in problems] == ["fwd", "bwd"]
        assert all(Launch(problem, Device()).compile() for problem in problems)


class FailingLaunch:
    """A launch whose kernel does not compile, or which cannot be made."""

    def __init__(self, problem):
        if problem == "wrong arguments":
            raise TypeError(problem)

    def compile(self):
        raise RuntimeError("the kernel does not compile")


@pytest.mark.torch
def test_kernels_that_do_not_compile_beforehand_are_no_error_and_wrong_arguments_are():
    norms.precompile.compile_kernels(FailingLaunch, [("right",), ("arguments",)])
    with pytest.raises(TypeError, match="wrong arguments"):
        norms.precompile.compile_kernels(FailingLaunch, [("right",), ("wrong arguments",)])


@pytest.mark.parametrize("profile", ["a100", "h200", "rtx5090"])
def test_every_tiling_of_a_launch_has_a_name_of_its_own(profile):
    device, found = tiling.PROFILES[profile], list(tilings.problems())
    labels = [tilings.label(problem) for problem in found]
    assert len(set(labels)) == len(labels) > 100
    for problem in found:
        chosen = tilings.candidates(problem, device)
        assert chosen[0] == tiling.heuristic(problem, device)
        assert len({tilings.name_of(config) for config in chosen}) == len(chosen)


@pytest.mark.gpu
def test_tilings_are_timed_beside_the_chosen_one():
    settings = Settings(rows=("GRU 8,128,256 fwd float32",), rounds=2, seconds=0.05)
    rows = list(tilings.tilings(settings, lambda _: None))
    assert {row.status for row in rows} == {"measured"} and {row.unit for row in rows} == {"us"}
    cases = [list(case) for _, case in itertools.groupby(rows, lambda row: row.case)]
    assert len({case[0].case for case in cases}) == len(cases) == len(tiling.RESET_STATES)
    for case in cases:
        assert [row.note for row in case] == ["chosen"] + [""] * (len(case) - 1)
        assert all(row.ours == case[0].provider and row.value > 0 for row in case)


@pytest.mark.parametrize(
    "place",
    [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("cuda:0", marks=pytest.mark.several_gpus)],
)
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_programs_of_the_norm_suite_accept_arrays_of_pytorch(direction, place):
    """There are several devices, and the arrays are on one of them."""
    import torch

    case, stopwatch = cases.NormCase("rms", direction, "f32", 6, 5), timing.HostStopwatch()
    shapes = {"x": (6, 5), "dy": (6, 5)} | dict.fromkeys(case.parameters, (5,))
    arrays = {name: torch.ones(shape, device=place) for name, shape in shapes.items()}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        lower = functools.partial(norms.lower_program, "xla", case, stopwatch)
        inputs = norms.Inputs(arrays, stopwatch, {("xla", case): harness.compile_in(pool, lower)})
    assert len(jax.devices()) > 1
    results = norms.jax_call("xla", case, inputs).run()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(results))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Inductor warns on its first import
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # Inductor recommends them
def test_norms_on_the_gpu_are_checked_and_timed():
    settings = Settings(rounds=2)
    for kind, direction in (("rms", "fwd"), ("layer", "bwd")):
        for shape in ((4096, 2048), cases.RECURRENT_NORMS[2]):
            begin = time.perf_counter()
            rows = list(norms.norm(settings, lambda _: None, [cases.NormCase(kind, direction, "bf16", *shape)]))
            most = (time.perf_counter() - begin) * 1e6
            assert [row.provider for row in rows] == [provider.name for provider in norms.ALL]
            for row in rows:
                assert row.status == "measured", row.reason
                # half of the calls took the median or longer
                assert row.us > 1 and row.us * row.calls < 2 * most
