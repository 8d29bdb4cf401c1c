"""The modules `RMSNorm` and `LayerNorm`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_bridge import functional
from torch_bridge.functional.checks import Implementation, check_implementation


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, fused with the sum of a residual connection.

    Args:
      args: the arguments of `torch.nn.RMSNorm`, by position or name: `normalized_shape`, `eps=None`,
        `elementwise_affine=True`, `device`, `dtype`.
      implementation: see `torch_bridge.functional.rms_norm`.
      kwargs: see `args`.

    Raises:
      ValueError: the implementation is unknown.

    Example:
      >>> import torch
      >>> from torch_bridge.nn import RMSNorm
      >>> norm, x, residual = RMSNorm(8), torch.randn(4, 8), torch.randn(4, 8)
      >>> y, total = norm(x, residual)
      >>> torch.equal(total, x + residual), torch.allclose(y, torch.nn.RMSNorm(8)(total), atol=1e-5)
      (True, True)
    """

    def __init__(self, *args: Any, implementation: Implementation = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_implementation(implementation)
        self.implementation = implementation

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
          NotImplementedError: see `torch_bridge.functional.rms_norm`.
        """
        return _normalize(functional.rms_norm, self, x, residual, self.weight, None)


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, fused with the sum of a residual connection.

    Args:
      args: the arguments of `torch.nn.LayerNorm`, by position or name: `normalized_shape`, `eps=1e-5`,
        `elementwise_affine=True`, `bias=True`, `device`, `dtype`.
      implementation: see `torch_bridge.functional.rms_norm`.
      kwargs: see `args`.

    Raises:
      ValueError: the implementation is unknown.

    Example:
      >>> import torch
      >>> from torch_bridge.nn import LayerNorm
      >>> norm, x, residual = LayerNorm(8), torch.randn(4, 8), torch.randn(4, 8)
      >>> y, total = norm(x, residual)
      >>> torch.equal(total, x + residual), torch.allclose(y, torch.nn.LayerNorm(8)(total), atol=1e-5)
      (True, True)
    """

    def __init__(self, *args: Any, implementation: Implementation = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_implementation(implementation)
        self.implementation = implementation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        """Normalizes over the trailing axes.

        Args:
          input: `[*batch, *normalized_shape]`, floating point.
          residual: added to `input` before the norm, in the shape of `input`; or None.

        Returns:
          The result of `torch.nn.LayerNorm`; with a residual, `(norm of input + residual, input + residual)`.

        Raises:
          ValueError: shapes or devices disagree, or a dtype is not floating point.
          NotImplementedError: see `torch_bridge.functional.layer_norm`.
        """
        return _normalize(functional.layer_norm, self, input, residual, self.weight, self.bias)


def _normalize(
    norm: Any, module: RMSNorm | LayerNorm, x: Tensor, residual: Tensor | None, weight: Tensor | None,
    bias: Tensor | None,
) -> Any:  # fmt: skip
    shape = tuple(module.normalized_shape)
    if tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"x must be [*batch, *normalized_shape] with {shape}, got {tuple(x.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"the residual must be {tuple(x.shape)}, the shape of x, got {tuple(residual.shape)}")

    return norm(
        x, shape, weight, bias=bias, residual=residual, eps=module.eps, implementation=module.implementation
    )  # fmt: skip
