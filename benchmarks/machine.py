"""Describes what a figure was measured on: GPU, driver, versions and commit."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import jax

from torch_bridge.tiling.devices import PROFILES

PACKAGES = ("jax", "jaxlib", "flax", "torch", "triton", "torchrl", "flashrnn")


def describe(revision: str | None = None, profile: str = "") -> dict[str, str]:
    """Returns the GPU (or platform), the driver, the versions of packages, and the commit (default: that of git).

    With `profile`, a key of `torch_bridge.tiling.devices.PROFILES`, "as" names the GPU that kernels were chosen for.
    """
    device = jax.devices()[0]
    versions = {name: _version(name) for name in PACKAGES}
    return {
        "gpu": device.device_kind if device.platform == "gpu" else device.platform,
        **({"as": profile} if profile else {}),
        "driver": _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
        or "none",
        **{name: version for name, version in versions.items() if version},
        "commit": revision or commit("jaxrnn", "torch_bridge"),
    }


def line(machine: dict[str, str]) -> str:
    """Formats a machine in one line: `NVIDIA H200, driver 580.159.04, jax 0.11.2, ..., commit b9d0fc8`."""
    parts = {name: value if name == "gpu" else f"{name} {value}" for name, value in machine.items()}
    if "as" in machine:
        parts["as"] = f"kernels chosen and compiled for {PROFILES[machine['as']].name}"
    return ", ".join(parts.values())


def slug(machine: dict[str, str]) -> str:
    """Returns the name of a results folder: `nvidia-h200`, or `as-a100-on-nvidia-h200`."""
    gpu = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    return f"as-{machine['as']}-on-{gpu}" if "as" in machine else gpu


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(*paths: str) -> str:
    """Returns the commit, with "with changes" if files at `paths` have changed since, or "unknown" without git."""
    root = Path(__file__).parents[1]
    head = _output(["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"])
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--", *paths])
    return f"{head}{' with changes' if changed else ''}" if head else "unknown"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
