"""The flat arguments of the operators: schemas made from the cell table, calls packed and unpacked, and checks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_bridge import op_common
from torch_bridge.calls import BackwardCall, ForwardCall, Norm
from torch_bridge.cells import CellSpec
from torch_bridge.rnn_ops import kernels
from torch_bridge.rnn_ops.implementation import PRECISIONS


def forward_types(cell: CellSpec) -> dict[str, str]:
    """Returns the arguments of a cell's forward operator with their types in PyTorch's schema language."""
    return {
        **dict.fromkeys(("xp", "w_hh", *(("b_hn",) if cell.last_gate_separate else ())), "Tensor"),
        **dict.fromkeys((*cell.norm_weights, *cell.norm_inputs), "Tensor"),
        **{f"{s}0": "Tensor" for s in cell.states},
        "resets": "Tensor?",
        **{f"reset_{s}": "Tensor?" for s in cell.states},
        **{"order": "str", "precision": "str"},
        **({"norm_width": "SymInt"} if cell.norm else {}),
        **({"cells": "bool"} if len(cell.states) > 1 else {}),
        **{"save": "bool", "implementation": "str?"},
    }


def forward_tensors(x: ForwardCall) -> list[Tensor | None]:
    """Returns the arrays of a call in the order of its operator's arguments, of which they are the first."""
    last_gate = (x.b_hn,) if x.cell.last_gate_separate else ()
    of_norm: list[Tensor | None] = []
    if x.norm is not None:
        of_norm = [getattr(x.norm, name) for name in (*x.cell.norm_weights, *x.cell.norm_inputs)]
    return [x.xp, x.w_hh, *last_gate, *of_norm, *x.states, x.resets, *x.reset_states]


def forward_options(x: ForwardCall, save: bool) -> tuple[Any, ...]:
    """Returns the options of a call in the order of its operator's arguments; `save` takes the place of its own."""
    width = () if x.norm is None else (x.norm.width,)
    cells = (len(x.returned) > 1,) if len(x.cell.states) > 1 else ()
    return x.order, x.precision, *width, *cells, save, x.implementation


def forward_call(cell: CellSpec, arguments: Sequence[Any]) -> ForwardCall:
    """Returns the call of a cell's forward operator; PyTorch leaves out `implementation` if it is None."""
    each, count = iter(arguments), len(cell.states)
    xp, w_hh = next(each), next(each)
    b_hn = next(each) if cell.last_gate_separate else None
    of_norm = {name: next(each) for name in (*cell.norm_weights, *cell.norm_inputs)}
    states, resets = tuple(itertools.islice(each, count)), next(each)
    reset_states = tuple(itertools.islice(each, count))
    order, precision = next(each), next(each)
    norm = Norm(next(each), **of_norm) if cell.norm else None
    returned = cell.states if count > 1 and next(each) else cell.states[:1]
    save = next(each)
    return ForwardCall(
        cell, xp, w_hh, b_hn, states, resets, reset_states, norm, order, precision, returned, save, next(each, None)
    )


def backward_types(cell: CellSpec) -> dict[str, str]:
    """Returns the arguments of a cell's backward operator with their types in PyTorch's schema language."""
    return {
        **dict.fromkeys(("w_hh", "hs", *cell.saved), "Tensor"),
        "resets": "Tensor?",
        **{f"d{s}s": "Tensor?" for s in cell.states},
        **{f"d{s}_last": "Tensor?" for s in cell.states},
        **{"order": "str", "precision": "str"},
        **({"norm_width": "SymInt"} if cell.norm else {}),
        **{"reset_gradients": "bool", "implementation": "str?"},
    }


def backward_arguments(x: BackwardCall) -> tuple[Any, ...]:
    """Returns the arguments of a cell's backward operator."""
    width = (x.norm_width,) if x.cell.norm else ()
    arrays = x.w_hh, x.hs, *x.residuals.values(), x.resets, *x.dsequences, *x.dlast
    return *arrays, x.order, x.precision, *width, x.reset_gradients, x.implementation


def backward_call(cell: CellSpec, arguments: Sequence[Any]) -> BackwardCall:
    """Returns the call of a cell's backward operator, as `forward_call` does."""
    each, count = iter(arguments), len(cell.states)
    return BackwardCall(
        cell=cell,
        w_hh=next(each),
        hs=next(each),
        residuals={name: next(each) for name in cell.saved},
        resets=next(each),
        dsequences=tuple(itertools.islice(each, count)),
        dlast=tuple(itertools.islice(each, count)),
        order=next(each),
        precision=next(each),
        norm_width=next(each) if cell.norm else 0,
        reset_gradients=next(each),
        implementation=next(each, None),
    )


def schema(types: Mapping[str, str], results: int) -> str:
    """Returns the schema of an operator that returns tensors; only `implementation` has a default."""
    arguments = [f"{kind} {name}{'=None' if name == 'implementation' else ''}" for name, kind in types.items()]
    return f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * results)})"


def _check(
    x: ForwardCall | BackwardCall, sequences: dict[str, Tensor | None], states: dict[str, Tensor | None],
    weights: dict[str, Tensor],
) -> None:  # fmt: skip
    """Raises ValueError unless the arrays of a call have the shapes that kernels read, and at least one step.

    There may be no sequences. It also raises if the arrays are on different devices, or if the order or the precision
    is unknown.
    """
    cell, (models, groups, steps, batch, hidden) = x.cell, kernels.sizes_of(x)
    op_common.check_devices("w_hh", x.w_hh, sequences | states | weights)
    if x.order not in kernels.REVERSE or x.precision not in PRECISIONS:
        raise ValueError(
            f"order must be one of {', '.join(kernels.REVERSE)}; precision must be one of "
            f"{', '.join(PRECISIONS)}; got {x.order!r} and {x.precision!r}"
        )
    if steps < 1:
        raise ValueError(f"a recurrence needs at least one step, and {next(iter(sequences))} has none")
    if models < 1 or groups % models:
        raise ValueError(f"the number of groups, {groups}, must be a multiple of the number of models, {models}")
    widths = {"xp": cell.gates, **dict(cell.residuals)}
    for name, array in sequences.items():
        shape: tuple[int, ...] = (groups, steps, batch, widths.get(name, 1) * hidden)
        if name in ("resets", "scale", "x_norm", "x_mean"):
            shape = shape[:3]
        if array is not None and tuple(array.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(array.shape)}")
    for name, array in states.items():
        if array is not None and tuple(array.shape) != (groups, batch, hidden):
            raise ValueError(f"{name} must be {(groups, batch, hidden)}, got {tuple(array.shape)}")
    for name, array in weights.items():
        wanted: tuple[int, ...] = {
            "w_hh": (models, cell.gates * hidden, hidden), "b_hn": (models, hidden),
        }.get(name, (models, cell.gates * hidden))  # fmt: skip
        if tuple(array.shape) != wanted:
            raise ValueError(f"{name} must be {wanted}, got {tuple(array.shape)}")


def check_forward(x: ForwardCall) -> None:
    """Raises the errors of `_check`, and ValueError if only some of the states have a reset state."""
    cell = x.cell
    states: dict[str, Tensor | None] = {f"{s}0": state for s, state in zip(cell.states, x.states, strict=True)}
    sequences: dict[str, Tensor | None] = {"xp": x.xp, "resets": x.resets}
    reset_states = {f"reset_{s}": state for s, state in zip(cell.states, x.reset_states, strict=True)}
    given = [state for state in x.reset_states if state is not None]
    if given:
        if len(given) < len(reset_states):
            raise ValueError(f"{' and '.join(reset_states)} must be given together: pass zeros for the missing one")
        if given[0].ndim == 4:
            sequences |= reset_states
        else:
            states |= reset_states
    weights = {"w_hh": x.w_hh} if x.b_hn is None else {"w_hh": x.w_hh, "b_hn": x.b_hn}
    if x.norm is not None:
        weights |= {name: getattr(x.norm, name) for name in cell.norm_weights}
        sequences |= {name: getattr(x.norm, name) for name in cell.norm_inputs}
    _check(x, sequences, states, weights)


def check_backward(x: BackwardCall) -> None:
    """Raises the errors of `_check`."""
    sequences = {**x.residuals, "resets": x.resets}
    sequences |= {f"d{s}s": d for s, d in zip(x.cell.states, x.dsequences, strict=True)}
    last = {f"d{s}_last": d for s, d in zip(x.cell.states, x.dlast, strict=True)}
    _check(x, sequences, last, {"w_hh": x.w_hh})
