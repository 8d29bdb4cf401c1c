"""Recurrent cells with episode resets, RMSNorm and LayerNorm, in Triton kernels. This package never imports jax.

`torch_bridge.nn` contains the modules, and `torch_bridge.functional` contains the functions. `torch_bridge.explain`
says which implementation a function runs, and why. Importing this package does not import PyTorch. Once both are
imported, in either order, the operators `torch.ops.torch_bridge` exist, which programs that were saved with them need.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch_bridge.registration  # noqa: F401
from torch_bridge.records import Explanation, ImplementationWarning

if TYPE_CHECKING:
    from torch_bridge import functional, nn
    from torch_bridge.explanation import explain

__all__ = ["Explanation", "ImplementationWarning", "explain", "functional", "nn"]


def __getattr__(name: str) -> Any:
    """Imports what needs PyTorch on first use, as importing PyTorch takes a second."""
    if name in ("functional", "nn"):
        return importlib.import_module(f"{__name__}.{name}")
    if name == "explain":
        importlib.import_module(f"{__name__}._require_torch")
        return importlib.import_module(f"{__name__}.explanation").explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
