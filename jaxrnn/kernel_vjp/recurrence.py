"""The recurrence with the kernels, on canonical arrays: one `_bridge.Differentiable` for all cells.

Canonical arrays are `[G, T, B, W]`: G groups of B sequences, time first inside a group. The batching rule of a launch
turns the axis of a `jax.vmap` into groups, or into models if weights are batched. Each pass is a function of
a chunk of time: with `remat`, `in_chunks` calls it for one chunk after the other; otherwise all steps are one chunk.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import _bridge, sharding
from jaxrnn.call import Call
from jaxrnn.cells import norm
from jaxrnn.kernel_vjp.chunks import chunk_steps, in_chunks
from jaxrnn.kernel_vjp.history import History, history_of
from jaxrnn.kernel_vjp.in_scan import in_scan
from jaxrnn.kernel_vjp.launch import forward_weights, launch_backward, launch_forward, possible_first_steps
from jaxrnn.kernel_vjp.recompute import can_compute_from_states, recomputed_residuals, residuals_from_states
from jaxrnn.kernel_vjp.spec import KernelSpec, has_residuals_in_place, residual_outputs
from jaxrnn.kernel_vjp.tangents import has_tangents, run_hessian, run_tangent
from jaxrnn.kernel_vjp.weight_grads import has_weight_grads_launch, launch_weight_grads, weight_grads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array


def recurrence(spec: KernelSpec, call: Call) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """Runs the recurrence on canonical arrays; returns the last states and, by name, the states of every step.

    Args:
      spec: all that is known when the call is traced.
      call: `params` of one model and without a projection; `states`, each `[G, B, H]`; `xs [G, T, B, D]`;
        `resets [G, T, B]` or None; `reset_states`, as `spec.reset_state` says: None for "zeros", each `[G, B, H]` for
        "fixed", and `[G, T, B, H]` for "stepped"; `first [G, B, gates * H]` or None. An LSTM with a projection uses
        `first` for the product of its initial hidden state and the recurrent weights. `in_reverse` is given if
        `spec.reverse` is "bidirectional".
    """
    further = (run_tangent, run_hessian, len(spec.cell.states)) if has_tangents(spec, call) else ()
    run = _bridge.Differentiable(spec.cell.name, spec, _run_forward, _run_backward, in_scan, *further)
    return run(call._replace(resets=jax.lax.stop_gradient(call.resets)))


def _run_forward(spec: KernelSpec, save: bool, call: Call) -> tuple[Any, dict[str, Array]]:
    """Also returns what the backward pass needs by name: residuals or, with `remat`, states; {} without `save`."""
    last, sequences, results = sharding.shard_over_vmapped_axes(functools.partial(_forward, spec, save), call)
    needed = [f"{s}s" for s in spec.cell.states] if spec.remat else [*dict(spec.cell.residuals), "scale", "hs"]
    return (last, sequences), {name: results[name] for name in needed if save and name in results}


def _run_backward(
    spec: KernelSpec, save: bool, call: Call, saved: dict[str, Array], cotangents: Any
) -> tuple[Call, list[Array]]:  # fmt: skip
    """Also returns, with `save`, the gradients of the states of all steps, without `remat`."""
    return sharding.shard_over_vmapped_axes(functools.partial(_backward, spec, save), call, saved, cotangents)


def _forward(
    spec: KernelSpec, save_residuals: bool, call: Call
) -> tuple[tuple[Array, ...], dict[str, Array], dict[str, Array]]:  # fmt: skip
    """Computes `recurrence`, and also returns by name all outputs of the launch that have an element for each step.

    With `save_residuals`, these outputs include the residuals or, with `remat`, all states of every step, from which
    the backward pass recomputes the residuals. The arrays are the shards of one device if `vmap` maps over sharded
    axes.
    """
    cell, f32 = spec.cell, jnp.dtype(jnp.float32)
    outputs = [
        _bridge.Output(f"{s}s", x.dtype, spec.hidden)
        for s, x in zip(cell.states, call.states, strict=True)
        if s == "h" or s in spec.returned or (save_residuals and spec.remat)
    ]
    outputs += [_bridge.Output(f"{s}_last", f32, spec.hidden, stepped=False) for s in cell.states]
    if save_residuals and not spec.remat:
        outputs += residual_outputs(spec, call.xs, has_residuals_in_place(spec, math.prod(call.xs.shape[:-1])))
        if cell.norm:
            outputs.append(_bridge.Output("scale", f32, 1))
    states, steps = call.states, call.xs.shape[1]
    size = _chunk_size(spec, call) if save_residuals else steps
    if size < steps:
        states = tuple(x.astype(f32) for x in states)  # the dtype in which a chunk passes them to the next
    run_chunk = functools.partial(_forward_chunk, spec, call, forward_weights(spec, call.params), outputs)
    last, _, results = in_chunks(run_chunk, states, _sequences(spec, call), size, last_first=spec.reverse is True)
    return last, {s: results[f"{s}s"] for s in spec.returned}, results


def _forward_chunk(
    spec: KernelSpec, call: Call, weights: dict[str, Array], outputs: Sequence[_bridge.Output],
    states: tuple[Array, ...], sequences: Any, start: Any,
) -> tuple[tuple[Array, ...], None, dict[str, Array]]:  # fmt: skip
    """Runs the chunk of time that begins at step `start`, as `in_chunks` calls it."""
    chunk = _chunk_of(call, sequences)
    first_steps = possible_first_steps(spec, chunk, start, call.xs.shape[1])
    results = launch_forward(spec, chunk, weights, states, first_steps, outputs)
    return tuple(results.pop(f"{s}_last") for s in spec.cell.states), None, results


def _backward(
    spec: KernelSpec, save: bool, call: Call, saved: dict[str, Array], cotangents: Any
) -> tuple[Call, list[Array]]:  # fmt: skip
    """Computes `_run_backward` for the arrays of `_forward`."""
    d_last, d_sequences = cotangents
    weights = forward_weights(spec, call.params) if spec.remat else {}
    run_chunk = functools.partial(_backward_chunk, spec, save, call, weights, saved)
    sequences = _sequences(spec, call), saved, d_sequences
    # a run in both directions has one chunk
    d_first, sums, per_step = in_chunks(
        run_chunk, d_last, sequences, _chunk_size(spec, call), last_first=spec.reverse is False
    )
    weights = {name: w for name, w in call.params._asdict().items() if w is not None}
    reset_states = None
    if call.reset_states:
        by_name = sums | per_step  # stepped reset states have gradients per step, fixed ones a sum
        reset_states = tuple(
            by_name[f"reset_{s}"].astype(x.dtype) for s, x in zip(spec.cell.states, call.reset_states, strict=True)
        )
    gradients = Call(
        params=type(call.params)(**{name: sums[name].astype(w.dtype) for name, w in weights.items()}),
        states=tuple(d.astype(x.dtype) for d, x in zip(d_first, call.states, strict=True)),
        xs=per_step["xs"],
        resets=None,
        reset_states=reset_states,
        first=sums.get("first"),
    )
    return gradients, [per_step[f"total_d{s}"] for s in spec.cell.states if save]


def _backward_chunk(
    spec: KernelSpec, save: bool, call: Call, weights: dict[str, Array], saved: dict[str, Array],
    d_last: tuple[Array, ...], sequences: Any, start: Any,
) -> tuple[tuple[Array, ...], dict[str, Array], dict[str, Array]]:  # fmt: skip
    """Differentiates the chunk of time that begins at step `start`, as `in_chunks` calls it.

    `d_last` are the gradients of the states after the chunk. Returns the gradients of the states before the chunk, the
    gradients to sum over chunks, and the gradients that have an element for each step.
    """
    arrays, saved_chunk, d_sequences = sequences
    chunk, cell = _chunk_of(call, arrays), spec.cell
    # decided by the whole call, so that all chunks agree
    launches_weight_grads = has_weight_grads_launch(spec, call.xs)
    in_place = cell.has_packed_residuals(saved)
    if spec.remat:
        in_place = has_residuals_in_place(spec, math.prod(call.xs.shape[:-1]))
    from_states = spec.remat and can_compute_from_states(spec, saved)
    outputs = residual_outputs(spec, chunk.xs, in_place)
    history = history_of(
        spec, call, chunk, saved, saved_chunk, start,
        each_step=not launches_weight_grads or cell.norm == "layer" or from_states,
    )  # fmt: skip
    first_steps = possible_first_steps(spec, chunk, start, call.xs.shape[1])

    residuals = saved_chunk
    if from_states:
        residuals = residuals_from_states(spec, outputs, history)
    elif spec.remat:
        residuals = recomputed_residuals(spec, chunk, weights, outputs, history, first_steps)
    results = launch_backward(
        spec, chunk, outputs, residuals, d_last, d_sequences, gates_dtype=spec.operand_dtype, totals=save
    )  # fmt: skip
    sums, dx = _parameter_grads(spec, chunk, history, residuals, results, first_steps, launches_weight_grads)
    per_step = {"xs": dx} | {name: x for name, x in results.items() if name.startswith("total_")}
    for s, value in zip(cell.states, call.reset_states or (), strict=False):
        d = results[f"dreset_{s}"]
        if spec.reset_state == "stepped":
            per_step[f"reset_{s}"] = d.astype(value.dtype)
        else:  # the kernel writes a gradient for each step, because sums in the kernel would take registers
            sums[f"reset_{s}"] = d.sum(axis=1)
    return tuple(results[f"d{s}0"] for s in cell.states), sums, per_step


def _parameter_grads(
    spec: KernelSpec, chunk: Call, history: History, residuals: dict[str, Array], results: dict[str, Array],
    first_steps: list[tuple[int, Any]], launches_weight_grads: bool,
) -> tuple[dict[str, Array], Array]:  # fmt: skip
    """Returns the gradients of the weights, the biases and `first` by name, and that of the inputs of each step."""
    cell, f32, xs, first = spec.cell, jnp.dtype(jnp.float32), chunk.xs, chunk.first
    dxp, hidden_grads = results["dxp"], {name: results[name] for name in cell.hidden_grads}
    w_ih = chunk.params.w_ih.astype(spec.operand_dtype)
    dx = jnp.einsum("gtby,xy->gtbx", dxp, w_ih, precision=spec.precision, preferred_element_type=f32)
    factors, scale, x_mean = xs, None, None
    if cell.norm:
        (factors, x_mean), scale = norm.center(cell, xs), residuals["scale"]
        previous = history.previous["h"].astype(f32) if cell.norm == "layer" else None
        dx += norm.input_grads_through_statistics(results["dnorm"], scale, previous, xs.astype(f32), spec.hidden)
    if launches_weight_grads:
        sums = launch_weight_grads(spec, chunk._replace(xs=factors), history, scale, x_mean, dxp, hidden_grads)
    else:
        sums = weight_grads(spec, factors, history.previous["h"], scale, x_mean, dxp, hidden_grads)
    if first is not None:
        terms = [jnp.where(is_first, dxp[:, at].astype(f32), jnp.zeros_like(first)) for at, is_first in first_steps]
        sums["first"] = functools.reduce(jnp.add, terms)
    return sums, dx.astype(xs.dtype)


def _sequences(spec: KernelSpec, call: Call) -> tuple[Array, Array | None, Any]:
    """Returns the arrays of a call that chunks cut: inputs, resets and the reset states of each step."""
    return call.xs, call.resets, call.reset_states if spec.reset_state == "stepped" else None


def _chunk_of(call: Call, sequences: tuple[Array, Array | None, Any]) -> Call:
    """Returns the call of a chunk of time, given its part of `_sequences`; fixed reset states come whole."""
    xs, resets, stepped = sequences
    return call._replace(xs=xs, resets=resets, reset_states=stepped or call.reset_states)


def _chunk_size(spec: KernelSpec, call: Call) -> int:
    """Returns the number of steps per chunk; without `remat`, all."""
    steps = call.xs.shape[1]
    size = chunk_steps(spec.cell, call.xs, spec.hidden) if spec.remat else steps
    assert size == steps or call.in_reverse is None, "chunks run in one order, so both directions need their own calls"
    return size
