"""Tests `examples/recurrent_ppo.py` and `training.py`: environments, bookkeeping of resets, and training to the end."""

import dataclasses
import functools
import json
import os
import re
import socket
import subprocess
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_modules import load
from jax.sharding import PartitionSpec as P

recurrent_ppo = load("recurrent_ppo")
training = sys.modules["training"]
make_ppo = recurrent_ppo.make_ppo

TINY = recurrent_ppo.Config(num_envs=8, rollout_steps=32, hidden=16, total_steps=8 * 32 * 3)


def episode(env, policy, seed=0, steps=300):
    """Plays one episode until done; returns its observations, actions and rewards."""
    state, obs = env.reset(jax.random.key(seed), 1)
    draws, step, observations, actions, rewards = (
        env.draw(jax.random.key(seed + 1), steps, 1),
        jax.jit(env.step),
        [],
        [],
        [],
    )
    for t in range(steps):
        observations.append(np.asarray(obs[0]))
        actions.append(policy(t, observations))
        state, obs, reward, done = step(state, jnp.int32([actions[-1]]), jax.tree.map(lambda x, t=t: x[t], draws))
        rewards.append(float(reward[0]))
        if done[0]:
            return np.stack(observations), np.array(actions), np.array(rewards)
    raise AssertionError(f"the episode did not end within {steps} steps")


def test_cartpole_matches_gymnasium():
    """Compares two steps to the right and one to the left with CartPole-v1's equations in float64 NumPy."""
    env = recurrent_ppo.StatelessCartPole()
    state, _ = env.reset(jax.random.key(3), 1)
    fresh = env.draw(jax.random.key(4), 1)
    x, x_dot, theta, theta_dot = (np.float64(value[0]) for value in state[:4])
    for action in (1, 1, 0):
        state, obs, _, _ = env.step(state, jnp.int32([action]), fresh)
        force = 10.0 if action else -10.0
        temp = (force + 0.05 * theta_dot**2 * np.sin(theta)) / 1.1
        theta_acc = (9.8 * np.sin(theta) - np.cos(theta) * temp) / (0.5 * (4 / 3 - 0.1 * np.cos(theta) ** 2 / 1.1))
        x_acc = temp - 0.05 * theta_acc * np.cos(theta) / 1.1
        x, x_dot = x + 0.02 * x_dot, x_dot + 0.02 * x_acc
        theta, theta_dot = theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc
        np.testing.assert_allclose(np.ravel(state[:4]), [x, x_dot, theta, theta_dot], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(obs[0], [x / env.max_x, theta / env.max_theta], rtol=1e-5, atol=1e-6)


def test_cartpole_falls_under_a_constant_force():
    _, _, rewards = episode(recurrent_ppo.StatelessCartPole(), lambda t, observations: 1)
    assert 5 < len(rewards) < 15


def test_cartpole_held_up_ends_after_200_steps_with_return_one():
    def policy(t, observations):  # controls angle, position and their velocities, which are differences of observations
        now, before = observations[-1], observations[max(t - 1, 0)]
        angle, turning = now[1] * 0.21, (now[1] - before[1]) * 0.21 / 0.02
        position, speed = now[0] * 2.4, (now[0] - before[0]) * 2.4 / 0.02
        return int(angle + 0.3 * turning + 0.02 * position + 0.05 * speed > 0)

    observations, _, rewards = episode(recurrent_ppo.StatelessCartPole(), policy)
    assert len(rewards) == 200
    assert np.sum(rewards) == pytest.approx(1.0)
    assert observations.shape == (200, 2) and np.abs(observations).max() <= 1


@pytest.mark.parametrize("k", [1, 4, 33])
def test_repeat_previous_rewards_the_observation_k_steps_before(k):
    env = recurrent_ppo.RepeatPrevious(k)
    rng = np.random.default_rng(k)
    observations, actions, rewards = episode(env, lambda t, observations: rng.integers(4))
    symbols = observations.argmax(axis=1)
    assert len(rewards) == env.max_steps == (104 if k == 33 else 52)
    assert set(symbols) == {0, 1, 2, 3}
    np.testing.assert_array_equal(rewards[:k], 0)
    right = np.where(actions[k:] == symbols[:-k], 1, -1)
    np.testing.assert_allclose(rewards[k:], right / (env.max_steps - k), rtol=1e-6)


def test_repeat_previous_played_from_memory_returns_one():
    _, _, rewards = episode(
        recurrent_ppo.RepeatPrevious(3), lambda t, observations: observations[t - 3].argmax() if t > 2 else 0
    )
    assert np.sum(rewards) == pytest.approx(1.0)


def test_a_cartpole_that_is_done_begins_anew_and_the_others_go_on():
    env = recurrent_ppo.StatelessCartPole()
    state, _ = env.reset(jax.random.key(0), 3)
    state = (state[0].at[1].set(3.0), *state[1:4], jnp.array([5, 6, 7]))  # the second one is off the track
    fresh = env.draw(jax.random.key(1), 3)
    after, obs, _, done = env.step(state, jnp.ones(3, int), fresh)
    np.testing.assert_array_equal(done, [False, True, False])
    np.testing.assert_array_equal(after[4], [6, 0, 8])
    for now, new in zip(after, fresh, strict=True):
        assert now[1] == new[1] and (now[0] != new[0] and now[2] != new[2])
    np.testing.assert_array_equal(obs, env.observe(after))


def test_repeat_previous_asks_for_no_symbol_of_the_episode_before():
    env = recurrent_ppo.RepeatPrevious(4)
    state, _ = env.reset(jax.random.key(0), 1)
    draws = env.draw(jax.random.key(1), 2 * env.max_steps, 1)
    dones, rewards = [], []
    for draw in draws:
        state, _, reward, done = env.step(state, jnp.zeros(1, int), draw)
        dones.append(bool(done[0]))
        rewards.append(float(reward[0]))
    assert np.flatnonzero(dones).tolist() == [env.max_steps - 1, 2 * env.max_steps - 1]
    asked = np.flatnonzero(rewards)
    np.testing.assert_array_equal(asked % env.max_steps, [*range(4, env.max_steps)] * 2)


@functools.cache
def two_rollouts(implementation):
    ppo = make_ppo(dataclasses.replace(TINY, implementation=implementation))
    rollout = jax.jit(ppo.rollout)
    first_state = jax.jit(ppo.init)(0)
    second_state, first = rollout(first_state)
    _, second = rollout(second_state)
    return ppo, (first_state, second_state), (first, second)


def test_resets_equal_the_previous_dones():
    _, states, (first, second) = two_rollouts("xla")
    assert first.done.any(), "the test needs an episode that ends"
    np.testing.assert_array_equal(first.reset[0], False)
    np.testing.assert_array_equal(first.reset[1:], first.done[:-1])
    np.testing.assert_array_equal(second.reset[0], first.done[-1])
    np.testing.assert_array_equal(states[1].actors.done, first.done[-1])


@pytest.mark.quick("implementation")
@pytest.mark.parametrize("implementation", ["xla", "flax", "none"])
def test_update_reproduces_the_rollout(implementation):
    """Checks that the network on the whole sequence gives the log-probabilities and values of the single steps."""
    ppo, states, rollouts = two_rollouts(implementation)
    for state, seen in zip(states, rollouts, strict=True):
        _, logits, value = ppo.network.apply(state.params, state.actors.carry, seen.obs, seen.reset)
        log_prob = recurrent_ppo.log_prob_of(logits, seen.action)
        np.testing.assert_allclose(value, seen.value, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(log_prob, seen.log_prob, rtol=1e-4, atol=1e-5)


def test_episode_returns_restart_with_each_episode():
    _, _, rollouts = two_rollouts("xla")
    reward, done, episode_return = (
        np.concatenate([getattr(seen, name) for seen in rollouts]) for name in ("reward", "done", "episode_return")
    )
    running = np.zeros(TINY.num_envs)
    for t in range(len(reward)):
        running += reward[t]
        np.testing.assert_allclose(episode_return[t], running, rtol=1e-5)
        running[done[t]] = 0


def test_advantages_are_cut_at_dones():
    """Compares with the definition, a double sum, in NumPy."""
    rng = np.random.default_rng(0)
    T, B = 11, 3
    reward, value, done = rng.normal(size=(T, B)), rng.normal(size=(T + 1, B)), rng.random((T, B)) < 0.3
    delta = reward + TINY.gamma * value[1:] * ~done - value[:-1]
    want = np.zeros((T, B))
    for t in range(T):
        weight = np.ones(B)
        for later in range(t, T):
            want[t] += weight * delta[later]
            weight *= TINY.gamma * TINY.gae_lambda * ~done[later]
    seen = recurrent_ppo.Trajectory(None, None, None, None, jnp.asarray(value[:-1]), reward, jnp.asarray(done), None)
    got = make_ppo(TINY).advantages(seen, jnp.asarray(value[-1]))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("updates", [1, 2, 19, 20, 51, 61, 127, 1000, 12207])
def test_updates_are_split_into_equal_calls_with_little_left_over(updates):
    config = dataclasses.replace(TINY, total_steps=updates * TINY.num_envs * TINY.rollout_steps - 1)
    assert config.updates == updates
    config = training.in_whole_calls(config)
    calls, left = divmod(config.updates, training.updates_per_call(config.updates))
    assert left == 0 and (calls == updates if updates < 20 else 20 <= calls <= 50)
    assert updates <= config.updates <= updates * 1.01 + 1


def test_the_learning_rate_is_annealed_where_the_task_is_solved_in_time():
    repeat = dataclasses.replace(TINY, env="repeat")
    assert make_ppo(TINY).config.anneal_lr and not make_ppo(repeat).config.anneal_lr
    assert make_ppo(dataclasses.replace(repeat, anneal_lr=True)).config.anneal_lr
    moved = []
    for anneal in (False, True):
        init, run = training.make_train(make_ppo, dataclasses.replace(TINY, anneal_lr=anneal))
        state = init(jnp.arange(1))
        for _ in range(TINY.updates):
            before = jax.tree.map(np.array, state.params)
            state, _ = run(state)
        distances = jax.tree.map(lambda now, start: np.abs(now - start).max(), state.params, before)
        moved.append(max(jax.tree.leaves(distances)))
    assert 0 < moved[1] < 0.5 * moved[0], "the last third of training has a sixth of the learning rate"


def result_of(episodes, total_return, ended, **options):
    """Returns the result of a call for each update, of TINY with these metrics `[S, updates]`."""
    outputs = [recurrent_ppo.Metrics(*(x[:, i : i + 1] for x in (episodes, total_return))) for i in range(len(ended))]
    config = dataclasses.replace(TINY, num_seeds=len(episodes))
    return training.Result(config, "a task", training.Calls(None, outputs, ended, 1.0, True), **options)


def test_update_without_a_finished_episode_is_nan_in_the_curve_and_null_in_json():
    result = result_of(np.array([[0, 2, 0]]), np.array([[0.0, 1.0, 0.0]]), [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(result.curve, [[np.nan, 0.5, np.nan]])
    report = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert report["curve"]["return"] == [[None, 0.5, None]]
    assert report["final_return"] == [None]


def test_a_result_has_the_times_of_its_updates():
    """The first call warms up, and counts in the seconds of training, but not in the speed."""
    episodes, total_return = np.ones((2, 3)), np.array([[0.0, 1.0, 0.5], [0.0, 1.0, 1.0]])
    result, per_update = result_of(episodes, total_return, [4.0, 5.0, 6.0]), TINY.num_envs * TINY.rollout_steps
    np.testing.assert_array_equal(result.seconds, [4.0, 5.0, 6.0])
    np.testing.assert_array_equal(result.steps, per_update * np.arange(1, 4))
    assert result.steps_per_second == 2 * per_update / 1.0
    np.testing.assert_array_equal(result.final_return, [0.5, 1.0])
    np.testing.assert_allclose(
        result_of(episodes, total_return, [4.0, 5.0, 6.0], evaluated=True).final_return, [0.5, 2 / 3]
    )


def test_intervals_cover_the_mean_of_ninety_five_percent():
    rng = np.random.default_rng(0)
    covered = [low < 0 < high for low, high in (training.interval(rng.normal(size=16)) for _ in range(300))]
    assert 0.87 < np.mean(covered) < 0.98  # the bootstrap of 16 values is a little narrow
    low, high = training.interval(np.array([[1.0, np.nan], [1.0, 2.0], [1.0, 4.0]]))
    assert (low[0], high[0]) == (1.0, 1.0) and 2 <= low[1] < 3 < high[1] <= 4


def test_what_no_episode_has_ended_in_is_nan():
    values = np.array([[np.nan, 1.0], [np.nan, 3.0]])
    np.testing.assert_array_equal(training.mean(values), [np.nan, 2.0])
    low, high = training.interval(values)
    assert np.isnan([low[0], high[0]]).all() and (low[1], high[1]) == (1.0, 3.0)
    curve = np.array([[np.nan, 2.0, 4.0, np.nan, np.nan], [1.0, np.nan, np.nan, np.nan, 5.0]])
    want = [[np.nan, 2.0, 3.0, 4.0, np.nan], [1.0, 1.0, np.nan, np.nan, 5.0]]
    np.testing.assert_array_equal(training.smoothed(curve, 2), want)


def test_main_shows_that_a_gru_remembers_and_the_control_cannot(tmp_path, capsys):
    task = ["--env", "repeat", "--k", "1", "--lr", "3e-3"]
    size = ["--num-envs", "32", "--rollout-steps", "52", "--hidden", "32", "--total-steps", str(32 * 52 * 60)]
    gru, control = recurrent_ppo.main([*task, *size, "--out", str(tmp_path)])
    assert gru.final_return > 0.5
    assert control.final_return < -0.3

    printed = capsys.readouterr()
    for text in ("RepeatPrevious(k=1), 32 envs, GRU-32, 1 seed", "control", "env steps/s", jax.__version__):
        assert text in printed.out
    assert re.search(r"auto: 100%.*return [01]\.\d\d", printed.err), "the progress bar shows the return"
    assert (tmp_path / "recurrent_ppo_repeat.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "recurrent_ppo_repeat.json").read_text())
    assert [run["implementation"] for run in report["runs"]] == ["auto", "none"]
    for run in report["runs"]:
        assert run["total_steps"] == 32 * 52 * 60
        assert run["curve"]["steps"] == [32 * 52 * update for update in range(1, 61)]
        assert len(run["curve"]["seconds"]) == 60 and np.all(np.diff([0.0, *run["curve"]["seconds"]]) > 0)
        assert np.shape(run["curve"]["return"]) == (1, 60)
        assert run["steps_per_second"] > 0 and run["compile_seconds"] > 0


def test_flax_trains_like_xla_and_two_seeds_like_two_runs(tmp_path, capsys):
    per_update = TINY.num_envs * TINY.rollout_steps
    config = dataclasses.replace(TINY, num_seeds=2, seed=5, total_steps=per_update * 5)
    size = ["--num-envs", "8", "--rollout-steps", "32", "--hidden", "16", "--total-steps", str(config.total_steps)]
    names = ["--implementation", "flax", "xla"]
    flax, xla = recurrent_ppo.main([*size, *names, "--num-seeds", "2", "--seed", "5", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "x flax" in printed and "2 seeds" in printed and re.search(r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]", printed)
    assert (tmp_path / "recurrent_ppo_cartpole.png").exists()
    assert (flax.config, xla.config) == tuple(
        dataclasses.replace(config, implementation=name) for name in ("flax", "xla")
    )
    # Initial weights and random numbers are the same, so only rounding differs until it flips an action.
    np.testing.assert_allclose(xla.curve[:, :2], flax.curve[:, :2], rtol=1e-5)
    np.testing.assert_allclose(xla.curve, flax.curve, rtol=0.1)

    init, run = training.make_train(make_ppo, dataclasses.replace(xla.config, num_seeds=1))
    for seed in range(2):
        state, metrics = init(jnp.array([5 + seed])), []
        for _ in range(5):
            state, submitted = run(state)
            metrics.append(submitted)
        total_return = np.concatenate([np.asarray(m.total_return) for m in metrics], axis=1)
        np.testing.assert_allclose(total_return[0], xla.total_return[seed], rtol=1e-4)


def test_saved_agents_act_as_they_did_when_they_were_trained(tmp_path, capsys):
    """An evaluation reads the parameters of its recurrence, and learns nothing."""
    task = [
        "--env",
        "repeat",
        "--k",
        "1",
        "--lr",
        "3e-3",
        "--num-envs",
        "32",
        "--rollout-steps",
        "52",
        "--hidden",
        "32",
    ]
    task += ["--num-seeds", "2", "--implementation", "xla", "none", "--out", str(tmp_path)]
    trained = recurrent_ppo.main([*task, "--total-steps", str(32 * 52 * 40), "--save", str(tmp_path / "agents")])
    evaluated = recurrent_ppo.main([*task, "--total-steps", str(32 * 52 * 8), "--eval", str(tmp_path / "agents")])
    for before, after in zip(trained, evaluated, strict=True):
        jax.tree.map(np.testing.assert_array_equal, after.calls.params, before.calls.params)
        np.testing.assert_allclose(after.final_return, before.final_return, atol=0.1)
    assert {"recurrent_ppo_repeat.json", "recurrent_ppo_repeat_eval.json"} <= {path.name for path in tmp_path.iterdir()}
    capsys.readouterr()
    for options, message in [
        (["--eval", str(tmp_path / "agents"), "--hidden", "16"], "has other agents: name the options"),
        (["--eval", str(tmp_path / "agents"), "--num-seeds", "3"], "has other agents: name the options"),
        (["--eval", str(tmp_path / "nothing")], "--save FOLDER writes what --eval FOLDER reads"),
        (["--save", str(tmp_path), "--num-processes", "2"], "--save and --eval work in one process"),
    ]:
        with pytest.raises(SystemExit):
            recurrent_ppo.main([*task, *options])
        assert message in capsys.readouterr().err


def test_a_callback_hears_of_every_call():
    heard = []
    result = training.train(make_ppo, TINY, lambda steps, metrics: heard.append((steps, metrics)))
    assert [steps for steps, _ in heard] == result.steps.tolist()
    for (_, metrics), value in zip(heard, result.curve[0], strict=True):
        assert metrics["steps_per_second"] > 0
        assert np.isnan(value) if "return" not in metrics else metrics["return"] == pytest.approx(value)
    assert any("return" in metrics for _, metrics in heard)


class Counter(NamedTuple):
    params: jax.Array


def test_ctrl_c_leaves_parameters_outputs_and_times_of_the_same_calls():
    """Interrupts calls before each line of their loop, and where a call has overwritten the state that it was given."""
    count = jax.jit(lambda state: (Counter(state.params + 1), state.params + 1), donate_argnums=0)
    count = count.lower(Counter(jnp.zeros(()))).compile()
    places = 0  # left until the interrupt

    def pass_place():
        nonlocal places
        places -= 1
        if places == 0:
            raise KeyboardInterrupt

    def run(state):
        returned = count(state)
        assert state.params.is_deleted()
        pass_place()
        return returned

    def trace(frame, event, _):
        if frame.f_code is not training.call_repeatedly.__code__:
            return None
        if event == "line":
            pass_place()
        return trace

    program = types.SimpleNamespace(lower=lambda state: types.SimpleNamespace(compile=lambda: run))
    lengths, before = [], sys.gettrace()
    while places <= 0:
        places, state = len(lengths) + 1, Counter(jnp.zeros(()))
        sys.settrace(trace)
        try:
            calls = training.call_repeatedly("calls", program, state, 4, lambda *_: "", amount=1, unit="calls")
        except KeyboardInterrupt:
            lengths.append(0)
            continue
        finally:
            sys.settrace(before)
        lengths.append(len(calls.outputs))
        assert calls.outputs == [1, 2, 3, 4][: lengths[-1]] and len(calls.ended) == lengths[-1]
        assert calls.params == calls.outputs[-1] and calls.finished == (lengths[-1] == 4)
    assert {*lengths} == {0, 2, 3, 4}


@pytest.mark.parametrize("dark", [False, True])
def test_a_figure_is_drawn_for_light_and_for_dark_pages(dark, tmp_path):
    rng = np.random.default_rng(0)
    episodes = np.ones((3, 9)) * ([1, 1, 1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1, 1, 1, 1])
    result = result_of(episodes, rng.random((3, 9)), list(range(1, 10)))
    training.plot([result.to_json()], "a title", tmp_path / "figure.svg", dark)
    drawn = (tmp_path / "figure.svg").read_text()
    assert ("#d0d7de" in drawn) == dark and "#0072b2" in drawn


@pytest.mark.parametrize(
    "device", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("gpu", "interpret")]
)
def test_triton_updates_weights_like_flax(device):
    """Runs two updates of two agents: the second continues from the carry of the first, and sequences have resets."""
    config = recurrent_ppo.Config(
        num_envs=4, rollout_steps=12, hidden=8, num_seeds=2, total_steps=2 * 4 * 12, epochs=1, minibatches=2
    )
    params = {}
    with jax.default_matmul_precision("highest"):
        for name in ("flax", "triton"):
            init, run = training.make_train(make_ppo, dataclasses.replace(config, implementation=name))
            state = init(jnp.arange(2))
            before = jax.tree.map(np.array, state.params)
            for _ in range(config.updates):
                state, metrics = run(state)
            assert metrics.episodes.min() > 0, "the test needs resets"
            params[name] = jax.tree.map(np.asarray, state.params)
    moved = jax.tree.map(lambda now, start: np.abs(now - start).max(), params["flax"], before)
    assert min(jax.tree.leaves(moved)) > 1e-4
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), params["triton"], params["flax"])


# The tests on several devices run on eight CPU devices, with interpreted kernels, or on the GPUs if there are at least
# two: see `conftest.py`.


def in_parts(tree, parts):
    """Splits the environments, the second axis of `[T, B, ...]`, into parts on a new axis before it."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0], parts, -1, *x.shape[2:]), tree)


@pytest.mark.parametrize(
    ("mapped", "parts"),
    [
        ("vmap", 4),
        pytest.param("shard_map", 4, marks=pytest.mark.interpret),
        pytest.param("shard_map", 2, marks=pytest.mark.several_gpus),
    ],
)
def test_losses_and_gradients_of_parts_average_to_those_of_the_whole(mapped, parts):
    """Normalizes the advantages, whose scales differ, by the mean and deviation of all environments."""
    axis = training.AXIS
    ppo, (state, _), (seen, _) = two_rollouts("xla")
    rng = np.random.default_rng(0)
    advantage = jnp.asarray(rng.normal(size=seen.reward.shape) * (1 + np.arange(TINY.num_envs)), jnp.float32)
    arguments = state.actors.carry[None], seen, advantage, seen.value + advantage

    def loss(ppo, params, carry, *rest):
        return ppo.mean(jax.value_and_grad(ppo.loss)(params, carry[0], *rest))

    with jax.default_matmul_precision("highest"):
        want = jax.jit(functools.partial(loss, ppo))(state.params, *arguments)
        one = functools.partial(loss, make_ppo(TINY, axis))
        if mapped == "vmap":
            run, arguments = jax.vmap(one, (None, *[1] * 4), None, axis_name=axis), in_parts(arguments, parts)
        else:
            specs, mesh = P(None, axis), training.make_mesh(parts)
            specs = P(), *[specs] * 4
            run = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        got = jax.jit(run)(state.params, *arguments)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=5e-6), got, want)


@pytest.mark.parametrize(
    ("implementation", "devices", "seeds"),
    [
        pytest.param("xla", 4, 2, marks=pytest.mark.interpret),
        pytest.param("triton", 2, 1, marks=pytest.mark.interpret),
        pytest.param("flax", 2, 1, marks=pytest.mark.several_gpus),
        pytest.param("triton", 2, 2, marks=pytest.mark.several_gpus),
    ],
)
def test_several_devices_train_like_one_device_with_all_parts(implementation, devices, seeds):
    steps = 12 if implementation == "triton" else 32
    config = recurrent_ppo.Config(
        implementation=implementation, num_envs=4 * devices, num_seeds=seeds, num_devices=devices, rollout_steps=steps,
        hidden=8, total_steps=4 * devices * steps * 3, epochs=2, minibatches=2,
    )  # fmt: skip
    assert config.updates == 3
    results = {}
    with jax.default_matmul_precision("highest"):
        for shards_on_one_device in (True, False):
            init, run = training.make_train(make_ppo, config, shards_on_one_device=shards_on_one_device)
            state, metrics = init(jnp.arange(seeds)), []
            start = jax.tree.map(np.array, state.params)
            run = run.lower(state).compile()
            for _ in range(config.updates):
                state, submitted = run(state)
                metrics.append(submitted)
            results[shards_on_one_device] = jax.device_get(
                (state._replace(key=jax.random.key_data(state.key)), metrics)
            )
    (want, want_metrics), (got, got_metrics) = results[True], results[False]

    assert sum(m.episodes.sum() for m in want_metrics) > 0, "the test needs resets"
    jax.tree.map(np.testing.assert_array_equal, [m.episodes for m in got_metrics], [m.episodes for m in want_metrics])
    moved = jax.tree.map(lambda now, before: np.abs(now - before).max(), want.params, start)
    assert min(jax.tree.leaves(moved)) > 1e-3
    bound = 1e-4 if jax.default_backend() == "gpu" else 1e-5  # 12 steps of Adam amplify rounding errors
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=bound, atol=bound), got, want)

    # The environments stay sharded, and the rest of the state is bit-identical on all devices.
    text = run.as_text()
    assert "all-reduce" in text and not any(name in text for name in ("all-gather", "all-to-all", "collective-permute"))
    assert len(state.actors.obs.sharding.device_set) == devices
    assert {shard.data.shape[1] for shard in state.actors.obs.addressable_shards} == {4}
    for x in jax.tree.leaves((state.params, state.opt_state)):
        first, *others = (np.asarray(shard.data) for shard in x.addressable_shards)
        assert len(others) == devices - 1
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(
    "device", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("several_gpus", "interpret")]
)
def test_two_devices_learn(device, tmp_path, capsys):
    task = ["--env", "repeat", "--k", "1", "--lr", "3e-3", "--num-devices", "2", "--implementation", "auto"]
    size = ["--num-envs", "32", "--rollout-steps", "52", "--hidden", "32", "--total-steps", str(32 * 52 * 60)]
    (result,) = recurrent_ppo.main([*task, *size, "--out", str(tmp_path)])
    assert result.final_return > 0.5
    assert "1 seed, 2 devices" in " ".join(capsys.readouterr().out.split())
    (run,) = json.loads((tmp_path / "recurrent_ppo_repeat.json").read_text())["runs"]
    assert run["num_devices"] == 2 and run["total_steps"] == 32 * 52 * 60
    steps, seconds = run["curve"]["steps"], run["curve"]["seconds"]
    first = steps.index(result.steps_per_call)  # the end of the first call, which warms up
    timed = (steps[-1] - steps[first]) / (seconds[-1] - seconds[first])
    assert run["steps_per_second"] == pytest.approx(timed)


ONE_HOST = """
import importlib.util, json, pathlib, sys
import jax

path, devices_per_host, *arguments = sys.argv[1:]
sys.path.append(str(pathlib.Path(path).parent))
spec = importlib.util.spec_from_file_location("recurrent_ppo", path)
recurrent_ppo = sys.modules["recurrent_ppo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recurrent_ppo)
(result,) = recurrent_ppo.main(arguments)
assert (jax.device_count(), jax.local_device_count()) == (2 * int(devices_per_host), int(devices_per_host))
print(json.dumps({"episodes": result.episodes.tolist(), "total_return": result.total_return.tolist()}))
"""


@pytest.mark.parametrize(
    ("device", "num_devices"),
    [pytest.param("gpu", 2, marks=pytest.mark.several_gpus), pytest.param("cpu", 4, marks=pytest.mark.interpret)],
)
def test_two_hosts_train_like_one(device, num_devices, tmp_path):
    """Runs each host as a process with half of the devices; the first one writes."""
    task = ["--env", "repeat", "--k", "1", "--lr", "3e-3", "--num-devices", str(num_devices)]
    size = ["--num-envs", "32", "--rollout-steps", "52", "--hidden", "32", "--total-steps", str(32 * 52 * 6)]
    options = [*task, *size, "--implementation", "xla" if device == "cpu" else "triton"]
    (want,) = recurrent_ppo.main([*options, "--out", str(tmp_path / "one")])
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    here = {**os.environ, "TRITON_INTERPRET": "0"}
    if device == "cpu":
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"  # the last one has effect
        here |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
        places = [here, here]
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        places = [{**here, "CUDA_VISIBLE_DEVICES": visible[process]} for process in range(2)]
    path = tmp_path / "host.py"
    path.write_text(ONE_HOST)
    hosts = []
    for process, environment in enumerate(places):
        joined = ["--num-processes", "2", "--process-id", str(process), "--coordinator-address", address]
        arguments = [*options, *joined, "--out", str(tmp_path / str(process))]
        command = [sys.executable, str(path), recurrent_ppo.__file__, str(num_devices // 2), *arguments]
        hosts.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        for process, host in enumerate(hosts):
            printed, errors = host.communicate(timeout=300)
            assert host.returncode == 0, errors
            assert ("1 seed" in printed) == (process == 0)
            got = json.loads(printed.splitlines()[-1])
            np.testing.assert_array_equal(got["episodes"], want.episodes)
            np.testing.assert_allclose(got["total_return"], want.total_return, rtol=1e-5)
    finally:
        for host in hosts:
            host.kill()
    assert not (tmp_path / "1").exists()
    (run,) = json.loads((tmp_path / "0" / "recurrent_ppo_repeat.json").read_text())["runs"]
    assert run["num_devices"] == num_devices and run["total_steps"] == 32 * 52 * 6
    np.testing.assert_allclose(run["curve"]["return"], want.curve, rtol=1e-5)


def test_options_of_several_processes_need_their_number(capsys):
    with pytest.raises(SystemExit):
        recurrent_ppo.main(["--process-id", "1"])
    assert "need --num-processes" in capsys.readouterr().err


def test_parts_draw_different_random_numbers():
    ppo = make_ppo(TINY, "parts")
    keys = jax.vmap(lambda _: jax.random.key_data(ppo.shard_key(jax.random.key(0))), axis_name="parts")(jnp.arange(3))
    assert len({tuple(key) for key in keys.tolist()}) == 3


@pytest.mark.gpu
def test_triton_learns_like_flax():
    config = recurrent_ppo.Config(
        env="repeat", k=1, num_envs=32, rollout_steps=52, hidden=32, total_steps=32 * 52 * 60, lr=3e-3, num_seeds=3
    )
    results = {
        name: training.train(make_ppo, dataclasses.replace(config, implementation=name)) for name in ("flax", "triton")
    }
    np.testing.assert_allclose(results["triton"].curve[:, :2], results["flax"].curve[:, :2], atol=0.02)
    assert all(result.final_return.min() > 0.5 for result in results.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-envs", "6"], "num_envs must be a multiple of 4 minibatches, got 6"),
        (["--num-devices", "3"], "num_envs must be a multiple of 3 devices x 4 minibatches, got 64"),
        (["--num-devices", "64", "--num-envs", "256"], "num_devices is 64, but JAX has"),
        (["--env", "repeat", "--k", "0"], "k must be at least 1, got 0"),
        (["--implementation", "cudnn"], "invalid choice: 'cudnn'"),
        (["--lr", "nan"], "lr must be above 0 and finite, got nan"),
        (["--lr", "-1"], "lr must be above 0 and finite, got -1.0"),
    ],
)
def test_bad_arguments_end_with_a_message_and_a_nonzero_status(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        recurrent_ppo.main(arguments)
    assert error.value.code != 0
    assert message in capsys.readouterr().err
