"""Clocks for calls that only enqueue work. No clock starts before the device is idle."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import jax

from benchmarks.results import first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


@dataclasses.dataclass(frozen=True)
class Spread:
    """The median and quartiles of repeated measurements, in seconds, and the number of measured calls."""

    median: float
    low: float
    high: float
    calls: int

    @classmethod
    def of(cls, seconds: list[float], calls: int) -> Spread:
        """Summarizes at least one measurement."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], calls)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, calls)


@dataclasses.dataclass(frozen=True)
class Clock:
    """The functions that time one candidate.

    Attributes:
      batch: runs a number of calls back to back and returns their seconds on the device.
      single: runs one call and returns the seconds until the host has its result. Without it, a turn of the candidate
        is one call, for which the clock prepares the device.
      method: describes in words what `batch` does.
    """

    batch: Callable[[int], float]
    single: Callable[[], float] | None
    method: str


def jax_clock(run: Callable[[], Any], turns: Callable[[], Any] | None = None, count: int = 1) -> Clock:
    """Returns a clock that enqueues calls back to back and synchronizes once.

    Dispatch overlaps with the work of the device, unless dispatch is the bottleneck.

    Args:
      run: enqueues one pass.
      turns: enqueues `count` passes in one program, for passes that are shorter than their dispatch; None means `run`.
      count: the number of passes in a call of `turns`.
    """
    turns = turns or run

    def batch(calls: int) -> float:
        programs = -(-calls // count)
        began = time.perf_counter()
        for _ in range(programs):
            result = turns()
        jax.block_until_ready(result)
        return (time.perf_counter() - began) * calls / (programs * count)

    def single() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - began

    return Clock(batch, single, "jitted calls, enqueued" + (f", of {count} passes in a loop" if count > 1 else ""))


REPLAYS = "CUDA graph replays, CUDA events"


def torch_clock(run: Callable[[], Any], *, own_graphs: bool = False) -> Clock:
    """Returns a clock that records CUDA events around replays of a CUDA graph.

    The events are around eager calls instead if the program cannot be captured, or if it replays CUDA graphs of its
    own.
    """
    import torch

    replay, method = (run, "eager calls, which replay its own CUDA graphs; CUDA events") if own_graphs else capture(run)

    def batch(calls: int) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(calls):
            replay()
        ended.record()
        torch.cuda.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def single() -> float:
        began = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    return Clock(batch, single, method)


def capture(run: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """Captures `run` in a CUDA graph. Returns its replay, or `run` if capture fails, and a text that says which."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    # The workspace of cuBLAS must be in memory of this graph. PyTorch keeps one workspace per stream, and all captures
    # use the same stream. Without this call, the workspace would be in memory of an earlier graph, which may be gone
    # when this graph is replayed (pytorch/pytorch#193402).
    torch._C._cuda_clearCublasWorkspaces()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # threads of JAX may call CUDA meanwhile
            run()
    except RuntimeError as error:
        torch.cuda.synchronize()
        # A capture that fails leaves PyTorch's random generator in the state of a capture, and one that ends resets it.
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros((), device="cuda")
        return run, f"eager calls, CUDA events; not captured: {first_line(error)}"
    kept = graph, run  # `run` keeps the arrays of the graph alive

    return lambda: kept[0].replay(), REPLAYS


def synchronize() -> None:
    """Waits for the work that PyTorch has enqueued on the GPU, if there is a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


# The number of calls that a host clock enqueues before it waits for the device. Their launches fit into the device's
# queue, which holds some 1000, so the host never waits for a free place in it.
ENQUEUED = 50


def host_clock(run: Callable[[], Any], wait: Callable[[], None]) -> Clock:
    """Returns a clock of host time: the time until a call returns, without the device work that it enqueues.

    `wait` waits for that device work.
    """

    def batch(calls: int) -> float:
        seconds = 0.0
        for first in range(0, calls, ENQUEUED):
            wait()
            began = time.perf_counter()
            for _ in range(first, min(first + ENQUEUED, calls)):
                run()
            seconds += time.perf_counter() - began
        wait()
        return seconds

    def single() -> float:
        began = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - began

    return Clock(batch, single, f"calls until they return, {ENQUEUED} at a time")


class DeviceStopwatch:
    """A stopwatch of CUDA events on the stream of one call.

    Before the call, the stream clears L2 and waits, which gives the host time to enqueue the call.
    """

    # Cycles that the device waits for the host. PyTorch's autograd takes up to half a millisecond to enqueue a backward
    # pass. XLA takes almost no time, because the callbacks are inside its program.
    _AHEAD, _AHEAD_INSIDE = 3_000_000, 300_000
    method = "CUDA events around each call, L2 cleared before"

    def __init__(self, ordinal: int) -> None:
        """Takes the GPU that the calls run on."""
        import torch

        cache = torch.cuda.get_device_properties(ordinal).L2_cache_size
        self._ordinal = ordinal
        self._buffer = torch.empty(cache, device=f"cuda:{ordinal}")  # four times as large as the cache
        self._sum = torch.empty((), device=f"cuda:{ordinal}")
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def _stream(self, context: Any) -> torch.cuda.Stream:
        import torch

        if context is None:
            return torch.cuda.current_stream(self._ordinal)
        return torch.cuda.ExternalStream(context.stream, self._ordinal)

    def begin(self, context: Any = None) -> None:
        """Clears L2 and starts on the stream of a callback's `context`; None means PyTorch's current one."""
        import torch

        stream = self._stream(context)
        with torch.cuda.stream(stream):
            self._buffer.zero_()
            torch.sum(self._buffer, 0, out=self._sum)  # the lines left in the cache need no writing back
            torch.cuda._sleep(self._AHEAD if context is None else self._AHEAD_INSIDE)
            self._events[0].record(stream)

    def end(self, context: Any = None) -> None:
        """Stops."""
        self._events[1].record(self._stream(context))

    def seconds(self) -> float:
        """Returns the seconds between `begin` and `end`."""
        import torch

        torch.cuda.synchronize(self._ordinal)
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class HostStopwatch:
    """A stopwatch of host time, for machines without a GPU."""

    method = "the host's time"

    def __init__(self) -> None:
        self._times = [0.0, 0.0]

    def begin(self, context: Any = None) -> None:
        """Starts."""
        self._times[0] = time.perf_counter()

    def end(self, context: Any = None) -> None:
        """Stops."""
        self._times[1] = time.perf_counter()

    def seconds(self) -> float:
        """Returns the seconds between `begin` and `end`."""
        return self._times[1] - self._times[0]


Stopwatch = DeviceStopwatch | HostStopwatch


def stopwatch_clock(run: Callable[[], Any], stopwatch: Stopwatch) -> Clock:
    """Returns a clock of calls that start and stop a stopwatch themselves."""

    def batch(calls: int) -> float:
        seconds = 0.0
        for _ in range(calls):
            run()
            seconds += stopwatch.seconds()
        return seconds

    return Clock(batch, None, stopwatch.method)


def interleave(
    clocks: Mapping[str, Clock], *, rounds: int, seconds: float, progress: Callable[[str], None] = lambda _: None
) -> dict[str, tuple[Spread, Spread | None] | Exception]:
    """Times all candidates in turn, `rounds` times over, each for about `seconds` in all.

    Returns:
      By name, the spreads over rounds of two times of a call: on the device, and until the host has its result, if its
      clock tells that. A candidate that raises, because the memory of all together is not enough, for example, has the
      exception instead.
    """
    device: dict[str, list[float]] = {name: [] for name in clocks}
    wall: dict[str, list[float]] = {name: [] for name in clocks}
    calls: dict[str, int] = {}
    errors: dict[str, Exception] = {}

    def prepare(name: str, clock: Clock) -> None:
        if clock.single is None:
            clock.batch(1)
            calls[name] = 1
            return
        clock.batch(2)
        estimate = clock.batch(2) / 2
        calls[name] = max(math.ceil(seconds / rounds / max(estimate, 1e-7)), 1)

    def take_turn(name: str, clock: Clock) -> None:
        if clock.single is not None:
            clock.batch(1)  # warm up after another candidate's turn
        device[name].append(clock.batch(calls[name]) / calls[name])
        if clock.single is not None:
            wall[name].append(clock.single())
        progress(name)

    for step in (prepare, *[take_turn] * rounds):
        for name, clock in clocks.items():
            if name not in errors:
                try:
                    step(name, clock)
                except Exception as error:
                    errors[name] = error.with_traceback(None)  # its frames would keep arrays alive
    return {
        name: errors.get(name)
        or (Spread.of(device[name], rounds * calls[name]), Spread.of(wall[name], rounds) if wall[name] else None)
        for name in clocks
    }
