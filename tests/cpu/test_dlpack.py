"""Tests the views that `torch_bridge.dlpack` makes of arrays of other frameworks, without PyTorch and Triton."""

import ctypes

import numpy as np

from torch_bridge import dlpack


def test_prototypes_of_other_libraries_change_nothing(monkeypatch):
    """Other libraries set the argument types of `ctypes.pythonapi.PyCapsule_GetPointer`, and expect their own."""
    shared = ctypes.pythonapi.PyCapsule_GetPointer
    assert dlpack._get_pointer is not shared
    monkeypatch.setattr(shared, "argtypes", [ctypes.c_int])
    monkeypatch.setattr(shared, "restype", ctypes.c_int)
    array = np.arange(24, dtype=np.float32)
    assert dlpack.view(array[2:]) == dlpack.View(array.ctypes.data + 8, dlpack.CPU, 0)
    assert (shared.argtypes, shared.restype) == ([ctypes.c_int], ctypes.c_int)
