"""The runs of recurrences by the cell, or by its name, which is a key of `jaxrnn.cells.CELLS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxrnn import checks, recurrent
from jaxrnn.cells import CELLS, Cell
from jaxrnn.checks import Caller, join_carry, split_carry
from jaxrnn.numerics import accumulation_dtype

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

    from jaxrnn.modules.carries import Carry

    Results = tuple[Carry, Array, Carry | None]  # the last carry, the outputs, and the carries of all steps or None


# A name stands for the cell with its default constants.
Recurrence = str | Cell


def _cell(recurrence: Recurrence) -> Cell:
    return recurrence if isinstance(recurrence, Cell) else CELLS[recurrence]


def state_names(cell: Recurrence) -> tuple[str, ...]:
    """Returns the names of the arrays of a cell's carry in Flax's order, in which the hidden state is the last."""
    return _cell(cell).states[::-1]


def check_structure(cell: Recurrence, carry: Carry, caller: Caller) -> None:
    """Raises ValueError unless `carry` has the structure of the cell's carry."""
    split_carry(_cell(cell), caller("carry"), carry)


def check_carry(cell: Recurrence, carry: Carry, caller: Caller) -> None:
    """Raises ValueError unless `carry` has the structure of the cell's carry, and its arrays are `[*batch, H]`."""
    for state in split_carry(_cell(cell), caller("carry"), carry):
        checks.check_carry(caller("carry"), state)


def run(
    cell: Recurrence, params: Any, carry: Carry, xs: Array, *, return_states: bool = False, **options: Any
) -> Results:
    """Runs the recurrence of a cell; returns `(carry, ys, carries of all steps or None)`."""
    last, sequences = recurrent.run(_cell(cell), params, carry, xs, return_states=return_states, **options)
    return last, sequences[0], join_carry(sequences) if return_states else None


def run_both(
    cell: Recurrence, params: Any, carry: Any, xs: Array, *, return_states: bool = False, **options: Any
) -> list[Results]:
    """Runs two directions of the recurrence of a cell; returns the result of `run` for each."""
    both = recurrent.run_bidirectional(_cell(cell), params, carry, xs, return_states=return_states, **options)
    return [(last, sequences[0], join_carry(sequences) if return_states else None) for last, sequences in both]


def cast(params: Any, dtype: DTypeLike) -> Any:
    """Casts weights to `dtype` and biases to the accumulation dtype of the gates: float32, or float64 for float64."""
    bias_dtype = accumulation_dtype(dtype)
    given = {name: x for name, x in params._asdict().items() if x is not None}
    return type(params)(**{name: x.astype(dtype if name.startswith("w") else bias_dtype) for name, x in given.items()})
