"""Trains recurrent PPO in one jitted program, on tasks that need a memory.

    # a GRU and a control without memory on StatelessCartPole: a minute on 2 CPU cores
    python examples/recurrent_ppo.py
    # name the symbol seen four steps ago
    python examples/recurrent_ppo.py --env repeat --k 4
    # Flax's GRU beside jaxrnn's, on the same seeds
    python examples/recurrent_ppo.py --implementation flax auto --num-seeds 4
    # the environments sharded over four GPUs
    python examples/recurrent_ppo.py --num-devices 4

Environments, network, rollout, advantages and update are here. `training.py` has
options, progress, tables, figures, checkpoints, several devices, and the
recurrences of `--implementation`: jaxrnn's ("auto", "triton", "xla"), Flax's and
none. The example needs `pip install '.[examples]'` in a checkout.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from training import RECURRENCES, parse_agent, run_agent

from jaxrnn.linen import ScannedRNN

# Environments, each for any number of actors. A rollout draws the random numbers of all its steps beforehand (`draw`).


class StatelessCartPole:
    """CartPole (Barto et al. 1983) without velocities, which the agent must remember; 200 steps upright return 1."""

    name, num_actions, max_steps = "StatelessCartPole", 2, 200
    max_x, max_theta = 2.4, math.radians(12)

    def draw(self, key: Array, *shape: int) -> tuple[Array, ...]:
        """Draws five arrays `[*shape]`, the state in which the next episode begins, if a step ends one."""
        return *jax.random.uniform(key, (4, *shape), minval=-0.05, maxval=0.05), jnp.zeros(shape, jnp.int32)

    def reset(self, key: Array, batch: int) -> tuple[tuple[Array, ...], Array]:
        state = self.draw(key, batch)
        return state, self.observe(state)

    def step(self, state: tuple[Array, ...], action: Array, fresh: Any) -> tuple[Any, Array, Array, Array]:
        """Maps state and `fresh`, five arrays `[B]`, and `action [B]` to state, obs `[B, 2]`, reward and done `[B]`."""
        x, x_dot, theta, theta_dot, t = state
        force, gravity, pole_mass, mass, length, dt = 20.0 * action - 10.0, 9.8, 0.1, 1.1, 0.5, 0.02
        sin, cos = jnp.sin(theta), jnp.cos(theta)
        push = (force + pole_mass * length * theta_dot**2 * sin) / mass
        theta_acc = (gravity * sin - cos * push) / (length * (4 / 3 - pole_mass * cos**2 / mass))
        x_acc = push - pole_mass * length * theta_acc * cos / mass
        state = x + dt * x_dot, x_dot + dt * x_acc, theta + dt * theta_dot, theta_dot + dt * theta_acc, t + 1
        done = (jnp.abs(state[0]) > self.max_x) | (jnp.abs(state[2]) > self.max_theta) | (t + 1 >= self.max_steps)
        state = jax.tree.map(functools.partial(jnp.where, done), fresh, state)
        return state, self.observe(state), jnp.full(done.shape, 1 / self.max_steps), done

    def observe(self, state: tuple[Array, ...]) -> Array:
        """Returns the position and the angle, scaled, `[B, 2]`."""
        return jnp.stack([state[0] / self.max_x, state[2] / self.max_theta], axis=-1)


@dataclasses.dataclass(frozen=True)
class RepeatPrevious:
    """Asks for the symbol, one of 4, shown `k` steps ago (POPGym, Morad et al. 2023): all right is 1, guessing -0.5."""

    k: int = 4
    num_actions = 4
    name = property(lambda self: f"RepeatPrevious(k={self.k})")
    max_steps = property(lambda self: 52 * (1 + self.k // 32))  # one to three decks of cards for POPGym's 4, 32 and 64

    def draw(self, key: Array, *shape: int) -> Array:
        """Draws the symbols `[*shape]` that steps show."""
        return jax.random.randint(key, shape, 0, self.num_actions)

    def reset(self, key: Array, batch: int) -> tuple[tuple[Array, Array], Array]:
        symbols = self.draw(key, batch, self.k + 1)  # the last one is shown
        return (symbols, jnp.zeros(batch, jnp.int32)), jax.nn.one_hot(symbols[:, -1], self.num_actions)

    def step(self, state: tuple[Array, Array], action: Array, symbol: Array) -> tuple[Any, Array, Array, Array]:
        """Maps symbols `[B, k + 1]`, `t`, `action` and `symbol [B]` to state, obs `[B, 4]`, reward and done `[B]`."""
        symbols, t = state
        reward = jnp.where(action == symbols[:, 0], 1.0, -1.0) / (self.max_steps - self.k)
        done = t + 1 >= self.max_steps
        state = jnp.concatenate([symbols[:, 1:], symbol[:, None]], axis=1), jnp.where(done, 0, t + 1)
        return state, jax.nn.one_hot(symbol, self.num_actions), jnp.where(t >= self.k, reward, 0.0), done


class ActorCritic(nn.Module):
    """A network of a dense layer, a recurrence, and `layers` hidden layers each for policy and value."""

    num_actions: int
    recurrence: Callable[..., nn.Module]
    layers: int = 1

    @nn.compact
    def __call__(self, carry: Array, obs: Array, resets: Array) -> tuple[Array, Array, Array]:
        """Maps `obs [T, B, F]` and the previous dones, `resets [T, B]`, to logits `[T, B, A]` and values `[T, B]`."""
        orthogonal = nn.initializers.orthogonal
        dense = functools.partial(nn.Dense, carry.shape[-1], kernel_init=orthogonal(math.sqrt(2)))
        carry, x = self.recurrence(name="recurrence")(carry, (nn.relu(dense()(obs)), resets))
        policy = value = x
        for _ in range(self.layers):
            policy, value = nn.relu(dense()(policy)), nn.relu(dense()(value))
        logits = nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(policy)
        return carry, logits, nn.Dense(1, kernel_init=orthogonal(1.0))(value)[..., 0]


@dataclasses.dataclass(frozen=True)
class Config:
    env: Literal["cartpole", "repeat"] = "cartpole"
    k: int = 4
    implementation: str = "auto"
    num_envs: int = 64
    num_seeds: int = 1
    num_devices: int = 1
    seed: int = 0
    total_steps: int = 500_000
    rollout_steps: int = 128
    unroll: int = 8  # steps per iteration of a rollout's loop: XLA copies the carried arrays once per iteration
    hidden: int = 128
    epochs: int = 4
    minibatches: int = 4
    lr: float = 1e-3
    anneal_lr: bool | None = None  # None: on CartPole, which is solved in `total_steps`, unlike RepeatPrevious
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5

    updates = property(lambda self: math.ceil(self.total_steps / (self.num_envs * self.rollout_steps)))


class Actors(NamedTuple):
    env_state: Any
    obs: Array  # [B, F]
    done: Array  # [B]     whether `obs` is the first observation of an episode
    carry: Array  # [B, H]
    episode_return: Array  # [B]


class TrainState(NamedTuple):
    params: Any
    opt_state: Any
    key: Array
    actors: Actors


class Trajectory(NamedTuple):  # a rollout, each array [T, B, ...]
    obs: Array
    reset: Array  # the previous step's done
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    done: Array
    episode_return: Array  # return of the episode so far, with this step's reward


class Metrics(NamedTuple):  # sums over the episodes that finished in an update, because there may be none
    episodes: Array
    total_return: Array


def log_prob_of(logits: Array, action: Array) -> Array:
    # A sum over one-hot, because the gradient of a gather is a scatter, which is slow on a GPU.
    return jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(action, logits.shape[-1]), axis=-1)


class PPO:
    """The pure functions that train one agent by PPO (Schulman et al. 2017); `vmap` over seeds trains several.

    `axis` names an axis of `shard_map` or `vmap` over which the environments are sharded. The functions then train on
    one shard: they average over all shards what an update averages, and draw random numbers for theirs alone.
    """

    def __init__(self, config: Config, env: Any, network: nn.Module, axis: str | None = None):
        self.config, self.env, self.network, self.axis = config, env, network, axis
        gradient_steps = config.updates * config.epochs * config.minibatches
        lr = optax.linear_schedule(config.lr, 0.0, gradient_steps) if config.anneal_lr else config.lr
        self.optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(lr, eps=1e-5))

    def mean(self, tree: Any) -> Any:
        """Averages over the shards. All arrays form one vector: XLA would copy each of several before it sums them."""
        vector, unravel = ravel_pytree(tree)
        return tree if self.axis is None else unravel(jax.lax.pmean(vector, self.axis))

    def shard_key(self, key: Array) -> Array:
        return key if self.axis is None else jax.random.fold_in(key, jax.lax.axis_index(self.axis))

    def init(self, seed: Array) -> TrainState:
        """Returns the initial state of all environments, even if `axis` is given."""
        key, params_key, env_key = jax.random.split(jax.random.key(seed), 3)
        env_state, obs = self.env.reset(env_key, self.config.num_envs)
        carry, done = ScannedRNN.initialize_carry(len(obs), self.config.hidden), jnp.zeros(len(obs), bool)
        params = self.network.init(params_key, carry, obs[None], done[None])
        actors = Actors(env_state, obs, done, carry, jnp.zeros(len(obs)))
        return TrainState(params, self.optimizer.init(params), key, actors)

    def rollout(self, state: TrainState) -> tuple[TrainState, Trajectory]:
        """Acts for `rollout_steps` steps."""
        key, env_key, action_key = jax.random.split(state.key, 3)
        shape = self.config.rollout_steps, len(state.actors.done)
        draws = self.env.draw(self.shard_key(env_key), *shape)
        noise = jax.random.gumbel(self.shard_key(action_key), (*shape, self.env.num_actions))

        def step(actors: Actors, inputs: tuple[Any, Array]) -> tuple[Actors, Trajectory]:
            draw, noise = inputs
            carry, logits, value = self.network.apply(state.params, actors.carry, actors.obs[None], actors.done[None])
            action, value = jnp.argmax(logits[0] + noise, axis=-1), value[0]
            env_state, obs, reward, done = self.env.step(actors.env_state, action, draw)
            episode_return, log_prob = actors.episode_return + reward, log_prob_of(logits[0], action)
            seen = Trajectory(actors.obs, actors.done, action, log_prob, value, reward, done, episode_return)
            return Actors(env_state, obs, done, carry, jnp.where(done, 0.0, episode_return)), seen

        actors, seen = jax.lax.scan(step, state.actors, (draws, noise), unroll=self.config.unroll)
        return state._replace(actors=actors, key=key), seen

    def advantages(self, seen: Trajectory, last_value: Array) -> Array:
        """Returns generalized advantage estimates, which are cut at dones."""
        discount = self.config.gamma * (1.0 - seen.done)
        delta = seen.reward + discount * jnp.concatenate([seen.value[1:], last_value[None]]) - seen.value

        def step(advantage: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            delta, discount = inputs
            advantage = delta + self.config.gae_lambda * discount * advantage
            return advantage, advantage

        return jax.lax.scan(step, jnp.zeros_like(last_value), (delta, discount), reverse=True, unroll=16)[1]

    def normalize(self, advantage: Array) -> Array:
        """Normalizes `[minibatches, T, B]` over each minibatch, whose sequences may be on several devices."""
        centered = advantage - self.mean(advantage.mean(axis=(1, 2), keepdims=True))
        return centered / (jnp.sqrt(self.mean((centered**2).mean(axis=(1, 2), keepdims=True))) + 1e-8)

    def loss(self, params: Any, carry: Array, seen: Trajectory, advantage: Array, target: Array) -> Array:
        config = self.config
        _, logits, value = self.network.apply(params, carry, seen.obs, seen.reset)
        ratio = jnp.exp(log_prob_of(logits, seen.action) - seen.log_prob)
        clipped_ratio = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
        policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()
        clipped_value = seen.value + jnp.clip(value - seen.value, -config.clip, config.clip)
        value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped_value - target) ** 2).mean()
        entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1).mean()
        return policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Makes one rollout, then `epochs` passes over it in `minibatches` minibatches of whole sequences."""
        config, first_carry = self.config, state.actors.carry
        state, seen = self.rollout(state)
        actors = state.actors
        _, _, last_value = self.network.apply(state.params, actors.carry, actors.obs[None], actors.done[None])
        advantage = self.advantages(seen, last_value[0])
        target = advantage + seen.value
        key, shuffle_key = jax.random.split(state.key)

        def step(learner: tuple[Any, Any], minibatch: tuple[Array, Array]) -> tuple[tuple[Any, Any], None]:
            (params, opt_state), (envs, advantage) = learner, minibatch
            part, target_part = jax.tree.map(lambda x: x[:, envs], (seen, target))
            grads = self.mean(jax.grad(self.loss)(params, first_carry[envs], part, advantage, target_part))
            updates, opt_state = self.optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        permute = functools.partial(jax.random.permutation, x=len(actors.done))
        envs = jax.vmap(permute)(jax.random.split(self.shard_key(shuffle_key), config.epochs))  # [epochs, B]
        envs = envs.reshape(config.epochs * config.minibatches, -1)
        # Normalized for all minibatches at once, because every sum over devices waits for all of them.
        normalized = self.normalize(jnp.moveaxis(advantage[:, envs], 0, 1))
        (params, opt_state), _ = jax.lax.scan(step, (state.params, state.opt_state), (envs, normalized))
        return state._replace(params=params, opt_state=opt_state, key=key), self.metrics(seen)

    def train(self, state: TrainState, updates: int) -> tuple[TrainState, Metrics]:
        return jax.lax.scan(lambda state, _: self.update(state), state, length=updates)

    def metrics(self, seen: Trajectory) -> Metrics:
        metrics = Metrics(seen.done.sum(), jnp.sum(seen.done * seen.episode_return))
        return metrics if self.axis is None else jax.lax.psum(metrics, self.axis)


def make_ppo(config: Config, axis: str | None = None) -> PPO:
    env = {"cartpole": StatelessCartPole(), "repeat": RepeatPrevious(config.k)}[config.env]
    if config.anneal_lr is None:
        config = dataclasses.replace(config, anneal_lr=config.env == "cartpole")
    return PPO(config, env, ActorCritic(env.num_actions, RECURRENCES[config.implementation]), axis)


HELPS = {"k": "for repeat: steps since the symbol was shown"}
parse_arguments = functools.partial(parse_agent, make_ppo, Config(), ["auto", "none"], __doc__, HELPS)
main = functools.partial(run_agent, parse_arguments)

if __name__ == "__main__":
    main()
