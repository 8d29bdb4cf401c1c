"""Compiles kernels into Triton's cache on disk, in processes side by side, before anything is timed."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _run_as(profile: Any) -> None:
    if profile is not None:
        from torch_bridge import gpu

        gpu.run_as(profile)


def compile_kernels(compile_one: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Calls `compile_one(*arguments)` for each of `arguments`, in other processes, which choose as this one does.

    Errors are ignored, because a kernel that does not compile fails again when it is loaded.
    """
    from torch_bridge import gpu

    spawn = multiprocessing.get_context("spawn")
    workers = max(min(len(os.sched_getaffinity(0)), len(arguments)), 1)
    with concurrent.futures.ProcessPoolExecutor(workers, spawn, _run_as, (gpu.profile(),)) as pool:
        concurrent.futures.wait([pool.submit(compile_one, *each) for each in arguments])
