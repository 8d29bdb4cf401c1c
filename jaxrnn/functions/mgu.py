"""`jaxrnn.mgu`."""

from __future__ import annotations

import jax
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import recurrent
from jaxrnn.cells import MGU, MGUParams
from jaxrnn.checks import Implementation

__all__ = ["mgu"]


def mgu(
    params: MGUParams,
    carry: ArrayLike,
    xs: ArrayLike,
    *,
    resets: ArrayLike | None = None,
    reset_state: ArrayLike | None = None,
    reverse: bool = False,
    time_major: bool = True,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """Runs a minimal gated unit (MGU, Zhou et al. 2016) over time, starting afresh wherever `resets` is nonzero.

    s is the logistic function, and gates are ordered f, n. The forget gate f is also the reset gate, as in Flax:

        h = reset_state if resets[t] else h
        f = s(W_if x + W_hf h + b_f)
        n = tanh(W_in x + b_in + f * (W_hn h + b_hn))
        h' = (1 - f) * n + f * h

    Args:
      params: `MGUParams(w_ih [D, 2H], w_hh [H, 2H], b_ih [2H], b_hn [H])`; with N blocks of units, as in
        `gru`, `w_hh [N, H / N, 2H / N]`.
      carry: as in `gru`.
      xs: as in `gru`.
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
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input, or a forward-mode or second derivative of
        the kernels is requested; the message says which limit was hit.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> params = jaxrnn.MGUParams(jnp.ones((3, 8)), jnp.ones((4, 8)), jnp.zeros(8), jnp.zeros(4))
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2), bool).at[2, 1].set(True)
      >>> carry, ys = jaxrnn.mgu(params, jnp.zeros((2, 4)), xs, resets=resets)
      >>> carry.shape, ys.shape
      ((2, 4), (5, 2, 4))
    """
    last, (ys,) = recurrent.run(
        MGU, params, carry, xs, resets=resets, reset_state=reset_state, reverse=reverse, time_major=time_major,
        precision=precision, remat=remat, implementation=implementation,
    )  # fmt: skip
    return last, ys
