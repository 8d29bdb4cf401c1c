"""Block-diagonal recurrent weights (heads): the units of a block multiply the states of their own block alone.

Blocks are models of one launch, so `num_blocks` blocks of `H / num_blocks` units run as fast as that many seeds. The
blocks have consecutive units, and every block sees all inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import sharding

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.call import Call
    from jaxrnn.cells import Cell


def has_blocks(params: Any) -> bool:
    """Returns whether the recurrent weights are blocks, `[num_blocks, H / num_blocks, gates * H / num_blocks]`."""
    return bool(params.w_hh.ndim == 3)


def split(x: Array, blocks: int, gates: int = 1) -> Array:
    """Returns `[..., gates * H]` as blocks `[blocks, ..., gates * H / blocks]`."""
    by_block = jnp.moveaxis(x.reshape(*x.shape[:-1], gates, blocks, -1), -2, 0)
    return by_block.reshape(blocks, *x.shape[:-1], -1)


def merge(x: Array) -> Array:
    """Inverts `split` for arrays without gates."""
    by_unit = jnp.moveaxis(x, 0, -2)
    return by_unit.reshape(*by_unit.shape[:-2], -1)


def run_blocks(cell: Cell, run: Callable[[Call], Any], call: Call) -> Any:
    """Runs the blocks of a recurrence, of one direction or both, as the models of a `jax.vmap`.

    Args:
      cell: the cell.
      run: maps the call of one block to arrays, each with the units on the last axis.
      call: the call whose recurrent weights are blocks.

    Returns:
      What `run` returns for all units.
    """
    is_params = lambda x: isinstance(x, cell.params)  # noqa: E731
    params = sharding.replicate(call.params)
    blocks = jax.tree.leaves(params, is_leaf=is_params)[0].w_hh.shape[0]

    def split_params(weights: Any) -> Any:
        parts = {"w_hh": weights.w_hh, "w_ih": split(weights.w_ih, blocks, cell.gates)}
        parts[cell.bias] = split(getattr(weights, cell.bias), blocks, cell.gates)
        if cell.last_gate_separate:
            parts["b_hn"] = split(weights.b_hn, blocks)
        return weights._replace(**parts)

    by_block = jax.tree.map(lambda x: split(x, blocks), {"states": call.states, "reset_states": call.reset_states})
    by_block["params"] = jax.tree.map(split_params, params, is_leaf=is_params)
    return jax.tree.map(merge, jax.vmap(lambda block: run(call._replace(**block)))(by_block))
