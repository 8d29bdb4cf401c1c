"""The cases that are measured: shapes, targets and input values. This module imports no GPU code."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from torch_bridge.cells import CELLS as SPECS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

Dtype = Literal["f32", "bf16"]
Precision = Literal["tf32", "bf16"]  # of matrix products
Derivative = Literal["", "jvp", "hvp"]

# The cells that every suite measures. `CELLS` below has rows of the others.
MEASURED = ("gru", "lstm")
NUMPY_DTYPES: dict[Dtype, Any] = {"f32": np.float32, "bf16": ml_dtypes.bfloat16}
DTYPES: dict[Dtype, str] = {"f32": "float32", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape of a recurrence, whose inputs have as many features as the state has units (D = H).

    Attributes:
      cell: a name in `torch_bridge.cells.CELLS`.
      B, T, H: batch size, number of steps and number of hidden units, in the order of the labels.
      reset_rate: the fraction of steps that begin an episode, drawn at random.
      episode: length of every episode in steps, whose first is cut short at random; 0 for episodes by `reset_rate`.
      models: length of the leading axis of all arrays, weights included, that `jax.vmap` maps over; 0 without that
        axis.
      reset_state: the axes of the states that episodes start from, which have gradients: "H", "BH" or "TBH"; empty for
        zeros.
      derivative: "jvp" for the outputs with their tangents, in place of a pass with gradients, or "hvp" for a product
        with the Hessian of a loss, in forward mode over reverse mode; both in one direction of all weights and inputs.
    """

    cell: str
    B: int
    T: int
    H: int
    reset_rate: float = 0.01
    models: int = 0
    reset_state: Literal["", "H", "BH", "TBH"] = ""
    episode: int = 0
    derivative: Derivative = ""

    def __str__(self) -> str:
        """Returns a label such as `GRU 2048,256,128` (B, T, H), with the other attributes that are not defaults."""
        models = f" x{self.models}" if self.models else ""
        resets = "" if self.reset_rate == 0.01 else f" resets {100 * self.reset_rate:g} %"
        resets = f" episodes of {self.episode}" if self.episode else resets
        states = f" from [{','.join(self.reset_state)}]" if self.reset_state else ""
        derivative = f" {self.derivative}" if self.derivative else ""
        return f"{self.cell.upper()} {self.B},{self.T},{self.H}{models}{resets}{states}{derivative}"

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights, keyed by their names in `jaxrnn.GRUParams` and those of the other cells."""
        spec = SPECS[self.cell]
        wide = spec.gates * self.H
        biases = {"b_ih": (wide,), "b_hn": (self.H,)} if spec.last_gate_separate else {"b": (wide,)}
        kinds = {"": (), "rms": ("scale",), "layer": ("scale", "shift")}[spec.norm]
        of_norm = {f"{kind}_{operand}": (self.H,) for kind in kinds for operand in "ih"}
        return {"w_ih": (self.H, wide), "w_hh": (self.H, wide), **biases, **of_norm}


def initial_states(case: Case) -> tuple[str, ...]:
    """Returns the names of the initial states."""
    return tuple(f"{state}0" for state in SPECS[case.cell].states)


def reset_states(case: Case) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the states that episodes start from, by name, if they are not zeros."""
    shape = tuple(getattr(case, axis) for axis in case.reset_state)
    return {f"reset_{state}": shape for state in SPECS[case.cell].states if shape}


class Target(NamedTuple):
    """Target times of `jaxrnn` and `jaxrnn-bf16` for forward and backward on an H200, in milliseconds."""

    tf32: float
    bf16: float


HEADLINE: dict[Case, Target] = {
    Case("gru", 2048, 256, 128): Target(2.0, 1.2),
    Case("gru", 1024, 128, 256): Target(1.9, 1.3),
    Case("gru", 512, 32, 1024): Target(2.2, 1.3),
    Case("gru", 128, 64, 512): Target(0.58, 0.44),
    Case("gru", 64, 128, 512): Target(0.65, 0.5),
    Case("gru", 64, 128, 128): Target(0.18, 0.15),
    Case("gru", 32, 128, 128): Target(0.165, 0.14),
    Case("gru", 4, 128, 128): Target(0.15, 0.13),
    Case("gru", 8, 1024, 256): Target(2.5, 2.3),
    Case("gru", 8, 256, 1024): Target(1.0, 0.9),
    Case("gru", 1, 1024, 512): Target(2.8, 2.6),
    Case("lstm", 2048, 256, 128): Target(2.8, 1.6),
    Case("lstm", 1024, 128, 256): Target(2.3, 1.6),
    Case("lstm", 1024, 128, 512): Target(6.5, 4.0),
}
SMALL = (
    *(Case("gru", 2**i, 128, 128) for i in range(7)),
    Case("gru", 8, 1024, 256),
    # episodes that start from given states, beside the same case with zeros
    *(Case("gru", 64, 128, 128, reset_state=axes) for axes in ("H", "BH", "TBH")),
    *(Case("gru", 8, 1024, 256, reset_state=axes) for axes in ("H", "TBH")),
)

_CENTRE = Case("gru", 64, 128, 128)
SWEEP = tuple(
    dict.fromkeys(
        [dataclasses.replace(_CENTRE, T=T) for T in (16, 32, 64, 128, 256, 512, 1024)]
        + [dataclasses.replace(_CENTRE, H=H) for H in (32, 64, 128, 256, 512, 1024)]
        + [dataclasses.replace(_CENTRE, reset_rate=rate) for rate in (0.0, 0.01, 0.1, 0.5)]
    )
)
# Few sequences, whose passes are as long as their steps: how far resets shorten them.
EPISODES = tuple(
    dataclasses.replace(case, reset_rate=rate, episode=episode)
    for case in (
        Case("gru", 8, 1024, 256), Case("gru", 1, 1024, 512), Case("gru", 16, 128, 128), Case("gru", 64, 128, 128),
        Case("lstm", 8, 1024, 256),
    )
    for rate, episode in ((0.0, 0), (0.01, 0), (0.1, 0), (0.01, 25), (0.01, 52), (0.01, 200))
)  # fmt: skip
# Derivatives beyond the first gradient, which cuDNN and TorchRL do not have.
DERIVATIVES = tuple(
    Case(cell, B, 128, 128, derivative=derivative)
    for cell, B in (("gru", 64), ("gru", 16), ("lstm", 64))
    for derivative in ("jvp", "hvp")
)
# Every other cell beside the GRU, whose time is the measure.
CELLS = tuple(
    Case(cell, *shape)
    for shape in ((64, 128, 128), (1024, 128, 256))
    for cell in ("gru", *(name for name in SPECS if name not in MEASURED))
)
VMAP: dict[Case, float] = {Case("gru", 8, 128, 128, models=16): 0.25, Case("gru", 8, 128, 128, models=64): 0.5}

# Cases for users of PyTorch, each with and without resets.
TORCH = tuple(
    dataclasses.replace(case, reset_rate=rate)
    for case in (
        Case("gru", 2048, 256, 128), Case("gru", 64, 128, 128), Case("gru", 512, 32, 1024), Case("gru", 4, 128, 128),
        Case("lstm", 64, 128, 128),
    )
    for rate in (0.01, 0.0)
)  # fmt: skip
TORCH_STEP = Case("gru", 64, 1, 128, reset_rate=0.1)

ACTING = Case("gru", 64, 1000, 128)  # T is the number of iterations of a scan over single steps
ACTING_TARGET_US = 8.0
DISPATCH_TARGET_US = 1.0
# An iteration that XLA does not capture in a CUDA graph, on one GPU and on two.
NOT_CAPTURED_TARGET_US, TWO_GPUS_TARGET_US = 11.0, 15.0

MEMORY = Case("gru", 2048, 256, 128)
MEMORY_TARGETS_GB = {"jaxrnn": 1.6, "jaxrnn-bf16": 1.2, "jaxrnn-remat": 1.4}

COMPILE = (Case("gru", 64, 128, 128), Case("lstm", 64, 128, 128), Case("gru", 1024, 128, 256))
COMPILE_TARGET_S = 4.0
SECOND_PROCESS_TARGET_S = 1.0

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


class Agents(NamedTuple):
    """Agents that are timed at once, one per seed, each with its own environments."""

    envs: int
    seeds: int = 1

    def __str__(self) -> str:
        """Returns a label such as `PPO, 64 envs` or `PPO, 16 seeds of 64 envs`."""
        return f"PPO, {f'{self.seeds} seeds of ' if self.seeds > 1 else ''}{self.envs} envs"


# With the targets in env steps/s of all agents together.
PPO_AGENTS = {Agents(64): 1_150_000.0, Agents(64, 16): 10_000_000.0, Agents(1024): 11_000_000.0}
PPO_SEEDS = 16  # agents of every row, which train for their returns
PPO_UPDATES, PPO_UPDATES_A_CALL = 50, 2


class Split(NamedTuple):
    """The environments of one agent, sharded equally over several GPUs."""

    envs: int
    gpus: int

    def __str__(self) -> str:
        """Returns a label such as `PPO, 2048 envs on 2 GPUs`."""
        return f"PPO, {self.envs} envs on {self.gpus} GPU{'s' if self.gpus > 1 else ''}"


# Weak scaling with 1024 environments per GPU, then strong scaling with 1024 environments in all.
PPO_SPLITS = (Split(1024, 1), Split(2048, 2), Split(4096, 4), Split(1024, 2), Split(1024, 4))
PPO_STEPS_AN_ENV = 8192


class ChoiceCase(NamedTuple):
    """A call of `jaxrnn.gru` or `lstm` in suite `choice`.

    Attributes:
      cell, B, T, H: cell, batch size, number of steps, and number of hidden units, which is also that of input
        features.
      models: length of the axis that `jax.vmap` maps over, weights included; 0 without that axis.
      gradients: whether the pass has a backward pass.
      dtype: the dtype of all arrays.
      precision: the precision of matrix products, as `jaxrnn.gru` takes it.
      reset_state: None, or "h" for a state `[H]` from which episodes start.
      episode: length of every episode in steps, as in `Case`; 0 for resets at 1 % of the steps.
    """

    cell: str
    B: int
    T: int
    H: int
    models: int = 0
    gradients: bool = True
    dtype: Dtype = "f32"
    precision: Literal["default", "highest"] = "default"
    reset_state: Literal["h"] | None = None
    episode: int = 0

    def __str__(self) -> str:
        """Returns a label such as `GRU 64,128,128` (B, T, H), with the other attributes that are not defaults."""
        words = {
            f"x{self.models}": self.models,
            "forward": not self.gradients,
            self.dtype: self.dtype != "f32",
            self.precision: self.precision != "default",
            "reset state": self.reset_state,
            f"episodes of {self.episode}": self.episode,
        }
        return " ".join(
            [f"{self.cell.upper()} {self.B},{self.T},{self.H}", *(word for word, holds in words.items() if holds)]
        )


def _choice_grid() -> Iterator[ChoiceCase]:
    # T cycles through `lengths`, with fewer steps where B * H is large
    lengths, narrow, wide = itertools.cycle((16, 128, 64, 256, 32)), (1, 64, 1024), (1, 16, 64, 256, 1024, 4096)
    for cell, H in itertools.product(MEASURED, (8, 32, 64, 128, 256, 512, 1024)):
        for B in wide if H >= 256 else narrow:
            T = next(lengths)
            while T > 16 and B * T * H > 2**25:
                T //= 2
            yield ChoiceCase(cell, B, T, H)


# Defaults of JAX RL code bases (docs/codebases.md). B is the number of sequences in a minibatch.
_CODE_BASES = tuple(
    ChoiceCase(*call)
    for call in (
        ("gru", 1, 128, 128), ("gru", 32, 128, 128), ("gru", 512, 256, 128),  # purejaxrl, JaxMARL
        ("gru", 8, 1024, 256), ("gru", 128, 64, 512), ("lstm", 256, 128, 512),  # popjaxrl, Craftax
        ("gru", 512, 32, 1024), ("gru", 512, 16, 1024), ("gru", 64, 64, 256),  # xland, Kinetix
        ("lstm", 32, 256, 256), ("gru", 64, 120, 512), ("lstm", 64, 120, 512),  # jaxued, R2D2
        ("gru", 8, 256, 1024), ("gru", 1, 1024, 512), ("lstm", 1024, 128, 256),
    )
)  # fmt: skip
# Short episodes, with few enough sequences that kernels may run pieces: 25 steps as in MPE, and 52 as in POPGym.
_EPISODES = tuple(
    case._replace(episode=25 if case.T <= 128 else 52) for case in _CODE_BASES if case.B <= 64 and case.T >= 64
)
_SEEDS = tuple(
    ChoiceCase(cell, B, T, H, models=models)
    for cell in MEASURED
    for B, T, H, models in ((8, 128, 128, 16), (8, 64, 32, 8), (8, 128, 256, 8), (32, 64, 512, 4), (64, 16, 1024, 2))
)
_STEPS = tuple(
    ChoiceCase(cell, B, 1, H, gradients=False)
    for cell in MEASURED
    for B, H in ((1, 64), (64, 128), (1024, 512), (64, 1024))
)
_FORWARD = tuple(
    ChoiceCase(cell, B, T, H, gradients=False)
    for cell in MEASURED
    for B, T, H in ((64, 128, 128), (64, 120, 512), (1024, 16, 256))
)
_OTHERS = (
    ChoiceCase("gru", 64, 128, 128, dtype="bf16"), ChoiceCase("gru", 1024, 32, 256, dtype="bf16"),
    ChoiceCase("gru", 256, 32, 1024, dtype="bf16"), ChoiceCase("lstm", 1024, 32, 512, dtype="bf16"),
    ChoiceCase("gru", 64, 128, 128, precision="highest"), ChoiceCase("lstm", 64, 64, 512, precision="highest"),
    ChoiceCase("gru", 256, 32, 1024, precision="highest"), ChoiceCase("lstm", 1024, 32, 256, precision="highest"),
    ChoiceCase("gru", 64, 128, 128, reset_state="h"), ChoiceCase("lstm", 64, 64, 128, reset_state="h"),
    ChoiceCase("gru", 1024, 32, 256, reset_state="h"), ChoiceCase("lstm", 64, 64, 512, reset_state="h"),
)  # fmt: skip
CHOICE = tuple(dict.fromkeys((*_choice_grid(), *_CODE_BASES, *_EPISODES, *_SEEDS, *_STEPS, *_FORWARD, *_OTHERS)))

NormKind = Literal["rms", "layer"]
Direction = Literal["fwd", "bwd"]
NORM_NAMES: dict[NormKind, str] = {"rms": "RMSNorm", "layer": "LayerNorm"}
DIRECTIONS: dict[Direction, str] = {"fwd": "forward", "bwd": "backward"}


@dataclasses.dataclass(frozen=True)
class NormCase:
    """One shape of a norm, forward or backward.

    Attributes:
      kind: "rms", with a weight, or "layer", with a weight and a bias.
      direction: forward (y), or backward (gradients of x, weight and bias).
      dtype: the dtype of all arrays.
      rows: the number of rows.
      columns: the length of a row.
    """

    kind: NormKind
    direction: Direction
    dtype: Dtype
    rows: int
    columns: int

    def __str__(self) -> str:
        """Returns a label such as `RMSNorm fwd bf16 8192x8192`."""
        return f"{NORM_NAMES[self.kind]} {self.direction} {self.dtype} {self.rows}x{self.columns}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return ("weight",) if self.kind == "rms" else ("weight", "bias")

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results."""
        return ("y",) if self.direction == "fwd" else ("dx", *(f"d{name}" for name in self.parameters))

    @property
    def bytes(self) -> int:
        """The bytes that the norm must move: those of x and y, or of x, dy and dx."""
        size = np.dtype(NUMPY_DTYPES[self.dtype]).itemsize
        return (2 if self.direction == "fwd" else 3) * self.rows * self.columns * size

    @property
    def target(self) -> float | None:
        """The share of a copy's bandwidth that the kernels should reach on an H200; None without a target."""
        if self.dtype != "bf16" or (self.rows, self.columns) not in WIDE_NORMS:
            return None
        return 0.92 if self.direction == "fwd" and self.columns >= 2048 else 0.85


WIDE_NORMS = ((8192, 8192), (16384, 4096), (32768, 2048), (32768, 512), (32768, 8192), (32768, 32768))
# Shapes of an agent: T * B rows of H columns.
RECURRENT_NORMS = tuple((rows, columns) for columns in (64, 128, 256, 512, 1024) for rows in (8192, 524288))
# Both directions of a shape are adjacent, and so are shapes that share compiled code.
NORMS = tuple(
    NormCase(kind, direction, dtype, rows, columns)
    for dtype in ("bf16", "f32")
    for kind in NORM_NAMES
    for rows, columns in (*WIDE_NORMS, *RECURRENT_NORMS)
    for direction in DIRECTIONS
)


def find(label: str) -> Case:
    """Returns the case with this label."""
    of_passes = *HEADLINE, *SMALL, *SWEEP, *EPISODES, *DERIVATIVES, *CELLS, *VMAP
    cases = {str(case): case for case in (*of_passes, *TORCH, TORCH_STEP, *COMPILE, *ACCURACY)}
    if label not in cases:
        raise ValueError(f"no case {label!r}; there are {', '.join(cases)}")
    return cases[label]


def make_inputs(case: Case) -> dict[str, NDArray[Any]]:
    """Returns float32 operands, resets and the cotangent of the outputs, seeded by a hash of the case's label.

    The arrays are the weights (shapes as in `Case.weights`), `xs [T, B, H]`, `h0 [B, H]` (and `c0` for an LSTM),
    boolean `resets [T, B]`, `ct_ys [T, B, H]`, and the states that episodes start from (`reset_states`). If `models` is
    S, not 0, every array has a leading axis `[S]`. If there is a `derivative`, its direction has `along_xs` for `xs`,
    and so for each weight and state.
    """
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    lead = (case.models,) if case.models else ()

    def normal(*shape: int, scale: float = 1.0) -> NDArray[Any]:
        return np.float32(scale) * rng.standard_normal((*lead, *shape), np.float32)

    inputs: dict[str, NDArray[Any]] = {
        name: normal(*shape, scale=shape[0] ** -0.5 if len(shape) == 2 else 0.5) + np.float32(name.startswith("scale"))
        for name, shape in case.weights.items()
    }
    for name in initial_states(case):
        inputs[name] = 0.5 * normal(case.B, case.H)
    inputs["xs"] = normal(case.T, case.B, case.H)
    inputs["ct_ys"] = normal(case.T, case.B, case.H)
    inputs["resets"] = rng.random((*lead, case.T, case.B)) < case.reset_rate
    if case.episode:
        elapsed = rng.integers(case.episode, size=(*lead, 1, case.B))
        inputs["resets"] = (np.arange(case.T)[:, None] + elapsed) % case.episode == 0
    for name, shape in reset_states(case).items():
        inputs[name] = 0.5 * normal(*shape)
    for name in (*case.weights, *reset_states(case), "xs") if case.derivative else ():
        inputs[f"along_{name}"] = rng.permuted(inputs[name])
    return inputs
