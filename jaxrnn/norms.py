"""`rms_norm` and `layer_norm`: check the arguments, choose the implementation, run it.

The Triton implementation is one `jax.custom_vjp` for both. It works on arrays `[1, *rows, N]`: `vmap` adds rows, or
models if the weights are batched, and rows stay the axes they are, so that devices can share out each of them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxrnn import _bridge, sharding
from jaxrnn.checks import Implementation, check_floating, check_implementation
from jaxrnn.reference import along_last

Kind = Literal["rms", "layer"]

# Elements from which on a kernel is the fastest (H200: as fast forward, up to 1.6 times as fast backward); below, XLA
# fuses a norm with what is around it.
_LARGE = 2**22


def preferred(rows: int, columns: int) -> bool:
    """Whether the Triton implementation, where it can run, is the fastest for an array of this size."""
    return isinstance(rows * columns, int) and rows * columns >= _LARGE  # not so under `jax.export` of symbolic ones


def rms_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> Any:
    """Divides by the root of the mean square over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

        y = x / sqrt(mean(x^2) + epsilon) * weight + bias

    Args:
      x: `[*rows, N]`, float32, bfloat16 or float16; any number of axes before the last.
      weight: `[N]` of any of these dtypes, or None for ones.
      bias: `[N]` of any of these dtypes, or None for zeros.
      residual: added to `x` first, in the same pass; of its shape and dtype. The norm is of the sum as it is returned,
        rounded to that dtype.
      epsilon: a number, not an array; added to the mean square, inside the root.
      implementation: "triton" (a fused kernel, needs an NVIDIA GPU), "xla" (`jax.numpy`), or None: "triton" for arrays
        of 2^22 elements and more where it works, else "xla". Under `jax.vmap` the elements of one example count. A name
        works or raises.

    Computed in float32. float64 takes "xla" and is computed in float64.

    On an explicit mesh `x` may be sharded over all axes but the last: every device normalises its part, and what else
    is given goes to where that is. So it is if JAX manages the mesh by itself (`AxisType.Auto`). Gradients of `weight`
    and `bias` are summed over devices.

    Forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) and derivatives of gradients need `implementation="xla"`: the
    kernels have a gradient and no other derivative, and raise also where None picks them.

    Returns:
      `y`, of the shape and dtype of `x`; with a residual `(y, x + residual)`.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input, or the kernels are asked for a forward-mode
        or second derivative; the message says which limit was hit.
    """
    return normalize("rms", x, weight, bias, residual, epsilon, implementation)


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    residual: Array | None = None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> Any:
    """Brings the last axis to a mean of zero and a variance of one (Ba, Kiros and Hinton 2016, arXiv:1607.06450).

        y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * weight + bias

    Args:
      x: as all arguments, as in `rms_norm`.
      weight: `[N]`, or None for ones.
      bias: `[N]`, or None for zeros.
      residual: added to `x` first.
      epsilon: added to the variance, inside the root.
      implementation: "triton", "xla" or None.

    Returns:
      As `rms_norm`: `y`, or `(y, x + residual)`.

    Raises:
      ValueError: as `rms_norm`.
      NotImplementedError: as `rms_norm`.
    """
    return normalize("layer", x, weight, bias, residual, epsilon, implementation)


def normalize(
    kind: Kind,
    x: Array,
    weight: Array | None,
    bias: Array | None,
    residual: Array | None,
    epsilon: float,
    implementation: Implementation,
    dtype: DTypeLike | None = None,
) -> Any:
    """`rms_norm` or `layer_norm`, with `y` in `dtype`, by default that of `x`."""
    _check(kind, x, weight, bias, residual, epsilon)
    x, weight, bias, residual = jax.tree.map(jnp.asarray, (x, weight, bias, residual))
    static = _NormSpec(kind, float(epsilon), jnp.dtype(x.dtype if dtype is None else dtype))
    run = _run_triton if _use_triton(implementation, x, weight, bias, static.dtype) else _xla
    y, total = run(static, x, weight, bias, residual)
    return y if residual is None else (y, total)


def _check(kind: Kind, x: Any, weight: Any, bias: Any, residual: Any, epsilon: Any) -> None:
    """Raises ValueError unless the norm can take them."""
    arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    for name, array in arrays.items():
        if array is not None or name == "x":
            check_floating(name, array)
    shape = jnp.shape(x)
    if not shape:
        raise ValueError("x must be [*rows, N], got a scalar")
    for name in ("weight", "bias"):
        if arrays[name] is not None and jnp.shape(arrays[name]) != shape[-1:]:
            raise ValueError(f"{name} must be [N] = {shape[-1:]} as in x {shape}, got {jnp.shape(arrays[name])}")
    if residual is not None:
        expected, got = (f"{jnp.result_type(array)}{list(jnp.shape(array))}" for array in (x, residual))
        if expected != got:
            raise ValueError(f"residual must have the shape and dtype of x, {expected}, got {got}")
    if isinstance(epsilon, (bool, jax.Array)) or not isinstance(epsilon, (int, float, np.number)):
        raise ValueError(
            f"epsilon of {kind}_norm must be a number, got {type(epsilon).__name__}: kernels are made for it"
        )
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"epsilon must be finite and not negative, got {epsilon}")


def _use_triton(implementation: Any, x: Array, weight: Array | None, bias: Array | None, dtype: Any) -> bool:
    """Whether to run the Triton kernels. Where there is nothing to compute, XLA gives the empty results.

    Raises:
      ValueError: no implementation has that name.
      NotImplementedError: "triton" was asked for and cannot run; the message says why.
    """
    check_implementation(implementation)
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]
    if implementation == "xla" or (implementation is None and not (_bridge.on_gpu() and preferred(rows, columns))):
        return False
    dtypes = [dtype, *(array.dtype for array in (x, weight, bias) if array is not None)]
    reason = _bridge.unsupported_norm(dtypes, columns)
    spec = sharding.spec_of(x)
    if reason is None and spec[-1] is not None:
        reason = (
            f"needs whole features on a device, and x is sharded as {spec}: jax.reshard it to be sharded over other "
            'axes alone, or pass implementation="xla"'
        )
    if reason is not None and implementation == "triton":
        raise NotImplementedError(f"the Triton implementation {reason}")
    return reason is None and 0 not in x.shape


@dataclasses.dataclass(frozen=True)
class _NormSpec:
    """What a norm is specialised on, besides shapes and dtypes of its arguments; `dtype` is that of y."""

    kind: Kind
    epsilon: float
    dtype: Any


def _statistics(kind: Kind, x: Array, epsilon: float) -> tuple[Array, Array]:
    """`x`, or what is left of it without its mean, and the factor that normalises that, `[..., 1]`."""
    if kind == "layer":
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x, jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)


@functools.partial(jax.jit, static_argnums=(0,))
def _xla(
    static: _NormSpec, x: Array, weight: Array | None, bias: Array | None, residual: Array | None
) -> tuple[Array, Array]:
    """The norm in `jax.numpy`; compiled, so that an eager call finds what the one before has compiled."""
    if sharding.on_explicit_mesh(x):  # all else goes to where x is
        spec = sharding.spec_of(x)
        rows, columns = PartitionSpec(*spec), PartitionSpec(spec[-1])
        weight, bias, residual = sharding.reshard(
            (weight, bias, residual), jax.typeof(x).sharding.mesh, (columns, columns, rows)
        )
    dtypes = [static.dtype, *(array.dtype for array in (x, weight, bias) if array is not None)]
    dtype = jnp.float64 if jnp.float64 in dtypes else jnp.float32  # by no promotion: JAX may be told to refuse it
    total = x if residual is None else _sum(x, residual)
    y, factor = _statistics(static.kind, total.astype(dtype), static.epsilon)
    y = y * factor
    if weight is not None:
        y = y * along_last(weight, y)
    if bias is not None:
        y = y + along_last(bias, y)
    return y.astype(static.dtype), total


def _sum(x: Array, y: Array) -> Array:
    """`x + y`, rounded to their dtype for all who read it: XLA may leave out a rounding to 16 bits and back."""
    info = jnp.finfo(x.dtype)
    if info.bits > 16:
        return x + y
    total = x.astype(jnp.float32) + y.astype(jnp.float32)
    return jax.lax.reduce_precision(total, exponent_bits=info.nexp, mantissa_bits=info.nmant).astype(x.dtype)


def _run_triton(
    static: _NormSpec, x: Array, weight: Array | None, bias: Array | None, residual: Array | None
) -> tuple[Array, Array]:
    """Runs the kernels, on each device of an explicit mesh for its part of the rows."""
    run = functools.partial(_run_on_device, static)
    arguments = _bridge.reverse_mode_only((x, weight, bias, residual))
    spec = sharding.spec_of(x)
    if all(axis is None for axis in spec):
        return run(*sharding.replicate(arguments))
    rows, whole = PartitionSpec(*spec), PartitionSpec()
    specs = tuple(
        None if array is None else to for array, to in zip(arguments, (rows, whole, whole, rows), strict=True)
    )
    return sharding.shard_over_mesh(run, jax.typeof(x).sharding.mesh, specs, (rows, rows), arguments)


def _run_on_device(
    static: _NormSpec, x: Array, weight: Array | None, bias: Array | None, residual: Array | None
) -> tuple[Array, Array]:
    """Brings the arguments into canonical form, runs the kernels, and brings the results back."""
    # out here, where the transpose sums gradients over the devices of a `shard_map` that an argument does not vary over
    x, weight, bias, residual = sharding.unify_varying_axes((x, weight, bias, residual))
    lead = (0,) if x.ndim > 1 else (0, 1)  # one model and, of a vector, one row
    canonical = jax.tree.map(lambda array: jnp.expand_dims(array, lead), (x, residual))
    y, total = _norm(static, *canonical, *jax.tree.map(lambda w: w[None], (weight, bias)))
    return y.squeeze(lead), total.squeeze(lead)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _norm(
    static: _NormSpec, x: Array, residual: Array | None, weight: Array | None, bias: Array | None
) -> tuple[Array, Array]:
    """Runs the norm on canonical arrays: returns y and what it is the norm of."""
    results = _forward(static, x, residual, weight, bias, save_residuals=False)
    return results["y"], results["total"]


def _forward(
    static: _NormSpec, x: Array, residual: Array | None, weight: Array | None, bias: Array | None, save_residuals: bool
) -> dict[str, Array]:
    """As `_norm`, and returns by name what the backward pass needs, with `save_residuals`."""
    outputs = [_bridge.NamedOutput("y", static.dtype)]
    if residual is not None:
        outputs.append(_bridge.NamedOutput("total", x.dtype))
    if save_residuals:
        outputs += [_bridge.NamedOutput(name, jnp.dtype(jnp.float32)) for name in _residuals(static)]
    arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
    return {"total": x} | _launch(static, "fwd", arrays, outputs)


def _launch(
    static: _NormSpec, direction: str, arrays: dict[str, Array | None], outputs: list[_bridge.NamedOutput]
) -> dict[str, Array]:
    """Launches a kernel, under `vmap` over axes that devices share out on each for its part."""

    def run(arrays: dict[str, Array | None]) -> dict[str, Array]:
        return _bridge.launch_norm(static.kind, direction, arrays, outputs, epsilon=static.epsilon)

    return sharding.shard_over_vmapped_axes(run, arrays)


def _residuals(static: _NormSpec) -> tuple[str, ...]:
    """The statistics that the backward pass needs."""
    return ("mean", "rstd") if static.kind == "layer" else ("rstd",)


def _norm_fwd(
    static: _NormSpec, x: Array, residual: Array | None, weight: Array | None, bias: Array | None
) -> tuple[Any, Any]:
    results = _forward(static, x, residual, weight, bias, save_residuals=True)
    saved = results["total"], {name: results[name] for name in _residuals(static)}
    return (results["y"], results["total"]), (*saved, weight, bias, residual is not None)


def _norm_bwd(static: _NormSpec, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    total, statistics, weight, bias, has_residual = residuals
    dy, dtotal = cotangents
    outputs = [_bridge.NamedOutput("dx", total.dtype)]
    outputs += [
        _bridge.NamedOutput(name, w.dtype) for name, w in (("dweight", weight), ("dbias", bias)) if w is not None
    ]
    arrays = {"dy": dy, "x": total, "dtotal": dtotal if has_residual else None, "weight": weight} | statistics
    results = _launch(static, "bwd", arrays, outputs)
    dx = results["dx"]
    return dx, dx if has_residual else None, results.get("dweight"), results.get("dbias")


_norm.defvjp(_norm_fwd, _norm_bwd)
