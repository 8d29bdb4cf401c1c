"""The launch of an input projection, and the choice of its tiling; see `torch_bridge.kernels.input_projection`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch_bridge import launch
from torch_bridge.kernels import input_projection
from torch_bridge.tiling import Device, UnsupportedError
from torch_bridge.tiling.arithmetic import cdiv, power_of_2

# Largest row of inputs, in bytes, for which a program keeps its weights on chip. Rows longer than half of that need
# `_THREE_STAGES_BYTES` of shared memory for three pipeline stages: 16-bit inputs take 139 KB. Float32 inputs take 106
# KB with three stages and 74 KB with two.
_KEPT_ROW_BYTES, _THREE_STAGES_BYTES = 512, 140_000
# Fewest rows per model for which several models were measured; a program has tiles of 64 rows.
_FEWEST_ROWS = 512


@dataclass(frozen=True)
class Problem:
    """One input projection of `[models, rows, inputs]`.

    Weights are `[models, gates, inputs]`, biases `[models, gates]`, and results `[models, rows, gates]`.

    Attributes:
      models: number of sets of weights, each with its own rows.
      rows: rows per model: groups, steps and sequences.
      inputs: width of the inputs.
      gates: width of the projection.
      dtypes: `(name, dtype)` of x and w_ih_t (both the same), of bias (float32), and of xp (float32 or float16).
        Weights in float32 must be rounded to TF32.
    """

    models: int
    rows: int
    inputs: int
    gates: int
    dtypes: tuple[tuple[str, str], ...]


class Tiling(NamedTuple):
    """A tile's rows and columns, the inputs per iteration, the warps of a program, and the pipeline stages.

    `programs` is the number of programs per model and block of columns. Each keeps the weights of that block on chip,
    and processes tiles of rows in turn. 0 means one program per tile.
    """

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int
    programs: int = 0


def is_profitable(problem: Problem, device: Device) -> bool:
    """Whether the kernel is faster than a library's product followed by a pass for the bias.

    The thresholds were measured on an H200, and with several models on an H100. In float32, a library fuses the bias
    with the product if the bias is an array of its own, so the kernel has to be as fast as that product. On Hopper, the
    kernel is as fast. Compiled for other GPUs, without wgmma, it makes a pass slower. Compiled for an A100, it gives
    3.58 ms instead of 3.40 ms for GRU 2048,256,128 and 3.99 ms instead of 3.70 ms for the LSTM. Compiled for an RTX
    3090, it gives 3.71 ms instead of 3.32 ms and 4.25 ms instead of 3.71 ms.
    """
    if device.interpreted or problem.gates < 128 or problem.rows < _FEWEST_ROWS:
        return False
    rows = problem.models * problem.rows
    dtype = dict(problem.dtypes)["x"]
    if dtype == "float32":
        if not device.has_wgmma:
            return False
        # narrower inputs were not measured; a load has 16 bytes if the width is a multiple of four, else one element
        kept = problem.inputs * 4 <= _KEPT_ROW_BYTES
        return kept and problem.inputs > 32 and problem.inputs % 4 == 0 and rows >= 4096
    # on GPUs other than Hopper, the kernel for wider inputs spills
    kept = device.has_wgmma or _keeps_weights(problem, device)
    return dtype == "bfloat16" and kept and problem.inputs >= 32 and rows >= 8192


def _keeps_weights(problem: Problem, device: Device) -> bool:
    """Whether a program keeps its weights on chip, beside three tiles of inputs, or two for long rows of float32."""
    wide = dict(problem.dtypes)["x"] == "float32"
    row = problem.inputs * (4 if wide else 2)
    return row <= _KEPT_ROW_BYTES and (wide or _has_three_stages(row, device))


def _has_three_stages(row: int, device: Device) -> bool:
    """Whether shared memory holds three tiles of rows of `row` bytes."""
    return row <= _KEPT_ROW_BYTES // 2 or device.shared_memory >= _THREE_STAGES_BYTES


def choose(problem: Problem, device: Device) -> Tiling:
    """Returns the tiling for a problem.

    Raises:
      UnsupportedError: the inputs are float32 and too wide for a program to keep their weights on chip.
    """
    wide = dict(problem.dtypes)["x"] == "float32"
    if not _keeps_weights(problem, device):
        if wide:
            raise UnsupportedError(
                f"a projection of {problem.inputs} float32 inputs has no kernel (the limit is {_KEPT_ROW_BYTES // 4}): "
                "use a library's matrix product instead"
            )
        return Tiling(128, 128 if problem.inputs <= 512 and problem.gates < 1536 else 256, 64, 8, 3)
    columns = 64 if wide else 128
    blocks = cdiv(problem.gates, columns) * problem.models
    at_once = max(1, (2 if problem.inputs <= 128 else 1) * device.multiprocessors // blocks)
    inputs = max(16, power_of_2(problem.inputs))
    stages = 3 if _has_three_stages(problem.inputs * (4 if wide else 2), device) else 2
    return Tiling(64, columns, inputs, 4, stages, min(at_once, cdiv(problem.rows, 64)))


class Launch(launch.Launch):
    """The launch of a problem with its tiling, which writes `xp`."""

    def __init__(self, problem: Problem, device: Device, tiling: Tiling | None = None):
        super().__init__(device)
        self.problem = problem
        self.tiling = tiling or choose(problem, device)
        rows, columns, inputs, warps, stages, programs = self.tiling
        constants = {
            "D": problem.inputs, "W": problem.gates, "BLOCK_R": rows, "BLOCK_W": columns, "BLOCK_D": inputs,
            "STAGES": stages,
        }  # fmt: skip
        tiles, blocks = cdiv(problem.rows, rows), cdiv(problem.gates, columns)
        scalars = {"rows": problem.rows, "tiles": tiles, "programs": programs}
        function = input_projection.projection_kernel if programs else input_projection.wide_projection_kernel
        grid = problem.models * (programs or tiles) * blocks
        self.add(function, grid, warps, dict(problem.dtypes), constants, scalars)
