"""Trains purejaxrl's recurrent PPO on gymnax, with its own `ScannedRNN` and with jaxrnn's.

    # jaxrnn's GRU on MemoryChain: half a minute on 2 CPU cores
    python examples/gymnax_ppo.py
    # Flax's GRU in nn.scan, which it replaces, beside it, from the same seed
    python examples/gymnax_ppo.py --implementation flax auto
    python examples/gymnax_ppo.py --memory-length 30 --total-steps 2e6
    python examples/gymnax_ppo.py --env CartPole-v1 --total-steps 5e5

MemoryChain (Osband et al. 2020) shows a bit at the first step of an episode and
asks for it at the last, which is `--memory-length` steps later. The return is 1
if the answer is right and -1 if it is wrong, so an agent without memory gets 0
on average. `--env` takes the name of any environment of gymnax with discrete
actions. The agent is that of `recurrent_ppo.py`.

The example needs `pip install '.[gymnax]'` in a checkout.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import recurrent_ppo
from gymnax.environments.spaces import Discrete
from gymnax.wrappers.purerl import FlattenObservationWrapper
from jax import Array
from training import RECURRENCES, parse_agent, run_agent

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


@dataclasses.dataclass(frozen=True)
class Config(recurrent_ppo.Config):
    env: str = "MemoryChain-bsuite"
    memory_length: int = 10
    num_envs: int = 32
    rollout_steps: int = 64
    total_steps: int = 100_000
    hidden: int = 64
    lr: float = 2e-3
    anneal_lr: bool = True


class Gymnax:
    """An environment of gymnax for any number of actors. Steps begin new episodes by themselves."""

    def __init__(self, config: Config):
        if config.env not in gymnax.registered_envs:
            raise ValueError(f"gymnax has no environment {config.env}; it has {', '.join(gymnax.registered_envs)}")
        env, self.params = gymnax.make(config.env)
        if config.env == Config.env:
            self.params = self.params.replace(memory_length=config.memory_length)
        if not isinstance(env.action_space(self.params), Discrete):
            raise ValueError(f"the actions of {config.env} are not discrete, which this agent needs")
        self.name, self.env = config.env, FlattenObservationWrapper(env)
        self.num_actions = env.action_space(self.params).n

    def draw(self, key: Array, *shape: int) -> Array:
        return jax.random.split(key, shape)

    def reset(self, key: Array, batch: int) -> tuple[Any, Array]:
        obs, state = jax.vmap(self.env.reset, (0, None))(self.draw(key, batch), self.params)
        return state, obs

    def step(self, state: Any, action: Array, keys: Array) -> tuple[Any, Array, Array, Array]:
        step = jax.vmap(self.env.step, (0, 0, 0, None))
        obs, state, reward, terminated, truncated, _ = step(keys, state, action, self.params)
        # An episode that is cut off by time ends for the recurrent state too.
        return state, obs, reward.astype(jnp.float32), terminated | truncated


def make_ppo(config: Config, axis: str | None = None) -> recurrent_ppo.PPO:
    env = Gymnax(config)
    recurrence = {**RECURRENCES, "flax": FlaxScannedRNN, "auto": ScannedRNN}[config.implementation]
    return recurrent_ppo.PPO(config, env, recurrent_ppo.ActorCritic(env.num_actions, recurrence), axis)


HELPS = {"memory_length": "for MemoryChain: steps from the bit to the question"}
parse_arguments = functools.partial(parse_agent, make_ppo, Config(), ["auto"], __doc__, HELPS)
main = functools.partial(run_agent, parse_arguments)

if __name__ == "__main__":
    main()
