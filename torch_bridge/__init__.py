"""GRU and LSTM with episode resets, RMSNorm and LayerNorm, in Triton kernels. Never imports jax.

`torch_bridge.nn` has the modules, `torch_bridge.functional` the functions; importing either registers the operators,
`torch.ops.torch_bridge`.
"""

import importlib
from types import ModuleType

__all__ = ["functional", "nn"]


def __getattr__(name: str) -> ModuleType:
    """Imports `torch_bridge.nn` and `torch_bridge.functional` when they are asked for: PyTorch takes a second."""
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
