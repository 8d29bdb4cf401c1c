"""Tests `examples/gymnax_ppo.py`, if gymnax is installed: both recurrences train alike, and remember."""

import json

import jax
import jax.numpy as jnp
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
    flax, ours = example.main([*SMALL, "--rnn", "both", "--total-steps", "6.4e2", "--out", str(tmp_path)])
    states = [example.make_train(result.config).init(jnp.int32(0)) for result in (flax, ours)]
    assert_identical(*(state.params for state in states))
    assert list(states[0].params["params"]["rnn"]) == ["GRUCell_0"]
    assert len(flax.episodes) == len(ours.episodes) == 10
    np.testing.assert_array_equal(ours.episodes, flax.episodes)  # episodes of MemoryChain have one length
    np.testing.assert_allclose(ours.total_return[:2], flax.total_return[:2])  # later, rounding may flip an action
    printed = capsys.readouterr()
    assert "MemoryChain-bsuite, 4 envs, GRU-8" in printed.out and "compiling ..." in printed.err
    runs = json.loads((tmp_path / "gymnax_ppo.json").read_text())["runs"]
    assert [(run["rnn"], run["total_steps"], len(run["curve"])) for run in runs] == [
        ("flax", 640, 10),
        ("jaxrnn", 640, 10),
    ]


@pytest.mark.parametrize("rnn", ["flax", "jaxrnn"])
def test_the_update_reproduces_the_values_of_the_rollout(example, rnn, monkeypatch):
    """The network is run again on the dones that came with the observations, so the first ratio is 1 everywhere."""
    ratios, exp = [], jnp.exp

    def record(x):
        jax.debug.callback(lambda ratio: ratios.append(np.asarray(ratio)), exp(x))
        return exp(x)

    monkeypatch.setattr(jnp, "exp", record)
    config = example.Config(rnn=rnn, num_envs=4, rollout_steps=16, hidden=8, memory_length=3, epochs=1, minibatches=1)
    init, update = example.make_train(config)
    jax.block_until_ready(update(init(jnp.int32(0))))
    jax.effects_barrier()
    (ratio,) = (ratio for ratio in ratios if ratio.shape == (16, 4))
    np.testing.assert_allclose(ratio, 1, rtol=1e-5)


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


def test_a_folder_that_takes_no_files_is_an_error_before_the_training(example, capsys, monkeypatch):
    monkeypatch.setattr(example, "train", None)
    with pytest.raises(SystemExit) as error:
        example.main([*SMALL, "--total-steps", "6.4e2", "--out", "/proc"])
    assert error.value.code == 2 and "'/proc" in capsys.readouterr().err
