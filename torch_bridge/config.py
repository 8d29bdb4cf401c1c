"""The choice of a launch's tiling: a pure function of the problem and the device, without measurements at call time."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
import sys
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch_bridge.devices import Device as Device

Direction = Literal["fwd", "bwd"]
ResetState = Literal["zeros", "fixed", "stepped"]
Precision = Literal["tf32", "tf32x3"]
# Which models run from the last step to the first: none (False), all (True), or those of odd index.
Reverse = bool | Literal["bidirectional"]
# Which kernels of a cell: "plain" ones are written in Triton, the others in Gluon, in the module `{cell}_{variant}`.
# "resident" and "fma" run on compute capability 8.0 and newer; "split" and "rows" use wgmma, which only capability 9.0
# has.
Variant = Literal["plain", "resident", "fma", "split", "rows"]

RESET_STATES: tuple[ResetState, ...] = ("zeros", "fixed", "stepped")
# Number of gates of each cell: the width of its input projection divided by H.
GATES = {"gru": 3, "lstm": 4}


class UnsupportedError(NotImplementedError):
    """The error raised if no kernel supports a problem; its message names the limit."""


class Sizes(NamedTuple):
    """The sizes of a recurrence, with the names and in the order of the fields of `Problem`."""

    models: int
    groups: int
    steps: int
    batch: int
    hidden: int


@dataclass(frozen=True)
class Problem:
    """One recurrence to launch. Sequence arrays are `[groups, steps, batch, width]`, weights `[models, ...]`.

    Attributes:
      cell: an entry of `torch_bridge.kernels.CELLS`.
      direction: forward or backward pass.
      models: number of sets of weights; each owns `groups / models` consecutive groups.
      groups: number of blocks of `batch` sequences; each block is time first.
      steps: number of time steps.
      batch: number of sequences in a group.
      hidden: number of hidden units.
      dtypes: `(name, dtype)` of every input and output; an array that is not named is not computed or not used.
      reset_state: where an episode's first state comes from; the backward pass does not depend on it.
      reverse: whether to run from the last step to the first; with "bidirectional" only models of odd index do.
      precision: precision of float32 products on the tensor cores.
    """

    cell: str
    direction: Direction
    models: int
    groups: int
    steps: int
    batch: int
    hidden: int
    dtypes: tuple[tuple[str, str], ...]
    reset_state: ResetState = "zeros"
    reverse: Reverse = False
    precision: Precision = "tf32"

    @property
    def sequences(self) -> int:
        """The number of sequences per model."""
        return self.groups // self.models * self.batch

    @property
    def operand_dtype(self) -> str:
        """The dtype of the matmul operands."""
        return dict(self.dtypes)["w_hh_t" if self.direction == "fwd" else "w_hh"]

    @property
    def is_common(self) -> bool:
        """Whether the problem has no reset state, no cell states of every step, and no gradients of either."""
        return self.reset_state == "zeros" and not dict(self.dtypes).keys() & {"cs", "dcs", "dreset_h"}

    @property
    def is_unaligned(self) -> bool:
        """Whether the row length rules out loads of four elements, so that addresses take more registers."""
        return self.hidden % 4 != 0


@dataclass(frozen=True)
class KernelConfig:
    """A tiling. With `splits == 1`, a program keeps the weights of all units on chip.

    Otherwise `splits` programs share the units. `shared_gates` is the number of gates whose weights the "fma" kernels
    keep in shared memory instead of registers.
    """

    block_h: int
    block_b: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int
    variant: Variant = "plain"
    shared_gates: int = 0

    def tiles(self, problem: Problem) -> int:
        """Returns the number of batch tiles per model."""
        return _cdiv(problem.sequences, self.block_b)

    def workers(self, problem: Problem, device: Device) -> int:
        """Returns the number of workers: groups of `splits` programs that process their tiles one after the other."""
        items = problem.models * self.tiles(problem)
        return items if self.splits == 1 else max(1, min(items, device.multiprocessors // self.splits))

    def rounds(self, problem: Problem, device: Device) -> int:
        """Returns the largest number of tiles that one worker processes."""
        return _cdiv(problem.models * self.tiles(problem), self.workers(problem, device))

    def workspaces(self, problem: Problem, device: Device) -> list[tuple[str, int, str, bool]]:
        """Returns `(name, length, dtype, zeroed)` of the arrays through which programs that share a tile exchange data.

        Arrays that are `zeroed` must contain zeros when the launch starts.
        """
        if self.splits == 1:
            return []
        forward, gates, workers = problem.direction == "fwd", GATES[problem.cell], self.workers(problem, device)
        if self.variant == "split":
            # two buffers; forward, each pair of sequences is a word and the word's number; backward, each program sends
            # a word per element to each program
            words = 2 * self.block_h * self.block_b * self.splits * workers
            return [("exchange", words if forward else words * self.splits, "int32", True)]
        if self.variant == "rows":
            width = self.splits * self.block_h * (1 if forward else gates)
            scaled = problem.operand_dtype == "float32"
            exchange = 2 * workers * self.block_b * width, "float16" if scaled else problem.operand_dtype, False
            bounds = [("bounds", 2 * workers * self.block_b * 32, "float32", False)] if scaled and not forward else []
            products = [] if forward else [("products", 4 * workers * self.splits * self.block_b * 32, "int32", True)]
            flags = "barrier", workers * self.num_warps * 32, "int32", True
            return [("exchange", *exchange), *bounds, *products, flags]
        width = problem.hidden * (1 if forward else gates)
        exchange = 2 * problem.groups * problem.batch * width, problem.operand_dtype, False
        return [("exchange", *exchange), *([] if device.interpreted else [("barrier", workers, "int32", True)])]

    def shared_memory(self, problem: Problem) -> int:
        """Returns an upper bound, in bytes, on a program's shared memory: close to measured use, checked by a test."""
        gates, wide = GATES[problem.cell], problem.operand_dtype == "float32"
        size = 4 if wide else 2
        if self.variant == "split":
            operands = self.splits if problem.direction == "fwd" else gates
            return 2 * self.block_h * (gates * self.splits * self.block_h + operands * self.block_b) + 1024
        if self.variant == "rows":
            return 2 * gates * self.block_h * self.block_h * self.splits + 1024
        if self.variant == "fma":
            operands = 1 if problem.direction == "fwd" else gates
            return 8 * self.block_h * operands + self.shared_gates * 4 * self.block_h**2
        if self.variant == "resident":
            # weights on their way to registers, operands of two steps, upper bounds on the operands' magnitude
            operands = 1 if problem.direction == "fwd" else gates
            return 2 * self.block_h**2 + 4 * operands * self.block_h * max(self.block_b, 8) + 1024
        if self.splits == 1:
            copies = 2 if problem.precision == "tf32x3" else 1
            return copies * gates * self.block_h * self.block_h * size + 16 * self.block_h * self.block_b
        rows = gates * self.block_h if problem.direction == "fwd" else self.block_h
        stage = (rows + self.block_b) * self.block_k * size
        return self.num_stages * stage + (8 if wide else 20) * self.block_h * self.block_b


# Largest hidden size at which a kernel may multiply in full float32 where TF32 is allowed.
_FLOAT32_WIDTH = 64
# Fewest steps for which it is profitable to load all weights on chip.
_MANY_STEPS = 8


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _kind(problem: Problem) -> str:
    """Returns the kind of product, a key of the tables of costs: "tf32", "tf32x3" or "16-bit"."""
    return problem.precision if problem.operand_dtype == "float32" else "16-bit"


def may_have_float32_residuals(hidden: int, sequences: int, reset_state: ResetState, device: Device) -> bool:
    """Whether the forward kernel may save float32 residuals where TF32 is allowed; see `with_residual_dtypes`."""
    few = sequences <= _FMA_FOR_TF32 * device.multiprocessors
    return few and hidden <= _FLOAT32_WIDTH and reset_state == "zeros" and device.capability >= 80


def with_residual_dtypes(problem: Problem, device: Device) -> Problem:
    """Returns `problem`, whose residuals are declared float32, with the dtypes in which its kernel saves them.

    Kernels with TF32 products save `local_grads` and `dc_dh` as float16, because TF32 rounds no finer. Kernels that
    multiply in full float32 save float32.
    """
    dtypes = dict(problem.dtypes)  # without "carry_gate" if residuals are stored in place
    if _kind(problem) != "tf32" or "carry_gate" not in dtypes or heuristic(problem, device).variant == "fma":
        return problem
    dtypes |= {name: "float16" for name in ("local_grads", "dc_dh") if name in dtypes}
    return dataclasses.replace(problem, dtypes=tuple(dtypes.items()))


@functools.lru_cache(maxsize=4096)
def heuristic(problem: Problem, device: Device) -> KernelConfig:
    """Returns the tiling for a problem.

    Raises:
      UnsupportedError: the hidden state is wider than the programs of one cooperative launch can share.
    """
    return candidates(problem, device)[0]


def _by_cost(ways: list[tuple[float, KernelConfig]]) -> list[KernelConfig]:
    return [config for _, config in sorted(ways, key=lambda way: way[0])]


def candidates(problem: Problem, device: Device) -> list[KernelConfig]:
    """Returns the tilings that can run a problem, the fastest first according to the estimates in this module.

    Raises:
      UnsupportedError: see `heuristic`.
    """
    # keeping the weights on chip is faster than reading them at every step, by more than the error of the estimates
    kept = _by_cost(_split_configs(problem, device) + _rows_configs(problem, device))
    few = _fma_configs(problem, device)
    read = _by_cost(_plain_shared_configs(problem, device) + [way for way in few if way[0]])
    resident = _resident_configs(problem, device) + _plain_resident_configs(problem, device)
    found = [config for cost, config in few if not cost] + resident + kept + read
    if not found:
        raise UnsupportedError(
            f"a hidden width of {problem.hidden} is more than the {device.multiprocessors} SMs of this device "
            f'can share (at most {widest(device)}); pass implementation="xla"'
        )
    return found


def _has_16_bit_kernels(problem: Problem) -> bool:
    """Whether the "resident", "split" and "rows" kernels support a problem.

    The operands of these kernels are bfloat16 or, for TF32, scaled float16. Their forward pass supports no reset state.
    """
    covered = _kind(problem) != "tf32x3" and problem.operand_dtype != "float16"
    covered &= problem.direction == "bwd" or problem.reset_state == "zeros"
    return covered and problem.steps > 1  # loading the weights on chip takes longer than a step


# Largest number of sequences per SM for which one program per sequence is fastest (H200): for 16-bit operands, for the
# forward pass of a GRU with 33 to 64 units, and for 33 to 64 units where TF32 is allowed. Beyond these limits, tiles on
# the tensor cores are faster. In all other cases, such tiles are faster only for few steps.
_FMA_SIXTEEN_BITS, _FMA_WIDE_GRU, _FMA_FOR_TF32 = 16, 8, 2
# Microseconds per step with 128 units, forward and backward, if each SM has one sequence.
_FMA_STEP = {"gru": {"fwd": 0.8, "bwd": 1.1}, "lstm": {"fwd": 1.0, "bwd": 1.4}}
# Microseconds until a program has loaded its weights.
_FMA_START = 8.0
# Fewest steps, by block, for which the time to load all weights into every program is negligible. For up to 16 units
# that time always is.
_FMA_MANY_STEPS = {32: 12, 64: 16}


def _max_sequences_per_sm_for_fma(problem: Problem, block: int) -> float:
    """Returns up to how many sequences per SM one program per sequence is faster than tiles on the tensor cores."""
    most = math.inf if problem.operand_dtype == "float32" else _FMA_SIXTEEN_BITS
    if block == 64 and problem.cell == "gru" and problem.direction == "fwd":
        most = _FMA_WIDE_GRU
    if block == 64 and problem.precision == "tf32":
        most = _FMA_FOR_TF32
    many = _FMA_MANY_STEPS.get(block, 0)
    if block == 64 and problem.cell == "lstm" and problem.direction == "bwd":
        many = 5  # tiles are slow in this case
    if problem.steps < many:
        most = min(most, 2 * problem.steps if block == 32 else min(problem.steps, 4))
    return most


def _fma_configs(problem: Problem, device: Device) -> list[tuple[float, KernelConfig]]:
    """Returns the tiling of the "fma" kernels with its cost, if they support a problem.

    The cost is 0 if the tiling is the fastest, infinity if it is the slowest, or else microseconds per step of all
    sequences.

    The kernels are for few units and run one program per sequence. They multiply in full float32, which takes three
    TF32 products on tensor cores. On an H200, a step of 64 sequences of a GRU with 32 units takes 0.29 us forward and
    0.24 us backward, instead of 1.4 us in the plain kernels. For few sequences and 33 to 64 units, these kernels are
    faster than a single TF32 product, too.
    """
    forward = problem.direction == "fwd"
    names = dict(problem.dtypes).keys()
    covered = "carry_gate" in names or "local_grads" not in names
    covered &= not forward or problem.reset_state == "zeros"
    # a program's registers just hold the weights of three gates of 128 units; the spills, up to 352 bytes with Triton
    # 3.9 and up to 72 bytes before, cost little compared to kernels whose programs share the units
    full = _kind(problem) == "tf32x3" and 64 < problem.hidden <= 128
    covered &= problem.hidden <= (_FLOAT32_WIDTH if problem.operand_dtype == "float32" else 32) or full
    if not covered or not device.runs_gluon:
        return []
    block = max(16, _power_of_2(problem.hidden))
    warps = {64: 4, 128: 8}.get(block, 1)
    config = KernelConfig(block, 1, block, splits=1, num_warps=warps, num_stages=1, variant="fma")
    if problem.cell == "lstm" and block == 128:
        # registers hold the weights of three gates of 128 units; backward, only two gates in registers are faster if
        # shared memory has room for the other two
        config = dataclasses.replace(config, shared_gates=1 if forward else 2)
        if config.shared_memory(problem) > device.shared_memory:
            config = dataclasses.replace(config, shared_gates=1)
    turns = problem.models * problem.sequences / device.multiprocessors
    if full:
        step = _FMA_STEP[problem.cell][problem.direction]
        return [(math.ceil(turns) * (step + _FMA_START / problem.steps), config)]
    return [(0.0 if turns <= _max_sequences_per_sm_for_fma(problem, block) else math.inf, config)]


# Microseconds per step with `jaxrnn.scan_launch`, by cell, kind of product and direction: fixed; per 1024 units and
# sqrt(sequences / 256), where more than 256 sequences count as 256; per 1e5 elements of the state; per 1e8
# multiply-adds of a gate; and per 1e6 weights of a gate if a model has one sequence, so that products are matrix-vector
# products. Fitted to 180 timings on an H200 (jax 0.11.2) with 1 to 4096 sequences and 256 to 1024 units. The fit is
# within 22 %, mostly within 10 %.
_SCAN_STEP_COST = {
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
# Microseconds per step of the plain kernels whose programs share the units, on GPUs without wgmma. Costs per tile:
# fixed; per 100 KB of exchanged state; per 100 KB of weights; per million multiply-adds; per 100 programs that share
# the tile. The last figure is per 1e5 elements of the state of all tiles. Fitted to 448 timings of the tilings that are
# chosen for an A100 and an RTX 3090, run on an H200 with the code for those GPUs (Triton 3.6). The fit is within 17 %,
# except for the forward pass of the GRU in "tf32x3". `_STEP_COST` ranks tilings, but does not give their time on these
# GPUs.
_PLAIN_STEP_COST = {
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
# Bytes of weights per microsecond that the memory of a GPU delivers; a scan of several models waits for the weights.
_WEIGHT_BYTES_PER_US = 2.5e6
# Estimated speedup from which a scan is preferred. The host launches the steps of a scan, and most hosts are slower
# than that of the H200.
_SCAN_MARGIN = 1.1


def prefers_scan(problem: Problem, device: Device) -> bool:
    """Whether `lax.scan` is estimated to be faster than the kernel that `heuristic` chooses for a problem.

    A scan can be faster only if the chosen kernel is a plain one whose programs share the units, because such a kernel
    reads the weights at every step. The benchmark `choice` checks the decision against the faster of the two.
    """
    config = heuristic(problem, device)
    if config.variant != "plain" or config.splits == 1 or device.interpreted:
        return False
    return _SCAN_MARGIN * _scan_us(problem) < _plain_us(problem, config, device)


def _scan_us(problem: Problem) -> float:
    """Estimates the microseconds per step of all sequences with `lax.scan`."""
    fixed, per_root, per_state, per_product, per_weight = _SCAN_STEP_COST[_cost_key(problem)]
    sequences, hidden = problem.models * problem.sequences, problem.hidden
    root = hidden / 1024 * (min(sequences, 256) / 256) ** 0.5
    step = fixed + per_root * root + per_state * sequences * hidden / 1e5
    step += per_product * sequences * hidden**2 / 1e8
    if problem.sequences == 1:
        step += per_weight * hidden**2 / 1e6
    size = 2 if _kind(problem) == "16-bit" else 4
    return step + (problem.models - 1) * GATES[problem.cell] * hidden**2 * size / _WEIGHT_BYTES_PER_US


def _plain_us(problem: Problem, config: KernelConfig, device: Device) -> float:
    """Estimates the microseconds per step of all sequences in the plain kernel whose programs share the units."""
    rounds = config.rounds(problem, device)
    if device.has_wgmma:
        return rounds * _tile_cost(problem, config, _STEP_COST[_kind(problem), problem.direction])
    *per_tile, per_program, per_state = _PLAIN_STEP_COST[_cost_key(problem)]
    tile = _tile_cost(problem, config, tuple(per_tile)) + per_program * config.splits / 100
    return rounds * tile + per_state * problem.models * problem.sequences * problem.hidden / 1e5


def _cost_key(problem: Problem) -> tuple[str, str, str]:
    return problem.cell, _kind(problem), problem.direction


def _tile_cost(problem: Problem, config: KernelConfig, cost: tuple[float, ...]) -> float:
    """Returns the microseconds per step of one tile, where `cost` has the format of the entries of `_STEP_COST`."""
    fixed, per_state, per_weight, per_product = cost
    gates, row = GATES[problem.cell], problem.hidden * (2 if _kind(problem) == "16-bit" else 4) / 1e5
    state = config.block_b * row * (1 if problem.direction == "fwd" else gates)
    products = gates * config.block_h * config.block_b * problem.hidden / 1e6
    return fixed + per_state * state + per_weight * gates * config.block_h * row + per_product * products


def _spills_at_batch_tile_8(problem: Problem, device: Device) -> bool:
    """Whether the "resident" kernel has too few registers for tiles of eight sequences."""
    if problem.cell != "lstm" or not 64 < problem.hidden <= 128:
        return False
    old, new, halves = _triton() < (3, 7), _triton() > (3, 7), _kind(problem) == "16-bit"
    forward, full = problem.direction == "fwd", problem.hidden == 128
    if forward:  # with 127 units, 8 bytes spill in 16 bits and 16 bytes in TF32
        return problem.is_unaligned
    if problem.is_common:
        return False
    # Triton 3.7 spills 8 to 80 bytes for unaligned widths, and 24 bytes for 128 units on compute capability 12.0
    if not device.has_wgmma and (problem.is_unaligned or (full and device.capability == 120 and not halves)):
        return True
    return not full and (problem.is_unaligned and old if halves else new)


def _resident_configs(problem: Problem, device: Device) -> list[KernelConfig]:
    """Returns the tilings of the "resident" kernels, the fastest first, if they support a problem.

    These kernels keep 16-bit weights in registers, and take a quarter of the plain kernels' time per step.

    MMA's N dimension is at least 8, but loads and stores are the bottleneck. On an H200 with H=128 and B=64, a step of
    the GRU takes 1.23 us with one sequence per tile and 2.0 us with eight. Tiles are therefore as small as possible
    while all of them run at once. If tiles of eight do not all run at once, tiles of sixteen may be faster.
    """
    if not 32 < problem.hidden <= 128 or not (device.runs_gluon and _has_16_bit_kernels(problem)):
        return []
    block = 64 if problem.hidden <= 64 else 128
    tilings = [
        KernelConfig(block, block_b, block, splits=1, num_warps=block // 16, num_stages=1, variant="resident")
        for block_b in (1, 2, 4, 8)
    ]
    if _spills_at_batch_tile_8(problem, device):
        tilings.pop()
    fast = (c for c in tilings if problem.models * c.tiles(problem) <= device.multiprocessors)
    best = next(fast, tilings[-1])
    if _fits_batch_tile_16(problem):
        sixteens = dataclasses.replace(tilings[-1], block_b=16)
        tilings.append(sixteens)
        turns, wider = (_cdiv(problem.models * c.tiles(problem), device.multiprocessors) for c in (best, sixteens))
        best = best if turns <= _TILE16_COST_RATIO * wider else sixteens
    return [best, *(c for c in tilings if c != best)]


# Ratio of the time per step of a tile of 16 sequences to that of a tile of 8. On an H200, GRU 2048,256,128 in bfloat16
# takes 1.67 ms with tiles of 16 instead of 1.89 ms with tiles of 8, which do not all run at once. In TF32, with tiles
# of 16 in the forward pass only, it takes 2.63 ms instead of 2.72 ms.
_TILE16_COST_RATIO = 1.75


def _fits_batch_tile_16(problem: Problem) -> bool:
    """Whether the "resident" kernel has enough registers for tiles of 16 sequences, or spills only a few."""
    gru = problem.cell == "gru" and problem.hidden == 128 and problem.is_common
    return gru and (problem.direction == "fwd" or _kind(problem) == "16-bit")


# Warps of a plain program that keeps all weights on chip, by the width of its block: if the hidden size fills the
# block, and if not. Each number of warps is as fast as any that does not spill. An entry is missing if every number of
# warps spills.
_RESIDENT_WARPS: dict[tuple[str, str, str], dict[int, tuple[int, ...]]] = {
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
_NON_HOPPER_WARPS = {
    ("gru", "tf32", "bwd"): {64: (8, 8)},
    ("gru", "tf32x3", "fwd"): {64: (8, 8)},
    ("lstm", "tf32x3", "fwd"): {64: (8, 8)},
}


def _plain_resident_configs(problem: Problem, device: Device) -> list[KernelConfig]:
    """Returns the plain tilings with one program per tile, the fastest first, if a program can hold all weights.

    The latency of a step is the bottleneck, so tiles are small while all of them run at once. On an H200 with H=128,
    T=128 and B=64, a step takes 2.0 us with tiles of 8 sequences and 4.0 us with tiles of 16. With B=2048, all tiles
    run at once only if they have 16 sequences, unless two programs fit on an SM.
    """
    block = max(16, _power_of_2(problem.hidden))
    even = problem.hidden == block
    key = problem.cell, _kind(problem), problem.direction
    by_block = _RESIDENT_WARPS[key] | ({} if device.has_wgmma else _NON_HOPPER_WARPS.get(key, {}))
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


# Tilings (block_h, block_b, block_k, num_warps, num_stages) that do not spill with Triton 3.6 to 3.9. `_TILINGS` are
# for any problem on any device. `_HOPPER_TILINGS` are additional tilings on Hopper for common problems
# (`Problem.is_common`) whose hidden size is a multiple of `block_k`.
_TILINGS = {
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
_HOPPER_TILINGS = {
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
_PARTIAL_BLOCK_TILINGS = {
    ("lstm", "16-bit", "bwd"): {(64, 16, 64, 4, 4): (64, 16, 64, 8, 4), (64, 32, 64, 8, 4): (64, 32, 32, 8, 4)},
}
# Tilings for unaligned problems; and where some of them spill, how many of the first ones do not.
_UNALIGNED_TILINGS = ((16, 16, 16, 8, 2), (32, 16, 16, 8, 2), (64, 16, 16, 8, 2))
_UNALIGNED_COUNTS = {("gru", "tf32x3", "fwd"): 2, ("lstm", "tf32x3", "fwd"): 1}
# Microseconds per step of one tile: fixed, per 100 KB of exchanged state, per 100 KB of weights, per million
# multiply-adds. Fitted to 330 timings on an H200 (Triton 3.6) with B from 8 to 2048 and H from 128 to 1024. Among the
# tilings that were timed, the one with the lowest estimate was the fastest or within 26 % of the fastest. Not all of
# the tilings above were timed.
_STEP_COST = {
    ("tf32", "fwd"): (3.6, 2.7, 0.64, 1.3),
    ("tf32", "bwd"): (5.2, 2.5, 0.67, 0.61),
    ("tf32x3", "fwd"): (5.5, 0.0, 0.0, 9.9),
    ("tf32x3", "bwd"): (6.2, 6.4, 2.1, 5.3),
    ("16-bit", "fwd"): (3.8, 4.7, 0.39, 0.70),
    ("16-bit", "bwd"): (4.7, 2.7, 0.86, 0.07),
}


# Tilings of the "split" kernels, whose programs have 64 units each: sequences per tile, warps, and the microseconds per
# step of one tile (fixed, and per program that shares the units). Estimated from 250 timings on an H200 with B from 8
# to 2048 and H from 192 to 512, and used for 65 to 576 units.
_SPLIT_COST = {
    ("gru", "fwd"): ((8, 4, 0.75, 0.35), (16, 4, 1.6, 0.35), (32, 8, 3.0, 0.5)),
    ("gru", "bwd"): ((8, 4, 0.6, 0.42), (16, 4, 1.6, 0.47), (32, 8, 2.4, 0.8)),
    ("lstm", "fwd"): ((8, 4, 1.3, 0.33), (16, 4, 2.2, 0.35), (32, 8, 3.6, 0.6)),
    ("lstm", "bwd"): ((8, 4, 0.9, 0.42), (16, 4, 1.8, 0.53), (32, 8, 2.5, 0.92)),
}


def _split_configs(problem: Problem, device: Device) -> list[tuple[float, KernelConfig]]:
    """Returns the tilings of the "split" kernels, each with its cost.

    The programs share the units and keep all weights on chip. The cost is in microseconds per step of all tiles.
    """
    if not (device.has_wgmma and _has_16_bit_kernels(problem)):
        return []
    splits = _cdiv(problem.hidden, 64)
    if problem.steps < _MANY_STEPS or not 1 < splits <= device.multiprocessors:
        return []
    ways: list[tuple[float, KernelConfig]] = []
    tiles: tuple[tuple[int, int, float, float], ...] = _SPLIT_COST[problem.cell, problem.direction]
    if problem.cell == "lstm" and dict(problem.dtypes).keys() & {"dcs", "dreset_h"}:
        tiles = tiles[:1]  # with these additional gradients, Triton 3.9 spills in the larger ones
    for block_b, num_warps, fixed, per_split in tiles:
        config = KernelConfig(64, block_b, 64, splits, num_warps, num_stages=1, variant="split")
        if config.shared_memory(problem) <= device.shared_memory:
            ways.append((config.rounds(problem, device) * (fixed + per_split * splits), config))
    return ways


# The same figures for the "rows" kernels, whose products have sequences as rows. Their programs have 32 units each, and
# the number of programs that share the units is a multiple of four. Estimated from 60 timings on an H200 with B from 8
# to 1024 and H from 256 to 1024.
_ROWS_COST = {
    ("gru", "fwd"): ((64, 4, 3.7, 0.09), (128, 8, 3.5, 0.23)),
    ("gru", "bwd"): ((64, 4, 4.4, 0.13), (128, 8, 5.0, 0.285)),
    ("lstm", "fwd"): ((64, 4, 4.3, 0.13), (128, 8, 3.8, 0.39)),
    ("lstm", "bwd"): ((64, 4, 4.9, 0.13), (128, 8, 4.5, 0.5)),
}


@functools.cache
def _triton() -> tuple[int, ...]:
    """Returns Triton's major and minor version, as later versions' ptxas may need more registers.

    An unknown version counts as later than any other.
    """
    names = importlib.metadata.packages_distributions().get("triton")  # nightly builds have another name
    return tuple(map(int, importlib.metadata.version(names[0]).split(".")[:2])) if names else (sys.maxsize,)


def _rows_kernel_spills(problem: Problem, block_b: int, splits: int) -> bool:
    """Whether the "rows" kernel has too few registers."""
    gru, of_float32 = problem.cell == "gru", problem.operand_dtype == "float32"
    if problem.direction == "fwd":
        return not gru and of_float32 and problem.is_unaligned and splits == 8 and _triton() > (3, 7)
    return (
        (gru and (block_b, splits) == (64, 16))
        or (of_float32 and problem.is_unaligned and (block_b, splits) == (64, 20))
        or (
            gru
            and of_float32
            and (block_b, splits) == (128, 32)
            and problem.hidden % 128 != 0
            and not problem.is_common
        )
    )


def _rows_configs(problem: Problem, device: Device) -> list[tuple[float, KernelConfig]]:
    """Returns the tilings of the "rows" kernels, each with its cost in microseconds per step of all tiles.

    These kernels are for states that are too wide for the "split" kernels, and for many sequences.
    """
    splits = 4 * _cdiv(problem.hidden, 128)
    if not (device.has_wgmma and _has_16_bit_kernels(problem)) or problem.steps < _MANY_STEPS:
        return []
    if not 4 < splits <= min(32, device.multiprocessors):
        return []
    scaled_backward = problem.direction == "bwd" and problem.operand_dtype == "float32"
    if scaled_backward and _triton() > (3, 7):
        return []  # the kernel spills
    if (
        scaled_backward
        and problem.reverse == "bidirectional"
        and problem.cell == "lstm"
        and splits == 16
        and not problem.is_common
    ):
        return []  # the kernel spills
    ways: list[tuple[float, KernelConfig]] = []
    for block_b, num_warps, fixed, per_split in _ROWS_COST[problem.cell, problem.direction]:
        if _rows_kernel_spills(problem, block_b, splits):
            continue
        config = KernelConfig(32, block_b, 32, splits, num_warps, num_stages=1, variant="rows")
        if config.shared_memory(problem) <= device.shared_memory:
            ways.append((config.rounds(problem, device) * (fixed + per_split * splits), config))
    return ways


# The tiling for hidden sizes that are too wide for the tilings above.
_WIDEST_TILING = (64, 16, 32, 8, 3)


def widest(device: Device) -> int:
    """Returns the largest hidden size that has a tiling."""
    return _WIDEST_TILING[0] * device.multiprocessors


def _plain_shared_configs(problem: Problem, device: Device) -> list[tuple[float, KernelConfig]]:
    """Returns the plain tilings whose programs share the units, each with its cost.

    The programs read the weights from L2 at every step. The cost is in microseconds per step of all tiles.
    """
    kind = _kind(problem)
    ways: list[tuple[float, KernelConfig]] = []
    key = problem.cell, kind, problem.direction
    tilings = _UNALIGNED_TILINGS[: _UNALIGNED_COUNTS.get(key)] if problem.is_unaligned else _TILINGS[key]
    partly_filled = _PARTIAL_BLOCK_TILINGS.get(key, {})
    tilings = tuple(partly_filled.get(x, x) if problem.hidden % x[2] else x for x in tilings)
    if problem.is_common and not problem.is_unaligned and device.has_wgmma:
        # the tilings for Hopper come first and win ties of cost, because they have more stages
        tilings = tuple(tiling for tiling in _HOPPER_TILINGS.get(key, ()) if problem.hidden % tiling[2] == 0) + tilings
    if problem.hidden > max(tiling[0] for tiling in tilings) * device.multiprocessors:
        spills = key == ("lstm", "tf32x3", "fwd") and not device.has_wgmma  # on 8.6, two stages spill 32 bytes
        tilings = (_UNALIGNED_TILINGS[-1] if problem.is_unaligned or spills else _WIDEST_TILING,)
    for block_h, block_b, block_k, num_warps, num_stages in tilings:
        splits = _cdiv(problem.hidden, block_h)
        if not 1 < splits <= device.multiprocessors:
            continue
        config = KernelConfig(block_h, block_b, block_k, splits, num_warps, num_stages)
        while config.shared_memory(problem) > device.shared_memory and config.num_stages > 2:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        if config.shared_memory(problem) > device.shared_memory:
            continue
        step = _tile_cost(problem, config, _STEP_COST[kind, problem.direction])
        ways.append((config.rounds(problem, device) * step, config))
    return ways
