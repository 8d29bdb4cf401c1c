"""The base classes of the kinds of launches, such as recurrences and norms: types, axes and the launch itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrnn._bridge.primitive import launch_p, launch_shard_p

if TYPE_CHECKING:
    from jax import Array

    from jaxrnn._bridge.partitioning import PartitionedCallback

# Arrays of row-wise launches: those that all rows share, and those that have one element per row.
ROW_WEIGHTS, ROW_STATISTICS = ("weight", "bias", "w_ih_t"), ("mean", "rstd")
# Outputs that are sums over rows, or over steps and sequences: their only leading axis is that of the models.
SUMMED_OUTPUTS = ("dweight", "dbias", "sums")
# Axes of recurrences that may be sharded. Row-wise launches shard any axis of rows, time too (`RowLaunchKind`).
SHARDABLE = ("models", "groups", "batch")


class NamedOutput(NamedTuple):
    """An array that a launch writes, whose shape follows from its name and from the kind of the launch."""

    name: str
    dtype: Any
    over: None = None  # always None; `recurrence.Output` has this field too


class LaunchKind:
    """The base class of the kinds of launches. A kind implements shapes, `vmap`, the launch and its XLA form."""

    name: str

    def __repr__(self) -> str:
        return self.name  # as jaxprs print it

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes that a launch on arrays of these shapes writes."""
        raise NotImplementedError

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        """Returns the `torch_bridge` launch of a shard, without compiling it."""
        raise NotImplementedError

    def batch(
        self, arrays: Sequence[Array], axes: Sequence[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], list[int]]:
        """Implements `vmap` by one larger launch; returns its results and their batch axes."""
        return batch_rows(arrays, axes, params)

    def prefers_xla(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> bool:
        """Returns whether `in_xla` replaces the launch: `params` permit it, and it is estimated to be faster."""
        return False

    def choose(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        """Returns the `torch_bridge` launch of a shard, without compiling it; None if `in_xla` should replace it."""
        return None if self.prefers_xla(arrays, params, device) else self.launch(arrays, params, device)

    def problem(self, arrays: Sequence[Any], params: dict[str, Any]) -> Any:
        """Returns the problem that the log names if `in_xla` replaces the launch, or None for kinds without a log."""
        return None

    def describe(self, params: dict[str, Any]) -> tuple[str, str]:
        """Returns what a launch computes, such as "gru" or "rms_norm", and "fwd" or "bwd"."""
        raise NotImplementedError

    def in_xla(self, arrays: Sequence[Array], params: dict[str, Any]) -> list[Array]:
        """Computes the outputs of a launch on the arrays of `launch_shard_p` with XLA."""
        raise NotImplementedError

    def operands(self, launch: Any, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Returns the arrays, rounded where the kernel of a launch expects rounded operands."""
        return arrays

    def array_dtypes(self, launch: Any) -> dict[str, str]:
        """Returns the dtypes of a launch's arrays by name, where they may differ from those of the program."""
        return {}

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        """Returns the names of the axes of an array that has this rank after `split_model_axis`."""
        raise NotImplementedError

    def is_shardable(self, axis: str) -> bool:
        """Whether the axis of this name may be sharded."""
        return axis in SHARDABLE

    def split_model_axis(self, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Returns the operands of `launch_p`, reshaped so that each shardable axis is an axis of its own."""
        return arrays

    def merge_model_axis(self, results: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Returns the results of `bind_shard`, reshaped to those of `launch_p`."""
        return results

    def merged_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in which `launch_shard_p` takes an unsharded array of `launch_p`."""
        return shape

    def bind_shard(
        self, slot: PartitionedCallback | None, arrays: Sequence[Array], params: dict[str, Any]
    ) -> Sequence[Array]:
        """Binds `launch_shard_p` on the arrays that `split_model_axis` returns, or on a device's shards of them."""
        results: Sequence[Array] = launch_shard_p.bind(*arrays, kind=self, slot=slot, **params)
        return results


class RowLaunchKind(LaunchKind):
    """The kinds that treat each row of `[S, *rows, N]` separately. A shard's rows become one axis, `[S, R, N]`."""

    def is_shardable(self, axis: str) -> bool:
        return axis not in ("columns", "gates")

    def merged_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name in ROW_WEIGHTS:
            return shape
        columns = () if name in ROW_STATISTICS else shape[-1:]
        return (shape[0], math.prod(shape[1 : len(shape) - len(columns)]), *columns)

    def bind_shard(
        self, slot: PartitionedCallback | None, arrays: Sequence[Array], params: dict[str, Any]
    ) -> Sequence[Array]:
        types = self.types([x.shape for x in arrays], params)
        flat = [x.reshape(self.merged_shape(name, x.shape)) for name, x in zip(params["inputs"], arrays, strict=True)]
        results = launch_shard_p.bind(*flat, kind=self, slot=slot, **params)
        return [x.reshape(like.shape) for x, like in zip(results, types, strict=True)]


def types_of_shard(kind: LaunchKind, avals: Sequence[Any], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the arrays of `launch_shard_p` for a launch on one device, given those of `launch_p`."""
    return [
        jax.ShapeDtypeStruct(kind.merged_shape(name, aval.shape), aval.dtype)
        for name, aval in zip(params["inputs"], avals, strict=True)
    ]


def dtypes_of(arrays: Sequence[Any], params: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Returns `(name, dtype)` of each array that a launch reads, and then of each that it writes."""
    dtypes = [(name, str(x.dtype)) for name, x in zip(params["inputs"], arrays, strict=True)]
    dtypes += [(output.name, str(jnp.dtype(output.dtype))) for output in params["outputs"]]
    return tuple(dtypes)


def axes_of_sequences(name: str, rank: int) -> tuple[str, ...]:
    """Returns the axis names of `[S, G, T, B, width]`; resets have no width axis, and states have no step axis."""
    if name == "reset":
        return ("models", "groups", "steps", "batch")
    return ("models", "groups", *(("steps",) if rank == 5 else ()), "batch", f"{name}_width")


def batch_rows(
    arrays: Sequence[Array], axes: Sequence[int | None], params: dict[str, Any]
) -> tuple[list[Array], list[int]]:
    """Batches a launch: the new axis joins the rows, or the models if weights are batched or outputs are sums of rows.

    Gradients of weights are sums over the rows of a model, so every example becomes a model of its own.
    """
    names = (*params["inputs"], *(output.name for output in params["outputs"]))
    batched = {name for name, axis in zip(params["inputs"], axes, strict=True) if axis is not None}
    new_models = bool(batched & {*ROW_WEIGHTS} or {*names} & {*SUMMED_OUTPUTS})
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)

    def merge(name: str, x: Array, axis: int | None) -> Array:
        if name in ROW_WEIGHTS and not new_models:
            return x
        at = 0 if new_models else 1  # after the models
        if axis is None:
            x = jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))
        else:
            x = jnp.moveaxis(x, axis, at)
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if new_models else x

    results = launch_p.bind(*map(merge, params["inputs"], arrays, axes), **params)
    if new_models:
        # an array mapped over axis 0 has its models at axis 1
        models = next(x.shape[0 if axis is None or axis else 1] for x, axis in zip(arrays, axes, strict=True))
        results = [x.reshape(size, models, *x.shape[1:]) for x in results]
    return results, [0 if new_models else 1] * len(results)
