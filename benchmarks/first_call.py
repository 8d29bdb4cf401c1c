"""Times the first call of a provider in a separate process, with cold caches or with a time limit.

The program `python -m benchmarks.first_call PROVIDER CASE LIMIT [--check] [--as PROFILE]` makes that call and prints
how many seconds it took.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import functools
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from benchmarks import cases, oracle, providers, timing
from benchmarks.results import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.cases import Case
    from benchmarks.results import Status

STARTUP_LIMIT = 300  # seconds for imports and for copying inputs to the device
_READY, _DONE = "ready", "done"
# Environment variables with the folders in which compilers keep what they compiled.
_CACHES = ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR")


@dataclasses.dataclass(frozen=True)
class FirstCall:
    """The seconds from tracing to the first result, or the status and the reason of a row without them."""

    seconds: float | None = None
    status: Status = "measured"
    reason: str = ""


def run(
    provider: str, case: Case, *, limit: float, cold: bool = False, caches: str = "", profile: str = ""
) -> FirstCall:  # fmt: skip
    """Makes the first call in a new process, and stops it `limit` seconds after its inputs are on the device.

    Args:
      provider: the name of the provider.
      case: the shape.
      limit: the time limit of the call, in seconds.
      cold: whether to start with empty caches and to check the result. Otherwise compiled code stays in Triton's cache,
        where this process finds it, and the caller checks the result.
      caches: a folder for the caches of all compilers, JAX's persistent cache included, if not empty. The result is
        checked.
      profile: the GPU that kernels are chosen for, as in `benchmarks.settings.Settings`.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if cold:
            environment.pop("JAX_COMPILATION_CACHE_DIR", None)
            environment |= dict.fromkeys(_CACHES, folder)
        if caches:
            environment |= dict.fromkeys((*_CACHES, "JAX_COMPILATION_CACHE_DIR"), caches)
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        command = [
            sys.executable,
            "-m",
            "benchmarks.first_call",
            provider,
            str(case),
            str(limit),
            *(["--check"] if cold or caches else []),
            *(["--as", profile] if profile else []),
        ]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1],
                timeout=limit + STARTUP_LIMIT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return FirstCall(None, "failed", f"imports and inputs took more than {STARTUP_LIMIT} s")
    lines = [line.split() for line in process.stdout.splitlines() if line.startswith((_READY, _DONE))]
    if process.returncode == 0 and len(lines) == 2:
        return FirstCall(float(lines[1][1]))
    if len(lines) == 1 and "Timeout (" in process.stderr:
        return FirstCall(None, "unfinished", f"first call unfinished after {limit:g} s")
    last = (process.stderr.strip().split("\n") or [""])[-1]
    return FirstCall(None, "failed", last[:200] or f"ended with status {process.returncode}")


def run_twice(provider: str, case: Case, *, limit: float, profile: str = "") -> FirstCall:
    """Makes the first call in two processes, one after the other, with the same caches; returns the second one."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (run(provider, case, limit=limit, caches=folder, profile=profile) for _ in range(2))
    return second if first.seconds is not None else first


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the call in this process, which exits at the limit.

    Prints one line when the inputs are ready, and another one with the seconds that the call took.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_call")
    parser.add_argument("provider")
    parser.add_argument("case")
    parser.add_argument("limit", type=float)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--as", dest="profile", default="")
    options = parser.parse_args(arguments)

    if options.profile:
        from torch_bridge import gpu, tiling

        gpu.run_as(tiling.PROFILES[options.profile])
    chosen = providers.PROVIDERS[options.provider]
    for name in chosen.needs:
        importlib.import_module(name)
    case = cases.find(options.case)
    inputs = providers.Inputs(cases.make_inputs(case))
    built = chosen.build(case, inputs)
    if isinstance(built, providers.JaxPass):
        first: Callable[[], Any] = functools.partial(built.jitted, *built.args)
        wait: Callable[[Any], Any] = jax.block_until_ready
        wait((built.args, jax.jit(jax.numpy.sin)(1.0)))  # wait until the device has started and has the inputs
    else:
        first, wait = built.run, lambda _: timing.synchronize()
        wait(None)
    print(_READY, flush=True)
    faulthandler.dump_traceback_later(options.limit, exit=True)  # also ends a compiler, which a signal would not
    began = time.perf_counter()
    result = first()
    wait(result)
    print(_DONE, time.perf_counter() - began, flush=True)
    faulthandler.cancel_dump_traceback_later()
    if not options.check:
        return
    checked = oracle.check(chosen, providers.Ready(lambda: result, built.canonical), oracle.Oracle(case, inputs.jax))
    if checked.status != "measured":
        raise SystemExit(f"{checked.status}: {checked.reason}")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        main()
    except Exception as error:  # the table shows the last line of stderr
        traceback.print_exc()
        raise SystemExit(first_line(error)) from None
