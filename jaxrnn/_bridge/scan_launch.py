"""Computes the outputs of a forward or backward kernel with a loop in XLA, called a scan, from the same arrays.

With `implementation=None`, a scan replaces a launch on a GPU where it is estimated to be faster than the kernel: for
wide states with many sequences. `torch_bridge.tiling.prefers_scan` decides, separately for the forward and the backward
launch. It decides when a launch is lowered, so it takes into account the sizes that `vmap` adds. In a program for a
CPU, a scan replaces every launch of `implementation=None`. In a program for both, it replaces all launches on the CPU.
Gradients of the weights are not computed here, because the backward kernel does not compute them either.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import sharding
from jaxrnn.cells import base, norm
from jaxrnn.cells.run_step import run_step
from jaxrnn.numerics import cast_clamped, is_reset, matmul

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jax import Array

    from jaxrnn.cells import Cell


def run(
    cell: Cell, direction: str, arrays: Mapping[str, Array], dtypes: Mapping[str, Any], *, reset_state: str,
    reverse: bool | str, precision: str, norm_width: int = 0,
) -> dict[str, Array]:  # fmt: skip
    """Returns the outputs of a launch by name.

    Args:
      cell: an entry of the cell table.
      direction: "fwd", "bwd" or, for the tangent of a forward launch, "tangent".
      arrays: the arrays of the launch by name: weights `[S, ...]`, sequences `[G, T, B, W]` of any width W, resets
        `[G, T, B]` and states `[G, B, H]`. G is a multiple of the number of models S, and each model has G / S
        consecutive groups.
      dtypes: the dtypes of the outputs by name.
      reset_state: as in the launch: "zeros", "fixed" (`[G, B, H]`) or "stepped" (`[G, T, B, H]`).
      reverse: as in the launch; "bidirectional" runs models of odd index in reverse.
      precision: the precision of float32 products: "tf32", or "tf32x3" for float32's accuracy.
      norm_width: as in the launch.
    """
    arrays = sharding.unify_varying_axes(dict(arrays))  # the iterations of a loop may not change the types of its state
    w_name = "w_hh" if direction == "bwd" else "w_hh_t"
    weights = {name: x for name, x in arrays.items() if name in (w_name, "b_hn", "bias", "w_sum")}
    models = weights[w_name].shape[0]
    others = {  # [S, G / S, ...]
        name: x.reshape(models, x.shape[0] // models, *x.shape[1:]) for name, x in arrays.items() if name not in weights
    }
    run_model: Callable[..., dict[str, Array]] = functools.partial(
        {"fwd": _forward, "bwd": _backward, "tangent": _tangent}[direction], cell, dtypes, reset_state,
        jax.lax.Precision.HIGHEST if precision == "tf32x3" else jax.lax.Precision.DEFAULT,
        norm_width,
    )  # fmt: skip
    if reverse == "bidirectional":
        in_reverse = jnp.arange(models) % 2 == 1
        results = jax.vmap(run_model)(weights, others, in_reverse)
    elif models == 1:  # no `vmap`, so that products have no batch axis
        results = run_model(*jax.tree.map(lambda x: x[0], (weights, others)), reverse)
        results = jax.tree.map(lambda x: x[None], results)
    else:
        results = jax.vmap(lambda weights, others: run_model(weights, others, reverse))(weights, others)
    return {name: x.reshape(-1, *x.shape[2:]) for name, x in results.items()}


# XLA copies the states and writes the results once per iteration of the loop. The time of a pass with 2, 4 and 8 steps
# per iteration, divided by that with one step (sequences, steps, units; an H100 with the tilings of an A100):
# - GRU 256,64,1024: 0.91, 0.89, 0.89; in bfloat16 0.86, 0.84, 0.86;
# - GRU 512,32,1024: 0.93, 0.94, 0.93; in bfloat16 0.94, 0.95, 0.95.
# More steps take longer to compile, and so do the steps that are left after the last iteration: with 127 steps, on two
# cores of a CPU, the forward loop of an LSTM takes 1.3 s, and 2.7 s with eight steps per iteration.
_STEPS_PER_ITERATION = 4


class _Steps:
    """Converts one model's arrays between the form of a launch, with groups, and that of `lax.scan`, with steps first.

    `in_reverse` is a Python bool if the direction is known at trace time: if it is True, the scan runs in reverse,
    which needs no copies. Otherwise it is an array of one bool, and sequences are flipped if that is true.
    """

    def __init__(self, sequence: Array, in_reverse: bool | Array):
        """Takes the sizes from any of the model's sequences, `[G, T, B, W]`."""
        self.groups, self.steps, self.batch = sequence.shape[:3]
        self._in_reverse = in_reverse

    def _flip_if_reverse(self, x: Array) -> Array:
        if isinstance(self._in_reverse, bool):
            return x
        return jnp.where(self._in_reverse, jnp.flip(x, 0), x)

    def steps_first(self, x: Array) -> Array:
        """Converts a sequence `[G, T, B, W]` to `[T, G * B, W]`."""
        x = jnp.moveaxis(x, 1, 0)
        return self._flip_if_reverse(x.reshape(self.steps, self.groups * self.batch, *x.shape[3:]))

    def groups_first(self, x: Array) -> Array:
        """Inverts `steps_first`."""
        x = self._flip_if_reverse(x).reshape(self.steps, self.groups, self.batch, *x.shape[2:])
        return jnp.moveaxis(x, 0, 1)

    def merge_groups(self, x: Array) -> Array:
        """Converts states `[G, B, H]` to `[G * B, H]`."""
        return x.reshape(self.groups * self.batch, x.shape[-1])

    def split_groups(self, x: Array) -> Array:
        """Inverts `merge_groups`."""
        return x.reshape(self.groups, self.batch, x.shape[-1])

    def scan(self, step: Callable[..., Any], carry: Any, xs: Any, *, last_first: bool = False) -> tuple[Any, Any]:
        """Runs `step` over the model's steps in their order or, if `last_first`, in the opposite order."""
        return _scan(step, carry, xs, self.steps, reverse=(self._in_reverse is True) != last_first)


def _scan(step: Callable[..., Any], carry: Any, xs: Any, steps: int, *, reverse: bool) -> tuple[Any, Any]:
    """Returns what `lax.scan` returns for `steps` steps.

    An iteration of the loop runs `_STEPS_PER_ITERATION` steps. It reads their inputs by one slice and writes their
    results by one update. Unlike `lax.scan`, it does not fill the arrays of results with zeros before the loop.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
    _, results = jax.eval_shape(step, carry, one)
    stacked = jax.tree.map(lambda y: jax.lax.empty((steps, *y.shape), y.dtype), results)
    stacked = sharding.unify_varying_axes(stacked, carry)

    def run_steps(start: Any, count: int, carry: Any, stacked: Any) -> tuple[Any, Any]:
        """Runs the `count` steps from index `start`, the last of them first if `reverse`."""
        inputs = jax.tree.map(functools.partial(_slice, start=start, count=count), xs)
        results: list[Any] = [None] * count
        for i in reversed(range(count)) if reverse else range(count):
            carry, results[i] = step(carry, jax.tree.map(lambda x, i=i: x[i], inputs))
        return carry, jax.tree.map(functools.partial(_update, start=start), stacked, *results)

    count = _STEPS_PER_ITERATION
    iterations, remainder = divmod(steps, count)
    state = (carry, stacked)
    if iterations:  # `fori_loop` traces its body even for no iterations, and a shorter array has no such slice
        first, stride = (steps - count, -count) if reverse else (0, count)
        state = jax.lax.fori_loop(0, iterations, lambda i, state: run_steps(first + i * stride, count, *state), state)
    return run_steps(0 if reverse else iterations * count, remainder, *state) if remainder else state


def _slice(x: Array, *, start: Any, count: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, count, allow_negative_indices=False)


def _update(stacked: Array, *results: Array, start: Any) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(stacked, jnp.stack(results), start, 0, allow_negative_indices=False)


def _product(x: Array, w: Array, precision: jax.lax.Precision) -> Array:
    """Returns `x @ w` in float32, with `x` cast to the dtype of the weights."""
    return matmul(x.astype(w.dtype), w, precision, jnp.float32)


def _forward(
    cell: Cell, dtypes: Mapping[str, Any], reset_state: str, precision: jax.lax.Precision, norm_width: int,
    weights: dict[str, Array], arrays: dict[str, Array], in_reverse: bool | Array,
) -> dict[str, Array]:  # fmt: skip
    """Computes the outputs of the forward launch of one model."""
    steps = _Steps(arrays["xp"], in_reverse)
    w = weights["w_hh_t"].T
    fixed = [steps.merge_groups(arrays[f"reset_{s}"]) if reset_state == "fixed" else None for s in cell.states]
    residuals_packed = cell.has_packed_residuals(dtypes)
    saved = [name for name in (*dict(cell.residuals), "scale") if name in dtypes] if not residuals_packed else []

    def step(states: tuple[Array, ...], inputs: Any) -> Any:
        xp, statistics, reset, stepped = inputs
        if reset is not None:
            new = [of_all if of_step is None else of_step for of_all, of_step in zip(fixed, stepped, strict=True)]
            states = tuple(
                jnp.where(reset[:, None], jnp.zeros_like(h) if x is None else x.astype(jnp.float32), h)
                for x, h in zip(new, states, strict=True)
            )
        xp, hp = xp.astype(jnp.float32), _product(states[0], w, precision)
        after, residuals = run_step(cell, xp, hp, weights, states, statistics, norm_width)
        results = {
            f"{s}s": x.astype(dtypes[f"{s}s"]) for s, x in zip(cell.states, after, strict=True) if f"{s}s" in dtypes
        }
        results |= {name: cast_clamped(residuals[name], dtypes[name]) for name in saved}
        if residuals_packed:
            results["local_grads"] = pack_words(residuals["local_grads"], residuals["carry_gate"])
        return after, results

    carry = tuple(steps.merge_groups(arrays[f"{s}0"]).astype(jnp.float32) for s in cell.states)
    reset = arrays.get("reset")
    stepped = [steps.steps_first(arrays[f"reset_{s}"]) if reset_state == "stepped" else None for s in cell.states]
    resets = None if reset is None else steps.steps_first(is_reset(reset))
    statistics = {name: steps.steps_first(arrays[name]) for name in ("x_norm", "x_mean") if name in arrays}
    last, results = steps.scan(step, carry, (steps.steps_first(arrays["xp"]), statistics, resets, stepped))
    joined = {name: steps.groups_first(x) for name, x in results.items()}
    return joined | {
        f"{s}_last": steps.split_groups(x).astype(dtypes[f"{s}_last"]) for s, x in zip(cell.states, last, strict=True)
    }


def _backward(
    cell: Cell, dtypes: Mapping[str, Any], reset_state: str, precision: jax.lax.Precision, norm_width: int,
    weights: dict[str, Array], arrays: dict[str, Array], in_reverse: bool | Array,
) -> dict[str, Array]:  # fmt: skip
    """Computes the outputs of the backward launch of one model.

    The gradient of a state at a reset goes to the reset state: it is the output `dreset_*`, if there is one. The
    gradient of the state before the reset is zero. Neither depends on `reset_state`.
    """
    steps = _Steps(arrays["dhs"], in_reverse)
    w_t = weights["w_hh"].T
    residuals_packed = cell.has_packed_residuals(arrays)

    def step(dstates: tuple[Array, ...], inputs: Any) -> Any:
        saved, d_outputs, reset = inputs
        if residuals_packed:
            saved = dict(zip(("local_grads", "carry_gate"), unpack_words(saved["local_grads"]), strict=True))
        saved = {name: x.astype(jnp.float32) for name, x in saved.items()}
        pairs = zip(dstates, d_outputs, strict=True)
        dstates = tuple(d if x is None else d + x.astype(jnp.float32) for d, x in pairs)
        grads, carried = base.gradients_of(cell, saved, dstates)
        if cell.norm:
            grads = tuple(x * saved["scale"] for x in grads)
        results = {"dxp": jnp.concatenate(grads[: cell.gates], -1).astype(dtypes["dxp"])}
        results |= {f"total_d{s}": d for s, d in zip(cell.states, dstates, strict=True) if f"total_d{s}" in dtypes}
        results |= {
            name: x.astype(dtypes[name]) for name, x in zip(cell.hidden_grads, grads[cell.gates :], strict=True)
        }
        dhp = _product(jnp.concatenate(base.hidden_gradients(cell, grads), -1), w_t, precision)
        if cell.norm:
            results["dnorm"] = norm.log_scale_grad(cell, saved, dstates[0])
            dhp -= saved["norm_state"] * (saved["scale"] * results["dnorm"] / norm_width)
        after = [dhp if carried[0] is None else carried[0] + dhp, *carried[1:]]
        dstates = tuple(d for d in after if d is not None)
        if reset is not None:
            is_reset_step = reset[:, None]
            for s, d in zip(cell.states, dstates, strict=True):
                if f"dreset_{s}" in dtypes:
                    results[f"dreset_{s}"] = jnp.where(is_reset_step, d, 0.0).astype(dtypes[f"dreset_{s}"])
            dstates = tuple(jnp.where(is_reset_step, 0.0, d) for d in dstates)
        return dstates, results

    carry = tuple(steps.merge_groups(arrays[f"d{s}_last"]).astype(jnp.float32) for s in cell.states)
    saved = {name: steps.steps_first(arrays[name]) for name in (*dict(cell.residuals), "scale") if name in arrays}
    d_outputs = [steps.steps_first(arrays[f"d{s}s"]) if f"d{s}s" in arrays else None for s in cell.states]
    reset = arrays.get("reset")
    resets = None if reset is None else steps.steps_first(is_reset(reset))
    first, results = steps.scan(step, carry, (saved, d_outputs, resets), last_first=True)
    results = {name: steps.groups_first(x) for name, x in results.items()}
    for s, d in zip(cell.states, first, strict=True):
        results[f"d{s}0"] = steps.split_groups(d).astype(dtypes[f"d{s}0"])
        if f"dreset_{s}" in dtypes and reset is None:  # without resets the gradient is zero
            results[f"dreset_{s}"] = jnp.zeros(arrays["dhs"].shape, dtypes[f"dreset_{s}"])
    return results


def _tangent(
    cell: Cell, dtypes: Mapping[str, Any], reset_state: str, precision: jax.lax.Precision, norm_width: int,
    weights: dict[str, Array], arrays: dict[str, Array], in_reverse: bool | Array,
) -> dict[str, Array]:  # fmt: skip
    """Computes the outputs of the tangent of the forward launch of one model, whose episodes start from zeros."""
    steps = _Steps(arrays["xp"], in_reverse)
    w = weights["w_hh_t"].T

    def step(states: tuple[Array, ...], inputs: Any) -> tuple[tuple[Array, ...], dict[str, Array]]:
        x, saved, reset = inputs
        if reset is not None:
            states = tuple(jnp.where(reset[:, None], 0.0, h) for h in states)
        saved = {name: y.astype(jnp.float32) for name, y in saved.items()}
        products = jnp.split(_product(states[0], w, precision), cell.gates, axis=-1)
        x_last = jnp.zeros_like(products[-1]) if cell.last_gate_separate else None
        after = base.tangents_of(cell, saved, products, x_last, states)
        states = tuple(map(jnp.add, jnp.split(x, len(cell.states), axis=-1), after))
        return states, {f"{s}s": h.astype(dtypes[f"{s}s"]) for s, h in zip(cell.states, states, strict=True)}

    saved = {name: steps.steps_first(arrays[name]) for name, _ in cell.residuals}
    resets = steps.steps_first(is_reset(arrays["reset"])) if "reset" in arrays else None
    first = tuple(steps.merge_groups(arrays[f"{s}0"]) for s in cell.states)
    last, results = steps.scan(step, first, (steps.steps_first(arrays["xp"]), saved, resets))
    joined = {name: steps.groups_first(x) for name, x in results.items()}
    return joined | {f"{s}_last": steps.split_groups(h) for s, h in zip(cell.states, last, strict=True)}


def pack_words(local_grads: Array, carry_gate: Array) -> Array:
    """Packs `local_grads [..., 4H]`, cast to float16, and `carry_gate [..., H]` into three 32-bit words per unit.

    Returns them as `[..., 3H]` float32: the first words of all units, then their second words, then their third words.
    The words have the format of `torch_bridge.kernels.common.pack_words`.
    """
    halves = cast_clamped(local_grads, jnp.float16).reshape(*carry_gate.shape, 4)
    a, b, c, d = jnp.unstack(jax.lax.bitcast_convert_type(halves, jnp.uint16).astype(jnp.uint32), axis=-1)
    bits = jax.lax.bitcast_convert_type(carry_gate, jnp.uint32)
    words = jnp.concatenate((d | a << 16, (bits & 0xFFFF) | b << 16, bits >> 16 | c << 16), axis=-1)
    return jax.lax.bitcast_convert_type(words, jnp.float32)


def unpack_words(words: Array) -> tuple[Array, Array]:
    """Inverts `pack_words`: returns `local_grads [..., 4H]` in float16 and `carry_gate [..., H]` in float32."""
    first, second, third = jnp.split(jax.lax.bitcast_convert_type(words, jnp.uint32), 3, axis=-1)
    halves = jnp.stack((first >> 16, second >> 16, third >> 16, first & 0xFFFF), axis=-1).astype(jnp.uint16)
    carry_gate = (second & 0xFFFF) | third << 16
    local_grads = jax.lax.bitcast_convert_type(halves, jnp.float16).reshape(*carry_gate.shape[:-1], -1)
    return local_grads, jax.lax.bitcast_convert_type(carry_gate, jnp.float32)
