"""Registers the operators once both this package and PyTorch are imported, without importing PyTorch itself."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

logger = logging.getLogger("torch_bridge")


class _Finder:
    """Finds modules as the other finders do, and calls the functions that wait for one after its code has run.

    Attributes:
      waiting: functions by the name of the module that they wait for.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module that a function waits for, and None for others: the next finder finds them."""
        if name not in self.waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for function in self.waiting.pop(name, ()):
                _call(function, name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # the loader is of this spec alone
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)


def _call(function: Callable[[], None], name: str) -> None:
    """Calls a function that needs a module, whose import must succeed even if the function fails: that is logged."""
    try:
        function()
    except Exception:
        logger.warning("torch_bridge cannot register its operators with this version of %s", name, exc_info=True)


def call_after_import(name: str, function: Callable[[], None]) -> None:
    """Calls a function once a module is imported: now if it is, else at the end of its import; logs its errors."""
    if sys.modules.get(name) is not None:
        _call(function, name)
    else:
        _finder.waiting.setdefault(name, []).append(function)


# The modules that define the operators, and what these import.
_OPERATORS = ("torch_bridge.rnn_ops", "torch_bridge.norm_ops")
_PARTS = tuple(
    f"torch_bridge.{name}" for name in ("calls", "recording", "availability", "op_common", "steps", "torch_loop")
)


def _register_operators() -> None:
    """Imports the modules that define the operators, unless PyTorch is older than they support.

    It does nothing either if one of their parts is what imports PyTorch, since they cannot be imported before it.
    """
    torch: Any = importlib.import_module("torch")
    if torch.__version__ < "2.10.dev0" or any(name in sys.modules for name in (*_OPERATORS, *_PARTS)):
        return
    for name in _OPERATORS:
        importlib.import_module(name)


call_after_import("torch", _register_operators)
