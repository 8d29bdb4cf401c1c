"""Trains independent PPO (IPPO), whose agents share a recurrent network, on MPE's simple_spread in JaxMARL.

    # jaxrnn's GRU: two minutes on 2 CPU cores
    python examples/jaxmarl_ippo.py
    # Flax's GRU, jaxrnn's, and none, with the environments of a GPU
    python examples/jaxmarl_ippo.py --num-envs 256 --total-steps 1e7 --implementation flax auto none

Three agents have to cover three landmarks without collisions (Lowe et al. 2017).
The rewards are negative: distances from the landmarks, and collisions. An episode
has 26 steps, so every state is reset about five times in a rollout of 128 steps.

The actors of all environments are the batch of one network: actor `a` of
environment `e` is row `e * 3 + a`. The agent is that of `recurrent_ppo.py`, with
what JaxMARL's `ippo_rnn_mpe.py` sets. It sees positions and velocities, so a
memory is of little use here; the example shows the structure and its speed.

The example needs `pip install '.[agents]'` in a checkout.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jaxmarl
import recurrent_ppo
from jax import Array
from training import RECURRENCES, parse_agent, run_agent


@dataclasses.dataclass(frozen=True)
class Config(recurrent_ppo.Config):
    env: str = "MPE_simple_spread_v3"
    num_envs: int = 16
    total_steps: int = 400_000
    minibatches: int = 2
    lr: float = 5e-4
    anneal_lr: bool = True
    clip: float = 0.3
    value_weight: float = 1.0


class JaxMARL:
    """Any number of environments of JaxMARL, whose agents are alike. B is the environments times the agents of each."""

    def __init__(self, name: str):
        self.name, self.env = name, jaxmarl.make(name)
        self.agents, self.num_actions = self.env.agents, self.env.action_space(self.env.agents[0]).n

    def draw(self, key: Array, steps: int, batch: int) -> Array:
        return jax.random.split(key, (steps, batch // len(self.agents)))

    def reset(self, key: Array, num_envs: int) -> tuple[Any, Array]:
        obs, state = jax.vmap(self.env.reset)(jax.random.split(key, num_envs))
        return state, self.to_batch(obs)

    def step(self, state: Any, action: Array, keys: Array) -> tuple[Any, Array, Array, Array]:
        actions = dict(zip(self.agents, action.reshape(-1, len(self.agents)).T, strict=True))
        obs, state, reward, done, _ = jax.vmap(self.env.step)(keys, state, actions)
        return state, self.to_batch(obs), self.to_batch(reward), self.to_batch(done)

    def to_batch(self, values: dict[str, Array]) -> Array:
        stacked = jnp.stack([values[agent] for agent in self.agents], axis=1)
        return stacked.reshape(-1, *stacked.shape[2:])


def make_ppo(config: Config, axis: str | None = None) -> recurrent_ppo.PPO:
    env = JaxMARL(config.env)
    network = recurrent_ppo.ActorCritic(env.num_actions, RECURRENCES[config.implementation])
    return recurrent_ppo.PPO(config, env, network, axis)


parse_arguments = functools.partial(parse_agent, make_ppo, Config(), ["auto"], __doc__, {})
main = functools.partial(run_agent, parse_arguments)

if __name__ == "__main__":
    main()
