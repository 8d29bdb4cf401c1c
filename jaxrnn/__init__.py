"""Exact GRU and LSTM for recurrent reinforcement learning in JAX: one launch runs the whole time loop and its resets.

`mgu` and `simple_rnn` run smaller cells in the same way. `rms_norm` and `layer_norm` are norms for the layers around a
recurrence. `explain` says which implementation a program runs and why, and `default_implementation` sets it.

`jaxrnn.linen` and `jaxrnn.nnx` contain the modules for Flax, and `jaxrnn.convert` converts weights. They are imported
on first use, because the functions do not need Flax.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

try:
    import jax as _jax  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError(
        "jaxrnn needs JAX, which is not installed: pip install '.[jax]' in a checkout of jaxrnn, or '.[cuda13]' for a "
        "GPU. PyTorch users import torch_bridge, which does not need JAX.",
        name="jax",
    ) from error

from jaxrnn._bridge import LaunchMethod, launch_method, register_native_launch
from jaxrnn.api import gru, lstm, mgu, norm_gru, simple_rnn
from jaxrnn.cells import GRUParams, LSTMParams, MGUParams, NormGRUParams, SimpleParams
from jaxrnn.choice import ImplementationWarning
from jaxrnn.context import default_implementation
from jaxrnn.explanation import Explanation, explain
from jaxrnn.norms import layer_norm, rms_norm

if TYPE_CHECKING:
    from jaxrnn import convert, linen, nnx

__version__ = "0.1.0"

__all__ = [
    "Explanation", "GRUParams", "ImplementationWarning", "LSTMParams", "LaunchMethod", "MGUParams", "NormGRUParams",
    "SimpleParams", "convert", "default_implementation", "explain", "gru", "launch_method", "layer_norm", "linen",
    "lstm", "mgu", "nnx", "norm_gru", "register_native_launch", "rms_norm", "simple_rnn",
]  # fmt: skip

_IMPORTED_ON_FIRST_USE = ("convert", "linen", "nnx")


def __getattr__(name: str) -> ModuleType:
    if name in _IMPORTED_ON_FIRST_USE:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
