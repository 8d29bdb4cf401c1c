"""The base classes of the recurrent modules: of all, and of those whose cell has one state."""

from __future__ import annotations

import math
import types
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from torch_bridge import op_common, rnn_ops
from torch_bridge.cells import CellSpec
from torch_bridge.functional import Implementation
from torch_bridge.functional.checks import check_implementation
from torch_bridge.nn.forward import run_module
from torch_bridge.rnn_ops import Precision

Device = torch.device | str | int | None

# The kinds that `torch.nn.RNNBase` accepts. A module of another kind is constructed as a GRU without allocated memory,
# and gets its weights afterwards.
_MODES_OF_TORCH = ("GRU", "LSTM", "RNN_TANH", "RNN_RELU")


class RecurrentModule(torch.nn.RNNBase):
    """Base class of the recurrent modules. They do not subclass those of `torch.nn`, which compilers refuse.

    A module of a cell has an attribute `mode`, its kind as `torch.nn` names it, and `_cell`.
    """

    num_blocks: int = 1

    def __init_subclass__(cls, **options: Any) -> None:
        """Gives a class of a cell methods of its own name, which Python's errors for wrong arguments contain."""
        super().__init_subclass__(**options)
        for name in ("__init__", "forward") if "_cell" in vars(cls) else ():
            if name not in vars(cls):
                f = getattr(cls, name)
                own: Any = types.FunctionType(f.__code__, f.__globals__, name, f.__defaults__, f.__closure__)
                own.__kwdefaults__, own.__annotations__ = f.__kwdefaults__, f.__annotations__
                own.__qualname__ = f"{cls.__name__}.{name}"
                setattr(cls, name, own)

    def __init__(
        self,
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
        mode, is_in_torch = self.mode, self.mode in _MODES_OF_TORCH
        super().__init__(
            mode if is_in_torch else "GRU", input_size, hidden_size, num_layers, bias, batch_first, dropout,
            bidirectional, proj_size, device if is_in_torch else "meta", dtype,
        )  # fmt: skip
        check_implementation(implementation)
        if precision is not None:
            rnn_ops.kernel_precision(precision, self.hidden_size)  # raises ValueError if it is unknown
        self.mode, self.precision, self.implementation = mode, precision, implementation
        if not is_in_torch:
            for name, w in [*self.named_parameters()]:
                shape = self._cell.gates * self.hidden_size, *w.shape[1:]
                setattr(self, name, Parameter(torch.empty(shape, dtype=w.dtype, device=device)))
            self._init_flat_weights()
            self.reset_parameters()
        self.make_blocks(num_blocks)

    @property
    def _cell(self) -> CellSpec:
        """The cell, an entry of `torch_bridge.cells.CELLS`."""
        raise NotImplementedError

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


class SingleStateModule(RecurrentModule):
    """Base class of the modules whose cell has one state."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        precision: Precision = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
    ) -> None:
        if proj_size is not None:
            raise ValueError(
                "proj_size argument is only supported for LSTM, not "
                + ("RNN or GRU" if self.mode in _MODES_OF_TORCH else self.mode)  # torch.nn names the two together
            )
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device=device, dtype=dtype,
            precision=precision, implementation=implementation, num_blocks=num_blocks,
        )  # fmt: skip

    # torch.nn.Module declares that a call returns anything, and pyright takes that type for `__call__ = forward` too
    if TYPE_CHECKING:

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
          NotImplementedError: the named implementation cannot run this input, or inputs are packed and there is a reset
            state for every step.
        """
        ys, (h_n,) = run_module(self, self._cell, input, None if hx is None else (hx,), resets, (reset_state,))
        return ys, h_n
