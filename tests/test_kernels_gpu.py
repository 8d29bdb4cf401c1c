"""The compiled kernels, inside `jit`, against float64: no further away than twice XLA at the same precision."""

import cases
import numpy as np
import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", cases.GPU, ids=str)
def test_outputs_and_gradients_match_the_oracle(case):
    inputs = cases.make_inputs(case)
    want = cases.run_oracle(case, inputs)
    got, again, xla = (cases.run(case, inputs, implementation) for implementation in ("triton", "triton", "xla"))
    assert got.keys() == want.keys()
    cases.check(case, got, xla, want)
    for name in got:
        np.testing.assert_array_equal(got[name], again[name], err_msg=name)


@pytest.mark.parametrize("case", [case for case in cases.GPU if case.B in (3, 64) and case.resets == "some"], ids=str)
def test_without_gradients_nothing_changes(case):
    inputs = cases.make_inputs(case)
    want = cases.run_oracle(case, inputs)
    got, xla = (cases.run_forward(case, inputs, implementation) for implementation in ("triton", "xla"))
    cases.check(case, got, xla, want)
