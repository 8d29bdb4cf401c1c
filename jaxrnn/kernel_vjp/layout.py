"""Conversion of the arguments of a recurrence to canonical form `[G, T, B, W]`, and of its results back.

Time-major input is one group of sequences; batch-major input is one group per sequence. Neither needs a transpose.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrnn import sharding
from jaxrnn.call import Call, RecurrenceSpec
from jaxrnn.kernel_vjp.recurrence import recurrence
from jaxrnn.kernel_vjp.spec import KernelSpec, kernel_precision
from jaxrnn.numerics import is_reset
from torch_bridge import rules

if TYPE_CHECKING:
    from jax import Array


def _merge_axes(x: Array, start: int, count: int) -> Array:
    """Merges `count` axes of `x`, from `start` on, into one; inserts an axis of size 1 if `count` is 0."""
    if count == 0:
        return jnp.expand_dims(x, start)
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : start + count]), *x.shape[start + count :])


def _split_axis(x: Array, axis: int, sizes: tuple[int, ...]) -> Array:
    """Splits an axis of `x` into axes of `sizes`; removes it if there are none."""
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :]) if sizes else x.squeeze(axis)


def run_canonical(
    spec: RecurrenceSpec, call: Call, operand_dtype: Any
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:  # fmt: skip
    """Converts a call on one device to canonical form, runs the kernels, and converts the results back.

    The operands of the products of the loop are cast to `operand_dtype`.
    """
    (params, states, xs, resets, reset_states, first, in_reverse), time_major = call, spec.time_major
    hidden, rank = states[0].shape[-1], states[0].ndim
    batch = xs.shape[1:-1] if time_major else xs.shape[:-2]
    # the axis of the one group, or of the one sequence per group, is expanded and squeezed: a reshape would lose the
    # sharding of a size-1 axis that `vmap` maps over
    unit_axis, unit_axis_of_steps = (0, 0) if time_major else (1, 2)

    def sequence(x: Array) -> Array:
        return jnp.expand_dims(_merge_axes(x, int(time_major), len(batch)), unit_axis_of_steps)

    def state(x: Array) -> Array:
        x = jnp.broadcast_to(x, (*batch, x.shape[-1]))
        return jnp.expand_dims(_merge_axes(x, 0, len(batch)), unit_axis)

    def stepped(x: Array) -> Array:
        if x.ndim <= rank:
            x = jnp.expand_dims(jnp.broadcast_to(x, (*batch, hidden)), 0 if time_major else -2)
        return sequence(jnp.broadcast_to(x, (*xs.shape[:-1], hidden)))

    if resets is not None and resets.dtype.name not in rules.RESET_DTYPES:
        resets = is_reset(resets)
    # the kernels carry float32; they read and write a state in bfloat16 if it and the operands are, else in float32
    dtypes = [x.dtype if x.dtype == operand_dtype == jnp.bfloat16 else jnp.dtype(jnp.float32) for x in states]
    kind, canonical_reset_states = "zeros", None
    if any(x is not None for x in reset_states):
        # cast to the kernel's dtype before broadcasting, so that the gradient is summed in that dtype
        arrays = [
            sharding.unify_varying_axes(jnp.zeros((hidden,), dtype), states) if x is None else x.astype(dtype)
            for x, dtype in zip(reset_states, dtypes, strict=True)
        ]
        kind = "stepped" if any(x.ndim > rank for x in arrays) else "fixed"
        canonical_reset_states = tuple(map(stepped if kind == "stepped" else state, arrays))
    of_kernels = KernelSpec(
        **vars(spec) | {"time_major": True},
        hidden=hidden,
        operand_dtype=operand_dtype,
        reset_state=kind,
        kernel_precision=str(kernel_precision(spec.precision, hidden)),
    )
    canonical = Call(
        params, tuple(state(x.astype(dtype)) for x, dtype in zip(states, dtypes, strict=True)), sequence(xs),
        None if resets is None else sequence(resets), canonical_reset_states, None if first is None else state(first),
        in_reverse,
    )  # fmt: skip
    last, sequences = recurrence(of_kernels, canonical)
    return (
        tuple(
            _split_axis(x.squeeze(unit_axis), 0, batch).astype(initial.dtype)
            for x, initial in zip(last, states, strict=True)
        ),
        tuple(
            _split_axis(sequences[name].squeeze(unit_axis_of_steps), int(time_major), batch).astype(initial.dtype)
            for name, initial in zip(spec.cell.states, states, strict=True)
            if name in spec.returned
        ),
    )
