"""A large GRU in TF32 writes residuals over its input projections, and gradients over the residuals.

Nothing else may depend on that.
"""

import math
import re

import calls
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case

import jaxrnn
from jaxrnn import _bridge
from jaxrnn.kernel_vjp import spec

in_turn = pytest.mark.parametrize(
    "implementation",
    [pytest.param("triton", marks=mark, id=mark.name) for mark in (pytest.mark.interpret, pytest.mark.gpu)],
)


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Makes launches overwrite small arrays too."""
    monkeypatch.setattr(spec, "_IN_PLACE_BYTES", 0)
    jax.clear_caches()
    yield
    jax.clear_caches()


def apart(monkeypatch):
    monkeypatch.setattr(spec, "_IN_PLACE_BYTES", math.inf)
    jax.clear_caches()


def case(**changes):
    return Case("gru", **{"T": 3, "B": 3, "H": 64, "D": 5, "precision": "default"} | changes)


# 128, 256 and 512 units use the three kinds of Gluon kernels; with a reset state, the forward kernel is plain Triton.
WIDE = [{"T": 9, "H": 128, "B": 70}, {"T": 10, "H": 128, "B": 1100}, {"T": 9, "H": 256, "B": 30},
        {"T": 9, "H": 512, "B": 150}, {"T": 9, "H": 128, "B": 20, "reset_state": "tbh"},
        {"T": 9, "H": 320, "B": 20, "reset_state": "h"}]  # fmt: skip
KINDS = [{}, {"reverse": True}, {"reset_state": "tbh"}, {"models": 2}, {"remat": True}]


@pytest.mark.quick
@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(kind, marks=pytest.mark.interpret) for kind in KINDS),
        *(pytest.param(kind, marks=pytest.mark.gpu) for kind in WIDE + [WIDE[0] | kind for kind in KINDS[1:]]),
    ],
    ids=str,
)
def test_results_in_place_are_bit_identical_to_those_in_separate_arrays(monkeypatch, changes):
    inputs = cases.make_inputs(case(**changes))
    got = cases.run(case(**changes), inputs, "triton")
    apart(monkeypatch)
    want = cases.run(case(**changes), inputs, "triton")
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@in_turn
def test_a_pullback_can_be_called_repeatedly(implementation):
    """The residuals are still intact after a gradient was computed from them."""
    params, carry, xs, resets, state = calls.arguments("gru", hidden=64)
    call = calls.runner("gru", implementation, precision=None)
    outputs, pullback = jax.vjp(lambda *operands: call(*operands, resets, state), params, carry, xs)
    ones, twos = (jax.tree.map(lambda x, n=n: jnp.full_like(x, n), outputs) for n in (1, 2))
    first = pullback(ones)
    calls.assert_same(jax.tree.map(lambda x: 2 * x, first), pullback(twos))
    calls.assert_same(first, pullback(ones))
    both = jax.vmap(pullback)(jax.tree.map(lambda *xs: jnp.stack(xs), ones, twos))
    calls.assert_close(jax.tree.map(lambda x: x[0], both), first)
    calls.assert_close(jax.tree.map(lambda x: x[1] / 2, both), first)


@in_turn
def test_tangents_and_second_derivatives_read_the_residuals(monkeypatch, implementation):
    *arguments, resets, state = calls.arguments("gru", hidden=128)

    def product(x):
        call = calls.runner("gru", implementation, precision=None)
        gradient = jax.grad(calls.loss_of(lambda *x: call(*x, resets, state)), (0, 1, 2))
        return jax.jit(lambda x: jax.jvp(lambda x: gradient(*x), (x,), (x,)))(x)

    got = product(tuple(arguments))
    apart(monkeypatch)
    calls.assert_close(got, product(tuple(arguments)))


@in_turn
def test_debug_nans_accepts_the_residuals(implementation):
    params, carry, xs, resets, state = calls.arguments("gru", hidden=64)
    call = calls.with_gradients(calls.runner("gru", implementation, precision=None))
    with jax.debug_nans(True), jax.disable_jit():
        got = call(params, carry, xs, resets, state)
    calls.assert_close(got, jax.jit(call)(params, carry, xs, resets, state))


@in_turn
@pytest.mark.parametrize("models", [0, 2])
def test_overwritten_operands_are_not_copied(implementation, models):
    """In a jitted gradient, each launch overwrites an operand that nothing reads later, so XLA does not copy it."""
    lead = (models,) if models else ()
    arguments = calls.arguments("gru", hidden=64, lead=lead)
    call = calls.with_gradients(calls.runner("gru", implementation, precision=None))
    text = jax.jit(jax.vmap(call) if models else call).lower(*arguments).compile().as_text()
    launches = re.findall(
        r"= \((.*)\) custom-call\((.*)\), custom_call_target=\"(?:xla_buffer_python_|jaxrnn_launch_).*"
        r"output_to_operand_aliasing=",
        text,
    )
    assert len(launches) == 2
    widths = f"[{max(models, 1)},{calls.T},{calls.B},192]"
    assert all(widths in outputs for outputs, _ in launches)
    copies = [line for line in text.splitlines() if re.search(rf"f32{re.escape(widths)}\S* copy\(", line)]
    users = [re.match(r"\s*(?:ROOT )?(%\S+) =", line)[1] for line in copies]
    assert not [name for name in users for _, operands in launches if re.search(rf"{re.escape(name)}\b", operands)]


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("hidden", "batch", "over"),
    [(2048, 683, ["xp", "local_grads"]), (2048, 682, [None, None]), (2080, 683, [None, None])],
)
def test_only_large_arrays_are_overwritten(monkeypatch, hidden, batch, over):
    """With 2048 units, float32 input projections `[32, B, 3H]` first reach 2^29 bytes at B=683."""
    monkeypatch.undo()
    launched, launch = [], _bridge.launch

    def spied(cell, direction, arrays, outputs, **options):
        launched.append({output.name: output.over for output in outputs})
        return launch(cell, direction, arrays, outputs, **options)

    monkeypatch.setattr(_bridge, "launch", spied)
    sizes = [(2, 3 * hidden), (hidden, 3 * hidden), (3 * hidden,), (hidden,), (batch, hidden), (32, batch, 2)]
    *weights, carry, xs = (jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes)
    loss = lambda params, carry, xs: jaxrnn.gru(params, carry, xs, implementation="triton")[1].sum()  # noqa: E731
    jax.eval_shape(jax.grad(loss), jaxrnn.GRUParams(*weights), carry, xs)
    forward, backward = launched
    assert [forward["local_grads"], backward["dxp"]] == over and ("carry_gate" in forward) == (over == [None, None])
