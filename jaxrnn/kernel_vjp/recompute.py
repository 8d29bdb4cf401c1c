"""The residuals of a chunk of time, recomputed under `remat` from the states that the forward pass saved.

One forward launch recomputes them. It cuts the chunk into segments of time, which run side by side as further sequences
of fewer steps, each from the saved state before it. If the residuals can be computed from the states, there is no
launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jaxrnn import _bridge
from jaxrnn.call import Call
from jaxrnn.cells import base
from jaxrnn.kernel_vjp.history import History, states_before_segments
from jaxrnn.kernel_vjp.launch import forward_inputs, launch_pass
from jaxrnn.kernel_vjp.spec import KernelSpec
from jaxrnn.numerics import cast_clamped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array


# The first limit is the largest product of sequences and segments, at the traced shapes; `vmap` over seeds multiplies
# it further. The second limit is the smallest number of steps of a segment, because each tile of sequences first loads
# the weights, which takes as long as a few steps. On an H100, a pass of a GRU of 64 sequences, 512 steps and 128 units
# takes 1.09 ms without segments, 0.89 ms with four and 0.84 ms with sixteen; with 128 steps, it takes 0.307 ms, 0.262
# ms with four and 0.251 ms with eight. These limits allow eight and four.
_MAX_SEQUENCES = 512
_MIN_STEPS = 32


def can_compute_from_states(spec: KernelSpec, saved: dict[str, Array]) -> bool:
    """Returns whether the residuals can be computed from the saved states. States in 16 bits are rounded too much."""
    states = [saved[f"{s}s"] for s in spec.cell.states]
    return spec.cell.activations_from_states is not None and all(x.dtype == jnp.float32 for x in states)


def residuals_from_states(
    spec: KernelSpec, outputs: Sequence[_bridge.Output], history: History
) -> dict[str, Array]:  # fmt: skip
    """Returns the residuals of a chunk, which `outputs` describe, by name. Requires `can_compute_from_states`."""
    cell = spec.cell
    assert cell.activations_from_states is not None
    activations = cell.activations_from_states(tuple(history.after[s] for s in cell.states))
    residuals = base.residuals_of(
        cell, activations, tuple(history.previous[s].astype(jnp.float32) for s in cell.states)
    )
    return {output.name: cast_clamped(residuals[output.name], output.dtype) for output in outputs}


def recomputed_residuals(
    spec: KernelSpec, chunk: Call, weights: dict[str, Array], outputs: Sequence[_bridge.Output], history: History,
    first_steps: list[tuple[int, Any]],
) -> dict[str, Array]:  # fmt: skip
    """Returns the residuals of a chunk, which `outputs` describe, by name; with a norm also "scale", its factor."""
    cell, f32 = spec.cell, jnp.dtype(jnp.float32)
    groups, steps, batch, hidden = history.after["h"].shape
    count = _count_segments(spec, steps, groups * batch)

    def cut(x: Array) -> Array:
        return x.reshape(groups * count, steps // count, *x.shape[2:])

    inputs = forward_inputs(spec, chunk, first_steps)
    arrays: dict[str, Array | None] = {name: None if x is None else cut(x) for name, x in inputs.items()}
    arrays |= weights
    for s in cell.states:
        initial = states_before_segments(spec, history.after[s], history.before[s], count, chunk.in_reverse)
        arrays[f"{s}0"] = initial.astype(f32).reshape(-1, *initial.shape[2:])
    for s, x in zip(cell.states, chunk.reset_states or (), strict=False):
        arrays[f"reset_{s}"] = cut(x) if spec.reset_state == "stepped" else jnp.repeat(x, count, axis=0)
    if cell.norm:
        outputs = [*outputs, _bridge.Output("scale", f32, 1)]
    # the kernel also writes the hidden states and the last states, which are not used: the caller has them
    known = [_bridge.Output("hs", f32, hidden)]
    known += [_bridge.Output(f"{s}_last", f32, hidden, stepped=False) for s in cell.states]
    results = launch_pass(spec, "fwd", chunk, arrays, [*known, *outputs])
    return {x.name: results[x.name].reshape(groups, steps, *results[x.name].shape[2:]) for x in outputs}


def _count_segments(spec: KernelSpec, steps: int, sequences: int) -> int:
    """Returns the number of segments of equal length that a chunk is cut into, a divisor of its steps.

    It is 1 at widths where few sequences are multiplied in full float32 and many in TF32. Segments add sequences, and
    this launch must multiply as the forward pass did, also under `vmap`. A simple cell with a ReLU has more such
    widths, but its residuals are computed from its states, without a launch.
    """
    if spec.uses_tf32 and _bridge.may_have_float32_residuals(spec.hidden, 1):
        return 1
    most = max(1, min(steps // _MIN_STEPS, _MAX_SEQUENCES // max(sequences, 1)))
    return next(count for count in range(most, 0, -1) if steps % count == 0)
