"""The recurrence on canonical arrays as a `lax.scan`, which XLA differentiates where there is no kernel."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import scan, sharding

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.call import Call
    from jaxrnn.kernel_vjp.spec import KernelSpec


def in_scan(spec: KernelSpec, call: Call) -> tuple[tuple[Array, ...], dict[str, Array]]:
    """Computes `recurrence.recurrence` with `lax.scan`, up to rounding."""
    f32 = jnp.float32
    call = sharding.replicate_all(call)  # under `vmap` over a sharded axis, arrays that were made inside are on no mesh

    def turn(x: Array) -> Array:
        """Reverses time if the loop goes in reverse, which may be known at run time only."""
        return x if call.in_reverse is None else jnp.where(call.in_reverse, jnp.flip(x, 0), x)

    def time_first(x: Array) -> Array:
        return turn(jnp.moveaxis(x, 1, 0))

    def groups_first(x: Array) -> Array:
        return jnp.moveaxis(turn(x), 0, 1)

    reset_states = call.reset_states or (None,) * len(call.states)
    if spec.reset_state == "stepped":
        reset_states = tuple(map(time_first, reset_states))
    arrays = call._replace(
        states=tuple(x.astype(f32) for x in call.states), xs=time_first(call.xs),
        resets=None if call.resets is None else time_first(call.resets), reset_states=reset_states, in_reverse=None,
    )  # fmt: skip

    def run(arrays: Call) -> Any:
        return scan.run(dataclasses.replace(spec, reverse=spec.reverse is True), arrays)

    last, sequences = (jax.checkpoint(run) if spec.remat else run)(arrays)
    dtypes = dict(zip(spec.cell.states, (x.dtype for x in call.states), strict=True))
    names = [s for s in spec.cell.states if s in spec.returned]
    return last, {s: groups_first(x).astype(dtypes[s]) for s, x in zip(names, sequences, strict=True)}
