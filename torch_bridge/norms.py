"""Launches of RMSNorm and LayerNorm over rows: which kernels a call takes, in which tiling, and their launch.

As of a recurrence, a call allocates nothing, waits for nothing and tunes nothing. Backward it launches two kernels or,
of rows that neither registers nor shared memory hold, three: see `torch_bridge.kernels.norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_bridge import launch
from torch_bridge.config import Device, Direction
from torch_bridge.kernels import norm, norm_staged

Kind = Literal["rms", "layer"]
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The most columns that the kernels take: offsets in a row are 32 bits.
WIDEST = 2**30
# Columns that registers hold, forward; wider rows are read twice.
_KEPT_FORWARD = 32768
# Forward, by bytes of a number and columns: rows, warps and side by side. 64 to 80 registers a thread leave room for
# other programs, whose loads are in flight while this one adds up; in float32 LayerNorm would spill in so few (of 8192
# columns 0.96 of a copy's bandwidth for 0.81, of 16384 1.0 for 0.84).
_FORWARD = {
    (2, 2048): (2, 4, 1), (2, 4096): (1, 4, 6), (2, 8192): (1, 8, 4), (2, 16384): (1, 16, 2), (2, 32768): (1, 32, 1),
    (4, 2048): (1, 4, 1), (4, 4096): (1, 8, 3), (4, 8192): (1, 8, 1), (4, 16384): (1, 8, 2), (4, 32768): (1, 32, 1),
}  # fmt: skip
# The same backward, beside float32 sums of the gradients: by kind, and bytes of a number.
_KEPT_BACKWARD = {("rms", 2): 8192, ("rms", 4): 8192, ("layer", 2): 8192, ("layer", 4): 4096}
# Wider ones wait in shared memory, where a program has no more columns, or sums, than this; up to the second number it
# has 32 warps.
_STAGED, _STAGED_LIGHT = 32768, 16384
# Bytes of a chunk of rows wider than those.
_CHUNK = 16384
# Bytes of dx up to which L2 has room for it, if x and dy give way: backward 1 to 3 % faster, and 4 % slower above.
_IN_CACHE = 2**25
# Columns of a program that sums up rows, or programs.
_COLUMNS = 64


@dataclass(frozen=True)
class Problem:
    """Rows to normalize: arrays `[models, rows, columns]`, weights `[models, columns]`, statistics `[models, rows]`.

    Attributes:
      kind: RMSNorm or LayerNorm.
      direction: forward or backward pass.
      models: sets of weights, each with rows of its own.
      rows: of each model.
      columns: width of a row.
      epsilon: added to the mean square, or to the variance, inside the root.
      dtypes: `(name, dtype)` of every array that takes part; an array left out is not computed or not used. Forward
        they are x, residual, weight, bias, y, total (x + residual), mean, rstd; backward dy, x, dtotal, weight, mean,
        rstd, dx, dweight, dbias. Statistics are float32.
    """

    kind: Kind
    direction: Direction
    models: int
    rows: int
    columns: int
    epsilon: float
    dtypes: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tiling:
    """How programs go over rows.

    Attributes:
      block_r: rows of a program at a time.
      block_n: columns of a program at a time; if that is less than a row, it goes over a row twice, in chunks.
      num_warps: of a program.
      programs: of a model, where each takes tiles of rows in turn.
      side_by_side: programs that a multiprocessor is to have registers for.
      slots: chunks of a row, of `block_n` columns, that shared memory holds at a time: at least a row's, see
        `torch_bridge.kernels.norm_staged`; 0: no row waits there.
    """

    block_r: int
    block_n: int
    num_warps: int
    programs: int = 0
    side_by_side: int = 1
    slots: int = 0


def choose(problem: Problem, device: Device) -> Tiling:
    """The tiling of the kernel that normalizes, or differentiates: every threshold was measured on an H200."""
    size = _BYTES[dict(problem.dtypes)["x"]]
    return _forward_tiling(problem, size) if problem.direction == "fwd" else _backward_tiling(problem, size, device)


def _forward_tiling(problem: Problem, size: int) -> Tiling:
    block_n = _power_of_2(problem.columns)
    if block_n > _KEPT_FORWARD:
        return Tiling(1, _CHUNK // size, 16)
    if block_n <= 1024 and size == 2:  # a row is one warp's, whose sums need no barrier
        return Tiling(_clamp(1024 // block_n, 2, 64), block_n, 1)
    if block_n <= 1024:  # few warps, or there would be too few loads in each
        block_r = _clamp(2048 // block_n, 1, 64)
        return Tiling(block_r, block_n, max(block_r * block_n // 1024, 1))
    block_r, num_warps, side_by_side = _FORWARD[size, block_n]
    # faster of what wider weights, a residual or a mask would make spill, in shares of a copy's bandwidth
    halves = all(_BYTES[x] == 2 for name, x in problem.dtypes if name not in ("mean", "rstd"))
    alone = halves and "residual" not in dict(problem.dtypes)
    if (problem.kind, block_n, alone) == ("layer", 4096, True):  # 0.95 for 0.91
        side_by_side = 8
    if (problem.columns, size) == (32768, 4):  # LayerNorm 0.97 for 0.91
        num_warps = 16
    if (problem.columns, alone) == (32768, True):  # RMSNorm 0.96 for 0.91, LayerNorm 0.82 for 0.72
        num_warps, side_by_side = 8, 2
    return Tiling(block_r, block_n, num_warps, side_by_side=side_by_side)


def _backward_tiling(problem: Problem, size: int, device: Device) -> Tiling:
    block_n, layer = _power_of_2(problem.columns), problem.kind == "layer"
    kept = block_n <= _KEPT_BACKWARD[problem.kind, size]
    sums = block_n * sum(name in ("dweight", "dbias") for name, _ in problem.dtypes)
    if not kept and max(block_n, sums) <= _STAGED:
        num_warps = 32 if max(block_n, sums) <= _STAGED_LIGHT else 16
        chunk = num_warps * 32 * 16 // size
        if slots := _slots(problem, chunk, device):
            return Tiling(1, chunk, num_warps, _programs(problem, problem.rows, device, num_warps), slots=slots)
    if not kept:
        block_n = _CHUNK // size
    block_r = _clamp(1024 // block_n, 1, 64)
    if block_n <= 1024 and size == 2:  # 16 numbers a thread, 512 or 640 threads a multiprocessor
        num_warps = _clamp(block_n // 256, 1, 4)
        block_r = _clamp(512 * num_warps // block_n, 1, 64)
        side_by_side = (16 if layer or block_n <= 256 else 20) // num_warps
    elif block_n < 1024:
        num_warps, side_by_side = _clamp(block_r * block_n // 512, 1, 2), 8
        if layer and block_n <= 256:  # 0.96 of a copy's bandwidth for 0.65
            num_warps, side_by_side = _clamp(block_r * block_n // 256, 1, 4), 4
    else:
        heavy = layer and size == 2 and block_n in (2048, 4096)
        num_warps = _clamp(block_n * size // (32 if heavy else 16) // 32, 4, 16)
        side_by_side = 1 if size * block_n >= 16384 else (16 if heavy else 32) // num_warps
    programs = _programs(problem, -(-problem.rows // block_r), device, num_warps, side_by_side)
    return Tiling(block_r, block_n, num_warps, programs, side_by_side)


def _slots(problem: Problem, chunk: int, device: Device) -> int:
    """Chunks of x and of dy that shared memory is to hold, of a row or up to two; 0 where it cannot."""
    sizes = [_BYTES[dict(problem.dtypes)[name]] for name in ("x", "dy")]
    # copies are of 16 bytes
    if not device.runs_gluon or any(problem.columns * size % 16 for size in sizes):
        return 0
    row, most = -(-problem.columns // chunk), (device.shared_memory - 4096) // (sum(sizes) * chunk)
    # of 32768 columns 12 chunks are faster than the 13 that fit: 0.85 of a copy's bandwidth for 0.79 (H200)
    return next((slots for slots in (2 * row, row + row // 2, row + row // 4, row) if slots <= most), 0)


def _programs(problem: Problem, tiles: int, device: Device, num_warps: int, side_by_side: int = 1) -> int:
    """Of each model: as many as the device runs at once, or as few as take no more tiles in turn than those would."""
    at_once = max(1, -(-device.multiprocessors * device.programs_per_sm(num_warps, side_by_side) // problem.models))
    return -(-tiles // -(-tiles // at_once))


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _clamp(n: int, low: int, high: int) -> int:
    return max(low, min(high, n))


class Launch(launch.Calls):
    """A problem with its tiling."""

    def __init__(self, problem: Problem, device: Device, tiling: Tiling | None = None):
        super().__init__(device)
        self.problem = problem
        self.tiling = tiling or choose(problem, device)
        models, rows, columns, dtypes = problem.models, problem.rows, problem.columns, dict(problem.dtypes)
        block_r, block_n, programs = self.tiling.block_r, self.tiling.block_n, self.tiling.programs
        tiles = -(-rows // block_r)
        scalars = {"R": rows, "tiles": tiles, "programs": programs, "epsilon": problem.epsilon}
        constants = {
            "N": columns, "BLOCK_R": block_r, "BLOCK_N": block_n, "CENTERED": problem.kind == "layer",
            "OPAQUE": not device.interpreted,
            "YIELD": block_n >= columns and models * rows * columns * _BYTES[dtypes["x"]] <= _IN_CACHE,
        }  # fmt: skip
        if slots := self.tiling.slots:
            constants["SLOTS"] = slots

        num_warps, side_by_side = self.tiling.num_warps, self.tiling.side_by_side
        if problem.direction == "fwd":
            self.add(norm.norm_fwd_kernel, models * tiles, num_warps, dtypes, constants, scalars, side_by_side)
            return
        sums = [name for name in ("weight", "bias") if f"d{name}" in dtypes]
        with_sums = dtypes | {f"partial_{name}": "float32" for name in sums}
        constants["EARLY"] = self.early and bool(sums)  # or what begins early would be somebody else's
        function = norm_staged.norm_bwd_kernel if slots else norm.norm_bwd_kernel
        adders, grid = programs, models * programs
        if slots or block_n >= columns:
            self.add(function, grid, num_warps, with_sums, constants, scalars, side_by_side)
        else:
            self.add(function, grid, num_warps, dtypes, constants, scalars, side_by_side)
            blocks = -(-columns // _COLUMNS)
            adders = max(1, min(-(-rows // 64), -(-8 * device.multiprocessors // (models * blocks))))
            scalars |= {"tiles": -(-rows // 64), "programs": adders}
            if sums:
                constants |= {"BLOCK_R": 64, "BLOCK_C": _COLUMNS}
                self.add(norm.norm_columns_kernel, models * blocks * adders, 8, with_sums, constants, scalars)
        if sums:
            self.workspaces += [(f"partial_{name}", models * adders * columns, "float32", False) for name in sums]
            # of few columns more programs at once, or few multiprocessors would have something to do
            block_p, block_c, num_warps = (2048, 8, 16) if columns <= 2048 else (4096 // _COLUMNS, _COLUMNS, 8)
            constants |= {"BLOCK_P": block_p, "BLOCK_C": block_c}
            grid = len(sums) * models * -(-columns // block_c)
            self.add(norm.norm_sum_kernel, grid, num_warps, with_sums, constants, scalars, early=True)
