"""Has what every example does around its work: options, a folder for results, Ctrl-C, tables and JSON. Needs no JAX."""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")


def whole_number(text: str) -> int:
    """Returns the int that `text` is in any notation, such as 1000000, 1_000_000 or 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number, such as 500000, 500_000 or 5e5, got {text!r}")
    return int(value)


def parse(
    arguments: Sequence[str] | None,
    description: str | None,
    config: Any,
    helps: Mapping[str, str],
    *,
    more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    check: Callable[[argparse.Namespace], None] = lambda options: None,
) -> argparse.Namespace:
    """Parses a command line that has options for fields of a dataclass, and `--out`, a folder for the results.

    Args:
      arguments: the command line; None for that of the process.
      description: what `--help` prints first.
      config: an instance of the dataclass, whose values are the defaults.
      helps: what options do, by the names of the fields that have one.
      more: adds further options.
      check: raises ValueError, NotImplementedError or OSError where the options, with `config` in them, cannot run. It
        may set `out` to None in a process that writes nothing.

    Returns:
      The options, with the dataclass as `config`. The folder exists, and takes files.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = typing.get_type_hints(type(config))
    for name, text in helps.items():
        options = {"default": getattr(config, name), "help": f"{text} (default: %(default)s)"}
        parser.add_argument(f"--{name.replace('_', '-')}", **options, **option_of(hints[name]))
    parser.add_argument("--out", type=Path, default=Path("outputs"), help="folder for results (default: %(default)s)")
    more(parser)
    namespace = parser.parse_args(arguments)
    try:
        values = {name: getattr(namespace, name) for name in helps}
        check_numbers(values)
        namespace.config = dataclasses.replace(config, **values)
        check(namespace)
        if namespace.out is not None:
            namespace.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=namespace.out):  # raises if the folder takes no files
                pass
    except (NotImplementedError, OSError, ValueError) as error:
        parser.error(str(error))
    return namespace


def option_of(hint: Any) -> dict[str, Any]:
    """Returns what `add_argument` needs to know of a field's type."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:  # X | None
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) is tuple:
        return {"nargs": "+", **option_of(typing.get_args(hint)[0])}
    return {"action": argparse.BooleanOptionalAction} if hint is bool else {"type": {int: whole_number}.get(hint, hint)}


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a count below 1 and a number that is not finite, or a learning rate that is not above 0."""
    for name, value in values.items():
        counts = value if isinstance(value, (list, tuple)) else [value]
        if name != "seed" and any(isinstance(x, int) and not isinstance(x, bool) and x < 1 for x in counts):
            raise ValueError(f"{name} must be at least 1, got {value}")
        if name == "lr" and not 0 < value < math.inf:
            raise ValueError(f"lr must be above 0 and finite, got {value}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")


def run_all(
    tasks: Sequence[Callable[[], T]], write: Callable[[list[T]], None], show: Callable[[list[T]], None]
) -> list[T]:
    """Runs tasks in turn, writes the results so far after each one, and shows them at the end.

    Ctrl-C ends the program, after it has shown what there is. A task that catches it returns a result whose `finished`
    is false.
    """
    results: list[T] = []
    with contextlib.suppress(KeyboardInterrupt):
        for task in tasks:
            results.append(task())
            write(results)
            if not finished(results[-1]):
                break
    if results:
        show(results)
    if len(results) < len(tasks) or not finished(results[-1]):
        sys.exit("interrupted")
    return results


def finished(result: Any) -> bool:
    return getattr(result, "finished", True)


def announce(name: str) -> None:
    """Says on the terminal that a program is compiled; the progress bar replaces the line."""
    print(f"{name}: compiling ...", end="\r", file=sys.stderr, flush=True)


def table(title: str, caption: str, headers: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """Returns a table whose first `left` columns hold text, and the others numbers.

    Where it does not fit, columns of numbers are narrowed only if their headings can be broken, so that no word is cut.
    """
    result = Table(title=title, caption=caption)
    for i, header in enumerate(headers):
        number = i >= left
        result.add_column(header, justify="right" if number else "left", no_wrap=number and " " not in header)
    for row in rows:
        result.add_row(*row)
    return result


def show(*parts: Table | str) -> None:
    console = Console()
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def write_json(path: Path, **report: Any) -> None:
    path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
