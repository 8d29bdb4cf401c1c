"""The choice between the kernels and XLA for one recurrence or norm, and how users get to know of it.

Every choice is logged to the logger "jaxrnn" at level DEBUG and added to the listener of a `jaxrnn.explain`. A warning
says once a process that the kernels cannot run on the NVIDIA GPU that is there.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from jaxrnn import _bridge, context
from jaxrnn.checks import Caller, Implementation, check_options
from torch_bridge.records import ImplementationWarning as ImplementationWarning
from torch_bridge.records import describe_choice, warn_of_unusable_gpu

logger = logging.getLogger("jaxrnn")

_Function = TypeVar("_Function", bound=Callable[..., Any])
NOT_ON_GPU = "JAX does not compute on a GPU here"
# Beginning of the name of the functions that `jaxrnn.explain` finds in a program.
MARK = "jaxrnn_choice_"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that was chosen for a call, and why.

    Attributes:
      name: what was called, such as "gru" or "rms_norm".
      arguments: shapes and dtypes of the call, for messages. For a cell without a kernel, what is not supported.
      implementation: "triton" or "xla".
      reason: why it was chosen.
      unavailable: why "triton" cannot run the call, and what it needs, as the end of the sentence "the Triton
        implementation ..."; None if it can, or if this was not checked because XLA runs the call anyway.
      may_use_xla: whether XLA may compute a launch instead: where that is faster, and on a CPU.
      index: the position in `listener.choices`, or None without a listener.
      marked: whether `mark` wraps the call, so that `jaxrnn.explain` finds it in the program; a cell under `nn.scan` is
        not wrapped.
    """

    name: str
    arguments: str
    implementation: Literal["triton", "xla"]
    reason: str
    unavailable: str | None = None
    may_use_xla: bool = False
    index: int | None = None
    marked: bool = True

    def __str__(self) -> str:
        return describe_choice(self.name, self.arguments, self.implementation, self.reason)

    def mark(self, function: _Function) -> _Function:
        """Returns `function`, which computes the call; with a listener, in a `jax.jit` whose name `explain` finds."""
        if self.index is None:
            return function

        def marked(*arguments: Any) -> Any:
            return function(*arguments)

        marked.__name__ = f"{MARK}{self.index}"
        return jax.jit(marked)  # type: ignore[return-value]


def choose(
    name: str,
    arguments: Callable[[], str],
    implementation: Any,
    *,
    prefer_xla: Callable[[], str | None],
    unsupported: Callable[[], str | None],
    empty: bool,
    caller: str,
) -> Choice:
    """Chooses the implementation of a call; if there is nothing to compute, XLA gives the results.

    Args:
      name: what was called.
      arguments: returns shapes and dtypes, for messages.
      implementation: "triton", "xla" or None, as passed by the caller.
      prefer_xla: returns why XLA is the faster implementation, or None if the kernels are.
      unsupported: returns `Choice.unavailable`.
      empty: whether there is nothing to compute, because there are no steps, sequences, rows or columns.
      caller: the function or class that the user called, for messages.

    Raises:
      NotImplementedError: "triton" was requested and cannot run; the message says why.
    """
    source = f'implementation="{implementation}" was passed'
    if implementation is None:
        implementation = context.default()
        source = f'jaxrnn.default_implementation("{implementation}") holds'
    uses_kernels, reason, unavailable = False, source, None
    if implementation is None and (faster := prefer_xla()) is not None:
        reason = faster
    elif implementation != "xla":
        unavailable = unsupported()
        if unavailable is not None and implementation == "triton":
            raise NotImplementedError(f"{caller}: the Triton implementation {unavailable}")
        if unavailable is not None:
            _warn_if_unusable()
            reason = f"the Triton implementation {unavailable}"
        elif empty:
            reason = "there is nothing to compute"
        else:
            uses_kernels = True
            reason = "it is estimated to be the faster implementation" if implementation is None else source
    listener = context.listener()
    if listener is not None and not uses_kernels and unavailable is None:
        unavailable = unsupported()
    recorded = listener is not None or logger.isEnabledFor(logging.DEBUG)
    choice = Choice(
        name, arguments() if recorded else "", "triton" if uses_kernels else "xla", reason, unavailable,
        may_use_xla=uses_kernels and implementation is None,
    )  # fmt: skip
    return record(choice) if recorded else choice


def must_scan(
    reason: str | None, precision: jax.lax.PrecisionLike, implementation: Implementation, scan: str, caller: Caller
) -> bool:
    """Returns whether there is a `reason` to run a cell under `scan`, which is "nn.scan" or "nnx.scan".

    `reason` names what the kernels do not support, such as an option of the cell, or is None. Raises
    NotImplementedError if there is one, and "triton" or a precision is requested.
    """
    check_options(implementation, precision, caller)
    if reason is None:
        return False
    requested = context.default() if implementation is None else implementation
    if requested == "triton":
        by, remedy = 'implementation="triton"', "use implementation=None"
        if implementation is None:
            by, remedy = 'jaxrnn.default_implementation("triton")', 'pass implementation="xla"'
        raise NotImplementedError(f"{caller.name}: {by} cannot run {reason}; {remedy}, which runs it with {scan}")
    if precision is not None:
        raise NotImplementedError(
            f"{caller('precision')} cannot be set for {reason}; use jax.default_matmul_precision instead"
        )
    record(
        Choice(
            "cell", arguments=reason, implementation="xla", reason=f"{scan} runs it",
            unavailable=f"cannot run {reason}", marked=False,
        )
    )  # fmt: skip
    return True


def record(choice: Choice) -> Choice:
    """Logs a choice and adds it to the listener, if there is one; returns it with its index there."""
    logger.debug("%s", choice)
    if (listener := context.listener()) is None:
        return choice
    choice = dataclasses.replace(choice, index=len(listener.choices))
    listener.choices.append(choice)
    return choice


def describe_arrays(**arrays: Any) -> str:
    """Returns names, dtypes and shapes of arrays, without those that are None."""
    present = {name: x for name, x in arrays.items() if x is not None}
    return ", ".join(f"{name} {jnp.dtype(x.dtype).name}[{','.join(map(str, x.shape))}]" for name, x in present.items())


def _warn_if_unusable() -> None:
    """Warns if there is an NVIDIA GPU and the kernels cannot run on it, whatever the input is."""
    if context.other_device() is None and _bridge.has_nvidia_gpu() and _bridge.unusable() is not None:
        _warn_once()


@functools.cache
def _warn_once() -> None:
    reason = _bridge.unusable()
    assert reason is not None
    warn_of_unusable_gpu("jaxrnn runs lax.scan and jax.numpy", reason, "jaxrnn", "jax")
