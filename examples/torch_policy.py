"""Trains a recurrent policy in PyTorch, eager and compiled, and times updates.

    # eager; takes under a minute on a CPU
    python examples/torch_policy.py
    # also compiled; needs a C++ compiler, or a GPU
    python examples/torch_policy.py --compile
    # on a GPU
    python examples/torch_policy.py --hidden 256 --batch 1024 --cell lstm

The task is RepeatFirst (after POPGym, Morad et al. 2023): at every step, name
the symbol that the episode began with. The inputs do not show where an episode
begins. Only the state does, because a reset sets it to zeros. The reward of a
right answer is 1, and guessing gets 1 / symbols.

The policy is `torch_bridge.nn.GRU` or `LSTM`, which have the constructor and
the parameters of those in `torch.nn`, and also take `resets`. The example
compares it with the same policy over `torch.nn`, which has no resets and
therefore packs the episodes.

Policies learn by policy gradients. The FLOPs of an update are counted, too.
Results are written after every policy; Ctrl-C keeps those.

The example needs `pip install '.[torch]' rich tqdm` in a checkout.
"""

import argparse
import dataclasses
import functools
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.utils.benchmark
from command_line import announce, parse, run_all, show, table, write_json
from rich.table import Table
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from torch_bridge import nn


@dataclasses.dataclass(frozen=True)
class Config:
    cell: Literal["gru", "lstm"] = "gru"
    updates: int = 150
    symbols: int = 4
    steps: int = 32  # T, per update
    batch: int = 32  # B
    hidden: int = 32  # H
    mean_length: int = 8  # mean length of an episode, in steps
    lr: float = 1e-2
    entropy: float = 0.01
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.symbols < 2:
            raise ValueError(f"symbols must be at least 2, got {self.symbols}")


class Data(NamedTuple):
    inputs: Tensor  # [T, B, symbols]
    resets: Tensor  # [T, B]  the previous step's done
    targets: Tensor  # [T, B]


class Episodes:
    """A source of random symbols in episodes that end at random; each update continues the previous one's episodes."""

    def __init__(self, config: Config):
        self.config = config
        self.generator = torch.Generator().manual_seed(config.seed)
        self.first = torch.zeros(config.batch, dtype=torch.long)  # the symbol that the current episode began with
        self.done = torch.ones(config.batch, dtype=torch.bool)

    def draw(self) -> Data:
        shape = (self.config.steps, self.config.batch)
        symbols = torch.randint(self.config.symbols, shape, generator=self.generator)
        dones = torch.rand(shape, generator=self.generator) < 1 / self.config.mean_length
        resets = torch.cat([self.done[None], dones[:-1]])
        targets = []
        for symbol, reset in zip(symbols, resets, strict=True):
            self.first = torch.where(reset, symbol, self.first)
            targets.append(self.first)
        self.done = dones[-1]
        inputs = torch.nn.functional.one_hot(symbols, self.config.symbols).float()
        return Data(*(x.to(self.config.device) for x in (inputs, resets, torch.stack(targets))))


class Policy(torch.nn.Module):
    """A policy that returns the logits of every step, and the state from which the next call continues."""

    def __init__(self, config: Config):
        super().__init__()
        kind = {"gru": nn.GRU, "lstm": nn.LSTM}[config.cell]
        self.rnn = kind(config.symbols, config.hidden)
        self.head = torch.nn.Linear(config.hidden, config.symbols)

    def forward(self, inputs: Tensor, state: Any, resets: Tensor) -> tuple[Tensor, Any]:
        features, state = self.rnn(inputs, state, resets=resets)
        return self.head(features), state


class PackedPolicy(torch.nn.Module):
    """A policy over `torch.nn` with the same parameters, for which every episode is a sequence of its own."""

    def __init__(self, config: Config):
        super().__init__()
        kind = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[config.cell]
        self.rnn = kind(config.symbols, config.hidden)
        self.head = torch.nn.Linear(config.hidden, config.symbols)

    def forward(self, inputs: Tensor, state: Any, resets: Tensor) -> tuple[Tensor, Any]:
        steps, batch = resets.shape
        starts = resets.clone()
        starts[0] = True
        env, step = starts.T.nonzero(as_tuple=True)  # where episodes begin, environment by environment
        ends = torch.cat([env[1:] * steps + step[1:], env.new_tensor([batch * steps])])
        lengths = (ends - (env * steps + step)).tolist()
        flat = inputs.transpose(0, 1).reshape(batch * steps, -1)
        packed = pack_sequence(flat.split(lengths), enforce_sorted=False)
        going_on = (step == 0) & ~resets[0, env]
        first = torch.utils._pytree.tree_map(
            lambda x: x[:, env] * going_on[None, :, None],  # a product suffices, because states are finite here
            state,
        )
        features, last = self.rnn(packed, first)
        assert isinstance(features, PackedSequence)
        order = pack_sequence(torch.arange(batch * steps, device=flat.device).split(lengths), enforce_sorted=False).data
        features = torch.empty_like(features.data).index_copy(0, order, features.data)
        final = torch.cat([env[1:] != env[:-1], env.new_ones(1).bool()])
        last = torch.utils._pytree.tree_map(lambda x: x[:, final], last)
        return self.head(features.reshape(batch, steps, -1).transpose(0, 1)), last


Step = Callable[[Data, Any], tuple[Tensor, Tensor, Any]]


def make_loss(config: Config, policy: torch.nn.Module) -> Step:
    """Returns `(data, state) -> (loss, mean reward, state)`: REINFORCE with the mean reward as its baseline."""

    def loss(data: Data, state: Any) -> tuple[Tensor, Tensor, Any]:
        logits, state = policy(data.inputs, state, data.resets)
        log_probs = logits.log_softmax(-1)
        probs = log_probs.detach().exp()
        actions = (probs.cumsum(-1) < torch.rand_like(probs[..., :1])).sum(-1).clamp(max=config.symbols - 1)
        reward = (actions == data.targets).float()
        taken = log_probs.gather(-1, actions[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
        return -(taken * (reward - reward.mean())).mean() - config.entropy * entropy, reward.mean(), state

    return loss


def first_state(config: Config) -> Any:
    state = torch.zeros(1, config.batch, config.hidden, device=config.device)
    return state if config.cell == "gru" else (state, state.clone())


def detach(state: Any) -> Any:
    """Returns a detached copy of a state, because the next replay of a CUDA graph would overwrite its outputs."""
    return torch.utils._pytree.tree_map(lambda x: x.detach().clone(), state)


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    rewards: list[float]  # mean reward of every update
    first_seconds: float  # time of the first update, with compilation
    milliseconds: float  # median time of an update

    @property
    def final_reward(self) -> float:
        """The mean reward of the last tenth of training."""
        last = self.rewards[-max(1, len(self.rewards) // 10) :]
        return sum(last) / len(last)


def train(
    config: Config, name: str, policy: torch.nn.Module, wrap: Callable[[Step], Step] = lambda step: step
) -> Result:
    """Trains a policy, then times updates on one draw of data; `wrap` may compile the loss."""
    optimizer = torch.optim.Adam(policy.parameters(), config.lr)
    loss, episodes, state, rewards = wrap(make_loss(config, policy)), Episodes(config), first_state(config), []

    def update(data: Data, state: Any) -> tuple[Tensor, Any]:
        optimizer.zero_grad(set_to_none=True)
        value, reward, state = loss(data, state)
        value.backward()
        optimizer.step()
        return reward, detach(state)

    torch.manual_seed(config.seed)
    if "compiled" in name:
        announce(f"{name:>22}")
    started = time.perf_counter()
    for i in tqdm(range(config.updates), desc=f"{name:>22}", unit=" updates"):
        reward, state = update(episodes.draw(), state)
        rewards.append(reward.clone())
        if i == 0:
            reward.item()  # waits for the device
            first_seconds = time.perf_counter() - started
    timer = torch.utils.benchmark.Timer(
        "update(data, state)", globals={"update": update, "data": episodes.draw(), "state": state},
        num_threads=torch.get_num_threads(),
    )  # fmt: skip
    milliseconds = 1e3 * timer.blocked_autorange(min_run_time=0.2).median
    return Result(name, torch.stack(rewards).tolist(), first_seconds, milliseconds)


def count_flops(config: Config) -> dict[str, int]:
    """Counts the FLOPs of one update, by operator; the time loop is counted forward and backward."""
    policy = Policy(config).to(config.device)
    with FlopCounterMode(display=False) as counter:
        make_loss(config, policy)(Episodes(config).draw(), first_state(config))[0].backward()
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


def machine(config: Config) -> str:
    kind = torch.cuda.get_device_name() if config.device.startswith("cuda") else platform.processor() or "CPU"
    return f"{kind}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def table_of(config: Config, results: Sequence[Result], flops: dict[str, int]) -> Table:
    size = f"{config.cell.upper()}-{config.hidden}, {config.batch} x {config.steps} steps per update"
    rows = []
    for result in results:
        rate = 1e3 / result.milliseconds
        rows.append([
            result.name, f"{result.final_reward:.2f}", f"{result.milliseconds:.2f}",
            f"{rate * config.batch * config.steps:,.0f}", f"{rate * sum(flops.values()) / 1e9:.1f}",
            f"{result.first_seconds:.1f} s",
        ])  # fmt: skip
    return table(
        f"RepeatFirst, {config.symbols} symbols, {size}",
        f"reward: mean of the last tenth; first: first update, with compilation. {machine(config)}",
        ["policy", "reward", "ms / update", "steps/s", "GFLOP/s", "first"], rows,
    )  # fmt: skip


def flops_table(flops: dict[str, int]) -> Table:
    rows = [[op, f"{count / 1e6:.2f}"] for op, count in sorted(flops.items(), key=lambda item: -item[1])]
    return table("FLOPs of an update", "", ["operator", "MFLOP"], rows)


def unusable(device: str) -> str | None:
    """Returns why PyTorch cannot compute on `device`, in a sentence, or None if it can."""
    try:
        torch.zeros(1, device=device).item()
    except (AssertionError, ImportError, RuntimeError) as error:
        return str(error).split("\n")[0].split(". ")[0]
    return None


HELPS = {
    "cell": "the recurrence",
    "updates": "updates of each policy",
    "symbols": "number of symbols",
    "steps": "steps per update",
    "batch": "environments per update",
    "hidden": "width of the recurrence",
    "mean_length": "mean steps per episode",
    "lr": "Adam's learning rate",
    "entropy": "weight of the entropy bonus",
    "seed": "seed of weights, episodes and actions",
    "device": "device that PyTorch computes on",
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    def more(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--compile", action="store_true", help="train a compiled policy too")
        parser.add_argument("--backend", default="inductor", help="backend of torch.compile (default: %(default)s)")

    def check(options: argparse.Namespace) -> None:
        if reason := unusable(options.device):
            raise ValueError(f"PyTorch cannot compute on device {options.device!r}: {reason}")
        if options.compile and options.backend not in torch.compiler.list_backends(exclude_tags=()):
            known = ", ".join(torch.compiler.list_backends())
            raise ValueError(f"torch.compile has no backend {options.backend!r} here; there are {known}")

    defaults = Config(device="cuda" if torch.cuda.is_available() else "cpu")
    return parse(arguments, __doc__, defaults, HELPS, more=more, check=check)


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    options = parse_arguments(arguments)
    config: Config = options.config

    def run(name: str, kind: type[torch.nn.Module], wrap: Callable[[Step], Step]) -> Result:
        torch.manual_seed(config.seed)
        return train(config, name, kind(config).to(config.device), wrap)

    def compiled(step: Step) -> Step:
        graphs = {"mode": "reduce-overhead"} if options.backend == "inductor" else {}
        return torch.compile(step, fullgraph=True, backend=options.backend, **graphs)

    tasks = [
        functools.partial(run, "torch.nn, packed", PackedPolicy, lambda step: step),
        functools.partial(run, "torch_bridge", Policy, lambda step: step),
    ]
    if options.compile:
        tasks.append(functools.partial(run, "torch_bridge, compiled", Policy, compiled))
    flops, path = count_flops(config), options.out / "torch_policy.json"

    def write(results: list[Result]) -> None:
        runs = [dataclasses.asdict(result) for result in results]
        write_json(path, machine=machine(config), config=dataclasses.asdict(config), flops=flops, runs=runs)

    def show_all(results: list[Result]) -> None:
        show(table_of(config, results, flops), flops_table(flops), f"figures: {path}")

    return run_all(tasks, write, show_all)


if __name__ == "__main__":
    main()
