"""`features_first` transposes in memory too, except where XLA partitions the program over a mesh."""

import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from meshes import make_mesh

from jaxrnn import _bridge
from jaxrnn.kernel_vjp.memory_layout import features_first

CONSTRAINT = "LayoutConstraint"


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def lowered(function, *args):
    return jax.jit(function).lower(*args).as_text()


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f, jax.disable_jit()], ids=["jit", "eager", "disable_jit"])
def test_features_first_is_a_transpose(wrap, shape):
    x = numbers(*shape)
    np.testing.assert_array_equal(wrap(features_first)(x), np.moveaxis(x, -1, 0))


@pytest.mark.parametrize("axes", [(0,), (2,), (1, 3)], ids=str)
def test_features_first_under_vmap(axes):
    """The mapped axes of `[*rows, N]` may be anywhere, and `vmap` may be nested."""
    x = numbers(2, 3, 4, 5, 6)
    ours, want = features_first, functools.partial(jnp.moveaxis, source=-1, destination=0)
    for axis in axes:
        ours, want = jax.vmap(ours, axis), jax.vmap(want, axis)
    np.testing.assert_array_equal(jax.jit(ours)(x), want(x))
    assert CONSTRAINT in lowered(ours, x)


def test_layout_is_fixed_on_one_device():
    x = numbers(4, 5)
    assert CONSTRAINT in lowered(features_first, x)
    copied = jax.jit(lambda x: features_first(x) @ x).lower(x).compile().as_text()
    assert "f32[5,4]{1,0}" in copied, copied  # the second axis varies fastest


def test_nothing_is_gathered_on_a_mesh_that_xla_manages():
    mesh = make_mesh(AxisType.Auto)
    x = jax.device_put(numbers(8, 16, 4), NamedSharding(mesh, PartitionSpec(None, "data")))

    def product(x):
        return jnp.einsum("xtb,tby->xy", features_first(x), x)

    assert CONSTRAINT not in lowered(product, x)
    assert "all-gather" not in jax.jit(product).lower(x).compile().as_text()
    np.testing.assert_allclose(jax.jit(product)(x), np.einsum("tbx,tby->xy", x, x), rtol=1e-5)


@pytest.mark.parametrize(
    ("axes", "manual", "fixed"),
    [(("data",), ("data",), True), (("data", "model"), ("data", "model"), True), (("data", "model"), ("data",), False)],
    ids=str,
)
def test_layout_inside_shard_map(axes, manual, fixed):
    """The layout of a device's shard is fixed, unless XLA shards it further over another axis of the mesh."""
    x, spec = numbers(8, 16, 4), PartitionSpec(None, "data")
    out = PartitionSpec(None, None, "data")
    function = jax.shard_map(
        features_first, mesh=make_mesh(AxisType.Auto, axes), in_specs=spec, out_specs=out, axis_names=set(manual)
    )
    assert (CONSTRAINT in lowered(function, x)) == fixed
    np.testing.assert_array_equal(jax.jit(function)(x), np.moveaxis(x, -1, 0))


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize(
    ("steps", "batch", "hidden"),
    [pytest.param(4, 3, 40, marks=pytest.mark.interpret), pytest.param(128, 32, 256, marks=pytest.mark.gpu)],
)
def test_weight_gradients_do_not_depend_on_features_first(cell, steps, batch, hidden, monkeypatch):
    """The gradients equal those from arrays with their original layout, under `vmap` too."""
    single = calls.arguments(cell, steps=steps, batch=(batch,), hidden=hidden)
    for args, map_over in ((single, lambda f: f), (calls.stack([single, single]), jax.vmap)):
        found = []
        for is_profitable in (True, False):
            monkeypatch.setattr(
                _bridge, "is_features_first_profitable", lambda *_, is_profitable=is_profitable: is_profitable
            )
            jax.clear_caches()
            run = map_over(calls.with_gradients(calls.runner(cell, "triton", precision="default")))
            assert (CONSTRAINT in lowered(run, *args)) == is_profitable
            found.append(jax.jit(run)(*args))
        calls.assert_close(*found, bound=1e-3)  # TF32 products, summed in another order
