"""Checks of the arguments of recurrences; errors are raised while tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells import Cell

Implementation = Literal["triton", "xla"] | None


def check_arguments(
    cell: Cell, params: Any, carry: Any, xs: Array, resets: Any, reset_state: Any, time_major: bool
) -> None:
    """Raises ValueError unless the arguments are valid for the function of a cell."""
    check_kind(params, cell)
    states = split_carry(cell, "carry", carry)
    names = ["carry"] if len(states) == 1 else [f"carry[{i}]" for i in reversed(range(len(states)))]
    for name, state in zip(names, states, strict=True):
        check_carry(name, state)
    width, hidden = states[0].shape[-1], states[-1].shape[-1]
    projection = getattr(params, "w_hr", None)
    if len(states) > 1:
        h0, c0 = states
        if c0.shape != h0.shape and (projection is None or c0.shape[:-1] != h0.shape[:-1]):
            widths = "both [*batch, H]" if projection is None else "[*batch, H] and [*batch, P]"
            raise ValueError(f"carry must be (c, h), {widths}; got c {c0.shape} and h {h0.shape}")
    check_sequence(xs, states[0], time_major)
    shapes = cell.shapes(xs.shape[-1], hidden) | cell.optional_shapes(params, xs.shape[-1], hidden)
    if getattr(params.w_hh, "ndim", 2) == 3:
        if cell.norm:
            raise ValueError(
                f"params.w_hh must be {shapes['w_hh']}, not blocks: the norm of {cell.title} sees all units"
            )
        shapes |= {"w_hh": _block_shape(cell, params.w_hh, hidden, projection)}
    elif projection is not None:
        shapes |= {"w_hh": (width, cell.gates * hidden), "w_hr": (hidden, width)}
    check_params(params, shapes, width)
    check_resets(resets, xs.shape[:-1], time_major, f"xs {xs.shape}")
    new = (None,) * len(states) if reset_state is None else split_carry(cell, "reset_state", reset_state)
    for name, one, state in reversed(list(zip(names, new, states, strict=True))):  # in the order of the argument
        check_reset_state(name.replace("carry", "reset_state"), one, resets, state, xs, time_major)


def _block_shape(cell: Cell, w_hh: Any, hidden: int, projection: Any) -> tuple[int, ...]:
    """Returns the shape of block-diagonal recurrent weights; raises ValueError if there can be none."""
    blocks = jnp.shape(w_hh)[0]
    if projection is not None:
        raise ValueError("params.w_hh is block-diagonal, which a projection w_hr excludes: pass w_hh [P, 4H]")
    if blocks == 0 or hidden % blocks != 0:
        raise ValueError(f"params.w_hh has {blocks} blocks, which do not divide a carry of width {hidden}")
    return blocks, hidden // blocks, cell.gates * hidden // blocks


def split_carry(cell: Cell, name: str, carry: Any) -> tuple[Any, ...]:
    """Returns a carry as the tuple of its states in the order of `cell.states`, the hidden state first.

    The carry of a cell with one state is that state; the carry of a cell with two states is the pair `(c, h)`.

    Raises:
      ValueError: the carry of a cell with two states is no pair.
    """
    if len(cell.states) == 1:
        return (carry,)
    if not isinstance(carry, (tuple, list)) or len(carry) != 2:
        raise ValueError(f"{name} of {cell.title} is a pair (c, h), got {type(carry).__name__}")
    return (carry[1], carry[0])


def join_carry(states: tuple[Any, ...]) -> Any:
    """Inverts `split_carry`."""
    return states[0] if len(states) == 1 else (states[1], states[0])


def split_directions(params: Any, carry: Any, resets: Any, reset_state: Any) -> tuple[Any, Any]:
    """Returns `(params, carry, resets, reset_state)` of each direction, given the pairs of both directions."""
    pairs = {"params": params, "carry": carry, "resets": resets, "reset_state": reset_state}
    for name, pair in pairs.items():
        if pair is None and name.startswith("reset"):
            pairs[name] = (None, None)
        elif type(pair) not in (tuple, list) or len(pair) != 2:
            raise ValueError(f"{name} of both directions must be a pair (forward, backward), got {type(pair).__name__}")
    forward, backward = zip(*pairs.values(), strict=True)
    return forward, backward


def check_same_types(directions: tuple[Any, Any]) -> None:
    """Raises ValueError unless the arguments of both directions have the same shapes and dtypes."""
    names = "params", "carry", "resets", "reset_state"
    for name, *pair in zip(names, *directions, strict=True):
        forward, backward = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", pair)
        if forward != backward:
            raise ValueError(
                f"{name} of both directions must have the same shapes and dtypes, got {forward} and {backward}: "
                "convert one, or call each direction by itself"
            )


def check_implementation(name: Any) -> None:
    """Raises ValueError unless `name` is an implementation or None."""
    if name not in (None, "triton", "xla"):
        raise ValueError(f'implementation must be "triton", "xla" or None, got {name!r}')


def must_scan(reason: str | None, precision: jax.lax.PrecisionLike, implementation: Implementation, scan: str) -> bool:
    """Returns whether there is a `reason` to run a cell under `scan`, which is "nn.scan" or "nnx.scan".

    Raises NotImplementedError if there is a reason and "triton" or a precision is requested.
    """
    check_implementation(implementation)
    if reason and implementation == "triton":
        raise NotImplementedError(
            f'implementation="triton" cannot run {reason}. Use implementation=None, which runs it with {scan}'
        )
    if reason and precision is not None:
        raise NotImplementedError(f"precision cannot be set for {reason}. Use jax.default_matmul_precision instead")
    return reason is not None


def check_flags(**flags: Any) -> list[bool]:
    """Returns the flags as booleans; raises ValueError if one is traced or is not True, False, 0 or 1."""
    for name, flag in flags.items():
        if isinstance(flag, jax.core.Tracer):
            raise ValueError(f"{name} must be known when the program is traced: make it a static argument of jax.jit")
        if not isinstance(flag, (bool, np.bool_)) and not (isinstance(flag, (int, np.integer)) and flag in (0, 1)):
            raise ValueError(f"{name} must be True or False, got {flag!r}")
    return [bool(flag) for flag in flags.values()]


def check_array(name: str, x: Any) -> None:
    """Raises ValueError unless `x` is a JAX or NumPy array of numbers or booleans."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ValueError(f"{name} must be an array, got {type(x).__name__}: convert it with jnp.asarray")
    try:
        is_of_numbers = jnp.issubdtype(x.dtype, jnp.number) or jnp.issubdtype(x.dtype, jnp.bool_)
    except TypeError:  # `issubdtype` rejects the dtypes of other libraries
        is_of_numbers = False
    if not is_of_numbers:
        raise ValueError(f"{name} must be an array of numbers, got dtype {x.dtype}")


def check_kind(params: Any, cell: Cell) -> None:
    """Raises ValueError unless `params` are the weights of a cell."""
    kind = cell.params
    if not isinstance(params, kind):
        raise ValueError(f"{cell.name} takes {kind.__name__}({', '.join(kind._fields)}), got {type(params).__name__}")


def check_floating(name: str, x: Array) -> None:
    """Raises ValueError unless `x` is a floating-point array."""
    check_array(name, x)
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(f"{name} must be floating point, got {jnp.result_type(x)}; convert it first")


def check_carry(name: str, carry: Any) -> int:
    """Returns the width of `carry`; raises ValueError unless it is a floating-point array `[*batch, H]`."""
    if isinstance(carry, (tuple, list)):
        raise ValueError(f"{name} must be one array [*batch, H], got a {type(carry).__name__} of {len(carry)}")
    check_array(name, carry)
    if jnp.ndim(carry) < 1:
        raise ValueError(f"{name} must be [*batch, H], got a scalar")
    check_floating(name, carry)
    return int(carry.shape[-1])


def check_sequence(xs: Array, carry: Array, time_major: bool) -> None:
    """Raises ValueError unless `xs` is a floating-point sequence with the batch axes of `carry`."""
    check_floating("xs", xs)
    expected = "[T, *batch, D]" if time_major else "[*batch, T, D]"
    if xs.ndim < 2:
        raise ValueError(f"xs must be {expected}, got {xs.shape}")
    batch = xs.shape[1:-1] if time_major else xs.shape[:-2]
    if carry.shape[:-1] != batch:
        raise ValueError(
            f"carry must be [*batch, H] with batch axes {batch} as in xs {expected} = {xs.shape}, got {carry.shape}"
        )


def check_params(params: Any, shapes: dict[str, tuple[int, ...]], width: int) -> None:
    """Raises ValueError unless the weights are floating point and have `shapes`, which follow from xs and carry.

    `width` is that of the carry.
    """
    for name, shape in shapes.items():
        got = getattr(params, name)
        check_floating(f"params.{name}", got)
        if jnp.shape(got) != shape:
            raise ValueError(
                f"params.{name} must be {shape} for inputs of width {shapes['w_ih'][0]} and a carry of width "
                f"{width}, got {jnp.shape(got)}"
            )


def check_resets(resets: Array | None, shape: tuple[int, ...], time_major: bool, of: str) -> None:
    """Raises ValueError unless `resets` has `shape`, one entry per step and sequence; `of` names the inputs."""
    if resets is None:
        return
    check_array("resets", resets)
    if jnp.shape(resets) != shape:
        layout = "[T, *batch]" if time_major else "[*batch, T]"
        raise ValueError(f"resets must be {layout} = {shape} as in {of}, got {jnp.shape(resets)}")


def check_reset_state(name: str, state: Any, resets: Array | None, carry: Array, xs: Array, time_major: bool) -> None:
    """Raises ValueError unless `state` is None or a floating-point array with a valid shape of a reset state."""
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
