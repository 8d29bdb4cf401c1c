"""Integer arithmetic of tilings and grids."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """Returns `a / b`, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Returns the smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
