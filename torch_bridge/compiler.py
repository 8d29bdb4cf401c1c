"""Compiles kernels and loads them onto devices: in parallel, each once, and safely across a fork."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource

from torch_bridge.kernels.loops import streamed
from torch_bridge.locks import Lock, Semaphore

POINTER_TYPES = {
    "float64": "*fp64", "float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16",
    "bool": "*i8", "int8": "*i8", "int16": "*i16", "int32": "*i32", "int64": "*i64",
    "uint8": "*u8", "uint16": "*u16", "uint32": "*u32", "uint64": "*u64",
}  # fmt: skip
SCALARS = {
    "T": "i32", "B": "i64", "Q": "i64", "pieces": "i32", "tiles": "i32", "items": "i32", "t_begin": "i32",
    "t_end": "i32", "R": "i64", "programs": "i32", "epsilon": "fp32", "rows": "i32", "shard_rows": "i32",
}  # fmt: skip

# Held while the interpreter runs, because it patches triton.language for the whole process.
interpreter_lock = Lock()


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU, because `TRITON_INTERPRET` was 1 at their import."""
    return not isinstance(streamed.forward_kernel, triton.runtime.JITFunction)


# Held while a kernel is parsed: before Python 3.11.8, `ast.parse` fails if another thread parses at the same time
# (CPython issue 106905).
_parsing = Lock()


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


_hashing = Lock()


def hash_triton() -> None:
    """Computes the hash of all of Triton, once: Triton needs it before it compiles anything, and it takes 0.4 s."""
    with _hashing:
        triton.runtime.cache.triton_key()


def begin_to_hash_triton() -> None:
    """Starts `hash_triton` in a thread, unless an earlier process has stored kernels, which may be all that are needed.

    Without stored kernels, one will be compiled, and the hash takes as long as tracing.
    """
    with contextlib.suppress(OSError), os.scandir(triton.knobs.cache.dir) as stored:
        if any(stored):
            return
    run_in_background(hash_triton)


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
    hash_triton()
    source = (_GluonSource if kernel.is_gluon() else _Source)(kernel, signature, dict(constants), attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True, **options}
    )


def max_registers(num_warps: int, side_by_side: int = 1) -> int:
    """Returns the maximum registers per thread for `side_by_side` resident programs of `num_warps` warps per SM."""
    return min(255, 65536 // (32 * num_warps * side_by_side))


def load_kernel(compiled: CompiledKernel, ordinal: int | None) -> CompiledKernel:
    """Loads a compiled kernel onto a device; does nothing if `ordinal` is None."""
    if ordinal is None:
        return compiled
    import torch

    with torch.cuda.device(ordinal):
        compiled._init_handles()
    return compiled


# Kernels that are loaded or being loaded, by the device, the compiling function and its arguments.
_loading: dict[tuple[Any, ...], Future[CompiledKernel]] = {}
_loading_lock = Lock()


@functools.cache
def _compilers() -> Semaphore:
    """Returns the semaphore that bounds the number of compiling threads.

    Threads do run in parallel, because the compiler is outside of Python most of the time.
    """
    return Semaphore(min(8, _cores()))


def _cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_in_background(function: Callable[..., Any], *arguments: Any) -> Future[Any] | None:
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


def begin_loading(ordinal: int | None, compile: Callable[..., CompiledKernel], *arguments: Hashable) -> None:
    """Starts to compile a kernel and to load it onto one device, in a thread, unless that is done or in progress.

    If `ordinal` is None, the kernel is compiled and not loaded.
    """
    key = ordinal, compile, *arguments
    with _loading_lock:
        if key not in _loading and (begun := run_in_background(lambda: load_kernel(compile(*arguments), ordinal))):
            _loading[key] = begun


def is_loaded(ordinal: int, compile: Callable[..., CompiledKernel], *arguments: Hashable) -> bool:
    """Whether `ensure_loaded` would return at once, because the kernel is compiled and loaded."""
    with _loading_lock:
        there = _loading.get((ordinal, compile, *arguments))
    return there is not None and there.done() and not there.cancelled() and there.exception() is None


def ensure_loaded(ordinal: int | None, compile: Callable[..., CompiledKernel], *arguments: Hashable) -> CompiledKernel:
    """Returns a kernel, compiled and loaded onto one device at most once: waits for a thread's job or does it here.

    If `ordinal` is None, the kernel is compiled and not loaded.

    A job that is still queued is done here, ahead of queued jobs whose results may never be needed. A job that failed
    in a thread is done here again, because its cause may have passed. So is a job whose thread was interrupted while
    this call waited for it: an interrupt is meant for one thread. An exception is kept only for callers that already
    wait for the job: its traceback references the frames that it was raised through, and their arrays.
    """
    key = ordinal, compile, *arguments
    while True:
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
            if isinstance(error, Exception) or there is mine or not there.done() or there.exception() is not error:
                raise
        finally:
            del mine, there  # both reference the exception, whose traceback references this frame


if hasattr(os, "register_at_fork"):  # the threads that compile are the parent's alone
    os.register_at_fork(after_in_child=_loading.clear)
