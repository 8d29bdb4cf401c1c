"""The choice of how launches on a GPU reach it: by the native handler, or by a host callback."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import NamedTuple

from jaxrnn._bridge import callback
from jaxrnn._bridge.native import NativeLaunchError, NativeMethod, register
from torch_bridge.locks import Lock

VARIABLE = "JAXRNN_LAUNCH"
Method = callback.CallbackMethod | NativeMethod
_NATIVE = NativeMethod()
_choosing = Lock()


class LaunchMethod(NamedTuple):
    """The method by which programs launch kernels on a GPU, with the reason for it.

    Attributes:
      name: "native" or "callback".
      reason: why this one is used.

    Examples:
      >>> import jaxrnn
      >>> name, reason = jaxrnn.launch_method()
      >>> name in ("native", "callback")
      True
    """

    name: str
    reason: str


def launch_method() -> LaunchMethod:
    """Returns how programs that are compiled from now on launch their kernels on a GPU, and why.

    "native": XLA calls a handler in C, and the binaries of the kernels are part of the program, which `jax.export` can
    then export. This is the default where the handler can be built, which this function does if it is still to be
    done. "callback": XLA calls Python, which passes XLA's buffers to Triton's launcher; PyTorch has to be installed.
    This is the default elsewhere, and Triton's interpreter always uses it. Set the environment variable JAXRNN_LAUNCH
    to one of the names before the first program is compiled to use that one.

    Returns:
      The method and the reason for it.

    Raises:
      ValueError: JAXRNN_LAUNCH is neither name.
      RuntimeError: JAXRNN_LAUNCH is "native" and its handler cannot be built.

    Examples:
      >>> import jaxrnn
      >>> method = jaxrnn.launch_method()
      >>> method  # doctest: +ELLIPSIS
      LaunchMethod(name=..., reason=...)
    """
    if (reason := native_fails()) is not None:
        raise NativeLaunchError(reason)
    return chosen()


def chosen() -> LaunchMethod:
    """Returns what `launch_method` returns, also if that method cannot be used here."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "callback", "native"):
        raise ValueError(f'{VARIABLE} must be "callback" or "native", got {value!r}: correct it, or unset it')
    if value:
        return LaunchMethod(value, f"the environment variable {VARIABLE} names it")
    with _choosing:
        return _choose()


def begin_choosing() -> None:
    """Starts to build the handler in a thread, unless JAXRNN_LAUNCH names a method; `chosen` waits for it."""
    if not os.environ.get(VARIABLE):
        with contextlib.suppress(RuntimeError):  # no thread can be started: `chosen` builds it
            threading.Thread(target=chosen, name="jaxrnn-build", daemon=False).start()


@functools.cache
def _choose() -> LaunchMethod:
    """Chooses the method once, so that the programs of a process use the same one."""
    try:
        register()
    except NativeLaunchError as error:
        return LaunchMethod("callback", f"the native launch cannot be used here: {error}")
    return LaunchMethod("native", "it is the default, and its handler can be built here")


def native_fails() -> str | None:
    """Returns why the native launch cannot be used although it is chosen, which JAXRNN_LAUNCH can do; else None."""
    if chosen().name != "native":
        return None
    try:
        register()
    except NativeLaunchError as error:
        return f"{error}; or set {VARIABLE} to callback, which needs PyTorch instead"
    return None


def cuda_method() -> Method:
    """Returns the method of launches that are compiled for a GPU."""
    return _NATIVE if chosen().name == "native" else callback.CUDA


def interpreted_method() -> Method:
    """Returns the method of launches that are compiled for the CPU."""
    return callback.INTERPRETED
