"""Tangents of the recurrence and of its gradient, by kernels.

Let M map the arrays of a call, `x`, and the states of all steps, `h`, to the states that one step computes from those
before it, for all steps at once. M has no loop, and XLA differentiates it. The states are its fixed point, h = M(x, h).
The tangents `dh`, and the gradients `s` of the states, given the gradients `y` of the results, are fixed points too:

    dh = M_h dh + M_x dx        the tangent loop, with the same product as the forward loop
    s  = M_h^T s + y            the backward loop
    ds = M_h^T ds + (M_h^T)' s + dy

Here M_h and M_x are the derivatives of M, and ' is the derivative along (dx, dh). The last line is the derivative of
the second one: the same loop with other gradients of the results. The gradients of x are M_x^T s.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import _bridge, sharding
from jaxrnn.cells import base
from jaxrnn.cells.run_step import run_step
from jaxrnn.kernel_vjp.history import states_before
from jaxrnn.kernel_vjp.launch import launch_pass, possible_first_steps, projection_in_xla
from jaxrnn.kernel_vjp.spec import residual_outputs
from jaxrnn.numerics import cast_clamped, matmul

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array

    from jaxrnn.call import Call
    from jaxrnn.kernel_vjp.spec import KernelSpec


def has_tangents(spec: KernelSpec, call: Call) -> bool:
    """Returns whether kernels compute tangents. Saved states in 16 bits are rounded too much to repeat the steps."""
    return spec.cell.has_tangent_loop and not spec.remat and call.states[0].dtype == jnp.float32


def run_tangent(
    spec: KernelSpec, inputs: tuple[int, ...], call: Call, saved: dict[str, Array], tangents: Sequence[Array]
) -> Any:
    """Returns the tangents of the results of `recurrence`, given those of the leaves of `call` at `inputs`."""

    def run(call: Call, hs: Array, tangents: Sequence[Array]) -> Any:
        steps = _Steps(spec, call, hs, inputs)
        return steps.results(steps.tangent(tangents))

    return sharding.shard_over_vmapped_axes(run, call, saved["hs"], tangents)


def run_hessian(
    spec: KernelSpec, inputs: tuple[int, ...], outputs: tuple[int, ...], call: Call, saved: dict[str, Array],
    cotangents: Any, tangents: Sequence[Array],
) -> list[Array]:  # fmt: skip
    """Returns tangents of the gradients of <cotangents, results>.

    `inputs` and `outputs` are indices of leaves of `(call, saved, cotangents)`. The function differentiates along
    `tangents` of the leaves at `inputs`, and returns the tangents of the gradients of those at `outputs`. If the
    tangents of the states, which are saved, are among `tangents`, they are not computed.
    """
    count = len(jax.tree.leaves(call))
    of_states, first_cotangent = count + sorted(saved).index("hs"), count + len(saved)

    def run(call: Call, hs: Array, cotangents: Any, tangents: Sequence[Array]) -> list[Array]:
        along = dict(zip(inputs, tangents, strict=True))
        leaves, structure = jax.tree.flatten(cotangents)
        changes = [along.get(i, jnp.zeros_like(x)) for i, x in enumerate(leaves, first_cotangent)]
        moving = tuple(sorted({i for i in (*inputs, *outputs) if i < count}))
        steps = _Steps(spec, call, hs, moving)
        dx = [along.get(i, jnp.zeros_like(x)) for i, x in zip(moving, steps.values, strict=True)]
        by_index = {}
        if of_states in along:
            dh = along[of_states]
        else:
            last, dh = steps.tangent(dx)
            by_index = dict(enumerate(jax.tree.leaves(steps.results((last, dh))), first_cotangent))
        s = steps.adjoint(cotangents)
        change, *further = jax.jvp(functools.partial(steps.pull, s), (hs, *steps.values), (dh, *dx))[1]
        d_last, sequences = jax.tree.unflatten(structure, changes)
        ds = steps.adjoint((d_last, sequences | {"h": sequences["h"] + change.astype(sequences["h"].dtype)}))
        gradients = map(jnp.add, steps.pull(ds, hs, *steps.values)[1:], further)
        by_index |= zip(moving, gradients, strict=True)
        return [by_index[i] for i in outputs]

    return sharding.shard_over_vmapped_axes(run, call, saved["hs"], cotangents, tangents)


class _Steps:
    """M of a call, around its fixed point: see the top of this file.

    Attributes:
      values: the leaves of the call that M is a function of; the others are constants.
    """

    def __init__(self, spec: KernelSpec, call: Call, hs: Array, moving: tuple[int, ...]):
        """Takes the states of all steps, `hs`, and the indices of `values` among the leaves of the call."""
        self.spec, self.call, self._hs, self._moving = spec, call, hs, moving
        self._leaves, self._structure = jax.tree.flatten(call)
        self.values = [self._leaves[i] for i in moving]
        residuals = self._run(hs, *self.values)[1]
        # without those of `xp` that are words: they would have to be packed
        saved = residual_outputs(spec, call.xs, in_place=False)
        self._residuals = {x.name: cast_clamped(residuals[x.name], x.dtype) for x in saved}

    def _run(self, hs: Array, *values: Array) -> tuple[Array, dict[str, Array]]:
        """Returns M, and the residuals of all steps."""
        leaves = list(self._leaves)
        for i, x in zip(self._moving, values, strict=True):
            leaves[i] = x
        spec, call = self.spec, jax.tree.unflatten(self._structure, leaves)
        reset_state = call.reset_states[0] if call.reset_states else None
        before = states_before(spec, call, hs, call.states[0], reset_state)
        xp = projection_in_xla(spec, call, possible_first_steps(spec, call, 0, call.xs.shape[1]))
        hp = matmul(before.astype(spec.operand_dtype), call.params.w_hh, spec.precision, jnp.float32)
        (after,), residuals = run_step(spec.cell, xp, hp, {"b_hn": call.params.b_hn}, (before,), {}, 0)
        return after, residuals

    def pull(self, s: Array, hs: Array, *values: Array) -> tuple[Array, ...]:
        """Returns M_h^T s, and M_x^T s for each of `values`."""
        return jax.vjp(lambda *x: self._run(*x)[0], hs, *values)[1](s)

    def tangent(self, tangents: Sequence[Array]) -> tuple[Array, Array]:
        """Returns the tangents of the last state and of those of all steps, given those of `values`."""
        spec, call = self.spec, self.call
        added = jax.jvp(lambda *x: self._run(self._hs, *x)[0], self.values, list(tangents))[1]
        # tangents of initial states and reset states have passed a step of M, and the loop starts from zeros
        arrays = self._residuals | {
            "w_hh_t": call.params.w_hh.astype(spec.operand_dtype).T[None], "xp": added, "reset": call.resets,
            "h0": jnp.zeros_like(call.states[0]),
        }  # fmt: skip
        f32 = jnp.dtype(jnp.float32)
        outputs = [
            _bridge.Output("hs", f32, spec.hidden), _bridge.Output("h_last", f32, spec.hidden, stepped=False)
        ]  # fmt: skip
        results = launch_pass(spec, "tangent", call, arrays, outputs)
        return results["h_last"], results["hs"]

    def results(self, tangents: tuple[Array, Array]) -> Any:
        """Returns the tangents of the results of `recurrence`."""
        last, hs = tangents
        return (last,), {s: hs for s in self.spec.returned}

    def adjoint(self, cotangents: Any) -> Array:
        """Returns the gradients `s` of the states of all steps, given those of the results of `recurrence`."""
        spec, cell, dtype = self.spec, self.spec.cell, self.spec.operand_dtype
        (d_last,), d_sequences = cotangents
        local_grads = list(base.separate(cell, self._residuals["local_grads"]))
        local_grads[cell.gates - 1] = jnp.ones_like(local_grads[0])  # `CellSpec.has_tangent_loop` says why
        arrays = self._residuals | {
            "w_hh": self.call.params.w_hh.astype(dtype)[None], "reset": self.call.resets,
            "local_grads": base.interleave(cell, local_grads), "dhs": d_sequences["h"], "dh_last": d_last,
        }  # fmt: skip
        f32 = jnp.dtype(jnp.float32)  # float16 would overflow, and two roundings add up
        outputs = [_bridge.Output("dxp", f32, cell.gates * spec.hidden)]
        outputs += [_bridge.Output(name, dtype, spec.hidden) for name in cell.hidden_grads]
        outputs.append(_bridge.Output("dh0", f32, spec.hidden, stepped=False))
        results = launch_pass(spec, "bwd", self.call, arrays, outputs)
        return results["dxp"][..., (cell.gates - 1) * spec.hidden :]
