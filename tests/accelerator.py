"""Detects the accelerator of this machine without importing JAX or PyTorch, for the Makefile and conftest.py.

Run as a script, it prints the extra to install: `cuda13`, `cuda12` or `cpu`.
"""

import os
import re
import subprocess
from pathlib import Path

CUDA13_DRIVER = 580  # the first driver branch that runs CUDA 13


def nvidia_driver() -> int | None:
    """Returns the major version of the NVIDIA driver, or None if no NVIDIA GPU can be used."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        version = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        # Some containers have the device but no nvidia-smi.
        proc = Path("/proc/driver/nvidia/version")
        version = proc.read_text() if proc.exists() and Path("/dev/nvidia0").exists() else ""
    match = re.search(r"\b(\d{3,})\.\d+", version)
    return int(match[1]) if match else None


def nvidia_gpus() -> int:
    """Returns the number of NVIDIA GPUs that can be used."""
    if nvidia_driver() is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
        found = len(re.findall(r"^GPU \d+:", listed, re.MULTILINE))
    except (OSError, subprocess.SubprocessError):
        found = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len(visible.split(",")))


if __name__ == "__main__":
    driver = nvidia_driver()
    print("cpu" if driver is None else "cuda13" if driver >= CUDA13_DRIVER else "cuda12")
