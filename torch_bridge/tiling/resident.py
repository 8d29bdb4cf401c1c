"""Tilings of the "resident" kernels: one program per tile of sequences, 16-bit weights in registers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch_bridge.cells import CELLS
from torch_bridge.tiling.arithmetic import cdiv
from torch_bridge.tiling.config import OneProgram
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, product_kind
from torch_bridge.tiling.support import has_16_bit_kernels, triton_version

# Ratio of the time per step of a tile of 16 sequences to that of a tile of 8. On an H200, a GRU of 2048 sequences, 256
# steps and 128 units in bfloat16 takes 1.67 ms with tiles of 16 instead of 1.89 ms with tiles of 8, which do not all
# run at once. In TF32, with tiles of 16 in the forward pass only, it takes 2.63 ms instead of 2.72 ms.
TILE16_COST_RATIO = 1.75


@dataclass(frozen=True)
class Resident(OneProgram):
    """A tiling of the "resident" kernels, which has 64 or 128 units."""

    block_h: int
    block_b: int
    pieces: int = 1

    loop = "resident"

    @property
    def num_warps(self) -> int:
        """One for each row of 16 units of a product."""
        return self.block_h // 16

    def fewest_steps(self, problem: Problem) -> int:
        """Returns 128, and for an LSTM 1024.

        Its steps take longer with the kernels that find pieces: without a reset, those of 16 sequences of 128 units 4 %
        forward and 5 % backward. A sequence of 1024 steps is rarely without one.
        """
        return 1024 if problem.tilings == "lstm" else super().fewest_steps(problem)

    def fewest_pieces(self, problem: Problem, device: Device) -> int:
        """Returns two, and none for tiles of several sequences, nor for an LSTM of an unaligned width.

        Where sequences leave SMs free, tiles are of one. With 127 units, an LSTM spills 8 bytes on Blackwell.
        """
        return 0 if self.block_b > 1 or (problem.tilings == "lstm" and problem.is_unaligned) else 2

    def shared_memory(self, problem: Problem) -> int:
        """Returns an upper bound, in bytes.

        It has weights on their way to registers, operands of two steps and, by warp, their bounds and sums of a norm.
        """
        operands = 1 if problem.direction == "fwd" else CELLS[problem.cell].gates
        return 2 * self.block_h**2 + 4 * operands * self.block_h * max(self.block_b, 8) + 192 * self.num_warps + 512


def resident_configs(problem: Problem, device: Device) -> list[Resident]:
    """Returns the tilings of the "resident" kernels if they support a problem: the fastest first, the others by size.

    Products have at least 8 columns, so smaller tiles waste a part of each, but loads and stores are the bottleneck. On
    an H100 with H=128 in TF32, a forward step of the GRU takes 0.47 us with one sequence per tile and 1.66 us with
    eight. Tiles are therefore as small as possible with at most one tile per SM. If there are more tiles of eight than
    SMs, tiles of sixteen may be faster.
    """
    if not 32 < problem.hidden <= 128 or not (device.runs_gluon and has_16_bit_kernels(problem)):
        return []
    block = 64 if problem.hidden <= 64 else 128
    tilings = [Resident(block, block_b) for block_b in (1, 2, 4, 8)]
    if _spills_at_batch_tile_8(problem, device):
        tilings.pop()
    one_round = (c for c in tilings if problem.models * c.tiles(problem) <= device.multiprocessors)
    best = next(one_round, tilings[-1])
    if _fits_batch_tile_16(problem):
        sixteens = dataclasses.replace(tilings[-1], block_b=16)
        tilings.append(sixteens)
        rounds, of_16 = (cdiv(problem.models * c.tiles(problem), device.multiprocessors) for c in (best, sixteens))
        best = best if rounds <= TILE16_COST_RATIO * of_16 else sixteens
    return [best, *(c for c in tilings if c != best)]


def _spills_at_batch_tile_8(problem: Problem, device: Device) -> bool:
    """Whether the "resident" kernel has too few registers for tiles of eight sequences."""
    if not 64 < problem.hidden <= 128:
        return False
    if problem.norm_width:  # with 127 units in TF32, 8 bytes spill on compute capability 12.0
        return problem.direction == "bwd" and problem.is_unaligned and device.capability == 120
    if problem.tilings != "lstm":
        return False
    old, new, in_16_bits = triton_version() < (3, 7), triton_version() > (3, 7), product_kind(problem) == "16-bit"
    forward, is_full = problem.direction == "fwd", problem.hidden == 128
    if forward:  # with 127 units, 8 bytes spill with 16-bit operands and 16 bytes in TF32
        # 8 bytes spill in TF32 with a reset state per step on compute capability 10.0 and newer, in tangents on 12.0
        lowest = 100 if problem.reset_state == "stepped" else 120 if problem.tangent else None
        spills_in_tf32 = lowest is not None and device.capability >= lowest
        return problem.is_unaligned or (spills_in_tf32 and not in_16_bits)
    if problem.has_only_common_arrays:
        return False
    # without wgmma, 8 to 80 bytes spill for unaligned widths, and 24 bytes in TF32 for 128 units on compute capability
    # 12.0 (the figures are of Triton 3.7)
    if not device.has_wgmma and (problem.is_unaligned or (is_full and device.capability == 120 and not in_16_bits)):
        return True
    # below 128 units, Triton 3.7 alone does not spill; others do in TF32 if newer, else for unaligned widths
    return not is_full and (problem.is_unaligned and (old or new) if in_16_bits else new)


def _fits_batch_tile_16(problem: Problem) -> bool:
    """Whether the "resident" kernel has enough registers for tiles of 16 sequences, or spills only a few.

    There is none with a norm or for a tangent, whose values by sequence have the layout of tiles of eight. With
    gradients of gates in float32 beside 16-bit operands, 24 bytes more spill on compute capability 12.0.
    """
    if problem.has_wide_gates:
        return False
    gru = problem.tilings == "gru" and problem.hidden == 128 and not problem.norm_width and not problem.tangent
    return gru and problem.has_only_common_arrays and (problem.direction == "fwd" or product_kind(problem) == "16-bit")
