"""The operators of every cell, made from its entry in the cell table, and the call of a forward operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_bridge import loops, op_common, rules, steps
from torch_bridge.cells import CELLS, CellSpec
from torch_bridge.rnn_ops import kernels
from torch_bridge.rnn_ops.arguments import (
    backward_arguments,
    backward_types,
    check_backward,
    check_forward,
    forward_arguments,
    forward_types,
    schema,
)
from torch_bridge.rnn_ops.gradients import reset_state_gradient, weight_gradient
from torch_bridge.rnn_ops.implementation import should_launch_kernels
from torch_bridge.rnn_ops.outputs import as_outputs, backward_names, backward_outputs, forward_outputs
from torch_bridge.rnn_ops.vmap import vmap_rule


def _readable_resets(resets: Tensor | None) -> Tensor | None:
    return resets if resets is None or op_common.dtype_name(resets.dtype) in rules.RESET_DTYPES else resets != 0


def _forward_flops(xp: Any, w_hh: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the products of every state with a model's recurrent weights, given shapes."""
    groups, steps, batch = xp[:3]
    return int(2 * groups * steps * batch * w_hh[-1] * w_hh[-2])


def _backward_flops(w_hh: Any, hs: Any, *_: Any, **__: Any) -> int:
    return _forward_flops(hs, w_hh)


class Operators(NamedTuple):
    """The operators of a cell: the time loop, and its gradient."""

    forward: Any
    backward: Any


def _define(cell: CellSpec) -> Operators:
    """Defines and registers the operators of a cell."""
    name, types = f"torch_bridge::{cell.name}", forward_types(cell)
    names, results, dresults = [*types], cell.forward_outputs, backward_names(cell)
    tensors = sum(kind.startswith("Tensor") for kind in types.values())  # these arguments come first

    @op_common.define(name, schema(types, len(results)))
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        x = forward_arguments(cell, arguments)
        launch = should_launch_kernels(x.implementation, x.w_hh)
        check_forward(cell, x)
        returned = forward_outputs(cell, x, launch)
        arrays = x.xp, x.w_hh, x.b_hn, x.states, _readable_resets(x.resets), x.reset_states
        if launch and x.xp.numel() > 0:
            return kernels.forward(*arrays, cell=cell, order=x.order, precision=x.precision, returned=returned)
        found = loops.forward(*arrays, cell=cell, order=x.order, cells=x.cells, save=x.save)
        return as_outputs(found, returned, x.xp)

    def forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
        x = forward_arguments(cell, arguments)
        op_common.check_devices("w_hh", x.w_hh, dict(zip(names, arguments[:tensors], strict=False)))
        return op_common.fake(forward_outputs(cell, x, should_launch_kernels(x.implementation, x.w_hh)), x.xp)

    @op_common.define(f"{name}_backward", schema(backward_types(cell), len(dresults)))
    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        x = backward_arguments(cell, arguments)
        launch = should_launch_kernels(x.implementation, x.w_hh)
        check_backward(cell, x)
        returned, like = backward_outputs(cell, x), x.residuals["local_grads"]
        arrays = x.w_hh, x.residuals, _readable_resets(x.resets), x.dsequences
        if launch and like.numel() > 0:
            return kernels.backward(
                *arrays, x.dlast, cell=cell, order=x.order, precision=x.precision, returned=returned
            )  # fmt: skip
        dlast = [like.new_zeros(returned["dh0"][0]) if d is None else d for d in x.dlast]
        found = loops.backward(*arrays, dlast, cell=cell, order=x.order, reset_gradients=x.reset_gradients)
        return as_outputs(found, returned, like)

    def backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
        x = backward_arguments(cell, arguments)
        return op_common.fake(backward_outputs(cell, x), x.residuals["local_grads"])

    forward_op = getattr(torch.ops.torch_bridge, cell.name).default
    backward_op = getattr(torch.ops.torch_bridge, f"{cell.name}_backward").default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, found = forward_arguments(cell, inputs), dict(zip(results, output, strict=True))
        residuals = [found[name] for name, _ in cell.residuals]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*residuals)
        unused = ("xp", "b_hn") if x.save else ()  # without residuals, they are needed to recompute these
        arrays = [None if name in unused else y for name, y in zip(names, inputs[:tensors], strict=False)]
        ctx.save_for_backward(*arrays, found["hs"], *residuals)
        ctx.options = inputs[tensors:]

    def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        arrays, (hs, *residuals) = ctx.saved_tensors[:tensors], ctx.saved_tensors[tensors:]
        x = forward_arguments(cell, (*arrays, *ctx.options))
        given, needs = dict(zip(results, grads, strict=True)), dict(zip(names, ctx.needs_input_grad, strict=False))
        dsequences = [given[f"{s}s"] if s == "h" or x.cells else None for s in cell.states]
        dlast = [given[f"{s}_last"] for s in cell.states]
        if all(d is None for d in (*dsequences, *dlast)):
            return (None,) * len(names)
        if not x.save:
            again = {"order": x.order, "precision": x.precision, "cells": False, "save": True}
            again["implementation"] = x.implementation
            found = op_common.call(forward_op, *arrays, *(again[name] for name in names[tensors:]))
            found = dict(zip(results, found, strict=True))
            hs, residuals = found["hs"], [found[name] for name, _ in cell.residuals]
        dresets = x.resets is not None and any(needs[f"reset_{s}"] for s in cell.states)
        found = op_common.call(
            backward_op, x.w_hh, hs, *residuals, x.resets, *dsequences, *dlast, x.order, x.precision, dresets,
            x.implementation,
        )  # fmt: skip
        found = dict(zip(dresults, found, strict=True))
        returned = {"xp": found["dxp"]}
        if needs["w_hh"]:
            returned["w_hh"] = weight_gradient(cell, x, hs, found)
        if needs.get("b_hn"):
            returned["b_hn"] = found["dhn"].reshape(x.w_hh.shape[0], -1, x.w_hh.shape[-1]).sum(1)
        for s, state, reset_state in zip(cell.states, x.states, x.reset_states, strict=True):
            returned[f"{s}0"] = found[f"d{s}0"].to(state.dtype)
            if dresets and reset_state is not None and needs[f"reset_{s}"]:
                returned[f"reset_{s}"] = reset_state_gradient(found[f"dreset_{s}"], reset_state)
        return tuple(returned.get(name) for name in names)

    op_common.register(forward, forward_op, forward_fake, gradients, setup, vmap_rule(forward_op, "xp"))
    # The backward operators take `hs` but do not read it. Autograd treats the residuals, which are marked
    # non-differentiable, as constants, although they depend on the inputs. `hs` connects the backward operators to
    # those inputs, so a second derivative reaches the backward operators, which raise.
    op_common.register(
        backward, backward_op, backward_fake, op_common.no_second_order, op_common.no_setup,
        vmap_rule(backward_op, "local_grads"),
    )  # fmt: skip
    register_flop_formula(forward_op.overloadpacket)(_forward_flops)
    register_flop_formula(backward_op.overloadpacket)(_backward_flops)
    return Operators(forward_op, backward_op)


# The operators of each cell that has arithmetic in PyTorch operations.
OPERATORS = {name: _define(CELLS[name]) for name in steps.CELLS}


def forward(
    cell: CellSpec,
    arrays: tuple[Tensor, Tensor, Tensor | None, Sequence[Tensor], Tensor | None, Sequence[Tensor | None]],
    order: str,
    precision: str,
    cells: bool,
    implementation: str | None,
) -> dict[str, Tensor]:
    """Calls the forward operator of a cell. It saves residuals if a gradient may be requested.

    Args:
      cell: an entry of the cell table.
      arrays: `xp`, `w_hh`, `b_hn`, the states, `resets` and the reset states, see `torch_bridge.loops.forward`.
      order: the direction through time, see `torch_bridge.loops`.
      precision: precision of float32 products, by Triton's name.
      cells: whether to return every state of every step, instead of the hidden states only.
      implementation: "triton", "loop", or None for the kernels where they can run, else the loop.

    Returns:
      The outputs of the operator, by name.
    """
    xp, w_hh, b_hn, states, resets, reset_states = arrays
    arguments = xp, w_hh, *([] if b_hn is None else [b_hn]), *states, resets, *reset_states
    save = op_common.wants_gradients([x for x in arguments if x is not None])
    several = (cells,) if len(cell.states) > 1 else ()
    options = order, precision, *several, save, implementation
    results = op_common.call(OPERATORS[cell.name].forward, *arguments, *options)
    return dict(zip(cell.forward_outputs, results, strict=True))
