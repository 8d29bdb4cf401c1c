"""The recurrent module of each code base, in our words: the same names, keyword names, defaults and results.

`COMMITS` names the upstream commit that each one was written after, and its date. Change both together, and the dates
in `docs/codebases.md`.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

COMMITS = {
    "purejaxrl": ("31756b1", "2024-09-09"),
    "popjaxrl": ("12e5d42", "2023-12-05"),
    "JaxMARL": ("c793d09", "2026-07-21"),
    "Craftax_Baselines": ("7ce36fa", "2026-06-16"),
    "Kinetix": ("fac7449", "2025-10-04"),
    "purejaxql": ("47af6d7", "2025-11-12"),
    "Stoix": ("8fff19c", "2026-03-18"),
    "Mava": ("57c8e64", "2024-10-21"),
    "jaxued": ("0f8f128", "2025-09-09"),
    "memorax": ("8ded8fc", "2026-05-04"),
    "xland-minigrid": ("0d306d1", "2025-12-16"),
}

STOIX_CELLS = {
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
    "optimised_lstm": nn.OptimizedLSTMCell,
    "mgu": nn.MGUCell,
    "simple": nn.SimpleCell,
}

over_time = functools.partial(nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False})


def restart(resets, fresh, carry):
    """Returns `fresh` where `resets [*batch]` is set, and `carry` elsewhere."""
    return jax.tree.map(lambda new, old: jnp.where(resets[..., None], new, old), fresh, carry)


def zeros(cell, batch_size, hidden_size):
    """Returns the carry that `cell` makes; in a module, `cell` takes a name even though it gets no parameters."""
    return cell.initialize_carry(jax.random.PRNGKey(0), (*batch_size, hidden_size))


# --- `initialize_carry(batch_size, hidden_size)` ---------------------------------------------------------------------


def purejaxrl(cell="GRUCell"):
    """purejaxrl's and popjaxrl's: the state is as wide as the inputs. Only the cell with the parameters is created.

    Theirs calls `nn.GRUCell()` and `nn.GRUCell.initialize_carry`, which only Flax before 0.7 has.
    """

    class ScannedRNN(nn.Module):
        @over_time
        @nn.compact
        def __call__(self, carry, x):
            ins, resets = x
            carry = restart(resets, self.initialize_carry(ins.shape[0], ins.shape[1]), carry)
            return getattr(nn, cell)(features=ins.shape[1])(carry, ins)

        @staticmethod
        def initialize_carry(batch_size, hidden_size):
            state = jnp.zeros((batch_size, hidden_size))
            return state if cell == "GRUCell" else (state, state)

    return ScannedRNN


def jaxmarl_ppo(**options):
    """JaxMARL's `ippo_rnn*.py` and `mappo_rnn*.py`, with options of the cell: the state is as wide as the inputs."""

    class ScannedRNN(nn.Module):
        @over_time
        @nn.compact
        def __call__(self, carry, x):
            ins, resets = x
            carry = restart(resets, self.initialize_carry(*carry.shape), carry)
            return nn.GRUCell(features=ins.shape[1], **options)(carry, ins)

        @staticmethod
        def initialize_carry(batch_size, hidden_size):
            return zeros(nn.GRUCell(features=hidden_size), (batch_size,), hidden_size)

    return ScannedRNN


def craftax_baselines():
    """Craftax_Baselines', and JaxMARL's for Hanabi and Overcooked v2: the inputs give the shape of the new state."""

    class ScannedRNN(nn.Module):
        @over_time
        @nn.compact
        def __call__(self, carry, x):
            ins, resets = x
            carry = restart(resets, self.initialize_carry(ins.shape[0], ins.shape[1]), carry)
            return nn.GRUCell(features=ins.shape[1])(carry, ins)

        @staticmethod
        def initialize_carry(batch_size, hidden_size):
            return zeros(nn.GRUCell(features=hidden_size), (batch_size,), hidden_size)

    return ScannedRNN


def kinetix():
    """Kinetix's: 256 units whatever the inputs, and `initialize_carry(batch_size)`."""

    class ScannedRNN(nn.Module):
        @over_time
        @nn.compact
        def __call__(self, carry, x):
            ins, resets = x
            carry = restart(resets, self.initialize_carry(ins.shape[0], 256), carry)
            return nn.GRUCell(features=256)(carry, ins)

        @staticmethod
        def initialize_carry(batch_size, hidden_size=256):
            return zeros(nn.GRUCell(features=256), (batch_size,), hidden_size)

    return ScannedRNN


def stoix():
    """Stoix's: width and cell are attributes, and an instance makes the carry."""

    class ScannedRNN(nn.Module):
        hidden_state_dim: int
        cell_type: str

        @over_time
        @nn.compact
        def __call__(self, rnn_state, x):
            ins, resets = x
            rnn_state = restart(resets, self.initialize_carry(ins.shape[0]), rnn_state)
            return STOIX_CELLS[self.cell_type](features=self.hidden_state_dim)(rnn_state, ins)

        @nn.nowrap
        def initialize_carry(self, batch_size):
            cell = STOIX_CELLS[self.cell_type](features=self.hidden_state_dim)
            return zeros(cell, (batch_size,), self.hidden_state_dim)

    return ScannedRNN


def mava():
    """Mava's: agents are an axis of their own, `ins [T, B, A, F]` and `resets [T, B, A]`."""

    class ScannedRNN(nn.Module):
        hidden_state_dim: int = 128

        @over_time
        @nn.compact
        def __call__(self, carry, x):
            ins, resets = x
            fresh = self.initialize_carry((ins.shape[0], ins.shape[1]), self.hidden_state_dim)
            return nn.GRUCell(features=ins.shape[-1])(restart(resets, fresh, carry), ins)

        @staticmethod
        def initialize_carry(batch_size, hidden_size):
            return zeros(nn.GRUCell(features=hidden_size), batch_size, hidden_size)

    return ScannedRNN


# --- `initialize_carry(hidden_size, *batch_size)` --------------------------------------------------------------------


def jaxmarl_q_learning():
    """JaxMARL's `iql_rnn.py`, `vdn_rnn.py`, `qmix_rnn.py` and `shaq.py`: the state is as wide as the inputs."""

    class ScannedRNN(nn.Module):
        @over_time
        @nn.compact
        def __call__(self, carry, x):
            ins, resets = x
            hidden_size = ins.shape[-1]
            carry = restart(resets, self.initialize_carry(hidden_size, *ins.shape[:-1]), carry)
            return nn.GRUCell(hidden_size)(carry, ins)

        @staticmethod
        def initialize_carry(hidden_size, *batch_size):
            return zeros(nn.GRUCell(hidden_size, parent=None), batch_size, hidden_size)

    return ScannedRNN


def pqn(cell="GRUCell"):
    """JaxMARL's `pqn_vdn_rnn.py` and purejaxql's scripts, one of which has an LSTM: the state has its own width."""

    class ScannedRNN(nn.Module):
        @over_time
        @nn.compact
        def __call__(self, carry, x):
            ins, resets = x
            hidden_size = jax.tree.leaves(carry)[0].shape[-1]
            carry = restart(resets, self.initialize_carry(hidden_size, *resets.shape), carry)
            return getattr(nn, cell)(hidden_size)(carry, ins)

        @staticmethod
        def initialize_carry(hidden_size, *batch_size):
            return zeros(getattr(nn, cell)(hidden_size, parent=None), batch_size, hidden_size)

    return ScannedRNN


# --- modules around a cell -------------------------------------------------------------------------------------------


class ResetRNN(nn.Module):
    """jaxued's."""

    cell: nn.RNNCellBase

    @nn.compact
    def __call__(self, inputs, *, initial_carry=None, reset_carry=None):
        if reset_carry is None:
            reset_carry = self.cell.initialize_carry(jax.random.PRNGKey(0), inputs[0].shape[1:])

        def step(cell, carry, inputs):
            x, resets = inputs
            return cell(restart(resets, reset_carry, carry), x)

        return over_time(step)(self.cell, reset_carry if initial_carry is None else initial_carry, inputs)


class RNN(nn.Module):
    """memorax's, batch first: `inputs [*batch, T, F]`, `done [*batch, T]`. Its cells may be any; RTRL is left out."""

    cell: nn.RNNCellBase
    unroll: int = 1
    variable_axes: Any = nn.FrozenDict()
    variable_broadcast: Any = "params"
    variable_carry: Any = False
    split_rngs: Any = nn.FrozenDict({"params": False})

    def __call__(self, inputs, done, initial_carry=None, **kwargs):
        time_axis = inputs.ndim - 2
        input_shape = inputs.shape[:time_axis] + inputs.shape[time_axis + 1 :]
        fresh = self.cell.initialize_carry(jax.random.key(0), input_shape)

        def step(cell, carry, x, done):
            return cell(restart(done, fresh, carry), x)

        scan = nn.scan(
            step,
            in_axes=time_axis,
            out_axes=time_axis,
            unroll=self.unroll,
            variable_axes=self.variable_axes,
            variable_broadcast=self.variable_broadcast,
            variable_carry=self.variable_carry,
            split_rngs=self.split_rngs,
        )
        return scan(self.cell, fresh if initial_carry is None else initial_carry, inputs, done)

    @nn.nowrap
    def initialize_carry(self, key, input_shape):
        return self.cell.initialize_carry(key, input_shape)
