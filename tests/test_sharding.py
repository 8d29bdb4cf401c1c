"""Several devices: `shard_map`, `pmap`, and arrays sharded over an explicit mesh give what one device gives.

On eight CPU devices, see `conftest.py`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrnn
from jaxrnn import recurrent

pytestmark = pytest.mark.interpret

T, B, D, H = 5, 8, 3, 6


def make_mesh(axis_type, axes=("data",)):
    return jax.make_mesh({1: (8,), 2: (4, 2)}[len(axes)], axes, axis_types=(axis_type,) * len(axes))


def make_arguments(cell, batch=(B,), seed=0):
    """Parameters, carry, inputs, a learned reset state, and resets."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    states = 1 if cell == "gru" else 2
    if cell == "gru":
        params = jaxrnn.GRUParams(draw(D, 3 * H), draw(H, 3 * H), draw(3 * H), draw(H))
    else:
        params = jaxrnn.LSTMParams(draw(D, 4 * H), draw(H, 4 * H), draw(4 * H))
    carry, reset_state = (tuple(draw(*lead, H) for _ in range(states)) for lead in (batch, ()))
    if states == 1:
        (carry,), (reset_state,) = carry, reset_state
    return params, carry, draw(T, *batch, D), reset_state, jnp.asarray(rng.random((T, *batch)) < 0.3)


def loss(cell, implementation, params, carry, xs, reset_state, resets, *, axis=None, remat=False):
    run = jaxrnn.gru if cell == "gru" else jaxrnn.lstm
    last, ys = run(
        params, carry, xs, resets=resets, reset_state=reset_state, precision="highest", remat=remat,
        implementation=implementation,
    )  # fmt: skip
    total = sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves((last, ys)))
    return (total if axis is None else jax.lax.psum(total, axis)), ys


def with_gradients(cell, implementation, **options):
    return jax.value_and_grad(functools.partial(loss, cell, implementation, **options), range(4), has_aux=True)


def assert_close(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5), *jax.device_get((got, want)))


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_shard_map_sums_gradients_over_devices(monkeypatch, cell, check_vma, remat):
    monkeypatch.setattr(recurrent, "_CHUNK_BYTES", 1)  # `remat` in several chunks
    monkeypatch.setattr(recurrent, "_CHUNK_STEPS", 2)
    arguments = make_arguments(cell)
    want = jax.jit(with_gradients(cell, "xla"))(*arguments)
    state, sequence = P("data"), P(None, "data")
    specs = P(), state, sequence, P(), sequence
    results = (P(), sequence), (P(), state, sequence, P())
    run = with_gradients(cell, "triton", axis="data", remat=remat)
    if not check_vma:  # there gradients are right from outside
        inside = functools.partial(loss, cell, "triton", axis="data", remat=remat)
        inside = jax.shard_map(
            inside, mesh=make_mesh(AxisType.Auto), in_specs=specs, out_specs=(P(), sequence), check_vma=False
        )
        got = jax.jit(jax.value_and_grad(inside, range(4), has_aux=True))(*arguments)
    else:
        got = jax.jit(jax.shard_map(run, mesh=make_mesh(AxisType.Auto), in_specs=specs, out_specs=results))(*arguments)
    assert_close(got, want)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_pmap(cell):
    count = len(jax.devices())
    arguments = [make_arguments(cell, seed=seed) for seed in range(count)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *arguments)
    got = jax.pmap(with_gradients(cell, "triton"))(*stacked)
    want = jax.vmap(with_gradients(cell, "xla"))(*stacked)
    assert_close(got, want)


@pytest.mark.parametrize("axes", [("data",), ("data", "agents")])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_batches_of_an_explicit_mesh_stay_where_they_are(cell, axes):
    arguments = make_arguments(cell, batch=(B, 4)[: len(axes)])
    want = jax.jit(with_gradients(cell, "xla"))(*arguments)
    mesh = make_mesh(AxisType.Explicit, axes)
    specs = P(), P(*axes), P(None, *axes), P(), P(None, *axes)
    arguments = [
        jax.tree.map(lambda x, spec=spec: jax.device_put(x, NamedSharding(mesh, spec)), x)
        for x, spec in zip(arguments, specs, strict=True)
    ]
    run = jax.jit(with_gradients(cell, "triton"))
    got = run(*arguments)
    assert_close(got, want)
    ((_, ys), (_, _, d_xs, _)) = got
    assert ys.sharding.spec == d_xs.sharding.spec == P(None, *axes, None)
    assert "all-gather" not in run.lower(*arguments).compile().as_text()


def test_what_comes_in_whole_is_cut_to_the_batch_of_an_explicit_mesh():
    params, carry, xs, reset_state, resets = make_arguments("gru")
    want = loss("gru", "xla", params, carry, xs, reset_state, resets)
    mesh = make_mesh(AxisType.Explicit)
    xs = jax.device_put(xs, NamedSharding(mesh, P(None, "data")))
    whole = jax.device_put((params, carry, reset_state, resets), NamedSharding(mesh, P()))
    got = loss("gru", "triton", whole[0], whole[1], xs, *whole[2:])
    assert_close(got, want)


def test_sequences_of_an_explicit_mesh_must_be_whole():
    params, carry, xs, *_ = make_arguments("gru")
    xs = jax.device_put(xs.repeat(8, axis=0), NamedSharding(make_mesh(AxisType.Explicit), P("data")))
    with pytest.raises(NotImplementedError, match=r"whole sequences and features on a device.*jax\.reshard"):
        jaxrnn.gru(params, carry, xs, implementation="triton")


def test_a_mesh_that_jax_manages_gives_the_same():
    arguments = make_arguments("gru")
    want = jax.jit(with_gradients("gru", "xla"))(*arguments)
    mesh = make_mesh(AxisType.Auto)
    sharded = [
        jax.tree.map(lambda x, spec=spec: jax.device_put(x, NamedSharding(mesh, spec)), x)
        for x, spec in zip(arguments, (P(), P("data"), P(None, "data"), P(), P(None, "data")), strict=True)
    ]
    assert_close(jax.jit(with_gradients("gru", "triton"))(*sharded), want)
