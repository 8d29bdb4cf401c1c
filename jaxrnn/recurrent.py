"""Runs a recurrence of any cell: checks its arguments, and chooses between the kernels and `lax.scan`.

`jaxrnn.api` has the public functions, one for each cell.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxrnn import _bridge, kernel_vjp, scan, sharding
from jaxrnn.blocks import has_blocks, run_blocks
from jaxrnn.call import Call, RecurrenceSpec
from jaxrnn.cells import Cell
from jaxrnn.checks import (
    Caller,
    Implementation,
    check_arguments,
    check_flags,
    check_options,
    check_same_types,
    join_carry,
    split_carry,
    split_directions,
)
from jaxrnn.choice import NOT_ON_GPU, Choice, choose, describe_arrays


def run(
    cell: Cell,
    params: Any,
    carry: Any,
    xs: Any,
    *,
    resets: Any = None,
    reset_state: Any = None,
    reverse: bool = False,
    time_major: bool = True,
    return_states: bool = False,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
    caller: Caller | None = None,
) -> tuple[Any, tuple[Array, ...]]:
    """Runs a recurrence. The functions of the cells, such as `jaxrnn.gru`, document arguments and errors in full.

    Args:
      cell: the cell.
      params: its weights, an instance of `cell.params`. Recurrent weights `[N, H / N, gates * H / N]` are the blocks of
        a block-diagonal matrix (`jaxrnn.blocks`).
      carry: the state before the first step, `[*batch, H]` or, for a cell with two states, a pair `(c, h)` of them.
      xs: the inputs, `[T, *batch, D]` if `time_major`, else `[*batch, T, D]`.
      resets: `[T, *batch]` or `[*batch, T]`, nonzero where an episode begins; or None.
      reset_state: the state from which an episode starts, with the structure of `carry`, or None for zeros: `[H]`,
        `[*batch, H]`, or one for each step with the axes of `xs`.
      reverse: whether to run from the last step to the first.
      time_major: whether time is the first axis.
      return_states: whether to return all states of every step, and not only the hidden state.
      precision: the precision of every matmul.
      remat: whether to recompute the gates in the backward pass.
      implementation: "triton", "xla" or None.
      caller: what the user called, for error messages; by default the function of the cell.

    Returns:
      The last carry, and a tuple of sequences `[T, *batch, H]` or `[*batch, T, H]`: the hidden states of all steps,
      followed by the other states if `return_states`.
    """
    caller = Caller(cell.function) if caller is None else caller
    # messages name the last flag as `jaxrnn.lstm` does, return_cells
    reverse, time_major, remat, return_states = check_flags(
        caller, reverse=reverse, time_major=time_major, remat=remat, return_cells=return_states
    )
    check_options(implementation, precision, caller)
    check_arguments(cell, params, carry, xs, resets, reset_state, time_major, caller)
    states, reset_states = split_carry(cell, "carry", carry), _split_reset_state(cell, reset_state)
    spec = RecurrenceSpec(cell, reverse, time_major, precision, remat, _returned(cell, return_states))
    last, sequences = _run(spec, Call(params, states, xs, resets, reset_states), implementation, caller)
    return join_carry(last), sequences


def run_bidirectional(
    cell: Cell,
    params: tuple[Any, Any],
    carry: tuple[Any, Any],
    xs: Array,
    *,
    resets: tuple[Array, Array] | None = None,
    reset_state: tuple[Any, Any] | None = None,
    time_major: bool = True,
    return_states: bool = False,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
    caller: Caller | None = None,
) -> tuple[Any, Any]:
    """Runs one recurrence forward in time and another in reverse.

    With the kernels, one launch runs both in the forward pass, and one in the backward pass. Each direction has
    launches of its own if it fills a GPU by itself, from 2^18 elements of hidden state on (2048 sequences of 128
    units), or if `remat` recomputes the gates for a part of the steps at a time.

    Every pair holds the forward direction first. The arguments below differ from those of `run`. The call is equivalent
    to:

        run(cell, params[0], carry[0], xs, resets=resets[0], reset_state=reset_state[0], ...),
        run(cell, params[1], carry[1], xs, resets=resets[1], reset_state=reset_state[1], reverse=True, ...)

    Args:
      cell: the cell.
      params: a pair.
      carry: a pair.
      xs: shared by both directions.
      resets: None or a pair. In reverse an episode starts at the last of its steps, so the two arrays differ.
      reset_state: None or a pair.

    Returns:
      The results of the two calls, a pair.

    Raises:
      ValueError: shapes or dtypes disagree, also within a pair.
    """
    caller = Caller(cell.function) if caller is None else caller
    time_major, remat, return_states = check_flags(
        caller, time_major=time_major, remat=remat, return_cells=return_states
    )
    check_options(implementation, precision, caller)
    directions = split_directions(params, carry, resets, reset_state)
    for params_, carry_, resets_, state in directions:
        check_arguments(cell, params_, carry_, xs, resets_, state, time_major, caller)
    check_same_types(directions)
    params, carry, resets, reset_state = zip(*directions, strict=True)
    states = tuple(split_carry(cell, "carry", x) for x in carry)
    reset_states = tuple(_split_reset_state(cell, x) for x in reset_state)
    spec = RecurrenceSpec(cell, "bidirectional", time_major, precision, remat, _returned(cell, return_states))
    both = _run(spec, Call(params, states, xs, resets, reset_states), implementation, caller)
    forward, backward = ((join_carry(last), sequences) for last, sequences in both)
    return forward, backward


def _returned(cell: Cell, return_states: bool) -> tuple[str, ...]:
    return cell.states if return_states else cell.states[:1]


def _run(spec: RecurrenceSpec, call: Call, implementation: Implementation, caller: Caller) -> Any:
    """Runs a call whose arguments are valid.

    Returns:
      The last states, and the sequences of the states that `spec.returned` names, in the order of `cell.states`; for
      both directions a pair of these.
    """
    call = jax.tree.map(jnp.asarray, call)
    bidirectional, cell = spec.reverse == "bidirectional", spec.cell
    if has_blocks(call.params[0] if bidirectional else call.params):
        return run_blocks(cell, lambda block: _run(spec, block, implementation, caller), call)
    if cell.prepare is not None:
        prepare = functools.partial(_prepare, cell)
        call = call._replace(params=tuple(map(prepare, call.params)) if bidirectional else prepare(call.params))
    choice = _choose(spec, call, implementation, caller)

    def compute(call: Call) -> Any:
        if choice.implementation == "triton":
            return kernel_vjp.run_kernels(dataclasses.replace(spec, may_use_xla=choice.may_use_xla), call)
        return tuple(map(_xla, spec.directions(), call.directions())) if bidirectional else _xla(spec, call)

    # `mark` makes the call visible to `jaxrnn.explain`, and else returns `compute`
    return choice.mark(compute)(call)


def _prepare(cell: Cell, params: Any) -> Any:
    """Returns the weights that the loop multiplies; on an explicit mesh, `prepare` needs replicated weights."""
    return cell.prepare(cell, sharding.replicate(params))  # type: ignore[misc]


def _split_reset_state(cell: Cell, reset_state: Any) -> tuple[Any, ...]:
    return (None,) * len(cell.states) if reset_state is None else split_carry(cell, "reset_state", reset_state)


@functools.partial(jax.jit, static_argnums=0)
def _xla(spec: RecurrenceSpec, call: Call) -> Any:
    """Runs `scan.run` under `jax.jit`, so that eager calls reuse the compiled program."""
    call = kernel_vjp.reshard_call(call, spec.time_major)
    # a scan's carry keeps its type
    call = call._replace(states=sharding.unify_varying_axes(call.states, call))
    run = functools.partial(scan.run, spec)
    with jax.named_scope(f"{spec.cell.name}_xla"):
        return (jax.checkpoint(run) if spec.remat else run)(call)


def _choose(spec: RecurrenceSpec, call: Call, implementation: Implementation, caller: Caller) -> Choice:
    """Chooses the implementation of a recurrence; errors are those of `choose`."""
    bidirectional = spec.reverse == "bidirectional"
    states, params = (call.states[0], call.params[0]) if bidirectional else (call.states, call.params)
    xs, precision = call.xs, spec.precision
    steps, hidden = xs.shape[0 if spec.time_major else -2], states[-1].shape[-1]

    def unsupported() -> str | None:
        """Returns the end of the sentence "the Triton implementation ...", or None if the kernels can run."""
        arrays = jax.tree.leaves((states, xs, params))
        reason = _bridge.symbolic_size(arrays) or _bridge.unsupported([x.dtype for x in arrays], hidden)
        if reason is not None or kernel_vjp.kernel_precision(precision, hidden) is not None:
            return reason
        used = jax.config.jax_default_matmul_precision if precision is None else precision  # type: ignore[attr-defined]
        return f'has no kernel for precision {used!r}: pass a jax.lax.Precision, or implementation="xla"'

    def prefer_xla() -> str | None:
        if _bridge.is_preferred(steps):
            return None
        if not _bridge.on_gpu():
            return NOT_ON_GPU
        return "XLA is faster for a single step" if steps == 1 else "there is no step, or a symbolic number of steps"

    def arguments() -> str:
        return f"{describe_arrays(xs=xs)}, {hidden} units" + (", both directions" if bidirectional else "")

    return choose(
        spec.cell.name, arguments, implementation, prefer_xla=prefer_xla, unsupported=unsupported,
        empty=0 in (*xs.shape[:-1], hidden), caller=caller.name,
    )  # fmt: skip
