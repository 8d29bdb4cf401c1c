"""The choice of what an operator runs: whether a kernel, and the precision of its products."""

from __future__ import annotations

import functools
from typing import get_args

import torch
from torch import Tensor

from torch_bridge import availability, rules, tiling

# None follows `torch.backends.cuda.matmul`.
Precision = rules.Precision | None

PRECISIONS: tuple[str, ...] = get_args(rules.Precision)


@availability.cached_reason
def _unsupported(profile: tiling.Device | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """Returns why the kernels cannot run with weights of this dtype; see `availability.unavailable`."""
    if reason := availability.unavailable(profile, device, dtype):
        return reason
    if availability.device_facts(profile, device).interpreted and dtype == torch.bfloat16:
        return "computes bfloat16 products wrongly in Triton's interpreter: use float32 or float16 there"
    return None


def unsupported(w_hh: Tensor, profile: tiling.Device | None = None) -> str | None:
    """Returns why the kernels cannot run with these recurrent weights, or None if they can."""
    if reason := _unsupported(profile, w_hh.device, w_hh.dtype):
        return reason
    # compared and not a key of the cache: a compiler would specialize on it
    facts, hidden = availability.device_facts(profile, w_hh.device), w_hh.shape[-1]
    if hidden > tiling.max_hidden(facts):
        return (
            f"is limited by the device: a hidden width of {hidden} is more than its {facts.multiprocessors} SMs can "
            f"share ({tiling.max_hidden(facts)}); leave implementation out"
        )
    return None


def should_launch_kernels(implementation: str | None, w_hh: Tensor) -> bool:
    """Returns whether an operator launches a kernel; if not, it runs the loop in PyTorch operations.

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: `implementation` is "triton" and the kernels cannot run.
    """
    if implementation not in (None, "triton", "loop"):
        raise ValueError(f'implementation of an operator must be "triton", "loop" or None, got {implementation!r}')
    return availability.should_launch_kernels(
        implementation, w_hh.device, functools.partial(unsupported, w_hh)
    )  # fmt: skip


def _matmul_precision() -> str:
    """Returns PyTorch's setting for float32 products on a GPU: "tf32", or the name of another precision."""
    return str(torch.backends.cuda.matmul.fp32_precision)


# Sets the attribute that torch.compiler.assume_constant_result sets, without importing the compiler, which takes a
# second. torch.compile recompiles when PyTorch's setting changes.
_matmul_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernel_precision(precision: Precision, hidden: int) -> str:
    """Returns the precision of float32 products in a kernel, by Triton's name.

    None follows `torch.backends.cuda.matmul`: "tf32" if that setting allows it and H is above 32, else "tf32x3". If a
    compiler leaves H open, "tf32" if the setting allows it.

    Raises:
      ValueError: the precision is unknown.
    """
    if precision is None:
        allowed = _matmul_precision() == "tf32"
        if allowed and torch.compiler.is_compiling():
            from torch.fx.experimental.symbolic_shapes import statically_known_true

            # comparing a symbolic width would bind the program to the widths that compare alike
            return "tf32x3" if statically_known_true(hidden <= rules.FULL_PRECISION_WIDTH) else "tf32"
        return rules.kernel_precision(allowed, hidden)
    if precision not in PRECISIONS:
        lower = str(precision).lower()
        meant = {"medium": "tf32", "high": "tf32", "highest": "tf32x3"}.get(lower, lower)
        raise ValueError(
            'precision must be "tf32", "tf32x3" or None (to follow torch.backends.cuda.matmul), got '
            f"{precision!r}" + (f'; did you mean "{meant}"?' if meant in PRECISIONS else "")
        )
    return precision
