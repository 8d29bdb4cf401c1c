"""Tilings of the "streamed" loop, which is written in Triton and runs every problem."""

from __future__ import annotations

import dataclasses

from torch_bridge.cells import CELLS
from torch_bridge.tiling.arithmetic import cdiv, power_of_2
from torch_bridge.tiling.config import KernelConfig
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


def max_hidden(device: Device) -> int:
    """Returns the largest hidden size that has a tiling."""
    return WIDEST_TILING[0] * device.multiprocessors


def single_program_configs(problem: Problem, device: Device) -> list[KernelConfig]:
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
    small = KernelConfig(block, block_b=8, block_k=block, splits=1, num_warps=warps[0], num_stages=1)
    large = dataclasses.replace(small, block_b=16, num_warps=8)
    if small.shared_memory(problem) > device.shared_memory:
        return []
    side_by_side = device.multiprocessors * (device.shared_memory // small.shared_memory(problem))
    # on GPUs other than Hopper, or with masks, the larger tile spills
    fits = block == 128 and even and device.has_wgmma and large.shared_memory(problem) <= device.shared_memory
    if not fits:
        return [small]
    return [large, small] if problem.models * small.tiles(problem) > side_by_side else [small, large]


def shared_configs(problem: Problem, device: Device) -> list[tuple[float, KernelConfig]]:
    """Returns the streamed tilings whose programs share the units, each with its cost.

    The programs read the weights from L2 at every step. The cost is in microseconds per step of all tiles.
    """
    kind = product_kind(problem)
    ways: list[tuple[float, KernelConfig]] = []
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
        config = KernelConfig(block_h, block_b, block_k, splits, num_warps, num_stages)
        while config.shared_memory(problem) > device.shared_memory and config.num_stages > 2:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        if config.shared_memory(problem) > device.shared_memory:
            continue
        step = tile_cost(problem, config, STEP_COST[kind, problem.direction])
        ways.append((config.rounds(problem, device) * step, config))
    return ways


def tile_cost(problem: Problem, config: KernelConfig, cost: tuple[float, ...]) -> float:
    """Returns the microseconds per step of one tile, where `cost` has the format of the entries of `STEP_COST`."""
    fixed, per_state, per_weight, per_product = cost
    gates, row = CELLS[problem.cell].gates, problem.hidden * (2 if product_kind(problem) == "16-bit" else 4) / 1e5
    state = config.block_b * row * (1 if problem.direction == "fwd" else gates)
    products = gates * config.block_h * config.block_b * problem.hidden / 1e6
    return fixed + per_state * state + per_weight * gates * config.block_h * row + per_product * products


def estimated_us(problem: Problem, config: KernelConfig, device: Device) -> float:
    """Estimates the microseconds per step of all sequences in the streamed loop whose programs share the units."""
    key = cost_key(problem)
    rounds = config.rounds(problem, device)  # most tiles that one group of programs runs, one after the other
    costs = HOPPER_STREAMED_STEP_COST if device.has_wgmma else STREAMED_STEP_COST
    if key not in costs:
        return rounds * tile_cost(problem, config, STEP_COST[product_kind(problem), problem.direction])
    *per_tile, per_program, per_state = costs[key]
    us_per_tile = tile_cost(problem, config, tuple(per_tile)) + per_program * config.splits / 100
    return rounds * us_per_tile + per_state * problem.models * problem.sequences * problem.hidden / 1e5
