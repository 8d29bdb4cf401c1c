"""The problems that a launch can have: one recurrence, forward or backward, on arrays of given dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from torch_bridge.cells import CELLS
from torch_bridge.rules import Precision as Precision

Direction = Literal["fwd", "bwd"]
ResetState = Literal["zeros", "fixed", "stepped"]
# Which models run from the last step to the first: none (False), all (True), or those of odd index.
Reverse = bool | Literal["bidirectional"]
# In the order of the values of RESET_STATE in `torch_bridge.kernels.common`: launches pass an index.
RESET_STATES: tuple[ResetState, ...] = get_args(ResetState)


class UnsupportedError(NotImplementedError):
    """The error raised if no kernel supports a problem; its message names the limit."""


class Sizes(NamedTuple):
    """The sizes of a recurrence, with the names and in the order of the fields of `Problem`."""

    models: int
    groups: int
    steps: int
    batch: int
    hidden: int


@dataclass(frozen=True)
class Problem:
    """One recurrence to launch. Sequence arrays are `[groups, steps, batch, width]`, weights `[models, ...]`.

    Attributes:
      cell: an entry of `torch_bridge.cells.CELLS`.
      direction: forward or backward pass.
      models: number of sets of weights; each owns `groups / models` consecutive groups.
      groups: number of blocks of `batch` sequences; each block is time first.
      steps: number of time steps.
      batch: number of sequences in a group.
      hidden: number of hidden units.
      dtypes: `(name, dtype)` of every input and output; an array that is not named is not computed or not used.
      reset_state: where an episode's first state comes from; "zeros" for a backward launch, which does not read it.
      reverse: whether to run from the last step to the first; with "bidirectional" only models of odd index do.
      precision: precision of float32 products: "tf32", or "tf32x3" for float32's accuracy, however a loop computes it.
      norm_width: number of elements of `[x, h]`, which the cell's norm sees; 0 for a cell without a norm.
      tangent: whether a forward launch runs the tangent of the pass, for which it reads the residuals.
    """

    cell: str
    direction: Direction
    models: int
    groups: int
    steps: int
    batch: int
    hidden: int
    dtypes: tuple[tuple[str, str], ...]
    reset_state: ResetState = "zeros"
    reverse: Reverse = False
    precision: Precision = "tf32"
    norm_width: int = 0
    tangent: bool = False

    @property
    def sequences(self) -> int:
        """The number of sequences per model."""
        return self.groups // self.models * self.batch

    @property
    def operand_dtype(self) -> str:
        """The dtype of the matmul operands."""
        return dict(self.dtypes)["w_hh_t" if self.direction == "fwd" else "w_hh"]

    @property
    def has_packed_residuals(self) -> bool:
        """Returns whether residuals are packed into one array of words, as `CellSpec.packed_residuals` describes."""
        return CELLS[self.cell].has_packed_residuals(dict(self.dtypes))

    @property
    def tilings(self) -> str:
        """The name of the cell whose tilings and costs apply."""
        return CELLS[self.cell].tilings

    @property
    def has_only_common_arrays(self) -> bool:
        """Says whether the launch has no reset state, and no cell states or gradients of states for every step."""
        rare = {"cs", "dcs", "dreset_h", "total_dh"}
        return self.reset_state == "zeros" and not dict(self.dtypes).keys() & rare

    @property
    def has_wide_gates(self) -> bool:
        """Says whether the launch writes gradients of gates in float32 while its operands have 16 bits."""
        return dict(self.dtypes).get("dxp", self.operand_dtype) != self.operand_dtype

    @property
    def is_unaligned(self) -> bool:
        """Whether the row length rules out loads of four elements, so that addresses take more registers."""
        return self.hidden % 4 != 0


def product_kind(problem: Problem) -> str:
    """Returns the kind of product, a key of the tables of costs: "tf32", "tf32x3" or "16-bit"."""
    return problem.precision if problem.operand_dtype == "float32" else "16-bit"


def cost_key(problem: Problem) -> tuple[str, str, str]:
    """Returns the key of a problem in tables of tilings and costs: cell whose tilings apply, product, direction."""
    return problem.tilings, product_kind(problem), problem.direction
