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
from torch_bridge.kernels import norm

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
    """Rows and columns of a program at a time, its warps, and programs of a model where each takes tiles in turn."""

    block_r: int
    block_n: int
    num_warps: int
    programs: int = 0


class _Kernel(NamedTuple):
    """One kernel of a call, and what it is launched with."""

    function: Any
    constants: tuple[tuple[str, Any], ...]
    dtypes: tuple[tuple[str, str], ...]
    scalars: tuple[tuple[str, Any], ...]
    num_warps: int
    grid: int

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


@functools.cache
def _loaded(
    function: Any, constants: tuple[tuple[str, Any], ...], dtypes: tuple[tuple[str, str], ...], num_warps: int,
    capability: int, ordinal: int,
) -> CompiledKernel:  # fmt: skip
    return launch.load_kernel(_compiled(function, constants, dtypes, num_warps, capability), ordinal)


def _compiled(
    function: Any, constants: tuple[tuple[str, Any], ...], dtypes: tuple[tuple[str, str], ...], num_warps: int,
    capability: int,
) -> CompiledKernel:  # fmt: skip
    return launch.compile_kernel(function, dict(constants), dict(dtypes), capability, num_warps=num_warps)


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

        def add(function: Any, grid: int, num_warps: int, **more: Any) -> None:
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
                    grid,
                )
            )

        if problem.direction == "fwd":
            add(norm.norm_fwd_kernel, models * tiles, self.tiling.num_warps)
            return
        sums = [name for name in ("weight", "bias") if f"d{name}" in dtypes]
        kept = block_n >= columns
        blocks = -(-columns // _COLUMNS)
        adders = programs if kept else max(1, min(-(-rows // 64), -(-8 * device.multiprocessors // (models * blocks))))
        if not kept:
            add(norm.norm_bwd_kernel, models * programs, self.tiling.num_warps)
        for name in sums:
            self.workspaces.append((f"partial_{name}", models * adders * columns, "float32", False))
            dtypes[f"partial_{name}"] = "float32"
        if kept:
            add(norm.norm_bwd_kernel, models * programs, self.tiling.num_warps)
        elif sums:
            scalars |= {"tiles": -(-rows // 64), "programs": adders}
            add(norm.norm_columns_kernel, models * blocks * adders, 8, BLOCK_R=64, BLOCK_C=_COLUMNS)
        if sums:
            add(norm.norm_sum_kernel, models * blocks, 4, BLOCK_P=32, BLOCK_C=_COLUMNS)

    def load(self, ordinal: int) -> None:
        """Compiles, and loads the modules onto a device. Must have happened before a stream capture."""
        self._ready[ordinal] = [
            (_loaded(k.function, k.constants, k.dtypes, k.num_warps, self._capability, ordinal), k.grid, *k.arguments())
            for k in self.kernels
        ]

    def compile(self) -> list[CompiledKernel]:
        """Compiles for the device that was given; needs no GPU."""
        return [_compiled(k.function, k.constants, k.dtypes, k.num_warps, self._capability) for k in self.kernels]

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
