"""Trains the recurrent agent of Craftax_Baselines on Craftax-Symbolic, a survival game in a generated world.

    # a few updates, to see that it runs: three minutes on 2 CPU cores, most of them to compile
    python examples/craftax_ppo.py
    # on a GPU, at the sizes of Craftax_Baselines: Flax's GRU, jaxrnn's, and none
    python examples/craftax_ppo.py --num-envs 1024 --hidden 512 --total-steps 1e7 --implementation flax auto none

An observation has 8268 numbers: the map around the player, what is in the bag,
the player's health. The reward is that of each achievement when it is reached
first, and 226 is all of them. The agent is that of `recurrent_ppo.py` with two
hidden layers each for policy and value.

A world takes as long to generate as many steps take. New worlds are therefore
generated for a sixteenth of the environments at each step, and an environment
whose episode ended takes one of them. If more episodes end in a step than there
are new worlds, some begin in the same one.

The example needs `pip install '.[agents]'` in a checkout.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import recurrent_ppo
from craftax.craftax_env import make_craftax_env_from_name
from jax import Array
from training import RECURRENCES, parse_agent, run_agent


@dataclasses.dataclass(frozen=True)
class Config(recurrent_ppo.Config):
    env: str = "Craftax-Symbolic-v1"
    num_envs: int = 32
    total_steps: int = 32 * 64 * 4
    rollout_steps: int = 64
    unroll: int = 1  # a step has thousands of operations
    hidden: int = 64
    minibatches: int = 8
    lr: float = 2e-4
    anneal_lr: bool = True
    gae_lambda: float = 0.8
    max_grad_norm: float = 1.0


class Craftax:
    """Craftax for any number of actors, which share the worlds that are generated at each step."""

    actors_per_world = 16

    def __init__(self, name: str):
        self.name, self.env = name, make_craftax_env_from_name(name, auto_reset=False)
        self.num_actions, self.params = self.env.num_actions, self.env.default_params

    def draw(self, key: Array, *shape: int) -> Array:
        return jax.random.split(key, (*shape, 2))

    def reset(self, key: Array, batch: int) -> tuple[Any, Array]:
        obs, state = jax.vmap(self.env.reset, (0, None))(jax.random.split(key, batch), self.params)
        return state, obs

    def step(self, state: Any, action: Array, keys: Array) -> tuple[Any, Array, Array, Array]:
        step = jax.vmap(self.env.step, (0, 0, 0, None))
        obs, state, reward, done, _ = step(keys[:, 0], state, action, self.params)
        worlds = -(-len(done) // self.actors_per_world)
        fresh, first_obs = self.reset(keys[0, 1], worlds)
        world = (jnp.cumsum(done) - 1) % worlds  # the n-th episode that begins takes the n-th world

        def begin(new: Array, old: Array) -> Array:
            return jnp.where(done.reshape(-1, *[1] * (old.ndim - 1)), new[world], old)

        state, obs = jax.tree.map(begin, (fresh, first_obs), (state, obs))
        return state, obs, reward, done


def make_ppo(config: Config, axis: str | None = None) -> recurrent_ppo.PPO:
    env = Craftax(config.env)
    network = recurrent_ppo.ActorCritic(env.num_actions, RECURRENCES[config.implementation], layers=2)
    return recurrent_ppo.PPO(config, env, network, axis)


parse_arguments = functools.partial(parse_agent, make_ppo, Config(), ["auto"], __doc__, {})
main = functools.partial(run_agent, parse_arguments)

if __name__ == "__main__":
    main()
