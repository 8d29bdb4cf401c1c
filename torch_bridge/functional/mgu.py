"""The function `mgu`."""

from __future__ import annotations

from torch import Tensor

from torch_bridge.cells import MGU
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional.call import Call, Direction, Implementation
from torch_bridge.functional.gru import gru
from torch_bridge.functional.layer import run_direction
from torch_bridge.rnn_ops import Precision


@inherit_descriptions(gru)
def mgu(
    xs: Tensor,
    h0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    reverse: bool = False,
    batch_first: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> tuple[Tensor, Tensor]:
    """Runs a minimal gated unit (Zhou et al., 2016) over time, starting afresh wherever `resets` is nonzero.

    With s the logistic function and gates ordered f, n:

        h = reset_state if resets[t] else h
        f = s(W_if x + b_if + W_hf h + b_hf)
        n = tanh(W_in x + b_in + f * (W_hn h + b_hn))
        h' = (1 - f) * n + f * h

    It is a GRU whose gates r and z are the same gate, f.

    Args:
      w_ih: `[2H, D]`.
      w_hh: `[2H, H]`, or `[N, 2H / N, H / N]` for N blocks, see `gru`.
      b_ih: `[2H]` or None.
      b_hh: `[2H]` or None.
      implementation: see `gru`. PyTorch has no cell of this kind; where `gru` runs PyTorch's own cell, `mgu` runs
        PyTorch operations.

    Examples:
      >>> import torch
      >>> from torch_bridge import functional
      >>> ys, h_n = functional.mgu(torch.randn(5, 2, 3), None, torch.randn(8, 3), torch.randn(8, 4))
      >>> ys.shape, h_n.shape
      (torch.Size([5, 2, 4]), torch.Size([2, 4]))
    """
    one = Direction(w_ih, w_hh, b_ih, b_hh, None, (h0,), resets, (reset_state,))
    out = run_direction(Call(MGU, xs, [one], reverse, batch_first, False, precision, implementation))
    return out.hs, out.last[0]
