"""The code shared by the modules of Flax linen and NNX: everything except their parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn import norms, recurrent
from jaxrnn.cells import CELLS, Cell, GRUParams, LSTMParams
from jaxrnn.checks import check_array, check_reset_state, check_resets, join_carry
from jaxrnn.numerics import accumulation_dtype, expand_resets, is_reset

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

    Carry = Any  # an array [*batch, H], or (c, h) for an LSTM
    Params = GRUParams | LSTMParams


def cast(params: Any, dtype: DTypeLike) -> Any:
    """Casts weights to `dtype` and biases to the accumulation dtype of the gates: float32, or float64 for float64."""
    bias_dtype = accumulation_dtype(dtype)
    given = {name: x for name, x in params._asdict().items() if x is not None}
    return type(params)(**{name: x.astype(dtype if name.startswith("w") else bias_dtype) for name, x in given.items()})


def run(
    params: Params, carry: Carry, xs: Array, *, return_carries: bool = False, **options: Any
) -> tuple[Carry, Array, Carry | None]:
    """Runs the recurrence of these weights; returns `(carry, ys, carries of all steps or None)`."""
    carry, sequences = recurrent.run(cell_of(params), params, carry, xs, return_states=return_carries, **options)
    return carry, sequences[0], join_carry(sequences) if return_carries else None


def cell_of(params: Params) -> Cell:
    """Returns the cell whose weights these are."""
    return next(cell for cell in CELLS.values() if isinstance(params, cell.params))


_SIGMOIDS = (jax.nn.sigmoid, jax.lax.logistic)
_TANHS = (jax.nn.tanh, jax.lax.tanh)


def has_usual_activations(cell: Any) -> bool:
    """Whether the activations of a Flax cell are sigmoid and tanh, as in the functions of `jaxrnn`."""
    return _is_one_of(cell.gate_fn, _SIGMOIDS) and _is_one_of(cell.activation_fn, _TANHS)


def _is_one_of(function: Any, known: tuple[Callable[..., Array], ...]) -> bool:
    """Whether an activation is one of the known functions, or a copy that `copy.deepcopy` of a module made of one."""
    if any(function is one for one in known):
        return True
    jitted: Any = type(jax.nn.sigmoid)  # `copy.deepcopy` copies jitted functions, but returns plain functions unchanged
    if type(function) is not jitted or (program := _scalar_jaxpr(function)) is None:
        return False
    return program in [_scalar_jaxpr(one) for one in known if type(one) is jitted]


@functools.lru_cache(maxsize=256)
def _scalar_jaxpr(function: Callable[..., Array]) -> str | None:
    """Returns the jaxpr of a scalar function as text, without enclosing `jit`s but with custom gradients and effects.

    Returns None if the function cannot be traced with one scalar, for example because it needs an axis.
    """
    try:
        jaxpr = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((), jnp.float32)).jaxpr
    except Exception:  # an arbitrary function may raise anything
        return None
    while len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name in ("jit", "pjit"):
        jaxpr = jaxpr.eqns[0].params["jaxpr"].jaxpr
    return str(jaxpr)


def check_reset_carry(resets: Array | None, reset_carry: Carry | None) -> None:
    """Raises ValueError if `reset_carry` is given without `resets`."""
    if resets is None and reset_carry is not None:
        raise ValueError("reset_carry is given but resets is None: pass resets, or leave reset_carry out")


# The names that the argument `norm` of the stacks accepts.
NORMS = ("rms", "layer")


def check_norm(module: Any, mask: Array | None, rank: int) -> None:
    """Raises NotImplementedError unless Flax's options ask for a norm of the last axis, in float32, on one device."""
    given = {name: getattr(module, name) for name in ("reduction_axes", "feature_axes")}
    wrong = {name: axes for name, axes in given.items() if not _axes(axes) or {*_axes(axes)} - {-1, rank - 1}}
    given = {name: getattr(module, name) for name in ("axis_name", "axis_index_groups")} | {"mask": mask}
    wrong |= {name: value for name, value in given.items() if value is not None}
    if not getattr(module, "force_float32_reductions", True):
        wrong["force_float32_reductions"] = False
    for name, value in wrong.items():
        kind = type(module).__name__
        shown = "an array" if name == "mask" else value
        raise NotImplementedError(
            f"{kind} of jaxrnn normalises the last axis, in float32, on one device: {name} cannot be {shown}. Use "
            f"Flax's own {kind} instead"
        )


def _axes(axes: int | Sequence[int]) -> Sequence[int]:
    return (axes,) if isinstance(axes, int) else axes


def normalize(
    kind: Any,
    x: Array,
    scale: Array | None,
    bias: Array | None,
    residual: Array | None,
    dtype: DTypeLike,
    **options: Any,
) -> Any:
    """Runs `jaxrnn.rms_norm` or `jaxrnn.layer_norm` with y in `dtype`; integers become float32, as in Flax."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.float32)
        if residual is not None and not jnp.issubdtype(jnp.result_type(residual), jnp.inexact):
            residual = jnp.asarray(residual, jnp.float32)
    return norms.normalize(kind, x, scale, bias, residual, dtype=dtype, **options)


def broadcast_carry(carry: Carry, batch: tuple[int, ...]) -> Carry:
    """Broadcasts a carry of arrays `[H]` to `[*batch, H]`."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, *x.shape)), carry)


def flip_sequences(xs: Array, seq_lengths: Array | None, batch: int, time_axis: int) -> Array:
    """Reverses time separately in the first `seq_lengths [*batch]` steps and in the rest, as `nn.RNN` does.

    Args:
      xs: an array whose leading axes are `batch` batch axes and the time axis.
      seq_lengths: the lengths, or None to reverse all steps.
      batch: the number of batch axes.
      time_axis: the index of the time axis.
    """
    if seq_lengths is None or xs.shape[time_axis] == 0:
        return jnp.flip(xs, time_axis)
    steps = xs.shape[time_axis]
    last_first = jnp.arange(steps - 1, -1, -1).reshape([steps if axis == time_axis else 1 for axis in range(batch + 1)])
    index = (last_first + jnp.expand_dims(seq_lengths, time_axis)) % steps
    return jnp.take_along_axis(xs, index.reshape(index.shape + (1,) * (xs.ndim - index.ndim)), axis=time_axis)


def carry_at_end(seq_lengths: Array, time_axis: int, initial: Array, carries: Array) -> Array:
    """Returns the carry after `seq_lengths [*batch]` steps from the carries of all steps; `initial` for length 0."""
    if carries.shape[time_axis] == 0:
        return initial
    index = jnp.expand_dims(seq_lengths, range(seq_lengths.ndim, initial.ndim))
    at = jnp.expand_dims(jnp.maximum(index, 1) - 1, time_axis)
    last = jnp.take_along_axis(carries, at, axis=time_axis, mode="clip")  # `nn.RNN` also clips lengths beyond the end
    return jnp.where(index == 0, initial, last.squeeze(time_axis))


def broadcast_batch_axes(carry: Carry, inputs: Array) -> tuple[Carry, Array]:
    """Broadcasts the batch axes of the carry and the inputs of a step against each other, as Flax's cells do."""
    batches = [jnp.shape(x)[:-1] for x in (*jax.tree.leaves(carry), inputs)]
    if len(set(batches)) == 1 or 0 in map(jnp.ndim, (*jax.tree.leaves(carry), inputs)):
        return carry, inputs
    try:
        batch = jnp.broadcast_shapes(*batches)
    except ValueError:
        raise ValueError(
            f"the batch axes of carry and inputs cannot be broadcast together: {batches[:-1]} and {batches[-1]}"
        ) from None
    carry, inputs = jax.tree.map(lambda x: jnp.broadcast_to(x, (*batch, x.shape[-1])), (carry, inputs))
    return carry, inputs


def run_over_time(
    run: Callable[..., tuple[Carry, Array, Carry | None]],
    inputs: Array,
    carry: Carry,
    *,
    resets: Array | None,
    reset_carry: Carry | None,
    seq_lengths: Array | None,
    feature_axes: int,
    time_major: bool,
    reverse: bool,
    keep_order: bool,
    return_carry: bool,
) -> Array | tuple[Carry, Array]:
    """Runs a loop and does what `nn.RNN` does around it: handles lengths, the order of the outputs and the results.

    The loop is `run(carry, inputs, resets=, reset_carry=, reverse=, return_carries=)`. It returns the same tuple as the
    function `run` of this module.
    """
    batch_and_time = inputs.shape[: inputs.ndim - feature_axes]
    time_axis = 0 if time_major else len(batch_and_time) - 1
    batch = batch_and_time[:time_axis] + batch_and_time[time_axis + 1 :]
    seq_lengths = checked_seq_lengths(seq_lengths, batch)
    check_steps(resets, reset_carry, carry, batch_and_time, time_major)

    def flip(x: Array) -> Array:
        return flip_sequences(x, seq_lengths, len(batch), time_axis)

    flip_inputs = reverse and seq_lengths is not None
    if flip_inputs:
        inputs, resets = flip(inputs), None if resets is None else flip(resets)
        if _has_same_structure(reset_carry, carry):
            reset_carry = jax.tree.map(
                lambda new, old: flip(new) if _has_time_axis(new, old) else new, reset_carry, carry, is_leaf=_is_none
            )
    last, outputs, carries = run(
        carry,
        inputs,
        resets=resets,
        reset_carry=reset_carry,
        reverse=reverse and not flip_inputs,
        return_carries=return_carry and seq_lengths is not None,
    )
    in_order = not flip_inputs
    if reverse and keep_order != in_order:
        outputs = flip(outputs)
    if not return_carry:
        return outputs
    if seq_lengths is not None:
        last = jax.tree.map(functools.partial(carry_at_end, seq_lengths, time_axis), carry, carries)
    return last, outputs


def checked_seq_lengths(seq_lengths: Any, batch: tuple[int, ...]) -> Array | None:
    """Returns lengths as int32, or None; raises ValueError unless there is one integer per sequence."""
    if seq_lengths is None:
        return None
    if isinstance(seq_lengths, int) and not isinstance(seq_lengths, bool):  # one sequence without batch axes
        seq_lengths = jnp.asarray(seq_lengths)
    check_array("seq_lengths", seq_lengths)
    if jnp.shape(seq_lengths) != batch:
        raise ValueError(f"seq_lengths must be [*batch] = {batch} as in inputs, got {jnp.shape(seq_lengths)}")
    if not jnp.issubdtype(jnp.result_type(seq_lengths), jnp.integer):
        raise ValueError(f"seq_lengths must be integers, got {jnp.result_type(seq_lengths)}")
    return jnp.asarray(seq_lengths, jnp.int32)


def _is_none(x: Any) -> bool:
    return x is None


def _has_same_structure(reset_carry: Carry | None, carry: Carry) -> bool:
    """Whether a reset carry has the structure of a carry; None in place of an array means zeros."""
    structures: Any = jax.tree.structure(reset_carry, is_leaf=_is_none), jax.tree.structure(carry)
    return bool(structures[0] == structures[1])


def _has_time_axis(new: Array | None, old: Array) -> bool:
    """Whether an array of a reset carry has a time axis, and so more axes than the array of the carry."""
    return new is not None and jnp.ndim(new) > jnp.ndim(old)


def check_steps(
    resets: Array | None, reset_carry: Carry | None, carry: Carry, batch_and_time: tuple[int, ...], time_major: bool
) -> None:
    """Raises ValueError unless the arrays with a time axis have the batch and time axes of the inputs.

    The check precedes the reversal of sequences, which would repeat the entries of an array that has too few.
    """
    check_resets(resets, batch_and_time, time_major, "inputs")
    if not _has_same_structure(reset_carry, carry):  # no reset carry, or one that the loop rejects
        return
    for new, old in zip(jax.tree.leaves(reset_carry, is_leaf=_is_none), jax.tree.leaves(carry), strict=True):
        if _has_time_axis(new, old) and jnp.shape(new)[: len(batch_and_time)] != batch_and_time:
            axes = "[T, *batch, H]" if time_major else "[*batch, T, H]"
            raise ValueError(
                f"reset_carry must be {axes} with batch and time {batch_and_time} as in inputs, got {jnp.shape(new)}"
            )


def with_resets(
    carry: Carry, resets: Array | None, reset_carry: Carry | None, shape: tuple[int, ...], time_axis: int
) -> tuple[list[Array], Callable[[Carry, Array | None, list[Array]], Carry]]:
    """Prepares resets for a loop over the steps of any cell.

    Args:
      carry: the carry before the first step, a pytree of arrays.
      resets: an array with all batch axes and the time axis, or None.
      reset_carry: a pytree like `carry`, or None for zeros. Its arrays may lack the batch axes, or have a time axis in
        addition.
      shape: the shape that `resets` must have.
      time_axis: the index of the time axis in `shape`.

    Returns:
      `(stepped, reset)`. `stepped` are the arrays of `reset_carry` that have a time axis, time first; the loop scans
      over them. `reset(carry, resets, stepped)`, with `resets` and `stepped` of one step, returns the carry from which
      the step starts.
    """
    if resets is not None and jnp.shape(resets) != shape:
        raise ValueError(f"resets must have the batch and time axes of the inputs, {shape}, got {jnp.shape(resets)}")
    leaves: list[Array]
    treedef: Any
    leaves, treedef = jax.tree.flatten(carry)
    new_leaves = [0.0] * len(leaves) if reset_carry is None else treedef.flatten_up_to(reset_carry)
    is_stepped = [jnp.ndim(new) > old.ndim for new, old in zip(new_leaves, leaves, strict=True)]

    def apply(carry: Carry, reset: Array | None, stepped: list[Array]) -> Carry:
        if reset is None:
            return carry
        rest = iter(stepped)
        new = [next(rest) if is_one else fixed for fixed, is_one in zip(new_leaves, is_stepped, strict=True)]
        return jax.tree.map(
            lambda old, new: jnp.where(expand_resets(reset, old.ndim), jnp.asarray(new, old.dtype), old),
            carry,
            treedef.unflatten(new),
        )

    return [
        jnp.moveaxis(new, time_axis, 0) for new, is_one in zip(new_leaves, is_stepped, strict=True) if is_one
    ], apply


def check_stack(
    num_layers: int,
    dropout_rate: float,
    bidirectional: bool,
    reverse: bool,
    proj_size: int | None = None,
    norm: Any = None,
) -> None:
    """Raises ValueError unless the arguments describe a valid stack."""
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1, got {num_layers}")
    if not 0.0 <= dropout_rate <= 1.0:
        raise ValueError(f"dropout_rate must be between 0 and 1, got {dropout_rate}")
    if proj_size is not None and proj_size < 1:
        raise ValueError(f"proj_size must be at least 1, or None for no projection, got {proj_size}")
    if bidirectional and reverse:
        raise ValueError("reverse must be False for a bidirectional stack, which already runs both directions")
    if norm is not None and not (callable(norm) or (isinstance(norm, str) and norm in NORMS)):
        raise ValueError(f'norm must be "rms", "layer", None, or a class or function that makes a module, got {norm!r}')


def group_by_direction(
    name: str, carry: Any, widths: tuple[int, ...], num_layers: int, bidirectional: bool
) -> tuple[tuple[Carry, ...], ...]:
    """Returns the carry of a stack grouped by layer and direction, as `run_stack` takes it.

    Args:
      name: the name of the carry in error messages.
      carry: a tuple with one entry per layer. With two directions, an entry is a pair by direction. The carry of one
        direction is `[..., width]`, or a pair of such arrays for an LSTM.
      widths: the widths of the arrays of one carry: H, or those of c and h.
      num_layers: the number of layers.
      bidirectional: whether each layer has two directions.

    Raises:
      ValueError: the carry has another structure or other widths.
    """
    shapes = [f"[..., {width}]" for width in widths]
    one = f"an array {shapes[0]}" if len(shapes) == 1 else f"a pair (c {shapes[0]}, h {shapes[1]})"
    each = f"a pair (forward, backward), each {one}" if bidirectional else one
    expected = f"{name} of this stack must be a tuple with one entry for each of {num_layers} layers: {each}"

    def split(x: Any, lengths: tuple[int, ...]) -> Any:
        if not lengths and x is not None and not isinstance(x, (tuple, list, dict)):
            return x
        if lengths and isinstance(x, (tuple, list)) and len(x) == lengths[0]:
            return tuple(split(part, lengths[1:]) for part in x)
        raise ValueError(f"{expected}; got {jax.tree.structure(carry)}")

    layers = split(carry, (num_layers, *((2,) * bidirectional), *((2,) * (len(widths) == 2))))
    leaves = jax.tree.leaves(layers)
    for width, leaf in zip(widths * (len(leaves) // len(widths)), leaves, strict=True):
        if jnp.shape(leaf)[-1:] != (width,):
            raise ValueError(f"{expected}; got an array {jnp.shape(leaf)}")
    return layers if bidirectional else tuple((layer,) for layer in layers)


class Direction(NamedTuple):
    """One direction of one layer.

    Attributes:
      params: the weights.
      carry: `[*batch, H]`, or `(c, h)`: the carry before the first step.
      reset_carry: the carry that an episode starts from, as the `reset_state` of `jaxrnn.gru` or `jaxrnn.lstm`.
    """

    params: Params
    carry: Carry
    reset_carry: Carry | None


def run_bidirectional(
    layer: Sequence[Direction],
    xs: Array,
    resets: Sequence[Array | None],
    reset_carries: Sequence[Carry | None],
    *,
    time_axis: int,
    return_carries: bool,
    **options: Any,
) -> list[tuple[Carry, Array, Carry | None]]:
    """Runs a forward and a backward direction over the same `xs`.

    Arguments with one element per direction have the order forward, backward. Returns the result of `run` for each.
    """
    params, carry, _ = zip(*layer, strict=True)
    forward, backward = (jax.tree.map(jnp.result_type, one) for one in carry)
    if forward != backward:  # the directions of one launch must have the same dtypes
        return [
            run(one.params, one.carry, xs, resets=reset, reset_state=state, reverse=reverse,
                return_carries=return_carries, **options)
            for one, reset, state, reverse in zip(layer, resets, reset_carries, (False, True), strict=True)
        ]  # fmt: skip
    if any(one is not None for one in resets):
        no_resets = jnp.zeros(xs.shape[:-1], bool)
        options["resets"] = tuple(no_resets if one is None else is_reset(one) for one in resets)
    if any(one is not None for one in reset_carries):
        zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x)[-1:], jnp.result_type(x)), carry)
        given = [new if one is None else one for one, new in zip(reset_carries, zeros, strict=True)]
        pairs = jax.tree.map(functools.partial(broadcast_reset_states, time_axis=time_axis), *given)
        options["reset_state"] = jax.tree.transpose(jax.tree.structure(given[0]), None, pairs)
    both = recurrent.run_bidirectional(cell_of(params[0]), params, carry, xs, return_states=return_carries, **options)
    return [(last, ys[0], join_carry(ys) if return_carries else None) for last, ys in both]


def broadcast_reset_states(x: Array, y: Array, time_axis: int) -> tuple[Array, Array]:
    """Broadcasts two reset states, each `[H]`, `[*batch, H]` or a value per step, to one shape and dtype."""
    largest, dtype = max(x, y, key=jnp.ndim), jnp.result_type(x, y)

    def broadcast(x: Array) -> Array:
        if 1 < jnp.ndim(x) < largest.ndim:
            x = jnp.expand_dims(x, time_axis)
        return jnp.broadcast_to(jnp.asarray(x, dtype), largest.shape)

    return broadcast(x), broadcast(y)


def is_last_step(seq_lengths: Array | None, shape: tuple[int, ...], time_axis: int) -> Array:
    """Returns a mask of the last step of each sequence, broadcastable to `shape`, which has batch and time axes."""
    steps = jnp.arange(shape[time_axis]).reshape([-1 if axis == time_axis else 1 for axis in range(len(shape))])
    lengths = shape[time_axis] if seq_lengths is None else jnp.expand_dims(seq_lengths, time_axis)
    return steps == lengths - 1


def resets_of_reversed(resets: Array, seq_lengths: Array | None, time_axis: int) -> Array:
    """Returns the resets of a loop that runs from the last step to the first: the mask of each episode's last step.

    The mask excludes the end of a sequence's last episode, because the loop itself starts there.
    """
    next_begins = jnp.roll(is_reset(resets), -1, axis=time_axis)
    return next_begins & ~is_last_step(seq_lengths, resets.shape, time_axis)


def add_reset_at_end(
    resets: Array | None, reset_carry: Carry | None, carry: Carry, seq_lengths: Array, xs: Array, time_axis: int
) -> tuple[Array, Carry]:
    """Returns `(resets, reset carry)` with which a backward loop starts from `carry` at the end of each sequence.

    The reset at the end discards what the loop has computed from padding.
    """
    at_end = is_last_step(seq_lengths, xs.shape[:-1], time_axis)
    if resets is None:
        return at_end, carry
    resets = is_reset(resets)

    def of_every_step(initial: Array, new: Array) -> Array:
        if jnp.ndim(new) == initial.ndim:
            new = jnp.expand_dims(new, time_axis)
        return jnp.where((at_end & ~resets)[..., None], jnp.expand_dims(initial, time_axis), new)

    new = jax.tree.map(jnp.zeros_like, carry) if reset_carry is None else reset_carry
    return at_end | resets, jax.tree.map(of_every_step, carry, new)


def run_layer(
    layer: Sequence[Direction],
    xs: Array,
    *,
    resets: Array | None,
    seq_lengths: Array | None,
    time_major: bool,
    reverse: bool,
    return_carry: bool,
    **options: Any,
) -> tuple[tuple[Carry, ...], Array]:
    """Runs one layer, of one direction or two.

    Returns `(carries by direction, outputs)`; the outputs are in the order of the inputs. The carries are valid only if
    `return_carry`.
    """
    time_axis = 0 if time_major else xs.ndim - 2
    backward = [reverse] if len(layer) == 1 else [False, True]
    all_resets, reset_carries = [], []
    for one, is_backward in zip(layer, backward, strict=True):
        reset, state = resets, None if resets is None else one.reset_carry
        if is_backward and reset is not None and not reverse:
            reset = resets_of_reversed(reset, seq_lengths, time_axis)
        if is_backward and seq_lengths is not None:
            reset, state = add_reset_at_end(reset, state, one.carry, seq_lengths, xs, time_axis)
        all_resets.append(reset)
        reset_carries.append(state)

    # a forward loop runs past the end of short sequences, so it must return all carries; a backward loop ends at step 0
    options |= {"time_major": time_major, "return_carries": return_carry and seq_lengths is not None and not reverse}
    if len(layer) == 2:
        results = run_bidirectional(layer, xs, all_resets, reset_carries, time_axis=time_axis, **options)
    else:
        (one,), (reset,), (state,) = layer, all_resets, reset_carries
        results = [run(one.params, one.carry, xs, resets=reset, reset_state=state, reverse=reverse, **options)]

    carries = []
    for one, (last, _, every), is_backward in zip(layer, results, backward, strict=True):
        if return_carry and seq_lengths is not None:
            if is_backward:
                is_empty = jnp.expand_dims(seq_lengths == 0, -1)
                last = jax.tree.map(functools.partial(jnp.where, is_empty), one.carry, last)
            else:
                last = jax.tree.map(functools.partial(carry_at_end, seq_lengths, time_axis), one.carry, every)
        carries.append(last)
    outputs = [ys for _, ys, _ in results]
    return tuple(carries), outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=-1)


def run_stack(
    layers: Sequence[Sequence[Params]],
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
    **options: Any,
) -> Any:
    """Runs layers one after the other, each over the outputs of the previous layer.

    Args:
      layers: the weights by layer and direction: one direction, or forward and backward.
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
      options: the options of `run_layer`, `jaxrnn.gru` and `jaxrnn.lstm`.
    """
    batch = xs.shape[1:-1] if time_major else xs.shape[:-2]
    seq_lengths = checked_seq_lengths(seq_lengths, batch)
    check_resets(options["resets"], xs.shape[:-1], time_major, f"xs {xs.shape}")
    if options["resets"] is not None and reset_carry is not None:
        for new, old in zip(jax.tree.leaves(reset_carry), jax.tree.leaves(carry), strict=True):
            check_reset_state("reset_carry", new, options["resets"], old, xs, time_major)
    last = []
    for k, params in enumerate(layers):
        if k:
            xs = between(k - 1, xs)
        hs = [jax.tree.leaves(one)[-1] for one in carry[k]]
        layer_dtype = jnp.result_type(xs, *hs, *jax.tree.leaves(params)) if dtype is None else dtype
        weights = [cast(one, layer_dtype) for one in params]
        new = [None] * len(params) if reset_carry is None else reset_carry[k]
        ends, xs = run_layer(
            list(map(Direction, weights, carry[k], new)),
            jnp.asarray(xs, layer_dtype),
            seq_lengths=seq_lengths,
            time_major=time_major,
            reverse=reverse,
            return_carry=return_carry,
            **options,
        )
        last.append(ends)
    if reverse and not keep_order:
        xs = flip_sequences(xs, seq_lengths, len(batch), 0 if time_major else len(batch))
    carry = tuple(ends if len(ends) == 2 else ends[0] for ends in last)
    return (carry, xs) if return_carry else xs
