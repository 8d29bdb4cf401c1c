"""`jaxrnn.simple_rnn`."""

from __future__ import annotations

from typing import Literal

import jax
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import recurrent
from jaxrnn.cells import SIMPLE_RELU, SIMPLE_TANH, SimpleParams
from jaxrnn.checks import Implementation, shown, suggest

__all__ = ["simple_rnn"]

_CELLS = {"tanh": SIMPLE_TANH, "relu": SIMPLE_RELU}


def simple_rnn(
    params: SimpleParams,
    carry: ArrayLike,
    xs: ArrayLike,
    *,
    activation: Literal["tanh", "relu"] = "tanh",
    resets: ArrayLike | None = None,
    reset_state: ArrayLike | None = None,
    reverse: bool = False,
    time_major: bool = True,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """Runs a simple RNN (Elman 1990) over time, starting afresh wherever `resets` is nonzero.

    It is the recurrence of Flax's `SimpleCell` and of `torch.nn.RNN`:

        h = reset_state if resets[t] else h
        h' = activation(W_i x + W_h h + b)

    Args:
      params: `SimpleParams(w_ih [D, H], w_hh [H, H], b [H])`; with N blocks of units, as in `gru`,
        `w_hh [N, H / N, H / N]`.
      carry: as in `gru`.
      xs: as in `gru`.
      activation: "tanh" or "relu".
      resets: as in `gru`.
      reset_state: as in `gru`.
      reverse: as in `gru`.
      time_major: as in `gru`.
      precision: as in `gru`.
      remat: as in `gru`.
      implementation: as in `gru`.

    Returns:
      `(carry, ys)`, as `gru` does.

    Raises:
      ValueError: shapes or dtypes disagree, or `activation` is another one.
      NotImplementedError: the named implementation cannot run this input, or a forward-mode or second derivative of
        the kernels is requested; the message says which limit was hit.

    Examples:
      With these weights the hidden state is the sum of the inputs since the last reset:

      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> params = jaxrnn.SimpleParams(w_ih=jnp.ones((3, 4)), w_hh=jnp.eye(4), b=jnp.zeros(4))
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2), bool).at[2, 1].set(True)
      >>> carry, ys = jaxrnn.simple_rnn(params, jnp.zeros((2, 4)), xs, resets=resets, activation="relu")
      >>> ys[:, 0, 0].tolist(), ys[:, 1, 0].tolist()
      ([3.0, 6.0, 9.0, 12.0, 15.0], [3.0, 6.0, 3.0, 6.0, 9.0])
    """
    if not isinstance(activation, str) or activation not in _CELLS:
        raise ValueError(
            f'simple_rnn: activation must be "tanh" or "relu", got {shown(activation)}{suggest(activation, [*_CELLS])}'
        )
    last, (ys,) = recurrent.run(
        _CELLS[activation], params, carry, xs, resets=resets, reset_state=reset_state, reverse=reverse,
        time_major=time_major, precision=precision, remat=remat, implementation=implementation,
    )  # fmt: skip
    return last, ys
