"""The compiled kernels, under `jit`, have at most twice the error of XLA at the same precision.

Both errors are against float64.
"""

import dataclasses
import itertools

import calls
import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from ptx.arithmetic import round_to_tf32

from torch_bridge.cells import CELLS as SPECS

pytestmark = pytest.mark.gpu

# From this many multiplications per gate, NumPy takes seconds, so `cases.run_float64` replaces `cases.run_oracle`. Only
# the oracle takes the signs of a ReLU's gates as an input.
LARGE = 2**31


def run_float64(case, inputs):
    large = (case.models or 1) * case.T * case.B * case.H**2 >= LARGE and case.cell != "simple_relu"
    return (cases.run_float64 if large else cases.run_oracle)(case, inputs)


def check_draws(case, inputs, got, xla):
    """Compares results of several draws with the oracle; returns the expected results."""

    def wanted(draw, results):
        return run_float64(case, cases.with_signs(case, inputs[draw], results["ys"]))

    return cases.check_draws(case, got, xla, wanted)


@pytest.mark.quick("case.cell")
@pytest.mark.parametrize("case", cases.GPU, ids=str)
def test_outputs_and_gradients_match_the_oracle(case):
    inputs = [cases.make_inputs(case, draw) for draw in range(cases.draws(case))]
    got, again, xla = (
        [cases.run(case, x, implementation) for x in inputs] for implementation in ("triton", "triton", "xla")
    )
    want = check_draws(case, inputs, got, xla)
    assert got[0].keys() == want.keys()
    for one, other in zip(got, again, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("case", cases.GPU_FORWARD, ids=str)
def test_outputs_without_gradients_match_the_oracle(case):
    inputs = [cases.make_inputs(case, draw) for draw in range(cases.draws(case))]
    got, xla = ([cases.run_forward(case, x, implementation) for x in inputs] for implementation in ("triton", "xla"))
    check_draws(case, inputs, got, xla)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_the_reference_in_float64_matches_the_oracle(cell):
    """The reference replaces the oracle on this GPU, and is therefore checked on it."""
    case = cases.Case(cell, T=13, B=64, H=256, reset_state="h", cells=cell == "lstm")
    inputs = cases.make_inputs(case)
    got, want = cases.run_float64(case, inputs), cases.run_oracle(case, inputs)
    assert got.keys() == want.keys()
    cases.compare(got, want, lambda name: 1e-12)


def of_sequence(name, x, b):
    """Returns the part of an input, output or gradient that belongs to sequence `b`, or None if sequences share it."""
    name = name.removeprefix("ct_").removeprefix("d")
    if name in ("ys", "cs", "xs"):
        return x[:, b]
    return x[b] if name.startswith("carry") else None


# Beyond 128 units, some cells have no kernels with scaled operands. Without scaling, whether a gate near zero saturates
# is a matter of rounding if states are large.
MAGNITUDES = [
    pytest.param(case, largest, id=f"{case}-{largest}")
    for case, largest in itertools.product(cases.OF_EVERY_SIZE, (1.0, 1e4))
    if largest == 1 or case.H <= 128 or "split_registers" in SPECS[case.cell].loops
]


def in_tf32(x):
    """Rounds an operand of the oracle to TF32."""
    return round_to_tf32(x.astype(np.float32)).astype(np.float64)


@pytest.mark.parametrize(("case", "largest"), MAGNITUDES)
def test_sequences_of_every_magnitude_keep_their_accuracy(case, largest, monkeypatch):
    """16-bit operands are scaled, so small gradients beside large ones, and large states, must keep their accuracy.

    If states are large, rounding the operands of a product decides whether a gate near zero saturates. XLA multiplies
    some of these products in full float32, and so leaves out this error. Beyond 128 units, errors may therefore be
    twice the larger one of XLA's and of the oracle's with operands rounded to TF32.
    """
    inputs = cases.make_inputs(case)
    gradients, states = np.logspace(-18, 12, case.B), largest * np.logspace(-6, 0, case.B)
    for name in inputs:
        if name.startswith("ct_"):
            inputs[name] = inputs[name] * gradients[:, None].astype(np.float32)
        if name.startswith("carry"):
            inputs[name] = inputs[name] * np.roll(states, case.B // 2)[:, None].astype(np.float32)
    want = cases.run_oracle(case, inputs)
    got, xla = (cases.run(case, inputs, implementation) for implementation in ("triton", "xla"))
    rounded = xla
    if largest > 1 and case.H > 128:
        product = oracle.product
        monkeypatch.setattr(oracle, "product", lambda *operands: product(*map(in_tf32, operands)))
        rounded = cases.run_oracle(case, inputs)
    sizes = []  # errors of a sequence are relative to its own magnitude
    for b in range(case.B):
        norms = {
            name: np.linalg.norm(own.astype(np.float64))
            for name, x in (inputs | want).items()
            if (own := of_sequence(name, x, b)) is not None
        }
        # If saturated gates leave almost nothing of a gradient, what remains is rounding errors. Its magnitude
        # therefore counts as at least float32's rounding of the cotangents that it is computed from.
        least = 2.0**-24 * np.linalg.norm([norm for name, norm in norms.items() if name.startswith("ct_")])
        sizes.append({name: max(norms[name], least if name.startswith("d") else 1e-30) for name in want.keys() & norms})
    got, xla, rounded, want = (
        cases.stack([{k: of_sequence(k, x[k], b) / size for k, size in sizes[b].items()} for b in range(case.B)])
        for x in (got, xla, rounded, want)
    )
    allowed = {name: max(oracle.error(x[name], want[name]) for x in (xla, rounded)) for name in want}
    cases.compare(got, want, lambda name: 2 * allowed[name] + cases.tiny(case, want[name]))


# Bits of float32 values. One is a NaN that tensor cores, which ignore the low bits, would read as infinity.
@pytest.mark.parametrize("bad", [0x7FC00000, 0x7F800001, 0x7F800000, 0xFF800000], ids=hex)
@pytest.mark.parametrize("case", cases.OF_EVERY_SIZE, ids=str)
def test_nonfinite_values_stay_in_their_sequence(case, bad):
    inputs = cases.make_inputs(case)
    inputs["resets"][:, 3] = False
    clean = cases.run(case, inputs, "triton")
    for name in inputs:
        if name.startswith(("carry", "ct_carry")):
            inputs[name] = inputs[name].copy()
            inputs[name].view(np.uint32)[3, 7] = bad
    got = cases.run(case, inputs, "triton")
    if bad & 0x7FFFFF:
        assert np.isnan(got["ys"][:, 3]).all()
    for b in set(range(case.B)) - {3}:
        for name in got:
            if of_sequence(name, got[name], b) is not None:
                x, y = of_sequence(name, got[name], b), of_sequence(name, clean[name], b)
                np.testing.assert_array_equal(x, y, err_msg=name)


# Of each size and way to multiply, the cases of float32: kernels round operands in several ways.
OF_EVERY_PRODUCT = [
    dataclasses.replace(case, T=5, precision=precision, resets="none")
    for case in (*cases.OF_EVERY_SIZE, cases.Case("gru", T=5, B=24, H=200))
    for precision in ("default", "highest")
    if case.cell in ("gru", "lstm")
]


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7F800001, 0xFF801FFF], ids=hex)
@pytest.mark.parametrize("kind", ["state", "weight"])
@pytest.mark.parametrize("case", OF_EVERY_PRODUCT, ids=str)
def test_every_nan_reaches_the_outputs(case, kind, bits):
    """A weight reaches the unit of its gate, and from there, as a state does, all units of the next step."""
    inputs, name = cases.make_inputs(case), cases.CARRY[case.cell][-1] if kind == "state" else "w_hh"
    inputs[name] = inputs[name].copy()
    inputs[name].view(np.uint32)[3, 7] = bits
    ys = np.asarray(cases.run_forward(case, inputs, "triton")["ys"])
    if kind == "state":
        assert np.isnan(ys[:, 3]).all() and np.isfinite(np.delete(ys, 3, axis=1)).all()
    else:
        assert np.isnan(ys[0, :, 7]).all() and np.isnan(ys[1:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("case", cases.OF_EVERY_SIZE, ids=str)
def test_a_new_episode_does_not_depend_on_the_carry(case, bad):
    inputs = cases.make_inputs(case)
    inputs["resets"][:, 3] = np.arange(case.T) == 4
    clean = cases.run(case, inputs, "triton")
    for name in inputs:
        if name.startswith("carry"):
            inputs[name] = inputs[name].copy()
            inputs[name][3, 7] = bad
    got = cases.run(case, inputs, "triton")
    np.testing.assert_allclose(got["ys"][4:, 3], clean["ys"][4:, 3], rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", cases.OF_EVERY_SIZE, ids=str)
def test_no_gradient_crosses_a_reset(case):
    inputs = cases.make_inputs(case)
    inputs["resets"][4] = True
    inputs["ct_ys"][:4] = 0
    got = cases.run(case, inputs, "triton")
    before = {name: x for name, x in got.items() if name.startswith("dcarry")} | {"dxs": got["dxs"][:4]}
    assert len(before) == 1 + len(cases.CARRY[case.cell])
    for name, x in before.items():
        np.testing.assert_array_equal(x, np.zeros_like(x), err_msg=name)
    assert got["dxs"][4:].any(axis=(0, 2)).all()


@pytest.mark.parametrize("later", [1e6, np.inf, np.nan])
@pytest.mark.parametrize("case", cases.OF_EVERY_SIZE, ids=str)
def test_an_episode_keeps_its_accuracy_if_a_later_one_has_huge_gradients(case, later):
    """The scale of 16-bit operands must not include gradients that a reset then zeroes."""
    inputs = cases.make_inputs(case)
    inputs["resets"][4] = True
    earlier = inputs | {name: np.zeros_like(x) for name, x in inputs.items() if name.startswith("ct_carry")}
    earlier["ct_ys"] = inputs["ct_ys"] * (np.arange(case.T) < 4)[:, None, None].astype(np.float32)
    with np.errstate(invalid="ignore"):  # infinity times zero gives NaN, which tests the same
        inputs["ct_ys"] = inputs["ct_ys"] * np.where(np.arange(case.T) < 4, 1, later)[:, None, None].astype(np.float32)

    def of_the_earlier(results):
        return {name: x for name, x in results.items() if name.startswith("dcarry")} | {"dxs": results["dxs"][:4]}

    want, xla = of_the_earlier(cases.run_oracle(case, earlier)), of_the_earlier(cases.run(case, earlier, "xla"))
    cases.check(case, of_the_earlier(cases.run(case, inputs, "triton")), xla, want)


@pytest.mark.parametrize(
    ("method", "target"),
    [("native", "jaxrnn_launch_v1"), ("callback", "xla_buffer_python_gpu_callback_cmd_buffer")],
)
@pytest.mark.parametrize("steps", [1, 16])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_launches_in_a_scan_are_captured_in_its_cuda_graphs(cell, steps, method, target, monkeypatch):
    """XLA would otherwise fuse slices with the launches, and launch each such fusion outside of the graphs."""
    monkeypatch.setenv("JAXRNN_LAUNCH", method)
    params, *rest, _ = calls.arguments(cell, batch=(16,), steps=steps, hidden=64)
    call = calls.runner(cell, "triton", precision=None)

    def step(params, minibatch):
        loss = lambda params: calls.loss_of(lambda *args: call(*args, None))(params, *minibatch)  # noqa: E731
        outputs = call(params, *minibatch, None)
        return jax.tree.map(lambda x, d: x - 1e-3 * d, params, jax.grad(loss)(params)), outputs

    def scanned(params, minibatches):
        return jax.lax.scan(step, params, minibatches)

    minibatches = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x / 2]), tuple(rest))
    compiled = jax.jit(scanned).lower(params, minibatches).compile()
    text = compiled.as_text()
    assert f'custom_call_target="{target}"' in text and "%dynamic_slice_fusion" not in text
    taken = params, []
    for k in range(3):
        new, outputs = step(taken[0], jax.tree.map(lambda x, k=k: x[k], minibatches))
        taken = new, [*taken[1], outputs]
    calls.assert_close(
        compiled(params, minibatches), (taken[0], jax.tree.map(lambda *xs: jnp.stack(xs), *taken[1])), 1e-3
    )
