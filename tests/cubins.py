"""Runs the tools for CUDA binaries that Triton ships."""

import subprocess
import tempfile
from pathlib import Path


def text_of(cubin: bytes, tool: str, *options: str) -> str:
    """Returns what a tool, "cuobjdump" or "nvdisasm", prints of a binary."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], capture_output=True, text=True, check=True).stdout
