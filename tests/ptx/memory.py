"""Checked global and shared memory.

Addresses are int64 arrays `[accesses]`, one for each thread that takes part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx.parse import SHARED_BASE, PTXError
from ptx.registers import UNSIGNED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

GLOBAL_BASE = 0x7F0000000000
# Unmapped bytes between two arrays.
GAP = 4096
ALIGNMENT = 256


class _Memory:
    """Bytes that loads and stores of 1, 2, 4 and 8 bytes see as arrays."""

    def __init__(self, size: int, fill: int) -> None:
        words = np.full(-(-size // 8), fill, "u8")
        self.views = {n: words.view(dtype) for n, dtype in UNSIGNED.items()}

    def _elements(self, at: NDArray, size: int, count: int) -> NDArray:
        """Returns the indices `[accesses, count]` of elements of `size` bytes.

        Raises:
          PTXError: the access is not aligned to its whole size.
        """
        misaligned = at % (size * count) != 0
        if misaligned.any():
            raise PTXError(f"misaligned access of {size * count} bytes at byte {int(at[misaligned][0])}")
        return (at // size)[:, None] + np.arange(count)

    def _put(self, at: NDArray, values: NDArray) -> NDArray:
        """Stores `values [accesses, count]`, and returns the accesses whose value another one has replaced."""
        view = self.views[values.itemsize]
        elements = self._elements(at, values.itemsize, values.shape[1])
        view[elements] = values
        return np.flatnonzero((view[elements] != values).any(1))


class GlobalMemory(_Memory):
    """Arrays at addresses that do not touch, so that an access out of bounds of one meets no other.

    Attributes:
      stores: the number of stores so far.
    """

    def __init__(self, arrays: Mapping[str, NDArray]) -> None:
        self.stores = 0
        self._arrays: dict[int, tuple[str, NDArray]] = {}
        self._starts: dict[int, int] = {}
        end = 0
        for name, x in arrays.items():
            if not x.flags.c_contiguous:
                raise ValueError(f"{name} must be contiguous")
            if x.ctypes.data not in self._starts:  # else it has two names
                start = -(-(end + GAP) // ALIGNMENT) * ALIGNMENT
                self._starts[x.ctypes.data], self._arrays[start], end = start, (name, x), start + x.nbytes
        super().__init__(end + GAP, 0)
        bounds = [(start, start + x.nbytes) for start, (_, x) in self._arrays.items()]
        self._bounds = np.array(bounds, "i8").reshape(-1, 2)
        for start, (_, x) in self._arrays.items():
            self.views[1][start : start + x.nbytes] = x.reshape(-1).view("u1")

    def address_of(self, x: NDArray) -> int:
        """Returns the address of one of the arrays."""
        return GLOBAL_BASE + self._starts[x.ctypes.data]

    def write_back(self) -> None:
        """Copies the memory to the arrays."""
        for start, (_, x) in self._arrays.items():
            x.reshape(-1).view("u1")[:] = self.views[1][start : start + x.nbytes]

    def load(self, address: NDArray, warps: NDArray, size: int, count: int, line: int) -> NDArray:
        """Returns `[accesses, count]` elements of `size` bytes.

        Raises:
          PTXError: the access is misaligned or out of bounds.
        """
        return self.views[size][self._elements(self._locate(address, size * count, "load"), size, count)]

    def store(self, address: NDArray, values: NDArray, warps: NDArray, line: int) -> None:
        """Stores `values [accesses, count]`.

        Raises:
          PTXError: the access is misaligned or out of bounds, or threads store different values at one address.
        """
        replaced = self._put(self._locate(address, values.itemsize * values.shape[1], "store"), values)
        if replaced.size:
            raise PTXError(f"threads store different values at one address: {replaced.size} are lost")
        self.stores += 1

    def add(self, address: NDArray, values: NDArray) -> NDArray:
        """Adds `values [accesses]` one after the other, and returns what was there before each.

        Raises:
          PTXError: the access is misaligned or out of bounds.
        """
        size = values.itemsize
        elements = self._elements(self._locate(address, size, "atomic addition"), size, 1)[:, 0]
        before = np.empty_like(values)
        for i, element in enumerate(elements):
            before[i] = self.views[size][element]
            self.views[size][element] = before[i] + values[i]
        self.stores += 1
        return before

    def _locate(self, address: NDArray, size: int, what: str) -> NDArray:
        at = address - GLOBAL_BASE
        array = np.searchsorted(self._bounds[:, 0], at, "right") - 1
        outside = (array < 0) | (at + size > self._bounds[array, 1])
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            start = int(self._bounds[array[first], 0])
            name, x = self._arrays[start]
            where = f"{int(at[first]) - start} bytes after the start of {name}, which has {x.nbytes} bytes"
            if array[first] < 0:
                where = f"address {int(address[first]):#x}"
            raise PTXError(f"{what} of {size} bytes out of bounds by {int(outside.sum())} threads: {where}")
        return at


class SharedMemory(_Memory):
    """The shared memory of a program, with the accesses of each warp since the last barrier.

    Args:
      size: in bytes.
      grain: the bytes that are tracked together: the smallest access.
      lines: of the PTX, for messages.

    Attributes:
      received: the number of stores by `receive`.
      ended: whether the program has returned.
    """

    _SEVERAL = -1  # in place of a warp

    def __init__(self, size: int, grain: int, lines: list[str]) -> None:
        super().__init__(size, 0xFFFFFFFFFFFFFFFF)
        self._size, self._grain, self._lines = size, grain, lines
        self._epoch = 1
        self.received, self.ended = 0, False
        grains = -(-size // grain)
        self._reads, self._writes = (
            {name: np.zeros(grains, "i4") for name in ("epoch", "warp", "line")} for _ in range(2)
        )

    def pass_barrier(self) -> None:
        """Starts a new epoch: accesses before a barrier do not race with those after it."""
        self._epoch += 1

    def load(self, address: NDArray, warps: NDArray, size: int, count: int, line: int) -> NDArray:
        """Returns `[accesses, count]` elements of `size` bytes.

        Raises:
          PTXError: the access is misaligned or out of bounds, or another warp wrote there since the last barrier.
        """
        at = self._locate(address, size * count)
        grains, warp = self._grains(at, warps, size * count)
        other = (self._writes["epoch"][grains] == self._epoch) & (self._writes["warp"][grains] != warp)
        if other.any():
            self._report(grains[other][0], warp[other][0], "reads what was written by", self._writes)
        first = self._reads["epoch"][grains] != self._epoch
        self._reads["warp"][grains[first]] = warp[first]
        self._reads["warp"][grains[self._reads["warp"][grains] != warp]] = self._SEVERAL
        self._reads["epoch"][grains], self._reads["line"][grains] = self._epoch, line
        return self.views[size][self._elements(at, size, count)]

    def store(self, address: NDArray, values: NDArray, warps: NDArray, line: int) -> None:
        """Stores `values [accesses, count]`.

        Raises:
          PTXError: the access is misaligned or out of bounds, warps store different values at one address, or the
            store changes what another warp accessed since the last barrier. Within a warp, one of the values is stored:
            lanes that compute the same sum may differ in its last bit, where some of them fuse the first addition.
        """
        size, count = values.itemsize, values.shape[1]
        at = self._locate(address, size * count)
        changes = not np.array_equal(self.views[size][self._elements(at, size, count)], values)
        self._track_write(at, warps, size * count, line, changes)
        replaced = self._put(at, values)
        if (self._writes["warp"][at[replaced] // self._grain] != warps[replaced]).any():
            raise PTXError("race in shared memory: warps store different values at one address")

    def begin_store(self, address: NDArray, warps: NDArray, size: int, line: int) -> None:
        """Declares that bytes change at any time up to a later `store`.

        Raises:
          PTXError: the access is misaligned or out of bounds, or another warp accessed them since the last barrier.
        """
        at = self._locate(address, size)
        self._elements(at, size, 1)
        self._track_write(at, warps, size, line, changes=True)

    def poll(self, address: NDArray, size: int, count: int) -> NDArray:
        """Returns `[accesses, count]` elements of `size` bytes, which other programs may store at any time.

        Raises:
          PTXError: the access is misaligned or out of bounds.
        """
        return self.views[size][self._elements(self._locate(address, size * count), size, count)]

    def receive(self, address: NDArray, values: NDArray) -> None:
        """Stores `values [accesses, count]` of any program of the cluster, which only `poll` reads.

        Raises:
          PTXError: the access is misaligned or out of bounds, the program has ended, or threads store different values
            at one address.
        """
        if self.ended:
            raise PTXError("a store to the shared memory of a program that has ended")
        if self._put(self._locate(address, values.itemsize * values.shape[1]), values).size:
            raise PTXError("threads store different values at one address of another program")
        self.received += 1

    def _locate(self, address: NDArray, size: int) -> NDArray:
        at = address - SHARED_BASE
        outside = (at < 0) | (at + size > self._size)
        if outside.any():
            raise PTXError(
                f"access of {size} bytes out of bounds by {int(outside.sum())} threads: byte {int(at[outside][0])} of "
                f"{self._size} in shared memory"
            )
        return at

    def _grains(self, at: NDArray, warps: NDArray, size: int) -> tuple[NDArray, NDArray]:
        """Returns the grains of accesses, `[accesses, grains]`, and the warps in the same shape."""
        grains = (at // self._grain)[:, None] + np.arange(-(-size // self._grain))
        return grains, np.broadcast_to(warps[:, None], grains.shape)

    def _track_write(self, at: NDArray, warps: NDArray, size: int, line: int, changes: bool) -> None:
        grains, warp = self._grains(at, warps, size)
        for accesses, what in ((self._reads, "writes what was read by"), (self._writes, "writes what was written by")):
            other = (accesses["epoch"][grains] == self._epoch) & (accesses["warp"][grains] != warp)
            if changes and other.any():
                self._report(grains[other][0], warp[other][0], what, accesses)
        self._writes["epoch"][grains], self._writes["warp"][grains] = self._epoch, warp
        self._writes["line"][grains] = line

    def _report(self, grain: int, warp: int, what: str, accesses: dict[str, NDArray]) -> None:
        other, line = int(accesses["warp"][grain]), int(accesses["line"][grain])
        who = "several warps" if other == self._SEVERAL else f"warp {other}"
        raise PTXError(
            f"race in shared memory at byte {grain * self._grain}: warp {warp} {what} {who} in PTX line {line} without "
            f"a barrier in between: {self._lines[line - 1].strip()}"
        )


# Bits of an address within a program. In an address in a cluster, the number of a program, from one on, is above them.
_BITS_WITHIN = 24


class ClusterMemory:
    """The shared memory of the programs of a cluster, as one of them accesses it without barriers.

    Args:
      programs: the shared memory of each.
      own: the number of the program in its cluster.
    """

    def __init__(self, programs: list[SharedMemory], own: int) -> None:
        self._programs, self._own = programs, own

    def address_of(self, mask: NDArray | None, address: NDArray, rank: NDArray) -> NDArray:
        """Returns where an address of the program lies in the shared memory of programs of the cluster.

        Raises:
          PTXError: there is no such program, for a thread of the mask.
        """
        missing = rank[slice(None) if mask is None else mask] >= len(self._programs)
        if missing.any():
            raise PTXError(f"{int(missing.sum())} threads address programs beyond a cluster of {len(self._programs)}")
        return ((rank + 1) << _BITS_WITHIN) | address

    def load(self, address: NDArray, warps: NDArray, size: int, count: int, line: int) -> NDArray:
        """Returns `[accesses, count]` elements of `size` bytes of the program's own memory; see `SharedMemory.poll`."""
        return self._programs[self._own].poll(address, size, count)

    def store(self, address: NDArray, values: NDArray, warps: NDArray, line: int) -> None:
        """Stores `values [accesses, count]` at results of `address_of`; see `SharedMemory.receive`."""
        for rank in np.unique(address >> _BITS_WITHIN):
            here = address >> _BITS_WITHIN == rank
            if rank == 0:
                raise PTXError("an address of the program itself in place of one in the cluster")
            self._programs[int(rank) - 1].receive(address[here] & ((1 << _BITS_WITHIN) - 1), values[here])
