"""The projection of an LSTM's hidden state (`w_hr`), kept out of the time loop.

The loop carries m = o * tanh(c') instead of h = W_hr m. It multiplies m by W_hh W_hr, and the projection of all m
follows after the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from torch_bridge.functional.call import Call, Direction, DirectionResult
from torch_bridge.functional.layout import stack


def without_projection(call: Call, xps: Sequence[Tensor], time: int) -> tuple[Tensor, Call]:
    """Returns the stacked input projections, and the call, of a layer without a projection.

    Args:
      call: a call whose directions have a projection.
      xps: the input projections of each direction.
      time: the time axis of the input projections.
    """
    parts, plain = [], []
    for xp, one, backward in zip(xps, call.directions, (call.reverse, True), strict=False):
        assert one.w_hr is not None
        parts.append(_start_projected(xp, one, backward, time))
        states, reset_states = (None, *one.states[1:]), (None, *one.reset_states[1:])
        plain.append(one._replace(w_hh=one.w_hh @ one.w_hr, states=states, reset_states=reset_states))
    return stack(parts), call._replace(directions=plain)


def _start_projected(xp: Tensor, one: Direction, reverse: bool, time: int) -> Tensor:
    """Returns input projections for which a loop over m from m = 0 computes what a loop over h from h0 computes.

    There may be no m whose projection is a given h. But h contributes only W_hh h to the first step, which can be added
    to the input projection of that step. The same holds for reset states.
    """
    h0, reset_h, starts = one.states[0], one.reset_states[0], None if one.resets is None else one.resets != 0
    # A NaN in a state that no step sees would reach the gradient of the weights, so such states are zeroed first.
    if h0 is not None:
        at = xp.shape[time] - 1 if reverse else 0
        if starts is not None:
            h0 = h0.masked_fill(starts.select(time, at)[..., None], 0)
        first = linear(h0.to(one.w_hh.dtype), one.w_hh)
        xp = torch.select_scatter(xp, xp.select(time, at) + first, time, at)
    if starts is not None and reset_h is not None:
        seen = starts if reset_h.ndim == xp.ndim else starts.any(time) if reset_h.ndim > 1 else starts.any()
        first = linear(reset_h.masked_fill(~seen[..., None], 0).to(one.w_hh.dtype), one.w_hh)
        if 1 < first.ndim < xp.ndim:
            first = first.unsqueeze(time)
        xp = xp + first.expand_as(xp).masked_fill(~starts[..., None], 0)
    return xp


def project(one: Direction, result: DirectionResult, default: torch.dtype) -> DirectionResult:
    """Returns the results of a direction with a projection, given those of the direction without it.

    `default` is the dtype of hidden states if `one` has no initial one.
    """
    assert one.w_hr is not None
    dtype = default if one.states[0] is None else one.states[0].dtype
    hs, h_n = (linear(m.to(one.w_hr.dtype), one.w_hr).to(dtype) for m in (result.hs, result.last[0]))
    return DirectionResult(hs, result.cs, (h_n, *result.last[1:]))
