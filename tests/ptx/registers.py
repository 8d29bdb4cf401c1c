"""The types of PTX: their sizes, and the NumPy dtypes in which the emulator computes.

A register of a program is an array `[threads]`, an unsigned integer of the register's size, or bool for a predicate.
"""

from __future__ import annotations

import numpy as np

UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
SIGNED = {size: np.dtype(f"i{size}") for size in (1, 2, 4, 8)}

SIZES = {"pred": 1, "f16": 2, "bf16": 2, "f32": 4, "tf32": 4, "f16x2": 4, "bf16x2": 4}
SIZES |= {f"{kind}{8 * size}": size for kind in "ubs" for size in (1, 2, 4, 8)}
# NumPy has no bfloat16, and pairs of values are packed: both stay unsigned integers.
DTYPES = {name: UNSIGNED[size] for name, size in SIZES.items()}
DTYPES |= {f"s{8 * size}": SIGNED[size] for size in (1, 2, 4, 8)}
DTYPES |= {"pred": np.dtype(bool), "f16": np.dtype("f2"), "f32": np.dtype("f4"), "tf32": np.dtype("f4")}


def is_integer(name: str) -> bool:
    """Returns whether the type is an integer or a number of bits."""
    return name[0] in "ubs" and name[1:].isdigit()
