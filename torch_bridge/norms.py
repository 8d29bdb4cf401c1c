"""Launches of RMSNorm and LayerNorm over rows, and the choice of their kernels and tilings.

Like the launch of a recurrence, a call does not allocate, wait or autotune. With gradients of weights or biases, the
backward pass launches two kernels, or three if neither registers nor shared memory hold a row; see
`torch_bridge.kernels.norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch_bridge import launch
from torch_bridge.kernels import norm, norm_staged
from torch_bridge.tiling import Device, Direction
from torch_bridge.tiling.arithmetic import cdiv, power_of_2

Kind = Literal["rms", "layer"]
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Largest number of columns that the kernels support, because offsets in a row have 32 bits.
WIDEST = 2**30
# Largest number of columns that registers hold in the forward pass; wider rows are read twice.
_KEPT_FORWARD = 32768
# Forward tilings, by bytes per element and columns: rows, warps, and programs side by side. With 64 to 80 registers per
# thread there is room for other programs, whose loads are in flight while a program reduces. In float32, LayerNorm
# would spill with so few registers. With more registers, LayerNorm reaches 0.96 instead of 0.81 of a copy's bandwidth
# for 8192 columns, and 1.0 instead of 0.84 for 16384.
_FORWARD = {
    (2, 2048): (2, 4, 1), (2, 4096): (1, 4, 6), (2, 8192): (1, 8, 4), (2, 16384): (1, 16, 2), (2, 32768): (1, 32, 1),
    (4, 2048): (1, 4, 1), (4, 4096): (1, 8, 3), (4, 8192): (1, 8, 1), (4, 16384): (1, 8, 2), (4, 32768): (1, 32, 1),
}  # fmt: skip
# Largest number of columns that registers hold in the backward pass, beside float32 sums of the gradients, by kind and
# bytes per element.
_KEPT_BACKWARD = {("rms", 2): 8192, ("rms", 4): 8192, ("layer", 2): 8192, ("layer", 4): 4096}
# Wider rows are staged in shared memory if neither the columns nor the sums of a program exceed the first limit. If
# neither exceeds the second limit, a program has 32 warps.
_STAGED, _STAGED_LIGHT = 32768, 16384
# Bytes per chunk of a row that is wider still.
_CHUNK = 16384
# Largest dx, in bytes, that fits in L2 if x and dy are evicted first. This eviction order makes the backward pass 1 to
# 3 % faster, but 4 % slower for a larger dx.
_IN_CACHE = 2**25
# Columns per program in the kernels that sum over rows, or over programs.
_COLUMNS = 64


@dataclass(frozen=True)
class Problem:
    """Rows to normalize: arrays `[models, rows, columns]`, weights `[models, columns]`, statistics `[models, rows]`.

    Attributes:
      kind: RMSNorm or LayerNorm.
      direction: forward or backward pass.
      models: number of sets of weights, each with its own rows.
      rows: rows per model.
      columns: width of a row.
      epsilon: constant added to the mean square, or to the variance, inside the square root.
      dtypes: `(name, dtype)` of every input and output; an array that is not named is not computed or not used. The
        forward pass has x, residual, weight, bias, y, total (x + residual), mean and rstd; the backward pass has dy, x,
        dtotal, weight, mean, rstd, dx, dweight and dbias. Statistics are float32.
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
    """The tiling of rows into programs.

    Attributes:
      block_r: rows that a program processes at a time.
      block_n: columns that a program processes at a time; if a row is wider, the program goes over it twice, in chunks.
      num_warps: warps per program.
      programs: programs per model, each of which processes tiles of rows in turn; 0 if each program has one tile.
      side_by_side: programs per SM for which there must be enough registers.
      slots: chunks of `block_n` columns that shared memory holds at a time, at least those of one row, see
        `torch_bridge.kernels.norm_staged`; 0 if rows are not staged in shared memory.
    """

    block_r: int
    block_n: int
    num_warps: int
    programs: int = 0
    side_by_side: int = 1
    slots: int = 0


def choose(problem: Problem, device: Device) -> Tiling:
    """Returns the tiling of the forward or backward kernel; every threshold was measured on an H200."""
    size = _BYTES[dict(problem.dtypes)["x"]]
    return _forward_tiling(problem, size) if problem.direction == "fwd" else _backward_tiling(problem, size, device)


def _forward_tiling(problem: Problem, size: int) -> Tiling:
    block_n = power_of_2(problem.columns)
    if block_n > _KEPT_FORWARD:
        return Tiling(1, _CHUNK // size, 16)
    if block_n <= 1024 and size == 2:  # a row belongs to one warp, whose reductions need no barrier
        return Tiling(_clamp(1024 // block_n, 2, 64), block_n, 1)
    if block_n <= 1024:  # few warps, because more would have too few loads each
        block_r = _clamp(2048 // block_n, 1, 64)
        return Tiling(block_r, block_n, max(block_r * block_n // 1024, 1))
    block_r, num_warps, side_by_side = _FORWARD[size, block_n]
    # faster settings that would spill with wider weights, a residual or a mask; fractions are of a copy's bandwidth
    halves = all(_BYTES[x] == 2 for name, x in problem.dtypes if name not in ("mean", "rstd"))
    alone = halves and "residual" not in dict(problem.dtypes)
    if (problem.kind, block_n, alone) == ("layer", 4096, True):  # 0.95 instead of 0.91
        side_by_side = 8
    if (problem.columns, size) == (32768, 4):  # LayerNorm 0.97 instead of 0.91
        num_warps = 16
    if (problem.columns, alone) == (32768, True):  # RMSNorm 0.96 not 0.91, LayerNorm 0.82 not 0.72
        num_warps, side_by_side = 8, 2
    return Tiling(block_r, block_n, num_warps, side_by_side=side_by_side)


def _backward_tiling(problem: Problem, size: int, device: Device) -> Tiling:
    block_n, layer = power_of_2(problem.columns), problem.kind == "layer"
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
    if block_n <= 1024 and size == 2:  # 16 elements per thread, 512 or 640 threads per SM
        num_warps = _clamp(block_n // 256, 1, 4)
        block_r = _clamp(512 * num_warps // block_n, 1, 64)
        side_by_side = (16 if layer or block_n <= 256 else 20) // num_warps
    elif block_n < 1024:
        num_warps, side_by_side = _clamp(block_r * block_n // 512, 1, 2), 8
        if layer and block_n <= 256:  # 0.96 instead of 0.65 of a copy's bandwidth
            num_warps, side_by_side = _clamp(block_r * block_n // 256, 1, 4), 4
    else:
        heavy = layer and size == 2 and block_n in (2048, 4096)
        num_warps = _clamp(block_n * size // (32 if heavy else 16) // 32, 4, 16)
        side_by_side = 1 if size * block_n >= 16384 else (16 if heavy else 32) // num_warps
    programs = _programs(problem, cdiv(problem.rows, block_r), device, num_warps, side_by_side)
    return Tiling(block_r, block_n, num_warps, programs, side_by_side)


def _slots(problem: Problem, chunk: int, device: Device) -> int:
    """Returns how many chunks of x, and of dy, shared memory holds: those of one to two rows, or 0 if it holds none."""
    sizes = [_BYTES[dict(problem.dtypes)[name]] for name in ("x", "dy")]
    # asynchronous copies move 16 bytes each
    if not device.runs_gluon or any(problem.columns * size % 16 for size in sizes):
        return 0
    row, most = cdiv(problem.columns, chunk), (device.shared_memory - 4096) // (sum(sizes) * chunk)
    # for 32768 columns, 12 chunks are faster than the 13 that fit: 0.85 instead of 0.79 of a copy's bandwidth (H200)
    return next((slots for slots in (2 * row, row + row // 2, row + row // 4, row) if slots <= most), 0)


def _programs(problem: Problem, tiles: int, device: Device, num_warps: int, side_by_side: int = 1) -> int:
    """Returns the programs per model: the fewest that need no more rounds of tiles than all that can run at once."""
    at_once = max(1, cdiv(device.multiprocessors * device.programs_per_sm(num_warps, side_by_side), problem.models))
    return cdiv(tiles, cdiv(tiles, at_once))


def _clamp(n: int, low: int, high: int) -> int:
    return max(low, min(high, n))


class Launch(launch.Launch):
    """The launch of a problem with its tiling."""

    def __init__(self, problem: Problem, device: Device, tiling: Tiling | None = None):
        super().__init__(device)
        self.problem = problem
        self.tiling = tiling or choose(problem, device)
        models, rows, columns, dtypes = problem.models, problem.rows, problem.columns, dict(problem.dtypes)
        block_r, block_n, programs = self.tiling.block_r, self.tiling.block_n, self.tiling.programs
        tiles = cdiv(rows, block_r)
        scalars = {"R": rows, "tiles": tiles, "programs": programs, "epsilon": problem.epsilon}
        constants = {
            "N": columns, "BLOCK_R": block_r, "BLOCK_N": block_n, "CENTERED": problem.kind == "layer",
            "OPAQUE": not device.interpreted,
            "YIELD": block_n >= columns and models * rows * columns * _BYTES[dtypes["x"]] <= _IN_CACHE,
        }  # fmt: skip
        num_warps, side_by_side = self.tiling.num_warps, self.tiling.side_by_side
        constants["ONE_EACH"] = block_n <= 32 * num_warps
        if slots := self.tiling.slots:
            constants["SLOTS"] = slots

        if problem.direction == "fwd":
            self.add(norm.norm_fwd_kernel, models * tiles, num_warps, dtypes, constants, scalars, side_by_side)
            return
        sums = [name for name in ("weight", "bias") if f"d{name}" in dtypes]
        with_sums = dtypes | {f"partial_{name}": "float32" for name in sums}
        constants["EARLY"] = self.allows_early_start and bool(
            sums
        )  # without sums, an early kernel would be another call's
        function = norm_staged.norm_bwd_kernel if slots else norm.norm_bwd_kernel
        adders, grid = programs, models * programs
        if slots or block_n >= columns:
            self.add(function, grid, num_warps, with_sums, constants, scalars, side_by_side)
        else:
            self.add(function, grid, num_warps, dtypes, constants, scalars, side_by_side)
            blocks = cdiv(columns, _COLUMNS)
            adders = max(1, min(cdiv(rows, 64), cdiv(8 * device.multiprocessors, models * blocks)))
            scalars |= {"tiles": cdiv(rows, 64), "programs": adders}
            if sums:
                constants |= {"BLOCK_R": 64, "BLOCK_C": _COLUMNS}
                self.add(norm.norm_columns_kernel, models * blocks * adders, 8, with_sums, constants, scalars)
        if sums:
            self.workspaces += [(f"partial_{name}", models * adders * columns, "float32", False) for name in sums]
            # with few columns, blocks are narrower and sum over more programs at once; otherwise few SMs would have
            # work
            block_p, block_c, num_warps = (2048, 8, 16) if columns <= 2048 else (4096 // _COLUMNS, _COLUMNS, 8)
            constants |= {"BLOCK_P": block_p, "BLOCK_C": block_c}
            grid = len(sums) * models * cdiv(columns, block_c)
            self.add(norm.norm_sum_kernel, grid, num_warps, with_sums, constants, scalars, early=True)
