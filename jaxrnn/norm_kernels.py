"""The norms with the kernels, and their gradients: one `jax.custom_vjp` for RMSNorm and LayerNorm.

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

Kind = Literal["rms", "layer"]


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
    arguments = _bridge.reverse_mode_only((x, weight, bias, residual))
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
    # Inside a `shard_map`, some arguments may vary over fewer mesh axes than others. They are unified outside of the
    # custom_vjp, so that JAX transposes this: it sums each gradient over the axes that its argument does not vary over.
    x, weight, bias, residual = sharding.unify_varying_axes((x, weight, bias, residual))
    added_axes = (0,) if x.ndim > 1 else (0, 1)  # one model and, if x is a vector, one row
    canonical = jax.tree.map(lambda array: jnp.expand_dims(array, added_axes), (x, residual))
    y, total = _norm(static, *canonical, *jax.tree.map(lambda w: w[None], (weight, bias)))
    return y.squeeze(added_axes), total.squeeze(added_axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _norm(
    static: NormSpec, x: Array, residual: Array | None, weight: Array | None, bias: Array | None
) -> tuple[Array, Array]:
    """Runs the norm on canonical arrays; returns y and `total`, which is x plus, if there is one, the residual."""
    results = _forward(static, x, residual, weight, bias, save_residuals=False)
    return results["y"], results["total"]


def _forward(
    static: NormSpec, x: Array, residual: Array | None, weight: Array | None, bias: Array | None, save_residuals: bool
) -> dict[str, Array]:
    """Computes `_norm` and returns its outputs by name, with `save_residuals` also the statistics by `_statistics`."""
    outputs = [_bridge.Output("y", static.dtype)]
    if residual is not None:
        outputs.append(_bridge.Output("total", x.dtype))
    if save_residuals:
        outputs += [_bridge.Output(name, jnp.dtype(jnp.float32)) for name in _statistics(static)]
    arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    return {"total": x} | _launch(static, "fwd", arrays, outputs)


def _launch(
    static: NormSpec, direction: str, arrays: dict[str, Array | None], outputs: list[_bridge.Output]
) -> dict[str, Array]:
    """Launches a kernel; under `vmap` over sharded axes each device launches it for its shard."""

    def run(arrays: dict[str, Array | None]) -> dict[str, Array]:
        return _bridge.launch_norm(
            static.kind, direction, arrays, outputs, epsilon=static.epsilon, may_use_xla=static.may_use_xla
        )

    return sharding.shard_over_vmapped_axes(run, arrays)


def _statistics(static: NormSpec) -> tuple[str, ...]:
    """Returns the names of the statistics of each row that the forward pass saves for the backward pass."""
    return ("mean", "rstd") if static.kind == "layer" else ("rstd",)


def _norm_fwd(
    static: NormSpec, x: Array, residual: Array | None, weight: Array | None, bias: Array | None
) -> tuple[Any, Any]:
    results = _forward(static, x, residual, weight, bias, save_residuals=True)
    saved = results["total"], {name: results[name] for name in _statistics(static)}
    return (results["y"], results["total"]), (*saved, weight, bias, residual is not None)


def _norm_bwd(static: NormSpec, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    total, statistics, weight, bias, has_residual = residuals
    dy, dtotal = cotangents
    outputs = [_bridge.Output("dx", total.dtype)]
    outputs += [_bridge.Output(name, w.dtype) for name, w in (("dweight", weight), ("dbias", bias)) if w is not None]
    arrays = {"dy": dy, "x": total, "dtotal": dtotal if has_residual else None, "weight": weight} | statistics
    results = _launch(static, "bwd", arrays, outputs)
    dx = results["dx"]
    return dx, dx if has_residual else None, results.get("dweight"), results.get("dbias")


_norm.defvjp(_norm_fwd, _norm_bwd)
