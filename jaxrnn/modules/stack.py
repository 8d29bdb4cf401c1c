"""A stack of layers: its checks, its carry, and the run of its layers one after the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn.checks import (
    NORMS,
    check_flags,
    check_order,
    check_reset_state,
    check_resets,
    check_size,
    describe,
    shown,
    suggest,
)
from jaxrnn.modules.directions import Direction, run_layer
from jaxrnn.modules.lengths import (
    checked_seq_lengths,
    flip_sequences,
    initial_if_empty,
    is_valid_step,
    without_padding,
    zeros_if_empty,
)
from jaxrnn.modules.recurrence import cast
from jaxrnn.numerics import is_reset
from torch_bridge.rules import fields_by_state

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

    from jaxrnn.checks import Caller
    from jaxrnn.modules.carries import Carry
    from jaxrnn.modules.recurrence import Recurrence


def check_stack(
    caller: Caller,
    num_layers: int,
    dropout_rate: float,
    bidirectional: bool,
    reverse: bool,
    norm: Any = None,
) -> None:
    """Raises ValueError unless the arguments describe a valid stack; warns of dropout that has no effect."""
    check_size(caller("num_layers"), num_layers)
    if not isinstance(dropout_rate, (int, float, np.number)) or not 0.0 <= dropout_rate <= 1.0:
        raise ValueError(
            f"{caller('dropout_rate')} must be between 0 and 1, got {shown(dropout_rate)}; it is the rate of zeros"
        )
    if dropout_rate > 0.0 and num_layers == 1:
        warnings.warn(  # no error, as in torch.nn: a sweep over num_layers has one rate
            f"{caller('dropout_rate')} has no effect with num_layers=1, got {dropout_rate}, because dropout is between "
            "layers; set num_layers, or apply Flax's Dropout to the outputs",
            stacklevel=2,
        )
    bidirectional, reverse = check_flags(caller, bidirectional=bidirectional, reverse=reverse)
    if bidirectional and reverse:
        raise ValueError(
            f"{caller('reverse')} must be False for a bidirectional stack, got True; it already runs both directions"
        )
    if norm is not None and not (callable(norm) or (isinstance(norm, str) and norm in NORMS)):
        raise ValueError(
            f'{caller("norm")} must be "rms", "layer", None, or a class or function that makes a module, got '
            f"{shown(norm)}{suggest(norm, NORMS)}"
        )


def group_by_direction(
    name: str, carry: Any, widths: Mapping[str, int], num_layers: int, bidirectional: bool
) -> tuple[tuple[Carry, ...], ...]:
    """Returns the carry of a stack grouped by layer and direction, as `run_stack` takes it.

    Args:
      name: how error messages name the carry.
      carry: a tuple with one entry per layer. With two directions, an entry is a pair by direction. The carry of one
        direction is `[..., width]`, or a pair of such arrays for an LSTM.
      widths: the widths of the arrays of one carry by name: that of h, or those of c and h.
      num_layers: the number of layers.
      bidirectional: whether each layer has two directions.

    Raises:
      ValueError: the carry has another structure or other widths.
    """
    arrays = [f"{state} [..., {width}]" for state, width in widths.items()]
    one = f"an array [..., {widths['h']}]" if len(arrays) == 1 else f"a pair ({', '.join(arrays)})"
    each = f"a pair (forward, backward), each {one}" if bidirectional else one
    expected = f"{name} of this stack must be a tuple with one entry for each of {num_layers} layers: {each}"
    remedy = "initialize_carry of the stack returns one"

    states = len(widths)

    def split(x: Any, lengths: tuple[int, ...]) -> Any:
        if not lengths and hasattr(x, "shape"):
            return x
        is_pair_of_states = states > 1 and len(lengths) == 1
        has_states_outside = not is_pair_of_states and {"c", "h"} <= fields_by_state(x).keys()
        if lengths and isinstance(x, (tuple, list)) and len(x) == lengths[0] and not has_states_outside:
            if is_pair_of_states:
                check_order(f"{name} of each cell", x)
            return tuple(split(part, lengths[1:]) for part in x)
        raise ValueError(f"{expected}; got {_structure(carry)}; {remedy}")

    layers = split(carry, (num_layers, *((2,) * bidirectional), *((states,) * (states > 1))))
    leaves = jax.tree.leaves(layers)
    for width, leaf in zip([*widths.values()] * (len(leaves) // states), leaves, strict=True):
        if jnp.shape(leaf)[-1:] != (width,):
            raise ValueError(f"{expected}; got an array {jnp.shape(leaf)}; {remedy}")
    return layers if bidirectional else tuple((layer,) for layer in layers)


def _structure(x: Any) -> str:
    """Returns a description of a carry with the descriptions of its parts."""
    if type(x) not in (tuple, list):
        return describe(x)
    return f"({', '.join(map(_structure, x))}{',' * (len(x) == 1)})"


def run_stack(
    layers: Sequence[Sequence[tuple[Recurrence, Any]]],
    carry: Any,
    xs: Array,
    *,
    reset_carry: Any,
    seq_lengths: Array | None,
    between: Callable[[int, Array], Array],
    dtype: DTypeLike | None,
    time_major: bool,
    reverse: bool,
    keep_order: bool,
    return_carry: bool,
    caller: Caller,
    **options: Any,
) -> Any:
    """Runs layers one after the other, each over the outputs of the previous layer.

    Args:
      layers: the recurrence and the weights, by layer and direction: one direction, or forward and backward.
      carry: the carry by layer and direction, as `group_by_direction` returns it.
      xs: `[T, *batch, D]`, or `[*batch, T, D]` if not `time_major`.
      reset_carry: a carry like `carry`, or None for zeros.
      seq_lengths: `[*batch]` or None.
      between: `between(k, outputs)` returns the inputs of layer k + 1, given the outputs of layer k.
      dtype: the dtype of the matmul operands; None uses the dtype to which inputs, carry and parameters promote.
      time_major: whether time is the first axis.
      reverse: whether the only direction is backward.
      keep_order: whether the outputs of the backward direction are in the order of the inputs.
      return_carry: whether to return the carry too.
      caller: what the user called, for error messages.
      options: the options of `run_layer` and `jaxrnn.gru`.
    """
    keep_order, return_carry = check_flags(caller, keep_order=keep_order, return_carry=return_carry)
    batch, steps = (xs.shape[1:-1], xs.shape[0]) if time_major else (xs.shape[:-2], xs.shape[-2])
    seq_lengths = checked_seq_lengths(seq_lengths, batch, steps, caller)
    check_resets(options["resets"], xs.shape[:-1], time_major, f"{caller.bare('xs')} {xs.shape}", caller)
    if options["resets"] is not None and reset_carry is not None:
        for new, old in zip(jax.tree.leaves(reset_carry), jax.tree.leaves(carry), strict=True):
            check_reset_state(caller("reset_state"), new, options["resets"], old, xs, time_major)
    starts = carry
    if seq_lengths is not None:  # padding may be NaN, which would reach the gradients of the weights
        time_axis = 0 if time_major else len(batch)
        xs, starts = without_padding(xs, seq_lengths, time_axis), zeros_if_empty(seq_lengths, carry)
        if (resets := options["resets"]) is not None:
            is_valid = is_valid_step(seq_lengths, xs.shape[:-1], time_axis)
            options |= {"resets": is_reset(jnp.asarray(resets)) & is_valid}
    last = []
    for k, layer in enumerate(layers):
        if k:
            xs = between(k - 1, xs)
        cells, params = zip(*layer, strict=True)
        hs = [jax.tree.leaves(one)[-1] for one in starts[k]]
        layer_dtype = jnp.result_type(xs, *hs, *jax.tree.leaves(params)) if dtype is None else dtype
        weights = [cast(one, layer_dtype) for one in params]
        new = [None] * len(params) if reset_carry is None else reset_carry[k]
        ends, xs = run_layer(
            list(map(Direction, cells, weights, starts[k], new)),
            jnp.asarray(xs, layer_dtype),
            seq_lengths=seq_lengths,
            time_major=time_major,
            reverse=reverse,
            return_carry=return_carry,
            caller=caller,
            **options,
        )
        last.append(ends if seq_lengths is None else initial_if_empty(seq_lengths, carry[k], ends))
    if reverse and not keep_order:
        xs = flip_sequences(xs, seq_lengths, len(batch), 0 if time_major else len(batch))
    carry = tuple(ends if len(ends) == 2 else ends[0] for ends in last)
    return (carry, xs) if return_carry else xs
