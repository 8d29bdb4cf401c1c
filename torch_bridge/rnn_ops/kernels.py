"""Launches of the time loops' kernels on tensors, for the operators."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_bridge import availability, op_common, recording, rules, tiling
from torch_bridge.calls import BackwardCall, ForwardCall
from torch_bridge.op_common import Outputs

if TYPE_CHECKING:
    from torch_bridge.recurrences import Launch

REVERSE: dict[str, tiling.Reverse] = {"forward": False, "reverse": True, "bidirectional": "bidirectional"}


def sizes_of(x: ForwardCall | BackwardCall) -> tiling.Sizes:
    """Returns the sizes of a call."""
    groups, steps, batch = x.sequence.shape[:3]
    return tiling.Sizes(x.w_hh.shape[0], groups, steps, batch, x.w_hh.shape[-1])


@functools.lru_cache(maxsize=4096)
def _launch(fields: tuple[Any, ...], ordinal: int | None) -> Launch:
    """Returns the launch of `Problem(*fields)`, compiled and loaded onto a device, or for the interpreter."""
    from torch_bridge.recurrences import Launch

    launch: Launch = op_common.load(Launch, tiling.Problem(*fields), ordinal)
    recording.log_launch(launch.problem.cell, launch.problem.direction, launch)
    return launch


def _run(
    x: ForwardCall | BackwardCall, arrays: dict[str, Tensor | None], outputs: Outputs, reset_state: str = "zeros"
) -> dict[str, Tensor]:
    """Launches the kernel of a call on the current stream and returns its outputs by name.

    With a listener, it tells the launch instead, and the outputs have no values.
    """
    listener, device = recording.listener(), x.w_hh.device
    tensors = {
        name: op_common.as_kernel_input(array) if listener is None else array
        for name, array in arrays.items()
        if array is not None
    }
    results = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in outputs.items()}
    tensors |= results
    direction, weights = ("fwd", "w_hh_t") if isinstance(x, ForwardCall) else ("bwd", "w_hh")
    dtypes = tuple((name, op_common.dtype_name(array.dtype)) for name, array in tensors.items())
    options = reset_state, REVERSE[x.order], x.precision, x.norm_width
    fields: tuple[Any, ...] = x.cell.name, direction, *sizes_of(x), dtypes, *options  # a `Problem` is slow to hash
    if listener is not None:
        from torch_bridge.recurrences import Launch

        facts = availability.device_facts(listener.profile, device)
        listener.launched(x.cell.name, direction, Launch(tiling.Problem(*fields), facts), facts)
        return results
    ordinal = op_common.launch_ordinal(device)
    launch: Any = _launch(fields, ordinal)
    if not launch.config.prepares_weights:
        tensors[weights] = weights_for_tensor_cores(tensors[weights], x.precision)
    op_common.run(launch, tensors, ordinal)
    return results


def weights_for_tensor_cores(w: Tensor, precision: str) -> Tensor:
    """Returns weights for the streamed loop, rounded to TF32: tensor cores truncate them, which would add a bias.

    With "tf32x3" Triton rounds them, and an addition sets high bits of each NaN, which truncation keeps.
    """
    if w.dtype != torch.float32:
        return w
    if precision != "tf32":
        return w + 0.0
    rounded = (w.contiguous().view(torch.int32) + 0x1000).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(w == w, rounded, torch.nan)  # rounding changes some NaNs to numbers


def _state_dtype(x: Tensor, w_hh: Tensor) -> torch.dtype:
    """Returns the dtype in which kernels read and write a state: bfloat16 if it and the weights are, else float32."""
    return torch.bfloat16 if x.dtype == w_hh.dtype == torch.bfloat16 else torch.float32


def _in_order(results: Mapping[str, Tensor], outputs: Outputs, like: Tensor) -> tuple[Tensor, ...]:
    """Returns the results of a kernel in the order and dtypes of an operator's outputs."""
    return tuple(
        results[name].to(dtype) if name in results else op_common.empty_output(like, dtype)
        for name, (_, dtype) in outputs.items()
    )


def _readable_resets(resets: Tensor | None) -> Tensor | None:
    return resets if resets is None or op_common.dtype_name(resets.dtype) in rules.RESET_DTYPES else resets != 0


def forward(x: ForwardCall, outputs: Outputs) -> tuple[Tensor, ...]:
    """Launches the forward kernel, whose arguments `torch_bridge.kernels.loops.streamed` explains.

    Returns the outputs that `outputs` describes.
    """
    states = x.cell.states
    dtypes = {s: _state_dtype(state, x.w_hh) for s, state in zip(states, x.states, strict=True)}
    arrays: dict[str, Tensor | None] = {"w_hh_t": x.w_hh, "b_hn": None if x.b_hn is None else x.b_hn.float()}
    arrays["xp"] = x.xp.float()
    if x.norm is not None:
        arrays |= {name: getattr(x.norm, name).float() for name in (*x.cell.norm_weights, *x.cell.norm_inputs)}
    arrays |= {f"{s}0": state.to(dtypes[s]) for s, state in zip(states, x.states, strict=True)}
    arrays["reset"] = _readable_resets(x.resets)
    kind = "zeros"
    for s, new in zip(states, x.reset_states, strict=True):
        if new is not None and x.resets is not None:
            arrays[f"reset_{s}"], kind = new.to(dtypes[s]), "stepped" if new.ndim == 4 else "fixed"
    written = {name: output for name, output in outputs.items() if output[0] != (0,)}
    for s in states:
        written[f"{s}_last"] = written[f"{s}_last"][0], torch.float32
        if f"{s}s" in written:
            written[f"{s}s"] = written[f"{s}s"][0], dtypes[s]
    return _in_order(_run(x, arrays, written, kind), outputs, x.xp)


def backward(x: BackwardCall, outputs: Outputs) -> tuple[Tensor, ...]:
    """Launches the backward kernel, whose arguments `torch_bridge.kernels.loops.streamed` explains.

    Returns the outputs that `outputs` describes.
    """
    _, *sequence, hidden = sizes_of(x)
    groups, _, batch = sequence

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=x.w_hh.device)

    arrays: dict[str, Tensor | None] = {"w_hh": x.w_hh.mT, **x.residuals, "reset": _readable_resets(x.resets)}
    for s, d in zip(x.cell.states, x.dsequences, strict=True):
        if d is not None:
            arrays[f"d{s}s"] = d.to(_state_dtype(d, x.w_hh))
        elif s == "h":
            arrays["dhs"] = zeros(*sequence, hidden)
    for s, d in zip(x.cell.states, x.dlast, strict=True):
        arrays[f"d{s}_last"] = zeros(groups, batch, hidden) if d is None else d.float()
    written = {name: output for name, output in outputs.items() if output[0] != (0,)}
    return _in_order(_run(x, arrays, written), outputs, x.w_hh)
