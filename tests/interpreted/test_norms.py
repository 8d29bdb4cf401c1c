"""Tests `rms_norm` and `layer_norm` against float64 and Flax, under JAX's transformations, and with wrong arguments."""

import dataclasses
import functools
import zlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import trees
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh

import jaxrnn
from jaxrnn import _bridge, norms

assert_close = functools.partial(trees.assert_close, tol=1e-5, atol=2e-5)

FUNCTIONS = {"rms": jaxrnn.rms_norm, "layer": jaxrnn.layer_norm}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
ROUNDING = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
EPSILON = 1e-5
KERNELS = [
    pytest.param("triton", marks=pytest.mark.interpret, id="triton-interpreted"),
    pytest.param("triton", marks=pytest.mark.gpu, id="triton-gpu"),
]
kernels_only = pytest.mark.parametrize("implementation", KERNELS)
every_implementation = pytest.mark.parametrize("implementation", ["xla", *KERNELS])
every_kind = pytest.mark.parametrize("kind", FUNCTIONS)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a norm; `given` names its optional arrays: w(eight), b(ias), r(esidual)."""

    kind: str
    N: int
    rows: tuple[int, ...] = (3, 4)
    dtype: str = "f32"
    given: str = "wb"
    weight_dtype: str = "f32"
    bias_dtype: str = "f32"
    y_dtype: str | None = None  # that of x if None; Flax's modules may ask for another

    def __str__(self):
        words = [self.kind, f"N{self.N}", "R" + "x".join(map(str, self.rows)), self.dtype, self.given or "plain"]
        words += [f"y{self.y_dtype}"] if self.y_dtype else []
        words += [
            f"{name}{dtype}" for name, dtype in (("w", self.weight_dtype), ("b", self.bias_dtype)) if name in self.given
        ]
        return "-".join(words)


def make_inputs(case, draw=0):
    """Returns arrays and cotangents, with the names that `oracle` gives them."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()) + draw)
    shape = (*case.rows, case.N)
    make = lambda shape, dtype: np.asarray(rng.standard_normal(shape, np.float32), DTYPES[dtype])  # noqa: E731
    inputs = {
        "x": make(shape, case.dtype) + np.asarray(0.5, DTYPES[case.dtype]),
        "ct_y": make(shape, case.y_dtype or case.dtype),
    }
    if "w" in case.given:
        inputs["weight"] = make((case.N,), case.weight_dtype)
    if "b" in case.given:
        inputs["bias"] = make((case.N,), case.bias_dtype)
    if "r" in case.given:
        inputs |= {"residual": make(shape, case.dtype), "ct_total": make(shape, case.dtype)}
    return inputs


def call(kind, implementation, inputs, dtype=None):
    """Returns the outputs by name, with y in `dtype`."""
    x, residual = inputs["x"], inputs.get("residual")
    arrays = x, inputs.get("weight"), inputs.get("bias")
    if dtype in (None, x.dtype):
        out = FUNCTIONS[kind](*arrays, residual=residual, epsilon=EPSILON, implementation=implementation)
    else:
        out = norms.normalize(kind, *arrays, residual, EPSILON, implementation, dtype=dtype)
    return {"y": out} if residual is None else {"y": out[0], "total": out[1]}


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(kind, implementation, inputs):
    """Returns the outputs and every gradient, by name."""
    fixed = {name: x for name, x in inputs.items() if name.startswith("ct_")}
    outputs, vjp = jax.vjp(
        functools.partial(call, kind, implementation, dtype=inputs["ct_y"].dtype),
        {name: x for name, x in inputs.items() if name not in fixed},
    )
    (gradients,) = vjp({name: inputs["ct_" + name] for name in outputs})
    return outputs | {"d" + name: x for name, x in gradients.items()}


def run_oracle(case, inputs):
    total = inputs["x"]
    if "r" in case.given:  # `astype` rounds the sum to the dtype
        total = (total.astype(np.float32) + inputs["residual"].astype(np.float32)).astype(total.dtype)
    return oracle.norm(case.kind, inputs, total, EPSILON)


def errors(case, got, want):
    """Returns the relative error of each array, over several draws together."""
    result = {}
    for name in want[0]:
        x, y = (np.stack([np.asarray(each[name], np.float64) for each in draws]) for draws in (got, want))
        size = np.linalg.norm(y)
        if name in ("dx", "dresidual") and case.N == 1:  # the terms cancel up to epsilon: errors are relative to them
            size = max(size, np.sqrt(y.size) * (EPSILON**-0.5 if case.kind == "layer" else 1.0))
        result[name] = float(np.linalg.norm(x - y) / (size or 1.0))
    return result


def dtype_of(case, name):
    dtypes = {"dweight": case.weight_dtype, "dbias": case.bias_dtype, "y": case.y_dtype or case.dtype}
    return dtypes.get(name, case.dtype)


def check(case, got, want, bound):
    assert got[0].keys() == want[0].keys()
    for name, x in got[0].items():
        assert x.dtype == DTYPES[dtype_of(case, name)], name
    found = errors(case, got, want)
    bad = [f"{name}: {e:.2e} > {bound(name):.2e}" for name, e in found.items() if not e <= bound(name)]
    assert not bad, "; ".join(bad)


def draws_of(case):
    """Returns how many draws to judge together: with few elements, the rounding errors of one draw vary by chance."""
    numbers = case.N * int(np.prod(case.rows))
    sums = case.N if "w" in case.given or "b" in case.given else numbers  # gradients of weights are sums over rows
    return max(1, min(16, 4096 // numbers), min(16, 64 // sums))


# The cases cover every N, dtype and set of arrays, but not all of their combinations.
COLUMNS = (1, 7, 64, 100, 512, 1000)
GIVEN = ("", "w", "b", "wb", "r", "wr", "wbr")
MIXED = (("f32", "bf16", "f16"), ("bf16", "bf16", "bf16"), ("f16", "f32", "bf16"))
SMALL, WIDE, ON_GPU = [], [], []
for kind in FUNCTIONS:
    SMALL += [Case(kind, N, given="wbr") for N in COLUMNS]
    SMALL += [Case(kind, N, dtype=dtype, given="wbr") for dtype in ("bf16", "f16") for N in (7, 1000)]
    SMALL += [Case(kind, 7, given=given) for given in GIVEN[:-1]]
    SMALL += [Case(kind, 7, dtype=("bf16", "f16")[i % 2], given=given) for i, given in enumerate(GIVEN[:-1])]
    SMALL += [Case(kind, 100, dtype=x, weight_dtype=w, bias_dtype=b) for x, w, b in MIXED]
    SMALL += [Case(kind, 100, dtype=x, given="wbr", y_dtype=y) for x, y in (("f32", "f16"), ("bf16", "f32"))]
    SMALL += [Case(kind, 64, rows) for rows in ((), (1,), (5,), (70,), (2, 3, 2))]
    # so wide that the backward kernel goes over a row in chunks (for N = 5000 only that of LayerNorm)
    WIDE += [Case(kind, N, (3,), dtype, "wbr") for N, dtype in ((5000, "f32"), (9000, "bf16"), (17000, "f32"))]
    for N in (*COLUMNS, 2048, 5000, 8192, 16384, 32768, 50257):
        rows = (max(3, 2**18 // N),)
        ON_GPU += [Case(kind, N, rows, dtype, given) for dtype in DTYPES for given in ("", "wb", "wbr")]
    for N in (100, 2048, 8192, 16384, 32768):
        ON_GPU += [Case(kind, N, (300,), "bf16", "wr", "bf16"), Case(kind, N, (300,), "f32", "wb", y_dtype="bf16")]
        ON_GPU += [Case(kind, N, (300,), "bf16", given, y_dtype="f32") for given in ("wb", "wbr")]


@pytest.mark.quick("case.kind")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_xla_is_near_float64(case):
    inputs = [make_inputs(case, draw) for draw in range(draws_of(case))]
    got = [run(case.kind, "xla", x) for x in inputs]
    check(case, got, [run_oracle(case, x) for x in inputs], lambda name: 16 * 2.0**-24 + ROUNDING[dtype_of(case, name)])


def hold_to_twice_xla(case, interpreted=False):
    inputs = [make_inputs(case, draw) for draw in range(draws_of(case))]
    got, again, xla = ([run(case.kind, name, x) for x in inputs] for name in ("triton", "triton", "xla"))
    want = [run_oracle(case, x) for x in inputs]
    of_xla = errors(case, xla, want)

    def bound(name):
        """Returns the sum of twice XLA's error, the last bits of float32, and the chance variation of few roundings."""
        dtype = dtype_of(case, name)
        luck = ROUNDING[dtype] / np.sqrt(len(want) * max(want[0][name].size, 1))
        # Triton's interpreter truncates to bfloat16, where a GPU rounds
        dropped = 4 * ROUNDING["bf16"] if interpreted and "bf16" in (case.dtype, dtype) else 0.0
        return 2 * of_xla[name] + 4 * 2.0**-23 + luck + dropped

    check(case, got, want, bound)
    jax.tree.map(np.testing.assert_array_equal, got, again)


@pytest.mark.quick("case.kind")
@pytest.mark.interpret
@pytest.mark.parametrize("case", SMALL + WIDE, ids=str)
def test_interpreted_kernels_have_at_most_twice_the_error_of_xla(case):
    hold_to_twice_xla(case, interpreted=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", SMALL + ON_GPU, ids=str)
def test_kernels_have_at_most_twice_the_error_of_xla(case):
    hold_to_twice_xla(case)


@kernels_only
@every_kind
def test_outputs_without_gradients_are_the_same(kind, implementation):
    inputs = make_inputs(Case(kind, 100, given="wbr"))
    forward = jax.jit(functools.partial(call, kind, implementation))(
        {k: x for k, x in inputs.items() if k[:3] != "ct_"}
    )
    with_gradients = run(kind, implementation, inputs)
    for name, x in forward.items():
        np.testing.assert_array_equal(x, with_gradients[name])


@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [
        *(("f16", "xla"), ("bf16", "xla"), pytest.param("f16", "triton", marks=pytest.mark.interpret)),
        *(pytest.param(dtype, "triton", marks=pytest.mark.gpu) for dtype in ("f16", "bf16")),
    ],
)
@every_kind
def test_the_norm_is_computed_from_the_rounded_sum(kind, dtype, implementation):
    """A norm of the unrounded sum would change a third of y. The interpreter, which does not round, skips bfloat16."""
    inputs = make_inputs(Case(kind, 100, dtype=dtype, given="wbr"))
    got = run(kind, implementation, inputs)
    assert (np.asarray(got["total"]) == inputs["x"] + inputs["residual"]).all()
    want = call(kind, implementation, {"x": got["total"], "weight": inputs["weight"], "bias": inputs["bias"]})
    assert np.mean(got["y"] != want["y"]) <= (0.01 if implementation == "xla" else 0.0)  # XLA may fuse differently


@every_implementation
@pytest.mark.parametrize("offset", [1e3, -1e4])
def test_layer_norm_is_accurate_with_a_large_mean(offset, implementation):
    """The variance is computed as the mean of squared differences, not as a difference of two large squares."""
    x = np.asarray(np.random.default_rng(0).normal(size=(4, 512)) + offset, np.float32)
    want = oracle.norm("layer", {"x": x, "ct_y": x}, x, EPSILON)
    got = jaxrnn.layer_norm(x, epsilon=EPSILON, implementation=implementation)
    assert oracle.error(got, want["y"]) <= 4 * abs(offset) * 2.0**-24


@every_implementation
@every_kind
def test_rows_are_independent(kind, implementation):
    """A NaN in x stays in its row of the outputs, and of the gradients to x and the residual."""
    inputs = make_inputs(Case(kind, 64, (9,), given="wbr"))
    clean = run(kind, implementation, inputs)
    poisoned = inputs | {"x": inputs["x"].copy()}
    poisoned["x"][4, 7] = np.nan
    got = run(kind, implementation, poisoned)
    others = np.arange(9) != 4
    for name in ("y", "total", "dx", "dresidual"):
        np.testing.assert_array_equal(got[name][others], clean[name][others])
        assert np.isnan(got[name][4]).any()


@every_kind
def test_float64_is_computed_in_float64(kind):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        inputs = {name: x.astype(np.float64) for name, x in make_inputs(Case(kind, 100, given="wbr")).items()}
        got = run(kind, None, inputs)
        want = oracle.norm(kind, inputs, inputs["x"] + inputs["residual"], EPSILON)
        for name, x in want.items():
            assert got[name].dtype == np.float64 and oracle.error(got[name], x) <= 1e-13, name


@every_implementation
@every_kind
def test_dtypes_may_differ_under_strict_promotion(kind, implementation):
    arguments = X.astype(jnp.bfloat16), W.astype(jnp.float16), W, X.astype(jnp.bfloat16)

    def norm(x, weight, bias, residual):
        return FUNCTIONS[kind](x, weight, bias, residual=residual, implementation=implementation)

    with jax.numpy_dtype_promotion("strict"):
        results, pull = jax.vjp(norm, *arguments)
        gradients = pull(results)
    assert [x.dtype for x in results] == [jnp.bfloat16] * 2
    assert [x.dtype for x in gradients] == [x.dtype for x in arguments]


@every_kind
def test_xla_has_derivatives_of_every_kind(kind):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5)), jnp.float32)

    def loss(x, implementation="xla"):
        return jnp.sum(jnp.sin(FUNCTIONS[kind](x, implementation=implementation)))

    tangent = jnp.ones_like(x)
    _, directional = jax.jvp(loss, (x,), (tangent,))
    np.testing.assert_allclose(directional, jnp.vdot(jax.grad(loss)(x), tangent), rtol=1e-4, atol=1e-6)
    hessian = jax.hessian(loss)(x).reshape(10, 10)
    np.testing.assert_allclose(hessian, hessian.T, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("N", COLUMNS)
@pytest.mark.parametrize(("kind", "module"), [("rms", nn.RMSNorm), ("layer", nn.LayerNorm)])
def test_outputs_equal_those_of_flax(kind, module, N):
    inputs = make_inputs(Case(kind, N, given="w" if kind == "rms" else "wb"))
    flax_params = {name: inputs[given] for name, given in (("scale", "weight"), ("bias", "bias")) if given in inputs}
    want = module(epsilon=EPSILON).apply({"params": flax_params}, inputs["x"])
    got = call(kind, None, inputs)["y"]
    # for one column, Flax's variance, a difference of squares, is not exactly zero
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-2 if N == 1 else 1e-5)


# --- transformations -------------------------------------------------------------------------------------------------

S = 3


def loss_of(kind, implementation):
    def loss(x, weight, bias, residual):
        y, total = FUNCTIONS[kind](x, weight, bias, residual=residual, implementation=implementation)
        return jnp.sum(jnp.sin(y) * jnp.cos(2 * total)), (y, total)

    return loss


def with_gradients(kind, implementation):
    return jax.value_and_grad(loss_of(kind, implementation), range(4), has_aux=True)


@functools.cache
def plain(kind):
    return jax.jit(with_gradients(kind, "xla"))


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), jnp.float32)


SHAPES = (4, 2, 5), (5,), (5,), (4, 2, 5)


def mapped(in_axes, size=S):
    """Returns arguments with an axis of length `size` where `in_axes` has one, and a function for the s-th example."""
    shapes = [s if at is None else (*s[:at], size, *s[at:]) for s, at in zip(SHAPES, in_axes, strict=True)]
    args = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    return args, lambda s: [x if at is None else jnp.take(x, s, at) for x, at in zip(args, in_axes, strict=True)]


MAPPED = {
    "all": (0, 0, 0, 0), "weights": (None, 0, 0, None), "weight": (None, 0, None, None), "bias": (None, None, 0, None),
    "x": (0, None, None, None), "data": (0, None, None, 0), "residual": (None, None, None, 0),
    "last-axes": (3, 1, 1, 3), "middle-axes": (1, None, 1, 2),
}  # fmt: skip


@pytest.mark.quick("kind")
@kernels_only
@pytest.mark.parametrize("in_axes", MAPPED.values(), ids=MAPPED)
@every_kind
def test_vmap_equals_a_loop(kind, in_axes, implementation):
    """Compares the outputs, and the gradients of every example by itself."""
    args, element = mapped(in_axes)
    got = jax.jit(jax.vmap(with_gradients(kind, implementation), in_axes))(*args)
    want = jax.tree.map(lambda *x: jnp.stack(x), *(plain(kind)(*element(s)) for s in range(S)))
    assert_close(got, want)


@kernels_only
@pytest.mark.parametrize("in_axes", MAPPED.values(), ids=MAPPED)
@every_kind
def test_grad_of_vmap_equals_a_loop(kind, in_axes, implementation):
    """Gradients to arguments that are not mapped are sums over the mapped axis."""
    args, element = mapped(in_axes)

    def total(*args):
        return jax.vmap(lambda *args: loss_of(kind, implementation)(*args)[0], in_axes)(*args).sum()

    got = jax.jit(jax.grad(total, range(4)))(*args)
    each = [plain(kind)(*element(s))[1] for s in range(S)]
    want = tuple(
        sum(x) if at is None else jnp.stack(x, at) for x, at in zip(zip(*each, strict=True), in_axes, strict=True)
    )
    assert_close(got, want)


@kernels_only
@pytest.mark.parametrize(
    ("outer", "inner"),
    [((0, None, 0, 0), (0, 0, None, 0)), ((0, 0, 0, 0), (0, None, None, 0)), ((0, None, None, None), (None, 0, 0, 0))],
    ids=["data-and-both-weights", "seeds-of-agents", "x-outside"],
)
@every_kind
def test_nested_vmap_equals_loops(kind, outer, inner, implementation):
    sizes = 2, 3
    shapes = [
        (*(size for size, axes in zip(sizes, (outer, inner), strict=True) if axes[i] is not None), *shape)
        for i, shape in enumerate(SHAPES)
    ]
    args = [draw(*shape, seed=i) for i, shape in enumerate(shapes)]
    run = with_gradients(kind, implementation)
    got = jax.jit(jax.vmap(jax.vmap(run, inner), outer))(*args)

    def element(s, t):
        args_ = [x if axis is None else x[s] for x, axis in zip(args, outer, strict=True)]
        return plain(kind)(*(x if axis is None else x[t] for x, axis in zip(args_, inner, strict=True)))

    want = [jax.tree.map(lambda *x: jnp.stack(x), *(element(s, t) for t in range(3))) for s in range(2)]
    assert_close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))


@kernels_only
@every_kind
def test_vmap_is_one_launch(kind, implementation):
    """The mapped axis becomes rows if weights are shared, and models if weights or their gradients are per example."""
    args, _ = mapped(MAPPED["data"])

    def launches(function, *args):
        jaxpr = str(jax.make_jaxpr(function)(*args))
        return [line.split("=", 1)[0] for line in jaxpr.splitlines() if " jaxrnn_launch[" in line]

    forward = jax.vmap(lambda *args: loss_of(kind, implementation)(*args)[0], MAPPED["data"])
    (result,) = launches(forward, *args)
    assert "f32[1,3,4,2,5]" in result
    both = launches(jax.vmap(with_gradients(kind, implementation), MAPPED["data"]), *args)
    with_rows, of_models = sorted(both, key=lambda results: "f32[3,5]" in results)
    assert "f32[1,3,4,2,5]" in with_rows
    assert "f32[3,4,2,5]" in of_models and "f32[3,5]" in of_models


@every_implementation
@every_kind
def test_empty_arrays(kind, implementation):
    (value, (y, total)), grads = jax.jit(with_gradients(kind, implementation))(draw(0, 5), draw(5), draw(5), draw(0, 5))
    assert value == 0 and y.shape == total.shape == (0, 5)
    np.testing.assert_array_equal(grads[1], np.zeros(5))
    each = jax.vmap(with_gradients(kind, implementation), (0, None, None, 0))(
        draw(0, 4, 5), draw(5), draw(5), draw(0, 4, 5)
    )
    assert [x.shape for x in each[1]] == [(0, 4, 5), (0, 5), (0, 5), (0, 4, 5)]
    of_weights = jax.vmap(with_gradients(kind, implementation), (None, 0, None, None))(
        draw(4, 5), draw(0, 5), draw(5), draw(4, 5)
    )
    assert [x.shape for x in of_weights[1]] == [(0, 4, 5), (0, 5), (0, 5), (0, 4, 5)]


@kernels_only
@every_kind
def test_eager_scan_and_remat(kind, implementation):
    args, _ = mapped((None,) * 4)
    want = plain(kind)(*args)
    assert_close(with_gradients(kind, implementation)(*args), want)
    rematerialized = jax.checkpoint(loss_of(kind, implementation))
    assert_close(jax.jit(jax.value_and_grad(rematerialized, range(4), has_aux=True))(*args), want)

    def many(implementation):
        def step(x, _):
            return FUNCTIONS[kind](x, args[1], args[2], implementation=implementation), None

        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jax.lax.scan(step, x, None, length=4)[0]))))

    assert_close(many(implementation)(args[0]), many("xla")(args[0]))


DERIVATIVES = {
    "jvp": lambda run, x: jax.jvp(run, x, x),
    "jacfwd": lambda run, x: jax.jacfwd(run)(*x),
    "hessian": lambda run, x: jax.hessian(lambda *x: jnp.sum(jnp.sin(run(*x)[0])), argnums=1)(*x),
    "grad-of-grad": lambda run, x: jax.grad(
        lambda *x: sum(jnp.sum(g**2) for g in jax.grad(lambda *x: jnp.sum(jnp.sin(run(*x)[0])), argnums=(0, 1))(*x)),
        argnums=(0, 1, 2),
    )(*x),
    "jvp-of-vmap": lambda run, x: jax.jvp(jax.vmap(run, (0, None, None, 0)), x, x),
}


@kernels_only
@every_kind
@pytest.mark.parametrize("transform", DERIVATIVES)
def test_derivatives_of_every_kind_equal_those_of_xla(kind, transform, implementation):
    def compute(implementation):
        def run(x, weight, bias, residual):
            return FUNCTIONS[kind](x, weight, bias, residual=residual, implementation=implementation)

        return jax.jit(functools.partial(DERIVATIVES[transform], run))((draw(3, 5), draw(5), draw(5), draw(3, 5)))

    assert_close(compute(implementation), compute("xla"))


# --- several devices -------------------------------------------------------------------------------------------------

on_devices = pytest.mark.parametrize(
    "platform",
    [pytest.param("cpu", marks=pytest.mark.interpret), pytest.param("gpu", marks=pytest.mark.several_gpus)],
)


def device_arguments():
    return draw(8, 16, 5), draw(5, seed=1), draw(5, seed=2), draw(8, 16, 5, seed=3)


def place(mesh, spec, arguments):
    specs = spec, P(), P(), spec
    return [jax.device_put(x, NamedSharding(mesh, to)) for x, to in zip(arguments, specs, strict=True)]


@on_devices
@pytest.mark.parametrize("check_vma", [False, True])
@every_kind
def test_shard_map_sums_gradients_over_devices(kind, check_vma, platform):
    arguments = device_arguments()
    want = plain(kind)(*arguments)

    def loss(*args):
        value, outputs = loss_of(kind, "triton")(*args)
        return jax.lax.psum(value, "data"), outputs

    mesh, rows = make_mesh(AxisType.Auto), P(None, "data")
    specs = rows, P(), P(), rows
    mapped = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=check_vma)
    if check_vma:
        run = mapped(
            jax.value_and_grad(loss, range(4), has_aux=True), out_specs=((P(), (rows, rows)), (rows, P(), P(), rows))
        )
    else:  # there, gradients are only right if they are taken outside of `shard_map`
        run = jax.value_and_grad(mapped(loss, out_specs=(P(), (rows, rows))), range(4), has_aux=True)
    assert_close(jax.jit(run)(*arguments), want)


@on_devices
@every_kind
def test_pmap_equals_vmap(kind, platform):
    count = len(jax.devices())
    arguments = [draw(count, *shape, seed=i) for i, shape in enumerate(SHAPES)]
    got = jax.pmap(with_gradients(kind, "triton"))(*arguments)
    assert_close(got, jax.vmap(with_gradients(kind, "xla"))(*arguments))


SHARDED = [(("data",), P("data")), (("data",), P(None, "data")), (("data", "agents"), P("data", "agents")),
           (("data", "agents"), P(("data", "agents")))]  # fmt: skip


@on_devices
@pytest.mark.parametrize(("axes", "spec"), SHARDED, ids=str)
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
@every_kind
def test_rows_stay_sharded_over_a_mesh(kind, axis_type, axes, spec, platform):
    arguments = device_arguments()
    want = plain(kind)(*arguments)
    mesh = make_mesh(axis_type, axes)
    arguments = place(mesh, spec, arguments)
    program = jax.jit(with_gradients(kind, "triton")).lower(*arguments).compile()
    got = program(*arguments)
    assert_close(got, want)
    ((_, (y, total)), (d_x, d_weight, d_bias, d_residual)) = got
    for x in (y, total, d_x, d_residual):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), 3)
    assert d_weight.sharding.is_fully_replicated and d_bias.sharding.is_fully_replicated
    assert "all-gather" not in program.as_text()


@on_devices
@every_kind
def test_gradients_of_float16_weights_are_summed_over_devices_in_float32(kind, platform):
    """The sum is rounded once; in float16 each device's part, and each partial sum, would be rounded too."""
    x, *weights, _ = device_arguments()
    arguments = (x, *(w.astype(jnp.float16) for w in weights), x)
    mesh = make_mesh(AxisType.Auto)
    program = jax.jit(with_gradients(kind, "triton")).lower(*place(mesh, P("data"), arguments)).compile()
    added = [line for line in program.as_text().splitlines() if " all-reduce(" in line or " all-reduce-start(" in line]
    assert added and not any("f16[" in line for line in added), added
    _, (_, *got, _) = program(*place(mesh, P("data"), arguments))
    _, (_, *want, _) = plain(kind)(*arguments)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2**-10, atol=1e-3)  # the last bit may differ


@on_devices
@every_kind
def test_rows_stay_sharded_over_a_mesh_that_jax_manages_without_jit(kind, platform):
    arguments = device_arguments()
    mesh = make_mesh(AxisType.Auto)
    got = loss_of(kind, "triton")(*place(mesh, P(None, "data"), arguments))
    assert_close(got, loss_of(kind, "xla")(*arguments))
    for x in got[1]:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 3)


@on_devices
@every_kind
def test_seeds_and_rows_share_a_mesh_that_jax_manages(kind, platform):
    """The weights of a seed are on the devices that hold the rows of this seed."""
    mesh = make_mesh(AxisType.Auto, ("seeds", "data"))
    seeds = mesh.shape["seeds"]
    arguments = [draw(seeds, *shape, seed=i) for i, shape in enumerate(SHAPES)]
    want = jax.vmap(with_gradients(kind, "xla"))(*arguments)
    specs = P("seeds", None, "data"), P("seeds"), P("seeds"), P("seeds", None, "data")
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs, strict=True)]
    program = jax.jit(jax.vmap(with_gradients(kind, "triton"))).lower(*sharded).compile()
    got = program(*sharded)
    assert_close(got, want)
    ((_, (y, _)), (_, d_weight, *_)) = got
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, specs[0]), 4)
    assert d_weight.sharding.is_equivalent_to(NamedSharding(mesh, P("seeds")), 2)
    assert "all-gather" not in program.as_text()


@on_devices
@pytest.mark.parametrize("in_axes", [(0, None, None, 0), (0, 0, 0, 0), (0, 0, None, None), (1, None, 0, 2)], ids=str)
@every_kind
def test_vmap_over_devices_of_an_explicit_mesh(kind, in_axes, platform):
    """The mapped axis is sharded: each device has its examples, and the weights that belong to them."""
    mesh = make_mesh(AxisType.Explicit)
    args, _ = mapped(in_axes, size=len(jax.devices()))
    specs = [P() if at is None else P(*(None,) * at, "data") for at in in_axes]
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
    each = lambda implementation: jax.vmap(with_gradients(kind, implementation), in_axes)  # noqa: E731
    program = jax.jit(each("triton")).lower(*sharded).compile()
    got = program(*sharded)
    assert_close(got, each("xla")(*args))
    for x in jax.tree.leaves(got):
        assert x.sharding.spec == P("data", *(None,) * (x.ndim - 1))
    if None not in (in_axes[0], in_axes[3]):
        assert "all-gather" not in program.as_text()

    def total(implementation):
        mean = lambda *args: jax.vmap(lambda *x: loss_of(kind, implementation)(*x)[0], in_axes)(*args).sum()  # noqa: E731
        return jax.jit(jax.grad(mean, range(4)))

    assert_close(total("triton")(*sharded), total("xla")(*args))


@on_devices
@every_kind
def test_replicated_arguments_are_resharded_to_match_x(kind, platform):
    x, weight, bias, residual = device_arguments()
    want = loss_of(kind, "xla")(x, weight, bias, residual)
    mesh = make_mesh(AxisType.Explicit)
    whole = jax.device_put((weight, bias, residual), NamedSharding(mesh, P()))
    got = loss_of(kind, "triton")(jax.device_put(x, NamedSharding(mesh, P("data"))), *whole)
    assert_close(got, want)


@on_devices
@pytest.mark.parametrize("sharded", ["weight", "residual"])
@every_kind
def test_sharded_arguments_are_resharded_to_match_a_replicated_x(kind, sharded, platform):
    arguments = [draw(8, 16), draw(16, seed=1), draw(16, seed=2), draw(8, 16, seed=3)]
    mesh = make_mesh(AxisType.Explicit)
    specs = [P()] * 4
    specs[1 if sharded == "weight" else 3] = P("data")
    placed = [jax.device_put(x, NamedSharding(mesh, to)) for x, to in zip(arguments, specs, strict=True)]
    got = jax.jit(with_gradients(kind, "triton"))(*placed)
    assert_close(got, with_gradients(kind, "xla")(*arguments))
    for gradient, to in zip(got[1], specs, strict=True):
        assert gradient.sharding.is_equivalent_to(NamedSharding(mesh, to), gradient.ndim)


@on_devices
@pytest.mark.parametrize("last", [1, 2])
@every_kind
def test_nested_vmap_over_devices_of_an_explicit_mesh(kind, last, platform):
    mesh = make_mesh(AxisType.Explicit, ("data", "agents"), last)
    xs = draw(*mesh.axis_sizes, 3, 16)
    sharded = jax.device_put(xs, NamedSharding(mesh, P("data", "agents")))

    def gradient(implementation):
        norm = functools.partial(getattr(jaxrnn, f"{kind}_norm"), implementation=implementation)
        return jax.jit(jax.grad(lambda xs: jnp.sin(jax.vmap(jax.vmap(norm))(xs)).sum()))

    got = gradient("triton")(sharded)
    assert_close(got, gradient("xla")(xs))
    assert got.sharding.spec == P("data", "agents", None, None)
    assert "all-gather" not in gradient("triton").lower(sharded).compile().as_text()


@on_devices
def test_triton_rejects_columns_that_are_sharded_over_an_explicit_mesh(monkeypatch, platform):
    x = draw(4, 16)
    sharded = jax.device_put(x, NamedSharding(make_mesh(AxisType.Explicit), P(None, "data")))
    with pytest.raises(NotImplementedError, match=r"last axis of x unsharded.*jax\.reshard"):
        jaxrnn.rms_norm(sharded, implementation="triton")
    monkeypatch.setattr(norms, "_MIN_KERNEL_ELEMENTS", 0)
    monkeypatch.setattr(_bridge, "on_gpu", lambda: True)
    assert_close(jaxrnn.rms_norm(sharded), jaxrnn.rms_norm(x, implementation="xla"))


# --- choice of the implementation, and wrong calls -------------------------------------------------------------------


def test_kernels_are_preferred_for_large_arrays():
    assert norms.preferred(2048, 2048) and not norms.preferred(2048, 2047)
    assert norms.preferred(1, 2**22) and norms.preferred(2**22, 1)


@pytest.mark.interpret
@pytest.mark.parametrize(("shape", "launched"), [((8, 128), True), ((8, 127), False)], ids=str)
def test_none_picks_kernels_by_size_on_a_gpu(monkeypatch, shape, launched):
    monkeypatch.setattr(norms, "_MIN_KERNEL_ELEMENTS", 1024)
    is_launched = lambda: "kind=norm" in str(jax.make_jaxpr(lambda x: jaxrnn.rms_norm(x))(draw(*shape)))  # noqa: E731
    assert not is_launched()  # JAX computes on the CPU
    monkeypatch.setattr(_bridge, "on_gpu", lambda: True)
    assert is_launched() == launched


X, W = jnp.zeros((3, 4, 5)), jnp.zeros(5)
WRONG = [
    ({"x": jnp.zeros(())}, "x must be [*rows, N], got a scalar"),
    ({"x": jnp.zeros((3, 5), int)}, "x must be floating point, got int32; convert it first"),
    ({"x": jnp.zeros((3, 5), complex)}, "x must be floating point, got complex64"),
    ({"weight": jnp.zeros(4)}, "weight must be [N] = (5,) as in x (3, 4, 5), got (4,)"),
    ({"weight": jnp.zeros((4, 5))}, "weight must be [N] = (5,) as in x (3, 4, 5), got (4, 5)"),
    ({"weight": jnp.zeros(5, int)}, "weight must be floating point, got int32"),
    ({"bias": jnp.zeros(())}, "bias must be [N] = (5,) as in x (3, 4, 5), got ()"),
    ({"bias": jnp.zeros(5, bool)}, "bias must be floating point, got bool"),
    ({"residual": W}, "residual must have the shape and dtype of x, float32[3, 4, 5], got float32[5]"),
    ({"residual": X.astype(jnp.bfloat16)}, "float32[3, 4, 5], got bfloat16[3, 4, 5]"),
    ({"epsilon": None}, "must be a number, got None"),
    ({"epsilon": jnp.ones(())}, "must be a number, got an array float32[]; pass a Python float, which is known when"),
    ({"epsilon": -1e-6}, "epsilon must be finite and not negative, got -1e-06"),
    ({"epsilon": float("nan")}, "epsilon must be finite and not negative, got nan"),
    ({"implementation": "cuda"}, 'implementation must be "triton", "xla" or None, got \'cuda\''),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "text"), WRONG, ids=[f"{next(iter(w))}-{i}" for i, (w, _) in enumerate(WRONG)])
@every_kind
def test_wrong_call_raises_a_precise_error(kind, wrong, text):
    arguments = {"x": X, "weight": W, "bias": W, "residual": X} | wrong
    if "x" in wrong:
        del arguments["residual"]
    with pytest.raises(ValueError) as error:
        FUNCTIONS[kind](arguments.pop("x"), **arguments)
    assert text in str(error.value)


@kernels_only
def test_triton_rejects_float64(implementation):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        x = jnp.zeros((3, 5), jnp.float64)
        with pytest.raises(NotImplementedError, match=r"not float64: convert, or pass implementation=\"xla\""):
            jaxrnn.rms_norm(x, implementation=implementation)
        with pytest.raises(NotImplementedError, match="not float64"):
            jaxrnn.rms_norm(x.astype(jnp.float32), x[0], implementation=implementation)


@kernels_only
def test_triton_rejects_too_many_columns(monkeypatch, implementation):
    import torch_bridge.norms

    monkeypatch.setattr(torch_bridge.norms, "WIDEST", 4)
    with pytest.raises(NotImplementedError, match=r'takes up to 4 columns, got 5: pass implementation="xla"'):
        jaxrnn.layer_norm(X, implementation=implementation)


@pytest.mark.torch
def test_triton_rejects_other_backends(monkeypatch):
    from torch_bridge import compiler

    monkeypatch.setattr(compiler, "interpreting", lambda: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(NotImplementedError, match=r'needs an NVIDIA GPU, but JAX computes on "cpu" here'):
        jaxrnn.rms_norm(X, implementation="triton")
