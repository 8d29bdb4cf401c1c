"""`rms_norm` and `layer_norm`: checks of arguments, the choice of the implementation, and the norms in `jax.numpy`.

`norm_kernels` has the Triton implementation.
"""

from __future__ import annotations

import functools
import math
from typing import Any, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jaxrnn import _bridge, norm_kernels, sharding
from jaxrnn.checks import Caller, Implementation, check_epsilon, check_floating, check_implementation
from jaxrnn.choice import NOT_ON_GPU, Choice, choose, describe_arrays
from jaxrnn.norm_kernels import Kind, NormSpec
from jaxrnn.numerics import rounded_sum
from torch_bridge.docstrings import inherit_descriptions

__all__ = ["layer_norm", "rms_norm"]

# Minimum number of elements for which a kernel is profitable: on an H200, it is as fast as XLA in the forward pass and
# up to 1.6 times as fast in the backward pass. For fewer elements, XLA fuses a norm with the operations around it.
_MIN_KERNEL_ELEMENTS = 2**22


def preferred(rows: int, columns: int) -> bool:
    """Whether the Triton implementation, if it can run, is the fastest for an array of this size."""
    elements = rows * columns
    return isinstance(elements, int) and elements >= _MIN_KERNEL_ELEMENTS  # `jax.export` has sizes that are no ints


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: None = None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> Array: ...


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> tuple[Array, Array]: ...


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike | None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]: ...


def rms_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> Any:
    """Divides by the root of the mean square over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467).

        y = x / sqrt(mean(x^2) + epsilon) * weight + bias

    Args:
      x: `[*rows, N]`, float32, bfloat16 or float16; any number of axes before the last.
      weight: `[N]` of any of these dtypes, or None for ones.
      bias: `[N]` of any of these dtypes, or None for zeros.
      residual: residual connection: an array with the shape and dtype of `x` that is added to `x` before the norm, in
        the same kernel. The norm is computed from the sum as it is returned, rounded to that dtype.
      epsilon: a number, not an array; added to the mean square, inside the root.
      implementation: "triton" (a fused kernel; needs an NVIDIA GPU), "xla" (`jax.numpy`), or None, which picks "triton"
        for arrays of at least 2^22 elements if it can run, else "xla". Under `jax.vmap`, only the elements of one
        example are counted. If you name one that cannot run the input, a `NotImplementedError` says why.

    The norm is computed in float32. Only "xla" supports float64 and computes it in float64.

    On an explicit mesh `x` may be sharded over all axes but the last: every device normalizes its shard, and the other
    arguments are resharded to match `x`. The same holds if JAX manages the mesh (`AxisType.Auto`). Gradients of
    `weight` and `bias` are summed over devices.

    Derivatives of every order and mode exist. Kernels compute the results and first-order gradients. XLA computes the
    tangents of forward mode (`jax.jvp`, `jax.jacfwd`, `jax.hessian`) and derivatives of gradients.

    Returns:
      `y`, with the shape and dtype of `x`; with a residual, `(y, x + residual)`.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input; the message says which limit was hit.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> x, weight = jnp.arange(8.0).reshape(2, 4), jnp.ones(4)
      >>> y, total = jaxrnn.rms_norm(x, weight, residual=x)
      >>> bool((total == 2 * x).all())
      True
      >>> bool(jnp.allclose((y * y).mean(axis=-1), 1, atol=1e-5))
      True
    """
    return normalize("rms", x, weight, bias, residual, epsilon, implementation)


@overload
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: None = None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> Array: ...


@overload
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> tuple[Array, Array]: ...


@overload
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike | None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> Array | tuple[Array, Array]: ...


@inherit_descriptions(rms_norm)
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    epsilon: float = 1e-6,
    implementation: Implementation = None,
) -> Any:
    """Normalizes the last axis to zero mean and unit variance (Ba, Kiros and Hinton 2016, arXiv:1607.06450).

        y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * weight + bias

    Args:
      epsilon: a number, not an array; added to the variance, inside the root.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> x, weight, bias = jnp.arange(8.0).reshape(2, 4), jnp.ones(4), jnp.zeros(4)
      >>> y = jaxrnn.layer_norm(x, weight, bias)
      >>> bool(jnp.allclose(y.mean(axis=-1), 0, atol=1e-5)), bool(jnp.allclose(y.var(axis=-1), 1, atol=1e-5))
      (True, True)
    """
    return normalize("layer", x, weight, bias, residual, epsilon, implementation)


def normalize(
    kind: Kind,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    epsilon: float,
    implementation: Implementation,
    dtype: DTypeLike | None = None,
    caller: Caller | None = None,
) -> Any:
    """Computes `rms_norm` or `layer_norm`, with `y` in `dtype`; the default is the dtype of `x`.

    Error messages name `caller`; the default is the name of the function.
    """
    caller = Caller(f"{kind}_norm") if caller is None else caller
    _check(caller, x, weight, bias, residual, epsilon)
    check_implementation(implementation, caller)
    x, weight, bias, residual = jax.tree.map(jnp.asarray, (x, weight, bias, residual))
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    choice = _choose(kind, implementation, x, weight, bias, dtype, caller)
    static = NormSpec(kind, float(epsilon), dtype, choice.may_use_xla)
    run = functools.partial(norm_kernels.run if choice.implementation == "triton" else _xla, static)
    y, total = choice.mark(run)(x, weight, bias, residual)
    return y if residual is None else (y, total)


def _check(caller: Caller, x: Any, weight: Any, bias: Any, residual: Any, epsilon: Any) -> None:
    """Raises ValueError unless shapes, dtypes and `epsilon` are valid."""
    arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    for name, array in arrays.items():
        if array is not None or name == "x":
            check_floating(caller(name), array)
    shape = jnp.shape(x)
    if not shape:
        raise ValueError(f"{caller('x')} must be [*rows, N], got a scalar; add the axes that are missing")
    for name in ("weight", "bias"):
        if arrays[name] is not None and jnp.shape(arrays[name]) != shape[-1:]:
            raise ValueError(
                f"{caller(name)} must be [N] = {shape[-1:]} as in x {shape}, got {jnp.shape(arrays[name])}; the norm "
                "is over the last axis of x"
            )
    if residual is not None:
        _check_residual(caller, x, residual)
    check_epsilon(caller("epsilon"), epsilon, default="1e-6")


def _check_residual(caller: Caller, x: Any, residual: Any) -> None:
    """Raises ValueError unless the residual has the shape and dtype of `x`."""
    expected, got = (f"{jnp.result_type(array)}{list(jnp.shape(array))}" for array in (x, residual))
    if expected != got:
        raise ValueError(
            f"{caller('residual')} must have the shape and dtype of x, {expected}, got {got}; broadcast or convert it"
        )


def add_residual(x: Array, residual: Array, *, caller: Caller) -> Array:
    """Returns `x + residual` as the norms return it: in the dtype of `x`, sharded like `x`.

    Raises:
      ValueError: the residual does not have the shape and dtype of `x`; the message names `caller`.
    """
    _check_residual(caller, x, residual)
    residual = jnp.asarray(residual)
    if sharding.on_explicit_mesh(x):
        mesh, spec = jax.typeof(x).sharding.mesh, PartitionSpec(*sharding.spec_of(x))
        (residual,) = sharding.reshard((residual,), mesh, (spec,))
    return rounded_sum(x, residual)


def _choose(
    kind: Kind, implementation: Any, x: Array, weight: Array | None, bias: Array | None, dtype: Any, caller: Caller
) -> Choice:
    """Chooses the implementation of a norm; raises what `choose` raises."""
    rows, columns = math.prod(x.shape[:-1]), x.shape[-1]

    def prefer_xla() -> str | None:
        if not _bridge.on_gpu():
            return NOT_ON_GPU
        return None if preferred(rows, columns) else f"XLA is faster for fewer than {_MIN_KERNEL_ELEMENTS} elements"

    def unsupported() -> str | None:
        dtypes = [dtype, *(array.dtype for array in (x, weight, bias) if array is not None)]
        reason = _bridge.symbolic_size([x]) or _bridge.unsupported_norm(dtypes, columns)
        spec = sharding.spec_of(x)
        if reason is None and spec[-1] is not None:
            reason = (
                f"needs the last axis of x unsharded, but x is sharded as {spec}: use jax.reshard to shard x over its "
                'other axes only, or pass implementation="xla"'
            )
        return reason

    return choose(
        f"{kind}_norm", lambda: describe_arrays(x=x), implementation, prefer_xla=prefer_xla, unsupported=unsupported,
        empty=0 in x.shape, caller=caller.name,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0,))
def _xla(
    static: NormSpec, x: Array, weight: Array | None, bias: Array | None, residual: Array | None
) -> tuple[Array, Array]:
    """Computes the norm with `jax.numpy` under `jax.jit`, so that eager calls reuse the compiled program."""
    if sharding.on_explicit_mesh(x):  # reshards the other arguments to match x
        spec = sharding.spec_of(x)
        rows, columns = PartitionSpec(*spec), PartitionSpec(spec[-1])
        weight, bias, residual = sharding.reshard(
            (weight, bias, residual), jax.typeof(x).sharding.mesh, (columns, columns, rows)
        )
    return norm_kernels.compute(static, x, weight, bias, residual)
