"""What is measured: shapes, the targets they are held to, and the numbers that go in. Imports no GPU code."""

from __future__ import annotations

import dataclasses
import zlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Cell = Literal["gru", "lstm"]
Dtype = Literal["f32", "bf16"]

GATES: dict[Cell, int] = {"gru": 3, "lstm": 4}
NUMPY_DTYPES: dict[Dtype, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of a recurrence; inputs are as wide as the state (D = H).

    Attributes:
      cell: "gru" or "lstm".
      B, T, H: batch, time, hidden, in the order that labels have them.
      reset_rate: the share of steps that begin an episode.
      models: length of a leading axis of everything, weights too, that `jax.vmap` maps over; 0 for none.
    """

    cell: Cell
    B: int
    T: int
    H: int
    reset_rate: float = 0.01
    models: int = 0

    def __str__(self) -> str:
        """`GRU 2048,256,128` for B, T, H; of the rest, what is not the default."""
        models = f" x{self.models}" if self.models else ""
        resets = "" if self.reset_rate == 0.01 else f" resets {100 * self.reset_rate:g} %"
        return f"{self.cell.upper()} {self.B},{self.T},{self.H}{models}{resets}"

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights, by the names that `jaxrnn.GRUParams` and `LSTMParams` give them."""
        wide = GATES[self.cell] * self.H
        biases = {"b_ih": (wide,), "b_hn": (self.H,)} if self.cell == "gru" else {"b": (wide,)}
        return {"w_ih": (self.H, wide), "w_hh": (self.H, wide), **biases}


class Target(NamedTuple):
    """Milliseconds for forward and backward that `jaxrnn` and `jaxrnn-bf16` are to reach on an H200."""

    tf32: float
    bf16: float


HEADLINE: dict[Case, Target] = {
    Case("gru", 2048, 256, 128): Target(2.0, 1.2),
    Case("gru", 1024, 128, 256): Target(2.2, 1.3),
    Case("gru", 512, 32, 1024): Target(2.6, 1.5),
    Case("gru", 128, 64, 512): Target(0.9, 0.7),
    Case("gru", 64, 128, 128): Target(0.35, 0.3),
    Case("gru", 32, 128, 128): Target(0.35, 0.3),
    Case("gru", 4, 128, 128): Target(0.35, 0.3),
    Case("gru", 8, 1024, 256): Target(4.5, 4.0),
    Case("lstm", 2048, 256, 128): Target(2.8, 1.6),
    Case("lstm", 1024, 128, 256): Target(2.8, 1.6),
    Case("lstm", 1024, 128, 512): Target(8.0, 4.0),
}
SMALL = (*(Case("gru", 2**i, 128, 128) for i in range(7)), Case("gru", 8, 1024, 256))

_CENTRE = Case("gru", 64, 128, 128)
SWEEP = tuple(
    dict.fromkeys(
        [dataclasses.replace(_CENTRE, T=T) for T in (16, 32, 64, 128, 256, 512, 1024)]
        + [dataclasses.replace(_CENTRE, H=H) for H in (32, 64, 128, 256, 512, 1024)]
        + [dataclasses.replace(_CENTRE, reset_rate=rate) for rate in (0.0, 0.01, 0.1, 0.5)]
    )
)
VMAP: dict[Case, float] = {Case("gru", 8, 128, 128, models=16): 0.5, Case("gru", 8, 128, 128, models=64): 0.8}

# Of those who use PyTorch: each with resets and without.
TORCH = tuple(
    dataclasses.replace(case, reset_rate=rate)
    for case in (
        Case("gru", 2048, 256, 128), Case("gru", 64, 128, 128), Case("gru", 512, 32, 1024), Case("gru", 4, 128, 128),
        Case("lstm", 64, 128, 128),
    )
    for rate in (0.01, 0.0)
)  # fmt: skip
TORCH_STEP = Case("gru", 64, 1, 128, reset_rate=0.1)

ACTING = Case("gru", 64, 1000, 128)  # T counts the iterations of a scan whose body makes one step
ACTING_TARGET_US = 8.0
DISPATCH_TARGET_US = 1.0

MEMORY = Case("gru", 2048, 256, 128)
MEMORY_TARGETS_GB = {"jaxrnn": 2.0, "jaxrnn-remat": 1.4}

COMPILE = (Case("gru", 64, 128, 128), Case("lstm", 64, 128, 128), Case("gru", 1024, 128, 256))
COMPILE_TARGET_S = 5.0

ACCURACY = (
    Case("gru", 64, 128, 32),
    Case("lstm", 64, 128, 32),
    Case("gru", 64, 128, 128),
    Case("lstm", 64, 128, 128),
    Case("gru", 128, 64, 512),
    Case("gru", 128, 32, 1024),
    Case("lstm", 128, 32, 512),
    Case("gru", 16, 4096, 128),
    Case("lstm", 16, 4096, 128),
)

PPO_TARGETS = {64: 490_000.0, 1024: 5_700_000.0}  # env steps/s, by the number of environments
# Env steps of a training run: seconds for the slowest recurrence. The fast ones make several times as many, and of the
# rows that have a target several runs.
PPO_STEPS = {64: 400_000, 1024: 8_000_000}
PPO_LONGER = {"jaxrnn": 4, "no recurrence": 4}
PPO_RUNS = 3


class Agents(NamedTuple):
    """Agents trained at once, one of each seed, with their own environments."""

    seeds: int
    envs: int

    def __str__(self) -> str:
        """`PPO, 16 seeds of 64 envs`."""
        return f"PPO, {self.seeds} seeds of {self.envs} envs"


PPO_AGENTS = (Agents(16, 64),)


class Split(NamedTuple):
    """Environments of one agent, in equal parts on several GPUs."""

    envs: int
    gpus: int

    def __str__(self) -> str:
        """`PPO, 2048 envs on 2 GPUs`."""
        return f"PPO, {self.envs} envs on {self.gpus} GPU{'s' if self.gpus > 1 else ''}"


# The same number on every GPU, then the same number in all.
PPO_SPLITS = (Split(1024, 1), Split(2048, 2), Split(4096, 4), Split(1024, 2), Split(1024, 4))
PPO_STEPS_AN_ENV = 8192


def find(label: str) -> Case:
    """The case that prints as `label`."""
    cases = {str(case): case for case in (*HEADLINE, *SMALL, *SWEEP, *VMAP, *TORCH, TORCH_STEP, *COMPILE, *ACCURACY)}
    if label not in cases:
        raise ValueError(f"no case {label!r}; there are {', '.join(cases)}")
    return cases[label]


def make_inputs(case: Case) -> dict[str, NDArray[Any]]:
    """Float32 operands, resets and the cotangent of the outputs, drawn from the name of the case.

    Weights as in `Case.weights`, `xs [T, B, H]`, `h0 [B, H]` (and `c0` for an LSTM), `resets [T, B]` booleans,
    `ct_ys [T, B, H]`; with `models` S, everything has a leading axis `[S]`.
    """
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    lead = (case.models,) if case.models else ()

    def normal(*shape: int, scale: float = 1.0) -> NDArray[Any]:
        return np.float32(scale) * rng.standard_normal((*lead, *shape), np.float32)

    inputs = {
        name: normal(*shape, scale=shape[0] ** -0.5 if len(shape) == 2 else 0.5) for name, shape in case.weights.items()
    }
    for name in ("h0",) if case.cell == "gru" else ("h0", "c0"):
        inputs[name] = 0.5 * normal(case.B, case.H)
    inputs["xs"] = normal(case.T, case.B, case.H)
    inputs["ct_ys"] = normal(case.T, case.B, case.H)
    inputs["resets"] = rng.random((*lead, case.T, case.B)) < case.reset_rate
    return inputs
