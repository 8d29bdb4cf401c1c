"""The modules `RMSNorm` and `LayerNorm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from torch_bridge import functional
from torch_bridge.docstrings import inherit_descriptions
from torch_bridge.functional import Implementation
from torch_bridge.functional.checks import check_implementation, check_tensor
from torch_bridge.nn.recurrent import Device


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, fused with the sum of a residual connection.

    Args:
      normalized_shape: the shape of the trailing axes, or the width of the last one.
      eps: added to the mean square, inside the root; None means the machine epsilon of the dtype.
      elementwise_affine: whether the result is multiplied by a parameter `weight`, of the shape `normalized_shape`.
      device: the device of the parameters.
      dtype: the dtype of the parameters.
      implementation: "triton" (a kernel, which needs an NVIDIA GPU), "torch" (PyTorch operations), or None: the kernel
        where it can run. A call raises NotImplementedError if the named one cannot run the input.

    Raises:
      ValueError: the implementation is unknown.

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import RMSNorm
      >>> norm, x, residual = RMSNorm(8), torch.randn(4, 8), torch.randn(4, 8)
      >>> y, total = norm(x, residual)
      >>> torch.equal(total, x + residual), torch.allclose(y, torch.nn.RMSNorm(8)(total), atol=1e-5)
      (True, True)
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        implementation: Implementation = None,
    ) -> None:
        shape: Any = normalized_shape
        super().__init__(shape, eps, elementwise_affine, device=device, dtype=dtype)
        check_implementation(implementation)
        self.implementation = implementation

    if TYPE_CHECKING:  # torch.nn.Module declares that a call returns anything

        @overload
        def __call__(self, x: Tensor, residual: None = None) -> Tensor: ...

        @overload
        def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

        @overload
        def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Normalizes over the trailing axes.

        Args:
          x: `[*batch, *normalized_shape]`, floating point.
          residual: added to `x` before the norm, in the shape of `x`; or None.

        Returns:
          The result of `torch.nn.RMSNorm`, channels last if `x` is; with a residual,
          `(norm of x + residual, x + residual)`.

        Raises:
          ValueError: shapes or devices disagree, or a dtype is not floating point.
          NotImplementedError: the named implementation cannot run this input; the message says why.
        """
        return _normalize(functional.rms_norm, self, x, residual, self.weight, None)


@inherit_descriptions(RMSNorm)
class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, fused with the sum of a residual connection.

    Args:
      eps: added to the variance, inside the root.
      bias: whether a parameter `bias` of that shape is added to the result, if `elementwise_affine`.

    Examples:
      >>> import torch
      >>> from torch_bridge.nn import LayerNorm
      >>> norm, x, residual = LayerNorm(8), torch.randn(4, 8), torch.randn(4, 8)
      >>> y, total = norm(x, residual)
      >>> torch.equal(total, x + residual), torch.allclose(y, torch.nn.LayerNorm(8)(total), atol=1e-5)
      (True, True)
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        implementation: Implementation = None,
    ) -> None:
        shape: Any = normalized_shape
        super().__init__(shape, eps, elementwise_affine, bias, device=device, dtype=dtype)
        check_implementation(implementation)
        self.implementation = implementation

    if TYPE_CHECKING:  # torch.nn.Module declares that a call returns anything

        @overload
        def __call__(self, input: Tensor, residual: None = None) -> Tensor: ...

        @overload
        def __call__(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

        @overload
        def __call__(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...  # noqa: D102

    @overload
    def forward(self, input: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]: ...

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """Normalizes over the trailing axes.

        Args:
          input: `[*batch, *normalized_shape]`, floating point.
          residual: added to `input` before the norm, in the shape of `input`; or None.

        Returns:
          The result of `torch.nn.LayerNorm`; with a residual, `(norm of input + residual, input + residual)`.

        Raises:
          ValueError: shapes or devices disagree, or a dtype is not floating point.
          NotImplementedError: the named implementation cannot run this input; the message says why.
        """
        return _normalize(functional.layer_norm, self, input, residual, self.weight, self.bias)


def _normalize(
    norm: Any, module: RMSNorm | LayerNorm, x: Tensor, residual: Tensor | None, weight: Tensor | None,
    bias: Tensor | None,
) -> Any:  # fmt: skip
    check_tensor("x", x, optional=False)
    check_tensor("residual", residual)
    shape = tuple(module.normalized_shape)
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"x must be [*batch, *normalized_shape] with {shape}, got {tuple(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"the residual must be {tuple(x.shape)}, the shape of x, got {tuple(residual.shape)}")

    return norm(
        x, shape, weight, bias=bias, residual=residual, eps=module.eps, implementation=module.implementation
    )  # fmt: skip
