"""Imports Triton so that Ctrl-C leaves it whole.

Python raises KeyboardInterrupt in the main thread, also within an import. The modules that were imported by then stay,
but the package that was importing them does not get them as attributes again, so no later import repairs it. Another
thread is never interrupted: Ctrl-C only ends the wait for it. Modules of this package do not need it: they import one
another by `from`, which finds what is already there.
"""

from __future__ import annotations

import importlib
import threading
from concurrent.futures import Future


def import_triton() -> None:
    """Imports the modules of this package that import Triton, in another thread.

    Raises:
      ImportError: Triton is not installed, or lacks what the kernels use.
      AttributeError: the same.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            for name in ("gpu", "compiler"):
                importlib.import_module(f"torch_bridge.{name}")
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    try:
        threading.Thread(target=run, name="torch_bridge-import", daemon=False).start()
    except RuntimeError:  # no thread can be started after the main thread has ended
        run()
    done.result()
