"""The function `norm_gru`."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from torch_bridge.cells import LAYER_NORM_GRU, RMS_NORM_GRU, CellSpec
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional.call import Call, Direction, Implementation
from torch_bridge.functional.checks import check_direction, check_epsilon, check_number, check_weight
from torch_bridge.functional.gru import gru
from torch_bridge.functional.layer import run
from torch_bridge.functional.norm_weights import NormWeights, fold
from torch_bridge.rnn_ops import Precision

# The cell of each norm.
CELLS = {"rms": RMS_NORM_GRU, "layer": LAYER_NORM_GRU}


def cell_of(norm: Any) -> CellSpec:
    """Returns the cell with a norm. Raises ValueError if there is none."""
    if norm not in (*CELLS,):  # it may have no hash
        raise ValueError(f'norm must be "rms" or "layer", got {norm!r}')
    return CELLS[norm]


def check_constants(epsilon: Any, update_bias: Any) -> None:
    """Raises ValueError unless the constants of a cell with a norm are valid."""
    check_number("epsilon", epsilon)
    check_epsilon("epsilon", epsilon)
    check_number("update_bias", update_bias)
    if not -math.inf < update_bias < math.inf:  # torch.compile does not trace math.isfinite of a dynamic number
        raise ValueError(f"update_bias must be finite, got {update_bias}")


def check_norm(
    cell: CellSpec, inputs: str, xs: Tensor, one: Direction, norm: NormWeights, suffix: str = ""
) -> None:  # fmt: skip
    """Raises ValueError unless scales and shifts fit a direction: shapes, dtypes and devices. Names end in `suffix`."""
    widths = {"i": one.w_ih.shape[-1], "h": one.w_hh.shape[-1]}
    for name, x in norm._asdict().items():
        if x is None:
            continue
        full = name + suffix
        if name.startswith("shift") and cell.norm == "rms":
            raise ValueError(f'{full} must be None with norm="rms", which has no shifts: pass norm="layer" for shifts')
        check_weight(full, x, (widths[name[-1]],), inputs, xs)


@inherit_descriptions(gru)
def norm_gru(
    xs: Tensor,
    h0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    scale_i: Tensor | None = None,
    scale_h: Tensor | None = None,
    shift_i: Tensor | None = None,
    shift_h: Tensor | None = None,
    norm: Literal["rms", "layer"] = "rms",
    epsilon: float = 1e-4,
    update_bias: float = -1.0,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    reverse: bool = False,
    batch_first: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> tuple[Tensor, Tensor]:
    """Runs a GRU whose gates see a norm of inputs and state, starting afresh wherever `resets` is nonzero.

    This is the GRU of DreamerV3 (Hafner et al., 2023). With s the logistic function and gates ordered r, n, u:

        h = reset_state if resets[t] else h
        y_i, y_h = norm(x, h)
        a = W_i y_i + b_i + W_h y_h + b_h
        r = s(a_r),  n = tanh(r * a_n),  u = s(a_u + update_bias)
        h' = u * n + (1 - u) * h

    The norm is over all D + H elements. "rms" divides by the root of mean(v^2) + epsilon and multiplies by the scales.
    "layer" first subtracts the mean, and adds the shifts.

    Args:
      w_ih: `[3H, D]`.
      w_hh: `[3H, H]`; blocks raise ValueError, because the norm sees all units.
      b_ih: `[3H]` or None.
      b_hh: `[3H]` or None; added to `b_ih`.
      scale_i: `[D]`, the scales of the norm for the inputs, or None for ones.
      scale_h: `[H]`, the scales of the norm for the state, or None for ones.
      shift_i: `[D]`, the shifts of the norm for the inputs, or None for zeros; None with `norm="rms"`.
      shift_h: `[H]`, the shifts of the norm for the state, or None for zeros; None with `norm="rms"`.
      norm: "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance.
      update_bias: what is added to the update gate before its activation.
      implementation: see `gru`. PyTorch has no cell of this kind; where `gru` runs PyTorch's own cell, `norm_gru` runs
        a loop of PyTorch operations or a kernel.

    Raises:
      ValueError: see `gru`; also if there is no such norm, or if `norm="rms"` is given shifts.

    Examples:
      >>> import torch
      >>> from torch_bridge import functional
      >>> w_ih, w_hh = torch.randn(12, 3), torch.randn(12, 4)
      >>> ys, h_n = functional.norm_gru(torch.randn(5, 2, 3), None, w_ih, w_hh, norm="layer")
      >>> ys.shape, h_n.shape
      (torch.Size([5, 2, 4]), torch.Size([2, 4]))
    """
    cell, weights = cell_of(norm), NormWeights(scale_i, scale_h, shift_i, shift_h)
    one = Direction(w_ih, w_hh, b_ih, b_hh, None, (h0,), resets, (reset_state,))
    call = Call(cell, xs, [one], reverse, batch_first, False, precision, implementation, epsilon)
    check_constants(epsilon, update_bias)
    check_direction(call)
    check_norm(cell, "xs", xs, one, weights)
    (out,) = run(call._replace(directions=[fold(cell, one, weights, update_bias)]))
    return out.hs, out.last[0]
