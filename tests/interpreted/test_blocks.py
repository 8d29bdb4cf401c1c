"""Block-diagonal recurrent weights give the results of the dense matrix with zeros outside its blocks."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    EVERY_CELL,
    B,
    D,
    T,
    arguments,
    assert_close,
    every_implementation,
    kernels_only,
    launches,
    loss_of,
    run_bidirectional,
    runner,
)

import jaxrnn
from jaxrnn.cells import CELLS

# The norm of a normed GRU sees all units, so it has no blocks.
every_cell = pytest.mark.parametrize("cell", [cell for cell in EVERY_CELL if not CELLS[cell].norm])

H, BLOCKS = 12, 3


def block_arguments(cell, **options):
    """Returns arguments like those of `arguments`, whose recurrent weights are three blocks of four units."""
    params, *rest = arguments(cell, hidden=H, **options)
    gates, size = CELLS[cell].gates, H // BLOCKS
    return params._replace(w_hh=params.w_hh.reshape(H, gates, H)[:, :, :size].reshape(BLOCKS, size, -1)), *rest


def dense(cell, params):
    """Returns the same weights with the recurrent ones as a matrix `[H, gates * H]`."""
    gates = CELLS[cell].gates
    by_gate = params.w_hh.reshape(BLOCKS, H // BLOCKS, gates, H // BLOCKS)
    matrices = [jax.scipy.linalg.block_diag(*by_gate[:, :, gate]) for gate in range(gates)]
    return params._replace(w_hh=jnp.concatenate(matrices, axis=-1))


def with_gradients(cell, run):
    """Returns a function that computes outputs and the gradients to all arguments, the weights as blocks."""

    def both(*args):
        return run(*args), jax.grad(lambda *args: loss_of(run)(*args), argnums=(0, 1, 2, 4))(*args)

    return jax.jit(both)


OPTIONS = {"forward": {}, "reverse": {"time_major": False, "reverse": True, "remat": True}}


def arguments_of(cell, options):
    return block_arguments(cell, time_major=options.get("time_major", True), stepped=bool(options))


@functools.cache
def with_zeros(cell, name):
    """Returns outputs and gradients of weights that are a matrix with zeros off the blocks."""
    matrix = runner(cell, "xla", **OPTIONS[name])
    run = with_gradients(cell, lambda params, *rest: matrix(dense(cell, params), *rest))
    return run(*arguments_of(cell, OPTIONS[name]))


@pytest.mark.quick("implementation")
@every_implementation
@pytest.mark.parametrize("name", OPTIONS)
@every_cell
def test_blocks_equal_a_matrix_with_zeros(cell, name, implementation):
    run = with_gradients(cell, runner(cell, implementation, **OPTIONS[name]))
    assert_close(run(*arguments_of(cell, OPTIONS[name])), with_zeros(cell, name))


@kernels_only
@every_cell
def test_all_blocks_run_in_one_launch(cell, implementation):
    args = block_arguments(cell)
    run = runner(cell, implementation)
    assert launches(jax.grad(loss_of(run)), *args) == (1, 1)


@every_cell
def test_blocks_of_several_models(cell):
    first = block_arguments(cell)
    second = jax.tree.map(lambda x: x + 0.1, first)
    run = runner(cell, None)
    got = jax.vmap(run)(*jax.tree.map(lambda *xs: jnp.stack(xs), first, second))
    assert_close(got, jax.tree.map(lambda *xs: jnp.stack(xs), run(*first), run(*second)))


@every_cell
def test_both_directions_have_blocks(cell):
    params, carry, xs, resets, state = block_arguments(cell)
    other = jax.tree.map(lambda x: x + 0.1, (params, carry, state))
    pairs = {"params": (params, other[0]), "carry": (carry, other[1]), "reset_state": (state, other[2])}
    run = functools.partial(run_bidirectional, cell, xs=xs, resets=(resets, resets[::-1]), precision="highest")
    want = run(**pairs | {"params": tuple(dense(cell, one) for one in pairs["params"])})
    assert_close(run(**pairs), want)


@pytest.mark.parametrize(
    ("cell", "w_hh", "message"),
    [
        ("gru", (5, 2, 6), "5 blocks, which do not divide a carry of width 12"),
        ("gru", (0, 4, 12), "0 blocks"),
        ("gru", (3, 4, 9), r"params.w_hh must be \(3, 4, 12\) for xs of width 2 and a carry of width 12"),
        ("lstm", (3, 4, 12), r"params.w_hh must be \(3, 4, 16\)"),
    ],
)
def test_wrong_blocks_raise(cell, w_hh, message):
    params, carry, xs, *_ = arguments(cell, hidden=H)
    with pytest.raises(ValueError, match=message):
        cases.FUNCTIONS[cell](params._replace(w_hh=jnp.zeros(w_hh)), carry, xs)


def test_blocks_exclude_a_projection():
    zeros = np.zeros
    params = jaxrnn.LSTMParams(zeros((D, 4 * H)), zeros((3, 4, 16)), zeros(4 * H), zeros((H, 6)))
    with pytest.raises(ValueError, match="block-diagonal, which a projection w_hr excludes"):
        jaxrnn.lstm(params, (zeros((B, H)), zeros((B, 6))), zeros((T, B, D)))


def test_a_cell_with_a_norm_has_no_blocks():
    params, carry, xs, resets, _ = arguments("layer_norm_gru", hidden=H)
    blocks = params._replace(w_hh=jnp.zeros((BLOCKS, H // BLOCKS, 3 * H // BLOCKS)))
    with pytest.raises(ValueError, match=r"norm_gru: params\.w_hh must be \(12, 36\), not blocks; the norm"):
        cases.FUNCTIONS["layer_norm_gru"](blocks, carry, xs, resets=resets)
