"""Tests derivatives of every order and mode through the kernels, against JAX differentiating the scan in float64.

`jaxrnn/_bridge/derivatives.py` says which of them kernels compute, and which XLA. Several devices are
tested in test_sharding.py, exported programs in test_native_export.py, and norms in test_norms.py.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import weight_sums
from calls import (
    EVERY_CELL,
    PROJECTED,
    arguments,
    assert_close,
    kernels_only,
    launches,
    random_like,
    run_bidirectional,
)
from calls import runner as runner_of

import jaxrnn
import jaxrnn.linen
from jaxrnn import _bridge, cells
from jaxrnn._bridge import derivatives
from jaxrnn.kernel_vjp import chunks


def tiny(cell, **options):
    return arguments(cell, **{"steps": 3, "batch": (2,), "hidden": 3} | options)


def dot(x, y):
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


def along(tree):
    """Returns a direction to differentiate in."""
    return random_like(tree, 2)


def loss_of(f):
    def loss(x):
        outputs = jax.tree.map(jnp.sin, f(x))
        return dot(outputs, random_like(outputs, 1))

    return loss


def of_carry(f, x):
    """Returns `f` as a function of the carry alone, and the carry."""
    return (lambda carry: f(x | {"carry": carry})), x["carry"]


def jvp(f, x):
    return jax.jvp(f, (x,), (along(x),))


def gradient_step(loss, x):
    """One step of gradient descent, as in MAML."""
    return jax.tree.map(lambda a, b: a - 0.3 * b, x, jax.grad(loss)(x))


def square(tree):
    return dot(tree, tree)


def hessian_product(f, x):
    return jvp(jax.grad(loss_of(f)), x)[1]


# Each maps a function of a dictionary of arrays to a tree, and that dictionary, to what it computes.
TRANSFORMS = {
    "grad": lambda f, x: jax.grad(loss_of(f))(x),
    "jvp": jvp,
    "jacfwd": lambda f, x: jax.jacfwd(of_carry(f, x)[0])(x["carry"]),
    "jacrev": lambda f, x: jax.jacrev(of_carry(f, x)[0])(x["carry"]),
    "hessian": lambda f, x: jax.hessian(loss_of(of_carry(f, x)[0]))(x["carry"]),
    "forward-over-reverse": hessian_product,
    "reverse-over-forward": lambda f, x: jax.grad(lambda x: jvp(loss_of(f), x)[1])(x),
    "reverse-over-reverse": lambda f, x: jax.grad(lambda x: loss_of(f)(gradient_step(loss_of(f), x)))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](along(x)),
    "vmap-of-hessian-product": lambda f, x: jax.vmap(
        lambda s: hessian_product(f, jax.tree.map(lambda a: s * a, x))
    )(jnp.asarray([1.0, 0.5], x["xs"].dtype)),
    "grad-of-checkpoint": lambda f, x: jax.grad(lambda x: square(jax.grad(jax.checkpoint(loss_of(f)))(x)))(x),
    "gauss-newton": lambda f, x: jax.vjp(f, x)[1](jvp(f, x)[1])[0],
    "gauss-newton-by-transpose": lambda f, x: (
        lambda tangent: jax.linear_transpose(tangent, x)(tangent(along(x)))[0]
    )(jax.linearize(f, x)[1]),
    "jvp-of-while": lambda f, x: jvp(
        lambda x: jax.lax.while_loop(lambda c: c[0] < 1, lambda c: (c[0] + 1, c[1] + loss_of(f)(x)), (0, 0.0)), x
    )[1][1],
    "jvp-of-jit-of-vmap": lambda f, x: jvp(
        jax.jit(jax.vmap(lambda s: f(jax.tree.map(lambda a: s * a, x)))), jnp.asarray([1.0, 0.5], x["xs"].dtype)
    ),
    "transpose-of-vjp": lambda f, x: jax.linear_transpose(
        jax.vjp(loss_of(f), x)[1], jax.ShapeDtypeStruct((), x["xs"].dtype)
    )((along(x),)),
}  # fmt: skip


def function(cell, implementation, dtype, call=None, reset_state=True, **options):
    """Returns a recurrence as a function of its differentiable arrays, and these; `call` has options of `arguments`."""
    params, carry, xs, resets, state = tiny(cell, dtype=dtype, **call or {})
    run = runner_of(cell, implementation, **options)
    x = {"params": params, "carry": carry, "xs": xs} | ({"state": state} if reset_state else {})
    return (lambda x: run(x["params"], x["carry"], x["xs"], resets, x.get("state"))), x


def check(compute):
    """Checks that `compute(implementation, dtype)` of kernels has at most twice XLA's error."""
    with jax.enable_x64(True):
        want = jax.device_get(compute("xla", jnp.float64))
    xla, got = compute("xla", jnp.float32), compute("triton", jnp.float32)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y, z in zip(jax.tree.leaves_with_path(got), *map(jax.tree.leaves, (xla, want)), strict=True):
        errors = cases.oracle.error(x, z), cases.oracle.error(y, z)
        assert errors[0] <= 2 * errors[1] + 1e-6, f"{jax.tree_util.keystr(path)}: {errors}"


def in_scan(f, x):
    """Three steps, each of which changes the inputs of the next."""

    def step(xs, _):
        return 0.5 * xs + jax.tree.leaves(f(x | {"xs": xs}))[0].mean(), None

    return jax.lax.scan(step, x["xs"], length=3)[0]


def fixed_point(f, x):
    """The states to which a call of one step converges, by `jax.lax.custom_root`."""

    def excess(h):
        return f(x | {"carry": h})[0] - h

    def solve(excess, h):
        return jax.lax.while_loop(lambda h: square(excess(h)) > 1e-12, lambda h: h + excess(h), h)

    def tangent_solve(linear, y):
        return jnp.linalg.solve(jax.jacobian(linear)(y).reshape(y.size, y.size), y.ravel()).reshape(y.shape)

    return jax.lax.custom_root(excess, x["carry"], solve, tangent_solve)


def vmapped(cell, implementation, dtype, in_axes):
    """A call under `jax.vmap`, with the axes of params, carry, xs and reset states."""
    *one, resets, state = tiny(cell, dtype=dtype)
    *many, _, states = tiny(cell, dtype=dtype, lead=(2,))
    run = runner_of(cell, implementation)
    given = [a if axis is None else b for a, b, axis in zip((*one, state), (*many, states), in_axes, strict=True)]
    mapped = jax.vmap(lambda *args: run(*args[:3], resets, args[3]), in_axes)
    return (lambda x: mapped(*x)), given


def bidirectional(cell, implementation, dtype, **options):
    params, carry, xs, resets, state = tiny(cell, dtype=dtype, **options)

    def f(x):
        return run_bidirectional(
            cell, (x["params"],) * 2, (x["carry"],) * 2, x["xs"], resets=(resets,) * 2,
            reset_state=(x["state"],) * 2, implementation=implementation, precision="highest",
            time_major=options.get("time_major", True),
        )  # fmt: skip

    return f, {"params": params, "carry": carry, "xs": xs, "state": state}


def stack_of_layers(implementation, dtype):
    model = jaxrnn.linen.GRU(4, num_layers=2, bidirectional=True, norm="layer", implementation=implementation)
    xs = random_like(jnp.zeros((8, 3, 2), dtype))
    run = functools.partial(model.apply, seq_lengths=jnp.arange(8) % 3 + 1)
    variables = jax.tree.map(lambda x: x.astype(dtype), model.init(jax.random.key(0), xs))
    return (lambda x: run(x["variables"], x["xs"])), {"variables": variables, "xs": xs}


def with_blocks(implementation, dtype):
    f, x = function("gru", implementation, dtype)
    blocks = random_like(jnp.zeros((3, 1, 3), dtype))
    return f, x | {"params": x["params"]._replace(w_hh=blocks)}


def wrapped(wrap):
    def make(implementation, dtype):
        f, x = function("gru", implementation, dtype)
        return functools.partial(wrap, f), x

    return make


# Projected LSTMs and stacks run eight sequences. With two, some results have six or twelve numbers, and the ratio of
# the rounding errors of two implementations exceeds two in some draws.
MORE = {"batch": (8,)}

# Each maps (implementation, dtype) to a function of a tree, and the tree.
CALLS = {
    "reverse-batch-major-stepped": lambda *given: function(
        "lstm", *given, call={"time_major": False, "stepped": True}, time_major=False, reverse=True
    ),
    "reverse-batch-major-stepped-gru": lambda *given: function(
        "gru", *given, call={"time_major": False, "stepped": True}, time_major=False, reverse=True
    ),
    "stepped": lambda *given: function("layer_norm_gru", *given, call={"stepped": True}),
    "remat-in-chunks": lambda *given: function("lstm", *given, remat=True),
    "remat-in-chunks-reverse": lambda *given: function("gru", *given, remat=True, reverse=True),
    "projected-reverse-batch-major": lambda *given: function(
        PROJECTED, *given, call=MORE | {"time_major": False}, time_major=False, reverse=True
    ),
    "projected-without-reset-state": lambda *given: function(PROJECTED, *given, call=MORE, reset_state=False),
    "states": lambda *given: function("lstm", *given, return_cells=True),
    "single-step": lambda *given: function("gru", *given, call={"steps": 1}),
    "blocks": with_blocks,
    "bidirectional": functools.partial(bidirectional, "gru"),
    "bidirectional-batch-major-projected": functools.partial(bidirectional, "lstm", time_major=False, stepped=True),
    "vmap-of-sequences": lambda *given: vmapped("gru", *given, (None, 0, 0, None)),
    "vmap-of-models": lambda *given: vmapped("lstm", *given, (0, 0, None, 0)),
    "vmap-of-models-gru": lambda *given: vmapped("gru", *given, (0, 0, None, 0)),
    "vmap-of-models-mgu": lambda *given: vmapped("mgu", *given, (0, None, 0, None)),
    "in-scan": wrapped(in_scan),
    "fixed-point": wrapped(fixed_point),
    "checkpoint": wrapped(
        lambda f, x: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)(jax.tree.map(jnp.sin, x))
    ),
    "stack": stack_of_layers,
}  # fmt: skip


@kernels_only
@pytest.mark.quick("cell")
@pytest.mark.parametrize(
    ("cell", "transform"), cases.deal(TRANSFORMS, [*EVERY_CELL, PROJECTED], whole=("gru",)), ids=str
)
def test_transforms_have_at_most_twice_the_error_of_xla(cell, transform, implementation):
    def compute(implementation, dtype):
        f, x = function(cell, implementation, dtype)
        return jax.jit(lambda x: TRANSFORMS[transform](f, x))(x)

    check(compute)


@kernels_only
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_every_kind(name, implementation, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(chunks, "_CHUNK_STEPS", 2)

    def compute(implementation, dtype):
        f, x = CALLS[name](implementation, dtype)
        return jax.jit(lambda x: (jvp(f, x)[1], hessian_product(f, x)))(x)

    check(compute)


@kernels_only
@pytest.mark.parametrize("cell", ["simple_tanh", "gru"])
def test_third_derivatives(cell, implementation):
    def compute(implementation, dtype):
        f, x = function(cell, implementation, dtype)

        def loss(xs):
            return loss_of(f)(x | {"xs": xs})

        return jax.jit(jax.grad(lambda xs: square(jax.grad(lambda xs: square(jax.grad(loss)(xs)))(xs))))(x["xs"])

    check(compute)


@pytest.mark.interpret
def test_none_runs_the_kernels_where_it_prefers_them(monkeypatch):
    monkeypatch.setattr(_bridge, "is_preferred", lambda steps: True)
    f, x = function("gru", None, jnp.float32)
    plain, _ = function("gru", "xla", jnp.float32)
    product = jax.jit(functools.partial(hessian_product, f))
    assert launches(product, x) == (1, 2)
    assert_close(product(x), jax.jit(functools.partial(hessian_product, plain))(x))


@kernels_only
@pytest.mark.parametrize("transform", ["forward-over-reverse", "reverse-over-reverse", "jvp", "transpose-of-vjp"])
def test_every_derivative_has_the_launches_that_it_needs(transform, implementation):
    """A cell with a norm launches its passes and first gradients alone; others also launch their second derivatives.

    A Hessian-vector product launches a backward pass besides that of the gradient, and the tangent of the pass where
    forward mode does not give it. For an LSTM, forward mode does not give that of c, and the pass did not save c.
    """
    want = {
        "forward-over-reverse": ((1, 0, 1), (1, 1, 2), (2, 2, 2)),
        # the second gradient goes through two runs, and XLA's part has no launch
        "reverse-over-reverse": ((2, 0, 3), (2, 1, 4), (3, 1, 4)),
        "jvp": ((1, 0, 0), (1, 1, 0), (1, 1, 0)),
        "transpose-of-vjp": ((1, 0, 0), (1, 1, 0), (1, 1, 0)),  # which is that of a gradient, so a tangent
    }
    of = ("fwd", "tangent", "bwd")
    for cell, counts in zip(("rms_norm_gru", "gru", "lstm"), want[transform], strict=True):
        f, x = function(cell, implementation, jnp.float32)
        assert launches(functools.partial(TRANSFORMS[transform], f), x, of=of) == counts


@kernels_only
@pytest.mark.parametrize(
    ("reverse", "stepped", "bias_dtype"),
    [(False, False, "float32"), (True, False, "float32"), (False, True, "float32"), (False, False, "float16")],
)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_launches_compute_gradients_of_weights_in_second_derivatives(
    monkeypatch, cell, reverse, stepped, bias_dtype, implementation
):
    from torch_bridge import weight_grads

    monkeypatch.setattr(weight_grads, "is_profitable", lambda problem, device: True)
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(weight_grads, "Launch", weight_sums.Launch)
    width = 64

    def function_of(implementation):
        options = {"precision": "default", "reverse": reverse}
        f, x = function(cell, implementation, jnp.float32, {"hidden": width, "stepped": stepped}, **options)
        gates = x["params"].w_hh.shape[1]
        weights = random_like(dict.fromkeys(("w_ih", "w_hh"), jnp.zeros((width, gates))))
        weights[cells.CELLS[cell].bias] = random_like(jnp.zeros(gates, bias_dtype))
        x["params"] = x["params"]._replace(**jax.tree.map(lambda w: w / width**0.5, weights))
        x["xs"] = random_like(jnp.zeros((*x["xs"].shape[:-1], width)))
        return f, x

    f, x = function_of(implementation)
    product = functools.partial(hessian_product, f)
    assert launches(product, x, of=("weight_grads",)) == (3,)  # of the gradient, and of each factor of its derivative
    of_inputs = jax.grad(lambda xs, x: square(jax.grad(lambda xs: loss_of(f)(x | {"xs": xs}))(xs)))
    assert launches(of_inputs, x["xs"], x, of=("weight_grads",)) == (0,)
    want = jax.jit(functools.partial(hessian_product, function_of("xla")[0]))(x)
    for got, exact in zip(*map(jax.tree.leaves, (jax.jit(product)(x), want)), strict=True):
        assert cases.oracle.error(got, exact) <= 5e-3


@kernels_only
def test_the_derivative_of_a_gradient_by_its_cotangent_alone_is_a_gradient(implementation):
    """Kernels compute the derivative of a gradient by the weight of a loss, which meta-gradients need."""
    f, x = function("gru", implementation, jnp.float32)

    def gradient(scale):
        return jax.grad(lambda x: scale * loss_of(f)(x))(x)

    along_scale = jax.jit(lambda scale: jax.jvp(gradient, (scale,), (1.0,))[1])
    assert launches(along_scale, 2.0) == (1, 2)
    assert_close(along_scale(2.0), jax.jit(gradient)(1.0))


def learned_update(implementation, dtype):
    """Returns the loss of an agent as a function of the network whose targets it learns, and this network's parameters.

    As in LPG and DiscoRL, the network reads the agent's trajectories from their last step to the first, with resets.
    """
    network, x = function("lstm", implementation, dtype, call=MORE, reset_state=False, reverse=True)
    start, want = random_like((jnp.zeros((2, 2), dtype), x["xs"]), 3)

    def predict(agent):
        return jnp.tanh(x["xs"] @ agent)

    def loss(params):
        agent = start
        for _ in range(2):
            targets = network(x | {"params": params, "xs": predict(agent)})[1][..., :2]
            agent = gradient_step(lambda agent, targets=targets: square(predict(agent) - targets) / 2, agent)
        return square(predict(agent) - want)

    return loss, x["params"]


@kernels_only
def test_the_gradient_through_learned_updates_is_of_first_order(implementation):
    def compute(implementation, dtype):
        loss, params = learned_update(implementation, dtype)
        return jax.jit(jax.grad(loss))(params)

    check(compute)
    loss, params = learned_update(implementation, jnp.float32)
    assert launches(jax.grad(loss), params) == (2, 2)
    assert derivatives.tangent_p.name not in str(jax.make_jaxpr(jax.grad(loss))(params))


@kernels_only
def test_tangents_of_one_argument_cost_none_of_the_others(implementation):
    f, x = function("gru", implementation, jnp.float32)
    run, carry = of_carry(f, x)
    traced = jax.make_jaxpr(lambda carry: jax.jvp(run, (carry,), (carry,)))(carry)
    (tangent,) = (eqn for eqn in traced.jaxpr.eqns if eqn.primitive is derivatives.tangent_p)
    assert len(tangent.params["linear"].moving) == 1
    with jax.enable_x64(True):  # products with inputs of all steps are those of the primal
        plain, _ = of_carry(*function("gru", "xla", jnp.float32))
    assert_close(jvp(run, carry), jvp(plain, carry))


@kernels_only
@pytest.mark.parametrize("dtype", [bool, jnp.int32, jnp.float32])
def test_resets_of_every_dtype_have_no_derivative(dtype, implementation):
    params, carry, xs, resets, state = tiny("gru")
    resets = resets.astype(dtype)
    floating = jnp.issubdtype(dtype, jnp.floating)
    tangent = jnp.ones_like(resets) if floating else np.zeros(resets.shape, jax.dtypes.float0)
    run = lambda resets: runner_of("gru", implementation)(params, carry, xs, resets, state)  # noqa: E731
    for x in jax.tree.leaves(jax.jvp(run, (resets,), (tangent,))[1]):
        np.testing.assert_array_equal(x, 0)
    if floating:
        np.testing.assert_array_equal(jax.grad(loss_of(run))(resets), 0)
        np.testing.assert_array_equal(jax.jit(jax.hessian(loss_of(run)))(resets), 0)
    both = lambda carry, resets: runner_of("gru", implementation)(params, carry, xs, resets, state)  # noqa: E731
    got = jax.jvp(both, (carry, resets), (carry, tangent))
    assert_close(got, jax.jvp(lambda carry: both(carry, resets), (carry,), (carry,)))


@kernels_only
def test_derivatives_without_jit_equal_those_with(implementation):
    f, x = function("gru", implementation, jnp.float32)
    for transform in ("jvp", "forward-over-reverse", "transpose-of-vjp"):
        compute = functools.partial(TRANSFORMS[transform], f)
        assert_close(compute(x), jax.jit(compute)(x))


@kernels_only
def test_tangents_have_the_dtypes_of_primals(implementation):
    results = []
    for which in (implementation, "xla"):
        f, x = function("lstm", which, jnp.float16)
        results.append(jax.jit(functools.partial(jvp, f))(x))
    for primal, tangent in zip(*map(jax.tree.leaves, results[0]), strict=True):
        assert primal.dtype == tangent.dtype == jnp.float16
    assert_close(results[0][1], results[1][1], 4e-3)


@kernels_only
def test_gradients_of_states_may_exceed_float16(implementation):
    """With operands in float16, a second derivative by a carry in float32 is finite where XLA's is."""
    results = []
    for which in (implementation, "xla"):
        run, carry = of_carry(*function("gru", which, jnp.float16))
        gradient = jax.grad(lambda carry, run=run: 2e5 * loss_of(run)(carry))
        carry = carry.astype(jnp.float32)
        results.append(jax.jit(lambda carry, gradient=gradient: jax.jvp(gradient, (carry,), (carry,))[1])(carry))
    assert_close(*results, 4e-3)
