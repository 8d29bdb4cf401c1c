"""The layers of a recurrent module, run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import dropout

from torch_bridge import functional
from torch_bridge.cells import CellSpec
from torch_bridge.functional import Direction, DirectionResult


class InitialStates(NamedTuple):
    """The initial states and resets of one direction of one layer, with the attributes of `Direction`."""

    states: tuple[Tensor | None, ...]
    resets: Tensor | None
    reset_states: tuple[Tensor | None, ...]


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
    starts, steps = resets != 0, resets.shape[time]
    begins = torch.cat((starts.narrow(time, 1, steps - 1), torch.zeros_like(starts.narrow(time, 0, 1))), time)
    return begins if last is None else begins & (torch.arange(steps, device=resets.device)[:, None] < last)


def run_stack(
    rnn: torch.nn.RNNBase, cell: CellSpec, xs: Tensor, starts: Sequence[InitialStates], batch_first: bool, cells: bool
) -> tuple[Tensor, list[DirectionResult]]:
    """Runs all layers. Returns the outputs of the last layer, and the results of each direction of each layer."""
    outcomes: list[DirectionResult] = []
    for layer in range(rnn.num_layers):
        directions = []
        for i in range(layer * directions_of(rnn), (layer + 1) * directions_of(rnn)):
            names = dict.fromkeys(("w_ih", "w_hh", "b_ih", "b_hh", "w_hr"))
            suffix = f"_l{layer}_reverse" if is_backward(rnn, i) else f"_l{layer}"
            for name, long in (("w_ih", "weight_ih"), ("w_hh", "weight_hh"), ("b_ih", "bias_ih"), ("b_hh", "bias_hh")):
                names[name] = getattr(rnn, long + suffix) if rnn.bias or name.startswith("w") else None
            if rnn.proj_size:
                names["w_hr"] = getattr(rnn, "weight_hr" + suffix)
            one = Direction(**names, **starts[i]._asdict())  # type: ignore[arg-type]
            directions.append(rnn.fold_norm(one, suffix) if cell.norm else one)  # type: ignore[operator]
        results = functional.run_layer(
            cell, xs, directions, batch_first=batch_first, cells=cells,
            precision=getattr(rnn, "precision", None), implementation=getattr(rnn, "implementation", None),
            epsilon=getattr(rnn, "epsilon", 0.0),
        )  # fmt: skip
        outcomes += results
        xs = results[0].hs if len(results) == 1 else torch.cat([one.hs for one in results], -1)
        if rnn.dropout and layer < rnn.num_layers - 1:
            xs = dropout(xs, rnn.dropout, rnn.training)
    return xs, outcomes
