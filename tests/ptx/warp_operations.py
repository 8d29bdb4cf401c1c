"""Instructions that the threads of a warp run together: shuffles, maxima, votes, products and copies of matrices.

Arrays are `[threads]`. A mask says which threads run the instruction; None means all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx.arithmetic import from_bfloat16, truncate_to_tf32
from ptx.parse import PTXError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ptx.memory import SharedMemory

    Mask = NDArray | None


def check_whole_warps(mask: Mask) -> None:
    """Raises PTXError if a part of a warp runs an instruction that needs all of its threads."""
    if mask is not None:
        warps = mask.reshape(-1, 32)
        if not np.array_equal(warps.any(1), warps.all(1)):
            raise PTXError("a part of a warp runs an instruction for whole warps")


def shuffle(mask: Mask, mode: str, values: NDArray, lane_or_bits: NDArray, clamp: NDArray) -> NDArray:
    """Returns for each thread the value of another lane of its warp: `shfl.sync` with all lanes as members.

    Args:
      mask: the threads that take part.
      mode: "bfly", which flips bits of the lane's number, or "idx".
      values: `[threads]`.
      lane_or_bits: the bits to flip, or the lane to read.
      clamp: the highest lane, and in bits 8 to 12 the bits of the lane that name a segment.

    Raises:
      PTXError: a part of a warp takes part.
    """
    check_whole_warps(mask)
    thread = np.arange(len(values))
    lane, other = thread % 32, lane_or_bits.astype("i8") & 31
    segment, highest = (clamp.astype("i8") >> 8) & 31, clamp.astype("i8") & 31
    highest = (lane & segment) | (highest & ~segment)
    source = lane ^ other if mode == "bfly" else (lane & segment) | (other & ~segment)
    return values[thread - lane + np.where(source <= highest, source, lane)]


def reduce_warp(mask: Mask, function: np.ufunc, values: NDArray, members: NDArray) -> NDArray:
    """Returns for each thread the values of its warp reduced by a function: `redux.sync` with all lanes as members.

    Raises:
      PTXError: a part of a warp takes part, or is a member.
    """
    check_whole_warps(mask)
    if (members[slice(None) if mask is None else mask] != 0xFFFFFFFF).any():
        raise PTXError("only a part of the warp is a member")
    return np.repeat(function.reduce(values.reshape(-1, 32), 1), 32)


def any_of_warp(mask: Mask, values: NDArray) -> NDArray:
    """Returns for each thread whether a value of its warp is true: `vote.sync.any` with all lanes as members.

    Raises:
      PTXError: a part of a warp takes part.
    """
    check_whole_warps(mask)
    return np.repeat(values.reshape(-1, 32).any(1), 32)


def multiply_matrices(
    mask: Mask, dtype: str, a: list[NDArray], b: list[NDArray], accumulators: list[NDArray]
) -> list[NDArray]:
    """Returns the bits of `A @ B + C` in float32: `mma.sync.m16n8kK`, each warp with matrices of its own.

    Args:
      mask: the threads that take part.
      dtype: of A `[16, K]` and B `[K, 8]`: "f16", "bf16" or "tf32". K follows from the number of registers.
      a: the registers of A: for each group of columns, those of the upper and of the lower eight rows.
      b: the registers of B.
      accumulators: the registers of C.

    Raises:
      PTXError: a part of a warp takes part.
    """
    check_whole_warps(mask)
    width = 4 if dtype == "tf32" else 8  # columns of A in a register of a warp
    upper, lower = (np.concatenate([_tile(r, dtype, width) for r in a[k::2]], 2) for k in (0, 1))
    A = np.concatenate([upper, lower], 1)
    B = np.concatenate([_tile(r, dtype, width) for r in b], 2).transpose(0, 2, 1)
    upper, lower = ((A @ B)[:, rows].reshape(-1, 2) for rows in (slice(8), slice(8, 16)))
    products = upper[:, 0], upper[:, 1], lower[:, 0], lower[:, 1]
    return [(x + y.view("f4")).astype("f4").view("u4") for x, y in zip(products, accumulators, strict=True)]


def _tile(register: NDArray, dtype: str, width: int) -> NDArray:
    """Returns what a register holds of a matrix, `[warps, 8, width]` in float64."""
    if dtype == "tf32":
        values = truncate_to_tf32(register.view("f4"))
    else:
        values = register.view("f2") if dtype == "f16" else from_bfloat16(register.view("u2"))
    return values.astype("f8").reshape(-1, 8, width)


def load_matrices(
    shared: SharedMemory, mask: Mask, address: NDArray, offset: int, count: int, transposed: bool, line: int
) -> list[NDArray]:
    """Returns the registers of `count` matrices `[8, 8]` of 16-bit elements: `ldmatrix`.

    Args:
      shared: the memory of the program.
      mask: the threads that take part.
      address: those of the rows, in the first `8 * count` lanes of each warp.
      offset: added to the addresses.
      count: 1, 2 or 4.
      transposed: whether to transpose each matrix.
      line: of the instruction.

    Raises:
      PTXError: a part of a warp takes part, or the access is invalid.
    """
    check_whole_warps(mask)
    warps = np.arange(len(address) // 32) if mask is None else np.flatnonzero(mask.reshape(-1, 32).any(1))
    rows = address.reshape(-1, 32)[warps, : 8 * count].reshape(-1)
    words = shared.load(rows.astype("i8") + offset, np.repeat(warps, 8 * count), 4, 4, line)
    if transposed:
        halves = words.view("u2").reshape(-1, 8, 8).transpose(0, 2, 1)
        words = np.ascontiguousarray(halves).reshape(-1).view("u4")
    registers = np.zeros((count, len(address) // 32, 32), "u4")
    registers[:, warps] = words.reshape(len(warps), count, 32).transpose(1, 0, 2)
    return list(registers.reshape(count, -1))


def store_matrices(
    shared: SharedMemory, mask: Mask, address: NDArray, offset: int, registers: list[NDArray], transposed: bool,
    line: int,
) -> None:  # fmt: skip
    """Stores the registers of matrices `[8, 8]` of 16-bit elements, of which there are 1, 2 or 4: `stmatrix`.

    The other arguments are those of `load_matrices`.

    Raises:
      PTXError: a part of a warp takes part, or the access is invalid.
    """
    check_whole_warps(mask)
    count, warps = len(registers), np.arange(len(address) // 32)
    if mask is not None:
        warps = np.flatnonzero(mask.reshape(-1, 32).any(1))
    rows = address.reshape(-1, 32)[warps, : 8 * count].reshape(-1)
    words = np.stack([x.reshape(-1, 32)[warps] for x in registers], 1).reshape(-1, 4)
    if transposed:
        halves = words.view("u2").reshape(-1, 8, 8).transpose(0, 2, 1)
        words = np.ascontiguousarray(halves).reshape(-1).view("u4").reshape(-1, 4)
    shared.store(rows.astype("i8") + offset, words, np.repeat(warps, 8 * count), line)
