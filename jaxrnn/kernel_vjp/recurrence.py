"""The recurrence with the kernels, on canonical arrays: one `jax.custom_vjp` for all cells.

Canonical arrays are `[G, T, B, W]`: G groups of B sequences, time first inside a group. The batching rule of a launch
turns the axis of a `jax.vmap` into groups, or into models if weights are batched. Each pass is a function `run` of a
chunk of time: with `remat`, `in_chunks` runs it on one chunk after the other; otherwise all steps are one chunk.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn import _bridge, sharding
from jaxrnn.cells import norm
from jaxrnn.kernel_vjp.chunks import chunk_steps, in_chunks
from jaxrnn.kernel_vjp.history import state_before, states_before
from jaxrnn.kernel_vjp.input_projection import input_projection, possible_first_steps
from jaxrnn.kernel_vjp.recompute import can_compute_from_states, recomputed_residuals, residuals_from_states
from jaxrnn.kernel_vjp.spec import (
    RecurrenceSpec,
    has_residuals_in_place,
    residual_outputs,
)
from jaxrnn.kernel_vjp.weight_grads import has_weight_grads_launch, launch_weight_grads, weight_grads

if TYPE_CHECKING:
    from jax import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def recurrence(
    static: RecurrenceSpec, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None,
) -> tuple[tuple[Array, ...], dict[str, Array]]:  # fmt: skip
    """Runs the recurrence on canonical arrays; returns the last states and, by name, the states of every step.

    Args:
      static: cell, dtypes, direction, precision and all else that is known when the call is traced.
      params: the weights, of one model and without a projection.
      states: the states before the first step, `[G, B, H]`, in the order of `cell.states`.
      xs: `[G, T, B, D]`.
      resets: `[G, T, B]` or None.
      reset_states: for each state, as `static.reset_state` says: None for "zeros", `[G, B, H]` for "fixed", and
        `[G, T, B, H]` for "stepped".
      first: `[G, B, gates * H]`, added to the input projection of the step that is computed first, or None. An LSTM
        with a projection uses `first` for the product of its initial hidden state and the recurrent weights.
      in_reverse: if `static.reverse` is "bidirectional", a scalar that says at run time whether this direction goes in
        reverse, else None.
    """
    last, sequences, _ = _forward(
        static, params, states, xs, resets, reset_states, first, in_reverse, save_residuals=False
    )
    return last, sequences


def _forward(
    static: RecurrenceSpec, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None, save_residuals: bool,
) -> tuple[tuple[Array, ...], dict[str, Array], dict[str, Array]]:  # fmt: skip
    """Computes `recurrence`, and also returns by name all outputs of the launch that have an element for each step.

    With `save_residuals`, these outputs include the residuals or, with `remat`, all states of every step, from which
    the backward pass recomputes the residuals.
    """
    run = functools.partial(_forward_on_device, static, save_residuals)
    return sharding.shard_over_vmapped_axes(run, params, states, xs, resets, reset_states, first, in_reverse)


def _forward_on_device(
    static: RecurrenceSpec, save_residuals: bool, params: Any, states: tuple[Array, ...], xs: Array,
    resets: Array | None, reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None,
) -> tuple[tuple[Array, ...], dict[str, Array], dict[str, Array]]:  # fmt: skip
    """Computes `_forward` on the shards of one device if `vmap` maps over sharded axes, else on whole arrays."""
    cell, hidden, steps = static.cell, states[0].shape[-1], xs.shape[1]
    f32 = jnp.dtype(jnp.float32)
    weights = _forward_weights(static, params)
    outputs = [
        _bridge.Output(f"{s}s", True, hidden, x.dtype)
        for s, x in zip(cell.states, states, strict=True)
        if s == "h" or s in static.returned or (save_residuals and static.remat)
    ]
    outputs += [_bridge.Output(f"{s}_last", False, hidden, f32) for s in cell.states]
    if save_residuals and not static.remat:
        in_place = has_residuals_in_place(static, hidden, math.prod(xs.shape[:-1]))
        outputs += residual_outputs(static, hidden, xs, in_place)
        if cell.norm:
            outputs.append(_bridge.Output("scale", True, 1, f32))

    stepped = reset_states if static.reset_state == "stepped" else None

    def run(states: tuple[Array, ...], sequences: Any, start: Any) -> tuple[tuple[Array, ...], None, dict[str, Array]]:
        """Runs the chunk of time that begins at step `start`, as `in_chunks` calls it."""
        x, reset, chunk_reset_states = sequences
        first_steps = possible_first_steps(static, in_reverse, start, x.shape[1], steps)
        xp = input_projection(static, params, x, first, first_steps)
        arrays: dict[str, Array | None] = weights | {"xp": xp}
        if cell.norm:
            arrays |= norm.input_statistics(cell, x, hidden)
        episode_states = chunk_reset_states or reset_states  # stepped reset states come by chunk, fixed ones whole
        arrays |= {"reset": reset} | {f"{s}0": x for s, x in zip(cell.states, states, strict=True)}
        arrays |= {f"reset_{s}": x for s, x in zip(cell.states, episode_states or (), strict=False)}
        results = _bridge.launch(
            cell.name, "fwd", arrays, outputs, reset_state=static.reset_state, reverse=static.reverse,
            precision=static.kernel_precision, may_use_xla=static.may_use_xla,
            norm_width=_norm_width(static, xs, hidden),
        )  # fmt: skip
        return tuple(results.pop(f"{s}_last") for s in cell.states), None, results

    size = _chunk_size(static, xs, hidden, in_reverse) if save_residuals else steps
    if size < steps:
        states = tuple(x.astype(f32) for x in states)  # the dtype in which a chunk passes them to the next
    last, _, results = in_chunks(run, states, (xs, resets, stepped), size, last_first=static.reverse is True)
    return last, {s: results[f"{s}s"] for s in static.returned}, results


class _Kept(NamedTuple):
    """Holds the arguments of `recurrence` and the arrays that the forward pass saves for the backward pass.

    Attributes:
      saved: by name the residuals or, with `remat`, all states of every step.
    """

    params: Any
    states: tuple[Array, ...]
    xs: Array
    resets: Array | None
    reset_states: tuple[Array, ...] | None
    first: Array | None
    in_reverse: Array | None
    saved: dict[str, Array]


def _recurrence_fwd(
    static: RecurrenceSpec, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None,
) -> tuple[Any, Any]:  # fmt: skip
    last, sequences, results = _forward(
        static, params, states, xs, resets, reset_states, first, in_reverse, save_residuals=True
    )
    needed = [f"{s}s" for s in static.cell.states] if static.remat else [*dict(static.cell.residuals), "scale", "hs"]
    saved = {name: results[name] for name in needed if name in results}
    return (last, sequences), _Kept(params, states, xs, resets, reset_states, first, in_reverse, saved)


def _recurrence_bwd(static: RecurrenceSpec, kept: _Kept, cotangents: Any) -> tuple[Any, ...]:
    run = functools.partial(_backward_on_device, static)
    dparams, dstates, dxs, dreset_states, dfirst = sharding.shard_over_vmapped_axes(run, kept, cotangents)
    dresets, din_reverse = _zero_cotangent(kept.resets), _zero_cotangent(kept.in_reverse)
    return dparams, dstates, dxs, dresets, dreset_states, dfirst, din_reverse


def _backward_on_device(static: RecurrenceSpec, kept: _Kept, cotangents: Any) -> tuple[Any, ...]:
    """Returns the gradients of the differentiable arguments of `recurrence`, for the arrays of `_forward_on_device`."""
    params, states, xs, resets, reset_states, first, in_reverse, saved = kept
    d_last, d_sequences = cotangents
    cell, hidden, steps, operand_dtype = static.cell, states[0].shape[-1], xs.shape[1], static.operand_dtype
    f32 = jnp.dtype(jnp.float32)
    w_hh = params.w_hh.astype(operand_dtype)
    size = _chunk_size(static, xs, hidden, in_reverse)
    if static.remat:
        in_place = has_residuals_in_place(static, hidden, math.prod(xs.shape[:-1]))
    else:
        in_place = cell.has_packed_residuals(saved)
    residual_arrays = residual_outputs(static, hidden, xs, in_place)
    launches_weight_grads = has_weight_grads_launch(static, xs, hidden)
    from_states = static.remat and can_compute_from_states(static, [saved[f"{s}s"] for s in cell.states])
    needs_previous = not launches_weight_grads or cell.norm == "layer" or from_states
    forward_weights = _forward_weights(static, params) if static.remat else {}
    # where the residuals overwrite `xp`, the gradients of the gates overwrite the residuals
    overwritten = next((array.name for array in residual_arrays if array.over), None)
    outputs = [_bridge.Output("dxp", True, cell.gates * hidden, operand_dtype, overwritten)]
    outputs += [_bridge.Output(name, True, hidden, operand_dtype) for name in cell.hidden_grads]
    if cell.norm:
        outputs.append(_bridge.Output("dnorm", True, 1, f32))
    outputs += [_bridge.Output(f"d{s}0", False, hidden, f32) for s in cell.states]
    if reset_states:
        outputs += [_bridge.Output(f"dreset_{s}", True, hidden, f32) for s in cell.states]

    stepped = reset_states if static.reset_state == "stepped" else None

    def run(d_last: tuple[Array, ...], sequences: Any, start: Any) -> tuple[tuple[Array, ...], Any, Any]:
        """Differentiates the chunk of time that begins at step `start`, as `in_chunks` calls it.

        `d_last` are the gradients of the states after the chunk. Returns the gradients of the states before the chunk,
        the gradients to sum over chunks, and the gradients that have an element for each step.
        """
        x, reset, chunk_reset_states, saved_chunk, d_sequences = sequences
        episode_states = chunk_reset_states or reset_states  # stepped reset states come by chunk, fixed ones whole
        first_steps = possible_first_steps(static, in_reverse, start, x.shape[1], steps)
        before, previous = {}, {}
        for s, state, new in zip(cell.states, states, episode_states or [None] * len(states), strict=True):
            if f"{s}s" in saved:
                before[s] = state_before(static, saved[f"{s}s"], state, start, x.shape[1])
                if needs_previous:
                    previous[s] = states_before(static, saved_chunk[f"{s}s"], before[s], reset, new, in_reverse)
        residuals = saved_chunk
        chunk_states = {s: saved_chunk[f"{s}s"] for s in before}
        if from_states:
            residuals = residuals_from_states(static, residual_arrays, chunk_states, previous)
        elif static.remat:
            inputs = {"xp": input_projection(static, params, x, first, first_steps), "reset": reset}
            if cell.norm:
                inputs |= norm.input_statistics(cell, x, hidden)
            residuals = recomputed_residuals(
                static, forward_weights, residual_arrays, inputs, states=chunk_states, before=before,
                reset_states=dict(zip(cell.states, episode_states or (), strict=False)), in_reverse=in_reverse,
                norm_width=_norm_width(static, x, hidden),
            )  # fmt: skip

        arrays: dict[str, Array | None] = {"w_hh": w_hh[None], "reset": reset}
        arrays |= {array.name: residuals[array.name] for array in residual_arrays}
        if cell.norm:
            arrays["scale"] = residuals["scale"]
        arrays |= {f"d{s}s": d for s, d in d_sequences.items()}
        arrays |= {f"d{s}_last": d for s, d in zip(cell.states, d_last, strict=True)}
        # the backward kernel computes the same for every kind of reset state
        results = _bridge.launch(
            cell.name, "bwd", arrays, outputs, reset_state="zeros", reverse=static.reverse,
            precision=static.kernel_precision, may_use_xla=static.may_use_xla,
            norm_width=_norm_width(static, xs, hidden),
        )  # fmt: skip

        dxp, hidden_grads = results["dxp"], {name: results[name] for name in cell.hidden_grads}
        dx = jnp.einsum("gtby,xy->gtbx", dxp, params.w_ih.astype(operand_dtype), precision=static.precision,
                        preferred_element_type=f32)  # fmt: skip
        if cell.norm:
            before_step = previous["h"].astype(f32) if cell.norm == "layer" else None
            dx += norm.input_grads_through_statistics(
                results["dnorm"], residuals["scale"], before_step, x.astype(f32), hidden
            )
        factors, scale, x_mean = x, None, None
        if cell.norm:
            (factors, x_mean), scale = norm.center(cell, x), residuals["scale"]
        if launches_weight_grads:
            reset_h = episode_states[0] if episode_states else None
            sums = launch_weight_grads(
                static, factors, saved_chunk["hs"], before["h"], reset, reset_h, scale, x_mean, dxp, hidden_grads
            )
        else:
            sums = weight_grads(static, factors, previous["h"], scale, x_mean, dxp, hidden_grads)
        if first is not None:
            terms = [jnp.where(is_first, dxp[:, at].astype(f32), jnp.zeros_like(first)) for at, is_first in first_steps]
            sums["first"] = functools.reduce(jnp.add, terms)
        per_step = {"xs": dx.astype(xs.dtype)}
        for s, value in zip(cell.states, reset_states or (), strict=False):
            d = results[f"dreset_{s}"]
            if static.reset_state == "stepped":
                per_step[f"reset_{s}"] = d.astype(value.dtype)
            else:  # the kernel writes a gradient for each step, because sums in the kernel would take registers
                sums[f"reset_{s}"] = d.sum(axis=1)
        return tuple(results[f"d{s}0"] for s in cell.states), sums, per_step

    sequences = (xs, resets, stepped, saved, d_sequences)
    # a run in both directions has one chunk
    d_first, sums, per_step = in_chunks(run, d_last, sequences, size, last_first=static.reverse is False)
    weights = {name: w for name, w in params._asdict().items() if w is not None}
    dparams = type(params)(**{name: sums[name].astype(w.dtype) for name, w in weights.items()})
    dstates = tuple(d.astype(x.dtype) for d, x in zip(d_first, states, strict=True))
    dreset_states = None
    if reset_states:
        by_name = sums | per_step  # stepped reset states have gradients per step, fixed ones a sum
        dreset_states = tuple(
            by_name[f"reset_{s}"].astype(x.dtype) for s, x in zip(cell.states, reset_states, strict=True)
        )
    dfirst = None if first is None else sums["first"]
    return dparams, dstates, per_step["xs"], dreset_states, dfirst


def _chunk_size(static: RecurrenceSpec, xs: Array, hidden: int, in_reverse: Array | None) -> int:
    """Returns the number of steps per chunk; without `remat`, all."""
    steps = xs.shape[1]
    size = chunk_steps(static.cell, xs, hidden) if static.remat else steps
    assert size == steps or in_reverse is None, "chunks run in one order, so both directions need calls of their own"
    return size


def _forward_weights(static: RecurrenceSpec, params: Any) -> dict[str, Array | None]:
    """Returns the weights and biases that a forward launch takes, by name."""
    weights: dict[str, Array | None] = {"w_hh_t": params.w_hh.astype(static.operand_dtype).T[None]}
    return weights | {name: b[None] for name, b in _biases(static, params).items()}


def _biases(static: RecurrenceSpec, params: Any) -> dict[str, Array]:
    """Returns the biases that a launch adds, by name, in float32.

    `b_hn` is added to the last gate's product with the state, and `bias` after a norm. `w_sum` times the mean of the
    inputs is subtracted before a LayerNorm.
    """
    biases = {"b_hn": params.b_hn} if static.cell.last_gate_separate else {}
    if static.cell.norm:
        biases["bias"] = getattr(params, static.cell.bias)
    if static.cell.norm == "layer":
        biases["w_sum"] = norm.sum_of_weights(params)
    return {name: b.astype(jnp.float32) for name, b in biases.items()}


def _norm_width(static: RecurrenceSpec, xs: Array, hidden: int) -> int:
    """Returns the width of inputs and state together, which a norm sees; 0 if the cell has no norm."""
    return xs.shape[-1] + hidden if static.cell.norm else 0


def _zero_cotangent(x: Array | None) -> Any:
    """Returns the zero gradient that `jax.custom_vjp` requires for an argument that has no gradient."""
    if x is None:
        return None
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


recurrence.defvjp(_recurrence_fwd, _recurrence_bwd)
