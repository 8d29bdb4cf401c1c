"""Formats results as tables for the terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks import cases, choice, machine
from benchmarks.results import LARGER_IS_BETTER, AccuracyRow, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import Report


def measured_on(report: Report) -> str:
    """Returns the machine, the versions and the commit in one line.

    If rows are of several commits, it lists the cases of every commit except the one with the most cases.
    """
    commits = sorted(report.commits().items(), key=lambda item: len(item[1]))
    if len(commits) < 2:
        return machine.line(report.machine)
    parts = [f"{commit} ({'; '.join(cases)})" for commit, cases in commits[:-1]]
    mixed = set(commits[-1][1]).intersection(*(cases for _, cases in commits[:-1]))
    rest = f"{commits[-1][0]} (all others{', and some rows of these cases' if mixed else ''})"
    return machine.line({**report.machine, "commit": f"{', '.join(parts)} and {rest}"})


def versions(report: Report) -> str:
    """Returns the machine and the versions in one line, without the commit: what a user needs to know."""
    return machine.line({name: value for name, value in report.machine.items() if name != "commit"})


def console() -> Console:
    """Returns a console of the terminal's width, or a wide one if the output is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=170)


def number(x: float) -> str:
    """Formats a number with three significant digits, or more before the decimal point, and no exponent."""
    if x == 0 or not math.isfinite(x):
        return f"{x:g}"
    return f"{x:,.{max(2 - math.floor(math.log10(abs(x))), 0)}f}"


def times(ratio: float) -> str:
    """Formats a ratio with two digits or more: `10.5`, `1.31`."""
    return f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"


def advantage(row: Row, rows: Sequence[Row]) -> float | None:
    """Returns how many times as good our provider is in the same case: below 1, `row` is better."""
    ours = next((r for r in rows if r.case == row.case and r.provider == row.ours), None)
    if ours is None or not ours.value or not row.value:
        return None
    return ours.value / row.value if row.unit in LARGER_IS_BETTER else row.value / ours.value


def _empty_table(title: str, report: Report, headings: Sequence[str], left: Sequence[str]) -> Table:
    """Returns a table without rows, whose columns in `left` are aligned to the left, and whose last one may wrap."""
    table = Table(title=title, caption=measured_on(report))
    for name in headings:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name != headings[-1])
    return table


def table(report: Report) -> Table:
    """Returns the table of all rows of a suite."""
    if report.suite == "accuracy":
        return accuracy_table(report)
    rows = [row for row in report.rows if isinstance(row, Row)]
    unit = rows[0].unit if rows else ""
    headings = ("case", "provider", unit, "quartiles", "wall", "ours is", "target", "error", "notes")
    result = _empty_table(report.suite, report, headings, left=("case", "provider", "notes"))
    before = None
    for row in rows:
        if before not in (None, row.case):
            result.add_section()
        name, before = "" if row.case == before else row.case, row.case
        if row.value is None:
            result.add_row(
                name, row.provider, "-", "", "", "", _target(row), _error(row), f"{row.status}: {row.reason}"
            )
            continue
        times = advantage(row, rows)
        result.add_row(
            name,
            row.provider,
            number(row.value),
            _quartiles(row),
            "" if row.wall is None else number(row.wall),
            "" if times is None or row.provider == row.ours else f"{number(times)}x",
            _target(row),
            _error(row),
            "; ".join(filter(None, (row.note, row.method if "eager" in row.method else ""))),
        )
    return result


def target_of(row: Row) -> float | None:
    """Returns the target of a row: that of `cases.HEADLINE` now, or for other rows the one at the measurement."""
    now = {
        (str(case), name): limit
        for case, target in cases.HEADLINE.items()
        for name, limit in zip(("jaxrnn", "jaxrnn-bf16"), target, strict=True)
    }
    return None if row.target is None else now.get((row.case, row.provider), row.target)


def met(row: Row) -> bool | None:
    """Returns whether a row reaches its target; None if it has no target or no figure."""
    target = target_of(row)
    if target is None or row.value is None:
        return None
    return row.value >= target if row.unit in LARGER_IS_BETTER else row.value <= target


def broken(row: Row | AccuracyRow) -> bool:
    """Whether a row shows a defect of this project.

    A defect is an error, an inaccurate result, or a default that misses its target.
    """
    if isinstance(row, AccuracyRow):
        return not row.good
    if row.provider == choice.DEFAULT and met(row) is False:
        return True
    ours = ("jaxrnn", "torch_bridge", "and our launch", choice.DEFAULT)
    is_ours = row.provider.startswith(ours) or row.provider == row.ours
    is_ours |= row.ours == choice.DEFAULT and row.provider in choice.IMPLEMENTATIONS
    return is_ours and row.status in ("wrong", "failed")


def _quartiles(row: Row) -> str:
    if row.low is None or row.high is None or row.low == row.high:
        return ""
    return f"{number(row.low)} .. {number(row.high)}"


def _target(row: Row) -> str:
    target = target_of(row)
    if target is None:
        return ""
    reached = met(row)
    return number(target) + ("" if reached is None else " met" if reached else " missed")


def _error(row: Row) -> str:
    return "" if row.error is None else f"{row.error:.1e} {row.error_of}"


def accuracy_table(report: Report) -> Table:
    """Returns the table of errors beside XLA's, which flags errors of more than twice XLA's."""
    headings = ("case", "precision", "array", "rms", "XLA's", "ratio", "max", "XLA's", "verdict")
    left = ("case", "precision", "array", "verdict")
    result = _empty_table("accuracy: error against float64", report, headings, left)
    before: tuple[str, str] | None = None
    for row in report.rows:
        assert isinstance(row, AccuracyRow)
        group = (row.case, row.precision)
        if before not in (None, group):
            result.add_section()
        labels, before = ("", "") if group == before else group, group
        figures = ["-" if x is None else f"{x:.1e}" for x in (row.rms, row.xla_rms, row.max, row.xla_max)]
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        verdict = row.reason or ("within 2x" if row.good else "OVER 2x")
        result.add_row(*labels, row.array, *figures[:2], ratio, *figures[2:], verdict)
    return result
