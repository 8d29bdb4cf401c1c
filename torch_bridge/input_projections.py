"""The launch of an input projection: which it takes, in which tiling; see `torch_bridge.kernels.input_projection`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch_bridge import launch
from torch_bridge.config import Device, UnsupportedError
from torch_bridge.kernels import input_projection

# Bytes of a row of inputs up to which a program keeps its weights on chip, and shared memory that this takes for rows
# longer than half of it: 139 KB of 16-bit inputs, 106 KB of float32 with three stages of loads and 74 KB with two.
_KEPT_BYTES, _KEPT_SHARED_MEMORY = 512, 140_000


@dataclass(frozen=True)
class Problem:
    """Inputs `[models, rows, inputs]`, weights `[models, gates, inputs]`, biases `[models, gates]`.

    Attributes:
      models: sets of weights, each with rows of its own.
      rows: of each model: groups, steps and sequences.
      inputs: width of the inputs.
      gates: width of the projection.
      dtypes: `(name, dtype)` of x and w_ih_t, which are the same, of bias, float32, and of xp, float32 or float16.
        Weights of float32 are rounded to TF32.
    """

    models: int
    rows: int
    inputs: int
    gates: int
    dtypes: tuple[tuple[str, str], ...]


class Tiling(NamedTuple):
    """A tile's rows, columns and inputs at a time, warps, stages of loads.

    And programs of a model and a block of columns, which keep its weights on chip; 0: a program has one tile.
    """

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int
    programs: int = 0


def is_profitable(problem: Problem, device: Device) -> bool:
    """Whether it is faster than a library's product and the pass for the bias: every threshold was measured on an H200.

    Of float32 a library adds the bias while it multiplies, if that is an array of its own: so it has to be as fast. It
    is on Hopper; compiled for other GPUs, without wgmma, it makes a pass slower (as an A100, GRU 2048,256,128 3.58 ms
    for 3.40 and LSTM 3.99 for 3.70; as an RTX 3090 3.71 for 3.32 and 4.25 for 3.71).
    """
    if device.interpreted or problem.gates < 128:
        return False
    dtype = dict(problem.dtypes)["x"]
    if dtype == "float32":
        if not device.has_wgmma:
            return False
        # narrower ones were not measured; it loads words of 16 bytes, of widths that no four divide one by one
        kept = problem.inputs * 4 <= _KEPT_BYTES
        return kept and problem.inputs > 32 and problem.inputs % 4 == 0 and problem.rows >= 4096
    # the kernel for wider inputs spills elsewhere
    kept = device.has_wgmma or _keeps_weights(problem, device)
    return dtype == "bfloat16" and kept and problem.inputs >= 32 and problem.rows >= 8192


def _keeps_weights(problem: Problem, device: Device) -> bool:
    """Whether a program keeps its weights on chip, beside three tiles of inputs or, of long rows of float32, two."""
    wide = dict(problem.dtypes)["x"] == "float32"
    row = problem.inputs * (4 if wide else 2)
    return row <= _KEPT_BYTES and (wide or _has_three_stages(row, device))


def _has_three_stages(row: int, device: Device) -> bool:
    """Whether shared memory holds three tiles of rows of so many bytes."""
    return row <= _KEPT_BYTES // 2 or device.shared_memory >= _KEPT_SHARED_MEMORY


def choose(problem: Problem, device: Device) -> Tiling:
    """The tiling for a problem.

    Raises:
      UnsupportedError: inputs are of float32 and too wide for their weights to stay on chip.
    """
    wide = dict(problem.dtypes)["x"] == "float32"
    if not _keeps_weights(problem, device):
        if wide:
            raise UnsupportedError(
                f"a projection of {problem.inputs} inputs of float32 has no kernel (up to {_KEPT_BYTES // 4}): "
                "leave it to a library"
            )
        return Tiling(128, 128 if problem.inputs <= 512 and problem.gates < 1536 else 256, 64, 8, 3)
    columns = 64 if wide else 128
    blocks = -(-problem.gates // columns) * problem.models
    at_once = max(1, (2 if problem.inputs <= 128 else 1) * device.multiprocessors // blocks)
    inputs = max(16, 1 << (problem.inputs - 1).bit_length())
    stages = 3 if _has_three_stages(problem.inputs * (4 if wide else 2), device) else 2
    return Tiling(64, columns, inputs, 4, stages, min(at_once, -(-problem.rows // 64)))


class Launch(launch.Calls):
    """A problem with its tiling; writes `xp`."""

    def __init__(self, problem: Problem, device: Device, tiling: Tiling | None = None):
        super().__init__(device)
        self.problem = problem
        self.tiling = tiling or choose(problem, device)
        rows, columns, inputs, warps, stages, programs = self.tiling
        constants = {
            "D": problem.inputs, "W": problem.gates, "BLOCK_R": rows, "BLOCK_W": columns, "BLOCK_D": inputs,
            "STAGES": stages,
        }  # fmt: skip
        tiles, blocks = -(-problem.rows // rows), -(-problem.gates // columns)
        scalars = {"rows": problem.rows, "tiles": tiles, "programs": programs}
        function = input_projection.projection_kernel if programs else input_projection.wide_projection_kernel
        grid = problem.models * (programs or tiles) * blocks
        self.add(function, grid, warps, dict(problem.dtypes), constants, scalars)
