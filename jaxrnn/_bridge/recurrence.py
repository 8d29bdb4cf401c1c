"""The launch of a time loop: a cell's forward or backward kernel.

Sequences are `[G, T, B, width]`: G groups of B sequences, each group time first. Weights are `[S, ...]`, of S models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import cells
from jaxrnn._bridge import availability, scan_launch
from jaxrnn._bridge.launch_kind import LaunchKind, Output, axes_of_sequences
from jaxrnn._bridge.primitive import bind, bind_batched

if TYPE_CHECKING:
    from jax import Array

    from torch_bridge.tiling import Problem, Reverse, Sizes

WEIGHTS = ("w_hh", "w_hh_t", "b_hn", "bias", "w_sum")


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

    `cell` is a key of `jaxrnn.cells.CELLS`, and `direction` is "fwd", "bwd" or "tangent". The tangent of a forward
    launch reads the residuals and, as `xp`, what each step adds to the tangents of the states: `[G, T, B, H]` or, of
    two states, `[G, T, B, 2 * H]`.
    `reset_state` is "zeros", "fixed" (`[G, B, H]`) or "stepped" (`[G, T, B, H]`). `norm_width` is the number of
    elements that the cell's norm sees, inputs and state; 0 without a norm.
    """
    kind = RecurrenceKind(
        outputs=tuple(outputs), may_use_xla=may_use_xla, cell=cell, direction=direction, reset_state=reset_state,
        reverse=reverse, precision=precision, norm_width=norm_width,
    )  # fmt: skip
    return bind(kind, arrays)


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
    function: Callable[[Array], Array], arrays: dict[str, Array], weights: tuple[str, ...]
) -> dict[str, Array]:
    """Returns the arrays of a launch, with `function` applied to those in float32 that are named in `weights`."""
    return arrays | {
        name: function(arrays[name]) for name in weights if name in arrays and arrays[name].dtype == jnp.float32
    }


def _sizes(arrays: Mapping[str, Any]) -> Sizes:
    """Returns the sizes of a launch, from the shapes of weights, a sequence and a state. Forward launches have "xp"."""
    from torch_bridge import tiling

    weights, sequence, state = ("w_hh_t", "xp", "h0") if "xp" in arrays else ("w_hh", "dhs", "dh_last")
    groups, steps, batch = arrays[sequence].shape[:3]
    return tiling.Sizes(arrays[weights].shape[0], groups, steps, batch, arrays[state].shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class RecurrenceKind(LaunchKind):
    """The kind of the launches of time loops; `LaunchKind` describes the methods, and `launch` the attributes.

    The G groups belong to S models, G / S consecutive groups to each. `split_models` gives the models an axis of their
    own, `[S, G / S, ...]`.
    """

    name = "recurrence"

    cell: str
    direction: Any
    reset_state: Any
    reverse: Reverse
    precision: Any
    norm_width: int

    def shape_of(self, output: Any, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        sizes = _sizes(arrays)
        return (sizes.groups, *((sizes.steps,) if output.stepped else ()), sizes.batch, output.width)

    def problem(self, arrays: Mapping[str, Any]) -> Problem:
        from torch_bridge.tiling import Problem

        tangent = self.direction == "tangent"
        return Problem(
            self.cell, "fwd" if tangent else self.direction, *_sizes(arrays), dtypes=self.dtypes(arrays),
            reset_state=self.reset_state, reverse=self.reverse, precision=self.precision, norm_width=self.norm_width,
            tangent=tangent,
        )  # fmt: skip

    def choose(self, arrays: Mapping[str, Any], device: Any) -> Any:
        from torch_bridge.recurrences import Launch
        from torch_bridge.tiling import prefers_scan, with_residual_dtypes

        problem = self.problem(arrays)
        if self.may_use_xla and prefers_scan(problem, device):
            return None
        return Launch(with_residual_dtypes(problem, device), device)

    def describe(self) -> tuple[str, str]:
        return self.cell, self.direction

    def batch(self, arrays: Mapping[str, Array], axes: Mapping[str, int]) -> tuple[dict[str, Array], int]:
        """Batches a launch, which stays one launch: the new axis joins the models if weights are batched, else groups.

        The models of a launch stay adjacent, so that those of two directions keep the parity of their indices.
        """
        size = next(arrays[name].shape[axis] for name, axis in axes.items())
        new_models = any(name in WEIGHTS for name in axes)
        examples = {  # those of one example
            name: jax.ShapeDtypeStruct([n for k, n in enumerate(x.shape) if k != axes.get(name)], x.dtype)
            for name, x in arrays.items()
        }
        models, groups = _sizes(examples)[:2]
        per_model = groups // max(models, 1)

        def merge(name: str, x: Array) -> Array:
            if name in WEIGHTS and not new_models:
                return x
            x = jnp.moveaxis(x, axes[name], 0) if name in axes else jnp.broadcast_to(x, (size, *x.shape))
            shape = (size * x.shape[1], *x.shape[2:])
            if not new_models:  # models stay the slowest axis: [size, models, ...] -> [models, size, ...]
                x = x.reshape(size, models, per_model, *x.shape[2:]).swapaxes(0, 1)
            return x.reshape(shape)

        def split(x: Array) -> Array:
            if not new_models:
                x = x.reshape(models, size, per_model, *x.shape[1:]).swapaxes(0, 1)
                return x.reshape(size, groups, *x.shape[3:])
            return x.reshape(size, groups, *x.shape[1:])

        results = bind_batched(self, {name: merge(name, x) for name, x in arrays.items()})
        return {name: split(x) for name, x in results.items()}, 0

    def in_xla(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        results = scan_launch.run(
            cells.CELLS[self.cell], self.direction, arrays, {output.name: output.dtype for output in self.outputs},
            reset_state=self.reset_state, reverse=self.reverse, precision=self.precision, norm_width=self.norm_width,
        )  # fmt: skip
        return {output.name: results[output.name] for output in self.outputs}

    def operands(self, launch: Any, arrays: dict[str, Array]) -> dict[str, Array]:
        if launch.config.prepares_weights:
            return arrays
        prepare = round_to_tf32 if self.precision == "tf32" else _with_quiet_nans
        return map_weights(prepare, arrays, ("w_hh", "w_hh_t"))

    def array_dtypes(self, launch: Any) -> dict[str, str]:
        return dict(launch.problem.dtypes)

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name in WEIGHTS:
            return ("models", *(f"{name}_{k}" for k in range(1, rank)))
        return axes_of_sequences(name, rank)

    def split_models(self, values: dict[str, Array], arrays: Mapping[str, Array]) -> dict[str, Array]:
        models = _sizes(arrays).models
        return {
            name: x if name in WEIGHTS else x.reshape(models, x.shape[0] // models, *x.shape[1:])
            for name, x in values.items()
        }

    def merge_models(self, values: dict[str, Array]) -> dict[str, Array]:
        return {name: x if name in WEIGHTS else x.reshape(-1, *x.shape[2:]) for name, x in values.items()}
