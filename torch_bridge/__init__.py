"""Recurrent cells with episode resets, RMSNorm and LayerNorm, in Triton kernels. This package never imports jax.

`torch_bridge.nn` contains the modules, and `torch_bridge.functional` contains the functions. Importing either registers
the operators, `torch.ops.torch_bridge`.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_bridge import functional, nn

__all__ = ["functional", "nn"]


def __getattr__(name: str) -> ModuleType:
    """Imports `torch_bridge.nn` and `torch_bridge.functional` on first use, as importing PyTorch takes a second."""
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
