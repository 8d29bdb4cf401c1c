"""The outputs of the operators: shapes and dtypes, and results of the loops in that form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bridge import op_common, rules
from torch_bridge.calls import BackwardCall, ForwardCall
from torch_bridge.cells import CellSpec
from torch_bridge.op_common import Outputs


def _residual_dtype(name: str, kernels: bool, precision: str, w_hh: Tensor) -> torch.dtype:
    if not kernels:
        return op_common.accumulation_dtype(w_hh.dtype)
    fits_float16 = rules.residual_fits_float16(name, op_common.dtype_name(w_hh.dtype), precision)
    return torch.float16 if fits_float16 else torch.float32


def forward_outputs(x: ForwardCall, kernels: bool) -> Outputs:
    """Returns the outputs of the forward operator."""
    cell = x.cell
    groups, steps, batch = x.xp.shape[:3]
    hidden = x.states[0].shape[-1]
    outputs: Outputs = {}
    for s, state in zip(cell.states, x.states, strict=True):
        outputs[f"{s}s"] = ((groups, steps, batch, hidden) if s in x.returned else (0,), state.dtype)
    for s, state in zip(cell.states, x.states, strict=True):
        outputs[f"{s}_last"] = ((groups, batch, hidden), state.dtype)
    for name, width in cell.residuals:
        shape = (groups, steps, batch, width * hidden) if x.save else (0,)
        outputs[name] = (shape, _residual_dtype(name, kernels, x.precision, x.w_hh))
    if cell.norm:
        outputs["scale"] = ((groups, steps, batch) if x.save else (0,), op_common.accumulation_dtype(x.w_hh.dtype))
    return outputs


def backward_names(cell: CellSpec) -> list[str]:
    """Returns the names of the outputs of the backward operator."""
    of_norm = ["dnorm"] if cell.norm else []
    return [
        "dxp",
        *cell.hidden_grads,
        *of_norm,
        *(f"d{s}0" for s in cell.states),
        *(f"dreset_{s}" for s in cell.states),
    ]


def backward_outputs(x: BackwardCall) -> Outputs:
    """Returns the outputs of the backward operator."""
    cell = x.cell
    groups, steps, batch = x.sequence.shape[:3]
    hidden, wide = x.w_hh.shape[-1], op_common.accumulation_dtype(x.w_hh.dtype)
    each_step = (groups, steps, batch, hidden)
    dreset: Any = (each_step if x.reset_gradients and x.resets is not None else (0,), wide)
    outputs: Outputs = {"dxp": ((groups, steps, batch, cell.gates * hidden), x.w_hh.dtype)}
    outputs |= {name: (each_step, x.w_hh.dtype) for name in cell.hidden_grads}
    outputs |= {"dnorm": ((groups, steps, batch), wide)} if cell.norm else {}
    outputs |= {f"d{s}0": ((groups, batch, hidden), wide) for s in cell.states}
    return outputs | {f"dreset_{s}": dreset for s in cell.states}


def as_outputs(results: Mapping[str, Tensor], outputs: Outputs, like: Tensor) -> tuple[Tensor, ...]:
    """Returns the results of a loop in the order and dtypes of an operator's outputs."""

    def given(name: str, shape: Any, dtype: torch.dtype) -> Tensor:
        if shape == (0,):
            return op_common.empty_output(like, dtype)
        x = results[name].to(dtype).contiguous()  # the fake outputs are contiguous
        return x.clone() if x._is_view() else x  # autograd forbids in-place changes to a view made in here

    return tuple(given(name, *output) for name, output in outputs.items())
