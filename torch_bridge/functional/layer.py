"""The layer that the functions and modules of every cell run: one direction, or two in one launch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from torch_bridge import op_common, recording, rnn_ops, steps, torch_loop
from torch_bridge.calls import ForwardCall, Norm
from torch_bridge.cells import CellSpec
from torch_bridge.functional.call import Call, Direction, DirectionResult, Implementation
from torch_bridge.functional.checks import check_direction, check_implementation
from torch_bridge.functional.layout import Layout, stack
from torch_bridge.functional.norm_weights import input_statistics
from torch_bridge.functional.projection import project, without_projection
from torch_bridge.functional.sharding import Shards, is_distributed
from torch_bridge.rnn_ops import Precision


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, tuple):
        return tuple(_cast(each, dtype) for each in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x


def _autocast(call: Call) -> tuple[Call, torch.dtype]:
    """Casts operands and states as `torch.nn` does under autocast; also returns the dtype of states not given."""
    device, default = call.xs.device.type, call.xs.dtype
    if not op_common.is_autocasting(device) or default == torch.float64:
        return call, default
    dtype = torch.get_autocast_dtype(device)
    names = ["w_ih", "w_hh", "b_ih", "b_hh", "w_hr"]
    if steps.CELLS[call.cell.name].AUTOCASTS_STATES_ON_CPU or device != "cpu":
        names, default = [*names, "states", "reset_states"], dtype
    layer = [one._replace(**{name: _cast(getattr(one, name), dtype) for name in names}) for one in call.directions]
    return call._replace(xs=call.xs.to(dtype), directions=layer), default


def _bias(cell: CellSpec, one: Direction) -> Tensor | None:
    """Returns the sum of the biases to add to the input projection, without the recurrent one of a separate gate."""
    if one.b_hh is None:
        return one.b_ih
    b_hh = one.b_hh
    if cell.last_gate_separate:
        hidden = b_hh.shape[0] // cell.gates
        b_hh = pad(b_hh[:-hidden], (0, hidden))
    return b_hh if one.b_ih is None else one.b_ih + b_hh


def _separate_bias(call: Call, hidden: int, layout: Layout) -> Tensor | None:
    """Returns the recurrent biases of the last gate by model, or None if that gate is not separate."""
    if not call.cell.last_gate_separate:
        return None
    biases = [one.b_hh for one in call.directions]
    return layout.by_model(stack([call.xs.new_zeros(hidden) if b is None else b[-hidden:] for b in biases]))


def _project_inputs(call: Call, layout: Layout) -> tuple[Tensor, Call]:
    """Returns the input projections `[models, *xs.shape[:-1], gates * width]`, and the call without a projection.

    The weights are split by block, and not the projections, which are many times as large.
    """
    cell, xs, layer = call.cell, call.xs, call.directions
    biases = [None if cell.norm else _bias(cell, one) for one in layer]  # a norm adds its bias in the time loop
    if layer[0].w_hr is not None:
        xps = [linear(xs, one.w_ih, bias) for one, bias in zip(layer, biases, strict=True)]
        return without_projection(call, xps, layout.time)
    models = layout.models
    if models == 1:
        return linear(xs, layer[0].w_ih, biases[0])[None], call
    rows, shape = math.prod(xs.shape[:-1]), layer[0].w_ih.shape
    # Joined as vectors rather than stacked, so that the gradients of the weights are contiguous, as those of torch.nn.
    w = torch.cat([one.w_ih.reshape(-1) for one in layer]).view(len(layer), *shape).mT
    w = layout.by_model(w, cell.gates)
    x = xs.reshape(1, rows, xs.shape[-1]).expand(models, rows, xs.shape[-1])
    given = [b for b in biases if b is not None]
    xp = torch.baddbmm(layout.by_model(stack(given), cell.gates)[:, None], x, w) if given else torch.bmm(x, w)
    return xp.reshape(models, *xs.shape[:-1], xp.shape[-1]), call


def _projection(call: Call, layout: Layout) -> tuple[Any, ...]:
    """Returns a function that computes the input projections `[G, T, B, gates * H]`, and then the arrays that it takes.

    A second derivative reads the projections. Autograd has most of these arrays already, and the projections are large.
    """
    layer: Sequence[Any] = call.directions
    if layer[0].w_hr is None:
        layer = [one._replace(w_hh=None, states=(), resets=None, reset_states=()) for one in layer]
    options = call._replace(xs=None, directions=())  # type: ignore[arg-type]
    compute = functools.partial(_compute_projection, options, layout, len(layer[0].states))
    return compute, call.xs, *(x for one in layer for x in one.tensors())


def _compute_projection(options: Call, layout: Layout, states: int, xs: Tensor, *arrays: Any) -> Tensor:
    """Computes what `_projection` describes; `arrays` are those of each direction, with so many states."""
    count = len(arrays) // layout.directions
    layer = [Direction.from_tensors(arrays[i : i + count], states) for i in range(0, len(arrays), count)]
    with op_common.autocast_off(xs.device.type):
        return layout.sequence(_project_inputs(options._replace(xs=xs, directions=layer), layout)[0])


def _norm(call: Call, layout: Layout) -> tuple[Call, Norm | None]:
    """Returns the call with the inputs to project, and what the loop needs of a norm, whose weights are folded."""
    if not call.cell.norm:
        return call, None
    cell, xs, layer = call.cell, call.xs, call.directions
    hidden = layer[0].w_hh.shape[-1]

    def of_models(x: Tensor) -> Tensor:
        return layout.sequence(x.expand(layout.models, *x.shape))

    statistics = input_statistics(cell, xs, hidden, call.epsilon)
    biases = [one.b_ih for one in layer if one.b_ih is not None]
    norm = Norm(xs.shape[-1] + hidden, layout.by_model(stack(biases), cell.gates), of_models(statistics.x_norm))
    if statistics.x_mean is not None:
        sums = [one.w_hh.sum(-1, dtype=op_common.accumulation_dtype(one.w_hh.dtype)) for one in layer]
        norm = norm._replace(w_sum=layout.by_model(stack(sums), cell.gates), x_mean=of_models(statistics.x_mean))
    return call._replace(xs=statistics.xs), norm


def _can_run_single_step(call: Call) -> bool:
    """Whether a function of `steps.SINGLE_STEPS` can compute the step, which has less host overhead than a launch."""
    if call.implementation is not None or call.precision is not None or call.cell.name not in steps.SINGLE_STEPS:
        return False
    xs, layer = call.xs, call.directions
    one = layer[0]
    alone = len(layer) == 1 and one.w_hr is None and one.w_hh.ndim == 2 and (one.b_ih is None) == (one.b_hh is None)
    if not alone or xs.dtype not in (torch.float32, torch.float64) or op_common.is_autocasting(xs.device.type):
        return False
    states = [x for x in (*one.states, *one.reset_states) if x is not None]
    if any(x.dtype != xs.dtype for x in states):
        return False
    others = (xs, one.w_ih, one.w_hh, one.b_ih, one.b_hh, one.resets)
    return op_common.is_unobserved([*states, *(x for x in others if x is not None)])


def _run_single_step(call: Call, layout: Layout) -> DirectionResult:
    """Runs a layer of one direction for one step, with a function of `steps.SINGLE_STEPS`."""
    xs, (one,) = call.xs, call.directions
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
    found = steps.SINGLE_STEPS[call.cell.name](x, tuple(states), *weights)
    hs, *cs = (h.reshape(*layout.outer, hidden) for h in found)
    # The last states are copies, so that an in-place change to them does not change `hs` or `cs`, nor the reverse.
    return DirectionResult(hs, cs[0] if cs else None, tuple(h.clone().reshape(*layout.batch, hidden) for h in found))


def _tell_choice(call: Call, layout: Layout, w_hh: Tensor, reason: str | None = None) -> None:
    """Tells the choice of a layer, given the reason if it is known."""
    cell, xs, implementation = call.cell, call.xs, call.implementation
    unavailable = rnn_ops.unsupported(w_hh, recording.profile())
    hidden = w_hh.shape[-1] * (layout.blocks if w_hh.ndim == 3 else 1)
    blocks = f" in {layout.blocks} blocks" if layout.blocks > 1 else ""
    arguments = f"{recording.describe_tensor('xs', xs)}, {hidden} units{blocks}"
    arguments += ", both directions" if layout.directions == 2 else ""
    if reason is not None:
        recording.record(cell.name, arguments, "torch", reason, unavailable)
        return
    launches = implementation != "torch" and rnn_ops.should_launch_kernels(implementation, w_hh)
    is_empty = 0 in (*layout.sizes, hidden)
    chosen = recording.explain_choice(implementation, launches, unavailable, xs.device, is_empty)
    recording.record(cell.name, arguments, *chosen, unavailable)


def _run_on_shards(call: Call, layout: Layout) -> list[DirectionResult]:
    """Runs a layer of DTensors on the sequences of each device."""
    outer = [axis for axis in range(len(layout.outer)) if axis != layout.time]  # the batch axes of `[*outer, width]`
    batch = range(len(outer))  # those of `[*batch, width]`
    shards = Shards(call.xs, outer)

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

    xs = shards.local("the inputs", call.xs, outer)
    results = run(call._replace(xs=xs, directions=[on_shard(one) for one in call.directions]))
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
    return run(Call(cell, xs, layer, reverse, batch_first, cells, precision, implementation, epsilon))


def run_direction(call: Call) -> DirectionResult:
    """Checks the arguments of a single direction, and runs it."""
    check_direction(call)
    (result,) = run(call)
    return result


def run(call: Call) -> list[DirectionResult]:
    """Runs a layer, see `run_layer`."""
    check_implementation(call.implementation)
    layout = Layout(call)
    if layout.sizes[1] == 0:
        raise ValueError(f"a recurrence needs at least one step, and xs {tuple(call.xs.shape)} has none")
    if is_distributed(x for one in call.directions for x in (call.xs, *one.tensors())):
        return _run_on_shards(call, layout)
    reason: str | None = None
    if layout.sizes[1] == 1 and _can_run_single_step(call):
        if recording.is_recording():
            reason = "an eager call of a single step runs PyTorch's own cell, which has less host overhead"
            _tell_choice(call, layout, call.directions[0].w_hh, reason)
            recording.end()
        return [_run_single_step(call, layout)]
    call, default = _autocast(call)
    loop, projection = _prepare(call, layout, default)
    is_recording, runs_torch = recording.is_recording(), call.implementation == "torch"
    if not runs_torch and op_common.in_forward_mode():
        rnn_ops.should_launch_kernels(call.implementation, loop.w_hh)  # raises if "triton" cannot run
        runs_torch, reason = True, op_common.FORWARD_MODE
    if is_recording:
        _tell_choice(call, layout, loop.w_hh, reason)
    if runs_torch:
        with op_common.autocast_off(loop.xp.device.type):
            results = torch_loop.forward(loop)
        for s, state in zip(call.cell.states, loop.states, strict=True):
            results |= {name: results[name].to(state.dtype) for name in (f"{s}s", f"{s}_last") if name in results}
    else:
        results = rnn_ops.forward(loop, projection)
    if is_recording:
        recording.end()

    hs, states = layout.sequences(results["hs"]), call.cell.states
    cs = layout.sequences(results[f"{states[1]}s"]) if len(loop.returned) > 1 else [None] * len(hs)
    last = zip(*(layout.states(results[f"{s}_last"]) for s in states), strict=True)
    found = [DirectionResult(*each) for each in zip(hs, cs, last, strict=True)]
    return [one if x.w_hr is None else project(x, one, default) for x, one in zip(call.directions, found, strict=True)]


def _prepare(call: Call, layout: Layout, default: torch.dtype) -> tuple[ForwardCall, Callable[[], tuple[Any, ...]]]:
    """Returns the call of the time loop, after the products before it, and a function that returns its `_projection`.

    `default` is the dtype of states not given.
    """
    xs = call.xs
    call, norm = _norm(call, layout)
    projection = functools.partial(_projection, call, layout)
    xp, call = _project_inputs(call, layout)
    layer, width = call.directions, call.directions[0].w_hh.shape[-1]
    hidden = width * layout.blocks
    by_state = zip(*(one.states for one in layer), strict=True)
    states = tuple([layout.initial_states(of_state, default, xs, hidden) for of_state in by_state])
    loop = ForwardCall(
        call.cell,
        layout.sequence(xp),
        layout.weights([one.w_hh for one in layer]),
        _separate_bias(call, hidden, layout),
        states,
        layout.resets([one.resets for one in layer], xs),
        layout.reset_states(call, states),
        norm,
        "bidirectional" if len(layer) == 2 else "reverse" if call.reverse else "forward",
        rnn_ops.kernel_precision(call.precision, width),
        call.cell.states if call.cells else call.cell.states[:1],
        False,
        call.implementation,
    )
    return loop, projection
