"""The GPUs of this process: what kernels on them are chosen by, and whether Triton can load kernels onto them."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from typing import Any

import triton

from torch_bridge import cuda_driver
from torch_bridge.compiler import begin_to_hash_triton
from torch_bridge.tiling import Device

# A failed attempt is repeated after this many seconds, not on every call: it may run the C compiler for a second.
RETRY_SECONDS = 10.0


class DriverCheck:
    """Finds out whether Triton can load kernels in this process. Success is remembered for the life of the process.

    A failure is remembered for `RETRY_SECONDS`, because its cause may pass: a full disk, or a GPU out of memory.
    """

    def __init__(self) -> None:
        self._works = False
        self._failure: tuple[float, str] | None = None

    def __call__(self) -> str | None:
        """Returns why Triton cannot load kernels in this process, or None if it can.

        Before its first load, Triton compiles a C module, which can fail.
        """
        if self._works:
            return None
        if self._failure is not None and time.monotonic() < self._failure[0] + RETRY_SECONDS:
            return self._failure[1]
        begin_to_hash_triton()
        try:
            triton.runtime.driver.active.utils  # noqa: B018
        except Exception as error:  # a broken compiler, header or driver raises errors of many types
            reason = f"{type(error).__name__}: {error}"
            self._failure = time.monotonic(), reason
            return reason
        self._works = True
        return None


driver_fails = DriverCheck()


# The GPU that kernels are chosen and compiled for instead of the actual one; see `run_as`.
_profile: Device | None = None


def device(ordinal: int = 0) -> Device:
    """Returns the properties by which kernels on a CUDA device are chosen: its own, or the profile set by `run_as`."""
    here = cuda_driver.device(ordinal)
    if _profile is None:
        return here
    clusters = here.clusters if _profile.clusters else ()
    return dataclasses.replace(_profile, name=f"{_profile.name} on {here.name}", clusters=clusters)


def profile() -> Device | None:
    """Returns the GPU that `run_as` set, or None: kernels are chosen for the actual GPU."""
    return _profile


def binary_capability(capability: int) -> int:
    """Returns the compute capability that kernels compiled for another one are assembled for; see `run_as`."""
    return capability if _profile is None else cuda_driver.device(0).capability


def run_as(profile: Device) -> None:
    """Makes later launches choose kernels for another GPU, compile them to its PTX and assemble that for this GPU.

    Benchmarks and tests use this to run the code for an absent GPU on other hardware. PTX for an older capability runs
    on a newer GPU, not the other way round. Call this function before anything is traced. Compiled code goes to a
    separate folder in Triton's cache. Triton passes that folder to new processes through the environment, but not the
    profile: a new process that compiles kernels calls this function, too.

    Raises:
      ValueError: this GPU has a lower capability than the profile.
    """
    global _profile
    here = cuda_driver.device(0)
    capability = here.capability
    if profile.capability > capability:
        raise ValueError(
            f"code for {profile.name} (compute capability {profile.capability / 10}) does not run on {here.name} "
            f"({capability / 10}): choose a profile of at most {capability / 10}"
        )

    def assemble_for_this_gpu(backend: Any = None, stages: Any = None, options: Any = None, *_: Any) -> Any:
        if stages is None:  # Triton 3.7 and newer ask what to add to their cache key
            return (f"assembled for sm_{capability}",) * 2
        stages["cubin"] = lambda ptx, metadata: backend.make_cubin(ptx, metadata, options, capability)
        return None

    triton.knobs.runtime.add_stages_inspection_hook = assemble_for_this_gpu
    folder = f"assembled-for-sm_{capability}"
    if os.path.basename(triton.knobs.cache.dir) != folder:
        triton.knobs.cache.dir = os.path.join(triton.knobs.cache.dir, folder)
    _profile = profile


@functools.cache
def can_capture_early_launches() -> bool:
    """Whether CUDA graphs can capture programmatic dependent launches, which takes a driver of CUDA 12.3 or newer."""
    version = cuda_driver.version()
    return version is None or version >= 12030  # without a driver, kernels are compiled for another machine
