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
      clusters: `clusters[n]` is the number of clusters of n programs that run at once, one program per SM. GPUs of one
        kind may differ in that.
    """

    capability: int = 90
    multiprocessors: int = 132
    shared_memory: int = 232_448
    threads: int = 2048
    interpreted: bool = False
    name: str = ""
    clusters: tuple[int, ...] = ()

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

    def clusters_at_once(self, programs: int) -> int:
        """Returns the number of clusters of so many programs that run at once; 0 if the GPU has none of this size."""
        return self.clusters[programs] if programs < len(self.clusters) else 0

    def programs_per_sm(self, num_warps: int, wanted: int) -> int:
        """Returns how many programs are resident on an SM: `wanted`, or as many as its threads allow."""
        return max(1, min(wanted, self.threads // (32 * num_warps)))


# Capability, SMs, shared memory and threads: NVIDIA's architecture white papers, and the CUDA programming guide (table
# "Technical Specifications per Compute Capability"). The tests compile every kernel for these GPUs. The numbers of
# clusters are those that the driver of an H200 returns, also for the B200 and the B300, whose own are not known; the
# RTX 5090 has none here. For a GPU that is present, `cuda_driver` asks the driver.
_H200_CLUSTERS = (0, 132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)
PROFILES = {
    "a100": Device(80, 108, 166_912, 2048, name="NVIDIA A100"),
    "rtx3090": Device(86, 82, 101_376, 1536, name="NVIDIA GeForce RTX 3090"),
    "rtx4090": Device(89, 128, 101_376, 1536, name="NVIDIA GeForce RTX 4090"),
    "h100": Device(90, 132, 232_448, 2048, name="NVIDIA H100 80GB HBM3", clusters=_H200_CLUSTERS),
    "h200": Device(90, 132, 232_448, 2048, name="NVIDIA H200", clusters=_H200_CLUSTERS),
    "b200": Device(100, 148, 232_448, 2048, name="NVIDIA B200", clusters=_H200_CLUSTERS),
    "b300": Device(103, 148, 232_448, 2048, name="NVIDIA B300", clusters=_H200_CLUSTERS),
    "rtx5090": Device(120, 170, 101_376, 1536, name="NVIDIA GeForce RTX 5090"),
}

# Every GPU that has a name here. Those that are no profiles have the capability of one, but for those before Ampere.
GPUS = PROFILES | {
    "v100": Device(70, 80, 98_304, 2048, name="Tesla V100"),
    "t4": Device(75, 40, 65_536, 1024, name="Tesla T4"),
    "rtx3080": Device(86, 68, 101_376, 1536, name="NVIDIA GeForce RTX 3080"),
    "a10": Device(86, 72, 101_376, 1536, name="NVIDIA A10"),
    "a10g": Device(86, 80, 101_376, 1536, name="NVIDIA A10G"),
    "a40": Device(86, 84, 101_376, 1536, name="NVIDIA A40"),
    "rtxa6000": Device(86, 84, 101_376, 1536, name="NVIDIA RTX A6000"),
    "l4": Device(89, 58, 101_376, 1536, name="NVIDIA L4"),
    "rtx4080": Device(89, 76, 101_376, 1536, name="NVIDIA GeForce RTX 4080"),
    "l40s": Device(89, 142, 101_376, 1536, name="NVIDIA L40S"),
    "rtx6000ada": Device(89, 142, 101_376, 1536, name="NVIDIA RTX 6000 Ada Generation"),
    "gh200": Device(90, 132, 232_448, 2048, name="NVIDIA GH200 480GB", clusters=_H200_CLUSTERS),
}


def profile(name: str) -> Device:
    """Returns the GPU of this name. Case, spaces, hyphens and "RTX" do not matter: "RTX A6000" is "a6000".

    Raises:
      ValueError: there is none.
    """
    key = re.sub("[ _-]", "", name).lower() if isinstance(name, str) else ""
    for known in (key, f"rtx{key}"):
        if known in GPUS:
            return GPUS[known]
    raise ValueError(f"device must be None or one of {', '.join(sorted(GPUS))}, got {name!r}")
