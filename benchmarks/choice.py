"""Measures whether `implementation=None` picks the faster implementation, at shapes of RL code.

Each case is timed under the default, under "triton" and under "xla". The target of the default is the better of the
two times plus `TOLERANCE`. Where the default lowers to the program of one implementation, it gets that program's time,
because two timings of one program differ by some percent. Otherwise one direction is a kernel and the other a scan, and
the default is timed by itself.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from benchmarks import cases, harness, oracle, timing
from benchmarks.providers import Inputs
from benchmarks.results import Row
from torch_bridge.cells import CELLS as SPECS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.cases import ChoiceCase
    from benchmarks.settings import Settings

    Arrays = dict[str, jax.Array]

# The fraction by which the default may be slower than the better implementation.
TOLERANCE = 0.03
DEFAULT, IMPLEMENTATIONS = "default", ("triton", "xla")
# Passes run in a loop inside one program, so that the overhead of dispatch does not count. The loop takes about
# LOOPED_SECONDS under "xla", whose time is estimated as STEP_SECONDS (some 20 us) per step plus the matrix products at
# FLOPS operations per second.
LOOPED_SECONDS, STEP_SECONDS, FLOPS = 0.02, 2e-5, 1e14
MOST_PASSES = 64
# The number of cases whose programs are compiled in parallel.
AT_ONCE = 12


def make_arrays(case: ChoiceCase) -> Arrays:
    """Returns operands, resets and the cotangent of the outputs, and a reset state if the case has compiled."""
    same = cases.Case(case.cell, case.B, case.T, case.H, models=case.models, episode=case.episode)
    arrays = cases.make_inputs(same)
    if case.reset_state:
        names = ("reset_h",) if case.cell == "gru" else ("reset_c", "reset_h")
        arrays |= {name: arrays["h0"][..., 0, :] for name in names}
    return Inputs(arrays).jax(case.dtype, resets=True)


def run(case: ChoiceCase, implementation: Any, arrays: Arrays) -> Arrays:
    """Returns the outputs and, if the case has gradients, those of weights, inputs and reset states."""
    options: dict[str, Any] = {"implementation": implementation, "precision": case.precision}
    return oracle.run_cell(case.cell, arrays, gradients=case.gradients, **options)


def one_pass(case: ChoiceCase, implementation: str | None) -> Callable[[Arrays], Arrays]:
    """Returns the pass of a case, mapped over its models if there are any."""
    alone = functools.partial(run, case, implementation)
    return jax.vmap(alone) if case.models else alone


def passes(case: ChoiceCase) -> int:
    """Returns the number of passes in a timed program."""
    models, backward = case.models or 1, 3 if case.gradients else 1
    products = 4 * SPECS[case.cell].gates * models * case.B * case.T * case.H**2 * backward
    return max(1, min(MOST_PASSES, int(LOOPED_SECONDS / (case.T * STEP_SECONDS + products / FLOPS))))


def looped(case: ChoiceCase, implementation: str | None) -> Callable[[Arrays], Arrays]:
    """Returns a function that runs many passes, each dependent on the previous one, and returns the last result."""
    run_once = one_pass(case, implementation)

    def loop(arrays: Arrays) -> Arrays:
        weights = {name: x for name, x in arrays.items() if name.startswith(("w_", "b"))}
        results: Arrays = harness.repeated(lambda weights: run_once(arrays | weights), weights, passes(case))
        return results

    return loop


class Compiled(NamedTuple):
    """A case, its compiled programs, and the errors of the programs that failed to compile.

    Attributes:
      same: the implementation whose program is also that of the default; None if the default has a program of its own.
    """

    case: ChoiceCase
    arrays: Arrays
    same: str | None
    programs: Mapping[str, Callable[[], Arrays]]
    failures: dict[str, Exception]


def prepare(chosen: Sequence[ChoiceCase]) -> Iterator[Compiled]:
    """Compiles the programs of several cases in parallel, each program once."""
    pending = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for case in chosen:
            arrays, futures, failures, texts = make_arrays(case), {}, {}, {}
            for name in (*IMPLEMENTATIONS, DEFAULT):
                try:
                    lowered = jax.jit(looped(case, None if name == DEFAULT else name)).lower(arrays)
                    texts[name] = lowered.as_text()
                    if name != DEFAULT or texts[name] not in [texts.get(other) for other in IMPLEMENTATIONS]:
                        futures[name] = pool.submit(lowered.compile)
                except Exception as error:
                    failures[name] = error
            same = next((name for name in IMPLEMENTATIONS if name in texts and texts[name] == texts.get(DEFAULT)), None)
            pending.append((case, arrays, same, futures, failures))
    for case, arrays, same, futures, failures in pending:
        programs = {}
        for name, future in futures.items():
            try:
                programs[name] = functools.partial(future.result(), arrays)
            except Exception as error:
                failures[name] = error
        yield Compiled(case, arrays, same, programs, failures)


def measure(compiled: Compiled, settings: Settings, progress: Callable[[str], None]) -> list[Row]:
    """Returns a row for the default and for each implementation.

    A program is not timed if its results differ too much from those of "xla".
    """
    label, count = str(compiled.case), passes(compiled.case)
    rows = {name: Row(label, name, ours=DEFAULT) for name in (DEFAULT, *IMPLEMENTATIONS)}
    for name, error in compiled.failures.items():
        rows[name] = rows[name].failed(error)
    limit = 2 * oracle.tolerance(compiled.case.cell, "bf16" if compiled.case.dtype == "bf16" else "tf32")
    want, clocks = None, {}
    for name in sorted(compiled.programs, key=lambda name: name != "xla"):
        program = compiled.programs[name]
        try:
            if name == "xla":
                want = program()
            elif want is not None:
                errors = oracle.errors(program(), want)
                rows[name] = oracle.judged(rows[name], errors, limit, "differs from xla's by")
        except Exception as error:  # too little memory, for example
            rows[name] = rows[name].failed(error)
        if rows[name].status not in ("failed", "wrong"):
            clocks[name] = timing.jax_clock(program, program, count)
    del want
    harness.time_rows(rows, clocks, settings, progress, scale=1e3)
    if compiled.same is not None:
        rows[DEFAULT] = dataclasses.replace(rows[compiled.same], provider=DEFAULT, note=f"runs {compiled.same}")
    elif DEFAULT in clocks:
        rows[DEFAULT] = dataclasses.replace(rows[DEFAULT], note="mixes triton and xla")
    values = [value for name in IMPLEMENTATIONS if (value := rows[name].value) is not None]
    if values:
        rows[DEFAULT] = dataclasses.replace(rows[DEFAULT], target=(1 + TOLERANCE) * min(values))
    return list(rows.values())


def choice(settings: Settings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Yields the rows of the default and of each implementation, at shapes of RL code."""
    wanted = tuple(case for case in cases.CHOICE if settings.wants_case(str(case)))
    for several in harness.in_groups(wanted, AT_ONCE):
        for compiled in prepare(several):
            progress(str(compiled.case))
            yield from measure(compiled, settings, progress)
        harness.release()
