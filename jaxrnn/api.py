"""The public functions that run a recurrence, one for each cell. `jaxrnn.norms` has those of norms."""

from __future__ import annotations

from typing import Literal, overload

import jax
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import recurrent
from jaxrnn.cells import (
    GRU,
    LSTM,
    MGU,
    SIMPLE_RELU,
    SIMPLE_TANH,
    GRUParams,
    LSTMParams,
    MGUParams,
    NormGRUParams,
    SimpleParams,
    norm_gru_cell,
)
from jaxrnn.checks import Caller, Implementation, check_norm_and_constants, shown, suggest
from torch_bridge.docstrings import inherit_descriptions

_SIMPLE = {"tanh": SIMPLE_TANH, "relu": SIMPLE_RELU}


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

    Derivatives of every order and mode exist. Kernels compute the results and first-order gradients, and of cells
    without a norm, with a float32 carry and without `remat`, also the tangents of forward mode and the derivatives of
    gradients, such as in `jax.jvp` and `jax.hessian`. XLA computes all others by `lax.scan`.

    Returns:
      `(carry, ys)`, as from `lax.scan`, the last hidden state `[*batch, H]` and the hidden states of all steps
      `[T, *batch, H]` (`[*batch, T, H]`), in the dtype of `carry`. Between steps the hidden state is float32, or
      float64 if `carry`, `xs` or any of `params` is. Matrices are multiplied in the dtype that `xs`, `w_ih` and `w_hh`
      promote to.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input; the message says which limit was hit.

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


@inherit_descriptions(gru)
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
      reset_state: None (zeros) or `(c, h)`, each None or of a shape that `gru` accepts.
      return_cells: whether to return the cell state of every step too.

    Returns:
      `((c, h), hs)`, or `((c, h), (hs, cs))` if `return_cells`, the last carry and the hidden (and cell) states of all
      steps, each in the dtype of its carry.

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


@inherit_descriptions(gru)
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


@inherit_descriptions(gru)
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
      activation: "tanh" or "relu".

    Raises:
      ValueError: shapes or dtypes disagree, or `activation` is another one.

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
    if not isinstance(activation, str) or activation not in _SIMPLE:
        raise ValueError(
            f'simple_rnn: activation must be "tanh" or "relu", got {shown(activation)}{suggest(activation, [*_SIMPLE])}'
        )
    last, (ys,) = recurrent.run(
        _SIMPLE[activation], params, carry, xs, resets=resets, reset_state=reset_state, reverse=reverse,
        time_major=time_major, precision=precision, remat=remat, implementation=implementation,
    )  # fmt: skip
    return last, ys


@inherit_descriptions(gru)
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
      norm: "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance.
      update_bias: what is added to the update gate before its activation.

    Returns:
      `(carry, ys)`, as `gru` does.

    Raises:
      ValueError: shapes or dtypes disagree, there is no such norm, or `norm="rms"` is given shifts.

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
