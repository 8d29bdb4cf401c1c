"""Tests the native launch without a GPU: its build, and the handler, which XLA calls with arrays on the CPU.

The handler runs in fresh processes without PyTorch and Triton, with a driver that records what it is called.
"""

import functools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import native_handler
import pytest
from native_handler import ADD, ROOT, run

import jaxrnn
from jaxrnn._bridge import method
from jaxrnn._bridge.native import NativeLaunchError, build, call


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Returns the folder of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxrnn" / "native"


def test_the_library_is_built_once_into_a_private_folder(cache, monkeypatch):
    path = build.build()
    assert path.parent == cache and list(cache.iterdir()) == [path]
    assert [stat.S_IMODE(each.stat().st_mode) for each in (cache, path)] == [0o700] * 2
    monkeypatch.setattr(build, "_compile", None)  # a second call compiles nothing
    assert build.build() == path


@pytest.mark.parametrize("change", ["source", "header", "compiler", "flags"])
def test_the_library_is_built_again_if_what_it_is_made_from_changes(change, cache, monkeypatch, tmp_path):
    before = build.build()
    changed = tmp_path / "changed"
    if change == "source":
        changed.write_text(build.SOURCE.read_text() + "\n")
        monkeypatch.setattr(build, "SOURCE", changed.rename(tmp_path / "launch.c"))
    elif change == "header":
        shutil.copytree(jax.ffi.include_dir(), changed)
        with (changed / "xla/ffi/api/c_api.h").open("a") as file:
            file.write("\n")
        monkeypatch.setattr(jax.ffi, "include_dir", lambda: str(changed))
    elif change == "compiler":
        monkeypatch.setenv("CC", f"{build._find_compiler()[0]} -O0")
    else:
        monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-g"))
    after = build.build()
    assert after != before and sorted(cache.iterdir()) == sorted([before, after])


def test_processes_that_build_at_the_same_time_make_one_file(cache, tmp_path):
    """They wait for one another, find the cache empty, and each load what they find."""
    code = """
import os, sys, time
from jaxrnn._bridge.native import build
start = time.monotonic() + 0.3
children = []
for number in range(8):
    if not (pid := os.fork()):
        time.sleep(max(0, start - time.monotonic()))
        os.write(1, (f"{build.build()} {bool(build.load().jaxrnn_launch_v1)}\\n").encode())
        os._exit(0)
    children.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 8
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = cache.iterdir()
    assert done.stdout.splitlines() == [f"{path} True"] * 8


def test_without_a_compiler_an_earlier_library_is_used_or_the_error_says_what_to_install(cache, monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    path_of_programs = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeLaunchError, match=r"there is no cc or gcc or clang: install one .*set CC to its path"):
        build.build()
    monkeypatch.setenv("CC", "icc -O3")
    with pytest.raises(NativeLaunchError, match="CC, 'icc -O3', cannot be found: install one"):
        build.build()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", path_of_programs)
    path = build.build()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.build() == path


def test_a_prebuilt_library_needs_neither_a_compiler_nor_a_cache(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    path = build.prebuild(Path(jax.ffi.include_dir()))
    assert path.parent == tmp_path
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "_cache_folder", None)
    assert build.build() == path and build.load.__wrapped__().jaxrnn_launch_v1
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    changed = tmp_path / "launch.c"
    changed.write_text(build.SOURCE.read_text() + "\n")
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "SOURCE", changed)
    assert build.build().parent == cache


def test_the_error_of_a_failing_compiler_has_its_command_and_its_output(cache, monkeypatch, tmp_path):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'cannot find crt1.o' >&2\nexit 3\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(NativeLaunchError, match=r"(?s)set CC to another.*broken .*launch.c.* returned 3:\ncannot find"):
        build.build()
    assert not list(cache.iterdir())


def test_an_empty_cc_counts_as_unset_and_one_that_is_no_command_raises(cache, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", " ")
    assert build.build().exists()
    monkeypatch.setenv("CC", "gcc 'O3")
    with pytest.raises(NativeLaunchError, match=r"CC, \"gcc 'O3\", is not a command .*correct it or unset it"):
        build.build()
    compiler = tmp_path / "data"
    compiler.write_bytes(bytes(8))
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(NativeLaunchError, match=r"does not start \(.*Exec format error.*set CC to the path"):
        build.build()


def test_a_cache_that_is_not_writable_or_not_private_raises(cache, monkeypatch, tmp_path):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(NativeLaunchError, match=r"others may write to it.*chmod it to 700"):
        build.build()
    cache.chmod(0o700)
    monkeypatch.setattr(build.tempfile, "mkdtemp", raise_read_only)
    with pytest.raises(NativeLaunchError, match=r"cannot write its library to .*native .*Read-only.*XDG_CACHE_HOME"):
        build.build()
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(NativeLaunchError, match=r"cannot write its library to .*file/jaxrnn.*XDG_CACHE_HOME"):
        build.build()


def raise_read_only(*_, **__):
    raise OSError(30, "Read-only file system")


def test_a_library_that_cannot_be_loaded_raises(monkeypatch, tmp_path):
    (tmp_path / "launch.so").write_text("no library")
    monkeypatch.setattr(build, "build", lambda: tmp_path / "launch.so")
    with pytest.raises(NativeLaunchError, match=r"launch.so, cannot be loaded \(.*\): delete it,.* set XDG_CACHE_HOME"):
        build.load.__wrapped__()


@pytest.mark.parametrize("compiler", [name for name in build.COMPILERS if shutil.which(name)])
def test_the_source_compiles_without_warnings(compiler, tmp_path):
    """The library itself is built without `-Werror`."""
    command = [compiler, *build._FLAGS, "-Wall", "-Wextra", "-Werror", f"-I{jax.ffi.include_dir()}", build.SOURCE]
    subprocess.run([*command, "-o", tmp_path / "launch.so", *build._LIBRARIES], check=True)


def test_the_method_is_chosen_by_the_environment(cache, monkeypatch):
    monkeypatch.delenv("JAXRNN_LAUNCH", raising=False)
    monkeypatch.setattr(method, "_choose", functools.cache(method._choose.__wrapped__))
    assert jaxrnn.launch_method() == ("native", "it is the default, and its handler can be built here")
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    assert jaxrnn.launch_method() == ("callback", "the environment variable JAXRNN_LAUNCH names it")
    monkeypatch.setenv("JAXRNN_LAUNCH", "cuda")
    with pytest.raises(ValueError, match='JAXRNN_LAUNCH must be "callback" or "native", got \'cuda\''):
        jaxrnn.launch_method()


@pytest.mark.parametrize("named", ["native", ""])
def test_a_native_launch_that_cannot_be_built_raises_if_it_is_named(named, tmp_path):
    code = """
import jaxrnn
try:
    print(jaxrnn.launch_method())
except RuntimeError as error:
    print("raised", error)
"""
    environment = os.environ | {"JAXRNN_LAUNCH": named, "PATH": "/nowhere", "CC": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert "the native launch needs a C compiler" in done.stdout, done.stderr
    begin = "raised" if named else "LaunchMethod(name='callback', reason='the native launch cannot be used here: "
    assert done.stdout.startswith(begin)


def test_the_native_method_registers_its_handler(tmp_path):
    code = "import jaxrnn; print(jaxrnn.launch_method()); jaxrnn.register_native_launch()"
    environment = os.environ | {"JAXRNN_LAUNCH": "native", "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert "LaunchMethod(name='native', reason='the environment variable JAXRNN_LAUNCH" in done.stdout, done.stderr


# The handler.


def field(text: str, name: str) -> str:
    return re.search(rf"\b{name}=(\S*)", text)[1]


@pytest.mark.quick
def test_a_program_launches_its_kernels_with_their_arguments():
    done = run("""
x = jnp.arange(4.)
loop = jax.jit(lambda x: jax.lax.scan(lambda c, _: (launch(c, ADD), None), x, None, length=3)[0])
assert loop(x).tolist() == [1.5, 2.5, 3.5, 4.5]
other = ADD._replace(parameters=(*ADD.parameters[:3], ("fp32", -2.25), ("null", None)))
twice = jax.jit(lambda x: launch(x, ADD, other))
assert twice(x).tolist() == [-2.25, -1.25, -0.25, 0.75]
""")
    launches = done.named("cuLaunchKernelEx")
    assert len(launches) == 5
    for text in launches:
        assert text.startswith("add grid=7,1,1 block=64,1,1 shared=0 stream=5eed attributes= context=c000 ")
        x, y, *others = field(text, "parameters").split(",")
        assert x != y and others[0] == "4" and others[2] == "0"
    assert [field(text, "parameters").split(",")[3] for text in launches] == ["3f000000"] * 4 + ["c0100000"]
    assert done.named("cuModuleLoadData") == ["context=c000 mode=2 FAKE"]
    assert done.named("cuThreadExchangeStreamCaptureMode") == ["2", "0"]


def test_parameters_of_all_types_are_packed():
    """A 32-bit parameter in eight bytes of storage, negative numbers, and numbers that need all bits."""
    done = run(
        """
types = (("i64", -(2**63)), ("i32", -1), ("array", "y"), ("i64", 2**40 + 1), ("fp32", -0.0), ("i32", 2**31 - 1))
launch(jnp.ones(8), ADD._replace(name="types", parameters=types))
""",
        parameters="types:848844",
    )
    (text,) = done.named("cuLaunchKernelEx")
    values = field(text, "parameters").split(",")
    assert values[:2] + values[3:] == ["8000000000000000", "ffffffff", "10000000001", "80000000", "7fffffff"]
    assert int(values[2], 16) % 16 == 0


@pytest.mark.parametrize(
    ("changes", "attributes"),
    [
        ({}, ""),
        ({"cooperative": True}, "2:1"),
        ({"early": True}, "6:1"),
        ({"early": True, "cooperative": True}, "6:1,2:1"),
        ({"cluster": 2}, "4:2,5:1"),
    ],
)
def test_launch_attributes(changes, attributes):
    done = run(f"launch(jnp.arange(4.), ADD._replace(grid=8, **{changes}))")
    (text,) = done.named("cuLaunchKernelEx")
    assert field(text, "attributes") == attributes
    occupancy = done.named("cuOccupancyMaxActiveBlocksPerMultiprocessor")
    assert occupancy == (["add 64 0"] if "cooperative" in changes else [])


def test_large_clusters_and_much_shared_memory_are_requested():
    done = run("launch(jnp.arange(4.), ADD._replace(grid=16, cluster=16, shared_memory=100_000))")
    assert done.named("cuFuncSetAttribute") == ["add 8=100000", "add 14=1"]
    assert done.named("cuFuncSetCacheConfig") == ["add 1"]
    assert field(done.named("cuLaunchKernelEx")[0], "shared") == "100000"


def test_shared_memory_of_a_cluster_is_requested_whatever_its_size():
    """Together with the kernel's static shared memory, it may be beyond what needs no request."""
    done = run("launch(jnp.arange(4.), ADD._replace(grid=8, cluster=4, shared_memory=32_800))")
    assert done.named("cuFuncSetAttribute") == ["add 8=32800"]


def test_a_driver_that_cannot_capture_early_launches_gets_none():
    done = run("launch(jnp.arange(4.), ADD._replace(early=True))", FAKE_CUDA_DEVICE="90,132,232448,12020,2")
    assert field(done.named("cuLaunchKernelEx")[0], "attributes") == ""


def test_initialization_loads_and_does_not_launch():
    done = run("""
x = jnp.arange(4.)
launch(x, ADD, name="initialize_only").block_until_ready()
launch(x, ADD, name="initialize_only").block_until_ready()
""")
    assert len(done.named("cuModuleLoadData")) == 1 and not done.named("cuLaunchKernelEx")


def test_kernels_are_remembered_by_their_content():
    done = run("""
x = jnp.arange(4.)
for binary in (ADD, ADD._replace(grid=2), ADD._replace(cubin=b"FAKE add again"), ADD._replace(shared_memory=64), ADD):
    launch(x, binary).block_until_ready()
""")
    assert len(done.named("cuModuleLoadData")) == 3 and len(done.named("cuLaunchKernelEx")) == 5


def test_threads_load_a_kernel_once_for_each_context():
    """Eight threads run a program at the same time on two devices, whose loads take 0.2 seconds each."""
    started = time.monotonic()
    done = run(
        """
import threading
run = jax.jit(lambda x: launch(x, ADD)).lower(jnp.arange(4.)).compile()
barrier, results = threading.Barrier(8), []
def call():
    x = jnp.arange(4.)
    barrier.wait()
    results.append(run(x).tolist())
threads = [threading.Thread(target=call) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert results == [[0.5, 1.5, 2.5, 3.5]] * 8, results
""",
        FAKE_DEVICES="2",
        FAKE_CUDA_SLOW="1",
    )
    assert time.monotonic() - started < 120
    loads = [field(text, "context") for text in done.named("cuModuleLoadData")]
    launches = [field(text, "context") for text in done.named("cuLaunchKernelEx")]
    assert sorted(loads) == sorted(set(launches)) and len(launches) == 8
    assert len(done.named("cuInit")) == 1 and len(done.named("cuDevicePrimaryCtxRetain")) == len(set(launches))


ERRORS = {
    "other GPU": (
        {"FAKE_CUDA_FAIL": "cuModuleLoadData=209", "FAKE_CUDA_DEVICE": "90,132,232448,12040,2"}, "",
        r"the kernel add was compiled for compute capability 8\.0 and does not run on Fake GPU 0, which has 9\.0 "
        r"\(fake error 209\): compile, or export, the program for this GPU",
    ),
    "old driver": (
        {"FAKE_CUDA_FAIL": "cuModuleLoadData=200"}, "",
        r"cannot load the kernel add .* of Fake GPU 0, 8\.0: install a newer driver",
    ),
    "load": ({"FAKE_CUDA_FAIL": "cuModuleLoadData=2"}, "", "cuModuleLoadData failed for the kernel add .* error 2"),
    "function": ({"FAKE_CUDA_FAIL": "cuModuleGetFunction=500"}, "", "cuModuleGetFunction failed for the kernel add"),
    "launch": ({"FAKE_CUDA_FAIL": "cuLaunchKernelEx=719"}, "", "the launch of the kernel add failed .* error 719"),
    "driver": ({"FAKE_CUDA_FAIL": "cuInit=803"}, "", "the NVIDIA driver does not start: fake error 803"),
    "device": ({"FAKE_CUDA_FAIL": "cuDevicePrimaryCtxRetain=46"}, "", "CUDA device 0 cannot be used: fake error 46"),
    "too many programs": (
        {"FAKE_CUDA_DEVICE": "80,3,166912,12040,2"}, "cooperative=True",
        "the 7 programs of the kernel add wait for one another, and Fake GPU 0 runs at most 6 at once: compile, or",
    ),
    "shared memory": (
        {}, "shared_memory=200_000", "add uses 200000 bytes of shared memory, and Fake GPU 0 has 166912: compile",
    ),
    "alignment": (
        {"FAKE_SHIFT": "4"}, "", "array 0 of the kernel add starts at 0x.*4, and kernels are compiled for arrays that "
        "are aligned to 16 bytes",
    ),
    "name": ({}, "name='n' * 256", "attributes of kernel 0 of a launch are missing or malformed"),
    "grid": ({}, "grid=0", "attributes of kernel 0 of a launch are missing or malformed"),
    "threads": ({}, "threads=-1", "attributes of kernel 0 of a launch are missing or malformed"),
    "cubin": ({}, "cubin=b''", "attributes of kernel 0 of a launch are missing or malformed"),
    "many parameters": ({}, "parameters=(('null', None),) * 65", "attributes of kernel 0 of a launch are missing"),
    "empty name": ({}, "name=''", "attributes of kernel 0 of a launch are missing or malformed"),
    "name with NUL": ({}, "name='add\\0x'", "attributes of kernel 0 of a launch are missing or malformed"),
    "large threads": ({}, "threads=1025", "attributes of kernel 0 of a launch are missing or malformed"),
    "few parameters": (
        {}, "parameters=ADD.parameters[:4]", "the kernel add has 5 parameters, and a launch gives it 4",
    ),
    "more parameters": (
        {}, "parameters=(*ADD.parameters, ('null', None))", "the kernel add has 5 parameters, and a launch gives it 6",
    ),
    "wide parameter": (
        {}, "parameters=(*ADD.parameters[:2], ('i64', 4), *ADD.parameters[3:])",
        "parameter 2 of the kernel add does not fit: it is 4, of the kind 3",
    ),
    "narrow parameter": (
        {}, "parameters=(('i32', 4), *ADD.parameters[1:])",
        "parameter 0 of the kernel add does not fit: it is 4, of the kind 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    environment, changes, text = ERRORS[name]
    done = run(f"print(error_of(lambda x: launch(x, ADD._replace({changes})), jnp.arange(4.)))", **environment)
    assert re.search(text, done.output), done.output
    loads, unloads = (len(done.named(function)) for function in ("cuModuleLoadData", "cuModuleUnload"))
    assert unloads == (name == "function") and loads <= 1


def test_malformed_attributes_raise():
    done = run("""
x = jnp.arange(4.)
given = call.attributes([ADD], ["x", "y"])
GRID_X, GRID_Y, GRID_Z, THREADS, SHARED, CLUSTER, COOPERATIVE, EARLY, CAPABILITY = range(9)
OUT_OF_RANGE = [
    (GRID_X, 0), (GRID_X, 2**31), (GRID_Y, 65536), (GRID_Z, 65536), (THREADS, 2**32 + 1), (SHARED, -1), (SHARED, 2**31),
    (CLUSTER, 0), (CLUSTER, 2**32 + 1), (COOPERATIVE, 2), (EARLY, -1), (CAPABILITY, 2**31),
]
def changed(field, value):
    launch = given["launch_0"].copy()
    launch[field] = value
    return launch
for changes in (
    {"kernels": np.int64(0)}, {"kernels": np.int64(17)}, {"kernels": np.int32(1)}, {"kernels": "1"},
    {"kernels": np.int64(2)},
    {"key_0": "short"}, {"key_0": given["key_0"].upper()}, {"key_0": "g" * 64},
    {"launch_0": np.zeros(9, np.int32)}, {"launch_0": np.ones(8, np.int64)},
    {"name_0": np.int64(1)},
    {"parameters_0": given["parameters_0"][:-1]},
    *({"launch_0": changed(field, value)} for field, value in OUT_OF_RANGE),
    {"parameters_0": np.array([0, 2])}, {"parameters_0": np.array([0, -1])}, {"parameters_0": np.array([5, 0])},
    *({"parameters_0": np.array(wide)} for wide in ((2, 2**31), (2, -(2**31) - 1), (4, 2**32), (4, -1))),
):
    print(json.dumps(error_of(lambda: launch(x, ADD, **changes))))
""")
    texts = [json.loads(line) for line in done.output.splitlines()]
    assert not done.named("cuLaunchKernelEx")
    assert all('"kernels" of a launch must be an int64 from 1 to 16' in text for text in texts[:4])
    assert "attributes of kernel 1 of a launch are missing" in texts[4]
    assert all("attributes of kernel 0 of a launch are missing or malformed" in text for text in texts[5:24])
    assert all("is of the unknown kind" in text for text in texts[24:27])
    assert all("parameter 0 of the kernel add does not fit" in text for text in texts[27:]) and len(texts) == 31


def test_the_programs_of_the_largest_grid_are_counted():
    """The product of its numbers has 63 bits; the number of programs that run at once is compared with it."""
    done = run("""
launch_0 = call.attributes([ADD._replace(cooperative=True)], ["x", "y"])["launch_0"]
launch_0[:3] = 2**31 - 1, 65535, 65535
print(error_of(lambda: launch(jnp.arange(4.), ADD, launch_0=launch_0)))
""")
    assert f"the {(2**31 - 1) * 65535**2} programs of the kernel add wait for one another" in done.output


@pytest.mark.parametrize(
    "changes",
    [
        {"grid": 2**31}, {"grid": 2**64}, {"threads": 2**31}, {"shared_memory": 2**40}, {"cluster": 2**31},
        {"capability": 2**31}, {"parameters": (("i32", 2**31),)}, {"parameters": (("i32", -(2**31) - 1),)},
        {"parameters": (("i64", 2**63),)}, {"parameters": (("fp32", 1e39),)}, {"parameters": (("i32", 0.5),)},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_do_not_fit_raise_where_a_program_is_made(changes):
    with pytest.raises(ValueError, match=r"(do|does) not fit"):
        call.attributes([ADD._replace(**changes)], ["x", "y"])


def test_the_largest_numbers_fit():
    numbers = (("i32", 2**31 - 1), ("i32", -(2**31)), ("i64", -(2**63)), ("fp32", float("inf")))
    made = call.attributes([ADD._replace(grid=2**31 - 1, parameters=numbers)], ["x", "y"])
    assert made["launch_0"][0] == 2**31 - 1
    assert made["parameters_0"].tolist() == [2, 2**31 - 1, 2, -(2**31), 3, -(2**63), 4, 0x7F800000]


# Damage.

DAMAGED = (
    "the kernel {} of a program is damaged, because its digest is not its key: compile, or export, the program again"
)


@pytest.mark.parametrize("name", ["target.TARGET", "'execute_only'"])
def test_a_damaged_binary_raises_and_is_not_loaded(name):
    """XLA refuses the program; where it does not instantiate programs, the load is refused. No driver is to blame."""
    done = run(f"""
import damage
binary = ADD._replace(cubin=bytes(range(1, 200)))
key_0 = call.attributes([binary], ["x", "y"])["key_0"]
for cubin in [*damage.flips(binary.cubin, 40), binary.cubin[:-1], binary.cubin + b"\\0"]:
    print(error_of(lambda: launch(jnp.arange(4.), binary._replace(cubin=cubin), name={name}, key_0=key_0)))
for changes in ({{"shared_memory": 1}}, {{"name": "sub"}}):
    print(error_of(lambda: launch(jnp.arange(4.), binary._replace(**changes), name={name}, key_0=key_0)))
print(error_of(lambda: launch(jnp.arange(4.), binary, name={name}, key_0=key_0[:-1] + "0")))
""")
    lines = [line for line in done.output.splitlines() if line]
    assert len(lines) == 45 and all(DAMAGED.format("sub" if "sub" in line else "add") in line for line in lines)
    assert not done.named("cuModuleLoadData")


def test_a_binary_under_the_key_of_another_raises():
    """Whether the other one is loaded already or not."""
    done = run("""
other = ADD._replace(cubin=b"FAKE bdd\\0")
key_0 = call.attributes([ADD], ["x", "y"])["key_0"]
print(error_of(lambda: launch(jnp.arange(4.), other, key_0=key_0)))
launch(jnp.arange(4.), ADD).block_until_ready()
print(error_of(lambda: launch(jnp.arange(4.), other, key_0=key_0)))
print(error_of(lambda: launch(jnp.arange(4.), ADD, other, key_1=key_0)))
""")
    lines = [line for line in done.output.splitlines() if line]
    assert len(lines) == 3 and all(DAMAGED.format("add") in line for line in lines)
    assert len(done.named("cuLaunchKernelEx")) == 1


def test_a_damaged_exported_program_raises():
    """For bits of the binary, which is most of the program."""
    done = run("""
import damage
binary = ADD._replace(cubin=b"FAKE" + np.random.default_rng(0).bytes(4096))
check = jax.export.DisabledSafetyCheck.custom_call(target.TARGET)
data = jax.export.export(jax.jit(lambda x: launch(x, binary)), disabled_checks=[check])(jnp.arange(4.)).serialize()
print(jax.export.deserialize(bytearray(data)).call(jnp.arange(4.)).tolist())
# the program has the binary as it is
at = bytes(data).index(binary.cubin)
for cubin in damage.flips(binary.cubin, 40):
    damaged = bytes(data[:at]) + cubin + bytes(data[at + len(cubin):])
    print(error_of(lambda: jax.export.deserialize(bytearray(damaged)).call(jnp.arange(4.))))
""")
    whole, *damaged = (line for line in done.output.splitlines() if line)
    assert whole == "[0.5, 1.5, 2.5, 3.5]"
    assert len(damaged) == 40 and all(DAMAGED.format("add") in line for line in damaged)


def test_keys_are_checked_with_any_length_of_binary():
    """SHA-256 pads blocks of 64 bytes."""
    done = run("""
for size in range(1, 140):
    launch(jnp.arange(4.), ADD._replace(cubin=b"F" * size), name="initialize_only").block_until_ready()
""")
    assert len(done.named("cuModuleLoadData")) == 139


def test_a_driver_that_does_not_say_what_parameters_a_kernel_has_launches():
    """CUDA before 12.4."""
    done = run("launch(jnp.arange(4.), ADD)", LD_LIBRARY_PATH=str(driver("-DBEFORE_CUDA_12_4")))
    assert len(done.named("cuLaunchKernelEx")) == 1


SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def has_sanitizers():
    with tempfile.TemporaryDirectory() as folder:
        command = [*(build._find_compiler() or ["cc"]), *SANITIZERS, "-x", "c", "-", "-o", f"{folder}/program"]
        try:
            done = subprocess.run(command, input="int main(void) { return 0; }", text=True, capture_output=True)
        except FileNotFoundError:
            return False
        return done.returncode == 0


@pytest.mark.skipif(not has_sanitizers(), reason="the C compiler has no AddressSanitizer or UndefinedBehaviorSanitizer")
def test_random_calls_under_sanitizers(tmp_path):
    options = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *SANITIZERS, "-fPIC"]
    options += [f"-I{jax.ffi.include_dir()}", f"-I{build.SOURCE.parent}"]
    for source, name, *more in (("fake_driver.c", "libcuda.so.1", "-shared"), ("random_calls.c", "random_calls")):
        command = [*build._find_compiler(), *options, *more, str(native_handler.FOLDER / source)]
        subprocess.run([*command, "-o", str(tmp_path / name), "-ldl", "-lpthread"], check=True)
    command = [str(tmp_path / "random_calls"), "0", "50000"]
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = {(stage, code): int(count) for stage, code, count in map(str.split, done.stdout.splitlines())}
    assert sum(counts.values()) == 50_000
    instantiate, initialize, execute = "0", "2", "3"
    unknown, malformed, exhausted, precondition, internal, damaged = "2", "3", "8", "9", "13", "15"
    for stage in (instantiate, initialize, execute):
        assert counts[stage, "0"] > 1000 and counts[stage, malformed] > 1000 and counts[stage, damaged] > 10
    assert all(counts[execute, code] > 10 for code in (unknown, exhausted, precondition, internal))


def test_an_error_is_not_remembered():
    """What fails once is tried again: the driver's start, the device, and the load of a kernel."""
    for function in ("cuInit", "cuDeviceGetName", "cuModuleLoadData", "cuCtxPushCurrent"):
        done = run(
            """
x = jnp.arange(4.)
assert error_of(launch, x, ADD)
assert launch(x, ADD).tolist() == [0.5, 1.5, 2.5, 3.5]
""",
            FAKE_CUDA_FAIL=f"{function}=2*1",
        )
        assert len(done.named("cuLaunchKernelEx")) == 1


def test_a_driver_that_cannot_be_opened_raises(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("no library")
    done = run("print(error_of(lambda x: launch(x, ADD), jnp.arange(4.)))", LD_LIBRARY_PATH=str(tmp_path))
    pattern = (
        r'driver cannot be opened \(.*libcuda\.so\.1: .*\): install it, or build the program with implementation="xla"'
    )
    assert re.search(pattern, done.output), done.output


def test_an_old_driver_is_named():
    folder = driver("-DcuLaunchKernelEx=cuLaunchKernel")
    done = run("print(error_of(lambda x: launch(x, ADD), jnp.arange(4.)))", LD_LIBRARY_PATH=str(folder))
    assert "the NVIDIA driver has no cuLaunchKernelEx: install one for CUDA 12 or newer" in done.output


def driver(option):
    """Returns the folder of a driver that is compiled with an option."""
    folder = native_handler.folder() / option
    folder.mkdir(exist_ok=True)
    command = [*build._find_compiler(), "-std=gnu11", "-fPIC", "-shared", option]
    source = str(native_handler.FOLDER / "fake_driver.c")
    subprocess.run([*command, source, "-o", str(folder / "libcuda.so.1"), "-lpthread"], check=True)
    return folder


def test_the_handler_may_be_captured_in_cuda_graphs():
    traits, minor = divmod(int(run("print(handler.traits_of_handler())").output), 100)
    assert traits == 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    assert f"#define XLA_FFI_API_MINOR {minor}\n" in header


def test_an_exported_program_runs_in_a_process_without_torch_and_triton(tmp_path):
    path = tmp_path / "program"
    run(f"""
check = jax.export.DisabledSafetyCheck.custom_call(target.TARGET)
program = jax.jit(lambda x: jax.lax.scan(lambda c, _: (launch(c, ADD), None), x, None, length=2)[0])
data = jax.export.export(program, disabled_checks=[check])(jnp.arange(4.)).serialize()
open({str(path)!r}, "wb").write(data)
""")
    done = run(f"""
program = jax.export.deserialize(bytearray(open({str(path)!r}, "rb").read()))
assert jax.jit(program.call)(jnp.arange(4.)).tolist() == [1., 2., 3., 4.]
""")
    assert len(done.named("cuLaunchKernelEx")) == 2


def test_keys_are_hashes_of_all_that_loading_depends_on():
    given = [ADD, ADD._replace(cubin=b"other"), ADD._replace(name="other"), ADD._replace(shared_memory=1)]
    assert len({call._key(each) for each in given}) == 4
    assert call._key(ADD) == call._key(ADD._replace(grid=3, cooperative=True, parameters=()))
