"""Runs the native handler on the CPU, in fresh processes, with a driver that records the calls that it gets."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import child
import jax

from jaxrnn._bridge.native import build

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "native"


class Binary(NamedTuple):
    """The fields of `torch_bridge.launch.Binary`, for tests without Triton."""

    cubin: bytes
    name: str
    parameters: tuple[tuple[str, Any], ...]
    grid: int = 1
    threads: int = 32
    shared_memory: int = 0
    cluster: int = 1
    cooperative: bool = False
    early: bool = False
    capability: int = 80


# The kernel of `fake_driver.c` that computes y = x + value, on four elements.
ADD = Binary(
    b"FAKE add\0",
    "add",
    (("array", "x"), ("array", "y"), ("i32", 4), ("fp32", 0.5), ("null", None)),
    grid=7,
    threads=64,
)


@functools.cache
def folder() -> Path:
    """Returns a folder, deleted at exit, with the fake `libcuda.so.1` and `handler.so`, the handler for the CPU."""
    found = Path(tempfile.mkdtemp(prefix="jaxrnn-native-"))
    atexit.register(shutil.rmtree, found, ignore_errors=True)
    compiler = build._find_compiler()
    assert compiler, "the tests of the native launch need a C compiler"
    common = [*compiler, "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    include = [f"-I{jax.ffi.include_dir()}", f"-I{build.SOURCE.parent}"]
    for source, name in (("fake_driver.c", "libcuda.so.1"), ("host_handler.c", "handler.so")):
        command = [*common, *include, str(FOLDER / source), "-o", str(found / name), "-ldl", "-lpthread"]
        subprocess.run(command, check=True)
    return found


# The beginning of each program: registers the handler for the CPU, and defines `launch`.
PREAMBLE = """
import ctypes, json, sys
import jax, jax.numpy as jnp, numpy as np
from jaxrnn._bridge.native import call, target
import native_handler
from native_handler import ADD

handler = ctypes.CDLL({handler!r})
def stages(*names):
    return {{name: jax.ffi.pycapsule(getattr(handler, f"host_{{name}}")) for name in names}}

jax.ffi.register_ffi_target(target.TARGET, stages("instantiate", "execute"), platform="cpu")
jax.ffi.register_ffi_target("initialize_only", stages("initialize")["initialize"], platform="cpu")
jax.ffi.register_ffi_target("execute_only", stages("execute"), platform="cpu")

def launch(x, *binaries, name=target.TARGET, **changes):
    function = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return function(x, **call.attributes(binaries, ["x", "y"]) | changes)

def error_of(function, *args):
    try:
        jax.block_until_ready(function(*args))
    except Exception as error:
        return str(error)
"""


class Run(NamedTuple):
    """The standard output of a program, and the calls of the driver as `(function, text)`."""

    output: str
    calls: list[tuple[str, str]]

    def named(self, function: str) -> list[str]:
        return [text for name, text in self.calls if name == function]


def run(
    code: str, *, parameters: str = "add:88448", blocked: tuple[str, ...] = ("torch", "triton"), **environment: str
) -> Run:
    """Runs a program in a fresh process with the fake driver; importing any of `blocked` raises ImportError there."""
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary, "log")
        block = f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n"
        program = block + PREAMBLE.format(handler=str(folder() / "handler.so")) + code
        fake = {"FAKE_CUDA_LOG": str(log), "FAKE_CUDA_PARAMETERS": parameters, "LD_LIBRARY_PATH": str(folder())}
        variables = child.environment(**{"JAX_PLATFORMS": "cpu"} | fake | environment)
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=temporary, env=variables, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
        lines = log.read_text().splitlines() if log.exists() else []
    return Run(done.stdout, [(name, text) for name, _, text in (line.partition(" ") for line in lines)])
