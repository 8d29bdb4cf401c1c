"""Zero-copy views of arrays that another framework owns, through the DLPack protocol alone."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

CPU, CUDA = 1, 2


class _DLTensor(ctypes.Structure):
    """The struct `DLTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# A prototype of its own: `ctypes.pythonapi.PyCapsule_GetPointer` is one object for the whole process, and other
# libraries set its argument types too.
_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


@dataclass(frozen=True)
class View:
    """The address, device type (`CPU` or `CUDA`) and device ordinal of an array, valid as long as its owner lives."""

    address: int
    device_type: int
    device_id: int


def view(array: Any) -> View:
    """Returns where `array`, which must have `__dlpack__`, lies in memory. Copies nothing and waits for no stream."""
    capsule = array.__dlpack__()
    tensor = _DLTensor.from_address(_get_pointer(capsule, b"dltensor"))
    return View((tensor.data or 0) + tensor.byte_offset, tensor.device_type, tensor.device_id)
