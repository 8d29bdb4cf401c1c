"""Tests the sums that replace the launch of weight gradients where a program runs on a CPU or scans instead."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import weight_sums

from jaxrnn import _bridge
from jaxrnn._bridge.weight_grads import WeightGradsKind
from jaxrnn.cells import CELLS as ENTRIES
from jaxrnn.kernel_vjp import spec, weight_grads

pytestmark = pytest.mark.torch

MODELS, GROUPS, STEPS, BATCH, INPUTS, HIDDEN = 2, 3, 5, 4, 6, 8
CELLS = ("gru", "lstm", "rms_norm_gru", "layer_norm_gru")
CASES = [*itertools.product(CELLS, ("zeros", "fixed", "stepped"), (False, True), ("float32",)),
         ("gru", "stepped", False, "bfloat16"), ("layer_norm_gru", "fixed", True, "bfloat16")]  # fmt: skip


def make_arrays(cell, reset_state, dtype):
    rng = np.random.default_rng(0)
    lead, states = (MODELS, GROUPS, STEPS, BATCH), (MODELS, GROUPS, BATCH, HIDDEN)
    shapes = {"x": (*lead, INPUTS), "hs": (*lead, HIDDEN), "h0": states}
    shapes["dxp"] = (*lead, (4 if cell == "lstm" else 3) * HIDDEN)
    shapes |= {"dhn": (*lead, HIDDEN)} if cell == "gru" else {}
    shapes |= {"reset_h": states if reset_state == "fixed" else (*lead, HIDDEN)} if reset_state != "zeros" else {}
    arrays = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    arrays["reset"] = jnp.asarray(rng.random(lead) < 0.4)
    if "norm" in cell:
        arrays["scale"] = jnp.asarray(rng.uniform(0.5, 2, (*lead, 1)), "float32")
    if cell == "layer_norm_gru":
        arrays["x_mean"] = jnp.asarray(rng.normal(size=(*lead, 1)), "float32")
    return arrays


@pytest.mark.parametrize("promotion", ["standard", "strict"])
@pytest.mark.parametrize(("cell", "reset_state", "reverse", "dtype"), CASES)
def test_sums_equal_those_of_a_loop_over_steps(cell, reset_state, reverse, dtype, promotion):
    from torch_bridge.weight_grads import Layout

    arrays = make_arrays(cell, reset_state, dtype)
    kind = WeightGradsKind(outputs=(), reverse=reverse, reset_state=reset_state)
    with jax.numpy_dtype_promotion(promotion):
        sums = kind.in_xla(arrays)["sums"]
    layout = Layout.of(INPUTS, HIDDEN, arrays["dxp"].shape[-1], "dhn" in arrays)
    want = weight_sums.step_by_step(arrays, reverse)
    got = {name: np.asarray(sums)[:, start:end].reshape(want[name].shape)
           for name, start, end in zip(layout._fields, layout, layout[1:], strict=False) if name in want}  # fmt: skip
    assert got.keys() == want.keys() and sums.shape == (MODELS, layout.end) and sums.dtype == jnp.float32
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], rtol=1e-4, atol=1e-4 if dtype == "float32" else 5e-2, err_msg=name)


@pytest.mark.parametrize("reset_state", ["zeros", "fixed", "stepped"])
def test_results_have_the_shapes_of_the_weights(reset_state):
    arrays = make_arrays("gru", reset_state, "float32")
    got = jax.eval_shape(lambda a: _bridge.launch_weight_grads(a, reverse=False), arrays)
    shapes = {name: x.shape for name, x in got.items()}
    assert shapes == {"w_ih": (2, 6, 24), "w_hh": (2, 8, 24), "bias": (2, 24), "b_hn": (2, 8)}


@pytest.mark.parametrize(("inputs", "hidden", "full"), [(8, 24, 2), (32, 32, 2), (33, 32, 1), (8, 33, 0)])
def test_products_of_few_features_and_units_are_in_full_float32(inputs, hidden, full):
    """XLA may multiply these in full float32, and TF32 would be far less accurate."""
    options = spec.KernelSpec(
        ENTRIES["layer_norm_gru"], reverse=False, time_major=True, precision=None, remat=False, returned=(),
        hidden=hidden, operand_dtype=np.dtype("float32"), reset_state="zeros", kernel_precision="tf32",
    )  # fmt: skip
    xs, h_prev, dxp, one = (jnp.zeros((1, 13, 3, width)) for width in (inputs, hidden, 3 * hidden, 1))
    program = str(jax.make_jaxpr(lambda *x: weight_grads.weight_grads(options, *x, {}))(xs, h_prev, one, one, dxp))
    assert program.count("dot_general[") == 2
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == full
