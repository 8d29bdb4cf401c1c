"""Runs a recurrence with the kernels: on each device of an explicit mesh, in one direction or both."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import _bridge, sharding
from jaxrnn.cells import Cell
from jaxrnn.kernel_vjp import projected_state
from jaxrnn.kernel_vjp.chunks import chunk_steps
from jaxrnn.kernel_vjp.layout import run_canonical
from jaxrnn.kernel_vjp.mesh import batch_spec, check_only_batch_axes_sharded, partition_specs
from torch_bridge import rules

if TYPE_CHECKING:
    from jax import Array

    from torch_bridge.tiling import Reverse


def run_kernels(
    cell: Cell, params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, reverse: Reverse,
    time_major: bool, precision: Any, remat: bool, returned: tuple[str, ...], *, may_use_xla: bool,
) -> Any:  # fmt: skip
    """Runs a recurrence with the kernels; on an explicit mesh, each device runs its shard of the batch.

    Args:
      cell: an entry of the cell table.
      params: as in `gru` or `lstm`; with `reverse` "bidirectional" a pair, forward and reverse.
      states: the initial states in the order of `cell.states`, the hidden state first; or a pair of these.
      xs: as in `gru`.
      resets: as in `gru`, or a pair.
      reset_states: for each state as in `gru`, or a pair of these.
      reverse: as in `gru`; "bidirectional" runs both directions.
      time_major: as in `gru`.
      precision: as in `gru`.
      remat: as in `gru`.
      returned: the names of the states to return for every step.
      may_use_xla: whether XLA may compute a launch instead: where that is faster, and on a CPU.

    Returns:
      The last states, and the states named in `returned` of every step, each in the dtype of its initial state; or a
      pair of these.
    """
    options = {
        "time_major": time_major, "precision": precision, "remat": remat, "returned": returned,
        "may_use_xla": may_use_xla,
    }  # fmt: skip
    if reverse == "bidirectional":
        on_device = functools.partial(_run_bidirectional_on_device, cell, **options)
    else:
        on_device = functools.partial(_run_on_device, cell, None, reverse=reverse, **options)
    arguments = _bridge.reverse_mode_only((params, states, xs, resets, reset_states))
    check_only_batch_axes_sharded(xs, time_major)
    batch = batch_spec(xs, time_major)
    if not batch:
        return on_device(*sharding.replicate(arguments))
    specs, state, sequence = partition_specs(batch, time_major, params, states, resets, reset_states)
    results: Any = tuple(state for _ in cell.states), tuple(sequence for _ in returned)
    results = (results, results) if reverse == "bidirectional" else results
    return sharding.shard_over_mesh(on_device, jax.typeof(xs).sharding.mesh, specs, results, arguments)


# Elements of a state from which on one direction fills a GPU, so that stacking both directions costs more than it saves
# in launches. On an H200 one launch takes 0.6 to 0.8 of the time of two launches up to 256 sequences of 128 units, and
# 1.2 of it at 2048.
_STATES_THAT_FILL_A_GPU = 2**18


def _run_bidirectional_on_device(
    cell: Cell, params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, *, remat: bool,
    **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Runs `_run_on_device` for both directions: all arrays but `xs` come in pairs, and so do the results."""
    hidden, time_major = states[0][-1].shape[-1], options["time_major"]
    steps = xs.shape[0] if time_major else xs.shape[-2]
    both = jax.ShapeDtypeStruct((2, steps, math.prod(xs.shape[:-1]) // steps, xs.shape[-1]), xs.dtype)
    in_chunks = remat and chunk_steps(cell, both, hidden) < steps  # chunks go through time in one order
    if in_chunks or math.prod(states[0][-1].shape) >= _STATES_THAT_FILL_A_GPU:
        forward, backward = (
            _run_on_device(cell, None, *each[:2], xs, *each[2:], reverse=reverse, remat=remat, **options)
            for reverse, each in zip((False, True), zip(params, states, resets, reset_states, strict=True), strict=True)
        )
        return forward, backward

    def run(in_reverse: Array, each: Any) -> Any:
        params, states, resets, reset_states = each
        return _run_on_device(
            cell, in_reverse, params, states, xs, resets, reset_states, reverse="bidirectional", remat=remat, **options
        )

    directions = sharding.replicate_all(list(zip(params, states, resets, reset_states, strict=True)))
    stacked = jax.tree.map(lambda *pair: sharding.stack(pair), *directions)
    results = jax.vmap(run)(jnp.array([False, True]), stacked)
    return jax.tree.map(lambda x: x[0], results), jax.tree.map(lambda x: x[1], results)


def _run_on_device(
    cell: Cell, in_reverse: Array | None, params: Any, states: tuple[Array, ...], xs: Array,
    resets: Array | None, reset_states: tuple[Array | None, ...], *, reverse: Reverse, time_major: bool, precision: Any,
    remat: bool, returned: tuple[str, ...], may_use_xla: bool,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:  # fmt: skip
    """Runs a recurrence on one device, also an LSTM with a projection; arguments and results are as in `run_kernels`.

    With `reverse` "bidirectional", a `jax.vmap` over both directions calls this function, and `in_reverse` says which
    direction this one is.
    """
    # outside of the `custom_vjp`: the transpose of this call sums an argument's gradient over the `shard_map` axes that
    # the argument does not vary over
    params, states, xs, resets, reset_states = sharding.unify_varying_axes((params, states, xs, resets, reset_states))
    options: dict[str, Any] = {
        "reverse": reverse, "time_major": time_major, "remat": remat, "returned": returned, "may_use_xla": may_use_xla
    }  # fmt: skip
    if getattr(params, "w_hr", None) is None:
        operand_dtype = jnp.result_type(xs, params.w_ih, params.w_hh)
        return run_canonical(
            cell, in_reverse, params, states, xs, resets, reset_states, None, operand_dtype, precision=precision,
            **options,
        )  # fmt: skip

    (h0, c0), (reset_h, reset_c), w_hr = states, reset_states, params.w_hr
    operand_dtype = jnp.result_type(xs, params.w_ih, params.w_hh)
    widths = w_hr.shape if operand_dtype == jnp.float32 else w_hr.shape[:1]
    if min(widths) <= rules.FULL_PRECISION_WIDTH:
        precision = jax.lax.Precision.HIGHEST
    from_last: bool | Array = reverse is True if in_reverse is None else in_reverse
    plain = projected_state.without_projection(
        params, h0, xs, resets, reset_h, in_reverse=from_last, time_major=time_major, precision=precision
    )
    (_, c), (ms, *cs) = run_canonical(
        cell, in_reverse, plain.params, (sharding.unify_varying_axes(plain.m0, xs), c0), plain.xs, resets, (None,
        reset_c), plain.first, plain.m0.dtype, precision=precision, **options,
    )  # fmt: skip
    # `w_hr` is cast to float32, as in the product of the weights: 16-bit operands would round the gradient of ms
    hs = projected_state.product(ms, w_hr.astype(jnp.float32), precision).astype(h0.dtype)
    axis = 0 if time_major else hs.ndim - 2
    first, last = (jax.lax.index_in_dim(hs, at, axis, keepdims=False) for at in (0, -1))
    return (jnp.where(from_last, first, last), c), (hs, *cs)
