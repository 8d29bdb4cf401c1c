"""Measures every tiling that can run a launch: what the costs in `torch_bridge.tiling` were fitted to.

The launch runs alone, without the products around it. Its tilings are compared with the one that is chosen.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from benchmarks import harness, precompile, timing
from benchmarks.problems import Run, make_arrays, make_problem
from benchmarks.results import Row
from torch_bridge import tiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.settings import Settings
    from torch_bridge.tiling import Device, Direction, KernelConfig, Problem

STEPS = 128
# The suite times at most this many "streamed" tilings of a problem whose programs share the units: those with the
# lowest estimates.
MOST_STREAMED = 2


def problems() -> Iterator[Problem]:
    """Yields the problems: wide states, other cells, and reset states, each for one tile, for all SMs, and for more."""
    directions: tuple[Direction, ...] = ("fwd", "bwd")
    kinds, reset_states = ("tf32", "bf16"), tiling.RESET_STATES[1:]
    for cell, direction, kind in itertools.product(("gru", "lstm"), directions, kinds):
        for hidden, batch in itertools.product((192, 256, 384, 512, 768, 1024), (8, 64, 256, 1024)):
            yield make_problem(cell, direction, kind, hidden, batch, steps=STEPS)
        for hidden, batch in itertools.product((64, 128), (8, 64, 256, 2048)):
            yield make_problem(cell, direction, kind, hidden, batch, steps=STEPS)
    for cell, direction, hidden in itertools.product(("mgu", "simple_tanh"), directions, (128, 256, 1024)):
        yield make_problem(cell, direction, "tf32", hidden, 8, steps=STEPS)
    for cell, hidden, batch in itertools.product(("gru", "lstm"), (64, 128, 256, 512), (8, 64)):
        for reset_state in reset_states:
            yield make_problem(cell, "fwd", "tf32", hidden, batch, steps=STEPS, reset_state=reset_state)


def label(problem: Problem) -> str:
    """Returns a label such as `GRU 8,128,256 fwd float32` (B, T, H), with the kind of reset state that is not zeros."""
    sizes = f"{problem.cell.upper()} {problem.batch},{problem.steps},{problem.hidden}"
    state = () if problem.reset_state == "zeros" else (f"{problem.reset_state} reset state",)
    return " ".join((sizes, problem.direction, problem.operand_dtype, *state))


def name_of(config: KernelConfig) -> str:
    """Returns a label such as `split_registers 64x8x256, 4 programs, 8 warps`."""
    blocks = f"{config.block_h}x{config.block_b}x{config.block_k}"
    programs = "programs in a cluster" if config.cluster > 1 else "programs"
    parts = {programs: config.splits, "warps": config.num_warps, "stages": config.num_stages}
    return ", ".join([f"{config.loop} {blocks}", *(f"{count} {what}" for what, count in parts.items() if count > 1)])


def candidates(problem: Problem, device: Device) -> list[KernelConfig]:
    """Returns the tilings to time, the chosen one first."""
    configs = tiling.candidates(problem, device)
    streamed = [config for config in configs if config.loop == "streamed" and config.splits > 1]
    return [config for config in configs if config not in streamed[MOST_STREAMED:]]


def measure(problem: Problem, device: Device, settings: Settings, progress: Callable[[str], None]) -> list[Row]:
    """Returns a row for each tiling of a problem, in microseconds per step."""
    configs = {name_of(config): config for config in candidates(problem, device)}
    chosen = next(iter(configs))
    rows = {
        name: Row(label(problem), name, ours=chosen, unit="us", note="chosen" if name == chosen else "")
        for name in configs
    }
    arrays, clocks = make_arrays(problem, "cuda:0"), {}
    for name, config in configs.items():
        try:
            clocks[name] = timing.torch_clock(Run(problem, device, config, arrays))
        except Exception as error:
            rows[name] = rows[name].failed(error)
    harness.time_rows(rows, clocks, settings, progress, scale=1e6 / problem.steps)
    return list(rows.values())


def tilings(settings: Settings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Times every tiling of launches of a time loop, per step."""
    from torch_bridge import gpu
    from torch_bridge.recurrences import Launch

    wanted = [problem for problem in problems() if settings.wants_case(label(problem))]
    if not wanted:
        return
    device = gpu.device(0)
    progress("compiling")
    kernels: dict[Any, Any] = {}
    for problem, config in ((p, c) for p in wanted for c in candidates(p, device)):
        kernels.setdefault((dataclasses.replace(problem, batch=1), config), (problem, device, config))
    precompile.compile_kernels(Launch, list(kernels.values()))
    for problem in wanted:
        progress(label(problem))
        yield from measure(problem, device, settings, progress)
        harness.release()
