"""Defines the rows of a suite, and the JSON files that store them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, Literal, Self

RESULTS = Path(__file__).parent / "results"  # a folder for each machine

Status = Literal["measured", "unavailable", "unsupported", "unfinished", "skipped", "wrong", "failed"]
Unit = Literal["ms", "us", "s", "GB", "steps/s", "of copy"]
LARGER_IS_BETTER: tuple[Unit, ...] = ("steps/s", "of copy")


def first_line(error: BaseException) -> str:
    """Returns the type of an exception and the first line of its message, for a cell of a table."""
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:200].rstrip(": ")


@dataclasses.dataclass(frozen=True)
class Row:
    """The result of one provider in one case.

    Attributes:
      case: the label of the case.
      provider: the name of the provider.
      status: "measured", or why there is no figure: "unavailable" (not installed, or too few GPUs), "unsupported",
        "unfinished" (its first call took too long), "skipped" (its first call took too long in another case), "wrong"
        (failed the check), "failed" (raised an error).
      reason: the reason of that status in words.
      ours: the provider of this project that it is compared with.
      unit: the unit of `value`, `low`, `high` and `target`.
      value, low, high: median and quartiles; a single measurement is all three.
      calls: the number of calls that were measured.
      wall: median time until the host has the result of one call, in `unit`.
      method: how it was measured.
      error: the largest relative error against float64 among all outputs and gradients.
      error_of: the output or gradient with that error.
      target: the target of this project, if there is one.
      note: anything that a reader should know.
      us: median microseconds of a call, if `value` is a share of a copy's bandwidth.
    """

    case: str
    provider: str
    status: Status = "measured"
    reason: str = ""
    ours: str = "jaxrnn"
    unit: Unit = "ms"
    value: float | None = None
    low: float | None = None
    high: float | None = None
    calls: int = 0
    wall: float | None = None
    method: str = ""
    error: float | None = None
    error_of: str = ""
    target: float | None = None
    note: str = ""
    us: float | None = None

    def measured_once(self, value: float, method: str) -> Self:
        """Returns this row with the figure of a single measurement."""
        return dataclasses.replace(self, value=value, low=value, high=value, calls=1, method=method)

    def failed(self, error: Exception) -> Self:
        """Returns this row marked as failed by `error`."""
        return dataclasses.replace(self, status="failed", reason=first_line(error))


@dataclasses.dataclass(frozen=True)
class AgentRow(Row):
    """The result of agents that are trained with one recurrence (`provider`): steps per second, and what they learned.

    Attributes:
      task: the name of the environment.
      envs: the environments of an agent.
      seeds: the agents that train at once while `value`, the env steps per second of all of them, is measured.
      gpus: the GPUs that share the environments.
      share: `value` divided by that of "no recurrence" in the same case.
      trained: the number of agents, one for each seed, that were trained for the returns below.
      steps: the env steps that each of them was trained for.
      returned: the mean over these agents of their final return, which is that of the last tenth of training.
      returned_low, returned_high: the bootstrapped 95 % interval of that mean.
      curve: their mean return after each update, where all of them trained at once: lists of the `steps` of an agent,
        of wall-clock `seconds`, and of the `mean` with the ends `low` and `high` of its 95 % interval. These three are
        None where no episode ended.
    """

    task: str = ""
    envs: int = 0
    seeds: int = 1
    gpus: int = 1
    share: float | None = None
    trained: int = 0
    steps: int = 0
    returned: float | None = None
    returned_low: float | None = None
    returned_high: float | None = None
    curve: dict[str, list[float | None]] | None = None


@dataclasses.dataclass(frozen=True)
class AccuracyRow:
    """The errors of one output or gradient against float64, of the kernels and of XLA at the same precision.

    Attributes:
      case: the label of the case.
      precision: "default" (TF32), "high" (three TF32 products instead of one), or "bf16".
      array: `ys`, `dxs`, ...
      rms, xla_rms: `||got - want|| / ||want||`.
      max, xla_max: `max|got - want| / max|want|`.
      allowance: how far `rms` may exceed twice `xla_rms`: the last bits of float32, and the random variation of an
        error over few elements.
      reason: why there are no figures, if there are none.
    """

    case: str
    precision: str
    array: str
    rms: float | None = None
    xla_rms: float | None = None
    max: float | None = None
    xla_max: float | None = None
    allowance: float = 0.0
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """Our error divided by XLA's."""
        return None if self.rms is None or not self.xla_rms else self.rms / self.xla_rms

    @property
    def good(self) -> bool:
        """Whether the error is at most twice XLA's plus the allowance; false for NaN."""
        if self.rms is None or self.xla_rms is None:
            return False
        return self.rms <= 2 * self.xla_rms + self.allowance


def _without_empty(row: Row | AccuracyRow) -> dict[str, Any]:
    """Returns the fields of a row, without those that are empty by default."""
    values = ((field, getattr(row, field.name)) for field in dataclasses.fields(row))
    return {field.name: value for field, value in values if value or value != field.default}


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of a suite.

    Attributes:
      suite: the name of the suite.
      machine: the result of `machine.describe`.
      settings: the options of the run.
      rows: the rows so far.
    """

    suite: str
    machine: dict[str, str]
    settings: dict[str, Any]
    rows: list[Row | AccuracyRow]

    def save(self, folder: Path) -> Path:
        """Writes `folder/SUITE.json`, a line for each row, and returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.suite}.json"
        head = {"suite": self.suite, "machine": self.machine, "settings": self.settings}
        lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        lines.append('"rows": [\n' + ",\n".join(json.dumps(_without_empty(row)) for row in self.rows) + "\n]")
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return path

    def figures(self) -> dict[tuple[str, str], float]:
        """Returns the figures by case and provider."""
        return {
            (row.case, row.provider): row.value for row in self.rows if isinstance(row, Row) and row.value is not None
        }

    def commits(self) -> dict[str, list[str]]:
        """Returns the cases of each commit, counting only rows with a figure.

        The commit of a row is that of the report, unless its note ends with another one ("at 2a7dca1").
        """
        cases: dict[str, list[str]] = {}
        for row in self.rows:
            if isinstance(row, Row) and row.value is None:
                continue
            noted = re.search(r"(?:^|; )at ([0-9a-f]{7,})$", row.note) if isinstance(row, Row) else None
            found = cases.setdefault(noted[1] if noted else self.machine["commit"], [])
            if row.case not in found:
                found.append(row.case)
        return cases

    def others(self, folder: Path) -> list[Row | AccuracyRow]:
        """Returns the rows of this suite in `folder`, if they are of the same machine and commit."""
        path = folder / f"{self.suite}.json"
        before = self.load(path) if path.exists() else None
        return before.rows if before is not None and before.machine == self.machine else []

    @classmethod
    def load(cls, path: Path) -> Report:
        """Reads a file that `save` wrote.

        Raises:
          SystemExit: the file is damaged.
        """
        try:
            report = json.loads(path.read_text())
            kind = {"accuracy": AccuracyRow, "ppo": AgentRow, "examples": AgentRow}.get(report["suite"], Row)
            return cls(**report | {"rows": [kind(**row) for row in report["rows"]]})
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise SystemExit(
                f"{path} does not hold a suite's results ({reason}): measure again, or remove it"
            ) from None
