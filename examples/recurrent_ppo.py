"""Trains recurrent PPO in one jitted program, on tasks that need a memory.

    # a GRU and a memoryless control on StatelessCartPole
    python examples/recurrent_ppo.py
    # name the symbol seen four steps ago
    python examples/recurrent_ppo.py --env repeat --k 4
    # Flax's GRU beside jaxrnn's, on the same seeds
    python examples/recurrent_ppo.py --compare
    # the environments sharded over four GPUs
    python examples/recurrent_ppo.py --num-devices 4
    # the same, in two processes of two GPUs each (the other one has --process-id 1)
    python examples/recurrent_ppo.py --num-devices 4 --num-processes 2 --process-id 0 --coordinator-address host:1234

Results are written after every run. Ctrl-C ends a run early and keeps what it
has learned until then.

Environment, rollout and update are one XLA program, in which `--num-seeds`
trains several agents at once. Only the recurrence is exchangeable.
`--implementation flax` is the scanned `GRUCell` of most JAX code bases. `auto`,
`triton` and `xla` are `jaxrnn.linen.ScannedRNN`, which replaces that cell with
the same parameters.

The example needs `pip install '.[examples]'` in a checkout.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from jaxrnn.linen import ScannedRNN

# Environments. Both are deterministic after a reset, so a rollout can draw all its random numbers beforehand.


class CartPoleState(NamedTuple):
    x: Array
    x_dot: Array
    theta: Array
    theta_dot: Array
    t: Array


@dataclasses.dataclass(frozen=True)
class StatelessCartPole:
    """CartPole (Barto et al. 1983) that shows positions but no velocities, which the agent must remember.

    The return is 1 if the pole stays up for all 200 steps.
    """

    name = "StatelessCartPole"
    obs_size, num_actions, max_steps = 2, 2, 200
    max_x, max_theta = 2.4, math.radians(12)

    def reset(self, key: Array) -> tuple[CartPoleState, Array]:
        x, x_dot, theta, theta_dot = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
        state = CartPoleState(x, x_dot, theta, theta_dot, jnp.int32(0))
        return state, self.observe(state)

    def step(self, state: CartPoleState, action: Array) -> tuple[CartPoleState, Array, Array, Array]:
        x, x_dot, theta, theta_dot, t = state
        force, gravity, pole_mass, mass, length, dt = 20.0 * action - 10.0, 9.8, 0.1, 1.1, 0.5, 0.02
        sin, cos = jnp.sin(theta), jnp.cos(theta)
        push = (force + pole_mass * length * theta_dot**2 * sin) / mass
        theta_acc = (gravity * sin - cos * push) / (length * (4 / 3 - pole_mass * cos**2 / mass))
        x_acc = push - pole_mass * length * theta_acc * cos / mass
        state = CartPoleState(
            x + dt * x_dot, x_dot + dt * x_acc, theta + dt * theta_dot, theta_dot + dt * theta_acc, t + 1
        )
        fallen = (jnp.abs(state.x) > self.max_x) | (jnp.abs(state.theta) > self.max_theta)
        return state, self.observe(state), jnp.float32(1 / self.max_steps), fallen | (state.t >= self.max_steps)

    def observe(self, state: CartPoleState) -> Array:
        return jnp.stack([state.x / self.max_x, state.theta / self.max_theta])


class RepeatPreviousState(NamedTuple):
    symbols: Array  # [max_steps]
    t: Array


@dataclasses.dataclass(frozen=True)
class RepeatPrevious:
    """A task that asks for the symbol, one of four, shown `k` steps ago (after POPGym, Morad et al. 2023).

    The return is 1 if every symbol is right and -1 if every symbol is wrong; guessing gives -0.5.
    """

    k: int = 4
    obs_size, num_actions = 4, 4

    @property
    def name(self) -> str:
        return f"RepeatPrevious(k={self.k})"

    @property
    def max_steps(self) -> int:
        return 52 * (1 + self.k // 32)  # one, two and three decks of cards for POPGym's k = 4, 32 and 64

    def reset(self, key: Array) -> tuple[RepeatPreviousState, Array]:
        state = RepeatPreviousState(jax.random.randint(key, (self.max_steps,), 0, self.num_actions), jnp.int32(0))
        return state, self.observe(state)

    def step(self, state: RepeatPreviousState, action: Array) -> tuple[RepeatPreviousState, Array, Array, Array]:
        symbols, t = state
        right = jnp.where(action == symbols[jnp.maximum(t - self.k, 0)], 1.0, -1.0)
        reward = jnp.where(t >= self.k, right / (self.max_steps - self.k), 0.0)
        state = RepeatPreviousState(symbols, t + 1)
        return state, self.observe(state), reward, state.t >= self.max_steps

    def observe(self, state: RepeatPreviousState) -> Array:
        return jax.nn.one_hot(state.symbols[jnp.minimum(state.t, self.max_steps - 1)], self.obs_size)


Environment = StatelessCartPole | RepeatPrevious


def step_and_reset(env: Environment, state: Any, action: Array, fresh: tuple[Any, Array]) -> tuple[Any, ...]:
    """Steps one environment. Where the episode ends, `fresh`, the `(state, obs)` of a new episode, takes over."""
    state, obs, reward, done = env.step(state, action)
    state, obs = jax.tree.map(functools.partial(jnp.where, done), fresh, (state, obs))
    return state, obs, reward, done


# Networks.


class FlaxScannedRNN(nn.Module):
    """A GRU with resets, as JAX code bases write it today: Flax's cell in `nn.scan`."""

    @functools.partial(nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False})
    @nn.compact
    def __call__(self, carry: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        ins, resets = inputs
        carry = jnp.where(resets[:, None], self.initialize_carry(*carry.shape), carry)
        return nn.GRUCell(features=carry.shape[-1])(carry, ins)

    @staticmethod
    def initialize_carry(batch: int, hidden: int) -> Array:
        return nn.GRUCell(features=hidden).initialize_carry(jax.random.key(0), (batch, hidden))


class Memoryless(nn.Module):
    """The control: a dense layer in place of the GRU, so that an action depends on one observation only."""

    @nn.compact
    def __call__(self, carry: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        ins, _ = inputs
        return carry, nn.tanh(nn.Dense(carry.shape[-1])(ins))


RECURRENCES: dict[str, Callable[..., nn.Module]] = {
    "auto": functools.partial(ScannedRNN, implementation=None),
    "triton": functools.partial(ScannedRNN, implementation="triton"),
    "xla": functools.partial(ScannedRNN, implementation="xla"),
    "flax": FlaxScannedRNN,
    "none": Memoryless,
}


class ActorCritic(nn.Module):
    """A network of a dense layer, a recurrence, and one hidden layer each for policy and value."""

    num_actions: int
    implementation: str

    @nn.compact
    def __call__(self, carry: Array, obs: Array, resets: Array) -> tuple[Array, Array, Array]:
        """Maps `obs [T, B, F]` and the previous dones, `resets [T, B]`, to logits `[T, B, A]` and values `[T, B]`."""
        width = carry.shape[-1]
        hidden_init, policy_init = nn.initializers.orthogonal(math.sqrt(2)), nn.initializers.orthogonal(0.01)
        x = nn.relu(nn.Dense(width, kernel_init=hidden_init)(obs))
        carry, x = RECURRENCES[self.implementation](name="recurrence")(carry, (x, resets))
        policy = nn.relu(nn.Dense(width, kernel_init=hidden_init)(x))
        value = nn.relu(nn.Dense(width, kernel_init=hidden_init)(x))
        logits = nn.Dense(self.num_actions, kernel_init=policy_init)(policy)
        return carry, logits, nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(value)[..., 0]


# PPO (Schulman et al. 2017).


@dataclasses.dataclass(frozen=True)
class Config:
    env: str = "cartpole"
    k: int = 4
    implementation: str = "auto"
    num_envs: int = 64
    num_seeds: int = 1
    num_devices: int = 1
    seed: int = 0
    total_steps: int = 500_000
    rollout_steps: int = 128
    hidden: int = 128
    epochs: int = 4
    minibatches: int = 4
    lr: float = 1e-3
    anneal_lr: bool | None = None  # None: where the task is solved in `total_steps`, which is CartPole
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5

    def __post_init__(self):
        sizes = ("k", "num_envs", "num_seeds", "num_devices", "total_steps", "rollout_steps", "hidden", "epochs")
        for name in (*sizes, "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_envs % (self.num_devices * self.minibatches):
            devices = f"{self.num_devices} devices x " if self.num_devices > 1 else ""
            raise ValueError(
                f"num_envs must be a multiple of {devices}{self.minibatches} minibatches, got {self.num_envs}"
            )
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite, got {self.lr}")

    @property
    def anneals_lr(self) -> bool:
        # Annealed, CartPole ends at its best return: 1.000 and 0.998 for seeds 0 and 1, instead of 0.993 and 0.996 on a
        # CPU. RepeatPrevious still improves after 500,000 steps: 0.50 and 0.40 annealed, instead of 0.75 and 0.69.
        return self.env == "cartpole" if self.anneal_lr is None else self.anneal_lr

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.rollout_steps

    @property
    def updates_per_call(self) -> int:
        """The number of updates per jitted call, chosen for 20 to 50 calls with the fewest extra updates."""
        updates = math.ceil(self.total_steps / self.steps_per_update)
        return min(range(math.ceil(updates / 50), max(updates // 20, 1) + 1), key=lambda size: -updates % size)

    @property
    def calls(self) -> int:
        return math.ceil(self.total_steps / (self.steps_per_update * self.updates_per_call))

    @property
    def updates(self) -> int:
        """The number of updates: `total_steps` rounded up to whole calls."""
        return self.calls * self.updates_per_call


def make_env(config: Config) -> Environment:
    return {"cartpole": StatelessCartPole(), "repeat": RepeatPrevious(config.k)}[config.env]


class TrainState(NamedTuple):
    params: Any
    opt_state: Any
    key: Array
    env_state: Any
    obs: Array  # [B, F]
    done: Array  # [B]     whether `obs` is the first observation of an episode
    carry: Array  # [B, H]
    episode_return: Array  # [B]


class Trajectory(NamedTuple):
    """The data of a rollout, each array `[T, B, ...]`."""

    obs: Array
    reset: Array  # the previous step's done
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    done: Array
    episode_return: Array  # return of the episode so far, with this step's reward


class Metrics(NamedTuple):
    """Sums over the episodes that finished in an update. They are not means, because there may be no such episode."""

    episodes: Array
    total_return: Array


def log_prob_of(logits: Array, action: Array) -> Array:
    # This is a sum over one-hot instead of a gather, because the gradient of a gather is a scatter, which is slow on a
    # GPU.
    return jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(action, logits.shape[-1]), axis=-1)


def advantages(config: Config, trajectory: Trajectory, last_value: Array) -> Array:
    """Returns generalized advantage estimates, which are cut at dones.

    They are A_t = d_t + gamma lambda A_t+1 with d_t = r_t + gamma V_t+1 - V_t, without the terms of t+1 where t is
    done.
    """
    discount = config.gamma * (1.0 - trajectory.done)
    next_value = jnp.concatenate([trajectory.value[1:], last_value[None]])
    delta = trajectory.reward + discount * next_value - trajectory.value

    def step(advantage: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        delta, discount = inputs
        advantage = delta + config.gae_lambda * discount * advantage
        return advantage, advantage

    _, result = jax.lax.scan(step, jnp.zeros_like(last_value), (delta, discount), reverse=True, unroll=16)
    return result


class PPO:
    """The pure functions of one agent's training: `init`, `rollout` and `update`.

    `axis` is the name of an axis of `shard_map` or `vmap` over which the environments are sharded. `rollout` and
    `update` then train on one shard: they average over the shards what an update averages over environments, and each
    shard draws random numbers of its own.
    """

    def __init__(self, config: Config, axis: str | None = None):
        self.config = config
        self.axis = axis
        self.env = make_env(config)
        self.network = ActorCritic(self.env.num_actions, config.implementation)
        gradient_steps = config.updates * config.epochs * config.minibatches
        lr = optax.linear_schedule(config.lr, 0.0, gradient_steps) if config.anneals_lr else config.lr
        self.optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(lr, eps=1e-5))

    def mean(self, tree: Any) -> Any:
        """Averages over the shards. All arrays form one vector: XLA would copy each of several before it sums them."""
        if self.axis is None:
            return tree
        vector, unravel = ravel_pytree(tree)
        return unravel(jax.lax.pmean(vector, self.axis))

    def sum_over_shards(self, tree: Any) -> Any:
        """Sums over the shards."""
        return tree if self.axis is None else jax.lax.psum(tree, self.axis)

    def shard_key(self, key: Array) -> Array:
        """Returns a key for this shard."""
        return key if self.axis is None else jax.random.fold_in(key, jax.lax.axis_index(self.axis))

    def init(self, seed: Array) -> TrainState:
        """Returns the initial state of all environments, even if `axis` is given."""
        config = self.config
        key, params_key, env_key = jax.random.split(jax.random.key(seed), 3)
        env_state, obs = jax.vmap(self.env.reset)(jax.random.split(env_key, config.num_envs))
        done = jnp.zeros(config.num_envs, bool)
        carry = ScannedRNN.initialize_carry(config.num_envs, config.hidden)
        params = self.network.init(params_key, carry, obs[None], done[None])
        episode_return = jnp.zeros(config.num_envs)
        return TrainState(params, self.optimizer.init(params), key, env_state, obs, done, carry, episode_return)

    def rollout(self, state: TrainState) -> tuple[TrainState, Trajectory]:
        """Acts for `rollout_steps` steps."""
        config, env = self.config, self.env
        key, env_key, action_key = jax.random.split(state.key, 3)
        shape = (config.rollout_steps, len(state.done))
        fresh = jax.vmap(jax.vmap(env.reset))(jax.random.split(self.shard_key(env_key), shape))
        noise = jax.random.gumbel(self.shard_key(action_key), (*shape, env.num_actions))

        def step(state: TrainState, inputs: tuple[Any, Array]) -> tuple[TrainState, Trajectory]:
            fresh, noise = inputs
            carry, logits, value = self.network.apply(state.params, state.carry, state.obs[None], state.done[None])
            action = jnp.argmax(logits[0] + noise, axis=-1)
            env_state, obs, reward, done = jax.vmap(functools.partial(step_and_reset, env))(
                state.env_state, action, fresh
            )
            episode_return = state.episode_return + reward
            log_prob = log_prob_of(logits[0], action)
            trajectory = Trajectory(state.obs, state.done, action, log_prob, value[0], reward, done, episode_return)
            episode_return = jnp.where(done, 0.0, episode_return)
            state = state._replace(env_state=env_state, obs=obs, done=done, carry=carry, episode_return=episode_return)
            return state, trajectory

        # XLA copies the carried arrays once per iteration, so several steps per iteration take fewer copies
        return jax.lax.scan(step, state._replace(key=key), (fresh, noise), unroll=8)

    def loss(self, params: Any, carry: Array, trajectory: Trajectory, advantage: Array, target: Array) -> Array:
        config = self.config
        _, logits, value = self.network.apply(params, carry, trajectory.obs, trajectory.reset)
        ratio = jnp.exp(log_prob_of(logits, trajectory.action) - trajectory.log_prob)
        clipped_ratio = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
        policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()
        clipped_value = trajectory.value + jnp.clip(value - trajectory.value, -config.clip, config.clip)
        value_loss = 0.5 * jnp.maximum((value - target) ** 2, (clipped_value - target) ** 2).mean()
        entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1).mean()
        return policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy

    def normalize(self, advantage: Array) -> Array:
        """Normalizes `[minibatches, T, B]` over each minibatch, whose sequences may be on several devices."""
        centered = advantage - self.mean(advantage.mean(axis=(1, 2), keepdims=True))
        return centered / (jnp.sqrt(self.mean((centered**2).mean(axis=(1, 2), keepdims=True))) + 1e-8)

    def update(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """Makes one rollout, then `epochs` passes over it in `minibatches` minibatches of whole sequences."""
        config = self.config
        first_carry = state.carry
        state, trajectory = self.rollout(state)
        _, _, last_value = self.network.apply(state.params, state.carry, state.obs[None], state.done[None])
        advantage = advantages(config, trajectory, last_value[0])
        target = advantage + trajectory.value
        key, shuffle_key = jax.random.split(state.key)

        def step(learner: tuple[Any, Any], minibatch: tuple[Array, Array]) -> tuple[tuple[Any, Any], None]:
            params, opt_state = learner
            envs, advantage = minibatch
            part, target_part = jax.tree.map(lambda x: x[:, envs], (trajectory, target))
            grads = self.mean(jax.grad(self.loss)(params, first_carry[envs], part, advantage, target_part))
            updates, opt_state = self.optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        permute = functools.partial(jax.random.permutation, x=len(state.done))
        envs = jax.vmap(permute)(jax.random.split(self.shard_key(shuffle_key), config.epochs))  # [epochs, B]
        envs = envs.reshape(config.epochs * config.minibatches, -1)
        # normalized for all minibatches at once, because every sum over devices waits for all of them
        normalized = self.normalize(jnp.moveaxis(advantage[:, envs], 0, 1))
        (params, opt_state), _ = jax.lax.scan(step, (state.params, state.opt_state), (envs, normalized))
        metrics = self.sum_over_shards(
            Metrics(trajectory.done.sum(), jnp.sum(trajectory.done * trajectory.episode_return))
        )
        return state._replace(params=params, opt_state=opt_state, key=key), metrics


# Training.

AXIS = "devices"


class Train(NamedTuple):
    """The functions that train `num_seeds` agents at once; the first axis of every array is that of the agents."""

    init: Callable[[Array], TrainState]  # seeds [S]
    run: Callable[[TrainState], tuple[TrainState, Metrics]]  # `updates_per_call` updates; metrics [S, updates]


def make_train(config: Config, *, shards_on_one_device: bool = False) -> Train:
    """Returns the jitted functions that train on `num_devices` devices.

    Args:
      config: the options of the training.
      shards_on_one_device: whether to compute on one device what `num_devices` devices compute, with `vmap` instead of
        `shard_map`. The results are equal up to rounding.
    """
    ppo = PPO(config, AXIS if config.num_devices > 1 else None)

    def run(state: TrainState) -> tuple[TrainState, Metrics]:
        return jax.lax.scan(lambda state, _: ppo.update(state), state, length=config.updates_per_call)

    # Agents are initialized one by one: orthogonal initial weights need a QR decomposition, and that of a batch in
    # jaxlib 0.10.2 can deadlock on a CPU.
    init = jax.jit(functools.partial(jax.lax.map, ppo.init))
    agents = jax.vmap(run)
    if config.num_devices == 1:
        return Train(init, jax.jit(agents, donate_argnums=0))
    if shards_on_one_device:
        return Train(init, jax.jit(with_shards(agents, config.num_devices), donate_argnums=0))
    mesh, specs = make_mesh(config.num_devices), on_environments(P(), P(None, AXIS))
    # With `check_vma`, gradients of replicated arrays would arrive summed over the devices, which `vmap` does not do.
    sharded = jax.shard_map(agents, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()), check_vma=False)
    placement = on_environments(*(NamedSharding(mesh, spec) for spec in (P(), P(None, AXIS))))
    place = jax.jit(lambda state: state, out_shardings=placement)  # works on several hosts, unlike device_put of a key
    return Train(lambda seeds: place(init(seeds)), jax.jit(sharded, donate_argnums=0))


def on_environments(replicated: Any, sharded: Any) -> TrainState:
    """Returns `sharded` for the fields with an axis of environments, and `replicated` for the other fields.

    The axis of environments is the second one, after that of the agents.
    """
    return TrainState(
        params=replicated,
        opt_state=replicated,
        key=replicated,
        env_state=sharded,
        obs=sharded,
        done=sharded,
        carry=sharded,
        episode_return=sharded,
    )


def with_shards(agents: Callable[..., Any], shards: int) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    """Maps `agents`, which is written for one shard of the environments, over all shards on one device."""
    axes = on_environments(None, 1)
    mapped = jax.vmap(agents, in_axes=(axes,), out_axes=(axes, None), axis_size=shards, axis_name=AXIS)

    def environments(change: Callable[[Array], Array], state: TrainState) -> TrainState:
        return TrainState(
            *(x if axis is None else jax.tree.map(change, x) for x, axis in zip(state, axes, strict=True))
        )

    def run(state: TrainState) -> tuple[TrainState, Metrics]:
        split = environments(lambda x: x.reshape(x.shape[0], shards, -1, *x.shape[2:]), state)
        split, metrics = mapped(split)
        return environments(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), split), metrics

    return run


def make_mesh(num_devices: int) -> Mesh:
    """Returns a mesh of the first `num_devices` of JAX's devices, which may be on several hosts.

    Raises:
      ValueError: JAX has fewer devices.
    """
    devices = jax.devices()
    if len(devices) < num_devices:
        raise ValueError(
            f"num_devices is {num_devices}, but JAX has {len(devices)} here ({devices[0].device_kind}); on a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_devices} provides them"
        )
    return jax.make_mesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:num_devices])


@dataclasses.dataclass(frozen=True)
class Result:
    config: Config
    compile_seconds: float
    seconds: float  # of all calls but the first, which warms up, if there are several
    steps_per_second: float  # env steps of all seeds per second
    episodes: np.ndarray  # [S, updates]
    total_return: np.ndarray  # [S, updates]
    finished: bool = True  # False if Ctrl-C ended the training

    @property
    def label(self) -> str:
        if self.config.implementation == "none":
            return "no memory (control)"
        return f"GRU-{self.config.hidden} ({self.config.implementation})"

    @property
    def steps(self) -> np.ndarray:
        """The env steps of one agent after each update."""
        return (1 + np.arange(self.episodes.shape[1])) * self.config.steps_per_update

    @property
    def curve(self) -> np.ndarray:
        """The mean return of the episodes that finished in each update `[S, updates]`; NaN where none did."""
        return mean_return(self.episodes, self.total_return)

    @property
    def final_return(self) -> np.ndarray:
        """The mean return of the episodes that finished in the last tenth of training `[S]`."""
        tail = slice(-math.ceil(self.episodes.shape[1] / 10), None)
        return mean_return(self.episodes[:, tail].sum(axis=1), self.total_return[:, tail].sum(axis=1))

    def to_json(self) -> dict[str, Any]:
        config = self.config
        return {
            "implementation": config.implementation,
            "env": make_env(config).name,
            "num_envs": config.num_envs,
            "num_devices": config.num_devices,
            "seeds": list(range(config.seed, config.seed + config.num_seeds)),
            "total_steps": int(self.steps[-1]),
            "finished": self.finished,
            "steps_per_second": self.steps_per_second,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "final_return": without_nan(self.final_return),
            "curve": {"steps": self.steps.tolist(), "return": without_nan(self.curve)},
            "config": dataclasses.asdict(config),
        }


def mean_return(episodes: np.ndarray, total_return: np.ndarray) -> np.ndarray:
    return np.where(episodes > 0, total_return / np.maximum(episodes, 1), np.nan)


def without_nan(values: np.ndarray) -> list[Any]:
    """Returns nested lists with None instead of NaN, which JSON does not have."""
    return np.where(np.isnan(values), None, values).tolist()


def train(config: Config) -> Result:
    """Trains `num_seeds` agents at once, and the first process shows a progress bar. Ctrl-C ends the training early.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed before there was anything to report.
    """
    name = "control" if config.implementation == "none" else config.implementation
    shows = jax.process_index() == 0
    if shows:
        print(f"{name:>7}: compiling ...", end="\r", file=sys.stderr, flush=True)  # the progress bar replaces it
    init, run = make_train(config)
    began = time.perf_counter()
    state = init(config.seed + jnp.arange(config.num_seeds))
    run = run.lower(state).compile()
    compile_seconds = time.perf_counter() - began

    steps_per_call = config.updates_per_call * config.steps_per_update * config.num_seeds
    warm_up = min(config.calls - 1, 1)  # the number of calls that are not timed
    metrics: list[Metrics] = []
    shown, finished, started, ended = 0, False, time.perf_counter(), 0.0
    total = config.calls * steps_per_call
    with tqdm(total=total, desc=f"{name:>7}", unit=" steps", unit_scale=True, disable=not shows) as bar:
        try:
            while shown < config.calls:
                if len(metrics) < config.calls:
                    state, submitted = run(state)
                    metrics.append(submitted)
                    if len(metrics) == warm_up:
                        jax.block_until_ready(submitted)
                        started = time.perf_counter()
                    if len(metrics) == 1:  # metrics are read one call late, so that the device has work meanwhile
                        continue
                episodes, total_return = jax.device_get(metrics[shown])
                if episodes.any():
                    bar.set_postfix_str(f"return {total_return.sum() / episodes.sum():.2f}", refresh=False)
                bar.update(steps_per_call)
                shown, ended = shown + 1, time.perf_counter()
            finished = True
        except KeyboardInterrupt:
            if shown <= warm_up:
                raise
    episodes, total_return = (np.concatenate(parts, axis=1) for parts in zip(*metrics[:shown], strict=True))
    seconds = ended - started
    speed = (shown - warm_up) * steps_per_call / seconds
    return Result(config, compile_seconds, seconds, speed, episodes, total_return, finished)


def machine() -> str:
    """Returns the device and the versions of the packages in one line."""
    device = jax.devices()[0]
    kind = f"CPU ({os.cpu_count()} cores)" if device.platform == "cpu" else device.device_kind
    packages = ["jax", "flax", *(name for name in ("torch", "triton") if name in sys.modules)]
    return ", ".join([kind, *(f"{name} {importlib.metadata.version(name)}" for name in packages)])


def table_of(results: Sequence[Result]) -> Table:
    config = results[0].config
    baseline = results[0] if [result.config.implementation for result in results[:2]] == ["flax", "xla"] else None
    steps = f"{config.updates * config.steps_per_update:,} steps each"
    table = Table(title=f"{describe(config)}, {steps}", caption=machine())
    for header in ("recurrence", "final return", "env steps/s", *(["x flax"] if baseline else []), "compile"):
        table.add_column(header, justify="left" if header == "recurrence" else "right")
    for result in results:
        returns = result.final_return
        spread = f" ± {returns.std():.2f}" if len(returns) > 1 else ""
        ratio = [f"{result.steps_per_second / baseline.steps_per_second:.2f}"] if baseline else []
        speed, compile_time = f"{result.steps_per_second:,.0f}", f"{result.compile_seconds:.1f} s"
        label = result.label if result.finished else f"{result.label}, stopped"
        table.add_row(label, f"{returns.mean():.2f}{spread}", speed, *ratio, compile_time)
    return table


def describe(config: Config) -> str:
    seeds = f"{config.num_seeds} seed{'s' if config.num_seeds > 1 else ''}"
    devices = f", {config.num_devices} devices" if config.num_devices > 1 else ""
    return f"{make_env(config).name}, {config.num_envs} envs, {seeds}{devices}"


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the mean of the last `width` values at each point, without NaN."""
    windows = [values[..., max(i - width + 1, 0) : i + 1] for i in range(values.shape[-1])]
    counts = [np.maximum((~np.isnan(window)).sum(axis=-1), 1) for window in windows]
    return np.stack([np.nansum(w, axis=-1) / n for w, n in zip(windows, counts, strict=True)], axis=-1)


def plot(results: Sequence[Result], path: Path) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(1.0, color="0.6", linewidth=1, linestyle=":")
    # The curves of implementations coincide until rounding separates them. Dashes let the curve below show through.
    styles = (("#0072b2", "-"), ("#d55e00", (0, (4, 2))), ("#009e73", (0, (1, 1))))
    for result, (color, dashes) in zip(results, styles, strict=False):
        curves = smoothed(result.curve, max(len(result.steps) // 40, 1))
        steps = result.steps / 1e6
        for curve in result.curve if len(result.curve) == 1 else curves:
            axes.plot(steps, curve, color=color, linewidth=0.8, alpha=0.35)
        label = f"{result.label}: {result.steps_per_second:,.0f} steps/s"
        axes.plot(steps, curves.mean(axis=0), color=color, linewidth=2, linestyle=dashes, label=label)
    axes.set(xlabel="environment steps (millions)", ylabel="mean return (higher is better, at most 1)", xmargin=0.01)
    axes.set_title(f"Recurrent PPO on {describe(results[0].config)}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, dpi=150)


def whole_number(text: str) -> int:
    """Returns the int that `text` is in any notation, such as 1000000, 1_000_000 or 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number, such as 500000, 500_000 or 5e5, got {text!r}")
    return int(value)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--env", choices=["cartpole", "repeat"], default=Config.env, help="default: %(default)s")
    add(
        "--k",
        type=whole_number,
        default=Config.k,
        help="for repeat: steps since the symbol was shown (default: %(default)s)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--implementation", choices=list(RECURRENCES), default=Config.implementation, help="none means only the control"
    )
    which.add_argument(
        "--compare", action="store_true", help="train with flax, xla and, on a GPU, triton, one after the other"
    )
    add("--control", action=argparse.BooleanOptionalAction, default=True, help="train the memoryless control too")
    add("--num-envs", type=whole_number, default=Config.num_envs, help="environments per agent (default: %(default)s)")
    add(
        "--num-seeds", type=whole_number, default=Config.num_seeds, help="agents trained at once (default: %(default)s)"
    )
    add(
        "--num-devices",
        type=whole_number,
        default=Config.num_devices,
        help="devices that share the environments (default: 1)",
    )
    add(
        "--seed",
        type=whole_number,
        default=Config.seed,
        help="first seed; the others count up from it (default: %(default)s)",
    )
    steps = "env steps per agent, rounded up to whole updates and to equal calls (default: %(default)s)"
    add("--total-steps", type=whole_number, default=Config.total_steps, help=steps)
    add(
        "--rollout-steps",
        type=whole_number,
        default=Config.rollout_steps,
        help="steps per rollout (default: %(default)s)",
    )
    add("--hidden", type=whole_number, default=Config.hidden, help="width of the GRU (default: %(default)s)")
    add("--lr", type=float, default=Config.lr, help="Adam's learning rate (default: %(default)s)")
    anneal = "lower the learning rate to zero over the run (default: only for cartpole)"
    add("--anneal-lr", action=argparse.BooleanOptionalAction, default=Config.anneal_lr, help=anneal)
    add("--out", type=Path, default=Path("outputs"), help="folder for the PNG and the JSON (default: %(default)s)")
    processes = parser.add_argument_group(
        "several processes", "Each runs this command; the first one writes. See jax.distributed.initialize."
    )
    processes.add_argument("--num-processes", type=whole_number, help="default: this one alone")
    processes.add_argument("--process-id", type=whole_number, help="0 is the first process")
    processes.add_argument("--coordinator-address", help="host:port, on the host of the first process")
    namespace = parser.parse_args(arguments)
    if namespace.num_processes is not None:
        try:
            jax.distributed.initialize(namespace.coordinator_address, namespace.num_processes, namespace.process_id)
        except ValueError as error:
            parser.error(str(error))
        if namespace.num_devices != jax.device_count():
            parser.error(
                f"--num-devices must be that of all processes, which have {jax.device_count()}, got "
                f"{namespace.num_devices}"
            )
    elif namespace.process_id is not None or namespace.coordinator_address is not None:
        parser.error("--process-id and --coordinator-address need --num-processes")
    if namespace.compare:
        namespace.implementations = ["flax", "xla", *(["triton"] if jax.default_backend() == "gpu" else [])]
    elif namespace.implementation == "none":
        if not namespace.control:
            parser.error("--implementation none trains the control alone, which --no-control excludes: give only one")
        namespace.implementations = ["none"]
    else:
        namespace.implementations = [namespace.implementation, *(["none"] if namespace.control else [])]
    fields = {field.name for field in dataclasses.fields(Config)}
    try:
        namespace.config = Config(**{name: value for name, value in vars(namespace).items() if name in fields})
        if namespace.config.num_devices > 1:
            make_mesh(namespace.config.num_devices)
        if "triton" in namespace.implementations:
            ppo = PPO(dataclasses.replace(namespace.config, implementation="triton"))
            jax.eval_shape(ppo.init, 0)  # raises if the kernels cannot run
        if jax.process_index() == 0:
            namespace.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=namespace.out):  # raises if the folder takes no files
                pass
    except (NotImplementedError, OSError, ValueError) as error:
        parser.error(str(error))
    return namespace


def write(results: Sequence[Result], stem: Path) -> None:
    """Writes the learning curves and the figures of the runs so far."""
    plot(results, stem.with_suffix(".png"))
    report = {"machine": machine(), "runs": [result.to_json() for result in results]}
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parse_arguments(arguments)
    config = options.config
    stem = options.out / f"recurrent_ppo_{config.env}{'_compare' if options.compare else ''}"
    results: list[Result] = []
    finished = False
    try:
        for name in options.implementations:
            results.append(train(dataclasses.replace(config, implementation=name)))
            if jax.process_index() == 0:
                write(results, stem)
            if not results[-1].finished:
                break
        finished = results[-1].finished
    except KeyboardInterrupt:
        pass
    console = Console()
    if results and jax.process_index() == 0:
        console.print(table_of(results))
        pictures, figures = stem.with_suffix(".png"), stem.with_suffix(".json")
        console.print(f"learning curves: {pictures}, figures: {figures}", soft_wrap=True)
    if not finished:
        sys.exit("interrupted")
    return results


if __name__ == "__main__":
    main()
