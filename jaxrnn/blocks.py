"""Block-diagonal recurrent weights (heads): the units of a block multiply the states of their own block alone.

Blocks are models of one launch, so `num_blocks` blocks of `H / num_blocks` units run as fast as that many seeds. The
blocks have consecutive units, and every block sees all inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array

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


def run_blocks(cell: Cell, call: Callable[[Any, Any, Any], Any], params: Any, carry: Any, reset_state: Any) -> Any:
    """Runs the blocks of a recurrence as the models of a `jax.vmap`.

    Args:
      cell: the cell.
      call: maps weights, carry and reset state of one block to arrays, each with the units on the last axis.
      params: the weights, or a tuple of those of each direction, whose recurrent weights are blocks.
      carry: the carry, or a tuple of those of each direction.
      reset_state: a reset state, or a tuple of those of each direction, or None.

    Returns:
      What `call` returns for all units.
    """
    is_params = lambda x: isinstance(x, cell.params)  # noqa: E731
    blocks = jax.tree.leaves(params, is_leaf=is_params)[0].w_hh.shape[0]

    def split_params(weights: Any) -> Any:
        halves = {"w_hh": weights.w_hh, "w_ih": split(weights.w_ih, blocks, cell.gates)}
        halves[cell.bias] = split(getattr(weights, cell.bias), blocks, cell.gates)
        if cell.last_gate_separate:
            halves["b_hn"] = split(weights.b_hn, blocks)
        return weights._replace(**halves)

    by_block = jax.tree.map(split_params, params, is_leaf=is_params)
    carry, reset_state = jax.tree.map(lambda x: split(x, blocks), (carry, reset_state))
    return jax.tree.map(merge, jax.vmap(call)(by_block, carry, reset_state))
