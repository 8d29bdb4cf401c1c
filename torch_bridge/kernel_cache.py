"""Compiled kernels on disk, found in milliseconds: what the native launch needs of them.

Triton finds a kernel of an earlier process by a key that contains hashes of its whole library and of the kernel's
parsed source. To compute it takes some 0.4 s in every process. Here, the key contains the sizes and times of change of
the files of Triton and of its assembler, a hash of the kernels' sources, and all that a kernel is compiled from. The
files are in Triton's cache folder, and are written by its cache manager.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.cache import get_cache_manager

_FILE = "kernel"
# Parts of Triton that decide what a kernel is compiled to.
_TOOLCHAIN = ("_C", "backends/nvidia", "compiler", "language", "experimental/gluon")
_ASSEMBLERS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
# What a launch needs to know of a compiled kernel, by the names of Triton's metadata.
_METADATA = (
    "global_scratch_size", "profile_scratch_size", "num_ctas", "num_warps", "warp_size", "shared",
    "launch_cooperative_grid", "launch_pdl",
)  # fmt: skip


class StoredKernel(NamedTuple):
    """A kernel that an earlier process compiled; attributes as those of `triton.compiler.CompiledKernel`."""

    kernel: bytes
    name: str
    metadata: Any


def compiled(compile: Callable[[], Any], made_from: Any) -> Any:
    """Returns a kernel that an earlier process stored, or else compiles and stores it.

    Args:
      compile: compiles the kernel.
      made_from: all that the kernel is compiled from, beside its source, with a `repr` of its own for each value.

    Returns:
      A `StoredKernel` or what `compile` returns. Options of Triton that inspect or change a compilation always compile.
    """
    if _inspects_compilations():
        return compile()
    try:
        manager = get_cache_manager(key_of(made_from))
    except OSError:  # the folder has no entry for this kernel, and takes none
        return compile()
    if (path := manager.get_file(_FILE)) and (stored := _read(path)):
        return stored
    kernel = compile()
    described = {"name": kernel.name} | {name: getattr(kernel.metadata, name) for name in _METADATA}
    with contextlib.suppress(OSError):
        manager.put(json.dumps(described).encode() + b"\n" + kernel.kernel, _FILE, binary=True)
    return kernel


def _read(path: str) -> StoredKernel | None:
    """Returns the kernel in a file, or None if the file is damaged."""
    try:
        line, kernel = Path(path).read_bytes().split(b"\n", 1)
        described = json.loads(line)
        stored = StoredKernel(kernel, described.pop("name"), SimpleNamespace(**described))
    except (OSError, ValueError, KeyError):
        return None
    return stored if described.keys() == set(_METADATA) and kernel else None


def key_of(made_from: Any) -> str:
    """Returns the key of a kernel, hexadecimal."""
    environment = sorted(get_cache_invalidating_env_vars().items())
    assemblers = [(name, path, _stamp(path)) for name in _ASSEMBLERS if (path := os.environ.get(name))]
    parts = (_toolchain(), _sources(), environment, assemblers, made_from)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _inspects_compilations() -> bool:
    options = knobs.compilation
    changes = options.always_compile, options.override, options.dump_ir, options.listener
    return any(changes) or knobs.runtime.add_stages_inspection_hook is not None


@functools.cache
def _sources() -> str:
    """Returns a hash of the source of all kernels."""
    digest, folder = hashlib.sha256(), Path(__file__).with_name("kernels")
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _toolchain() -> str:
    """Returns a hash of Triton's version, and of the paths, sizes and times of change of the files that compile."""
    folder = Path(triton.__file__).parent
    files = [
        os.path.join(parent, name)
        for part in _TOOLCHAIN
        for parent, folders, names in os.walk(folder / part)
        for name in names
        if not name.endswith(".pyc")
    ]
    stamps = [(path, _stamp(path)) for path in sorted(files)]
    return hashlib.sha256(repr((triton.__version__, stamps)).encode()).hexdigest()


def _stamp(path: str) -> tuple[int, int] | None:
    """Returns a file's size and time of change, or None if there is no such file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
