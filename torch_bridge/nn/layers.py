"""The modules of the cells. Where a class has no `forward`, `recurrent.SingleStateModule` has it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from torch_bridge import cells
from torch_bridge.cells import CellSpec
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional import Direction, Implementation
from torch_bridge.functional.lstm import split_state_pair
from torch_bridge.functional.norm_gru import cell_of as norm_gru_cell_of
from torch_bridge.functional.norm_gru import check_constants, check_norm
from torch_bridge.functional.norm_weights import NormWeights, fold
from torch_bridge.functional.rnn import cell_of as rnn_cell_of
from torch_bridge.nn.forward import run_module
from torch_bridge.nn.recurrent import Device, RecurrentModule, SingleStateModule
from torch_bridge.rnn_ops import Precision


class GRU(SingleStateModule):
    """`torch.nn.GRU` with episode resets.

    Args:
      input_size: D, the width of the input.
      hidden_size: H, the width of every layer and direction.
      num_layers: the number of layers; each runs over the outputs of the previous layer.
      bias: whether each direction of a layer has the biases `bias_ih_l{k}` and `bias_hh_l{k}`.
      batch_first: whether inputs are `[B, T, D]` or, by default, `[T, B, D]`. States have the same shape with both.
      dropout: the rate of the dropout on the outputs of every layer but the last while the module trains.
      bidirectional: whether each layer also runs from the last step to the first, with separate weights.
      proj_size: must be None: only an LSTM has a projection.
      device: the device of the parameters.
      dtype: the dtype of the parameters.
      precision: precision of float32 products in the time loop on a GPU: "tf32"; "tf32x3", which has the accuracy of
        float32; or None: "tf32" if `torch.backends.cuda.matmul` allows it and H is above 32, else "tf32x3".
      implementation: "triton" (the kernels, which need an NVIDIA GPU), "torch" (PyTorch operations), or None: the
        kernels where they can run, elsewhere PyTorch operations. A call raises NotImplementedError if the named one
        cannot run the input.
      num_blocks: N, the number of blocks (heads) of the recurrent weights. The H / N consecutive units of a block read
        the states of their own block alone, and all inputs. With N > 1, `weight_hh_l0` and its like, which have F rows
        otherwise, are `[N, F / N, H / N]`, the rows of a block ordered by gate. Their initial values are those of a
        module of H / N units: uniform between -1 / sqrt(H / N) and 1 / sqrt(H / N).

    Raises:
      ValueError: the precision or the implementation is unknown, `num_blocks` is not a positive integer that divides H,
        or `torch.nn` rejects an argument.
      TypeError: `hidden_size` is not an integer.

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import GRU
      >>> rnn = GRU(3, 4, num_layers=2)
      >>> xs, resets = torch.randn(5, 2, 3), torch.zeros(5, 2)
      >>> ys, h_n = rnn(xs, resets=resets)
      >>> ys, h_n = rnn(xs, h_n, resets=resets)  # goes on from there
      >>> ys.shape
      torch.Size([5, 2, 4])
    """

    mode = "GRU"
    _cell = cells.GRU


@inherit_descriptions(GRU)
class LSTM(RecurrentModule):
    """`torch.nn.LSTM` with episode resets.

    Args:
      proj_size: P, the width to which hidden states are projected; 0 for no projection.
      num_blocks: N, the number of blocks (heads) of the recurrent weights. The H / N consecutive units of a block read
        the states of their own block alone, and all inputs. With N > 1, `weight_hh_l0` and its like are
        `[N, 4H / N, H / N]`, and their initial values are those of a module of H / N units. It excludes `proj_size`.

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import LSTM
      >>> rnn = LSTM(3, 4)
      >>> xs, resets = torch.randn(5, 2, 3), torch.zeros(5, 2)
      >>> ys, state = rnn(xs, resets=resets)
      >>> ys, state = rnn(xs, state, resets=resets)  # goes on from there
      >>> ys.shape
      torch.Size([5, 2, 4])
    """

    mode = "LSTM"
    _cell = cells.LSTM

    get_expected_cell_size = torch.nn.LSTM.get_expected_cell_size
    check_forward_args = torch.nn.LSTM.check_forward_args  # type: ignore[assignment]  # as in torch.nn
    permute_hidden = torch.nn.LSTM.permute_hidden  # type: ignore[assignment]

    if TYPE_CHECKING:

        @overload
        def __call__(
            self,
            input: Tensor,
            hx: tuple[Tensor, Tensor] | None = None,
            *,
            resets: Tensor | None = None,
            reset_state: tuple[Tensor | None, Tensor | None] | None = None,
        ) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...

        @overload
        def __call__(
            self,
            input: PackedSequence,
            hx: tuple[Tensor, Tensor] | None = None,
            *,
            resets: PackedSequence | None = None,
            reset_state: tuple[Tensor | None, Tensor | None] | None = None,
        ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102

    @overload
    def forward(
        self,
        input: Tensor,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        resets: Tensor | None = None,
        reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...

    @overload
    def forward(
        self,
        input: PackedSequence,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        resets: PackedSequence | None = None,
        reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> tuple[PackedSequence, tuple[Tensor, Tensor]]: ...

    @inherit_descriptions(SingleStateModule.forward)
    def forward(
        self,
        input: Any,
        hx: tuple[Tensor, Tensor] | None = None,
        *,
        resets: Any = None,
        reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    ) -> tuple[Any, tuple[Tensor, Tensor]]:
        """Runs the stack, starting afresh wherever `resets` is nonzero.

        Args:
          hx: `(h, c)`, each `[layers * directions, B, H]` (`[layers * directions, H]` if unbatched), in the dtype of
            the input or in float32; or None for zeros. The width of h is `proj_size` if that is given.
          reset_state: `(h, c)` at the start of an episode: None (zeros), or a pair of None or arrays, each
            `[layers * directions, H]`, a value for each sequence in the shape of `hx`, or a value for every step in the
            shape `[layers * directions, T, B, H]` (`[..., B, T, H]`, `[..., T, H]`). It is differentiable.

        Returns:
          `(output, (h_n, c_n))`, the hidden states of the last layer, `[T, B, directions * H]` (`[B, T, ...]`,
          `[T, ...]`, packed), and the last states, in the shape and the dtype of `hx`.
        """
        if hx is not None:
            hx = split_state_pair("hx", hx)
        ys, (h_n, c_n) = run_module(self, self._cell, input, hx, resets, split_state_pair("reset_state", reset_state))
        return ys, (h_n, c_n)


@inherit_descriptions(GRU)
class MGU(SingleStateModule):
    """Minimal gated units with episode resets, in the form of `torch.nn.GRU`; `torch.nn` has no such module.

    Parameters have the names of those of `torch.nn.GRU`, with 2H rows instead of 3H, gates ordered f, n. Their initial
    values are uniform between -1 / sqrt(H) and 1 / sqrt(H).

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import MGU
      >>> rnn = MGU(3, 4)
      >>> xs, resets = torch.randn(5, 2, 3), torch.zeros(5, 2)
      >>> ys, h_n = rnn(xs, resets=resets)
      >>> ys, h_n = rnn(xs, h_n, resets=resets)  # goes on from there
      >>> ys.shape
      torch.Size([5, 2, 4])
    """

    mode = "MGU"
    _cell = cells.MGU


@inherit_descriptions(GRU)
class RNN(SingleStateModule):
    """`torch.nn.RNN` with episode resets.

    Args:
      nonlinearity: "tanh" or "relu".

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import RNN
      >>> rnn = RNN(3, 4, nonlinearity="relu")
      >>> xs, resets = torch.randn(5, 2, 3), torch.zeros(5, 2)
      >>> ys, h_n = rnn(xs, resets=resets)
      >>> ys, h_n = rnn(xs, h_n, resets=resets)  # goes on from there
      >>> ys.shape
      torch.Size([5, 2, 4])
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
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
        rnn_cell_of(nonlinearity)  # raises ValueError if it is unknown
        self.nonlinearity, self.mode = nonlinearity, f"RNN_{nonlinearity.upper()}"
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype,
            precision=precision, implementation=implementation, num_blocks=num_blocks,
        )  # fmt: skip

    @property
    def _cell(self) -> CellSpec:
        """The cell, an entry of `torch_bridge.cells.CELLS`."""
        return rnn_cell_of(self.nonlinearity)


@inherit_descriptions(GRU)
class NormGRU(SingleStateModule):
    """The GRU of DreamerV3, whose gates see a norm of inputs and state, in the form of `torch.nn.GRU`.

    `torch.nn` has no such module. Weights and biases have the names and shapes of those of `torch.nn.GRU`, with gates
    ordered r, n, u. Layer k also has the scales of the norm, `scale_i_l{k}` for its inputs and `scale_h_l{k} [H]` for
    its state, and with `norm="layer"` the shifts `shift_i_l{k}` and `shift_h_l{k}`; those of a backward direction end
    in `_reverse`. Initial values are uniform between -1 / sqrt(H) and 1 / sqrt(H), but ones for scales and zeros for
    shifts. `functional.norm_gru` has the formula.

    Args:
      norm: "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance.
      update_bias: what is added to the update gate before its activation.
      num_blocks: must be 1, because the norm sees all units.

    Raises:
      ValueError: the norm, the precision or the implementation is unknown, there are several blocks, or `torch.nn`
        rejects an argument.

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import NormGRU
      >>> rnn = NormGRU(3, 4, norm="layer")
      >>> xs, resets = torch.randn(5, 2, 3), torch.zeros(5, 2)
      >>> ys, h_n = rnn(xs, resets=resets)
      >>> ys, h_n = rnn(xs, h_n, resets=resets)  # goes on from there
      >>> ys.shape
      torch.Size([5, 2, 4])
    """

    mode = "NormGRU"

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
        norm: Literal["rms", "layer"] = "rms",
        epsilon: float = 1e-4,
        update_bias: float = -1.0,
        precision: Precision = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
    ) -> None:
        norm_gru_cell_of(norm)  # raises ValueError if it is unknown
        check_constants(epsilon, update_bias)
        if num_blocks != 1:
            raise ValueError(
                f"num_blocks must be 1, because the norm of a NormGRU sees all units, got {num_blocks!r}: use GRU for "
                "blocks"
            )
        self.norm, self.epsilon, self.update_bias = norm, epsilon, update_bias
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype,
            precision=precision, implementation=implementation,
        )  # fmt: skip
        for name, w in [*self.named_parameters()]:
            if name.startswith("weight"):  # weight_ih_l0 [3H, D] has scale_i_l0 [D]
                end = name.removeprefix("weight_ih").removeprefix("weight_hh")
                operand, width = name[len("weight_")], w.shape[1]
                setattr(self, f"scale_{operand}{end}", Parameter(w.new_ones(width)))
                if norm == "layer":
                    setattr(self, f"shift_{operand}{end}", Parameter(w.new_zeros(width)))

    def reset_parameters(self) -> None:
        """Draws weights and biases uniformly between -1 / sqrt(H) and 1 / sqrt(H); scales are ones, shifts zeros."""
        bound = 1 / math.sqrt(self.hidden_size)
        for name, x in self.named_parameters():
            if name.startswith("scale"):
                torch.nn.init.ones_(x)
            elif name.startswith("shift"):
                torch.nn.init.zeros_(x)
            else:
                torch.nn.init.uniform_(x, -bound, bound)

    def fold_norm(self, one: Direction, suffix: str, input: Tensor) -> Direction:
        """Returns a direction whose weights and bias contain the norm, given that of the parameters with a suffix.

        Raises ValueError unless the norm's parameters fit the others, and have the dtype and device of the input.
        """
        parameters = NormWeights(*(getattr(self, name + suffix, None) for name in NormWeights._fields))
        check_norm(self._cell, "the input", input, one, parameters, suffix)
        return fold(self._cell, one, parameters, self.update_bias)

    def extra_repr(self) -> str:
        """Returns the arguments as `torch.nn` shows them, and the norm."""
        return super().extra_repr() + f", norm={self.norm}"

    @property
    def _cell(self) -> CellSpec:
        """The cell, an entry of `torch_bridge.cells.CELLS`."""
        return norm_gru_cell_of(self.norm)
