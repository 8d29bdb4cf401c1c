"""Whether the Triton kernels can run here, on which devices, and when they are the default."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxrnn import context
from jaxrnn._bridge import method
from torch_bridge import imports, rules

_INSTALL = "pip install '.[{}]' in a checkout of jaxrnn"
_OR_XLA = ', or pass implementation="xla"'


def unsupported(dtypes: Sequence[Any], hidden: int) -> str | None:
    """Returns why the kernels cannot run here with these dtypes and this width, and a remedy; None if they can."""
    return _unsupported(dtypes, functools.partial(_too_wide, hidden), multiplies=True)


def symbolic_size(arrays: Sequence[Any]) -> str | None:
    """Returns why the kernels cannot run arrays with a symbolic dimension of `jax.export`, or None if there is none."""
    symbolic = next((x for x in arrays if not all(isinstance(size, int) for size in x.shape)), None)
    if symbolic is None:
        return None
    return (
        f"needs sizes that are known when the program is traced, but an array is {symbolic.shape}, with symbolic "
        'dimensions of jax.export: pass implementation="xla"'
    )


def unsupported_norm(dtypes: Sequence[Any], columns: int) -> str | None:
    """Returns what `unsupported` returns, but for a norm over `columns` columns."""
    return _unsupported(dtypes, functools.partial(_too_many_columns, columns), multiplies=False)


def unusable() -> str | None:
    """Returns why no kernel can run in this process, whatever its input, and a remedy; None if one can."""
    return reason + _OR_XLA if (reason := _not_installed()) else _fails_here()


def _unsupported(dtypes: Sequence[Any], too_wide: Callable[[Any], str | None], multiplies: bool) -> str | None:
    if reason := _not_installed():
        return reason + _OR_XLA
    if bad := [str(dtype) for dtype in dtypes if str(jnp.dtype(dtype)) not in rules.OPERAND_DTYPES]:
        return f'takes float32, bfloat16 and float16, not {bad[0]}: convert, or pass implementation="xla"'
    if reason := _fails_here():
        return reason
    device = chosen_device()
    if device.interpreted and multiplies and jnp.bfloat16 in dtypes:
        return (
            "computes bfloat16 products wrongly in Triton's interpreter: use float32 or float16 there, or pass "
            'implementation="xla"'
        )
    return too_wide(device)


def _not_installed() -> str | None:
    """Returns which package is not installed, and how to install it; None if all are."""
    if _spec_missing("triton"):
        gpu = "" if on_gpu() else f' (it also needs an NVIDIA GPU, but JAX computes on "{jax.default_backend()}" here)'
        return f"needs triton, which is not installed: {_INSTALL.format('triton')}{gpu}"
    if _spec_missing("torch") and (reason := _torch_needed()) is not None:
        return f"needs torch, which is not installed, because {reason}: {_INSTALL.format('torch')}"
    return None


def _torch_needed() -> str | None:
    """Returns why kernels need PyTorch in this process, or None if they do not."""
    if context.other_device() is not None:
        return None
    if _import_fails() is None and runs_interpreter():
        return "TRITON_INTERPRET=1 is set, and Triton's interpreter runs kernels on its tensors"
    if on_gpu() and (chosen := method.chosen()).name == "callback":
        return f"kernels are launched by a callback ({chosen.reason})"
    return None


def _fails_here() -> str | None:
    """Returns why no kernel can run here although what it needs is installed, or None."""
    if reason := _too_old():
        return reason + _OR_XLA
    from torch_bridge import cuda_driver, gpu

    if (other := context.other_device()) is not None:
        return _before_ampere(other)
    if runs_interpreter():
        if jax.default_backend() == "cpu":
            return None
        return (
            "runs in Triton's interpreter here, because TRITON_INTERPRET=1 is set, but the interpreter only "
            'supports arrays on the CPU: unset it, set JAX_PLATFORMS=cpu, or pass implementation="xla"'
        )
    if jax.default_backend() != "gpu":
        return (
            f'needs an NVIDIA GPU, but JAX computes on "{jax.default_backend()}" here: pass implementation="xla" (or '
            "set TRITON_INTERPRET=1 before the first import to run the kernels in Triton's interpreter)"
        )
    if reason := _callback_fails() if method.chosen().name == "callback" else method.native_fails():
        return f'{reason}, or pass implementation="xla"'
    try:
        device, *others = {dataclasses.replace(gpu.device(i), clusters=()) for i in _ordinals()}
    except cuda_driver.DriverError as error:
        return f'needs an NVIDIA GPU, and {error}, or pass implementation="xla"'
    if others:
        names = ", ".join(sorted(f"{d.name} ({d.multiprocessors} SMs)" for d in (device, *others)))
        return (
            f"needs all GPUs of a process to be of one kind, got {names}: hide all but one kind with "
            'CUDA_VISIBLE_DEVICES, or pass implementation="xla"'
        )
    return _before_ampere(device)


def _before_ampere(device: Any) -> str | None:
    reason = rules.before_ampere(device.capability, device.name)
    return None if reason is None else f'{reason}: pass implementation="xla"'


def _callback_fails() -> str | None:
    """Returns why kernels cannot be launched by a callback here, and a remedy; None if they can."""
    import torch

    from torch_bridge import gpu

    if torch.version.cuda is None or not torch.cuda.is_available():
        return (
            f"needs a torch built for CUDA, but torch {torch.__version__} finds no CUDA device: install the torch "
            "build that matches your driver"
        )
    if reason := gpu.driver_fails():
        return f"cannot load kernels on this machine ({reason}): fix the cause"
    return None


def _too_wide(hidden: int, device: Any) -> str | None:
    from torch_bridge.tiling import max_hidden

    if hidden <= max_hidden(device):
        return None
    return (
        f"is limited by the device: a hidden width of {hidden} is more than its {device.multiprocessors} "
        f'SMs can share (at most {max_hidden(device)}); pass implementation="xla"'
    )


def _too_many_columns(columns: int, _: Any) -> str | None:
    from torch_bridge.norms import WIDEST

    return None if columns <= WIDEST else f'takes up to {WIDEST} columns, got {columns}: pass implementation="xla"'


@functools.cache
def _import_fails() -> str | None:
    """Returns why importing the kernels fails although triton is installed, or None.

    Where JAX computes on a GPU, what a first kernel needs is begun: the build of the handler, while this imports, and
    then the hash of Triton.
    """
    used = context.other_device() is None and on_gpu()
    if used:
        method.begin_choosing()
    try:
        imports.import_triton()
        if used:
            from torch_bridge import compiler

            compiler.begin_to_hash_triton()
    except (ImportError, AttributeError) as error:
        return f"needs Triton 3.6 or newer, but with the installed version its import fails ({error})"
    return None


def _too_old() -> str | None:
    """Returns why the installed Triton cannot be used, and how to install another one; None if it can."""
    reason = _import_fails()
    return None if reason is None else f"{reason}: {_INSTALL.format('triton')}"


@functools.cache
def _spec_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


def is_preferred(steps: int) -> bool:
    """Whether the Triton implementation is the fastest where it can run: on a GPU, for more than one step.

    XLA runs a single step faster: a scan iteration takes 8.6 us instead of 16.2 us (H200, B=64, H=128). The interpreter
    is never the fastest.
    """
    return isinstance(steps, int) and steps > 1 and on_gpu()  # `jax.export` may make `steps` symbolic


def on_gpu() -> bool:
    """Returns whether JAX computes on a GPU by default, or `jaxrnn.explain` chooses kernels for a GPU."""
    if context.other_device() is not None:
        return True
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # a device, a platform, or None
    return (getattr(default, "platform", default) or jax.default_backend()) in ("gpu", "cuda")


def has_nvidia_gpu() -> bool:
    """Returns whether JAX computes on NVIDIA GPUs by default."""
    if not on_gpu():
        return False
    return "rocm" not in jax.local_devices(backend="gpu")[0].client.platform_version.lower()


def profile(name: str) -> Any:
    """Returns the facts about a GPU by which kernels are chosen for it, given its name in `torch_bridge.tiling`.

    Raises:
      ValueError: there is no GPU with this name.
      NotImplementedError: kernels cannot be chosen because Triton is missing.
    """
    from torch_bridge import tiling

    gpu = tiling.profile(name)
    with context.listening(gpu):  # nothing is launched, so PyTorch is not needed
        reason = _not_installed() or _too_old()
    if reason:
        raise NotImplementedError(
            f"to choose kernels for {gpu.name}, the Triton implementation {reason}, or leave out device"
        )
    return gpu


def _ordinals() -> list[int]:
    """Returns the ordinals of the GPUs of this process."""
    return [d.local_hardware_id for d in jax.local_devices(backend="gpu")]


def cuda_device() -> tuple[Any, Sequence[int]]:
    """Returns the device that kernels are chosen for, and the ordinals of all devices that they are loaded onto.

    The device has as many clusters as run at once on every GPU of this process. With several processes it has none:
    their GPUs may differ in that, and all processes must compile the same program.
    """
    from torch_bridge import gpu

    ordinals = _ordinals()
    first, *others = (gpu.device(i) for i in ordinals)
    counts = () if jax.process_count() > 1 else zip(first.clusters, *(d.clusters for d in others), strict=False)
    return dataclasses.replace(first, clusters=tuple(map(min, counts))), ordinals


def runs_interpreter() -> bool:
    """Returns whether Triton's interpreter runs the kernels, on the CPU."""
    from torch_bridge.compiler import interpreting

    return interpreting()


def cpu_device() -> tuple[Any, Sequence[int]]:
    from torch_bridge.tiling import Device

    if not runs_interpreter():
        raise NotImplementedError(
            'the Triton kernels need a GPU, but this call is compiled for the CPU: pass implementation="xla"'
        )
    return Device(interpreted=True), ()


def chosen_device() -> Any:
    """Returns the device that kernels are chosen for when launches are traced."""
    if (device := context.other_device()) is not None:
        return device
    return (cpu_device if runs_interpreter() else cuda_device)()[0]
