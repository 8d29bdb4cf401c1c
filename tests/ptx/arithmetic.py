"""Functions that compute single instructions for each thread, on arrays `[threads]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def shift_left(a: NDArray, count: NDArray) -> NDArray:
    """Returns a << count, which is 0 if the count is not less than the number of bits."""
    bits = a.dtype.itemsize * 8
    return np.where(count < bits, a << np.minimum(count, bits - 1).astype(a.dtype), a.dtype.type(0))


def shift_right(a: NDArray, count: NDArray) -> NDArray:
    """Returns a >> count; larger counts than the number of bits leave zeros, or the sign of a signed integer."""
    bits = a.dtype.itemsize * 8
    shifted = a >> np.minimum(count, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(count < bits, shifted, a.dtype.type(0))


def funnel_shift_left(low: NDArray, high: NDArray, count: NDArray) -> NDArray:
    """Returns the high 32 bits of the 64 in `high` and `low` after a shift to the left by the count modulo 32."""
    both = (high.astype("u8") << np.uint64(32)) | low
    return ((both << (count & np.uint32(31)).astype("u8")) >> np.uint64(32)).astype("u4")


def divide(a: NDArray, b: NDArray) -> NDArray:
    """Returns a / b, rounded towards zero. Division by zero sets all bits."""
    divisor = np.where(b == 0, 1, b).astype(a.dtype)
    quotient = a // divisor
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * divisor != a)).astype(a.dtype)
    return np.where(b == 0, ~a.dtype.type(0), quotient)


def extract_bits(a: NDArray, position: NDArray, length: NDArray) -> NDArray:
    """Returns `length` bits of 32 from `position` on, extended by their sign if a is signed."""
    position, length = (x.astype("i8") & 0xFF for x in (position, length))
    bits = a.astype("i8") & 0xFFFFFFFF
    field = np.where(position < 32, bits >> np.minimum(position, 63), 0) & ((1 << np.minimum(length, 32)) - 1)
    if a.dtype.kind == "i":
        sign = (bits >> np.clip(position + length - 1, 0, 31)) & 1 & (length > 0)
        field = np.where(sign == 1, field | (-1 << np.clip(np.minimum(length, 32 - position), 0, 32)), field)
    return (field & 0xFFFFFFFF).astype("u4").view(a.dtype)


def permute_bytes(a: NDArray, b: NDArray, selector: NDArray) -> NDArray:
    """Returns four of the eight bytes of a and b; bit 3 of a selector's nibble replicates the byte's sign."""
    both = (b.astype("u8") << np.uint64(32)) | a
    out = np.zeros(len(a), "u4")
    for k in range(4):
        nibble = (selector >> np.uint32(4 * k)) & np.uint32(15)
        byte = ((both >> ((nibble & 7).astype("u8") * np.uint64(8))) & np.uint64(0xFF)).astype("u4")
        byte = np.where(nibble & 8, np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0)), byte)
        out |= byte << np.uint32(8 * k)
    return out


def fused_multiply_add(a: NDArray, b: NDArray, c: NDArray) -> NDArray:
    """Returns a * b + c in float32, with the exact product."""
    return (a.astype("f8") * b + c).astype("f4")


def round_to_bfloat16(x: NDArray) -> NDArray:
    """Returns the bits of float32 values that are rounded to bfloat16, half to even."""
    bits = x.view("u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype("u2")


def from_bfloat16(bits: NDArray) -> NDArray:
    """Returns bfloat16 values as float32."""
    return (bits.astype("u4") << np.uint32(16)).view("f4")


def round_to_float16(x: NDArray, clamps: bool = False) -> NDArray:
    """Returns the bits of float32 values that are rounded to float16, and clamped to its range if `clamps`."""
    return (np.clip(x, -65504.0, 65504.0) if clamps else x).astype("f2").view("u2")


def round_to_tf32(x: NDArray) -> NDArray:
    """Returns float32 values that are rounded to TF32, half away from zero."""
    return np.where(np.isfinite(x), ((x.view("u4") + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view("f4"), x)


def truncate_to_tf32(x: NDArray) -> NDArray:
    """Returns what the tensor cores read of float32 values: the bits of TF32."""
    return (x.view("u4") & np.uint32(0xFFFFE000)).view("f4")


def pack(values: list[NDArray], dtype: str) -> NDArray:
    """Returns integers of `dtype` whose parts are `values`, the lowest bits first."""
    return np.stack(values, 1).reshape(-1).view(dtype)
