"""Tilings of the "split_registers" kernels: each of several programs computes some units of the same sequences.

A program keeps the weights of its units in registers, as operands of mma.sync.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_bridge.cells import CELLS
from torch_bridge.tiling.arithmetic import cdiv
from torch_bridge.tiling.config import ExchangesWords, Tiling
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, product_kind
from torch_bridge.tiling.support import MIN_STEPS_ON_CHIP, has_16_bit_kernels

# Most hidden units by the units of a program. Eight warps then have 32 registers per thread for the weights of a gate.
WIDEST = {64: 256, 32: 512, 16: 1024}

# Microseconds per step of one tile, by sequences per tile: fixed; per program that shares the units; per megabyte that
# all programs exchange in a step; per 1e5 elements of the states of all tiles that run at once. Estimated from 250
# timings on an H100 (Triton 3.6) with 192 to 1024 units, with one tile and with as many as run at once, through L2.
STEP_COST = {
    ("gru", "fwd"): {8: (1.25, 0.016, 0.0, 0.6), 16: (1.57, 0.028, 0.0, 0.6)},
    ("gru", "bwd"): {8: (1.2, 0.02, 0.35, 0.6)},
    ("lstm", "fwd"): {8: (1.38, 0.018, 0.0, 0.7)},
    ("lstm", "bwd"): {8: (1.38, 0.02, 0.35, 0.4)},
}
# Without a reset, eight sequences of 1024 steps and 256 units take 0.955 of the time with the kernel that finds pieces
# (through L2, H200). Fewer than 256 steps were not measured.
FEWEST_STEPS = 256
# Fewest pieces for which all programs together are faster, although they slow one another down. On an H200, eight
# sequences of 256 steps and 1024 units, of which there are two pieces, take 1.82 ms instead of 1.75 ms without resets,
# and 1.88 ms with 1 % of resets.
FEWEST_PIECES = 4
# Microseconds until a program has loaded the weights of a model.
START_US = 20.0
# Sequences of a tile for which clusters were measured. With 16, the mailbox of 16 programs would exceed 48 KB, which is
# the most that ptxas allows.
CLUSTER_BATCH = 8
# Fewest pieces in clusters over those through L2. With 7 in place of 13, eight sequences of 1024 steps and 320 units
# take 0.74 of the time with 1 % of resets, and 1.02 of it with episodes of 52 steps.
SHARE_OF_PIECES_IN_CLUSTERS = 0.5


@dataclass(frozen=True)
class SplitRegisters(ExchangesWords):
    """A tiling of the "split_registers" kernels."""

    block_h: int
    block_b: int
    splits: int
    pieces: int = 1
    cluster: int = 1

    loop = "split_registers"
    num_warps = 8

    @property
    def block_k(self) -> int:
        """All units that a program has weights for."""
        return WIDEST[self.block_h]

    def fewest_steps(self, problem: Problem) -> int:
        """Returns `FEWEST_STEPS`, whose comment has the measurement."""
        return FEWEST_STEPS

    def room(self, device: Device) -> int:
        """Returns the number of tiles that run at once, one program an SM."""
        return super().room(device) if self.cluster == 1 else device.clusters_at_once(self.cluster)

    def workers(self, problem: Problem, device: Device) -> int:
        """Returns the number of workers; clusters need not run at once, and each has one tile."""
        if self.cluster > 1:
            return problem.models * self.tiles(problem)
        return super().workers(problem, device)

    def in_pieces(self, problem: Problem, device: Device) -> SplitRegisters:
        """Returns the tiling in pieces if resets cut sequences, and with or without resets in clusters.

        Clusters are taken if all tiles run at once, and at least SHARE_OF_PIECES_IN_CLUSTERS times as many pieces. A
        step of eight sequences and 256 units then takes 0.84 us in place of 1.26 us forward and 1.14 us in place of
        1.32 us backward (GRU, 4 programs, H200), and one of one sequence and 512 units 0.79 in place of 1.18 us and
        0.96 in place of 1.65 us (16 programs). Where they do not, it takes 1.1 to 1.6 times as long as through L2.
        """
        through_l2 = super().in_pieces(problem, device)
        clusters, tiles = replace(self, cluster=self.splits), problem.models * self.tiles(problem)
        if self.block_b != CLUSTER_BATCH or tiles > clusters.room(device) or _spills_in_clusters(problem, device):
            return through_l2
        in_clusters = Tiling.in_pieces(clusters, problem, device)
        enough = in_clusters.pieces >= SHARE_OF_PIECES_IN_CLUSTERS * through_l2.pieces
        return in_clusters if enough else through_l2

    def fewest_pieces(self, problem: Problem, device: Device) -> int:
        """Returns `FEWEST_PIECES`, and none where the kernel has too few registers.

        With Triton 3.7, an LSTM spills 8 to 16 bytes for more than 512 units and for unaligned widths, and 8 with reset
        states per step in large clusters (14 and 16 programs). From compute capability 10.0 on, it spills up to 32
        bytes for any width, and a GRU 8 bytes for some.
        """
        stepped = self.cluster > 8 and problem.reset_state == "stepped"
        spills = problem.tilings == "lstm" and (problem.is_unaligned or problem.hidden > 512 or stepped)
        return 0 if spills or device.capability >= 100 else FEWEST_PIECES

    def shared_memory(self, problem: Problem) -> int:
        """Returns the bytes of a gate's weights on their way to registers, or of what the steps need, if more.

        These need the state, and the products of each group of warps. A mailbox adds to the larger one.
        """
        state = (2 * self.block_k + 512 * CELLS[problem.cell].gates) * self.block_b
        needed = max(2 * self.block_h * self.block_k, state if problem.direction == "fwd" else 0) + 1024
        return needed + (8 * self.splits * self.block_b * (self.block_h + 1) + 2048 if self.cluster > 1 else 0)

    def estimated_us(self, problem: Problem, device: Device) -> float:
        """Estimates the microseconds per step of all sequences, with a share of the time to load the weights."""
        rounds = self.rounds(problem, device)
        loads = min(rounds, problem.models)  # a program loads the weights of a model once
        return rounds * self.tile_us(problem, device) + loads * START_US / problem.steps

    def tile_us(self, problem: Problem, device: Device) -> float:
        """Estimates the microseconds per step of one tile."""
        fixed, per_program, per_megabyte, per_state = STEP_COST[problem.tilings, problem.direction][self.block_b]
        states = self.workers(problem, device) * self.block_b * self.splits * self.block_h
        exchanged = 4 * self.splits * states  # bytes: for each of its states, a program gets a word from every program
        return fixed + per_program * self.splits + per_megabyte * exchanged / 1e6 + per_state * states / 1e5


def split_registers_configs(problem: Problem, device: Device) -> list[tuple[float, SplitRegisters]]:
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
    tiles = (8, 16) if _fits_batch_tile_16(problem, device) else (8,)
    configs = [SplitRegisters(units, block_b, splits) for block_b in tiles]
    return [(config.rounds(problem, device) * config.tile_us(problem, device), config) for config in configs]


def _spills(problem: Problem, units: int) -> bool:
    """Returns whether the kernel has too few registers even for tiles of 8 sequences."""
    if problem.direction == "bwd" or problem.reset_state != "stepped" or not problem.is_unaligned:
        return False
    return units == 32 or (units == 64 and problem.tilings == "lstm")


def _spills_in_clusters(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel of a cluster has too few registers, but for pieces (`fewest_pieces`).

    With Triton 3.7, from compute capability 10.0 on, an LSTM spills up to 32 bytes backward for up to 256 units if
    these are no multiple of four, and 8 bytes forward with reset states per step on 12.0 (384 and 512 units).
    """
    stepped = problem.reset_state == "stepped"
    return device.capability >= 100 and problem.tilings == "lstm" and (problem.is_unaligned or stepped)


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
