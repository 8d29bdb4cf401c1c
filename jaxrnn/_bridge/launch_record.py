"""Records describe launches for `jaxrnn.explain` and the log. `find_launches` finds those of a traced program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxrnn._bridge.launch_kind import types_of_shard
from jaxrnn._bridge.primitive import launch_p

if TYPE_CHECKING:
    from jaxrnn._bridge.launch_kind import LaunchKind

_DIRECTIONS: dict[str, Literal["forward", "backward"]] = {"fwd": "forward", "bwd": "backward"}


@dataclasses.dataclass(frozen=True)
class LaunchRecord:
    """One launch of a program: one or more kernels that run one after the other.

    Attributes:
      computes: what it computes: a cell or a norm by its name, "input projection" or "weight gradients".
      direction: the pass that it belongs to, "forward" or "backward".
      loop: for a recurrence, the family of its time loop: "streamed", "resident", "fma", "split" or "rows", or "scan"
        if `lax.scan` in XLA replaces the launch because it is estimated to be faster; None for other launches.
      kernels: the names of its kernels, as profilers show them; none if `lax.scan` replaces it.
      programs: the number of programs (thread blocks) of each kernel.
      tiling: how the first kernel divides the problem among its programs, an object of `torch_bridge`; None for
        `lax.scan`.
      problem: sizes, dtypes and options, by which tiling and family were chosen, an object of `torch_bridge`.
      times: how often one run of the program launches it, if that can be told from the program; None inside a
        `while_loop`.
    """

    computes: str
    direction: Literal["forward", "backward"]
    loop: str | None
    kernels: tuple[str, ...]
    programs: tuple[int, ...]
    tiling: Any
    problem: Any
    times: int | None = 1

    @property
    def scope(self) -> str:
        """The name of this launch among the operations of a compiled program, such as "gru_fwd_resident"."""
        if self.kernels:
            return self.kernels[0]
        return f"{self.computes}_{'fwd' if self.direction == 'forward' else 'bwd'}_scan"

    def __str__(self) -> str:
        what = (
            f"{self.computes} {self.direction}" if self.loop is not None or "norm" in self.computes else self.computes
        )
        if self.loop == "scan":
            return f"{what}: lax.scan, estimated to be faster than the kernel"
        loop = "" if self.loop is None else f"{self.loop} loop, "
        kernels = " + ".join(
            f"{name} ({programs} program{'s' if programs != 1 else ''})"
            for name, programs in zip(self.kernels, self.programs, strict=True)
        )
        times = "" if self.times == 1 else ", in a while_loop" if self.times is None else f", {self.times} times"
        return f"{what}: {loop}{kernels}{times}; {_of_fields(self.tiling)}"


def _of_fields(tiling: Any) -> str:
    fields = tiling._asdict() if hasattr(tiling, "_asdict") else dataclasses.asdict(tiling)
    return ", ".join(f"{name} {value}" for name, value in fields.items() if name != "loop")


def record_of(kind: LaunchKind, launch: Any, arrays: Sequence[Any], params: dict[str, Any]) -> LaunchRecord:
    """Describes a launch that `kind.choose` returned for these arrays; None is one that is computed by a scan."""
    computes, direction = kind.describe(params)
    if launch is None:
        return LaunchRecord(computes, _DIRECTIONS[direction], "scan", (), (), None, kind.problem(arrays, params))
    tiling = launch.config if hasattr(launch, "config") else launch.tiling
    return LaunchRecord(
        computes, _DIRECTIONS[direction], getattr(tiling, "loop", None),
        tuple(call.name for call in launch.kernels), tuple(call.grid for call in launch.kernels), tiling,
        launch.problem,
    )  # fmt: skip


def find_launches(
    jaxpr: Jaxpr, device: Any, within: str = "", prefix: str = "", times: int | None = 1
) -> Iterator[tuple[str, LaunchRecord | None]]:
    """Yields what a program launches on a device, in the order of its text.

    Every record comes with the name of the innermost function around it whose name begins with `prefix`, or with
    `within`. At the begin of each such function, its name comes with None.
    """
    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        if eqn.primitive is launch_p:
            yield from ((within, record) for record in _record(eqn, params, device, times))
            continue
        name = params.get("name")
        inner = name if isinstance(name, str) and name.startswith(prefix) else within
        if inner != within:
            yield inner, None
        runs = times
        if eqn.primitive.name == "scan" and times is not None:
            runs = times * params["length"]
        elif eqn.primitive.name == "while":
            runs = None
        for body in _bodies(params.values()):
            yield from find_launches(body, device, inner, prefix, runs)


def _record(eqn: Any, params: dict[str, Any], device: Any, times: int | None) -> list[LaunchRecord]:
    kind, avals = params["kind"], [x.aval for x in eqn.invars]
    results = kind.types([aval.shape for aval in avals], params)
    if any(0 in x.shape for x in results):
        return []  # nothing is launched
    arrays = types_of_shard(kind, avals, params)
    launch = kind.choose(arrays, params, device)
    return [dataclasses.replace(record_of(kind, launch, arrays, params), times=times)]


def _bodies(values: Any) -> Iterator[Jaxpr]:
    for value in values:
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _bodies(value)
