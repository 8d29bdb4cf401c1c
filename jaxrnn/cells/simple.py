"""The simple cell (Elman 1990, as in Flax and `torch.nn.RNN`): h' = tanh(a), or h' = relu(a). It has one gate, a."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrnn.cells.base import Cell, Layout
from torch_bridge import cells as specs

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch
    from flax import nnx

    import torch_bridge.nn
    from jaxrnn.cells.base import States

    # The types that the overloads of `jaxrnn.convert` name, by framework.
    Params: TypeAlias = "SimpleParams"
    TorchModule: TypeAlias = torch.nn.RNN | torch.nn.RNNCell | torch_bridge.nn.RNN
    NNXCell: TypeAlias = nnx.SimpleCell


class SimpleParams(NamedTuple):
    """Weights of a simple cell.

    Attributes:
      w_ih: `[D, H]` input weights.
      w_hh: `[H, H]` recurrent weights, or `[N, H / N, H / N]` for N blocks of units.
      b: `[H]` bias.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> params = jaxrnn.SimpleParams(w_ih=jnp.ones((3, 4)), w_hh=jnp.eye(4), b=jnp.zeros(4))
      >>> jax.tree.map(jnp.shape, params)
      SimpleParams(w_ih=(3, 4), w_hh=(4, 4), b=(4,))
    """

    w_ih: Array
    w_hh: Array
    b: Array


def _step_tanh(gates: Sequence[Array], x_last: Any, states: States) -> tuple[States, tuple[Array, ...]]:
    h = jnp.tanh(gates[0])
    return (h,), (h,)


def _step_relu(gates: Sequence[Array], x_last: Any, states: States) -> tuple[States, tuple[Array, ...]]:
    h = jax.nn.relu(gates[0])
    return (h,), (h,)


def _residuals_tanh(activations: tuple[Array, ...], states: States) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    (h,) = activations
    return (1 - h * h,), ()


def _residuals_relu(activations: tuple[Array, ...], states: States) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    (h,) = activations
    return ((h > 0).astype(h.dtype),), ()


def _grad_step(
    dstates: States, local_grads: tuple[Array, ...], factors: tuple[Array, ...]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return (dstates[0] * local_grads[0],), ()


def _activations(states: States) -> tuple[Array, ...]:
    return states[:1]


SIMPLE_TANH = Cell(
    **vars(specs.SIMPLE_TANH), title="a simple cell", function="simple_rnn", params=SimpleParams, bias="b",
    step=_step_tanh, compute_residuals=_residuals_tanh, grad_step=_grad_step, activations_from_states=_activations,
)  # fmt: skip
SIMPLE_RELU = Cell(
    **vars(specs.SIMPLE_RELU), title="a simple cell", function="simple_rnn", params=SimpleParams, bias="b",
    step=_step_relu, compute_residuals=_residuals_relu, grad_step=_grad_step, activations_from_states=_activations,
)  # fmt: skip

SIMPLE_LAYOUT = Layout(
    cell=SIMPLE_TANH,
    gates=("",),
    linen="a SimpleCell",
    activations=("tanh", "relu"),
    nnx=("SimpleCell",),
    keras=("",),
    haiku="VanillaRNN",
    missing={
        "equinox": "equinox.nn has no simple cell. Make SimpleParams a field of an equinox.Module, and call "
        "jaxrnn.simple_rnn"
    },
)
