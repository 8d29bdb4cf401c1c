"""Tests the `lax.scan` reference against the oracle, Flax, PyTorch, and itself run episode by episode."""

import dataclasses
import functools
import itertools

import calls
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import jaxrnn
from jaxrnn import cells, scan
from torch_bridge.cells import CELLS as SPECS

T, B, H, D = 6, 3, 4, 3
EXACT = 1e-12  # float64
CLOSE = 3e-6  # float32

gru, lstm = (functools.partial(f, implementation="xla") for f in (jaxrnn.gru, jaxrnn.lstm))


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    """Disables TF32, which is XLA's default on a GPU."""
    with jax.default_matmul_precision("highest"):
        yield


def test_width_of_the_local_gradients_is_checked():
    """A wrong one would show in derivatives of higher order alone."""
    wrong = {name: width + (name == "local_grads") for name, width in SPECS["lstm"].residuals}
    with pytest.raises(ValueError, match=r'lstm: residuals must have \("local_grads", 4\), got 5: there are 4'):
        dataclasses.replace(SPECS["lstm"], residuals=tuple(wrong.items()))


def random_like(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), tree)


def arguments(cell, dtype=jnp.float32, steps=(T,), batch=(B,), seed=0):
    """Returns random `(params, carry, xs)`."""
    params = cells.CELLS[cell].params(**{k: jnp.zeros(n, dtype) for k, n in cells.CELLS[cell].shapes(D, H).items()})
    carry = jnp.zeros((*batch, H), dtype)
    return random_like(
        (params, carry if cell == "gru" else (carry, carry), jnp.zeros((*steps, *batch, D), dtype)), seed
    )


def value_and_vjp(function, *args):
    """Returns outputs, and gradients for fixed random cotangents, under `jax.jit`."""

    @jax.jit
    def both(*args):
        outputs, vjp = jax.vjp(function, *args)
        return outputs, vjp(random_like(outputs, seed=1))

    return both(*args)


CASES = [
    Case(
        cell,
        T=5,
        B=3,
        H=4,
        D=3,
        reset_state=state,
        reverse=reverse,
        time_major=reverse == (state == "tbh"),
        cells=cell == "lstm" and reverse,
    )
    for cell, state, reverse in itertools.product(cases.FUNCTIONS, (None, "h", "bh", "tbh"), (False, True))
]
CASES += [dataclasses.replace(case, proj=3) for case in CASES if case.cell == "lstm"]
SMALL = [
    Case("gru", T=5, B=3, H=24, resets="none", precision="highest"),
    Case("gru", T=5, B=3, H=24, resets="all", reset_state="h", reset_dtype="float32", precision="highest"),
    Case("gru", T=7, B=19, H=65, reset_state="bh", precision="highest", reset_dtype="int32"),
    Case("gru", T=5, B=3, H=24, dtype="bf16"),
    Case("gru", T=5, B=3, H=24, dtype="f16", carry_dtype="f16", models=2),
    Case("lstm", T=5, B=3, H=24, resets="none", precision="highest", cells=True),
    Case("lstm", T=5, B=3, H=24, resets="all", reset_state="h", reset_dtype="float32", precision="highest"),
    Case("lstm", T=7, B=19, H=65, reset_state="bh", precision="highest", reset_dtype="int32"),
    Case("lstm", T=5, B=3, H=24, dtype="bf16"),
    Case("lstm", T=5, B=3, H=24, dtype="bf16", proj=7, reset_state="h", cells=True),
    Case("lstm", T=5, B=3, H=24, dtype="f16", carry_dtype="f16", models=2, cells=True),
]
BOUND = {"f32": CLOSE, "bf16": 2.0**-7, "f16": 2.0**-9}


@pytest.mark.quick("case.cell")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_oracle_in_float64(case):
    inputs = cases.make_inputs(case)
    got, want = cases.run_float64(case, inputs), cases.run_oracle(case, inputs)
    assert got.keys() == want.keys()
    cases.compare(got, want, lambda name: EXACT)


@pytest.mark.quick("case.cell")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_matches_the_oracle(case):
    inputs = cases.make_inputs(case)
    got, want = cases.run(case, inputs, "xla"), cases.run_oracle(case, inputs)
    assert got.keys() == want.keys()
    cases.compare(got, want, lambda name: BOUND[case.dtype])
    cases.compare(cases.run_forward(case, inputs, "xla"), want, lambda name: BOUND[case.dtype])


def from_flax_gru(tree):
    kernel = {name: leaf["kernel"] for name, leaf in tree.items()}
    return jaxrnn.GRUParams(
        w_ih=jnp.concatenate([kernel[name] for name in ("ir", "iz", "in")], axis=-1),
        w_hh=jnp.concatenate([kernel[name] for name in ("hr", "hz", "hn")], axis=-1),
        b_ih=jnp.concatenate([tree[name]["bias"] for name in ("ir", "iz", "in")]),
        b_hn=tree["hn"]["bias"],
    )


def from_flax_lstm(tree):
    return jaxrnn.LSTMParams(
        w_ih=jnp.concatenate([tree["i" + gate]["kernel"] for gate in "ifgo"], axis=-1),
        w_hh=jnp.concatenate([tree["h" + gate]["kernel"] for gate in "ifgo"], axis=-1),
        b=jnp.concatenate([tree["h" + gate]["bias"] for gate in "ifgo"]),
    )


@pytest.mark.quick("cell")
@pytest.mark.parametrize(
    ("cell", "function", "convert"),
    [
        (nn.GRUCell(H), gru, from_flax_gru),
        (nn.LSTMCell(H), lstm, from_flax_lstm),
        (nn.OptimizedLSTMCell(H), lstm, from_flax_lstm),
    ],
    ids=["GRUCell", "LSTMCell", "OptimizedLSTMCell"],
)
def test_matches_flax_linen(cell, function, convert):
    _, carry, xs = arguments("gru" if function is gru else "lstm")
    resets = jnp.asarray(np.random.default_rng(0).random((T, B)) < 0.3)
    tree = random_like(cell.init(jax.random.key(0), carry, xs[0])["params"])

    def flax_loop(tree, carry, xs):
        def step(carry, inputs):
            x, reset = inputs
            carry = jax.tree.map(lambda h: jnp.where(reset[:, None], 0, h), carry)
            return cell.apply({"params": tree}, carry, x)

        return jax.lax.scan(step, carry, (xs, resets))

    def ours(tree, carry, xs):
        return function(convert(tree), carry, xs, resets=resets)

    calls.assert_close(value_and_vjp(ours, tree, carry, xs), value_and_vjp(flax_loop, tree, carry, xs), CLOSE)


@pytest.mark.torch
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_matches_torch(cell):
    import torch

    with jax.enable_x64(True):
        params, carry, xs = arguments(cell, jnp.float64)

        def from_torch(w_ih, w_hh, b_ih, b_hh):
            if cell == "lstm":
                return jaxrnn.LSTMParams(w_ih.T, w_hh.T, b_ih + b_hh)
            return jaxrnn.GRUParams(w_ih.T, w_hh.T, b_ih.at[: 2 * H].add(b_hh[: 2 * H]), b_hh[2 * H :])

        def ours(weights, carry, xs):
            last, ys = (gru if cell == "gru" else lstm)(from_torch(*weights), carry, xs)
            return ys, last if cell == "gru" else last[::-1]

        b = params.b_ih if cell == "gru" else params.b
        weights = random_like((params.w_ih.T, params.w_hh.T, b, b))
        got = value_and_vjp(ours, weights, carry, xs)
        ct_ys, ct_last = random_like(got[0], seed=1)

    def tensor(x):
        return torch.tensor(np.asarray(x), requires_grad=True)

    module = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[cell](D, H, dtype=torch.float64)
    for parameter, value in zip(module.parameters(), weights, strict=True):
        parameter.data = tensor(value).data
    xs_t, carry_t = tensor(xs), jax.tree.map(lambda x: tensor(x[None]), carry)
    ys, last = module(xs_t, carry_t if cell == "gru" else carry_t[::-1])
    outputs, cotangents = (ys, *jax.tree.leaves(last)), (ct_ys, *(x[None] for x in jax.tree.leaves(ct_last)))
    torch.autograd.backward(outputs, [torch.tensor(np.asarray(x)) for x in cotangents])

    want_last = jax.tree.map(lambda x: x.detach().numpy()[0], last)
    want_weights = tuple(parameter.grad.numpy() for parameter in module.parameters())
    want_carry = jax.tree.map(lambda x: x.grad.numpy()[0], carry_t)
    calls.assert_close(got, ((ys.detach().numpy(), want_last), (want_weights, want_carry, xs_t.grad.numpy())), EXACT)


@functools.cache
def jitted(cell):
    """Returns a jitted function that computes outputs and gradients for given cotangents; compiled once per shape."""

    def call(args, resets, cotangents):
        def run(params, carry, xs, reset_state):
            return (gru if cell == "gru" else lstm)(params, carry, xs, resets=resets, reset_state=reset_state)

        outputs, vjp = jax.vjp(run, *args)
        return outputs, vjp(cotangents)

    return jax.jit(call)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@settings(max_examples=30, deadline=None)
@given(resets=hnp.arrays(bool, (T, 2)), seed=st.integers(0, 1000))
def test_resetting_equals_running_episodes_separately(cell, resets, seed):
    params, carry, xs = arguments(cell, batch=(2,), seed=seed)
    reset_state = random_like(jax.tree.map(lambda x: x[0], carry), seed + 1)
    cotangents = random_like((carry, jnp.zeros((T, 2, H))), seed + 2)
    got = jitted(cell)((params, carry, xs, reset_state), jnp.asarray(resets), cotangents)

    zeros = jax.tree.map(np.zeros_like, (params, carry, xs, reset_state))
    last, ys, (d_params, d_carry, d_xs, d_state) = carry, np.zeros((T, 2, H), np.float32), zeros
    last = jax.tree.map(np.array, last)
    for b in range(2):
        starts = sorted({0, *np.flatnonzero(resets[:, b])})
        for start, stop in itertools.pairwise([*starts, T]):
            state = reset_state if resets[start, b] else jax.tree.map(lambda x, b=b: x[b], carry)
            ct_last = jax.tree.map(lambda x, b=b, end=stop == T: x[b] * end, cotangents[0])
            args, ct = (params, state, xs[start:stop, b], None), (ct_last, cotangents[1][start:stop, b])
            (end, ys[start:stop, b]), gradients = jitted(cell)(args, None, ct)
            jax.tree.map(lambda total, x: np.add(total, x, out=total), d_params, gradients[0])
            d_xs[start:stop, b] = gradients[2]
            for k, d_start in enumerate(jax.tree.leaves(gradients[1])):
                if resets[start, b]:
                    jax.tree.leaves(d_state)[k][...] += d_start
                else:
                    jax.tree.leaves(d_carry)[k][b] = d_start
                jax.tree.leaves(last)[k][b] = jax.tree.leaves(end)[k]
    calls.assert_close(got, ((last, ys), (d_params, d_carry, d_xs, d_state)), 1e-5)


@pytest.mark.parametrize(
    ("state_axes", "time_major"),
    [((), True), ((B,), False), ((T, B), True), ((T, B), False)],
    ids=["h-timemajor", "bh-batchmajor", "tbh-timemajor", "tbh-batchmajor"],
)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_extra_batch_axes_equal_one_flattened_axis(cell, state_axes, time_major):
    """Checks that `[T, B, A, D]` gives what `[T, B * A, D]` gives, and `[B, A, T, D]` the transpose."""
    A = 2
    function = gru if cell == "gru" else lstm
    params, carry, xs = arguments(cell, batch=(B, A))
    resets = jnp.asarray(np.random.default_rng(0).random((T, B, A)) < 0.3)
    state = random_like(jax.tree.map(lambda x: jnp.zeros((*state_axes, *(A,) * bool(state_axes), H)), carry))

    def fold(x, axes):
        return jnp.reshape(x, (*x.shape[:axes], B * A, *x.shape[axes + 2 :]))

    def time_last(x):
        return x if time_major else jnp.moveaxis(x, 0, 2)

    def with_batch_axes(params, carry, xs, state):
        if len(state_axes) == 2:
            state = jax.tree.map(time_last, state)
        options = {"resets": time_last(resets), "reset_state": state, "time_major": time_major}
        last, ys = function(params, carry, time_last(xs), **options)
        return last, ys if time_major else jnp.moveaxis(ys, 2, 0)

    def folded(params, carry, xs, state):
        if state_axes:
            state = jax.tree.map(lambda x: fold(x, len(state_axes) - 1), state)
        carry = jax.tree.map(lambda x: fold(x, 0), carry)
        last, ys = function(params, carry, fold(xs, 1), resets=fold(resets, 1), reset_state=state)
        return jax.tree.map(lambda x: x.reshape(*x.shape[:-2], B, A, H), (last, ys))

    args = (params, carry, xs, state)
    calls.assert_close(value_and_vjp(with_batch_axes, *args), value_and_vjp(folded, *args), CLOSE)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_no_batch_axis_equals_a_batch_of_one(cell):
    params, carry, xs = arguments(cell, batch=())
    resets = jnp.arange(T) % 3 == 1
    states = random_like(jax.tree.map(lambda x: jnp.zeros((T, H)), carry))
    function = gru if cell == "gru" else lstm

    def single(params, carry, xs, states):
        return function(params, carry, xs, resets=resets, reset_state=states)

    def batch_of_one(params, carry, xs, states):
        carry, states = jax.tree.map(lambda x: x[..., None, :], (carry, states))
        outputs = function(params, carry, xs[:, None], resets=resets[:, None], reset_state=states)
        return jax.tree.map(lambda x: jnp.squeeze(x, -2), outputs)

    args = (params, carry, xs, states)
    calls.assert_close(value_and_vjp(single, *args), value_and_vjp(batch_of_one, *args), CLOSE)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_reverse_equals_forward_on_flipped_time(cell):
    args = arguments(cell)
    resets = jnp.asarray(np.random.default_rng(0).random((T, B)) < 0.3)
    function = gru if cell == "gru" else lstm

    def flipped(params, carry, xs):
        last, ys = function(params, carry, xs[::-1], resets=resets[::-1])
        return last, ys[::-1]

    got = value_and_vjp(functools.partial(function, resets=resets, reverse=True), *args)
    calls.assert_close(got, value_and_vjp(flipped, *args), CLOSE)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_resets_at_all_steps_equal_single_steps(cell):
    params, carry, xs = arguments(cell)
    states = random_like(jax.tree.map(lambda x: jnp.zeros((T, B, H)), carry))
    function = gru if cell == "gru" else lstm

    def together(params, xs, states):
        return function(params, carry, xs, resets=jnp.ones((T, B)), reset_state=states)

    def apart(params, xs, states):
        lasts, ys = function(params, states, xs[None])
        return jax.tree.map(lambda x: x[-1], lasts), ys[0]

    calls.assert_close(value_and_vjp(together, params, xs, states), value_and_vjp(apart, params, xs, states), CLOSE)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_two_halves_equal_one_run(cell):
    args = arguments(cell)
    resets = jnp.asarray(np.random.default_rng(0).random((T, B)) < 0.3)
    function = gru if cell == "gru" else lstm

    def halves(params, carry, xs):
        carry, first = function(params, carry, xs[:2], resets=resets[:2])
        carry, second = function(params, carry, xs[2:], resets=resets[2:])
        return carry, jnp.concatenate([first, second])

    calls.assert_close(
        value_and_vjp(functools.partial(function, resets=resets), *args), value_and_vjp(halves, *args), CLOSE
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_nan_and_infinity_do_not_cross_a_reset(cell, bad):
    params, carry, xs = arguments(cell)
    function = gru if cell == "gru" else lstm
    carry = jax.tree.map(lambda x: jnp.full_like(x, bad), carry)

    # The first step resets a bad initial carry, so everything is finite.
    outputs, (d_params, d_carry, d_xs) = value_and_vjp(
        functools.partial(function, resets=jnp.zeros((T, B)).at[0].set(1)), params, carry, xs
    )
    assert jax.tree.all(jax.tree.map(lambda x: jnp.isfinite(x).all(), (outputs, d_params, d_xs)))
    assert jax.tree.all(jax.tree.map(lambda x: (x == 0).all(), d_carry))

    # The reset is at step 2: outputs before it are NaN, and from there on outputs and gradients are finite.
    resets = jnp.zeros((T, B)).at[2].set(1)
    (last, ys), (_, _, d_xs) = value_and_vjp(functools.partial(function, resets=resets), params, carry, xs)
    assert jnp.isnan(ys[:2]).any()
    assert jax.tree.all(jax.tree.map(lambda x: jnp.isfinite(x).all(), (last, ys[2:], d_xs[2:])))


@pytest.mark.parametrize("bad", [-1, 0.5, np.nan, 2])
def test_every_nonzero_value_resets(bad):
    params, carry, xs = arguments("gru")
    where = np.random.default_rng(0).random((T, B)) < 0.3
    dtype = jnp.int32 if isinstance(bad, int) else jnp.float32
    got = gru(params, carry, xs, resets=jnp.where(where, jnp.asarray(bad, dtype), jnp.asarray(0, dtype)))
    calls.assert_close(got, gru(params, carry, xs, resets=where), 0)


@pytest.mark.parametrize("carry_dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda x: x.__name__)
def test_outputs_have_the_dtype_of_the_carry(dtype, carry_dtype):
    (params, _, xs), (lstm_params, _, _) = arguments("gru", dtype), arguments("lstm", dtype)
    h, c = jnp.zeros((B, H), carry_dtype), jnp.zeros((B, H), jnp.float16)
    assert [x.dtype for x in jax.eval_shape(gru, params, h, xs)] == [carry_dtype, carry_dtype]
    with_cells = functools.partial(lstm, return_cells=True)
    (last_c, last_h), (hs, cs) = jax.eval_shape(with_cells, lstm_params, (c, h), xs)
    assert (last_h.dtype, hs.dtype, last_c.dtype, cs.dtype) == (carry_dtype, carry_dtype, c.dtype, c.dtype)


def test_half_precision_gru_keeps_a_float32_carry_between_steps():
    """Fixes z, so that h approaches 1 in increments that a bfloat16 carry would lose, and h would stall far below 1."""
    steps = 1000
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), arguments("gru")[0])
    b_z, n = jnp.asarray(6.0, jnp.bfloat16), np.tanh(8.0)
    params = params._replace(b_ih=params.b_ih.at[H : 2 * H].set(b_z).at[2 * H :].set(8.0))
    last, _ = gru(params, jnp.zeros((1, H), jnp.bfloat16), jnp.zeros((steps, 1, D), jnp.bfloat16))
    want = n * (1 - (1 / (1 + np.exp(-6.0))) ** steps)
    np.testing.assert_allclose(np.asarray(last, np.float64), want, rtol=2.0**-8)


def test_half_precision_lstm_keeps_a_float32_carry_between_steps():
    """Fixes f at 1, so that c grows by the same small amount per step, which a bfloat16 carry would soon lose."""
    steps = 1000
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.bfloat16), arguments("lstm")[0])
    params = params._replace(b=jnp.repeat(jnp.asarray([-7.0, 20.0, 8.0, 0.0], jnp.bfloat16), H))
    zeros = jnp.zeros((1, H), jnp.bfloat16)
    (c, _), _ = lstm(params, (zeros, zeros), jnp.zeros((steps, 1, D), jnp.bfloat16))
    want = steps * np.tanh(8.0) / (1 + np.exp(7.0))
    np.testing.assert_allclose(np.asarray(c, np.float64), want, rtol=2.0**-8)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_float32_recurrent_weights_are_multiplied_in_float32(cell):
    """Uses bfloat16 inputs and input weights, which are multiplied separately."""
    rng = np.random.default_rng(0)
    gates, H, D = {"gru": 3, "lstm": 4}[cell], 16, 4
    draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    weights = [draw(D, gates * H), *(x.astype(jnp.float32) for x in (draw(H, gates * H), draw(gates * H), draw(H)))]
    params = jaxrnn.GRUParams(*weights) if cell == "gru" else jaxrnn.LSTMParams(*weights[:3])
    carry, xs = jnp.zeros((2, H)), draw(30, 2, D)
    carry = carry if cell == "gru" else (carry, carry)
    run = functools.partial(getattr(jaxrnn, cell), carry=carry, precision="highest")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), (params, xs))
    np.testing.assert_allclose(run(params, xs=xs)[1], run(wide[0], xs=wide[1])[1], atol=1e-6)


@pytest.mark.parametrize(
    ("cell", "options"),
    cases.deal(
        itertools.product([calls.D, 24], [("float32", 1), ("bfloat16", 1), ("mixed", 2)]),
        ("gru", "lstm", "mgu"), whole=("gru",),
    ),
    ids=str,
)  # fmt: skip
def test_one_step_computes_one_product_on_a_gpu(monkeypatch, cell, options):
    """With `calls.D` units, the weights of inputs and of state have equal widths; else zeros pad the narrower ones."""
    hidden, (dtype, products) = options
    # a reset state for each sequence, whose gradient is no sum in which terms cancel
    params, carry, xs, resets, state = calls.arguments(cell, steps=1, hidden=hidden, stepped=True)
    if dtype != "float32":
        params, xs = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, xs))
    if dtype == "mixed":
        params = params._replace(w_hh=params.w_hh.astype(jnp.float32))
    arguments = params, carry, xs, resets, state
    call = calls.with_gradients(calls.runner(cell, "xla"))
    want = call(*arguments)
    jax.clear_caches()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    calls.assert_close(call(*arguments), want, 1e-6 if dtype == "float32" else 2.0**-6)
    forward = calls.runner(cell, "xla")
    assert str(jax.make_jaxpr(forward)(*arguments)).count("dot_general[") == products
    jax.clear_caches()
    monkeypatch.setattr(scan, "_JOINT_BYTES", 0)
    assert str(jax.make_jaxpr(forward)(*arguments)).count("dot_general[") == 2
    jax.clear_caches()


@pytest.mark.parametrize(
    ("cell", "steps", "count"),
    [
        *(("gru", steps, count) for steps, count in ((2, 2), (3, 3), (7, 1), (8, 4), (10, 2))),
        *((cell, 8, 4) for cell in calls.EVERY_CELL if cell != "gru"),
    ],
)
def test_an_iteration_has_several_steps_on_a_gpu(monkeypatch, cell, steps, count):
    """Results are those of one step an iteration, as on a CPU."""
    arguments = calls.arguments(cell, steps=steps, stepped=True)
    call = calls.runner(cell, "xla", reverse=steps in (8, 10))
    jax.clear_caches()
    want = calls.with_gradients(call)(*arguments)
    assert " unroll=1\n" in str(jax.make_jaxpr(call)(*arguments))
    jax.clear_caches()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    calls.assert_close(calls.with_gradients(call)(*arguments), want, 1e-6)
    assert f" unroll={count}\n" in str(jax.make_jaxpr(call)(*arguments))
    jax.clear_caches()


def test_a_symbolic_number_of_steps_has_one_step_an_iteration_on_a_gpu(monkeypatch):
    params, carry, xs, _, _ = calls.arguments("gru", steps=8)
    (steps,) = jax.export.symbolic_shape("t")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    call = functools.partial(calls.runner("gru", "xla"), resets=None, reset_state=None)
    _, ys = jax.eval_shape(call, params, carry, jax.ShapeDtypeStruct((steps, *xs.shape[1:]), "float32"))
    jax.clear_caches()
    assert ys.shape[0] == steps


@pytest.mark.parametrize("cell", ["gru", "lstm", "mgu"])
def test_one_step_has_symbolic_widths_on_a_gpu(monkeypatch, cell):
    params, carry, xs, resets, _ = calls.arguments(cell, steps=1, hidden=24)
    (d,) = jax.export.symbolic_shape("d")
    params = params._replace(w_ih=jax.ShapeDtypeStruct((d, params.w_ih.shape[1]), "float32"))
    xs = jax.ShapeDtypeStruct((*xs.shape[:-1], d), "float32")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    call = functools.partial(calls.runner(cell, "xla"), reset_state=None)
    _, ys = jax.eval_shape(call, params, carry, xs, resets)
    jax.clear_caches()
    assert ys.shape == (*xs.shape[:-1], 24)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cell", ["gru", "lstm", "mgu"])
def test_one_step_saturates_like_the_formula(monkeypatch, cell, dtype, bad):
    """Sets one input to infinity, or close to the largest float32."""
    params, carry, xs, resets, _ = jax.tree.map(
        lambda x: x.astype(dtype), calls.arguments(cell, steps=1, hidden=24, stepped=True)
    )
    xs = xs.at[0, 0, 0].set(bad)
    call = calls.runner(cell, "xla")
    want = call(params, carry, xs, resets, None)
    jax.clear_caches()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    got = call(params, carry, xs, resets, None)
    jax.clear_caches()
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert np.isfinite(y.astype("float32")).all()
        np.testing.assert_allclose(x.astype("float32"), y.astype("float32"), atol=1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("cell", cells.CELLS.values(), ids=lambda cell: cell.name)
def test_weights_are_arguments_of_exported_programs(cell):
    params = cell.params(*(jnp.full((2,), i) for i, _ in enumerate(cell.params._fields)))
    program = jax.export.export(jax.jit(lambda params: jax.tree.map(lambda x: 2 * x, params)))(params)
    doubled = jax.export.deserialize(program.serialize()).call(params)
    assert type(doubled) is cell.params and [float(x[0]) for x in doubled] == [2 * i for i in range(len(params))]
