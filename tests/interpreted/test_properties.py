"""Tests properties that every implementation has: causality, determinism, and which inputs it accepts."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    CLOSE,
    KERNELS,
    PROJECTED,
    B,
    T,
    arguments,
    assert_close,
    assert_same,
    kernels_only,
    loss_of,
    random_like,
    runner,
    with_gradients,
)  # fmt: skip

import jaxrnn


@pytest.fixture(params=["xla", *KERNELS])
def implementation(request):
    return request.param


@pytest.fixture(params=["gru", "lstm", PROJECTED])
def cell(request):
    return request.param


@pytest.mark.quick("implementation")
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_nothing_crosses_a_reset(cell, implementation, reverse):
    """After a reset of all sequences, no bit depends on the steps before it, and no gradient flows to those steps."""
    params, carry, xs, _, state = arguments(cell)
    before, after = (slice(2, None), slice(None, 2)) if reverse else (slice(None, 2), slice(2, None))
    resets = jnp.zeros((T, B)).at[1 if reverse else 2].set(1)
    call = runner(cell, implementation, reverse=reverse)

    @jax.jit
    def both(carry, xs):
        def later(carry, xs):
            last, ys = call(params, carry, xs, resets, state)
            return last, ys[after]

        outputs, vjp = jax.vjp(later, carry, xs)
        return outputs, vjp(random_like(outputs))

    want, (d_carry, d_xs) = both(carry, xs)
    assert_same(d_carry, jax.tree.map(jnp.zeros_like, carry))
    assert_same(d_xs[before], jnp.zeros_like(xs[before]))
    assert (d_xs[after] != 0).any(axis=-1).all()

    got, (_, d_xs_other) = both(jax.tree.map(lambda x: 10 - x, carry), xs.at[before].multiply(-7))
    assert_same((got, d_xs_other[after]), (want, d_xs[after]))


def test_two_runs_are_bit_identical(cell, implementation):
    run = jax.jit(jax.value_and_grad(loss_of(runner(cell, implementation)), argnums=(0, 1, 2, 4)))
    args = arguments(cell)
    first = run(*args)
    assert_same(run(*args), first)


@pytest.mark.quick("implementation")
def test_permuting_the_batch_permutes_the_result(cell, implementation):
    params, carry, xs, resets, state = arguments(cell)
    order = np.array([2, 0, 1])

    @jax.jit
    def run(carry, xs, resets):
        def call(carry, xs):
            return runner(cell, implementation)(params, carry, xs, resets, state)

        outputs, vjp = jax.vjp(call, carry, xs)
        return outputs, vjp(jax.tree.map(jnp.cos, outputs))

    def permute(results):
        (last, ys), (d_carry, d_xs) = results
        last, d_carry = jax.tree.map(lambda x: x[order], (last, d_carry))
        return (last, ys[:, order]), (d_carry, d_xs[:, order])

    permuted = jax.tree.map(lambda x: x[order], carry), xs[:, order], resets[:, order]
    assert_close(run(*permuted), permute(run(carry, xs, resets)))


@pytest.mark.parametrize("time_major", [True, False], ids=["timemajor", "batchmajor"])
@pytest.mark.parametrize(("steps", "batch"), [(0, B), (T, 0), (0, 0)])
def test_empty_time_or_batch(cell, implementation, steps, batch, time_major):
    """Outputs are empty, the carry and its gradient are passed on unchanged, and all other gradients are zero."""
    params, carry, xs, resets, state = arguments(cell, batch=(batch,), steps=steps)
    if not time_major:
        xs, resets = jnp.swapaxes(xs, 0, 1), resets.T
    call = runner(cell, implementation, time_major=time_major)

    @jax.jit
    def run(params, carry, xs, state):
        outputs, vjp = jax.vjp(lambda *args: call(*args[:3], resets, args[3]), params, carry, xs, state)
        cotangents = random_like(outputs)
        return outputs, cotangents, vjp(cotangents)

    (last, ys), (ct_last, _), (d_params, d_carry, d_xs, d_state) = run(params, carry, xs, state)
    assert ys.shape == (*xs.shape[:2], jax.tree.leaves(carry)[-1].shape[-1])
    assert_same((last, d_carry), (carry, ct_last))
    assert_same((d_params, d_xs, d_state), jax.tree.map(jnp.zeros_like, (params, xs, state)))
    assert_same(jax.jit(call)(params, carry, xs, resets, state)[0], carry)


def test_gradients_to_resets_are_zero(cell, implementation):
    args = arguments(cell)
    gradient = jax.jit(jax.grad(loss_of(runner(cell, implementation)), argnums=3))(*args)
    assert_same(gradient, jnp.zeros((T, B)))


@kernels_only
@pytest.mark.parametrize(
    "argnums", [n for k in (1, 2) for n in itertools.combinations((0, 1, 2, 4), k)][::3], ids=lambda n: f"argnums{n}"
)
def test_gradients_of_some_arguments_equal_those_of_all(cell, implementation, argnums):
    args = arguments(cell)
    loss = loss_of(runner(cell, implementation))
    got = jax.jit(jax.grad(loss, argnums))(*args)
    everything = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))(*args)
    assert_close(got, tuple(everything[i] for i in argnums))


@pytest.mark.interpret
def test_none_picks_xla_on_a_cpu(cell):
    """The results are the same bit for bit, although the kernels could run in the interpreter there."""
    args = arguments(cell)
    got, want = (jax.jit(with_gradients(runner(cell, implementation)))(*args) for implementation in (None, "xla"))
    assert_same(got, want)


@pytest.mark.parametrize("weights", ["float64", "float16"])
def test_none_runs_calls_that_have_no_kernel(cell, weights):
    """`implementation=None` always works, also with mixed dtypes and with float64."""
    with jax.enable_x64(True):
        params, *rest = arguments(cell)
        params = jax.tree.map(lambda x: x.astype(weights), params)
        got = runner(cell, None)(params, *rest)
        assert_close(got, runner(cell, "xla")(params, *rest))


def unusual(cell):
    """Returns calls that the table of cases leaves out, as `name: (arguments, options)`."""
    half = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float16))
    params, carry, xs, resets, state = arguments(cell)
    _, carry_2, xs_2, resets_2, _ = arguments(cell, batch=(B, 2))
    _, carry_0, xs_0, resets_0, _ = arguments(cell, batch=())
    stepped = jax.tree.map(lambda x: jnp.zeros((*xs.shape[:-1], *x.shape[-1:])), state)
    stepped_2 = random_like(jax.tree.map(lambda x: jnp.zeros((*xs_2.shape[:-1], *x.shape[-1:])), state))
    batch_major = {"time_major": False}
    calls = {
        "two batch axes": ((params, carry_2, xs_2, resets_2, stepped_2), {}),
        "two batch axes, batch major": (
            (params, carry_2, *jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), (xs_2, resets_2, stepped_2))),
            batch_major,
        ),
        "two batch axes, one state": ((params, carry_2, xs_2, resets_2, state), {"reverse": True}),
        "no batch axis": ((params, carry_0, xs_0, resets_0, state), {}),
        "no batch axis, batch major": ((params, carry_0, xs_0, resets_0, state), batch_major),
        "float16 inputs": ((params, carry, half(xs), resets, state), {}),
        "float16 weights": ((half(params), carry, xs, resets, state), {"remat": True}),
        "float16 recurrent weights": ((params._replace(w_hh=half(params.w_hh)), carry, xs, resets, state), {}),
        "float16 carry": ((params, half(carry), xs, resets, state), {}),
        "float16 reset state": ((params, carry, xs, resets, half(stepped)), {}),
        "float32 carry and reset state": ((half(params), carry, half(xs), resets, stepped), {"remat": True}),
    }
    if cell != "gru":
        calls |= {
            "reset state for h": ((params, carry, xs, resets, (None, state[1])), {"return_cells": True}),
            "reset state for c": ((params, carry, xs, resets, (stepped[0], None)), {}),
            "reset states of two shapes": ((params, carry, xs, resets, (state[0], stepped[1])), {}),
            "carry of two dtypes": ((params, (carry[0], half(carry[1])), xs, resets, state), {"return_cells": True}),
        }
    return calls


UNUSUAL = [(cell, name) for cell in ("gru", "lstm", PROJECTED) for name in unusual(cell)]


@kernels_only
@pytest.mark.parametrize(("cell", "name"), UNUSUAL, ids=lambda x: x.replace(" ", "-"))
def test_unusual_calls_equal_xla(cell, name, implementation):
    args, options = unusual(cell)[name]

    def both(implementation):
        call = runner(cell, implementation, **options)

        @jax.jit
        def run(*args):
            outputs, vjp = jax.vjp(call, *args)
            return outputs, vjp(random_like(outputs, 1))

        return run(*args)

    got, want = both(implementation), both("xla")
    assert jax.tree.map(jnp.result_type, got) == jax.tree.map(jnp.result_type, want)
    assert_close(got, want, 3e-3 if any(x.dtype == jnp.float16 for x in jax.tree.leaves(args)) else CLOSE)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4", "uint32"])
def test_resets_may_have_any_dtype(dtype):
    T, B, D, H = 3, 2, 4, 5
    params = jaxrnn.GRUParams(jnp.ones((D, 3 * H)), jnp.ones((H, 3 * H)), jnp.ones((3 * H,)), jnp.ones((H,)))
    carry, xs = jnp.ones((B, H)), jnp.linspace(-1, 1, T * B * D).reshape(T, B, D)
    resets = jnp.array([[0, 1], [1, 0], [0, 0]])
    want = jaxrnn.gru(params, carry, xs, resets=resets, implementation="triton")
    got = jaxrnn.gru(params, carry, xs, resets=resets.astype(dtype), implementation="triton")
    np.testing.assert_array_equal(got[1], want[1])
