"""The choice between the kernels and PyTorch operations for one recurrence or norm, and how users get to know of it.

A `torch_bridge.explain` listens to the choices and launches of what it traces. Every other choice and every new launch
is logged to the logger "torch_bridge" at level DEBUG. A warning says once a process that the kernels cannot run on the
NVIDIA GPU that is there.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torch_bridge.records import (
    Implementation,
    LaunchRecord,
    describe_choice,
    record_launch,
    warn_of_unusable_gpu,
)
from torch_bridge.tiling import Device

logger = logging.getLogger("torch_bridge")

# Number of listeners of this process, in any thread.
_listeners = 0


@dataclasses.dataclass
class Call:
    """One recurrence or norm that a listener hears of; the attributes are those of `CallExplanation`."""

    name: str
    arguments: str
    implementation: Implementation
    reason: str
    unavailable: str | None
    launches: list[LaunchRecord] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Listener:
    """Collects the calls of one trace.

    Attributes:
      profile: the GPU that kernels are chosen for, wherever the tensors are; None for the device of the tensors.
      device: the GPU that the kernels of a launch were chosen for, or None.
      calls: the calls in the order in which they were made.
      current: the call that launches belong to, or None.
    """

    profile: Device | None
    device: Device | None = None
    calls: list[Call] = dataclasses.field(default_factory=list)
    current: Call | None = None

    def launched(self, name: str, direction: str, launch: Any, device: Device) -> None:
        """Adds a launch to the current call, or to one of its own if an operator was called directly."""
        if self.current is None:
            arguments = ", ".join(f"{array} {dtype}" for array, dtype in launch.problem.dtypes)
            operator = f"torch.ops.torch_bridge.{name}{'_backward' if direction == 'bwd' else ''}"
            self.calls.append(Call(operator, arguments, "triton", "the operator was called directly", None))
        call = self.calls[-1] if self.current is None else self.current
        call.launches.append(record_launch(name, direction, launch))
        self.device = device


def count_listener(by: int) -> None:
    """Adds to the number of listeners."""
    global _listeners
    _listeners += by


def listener() -> Listener | None:
    """Returns the listener of the trace that this call belongs to, if any.

    The listener is an attribute of a dispatch mode, because autograd carries these modes into its own threads.
    """
    if torch.compiler.is_compiling() or _listeners == 0:
        return None
    found = (getattr(mode, "torch_bridge_listener", None) for mode in _get_current_dispatch_mode_stack())
    return next((one for one in found if one is not None), None)


def profile() -> Device | None:
    """Returns the GPU that kernels are chosen for, wherever the tensors are; None for the device of the tensors."""
    found = listener()
    return None if found is None else found.profile


def is_recording() -> bool:
    """Returns whether a listener or the log receives choices. While a compiler traces a call, neither does."""
    return not torch.compiler.is_compiling() and (logger.isEnabledFor(logging.DEBUG) or listener() is not None)


def record(
    name: str, arguments: str, implementation: Implementation, reason: str, unavailable: str | None = None
) -> None:  # fmt: skip
    """Adds a call to the listener, to which launches belong until `end`; without a listener, logs the choice once."""
    if (active := listener()) is None:
        _log_once(describe_choice(name, arguments, implementation, reason))
        return
    active.current = Call(name, arguments, implementation, reason, unavailable)
    active.calls.append(active.current)


def end() -> None:
    """Ends the call that `record` began."""
    resume(None)


def current() -> Call | None:
    """Returns the call that launches belong to, for `resume` in its backward pass."""
    found = listener()
    return None if found is None else found.current


def resume(call: Call | None) -> None:
    """Makes the next launches belong to a call."""
    if (found := listener()) is not None:
        found.current = call


def log_launch(name: str, direction: str, launch: Any) -> None:
    """Logs a launch when it is made."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s", record_launch(name, direction, launch))


@functools.lru_cache(maxsize=4096)
def _log_once(message: str) -> None:
    logger.debug("%s", message)


def describe_tensor(name: str, x: Tensor) -> str:
    """Returns name, dtype and shape of a tensor."""
    return f"{name} {str(x.dtype).removeprefix('torch.')}[{','.join(map(str, x.shape))}]"


def explain_choice(
    requested: str | None, launches: bool, unavailable: str | None, device: torch.device, is_empty: bool
) -> tuple[Implementation, str]:
    """Returns the implementation that an operator runs, and why.

    Args:
      requested: what was passed as `implementation`.
      launches: whether the operator launches kernels.
      unavailable: why the kernels cannot run, or None.
      device: the device of the tensors.
      is_empty: whether the results are empty.
    """
    if is_empty:
        return "torch", "there is nothing to compute"
    if requested is not None:
        return "triton" if launches else "torch", f'implementation="{requested}" was passed'
    if launches:
        return "triton", "the kernels can run here"
    if device.type != "cuda" and profile() is None:
        return "torch", f"the tensors are on {device.type}, not on an NVIDIA GPU"
    return "torch", f"the Triton implementation {unavailable}"


# The reason that a warning gave.
_warned: list[str] = []


def warn_once(reason: str) -> None:
    """Warns that the kernels cannot run on the NVIDIA GPU of this process, unless a warning did."""
    if not _warned:
        _warned.append(reason)
        warn_of_unusable_gpu("torch_bridge runs PyTorch operations", reason, "torch")
