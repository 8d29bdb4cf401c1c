"""Turns a case and its providers into rows: prepares all, checks each against the oracle, and times them in turn."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax

from benchmarks import cases, first_call, oracle, timing
from benchmarks.oracle import Oracle
from benchmarks.providers import PROVIDERS, Inputs, JaxPass, TorchPass
from benchmarks.results import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.cases import Case
    from benchmarks.providers import Provider
    from benchmarks.results import Status
    from benchmarks.settings import Settings


# A JAX pass shorter than half of this is timed in a loop inside one program, which takes about this long. Otherwise the
# host would be timed, which takes some 0.2 ms to dispatch a program. PyTorch's passes replay CUDA graphs.
_LOOPED_SECONDS = 5e-3
_MOST_PASSES = 64


@dataclasses.dataclass
class Ready:
    """A provider that is ready to run a case.

    Attributes:
      run: enqueues one pass and returns its result.
      canonical: converts that result to the names and the layout of the oracle.
      compiled: XLA's compiled program, for a JAX provider.
      own_graphs: as in `TorchPass`.
      loop: compiles a number of passes as one program, for a JAX provider.
    """

    run: Callable[[], Any]
    canonical: Callable[[Any], Any]
    compiled: Any = None
    own_graphs: bool = False
    loop: Callable[[int], Callable[[], Any]] | None = None

    @classmethod
    def of(cls, built: TorchPass) -> Ready:
        """Wraps a pass of PyTorch."""
        return cls(built.run, built.canonical, own_graphs=built.own_graphs)

    @classmethod
    def forward(cls, built: TorchPass, case: Case) -> Ready:
        """Wraps the forward pass alone, for a case of one step.

        With one step, batch-first and time-first outputs differ only in the place of an axis of length 1.
        """
        shape = (1, case.B, case.H)
        return cls(built.forward, lambda ys: {"ys": ys.reshape(shape)}, own_graphs=built.own_graphs)

    def clock(self) -> timing.Clock:
        """Returns the clock for the provider's framework."""
        if self.compiled is None:
            return timing.torch_clock(self.run, own_graphs=self.own_graphs)
        return timing.jax_clock(self.run)

    def looped(self) -> tuple[Ready, int]:
        """Returns a program of many passes and their number for a short pass of JAX, otherwise this object and 1."""
        if self.loop is None:
            return self, 1
        count = min(int(_LOOPED_SECONDS / (self.clock().batch(3) / 3)), _MOST_PASSES)
        return (dataclasses.replace(self, run=self.loop(count)), count) if count > 1 else (self, 1)


class FirstCalls:
    """A record of which providers with slow first calls finish them in time.

    Such a call is first tried in a separate process, because it cannot be interrupted.
    """

    def __init__(self, limit: float, profile: str = "") -> None:
        self._limit, self._profile = limit, profile
        self._started: set[tuple[str, str, int]] = set()
        self._unfinished: dict[str, Case] = {}

    def problem(self, provider: Provider, case: Case) -> tuple[Status, str] | None:
        """Returns the status and reason of a row if the first call fails or does not finish in time, else None."""
        key = (provider.name, case.cell, case.H)
        if not provider.bounded or key in self._started:
            return None
        slow = self._unfinished.get(provider.name)
        if slow is not None and case.H >= slow.H:
            return "skipped", f"its first call at {slow}, which is no wider, was unfinished after {self._limit:g} s"
        result = first_call.run(provider.name, case, limit=self._limit, profile=self._profile)
        if result.reason == first_call.UNFINISHED:
            self._unfinished[provider.name] = case
            return "unfinished", f"first call unfinished after {self._limit:g} s"
        if result.reason:
            return "failed", result.reason
        self._started.add(key)
        return None


def prepare(
    providers: Sequence[Provider], case: Case, inputs: Inputs, first_calls: FirstCalls, *, step: bool = False
) -> tuple[dict[str, Ready], dict[str, Row]]:
    """Builds and compiles the providers that can run, and returns them with rows that say why the others cannot.

    JAX programs are compiled in parallel. With `step`, the case has one step, and PyTorch's providers run only their
    forward pass.
    """
    ready: dict[str, Ready] = {}
    rows: dict[str, Row] = {}
    lowered: dict[str, tuple[Any, JaxPass]] = {}
    for provider in providers:
        row = Row(str(case), provider.name, ours=provider.ours)
        if reason := provider.unavailable():
            rows[provider.name] = dataclasses.replace(row, status="unavailable", reason=reason)
        elif reason := provider.unsupported(case):
            rows[provider.name] = dataclasses.replace(row, status="unsupported", reason=reason)
        elif problem := first_calls.problem(provider, case):
            rows[provider.name] = dataclasses.replace(row, status=problem[0], reason=problem[1])
        else:
            try:
                built = provider.build(case, inputs)
                if isinstance(built, TorchPass):
                    ready[provider.name] = Ready.of(built) if not step else Ready.forward(built, case)
                else:
                    lowered[provider.name] = built.jitted.lower(*built.args), built
            except Exception as error:  # a provider that fails becomes a row, and the run goes on
                rows[provider.name] = failed(row, error)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = {name: pool.submit(program.compile) for name, (program, _) in lowered.items()}
    for name, future in futures.items():
        built = lowered[name][1]
        try:
            compiled = future.result()
        except Exception as error:
            rows[name] = failed(Row(str(case), name, ours=PROVIDERS[name].ours), error)
        else:
            run = functools.partial(compiled, *built.args)
            ready[name] = Ready(run, built.canonical, compiled, loop=functools.partial(compile_loop, built))
    return ready, rows


def compile_loop(built: JaxPass, count: int) -> Callable[[], Any]:
    """Compiles `count` passes, each dependent on the previous one, as one program that returns the last result."""

    def loop(weights: Any, *others: Any) -> Any:
        def turn(_: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
            weights, _ = before
            after = built.jitted(weights, *others)
            first = jax.tree.leaves(after)[0].ravel()[0]
            # make each pass depend on the previous one, so that XLA cannot hoist any of it out of the loop; the weights
            # are carried by the loop, as an agent's are, because XLA does not fuse the addition of a bias into the
            # product if the loop computes that bias first
            return jax.tree.map(lambda w: w + (0 * first).astype(w.dtype), weights), after

        like = jax.eval_shape(built.jitted, weights, *others)
        zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), like)
        return jax.lax.fori_loop(0, count, turn, (weights, zeros))[1]

    return functools.partial(jax.jit(loop).lower(*built.args).compile(), *built.args)


def check(
    provider: Provider, ready: Ready, truth: Oracle, *, names: Sequence[str] | None = None
) -> Row | tuple[str, float]:
    """Runs one pass and compares all outputs and gradients, or only `names`, with the oracle.

    Returns the name of the array with the largest relative error and that error, or a row that says why the provider is
    not timed.
    """
    row = Row("", provider.name, ours=provider.ours)
    try:
        for _ in range(2 if ready.own_graphs else 0):
            ready.run()  # the first call warms up, the second records the graphs
        got = to_jax(ready.canonical(ready.run()))
        want = truth.want(provider.dtype, provider.resets)
        errors = oracle.errors(got, want if names is None else {name: want[name] for name in names})
    except Exception as error:
        return failed(row, error)
    largest = {name: rms for name, (rms, _) in errors.items()}
    name = max(largest, key=lambda name: float("inf") if largest[name] != largest[name] else largest[name])
    limit = oracle.TOLERANCE[provider.precision]
    if not largest[name] <= limit:
        reason = f"not timed: {name} is off by {largest[name]:.2g}, more than {limit:g}"
        return dataclasses.replace(row, status="wrong", reason=reason, error=largest[name], error_of=name)
    return name, largest[name]


def checked_clock(provider: Provider, one: Ready, truth: Oracle) -> Row | tuple[timing.Clock, str, float]:
    """Checks a pass and, if it is short, also the program of many passes that is timed in its place.

    Returns the clock followed by the worse result of `check`, or the row of `check`.
    """
    checked = check(provider, one, truth)
    if isinstance(checked, Row):
        return checked
    try:
        if one.compiled is None:
            return one.clock(), *checked
        many, count = one.looped()
        again = check(provider, many, truth) if count > 1 else checked
        if isinstance(again, Row):
            return again
        return timing.jax_clock(one.run, many.run, count), *max(checked, again, key=lambda one: one[1])
    except Exception as error:
        return failed(Row("", provider.name, ours=provider.ours), error)


def to_jax(arrays: dict[str, Any]) -> dict[str, jax.Array]:
    """Returns JAX arrays unchanged, and converts PyTorch tensors to JAX arrays that share their memory."""
    if all(isinstance(x, jax.Array) for x in arrays.values()):
        return arrays
    synchronize()
    return {name: jax.dlpack.from_dlpack(x.detach().contiguous()) for name, x in arrays.items()}


def synchronize() -> None:
    """Waits for the work that PyTorch has enqueued on the GPU, if there is a GPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_case(
    case: Case,
    providers: Sequence[Provider],
    settings: Settings,
    first_calls: FirstCalls,
    targets: dict[str, float],
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Returns a row for every provider, in order: milliseconds of a pass. `targets` are keyed by provider."""
    inputs = Inputs(cases.make_inputs(case))
    ready, rows = prepare(providers, case, inputs, first_calls)
    truth = Oracle(case, inputs.jax)
    clocks: dict[str, timing.Clock] = {}
    errors: dict[str, Any] = {}
    for provider in providers:
        if provider.name not in ready:
            continue
        checked = checked_clock(provider, ready[provider.name], truth)
        if isinstance(checked, Row):
            rows[provider.name] = dataclasses.replace(checked, case=str(case))
        else:
            clocks[provider.name], *errors[provider.name] = checked
    truth.forget()
    spreads = timing.interleave(clocks, rounds=settings.rounds, seconds=settings.seconds, progress=progress)
    for provider in providers:
        if provider.name in spreads:
            device, wall = spreads[provider.name]
            worst, size = errors[provider.name]
            rows[provider.name] = timed(
                Row(str(case), provider.name, ours=provider.ours, error=size, error_of=worst),
                device, wall, scale=1e3, method=clocks[provider.name].method,
            )  # fmt: skip
    return [dataclasses.replace(rows[p.name], target=targets.get(p.name), note=note(p, case)) for p in providers]


def time_steps(
    case: Case,
    providers: Sequence[Provider],
    settings: Settings,
    first_calls: FirstCalls,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Returns a row for every provider, all of PyTorch: microseconds until a call of one step returns.

    The calls compute no gradients. The note gives the device time, and says if it exceeds the host time, i.e. if the
    device is the bottleneck.
    """
    inputs = Inputs(cases.make_inputs(case))
    ready, rows = prepare(providers, case, inputs, first_calls, step=True)
    if not ready:
        return [rows[provider.name] for provider in providers]
    import torch

    truth = Oracle(case, inputs.jax)
    host, device, errors = {}, {}, {}
    with torch.no_grad():
        for provider in (provider for provider in providers if provider.name in ready):
            name, one = provider.name, ready[provider.name]
            checked = check(provider, one, truth, names=("ys",))
            if isinstance(checked, Row):
                rows[name] = dataclasses.replace(checked, case=str(case))
                continue
            try:
                device[f"{name}, device"] = one.clock()
            except Exception as error:
                rows[name] = failed(Row(str(case), name, ours=provider.ours), error)
                continue
            host[name], errors[name] = timing.host_clock(one.run, synchronize), checked
        spreads = timing.interleave(host | device, rounds=settings.rounds, seconds=settings.seconds, progress=progress)
    for provider in (provider for provider in providers if provider.name in host):
        name = provider.name
        (returned, wall), clock = spreads[name], device[f"{name}, device"]
        notes = [note(provider, case)]
        if clock.method == timing.REPLAYS:  # the clock of eager calls may measure the host
            seconds = spreads[f"{name}, device"][0].median
            notes.append(f"device {1e6 * seconds:.3g} us" + (", the bottleneck" if seconds > returned.median else ""))
        row = Row(
            str(case), name, ours=provider.ours, unit="us", error=errors[name][1], error_of=errors[name][0],
            note="; ".join(filter(None, notes)),
        )  # fmt: skip
        rows[name] = timed(row, returned, wall, scale=1e6, method=host[name].method)
    return [dataclasses.replace(rows[provider.name], unit="us") for provider in providers]


def timed(row: Row, device: timing.Spread, wall: timing.Spread, *, scale: float, method: str) -> Row:
    """Returns `row` with its figures; `scale` converts seconds to its unit."""
    return dataclasses.replace(
        row, value=scale * device.median, low=scale * device.low, high=scale * device.high, calls=device.calls,
        wall=scale * wall.median, method=method,
    )  # fmt: skip


def time_rows(
    rows: dict[str, Row], clocks: Mapping[str, timing.Clock], settings: Settings, progress: Callable[[str], None], *,
    scale: float, method: str = "",
) -> None:  # fmt: skip
    """Times in turn, and puts the figures of each clock into the row of its name.

    `scale` converts seconds to the unit of the rows. `method` says how they were measured; the default is the clock's.
    """
    spreads = timing.interleave(clocks, rounds=settings.rounds, seconds=settings.seconds, progress=progress)
    for name, (device, wall) in spreads.items():
        rows[name] = timed(rows[name], device, wall, scale=scale, method=method or clocks[name].method)


def failed(row: Row, error: Exception) -> Row:
    """Returns `row` marked as failed by `error`."""
    return dataclasses.replace(row, status="failed", reason=timing.first_line(error))


def note(provider: Provider, case: Case) -> str:
    """Returns what a reader should know about a provider's figure in this case."""
    return "" if provider.resets or not case.reset_rate else "without resets"


def peak_bytes(ready: Ready) -> tuple[int, str]:
    """Returns the device memory of a pass in bytes, including arguments and results, and how it was measured."""
    if ready.compiled is not None:
        sizes = ready.compiled.memory_analysis()
        total = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
        return total - sizes.alias_size_in_bytes, "XLA: arguments, results and temporaries of the compiled pass"
    import torch

    ready.run()
    release()
    torch.cuda.reset_peak_memory_stats()
    ready.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated over a pass"


def release() -> None:
    """Returns the memory of the previous case to the device, so that either framework can use it."""
    import gc
    import sys

    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()
