"""What a layer whose gates see a norm computes before its time loop: folded weights, and statistics of the inputs.

`torch_bridge.kernels.loops.streamed` explains how the time loop uses them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_bridge import op_common
from torch_bridge.cells import CellSpec
from torch_bridge.functional.call import Direction


class NormWeights(NamedTuple):
    """The scales and shifts of the norm of `[x, h]`; None stands for ones and zeros.

    Attributes:
      scale_i: `[D]`.
      scale_h: `[H]`.
      shift_i: `[D]`.
      shift_h: `[H]`.
    """

    scale_i: Tensor | None
    scale_h: Tensor | None
    shift_i: Tensor | None
    shift_h: Tensor | None


def fold(cell: CellSpec, one: Direction, norm: NormWeights, update_bias: float) -> Direction:
    """Returns a direction whose weights contain the norm's scales, and whose one bias contains its shifts.

    For LayerNorm, the weights are centered. The bias of the last gate also contains `update_bias`.
    """
    dtype = op_common.accumulation_dtype(one.w_ih.dtype)
    w_ih, w_hh = one.w_ih.to(dtype), one.w_hh.to(dtype)
    wide, hidden = w_hh.shape
    bias = torch.cat((w_hh.new_zeros(wide - hidden), w_hh.new_full((hidden,), update_bias)))
    biases = [b.to(dtype) for b in (one.b_ih, one.b_hh) if b is not None]
    shifts = ((w_ih, norm.shift_i), (w_hh, norm.shift_h))
    biases += [w @ shift.to(dtype) for w, shift in shifts if shift is not None]
    for b in biases:
        bias = bias + b
    w_ih, w_hh = (
        w if scale is None else w * scale.to(dtype) for w, scale in ((w_ih, norm.scale_i), (w_hh, norm.scale_h))
    )
    if cell.norm == "layer":
        mean = (w_ih.sum(1, keepdim=True) + w_hh.sum(1, keepdim=True)) / (w_ih.shape[1] + hidden)
        w_ih, w_hh = w_ih - mean, w_hh - mean
    return one._replace(w_ih=w_ih.to(one.w_ih.dtype), w_hh=w_hh.to(one.w_hh.dtype), b_ih=bias, b_hh=None)


class Statistics(NamedTuple):
    """Holds the inputs that weights multiply and the statistics of inputs `[..., D]` that `CellSpec.norm_inputs` names.

    Attributes:
      xs: the inputs that the folded weights multiply: without their mean for LayerNorm. Each row of a folded weight
        then has a sum of zero over all D + H columns, so any number may be subtracted from inputs and state alike. The
        mean of the inputs is subtracted: a large mean, times weights that are rounded to 16 bits or to TF32, would be a
        large error. The time loop subtracts it from the state.
      x_norm: `[...]`, the part of the variance that follows from the inputs, with epsilon.
      x_mean: `[...]`, the mean of the inputs, which is 0 of no inputs; None for RMSNorm.
    """

    xs: Tensor
    x_norm: Tensor
    x_mean: Tensor | None


def input_statistics(cell: CellSpec, xs: Tensor, hidden: int, epsilon: float) -> Statistics:
    """Returns the statistics of inputs `[..., D]` for the norm of a cell with `hidden` units."""
    wide, mean = xs.to(op_common.accumulation_dtype(xs.dtype)), None
    if cell.norm == "layer":
        mean = (wide.mean if wide.shape[-1] else wide.sum)(-1, keepdim=True)
        wide = wide - mean
    x_norm = (wide * wide).sum(-1) / (xs.shape[-1] + hidden) + epsilon
    return Statistics(xs, x_norm, None) if mean is None else Statistics(wide.to(xs.dtype), x_norm, mean.squeeze(-1))
