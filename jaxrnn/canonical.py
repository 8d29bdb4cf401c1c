"""Converts the arguments of `gru` and `lstm` to canonical form, runs the kernels per device, and converts results back.

Time-major input is one group of sequences; batch-major input is one group per sequence. Neither needs a transpose.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrnn import _bridge, cells, fused, lstm_projection, reference, sharding
from torch_bridge import rules

if TYPE_CHECKING:
    from jax import Array

    from torch_bridge.tiling import Reverse


def _batch_spec(xs: Array, time_major: bool) -> tuple[Any, ...]:
    """Returns how each batch axis of `xs` is sharded over an explicit mesh; an empty tuple if none is."""
    spec = sharding.spec_of(xs)
    batch = spec[1:-1] if time_major else spec[:-2]
    return batch if any(axis is not None for axis in batch) else ()


def _check_only_batch_axes_sharded(xs: Array, time_major: bool) -> None:
    """Raises NotImplementedError if the time or feature axis of `xs` is sharded over an explicit mesh."""
    spec = sharding.spec_of(xs)
    if any(axis is not None for axis in (spec[0] if time_major else spec[-2], spec[-1])):
        raise NotImplementedError(
            f"the Triton implementation needs time and features unsharded, but xs is sharded as {spec}: use "
            'jax.reshard to shard xs over batch axes only, or pass implementation="xla"'
        )


def _partition_specs(
    batch: tuple[Any, ...], time_major: bool, params: Any, states: Any, resets: Any, reset_states: Any
) -> tuple[tuple[Any, ...], PartitionSpec, PartitionSpec]:
    """Returns the specs of a recurrence sharded over its batch axes: of its arguments, a state and a sequence."""
    everywhere, state = PartitionSpec(), PartitionSpec(*batch, None)
    sequence = PartitionSpec(None, *batch, None) if time_major else PartitionSpec(*batch, None, None)
    by_rank = {1: everywhere, len(state): state, len(sequence): sequence}
    specs = (
        jax.tree.map(lambda _: everywhere, params),
        jax.tree.map(lambda _: state, states),
        sequence,
        jax.tree.map(lambda _: PartitionSpec(*sequence[:-1]), resets),
        jax.tree.map(lambda x: by_rank[x.ndim], reset_states),
    )
    return specs, state, sequence


def reshard_arguments(
    params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, time_major: bool
) -> tuple[Any, ...]:
    """Reshards the arguments of a recurrence for XLA on an explicit mesh: batch axes are sharded as those of `xs`.

    Time, features and params are replicated. JAX does not reshard there by itself, but `lax.scan` must return a carry
    with the sharding that it came in with.
    """
    arguments = params, states, xs, resets, reset_states
    if not sharding.on_explicit_mesh(arguments):
        return arguments
    batch = _batch_spec(xs, time_major)
    if not batch:
        return sharding.replicate(arguments)
    specs, _, _ = _partition_specs(batch, time_major, params, states, resets, reset_states)
    return sharding.reshard(arguments, jax.typeof(xs).sharding.mesh, specs)


def run_kernels(
    cell: cells.Cell, params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, reverse: Reverse,
    time_major: bool, precision: Any, remat: bool, returned: tuple[str, ...], *, may_scan: bool,
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
      may_scan: whether `lax.scan` may replace a launch where that is faster.

    Returns:
      The last states, and the states named in `returned` of every step, each in the dtype of its initial state; or a
      pair of these.
    """
    options = {
        "time_major": time_major, "precision": precision, "remat": remat, "returned": returned, "may_scan": may_scan
    }  # fmt: skip
    if reverse == "bidirectional":
        on_device = functools.partial(_run_bidirectional_on_device, cell, **options)
    else:
        on_device = functools.partial(_run_on_device, cell, None, reverse=reverse, **options)
    arguments = _bridge.reverse_mode_only((params, states, xs, resets, reset_states))
    _check_only_batch_axes_sharded(xs, time_major)
    batch = _batch_spec(xs, time_major)
    if not batch:
        return on_device(*sharding.replicate(arguments))
    specs, state, sequence = _partition_specs(batch, time_major, params, states, resets, reset_states)
    results: Any = tuple(state for _ in cell.states), tuple(sequence for _ in returned)
    results = (results, results) if reverse == "bidirectional" else results
    return sharding.shard_over_mesh(on_device, jax.typeof(xs).sharding.mesh, specs, results, arguments)


# Elements of a state from which on one direction fills a GPU, so that stacking both directions costs more than it saves
# in launches. On an H200 one launch takes 0.6 to 0.8 of the time of two launches up to 256 sequences of 128 units, and
# 1.2 of it at 2048.
_STATES_THAT_FILL_A_GPU = 2**18


def _run_bidirectional_on_device(
    cell: cells.Cell, params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, *, remat: bool,
    **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Runs `_run_on_device` for both directions: all arrays but `xs` come in pairs, and so do the results."""
    hidden, time_major = states[0][-1].shape[-1], options["time_major"]
    steps = xs.shape[0] if time_major else xs.shape[-2]
    both = jax.ShapeDtypeStruct((2, steps, math.prod(xs.shape[:-1]) // steps, xs.shape[-1]), xs.dtype)
    in_chunks = remat and fused.chunk_steps(cell, both, hidden) < steps  # chunks go through time in one order
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

    directions = zip(params, states, resets, reset_states, strict=True)
    stacked = jax.tree.map(lambda *pair: jnp.stack(pair), *directions)
    results = jax.vmap(run)(jnp.array([False, True]), stacked)
    return jax.tree.map(lambda x: x[0], results), jax.tree.map(lambda x: x[1], results)


def _run_on_device(
    cell: cells.Cell, in_reverse: Array | None, params: Any, states: tuple[Array, ...], xs: Array,
    resets: Array | None, reset_states: tuple[Array | None, ...], *, reverse: Reverse, time_major: bool, precision: Any,
    remat: bool, returned: tuple[str, ...], may_scan: bool,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:  # fmt: skip
    """Runs a recurrence on one device, also an LSTM with a projection; arguments and results are as in `run_kernels`.

    With `reverse` "bidirectional", a `jax.vmap` over both directions calls this function, and `in_reverse` says which
    direction this one is.
    """
    # outside of the `custom_vjp`: the transpose of this call sums an argument's gradient over the `shard_map` axes that
    # the argument does not vary over
    params, states, xs, resets, reset_states = sharding.unify_varying_axes((params, states, xs, resets, reset_states))
    options: dict[str, Any] = {
        "reverse": reverse, "time_major": time_major, "remat": remat, "returned": returned, "may_scan": may_scan
    }  # fmt: skip
    if getattr(params, "w_hr", None) is None:
        operand_dtype = jnp.result_type(xs, params.w_ih, params.w_hh)
        return _run_canonical(
            cell, in_reverse, params, states, xs, resets, reset_states, None, operand_dtype, precision=precision,
            **options,
        )  # fmt: skip

    (h0, c0), (reset_h, reset_c), w_hr = states, reset_states, params.w_hr
    operand_dtype = jnp.result_type(xs, params.w_ih, params.w_hh)
    widths = w_hr.shape if operand_dtype == jnp.float32 else w_hr.shape[:1]
    if min(widths) <= rules.FULL_PRECISION_WIDTH:
        precision = jax.lax.Precision.HIGHEST
    from_last: bool | Array = reverse is True if in_reverse is None else in_reverse
    plain = lstm_projection.without_projection(
        params, h0, xs, resets, reset_h, in_reverse=from_last, time_major=time_major, precision=precision
    )
    (_, c), (ms, *cs) = _run_canonical(
        cell, in_reverse, plain.params, (sharding.unify_varying_axes(plain.m0, xs), c0), plain.xs, resets, (None,
        reset_c), plain.first, plain.m0.dtype, precision=precision, **options,
    )  # fmt: skip
    # `w_hr` is cast to float32, as in the product of the weights: 16-bit operands would round the gradient of ms
    hs = lstm_projection.product(ms, w_hr.astype(jnp.float32), precision).astype(h0.dtype)
    axis = 0 if time_major else hs.ndim - 2
    first, last = (jax.lax.index_in_dim(hs, at, axis, keepdims=False) for at in (0, -1))
    return (jnp.where(from_last, first, last), c), (hs, *cs)


def _merge_axes(x: Array, start: int, count: int) -> Array:
    """Merges `count` axes of `x`, from `start` on, into one; inserts an axis of size 1 if `count` is 0."""
    if count == 0:
        return jnp.expand_dims(x, start)
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : start + count]), *x.shape[start + count :])


def _split_axis(x: Array, axis: int, sizes: tuple[int, ...]) -> Array:
    """Splits an axis of `x` into axes of `sizes`; removes it if there are none."""
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :]) if sizes else x.squeeze(axis)


def _run_canonical(
    cell: cells.Cell, in_reverse: Array | None, params: Any, states: tuple[Array, ...], xs: Array,
    resets: Array | None, reset_states: tuple[Array | None, ...], first: Array | None, operand_dtype: Any, *,
    reverse: Reverse, time_major: bool, precision: Any, remat: bool, returned: tuple[str, ...], may_scan: bool,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:  # fmt: skip
    """Converts the arguments of `_run_on_device` to canonical form, runs the kernels, and converts the results back.

    `first [*batch, gates * H]`, if it is not None, is added to the input projection of the step that is computed first.
    """
    hidden, rank = states[0].shape[-1], states[0].ndim
    batch = xs.shape[1:-1] if time_major else xs.shape[:-2]
    # the axis of the one group, or of the one sequence per group, is expanded and squeezed: a reshape would lose the
    # sharding of a size-1 axis that `vmap` maps over
    one, one_stepped = (0, 0) if time_major else (1, 2)

    def sequence(x: Array) -> Array:
        return jnp.expand_dims(_merge_axes(x, int(time_major), len(batch)), one_stepped)

    def state(x: Array) -> Array:
        x = jnp.broadcast_to(x, (*batch, x.shape[-1]))
        return jnp.expand_dims(_merge_axes(x, 0, len(batch)), one)

    def stepped(x: Array) -> Array:
        if x.ndim <= rank:
            x = jnp.expand_dims(jnp.broadcast_to(x, (*batch, hidden)), 0 if time_major else -2)
        return sequence(jnp.broadcast_to(x, (*xs.shape[:-1], hidden)))

    if resets is not None and resets.dtype.name not in rules.RESET_DTYPES:
        resets = reference.is_reset(resets)
    # the kernels carry float32; they read and write a state in bfloat16 if it and the operands are, else in float32
    dtypes = [x.dtype if x.dtype == operand_dtype == jnp.bfloat16 else jnp.dtype(jnp.float32) for x in states]
    kind, canonical_reset_states = "zeros", None
    if any(x is not None for x in reset_states):
        # cast to the kernel's dtype before broadcasting, so that the gradient is summed in that dtype
        given = [
            sharding.unify_varying_axes(jnp.zeros((hidden,), dtype), states) if x is None else x.astype(dtype)
            for x, dtype in zip(reset_states, dtypes, strict=True)
        ]
        kind = "stepped" if any(x.ndim > rank for x in given) else "fixed"
        canonical_reset_states = tuple(map(stepped if kind == "stepped" else state, given))
    static = fused.RecurrenceSpec(
        cell=cell,
        operand_dtype=operand_dtype,
        reset_state=kind,
        reverse=reverse,
        precision=precision,
        kernel_precision=str(fused.kernel_precision(precision, hidden)),
        remat=remat,
        returned=returned,
        may_scan=may_scan,
    )
    last, sequences = fused.recurrence(
        static, params, tuple(state(x.astype(dtype)) for x, dtype in zip(states, dtypes, strict=True)),
        sequence(xs), None if resets is None else sequence(resets), canonical_reset_states,
        None if first is None else state(first), in_reverse,
    )  # fmt: skip
    return (
        tuple(_split_axis(x.squeeze(one), 0, batch).astype(given.dtype) for x, given in zip(last, states, strict=True)),
        tuple(
            _split_axis(sequences[name].squeeze(one_stepped), int(time_major), batch).astype(given.dtype)
            for name, given in zip(cell.states, states, strict=True)
            if name in returned
        ),
    )
