"""MGU (minimal gated unit, Zhou et al. 2016, arXiv:1603.09420, as in Flax). Gates are ordered f, n; n is separate.

f = s(a_f), n = tanh(x_n + f h_n), h' = (1 - f) n + f h.
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
    from jaxrnn.cells.base import States


class MGUParams(NamedTuple):
    """Weights of an MGU; gates ordered f, n.

    Attributes:
      w_ih: `[D, 2H]` input weights.
      w_hh: `[H, 2H]` recurrent weights, or `[N, H / N, 2H / N]` for N blocks of units.
      b_ih: `[2H]` bias of both gates.
      b_hn: `[H]` recurrent bias of n, inside the product with f.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> params = jaxrnn.MGUParams(jnp.ones((3, 8)), jnp.ones((4, 8)), b_ih=jnp.zeros(8), b_hn=jnp.zeros(4))
      >>> jax.tree.map(jnp.shape, params)
      MGUParams(w_ih=(3, 8), w_hh=(4, 8), b_ih=(8,), b_hn=(4,))
    """

    w_ih: Array
    w_hh: Array
    b_ih: Array
    b_hn: Array


def _step(gates: Sequence[Array], x_last: Array, states: States) -> tuple[States, tuple[Array, ...]]:
    a_f, h_n = gates
    f = jax.nn.sigmoid(a_f)
    n = jnp.tanh(x_last + f * h_n)
    return ((1 - f) * n + f * states[0],), (h_n, f, n)


def _compute_residuals(activations: tuple[Array, ...], states: States) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    h_n, f, n = activations
    f_n = (1 - f) * (1 - n * n)
    return ((states[0] - n + f_n * h_n) * f * (1 - f), f_n, f_n * f), (f,)


def _grad_step(
    dstates: States, local_grads: tuple[Array, ...], factors: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return tuple(dstates[0] * f for f in local_grads), (dstates[0] * factors[0],)


MGU = Cell(
    **vars(specs.MGU), title="an MGU", function="mgu", params=MGUParams, bias="b_ih", step=_step,
    compute_residuals=_compute_residuals, grad_step=_grad_step,
)  # fmt: skip

MGU_LAYOUT = Layout(
    cell=MGU,
    gates=("f", "n"),
    linen="an MGUCell",
    required_bias=(
        "hn",
        "the layer hn has no bias, so this is an MGUCell with reset_gate=False, which computes tanh(x_n + W_hn h), but "
        "jaxrnn.mgu computes tanh(x_n + f * (W_hn h + b_hn)). Weights cannot be converted: train a new MGUCell with "
        "reset_gate=True, or run this one in jaxrnn.linen.RNN",
    ),
    missing={
        "nnx": "Flax's NNX has no MGUCell. Convert to linen's with to_linen, or hold the arrays in nnx.Param and call "
        "jaxrnn.mgu",
        "equinox": "equinox.nn has no MGU. Make MGUParams a field of an equinox.Module, and call jaxrnn.mgu",
        "haiku": "Haiku has no MGU. Call jaxrnn.mgu inside hk.transform, with parameters from hk.get_parameter",
        "keras": "Keras has no MGU. Run the weights in JAX with jaxrnn.mgu, or train a GRU, which both have",
    },
)
