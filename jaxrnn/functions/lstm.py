"""`jaxrnn.lstm`."""

from __future__ import annotations

from typing import Literal, overload

import jax
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import recurrent
from jaxrnn.cells import LSTM, LSTMParams
from jaxrnn.checks import Implementation

__all__ = ["lstm"]


@overload
def lstm(
    params: LSTMParams,
    carry: tuple[ArrayLike, ArrayLike],
    xs: ArrayLike,
    *,
    resets: ArrayLike | None = None,
    reset_state: tuple[ArrayLike | None, ArrayLike | None] | None = None,
    reverse: bool = False,
    time_major: bool = True,
    return_cells: Literal[False] = False,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[tuple[Array, Array], Array]: ...


@overload
def lstm(
    params: LSTMParams,
    carry: tuple[ArrayLike, ArrayLike],
    xs: ArrayLike,
    *,
    resets: ArrayLike | None = None,
    reset_state: tuple[ArrayLike | None, ArrayLike | None] | None = None,
    reverse: bool = False,
    time_major: bool = True,
    return_cells: Literal[True],
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]: ...


@overload
def lstm(
    params: LSTMParams,
    carry: tuple[ArrayLike, ArrayLike],
    xs: ArrayLike,
    *,
    resets: ArrayLike | None = None,
    reset_state: tuple[ArrayLike | None, ArrayLike | None] | None = None,
    reverse: bool = False,
    time_major: bool = True,
    return_cells: bool,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[tuple[Array, Array], Array | tuple[Array, Array]]: ...


def lstm(
    params: LSTMParams,
    carry: tuple[ArrayLike, ArrayLike],
    xs: ArrayLike,
    *,
    resets: ArrayLike | None = None,
    reset_state: tuple[ArrayLike | None, ArrayLike | None] | None = None,
    reverse: bool = False,
    time_major: bool = True,
    return_cells: bool = False,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[tuple[Array, Array], Array | tuple[Array, Array]]:
    """Runs an LSTM over time, starting afresh wherever `resets` is nonzero.

    s is the logistic function, and gates are ordered i, f, g, o (no constant is added to the forget gate):

        c, h = reset_state if resets[t] else c, h
        i, f, o = s(W_i x + W_h h + b),  g = tanh(W_ig x + W_hg h + b_g)
        c' = f * c + i * g,  h' = o * tanh(c')

    With `params.w_hr` the hidden state is projected to P units, as with `proj_size` of `torch.nn.LSTM` (Sak et al.
    2014): `h' = W_hr (o * tanh(c'))`, and the width of h is P instead of H. The loop of the kernels multiplies by
    W_h W_hr. It takes 4 H^2 products per step instead of 5 H P, at a cost that is small compared with its latency.

    Args:
      params: `LSTMParams(w_ih [D, 4H], w_hh [H, 4H], b [4H])`; with a projection `w_hh [P, 4H]` and `w_hr [H, P]`; with
        N blocks of units, as in `gru`, `w_hh [N, H / N, 4H / N]`.
      carry: `(c, h)`, each `[*batch, H]`: the cell and hidden state before the first step, in Flax's order.
      xs: as in `gru`.
      resets: as in `gru`.
      reset_state: None (zeros) or `(c, h)`, each None or of a shape that `gru` accepts.
      reverse: as in `gru`.
      time_major: as in `gru`.
      return_cells: whether to return the cell state of every step too.
      precision: as in `gru`.
      remat: as in `gru`.
      implementation: as in `gru`.

    Returns:
      `((c, h), hs)`, or `((c, h), (hs, cs))` if `return_cells`, the last carry and the hidden (and cell) states of all
      steps, each in the dtype of its carry.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input, or a forward-mode or second derivative of
        the kernels is requested; the message says which limit was hit.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> params = jaxrnn.LSTMParams(jnp.ones((3, 16)), jnp.ones((4, 16)), jnp.zeros(16))
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2), bool).at[2, 1].set(True)
      >>> start = jnp.full(4, 0.5), None  # episodes start with c = 0.5 and h = 0
      >>> c, h = jnp.zeros((2, 4)), jnp.zeros((2, 4))
      >>> (c, h), hs = jaxrnn.lstm(params, (c, h), xs, resets=resets, reset_state=start)
      >>> (c, h), (hs, cs) = jaxrnn.lstm(params, (c, h), xs, return_cells=True)  # goes on from there
      >>> c.shape, h.shape, hs.shape, cs.shape
      ((2, 4), (2, 4), (5, 2, 4), (5, 2, 4))
    """
    last, sequences = recurrent.run(
        LSTM, params, carry, xs, resets=resets, reset_state=reset_state, reverse=reverse, time_major=time_major,
        return_states=return_cells, precision=precision, remat=remat, implementation=implementation,
    )  # fmt: skip
    return last, (sequences[0], sequences[1]) if len(sequences) > 1 else sequences[0]
