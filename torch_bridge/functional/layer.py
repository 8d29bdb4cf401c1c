"""The layer that the functions and modules of every cell run: one direction, or two in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from torch_bridge import choice, loops, op_common, rnn_ops, steps
from torch_bridge.cells import CellSpec
from torch_bridge.functional.checks import Implementation, check_implementation
from torch_bridge.functional.direction import Direction, DirectionResult, blocks_of
from torch_bridge.functional.layout import Layout, stack
from torch_bridge.functional.norm_weights import input_statistics
from torch_bridge.functional.projection import project, without_projection
from torch_bridge.functional.sharding import Shards, is_distributed
from torch_bridge.rnn_ops import Precision


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, tuple):
        return tuple(_cast(each, dtype) for each in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x


def _autocast(
    cell: CellSpec, xs: Tensor, layer: Sequence[Direction]
) -> tuple[Tensor, Sequence[Direction], torch.dtype]:
    """Casts operands and states as `torch.nn` does under autocast.

    Returns the inputs, the layer, and the dtype for states that are not given.
    """
    device = xs.device.type
    if not op_common.is_autocasting(device) or xs.dtype == torch.float64:
        return xs, layer, xs.dtype
    dtype, default = torch.get_autocast_dtype(device), xs.dtype
    names = ["w_ih", "w_hh", "b_ih", "b_hh", "w_hr"]
    if steps.CELLS[cell.name].AUTOCASTS_STATES_ON_CPU or device != "cpu":
        names, default = [*names, "states", "reset_states"], dtype
    layer = [one._replace(**{name: _cast(getattr(one, name), dtype) for name in names}) for one in layer]
    return xs.to(dtype), layer, default


def _bias(cell: CellSpec, one: Direction) -> Tensor | None:
    """Returns the sum of the biases to add to the input projection, without the recurrent one of a separate gate."""
    if one.b_hh is None:
        return one.b_ih
    b_hh = one.b_hh
    if cell.last_gate_separate:
        hidden = b_hh.shape[0] // cell.gates
        b_hh = pad(b_hh[:-hidden], (0, hidden))
    return b_hh if one.b_ih is None else one.b_ih + b_hh


def _separate_bias(
    cell: CellSpec, layer: Sequence[Direction], hidden: int, xs: Tensor, layout: Layout
) -> Tensor | None:
    """Returns the recurrent biases of the last gate by model, or None if that gate is not separate."""
    if not cell.last_gate_separate:
        return None
    by_direction = stack([xs.new_zeros(hidden) if one.b_hh is None else one.b_hh[-hidden:] for one in layer])
    return layout.by_model(by_direction)


def _project_inputs(
    cell: CellSpec, xs: Tensor, layer: Sequence[Direction], reverse: bool, layout: Layout
) -> tuple[Tensor, Sequence[Direction]]:
    """Returns the input projections `[models, *xs.shape[:-1], gates * width]`, and the layer without a projection.

    The weights are split by block, and not the projections, which are many times as large.
    """
    biases = [None if cell.norm else _bias(cell, one) for one in layer]  # a norm adds its bias in the time loop
    if layer[0].w_hr is not None:
        xps = [linear(xs, one.w_ih, bias) for one, bias in zip(layer, biases, strict=True)]
        return without_projection(xps, layer, reverse, layout.time)
    models = layout.models
    if models == 1:
        return linear(xs, layer[0].w_ih, biases[0])[None], layer
    rows, shape = math.prod(xs.shape[:-1]), layer[0].w_ih.shape
    # Joined as vectors rather than stacked, so that the gradients of the weights are contiguous, as those of torch.nn.
    w = torch.cat([one.w_ih.reshape(-1) for one in layer]).view(len(layer), *shape).mT
    w = layout.by_model(w, cell.gates)
    x = xs.reshape(1, rows, xs.shape[-1]).expand(models, rows, xs.shape[-1])
    given = [b for b in biases if b is not None]
    xp = torch.baddbmm(layout.by_model(stack(given), cell.gates)[:, None], x, w) if given else torch.bmm(x, w)
    return xp.reshape(models, *xs.shape[:-1], xp.shape[-1]), layer


def _norm(
    cell: CellSpec, xs: Tensor, layer: Sequence[Direction], layout: Layout, epsilon: float
) -> tuple[Tensor, loops.Norm | None]:
    """Returns the inputs to project, and what the time loop needs of a norm, whose weights are folded."""
    if not cell.norm:
        return xs, None
    hidden = layer[0].w_hh.shape[-1]

    def of_models(x: Tensor) -> Tensor:
        return layout.sequence(x.expand(layout.models, *x.shape))

    statistics = input_statistics(cell, xs, hidden, epsilon)
    biases = [one.b_ih for one in layer if one.b_ih is not None]
    norm = loops.Norm(xs.shape[-1] + hidden, layout.by_model(stack(biases), cell.gates), of_models(statistics.x_norm))
    if statistics.x_mean is not None:
        sums = [one.w_hh.sum(-1, dtype=op_common.accumulation_dtype(one.w_hh.dtype)) for one in layer]
        norm = norm._replace(w_sum=layout.by_model(stack(sums), cell.gates), x_mean=of_models(statistics.x_mean))
    return statistics.xs, norm


def _can_run_single_step(cell: CellSpec, xs: Tensor, layer: Sequence[Direction]) -> bool:
    """Whether a function of `steps.SINGLE_STEPS` can compute the step, which has less host overhead than a launch."""
    if cell.name not in steps.SINGLE_STEPS:
        return False
    one = layer[0]
    alone = len(layer) == 1 and one.w_hr is None and one.w_hh.ndim == 2 and (one.b_ih is None) == (one.b_hh is None)
    if not alone or xs.dtype not in (torch.float32, torch.float64) or op_common.is_autocasting(xs.device.type):
        return False
    states = [x for x in (*one.states, *one.reset_states) if x is not None]
    if any(x.dtype != xs.dtype for x in states):
        return False
    others = (xs, one.w_ih, one.w_hh, one.b_ih, one.b_hh, one.resets)
    return op_common.is_unobserved([*states, *(x for x in others if x is not None)])


def _run_single_step(cell: CellSpec, xs: Tensor, one: Direction, layout: Layout) -> DirectionResult:
    """Runs a layer of one direction for one step, with a function of `steps.SINGLE_STEPS`."""
    hidden, sequences = one.w_hh.shape[-1], math.prod(layout.batch)
    states = []
    starts = one.resets
    if starts is not None:
        starts = (starts if starts.dtype == torch.bool else starts != 0).reshape(sequences, 1)
    for state, reset_state in zip(one.states, one.reset_states, strict=True):
        h = xs.new_zeros(*layout.batch, hidden) if state is None else state
        h = h.reshape(sequences, hidden)
        if starts is not None and reset_state is None:
            h = h.masked_fill(starts, 0)
        elif starts is not None and reset_state is not None:
            new = layout.expand(reset_state, stepped=layout.is_stepped(reset_state))
            h = torch.where(starts, new.reshape(sequences, hidden), h)
        states.append(h)
    x, weights = xs.reshape(sequences, xs.shape[-1]), (one.w_ih, one.w_hh, one.b_ih, one.b_hh)
    found = steps.SINGLE_STEPS[cell.name](x, tuple(states), *weights)
    hs, *cs = (h.reshape(*layout.outer, hidden) for h in found)
    # The last states are copies, so that an in-place change to them does not change `hs` or `cs`, nor the reverse.
    return DirectionResult(hs, cs[0] if cs else None, tuple(h.clone().reshape(*layout.batch, hidden) for h in found))


def _tell_choice(
    cell: CellSpec, xs: Tensor, layout: Layout, w_hh: Tensor, implementation: Implementation, reason: str | None = None
) -> None:
    """Tells the choice of a layer, given the reason if it runs neither the operator nor its loop."""
    unavailable = rnn_ops.unsupported(w_hh, choice.profile())
    hidden = w_hh.shape[-1] * (layout.blocks if w_hh.ndim == 3 else 1)
    blocks = f" in {layout.blocks} blocks" if layout.blocks > 1 else ""
    arguments = f"{choice.describe_tensor('xs', xs)}, {hidden} units{blocks}"
    arguments += ", both directions" if layout.directions == 2 else ""
    if reason is not None:
        choice.record(cell.name, arguments, "torch", reason, unavailable)
        return
    launches = implementation != "torch" and rnn_ops.should_launch_kernels(implementation, w_hh)
    is_empty = 0 in (*layout.sizes, hidden)
    chosen = choice.explain_choice(implementation, launches, unavailable, xs.device, is_empty)
    choice.record(cell.name, arguments, *chosen, unavailable)


def _run_on_shards(
    cell: CellSpec, xs: Tensor, layer: Sequence[Direction], layout: Layout, **options: Any
) -> list[DirectionResult]:
    """Runs a layer of DTensors with `run_layer` on the sequences of each device."""
    outer = [axis for axis in range(len(layout.outer)) if axis != layout.time]  # the batch axes of `[*outer, width]`
    batch = range(len(outer))  # those of `[*batch, width]`
    shards = Shards(xs, outer)

    def on_shard(one: Direction) -> Direction:
        def reset_state(x: Tensor | None) -> Any:
            axes = () if x is None or x.ndim == 1 else outer if layout.is_stepped(x) else batch
            return shards.local("the reset state", x, axes)

        names = "w_ih", "w_hh", "b_ih", "b_hh", "w_hr"
        return one._replace(
            **{name: shards.local("the weights", getattr(one, name)) for name in names},
            states=tuple(shards.local("the initial state", x, batch) for x in one.states),
            resets=shards.local("resets", one.resets, outer),
            reset_states=tuple(map(reset_state, one.reset_states)),
        )

    results = run_layer(cell, shards.local("the inputs", xs, outer), [on_shard(one) for one in layer], **options)
    return [
        DirectionResult(
            shards.join(one.hs, outer), None if one.cs is None else shards.join(one.cs, outer),
            tuple(shards.join(x, batch) for x in one.last),
        )
        for one in results
    ]  # fmt: skip


def run_layer(
    cell: CellSpec,
    xs: Tensor,
    layer: Sequence[Direction],
    *,
    reverse: bool = False,
    batch_first: bool = False,
    cells: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
    epsilon: float = 0.0,
) -> list[DirectionResult]:
    """Runs a layer of one direction, or of two, forward and reverse, in one launch. Expects valid shapes and dtypes.

    Directions are models of the launch, and so are blocks of recurrent weights. Blocks cost a copy of the weights, of
    the initial states and of the results, by unit. DTensors run on the shard of each device, see `sharding`.

    Args:
      cell: an entry of the cell table.
      xs: see `gru`; shared by the directions.
      layer: one direction, or two with the same shapes.
      reverse: whether a single direction runs from the last step to the first.
      batch_first: see `gru`.
      cells: whether to return the cell states of all steps.
      precision: see `gru`.
      implementation: see `gru`.
      epsilon: what the norm of the cell adds to the variance, if it has a norm. The weights of each direction are then
        those that `norm_weights.fold` returns.

    Returns:
      The results of each direction.

    Raises:
      ValueError: there are no steps, or the implementation or precision is unknown.
      NotImplementedError: see `gru`.

    Examples:
      >>> import torch
      >>> from torch_bridge import cells, functional
      >>> def direction():
      ...     w_ih, w_hh = torch.randn(12, 3), torch.randn(12, 4)
      ...     return functional.Direction(w_ih, w_hh, None, None, None, (None,), None, (None,))
      >>> forward, backward = functional.run_layer(cells.GRU, torch.randn(5, 2, 3), [direction(), direction()])
      >>> torch.cat([forward.hs, backward.hs], -1).shape
      torch.Size([5, 2, 8])
    """
    check_implementation(implementation)
    layout = Layout(xs, len(layer), batch_first, blocks_of(layer[0].w_hh))
    if layout.sizes[1] == 0:
        raise ValueError(f"a recurrence needs at least one step, and xs {tuple(xs.shape)} has none")
    if is_distributed(x for one in layer for x in (xs, *one.tensors())):
        return _run_on_shards(
            cell, xs, layer, layout, reverse=reverse, batch_first=batch_first, cells=cells, precision=precision,
            implementation=implementation, epsilon=epsilon,
        )  # fmt: skip
    if layout.sizes[1] == 1 and implementation is None and precision is None and _can_run_single_step(cell, xs, layer):
        if choice.is_recording():
            reason = "an eager call of a single step runs PyTorch's own cell, which has less host overhead"
            _tell_choice(cell, xs, layout, layer[0].w_hh, None, reason)
            choice.end()
        return [_run_single_step(cell, xs, layer[0], layout)]
    xs, layer, default = _autocast(cell, xs, layer)
    given = layer
    x, norm = _norm(cell, xs, layer, layout, epsilon)
    xp, layer = _project_inputs(cell, x, layer, reverse, layout)
    width = layer[0].w_hh.shape[-1]
    hidden = width * layout.blocks

    by_state = zip(*(one.states for one in layer), strict=True)
    states = [layout.initial_states(of_state, default, xs, hidden) for of_state in by_state]
    resets, reset_states = layout.resets([one.resets for one in layer], xs), layout.reset_states(layer, states)
    w_hh, b_hn = layout.weights([one.w_hh for one in layer]), _separate_bias(cell, layer, hidden, xs, layout)
    arrays = layout.sequence(xp), w_hh, b_hn, states, resets, reset_states, norm

    recording = choice.is_recording()
    if recording:
        _tell_choice(cell, xs, layout, w_hh, implementation)
    order = "bidirectional" if len(layer) == 2 else "reverse" if reverse else "forward"
    precise = rnn_ops.kernel_precision(precision, width)
    if implementation == "torch":
        loop = op_common.without_autocast(loops.forward)
        results = loop(*arrays, cell=cell, order=order, cells=cells, save=False)
        for s, state in zip(cell.states, states, strict=True):
            results |= {name: results[name].to(state.dtype) for name in (f"{s}s", f"{s}_last") if name in results}
    else:
        results = rnn_ops.forward(cell, arrays, order, precise, cells, implementation)
    if recording:
        choice.end()

    hs = layout.sequences(results["hs"])
    has_cells = cells and len(cell.states) > 1
    cs = layout.sequences(results[f"{cell.states[1]}s"]) if has_cells else [None] * len(layer)
    last = zip(*(layout.states(results[f"{s}_last"]) for s in cell.states), strict=True)
    found = [DirectionResult(*each) for each in zip(hs, cs, last, strict=True)]
    return [one if x.w_hr is None else project(x, one, default) for x, one in zip(given, found, strict=True)]
