"""The base class of the recurrent modules."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from torch_bridge import op_common, rnn_ops
from torch_bridge.functional import Implementation
from torch_bridge.functional.checks import check_implementation
from torch_bridge.rnn_ops import Precision

Device = torch.device | str | int | None


class RecurrentModule(torch.nn.RNNBase):
    """Base class of the recurrent modules. They do not subclass those of `torch.nn`, which compilers refuse."""

    num_blocks: int = 1

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
        num_blocks: int = 1,
    ) -> None:
        super().__init__(
            mode, input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device,
            dtype,
        )  # fmt: skip
        check_implementation(implementation)
        if precision is not None:
            rnn_ops.kernel_precision(precision, self.hidden_size)  # raises ValueError if it is unknown
        self.precision, self.implementation = precision, implementation
        self.make_blocks(num_blocks)

    def make_blocks(self, num_blocks: int) -> None:
        """Replaces the recurrent weights by `num_blocks` blocks with their initial values, if there are several.

        Raises:
          ValueError: the number is not a positive integer, it does not divide H, or there is a projection.
        """
        if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
            raise ValueError(f"num_blocks must be an integer of at least 1, got {num_blocks!r}")
        if self.hidden_size % num_blocks:
            raise ValueError(f"num_blocks must divide hidden_size, {self.hidden_size}, got {num_blocks}")
        if num_blocks == 1:
            return
        if self.proj_size:
            raise ValueError(f"num_blocks={num_blocks} excludes a projection: pass proj_size=0 or num_blocks=1")
        self.num_blocks = num_blocks
        for name, w in [*self.named_parameters()]:
            if name.startswith("weight_hh"):
                blocks = w.detach().new_empty(num_blocks, w.shape[0] // num_blocks, w.shape[1] // num_blocks)
                setattr(self, name, Parameter(blocks))
        self._init_flat_weights()
        self._reset_blocks()

    def reset_parameters(self) -> None:
        """Draws new initial values, as `torch.nn` does; those of a block are those of a module of H / N units."""
        super().reset_parameters()
        self._reset_blocks()

    def _reset_blocks(self) -> None:
        if self.num_blocks > 1:
            bound = 1 / math.sqrt(self.hidden_size // self.num_blocks)
            for name, w in self.named_parameters():
                if name.startswith("weight_hh"):
                    torch.nn.init.uniform_(w, -bound, bound)

    def extra_repr(self) -> str:
        """Returns the arguments as `torch.nn` shows them, and the number of blocks if there are several."""
        return super().extra_repr() + (f", num_blocks={self.num_blocks}" if self.num_blocks > 1 else "")

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute. Raises NotImplementedError if `torch.ao.quantization` is to quantize this module."""
        if name == "qconfig" and value is not None:
            raise NotImplementedError(
                f"torch.ao.quantization cannot quantize a {type(self).__name__} of torch_bridge.nn: load the state "
                "dict into torch.nn.GRU or LSTM and quantize that, or set qconfig = None on this module, which stays "
                "as it is then"
            )
        super().__setattr__(name, value)

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
        """Checks the input as `torch.nn` does, also against weights that `torch.func.functional_call` substitutes.

        It also raises ValueError if the weights are complex.
        """
        flat: Any = self._flat_weights[0]
        weight: Any = self.weight_ih_l0
        dtype, before = weight.dtype, flat.dtype
        if not dtype.is_floating_point:
            raise ValueError(f"the parameters must be floating point, got {dtype}: convert them")
        if dtype != before:
            if input.dtype != dtype and not op_common.is_autocasting(input.device.type):
                raise ValueError(f"RNN input dtype ({input.dtype}) does not match weight dtype ({dtype}): convert one")
            input = torch.empty_like(input, dtype=before, device="meta")
        super().check_input(input, batch_sizes)

    def flatten_parameters(self) -> None:
        """Does nothing: only cuDNN needs all weights in one contiguous block of memory."""
