"""The function `run_trajectories`, with the conventions of TorchRL."""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor

from torch_bridge import cells, op_common
from torch_bridge.functional.checks import check_state_dtype, check_tensor, has_shape
from torch_bridge.functional.sharding import check_local
from torch_bridge.nn.stack import call_of, directions_of, is_backward, resets_of_reversed, run_stack, widths_of

# The cells that TorchRL has modules of, by `torch.nn.RNNBase.mode`.
_CELLS = {"GRU": cells.GRU, "LSTM": cells.LSTM}


@overload
def run_trajectories(
    rnn: torch.nn.RNNBase, input: Tensor, is_init: Tensor, hidden: Tensor, cell: None = None
) -> tuple[Tensor, Tensor]: ...


@overload
def run_trajectories(
    rnn: torch.nn.RNNBase, input: Tensor, is_init: Tensor, hidden: Tensor, cell: Tensor
) -> tuple[Tensor, Tensor, Tensor]: ...


@overload
def run_trajectories(
    rnn: torch.nn.RNNBase, input: Tensor, is_init: Tensor, hidden: Tensor, cell: Tensor | None
) -> tuple[Tensor, ...]: ...


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
      input: `[B, T, D]`, in the dtype of the weights.
      is_init: `[B, T]` or `[B, T, 1]`, any dtype; nonzero at the first step of a trajectory.
      hidden: `[B, T, layers * directions, H]`, in the dtype of `input` or in float32. A trajectory starts from the
        value at its first step; values at other steps are not used.
      cell: the cell states of an LSTM, like `hidden`.

    Returns:
      `(features, hidden)`, or `(features, hidden, cell)`. The outputs are `[B, T, directions * H]`. The states have the
      shape of `hidden`: at the last step of each trajectory they hold the state after that step, at other steps zeros.

    Raises:
      ValueError: shapes, dtypes or devices of tensors or parameters disagree, there are no steps, or `rnn` is not a GRU
        or an LSTM.
      RuntimeError: the width of the input is wrong, as in `torch.nn`.

    Examples:
      >>> import torch
      >>> from torch_bridge import nn
      >>> rnn, is_init = nn.GRU(3, 4), torch.zeros(2, 5, 1, dtype=torch.bool)
      >>> features, hidden = nn.run_trajectories(rnn, torch.randn(2, 5, 3), is_init, torch.zeros(2, 5, 1, 4))
      >>> features.shape, hidden.shape
      (torch.Size([2, 5, 4]), torch.Size([2, 5, 1, 4]))
    """
    kind = _CELLS.get(getattr(rnn, "mode", ""))
    if kind is None:
        got = f"the class {rnn.__name__}: make an instance" if isinstance(rnn, type) else type(rnn).__name__
        raise ValueError(f"rnn must be a GRU or an LSTM of torch_bridge.nn or torch.nn, got {got}")
    given, names = (hidden,) if cell is None else (hidden, cell), ("hidden", "cell")[: len(kind.states)]
    if len(given) != len(names):
        article = "an" if rnn.mode == "LSTM" else "a"
        raise ValueError(f"{article} {rnn.mode} takes {' and '.join(names)}, got {len(given)} states")
    for name, x in zip(("input", "is_init", *names), (input, is_init, *given), strict=True):
        check_tensor(name, x, optional=False)
        check_local(name, x)
        op_common.check_devices("input", input, {name: x})
    outer = tuple(input.shape[:-1])
    if is_init.dim() == 3:
        is_init = is_init.squeeze(-1)
    if len(outer) != 2 or not has_shape(is_init, outer):
        raise ValueError(
            f"input must be [B, T, D] and is_init [B, T], got {tuple(input.shape)} and {tuple(is_init.shape)}"
        )
    for name, x in zip(names, given, strict=True):
        check_state_dtype(name, x, "input", input)
    count = rnn.num_layers * directions_of(rnn)
    for x, width in zip(given, widths_of(rnn, kind), strict=True):
        if not has_shape(x, (*outer, count, width)):
            raise ValueError(
                f"hidden states must be [B, T, layers, H] = {(*outer, count, width)}, got {tuple(x.shape)}"
            )
    if outer[1] == 0:
        raise ValueError(f"a rollout needs at least one step, and input {tuple(input.shape)} has none")
    rnn.check_input(input, None)
    is_init = is_init != 0
    step = torch.arange(outer[1], device=input.device).expand(outer)
    first = step.masked_fill(~is_init, 0).cummax(1).values  # first step of each step's trajectory
    backward = resets_of_reversed(is_init, 1)
    ends = backward | (step == outer[1] - 1)

    def at_first(x: Tensor) -> Tensor:
        return x.gather(1, first[..., None].expand(*outer, x.shape[-1]))

    call = call_of(rnn, kind, input, True, resets=(is_init, backward))
    directions = []
    for i, one in enumerate(call.directions):
        each, start = tuple(x[:, :, i] for x in given), 0
        if is_backward(rnn, i):
            each, start = tuple(map(at_first, each)), -1
        directions.append(one._replace(states=tuple(x[:, start] for x in each), reset_states=each))
    ys, outcomes = run_stack(rnn, call._replace(directions=directions, cells=True))
    results = []
    for k in range(len(given)):
        every = [one.hs if one.cs is None or k == 0 else one.cs for one in outcomes]
        last = [at_first(x) if is_backward(rnn, i) else x for i, x in enumerate(every)]
        results.append(torch.stack(last, -2).masked_fill(~ends[..., None, None], 0))
    return ys, *results
