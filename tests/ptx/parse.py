"""Reads a kernel from PTX."""

from __future__ import annotations

import dataclasses
import re

from ptx.registers import SIZES

# The shared address of a program's first byte. A null address is out of bounds.
SHARED_BASE = 1024
# Bytes to which variables in shared memory are aligned.
ALIGNMENT = 1024


class PTXError(Exception):
    """Raised for an invalid access, a race, a deadlock, or an instruction that is not supported."""


class Scope:
    """The registers and labels of a pair of braces; names that it lacks are those of the enclosing scope."""

    def __init__(self, parent: Scope | None) -> None:
        self.parent = parent
        self.registers: dict[str, int] = {}
        self.labels: dict[str, int] = {}

    def register(self, name: str) -> int:
        """Returns the number of a register."""
        return self._find("registers", name)

    def label(self, name: str) -> int:
        """Returns the index of the instruction after a label."""
        return self._find("labels", name)

    def _find(self, kind: str, name: str) -> int:
        scope: Scope | None = self
        while scope is not None:
            found = getattr(scope, kind).get(name)
            if found is not None:
                return found
            scope = scope.parent
        raise PTXError(f"{name} is not one of the {kind}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      predicate: the register that decides which threads run it, or None for all of them.
      negated: whether the threads run it whose predicate is false.
      parts: the opcode and its modifiers.
      operands: their text.
      line: the number of its line, counted from 1.
      scope: where its names are declared.
    """

    predicate: str | None
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[str, ...]
    line: int
    scope: Scope

    @property
    def name(self) -> str:
        """The opcode with its modifiers."""
        return ".".join(self.parts)


class ParsedKernel:
    """The instructions of a kernel.

    Attributes:
      name: of the kernel.
      lines: of the PTX.
      parameters: `(name, type)` in order.
      threads: per program.
      widths: the size of each register in bytes; 1 is a predicate.
      instructions: in order.
      symbols: the shared addresses of names.
      static: bytes of shared memory that the kernel declares; they precede those that a launch gives it.
    """

    def __init__(self, ptx: str, name: str | None = None) -> None:
        self.lines = ptx.splitlines()
        entries = {m.group(1): m.start() for m in re.finditer(r"\.entry\s+([\w$]+)", ptx)}
        if not entries or name not in (None, *entries):
            raise PTXError(f"no kernel {name or ''} in the PTX; there are {list(entries)}")
        self.name = name or next(iter(entries))
        start = entries[self.name]
        body = ptx.index("{", start)
        head = ptx[start:body]
        parameters = re.findall(r"\.param\s+\.(\w+)[^,)\n]*?(\w+)\s*[,)\n]", head)
        self.parameters = [(parameter, kind) for kind, parameter in parameters]
        threads = re.search(r"\.reqntid\s+(\d+)", head)
        if threads is None:
            raise PTXError(f"the kernel {self.name} does not fix its number of threads with .reqntid")
        self.threads = int(threads.group(1))
        self.symbols: dict[str, int] = {}
        self.static = 0
        self.widths: list[int] = []
        self.instructions: list[Instruction] = []
        self._read(ptx[body:], first_line=ptx.count("\n", 0, body) + 1)
        given = re.findall(r"\.extern\s+\.shared[^;]*?(\w+)\[\]", ptx)
        self.symbols |= dict.fromkeys(given, SHARED_BASE + self.static)

    def _read(self, body: str, first_line: int) -> None:
        """Reads statements up to the brace that closes the kernel."""
        body = re.sub(r"//[^\n]*|/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), body, flags=re.S)
        body = re.sub(r"(?m)^[ \t]*\.(loc|file|pragma)\b[^\n]*$", "", body)
        scope: Scope | None = None
        at = 0
        for m in re.finditer(r"\s*(?:(?P<brace>[{}])|(?P<label>[\w$]+):(?!:)|(?P<statement>[^;]*?);)", body):
            if m.start() != at:
                break
            at = m.end()
            if m["brace"] == "{":
                scope = Scope(scope)
            elif m["brace"] == "}":
                assert scope is not None
                scope = scope.parent
                if scope is None:
                    return
            elif m["label"]:
                assert scope is not None
                scope.labels[m["label"]] = len(self.instructions)
            elif m["statement"]:
                assert scope is not None
                line = first_line + body.count("\n", 0, m.start("statement"))
                self._add_statement(m["statement"], scope, line)
        raise PTXError(f"the kernel {self.name} cannot be read after line {first_line + body.count(chr(10), 0, at)}")

    def _add_statement(self, text: str, scope: Scope, line: int) -> None:
        declared = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.S)
        if declared:
            for name in split_operands(declared[2]):
                several = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
                for each in [f"{several[1]}{k}" for k in range(int(several[2]))] if several else [name]:
                    scope.registers[each] = len(self.widths)
                    self.widths.append(SIZES[declared[1]])
            return
        variable = re.fullmatch(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[(\d+)\]", text)
        if variable:
            if variable[1] in self.symbols:
                raise PTXError(f"line {line}: {variable[1]} is declared twice")
            self.symbols[variable[1]] = SHARED_BASE + self.static
            self.static += -(-int(variable[2]) // ALIGNMENT) * ALIGNMENT
            return
        m = re.fullmatch(r"(?:@(!?)([\w$%]+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.S)
        if m is None:
            raise PTXError(f"line {line}: not an instruction: {text}")
        parts = tuple(m[3].replace(".shared::cta", ".shared").split("."))  # synonyms
        operands = tuple(split_operands(m[4]))
        self.instructions.append(Instruction(m[2], m[1] == "!", parts, operands, line, scope))


def split_operands(text: str) -> list[str]:
    """Splits operands at the commas outside of braces and brackets."""
    found = re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)
    return [one.strip() for one in found if one.strip()]
