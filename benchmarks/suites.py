"""Defines the suites. Each is a generator of rows, so that finished rows are kept when a run stops."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib
import operator
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cases, choice, first_call, harness, norms, oracle, scans, tilings, timing
from benchmarks.oracle import Oracle
from benchmarks.providers import ALL, PROVIDERS, Inputs
from benchmarks.results import AccuracyRow, AgentRow, Row, first_line
from jaxrnn import _bridge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from benchmarks.cases import Case
    from benchmarks.providers import Provider
    from benchmarks.settings import Settings

    Progress = Callable[[str], None]
    Suite = Callable[[Settings, Progress], Iterator[Row] | Iterator[AccuracyRow]]


# Providers that most suites measure only if `--only` names them: this project's default, its module for Flax, its
# `lax.scan`, its modules for PyTorch, and a Python loop over PyTorch's cells.
IF_NAMED = (
    "jaxrnn-default", "jaxrnn-default-bf16", "jaxrnn-linen", "jaxrnn-xla", "torch_bridge", "torch_bridge-compiled",
    "torch_bridge-cudagraphs", "torch-cell",
)  # fmt: skip


def compared(settings: Settings) -> list[Provider]:
    """Returns the providers that `settings` choose; those in `IF_NAMED` take part only if `--only` names them."""
    return [p for p in settings.chosen(ALL) if p.name not in IF_NAMED or p.name in settings.only]


# Forward and backward.


def passes(
    chosen: Iterable[Case], settings: Settings, progress: Progress, *, providers: Sequence[Provider] | None = None,
    targets: Callable[[Case], dict[str, float]] = lambda _: {},
) -> Iterator[Row]:  # fmt: skip
    """Times a pass of every provider in every case. The default of `providers` is the result of `compared`."""
    providers = compared(settings) if providers is None else providers
    wanted = [case for case in chosen if settings.wants_case(str(case))]
    for rows in harness.time_cases(wanted, providers, settings, targets, progress):
        yield from rows


def time_targets(case: Case) -> dict[str, float]:
    """Returns the targets of a case in `cases.HEADLINE`, keyed by provider."""
    target = cases.HEADLINE.get(case)
    return {} if target is None else {"jaxrnn": target.tf32, "jaxrnn-bf16": target.bf16}


DERIVATIVES = ("jaxrnn", "jaxrnn-xla", "flax", "hoisted-scan", "torch-cudnn", "torchrl")


def derivatives(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Times tangents of the outputs and Hessian-vector products."""
    providers = settings.chosen([PROVIDERS[name] for name in DERIVATIVES])
    return passes(cases.DERIVATIVES, settings, progress, providers=providers)


# For users of PyTorch.


def step_label(case: Case) -> str:
    """Returns a label such as `a GRU step, B=64, H=128`."""
    return f"a {case.cell.upper()} step, B={case.B}, H={case.H}"


TORCH = (
    "torch_bridge", "torch_bridge-compiled", "torch_bridge-cudagraphs", "torch-cudnn", "torch-cudnn-packed", "torchrl",
    "jaxrnn",
)  # fmt: skip
TORCH_STEP = (
    "torch_bridge", "torch_bridge-compiled", "torch_bridge-cudagraphs", "torch-cell", "torch-cudnn", "torchrl",
)  # fmt: skip


def torch(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Times this project's modules for PyTorch, eager and compiled, beside other ones, with and without resets."""
    providers = settings.chosen([PROVIDERS[name] for name in TORCH])
    for row in passes(cases.TORCH, settings, progress, providers=providers):
        yield dataclasses.replace(row, ours="torch_bridge")


def torch_step(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Times a call of one step on the host, without gradients, as an actor makes it; notes give the device time."""
    case = cases.TORCH_STEP
    label = step_label(case)
    if settings.wants_case(label):
        progress(label)
        providers = settings.chosen([PROVIDERS[name] for name in TORCH_STEP])
        for row in harness.time_steps(case, providers, settings, progress):
            yield dataclasses.replace(row, case=label, ours="torch_bridge")


# Inside a scan.


# Compiler options with which XLA captures no operation in CUDA graphs.
NOT_CAPTURED: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}


def compiled_scans(
    programs: dict[str, scans.Program], rows: dict[str, Row], options: dict[str, str | bool] | None = None
) -> dict[str, Callable[[], Any]]:
    """Compiles the programs, and puts a failed row into `rows` for each program that does not compile."""
    run: dict[str, Callable[[], Any]] = {}
    for name, (program, args) in programs.items():
        try:
            run[name] = functools.partial(jax.jit(program).lower(*args).compile(options), *args)
        except Exception as error:
            rows[name] = rows[name].failed(error)
    return run


def timed_scans(
    run: dict[str, Callable[[], Any]], rows: dict[str, Row], iterations: int, settings: Settings, progress: Progress
) -> None:
    """Puts microseconds per iteration into `rows`."""
    clocks = {name: timing.jax_clock(program) for name, program in run.items()}
    method = f"jitted scans of {iterations} iterations, enqueued"
    harness.time_rows(rows, clocks, settings, progress, scale=1e6 / iterations, method=method)


def acting(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Times one step in the body of a jitted scan, as in a rollout."""
    case = cases.ACTING
    label = step_label(case)
    if not settings.wants_case(label):
        return
    progress(label)
    inputs = Inputs(cases.make_inputs(case))
    programs = scans.acting(case, inputs.jax("f32", True))
    programs = {name: program for name, program in programs.items() if settings.wants(name)}
    notes = {"jaxrnn": "the default: XLA for one step", scans.NO_RECURRENCE: "no recurrence: the cost of a scan"}
    rows = {
        name: Row(label, name, unit="us", note=notes.get(name, ""),
                  target=cases.ACTING_TARGET_US if name == "jaxrnn" else None)
        for name in programs
    }  # fmt: skip
    run = compiled_scans(programs, rows)
    want = Oracle(case, inputs.jax).want("f32", True)["ys"]
    for name in [name for name in run if name != scans.NO_RECURRENCE]:
        errors = oracle.errors({"ys": run[name]()}, {"ys": want})
        rows[name] = oracle.judged(rows[name], errors, oracle.tolerance(case.cell, "tf32"))
        if rows[name].status == "wrong":
            del run[name]
    timed_scans(run, rows, case.T, settings, progress)
    yield from rows.values()


def dispatch(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Times a launch in a jitted scan beside no launch and a native call; in CUDA graphs, without; on two GPUs."""
    case = f"an iteration, B={scans.DISPATCH_BATCH}, H={scans.DISPATCH_HIDDEN}"
    rows = _dispatch_rows(case, scans.dispatch, settings, progress)
    yield from rows.values()
    if rows:
        yield _over_native(case, rows)
    case = f"{case}, not captured"
    not_captured = functools.partial(_dispatch_rows, settings=settings, progress=progress, options=NOT_CAPTURED)
    targets = {scans.OURS: cases.NOT_CAPTURED_TARGET_US}
    yield from not_captured(case, scans.dispatch_alone, targets=targets).values()
    if jax.device_count() > 1:
        targets = dict.fromkeys((scans.OURS, scans.SUM_OURS), cases.TWO_GPUS_TARGET_US)
        yield from not_captured(f"{case}, on 2 GPUs", scans.dispatch_on_two_devices, targets=targets).values()


def _dispatch_rows(
    case: str,
    make_programs: Callable[[], dict[str, scans.Program]],
    settings: Settings,
    progress: Progress,
    targets: Mapping[str, float] | None = None,
    options: dict[str, str | bool] | None = None,
) -> dict[str, Row]:
    """Returns the rows of a case by provider, or none if the case is not wanted.

    Args:
      case: the label of the case.
      make_programs: returns the programs by provider.
      settings: what to measure, and for how long.
      progress: is told the case.
      targets: microseconds by provider.
      options: options of XLA's compiler.
    """
    if not settings.wants_case(case):
        return {}
    progress(case)
    programs = make_programs()
    rows = {name: Row(case, name, unit="us", ours="", target=(targets or {}).get(name)) for name in programs}
    timed_scans(compiled_scans(programs, rows, options), rows, scans.DISPATCH_ITERATIONS, settings, progress)
    return rows


def _over_native(case: str, rows: dict[str, Row]) -> Row:
    """Returns the time by which an iteration with our launch exceeds one with a native call."""
    launch = Row(
        case, "our launch over a native call", unit="us", ours="", target=cases.DISPATCH_TARGET_US,
        note="of the same kernel",
    )  # fmt: skip
    ours, native = (rows[f"and {name}"].value for name in (scans.OURS, scans.NATIVE))
    if ours is None or native is None:
        return dataclasses.replace(launch, status="failed", reason="one of the two rows that it compares has no figure")
    return dataclasses.replace(launch, value=ours - native, method="from the medians above")


# Memory and compilation.


def memory(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Measures the device memory of a pass: arguments, results and temporaries."""
    case = cases.MEMORY
    if not settings.wants_case(str(case)):
        return
    numbers = cases.make_inputs(case)
    truth = Oracle(case, lambda dtype, resets: Inputs(numbers).jax(dtype, resets))
    for provider in compared(settings):
        progress(provider.name)
        inputs = Inputs(numbers)
        ready, rows = harness.prepare([provider], case, inputs, settings)
        del inputs  # so that PyTorch counts only the memory that the pass keeps
        if provider.name in ready:
            row = oracle.check(provider, ready[provider.name], truth)
            truth.forget()
            if row.status == "measured":
                size, method = harness.peak_bytes(ready[provider.name])
                row = row.measured_once(size / 1e9, method)
        else:
            row = rows[provider.name]
        target = cases.MEMORY_TARGETS_GB.get(provider.name)
        yield dataclasses.replace(row, unit="GB", target=target, note=harness.note(provider, case))
        del ready
        harness.release()


# Providers of suite `compile` whose programs JAX's persistent cache keeps for the next process.
IN_A_SECOND_PROCESS = ("jaxrnn", "jaxrnn-bf16", "flax", "hoisted-scan")


def compile(settings: Settings, progress: Progress) -> Iterator[Row]:
    """Times the first call at a new shape, without imports: with empty caches, and with those of a process before."""
    for case in cases.COMPILE:
        if not settings.wants_case(str(case)):
            continue
        for provider in compared(settings):
            progress(f"{case} {provider.name}")
            ours = provider.name.startswith("jaxrnn")
            row = dataclasses.replace(provider.row(case), unit="s")
            if problem := provider.excluded(case):
                status, reason = problem
                yield dataclasses.replace(row, status=status, reason=reason)
            else:
                limits: dict[str, Any] = {"limit": settings.first_call_limit, "profile": settings.profile}
                call = first_call.run(provider.name, case, cold=True, **limits)
                row = dataclasses.replace(row, target=cases.COMPILE_TARGET_S if ours else None)
                yield of_first_call(row, call, "one process, empty caches, imports not counted")
                if provider.name in IN_A_SECOND_PROCESS:
                    call = first_call.run_twice(provider.name, case, **limits)
                    target = cases.SECOND_PROCESS_TARGET_S if ours else None
                    row = dataclasses.replace(row, case=f"{case}, second process", target=target)
                    yield of_first_call(row, call, "a process after another one, imports not counted")


def of_first_call(row: Row, call: first_call.FirstCall, method: str) -> Row:
    """Returns `row` with the seconds of a first call, or with the reason why there are none."""
    if call.seconds is None:
        return dataclasses.replace(row, status=call.status, reason=call.reason)
    return row.measured_once(call.seconds, method)


# Accuracy.

# The number of cases whose programs are compiled side by side.
ACCURACY_AT_ONCE = 5
PRECISIONS: dict[str, tuple[cases.Dtype, str, float]] = {  # dtype of arrays, precision of products, rounding error
    "default": ("f32", "default", 2.0**-11),
    "high": ("f32", "high", 2.0**-24),
    "bf16": ("bf16", "default", 2.0**-8),
}


def accuracy(settings: Settings, progress: Progress) -> Iterator[AccuracyRow]:
    """Yields the errors of the kernels and of XLA at the same precision, against float64."""
    wanted = [case for case in cases.ACCURACY if settings.wants_case(str(case))]
    for several in harness.in_groups(wanted, ACCURACY_AT_ONCE):
        begun = []
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for case in several:
                progress(f"{case}, compiling")
                inputs = Inputs(cases.make_inputs(case))
                truth = Oracle(case, inputs.jax)
                truth.compile(("f32", "bf16"), pool)
                compare = {
                    name: begin_comparison(case.cell, inputs.jax(dtype, True), precision, pool)
                    for name, (dtype, precision, _) in PRECISIONS.items()
                }
                begun.append((case, truth, compare))
            del inputs
        while begun:
            case, truth, compare = begun.pop(0)
            for precision in PRECISIONS:
                progress(f"{case} {precision}")
                yield from accuracy_rows(case, precision, truth, compare[precision])
            del truth, compare
            harness.release()


def accuracy_rows(
    case: Case, precision: str, truth: Oracle, compare: Callable[[Any], tuple[oracle.Errors, oracle.Errors]]
) -> Iterator[AccuracyRow]:
    """Yields a row for each array, or one that says why there are no figures; `begin_comparison` returns `compare`."""
    dtype, _, rounding = PRECISIONS[precision]
    want = truth.want(dtype, True)
    try:
        ours, xla = compare(want)
    except Exception as error:
        yield AccuracyRow(str(case), precision, "all", reason=first_line(error))
        return
    for array in want:
        yield AccuracyRow(
            str(case), precision, array, *(ours[array][0], xla[array][0], ours[array][1], xla[array][1]),
            allowance=4 * 2.0**-23 + rounding * want[array].size ** -0.5,
        )  # fmt: skip


def begin_comparison(
    cell: str, arrays: Any, precision: str, pool: concurrent.futures.Executor
) -> Callable[[Any], tuple[oracle.Errors, oracle.Errors]]:
    """Begins to compile the programs of the kernels and of XLA in `pool`.

    Returns:
      A function that takes the results in float64, and returns the errors of the kernels and of XLA.
    """

    def lower(name: str) -> Any:
        run = functools.partial(oracle.run_cell, cell, implementation=name, precision=precision)
        return jax.jit(run).lower(arrays)

    ours, xla = (harness.compile_in(pool, functools.partial(lower, name)) for name in ("triton", "xla"))
    return lambda want: (
        oracle.errors(ours.result()(arrays), want),
        oracle.errors(xla.result()(arrays), want),
    )


# A whole agent.

# Ours is `implementation=None`, as users have it: the kernels for sequences, XLA for the single steps of a rollout.
PPO_IMPLEMENTATIONS = {"flax": "flax", "jaxrnn-xla": "xla", "jaxrnn": "auto", "no recurrence": "none"}


def ppo(settings: Settings, progress: Progress) -> Iterator[AgentRow]:
    """Trains agents of `examples/recurrent_ppo.py` with each recurrence, and measures their env steps per second."""
    example, training = load_example()
    names = [name for name in PPO_IMPLEMENTATIONS if settings.wants(name)]
    for envs in dict.fromkeys(agents.envs for agents in cases.PPO_AGENTS):
        wanted = [agents for agents in cases.PPO_AGENTS if agents.envs == envs and settings.wants_case(str(agents))]
        if wanted and names:
            yield from ppo_beside(example, training, wanted, names, settings, progress)
    yield from ppo_on_several(example, training, settings, progress)


def ppo_beside(
    example: Any, training: Any, wanted: Sequence[cases.Agents], names: Sequence[str], settings: Settings,
    progress: Progress,
) -> Iterator[AgentRow]:  # fmt: skip
    """Yields rows of agents that have the same environments: trains one for each seed, then times them in turns.

    All programs are compiled before anything is timed.
    """
    envs, updates = wanted[0].envs, cases.PPO_UPDATES_A_CALL
    steps = envs * example.Config.rollout_steps
    configs = {
        name: example.Config(
            implementation=PPO_IMPLEMENTATIONS[name], num_envs=envs, num_seeds=cases.PPO_SEEDS,
            total_steps=cases.PPO_UPDATES * steps,
        )
        for name in names
    }  # fmt: skip
    trains = {name: training.make_train(example.make_ppo, config, updates) for name, config in configs.items()}
    seeds = jnp.arange(cases.PPO_SEEDS)

    def lower(name: str, count: int) -> Any:
        if configs[name].implementation == "auto":
            check_kernels_run(configs[name])
        return trains[name].run.lower(jax.eval_shape(trains[name].init, seeds[:count]))

    with concurrent.futures.ThreadPoolExecutor() as pool:
        inits = {name: harness.compile_in(pool, functools.partial(trains[name].init.lower, seeds)) for name in names}
        programs = {
            (name, count): harness.compile_in(pool, functools.partial(lower, name, count))
            for name in names
            for count in {cases.PPO_SEEDS, *(agents.seeds for agents in wanted)}
        }
    results: dict[str, Any] = {}
    trained: dict[str, Any] = {}
    compiled: dict[str, dict[int, Any]] = {}
    errors: dict[str, Exception] = {}
    for name, config in configs.items():
        progress(f"{envs} envs, {name}: {cases.PPO_SEEDS} agents")
        try:
            compiled[name] = {count: program.result() for (of, count), program in programs.items() if of == name}
            state, task = inits[name].result()(seeds), example.make_ppo(config).env.name
            trained[name], calls = train_agents(training, compiled[name][cases.PPO_SEEDS], state)
            results[name] = training.Result(config, task, calls)
        except Exception as error:
            errors[name] = error
    # Sliced before anything is timed, because a timed program is given the arrays of its state to overwrite.
    states = {
        (name, agents): jax.tree.map(operator.itemgetter(slice(agents.seeds)), state)
        for name, state in trained.items()
        for agents in wanted
    }
    for agents in wanted:
        clocks = {name: agents_clock(compiled[name][agents.seeds], states.pop((name, agents))) for name in results}
        times = errors | timing.interleave(clocks, rounds=settings.rounds, seconds=settings.seconds, progress=progress)
        rows: list[AgentRow] = []
        for name in names:
            row = AgentRow(
                str(agents), name, unit="steps/s", target=cases.PPO_AGENTS[agents] if name == "jaxrnn" else None,
                envs=envs, seeds=agents.seeds,
            )  # fmt: skip
            measured = times[name]
            if isinstance(measured, Exception):
                rows.append(row.failed(measured))
                continue
            method = f"calls of {updates} updates, enqueued"
            rows.append(agent_row(row, measured[0], updates * steps * agents.seeds, method, training, results[name]))
        yield from with_shares(rows)


def train_agents(training: Any, program: Any, state: Any) -> tuple[Any, Any]:
    """Trains agents with a compiled program, and returns their state and the calls."""
    outputs, ended = [], []
    began = time.perf_counter()
    for _ in range(cases.PPO_UPDATES // cases.PPO_UPDATES_A_CALL):
        state, metrics = program(state)
        outputs.append(jax.device_get(metrics))
        ended.append(time.perf_counter() - began)
    return state, training.Calls(state.params, outputs, ended, 0.0, True)


def agents_clock(program: Any, state: Any) -> timing.Clock:
    """Returns a clock of a program that trains agents, each time from the state that it returned before."""

    def run() -> Any:
        nonlocal state
        state, metrics = program(state)
        return metrics

    return timing.jax_clock(run)


def agent_row(row: AgentRow, spread: timing.Spread, steps: int, method: str, training: Any, result: Any) -> AgentRow:
    """Returns `row` with the speed of calls of so many steps, and with what the agents of `result` have learned."""
    returns = result.final_return
    returned, low, high = mean_and_interval(training, returns)
    return dataclasses.replace(
        row, value=steps / spread.median, low=steps / spread.high, high=steps / spread.low, calls=spread.calls,
        method=method, task=result.task, trained=len(returns), steps=int(result.steps[-1]),
        returned=returned, returned_low=low, returned_high=high,
        curve=curve_of(training, result) if row.seeds == len(returns) > 1 else None,
    )  # fmt: skip


def mean_and_interval(training: Any, returns: np.ndarray) -> list[float | None]:
    """Returns the mean of the agents' returns `[S]` and, if there are several, its 95 % interval; None without any."""
    bounds = training.interval(returns) if len(returns) > 1 else (np.nan, np.nan)
    numbers: list[float | None] = training.without_nan(np.stack([training.mean(returns), *bounds]))
    return numbers


def curve_of(training: Any, result: Any) -> dict[str, list[float | None]]:
    """Returns the learning curve of several agents, as a row has it."""
    low, high = training.interval(result.curve)
    mean = training.mean(result.curve)
    arrays = {"steps": result.steps, "seconds": result.seconds, "mean": mean, "low": low, "high": high}
    rounded = {name: np.array([float(f"{x:.6g}") for x in array]) for name, array in arrays.items()}
    return {name: training.without_nan(array) for name, array in rounded.items()}


def with_shares(rows: Sequence[AgentRow]) -> list[AgentRow]:
    """Returns the rows of a case with their shares of what is reached without a recurrence, if that is measured."""
    most = next((row.value for row in rows if row.provider == "no recurrence"), None)
    return [dataclasses.replace(row, share=row.value / most if row.value and most else None) for row in rows]


def ppo_on_several(example: Any, training: Any, settings: Settings, progress: Progress) -> Iterator[AgentRow]:
    """Measures env steps per second of one agent on 1, 2 and 4 GPUs, summed over the GPUs."""
    here, alone = len(jax.devices()), None
    for split in cases.PPO_SPLITS:
        if not settings.wants_case(str(split)) or not settings.wants("jaxrnn"):
            continue
        progress(str(split))
        row = AgentRow(str(split), "jaxrnn", unit="steps/s", envs=split.envs, gpus=split.gpus)
        if here < split.gpus:
            yield dataclasses.replace(row, status="unavailable", reason=f"needs {split.gpus} GPUs, {here} here")
            continue
        config = example.Config(
            implementation=PPO_IMPLEMENTATIONS["jaxrnn"], num_envs=split.envs, num_devices=split.gpus,
            total_steps=split.envs * cases.PPO_STEPS_AN_ENV,
        )  # fmt: skip
        try:
            if config.implementation == "auto":
                check_kernels_run(config)
            result = training.train(example.make_ppo, config)
            if not result.finished:
                raise KeyboardInterrupt  # `train` catches it, and returns early
        except Exception as error:
            yield row.failed(error)
            continue
        calls = len(result.calls.ended) - 1
        spread = timing.Spread.of([result.calls.seconds], calls)
        row = agent_row(row, spread, result.steps_per_call, "one training run", training, result)
        if split.gpus == 1:
            alone = row.value
        elif alone and row.value:
            row = dataclasses.replace(row, note=f"{row.value / alone:.2f}x 1 GPU")
        yield row


def check_kernels_run(config: Any) -> None:
    """Raises NotImplementedError if `implementation=None` would not choose the kernels."""
    reason = _bridge.unsupported([jnp.dtype(jnp.float32)], config.hidden)
    if reason is None and not _bridge.is_preferred(config.rollout_steps):
        reason = "is not what implementation=None chooses here"
    if reason is not None:
        raise NotImplementedError(f"the Triton implementation {reason}")


def load_example() -> tuple[Any, Any]:
    """Imports `examples/recurrent_ppo.py` and `examples/training.py` as modules."""
    folder = str(Path(__file__).parents[1] / "examples")
    sys.path.append(folder)
    try:
        return importlib.import_module("recurrent_ppo"), importlib.import_module("training")
    finally:
        sys.path.remove(folder)


# Names that `--only` and `--skip` accept besides those of the providers.
OTHER_NAMES = ("jaxrnn-triton", scans.NO_RECURRENCE, "no recurrence", *(provider.name for provider in norms.ALL))

SUITES: dict[str, Suite] = {
    "headline": functools.partial(passes, cases.HEADLINE, targets=time_targets),
    "small": functools.partial(passes, cases.SMALL, targets=time_targets),
    "sweep": functools.partial(passes, cases.SWEEP, targets=time_targets),
    "episodes": functools.partial(passes, cases.EPISODES),
    "derivatives": derivatives,
    "cells": functools.partial(passes, cases.CELLS),
    "vmap": functools.partial(passes, cases.VMAP, targets=lambda case: {"jaxrnn": cases.VMAP[case]}),
    "torch": torch,
    "torch-step": torch_step,
    "acting": acting,
    "dispatch": dispatch,
    "memory": memory,
    "compile": compile,
    "accuracy": accuracy,
    "ppo": ppo,
    "norm": norms.norm,
    "choice": choice.choice,
    "tilings": tilings.tilings,
}
