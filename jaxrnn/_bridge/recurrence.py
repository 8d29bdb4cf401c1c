"""The launch of a time loop: a cell's forward or backward kernel.

Sequences are `[G, T, B, width]`: G groups of B sequences, each group time first. Weights are `[S, ...]`, of S models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn import cells
from jaxrnn._bridge import availability, scan_launch
from jaxrnn._bridge.launch_kind import LaunchKind, axes_of_sequences, dtypes_of
from jaxrnn._bridge.primitive import bind, launch_p, launch_shard_p

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn._bridge.partitioning import PartitionedCallback
    from torch_bridge.tiling import Reverse, Sizes

WEIGHTS = ("w_hh", "w_hh_t", "b_hn", "bias", "w_sum")


class Output(NamedTuple):
    """An array that a launch writes: `[G, T, B, width]`, or `[G, B, width]` if not `stepped`.

    If `over` is given, the array is written into the buffer of the input of that name, which has the same shape and
    dtype. XLA copies that input first if it is needed later.
    """

    name: str
    stepped: bool
    width: int
    dtype: Any
    over: str | None = None


def launch(
    cell: str,
    direction: str,
    arrays: dict[str, Array | None],
    outputs: Sequence[Output],
    *,
    reset_state: str,
    reverse: Reverse,
    precision: str,
    may_use_xla: bool = False,
    norm_width: int = 0,
) -> dict[str, Array]:
    """Launches one kernel: takes its arrays by name (without those that are None) and returns its outputs by name.

    `reverse` says whether to run from the last step to the first. With "bidirectional", models of odd index do so: the
    innermost `jax.vmap` must map over two directions, forward and reverse, and must map the weights too. If
    `may_use_xla`, `scan_launch` computes the outputs instead where that is estimated to be faster, and in a program for
    a CPU.

    `arrays` and `outputs` have the names of the kernel's pointers without "_ptr", as in
    `torch_bridge.kernels.loops.streamed`. Trailing axes are one width: `local_grads` is `[G, T, B, L * H]`, `scale` is
    `[G, T, B, 1]`. `precision` is "tf32", or "tf32x3" for float32's accuracy.

    `cell` is a key of `jaxrnn.cells.CELLS`, and `direction` is "fwd" or "bwd". `reset_state` is "zeros", "fixed"
    (`[G, B, H]`) or "stepped" (`[G, T, B, H]`). `norm_width` is the number of elements that the cell's norm sees,
    inputs and state; 0 without a norm.
    """
    return bind(
        RECURRENCE, arrays, outputs, cell=cell, direction=direction, reset_state=reset_state, reverse=reverse,
        precision=precision, may_use_xla=may_use_xla, norm_width=norm_width,
    )  # fmt: skip


def may_have_float32_residuals(hidden: int, sequences: Any) -> bool:
    """Returns whether the forward kernel may save its residuals in float32 where TF32 is allowed.

    Kernels that multiply in full float32 do so. The kernel is chosen when the launch is lowered, because `vmap` adds
    sequences. If it multiplies in TF32, the launch stores all residuals but `carry_gate` in float16, although they are
    declared float32. Returns False for a symbolic number of sequences.
    """
    from torch_bridge import tiling

    return isinstance(sequences, int) and tiling.may_have_float32_residuals(
        hidden, sequences, availability.chosen_device()
    )


def round_to_tf32(w: Array) -> Array:
    """Rounds float32 to TF32's 10 bits of mantissa: tensor cores would truncate, which biases the result."""
    return _with_quiet_nans(w, jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=10))


def _with_quiet_nans(w: Array, numbers: Array | None = None) -> Array:
    """Returns `numbers`, by default `w`, and where `w` is a NaN, a NaN whose high bits are set.

    Tensor cores ignore the low bits, and would read a NaN without the high ones as infinity.
    """
    return jnp.where(jnp.isnan(w), w + w, w if numbers is None else numbers)


def map_weights(
    function: Callable[[Array], Array], arrays: Sequence[Array], params: dict[str, Any], weights: tuple[str, ...]
) -> list[Array]:
    """Returns the arrays of a launch, with `function` applied to those in float32 that are named in `weights`."""
    return [
        function(x) if name in weights and x.dtype == jnp.float32 else x
        for name, x in zip(params["inputs"], arrays, strict=True)
    ]


def _sizes(inputs: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Sizes:
    """Returns the sizes of a launch, from the shapes of weights, a sequence and a state. Forward launches have "xp"."""
    from torch_bridge import tiling

    by_name = dict(zip(inputs, shapes, strict=True))
    weights, sequence, state = ("w_hh_t", "xp", "h0") if "xp" in by_name else ("w_hh", "dhs", "dh_last")
    groups, steps, batch = by_name[sequence][:3]
    return tiling.Sizes(by_name[weights][0], groups, steps, batch, by_name[state][-1])


def _result_types(sizes: Sizes, outputs: Sequence[Output]) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(
            (sizes.groups, *((sizes.steps,) if output.stepped else ()), sizes.batch, output.width), output.dtype
        )
        for output in outputs
    ]


def _problem(arrays: Sequence[Any], sizes: Sizes, params: dict[str, Any]) -> Any:
    from torch_bridge.tiling import Problem

    return Problem(
        params["cell"], params["direction"], *sizes, dtypes=dtypes_of(arrays, params),
        reset_state=params["reset_state"], reverse=params["reverse"], precision=params["precision"],
        norm_width=params["norm_width"],
    )  # fmt: skip


class RecurrenceKind(LaunchKind):
    """The kind of the launches of time loops; `LaunchKind` describes the methods.

    The G groups belong to S models, G / S consecutive groups to each. `split_model_axis` gives the models an axis of
    their own, `[S, G / S, ...]`.
    """

    name = "recurrence"

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        return _result_types(_sizes(params["inputs"], shapes), params["outputs"])

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        from torch_bridge.recurrences import Launch
        from torch_bridge.tiling import with_residual_dtypes

        return Launch(with_residual_dtypes(self.problem(arrays, params), device), device)

    def problem(self, arrays: Sequence[Any], params: dict[str, Any]) -> Any:
        return _problem(arrays, _sizes(params["inputs"], [x.shape for x in arrays]), params)

    def describe(self, params: dict[str, Any]) -> tuple[str, str]:
        return params["cell"], params["direction"]

    def batch(
        self, arrays: Sequence[Array], axes: Sequence[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], list[int]]:
        return _batch(arrays, axes, params)

    def prefers_xla(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> bool:
        from torch_bridge.tiling import prefers_scan

        if not params["may_use_xla"]:
            return False
        return prefers_scan(self.problem(arrays, params), device)

    def in_xla(self, arrays: Sequence[Array], params: dict[str, Any]) -> list[Array]:
        results = scan_launch.run(
            cells.CELLS[params["cell"]], params["direction"], dict(zip(params["inputs"], arrays, strict=True)),
            {output.name: output.dtype for output in params["outputs"]}, reset_state=params["reset_state"],
            reverse=params["reverse"], precision=params["precision"], norm_width=params["norm_width"],
        )  # fmt: skip
        return [results[output.name] for output in params["outputs"]]

    def operands(self, launch: Any, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        if launch.config.prepares_weights:
            return arrays
        prepare = round_to_tf32 if params["precision"] == "tf32" else _with_quiet_nans
        return map_weights(prepare, arrays, params, ("w_hh", "w_hh_t"))

    def array_dtypes(self, launch: Any) -> dict[str, str]:
        return dict(launch.problem.dtypes)

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name in WEIGHTS:
            return ("models", *(f"{name}_{k}" for k in range(1, rank)))
        return axes_of_sequences(name, rank)

    def split_model_axis(self, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        models = _sizes(params["inputs"], [x.shape for x in arrays]).models
        return [
            x if name in WEIGHTS else x.reshape(models, x.shape[0] // models, *x.shape[1:])
            for name, x in zip(params["inputs"], arrays, strict=True)
        ]

    def merge_model_axis(self, results: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        return [x.reshape(-1, *x.shape[2:]) for x in results]

    def bind_shard(
        self, slot: PartitionedCallback | None, arrays: Sequence[Array], params: dict[str, Any]
    ) -> Sequence[Array]:
        merged = [
            x if name in WEIGHTS else x.reshape(-1, *x.shape[2:])
            for name, x in zip(params["inputs"], arrays, strict=True)
        ]
        models = _sizes(params["inputs"], [x.shape for x in merged]).models
        results = launch_shard_p.bind(*merged, kind=self, slot=slot, **params)
        return [x.reshape(models, -1, *x.shape[1:]) for x in results]


RECURRENCE = RecurrenceKind()


def _batch(
    arrays: Sequence[Array], axes: Sequence[int | None], params: dict[str, Any]
) -> tuple[list[Array], list[int]]:
    """Batches a launch, which stays one launch: if weights are batched, the new axis joins the models, else the groups.

    The models of a launch stay adjacent, so that those of two directions keep the parity of their indices.
    """
    inputs = params["inputs"]
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    new_models = any(name in WEIGHTS and axis is not None for name, axis in zip(inputs, axes, strict=True))
    shapes = [
        x.shape if axis is None else x.shape[:axis] + x.shape[axis + 1 :] for x, axis in zip(arrays, axes, strict=True)
    ]
    models, groups = _sizes(inputs, shapes)[:2]
    per_model = groups // max(models, 1)

    def merge(name: str, x: Array, axis: int | None) -> Array:
        if name in WEIGHTS and not new_models:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        shape = (size * x.shape[1], *x.shape[2:])
        if not new_models:  # models stay the slowest axis: [size, models, ...] -> [models, size, ...]
            x = x.reshape(size, models, per_model, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(shape)

    def split(x: Array) -> Array:
        if not new_models:
            x = x.reshape(models, size, per_model, *x.shape[1:]).swapaxes(0, 1)
            return x.reshape(size, groups, *x.shape[3:])
        return x.reshape(size, groups, *x.shape[1:])

    merged = [merge(name, x, axis) for name, x, axis in zip(inputs, arrays, axes, strict=True)]
    results = [split(x) for x in launch_p.bind(*merged, **params)]
    return results, [0] * len(results)
