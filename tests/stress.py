"""Programs that launch kernels many times and count the launches with the expected bits.

The tests of `make stress` use them, also in processes of their own.
"""

import calls
import jax
import jax.numpy as jnp

# Cell, batch, steps and units: a problem of few programs, and two of programs that wait for one another.
PROBLEMS = [("gru", 4, 2, 32), ("lstm", 4, 2, 512), ("gru", 16, 2, 1024)]


def problem(cell, batch, steps, hidden, implementation="triton"):
    """Returns a function that computes outputs and gradients, and its arguments."""
    *arguments, _, _ = calls.arguments(cell, batch=(batch,), steps=steps, hidden=hidden)
    call = calls.runner(cell, implementation, precision=None)

    def run(params, carry, xs):
        def loss(params, xs):
            last, ys = call(params, carry, xs, None, None)
            return jnp.sum(ys**2), (last, ys)

        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, xs)

    return run, arguments


def same(got, want):
    """Returns whether all arrays of two trees are equal, as an array."""
    return jnp.stack([jnp.all(x == y) for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)]).all()


def repeated(run, count):
    """Returns a program that runs `run` `count` times in a loop, and counts the runs with the bits of `want`."""

    def loop(want, *arguments):
        def turn(_, state):
            equal, arguments = state
            got = run(*arguments)
            # the next run's arguments depend on this run's results, so that no run can leave the loop
            zero = jnp.where(same(got, got), 0.0, 1.0)
            arguments = jax.tree.map(lambda x: x + zero.astype(x.dtype), arguments)
            return equal + same(got, want), arguments

        return jax.lax.fori_loop(0, count, turn, (jnp.int32(0), arguments))[0]

    return jax.jit(loop)
