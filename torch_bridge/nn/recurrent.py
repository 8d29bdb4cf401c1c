"""The base class of the recurrent modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bridge import op_common, rnn_ops
from torch_bridge.functional.checks import Implementation, check_implementation
from torch_bridge.rnn_ops import Precision


class RecurrentModule(torch.nn.RNNBase):
    """Base class of the recurrent modules. They do not subclass those of `torch.nn`, which compilers refuse."""

    def __init__(
        self, *args: Any, precision: Precision = None, implementation: Implementation = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        check_implementation(implementation)
        if precision is not None:
            rnn_ops.kernel_precision(precision, self.hidden_size)  # raises ValueError if it is unknown
        self.precision, self.implementation = precision, implementation

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
