"""Makes small calls of the cells' functions, with the same signature for all cells, which several test files share."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrnn import cells, recurrent
from jaxrnn._bridge.derivatives import launches_when_lowered
from jaxrnn._bridge.tracing import bodies

T, B, H, D, S, P = 4, 3, 5, 2, 2, 3
CLOSE = 1e-5
FUNCTIONS = cases.FUNCTIONS
PROJECTED = "lstm-projected"  # also a value of `cell`: an LSTM that projects its hidden state to P units

KERNELS = [
    pytest.param("triton", marks=pytest.mark.interpret, id="triton-interpreted"),
    pytest.param("triton", marks=pytest.mark.gpu, id="triton-gpu"),
]
# For properties that JAX itself guarantees for a `lax.scan`, but that a custom rule might break.
kernels_only = pytest.mark.parametrize("implementation", KERNELS)
every_implementation = pytest.mark.parametrize("implementation", ["xla", *KERNELS])
# Without "simple_relu", which differs from "simple_tanh" in pointwise functions alone, and "rms_norm_gru", whose norm
# is a part of that of "layer_norm_gru".
EVERY_CELL = [cell for cell in FUNCTIONS if cell not in ("simple_relu", "rms_norm_gru")]
every_cell = pytest.mark.parametrize("cell", EVERY_CELL)
# For properties that depend on the code around the kernels, which a projection changes, and not only on the kernels.
projected_too = pytest.mark.parametrize("cell", [*EVERY_CELL, PROJECTED])


def cell_of(cell):
    return "lstm" if cell == PROJECTED else cell


def random_like(tree, seed=0):
    """Returns normal numbers with the structure, shapes and dtypes of `tree`.

    The weights of a simple cell are half as large, because it saturates with such weights, and 1 - h^2 has few digits.
    """
    rng, is_simple = np.random.default_rng(seed), lambda x: isinstance(x, cells.SimpleParams)
    tree = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)
    half = lambda x: jax.tree.map(lambda w: w / 2, x) if is_simple(x) else x  # noqa: E731
    return jax.tree.map(half, tree, is_leaf=is_simple)


def arguments(cell, batch=(B,), steps=T, hidden=H, lead=(), dtype=jnp.float32, time_major=True, stepped=False):
    """Returns random `(params, carry, xs, resets, reset_state)`, with float resets; `lead` axes come before all others.

    The reset state is `[H]`, or has a value for every step and sequence if `stepped`.
    """
    zeros = functools.partial(np.zeros, dtype=dtype)
    case = cases.Case(cell_of(cell), steps, 0, hidden, D, proj=P if cell == PROJECTED else 0)
    weights = {name: zeros((*lead, *shape)) for name, shape in cases.weights(case).items()}
    params = cells.CELLS[case.cell].params(**weights)
    sequence = (*lead, steps, *batch) if time_major else (*lead, *batch, steps)
    before = (*lead, *batch), sequence if stepped else lead
    carry, state = (
        cases.unwrap(tuple(zeros((*x, cases.width(case, k))) for k in cases.CARRY[case.cell])) for x in before
    )
    params, carry, xs, state = random_like((params, carry, zeros((*sequence, D)), state))
    resets = jnp.asarray(np.random.default_rng(0).random(sequence) < 0.3, dtype)
    return params, carry, xs, resets, state


def runner(cell, implementation, **options):
    """Returns `call(params, carry, xs, resets, reset_state) -> (carry, ys)`, by default at the highest precision."""

    def call(params, carry, xs, resets, reset_state):
        options_ = {"precision": "highest", "implementation": implementation} | options
        return FUNCTIONS[cell_of(cell)](params, carry, xs, resets=resets, reset_state=reset_state, **options_)

    return call


def run_bidirectional(cell, params, carry, xs, *, return_cells=False, **options):
    """Runs both directions; returns for each what `jaxrnn.gru` or `jaxrnn.lstm` returns."""
    both = recurrent.run_bidirectional(cells.CELLS[cell], params, carry, xs, return_states=return_cells, **options)
    return tuple((last, ys if return_cells else ys[0]) for last, ys in both)


def loss_of(call):
    """Returns a function that computes a scalar from all outputs of `call`."""

    def loss(*args):
        outputs = call(*args)
        return sum(
            jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (outputs, random_like(outputs, 1))), strict=True)
        )

    return loss


def with_gradients(call):
    """Returns a function that computes `(outputs, gradients of loss_of(call) to every argument)`."""

    def both(*args):
        return call(*args), jax.grad(loss_of(call), argnums=(0, 1, 2, 3, 4))(*args)

    return both


def recomputing_launches(cell):
    """Returns the number of launches that recompute residuals under `remat`: none if they follow from the states."""
    return 0 if cells.CELLS[cell_of(cell)].activations_from_states else 1


def launches(function, *args, of=("fwd", "bwd")):
    """Returns how often the traced `function` launches each kernel: a direction of the loop, or the name of another."""

    def directions(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "jaxrnn_launch":
                kind = eqn.params["kind"]
                yield getattr(kind, "direction", kind.name)
            for body in (*bodies(eqn.params.values()), *launches_when_lowered(eqn)):
                yield from directions(body)

    found = list(directions(jax.make_jaxpr(function)(*args).jaxpr))
    return tuple(map(found.count, of))


@functools.cache
def reference(cell, **options):
    """Returns `with_gradients` of a plain call with `lax.scan`, compiled once per process and shape."""
    return jax.jit(with_gradients(runner(cell, "xla", **options)))


def stack(trees):
    return jax.tree.map(lambda *xs: np.stack(xs), *trees)


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got, want, bound=CLOSE):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (error := cases.oracle.error(x, y)) <= bound, f"{jax.tree_util.keystr(path)}: {error:.1e}"
