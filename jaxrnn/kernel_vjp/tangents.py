"""Tangents of the recurrence and of its gradient, by kernels.

Let M map the arrays of a call, `x`, and the states of all steps, `h`, to the states that one step computes from those
before it, for all steps at once. M has no loop, and XLA differentiates it. The states are its fixed point, h = M(x, h).
The tangents `dh`, and the gradients `s` of the states, given the gradients `y` of the results, are fixed points too:

    dh = M_h dh + M_x dx        the tangent loop, with the same product as the forward loop
    s  = M_h^T s + y            the backward loop
    ds = M_h^T ds + (M_h^T)' s + dy

Here M_h and M_x are the derivatives of M, and ' is the derivative along (dx, dh). The last line is the derivative of
the second one: the same loop with other gradients of the results. The gradients of x are M_x^T s, and their
derivatives are M_x^T ds + (M_x^T)' s. The first term is what a gradient computes from what the loop returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import _bridge, sharding
from jaxrnn.cells import base
from jaxrnn.kernel_vjp.history import History, states_before
from jaxrnn.kernel_vjp.launch import (
    forward_weights,
    launch_backward,
    launch_forward,
    launch_pass,
    possible_first_steps,
    projection_in_xla,
)
from jaxrnn.kernel_vjp.weight_grads import has_weight_grads_launch, launch_weight_grads
from jaxrnn.numerics import matmul

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax import Array

    from jaxrnn.call import Call
    from jaxrnn.cells.base import States
    from jaxrnn.kernel_vjp.spec import KernelSpec


def has_tangents(spec: KernelSpec, call: Call) -> bool:
    """Returns whether kernels compute tangents. Saved states in 16 bits are rounded too much to repeat the steps."""
    return spec.cell.has_tangent_loop and not spec.remat and all(x.dtype == jnp.float32 for x in call.states)


def run_tangent(
    spec: KernelSpec, inputs: tuple[int, ...], call: Call, saved: dict[str, Array], tangents: Sequence[Array]
) -> Any:
    """Returns the tangents of the results of `recurrence`, given those of the leaves of `call` at `inputs`."""

    def run(call: Call, saved: dict[str, Array], tangents: Sequence[Array]) -> Any:
        steps = _Steps(spec, call, saved, inputs)
        return steps.results(*steps.tangent(tangents))

    return sharding.shard_over_vmapped_axes(run, call, saved, tangents)


def run_hessian(
    spec: KernelSpec, inputs: tuple[int, ...], outputs: tuple[int, ...], call: Call, saved: dict[str, Array],
    cotangents: Any, totals: Sequence[Array], tangents: Sequence[Array],
) -> list[Array]:  # fmt: skip
    """Returns tangents of the gradients of <cotangents, results>.

    `inputs` and `outputs` are indices of leaves of `(call, saved, cotangents)`. The function differentiates along
    `tangents` of the leaves at `inputs`, and returns the tangents of the gradients of those at `outputs`. `totals` are
    the gradients `s` of the states. Of a cell with one state, tangents of the states that are among `tangents` are not
    computed.
    """
    count = len(jax.tree.leaves(call))
    of_states, first_cotangent = count + sorted(saved).index("hs"), count + len(saved)

    def run(
        call: Call, saved: dict[str, Array], cotangents: Any, s: Sequence[Array], tangents: Sequence[Array]
    ) -> list[Array]:
        along = dict(zip(inputs, tangents, strict=True))
        leaves, structure = jax.tree.flatten(cotangents)
        changes = [along.get(i, jnp.zeros_like(x)) for i, x in enumerate(leaves, first_cotangent)]
        d_last, d_sequences = jax.tree.unflatten(structure, changes)
        moving = tuple(sorted({i for i in (*inputs, *outputs) if i < count}))
        steps = _Steps(spec, call, saved, moving)
        dx = [along.get(i, jnp.zeros_like(x)) for i, x in zip(moving, steps.values, strict=True)]
        by_index = {}
        if of_states in along and len(spec.cell.states) == 1:
            d_states: States = (along[of_states],)
        else:
            last, d_states = steps.tangent(dx)
            by_index = dict(enumerate(jax.tree.leaves(steps.results(last, d_states)), first_cotangent))
        at, d_at = (steps.states(), *steps.values), (d_states, *dx)
        gates, d_gates = jax.jvp(lambda *x: steps.pull_step(s, steps.gates(*x)), at, d_at)
        change, *parts = jax.jvp(steps.pull_gates, (gates, *at), (d_gates, *d_at))[1]
        by_index |= zip(moving, parts, strict=True)
        of_gates, of_first = steps.adjoint(d_last, d_sequences, change)
        # the launch has M_x^T ds up to the gates, where it joins the other part, so that one product has both
        d_gates = *jax.tree.map(jnp.add, of_gates, d_gates[:2]), d_gates[2]
        both = jax.jvp(steps.pull_gates, (gates, *at), (d_gates, *d_at))[1][1:]
        for i, x in zip(moving, both, strict=True):
            by_index[i] = by_index[i] + of_first[i].astype(x.dtype) if i in of_first else x
        of_weights = steps.indices_of_weights.intersection(outputs)
        if of_weights and spec.uses_tf32 and has_weight_grads_launch(spec, call.xs):
            by_index |= steps.weight_grads(gates, d_gates, d_states, along)
        return [by_index[i] for i in outputs]

    return sharding.shard_over_vmapped_axes(run, call, saved, cotangents, totals, tangents)


class _Steps:
    """M of a call, around its fixed point: see the top of this file.

    Attributes:
      values: the leaves of the call that M is a function of; the others are constants.
    """

    def __init__(self, spec: KernelSpec, call: Call, saved: dict[str, Array], moving: tuple[int, ...]):
        """Takes what the forward pass saved, and the indices of `values` among the leaves of the call."""
        self.spec, self.call, self._moving = spec, call, moving
        self._leaves, self._structure = jax.tree.flatten(call)
        self.values = [self._leaves[i] for i in moving]
        self._indices = jax.tree.unflatten(self._structure, range(len(self._leaves)))
        self._residuals = {name: x for name, x in saved.items() if name != "hs"}
        f32 = jnp.dtype(jnp.float32)
        self._outputs = [_bridge.Output(f"{s}s", f32, spec.hidden) for s in spec.cell.states]
        self._outputs += [_bridge.Output(f"{s}_last", f32, spec.hidden, stepped=False) for s in spec.cell.states]
        self._hs = saved["hs"]

    def states(self) -> States:
        """Returns the states of all steps. Only hidden ones were saved, and a launch computes the others again."""
        spec, call = self.spec, self.call
        if len(spec.cell.states) == 1:
            return (self._hs,)
        first_steps = possible_first_steps(spec, call, 0, call.xs.shape[1])
        weights = forward_weights(spec, call.params)
        results = launch_forward(spec, call, weights, call.states, first_steps, self._outputs)
        return tuple(results[f"{s}s"] for s in spec.cell.states)

    @property
    def indices_of_weights(self) -> set[int]:
        """The indices of weights and biases among the leaves of the call."""
        return set(jax.tree.leaves(self._indices.params))

    def gates(self, states: States, *values: Array) -> tuple[list[Array], Array | None, States]:
        """Returns what the cell's step takes, for all steps: gates, `x_last`, and the states before each step.

        M is the cell's step of these.
        """
        leaves = list(self._leaves)
        for i, x in zip(self._moving, values, strict=True):
            leaves[i] = x
        spec, call = self.spec, jax.tree.unflatten(self._structure, leaves)
        reset_states = call.reset_states or (None,) * len(states)
        before = tuple(
            states_before(spec, call, *each) for each in zip(states, call.states, reset_states, strict=True)
        )  # fmt: skip
        xp = projection_in_xla(spec, call, possible_first_steps(spec, call, 0, call.xs.shape[1]))
        hp = matmul(before[0].astype(spec.operand_dtype), call.params.w_hh, spec.precision, jnp.float32)
        gates, x_last = base.add_gates(spec.cell, xp, hp, getattr(call.params, "b_hn", None))
        return gates, x_last, before

    def pull_step(self, s: Sequence[Array], gates: Any) -> Any:
        """Returns the gradients of what `gates` returns, given those of the states after each step."""
        return jax.vjp(lambda *x: self.spec.cell.step(*x)[0], *gates)[1](tuple(s))

    def pull_gates(self, d_gates: Any, states: States, *values: Array) -> tuple[Any, ...]:
        """Returns M_h^T s, and M_x^T s for each of `values`, given what `pull_step` returns."""
        return jax.vjp(self.gates, states, *values)[1](d_gates)

    def weight_grads(
        self, gates: Any, d_gates: Any, d_states: States, along: dict[int, Array]
    ) -> dict[int, Array]:  # fmt: skip
        """Returns the tangents of the gradients of weights and biases by index, in two launches.

        `pull_gates` computes the same from the tangents of `pull_step`, `d_gates`, and of the leaves of the call,
        `along`. A gradient of weights is a product of states or inputs and gradients of gates.
        """
        d_call = jax.tree.unflatten(
            self._structure, [along.get(i, jnp.zeros_like(x)) for i, x in enumerate(self._leaves)]
        )
        factors = (self.call, self._hs, d_gates), (d_call._replace(resets=self.call.resets), d_states[0], gates)
        of_gates, of_states = (self._launch_weight_grads(*each) for each in factors)
        found = {}
        for name, x in of_gates.items():
            both = x + of_states[name] if x.ndim > 1 else x
            found[getattr(self._indices.params, name)] = both.astype(getattr(self.call.params, name).dtype)
        return found

    def _launch_weight_grads(self, call: Call, hs: Array, gates: Any) -> dict[str, Array]:
        """Returns the gradients of weights and biases, given those of gates and `x_last`, by a launch."""
        of_gates, x_last, _ = gates
        history = History({"h": hs}, {"h": call.states[0]}, {})
        dxp = jnp.concatenate(of_gates if x_last is None else [*of_gates[:-1], x_last], axis=-1)
        hidden_grads = {} if x_last is None else {"dhn": of_gates[-1]}
        return launch_weight_grads(self.spec, call, history, None, None, dxp, hidden_grads)

    def tangent(self, tangents: Sequence[Array]) -> tuple[States, States]:
        """Returns the tangents of the last states and of those of all steps, given those of `values`."""
        spec, call, cell, f32 = self.spec, self.call, self.spec.cell, jnp.dtype(jnp.float32)
        residuals = self._residuals
        if cell.has_packed_residuals(residuals):
            local_grads, carry_gate = _bridge.unpack_words(residuals["local_grads"])
            residuals = {"local_grads": local_grads, "carry_gate": carry_gate}
        along = dict(zip(self._moving, tangents, strict=True))
        # the loop starts from the tangents of the initial states; all others pass a step of M
        others = [i for i in self._moving if i not in self._indices.states]
        states = self._hs, *(jnp.zeros_like(self._hs),) * (len(cell.states) - 1)  # gates depend on the hidden one alone

        def gates(*values: Array) -> Any:
            changed = dict(zip(self._moving, self.values, strict=True)) | dict(zip(others, values, strict=True))
            return self.gates(states, *changed.values())

        changes = jax.jvp(gates, [self._leaves[i] for i in others], [along[i] for i in others])[1]
        added = base.tangents_of(cell, {name: x.astype(f32) for name, x in residuals.items()}, *changes)
        arrays = residuals | {
            "w_hh_t": call.params.w_hh.astype(spec.operand_dtype).T[None], "xp": jnp.concatenate(added, axis=-1),
            "reset": call.resets,
        }  # fmt: skip
        for s, x, i in zip(cell.states, call.states, self._indices.states, strict=True):
            arrays[f"{s}0"] = along[i] if i in along else jnp.zeros_like(x)
        results = launch_pass(spec, "tangent", call, arrays, self._outputs)
        return tuple(results[f"{s}_last"] for s in cell.states), tuple(results[f"{s}s"] for s in cell.states)

    def results(self, last: States, states: States) -> Any:
        """Returns the tangents of the results of `recurrence`."""
        by_name = dict(zip(self.spec.cell.states, states, strict=True))
        return last, {s: by_name[s] for s in self.spec.returned}

    def adjoint(
        self, d_last: States, d_sequences: dict[str, Array], further: States
    ) -> tuple[tuple[list[Array], Array | None], dict[int, Array]]:
        """Runs the backward loop, given the gradients of the results, and `further` ones of the states of all steps.

        Returns the gradients of gates and `x_last`, and by index among the leaves of the call those of initial states
        and, if they are among `values`, of reset states.
        """
        cell, spec, indices = self.spec.cell, self.spec, self._indices
        added = {s: x + d_sequences[s] if s in d_sequences else x for s, x in zip(cell.states, further, strict=True)}
        residuals = [_bridge.Output(name, x.dtype) for name, x in self._residuals.items()]
        resets = dict(zip(indices.reset_states or (), cell.states, strict=False))
        call = self.call if resets.keys() & set(self._moving) else self.call._replace(reset_states=None)
        f32 = jnp.dtype(jnp.float32)  # float16 would overflow, and two roundings add up
        results = launch_backward(spec, call, residuals, self._residuals, d_last, added, gates_dtype=f32)
        of_first = {i: results[f"d{s}0"] for i, s in zip(indices.states, cell.states, strict=True)}
        if call.reset_states:
            each_step = {i: results[f"dreset_{s}"] for i, s in resets.items()}
            of_first |= {i: d if spec.reset_state == "stepped" else d.sum(axis=1) for i, d in each_step.items()}
        gates = jnp.split(results["dxp"], cell.gates, axis=-1)
        if not cell.last_gate_separate:
            return (gates, None), of_first
        return ([*gates[:-1], results["dhn"]], gates[-1]), of_first
