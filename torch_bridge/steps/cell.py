"""The contract of a cell in PyTorch operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

Tensors = tuple[Tensor, ...]


class Cell(Protocol):
    """A module of this package. N is the number of sequences of each of the S models."""

    # Whether autocast on the CPU converts states in `torch.nn`. On a GPU it converts those of every cell.
    AUTOCASTS_STATES_ON_CPU: bool

    def step(self, gates: Tensor, last: tuple[Tensor, Tensor] | None, states: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the new states, and the activations that `residuals` needs.

        Args:
          gates: the gates before their activations, `[S, N, gates * H]`: the sums of input projection and hidden
            product. If the last gate is separate (`torch_bridge.cells.CellSpec.last_gate_separate`), they are those of
            the other gates.
          last: the input projection and the hidden product of the last gate, each `[S, N, H]`, if that gate is
            separate, else None.
          states: the states that the step starts from, each `[S, N, H]`.
        """

    def residuals(self, activations: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Returns local gradients and factors, like `residuals` in `torch_bridge.kernels.cells`.

        The activations are those of all steps, stacked.
        """

    def grad_step(self, dstates: Tensors, local_grads: Tensor, factors: Tensors) -> tuple[Tensor, Tensors]:
        """Returns the gradients of the gates, in the form of `local_grads`, and what goes straight to the last state.

        The second result is a tuple of one or no element.

        Args:
          dstates: the gradients of the states after the step, each `[S, N, H]`.
          local_grads: `[S, N, count, H]`, in the order of the gates' hidden products. If the last gate is separate, the
            local gradient of its input projection comes before all of these.
          factors: the residuals after `local_grads`, except for "norm_state", each `[S, N, H]`.
        """


class SingleStep(Protocol):
    """The function `single_step` of a module of this package; a cell with a norm has none."""

    def __call__(
        self, x: Tensor, states: Tensors, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
    ) -> Tensors:
        """Returns the new states, given the inputs of one step, `[N, D]`.

        It runs PyTorch's own cell, or PyTorch operations if there is none, and no operator of this package.
        """
