"""Which tiling a launch uses: a pure function of the problem and the device, no measuring on a user's call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

Direction = Literal["fwd", "bwd"]
ResetState = Literal["zeros", "fixed", "stepped"]
Precision = Literal["tf32", "tf32x3", "ieee"]

RESET_STATES: tuple[ResetState, ...] = ("zeros", "fixed", "stepped")
GATES = {"gru": 3, "lstm": 4}


class UnsupportedError(NotImplementedError):
    """No kernel configuration covers the problem; the message names the limit."""


@dataclass(frozen=True)
class Problem:
    """One recurrence to launch. Sequence arrays are `[groups, steps, batch, width]`, weights `[models, hidden, ...]`.

    Attributes:
      cell: an entry of `torch_bridge.kernels.CELLS`.
      direction: forward or backward pass.
      models: sets of weights; each owns `groups / models` consecutive groups.
      groups: blocks of `batch` sequences, each block time first.
      steps: length in time.
      batch: sequences in a group.
      hidden: hidden units.
      dtypes: `(name, dtype)` of every array that takes part; an array left out is not computed or not used.
      reset_state: where an episode's first state comes from.
      reverse: run from the last step to the first.
      precision: of float32 products on the tensor cores.
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
    reverse: bool = False
    precision: Precision = "tf32"

    @property
    def sequences(self) -> int:
        """Sequences that one model runs."""
        return self.groups // self.models * self.batch

    @property
    def operand_dtype(self) -> str:
        """The dtype that matmul operands have."""
        return dict(self.dtypes)["w_hh"]


@dataclass(frozen=True)
class Device:
    """What the heuristic needs to know of a device: compute capability times ten, and its multiprocessors."""

    capability: int = 90
    multiprocessors: int = 132


@dataclass(frozen=True)
class KernelConfig:
    """A tiling. `splits == 1` keeps the weights of all units on chip; more share a tile's units among programs."""

    block_h: int
    block_b: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int

    def tiles(self, problem: Problem) -> int:
        """Batch tiles of one model."""
        return _cdiv(problem.sequences, self.block_b)

    def workers(self, problem: Problem, device: Device) -> int:
        """Groups of programs that run side by side, each taking tiles in turn."""
        items = problem.models * self.tiles(problem)
        return items if self.splits == 1 else max(1, min(items, device.multiprocessors // self.splits))


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _resident_limit(problem: Problem) -> int:
    """The largest power-of-two width whose weights, for all gates, stay in the shared memory of one multiprocessor."""
    if problem.operand_dtype != "float32":
        return 128
    if problem.precision != "tf32":
        return 32
    return {"gru": 128, "lstm": 64}[problem.cell]


@functools.lru_cache(maxsize=4096)
def heuristic(problem: Problem, device: Device) -> KernelConfig:
    """The tiling for a problem.

    Raises:
      UnsupportedError: the hidden state is wider than the programs of one cooperative launch can share.
    """
    block = max(16, _power_of_2(problem.hidden))
    if block <= _resident_limit(problem):
        return KernelConfig(
            block_h=block, block_b=16, block_k=block, splits=1, num_warps=8 if block >= 128 else 4, num_stages=1
        )
    return _split_config(problem, device)


def _split_config(problem: Problem, device: Device) -> KernelConfig:
    """Cheapest way to share the hidden units of a tile among programs, by a rough count of what a step moves."""
    best: tuple[float, KernelConfig] | None = None
    operand_bytes = 4 if problem.operand_dtype == "float32" else 2
    gates = GATES[problem.cell]
    block_k = 64 if operand_bytes == 4 else 128
    for block_h in (16, 32, 64):
        splits = _cdiv(problem.hidden, block_h)
        if splits > device.multiprocessors:
            continue
        for block_b in (16, 32, 64):
            if block_h * block_b > 2048:
                continue
            config = KernelConfig(
                block_h=block_h,
                block_b=block_b,
                block_k=min(block_k, _power_of_2(problem.hidden)),
                splits=splits,
                num_warps=4,
                num_stages=3,
            )
            items = problem.models * config.tiles(problem)
            rounds = _cdiv(items, config.workers(problem, device))
            # a step: the barrier, then the weights and the exchanged state through one multiprocessor's share of L2
            moved = problem.hidden * (gates * block_h * operand_bytes + block_b * (4 if problem.direction == "fwd" else 4 * gates))
            microseconds = rounds * (1.5 + moved / 60e3)
            if best is None or microseconds < best[0]:
                best = (microseconds, config)
    if best is None:
        raise UnsupportedError(
            f"a hidden width of {problem.hidden} is more than the {device.multiprocessors} multiprocessors of this "
            f"device can share ({64 * device.multiprocessors}); use implementation=\"xla\""
        )
    return best[1]
