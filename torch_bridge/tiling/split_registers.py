"""Tilings of the "split_registers" kernels: programs share a state and keep their weights in registers (mma.sync)."""

from __future__ import annotations

from torch_bridge.tiling.arithmetic import cdiv
from torch_bridge.tiling.config import KernelConfig
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, product_kind
from torch_bridge.tiling.support import MIN_STEPS_ON_CHIP, has_16_bit_kernels

# Widest state by the units of a program. Eight warps then have 32 registers a thread for the weights of a gate.
WIDEST = {64: 256, 32: 512, 16: 1024}


def split_registers_configs(problem: Problem, device: Device) -> list[KernelConfig]:
    """Returns the tilings of the "split_registers" kernels, the smallest tile first."""
    if not (device.runs_gluon and has_16_bit_kernels(problem)) or problem.steps < MIN_STEPS_ON_CHIP:
        return []
    units = next((units for units, widest in WIDEST.items() if problem.hidden <= widest), None)
    if units is None or problem.hidden <= 128:
        return []
    splits = cdiv(problem.hidden, 64) * (64 // units)  # a multiple: the words of 64 units lie at equal distances
    if splits > device.multiprocessors:
        return []
    return [
        KernelConfig(units, block_b, WIDEST[units], splits, num_warps=8, num_stages=1, loop="split_registers")
        for block_b in ((8, 16) if _fits_batch_tile_16(problem) else (8,))
    ]


def _fits_batch_tile_16(problem: Problem) -> bool:
    """Returns whether the kernel has enough registers for tiles of 16 sequences."""
    if problem.direction == "bwd" or problem.tilings == "lstm":
        return False
    halves, zeros = product_kind(problem) == "16-bit", problem.reset_state == "zeros"
    return halves or (zeros and problem.hidden <= 512)
