"""Tilings of the "streamed" loop, which is written in Triton and runs every problem."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch_bridge.cells import CELLS
from torch_bridge.tiling.arithmetic import cdiv, power_of_2
from torch_bridge.tiling.config import OneProgram, SharedUnits, Workspace
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, cost_key, product_kind

# Warps of a streamed program that keeps all weights on chip, by the width of its block: (if the hidden size fills the
# block, if it does not). Each number of warps is as fast as any that does not spill. A width, or its second number, is
# missing if every number of warps spills.
WARPS: dict[tuple[str, str, str], dict[int, tuple[int, ...]]] = {
    ("gru", "tf32", "fwd"): {16: (1, 1), 32: (2, 2), 64: (4, 4), 128: (8, 8)},
    ("gru", "tf32", "bwd"): {16: (1, 1), 32: (2, 2), 64: (4, 4), 128: (8, 8)},
    ("gru", "tf32x3", "fwd"): {16: (1, 1), 32: (2, 2), 64: (4, 8)},
    ("gru", "tf32x3", "bwd"): {16: (1, 1), 32: (2, 2), 64: (8, 8)},
    ("gru", "16-bit", "fwd"): {16: (1, 1), 32: (2, 2), 64: (4, 8), 128: (8, 8)},
    ("gru", "16-bit", "bwd"): {16: (2, 2), 32: (2, 2), 64: (4, 4), 128: (8, 8)},
    ("lstm", "tf32", "fwd"): {16: (2, 2), 32: (2, 2), 64: (4, 4)},
    ("lstm", "tf32", "bwd"): {16: (1, 1), 32: (4, 4), 64: (4, 4)},
    ("lstm", "tf32x3", "fwd"): {16: (2, 2), 32: (2, 2), 64: (4, 8)},
    ("lstm", "tf32x3", "bwd"): {16: (1, 1), 32: (2, 2)},
    ("lstm", "16-bit", "fwd"): {16: (2, 2), 32: (2, 2), 64: (4, 4), 128: (8, 8)},
    ("lstm", "16-bit", "bwd"): {16: (1, 1), 32: (4, 4), 64: (8, 8), 128: (16,)},
}
# Entries that differ on GPUs other than Hopper, where the products read the weights from registers.
NON_HOPPER_WARPS = {
    ("gru", "tf32", "bwd"): {64: (8, 8)},
    ("gru", "tf32x3", "fwd"): {64: (8, 8)},
    ("lstm", "tf32x3", "fwd"): {64: (8, 8)},
}
# Tilings (block_h, block_b, block_k, num_warps, num_stages) that do not spill with Triton 3.6 to 3.9. `TILINGS` are
# for any problem on any device. `HOPPER_TILINGS` are additional tilings on Hopper for common problems
# (`Problem.has_only_common_arrays`) whose hidden size is a multiple of `block_k`.
TILINGS = {
    ("gru", "tf32", "fwd"): ((16, 16, 32, 4, 2), (64, 16, 32, 8, 2)),
    ("gru", "tf32", "bwd"): ((16, 16, 64, 8, 3), (64, 16, 64, 4, 4), (64, 32, 64, 8, 4)),
    ("gru", "tf32x3", "fwd"): ((16, 16, 16, 4, 3), (16, 32, 32, 4, 4), (64, 16, 16, 8, 3)),
    ("gru", "tf32x3", "bwd"): ((16, 16, 32, 4, 3), (16, 32, 32, 4, 4), (64, 16, 32, 8, 4)),
    ("gru", "16-bit", "fwd"): ((16, 16, 32, 8, 2), (64, 16, 32, 8, 2)),
    ("gru", "16-bit", "bwd"): ((16, 16, 128, 4, 4), (64, 16, 64, 4, 4), (64, 32, 64, 8, 4)),
    ("lstm", "tf32", "fwd"): ((16, 32, 64, 8, 3),),
    ("lstm", "tf32", "bwd"): ((64, 16, 32, 8, 4), (64, 16, 64, 8, 3)),
    ("lstm", "tf32x3", "fwd"): ((16, 32, 16, 4, 4),),
    ("lstm", "tf32x3", "bwd"): ((16, 16, 32, 4, 3), (16, 32, 32, 4, 4), (64, 16, 32, 8, 3)),
    ("lstm", "16-bit", "fwd"): ((16, 32, 32, 4, 2),),
    ("lstm", "16-bit", "bwd"): ((16, 16, 32, 4, 3), (64, 16, 64, 4, 4), (64, 32, 64, 8, 4)),
}
HOPPER_TILINGS = {
    ("gru", "tf32", "fwd"): ((16, 16, 32, 4, 3), (32, 16, 32, 4, 3), (64, 16, 32, 8, 3), (64, 32, 32, 8, 4)),
    ("gru", "tf32", "bwd"): ((32, 16, 64, 4, 4),),
    ("gru", "tf32x3", "fwd"): ((64, 16, 32, 8, 3), (64, 32, 16, 8, 3)),
    ("gru", "tf32x3", "bwd"): ((64, 32, 32, 8, 4),),
    ("gru", "16-bit", "fwd"): ((16, 16, 32, 8, 3), (64, 16, 64, 8, 3), (64, 32, 64, 8, 3)),
    ("gru", "16-bit", "bwd"): ((64, 64, 32, 8, 3),),
    ("lstm", "tf32", "fwd"): ((64, 32, 32, 8, 3),),
    ("lstm", "tf32", "bwd"): ((16, 16, 64, 8, 3), (32, 16, 64, 4, 4), (64, 32, 32, 8, 4), (64, 32, 64, 8, 3)),
    ("lstm", "tf32x3", "fwd"): ((64, 16, 32, 8, 3), (64, 32, 16, 8, 4)),
    ("lstm", "tf32x3", "bwd"): ((64, 32, 32, 8, 4),),
    ("lstm", "16-bit", "fwd"): ((16, 32, 32, 4, 4), (64, 16, 64, 8, 3), (64, 32, 64, 8, 3)),
}
# Replacements for tilings that spill if the hidden size is not a multiple of `block_k`, because masks take registers.
PARTIAL_BLOCK_TILINGS = {
    ("lstm", "16-bit", "bwd"): {(64, 16, 64, 4, 4): (64, 16, 32, 8, 4), (64, 32, 64, 8, 4): (64, 32, 32, 8, 4)},
}
# Tilings for unaligned problems; and where some of them spill, how many of the first ones do not.
UNALIGNED_TILINGS = ((16, 16, 16, 8, 2), (32, 16, 16, 8, 2), (64, 16, 16, 8, 2))
UNALIGNED_COUNTS = {("gru", "tf32x3", "fwd"): 2, ("lstm", "tf32x3", "fwd"): 1}
# The tiling for hidden sizes that are too wide for the tilings above. Unaligned problems take the last of
# `UNALIGNED_TILINGS` in its place, even where it spills, because every narrower one needs more programs than there are
# multiprocessors.
WIDEST_TILING = (64, 16, 32, 8, 3)
# Microseconds per step of one tile: fixed, per 100 KB of exchanged state, per 100 KB of weights, per million
# multiply-adds. Fitted to 330 timings on an H200 (Triton 3.6) with B from 8 to 2048 and H from 128 to 1024. Among the
# tilings that were timed, the one with the lowest estimate was the fastest or within 26 % of the fastest. Not all of
# the tilings above were timed.
STEP_COST = {
    ("tf32", "fwd"): (3.6, 2.7, 0.64, 1.3),
    ("tf32", "bwd"): (5.2, 2.5, 0.67, 0.61),
    ("tf32x3", "fwd"): (5.5, 0.0, 0.0, 9.9),
    ("tf32x3", "bwd"): (6.2, 6.4, 2.1, 5.3),
    ("16-bit", "fwd"): (3.8, 4.7, 0.39, 0.70),
    ("16-bit", "bwd"): (4.7, 2.7, 0.86, 0.07),
}
# Costs of a step of the "streamed" loop if several programs share the units, on GPUs without wgmma. The six costs are
# in microseconds:
# - four per tile, as in `STEP_COST`: fixed; per 100 KB of exchanged state; per 100 KB of weights; per million
#   multiply-adds;
# - per tile and 100 programs that share it;
# - per 1e5 elements of the state of all tiles.
# Fitted to 448 timings of the tilings that are chosen for an A100 and an RTX 3090, run on an H200 from the PTX for
# those GPUs (Triton 3.6). The fit is within 17 %, except for the forward pass of the GRU in "tf32x3". `STEP_COST`
# itself ranks tilings, but does not predict their time on these GPUs.
STREAMED_STEP_COST = {
    ("gru", "tf32", "fwd"): (2.8, 0.0, 2.4, 0.0, 14.0, 1.3),
    ("gru", "tf32", "bwd"): (2.1, 3.5, 0.56, 0.0, 17.0, 1.8),
    ("gru", "16-bit", "fwd"): (3.1, 0.0, 3.1, 0.0, 19.0, 0.53),
    ("gru", "16-bit", "bwd"): (1.4, 3.8, 0.84, 0.0, 5.2, 1.8),
    ("gru", "tf32x3", "fwd"): (4.1, 0.0, 6.7, 0.0, 18.0, 0.0),
    ("gru", "tf32x3", "bwd"): (2.6, 13.0, 3.6, 0.0, 0.0, 2.3),
    ("lstm", "tf32", "fwd"): (2.7, 0.0, 5.1, 0.0, 0.0, 0.43),
    ("lstm", "tf32", "bwd"): (2.7, 0.0, 2.6, 0.0, 0.0, 1.8),
    ("lstm", "16-bit", "fwd"): (2.0, 0.0, 0.0, 6.9, 0.0, 0.29),
    ("lstm", "16-bit", "bwd"): (2.8, 4.5, 0.16, 0.0, 19.0, 1.3),
    ("lstm", "tf32x3", "fwd"): (2.4, 0.0, 9.0, 0.0, 0.0, 2.5),
    ("lstm", "tf32x3", "bwd"): (2.9, 13.0, 3.8, 0.0, 0.0, 2.8),
}
# The same costs on GPUs with wgmma, for the keys for which `STEP_COST` is too low there: by up to a factor of three for
# the LSTM of more than 512 units. Other keys use `STEP_COST`. Fitted to 40 timings on an H100 (Triton 3.6) with 1 to
# 1024 sequences and 1024 or 1536 units; the fit is within 25 % for 1024 units. The entry of
# "tf32x3" is estimated from the suite `choice`.
HOPPER_STREAMED_STEP_COST = {
    ("gru", "tf32x3", "fwd"): (5.5, 0.0, 0.0, 12.0, 0.0, 0.0),
    ("lstm", "tf32", "fwd"): (2.2, 10.0, 1.1, 0.0, 0.0, 0.0),
    ("lstm", "tf32", "bwd"): (0.0, 0.0, 0.0, 3.9, 33.0, 0.0),
    ("lstm", "16-bit", "fwd"): (3.7, 0.0, 0.59, 1.1, 8.0, 0.0),
    ("lstm", "16-bit", "bwd"): (0.0, 3.0, 1.0, 0.0, 27.0, 0.17),
}


@dataclass(frozen=True)
class Streamed(OneProgram):
    """A tiling of the "streamed" loop whose programs have all units."""

    block_h: int
    block_b: int
    num_warps: int

    loop = "streamed"
    prepares_weights = False

    def shared_memory(self, problem: Problem) -> int:
        """Returns an upper bound on the bytes of the weights and of a tile's states."""
        copies = 2 if problem.precision == "tf32x3" else 1
        weights = CELLS[problem.cell].gates * self.block_h * self.block_h * _operand_size(problem)
        return copies * weights + 16 * self.block_h * self.block_b


@dataclass(frozen=True)
class SharedStreamed(SharedUnits):
    """A tiling of the "streamed" loop whose programs share the units and read the weights at every step."""

    block_h: int
    block_b: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int

    loop = "streamed"
    prepares_weights = False

    def workspaces(self, problem: Problem, device: Device) -> list[Workspace]:
        """Returns two buffers of states or gate gradients, those of the sums of a norm, and counters of barriers.

        The interpreter runs the programs of a step one after the other, and needs no barrier.
        """
        forward, cell = problem.direction == "fwd", CELLS[problem.cell]
        rows = 2 * problem.groups * problem.batch
        exchange = rows * problem.hidden * (1 if forward else cell.gates)
        arrays = [("exchange", exchange, problem.operand_dtype, False)]
        if problem.norm_width:
            parts = (2 if forward and cell.norm == "layer" else 1) * self.splits
            arrays.append(("sums", rows * parts, "float32", False))
        if not device.interpreted:
            arrays.append(("barrier", self.workers(problem, device), "int32", True))
        return arrays

    def shared_memory(self, problem: Problem) -> int:
        """Returns an upper bound on the bytes of the pipeline stages and of a tile's states."""
        size = _operand_size(problem)
        rows = CELLS[problem.cell].gates * self.block_h if problem.direction == "fwd" else self.block_h
        stage = (rows + self.block_b) * self.block_k * size
        return self.num_stages * stage + (8 if size == 4 else 20) * self.block_h * self.block_b

    def estimated_us(self, problem: Problem, device: Device) -> float:
        """Estimates the microseconds per step of all sequences."""
        key = cost_key(problem)
        rounds = self.rounds(problem, device)  # most tiles that one group of programs runs, one after the other
        costs = HOPPER_STREAMED_STEP_COST if device.has_wgmma else STREAMED_STEP_COST
        if key not in costs:
            return rounds * self.tile_cost(problem, STEP_COST[product_kind(problem), problem.direction])
        *per_tile, per_program, per_state = costs[key]
        us_per_tile = self.tile_cost(problem, tuple(per_tile)) + per_program * self.splits / 100
        return rounds * us_per_tile + per_state * problem.models * problem.sequences * problem.hidden / 1e5

    def tile_cost(self, problem: Problem, cost: tuple[float, ...]) -> float:
        """Returns the microseconds per step of one tile, where `cost` has the format of the entries of `STEP_COST`."""
        fixed, per_state, per_weight, per_product = cost
        gates, row = CELLS[problem.cell].gates, problem.hidden * _operand_size(problem) / 1e5
        state = self.block_b * row * (1 if problem.direction == "fwd" else gates)
        products = gates * self.block_h * self.block_b * problem.hidden / 1e6
        return fixed + per_state * state + per_weight * gates * self.block_h * row + per_product * products


def _operand_size(problem: Problem) -> int:
    """Returns the bytes of an element of the matmul operands."""
    return 4 if problem.operand_dtype == "float32" else 2


def max_hidden(device: Device) -> int:
    """Returns the largest hidden size that has a tiling."""
    return WIDEST_TILING[0] * device.multiprocessors


def single_program_configs(problem: Problem, device: Device) -> list[Streamed]:
    """Returns the streamed tilings with one program per tile, the fastest first, if a program can hold all weights.

    The latency of a step is the bottleneck, so tiles are small while all of them run at once. On an H200, a step of a
    GRU with H=128, T=128 and B=64 takes 2.0 us with tiles of 8 sequences and 4.0 us with tiles of 16. With B=2048, all
    tiles run at once only if they have 16 sequences, unless two programs fit on an SM. With 128 units, the
    loop "resident" precedes this one, except in float16, at `HIGHEST` precision, for a single step, and for the simple
    cell with a ReLU.
    """
    block = max(16, power_of_2(problem.hidden))
    even = problem.hidden == block
    key = cost_key(problem)
    by_block = WARPS[key] | ({} if device.has_wgmma else NON_HOPPER_WARPS.get(key, {}))
    warps = by_block.get(block, ())[0 if even else 1 :]
    if not warps or (key == ("gru", "tf32x3", "bwd") and block == 64 and problem.is_unaligned):
        return []  # the second case spills
    small, large = Streamed(block, 8, warps[0]), Streamed(block, 16, 8)
    if small.shared_memory(problem) > device.shared_memory:
        return []
    side_by_side = device.multiprocessors * (device.shared_memory // small.shared_memory(problem))
    # on GPUs other than Hopper, or with masks, the larger tile spills
    fits = block == 128 and even and device.has_wgmma and large.shared_memory(problem) <= device.shared_memory
    if not fits:
        return [small]
    return [large, small] if problem.models * small.tiles(problem) > side_by_side else [small, large]


def shared_configs(problem: Problem, device: Device) -> list[tuple[float, SharedStreamed]]:
    """Returns the streamed tilings whose programs share the units, each with its cost.

    The programs read the weights from L2 at every step. The cost is in microseconds per step of all tiles.
    """
    kind = product_kind(problem)
    ways: list[tuple[float, SharedStreamed]] = []
    key = cost_key(problem)
    tilings = UNALIGNED_TILINGS[: UNALIGNED_COUNTS.get(key)] if problem.is_unaligned else TILINGS[key]
    partly_filled = PARTIAL_BLOCK_TILINGS.get(key, {})
    tilings = tuple(partly_filled.get(x, x) if problem.hidden % x[2] else x for x in tilings)
    if problem.has_only_common_arrays and not problem.is_unaligned and device.has_wgmma:
        # the tilings for Hopper come first and win ties of cost, because they have more stages
        tilings = tuple(tiling for tiling in HOPPER_TILINGS.get(key, ()) if problem.hidden % tiling[2] == 0) + tilings
    if problem.hidden > max(tiling[0] for tiling in tilings) * device.multiprocessors:
        # on capability 8.6, two stages of WIDEST_TILING fit, and spill 32 bytes
        spills = key == ("lstm", "tf32x3", "fwd") and not device.has_wgmma
        tilings = (UNALIGNED_TILINGS[-1] if problem.is_unaligned or spills else WIDEST_TILING,)
    for block_h, block_b, block_k, num_warps, num_stages in tilings:
        splits = cdiv(problem.hidden, block_h)
        if not 1 < splits <= device.multiprocessors:
            continue
        # with one gate, 8 to 32 bytes spill on compute capability 12.0 for gradients of all states, or in float32
        more = "total_dh" in dict(problem.dtypes) or problem.has_wide_gates
        if block_b == 32 and CELLS[problem.cell].gates == 1 and more:
            continue
        # with a norm, 64 to 88 bytes spill with Triton 3.6, and a step of 2048 sequences of 128 units takes 21.4 us, in
        # the loop "fma" 18.1 (H200); for more units, which that does not run, other blocks are slower
        normed = problem.norm_width > 0 and key == ("gru", "tf32x3", "fwd")
        if normed and problem.hidden <= 128 and (block_h, block_b) == (64, 32):
            continue
        config = SharedStreamed(block_h, block_b, block_k, splits, num_warps, num_stages)
        while config.shared_memory(problem) > device.shared_memory and config.num_stages > 2:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        if config.shared_memory(problem) > device.shared_memory:
            continue
        step = config.tile_cost(problem, STEP_COST[kind, problem.direction])
        ways.append((config.rounds(problem, device) * step, config))
    return ways
