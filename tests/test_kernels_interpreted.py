"""The kernels in Triton's interpreter, end to end inside `jit` on the CPU, against float64."""

import functools

import cases
import pytest

from torch_bridge import config

pytestmark = pytest.mark.interpret

TF32 = 2e-3


def check(case, got, xla, want):
    """As on a GPU, but at the default precision XLA on a CPU is no yardstick: it does not round to TF32, kernels do."""
    if (case.dtype, case.precision) == ("f32", "default"):
        cases.compare(got, want, lambda name: TF32)
    else:
        cases.check(case, got, xla, want)


@pytest.mark.parametrize("case", cases.INTERPRETED, ids=str)
def test_outputs_and_gradients_match_the_oracle(case):
    inputs = cases.make_inputs(case)
    want = cases.run_oracle(case, inputs)
    got, xla = (cases.run(case, inputs, implementation) for implementation in ("triton", "xla"))
    assert got.keys() == want.keys()
    check(case, got, xla, want)


@pytest.mark.parametrize("case", cases.INTERPRETED[::3], ids=str)
def test_without_gradients_nothing_changes(case):
    inputs = cases.make_inputs(case)
    want = cases.run_oracle(case, inputs)
    got, xla = (cases.run_forward(case, inputs, implementation) for implementation in ("triton", "xla"))
    check(case, got, xla, want)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_programs_take_tiles_in_turn(cell, monkeypatch):
    """A device of few multiprocessors: two tiles for each model, and room for one at a time."""
    monkeypatch.setattr(config, "Device", functools.partial(config.Device, multiprocessors=2))
    case = cases.Case(cell, T=2, B=70, H=70, D=7, precision="highest", reset_state="h", models=2)
    inputs = cases.make_inputs(case)
    cases.check(case, cases.run(case, inputs, "triton"), cases.run(case, inputs, "xla"), cases.run_oracle(case, inputs))
