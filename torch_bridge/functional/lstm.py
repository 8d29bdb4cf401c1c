"""The function `lstm`."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor

from torch_bridge import rules
from torch_bridge.cells import LSTM
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional.call import Call, Direction, Implementation
from torch_bridge.functional.gru import gru
from torch_bridge.functional.layer import run_direction
from torch_bridge.rnn_ops import Precision


@overload
def lstm(
    xs: Tensor,
    state: tuple[Tensor, Tensor] | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    w_hr: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    reverse: bool = False,
    batch_first: bool = False,
    return_cells: Literal[False] = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]: ...


@overload
def lstm(
    xs: Tensor,
    state: tuple[Tensor, Tensor] | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    w_hr: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    reverse: bool = False,
    batch_first: bool = False,
    return_cells: Literal[True],
    precision: Precision = None,
    implementation: Implementation = None,
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]: ...


@overload
def lstm(
    xs: Tensor,
    state: tuple[Tensor, Tensor] | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    w_hr: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    reverse: bool = False,
    batch_first: bool = False,
    return_cells: bool,
    precision: Precision = None,
    implementation: Implementation = None,
) -> tuple[Tensor | tuple[Tensor, Tensor], tuple[Tensor, Tensor]]: ...


@inherit_descriptions(gru)
def lstm(
    xs: Tensor,
    state: tuple[Tensor, Tensor] | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    w_hr: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    reverse: bool = False,
    batch_first: bool = False,
    return_cells: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> tuple[Any, tuple[Tensor, Tensor]]:
    """Runs an LSTM over time, starting afresh wherever `resets` is nonzero.

    With s the logistic function and gates ordered i, f, g, o, as in `torch.nn.LSTM`:

        h, c = reset_state if resets[t] else h, c
        i, f, o = s(W_i x + b_i + W_h h + b_h),  g = tanh(W_ig x + b_ig + W_hg h + b_hg)
        c' = f * c + i * g,  h' = o * tanh(c')

    With `w_hr` the hidden state is projected to P units, `h' = W_hr (o * tanh(c'))` (Sak et al. 2014), and h is P wide
    instead of H. The loop then carries m = o * tanh(c') and multiplies it by W_hh W_hr. It differs from a loop that
    carries h only by the rounding of that product.

    Args:
      state: `(h0, c0)`, in PyTorch's order, `[*batch, H]` (`[*batch, P]` for h0 with a projection) and
        `[*batch, H]`, each in the dtype of `xs` or in float32; None for zeros.
      w_ih: `[4H, D]`.
      w_hh: `[4H, H]`, or `[4H, P]`, or `[N, 4H / N, H / N]` for N blocks, see `gru`; these exclude `w_hr`.
      b_ih: `[4H]` or None.
      b_hh: `[4H]` or None.
      w_hr: `[P, H]` or None.
      reset_state: None (zeros) or `(h, c)`, each like `reset_state` of `gru`.
      return_cells: also return the cell states of all steps.

    Returns:
      `(ys, (h_n, c_n))`, or `((ys, cs), (h_n, c_n))` if `return_cells`, the hidden (and the cell) states of all steps
      in the layout of `xs`, and the last ones `[*batch, width]`, in the dtypes of `h0` and `c0`, or in
      that of `xs` without them.

    Raises:
      ValueError: `state` or `reset_state` is not a pair; see also `gru`.

    Examples:
      >>> import torch
      >>> from torch_bridge import functional
      >>> xs, w_ih, w_hh = torch.randn(5, 2, 3), torch.randn(16, 3), torch.randn(16, 4)
      >>> ys, (h_n, c_n) = functional.lstm(xs, None, w_ih, w_hh, resets=torch.zeros(5, 2))
      >>> ys.shape, c_n.shape
      (torch.Size([5, 2, 4]), torch.Size([2, 4]))
    """
    states, reset_states = split_state_pair("state", state), split_state_pair("reset_state", reset_state)
    one = Direction(w_ih, w_hh, b_ih, b_hh, w_hr, states, resets, reset_states)
    out = run_direction(Call(LSTM, xs, [one], reverse, batch_first, return_cells, precision, implementation))
    return (out.hs, out.cs) if return_cells else out.hs, (out.last[0], out.last[1])


def split_state_pair(name: str, given: Any) -> tuple[Any, Any]:
    """Returns an LSTM's argument as `(h, c)`, both None if the argument is None."""
    if given is None:
        return None, None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"{name} of an LSTM is a pair (h, c), got {type(given).__name__}: pass both")
    remedy = rules.wrong_order(given, ("h", "c"))
    if remedy is not None:
        fields = ", ".join(given._fields)  # type: ignore[union-attr]
        raise ValueError(f"{name} of an LSTM is a pair (h, c), got {type(given).__name__}({fields}): {remedy}")
    return given[0], given[1]
