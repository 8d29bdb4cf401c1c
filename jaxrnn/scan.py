"""One `lax.scan` loop for every cell: it defines the semantics of every implementation and is the one on CPU.

The tests compare the other implementations with it. Gates are accumulated and the states are kept between steps in
float32, or float64 if an operand is float64; results have the dtype of the states that were passed. Arguments are
assumed valid: `jaxrnn.recurrent` checks them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxrnn.cells import norm
from jaxrnn.numerics import accumulation_dtype, broadcast_to_rank, expand_resets, matmul, select_reset
from jaxrnn.sharding import stack

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from jaxrnn.call import Call, RecurrenceSpec
    from jaxrnn.cells import Cell


class _Loop(NamedTuple):
    """A time loop in the form that is fastest on one backend.

    Attributes:
      inputs: arrays with the axes of `xs`, over which the loop runs.
      gates: (inputs of a step, hidden state) -> gates before their activations. Each is the sum of input projection and
        hidden product, except a separate last gate: its input projection comes before its hidden product, and only the
        first has a bias.
      step: the pointwise part of a step: (gates, input projection of a separate last gate, states) -> states.
    """

    inputs: Any
    gates: Callable[[Any, Array], list[Array]]
    step: Callable[..., tuple[Array, ...]]


# A call of one step computes one product with inputs and state if the weights have at most this many bytes, because XLA
# puts the weights together at every step. Inside a scan on an H200 with D = H = 128, a call took 8.9 us instead of 10.9
# us (64 sequences) and 14.7 us instead of 16.6 us (1024). These figures are of one matrix with zeros for a separate
# last gate. On an H100, the batch of two products takes 0.90 to 1.03 of its time (16 to 1024 sequences, 64 to 256
# units, 4 to 256 inputs).
_JOINT_BYTES = 2**21
# Most steps of an iteration of the loop, except on CPU, where more steps are slower. The time of a gradient with four
# and with eight, divided by that with one (64 sequences of 128 steps, 128 units; an H200): GRU 0.64, 0.60; LSTM 0.52,
# 0.44; Hessian-vector product of a normed GRU 0.57, 0.49. With four, compilation takes 1.4, 1.3 and 2.1 times as long.
_MOST_STEPS_PER_ITERATION = 4


def _stack_padded(arrays: tuple[Array, Array], axis: int) -> Array:
    """Stacks two arrays along a new first axis; zeros pad the one that is shorter along `axis`."""
    length = max(x.shape[axis] for x in arrays)

    def pad(x: Array) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, length - x.shape[axis])
        return jnp.pad(x, widths)

    return stack(list(map(pad, arrays)))


def _make_loop(
    cell: Cell, params: Any, xs: Array, steps: int, precision: jax.lax.PrecisionLike, dtype: DTypeLike
) -> _Loop:
    """Returns the loop that is fastest on the default backend; results are the same up to rounding."""
    w_ih, w_hh, b_ih = params.w_ih, params.w_hh, getattr(params, cell.bias)
    gates, separate = cell.gates, int(cell.last_gate_separate)
    operand_dtype = jnp.result_type(xs, w_ih, w_hh)

    def step(gates: list[Array], x_last: Array | None, states: tuple[Array, ...]) -> tuple[Array, ...]:
        return cell.step(gates, x_last, states)[0]

    def project(x: Array, w: Array, b: Array) -> Array:
        product = matmul(x, w, precision, dtype)
        return product + broadcast_to_rank(b, product)

    def recur(h: Array, w: Array) -> Array:
        return matmul(h.astype(operand_dtype), w, precision, dtype)

    def split(x: Array) -> list[Array]:
        return jnp.split(x, gates, axis=-1)

    if cell.norm:
        width = w_ih.shape[0] + w_hh.shape[0]

        def normed(inputs: tuple[Array, dict[str, Array]], h: Array) -> list[Array]:
            x, statistics = inputs
            scale, _ = norm.scale_and_mean(h, statistics, width)
            sums = [one + other for one, other in zip(split(x), split(recur(h, w_hh)), strict=True)]
            return norm.normalize(sums, scale, b_ih)[1]

        statistics = norm.input_statistics(cell, xs, w_hh.shape[0], dtype)
        xp = norm.project(cell, params, xs, precision, dtype)
        if "x_mean" in statistics:
            xp -= statistics["x_mean"] * broadcast_to_rank(norm.sum_of_weights(params, dtype), xp)
        return _Loop((xp, statistics), normed, step)

    def combine(projected: list[Array], recurrent: list[Array]) -> list[Array]:
        sums = [x + y for x, y in zip(projected, recurrent, strict=True)]
        return sums[: gates - separate] + projected[gates - separate :] + recurrent[gates - separate :]

    def add(projected: list[Array], h: Array) -> list[Array]:
        return combine(projected, split(recur(h, w_hh)))

    if jax.default_backend() != "cpu":
        # symbolic dimensions of `jax.export` are not ints
        alone = all(isinstance(n, int) for n in (steps, *w_ih.shape, *w_hh.shape)) and steps == 1
        alike = jnp.result_type(xs, w_ih) == operand_dtype  # else the input projection would round differently
        widths = w_ih.shape[0], w_hh.shape[0]
        row = w_hh.shape[1] * jnp.dtype(operand_dtype).itemsize
        if alone and alike and row * (2 * max(widths) if separate else sum(widths)) <= _JOINT_BYTES:
            weights = w_ih.astype(operand_dtype), w_hh.astype(operand_dtype)
            w = _stack_padded(weights, axis=0) if separate else jnp.concatenate(weights)

            def both(x: Array, h: Array) -> list[Array]:
                operands = x.astype(operand_dtype), h.astype(operand_dtype)
                if not separate:
                    return split(project(jnp.concatenate(operands, axis=-1), w, b_ih))
                # a batch of two products, because a separate last gate needs both apart
                xp, hp = jnp.einsum(
                    "k...d,kdw->k...w", _stack_padded(operands, axis=-1), w, precision=precision,
                    preferred_element_type=dtype,
                )  # fmt: skip
                return combine(split(xp + broadcast_to_rank(b_ih, xp)), split(hp))

            return _Loop(xs, both, step)
        # with one large matmul before the loop, a GRU is 1.7x as fast on an H200 as Flax's, which projects in the loop
        return _Loop(project(xs, w_ih, b_ih), lambda x, h: add(split(x), h), step)

    # Three measures reduce memory traffic: the backward pass recomputes the gates, arrays are split before they are
    # saved, and projections of 8 MiB or more are computed in the loop. GRU, T=128 B=64 H=128, CPU time on an EPYC core,
    # forward / gradient: 20 / 64 ms (36 / 114 ms with the matmul before the loop and saved gates, 19 / 85 ms for Flax)
    step = jax.checkpoint(step, prevent_cse=False)
    size = math.prod(xs.shape[:-1]) * b_ih.size * jnp.dtype(dtype).itemsize
    if isinstance(size, int) and size < 8 * 2**20:  # symbolic dimensions of `jax.export` are not ints
        return _Loop(split(project(xs, w_ih, b_ih)), add, step)
    return _Loop(xs, lambda x, h: add(split(project(x, w_ih, b_ih)), h), step)


def _per_step(reset_state: Array | None, state: Array, time_major: bool) -> tuple[Array | None, Array | None]:
    """Splits a reset state into `(fixed, per step with time first)`; at least one of the two is None."""
    if reset_state is None or reset_state.ndim <= state.ndim:
        return reset_state, None
    return None, jnp.moveaxis(reset_state, 0 if time_major else -2, 0)


def _steps_per_iteration(steps: int) -> int:
    """Returns the steps of an iteration, a divisor of `steps`: `lax.scan` splits off a remainder by copying arrays."""
    if jax.default_backend() == "cpu" or not isinstance(steps, int) or not steps:
        return 1  # symbolic dimensions of `jax.export` are not ints
    return max(n for n in range(1, _MOST_STEPS_PER_ITERATION + 1) if steps % n == 0)


def run(spec: RecurrenceSpec, call: Call) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Runs a recurrence of one direction with `lax.scan`.

    If the weights have a field `w_hr [H, P]` that is not None, hidden states are projected to P units.

    Returns:
      The last states, and the states named in `spec.returned` of every step, each in the dtype of its initial state.
    """
    cell, time_major = spec.cell, spec.time_major
    params, states, xs, resets, reset_states, first, _ = call
    dtype = accumulation_dtype(*states, xs, *(w for w in params if w is not None))
    operand_dtype = call.operand_dtype
    projection = getattr(params, "w_hr", None)
    fixed, stepped = zip(
        *(_per_step(new, state, time_major) for new, state in zip(reset_states, states, strict=True)), strict=True
    )
    if resets is not None:
        resets = expand_resets(jnp.moveaxis(resets, 0 if time_major else -1, 0), xs.ndim)
    steps = xs.shape[0 if time_major else -2]
    loop = _make_loop(cell, params, xs, steps, spec.precision, dtype)
    begins = None if first is None else jnp.arange(steps) == (steps - 1 if spec.reverse else 0)

    def step(before: tuple[Array, ...], inputs: Any) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        x, reset, each, is_first = inputs
        new = [one if one is not None else always for one, always in zip(each, fixed, strict=True)]
        before = tuple(select_reset(reset, one, state) for one, state in zip(new, before, strict=True))
        gates, x_last = loop.gates(x, before[0]), None
        if first is not None:
            added = jnp.split(jnp.where(is_first, first, jnp.zeros_like(first)), cell.gates, axis=-1)
            gates = [*map(jnp.add, gates, added), *gates[cell.gates :]]
        if cell.last_gate_separate:
            *gates, x_last, h_last = gates
            gates.append(h_last + broadcast_to_rank(params.b_hn, h_last))
        after = loop.step(gates, x_last, before)
        if projection is not None:
            after = (matmul(after[0].astype(operand_dtype), projection, spec.precision, dtype), *after[1:])
        kept = zip(cell.states, after, states, strict=True)
        return after, tuple(x.astype(initial.dtype) for name, x, initial in kept if name in spec.returned)

    inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 0 if time_major else -2, 0), loop.inputs)
    initial = tuple(state.astype(dtype) for state in states)
    last, sequences = jax.lax.scan(
        step, initial, (inputs, resets, stepped, begins), reverse=bool(spec.reverse), unroll=_steps_per_iteration(steps)
    )
    if not time_major:
        sequences = tuple(jnp.moveaxis(y, 0, -2) for y in sequences)
    return tuple(x.astype(state.dtype) for x, state in zip(last, states, strict=True)), sequences
