"""Checks of the arguments of functions and modules, which raise ValueError."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from torch_bridge import op_common
from torch_bridge.cells import CellSpec
from torch_bridge.functional.direction import Direction

Implementation = Literal["triton", "torch"] | None
"""The type of the argument `implementation`, which `gru` describes."""


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


def check_reset_flags(resets: Any, shape: tuple[int, ...], whose: str) -> None:
    """Raises ValueError unless resets are None, or a tensor of a shape, which `whose` explains."""
    check_tensor("resets", resets)
    if resets is None:
        return
    given = tuple(resets.shape)
    if given != shape:
        remedy = ": pass an entry for every step of every sequence"
        remedy = ": pass resets.squeeze(-1)" if given == (*shape, 1) else remedy
        remedy = ": pass resets.mT" if len(shape) == 2 and given == shape[::-1] else remedy
        raise ValueError(f"resets must be {shape}{whose}, got {given}{remedy}")


def check_state_dtype(name: str, state: Tensor, inputs: str, xs: Tensor, weight: Tensor) -> None:
    """Raises ValueError unless a state has the dtype of the inputs or weights, or float32. Autocast accepts any."""
    if state.dtype not in (xs.dtype, torch.float32, weight.dtype) and not op_common.is_autocasting(xs.device.type):
        raise ValueError(f"{name} must be {xs.dtype}, like {inputs}, or float32, got {state.dtype}: convert it")


def name_of_reset_state(cell: CellSpec, state: str) -> str:
    """Returns how messages name the reset state of one of a cell's states."""
    return "reset_state" if len(cell.states) == 1 else f"{state} of reset_state"


def check_reset_state(name: str, given: Any) -> None:
    """Raises ValueError unless a reset state is a floating-point tensor or None."""
    check_tensor(name, given)
    if given is not None and not given.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {given.dtype}: convert it")


def _block_shape(cell: CellSpec, w_hh: Tensor, hidden: int, w_hr: Tensor | None) -> tuple[int, ...]:
    """Returns the shape of block-diagonal recurrent weights. Raises ValueError if there can be none."""
    blocks = w_hh.shape[0]
    if w_hr is not None:
        raise ValueError("w_hh is block-diagonal, which a projection w_hr excludes: pass w_hh [4H, P]")
    if blocks == 0 or hidden % blocks != 0:
        raise ValueError(f"w_hh has {blocks} blocks, which do not divide H = {hidden}")
    return blocks, cell.gates * hidden // blocks, hidden // blocks


def check_direction(cell: CellSpec, xs: Tensor, one: Direction, batch_first: bool) -> None:
    """Raises ValueError unless shapes and dtypes agree, and the weights are on the device of `xs`."""
    layout = "[*batch, T, D]" if batch_first else "[T, *batch, D]"
    check_tensor("xs", xs, optional=False)
    for name in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr"):
        check_tensor(name, getattr(one, name), optional=name not in ("w_ih", "w_hh"))
    for s, x in zip(cell.states, one.states, strict=True):
        check_tensor(f"{s}0", x)
    if xs.ndim < 2 or not xs.is_floating_point():
        raise ValueError(f"xs must be {layout} and floating point, got {tuple(xs.shape)} of {xs.dtype}")
    op_common.check_devices("xs", xs, {name: getattr(one, name) for name in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr")})
    given, inputs = tuple(one.w_ih.shape), xs.shape[-1]
    transposed = len(given) == 2 and given[0] == inputs != given[1] and given[1] % cell.gates == 0
    if transposed or len(given) != 2 or given[0] < cell.gates or given[0] % cell.gates:
        remedy = ": pass w_ih.mT and w_hh.mT, weights are laid out as in torch.nn" if transposed else ""
        raise ValueError(f"w_ih must be [{cell.gates} * H, D] with H >= 1 and D = {inputs}, got {given}{remedy}")
    time = xs.ndim - 2 if batch_first else 0
    batch, steps = (*xs.shape[:time], *xs.shape[time + 1 : -1]), tuple(xs.shape[:-1])
    wide = one.w_ih.shape[0]
    hidden = wide // cell.gates
    width = hidden if one.w_hr is None else one.w_hr.shape[0]
    if one.w_hh.ndim == 3 and cell.norm:
        raise ValueError(f"w_hh must be {(wide, hidden)}, not blocks {tuple(one.w_hh.shape)}: the norm sees all units")
    w_hh = (wide, width) if one.w_hh.ndim != 3 else _block_shape(cell, one.w_hh, hidden, one.w_hr)
    shapes = {"w_ih": (cell.gates * hidden, xs.shape[-1]), "w_hh": w_hh, "b_ih": (wide,), "b_hh": (wide,)}
    for name, shape in (shapes | {"w_hr": (width, hidden)}).items():
        w = getattr(one, name)
        if w is None:
            continue
        if tuple(w.shape) != shape:
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
        if w.dtype != xs.dtype and not op_common.is_autocasting(xs.device.type):
            raise ValueError(f"{name} must have the dtype of xs, {xs.dtype}, got {w.dtype}: convert one of them")
    check_reset_flags(one.resets, steps, f" for xs {tuple(xs.shape)}")
    for s, w, x, state in zip(cell.states, (width, hidden), one.states, one.reset_states, strict=False):
        if x is not None and tuple(x.shape) != (*batch, w):
            raise ValueError(f"{s}0 must be [*batch, width] = {(*batch, w)}, got {tuple(x.shape)}")
        if x is not None:
            check_state_dtype(f"{s}0", x, "xs", xs, one.w_hh)
        name = name_of_reset_state(cell, s)
        check_reset_state(name, state)
        if state is None:
            continue
        if one.resets is None:
            raise ValueError("reset_state is given but resets is None: pass resets, or leave reset_state out")
        if all(tuple(state.shape) != shape for shape in ((w,), (*batch, w), (*steps, w))):
            raise ValueError(f"{name} must be {(w,)}, {(*batch, w)} or {(*steps, w)}, got {tuple(state.shape)}")
