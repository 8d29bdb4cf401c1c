"""`GRU` and `LSTM` with episode resets, `RMSNorm` and `LayerNorm`: replacements for the modules of `torch.nn`.

Constructors, parameters, initial values, state dicts and outputs are those of `torch.nn`; so are the errors of the
recurrent modules. In addition, `forward` takes `resets` and `reset_state`, or a `residual`. `run_trajectories` takes
the inputs of TorchRL's recurrent modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from torch_bridge import cells, functional, op_common, rnn_ops
from torch_bridge.cells import CellSpec
from torch_bridge.functional import Direction, DirectionResult, Implementation
from torch_bridge.rnn_ops import Precision


class _RecurrentModule(torch.nn.RNNBase):
    """Base class of `GRU` and `LSTM`. It does not subclass `torch.nn.GRU` or `LSTM`: compilers refuse those."""

    def __init__(
        self, *args: Any, precision: Precision = None, implementation: Implementation = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        functional.check_implementation(implementation)
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


class GRU(_RecurrentModule):
    """`torch.nn.GRU` with episode resets.

    Args:
      args: see `torch.nn.GRU`.
      precision: precision of float32 products in the time loop, see `torch_bridge.functional.gru`.
      implementation: see `torch_bridge.functional.gru`.
      kwargs: see `torch.nn.GRU`.

    Raises:
      ValueError: see `torch.nn.GRU`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if "proj_size" in kwargs:
            raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")
        super().__init__("GRU", *args, **kwargs)

    def forward(
        self, input: Any, hx: Tensor | None = None, *, resets: Any = None, reset_state: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """Runs the stack, starting afresh wherever `resets` is nonzero.

        Args:
          input: `[T, B, D]` (`[B, T, D]` if `batch_first`), `[T, D]`, or a `PackedSequence`.
          hx: `[layers * directions, B, H]` (`[layers * directions, H]` if unbatched), or None for zeros.
          resets: `[T, B]` (`[B, T]`, `[T]`), any dtype; nonzero at the first step of an episode, that is, the
            *previous* step's done. With packed inputs, a `PackedSequence` with the same lengths and order, whose data
            has an entry for every step. A backward direction starts an episode at the episode's last step.
          reset_state: the state at the start of an episode: None (zeros), `[layers * directions, H]`, a value for each
            sequence in the shape of `hx`, or a value for every step in the shape `[layers * directions, T, B, H]`
            (`[..., B, T, H]`, `[..., T, H]`). It is differentiable.

        Returns:
          `(output, h_n)`, see `torch.nn.GRU`.

        Raises:
          ValueError: resets or reset states have other shapes; see also `torch.nn.GRU`.
          RuntimeError: see `torch.nn.GRU`.
          NotImplementedError: see `torch_bridge.functional.gru`; also for packed inputs with a reset state for every
            step.
        """
        ys, (h_n,) = _forward(self, cells.GRU, input, None if hx is None else (hx,), resets, (reset_state,))
        return ys, h_n


class LSTM(_RecurrentModule):
    """`torch.nn.LSTM` with episode resets.

    Args:
      args: see `torch.nn.LSTM`.
      precision: see `GRU`.
      implementation: see `GRU`.
      kwargs: see `torch.nn.LSTM`.

    Raises:
      ValueError: see `torch.nn.LSTM`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)

    get_expected_cell_size = torch.nn.LSTM.get_expected_cell_size
    check_forward_args = torch.nn.LSTM.check_forward_args  # type: ignore[assignment]  # as in torch.nn
    permute_hidden = torch.nn.LSTM.permute_hidden  # type: ignore[assignment]

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
          input: see `GRU.forward`.
          hx: `(h, c)`, each like `hx` of `GRU.forward`; the width of h is `proj_size` if that is given.
          resets: see `GRU.forward`.
          reset_state: None (zeros) or `(h, c)`, each like `reset_state` of `GRU.forward`.

        Returns:
          `(output, (h_n, c_n))`, see `torch.nn.LSTM`.

        Raises:
          ValueError: see `GRU.forward`.
          RuntimeError: see `torch.nn.LSTM`.
          NotImplementedError: see `GRU.forward`.
        """
        if hx is not None:
            hx = functional.split_state_pair("hx", hx)
        ys, (h_n, c_n) = _forward(
            self, cells.LSTM, input, hx, resets, functional.split_state_pair("reset_state", reset_state)
        )
        return ys, (h_n, c_n)


class _InitialStates(NamedTuple):
    """The initial states and resets of one direction of one layer, with the attributes of `Direction`."""

    states: tuple[Tensor | None, ...]
    resets: Tensor | None
    reset_states: tuple[Tensor | None, ...]


def _directions(rnn: torch.nn.RNNBase) -> int:
    return 2 if rnn.bidirectional else 1


def _is_backward(rnn: torch.nn.RNNBase, index: int) -> bool:
    """Whether direction `index` of the stack, counted over all layers, runs from the last step to the first."""
    return rnn.bidirectional and index % 2 == 1


def _widths(rnn: torch.nn.RNNBase, cell: CellSpec) -> tuple[int, ...]:
    return (rnn.proj_size or rnn.hidden_size, rnn.hidden_size)[: len(cell.states)]


def _run_stack(
    rnn: torch.nn.RNNBase, cell: CellSpec, xs: Tensor, starts: Sequence[_InitialStates], batch_first: bool, cells: bool
) -> tuple[Tensor, list[DirectionResult]]:
    """Runs all layers. Returns the outputs of the last layer, and the results of each direction of each layer."""
    outcomes: list[DirectionResult] = []
    for layer in range(rnn.num_layers):
        directions = []
        for i in range(layer * _directions(rnn), (layer + 1) * _directions(rnn)):
            names = dict.fromkeys(("w_ih", "w_hh", "b_ih", "b_hh", "w_hr"))
            suffix = f"_l{layer}_reverse" if _is_backward(rnn, i) else f"_l{layer}"
            for name, long in (("w_ih", "weight_ih"), ("w_hh", "weight_hh"), ("b_ih", "bias_ih"), ("b_hh", "bias_hh")):
                names[name] = getattr(rnn, long + suffix) if rnn.bias or name.startswith("w") else None
            if rnn.proj_size:
                names["w_hr"] = getattr(rnn, "weight_hr" + suffix)
            directions.append(Direction(**names, **starts[i]._asdict()))  # type: ignore[arg-type]
        results = functional.run_layer(
            cell, xs, directions, batch_first=batch_first, cells=cells,
            precision=getattr(rnn, "precision", None), implementation=getattr(rnn, "implementation", None),
        )  # fmt: skip
        outcomes += results
        xs = results[0].hs if len(results) == 1 else torch.cat([one.hs for one in results], -1)
        if rnn.dropout and layer < rnn.num_layers - 1:
            xs = dropout(xs, rnn.dropout, rnn.training)
    return xs, outcomes


def _forward(
    rnn: Any, cell: CellSpec, input: Any, hx: Any, resets: Any, reset_states: tuple[Tensor | None, ...]
) -> tuple[Any, tuple[Tensor, ...]]:
    """Returns the outputs and the last states `[layers * directions, B, width]`, as `torch.nn` does."""
    if isinstance(input, PackedSequence):
        return _forward_packed(rnn, cell, input, hx, resets, reset_states)
    if input.dim() not in (2, 3):
        raise ValueError(f"{rnn.mode}: Expected input to be 2D or 3D, got {input.dim()}D instead")
    if hx is not None and any(x.dim() != input.dim() for x in hx):
        kind, ranks = "batched 3-D" if input.dim() == 3 else "unbatched 2-D", [f"{x.dim()}-D" for x in hx]
        if cell is cells.GRU:
            raise RuntimeError(f"For {kind} input, hx should also be {input.dim()}-D but got {ranks[0]} tensor")
        raise RuntimeError(
            f"For {kind} input, hx and cx should also be {input.dim()}-D but got ({', '.join(ranks)}) tensors"
        )
    if input.dim() == 3:
        return _forward_batch(rnn, cell, input, hx, resets, reset_states)
    axis = 0 if rnn.batch_first else 1
    _check_resets(rnn, cell, tuple(input.shape[:1]), (), resets, reset_states)
    ys, last = _forward_batch(
        rnn, cell, input.unsqueeze(axis), hx and tuple(x.unsqueeze(1) for x in hx),
        None if resets is None else resets.unsqueeze(axis),
        tuple(x if x is None or x.dim() < 3 else x.unsqueeze(1 + axis) for x in reset_states),
    )  # fmt: skip
    return ys.squeeze(axis), tuple(x.squeeze(1) for x in last)


def _checked_states(rnn: Any, cell: CellSpec, input: Tensor, hx: Any, batch: int, batch_sizes: Any) -> Any:
    """Returns the initial states, zeros if `hx` is None. Raises the errors of `torch.nn`."""
    if hx is None:
        count = rnn.num_layers * _directions(rnn)
        hx = tuple(input.new_zeros((count, batch, width)) for width in _widths(rnn, cell))
    rnn.check_forward_args(input, hx if cell is cells.LSTM else hx[0], batch_sizes)
    for x in hx:
        functional.check_state_dtype("hx", x, "the input", input, rnn.weight_ih_l0)
    return hx


def _forward_batch(
    rnn: Any, cell: CellSpec, xs: Tensor, hx: Any, resets: Tensor | None, reset_states: tuple[Tensor | None, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    time = 1 if rnn.batch_first else 0
    states = _checked_states(rnn, cell, xs, hx, xs.shape[1 - time], None)
    if xs.shape[time] == 0:
        raise RuntimeError("Expected sequence length to be larger than 0 in RNN")
    _check_resets(rnn, cell, tuple(xs.shape[:2]), (xs.shape[1 - time],), resets, reset_states)
    backward = None if resets is None or not rnn.bidirectional else _resets_of_reversed(resets, time)
    starts = [
        _InitialStates(
            (None,) * len(states) if hx is None else tuple(x[i] for x in states),
            backward if _is_backward(rnn, i) else resets,
            tuple(None if x is None else x[i] for x in reset_states),
        )
        for i in range(states[0].shape[0])
    ]
    ys, outcomes = _run_stack(rnn, cell, xs, starts, rnn.batch_first, cells=False)
    return ys, tuple(functional.stack(x) for x in zip(*(one.last for one in outcomes), strict=True))


def _check_resets(
    rnn: Any, cell: CellSpec, outer: tuple[int, ...], batch: tuple[int, ...], resets: Any, reset_states: Sequence[Any]
) -> None:
    """Raises ValueError unless resets and reset states are tensors with shapes that `forward` accepts."""
    functional.check_tensor("resets", resets)
    if resets is not None and tuple(resets.shape) != outer:
        raise ValueError(f"resets must be {outer}, the time and batch axes of the input, got {tuple(resets.shape)}")
    count = rnn.num_layers * _directions(rnn)
    for name, width, x in zip(cell.states, _widths(rnn, cell), reset_states, strict=True):
        functional.check_reset_state(name, x)
        if x is None:
            continue
        if resets is None:
            raise ValueError("reset_state is given but resets is None: pass resets, or leave reset_state out")
        shapes = dict.fromkeys(((count, width), (count, *batch, width), (count, *outer, width)))
        if tuple(x.shape) not in shapes:
            *others, last = map(str, shapes)
            raise ValueError(f"the reset state of {name} must be {', '.join(others)} or {last}, got {tuple(x.shape)}")


def _resets_of_reversed(resets: Tensor, time: int, last: Tensor | None = None) -> Tensor:
    """Returns the resets of a loop from the last step to the first, which starts each episode at its last step.

    A sequence's last episode needs no reset, because the loop itself begins there. `last` is the index of the last step
    of each sequence; the steps after it are padding.
    """
    steps = resets.shape[time]
    begins = (resets != 0).roll(-1, time)
    number = torch.arange(steps, device=resets.device)
    number = number if time == 1 else number[:, None]
    return begins & (number != steps - 1 if last is None else number < last)


def _forward_packed(
    rnn: Any, cell: CellSpec, packed: PackedSequence, hx: Any, resets: Any, reset_states: tuple[Tensor | None, ...]
) -> tuple[PackedSequence, tuple[Tensor, ...]]:
    """Runs over the padding too, which changes no result: it comes last, or, backward, a reset discards its states."""
    data, batch_sizes, order, inverse = packed
    states = _checked_states(rnn, cell, data, hx, int(batch_sizes[0]), batch_sizes)
    if resets is not None:
        if not isinstance(resets, PackedSequence) or not torch.equal(resets.batch_sizes, batch_sizes):
            raise ValueError(
                "resets of a PackedSequence must be a PackedSequence of the same lengths, in the same order"
            )
        if resets.data.dim() != 1:
            raise ValueError(f"the data of resets must be [steps], got {tuple(resets.data.shape)}")
    if any(x is not None and x.dim() > 3 for x in reset_states):
        raise NotImplementedError("packed inputs cannot have a reset state for every step: use pad_packed_sequence")

    def sort(x: Tensor | None, order: Tensor | None = order) -> Any:
        return x if x is None or order is None or x.dim() < 3 else x.index_select(1, order)

    xs, lengths = pad_packed_sequence(PackedSequence(data, batch_sizes))
    last = lengths.to(xs.device) - 1
    if resets is not None:
        resets, _ = pad_packed_sequence(PackedSequence((resets.data != 0).to(torch.uint8), batch_sizes))
    reset_states = tuple(map(sort, reset_states))
    _check_resets(rnn, cell, tuple(xs.shape[:2]), xs.shape[1:2], resets, reset_states)
    starts = []
    for i in range(states[0].shape[0]):
        first = tuple(sort(x)[i] for x in states)
        one = _InitialStates(first, resets, tuple(None if x is None else x[i] for x in reset_states))
        starts.append(_start_at_end(one, last, xs) if _is_backward(rnn, i) else one)
    ys, outcomes = _run_stack(rnn, cell, xs, starts, False, cells=cell is cells.LSTM)

    results = []
    sequence = torch.arange(xs.shape[1], device=xs.device)
    for i, out in enumerate(outcomes):
        ends = out.last
        if not _is_backward(rnn, i):  # a backward loop ends at the first step of every sequence
            ends = tuple(x[last, sequence] for x in (out.hs, out.cs) if x is not None)
        results.append(ends)
    h_n = tuple(sort(torch.stack(x), inverse) for x in zip(*results, strict=True))
    return PackedSequence(pack_padded_sequence(ys, lengths).data, batch_sizes, order, inverse), h_n


def _start_at_end(one: _InitialStates, last: Tensor, xs: Tensor) -> _InitialStates:
    """Returns `one` with a reset to its initial states at each sequence's last step, where a backward loop begins."""
    end = torch.arange(xs.shape[0], device=xs.device)[:, None] == last
    if one.resets is None:
        return _InitialStates(one.states, end, one.states)
    begins = _resets_of_reversed(one.resets, 0, last)
    states = []
    for first, new in zip(one.states, one.reset_states, strict=True):
        assert first is not None
        states.append(torch.where(end[..., None], first, torch.zeros_like(first) if new is None else new))
    return _InitialStates(one.states, begins | end, tuple(states))


def run_trajectories(
    rnn: torch.nn.RNNBase, input: Tensor, is_init: Tensor, hidden: Tensor, cell: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Runs a stack over rollouts that hold several trajectories, with the conventions of TorchRL's recurrent modules.

    It computes what `torchrl.modules.GRUModule` and `LSTMModule` compute in recurrent mode, but on the kernels, and
    without splitting rollouts into trajectories and padding them. To use it as a module of a policy:

        TensorDictModule(
            functools.partial(run_trajectories, rnn), in_keys=["embed", "is_init", "hidden"],
            out_keys=["features", ("next", "hidden")],
        )

    Args:
      rnn: a GRU or an LSTM of this module or of `torch.nn`, which provides the weights.
      input: `[B, T, D]`.
      is_init: `[B, T]` or `[B, T, 1]`, nonzero at the first step of a trajectory.
      hidden: `[B, T, layers * directions, H]`. A trajectory starts from the value at its first step; values at other
        steps are not used.
      cell: the cell states of an LSTM, like `hidden`.

    Returns:
      `(features, hidden)`, or `(features, hidden, cell)`. The outputs are `[B, T, directions * H]`. The states have the
      shape of `hidden`: at the last step of each trajectory they hold the state after that step, at other steps zeros.

    Raises:
      ValueError: shapes disagree, there are no steps, or `rnn` is not a GRU or an LSTM.
      RuntimeError: the width of the input is wrong, as in `torch.nn`.
    """
    kind = {"GRU": cells.GRU, "LSTM": cells.LSTM}.get(rnn.mode)
    if kind is None:
        raise ValueError(f"the weights must be a GRU's or an LSTM's, got {rnn.mode}")
    given = (hidden,) if cell is None else (hidden, cell)
    if len(given) != len(kind.states):
        raise ValueError(
            f"a {rnn.mode} takes {'hidden' if kind is cells.GRU else 'hidden and cell'}, got {len(given)} states"
        )
    outer = tuple(input.shape[:-1])
    if is_init.dim() == 3:
        is_init = is_init.squeeze(-1)
    if len(outer) != 2 or tuple(is_init.shape) != outer:
        raise ValueError(
            f"input must be [B, T, D] and is_init [B, T], got {tuple(input.shape)} and {tuple(is_init.shape)}"
        )
    count = rnn.num_layers * _directions(rnn)
    for x, width in zip(given, _widths(rnn, kind), strict=True):
        if tuple(x.shape) != (*outer, count, width):
            raise ValueError(
                f"hidden states must be [B, T, layers, H] = {(*outer, count, width)}, got {tuple(x.shape)}"
            )
    if outer[1] == 0:
        raise ValueError(f"a rollout needs at least one step, and input {tuple(input.shape)} has none")
    rnn.check_input(input, None)
    is_init = is_init != 0
    step = torch.arange(outer[1], device=input.device).expand(outer)
    first = step.masked_fill(~is_init, 0).cummax(1).values  # first step of each step's trajectory
    backward = _resets_of_reversed(is_init, 1)
    ends = backward | (step == outer[1] - 1)

    def at_first(x: Tensor) -> Tensor:
        return x.gather(1, first[..., None].expand(*outer, x.shape[-1]))

    starts = []
    for i in range(count):
        each = tuple(x[:, :, i] for x in given)
        if _is_backward(rnn, i):
            each = tuple(map(at_first, each))
            starts.append(_InitialStates(tuple(x[:, -1] for x in each), backward, each))
        else:
            starts.append(_InitialStates(tuple(x[:, 0] for x in each), is_init, each))
    ys, outcomes = _run_stack(rnn, kind, input, starts, True, cells=True)
    results = []
    for k in range(len(given)):
        every = [one.hs if one.cs is None or k == 0 else one.cs for one in outcomes]
        last = [at_first(x) if _is_backward(rnn, i) else x for i, x in enumerate(every)]
        results.append(torch.stack(last, -2).masked_fill(~ends[..., None, None], 0))
    return ys, *results


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, fused with the sum of a residual connection.

    Args:
      args: see `torch.nn.RMSNorm`.
      implementation: see `torch_bridge.functional.rms_norm`.
      kwargs: see `torch.nn.RMSNorm`.
    """

    def __init__(self, *args: Any, implementation: Implementation = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.implementation = implementation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Normalizes over the trailing axes.

        Args:
          x: `[*batch, *normalized_shape]`.
          residual: added to `x` before the norm, in the shape of `x`; or None.

        Returns:
          The result of `torch.nn.RMSNorm`; with a residual, `(norm of x + residual, x + residual)`.

        Raises:
          ValueError: shapes disagree.
          NotImplementedError: see `torch_bridge.functional.rms_norm`.
        """
        return _normalize(functional.rms_norm, self, x, residual, self.weight, None)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, fused with the sum of a residual connection.

    Args:
      args: see `torch.nn.LayerNorm`.
      implementation: see `torch_bridge.functional.rms_norm`.
      kwargs: see `torch.nn.LayerNorm`.
    """

    def __init__(self, *args: Any, implementation: Implementation = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.implementation = implementation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """Normalizes over the trailing axes.

        Args:
          input: `[*batch, *normalized_shape]`.
          residual: added to `input` before the norm, in the shape of `input`; or None.

        Returns:
          The result of `torch.nn.LayerNorm`; with a residual, `(norm of input + residual, input + residual)`.

        Raises:
          ValueError: shapes disagree.
          NotImplementedError: see `torch_bridge.functional.layer_norm`.
        """
        return _normalize(functional.layer_norm, self, input, residual, self.weight, self.bias)


def _normalize(
    norm: Any, module: RMSNorm | LayerNorm, x: Tensor, residual: Tensor | None, weight: Tensor | None,
    bias: Tensor | None,
) -> Any:  # fmt: skip
    shape = tuple(module.normalized_shape)
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"x must be [*batch, *normalized_shape] with {shape}, got {tuple(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"the residual must be {tuple(x.shape)}, the shape of x, got {tuple(residual.shape)}")

    def flat(y: Tensor | None) -> Any:
        return y if y is None or len(shape) == 1 else y.flatten(-len(shape))

    results = norm(
        flat(x), flat(weight), flat(bias), residual=flat(residual), eps=module.eps,
        implementation=module.implementation,
    )  # fmt: skip
    if len(shape) == 1:
        return results
    return results.reshape(x.shape) if residual is None else tuple(y.reshape(x.shape) for y in results)
