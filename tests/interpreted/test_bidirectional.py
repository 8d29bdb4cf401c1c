"""Tests that each direction of a bidirectional call, which runs both in one launch, equals a separate call."""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from calls import (
    EVERY_CELL,
    FUNCTIONS,
    PROJECTED,
    B,
    H,
    S,
    arguments,
    assert_close,
    cell_of,
    every_cell,
    every_implementation,
    kernels_only,
    launches,
    loss_of,
    projected_too,
    random_like,
    recomputing_launches,
    run_bidirectional,
    stack,
    with_gradients,
)
from cases import Case
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tilings import COMPILED, DIRECTIONS, fits, for_width, outputs

from jaxrnn import cells
from jaxrnn.kernel_vjp import chunks
from jaxrnn.kernel_vjp import run as kernel_run
from torch_bridge.tiling import Device
from torch_bridge.tiling.streamed import SharedStreamed, Streamed


def pairs(cell, **options):
    """Returns arguments like those of `calls.arguments`: a pair of each, except for `xs`."""
    forward = arguments(cell, **options)
    backward = random_like(forward, 2)
    params, carry, xs, resets, state = zip(forward, (*backward[:3], forward[3][::-1], backward[4]), strict=True)
    return params, carry, xs[0], resets, state


def together(cell, implementation, **options):
    """Returns `call(params, carry, xs, resets, reset_state) -> ((carry, ys), (carry, ys))`.

    The default precision is the highest.
    """

    def call(params, carry, xs, resets, reset_state):
        options_ = {"precision": "highest", "implementation": implementation} | options
        return run_bidirectional(cell_of(cell), params, carry, xs, resets=resets, reset_state=reset_state, **options_)

    return call


def apart(cell, **options):
    """Returns a function like that of `together`, which calls the reference once for each direction."""

    def call(params, carry, xs, resets, reset_state):
        options_ = {"precision": "highest", "implementation": "xla"} | options
        absent = (None, None)
        each = zip(params, carry, resets or absent, reset_state or absent, (False, True), strict=True)
        return tuple(
            FUNCTIONS[cell_of(cell)](params, carry, xs, resets=resets, reset_state=state, reverse=reverse, **options_)
            for params, carry, resets, state, reverse in each
        )

    return call


@functools.cache
def reference(cell, **options):
    return jax.jit(with_gradients(apart(cell, **options)))


CALLS = {  # options of the arguments, and of the call
    "timemajor": ({}, {}),
    "shared-units": ({"hidden": 70, "steps": 3}, {}),
    "batchmajor-stepped": ({"batch": (2, B), "stepped": True, "time_major": False}, {"time_major": False}),
    "remat": ({}, {"remat": True}),
    "remat-batchmajor-stepped": ({"stepped": True, "time_major": False}, {"time_major": False, "remat": True}),
}


@every_implementation
@pytest.mark.parametrize(("cell", "options"), cases.deal(CALLS, [*EVERY_CELL, PROJECTED], ("gru", PROJECTED)))
def test_each_direction_equals_a_separate_call(cell, implementation, options):
    make, options = CALLS[options]
    args = pairs(cell, **make)
    run = with_gradients(together(cell, implementation, **options))
    assert_close(jax.jit(run)(*args), reference(cell, **options)(*args))
    if implementation == "triton":
        forward = 1 + (recomputing_launches(cell) if options.get("remat") else 0)
        assert launches(jax.grad(loss_of(together(cell, implementation, **options))), *args) == (forward, 1)


@every_implementation
@pytest.mark.parametrize("given", ["nothing", "resets"])
def test_directions_without_resets_or_reset_state_equal_separate_calls(implementation, given):
    params, carry, xs, resets, _ = pairs("gru")
    rest = (None, None) if given == "nothing" else (resets, None)

    def run(call):
        return jax.value_and_grad(lambda *x: loss_of(call)(*x, *rest), (0, 1, 2))(params, carry, xs)

    assert_close(run(together("gru", implementation)), run(apart("gru")))


@every_implementation
@pytest.mark.parametrize("remat", [False, True])
def test_lstm_returns_cell_states_of_both_directions(implementation, remat):
    args, options = pairs("lstm"), {"return_cells": True}
    run = jax.jit(with_gradients(together("lstm", implementation, remat=remat, **options)))
    assert_close(run(*args), reference("lstm", **options)(*args))


@kernels_only
@projected_too
def test_remat_in_chunks_runs_each_direction_separately(cell, implementation, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(chunks, "_CHUNK_STEPS", 3)
    args, call = pairs(cell), together(cell, implementation, remat=True)
    assert_close(jax.jit(with_gradients(call))(*args), reference(cell)(*args))
    assert min(launches(jax.grad(loss_of(call)), *args)) >= 2


@kernels_only
@every_cell
def test_many_sequences_run_each_direction_separately(cell, implementation, monkeypatch):
    monkeypatch.setattr(kernel_run, "_STATES_THAT_FILL_A_GPU", B * H)
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(chunks, "_CHUNK_STEPS", 3)
    args, call = pairs(cell), together(cell, implementation)
    assert_close(jax.jit(with_gradients(call))(*args), reference(cell)(*args))
    assert launches(jax.grad(loss_of(call)), *args) == (2, 2)


def mapped_arguments(cell, mapped, **options):
    """Returns arguments of S calls, with a leading axis if named in `mapped`, their `in_axes`, and a list by call."""
    names = ("params", "carry", "xs", "resets", "reset_state")
    one, many = pairs(cell, **options), [random_like(pairs(cell, **options), 10 + s) for s in range(S)]
    many = [(*x[:3], jax.tree.map(lambda r: (r > 0.5).astype(r.dtype), x[3]), x[4]) for x in many]
    each = [tuple(x if n in mapped else y for n, x, y in zip(names, some, one, strict=True)) for some in many]
    stacked = tuple(x if n in mapped else y for n, x, y in zip(names, stack(many), one, strict=True))
    axes = tuple(0 if name in mapped else None for name in names)
    return stacked, axes, each


@kernels_only
@every_cell
@pytest.mark.parametrize("make", [{}, {"stepped": True, "time_major": False}], ids=["timemajor", "batchmajor"])
@pytest.mark.parametrize(
    "mapped",
    [("params", "carry", "xs", "resets", "reset_state"), ("carry", "xs", "resets"), ("params",)],
    ids=["all", "shared-weights", "weights"],
)
def test_vmap_keeps_the_directions(cell, implementation, mapped, make):
    stacked, axes, each = mapped_arguments(cell, mapped, **make)
    options = {"time_major": make.get("time_major", True)}
    run = jax.vmap(with_gradients(together(cell, implementation, **options)), axes)
    assert_close(jax.jit(run)(*stacked), stack([reference(cell, **options)(*args) for args in each]))
    assert launches(run, *stacked) == (2, 1)  # one forward launch computes the outputs without gradients


@kernels_only
def test_nested_vmap_over_weights_and_data_keeps_the_directions(implementation):
    """Nests in both orders: `vmap` over weights adds models, and `vmap` over data adds groups."""
    params, carry, xs, resets, state = pairs("gru")
    many = jax.tree.map(lambda *x: jnp.stack(x), *(random_like(params, s) for s in range(S)))
    data = jax.tree.map(lambda *x: jnp.stack(x), *(random_like((carry, xs), 5 + s) for s in range(3)))

    def run(call, weights_first):
        def one(params, data):
            return call(params, *data, resets, state)

        inner, outer = ((None, 0), (0, None)) if weights_first else ((0, None), (None, 0))
        return jax.jit(jax.vmap(jax.vmap(one, inner), outer))(many, data)

    for weights_first in (False, True):
        assert_close(run(together("gru", implementation), weights_first), run(apart("gru"), weights_first))


@pytest.mark.interpret
@projected_too
def test_explicit_mesh_keeps_batches_sharded(cell):
    def value_and_gradients(call, *args):
        def loss(*args):
            results = call(*args)
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results)), results

        return jax.value_and_grad(loss, (0, 1, 2, 4), has_aux=True)(*args)

    args = pairs(cell, batch=(8,))
    want = jax.jit(functools.partial(value_and_gradients, apart(cell)))(*args)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    whole, state, sequence = PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "data")
    args = [
        jax.tree.map(lambda x, spec=spec: jax.device_put(x, NamedSharding(mesh, spec)), x)
        for x, spec in zip(args, (whole, state, sequence, sequence, whole), strict=True)
    ]
    run = jax.jit(functools.partial(value_and_gradients, together(cell, "triton")))
    got = run(*args)
    assert_close(jax.device_get(got), want)
    (_, (_, (_, ys))), (_, _, d_xs, _) = got
    assert ys.sharding.spec == d_xs.sharding.spec == PartitionSpec(None, "data", None)
    assert "all-gather" not in run.lower(*args).compile().as_text()


def test_arguments_that_are_no_matching_pairs_raise():
    params, carry, xs, resets, state = pairs("gru")
    other = arguments("gru", hidden=H + 1)
    both = functools.partial(run_bidirectional, "gru", implementation="xla")
    with pytest.raises(ValueError, match=r"params of both directions must be a pair .*, got GRUParams"):
        both(params[0], carry, xs)
    with pytest.raises(ValueError, match=r"carry of both directions must be a pair .*, got an array float32"):
        both(params, jnp.stack(carry), xs)
    with pytest.raises(ValueError, match=r"params of both directions must have the same shapes and dtypes.*by itself"):
        both((params[0], other[0]), (carry[0], other[1]), xs)
    with pytest.raises(ValueError, match=r"resets of both directions must have the same shapes and dtypes.*None"):
        both(params, carry, xs, resets=(resets[0], None))
    with pytest.raises(ValueError, match=r"resets must be \[T, \*batch\]"):
        both(params, carry, xs, resets=(resets[0], resets[1][:-1]))
    with pytest.raises(ValueError, match="resets is None"):
        both(params, carry, xs, reset_state=state)
    with pytest.raises(ValueError, match=r"lstm: params must be LSTMParams"):
        run_bidirectional("lstm", params, carry, xs)


# Each model has two groups, whose sequences fill whole tiles and a part of one.
LAYOUT = {"models": 4, "groups": 8, "batch": 11, "steps": 9}


def assert_each_model_as_by_itself(problem, device, tiling, place):
    """Asserts that models of odd index give the bits of a reverse launch, and the others those of a forward launch."""
    got = outputs(dataclasses.replace(problem, reverse="bidirectional"), device, tiling, place)
    per_model = problem.groups // problem.models
    for reverse in (False, True):
        want = outputs(dataclasses.replace(problem, reverse=reverse), device, tiling, place)
        for name, x in want.items():
            by_model = (problem.models, per_model, -1)
            np.testing.assert_array_equal(
                got[name].reshape(by_model)[int(reverse) :: 2], x.reshape(by_model)[int(reverse) :: 2], err_msg=name
            )


@pytest.mark.interpret
@pytest.mark.parametrize(
    "tiling", [Streamed(32, 8, 4), SharedStreamed(16, 8, 32, 2, 4, 2)], ids=["one-program", "shared"]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
@every_cell
def test_models_of_odd_index_run_in_reverse_interpreted(cell, direction, tiling):
    from benchmarks.problems import make_problem

    layout = {"models": 2, "groups": 4, "batch": 3, "steps": 2}
    problem = dataclasses.replace(make_problem(cell, direction, "tf32", 24, 1, reset_state="stepped"), **layout)
    assert_each_model_as_by_itself(problem, Device(interpreted=True), tiling, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tf32", "bf16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("cell", "variant"),
    [(c, v) for c in FUNCTIONS for v, (_, tiling, _) in COMPILED.items() if tiling.loop in cells.CELLS[c].loops],
)
def test_models_of_odd_index_run_in_reverse(cell, direction, variant, kind):
    from benchmarks.problems import make_problem
    from torch_bridge import gpu

    device = gpu.device(0)
    widths, tiling, _ = COMPILED[variant]
    if tiling.loop in ("split", "rows") and not device.has_wgmma:
        pytest.skip("the kernel multiplies with wgmma, which this GPU does not have")
    for hidden in widths:
        problem = dataclasses.replace(make_problem(cell, direction, kind, hidden, 1), **LAYOUT)
        fitted = for_width(tiling, hidden)
        if fits(problem, device, fitted):
            assert_each_model_as_by_itself(problem, device, fitted, "cuda")
            few = dataclasses.replace(device, multiprocessors=fitted.splits)  # one worker runs models of both parities
            if fitted.splits > 1:
                assert_each_model_as_by_itself(problem, few, fitted, "cuda")


def in_both(case, forward, backward, implementation):
    """Returns outputs and gradients of both directions on the `xs` of `forward`; names, except `dxs`, end in 0 or 1."""
    named = [f | {"xs": forward["xs"]} for f in (forward, backward)]
    fixed = [{k: x for k, x in each.items() if k == "resets" or k.startswith("ct_")} for each in named]
    differentiated = [
        {k: x for k, x in each.items() if x is not None and k not in (*kept, "xs")}
        for each, kept in zip(named, fixed, strict=True)
    ]
    params_type = cells.CELLS[case.cell].params

    def tree_of(names, each):
        trees = tuple(each[name] for name in names)
        return trees[0] if len(trees) == 1 else trees

    def run(xs, each):
        pair = {
            "params": tuple(params_type(**{k: one[k] for k in cases.weights(case)}) for one in each),
            "carry": tuple(tree_of(cases.CARRY[case.cell], one) for one in each),
        }
        if case.reset_state:
            pair["reset_state"] = tuple(tree_of(cases.RESET_STATE[case.cell], one) for one in each)
        results = run_bidirectional(
            case.cell,
            **pair, xs=xs, resets=None if case.resets == "none" else tuple(one["resets"] for one in fixed),
            precision=case.precision, implementation=implementation,
        )  # fmt: skip
        names = (*cases.CARRY[case.cell], "ys")
        return [dict(zip(names, jax.tree.leaves(result), strict=True)) for result in results]

    outputs, vjp = jax.vjp(run, forward["xs"], differentiated)
    dxs, gradients = vjp([{name: one["ct_" + name] for name in got} for one, got in zip(fixed, outputs, strict=True)])
    results = {"dxs": dxs}
    for k, (got, d) in enumerate(zip(outputs, gradients, strict=True)):
        results |= {f"{name}{k}": x for name, x in got.items()} | {f"d{name}{k}": x for name, x in d.items()}
    return results


def of_each(run, case, forward, backward):
    """Returns the results of `in_both`, computed by a separate run of each direction."""
    got = run(case, forward), run(dataclasses.replace(case, reverse=True), backward | {"xs": forward["xs"]})
    results = {f"{name}{k}": x for k, each in enumerate(got) for name, x in each.items()}
    return results | {"dxs": sum(results.pop(f"dxs{k}").astype(np.float64) for k in (0, 1))}


INTERPRETED = [Case(cell, T=4, B=5, H=12, D=7, precision="highest", reset_state="h") for cell in FUNCTIONS]
GPU = [
    Case(cell, T=13, B=batch, H=hidden, dtype=dtype, reset_state=reset_state)
    for cell in FUNCTIONS
    for hidden, batch in ((24, 3), (64, 16), (128, 16), (256, 64), (512, 64), (512, 300), (700, 64), (700, 300))
    for dtype in ("f32", "bf16")
    for reset_state in ((None, "tbh") if (hidden, batch) == (128, 16) else (None,))
]
INTERPRETED += [
    Case("lstm", T=4, B=5, H=12, D=7, precision="highest", proj=5, reset_state="h"),
    Case("lstm", T=4, B=5, H=12, D=7, precision="highest", proj=5),
    Case("lstm", T=4, B=5, H=12, D=7, precision="highest", proj=5, resets="none"),
]
GPU += [
    Case("lstm", T=13, B=batch, H=hidden, dtype=dtype, proj=hidden // 4, reset_state=reset_state)
    for hidden, batch in ((24, 3), (128, 16), (256, 64), (700, 64))
    for dtype in ("f32", "bf16")
    for reset_state in (None, "h")
]


@pytest.mark.quick("case.cell")
@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.interpret, id=f"{case}-interpreted") for case in INTERPRETED),
        *(pytest.param(case, marks=pytest.mark.gpu, id=f"{case}-gpu") for case in GPU),
    ],
)
def test_both_directions_match_the_oracle(case):
    inputs = [tuple(cases.make_inputs(case, 2 * draw + k) for k in (0, 1)) for draw in range(cases.draws(case))]
    run = jax.jit(functools.partial(in_both, case, implementation="triton"))
    got = [{k: np.asarray(x) for k, x in run(*pair).items()} for pair in inputs]
    xla = [of_each(functools.partial(cases.run, implementation="xla"), case, *pair) for pair in inputs]

    def wanted(draw, results):
        pair = (cases.with_signs(case, x, results[f"ys{k}"]) for k, x in enumerate(inputs[draw]))
        return of_each(cases.run_oracle, case, *pair)

    want = cases.check_draws(case, got, xla, wanted)
    assert got[0].keys() == want.keys()
