"""The launch that differentiates a recurrence by its weights and biases: which it takes, in which tiling.

Elsewhere those gradients are matrix products and sums of a library, over arrays that the backward loop wrote; see
`torch_bridge.kernels.weight_grads`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch_bridge import launch
from torch_bridge.config import Device
from torch_bridge.kernels import sums, weight_grads

# Rows and columns of a program's tile of a product.
_TILE = 128
_WARPS = 8
# Bytes of shared memory that four stages of the kernel without wgmma take.
_FOUR_STAGES = 132_000
# Rows up to which three stages are enough to be faster than a library.
_THREE_STAGES_ROWS = 2**16
# A program adds up at least so many rows, or what all wrote takes as long to add up.
_SHARE = 128


@dataclass(frozen=True)
class Problem:
    """Gradients to compute. Arrays are `[models, groups, steps, batch, width]`, `h0` `[models, groups, batch, hidden]`.

    Attributes:
      models: sets of weights, each with groups of its own.
      groups: of each model, of `batch` sequences.
      steps: length in time.
      batch: sequences in a group.
      inputs: width of the inputs.
      hidden: hidden units.
      gates: width of the gates' gradients, a multiple of `hidden`.
      dtypes: `(name, dtype)` of every array: x, hs, h0, dxp, of a GRU dhn, all of one dtype; reset, if there are any.
      reverse: whether the recurrence ran from the last step to the first.
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

    @property
    def rows(self) -> int:
        """Of each model."""
        return self.groups * self.steps * self.batch

    @property
    def dtype(self) -> str:
        """Of what is multiplied."""
        return dict(self.dtypes)["x"]

    @property
    def separate(self) -> bool:
        """Whether the last gate's hidden product has gradients of its own."""
        return "dhn" in dict(self.dtypes)

    @property
    def tiles(self) -> int:
        """Of the products."""
        return -(-max(self.inputs, self.hidden) // _TILE) * -(-self.gates // _TILE)


class Layout(NamedTuple):
    """Where the gradients lie in the row of a model: the first number of each, and of what comes after all."""

    w_ih: int
    w_hh: int
    bias: int
    b_hn: int
    end: int

    @classmethod
    def of(cls, inputs: int, hidden: int, gates: int, separate: bool) -> Layout:
        """Of `w_ih` `[D, W]`, `w_hh` `[H, W]`, `bias` `[W]` and, if `separate`, `b_hn` `[H]`."""
        w_hh = inputs * gates
        bias = w_hh + hidden * gates
        b_hn = bias + gates
        return cls(0, w_hh, bias, b_hn, b_hn + (hidden if separate else 0))


class Tiling(NamedTuple):
    """How programs go over rows: so many at a time, so many times that ahead, and so many programs of a tile."""

    rows: int
    stages: int
    programs: int


def supports(problem: Problem, device: Device) -> bool:
    """Whether a kernel can run a problem: of widths that it copies in words of 16 bytes."""
    if not device.runs_gluon:
        return False
    words = 4 if problem.dtype == "float32" else 8
    # of a GRU the columns of a tile are all of the last gate, or none
    last = _TILE if problem.separate else 1
    return not (problem.inputs % words or problem.hidden % words or (problem.gates - problem.hidden) % last)


def is_profitable(problem: Problem, device: Device) -> bool:
    """Whether it is faster than a library's products and sums: every threshold was measured on an H200.

    Without wgmma it is for a GRU of up to 128 inputs and units. Compiled for an A100, GRU 2048,256,128 takes 3.22 ms
    for 3.44, in bfloat16 2.11 for 2.22, 64,128,128 0.229 for 0.233; LSTM 2048,256,128 3.81 for 3.74, GRU 1024,128,256
    7.58 for 7.54. For an RTX 3090, whose shared memory has room for three stages of loads, GRU 2048,256,128 takes 3.42
    for 3.33, 256,128,64 0.233 for 0.248, 64,128,128 0.231 for 0.233.
    """
    if not device.has_wgmma and not (
        problem.separate
        and max(problem.inputs, problem.hidden) <= 128
        and (problem.rows <= _THREE_STAGES_ROWS or device.shared_memory >= _FOUR_STAGES)
    ):
        return False
    narrow = min(problem.inputs, problem.hidden) < 64
    wide = problem.dtype == "float32"
    # a library multiplies hidden states twice, by dxp and by dhn
    fewest, widest = (4096, 256 if wide else 128) if problem.separate else (32768 if wide else 65536, 128)
    fits = not narrow and max(problem.inputs, problem.hidden) <= widest and problem.rows >= fewest
    return fits and supports(problem, device)


def choose(problem: Problem, device: Device) -> Tiling:
    """The tiling for a problem: as many rows on their way as shared memory holds, and a program a multiprocessor."""
    if not device.has_wgmma:
        rows, stages = 16 if problem.dtype == "float32" else 32, 4 if device.shared_memory >= _FOUR_STAGES else 3
    elif problem.dtype == "float32":
        rows, stages = 32, 3 if problem.separate else 4
    else:
        rows, stages = (64, 3) if problem.separate else (128, 2)
    at_once = max(1, device.multiprocessors // (problem.tiles * problem.models))
    return Tiling(rows, stages, max(1, min(at_once, problem.rows // _SHARE)))


class Launch(launch.Calls):
    """A problem with its tiling; writes one array, `sums` `[models, Layout.end]` in float32."""

    def __init__(self, problem: Problem, device: Device, tiling: Tiling | None = None):
        super().__init__(device)
        self.problem = problem
        self.tiling = tiling or choose(problem, device)
        models, programs, rows = problem.models, self.tiling.programs, self.tiling.rows
        end = Layout.of(problem.inputs, problem.hidden, problem.gates, problem.separate).end
        share = -(-problem.rows // programs // rows) * rows
        dtypes = dict(problem.dtypes) | {"partial": "float32", "sums": "float32"}
        constants = {
            "D": problem.inputs, "H": problem.hidden, "W": problem.gates, "ROWS": rows, "STAGES": self.tiling.stages,
            "REVERSE": problem.reverse,
        }  # fmt: skip
        scalars = {
            "rows": problem.rows, "share": share, "programs": programs, "T": problem.steps, "B": problem.batch,
        }  # fmt: skip
        self.workspaces.append(("partial", models * programs * end, "float32", False))
        self.add(
            weight_grads.weight_grads_kernel if device.has_wgmma else weight_grads.weight_grads_mma_kernel,
            models * programs * problem.tiles, _WARPS, dtypes, constants, scalars,
        )  # fmt: skip
        blocks = {"N": end, "BLOCK_P": 16, "BLOCK_C": 128}
        self.add(sums.sum_kernel, models * -(-end // 128), 4, dtypes, blocks, scalars, early=True)
