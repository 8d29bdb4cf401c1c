"""Runs the programs of a launch: their warps, barriers and asynchronous copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.memory import ClusterMemory, GlobalMemory, SharedMemory
from ptx.parse import ParsedKernel, PTXError
from ptx.registers import SIZES, UNSIGNED
from ptx.translate import Translator

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    Mask = NDArray | None
    Argument = NDArray | int | float | None

# Turns of all programs without a store to global memory, a barrier or an end, before a poll counts as endless.
PATIENCE = 1000


class Kernel:
    """A kernel that can be launched.

    Args:
      ptx: the text, from Triton for compute capability 8.0, or for 9.0 if it has clusters.
      name: of the kernel, or None for the first one.
      shared: bytes of dynamic shared memory per program.
      num_warps: warps per program.

    Raises:
      PTXError: the PTX cannot be read, or it is for another number of warps.
    """

    def __init__(self, ptx: str, name: str | None = None, shared: int = 0, num_warps: int = 4) -> None:
        self.parsed = ParsedKernel(ptx, name)
        if self.parsed.threads != 32 * num_warps:
            raise PTXError(f"{self.parsed.name} has {self.parsed.threads} threads, not {num_warps} warps")
        self._translator, self._shared = Translator(self.parsed), self.parsed.static + shared
        accesses = [one for one in self.parsed.instructions if one.parts[0] in ("ld", "st") and "shared" in one.parts]
        self._grain = min([SIZES[one.parts[-1]] for one in accesses], default=4)

    def launch(
        self, grid: int, arguments: Mapping[str, Argument], *, cluster: int = 1, seed: int | None = None
    ) -> None:  # fmt: skip
        """Runs `grid` programs to their end.

        Args:
          grid: the number of programs.
          arguments: contiguous arrays, which are written in place, numbers, or None for null, by any name for messages,
            in the order of the parameters. Parameters without an argument are null.
          cluster: the number of programs of a cluster, of which `grid` is a multiple.
          seed: of the random order in which warps and programs run, one warp at a time. With None, the programs take
            turns, and their warps run in lockstep where they can.

        Raises:
          PTXError: see `ptx`.
          ValueError: there are more arguments than parameters, or an array is not contiguous.
        """
        if len(arguments) > len(self.parsed.parameters):
            raise ValueError(f"{len(arguments)} arguments for {len(self.parsed.parameters)} parameters")
        arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
        memory = GlobalMemory(arrays)
        bits = {}
        values = [*arguments.values(), *[None] * (len(self.parsed.parameters) - len(arguments))]
        for (name, kind), value in zip(self.parsed.parameters, values, strict=True):
            if isinstance(value, np.ndarray):
                value = memory.address_of(value)
            elif isinstance(value, float):
                value = int(np.float32(value).view("u4"))
            bits[name] = np.array([int(value or 0) & ((1 << 8 * SIZES[kind]) - 1)], UNSIGNED[SIZES[kind]])
        random = None if seed is None else np.random.default_rng(seed)
        with np.errstate(all="ignore"):
            programs = []
            for first in range(0, grid, cluster):
                together = Cluster([SharedMemory(self._shared, self._grain, self.parsed.lines) for _ in range(cluster)])
                for rank in range(cluster):
                    programs.append(Program(self._translator, memory, together, rank, bits, first + rank, grid))
            running = {program: program.run(random) for program in programs}
            before, idle = -1, 0
            while running:
                order = list(running)
                if random is not None:
                    order = [order[i] for i in random.permutation(len(order))]
                for program in order:
                    if next(running[program], None) is None:
                        del running[program]
                progress = memory.stores + sum(p.barriers + p.shared.received for p in programs) - len(running)
                before, idle = progress, 0 if progress != before else idle + 1
                if idle > PATIENCE:
                    waiting = "; ".join(program.position() for program in list(running)[:4])
                    raise PTXError(f"{self.parsed.name}: {len(running)} programs wait without end: {waiting}")
        memory.write_back()


class Cluster:
    """The programs of a cluster, which may be one.

    Args:
      shared: the shared memory of each.
    """

    def __init__(self, shared: list[SharedMemory]) -> None:
        self.shared = shared
        self._arrived = 0

    def arrive(self) -> int:
        """Adds an arrival of a program at a barrier, and returns after how many arrivals it may go on."""
        self._arrived += 1
        return -(-self._arrived // len(self.shared)) * len(self.shared)

    def waits(self, arrivals: int) -> bool:
        """Returns whether there have been fewer arrivals."""
        return self._arrived < arrivals


class Program:
    """One program of a launch.

    Args:
      translator: of the kernel.
      memory: global memory.
      together: the program's cluster.
      rank: the program's number in it.
      parameters: the bits of the parameters by name, each `[1]`.
      index: the number of the program.
      grid: the number of programs.

    Attributes:
      shared: the program's shared memory.
      cluster: that of the programs of its cluster.
      special: the special registers by name.
      copies: the asynchronous copies.
      barriers: the number of barriers at which all threads have been.
    """

    def __init__(
        self, translator: Translator, memory: GlobalMemory, together: Cluster, rank: int,
        parameters: Mapping[str, NDArray], index: int, grid: int,
    ) -> None:  # fmt: skip
        self.memory, self.shared, self._together = memory, together.shared[rank], together
        self.cluster = ClusterMemory(together.shared, rank)
        self._translator, self._parameters, self._index = translator, parameters, index
        self._threads = translator.kernel.threads
        self._warps = np.arange(self._threads) // 32
        self.special = {
            "%tid.x": np.arange(self._threads, dtype="u4"), "%ctaid.x": np.full(self._threads, index, "u4"),
            "%nctaid.x": np.full(self._threads, grid, "u4"),
        }  # fmt: skip
        self.copies = Copies(self)
        self.barriers = 0
        unset = {n: np.full(self._threads, np.iinfo(dtype).max, dtype) for n, dtype in UNSIGNED.items()}
        unset[1] = np.zeros(self._threads, bool)
        self._registers = [unset[width] for width in translator.kernel.widths]
        self._block = np.zeros(self._threads, "i8")  # the basic block at which each thread goes on

    def run(self, random: np.random.Generator | None) -> Iterator[bool]:
        """Runs the program, and yields whenever no warp can go on without a backward branch.

        Raises:
          PTXError: see `ptx`.
        """
        translator, block = self._translator, self._block
        waits, of_cluster = np.zeros((2, self._threads), bool)  # at a barrier, which may be that of a cluster
        turned = np.zeros(self._threads // 32, bool)  # the warps that took a backward branch in this turn
        while True:
            returned = block == translator.end
            runnable = ~(waits | returned)
            if not runnable.any():
                if returned.all():
                    self.shared.ended = True
                    return
                raise PTXError(
                    f"{translator.kernel.name}, program {self._index}: {int(waits.sum())} threads wait at a barrier "
                    f"without end, and {int(returned.sum())} have returned: {self.position()}"
                )
            first = np.where(runnable, block, translator.end).reshape(-1, 32).min(1)
            ready = (first < translator.end) & ~turned
            if not ready.any():
                turned[:] = False
                yield True
                continue
            if random is None:
                number = int(first[ready].min())
                chosen = ready & (first == number)
            else:
                warp = random.choice(np.flatnonzero(ready))
                number, chosen = int(first[warp]), np.arange(len(first)) == warp
            active = runnable & (block == number) & np.repeat(chosen, 32)
            target, taken, other = self._call(number, None if active.all() else active)
            block[active] = target if taken is None else other
            if taken is not None:
                block[taken] = target
            barriers = translator.barriers | translator.cluster_barriers
            if number in barriers:
                if not np.array_equal(active.reshape(-1, 32).any(1), active.reshape(-1, 32).all(1)):
                    raise self._error("a part of a warp waits at a barrier", barriers[number])
                waits |= active
                of_cluster[active] = number in translator.cluster_barriers
                if waits.all():
                    if of_cluster.any() != of_cluster.all():
                        raise self._error("threads wait at barriers of two kinds", barriers[number])
                    waits[:] = False
                    self.shared.pass_barrier()
                    self.barriers += 1
                    arrivals = self._together.arrive() if of_cluster.all() else 0
                    while self._together.waits(arrivals):
                        yield True
            elif target <= number:
                turned |= chosen

    def position(self) -> str:
        """Returns where the threads that have not returned go on, for messages."""
        numbers = np.unique(self._block[self._block != self._translator.end])
        lines = sorted({line for n in numbers for line in self._translator.block(int(n), True).lines[:1]})
        return f"program {self._index} at PTX lines {lines}"

    def parameter(self, name: str, dtype: str) -> NDArray:
        """Returns a parameter for each thread."""
        return np.repeat(self._parameters[name].view(dtype), self._threads)

    def load(
        self, memory: Any, mask: Mask, address: NDArray, offset: int, size: int, count: int, line: int
    ) -> list[NDArray]:  # fmt: skip
        """Returns `count` arrays `[threads]` of elements of `size` bytes, zero for threads outside of the mask."""
        if mask is None:
            return list(memory.load(address.astype("i8") + offset, self._warps, size, count, line).T)
        loaded = np.zeros((count, self._threads), UNSIGNED[size])
        loaded[:, mask] = memory.load(address[mask].astype("i8") + offset, self._warps[mask], size, count, line).T
        return list(loaded)

    def store(self, memory: Any, mask: Mask, address: NDArray, offset: int, values: list[NDArray], line: int) -> None:
        """Stores the elements `values` of each thread next to one another."""
        threads = slice(None) if mask is None else mask
        data = np.stack([x[threads] for x in values], 1)
        memory.store(address[threads].astype("i8") + offset, data, self._warps[threads], line)

    def add(self, mask: Mask, address: NDArray, offset: int, values: NDArray) -> NDArray:
        """Adds to global memory, and returns what was there before, zero for threads outside of the mask."""
        before, threads = np.zeros(self._threads, values.dtype), slice(None) if mask is None else mask
        before[threads] = self.memory.add(address[threads].astype("i8") + offset, values[threads])
        return before

    def _call(self, number: int, mask: Mask) -> tuple[int, Mask, int]:
        """Runs a basic block, and adds the PTX line to errors."""
        block = self._translator.block(number, mask is not None)
        try:
            target, taken, other = block.run(self, self._registers, mask)
        except PTXError as e:
            at, traceback = 0, e.__traceback__
            while traceback is not None:
                if traceback.tb_frame.f_code is block.run.__code__:  # type: ignore[attr-defined]
                    at = block.lines[traceback.tb_lineno - 2]
                traceback = traceback.tb_next
            raise self._error(str(e), at) from e
        return target, taken, other

    def _error(self, message: str, line: int) -> PTXError:
        kernel = self._translator.kernel
        text = kernel.lines[line - 1].strip()
        return PTXError(f"{kernel.name}, program {self._index}, PTX line {line}: {text}\n{message}")


class Copies:
    """The asynchronous copies of a program from global to shared memory, in groups per thread."""

    def __init__(self, program: Program) -> None:
        self._program = program
        threads = program.special["%tid.x"].size
        self._groups = np.zeros(threads, "i8")  # those that each thread has committed
        self._warps = np.arange(threads) // 32
        self._pending: list[tuple[NDArray, NDArray, NDArray, NDArray, int]] = []

    def begin(
        self, mask: Mask, to: NDArray, to_offset: int, source: NDArray, offset: int, size: int, used: NDArray, line: int
    ) -> None:  # fmt: skip
        """Reads `used` bytes, 0 or `size`, at `source`. `wait` stores these, and zeros for the rest, at `to`."""
        threads = np.arange(len(to)) if mask is None else np.flatnonzero(mask)
        address, used = to[threads].astype("i8") + to_offset, used[threads]
        if not np.isin(used, (0, size)).all():
            raise PTXError("a copy of a part of its bytes is not supported")
        self._program.shared.begin_store(address, self._warps[threads], size, line)
        data, reads = np.zeros((len(threads), size // 4), "u4"), used == size
        if reads.any():
            from_address = source[threads[reads]].astype("i8") + offset
            data[reads] = self._program.memory.load(from_address, self._warps[threads[reads]], 4, size // 4, line)
        self._pending.append((threads, address, data, self._groups[threads].copy(), line))

    def commit(self, mask: Mask) -> None:
        """Ends the group of copies that each thread has begun."""
        self._groups[slice(None) if mask is None else mask] += 1

    def wait(self, mask: Mask, newest: int) -> None:
        """Stores what is copied by all but the newest groups of each thread."""
        pending, self._pending = self._pending, []
        for threads, address, data, group, line in pending:
            due = group < self._groups[threads] - newest
            if mask is not None:
                due &= mask[threads]
            if due.any():
                self._program.shared.store(address[due], data[due], self._warps[threads[due]], line)
            if not due.all():
                late = ~due
                self._pending.append((threads[late], address[late], data[late], group[late], line))
