"""Takes what examples that train agents have measured into the results, as the file `examples.json` of their GPU.

`python -m benchmarks.examples FILE ...` reads JSON files that the examples wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import machine
from benchmarks.results import RESULTS, AgentRow, Report
from benchmarks.suites import PPO_IMPLEMENTATIONS, load_example, mean_and_interval, with_shares

if TYPE_CHECKING:
    from collections.abc import Iterable


def take(paths: Iterable[Path], results: Path = RESULTS) -> Path:
    """Writes the rows of the JSON files that examples wrote on one machine, and returns the path."""
    here: dict[str, str] = {}
    rows: list[Any] = []
    for path in paths:
        example = json.loads(path.read_text())
        gpu, *packages = example["machine"].split(", ")
        if here.setdefault("gpu", gpu) != gpu:
            raise SystemExit(f"{path} is of {gpu}, those before of {here['gpu']}: name the files of one GPU")
        here |= dict(package.rsplit(" ", 1) for package in packages)
        rows += with_shares([row_of(run) for run in example["runs"]])
    return Report("examples", {**here, "commit": machine.commit("jaxrnn", "torch_bridge")}, {}, rows).save(
        results / machine.slug(here)
    )


def row_of(run: dict[str, Any]) -> AgentRow:
    """Returns the row of the training with one recurrence."""
    (provider,) = (name for name, other in PPO_IMPLEMENTATIONS.items() if other == run["implementation"])
    returns, seeds = np.array(run["final_return"], float), len(run["seeds"])
    returned, low, high = mean_and_interval(load_example()[1], returns)
    several = f"{seeds} seeds of " if seeds > 1 else ""
    return AgentRow(
        f"{run['env']}, GRU {run['config']['hidden']}, {several}{run['num_envs']} envs", provider, unit="steps/s",
        value=run["steps_per_second"], method="one training run", task=run["env"], envs=run["num_envs"], seeds=seeds,
        gpus=run["num_devices"], trained=seeds, steps=run["total_steps"], returned=returned, returned_low=low,
        returned_high=high,
    )  # fmt: skip


if __name__ == "__main__":
    print(take(map(Path, sys.argv[1:])))
