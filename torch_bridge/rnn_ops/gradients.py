"""The gradients of recurrent weights and reset states, from the results of the backward operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torch_bridge import op_common
from torch_bridge.calls import ForwardCall


def _shift_one_step(history: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Returns the states before each step, `[..., T, B, H]`: `first` at the loop's first step, else from `history`."""
    first = first.unsqueeze(-3)
    parts = (history[..., 1:, :, :], first) if reverse else (first, history[..., :-1, :, :])
    return torch.cat(parts, -3)


def _with_resets(previous: Tensor, resets: Tensor | None, reset_h: Tensor | None) -> Tensor:
    """Returns the states that steps read, `[G, T, B, H]`: `previous`, or the reset state where an episode starts."""
    if resets is None:
        return previous
    start = (resets != 0)[..., None]
    if reset_h is None:
        return previous.masked_fill(start, 0)
    state = reset_h if reset_h.ndim == 4 else reset_h.unsqueeze(1)
    return torch.where(start, state.to(previous.dtype), previous)


def _states_read(x: ForwardCall, hs: Tensor, dtype: torch.dtype) -> list[tuple[slice, Tensor]]:
    """Returns the hidden states that steps read, as pairs of a slice of steps and the states `[G, steps, B, H]`.

    Where time is the slowest axis in memory, the first step is a part of its own. The other states then need not be
    copied to be concatenated with it.
    """
    models, resets, reset_h = x.w_hh.shape[0], x.resets, x.reset_states[0]
    hs, h0, groups, steps = hs.to(dtype), x.states[0].to(dtype), *hs.shape[:2]
    if x.order == "bidirectional":
        pairs = zip(hs.unflatten(0, (models, -1)), h0.unflatten(0, (models, -1)), strict=True)
        whole = torch.cat([_shift_one_step(*pair, reverse=s % 2 == 1) for s, pair in enumerate(pairs)])
        parts = [(slice(0, steps), whole)]
    elif groups > models or steps == 1:
        parts = [(slice(0, steps), _shift_one_step(hs, h0, x.order == "reverse"))]
    elif x.order == "reverse":
        parts = [(slice(0, steps - 1), hs[:, 1:]), (slice(steps - 1, steps), h0[:, None])]
    else:
        parts = [(slice(1, steps), hs[:, :-1]), (slice(0, 1), h0[:, None])]

    def of(steps: slice, y: Tensor | None) -> Tensor | None:
        return y if y is None or (y is reset_h and y.ndim == 3) else y[:, steps]

    return [(part, _with_resets(previous, of(part, resets), of(part, reset_h))) for part, previous in parts]


def _sum_products(x: Tensor, seen: list[tuple[slice, Tensor]], models: int) -> Tensor:
    """Returns `[S, X, H]`: each model's product of `x` and `seen`, summed over its groups, the steps and the batch."""
    products = []
    for steps, y in seen:
        part = x if len(seen) == 1 else x[:, steps]
        if models == 1:
            products.append((part.reshape(-1, x.shape[-1]).mT @ y.reshape(-1, y.shape[-1]))[None])
        else:
            products.append(part.reshape(models, -1, x.shape[-1]).mT @ y.reshape(models, -1, y.shape[-1]))
    return products[0] if len(products) == 1 else products[0] + products[1]


def reset_state_gradient(x: Tensor, like: Tensor) -> Tensor:
    """Returns the gradient of a reset state `like`, given the gradient of every step's reset state."""
    return (x if like.ndim == 4 else x.sum(1)).to(like.dtype)


def weight_gradient(x: ForwardCall, hs: Tensor, gradients: Mapping[str, Tensor]) -> Tensor:
    """Returns the gradient of `w_hh`, given the results of the backward operator by name."""
    cell, models, hidden = x.cell, x.w_hh.shape[0], x.w_hh.shape[-1]
    seen, dxp = _states_read(x, hs, x.w_hh.dtype), gradients["dxp"]
    if not cell.last_gate_separate:
        return _sum_products(dxp, seen, models)
    first = _sum_products(dxp[..., : (cell.gates - 1) * hidden], seen, models)
    return torch.cat((first, _sum_products(gradients["dhn"], seen, models)), 1)


def norm_gradients(
    wanted: Sequence[str],
    x: ForwardCall,
    hs: Tensor,
    scale: Tensor,
    gradients: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Returns the gradients of those arguments of a norm that are in `wanted`.

    Args:
      wanted: names of arguments.
      x: the forward call.
      hs: the hidden states of all steps.
      scale: `[G, T, B]`, the factor of each step's norm.
      gradients: the results of the backward operator by name.
    """
    assert x.norm is not None
    found, hidden, wide = {}, hs.shape[-1], op_common.accumulation_dtype(x.w_hh.dtype)
    dxp = gradients["dxp"].to(wide)

    def sum_by_model(x_of_steps: Tensor) -> Tensor:
        return x_of_steps.reshape(x.w_hh.shape[0], -1, x_of_steps.shape[-1]).sum(1)

    if "bias" in wanted:  # it is added after the norm
        found["bias"] = sum_by_model(dxp / scale[..., None]).to(x.norm.bias.dtype)
    dvariance = -0.5 * scale * scale * gradients["dnorm"]
    found["x_norm"] = dvariance.to(x.norm.x_norm.dtype)
    w_sum, x_mean = x.norm.w_sum, x.norm.x_mean
    if w_sum is None or x_mean is None:
        return found
    if "w_sum" in wanted:
        found["w_sum"] = -sum_by_model(dxp * x_mean.to(wide)[..., None]).to(w_sum.dtype)
    if "x_mean" in wanted:
        seen = _states_read(x, hs, wide)
        ordered = sorted(seen, key=lambda part: part[0].start)
        h_mean = torch.cat([h for _, h in ordered], 1).mean(-1)
        width = x.norm.width
        dmean = dvariance * (h_mean - x_mean) * (-2 * hidden * (width - hidden) / width**2)
        by_model = dxp.reshape(x.w_hh.shape[0], -1, dxp.shape[-1]) * w_sum.to(wide)[:, None]
        found["x_mean"] = (dmean - by_model.sum(-1).reshape(dmean.shape)).to(x_mean.dtype)
    return found
