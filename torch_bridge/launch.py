"""Launches of kernels on a given stream; each specialization of a kernel is compiled once.

A launch does not allocate, wait or autotune, so a CUDA graph can capture it. `Launch.load` does the slow work
beforehand: it compiles the kernel and loads it onto a device. `Launch.begin_loading` starts that work without waiting
for it, so that kernels are compiled in parallel.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource

from torch_bridge import kernels, tiling
from torch_bridge.tiling import Device, KernelConfig, Problem, Reverse

POINTER_TYPES = {
    "float64": "*fp64", "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16",
    "bool": "*i8", "int8": "*i8", "int16": "*i16", "int32": "*i32", "int64": "*i64",
    "uint8": "*u8", "uint16": "*u16", "uint32": "*u32", "uint64": "*u64",
}  # fmt: skip
SCALARS = {
    "T": "i32", "B": "i64", "Q": "i64", "tiles": "i32", "items": "i32", "t_begin": "i32", "t_end": "i32",
    "R": "i64", "programs": "i32", "epsilon": "fp32", "rows": "i32", "share": "i32",
}  # fmt: skip

# Held while the interpreter runs, because it patches triton.language for the whole process.
interpreter = threading.Lock()


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU, because `TRITON_INTERPRET` was 1 at their import."""
    return not isinstance(kernels.CELLS["gru"].fwd, triton.runtime.JITFunction)


# Held while a kernel is parsed: before Python 3.11.8, `ast.parse` fails if another thread parses at the same time
# (CPython issue 106905).
_parsing = threading.RLock()


class _SerializedParsing:
    """A mixin for Triton's kernel sources: only one thread at a time parses a kernel's Python."""

    def hash(self) -> Any:
        with _parsing:
            return super().hash()  # type: ignore[misc]

    def make_ir(self, *arguments: Any, **options: Any) -> Any:
        with _parsing:
            return super().make_ir(*arguments, **options)  # type: ignore[misc]


class _Source(_SerializedParsing, ASTSource):
    pass


class _GluonSource(_SerializedParsing, GluonASTSource):
    pass


def compile_kernel(
    kernel: Any, constants: Mapping[str, Any], dtypes: Mapping[str, str], capability: int, **options: Any
) -> CompiledKernel:  # fmt: skip
    """Compiles a kernel for values of its compile-time arguments and dtypes of its arrays, without needing a GPU."""
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = POINTER_TYPES[dtypes[name.removesuffix("_ptr")]]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = SCALARS[name]
    source = (_GluonSource if kernel.is_gluon() else _Source)(kernel, signature, dict(constants), attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True, **options}
    )


def registers(num_warps: int, side_by_side: int = 1) -> int:
    """Returns the maximum registers per thread for `side_by_side` resident programs of `num_warps` warps per SM."""
    return min(255, 65536 // (32 * num_warps * side_by_side))


def load_kernel(compiled: CompiledKernel, ordinal: int) -> CompiledKernel:
    """Loads a compiled kernel onto a device."""
    import torch

    with torch.cuda.device(ordinal):
        compiled._init_handles()
    return compiled


# Kernels that are loaded or being loaded, by the device, the compiling function and its arguments.
_loading: dict[tuple[Any, ...], Future[CompiledKernel]] = {}
_loading_lock = threading.Lock()


@functools.cache
def _compilers() -> threading.Semaphore:
    """Returns the semaphore that bounds the number of compiling threads.

    Threads do run in parallel, because the compiler is outside of Python most of the time.
    """
    return threading.Semaphore(min(8, _cores()))


def _cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_in_background(function: Callable[..., Any], *arguments: Any) -> Future[Any] | None:
    """Runs a function in a thread; returns None if there is only one core or the interpreter is exiting.

    Jobs that are still queued when the main thread ends are dropped; the threads of an executor would run them.
    """
    if _cores() == 1:
        return None
    future: Future[Any] = Future()
    compilers = _compilers()

    def run() -> None:
        with compilers:
            if not threading.main_thread().is_alive() or not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

    try:
        threading.Thread(target=run, name="torch_bridge-compile", daemon=False).start()
    except RuntimeError:  # no thread can be started after the main thread has ended
        return None
    return future


def _begin_loading(ordinal: int, compile: Callable[..., CompiledKernel], *arguments: Hashable) -> None:
    """Starts to compile a kernel and to load it onto one device, in a thread, unless that is done or in progress."""
    key = ordinal, compile, *arguments
    with _loading_lock:
        if key not in _loading and (begun := _run_in_background(lambda: load_kernel(compile(*arguments), ordinal))):
            _loading[key] = begun


def _ensure_loaded(ordinal: int, compile: Callable[..., CompiledKernel], *arguments: Hashable) -> CompiledKernel:
    """Returns a kernel, compiled and loaded onto one device at most once: waits for a thread's job or does it here.

    A job that is still queued is done here, ahead of queued jobs whose results may never be needed. A job that failed
    in a thread is done here again, because its cause may have passed, such as an interrupt. An exception is kept only
    for callers that already wait for the job: its traceback references the frames that it was raised through, and their
    arrays.
    """
    key = ordinal, compile, *arguments
    mine: Future[CompiledKernel] = Future()
    mine.set_running_or_notify_cancel()
    there = mine
    try:
        with _loading_lock:
            there = _loading.get(key, mine)
            if there.cancel() or (there.done() and there.exception() is not None):
                there = mine
            _loading[key] = there
        if there is mine:
            mine.set_result(load_kernel(compile(*arguments), ordinal))
        return there.result()
    except BaseException as error:
        with _loading_lock:
            if _loading.get(key) is there and (there is mine or there.done()):
                del _loading[key]
        if not mine.done():
            mine.set_exception(error)
        raise
    finally:
        del mine, there  # both reference the exception, whose traceback references this frame


def _reset_after_fork() -> None:
    """Resets locks and compilations after a fork: in the child, the parent's threads that held or ran them are gone."""
    global interpreter, _parsing, _loading_lock
    interpreter, _parsing, _loading_lock = threading.Lock(), threading.RLock(), threading.Lock()
    _loading.clear()
    _compilers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)


class Arguments:
    """The arguments of a kernel in positional order; each launch fills in the addresses of the arrays."""

    def __init__(self, kernel: Any, values: Mapping[str, Any]):
        self._values = [values.get(name) for name in kernel.arg_names]
        self._pointers = [
            (i, name.removesuffix("_ptr")) for i, name in enumerate(kernel.arg_names) if name not in values
        ]

    def run(self, compiled: CompiledKernel, grid: int, stream: int, addresses: Mapping[str, int]) -> None:
        """Launches `grid` programs on a stream, given the address of every array by name."""
        arguments = self._values.copy()
        for i, name in self._pointers:
            arguments[i] = addresses[name]
        compiled.run(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


class KernelCall(NamedTuple):
    """One kernel of `Calls`, and the parameters of its launch."""

    function: Any
    constants: tuple[tuple[str, Any], ...]
    dtypes: tuple[tuple[str, str], ...]
    scalars: tuple[tuple[str, Any], ...]
    num_warps: int
    registers: int
    early: bool
    grid: int

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything but the compute capability that the compiled kernel depends on."""
        return self.function, self.constants, self.dtypes, self.num_warps, self.registers, self.early

    def arguments(self) -> Arguments:
        """Returns the kernel's arguments, without the addresses of arrays."""
        return Arguments(self.function, dict(self.constants) | dict(self.scalars))


def _compile_call(key: tuple[Any, ...], capability: int) -> CompiledKernel:
    function, constants, dtypes, num_warps, registers, early = key
    return compile_kernel(
        function, dict(constants), dict(dtypes), capability, num_warps=num_warps, maxnreg=registers, launch_pdl=early
    )


@functools.cache
def _can_capture_early_launches() -> bool:
    """Whether CUDA graphs can capture programmatic dependent launches, which takes a driver of CUDA 12.3 or newer."""
    import torch

    if not torch.cuda.is_available():  # kernels are compiled here for another machine
        return True
    version = ctypes.c_int()
    if status := ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
        raise RuntimeError(f"cuDriverGetVersion returned {status}")
    return version.value >= 12030


class Calls:
    """Kernels that run one after the other: `load` them onto a device, then call them with addresses and a stream.

    Attributes:
      kernels: the kernels in launch order; `add` appends one.
      workspaces: `(name, length, dtype, zeroed)` of additional arrays that every call needs, and that no two calls may
        use at the same time.
      early: whether a kernel can start before the previous one has ended (programmatic dependent launch).
    """

    def __init__(self, device: Device):
        self.early = device.has_early_launch and _can_capture_early_launches()
        self.kernels: list[KernelCall] = []
        self.workspaces: list[tuple[str, int, str, bool]] = []
        self._capability = device.capability
        self._ready: dict[int, list[tuple[CompiledKernel, int, Arguments]]] = {}

    def add(
        self, function: Any, grid: int, num_warps: int, dtypes: Mapping[str, str], constants: Mapping[str, Any],
        scalars: Mapping[str, Any], side_by_side: int = 1, *, early: bool = False,
    ) -> None:  # fmt: skip
        """Appends a kernel with those of `dtypes`, `constants` and `scalars` that it has as arguments.

        Its arrays that `dtypes` does not name are None. With `early`, the kernel may start before the previous one has
        ended, and has to wait for that itself.
        """
        names = [name for name in function.arg_names if name.endswith("_ptr")]
        given = {name: dtypes[name.removesuffix("_ptr")] for name in names if name.removesuffix("_ptr") in dtypes}
        values = {"EARLY": self.early, **constants, **dict.fromkeys(set(names) - set(given))}
        self.kernels.append(
            KernelCall(
                function,
                tuple((name, values[name]) for name in function.arg_names if name in values),
                tuple((name.removesuffix("_ptr"), dtype) for name, dtype in given.items()),
                tuple((name, value) for name, value in scalars.items() if name in function.arg_names),
                num_warps,
                registers(num_warps, side_by_side),
                early and self.early,
                grid,
            )
        )

    def begin_loading(self, ordinal: int) -> None:
        """Starts the work of `load` in the background."""
        for k in self.kernels:
            _begin_loading(ordinal, _compile_call, k.key, self._capability)

    def load(self, ordinal: int) -> None:
        """Compiles the kernels and loads them onto a device. Must be called before a stream capture."""
        self.begin_loading(ordinal)
        self._ready[ordinal] = [
            (_ensure_loaded(ordinal, _compile_call, k.key, self._capability), k.grid, k.arguments())
            for k in self.kernels
        ]

    def compile(self) -> list[CompiledKernel]:
        """Compiles the kernels for the device that the constructor was given, without needing a GPU."""
        return [_compile_call(k.key, self._capability) for k in self.kernels]

    def __call__(self, stream: int, ordinal: int, addresses: Mapping[str, int]) -> None:
        """Launches the kernels on a device's stream, given the addresses of all arrays and workspaces by name."""
        for compiled, grid, arguments in self._ready[ordinal]:
            arguments.run(compiled, grid, stream, addresses)

    def interpret(self, tensors: Mapping[str, Any]) -> None:
        """Runs the kernels in Triton's interpreter, on CPU tensors given by name."""
        with interpreter:
            for k in self.kernels:
                arrays = {f"{name}_ptr": tensors[name] for name, _ in k.dtypes}
                k.function[(k.grid,)](**arrays, **dict(k.constants), **dict(k.scalars))


@dataclass(frozen=True)
class Specialization:
    """Everything that a compiled kernel depends on. Sequence lengths and batch sizes are not part of it."""

    cell: str
    direction: str
    hidden: int
    dtypes: tuple[tuple[str, str], ...]
    reset_state: str
    reverse: Reverse
    precision: str
    config: KernelConfig
    cooperative: bool
    capability: int

    @property
    def kernel(self) -> Any:
        """The kernel function."""
        return kernels.kernel(self.cell, self.direction, self.config.variant)

    def constants(self) -> dict[str, Any]:
        """Returns the values of the compile-time arguments, with None for arrays that are absent."""
        present = {name for name, _ in self.dtypes}
        values: dict[str, Any] = {
            "H": self.hidden,
            "BLOCK_H": self.config.block_h,
            "BLOCK_B": self.config.block_b,
            "BLOCK_K": self.config.block_k,
            "SPLITS": self.config.splits,
            "STAGES": self.config.num_stages,
            "SHARED_GATES": self.config.shared_gates,
            "RESET_STATE": tiling.RESET_STATES.index(self.reset_state),
            "REVERSE": self.reverse,
            "PRECISION": self.precision,
            "GATES_PHASE": True,
            "PRODUCT_PHASE": True,
        }
        for name in self.kernel.arg_names:
            if name.endswith("_ptr") and name.removesuffix("_ptr") not in present:
                values[name] = None
        return {name: values[name] for name in self.kernel.arg_names if name in values}

    def compile(self) -> CompiledKernel:
        """Compiles the kernel for `capability`, without needing a GPU."""
        return compile_kernel(
            self.kernel, self.constants(), dict(self.dtypes), self.capability, num_warps=self.config.num_warps,
            num_stages=self.config.num_stages, launch_cooperative_grid=self.cooperative,
            # all registers of an SM, because ptxas otherwise aims at several resident programs per SM and spills
            maxnreg=registers(self.config.num_warps),
        )  # fmt: skip


@functools.cache
def driver_fails() -> str | None:
    """Returns why Triton cannot load kernels in this process, or None if it can.

    Before its first load, Triton compiles a C module, which can fail. A failure causes a warning, because there is a
    GPU, and calls that name no implementation then run a slower one.
    """
    # begin the hash of all of Triton, which Triton computes before it compiles anything
    _run_in_background(triton.runtime.cache.triton_key)
    try:
        triton.runtime.driver.active.utils  # noqa: B018
    except Exception as error:  # a broken compiler, header or driver raises errors of many types
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"Triton cannot load kernels on this machine's GPU: {reason}", RuntimeWarning, stacklevel=2)
        return reason
    return None


@functools.cache
def gpu(ordinal: int = 0) -> Device:
    """Returns the properties of a CUDA device of this process."""
    import torch

    properties = torch.cuda.get_device_properties(ordinal)
    return Device(
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # missing from torch's stubs
        properties.max_threads_per_multi_processor,
        name=properties.name,
    )


# The GPU that kernels are chosen and compiled for instead of the actual one; see `run_as`.
_profile: Device | None = None


def device(ordinal: int = 0) -> Device:
    """Returns the properties by which kernels on a CUDA device are chosen: its own, or the profile set by `run_as`."""
    if _profile is None:
        return gpu(ordinal)
    return dataclasses.replace(_profile, name=f"{_profile.name} on {gpu(ordinal).name}")


def run_as(profile: Device) -> None:
    """Makes later launches choose kernels for another GPU, compile them to its PTX and assemble that for this GPU.

    Benchmarks and tests use this to run the code for an absent GPU on other hardware. PTX for an older capability runs
    on a newer GPU, not the other way round. Call this function before anything is traced. Compiled code goes to a
    separate folder in Triton's cache.

    Raises:
      ValueError: this GPU has a lower capability than the profile.
    """
    global _profile
    capability = gpu().capability
    if profile.capability > capability:
        raise ValueError(
            f"code for {profile.name} (compute capability {profile.capability / 10}) does not run on {gpu().name} "
            f"({capability / 10}): choose a profile of at most {capability / 10}"
        )

    def assemble_for_this_gpu(backend: Any = None, stages: Any = None, options: Any = None, *_: Any) -> Any:
        if stages is None:  # Triton 3.7 and newer ask what to add to their cache key
            return (f"assembled for sm_{capability}",) * 2
        stages["cubin"] = lambda ptx, metadata: backend.make_cubin(ptx, metadata, options, capability)
        return None

    triton.knobs.runtime.add_stages_inspection_hook = assemble_for_this_gpu
    triton.knobs.cache.dir = os.path.join(triton.knobs.cache.dir, f"assembled-for-sm_{capability}")
    _profile = profile


class Launch:
    """The launch of a problem with its tiling: `load` it onto a device, then call it with addresses and a stream.

    Attributes:
      workspaces: `(name, length, dtype, zeroed)` of additional arrays that every call needs, and that no two calls may
        use at the same time.
    """

    def __init__(self, problem: Problem, device: Device, config: KernelConfig | None = None):
        self.problem = problem
        self.config = config or tiling.heuristic(problem, device)
        self.workers = self.config.workers(problem, device)
        self.tiles = self.config.tiles(problem)
        self.workspaces = self.config.workspaces(problem, device)
        cooperative = self.config.splits > 1 and not device.interpreted
        dtypes = problem.dtypes + tuple((name, dtype) for name, _, dtype, _ in self.workspaces)
        self.specialization = Specialization(
            problem.cell, problem.direction, problem.hidden, dtypes, problem.reset_state, problem.reverse,
            problem.precision, self.config, cooperative, device.capability,
        )  # fmt: skip
        self.scalars = {
            "T": problem.steps, "B": problem.batch, "Q": problem.sequences, "tiles": self.tiles,
            "items": problem.models * self.tiles, "t_begin": 0, "t_end": problem.steps,
        }  # fmt: skip
        self.grid = self.workers * self.config.splits
        self._arguments = Arguments(self.specialization.kernel, self.scalars | self.specialization.constants())
        self._compiled: dict[int, CompiledKernel] = {}

    def begin_loading(self, ordinal: int) -> None:
        """Starts the work of `load` in the background."""
        _begin_loading(ordinal, Specialization.compile, self.specialization)

    def load(self, ordinal: int) -> None:
        """Compiles the kernel and loads it onto a device. Must be called before a stream capture."""
        self._compiled[ordinal] = _ensure_loaded(ordinal, Specialization.compile, self.specialization)

    def __call__(self, stream: int, ordinal: int, addresses: Mapping[str, int]) -> None:
        """Launches the kernel on a device's stream, given the addresses of all arrays and workspaces by name."""
        self._arguments.run(self._compiled[ordinal], self.grid, stream, addresses)

    def interpret(self, tensors: Mapping[str, Any]) -> None:
        """Runs the kernel in Triton's interpreter, on CPU tensors given by name.

        The interpreter runs programs one after the other, so programs that wait for one another cannot run in one
        launch. Such programs are launched once per step (and phase), so that the end of a launch is their barrier.
        """
        with interpreter:
            self._interpret(tensors)

    def _interpret(self, tensors: Mapping[str, Any]) -> None:
        kernel = self.specialization.kernel
        arguments = {name: tensors.get(name.removesuffix("_ptr")) for name in kernel.arg_names if name.endswith("_ptr")}
        arguments |= self.specialization.constants() | self.scalars
        if self.config.splits == 1:
            kernel[(self.grid,)](**arguments)
            return
        forward = self.problem.direction == "fwd"
        phases = [{}] if forward else [{"PRODUCT_PHASE": False}, {"GATES_PHASE": False}]
        # the forward pass begins with a launch of zero steps, which writes the operands that the first step reads
        for t in range(-1 if forward else 0, self.problem.steps):
            for phase in phases:
                kernel[(self.grid,)](**arguments | phase | {"t_begin": max(t, 0), "t_end": t + 1})
