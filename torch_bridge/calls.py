"""The calls of a time loop, forward and backward: arrays and options in canonical form, made once and passed whole.

Sequences are `[G, T, B, W]`, where each of the G groups holds B sequences, time first. States are `[G, B, H]`. Weights
are `[S, ...]`, where each of the S models owns G / S consecutive groups. `order` is the direction in which a model goes
through time: "forward", "reverse", or "bidirectional" (models of even index forward, models of odd index in reverse).
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_bridge.cells import CellSpec


class Norm(NamedTuple):
    """The arrays and the width of the norm of `[x, h]`, which the gates see; `kernels.loops.streamed` explains it.

    Attributes:
      width: the number of elements of `[x, h]`.
      bias: `[S, gates * H]`, added after the norm.
      x_norm: `[G, T, B]`, the part of variance + epsilon that follows from the inputs.
      w_sum: `[S, gates * H]`, the sums of `w_hh` over the state, or None if the norm is RMSNorm.
      x_mean: `[G, T, B]`, the mean of the inputs, or None if the norm is RMSNorm.
    """

    width: int
    bias: Tensor
    x_norm: Tensor
    w_sum: Tensor | None = None
    x_mean: Tensor | None = None


class ForwardCall(NamedTuple):
    """A call of a time loop.

    Attributes:
      cell: an entry of the cell table.
      xp: `[G, T, B, gates * H]`, the input projections.
      w_hh: `[S, gates * H, H]`.
      b_hn: `[S, H]` if the last gate is separate, else None.
      states: `[G, B, H]` for each state of the cell.
      resets: `[G, T, B]` or None.
      reset_states: for each state `[G, B, H]`, `[G, T, B, H]`, or None for zeros.
      norm: the arrays of the norm, if the cell has one, else None.
      order: the direction through time.
      precision: precision of float32 products in a kernel, by Triton's name.
      returned: the names of the states to return for every step, "h" first.
      save: whether to return residuals.
      implementation: "triton", "loop", or None for the kernels where they can run, else the loop.
    """

    cell: CellSpec
    xp: Tensor
    w_hh: Tensor
    b_hn: Tensor | None
    states: tuple[Tensor, ...]
    resets: Tensor | None
    reset_states: tuple[Tensor | None, ...]
    norm: Norm | None
    order: str
    precision: str
    returned: tuple[str, ...]
    save: bool
    implementation: str | None = None

    @property
    def sequence(self) -> Tensor:
        """An array that has the sizes `[G, T, B]`."""
        return self.xp

    @property
    def norm_width(self) -> int:
        """The number of elements that the cell's norm sees, or 0."""
        return 0 if self.norm is None else self.norm.width


class BackwardCall(NamedTuple):
    """A call of the gradient of a time loop.

    Attributes:
      cell: an entry of the cell table.
      w_hh: `[S, gates * H, H]`.
      hs: `[G, T, B, H]`, which connects the operator to the inputs, see `rnn_ops.operators`, and is not read.
      residuals: by name, what `CellSpec.saved` lists.
      resets: `[G, T, B]` or None.
      dsequences: the gradients of each state at every step, `[G, T, B, H]` or None for zeros.
      dlast: the gradients of each state after the last step, `[G, B, H]` or None for zeros.
      order: see `ForwardCall`.
      precision: see `ForwardCall`.
      norm_width: the number of elements that the cell's norm sees, or 0.
      reset_gradients: whether to return the gradient of each step's reset states.
      implementation: see `ForwardCall`.
    """

    cell: CellSpec
    w_hh: Tensor
    hs: Tensor
    residuals: dict[str, Tensor]
    resets: Tensor | None
    dsequences: tuple[Tensor | None, ...]
    dlast: tuple[Tensor | None, ...]
    order: str
    precision: str
    norm_width: int
    reset_gradients: bool
    implementation: str | None = None

    @property
    def sequence(self) -> Tensor:
        """An array that has the sizes `[G, T, B]`."""
        return self.residuals["local_grads"]
