"""Tilings of the "split" kernels: programs of 64 units share a state and keep their weights on chip (wgmma)."""

from __future__ import annotations

from dataclasses import dataclass

from torch_bridge.cells import CELLS
from torch_bridge.tiling.arithmetic import cdiv
from torch_bridge.tiling.config import ExchangesWords
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem
from torch_bridge.tiling.support import MIN_STEPS_ON_CHIP, has_wgmma_kernels

# Tilings of the "split" kernels, whose programs have 64 units each: sequences per tile, warps, and the microseconds per
# step of one tile (fixed, and per program that shares the units). Estimated from 250 timings on an H200 with B from 8
# to 2048 and H from 192 to 512, and used for 65 to 576 units.
COST = {
    ("gru", "fwd"): ((8, 4, 0.75, 0.35), (16, 4, 1.6, 0.35), (32, 8, 3.0, 0.5)),
    ("gru", "bwd"): ((8, 4, 0.7, 0.42), (16, 4, 1.6, 0.47), (32, 8, 2.4, 1.0)),
    ("lstm", "fwd"): ((8, 4, 1.3, 0.33), (16, 4, 2.6, 0.35), (32, 8, 3.6, 0.6)),
    ("lstm", "bwd"): ((8, 4, 0.9, 0.42), (16, 4, 2.1, 0.53), (32, 8, 2.5, 0.92)),
}


@dataclass(frozen=True)
class Split(ExchangesWords):
    """A tiling of the "split" kernels."""

    block_b: int
    splits: int
    num_warps: int

    loop = "split"
    block_h = block_k = 64

    def shared_memory(self, problem: Problem) -> int:
        """Returns an upper bound on the bytes of the weights and operands."""
        gates = CELLS[problem.cell].gates
        operands = self.splits if problem.direction == "fwd" else gates
        return 2 * self.block_h * (gates * self.splits * self.block_h + operands * self.block_b) + 1024


def split_configs(problem: Problem, device: Device) -> list[tuple[float, Split]]:
    """Returns the tilings of the "split" kernels, each with its cost.

    The programs share the units and keep all weights on chip. The cost is in microseconds per step of all tiles.
    """
    if not has_wgmma_kernels(problem, device):
        return []
    splits = cdiv(problem.hidden, 64)
    if problem.steps < MIN_STEPS_ON_CHIP or not 1 < splits <= device.multiprocessors:
        return []
    ways: list[tuple[float, Split]] = []
    tiles: tuple[tuple[int, int, float, float], ...] = COST[problem.tilings, problem.direction]
    if problem.tilings == "lstm" and dict(problem.dtypes).keys() & {"dcs", "dreset_h"}:
        tiles = tiles[:1]  # with these additional gradients, Triton 3.9 spills in the larger ones
    for block_b, num_warps, fixed, per_split in tiles:
        config = Split(block_b, splits, num_warps)
        if config.shared_memory(problem) <= device.shared_memory:
            ways.append((config.rounds(problem, device) * (fixed + per_split * splits), config))
    return ways
