"""Brings what `gru` and `lstm` take into canonical form, runs the kernels on each device, and brings the results back.

Time-major input is one group of sequences, batch-major input one group a sequence: neither costs a transpose.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrnn import _bridge, cells, fused, lstm_projection, reference, sharding

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn._bridge import Reverse

# Dtypes of resets that the kernels read as they are.
KERNEL_RESETS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32")
)


def _batch_spec(xs: Array, time_major: bool) -> tuple[Any, ...]:
    """How the batch axes of `xs` are sharded over an explicit mesh; nothing if they are not."""
    spec = sharding.spec_of(xs)
    batch = spec[1:-1] if time_major else spec[:-2]
    return batch if any(axis is not None for axis in batch) else ()


def _check_only_batch_axes_sharded(xs: Array, time_major: bool) -> None:
    """Raises NotImplementedError unless axes of `xs` that are sharded over an explicit mesh are batch axes."""
    spec = sharding.spec_of(xs)
    if any(axis is not None for axis in (spec[0] if time_major else spec[-2], spec[-1])):
        raise NotImplementedError(
            f"the Triton implementation needs whole sequences and features on a device, and xs is sharded as {spec}: "
            'jax.reshard it to be sharded over batch axes alone, or pass implementation="xla"'
        )


def _partition_specs(
    batch: tuple[Any, ...], time_major: bool, params: Any, states: Any, resets: Any, reset_states: Any
) -> tuple[tuple[Any, ...], PartitionSpec, PartitionSpec]:
    """Of a recurrence whose batch axes are sharded as `batch`, how all that it takes is, and a state and a sequence."""
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


def place(params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, time_major: bool) -> tuple[Any, ...]:
    """What a recurrence takes, as XLA computes it on an explicit mesh: sequences whole, all else where their parts are.

    JAX itself brings nothing together there: a scan has to return a carry that is sharded as it was.
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
    """Runs a recurrence by the kernels, on each device of an explicit mesh for its part of the batch.

    Args:
      cell: an entry of the cell table.
      params: as of `gru` or `lstm`; a pair, forward and in reverse, with `reverse` "bidirectional".
      states: what it starts from, in the order of `cell.states`, the hidden state first; or a pair of such.
      xs: as of `gru`.
      resets: as of `gru`, or a pair.
      reset_states: for each state as of `gru`, or a pair.
      reverse: as of `gru`; "bidirectional" runs both directions.
      time_major: as of `gru`.
      precision: as of `gru`.
      remat: as of `gru`.
      returned: the states of which to return every step.
      may_scan: whether XLA may compute in place of a launch where that is faster.

    Returns:
      The last states, and those of every step that `returned` names, each in the dtype of its first; or a pair of that.
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


# States from which on one direction by itself fills a GPU, and to bring both side by side costs more than a launch
# saves. H200: one launch takes 0.6 to 0.8 of the time of two up to 256 sequences of 128 units, and 1.2 of it at 2048.
_STATES_THAT_FILL_A_GPU = 2**18


def _run_bidirectional_on_device(
    cell: cells.Cell, params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, *, remat: bool,
    **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """As `_run_on_device`, forward and in reverse at once: of all but `xs` a pair, and so are the results."""
    hidden, time_major = states[0][-1].shape[-1], options["time_major"]
    steps = xs.shape[0] if time_major else xs.shape[-2]
    both = jax.ShapeDtypeStruct((2, steps, math.prod(xs.shape[:-1]) // steps, xs.shape[-1]), xs.dtype)
    in_chunks = remat and fused.chunk_steps(cell, both, hidden) < steps  # which go through time in one order
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
    """As `run_kernels`, all of it here, for an LSTM with a projection too.

    With `reverse` "bidirectional", a `jax.vmap` over two directions calls this, and `in_reverse` says which one it is.
    """
    # out here, where the transpose sums gradients over the devices of a `shard_map` that an argument does not vary over
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
    if min(widths) <= fused.FULL_PRECISION_WIDTH:
        precision = jax.lax.Precision.HIGHEST
    from_last: bool | Array = reverse is True if in_reverse is None else in_reverse
    plain = lstm_projection.without_projection(
        params, h0, xs, resets, reset_h, in_reverse=from_last, time_major=time_major, precision=precision
    )
    (_, c), (ms, *cs) = _run_canonical(
        cell, in_reverse, plain.params, (sharding.unify_varying_axes(plain.m0, xs), c0), plain.xs, resets, (None,
        reset_c), plain.first, plain.m0.dtype, precision=precision, **options,
    )  # fmt: skip
    # as float32, like the weights' product: or the gradient of ms would be rounded to the 16 bits of what is multiplied
    hs = lstm_projection.product(ms, w_hr.astype(jnp.float32), precision).astype(h0.dtype)
    axis = 0 if time_major else hs.ndim - 2
    first, last = (jax.lax.index_in_dim(hs, at, axis, keepdims=False) for at in (0, -1))
    return (jnp.where(from_last, first, last), c), (hs, *cs)


def _merge_axes(x: Array, start: int, count: int) -> Array:
    """`count` axes of `x`, from `start` on, as one."""
    if count == 0:
        return jnp.expand_dims(x, start)
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : start + count]), *x.shape[start + count :])


def _split_axis(x: Array, axis: int, sizes: tuple[int, ...]) -> Array:
    """An axis of `x` as axes of `sizes`."""
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :]) if sizes else x.squeeze(axis)


def _run_canonical(
    cell: cells.Cell, in_reverse: Array | None, params: Any, states: tuple[Array, ...], xs: Array,
    resets: Array | None, reset_states: tuple[Array | None, ...], first: Array | None, operand_dtype: Any, *,
    reverse: Reverse, time_major: bool, precision: Any, remat: bool, returned: tuple[str, ...], may_scan: bool,
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:  # fmt: skip
    """Brings the arguments into canonical form, runs the kernels, and brings the results back: `_run_on_device`.

    `first [*batch, gates * H]`, if any, is added to the input projection of the step that is computed first.
    """
    hidden, rank = states[0].shape[-1], states[0].ndim
    batch = xs.shape[1:-1] if time_major else xs.shape[:-2]
    # the one group, or the one sequence of each, is an axis put in and taken out: a reshape would forget how an axis of
    # size 1 that `vmap` goes over is sharded
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

    if resets is not None and resets.dtype.name not in KERNEL_RESETS:
        resets = reference.is_reset(resets)
    # the kernels carry float32; they read and write states in it, or in bfloat16 where all of it is bfloat16
    dtypes = [x.dtype if x.dtype == operand_dtype == jnp.bfloat16 else jnp.dtype(jnp.float32) for x in states]
    kind, canonical_reset_states = "zeros", None
    if any(x is not None for x in reset_states):
        # to the dtype of the kernel first, so that gradients of what is then repeated add up in it
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
