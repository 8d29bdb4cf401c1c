"""Compares three ways to run a GRU over a rollout of several episodes.

    # a minute on 2 CPU cores
    python examples/packing_and_resets.py
    # on a GPU
    python examples/packing_and_resets.py --steps 256 --envs 1024 --hidden 256

A rollout is `xs [T, B, D]` with `resets [T, B]`, which is true where step t is
the first of an episode.

1. pack: cut the rollout into its episodes, pad them to the longest, run
   `flax.linen.RNN` with `seq_lengths`, and put the outputs back. The number of
   episodes and the length of the longest one differ from rollout to rollout,
   and so do the shapes: a program is compiled for each shape.
2. scan: run `jax.lax.scan` over Flax's cell, and set the state to zeros where
   an episode begins. Most code bases do this.
3. jaxrnn: call `jaxrnn.gru(..., resets=resets)`. This is one launch on an
   NVIDIA GPU, and jaxrnn's own scan elsewhere.

All three give the same outputs, last state and gradients, which is checked
before anything is timed. Results are written after every mean length; Ctrl-C
keeps those.

The example needs `pip install '.[examples]'` in a checkout.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from command_line import parse, run_all, show, table, write_json
from jax import Array
from rich.table import Table
from tqdm import tqdm
from training import machine, panels

import jaxrnn
import jaxrnn.linen

METHODS = ("pack", "scan", "jaxrnn")


@dataclasses.dataclass(frozen=True)
class Config:
    steps: int = 128  # T
    envs: int = 32  # B
    features: int = 32  # D
    hidden: int = 64  # H
    mean_lengths: tuple[int, ...] = (4, 16, 64, 256)  # mean lengths of episodes, in steps
    rollouts: int = 20  # rollouts to count shapes over
    repeats: int = 7
    seed: int = 0
    implementation: Literal["triton", "xla"] | None = None
    precision: Literal["default", "highest"] = "highest"


class Rollout(NamedTuple):
    xs: Array  # [T, B, D]
    resets: np.ndarray  # [T, B]  the previous step's done
    carry: Array  # [B, H]        the last state of the previous rollout


def make_rollout(config: Config, mean_length: int, number: int) -> Rollout:
    """Draws a rollout whose episodes end at random, after `mean_length` steps on average."""
    rng = np.random.default_rng([config.seed, mean_length, number])
    resets = rng.random((config.steps, config.envs)) < 1 / mean_length
    xs = rng.normal(size=(config.steps, config.envs, config.features))
    carry = rng.normal(size=(config.envs, config.hidden))
    return Rollout(jnp.asarray(xs, jnp.float32), resets, jnp.asarray(carry, jnp.float32))


# 1. Pack.


class Packing(NamedTuple):
    """The places of the steps of N episodes in a rollout, and the places of the rollout's steps in the episodes."""

    step: np.ndarray  # [L, N]    a step of the rollout; padding repeats the last step
    env: np.ndarray  # [N]
    length: np.ndarray  # [N]
    continues: np.ndarray  # [N]  whether the episode began before the rollout, and so takes the carry
    episode: np.ndarray  # [T, B]
    offset: np.ndarray  # [T, B]  position of a step in its episode


def pack(resets: np.ndarray) -> Packing:
    """Finds the episodes in `resets [T, B]`.

    It runs on the host, because the number and the lengths of the episodes are shapes.
    """
    steps = len(resets)
    begins = resets.copy()
    begins[0] = True
    env, start = np.nonzero(begins.T)
    last_of_env = np.append(env[1:] != env[:-1], True)
    length = np.where(last_of_env, steps, np.append(start[1:], steps)) - start
    step = np.minimum(start + np.arange(length.max())[:, None], start + length - 1)
    episode = np.cumsum(begins.T).reshape(begins.T.shape).T - 1
    offset = np.arange(steps)[:, None] - start[episode]
    return Packing(step, env, length, (start == 0) & ~resets[0, env], episode, offset)


def run_packed(params: Any, carry: Array, xs: Array, packing: Packing) -> tuple[Array, Array]:
    padded = xs[packing.step, packing.env]  # [L, N, D]
    first = jnp.where(packing.continues[:, None], carry[packing.env], 0.0)
    rnn = nn.RNN(nn.GRUCell(carry.shape[-1]), time_major=True, return_carry=True)
    variables = {"params": {"cell": params}}
    last, ys = rnn.apply(variables, padded, initial_carry=first, seq_lengths=packing.length)
    return last[packing.episode[-1]], ys[packing.offset, packing.episode]


# 2. Scan.


def run_scan(params: Any, carry: Array, xs: Array, resets: Array) -> tuple[Array, Array]:
    cell = nn.GRUCell(carry.shape[-1])

    def step(h: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x, reset = inputs
        h = jnp.where(reset[:, None], 0.0, h)  # a select, because a product would propagate NaN
        return cell.apply({"params": params}, h, x)

    return jax.lax.scan(step, carry, (xs, resets))


# 3. jaxrnn.


def run_jaxrnn(implementation: str | None, params: Any, carry: Array, xs: Array, resets: Array) -> tuple[Array, Array]:
    hidden = carry.shape[-1]
    cell = jaxrnn.linen.GRUCell(hidden)
    weights = cell.apply({"params": params}, xs.shape[-1], hidden, method="packed_params")
    return jaxrnn.gru(weights, carry, xs, resets=resets, implementation=implementation)


def try_jaxrnn(config: Config) -> None:
    """Traces `run_jaxrnn`. Raises NotImplementedError if the chosen implementation cannot run."""
    rollout = make_rollout(config, config.mean_lengths[0], 0)
    params = nn.GRUCell(config.hidden).init(jax.random.key(0), rollout.carry, rollout.xs[0])["params"]
    with jax.default_matmul_precision(config.precision):
        run = functools.partial(run_jaxrnn, config.implementation)
        jax.eval_shape(run, params, rollout.carry, rollout.xs, rollout.resets)


# Costs.


class Cost(NamedTuple):
    milliseconds: float  # forward and backward, with every gradient
    host_milliseconds: float  # host time before the device can begin
    compile_seconds: float
    programs: int  # programs needed for `rollouts` rollouts
    sequential: int  # steps that run sequentially
    computed: int  # steps of all sequences, padding included


class Measurement(NamedTuple):
    mean_length: int
    steps: int  # steps of the rollout, over all environments
    costs: dict[str, Cost]


def with_gradients(run: Callable[..., tuple[Array, Array]]) -> Callable[..., Any]:
    """Returns a jitted function of `run`'s outputs and of the gradients for parameters, carry and inputs."""

    def loss(params: Any, carry: Array, xs: Array, layout: Any) -> tuple[Array, Any]:
        last, ys = run(params, carry, xs, layout)
        return jnp.mean(jnp.sin(ys)) + jnp.mean(last**2), (last, ys)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


def milliseconds(repeats: int, run: Callable[[], Any]) -> float:
    """Returns the milliseconds of the fastest of `repeats` calls; other work on the machine can only add time."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(run())
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def measure(config: Config, mean_length: int, programs: dict[Any, tuple[Any, float]], bar: tqdm) -> Measurement:
    """Runs one rollout in the three ways, compares their results, then times them.

    `programs` caches compiled programs and their compile times; scan and jaxrnn have one program for all rollouts.
    """
    rollout = make_rollout(config, mean_length, 0)
    cell = nn.GRUCell(config.hidden)
    params = cell.init(jax.random.key(config.seed), rollout.carry, rollout.xs[0])["params"]
    packing = pack(rollout.resets)
    runs = {
        "pack": (run_packed, jax.device_put(packing)),
        "scan": (run_scan, jnp.asarray(rollout.resets)),
        "jaxrnn": (functools.partial(run_jaxrnn, config.implementation), jnp.asarray(rollout.resets)),
    }
    shapes = {pack(make_rollout(config, mean_length, i).resets).step.shape for i in range(config.rollouts)}
    size = config.steps * config.envs
    costs, want = {}, None
    for name, (run, layout) in runs.items():
        bar.set_description(f"episodes of {mean_length} steps, {name}")
        arguments = (params, rollout.carry, rollout.xs, layout)
        key = name, *(x.shape for x in jax.tree.leaves(arguments))
        if key not in programs:
            bar.set_postfix_str("compiling ...")
            began = time.perf_counter()
            program = with_gradients(run).lower(*arguments).compile()
            programs[key] = program, time.perf_counter() - began
            bar.set_postfix_str("")
        program, compile_seconds = programs[key]
        call = functools.partial(program, *arguments)
        got = jax.device_get(call())
        want = got if want is None else want
        check(config, name, got, want)
        packed = name == "pack"
        costs[name] = Cost(
            milliseconds=milliseconds(config.repeats, call),
            host_milliseconds=milliseconds(config.repeats, lambda: jax.device_put(pack(rollout.resets))) * packed,
            compile_seconds=compile_seconds,
            programs=len(shapes) if packed else 1,
            sequential=len(packing.step) if packed else config.steps,
            computed=packing.step.size if packed else size,
        )
        bar.update()
    return Measurement(mean_length, size, costs)


def check(config: Config, name: str, got: Any, want: Any) -> None:
    """Raises AssertionError unless outputs, last state and gradients agree."""
    tolerance = 1e-4 if config.precision == "highest" else 2e-2
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        error, scale = np.abs(x - y).max(), np.abs(y).max()
        if not error <= tolerance * scale:
            raise AssertionError(f"{name} is off by {error:.2g}, where {METHODS[0]} has values up to {scale:.2g}")


# Output.


def describe(config: Config) -> str:
    return f"{config.steps} steps of {config.envs} environments, {config.hidden} units"


def table_of(config: Config, measurements: Sequence[Measurement]) -> Table:
    rows = [
        [
            str(mean_length) if name == METHODS[0] else "",
            name,
            f"{cost.milliseconds:.2f}",
            f"{cost.host_milliseconds:.2f}",
            f"{cost.compile_seconds:.1f} s",
            str(cost.programs),
            str(cost.sequential),
            f"{1 - steps / cost.computed:.0%}",
        ]
        for mean_length, steps, costs in measurements
        for name, cost in costs.items()
    ]
    title = f"GRU forward and backward, {describe(config)}; programs for {config.rollouts} rollouts"
    headers = ["mean length", "method", "ms", "host ms", "compile", "programs", "steps in turn", "wasted steps"]
    return table(title, machine(), headers, rows, left=2)


def plot(config: Config, measurements: Sequence[Measurement], path: Path) -> None:
    figure, (left, right) = panels(2, describe(config), (9, 3.8))
    lengths = [m.mean_length for m in measurements]
    styles = (("#0072b2", "o-"), ("#d55e00", "s-"), ("#009e73", "^--"))
    for name, (color, style) in zip(METHODS, styles, strict=True):
        costs = [m.costs[name] for m in measurements]
        left.plot(lengths, [c.milliseconds + c.host_milliseconds for c in costs], style, color=color, label=name)
        computed = [c.computed / m.steps for c, m in zip(costs, measurements, strict=True)]
        right.plot(lengths, computed, style, color=color, markersize=8 if name == "scan" else 5)
    left.set(ylabel="ms for forward and backward", title="Time (lower is better)", ylim=(0, None))
    right.set(ylabel="steps computed per step of the rollout", title="Work (lower is better)", ylim=(0, None))
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        axes.set_xlabel("mean length of an episode (log scale)")
    left.legend(frameon=False)
    figure.savefig(path, dpi=150)


HELPS = {
    "steps": "steps per rollout",
    "envs": "environments per rollout",
    "features": "width of the inputs",
    "hidden": "width of the GRU",
    "mean_lengths": "mean steps per episode, one or more",
    "rollouts": "rollouts to count programs over",
    "repeats": "calls per timing, fastest counts",
    "seed": "seed of all random numbers",
    "implementation": "jaxrnn implementation; None is the fastest that works here",
    "precision": "precision of all products",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def check(options: argparse.Namespace) -> None:
        if options.implementation == "triton":
            try_jaxrnn(options.config)

    return parse(arguments, __doc__, Config(), HELPS, check=check)


def main(arguments: Sequence[str] | None = None) -> list[Measurement]:
    options = parse_arguments(arguments)
    config, stem = options.config, options.out / "packing_and_resets"
    plotted, figures = stem.with_suffix(".png"), stem.with_suffix(".json")
    programs: dict[Any, tuple[Any, float]] = {}

    def write(measurements: list[Measurement]) -> None:
        plot(config, measurements, plotted)
        costs = [
            {"mean_length": m.mean_length, "steps": m.steps} | {name: cost._asdict() for name, cost in m.costs.items()}
            for m in measurements
        ]
        write_json(figures, machine=machine(), config=dataclasses.asdict(config), measurements=costs)

    def show_all(measurements: list[Measurement]) -> None:
        bar.close()
        show(table_of(config, measurements), f"plot: {plotted}, figures: {figures}")

    with jax.default_matmul_precision(config.precision), tqdm(total=len(METHODS) * len(config.mean_lengths)) as bar:
        return run_all(
            [functools.partial(measure, config, length, programs, bar) for length in config.mean_lengths],
            write, show_all,
        )  # fmt: skip


if __name__ == "__main__":
    main()
