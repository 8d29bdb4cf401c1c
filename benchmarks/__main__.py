"""Measures jaxrnn beside other implementations, and shows the results.

    # measure; needs an NVIDIA GPU
    python -m benchmarks headline small
    python -m benchmarks small --only jaxrnn,flax --rows "GRU 8,"
    # run the kernels of an A100 on the GPU at hand
    python -m benchmarks headline --as a100
    # print the tables of the last results
    python -m benchmarks show headline
    # print the tables of the results in FOLDER
    python -m benchmarks show --out FOLDER headline
    # draw the figures
    python -m benchmarks plot
    # write the tables and sentences with figures into README.md and docs
    python -m benchmarks pages

Suites: headline small sweep episodes derivatives cells vmap torch torch-step
acting dispatch memory compile accuracy ppo norm choice tilings. The default is
all of them. Results go to benchmarks/results/GPU/SUITE.json, which is written
after every row, so that an interrupted run keeps its finished rows. --as
chooses kernels as for another GPU, compiles them to its PTX and assembles that
for the GPU at hand; results then go to benchmarks/results/as-PROFILE-on-GPU.
Other implementations run unchanged.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import RESULTS
from benchmarks.settings import Settings
from torch_bridge.tiling.devices import PROFILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import AccuracyRow, Row

SUITES = (
    "headline", "small", "sweep", "episodes", "derivatives", "cells", "vmap", "torch", "torch-step", "acting",
    "dispatch", "memory", "compile", "accuracy", "ppo", "norm", "choice", "tilings",
)  # fmt: skip
# The actions on existing results, with the options that each accepts; measuring accepts all options.
VIEWS = {"show": ("out", "profile"), "plot": ("out", "profile"), "pages": ()}
# The end of the names of the folders that are shown if there are several: the machine of README.md.
REFERENCE = "nvidia-h200"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line, and adds `view`, `suites` and `settings` to its options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("commands", nargs="*", metavar="SUITE", help="suites; or show [suites], plot, pages")
    add("--out", type=Path, help="folder of the results (default: benchmarks/results/GPU)")
    # The default of every option is None, which shows that the option was not given.
    add("--only", action="extend", type=_names, metavar="A,B", help="measure only these providers; repeatable")
    add("--skip", action="extend", type=_names, metavar="A,B", help="do not measure these providers; repeatable")
    add("--rows", action="append", metavar="TEXT", help="measure only cases whose name contains this text; repeatable")
    kept = "keep existing results of other cases if they are of the same machine and commit"
    add("--add", action="store_const", const=True, help=kept)
    add("--seconds", type=float, help=f"seconds to measure each provider in each row (default: {Settings.seconds})")
    add("--rounds", type=int, help=f"rounds, in each of which every provider is timed (default: {Settings.rounds})")
    add(
        "--first-call-limit", type=float, metavar="SECONDS",
        help=f"time limit of a first call that may take minutes (default: {Settings.first_call_limit})",
    )  # fmt: skip
    add("--as", dest="profile", choices=list(PROFILES), help="choose and compile kernels for this GPU")
    add("--commit", help="commit of the code (default: JAXRNN_COMMIT, else the commit that git reports)")
    options = parser.parse_intermixed_args(arguments)
    options.view = options.commands.pop(0) if options.commands[:1] and options.commands[0] in VIEWS else None
    if options.view in ("plot", "pages") and options.commands:
        parser.error(f"{options.view} takes no suites")
    passed = [name for name, value in vars(options).items() if name not in ("commands", "view") and value is not None]
    if ignored := [name for name in passed if options.view and name not in VIEWS[options.view]]:
        flags = ", ".join(_flag(name) for name in ignored)
        taken = ", ".join(_flag(name) for name in VIEWS[options.view]) or "none"
        parser.error(f"{options.view} does not take {flags}; the options that it takes: {taken}")
    options.suites = options.commands or SUITES
    if unknown := [name for name in options.suites if name not in SUITES]:
        parser.error(f"no suite {', '.join(unknown)}; there are {', '.join(SUITES)}, and {', '.join(VIEWS)}")
    if named := (*(options.only or ()), *(options.skip or ())):
        from benchmarks.providers import PROVIDERS
        from benchmarks.suites import OTHER_NAMES

        known = dict.fromkeys((*PROVIDERS, *OTHER_NAMES))
        if unknown := [name for name in named if name not in known]:
            parser.error(f"no provider {', '.join(unknown)}; there are {', '.join(known)}")
    settings = {f.name: getattr(options, f.name) for f in dataclasses.fields(Settings) if f.name in passed}
    settings |= {name: tuple(getattr(options, name) or ()) for name in ("only", "skip", "rows")}
    try:
        options.settings = Settings(**settings)
    except ValueError as error:
        parser.error(str(error))
    options.commit = options.commit or os.environ.get("JAXRNN_COMMIT")
    return options


def _flag(name: str) -> str:
    return "--as" if name == "profile" else f"--{name.replace('_', '-')}"


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def results_folder(out: Path | None, profile: str | None = None) -> Path:
    """Returns `out` or, if it is None, the folder of results under `RESULTS`: of several, that of `REFERENCE`.

    With `profile`, it considers only results of kernels that ran as that GPU, otherwise only those of kernels that ran
    unchanged.
    """
    if out is not None:
        return out
    all_of_them = {path.parent for path in RESULTS.glob("*/*.json")}
    folders = sorted(x for x in all_of_them if x.name.startswith(f"as-{profile or ''}") == bool(profile))
    if len(folders) > 1:
        folders = [folder for folder in folders if folder.name.endswith(REFERENCE)] or folders
    if len(folders) != 1:
        found = ", ".join(folder.name for folder in folders) or "none"
        raise SystemExit(f"name the folder of the results with --out; under {RESULTS} there are: {found}")
    return folders[0]


def view(options: argparse.Namespace) -> None:
    """Prints existing results, draws them or writes them into pages."""
    from benchmarks import pages, plot, report
    from benchmarks.results import Report

    if options.view == "pages":
        print(*pages.write(), sep="\n")
        return
    folder = results_folder(options.out, options.profile)
    suites = plot.SUITES if options.view == "plot" else options.suites
    paths = [path for path in (folder / f"{suite}.json" for suite in suites) if path.exists()]
    if not paths:
        raise SystemExit(f"no results of {', '.join(suites)} in {folder}: measure first")
    if options.view == "plot":
        print(*plot.draw(folder), sep="\n")
        return
    for path in paths:
        report.console().print(report.table(Report.load(path)))


def measure(options: argparse.Namespace) -> int:
    """Runs the suites. Returns how many rows show a defect of this project (`report.broken`)."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to PyTorch
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")  # reuse the autotuning of first calls in other processes

    import jax
    from tqdm import tqdm  # type: ignore[import-untyped]

    from benchmarks import machine, report, suites
    from benchmarks.results import Report

    if jax.default_backend() != "gpu":
        raise SystemExit(
            f'the suites need an NVIDIA GPU, but JAX computes on "{jax.default_backend()}" here: run them on a machine '
            f"with an NVIDIA GPU, after pip install '.[bench,cuda13]'; {', '.join(VIEWS)} work everywhere"
        )
    if options.profile:
        from torch_bridge import gpu

        gpu.run_as(PROFILES[options.profile])
    here = machine.describe(options.commit, options.profile or "")
    folder = RESULTS / machine.slug(here) if options.out is None else options.out
    console, bad = report.console(), 0
    for name in options.suites:
        result = Report(name, here, dataclasses.asdict(options.settings), [])
        kept = result.others(folder) if options.add else []
        new: list[Row | AccuracyRow] = []
        with tqdm(desc=name, unit=" turns") as bar:

            def progress(text: str, bar: tqdm = bar) -> None:
                bar.set_postfix_str(text, refresh=False)
                bar.update()

            for row in suites.SUITES[name](options.settings, progress):
                new.append(row)
                result.rows[:] = [*(old for old in kept if old.case not in {row.case for row in new}), *new]
                path = result.save(folder)
        if result.rows:
            console.print(report.table(result))
            console.print(f"{path}", soft_wrap=True)
        bad += sum(report.broken(row) for row in result.rows)
    return bad


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 1 if a row of this project is wrong or failed."""
    options = parse_arguments(arguments)
    if options.view:
        view(options)
        return 0
    return 1 if measure(options) else 0


def run() -> int:
    """Runs `main`, and returns 1 if the reader of the standard output closes it early."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        return 1
    return status


if __name__ == "__main__":
    sys.exit(run())
