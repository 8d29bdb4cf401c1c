"""Tests `examples/gymnax_ppo.py`, if gymnax is installed: both recurrences train alike, and remember."""

import json

import jax
import numpy as np
import pytest
from example_modules import load
from trees import assert_identical

pytestmark = pytest.mark.gymnax

SMALL = ["--num-envs", "4", "--rollout-steps", "16", "--hidden", "8", "--memory-length", "3"]


@pytest.fixture(scope="module")
def example():
    return load("gymnax_ppo")


def test_both_recurrences_start_and_train_alike(example, tmp_path, capsys):
    options = ["--implementation", "flax", "auto", "--total-steps", "6.4e2", "--out", str(tmp_path)]
    flax, ours = example.main([*SMALL, *options])
    params = [example.make_ppo(result.config).init(0).params for result in (flax, ours)]
    assert_identical(*params)
    assert list(params[0]["params"]["recurrence"]) == ["GRUCell_0"]
    assert flax.episodes.shape == ours.episodes.shape == (1, 10)
    np.testing.assert_array_equal(ours.episodes, flax.episodes)  # episodes of MemoryChain have one length
    np.testing.assert_allclose(ours.total_return[:, :2], flax.total_return[:, :2])  # later, rounding may flip an action
    assert "MemoryChain-bsuite, 4 envs, GRU-8" in capsys.readouterr().out
    runs = json.loads((tmp_path / "gymnax_ppo_MemoryChain-bsuite.json").read_text())["runs"]
    assert [(run["implementation"], run["total_steps"]) for run in runs] == [("flax", 640), ("auto", 640)]


@pytest.mark.parametrize("implementation", ["flax", "auto"])
def test_the_update_reproduces_the_values_of_the_rollout(example, implementation):
    """The network is run again on the dones that came with the observations."""
    config = example.Config(implementation=implementation, num_envs=4, rollout_steps=16, hidden=8, memory_length=3)
    ppo = example.make_ppo(config)
    before = jax.jit(ppo.init)(0)
    _, seen = jax.jit(ppo.rollout)(before)
    assert seen.done.sum() >= 4, "the test needs episodes that end"
    _, _, values = ppo.network.apply(before.params, before.actors.carry, seen.obs, seen.reset)
    np.testing.assert_allclose(values, seen.value, rtol=1e-5, atol=1e-6)


def test_an_agent_remembers(example, tmp_path):
    size = ["--num-envs", "32", "--rollout-steps", "32", "--hidden", "16", "--memory-length", "3"]
    (result,) = example.main([*size, "--total-steps", str(32 * 32 * 40), "--lr", "5e-3", "--out", str(tmp_path)])
    assert result.final_return > 0.8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "Nope-v0"], "gymnax has no environment Nope-v0; it has CartPole-v1"),
        (["--env", "Pendulum-v1"], "the actions of Pendulum-v1 are not discrete"),
        (["--num-envs", "6"], "num_envs must be a multiple of 4 minibatches, got 6"),
        (["--total-steps", "1.5"], "must be a whole number"),
        (["--lr", "nan"], "lr must be above 0 and finite, got nan"),
    ],
)
def test_bad_arguments_exit_with_a_message(example, arguments, message, capsys, tmp_path):
    with pytest.raises(SystemExit) as error:
        example.main([*arguments, "--out", str(tmp_path / "out")])
    assert error.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
