"""Tests that a loop in XLA, which `implementation=None` runs where a kernel is slower, gives the kernel's results."""

import dataclasses
import functools
import itertools

import calls
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrnn import _bridge
from jaxrnn._bridge import scan_launch


@pytest.fixture
def scans(monkeypatch):
    """Makes the default run every launch as a scan; returns a list that collects the directions of these launches."""
    from torch_bridge import tiling

    directions = []

    def prefers_scan(problem, device):
        directions.append("tangent" if problem.tangent else problem.direction)
        return True

    monkeypatch.setattr(_bridge, "is_preferred", lambda steps: True)
    monkeypatch.setattr(tiling, "prefers_scan", prefers_scan)
    return directions


def run(case, inputs):
    """Returns outputs and gradients of the default, compiled anew: a cached program may hold an earlier choice."""
    one = functools.partial(cases._with_gradients, case, None)
    given = {name: x for name, x in inputs.items() if x is not None}
    results = jax.jit(jax.vmap(one) if case.models else one)(given)
    return {name: np.asarray(x) for name, x in results.items()}


def check(case, got, inputs):
    """Checks that errors are at most twice XLA's, or at most 2e-3 in TF32, to which XLA rounds nothing on a CPU."""
    want = cases.run_oracle(case, inputs)
    assert got.keys() == want.keys()
    if (case.dtype, case.precision) == ("f32", "default"):
        cases.compare(got, want, lambda name: 2e-3)
    else:
        cases.check(case, got, cases.run(case, inputs, "xla"), want)


@pytest.mark.quick("case.cell")
@pytest.mark.interpret
@pytest.mark.parametrize("case", [case for case in cases.INTERPRETED if case.H <= 36], ids=str)
def test_outputs_and_gradients_match_the_oracle(scans, case):
    """Leaves out cases whose units programs of a kernel share: a scan is the same for every width."""
    inputs = cases.make_inputs(case)
    got = run(case, inputs)
    assert set(scans) == {"fwd", "bwd"}
    check(case, got, inputs)


@pytest.mark.interpret
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("cell", ["gru", "lstm", "mgu", "simple_tanh"])
def test_hessian_products_match_those_of_lax_scan(scans, cell, reverse):
    *args, resets, reset_state = calls.arguments(cell)

    def product(implementation):
        run = calls.runner(cell, implementation, reverse=reverse)
        gradient = jax.grad(calls.loss_of(lambda *args: run(*args, resets, reset_state)), (0, 1, 2))
        return jax.jit(lambda args: jax.jvp(lambda args: gradient(*args), (args,), (args,))[1])(tuple(args))

    got = product(None)
    assert set(scans) == {"fwd", "tangent", "bwd"}
    calls.assert_close(got, product("xla"))


ON_A_GPU = [
    cases.Case(cell, B=B, H=H, **{"T": 13} | changes)
    for cell in ("gru", "lstm")
    for B, H, changes in (
        (64, 256, {}), (3, 512, {"resets": "none"}), (64, 1024, {"reset_state": "h", "T": 15}),
        (300, 256, {"reverse": True, "T": 14}),
        (16, 512, {"reset_state": "tbh", "time_major": False, "reverse": True}), (64, 256, {"models": 3}),
        (64, 512, {"dtype": "bf16", "T": 12}), (16, 256, {"dtype": "bf16", "carry_dtype": "bf16", "remat": True}),
        (64, 256, {"precision": "highest"}), (16, 256, {"reset_state": "bh", "models": 2, "dtype": "f16"}),
    )
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_A_GPU, ids=str)
def test_errors_on_a_gpu_are_at_most_twice_those_of_xla(scans, case):
    inputs = cases.make_inputs(case)
    got, again = run(case, inputs), run(case, inputs)
    assert set(scans) == {"fwd", "bwd"}
    cases.check(case, got, cases.run(case, inputs, "xla"), cases.run_oracle(case, inputs))
    for name, x in got.items():
        np.testing.assert_array_equal(again[name], x, err_msg=name)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3, 4, 5, 8, 11])
def test_blocks_of_steps_give_what_lax_scan_gives(steps, reverse):
    """Checks numbers of steps with no block, with several blocks, and with steps that fill no block."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731

    def step(carry, x):
        assert x["none"] is None
        h = jnp.tanh(carry["h"] * 0.5 + x["a"] + x["b"][:, None])
        return {"h": h, "count": carry["count"] + 1}, {"h": h, "product": h * x["b"][:, None]}

    carry = {"h": draw(2, 3, 4), "count": jnp.zeros(2, jnp.int32)}
    xs = {"a": draw(2, steps, 3, 4), "b": draw(2, steps, 3), "none": None}
    of_blocks = functools.partial(scan_launch._scan, step, steps=steps, reverse=reverse)
    of_jax = functools.partial(jax.lax.scan, step, reverse=reverse)
    one = jax.tree.map(lambda x: x[0], (carry, xs))
    for args, run_all in ((one, lambda run: run), ((carry, xs), jax.vmap)):
        got, want = (jax.jit(run_all(run))(*args) for run in (of_blocks, of_jax))
        assert jax.tree.structure(got) == jax.tree.structure(want)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), got, want)
    assert got[1]["h"].shape == (2, steps, 3, 4)


@pytest.mark.interpret
@pytest.mark.parametrize("cell", ["gru", "lstm", "mgu", "simple_relu", "rms_norm_gru", "layer_norm_gru"])
def test_strict_promotion_is_supported(scans, cell):
    case = cases.Case(cell, T=5, B=3, H=8, resets="some")
    inputs = cases.make_inputs(case)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        got = run(case, inputs)
    assert set(scans) == {"fwd", "bwd"}
    check(case, got, inputs)


@pytest.mark.interpret
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_named_implementation_never_runs_a_scan(scans, cell):
    case = cases.Case(cell, T=3, B=2, H=8)
    one = functools.partial(cases._with_gradients, case, "triton")
    text = str(jax.make_jaxpr(one)({k: v for k, v in cases.make_inputs(case).items() if v is not None}))
    assert "jaxrnn_launch" in text and "may_use_xla=False" in text and "may_use_xla=True" not in text
    assert not scans


def test_packed_words_have_the_format_of_the_kernels():
    """Checks that unpacking gives `local_grads` in float16, clamped to its range, and `carry_gate` bit for bit."""
    rng = np.random.default_rng(0)
    local_grads = rng.standard_normal((3, 5, 28)).astype(np.float32)
    local_grads[0, 0, :4] = [1e6, -1e6, 3e-8, 0.0]
    carry_gate = rng.random((3, 5, 7)).astype(np.float32)
    words = scan_launch.pack_words(jnp.asarray(local_grads), jnp.asarray(carry_gate))
    assert words.shape == (3, 5, 21) and words.dtype == jnp.float32
    halves, back = scan_launch.unpack_words(words)
    np.testing.assert_array_equal(back, carry_gate)
    np.testing.assert_array_equal(halves, np.clip(local_grads, -65504, 65504).astype(np.float16))
    first = np.asarray(words).view(np.uint32)[..., :7]
    np.testing.assert_array_equal(first >> 16, np.asarray(halves).view(np.uint16)[..., ::4])
    np.testing.assert_array_equal(first & 0xFFFF, np.asarray(halves).view(np.uint16)[..., 3::4])


@pytest.mark.interpret
def test_residuals_in_place_give_the_same_gradients(scans, monkeypatch):
    from jaxrnn.kernel_vjp import spec

    # with more than 64 units, residuals that are not in place are float16 too
    case = cases.Case("gru", T=5, B=3, H=128, precision="default")
    inputs = cases.make_inputs(case)
    apart = run(case, inputs)
    monkeypatch.setattr(spec, "_IN_PLACE_BYTES", 0)
    in_place = run(case, inputs)
    for name, x in apart.items():
        np.testing.assert_allclose(in_place[name], x, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.interpret
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_forward_scan_works_with_backward_kernel_and_vice_versa(monkeypatch, scans, cell):
    """Checks that a kernel reads the residuals of a scan, and a scan those of a kernel."""

    from torch_bridge import tiling

    case = cases.Case(cell, T=4, B=3, H=40, reset_state="h", precision="default")
    for changes, direction in itertools.product(({}, {"models": 2, "reverse": True}), ("fwd", "bwd")):
        monkeypatch.setattr(tiling, "prefers_scan", lambda problem, device, d=direction: problem.direction == d)
        changed = dataclasses.replace(case, **changes)
        inputs = cases.make_inputs(changed)
        check(changed, run(changed, inputs), inputs)


@pytest.mark.interpret
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_both_directions_of_a_layer_run_as_scans(scans, cell):
    """Checks that scans run the models of odd index in reverse."""
    params, carry, xs, resets, _ = calls.arguments(cell, batch=(3,), steps=5, hidden=12)
    both = functools.partial(calls.run_bidirectional, cell)
    pair = jax.tree.map(lambda x: x + 0.1, params), carry

    def run(implementation):
        def loss(params, xs):
            results = both(
                (params, pair[0]), (carry, pair[1]), xs, resets=(resets, resets[::-1]), precision="highest",
                implementation=implementation,
            )  # fmt: skip
            return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(results)), results

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, xs)

    calls.assert_close(run(None), run("xla"), 1e-5)
    assert set(scans) == {"fwd", "bwd"}


def choices(cell, hidden, batch, name, kind="tf32", **changes):
    """Returns whether a scan is preferred for the forward launch, and whether for the backward launch."""
    from benchmarks.problems import make_problem
    from torch_bridge import tiling

    problems = [make_problem(cell, direction, kind, hidden, batch, **changes) for direction in ("fwd", "bwd")]
    return [tiling.prefers_scan(problem, tiling.PROFILES[name]) for problem in problems]


@pytest.mark.torch
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_scans_are_preferred_where_kernels_are_slow(cell):
    """Checks wide states with many sequences, on GPUs without wgmma."""
    for name in ("a100", "rtx3090", "rtx4090"):
        for kind, hidden, batch in itertools.product(("tf32", "bf16"), (8, 64, 128), (1, 64, 4096)):
            assert choices(cell, hidden, batch, name, kind) == [False, False]
        for hidden, batch in ((256, 64), (256, 1024), (512, 64), (1024, 8)):  # programs that share a state keep them
            assert choices(cell, hidden, batch, name) == [False, False]
        assert choices(cell, 1024, 4096, name) == [True, True]
        assert choices(cell, 512, 4096, name)[1]
        assert choices(cell, 1024, 2048, name, "tf32x3") == [True, True]
    for hidden, batch in itertools.product((64, 256, 512, 1024), (1, 64, 1024)):  # kernels keep the weights on chip
        if (cell, hidden) != ("lstm", 1024):
            assert choices(cell, hidden, batch, "h200") == [False, False]


@pytest.mark.torch
def test_the_choice_counts_the_models_that_vmap_adds():
    from benchmarks.problems import make_problem
    from torch_bridge import tiling

    problem = make_problem("gru", "fwd", "tf32x3", 512, 64)
    taken = [
        tiling.prefers_scan(dataclasses.replace(problem, models=n, groups=n), tiling.PROFILES["rtx3090"])
        for n in (1, 64)
    ]
    assert taken == [False, True]
