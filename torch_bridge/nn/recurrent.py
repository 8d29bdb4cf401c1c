"""The base class of the recurrent modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torch_bridge import op_common, rnn_ops
from torch_bridge.functional.checks import Implementation, check_implementation
from torch_bridge.rnn_ops import Precision

Device = torch.device | str | int | None


class RecurrentModule(torch.nn.RNNBase):
    """Base class of the recurrent modules. They do not subclass those of `torch.nn`, which compilers refuse."""

    def __init__(
        self,
        mode: str,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision = None,
        implementation: Implementation = None,
    ) -> None:
        super().__init__(
            mode, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device,
            dtype,
        )  # fmt: skip
        check_implementation(implementation)
        if precision is not None:
            rnn_ops.kernel_precision(precision, self.hidden_size)  # raises ValueError if it is unknown
        self.precision, self.implementation = precision, implementation

    if TYPE_CHECKING:  # torch.nn.Module declares that a call returns anything

        @overload
        def __call__(
            self,
            input: Tensor,
            hx: Tensor | None = None,
            *,
            resets: Tensor | None = None,
            reset_state: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]: ...

        @overload
        def __call__(
            self,
            input: PackedSequence,
            hx: Tensor | None = None,
            *,
            resets: PackedSequence | None = None,
            reset_state: Tensor | None = None,
        ) -> tuple[PackedSequence, Tensor]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102

    def check_input(self, input: Tensor, batch_sizes: Tensor | None) -> None:
        """Checks the input as `torch.nn` does, also against weights that `torch.func.functional_call` substitutes."""
        flat: Any = self._flat_weights[0]
        dtype, before = self.weight_ih_l0.dtype, flat.dtype
        if dtype != before:
            if input.dtype != dtype and not op_common.is_autocasting(input.device.type):
                raise ValueError(f"RNN input dtype ({input.dtype}) does not match weight dtype ({dtype}): convert one")
            input = torch.empty_like(input, dtype=before, device="meta")
        super().check_input(input, batch_sizes)

    def flatten_parameters(self) -> None:
        """Does nothing: only cuDNN needs all weights in one contiguous block of memory."""
