"""What several families of kernels support, and which Triton they are compiled with."""

from __future__ import annotations

import functools
import importlib.metadata
import sys

from torch_bridge.tiling.devices import Device
from torch_bridge.tiling.problem import Problem, product_kind

# Up to this hidden size, kernels of every cell may multiply in full float32 although TF32 is allowed.
FLOAT32_WIDTH = 64
# Fewest steps for which it is profitable to load all weights on chip.
MIN_STEPS_ON_CHIP = 8


def has_16_bit_kernels(problem: Problem) -> bool:
    """Returns whether the kernels that keep 16-bit weights on chip support a problem.

    The operands of these kernels are bfloat16 or, for TF32, scaled float16. Arrays in float16 are not supported.
    """
    covered = product_kind(problem) != "tf32x3" and problem.operand_dtype != "float16"
    return covered and problem.steps > 1  # loading the weights on chip takes longer than a step


def has_wgmma_kernels(problem: Problem, device: Device) -> bool:
    """Returns whether the loops "split" and "rows" support a problem; forward, they reset states to zeros only."""
    covered = device.has_wgmma and has_16_bit_kernels(problem)
    return covered and (problem.direction == "bwd" or problem.reset_state == "zeros")


@functools.cache
def triton_version() -> tuple[int, ...]:
    """Returns Triton's major and minor version, as later versions' ptxas may need more registers.

    An unknown version counts as later than any other. If a release is installed, a nightly build is not looked for.
    """
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # nightly builds have another name; finding it takes up to a second
        names = importlib.metadata.packages_distributions().get("triton")
        if not names:
            return (sys.maxsize,)
        version = importlib.metadata.version(names[0])
    return tuple(map(int, version.split(".")[:2]))
