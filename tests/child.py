"""The environment of Python processes that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment(**changes):
    """Returns this process's environment, changed so that this checkout's packages and test modules are found."""
    folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | changes
