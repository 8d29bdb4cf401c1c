"""The functions `rms_norm` and `layer_norm`."""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from torch_bridge import norm_ops, op_common
from torch_bridge.functional.checks import Implementation, check_implementation

# Whether PyTorch's own norm returns float32 under autocast on a GPU. On the CPU neither norm does.
_AUTOCAST: dict[norm_ops.Kind, bool] = {"layer": True, "rms": TorchVersion(torch.__version__) >= "2.12"}


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: None = None,
    eps: float | None = None,
    implementation: Implementation = None,
) -> Tensor: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor,
    eps: float | None = None,
    implementation: Implementation = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None,
    eps: float | None = None,
    implementation: Implementation = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float | None = None,
    implementation: Implementation = None,
) -> Any:
    """Divides each row by its root mean square (Zhang and Sennrich, 2019), after adding a residual connection.

        total = x + residual
        y = total / sqrt(mean(total^2) + eps) * weight + bias

    The norm is computed in float32, or in float64 if `total` is float64.

    Args:
      x: `[..., N]`, floating point.
      weight: `[N]` in any floating-point dtype, or None for ones.
      bias: `[N]` in any floating-point dtype, or None for zeros.
      residual: in the shape of `x`, or None.
      eps: added to the mean square; None for the machine epsilon of the dtype that the norm is computed in, as in
        `torch.nn.functional.rms_norm`.
      implementation: "triton" (the kernels, which need an NVIDIA GPU and float32, bfloat16 or float16); "torch"
        (PyTorch operations that autograd differentiates to any order and in any mode); or None: the kernels where they
        can run, elsewhere PyTorch operations, as one operator. If you name an implementation that cannot run the input,
        a `NotImplementedError` says why.

    Returns:
      `y` in the shape and dtype of `x`. Under autocast on a GPU, `y` is float32 from PyTorch 2.12 on, like the result
      of `torch.nn.functional.rms_norm`. With a residual, `(y, total)`: `total` has the dtype of `x + residual`, and the
      norm is computed from that rounded sum.

    Raises:
      ValueError: shapes or devices disagree, a dtype is not floating point, `eps` is not a number, is negative or is
        infinite, or the implementation is unknown.
      NotImplementedError: the named implementation cannot run this input, or a derivative that the operators do not
        have (second-order or forward-mode) is requested; `implementation="torch"` has it.
    """
    return _norm("rms", x, weight, bias, residual, eps, implementation)


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: None = None,
    eps: float = 1e-5,
    implementation: Implementation = None,
) -> Tensor: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor,
    eps: float = 1e-5,
    implementation: Implementation = None,
) -> tuple[Tensor, Tensor]: ...


@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None,
    eps: float = 1e-5,
    implementation: Implementation = None,
) -> Tensor | tuple[Tensor, Tensor]: ...


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    implementation: Implementation = None,
) -> Any:
    """Normalizes each row to mean 0 and variance 1 (Ba, Kiros and Hinton, 2016), after adding a residual connection.

        total = x + residual
        y = (total - mean(total)) / sqrt(var(total) + eps) * weight + bias,  var(t) = mean((t - mean(t))^2)

    The norm is computed in float32, or in float64 if `total` is float64.

    Args:
      x: see `rms_norm`.
      weight: see `rms_norm`.
      bias: see `rms_norm`.
      residual: see `rms_norm`.
      eps: added to the variance.
      implementation: see `rms_norm`.

    Returns:
      `y` or `(y, total)`, see `rms_norm`. Under autocast on a GPU, `y` is float32.

    Raises:
      ValueError: see `rms_norm`.
      NotImplementedError: see `rms_norm`.
    """
    return _norm("layer", x, weight, bias, residual, eps, implementation)


def _norm(
    kind: norm_ops.Kind, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float | None, implementation: Implementation,
) -> Any:  # fmt: skip
    if x.ndim < 1 or not x.is_floating_point():
        raise ValueError(f"x must be [..., N] and floating point, got {tuple(x.shape)} of {x.dtype}")
    check_implementation(implementation)
    shapes = (("weight", weight, x.shape[-1:]), ("bias", bias, x.shape[-1:]), ("residual", residual, x.shape))
    for name, y, shape in shapes:
        if y is not None and y.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)} for x {tuple(x.shape)}, got {tuple(y.shape)}")
        if y is not None and not y.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {y.dtype}: convert it")
    op_common.check_devices("x", x, {name: y for name, y, _ in shapes})
    if not (eps is None and kind == "rms") and (isinstance(eps, bool) or not isinstance(eps, (int, float))):
        raise ValueError(f"eps of {kind}_norm must be a number, got {type(eps).__name__}: kernels take it as a scalar")
    if eps is not None and not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    device, dtype = x.device.type, x.dtype
    if device != "cpu" and _AUTOCAST[kind] and dtype != torch.float64 and op_common.is_autocasting(device):
        dtype = torch.float32
    if eps is None:
        total_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        eps = torch.finfo(op_common.accumulation_dtype(total_dtype)).eps
    if implementation == "torch":
        normalize = op_common.without_autocast(norm_ops.normalize)
        results = normalize(x, weight, bias, residual, kind=kind, epsilon=eps, dtype=dtype)
        return results.y if residual is None else (results.y, results.total)

    def rows(y: Tensor) -> Tensor:
        return y.reshape(1, math.prod(y.shape[:-1]), y.shape[-1])

    if residual is not None and residual.is_leaf and residual.requires_grad:
        residual = residual.mul(1)  # x receives the same tensor as gradient; two leaves must not share .grad
    w, b = (None if y is None else y[None] for y in (weight, bias))
    sums = None if residual is None else rows(residual)
    y, total = norm_ops.forward(kind, rows(x), w, b, sums, eps, dtype, implementation)
    return y.reshape(x.shape) if residual is None else (y.reshape(x.shape), total.reshape(x.shape))
