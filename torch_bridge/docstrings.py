"""Docstrings of classes and methods that share arguments, each of which is described once; for both packages."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, TypeVar

Described = TypeVar("Described", bound=Callable[..., Any])

TITLES = ("Args", "Attributes", "Returns", "Raises", "Examples")


def inherit_descriptions(source: Callable[..., Any]) -> Callable[[Described], Described]:
    """Completes a docstring by the sections of that of `source`, and by its entries for arguments and errors.

    What a docstring describes itself stays. Arguments are in the order of the signature.
    """

    def complete(described: Described) -> Described:
        if described.__doc__ and source.__doc__:  # there are none under `python -OO`
            summary, own = _sections(described)
            _, inherited = _sections(source)
            sections = inherited | own
            for title in sections.keys() & {"Args", "Attributes", "Raises"}:
                entries = _entries(inherited.get(title, "")) | _entries(own.get(title, ""))
                names = entries if title == "Raises" else _arguments(described)
                sections[title] = "\n".join(entries[name] for name in names if name in entries)
            texts = [summary, *(f"{title}:\n{sections[title]}" for title in TITLES if title in sections)]
            described.__doc__ = "\n\n".join(texts) + "\n"
        return described

    return complete


def _sections(described: Any) -> tuple[str, dict[str, str]]:
    """Returns what precedes the sections of a docstring, and their texts by title."""
    summary, *parts = re.split(rf"^({'|'.join(TITLES)}):\n", inspect.cleandoc(described.__doc__), flags=re.MULTILINE)
    return summary.rstrip(), {title: text.rstrip() for title, text in zip(parts[::2], parts[1::2], strict=True)}


def _entries(section: str) -> dict[str, str]:
    """Returns the entries of a section by name."""
    entries = re.split(r"\n(?=  \S)", section) if section else []
    return {entry.partition(":")[0].strip(): entry for entry in entries}


def _arguments(described: Any) -> list[str]:
    """Returns the names of the arguments of a function or a constructor, with those in the type of `**options`."""
    is_class = isinstance(described, type)
    function = described.__init__ if is_class else described
    names = [*inspect.signature(function).parameters]
    if "options" in names:
        (options,) = typing.get_args(typing.get_type_hints(function)["options"])
        names += options.__annotations__
    return names
