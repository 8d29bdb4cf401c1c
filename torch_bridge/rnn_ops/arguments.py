"""The arguments of the operators: schemas made from the cell table, grouping by kind, and checks of shapes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torch_bridge import loops, op_common, tiling
from torch_bridge.cells import CellSpec
from torch_bridge.rnn_ops import kernels
from torch_bridge.rnn_ops.implementation import PRECISIONS


class ForwardArguments(NamedTuple):
    """The arguments of a forward operator; those of each state are in one tuple.

    Attributes:
      xp: `[G, T, B, gates * H]`, the input projections.
      w_hh: `[S, gates * H, H]`.
      b_hn: `[S, H]`, an argument only if the last gate is separate, else None.
      states: `[G, B, H]` each; the arguments "h0", ...
      resets: `[G, T, B]` or None.
      reset_states: `[G, B, H]`, `[G, T, B, H]`, or None for zeros; the arguments "reset_h", ...
      norm: the arguments that `CellSpec.norm_weights` and `norm_inputs` name, and "norm_width", if the cell has a norm,
        else None.
      order: the direction through time, see `torch_bridge.loops`.
      precision: precision of float32 products, by Triton's name.
      cells: whether to return every state of every step, instead of the hidden states only; an argument only if there
        are several states.
      save: whether to return residuals.
      implementation: "triton", "loop", or None for the kernels where they can run, else the loop.
    """

    xp: Tensor
    w_hh: Tensor
    b_hn: Tensor | None
    states: tuple[Tensor, ...]
    resets: Tensor | None
    reset_states: tuple[Tensor | None, ...]
    norm: loops.Norm | None
    order: str
    precision: str
    cells: bool
    save: bool
    implementation: str | None


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


def forward_arguments(cell: CellSpec, arguments: Sequence[Any]) -> ForwardArguments:
    """Groups the arguments of a cell's forward operator; PyTorch leaves out `implementation` if it is None."""
    each, count = iter(arguments), len(cell.states)
    xp, w_hh = next(each), next(each)
    b_hn = next(each) if cell.last_gate_separate else None
    of_norm = {name: next(each) for name in (*cell.norm_weights, *cell.norm_inputs)}
    states, resets = tuple(itertools.islice(each, count)), next(each)
    reset_states = tuple(itertools.islice(each, count))
    order, precision = next(each), next(each)
    norm = loops.Norm(next(each), **of_norm) if cell.norm else None
    return ForwardArguments(
        xp=xp,
        w_hh=w_hh,
        b_hn=b_hn,
        states=states,
        resets=resets,
        reset_states=reset_states,
        norm=norm,
        order=order,
        precision=precision,
        cells=next(each) if count > 1 else False,
        save=next(each),
        implementation=next(each, None),
    )


class BackwardArguments(NamedTuple):
    """The arguments of a backward operator; those of each state, and the residuals, are in one tuple.

    Attributes:
      w_hh: `[S, gates * H, H]`.
      hs: `[G, T, B, H]`, which connects the operator to the inputs, see `operators`, and is not read.
      residuals: by name, what `torch_bridge.cells.CellSpec.saved` lists.
      resets: `[G, T, B]` or None.
      dsequences: gradients of the states of every step, `[G, T, B, H]` or None for zeros; the arguments "dhs", ...
      dlast: gradients of the last states, `[G, B, H]` or None for zeros; the arguments "dh_last", ...
      order: see `ForwardArguments`.
      precision: see `ForwardArguments`.
      norm_width: the number of elements that the norm sees, an argument only if the cell has a norm, else 0.
      reset_gradients: whether to return the gradient of each step's reset states.
      implementation: see `ForwardArguments`.
    """

    w_hh: Tensor
    hs: Tensor
    residuals: dict[str, Tensor]
    resets: Tensor | None
    dsequences: tuple[Tensor | None, ...]
    dlast: tuple[Tensor | None, ...]
    order: str
    precision: str
    norm_width: int
    reset_gradients: bool
    implementation: str | None


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


def backward_arguments(cell: CellSpec, arguments: Sequence[Any]) -> BackwardArguments:
    """Groups the arguments of a cell's backward operator, as `forward_arguments` does."""
    each, count = iter(arguments), len(cell.states)
    return BackwardArguments(
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
    cell: CellSpec, sizes: tiling.Sizes, sequences: dict[str, Tensor | None], states: dict[str, Tensor | None],
    weights: dict[str, Tensor], order: str, precision: str,
) -> None:  # fmt: skip
    """Raises ValueError unless the arrays of an operator have the shapes that kernels read, and at least one step.

    There may be no sequences. It also raises if the arrays are on different devices, or if the order or the precision
    is unknown.
    """
    models, groups, steps, batch, hidden = sizes
    op_common.check_devices("w_hh", weights["w_hh"], sequences | states | weights)
    if order not in kernels.REVERSE or precision not in PRECISIONS:
        raise ValueError(
            f"order must be one of {', '.join(kernels.REVERSE)}; precision must be one of "
            f"{', '.join(PRECISIONS)}; got {order!r} and {precision!r}"
        )
    if steps < 1:
        raise ValueError(f"a recurrence needs at least one step, and {next(iter(sequences))} has none")
    if models < 1 or groups % models:
        raise ValueError(f"the number of groups, {groups}, must be a multiple of the number of models, {models}")
    widths = {"xp": cell.gates, **dict(cell.residuals)}
    for name, x in sequences.items():
        shape: tuple[int, ...] = (groups, steps, batch, widths.get(name, 1) * hidden)
        if name in ("resets", "scale", "x_norm", "x_mean"):
            shape = shape[:3]
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(x.shape)}")
    for name, x in states.items():
        if x is not None and tuple(x.shape) != (groups, batch, hidden):
            raise ValueError(f"{name} must be {(groups, batch, hidden)}, got {tuple(x.shape)}")
    for name, x in weights.items():
        wanted: tuple[int, ...] = {
            "w_hh": (models, cell.gates * hidden, hidden), "b_hn": (models, hidden),
        }.get(name, (models, cell.gates * hidden))  # fmt: skip
        if tuple(x.shape) != wanted:
            raise ValueError(f"{name} must be {wanted}, got {tuple(x.shape)}")


def check_forward(cell: CellSpec, x: ForwardArguments) -> None:
    """Raises the errors of `_check`, and ValueError if only some of the states have a reset state."""
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
    _check(cell, kernels.sizes_of(x.xp, x.w_hh), sequences, states, weights, x.order, x.precision)


def check_backward(cell: CellSpec, x: BackwardArguments) -> None:
    """Raises the errors of `_check`."""
    sizes = kernels.sizes_of(x.residuals["local_grads"], x.w_hh)
    sequences = {**x.residuals, "resets": x.resets}
    sequences |= {f"d{s}s": d for s, d in zip(cell.states, x.dsequences, strict=True)}
    last = {f"d{s}_last": d for s, d in zip(cell.states, x.dlast, strict=True)}
    _check(cell, sizes, sequences, last, {"w_hh": x.w_hh}, x.order, x.precision)
