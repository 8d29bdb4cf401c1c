"""The choice of how launches on a GPU reach it: by a host callback, or by the native handler."""

from __future__ import annotations

import os
from typing import NamedTuple

from jaxrnn._bridge import callback
from jaxrnn._bridge.native import NativeMethod, register

VARIABLE = "JAXRNN_LAUNCH"
Method = callback.CallbackMethod | NativeMethod
_NATIVE = NativeMethod()


class LaunchMethod(NamedTuple):
    """The method by which programs launch kernels on a GPU, with the reason for it.

    Attributes:
      name: "callback" or "native".
      reason: why this one is used.
    """

    name: str
    reason: str


def launch_method() -> LaunchMethod:
    """Returns how programs that are compiled from now on launch their kernels on a GPU, and why.

    "callback": XLA calls Python, which passes XLA's buffers to Triton's launcher. This is the default. "native": XLA
    calls a handler in C, and the binaries of the kernels are part of the program, which `jax.export` can then export.
    Set the environment variable JAXRNN_LAUNCH to one of the names before the first program is compiled. For "native",
    this function builds the handler if that is still to be done. Triton's interpreter always uses the callback.

    Raises:
      ValueError: JAXRNN_LAUNCH is neither name.
      RuntimeError: JAXRNN_LAUNCH is "native" and its handler cannot be built.
    """
    method = chosen()
    if method.name == "native":
        register()
    return method


def chosen() -> LaunchMethod:
    """Returns what `launch_method` returns, without building the handler."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "callback", "native"):
        raise ValueError(f'{VARIABLE} must be "callback" or "native", got {value!r}: correct it, or unset it')
    if value:
        return LaunchMethod(value, f"the environment variable {VARIABLE} names it")
    return LaunchMethod("callback", f"it is the default, and the environment variable {VARIABLE} is not set")


def cuda_method() -> Method:
    """Returns the method of launches that are compiled for a GPU."""
    return _NATIVE if chosen().name == "native" else callback.CUDA


def interpreted_method() -> Method:
    """Returns the method of launches that are compiled for the CPU."""
    return callback.INTERPRETED
