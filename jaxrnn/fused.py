"""The recurrence with the kernels, on canonical arrays: one `jax.custom_vjp` for all cells.

Canonical arrays are `[G, T, B, W]`: G groups of B sequences, time first inside a group. `jax.vmap` adds groups, or
models if weights are batched. With `remat` the forward and the backward pass process time in chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn import _bridge, cells, layouts, reference, sharding
from torch_bridge import rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array

    from torch_bridge.tiling import Reverse


def kernel_precision(precision: Any, hidden: int) -> rules.Precision | None:
    """Returns Triton's name for the precision of a kernel's float32 products, or None if there is no such kernel."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if isinstance(precision, tuple):
        return kernel_precision(precision[0], hidden) if len(set(precision)) == 1 else None
    try:
        is_default = precision is None or jax.lax.Precision(precision) == jax.lax.Precision.DEFAULT
    except ValueError:
        return None
    return rules.kernel_precision(is_default, hidden)


@dataclasses.dataclass(frozen=True)
class RecurrenceSpec:
    """The static arguments of a recurrence, on which it is specialised besides shapes and dtypes."""

    cell: cells.Cell
    operand_dtype: Any
    reset_state: str
    reverse: Reverse
    precision: Any
    kernel_precision: str
    remat: bool
    returned: tuple[str, ...]
    may_scan: bool

    @property
    def uses_tf32(self) -> bool:
        """Whether products round their float32 operands to TF32."""
        return self.operand_dtype == jnp.float32 and self.kernel_precision == "tf32"


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def recurrence(
    static: RecurrenceSpec, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None,
) -> tuple[tuple[Array, ...], dict[str, Array]]:  # fmt: skip
    """Runs the recurrence on canonical arrays; returns the last states and, by name, the states of every step."""
    last, sequences, _ = _forward(
        static, params, states, xs, resets, reset_states, first, in_reverse, save_residuals=False
    )
    return last, sequences


def _forward(
    static: RecurrenceSpec, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None, save_residuals: bool,
) -> tuple[tuple[Array, ...], dict[str, Array], dict[str, Array]]:  # fmt: skip
    """Computes `recurrence`, and returns all per-step outputs by name too; `save_residuals` adds the residuals."""
    run = functools.partial(_forward_on_device, static, save_residuals)
    return sharding.shard_over_vmapped_axes(run, params, states, xs, resets, reset_states, first, in_reverse)


def _forward_on_device(
    static: RecurrenceSpec, save_residuals: bool, params: Any, states: tuple[Array, ...], xs: Array,
    resets: Array | None, reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None,
) -> tuple[tuple[Array, ...], dict[str, Array], dict[str, Array]]:  # fmt: skip
    """Computes `_forward` where `vmap` maps no sharded axis."""
    cell, hidden, steps, operand_dtype = static.cell, states[0].shape[-1], xs.shape[1], static.operand_dtype
    f32 = jnp.dtype(jnp.float32)
    w_hh = params.w_hh.astype(operand_dtype)
    weights: dict[str, Array | None] = {"w_hh_t": w_hh.T[None]}
    weights |= {name: b.astype(f32)[None] for name, b in cell.hidden_biases(params).items()}
    outputs = [
        _bridge.Output(f"{s}s", True, hidden, x.dtype)
        for s, x in zip(cell.states, states, strict=True)
        if s == "h" or s in static.returned or (save_residuals and static.remat and s in cell.history)
    ]
    outputs += [_bridge.Output(f"{s}_last", False, hidden, f32) for s in cell.states]
    if save_residuals and not static.remat:
        in_place = _has_residuals_in_place(static, hidden, math.prod(xs.shape[:-1]))
        outputs += _residual_outputs(static, hidden, xs, in_place)

    stepped = reset_states if static.reset_state == "stepped" else None

    def run(states: tuple[Array, ...], sequences: Any, start: Any) -> tuple[tuple[Array, ...], None, dict[str, Array]]:
        x, reset, new = sequences
        beginnings = _possible_first_steps(static, in_reverse, start, x.shape[1], steps)
        xp = _input_projection(static, params, x, first, beginnings)
        arrays: dict[str, Array | None] = weights | {"xp": xp}
        arrays |= {"reset": reset} | {f"{s}0": x for s, x in zip(cell.states, states, strict=True)}
        arrays |= {f"reset_{s}": x for s, x in zip(cell.states, new or reset_states or (), strict=False)}
        results = _bridge.launch(
            cell.name, "fwd", arrays, outputs, reset_state=static.reset_state, reverse=static.reverse,
            precision=static.kernel_precision, may_scan=static.may_scan,
        )  # fmt: skip
        return tuple(results.pop(f"{s}_last") for s in cell.states), None, results

    size = chunk_steps(cell, xs, hidden) if save_residuals and static.remat else steps
    if size < steps:
        states = tuple(x.astype(f32) for x in states)  # the dtype in which a chunk passes them to the next
    last, _, results = _in_chunks(run, states, (xs, resets, stepped), size, last_first=static.reverse is True)
    return last, {s: results[f"{s}s"] for s in static.returned}, results


def _possible_first_steps(
    static: RecurrenceSpec, in_reverse: Array | None, start: Any, size: int, steps: int
) -> list[tuple[int, Any]]:
    """Returns where in a chunk the loop may begin, as `(index in the chunk, whether the loop begins there)`.

    The chunk has `size` of all `steps` and begins at step `start`.
    """
    if in_reverse is not None:
        return [(0, ~in_reverse), (size - 1, in_reverse)]
    return [(size - 1, start + size == steps) if static.reverse else (0, start == 0)]


def _input_projection(
    static: RecurrenceSpec, params: Any, xs: Array, first: Array | None, beginnings: list[tuple[int, Any]]
) -> Array:
    """Returns the input projection `[G, T, B, gates * H]`, with `first` added at the step where the loop begins.

    Its dtype is float32, or float16 where that makes kernels with bfloat16 operands faster.
    """
    cell, dtype = static.cell, static.operand_dtype
    inputs, gates = params.w_ih.shape
    by_kernel = (static.uses_tf32 or dtype == jnp.bfloat16) and first is None and not static.remat
    if by_kernel and _bridge.is_projection_profitable(math.prod(xs.shape[:-1]), inputs, gates, dtype):
        w_ih = params.w_ih.astype(dtype)
        if static.uses_tf32:
            w_ih = _bridge.round_to_tf32(w_ih)
        bias = getattr(params, cell.bias).astype(jnp.float32)
        out = jnp.float32 if static.uses_tf32 else jnp.float16
        return _bridge.launch_projection(xs.astype(dtype), w_ih, bias, out)
    xp = cells.project(cell, params, xs, static.precision)
    if first is not None:
        for at, begins in beginnings:  # XLA updates xp in place
            step = xp[:, at : at + 1] + jnp.where(begins, first, jnp.zeros_like(first))[:, None]
            xp = jax.lax.dynamic_update_slice_in_dim(xp, step, at, axis=1)
    return xp


# Bytes that `remat` recomputes at a time. A chunk then takes several times as long as the 10 to 30 us of its launches,
# and is small compared with the inputs and states of a call for which saving memory is worthwhile.
_CHUNK_BYTES = 2**27
# Minimum steps of a chunk, however many sequences there are: loading the weights on chip takes as long as a few steps.
_CHUNK_STEPS = 16


def chunk_steps(cell: cells.Cell, xs: Array | jax.ShapeDtypeStruct, hidden: int) -> int:
    """Returns the steps per chunk under `remat`: all steps if they fit in one chunk, else the maximum that fits.

    The maximum is reduced by up to half if that makes all chunks equal.
    """
    groups, steps, batch = xs.shape[:3]
    # the bytes of xp, hp, the residuals, and the states before each step, all counted in float32
    step_bytes = 4 * groups * batch * hidden * (3 * cell.gates + len(cell.history))
    most = max(_CHUNK_STEPS, _CHUNK_BYTES // step_bytes)
    if most >= steps:
        return steps
    return next((size for size in range(most, most // 2, -1) if steps % size == 0), most)


def _in_chunks(
    run: Callable[[Any, Any, Any], tuple[Any, Any, Any]], carry: Any, sequences: Any, size: int, last_first: bool
) -> tuple[Any, Any, Any]:
    """Runs `run` on chunks of time of `sequences` `[G, T, ...]`, one after the other.

    `run` takes the carry, a chunk and the chunk's first step. It returns the carry, a tree to sum over all chunks, and
    a tree to concatenate along time.
    """
    steps = jax.tree.leaves(sequences)[0].shape[1]
    if size == steps:
        return run(carry, sequences, 0)
    full, rest = divmod(steps, size)
    # trailing axes are flattened: the layout of a batch axis of size one is ambiguous, and XLA would copy the inputs of
    # the loop to settle it
    flat = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1), sequences)

    def part(start: Any, size: int) -> Any:
        def of(x: Array, flat: Array) -> Array:
            chunk = jax.lax.dynamic_slice_in_dim(flat, start, size, axis=1)
            return chunk.reshape(x.shape[0], size, *x.shape[2:])

        return jax.tree.map(of, sequences, flat)

    _, sums, parts = jax.eval_shape(lambda carry: run(carry, part(0, size), 0), carry)
    joined = jax.tree.map(lambda x: jnp.zeros((x.shape[0], steps, *x.shape[2:]), x.dtype), parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    everything = carry, *sharding.unify_varying_axes((zeros, joined), sequences)

    def chunk(everything: Any, start: Any, size: int) -> Any:
        carry, sums, joined = everything
        carry, terms, parts = run(carry, part(start, size), start)
        # updated in place, because XLA would transpose the stacked outputs of a scan if there is more than one group
        joined = jax.tree.map(lambda x, p: jax.lax.dynamic_update_slice_in_dim(x, p, start, axis=1), joined, parts)
        return carry, jax.tree.map(jnp.add, sums, terms), joined

    if rest:  # runs before the loop: XLA would copy the arrays of the loop to write another chunk after it
        everything = chunk(everything, full * size if last_first else 0, rest)
    starts = jnp.arange(full) * size + (0 if last_first else rest)
    everything, _ = jax.lax.scan(
        lambda everything, start: (chunk(everything, start, size), None), everything, starts, reverse=last_first
    )
    return everything


def _residual_fits_float16(name: str, static: RecurrenceSpec) -> bool:
    return rules.residual_fits_float16(name, str(jnp.dtype(static.operand_dtype)), static.kernel_precision)


def _residual_dtype(name: str, static: RecurrenceSpec, hidden: int, sequences: Any) -> Any:
    """Returns the dtype of a residual in the traced program: float32 also where the launch may still choose float16."""
    if not _residual_fits_float16(name, static):
        return jnp.dtype(jnp.float32)
    up_to_launch = static.uses_tf32 and _bridge.may_have_float32_residuals(hidden, sequences, static.reset_state)
    return jnp.dtype(jnp.float32 if up_to_launch else jnp.float16)


# Bytes of input projections, of one model and at the traced shapes, from which saving memory is worth the time. On an
# H200, in-place residuals reduce the memory of GRU 2048,256,128, whose projections take 0.8 GB, from 2.69 GB to 1.91 GB
# and take 0.6 % longer; at 4,128,128 they take 3 % longer.
_IN_PLACE_BYTES = 2**29
# If the hidden width is a multiple of this, all blocks of units are full. At other widths some kernels run out of
# registers with Triton 3.9.
_IN_PLACE_UNITS = 64


def _has_residuals_in_place(static: RecurrenceSpec, hidden: int, rows: int) -> bool:
    """Whether the residuals overwrite the input projections, and the gate gradients overwrite the residuals.

    All three then have the same size, and two arrays fewer of that size are held. The projections, of `rows` rows, must
    be large for this.
    """
    large = 4 * rows * static.cell.gates * hidden >= _IN_PLACE_BYTES and hidden % _IN_PLACE_UNITS == 0
    return static.cell.in_place_residuals is not None and static.uses_tf32 and not static.remat and large


def _residual_outputs(static: RecurrenceSpec, hidden: int, xs: Array, in_place: bool) -> list[_bridge.Output]:
    """Returns the outputs of the forward launch that hold the residuals of every step of `xs`."""
    if in_place and static.cell.in_place_residuals:
        name, width = static.cell.in_place_residuals
        return [_bridge.Output(name, True, width * hidden, jnp.dtype(jnp.float32), "xp")]
    return [
        _bridge.Output(name, True, width * hidden, _residual_dtype(name, static, hidden, xs.shape[0] * xs.shape[2]))
        for name, width in static.cell.residuals
    ]


def _recurrence_fwd(
    static: RecurrenceSpec, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None,
) -> tuple[Any, Any]:  # fmt: skip
    last, sequences, results = _forward(
        static, params, states, xs, resets, reset_states, first, in_reverse, save_residuals=True
    )
    needed = [f"{s}s" for s in static.cell.history] if static.remat else [*dict(static.cell.residuals), "hs"]
    saved = {name: results[name] for name in needed if name in results}
    return (last, sequences), (params, states, xs, resets, reset_states, first, in_reverse, saved)


def _state_before(static: RecurrenceSpec, history: Array, state: Array, start: Any, size: int) -> Array:
    """Returns the state `[G, B, H]` before the first of `size` steps from `start` on, without resets applied."""
    steps = history.shape[1]
    if size == steps:
        return state
    at = start + size if static.reverse else start - 1
    before = jax.lax.dynamic_index_in_dim(history, jnp.clip(at, 0, steps - 1), axis=1, keepdims=False)
    return jnp.where((at < 0) | (at == steps), state, before)


def _shift_one_step(history: Array, state: Array, reverse: bool) -> Array:
    """Returns `history` shifted one step later in the order of `reverse`, with `state` first.

    XLA compiles padding to one pass at memory bandwidth; a concatenation takes 2.5 times as long (H200).
    """
    steps = history.shape[1]
    low, high, first = (-1, 1, steps - 1) if reverse else (1, -1, 0)
    zero = sharding.unify_varying_axes(jnp.zeros((), history.dtype), history)
    later = jax.lax.pad(history, zero, ((0, 0, 0), (low, high, 0), (0, 0, 0), (0, 0, 0)))
    return jnp.where((jnp.arange(steps) == first)[:, None, None], state[:, None], later)


def _states_before(
    static: RecurrenceSpec, history: Array, state: Array, resets: Array | None, reset_state: Array | None,
    in_reverse: Array | None,
) -> Array:  # fmt: skip
    """Returns the states `[G, T, B, H]` before each step, with resets applied; `state` precedes the first step."""
    if in_reverse is not None:
        previous = jnp.where(in_reverse, _shift_one_step(history, state, True), _shift_one_step(history, state, False))
    else:
        previous = _shift_one_step(history, state, static.reverse is True)
    if resets is None:
        return previous
    new = jnp.zeros_like(previous)
    if reset_state is not None:
        new = reset_state if static.reset_state == "stepped" else reset_state[:, None]
    return jnp.where(reference.is_reset(resets)[..., None], new, previous)


def _recurrence_bwd(static: RecurrenceSpec, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    run = functools.partial(_backward_on_device, static)
    dparams, dstates, dxs, dreset_states, dfirst = sharding.shard_over_vmapped_axes(run, residuals, cotangents)
    _, _, _, resets, _, _, in_reverse, _ = residuals
    return dparams, dstates, dxs, _zero_cotangent(resets), dreset_states, dfirst, _zero_cotangent(in_reverse)


def _backward_on_device(static: RecurrenceSpec, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    """Returns the gradients to the differentiable arguments of `recurrence` where `vmap` maps no sharded axis."""
    params, states, xs, resets, reset_states, first, in_reverse, saved = residuals
    d_last, d_sequences = cotangents
    cell, hidden, steps, operand_dtype = static.cell, states[0].shape[-1], xs.shape[1], static.operand_dtype
    f32 = jnp.dtype(jnp.float32)
    w_hh = params.w_hh.astype(operand_dtype)
    residual_outputs = _residual_outputs(
        static, hidden, xs, in_place=not static.remat and not dict(cell.residuals).keys() <= saved.keys()
    )
    over = next((array.name for array in residual_outputs if array.over), None)
    outputs = [_bridge.Output("dxp", True, cell.gates * hidden, operand_dtype, over)]
    outputs += [_bridge.Output(name, True, hidden, operand_dtype) for name in cell.hidden_grads]
    outputs += [_bridge.Output(f"d{s}0", False, hidden, f32) for s in cell.states]
    if reset_states:
        outputs += [_bridge.Output(f"dreset_{s}", True, hidden, f32) for s in cell.states]

    stepped = reset_states if static.reset_state == "stepped" else None
    fused = _fuses_weight_grads(static, xs, hidden)

    def run(d_last: tuple[Array, ...], sequences: Any, start: Any) -> tuple[tuple[Array, ...], Any, Any]:
        x, reset, new, residuals, d_each = sequences
        new = new or reset_states
        beginnings = _possible_first_steps(static, in_reverse, start, x.shape[1], steps)
        previous = {}
        for k, s in enumerate(cell.states):
            if f"{s}s" in saved and not fused:
                before = _state_before(static, saved[f"{s}s"], states[k], start, x.shape[1])
                previous[s] = _states_before(
                    static, residuals[f"{s}s"], before, reset, new[k] if new else None, in_reverse
                )
        if static.remat:
            h_prev = previous["h"].astype(operand_dtype)
            xp = _input_projection(static, params, x, first, beginnings)
            hp = reference.matmul(h_prev, params.w_hh.astype(operand_dtype), static.precision, f32)
            residuals = cell.compute_residuals(params, xp, hp, {s: value.astype(f32) for s, value in previous.items()})
            for array in residual_outputs:
                if _residual_fits_float16(array.name, static):  # clamped as in the kernel
                    residuals[array.name] = jnp.clip(residuals[array.name], -65504.0, 65504.0).astype(array.dtype)

        arrays: dict[str, Array | None] = {"w_hh": w_hh[None], "reset": reset}
        arrays |= {array.name: residuals[array.name] for array in residual_outputs}
        arrays |= {f"d{s}s": d for s, d in d_each.items()}
        arrays |= {f"d{s}_last": d for s, d in zip(cell.states, d_last, strict=True)}
        results = _bridge.launch(
            cell.name, "bwd", arrays, outputs, reset_state="zeros", reverse=static.reverse,
            precision=static.kernel_precision, may_scan=static.may_scan,
        )  # fmt: skip

        dxp, hidden_grads = results["dxp"], {name: results[name] for name in cell.hidden_grads}
        dx = jnp.einsum("gtby,xy->gtbx", dxp, params.w_ih.astype(operand_dtype), precision=static.precision,
                        preferred_element_type=f32)  # fmt: skip
        if fused:
            sums = _fused_weight_grads(static, x, residuals["hs"], states[0], reset, dxp, hidden_grads)
        else:
            sums = _weight_grads(static, x, previous["h"], dxp, hidden_grads)
        parts = {}
        if first is not None:
            at_each = [jnp.where(begins, dxp[:, at].astype(f32), jnp.zeros_like(first)) for at, begins in beginnings]
            sums["first"] = functools.reduce(jnp.add, at_each)
        parts["xs"] = dx.astype(xs.dtype)
        for s, value in zip(cell.states, reset_states or (), strict=False):
            d = results[f"dreset_{s}"]
            if static.reset_state == "stepped":
                parts[f"reset_{s}"] = d.astype(value.dtype)
            else:  # the kernel writes one gradient per step, mostly zeros: a sum in the kernel would cost registers
                sums[f"reset_{s}"] = d.sum(axis=1)
        return tuple(results[f"d{s}0"] for s in cell.states), sums, parts

    size = chunk_steps(cell, xs, hidden) if static.remat else steps
    sequences = (xs, resets, stepped, saved, d_sequences)
    d_first, sums, parts = _in_chunks(run, d_last, sequences, size, last_first=not static.reverse)
    weights = {name: w for name, w in params._asdict().items() if w is not None}
    dparams = type(params)(**{name: sums[name].astype(w.dtype) for name, w in weights.items()})
    dstates = tuple(d.astype(x.dtype) for d, x in zip(d_first, states, strict=True))
    dreset_states = None
    if reset_states:
        found = sums | parts
        dreset_states = tuple(
            found[f"reset_{s}"].astype(x.dtype) for s, x in zip(cell.states, reset_states, strict=True)
        )
    dfirst = None if first is None else sums["first"]
    return dparams, dstates, parts["xs"], dreset_states, dfirst


def _weight_grads(
    static: RecurrenceSpec, xs: Array, h_prev: Array, dxp: Array, hidden_grads: dict[str, Array]
) -> dict[str, Array]:
    """Returns the gradients of weights and biases by params field, from the states before each step, `h_prev`."""
    cell, spec = static.cell, "gtbx,gtby->xy"
    xs, h_prev = xs.astype(static.operand_dtype), h_prev.astype(static.operand_dtype)

    def contract(x: Array, y: Array, precision: Any = static.precision) -> Array:
        """Returns `x^T @ y`, summed over groups, steps and batch."""
        return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)

    recurrent = jax.lax.Precision.HIGHEST if h_prev.shape[-1] <= rules.FULL_PRECISION_WIDTH else static.precision
    if static.uses_tf32 and _bridge.is_features_first_profitable(math.prod(xs.shape[:-1]), dxp.shape[-1]):
        xs, h_prev, spec = layouts.features_first(xs), layouts.features_first(h_prev), "xgtb,gtby->xy"
    contract_states = functools.partial(contract, h_prev, precision=recurrent)
    return {
        "w_ih": contract(xs, dxp), cell.bias: cells.bias_grad(dxp),
        **cell.recurrent_grads(contract_states, dxp, hidden_grads),
    }  # fmt: skip


def _fuses_weight_grads(static: RecurrenceSpec, xs: Array, hidden: int) -> bool:
    """Whether one launch computes the gradients of weights and biases, which needs all steps in one direction."""
    if static.remat or static.reset_state != "zeros" or static.reverse == "bidirectional":
        return False
    if static.operand_dtype == jnp.float32 and not static.uses_tf32:
        return False
    gates, separate = static.cell.gates * hidden, bool(static.cell.hidden_grads)
    return _bridge.is_weight_grads_launch_profitable(xs.shape, hidden, gates, static.operand_dtype, separate)


def _fused_weight_grads(
    static: RecurrenceSpec,
    xs: Array,
    hs: Array,
    h0: Array,
    resets: Array | None,
    dxp: Array,
    hidden_grads: dict[str, Array],
) -> dict[str, Array]:
    """Returns the gradients of `_weight_grads` by one launch, from the states after each step, `hs`."""
    cell, dtype = static.cell, static.operand_dtype
    arrays: dict[str, Array | None] = {"x": xs.astype(dtype), "hs": hs.astype(dtype), "h0": h0.astype(dtype)}
    arrays |= {"reset": resets, "dxp": dxp} | hidden_grads
    models = {name: None if x is None else x[None] for name, x in arrays.items()}
    grads = _bridge.launch_weight_grads(models, reverse=static.reverse is True)
    return {cell.bias if name == "bias" else name: x[0] for name, x in grads.items()}


def _zero_cotangent(resets: Array | None) -> Any:
    if resets is None:
        return None
    if jnp.issubdtype(resets.dtype, jnp.floating):
        return jnp.zeros_like(resets)
    return np.zeros(resets.shape, jax.dtypes.float0)


recurrence.defvjp(_recurrence_fwd, _recurrence_bwd)
