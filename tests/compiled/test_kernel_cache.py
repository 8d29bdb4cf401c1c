"""Tests that a process finds the kernels that an earlier one compiled, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.problems import make_problem
from torch_bridge import kernel_cache, launch, tiling
from torch_bridge.launch import Binary
from torch_bridge.recurrences import Launch

pytestmark = pytest.mark.compile_only

ROOT = Path(__file__).resolve().parents[2]
DEVICES = tiling.PROFILES


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


@pytest.mark.parametrize(
    "options", [{}, {"hidden": 256, "direction": "bwd"}, {"hidden": 512, "kind": "bf16", "device": "h200"}], ids=str
)
def test_a_stored_kernel_is_launched_as_the_compiled_one(options, cache, compilations):
    first, second = (binary_of(make(**options)) for _ in range(2))
    assert len(compilations) == 1 and first == second and first.cubin[:4] == b"\x7fELF"
    assert first.cooperative == (options.get("hidden", 0) > 128)


CHANGES = [
    {"cell": "lstm"}, {"direction": "bwd"}, {"kind": "bf16"}, {"hidden": 40}, {"device": "b200"},
    {"reset_state": "stepped"}, {"halves": False},
]  # fmt: skip


def test_kernels_that_differ_in_anything_have_keys_of_their_own(cache, compilations):
    binaries = [binary_of(make(**change)) for change in ({}, *CHANGES)]
    assert len(compilations) == len(binaries) == len({binary.cubin for binary in binaries})


def test_keys_do_not_contain_addresses_of_objects():
    for change in ({}, *CHANGES):
        (call,) = make(**change).kernels
        assert " at 0x" not in repr(call.key) and "object" not in repr(call.key)


def test_a_change_of_sources_of_triton_of_the_assembler_or_of_its_options_is_another_key(monkeypatch, tmp_path):
    keys = {kernel_cache.key_of("made from")}
    assembler = tmp_path / "ptxas"
    for _ in range(2):  # a new assembler, and a change of it
        assembler.write_bytes(assembler.read_bytes() + b"x" if assembler.exists() else b"x")
        monkeypatch.setenv("TRITON_PTXAS_PATH", str(assembler))
        keys.add(kernel_cache.key_of("made from"))
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    keys.add(kernel_cache.key_of("made from"))
    for name in ("_sources", "_toolchain"):
        monkeypatch.setattr(kernel_cache, name, lambda: "changed")
        keys.add(kernel_cache.key_of("made from"))
    keys.add(kernel_cache.key_of("made from something else"))
    assert len(keys) == 7


def test_the_hash_of_the_sources_has_every_kernel(monkeypatch, tmp_path):
    kernels = tmp_path / "kernels" / "loops"
    kernels.mkdir(parents=True)
    monkeypatch.setattr(kernel_cache, "__file__", str(tmp_path / "kernel_cache.py"))
    found = set()
    for name in ("a.py", "loops/b.py", "a.py"):
        (tmp_path / "kernels" / name).write_text(f"{len(found)}")
        found.add(kernel_cache._sources.__wrapped__())
    assert len(found) == 3


def test_options_that_inspect_or_change_compilations_compile(monkeypatch, cache, compilations):
    import triton

    for count, (knobs, name, value) in enumerate(
        (
            (triton.knobs.compilation, "always_compile", True),
            (triton.knobs.compilation, "listener", lambda **_: None),
            (triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "")),
        ),
        start=1,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(knobs, name, value)
            binary_of(make())
        assert len(compilations) == count and not [*cache.rglob(kernel_cache._FILE)]


@pytest.mark.parametrize("data", [b"", b"{", b"{}\nbinary", b'{"name": "x"}\n'])
def test_a_damaged_file_is_compiled_again(data, cache, compilations):
    first = binary_of(make())
    (path,) = cache.rglob(kernel_cache._FILE)
    path.write_bytes(data)
    assert binary_of(make()) == first and len(compilations) == 2
    assert binary_of(make()) == first and len(compilations) == 2  # it was stored again


def test_a_folder_that_takes_no_entries_is_no_error(cache, compilations, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("read-only")

    stored = binary_of(make())
    monkeypatch.setattr(kernel_cache, "get_cache_manager", refuse)
    assert binary_of(make()) == stored and len(compilations) == 2


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
