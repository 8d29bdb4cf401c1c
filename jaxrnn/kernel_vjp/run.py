"""Runs a recurrence with the kernels: on each device of an explicit mesh, in one direction or both."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrnn import sharding
from jaxrnn.call import Call, RecurrenceSpec
from jaxrnn.kernel_vjp import projected_state
from jaxrnn.kernel_vjp.chunks import chunk_steps
from jaxrnn.kernel_vjp.layout import run_canonical
from jaxrnn.kernel_vjp.mesh import batch_spec, check_only_batch_axes_sharded, partition_specs


def run_kernels(spec: RecurrenceSpec, call: Call) -> Any:
    """Runs a recurrence with the kernels; on an explicit mesh, each device runs its shard of the batch.

    Returns:
      The last states, and the states named in `spec.returned` of every step, each in the dtype of its initial state;
      for both directions a pair of these.
    """
    bidirectional = spec.reverse == "bidirectional"
    on_device = functools.partial(_run_both_directions if bidirectional else _run_on_device, spec)
    check_only_batch_axes_sharded(call.xs, spec.time_major)
    batch_axes = batch_spec(call.xs, spec.time_major)
    if not batch_axes:
        return on_device(sharding.replicate(call))
    specs, state, sequence = partition_specs(batch_axes, spec.time_major, call)
    results: Any = tuple(state for _ in spec.cell.states), tuple(sequence for _ in spec.returned)
    results = (results, results) if bidirectional else results
    return sharding.shard_over_mesh(on_device, jax.typeof(call.xs).sharding.mesh, (specs,), results, (call,))


# Elements of a state from which on one direction fills a GPU, so that stacking both directions costs more than it saves
# in launches. On an H200 one launch takes 0.6 to 0.8 of the time of two launches up to 256 sequences of 128 units, and
# 1.2 of it at 2048.
_STATES_THAT_FILL_A_GPU = 2**18


def _run_both_directions(spec: RecurrenceSpec, call: Call) -> tuple[Any, Any]:
    """Runs both directions on one device, in one launch or, where that is slower, each in its own."""
    directions, xs = call.directions(), call.xs
    steps = xs.shape[0 if spec.time_major else -2]
    both = jax.ShapeDtypeStruct((2, steps, math.prod(xs.shape[:-1]) // steps, xs.shape[-1]), xs.dtype)
    hidden = call.states[0][-1].shape[-1]
    # chunks go through time in one order
    needs_chunks = spec.remat and chunk_steps(spec.cell, both, hidden) < steps
    if needs_chunks or math.prod(call.states[0][-1].shape) >= _STATES_THAT_FILL_A_GPU:
        forward, backward = map(_run_on_device, spec.directions(), directions)
        return forward, backward

    def run(in_reverse: Array, arrays: Call) -> Any:
        return _run_on_device(spec, arrays._replace(xs=xs, in_reverse=in_reverse))

    apart = sharding.replicate_all([direction._replace(xs=None) for direction in directions])  # type: ignore[arg-type]
    stacked = jax.tree.map(lambda *pair: sharding.stack(pair), *apart)
    results = jax.vmap(run)(jnp.array([False, True]), stacked)
    return jax.tree.map(lambda x: x[0], results), jax.tree.map(lambda x: x[1], results)


def _run_on_device(spec: RecurrenceSpec, call: Call) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Runs a recurrence on one device, also an LSTM with a projection; results are as in `run_kernels`."""
    # outside of `recurrence`: the transpose of this call sums an argument's gradient over the `shard_map` axes that
    # the argument does not vary over
    call = sharding.unify_varying_axes(call)
    w_hr = getattr(call.params, "w_hr", None)
    if w_hr is None:
        return run_canonical(spec, call, call.operand_dtype)

    spec = dataclasses.replace(spec, precision=projected_state.precision_of(spec, call))
    plain = projected_state.without_projection(spec, call)
    (_, c), (ms, *cs) = run_canonical(spec, plain, plain.states[0].dtype)
    # `w_hr` is cast to float32, as in the product of the weights: 16-bit operands would round the gradient of ms
    hs = projected_state.product(ms, w_hr.astype(jnp.float32), spec.precision).astype(call.states[0].dtype)
    axis = 0 if spec.time_major else hs.ndim - 2
    first, last = (jax.lax.index_in_dim(hs, at, axis, keepdims=False) for at in (0, -1))
    return (jnp.where(projected_state.is_from_last(spec, call), first, last), c), (hs, *cs)
