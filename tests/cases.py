"""The table of cases that tests of all implementations share, and how to run one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import zlib
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jaxrnn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Inputs = dict[str, NDArray | None]
    Outputs = dict[str, NDArray]

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "f64": jnp.float64}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of `jaxrnn.gru` or `jaxrnn.lstm`.

    Attributes:
      cell: "gru" or "lstm".
      T, B, H, D: time, batch, hidden, input.
      dtype: of inputs, weights and reset state, a key of `DTYPES`.
      carry_dtype: of carry and outputs.
      precision: as `jaxrnn.gru` takes it.
      resets: "none" (no argument), "some" or "all".
      reset_dtype: of `resets`.
      reset_state: None, "h", "bh" or "tbh", after its shape.
      models: length of a leading axis of everything that `jax.vmap` maps over; 0 for none.
      cells: whether an LSTM also returns its cell states.
      proj: P, the units that the hidden state of an LSTM is projected to; 0 for no projection.
    """

    cell: str
    T: int
    B: int
    H: int
    D: int = 20
    dtype: str = "f32"
    carry_dtype: str = "f32"
    precision: str | None = "default"
    resets: str = "some"
    reset_dtype: str = "bool"
    reset_state: str | None = None
    reverse: bool = False
    time_major: bool = True
    remat: bool = False
    models: int = 0
    cells: bool = False
    proj: int = 0

    def __str__(self) -> str:
        """Cell, sizes, dtype and resets; of the rest, what is not the default."""
        rest = {
            f"D{self.D}": self.D != 20,
            f"carry={self.carry_dtype}": self.carry_dtype != "f32",
            str(self.precision): self.precision != "default",
            f"resets={self.reset_dtype}": self.reset_dtype != "bool",
            f"state={self.reset_state}": self.reset_state is not None,
            "reverse": self.reverse,
            "batchmajor": not self.time_major,
            "remat": self.remat,
            f"S{self.models}": self.models > 0,
            "cells": self.cells,
            f"P{self.proj}": self.proj > 0,
        }
        names = [self.cell, f"T{self.T}", f"B{self.B}", f"H{self.H}", self.dtype, self.resets]
        return "-".join(names + [name for name, told in rest.items() if told])


WEIGHTS = {
    "gru": lambda H, D: {"w_ih": (D, 3 * H), "w_hh": (H, 3 * H), "b_ih": (3 * H,), "b_hn": (H,)},
    "lstm": lambda H, D, P=0: (
        {"w_ih": (D, 4 * H), "w_hh": (P or H, 4 * H), "b": (4 * H,)} | ({"w_hr": (H, P)} if P else {})
    ),
}
CARRY = {"gru": ("carry",), "lstm": ("carry_c", "carry_h")}
RESET_STATE = {"gru": ("reset_state",), "lstm": ("reset_c", "reset_h")}


def weights(case: Case) -> dict[str, tuple[int, ...]]:
    """The weights of `case`: shapes by name."""
    return WEIGHTS[case.cell](case.H, case.D, *((case.proj,) if case.proj else ()))


def width(case: Case, name: str) -> int:
    """Of a state, a reset state, or an output of every step, that of the hidden or of the cell state."""
    return case.H if name in ("carry_c", "reset_c", "cs") else case.proj or case.H


def sequences(case: Case) -> tuple[str, ...]:
    """The outputs of `case` that hold a value for every step."""
    return ("ys", "cs") if case.cells else ("ys",)


def time_indexed(case: Case) -> set[str]:
    """The arrays of `case` with a time axis, whose layout depends on `time_major`."""
    names = {"xs", "dxs", "resets", *sequences(case), *("ct_" + name for name in sequences(case))}
    if case.reset_state == "tbh":
        names |= {prefix + name for name in RESET_STATE[case.cell] for prefix in ("", "d")}
    return names


def draws(case: Case) -> int:
    """How many inputs of `case` to judge together: of few elements, one draw's rounding errors are a matter of luck."""
    return 8 if (case.models or 1) * case.B * min(case.H, case.proj or case.H) < 2048 else 1


def make_inputs(case: Case, draw: int = 0) -> Inputs:
    """Operands and cotangents of `case`, with the names that `oracle` gives them, drawn from the name of the case."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()) + draw)
    S, T, B, D = case.models or 1, case.T, case.B, case.D
    steps = (T, B) if case.time_major else (B, T)
    operand, carry = DTYPES[case.dtype], DTYPES[case.carry_dtype]

    def normal(shape: tuple[int, ...], dtype: jnp.dtype, scale: float = 1.0) -> NDArray:
        return (scale * rng.standard_normal((S, *shape), np.float32)).astype(dtype)

    inputs: Inputs = {"xs": normal((*steps, D), operand), "resets": None}
    for name, shape in weights(case).items():
        inputs[name] = normal(shape, operand, scale=shape[0] ** -0.5 if len(shape) == 2 else 0.5)
    for name in CARRY[case.cell]:
        shape = (B, width(case, name))
        inputs[name], inputs["ct_" + name] = normal(shape, carry), normal(shape, carry)
    for name in sequences(case):
        inputs["ct_" + name] = normal((*steps, width(case, name)), carry)
    if case.resets != "none":
        # "some" has one at the first step, one at the last and, from three steps on, a step without.
        resets = rng.random((S, *steps)) < 0.2
        first_last = resets if case.time_major else np.swapaxes(resets, 1, 2)
        first_last[:, 0, 0] = first_last[:, -1, -1] = True
        first_last[:, 1:2, 0] = T < 3
        inputs["resets"] = (resets | (case.resets == "all")).astype(case.reset_dtype)
    if case.reset_state is not None:
        lead = {"h": (), "bh": (B,), "tbh": steps}[case.reset_state]
        for name in RESET_STATE[case.cell]:
            inputs[name] = normal((*lead, width(case, name)), operand)
    return inputs if case.models else {name: None if x is None else x[0] for name, x in inputs.items()}


def run(case: Case, inputs: Inputs, implementation: str | None) -> Outputs:
    """Outputs and every gradient of `case`, from `jax.vjp` under `jax.jit`."""
    return _call(_with_gradients, case, inputs, implementation)


def run_forward(case: Case, inputs: Inputs, implementation: str | None) -> Outputs:
    """Outputs of `case` where no gradient is asked for, under `jax.jit`."""
    return _call(_forward, case, inputs, implementation)


def run_oracle(case: Case, inputs: Inputs) -> Outputs:
    """Outputs and every gradient of `case` in float64, from the same numbers."""

    def swap(arrays: Inputs) -> Inputs:
        swapped = () if case.time_major else time_indexed(case)
        return {k: np.swapaxes(x, 0, 1) if k in swapped and x is not None else x for k, x in arrays.items()}

    def one(inputs: Inputs) -> Outputs:
        results = swap(oracle.CELLS[case.cell](swap(inputs), reverse=case.reverse))
        return {name: x for name, x in results.items() if name != "cs" or case.cells}

    if not case.models:
        return one(inputs)
    each = [one({k: None if x is None else x[s] for k, x in inputs.items()}) for s in range(case.models)]
    return {name: np.stack([results[name] for results in each]) for name in each[0]}


def run_float64(case: Case, inputs: Inputs) -> Outputs:
    """Outputs and every gradient of `case` from the same numbers, by the reference in float64.

    Compiled, and on a GPU if there is one: for cases that keep the oracle's loop busy for many seconds. It is held to
    the oracle in test_reference.py and test_kernels_gpu.py, so what is held to it is held to the oracle.
    """
    wide = dataclasses.replace(case, dtype="f64", carry_dtype="f64", precision="highest", remat=False)
    with jax.enable_x64(True):
        inputs = {name: x if x is None or name == "resets" else x.astype(np.float64) for name, x in inputs.items()}
        return run(wide, inputs, "xla")


def tiny(case: Case, want: NDArray) -> float:
    """What an error may exceed twice XLA's by: the last bits of float32, and the luck of few elements.

    The norm of n rounding errors strays from what is typical by about 1 / sqrt(n) of it, and the rounding of the
    operands sets what is typical.
    """
    rounding = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-11 if case.precision == "default" else 2.0**-24}
    return 4 * 2.0**-23 + rounding[case.dtype] / np.sqrt(max(want.size, 1))


def _call(function: Callable, case: Case, inputs: Inputs, implementation: str | None) -> Outputs:
    # "some" and "all" differ in values only and share a compilation.
    same = dataclasses.replace(case, resets="none" if case.resets == "none" else "some")
    results = _compiled(function, same, implementation)({name: x for name, x in inputs.items() if x is not None})
    return {name: np.asarray(x) for name, x in results.items()}


@functools.lru_cache(maxsize=16)
def _compiled(function: Callable, case: Case, implementation: str | None) -> Callable:
    one = functools.partial(function, case, implementation)
    return jax.jit(jax.vmap(one) if case.models else one)


def _forward(case: Case, implementation: str | None, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    carry_names, reset_names = CARRY[case.cell], RESET_STATE[case.cell]
    params = {name: inputs[name] for name in weights(case)}
    carry = tuple(inputs[name] for name in carry_names)
    reset_state = None if case.reset_state is None else tuple(inputs[name] for name in reset_names)
    options = {
        "resets": inputs.get("resets"),
        "reverse": case.reverse,
        "time_major": case.time_major,
        "precision": case.precision,
        "remat": case.remat,
        "implementation": implementation,
    }
    if case.cell == "gru":
        reset_state = reset_state if reset_state is None else reset_state[0]
        last, ys = jaxrnn.gru(jaxrnn.GRUParams(**params), *carry, inputs["xs"], reset_state=reset_state, **options)
        return {"ys": ys, "carry": last}
    last, ys = jaxrnn.lstm(
        jaxrnn.LSTMParams(**params),
        carry,
        inputs["xs"],
        reset_state=reset_state,
        return_cells=case.cells,
        **options,
    )
    ys = dict(zip(("ys", "cs"), ys, strict=True)) if case.cells else {"ys": ys}
    return ys | dict(zip(carry_names, last, strict=True))


def _with_gradients(case: Case, implementation: str | None, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    fixed = {name: x for name, x in inputs.items() if name == "resets" or name.startswith("ct_")}
    differentiated = {name: x for name, x in inputs.items() if name not in fixed}
    outputs, vjp = jax.vjp(lambda arrays: _forward(case, implementation, fixed | arrays), differentiated)
    (gradients,) = vjp({name: inputs["ct_" + name] for name in outputs})
    return outputs | {"d" + name: x for name, x in gradients.items()}


def stack(results: Sequence[Outputs]) -> Outputs:
    """The results of several draws as one, so that their errors are taken together."""
    return {name: np.stack([result[name] for result in results]) for name in results[0]}


def check(case: Case, got: Outputs, xla: Outputs, want: Outputs) -> None:
    """Holds every output and gradient to twice the error that XLA makes at the same precision."""
    compare(got, want, lambda name: 2 * oracle.error(xla[name], want[name]) + tiny(case, want[name]))


def compare(got: Outputs, want: Outputs, bound: Callable[[str], float]) -> None:
    """Fails, naming all of them, if any array is further from `want` than `bound` of its name."""
    assert got.keys() <= want.keys()
    errors = {name: (oracle.error(x, want[name]), bound(name)) for name, x in got.items()}
    bad = [f"{name}: {e:.2e} > {limit:.2e}" for name, (e, limit) in errors.items() if not e <= limit]
    assert not bad, "; ".join(bad)


def _dedupe(cases: list[Case]) -> tuple[Case, ...]:
    return tuple(dict.fromkeys(cases))


def _interpreted() -> tuple[Case, ...]:
    """Small and odd: every feature, and every way to share the work, at least once for each cell.

    At the highest precision, weights of more than 64 units are always shared among programs; at the default one, the
    kernels round to TF32 above 32 units. No bfloat16: the interpreter cannot multiply it.
    """
    cases = []
    for cell in ("gru", "lstm"):
        base = Case(cell, T=4, B=5, H=12, D=7, precision="highest")

        def vary(base: Case = base, **changes: object) -> None:
            cases.append(dataclasses.replace(base, **changes))

        vary()
        vary(resets="none")
        vary(resets="all", reset_state="h")
        vary(reset_state="h", remat=True)
        vary(reset_state="bh", reverse=True)
        vary(reset_state="tbh", time_major=False, reset_dtype="float32")
        vary(T=1, B=1, H=1, D=1)
        vary(T=3, B=19, H=24, reset_dtype="int32")
        vary(reverse=True, time_major=False, remat=True, resets="none")
        vary(models=2, reset_state="tbh", reverse=True)
        vary(models=3, time_major=False, reset_state="h", remat=True)
        vary(T=3, H=17, dtype="f16", precision="default", reset_state="h")
        vary(T=3, H=17, dtype="f16", carry_dtype="f16", precision="default", remat=True)
        vary(T=3, H=36, precision="default", reset_state="bh")
        vary(precision="high", reset_state="h")
        vary(T=3, H=70, reset_state="h")
        vary(T=3, B=19, H=70, resets="none", reverse=True)
        vary(T=3, H=70, reset_state="tbh", time_major=False, reverse=True, remat=True)
        vary(T=2, H=70, models=2, reset_state="bh", time_major=False)
        vary(T=2, H=136, dtype="f16", precision="default", reset_state="h")
        if cell == "lstm":
            vary(cells=True)
            vary(T=3, H=70, cells=True, models=2, reset_state="tbh")
            vary(cells=True, reset_state="tbh", reverse=True, time_major=False, remat=True)
            vary(cells=True, models=2, reset_state="bh", dtype="f16", precision="default")
            vary(proj=5)
            vary(proj=5, resets="none", reverse=True, cells=True)
            vary(proj=5, resets="none", time_major=False, remat=True)
            vary(proj=5, resets="all", reset_state="h", reset_dtype="float32")
            vary(proj=5, reset_state="h", remat=True, reverse=True)
            vary(proj=14, reset_state="bh", reverse=True, time_major=False, cells=True)  # wider than the cell state
            vary(proj=5, reset_state="tbh", models=2, remat=True)
            vary(proj=5, models=3, time_major=False, reverse=True)
            vary(T=1, B=1, H=2, D=1, proj=1, reset_state="tbh")
            vary(T=3, H=17, dtype="f16", precision="default", reset_state="h", proj=6)
            vary(T=3, H=17, dtype="f16", carry_dtype="f16", precision="default", remat=True, proj=6)
            vary(T=3, H=36, precision="default", reset_state="bh", proj=9)
            vary(precision="default", reset_state="h", proj=5)
            vary(T=3, H=70, reset_state="h", proj=18)
    return _dedupe(cases)


def _gpu() -> tuple[Case, ...]:
    """Hidden sizes by batch sizes by resets in full for float32; other axes over the sizes that differ in kind."""
    hidden, batch, resets = (1, 24, 64, 100, 128, 192, 256, 512, 1024), (1, 3, 16, 64, 2048), ("none", "some", "all")
    cases = []
    for cell in ("gru", "lstm"):

        def add(H: int, B: int, cell: str = cell, T: int = 13, **changes: object) -> None:
            cases.append(Case(cell, T=T, B=B, H=H, **changes))

        for H, B, reset in itertools.product(hidden, batch, resets):
            add(H, B, resets=reset)
        for i, (H, precision) in enumerate(itertools.product(hidden, ("highest", "high"))):
            add(H, (16, 64, 3, 2048)[i % 4], precision=precision, reset_state="h", cells=cell == "lstm")
        for i, (H, dtype) in enumerate(itertools.product(hidden, ("bf16", "f16"))):
            add(H, (64, 2048, 16, 3)[i % 4], dtype=dtype, reset_state=(None, "h")[i % 2], remat=i % 3 == 0)
            add(H, (16, 3, 2048, 64)[i % 4], dtype=dtype, carry_dtype=dtype, resets=resets[i % 3])
        for H, B in ((24, 3), (128, 64), (256, 2048), (512, 16), (1024, 64)):
            add(H, B, reset_state="h", remat=True)
            add(H, B, reset_state="bh", reverse=True, reset_dtype="float32")
            add(H, B, reset_state="tbh", time_major=False, resets="all", reset_dtype="int32")
            add(H, B, reset_state="tbh", reverse=True, time_major=False, remat=True)
            add(H, B, models=3, reset_state="h")
            add(H, B, models=2, reset_state="tbh", time_major=False, reverse=True, remat=True, dtype="bf16")
            add(H, B, D=H, resets="none", remat=True)
            if cell == "lstm":
                add(H, B, cells=True, resets="none")
                add(H, B, cells=True, reset_state="tbh", reverse=True, time_major=False, remat=True)
                add(H, B, cells=True, models=2, reset_state="bh", dtype="f16")
        # every tiling for large batches, with all that a kernel can be given
        for (H, B), kind in itertools.product(
            ((128, 2048), (256, 2048), (512, 256)), ({}, {"dtype": "bf16"}, {"precision": "highest"})
        ):
            add(H, B, reset_state="tbh", **kind)
        add(128, 16, T=1, reset_state="h")
        add(100, 3, T=257, reset_state="bh")
        add(48, 299)  # masked blocks of 64, and a part of a tile
        add(64, 300, models=2, reverse=True)
        add(48, 19, models=2, time_major=False, reverse=True)
        add(256, 64, T=128, precision="highest", remat=True)
        # a program a sequence: parts of a block, turns not all taken, many sequences of many models
        for H, B, T in ((32, 64, 13), (16, 19, 14), (31, 300, 15), (32, 3, 257), (8, 2500, 2)):
            add(H, B, T=T)
            add(H, B, T=T, dtype="bf16", time_major=False, reverse=True)
        add(32, 20, models=40)
        add(20, 64, models=3, dtype="f16", reverse=True, resets="all")
        for H, B in ((64, 64), (40, 19), (33, 1500), (65, 19), (128, 64), (128, 300)):
            add(H, B, precision="highest", reverse=B == 19, resets="some" if B < 100 else "none")
            add(H, 3, precision="highest", models=5)
        add(100, 64, precision="highest")
        add(64, 19, precision="high", cells=cell == "lstm", T=6)
        # programs that share units: parts of a block and of a tile, many steps, many tiles of many models
        add(300, 19)
        add(300, 19, dtype="bf16", time_major=False, reverse=True)
        add(384, 3, T=257)
        add(256, 20, models=40)
        add(448, 64)
        add(576, 19)
        add(256, 64, models=2, dtype="bf16", time_major=False, reverse=True)
        # sequences as rows: parts of a block, of a tile and of a group of programs, many tiles of many models
        add(700, 100)
        add(650, 130, dtype="bf16", time_major=False, reverse=True)
        add(640, 3, T=257)
        add(520, 200, models=7, reset_state="h")
        add(896, 300, resets="none")
        if cell == "lstm":
            add(100, 64, cells=True)
            add(384, 64, cells=True)
            add(512, 64, cells=True, resets="none")
            add(800, 19, cells=True, reset_state="bh")
            for H, dtype in itertools.product((24, 128, 256, 700), ("f32", "bf16")):
                for P, B in ((H // 4, 64), (H // 2, 16)):
                    add(H, B, dtype=dtype, proj=P)
                    add(H, B, dtype=dtype, proj=P, reset_state="h", reverse=True)
                    add(H, B, dtype=dtype, proj=P, reset_state="tbh", time_major=False, remat=True, cells=True)
                add(H, 3, dtype=dtype, proj=H // 2, resets="none", time_major=False, reverse=True)
                add(H, 19, dtype=dtype, proj=H // 4, models=3, reset_state="bh", reset_dtype="int32")
                add(H, 64, dtype=dtype, carry_dtype="bf16" if dtype == "bf16" else "f32", proj=H // 2, T=65, D=H)
            for H, precision in itertools.product((24, 128, 256, 700), ("high", "highest")):
                add(H, 64, precision=precision, proj=H // 4, reset_state="h", cells=True)
            add(128, 64, dtype="f16", carry_dtype="f16", proj=64, reset_state="h")
            add(128, 2048, proj=32)
    return _dedupe(cases)


INTERPRETED = _interpreted()
GPU = _gpu()
# Without gradients nothing is saved, and `remat` says nothing.
GPU_FORWARD = tuple(
    case
    for case in GPU
    if case.H in (24, 64, 100, 256, 1024) and case.B in (3, 64) and case.resets == "some" and not case.remat
)

# Where operands are scaled to 16 bits on a Hopper GPU, and widths where they are not.
OF_EVERY_SIZE = tuple(
    Case(cell, T=9, B=B, H=H)
    for cell in WEIGHTS
    for H, B in ((32, 16), (64, 16), (64, 300), (100, 16), (128, 16), (256, 16), (700, 16))
)
