"""The base classes of the kinds of launches, such as recurrences and norms: types, axes and the launch itself."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._bridge.primitive import bind_batched, launch_shard_p

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jax import Array

    from jaxrnn._bridge.partitioning import PartitionedCallback

# Arrays of row-wise launches: those that all rows share, and those that have one element per row.
ROW_WEIGHTS, ROW_STATISTICS = ("weight", "bias", "w_ih_t"), ("mean", "rstd")
# Outputs that are sums over rows, or over steps and sequences: their only leading axis is that of the models.
SUMMED_OUTPUTS = ("dweight", "dbias", "sums")
# Axes of recurrences that may be sharded. Row-wise launches shard any axis of rows, time too (`RowLaunchKind`).
SHARDABLE = ("models", "groups", "batch")


class Output(NamedTuple):
    """An array that a launch writes.

    That of a time loop is `[G, T, B, width]`, or `[G, B, width]` if not `stepped`. The shapes of all others follow from
    their names. If `over` is given, the array is written into the buffer of the input of that name, which has the same
    shape and dtype. XLA copies that input first if it is needed later.
    """

    name: str
    dtype: Any
    width: int = 0
    stepped: bool = True
    over: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class LaunchKind:
    """The base class of the kinds of launches: everything that is known of a launch without its arrays.

    A kind implements shapes, `vmap`, the launch and its XLA form. Methods take the arrays by name, in the order of the
    primitive's operands, and return results by name.

    Attributes:
      outputs: the arrays that the launch writes, in the order of the primitive's results.
      may_use_xla: whether XLA computes the results in a program for a CPU.
    """

    name: ClassVar[str]

    outputs: tuple[Output, ...]
    may_use_xla: bool = False

    def __repr__(self) -> str:  # as jaxprs print it
        return f"{self.name}[{' '.join(f'{x.name}={getattr(self, x.name)}' for x in dataclasses.fields(self))}]"

    def by_name(self, results: Sequence[Any]) -> dict[str, Any]:
        """Returns the results of a primitive by name."""
        return {output.name: x for output, x in zip(self.outputs, results, strict=True)}

    def types(self, arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of what a launch on these arrays writes."""
        return {x.name: jax.ShapeDtypeStruct(self.shape_of(x, arrays), x.dtype) for x in self.outputs}

    def shape_of(self, output: Any, arrays: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the shape of an output of a launch on these arrays."""
        raise NotImplementedError

    def dtypes(self, arrays: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
        """Returns `(name, dtype)` of each array that a launch reads, and then of each that it writes."""
        dtypes = [(name, x.dtype) for name, x in arrays.items()] + [(x.name, jnp.dtype(x.dtype)) for x in self.outputs]
        return tuple((name, str(dtype)) for name, dtype in dtypes)

    def choose(self, arrays: Mapping[str, Any], device: Any) -> Any:
        """Returns the `torch_bridge` launch of a shard, without compiling it; None if `in_xla` should replace it."""
        raise NotImplementedError

    def problem(self, arrays: Mapping[str, Any]) -> Any:
        """Returns the problem that the log names if `in_xla` replaces the launch, or None for kinds without a log."""
        return None

    def batch(self, arrays: Mapping[str, Array], axes: Mapping[str, int]) -> tuple[dict[str, Array], int]:
        """Implements `vmap` by one larger launch; returns its results and the batch axis of all of them.

        `axes` has the batch axes of those arrays that have one. The new axis joins the rows, or the models if weights
        are batched or outputs are sums of rows: gradients of weights are sums over the rows of a model, so every
        example becomes a model of its own.
        """
        new_models = any(name in ROW_WEIGHTS for name in axes) or any(x.name in SUMMED_OUTPUTS for x in self.outputs)
        size = next(arrays[name].shape[axis] for name, axis in axes.items())
        at = 0 if new_models else 1  # after the models

        def merge(name: str, x: Array) -> Array:
            if name in ROW_WEIGHTS and not new_models:
                return x
            if name in axes:
                x = jnp.moveaxis(x, axes[name], at)
            else:
                x = jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))
            return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if new_models else x

        results = bind_batched(self, {name: merge(name, x) for name, x in arrays.items()})
        if new_models:
            # an array mapped over axis 0 has its models at axis 1
            models = next(x.shape[1 if axes.get(name) == 0 else 0] for name, x in arrays.items())
            results = {name: x.reshape(size, models, *x.shape[1:]) for name, x in results.items()}
        return results, at

    def describe(self) -> tuple[str, str]:
        """Returns what a launch computes, such as "gru" or "rms_norm", and "fwd" or "bwd"."""
        raise NotImplementedError

    def in_xla(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Computes the outputs of a launch on the arrays of `launch_shard_p` with XLA."""
        raise NotImplementedError

    def operands(self, launch: Any, arrays: dict[str, Array]) -> dict[str, Array]:
        """Returns the arrays, rounded where the kernel of a launch expects rounded operands."""
        return arrays

    def array_dtypes(self, launch: Any) -> dict[str, str]:
        """Returns the dtypes of a launch's arrays by name, where they may differ from those of the program."""
        return {}

    def bind_shard(self, slot: PartitionedCallback | None, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Binds `launch_shard_p` on the arrays of `launch_p`, or on a device's shards of them."""
        return self.by_name(launch_shard_p.bind(*arrays.values(), kind=self, inputs=tuple(arrays), slot=slot))

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        """Returns the names of the axes of an array that has this rank after `split_models`."""
        raise NotImplementedError

    def is_shardable(self, axis: str) -> bool:
        """Whether the axis of this name may be sharded."""
        return axis in SHARDABLE

    def split_models(self, values: dict[str, Array], arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns `values`, the arrays of a launch or its results, with each shardable axis as an axis of its own."""
        return values

    def merge_models(self, values: dict[str, Array]) -> dict[str, Array]:
        """Inverts `split_models`."""
        return values


class RowLaunchKind(LaunchKind):
    """The kinds that treat each row of `[S, *rows, N]` separately. A shard's rows become one axis, `[S, R, N]`."""

    def is_shardable(self, axis: str) -> bool:
        return axis not in ("columns", "gates")

    def bind_shard(self, slot: PartitionedCallback | None, arrays: Mapping[str, Array]) -> dict[str, Array]:
        def merge_rows(name: str, x: Array) -> Array:
            if name in ROW_WEIGHTS:
                return x
            columns = () if name in ROW_STATISTICS else x.shape[-1:]
            return x.reshape(x.shape[0], math.prod(x.shape[1 : x.ndim - len(columns)]), *columns)

        results = super().bind_shard(slot, {name: merge_rows(name, x) for name, x in arrays.items()})
        return {name: results[name].reshape(like.shape) for name, like in self.types(arrays).items()}


def axes_of_sequences(name: str, rank: int) -> tuple[str, ...]:
    """Returns the axis names of `[S, G, T, B, width]`; resets have no width axis, and states have no step axis."""
    if name == "reset":
        return ("models", "groups", "steps", "batch")
    return ("models", "groups", *(("steps",) if rank == 5 else ()), "batch", f"{name}_width")
