"""The carries of cells: their batch axes, and their form for one state or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.checks import Caller

Carry = Any  # an array [*batch, H], or (c, h) for an LSTM
# The carry in the type of a cell's class.
CarryT = TypeVar("CarryT", default=Any)
# The attribute `return_carry` in the type of a module, so that type checkers know what a call returns.
ReturnsCarry = TypeVar("ReturnsCarry", Literal[False], Literal[True], bool, default=Literal[False])


def one_or_tuple(arrays: Sequence[Array]) -> Carry:
    """Returns the only array, for the carry of a cell with one state, or the tuple of all."""
    return tuple(arrays) if len(arrays) > 1 else arrays[0]


def broadcast_carry(carry: Carry, batch: tuple[int, ...]) -> Carry:
    """Broadcasts a carry of arrays `[H]` to `[*batch, H]`."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), carry)


def broadcast_batch_axes(carry: Carry, inputs: Any, caller: Caller) -> tuple[Carry, Array]:
    """Broadcasts the batch axes of the carry and the inputs of a step against each other, as Flax's cells do."""
    batches = [jnp.shape(x)[:-1] for x in (*jax.tree.leaves(carry), inputs)]
    if len(set(batches)) == 1 or 0 in map(jnp.ndim, (*jax.tree.leaves(carry), inputs)):
        return carry, inputs
    try:
        batch = jnp.broadcast_shapes(*batches)
    except ValueError:
        raise ValueError(
            f"{caller('carry')} must have batch axes that can be broadcast with those of inputs {batches[-1]}, got "
            f"{batches[0]}; initialize_carry(rng, inputs.shape) returns such a carry"
        ) from None
    carry, inputs = jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, x.shape[-1])), (carry, inputs))
    return carry, inputs
