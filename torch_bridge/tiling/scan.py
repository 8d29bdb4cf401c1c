"""Whether `lax.scan` is faster than the kernel of a problem: estimates of both."""

from __future__ import annotations

from torch_bridge.cells import CELLS
from torch_bridge.tiling.candidates import heuristic
from torch_bridge.tiling.config import KernelConfig
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, product_kind
from torch_bridge.tiling.streamed import STEP_COST, tile_cost

# Microseconds per step with `jaxrnn.scan_launch`, by cell, kind of product and direction: fixed; per 1024 units and
# sqrt(sequences / 256), where more than 256 sequences count as 256; per 1e5 elements of the state; per 1e8
# multiply-adds of a gate; and per 1e6 weights of a gate if a model has one sequence, so that products are matrix-vector
# products. Fitted to 180 timings on an H200 (jax 0.11.2) with 1 to 4096 sequences and 256 to 1024 units. The fit is
# within 22 %, mostly within 10 %.
SCAN_STEP_COST = {
    ("gru", "tf32", "fwd"): (10.0, 8.9, 3.6, 0.92, 1.1),
    ("gru", "tf32", "bwd"): (7.3, 13.0, 3.3, 0.69, 9.5),
    ("gru", "16-bit", "fwd"): (10.0, 5.9, 3.2, 0.59, 1.3),
    ("gru", "16-bit", "bwd"): (7.7, 5.6, 2.8, 0.38, 8.5),
    ("gru", "tf32x3", "fwd"): (15.0, 3.8, 1.8, 15.0, 0.0),
    ("gru", "tf32x3", "bwd"): (9.9, 12.0, 3.9, 11.0, 0.0),
    ("lstm", "tf32", "fwd"): (13.0, 6.7, 4.8, 1.4, 1.0),
    ("lstm", "tf32", "bwd"): (7.9, 12.0, 3.3, 1.7, 12.0),
    ("lstm", "16-bit", "fwd"): (13.0, 5.7, 4.1, 1.1, 1.9),
    ("lstm", "16-bit", "bwd"): (8.6, 7.7, 2.4, 0.87, 13.0),
    ("lstm", "tf32x3", "fwd"): (15.0, 14.0, 3.7, 16.0, 0.0),
    ("lstm", "tf32x3", "bwd"): (9.6, 12.0, 4.0, 15.0, 0.0),
}
# Microseconds per step of the streamed loop whose programs share the units, on GPUs without wgmma. Costs per tile:
# fixed; per 100 KB of exchanged state; per 100 KB of weights; per million multiply-adds; per 100 programs that share
# the tile. The last figure is per 1e5 elements of the state of all tiles. Fitted to 448 timings of the tilings that are
# chosen for an A100 and an RTX 3090, run on an H200 with the code for those GPUs (Triton 3.6). The fit is within 17 %,
# except for the forward pass of the GRU in "tf32x3". `STEP_COST` ranks tilings, but does not give their time on these
# GPUs.
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
# The same on GPUs with wgmma, where `STEP_COST` is too low by up to a factor of three for the LSTM of more than 512
# units. Fitted to 40 timings on an H100 (Triton 3.6) with 1 to 1024 sequences and 1024 or 1536 units. The fit is within
# 25 % for 1024 units.
HOPPER_STREAMED_STEP_COST = {
    ("lstm", "tf32", "fwd"): (2.2, 10.0, 1.1, 0.0, 0.0, 0.0),
    ("lstm", "tf32", "bwd"): (0.0, 0.0, 0.0, 3.9, 33.0, 0.0),
    ("lstm", "16-bit", "fwd"): (3.7, 0.0, 0.59, 1.1, 8.0, 0.0),
    ("lstm", "16-bit", "bwd"): (0.0, 3.0, 1.0, 0.0, 27.0, 0.17),
}
# Bytes of weights per microsecond that the memory of a GPU delivers; a scan of several models waits for the weights.
WEIGHT_BYTES_PER_US = 2.5e6
# Estimated speedup from which a scan is preferred. The host launches the steps of a scan, and most hosts are slower
# than that of the H200.
SCAN_MARGIN = 1.1


def prefers_scan(problem: Problem, device: Device) -> bool:
    """Whether `lax.scan` is estimated to be faster than the kernel that `heuristic` chooses for a problem.

    A scan can be faster only if the programs of the chosen kernel stream their weights from L2 at every step. The
    benchmark `choice` checks the decision against the faster of the two.
    """
    config = heuristic(problem, device)
    if config.loop != "streamed" or config.splits == 1 or device.interpreted:
        return False
    return SCAN_MARGIN * _scan_us(problem) < _streamed_us(problem, config, device)


def _scan_us(problem: Problem) -> float:
    """Estimates the microseconds per step of all sequences with `lax.scan`."""
    fixed, per_root, per_state, per_product, per_weight = SCAN_STEP_COST[_cost_key(problem)]
    sequences, hidden = problem.models * problem.sequences, problem.hidden
    root = hidden / 1024 * (min(sequences, 256) / 256) ** 0.5
    step = fixed + per_root * root + per_state * sequences * hidden / 1e5
    step += per_product * sequences * hidden**2 / 1e8
    if problem.sequences == 1:
        step += per_weight * hidden**2 / 1e6
    size = 2 if product_kind(problem) == "16-bit" else 4
    return step + (problem.models - 1) * CELLS[problem.cell].gates * hidden**2 * size / WEIGHT_BYTES_PER_US


def _streamed_us(problem: Problem, config: KernelConfig, device: Device) -> float:
    """Estimates the microseconds per step of all sequences in the streamed loop whose programs share the units."""
    rounds, costs = config.rounds(problem, device), STREAMED_STEP_COST
    if device.has_wgmma:
        costs = HOPPER_STREAMED_STEP_COST
        if _cost_key(problem) not in costs:
            return rounds * tile_cost(problem, config, STEP_COST[product_kind(problem), problem.direction])
    *per_tile, per_program, per_state = costs[_cost_key(problem)]
    tile = tile_cost(problem, config, tuple(per_tile)) + per_program * config.splits / 100
    return rounds * tile + per_state * problem.models * problem.sequences * problem.hidden / 1e5


def _cost_key(problem: Problem) -> tuple[str, str, str]:
    return problem.tilings, product_kind(problem), problem.direction
