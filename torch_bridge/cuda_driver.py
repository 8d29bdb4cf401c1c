"""Reads the version of NVIDIA's driver and the attributes of GPUs, and sets the attributes of kernels.

PyTorch is not needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

from torch_bridge.tiling import Device

logger = logging.getLogger("torch_bridge")

# Numbers of `CUfunction_attribute` in cuda.h.
_MAX_DYNAMIC_SHARED_SIZE, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 8, 14
# The number of `CUlaunchAttributeID` for the size of clusters in cuda.h.
_CLUSTER_DIMENSION = 4
# The number of the least strict `CUstreamCaptureMode` in cuda.h.
_RELAXED_CAPTURE = 2
# Numbers of `CUdevice_attribute` in cuda.h.
_MULTIPROCESSORS, _THREADS_PER_MULTIPROCESSOR, _MAJOR, _MINOR, _SHARED_MEMORY_OPTIN = 16, 39, 75, 76, 97
# Clusters exist from compute capability 9.0 on. They have at most this number of programs.
_CLUSTERS_SINCE, _LARGEST_CLUSTER = 90, 16
# The numbers of CUDA_ERROR_INVALID_VALUE and CUDA_ERROR_INVALID_CLUSTER_SIZE in cuda.h.
_NO_SUCH_CLUSTER = 1, 912
_EMPTY_KERNEL = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry empty() { ret; }\0"


class _LaunchAttribute(ctypes.Structure):
    """`CUlaunchAttribute` in cuda.h: its value is a union of 64 bytes, of which the size of clusters takes three."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _LaunchConfig(ctypes.Structure):
    """`CUlaunchConfig` in cuda.h."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class DriverError(RuntimeError):
    """NVIDIA's driver is missing, or a call of it failed; the message names both.

    Attributes:
      status: the number of the driver's error, or 0 if the driver or one of its functions is missing.
    """

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


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

    here = Device(
        attribute(_MAJOR) * 10 + attribute(_MINOR),
        attribute(_MULTIPROCESSORS),
        attribute(_SHARED_MEMORY_OPTIN),
        attribute(_THREADS_PER_MULTIPROCESSOR),
        name=name.value.decode(),
    )
    if here.capability < _CLUSTERS_SINCE:
        return here
    try:
        return dataclasses.replace(here, clusters=_clusters(ordinal, here.shared_memory))
    except DriverError as error:
        logger.warning("kernels do not run in clusters on %s in this process, which costs time: %s", here.name, error)
        return here


def _clusters(ordinal: int, shared_memory: int) -> tuple[int, ...]:
    """Returns `Device.clusters`, for programs with so many bytes of shared memory.

    The SMs of a cluster belong to one GPC, and GPUs of one kind differ in how many SMs their GPCs have. The query takes
    0.3 ms, and 9 ms if the driver compiles the empty kernel for the first time (H200).
    """
    with _primary_context(ordinal), _during_captures():
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), _EMPTY_KERNEL)
        try:
            _call("cuModuleGetFunction", ctypes.byref(function), module, b"empty")
            _allow_clusters(function, shared_memory)
            sizes = range(1, _LARGEST_CLUSTER + 1)
            return 0, *(_active_clusters(function, programs, shared_memory) for programs in sizes)
        finally:
            _call("cuModuleUnload", module)


def _active_clusters(function: ctypes.c_void_p, programs: int, shared_memory: int) -> int:
    attribute = _LaunchAttribute(_CLUSTER_DIMENSION, 0, (programs, 1, 1))
    config = _LaunchConfig((programs, 1, 1), (32, 1, 1), shared_memory, None, ctypes.pointer(attribute), 1)
    found = ctypes.c_int()
    try:
        _call("cuOccupancyMaxActiveClusters", ctypes.byref(found), function, ctypes.byref(config))
    except DriverError as error:
        if error.status in _NO_SUCH_CLUSTER:
            return 0
        raise
    return found.value


def allow_clusters(function: int, shared_memory: int, ordinal: int) -> None:
    """Lets a kernel run in clusters of up to 16 programs, each with so many bytes of dynamic shared memory.

    The kernel, `function`, is loaded onto the GPU `ordinal`.

    More than 8 programs need the driver's permission, for which Triton's launcher asks with 16 only. Its loader asks
    for dynamic shared memory beyond 48 KB, but not for less that exceeds 48 KB together with the static one.

    Raises:
      DriverError: a program may not have as much shared memory.
    """
    with _primary_context(ordinal):
        _allow_clusters(ctypes.c_void_p(function), shared_memory)


def _allow_clusters(function: ctypes.c_void_p, shared_memory: int) -> None:
    _call("cuFuncSetAttribute", function, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
    _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_SIZE, shared_memory)


@contextlib.contextmanager
def _during_captures() -> Iterator[None]:
    """Allows this thread to load a module while a CUDA graph is captured, which would else end the capture."""
    mode = ctypes.c_int(_RELAXED_CAPTURE)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


@contextlib.contextmanager
def _primary_context(ordinal: int) -> Iterator[None]:
    """Makes the primary context of a GPU that of this thread, which may have none."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(handle), ordinal)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    try:
        _call("cuCtxPushCurrent_v2", context)
        try:
            yield
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
    function = getattr(library, name, None)
    if function is None:
        raise DriverError(f"NVIDIA's driver has no {name}: install a newer one")
    if status := function(*arguments):
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise DriverError(f"{name} failed: {(text.value or b'').decode() or status}", status)
