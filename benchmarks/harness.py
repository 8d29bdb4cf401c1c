"""Turns a case and its providers into rows: prepares all, checks each against the oracle, and times them in turn."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from benchmarks import cases, first_call, timing
from benchmarks.oracle import Oracle, check
from benchmarks.providers import Inputs, JaxPass, Ready
from benchmarks.results import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.cases import Case
    from benchmarks.providers import Provider
    from benchmarks.results import Status
    from benchmarks.settings import Settings

T = TypeVar("T")

# A pass of JAX is timed in a loop inside one program if at least two passes take less than `_LOOPED_SECONDS`. The loop
# has as many passes as fit into that time, but at most `_MOST_PASSES`. A single short pass would measure the host,
# which takes some 0.2 ms to dispatch a program. Passes of PyTorch are captured in CUDA graphs, where PyTorch can.
_LOOPED_SECONDS = 5e-3
_MOST_PASSES = 64
# The number of cases whose programs are compiled side by side.
_AT_ONCE = 4


class FirstCalls:
    """Records which providers finish a slow first call within the time limit.

    Such a call is first tried in a separate process, because it cannot be interrupted.
    """

    def __init__(self, settings: Settings) -> None:
        self._limit, self._profile = settings.first_call_limit, settings.profile
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
        if result.status == "unfinished":
            self._unfinished[provider.name] = case
        if result.status != "measured":
            return result.status, result.reason
        self._started.add(key)
        return None


def excluded(providers: Sequence[Provider], case: Case, first_calls: FirstCalls) -> dict[str, Row]:
    """Returns, by name, rows of the providers that cannot run a case, which say why.

    Call it while nothing else runs: it makes first calls that have a time limit.
    """
    rows: dict[str, Row] = {}
    for provider in providers:
        if problem := provider.excluded(case) or first_calls.problem(provider, case):
            status, reason = problem
            rows[provider.name] = dataclasses.replace(provider.row(case), status=status, reason=reason)
    return rows


def begin(
    providers: Sequence[Provider], case: Case, inputs: Inputs, pool: concurrent.futures.Executor, *, step: bool = False
) -> Callable[[], tuple[dict[str, Ready], dict[str, Row]]]:
    """Builds providers, and begins to compile the programs of JAX in `pool`.

    With `step`, the case has one step, and PyTorch's providers run only their forward pass.

    Returns:
      A function that waits for the programs. It returns the providers that are ready, and rows of those that failed.
    """
    ready: dict[str, Ready] = {}
    rows: dict[str, Row] = {}
    pending: dict[Provider, tuple[concurrent.futures.Future[Any], JaxPass]] = {}
    for provider in providers:
        try:
            built = provider.build(case, inputs)
            if isinstance(built, Ready):
                ready[provider.name] = forward_alone(built, case) if step else built
            else:
                pending[provider] = compile_in(pool, functools.partial(built.jitted.lower, *built.args)), built
        except Exception as error:  # a provider that fails becomes a row, and the run goes on
            rows[provider.name] = provider.row(case).failed(error)

    def finish() -> tuple[dict[str, Ready], dict[str, Row]]:
        for provider, (future, built) in pending.items():
            try:
                compiled = future.result()
            except Exception as error:
                rows[provider.name] = provider.row(case).failed(error)
            else:
                run, loop = functools.partial(compiled, *built.args), functools.partial(trace_loop, built)
                ready[provider.name] = Ready(run, built.canonical, compiled=compiled, loop=loop)
        return ready, rows

    return finish


def forward_alone(ready: Ready, case: Case) -> Ready:
    """Returns the forward pass alone of a provider of PyTorch, for a case of one step.

    With one step, batch-first and time-first outputs differ only in the place of an axis of length 1.
    """
    assert ready.forward is not None
    shape = (1, case.B, case.H)
    return dataclasses.replace(ready, run=ready.forward, canonical=lambda ys: {"ys": ys.reshape(shape)})


def prepare(
    providers: Sequence[Provider], case: Case, inputs: Inputs, settings: Settings, *, step: bool = False
) -> tuple[dict[str, Ready], dict[str, Row]]:
    """Builds and compiles the providers that can run, and returns them with rows that say why the others cannot."""
    rows = excluded(providers, case, FirstCalls(settings))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        finish = begin([p for p in providers if p.name not in rows], case, inputs, pool, step=step)
    ready, broken = finish()
    return ready, rows | broken


def clock(ready: Ready) -> timing.Clock:
    """Returns the clock for the provider's framework."""
    if ready.compiled is None:
        return timing.torch_clock(ready.run, own_graphs=ready.own_graphs)
    return timing.jax_clock(ready.run)


def passes(ready: Ready) -> int:
    """Returns the number of passes in a timed program: more than 1 for a short pass of JAX."""
    if ready.loop is None:
        return 1
    return max(1, min(int(_LOOPED_SECONDS / (clock(ready).batch(3) / 3)), _MOST_PASSES))


def repeated(run: Callable[[Any], Any], weights: Any, count: int) -> Any:
    """Runs `count` passes in a loop, each dependent on the previous one, and returns the last result."""

    def turn(_: Any, before: tuple[Any, Any]) -> tuple[Any, Any]:
        weights, _ = before
        after = run(weights)
        first = jax.tree.leaves(after)[0].ravel()[0]
        # make each pass depend on the previous one, so that XLA cannot hoist any of it out of the loop; the weights
        # are carried by the loop, as an agent's are, because XLA does not fuse the addition of a bias into the
        # product if the loop computes that bias first
        return jax.tree.map(lambda w: w + (0 * first).astype(w.dtype), weights), after

    zeros = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), jax.eval_shape(run, weights))
    return jax.lax.fori_loop(0, count, turn, (weights, zeros))[1]


def trace_loop(built: JaxPass, count: int) -> Callable[[], Callable[[], Any]]:
    """Traces `count` passes, each dependent on the previous one, as one program that returns the last result.

    Returns:
      A function that compiles the program, and returns the function that runs it.
    """

    def loop(weights: Any, *others: Any) -> Any:
        return repeated(lambda weights: built.jitted(weights, *others), weights, count)

    lowered = jax.jit(loop).lower(*built.args)
    return lambda: functools.partial(lowered.compile(), *built.args)


def checked_clocks(
    providers: Sequence[Provider], ready: Mapping[str, Ready], truth: Oracle
) -> tuple[dict[str, Row], dict[str, timing.Clock]]:
    """Checks passes and, of those that are short, also the programs of many passes that are timed in their place.

    Those programs are compiled side by side.

    Args:
      providers: the providers to check, all of them ready.
      ready: by name, the providers that are ready.
      truth: the oracle of the case.

    Returns:
      By name, the rows, each with the larger error of the two checks, and the clocks of those that are to be timed.
    """
    # nothing is compiled before the passes of all providers are timed to count them
    rows = {provider.name: check(provider, ready[provider.name], truth) for provider in providers}
    clocks: dict[str, timing.Clock] = {}

    @contextlib.contextmanager
    def row_if_it_fails(provider: Provider) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            rows[provider.name] = provider.row(truth.case).failed(error)

    counts: dict[Provider, int] = {}
    for provider in providers:
        if rows[provider.name].status == "measured":
            with row_if_it_fails(provider):
                counts[provider] = passes(ready[provider.name])
    programs: dict[Provider, concurrent.futures.Future[Callable[[], Any]] | None] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for provider, count in counts.items():
            loop = ready[provider.name].loop
            with row_if_it_fails(provider):
                programs[provider] = pool.submit(loop(count)) if loop is not None and count > 1 else None
    for provider, program in programs.items():
        name, once = provider.name, ready[provider.name]
        with row_if_it_fails(provider):
            if program is None:
                clocks[name] = clock(once)
                continue
            many = program.result()
            again = check(provider, dataclasses.replace(once, run=many), truth)
            if again.status == "measured":
                clocks[name] = timing.jax_clock(once.run, many, counts[provider])
                again = max(rows[name], again, key=lambda row: row.error or 0.0)
            rows[name] = again
    return rows, clocks


def time_cases(
    chosen: Sequence[Case],
    providers: Sequence[Provider],
    settings: Settings,
    targets: Callable[[Case], dict[str, float]] = lambda _: {},
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Row]]:
    """Yields, for each case, a row for every provider, in order: milliseconds of a pass.

    `targets` returns those of a case, keyed by provider. The programs of several cases are compiled side by side, and
    nothing is compiled while a pass is timed.
    """
    first_calls = FirstCalls(settings)
    for several in in_groups(chosen, _AT_ONCE):
        begun = []
        rows = {case: excluded(providers, case, first_calls) for case in several}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for case in several:
                progress(f"{case}, compiling")
                inputs = Inputs(cases.make_inputs(case))
                able = [provider for provider in providers if provider.name not in rows[case]]
                finish = begin(able, case, inputs, pool)
                truth = Oracle(case, inputs.jax)
                truth.compile({provider.dtype for provider in able}, pool)
                begun.append((case, able, finish, truth))
                del inputs
        while begun:
            case, able, finish, truth = begun.pop(0)
            progress(str(case))
            rows_of_case = rows[case] | _time_case(able, *finish(), truth, settings, progress)
            aims = targets(case)
            yield [
                dataclasses.replace(rows_of_case[p.name], target=aims.get(p.name), note=note(p, case))
                for p in providers
            ]
            del finish, truth
            release()


def _time_case(
    providers: Sequence[Provider], ready: dict[str, Ready], rows: dict[str, Row], truth: Oracle, settings: Settings,
    progress: Callable[[str], None],
) -> dict[str, Row]:  # fmt: skip
    checked, clocks = checked_clocks([provider for provider in providers if provider.name in ready], ready, truth)
    rows |= checked
    truth.forget()
    time_rows(rows, clocks, settings, progress, scale=1e3)
    return rows


def compile_in(pool: concurrent.futures.Executor, lower: Callable[[], Any]) -> concurrent.futures.Future[Any]:
    """Traces a program here, and compiles it in `pool`. The result is the program, or raises what either has raised."""
    try:
        return pool.submit(lower().compile)
    except Exception as error:
        broken: concurrent.futures.Future[Any] = concurrent.futures.Future()
        broken.set_exception(error)
        return broken


def in_groups(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yields `size` items at a time, and at the end those that are left."""
    for first in range(0, len(items), size):
        yield items[first : first + size]


def time_steps(
    case: Case, providers: Sequence[Provider], settings: Settings, progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    """Returns a row for every provider, all of PyTorch: microseconds until a call of one step returns.

    The calls compute no gradients. The note gives the device time, and says if it exceeds the host time, i.e. if the
    device is the bottleneck.
    """
    inputs = Inputs(cases.make_inputs(case))
    ready, rows = prepare(providers, case, inputs, settings, step=True)
    if ready:
        able = [provider for provider in providers if provider.name in ready]
        rows |= _time_ready_steps(ready, able, Oracle(case, inputs.jax), settings, progress)
    return [dataclasses.replace(rows[provider.name], unit="us") for provider in providers]


def _time_ready_steps(
    ready: Mapping[str, Ready], providers: Sequence[Provider], truth: Oracle, settings: Settings,
    progress: Callable[[str], None],
) -> dict[str, Row]:  # fmt: skip
    """Times the providers that are ready, and returns their rows by name."""
    import torch

    rows: dict[str, Row] = {}
    host: dict[str, timing.Clock] = {}
    device: dict[str, timing.Clock] = {}
    with torch.no_grad():
        for provider in providers:
            name, step = provider.name, ready[provider.name]
            rows[name] = check(provider, step, truth, names=("ys",))
            if rows[name].status != "measured":
                continue
            try:
                device[f"{name}, device"] = clock(step)
                host[name] = timing.host_clock(step.run, timing.synchronize)
            except Exception as error:
                rows[name] = provider.row(truth.case).failed(error)
        spreads = timing.interleave(host | device, rounds=settings.rounds, seconds=settings.seconds, progress=progress)
    for provider in (provider for provider in providers if provider.name in host):
        name = provider.name
        on_host, on_device = spreads[name], spreads[f"{name}, device"]
        if isinstance(on_host, Exception):
            rows[name] = rows[name].failed(on_host)
            continue
        if isinstance(on_device, Exception):
            rows[name] = rows[name].failed(on_device)
            continue
        returned, wall = on_host
        notes = [note(provider, truth.case)]
        if device[f"{name}, device"].method == timing.REPLAYS:  # the clock of eager calls may measure the host
            seconds = on_device[0].median
            notes.append(f"device {1e6 * seconds:.3g} us" + (", the bottleneck" if seconds > returned.median else ""))
        row = dataclasses.replace(rows[name], note="; ".join(filter(None, notes)))
        rows[name] = timed(row, returned, wall, scale=1e6, method=host[name].method)
    return rows


def timed(row: Row, spread: timing.Spread, wall: timing.Spread | None, *, scale: float, method: str) -> Row:
    """Returns `row` with its figures; `scale` converts seconds to its unit."""
    return dataclasses.replace(
        row, value=scale * spread.median, low=scale * spread.low, high=scale * spread.high, calls=spread.calls,
        wall=None if wall is None else scale * wall.median, method=method,
    )  # fmt: skip


def time_rows(
    rows: dict[str, Row], clocks: Mapping[str, timing.Clock], settings: Settings, progress: Callable[[str], None], *,
    scale: float, method: str = "",
) -> None:  # fmt: skip
    """Times the clocks in turn, and puts the figures of each one into the row of its name.

    `scale` converts seconds to the unit of the rows. `method` says how they were measured; the default is the clock's.
    """
    spreads = timing.interleave(clocks, rounds=settings.rounds, seconds=settings.seconds, progress=progress)
    for name, spread in spreads.items():
        if isinstance(spread, Exception):
            rows[name] = rows[name].failed(spread)
        else:
            rows[name] = timed(rows[name], *spread, scale=scale, method=method or clocks[name].method)


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
    """Frees what is no longer referenced, and returns PyTorch's cached memory to the device, so that JAX can use it."""
    import gc
    import sys

    gc.collect()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()
