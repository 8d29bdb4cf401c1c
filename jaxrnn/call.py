"""A call of a recurrence: its arrays and its static options, made where the arguments are checked and passed whole."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells import Cell
    from torch_bridge.tiling import Reverse


class Call(NamedTuple):
    """The arrays of a recurrence; for both directions, every field but `xs` is a pair, forward and reverse.

    The shapes here are those of the user's arrays. `jaxrnn.kernel_vjp.layout` has the canonical ones.

    Attributes:
      params: the weights, an instance of `cell.params`.
      states: the states before the first step, `[*batch, H]`, in the order of `cell.states`, the hidden state first.
      xs: `[T, *batch, D]`, or `[*batch, T, D]` if not `time_major`.
      resets: `[T, *batch]` (`[*batch, T]`), nonzero where an episode begins; or None.
      reset_states: for each state None (zeros), `[H]`, `[*batch, H]`, or one for each step with the axes of `xs`.
      first: `[*batch, gates * H]`, added to the input projection of the step that is computed first, or None.
      in_reverse: in a `jax.vmap` over both directions, a scalar that says at run time whether this one goes in reverse.
    """

    params: Any
    states: Any
    xs: Array
    resets: Any
    reset_states: Any
    first: Array | None = None
    in_reverse: Array | None = None

    @property
    def operand_dtype(self) -> Any:
        """The dtype in which matrices are multiplied."""
        return jnp.result_type(self.xs, self.params.w_ih, self.params.w_hh)

    def directions(self) -> tuple[Call, Call]:
        """Returns the calls of the two directions, forward and reverse."""
        forward, backward = zip(self.params, self.states, self.resets, self.reset_states, strict=True)
        return tuple(  # type: ignore[return-value]
            Call(params, states, self.xs, resets, reset_states)
            for params, states, resets, reset_states in (forward, backward)
        )


@dataclasses.dataclass(frozen=True)
class RecurrenceSpec:
    """The static options of a recurrence, on which it is specialized besides shapes and dtypes.

    Attributes:
      cell: the cell.
      reverse: whether to run from the last step to the first; "bidirectional" runs both directions.
      time_major: whether time is the first axis.
      precision: the precision of the products.
      remat: whether the backward pass recomputes what it needs of the gates.
      returned: the names of the states to return for every step.
      may_use_xla: whether XLA may compute a launch instead: where that is faster, and on a CPU.
    """

    cell: Cell
    reverse: Reverse
    time_major: bool
    precision: Any
    remat: bool
    returned: tuple[str, ...]
    may_use_xla: bool = False

    def directions(self) -> tuple[RecurrenceSpec, RecurrenceSpec]:
        """Returns the options of the two directions, forward and reverse."""
        return dataclasses.replace(self, reverse=False), dataclasses.replace(self, reverse=True)
