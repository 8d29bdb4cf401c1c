"""GRU (Cho et al. 2014, in the variant of cuDNN, PyTorch and Flax). Gates are ordered r, z, n; n is separate.

r = s(a_r), z = s(a_z), n = tanh(x_n + r h_n), h' = (1 - z) n + z h.
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
    Params: TypeAlias = "GRUParams"
    TorchModule: TypeAlias = torch.nn.GRU | torch.nn.GRUCell | torch_bridge.nn.GRU
    NNXCell: TypeAlias = nnx.GRUCell
    EquinoxCell: TypeAlias = equinox.nn.GRUCell


class GRUParams(NamedTuple):
    """Weights of a GRU; gates ordered r, z, n.

    Attributes:
      w_ih: `[D, 3H]` input weights.
      w_hh: `[H, 3H]` recurrent weights, or `[N, H / N, 3H / N]` for N blocks of units.
      b_ih: `[3H]` bias of the three gates; it includes the recurrent biases of r and z.
      b_hn: `[H]` recurrent bias of n, inside the product with r.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> params = jaxrnn.GRUParams(jnp.ones((3, 12)), jnp.ones((4, 12)), b_ih=jnp.zeros(12), b_hn=jnp.zeros(4))
      >>> jax.tree.map(jnp.shape, params)
      GRUParams(w_ih=(3, 12), w_hh=(4, 12), b_ih=(12,), b_hn=(4,))
    """

    w_ih: Array
    w_hh: Array
    b_ih: Array
    b_hn: Array


def _step(gates: Sequence[Array], x_last: Array, states: States) -> tuple[States, tuple[Array, ...]]:
    a_r, a_z, h_n = gates
    r, z = jax.nn.sigmoid(a_r), jax.nn.sigmoid(a_z)
    n = jnp.tanh(x_last + r * h_n)
    return ((1 - z) * n + z * states[0],), (h_n, r, z, n)


def _compute_residuals(activations: tuple[Array, ...], states: States) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    h_n, r, z, n = activations
    f_n = (1 - z) * (1 - n * n)
    return (f_n * h_n * r * (1 - r), (states[0] - n) * z * (1 - z), f_n, f_n * r), (z,)


def _grad_step(
    dstates: States, local_grads: tuple[Array, ...], factors: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return tuple(dstates[0] * f for f in local_grads), (dstates[0] * factors[0],)


GRU = Cell(
    **vars(specs.GRU), title="a GRU", function="gru", params=GRUParams, bias="b_ih", step=_step,
    compute_residuals=_compute_residuals, grad_step=_grad_step,
)  # fmt: skip

GRU_LAYOUT = Layout(
    cell=GRU,
    gates=("r", "z", "n"),
    linen="a GRUCell",
    nnx=("GRUCell",),
    keras=("z", "r", "n"),
    missing={
        "haiku": "hk.GRU applies the reset gate before the matrix product and cannot compute this GRU. Call jaxrnn.gru "
        "inside hk.transform, with parameters from hk.get_parameter"
    },
)
