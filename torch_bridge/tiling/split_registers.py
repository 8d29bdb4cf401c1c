"""Tilings of the "split_registers" kernels: each of several programs computes some units of the same sequences.

A program keeps the weights of its units in registers, as operands of mma.sync.
"""

from __future__ import annotations

from torch_bridge.tiling.arithmetic import cdiv
from torch_bridge.tiling.config import KernelConfig
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, product_kind
from torch_bridge.tiling.support import MIN_STEPS_ON_CHIP, has_16_bit_kernels

# Most hidden units by the units of a program. Eight warps then have 32 registers per thread for the weights of a gate.
WIDEST = {64: 256, 32: 512, 16: 1024}

# Microseconds per step of one tile, by sequences per tile: fixed; per program that shares the units; per megabyte that
# all programs exchange in a step; per 1e5 elements of the states of all tiles that run at once. Estimated from 250
# timings on an H100 (Triton 3.6) with 192 to 1024 units, with one tile and with as many as run at once.
STEP_COST = {
    ("gru", "fwd"): {8: (1.25, 0.016, 0.0, 0.6), 16: (1.57, 0.028, 0.0, 0.6)},
    ("gru", "bwd"): {8: (1.2, 0.02, 0.35, 0.6)},
    ("lstm", "fwd"): {8: (1.38, 0.018, 0.0, 0.7)},
    ("lstm", "bwd"): {8: (1.38, 0.02, 0.35, 0.4)},
}
# Microseconds until a program has loaded the weights of a model.
START_US = 20.0


def split_registers_configs(problem: Problem, device: Device) -> list[tuple[float, KernelConfig]]:
    """Returns the tilings of the "split_registers" kernels, each with its cost.

    The cost is in microseconds per step of all tiles. Like that of the "split" and "rows" kernels, with which it is
    compared, it does not include the time to load the weights. `candidates` adds that time when it compares a tiling
    with the "streamed" kernels.
    """
    if not (device.runs_gluon and has_16_bit_kernels(problem)) or problem.steps < MIN_STEPS_ON_CHIP:
        return []
    units = next((units for units, widest in WIDEST.items() if problem.hidden <= widest), None)
    if units is None or problem.hidden <= 128 or _spills(problem, units):
        return []
    splits = cdiv(problem.hidden, 64) * (64 // units)  # whole blocks of 64 units, as words are laid out
    if splits > device.multiprocessors:
        return []
    ways: list[tuple[float, KernelConfig]] = []
    for block_b in (8, 16) if _fits_batch_tile_16(problem, device) else (8,):
        config = KernelConfig(
            block_h=units, block_b=block_b, block_k=WIDEST[units], splits=splits, num_warps=8, num_stages=1,
            loop="split_registers",
        )  # fmt: skip
        ways.append((config.rounds(problem, device) * _tile_us(problem, config, device), config))
    return ways


def estimated_us(problem: Problem, config: KernelConfig, device: Device) -> float:
    """Estimates the microseconds per step of all sequences, which include a share of the time to load the weights."""
    rounds = config.rounds(problem, device)
    loads = min(rounds, problem.models)  # a program loads the weights of a model once
    return rounds * _tile_us(problem, config, device) + loads * START_US / problem.steps


def _tile_us(problem: Problem, config: KernelConfig, device: Device) -> float:
    """Estimates the microseconds per step of one tile."""
    fixed, per_program, per_megabyte, per_state = STEP_COST[problem.tilings, problem.direction][config.block_b]
    states = config.workers(problem, device) * config.block_b * config.splits * config.block_h
    exchanged = 4 * config.splits * states  # bytes: for each of its states, a program gets a word from every program
    return fixed + per_program * config.splits + per_megabyte * exchanged / 1e6 + per_state * states / 1e5


def _spills(problem: Problem, units: int) -> bool:
    """Returns whether the kernel has too few registers even for tiles of 8 sequences."""
    if problem.direction == "bwd" or problem.reset_state != "stepped" or not problem.is_unaligned:
        return False
    return units == 32 or (units == 64 and problem.tilings == "lstm")


def _fits_batch_tile_16(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel has enough registers for tiles of 16 sequences."""
    if problem.direction == "bwd" or problem.tilings == "lstm":
        return False
    if problem.norm_width and (problem.hidden > 256 or device.capability == 120):
        return False
    if problem.hidden > 512 and device.capability == 120:
        return False
    halves, zeros = product_kind(problem) == "16-bit", problem.reset_state == "zeros"
    return halves or (zeros and problem.hidden <= 512)
