"""`gru` and `lstm`: check the arguments, choose the implementation, run it.

The Triton implementation is one `jax.custom_vjp` for all cells. It works on canonical arrays `[G, T, B, W]` (G groups
of B sequences, time first inside a group): time-major input is one group, batch-major input is one group a sequence,
and `vmap` adds groups, or models if the weights are batched. None of these costs a transpose.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from jaxrnn import reference
from jaxrnn.reference import GRUParams, LSTMParams

if TYPE_CHECKING:
    from jax import Array

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
      remat: save no gates for the backward pass; recompute them there in one large matmul.
      implementation: "triton" (a fused kernel, needs an NVIDIA GPU), "xla" (`lax.scan`), or None: the fastest that works
        here. A name works or raises.

    Returns:
      `(carry, ys)` as `lax.scan` would: the last hidden state `[*batch, H]`, and all of them, `[T, *batch, H]`
      (`[*batch, T, H]`), in the dtype of `carry`. Between steps the hidden state is float32.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input; the message says which limit was hit.
    """
    raise_unless_params(params, GRUParams, "gru")
    hidden = check_carry("carry", carry)
    check_sequence(xs, carry, time_major)
    check_params(params, {"w_ih": (xs.shape[-1], 3 * hidden), "w_hh": (hidden, 3 * hidden), "b_ih": (3 * hidden,), "b_hn": (hidden,)})
    check_resets(resets, xs, time_major)
    check_reset_state("reset_state", reset_state, resets, carry, xs, time_major)
    check_implementation(implementation)
    if implementation == "triton":
        raise NotImplementedError
    return reference.gru(
        params, carry, xs, resets=resets, reset_state=reset_state, reverse=reverse, time_major=time_major,
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

    Args:
      params: `LSTMParams(w_ih [D, 4H], w_hh [H, 4H], b [4H])`.
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
      NotImplementedError: the named implementation cannot run this input; the message says which limit was hit.
    """
    raise_unless_params(params, LSTMParams, "lstm")
    c0, h0 = check_pair("carry", carry)
    hidden = check_carry("carry[1]", h0)
    if c0.shape != h0.shape:
        raise ValueError(f"carry is (c, h), both [*batch, H]; got c {c0.shape} and h {h0.shape}")
    check_carry("carry[0]", c0)
    check_sequence(xs, h0, time_major)
    check_params(params, {"w_ih": (xs.shape[-1], 4 * hidden), "w_hh": (hidden, 4 * hidden), "b": (4 * hidden,)})
    check_resets(resets, xs, time_major)
    for i, state in enumerate((None, None) if reset_state is None else check_pair("reset_state", reset_state)):
        check_reset_state(f"reset_state[{i}]", state, resets, h0, xs, time_major)
    check_implementation(implementation)
    if implementation == "triton":
        raise NotImplementedError
    return reference.lstm(
        params, carry, xs, resets=resets, reset_state=reset_state, reverse=reverse, time_major=time_major,
        return_cells=return_cells, precision=precision,
    )  # fmt: skip


def raise_unless_params(params: Any, kind: type, function: str) -> None:
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


def check_carry(name: str, carry: Array) -> int:
    """Returns the hidden width of `carry`."""
    if jnp.ndim(carry) < 1:
        raise ValueError(f"{name} must be [*batch, H], got a scalar")
    check_floating(name, carry)
    return carry.shape[-1]


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


def check_reset_state(
    name: str, state: Array | None, resets: Array | None, carry: Array, xs: Array, time_major: bool
) -> None:
    """Raises ValueError unless `state` is None or has one of the shapes a reset state may have."""
    if state is None:
        return
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


def check_implementation(implementation: Any) -> None:
    """Raises ValueError for a name that no implementation has."""
    if implementation not in (None, "triton", "xla"):
        raise ValueError(f'implementation must be "triton", "xla" or None, got {implementation!r}')
