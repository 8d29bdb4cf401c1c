"""The recurrent module and the network of agents, as JAX RL code bases define them."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from plain_cells import LINEN


def agents_rnn(cell, hidden_first):
    """Returns the recurrent module as JAX RL code bases define it; those that learn Q values use `hidden_first`."""

    class ScannedRNN(nn.Module):
        @functools.partial(nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False})
        @nn.compact
        def __call__(self, carry, x):
            ins, resets = x
            hidden = jax.tree.leaves(carry)[0].shape[-1]
            sizes = (hidden, *resets.shape) if hidden_first else (resets.shape, hidden)
            carry = jax.tree.map(
                lambda new, old: jnp.where(resets[..., None], new, old), self.initialize_carry(*sizes), carry
            )
            return getattr(LINEN, cell)(features=hidden)(carry, ins)

        if hidden_first:

            @staticmethod
            def initialize_carry(hidden, *batch):
                dummy = getattr(LINEN, cell)(features=hidden, parent=None)
                return dummy.initialize_carry(jax.random.PRNGKey(0), (*batch, hidden))

        else:

            @staticmethod
            def initialize_carry(batch, hidden):
                batch = batch if isinstance(batch, tuple) else (batch,)
                dummy = getattr(LINEN, cell)(features=hidden)
                return dummy.initialize_carry(jax.random.PRNGKey(0), (*batch, hidden))

    return ScannedRNN


class ActorCritic(nn.Module):
    """A recurrent agent as in purejaxrl, built around a given recurrent module."""

    rnn: type[nn.Module]
    embedding: int = 5
    hidden: int = 6

    @nn.compact
    def __call__(self, carry, x):
        obs, dones = x
        embedding = nn.relu(nn.Dense(self.embedding, kernel_init=nn.initializers.orthogonal(1.4))(obs))
        carry, embedding = self.rnn()(carry, (embedding, dones))
        logits = nn.Dense(3, kernel_init=nn.initializers.orthogonal(0.01))(nn.relu(nn.Dense(self.hidden)(embedding)))
        value = nn.Dense(1)(nn.relu(nn.Dense(self.hidden)(embedding)))
        return carry, logits, value[..., 0]
