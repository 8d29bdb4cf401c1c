"""Compiled kernels on disk, found in milliseconds: what the native launch needs of them.

Triton finds a kernel of an earlier process by a key that contains hashes of its whole library and of the kernel's
parsed source. Computing that key takes some 0.4 s per process. The key here contains the sizes and modification times
of the files of Triton and its assembler, a hash of the sources of the kernels, and the arguments of the compilation.
Installations of Triton in other places, or of other times, have other keys: they compile through Triton's own cache.
The files are in Triton's cache folder, and are written by its cache manager. A file is used if no other user could have
changed it and it begins with the digest of the rest. Otherwise the kernel is compiled, and stored again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.cache import get_cache_manager

from torch_bridge import private_files

logger = logging.getLogger("torch_bridge")

_FILE = "kernel"
# Parts of Triton that decide what a kernel is compiled to.
_TOOLCHAIN = ("_C", "backends", "compiler", "language", "experimental/gluon")
# Environment variables of Triton that say where files are kept, which a compiled kernel does not depend on.
_LOCATIONS = frozenset(("TRITON_HOME", "TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR"))
# The fields of Triton's metadata that a launch reads.
_METADATA = (
    "global_scratch_size", "profile_scratch_size", "num_warps", "warp_size", "shared", "launch_cooperative_grid",
    "launch_pdl",
)  # fmt: skip


class StoredKernel(NamedTuple):
    """A kernel that an earlier process compiled; attributes as those of `triton.compiler.CompiledKernel`."""

    kernel: bytes
    name: str
    metadata: Any


def load_or_compile(compile: Callable[[], Any], made_from: Any) -> Any:
    """Returns a kernel that an earlier process stored, or else compiles and stores it.

    If an option of Triton inspects or changes compilations, or if the sources are not files, the kernel is always
    compiled.

    Args:
      compile: compiles the kernel.
      made_from: everything but the sources and Triton that the binary depends on; different values must have different
        `repr`s.

    Returns:
      A `StoredKernel` or what `compile` returns.
    """
    if not _SOURCES or _changes_compilations():  # from here on, the program has turned options off at most
        return compile()
    try:
        private_files.check_folder(Path(knobs.cache.dir).absolute(), make=True)
        manager = get_cache_manager(key_of(made_from))
        path = manager.get_file(_FILE)
    except OSError as error:  # the folder has no entry for this kernel, and takes none
        if isinstance(error, private_files.NotPrivateError):
            _warn(
                f"Triton loads code from {knobs.cache.dir}: set TRITON_CACHE_DIR to a private folder, because {error}"
            )
        return compile()
    if path and (stored := _read(Path(path).absolute())):
        return stored
    kernel = compile()
    metadata = {name: getattr(kernel.metadata, name) for name in _METADATA}
    instrumented = metadata["global_scratch_size"] or metadata["profile_scratch_size"]
    if not instrumented and _hash_of_sources() == _SOURCES:  # else a file changed after it was imported
        content = json.dumps(metadata | {"name": kernel.name}).encode() + b"\n" + kernel.kernel
        with contextlib.suppress(OSError):
            stored_at = Path(manager.put(_digest(content) + b"\n" + content, _FILE, binary=True)).absolute()
            for made in (stored_at.parent, stored_at):  # by Triton, with the permissions that the umask leaves
                private_files.make_private(made)
    return kernel


def _read(path: Path) -> StoredKernel | None:
    """Returns the kernel in a file, or None if the file is damaged or another user could have changed it."""
    try:
        with open(private_files.open_file(path), "rb") as file:
            digest, content = file.read().split(b"\n", 1)
        line, kernel = content.split(b"\n", 1)
        described = json.loads(line) if digest == _digest(content) else {}
        name, metadata = described.pop("name"), {name: described.pop(name) for name in _METADATA}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    whole = isinstance(name, str) and not described and all(isinstance(x, int) for x in metadata.values())
    return StoredKernel(kernel, name, SimpleNamespace(**metadata)) if whole else None


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@functools.cache
def _warn(text: str) -> None:
    """Logs a warning once."""
    logger.warning(text)


def key_of(made_from: Any) -> str:
    """Returns the key of a kernel, hexadecimal."""
    options = get_cache_invalidating_env_vars()
    options |= {name: x for name, x in os.environ.items() if name.startswith(("TRITON_", "PTXAS_"))}
    options = {name: x for name, x in options.items() if name not in _LOCATIONS}
    files = [(name, _stamp(shutil.which(x) or x)) for name, x in sorted(options.items())]
    turned_off = sorted(vars(knobs.compilation)), sorted(vars(knobs.nvidia))  # by the program; see load_or_compile
    parts = (_toolchain(), _SOURCES, sorted(options.items()), turned_off, files, made_from)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _changes_compilations() -> bool:
    """Returns whether an option or the profiler of Triton inspects or changes compilations."""
    options = knobs.compilation
    changes = options.always_compile, options.override, options.dump_ir, options.listener, options.instrumentation_mode
    set_here = (*vars(options).values(), *vars(knobs.nvidia).values())  # not by the environment
    profiler = getattr(CUDABackend, "instrumentation", None)  # Triton 3.9 has none
    return any((*changes, *set_here, knobs.runtime.add_stages_inspection_hook, profiler))


def _hash_of_sources() -> str:
    """Returns a hash of the sources of all kernels and of the code that compiles them; "" if they are not files."""
    folder = Path(__file__).parent
    digest, files = hashlib.sha256(), sorted((folder / "kernels").rglob("*.py"))
    for path in [*files, folder / "compiler.py", folder / "launch.py"] if files else []:
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest() if files else ""


@functools.cache
def _toolchain() -> str:
    """Returns a hash of Triton's version, and of the paths, sizes and modification times of the files that compile."""
    folder = Path(triton.__file__).parent
    files = [
        os.path.join(parent, name)
        for part in _TOOLCHAIN
        for parent, _, names in os.walk(folder / part, followlinks=True)
        if not parent.endswith("__pycache__")
        for name in names
    ]
    stamps = [(path, _stamp(path)) for path in sorted(files)]
    return hashlib.sha256(repr((triton.__version__, stamps)).encode()).hexdigest()


def _stamp(path: str) -> tuple[int, int] | None:
    """Returns a file's size and modification time, or None if there is no such file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns


# Read when the kernels are imported, because Triton compiles what was imported.
_SOURCES = _hash_of_sources()
