"""A user's program with the functions and modules of `torch_bridge`."""

from typing import Literal, assert_type

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import jaxrnn
import torch_bridge
from jaxrnn import convert
from torch_bridge.nn import GRU, LSTM, MGU, RNN, LayerNorm, NormGRU, RMSNorm, run_trajectories

T, B, D, H = 5, 2, 3, 4
xs, resets = torch.ones(T, B, D), torch.zeros(T, B)
packed = pack_sequence([torch.ones(T, D), torch.ones(2, D)])
States = tuple[Tensor, Tensor]

assert_type(GRU(D, H, 2, batch_first=False)(xs, resets=resets), tuple[Tensor, Tensor])
assert_type(GRU(D, H, dtype=torch.float32, device="cpu")(packed), tuple[PackedSequence, Tensor])
assert_type(MGU(D, H, precision="tf32x3")(xs), tuple[Tensor, Tensor])
assert_type(RNN(D, H, 1, "relu", implementation="torch")(xs), tuple[Tensor, Tensor])
assert_type(LSTM(D, H, proj_size=2, bidirectional=True)(xs), tuple[Tensor, States])
assert_type(LSTM(D, H)(packed, None), tuple[PackedSequence, States])
assert_type(LSTM(D, H).forward(xs, (torch.zeros(1, B, H), torch.zeros(1, B, H))), tuple[Tensor, States])

assert_type(NormGRU(D, H, norm="layer", epsilon=1e-3)(xs), tuple[Tensor, Tensor])
assert_type(LSTM(D, H, num_blocks=2)(xs), tuple[Tensor, States])
assert_type(MGU(D, H, num_blocks=2)(xs), tuple[Tensor, Tensor])

assert_type(RMSNorm(D, eps=1e-6)(xs), Tensor)
assert_type(RMSNorm([D])(xs, xs), tuple[Tensor, Tensor])
assert_type(LayerNorm((B, D), bias=False)(xs, residual=xs), tuple[Tensor, Tensor])


def of_both(norm: LayerNorm, residual: Tensor | None) -> None:
    assert_type(norm(xs, residual), Tensor | tuple[Tensor, Tensor])
    assert_type(torch_bridge.functional.layer_norm(xs, residual=residual), Tensor | tuple[Tensor, Tensor])


of_both(LayerNorm(D), None)

functional = torch_bridge.functional
w_ih, w_hh = torch.ones(4 * H, D), torch.ones(4 * H, H)
assert_type(functional.gru(xs, None, w_ih[: 3 * H], w_hh[: 3 * H], resets=resets), tuple[Tensor, Tensor])
assert_type(functional.mgu(xs, None, w_ih[: 2 * H], w_hh[: 2 * H]), tuple[Tensor, Tensor])
assert_type(functional.norm_gru(xs, None, w_ih[: 3 * H], w_hh[: 3 * H], norm="layer"), tuple[Tensor, Tensor])
assert_type(functional.rnn(xs, None, w_ih[:H], w_hh[:H], nonlinearity="relu"), tuple[Tensor, Tensor])
assert_type(functional.lstm(xs, None, w_ih, w_hh), tuple[Tensor, States])
assert_type(functional.lstm(xs, None, w_ih, w_hh, return_cells=True), tuple[tuple[Tensor, Tensor], States])
assert_type(functional.rms_norm(xs), Tensor)
assert_type(functional.rms_norm(xs, residual=xs), tuple[Tensor, Tensor])
assert_type(functional.rms_norm(xs, (D,), torch.ones(D), 1e-6), Tensor)
assert_type(functional.rms_norm(xs, normalized_shape=D, residual=xs), tuple[Tensor, Tensor])
assert_type(functional.layer_norm(xs, [D], torch.ones(D), torch.ones(D), 1e-6, residual=xs), tuple[Tensor, Tensor])
assert_type(functional.layer_norm(xs, D), Tensor)

rollout, is_init = torch.ones(B, T, D), torch.zeros(B, T, 1)
state = torch.zeros(B, T, 1, H)
assert_type(run_trajectories(GRU(D, H), rollout, is_init, state), tuple[Tensor, Tensor])
assert_type(run_trajectories(torch.nn.LSTM(D, H), rollout, is_init, state, state), tuple[Tensor, Tensor, Tensor])


# weights of a module for JAX
assert_type(convert.from_torch(torch.nn.GRU(D, H)), jaxrnn.GRUParams)
assert_type(convert.from_torch(torch.nn.LSTM(D, H, 2), layer=1), jaxrnn.LSTMParams)
assert_type(convert.from_torch(torch.nn.RNNCell(D, H)), jaxrnn.SimpleParams)
assert_type(convert.from_torch(GRU(D, H, num_blocks=2)), jaxrnn.GRUParams)
assert_type(convert.from_torch(LSTM(D, H, bidirectional=True), reverse=True), jaxrnn.LSTMParams)
assert_type(convert.from_torch(RNN(D, H)), jaxrnn.SimpleParams)
assert_type(convert.from_torch(GRU(D, H).state_dict(), into=jaxrnn.GRUParams), jaxrnn.GRUParams)
model: torch.nn.Module = torch.nn.Sequential(torch.nn.GRU(D, H))
assert_type(convert.from_torch(model, prefix="0.", into=jaxrnn.GRUParams), jaxrnn.GRUParams)

explanation = torch_bridge.explain(GRU(D, H), xs, resets=resets, device="a100", gradients=False)
assert_type(explanation, torch_bridge.Explanation)
assert_type(explanation.implementation, Literal["triton", "xla", "torch"])
assert_type(explanation.launches[0].kernels, tuple[str, ...])
assert_type(explanation.calls[0].unavailable, str | None)


def mistakes() -> None:
    """Type checkers reject each of these lines; a comment that suppresses nothing is an error."""
    GRU(D, H, proj_size=2)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    GRU(D, H, layers=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    GRU(D, H)(packed, resets=resets)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    LSTM(D, H)(xs, torch.zeros(1, B, H))  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    functional.gru(xs, None, w_ih, w_hh, implementation="xla")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
