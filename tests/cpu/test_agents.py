"""Tests `examples/craftax_ppo.py` and `examples/jaxmarl_ippo.py`, if their environments are installed."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_modules import load

pytestmark = pytest.mark.agents


@pytest.fixture(scope="module")
def jaxmarl_ippo():
    return load("jaxmarl_ippo")


@pytest.fixture(scope="module")
def craftax_ppo():
    return load("craftax_ppo")


def trained(module, out, *options):
    """Trains a small agent, and returns the results, and what is written of them."""
    results = module.main(["--hidden", "8", *options, "--out", str(out)])
    (path,) = out.glob("*.json")
    return results, json.loads(path.read_text())["runs"]


def test_agents_of_jaxmarl_train_with_both_recurrences(jaxmarl_ippo, tmp_path):
    size = ["--num-envs", "4", "--rollout-steps", "26", "--total-steps", "208", "--num-seeds", "2"]
    (flax, ours), runs = trained(jaxmarl_ippo, tmp_path, *size, "--implementation", "flax", "xla")
    np.testing.assert_array_equal(ours.episodes[:, 0], flax.episodes[:, 0])
    np.testing.assert_allclose(ours.total_return[:, 0], flax.total_return[:, 0], rtol=1e-4)
    assert [run["curve"]["steps"] for run in runs] == [[104, 208]] * 2
    assert all(value < 0 for run in runs for seed in run["curve"]["return"] for value in seed)


def test_an_agent_of_jaxmarl_is_a_row_that_is_reset_with_its_environment(jaxmarl_ippo):
    """Compares with the environments one by one, of which each one has its own key."""
    env = jaxmarl_ippo.JaxMARL("MPE_simple_spread_v3")
    state, obs = env.reset(jax.random.key(0), 2)
    assert len(env.agents) == 3 and obs.shape[0] == 6
    keys = jax.random.split(jax.random.key(0), 2)
    for e in range(2):
        alone, _ = env.env.reset(keys[e])
        for a, agent in enumerate(env.agents):
            np.testing.assert_allclose(obs[3 * e + a], alone[agent], rtol=1e-6)
    actions, draws = jnp.arange(6) % env.num_actions, env.draw(jax.random.key(1), 52, 6)
    step, dones = jax.jit(env.step), []
    for keys in draws:
        state, obs, reward, done = step(state, actions, keys)
        dones.append(np.asarray(done))
        assert reward.shape == done.shape == (6,)
    assert np.flatnonzero(np.all(dones, axis=1)).tolist() == [25, 51]
    assert np.flatnonzero(np.any(dones, axis=1)).tolist() == [25, 51]


def test_craftax_trains(craftax_ppo, tmp_path):
    """Trains once: to compile the environment takes most of a minute."""
    size = ["--num-envs", "8", "--rollout-steps", "4", "--total-steps", "64"]
    _, runs = trained(craftax_ppo, tmp_path, *size)
    assert [run["curve"]["steps"] for run in runs] == [[32, 64]]


def test_an_episode_of_craftax_that_ends_begins_in_a_new_world(craftax_ppo):
    env = craftax_ppo.Craftax("Craftax-Symbolic-v1")
    env.actors_per_world = 2
    reset = jax.jit(env.reset, static_argnums=1)
    state, _ = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), reset(jax.random.key(0), 2))
    over = jnp.array([True, False, True, False])
    state = state.replace(player_health=jnp.where(over, 0.0, state.player_health))
    keys = env.draw(jax.random.key(1), 4)
    after, obs, _, done = jax.jit(env.step)(state, jnp.zeros(4, int), keys)
    np.testing.assert_array_equal(done, over)
    np.testing.assert_array_equal(after.timestep, [0, 1, 0, 1])
    worlds, first_obs = reset(keys[0, 1], 2)
    for actor, world in ((0, 0), (2, 1)):
        np.testing.assert_array_equal(after.map[actor], worlds.map[world])
        np.testing.assert_allclose(obs[actor], first_obs[world], rtol=1e-6)
    for actor in (1, 3):
        np.testing.assert_array_equal(after.map[actor], state.map[actor])
