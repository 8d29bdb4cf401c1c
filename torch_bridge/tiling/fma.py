"""Tilings of the "fma" kernels: one program per sequence, products in full float32."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from torch_bridge.cells import CELLS
from torch_bridge.tiling.arithmetic import power_of_2
from torch_bridge.tiling.config import OneProgram
from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, product_kind
from torch_bridge.tiling.support import FLOAT32_WIDTH

# Largest number of sequences per SM for which one program per sequence is fastest (H200): for 16-bit operands, for the
# forward pass of a GRU with 33 to 64 units, and for 33 to 64 units where TF32 is allowed. Beyond these limits, tiles on
# the tensor cores are faster. In all other cases of up to 64 units, such tiles are faster only for few steps.
MAX_PER_SM_IN_16_BITS, MAX_PER_SM_OF_WIDE_GRU, MAX_PER_SM_IN_TF32 = 16, 8, 2
# The same for 65 to 128 units where TF32 is allowed and the cell has no "resident" loop. On an H200, 128 steps of a
# simple cell of 128 units with a ReLU take, forward plus backward, 90 us instead of 240 us in the streamed loop if each
# SM has one sequence, 246 us instead of 270 us with two, and 401 us instead of 286 us with three.
MAX_PER_SM_INSTEAD_OF_RESIDENT = 2
# Microseconds per step with 128 units, forward and backward, if each SM has one sequence.
STEP_US = {"gru": {"fwd": 0.8, "bwd": 1.1}, "lstm": {"fwd": 1.0, "bwd": 1.4}}
# Microseconds until a program has loaded its weights.
START_US = 8.0
# Fewest steps, by block, for which the time to load all weights into every program is negligible. For up to 16 units
# that time always is.
MIN_STEPS = {32: 12, 64: 16, 128: 16}


@dataclass(frozen=True)
class Fma(OneProgram):
    """A tiling of the "fma" kernels; `shared_gates` is the number of gates whose weights are in shared memory."""

    block_h: int
    shared_gates: int = 0
    pieces: int = 1

    loop = "fma"
    in_float32 = True
    block_b = 1

    @property
    def num_warps(self) -> int:
        """The more, the more weights there are to hold in registers."""
        return {64: 4, 128: 8}.get(self.block_h, 1)

    def fewest_pieces(self, problem: Problem, device: Device) -> int:
        """Returns two, and none for the LSTM of more than 64 units, which has no register left."""
        return 0 if self.shared_gates else 2

    def shared_memory(self, problem: Problem) -> int:
        """Returns the bytes of the operands of two steps, the weights of `shared_gates` and the sums of a norm."""
        operands = 1 if problem.direction == "fwd" else CELLS[problem.cell].gates
        sums = 4 * self.num_warps if problem.norm_width else 0
        return 8 * self.block_h * operands + self.shared_gates * 4 * self.block_h**2 + sums


def max_sequences_per_sm(problem: Problem, block: int) -> float:
    """Returns up to how many sequences per SM one program per sequence is faster than tiles on the tensor cores."""
    most = math.inf if problem.operand_dtype == "float32" else MAX_PER_SM_IN_16_BITS
    if block == 64 and problem.tilings == "gru" and problem.direction == "fwd":
        most = MAX_PER_SM_OF_WIDE_GRU
    if block == 64 and problem.precision == "tf32":
        most = MAX_PER_SM_IN_TF32
    if block == 128:
        most = MAX_PER_SM_INSTEAD_OF_RESIDENT
    many = MIN_STEPS.get(block, 0)
    if block == 64 and problem.tilings == "lstm" and problem.direction == "bwd":
        many = 5  # tiles are slow in this case
    if problem.steps < many:
        most = min(most, 2 * problem.steps if block == 32 else min(problem.steps, 4))
    return most


def fma_configs(problem: Problem, device: Device) -> list[tuple[float, Fma]]:
    """Returns the tiling of the "fma" kernels with its cost, if they support a problem.

    The cost is 0 if the tiling is the fastest, infinity if it is the slowest, or else microseconds per step of all
    sequences.

    The kernels are for few units and run one program per sequence. They multiply in full float32, which takes three
    TF32 products on tensor cores. On an H200, a step of 64 sequences of a GRU with 32 units takes 0.29 us forward and
    0.24 us backward, instead of 1.4 us in the streamed loop. For few sequences and 33 to 64 units, these kernels are
    faster than a single TF32 product, too.
    """
    forward = problem.direction == "fwd"
    covered = not problem.has_packed_residuals
    # a program's registers just hold the weights of three gates of 128 units; the spills, up to 352 bytes with Triton
    # 3.9 and up to 72 bytes before, cost little compared to kernels whose programs share the units
    wide = 64 < problem.hidden <= 128
    full = wide and product_kind(problem) == "tf32x3"
    instead = wide and product_kind(problem) == "tf32" and "resident" not in CELLS[problem.cell].loops
    covered &= problem.hidden <= (FLOAT32_WIDTH if problem.operand_dtype == "float32" else 32) or full or instead
    if full and forward and problem.norm_width and problem.is_unaligned and device.capability == 120:
        return []  # LayerNorm spills 24 bytes there, where a GRU spills none
    if not covered or not device.runs_gluon:
        return []
    block = max(16, power_of_2(problem.hidden))
    config = Fma(block)
    if problem.tilings == "lstm" and block == 128:
        # registers hold the weights of three gates of 128 units; backward, only two gates in registers are faster if
        # shared memory has room for the other two, and with three, tangents spill 40 bytes on compute capability 10.0
        config = dataclasses.replace(config, shared_gates=1 if forward and not problem.tangent else 2)
        if config.shared_memory(problem) > device.shared_memory:
            config = dataclasses.replace(config, shared_gates=1)
    turns = problem.models * problem.sequences / device.multiprocessors
    if full:
        step = STEP_US[problem.tilings][problem.direction]
        return [(math.ceil(turns) * (step + START_US / problem.steps), config)]
    return [(0.0 if turns <= max_sequences_per_sm(problem, block) else math.inf, config)]
