"""`jaxrnn.norm_gru`."""

from __future__ import annotations

from typing import Literal

import jax
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import recurrent
from jaxrnn.cells import NormGRUParams, norm_gru_cell
from jaxrnn.checks import Caller, Implementation, check_norm_and_constants


def norm_gru(
    params: NormGRUParams,
    carry: ArrayLike,
    xs: ArrayLike,
    *,
    norm: Literal["rms", "layer"] = "rms",
    epsilon: float = 1e-4,
    update_bias: float = -1.0,
    resets: ArrayLike | None = None,
    reset_state: ArrayLike | None = None,
    reverse: bool = False,
    time_major: bool = True,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """Runs a GRU whose gates see a norm of inputs and state, starting afresh wherever `resets` is nonzero.

    This is the GRU of DreamerV3 (Hafner et al. 2023). s is the logistic function, and gates are ordered r, n, u:

        h = reset_state if resets[t] else h
        y = norm(concatenate([x, h])) = (y_i, y_h)
        a = W_i y_i + W_h y_h + b
        r = s(a_r),  n = tanh(r * a_n),  u = s(a_u + update_bias)
        h' = u * n + (1 - u) * h

    The norm is over all D + H elements. "rms" divides by the root of mean(v^2) + epsilon and multiplies by the scales.
    "layer" first subtracts the mean, and adds the shifts.

    Args:
      params: `NormGRUParams(w_ih [D, 3H], w_hh [H, 3H], b [3H], scale_i [D], scale_h [H], shift_i [D], shift_h [H])`.
        Scales and shifts may be None; "rms" has no shifts.
      carry: as in `gru`.
      xs: as in `gru`.
      norm: "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance.
      update_bias: what is added to the update gate before its activation.
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
      ValueError: shapes or dtypes disagree, there is no such norm, or `norm="rms"` is given shifts.
      NotImplementedError: the named implementation cannot run this input, or a forward-mode or second derivative of
        the kernels is requested; the message says which limit was hit.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> params = jaxrnn.NormGRUParams(jnp.ones((3, 12)), jnp.ones((4, 12)), jnp.zeros(12), scale_h=jnp.ones(4))
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2), bool).at[2, 1].set(True)
      >>> carry, ys = jaxrnn.norm_gru(params, jnp.zeros((2, 4)), xs, norm="layer", resets=resets)
      >>> carry.shape, ys.shape
      ((2, 4), (5, 2, 4))
    """
    check_norm_and_constants(Caller("norm_gru"), norm, epsilon, update_bias)
    if norm == "rms" and isinstance(params, NormGRUParams) and (params.shift_i, params.shift_h) != (None, None):
        raise ValueError(
            'norm_gru: params.shift_i and params.shift_h must be None with norm="rms", which has no shifts; pass '
            'norm="layer" for shifts'
        )
    cell = norm_gru_cell(norm, epsilon, update_bias)
    last, (ys,) = recurrent.run(
        cell, params, carry, xs, resets=resets, reset_state=reset_state, reverse=reverse, time_major=time_major,
        precision=precision, remat=remat, implementation=implementation,
    )  # fmt: skip
    return last, ys
