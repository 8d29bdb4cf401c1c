"""Describes launches for `jaxrnn.explain` and the log. `find_launches` finds those of a traced program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from jaxrnn._bridge.derivatives import TANGENT, launches_when_lowered, tangent_p
from jaxrnn._bridge.primitive import launch_p
from jaxrnn._bridge.tracing import bodies, types_of_arrays
from torch_bridge.records import DIRECTIONS, LaunchRecord, record_launch, record_tangent

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr

    from jaxrnn._bridge.launch_kind import LaunchKind


def record_of(kind: LaunchKind, launch: Any, arrays: Mapping[str, Any]) -> LaunchRecord | None:
    """Describes what `kind.choose` returned for these arrays: a launch or, if it is None, the scan that replaces it.

    Returns None if a product of XLA replaces the launch.
    """
    computes, direction = kind.describe()
    if launch is not None:
        return record_launch(computes, direction, launch)
    problem = kind.problem(arrays)
    return None if problem is None else LaunchRecord(computes, DIRECTIONS[direction], "scan", (), (), None, problem)


def find_launches(
    jaxpr: Jaxpr, device: Any, within: str = "", prefix: str = "", times: int | None = 1
) -> Iterator[tuple[str, LaunchRecord | None]]:
    """Yields what a program launches on a device, and the tangents that XLA computes, in the order of its text.

    Every record comes with the name of the innermost function around it whose name begins with `prefix`, or with
    `within`. At the begin of each such function, its name comes with None.
    """
    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        if eqn.primitive is tangent_p and not params["linear"].by_kernels:
            yield within, record_tangent(params["linear"].function.name)
            continue
        if eqn.primitive is launch_p:
            yield from ((within, record) for record in _record(eqn, device, times))
            continue
        name = params.get("name")
        if isinstance(name, str) and name.startswith(TANGENT):
            yield within, record_tangent(name.removeprefix(TANGENT))
            continue
        inner = name if isinstance(name, str) and name.startswith(prefix) else within
        if inner != within:
            yield inner, None
        runs = times
        if eqn.primitive.name == "scan" and times is not None:
            runs = times * params["length"]
        elif eqn.primitive.name == "while":
            runs = None
        for body in (*bodies(params.values()), *launches_when_lowered(eqn)):
            yield from find_launches(body, device, inner, prefix, runs)


def _record(eqn: Any, device: Any, times: int | None) -> list[LaunchRecord]:
    kind = eqn.params["kind"]
    if any(0 in x.aval.shape for x in eqn.outvars):
        return []  # nothing is launched
    arrays = types_of_arrays(eqn)
    record = record_of(kind, kind.choose(arrays, device), arrays)
    return [] if record is None else [dataclasses.replace(record, times=times)]
