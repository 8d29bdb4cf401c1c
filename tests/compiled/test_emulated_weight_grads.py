"""Runs the launch of weight gradients, compiled for an A100, in the PTX emulator, and compares it with float64."""

import itertools

import emulated
import pytest
import torch
import weight_sums

from torch_bridge.tiling import RESET_STATES
from torch_bridge.tiling.devices import PROFILES
from torch_bridge.weight_grads import Launch, Layout, Problem

pytestmark = pytest.mark.compile_only

GROUPS, STEPS, BATCH, INPUTS, HIDDEN = 2, 9, 19, 8, 128


def problem_of(cell, dtype, reset_state, reverse, models=1):
    gates, separate = (3, True) if cell == "gru" else (3, False)
    names = ("x", "hs", "h0", "dxp", *(("dhn",) if separate else ()), *(("reset_h",) if reset_state != "zeros" else ()))
    dtypes = [(name, dtype) for name in names] + [("reset", "bool")]
    dtypes += [("scale", "float32")] if "norm" in cell else []
    dtypes += [("x_mean", "float32")] if cell == "layer_norm_gru" else []
    sizes = (models, GROUPS, STEPS, BATCH, INPUTS, HIDDEN, gates * HIDDEN)
    return Problem(*sizes, tuple(dtypes), reverse, reset_state)


def make_arrays(problem):
    torch.manual_seed(0)
    lead, states = (problem.models, GROUPS, STEPS, BATCH), (problem.models, GROUPS, BATCH, HIDDEN)
    shapes = {"x": (*lead, INPUTS), "hs": (*lead, HIDDEN), "h0": states, "dxp": (*lead, problem.gates)}
    shapes |= {"dhn": (*lead, HIDDEN), "reset_h": states if problem.reset_state == "fixed" else (*lead, HIDDEN)}
    dtypes = dict(problem.dtypes)
    arrays = {name: torch.randn(shape, dtype=getattr(torch, dtypes[name])) for name, shape in shapes.items()
              if name in dtypes}  # fmt: skip
    arrays["reset"] = torch.rand(lead) < 0.3
    if problem.reset_state == "stepped":  # only the states of steps that begin an episode count
        arrays["reset_h"][~arrays["reset"]] = float("nan")
    if "scale" in dtypes:
        arrays["scale"] = torch.rand((*lead, 1)) + 0.5
    if "x_mean" in dtypes:
        arrays["x_mean"] = torch.randn((*lead, 1))
    layout = Layout.of(INPUTS, HIDDEN, problem.gates, problem.last_gate_separate)
    return arrays | {"sums": torch.full((problem.models, layout.end), float("nan"))}


CELLS = ("gru", "rms_norm_gru", "layer_norm_gru")
CASES = [
    *itertools.product(CELLS, ("float32",), RESET_STATES, (False, True)),
    *itertools.product(CELLS, ("bfloat16",), ("stepped",), (False, True)),
]


@pytest.mark.quick("cell")
@pytest.mark.parametrize(("cell", "dtype", "reset_state", "reverse"), CASES)
def test_sums_equal_those_of_float64(cell, dtype, reset_state, reverse):
    launch = Launch(problem_of(cell, dtype, reset_state, reverse, models=2), PROFILES["a100"])
    arrays = make_arrays(launch.problem)
    before = arrays["hs"].roll(-1 if reverse else 1, 2)
    before[arrays["reset"]] = float("nan")  # states that a reset discards
    arrays["hs"] = before.roll(1 if reverse else -1, 2)
    assert launch.tiling.programs > 1
    wide = {name: x.double().numpy() for name, x in arrays.items()}
    want = torch.from_numpy(weight_sums.in_one_row(weight_sums.step_by_step(wide, reverse)))
    emulated.run(launch, arrays, emulated.kernels_of(launch))
    error = (arrays["sums"].double() - want).norm() / want.norm()
    assert error < 5e-4, error
