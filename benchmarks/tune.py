"""Times every tiling that a problem can run with, and writes the table of those that beat the heuristic's.

`python -m benchmarks tune` writes `torch_bridge/tables/DEVICE.json` for the GPU that is there. Kernels are timed alone,
forward saving what the backward pass needs; the zeroing of workspaces that have to be zeros is part of it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table as RichTable

from benchmarks.launches import Run, make_arrays, make_problem, numbers_of, outputs_of
from torch_bridge import config, launch
from torch_bridge.config import Entry, Table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from benchmarks.settings import Settings
    from benchmarks.timing import Clock
    from torch_bridge.config import Device, Direction, KernelConfig, Problem
    from torch_bridge.launch import Specialization

CELLS = ("gru", "lstm")
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")
KINDS = ("tf32", "bf16")
HIDDEN = (64, 128, 192, 256, 384, 512, 1024)
SEQUENCES = (8, 32, 128, 512, 1024, 2048)
STEPS = 32

# A tiling that beats the heuristic's by less is no entry: two runs differ by some percent.
THRESHOLD = 0.03
# Tilings that take so many times as long as the fastest in a first look are not timed further.
HOPELESS = 1.3


def grid() -> Iterator[Problem]:
    """The problems that a table is made of."""
    for cell, direction, kind, hidden, sequences in itertools.product(CELLS, DIRECTIONS, KINDS, HIDDEN, SEQUENCES):
        yield make_problem(cell, direction, kind, hidden, sequences, steps=STEPS)


def label(problem: Problem) -> str:
    """`GRU fwd tf32 2048,32,128` for B, T, H."""
    return (
        f"{problem.cell.upper()} {problem.direction} {_kind(problem)} {problem.batch},{problem.steps},{problem.hidden}"
    )


def describe(tiling: KernelConfig) -> str:
    """A tiling in short: `plain 64x16x32 / 4, 8 warps, 3 stages`."""
    blocks = f"{tiling.block_h}x{tiling.block_b}x{tiling.block_k}"
    return f"{tiling.variant} {blocks} / {tiling.splits}, {tiling.num_warps} warps, {tiling.num_stages} stages"


def _kind(problem: Problem) -> str:
    return "bf16" if problem.operand_dtype == "bfloat16" else problem.precision


def tilings(problem: Problem, device: Device) -> list[KernelConfig]:
    """Those that a problem can run with, the heuristic's first, each once."""
    return list(dict.fromkeys(config.candidates(problem, device)))


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out for a problem.

    Attributes:
      problem: which one.
      heuristic: the heuristic's tiling.
      us: microseconds of a step of the tilings that work.
      bad: why others have none, of those that should.
    """

    problem: Problem
    heuristic: KernelConfig
    us: Mapping[KernelConfig, float]
    bad: Mapping[KernelConfig, str]

    @property
    def fastest(self) -> KernelConfig | None:
        """The fastest tiling; None if the heuristic's does not work, which the others are held to."""
        return min(self.us, key=self.us.__getitem__) if self.us else None

    @property
    def entry(self) -> Entry | None:
        """The entry of the table, or None if the heuristic's tiling will do."""
        if self.fastest is None or self.us[self.heuristic] <= (1 + THRESHOLD) * self.us[self.fastest]:
            return None
        us, heuristic_us = (round(self.us[tiling], 3) for tiling in (self.fastest, self.heuristic))
        return Entry(*config.key(self.problem), self.fastest, us, heuristic_us)


def _compile(specialization: Specialization) -> None:
    specialization.compile()


def compile_all(specializations: Sequence[Specialization], progress: Callable[[], Any]) -> None:
    """Leaves kernels in Triton's cache on disk, compiled by as many processes as there are cores.

    What does not compile is left to fail again, and to be reported, where it is loaded.
    """
    spawn = multiprocessing.get_context("spawn")
    workers = min(len(os.sched_getaffinity(0)), max(len(specializations), 1))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for _ in concurrent.futures.as_completed([pool.submit(_compile, one) for one in specializations]):
            progress()


def check(run: Run, arrays: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], tolerance: float) -> str:
    """Runs once. Returns what is wrong with the outputs, in words; nothing if all is well.

    Args:
      run: writes into `arrays`.
      arrays: of the problem.
      want: outputs by name; those that are missing need only be finite.
      tolerance: on `||got - want|| / ||want||`.
    """
    names = outputs_of(run.launch.problem)
    for name in names:
        arrays[name].fill_(float("nan"))
    run()
    for name in names:
        got = arrays[name]
        if name not in want:
            if not bool(torch.isfinite(got).all()):
                return f"{name} is not finite"
            continue
        got, wanted = (numbers_of(run.launch.problem, name, x) for x in (got, want[name]))
        error = float(_norm(got - wanted) / _norm(wanted))
        if not error <= tolerance:
            return f"{name} is off by {error:.2g}, more than {tolerance:g}"
    return ""


def _norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dtype=torch.float64)


def measure(
    problem: Problem,
    device: Device,
    settings: Settings,
    *,
    place: str = "cuda",
    clock: Callable[[Run], Clock] | None = None,
) -> Result:
    """Checks the tilings of a problem against the heuristic's, and times those that agree.

    Args:
      problem: which one.
      device: that `place` is.
      settings: how long.
      place: of the arrays, as PyTorch names it.
      clock: of a launch; by default CUDA events around replays of a CUDA graph.
    """
    from benchmarks import timing
    from benchmarks.oracle import TOLERANCE

    tolerance = TOLERANCE["bf16" if _kind(problem) == "bf16" else "tf32"]
    arrays = make_arrays(problem, place)
    first, *others = tilings(problem, device)
    want: dict[str, torch.Tensor] = {}
    clocks: dict[KernelConfig, Clock] = {}
    bad: dict[KernelConfig, str] = {}
    for tiling in (first, *others):
        try:
            run = Run(problem, device, tiling, arrays)
            reason = check(run, arrays, want, tolerance)
            if not reason:
                clocks[tiling] = (clock or timing.torch_clock)(run)
        except Exception as error:
            reason = timing.first_line(error)
        if reason:
            bad[tiling] = reason
            if tiling == first:
                return Result(problem, first, {}, bad)
        elif tiling == first:
            want = {name: arrays[name].clone() for name in outputs_of(problem)}
    if len(clocks) > 1:
        quick = _seconds(timing.interleave(_named(clocks), rounds=1, seconds=settings.seconds / 10))
        limit = HOPELESS * min(quick.values())
        clocks = {tiling: clock for i, (tiling, clock) in enumerate(clocks.items()) if i == 0 or quick[str(i)] <= limit}
    spreads = _seconds(timing.interleave(_named(clocks), rounds=settings.rounds, seconds=settings.seconds))
    us = {tiling: 1e6 * spreads[str(i)] / problem.steps for i, tiling in enumerate(clocks)}
    return Result(problem, first, us, bad)


def _named(clocks: Mapping[KernelConfig, Clock]) -> dict[str, Clock]:
    return {str(i): clock for i, clock in enumerate(clocks.values())}


def _seconds(spreads: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    return {name: device.median for name, (device, _) in spreads.items()}


def make_table(results: Iterable[Result], device: Device, about: Mapping[str, str], old: Table | None = None) -> Table:
    """The table of some results, and of what `old` has of other problems on the same device, measured with the same."""
    results = list(results)
    entries = [result.entry for result in results if result.entry is not None]
    measured = {config.key(result.problem) for result in results}
    if old is not None and (old.device, old.about) == (device, about):
        entries += [entry for entry in old.entries if entry.key not in measured]
    return Table(device, about, tuple(sorted(entries, key=lambda entry: entry.key)))


def report(results: Iterable[Result], caption: str) -> RichTable:
    """What was measured, for the terminal; what is an entry of the table is marked."""
    from benchmarks.report import number

    table = RichTable(title="tune: microseconds of a step", caption=caption)
    for name in ("problem", "heuristic's", "fastest", "ratio", "", "the fastest"):
        table.add_column(name, justify="left" if name in ("problem", "", "the fastest") else "right", no_wrap=True)
    for result in results:
        if result.fastest is not None:
            us, fastest = result.us[result.heuristic], result.us[result.fastest]
            mark = "entry" if result.entry else ""
            figures = number(us), number(fastest), f"{us / fastest:.3f}"
            table.add_row(label(result.problem), *figures, mark, describe(result.fastest))
        for tiling, reason in result.bad.items():
            table.add_row(label(result.problem), "-", "-", "-", "bad", f"{describe(tiling)}: {reason}")
    return table


def main(options: argparse.Namespace) -> int:
    """Tunes for the GPU that is there. Returns how many tilings do not work."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # of JAX only the version matters
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from tqdm import tqdm  # type: ignore[import-untyped]

    from benchmarks import machine
    from benchmarks.report import console

    if launch.interpreting():
        raise SystemExit("tune times compiled kernels: unset TRITON_INTERPRET")
    if not torch.cuda.is_available():
        raise SystemExit("tune times an NVIDIA GPU, but PyTorch finds none here: run it on a machine that has one")
    ordinal = torch.cuda.current_device()
    device = launch.device(ordinal)
    here = machine.describe(options.commit or machine.commit("jaxrnn", "torch_bridge", ":!torch_bridge/tables"))
    about = {name: x for name, x in here.items() if name in ("driver", "torch", "triton", "commit")}
    folder = options.out or config.TABLES
    path = folder / f"{config.slug(device.name)}.json"
    old = Table.load(path) if options.add and path.exists() else None

    problems = [problem for problem in grid() if options.settings.wants_case(label(problem))]
    problems = [problem for problem in problems if len(tilings(problem, device)) > 1]
    kernels = {
        launch.Launch(problem, device, tiling).specialization: None
        for problem in problems
        for tiling in tilings(problem, device)
    }
    with tqdm(desc="compile", total=len(kernels), unit=" kernels") as bar:
        compile_all(list(kernels), bar.update)
    results: list[Result] = []
    with tqdm(desc="tune", total=len(problems), unit=" problems") as bar:
        for problem in problems:
            bar.set_postfix_str(label(problem), refresh=False)
            results.append(measure(problem, device, options.settings))
            make_table(results, device, about, old).save(folder)  # a run that is stopped keeps what it has
            bar.update()
    console().print(report(results, machine.line({"gpu": device.name, **about})))
    if results:
        console().print(f"{path}", soft_wrap=True)
    return sum(len(result.bad) for result in results)
