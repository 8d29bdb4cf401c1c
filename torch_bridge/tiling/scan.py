"""Estimates whether `lax.scan` in XLA is faster than the kernel of a problem."""

from __future__ import annotations

from torch_bridge.cells import CELLS
from torch_bridge.tiling.candidates import heuristic
from torch_bridge.tiling.config import KernelConfig
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, product_kind
from torch_bridge.tiling.streamed import STEP_COST, tile_cost

# Costs of a step of all sequences in `jaxrnn._bridge.scan_launch`, by cell, kind of product and direction. With H units
# and N sequences over all models, the five costs are in microseconds:
# - fixed;
# - per H / 1024 * sqrt(min(N, 256) / 256);
# - per 1e5 elements of the state, N * H;
# - per 1e8 multiply-adds of one gate, N * H^2;
# - per 1e6 weights of one gate, H^2, only if each model has one sequence, so that products are matrix-vector products.
# Fitted to 180 timings on an H200 (jax 0.11.2) with 1 to 4096 sequences and 256 to 1024 units. The fit is within 22 %,
# mostly within 10 %.
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
# 1024 sequences and 1024 or 1536 units. The fit is within 25 % for 1024 units.
HOPPER_STREAMED_STEP_COST = {
    ("lstm", "tf32", "fwd"): (2.2, 10.0, 1.1, 0.0, 0.0, 0.0),
    ("lstm", "tf32", "bwd"): (0.0, 0.0, 0.0, 3.9, 33.0, 0.0),
    ("lstm", "16-bit", "fwd"): (3.7, 0.0, 0.59, 1.1, 8.0, 0.0),
    ("lstm", "16-bit", "bwd"): (0.0, 3.0, 1.0, 0.0, 27.0, 0.17),
}
# Bytes of weights that a scan of several models reads from GPU memory per microsecond; these reads are its bottleneck.
WEIGHT_BYTES_PER_US = 2.5e6
# Estimated speedup from which a scan is preferred. The host launches the kernels of every step of a scan, and most
# hosts are slower than the host of the H200 on which the costs were measured.
SCAN_MARGIN = 1.1


def prefers_scan(problem: Problem, device: Device) -> bool:
    """Whether `lax.scan` is estimated to be faster than the kernel that `heuristic` chooses for a problem.

    A scan is considered only if the programs of the chosen kernel stream their weights from L2 at every step; other
    kernels are faster. The benchmark suite `choice` times both and checks the decision.
    """
    config = heuristic(problem, device)
    streams_weights = config.loop == "streamed" and config.splits > 1
    if not streams_weights or device.interpreted:
        return False
    return SCAN_MARGIN * _scan_us(problem) < _streamed_us(problem, config, device)


def _scan_us(problem: Problem) -> float:
    """Estimates the microseconds per step of all sequences with `lax.scan`."""
    fixed, per_width, per_state, per_product, per_weight = SCAN_STEP_COST[_cost_key(problem)]
    all_sequences, hidden = problem.models * problem.sequences, problem.hidden
    width = hidden / 1024 * (min(all_sequences, 256) / 256) ** 0.5
    cost = fixed + per_width * width + per_state * all_sequences * hidden / 1e5
    cost += per_product * all_sequences * hidden**2 / 1e8
    if problem.sequences == 1:
        cost += per_weight * hidden**2 / 1e6
    weight_bytes = CELLS[problem.cell].gates * hidden**2 * (2 if product_kind(problem) == "16-bit" else 4)
    return cost + (problem.models - 1) * weight_bytes / WEIGHT_BYTES_PER_US  # the first model's weights are in the fit


def _streamed_us(problem: Problem, config: KernelConfig, device: Device) -> float:
    """Estimates the microseconds per step of all sequences in the streamed loop whose programs share the units."""
    key = _cost_key(problem)
    rounds = config.rounds(problem, device)  # most tiles that one group of programs runs, one after the other
    costs = HOPPER_STREAMED_STEP_COST if device.has_wgmma else STREAMED_STEP_COST
    if key not in costs:
        return rounds * tile_cost(problem, config, STEP_COST[product_kind(problem), problem.direction])
    *per_tile, per_program, per_state = costs[key]
    us_per_tile = tile_cost(problem, config, tuple(per_tile)) + per_program * config.splits / 100
    return rounds * us_per_tile + per_state * problem.models * problem.sequences * problem.hidden / 1e5


def _cost_key(problem: Problem) -> tuple[str, str, str]:
    """Returns the key of a problem in the tables of this file: cell (whose costs apply), product and direction."""
    return problem.tilings, product_kind(problem), problem.direction
