"""LSTM (Hochreiter & Schmidhuber 1997, with forget gates). Gates are ordered i, f, g, o.

c' = s(f) c + s(i) tanh(g), h' = s(o) tanh(c'), with s the logistic function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrnn.cells.base import Cell, Layout
from torch_bridge import cells as specs

if TYPE_CHECKING:
    from typing import TypeAlias

    import equinox
    import torch
    from flax import nnx

    import torch_bridge.nn
    from jaxrnn.cells.base import States

    # The types that the overloads of `jaxrnn.convert` name, by framework.
    Params: TypeAlias = "LSTMParams"
    TorchModule: TypeAlias = torch.nn.LSTM | torch.nn.LSTMCell | torch_bridge.nn.LSTM
    NNXCell: TypeAlias = nnx.LSTMCell | nnx.OptimizedLSTMCell
    EquinoxCell: TypeAlias = equinox.nn.LSTMCell


class LSTMParams(NamedTuple):
    """Weights of an LSTM; gates ordered i, f, g, o.

    Attributes:
      w_ih: `[D, 4H]` input weights.
      w_hh: `[H, 4H]` recurrent weights; or `[N, H / N, 4H / N]` for N blocks of units; or `[P, 4H]` with a projection.
      b: `[4H]` bias; no constant is added for the forget gate.
      w_hr: `[H, P]` projection of the hidden state, or None if there is none.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> params = jaxrnn.LSTMParams(jnp.ones((3, 16)), jnp.ones((2, 16)), jnp.zeros(16), w_hr=jnp.ones((4, 2)))
      >>> jax.tree.map(jnp.shape, params)
      LSTMParams(w_ih=(3, 16), w_hh=(2, 16), b=(16,), w_hr=(4, 2))
    """

    w_ih: Array
    w_hh: Array
    b: Array
    w_hr: Array | None = None


def _step(gates: Sequence[Array], x_last: None, states: States) -> tuple[States, tuple[Array, ...]]:
    """Returns the states `(h, c)` after a step, and its activations; an LSTM has no separate last gate."""
    a_i, a_f, a_g, a_o = gates
    i, f, g, o = jax.nn.sigmoid(a_i), jax.nn.sigmoid(a_f), jnp.tanh(a_g), jax.nn.sigmoid(a_o)
    c = f * states[1] + i * g
    tanh_c = jnp.tanh(c)
    return (o * tanh_c, c), (i, f, g, o, tanh_c)


def _compute_residuals(activations: tuple[Array, ...], states: States) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Returns the derivatives of c (gates i, f, g) and h (gate o) by the gates before activation, and two factors.

    The factors are the derivatives of h by c, and of c by the c before the step. All arrays are `[..., H]`.
    """
    i, f, g, o, tanh_c = activations
    local_grads = g * i * (1 - i), states[1] * f * (1 - f), i * (1 - g * g), tanh_c * o * (1 - o)
    return local_grads, (o * (1 - tanh_c * tanh_c), f)


def _grad_step(
    dstates: States, local_grads: tuple[Array, ...], factors: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Returns the gradients of the gates, and that of the c before the step.

    `dstates` are the gradients of h and c; that of c includes what reaches it through h, by `factors[0]`.
    """
    (dh, dc), (d_i, d_f, d_g, d_o) = dstates, local_grads
    return (dc * d_i, dc * d_f, dc * d_g, dh * d_o), (dc * factors[1],)


LSTM = Cell(
    **vars(specs.LSTM), title="an LSTM", function="lstm", params=LSTMParams, bias="b", step=_step,
    compute_residuals=_compute_residuals, grad_step=_grad_step,
)  # fmt: skip

LSTM_LAYOUT = Layout(
    cell=LSTM,
    gates=("i", "f", "g", "o"),
    linen="an LSTMCell or OptimizedLSTMCell",
    biased_operand="h",
    nnx=("LSTMCell", "OptimizedLSTMCell"),
    keras=("i", "f", "g", "o"),
    haiku="LSTM",
)
