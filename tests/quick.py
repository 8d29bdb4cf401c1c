"""Chooses the tests that `make test` runs, by the marker `quick`. The others run in `make test-all` only."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest


def chosen(items: Iterable[pytest.Item]) -> dict[tuple[str, tuple[str, ...]], pytest.Item]:
    """Returns the chosen tests, by the name of the function and the values of the parameters that its marker names.

    `quick()` chooses the first case of a function. `quick("cell", "case.loop")` chooses the first case for each pair of
    a value of the parameter `cell` and a value of the attribute `loop` of the parameter `case`.
    """
    found: dict[tuple[str, tuple[str, ...]], pytest.Item] = {}
    for item in items:
        if (mark := item.get_closest_marker("quick")) is not None:
            parameters = SimpleNamespace(**item.callspec.params) if mark.args else None
            values = tuple(str(operator.attrgetter(name)(parameters)) for name in mark.args)
            found.setdefault((item.nodeid.partition("[")[0], values), item)
    return found


def part(items: list[pytest.Item], name: str | None) -> list[pytest.Item]:
    """Returns the tests of the part "quick" or "rest", or all without a name."""
    quick = set(chosen(items).values())
    return items if name is None else [item for item in items if (item in quick) == (name == "quick")]
