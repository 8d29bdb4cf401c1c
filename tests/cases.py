"""Defines the cases that tests of all implementations share, and runs them."""

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

from benchmarks.oracle import FUNCTIONS
from jaxrnn.cells import CELLS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    Inputs = dict[str, NDArray | None]
    Outputs = dict[str, NDArray]

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "f64": jnp.float64}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a cell's function.

    Attributes:
      cell: a key of `FUNCTIONS`.
      T, B, H, D: number of steps, sequences, hidden units and input features.
      dtype: the dtype of inputs, weights and reset state, a key of `DTYPES`.
      carry_dtype: the dtype of carry and outputs, a key of `DTYPES`.
      precision: as in `jaxrnn.gru`.
      resets: "none" (the argument is None), "some" or "all".
      reset_dtype: the dtype of `resets`.
      reset_state: None, or "h", "bh" or "tbh", which name the axes of its shape.
      models: length of the leading axis of all arrays, which `jax.vmap` maps over; 0 without that axis.
      cells: whether an LSTM also returns its cell states.
      proj: P, the number of units to which an LSTM projects its hidden state; 0 without a projection.
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
        """Returns cell, sizes, dtype and resets, followed by the other attributes that are not defaults."""
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


# The cells that are tested less than the first two.
OTHERS = tuple(name for name in FUNCTIONS if name not in ("gru", "lstm"))
CARRY = {name: ("carry",) if len(CELLS[name].states) == 1 else ("carry_c", "carry_h") for name in FUNCTIONS}
RESET_STATE = {name: ("reset_state",) if len(CELLS[name].states) == 1 else ("reset_c", "reset_h") for name in FUNCTIONS}


def weights(case: Case) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights of `case` by name."""
    shapes = CELLS[case.cell].shapes(case.D, case.H)
    shapes |= {name: (case.D if axis == "D" else case.H,) for name, axis in CELLS[case.cell].optional}
    return shapes | ({"w_hh": (case.proj, 4 * case.H), "w_hr": (case.H, case.proj)} if case.proj else {})


def unwrap(states: tuple) -> object:
    """Returns one state as it is and two as a tuple, as the functions take them."""
    return states[0] if len(states) == 1 else states


def width(case: Case, name: str) -> int:
    """Returns the width of a state, reset state or per-step output: H for cell states, P (or H) for hidden states."""
    return case.H if name in ("carry_c", "reset_c", "cs") else case.proj or case.H


def sequences(case: Case) -> tuple[str, ...]:
    """Returns the names of the outputs of `case` that have a value for every step."""
    return ("ys", "cs") if case.cells else ("ys",)


def time_indexed(case: Case) -> set[str]:
    """Returns the names of the arrays of `case` with a time axis, whose layout depends on `time_major`."""
    names = {"xs", "dxs", "resets", *sequences(case), *("ct_" + name for name in sequences(case))}
    if case.reset_state == "tbh":
        names |= {prefix + name for name in RESET_STATE[case.cell] for prefix in ("", "d")}
    return names


def rounds_signs(case: Case) -> bool:
    """Returns whether rounded products change the signs of many gates of a ReLU, and so its derivatives.

    These changes are then the larger part of an implementation's error.
    """
    return case.cell == "simple_relu" and case.precision == "default"


def follows_signs(case: Case) -> bool:
    """Returns whether the oracle follows the signs of an implementation's outputs.

    With a ReLU whose products are not rounded, signs change so rarely that the number of changes in a case is chance.
    """
    return case.cell == "simple_relu" and not rounds_signs(case)


def draws(case: Case) -> int:
    """Returns the number of draws to evaluate together: with few elements, the error of one draw is mostly chance.

    Where signs change, the draws together contain 2**17 elements, or are 64. The gradient of an initial state depends
    only on the steps before the first reset, where few signs change. With 2**15 elements, the error of that gradient
    varied from a third to one and a half times its value for many draws.
    """
    elements = (case.models or 1) * case.B * min(case.H, case.proj or case.H)
    fewest = 8 if elements < 2048 else 1
    return max(fewest, min(64, -(-(2**17) // elements))) if rounds_signs(case) else fewest


def make_inputs(case: Case, draw: int = 0) -> Inputs:
    """Returns operands and cotangents by their names in `oracle`; the seed is a hash of the case's name plus `draw`."""
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
        # "some" has a reset at the first step, one at the last step and, with three or more steps, a step without one.
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
    """Returns outputs and every gradient of `case`, from `jax.vjp` under `jax.jit`."""
    return _call(_with_gradients, case, inputs, implementation)


def run_forward(case: Case, inputs: Inputs, implementation: str | None) -> Outputs:
    """Returns the outputs of `case`, computed without gradients under `jax.jit`."""
    return _call(_forward, case, inputs, implementation)


def run_oracle(case: Case, inputs: Inputs) -> Outputs:
    """Returns outputs and every gradient of `case`, computed by the oracle in float64 from the same inputs."""

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
    """Returns outputs and every gradient of `case`, computed by the reference in float64 from the same inputs.

    The reference is compiled, and runs on a GPU if there is one. It replaces the oracle in cases for which the oracle's
    loop takes many seconds. test_reference.py and test_kernels_gpu.py compare the reference with the oracle.
    """
    wide = dataclasses.replace(case, dtype="f64", carry_dtype="f64", precision="highest", remat=False)
    with jax.enable_x64(True):
        inputs = {name: x if x is None or name == "resets" else x.astype(np.float64) for name, x in inputs.items()}
        return run(wide, inputs, "xla")


def tiny(case: Case, want: NDArray) -> float:
    """Returns by how much an error may exceed twice XLA's: the last bits of float32, and a margin for few elements.

    The norm of n rounding errors deviates from its typical value by about 1 / sqrt(n) of that value, and the rounding
    of the operands determines the typical value.
    """
    rounding = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-11 if case.precision == "default" else 2.0**-24}
    return 4 * 2.0**-23 + rounding[case.dtype] / np.sqrt(max(want.size, 1))


def _call(function: Callable, case: Case, inputs: Inputs, implementation: str | None) -> Outputs:
    # "some" and "all" differ only in values, so they share a compilation.
    same = dataclasses.replace(case, resets="none" if case.resets == "none" else "some")
    results = _compiled(function, same, implementation)({name: x for name, x in inputs.items() if x is not None})
    return {name: np.asarray(x) for name, x in results.items()}


@functools.lru_cache(maxsize=16)
def _compiled(function: Callable, case: Case, implementation: str | None) -> Callable:
    one = functools.partial(function, case, implementation)
    return jax.jit(jax.vmap(one) if case.models else one)


def _forward(case: Case, implementation: str | None, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    carry_names, reset_names = CARRY[case.cell], RESET_STATE[case.cell]
    params = CELLS[case.cell].params(**{name: inputs[name] for name in weights(case)})
    reset_state = None if case.reset_state is None else unwrap(tuple(inputs[name] for name in reset_names))
    last, ys = FUNCTIONS[case.cell](
        params,
        unwrap(tuple(inputs[name] for name in carry_names)),
        inputs["xs"],
        resets=inputs.get("resets"),
        reset_state=reset_state,
        reverse=case.reverse,
        time_major=case.time_major,
        precision=case.precision,
        remat=case.remat,
        implementation=implementation,
        **({"return_cells": case.cells} if case.cell == "lstm" else {}),
    )
    ys = dict(zip(("ys", "cs"), ys, strict=True)) if case.cells else {"ys": ys}
    return ys | dict(zip(carry_names, last if len(carry_names) > 1 else (last,), strict=True))


def _with_gradients(case: Case, implementation: str | None, inputs: dict[str, jax.Array]) -> dict[str, jax.Array]:
    fixed = {name: x for name, x in inputs.items() if name == "resets" or name.startswith("ct_")}
    differentiated = {name: x for name, x in inputs.items() if name not in fixed}
    outputs, vjp = jax.vjp(lambda arrays: _forward(case, implementation, fixed | arrays), differentiated)
    (gradients,) = vjp({name: inputs["ct_" + name] for name in outputs})
    return outputs | {"d" + name: x for name, x in gradients.items()}


def stack(results: Sequence[Outputs]) -> Outputs:
    """Stacks the results of several draws, so that errors are computed over all draws together."""
    return {name: np.stack([result[name] for result in results]) for name in results[0]}


def with_signs(case: Case, inputs: Inputs, ys: NDArray) -> Inputs:
    """Returns inputs for the oracle that, if it `follows_signs`, contain the outputs with these signs.

    Otherwise changed signs count as errors.
    """
    return inputs | {"ys": ys} if follows_signs(case) else inputs


def check_draws(
    case: Case, got: Sequence[Outputs], xla: Sequence[Outputs], wanted: Callable[[int, Outputs], Outputs]
) -> Outputs:
    """Asserts what `check` does, over several draws together, and returns what is wanted.

    `wanted` returns what is wanted of one draw, given its index and the results that it is compared with, for
    `with_signs`.
    """

    def of_each(results: Sequence[Outputs]) -> Outputs:
        return stack([wanted(draw, one) for draw, one in enumerate(results)])

    want = of_each(got)
    check(case, stack(got), stack(xla), want, of_each(xla) if follows_signs(case) else want)
    return want


def check(case: Case, got: Outputs, xla: Outputs, want: Outputs, want_of_xla: Outputs | None = None) -> None:
    """Asserts that each output and gradient has at most twice the error of XLA at the same precision, plus `tiny`.

    `want_of_xla` is what XLA's results are compared with, if that is not `want`.
    """
    of_xla = want if want_of_xla is None else want_of_xla
    compare(got, want, lambda name: 2 * oracle.error(xla[name], of_xla[name]) + tiny(case, want[name]))


def compare(got: Outputs, want: Outputs, bound: Callable[[str], float]) -> None:
    """Asserts that the relative error of each array is at most `bound(name)`; the message names all that exceed it."""
    assert got.keys() <= want.keys()
    errors = {name: (oracle.error(x, want[name]), bound(name)) for name, x in got.items()}
    bad = [f"{name}: {e:.2e} > {limit:.2e}" for name, (e, limit) in errors.items() if not e <= limit]
    assert not bad, "; ".join(bad)


def _dedupe(cases: list[Case]) -> tuple[Case, ...]:
    return tuple(dict.fromkeys(cases))


def deal(values: Iterable, cells: Iterable[str], whole: Sequence[str]) -> list[tuple]:
    """Returns `(cell, value)`: every value with every cell in `whole`, and one after the other with the other cells.

    It is for code that is the same for all cells but for their entry in a table: every cell shows that its entry is
    complete, and those in `whole` that the code is right.
    """
    values, others = list(values), [cell for cell in cells if cell not in whole]
    turns = max(len(values), len(others)) if others else 0
    dealt = [(others[i % len(others)], values[i % len(values)]) for i in range(turns)]
    return [*itertools.product(whole, values), *dealt]


def _interpreted() -> tuple[Case, ...]:
    """Returns small cases of irregular sizes: every feature and every way to divide the work, for each cell.

    At the highest precision, programs always share the weights of more than 64 units. At the default precision, the
    kernels round to TF32 above 32 units. No case has bfloat16, because the interpreter multiplies it wrongly.
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
            vary(proj=14, reset_state="bh", reverse=True, time_major=False, cells=True)  # P is larger than H
            vary(proj=5, reset_state="tbh", models=2, remat=True)
            vary(proj=5, models=3, time_major=False, reverse=True)
            vary(T=1, B=1, H=2, D=1, proj=1, reset_state="tbh")
            vary(T=3, H=17, dtype="f16", precision="default", reset_state="h", proj=6)
            vary(T=3, H=17, dtype="f16", carry_dtype="f16", precision="default", remat=True, proj=6)
            vary(T=3, H=36, precision="default", reset_state="bh", proj=9)
            vary(precision="default", reset_state="h", proj=5)
            vary(T=3, H=70, reset_state="h", proj=18)
    for cell in OTHERS:
        base = Case(cell, T=4, B=5, H=12, D=7, precision="highest")
        cases += [dataclasses.replace(base, **changes) for changes in (
            {"resets": "none"}, {"resets": "all", "reset_state": "h", "remat": True},
            {"reset_state": "tbh", "time_major": False, "reverse": True, "remat": True},
            {"T": 1, "B": 1, "H": 1, "D": 1}, {"models": 2, "reset_state": "bh", "time_major": False},
            {"T": 3, "B": 19, "H": 17, "dtype": "f16", "carry_dtype": "f16", "precision": "default"},
            {"T": 3, "B": 19, "H": 36, "precision": "default", "reset_state": "bh"},
            {"T": 3, "H": 70, "reset_state": "h", "reverse": True},
            {"T": 2, "H": 136, "dtype": "f16", "precision": "default", "reset_state": "tbh"},
        )]  # fmt: skip
    return _dedupe(cases)


def _gpu() -> tuple[Case, ...]:
    """Returns all combinations of hidden size, batch size and resets in float32; other options at selected sizes."""
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
        # every tiling for large batches, with per-step reset states
        for (H, B), kind in itertools.product(
            ((128, 2048), (256, 2048), (512, 256)), ({}, {"dtype": "bf16"}, {"precision": "highest"})
        ):
            add(H, B, reset_state="tbh", **kind)
        add(128, 16, T=1, reset_state="h")
        add(100, 3, T=257, reset_state="bh")
        add(48, 299)  # masked blocks of 64 units, and a partly filled tile
        add(64, 300, models=2, reverse=True)
        add(48, 19, models=2, time_major=False, reverse=True)
        add(256, 64, T=128, precision="highest", remat=True)
        # one program per sequence: partly filled blocks, remainders of unrolled loops, many sequences of many models
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
        # programs that share units: partly filled blocks and tiles, many steps, many tiles of many models
        add(300, 19)
        add(300, 19, dtype="bf16", time_major=False, reverse=True)
        add(384, 3, T=257)
        add(256, 20, models=40)
        add(448, 64)
        add(576, 19)
        add(256, 64, models=2, dtype="bf16", time_major=False, reverse=True)
        # sequences as rows: partly filled blocks, tiles and groups of programs, many tiles of many models
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
    for cell in OTHERS:
        sizes = (
            (1, 1),
            (24, 3),
            (32, 2048),
            (64, 64),
            (100, 16),
            (128, 64),
            (128, 2048),
            (256, 300),
            (512, 16),
            (1000, 64),
        )
        kinds = ({}, {"dtype": "bf16"}, {"precision": "highest"})
        options = (
            {"reset_state": "h", "remat": True}, {"reverse": True, "reset_state": "bh", "reset_dtype": "float32"},
            {"resets": "none", "time_major": False}, {"models": 3, "reset_state": "tbh", "D": 8},
        )  # fmt: skip
        for i, ((H, B), kind) in enumerate(itertools.product(sizes, kinds)):
            if H > 1 or kind != {"dtype": "bf16"}:  # XLA does not round the operands of a product of one unit
                cases.append(Case(cell, T=13, B=B, H=H, **kind, **options[i % 4]))
        cases += [Case(cell, T=257, B=3, H=H, dtype="f16", carry_dtype="f16") for H in (20, 64, 128, 300)]
    return _dedupe(cases)


INTERPRETED = _interpreted()
GPU = _gpu()
# Without gradients there are no residuals, so `remat` has no effect.
GPU_FORWARD = tuple(
    case
    for case in GPU
    if case.H in (24, 64, 100, 256, 1024) and case.B in (3, 64) and case.resets == "some" and not case.remat
)

# At some of these sizes, a Hopper GPU scales operands to 16 bits; at others, it does not. The other cells have one size
# for each of their time loops.
OF_EVERY_SIZE = tuple(
    Case(cell, T=9, B=B, H=H)
    for cell in FUNCTIONS
    for H, B in ((32, 16), (64, 16), (64, 300), (100, 16), (128, 16), (256, 16), (700, 16))
    if cell not in OTHERS or (H, B) in ((32, 16), (128, 16), (256, 16))
)
