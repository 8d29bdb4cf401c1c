"""Reads the version of NVIDIA's driver and the attributes of GPUs, and sets the attributes of kernels.

PyTorch is not needed.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from torch_bridge.tiling import Device

# Numbers of `CUfunction_attribute` in cuda.h.
_MAX_DYNAMIC_SHARED_SIZE, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
# Numbers of `CUdevice_attribute` in cuda.h.
_MULTIPROCESSORS, _THREADS_PER_MULTIPROCESSOR, _MAJOR, _MINOR, _SHARED_MEMORY_OPTIN = 16, 39, 75, 76, 97


class DriverError(RuntimeError):
    """NVIDIA's driver is missing, or a call of it failed; the message names both."""


def version() -> int | None:
    """Returns the newest version of CUDA that the driver runs, 1000 times the major plus 10 times the minor version.

    Returns None if there is no driver.
    """
    if _library() is None:
        return None
    found = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(found))
    return found.value


@functools.cache
def device(ordinal: int) -> Device:
    """Returns the properties of the GPU with this ordinal among those that `CUDA_VISIBLE_DEVICES` shows.

    Raises:
      DriverError: there is no driver, or no such GPU.
    """
    _call("cuInit", 0)
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    _call("cuDeviceGet", ctypes.byref(handle), ordinal)
    _call("cuDeviceGetName", name, len(name), handle)

    def attribute(number: int) -> int:
        found = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(found), number, handle)
        return found.value

    return Device(
        attribute(_MAJOR) * 10 + attribute(_MINOR),
        attribute(_MULTIPROCESSORS),
        attribute(_SHARED_MEMORY_OPTIN),
        attribute(_THREADS_PER_MULTIPROCESSOR),
        name=name.value.decode(),
    )


def allow_clusters(function: int, shared_memory: int, ordinal: int) -> None:
    """Lets a kernel run in clusters of up to 16 programs, each with so many bytes of dynamic shared memory.

    The kernel, `function`, is loaded onto the GPU `ordinal`.

    More than 8 programs need the driver's permission, for which Triton's launcher asks with 16 only. Its loader asks
    for dynamic shared memory beyond 48 KB, but not for less that exceeds 48 KB together with the static one.

    Raises:
      DriverError: a program may not have as much shared memory.
    """
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(handle), ordinal)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)  # this thread may have no context
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            _call("cuFuncSetAttribute", ctypes.c_void_p(function), _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
            _call("cuFuncSetAttribute", ctypes.c_void_p(function), _MAX_DYNAMIC_SHARED_SIZE, shared_memory)
        finally:
            _call("cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        _call("cuDevicePrimaryCtxRelease_v2", handle)


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    if library is None:
        raise DriverError("there is no libcuda.so.1, which NVIDIA's driver installs: install the driver")
    if status := getattr(library, name)(*arguments):
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{name} failed: {(text.value or b'').decode() or status}")
