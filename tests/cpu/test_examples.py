"""Tests the functions of `examples/packing_and_resets.py` and `examples/many_seeds.py`, and runs both end to end."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_modules import EXAMPLES, load
from rich.console import Console

packing_and_resets, many_seeds = load("packing_and_resets"), load("many_seeds")


# --- packing_and_resets ----------------------------------------------------------------------------------------------


def test_a_table_of_long_times_cuts_no_word():
    cost = packing_and_resets.Cost(1234.5, 45.6, 123.4, programs=20, sequential=100_000, computed=200_000)
    measurement = packing_and_resets.Measurement(256, 100_000, dict.fromkeys(packing_and_resets.METHODS, cost))
    console = Console(width=80)
    with console.capture() as capture:
        console.print(packing_and_resets.table_of(packing_and_resets.Config(), [measurement]))
    assert "1234.50" in capture.get()
    assert "…" not in capture.get()


def test_packing_holds_every_step_once_and_in_order():
    rng = np.random.default_rng(0)
    resets = rng.random((11, 5)) < 0.3
    resets[:, 3], resets[:, 4] = False, True
    packing = packing_and_resets.pack(resets)
    assert packing.length.sum() == resets.size
    begins = resets.copy()
    begins[0] = True
    assert len(packing.env) == begins.sum()
    assert packing.length.max() == len(packing.step) == 11  # the column without resets is one episode
    found = []
    for n, (env, length) in enumerate(zip(packing.env, packing.length, strict=True)):
        steps = packing.step[:length, n]
        np.testing.assert_array_equal(steps, steps[0] + np.arange(length))
        assert begins[steps[0], env] and not resets[steps[1:], env].any()
        assert packing.continues[n] == (steps[0] == 0 and not resets[0, env])
        found += [(step, env) for step in steps]
    assert sorted(found) == [(t, b) for t in range(11) for b in range(5)]
    step = packing.step[packing.offset, packing.episode]
    np.testing.assert_array_equal(step, np.broadcast_to(np.arange(11)[:, None], (11, 5)))
    np.testing.assert_array_equal(packing.env[packing.episode], np.broadcast_to(np.arange(5), (11, 5)))


def test_packing_and_resets_compares_three_ways(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    size = ["--steps", "9", "--envs", "3", "--features", "4", "--hidden", "5", "--rollouts", "6", "--repeats", "2"]
    results = packing_and_resets.main([*size, "--mean-lengths", "2", "30", "--out", str(tmp_path)])
    for result in results:
        pack, scan, ours = (result.costs[name] for name in ("pack", "scan", "jaxrnn"))
        assert result.steps == scan.computed == ours.computed == 9 * 3 <= pack.computed
        assert pack.sequential <= scan.sequential == ours.sequential == 9
        assert 1 <= pack.programs <= 6 and scan.programs == ours.programs == 1
        assert min(cost.milliseconds for cost in result.costs.values()) > 0
        assert pack.host_milliseconds > 0 == scan.host_milliseconds
    assert results[0].costs["pack"].programs > 1, "episodes of mean length 2 must pack to more than one shape"
    printed = capsys.readouterr().out
    for text in ("9 steps of 3 environments, 5 units", "wasted steps", jax.__version__):
        assert text in printed
    assert (tmp_path / "packing_and_resets.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "packing_and_resets.json").read_text())
    assert [entry["mean_length"] for entry in report["measurements"]] == [2, 30]
    assert report["measurements"][0]["pack"] == results[0].costs["pack"]._asdict()


@pytest.mark.interpret
def test_packing_and_resets_runs_the_triton_implementation(tmp_path):
    size = ["--steps", "4", "--envs", "2", "--features", "3", "--hidden", "4", "--rollouts", "1", "--repeats", "1"]
    options = ["--implementation", "triton", "--mean-lengths", "2", "--out", str(tmp_path)]
    assert len(packing_and_resets.main([*size, *options])) == 1


def test_check_raises_for_a_wrong_result():
    config = packing_and_resets.Config()
    want = (np.ones(3), np.arange(4.0))
    packing_and_resets.check(config, "scan", (np.ones(3), np.arange(4.0) + 1e-6), want)
    for wrong in (np.arange(4.0) + 1e-2, np.array([0, 1, 2, np.nan])):
        with pytest.raises(AssertionError, match="scan is off by"):
            packing_and_resets.check(config, "scan", (np.ones(3), wrong), want)


# --- many_seeds ------------------------------------------------------------------------------------------------------


def test_target_is_the_first_symbol_of_the_episode():
    config = many_seeds.Config(steps=40, batch=3, mean_length=5)
    before = many_seeds.Episodes(jnp.array([7, 6, 5]), jnp.array([True, False, False]))
    after, data = jax.jit(lambda key: many_seeds.make_data(config, key, before))(jax.random.key(0))
    symbols, first = np.argmax(data.inputs, axis=-1), np.array([7, 6, 5])
    assert data.inputs.shape == (40, 3, 8) and 1 < data.resets[:, 0].sum() < 40
    np.testing.assert_array_equal(data.resets[0], before.done)
    for t in range(40):
        first = np.where(data.resets[t], symbols[t], first)
        np.testing.assert_array_equal(data.targets[t], first)
    np.testing.assert_array_equal(after.first, first)


def test_many_seeds_learn_what_one_learns(tmp_path, capsys):
    size = ["--symbols", "2", "--steps", "16", "--batch", "16", "--hidden", "16", "--mean-length", "4", "--lr", "1e-2"]
    one, many = many_seeds.main([*size, "--seeds", "3", "--updates", "150", "--out", str(tmp_path)])
    assert (one.losses.shape, many.losses.shape) == ((1, 150), (3, 150))
    np.testing.assert_allclose(many.losses[0, :20], one.losses[0, :20], rtol=1e-3)  # later, rounding makes them diverge
    assert len(set(many.losses[:, 0])) == 3, "every seed must have its own weights and data"
    np.testing.assert_allclose(many.losses[:, 0], np.log(2), atol=0.25)
    assert many.final_loss.max() < 0.3 * np.log(2)
    printed = capsys.readouterr()
    for text in ("RepeatFirst, 2 symbols, GRU-16", "final loss", jax.__version__):
        assert text in printed.out
    assert "3 at once: 100%" in printed.err
    assert (tmp_path / "many_seeds.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "many_seeds.json").read_text())
    assert [run["seeds"] for run in report["runs"]] == [1, 3]
    np.testing.assert_allclose(report["runs"][1]["losses"], many.losses)


def test_many_seeds_cannot_learn_without_resets(monkeypatch):
    """Only the resets tell the network where an episode begins."""
    blind = many_seeds.make_data
    monkeypatch.setattr(
        many_seeds,
        "make_data",
        lambda *args: (lambda after, data: (after, data._replace(resets=jnp.zeros_like(data.resets))))(*blind(*args)),
    )
    config = many_seeds.Config(seeds=1, updates=150, symbols=2, steps=16, batch=16, hidden=16, mean_length=4, lr=1e-2)
    assert many_seeds.train(config).final_loss > 0.6 * config.chance


@pytest.mark.interpret
def test_triton_trains_many_seeds_as_xla_does():
    config = many_seeds.Config(
        seeds=2, updates=2, updates_per_call=1, symbols=3, steps=4, batch=3, hidden=5, mean_length=2
    )
    with jax.default_matmul_precision("highest"):
        losses = [
            many_seeds.train(dataclasses.replace(config, implementation=name)).losses for name in ("xla", "triton")
        ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (packing_and_resets, ["--envs", "0"], "envs must be at least 1, got 0"),
        (packing_and_resets, ["--mean-lengths", "3", "0"], "mean_lengths must be at least 1, got [3, 0]"),
        (many_seeds, ["--seeds", "0"], "seeds must be at least 1, got 0"),
        (many_seeds, ["--symbols", "1"], "symbols must be at least 2, got 1"),
        (many_seeds, ["--updates", "15"], "updates must be a multiple of updates_per_call = 10, got 15"),
        (many_seeds, ["--lr", "nan"], "lr must be above 0 and finite, got nan"),
        (many_seeds, ["--lr", "-1"], "lr must be above 0 and finite, got -1.0"),
    ],
)
def test_bad_arguments_exit_with_a_message_and_a_nonzero_status(module, arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        module.main(arguments)
    assert error.value.code != 0
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["packing_and_resets", "many_seeds", "recurrent_ppo"])
def test_unavailable_triton_exits_with_the_error_of_the_package(name, tmp_path):
    command = [sys.executable, EXAMPLES / f"{name}.py", "--implementation", "triton", "--out", str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2
    assert re.search(r"error: \w+: the Triton implementation needs", run.stderr) and "Traceback" not in run.stderr
    assert not list(tmp_path.iterdir())
