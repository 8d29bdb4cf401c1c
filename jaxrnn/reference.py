"""GRU and LSTM with `jax.lax.scan`: they define the semantics of every implementation and are the one on CPU.

The tests compare the other implementations with them. Gates are accumulated and the carry is kept between steps in
float32, or float64 if an operand is float64; results have the dtype of the carry that was passed. Arguments are assumed
valid: `jaxrnn.gru` and `jaxrnn.lstm` check them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

Precision = jax.lax.PrecisionLike


class GRUParams(NamedTuple):
    """Weights of a GRU; gates ordered r, z, n.

    Attributes:
      w_ih: `[D, 3H]` input weights.
      w_hh: `[H, 3H]` recurrent weights.
      b_ih: `[3H]` bias of the three gates; it includes the recurrent biases of r and z.
      b_hn: `[H]` recurrent bias of n, inside the product with r.
    """

    w_ih: Array
    w_hh: Array
    b_ih: Array
    b_hn: Array


class LSTMParams(NamedTuple):
    """Weights of an LSTM; gates ordered i, f, g, o.

    Attributes:
      w_ih: `[D, 4H]` input weights.
      w_hh: `[H, 4H]` recurrent weights, `[P, 4H]` with a projection.
      b: `[4H]` bias; no constant is added for the forget gate.
      w_hr: `[H, P]` projection of the hidden state, or None if there is none.
    """

    w_ih: Array
    w_hh: Array
    b: Array
    w_hr: Array | None = None


def accumulation_dtype(*dtypes: DTypeLike) -> jnp.dtype:
    """Returns the dtype in which gates and carry are computed: float64 if any operand is float64, else float32."""
    wide = jnp.float64 in map(jnp.result_type, dtypes)  # one by one: `jax_numpy_dtype_promotion` may forbid promotion
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def matmul(x: Array, w: Array, precision: Precision, dtype: DTypeLike) -> Array:
    """Returns `x @ w`: casts both operands to their common dtype, and accumulates and returns in `dtype`."""
    operand_dtype = jnp.result_type(x, w)
    return jnp.matmul(
        x.astype(operand_dtype), w.astype(operand_dtype), precision=precision, preferred_element_type=dtype
    )


def broadcast_to_rank(b: Array, x: Array) -> Array:
    """Returns `b [N]` in the dtype and rank of `x [*axes, N]`: `jax_numpy_rank_promotion` may require equal ranks."""
    return jax.lax.expand_dims(b.astype(x.dtype), range(x.ndim - 1))


def gru_cell(a_r: Array, a_z: Array, x_n: Array, h_n: Array, h: Array) -> Array:
    """Computes one GRU step from its preactivations (Cho et al. 2014, in the variant of cuDNN, PyTorch and Flax).

    r = s(a_r), z = s(a_z), n = tanh(x_n + r h_n), h' = (1 - z) n + z h.
    """
    r, z = jax.nn.sigmoid(a_r), jax.nn.sigmoid(a_z)
    n = jnp.tanh(x_n + r * h_n)
    return (1 - z) * n + z * h


def lstm_cell(i: Array, f: Array, g: Array, o: Array, c: Array) -> tuple[Array, Array]:
    """Computes one LSTM step from its preactivations (Hochreiter & Schmidhuber 1997, with forget gates).

    c' = s(f) c + s(i) tanh(g), h' = s(o) tanh(c').
    """
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


class Loop(NamedTuple):
    """A time loop in the form that is fastest on one backend.

    Attributes:
      inputs: arrays with the axes of `xs`, over which the loop runs.
      gates: (inputs of a step, hidden state) -> gates before their activations. Each is the sum of input projection and
        hidden product, except a GRU's last gate: its two terms are returned separately, and only the first has a bias.
      cell: the pointwise part of a step.
    """

    inputs: Array | list[Array]
    gates: Callable[[Any, Array], list[Array]]
    cell: Callable[..., Any]


# A call of one step computes one product with `[x, h]` if the concatenated weights have at most this many bytes. Zero
# padding makes those of a GRU a third larger. Inside a scan on an H200 with D = H = 128, a call takes 8.9 us instead of
# 10.9 us (64 sequences), 14.7 us instead of 16.6 us (1024).
_JOINT_BYTES = 2**21


def make_loop(
    cell: Callable[..., Any],
    gates: int,
    xs: Array,
    steps: int,
    weights: tuple[Array, Array, Array],
    precision: Precision,
    dtype: DTypeLike,
    *,
    separate: int = 0,
) -> Loop:
    """Returns the loop over `cell` that is fastest on the default backend; results are the same up to rounding.

    `weights` are w_ih, b_ih and w_hh. For the last `separate` gates, the loop returns the input projection and the
    hidden product instead of their sum.
    """
    w_ih, b_ih, w_hh = weights
    operand_dtype = jnp.result_type(xs, w_ih, w_hh)

    def project(x: Array, w: Array, b: Array) -> Array:
        product = matmul(x, w, precision, dtype)
        return product + broadcast_to_rank(b, product)

    def recur(h: Array, w: Array) -> Array:
        return matmul(h.astype(operand_dtype), w, precision, dtype)

    def split(x: Array) -> list[Array]:
        return jnp.split(x, gates, axis=-1)

    def add(projected: list[Array], h: Array) -> list[Array]:
        recurrent = split(recur(h, w_hh))
        sums = [x + y for x, y in zip(projected, recurrent, strict=True)]
        return sums[: gates - separate] + projected[gates - separate :] + recurrent[gates - separate :]

    if jax.default_backend() != "cpu":
        zeros = separate * b_ih.shape[-1] // gates
        size = (w_ih.shape[0] + w_hh.shape[0]) * (w_hh.shape[1] + zeros) * jnp.dtype(operand_dtype).itemsize
        alone = isinstance(steps, int) and steps == 1  # symbolic dimensions of `jax.export` are not ints
        alike = jnp.result_type(xs, w_ih) == operand_dtype  # else the input projection would round differently
        if alone and isinstance(size, int) and size <= _JOINT_BYTES and alike:
            shared = w_hh.shape[1] - zeros
            lower = jnp.concatenate((w_hh[:, :shared], jnp.zeros_like(w_hh[:, :zeros]), w_hh[:, shared:]), axis=-1)
            upper = jnp.pad(w_ih, ((0, 0), (0, zeros)))
            w = jnp.concatenate((upper.astype(operand_dtype), lower.astype(operand_dtype)))
            bias = jnp.pad(b_ih, (0, zeros))

            # infinity times the padding's zeros would be NaN where the formula's gates saturate, so the operand is
            # clamped; rounding to TF32 may round up, so float32 is clamped to half its maximum
            largest = float(jnp.finfo(operand_dtype).max) / (2 if operand_dtype == jnp.float32 else 1)

            def both(x: Array, h: Array) -> list[Array]:
                operand = jnp.clip(jnp.concatenate((x.astype(dtype), h), axis=-1), -largest, largest)
                return jnp.split(project(operand.astype(operand_dtype), w, bias), gates + separate, axis=-1)

            return Loop(xs, both, cell)
        # with one large matmul before the loop, a GRU is 1.7x as fast on an H200 as Flax's, which projects in the loop
        return Loop(project(xs, w_ih, b_ih), lambda x, h: add(split(x), h), cell)

    # Three measures reduce memory traffic: the backward pass recomputes the gates, arrays are split before they are
    # saved, and projections of 8 MiB or more are computed in the loop. GRU, T=128 B=64 H=128, CPU time on an EPYC core,
    # forward / gradient: 20 / 64 ms (36 / 114 ms with the matmul before the loop and saved gates, 19 / 85 ms for Flax)
    cell = jax.checkpoint(cell, prevent_cse=False)
    size = math.prod(xs.shape[:-1]) * b_ih.size * jnp.dtype(dtype).itemsize
    if isinstance(size, int) and size < 8 * 2**20:  # symbolic dimensions of `jax.export` are not ints
        return Loop(split(project(xs, w_ih, b_ih)), add, cell)
    return Loop(xs, lambda x, h: add(split(project(x, w_ih, b_ih)), h), cell)


def is_reset(resets: Array) -> Array:
    """Returns `resets` as booleans. Nonzero, NaN included, means reset."""
    return resets if resets.dtype == bool else resets != jnp.zeros((), resets.dtype)


def expand_resets(resets: Array, ndim: int) -> Array:
    """Returns `is_reset(resets)` with trailing axes of size one added, `ndim` axes in all."""
    resets = is_reset(resets)
    return resets.reshape(resets.shape + (1,) * (ndim - resets.ndim))


def _select_reset(reset: Array | None, reset_state: Array | None, carry: Array) -> Array:
    """Returns the carry that a step sees, by a select: in a product, a NaN or infinite carry would pass a reset."""
    if reset is None:
        return carry
    new = jnp.zeros_like(carry) if reset_state is None else reset_state.astype(carry.dtype)
    return jnp.where(reset, new, carry)


def _per_step(reset_state: Array | None, carry: Array, time_major: bool) -> tuple[Array | None, Array | None]:
    """Splits a reset state into `(fixed, per step with time first)`; at least one of the two is None."""
    if reset_state is None or reset_state.ndim <= carry.ndim:
        return reset_state, None
    return None, jnp.moveaxis(reset_state, 0 if time_major else -2, 0)


def gru(
    params: GRUParams,
    carry: Array,
    xs: Array,
    *,
    resets: Array | None = None,
    reset_state: Array | None = None,
    reverse: bool = False,
    time_major: bool = True,
    precision: Precision = None,
) -> tuple[Array, Array]:
    """Computes `jaxrnn.gru` with `lax.scan`; `jaxrnn.gru` documents the shapes."""
    dtype = accumulation_dtype(carry, xs, *params)
    fixed, stepped = _per_step(reset_state, carry, time_major)
    if resets is not None:
        resets = expand_resets(jnp.moveaxis(resets, 0 if time_major else -1, 0), xs.ndim)
    steps = xs.shape[0 if time_major else -2]
    weights = params.w_ih, params.b_ih, params.w_hh
    loop = make_loop(gru_cell, 3, xs, steps, weights, precision, dtype, separate=1)

    def step(h: Array, inputs: tuple[Array, Array | None, Array | None]) -> tuple[Array, Array]:
        x, reset, state = inputs
        h = _select_reset(reset, fixed if state is None else state, h)
        a_r, a_z, x_n, h_n = loop.gates(x, h)
        h = loop.cell(a_r, a_z, x_n, h_n + broadcast_to_rank(params.b_hn, h_n), h)
        return h, h.astype(carry.dtype)

    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 0 if time_major else -2, 0), loop.inputs)
    last, ys = jax.lax.scan(step, carry.astype(dtype), (inputs, resets, stepped), reverse=reverse)
    return last.astype(carry.dtype), ys if time_major else jnp.moveaxis(ys, 0, -2)


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
    precision: Precision = None,
) -> tuple[tuple[Array, Array], Array | tuple[Array, Array]]:
    """Computes `jaxrnn.lstm` with `lax.scan`; `jaxrnn.lstm` documents the shapes."""
    c0, h0 = carry
    dtype = accumulation_dtype(c0, h0, xs, *(w for w in params if w is not None))
    operand_dtype = jnp.result_type(xs, params.w_ih, params.w_hh)
    reset_c, reset_h = (None, None) if reset_state is None else reset_state
    fixed_c, stepped_c = _per_step(reset_c, c0, time_major)
    fixed_h, stepped_h = _per_step(reset_h, h0, time_major)
    if resets is not None:
        resets = expand_resets(jnp.moveaxis(resets, 0 if time_major else -1, 0), xs.ndim)
    steps = xs.shape[0 if time_major else -2]
    loop = make_loop(lstm_cell, 4, xs, steps, (params.w_ih, params.b, params.w_hh), precision, dtype)

    def step(
        carry: tuple[Array, Array], inputs: tuple[Array, Array | None, Array | None, Array | None]
    ) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
        c, h = carry
        x, reset, state_c, state_h = inputs
        c = _select_reset(reset, fixed_c if state_c is None else state_c, c)
        h = _select_reset(reset, fixed_h if state_h is None else state_h, h)
        c, h = loop.cell(*loop.gates(x, h), c)
        if params.w_hr is not None:
            h = matmul(h.astype(operand_dtype), params.w_hr, precision, dtype)
        return (c, h), (h.astype(h0.dtype), c.astype(c0.dtype)) if return_cells else (h.astype(h0.dtype),)

    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 0 if time_major else -2, 0), loop.inputs)
    init = (c0.astype(dtype), h0.astype(dtype))
    (c, h), ys = jax.lax.scan(step, init, (inputs, resets, stepped_c, stepped_h), reverse=reverse)
    if not time_major:
        ys = tuple(jnp.moveaxis(y, 0, -2) for y in ys)
    return (c.astype(c0.dtype), h.astype(h0.dtype)), (ys[0], ys[1]) if return_cells else ys[0]
