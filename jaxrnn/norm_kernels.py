"""The norms with the kernels, and their gradients: one `_bridge.Differentiable` for RMSNorm and LayerNorm.

It works on canonical arrays `[1, *rows, N]` of one model: `vmap` adds rows, or models if the weights are batched. Row
axes are not merged, so that each of them can be sharded.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxrnn import _bridge, sharding
from jaxrnn.numerics import broadcast_to_rank, rounded_sum

Kind = Literal["rms", "layer"]
_Canonical = tuple[Array, Array | None, Array | None, Array | None]  # x, residual, weight, bias


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """The static arguments of a norm, on which it is specialized besides shapes and dtypes.

    Attributes:
      kind: "rms" or "layer".
      epsilon: the number that is added inside the root.
      dtype: the dtype of the result `y`.
      may_use_xla: whether XLA may compute a launch instead: where that is faster, and on a CPU.
    """

    kind: Kind
    epsilon: float
    dtype: Any
    may_use_xla: bool


def run(
    static: NormSpec, x: Array, weight: Array | None, bias: Array | None, residual: Array | None
) -> tuple[Array, Array]:
    """Returns the norm of `x + residual`, and this sum; the last axis of `x` must not be sharded.

    On an explicit mesh, each device runs the kernels for its shard of the rows.
    """
    run_on_device = functools.partial(_run_on_device, static)
    arguments = x, weight, bias, residual
    spec = sharding.spec_of(x)
    if all(axis is None for axis in spec):
        return run_on_device(*sharding.replicate(arguments))
    rows, replicated = PartitionSpec(*spec), PartitionSpec()
    specs = tuple(
        None if array is None else to for array, to in zip(arguments, (rows, replicated, replicated, rows), strict=True)
    )
    return sharding.shard_over_mesh(run_on_device, jax.typeof(x).sharding.mesh, specs, (rows, rows), arguments)


def _run_on_device(
    static: NormSpec, x: Array, weight: Array | None, bias: Array | None, residual: Array | None
) -> tuple[Array, Array]:
    """Brings the arguments into canonical form, runs the kernels, and brings the results back."""
    # Inside a `shard_map`, some arguments may vary over fewer mesh axes than others. They are unified before the norm,
    # so that JAX transposes this: it sums each gradient over the axes that its argument does not vary over.
    x, weight, bias, residual = sharding.unify_varying_axes((x, weight, bias, residual))
    added_axes = (0,) if x.ndim > 1 else (0, 1)  # one model and, if x is a vector, one row
    canonical = jax.tree.map(lambda array: jnp.expand_dims(array, added_axes), (x, residual))
    run = _bridge.Differentiable(f"{static.kind}_norm", static, _run_forward, _run_backward, _in_xla)
    y, total = run((*canonical, *jax.tree.map(lambda w: w[None], (weight, bias))))
    return y.squeeze(added_axes), total.squeeze(added_axes)


def _run_forward(static: NormSpec, save: bool, arguments: _Canonical) -> tuple[tuple[Array, Array], dict[str, Array]]:
    """Runs the norm on canonical arrays.

    Returns:
      `y` and `total`, which is x plus, if there is one, the residual; and, with `save`, what the backward pass needs:
      `total` and the statistics of each row.
    """
    x, residual, weight, bias = arguments
    outputs = [_bridge.Output("y", static.dtype)]
    if residual is not None:
        outputs.append(_bridge.Output("total", x.dtype))
    statistics = (("mean", "rstd") if static.kind == "layer" else ("rstd",)) if save else ()
    outputs += [_bridge.Output(name, jnp.dtype(jnp.float32)) for name in statistics]
    arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    results = {"total": x} | _launch(static, "fwd", arrays, outputs)
    saved = {name: results[name] for name in ("total", *statistics)} if save else {}
    return (results["y"], results["total"]), saved


def _run_backward(
    static: NormSpec, save: bool, arguments: _Canonical, saved: dict[str, Array], cotangents: tuple[Array, Array]
) -> tuple[tuple[Array | None, ...], list[Array]]:
    _, residual, weight, bias = arguments
    dy, dtotal = cotangents
    outputs = [_bridge.Output("dx", saved["total"].dtype)]
    outputs += [_bridge.Output(name, w.dtype) for name, w in (("dweight", weight), ("dbias", bias)) if w is not None]
    has_residual = residual is not None
    arrays = {"dy": dy, "x": saved["total"], "dtotal": dtotal if has_residual else None, "weight": weight}
    arrays |= {name: x for name, x in saved.items() if name != "total"}
    results = _launch(static, "bwd", arrays, outputs)
    dx = results["dx"]
    return (dx, dx if has_residual else None, results.get("dweight"), results.get("dbias")), []


def _launch(
    static: NormSpec, direction: str, arrays: dict[str, Array | None], outputs: list[_bridge.Output]
) -> dict[str, Array]:
    """Launches a kernel; under `vmap` over sharded axes each device launches it for its shard."""

    def run(arrays: dict[str, Array | None]) -> dict[str, Array]:
        return _bridge.launch_norm(
            static.kind, direction, arrays, outputs, epsilon=static.epsilon, may_use_xla=static.may_use_xla
        )

    return sharding.shard_over_vmapped_axes(run, arrays)


def _in_xla(static: NormSpec, arguments: _Canonical) -> tuple[Array, Array]:
    x, residual, weight, bias = arguments
    weight, bias = jax.tree.map(lambda w: w[0], (weight, bias))
    return compute(static, x, weight, bias, residual)


def compute(
    static: NormSpec, x: Array, weight: Array | None, bias: Array | None, residual: Array | None
) -> tuple[Array, Array]:
    """Computes what `run` returns with `jax.numpy`."""
    dtypes = [static.dtype, *(array.dtype for array in (x, weight, bias) if array is not None)]
    dtype = jnp.float64 if jnp.float64 in dtypes else jnp.float32  # `jax_numpy_dtype_promotion` may forbid promotion
    total = x if residual is None else rounded_sum(x, residual)
    y = total.astype(dtype)
    if static.kind == "layer":
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + static.epsilon)
    if weight is not None:
        y = y * broadcast_to_rank(weight, y)
    if bias is not None:
        y = y + broadcast_to_rank(bias, y)
    return y.astype(static.dtype), total
