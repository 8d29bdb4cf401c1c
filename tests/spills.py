"""Bounds of what kernels spill: the compile tests check `spills.json`, and `--write-spills` writes it.

The file has bytes of local memory per thread, by version of Triton, kind of kernel and compute capability. They are an
upper bound for all kernels of the kind. A kind that the file does not name spills nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from torch_bridge.tiling import KernelConfig, Problem

PATH = Path(__file__).with_suffix(".json")

Table = dict[str, dict[str, int]]

# The spills of the kernels of the running test: kind, capability, bytes.
_measured: list[tuple[str, int, int]] = []


def kind_of(problem: Problem, config: KernelConfig) -> str:
    """Returns the kind of a time loop, such as "lstm fwd resident 128x8 tf32 with reset states"."""
    from torch_bridge.tiling.problem import product_kind

    cell = "normed gru" if problem.norm_width else problem.tilings
    resets = "" if problem.reset_state == "zeros" else " with reset states"
    block = f"{config.block_h}x{config.block_b}"
    return f"{cell} {problem.direction} {config.loop} {block} {product_kind(problem)}{resets}"


def exceed(kind: str, capability: int, found: int) -> bool:
    """Returns whether a kernel spills more bytes than the file has for its kind."""
    from torch_bridge.tiling.support import triton_version

    _measured.append((kind, capability, found))
    return found > of_version(json.loads(PATH.read_text()), triton_version()).get(kind, {}).get(str(capability), 0)


def of_version(table: dict[str, Table], version: tuple[int, ...]) -> Table:
    """Returns the entries of a version of Triton; if it has none, of the next version, or of the last one."""
    versions = {tuple(map(int, name.split("."))): entries for name, entries in table.items()}
    return versions[min((known for known in versions if known >= version), default=max(versions))]


def updated(entries: Table, measured: Iterable[tuple[str, int, int]]) -> Table:
    """Returns entries in which every kind and capability that was measured has the most bytes that it spilled."""
    most: dict[tuple[str, str], int] = {}
    for kind, capability, found in measured:
        key = kind, str(capability)
        most[key] = max(most.get(key, 0), found)
    merged = {(kind, target): found for kind, by_target in entries.items() for target, found in by_target.items()}
    result: Table = {}
    for (kind, target), found in sorted((merged | most).items(), key=lambda entry: (entry[0][0], int(entry[0][1]))):
        if found:
            result.setdefault(kind, {})[target] = found
    return result


def text_of(table: dict[str, Table]) -> str:
    """Returns the text of the file: a line for each kind."""
    versions = []
    for version, entries in table.items():
        lines = ",\n".join(f"    {json.dumps(kind)}: {json.dumps(entries[kind])}" for kind in sorted(entries))
        versions.append(f"  {json.dumps(version)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(versions) + "\n}\n"


class WriteSpills:
    """A plugin of pytest that writes what was measured. With `-n`, the processes that run tests report theirs."""

    def __init__(self) -> None:
        self._all: list[tuple[str, int, int]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        _measured.clear()
        try:
            return (yield)
        finally:
            item.user_properties.append(("spills", list(_measured)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._all += dict(report.user_properties)["spills"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Writes the file; runs only in the process that has the terminal."""
        from torch_bridge.tiling.support import triton_version

        table, version = json.loads(PATH.read_text()), triton_version()
        name = ".".join(map(str, version))
        table[name] = updated(of_version(table, version), self._all)
        ordered = sorted(table.items(), key=lambda entry: tuple(map(int, entry[0].split("."))))
        PATH.write_text(text_of(dict(ordered)))
        terminalreporter.write_line(f"what {len(self._all)} kernels spill with Triton {name} is in {PATH}")
