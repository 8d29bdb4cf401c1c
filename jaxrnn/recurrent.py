"""`gru` and `lstm`: check the arguments, choose the implementation, run it.

The Triton implementation is one `jax.custom_vjp` for all cells. It works on canonical arrays `[G, T, B, W]` (G groups
of B sequences, time first inside a group): time-major input is one group, batch-major input is one group a sequence,
and `vmap` adds groups, or models if the weights are batched. None of these costs a transpose.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrnn import _bridge, cells, projection, reference
from jaxrnn.reference import GRUParams, LSTMParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from jax import Array

    from jaxrnn._bridge import Reverse

    Implementation = Literal["triton", "xla"] | None


def gru(
    params: GRUParams,
    carry: Array,
    xs: Array,
    *,
    resets: Array | None = None,
    reset_state: Array | None = None,
    reverse: bool = False,
    time_major: bool = True,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[Array, Array]:
    """Runs a GRU over time, starting afresh wherever `resets` is nonzero.

    With s the logistic function and gates ordered r, z, n (the variant of cuDNN, PyTorch and Flax):

        h = reset_state if resets[t] else h
        r = s(W_ir x + W_hr h + b_r),  z = s(W_iz x + W_hz h + b_z)
        n = tanh(W_in x + b_in + r * (W_hn h + b_hn))
        h' = (1 - z) * n + z * h

    Args:
      params: `GRUParams(w_ih [D, 3H], w_hh [H, 3H], b_ih [3H], b_hn [H])`.
      carry: `[*batch, H]` the hidden state before the first step.
      xs: `[T, *batch, D]` inputs, time first; `[*batch, T, D]` if not `time_major`. Any number of batch axes.
      resets: `[T, *batch]` (`[*batch, T]`), any dtype; nonzero at the first step of an episode, that is, the *previous*
        step's done. That step sees `reset_state`, not the carry, and no gradient crosses it.
      reset_state: what an episode starts from: None (zeros), `[H]` (a learned state), `[*batch, H]`, or a value for
        every step, `[T, *batch, H]` (`[*batch, T, H]`). Takes gradients.
      reverse: run from the last step to the first; outputs stay in the order of the inputs.
      time_major: whether time is the first axis of `xs`, `resets` and the outputs, or the last before features.
      precision: of every matmul, as in `jax.lax.dot_general`; None takes `jax_default_matmul_precision`.
      remat: save no gates for the backward pass; recompute them there, in matmuls over many steps at a time.
      implementation: "triton" (a fused kernel, needs an NVIDIA GPU), "xla" (`lax.scan`), or None: the fastest that
        works here. A name works or raises.

    On an explicit mesh `xs` may be sharded over its batch axes: every device runs its part, and what else is given goes
    to where that is. So it is for the first batch axis if JAX manages the mesh by itself (`AxisType.Auto`).

    Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) and derivatives of gradients need `implementation="xla"`: the
    kernels have a gradient and no other derivative, and raise also where None picks them.

    Returns:
      `(carry, ys)` as `lax.scan` would: the last hidden state `[*batch, H]`, and all of them, `[T, *batch, H]`
      (`[*batch, T, H]`), in the dtype of `carry`. Between steps the hidden state is float32.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input, or the kernels are asked for a forward-mode
        or second derivative; the message says which limit was hit.
    """
    _check_gru(params, carry, xs, resets, reset_state, time_major)
    params, carry, xs, resets, reset_state = jax.tree.map(jnp.asarray, (params, carry, xs, resets, reset_state))
    if use_triton(implementation, precision, time_major, carry, xs, params):
        (h,), (hs,) = _run_triton(
            cells.GRU, params, (carry,), xs, resets, (reset_state,), reverse, time_major, precision, remat, ("h",)
        )
        return h, hs

    return _xla(
        reference.gru, remat, params, carry, xs, resets, reset_state, reverse=reverse, time_major=time_major,
        precision=precision,
    )  # fmt: skip


def lstm(
    params: LSTMParams,
    carry: tuple[Array, Array],
    xs: Array,
    *,
    resets: Array | None = None,
    reset_state: tuple[Array, Array] | None = None,
    reverse: bool = False,
    time_major: bool = True,
    return_cells: bool = False,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[tuple[Array, Array], Array | tuple[Array, Array]]:
    """Runs an LSTM over time, starting afresh wherever `resets` is nonzero.

    With s the logistic function and gates ordered i, f, g, o (nothing is added to the forget gate):

        c, h = reset_state if resets[t] else c, h
        i, f, o = s(W_i x + W_h h + b),  g = tanh(W_ig x + W_hg h + b_g)
        c' = f * c + i * g,  h' = o * tanh(c')

    With `params.w_hr` the hidden state is projected to P units, as by `proj_size` of `torch.nn.LSTM` (Sak et al. 2014):
    `h' = W_hr (o * tanh(c'))`, and P takes the place of H wherever the width of h is meant. The kernels
    multiply by W_h W_hr in their loop: 4 H^2 products a step for 5 H P, which costs little beside its latency.

    Args:
      params: `LSTMParams(w_ih [D, 4H], w_hh [H, 4H], b [4H])`; with a projection `w_hh [P, 4H]` and `w_hr [H, P]`.
      carry: `(c, h)`, each `[*batch, H]`: cell and hidden state before the first step, in Flax's order.
      xs: as in `gru`.
      resets: as in `gru`.
      reset_state: None (zeros) or `(c, h)`, each of a shape that `gru` takes.
      reverse: as in `gru`.
      time_major: as in `gru`.
      return_cells: also return the cell state of every step.
      precision: as in `gru`.
      remat: as in `gru`.
      implementation: as in `gru`.

    Returns:
      `((c, h), hs)`, or `((c, h), (hs, cs))` if `return_cells`: the last carry, and the hidden (and cell) states of all
      steps, each in the dtype of its carry.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input, or the kernels are asked for a forward-mode
        or second derivative; the message says which limit was hit.
    """
    _check_lstm(params, carry, xs, resets, reset_state, time_major)
    params, (c0, h0), xs, resets, reset_state = jax.tree.map(jnp.asarray, (params, carry, xs, resets, reset_state))
    if use_triton(implementation, precision, time_major, c0, xs, params, h0):
        reset_c, reset_h = (None, None) if reset_state is None else reset_state
        (h, c), sequences = _run_triton(
            cells.LSTM, params, (h0, c0), xs, resets, (reset_h, reset_c), reverse, time_major, precision, remat,
            ("h", "c") if return_cells else ("h",),
        )  # fmt: skip
        return (c, h), (sequences[0], sequences[1]) if return_cells else sequences[0]

    return _xla(
        reference.lstm, remat, params, (c0, h0), xs, resets, reset_state, reverse=reverse, time_major=time_major,
        precision=precision, return_cells=return_cells,
    )  # fmt: skip


def bidirectional_gru(
    params: tuple[GRUParams, GRUParams],
    carry: tuple[Array, Array],
    xs: Array,
    *,
    resets: tuple[Array, Array] | None = None,
    reset_state: tuple[Array, Array] | None = None,
    time_major: bool = True,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Runs a GRU over time and another one in reverse, side by side: both directions take one launch of a kernel.

    Each has launches of its own where it fills a GPU by itself, from 2^18 hidden states on (2048 sequences of 128
    units), and where `remat` recomputes the gates for a part of the steps at a time.

    The same as, where a pair has one of each direction:

        gru(params[0], carry[0], xs, resets=resets[0], reset_state=reset_state[0], ...),
        gru(params[1], carry[1], xs, resets=resets[1], reset_state=reset_state[1], reverse=True, ...)

    Args:
      params: a pair.
      carry: a pair.
      xs: as in `gru`, shared.
      resets: None or a pair. In reverse an episode starts at the last of its steps, so one is not a copy of the other.
      reset_state: None or a pair.
      time_major: as in `gru`.
      precision: as in `gru`.
      remat: as in `gru`.
      implementation: as in `gru`.

    Returns:
      What the two calls would, a pair of `(carry, ys)`.

    Raises:
      ValueError: as `gru`, or a pair's two have not the same shapes and dtypes.
      NotImplementedError: as `gru`.
    """
    directions = _pairs(params, carry, resets, reset_state)
    for params_, carry_, resets_, state in directions:
        _check_gru(params_, carry_, xs, resets_, state, time_major)
    _check_alike(directions)
    directions, xs = jax.tree.map(jnp.asarray, (directions, xs))
    params, carry, resets, reset_state = zip(*directions, strict=True)
    if use_triton(implementation, precision, time_major, carry[0], xs, params[0]):
        both = _run_triton(
            cells.GRU, params, tuple((h,) for h in carry), xs, resets, tuple((h,) for h in reset_state), "odd",
            time_major, precision, remat, ("h",),
        )  # fmt: skip
        forward, backward = ((h, hs) for (h,), (hs,) in both)
        return forward, backward

    return _xla_both(reference.gru, remat, directions, xs, time_major=time_major, precision=precision)


def bidirectional_lstm(
    params: tuple[LSTMParams, LSTMParams],
    carry: tuple[tuple[Array, Array], tuple[Array, Array]],
    xs: Array,
    *,
    resets: tuple[Array, Array] | None = None,
    reset_state: tuple[tuple[Array, Array], tuple[Array, Array]] | None = None,
    time_major: bool = True,
    return_cells: bool = False,
    precision: jax.lax.PrecisionLike = None,
    remat: bool = False,
    implementation: Implementation = None,
) -> tuple[Any, Any]:
    """As `bidirectional_gru`, of LSTMs: what `lstm` takes once comes in pairs, one of each direction.

    Args:
      params: a pair.
      carry: a pair of `(c, h)`.
      xs: as in `lstm`, shared.
      resets: None or a pair.
      reset_state: None or a pair of `(c, h)`.
      time_major: as in `gru`.
      return_cells: as in `lstm`.
      precision: as in `gru`.
      remat: as in `bidirectional_gru`.
      implementation: as in `gru`.

    Returns:
      A pair of what `lstm` returns.

    Raises:
      ValueError: as `lstm`, or a pair's two have not the same shapes and dtypes.
      NotImplementedError: as `lstm`.
    """
    directions = _pairs(params, carry, resets, reset_state)
    for params_, carry_, resets_, state in directions:
        _check_lstm(params_, carry_, xs, resets_, state, time_major)
    _check_alike(directions)
    directions, xs = jax.tree.map(jnp.asarray, (directions, xs))
    params, carry, resets, reset_state = zip(*directions, strict=True)
    if use_triton(implementation, precision, time_major, carry[0][0], xs, params[0], carry[0][1]):
        both = _run_triton(
            cells.LSTM, params, tuple((h, c) for c, h in carry), xs, resets,
            tuple((None, None) if state is None else (state[1], state[0]) for state in reset_state), "odd",
            time_major, precision, remat, ("h", "c") if return_cells else ("h",),
        )  # fmt: skip
        forward, backward = (((c, h), each if return_cells else each[0]) for (h, c), each in both)
        return forward, backward

    return _xla_both(
        reference.lstm, remat, directions, xs, time_major=time_major, precision=precision, return_cells=return_cells
    )


@functools.partial(
    jax.jit, static_argnums=(0, 1), static_argnames=("reverse", "time_major", "precision", "return_cells")
)
def _xla(
    function: Callable[..., Any], remat: bool, params: Any, carry: Any, xs: Array, resets: Array | None,
    reset_state: Any, **options: Any,
) -> Any:  # fmt: skip
    """The reference; compiled, so that an eager call finds what the one before has compiled."""

    def run(params: Any, carry: Any, xs: Array, reset_state: Any) -> Any:
        return function(params, carry, xs, resets=resets, reset_state=reset_state, **options)

    return (jax.checkpoint(run) if remat else run)(params, carry, xs, reset_state)


def _xla_both(
    function: Callable[..., Any], remat: bool, directions: tuple[Any, Any], xs: Array, **options: Any
) -> tuple[Any, Any]:
    """`_xla`, forward and in reverse: `directions` are as of `_pairs`, and the results a pair."""
    forward, backward = (
        _xla(function, remat, params, carry, xs, resets, reset_state, reverse=reverse, **options)
        for reverse, (params, carry, resets, reset_state) in zip((False, True), directions, strict=True)
    )
    return forward, backward


def _check_gru(params: Any, carry: Any, xs: Array, resets: Any, reset_state: Any, time_major: bool) -> None:
    """Raises ValueError unless `gru` can take them."""
    raise_unless_params(params, GRUParams, "gru")
    hidden = check_carry("carry", carry)
    check_sequence(xs, carry, time_major)
    wide = 3 * hidden
    check_params(params, {"w_ih": (xs.shape[-1], wide), "w_hh": (hidden, wide), "b_ih": (wide,), "b_hn": (hidden,)})
    check_resets(resets, xs, time_major)
    check_reset_state("reset_state", reset_state, resets, carry, xs, time_major)


def _check_lstm(params: Any, carry: Any, xs: Array, resets: Any, reset_state: Any, time_major: bool) -> None:
    """Raises ValueError unless `lstm` can take them."""
    raise_unless_params(params, LSTMParams, "lstm")
    c0, h0 = check_pair("carry", carry)
    width = check_carry("carry[1]", h0)
    hidden = check_carry("carry[0]", c0)
    if c0.shape != h0.shape and (params.w_hr is None or c0.shape[:-1] != h0.shape[:-1]):
        widths = "both [*batch, H]" if params.w_hr is None else "[*batch, H] and [*batch, P]"
        raise ValueError(f"carry is (c, h), {widths}; got c {c0.shape} and h {h0.shape}")
    check_sequence(xs, h0, time_major)
    shapes: dict[str, tuple[int, ...]] = {"w_ih": (xs.shape[-1], 4 * hidden), "w_hh": (width, 4 * hidden)}
    shapes |= {"b": (4 * hidden,)} | ({} if params.w_hr is None else {"w_hr": (hidden, width)})
    check_params(params, shapes)
    check_resets(resets, xs, time_major)
    new_c, new_h = (None, None) if reset_state is None else check_pair("reset_state", reset_state)
    for i, (state, old) in enumerate(((new_c, c0), (new_h, h0))):
        check_reset_state(f"reset_state[{i}]", state, resets, old, xs, time_major)


def _pairs(params: Any, carry: Any, resets: Any, reset_state: Any) -> tuple[Any, Any]:
    """Two directions' `(params, carry, resets, reset state)`, of pairs of each."""
    pairs = {"params": params, "carry": carry, "resets": resets, "reset_state": reset_state}
    for name, pair in pairs.items():
        if pair is None and name.startswith("reset"):
            pairs[name] = (None, None)
        elif type(pair) not in (tuple, list) or len(pair) != 2:
            raise ValueError(f"{name} of both directions is a pair (forward, in reverse), got {type(pair).__name__}")
    forward, backward = zip(*pairs.values(), strict=True)
    return forward, backward


def _check_alike(directions: tuple[Any, Any]) -> None:
    """Raises ValueError unless what two directions were given has the same shapes and dtypes."""
    names = "params", "carry", "resets", "reset_state"
    for name, *pair in zip(names, *directions, strict=True):
        forward, backward = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", pair)
        if forward != backward:
            raise ValueError(
                f"{name} of both directions must have the same shapes and dtypes, got {forward} and {backward}: "
                "convert one, or call each direction by itself"
            )


def raise_unless_params(params: Any, kind: type[GRUParams] | type[LSTMParams], function: str) -> None:
    """Raises ValueError unless `params` is a `kind`."""
    if not isinstance(params, kind):
        raise ValueError(f"{function} takes {kind.__name__}({', '.join(kind._fields)}), got {type(params).__name__}")


def check_pair(name: str, pair: Any) -> tuple[Array, Array]:
    """Returns `pair` as `(c, h)`."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{name} of an LSTM is a pair (c, h), got {type(pair).__name__}")
    return tuple(pair)


def check_floating(name: str, x: Array) -> None:
    """Raises ValueError unless `x` is a floating-point array."""
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(f"{name} must be floating point, got {jnp.result_type(x)}; convert it first")


def check_carry(name: str, carry: Any) -> int:
    """Returns the hidden width of `carry`."""
    if isinstance(carry, (tuple, list)):
        raise ValueError(f"{name} must be one array [*batch, H], got a {type(carry).__name__} of {len(carry)}")
    if jnp.ndim(carry) < 1:
        raise ValueError(f"{name} must be [*batch, H], got a scalar")
    check_floating(name, carry)
    return int(carry.shape[-1])


def check_sequence(xs: Array, carry: Array, time_major: bool) -> None:
    """Raises ValueError unless `xs` is a sequence whose batch axes are those of `carry`."""
    check_floating("xs", xs)
    expected = "[T, *batch, D]" if time_major else "[*batch, T, D]"
    if xs.ndim < 2:
        raise ValueError(f"xs must be {expected}, got {xs.shape}")
    batch = xs.shape[1:-1] if time_major else xs.shape[:-2]
    if carry.shape[:-1] != batch:
        raise ValueError(
            f"carry must be [*batch, H] with batch axes {batch} as in xs {expected} = {xs.shape}, got {carry.shape}"
        )


def check_params(params: GRUParams | LSTMParams, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError unless the weights have these shapes, which follow from xs and carry."""
    for name, shape in shapes.items():
        got = getattr(params, name)
        check_floating(f"params.{name}", got)
        if jnp.shape(got) != shape:
            raise ValueError(
                f"params.{name} must be {shape} for inputs of width {shapes['w_ih'][0]} and a carry of width "
                f"{shapes['w_hh'][0]}, got {jnp.shape(got)}"
            )


def check_resets(resets: Array | None, xs: Array, time_major: bool) -> None:
    """Raises ValueError unless `resets` has one entry a step and sequence."""
    if resets is not None and jnp.shape(resets) != xs.shape[:-1]:
        layout = "[T, *batch]" if time_major else "[*batch, T]"
        raise ValueError(f"resets must be {layout} = {xs.shape[:-1]} as in xs {xs.shape}, got {jnp.shape(resets)}")


def check_reset_state(name: str, state: Any, resets: Array | None, carry: Array, xs: Array, time_major: bool) -> None:
    """Raises ValueError unless `state` is None or has one of the shapes a reset state may have."""
    if state is None:
        return
    if isinstance(state, (tuple, list)):
        raise ValueError(f"{name} must be one array, got a {type(state).__name__} of {len(state)}")
    if resets is None:
        raise ValueError(f"{name} is given but resets is None: pass resets, or leave {name} out")
    check_floating(name, state)
    hidden = carry.shape[-1:]
    shapes = (hidden, carry.shape, xs.shape[:-1] + hidden)
    if jnp.shape(state) not in shapes:
        layout = "[T, *batch, H]" if time_major else "[*batch, T, H]"
        raise ValueError(
            f"{name} must be [H] = {shapes[0]}, [*batch, H] = {shapes[1]} or {layout} = {shapes[2]}, "
            f"got {jnp.shape(state)}"
        )


# Dtypes of resets that the kernels read as they are.
KERNEL_RESETS = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32")
)


def use_triton(
    implementation: Any, precision: Any, time_major: bool, carry: Array, xs: Array, params: Any, *others: Array
) -> bool:
    """Whether to run the Triton kernels. Where there is nothing to compute, `lax.scan` gives the empty results.

    Raises:
      ValueError: no implementation has that name.
      NotImplementedError: "triton" was asked for and cannot run; the message says why.
    """
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f'implementation must be "triton", "xla" or None, got {implementation!r}')
    if implementation == "xla" or (implementation is None and not _bridge.preferred(xs.shape[0 if time_major else -2])):
        return False
    reason = _bridge.unsupported([x.dtype for x in jax.tree.leaves((carry, xs, params, others))], carry.shape[-1])
    if reason is None and kernel_precision(precision, carry.shape[-1]) is None:
        precision = jax.config.jax_default_matmul_precision if precision is None else precision  # type: ignore[attr-defined]
        reason = f'has no kernel for precision {precision!r}: pass a jax.lax.Precision, or implementation="xla"'
    if reason is not None and implementation == "triton":
        raise NotImplementedError(f"the Triton implementation {reason}")
    return reason is None and 0 not in (*xs.shape[:-1], carry.shape[-1])


# Up to this width XLA multiplies small batches in full float32: TF32 would be far from its accuracy.
_FULL_PRECISION_WIDTH = 32


def kernel_precision(precision: Any, hidden: int) -> str | None:
    """The precision a kernel runs float32 products in, by Triton's name; None if there is no such kernel."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if isinstance(precision, tuple):
        return kernel_precision(precision[0], hidden) if len(set(precision)) == 1 else None
    try:
        default = precision is None or jax.lax.Precision(precision) == jax.lax.Precision.DEFAULT
    except ValueError:
        return None
    return "tf32" if default and hidden > _FULL_PRECISION_WIDTH else "tf32x3"


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a recurrence is specialised on, besides shapes and dtypes."""

    cell: cells.Cell
    operand_dtype: Any
    reset_state: str
    reverse: Reverse
    precision: Any
    kernel_precision: str
    remat: bool
    returned: tuple[str, ...]


def _batch_spec(xs: Array, time_major: bool) -> tuple[Any, ...]:
    """How the batch axes of `xs` are sharded over an explicit mesh; nothing if they are not.

    Raises:
      NotImplementedError: other axes are.
    """
    spec = tuple(getattr(jax.typeof(xs).sharding, "spec", ()))
    spec += (None,) * (xs.ndim - len(spec))
    batch = spec[1:-1] if time_major else spec[:-2]
    if any(axis is not None for axis in (spec[0] if time_major else spec[-2], spec[-1])):
        raise NotImplementedError(
            f"the Triton implementation needs whole sequences and features on a device, and xs is sharded as {spec}: "
            'jax.reshard it to be sharded over batch axes alone, or pass implementation="xla"'
        )
    return batch if any(axis is not None for axis in batch) else ()


def _run_triton(
    cell: cells.Cell, params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, reverse: Reverse,
    time_major: bool, precision: Any, remat: bool, returned: tuple[str, ...],
) -> Any:  # fmt: skip
    """As `_run_on_device`, on each device of an explicit mesh for its part of the batch.

    With `reverse` "odd" as `_run_both_on_device`.
    """
    options = {"time_major": time_major, "precision": precision, "remat": remat, "returned": returned}
    if reverse == "odd":
        run = functools.partial(_run_both_on_device, cell, **options)
    else:
        run = functools.partial(_run_on_device, cell, None, reverse=reverse, **options)
    arguments = _bridge.reverse_mode_only((params, states, xs, resets, reset_states))
    batch = _batch_spec(xs, time_major)
    if not batch:
        return run(*_bridge.whole(arguments))
    whole, state = PartitionSpec(), PartitionSpec(*batch, None)
    sequence = PartitionSpec(None, *batch, None) if time_major else PartitionSpec(*batch, None, None)
    by_rank = {1: whole, len(state): state, len(sequence): sequence}
    specs = (
        jax.tree.map(lambda _: whole, params),
        jax.tree.map(lambda _: state, states),
        sequence,
        jax.tree.map(lambda _: PartitionSpec(*sequence[:-1]), resets),
        jax.tree.map(lambda x: by_rank[x.ndim], reset_states),
    )
    results: Any = tuple(state for _ in cell.states), tuple(sequence for _ in returned)
    results = (results, results) if reverse == "odd" else results
    return _bridge.on_each_device(run, jax.typeof(xs).sharding.mesh, specs, results, arguments)


# States from which on one direction by itself fills a GPU, and to bring both side by side costs more than a launch
# saves. H200: one launch takes 0.6 to 0.8 of the time of two up to 256 sequences of 128 units, and 1.2 of it at 2048.
_FULL = 2**18


def _run_both_on_device(
    cell: cells.Cell, params: Any, states: Any, xs: Array, resets: Any, reset_states: Any, *, remat: bool,
    **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """As `_run_on_device`, forward and in reverse at once: of all but `xs` a pair, and so are the results."""
    hidden, time_major = states[0][-1].shape[-1], options["time_major"]
    steps = xs.shape[0] if time_major else xs.shape[-2]
    both = jax.ShapeDtypeStruct((2, steps, math.prod(xs.shape[:-1]) // steps, xs.shape[-1]), xs.dtype)
    in_chunks = remat and _chunk_steps(cell, both, hidden) < steps  # which go through time in one order
    if in_chunks or math.prod(states[0][-1].shape) >= _FULL:
        forward, backward = (
            _run_on_device(cell, None, *each[:2], xs, *each[2:], reverse=reverse, remat=remat, **options)
            for reverse, each in zip((False, True), zip(params, states, resets, reset_states, strict=True), strict=True)
        )
        return forward, backward

    def run(in_reverse: Array, each: Any) -> Any:
        params, states, resets, reset_states = each
        return _run_on_device(
            cell, in_reverse, params, states, xs, resets, reset_states, reverse="odd", remat=remat, **options
        )

    directions = zip(params, states, resets, reset_states, strict=True)
    stacked = jax.tree.map(lambda *pair: jnp.stack(pair), *directions)
    results = jax.vmap(run)(jnp.array([False, True]), stacked)
    return jax.tree.map(lambda x: x[0], results), jax.tree.map(lambda x: x[1], results)


def _run_on_device(
    cell: cells.Cell, in_reverse: Array | None, params: Any, states: tuple[Array, ...], xs: Array,
    resets: Array | None, reset_states: tuple[Array | None, ...], *, reverse: Reverse, time_major: bool, precision: Any,
    remat: bool, returned: tuple[str, ...],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:  # fmt: skip
    """Runs the kernels, for an LSTM with a projection too.

    With `reverse` "odd" it is under a `jax.vmap` over two directions, and `in_reverse` says which one this is.

    Returns the last states, and of the states named in `returned` those of every step.
    """
    # out here, where the transpose sums gradients over the devices of a `shard_map` that an argument does not vary over
    params, states, xs, resets, reset_states = _bridge.vary_alike((params, states, xs, resets, reset_states))
    options: dict[str, Any] = {"reverse": reverse, "time_major": time_major, "remat": remat, "returned": returned}
    if getattr(params, "w_hr", None) is None:
        operand_dtype = jnp.result_type(xs, params.w_ih, params.w_hh)
        return _run_canonical(
            cell, in_reverse, params, states, xs, resets, reset_states, None, operand_dtype, precision=precision,
            **options,
        )  # fmt: skip

    (h0, c0), (reset_h, reset_c), w_hr = states, reset_states, params.w_hr
    operand_dtype = jnp.result_type(xs, params.w_ih, params.w_hh)
    widths = w_hr.shape if operand_dtype == jnp.float32 else w_hr.shape[:1]
    if min(widths) <= _FULL_PRECISION_WIDTH:
        precision = jax.lax.Precision.HIGHEST
    from_last: bool | Array = reverse is True if in_reverse is None else in_reverse
    plain = projection.without_projection(
        params, h0, xs, resets, reset_h, in_reverse=from_last, time_major=time_major, precision=precision
    )
    (_, c), (ms, *cs) = _run_canonical(
        cell, in_reverse, plain.params, (_bridge.vary_alike(plain.m0, xs), c0), plain.xs, resets, (None, reset_c),
        plain.first, plain.m0.dtype, precision=precision, **options,
    )  # fmt: skip
    # as float32, like the weights' product: or the gradient of ms would be rounded to the 16 bits of what is multiplied
    hs = projection.product(ms, w_hr.astype(jnp.float32), precision).astype(h0.dtype)
    axis = 0 if time_major else hs.ndim - 2
    first, last = (jax.lax.index_in_dim(hs, at, axis, keepdims=False) for at in (0, -1))
    return (jnp.where(from_last, first, last), c), (hs, *cs)


def _merge_axes(x: Array, start: int, count: int) -> Array:
    """`count` axes of `x`, from `start` on, as one."""
    if count == 0:
        return jnp.expand_dims(x, start)
    return x.reshape(*x.shape[:start], math.prod(x.shape[start : start + count]), *x.shape[start + count :])


def _split_axis(x: Array, axis: int, sizes: tuple[int, ...]) -> Array:
    """An axis of `x` as axes of `sizes`."""
    return x.reshape(*x.shape[:axis], *sizes, *x.shape[axis + 1 :]) if sizes else x.squeeze(axis)


def _run_canonical(
    cell: cells.Cell, in_reverse: Array | None, params: Any, states: tuple[Array, ...], xs: Array,
    resets: Array | None, reset_states: tuple[Array | None, ...], first: Array | None, operand_dtype: Any, *,
    reverse: Reverse, time_major: bool, precision: Any, remat: bool, returned: tuple[str, ...],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:  # fmt: skip
    """Brings the arguments into canonical form, runs the kernels, and brings the results back: `_run_on_device`.

    `first [*batch, gates * H]`, if any, is added to the input projection of the step that is computed first.
    """
    hidden, rank = states[0].shape[-1], states[0].ndim
    batch = xs.shape[1:-1] if time_major else xs.shape[:-2]
    # the one group, or the one sequence of each, is an axis put in and taken out: a reshape would forget how an axis of
    # size 1 that `vmap` goes over is sharded
    one, one_stepped = (0, 0) if time_major else (1, 2)

    def sequence(x: Array) -> Array:
        return jnp.expand_dims(_merge_axes(x, int(time_major), len(batch)), one_stepped)

    def state(x: Array) -> Array:
        x = jnp.broadcast_to(x, (*batch, x.shape[-1]))
        return jnp.expand_dims(_merge_axes(x, 0, len(batch)), one)

    def stepped(x: Array) -> Array:
        if x.ndim <= rank:
            x = jnp.expand_dims(jnp.broadcast_to(x, (*batch, hidden)), 0 if time_major else -2)
        return sequence(jnp.broadcast_to(x, (*xs.shape[:-1], hidden)))

    if resets is not None and resets.dtype.name not in KERNEL_RESETS:
        resets = resets != 0
    # the kernels carry float32; they read and write states in it, or in bfloat16 where all of it is bfloat16
    dtypes = [x.dtype if x.dtype == operand_dtype == jnp.bfloat16 else jnp.dtype(jnp.float32) for x in states]
    kind, canonical_reset_states = "zeros", None
    if any(x is not None for x in reset_states):
        # to the dtype of the kernel first, so that gradients of what is then repeated add up in it
        given = [
            _bridge.vary_alike(jnp.zeros((hidden,), dtype), states) if x is None else x.astype(dtype)
            for x, dtype in zip(reset_states, dtypes, strict=True)
        ]
        kind = "stepped" if any(x.ndim > rank for x in given) else "fixed"
        canonical_reset_states = tuple(map(stepped if kind == "stepped" else state, given))
    static = _Static(
        cell=cell,
        operand_dtype=operand_dtype,
        reset_state=kind,
        reverse=reverse,
        precision=precision,
        kernel_precision=str(kernel_precision(precision, hidden)),
        remat=remat,
        returned=returned,
    )
    last, sequences = _recurrence(
        static, params, tuple(state(x.astype(dtype)) for x, dtype in zip(states, dtypes, strict=True)),
        sequence(xs), None if resets is None else sequence(resets), canonical_reset_states,
        None if first is None else state(first), in_reverse,
    )  # fmt: skip
    return (
        tuple(_split_axis(x.squeeze(one), 0, batch).astype(given.dtype) for x, given in zip(last, states, strict=True)),
        tuple(
            _split_axis(sequences[name].squeeze(one_stepped), int(time_major), batch).astype(given.dtype)
            for name, given in zip(cell.states, states, strict=True)
            if name in returned
        ),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _recurrence(
    static: _Static, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None,
) -> tuple[tuple[Array, ...], dict[str, Array]]:  # fmt: skip
    """Runs the recurrence on canonical arrays: returns the last states, and by name those of every step."""
    last, sequences, _ = _forward(static, params, states, xs, resets, reset_states, first, in_reverse, keep=False)
    return last, sequences


def _forward(
    static: _Static, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None, keep: bool,
) -> tuple[tuple[Array, ...], dict[str, Array], dict[str, Array]]:  # fmt: skip
    """As `_recurrence`, and returns the arrays of all steps; with `keep`, what the backward pass needs too."""
    run = functools.partial(_forward_on_device, static, keep)
    return _bridge.on_each_device_of_vmap(run, params, states, xs, resets, reset_states, first, in_reverse)


def _forward_on_device(
    static: _Static, keep: bool, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None,
) -> tuple[tuple[Array, ...], dict[str, Array], dict[str, Array]]:  # fmt: skip
    """`_forward`, where no axis that devices share out is mapped."""
    cell, hidden, steps, operand_dtype = static.cell, states[0].shape[-1], xs.shape[1], static.operand_dtype
    f32 = jnp.dtype(jnp.float32)
    w_hh = _operand(params.w_hh.astype(operand_dtype), static.kernel_precision)
    weights: dict[str, Array | None] = {"w_hh_t": w_hh.T[None]}
    weights |= {name: b.astype(f32)[None] for name, b in cell.hidden_biases(params).items()}
    outputs = [
        _bridge.Output(f"{s}s", True, hidden, x.dtype)
        for s, x in zip(cell.states, states, strict=True)
        if s == "h" or s in static.returned or (keep and static.remat and s in cell.history)
    ]
    outputs += [_bridge.Output(f"{s}_last", False, hidden, f32) for s in cell.states]
    if keep and not static.remat:
        outputs += [
            _bridge.Output(name, True, width * hidden, _saved_dtype(name, operand_dtype, static.kernel_precision))
            for name, width in cell.saved
        ]

    stepped = reset_states if static.reset_state == "stepped" else None

    def run(states: tuple[Array, ...], sequences: Any, start: Any) -> tuple[tuple[Array, ...], None, dict[str, Array]]:
        x, reset, new = sequences
        beginnings = _beginnings(static, in_reverse, start, x.shape[1], steps)
        xp = _input_projection(static, params, x, first, beginnings)
        arrays: dict[str, Array | None] = weights | {"xp": xp}
        arrays |= {"reset": reset} | {f"{s}0": x for s, x in zip(cell.states, states, strict=True)}
        arrays |= {f"reset_{s}": x for s, x in zip(cell.states, new or reset_states or (), strict=False)}
        results = _bridge.launch(
            cell.name, "fwd", arrays, outputs, reset_state=static.reset_state, reverse=static.reverse,
            precision=static.kernel_precision,
        )  # fmt: skip
        return tuple(results.pop(f"{s}_last") for s in cell.states), None, results

    size = _chunk_steps(cell, xs, hidden) if keep and static.remat else steps
    if size < steps:
        states = tuple(x.astype(f32) for x in states)  # as a chunk hands them to the next
    last, _, results = _in_chunks(run, states, (xs, resets, stepped), size, last_first=static.reverse is True)
    return last, {s: results[f"{s}s"] for s in static.returned}, results


def _beginnings(static: _Static, in_reverse: Array | None, start: Any, size: int, steps: int) -> list[tuple[int, Any]]:
    """Which of `size` steps from `start` on, of `steps`, the loop may begin with: `(index, whether it does)`."""
    if in_reverse is not None:
        return [(0, ~in_reverse), (size - 1, in_reverse)]
    return [(size - 1, start + size == steps) if static.reverse else (0, start == 0)]


def _input_projection(
    static: _Static, params: Any, xs: Array, first: Array | None, beginnings: list[tuple[int, Any]]
) -> Array:
    """`[G, T, B, gates * H]`, with `first` added at the step that the loop begins with.

    In float32, or in float16 where kernels that read bfloat16 are faster so.
    """
    cell, dtype = static.cell, static.operand_dtype
    inputs, gates = params.w_ih.shape
    if first is None and not static.remat and _bridge.projection_pays(math.prod(xs.shape[:-1]), inputs, gates, dtype):
        bias = getattr(params, cell.bias).astype(jnp.float32)
        return _bridge.launch_projection(xs.astype(dtype), params.w_ih.astype(dtype), bias, jnp.float16)
    xp = cells.project(cell, params, xs, static.precision)
    if first is not None:
        for at, begins in beginnings:  # written in place
            step = xp[:, at : at + 1] + jnp.where(begins, first, jnp.zeros_like(first))[:, None]
            xp = jax.lax.dynamic_update_slice_in_dim(xp, step, at, axis=1)
    return xp


# `remat` recomputes so many bytes at a time: a chunk then takes several times as long as its launches' 10 to 30 us, and
# is small beside inputs and states that one would save memory for.
_CHUNK_BYTES = 2**27
# At least so many steps, also where sequences are many: to bring the weights on chip takes as long as a few.
_CHUNK_STEPS = 16


def _chunk_steps(cell: cells.Cell, xs: Array | jax.ShapeDtypeStruct, hidden: int) -> int:
    """Steps that `remat` takes at a time: all, or as many as it may, fewer by up to a half if that leaves no rest."""
    groups, steps, batch = xs.shape[:3]
    # xp, hp, what is saved, and the states before each step, in float32
    step_bytes = 4 * groups * batch * hidden * (3 * cell.gates + len(cell.history))
    most = max(_CHUNK_STEPS, _CHUNK_BYTES // step_bytes)
    if most >= steps:
        return steps
    return next((size for size in range(most, most // 2, -1) if steps % size == 0), most)


def _in_chunks(
    run: Callable[[Any, Any, Any], tuple[Any, Any, Any]], carry: Any, sequences: Any, size: int, last_first: bool
) -> tuple[Any, Any, Any]:
    """Runs `run` on chunks of time of `sequences` `[G, T, ...]`, one after the other.

    It takes the carry, a chunk and where it starts, and returns the carry, what to add up over all chunks, and what to
    join along time.
    """
    steps = jax.tree.leaves(sequences)[0].shape[1]
    if size == steps:
        return run(carry, sequences, 0)
    full, rest = divmod(steps, size)
    # flat: where a batch of one lies among the axes is open, and XLA would copy what enters the loop to settle it
    flat = jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1), sequences)

    def part(start: Any, size: int) -> Any:
        def of(x: Array, flat: Array) -> Array:
            chunk = jax.lax.dynamic_slice_in_dim(flat, start, size, axis=1)
            return chunk.reshape(x.shape[0], size, *x.shape[2:])

        return jax.tree.map(of, sequences, flat)

    _, sums, parts = jax.eval_shape(lambda carry: run(carry, part(0, size), 0), carry)
    joined = jax.tree.map(lambda x: jnp.zeros((x.shape[0], steps, *x.shape[2:]), x.dtype), parts)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    everything = carry, *_bridge.vary_alike((zeros, joined), sequences)

    def chunk(everything: Any, start: Any, size: int) -> Any:
        carry, sums, joined = everything
        carry, terms, parts = run(carry, part(start, size), start)
        # written in place: of scans' stacked outputs, more than one group would be transposed
        joined = jax.tree.map(lambda x, p: jax.lax.dynamic_update_slice_in_dim(x, p, start, axis=1), joined, parts)
        return carry, jax.tree.map(jnp.add, sums, terms), joined

    if rest:  # before the loop, whose arrays XLA would copy to write another part
        everything = chunk(everything, full * size if last_first else 0, rest)
    starts = jnp.arange(full) * size + (0 if last_first else rest)
    everything, _ = jax.lax.scan(
        lambda everything, start: (chunk(everything, start, size), None), everything, starts, reverse=last_first
    )
    return everything


def _operand(w: Array, kernel_precision: str) -> Array:
    """Weights as the kernels multiply them: rounded to TF32, which the tensor cores would truncate to (a bias)."""
    if w.dtype != jnp.float32 or kernel_precision != "tf32":
        return w
    return jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=10)


def _saved_dtype(name: str, operand_dtype: Any, kernel_precision: str) -> Any:
    """What the backward pass needs is saved in: float16 rounds no worse than the products of TF32 or bfloat16 do.

    `keep` stays float32: it multiplies the gradient at every step, so its rounding would grow with their number.
    """
    products = "bfloat16" if operand_dtype == jnp.bfloat16 else kernel_precision
    wide = name == "keep" or operand_dtype == jnp.float16 or products == "tf32x3"
    return jnp.dtype(jnp.float32 if wide else jnp.float16)


def _recurrence_fwd(
    static: _Static, params: Any, states: tuple[Array, ...], xs: Array, resets: Array | None,
    reset_states: tuple[Array, ...] | None, first: Array | None, in_reverse: Array | None,
) -> tuple[Any, Any]:  # fmt: skip
    last, sequences, results = _forward(static, params, states, xs, resets, reset_states, first, in_reverse, keep=True)
    needed = [f"{s}s" for s in static.cell.history] if static.remat else [*dict(static.cell.saved), "hs"]
    saved = {name: results[name] for name in needed}
    return (last, sequences), (params, states, xs, resets, reset_states, first, in_reverse, saved)


def _before(static: _Static, history: Array, state: Array, start: Any, size: int) -> Array:
    """`[G, B, H]` the state that the first of these steps started from, resets not applied."""
    steps = history.shape[1]
    if size == steps:
        return state
    at = start + size if static.reverse else start - 1
    before = jax.lax.dynamic_index_in_dim(history, jnp.clip(at, 0, steps - 1), axis=1, keepdims=False)
    return jnp.where((at < 0) | (at == steps), state, before)


def _shifted(history: Array, state: Array, reverse: bool) -> Array:
    """`history` one step later in the order of `reverse`, with `state` first.

    Of padding XLA makes one pass at the speed of memory; of a concatenation one that takes 2.5 times as long (H200).
    """
    steps = history.shape[1]
    low, high, first = (-1, 1, steps - 1) if reverse else (1, -1, 0)
    zero = _bridge.vary_alike(jnp.zeros((), history.dtype), history)
    later = jax.lax.pad(history, zero, ((0, 0, 0), (low, high, 0), (0, 0, 0), (0, 0, 0)))
    return jnp.where((jnp.arange(steps) == first)[:, None, None], state[:, None], later)


def _previous(
    static: _Static, history: Array, state: Array, resets: Array | None, reset_state: Array | None,
    in_reverse: Array | None,
) -> Array:  # fmt: skip
    """`[G, T, B, H]` the state that every step started from, resets applied; the first from `state`."""
    if in_reverse is not None:
        previous = jnp.where(in_reverse, _shifted(history, state, True), _shifted(history, state, False))
    else:
        previous = _shifted(history, state, static.reverse is True)
    if resets is None:
        return previous
    new = jnp.zeros_like(previous)
    if reset_state is not None:
        new = reset_state if static.reset_state == "stepped" else reset_state[:, None]
    return jnp.where((resets != 0)[..., None], new, previous)


def _recurrence_bwd(static: _Static, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    run = functools.partial(_backward_on_device, static)
    dparams, dstates, dxs, dreset_states, dfirst = _bridge.on_each_device_of_vmap(run, residuals, cotangents)
    _, _, _, resets, _, _, in_reverse, _ = residuals
    return dparams, dstates, dxs, _no_gradient(resets), dreset_states, dfirst, _no_gradient(in_reverse)


def _backward_on_device(static: _Static, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    """The gradients of `_recurrence` to what has one, where no axis that devices share out is mapped."""
    params, states, xs, resets, reset_states, first, in_reverse, saved = residuals
    d_last, d_sequences = cotangents
    cell, hidden, steps, operand_dtype = static.cell, states[0].shape[-1], xs.shape[1], static.operand_dtype
    f32 = jnp.dtype(jnp.float32)
    w_hh = _operand(params.w_hh.astype(operand_dtype), static.kernel_precision)
    outputs = [_bridge.Output("dxp", True, cell.gates * hidden, operand_dtype)]
    outputs += [_bridge.Output(name, True, hidden, operand_dtype) for name in cell.hidden_grads]
    outputs += [_bridge.Output(f"d{s}0", False, hidden, f32) for s in cell.states]
    if reset_states:
        outputs += [_bridge.Output(f"dreset_{s}", True, hidden, f32) for s in cell.states]

    stepped = reset_states if static.reset_state == "stepped" else None
    fused = _fuses_weight_grads(static, xs, hidden)

    def run(d_last: tuple[Array, ...], sequences: Any, start: Any) -> tuple[tuple[Array, ...], Any, Any]:
        x, reset, new, factors, d_each = sequences
        new = new or reset_states
        beginnings = _beginnings(static, in_reverse, start, x.shape[1], steps)
        previous = {}
        for k, s in enumerate(cell.states):
            if f"{s}s" in saved and not fused:
                before = _before(static, saved[f"{s}s"], states[k], start, x.shape[1])
                previous[s] = _previous(static, factors[f"{s}s"], before, reset, new[k] if new else None, in_reverse)
        if static.remat:
            h_prev = previous["h"].astype(operand_dtype)
            xp = _input_projection(static, params, x, first, beginnings)
            hp = reference.matmul(h_prev, params.w_hh.astype(operand_dtype), static.precision, f32)
            factors = cell.save(params, xp, hp, {s: value.astype(f32) for s, value in previous.items()})
            for name, value in factors.items():
                dtype = _saved_dtype(name, operand_dtype, static.kernel_precision)
                factors[name] = (
                    value if dtype == f32 else jnp.clip(value, -65504.0, 65504.0).astype(dtype)
                )  # as the kernel

        arrays: dict[str, Array | None] = {"w_hh": w_hh[None], "reset": reset}
        arrays |= {name: factors[name] for name, _ in cell.saved}
        arrays |= {f"d{s}s": d for s, d in d_each.items()}
        arrays |= {f"d{s}_last": d for s, d in zip(cell.states, d_last, strict=True)}
        results = _bridge.launch(
            cell.name, "bwd", arrays, outputs, reset_state="zeros", reverse=static.reverse,
            precision=static.kernel_precision,
        )  # fmt: skip

        dxp, hidden_grads = results["dxp"], {name: results[name] for name in cell.hidden_grads}
        dx = jnp.einsum("gtby,xy->gtbx", dxp, params.w_ih.astype(operand_dtype), precision=static.precision,
                        preferred_element_type=f32)  # fmt: skip
        if fused:
            sums = _fused_weight_grads(static, x, factors["hs"], states[0], reset, dxp, hidden_grads)
        else:
            sums = _weight_grads(static, x, previous["h"], dxp, hidden_grads)
        parts = {}
        if first is not None:
            at_each = [jnp.where(begins, dxp[:, at].astype(f32), jnp.zeros_like(first)) for at, begins in beginnings]
            sums["first"] = functools.reduce(jnp.add, at_each)
        parts["xs"] = dx.astype(xs.dtype)
        for s, value in zip(cell.states, reset_states or (), strict=False):
            d = results[f"dreset_{s}"]
            if static.reset_state == "stepped":
                parts[f"reset_{s}"] = d.astype(value.dtype)
            else:  # the kernel gives every step's gradient: few are not zero, and a sum would take it registers
                sums[f"reset_{s}"] = d.sum(axis=1)
        return tuple(results[f"d{s}0"] for s in cell.states), sums, parts

    size = _chunk_steps(cell, xs, hidden) if static.remat else steps
    sequences = (xs, resets, stepped, saved, d_sequences)
    d_first, sums, parts = _in_chunks(run, d_last, sequences, size, last_first=not static.reverse)
    weights = {name: w for name, w in params._asdict().items() if w is not None}
    dparams = type(params)(**{name: sums[name].astype(w.dtype) for name, w in weights.items()})
    dstates = tuple(d.astype(x.dtype) for d, x in zip(d_first, states, strict=True))
    dreset_states = None
    if reset_states:
        found = sums | parts
        dreset_states = tuple(
            found[f"reset_{s}"].astype(x.dtype) for s, x in zip(cell.states, reset_states, strict=True)
        )
    dfirst = None if first is None else sums["first"]
    return dparams, dstates, parts["xs"], dreset_states, dfirst


def _weight_grads(
    static: _Static, xs: Array, h_prev: Array, dxp: Array, hidden_grads: dict[str, Array]
) -> dict[str, Array]:
    """The gradients of weights and biases by field of the params, of the states before each step."""
    cell, dtype = static.cell, static.operand_dtype

    def contract(x: Array, y: Array, precision: Any = static.precision) -> Array:
        """`x^T @ y` over groups, steps and batch."""
        return jnp.einsum("gtbx,gtby->xy", x, y, precision=precision, preferred_element_type=jnp.float32)

    recurrent = jax.lax.Precision.HIGHEST if h_prev.shape[-1] <= _FULL_PRECISION_WIDTH else static.precision
    contract_states = functools.partial(contract, h_prev.astype(dtype), precision=recurrent)
    return {
        "w_ih": contract(xs.astype(dtype), dxp), cell.bias: cells.bias_grad(dxp),
        **cell.recurrent_grads(contract_states, dxp, hidden_grads),
    }  # fmt: skip


def _fuses_weight_grads(static: _Static, xs: Array, hidden: int) -> bool:
    """Whether one launch adds up the gradients of weights and biases: if steps are all there, in one order."""
    if static.remat or static.reset_state != "zeros" or static.reverse == "odd":
        return False
    if static.operand_dtype == jnp.float32 and static.kernel_precision != "tf32":
        return False
    gates, separate = static.cell.gates * hidden, bool(static.cell.hidden_grads)
    return _bridge.weight_grads_pay(xs.shape, hidden, gates, static.operand_dtype, separate)


def _fused_weight_grads(
    static: _Static, xs: Array, hs: Array, h0: Array, resets: Array | None, dxp: Array, hidden_grads: dict[str, Array]
) -> dict[str, Array]:
    """As `_weight_grads`, of the states after each step."""
    cell, dtype = static.cell, static.operand_dtype
    arrays: dict[str, Array | None] = {"x": xs.astype(dtype), "hs": hs.astype(dtype), "h0": h0.astype(dtype)}
    arrays |= {"reset": resets, "dxp": dxp} | hidden_grads
    models = {name: None if x is None else x[None] for name, x in arrays.items()}
    grads = _bridge.launch_weight_grads(models, reverse=static.reverse is True)
    return {cell.bias if name == "bias" else name: x[0] for name, x in grads.items()}


def _no_gradient(resets: Array | None) -> Any:
    if resets is None:
        return None
    if jnp.issubdtype(resets.dtype, jnp.floating):
        return jnp.zeros_like(resets)
    return np.zeros(resets.shape, jax.dtypes.float0)


_recurrence.defvjp(_recurrence_fwd, _recurrence_bwd)
