"""Trains purejaxrl's recurrent PPO on gymnax, before and after the import.

    # jaxrnn's GRU on MemoryChain
    python examples/gymnax_ppo.py
    # Flax's GRU in nn.scan, which it replaces
    python examples/gymnax_ppo.py --rnn flax
    # one after the other, from the same seed
    python examples/gymnax_ppo.py --rnn both
    python examples/gymnax_ppo.py --memory-length 30 --total-steps 2e6
    python examples/gymnax_ppo.py --env CartPole-v1 --total-steps 5e5

MemoryChain (Osband et al. 2020) shows a bit at the first step of an episode and
asks for it at the last, which is `--memory-length` steps later. The return is 1
if the answer is right and -1 if it is wrong, so an agent without memory gets 0
on average. `--env` takes the name of any environment of gymnax with discrete
actions.

The only difference between the two agents is the class `ScannedRNN`. Its
parameters have the same names and initial values, so both train alike until
rounding separates them.

The example needs `pip install '.[gymnax]'` in a checkout.
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
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from gymnax.environments.spaces import Discrete
from gymnax.wrappers.purerl import FlattenObservationWrapper, LogWrapper
from jax import Array
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import jaxrnn.linen

# Before the import: a class of its own.


class FlaxScannedRNN(nn.Module):
    @functools.partial(nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False})
    @nn.compact
    def __call__(self, carry: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        ins, resets = x
        carry = jnp.where(resets[:, None], self.initialize_carry(*carry.shape), carry)
        return nn.GRUCell(features=carry.shape[-1])(carry, ins)

    @staticmethod
    def initialize_carry(batch_size: int, hidden_size: int) -> Array:
        return jnp.zeros((batch_size, hidden_size))


# After it.


class ScannedRNN(jaxrnn.linen.ScannedRNN):
    cell_name: str | None = "GRUCell_0"  # the class above creates no cell in `initialize_carry`


RNNS: dict[str, Any] = {"flax": FlaxScannedRNN, "jaxrnn": ScannedRNN}


class ActorCritic(nn.Module):
    num_actions: int
    rnn: str

    @nn.compact
    def __call__(self, carry: Array, x: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Maps `obs [T, B, F]` and `resets [T, B]` to logits `[T, B, A]` and values `[T, B]`."""
        obs, resets = x
        width = carry.shape[-1]
        hidden, policy = nn.initializers.orthogonal(math.sqrt(2)), nn.initializers.orthogonal(0.01)
        embedding = nn.relu(nn.Dense(width, kernel_init=hidden)(obs))
        carry, embedding = RNNS[self.rnn](name="rnn")(carry, (embedding, resets))
        actor = nn.relu(nn.Dense(width, kernel_init=hidden)(embedding))
        critic = nn.relu(nn.Dense(width, kernel_init=hidden)(embedding))
        logits = nn.Dense(self.num_actions, kernel_init=policy)(actor)
        return carry, logits, nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0))(critic)[..., 0]


@dataclasses.dataclass(frozen=True)
class Config:
    env: str = "MemoryChain-bsuite"
    memory_length: int = 10
    rnn: str = "jaxrnn"
    num_envs: int = 32
    rollout_steps: int = 64
    total_steps: int = 100_000
    hidden: int = 64
    epochs: int = 4
    minibatches: int = 4
    lr: float = 2e-3
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    value_weight: float = 0.5
    entropy_weight: float = 0.01
    max_grad_norm: float = 0.5
    seed: int = 0

    def __post_init__(self):
        sizes = ("memory_length", "num_envs", "rollout_steps", "total_steps", "hidden", "epochs", "minibatches")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_envs % self.minibatches:
            raise ValueError(f"num_envs must be a multiple of {self.minibatches} minibatches, got {self.num_envs}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite, got {self.lr}")
        if self.env not in gymnax.registered_envs:
            raise ValueError(f"gymnax has no environment {self.env}; it has {', '.join(gymnax.registered_envs)}")

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.rollout_steps

    @property
    def updates(self) -> int:
        return math.ceil(self.total_steps / self.steps_per_update)


def make_env(config: Config) -> tuple[Any, Any]:
    """Returns the environment, wrapped as in purejaxrl, and its parameters.

    Raises:
      ValueError: its actions are not discrete.
    """
    env, params = gymnax.make(config.env)
    if config.env == Config.env:
        params = params.replace(memory_length=config.memory_length)
    if not isinstance(env.action_space(params), Discrete):
        raise ValueError(f"the actions of {config.env} are not discrete, which this agent needs")
    return LogWrapper(FlattenObservationWrapper(env)), params


class Transition(NamedTuple):
    """Each array is `[T, B, ...]`."""

    last_done: Array  # the done that came with `obs`: the network is run again on this one
    action: Array
    value: Array
    reward: Array
    log_prob: Array
    obs: Array
    done: Array
    finished_return: Array  # return of the episode that this step ended


class State(NamedTuple):
    params: Any
    opt_state: Any
    env_state: Any
    obs: Array  # [B, F]
    last_done: Array  # [B]
    carry: Array  # [B, H]
    key: Array


class Train(NamedTuple):
    init: Callable[[Array], State]
    update: Callable[[State], tuple[State, tuple[Array, Array]]]  # number of episodes that ended, sum of their returns


def log_prob_of(logits: Array, action: Array) -> Array:
    return jnp.sum(jax.nn.log_softmax(logits) * jax.nn.one_hot(action, logits.shape[-1]), axis=-1)


def make_train(config: Config) -> Train:
    """Returns the jitted functions of a training."""
    env, env_params = make_env(config)
    network = ActorCritic(env.action_space(env_params).n, config.rnn)
    gradient_steps = config.updates * config.epochs * config.minibatches
    lr = optax.linear_schedule(config.lr, 0.0, gradient_steps)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(lr, eps=1e-5))

    def init(seed: Array) -> State:
        key, params_key, env_key = jax.random.split(jax.random.key(seed), 3)
        obs, env_state = jax.vmap(env.reset, (0, None))(jax.random.split(env_key, config.num_envs), env_params)
        last_done = jnp.zeros(config.num_envs, bool)
        carry = RNNS[config.rnn].initialize_carry(config.num_envs, config.hidden)
        params = network.init(params_key, carry, (obs[None], last_done[None]))
        return State(params, optimizer.init(params), env_state, obs, last_done, carry, key)

    def env_step(state: State, _: None) -> tuple[State, Transition]:
        key, action_key, step_key = jax.random.split(state.key, 3)
        carry, logits, value = network.apply(state.params, state.carry, (state.obs[None], state.last_done[None]))
        action = jax.random.categorical(action_key, logits[0])
        keys = jax.random.split(step_key, config.num_envs)
        step = jax.vmap(env.step, (0, 0, 0, None))
        obs, env_state, reward, terminated, truncated, info = step(keys, state.env_state, action, env_params)
        done = terminated | truncated  # an episode that is cut off by time ends for the recurrent state too
        seen = Transition(
            state.last_done, action, value[0], reward.astype(jnp.float32), log_prob_of(logits[0], action), state.obs,
            done, jnp.where(done, info["returned_episode_returns"], 0.0),
        )  # fmt: skip
        return state._replace(env_state=env_state, obs=obs, last_done=done, carry=carry, key=key), seen

    def advantages(seen: Transition, last_value: Array) -> Array:
        def step(carry: tuple[Array, Array], seen: Transition) -> tuple[tuple[Array, Array], Array]:
            advantage, next_value = carry
            keep = config.gamma * (1.0 - seen.done)
            advantage = seen.reward + keep * (next_value + config.gae_lambda * advantage) - seen.value
            return (advantage, seen.value), advantage

        return jax.lax.scan(step, (jnp.zeros_like(last_value), last_value), seen, reverse=True)[1]

    def loss(params: Any, carry: Array, seen: Transition, advantage: Array) -> Array:
        _, logits, value = network.apply(params, carry, (seen.obs, seen.last_done))
        target = advantage + seen.value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = jnp.exp(log_prob_of(logits, seen.action) - seen.log_prob)
        clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
        policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
        near = seen.value + jnp.clip(value - seen.value, -config.clip, config.clip)
        value_loss = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()
        entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1).mean()
        return policy_loss + config.value_weight * value_loss - config.entropy_weight * entropy

    def update(state: State) -> tuple[State, tuple[Array, Array]]:
        first_carry = state.carry
        state, seen = jax.lax.scan(env_step, state, length=config.rollout_steps)
        _, _, last_value = network.apply(state.params, state.carry, (state.obs[None], state.last_done[None]))
        batch = seen, advantages(seen, last_value[0])
        key, shuffle_key = jax.random.split(state.key)

        def minibatch(learner: tuple[Any, Any], envs: Array) -> tuple[tuple[Any, Any], None]:
            params, opt_state = learner
            grads = jax.grad(loss)(params, first_carry[envs], *jax.tree.map(lambda x: x[:, envs], batch))
            updates, opt_state = optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, updates), opt_state), None

        permute = functools.partial(jax.random.permutation, x=config.num_envs)
        envs = jax.vmap(permute)(jax.random.split(shuffle_key, config.epochs))
        envs = envs.reshape(config.epochs * config.minibatches, -1)
        (params, opt_state), _ = jax.lax.scan(minibatch, (state.params, state.opt_state), envs)
        state = state._replace(params=params, opt_state=opt_state, key=key)
        return state, (seen.done.sum(), seen.finished_return.sum())

    return Train(jax.jit(init), jax.jit(update, donate_argnums=0))


@dataclasses.dataclass(frozen=True)
class Result:
    config: Config
    compile_seconds: float
    steps_per_second: float
    episodes: np.ndarray  # [updates]
    total_return: np.ndarray  # [updates]

    @property
    def curve(self) -> list[float | None]:
        """The mean return of the episodes that ended in each update; None where none did."""
        return [
            float(total / count) if count else None
            for count, total in zip(self.episodes, self.total_return, strict=True)
        ]

    @property
    def final_return(self) -> float | None:
        """The mean return of the episodes that ended in the last tenth of training; None if none did."""
        tail = slice(-math.ceil(len(self.episodes) / 10), None)
        count = self.episodes[tail].sum()
        return float(self.total_return[tail].sum() / count) if count else None


def train(config: Config) -> Result:
    """Trains one agent and shows a progress bar. Ctrl-C ends the training early, after the first update."""
    name = f"{config.rnn:>6}"
    print(f"{name}: compiling ...", end="\r", file=sys.stderr, flush=True)  # the progress bar replaces it
    init, update = make_train(config)
    began = time.perf_counter()
    state = init(jnp.int32(config.seed))
    update = update.lower(state).compile()
    compile_seconds = time.perf_counter() - began
    metrics: list[Any] = []
    started, ended = time.perf_counter(), 0.0
    with tqdm(total=config.updates * config.steps_per_update, desc=name, unit=" steps", unit_scale=True) as bar:
        try:
            for _ in range(config.updates):
                state, submitted = update(state)
                metrics.append(jax.device_get(submitted))
                ended = time.perf_counter()
                episodes, total_return = metrics[-1]
                if episodes:
                    bar.set_postfix_str(f"return {total_return / episodes:.2f}", refresh=False)
                bar.update(config.steps_per_update)
        except KeyboardInterrupt:
            if not metrics:
                raise
    episodes, total_return = map(np.array, zip(*metrics, strict=True))
    speed = len(metrics) * config.steps_per_update / (ended - started)
    return Result(config, compile_seconds, speed, episodes, total_return)


# Output.


def machine() -> str:
    device = jax.devices()[0]
    kind = f"CPU ({os.cpu_count()} cores)" if device.platform == "cpu" else device.device_kind
    return ", ".join([kind, *(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "gymnax"))])


def write(results: Sequence[Result], path: Path) -> None:
    runs = [
        {
            "rnn": result.config.rnn,
            "compile_seconds": result.compile_seconds,
            "steps_per_second": result.steps_per_second,
            "final_return": result.final_return,
            "total_steps": len(result.episodes) * result.config.steps_per_update,
            "curve": result.curve,
            "config": dataclasses.asdict(result.config),
        }
        for result in results
    ]
    path.write_text(json.dumps({"machine": machine(), "runs": runs}, indent=1) + "\n")


def table_of(results: Sequence[Result]) -> Table:
    config = results[0].config
    table = Table(title=f"{config.env}, {config.num_envs} envs, GRU-{config.hidden}", caption=machine())
    for header in ("rnn", "env steps", "final return", "env steps/s", "compile"):
        table.add_column(header, justify="left" if header == "rnn" else "right")
    for result in results:
        steps = len(result.episodes) * config.steps_per_update
        final = "-" if result.final_return is None else f"{result.final_return:.2f}"
        speed, compile_time = f"{result.steps_per_second:,.0f}", f"{result.compile_seconds:.1f} s"
        table.add_row(result.config.rnn, f"{steps:,}", final, speed, compile_time)
    return table


def whole_number(text: str) -> int:
    """Returns the int that `text` is in any notation, such as 1000000, 1_000_000 or 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number, such as 1000, 1_000 or 1e3, got {text!r}")
    return int(value)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rnn", choices=[*RNNS, "both"], default=Config.rnn, help="default: %(default)s")
    add("--env", default=Config.env, help="an environment of gymnax (default: %(default)s)")
    memory = "for MemoryChain: steps from the bit to the question (default: %(default)s)"
    add("--memory-length", type=whole_number, default=Config.memory_length, help=memory)
    add("--num-envs", type=whole_number, default=Config.num_envs, help="environments (default: %(default)s)")
    add("--rollout-steps", type=whole_number, default=Config.rollout_steps, help="default: %(default)s")
    steps = "env steps, rounded up to whole updates (default: %(default)s)"
    add("--total-steps", type=whole_number, default=Config.total_steps, help=steps)
    add("--hidden", type=whole_number, default=Config.hidden, help="width of the GRU (default: %(default)s)")
    lr = "Adam's learning rate at the start; it falls to zero (default: %(default)s)"
    add("--lr", type=float, default=Config.lr, help=lr)
    add("--seed", type=whole_number, default=Config.seed, help="default: %(default)s")
    add("--out", type=Path, default=Path("outputs"), help="folder for the JSON (default: %(default)s)")
    namespace = parser.parse_args(arguments)
    namespace.rnns = list(RNNS) if namespace.rnn == "both" else [namespace.rnn]
    fields = {field.name for field in dataclasses.fields(Config)} - {"rnn"}
    try:
        namespace.config = Config(**{name: value for name, value in vars(namespace).items() if name in fields})
        make_env(namespace.config)
        namespace.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=namespace.out):  # raises if the folder takes no files
            pass
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return namespace


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parse_arguments(arguments)
    path = options.out / "gymnax_ppo.json"
    results: list[Result] = []
    try:
        for rnn in options.rnns:
            results.append(train(dataclasses.replace(options.config, rnn=rnn)))
            write(results, path)
            if len(results[-1].episodes) < options.config.updates:
                break
    except KeyboardInterrupt:
        pass
    console = Console()
    if results:
        console.print(table_of(results))
        console.print(f"figures: {path}", soft_wrap=True)
    if len(results) < len(options.rnns) or len(results[-1].episodes) < options.config.updates:
        sys.exit("interrupted")
    return results


if __name__ == "__main__":
    main()
