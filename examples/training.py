"""Trains the agents of the examples: recurrences, several seeds and devices, progress, figures, tables, checkpoints.

`run_agent` is the program of every agent. An agent is a function `make_ppo(config, axis=None)` that returns a
`recurrent_ppo.PPO`, or what has its `env`, `init`, `rollout`, `metrics` and `train`.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.metadata
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from command_line import announce, parse, run_all, show, table, whole_number, write_json
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from rich.table import Table
from tqdm import tqdm

from jaxrnn.linen import ScannedRNN

# Recurrences, which agents exchange.


class FlaxScannedRNN(nn.Module):
    """A GRU with resets, as JAX code bases write it today: Flax's cell in `nn.scan`."""

    @functools.partial(nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False})
    @nn.compact
    def __call__(self, carry: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        ins, resets = inputs
        carry = jnp.where(resets[:, None], self.initialize_carry(*carry.shape), carry)
        return nn.GRUCell(features=carry.shape[-1])(carry, ins)

    @staticmethod
    def initialize_carry(batch: int, hidden: int) -> Array:
        return nn.GRUCell(features=hidden).initialize_carry(jax.random.key(0), (batch, hidden))


class Memoryless(nn.Module):
    """The control: a dense layer in place of the GRU, so that an action depends on one observation only."""

    @nn.compact
    def __call__(self, carry: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        ins, _ = inputs
        return carry, nn.tanh(nn.Dense(carry.shape[-1])(ins))


RECURRENCES: dict[str, Callable[..., nn.Module]] = {
    "auto": functools.partial(ScannedRNN, implementation=None),
    "triton": functools.partial(ScannedRNN, implementation="triton"),
    "xla": functools.partial(ScannedRNN, implementation="xla"),
    "flax": FlaxScannedRNN,
    "none": Memoryless,
}


# Several agents at once, and one agent on several devices.

AXIS = "devices"
MakePPO = Callable[..., Any]


class Train(NamedTuple):
    """The functions that train `num_seeds` agents at once; the first axis of every array is that of the agents."""

    init: Callable[[Array], Any]  # seeds [S]
    run: Callable[[Any], tuple[Any, Any]]  # some updates; metrics [S, updates]


def make_train(
    make_ppo: MakePPO,
    config: Any,
    updates: int | None = None,
    *,
    evaluates: bool = False,
    shards_on_one_device: bool = False,
) -> Train:
    """Returns the jitted functions that train on `num_devices` devices.

    Args:
      make_ppo: returns the functions that train one agent on one shard of its environments.
      config: the options of the training.
      updates: the number of updates in a call of `run`; the default is `updates_per_call`.
      evaluates: whether `run` makes rollouts in place of updates.
      shards_on_one_device: whether to compute on one device what `num_devices` devices compute, with `vmap` instead of
        `shard_map`. The results are equal up to rounding.
    """
    ppo = make_ppo(config, AXIS if config.num_devices > 1 else None)
    run = functools.partial(evaluate, ppo) if evaluates else ppo.train
    agents = jax.vmap(functools.partial(run, updates=updates or updates_per_call(config.updates)))
    # Agents are initialized one by one: orthogonal initial weights need a QR decomposition, and that of a batch in
    # jaxlib 0.10.2 can deadlock on a CPU.
    init = jax.jit(functools.partial(jax.lax.map, ppo.init))
    if config.num_devices == 1:
        return Train(init, jax.jit(agents, donate_argnums=0))
    state_type = type(jax.eval_shape(ppo.init, 0))
    if shards_on_one_device:
        return Train(init, jax.jit(with_shards(agents, config.num_devices, state_type), donate_argnums=0))
    mesh, specs = make_mesh(config.num_devices), of_state(state_type, P(), P(None, AXIS))
    # With `check_vma`, gradients of replicated arrays would arrive summed over the devices, which `vmap` does not do.
    sharded = jax.shard_map(agents, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()), check_vma=False)
    placement = of_state(state_type, *(NamedSharding(mesh, spec) for spec in (P(), P(None, AXIS))))
    place = jax.jit(lambda state: state, out_shardings=placement)  # works on several hosts, unlike device_put of a key
    return Train(lambda seeds: place(init(seeds)), jax.jit(sharded, donate_argnums=0))


def evaluate(ppo: Any, state: Any, updates: int) -> tuple[Any, Any]:
    """Acts as in `updates` updates, and learns nothing."""

    def act(state: Any, _: None) -> tuple[Any, Any]:
        state, seen = ppo.rollout(state)
        return state, ppo.metrics(seen)

    return jax.lax.scan(act, state, length=updates)


def of_state(state_type: type[Any], replicated: Any, sharded: Any) -> Any:
    """Returns a state with `sharded` for the actors, whose second axis is that of the environments."""
    return state_type(*(sharded if name == "actors" else replicated for name in state_type._fields))


def with_shards(agents: Callable[..., Any], shards: int, state_type: type[Any]) -> Callable[[Any], tuple[Any, Any]]:
    """Maps `agents`, which is written for one shard of the environments, over all shards on one device."""
    axes = of_state(state_type, None, 1)
    mapped = jax.vmap(agents, in_axes=(axes,), out_axes=(axes, None), axis_size=shards, axis_name=AXIS)

    def run(state: Any) -> tuple[Any, Any]:
        split = jax.tree.map(lambda x: x.reshape(x.shape[0], shards, -1, *x.shape[2:]), state.actors)
        state, metrics = mapped(state._replace(actors=split))
        joined = jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), state.actors)
        return state._replace(actors=joined), metrics

    return run


def make_mesh(num_devices: int) -> Mesh:
    """Returns a mesh of the first `num_devices` of JAX's devices, which may be on several hosts.

    Raises:
      ValueError: JAX has fewer devices.
    """
    devices = jax.devices()
    if len(devices) < num_devices:
        raise ValueError(
            f"num_devices is {num_devices}, but JAX has {len(devices)} here ({devices[0].device_kind}); on a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_devices} provides them"
        )
    return jax.make_mesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices[:num_devices])


# Calls of a jitted function, with progress.


@jax.jit
def copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@dataclasses.dataclass(frozen=True)
class Calls:
    """The results of calls of a jitted function, each from the state that the previous one returned."""

    params: Any  # of the state that the last of these calls returned
    outputs: list[Any]  # of NumPy arrays
    ended: list[float]  # seconds from the start of the first call to the end of each
    compile_seconds: float
    finished: bool  # False if Ctrl-C ended the calls

    @property
    def seconds(self) -> float:
        """The seconds of one call, without the first, which warms up, if there are several."""
        return (self.ended[-1] - self.ended[0]) / (len(self.ended) - 1) if len(self.ended) > 1 else self.ended[0]


def call_repeatedly(
    name: str,
    run: Any,
    state: Any,
    calls: int,
    report: Callable[[int, Any, float], str],
    *,
    amount: int,
    unit: str,
) -> Calls:
    """Compiles `run`, and calls it `calls` times. The first process shows a progress bar. Ctrl-C ends the calls early.

    Args:
      name: what the progress bar is of.
      run: a jitted function from a state to a state and an output. It may overwrite the state that it is given.
      state: the first state, which has `params`.
      calls: the number of calls.
      report: is told the number of a call, its output and the seconds since the first call began, and returns what the
        progress bar shows.
      amount: what a call does, in `unit`s of the progress bar.
      unit: a name in the plural.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed before there was anything to report: the time of a second call.
    """
    shows = jax.process_index() == 0
    if shows:
        announce(name)
    began = time.perf_counter()
    run, copy = run.lower(state).compile(), copied.lower(state.params).compile()
    compile_seconds = time.perf_counter() - began
    submitted: collections.deque[tuple[Any, Any]] = collections.deque()
    done = Calls(state.params, [], [], compile_seconds, False)
    with tqdm(total=calls * amount, desc=name, unit=f" {unit}", unit_scale=amount > 1000, disable=not shows) as bar:
        began = time.perf_counter()
        try:
            for call in range(calls + 1):
                if call < calls:
                    state, output = run(state)
                    submitted.append((copy(state.params), output))
                if call == 0:  # outputs are read one call late, so that the device has work
                    continue
                params, output = submitted.popleft()
                output, seconds = jax.device_get(output), time.perf_counter() - began
                bar.set_postfix_str(report(call - 1, output, seconds), refresh=False)
                bar.update(amount)
                outputs, ended = [*done.outputs, output], [*done.ended, seconds]
                # One assignment, so that Ctrl-C leaves the parameters, outputs and times of the same calls.
                done = Calls(params, outputs, ended, compile_seconds, call == calls)
        except KeyboardInterrupt:
            if len(done.outputs) < min(calls, 2):
                raise
    return done


# Agents.


def updates_per_call(updates: int) -> int:
    """Returns the number of updates per jitted call, chosen for 20 to 50 calls with the fewest extra updates."""
    return min(range(math.ceil(updates / 50), max(updates // 20, 1) + 1), key=lambda size: -updates % size)


def in_whole_calls(config: Any) -> Any:
    """Returns `config` with `total_steps` rounded up to whole calls."""
    size = updates_per_call(config.updates)
    updates = math.ceil(config.updates / size) * size
    return dataclasses.replace(config, total_steps=updates * config.num_envs * config.rollout_steps)


@dataclasses.dataclass(frozen=True)
class Result:
    config: Any
    task: str
    calls: Calls
    evaluated: bool = False

    @property
    def finished(self) -> bool:
        return self.calls.finished

    @property
    def episodes(self) -> np.ndarray:
        """The number of episodes that finished in each update `[S, updates]`."""
        return np.concatenate([output.episodes for output in self.calls.outputs], axis=1)

    @property
    def total_return(self) -> np.ndarray:
        """The sum of their returns `[S, updates]`."""
        return np.concatenate([output.total_return for output in self.calls.outputs], axis=1)

    @property
    def steps_per_call(self) -> int:
        """The env steps of one agent."""
        updates = self.calls.outputs[0].episodes.shape[1]
        return updates * self.config.num_envs * self.config.rollout_steps

    @property
    def steps_per_second(self) -> float:
        """The env steps of all agents per second."""
        return self.steps_per_call * self.config.num_seeds / self.calls.seconds

    @property
    def steps(self) -> np.ndarray:
        """The env steps of one agent after each update."""
        return (1 + np.arange(self.episodes.shape[1])) * self.config.num_envs * self.config.rollout_steps

    @property
    def seconds(self) -> np.ndarray:
        """The seconds of training after each update, without compilation."""
        steps = self.steps_per_call * np.arange(1 + len(self.calls.ended))
        return np.interp(self.steps, steps, [0.0, *self.calls.ended])

    @property
    def curve(self) -> np.ndarray:
        """The mean return of the episodes that finished in each update `[S, updates]`; NaN where none did."""
        return mean_return(self.episodes, self.total_return)

    @property
    def final_return(self) -> np.ndarray:
        """The mean return of the episodes that finished in the last tenth of training, or in an evaluation `[S]`."""
        updates = self.episodes.shape[1]
        tail = slice(0 if self.evaluated else -math.ceil(updates / 10), None)
        return mean_return(self.episodes[:, tail].sum(axis=1), self.total_return[:, tail].sum(axis=1))

    def to_json(self) -> dict[str, Any]:
        config = self.config
        return {
            "implementation": config.implementation,
            "env": self.task,
            "num_envs": config.num_envs,
            "num_devices": config.num_devices,
            "seeds": list(range(config.seed, config.seed + config.num_seeds)),
            "total_steps": int(self.steps[-1]),
            "finished": self.finished,
            "steps_per_second": self.steps_per_second,
            "compile_seconds": self.calls.compile_seconds,
            "final_return": without_nan(self.final_return),
            "curve": {
                "steps": self.steps.tolist(),
                "seconds": self.seconds.tolist(),
                "return": without_nan(self.curve),
            },
            "config": dataclasses.asdict(config),
        }


def mean_return(episodes: np.ndarray, total_return: np.ndarray) -> np.ndarray:
    """Returns the mean return `[...]` of episodes, given their number and the sum of their returns; NaN without any."""
    return np.where(episodes > 0, total_return / np.maximum(episodes, 1), np.nan)


def without_nan(values: np.ndarray) -> list[Any]:
    """Returns nested lists with None instead of NaN, which JSON does not have."""
    return np.where(np.isnan(values), None, values).tolist()


def interval(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ends `[...]` of the 95 % interval of the mean over the seeds of `values [S, ...]`, ignoring NaN.

    They are NaN where there is nothing else. The interval is that of the bootstrap with 2000 samples.
    """
    picks = np.random.default_rng(0).integers(len(values), size=(2000, len(values)))
    weights = np.stack([np.bincount(pick, minlength=len(values)) for pick in picks])
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):  # a sample may have NaN only
        means = np.tensordot(weights, np.where(known, values, 0), 1) / np.tensordot(weights, known, 1)
    anything = known.any(axis=0)
    low, high = np.nanpercentile(np.where(anything, means, 0), [2.5, 97.5], axis=0)
    return np.where(anything, low, np.nan), np.where(anything, high, np.nan)


def mean(values: np.ndarray) -> np.ndarray:
    """Returns the mean `[...]` over the seeds of `values [S, ...]`, ignoring NaN; NaN where there is nothing else."""
    return mean_return((~np.isnan(values)).sum(axis=0), np.nansum(values, axis=0))


# The name and the color in tables and figures.
LABELS = {
    "auto": ("jaxrnn", "#0072b2"),
    "triton": ("jaxrnn, triton", "#0072b2"),
    "xla": ("jaxrnn, xla", "#009e73"),
    "flax": ("Flax", "#d55e00"),
    "none": ("no memory (control)", "#888888"),
}


Callback = Callable[[int, Mapping[str, float]], None]


def train(make_ppo: MakePPO, config: Any, callback: Callback | None = None, params: Any = None) -> Result:
    """Trains `num_seeds` agents at once, or evaluates them if `params [S, ...]` is given. Ctrl-C ends it early.

    Args:
      make_ppo: returns the functions that train one agent.
      config: the options of the training.
      callback: is called after each jitted call with the env steps of one agent so far and the metrics since then:
        `return`, the mean of the episodes that finished, if any did, and `steps_per_second` of all agents.
      params: the parameters to act with, and not to train.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed before there was anything to report.
    """
    config = in_whole_calls(config)
    task = make_ppo(config).env.name
    init, run = make_train(make_ppo, config, evaluates=params is not None)
    state = init(config.seed + jnp.arange(config.num_seeds))
    if params is not None:
        state = state._replace(
            params=jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), params, state.params)
        )
    size = updates_per_call(config.updates)
    steps, before = size * config.num_envs * config.rollout_steps, [0.0]

    def report(call: int, metrics: Any, seconds: float) -> str:
        values = {"steps_per_second": steps * config.num_seeds / (seconds - before.pop())}
        before.append(seconds)
        if metrics.episodes.any():
            values["return"] = float(metrics.total_return.sum() / metrics.episodes.sum())
        if callback is not None:
            callback((call + 1) * steps, values)
        return f"return {values['return']:.2f}" if "return" in values else ""

    name = {"none": "control"}.get(config.implementation, config.implementation)
    calls = call_repeatedly(
        f"{name:>7}", run, state, config.updates // size, report, amount=steps * config.num_seeds, unit="steps"
    )
    return Result(config, task, calls, params is not None)


# Checkpoints of parameters.


def save(folder: Path, params: Any) -> None:
    """Saves arrays of any number of agents with Orbax, in place of what the folder has."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), params, force=True)


def load(folder: Path, make_ppo: MakePPO, config: Any) -> Any:
    """Returns the parameters `[S, ...]` that `save` wrote.

    Raises:
      ValueError: there are none, or they are of other agents.
    """
    import orbax.checkpoint as ocp

    if not folder.is_dir():
        raise ValueError(f"there is no {folder}: --save FOLDER writes what --eval FOLDER reads")
    params = jax.eval_shape(make_ppo(config).init, 0).params
    agents = jax.tree.map(lambda x: jax.ShapeDtypeStruct((config.num_seeds, *x.shape), x.dtype), params)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = dict(checkpointer.metadata(folder.absolute()).item_metadata)
        if jax.tree.map(jnp.shape, saved) != jax.tree.map(jnp.shape, agents):
            raise ValueError(f"{folder} has other agents: name the options that they were trained with")
        return checkpointer.restore(folder.absolute(), agents)


# Output.


def machine() -> str:
    """Returns the device and the versions of the packages in one line."""
    device = jax.devices()[0]
    kind = f"CPU ({os.cpu_count()} cores)" if device.platform == "cpu" else device.device_kind
    packages = ["jax", "flax", *(name for name in ("torch", "triton", "gymnax", "craftax") if name in sys.modules)]
    return ", ".join([kind, *(f"{name} {importlib.metadata.version(name)}" for name in packages)])


def describe(result: Result) -> str:
    config = result.config
    seeds = f"{config.num_seeds} seed{'s' if config.num_seeds > 1 else ''}"
    devices = f", {config.num_devices} devices" if config.num_devices > 1 else ""
    return f"{result.task}, {config.num_envs} envs, GRU-{config.hidden}, {seeds}{devices}"


def table_of(results: Sequence[Result]) -> Table:
    """Returns a table of final returns, with their 95 % intervals over several seeds, and of speed."""
    flax = next((result for result in results if result.config.implementation == "flax"), None)
    ratios = ["x flax"] if flax and len(results) > 1 else []
    rows = []
    for result in results:
        returns = result.final_return
        low, high = interval(returns)
        spread = f" [{low:.2f}, {high:.2f}]" if len(returns) > 1 else ""
        ratio = [f"{result.steps_per_second / flax.steps_per_second:.2f}"] if flax and ratios else []
        name = LABELS[result.config.implementation][0] + ("" if result.finished else ", stopped")
        speed, compiled = f"{result.steps_per_second:,.0f}", f"{result.calls.compile_seconds:.1f} s"
        rows.append([name, f"{mean(returns):.2f}{spread}", speed, *ratio, compiled])
    title = f"{describe(results[0])}, {results[0].config.total_steps:,} steps each"
    return table(title, machine(), ["recurrence", "final return", "env steps/s", *ratios, "compile"], rows)


def smoothed(values: np.ndarray, width: int) -> np.ndarray:
    """Returns the means `[S, N]` of the last `width` of `values [S, N]` at each point, as `mean` does with NaN."""
    return np.stack([mean(values[:, max(i - width, 0) : i].T) for i in range(1, values.shape[1] + 1)], axis=1)


DARK = dict.fromkeys(["text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"], "#d0d7de")


def panels(count: int, title: str, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """Returns a figure of some panels side by side."""
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for panel in axes:
        panel.set_facecolor("none")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot(runs: Sequence[Mapping[str, Any]], title: str, path: Path, dark: bool = False) -> None:
    """Draws the learning curves of runs, in the form of `Result.to_json`, over env steps and over seconds.

    A line is the mean over the seeds, and the area around it the 95 % interval of that mean. With `dark`, the figure is
    for a dark page, and transparent.
    """
    with matplotlib.rc_context(DARK if dark else {}):
        figure, (over_steps, over_seconds) = panels(2, title, (9, 3.8))
        for run in runs:
            curves = np.array(run["curve"]["return"], float)
            curves = smoothed(curves, max(curves.shape[1] // 40, 1))
            name, color = LABELS[run["implementation"]]
            # The curves of implementations coincide until rounding separates them: dashes show the one below.
            style = {"linewidth": 2, "linestyle": "-" if color == LABELS["auto"][1] else (0, (4, 1.5))}
            style["label"] = f"{name}: {run['steps_per_second']:,.0f} steps/s"
            for panel, x in (over_steps, run["curve"]["steps"]), (over_seconds, run["curve"]["seconds"]):
                panel.plot(x, mean(curves), color=color, **style)
                if len(curves) > 1:
                    panel.fill_between(x, *interval(curves), color=color, alpha=0.2, linewidth=0)
        over_steps.set(xlabel="environment steps of an agent", ylabel="mean return (higher is better)", xlim=(0, None))
        over_steps.xaxis.set_major_formatter(EngFormatter())
        over_seconds.set(xlabel="seconds of training, without compilation", xlim=(0, None))
        figure.legend(*over_steps.get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=2)
        figure.savefig(path, dpi=150, transparent=dark)


# The help texts of the options that every agent has.
HELPS = {
    "env": "the task",
    "num_envs": "environments per agent",
    "num_seeds": "agents trained at once",
    "num_devices": "devices that share the environments",
    "seed": "first seed; the others count up from it",
    "total_steps": "env steps per agent, rounded up to whole updates and to equal calls",
    "rollout_steps": "steps per rollout",
    "hidden": "width of the recurrence",
    "lr": "Adam's learning rate",
    "anneal_lr": "lower the learning rate to zero over the run",
}


def parse_agent(
    make_ppo: MakePPO,
    defaults: Any,
    implementations: Sequence[str],
    description: str | None,
    helps: Mapping[str, str],
    arguments: Sequence[str] | None = None,
) -> argparse.Namespace:
    """Parses the command line of an agent.

    Args:
      make_ppo: returns the functions that train it.
      defaults: the options that the command line may change.
      implementations: the recurrences that train if the command line names none.
      description: what `--help` prints first.
      helps: what options do, by name, beside those in `HELPS`.
      arguments: the command line; None for that of the process.

    Returns:
      The options, with `configs`, one for each recurrence, and `params` for each, which are None where it trains.
    """

    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--implementation", choices=list(RECURRENCES), nargs="+", default=implementations,
            help=f"recurrences, trained one after the other (default: {' '.join(implementations)})",
        )  # fmt: skip
        parser.add_argument("--save", type=Path, metavar="FOLDER", help="save the parameters of each agent there")
        parser.add_argument("--eval", type=Path, metavar="FOLDER", help="train nothing: act with saved parameters")
        processes = parser.add_argument_group(
            "several processes", "Each runs this command; the first one writes. See jax.distributed.initialize."
        )
        processes.add_argument("--num-processes", type=whole_number, help="default: this one alone")
        processes.add_argument("--process-id", type=whole_number, help="0 is the first process")
        processes.add_argument("--coordinator-address", help="host:port, on the host of the first process")

    def check(options: argparse.Namespace) -> None:
        config = options.config
        if config.num_envs % (config.num_devices * config.minibatches):
            devices = f"{config.num_devices} devices x " if config.num_devices > 1 else ""
            raise ValueError(
                f"num_envs must be a multiple of {devices}{config.minibatches} minibatches, got {config.num_envs}"
            )
        join_processes(options)
        if config.num_devices > 1:
            make_mesh(config.num_devices)
        options.configs = [dataclasses.replace(config, implementation=name) for name in options.implementation]
        for each in options.configs:
            ppo = make_ppo(each)
            if each.implementation == "triton":
                jax.eval_shape(ppo.init, 0)  # raises if the kernels cannot run
        options.params = [
            None if options.eval is None else load(options.eval / each.implementation, make_ppo, each)
            for each in options.configs
        ]
        options.make_ppo = make_ppo
        if jax.process_index() > 0:
            options.out = None

    return parse(arguments, description, defaults, {**HELPS, **helps}, more=more, check=check)


def join_processes(options: argparse.Namespace) -> None:
    """Joins the processes of one training, if there are several."""
    if options.num_processes is None:
        if options.process_id is not None or options.coordinator_address is not None:
            raise ValueError("--process-id and --coordinator-address need --num-processes")
        return
    if options.save is not None or options.eval is not None:
        raise ValueError("--save and --eval work in one process, without --num-processes")
    jax.distributed.initialize(options.coordinator_address, options.num_processes, options.process_id)
    if options.config.num_devices != jax.device_count():
        raise ValueError(
            f"--num-devices must be that of all processes, which have {jax.device_count()}, got "
            f"{options.config.num_devices}"
        )


def run_agent(
    parse_arguments: Callable[..., argparse.Namespace], arguments: Sequence[str] | None = None
) -> list[Result]:
    """Runs the program of an agent: trains or evaluates it with each recurrence, prints a table and draws a figure."""
    options = parse_arguments(arguments)
    name = f"{Path(inspect.getfile(options.make_ppo)).stem}_{options.config.env}{'_eval' if options.eval else ''}"

    def run(config: Any, params: Any) -> Result:
        result = train(options.make_ppo, config, params=params)
        if options.save is not None:
            save(options.save / config.implementation, result.calls.params)
        return result

    def write(results: list[Result]) -> None:
        if options.out is not None:
            runs = [result.to_json() for result in results]
            write_json(options.out / f"{name}.json", machine=machine(), runs=runs)
            plot(runs, describe(results[0]), options.out / f"{name}.png")

    def show_all(results: list[Result]) -> None:
        if options.out is not None:
            show(table_of(results), f"learning curves: {options.out / name}.png, figures: {options.out / name}.json")

    tasks = [functools.partial(run, *task) for task in zip(options.configs, options.params, strict=True)]
    return run_all(tasks, write, show_all)
