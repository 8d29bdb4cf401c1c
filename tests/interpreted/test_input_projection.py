"""Tests launches of input projections against float64, under transformations, and as inputs of recurrent kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxrnn
from jaxrnn import _bridge
from jaxrnn._bridge import availability
from jaxrnn._bridge.recurrence import round_to_tf32

interpreted_or_not = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float16", marks=pytest.mark.interpret),
        pytest.param("float32", marks=pytest.mark.interpret),
        pytest.param("bfloat16", marks=pytest.mark.gpu),
        pytest.param("float32", marks=pytest.mark.gpu),
    ],
)
float32_interpreted_or_not = pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=mark) for mark in (pytest.mark.interpret, pytest.mark.gpu)]
)


def make(dtype, rows=(3, 70), D=40, W=72, seed=0):
    """Returns x, w and bias; float32 values are rounded to TF32, in which their products are exact."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jax.lax.reduce_precision(jnp.asarray(rng.normal(size=shape), dtype), exponent_bits=8, mantissa_bits=10)

    return draw(*rows, D), draw(D, W), draw(W).astype(jnp.float32)


def float64(x, w, bias):
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(bias, np.float64)


def check(got, want, dtype):
    assert got.shape == want.shape and got.dtype == dtype
    tolerance = {"float16": 6e-4, "float32": 1e-5}[dtype]
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)


of_either_output = pytest.mark.parametrize("out", ["float16", "float32"])


def check_product(dtype, out, **sizes):
    arguments = make(dtype, **sizes)
    run = jax.jit(functools.partial(_bridge.launch_projection, dtype=out))
    got = run(*arguments)
    check(got, float64(*arguments), out)
    np.testing.assert_array_equal(got, run(*arguments))


@pytest.mark.quick
@interpreted_or_not
@of_either_output
@pytest.mark.parametrize(
    "sizes",
    [{}, {"rows": (1,), "D": 1, "W": 1}, {"rows": (2, 9, 7), "D": 128, "W": 384}, {"D": 100, "W": 520}],
    ids=str,
)
def test_projection_is_the_product_plus_the_bias(dtype, out, sizes):
    check_product(dtype, out, **sizes)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param("float16", marks=pytest.mark.interpret), pytest.param("bfloat16", marks=pytest.mark.gpu)],
)
@of_either_output
def test_wide_inputs_are_projected_in_blocks(dtype, out):
    check_product(dtype, out, D=300, W=520)


@pytest.mark.torch
def test_wide_float32_inputs_have_no_kernel():
    from torch_bridge import input_projections
    from torch_bridge.tiling import Device, UnsupportedError

    dtypes = ("x", "float32"), ("w_ih_t", "float32"), ("bias", "float32"), ("xp", "float32")
    assert input_projections.choose(input_projections.Problem(1, 4096, 128, 384, dtypes), Device()).inputs == 128
    with pytest.raises(UnsupportedError, match=r"129 float32 inputs has no kernel \(the limit is 128\): use a"):
        input_projections.choose(input_projections.Problem(1, 4096, 129, 384, dtypes), Device())


@interpreted_or_not
def test_float16_results_are_clamped_and_nans_propagate(dtype):
    x, w, bias = make(dtype, rows=(4,), D=2, W=3)
    w = jnp.ones_like(w)
    x = jnp.array([[6e4, 6e4], [-6e4, -6e4], [jnp.nan, 0], [jnp.inf, 0]], dtype)
    got = np.asarray(_bridge.launch_projection(x, w, bias, jnp.float16))
    assert (got[0] == 65504).all() and (got[1] == -65504).all() and (got[3] == 65504).all()
    assert np.isnan(got[2]).all()


@float32_interpreted_or_not
def test_inputs_are_rounded_to_tf32(dtype):
    """Inputs and weights are rounded to nearest. Truncated, they would be too small by 2^-11 on average."""
    x, w, bias = make(dtype)
    x, w = (a + 2.0**-13 * jnp.abs(a) for a in (x, w))
    bits = [np.asarray(a).view(np.int32) for a in (x, w)]
    nearest = [((a + 0x1000) & -0x2000).view(np.float32) for a in bits]
    cut = [(a & -0x2000).view(np.float32) for a in bits]
    got = np.asarray(_bridge.launch_projection(x, w, bias, jnp.float32))
    check(got, float64(*nearest, bias), "float32")
    for wrong in ((cut[0], nearest[1]), (nearest[0], cut[1])):
        assert np.abs(got - float64(*wrong, bias)).max() > 1e-4


NANS = 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFF000, 0xFFFFFFFF


def test_rounding_to_tf32_keeps_nan_weights_nan():
    """Tensor cores ignore the low bits; the others must still be those of a NaN."""
    w = np.array(NANS, np.uint32).view(np.float32)
    for run in (round_to_tf32, jax.jit(round_to_tf32)):
        got = np.asarray(run(jnp.asarray(w))).view(np.uint32) & 0xFFFFE000
        assert np.isnan(got.view(np.float32)).all()


@float32_interpreted_or_not
@pytest.mark.parametrize("bits", NANS)
def test_every_nan_propagates(dtype, bits):
    """Rounding works on bits, and tensor cores ignore the low bits: some NaNs could turn into other values."""
    x, w, bias = make(dtype, rows=(5,))

    def put(x, at):
        x = np.array(x)
        x.view(np.uint32)[at] = bits
        return x

    @jax.jit
    def run(x, w, bias):
        return _bridge.launch_projection(x, w, bias, jnp.float32)

    got = np.asarray(run(put(x, (2, 7)), w, bias))
    assert np.isnan(got[2]).all() and np.isfinite(np.delete(got, 2, axis=0)).all()
    got = np.asarray(run(x, put(w, (7, 2)), bias))
    assert np.isnan(got[:, 2]).all() and np.isfinite(np.delete(got, 2, axis=1)).all()


@interpreted_or_not
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (1, 2, 0), (0, None, 0)], ids=str)
def test_projection_under_vmap(dtype, axes):
    run = functools.partial(_bridge.launch_projection, dtype=jnp.float32)
    drawn = [make(dtype, seed=seed) for seed in range(3)]
    models = [[drawn[0 if axis is None else k][i] for i, axis in enumerate(axes)] for k in range(3)]
    given = [
        shared[0] if axis is None else jnp.stack(shared, axis)
        for shared, axis in zip(zip(*models, strict=True), axes, strict=True)
    ]
    want = [float64(*model) for model in models]
    check(jax.vmap(run, axes)(*given), np.stack(want), "float32")
    none = jax.vmap(run, axes)(
        *(x if axis is None else x.take(jnp.array([], int), axis) for x, axis in zip(given, axes, strict=True))
    )
    assert none.shape == (0, *want[0].shape)
    # a second vmap around it, over arguments that the first one maps and over others
    outer = jax.vmap(jax.vmap(run, axes), (0, None, 0))
    given = [jnp.stack([x, 2 * x]) if i != 1 else x for i, x in enumerate(given)]
    got = outer(*given)
    for k, scale in enumerate((1, 2)):
        check(got[k], np.stack([scale * float64(*model) for model in models]), "float32")


@pytest.mark.parametrize("or_product", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float16", marks=pytest.mark.interpret),
        pytest.param("bfloat16", marks=pytest.mark.several_gpus),
    ],
)
def test_rows_stay_sharded(dtype, or_product):
    """On a mesh that JAX manages (`AxisType.Auto`), every device projects its rows, and nothing is gathered.

    With `or_product`, XLA projects these few rows.
    """
    x, w, bias = make(dtype, rows=(5, 16))
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    sharded = NamedSharding(mesh, PartitionSpec(None, "data"))
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(_bridge.launch_projection, dtype=jnp.float32, or_product=or_product))
        whole = NamedSharding(mesh, PartitionSpec())
        arguments = jax.device_put(x, sharded), *(jax.device_put(a, whole) for a in (w, bias))
        text = run.lower(*arguments).compile().as_text()
        got = run(*arguments)
    assert any(name in text for name in ("dot(", "gemm")) == or_product  # as XLA writes products on a CPU, on a GPU
    assert "all-gather" not in text and got.sharding.is_equivalent_to(sharded, got.ndim)
    check(got, float64(x, w, bias), "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [96, 128, 256, 512, 1024])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize("operands", ["bfloat16", "float32"])
def test_recurrence_with_projection_kernel_is_accurate(operands, cell, hidden, monkeypatch):
    """Outputs and gradients of every kernel have at most twice XLA's error. With bfloat16, projections are float16."""
    from torch_bridge import input_projections

    monkeypatch.setattr(input_projections, "is_profitable", lambda problem, device: True)  # on every device
    rng = np.random.default_rng(0)
    T, B, D = 65, 128, 64
    gates = {"gru": 3, "lstm": 4}[cell]
    sizes = {"w_ih": (D, gates * hidden), "w_hh": (hidden, gates * hidden), "b": (gates * hidden,)}
    sizes |= {"b_hn": (hidden,)} if cell == "gru" else {}
    weights = [rng.normal(size=shape) / hidden**0.5 for shape in sizes.values()]
    resets = rng.random((T, B)) < 0.05
    arrays = weights, rng.normal(size=(T, B, D)), [rng.normal(size=(B, hidden)) for _ in range(gates - 2)]

    def loss(arrays, implementation):
        weights, xs, carry = arrays
        if cell == "gru":
            params = jaxrnn.GRUParams(*weights)
            _, ys = jaxrnn.gru(params, carry[0], xs, resets=resets, implementation=implementation)
        else:
            params = jaxrnn.LSTMParams(*weights)
            _, ys = jaxrnn.lstm(params, tuple(carry), xs, resets=resets, implementation=implementation)
        return jnp.sum(jnp.sin(ys.astype(jnp.promote_types(ys.dtype, jnp.float32)))), ys

    def run(dtype, implementation):
        given = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, jnp.dtype(operands)), dtype), arrays)
        grad = jax.grad(functools.partial(loss, implementation=implementation), has_aux=True)
        assert ("kind=projection" in str(jax.make_jaxpr(grad)(given))) == (implementation == "triton")
        grads, ys = jax.jit(grad)(given)
        return [np.asarray(x, np.float64) for x in (ys, *jax.tree.leaves(grads))]

    got, xla = (run(operands, implementation) for implementation in ("triton", "xla"))
    with jax.enable_x64(True):
        want = run("float64", "xla")
    for x, y, z in zip(got, xla, want, strict=True):
        size = np.linalg.norm(z)
        assert np.linalg.norm(x - z) <= 2 * np.linalg.norm(y - z) + 1e-6 * size


@pytest.mark.interpret
def test_symbolic_number_of_rows_is_projected_by_xla(monkeypatch):
    from torch_bridge.tiling import Device

    monkeypatch.setattr(availability, "chosen_device", lambda: Device())
    (rows,) = jax.export.symbolic_shape("b")
    assert _bridge.may_launch_projection(4096, 64, 384, "float32")
    assert not _bridge.may_launch_projection(64 * rows, 64, 384, "float32")


@pytest.mark.interpret
@pytest.mark.parametrize("out", ["float16", "float32"])
@pytest.mark.parametrize("axes", [(None, None, None), (0, 0, 0), (0, None, None), (None, 0, 0)], ids=str)
def test_product_of_xla_replaces_the_kernel(out, axes):
    """No kernel is profitable in the interpreter."""
    run = functools.partial(_bridge.launch_projection, dtype=out, precision="highest", or_product=True)
    drawn = [make("float32", rows=(2, 5), seed=seed) for seed in range(3)]
    models = [[drawn[0 if axis is None else k][i] for i, axis in enumerate(axes)] for k in range(3)]
    if any(axis is not None for axis in axes):
        given = [
            drawn[0][i] if axis is None else jnp.stack([model[i] for model in models]) for i, axis in enumerate(axes)
        ]
        run, want = jax.vmap(run, in_axes=axes), np.stack([float64(*model) for model in models])
    else:
        given, want = models[0], float64(*models[0])
    program = jax.jit(run).lower(*given).as_text()
    assert "dot_general" in program and "custom_call" not in program
    check(jax.jit(run)(*given), want, out)


@pytest.mark.interpret
@pytest.mark.parametrize(("dtype", "rows"), [("bfloat16", 8192), ("float32", 4096)])
def test_kernel_is_chosen_for_the_rows_of_all_models(monkeypatch, dtype, rows):
    from torch_bridge.tiling import Device

    monkeypatch.setattr(availability, "chosen_device", lambda: Device())

    def launches(models, rows):
        shapes = (models, rows, 64), (models, 64, 384), (models, 384)
        given = [jnp.zeros(shape, dtype if k < 2 else "float32") for k, shape in enumerate(shapes)]
        run = jax.vmap(functools.partial(_bridge.launch_projection, dtype="float32", or_product=True))
        return [record.computes for _, record in _bridge.find_launches(jax.make_jaxpr(run)(*given).jaxpr, Device())]

    for models in (1, 8):
        assert launches(models, rows // models) == ["input projection"] and not launches(models, rows // models - 1)


@pytest.mark.gpu
def test_projection_kernel_runs_only_where_it_is_profitable():
    """XLA projects few rows or wide float32 inputs, and where float32 products are not in TF32.

    On a device without wgmma it projects all float32 inputs, and wide ones of any dtype.
    """
    from torch_bridge import gpu

    fast = gpu.device(0).has_wgmma

    def used(steps, dtype="bfloat16", inputs=64, models=1, **options):
        shapes = (inputs, 384), (128, 384), (384,), (128,)
        params = jaxrnn.GRUParams(*(jnp.zeros((models, *shape), dtype) for shape in shapes))
        run = functools.partial(jaxrnn.gru, implementation="triton", **options)
        xs, carry = jnp.zeros((steps, 64, inputs), dtype), jnp.zeros((64, 128), dtype)
        program = jax.make_jaxpr(jax.vmap(run, in_axes=(0, None, None)))(params, carry, xs)
        records = [record for _, record in _bridge.find_launches(program.jaxpr, gpu.device(0))]
        return "input projection" in [record.computes for record in records if record is not None]

    assert used(128) and not used(64) and used(128, remat=True) and used(128, inputs=512) == fast
    assert used(64, models=2)
    assert used(64, "float32") == fast and not used(63, "float32") and used(128, "float32", remat=True) == fast
    assert used(64, "float32", 36) == fast and not any(used(128, "float32", inputs) for inputs in (32, 38, 132))
    assert not used(128, "float32", precision="highest") and not used(128, "float16")
