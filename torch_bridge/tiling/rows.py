"""Tilings of the "rows" kernels: programs of 32 units, for many sequences and wide states (wgmma)."""

from __future__ import annotations

from dataclasses import dataclass

from torch_bridge.cells import CELLS
from torch_bridge.tiling.arithmetic import cdiv
from torch_bridge.tiling.config import SharedUnits, Workspace
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem
from torch_bridge.tiling.support import MIN_STEPS_ON_CHIP, has_wgmma_kernels, triton_version

# By kernel: sequences per tile, and microseconds per step of a tile, fixed and per program that shares the
# units. The number of programs that share the units is a multiple of four. Estimated from 60 timings on an H200 with B
# from 8 to 1024 and H from 256 to 1024.
COST = {
    ("gru", "fwd"): ((64, 3.7, 0.09), (128, 3.5, 0.23)),
    ("gru", "bwd"): ((64, 4.4, 0.13), (128, 5.0, 0.285)),
    ("lstm", "fwd"): ((64, 4.3, 0.13), (128, 3.8, 0.39)),
    ("lstm", "bwd"): ((64, 4.9, 0.13), (128, 4.5, 0.5)),
}


@dataclass(frozen=True)
class Rows(SharedUnits):
    """A tiling of the "rows" kernels."""

    block_b: int
    splits: int

    loop = "rows"
    block_h = block_k = 32
    num_stages = 1

    @property
    def num_warps(self) -> int:
        """One for each row of 16 sequences of a product."""
        return self.block_b // 16

    def workspaces(self, problem: Problem, device: Device) -> list[Workspace]:
        """Returns two buffers of states or gate gradients; backward, their bounds, and words of products; and flags."""
        forward, workers = problem.direction == "fwd", self.workers(problem, device)
        width = self.splits * self.block_h * (1 if forward else CELLS[problem.cell].gates)
        scaled = problem.operand_dtype == "float32"
        exchange = 2 * workers * self.block_b * width, "float16" if scaled else problem.operand_dtype, False
        bounds = [("bounds", 2 * workers * self.block_b * 32, "float32", False)] if scaled and not forward else []
        products = [] if forward else [("products", 4 * workers * self.splits * self.block_b * 32, "int32", True)]
        flags = "barrier", workers * self.num_warps * 32, "int32", True
        return [("exchange", *exchange), *bounds, *products, flags]

    def shared_memory(self, problem: Problem) -> int:
        """Returns an upper bound on the bytes of the weights."""
        return 2 * CELLS[problem.cell].gates * self.block_h * self.block_h * self.splits + 1024


def rows_configs(problem: Problem, device: Device) -> list[tuple[float, Rows]]:
    """Returns the tilings of the "rows" kernels, each with its cost in microseconds per step of all tiles.

    These kernels are for states that are too wide for the "split" kernels, and for many sequences.
    """
    splits = 4 * cdiv(problem.hidden, 128)
    if not has_wgmma_kernels(problem, device) or problem.steps < MIN_STEPS_ON_CHIP:
        return []
    if not 4 < splits <= min(32, device.multiprocessors):
        return []
    scaled_backward = problem.direction == "bwd" and problem.operand_dtype == "float32"
    if scaled_backward and triton_version() > (3, 7):
        return []  # the kernel spills
    if (
        scaled_backward
        and problem.reverse == "bidirectional"
        and problem.tilings == "lstm"
        and splits == 16
        and not problem.has_only_common_arrays
    ):
        return []  # the kernel spills
    ways: list[tuple[float, Rows]] = []
    for block_b, fixed, per_split in COST[problem.tilings, problem.direction]:
        if _spills(problem, block_b, splits):
            continue
        config = Rows(block_b, splits)
        if config.shared_memory(problem) <= device.shared_memory:
            ways.append((config.rounds(problem, device) * (fixed + per_split * splits), config))
    return ways


def _spills(problem: Problem, block_b: int, splits: int) -> bool:
    """Whether the "rows" kernel has too few registers."""
    gru, of_float32 = problem.tilings == "gru", problem.operand_dtype == "float32"
    if problem.direction == "fwd":
        return not gru and of_float32 and problem.is_unaligned and splits == 8 and triton_version() > (3, 7)
    return (
        (gru and (block_b, splits) == (64, 16))
        or (of_float32 and problem.is_unaligned and (block_b, splits) == (64, 20))
        or (
            gru
            and of_float32
            and (block_b, splits) == (128, 32)
            and problem.hidden % 128 != 0
            and not problem.has_only_common_arrays
        )
    )
