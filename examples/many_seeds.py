"""Trains 16 recurrent networks at once with `jax.vmap`, beside one alone.

    # half a minute on 2 CPU cores
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
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from command_line import parse, run_all, show, table, write_json
from jax import Array
from rich.table import Table
from training import call_repeatedly, machine, panels

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
    implementation: Literal["triton", "xla"] | None = None

    def __post_init__(self):
        if self.symbols < 2:
            raise ValueError(f"symbols must be at least 2, got {self.symbols}")
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
    milliseconds_per_update: float  # of all seeds together
    losses: np.ndarray  # [S, updates]
    finished: bool = True  # False if Ctrl-C ended the training

    @property
    def final_loss(self) -> np.ndarray:
        """The mean loss of the last tenth of training `[S]`."""
        return self.losses[:, -math.ceil(self.losses.shape[1] / 10) :].mean(axis=1)


def train(config: Config) -> Result:
    """Trains `config.seeds` networks at once and shows a progress bar. Ctrl-C ends the training early.

    Raises:
      KeyboardInterrupt: Ctrl-C was pressed before the second call ended.
    """
    init, run = make_train(config)
    state, size = init(config.seed + jnp.arange(config.seeds)), config.updates_per_call
    calls = call_repeatedly(
        f"{config.seeds:>3} at once", run, state, config.updates // size,
        lambda call, losses, seconds: f"loss {losses.mean():.2f}", amount=size, unit="updates",
    )  # fmt: skip
    losses = np.concatenate(calls.outputs, axis=1)
    return Result(config, calls.compile_seconds, 1e3 * calls.seconds / size, losses, calls.finished)


# Output.


def describe(config: Config) -> str:
    return (
        f"RepeatFirst, {config.symbols} symbols, GRU-{config.hidden}, {config.batch} x {config.steps} steps per update"
    )


def table_of(results: Sequence[Result]) -> Table:
    rows = []
    for result in results:
        count, loss = result.config.seeds, result.final_loss
        rows.append([
            str(count) if result.finished else f"{count}, stopped",
            f"{result.milliseconds_per_update:.2f}",
            f"{result.milliseconds_per_update / count:.2f}",
            f"{loss.mean():.2f}" + (f" ± {loss.std():.2f}" if count > 1 else ""),
            f"{result.config.chance:.2f}",
            f"{result.compile_seconds:.1f} s",
        ])  # fmt: skip
    headers = ["networks", "ms / update", "ms / network", "final loss", "guessing", "compile"]
    return table(describe(results[0].config), machine(), headers, rows, left=0)


def plot(result: Result, single: Result, path: Path) -> None:
    together, alone = result.milliseconds_per_update, single.milliseconds_per_update
    title = f"{result.config.seeds} networks in {together:.1f} ms per update, one in {alone:.1f} ms"
    figure, panes = panels(2, title, (9, 3.8))
    updates = 1 + np.arange(result.losses.shape[1])
    for axes, milliseconds in zip(panes, (None, together), strict=True):
        x = updates if milliseconds is None else updates * milliseconds / 1e3
        axes.axhline(result.config.chance, color="0.6", linewidth=1, linestyle=":", label="guessing")
        for i, losses in enumerate(result.losses):
            axes.plot(x, losses, color="#0072b2", linewidth=0.7, alpha=0.3, label="one seed" if i == 0 else None)
        axes.plot(x, result.losses.mean(axis=0), color="#0072b2", linewidth=2, label=f"mean of {len(result.losses)}")
        axes.set(
            ylim=(0, None), xlabel="updates" if milliseconds is None else "seconds of training, without compilation"
        )
    alone_x = updates * alone / 1e3
    panes[1].plot(alone_x[: len(single.losses[0])], single.losses[0], color="#d55e00", linewidth=1, label="one alone")
    panes[0].set(ylabel="cross entropy (lower is better)")
    panes[1].legend(frameon=False, loc="best")
    figure.savefig(path, dpi=150)


HELPS = {
    "seeds": "networks trained at once",
    "updates": "updates of each network",
    "updates_per_call": "updates per call",
    "symbols": "number of symbols",
    "steps": "steps per update",
    "batch": "sequences per update",
    "hidden": "width of the GRU",
    "mean_length": "mean steps per episode",
    "lr": "Adam's learning rate",
    "seed": "first seed; the others count up from it",
    "implementation": "GRU implementation; None is the fastest that works here",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def check(options: argparse.Namespace) -> None:
        if options.implementation == "triton":
            jax.eval_shape(make_train(options.config).init, jnp.arange(1))  # raises if the kernels cannot run

    return parse(arguments, __doc__, Config(), HELPS, check=check)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parse_arguments(arguments)
    config, stem = options.config, options.out / "many_seeds"

    def write(results: list[Result]) -> None:
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
        write_json(stem.with_suffix(".json"), machine=machine(), config=dataclasses.asdict(config), runs=runs)
        if len(results) == 2:
            plot(results[1], results[0], stem.with_suffix(".png"))

    tasks = [functools.partial(train, dataclasses.replace(config, seeds=count)) for count in (1, config.seeds)]
    return run_all(tasks, write, lambda results: show(table_of(results), f"learning curves and figures: {stem}.*"))


if __name__ == "__main__":
    main()
