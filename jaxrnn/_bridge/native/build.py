"""Builds the library of XLA's handler that launches kernels from `launch.c`, once, into a private cache folder.

A wheel may have the library prebuilt for several versions of jaxlib, so that no compiler is needed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import jax

SOURCE, PREBUILT = (Path(__file__).with_name(name) for name in ("launch.c", "prebuilt"))
COMPILERS = ("cc", "gcc", "clang")
_ANY_COMPILER = " or ".join(COMPILERS)
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_LIBRARIES = ("-ldl", "-lpthread")


class NativeLaunchError(RuntimeError):
    """The native launch cannot be used on this machine; the message says why, and what to do."""


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the handler's library, built if no earlier process of this user has built it.

    Raises:
      NativeLaunchError: there is no compiler, it fails, the cache folder cannot be used, or the library cannot be
        loaded.
    """
    path = build()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLaunchError(
            f"the library of the native launch, {path}, cannot be loaded ({error}): delete it, so that it is built for "
            "this machine; if its file system does not allow programs, set XDG_CACHE_HOME to a folder on another one"
        ) from error


def build() -> Path:
    """Returns the path of the library, which it builds if it is missing.

    The name contains hashes of all that the library is made from: first the source, XLA's headers, the flags and the
    processor, then the compiler. Processes may build it at the same time: each writes a file of its own, and then moves
    it to the name.

    Raises:
      NativeLaunchError: there is no compiler, it fails, or the cache folder cannot be used.
    """
    made_from = _hash_of_inputs(Path(jax.ffi.include_dir()))
    prebuilt = PREBUILT / f"launch-{made_from}.so"
    if prebuilt.exists():
        return prebuilt
    folder = _cache_folder()
    compiler = _find_compiler()
    if compiler is None:
        # the cache folder may be shared with a machine that has a compiler, as a home directory is
        if built := sorted(folder.glob(f"launch-{made_from}-*.so")):
            return built[0]
        sought = f"CC, {named!r}, cannot be found" if (named := _named_compiler()) else f"there is no {_ANY_COMPILER}"
        raise NativeLaunchError(
            f"the native launch needs a C compiler, and {sought}: install one (apt install gcc), or set CC to its path"
        )
    path = folder / f"launch-{made_from}-{_hash(*compiler, _version(compiler))}.so"
    if not path.exists():
        _compile(compiler, path, Path(jax.ffi.include_dir()))
    return path


def prebuild(headers: Path) -> Path:
    """Builds the library for a folder of XLA's headers into `PREBUILT`, which must exist, and returns its path.

    Raises:
      NativeLaunchError: there is no compiler, it fails, or the folder cannot be written to.
    """
    compiler, path = _find_compiler(), PREBUILT / f"launch-{_hash_of_inputs(headers)}.so"
    if compiler is None:
        raise NativeLaunchError("a C compiler is needed to build the native launch: install one (apt install gcc)")
    _compile(compiler, path, headers)
    return path


def _hash_of_inputs(headers: Path) -> str:
    """Returns the hash of all that the library is made from, except for the compiler."""
    header = headers / "xla" / "ffi" / "api" / "c_api.h"
    return _hash(SOURCE.read_bytes(), header.read_bytes(), *_FLAGS, *_LIBRARIES, platform.machine())


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def _find_compiler() -> tuple[str, ...] | None:
    """Returns the command of the C compiler: that of the environment variable CC if set, else the first there is."""
    for command in [named] if (named := _named_compiler()) else COMPILERS:
        try:
            name, *options = shlex.split(command)
        except ValueError as error:
            raise NativeLaunchError(f"CC, {command!r}, is not a command ({error}): correct it or unset it") from error
        if path := shutil.which(name):
            return path, *options
    return None


def _named_compiler() -> str:
    """Returns the environment variable CC, or "" if it is not set."""
    return os.environ.get("CC", "").strip()


def _version(compiler: tuple[str, ...]) -> str:
    return _run(*compiler, "--version").stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise NativeLaunchError(
            f"the native launch needs a C compiler, and {command[0]} does not start ({error}): set CC to the path of "
            "another one"
        ) from error


def _compile(compiler: tuple[str, ...], path: Path, headers: Path) -> None:
    """Compiles the source into a temporary file beside `path`, and moves that to `path`, which is atomic."""
    try:
        descriptor, temporary = tempfile.mkstemp(suffix=".tmp", prefix=path.stem, dir=path.parent)
    except OSError as error:
        raise NativeLaunchError(_not_writable(path.parent, error)) from error
    os.close(descriptor)
    try:
        command = (*compiler, *_FLAGS, f"-I{headers}", str(SOURCE), "-o", temporary, *_LIBRARIES)
        done = _run(*command)
        if done.returncode:
            raise NativeLaunchError(
                "the C compiler cannot build the native launch: repair it, or set CC to another one. "
                f"{shlex.join(command)} returned {done.returncode}:\n{done.stderr[-2000:]}"
            )
        os.chmod(temporary, 0o700)
        os.replace(temporary, path)
    except OSError as error:
        raise NativeLaunchError(_not_writable(path.parent, error)) from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _cache_folder() -> Path:
    """Returns the folder for libraries, created if missing; only this user may write to it, as code is loaded from it.

    Raises:
      NativeLaunchError: the folder cannot be created, or another user may write to it.
    """
    try:
        import platformdirs
    except ImportError as error:
        raise NativeLaunchError("the native launch needs platformdirs, to find a cache folder: install it") from error

    folder = Path(platformdirs.user_cache_dir("jaxrnn"), "native")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise NativeLaunchError(_not_writable(folder, error)) from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise NativeLaunchError(
            f"{folder} belongs to another user, or others may write to it, and the native launch would load code from "
            "it: chown it to this user and chmod it to 700, or set XDG_CACHE_HOME to a private folder"
        )
    return folder


def _not_writable(folder: Path, error: OSError) -> str:
    return (
        f"the native launch cannot write its library to {folder} ({error}): make the folder writable, or set "
        "XDG_CACHE_HOME to one that is"
    )
