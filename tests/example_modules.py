"""Imports the programs in `examples/` as modules, which several test files call."""

import importlib.util
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.append(str(EXAMPLES))  # as for a program that is run from there: examples import what they share


def load(name):
    """Returns `examples/<name>.py`, imported anew as the module `name`."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
