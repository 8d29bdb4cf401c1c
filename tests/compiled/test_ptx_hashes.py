"""Hashes of PTX tell whether a change of the sources changes a kernel."""

import importlib.util
import re
import shutil
import subprocess
import sys

import pytest
from child import ROOT, environment
from ptx_hashes import hash_of

pytestmark = pytest.mark.compile_only

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def double(x):
    y = x * 2.0
    return y


@triton.jit
def double_kernel(x_ptr, BLOCK: tl.constexpr):
    addresses = x_ptr + tl.arange(0, BLOCK)
    if tl.program_id(0) > 0:
        tl.store(addresses, double(tl.load(addresses)))
"""


def ptx_of(source, path):
    """Returns the PTX of `double_kernel` in a file with this source."""
    from torch_bridge import compiler

    path.parent.mkdir()
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return compiler.compile_kernel(module.double_kernel, {"BLOCK": 128}, {"x": "float32"}, 80).asm["ptx"]


@pytest.mark.quick
def test_only_a_change_of_the_instructions_changes_the_hash(monkeypatch, tmp_path):
    import triton

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    sources = {
        "comment": KERNEL.replace("    y =", "    # twice\n    y ="),
        "variable": re.sub(r"\by\b", "twice", KERNEL),
        "inlined": KERNEL.replace("double(tl.load(addresses))", "tl.load(addresses) * 2.0"),
        "constant": KERNEL.replace("2.0", "3.0"),
    }
    ptx = {name: ptx_of(source, tmp_path / name / "kernels.py") for name, source in sources.items()}
    before = ptx_of(KERNEL, tmp_path / "before" / "kernels.py")
    assert before not in ptx.values()
    assert {name for name in ptx if hash_of(ptx[name]) == hash_of(before)} == {"comment", "variable", "inlined"}


def run(root, file, *options, **variables):
    """Runs the test of one small kernel in a checkout."""
    test = "tests/compiled/test_names.py::test_compiled_time_loop_has_its_name"
    arguments = ["-m", "compile_only", "-p", "no:cacheprovider", "-k", "streamed", test, "--ptx-hashes", str(file)]
    variables |= {"PYTHONPATH": f"{root}:{root / 'tests'}", "TRITON_CACHE_DIR": f"{file}-cache"}
    command = [sys.executable, "-m", "pytest", *arguments, *options]
    return subprocess.run(command, cwd=root, env=environment(**variables), capture_output=True, text=True, timeout=600)


def hashes(root, file, *options):
    """Returns what such a run writes."""
    done = run(root, file, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return file.read_text()


def test_another_checkout_with_several_processes_writes_the_same_file(tmp_path):
    copy = tmp_path / "copy"
    for folder in ("benchmarks", "jaxrnn", "tests", "torch_bridge"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    cell = copy / "torch_bridge" / "kernels" / "cells" / "gru.py"
    cell.write_text(re.sub(r"\ba_z\b", "update", "# a comment\n" + cell.read_text()))
    here = hashes(ROOT, tmp_path / "here")
    name = r"tests/compiled/test_names.py::test_compiled_time_loop_has_its_name\[streamed\]/0-gru_fwd_streamed"
    assert re.fullmatch(rf"[0-9a-f]{{16}}  {name}  sm_90\n", here)
    assert hashes(copy, tmp_path / "there", "-n", "2") == here


def test_interpreted_kernels_have_no_hashes(tmp_path):
    done = run(ROOT, tmp_path / "hashes", TRITON_INTERPRET="1")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "add -m compile_only" in done.stderr
