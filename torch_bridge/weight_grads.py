"""The launch that computes a recurrence's gradients of weights and biases, and the choice of its tiling.

Where the launch is not used, a library computes these gradients by matrix products and sums over arrays that the
backward loop wrote; see `torch_bridge.kernels.weight_grads`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch_bridge import launch
from torch_bridge.kernels import sums, weight_grads
from torch_bridge.tiling import RESET_STATES, Device, ResetState
from torch_bridge.tiling.arithmetic import cdiv, power_of_2

# Rows, and columns, of the tile of a product that one program computes.
_TILE = 128
_WARPS = 8
# Bytes of shared memory that four pipeline stages of the kernel without wgmma take.
_FOUR_STAGES_BYTES = 132_000
# Largest number of rows of a model for which three pipeline stages are enough to be faster than a library.
_THREE_STAGES_ROWS = 2**16
# Fewest rows of a model per program: with fewer, adding up the partial sums would take as long as computing them.
_MIN_ROWS_PER_PROGRAM = 128
# Partial sums that a program of `sum_kernel` reads at once: with fewer, more time goes into starting programs.
_SUM_ELEMENTS = 2048


@dataclass(frozen=True)
class Problem:
    """Gradients to compute. Arrays are `[models, groups, steps, batch, width]`, `h0` `[models, groups, batch, hidden]`.

    Attributes:
      models: number of sets of weights, each with its own groups.
      groups: groups per model, each of `batch` sequences.
      steps: number of time steps.
      batch: number of sequences in a group.
      inputs: width of the inputs.
      hidden: number of hidden units.
      gates: width of the gradients of the gates: the number of gates times `hidden`.
      dtypes: `(name, dtype)` of every array: x, hs, h0, dxp, dhn if the last gate is separate, and the reset states
        reset_h if they are not zeros, all of one dtype; reset, `[models, groups, steps, batch]`, if there are resets;
        scale, if the gates see a norm, and x_mean, if that is LayerNorm, of width 1 and in float32.
      reverse: whether the recurrence ran from the last step to the first.
      reset_state: the kind of the reset states: reset_h is `[models, groups, batch, hidden]` if they are "fixed", or
        `[models, groups, steps, batch, hidden]` if they are "stepped".
    """

    models: int
    groups: int
    steps: int
    batch: int
    inputs: int
    hidden: int
    gates: int
    dtypes: tuple[tuple[str, str], ...]
    reverse: bool = False
    reset_state: ResetState = "zeros"

    @property
    def rows(self) -> int:
        """The number of rows per model."""
        return self.groups * self.steps * self.batch

    @property
    def dtype(self) -> str:
        """The dtype of the operands of the products."""
        return dict(self.dtypes)["x"]

    @property
    def last_gate_separate(self) -> bool:
        """Whether the last gate's hidden product has a gradient of its own, `dhn`."""
        return "dhn" in dict(self.dtypes)

    @property
    def normed(self) -> bool:
        """Returns whether a norm scales the gate gradients, by the factors in the array "scale"."""
        return "scale" in dict(self.dtypes)

    @property
    def centered(self) -> bool:
        """Returns whether LayerNorm centers the states, by the means in the array "x_mean"."""
        return "x_mean" in dict(self.dtypes)

    @property
    def tiles(self) -> int:
        """The number of tiles of the products."""
        return cdiv(max(self.inputs, self.hidden), _TILE) * cdiv(self.gates, _TILE)


class Layout(NamedTuple):
    """The offset of each gradient's first element in a model's row of the results, and the length of the row."""

    w_ih: int
    w_hh: int
    bias: int
    b_hn: int
    end: int

    @classmethod
    def of(cls, inputs: int, hidden: int, gates: int, last_gate_separate: bool) -> Layout:
        """Returns the layout of `w_ih [D, W]`, `w_hh [H, W]`, `bias [W]` and, if `last_gate_separate`, `b_hn [H]`."""
        w_hh = inputs * gates
        bias = w_hh + hidden * gates
        b_hn = bias + gates
        return cls(0, w_hh, bias, b_hn, b_hn + (hidden if last_gate_separate else 0))


class Tiling(NamedTuple):
    """The rows per iteration, the pipeline stages of as many rows each, and the programs per tile and model."""

    rows: int
    stages: int
    programs: int


def supports(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel supports a problem, whose widths must allow copies in words of 16 bytes."""
    if not device.runs_gluon:
        return False
    words = 4 if problem.dtype == "float32" else 8
    # a separate last gate must have all columns of a tile or none
    last = _TILE if problem.last_gate_separate else 1
    return not (problem.inputs % words or problem.hidden % words or (problem.gates - problem.hidden) % last)


def is_profitable(problem: Problem, device: Device) -> bool:
    """Returns whether the kernel takes less time than the products and sums of a library.

    The thresholds were measured on an H200. A cell with a norm has those of a GRU: with RMSNorm, 1024,128,256 takes
    2.87 ms instead of 3.03 ms, and 2048,256,128 takes 3.01 ms instead of 3.45 ms.

    Without wgmma, the kernel is faster for a GRU with up to 128 inputs and units. Compiled for an A100, it gives 3.22
    ms instead of 3.44 ms for GRU 2048,256,128 (in bfloat16 2.11 ms instead of 2.22 ms) and 0.229 ms instead of 0.233 ms
    for GRU 64,128,128, but 3.81 ms instead of 3.74 ms for LSTM 2048,256,128 and 7.58 ms instead of 7.54 ms for GRU
    1024,128,256. Compiled for an RTX 3090, whose shared memory has room for three pipeline stages, it gives 3.42 ms
    instead of 3.33 ms for GRU 2048,256,128, 0.233 ms instead of 0.248 ms for 256,128,64 and 0.231 ms instead of 0.233
    ms for 64,128,128.

    Up to 128 inputs and units, the kernel is not slower from 1024 rows of a model on. On an H200, GRU 8,128,128 takes
    1.00 of the time in float32 and 0.98 in bfloat16, 16 such models 0.89 and 0.94, and 64 models 0.91 and 0.95.
    Compiled for an A100, the kernel takes 1.00 of the time with 2048 rows in float32, 0.95 in bfloat16 and, with 16
    models, 0.95; fewer rows were not measured.
    """
    if not device.has_wgmma and not (
        problem.last_gate_separate
        and max(problem.inputs, problem.hidden) <= 128
        and (problem.rows <= _THREE_STAGES_ROWS or device.shared_memory >= _FOUR_STAGES_BYTES)
    ):
        return False
    narrow = min(problem.inputs, problem.hidden) < 64
    is_float32 = problem.dtype == "float32"
    widest = max(problem.inputs, problem.hidden)
    # a library needs two products of the hidden states if the last gate is separate, with dxp and with dhn, and with a
    # norm one more pass over dxp for the biases
    if problem.last_gate_separate or problem.normed:
        fewest = 4096 if widest > 128 else 1024 if device.has_wgmma else 2048
        enough = problem.rows >= fewest and widest <= (256 if is_float32 else 128)
    else:
        enough = problem.rows >= (32768 if is_float32 else 65536) and widest <= 128
    return enough and not narrow and supports(problem, device)


def choose(problem: Problem, device: Device) -> Tiling:
    """Returns the tiling for a problem: as many rows in flight as shared memory holds, and one program per SM.

    There are fewer programs if a program would have few rows, and more if there are more tiles than SMs.
    """
    if not device.has_wgmma:
        rows, stages = 16 if problem.dtype == "float32" else 32, 4 if device.shared_memory >= _FOUR_STAGES_BYTES else 3
    elif problem.dtype == "float32":
        rows, stages = 32, 3 if problem.last_gate_separate else 4
    else:
        rows, stages = (64, 3) if problem.last_gate_separate else (64, 4) if problem.centered else (128, 2)
    at_once = max(1, device.multiprocessors // (problem.tiles * problem.models))
    return Tiling(rows, stages, max(1, min(at_once, problem.rows // _MIN_ROWS_PER_PROGRAM)))


class Launch(launch.Launch):
    """The launch of a problem with its tiling, which writes one array, `sums` `[models, Layout.end]` in float32."""

    def __init__(self, problem: Problem, device: Device, tiling: Tiling | None = None):
        super().__init__(device)
        self.problem = problem
        self.tiling = tiling or choose(problem, device)
        models, programs, rows = problem.models, self.tiling.programs, self.tiling.rows
        end = Layout.of(problem.inputs, problem.hidden, problem.gates, problem.last_gate_separate).end
        shard_rows = cdiv(cdiv(problem.rows, programs), rows) * rows
        dtypes = dict(problem.dtypes) | {"partial": "float32", "sums": "float32"}
        constants = {
            "D": problem.inputs, "H": problem.hidden, "W": problem.gates, "ROWS": rows, "STAGES": self.tiling.stages,
            "RESET_STATE": RESET_STATES.index(problem.reset_state), "REVERSE": problem.reverse,
            "WGMMA": device.has_wgmma,
        }  # fmt: skip
        scalars = {
            "rows": problem.rows, "shard_rows": shard_rows, "programs": programs, "T": problem.steps,
            "B": problem.batch,
        }  # fmt: skip
        self.workspaces.append(("partial", models * programs * end, "float32", False))
        grid = models * programs * problem.tiles
        self.add(weight_grads.weight_grads_kernel, grid, _WARPS, dtypes, constants, scalars)
        block_p = min(16, power_of_2(programs))
        blocks = {"N": end, "BLOCK_P": block_p, "BLOCK_C": _SUM_ELEMENTS // block_p}
        self.add(sums.sum_kernel, models * cdiv(end, blocks["BLOCK_C"]), 4, dtypes, blocks, scalars, early=True)
