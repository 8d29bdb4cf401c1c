"""Compares the recurrent module of each code base with its replacement in `docs/codebases.md`.

The modules of the code bases are in `tests/codebases.py`. A module and its replacement get the same keys, and run under
the transformations that the code base applies. Their initial values must be identical, and their results equal to
rounding.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import codebases
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import ActorCritic
from codebases import STOIX_CELLS, ResetRNN
from flax import nnx, traverse_util
from flax.linen.dtypes import promote_dtype
from trees import assert_close, assert_identical, normal, some_carry, some_resets

import jaxrnn
import jaxrnn.nnx

T, B, D, H = 3, 2, 5, 6
OBS = 3  # equals the number of logits of ActorCritic
DOCS = Path(__file__).resolve().parents[2] / "docs" / "codebases.md"
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", DOCS.read_text(), re.DOTALL | re.MULTILINE))
# The same class runs the kernels in all code bases with a `ScannedRNN`, so only some of those have both.
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [None, pytest.param("triton", marks=pytest.mark.interpret)])


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def snippet(section):
    """Returns the compiled snippet of a section of the docs."""
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    return compile(code, f"{DOCS.name}: {section}", "exec", dont_inherit=True)


def documented(section, name, default):
    """Returns the class `name` that the snippet of a section defines or imports; `default` is its implementation."""
    names = {"__name__": DOCS.stem}
    exec(snippet(section), names)

    class Chosen(names[name]):
        implementation: Any = default

    Chosen.__name__ = name  # Flax names parameters after the class
    return Chosen


RESULTS: dict[Any, Any] = {}


def both(case, run, theirs, ours, *, tol=1e-5):
    """Asserts that `run(module) -> (initial variables, results)` agrees for both; returns the paths of the parameters.

    The results of `theirs` are computed once for all tests of the same `case`.
    """
    if case not in RESULTS:
        RESULTS[case] = run(theirs)
    (want_variables, want), (got_variables, got) = RESULTS[case], run(ours)
    assert_identical(got_variables, want_variables)
    assert_close(got, want, tol=tol)
    return set(traverse_util.flatten_dict(got_variables, sep="/"))


def with_default(init, implementation):
    """Returns the constructor `init` with another default of `implementation`."""

    @functools.wraps(init)
    def constructed(*args, **kwargs):
        init(*args, **{"implementation": implementation} | kwargs)

    return constructed


def initial(init, keys):
    """Returns one set of variables for each key, on a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(init, keys))


def descend(variables, grads):
    return jax.tree.map(lambda v, g: v - 0.1 * g, variables, grads)


def environment(obs, action_values, key):
    """Returns observation and done of the next step. Rounding cannot flip a done, which depends only on the key."""
    obs_key, done_key = jax.random.split(key)
    obs = jnp.sin(obs + action_values + jax.random.normal(obs_key, obs.shape))
    return obs, jax.random.bernoulli(done_key, 0.4, obs.shape[:-1])


def make_train(networks, initialize_carry, init_batch, batch, average: Callable[[Any], Any] = lambda grads: grads):
    """Returns the functions of a training with two updates, as in purejaxrl and in code bases derived from purejaxrl.

    An update has a rollout (T = 1) and gradients through the rollout.

    Args:
      networks: `network.apply(variables, carry, (obs, resets)) -> (carry, logits, value)`, each with its own carry.
      initialize_carry: a function from batch axes to a carry.
      init_batch: the batch axes that the networks are initialized with.
      batch: the batch axes that the networks run with.
      average: a function that averages gradients over parallel axes.

    Returns:
      `init(key)` and `train(variables, key)`.
    """

    def init(key):
        x = jnp.zeros((1, *init_batch, OBS)), jnp.zeros((1, *init_batch))  # float32 resets here, bool in the rollout
        keys = jax.random.split(key, len(networks))
        carry = initialize_carry(init_batch)
        return {f"network_{i}": network.init(keys[i], carry, x) for i, network in enumerate(networks)}

    def apply(variables, carries, x):
        results = [network.apply(variables[f"network_{i}"], carries[i], x) for i, network in enumerate(networks)]
        carries, logits, values = zip(*results, strict=True)
        return list(carries), sum(logits), sum(values)

    def env_step(state, key):
        variables, obs, done, carries = state
        carries, logits, value = apply(variables, carries, (obs[None], done[None]))
        next_obs, next_done = environment(obs, logits[0], key)
        return (variables, next_obs, next_done, carries), (obs, done, value[0])

    def update(state, key):
        first_carries = state[3]
        state, (obs, dones, values) = jax.lax.scan(env_step, state, jax.random.split(key, T))

        def loss(variables):
            _, logits, new_values = apply(variables, first_carries, (obs, dones))
            return jnp.mean(jnp.sin(logits)) + jnp.mean((new_values - jnp.sin(obs.sum(-1))) ** 2), new_values

        grads, replayed = jax.grad(loss, has_aux=True)(state[0])
        return (descend(state[0], average(grads)), *state[1:]), (values, replayed)

    def train(variables, key):
        obs_key, key = jax.random.split(key)
        carries = [initialize_carry(batch) for _ in networks]
        state = variables, jax.random.normal(obs_key, (*batch, OBS)), jnp.zeros(batch, bool), carries
        (variables, _, _, carries), (values, replayed) = jax.lax.scan(update, state, jax.random.split(key, 2))
        return variables, carries, values, replayed

    return init, train


# --- the ScannedRNN of policy gradients ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "theirs", "path"),
    [
        # an LSTM, under the name that it has if no dummy cell is created
        ("names, and LSTMs", lambda: codebases.purejaxrl("LSTMCell"), "LSTMCell_0/hi/bias"),
        (
            "options of its cell",
            lambda: codebases.jaxmarl_ppo(kernel_init=nn.initializers.orthogonal()),
            "GRUCell_1/hn/bias",
        ),
    ],
    ids=["names", "options"],
)
def test_your_own_class(section, theirs, path):
    def run(rnn):
        init, train = make_train(
            [ActorCritic(rnn, embedding=H)], lambda batch: rnn.initialize_carry(*batch, H), (B,), (B,)
        )
        variables = init(jax.random.key(11))
        return variables, jax.jit(train)(variables, jax.random.key(0))

    ours = documented(f"Your own class: {section}", "ScannedRNN", None)
    paths = both(section, run, theirs(), ours)
    assert f"network_0/params/ScannedRNN_0/{path}" in paths


@pytest.mark.quick("implementation")
@pytest.mark.parametrize("seeds", [None, 3], ids=["jit", "jit-vmap"])
@IMPLEMENTATIONS
def test_purejaxrl_and_popjaxrl(implementation, seeds):
    def run(rnn):
        init, train = make_train(
            [ActorCritic(rnn, embedding=H)], lambda batch: rnn.initialize_carry(*batch, H), (B,), (B,)
        )
        if seeds:  # popjaxrl creates the networks inside of `vmap` too
            keys = jax.random.split(jax.random.key(0), seeds)
            variables, trained = jax.jit(jax.vmap(lambda key: (made := init(key), train(made, key))))(keys)
        else:
            variables = init(jax.random.key(0))
            trained = jax.jit(train)(variables, jax.random.key(0))
        _, _, values, replayed = trained
        # the update must reproduce the values that the rollout stored, so its resets are those that the rollout saw
        np.testing.assert_allclose(values, replayed, rtol=1e-5, atol=1e-5)
        return variables, trained

    ours = documented("purejaxrl and popjaxrl", "ScannedRNN", implementation)
    paths = both(("purejaxrl", seeds), run, codebases.purejaxrl(), ours)
    assert "network_0/params/ScannedRNN_0/GRUCell_0/hn/bias" in paths


@pytest.mark.parametrize("theirs", [codebases.jaxmarl_ppo, codebases.craftax_baselines])
def test_jaxmarl_ppo_and_craftax_baselines(theirs):
    """Like MAPPO, uses an actor and a critic, under `vmap` of `jit`.

    Both are created for the environments and run for environments times agents.
    """

    def run(rnn):
        networks = [ActorCritic(rnn, embedding=H), ActorCritic(rnn, embedding=H)]
        init, train = make_train(networks, lambda batch: rnn.initialize_carry(*batch, H), (B,), (2 * B,))
        keys = jax.random.split(jax.random.key(1), 2)
        variables = initial(init, keys)
        return variables, jax.vmap(jax.jit(train))(variables, keys)

    ours = documented("JaxMARL (IPPO and MAPPO), Craftax_Baselines", "ScannedRNN", None)
    paths = both(theirs.__name__, run, theirs(), ours)
    assert "network_1/params/ScannedRNN_0/GRUCell_1/hn/bias" in paths


def test_kinetix():
    """All its scripts call `initialize_carry(batch_size)`; one also passes the width. Inputs have another width."""

    def run(rnn):
        init, train = make_train([ActorCritic(rnn)], lambda batch: rnn.initialize_carry(*batch), (B,), (B,))
        variables = init(jax.random.key(12))
        carries = rnn.initialize_carry(B, 256), rnn.initialize_carry(batch_size=B, hidden_size=256)
        return variables, (jax.jit(train)(variables, jax.random.key(0)), carries)

    paths = both("kinetix", run, codebases.kinetix(), documented("Kinetix", "ScannedRNN", None))
    assert "network_0/params/ScannedRNN_0/GRUCell_1/hn/bias" in paths


@pytest.mark.parametrize(
    ("cell", "implementation"),
    [("gru", None), ("optimised_lstm", None), pytest.param("gru", "triton", marks=pytest.mark.interpret)],
)
def test_stoix(cell, implementation):
    """`vmap(axis_name="batch")` over copies of the weights runs inside `pmap`; gradients are averaged over both."""
    devices, copies = jax.local_device_count(), 2

    def run(rnn):
        rnn = functools.partial(rnn, hidden_state_dim=H, cell_type=cell)
        networks = [ActorCritic(rnn)] * (2 if cell == "gru" else 1)
        init, train = make_train(
            networks,
            lambda batch: rnn().initialize_carry(batch_size=batch[0]),
            (B,),
            (B,),
            average=lambda grads: jax.lax.pmean(jax.lax.pmean(grads, axis_name="batch"), axis_name="device"),
        )
        variables = init(jax.random.key(2))
        copied = jax.tree.map(lambda x: jnp.broadcast_to(x, (devices, copies, *x.shape)), variables)
        keys = jax.random.split(jax.random.key(3), (devices, copies))
        train = jax.pmap(jax.vmap(train, axis_name="batch"), axis_name="device")
        return variables, train(copied, keys)

    paths = both(("stoix", cell), run, codebases.stoix(), documented("Stoix", "ScannedRNN", implementation))
    name = STOIX_CELLS[cell].__name__
    assert any(path.startswith(f"network_0/params/ScannedRNN_0/{name}_1/") for path in paths)


@pytest.mark.parametrize("cell", ["lstm", "mgu", "simple"])
def test_stoix_with_other_cells(cell):
    def run(rnn):
        rnn = functools.partial(rnn, H, cell)
        carry, x = rnn().initialize_carry(B), (normal(1, (T, B, OBS)), some_resets((T, B)))
        network = ActorCritic(rnn)
        variables = network.init(jax.random.key(2), carry, (x[0][:1], jnp.zeros((1, B))))

        def loss(variables, carry):
            results = network.apply(variables, carry, x)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results)), results

        return variables, jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables, carry)

    paths = both(("stoix", cell), run, codebases.stoix(), documented("Stoix", "ScannedRNN", None))
    assert any(path.startswith(f"params/ScannedRNN_0/{STOIX_CELLS[cell].__name__}_1/") for path in paths)


def test_mava():
    def run(rnn):
        networks = [ActorCritic(functools.partial(rnn, H), embedding=H)] * 2
        init, train = make_train(
            networks,
            lambda batch: rnn.initialize_carry(batch, H),
            (1, 3),
            (B, 3),
            average=lambda grads: jax.lax.pmean(grads, axis_name="batch"),
        )
        variables = init(jax.random.key(4))
        copied = jax.tree.map(lambda x: jnp.broadcast_to(x, (2, *x.shape)), variables)
        keys = jax.random.split(jax.random.key(5), 2)
        return variables, jax.jit(jax.vmap(train, axis_name="batch"))(copied, keys)

    paths = both("mava", run, codebases.mava(), documented("Mava", "ScannedRNN", None))
    assert "network_0/params/ScannedRNN_0/GRUCell_1/hn/bias" in paths


# --- the ScannedRNN of Q-learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", [codebases.jaxmarl_q_learning, codebases.pqn])
@IMPLEMENTATIONS
def test_jaxmarl_q_learning(implementation, theirs):
    """`vmap` over agents, with shared weights, runs inside `vmap` over seeds; targets need the forward pass only."""
    num_agents, steps = 3, T + 1

    def run(rnn):
        network = ActorCritic(rnn, embedding=D if theirs is codebases.pqn else H)
        apply = jax.vmap(network.apply, in_axes=(None, 0, 0))

        def init(key):
            return network.init(key, rnn.initialize_carry(H, 1), (jnp.zeros((1, 1, OBS)), jnp.zeros((1, 1))))

        def train(variables, target_variables, key):
            obs_key, key = jax.random.split(key)
            carry = rnn.initialize_carry(H, num_agents, B)

            def env_step(state, key):
                obs, done, carry = state
                carry, q, _ = apply(variables, carry, (obs[:, None], done[:, None]))  # [A, 1, B, ...]
                return (*environment(obs, q[:, 0], key), carry), (obs, done)

            obs = jax.random.normal(obs_key, (num_agents, B, OBS))
            state = obs, jnp.zeros((num_agents, B), bool), carry
            (_, _, carry), sequences = jax.lax.scan(env_step, state, jax.random.split(key, steps))
            x = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), sequences)  # [A, T, B, ...]
            _, target, _ = apply(target_variables, rnn.initialize_carry(H, num_agents, B), x)

            def loss(variables):
                _, q, _ = apply(variables, rnn.initialize_carry(H, num_agents, B), x)
                chosen = jnp.take_along_axis(q[:, :-1], jnp.argmax(x[0], axis=-1)[:, :-1, :, None], axis=-1)
                return jnp.mean((chosen[..., 0] - 0.9 * target[:, 1:].max(axis=-1)) ** 2)

            return jax.value_and_grad(loss)(variables), carry

        keys, target_keys = jax.random.split(jax.random.key(6), (2, 2))
        variables, targets = initial(init, keys), initial(init, target_keys)
        return variables, jax.jit(jax.vmap(train))(variables, targets, keys)

    ours = documented("JaxMARL (Q-learning)", "ScannedRNN", implementation)
    paths = both(theirs, run, theirs(), ours)
    assert "params/ScannedRNN_0/GRUCell_0/hn/bias" in paths


class RecurrentQ(nn.Module):
    """As purejaxql's: layers of recurrence with a carry each, the last action beside the input of the first."""

    rnn: Callable[[], nn.Module]
    layers: int = 2

    @nn.compact
    def __call__(self, carries, obs, done, last_action):
        x = nn.relu(nn.LayerNorm()(nn.Dense(H)(obs)))
        x = jnp.concatenate([x, jax.nn.one_hot(last_action, OBS)], axis=-1)  # wider than the state
        after = []
        for carry in carries:
            carry, x = self.rnn()(carry, (x, done))
            after.append(carry)
        return after, nn.Dense(OBS)(x)


@IMPLEMENTATIONS
def test_purejaxql(implementation):
    """As `pqn_rnn_craftax.py`: LSTMs. The rollout stores the carries of all steps; the update starts from the first."""

    def run(rnn):
        network = RecurrentQ(rnn)

        def initialize_carry(*batch):
            return [rnn.initialize_carry(H, *batch) for _ in range(network.layers)]

        def init(key):
            obs, done, last_action = jnp.zeros((1, 1, OBS)), jnp.zeros((1, 1)), jnp.zeros((1, 1), int)
            return network.init(key, initialize_carry(1), obs, done, last_action)

        def train(variables, key):
            def env_step(state, key):
                carries, obs, done, action = state
                after, q = network.apply(variables, carries, obs[None], done[None], action[None])
                next_obs, next_done = environment(obs, q[0], key)
                next_action = jax.random.randint(key, (B,), 0, OBS)
                return (after, next_obs, next_done, next_action), (carries, obs, done, action, q[0])

            state = initialize_carry(B), jnp.ones((B, OBS)), jnp.zeros(B, bool), jnp.zeros(B, int)
            state, (carries, obs, done, action, q_seen) = jax.lax.scan(env_step, state, jax.random.split(key, T))

            def loss(variables):
                first = jax.tree.map(lambda x: x[0], carries)
                _, q = network.apply(variables, first, obs, done, action)
                return jnp.mean((q - q_seen + jnp.sin(obs)) ** 2)

            return jax.value_and_grad(loss)(variables), state[0], carries

        keys = jax.random.split(jax.random.key(7), 2)
        variables = initial(init, keys)
        return variables, jax.jit(jax.vmap(train))(variables, keys)

    ours = documented("purejaxql", "ScannedRNN", implementation)
    paths = both("purejaxql", run, codebases.pqn("OptimizedLSTMCell"), ours)
    assert {f"params/ScannedRNN_{i}/OptimizedLSTMCell_0/hi/bias" for i in range(2)} <= paths


# --- modules around a cell -------------------------------------------------------------------------------------------


class LearnedStart(nn.Module):
    """An agent as in jaxued's examples; with `start`, a shape, it learns the state that its episodes start from."""

    rnn: Callable[..., nn.Module]
    cell: str
    start: tuple[int, ...] | None

    @nn.compact
    def __call__(self, inputs, carry):
        obs, dones = inputs
        reset_carry = None
        if self.start is not None:
            reset_carry = self.param("start", nn.initializers.ones, self.start)
            if self.cell != "GRUCell":
                reset_carry = (reset_carry, self.param("start_h", nn.initializers.normal(), self.start))
        x = nn.relu(nn.Dense(D)(obs))
        rnn = self.rnn(getattr(nn, self.cell)(features=H))
        carry, x = rnn((x, dones), initial_carry=carry, reset_carry=reset_carry)
        return carry, nn.Dense(1, name="critic")(x)


@pytest.mark.parametrize(
    ("cell", "start", "with_carry"),
    [
        ("OptimizedLSTMCell", None, True),
        ("OptimizedLSTMCell", (B, H), True),
        ("OptimizedLSTMCell", (B, H), False),
        ("GRUCell", (H,), True),
        ("GRUCell", None, False),
    ],
)
@IMPLEMENTATIONS
def test_jaxued(implementation, cell, start, with_carry):
    carry = some_carry(cell, (B,), H) if with_carry else None

    def run(rnn):
        network = LearnedStart(rnn, cell, start)
        variables = network.init(jax.random.key(8), (jnp.zeros((1, B, OBS)), jnp.zeros((1, B))), carry)
        x = normal(1, (T + 2, B, OBS)), some_resets((T + 2, B))

        def env_step(carry, x):
            return network.apply(variables, jax.tree.map(lambda leaf: leaf[None], x), carry)

        def loss(variables, carry):
            carry, values = network.apply(variables, x, carry)
            return jnp.mean(jnp.sin(values) + values**2), (carry, values)

        results = [jax.jit(jax.grad(loss, argnums=(0, 1) if with_carry else 0, has_aux=True))(variables, carry)]
        if with_carry:
            results.append(jax.jit(lambda carry: jax.lax.scan(env_step, carry, x))(carry))
        return variables, results

    paths = both(("jaxued", cell, start, with_carry), run, ResetRNN, documented("jaxued", "ResetRNN", implementation))
    assert {path.split("/")[1] for path in paths} - {"start", "start_h"} == {"Dense_0", f"{cell}_0", "critic"}


def test_reset_carry_may_differ_at_every_step():
    """`jaxrnn.gru` supports this, jaxued's class does not. Without a carry, the first of these states is the carry."""
    rnn = documented("jaxued", "ResetRNN", None)(nn.GRUCell(H))
    xs, resets, starts = normal(1, (T, B, D)), jnp.zeros((T, B)).at[2].set(1), normal(2, (T, B, H))
    variables = rnn.init(jax.random.key(0), (xs, resets))
    _, ys = rnn.apply(variables, (xs, resets), reset_carry=starts)
    for first, last in ((0, 2), (2, T)):
        part = xs[first:last], jnp.zeros((last - first, B))
        assert_close(ys[first:last], rnn.apply(variables, part, initial_carry=starts[first])[1])


def test_reset_rnn_rejects_inputs_without_resets():
    rnn = documented("jaxued", "ResetRNN", None)(nn.GRUCell(H))
    with pytest.raises(ValueError, match=r"ResetRNN: inputs must be the pair \(xs, resets\), got"):
        rnn.init(jax.random.key(0), jnp.zeros((T, B, D)))


class Torso(nn.Module):
    """As memorax's `Network`, which passes everything but the inputs by keyword, more than its `RNN` needs."""

    torso: nn.Module

    @nn.compact
    def __call__(self, observation, done, action, initial_carry=None):
        x = nn.relu(nn.Dense(D)(observation))
        carry, x = self.torso(x, done=done, action=action, reward=None, initial_carry=initial_carry)
        return carry, nn.Dense(1)(x)

    @nn.nowrap
    def initialize_carry(self, input_shape):
        return self.torso.initialize_carry(jax.random.key(0), input_shape)


@pytest.mark.parametrize("cell", ["GRUCell", "OptimizedLSTMCell"])
@IMPLEMENTATIONS
def test_memorax(implementation, cell):
    obs, done = normal(1, (B, T, OBS)), some_resets((B, T))
    action = jnp.zeros((B, T), int)

    def run(rnn):
        network = Torso(rnn(cell=getattr(nn, cell)(features=H)))
        zeros = network.initialize_carry((B, None))
        first = obs[:, :1], done[:, :1].astype(jnp.float32), action[:, :1]
        variables = network.init(jax.random.key(9), *first, initial_carry=zeros)

        def env_step(carry, x):
            carry, y = network.apply(variables, *(leaf[:, None] for leaf in x), initial_carry=carry)
            return carry, y[:, 0]

        def loss(variables, carry, obs):
            carry, values = network.apply(variables, obs, done, action, carry)
            return jnp.mean(jnp.sin(values)), (carry, values)

        carry = some_carry(cell, (B,), H)
        grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(variables, carry, obs)
        rollout = jax.jit(lambda carry: jax.lax.scan(env_step, carry, (obs.swapaxes(0, 1), done.T, action.T)))(carry)
        without_carry = jax.jit(lambda variables: network.apply(variables, obs, done, action))(variables)
        return variables, (zeros, grads, rollout, without_carry)

    paths = both(("memorax", cell), run, codebases.RNN, documented("memorax", "RNN", implementation))
    assert "params/torso/cell/hn/bias" in paths or "params/torso/cell/hi/bias" in paths


def test_memorax_calls_with_positional_arguments():
    """memorax's `RL2Wrapper` passes `(inputs, done, carry)`."""
    xs, done, carry = normal(1, (B, T, D)), some_resets((B, T)), some_carry("GRUCell", (B,), H)
    results = []
    for rnn in (codebases.RNN, documented("memorax", "RNN", None)):
        network = rnn(cell=nn.GRUCell(features=H))
        variables = network.init(jax.random.key(9), xs, done, carry)
        results.append(network.apply(variables, xs, done, carry))
    assert_close(results[1], results[0], tol=1e-5)


# --- a function in place of a scan -----------------------------------------------------------------------------------


class TorchLayoutGRU(nn.Module):
    """As xland-minigrid's, for one sequence: weights in PyTorch's layout."""

    hidden_dim: int
    dtype: Any
    run: Callable[..., tuple[jax.Array, jax.Array]]

    @nn.compact
    def __call__(self, xs, init_state):
        rows = 3 * self.hidden_dim
        glorot, orthogonal = nn.initializers.glorot_normal(in_axis=1, out_axis=0), nn.initializers.orthogonal(1.0, 0)
        weights = (
            self.param("Wi", glorot, (rows, xs.shape[-1])),
            self.param("Wh", orthogonal, (rows, self.hidden_dim)),
            self.param("bi", nn.initializers.normal(0.3), (rows,)),  # theirs are zeros, which hides where they go
            self.param("bn", nn.initializers.normal(0.3), (self.hidden_dim,)),
        )
        *weights, init_state, xs = promote_dtype(*weights, init_state, xs, dtype=self.dtype)
        last, states = self.run(*weights, init_state, xs)
        return states, last


class Layers(nn.Module):
    make: Callable[[], nn.Module]
    num_layers: int = 2

    @nn.compact
    def __call__(self, xs, init_state):
        outs, states = [], []
        for layer in range(self.num_layers):
            xs, state = self.make()(xs, init_state[layer])
            outs.append(xs)
            states.append(state)
        return sum(outs), jnp.stack(states)


def scanned(Wi, Wh, bi, bn, init_state, xs):
    def step(h, x):
        (x_r, x_z, x_n), (h_r, h_z, h_n) = jnp.split(Wi @ x + bi, 3), jnp.split(Wh @ h, 3)
        update = nn.sigmoid(x_z + h_z)
        h = (1 - update) * nn.tanh(x_n + nn.sigmoid(x_r + h_r) * (h_n + bn)) + update * h
        return h, h

    return jax.lax.scan(step, init_state, xs)


def as_documented(Wi, Wh, bi, bn, init_state, xs):
    names = {"Wi": Wi, "Wh": Wh, "bi": bi, "bn": bn, "init_state": init_state, "xs": xs}
    exec(snippet("xland-minigrid"), names)
    return names["last_state"], names["all_states"]


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        (None, None),
        (None, jnp.bfloat16),
        pytest.param("triton", None, marks=pytest.mark.interpret),
        pytest.param("triton", jnp.float16, marks=pytest.mark.interpret),  # interpreted bfloat16 products are wrong
        pytest.param("triton", jnp.bfloat16, marks=pytest.mark.gpu),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_xland_minigrid(implementation, dtype, monkeypatch):
    """`vmap` with shared weights puts the batch axis first. There are no resets. The carry is in `dtype` too."""
    monkeypatch.setattr(jaxrnn, "gru", functools.partial(jaxrnn.gru, implementation=implementation))
    xs, carry = normal(1, (B, T, D)), normal(2, (B, 2, H))

    def run(over_time, dtype):
        batched = nn.vmap(Layers, variable_axes={"params": None}, split_rngs={"params": False}, axis_name="batch")
        network = batched(functools.partial(TorchLayoutGRU, H, dtype, over_time))
        state = carry.astype(dtype or jnp.float32)
        variables = network.init(jax.random.key(10), xs[:, :1], state)

        def loss(variables, state, xs):
            outs, state = network.apply(variables, xs, state)
            return jnp.mean(jnp.sin(outs.astype(jnp.float32))), (outs, state)

        return variables, jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(variables, state, xs)

    in_dtype = functools.partial(run, dtype=dtype)
    paths = both(("xland", dtype), in_dtype, scanned, as_documented, tol=1e-5 if dtype is None else 2e-2)
    assert {path.rsplit("/", 1)[1] for path in paths} == {"Wi", "Wh", "bi", "bn"}
    if dtype is not None:
        exact = jax.tree.leaves(run(scanned, None)[1])
        errors = [
            sum(float(jnp.sum((x - y) ** 2)) for x, y in zip(jax.tree.leaves(results), exact, strict=True))
            for results in (in_dtype(as_documented)[1], RESULTS["xland", dtype][1])
        ]
        assert errors[0] < errors[1]  # theirs rounds the carry at every step, which costs accuracy


@pytest.mark.torch
def test_weights_of_a_torch_gru_convert_as_the_docs_say():
    """The weights are `[3H, F]` and `[3H, H]`, gates r, z, n, with two biases per gate; the docs say how to convert."""
    import torch

    module = torch.nn.GRU(D, H)
    weights = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}
    b_hh = weights["bias_hh_l0"].at[2 * H :].set(0)
    params = jaxrnn.GRUParams(
        w_ih=weights["weight_ih_l0"].T,
        w_hh=weights["weight_hh_l0"].T,
        b_ih=weights["bias_ih_l0"] + b_hh,
        b_hn=weights["bias_hh_l0"][2 * H :],
    )
    xs, carry = normal(1, (T, B, D)), normal(2, (B, H))
    _, got = jaxrnn.gru(params, carry, xs)
    with torch.no_grad():
        want, _ = module(torch.tensor(np.asarray(xs)), torch.tensor(np.asarray(carry))[None])
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-5, atol=1e-6)


# --- other libraries -------------------------------------------------------------------------------------------------


class ScannedInNNX(nnx.Module):
    """The recurrent layer of an agent in NNX as its author writes it."""

    def __init__(self, in_features, hidden_features, *, rngs):
        self.cell = nnx.OptimizedLSTMCell(in_features, hidden_features, rngs=rngs)

    def __call__(self, carry, xs, resets):
        def step(cell, carry, x):
            x, reset = x
            return cell(jax.tree.map(lambda state: jnp.where(reset[:, None], 0, state), carry), x)

        return nnx.scan(step, in_axes=(None, nnx.Carry, 0), out_axes=(nnx.Carry, 0))(self.cell, carry, (xs, resets))


class AgentInNNX(nnx.Module):
    """An agent with a layer whose initial values are drawn after those of its recurrent layer."""

    def __init__(self, recurrent, *, rngs):
        self.recurrent = recurrent(D, H, rngs=rngs)
        self.head = nnx.Linear(H, 2, rngs=rngs)

    def __call__(self, carry, xs, resets):
        carry, ys = self.recurrent(carry, xs, resets)
        return carry, self.head(ys)


@IMPLEMENTATIONS
def test_an_agent_in_nnx(implementation, monkeypatch):
    """The whole state of the agent stays: its paths, its initial values and the state of its random numbers."""
    monkeypatch.setattr(jaxrnn.nnx.RNN, "__init__", with_default(jaxrnn.nnx.RNN.__init__, implementation))
    names: dict[str, Any] = {"__name__": "docs"}
    exec(snippet("An agent in Flax NNX"), names)
    carry, xs, resets = some_carry("OptimizedLSTMCell", (B,), H), normal(1, (T, B, D)), some_resets((T, B))

    def loss(agent, carry):
        results = agent(carry, xs, resets)
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(results)), results

    def run(recurrent):
        agent = AgentInNNX(recurrent, rngs=nnx.Rngs(0))
        state = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(agent)))
        grads, results = nnx.jit(nnx.grad(loss, argnums=(0, 1), has_aux=True))(agent, carry)
        assert_identical(nnx.to_pure_dict(nnx.state(agent)), state)
        return state, (nnx.to_pure_dict(nnx.state(grads[0])), grads[1], results)

    paths = both("nnx", run, ScannedInNNX, names["Recurrent"])
    assert {"recurrent/cell/dense_i/kernel", "head/kernel"} < paths


@IMPLEMENTATIONS
def test_an_agent_in_equinox(implementation, monkeypatch):
    import equinox

    monkeypatch.setattr(jaxrnn, "gru", functools.partial(jaxrnn.gru, implementation=implementation))
    names: dict[str, Any] = {"__name__": "docs"}
    exec(snippet("An agent in Equinox"), names)
    cell = equinox.nn.GRUCell(D, H, key=jax.random.key(0))
    carry, xs, resets = normal(2, (B, H)), normal(1, (T, B, D)), some_resets((T, B))

    def scanned_steps(cell, carry, xs, resets):
        def step(carry, x):
            x, reset = x
            carry = jax.vmap(cell)(x, jnp.where(reset[:, None], 0, carry))
            return carry, carry

        return jax.lax.scan(step, carry, (xs, resets))

    def loss(cell, run):
        results = run(cell, carry, xs, resets)
        return sum(jnp.sum(jnp.sin(y)) for y in results), results

    grad = equinox.filter_jit(equinox.filter_grad(loss, has_aux=True))
    ours, want = (jax.tree.leaves(grad(cell, run)) for run in (names["sequence"], scanned_steps))
    assert len(ours) == len(want) == 6
    assert_close(ours, want, tol=1e-5)


@pytest.mark.torch
def test_cleanrl():
    import torch

    import torch_bridge.nn

    names: dict[str, Any] = {}
    exec(snippet("CleanRL (PyTorch)"), names)

    class Agent(torch.nn.Module):
        def __init__(self, lstm):
            super().__init__()
            self.network = torch.nn.Linear(OBS, D)
            self.lstm = lstm(D, H)

    def theirs(agent, x, state, done):
        """A step at a time, the state multiplied by what is not done."""
        hidden = agent.network(x / 255.0).reshape((-1, B, D))
        outputs = []
        for h, d in zip(hidden, done.reshape((-1, B)), strict=True):
            y, state = agent.lstm(h[None], tuple((1.0 - d).view(1, -1, 1) * part for part in state))
            outputs.append(y)
        return torch.flatten(torch.cat(outputs), 0, 1), state

    torch.manual_seed(0)
    agents = Agent(torch.nn.LSTM), Agent(torch_bridge.nn.LSTM)
    agents[1].load_state_dict(agents[0].state_dict())
    x, done = torch.randn(T * B, OBS), torch.from_numpy(np.array(some_resets((T, B)))).float().flatten()
    state = torch.randn(1, B, H), torch.randn(1, B, H)
    results = []
    for agent, run in zip(agents, (theirs, names["get_states"]), strict=True):
        y, (h, c) = run(agent, x, state, done)
        (y.sin().sum() + h.sum() + (2 * c).sum()).backward()
        results.append([y.detach(), h.detach(), c.detach(), *(p.grad for p in agent.parameters())])
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)


# --- the page --------------------------------------------------------------------------------------------------------


def test_subclass_sets_an_attribute_as_the_docs_say():
    names: dict[str, Any] = {"__name__": "docs"}
    exec(snippet("Before you change anything: whose done is it?"), names)
    x = jnp.zeros((1, B, D)), jnp.zeros((1, B))
    network = ActorCritic(names["ScannedRNN"])
    variables = network.init(jax.random.key(0), jnp.zeros((B, H)), (jnp.zeros((1, B, OBS)), x[1]))
    assert list(variables["params"]["ScannedRNN_0"]) == ["GRUCell_1"]
    assert names["ScannedRNN"]().implementation == "xla"


def test_every_code_base_in_the_table_has_a_section():
    links = re.findall(r"^\| .*\]\(#(.*?)\)", DOCS.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in SECTIONS}
    assert len(links) == len(set(links)) == 13
    assert set(links) <= anchors


def test_docs_name_the_code_bases_and_their_dates():
    row = r"^\| \[([\w-]+)\]\(https://github\.com/\S+\) \| (\d{4}-\d\d-\d\d) \|"
    rows = re.findall(row, DOCS.read_text(), re.MULTILINE)
    assert dict(rows) == {name: date for name, (_, date) in codebases.COMMITS.items()}
