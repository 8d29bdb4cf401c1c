"""The native launch as a call in a program: its attributes contain the binaries and everything about the launches."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrnn._bridge.native import target

if TYPE_CHECKING:
    from jax import Array

# The kinds of parameters, in the order of the enum in `launch.c`, and the types of `torch_bridge.launch.Binary`.
_KINDS = ("array", "null", "i32", "i64", "fp32")
# How `struct` packs a number as the kernel takes it, and reads it as the integer that `launch.c` takes.
_NUMBERS = {"i32": ("<i", "<i"), "i64": ("<q", "<q"), "fp32": ("<f", "<I")}


class NativeMethod:
    """Launches by the handler in C. `jaxrnn._bridge.callback.CallbackMethod` has the same interface."""

    captured = True
    uses_host_callbacks = False

    def begin(self, launch: Any, ordinals: Sequence[int]) -> None:
        """Starts to compile the kernels of a launch in the background."""
        del ordinals  # the handler loads kernels where a program is initialized
        launch.begin_loading(None)

    def call(
        self, launch: Any, ordinals: Sequence[int], arrays: Mapping[str, Array],
        results: Mapping[str, jax.ShapeDtypeStruct], aliases: Mapping[int, int],
    ) -> Sequence[Array]:  # fmt: skip
        """Launches on `arrays`; returns the results in their order.

        Compiles the kernels, and registers the handler.
        """
        del ordinals
        target.register()
        function = jax.ffi.ffi_call(target.TARGET, [*results.values()], input_output_aliases=dict(aliases))
        return function(*arrays.values(), **attributes(launch.binaries(), [*arrays, *results]))


def attributes(binaries: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns the attributes of a call that launches these binaries; `names` are those of its operands and results.

    Raises:
      ValueError: a number does not fit the type in which the kernel or the driver takes it.
    """
    encoded: dict[str, Any] = {"kernels": np.int64(len(binaries))}
    for k, binary in enumerate(binaries):
        launch = (
            binary.grid, 1, 1, binary.threads, binary.shared_memory, binary.cluster, binary.cooperative, binary.early,
            binary.capability,
        )  # fmt: skip
        if not all(-(2**31) <= x < 2**31 for x in launch):
            raise ValueError(f"the kernel {binary.name} is launched with 32-bit numbers, and {launch} do not fit")
        parameters = [number for kind, value in binary.parameters for number in _encode(kind, value, names)]
        encoded |= {
            f"cubin_{k}": binary.cubin,
            f"name_{k}": binary.name,
            f"key_{k}": _key(binary),
            f"launch_{k}": np.array(launch, np.int64),
            f"parameters_{k}": np.array(parameters, np.int64),
        }
    return encoded


def _encode(kind: str, value: Any, names: Sequence[str]) -> tuple[int, int]:
    """Returns a parameter's kind and value, as `launch.c` reads them."""
    if kind == "array":
        value = names.index(value)
    elif kind != "null":
        packed, read = _NUMBERS[kind]
        try:
            (value,) = struct.unpack(read, struct.pack(packed, value))
        except (struct.error, OverflowError) as error:
            raise ValueError(f"a parameter of a kernel is {kind}, and {value} does not fit ({error})") from error
    return _KINDS.index(kind), value or 0


def _key(binary: Any) -> str:
    """Returns the key under which the handler remembers a loaded kernel: a hash of its name, shared memory and binary.

    Loading also reads the number of threads, that of blocks per cluster, and whether the launch is cooperative, in
    which launches of one binary do not differ.
    """
    digest = hashlib.sha256(f"{binary.name}\0{binary.shared_memory}\0".encode())
    digest.update(binary.cubin)
    return digest.hexdigest()
