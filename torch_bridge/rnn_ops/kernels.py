"""Launches of the time loops' kernels on tensors, for the operators."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_bridge import availability, choice, loops, op_common, tiling
from torch_bridge.cells import CellSpec

if TYPE_CHECKING:
    from torch_bridge.recurrences import Launch

# Shape and dtype of each output of an operator, by name; the shape is `(0,)` if the output is not requested.
Outputs = dict[str, tuple[Any, torch.dtype]]

REVERSE: dict[str, tiling.Reverse] = {"forward": False, "reverse": True, "bidirectional": "bidirectional"}


def sizes_of(sequence: Tensor, w_hh: Tensor) -> tiling.Sizes:
    """Returns the sizes of a recurrence, given a sequence `[G, T, B, W]` and the weights `[S, gates * H, H]`."""
    groups, steps, batch = sequence.shape[:3]
    return tiling.Sizes(w_hh.shape[0], groups, steps, batch, w_hh.shape[-1])


@functools.lru_cache(maxsize=4096)
def _launch(
    cell: str, direction: tiling.Direction, sizes: tiling.Sizes, dtypes: tuple[tuple[str, str], ...],
    reset_state: Any, order: str, precision: Any, norm_width: int, ordinal: int | None,
) -> Launch:  # fmt: skip
    """Returns the launch of a problem, compiled and loaded onto a device; if `ordinal` is None, for the interpreter."""
    from torch_bridge.recurrences import Launch

    made: Launch = op_common.load(
        Launch, _problem(cell, direction, sizes, dtypes, reset_state, order, precision, norm_width), ordinal
    )  # fmt: skip
    choice.log_launch(cell, direction, made)
    return made


def _problem(
    cell: str, direction: tiling.Direction, sizes: tiling.Sizes, dtypes: tuple[tuple[str, str], ...],
    reset_state: Any, order: str, precision: Any, norm_width: int,
) -> tiling.Problem:  # fmt: skip
    return tiling.Problem(
        cell, direction, *sizes, dtypes=dtypes, reset_state=reset_state, reverse=REVERSE[order], precision=precision,
        norm_width=norm_width,
    )  # fmt: skip


def _run(
    cell: CellSpec, direction: tiling.Direction, sizes: tiling.Sizes, arrays: dict[str, Tensor | None],
    outputs: Outputs, order: str, precision: str, reset_state: str = "zeros", norm_width: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Launches a kernel on the current stream of the tensors' device and returns its outputs by name.

    With a listener, it tells the launch instead, and the outputs have no values.
    """
    listener = choice.listener()
    if listener is not None:
        return _tell_launch(
            listener, cell, direction, sizes, arrays, outputs, order, precision, reset_state, norm_width
        )  # fmt: skip
    tensors = {name: op_common.as_kernel_input(x) for name, x in arrays.items() if x is not None}
    place = next(iter(tensors.values())).device
    results = {name: torch.empty(shape, dtype=dtype, device=place) for name, (shape, dtype) in outputs.items()}
    tensors |= results
    dtypes = tuple((name, op_common.dtype_name(x.dtype)) for name, x in tensors.items())
    ordinal = op_common.launch_ordinal(place)
    launch: Any = _launch(cell.name, direction, sizes, dtypes, reset_state, order, precision, norm_width, ordinal)
    if not launch.config.prepares_weights:
        weights = "w_hh_t" if direction == "fwd" else "w_hh"
        tensors[weights] = weights_for_tensor_cores(tensors[weights], precision)
    op_common.run(launch, tensors, ordinal)
    return results


def _tell_launch(
    listener: choice.Listener, cell: CellSpec, direction: tiling.Direction, sizes: tiling.Sizes,
    arrays: dict[str, Tensor | None], outputs: Outputs, order: str, precision: str, reset_state: str, norm_width: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Tells a listener what `_run` would launch, and returns outputs without values."""
    from torch_bridge.recurrences import Launch

    tensors = {name: x for name, x in arrays.items() if x is not None}
    place = next(iter(tensors.values())).device
    results = {name: torch.empty(shape, dtype=dtype, device=place) for name, (shape, dtype) in outputs.items()}
    dtypes = tuple((name, op_common.dtype_name(x.dtype)) for name, x in (tensors | results).items())
    device = availability.device_facts(listener.profile, place)
    problem = _problem(cell.name, direction, sizes, dtypes, reset_state, order, precision, norm_width)
    listener.launched(cell.name, direction, Launch(problem, device), device)
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


def _in_order(results: Mapping[str, Tensor], returned: Outputs, like: Tensor) -> tuple[Tensor, ...]:
    """Returns the results of a kernel in the order and dtypes of an operator's outputs."""
    return tuple(
        results[name].to(dtype) if name in results else op_common.empty_output(like, dtype)
        for name, (_, dtype) in returned.items()
    )


def forward(
    xp: Tensor, w_hh: Tensor, b_hn: Tensor | None, states: Sequence[Tensor], resets: Tensor | None,
    reset_states: Sequence[Tensor | None], norm: loops.Norm | None, *, cell: CellSpec, order: str, precision: str,
    returned: Outputs,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launches the forward kernel, whose arguments `torch_bridge.kernels.loops.streamed` explains.

    Returns the outputs that `returned` describes.
    """
    dtypes = {s: _state_dtype(x, w_hh) for s, x in zip(cell.states, states, strict=True)}
    arrays: dict[str, Tensor | None] = {"w_hh_t": w_hh, "b_hn": None if b_hn is None else b_hn.float()}
    arrays["xp"] = xp.float()
    if norm is not None:
        arrays |= {name: getattr(norm, name).float() for name in (*cell.norm_weights, *cell.norm_inputs)}
    arrays |= {f"{s}0": x.to(dtypes[s]) for s, x in zip(cell.states, states, strict=True)}
    arrays["reset"] = resets
    kind = "zeros"
    for s, x in zip(cell.states, reset_states, strict=True):
        if x is not None and resets is not None:
            arrays[f"reset_{s}"], kind = x.to(dtypes[s]), "stepped" if x.ndim == 4 else "fixed"
    outputs = {name: output for name, output in returned.items() if output[0] != (0,)}
    for s in cell.states:
        outputs[f"{s}_last"] = outputs[f"{s}_last"][0], torch.float32
        if f"{s}s" in outputs:
            outputs[f"{s}s"] = outputs[f"{s}s"][0], dtypes[s]
    width = 0 if norm is None else norm.width
    results = _run(cell, "fwd", sizes_of(xp, w_hh), arrays, outputs, order, precision, kind, width)
    return _in_order(results, returned, xp)


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def backward(
    w_hh: Tensor, residuals: Mapping[str, Tensor], resets: Tensor | None, dsequences: Sequence[Tensor | None],
    dlast: Sequence[Tensor | None], *, cell: CellSpec, order: str, precision: str, returned: Outputs,
    norm_width: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launches the backward kernel, whose arguments `torch_bridge.kernels.loops.streamed` explains.

    Gradients may be None for zeros. Returns the outputs that `returned` describes.
    """
    sizes = sizes_of(residuals["local_grads"], w_hh)
    _, groups, steps, batch, hidden = sizes
    arrays: dict[str, Tensor | None] = {"w_hh": w_hh.mT, **residuals, "reset": resets}
    for s, d in zip(cell.states, dsequences, strict=True):
        if d is not None:
            arrays[f"d{s}s"] = d.to(_state_dtype(d, w_hh))
        elif s == "h":
            arrays["dhs"] = _zeros(w_hh, groups, steps, batch, hidden)
    for s, d in zip(cell.states, dlast, strict=True):
        arrays[f"d{s}_last"] = _zeros(w_hh, groups, batch, hidden) if d is None else d.float()
    outputs = {name: output for name, output in returned.items() if output[0] != (0,)}
    results = _run(cell, "bwd", sizes, arrays, outputs, order, precision, norm_width=norm_width)
    return _in_order(results, returned, w_hh)
