"""The launch of a chunk of time, and what a forward launch reads: weights, and the projection of the inputs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import _bridge
from jaxrnn.call import Call
from jaxrnn.cells import base, norm
from jaxrnn.kernel_vjp.spec import KernelSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array


def launch_pass(
    spec: KernelSpec, direction: str, call: Call, arrays: dict[str, Array | None], outputs: Sequence[_bridge.Output]
) -> dict[str, Array]:
    """Launches the kernel of a direction on arrays by name: `_bridge.launch` with the options of a spec.

    The direction is "fwd", "bwd" or, for the tangent of the forward pass, "tangent".
    """
    # the backward kernel computes the same for every kind of reset state, and tangents start from zeros
    return _bridge.launch(
        spec.cell.name, direction, arrays, outputs, reset_state=spec.reset_state if direction == "fwd" else "zeros",
        reverse=spec.reverse, precision=spec.kernel_precision, may_use_xla=spec.may_use_xla,
        norm_width=call.xs.shape[-1] + spec.hidden if spec.cell.norm else 0,
    )  # fmt: skip


def launch_forward(
    spec: KernelSpec, chunk: Call, weights: dict[str, Array], states: Sequence[Array],
    first_steps: list[tuple[int, Any]], outputs: Sequence[_bridge.Output],
) -> dict[str, Array]:  # fmt: skip
    """Launches the forward kernel on what `forward_weights` returns and a chunk that starts from `states`."""
    cell = spec.cell
    arrays = forward_inputs(spec, chunk, first_steps) | weights
    arrays |= {f"{s}0": x for s, x in zip(cell.states, states, strict=True)}
    arrays |= {f"reset_{s}": x for s, x in zip(cell.states, chunk.reset_states or (), strict=False)}
    return launch_pass(spec, "fwd", chunk, arrays, outputs)


def launch_backward(
    spec: KernelSpec, chunk: Call, residual_outputs: Sequence[_bridge.Output], residuals: dict[str, Array],
    d_last: tuple[Array, ...], d_sequences: dict[str, Array], *, gates_dtype: Any, totals: bool = False,
) -> dict[str, Array]:  # fmt: skip
    """Launches the backward kernel; returns by name the gradients of the gates, the states and the reset states.

    Those of the gates have `gates_dtype`. With `totals`, also returns those of the states of all steps, such as
    "total_dh".
    """
    cell, hidden, f32 = spec.cell, spec.hidden, jnp.dtype(jnp.float32)
    arrays: dict[str, Array | None] = {"w_hh": chunk.params.w_hh.astype(spec.operand_dtype)[None]}
    arrays |= {"reset": chunk.resets} | {output.name: residuals[output.name] for output in residual_outputs}
    if cell.norm:
        arrays["scale"] = residuals["scale"]
    arrays |= {f"d{s}s": d for s, d in d_sequences.items()}
    arrays |= {f"d{s}_last": d for s, d in zip(cell.states, d_last, strict=True)}
    # where the residuals overwrite `xp`, the gradients of the gates overwrite the residuals
    overwritten = next((output.name for output in residual_outputs if output.over), None)
    outputs = [_bridge.Output("dxp", gates_dtype, cell.gates * hidden, over=overwritten)]
    outputs += [_bridge.Output(name, gates_dtype, hidden) for name in cell.hidden_grads]
    if cell.norm:
        outputs.append(_bridge.Output("dnorm", f32, 1))
    outputs += [_bridge.Output(f"d{s}0", f32, hidden, stepped=False) for s in cell.states]
    if chunk.reset_states:
        outputs += [_bridge.Output(f"dreset_{s}", f32, hidden) for s in cell.states]
    if totals:
        outputs += [_bridge.Output(f"total_d{s}", f32, hidden) for s in cell.states]
    return launch_pass(spec, "bwd", chunk, arrays, outputs)


def possible_first_steps(spec: KernelSpec, chunk: Call, start: Any, steps: int) -> list[tuple[int, Any]]:
    """Returns where in a chunk the loop may begin, as `(index in the chunk, whether the loop begins there)`.

    The chunk begins at step `start` of `steps`.
    """
    size = chunk.xs.shape[1]
    if chunk.in_reverse is not None:
        return [(0, ~chunk.in_reverse), (size - 1, chunk.in_reverse)]
    return [(size - 1, start + size == steps) if spec.reverse else (0, start == 0)]


def forward_weights(spec: KernelSpec, params: Any) -> dict[str, Array]:
    """Returns the weights and biases that a forward launch reads, by name."""
    weights = {"w_hh_t": params.w_hh.astype(spec.operand_dtype).T[None]}
    return weights | {name: b[None] for name, b in _biases(spec, params).items()}


def forward_inputs(spec: KernelSpec, chunk: Call, first_steps: list[tuple[int, Any]]) -> dict[str, Array | None]:
    """Returns what a forward launch reads that has an element for each step, by name."""
    inputs: dict[str, Array | None] = {"xp": _input_projection(spec, chunk, first_steps), "reset": chunk.resets}
    if spec.cell.norm:
        inputs |= norm.input_statistics(spec.cell, chunk.xs, spec.hidden)
    return inputs


def _biases(spec: KernelSpec, params: Any) -> dict[str, Array]:
    """Returns the biases that a launch adds, by name, in float32.

    `b_hn` is added to the last gate's product with the state, and `bias` after a norm. `w_sum` times the mean of the
    inputs is subtracted before a LayerNorm.
    """
    biases = {"b_hn": params.b_hn} if spec.cell.last_gate_separate else {}
    if spec.cell.norm:
        biases["bias"] = getattr(params, spec.cell.bias)
    if spec.cell.norm == "layer":
        biases["w_sum"] = norm.sum_of_weights(params)
    return {name: b.astype(jnp.float32) for name, b in biases.items()}


def _input_projection(spec: KernelSpec, chunk: Call, first_steps: list[tuple[int, Any]]) -> Array:
    """Returns the input projection `[G, T, B, gates * H]`, with `first` added at the step where the loop begins.

    Its dtype is float32, or float16 where that makes kernels with bfloat16 operands faster.
    """
    params, xs, first = chunk.params, chunk.xs, chunk.first
    cell, dtype = spec.cell, spec.operand_dtype
    inputs, gates = params.w_ih.shape
    by_kernel = (spec.uses_tf32 or dtype == jnp.bfloat16) and first is None and not cell.norm
    if by_kernel and _bridge.may_launch_projection(math.prod(xs.shape[:-1]), inputs, gates, dtype):
        bias = getattr(params, cell.bias).astype(jnp.float32)
        return _bridge.launch_projection(
            xs.astype(dtype), params.w_ih.astype(dtype), bias, jnp.float32 if spec.uses_tf32 else jnp.float16,
            precision=spec.precision, or_product=True, may_use_xla=spec.may_use_xla,
        )  # fmt: skip
    return projection_in_xla(spec, chunk, first_steps)


def projection_in_xla(spec: KernelSpec, chunk: Call, first_steps: list[tuple[int, Any]]) -> Array:
    """Returns the input projection in float32, by operations that XLA differentiates."""
    first = chunk.first
    xp = (norm if spec.cell.norm else base).project(spec.cell, chunk.params, chunk.xs, spec.precision)
    if first is not None:
        for at, is_first in first_steps:  # XLA updates xp in place
            step = xp[:, at : at + 1] + jnp.where(is_first, first, jnp.zeros_like(first))[:, None]
            xp = jax.lax.dynamic_update_slice_in_dim(xp, step, at, axis=1)
    return xp
