"""Chooses how Triton runs in this process: compiled or interpreted. The choice holds for the whole process.

| run                      | kernels are                                      | tests left out           |
| ------------------------ | ------------------------------------------------ | ------------------------ |
| `pytest` with a GPU      | compiled                                         | `interpret`              |
| `pytest` without a GPU   | interpreted                                      | `gpu`, `compile_only`    |
| `pytest -m interpret`    | interpreted, JAX on the CPU                      | all but `interpret`      |
| `pytest -m compile_only` | compiled; without a GPU, some are emulated       | all but `compile_only`   |

`TRITON_INTERPRET`, if set, overrides the table. The marker `several_gpus` is also left out if `gpu` is, or if there is
only one GPU. The marker `stress` is left out unless it is asked for. Without PyTorch or Triton, all tests that need
either are left out: those with the marker `torch` or a marker of kernels, and the folders `compiled` and `gpu`. All
other tests must pass without both, and files in other folders must import without both. The marker `gymnax` is left out
if gymnax is not installed, and `agents` if Craftax or JaxMARL is not.
Without the type checkers, which the extra `dev` installs, those with the marker `types` are left out.

A file is in the folder of what most of its tests need: `cpu`, `interpreted` for those that run kernels, which a GPU
compiles, `compiled` or `gpu`. What files share is beside the folders.
"""

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import ptx_hashes
import pytest
import quick
import spills
from accelerator import nvidia_gpus

CHECKERS = ("mypy", "pyright", "hatchling", "torch")
TESTS = Path(__file__).resolve().parent
NEED_TORCH = frozenset(("torch", "interpret", "gpu", "several_gpus", "compile_only"))

left_out: frozenset[str] = frozenset()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--as", dest="profile", choices=("a100", "rtx3090", "rtx4090"),
        help="choose and compile kernels for this GPU, and assemble them for the GPU at hand",
    )  # fmt: skip
    parser.addoption("--part", choices=("quick", "rest"), help="run what the marker `quick` chooses, or the others")
    parser.addoption(
        "--full", action="store_true",
        help="compile_only: compile all configurations for every GPU, not only those that take the most registers",
    )  # fmt: skip
    parser.addoption(
        "--ptx-hashes", type=Path, metavar="FILE",
        help="compile_only: write a hash of the PTX of every kernel that the tests compile to this file",
    )  # fmt: skip
    parser.addoption(
        "--write-spills", action="store_true",
        help="compile_only: write what the kernels that test_compile.py compiles spill to spills.json",
    )  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def run_as_another_gpu(request: pytest.FixtureRequest) -> None:
    profile = request.config.option.profile
    if profile is None:
        return
    from torch_bridge import gpu, tiling

    gpu.run_as(tiling.PROFILES[profile])


def pytest_configure(config: pytest.Config) -> None:
    """Runs before any test module is imported, and therefore before Triton and JAX are."""
    global left_out
    gpus = nvidia_gpus()
    gpu = gpus > 0
    interpreted_by_default = {"interpret": True, "compile_only": False}.get(config.option.markexpr, not gpu)
    interpreted = os.environ.setdefault("TRITON_INTERPRET", str(int(interpreted_by_default))) == "1"
    if interpreted or not gpu:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Much of the time is spent on compiling small programs. It takes a third less without LLVM's optimizations, and
        # a sixth less again if LLVM gets a program in one part.
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        flags += " --xla_cpu_parallel_codegen_split_count=1"
        if version("jaxlib").startswith(("0.8.", "0.9.", "0.10.")):  # halves the rest; JAX 0.12 has no such flag
            flags += " --xla_cpu_use_fusion_emitters=false"
        devices = "--xla_force_host_platform_device_count=8"
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), flags, devices])
        left_out |= {"gpu", "several_gpus"}
    else:
        left_out |= {"several_gpus"} if gpus < 2 else set()
        # Without this flag, XLA autotunes its matmuls, and two compilations of one program may round differently.
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_deterministic_ops=true"
    if config.option.profile and (interpreted or not gpu):
        raise pytest.UsageError(f"--as {config.option.profile} runs compiled kernels: it needs an NVIDIA GPU")
    left_out |= {"compile_only"} if interpreted else {"interpret"}
    left_out |= {"stress"} if config.option.markexpr != "stress" else set()
    if not all(importlib.util.find_spec(name) for name in ("torch", "triton")):
        left_out |= NEED_TORCH
    if importlib.util.find_spec("gymnax") is None:
        left_out |= {"gymnax"}
    if not all(importlib.util.find_spec(name) for name in ("craftax", "jaxmarl")):
        left_out |= {"agents"}
    if not all(importlib.util.find_spec(name) for name in CHECKERS):
        left_out |= {"types"}
    if config.option.ptx_hashes is not None:
        if "compile_only" in left_out:
            raise pytest.UsageError("--ptx-hashes needs compiled kernels: add -m compile_only, unset TRITON_INTERPRET")
        config.pluginmanager.register(ptx_hashes.PTXHashes(config.option.ptx_hashes))
    if config.option.write_spills:
        if "compile_only" in left_out:
            raise pytest.UsageError("--write-spills needs compiled kernels: add -m compile_only")
        config.pluginmanager.register(spills.WriteSpills())

    # Workers share the machine, so none may preallocate the GPU's memory or use every core. OMP_NUM_THREADS must be set
    # before they start: NumPy reads it only on import, and a pytest plugin may import NumPy before a worker reads this
    # file.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch.compile would fork processes, one for each core, while threads of JAX and PyTorch run. A child has the locks
    # that those threads held, but not the threads, and may wait for ever.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignores folders whose files import Triton at their top, if it or PyTorch is not installed.

    Also ignores those without quick tests that compile, if only such tests are asked for: collecting takes seconds.
    """
    folders = {"compiled", "gpu"} if "torch" in left_out else set()
    if (config.option.part, config.option.markexpr) == ("quick", "compile_only"):
        folders |= {"cpu", "gpu", "interpreted"}
    return True if any(collection_path.is_relative_to(TESTS / name) for name in folders) else None


@pytest.fixture(autouse=True)
def matmuls_have_their_default_precision() -> Iterator[None]:
    """Undoes what a test, or what it runs, sets for PyTorch's float32 products, which holds for the whole process."""
    yield
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.fixture(scope="session", autouse=True)
def programs_of_xla_are_kept(request: pytest.FixtureRequest) -> None:
    """Keeps what XLA compiles for CPUs in pytest's cache folder, which saves a third of the time of a second run.

    Every worker has a folder of its own, because JAX does not write its files in one step. A file that was left
    unfinished is compiled anew.
    """
    import jax

    cache = getattr(request.config, "cache", None)  # None with "-p no:cacheprovider"
    if cache is None or jax.config.jax_platforms != "cpu" or jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        folder = cache.mkdir("jax") / os.environ.get("PYTEST_XDIST_WORKER", "main")
    except OSError:  # pytest itself warns that it cannot write there
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session", autouse=True)
def triton_is_interpreted_faster() -> None:
    if os.environ["TRITON_INTERPRET"] == "1" and "torch" not in left_out:
        import faster_interpreter

        faster_interpreter.install()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Assigns neighboring tests to the same worker by default, because many of them share a compilation."""
    if config.option.dist != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_collection_finish() -> None:
    """Lets the garbage collector run less often, and leave out what is imported. The tests then take a twentieth less.

    JAX makes many objects when it traces and lowers a program, and few of them are garbage. On a GPU, which the workers
    share, garbage may hold the memory of arrays, and the collector stays as it is.
    """
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_report_header() -> str:
    kernels = "interpreted" if os.environ["TRITON_INTERPRET"] == "1" else "compiled"
    versions = f"jax {version('jax')}, flax {version('flax')}"
    return (
        f"{versions}; triton kernels: {kernels}; tests left out: {', '.join(sorted(left_out))} (see tests/conftest.py)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if not any(item.get_closest_marker(name) for name in left_out)]
    kept = quick.part(kept, config.option.part)
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[*set(items) - set(kept)])
        items[:] = kept
    # The longest tests run first, so that no worker is left alone with them at the end.
    items.sort(key=lambda item: item.path.name != "test_recurrent_ppo.py")
