"""Measures whether `implementation=None` picks the faster implementation, at shapes of RL code.

Each problem is timed under the default, under "triton" and under "xla". The target of the default is the better of the
two times plus `TOLERANCE`. Where the default lowers to the program of one implementation, it gets that program's time,
because two timings of one program differ by some percent. Otherwise one direction is a kernel and the other a scan, and
the default is timed by itself.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax

from benchmarks import cases, harness, oracle, timing
from benchmarks.providers import Inputs
from benchmarks.results import Row
from torch_bridge.cells import CELLS as SPECS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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
# The number of problems whose programs are compiled in parallel.
AT_ONCE = 12


class Problem(NamedTuple):
    """A call of `jaxrnn.gru` or `lstm`.

    Attributes:
      cell, B, T, H: cell, batch size, number of steps, and number of hidden units, which is also that of input
        features.
      models: length of the axis that `jax.vmap` maps over, weights included; 0 without that axis.
      gradients: whether the pass has a backward pass.
      dtype: the dtype of all arrays.
      precision: the precision of matrix products, as `jaxrnn.gru` takes it.
      reset_state: None, or "h" for a state `[H]` from which episodes start.
    """

    cell: str
    B: int
    T: int
    H: int
    models: int = 0
    gradients: bool = True
    dtype: cases.Dtype = "f32"
    precision: Literal["default", "highest"] = "default"
    reset_state: Literal["h"] | None = None

    def __str__(self) -> str:
        """Returns a label such as `GRU 64,128,128` (B, T, H), with the other attributes that are not defaults."""
        rest = {
            f"x{self.models}": self.models,
            "forward": not self.gradients,
            self.dtype: self.dtype != "f32",
            self.precision: self.precision != "default",
            "reset state": self.reset_state,
        }
        return " ".join(
            [f"{self.cell.upper()} {self.B},{self.T},{self.H}", *(name for name, told in rest.items() if told)]
        )


def _grid() -> Iterator[Problem]:
    # T cycles through `lengths`, with fewer steps where B * H is large
    lengths, narrow, wide = itertools.cycle((16, 128, 64, 256, 32)), (1, 64, 1024), (1, 16, 64, 256, 1024, 4096)
    for cell, H in itertools.product(cases.MEASURED, (8, 32, 64, 128, 256, 512, 1024)):
        for B in wide if H >= 256 else narrow:
            T = next(lengths)
            while T > 16 and B * T * H > 2**25:
                T //= 2
            yield Problem(cell, B, T, H)


# Defaults of JAX RL code bases (docs/codebases.md). B is the number of sequences in a minibatch.
_CODE_BASES = (
    Problem("gru", 1, 128, 128), Problem("gru", 32, 128, 128), Problem("gru", 512, 256, 128),  # purejaxrl, JaxMARL
    Problem("gru", 8, 1024, 256), Problem("gru", 128, 64, 512), Problem("lstm", 256, 128, 512),  # popjaxrl, Craftax
    Problem("gru", 512, 32, 1024), Problem("gru", 512, 16, 1024), Problem("gru", 64, 64, 256),  # xland, Kinetix
    Problem("lstm", 32, 256, 256), Problem("gru", 64, 120, 512), Problem("lstm", 64, 120, 512),  # jaxued, R2D2
    Problem("gru", 8, 256, 1024), Problem("gru", 1, 1024, 512), Problem("lstm", 1024, 128, 256),
)  # fmt: skip
_SEEDS = tuple(
    Problem(cell, B, T, H, models=models)
    for cell in cases.MEASURED
    for B, T, H, models in ((8, 128, 128, 16), (8, 64, 32, 8), (8, 128, 256, 8), (32, 64, 512, 4), (64, 16, 1024, 2))
)
_STEPS = tuple(
    Problem(cell, B, 1, H, gradients=False)
    for cell in cases.MEASURED
    for B, H in ((1, 64), (64, 128), (1024, 512), (64, 1024))
)
_FORWARD = tuple(
    Problem(cell, B, T, H, gradients=False)
    for cell in cases.MEASURED
    for B, T, H in ((64, 128, 128), (64, 120, 512), (1024, 16, 256))
)
_OTHERS = (
    Problem("gru", 64, 128, 128, dtype="bf16"), Problem("gru", 1024, 32, 256, dtype="bf16"),
    Problem("gru", 256, 32, 1024, dtype="bf16"), Problem("lstm", 1024, 32, 512, dtype="bf16"),
    Problem("gru", 64, 128, 128, precision="highest"), Problem("lstm", 64, 64, 512, precision="highest"),
    Problem("gru", 256, 32, 1024, precision="highest"), Problem("lstm", 1024, 32, 256, precision="highest"),
    Problem("gru", 64, 128, 128, reset_state="h"), Problem("lstm", 64, 64, 128, reset_state="h"),
    Problem("gru", 1024, 32, 256, reset_state="h"), Problem("lstm", 64, 64, 512, reset_state="h"),
)  # fmt: skip
PROBLEMS = tuple(dict.fromkeys((*_grid(), *_CODE_BASES, *_SEEDS, *_STEPS, *_FORWARD, *_OTHERS)))


def make_arrays(problem: Problem) -> Arrays:
    """Returns operands, resets and the cotangent of the outputs, and a reset state if the problem has one."""
    case = cases.Case(problem.cell, problem.B, problem.T, problem.H, models=problem.models)
    arrays = cases.make_inputs(case)
    if problem.reset_state:
        names = ("reset_h",) if problem.cell == "gru" else ("reset_c", "reset_h")
        arrays |= {name: arrays["h0"][..., 0, :] for name in names}
    return Inputs(arrays).jax(problem.dtype, resets=True)


def run(problem: Problem, implementation: Any, arrays: Arrays) -> Arrays:
    """Returns the outputs and, if the problem has gradients, those of weights, inputs and reset states."""
    options: dict[str, Any] = {"implementation": implementation, "precision": problem.precision}
    return oracle.run_cell(problem.cell, arrays, gradients=problem.gradients, **options)


def one_pass(problem: Problem, implementation: str | None) -> Callable[[Arrays], Arrays]:
    """Returns the pass of a problem, mapped over its models if there are any."""
    alone = functools.partial(run, problem, implementation)
    return jax.vmap(alone) if problem.models else alone


def passes(problem: Problem) -> int:
    """Returns the number of passes in a timed program."""
    models, backward = problem.models or 1, 3 if problem.gradients else 1
    products = 4 * SPECS[problem.cell].gates * models * problem.B * problem.T * problem.H**2 * backward
    return max(1, min(MOST_PASSES, int(LOOPED_SECONDS / (problem.T * STEP_SECONDS + products / FLOPS))))


def looped(problem: Problem, implementation: str | None) -> Callable[[Arrays], Arrays]:
    """Returns a function that runs many passes, each dependent on the previous one, and returns the last result."""
    run_once = one_pass(problem, implementation)

    def loop(arrays: Arrays) -> Arrays:
        weights = {name: x for name, x in arrays.items() if name.startswith(("w_", "b"))}
        results: Arrays = harness.repeated(lambda weights: run_once(arrays | weights), weights, passes(problem))
        return results

    return loop


class Compiled(NamedTuple):
    """A problem, its compiled programs, and the errors of the programs that failed to compile.

    Attributes:
      same: the implementation whose program is also that of the default; None if the default has a program of its own.
    """

    problem: Problem
    arrays: Arrays
    same: str | None
    programs: Mapping[str, Callable[[], Arrays]]
    failures: dict[str, Exception]


def prepare(problems: Sequence[Problem]) -> Iterator[Compiled]:
    """Compiles the programs of several problems in parallel, each program once."""
    pending = []
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for problem in problems:
            arrays, futures, failures, texts = make_arrays(problem), {}, {}, {}
            for name in (*IMPLEMENTATIONS, DEFAULT):
                try:
                    lowered = jax.jit(looped(problem, None if name == DEFAULT else name)).lower(arrays)
                    texts[name] = lowered.as_text()
                    if name != DEFAULT or texts[name] not in [texts.get(other) for other in IMPLEMENTATIONS]:
                        futures[name] = pool.submit(lowered.compile)
                except Exception as error:
                    failures[name] = error
            same = next((name for name in IMPLEMENTATIONS if name in texts and texts[name] == texts.get(DEFAULT)), None)
            pending.append((problem, arrays, same, futures, failures))
    for problem, arrays, same, futures, failures in pending:
        programs = {}
        for name, future in futures.items():
            try:
                programs[name] = functools.partial(future.result(), arrays)
            except Exception as error:
                failures[name] = error
        yield Compiled(problem, arrays, same, programs, failures)


def measure(one: Compiled, settings: Settings, progress: Callable[[str], None]) -> list[Row]:
    """Returns a row for the default and for each implementation.

    A program is not timed if its results differ too much from those of "xla".
    """
    label, count = str(one.problem), passes(one.problem)
    rows = {name: Row(label, name, ours=DEFAULT) for name in (DEFAULT, *IMPLEMENTATIONS)}
    for name, error in one.failures.items():
        rows[name] = rows[name].failed(error)
    limit = 2 * oracle.tolerance(one.problem.cell, "bf16" if one.problem.dtype == "bf16" else "tf32")
    want, clocks = None, {}
    for name in sorted(one.programs, key=lambda name: name != "xla"):
        program = one.programs[name]
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
    if one.same is not None:
        rows[DEFAULT] = dataclasses.replace(rows[one.same], provider=DEFAULT, note=f"runs {one.same}")
    elif DEFAULT in clocks:
        rows[DEFAULT] = dataclasses.replace(rows[DEFAULT], note="mixes triton and xla")
    values = [value for name in IMPLEMENTATIONS if (value := rows[name].value) is not None]
    if values:
        rows[DEFAULT] = dataclasses.replace(rows[DEFAULT], target=(1 + TOLERANCE) * min(values))
    return list(rows.values())


def choice(settings: Settings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Yields the rows of the default and of each implementation, at shapes of RL code."""
    wanted = tuple(problem for problem in PROBLEMS if settings.wants_case(str(problem)))
    for several in harness.in_groups(wanted, AT_ONCE):
        for one in prepare(several):
            progress(str(one.problem))
            yield from measure(one, settings, progress)
        harness.release()
