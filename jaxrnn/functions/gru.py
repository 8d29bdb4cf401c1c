"""`jaxrnn.gru`."""

from __future__ import annotations

import jax
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import recurrent
from jaxrnn.cells import GRU, GRUParams
from jaxrnn.checks import Implementation

__all__ = ["gru"]


def gru(
    params: GRUParams,
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
    """Runs a GRU over time, starting afresh wherever `resets` is nonzero.

    s is the logistic function, and gates are ordered r, z, n (the variant of cuDNN, PyTorch and Flax):

        h = reset_state if resets[t] else h
        r = s(W_ir x + W_hr h + b_r),  z = s(W_iz x + W_hz h + b_z)
        n = tanh(W_in x + b_in + r * (W_hn h + b_hn))
        h' = (1 - z) * n + z * h

    Args:
      params: `GRUParams(w_ih [D, 3H], w_hh [H, 3H], b_ih [3H], b_hn [H])`. With `w_hh [N, H / N, 3H / N]`, recurrent
        weights are block-diagonal: there are N blocks (heads) of consecutive units, each of which multiplies the hidden
        state of its own block alone. The blocks run as N models in one launch.
      carry: `[*batch, H]` the hidden state before the first step.
      xs: `[T, *batch, D]` inputs, time first; `[*batch, T, D]` if not `time_major`. Any number of batch axes.
      resets: `[T, *batch]` (`[*batch, T]`), any real dtype; nonzero at the first step of an episode, that is, the
        *previous* step's done. That step sees `reset_state`, not the carry, and no gradient crosses it.
      reset_state: the state from which an episode starts: None (zeros), `[H]` (a learned state), `[*batch, H]`, or a
        value for every step, `[T, *batch, H]` (`[*batch, T, H]`). It is differentiable.
      reverse: whether to run from the last step to the first; outputs stay in the order of the inputs.
      time_major: whether time is the first axis of `xs`, `resets` and the outputs, or the last before features.
      precision: precision of every matmul, as in `jax.lax.dot_general`; None means `jax_default_matmul_precision`.
      remat: whether the backward pass recomputes what it needs of the gates, in chunks of time, instead of the forward
        pass saving it.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. If you name one that cannot run it, a `NotImplementedError` says why.

    T, D, H and batch axes may be 0: with T = 0 the carry is returned. Values are not checked: a NaN in the carry stays
    until a reset. Without `jax_enable_x64`, NumPy arrays of float64 are rounded to float32, as everywhere in JAX.

    On an explicit mesh `xs` may be sharded over its batch axes: every device runs its shard, and the other arguments
    are resharded to match `xs`. If JAX manages the mesh (`AxisType.Auto`), the same holds for the first batch axis.

    Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) and derivatives of gradients need `implementation="xla"`: the
    kernels support first-order reverse mode only, and raise for other derivatives even if None picked them.

    Returns:
      `(carry, ys)`, as from `lax.scan`, the last hidden state `[*batch, H]` and the hidden states of all steps
      `[T, *batch, H]` (`[*batch, T, H]`), in the dtype of `carry`. Between steps the hidden state is float32, or
      float64 if `carry`, `xs` or any of `params` is. Matrices are multiplied in the dtype that `xs`, `w_ih` and `w_hh`
      promote to.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input, or a forward-mode or second derivative of
        the kernels is requested; the message says which limit was hit.

    Examples:
      Two sequences of five steps, of which the second starts a new episode at step 2:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> w_ih, w_hh, xs = map(jax.random.normal, keys, [(3, 12), (4, 12), (5, 2, 3)])
      >>> params = jaxrnn.GRUParams(w_ih, w_hh, b_ih=jnp.zeros(12), b_hn=jnp.zeros(4))
      >>> resets = jnp.zeros((5, 2), bool).at[2, 1].set(True)
      >>> carry, ys = jaxrnn.gru(params, jnp.zeros((2, 4)), xs, resets=resets)
      >>> carry.shape, ys.shape
      ((2, 4), (5, 2, 4))
      >>> _, episode = jaxrnn.gru(params, jnp.zeros((2, 4)), xs[2:])
      >>> bool(jnp.allclose(ys[2:, 1], episode[:, 1], atol=1e-3))
      True
    """
    last, (ys,) = recurrent.run(
        GRU, params, carry, xs, resets=resets, reset_state=reset_state, reverse=reverse, time_major=time_major,
        precision=precision, remat=remat, implementation=implementation,
    )  # fmt: skip
    return last, ys
