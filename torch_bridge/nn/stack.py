"""The layers of a recurrent module, run one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import dropout, pad

from torch_bridge import op_common
from torch_bridge.cells import CellSpec
from torch_bridge.functional.call import Call, Direction, DirectionResult
from torch_bridge.functional.checks import check_weight
from torch_bridge.functional.layer import run


def directions_of(rnn: torch.nn.RNNBase) -> int:
    """Returns the number of directions of a layer."""
    return 2 if rnn.bidirectional else 1


def is_backward(rnn: torch.nn.RNNBase, index: int) -> bool:
    """Whether direction `index` of the stack, counted over all layers, runs from the last step to the first."""
    return rnn.bidirectional and index % 2 == 1


def widths_of(rnn: torch.nn.RNNBase, cell: CellSpec) -> tuple[int, ...]:
    """Returns the width of each state."""
    return (rnn.proj_size or rnn.hidden_size, rnn.hidden_size)[: len(cell.states)]


def resets_of_reversed(resets: Tensor, time: int, last: Tensor | None = None) -> Tensor:
    """Returns the resets of a loop from the last step to the first, which starts each episode at its last step.

    A sequence's last episode needs no reset, because the loop itself begins there. `last` is the index of the last step
    of each sequence, time first; the steps after it are padding.
    """
    steps = resets.shape[time]
    after_last = (0, 0) * (resets.ndim - 1 - time) + (0, 1)
    begins = pad(resets != 0, after_last).narrow(time, 1, steps)  # no array of T - 1 steps: its sizes exclude T = 2
    return begins if last is None else begins & (torch.arange(steps, device=resets.device)[:, None] < last)


# The names of parameters without their suffixes, in the order of `Direction`.
_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


def call_of(
    rnn: torch.nn.RNNBase, cell: CellSpec, input: Tensor, batch_first: bool, hx: Sequence[Tensor] | None = None,
    resets: tuple[Tensor | None, ...] = (None, None), reset_states: Sequence[Tensor | None] | None = None,
) -> Call:  # fmt: skip
    """Returns the call of a stack, which has the directions of all layers in order.

    Args:
      rnn: the stack.
      cell: its cell.
      input: the inputs of the first layer.
      batch_first: the layout of arrays with a time axis.
      hx: for each state an array whose axis 0 is the directions, or None.
      resets: the resets of the directions that run forward, and of those that run backward.
      reset_states: for each state None or an array whose axis 0 is the directions.

    Raises:
      ValueError: a parameter has another shape, dtype or device than the module and the input require.
    """
    if not input.is_floating_point():
        raise ValueError(f"the input must be floating point, got {input.dtype}: convert it")
    count, hidden, width = directions_of(rnn), rnn.hidden_size, rnn.proj_size or rnn.hidden_size
    rows, blocks = cell.gates * hidden, getattr(rnn, "num_blocks", 1)
    w_hh = (rows, width) if blocks == 1 else (blocks, rows // blocks, hidden // blocks)
    none = (None,) * len(cell.states)
    directions = []
    for i in range(rnn.num_layers * count):
        backward = is_backward(rnn, i)
        suffix = f"_l{i // count}_reverse" if backward else f"_l{i // count}"
        inputs = rnn.input_size if i < count else count * width
        weights: list[Tensor | None] = []
        for name, shape in zip(_PARAMETERS, ((rows, inputs), w_hh, (rows,), (rows,), (width, hidden)), strict=True):
            w = None
            if bool(rnn.proj_size) if name == "weight_hr" else (rnn.bias or name.startswith("weight")):
                w = getattr(rnn, name + suffix)
                if w is not None or name.startswith("weight"):
                    check_weight(name + suffix, w, shape, "the input", input)
            weights.append(w)
        one = Direction(  # type: ignore[call-arg]  # the parameters are before the rest
            *weights,  # type: ignore[arg-type]
            none if hx is None else tuple([x[i] for x in hx]),
            resets[int(backward)],  # PyTorch 2.11 compiles no index that is a bool
            none if reset_states is None else tuple([None if x is None else x[i] for x in reset_states]),
        )
        directions.append(rnn.fold_norm(one, suffix, input) if cell.norm else one)  # type: ignore[operator]
    return Call(
        cell, input, directions, batch_first=batch_first, precision=getattr(rnn, "precision", None),
        implementation=getattr(rnn, "implementation", None), epsilon=getattr(rnn, "epsilon", 0.0),
    )  # fmt: skip


def run_stack(rnn: torch.nn.RNNBase, call: Call) -> tuple[Tensor, list[DirectionResult]]:
    """Runs all layers. Returns the outputs of the last layer, and the results of each direction of each layer."""
    xs, count, dtype = call.xs, directions_of(rnn), call.xs.dtype
    outcomes: list[DirectionResult] = []
    for layer in range(rnn.num_layers):
        if xs.dtype != dtype and not op_common.is_autocasting(xs.device.type):
            xs = xs.to(dtype)  # outputs have the dtype of the states, and the next layer's weights that of the input
        results = run(call._replace(xs=xs, directions=call.directions[layer * count : (layer + 1) * count]))
        outcomes += results
        xs = results[0].hs if len(results) == 1 else torch.cat([one.hs for one in results], -1)
        if rnn.dropout and layer < rnn.num_layers - 1:
            xs = dropout(xs, rnn.dropout, rnn.training)
    return xs, outcomes
