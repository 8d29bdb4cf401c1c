"""The function `gru`."""

from __future__ import annotations

from torch import Tensor

from torch_bridge.cells import GRU
from torch_bridge.functional.call import Call, Direction, Implementation
from torch_bridge.functional.layer import run_direction
from torch_bridge.rnn_ops import Precision


def gru(
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
    """Runs a GRU over time, starting afresh wherever `resets` is nonzero.

    With s the logistic function and gates ordered r, z, n, as in `torch.nn.GRU`:

        h = reset_state if resets[t] else h
        r = s(W_ir x + b_ir + W_hr h + b_hr),  z = s(W_iz x + b_iz + W_hz h + b_hz)
        n = tanh(W_in x + b_in + r * (W_hn h + b_hn))
        h' = (1 - z) * n + z * h

    Args:
      xs: inputs `[T, *batch, D]`, or `[*batch, T, D]` if `batch_first`, in the dtype of the weights.
      h0: hidden state before the first step, `[*batch, H]`, in the dtype of `xs` or in float32; None for zeros.
      w_ih: `[3H, D]`, in float32, float64, bfloat16 or float16.
      w_hh: `[3H, H]`, or `[N, 3H / N, H / N]`: the N blocks (heads) of a block-diagonal matrix. A block has H / N
        consecutive units, which multiply the states of their own block alone. The rows of a block are r of all
        its units, then z, then n. Other arguments and the results are the same. All blocks run in one launch.
      b_ih: `[3H]` or None.
      b_hh: `[3H]` or None.
      resets: `[T, *batch]` (`[*batch, T]`), any dtype; nonzero at the first step of an episode, that is, the *previous*
        step's done. That step sees `reset_state`, not the carry, and no gradient crosses it.
      reset_state: the state at the start of an episode: None (zeros), `[H]` (a learned state), `[*batch, H]`, or a
        value for every step, `[T, *batch, H]` (`[*batch, T, H]`). It is differentiable.
      reverse: run from the last step to the first; outputs stay in the order of the inputs.
      batch_first: the layout of every array with a time axis. Neither layout is copied into the other.
      precision: precision of float32 products in the time loop on a GPU: "tf32"; "tf32x3", which has the accuracy of
        float32 (three TF32 products instead of one, or float32 products if H is small); or None: "tf32" if
        `torch.backends.cuda.matmul` allows it and H is above 32, else "tf32x3". All other products are PyTorch's own
        and follow its settings.
      implementation: "triton" (the kernels, which need an NVIDIA GPU and float32, bfloat16 or float16); "torch"
        (PyTorch operations that autograd sees, which is slow); or None: the kernels where they can run, elsewhere the
        loop in PyTorch operations, as one operator. Each has derivatives of every order and mode: the kernels compute
        results and first gradients, and PyTorch operations the others. With None, an eager call of a single step in
        float32 or float64 runs PyTorch's own cell, which has less host overhead. If you name an implementation that
        cannot run the input, a `NotImplementedError` says why.

    Returns:
      `(ys, h_n)`, the hidden states of all steps in the layout of `xs`, and `[*batch, H]`, the one after the step that
      ran last, both in the dtype of `h0`, or of `xs` if `h0` is None. Between steps the hidden state is float32, or
      float64 if `xs` is.

    Raises:
      ValueError: shapes, dtypes or devices disagree, an argument is not a tensor, some tensors are DTensors and others
        are not, there are no steps, `reset_state` is given without `resets`, or the implementation or the precision is
        unknown.
      NotImplementedError: the named implementation cannot run this input.

    Examples:
      Two sequences of five steps, of which the second starts a new episode at step 2:

      >>> import torch
      >>> from torch_bridge import functional
      >>> xs, w_ih, w_hh = torch.randn(5, 2, 3), torch.randn(12, 3), torch.randn(12, 4)
      >>> resets = torch.zeros(5, 2, dtype=torch.bool)
      >>> resets[2, 1] = True
      >>> ys, h_n = functional.gru(xs, None, w_ih, w_hh, resets=resets)
      >>> ys.shape, h_n.shape
      (torch.Size([5, 2, 4]), torch.Size([2, 4]))
      >>> alone, _ = functional.gru(xs[2:, 1], None, w_ih, w_hh)
      >>> torch.allclose(ys[2:, 1], alone, atol=1e-6)
      True
    """
    one = Direction(w_ih, w_hh, b_ih, b_hh, None, (h0,), resets, (reset_state,))
    out = run_direction(Call(GRU, xs, [one], reverse, batch_first, False, precision, implementation))
    return out.hs, out.last[0]
