"""The residuals of a chunk of time, recomputed under `remat` from the states that the forward pass saved.

One forward launch recomputes them. It cuts the chunk into segments of time, which run side by side as further sequences
of fewer steps, each from the saved state before it. If the residuals can be computed from the states, there is no
launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from jaxrnn import _bridge
from jaxrnn.cells import base
from jaxrnn.kernel_vjp.history import states_before_segments
from jaxrnn.kernel_vjp.spec import RecurrenceSpec
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


def can_compute_from_states(static: RecurrenceSpec, states: Sequence[Array]) -> bool:
    """Returns whether the residuals can be computed from the saved states. States in 16 bits are rounded too much."""
    return static.cell.activations_from_states is not None and all(x.dtype == jnp.float32 for x in states)


def residuals_from_states(
    static: RecurrenceSpec, residuals: Sequence[_bridge.Output], states: dict[str, Array], previous: dict[str, Array]
) -> dict[str, Array]:  # fmt: skip
    """Returns the residuals of a chunk by name. Requires `can_compute_from_states`.

    Args:
      static: the static arguments.
      residuals: the arrays to return.
      states: by the name of a state, the states after each step, `[G, T, B, H]`.
      previous: by the name of a state, the states before each step, with resets applied, `[G, T, B, H]`.
    """
    cell = static.cell
    assert cell.activations_from_states is not None
    activations = cell.activations_from_states(tuple(states[s] for s in cell.states))
    found = base.residuals_of(cell, activations, tuple(previous[s].astype(jnp.float32) for s in cell.states))
    return {output.name: cast_clamped(found[output.name], output.dtype) for output in residuals}


def recomputed_residuals(
    static: RecurrenceSpec, weights: dict[str, Array | None], residuals: Sequence[_bridge.Output],
    inputs: dict[str, Array | None], *, states: dict[str, Array], before: dict[str, Array],
    reset_states: dict[str, Array], in_reverse: Array | None, norm_width: int,
) -> dict[str, Array]:  # fmt: skip
    """Returns the residuals of a chunk by name, and for a cell with a norm also "scale", its factor at each step.

    Args:
      static: the static arguments.
      weights: the weights and biases that the forward launch takes, by name.
      residuals: the outputs of the forward launch that hold the residuals.
      inputs: the inputs of the forward launch that have an element for each step, by name, `[G, T, B, ...]`.
      states: by the name of a state, the states after each step, `[G, T, B, H]`.
      before: by the name of a state, the state before the chunk, `[G, B, H]`.
      reset_states: by the name of a state, the reset states, as in `recurrence`; empty for zeros.
      in_reverse: as in `recurrence`.
      norm_width: as in `_bridge.launch`.
    """
    cell, f32 = static.cell, jnp.dtype(jnp.float32)
    groups, steps, batch, hidden = states["h"].shape
    count = _count_segments(static, steps, groups * batch, hidden)

    def cut(x: Array) -> Array:
        return x.reshape(groups * count, steps // count, *x.shape[2:])

    arrays = weights | {name: None if x is None else cut(x) for name, x in inputs.items()}
    for s in cell.states:
        initial = states_before_segments(static, states[s], before[s], count, in_reverse)
        arrays[f"{s}0"] = initial.astype(f32).reshape(-1, *initial.shape[2:])
    for s, x in reset_states.items():
        arrays[f"reset_{s}"] = cut(x) if static.reset_state == "stepped" else jnp.repeat(x, count, axis=0)
    if cell.norm:
        residuals = [*residuals, _bridge.Output("scale", True, 1, f32)]
    # the kernel also writes the hidden states and the last states, which are not used: the caller has them
    known = [_bridge.Output("hs", True, hidden, f32)]
    known += [_bridge.Output(f"{s}_last", False, hidden, f32) for s in cell.states]
    results = _bridge.launch(
        cell.name, "fwd", arrays, [*known, *residuals], reset_state=static.reset_state, reverse=static.reverse,
        precision=static.kernel_precision, may_use_xla=static.may_use_xla, norm_width=norm_width,
    )  # fmt: skip
    found = {output.name: results[output.name] for output in residuals}
    return {name: x.reshape(groups, steps, *x.shape[2:]) for name, x in found.items()}


def _count_segments(static: RecurrenceSpec, steps: int, sequences: int, hidden: int) -> int:
    """Returns the number of segments of equal length that a chunk is cut into, a divisor of its steps.

    It is 1 at widths where few sequences are multiplied in full float32 and many in TF32. Segments add sequences, and
    this launch must multiply as the forward pass did, also under `vmap`. A simple cell with a ReLU has more such
    widths, but its residuals are computed from its states, without a launch.
    """
    if static.uses_tf32 and _bridge.may_have_float32_residuals(hidden, 1):
        return 1
    most = max(1, min(steps // _MIN_STEPS, _MAX_SEQUENCES // max(sequences, 1)))
    return next(count for count in range(most, 0, -1) if steps % count == 0)
