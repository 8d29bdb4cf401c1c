"""Launches of one or more kernels on a given stream.

A launch does not allocate, wait or autotune, so a CUDA graph can capture it. `Launch.load` does the slow work
beforehand: it compiles the kernels and loads them onto a device. `Launch.begin_loading` starts that work without
waiting for it, so that kernels are compiled in parallel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from triton.compiler import CompiledKernel

from torch_bridge import compiler, cuda_driver, gpu, kernel_cache
from torch_bridge.kernels import names
from torch_bridge.tiling import Device


class Arguments:
    """The arguments of a kernel in positional order; each launch fills in the addresses of the arrays."""

    def __init__(self, kernel: Any, values: Mapping[str, Any]):
        self._values = [values.get(name) for name in kernel.arg_names]
        self._pointers = [
            (i, name.removesuffix("_ptr")) for i, name in enumerate(kernel.arg_names) if name not in values
        ]

    def run(self, compiled: CompiledKernel, grid: int, cluster: int, stream: int, addresses: Mapping[str, int]) -> None:
        """Launches `grid` programs, in clusters of `cluster`, on a stream, given the address of every array by name."""
        arguments = self._values.copy()
        for i, name in self._pointers:
            arguments[i] = addresses[name]
        metadata = compiled.packed_metadata
        if cluster > 1:  # metadata[1] is num_ctas, by which Triton's launcher multiplies the grid
            metadata, grid = (metadata[0], cluster, *metadata[2:]), grid // cluster
        # the three None are the metadata of the launch, and the hooks before and after it
        compiled.run(grid, 1, 1, stream, compiled.function, metadata, None, None, None, *arguments)


class _Function:
    """A Triton function in a key, which is compared by identity: Triton's own hash of a function parses its source."""

    def __init__(self, function: Any):
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and self.function is other.function

    def __hash__(self) -> int:
        return id(self.function)

    def __repr__(self) -> str:
        return f"{self.function.fn.__module__}.{self.function.fn.__qualname__}"


class KernelCall(NamedTuple):
    """One kernel of a `Launch`.

    Attributes:
      function: the Triton or Gluon function.
      constants: by name, the values of its compile-time arguments, and None for arrays that are absent.
      dtypes: dtypes of its arrays by name.
      scalars: values of its other arguments by name.
      options: options of the compiler by name, such as num_warps.
      grid: number of programs.
      cluster: number of programs of a cluster.
    """

    function: Any
    constants: tuple[tuple[str, Any], ...]
    dtypes: tuple[tuple[str, str], ...]
    scalars: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    grid: int
    cluster: int = 1

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of the compiled kernel, which depends on these values and on the compute capability."""
        constants = tuple((name, _Function(x) if callable(x) else x) for name, x in self.constants)
        return _Function(self.function), constants, self.dtypes, self.options

    @property
    def name(self) -> str:
        """The name of the compiled kernel, as profilers show it."""
        return names.name_of(self.function, dict(self.constants))

    def arguments(self) -> Arguments:
        """Returns the kernel's arguments, without the addresses of arrays."""
        return Arguments(self.function, dict(self.constants) | dict(self.scalars))

    def compile(self, capability: int) -> CompiledKernel:
        """Compiles the kernel for a compute capability, without needing a GPU."""
        return compile_call(self.key, capability)


class Binary(NamedTuple):
    """A compiled kernel and its launch, for a launcher that needs neither Triton nor Python.

    Attributes:
      cubin: the binary.
      name: the kernel's symbol in it.
      capability: the compute capability that the binary is for, times ten, such as 90.
      grid: number of thread blocks.
      threads: threads per block.
      shared_memory: bytes of dynamic shared memory per block.
      cluster: blocks per cluster.
      cooperative: whether all blocks must run at once (cooperative launch).
      early: whether the kernel may start before the previous one has ended (programmatic dependent launch).
      parameters: `(type, value)` of each parameter of the kernel: "array" and the array's name, "null" and None, or a
        type of `compiler.SCALARS` and a number.
    """

    cubin: bytes
    name: str
    capability: int
    grid: int
    threads: int
    shared_memory: int
    cluster: int
    cooperative: bool
    early: bool
    parameters: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, call: KernelCall, compiled: CompiledKernel | kernel_cache.StoredKernel, capability: int) -> Binary:
        """Describes the launch of a compiled kernel, with the sizes and parameters of Triton's own launcher.

        Raises:
          NotImplementedError: the kernel needs memory that Triton's launcher allocates.
        """
        metadata = compiled.metadata
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise NotImplementedError(
                f"the kernel {compiled.name} needs scratch memory (of Triton's profiler or tensor descriptors), which "
                "only Triton's launcher allocates: turn the profiler off, or launch through the callback"
            )
        constants, scalars = dict(call.constants), dict(call.scalars)
        parameter_names = [name for name in call.function.arg_names if name not in constants]
        parameters = [
            (compiler.SCALARS[name], scalars[name]) if name in scalars else ("array", name.removesuffix("_ptr"))
            for name in parameter_names
        ]
        parameters += [("null", None)] * 2  # Triton's pointers to scratch memory
        return cls(
            compiled.kernel, compiled.name, capability, call.grid, metadata.num_warps * metadata.warp_size,
            metadata.shared, call.cluster,
            bool(metadata.launch_cooperative_grid), bool(metadata.launch_pdl), tuple(parameters),
        )  # fmt: skip


def compile_call(key: tuple[Any, ...], capability: int) -> CompiledKernel:
    """Compiles the kernel of a `KernelCall` with this key, without needing a GPU."""
    function, constants, dtypes, options = key
    values = {name: x.function if isinstance(x, _Function) else x for name, x in constants}
    return compiler.compile_kernel(function.function, values, dict(dtypes), capability, **dict(options))


def find_call(key: tuple[Any, ...], capability: int) -> CompiledKernel | kernel_cache.StoredKernel:
    """Returns the compiled kernel of a `KernelCall` with this key, without needing a GPU.

    If an earlier process stored it on disk, it is a `StoredKernel`, which has what `Binary.of` reads.
    """
    made_from = (*key, capability, gpu.binary_capability(capability))
    return kernel_cache.load_or_compile(functools.partial(compile_call, key, capability), made_from)


class Launch:
    """Kernels that run one after the other: `load` them onto a device, then call them with addresses and a stream.

    Attributes:
      kernels: the kernels in launch order; `add` appends one.
      workspaces: `(name, length, dtype, zeroed)` of additional arrays that every call needs, and that no two calls may
        use at the same time.
    """

    def __init__(self, device: Device):
        self.kernels: list[KernelCall] = []
        self.workspaces: list[tuple[str, int, str, bool]] = []
        self._device = device
        self._ready: dict[int, list[tuple[CompiledKernel, int, int, Arguments]]] = {}

    @property
    def allows_early_start(self) -> bool:
        """Whether a kernel can start before the previous one has ended (programmatic dependent launch)."""
        return self._device.has_early_launch and gpu.can_capture_early_launches()

    def add(
        self, function: Any, grid: int, num_warps: int, dtypes: Mapping[str, str], constants: Mapping[str, Any],
        scalars: Mapping[str, Any], side_by_side: int = 1, *, early: bool = False, cluster: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        """Appends a kernel. Names in `dtypes`, `constants` and `scalars` that are not its arguments are ignored.

        Its arrays that `dtypes` does not name are None. With `early`, the kernel may start before the previous one has
        ended, and must call `kernels.sums.wait_for_dependencies` before it reads what that one wrote.
        `side_by_side` is the number of programs per SM for which there must be enough registers; it limits the
        registers per thread. Without a limit, ptxas aims at several programs per SM and spills. `cluster` programs are
        a cluster. `options` are further options of the compiler.
        """
        pointers = [name for name in function.arg_names if name.endswith("_ptr")]
        array_dtypes = {
            name: dtypes[name.removesuffix("_ptr")] for name in pointers if name.removesuffix("_ptr") in dtypes
        }
        values = {**constants, **dict.fromkeys(set(pointers) - set(array_dtypes))}
        if "EARLY" in function.arg_names:  # a kernel that lets the next one start early, or waits for the previous one
            values.setdefault("EARLY", self.allows_early_start)
        options |= {"num_warps": num_warps, "maxnreg": compiler.max_registers(num_warps, side_by_side)}
        options |= {"launch_pdl": True} if early and self.allows_early_start else {}
        self.kernels.append(
            KernelCall(
                function,
                tuple((name, values[name]) for name in function.arg_names if name in values),
                tuple((name.removesuffix("_ptr"), dtype) for name, dtype in array_dtypes.items()),
                tuple((name, value) for name, value in scalars.items() if name in function.arg_names),
                tuple(options.items()),
                grid,
                cluster,
            )
        )

    def begin_loading(self, ordinal: int | None) -> None:
        """Starts the work of `load` in the background, or that of `binaries` if `ordinal` is None."""
        compile = find_call if ordinal is None else compile_call
        for k in self.kernels:
            compiler.begin_loading(ordinal, compile, k.key, self._device.capability)

    def load(self, ordinal: int) -> None:
        """Compiles the kernels and loads them onto a device. Must be called before a stream capture."""
        if len(self.kernels) > 1:
            self.begin_loading(ordinal)
        loaded = [compiler.ensure_loaded(ordinal, compile_call, k.key, self._device.capability) for k in self.kernels]
        for k, compiled in zip(self.kernels, loaded, strict=True):
            if k.cluster > 1:
                cuda_driver.allow_clusters(compiled.function, compiled.metadata.shared, ordinal)
        self._ready[ordinal] = [
            (compiled, k.grid, k.cluster, k.arguments()) for k, compiled in zip(self.kernels, loaded, strict=True)
        ]

    def is_loaded(self, ordinal: int) -> bool:
        """Returns whether the kernels are loaded onto a device. If so, `load`, which a launch needs, is fast."""
        return all(compiler.is_loaded(ordinal, compile_call, k.key, self._device.capability) for k in self.kernels)

    def binaries(self) -> list[Binary]:
        """Returns the compiled kernels and their launches, without loading anything onto a device.

        Each kernel is compiled at most once in a process.
        """
        if len(self.kernels) > 1:
            self.begin_loading(None)
        capability = self._device.capability
        target = gpu.binary_capability(capability)
        return [Binary.of(k, compiler.ensure_loaded(None, find_call, k.key, capability), target) for k in self.kernels]

    def compile(self) -> list[CompiledKernel]:
        """Compiles the kernels for the device that the constructor was given, without needing a GPU."""
        return [k.compile(self._device.capability) for k in self.kernels]

    def __call__(self, stream: int, ordinal: int, addresses: Mapping[str, int]) -> None:
        """Launches the kernels on a device's stream, given the addresses of all arrays and workspaces by name."""
        for compiled, grid, cluster, arguments in self._ready[ordinal]:
            arguments.run(compiled, grid, cluster, stream, addresses)

    def interpret(self, tensors: Mapping[str, Any]) -> None:
        """Runs the kernels in Triton's interpreter, on CPU tensors given by name."""
        with compiler.interpreter_lock:
            for k in self.kernels:
                self._interpret(k, tensors)

    def _interpret(self, k: KernelCall, tensors: Mapping[str, Any], **changes: Any) -> None:
        arrays = {f"{name}_ptr": tensors[name] for name, _ in k.dtypes}
        k.function[(k.grid,)](**arrays | dict(k.constants) | dict(k.scalars) | changes)
