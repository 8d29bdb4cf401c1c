"""Builds the library of `launch.c`, XLA's handler that launches kernels, once, into a private cache folder.

A wheel may have the library prebuilt for several versions of jaxlib, so that no compiler is needed.

A library is `launch-INPUTS-COMPILER-DIGEST.so`, or `launch-INPUTS-DIGEST.so` if it is prebuilt: hashes of the source,
the headers and the options, and of the compiler, and the digest of the file itself. A library is whole if it has the
digest in its name. One that is not, or that another user could have changed, is built again.
"""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

from torch_bridge import private_files

logger = logging.getLogger("jaxrnn")

# XLA's name of the handler, and its symbol in the library. The version changes if the meaning of its attributes does,
# so that programs that were exported earlier either keep their meaning or fail.
TARGET = "jaxrnn_launch_v1"
SOURCE, PREBUILT = (Path(__file__).with_name(name) for name in ("launch.c", "prebuilt"))
COMPILERS = ("cc", "gcc", "clang")
_ANY_COMPILER = " or ".join(COMPILERS)
_COMPILER_SECONDS = 60  # it takes 0.2
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
_LIBRARIES = ("-ldl", "-lpthread")
_NOEXEC = "if its file system does not allow programs (noexec), set XDG_CACHE_HOME to a folder on another one"


class NativeLaunchError(RuntimeError):
    """The native launch cannot be used on this machine; the message says why, and what to do."""


@functools.cache
def load() -> ctypes.CDLL:
    """Returns the handler's library, built if no earlier process of this user has built it.

    Raises:
      NativeLaunchError: whatever keeps the library from being built or loaded.
    """
    try:
        path = build()
        try:
            return _open(path)
        except (OSError, AttributeError) as error:
            raise NativeLaunchError(
                f"the library of the native launch, {path}, cannot be loaded ({error}): delete it, so that it is built "
                f"for this machine; {_NOEXEC}"
            ) from error
    except NativeLaunchError:
        raise
    except Exception as error:
        raise NativeLaunchError(
            f"the native launch cannot be built or loaded, because of {type(error).__name__}: {error}"
        ) from error


def _open(path: Path) -> ctypes.CDLL:
    """Loads a library that is whole. The file that is checked is the file that is loaded, even if the path changes.

    Raises:
      OSError: the file cannot be loaded, is not what its name says, or another user could change it.
      AttributeError: the handler is not in it.
    """
    with contextlib.ExitStack() as stack:
        descriptor = private_files.open_file(path)
        stack.callback(os.close, descriptor)
        if not _is_whole(path, descriptor):
            raise OSError(f"{path} is damaged")
        library = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
        stack.callback(_ctypes.dlclose, library._handle)
        getattr(library, TARGET)
        # The descriptor stays open: the dynamic loader knows the library as /proc/self/fd/N, and would take any other
        # file with that number for this one. `pop_all` drops the callbacks, which undo the loading after an error.
        stack.pop_all()
    return library


def build() -> Path:
    """Finds a library that is whole, prebuilt or in the cache, or else compiles one; returns its path.

    Processes may build it at the same time: each compiles it in a folder of its own, and then moves it to its name.

    Raises:
      NativeLaunchError: there is no compiler, it fails, or the cache folder cannot be used.
    """
    headers = Path(jax.ffi.include_dir())
    inputs = _hash_of_inputs(headers)
    refused: list[str] = []
    if prebuilt := _first_whole(PREBUILT.glob(f"launch-{inputs}-*.so"), refused):
        return prebuilt
    for reason in refused:
        logger.warning("the native launch is compiled, because its prebuilt library %s", reason)
    folder = _cache_folder()
    compiler = _find_compiler()
    # without a compiler here, a library by any compiler will do: a cache folder in a home directory may be shared with
    # machines that have one
    compiler_hash = _hash(*compiler, _version(compiler)) if compiler else "*"
    if path := _first_whole(folder.glob(f"launch-{inputs}-{compiler_hash}-*.so"), refused):
        return path
    if compiler is None:
        raise _no_compiler(refused)
    return _compile(compiler, folder, f"launch-{inputs}-{compiler_hash}", headers)


def _no_compiler(refused: list[str]) -> NativeLaunchError:
    """Returns the error of a build without a compiler; `refused` says why there is no library either."""
    named = _named_compiler()
    sought = f"CC, {named!r}, cannot be found" if named else f"there is no {_ANY_COMPILER}"
    return NativeLaunchError(
        f"the native launch needs a C compiler, and {sought}: install one (apt install gcc), or set CC to its path"
        + "".join(f"; {reason}" for reason in refused)
    )


def prebuild(headers: Path) -> Path:
    """Builds the library for a folder of XLA's headers into `PREBUILT`, which must exist, and returns its path.

    Raises:
      NativeLaunchError: there is no compiler, or it fails.
    """
    compiler = _find_compiler()
    if compiler is None:
        raise NativeLaunchError("a C compiler is needed to build the native launch: install one (apt install gcc)")
    with tempfile.TemporaryDirectory() as folder:
        path = _compile(compiler, Path(folder), f"launch-{_hash_of_inputs(headers)}", headers)
        path.chmod(0o755)  # all who can read the wheel's files load it
        return Path(shutil.move(path, PREBUILT / path.name))


def _first_whole(paths: Iterable[Path], refused: list[str]) -> Path | None:
    """Returns the first library that is whole, or None; adds to `refused` why those before it cannot be used."""
    for path in sorted(paths):
        try:
            descriptor = private_files.open_file(path)
            try:
                is_whole = _is_whole(path, descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            refused.append(f"{path} is not used ({error})")
            continue
        if is_whole:
            return path
        refused.append(f"{path} is damaged")
    return None


def _is_whole(path: Path, descriptor: int) -> bool:
    """Returns whether the library that a descriptor reads has the digest in the name of `path`."""
    with open(descriptor, "rb", closefd=False) as file:
        return path.stem.endswith(f"-{hashlib.sha256(file.read()).hexdigest()}")


def _hash_of_inputs(headers: Path) -> str:
    """Returns the hash of all that the library is made from, except for the compiler."""
    header = headers / "xla" / "ffi" / "api" / "c_api.h"
    try:
        sources = SOURCE.read_bytes(), header.read_bytes()
    except OSError as error:
        raise NativeLaunchError(
            f"the native launch is compiled from {SOURCE} and XLA's headers, and one cannot be read ({error}): install "
            "jaxrnn and jaxlib from their wheels, which are unpacked into folders"
        ) from error
    return _hash(*sources, *_FLAGS, *_LIBRARIES, platform.machine())


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode(errors="surrogateescape") if isinstance(part, str) else part
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


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a compiler, and all that it starts, for a limited time."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=os.environ | environment, process_group=0,
        )  # fmt: skip
    except OSError as error:
        raise NativeLaunchError(
            f"the native launch needs a C compiler, and {command[0]} does not start ({error}): set CC to the path of "
            "another one"
        ) from error
    with process:
        try:
            output, errors = process.communicate(timeout=_COMPILER_SECONDS)
        except BaseException as error:
            with contextlib.suppress(OSError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise NativeLaunchError(
                f"the C compiler did not end within {_COMPILER_SECONDS} seconds: repair it, or set CC to another one. "
                f"It was called as {shlex.join(command)}"
            ) from error
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def _compile(compiler: tuple[str, ...], folder: Path, name: str, headers: Path) -> Path:
    """Compiles the source in a folder of its own, and moves the library into `folder`, which is atomic.

    Returns its path, which is `name` with its digest.
    """
    try:
        with _folder_of_a_build(folder) as temporary:
            library = Path(temporary, "launch.so")
            command = (*compiler, *_FLAGS, f"-I{headers}", str(SOURCE), "-o", str(library), *_LIBRARIES)
            done = _run(*command, TMPDIR=temporary)
            if done.returncode or not library.exists() or not library.stat().st_size:
                raise NativeLaunchError(
                    "the C compiler cannot build the native launch: repair it, or set CC to another one. "
                    f"{shlex.join(command)} returned {done.returncode}:\n{done.stderr[-2000:] or 'it wrote no library'}"
                )
            library.chmod(0o700)
            with library.open("rb") as file:
                built = library.rename(Path(temporary, f"{name}-{hashlib.sha256(file.read()).hexdigest()}.so"))
                os.fsync(file.fileno())
            try:
                _open(built)
            except (OSError, AttributeError) as error:
                raise NativeLaunchError(
                    f"the library of the native launch that was built in {folder} cannot be loaded ({error}): "
                    f"{_NOEXEC}; if the C compiler builds for another machine, set CC to another one"
                ) from error
            path = folder / built.name
            os.replace(built, path)
            return path
    except OSError as error:
        raise NativeLaunchError(_not_writable(folder, error)) from error


@contextlib.contextmanager
def _folder_of_a_build(folder: Path) -> Iterator[str]:
    """Makes a temporary folder in `folder`, and deletes those of builds that were killed.

    Each build holds a shared lock on `folder`. If a build gets an exclusive lock at first, no other build runs, and all
    temporary folders are left from builds that were killed.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # another build runs, or the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in folder.glob("*.tmp"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        with tempfile.TemporaryDirectory(suffix=".tmp", dir=folder, ignore_cleanup_errors=True) as temporary:
            yield temporary
    finally:
        os.close(descriptor)


def _cache_folder() -> Path:
    """Returns the folder for libraries, made if missing; no other user may write to it, as code is loaded from it.

    Raises:
      NativeLaunchError: the folder cannot be made, or another user may change what its path leads to.
    """
    try:
        import platformdirs
    except ImportError as error:
        raise NativeLaunchError("the native launch needs platformdirs, to find a cache folder: install it") from error

    folder = Path(platformdirs.user_cache_dir("jaxrnn"), "native")
    if not folder.is_absolute():
        raise NativeLaunchError(
            f"the native launch needs a cache folder, and {folder} depends on the working directory: set HOME or "
            "XDG_CACHE_HOME to an absolute path"
        )
    try:
        private_files.check_folder(folder, make=True)
    except private_files.NotPrivateError as error:
        raise NativeLaunchError(
            f"{error}, and the native launch would load code from {folder}: chown it to this user and chmod it to 700, "
            "or set XDG_CACHE_HOME to a private folder"
        ) from error
    except OSError as error:
        raise NativeLaunchError(_not_writable(folder, error)) from error
    return folder


def _not_writable(folder: Path, error: OSError) -> str:
    return (
        f"the native launch cannot write its library to {folder} ({error}): make the folder writable, or set "
        "XDG_CACHE_HOME to a private one that is"
    )
