"""Estimates whether a scan, a loop over steps in XLA, is faster than the kernel of a problem."""

from __future__ import annotations

from torch_bridge.cells import CELLS
from torch_bridge.tiling.candidates import heuristic
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, cost_key, product_kind
from torch_bridge.tiling.split_registers import SplitRegisters
from torch_bridge.tiling.streamed import SharedStreamed

# Costs of a step of all sequences in `jaxrnn._bridge.scan_launch`, by cell, kind of product and direction. With H units
# and N sequences over all models, the five costs are in microseconds:
# - fixed;
# - per H / 1024 * sqrt(min(N, 256) / 256);
# - per 1e5 elements of the state, N * H;
# - per 1e8 multiply-adds of one gate, N * H^2;
# - per 1e6 weights of one gate, H^2, only if each model has one sequence, so that products are matrix-vector products.
# Fitted to 180 timings of `lax.scan` on an H200 (jax 0.11.2) with 1 to 4096 sequences and 256 to 1024 units. The fit is
# within 22 %, mostly within 10 %. Four steps per iteration take up to 16 % less (docs/design/wide_states.md).
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
# Bytes of weights that a scan of several models reads from GPU memory per microsecond; these reads are its bottleneck.
WEIGHT_BYTES_PER_US = 2.5e6
# Estimated speedup from which a scan is preferred. The host launches the kernels of every step of a scan, and most
# hosts are slower than the host of the H200 on which the costs were measured.
SCAN_MARGIN = 1.1


def prefers_scan(problem: Problem, device: Device) -> bool:
    """Returns whether a scan is estimated to take less time than the kernel that `heuristic` chooses for a problem.

    A scan is considered only if the programs of the chosen kernel stream their weights from L2 at every step, or if
    they run few sequences at once ("split_registers"); other kernels are faster. The benchmark suite `choice` times
    both and checks the decision.
    """
    config = heuristic(problem, device)
    if device.interpreted or not isinstance(config, SharedStreamed | SplitRegisters):
        return False
    return SCAN_MARGIN * _scan_us(problem) < config.estimated_us(problem, device)


def _scan_us(problem: Problem) -> float:
    """Estimates the microseconds per step of all sequences with a scan."""
    fixed, per_width, per_state, per_product, per_weight = SCAN_STEP_COST[cost_key(problem)]
    all_sequences, hidden = problem.models * problem.sequences, problem.hidden
    width = hidden / 1024 * (min(all_sequences, 256) / 256) ** 0.5
    cost = fixed + per_width * width + per_state * all_sequences * hidden / 1e5
    cost += per_product * all_sequences * hidden**2 / 1e8
    if problem.sequences == 1:
        cost += per_weight * hidden**2 / 1e6
    weight_bytes = CELLS[problem.cell].gates * hidden**2 * (2 if product_kind(problem) == "16-bit" else 4)
    return cost + (problem.models - 1) * weight_bytes / WEIGHT_BYTES_PER_US  # the first model's weights are in the fit
