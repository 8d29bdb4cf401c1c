"""The base class of the recurrent modules whose cell has one state."""

from __future__ import annotations

import types
from typing import Any, overload

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torch_bridge.cells import CellSpec
from torch_bridge.nn.forward import forward
from torch_bridge.nn.recurrent import RecurrentModule


class SingleStateModule(RecurrentModule):
    """Base class of `GRU`, `MGU`, `RNN` and `NormGRU`, which differ in their cell."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Gives a module a `forward` of its own name, which Python's errors for wrong arguments contain."""
        super().__init_subclass__(**options)
        if SingleStateModule in cls.__bases__ and "forward" not in vars(cls):
            inherited: Any = SingleStateModule.forward
            own: Any = types.FunctionType(inherited.__code__, inherited.__globals__, argdefs=inherited.__defaults__)
            own.__kwdefaults__, own.__annotations__ = inherited.__kwdefaults__, inherited.__annotations__
            own.__qualname__ = f"{cls.__name__}.forward"
            cls.forward = own  # type: ignore[method-assign]

    @property
    def _cell(self) -> CellSpec:
        """The cell, an entry of `torch_bridge.cells.CELLS`."""
        raise NotImplementedError

    @overload
    def forward(
        self,
        input: Tensor,
        hx: Tensor | None = None,
        *,
        resets: Tensor | None = None,
        reset_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: Tensor | None = None,
        *,
        resets: PackedSequence | None = None,
        reset_state: Tensor | None = None,
    ) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self, input: Any, hx: Tensor | None = None, *, resets: Any = None, reset_state: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """Runs the stack, starting afresh wherever `resets` is nonzero.

        Args:
          input: `[T, B, D]` (`[B, T, D]` if `batch_first`), `[T, D]`, or a `PackedSequence`, in the dtype of the
            weights.
          hx: `[layers * directions, B, H]` (`[layers * directions, H]` if unbatched), in the dtype of the input or in
            float32; or None for zeros.
          resets: `[T, B]` (`[B, T]`, `[T]`), any dtype; nonzero at the first step of an episode, that is, the
            *previous* step's done. With packed inputs, a `PackedSequence` with the same lengths and order, whose data
            has an entry for every step. A backward direction starts an episode at the episode's last step.
          reset_state: the state at the start of an episode: None (zeros), `[layers * directions, H]`, a value for each
            sequence in the shape of `hx`, or a value for every step in the shape `[layers * directions, T, B, H]`
            (`[..., B, T, H]`, `[..., T, H]`). It is differentiable.

        Returns:
          `(output, h_n)`, the hidden states of the last layer, `[T, B, directions * H]` (`[B, T, ...]`, `[T, ...]`,
          packed), and the last states, `[layers * directions, B, H]`, in the dtype of `hx`.

        Raises:
          ValueError: resets, reset states or parameters have other shapes or dtypes, tensors are on several devices, or
            lengths of a `PackedSequence` exceed the steps of its data; also where `torch.nn` raises it.
          RuntimeError: the width of the input or the shape of `hx` is wrong, or there are no steps.
          NotImplementedError: the named implementation cannot run this input or its derivative, or inputs are packed
            and there is a reset state for every step.
        """
        ys, (h_n,) = forward(self, self._cell, input, None if hx is None else (hx,), resets, (reset_state,))
        return ys, h_n
