"""The compiled kernels, inside `jit`, against float64: no further away than twice XLA at the same precision."""

import cases
import numpy as np
import pytest

pytestmark = pytest.mark.gpu

# From this many products a gate on, NumPy takes seconds, and the reference in float64 stands in for the oracle.
LARGE = 2**31


def run_float64(case, inputs):
    large = (case.models or 1) * case.T * case.B * case.H**2 >= LARGE
    return (cases.run_float64 if large else cases.run_oracle)(case, inputs)


@pytest.mark.parametrize("case", cases.GPU, ids=str)
def test_outputs_and_gradients_match_the_oracle(case):
    inputs = [cases.make_inputs(case, draw) for draw in range(cases.draws(case))]
    want = cases.stack([run_float64(case, x) for x in inputs])
    got, again, xla = (
        cases.stack([cases.run(case, x, implementation) for x in inputs])
        for implementation in ("triton", "triton", "xla")
    )
    assert got.keys() == want.keys()
    cases.check(case, got, xla, want)
    for name in got:
        np.testing.assert_array_equal(got[name], again[name], err_msg=name)


@pytest.mark.parametrize("case", cases.GPU_FORWARD, ids=str)
def test_without_gradients_nothing_changes(case):
    inputs = [cases.make_inputs(case, draw) for draw in range(cases.draws(case))]
    want = cases.stack([run_float64(case, x) for x in inputs])
    got, xla = (
        cases.stack([cases.run_forward(case, x, implementation) for x in inputs])
        for implementation in ("triton", "xla")
    )
    cases.check(case, got, xla, want)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_reference_in_float64_matches_the_oracle(cell):
    """On this GPU, where it stands in for the oracle."""
    case = cases.Case(cell, T=13, B=64, H=256, reset_state="h", cells=cell == "lstm")
    inputs = cases.make_inputs(case)
    got, want = cases.run_float64(case, inputs), cases.run_oracle(case, inputs)
    assert got.keys() == want.keys()
    cases.compare(got, want, lambda name: 1e-12)
