"""Checks the arguments of `gru`, `lstm` and their bidirectional forms, chooses the implementation and runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrnn import _bridge, canonical, cells, fused, reference, sharding
from jaxrnn.checks import (
    Implementation,
    check_flags,
    check_gru,
    check_implementation,
    check_lstm,
    check_same_types,
    split_directions,
)
from jaxrnn.reference import GRUParams, LSTMParams


def gru(
    params: GRUParams,
    carry: Array,
    xs: Array,
    *,
    resets: Array | None = None,
    reset_state: Array | None = None,
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
      params: `GRUParams(w_ih [D, 3H], w_hh [H, 3H], b_ih [3H], b_hn [H])`.
      carry: `[*batch, H]` the hidden state before the first step.
      xs: `[T, *batch, D]` inputs, time first; `[*batch, T, D]` if not `time_major`. Any number of batch axes.
      resets: `[T, *batch]` (`[*batch, T]`), any dtype; nonzero at the first step of an episode, that is, the *previous*
        step's done. That step sees `reset_state`, not the carry, and no gradient crosses it.
      reset_state: the state from which an episode starts: None (zeros), `[H]` (a learned state), `[*batch, H]`, or a
        value for every step, `[T, *batch, H]` (`[*batch, T, H]`). It is differentiable.
      reverse: whether to run from the last step to the first; outputs stay in the order of the inputs.
      time_major: whether time is the first axis of `xs`, `resets` and the outputs, or the last before features.
      precision: precision of every matmul, as in `jax.lax.dot_general`; None means `jax_default_matmul_precision`.
      remat: whether to recompute the gates in the backward pass, in matmuls over many steps at a time, instead of
        saving them.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`lax.scan`), or None, which picks the
        fastest that can run the input. If you name one that cannot run it, a `NotImplementedError` says why.

    On an explicit mesh `xs` may be sharded over its batch axes: every device runs its shard, and the other arguments
    are resharded to match `xs`. If JAX manages the mesh (`AxisType.Auto`), the same holds for the first batch axis.

    Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) and derivatives of gradients need `implementation="xla"`: the
    kernels support first-order reverse mode only, and raise for other derivatives even if None picked them.

    Returns:
      `(carry, ys)`, as from `lax.scan`: the last hidden state `[*batch, H]` and the hidden states of all steps
      `[T, *batch, H]` (`[*batch, T, H]`), in the dtype of `carry`. Between steps the hidden state is float32, or
      float64 if `carry`, `xs` or any of `params` is. Matrices are multiplied in the dtype that `xs`, `w_ih` and `w_hh`
      promote to.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input, or a forward-mode or second derivative of
        the kernels is requested; the message says which limit was hit.
    """
    reverse, time_major, remat = check_flags(reverse=reverse, time_major=time_major, remat=remat)
    check_gru(params, carry, xs, resets, reset_state, time_major)
    params, carry, xs, resets, reset_state = jax.tree.map(jnp.asarray, (params, carry, xs, resets, reset_state))
    if _use_triton(implementation, precision, time_major, carry, xs, params):
        (h,), (hs,) = canonical.run_kernels(
            cells.GRU, params, (carry,), xs, resets, (reset_state,), reverse, time_major, precision, remat, ("h",),
            may_scan=implementation is None,
        )  # fmt: skip
        return h, hs

    return _xla(
        reference.gru, remat, params, carry, xs, resets, reset_state, reverse=reverse, time_major=time_major,
        precision=precision,
    )  # fmt: skip


def lstm(
    params: LSTMParams,
    carry: tuple[Array, Array],
    xs: Array,
    *,
    resets: Array | None = None,
    reset_state: tuple[Array, Array] | None = None,
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
      params: `LSTMParams(w_ih [D, 4H], w_hh [H, 4H], b [4H])`; with a projection `w_hh [P, 4H]` and `w_hr [H, P]`.
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
      `((c, h), hs)`, or `((c, h), (hs, cs))` if `return_cells`: the last carry and the hidden (and cell) states of all
      steps, each in the dtype of its carry.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input, or a forward-mode or second derivative of
        the kernels is requested; the message says which limit was hit.
    """
    reverse, time_major, remat, return_cells = check_flags(
        reverse=reverse, time_major=time_major, remat=remat, return_cells=return_cells
    )
    check_lstm(params, carry, xs, resets, reset_state, time_major)
    params, (c0, h0), xs, resets, reset_state = jax.tree.map(jnp.asarray, (params, carry, xs, resets, reset_state))
    if _use_triton(implementation, precision, time_major, c0, xs, params, h0):
        reset_c, reset_h = (None, None) if reset_state is None else reset_state
        (h, c), sequences = canonical.run_kernels(
            cells.LSTM, params, (h0, c0), xs, resets, (reset_h, reset_c), reverse, time_major, precision, remat,
            ("h", "c") if return_cells else ("h",), may_scan=implementation is None,
        )  # fmt: skip
        return (c, h), (sequences[0], sequences[1]) if return_cells else sequences[0]

    return _xla(
        reference.lstm, remat, params, (c0, h0), xs, resets, reset_state, reverse=reverse, time_major=time_major,
        precision=precision, return_cells=return_cells,
    )  # fmt: skip


def bidirectional_gru(
    params: tuple[GRUParams, GRUParams],
    carry: tuple[Array, Array],
    xs: Array,
    *,
    resets: tuple[Array, Array] | None = None,
    reset_state: tuple[Array, Array] | None = None,
    time_major: bool = True,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Runs one GRU forward in time and another in reverse, both in a single kernel launch.

    Each direction has launches of its own if it fills a GPU by itself, from 2^18 elements of hidden state on (2048
    sequences of 128 units), or if `remat` recomputes the gates for a part of the steps at a time.

    Every pair holds the forward direction first. The call is equivalent to:

        gru(params[0], carry[0], xs, resets=resets[0], reset_state=reset_state[0], ...),
        gru(params[1], carry[1], xs, resets=resets[1], reset_state=reset_state[1], reverse=True, ...)

    Args:
      params: a pair.
      carry: a pair.
      xs: as in `gru`, shared by both directions.
      resets: None or a pair. In reverse an episode starts at the last of its steps, so the two arrays differ.
      reset_state: None or a pair.
      time_major: as in `gru`.
      precision: as in `gru`.
      remat: as in `gru`.
      implementation: as in `gru`.

    Returns:
      The results of the two calls, a pair of `(carry, ys)`.

    Raises:
      ValueError: as in `gru`, or the two elements of a pair differ in shape or dtype.
      NotImplementedError: as in `gru`.
    """
    time_major, remat = check_flags(time_major=time_major, remat=remat)
    directions = split_directions(params, carry, resets, reset_state)
    for params_, carry_, resets_, state in directions:
        check_gru(params_, carry_, xs, resets_, state, time_major)
    check_same_types(directions)
    directions, xs = jax.tree.map(jnp.asarray, (directions, xs))
    params, carry, resets, reset_state = zip(*directions, strict=True)
    if _use_triton(implementation, precision, time_major, carry[0], xs, params[0]):
        both = canonical.run_kernels(
            cells.GRU, params, tuple((h,) for h in carry), xs, resets, tuple((h,) for h in reset_state),
            "bidirectional", time_major, precision, remat, ("h",), may_scan=implementation is None,
        )  # fmt: skip
        forward, backward = ((h, hs) for (h,), (hs,) in both)
        return forward, backward

    return _xla_bidirectional(reference.gru, remat, directions, xs, time_major=time_major, precision=precision)


def bidirectional_lstm(
    params: tuple[LSTMParams, LSTMParams],
    carry: tuple[tuple[Array, Array], tuple[Array, Array]],
    xs: Array,
    *,
    resets: tuple[Array, Array] | None = None,
    reset_state: tuple[tuple[Array, Array], tuple[Array, Array]] | None = None,
    time_major: bool = True,
    return_cells: bool = False,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[Any, Any]:
    """Runs one LSTM forward in time and another in reverse, as `bidirectional_gru` does for GRUs.

    Every argument that belongs to one direction is passed as a pair, forward direction first.

    Args:
      params: a pair.
      carry: a pair of `(c, h)`.
      xs: as in `lstm`, shared by both directions.
      resets: None or a pair.
      reset_state: None or a pair of `(c, h)`.
      time_major: as in `gru`.
      return_cells: as in `lstm`.
      precision: as in `gru`.
      remat: as in `bidirectional_gru`.
      implementation: as in `gru`.

    Returns:
      The results of `lstm` for both directions, a pair.

    Raises:
      ValueError: as in `lstm`, or the two elements of a pair differ in shape or dtype.
      NotImplementedError: as in `lstm`.
    """
    time_major, remat, return_cells = check_flags(time_major=time_major, remat=remat, return_cells=return_cells)
    directions = split_directions(params, carry, resets, reset_state)
    for params_, carry_, resets_, state in directions:
        check_lstm(params_, carry_, xs, resets_, state, time_major)
    check_same_types(directions)
    directions, xs = jax.tree.map(jnp.asarray, (directions, xs))
    params, carry, resets, reset_state = zip(*directions, strict=True)
    if _use_triton(implementation, precision, time_major, carry[0][0], xs, params[0], carry[0][1]):
        both = canonical.run_kernels(
            cells.LSTM, params, tuple((h, c) for c, h in carry), xs, resets,
            tuple((None, None) if state is None else (state[1], state[0]) for state in reset_state), "bidirectional",
            time_major, precision, remat, ("h", "c") if return_cells else ("h",), may_scan=implementation is None,
        )  # fmt: skip
        forward, backward = (((c, h), each if return_cells else each[0]) for (h, c), each in both)
        return forward, backward

    return _xla_bidirectional(
        reference.lstm, remat, directions, xs, time_major=time_major, precision=precision, return_cells=return_cells
    )


@functools.partial(
    jax.jit, static_argnums=(0, 1), static_argnames=("reverse", "time_major", "precision", "return_cells")
)
def _xla(
    function: Callable[..., Any], remat: bool, params: Any, carry: Any, xs: Array, resets: Array | None,
    reset_state: Any, **options: Any,
) -> Any:  # fmt: skip
    """Runs the reference implementation under `jax.jit`, so that eager calls reuse the compiled program."""
    params, carry, xs, resets, reset_state = canonical.reshard_arguments(
        params, carry, xs, resets, reset_state, options["time_major"]
    )
    carry = sharding.unify_varying_axes(carry, (params, xs, resets, reset_state))  # a scan's carry keeps its type

    def run(params: Any, carry: Any, xs: Array, reset_state: Any) -> Any:
        return function(params, carry, xs, resets=resets, reset_state=reset_state, **options)

    return (jax.checkpoint(run) if remat else run)(params, carry, xs, reset_state)


def _xla_bidirectional(
    function: Callable[..., Any], remat: bool, directions: tuple[Any, Any], xs: Array, **options: Any
) -> tuple[Any, Any]:
    """Runs `_xla` forward and in reverse, on `directions` from `checks.split_directions`; returns a pair."""
    forward, backward = (
        _xla(function, remat, params, carry, xs, resets, reset_state, reverse=reverse, **options)
        for reverse, (params, carry, resets, reset_state) in zip((False, True), directions, strict=True)
    )
    return forward, backward


def _use_triton(
    implementation: Any, precision: Any, time_major: bool, carry: Array, xs: Array, params: Any, *others: Array
) -> bool:
    """Returns whether to run the Triton kernels; if there is nothing to compute, `lax.scan` gives the empty results.

    Raises:
      ValueError: no implementation has that name.
      NotImplementedError: "triton" was requested and cannot run; the message says why.
    """
    check_implementation(implementation)
    if implementation == "xla" or (
        implementation is None and not _bridge.is_preferred(xs.shape[0 if time_major else -2])
    ):
        return False
    reason = _bridge.unsupported([x.dtype for x in jax.tree.leaves((carry, xs, params, others))], carry.shape[-1])
    if reason is None and fused.kernel_precision(precision, carry.shape[-1]) is None:
        precision = jax.config.jax_default_matmul_precision if precision is None else precision  # type: ignore[attr-defined]
        reason = f'has no kernel for precision {precision!r}: pass a jax.lax.Precision, or implementation="xla"'
    if reason is not None and implementation == "triton":
        raise NotImplementedError(f"the Triton implementation {reason}")
    return reason is None and 0 not in (*xs.shape[:-1], carry.shape[-1])
