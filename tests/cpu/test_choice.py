"""Tests the suite that compares the default with the better implementation, and running as another GPU."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import cubins
import jax
import jax.numpy as jnp
import pytest

from benchmarks import __main__ as command
from benchmarks import cases, choice, machine, report
from benchmarks.cases import ChoiceCase
from benchmarks.results import Report, Row
from benchmarks.settings import Settings

ROOT = Path(__file__).parents[2]


def test_short_passes_are_timed_many_to_a_program():
    assert choice.passes(ChoiceCase("gru", 1, 1024, 512)) == 1
    assert choice.passes(ChoiceCase("gru", 64, 1, 128, gradients=False)) == choice.MOST_PASSES
    assert 2 < choice.passes(ChoiceCase("gru", 64, 128, 128)) < 16


@pytest.fixture
def measured(monkeypatch):
    """Returns a function that measures one small problem, in which "triton" is a slower or wrong copy of "xla"."""

    def measure(problem, *, default="xla", wrong=0.0):
        def run(problem, implementation, arrays):
            results = original(problem, "xla", arrays)
            if (implementation or default) == "triton":
                results = {name: x + wrong + jnp.sum(x) * 0 for name, x in results.items()}
            return results

        original = choice.run
        monkeypatch.setattr(choice, "run", run)
        monkeypatch.setattr(cases, "CHOICE", (problem,))
        monkeypatch.setattr(choice, "MOST_PASSES", 2)
        return {row.provider: row for row in choice.choice(Settings(seconds=0.01, rounds=1), lambda _: None)}

    return measure


@pytest.mark.parametrize("default", ["xla", "triton"])
def test_default_gets_the_time_of_the_implementation_that_it_runs(measured, default):
    rows = measured(ChoiceCase("gru", 4, 5, 8, models=2), default=default)
    assert list(rows) == ["default", "triton", "xla"]
    assert rows["default"].note == f"runs {default}"
    assert rows["default"].value == rows[default].value
    assert rows["default"].target == pytest.approx(1.03 * min(rows["triton"].value, rows["xla"].value))


def test_wrong_implementation_is_not_timed(measured):
    rows = measured(ChoiceCase("lstm", 4, 5, 8, gradients=False), wrong=0.5)
    assert rows["triton"].status == "wrong" and rows["triton"].value is None and "from xla's" in rows["triton"].reason
    assert rows["default"].value == rows["xla"].value and report.broken(rows["triton"])


@pytest.mark.parametrize("name", ["triton", pytest.param("xla", marks=pytest.mark.torch)])  # "triton" is measured
def test_a_program_that_does_not_fit_in_memory_has_no_time(name):
    problem = ChoiceCase("gru", 4, 5, 8, gradients=False)

    def run_out():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    (one,) = choice.prepare([problem])
    one = one._replace(programs=dict.fromkeys(choice.IMPLEMENTATIONS, one.programs["xla"]) | {name: run_out}, same=None)
    rows = {row.provider: row for row in choice.measure(one, Settings(seconds=0.01, rounds=1), lambda _: None)}
    (other,) = {*choice.IMPLEMENTATIONS} - {name}
    assert rows[name].status == "failed" and "RESOURCE_EXHAUSTED" in rows[name].reason and rows[name].value is None
    assert rows[other].status == "measured" and rows[other].value > 0


def test_default_that_fails_has_no_time(monkeypatch):
    def run(problem, implementation, arrays):
        if implementation is None:
            raise NotImplementedError("no such kernel")
        return original(problem, "xla", arrays)

    original = choice.run
    monkeypatch.setattr(choice, "run", run)
    monkeypatch.setattr(cases, "CHOICE", (ChoiceCase("gru", 4, 5, 8, gradients=False),))
    monkeypatch.setattr(choice, "MOST_PASSES", 2)
    rows = {row.provider: row for row in choice.choice(Settings(seconds=0.01, rounds=1), lambda _: None)}
    default = rows["default"]
    assert (default.status, default.value, default.note) == ("failed", None, "")
    assert "no such kernel" in default.reason and report.broken(default)
    assert rows["triton"].value > 0 and not report.broken(rows["triton"])


def test_problem_with_all_options_runs():
    problem = ChoiceCase("lstm", 3, 40, 8, models=2, dtype="bf16", precision="highest", reset_state="h", episode=5)
    assert str(problem) == "LSTM 3,40,8 x2 bf16 highest reset state episodes of 5"
    arrays = choice.make_arrays(problem)
    assert jnp.array_equal(jnp.sum(arrays["resets"], 1), jnp.full((2, 3), 8))  # one in five steps
    results = choice.one_pass(problem, "xla")(arrays)
    assert {"ys", "dxs", "dw_ih", "dw_hh", "db", "dreset_c", "dreset_h"} == results.keys()
    assert results["dreset_h"].shape == (2, 8) and results["ys"].dtype == jnp.bfloat16


def test_default_slower_than_its_target_is_broken():
    row = Row("GRU 1,2,3", choice.DEFAULT, value=1.04, target=1.03)
    assert report.broken(row) and not report.broken(dataclasses.replace(row, value=1.02))


# Running as another GPU.


def test_results_as_another_gpu_have_their_own_folder_and_machine_line(monkeypatch, tmp_path):
    here = {"gpu": "NVIDIA H200", "as": "a100", "driver": "580.1"}
    assert machine.slug(here) == "as-a100-on-nvidia-h200"
    assert machine.line(here) == "NVIDIA H200, kernels chosen and compiled for NVIDIA A100, driver 580.1"
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    for folder in ("nvidia-h200", "as-a100-on-nvidia-h200", "as-rtx3090-on-nvidia-h200"):
        Report("choice", here, {}, []).save(tmp_path / folder)
    assert command.results_folder(None).name == "nvidia-h200"
    assert command.results_folder(None, "rtx3090").name == "as-rtx3090-on-nvidia-h200"
    with pytest.raises(SystemExit, match="there are: none"):
        command.results_folder(None, "rtx4090")
    for folder in ("nvidia-h100-80gb-hbm3", "as-rtx4090-on-nvidia-a100", "as-rtx4090-on-nvidia-h100"):
        Report("choice", here, {}, []).save(tmp_path / folder)
    assert command.results_folder(None).name == command.REFERENCE == "nvidia-h200"
    with pytest.raises(SystemExit, match="there are: as-rtx4090-on-nvidia-a100, as-rtx4090-on-nvidia-h100"):
        command.results_folder(None, "rtx4090")


def test_command_line_accepts_a_profile():
    assert command.parse_arguments(["headline", "--as", "a100"]).settings.profile == "a100"
    assert command.parse_arguments(["show", "headline", "--as", "a100"]).profile == "a100"
    assert command.parse_arguments(["headline"]).settings.profile == ""
    with pytest.raises(SystemExit):
        command.parse_arguments(["headline", "--as", "a1000"])


@pytest.mark.torch
def test_running_as_a_newer_gpu_raises(monkeypatch):
    from torch_bridge import cuda_driver, gpu, tiling

    monkeypatch.setattr(cuda_driver, "device", lambda ordinal: tiling.PROFILES["a100"])
    with pytest.raises(ValueError, match=r"NVIDIA H200 \(compute capability 9.0\) does not run on NVIDIA A100 \(8.0\)"):
        gpu.run_as(tiling.PROFILES["h200"])


@pytest.mark.compile_only
def test_running_as_another_gpu_assembles_its_ptx_for_the_actual_gpu(monkeypatch, tmp_path):
    import triton

    from benchmarks.problems import make_problem
    from torch_bridge import cuda_driver, gpu, recurrences, tiling

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", None)
    monkeypatch.setattr(gpu, "_profile", None)
    monkeypatch.setattr(cuda_driver, "device", lambda ordinal: tiling.PROFILES["h200"])
    problem = make_problem("gru", "fwd", "tf32", 64, 16)
    gpu.run_as(tiling.PROFILES["rtx3090"])
    device = gpu.device()
    assert (device.capability, device.multiprocessors) == (86, 82)
    assert device.name == "NVIDIA GeForce RTX 3090 on NVIDIA H200"
    (compiled,) = recurrences.Launch(problem, device).compile()
    assert ".target sm_86" in compiled.asm["ptx"]
    assert machine_of(compiled.asm["cubin"]) == 90
    assert Path(triton.knobs.cache.dir).parent == tmp_path
    gpu.run_as(tiling.PROFILES["rtx3090"])  # as a process does that inherited the folder
    assert Path(triton.knobs.cache.dir).parent == tmp_path


def machine_of(cubin):
    """Returns the compute capability that a cubin is for."""
    return int(re.search(r"code for sm_(\d+)", cubins.text_of(cubin, "cuobjdump", "-sass"))[1])


def test_running_as_another_gpu_without_a_gpu_exits_with_a_message():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"}
    for arguments in (["benchmarks", "choice", "--as", "a100"], ["pytest", "--as", "a100", "tests/cpu/test_choice.py"]):
        result = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert result.returncode not in (0, 5) and "an NVIDIA GPU" in result.stderr + result.stdout
        assert "Traceback" not in result.stderr
