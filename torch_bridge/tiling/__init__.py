"""The choice of a launch's tiling: a pure function of the problem and the device, without measurements at call time.

`problem` and `devices` define what is to be run and where, and `config` what all tilings have in common. Each family of
kernels has the class of its tilings and their measured costs in a file of its own: `streamed`, `resident`, `fma`,
`split_registers`, `split` and `rows`.
`candidates` ranks them, and `scan` compares the first one with `lax.scan`. Nothing here imports torch or triton.
"""

from torch_bridge.tiling.candidates import (
    KernelConfig,
    candidates,
    heuristic,
    may_have_float32_residuals,
    with_residual_dtypes,
)
from torch_bridge.tiling.config import Loop
from torch_bridge.tiling.devices import GPUS, PROFILES, Device, profile
from torch_bridge.tiling.problem import (
    RESET_STATES,
    Direction,
    Precision,
    Problem,
    ResetState,
    Reverse,
    Sizes,
    UnsupportedError,
)
from torch_bridge.tiling.scan import prefers_scan
from torch_bridge.tiling.streamed import max_hidden

__all__ = [
    "GPUS",
    "PROFILES",
    "RESET_STATES",
    "Device",
    "Direction",
    "KernelConfig",
    "Loop",
    "Precision",
    "Problem",
    "ResetState",
    "Reverse",
    "Sizes",
    "UnsupportedError",
    "candidates",
    "heuristic",
    "max_hidden",
    "may_have_float32_residuals",
    "prefers_scan",
    "profile",
    "with_residual_dtypes",
]
