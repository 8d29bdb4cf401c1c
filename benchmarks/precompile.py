"""Compiles kernels into Triton's cache on disk, in processes side by side, before anything is timed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def _run_as(profile: Any) -> None:
    if profile is not None:
        from torch_bridge import gpu

        gpu.run_as(profile)


def _compile(launch: Any, arguments: tuple[Any, ...]) -> None:
    made = launch(*arguments)
    with contextlib.suppress(Exception):
        made.compile()


def compile_kernels(launch: Any, arguments: Sequence[tuple[Any, ...]]) -> None:
    """Compiles `launch(*each)` for each of `arguments`, in other processes, which choose as this one does.

    A kernel that does not compile is no error here, because it fails again when it is loaded. A launch that cannot be
    made is an error.

    Args:
      launch: a class of launches, such as `torch_bridge.recurrences.Launch`.
      arguments: what the class is called with.
    """
    from torch_bridge import gpu

    spawn = multiprocessing.get_context("spawn")
    workers = max(min(len(os.sched_getaffinity(0)), len(arguments)), 1)
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, _run_as, (gpu.profile(),)) as pool:
        futures = [pool.submit(_compile, launch, each) for each in arguments]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
