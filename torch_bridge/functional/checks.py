"""Checks of the arguments of functions and modules, which raise ValueError."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_bridge import op_common
from torch_bridge.cells import CellSpec
from torch_bridge.functional.call import Call


def check_implementation(name: Any) -> None:
    """Raises ValueError unless an implementation has this name."""
    if name not in (None, "triton", "torch"):
        raise ValueError(f'implementation must be "triton", "torch" or None, got {name!r}')


def check_tensor(name: str, given: Any, *, optional: bool = True) -> None:
    """Raises ValueError unless `given` is a tensor, or None if it is `optional`."""
    if isinstance(given, Tensor) or (optional and given is None):
        return
    kind = "None" if given is None else type(given).__name__
    remedies = {
        "ndarray": ": pass torch.from_numpy of it", "ArrayImpl": ": pass torch.from_dlpack of it",
        "list": ": pass torch.as_tensor of it", "tuple": ": pass one tensor",
        "Proxy": ": torch.fx cannot trace this call, so make its module a leaf of the torch.fx.Tracer (is_leaf_module)",
    }  # fmt: skip
    remedy = remedies.get(kind, "")
    raise ValueError(f"{name} must be a tensor, got {kind.replace('ArrayImpl', 'an array of JAX')}{remedy}")


def check_number(name: str, x: Any) -> None:
    """Raises ValueError unless `x` is a Python number."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise ValueError(f"{name} must be a number, got {type(x).__name__}: kernels take it as a scalar")


def check_epsilon(name: str, epsilon: float) -> None:
    """Raises ValueError unless a number may be added to a variance."""
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {epsilon}")


def has_shape(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has a shape. Ranks are compared first: a compiler specializes on how sizes compare."""
    sizes = x.shape
    return len(sizes) == len(shape) and sizes == shape


def check_reset_flags(resets: Tensor | None, shape: tuple[int, ...], explain: Callable[[], str]) -> None:
    """Raises ValueError unless resets are None or have a shape, which the message explains."""
    if resets is None or has_shape(resets, shape):
        return
    given = tuple(resets.shape)
    remedy = ": pass an entry for every step of every sequence"
    remedy = ": pass resets.squeeze(-1)" if given == (*shape, 1) else remedy
    remedy = ": pass resets.mT" if len(shape) == 2 and given == shape[::-1] else remedy
    raise ValueError(f"resets must be {shape}{explain()}, got {given}{remedy}")


def check_reset_state(name: str, state: Tensor, resets: Tensor | None, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises ValueError unless a reset state is floating point and has one of the shapes, and there are resets."""
    if not state.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {state.dtype}: convert it")
    if resets is None:
        raise ValueError("reset_state is given but resets is None: pass resets, or leave reset_state out")
    if not any(has_shape(state, shape) for shape in shapes):
        *others, last = dict.fromkeys(map(str, shapes))  # two of one sequence are equal
        raise ValueError(f"{name} must be {', '.join(others)} or {last}, got {tuple(state.shape)}")


def check_state_dtype(name: str, state: Tensor, inputs: str, xs: Tensor) -> None:
    """Raises ValueError unless a state has the dtype of the inputs, or float32; or any floating point with autocast."""
    if state.dtype in (xs.dtype, torch.float32):
        return
    if not (state.is_floating_point() and op_common.is_autocasting(xs.device.type)):
        raise ValueError(f"{name} must be {xs.dtype}, like {inputs}, or float32, got {state.dtype}: convert it")


def check_autocast(name: str, weight: Tensor, inputs: str, xs: Tensor) -> None:
    """Raises ValueError unless autocast converts a weight and the inputs, of another dtype, to its own dtype.

    It does not convert float64, nor what is not floating point.
    """
    converts = all(x.is_floating_point() and x.dtype != torch.float64 for x in (weight, xs))
    if not (converts and op_common.is_autocasting(xs.device.type)):
        raise ValueError(
            f"{name} must have the dtype of {inputs}, {xs.dtype}, got {weight.dtype}: convert one of them"
        )  # fmt: skip


def check_weight(name: str, weight: Any, shape: tuple[int, ...], inputs: str, xs: Tensor) -> None:
    """Raises ValueError unless a weight is a tensor of a shape, on the device of the inputs, in a dtype that fits."""
    check_tensor(name, weight, optional=False)
    if not has_shape(weight, shape):
        raise ValueError(f"{name} must be {shape}, got {tuple(weight.shape)}")
    if weight.device != xs.device:
        op_common.check_devices(inputs, xs, {name: weight})
    if weight.dtype != xs.dtype:
        check_autocast(name, weight, inputs, xs)


def name_of_reset_state(cell: CellSpec, state: str) -> str:
    """Returns how messages name the reset state of one of a cell's states."""
    return "reset_state" if len(cell.states) == 1 else f"{state} of reset_state"


def _block_shape(cell: CellSpec, w_hh: Tensor, hidden: int, w_hr: Tensor | None) -> tuple[int, ...]:
    """Returns the shape of block-diagonal recurrent weights. Raises ValueError if there can be none."""
    blocks = w_hh.shape[0]
    if w_hr is not None:
        raise ValueError("w_hh is block-diagonal, which a projection w_hr excludes: pass w_hh [4H, P]")
    if blocks == 0 or hidden % blocks != 0:
        raise ValueError(f"w_hh has {blocks} blocks, which do not divide H = {hidden}")
    return blocks, cell.gates * hidden // blocks, hidden // blocks


def _check_w_ih(cell: CellSpec, w_ih: Tensor, inputs: int) -> None:
    """Raises ValueError unless the input weights are a matrix with rows for every gate, and not transposed."""
    is_matrix = w_ih.ndim == 2 and w_ih.shape[0] >= cell.gates and w_ih.shape[0] % cell.gates == 0
    if is_matrix and w_ih.shape[1] == inputs:
        return
    transposed = w_ih.ndim == 2 and w_ih.shape[0] == inputs and w_ih.shape[1] % cell.gates == 0
    if transposed or not is_matrix:
        remedy = ": pass w_ih.mT and w_hh.mT, weights are laid out as in torch.nn" if transposed else ""
        raise ValueError(
            f"w_ih must be [{cell.gates} * H, D] with H >= 1 and D = {inputs}, got {tuple(w_ih.shape)}{remedy}"
        )


def check_direction(call: Call) -> None:
    """Raises ValueError unless shapes and dtypes of one direction agree, and all tensors are on the device of `xs`."""
    cell, xs, (one,), batch_first = call.cell, call.xs, call.directions, call.batch_first
    layout = "[*batch, T, D]" if batch_first else "[T, *batch, D]"
    check_tensor("xs", xs, optional=False)
    weights = {name: getattr(one, name) for name in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr")}
    states = {f"{s}0": x for s, x in zip(cell.states, one.states, strict=True)}
    reset_states = {name_of_reset_state(cell, s): x for s, x in zip(cell.states, one.reset_states, strict=True)}
    others = {**states, "resets": one.resets, **reset_states}
    for name, x in (weights | others).items():
        if not isinstance(x, Tensor):
            check_tensor(name, x, optional=name not in ("w_ih", "w_hh"))
    if xs.ndim < 2 or not xs.is_floating_point():
        raise ValueError(f"xs must be {layout} and floating point, got {tuple(xs.shape)} of {xs.dtype}")
    op_common.check_devices("xs", xs, weights)
    op_common.check_devices("w_hh", one.w_hh, others)
    _check_w_ih(cell, one.w_ih, xs.shape[-1])
    time = xs.ndim - 2 if batch_first else 0
    batch, steps = (*xs.shape[:time], *xs.shape[time + 1 : -1]), tuple(xs.shape[:-1])
    wide = one.w_ih.shape[0]
    hidden = wide // cell.gates
    width = hidden if one.w_hr is None else one.w_hr.shape[0]
    if one.w_hh.ndim == 3 and cell.norm:
        raise ValueError(f"w_hh must be {(wide, hidden)}, not blocks {tuple(one.w_hh.shape)}: the norm sees all units")
    w_hh = (wide, width) if one.w_hh.ndim != 3 else _block_shape(cell, one.w_hh, hidden, one.w_hr)
    shapes = {"w_ih": (wide, xs.shape[-1]), "w_hh": w_hh, "b_ih": (wide,), "b_hh": (wide,), "w_hr": (width, hidden)}
    for name, shape in shapes.items():
        w = weights[name]
        if w is None:
            continue
        if not has_shape(w, shape):
            remedies = {
                "w_ih": ": the arguments are xs, the initial state or None, w_ih, w_hh",
                "w_hh": f": w_ih has {wide} = {cell.gates} * H rows",
            }
            remedy = remedies.get(name, "")
            if len(shape) == 2 and tuple(w.shape) == shape[::-1]:
                remedy = f": pass {name}.mT"
            elif name in ("b_ih", "b_hh") and tuple(w.shape) == steps:
                remedy = ": pass resets by its name"
            raise ValueError(
                f"{name} must be {shape} for inputs {tuple(xs.shape)} {layout}, got {tuple(w.shape)}{remedy}"
            )
        if w.dtype != xs.dtype:
            check_autocast(name, w, "xs", xs)
    check_reset_flags(one.resets, steps, lambda: f" for xs {tuple(xs.shape)}")
    for w, (name, x), (reset_name, state) in zip((width, hidden), states.items(), reset_states.items(), strict=False):
        if x is not None:
            if not has_shape(x, (*batch, w)):
                raise ValueError(f"{name} must be [*batch, width] = {(*batch, w)}, got {tuple(x.shape)}")
            check_state_dtype(name, x, "xs", xs)
        if state is not None:
            check_reset_state(reset_name, state, one.resets, ((w,), (*batch, w), (*steps, w)))
