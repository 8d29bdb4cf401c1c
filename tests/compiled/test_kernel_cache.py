"""Tests that a process finds the kernels that an earlier one compiled, and no others."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import damage
import pytest
from triton.runtime.cache import FileCacheManager

from benchmarks.problems import make_problem
from torch_bridge import input_projections, kernel_cache, launch, tiling
from torch_bridge.launch import Binary
from torch_bridge.recurrences import Launch

pytestmark = pytest.mark.compile_only

ROOT = Path(__file__).resolve().parents[2]
DEVICES = tiling.PROFILES
OTHER = 12345  # a user and a group that no test runs as


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Makes an empty folder Triton's cache; returns it."""
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    return tmp_path


@pytest.fixture
def compilations(monkeypatch):
    """Returns the list of kernels that are compiled from now on."""
    compiled, original = [], launch.compile_call
    monkeypatch.setattr(launch, "compile_call", lambda *what: (compiled.append(what), original(*what))[1])
    return compiled


def binary_of(launched):
    """Returns the binary of a launch of one kernel, as a new process would get it."""
    (call,), device = launched.kernels, launched._device
    return Binary.of(call, launch.find_call(call.key, device.capability), device.capability)


def make(cell="gru", direction="fwd", kind="tf32", hidden=48, device="a100", **options):
    return Launch(make_problem(cell, direction, kind, hidden, 8, **options), DEVICES[device])


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "cooperative", "cluster"),
    [
        ({}, False, 1), ({"hidden": 256, "direction": "bwd"}, True, 1), ({"hidden": 1024, "device": "h200"}, True, 1),
        ({"hidden": 512, "kind": "bf16", "device": "h200"}, False, 16),
    ],
    ids=str,
)  # fmt: skip
def test_a_stored_kernel_is_launched_as_the_compiled_one(options, cooperative, cluster, cache, compilations):
    first, second = (binary_of(make(**options)) for _ in range(2))
    assert len(compilations) == 1 and first == second and first.cubin[:4] == b"\x7fELF"
    assert (first.cooperative, first.cluster) == (cooperative, cluster)


CHANGES = [
    {"cell": "lstm"}, {"direction": "bwd"}, {"kind": "bf16"}, {"hidden": 40}, {"device": "b200"},
    {"reset_state": "stepped"}, {"halves": False},
]  # fmt: skip


def test_kernels_that_differ_in_anything_have_keys_of_their_own(cache, compilations):
    binaries = [binary_of(make(**change)) for change in ({}, *CHANGES)]
    assert len(compilations) == len(binaries) == len({binary.cubin for binary in binaries})


def test_keys_do_not_contain_addresses_of_objects():
    arrays = (("x", "float32"), ("w_ih_t", "float32"), ("bias", "float32"), ("xp", "float32"))
    projection = input_projections.Launch(input_projections.Problem(1, 64, 128, 384, arrays), DEVICES["h200"])
    launches = [*(make(**change) for change in ({}, *CHANGES)), projection]
    found = [call for each in launches for call in each.kernels]
    assert len(found) >= len(launches)
    for call in found:
        assert " at 0x" not in repr(call.key) and "object" not in repr(call.key)


@pytest.mark.parametrize("name", ["TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH", "TRITON_LIBDEVICE_PATH"])
def test_a_file_that_an_option_names_and_a_change_of_it_is_another_key(name, monkeypatch, tmp_path):
    keys, path = {kernel_cache.key_of("made from")}, tmp_path / "file"
    for data in (b"x", b"xx"):
        path.write_bytes(data)
        monkeypatch.setenv(name, str(path))
        keys.add(kernel_cache.key_of("made from"))
    assert len(keys) == 3


def test_an_assembler_may_be_found_in_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "ptxas")
    keys = set()
    for data in (b"x", b"xx"):
        (tmp_path / "ptxas").write_bytes(data)
        (tmp_path / "ptxas").chmod(0o700)
        keys.add(kernel_cache.key_of("made from"))
    assert len(keys) == 2


@pytest.mark.parametrize("name", ["PTXAS_OPTIONS", "TRITON_MOCK_PTX_VERSION", "DISABLE_LLVM_OPT"])
def test_an_option_of_the_compiler_is_another_key(name, monkeypatch):
    before = kernel_cache.key_of("made from")
    monkeypatch.setenv(name, "1")
    assert kernel_cache.key_of("made from") != before


def test_a_folder_for_files_is_no_part_of_the_key(monkeypatch):
    before = kernel_cache.key_of("made from")
    monkeypatch.setenv("TRITON_HOME", "/elsewhere")
    assert kernel_cache.key_of("made from") == before != kernel_cache.key_of("made from something else")


@pytest.mark.parametrize("name", ["_SOURCES", "_toolchain"])
def test_a_change_of_sources_or_of_triton_is_another_key(name, monkeypatch):
    before = kernel_cache.key_of("made from")
    monkeypatch.setattr(kernel_cache, name, "changed" if name == "_SOURCES" else lambda: "changed")
    assert kernel_cache.key_of("made from") != before


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """Makes a folder with the sources of a kernel and of the code that compiles it; returns it."""
    (tmp_path / "kernels" / "loops").mkdir(parents=True)
    for name in ("kernels/a.py", "kernels/loops/b.py", "compiler.py", "launch.py"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "kernel_cache.py"))
    return tmp_path


def test_the_hash_has_the_sources_of_every_kernel_and_of_the_compiler(sources):
    found = {kernel_cache._hash_of_sources()}
    for name in ("kernels/a.py", "kernels/loops/b.py", "compiler.py", "launch.py"):
        (sources / name).write_text("changed")
        found.add(kernel_cache._hash_of_sources())
    assert len(found) == 5 and all(found)


def test_sources_that_are_no_files_are_compiled(monkeypatch, sources, cache, compilations):
    shutil.rmtree(sources / "kernels")
    assert kernel_cache._hash_of_sources() == ""
    monkeypatch.setattr(kernel_cache, "_SOURCES", "")
    for count in (1, 2):
        binary_of(make())
        assert len(compilations) == count and not [*cache.rglob(kernel_cache._FILE)]


def test_a_kernel_is_not_stored_after_its_sources_changed(sources, cache, compilations):
    """Triton compiles what was imported, and the files may be those of another version by then."""
    for count in (1, 2):
        binary_of(make())
        assert len(compilations) == count and not [*cache.rglob(kernel_cache._FILE)]


def test_options_that_inspect_or_change_compilations_compile(monkeypatch, cache, compilations):
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    options = (
        (triton.knobs.compilation, "listener", lambda **_: None),
        (triton.knobs.compilation, "disable_line_info", True),
        (triton.knobs.nvidia, "mock_ptx_version", "8.0"),
        (triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "")),
    )
    for count, (knobs, name, value) in enumerate(options, start=1):
        with monkeypatch.context() as patch:
            patch.setattr(knobs, name, value)
            binary_of(make())
        assert len(compilations) == count and not [*cache.rglob(kernel_cache._FILE)]
    monkeypatch.setattr(CUDABackend, "instrumentation", object(), raising=False)
    assert kernel_cache._changes_compilations()
    monkeypatch.setattr(CUDABackend, "instrumentation", None)
    assert not kernel_cache._changes_compilations()
    for name in ("TRITON_KERNEL_OVERRIDE", "TRITON_KERNEL_DUMP", "TRITON_ALWAYS_COMPILE"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert kernel_cache._changes_compilations(), name


def test_a_kernel_that_needs_scratch_memory_is_not_stored(cache):
    """The profiler adds it to kernels, and other processes do not profile."""
    metadata = dict.fromkeys(kernel_cache._METADATA, 1)
    kernel = SimpleNamespace(kernel=b"binary", name="name", metadata=SimpleNamespace(**metadata))
    assert kernel_cache.load_or_compile(lambda: kernel, "made from") is kernel
    assert not [*cache.rglob(kernel_cache._FILE)]


def with_digest(content):
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def described(**changes):
    """Returns a file whose digest is right, with changes of what describes the kernel; None leaves a value out."""
    values = dict.fromkeys(kernel_cache._METADATA, 0) | {"name": "name"} | changes
    return with_digest(json.dumps({name: x for name, x in values.items() if x is not None}).encode() + b"\nbinary")


WRONG = [
    *(b"", b"{", b"{}\nbinary", b'{"name": "x"}\n', b"[]\nx", b"null\nx", b"[" * 100_000 + b"\nx"),
    *map(with_digest, (b"", b"x", b"{}\nx", b"[]\nx", b"null\nx", b"\xff\nx", b'"name"\nx')),
    *(described(name=x) for x in (None, 1, [])),
    *(described(shared=x) for x in (None, "1024", 0.5, [])),
    described(more=1),
]


@pytest.mark.parametrize("data", WRONG, ids=lambda data: repr(data[-40:]))
def test_a_file_of_another_form_is_compiled_again(data, cache, compilations):
    first = binary_of(make())
    (path,) = cache.rglob(kernel_cache._FILE)
    path.write_bytes(data)
    assert binary_of(make()) == first and len(compilations) == 2
    assert binary_of(make()) == first and len(compilations) == 2  # it was stored again


def test_a_damaged_file_is_compiled_again(cache, compilations):
    first = binary_of(make())
    (path,) = cache.rglob(kernel_cache._FILE)
    data = path.read_bytes()
    for count, damaged in enumerate(damage.damages(data, 12), start=1):
        path.write_bytes(damaged)
        assert binary_of(make()) == first and len(compilations) == 1 + count
        assert path.read_bytes() == data
    assert count > 30


def others_may_write_to_the_folder(cache, path):
    cache.chmod(0o777)


def others_may_write_to_the_folder_of_the_kernel(cache, path):
    path.parent.chmod(0o777)


def others_may_write_to_the_file(cache, path):
    path.chmod(0o666)


def another_user_owns_the_folder(cache, path):
    os.chown(cache, OTHER, OTHER)


def another_user_owns_the_file(cache, path):
    os.chown(path, OTHER, OTHER)
    path.chmod(0o644)


def another_user_owns_the_file_for_itself(cache, path):
    os.chown(path, OTHER, OTHER)
    path.chmod(0o600)


# Whether what another user could change is stored again, privately.
FOREIGN = {
    others_may_write_to_the_folder: False, others_may_write_to_the_folder_of_the_kernel: True,
    others_may_write_to_the_file: True, another_user_owns_the_folder: False, another_user_owns_the_file: True,
    another_user_owns_the_file_for_itself: True,
}  # fmt: skip


two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.mark.parametrize(
    "change",
    [pytest.param(x, marks=two_users if "another" in x.__name__ else (), id=x.__name__) for x in FOREIGN],
)
def test_a_kernel_that_another_user_could_change_is_compiled_again(change, cache, compilations, caplog, monkeypatch):
    monkeypatch.setattr(kernel_cache, "_warn", kernel_cache._warn.__wrapped__)
    first = binary_of(make())
    (path,) = cache.rglob(kernel_cache._FILE)
    path.write_bytes(with_digest(path.read_bytes().split(b"\n", 1)[1] + b"of another user"))
    change(cache, path)
    assert binary_of(make()) == first and len(compilations) == 2
    assert binary_of(make()) == first and len(compilations) == (2 if FOREIGN[change] else 3)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (0 if FOREIGN[change] else 2)
    assert all("set TRITON_CACHE_DIR to a private folder" in text for text in texts)


@pytest.mark.parametrize("umask", [0o000, 0o002])
def test_kernels_are_stored_for_this_user_alone_whatever_the_umask(umask, tmp_path, compilations, monkeypatch):
    import triton

    folder = tmp_path / "a" / "b"
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))
    before = os.umask(umask)
    try:
        binary_of(make())
        binary_of(make())
    finally:
        os.umask(before)
    (path,) = folder.rglob(kernel_cache._FILE)
    assert [stat.S_IMODE(made.stat().st_mode) for made in (folder.parent, folder, path.parent)] == [0o700] * 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(compilations) == 1


def test_a_folder_that_takes_no_entries_is_no_error(cache, compilations, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("read-only")

    stored = binary_of(make())
    put = FileCacheManager.put
    with monkeypatch.context() as patch:  # Triton's own files can be written
        patch.setattr(
            FileCacheManager, "put",
            lambda self, data, name, **rest: (refuse if name == kernel_cache._FILE else put)(self, data, name, **rest),
        )  # fmt: skip
        first, second = (binary_of(make(hidden=40)) for _ in range(2))
    assert first == second and len(compilations) == 3
    monkeypatch.setattr(kernel_cache, "get_cache_manager", refuse)
    assert binary_of(make()) == stored and len(compilations) == 4


PROGRAM = """
import sys
sys.path[:0] = {paths}
from benchmarks.problems import make_problem
from torch_bridge import tiling
from torch_bridge.recurrences import Launch
import triton
launch = Launch(make_problem("gru", "fwd", "tf32", 48, 8), tiling.PROFILES["a100"])
if {second}:
    triton.compile = None
(binary,) = launch.binaries()
print(binary.name, len(binary.cubin), binary.shared_memory, binary.parameters)
"""


def test_a_second_process_does_not_ask_triton(tmp_path):
    printed = []
    for second in (False, True):
        program = PROGRAM.format(paths=[str(ROOT)], second=second)
        environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1] and printed[0].startswith("gru_fwd_")
