"""The operators of every cell, made from its entry in the cell table, and the call of a forward operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_bridge import op_common, recording, steps, torch_loop
from torch_bridge.calls import BackwardCall, ForwardCall
from torch_bridge.cells import CELLS, CellSpec
from torch_bridge.registration import call_after_import
from torch_bridge.rnn_ops import kernels
from torch_bridge.rnn_ops.arguments import (
    backward_arguments,
    backward_call,
    backward_types,
    check_backward,
    check_forward,
    forward_call,
    forward_options,
    forward_tensors,
    forward_types,
    schema,
)
from torch_bridge.rnn_ops.gradients import norm_gradients, reset_state_gradient, weight_gradient
from torch_bridge.rnn_ops.implementation import should_launch_kernels
from torch_bridge.rnn_ops.outputs import as_outputs, backward_names, backward_outputs, forward_outputs
from torch_bridge.rnn_ops.vmap import vmap_rule


def _forward_flops(xp: Any, w_hh: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the products of every state with a model's recurrent weights, given shapes."""
    groups, steps, batch = xp[:3]
    return int(2 * groups * steps * batch * w_hh[-1] * w_hh[-2])


def _backward_flops(w_hh: Any, hs: Any, *_: Any, **__: Any) -> int:
    return _forward_flops(hs, w_hh)


def _split_gradient_arguments(
    cell: CellSpec, wanted: Sequence[str], options: Sequence[Any], every: Sequence[Any]
) -> tuple[ForwardCall, BackwardCall]:
    """Returns the forward call, and the backward call that the gradients of the arguments in `wanted` need.

    `every` has the tensor arguments of the forward operator, which end with `options`, the gradients of the states of
    every step, those of the last states, and `hs` and the residuals, in this order.
    """
    count = len(cell.states)
    tensors = len(every) - 2 * count - 1 - len(cell.saved)
    x = forward_call(cell, (*every[:tensors], *options))
    needs_reset_gradients = x.resets is not None and any(f"reset_{s}" in wanted for s in cell.states)
    each = iter(every[tensors:])
    dsequences, dlast, hs = tuple(itertools.islice(each, count)), tuple(itertools.islice(each, count)), next(each)
    return x, BackwardCall(
        cell, x.w_hh, hs, dict(zip(cell.saved, each, strict=True)), x.resets, dsequences, dlast, x.order, x.precision,
        x.norm_width, needs_reset_gradients, x.implementation,
    )  # fmt: skip


def _first_order_gradients(
    cell: CellSpec, wanted: Sequence[str], options: Sequence[Any], *every: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns the gradients of the arguments in `wanted`, by the backward operator."""
    x, gradient = _split_gradient_arguments(cell, wanted, options, every)
    results = op_common.call(OPERATORS[cell.name].backward, *backward_arguments(gradient))
    found = dict(zip(backward_names(cell), results, strict=True))
    grads = {"xp": found["dxp"]}
    if "w_hh" in wanted:
        grads["w_hh"] = weight_gradient(x, gradient.hs, found)
    if "b_hn" in wanted:
        grads["b_hn"] = found["dhn"].reshape(x.w_hh.shape[0], -1, x.w_hh.shape[-1]).sum(1)
    if x.norm is not None:
        grads |= norm_gradients(wanted, x, gradient.hs, gradient.residuals["scale"], found)
    for s, state, reset_state in zip(cell.states, x.states, x.reset_states, strict=True):
        grads[f"{s}0"] = found[f"d{s}0"].to(state.dtype)
        if reset_state is not None and f"reset_{s}" in wanted:
            dreset = found[f"dreset_{s}"]
            grads[f"reset_{s}"] = (
                reset_state_gradient(dreset, reset_state) if gradient.reset_gradients else torch.zeros_like(reset_state)
            )
    return tuple(grads[name] for name in wanted)


def _reference_gradients(
    cell: CellSpec, wanted: Sequence[str], options: Sequence[Any], *every: Tensor | None
) -> tuple[Tensor, ...]:
    """Computes what `_first_order_gradients` does, by differentiating the loop in PyTorch operations."""
    x, gradient = _split_gradient_arguments(cell, wanted, options, every)
    arguments, names = [*forward_tensors(x), *options], [*forward_types(cell)]
    places = [names.index(name) for name in wanted]
    outputs = [f"{s}{end}" for end in ("s", "_last") for s in cell.states]
    grads = zip(outputs, (*gradient.dsequences, *gradient.dlast), strict=True)
    given = {name: d for name, d in grads if d is not None}

    def loop(*some: Tensor) -> tuple[Tensor, ...]:
        new = dict(zip(places, some, strict=True))
        again = forward_call(cell, [new.get(i, y) for i, y in enumerate(arguments)])
        with op_common.autocast_off(again.xp.device.type):
            found = torch_loop.forward(again._replace(save=False))
        return tuple(found[name].to(d.dtype) for name, d in given.items())

    vjp: Any = torch.func.vjp(loop, *[arguments[i] for i in places])[1]
    dtype = x.w_hh.dtype  # in which `_first_order_gradients` returns those of `xp` and `b_hn`
    return tuple(
        d.to(dtype) if name in ("xp", "b_hn") else d for name, d in zip(wanted, vjp(tuple(given.values())), strict=True)
    )


class Operators(NamedTuple):
    """The operators of a cell: the time loop, and its gradient."""

    forward: Any
    backward: Any


def _define(cell: CellSpec) -> Operators:
    """Defines and registers the operators of a cell."""
    name, types = f"torch_bridge::{cell.name}", forward_types(cell)
    names, results, dresults = [*types], cell.forward_outputs, backward_names(cell)
    tensors = sum(kind.startswith("Tensor") for kind in types.values())  # these arguments come first
    known = tensors + 1 + len(cell.saved)  # saved tensors without those that `project` takes

    @op_common.define(name, schema(types, len(results)))
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        x = forward_call(cell, arguments)
        launch = should_launch_kernels(x.implementation, x.w_hh)
        check_forward(x)
        outputs = forward_outputs(x, launch)
        if launch and x.xp.numel() > 0:
            return kernels.forward(x, outputs)
        return as_outputs(torch_loop.forward(x), outputs, x.xp)

    def forward_decomposed(*arguments: Any) -> tuple[Tensor, ...]:
        x = forward_call(cell, arguments)
        if torch.onnx.is_in_onnx_export():
            x = x._replace(save=False)  # the backward operator has no decomposition
        steps = x.xp.shape[1]
        is_single = isinstance(steps, int) and steps == 1  # a symbolic number of steps may become any
        outputs = forward_outputs(x, should_launch_kernels(x.implementation, x.w_hh))
        over_steps = torch_loop.unrolled if is_single else torch_loop.scanned
        return as_outputs(torch_loop.forward(x, over_steps), outputs, x.xp)

    def forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
        x = forward_call(cell, arguments)
        op_common.check_devices("w_hh", x.w_hh, dict(zip(names, arguments[:tensors], strict=False)))
        launch = should_launch_kernels(x.implementation, x.w_hh)
        outputs = forward_outputs(x, launch)
        # with a listener (`torch_bridge.explain`), `kernels.forward` records the launch and runs nothing
        if launch and recording.listener() is not None and x.xp.numel() > 0:
            return kernels.forward(x, outputs)
        return op_common.fake(outputs, x.xp)

    @op_common.define(f"{name}_backward", schema(backward_types(cell), len(dresults)))
    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        x = backward_call(cell, arguments)
        launch = should_launch_kernels(x.implementation, x.w_hh)
        check_backward(x)
        outputs = backward_outputs(x)
        if launch and x.sequence.numel() > 0:
            return kernels.backward(x, outputs)
        return as_outputs(torch_loop.backward(x), outputs, x.sequence)

    def backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
        x = backward_call(cell, arguments)
        outputs = backward_outputs(x)
        # as in `forward_fake`
        launch = recording.listener() is not None and x.sequence.numel() > 0
        if launch and should_launch_kernels(x.implementation, x.w_hh):
            return kernels.backward(x, outputs)
        return op_common.fake(outputs, x.sequence)

    forward_op = getattr(torch.ops.torch_bridge, cell.name).default
    backward_op = getattr(torch.ops.torch_bridge, f"{cell.name}_backward").default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, found = forward_call(cell, inputs), dict(zip(results, output, strict=True))
        residuals = [found[name] for name in cell.saved]
        ctx.call = recording.current()  # for `torch_bridge.explain`: the backward launches belong to this call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*residuals)
        # A backward kernel does not read `xp`, which is saved to recompute residuals, or to differentiate gradients. If
        # what it is computed from is known, that is saved instead.
        from_arrays: tuple[Tensor | None, ...] = ()
        arrays, ctx.project = inputs[:tensors], None
        if len(inputs) > len(names) and x.save and should_launch_kernels(x.implementation, x.w_hh):
            arrays, ctx.project, from_arrays = (None, *arrays[1:]), inputs[len(names)], inputs[len(names) + 1 :]
        ctx.save_for_backward(*arrays, found["hs"], *residuals, *from_arrays)
        ctx.options, ctx.count = inputs[tensors : len(names)], len(inputs)

    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, because torch.utils.checkpoint lets a tensor be unpacked once
        recording.resume(ctx.call)  # only after the read, in which a checkpoint runs the forward pass again
        arrays, (hs, *residuals), options = saved[:tensors], saved[tensors:known], ctx.options
        x = forward_call(cell, (*arrays, *options))
        given = dict(zip(results, grads, strict=True))
        dsequences = [given[f"{s}s"] if s in x.returned else None for s in cell.states]
        dlast = [given[f"{s}_last"] for s in cell.states]
        needed = [name for name, need in zip(names, ctx.needs_input_grad, strict=False) if need]
        wanted = [name for name in needed if name != "resets"]  # floating-point ones may require a gradient: it is zero
        if not wanted or all(d is None for d in (*dsequences, *dlast)):
            return (None,) * ctx.count
        if not x.save:
            again = forward_options(x._replace(returned=cell.states[:1]), save=True)
            found = op_common.call(forward_op, *arrays, *again)
            found = dict(zip(results, found, strict=True))
            hs, residuals = found["hs"], [found[name] for name in cell.saved]
        every, project = (*arrays, *dsequences, *dlast, hs, *residuals), ctx.project

        def compute(*arrays: Tensor | None) -> tuple[Tensor, ...]:
            return _first_order_gradients(cell, wanted, options, *arrays[: len(every)])

        def reference(*arrays: Any) -> tuple[Tensor, ...]:
            if project is not None:
                arrays = project(*arrays[len(every) :]), *arrays[1 : len(every)]
            return _reference_gradients(cell, wanted, options, *arrays)

        dinputs = op_common.differentiable(compute, reference, *every, *saved[known:])
        by_name = dict(zip(wanted, dinputs, strict=True))
        return *(by_name.get(name) for name in names), *(None,) * (ctx.count - len(names))

    op_common.register(
        forward, forward_op, forward_fake, gradients, setup, vmap_rule(forward_op, "xp"), forward_decomposed
    )
    # Gradients have the derivatives of `_reference_gradients`, see `op_common.differentiable`; the backward operators
    # called directly have none. They take `hs` but do not read it. Autograd treats the residuals, which are marked
    # non-differentiable, as constants, although they depend on the inputs. `hs` connects the backward operators to
    # those inputs, so a second derivative reaches the backward operators, which raise.
    op_common.register(
        backward, backward_op, backward_fake, op_common.no_second_order, op_common.no_setup,
        vmap_rule(backward_op, "local_grads"),
    )  # fmt: skip
    return Operators(forward_op, backward_op)


# The operators of each cell that has arithmetic in PyTorch operations.
OPERATORS = {name: _define(CELLS[name]) for name in steps.CELLS}


def _register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula([x.forward.overloadpacket for x in OPERATORS.values()])(_forward_flops)
    register_flop_formula([x.backward.overloadpacket for x in OPERATORS.values()])(_backward_flops)


call_after_import("torch.utils.flop_counter", _register_flops)  # which imports Triton


def forward(x: ForwardCall, projection: Callable[[], tuple[Any, ...]]) -> dict[str, Tensor]:
    """Calls the forward operator of a cell, and returns its outputs by name.

    It saves residuals if a gradient may be requested.

    Args:
      x: the call.
      projection: returns a function that computes `x.xp`, and then the arrays that it takes.
    """
    arrays = forward_tensors(x)
    save = op_common.wants_gradients([array for array in arrays if array is not None])
    again = projection() if save and not torch.compiler.is_compiling() else ()
    results = op_common.call(OPERATORS[x.cell.name].forward, *arrays, *forward_options(x, save), for_setup=again)
    return dict(zip(x.cell.forward_outputs, results, strict=True))
