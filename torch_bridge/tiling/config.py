"""A tiling: how the programs of a launch divide a problem, and the memory that they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_bridge.cells import CELLS
from torch_bridge.tiling.arithmetic import cdiv
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem

# The families of time loops in `torch_bridge.kernels.loops`. "streamed" is written in Triton, the others in Gluon.
# "resident", "fma" and "split_registers" run on compute capability 8.0 and newer; "split" and "rows" use wgmma, which
# only capability 9.0 has.
Loop = Literal["streamed", "resident", "fma", "split", "split_registers", "rows"]


@dataclass(frozen=True)
class KernelConfig:
    """A tiling. With `splits == 1`, a program keeps the weights of all units on chip.

    Otherwise `splits` programs share the units. `shared_gates` is the number of gates whose weights the "fma" kernels
    keep in shared memory instead of registers.
    """

    block_h: int
    block_b: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    loop: Loop = "streamed"
    shared_gates: int = 0

    def tiles(self, problem: Problem) -> int:
        """Returns the number of batch tiles per model."""
        return cdiv(problem.sequences, self.block_b)

    def workers(self, problem: Problem, device: Device) -> int:
        """Returns the number of workers: groups of `splits` programs that process their tiles one after the other."""
        items = problem.models * self.tiles(problem)
        return items if self.splits == 1 else max(1, min(items, device.multiprocessors // self.splits))

    def rounds(self, problem: Problem, device: Device) -> int:
        """Returns the largest number of tiles that one worker processes."""
        return cdiv(problem.models * self.tiles(problem), self.workers(problem, device))

    def workspaces(self, problem: Problem, device: Device) -> list[tuple[str, int, str, bool]]:
        """Returns `(name, length, dtype, zeroed)` of the arrays through which programs that share a tile exchange data.

        Arrays that are `zeroed` must contain zeros when the launch starts.
        """
        if self.splits == 1:
            return []
        forward, gates, workers = problem.direction == "fwd", CELLS[problem.cell].gates, self.workers(problem, device)
        if self.loop in ("split", "split_registers"):
            # two buffers; forward, each pair of elements is a word and the word's number; backward, each program sends
            # a word per element to each program
            words = 2 * self.block_h * self.block_b * self.splits * workers
            found = [("exchange", words if forward else words * self.splits, "int32", True)]
            if problem.norm_width and not forward:  # each program sends a sum per sequence, which is for all programs
                found.append(("sums", words // self.block_h, "int32", True))
            return found
        if self.loop == "rows":
            width = self.splits * self.block_h * (1 if forward else gates)
            scaled = problem.operand_dtype == "float32"
            exchange = 2 * workers * self.block_b * width, "float16" if scaled else problem.operand_dtype, False
            bounds = [("bounds", 2 * workers * self.block_b * 32, "float32", False)] if scaled and not forward else []
            products = [] if forward else [("products", 4 * workers * self.splits * self.block_b * 32, "int32", True)]
            flags = "barrier", workers * self.num_warps * 32, "int32", True
            return [("exchange", *exchange), *bounds, *products, flags]
        width = problem.hidden * (1 if forward else gates)
        exchange = 2 * problem.groups * problem.batch * width, problem.operand_dtype, False
        sums = []
        if problem.norm_width:
            parts = (2 if forward and CELLS[problem.cell].norm == "layer" else 1) * self.splits
            sums = [("sums", 2 * problem.groups * problem.batch * parts, "float32", False)]
        return [("exchange", *exchange), *sums, *([] if device.interpreted else [("barrier", workers, "int32", True)])]

    def shared_memory(self, problem: Problem) -> int:
        """Returns an upper bound, in bytes, on a program's shared memory: close to measured use, checked by a test."""
        gates, wide = CELLS[problem.cell].gates, problem.operand_dtype == "float32"
        size = 4 if wide else 2
        if self.loop == "split":
            operands = self.splits if problem.direction == "fwd" else gates
            return 2 * self.block_h * (gates * self.splits * self.block_h + operands * self.block_b) + 1024
        if self.loop == "split_registers":
            # the weights of a gate on their way to registers; then the state, and the products of each group of warps
            state = (2 * self.block_k + 512 * gates) * self.block_b
            return max(2 * self.block_h * self.block_k, state if problem.direction == "fwd" else 0) + 1024
        if self.loop == "rows":
            return 2 * gates * self.block_h * self.block_h * self.splits + 1024
        if self.loop == "fma":
            operands = 1 if problem.direction == "fwd" else gates
            sums = 4 * self.num_warps if problem.norm_width else 0
            return 8 * self.block_h * operands + self.shared_gates * 4 * self.block_h**2 + sums
        if self.loop == "resident":
            # weights on their way to registers; operands of two steps, and by warp their bounds and the sums of a norm
            operands = 1 if problem.direction == "fwd" else gates
            return 2 * self.block_h**2 + 4 * operands * self.block_h * max(self.block_b, 8) + 192 * self.num_warps + 512
        if self.splits == 1:
            copies = 2 if problem.precision == "tf32x3" else 1
            return copies * gates * self.block_h * self.block_h * size + 16 * self.block_h * self.block_b
        rows = gates * self.block_h if problem.direction == "fwd" else self.block_h
        stage = (rows + self.block_b) * self.block_k * size
        return self.num_stages * stage + (8 if wide else 20) * self.block_h * self.block_b
