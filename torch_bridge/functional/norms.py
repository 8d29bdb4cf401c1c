"""The functions `rms_norm` and `layer_norm`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from torch_bridge import norm_ops, op_common, recording
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional.call import Implementation
from torch_bridge.functional.checks import check_epsilon, check_implementation, check_number, check_tensor
from torch_bridge.functional.sharding import Shards, is_distributed

# Whether PyTorch's own norm returns float32 under autocast on a GPU. On the CPU neither norm does.
_AUTOCAST: dict[norm_ops.Kind, bool] = {"layer": True, "rms": TorchVersion(torch.__version__) >= "2.12"}


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: None = None,
    eps: float | None = None, implementation: Implementation = None,
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor,
    eps: float | None = None, implementation: Implementation = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None,
    eps: float | None = None, implementation: Implementation = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    bias: Tensor | None = None, residual: None = None, implementation: Implementation = None,
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    bias: Tensor | None = None, residual: Tensor, implementation: Implementation = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, eps: float | None = None, *,
    bias: Tensor | None = None, residual: Tensor | None, implementation: Implementation = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def rms_norm(
    x: Tensor, *args: Any, residual: Tensor | None = None, implementation: Implementation = None, **kwargs: Any
) -> Any:
    """Divides each row by its root mean square (Zhang and Sennrich, 2019), after adding a residual connection.

        total = x + residual
        y = total / sqrt(mean(total^2) + eps) * weight + bias

    The norm is computed in float32, or in float64 if `total` is float64.

    Args:
      x: `[..., N]`, floating point.
      args: `weight` and `bias`; or, as in `torch.nn.functional.rms_norm`, `normalized_shape`, `weight` and `eps`. The
        normalized shape is an int or a sequence of ints, the trailing axes of `x` that are one row; without it, a row
        is the last axis, and N below is its length.
      kwargs: these arguments by name. `weight` and `bias` are `[N]` or `normalized_shape`, in any floating-point dtype,
        or None for ones and zeros. `eps` is added to the mean square; None is the machine epsilon of the dtype that the
        norm is computed in, as in `torch.nn.functional.rms_norm`.
      residual: in the shape of `x`, or None.
      implementation: "triton" (the kernels, which need an NVIDIA GPU and float32, bfloat16 or float16); "torch"
        (PyTorch operations that autograd sees); or None: the kernels where they can run, elsewhere PyTorch operations,
        as one operator. Each has derivatives of every order and mode: the kernels compute results and first gradients,
        and PyTorch operations the others. If you name an implementation that cannot run the input, a
        `NotImplementedError` says why.

    Returns:
      `y` in the shape, dtype and memory format (contiguous or channels last) of `x`. Under autocast on a GPU, `y` is
      float32 from PyTorch 2.12 on, like the result of `torch.nn.functional.rms_norm`. With a residual, `(y, total)`:
      `total` has the dtype of `x + residual`, and the norm is computed from that rounded sum.

    Raises:
      ValueError: shapes or devices disagree, a dtype is not floating point, some tensors are DTensors and others are
        not, `eps` is not a number, is negative or is infinite, or the implementation is unknown.
      TypeError: an argument is unknown or is given twice.
      NotImplementedError: the named implementation cannot run this input.

    Examples:
      >>> import torch
      >>> from torch_bridge import functional
      >>> x, weight = torch.randn(4, 8), torch.ones(8)
      >>> y, total = functional.rms_norm(x, (8,), weight, residual=x)
      >>> torch.allclose(y, torch.nn.functional.rms_norm(2 * x, (8,), weight), atol=1e-6)
      True
      >>> torch.equal(functional.rms_norm(x, weight), functional.rms_norm(x, (8,), weight))
      True
    """
    shape, given = _arguments("rms_norm", ("weight", "eps"), args, kwargs)
    return _norm_over(
        "rms", x, shape, given.get("weight"), given.get("bias"), residual, given.get("eps"), implementation
    )


@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: None = None,
    eps: float = 1e-5, implementation: Implementation = None,
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor,
    eps: float = 1e-5, implementation: Implementation = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, residual: Tensor | None,
    eps: float = 1e-5, implementation: Implementation = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, *, residual: None = None, implementation: Implementation = None,
) -> Tensor: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, *, residual: Tensor, implementation: Implementation = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def layer_norm(
    x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5, *, residual: Tensor | None, implementation: Implementation = None,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
@inherit_descriptions(rms_norm)
def layer_norm(
    x: Tensor, *args: Any, residual: Tensor | None = None, implementation: Implementation = None, **kwargs: Any
) -> Any:
    """Normalizes each row to mean 0 and variance 1 (Ba, Kiros and Hinton, 2016), after adding a residual connection.

        total = x + residual
        y = (total - mean(total)) / sqrt(var(total) + eps) * weight + bias,  var(t) = mean((t - mean(t))^2)

    The norm is computed in float32, or in float64 if `total` is float64.

    Args:
      args: `weight` and `bias`; or, as in `torch.nn.functional.layer_norm`, `normalized_shape`, `weight`, `bias` and
        `eps`. The normalized shape is an int or a sequence of ints, the trailing axes of `x` that are one row; without
        it, a row is the last axis, and N below is its length.
      kwargs: these arguments by name. `weight` and `bias` are `[N]` or `normalized_shape`, in any floating-point dtype,
        or None for ones and zeros. `eps`, 1e-5 by default, is added to the variance.

    Returns:
      `y`, or `(y, total)` if there is a residual; `y` is contiguous. Under autocast on a GPU, `y` is float32.

    Examples:
      >>> import torch
      >>> from torch_bridge import functional
      >>> x, weight, bias = torch.randn(4, 8), torch.ones(8), torch.zeros(8)
      >>> y = functional.layer_norm(x, (8,), weight, bias)
      >>> torch.allclose(y, torch.nn.functional.layer_norm(x, (8,), weight, bias), atol=1e-6)
      True
    """
    shape, given = _arguments("layer_norm", ("weight", "bias", "eps"), args, kwargs)
    return _norm_over(
        "layer", x, shape, given.get("weight"), given.get("bias"), residual, given.get("eps", 1e-5), implementation
    )


def _arguments(
    function: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[int, ...] | None, dict[str, Any]]:
    """Returns the normalized shape, None if it is not given, and the other arguments by name.

    `names` are those that PyTorch's function takes by position after a normalized shape.
    """
    given = {name: x for name, x in kwargs.items() if name != "normalized_shape"}
    shape: Any = kwargs.get("normalized_shape")
    if shape is None and args and isinstance(args[0], (int, torch.SymInt, Sequence)):
        shape, args = args[0], args[1:]
    elif shape is None:
        names = ("weight", "bias")
    if len(args) > len(names):
        raise TypeError(f"{function} takes {', '.join(names)} by position after its first arguments, got {len(args)}")
    for name, x in zip(names, args, strict=False):
        if name in given:
            raise TypeError(f"{function} got several values for {name}")
        given[name] = x
    if unknown := given.keys() - {"weight", "bias", "eps"}:
        raise TypeError(f"{function} has no argument {', '.join(sorted(unknown))}")
    for name in ("weight", "bias"):
        check_tensor(name, given.get(name))
    if shape is None:
        return None, given
    return (tuple(shape) if isinstance(shape, Sequence) else (shape,)), given


def _is_channels_last(x: Tensor) -> bool:
    """Whether `x` is dense and in the memory format of channels last, and not in that of contiguous tensors."""
    if x.ndim not in (4, 5) or x.is_contiguous():
        return False
    channels, *spatial = x.shape[1:]
    strides = [channels * math.prod(spatial), 1, *(channels * math.prod(spatial[i + 1 :]) for i in range(len(spatial)))]
    return list(x.stride()) == strides


def _norm_over(
    kind: norm_ops.Kind, x: Tensor, normalized_shape: tuple[int, ...] | None, weight: Tensor | None,
    bias: Tensor | None, residual: Tensor | None, eps: float | None, implementation: Implementation,
) -> Any:  # fmt: skip
    """Normalizes over the axes of a normalized shape, as one row. None stands for the last axis."""
    check_tensor("x", x, optional=False)
    check_tensor("residual", residual)
    axes = 1
    if normalized_shape is not None:
        axes = len(normalized_shape)
        if axes < 1 or tuple(x.shape[-axes:]) != normalized_shape:
            raise ValueError(
                f"x must be [*batch, *normalized_shape] with {normalized_shape} of one axis or more, "
                f"got {tuple(x.shape)}"
            )
        for name, y, shape in (
            ("weight", weight, normalized_shape), ("bias", bias, normalized_shape), ("residual", residual, x.shape)
        ):  # fmt: skip
            if y is not None and tuple(y.shape) != tuple(shape):
                raise ValueError(f"{name} must be {tuple(shape)} for x {tuple(x.shape)}, got {tuple(y.shape)}")

    if is_distributed((x, weight, bias, residual)):
        rows = range(x.ndim - axes)
        shards = Shards(x, rows)
        local_x, local_residual = shards.local("x", x, rows), shards.local("the residual", residual, rows)
        local_weight, local_bias = shards.local("the weight", weight), shards.local("the bias", bias)
        results = _norm_over(
            kind, local_x, normalized_shape, local_weight, local_bias, local_residual, eps, implementation
        )
        return shards.join(results, rows) if residual is None else tuple(shards.join(y, rows) for y in results)

    def flat(y: Tensor | None) -> Any:
        return y if y is None or axes == 1 else y.flatten(-axes)

    def in_format(y: Tensor, keeps: bool) -> Tensor:
        y = y if axes == 1 else y.reshape(x.shape)
        return y.movedim(1, -1).contiguous().movedim(-1, 1) if keeps and _is_channels_last(x) else y

    found = _norm(kind, flat(x), flat(weight), flat(bias), flat(residual), eps, implementation)
    if residual is None:
        return in_format(found, kind == "rms")  # PyTorch's layer_norm returns a contiguous tensor
    y, total = found
    return in_format(y, kind == "rms"), in_format(total, True)


def _tell_choice(
    kind: norm_ops.Kind, tensors: Sequence[Tensor], implementation: Implementation, reason: str | None
) -> None:  # fmt: skip
    """Tells the choice of a norm, given its tensors, of which the first has the rows, and the reason if it is known."""
    x, unavailable = tensors[0], norm_ops.unsupported(tensors, recording.profile())
    if reason is not None:
        recording.record(f"{kind}_norm", recording.describe_tensor("x", x), "torch", reason, unavailable)
        return
    launches = norm_ops.should_launch_kernels(implementation, *tensors)
    chosen = recording.explain_choice(implementation, launches, unavailable, x.device, x.numel() == 0)
    recording.record(f"{kind}_norm", recording.describe_tensor("x", x), *chosen, unavailable)


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
    if eps is not None or kind == "layer":
        check_number(f"eps of {kind}_norm", eps)
    if eps is not None:
        check_epsilon("eps", eps)
    device, dtype = x.device.type, x.dtype
    if device != "cpu" and _AUTOCAST[kind] and dtype != torch.float64 and op_common.is_autocasting(device):
        dtype = torch.float32
    if eps is None:
        total_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        eps = torch.finfo(op_common.accumulation_dtype(total_dtype)).eps
    tensors = [y for y in (x, weight, bias, residual) if y is not None]
    is_recording, runs_torch = recording.is_recording(), implementation == "torch"
    reason: str | None = None
    if not runs_torch and op_common.in_forward_mode():
        norm_ops.should_launch_kernels(implementation, *tensors)  # raises if "triton" cannot run
        runs_torch, reason = True, op_common.FORWARD_MODE
    if is_recording:
        _tell_choice(kind, tensors, implementation, reason)
    if runs_torch:
        normalize = op_common.without_autocast(norm_ops.normalize)
        results = normalize(x, weight, bias, residual, kind=kind, epsilon=eps, dtype=dtype)
        if is_recording:
            recording.end()
        return results.y if residual is None else (results.y, results.total)

    def rows(y: Tensor) -> Tensor:
        return y.reshape(1, math.prod(y.shape[:-1]), y.shape[-1])

    if residual is not None and residual.is_leaf and residual.requires_grad:
        residual = residual.mul(1)  # x receives the same tensor as gradient; two leaves must not share .grad
    w, b = (None if y is None else y[None] for y in (weight, bias))
    sums = None if residual is None else rows(residual)
    y, total = norm_ops.forward(
        norm_ops.ForwardCall(kind, rows(x), w, b, sums, eps, dtype, implementation=implementation)
    )  # fmt: skip
    if is_recording:
        recording.end()
    return y.reshape(x.shape) if residual is None else (y.reshape(x.shape), total.reshape(x.shape))
