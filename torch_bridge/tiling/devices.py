"""The facts about a GPU by which launches are chosen, and profiles of GPUs to compile for without having one."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The facts about a GPU that the choice of a kernel and its tiling depends on, and the GPU's name.

    Attributes:
      capability: compute capability times ten.
      multiprocessors: number of SMs.
      shared_memory: bytes of shared memory that one program may use.
      threads: maximum number of resident threads per SM.
      interpreted: whether kernels run in Triton's interpreter, which has no Gluon.
      name: the name that the driver reports, for messages.
    """

    capability: int = 90
    multiprocessors: int = 132
    shared_memory: int = 232_448
    threads: int = 2048
    interpreted: bool = False
    name: str = ""

    @property
    def runs_gluon(self) -> bool:
        """Whether kernels written in Gluon run here; kernels with wgmma need `has_wgmma` in addition."""
        return not self.interpreted and self.capability >= 80

    @property
    def has_wgmma(self) -> bool:
        """Whether the SMs have Hopper's wgmma, which neither earlier nor later GPUs have."""
        return not self.interpreted and self.capability == 90

    @property
    def has_early_launch(self) -> bool:
        """Whether a kernel can start before the previous one ends (programmatic dependent launch)."""
        return not self.interpreted and self.capability >= 90

    def programs_per_sm(self, num_warps: int, wanted: int) -> int:
        """Returns how many programs are resident on an SM: `wanted`, or as many as its threads allow."""
        return max(1, min(wanted, self.threads // (32 * num_warps)))


# Facts from NVIDIA's data sheets and the CUDA programming guide (table "Technical Specifications per Compute
# Capability"). The A40 and A6000 have the chip of the RTX 3090; the L40S has that of the RTX 4090.
PROFILES = {
    "a100": Device(80, 108, 166_912, 2048, name="NVIDIA A100"),
    "rtx3090": Device(86, 82, 101_376, 1536, name="NVIDIA GeForce RTX 3090"),
    "rtx4090": Device(89, 128, 101_376, 1536, name="NVIDIA GeForce RTX 4090"),
    "h100": Device(90, 132, 232_448, 2048, name="NVIDIA H100 80GB HBM3"),
    "h200": Device(90, 132, 232_448, 2048, name="NVIDIA H200"),
    "b200": Device(100, 148, 232_448, 2048, name="NVIDIA B200"),
    "b300": Device(103, 148, 232_448, 2048, name="NVIDIA B300"),
    "rtx5090": Device(120, 170, 101_376, 1536, name="NVIDIA GeForce RTX 5090"),
}


_SAME_CHIP = {"a40": "rtx3090", "a6000": "rtx3090", "rtxa6000": "rtx3090", "l40s": "rtx4090"}


def profile(name: str) -> Device:
    """Returns the profile of this name. Case, spaces and hyphens do not matter: "RTX 4090" is "rtx4090".

    Raises:
      ValueError: there is none.
    """
    key = re.sub("[ _-]", "", name).lower() if isinstance(name, str) else ""
    if key not in PROFILES:
        remedy = f'; pass "{_SAME_CHIP[key]}", which has the same chip' if key in _SAME_CHIP else ""
        raise ValueError(f"device must be None or one of {', '.join(PROFILES)}, got {name!r}{remedy}")
    return PROFILES[key]
