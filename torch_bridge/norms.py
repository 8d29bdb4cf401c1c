"""Launches of RMSNorm and LayerNorm over rows: which kernels a call takes, in which tiling, and their launch.

As of a recurrence, a call allocates nothing, waits for nothing and tunes nothing. Backward it launches two kernels or,
of rows too wide to keep in registers with their sums, three: see `torch_bridge.kernels.norm`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from triton.compiler import CompiledKernel

from torch_bridge import launch
from torch_bridge.config import Device, Direction
from torch_bridge.kernels import norm, norm_staged

Kind = Literal["rms", "layer"]
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Bytes of a row that registers hold, forward; wider ones are read twice.
_KEPT_FORWARD = 65536
# Columns that registers hold backward, beside the float32 sums of the gradients; wider ones are read twice as well.
_KEPT_BACKWARD = 8192
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
        rstd, dx, dweight, dbias. Statistics and the gradients of weights are float32.
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
      staged: chunks wait in shared memory between the two times, see `torch_bridge.kernels.norm_staged`.
    """

    block_r: int
    block_n: int
    num_warps: int
    programs: int = 0
    side_by_side: int = 1
    staged: bool = False


class _Kernel(NamedTuple):
    """One kernel of a call, and what it is launched with."""

    function: Any
    constants: tuple[tuple[str, Any], ...]
    dtypes: tuple[tuple[str, str], ...]
    scalars: tuple[tuple[str, Any], ...]
    num_warps: int
    registers: int
    grid: int

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is compiled for."""
        return self.function, self.constants, self.dtypes, self.num_warps, self.registers

    def arguments(self) -> tuple[list[Any], list[tuple[int, str]]]:
        """In order, for a call to fill in addresses: at which index that of which array."""
        values = dict(self.constants) | dict(self.scalars)
        names = self.function.arg_names
        pointers = [(i, name.removesuffix("_ptr")) for i, name in enumerate(names) if name not in values]
        return [values.get(name) for name in names], pointers


def choose(problem: Problem, device: Device) -> Tiling:
    """The tiling of the kernel that normalizes, or differentiates: thresholds are measured on an H200."""
    size = _BYTES[dict(problem.dtypes)["x"]]
    block_n = _power_of_2(problem.columns)
    if problem.direction == "fwd":
        # 64 bytes of each array a thread, and of narrow rows 128, so that the fewest warps wait
        block_n = min(block_n, _KEPT_FORWARD // size // (2 if "residual" in dict(problem.dtypes) else 1))
        block_r = _clamp(8192 // size // block_n, 1, 64)
        per_thread = (128 if block_n * size <= 2048 else 64) // size
        return Tiling(block_r, block_n, _clamp(block_r * block_n // per_thread // 32, 1, 32))
    block_n = min(block_n, _KEPT_BACKWARD * 2 // size)
    block_r = _clamp(2048 // block_n, 1, 64)
    num_warps = _clamp(block_r * block_n // (16 if block_n <= 1024 else 8) // 32, 1, 16)
    tiles = -(-problem.rows // block_r)
    side_by_side = max(1, 16 // num_warps) if block_n <= 1024 else max(1, 32 // num_warps) if block_n <= 4096 else 1
    programs = -(-device.multiprocessors * side_by_side // problem.models)
    return Tiling(block_r, block_n, num_warps, max(1, min(tiles, programs)))


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _clamp(n: int, low: int, high: int) -> int:
    return max(low, min(high, n))


def _compiled(key: tuple[Any, ...], capability: int) -> CompiledKernel:
    function, constants, dtypes, num_warps, registers = key
    return launch.compile_kernel(
        function, dict(constants), dict(dtypes), capability, gluon=function is norm_staged.norm_bwd_kernel,
        num_warps=num_warps, maxnreg=registers,
    )  # fmt: skip


@functools.cache
def _loaded(key: tuple[Any, ...], capability: int, ordinal: int) -> CompiledKernel:
    return launch.load_kernel(_compiled(key, capability), ordinal)


class Launch:
    """A problem with its tiling: `load` it for a device, then call it with addresses and a stream.

    Attributes:
      workspaces: `(name, length, dtype, zeroed)` of further arrays that every call needs, and that no two calls may use
        at the same time.
    """

    def __init__(self, problem: Problem, device: Device, tiling: Tiling | None = None):
        self.problem = problem
        self.tiling = tiling or choose(problem, device)
        self._capability = device.capability
        models, rows, columns, dtypes = problem.models, problem.rows, problem.columns, dict(problem.dtypes)
        block_r, block_n, programs = self.tiling.block_r, self.tiling.block_n, self.tiling.programs
        tiles = -(-rows // block_r)
        scalars = {"R": rows, "tiles": tiles, "programs": programs, "epsilon": problem.epsilon}
        constants = {
            "N": columns, "BLOCK_R": block_r, "BLOCK_N": block_n, "CENTERED": problem.kind == "layer",
            "OPAQUE": not device.interpreted,
        }  # fmt: skip
        self.workspaces: list[tuple[str, int, str, bool]] = []
        self.kernels: list[_Kernel] = []
        self._ready: dict[int, list[tuple[CompiledKernel, int, list[Any], list[tuple[int, str]]]]] = {}

        def add(function: Any, grid: int, num_warps: int, side_by_side: int = 1, **more: Any) -> None:
            names = [name for name in function.arg_names if name.endswith("_ptr")]
            given = {name: dtypes[name.removesuffix("_ptr")] for name in names if name.removesuffix("_ptr") in dtypes}
            values = constants | more | dict.fromkeys(set(names) - set(given))
            self.kernels.append(
                _Kernel(
                    function,
                    tuple((name, values[name]) for name in function.arg_names if name in values),
                    tuple((name.removesuffix("_ptr"), dtype) for name, dtype in given.items()),
                    tuple((name, value) for name, value in scalars.items() if name in function.arg_names),
                    num_warps,
                    min(255, 65536 // (32 * num_warps * side_by_side)),
                    grid,
                )
            )

        if problem.direction == "fwd":
            add(norm.norm_fwd_kernel, models * tiles, self.tiling.num_warps, self.tiling.side_by_side)
            return
        sums = [name for name in ("weight", "bias") if f"d{name}" in dtypes]
        kept, blocks, adders = self.tiling.staged or block_n >= columns, -(-columns // _COLUMNS), programs
        function = norm_staged.norm_bwd_kernel if self.tiling.staged else norm.norm_bwd_kernel
        if not kept:
            adders = max(1, min(-(-rows // 64), -(-8 * device.multiprocessors // (models * blocks))))
            add(function, models * programs, self.tiling.num_warps, self.tiling.side_by_side)
        for name in sums:
            self.workspaces.append((f"partial_{name}", models * adders * columns, "float32", False))
            dtypes[f"partial_{name}"] = "float32"
        if kept:
            add(function, models * programs, self.tiling.num_warps, self.tiling.side_by_side)
        elif sums:
            scalars |= {"tiles": -(-rows // 64), "programs": adders}
            add(norm.norm_columns_kernel, models * blocks * adders, 8, BLOCK_R=64, BLOCK_C=_COLUMNS)
        if sums:
            # of few columns more programs at once, or few multiprocessors would have something to do
            block_c = 16 if columns <= 2048 else _COLUMNS
            grid = len(sums) * models * -(-columns // block_c)
            add(norm.norm_sum_kernel, grid, 8, BLOCK_P=4096 // block_c, BLOCK_C=block_c)

    def load(self, ordinal: int) -> None:
        """Compiles, and loads the modules onto a device. Must have happened before a stream capture."""
        self._ready[ordinal] = [
            (_loaded(k.key, self._capability, ordinal), k.grid, *k.arguments()) for k in self.kernels
        ]

    def compile(self) -> list[CompiledKernel]:
        """Compiles for the device that was given; needs no GPU."""
        return [_compiled(k.key, self._capability) for k in self.kernels]

    def __call__(self, stream: int, ordinal: int, addresses: Mapping[str, int]) -> None:
        """Launches on a stream of a device, given the address of every array by name, workspaces included."""
        for compiled, grid, values, pointers in self._ready[ordinal]:
            arguments = values.copy()
            for i, name in pointers:
                arguments[i] = addresses[name]
            compiled.run(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)

    def interpret(self, tensors: Mapping[str, Any]) -> None:
        """Runs in Triton's interpreter on CPU tensors given by name."""
        with launch.interpreter:
            for k in self.kernels:
                arrays = {f"{name}_ptr": tensors[name] for name, _ in k.dtypes}
                k.function[(k.grid,)](**arrays, **dict(k.constants), **dict(k.scalars))


def widest(device: Device) -> int:
    """The most columns that the kernels take: offsets in a row are 32 bits."""
    del device
    return 2**30
