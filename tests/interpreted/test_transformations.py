"""Tests that JAX's transformations of `gru` and `lstm` give the results of the plain function with `lax.scan`.

The tests compare `jax.vmap` with a Python loop over the mapped axis, and `jax.lax.scan` and other control flow with
Python's. Several devices are tested in test_sharding.py, and derivatives of higher order or in forward mode in
test_derivatives.py.
"""

import functools
import operator
import subprocess
import sys

import cases
import child
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from calls import (
    CLOSE,
    EVERY_CELL,
    PROJECTED,
    B,
    D,
    H,
    S,
    T,
    arguments,
    assert_close,
    assert_same,
    cell_of,
    every_cell,
    every_implementation,
    kernels_only,
    launches,
    loss_of,
    projected_too,
    random_like,
    recomputing_launches,
    reference,
    runner,
    stack,
    with_gradients,
)  # fmt: skip
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify

import jaxrnn
from jaxrnn.cells import CELLS

BATCH_MAJOR = {"time_major": False, "reverse": True}


def options_of(batch_major):
    """Returns `(options of arguments, options of the call)`; batch-major is in reverse, with a reset state per step."""
    return ({"time_major": False, "stepped": True}, BATCH_MAJOR) if batch_major else ({}, {})


# The rules of transformations are the same for all cells: the two differ in the number of states and in projections.
deal = functools.partial(cases.deal, cells=[*EVERY_CELL, PROJECTED], whole=("gru", PROJECTED))


def layout_id(x):
    return ("timemajor", "batchmajor-reverse-stepped")[x] if isinstance(x, bool) else str(x)


either_layout = pytest.mark.parametrize(("cell", "batch_major"), deal((True, False)), ids=layout_id)


def trees(cell):
    """Returns `in_axes` for `jax.vmap` as pytrees, with an axis for each array."""
    entry = CELLS[cell_of(cell)]
    if len(entry.states) == 1:
        axes = {"w_ih": 1, "w_hh": None, entry.bias: 0, "b_hn": -1, "scale_i": 1, "scale_h": 0}
        axes |= {"shift_i": None, "shift_h": None}
        return entry.params(**{name: axes[name] for name in entry.params._fields}), 1, None, 2, 0
    return entry.params(w_ih=None, w_hh=2, b=0), (None, 1), -1, None, (0, None)


def only_w_hh(cell):
    fields = type(arguments(cell)[0])
    return fields(**{name: 0 if name == "w_hh" else None for name in fields._fields}), None, None, None, None


# Each entry has the mapped axes of (params, carry, xs, resets, reset_state).
MAPPED = {
    "all": (0, 0, 0, 0, 0),
    "weights": (0, None, None, None, None),
    "weights-xs": (0, None, 0, None, None),
    "carry-xs-resets": (None, 0, 0, 0, None),
    "resets": (None, None, None, 0, None),
    "reset_state": (None, None, None, None, 0),
    "w_hh": only_w_hh,
    "last-axes": (-1, -1, -1, -1, -1),
    "middle-axes": (1, 1, 2, 1, None),
    "trees": trees,
}


def mapped_arguments(cell, in_axes, **options):
    """Returns arguments with mapped axes, `in_axes` as `jax.vmap` takes it, and a function that returns element s."""
    in_axes = in_axes(cell) if callable(in_axes) else in_axes
    single, stacked = arguments(cell, **options), arguments(cell, lead=(S,), **options)
    leaves, tree = jax.tree.flatten(single, is_leaf=is_none)  # w_hr of an LSTM without a projection is None
    mapped_leaves = jax.tree.leaves(stacked, is_leaf=is_none)
    axes = jax.tree.leaves(jax.tree.broadcast(in_axes, single, is_leaf=is_none), is_leaf=is_none)
    args = [
        one if axis is None or one is None else jnp.moveaxis(many, 0, axis)
        for one, many, axis in zip(leaves, mapped_leaves, axes, strict=True)
    ]

    def element(s):
        return tree.unflatten(
            [
                one if axis is None or one is None else many[s]
                for one, many, axis in zip(leaves, mapped_leaves, axes, strict=True)
            ]
        )

    return tree.unflatten(args), in_axes, element


def is_none(x):
    return x is None


@pytest.mark.quick("cell")
@kernels_only
@pytest.mark.parametrize(
    ("cell", "mapped"),
    deal([*((name, False) for name in MAPPED), *((name, True) for name in ("all", "weights", "carry-xs-resets"))]),
    ids=lambda x: x if isinstance(x, str) else "-".join(map(layout_id, x)),
)
def test_vmap_equals_a_loop(cell, implementation, mapped):
    """Compares outputs, and the gradients of each example."""
    mapped, batch_major = mapped
    make, options = options_of(batch_major)
    args, in_axes, element = mapped_arguments(cell, MAPPED[mapped], **make)
    out_axis = -1 if mapped == "last-axes" else 0
    both = with_gradients(runner(cell, implementation, **options))
    got = jax.jit(jax.vmap(both, in_axes, out_axis))(*args)
    got = jax.tree.map(lambda x: np.moveaxis(x, out_axis, 0), got)
    assert_close(got, stack([reference(cell, **options)(*element(s)) for s in range(S)]))


@pytest.mark.quick
@kernels_only
@pytest.mark.parametrize(("cell", "mapped"), deal(["all", "weights-xs", "carry-xs-resets", "resets"]))
def test_grad_of_vmap_equals_a_loop(cell, implementation, mapped):
    """Checks that gradients of arguments that are not mapped are sums over the mapped axis."""
    args, in_axes, element = mapped_arguments(cell, MAPPED[mapped])

    def total(*args):
        return jax.vmap(loss_of(runner(cell, implementation)), in_axes)(*args).sum()

    got = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3, 4)))(*args)
    each = stack([reference(cell)(*element(s))[1] for s in range(S)])
    want = tuple(x if axis == 0 else jax.tree.map(lambda x: x.sum(0), x) for axis, x in zip(in_axes, each, strict=True))
    assert_close(got, want)


# For the outer and the inner vmap, each entry has the axis of (weights and reset state) and of (carry, xs, resets).
NESTED = {
    "data-in-models": ((0, 0), (None, 0)),
    "models-in-data": ((None, 0), (0, 0)),
    "models-in-models": ((0, 0), (0, 0)),
    "models-in-models-on-one-data": ((0, None), (0, None)),
}


@kernels_only
@pytest.mark.parametrize(
    ("cell", "nesting", "batch_major"),
    [*((*pair, False) for pair in deal(NESTED, whole=("gru",))), ("lstm", "data-in-models", True)],
    ids=layout_id,
)
def test_nested_vmap_equals_loops(cell, implementation, nesting, batch_major):
    axes = NESTED[nesting]
    sizes = (S, 3)
    make, options = options_of(batch_major)

    def lead(which):
        return tuple(n for n, pair in zip(sizes, axes, strict=True) if pair[which] is not None)

    params, _, _, _, state = arguments(cell, lead=lead(0), **make)
    _, carry, xs, resets, _ = arguments(cell, lead=lead(1), **make)
    call = with_gradients(runner(cell, implementation, **options))
    for model, data in reversed(axes):
        call = jax.vmap(call, (model, data, data, data, model))
    got = jax.jit(call)(params, carry, xs, resets, state)

    def element(*indices):
        of_model, of_data = (
            tuple(i for i, pair in zip(indices, axes, strict=True) if pair[which] is not None) for which in (0, 1)
        )
        model = jax.tree.map(lambda x: x[of_model], (params, state))
        data = jax.tree.map(lambda x: x[of_data], (carry, xs, resets))
        return reference(cell, **options)(model[0], *data, model[1])

    assert_close(got, stack([stack([element(i, k) for k in range(sizes[1])]) for i in range(S)]))


@every_implementation
@either_layout
def test_gradients_of_examples_add_up(cell, implementation, batch_major):
    """Maps calls without a batch axis over the batch: the sum of their weight gradients is that of the batch."""
    make, options = options_of(batch_major)
    args = arguments(cell, **make)
    in_time = 0 if batch_major else 1
    in_axes = (None, 0, in_time, in_time, in_time if batch_major else None)
    outputs, (d_params, d_carry, d_xs, _, d_state) = reference(cell, **options)(*args)
    cotangents = random_like(outputs, 1)  # the cotangents of `loss_of`

    def one(params, carry, xs, resets, state, cotangents):
        outputs, vjp = jax.vjp(runner(cell, implementation, **options), params, carry, xs, resets, state)
        return outputs[0], vjp(cotangents)

    last, (d_params_each, *d_rest) = jax.jit(jax.vmap(one, (*in_axes, (0, in_time))))(*args, cotangents)
    assert jax.tree.leaves(d_params_each)[0].shape[0] == B
    d_carry_each, d_xs_each, _, d_state_each = d_rest
    if not batch_major:
        d_state_each = jax.tree.map(lambda x: x.sum(0), d_state_each)
    d_params_sum = jax.tree.map(lambda x: x.sum(0), d_params_each)
    d_xs_each = jnp.moveaxis(d_xs_each, 0, in_time)
    assert_close(
        (last, d_params_sum, d_carry_each, d_xs_each, d_state_each), (outputs[0], d_params, d_carry, d_xs, d_state)
    )


@kernels_only
@every_cell
def test_a_mapped_axis_keeps_its_name(cell, implementation):
    args = arguments(cell, lead=(S,))

    def mean(implementation):
        return lambda *args: jax.lax.pmean(jax.grad(loss_of(runner(cell, implementation)))(*args), "seeds")

    got = jax.jit(jax.vmap(mean(implementation), axis_name="seeds", spmd_axis_name="seeds"))(*args)
    each = stack([reference(cell)(*jax.tree.map(lambda x, s=s: x[s], args))[1][0] for s in range(S)])
    assert_close(got, jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), each))


@pytest.mark.interpret
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_vmap_over_an_empty_axis_gives_empty_results(implementation):
    T, B, D, H = 3, 2, 4, 5
    params = jaxrnn.GRUParams(jnp.ones((D, 3 * H)), jnp.ones((H, 3 * H)), jnp.ones((3 * H,)), jnp.ones((H,)))
    run = jax.vmap(lambda h, x: jaxrnn.gru(params, h, x, implementation=implementation))
    last, ys = run(jnp.zeros((0, B, H)), jnp.zeros((0, T, B, D)))
    assert (last.shape, ys.shape) == ((0, B, H), (0, T, B, H))


@pytest.mark.interpret
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_nested_vmap_over_zero_models_gives_empty_gradients(implementation):
    T, B, D, H = 3, 2, 4, 5
    params = jaxrnn.GRUParams(jnp.ones((0, D, 3 * H)), jnp.ones((0, H, 3 * H)), jnp.ones((0, 3 * H)), jnp.ones((0, H)))
    loss = lambda params, x: jaxrnn.gru(params, jnp.zeros((B, H)), x, implementation=implementation)[1].sum()  # noqa: E731
    run = jax.vmap(jax.vmap(jax.grad(loss, (0, 1)), (0, None)), (None, 0))
    dparams, dxs = run(params, jnp.zeros((6, T, B, D)))
    assert (dparams.w_ih.shape, dxs.shape) == ((6, 0, D, 3 * H), (6, 0, T, B, D))


@every_implementation
@pytest.mark.parametrize(("cell", "reverse"), deal([np.True_, np.bool_(False), 1, 0], whole=("gru",)), ids=repr)
def test_numpy_flags_equal_python_flags(cell, implementation, reverse):
    args = arguments(cell)
    got, want = (
        jax.jit(with_gradients(runner(cell, implementation, reverse=flag))).lower(*args).as_text()
        for flag in (reverse, bool(reverse))
    )
    assert got == want and len(want) > 1000


@pytest.mark.quick
@every_implementation
@pytest.mark.parametrize(("cell", "remat"), deal([False, True], whole=("gru",)))
def test_strict_promotion_is_supported(cell, implementation, remat):
    args = arguments(cell)
    call = runner(cell, implementation, remat=remat)
    want = jax.jit(with_gradients(call))(*args)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = jax.jit(with_gradients(call))(*args)
    assert_close(got, want)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["f16", "bf16"])
@every_cell
def test_strict_promotion_is_supported_in_16_bits(cell, dtype):
    args = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.float32 else x, arguments(cell))
    call = runner(cell, "xla")
    want = jax.jit(call)(*args)
    with jax.numpy_dtype_promotion("strict"):
        assert_close(jax.jit(call)(*args), want)


@pytest.mark.quick
@kernels_only
@every_cell
def test_scan_around_equals_one_long_run(cell, implementation):
    params, carry, xs, resets, state = arguments(cell, steps=2 * T)
    call = runner(cell, implementation)

    def chunks(params, carry, xs, resets, state):
        split = xs.reshape(2, T, B, D), resets.reshape(2, T, B)
        carry, ys = jax.lax.scan(lambda carry, inputs: call(params, carry, *inputs, state), carry, split)
        return carry, ys.reshape(2 * T, B, H)

    args = params, carry, xs, resets, state
    assert_close(jax.jit(with_gradients(chunks))(*args), reference(cell)(*args))


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
UPDATES = 3


def make_update(cell, implementation, **options):
    """Returns `update(state, (xs, resets)) -> (state, loss)`, BPTT truncated to a rollout.

    The state is `(weights, optimizer state, carry)`.
    """
    call = runner(cell, implementation, **options)

    def update(state, batch):
        weights, optimizer_state, carry = state

        def loss(weights):
            params, reset_state = weights
            last, ys = call(params, carry, *batch, reset_state)
            return jnp.mean((ys - jnp.sin(batch[0].sum(-1, keepdims=True))) ** 2), last

        (value, carry), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
        changes, optimizer_state = OPTIMIZER.update(gradients, optimizer_state, weights)
        return (optax.apply_updates(weights, changes), optimizer_state, carry), value

    return update


def start_and_batches(cell, lead=()):
    params, carry, _, _, state = arguments(cell, lead=lead)
    _, _, xs, resets, _ = arguments(cell, lead=(*lead, UPDATES))
    weights = (params, state)
    make = OPTIMIZER.init
    return (weights, jax.vmap(make)(weights) if lead else make(weights), carry), (xs, resets)


@functools.cache
def plain_update(cell):
    return jax.jit(make_update(cell, "xla"))


def train_in_python(cell, state, batches):
    losses = []
    for i in range(UPDATES):
        state, value = plain_update(cell)(state, jax.tree.map(operator.itemgetter(i), batches))
        losses.append(value)
    return state, np.stack(losses)


@every_implementation
@projected_too
def test_scan_over_updates_with_the_optimizer_inside(cell, implementation):
    state, batches = start_and_batches(cell)
    got = jax.jit(functools.partial(jax.lax.scan, make_update(cell, implementation)))(state, batches)
    want = train_in_python(cell, state, batches)
    assert_close(got, want, 10 * CLOSE)  # Adam divides by the magnitude of a gradient
    assert np.abs(np.subtract(want[0][0][0].w_hh, state[0][0].w_hh)).max() > 1e-2  # the weights changed


@pytest.mark.quick
@kernels_only
@every_cell
def test_vmap_of_training_equals_a_loop_over_seeds(cell, implementation):
    """Uses `remat`, which saves the memory to train many seeds in a scan of updates."""
    state, batches = start_and_batches(cell, lead=(S,))
    train = functools.partial(jax.lax.scan, make_update(cell, implementation, remat=True))
    got = jax.jit(jax.vmap(train))(state, batches)
    want = [train_in_python(cell, *jax.tree.map(operator.itemgetter(s), (state, batches))) for s in range(S)]
    assert_close(got, stack(want), 10 * CLOSE)


@every_implementation
@every_cell
def test_while_loop_around_equals_python(cell, implementation):
    params, carry, *rest = arguments(cell)
    call = runner(cell, implementation)

    @jax.jit
    def run(carry):
        return jax.lax.while_loop(
            lambda i_c: i_c[0] < 2, lambda i_c: (i_c[0] + 1, call(params, i_c[1], *rest)[0]), (0, carry)
        )[1]

    got, want = run(carry), carry
    for _ in range(2):
        want = reference(cell)(params, want, *rest)[0][0]
    assert_close(got, want)


def branching(call, loop):
    """Returns a function of two rounds, of which number `which` (none if 2) takes the branch with the recurrence."""

    def run(params, carry, xs, resets, state, which):
        def body(i, carry):
            recur = lambda c: call(params, c, xs, resets, state)[0]  # noqa: E731
            return jax.lax.cond(i == which, recur, functools.partial(jax.tree.map, jnp.sin), carry)

        return loop(0, 2, body, carry)

    return run


def python_loop(start, stop, body, carry):
    for i in range(start, stop):
        carry = body(i, carry)
    return carry


@kernels_only
@pytest.mark.parametrize(("cell", "mapped"), deal(["cond", "vmap-of-cond"]))
def test_gradients_through_branches_and_loops_equal_python(cell, implementation, mapped):
    """Under `vmap` over the predicate, both branches run and the results of one are selected."""
    args = arguments(cell)
    run = jax.grad(loss_of(branching(runner(cell, implementation), jax.lax.fori_loop)), argnums=(0, 1, 2, 4))
    plain = jax.jit(jax.grad(loss_of(branching(runner(cell, "xla"), python_loop)), argnums=(0, 1, 2, 4)))
    flags = jnp.arange(3)
    want = stack([plain(*args, flag) for flag in flags])
    if mapped == "vmap-of-cond":
        got = jax.jit(jax.vmap(run, (None,) * 5 + (0,)))(*args, flags)
    else:
        run = jax.jit(run)
        got = stack([run(*args, flag) for flag in flags])
    assert_close(got, want)


def residual_sizes(function, *args):
    """Returns the number of elements of each residual of the backward pass."""
    return [x.size for x in jax.tree.leaves(jax.vjp(function, *args)[1])]


@kernels_only
@projected_too
def test_remat_saves_no_gates_and_recomputes_in_one_launch(cell, implementation):
    args = arguments(cell)
    saved, remat = (runner(cell, implementation, remat=remat) for remat in (False, True))
    gates = CELLS[cell_of(cell)].gates * T * B * H
    assert max(residual_sizes(saved, *args)) >= gates
    assert gates == T * B * H or gates > max(residual_sizes(remat, *args))  # those of a single gate are as wide as xs
    assert sum(residual_sizes(saved, *args)) - sum(residual_sizes(remat, *args)) >= gates
    assert launches(jax.grad(loss_of(saved)), *args) == (1, 1)
    assert launches(jax.grad(loss_of(remat)), *args) == (1 + recomputing_launches(cell), 1)


policies = jax.checkpoint_policies
# (policy, forward launches in a gradient): the residuals of the kernels are not dots and have no names.
POLICIES = {
    "nothing_saveable": (policies.nothing_saveable, 2),
    "dots_saveable": (policies.dots_saveable, 2),
    "everything_saveable": (policies.everything_saveable, 1),
    "save_only_these_names": (policies.save_only_these_names("ys"), 2),
}


def with_a_head(call):
    """Returns `call` with its outputs named, followed by a matmul and tanh."""

    def run(params, *args):
        carry, ys = call(params, *args)
        return carry, jnp.tanh(checkpoint_name(ys, "ys") @ params.w_hh)

    return run


@functools.cache
def plain_with_a_head(cell):
    return jax.jit(jax.value_and_grad(loss_of(with_a_head(runner(cell, "xla"))), range(5)))


@pytest.mark.quick
@kernels_only
@pytest.mark.parametrize(("cell", "policy"), deal([*POLICIES, "save_only_these_names-remat"]))
def test_checkpoint_around_equals_plain(cell, implementation, policy):
    args = arguments(cell)
    policy, remat = policy.removesuffix("-remat"), policy.endswith("-remat")
    policy, forward = POLICIES[policy]
    call = jax.checkpoint(with_a_head(runner(cell, implementation, remat=remat)), policy=policy)
    run = jax.value_and_grad(loss_of(call), range(5))
    assert_close(jax.jit(run)(*args), plain_with_a_head(cell)(*args))
    assert launches(run, *args) == (forward + (recomputing_launches(cell) if remat else 0), 1)


@kernels_only
@pytest.mark.parametrize(("cell", "order"), deal(["vmap-of-checkpoint", "checkpoint-of-vmap"]))
def test_checkpoint_and_vmap_in_either_order(cell, implementation, order):
    params, _, _, _, state = arguments(cell)
    _, carry, xs, resets, _ = arguments(cell, lead=(S,))
    loss = loss_of(runner(cell, implementation))

    def total(loss):
        return lambda *args: jax.vmap(loss, (None, 0, 0, 0, None))(*args).sum()

    run = total(jax.checkpoint(loss)) if order == "vmap-of-checkpoint" else jax.checkpoint(total(loss))
    got = jax.jit(jax.grad(run))(params, carry, xs, resets, state)
    each = [reference(cell)(params, *jax.tree.map(lambda x, s=s: x[s], (carry, xs, resets)), state) for s in range(S)]
    assert_close(got, jax.tree.map(lambda x: x.sum(0), stack([gradients[0] for _, gradients in each])))


@kernels_only
@projected_too
def test_outside_jit_equals_inside(cell, implementation):
    args = arguments(cell)
    assert_close(with_gradients(runner(cell, implementation))(*args), reference(cell)(*args))


@kernels_only
@projected_too
def test_disable_jit_changes_nothing(cell, implementation):
    """With `disable_jit`, control flow is Python's, but launches are still compiled."""
    args = arguments(cell)
    call = runner(cell, implementation)

    def rounds(params, carry, xs, resets, state):
        return jax.lax.scan(lambda carry, _: call(params, carry, xs, resets, state), carry, None, length=2)

    want = jax.jit(rounds)(*args), reference(cell)(*args)
    with jax.disable_jit():
        assert_close((rounds(*args), with_gradients(call)(*args)), want)


@every_implementation
@either_layout
def test_ahead_of_time_compilation_equals_jit(cell, implementation, batch_major):
    """Compiles from shapes only, and checks that `eval_shape` gives the shapes and dtypes of the results."""
    make, options = options_of(batch_major)
    args = arguments(cell, **make)
    half = lambda x: x.astype(jnp.float16)  # noqa: E731
    args = args[0], jax.tree.map(half, args[1]), *args[2:]
    both = with_gradients(runner(cell, implementation, **options))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    expected = jax.eval_shape(both, *shapes)
    lowered = jax.jit(both).lower(*shapes)
    got = lowered.compile()(*args)
    assert_same(got, jax.jit(both)(*args))
    for described in (expected, lowered.out_info):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), described) == jax.tree.map(lambda x: (x.shape, x.dtype), got)
    last, ys = expected[0]
    assert {x.dtype for x in jax.tree.leaves((last, ys))} == {jnp.dtype(jnp.float16)}


@every_implementation
@pytest.mark.parametrize(("cell", "hidden"), deal([H, 70]))
def test_donated_carry_is_deleted_and_results_are_right(cell, implementation, hidden):
    params, carry, *rest = arguments(cell, hidden=hidden, steps=2)
    call = runner(cell, implementation)
    want = jax.jit(call)(params, carry, *rest)
    donated = jax.tree.map(jnp.copy, carry)
    compiled = jax.jit(call, donate_argnums=1).lower(params, carry, *rest).compile()
    assert_same(compiled(params, donated, *rest), want)
    assert all(x.is_deleted() for x in jax.tree.leaves(donated))


@kernels_only
@every_cell
def test_update_may_donate_its_whole_state(cell, implementation):
    state, batches = start_and_batches(cell)
    want = train_in_python(cell, state, batches)
    update = jax.jit(make_update(cell, implementation), donate_argnums=0)
    state = jax.tree.map(jnp.copy, state)
    losses = []
    for i in range(UPDATES):
        before = state
        state, value = update(state, jax.tree.map(operator.itemgetter(i), batches))
        losses.append(value)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
    assert_close((state, np.stack(losses)), want, 10 * CLOSE)


def finite(tree):
    return all(np.isfinite(x).all() for x in jax.tree.leaves(tree))


@every_implementation
@pytest.mark.parametrize(("cell", "where"), deal(["carry", "xs", "params", "reset_state", "cotangent"]))
def test_debug_nans_finds_nan(cell, implementation, where):
    """Checks a NaN in each argument, and in the cotangent that enters the backward pass."""
    params, carry, xs, resets, state = arguments(cell)
    given = {"carry": carry, "xs": xs, "params": params, "reset_state": state, "cotangent": jnp.ones(())}
    bad = given | {where: jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), given[where])}
    call = runner(cell, implementation)
    resets = resets.at[:, 0].set(jnp.arange(T) == 2)  # the first sequence starts from the carry, then from the state

    @jax.jit
    def run(given):
        args = given["params"], given["carry"], given["xs"], resets, given["reset_state"]
        _, vjp = jax.vjp(lambda *args: call(*args)[1].sum(), *args)
        return vjp(given["cotangent"])

    with jax.debug_nans(True):
        jax.block_until_ready(run(given))
        with pytest.raises(FloatingPointError, match="nan"):
            jax.block_until_ready(run(bad))


@kernels_only
@pytest.mark.parametrize(("cell", "what"), deal(["saved", "remat", "programs-that-share"]))
def test_debug_nans_finds_no_nan_with_finite_arguments(cell, implementation, what):
    """Runs eagerly, where `debug_nans` sees what every launch writes: residuals, and what programs exchange."""
    args = arguments(cell, hidden=70 if what == "programs-that-share" else H, steps=2)
    with jax.debug_nans(True):
        gradients = jax.grad(loss_of(runner(cell, implementation, remat=what == "remat")), argnums=(0, 1, 2, 4))(*args)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@every_implementation
@projected_too
def test_debug_nans_finds_no_nan_after_a_reset_replaces_the_carry(cell, implementation):
    params, carry, xs, resets, state = arguments(cell)
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), carry)
    resets = resets.at[0].set(1)
    with jax.debug_nans(True):
        got = jax.jit(with_gradients(runner(cell, implementation)))(params, bad, xs, resets, state)
    assert_close(got, reference(cell)(params, carry, xs, resets, state))


CHECKED = {
    "call": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "grad": lambda f, x: jax.grad(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(jax.tree.map(lambda x: x[None], x)),
    "scan": lambda f, x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0],
    "remat": lambda f, x: jax.grad(jax.checkpoint(f))(x),
}


@every_implementation
@pytest.mark.parametrize(("cell", "transform"), deal(CHECKED, cells=EVERY_CELL, whole=("gru",)))
def test_checkify_finds_a_nan_and_finds_none_with_finite_arguments(cell, implementation, transform):
    loss, carry = loss_of_one(cell, implementation, "carry")
    checked = checkify.checkify(functools.partial(CHECKED[transform], loss), errors=checkify.float_checks)
    error, _ = checked(carry)
    assert error.get() is None
    error, _ = checked(jax.tree.map(lambda x: x.at[0].set(jnp.nan), carry))
    assert f"nan generated by primitive: {'' if implementation == 'xla' else 'jaxrnn_function'}" in error.get()


def test_a_jax_that_has_moved_the_rules_of_checkify_runs_all_else():
    code = """
import jax._src.checkify
del jax._src.checkify.nan_error_check
import jax
import jax.numpy as jnp
import jaxrnn
from jax.experimental import checkify

def norm(x):
    return jaxrnn.rms_norm(x, implementation="triton")

x = jnp.ones((2, 8))
print(norm(x).shape)
error, y = checkify.checkify(norm, errors=checkify.float_checks)(x)
print(y.shape, error.get())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=child.environment(TRITON_INTERPRET="1", JAX_PLATFORMS="cpu"),
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout == "(2, 8)\n(2, 8) None\n", done.stderr


def along(tree):
    """Returns a direction to differentiate in."""
    return random_like(tree, 2)


def forward_over_reverse(f, x):
    return jax.jvp(jax.grad(f), (x,), (along(x),))[1]


def reverse_over_forward(f, x):
    return jax.grad(lambda x: jax.jvp(f, (x,), (along(x),))[1])(x)


def dot(x, y):
    return sum(jnp.vdot(a, b) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


def reverse_over_reverse(f, x):
    return jax.grad(lambda x: dot(jax.grad(f)(x), along(x)))(x)


SECOND_ORDER = {
    "forward-over-reverse": forward_over_reverse,
    "reverse-over-forward": reverse_over_forward,
    "reverse-over-reverse": reverse_over_reverse,
}
# The values are indices of `arguments`.
DIFFERENTIABLE = {"params": 0, "carry": 1, "xs": 2, "reset_state": 4}


def loss_of_one(cell, implementation, which, **options):
    """Returns a loss as a function of one argument, and that argument."""
    args = arguments(cell)
    loss = loss_of(runner(cell, implementation, **options))
    i = DIFFERENTIABLE[which]
    return (lambda x: loss(*args[:i], x, *args[i + 1 :])), args[i]


@kernels_only
@every_cell
def test_forward_mode_that_does_not_reach_the_kernels_runs(cell, implementation):
    loss, xs = loss_of_one(cell, implementation, "xs")
    value, tangent = jax.jvp(lambda s: s * loss(xs), (2.0,), (1.0,))
    assert_close((value, tangent), (2 * loss(xs), loss(xs)))
    assert_close(jax.grad(jax.grad(lambda s: s**2 * loss(xs)))(3.0), 2 * loss(xs))


@pytest.mark.parametrize(("cell", "implementation"), deal(["xla", None], whole=("gru",)))
def test_forward_mode_and_second_order_equal_finite_differences(cell, implementation):
    """Computes in float64, for which None is "xla" everywhere."""
    options = {} if implementation else {"remat": True, "reverse": True}
    with jax.enable_x64(True):
        params, carry, xs, resets, state = arguments(cell, steps=3, batch=(2,), dtype=jnp.float64)
        loss = loss_of(runner(cell, implementation, **options))

        def f(x):
            return loss(x["params"], x["carry"], x["xs"], resets, x["state"])

        x = {"params": params, "carry": carry, "xs": xs, "state": state}
        step = 1e-5

        def difference(f):
            there, back = (f(jax.tree.map(lambda x, v, dx=dx: x + dx * v, x, along(x))) for dx in (step, -step))
            return jax.tree.map(lambda a, b: (a - b) / (2 * step), there, back)

        run = jax.jit(lambda x: (jax.jvp(f, (x,), (along(x),))[1], [g(f, x) for g in SECOND_ORDER.values()]))
        tangent, seconds = run(x)
        assert_close(tangent, difference(jax.jit(f)), 1e-7)
        want = difference(jax.jit(jax.grad(f)))
        for second in seconds:
            assert_close(second, want, 1e-7)


@pytest.mark.interpret
@every_cell
def test_jacobians_and_hessians_by_default_on_a_cpu(cell):
    """Checks float32, for which None is "xla" on a CPU too."""
    loss, carry = loss_of_one(cell, None, "carry")
    gradient, hessian = jax.jit(jax.grad(loss)), jax.jit(jax.hessian(loss))(carry)
    assert_close(jax.jit(jax.jacfwd(loss))(carry), gradient(carry))
    rows = jax.jit(jax.jacrev(jax.grad(loss)))(carry)
    assert_close(hessian, rows)
    assert max(np.abs(x).max() for x in jax.tree.leaves(hessian)) > 1e-3
    assert_close(jax.linearize(loss, carry)[1](along(carry)), dot(gradient(carry), along(carry)))
