"""Tells whether the kernels can run on a device, and chooses between the kernels and PyTorch operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_bridge import imports, recording, rules, tiling

_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class DriverFailsError(RuntimeError):
    """Triton cannot load kernels now; the message says why, and what to do."""


def cached_reason(function: Callable[..., str | None]) -> Callable[..., str | None]:
    """Caches a function that returns why kernels cannot run, or None.

    A `DriverFailsError` that the function raises is returned as a reason and not cached, because its cause may be
    temporary.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def reason(*args: Any) -> str | None:
        try:
            return cached(*args)
        except DriverFailsError as error:
            return str(error)

    return reason


def unavailable(profile: tiling.Device | None, device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Returns why kernels cannot run on a device on arrays of these dtypes, and a remedy; None if they can.

    The reason lacks its subject, which callers prepend: "the Triton implementation" + " needs an NVIDIA GPU, ...".

    Args:
      profile: the GPU for which `torch_bridge.explain` chooses kernels in place of the device, or None.
      device: the device of the arrays.
      *dtypes: the dtypes of the arrays.

    Raises:
      DriverFailsError: Triton cannot load kernels now.
    """
    if reason := triton_fails():
        return reason
    if unsupported := [dtype for dtype in dtypes if dtype not in _KERNEL_DTYPES]:
        return f"takes float32, bfloat16 and float16, not {unsupported[0]}: convert, or leave implementation out"
    return _unusable(device) if profile is None else _before_ampere(profile)


def _unusable(device: torch.device) -> str | None:
    """Returns why no kernel can run on a device, whatever the dtypes, or None; Triton must be installed."""
    from torch_bridge import compiler, gpu

    if compiler.interpreting():
        if device.type == "cpu":
            return None
        return "runs in Triton's interpreter here (TRITON_INTERPRET=1), which takes CPU tensors only"
    if device.type != "cuda" or torch.version.cuda is None:
        return (
            f'needs an NVIDIA GPU, and the tensors are on {device.type}: move them to "cuda", or leave implementation '
            "out"
        )
    if reason := gpu.driver_fails():
        raise DriverFailsError(f"cannot load kernels here ({reason}): fix that, or leave implementation out")
    return _before_ampere(gpu.device(ordinal(device)))


def _before_ampere(gpu: tiling.Device) -> str | None:
    reason = rules.before_ampere(gpu.capability, gpu.name)
    return None if reason is None else f"{reason}: leave implementation out"


def device_facts(profile: tiling.Device | None, device: torch.device) -> tiling.Device:
    """Returns what the choice of tilings needs to know of the profile or, if it is None, of the device."""
    from torch_bridge import compiler, gpu

    if profile is not None:
        return profile
    return tiling.Device(interpreted=True) if compiler.interpreting() else gpu.device(ordinal(device))


def warn_if_unusable(device: torch.device) -> None:
    """Warns, once per process, if the device is an NVIDIA GPU on which no kernel can run."""
    if device.type != "cuda" or torch.version.cuda is None or torch.compiler.is_compiling():
        return
    try:
        reason = unavailable(None, device)
    except DriverFailsError as error:
        reason = str(error)
    if reason is not None:
        recording.warn_once(reason)


def should_launch_kernels(
    implementation: str | None, device: torch.device, unsupported: Callable[[tiling.Device | None], str | None]
) -> bool:
    """Returns whether an operator launches a kernel; if not, it runs PyTorch operations.

    Args:
      implementation: "triton", None, or the name of the PyTorch operations.
      device: the device of the tensors.
      unsupported: returns why the kernels cannot run, or None, given the `profile` of `unavailable`.

    Raises:
      NotImplementedError: `implementation` is "triton" and the kernels cannot run.
    """
    profile = recording.profile()
    if implementation not in (None, "triton"):
        return False
    if implementation is None and device.type != "cuda" and profile is None:
        return False
    reason = unsupported(profile)
    if reason is not None and implementation == "triton":
        raise NotImplementedError(f"the Triton implementation {reason}")
    if reason is not None and profile is None:
        warn_if_unusable(device)
    return reason is None


@functools.cache
def triton_fails() -> str | None:
    """Returns why Triton cannot be used, and a remedy, or None; the reason lacks its subject, as in `unavailable`."""
    try:
        imports.import_triton()
    except (ImportError, AttributeError) as error:
        reason = f"needs Triton 3.6 or newer, and the installed one lacks what the kernels use ({error})"
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            reason = "needs triton, which is not installed"
        return f"{reason}: pip install 'triton>=3.6'"
    return None


def ordinal(device: torch.device) -> int:
    """Returns the index of a CUDA device."""
    return torch.cuda.current_device() if device.index is None else device.index
