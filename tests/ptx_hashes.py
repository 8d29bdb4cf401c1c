"""Hashes of the PTX of all kernels that tests compile, for `pytest -m compile_only --ptx-hashes FILE`.

A change of the sources changes no kernel if the files from before and after it are equal. Every line is
`hash  test/number-kernel  target`; the number counts, from 0, what the test compiles.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING
from unittest import mock

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path


def without_lines(ptx: str) -> str:
    """Returns PTX without comments, and without the files and lines of the source and the labels that these need."""
    code = re.sub(r"//.*", "", ptx)
    code = re.sub(r"\.section\s+\.debug_\w+\s*\{[^}]*\}", "", code)
    code = re.sub(r"(?m)^\s*(\.(file|loc)\s.*|\$L__tmp\d+:)$", "", code)
    return "\n".join(line.strip() for line in code.splitlines() if line.strip())


def hash_of(ptx: str) -> str:
    """Returns a hash of PTX that is the same for all sources that compile to the same instructions."""
    return hashlib.sha256(without_lines(ptx).encode()).hexdigest()[:16]


class PTXHashes:
    """A plugin of pytest that writes the hashes to a file. With `-n`, the processes that run tests report theirs.

    It hashes what `KernelCall.compile` returns to a test. `Launch.load` and `Launch.binaries` compile a kernel once, so
    which test compiles it depends on those that ran before.
    """

    def __init__(self, path: Path):
        self._path = path
        self._lines: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        from torch_bridge.launch import KernelCall

        lines: list[str] = []
        item.user_properties.append(("ptx", lines))
        compile = KernelCall.compile

        def compile_and_hash(kernel: KernelCall, capability: int) -> object:
            compiled = compile(kernel, capability)
            name = f"{item.nodeid}/{len(lines)}-{kernel.name}"
            lines.append(f"{hash_of(compiled.asm['ptx'])}  {name}  sm_{capability}")
            return compiled

        with mock.patch.object(KernelCall, "compile", compile_and_hash):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._lines[report.nodeid] = dict(report.user_properties)["ptx"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Writes the file; runs only in the process that has the terminal."""
        lines = [line for _, each in sorted(self._lines.items()) for line in each]
        self._path.write_text("".join(f"{line}\n" for line in lines))
        terminalreporter.write_line(f"{len(lines)} hashes of PTX are in {self._path}")
