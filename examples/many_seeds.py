"""Trains 16 recurrent networks at once with `jax.vmap`, beside one alone.

    python examples/many_seeds.py
    # on a GPU
    python examples/many_seeds.py --seeds 64 --hidden 128 --batch 64

Each network has its own seed. The task is RepeatFirst (after POPGym, Morad et al. 2023): at every step, name
the symbol that the episode began with. The inputs do not show where an episode
begins. Only the state does, because a reset sets it to zeros. Guessing gives a
loss of log(symbols).

Under `vmap` every network has its own weights. Flax's scan then computes 16
small products per step. The kernels of jaxrnn have an axis for models, so one
launch runs all networks over all steps.

Results are written after both trainings. Ctrl-C ends a training early and keeps
what it has learned until then.

The example needs `pip install '.[examples]'` in a checkout.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from jaxrnn.linen import ScannedRNN


@dataclasses.dataclass(frozen=True)
class Config:
    seeds: int = 16
    updates: int = 200
    updates_per_call: int = 10
    symbols: int = 8
    steps: int = 32  # T, per update
    batch: int = 16  # B
    hidden: int = 32  # H
    mean_length: int = 16  # mean length of an episode, in steps
    lr: float = 5e-3
    seed: int = 0
    implementation: str | None = None

    def __post_init__(self):
        for name in ("seeds", "updates", "updates_per_call", "steps", "batch", "hidden", "mean_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.symbols < 2:
            raise ValueError(f"symbols must be at least 2, got {self.symbols}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite, got {self.lr}")
        if self.updates % self.updates_per_call:
            raise ValueError(
                f"updates must be a multiple of updates_per_call = {self.updates_per_call}, got {self.updates}"
            )

    @property
    def chance(self) -> float:
        return math.log(self.symbols)


class Data(NamedTuple):
    inputs: Array  # [T, B, symbols]
    resets: Array  # [T, B]  the previous step's done
    targets: Array  # [T, B]


class Episodes(NamedTuple):
    """The state of the episodes between two updates."""

    first: Array  # [B]  the symbol that the current episode began with
    done: Array  # [B]   whether the last step ended the episode


def make_data(config: Config, key: Array, episodes: Episodes) -> tuple[Episodes, Data]:
    """Draws random symbols in episodes that end at random."""
    symbol_key, done_key = jax.random.split(key)
    shape = (config.steps, config.batch)
    symbols = jax.random.randint(symbol_key, shape, 0, config.symbols)
    dones = jax.random.bernoulli(done_key, 1 / config.mean_length, shape)
    resets = jnp.concatenate([episodes.done[None], dones[:-1]])

    def step(first: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        symbol, reset = inputs
        first = jnp.where(reset, symbol, first)
        return first, first

    first, targets = jax.lax.scan(step, episodes.first, (symbols, resets))
    return Episodes(first, dones[-1]), Data(jax.nn.one_hot(symbols, config.symbols), resets, targets)


class Network(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, carry: Array, inputs: Array, resets: Array) -> tuple[Array, Array]:
        carry, x = ScannedRNN(implementation=self.config.implementation)(carry, (inputs, resets))
        return carry, nn.Dense(self.config.symbols)(x)


class State(NamedTuple):
    params: Any
    opt_state: Any
    key: Array
    carry: Array  # [B, H]
    episodes: Episodes


class Train(NamedTuple):
    init: Callable[[Array], State]  # seeds [S]
    run: Callable[[State], tuple[State, Array]]  # `updates_per_call` updates; losses [S, updates_per_call]


def make_train(config: Config) -> Train:
    """Returns functions that train one network per seed: code for one network, mapped over the seeds."""
    network, optimizer = Network(config), optax.adam(config.lr)

    def init(seed: Array) -> State:
        key, params_key = jax.random.split(jax.random.key(seed))
        carry = ScannedRNN.initialize_carry(config.batch, config.hidden)
        inputs, resets = jnp.zeros((1, config.batch, config.symbols)), jnp.zeros((1, config.batch))
        params = network.init(params_key, carry, inputs, resets)
        episodes = Episodes(jnp.zeros(config.batch, int), jnp.ones(config.batch, bool))
        return State(params, optimizer.init(params), key, carry, episodes)

    def update(state: State, _: None) -> tuple[State, Array]:
        key, data_key = jax.random.split(state.key)
        episodes, data = make_data(config, data_key, state.episodes)

        def loss(params: Any) -> tuple[Array, Array]:
            carry, logits = network.apply(params, state.carry, data.inputs, data.resets)
            return optax.softmax_cross_entropy_with_integer_labels(logits, data.targets).mean(), carry

        (value, carry), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        return State(params, opt_state, key, carry, episodes), value

    def run(state: State) -> tuple[State, Array]:
        return jax.lax.scan(update, state, length=config.updates_per_call)

    # Networks are initialized one by one: orthogonal initial weights need a QR decomposition, and that of a batch in
    # jaxlib 0.10.2 can deadlock on a CPU.
    return Train(jax.jit(functools.partial(jax.lax.map, init)), jax.jit(jax.vmap(run), donate_argnums=0))


@dataclasses.dataclass(frozen=True)
class Result:
    config: Config
    compile_seconds: float
    seconds: float  # total of all calls except the first, which warms up
    losses: np.ndarray  # [S, updates]
    finished: bool = True  # False if Ctrl-C ended the training

    @property
    def milliseconds_per_update(self) -> float:
        """Milliseconds of an update of all seeds together."""
        timed = self.losses.shape[1] - self.config.updates_per_call
        return 1e3 * self.seconds / max(timed, 1)

    @property
    def final_loss(self) -> np.ndarray:
        """The mean loss of the last tenth of training `[S]`."""
        return self.losses[:, -math.ceil(self.losses.shape[1] / 10) :].mean(axis=1)


def train(config: Config) -> Result:
    """Trains `config.seeds` networks at once and shows a progress bar. Ctrl-C ends the training early.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed before the second call ended.
    """
    name = f"{config.seeds:>3} at once"
    print(f"{name}: compiling ...", end="\r", file=sys.stderr, flush=True)  # the progress bar replaces it
    init, run = make_train(config)
    began = time.perf_counter()
    state = init(config.seed + jnp.arange(config.seeds))
    run = run.lower(state).compile()
    compile_seconds = time.perf_counter() - began

    losses: list[np.ndarray] = []
    finished, started, ended = False, time.perf_counter(), 0.0
    with tqdm(total=config.updates, desc=name, unit=" updates") as bar:
        try:
            for call in range(config.updates // config.updates_per_call):
                state, submitted = run(state)
                losses.append(np.asarray(submitted))
                if call == 0:
                    started = time.perf_counter()
                ended = time.perf_counter()
                bar.set_postfix_str(f"loss {losses[-1].mean():.2f}", refresh=False)
                bar.update(config.updates_per_call)
            finished = True
        except KeyboardInterrupt:
            if len(losses) < 2:
                raise
    return Result(config, compile_seconds, ended - started, np.concatenate(losses, axis=1), finished)


# Output.


def machine() -> str:
    device = jax.devices()[0]
    kind = f"CPU ({os.cpu_count()} cores)" if device.platform == "cpu" else device.device_kind
    return ", ".join([kind, *(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax"))])


def describe(config: Config) -> str:
    return (
        f"RepeatFirst, {config.symbols} symbols, GRU-{config.hidden}, {config.batch} x {config.steps} steps per update"
    )


def table_of(results: Sequence[Result]) -> Table:
    table = Table(title=describe(results[0].config), caption=machine())
    for header in ("networks", "ms / update", "ms / network", "final loss", "guessing", "compile"):
        table.add_column(header, justify="right")
    for result in results:
        count, loss = result.config.seeds, result.final_loss
        table.add_row(
            str(count) if result.finished else f"{count}, stopped",
            f"{result.milliseconds_per_update:.2f}",
            f"{result.milliseconds_per_update / count:.2f}",
            f"{loss.mean():.2f}" + (f" ± {loss.std():.2f}" if count > 1 else ""),
            f"{result.config.chance:.2f}",
            f"{result.compile_seconds:.1f} s",
        )
    return table


def plot(result: Result, single: Result, path: Path) -> None:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    updates = 1 + np.arange(result.losses.shape[1])
    axes.axhline(result.config.chance, color="0.6", linewidth=1, linestyle=":", label="guessing")
    for i, losses in enumerate(result.losses):
        axes.plot(updates, losses, color="#0072b2", linewidth=0.7, alpha=0.3, label="one seed" if i == 0 else None)
    axes.plot(updates, result.losses.mean(axis=0), color="#0072b2", linewidth=2, label=f"mean of {len(result.losses)}")
    axes.set(xlabel="updates", ylabel="cross entropy (lower is better)", ylim=(0, None), xmargin=0.01)
    together, alone = result.milliseconds_per_update, single.milliseconds_per_update
    axes.set_title(f"{result.config.seeds} networks in {together:.1f} ms per update, one in {alone:.1f} ms")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path, dpi=150)


def whole_number(text: str) -> int:
    """Returns the int that `text` is in any notation, such as 1000000, 1_000_000 or 1e6."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number, such as 1000, 1_000 or 1e3, got {text!r}")
    return int(value)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=whole_number, default=Config.seeds, help="networks trained at once (default: %(default)s)")
    add("--updates", type=whole_number, default=Config.updates, help="updates of each network (default: %(default)s)")
    add(
        "--updates-per-call",
        type=whole_number,
        default=Config.updates_per_call,
        help="updates per call (default: %(default)s)",
    )
    add("--symbols", type=whole_number, default=Config.symbols, help="number of symbols (default: %(default)s)")
    add("--steps", type=whole_number, default=Config.steps, help="steps per update (default: %(default)s)")
    add("--batch", type=whole_number, default=Config.batch, help="sequences per update (default: %(default)s)")
    add("--hidden", type=whole_number, default=Config.hidden, help="width of the GRU (default: %(default)s)")
    add(
        "--mean-length",
        type=whole_number,
        default=Config.mean_length,
        help="mean steps per episode (default: %(default)s)",
    )
    add("--lr", type=float, default=Config.lr, help="Adam's learning rate (default: %(default)s)")
    add(
        "--seed",
        type=whole_number,
        default=Config.seed,
        help="first seed; the others count up from it (default: %(default)s)",
    )
    add("--implementation", choices=["triton", "xla"], help="GRU implementation (default: the fastest that works here)")
    add("--out", type=Path, default=Path("outputs"), help="folder for the PNG and the JSON (default: %(default)s)")
    namespace = parser.parse_args(arguments)
    try:
        namespace.config = Config(**{f.name: getattr(namespace, f.name) for f in dataclasses.fields(Config)})
        if namespace.implementation == "triton":
            jax.eval_shape(make_train(namespace.config).init, jnp.arange(1))  # raises if the kernels cannot run
        namespace.out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=namespace.out):  # raises if the folder takes no files
            pass
    except (NotImplementedError, OSError, ValueError) as error:
        parser.error(str(error))
    return namespace


def write(config: Config, results: Sequence[Result], stem: Path) -> None:
    """Writes the figures of the trainings so far, and the plot once there are both."""
    runs = [
        {
            "seeds": result.config.seeds,
            "finished": result.finished,
            "milliseconds_per_update": result.milliseconds_per_update,
            "compile_seconds": result.compile_seconds,
            "final_loss": result.final_loss.tolist(),
            "losses": result.losses.tolist(),
        }
        for result in results
    ]
    report = {"machine": machine(), "config": dataclasses.asdict(config), "runs": runs}
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    if len(results) == 2:
        plot(results[1], results[0], stem.with_suffix(".png"))


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parse_arguments(arguments)
    config, stem = options.config, options.out / "many_seeds"
    results: list[Result] = []
    try:
        for count in (1, config.seeds):
            results.append(train(dataclasses.replace(config, seeds=count)))
            write(config, results, stem)
            if not results[-1].finished:
                break
    except KeyboardInterrupt:
        pass
    console = Console()
    if results:
        console.print(table_of(results))
        console.print(f"learning curves and figures: {stem}.*", soft_wrap=True)
    if len(results) < 2 or not results[-1].finished:
        sys.exit("interrupted")
    return results


if __name__ == "__main__":
    main()
