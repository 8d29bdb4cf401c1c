"""Dataclasses of choices and launches, which `jaxrnn.explain` and `torch_bridge.explain` return.

The module also defines the warning that both packages give if the kernels cannot run on a GPU. It imports neither torch
nor triton nor jax.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

# "xla" is an implementation of jaxrnn, "torch" one of torch_bridge.
Implementation = Literal["triton", "xla", "torch"]
DIRECTIONS: dict[str, Literal["forward", "backward", "tangent"]] = {
    "fwd": "forward", "bwd": "backward", "tangent": "tangent"
}  # fmt: skip


class ImplementationWarning(RuntimeWarning):
    """The kernels cannot run on the NVIDIA GPU of this process, and `implementation=None` runs without them.

    `jaxrnn` and `torch_bridge` give the same warning.

    Examples:
      The warning becomes an error, so that nothing runs without the kernels unnoticed:

      >>> import warnings
      >>> import jaxrnn
      >>> warnings.filterwarnings("error", category=jaxrnn.ImplementationWarning)
      >>> issubclass(jaxrnn.ImplementationWarning, RuntimeWarning)
      True
    """


def warn_of_unusable_gpu(instead: str, reason: str, *packages: str) -> None:
    """Warns that the kernels cannot run on an NVIDIA GPU, and names the innermost line outside of these packages.

    Args:
      instead: what runs, such as "jaxrnn runs lax.scan".
      reason: why the kernels cannot run, and a remedy; it goes on after "the Triton implementation".
      *packages: names of imported packages, beside `torch_bridge`.
    """
    folders = [f"{Path(sys.modules[name].__file__ or '').parent}{os.sep}" for name in ("torch_bridge", *packages)]
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and any(frame.f_code.co_filename.startswith(folder) for folder in folders):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"there is an NVIDIA GPU, but {instead} on it instead of its kernels: the Triton implementation {reason}",
        ImplementationWarning,
        stacklevel=level,
    )


@dataclasses.dataclass(frozen=True)
class LaunchRecord:
    """One launch: one or more kernels that run one after the other.

    Attributes:
      computes: what it computes: a cell or a norm by its name, "input projection" or "weight gradients".
      direction: the pass that it belongs to, "forward" or "backward"; in `jaxrnn` also "tangent": the tangent of the
        forward pass by a kernel or, without one, tangents of the passes, or their transposes, by XLA.
      loop: for a recurrence, the family of its time loop: "streamed", "resident", "fma", "split", "split_registers" or
        "rows", or "scan" if `lax.scan` in XLA replaces the launch because it is estimated to be faster; None for other
        launches.
      kernels: the names of its kernels, as profilers show them; none if XLA computes it.
      programs: the number of programs (thread blocks) of each kernel.
      tiling: how the first kernel divides the problem among its programs, an object of `torch_bridge`; None if
        XLA computes it.
      problem: sizes, dtypes and options, by which tiling and family were chosen, an object of `torch_bridge`; None for
        tangents that XLA computes.
      times: how often one run of the compiled function launches it; None inside a `while_loop`, where that is unknown,
        and for tangents that XLA computes.
    """

    computes: str
    direction: Literal["forward", "backward", "tangent"]
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
        (direction,) = (short for short, name in DIRECTIONS.items() if name == self.direction)
        return f"{self.computes}_{direction}_scan"

    @property
    def precision(self) -> str | None:
        """The precision of the products of a time loop; None for other launches, and if `lax.scan` replaces the kernel.

        It is "tf32", "tf32x3" or "float32" for operands in float32, else the dtype of the operands.
        """
        if self.loop in (None, "scan"):
            return None
        if self.problem.operand_dtype != "float32":
            return str(self.problem.operand_dtype)
        return "float32" if self.tiling.in_float32 else str(self.problem.precision)

    def __str__(self) -> str:
        if self.direction == "tangent" and self.loop is None:
            return f"{self.computes} tangent: XLA, because no kernel computes this derivative"
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
        products = "" if self.precision is None else f"{self.precision} products, "
        return f"{what}: {loop}{kernels}{times}; {products}{_describe_tiling(self.tiling)}"


def _describe_tiling(tiling: Any) -> str:
    fields = tiling._asdict() if hasattr(tiling, "_asdict") else dataclasses.asdict(tiling)
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def record_launch(computes: str, direction: str, launch: Any) -> LaunchRecord:
    """Describes a launch of `torch_bridge`, given what it computes and "fwd" or "bwd"."""
    tiling = launch.config if hasattr(launch, "config") else launch.tiling
    return LaunchRecord(
        computes, DIRECTIONS[direction], getattr(tiling, "loop", None), tuple(call.name for call in launch.kernels),
        tuple(call.grid for call in launch.kernels), tiling, launch.problem,
    )  # fmt: skip


def record_tangent(computes: str) -> LaunchRecord:
    """Describes tangents that XLA computes, given the cell or the norm that they are tangents of."""
    return LaunchRecord(computes, "tangent", None, (), (), None, None, times=None)


def describe_choice(name: str, arguments: str, implementation: str, reason: str) -> str:
    """Returns the sentence that explanations and logs say about a call."""
    return f"{name}({arguments}) runs {implementation}: {reason}"


def merge_launches(records: Iterable[LaunchRecord]) -> tuple[LaunchRecord, ...]:
    """Returns the records in their order, each once, with the sum of the times of equal ones."""
    times: dict[LaunchRecord, int | None] = {}
    for record in records:
        one = dataclasses.replace(record, times=1)
        before = times.get(one, 0)
        times[one] = None if before is None or record.times is None else before + record.times
    return tuple(dataclasses.replace(record, times=count) for record, count in times.items())


@dataclasses.dataclass(frozen=True)
class CallExplanation:
    """What one recurrence or norm of a program runs.

    Attributes:
      name: what is called: a cell or a norm by its name, such as "gru" or "rms_norm", or "cell" for a cell of Flax that
        has no kernel.
      arguments: shapes and dtypes. For a cell of Flax that has no kernel, what the kernels do not support.
      implementation: "triton", or "xla" in `jaxrnn` and "torch" in `torch_bridge`. With "triton", `lax.scan` may still
        replace a launch, whose `loop` is then "scan".
      reason: why it is chosen.
      unavailable: why "triton" cannot run the call here, and what it needs; None if it can.
      launches: what the call launches, forward and backward, and the tangents that XLA computes; empty if it runs no
        kernels.
    """

    name: str
    arguments: str
    implementation: Implementation
    reason: str
    unavailable: str | None
    launches: tuple[LaunchRecord, ...]

    def __str__(self) -> str:
        scans = [launch.loop == "scan" for launch in self.launches if launch.loop is not None]
        what = "lax.scan in place of every kernel" if scans and all(scans) else self.implementation
        lines = [describe_choice(self.name, self.arguments, what, self.reason)]
        if self.unavailable is not None and self.unavailable not in self.reason:
            lines.append(f'"triton" {self.unavailable}')
        lines += map(str, self.launches)
        return "\n  ".join(lines)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What the recurrences and norms of a program run, in the order of the program; `str` makes it readable.

    Attributes:
      device: the GPU that the kernels are chosen for, or None if no call runs them.
      calls: the recurrences and norms.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> explanation = jaxrnn.explain(jaxrnn.rms_norm, jnp.ones((2, 8)), implementation="xla")
      >>> [(call.name, call.arguments, call.implementation) for call in explanation.calls]
      [('rms_norm', 'x float32[2,8]', 'xla')]
    """

    device: str | None
    calls: tuple[CallExplanation, ...]

    @property
    def implementation(self) -> Implementation:
        """The implementation of the only call."""
        return self._only().implementation

    @property
    def reason(self) -> str:
        """Why the implementation of the only call is chosen."""
        return self._only().reason

    @property
    def unavailable(self) -> str | None:
        """Why "triton" cannot run the only call, and what it needs; None if it can."""
        return self._only().unavailable

    @property
    def launches(self) -> tuple[LaunchRecord, ...]:
        """The launches of all calls."""
        return tuple(launch for call in self.calls for launch in call.launches)

    def _only(self) -> CallExplanation:
        if len(self.calls) != 1:
            raise ValueError(f"the function has {len(self.calls)} recurrences and norms, not one: use `calls`")
        return self.calls[0]

    def __str__(self) -> str:
        calls = [str(call) for call in self.calls] or ["there is no recurrence or norm that has kernels"]
        return "\n".join(calls if self.device is None else [f"on {self.device}:", *calls])
