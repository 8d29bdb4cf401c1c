"""The carries of cells: their batch axes, and their form for one state or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def default_carries(
    make: Callable[[], Carry], initial_carry: Carry | None, resets: Any, reset_carry: Carry | None, from_zeros: bool
) -> tuple[Carry, Carry | None]:
    """Returns the initial carry and the reset carry, each by default the carry of a new sequence.

    Args:
      make: returns the carry of a new sequence. It is called once at most, because its random key may be used once, and
        not at all if nothing needs the result.
      initial_carry: the carry before the first step, or None.
      resets: the resets, or None.
      reset_carry: the carry that an episode starts from, or None.
      from_zeros: whether `make` returns zeros, which a reset carry of None means, too.
    """
    reset_needs_it = resets is not None and reset_carry is None and not from_zeros
    if initial_carry is None or reset_needs_it:
        default = make()
        initial_carry = default if initial_carry is None else initial_carry
        reset_carry = default if reset_needs_it else reset_carry
    return initial_carry, reset_carry


def starts_from_zeros(cell: Any, zeros: Sequence[Any], known: Iterable[type]) -> bool:
    """Returns whether `cell.initialize_carry` is known to return zeros.

    Args:
      cell: a cell of Flax, of this package, or of the user, or a stack.
      zeros: the values of the attribute `carry_init` that stand for zeros.
      known: the classes whose `initialize_carry` returns what `carry_init` returns.
    """
    initializes_as_known = any(type(cell).initialize_carry is cls.initialize_carry for cls in known)  # type: ignore[attr-defined]
    return initializes_as_known and any(getattr(cell, "carry_init", None) is zero for zero in zeros)


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
