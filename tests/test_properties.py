"""What holds of every implementation, whatever it computes: causality, determinism, and JAX's transformations."""

import functools
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrnn

T, B, H, D, S = 4, 3, 5, 2, 2
CLOSE = 1e-5
FUNCTIONS = {"gru": jaxrnn.gru, "lstm": jaxrnn.lstm}


KERNELS = [
    pytest.param("triton", marks=pytest.mark.interpret, id="triton-interpreted"),
    pytest.param("triton", marks=pytest.mark.gpu, id="triton-gpu"),
]
# For what JAX itself holds of a `lax.scan`, and a custom rule might break.
kernels_only = pytest.mark.parametrize("implementation", KERNELS)


@pytest.fixture(params=["xla", *KERNELS])
def implementation(request):
    return request.param


@pytest.fixture(params=["gru", "lstm"])
def cell(request):
    return request.param


def random_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


def arguments(cell, batch=(B,), steps=T, lead=()):
    """Random `(params, carry, xs, resets, reset_state)`; float resets, reset state `[H]`, `lead` axes before all."""
    weights = {name: jnp.zeros((*lead, *shape)) for name, shape in cases.WEIGHTS[cell](H, D).items()}
    params = jaxrnn.GRUParams(**weights) if cell == "gru" else jaxrnn.LSTMParams(**weights)
    carry, state, xs = jnp.zeros((*lead, *batch, H)), jnp.zeros((*lead, H)), jnp.zeros((*lead, steps, *batch, D))
    if cell == "lstm":
        carry, state = (carry, carry), (state, state)
    params, carry, xs, state = random_like((params, carry, xs, state))
    resets = jnp.asarray(np.random.default_rng(0).random(xs.shape[:-1]) < 0.3, jnp.float32)
    return params, carry, xs, resets, state


def runner(cell, implementation, **options):
    """`call(params, carry, xs, resets, reset_state) -> (carry, ys)` at the highest precision."""

    def call(params, carry, xs, resets, reset_state):
        options_ = {"precision": "highest", "implementation": implementation} | options
        return FUNCTIONS[cell](params, carry, xs, resets=resets, reset_state=reset_state, **options_)

    return call


def loss_of(call):
    """A scalar that depends on every output of `call`."""

    def loss(*args):
        outputs = call(*args)
        return sum(
            jnp.vdot(x, y) for x, y in zip(*map(jax.tree.leaves, (outputs, random_like(outputs, 1))), strict=True)
        )

    return loss


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got, want, bound=CLOSE):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert cases.oracle.error(x, y) <= bound, jax.tree_util.keystr(path)


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_nothing_crosses_a_reset(cell, implementation, reverse):
    """After a reset of all sequences, no bit depends on what came before, and no gradient flows there."""
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
    """Empty outputs, the carry as it came, its gradient passed on, and zero gradients for the rest."""
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
    assert ys.shape == (*xs.shape[:2], H)
    assert_same((last, d_carry), (carry, ct_last))
    assert_same((d_params, d_xs, d_state), jax.tree.map(jnp.zeros_like, (params, xs, state)))
    assert_same(jax.jit(call)(params, carry, xs, resets, state)[0], carry)


# Which of (params, carry, xs, resets, reset_state) have the mapped axis.
MAPPED = {
    "all": (0, 0, 0, 0, 0),
    "weights": (0, None, None, None, None),
    "weights-xs": (0, None, 0, None, None),
    "carry-xs-resets": (None, 0, 0, 0, None),
    "resets": (None, None, None, 0, None),
    "reset_state": (None, None, None, None, 0),
    "w_hh": ("w_hh", None, None, None, None),
}


def mapped_arguments(cell, in_axes):
    """Arguments with the mapped axis where `in_axes` has it, `in_axes` as `jax.vmap` takes it, and element s."""
    single, stacked = arguments(cell), arguments(cell, lead=(S,))
    args = tuple(x if axis is None else y for axis, x, y in zip(in_axes, single, stacked, strict=True))
    if in_axes[0] == "w_hh":
        args = (single[0]._replace(w_hh=stacked[0].w_hh), *args[1:])
        axes = type(args[0])(**{name: 0 if name == "w_hh" else None for name in args[0]._fields})
        in_axes = (axes, *in_axes[1:])
    full_axes = tuple(
        axis if isinstance(axis, tuple) else jax.tree.map(lambda _, axis=axis: axis, arg)
        for axis, arg in zip(in_axes, args, strict=True)
    )
    axes_leaves = jax.tree.leaves(full_axes, is_leaf=lambda x: x is None)

    def element(s):
        leaves, tree = jax.tree.flatten(args)
        return tree.unflatten([x if axis is None else x[s] for x, axis in zip(leaves, axes_leaves, strict=True)])

    return args, in_axes, element


def stack(trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap_equals_a_loop(cell, implementation, mapped):
    """Outputs, and the gradients of every example by itself."""
    args, in_axes, element = mapped_arguments(cell, MAPPED[mapped])
    call = runner(cell, implementation)

    def both(*args):
        return call(*args), jax.grad(loss_of(call), argnums=(0, 1, 2, 3, 4))(*args)

    one = jax.jit(runner_with_gradients(cell, "xla"))
    assert_close(jax.jit(jax.vmap(both, in_axes))(*args), stack([one(*element(s)) for s in range(S)]))


@functools.cache
def runner_with_gradients(cell, implementation):
    call = runner(cell, implementation)

    def both(*args):
        return call(*args), jax.grad(loss_of(call), argnums=(0, 1, 2, 3, 4))(*args)

    return both


@kernels_only
@pytest.mark.parametrize("mapped", ["all", "weights-xs", "carry-xs-resets", "resets"])
def test_grad_of_vmap_equals_a_loop(cell, implementation, mapped):
    """Gradients to what is not mapped are sums over the mapped axis."""
    args, in_axes, element = mapped_arguments(cell, MAPPED[mapped])

    def total(*args):
        return jax.vmap(loss_of(runner(cell, implementation)), in_axes)(*args).sum()

    got = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3, 4)))(*args)
    one = jax.jit(runner_with_gradients(cell, "xla"))
    each = stack([one(*element(s))[1] for s in range(S)])
    want = tuple(x if axis == 0 else jax.tree.map(lambda x: x.sum(0), x) for axis, x in zip(in_axes, each, strict=True))
    assert_close(got, want)


# The axes of (weights and reset state, carry, xs, resets) that the outer and the inner vmap map.
NESTED = {
    "data-in-models": ((0, 0), (None, 0)),
    "models-in-data": ((None, 0), (0, 0)),
    "models-in-models": ((0, 0), (0, 0)),
    "models-in-models-on-one-data": ((0, None), (0, None)),
}


@kernels_only
@pytest.mark.parametrize("nesting", NESTED)
def test_nested_vmap_equals_loops(cell, implementation, nesting):
    axes = NESTED[nesting]
    sizes = (S, 3)

    def lead(which):
        return tuple(n for n, pair in zip(sizes, axes, strict=True) if pair[which] is not None)

    params, _, _, _, state = arguments(cell, lead=lead(0))
    _, carry, xs, resets, _ = arguments(cell, lead=lead(1))
    call = runner_with_gradients(cell, implementation)
    for model, data in reversed(axes):
        call = jax.vmap(call, (model, data, data, data, model))
    got = jax.jit(call)(params, carry, xs, resets, state)

    one = jax.jit(runner_with_gradients(cell, "xla"))

    def element(*indices):
        of_model, of_data = (
            tuple(i for i, pair in zip(indices, axes, strict=True) if pair[which] is not None) for which in (0, 1)
        )
        model = jax.tree.map(lambda x: x[of_model], (params, state))
        data = jax.tree.map(lambda x: x[of_data], (carry, xs, resets))
        return one(model[0], *data, model[1])

    assert_close(got, stack([stack([element(i, k) for k in range(sizes[1])]) for i in range(S)]))


@kernels_only
def test_scan_around_equals_one_long_run(cell, implementation):
    params, carry, xs, resets, state = arguments(cell, steps=2 * T)
    call = runner(cell, implementation)

    def chunks(params, carry, xs, state):
        def body(carry, inputs):
            return call(params, carry, *inputs, state)

        split = xs.reshape(2, T, B, D), resets.reshape(2, T, B)
        carry, ys = jax.lax.scan(body, carry, split)
        return carry, ys.reshape(2 * T, B, H)

    def whole(params, carry, xs, state):
        return runner(cell, "xla")(params, carry, xs, resets, state)

    args = (params, carry, xs, state)
    got, want = (
        jax.jit(lambda *args, f=f: (f(*args), jax.grad(loss_of(f), argnums=(0, 1, 2, 3))(*args)))(*args)
        for f in (chunks, whole)
    )
    assert_close(got, want)


@kernels_only
@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
def test_checkpoint_around_equals_plain(cell, implementation, remat):
    args = arguments(cell)
    plain = runner(cell, implementation, remat=remat)
    got, want = (
        jax.jit(jax.value_and_grad(loss_of(f), argnums=(0, 1, 2, 4)))(*args) for f in (jax.checkpoint(plain), plain)
    )
    assert_close(got, want)


@kernels_only
def test_outside_jit_equals_inside(cell, implementation):
    args = arguments(cell)
    both = runner_with_gradients(cell, implementation)
    assert_close(both(*args), jax.jit(both)(*args))


@kernels_only
def test_without_jit_equals_with_it(cell, implementation):
    args = arguments(cell)
    both = runner_with_gradients(cell, implementation)
    with jax.disable_jit():
        got = both(*args)
    assert_close(got, jax.jit(both)(*args))


@kernels_only
def test_compiled_ahead_of_time(cell, implementation):
    """`eval_shape` says what comes out; a compiled program may take the carry's memory."""
    params, carry, *rest = arguments(cell)
    call = runner(cell, implementation)
    want = jax.jit(call)(params, carry, *rest)
    expected = jax.eval_shape(call, params, carry, *rest)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), expected) == jax.tree.map(lambda x: (x.shape, x.dtype), want)
    compiled = jax.jit(call, donate_argnums=1).lower(params, carry, *rest).compile()
    donated = jax.tree.map(jnp.copy, carry)
    assert_same(compiled(params, donated, *rest), want)
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))


@kernels_only
def test_control_flow_around_equals_python(cell, implementation):
    params, carry, *rest = arguments(cell)
    call = jax.jit(runner(cell, implementation))

    def run(flag, carry):
        once = jax.lax.cond(flag, lambda c: call(params, c, *rest)[0], lambda c: c, carry)
        return jax.lax.while_loop(
            lambda i_c: i_c[0] < 2, lambda i_c: (i_c[0] + 1, call(params, i_c[1], *rest)[0]), (0, once)
        )[1]

    for flag in (False, True):
        want = carry
        for _ in range(2 + flag):
            want = call(params, want, *rest)[0]
        assert_close(jax.jit(run)(flag, carry), want)


@kernels_only
def test_a_mapped_axis_keeps_its_name(cell, implementation):
    args = arguments(cell, lead=(S,))
    gradient = jax.grad(loss_of(runner(cell, implementation)))

    def mean(*args):
        return jax.lax.pmean(gradient(*args), "seeds")

    got = jax.jit(jax.vmap(mean, axis_name="seeds", spmd_axis_name="seeds"))(*args)
    each = [gradient(*jax.tree.map(lambda x, s=s: x[s], args)) for s in range(S)]
    want = jax.tree.map(lambda *xs: jnp.broadcast_to(sum(xs) / S, (S, *xs[0].shape)), *each)
    assert_close(got, want)


@kernels_only
def test_debug_nans_finds_one(cell, implementation):
    params, carry, xs, resets, state = arguments(cell)
    bad = jax.tree.map(lambda x: x.at[0, 0].set(jnp.nan), carry)
    call = jax.jit(runner(cell, implementation))
    with jax.debug_nans(True):
        jax.block_until_ready(call(params, carry, xs, resets, state))
        with pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(call(params, bad, xs, jnp.zeros_like(resets), state))


def test_resets_take_no_gradient(cell, implementation):
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
def test_none_is_xla_on_a_cpu(cell):
    """Bit for bit, though the kernels could be interpreted there."""
    args = arguments(cell)
    got, want = (jax.jit(runner_with_gradients(cell, implementation))(*args) for implementation in (None, "xla"))
    assert_same(got, want)


@pytest.mark.parametrize("weights", ["float64", "float16"])
def test_none_runs_what_has_no_kernel(cell, weights):
    """`implementation=None` always works: mixed dtypes, float64."""
    with jax.enable_x64(True):
        params, *rest = arguments(cell)
        params = jax.tree.map(lambda x: x.astype(weights), params)
        got = runner(cell, None)(params, *rest)
        assert_close(got, runner(cell, "xla")(params, *rest))


def unusual(cell):
    """Calls that the table of cases leaves out: `name: (arguments, options)`."""
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
    if cell == "lstm":
        calls |= {
            "reset state for h": ((params, carry, xs, resets, (None, state[1])), {"return_cells": True}),
            "reset state for c": ((params, carry, xs, resets, (stepped[0], None)), {}),
            "reset states of two shapes": ((params, carry, xs, resets, (state[0], stepped[1])), {}),
            "carry of two dtypes": ((params, (carry[0], half(carry[1])), xs, resets, state), {"return_cells": True}),
        }
    return calls


UNUSUAL = [(cell, name) for cell in ("gru", "lstm") for name in unusual(cell)]


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
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_vmap_over_nothing_gives_nothing(implementation):
    T, B, D, H = 3, 2, 4, 5
    params = jaxrnn.GRUParams(jnp.ones((D, 3 * H)), jnp.ones((H, 3 * H)), jnp.ones((3 * H,)), jnp.ones((H,)))
    run = jax.vmap(lambda h, x: jaxrnn.gru(params, h, x, implementation=implementation))
    last, ys = run(jnp.zeros((0, B, H)), jnp.zeros((0, T, B, D)))
    assert (last.shape, ys.shape) == ((0, B, H), (0, T, B, H))


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn", "int4"])
def test_resets_may_have_any_dtype(dtype):
    T, B, D, H = 3, 2, 4, 5
    params = jaxrnn.GRUParams(jnp.ones((D, 3 * H)), jnp.ones((H, 3 * H)), jnp.ones((3 * H,)), jnp.ones((H,)))
    carry, xs = jnp.ones((B, H)), jnp.linspace(-1, 1, T * B * D).reshape(T, B, D)
    resets = jnp.array([[0, 1], [1, 0], [0, 0]])
    want = jaxrnn.gru(params, carry, xs, resets=resets, implementation="triton")
    got = jaxrnn.gru(params, carry, xs, resets=resets.astype(dtype), implementation="triton")
    np.testing.assert_array_equal(got[1], want[1])
