"""The facts about a GPU by which launches are chosen, and profiles of GPUs to compile for without having one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field


def no_clusters(_: int) -> int:
    """Returns 0."""
    return 0


def clusters_of_an_h200(programs: int) -> int:
    """Returns how many clusters of so many programs run at once on the H200 that was asked, one program an SM."""
    return {3: 39, 4: 30, 10: 7, 12: 7, 14: 7, 16: 7}.get(programs, 0)


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
      clusters: returns how many clusters of so many programs run at once, if programs are alone on their SMs. GPUs of
        one kind may differ in that, and are equal nevertheless: any of them runs launches that were chosen for another.
    """

    capability: int = 90
    multiprocessors: int = 132
    shared_memory: int = 232_448
    threads: int = 2048
    interpreted: bool = False
    name: str = ""
    clusters: Callable[[int], int] = field(default=no_clusters, compare=False, repr=False)

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


# Capability, SMs, shared memory and threads: NVIDIA's architecture white papers, and the CUDA programming guide (table
# "Technical Specifications per Compute Capability"). The tests compile every kernel for these GPUs. How many clusters
# run at once on Blackwell is not known here, so those of an H200 stand for them; GPUs that are there tell themselves.
PROFILES = {
    "a100": Device(80, 108, 166_912, 2048, name="NVIDIA A100"),
    "rtx3090": Device(86, 82, 101_376, 1536, name="NVIDIA GeForce RTX 3090"),
    "rtx4090": Device(89, 128, 101_376, 1536, name="NVIDIA GeForce RTX 4090"),
    "h100": Device(90, 132, 232_448, 2048, name="NVIDIA H100 80GB HBM3", clusters=clusters_of_an_h200),
    "h200": Device(90, 132, 232_448, 2048, name="NVIDIA H200", clusters=clusters_of_an_h200),
    "b200": Device(100, 148, 232_448, 2048, name="NVIDIA B200", clusters=clusters_of_an_h200),
    "b300": Device(103, 148, 232_448, 2048, name="NVIDIA B300", clusters=clusters_of_an_h200),
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
    "gh200": Device(90, 132, 232_448, 2048, name="NVIDIA GH200 480GB", clusters=clusters_of_an_h200),
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
