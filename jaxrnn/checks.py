"""Checks of the arguments of recurrences; errors are raised while tracing.

A message names the function or class that was called and the argument as its caller knows it, says what was expected
and what was given, and ends with a remedy: "gru: xs must be floating point, got int32; convert it first".
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn.cells import CELLS
from torch_bridge import rules

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn.cells import Cell

Implementation = Literal["triton", "xla"] | None
# The names of norms, in cells and between the layers of stacks.
NORMS = ("rms", "layer")
# Names of implementations elsewhere, and the one that is meant.
_IMPLEMENTATIONS = ("triton", "xla")
_ALIASES = {
    "triton": ("cuda", "gpu", "cudnn", "pallas", "kernel", "fused"),
    "xla": ("jax", "scan", "lax", "cpu", "torch", "jnp"),
}
# The names that `jax.lax.dot_general` accepts besides those of `jax.lax.DotAlgorithmPreset`.
_PRECISIONS = ("default", "fastest", "bfloat16", "high", "bfloat16_3x", "tensorfloat32", "highest", "float32")
_SHORT_PRECISIONS = {"tf32": "tensorfloat32", "bf16": "bfloat16", "fp32": "float32", "f32": "float32"}
# By package, the function of `jaxrnn.convert` that takes a module of it.
CONVERTERS = {
    "torch": "from_torch", "flax.linen": "from_linen", "flax.nnx": "from_nnx", "equinox": "from_equinox",
    "keras": "from_keras",
}  # fmt: skip


@dataclass(frozen=True)
class Caller:
    """The function or class that the user called, and what it calls the arguments of the functions of `jaxrnn`.

    Attributes:
      name: the name of the function or class.
      arguments: by argument of the functions, its name in this class, if that is another.
      has_time_major: whether the user can choose the order of the axes with `time_major`.
    """

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    has_time_major: bool = True

    def __call__(self, argument: str) -> str:
        """Returns how a message calls an argument, such as "RNN: inputs"."""
        return f"{self.name}: {self.bare(argument)}"

    def bare(self, argument: str) -> str:
        """Returns the name of an argument alone."""
        return self.arguments.get(argument, argument)


def check_arguments(
    cell: Cell, params: Any, carry: Any, xs: Array, resets: Any, reset_state: Any, time_major: bool, caller: Caller
) -> None:
    """Raises ValueError unless the arguments are valid for the function of a cell."""
    check_kind(params, cell, caller)
    states = split_carry(cell, caller("carry"), carry)
    suffixes = [""] if len(states) == 1 else [f"[{i}]" for i in reversed(range(len(states)))]
    for suffix, state in zip(suffixes, states, strict=True):
        check_carry(caller("carry") + suffix, state)
    width, hidden = states[0].shape[-1], states[-1].shape[-1]
    projection = getattr(params, "w_hr", None)
    if len(states) > 1:
        h0, c0 = states
        if c0.shape != h0.shape and (projection is None or c0.shape[:-1] != h0.shape[:-1]):
            widths = "both [*batch, H]" if projection is None else "[*batch, H] and [*batch, P]"
            raise ValueError(f"{caller('carry')} must be (c, h), {widths}; got c {c0.shape} and h {h0.shape}")
    check_sequence(xs, states[0], time_major, caller)
    shapes = cell.shapes(xs.shape[-1], hidden) | cell.optional_shapes(params, xs.shape[-1], hidden)
    if getattr(params.w_hh, "ndim", 2) == 3:
        if cell.norm:
            raise ValueError(
                f"{caller('params')}.w_hh must be {shapes['w_hh']}, not blocks; the norm of {cell.title} sees all units"
            )
        shapes |= {"w_hh": _block_shape(cell, params, hidden, projection, caller)}
    elif projection is not None:
        shapes |= {"w_hh": (width, cell.gates * hidden), "w_hr": (hidden, width)}
    check_params(params, shapes, width, caller)
    check_resets(resets, xs.shape[:-1], time_major, f"{caller.bare('xs')} {xs.shape}", caller)
    new = (None,) * len(states) if reset_state is None else split_carry(cell, caller("reset_state"), reset_state)
    for suffix, one, state in reversed(list(zip(suffixes, new, states, strict=True))):  # in the order of the argument
        check_reset_state(caller("reset_state") + suffix, one, resets, state, xs, time_major)


def _block_shape(cell: Cell, params: Any, hidden: Any, projection: Any, caller: Caller) -> tuple[int, ...]:
    """Returns the shape of block-diagonal recurrent weights; raises ValueError if there can be none."""
    if getattr(params.w_ih, "ndim", 2) == 3:
        raise ValueError(
            f"{caller('params')}.w_ih must be [D, {cell.gates}H], got {params.w_ih.shape}; run the stacked "
            "weights of several models with jax.vmap"
        )
    blocks = params.w_hh.shape[0]
    if projection is not None:
        raise ValueError(
            f"{caller('params')}.w_hh is block-diagonal, which a projection w_hr excludes; pass w_hh [P, 4H]"
        )
    if not isinstance(hidden, int) or not isinstance(blocks, int):
        raise ValueError(
            f"{caller('params')}.w_hh must have a known number of blocks and units, got {params.w_hh.shape}; "
            "use symbolic dimensions for time and batch axes only"
        )
    if blocks == 0 or hidden % blocks != 0:
        raise ValueError(
            f"{caller('params')}.w_hh has {blocks} blocks, which do not divide a carry of width {hidden}; pass w_hh "
            f"[H, {cell.gates}H], or [N, H / N, {cell.gates}H / N] for N blocks"
        )
    return blocks, hidden // blocks, cell.gates * hidden // blocks


def split_carry(cell: Cell, name: str, carry: Any) -> tuple[Any, ...]:
    """Returns a carry as the tuple of its states in the order of `cell.states`, the hidden state first.

    The carry of a cell with one state is that state; the carry of a cell with two states is the pair `(c, h)`.

    Raises:
      ValueError: the carry of a cell with two states is no pair, or that of a cell with one state is a tuple.
    """
    if len(cell.states) == 1:
        if not _is_array(carry):
            remedy = "pass zeros for a new episode, as initialize_carry of a module returns"
            if _is_sparse(carry):
                remedy = "pass its todense()"
            elif isinstance(carry, (tuple, list)) and all(map(_is_array, carry)):
                remedy = "pass its only element" if len(carry) == 1 else "only an LSTM has a pair (c, h)"
            elif isinstance(carry, (tuple, list)):
                remedy = "convert it with jnp.asarray"
            raise ValueError(f"{name} must be one array for {cell.title}, [*batch, H], got {describe(carry)}; {remedy}")
        return (carry,)
    if not isinstance(carry, (tuple, list)) or len(carry) != 2:
        raise ValueError(
            f"{name} must be a pair (c, h) for {cell.title}, two arrays [*batch, H], got {describe(carry)}; pass both, "
            "for a new episode the zeros that initialize_carry of a module returns"
        )
    check_order(name, carry)
    return (carry[1], carry[0])


def check_order(name: str, pair: Any) -> None:
    """Raises ValueError if a pair of states is a named tuple whose fields do not name them in the order (c, h)."""
    remedy = rules.wrong_order(pair, ("c", "h"))
    if remedy is not None:
        fields = ", ".join(pair._fields)
        raise ValueError(f"{name} must be a pair (c, h), got {type(pair).__name__}({fields}); {remedy}")


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
            raise ValueError(f"{name} of both directions must be a pair (forward, backward), got {describe(pair)}")
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


def check_options(implementation: Any, precision: Any, caller: Caller) -> None:
    """Raises ValueError unless `implementation` and `precision` have values that every recurrence accepts."""
    check_implementation(implementation, caller)
    check_precision(precision, caller)


def check_implementation(name: Any, caller: Caller) -> None:
    """Raises ValueError unless `name` is an implementation or None."""
    if name is not None and (not isinstance(name, str) or name not in _IMPLEMENTATIONS):
        meant = {alias: known for known, aliases in _ALIASES.items() for alias in aliases}
        raise ValueError(
            f'{caller("implementation")} must be "triton", "xla" or None, got {shown(name)}'
            f"{suggest(name, _IMPLEMENTATIONS, meant)}"
        )


def check_precision(precision: Any, caller: Caller) -> None:
    """Raises ValueError unless `jax.lax.dot_general` accepts a precision."""
    if not _is_precision(precision):
        meant = suggest(precision, _PRECISIONS, _SHORT_PRECISIONS)
        raise ValueError(
            f"{caller('precision')} must be None, a jax.lax.Precision, one of {', '.join(_PRECISIONS)}, a pair of "
            f"these, or a jax.lax.DotAlgorithmPreset, got {shown(precision)}{meant}"
        )


def _is_precision(precision: Any) -> bool:
    if isinstance(precision, tuple):
        are_names = all(isinstance(one, str) and one in _PRECISIONS for one in precision)
        return len(precision) == 2 and (are_names or all(isinstance(one, jax.lax.Precision) for one in precision))
    if isinstance(precision, str):
        return precision in _PRECISIONS or precision in jax.lax.DotAlgorithmPreset.__members__
    kinds = jax.lax.Precision, jax.lax.DotAlgorithmPreset, jax.lax.DotAlgorithm
    return precision is None or isinstance(precision, kinds)


def check_flags(caller: Caller, **flags: Any) -> list[bool]:
    """Returns the flags as booleans; raises ValueError if one is traced or is not True, False, 0 or 1."""
    for name, flag in flags.items():
        if isinstance(flag, jax.core.Tracer):
            raise ValueError(
                f"{caller(name)} must be known when the program is traced; make it a static argument of jax.jit"
            )
        if not isinstance(flag, (bool, np.bool_)) and not (isinstance(flag, (int, np.integer)) and flag in (0, 1)):
            raise ValueError(f"{caller(name)} must be True or False, got {shown(flag)}; pass a Python bool")
    return [bool(flag) for flag in flags.values()]


def check_size(name: str, size: Any, least: int = 1) -> None:
    """Raises ValueError unless `size` is an integer of at least `least`."""
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, got {shown(size)}; pass one int")
    if size < least:
        raise ValueError(f"{name} must be at least {least}, got {size}")


def check_array(name: str, x: Any) -> None:
    """Raises ValueError unless `x` is a JAX or NumPy array of numbers or booleans."""
    if not _is_array(x):
        remedy = (
            "convert it with jnp.asarray" if isinstance(x, (tuple, list, int, float)) else "pass an array of numbers"
        )
        if _is_sparse(x):
            remedy = "pass its todense()"
        elif isinstance(x, tuple) and all(map(_is_array, x)) and [len(y.shape) for y in x] in ([3, 2], [2, 1]):
            remedy = "pass one array, and resets by its name"
        raise ValueError(f"{name} must be an array, got {describe(x)}; {remedy}")
    if isinstance(x, jax.ShapeDtypeStruct):
        raise ValueError(
            f"{name} must be an array, got a jax.ShapeDtypeStruct; call the function inside jax.eval_shape, or lower it"
        )
    try:
        is_of_numbers = jnp.issubdtype(x.dtype, jnp.number) or jnp.issubdtype(x.dtype, jnp.bool_)
    except TypeError:  # `issubdtype` rejects the dtypes of other libraries
        is_of_numbers = False
    if not is_of_numbers:
        remedy = f"convert it with {'astype(jnp.float32)' if isinstance(x, np.ndarray) else 'jnp.asarray'}"
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            remedy = "it holds random keys: pass numbers, such as jax.random.normal draws"
        raise ValueError(f"{name} must be an array of numbers, got dtype {x.dtype}; {remedy}")


def _is_array(x: Any) -> bool:
    """Whether `x` has the form of a dense array; modules of NNX have every attribute."""
    return isinstance(getattr(x, "shape", None), tuple) and hasattr(x, "dtype") and not _is_sparse(x)


def _is_sparse(x: Any) -> bool:
    """Whether `x` is a sparse array of JAX or SciPy."""
    return callable(getattr(type(x), "todense", None))


def check_promotes(name: str, x: Any) -> None:
    """Raises ValueError if JAX does not promote the dtype of `x`, of less than 8 bits or a float8, with others."""
    dtype = jnp.result_type(x)
    info: Any = jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo
    if dtype.name != "bool" and info(dtype).bits < (16 if info is jnp.finfo else 8):
        raise ValueError(f"{name} must have a dtype that JAX promotes, got {dtype}; convert it, to bfloat16 say")


def check_real(name: str, x: Any) -> None:
    """Raises ValueError unless `x` is an array of booleans, integers or floating-point numbers."""
    check_array(name, x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError(f"{name} must be real, got {x.dtype}; pass its real part")


def check_floating(name: str, x: Array) -> None:
    """Raises ValueError unless `x` is a floating-point array."""
    check_array(name, x)
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(f"{name} must be floating point, got {jnp.result_type(x)}; convert it first")
    check_promotes(name, x)


def check_float_dtype(name: str, dtype: Any) -> None:
    """Raises ValueError unless `dtype` is None or a floating-point dtype."""
    try:
        valid = dtype is None or (jnp.issubdtype(jnp.dtype(dtype), jnp.floating) and jnp.finfo(dtype).bits >= 16)
    except TypeError:
        valid = False
    if not valid:
        got = getattr(dtype, "__name__", None) or shown(dtype)
        raise ValueError(f"{name} must be a floating-point dtype or None, got {got}; use float32, bfloat16 or float16")


def check_kind(params: Any, cell: Cell, caller: Caller) -> None:
    """Raises ValueError unless `params` are the weights of a cell."""
    kind = cell.params
    if not isinstance(params, kind):
        raise ValueError(
            f"{caller('params')} must be {kind.__name__}({', '.join(kind._fields)}), got {describe(params)}"
            f"{_params_remedy(params, cell)}"
        )


def _params_remedy(params: Any, cell: Cell) -> str:
    """Returns how to make the weights of a cell from what was given instead, after a semicolon."""
    kind = cell.params.__name__
    other = next((one for one in CELLS.values() if isinstance(params, one.params)), None)
    if other is not None:
        return f"; call jaxrnn.{other.function} with these"
    if isinstance(params, Mapping):
        if set(params) == set(cell.params._fields):
            return f"; use {kind}(**params)"
        is_torch = any("weight_ih" in str(name) for name in params)
        source = "a PyTorch module" if is_torch else "a Flax cell"
        converter = CONVERTERS["torch" if is_torch else package_of(params) or "flax.linen"]
        return f"; use jaxrnn.convert.{converter} for the weights of {source}"
    if type(params) in (tuple, list) and len(params) == len(cell.params._fields):
        return f"; use {kind}(*params)"
    package = package_of(params)
    if package is not None:
        return f"; use jaxrnn.convert.{CONVERTERS[package]} for weights of {package}"
    return f"; make them with jaxrnn.{kind}, or with a function of jaxrnn.convert"


def package_of(x: Any) -> str | None:
    """Returns the package, among those that `jaxrnn.convert` knows, to which the type of `x` or a base belongs."""
    bases = x.__mro__ if isinstance(x, type) else type(x).__mro__
    names = [base.__module__ for base in bases]
    return next((package for package in CONVERTERS for name in names if f"{name}.".startswith(f"{package}.")), None)


def check_carry(name: str, carry: Any) -> None:
    """Raises ValueError unless `carry` is a floating-point array `[*batch, H]`."""
    if isinstance(carry, (tuple, list)):
        raise ValueError(f"{name} must be one array [*batch, H], got {describe(carry)}")
    check_array(name, carry)
    if jnp.ndim(carry) < 1:
        raise ValueError(f"{name} must be [*batch, H], got a scalar")
    check_floating(name, carry)


def check_sequence(xs: Array, carry: Array, time_major: bool, caller: Caller) -> None:
    """Raises ValueError unless `xs` is a floating-point sequence with the batch axes of `carry`."""
    check_floating(caller("xs"), xs)
    check_rank(caller("xs"), xs, time_major)
    batch = xs.shape[1:-1] if time_major else xs.shape[:-2]
    if carry.shape[:-1] != batch:
        raise ValueError(
            f"{caller('carry')} must be [*batch, H] with batch axes {batch} as in {caller.bare('xs')} "
            f"{sequence_axes(time_major)} = {xs.shape}, got {carry.shape}"
            f"{_layout_remedy(xs, carry, time_major, caller)}"
        )


def _layout_remedy(xs: Array, carry: Array, time_major: bool, caller: Caller) -> str:
    """Returns how to mend inputs whose batch axes are not those of the carry, after a semicolon."""
    name, batch = caller.bare("xs"), carry.shape[:-1]
    if batch == (xs.shape[:-2] if time_major else xs.shape[1:-1]):
        other = "[*batch, T, D]" if time_major else "[T, *batch, D]"
        if caller.has_time_major:
            return f"; pass time_major={not time_major} if {name} is {other}"
        return f"; {name} seems to be {other}: move its time axis with jnp.moveaxis"
    if batch == xs.shape[:-1]:
        return f"; {name} seems to have no time axis: add it with jnp.expand_dims"
    if carry.ndim == xs.ndim + 1:
        return f"; {caller.bare('carry')} and {name} seem to be swapped"
    if carry.ndim == xs.ndim:
        return (
            f"; {name} has as many axes as {caller.bare('carry')}, and needs a time axis besides: add what is missing, "
            f"or remove an axis of {caller.bare('carry')}"
        )
    if carry.shape[-1:] == (xs.shape[1:-1] if time_major else xs.shape[:-2]):
        return f"; {caller.bare('carry')} seems to be [H, B]: swap the arguments of the function that made it"
    return f"; make {caller.bare('carry')} for this batch, as initialize_carry of a module does"


def sequence_axes(time_major: bool) -> str:
    """Returns the axes of a sequence as messages show them."""
    return "[T, *batch, D]" if time_major else "[*batch, T, D]"


def check_rank(name: str, xs: Any, time_major: bool, feature_axes: int = 1) -> None:
    """Raises ValueError unless a sequence has a time axis besides its feature axes."""
    if xs.ndim < 1 + feature_axes:
        axes = sequence_axes(time_major)
        raise ValueError(f"{name} must be {axes}, got {xs.shape}; add the axes that are missing")


def check_params(params: Any, shapes: dict[str, tuple[int, ...]], width: Any, caller: Caller) -> None:
    """Raises ValueError unless the weights are floating point and have `shapes`, which follow from xs and carry.

    `width` is that of the carry.
    """
    for name, shape in shapes.items():
        got = getattr(params, name)
        check_floating(f"{caller('params')}.{name}", got)
        if jnp.shape(got) != shape:
            _check_width_of_carry(params, shapes, width, caller)
            remedy = "; make the weights for these widths, or pass the inputs and the carry that they are for"
            if jnp.shape(got) == shape[::-1]:
                remedy = "; transpose it, or use jaxrnn.convert.from_torch for PyTorch's weights"
            elif jnp.shape(got)[1:] == shape:
                remedy = "; run the stacked weights of several models with jax.vmap"
            raise ValueError(
                f"{caller('params')}.{name} must be {shape} for {caller.bare('xs')} of width "
                f"{shapes['w_ih'][0]} and a {caller.bare('carry')} of width {width}, got {jnp.shape(got)}{remedy}"
            )


def _check_width_of_carry(params: Any, shapes: dict[str, tuple[int, ...]], width: Any, caller: Caller) -> None:
    """Raises ValueError if the weights agree with one another and with the inputs, but not with the carry."""
    w_ih, w_hh = jnp.shape(params.w_ih), jnp.shape(params.w_hh)
    if "w_hr" in shapes or len(w_ih) != 2 or len(w_hh) != 2 or not w_hh[0]:
        return
    agree = w_ih[0] == shapes["w_ih"][0] and w_ih[1] == w_hh[1] and w_hh[1] * width == w_hh[0] * shapes["w_hh"][1]
    if agree and w_hh[0] != width:
        raise ValueError(
            f"{caller('carry')} must have the width {w_hh[0]} of {caller.bare('params')}.w_hh {w_hh}, got {width}; "
            "make it for these weights"
        )


def check_resets(resets: Any, shape: tuple[int, ...], time_major: bool, of: str, caller: Caller) -> None:
    """Raises ValueError unless `resets` has `shape`, one entry per step and sequence; `of` names the inputs."""
    if resets is None:
        return
    name = caller("resets")
    check_real(name, resets)
    got = jnp.shape(resets)
    if got != shape:
        layout = "[T, *batch]" if time_major else "[*batch, T]"
        swapped = (*shape[1:], shape[0]) if time_major else (shape[-1], *shape[:-1])
        remedy = "; pass an entry for every step of every sequence"
        remedy = "; move its time axis with jnp.moveaxis" if got == swapped else remedy
        remedy = "; remove its last axis" if got == (*shape, 1) else remedy
        raise ValueError(f"{name} must be {layout} = {shape} as in {of}, got {got}{remedy}")


def check_reset_state(name: str, state: Any, resets: Array | None, carry: Array, xs: Array, time_major: bool) -> None:
    """Raises ValueError unless `state` is None or a floating-point array with a valid shape of a reset state."""
    if state is None:
        return
    if isinstance(state, (tuple, list)):
        raise ValueError(f"{name} must be one array, got {describe(state)}")
    if resets is None:
        raise ValueError(f"{name} is given but resets is None; pass resets, or leave it out")
    check_floating(name, state)
    hidden = carry.shape[-1:]
    shapes = (hidden, carry.shape, xs.shape[:-1] + hidden)
    if jnp.shape(state) not in shapes:
        layout = "[T, *batch, H]" if time_major else "[*batch, T, H]"
        raise ValueError(
            f"{name} must be [H] = {shapes[0]}, [*batch, H] = {shapes[1]} or {layout} = "
            f"{shapes[2]}, got {jnp.shape(state)}; pass one state for all, or one for each sequence, or also for each "
            "step"
        )


def check_norm(name: str, norm: Any) -> None:
    """Raises ValueError unless `norm`, which messages call `name`, names the norm of a cell."""
    if not isinstance(norm, str) or norm not in NORMS:
        raise ValueError(f'{name} must be "rms" or "layer", got {shown(norm)}; these are RMSNorm and LayerNorm')


def check_number(name: str, x: Any) -> None:
    """Raises ValueError unless `x` is a number that is known when a program is traced."""
    if isinstance(x, (bool, jax.Array)) or not isinstance(x, (int, float, np.number)):
        raise ValueError(
            f"{name} must be a number, got {describe(x)}; pass a Python float, which is known when the program is "
            "traced"
        )


def check_epsilon(name: str, epsilon: Any, default: str) -> None:
    """Raises ValueError unless `epsilon` is a number that may be added to a variance."""
    check_number(name, epsilon)
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {epsilon}; the default is {default}")


def check_norm_and_constants(caller: Caller, norm: Any, epsilon: Any, update_bias: Any) -> None:
    """Raises ValueError unless these are the norm and the constants of a cell with a norm."""
    check_norm(caller("norm"), norm)
    check_epsilon(caller("epsilon"), epsilon, default="1e-4")
    check_number(caller("update_bias"), update_bias)
    if not math.isfinite(update_bias):
        raise ValueError(f"{caller('update_bias')} must be finite, got {update_bias}; the default is -1")


def suggest(name: Any, known: Sequence[str], meant: Mapping[str, str] | None = None) -> str:
    """Returns the known name that a misspelt one resembles, or that `meant` has for it, as the end of a message."""
    if not isinstance(name, str):
        return ""
    spelt = name.strip().lower()
    close = (*difflib.get_close_matches(spelt, known, n=1, cutoff=0.8), (meant or {}).get(spelt))[0]
    return "" if close is None else f'; did you mean "{close}"?'


def describe(x: Any) -> str:
    """Returns a short description of an argument of any type, without names that are internal to JAX."""
    if x is None:
        return "None"
    if isinstance(x, type):
        return f"the class {x.__name__}"
    if isinstance(x, jax.ShapeDtypeStruct):
        return "a jax.ShapeDtypeStruct"
    if _is_array(x):
        return f"an array {x.dtype}[{', '.join(map(str, x.shape))}]"
    if isinstance(x, str):
        return repr(x)
    if type(x) in (tuple, list):
        return f"a {type(x).__name__} of {len(x)}"
    if isinstance(x, dict):
        names = [str(name) for name in x]
        return f"a dict with {', '.join(names[:8])}{', ...' * (len(names) > 8)}" if names else "an empty dict"
    return type(x).__name__


def shown(x: Any) -> str:
    """Returns a value for a message: that of a plain Python object, and a description of another."""
    return repr(x) if type(x) in (str, bool, int, float, complex, tuple, list) else describe(x)
