"""Tests that the library of the native launch is this user's own and whole, and that what fails becomes a callback."""

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import child
import jax
import platformdirs
import pytest

import jaxrnn
from jaxrnn._bridge import method
from jaxrnn._bridge.native import NativeLaunchError, build, target
from torch_bridge import private_files

ROOT = Path(__file__).resolve().parents[2]
OTHER = 12345  # a user and a group that no test runs as
two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Makes the next choice of the method that of a new process with an empty cache; returns the cache's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXRNN_LAUNCH", raising=False)
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: None)
    restart(monkeypatch)
    return tmp_path / "cache" / "jaxrnn" / "native"


def restart(monkeypatch):
    monkeypatch.setattr(build, "load", functools.cache(build.load.__wrapped__))
    monkeypatch.setattr(target, "_registered", False)
    monkeypatch.setattr(method, "_choose", functools.cache(method._choose.__wrapped__))


def digest_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Returns the path of a library of the native launch."""
    folder = tmp_path_factory.mktemp("library")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return build.build()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Returns a function that makes a shell script the C compiler; `$out` in it is the file to write."""

    def use(script):
        path = tmp_path / "compiler"
        version = '[ "$1" = --version ] && { echo 1; exit 0; }'
        output = 'for argument; do [ "$before" = -o ] && out=$argument; before=$argument; done'
        path.write_text(f"#!/bin/sh\n{version}\n{output}\n{script}\n")
        path.chmod(0o700)
        monkeypatch.setenv("CC", str(path))

    return use


# Another user's code.


@pytest.fixture
def evil(tmp_path):
    """Returns a library of another user, which makes the file `ran` beside it when it is loaded."""
    source, path = tmp_path / "evil.c", tmp_path / "evil.so"
    source.write_text(f"""
#include <stdio.h>
__attribute__((constructor)) static void run(void) {{ fclose(fopen("{tmp_path / "ran"}", "w")); }}
void {build.TARGET}(void) {{}}
""")
    subprocess.run([*build._find_compiler(), "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return path


def replace(path, evil):
    """Puts another user's library in the place of a user's own, under the name that its digest gives it."""
    planted = path.with_name(path.name.replace(digest_of(path), digest_of(evil)))
    path.unlink()
    planted.write_bytes(evil.read_bytes())
    planted.chmod(0o755)
    os.chown(planted, OTHER, OTHER)
    return planted


def owned_folder(cache):
    os.chown(cache, OTHER, OTHER)


def owned_parent_in_a_sticky_folder(cache):
    cache.parents[2].chmod(0o1777)
    for folder in (cache.parents[1], cache.parents[0]):
        os.chown(folder, OTHER, OTHER)


def parent_that_a_group_may_write_to(cache):
    os.chown(cache.parent, 0, OTHER)
    cache.parent.chmod(0o775)


def parent_that_all_may_write_to(cache):
    cache.parents[1].chmod(0o777)


def link_of_another_user(cache):
    cache.rename(cache.with_name("moved"))
    cache.symlink_to("moved")
    os.chown(cache, OTHER, OTHER, follow_symlinks=False)


def home_of_another_user(cache):
    """As root has it where sudo keeps HOME."""
    for folder in (cache, *cache.parents[:2]):
        os.chown(folder, OTHER, OTHER)


FOLDERS = (
    owned_folder, owned_parent_in_a_sticky_folder, parent_that_a_group_may_write_to, parent_that_all_may_write_to,
    link_of_another_user, home_of_another_user,
)  # fmt: skip


@two_users
@pytest.mark.parametrize("change", FOLDERS, ids=lambda change: change.__name__)
def test_nothing_is_loaded_from_a_folder_that_another_user_could_change(change, cache, evil, monkeypatch):
    replace(build.build(), evil)
    change(cache)
    name, reason = jaxrnn.launch_method()
    assert (name, evil.with_name("ran").exists()) == ("callback", False)
    assert "belongs to another user, or others may write to it" in reason and "set XDG_CACHE_HOME" in reason


@two_users
def test_a_library_of_another_user_is_built_again(cache, evil):
    planted = replace(build.build(), evil)
    assert jaxrnn.launch_method().name == "native" and not evil.with_name("ran").exists()
    (own,) = set(cache.iterdir()) - {planted}
    assert own.stat().st_uid == os.geteuid()


@two_users
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_prebuilt_library_of_another_user_is_not_used(mode, cache, evil, monkeypatch, caplog):
    build.PREBUILT.mkdir(mode=0o755)
    path = build.prebuild(Path(jax.ffi.include_dir()))
    replace(path, evil).chmod(mode)
    assert jaxrnn.launch_method().name == "native" and not evil.with_name("ran").exists()
    (record,) = (record for record in caplog.records if record.name == "jaxrnn")
    assert record.levelname == "WARNING" and f"{build.PREBUILT}" in record.message and "is not used" in record.message
    monkeypatch.setenv("CC", "/nowhere/cc")
    for own in cache.iterdir():
        own.unlink()
    restart(monkeypatch)
    assert "is not used" in jaxrnn.launch_method().reason


def test_the_library_is_loaded_from_the_file_that_was_checked(cache, evil, monkeypatch):
    """And not from what its path leads to by then."""
    opened = private_files.open_file

    def swap(path):
        descriptor = opened(path)
        os.replace(evil, path)
        return descriptor

    path = build.build()
    monkeypatch.setattr(private_files, "open_file", swap)
    library = build._open(path)
    assert not evil.with_name("ran").exists()
    with open("/proc/self/maps") as maps:
        (name,) = {line.split()[-1] for line in maps if str(path) in line and "(deleted)" not in line} or {None}
    assert library._handle and name is None


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_folders_and_library_are_private_whatever_the_umask(umask, cache):
    before = os.umask(umask)
    try:
        path = build.build()
    finally:
        os.umask(before)
    for made in (*cache.parents[:2], cache, path):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


# Damaged files.


DAMAGES = """
import os
from damage import damages
from jaxrnn._bridge.native import build

def loads():
    if not (pid := os.fork()):
        build.load()
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0  # a damaged library may kill the process

path = build.build()
data, count = path.read_bytes(), 0
for damaged in damages(data, 12):
    path.unlink()  # this process has loaded the file
    path.write_bytes(damaged)
    assert loads(), damaged
    assert path.read_bytes() == data and os.listdir(path.parent) == [path.name], damaged
    assert loads()
    count += 1
print(count)
"""


def test_a_damaged_library_is_built_again_once(cache, library, compiler, tmp_path):
    compiler(f'cp {library} "$out"; echo >> {tmp_path}/builds')
    done = subprocess.run(
        [sys.executable, "-c", DAMAGES], env=child.environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "builds").read_text()) == 1 + int(done.stdout) > 30


def test_a_damaged_prebuilt_library_is_not_used(cache, monkeypatch):
    build.PREBUILT.mkdir(mode=0o755)
    path = build.prebuild(Path(jax.ffi.include_dir()))
    assert build.build() == path
    damaged = path.read_bytes()[:5000]
    path.unlink()  # this process has loaded the file, and would die at its end
    path.write_bytes(damaged)
    assert build.build().parent == cache
    monkeypatch.setenv("CC", "/nowhere/cc")
    for own in cache.iterdir():
        own.unlink()
    with pytest.raises(NativeLaunchError, match=r"'/nowhere/cc', cannot be found: install one .*prebuilt.* is damaged"):
        build.build()


def test_a_library_reaches_the_disk_before_its_name(cache, monkeypatch):
    events, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("renamed"), rename(old, new)))
    path = build.build()
    assert events == [path.stat().st_ino, "renamed"]


# Compiles until there is a file `go`; a second build at the same time does not wait.
SLOW = (
    "[ -e {folder}/begun ] && exec cp {library} $out; touch {folder}/begun; "
    "while [ ! -e {folder}/go ]; do sleep 0.05; done; cp {library} $out"
)
BUILDS = "from jaxrnn._bridge.native import build; print(build.build())"


def begin_build(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", BUILDS], stdout=subprocess.PIPE, text=True, env=child.environment()
    )
    end = time.monotonic() + 60
    while not (folder / "begun").exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    return process


def test_what_a_killed_build_leaves_is_deleted(cache, library, compiler, tmp_path):
    compiler(SLOW.format(folder=tmp_path, library=library))
    process = begin_build(tmp_path)
    process.kill()
    process.wait()
    process.stdout.close()
    assert len(list(cache.iterdir())) == 1
    compiler(f'cp {library} "$out"')
    path = build.build()
    assert list(cache.iterdir()) == [path]
    (tmp_path / "go").touch()  # ends the script


def test_what_a_running_build_uses_is_left_to_it(cache, library, compiler, tmp_path):
    compiler(SLOW.format(folder=tmp_path, library=library))
    process = begin_build(tmp_path)
    path = build.build()
    (tmp_path / "go").touch()
    printed, _ = process.communicate(timeout=60)
    assert printed == f"{path}\n" and list(cache.iterdir()) == [path]


# Whatever fails becomes a callback.


def use_no_home(monkeypatch):
    """As in a container that runs as a user of whom the system knows nothing."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")

    def unknown(number):
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr("pwd.getpwuid", unknown)


def use_an_old_platformdirs(monkeypatch):
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda name: f"relative/{name}")


def use_a_platformdirs_that_fails(monkeypatch):
    def fail(name):
        raise RuntimeError("cannot determine the home directory")

    monkeypatch.setattr(platformdirs, "user_cache_dir", fail)


def use_a_jaxlib_without_headers(monkeypatch):
    monkeypatch.setattr(jax.ffi, "include_dir", lambda: "/nowhere")


def use_an_xla_of_another_version(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("FFI handler has API version 0.9")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)


SURROUNDINGS = {
    use_no_home: r"~/.cache/jaxrnn/native depends on the working directory: set HOME|could not determine the home",
    use_an_old_platformdirs: "relative/jaxrnn/native depends on the working directory",
    use_a_platformdirs_that_fails: "because of RuntimeError: cannot determine the home directory",
    use_a_jaxlib_without_headers: r"one cannot be read \(.*/nowhere/xla/ffi/api/c_api.h.*\): install .* wheels",
    use_an_xla_of_another_version: r"XLA does not take the handler .*API version 0\.9\): install jaxlib and its CUDA",
}


@pytest.mark.parametrize("change", SURROUNDINGS, ids=lambda change: change.__name__)
def test_surroundings_that_fail_become_a_callback(change, cache, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    change(monkeypatch)
    name, reason = jaxrnn.launch_method()
    assert name == "callback" and reason.startswith("the native launch cannot be used here: ")
    with pytest.raises(NativeLaunchError, match=SURROUNDINGS[change]):
        target.register()
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}  # nothing in the working directory


COMPILERS = {
    "writes nothing": ("exit 0", "returned 0:\nit wrote no library"),
    "writes an empty file": (': > "$out"', "returned 0:\nit wrote no library"),
    "writes no library": ('cp "$0" "$out"', r"cannot be loaded \(.*invalid ELF header"),
    "writes a library without the handler": (
        'cc -shared -x c /dev/null -o "$out"',
        "undefined symbol: jaxrnn_launch_v1",
    ),
    "fails in another encoding": (r"printf 'erreur: fichier non trouv\351' >&2; exit 1", "fichier non trouv\ufffd"),
    "fails silently": ("exit 7", "returned 7:"),
    "dies": ("kill -9 $$", "returned -9:"),
    "never returns": ("sleep 1000", "did not end within 1 seconds"),
    "leaves what never returns": ("sleep 1000 & wait", "did not end within 1 seconds"),
    "reads the terminal": ("read answer || exit 3", "returned 3:"),
}


@pytest.mark.parametrize("name", COMPILERS)
def test_compilers_that_fail_become_a_callback_and_leave_nothing(name, cache, library, compiler, monkeypatch):
    script, text = COMPILERS[name]
    compiler(script.format(library=library))
    monkeypatch.setattr(build, "_COMPILER_SECONDS", 1)
    begun = time.monotonic()
    chosen = jaxrnn.launch_method()
    assert chosen.name == "callback" and time.monotonic() - begun < 30
    with pytest.raises(NativeLaunchError, match=rf"(?s){text}"):
        target.register()
    assert list(cache.iterdir()) == []
    compiler(f'cp {library} "$out"')  # repaired
    restart(monkeypatch)
    assert jaxrnn.launch_method().name == "native"


def test_a_cache_that_does_not_allow_programs_is_named(cache, library, compiler, monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: failed to map segment from shared object")

    compiler(f'cp {library} "$out"')
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    for begin in ("that was built in", "delete it, so that it is built for this machine"):
        reason = jaxrnn.launch_method().reason
        assert begin in reason and str(cache) in reason and ".tmp" not in reason
        assert "failed to map segment" in reason and "set XDG_CACHE_HOME to a folder on another one" in reason
        cache.joinpath(library.name).write_bytes(library.read_bytes())  # of an earlier process
        cache.joinpath(library.name).chmod(0o700)
        monkeypatch.setattr(build, "_find_compiler", lambda: None)
        restart(monkeypatch)


def test_a_library_without_the_handler_is_closed(cache, library, compiler):
    """The dynamic loader would take the next one for it, whose descriptor has the same number."""
    compiler('cc -shared -x c /dev/null -o "$out"')
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(NativeLaunchError, match="undefined symbol"):
            build.build()
    assert os.listdir("/proc/self/fd") == before
    compiler(f'cp {library} "$out"')
    assert jaxrnn.launch_method().name == "native"


def test_a_file_that_is_exchanged_after_the_check_is_not_loaded(cache, evil, monkeypatch):
    def build_and_exchange():
        path = built()
        path.unlink()  # this process has loaded the file
        path.write_bytes(evil.read_bytes())
        path.chmod(0o700)
        return path

    built = build.build
    monkeypatch.setattr(build, "build", build_and_exchange)
    assert "is damaged" in jaxrnn.launch_method().reason and not evil.with_name("ran").exists()


def test_a_compiler_that_prints_another_encoding_builds(cache, library, compiler):
    compiler(rf'''printf 'avertissement: d\351j\340' >&2; cp {library} "$out"''')
    assert jaxrnn.launch_method().name == "native"


def test_a_compiler_whose_version_never_comes_becomes_a_callback(cache, compiler, monkeypatch, tmp_path):
    compiler("")
    (tmp_path / "compiler").write_text(f"#!/bin/sh\nsleep 1000 & echo $! > {tmp_path}/sleeps\nwait\n")
    monkeypatch.setattr(build, "_COMPILER_SECONDS", 1)
    assert "did not end within 1 seconds" in jaxrnn.launch_method().reason
    started = int((tmp_path / "sleeps").read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{started}/stat").exists() and " Z " not in Path(f"/proc/{started}/stat").read_text():
        assert time.monotonic() < end, "what the compiler started still runs"
        time.sleep(0.05)


def test_what_the_compiler_needs_in_between_is_private(cache, library, compiler, monkeypatch, tmp_path):
    """In a shared folder for temporary files, another user could exchange it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    compiler(f'echo "$TMPDIR" > {tmp_path}/used; cp {library} "$out"')
    build.build()
    used = Path((tmp_path / "used").read_text().strip())
    assert used.parent == cache and not used.exists()


def test_a_library_without_the_handler_becomes_a_callback(cache, monkeypatch, tmp_path):
    """One that an earlier process built, or a wheel brought."""
    path = build.build()
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", str(path)], check=True)
    path.rename(path.with_name(f"{path.stem.rpartition('-')[0]}-{digest_of(path)}.so"))
    assert "undefined symbol: jaxrnn_launch_v1" in jaxrnn.launch_method().reason


def test_packages_in_a_zip_become_a_callback(tmp_path):
    with zipfile.ZipFile(tmp_path / "packages.zip", "w") as archive:
        for package in ("jaxrnn", "torch_bridge"):
            for path in (ROOT / package).rglob("*.py"):
                archive.write(path, path.relative_to(ROOT))
        archive.write(build.SOURCE, build.SOURCE.relative_to(ROOT))
    code = "import jaxrnn; print(jaxrnn.__file__); print(jaxrnn.launch_method())"
    environment = child.environment(
        PYTHONPATH=str(tmp_path / "packages.zip"), JAXRNN_LAUNCH="", XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith(str(tmp_path / "packages.zip")), done.stderr
    assert "name='callback'" in done.stdout and "install jaxrnn and jaxlib from their wheels" in done.stdout


def test_a_build_that_was_begun_is_not_repeated(tmp_path, cache, library, compiler):
    compiler(f'sleep 1; echo >> "{tmp_path}/runs"; cp "{library}" "$out"')
    method.begin_choosing()
    assert method.chosen().name == "native"
    assert (tmp_path / "runs").read_text().count("\n") == 1


def test_a_build_that_was_begun_and_fails_gives_its_reason_once(tmp_path, cache, compiler):
    compiler(f'sleep 1; echo >> "{tmp_path}/runs"; exit 1')
    method.begin_choosing()
    assert method.chosen().name == "callback" and "returned 1" in method.chosen().reason
    assert (tmp_path / "runs").read_text().count("\n") == 1


@pytest.mark.parametrize("named", ["callback", "neither"])
def test_no_build_is_begun_where_a_method_is_named(named, cache, monkeypatch):
    monkeypatch.setenv("JAXRNN_LAUNCH", named)
    monkeypatch.setattr(method.threading, "Thread", None)
    method.begin_choosing()
    assert not cache.exists()


def test_a_forked_process_does_not_wait_for_a_build_of_its_parent(tmp_path, cache, library, compiler):
    compiler(SLOW.format(folder=tmp_path, library=library))
    code = f"""
import os, signal, threading, time
import jaxrnn
threading.Thread(target=jaxrnn.launch_method).start()
while not os.path.exists({str(tmp_path / "begun")!r}):
    time.sleep(0.02)
pid = os.fork()
if not pid:
    signal.alarm(60)
    open({str(tmp_path / "go")!r}, "w").close()
    os.write(1, jaxrnn.launch_method().name.encode())
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0, "the child was killed"
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=child.environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "native"), done.stderr


# Prebuilt libraries.


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("prebuild_launch", ROOT / "tools" / "prebuild_launch.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """Returns a wheel of jaxlib 9.9, which pip takes from a folder: the headers of the installed one."""
    path = tmp_path / "index" / "jaxlib-9.9-py3-none-any.whl"
    path.parent.mkdir()
    headers = Path(jax.ffi.include_dir())
    with zipfile.ZipFile(path, "w") as archive:
        for header in headers.rglob("*.h"):
            archive.write(header, Path("jaxlib", "include", header.relative_to(headers)))
        archive.writestr("jaxlib-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: jaxlib\nVersion: 9.9\n")
        archive.writestr("jaxlib-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("jaxlib-9.9.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return path


def test_libraries_are_prebuilt_for_the_listed_wheels(cache, tool, wheel, monkeypatch, tmp_path):
    (tmp_path / "jaxlib.txt").write_text(f"# a comment\njaxlib==9.9 --hash=sha256:{digest_of(wheel)}\n")
    monkeypatch.setattr(tool, "WHEELS", tmp_path / "jaxlib.txt")
    monkeypatch.chdir(tmp_path)
    tool.main()
    assert build.build().parent == build.PREBUILT and stat.S_IMODE(build.build().stat().st_mode) == 0o755


def test_a_wheel_with_another_hash_is_not_taken(tool, wheel, tmp_path, capfd):
    with pytest.raises(subprocess.CalledProcessError):
        tool.download(f"jaxlib==9.9 --hash=sha256:{'0' * 64}", tmp_path)
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not list(tmp_path.glob("*.whl"))


def test_every_listed_wheel_has_a_hash(tool):
    lines = [line for line in tool.WHEELS.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 2 and all(re.fullmatch(r"jaxlib==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
