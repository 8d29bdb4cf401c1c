"""Tests that `shard_map`, `pmap`, and arrays sharded over a mesh of either kind give the results of one device.

The tests run on eight CPU devices, with interpreted kernels, or on the GPUs if there are at least two: see
`conftest.py`.
"""

import contextlib
import functools
import re

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
import weight_sums
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import make_mesh, place

import jaxrnn
from jaxrnn import _bridge, recurrent, scan
from jaxrnn.cells import CELLS
from jaxrnn.kernel_vjp import chunks
from torch_bridge import tiling

assert_close = functools.partial(trees.assert_close, tol=1e-5, atol=2e-5)


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param(("cpu", ""), marks=pytest.mark.interpret, id="cpu"),
        pytest.param(("gpu", "native"), marks=pytest.mark.several_gpus, id="gpu"),
        pytest.param(("gpu", "callback"), marks=pytest.mark.several_gpus, id="gpu-callback"),
    ],
)
def platform(request, monkeypatch):
    """Returns the platform. On GPUs, kernels are launched by each method in turn."""
    platform, method = request.param
    assert jax.default_backend() == platform
    if method:
        monkeypatch.setenv("JAXRNN_LAUNCH", method)
        jax.clear_caches()  # programs that the other method launches
    return platform


T, B, D, H = 5, 8, 3, 6
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "triton", "scan"], indirect=True)


@pytest.fixture
def implementation(request, monkeypatch):
    """Returns an implementation; for "scan" it is None, which runs a scan in XLA in place of each launch of a loop."""
    if request.param != "scan":
        yield request.param
        return
    monkeypatch.setattr(_bridge, "is_preferred", lambda steps: True)
    scans = []
    monkeypatch.setattr(tiling, "prefers_scan", lambda problem, device: scans.append(problem.direction) or True)
    jax.clear_caches()  # programs in which None chose a kernel
    yield None
    jax.clear_caches()
    assert "fwd" in scans


def make_arguments(cell, batch=(B,), seed=0):
    """Returns parameters, carry, inputs, a learned reset state, and resets."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    if cell == "gru":
        params, widths = jaxrnn.GRUParams(draw(D, 3 * H), draw(H, 3 * H), draw(3 * H), draw(H)), (H,)
    elif cell == "lstm":
        params, widths = jaxrnn.LSTMParams(draw(D, 4 * H), draw(H, 4 * H), draw(4 * H)), (H, H)
    else:
        params, widths = jaxrnn.LSTMParams(draw(D, 4 * H), draw(4, 4 * H), draw(4 * H), draw(H, 4)), (H, 4)
    carry, reset_state = (tuple(draw(*lead, width) for width in widths) for lead in (batch, ()))
    if cell == "gru":
        (carry,), (reset_state,) = carry, reset_state
    return params, carry, draw(T, *batch, D), reset_state, jnp.asarray(rng.random((T, *batch)) < 0.3)


def loss(cell, implementation, params, carry, xs, reset_state, resets, *, axis=None, **options):
    run = jaxrnn.gru if cell == "gru" else jaxrnn.lstm
    last, ys = run(
        params, carry, xs, resets=resets, reset_state=reset_state, precision="highest", implementation=implementation,
        **options,
    )  # fmt: skip
    total = sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves((last, ys)))
    return (total if axis is None else jax.lax.psum(total, axis)), ys


def with_gradients(cell, implementation, **options):
    return jax.value_and_grad(functools.partial(loss, cell, implementation, **options), range(4), has_aux=True)


def compiled(function, arguments):
    """Returns the results of a jitted call, and the text of the program that XLA compiled."""
    program = jax.jit(function).lower(*arguments).compile()
    return program(*arguments), program.as_text()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("cell", "check_vma", "remat", "implementation"),
    [
        *(("gru", check_vma, remat, "triton") for check_vma in (False, True) for remat in (False, True)),
        ("gru", True, True, "scan"), ("lstm", False, True, "scan"), ("lstm", True, False, "triton"),
        ("lstm-projected", False, False, "scan"), ("lstm-projected", True, True, "triton"),
    ],
    indirect=["implementation"],
)  # fmt: skip
def test_shard_map_sums_gradients_over_devices(monkeypatch, cell, check_vma, remat, implementation):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 1)  # `remat` runs in several chunks
    monkeypatch.setattr(chunks, "_CHUNK_STEPS", 2)
    arguments = make_arguments(cell)
    want = jax.jit(with_gradients(cell, "xla"))(*arguments)
    state, sequence = P("data"), P(None, "data")
    specs = P(), state, sequence, P(), sequence
    results = (P(), sequence), (P(), state, sequence, P())
    run = with_gradients(cell, implementation, axis="data", remat=remat)
    if not check_vma:  # without `check_vma`, gradients are correct if taken outside of `shard_map`
        inside = functools.partial(loss, cell, implementation, axis="data", remat=remat)
        inside = jax.shard_map(
            inside, mesh=make_mesh(AxisType.Auto), in_specs=specs, out_specs=(P(), sequence), check_vma=False
        )
        got = jax.jit(jax.value_and_grad(inside, range(4), has_aux=True))(*arguments)
    else:
        got = jax.jit(jax.shard_map(run, mesh=make_mesh(AxisType.Auto), in_specs=specs, out_specs=results))(*arguments)
    assert_close(got, want)


@IMPLEMENTATIONS
@pytest.mark.parametrize("steps", [1, T])
def test_carry_may_be_made_inside_shard_map(implementation, steps):
    params, carry, xs, _, resets = make_arguments("gru")
    run = functools.partial(jaxrnn.gru, implementation=implementation, precision="highest")
    inside = jax.shard_map(
        lambda params, xs, resets: run(params, jnp.zeros((xs.shape[1], H)), xs, resets=resets)[1],
        mesh=make_mesh(AxisType.Auto), in_specs=(P(), P(None, "data"), P(None, "data")), out_specs=P(None, "data"),
    )  # fmt: skip
    xs, resets = xs[:steps], resets[:steps]
    assert_close(jax.jit(inside)(params, xs, resets), run(params, jnp.zeros_like(carry), xs, resets=resets)[1])


@IMPLEMENTATIONS
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_vmap_of_shard_map_shards_its_axis(cell, implementation):
    """Shards seeds over one axis of the mesh by `spmd_axis_name`, and the batch of each seed over the other axis."""
    mesh = make_mesh(AxisType.Auto, ("data", "seeds"))
    arguments = make_mapped(cell, MAPPED["everything"], (mesh.shape["seeds"],), batch=(B,))
    state, sequence = P("data"), P(None, "data")
    inside = jax.shard_map(
        functools.partial(loss, cell, implementation, axis="data"), mesh=mesh,
        in_specs=(P(), state, sequence, P(), sequence), out_specs=(P(), sequence), check_vma=False,
    )  # fmt: skip
    got = jax.jit(jax.vmap(jax.value_and_grad(inside, range(4), has_aux=True), spmd_axis_name="seeds"))(*arguments)
    assert_close(got, jax.jit(jax.vmap(with_gradients(cell, "xla")))(*arguments))
    assert got[0][1].sharding.spec[0] == "seeds"


@IMPLEMENTATIONS
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_pmap_equals_vmap(cell, implementation):
    count = len(jax.devices())
    arguments = [make_arguments(cell, seed=seed) for seed in range(count)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *arguments)
    got = jax.pmap(with_gradients(cell, implementation))(*stacked)
    want = jax.vmap(with_gradients(cell, "xla"))(*stacked)
    assert_close(got, want)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("cell", "axes", "implementation"),
    [
        *(("gru", ("data", "agents"), implementation) for implementation in ("xla", "triton", "scan")),
        ("lstm", ("data", "agents"), "triton"), ("lstm-projected", ("data", "agents"), "scan"),
        ("gru", ("data",), "triton"), ("lstm", ("data",), "scan"), ("lstm-projected", ("data",), "xla"),
    ],
    indirect=["implementation"],
)  # fmt: skip
def test_explicit_mesh_keeps_batches_sharded(cell, axes, implementation):
    arguments = make_arguments(cell, batch=(B, 4)[: len(axes)])
    want = jax.jit(with_gradients(cell, "xla"))(*arguments)
    mesh = make_mesh(AxisType.Explicit, axes)
    specs = P(), P(*axes), P(None, *axes), P(), P(None, *axes)
    arguments = place(mesh, specs, arguments)
    run = jax.jit(with_gradients(cell, implementation))
    # since JAX 0.11, the gradient of a product in a scan needs the mesh to be set; that of a launch does not
    with jax.set_mesh(mesh) if implementation == "xla" else contextlib.nullcontext():
        got = run(*arguments)
        text = run.lower(*arguments).compile().as_text()
    assert_close(got, want)
    ((_, ys), (_, _, d_xs, _)) = got
    assert ys.sharding.spec == d_xs.sharding.spec == P(None, *axes, None)
    assert "all-gather" not in text


def hessian_product(cell, implementation, *arguments, axis=None):
    """Returns the gradients to all arguments but the resets, and their derivative along the cosines of these."""
    *moving, resets = arguments
    gradients = jax.grad(lambda *x: loss(cell, implementation, *x, resets, axis=axis)[0], range(len(moving)))
    return jax.jvp(gradients, moving, jax.tree.map(jnp.cos, moving))


@pytest.mark.parametrize("cell", ["gru", "lstm-projected"])
@pytest.mark.parametrize("mesh", ["explicit", "auto", "shard_map", "vmap"])
def test_derivatives_of_gradients_equal_those_of_one_device(mesh, cell):
    """They are computed from arrays that the kernels need on each device, or that are sharded."""
    product = functools.partial(hessian_product, cell, "triton")
    plain = functools.partial(hessian_product, cell, "xla")
    state, sequence = P("data"), P(None, "data")
    specs = P(), state, sequence, P(), sequence
    if mesh == "vmap":
        arguments = make_mapped(cell, MAPPED["everything"], (len(jax.devices()),))
        want, explicit = jax.jit(jax.vmap(plain))(*arguments), make_mesh(AxisType.Explicit)
        with jax.set_mesh(explicit):  # which JAX 0.11 needs for the gradient of a mapped scan
            assert_close(jax.jit(jax.vmap(product))(*place(explicit, (P("data"),) * 5, arguments)), want)
        return
    arguments, want = make_arguments(cell), jax.jit(plain)(*make_arguments(cell))
    if mesh == "shard_map":
        inside = functools.partial(product, axis="data")
        run = jax.shard_map(inside, mesh=make_mesh(AxisType.Auto), in_specs=specs, out_specs=(specs[:4],) * 2)
        assert_close(jax.jit(run)(*arguments), want)
        return
    placed = place(make_mesh({"explicit": AxisType.Explicit, "auto": AxisType.Auto}[mesh]), specs, arguments)
    assert_close(jax.jit(product)(*placed), want)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_normed_gru_on_an_explicit_mesh_needs_no_jit(norm):
    """The norm's scales are combined with the weights outside of the jitted recurrence."""
    plain, carry, xs, *_ = make_arguments("gru")
    params = jaxrnn.NormGRUParams(*plain[:3], jnp.full(D, 1.5), jnp.full(H, 0.5))
    run = functools.partial(jaxrnn.norm_gru, norm=norm, implementation="xla")
    want = run(params, carry, xs)
    placed = place(make_mesh(AxisType.Explicit), (P(), P("data"), P(None, "data")), (params, carry, xs))
    assert_close(run(*placed), want)


# The kernels or a scan cannot use these specs of parameters, carry, inputs, reset state and resets as they are.
MISPLACED = {
    "whole": (P(), P(), P(None, "data"), P(), P()),
    "by features": (P("data"), P(None, "data"), P(None, "data"), P("data"), P(None, "data")),
    "by time": (P(), P("data"), P(None, "data"), P(), P("data")),
    "whole inputs": (P(), P("data"), P(), P(), P(None, "data")),
}


@pytest.mark.parametrize(
    ("misplaced", "steps", "implementation"),
    [
        *((misplaced, 8, implementation) for misplaced in MISPLACED for implementation in ("xla", "triton", "scan")),
        *zip(MISPLACED, (1,) * 4, ("xla", "triton", "scan", "xla"), strict=True),
    ],
    indirect=["implementation"],
)
def test_explicit_mesh_reshards_arguments_to_match_the_inputs(misplaced, steps, implementation):
    rng, B, D, H = np.random.default_rng(0), 8, 8, 16  # four devices can shard axes of these sizes
    draw = lambda *shape: jnp.asarray(0.5 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    params = jaxrnn.GRUParams(draw(D, 3 * H), draw(H, 3 * H), draw(3 * H), draw(H))
    arguments = params, draw(B, H), draw(steps, B, D), draw(H), jnp.asarray(rng.random((steps, B)) < 0.3)
    specs = list(MISPLACED[misplaced])
    if steps == 1 and misplaced == "by time":
        specs[4] = P()
    want = loss("gru", "xla", *arguments)
    mesh = make_mesh(AxisType.Explicit)
    sharded = place(mesh, specs, arguments)
    for run in (loss, jax.jit(loss, static_argnums=(0, 1))):
        got = run("gru", implementation, *sharded)
        assert_close(got, want)
        assert got[1].sharding.spec == P(*specs[2], *(None,) * (3 - len(specs[2])))
    with jax.set_mesh(mesh):
        got = jax.jit(with_gradients("gru", implementation))(*sharded)
    assert_close(got, with_gradients("gru", "xla")(*arguments))


@pytest.mark.parametrize(
    ("cell", "axis", "implementation"),
    [
        ("layer norm", 0, "triton"), ("layer norm", 1, "xla"), ("layer norm", 1, "scan"),
        ("blocks", 0, "scan"), ("blocks", 0, "xla"), ("blocks", 1, "triton"),
    ],
    indirect=["implementation"],
)  # fmt: skip
def test_explicit_mesh_replicates_weights_before_they_are_combined(cell, axis, implementation):
    """A norm's weights are folded, and blocks are split, before the call of the recurrence reshards its arguments."""
    rng, H = np.random.default_rng(0), 64
    draw = lambda *shape: jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    if cell == "blocks":
        params, call = jaxrnn.GRUParams(draw(8, 3 * H), draw(8, 8, 24), draw(3 * H), draw(H)), jaxrnn.gru
    else:
        weights = draw(8, 3 * H), draw(H, 3 * H), draw(3 * H), draw(8), draw(H)
        params, call = jaxrnn.NormGRUParams(*weights), functools.partial(jaxrnn.norm_gru, norm="layer")

    def loss(params, carry, xs):
        return jnp.sum(jnp.sin(call(params, carry, xs, precision="highest", implementation=implementation)[1]))

    arguments = params, draw(B, H), draw(T, B, 8)
    mesh = make_mesh(AxisType.Explicit)
    specs = jax.tree.map(lambda x: P(*[None] * min(axis, x.ndim - 1), "data"), params)
    sharded = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
    _, carry, xs = place(mesh, (P(), P("data"), P(None, "data")), arguments)
    with jax.set_mesh(mesh):
        got = jax.jit(jax.value_and_grad(loss))(sharded, carry, xs)
    assert_close(got, jax.value_and_grad(loss)(*arguments))
    assert got[1].w_ih.sharding.is_equivalent_to(sharded.w_ih.sharding, 2)


@pytest.mark.parametrize("make", ["RNN", "GRU", "bidirectional GRU", "ScannedRNN"])
def test_modules_make_a_carry_for_an_explicit_mesh(make):
    """Checks that the carry, which is replicated, is resharded to match the inputs."""
    from jaxrnn import linen

    _, _, xs, _, resets = make_arguments("gru")
    if make == "ScannedRNN":  # runs one step of a rollout
        module, given, spec = linen.ScannedRNN(), (jnp.zeros((B, H)), (xs[:1], resets[:1])), P(None, "data")
    else:
        xs = xs.swapaxes(0, 1)
        module = linen.RNN(linen.GRUCell(H)) if make == "RNN" else linen.GRU(H, bidirectional="bi" in make)
        given, spec = (xs,), P("data")
    mesh = make_mesh(AxisType.Explicit)
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh, spec))  # noqa: E731
    with jax.default_matmul_precision("highest"):
        variables = module.init(jax.random.key(0), *given)
        want = module.apply(variables, *given)
        given = (put(given[0], spec),) if len(given) == 1 else (put(given[0], P()), put(given[1], spec))
        with jax.set_mesh(mesh):
            assert_close(module.apply(put(variables, P()), *given), want)


SCANNED = pytest.mark.parametrize(
    ("package", "cell"), [("linen", "GRUCell"), ("linen", "LSTMCell"), ("nnx", "LSTMCell"), ("nnx", "SimpleCell")]
)


def scanned_rnn(package, cell):
    """Returns functions that initialize and apply an `RNN` whose cell runs under a scan of Flax."""
    import flax

    import jaxrnn.linen
    import jaxrnn.nnx

    if package == "linen":
        rnn = jaxrnn.linen.RNN(getattr(jaxrnn.linen, cell)(H, activation_fn=flax.linen.elu), return_carry=True)
        return functools.partial(rnn.init, jax.random.key(0)), rnn.apply
    cell = getattr(jaxrnn.nnx, cell)(D, H, activation_fn=flax.nnx.elu, rngs=flax.nnx.Rngs(0))
    graph, state = flax.nnx.split(jaxrnn.nnx.RNN(cell, return_carry=True))
    return lambda xs: state, lambda state, *args, **options: flax.nnx.merge(graph, state)(*args, **options)


@pytest.mark.parametrize("check_vma", [False, True])
@SCANNED
def test_a_scanned_cell_runs_inside_shard_map_as_a_fused_one_does(package, cell, check_vma):
    """It makes its own carry, which must vary over the devices as the inputs do."""
    init, apply = scanned_rnn(package, cell)
    _, _, xs, _, resets = make_arguments("gru")
    xs, resets, lengths = xs.swapaxes(0, 1), resets.T, jnp.arange(B) % (T + 1)
    variables = init(xs)
    leaves, tree = jax.tree.flatten(variables)
    floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

    def loss(floats, xs, resets, lengths):
        given = iter(floats)
        filled = tree.unflatten([next(given) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in leaves])
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(apply(filled, xs, resets=resets, seq_lengths=lengths)))

    def on_devices(*arguments):
        return jax.lax.psum(loss(*arguments), "data")

    mesh, row = make_mesh(AxisType.Auto), P("data")
    sharded = jax.shard_map(on_devices, mesh=mesh, in_specs=(P(), row, row, row), out_specs=P(), check_vma=check_vma)
    arguments = floats, xs, resets, lengths
    with jax.default_matmul_precision("highest"):
        want = jax.value_and_grad(loss)(*arguments)
        assert_close(jax.jit(jax.value_and_grad(sharded))(*arguments), want)


@pytest.mark.parametrize("mesh_is_set", [False, True])
@pytest.mark.parametrize("spec", [P("data"), P()], ids=str)
@SCANNED
def test_a_scanned_cell_runs_on_an_explicit_mesh_as_a_fused_one_does(package, cell, spec, mesh_is_set):
    init, apply = scanned_rnn(package, cell)
    _, _, xs, _, resets = make_arguments("gru")
    xs, resets, lengths = xs.swapaxes(0, 1), resets.T, jnp.arange(B) % (T + 1)
    variables, mesh = init(xs), make_mesh(AxisType.Explicit)
    placed = place(mesh, (spec, spec), (xs, resets))
    with jax.default_matmul_precision("highest"):
        want = apply(variables, xs, resets=resets, seq_lengths=lengths)
        with jax.set_mesh(mesh) if mesh_is_set else contextlib.nullcontext():
            # without a mesh that is set, constants of Flax's cell would be on one device
            eager = () if package == "linen" and not mesh_is_set else (apply,)
            for call in (*eager, jax.jit(apply)):
                got = call(variables, placed[0], resets=placed[1], seq_lengths=lengths)
                assert_close(got, want)
                assert got[1].sharding.spec[:1] == (spec or (None,))[:1]


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P()], ids=str)
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_norms_reshard_arguments_to_match_the_rows(norm, spec):
    rng = np.random.default_rng(0)
    x, residual, weight, bias = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 16), (8, 16), 16, 16))
    run = functools.partial(getattr(jaxrnn, norm), implementation="xla")
    want = run(x, weight, bias, residual=residual)
    mesh = make_mesh(AxisType.Explicit)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    got = run(put(x, spec), put(weight, P("data")), put(bias, P()), residual=put(residual, P(None, "data")))
    assert_close(got, want)
    assert all(y.sharding.spec == P(*spec, *(None,) * (2 - len(spec))) for y in got)


def test_xla_gathers_time_sharded_inputs_of_an_explicit_mesh():
    params, carry, xs, *_ = make_arguments("gru")
    xs = xs.repeat(8, axis=0)
    want = jaxrnn.gru(params, carry, xs, implementation="xla")
    xs = jax.device_put(xs, NamedSharding(make_mesh(AxisType.Explicit), P("data")))
    assert_close(jaxrnn.gru(params, carry, xs, implementation="xla"), want)


@IMPLEMENTATIONS
def test_explicit_mesh_allows_one_of_two_reset_states(implementation):
    arguments = make_arguments("lstm")

    def gradients(implementation, *arguments):
        return jax.grad(lambda c, rest: loss("lstm", implementation, *rest[:3], (c, None), rest[4])[0])(
            arguments[3][0], arguments
        )

    want = gradients("xla", *arguments)
    mesh = make_mesh(AxisType.Explicit)
    specs = P(), P("data"), P(None, "data"), P(), P(None, "data")
    arguments = [
        jax.tree.map(lambda x, spec=spec: jax.device_put(x, NamedSharding(mesh, spec)), x)
        for x, spec in zip(arguments, specs, strict=True)
    ]
    assert_close(jax.jit(functools.partial(gradients, implementation))(*arguments), want)


@IMPLEMENTATIONS
def test_explicit_mesh_reshards_a_carry_to_match_replicated_inputs(implementation):
    arguments = make_arguments("gru")
    mesh = make_mesh(AxisType.Explicit)
    sharded = place(mesh, (P(), P("data"), P(), P(), P()), arguments)
    got = jax.jit(with_gradients("gru", implementation))(*sharded)
    assert_close(got, jax.jit(with_gradients("gru", "xla"))(*arguments))
    assert got[1][1].sharding.spec == P("data", None)


# `in_axes` of parameters, carry, inputs, reset state and resets; arguments that are not mapped are replicated.
MAPPED = {
    "everything": (0, 0, 0, 0, 0),
    "examples": (None, 0, 0, None, 0),
    "carry": (None, 0, None, None, None),
    "models-on-one-batch": (0, None, None, 0, None),
}


def make_mapped(cell, in_axes, sizes, batch=(2,)):
    """Returns arguments; the mapped ones have leading axes of these sizes."""
    each = [make_arguments(cell, batch, seed) for seed in range(int(np.prod(sizes)))]
    stacked = jax.tree.map(lambda *x: jnp.stack(x).reshape(*sizes, *x[0].shape), *each)
    return [one if axis is None else many for one, many, axis in zip(each[0], stacked, in_axes, strict=True)]


def total(cell, implementation, in_axes, **options):
    """Returns the gradients of a sum over the mapped axis; those of arguments that are not mapped add up."""
    run = functools.partial(loss, cell, implementation, **options)
    return jax.grad(lambda *args: jax.vmap(lambda *each: run(*each)[0], in_axes)(*args).sum(), range(4))


@pytest.mark.parametrize(
    ("cell", "mapped", "options"),
    [
        *(("gru", mapped, {}) for mapped in MAPPED),
        *((cell, mapped, {}) for cell in ("lstm", "lstm-projected") for mapped in ("everything", "examples")),
        ("gru", "examples", {"remat": True}), ("lstm", "everything", {"time_major": False, "reverse": True}),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else x,
)  # fmt: skip
def test_vmap_over_a_sharded_axis_of_an_explicit_mesh(monkeypatch, cell, mapped, options):
    """Shards the mapped arguments, so that each device has its examples and their weights."""
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 1)  # `remat` runs in several chunks
    monkeypatch.setattr(chunks, "_CHUNK_STEPS", 2)
    in_axes = MAPPED[mapped]
    mesh = make_mesh(AxisType.Explicit)
    arguments = make_mapped(cell, in_axes, (len(jax.devices()),))
    if not options.get("time_major", True):
        arguments[2], arguments[4] = arguments[2].swapaxes(1, 2), arguments[4].swapaxes(1, 2)
    sharded = place(mesh, [P() if axis is None else P("data") for axis in in_axes], arguments)

    each = lambda implementation: jax.vmap(with_gradients(cell, implementation, **options), in_axes)  # noqa: E731
    got, text = compiled(each("triton"), sharded)
    assert_close(got, jax.jit(each("xla"))(*arguments))
    for x in jax.tree.leaves(got):
        assert x.sharding.spec == P("data", *(None,) * (x.ndim - 1))
    assert "all-gather" not in text

    got, text = compiled(total(cell, "triton", in_axes, **options), sharded)
    assert_close(got, jax.jit(total(cell, "xla", in_axes, **options))(*arguments))
    for gradient, axis in zip(got, in_axes[:4], strict=True):
        for x in jax.tree.leaves(gradient):
            assert x.sharding.spec == P(axis if axis is None else "data", *(None,) * (x.ndim - 1))
    assert "all-gather" not in text and (None not in in_axes[:4] or re.search(r" all-reduce(-start)?\(", text))


@pytest.mark.parametrize(
    ("models", "spec"),
    [
        *((models, P("data", "agents")) for models in ("outer", "inner", None)), ("inner", P("data")),
        ("outer", P(None, "agents")),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("last", [1, 2])
def test_nested_vmap_over_sharded_axes_of_an_explicit_mesh(models, spec, last):
    """Shares the weights, or uses one set for each index of one of the two axes, sharded as that axis is."""
    mesh = make_mesh(AxisType.Explicit, ("data", "agents"), last)
    shape = tuple(mesh.shape.values())
    kept = {"outer": ((0,), spec[:1]), "inner": ((1,), spec[1:]), None: ((), ())}[models]
    own = (0, 0, 0, 0, 0)
    outer, inner = (own if models == which else MAPPED["examples"] for which in ("outer", "inner"))
    _, carry, xs, _, resets = make_mapped("gru", own, shape)
    params, _, _, reset_state, _ = make_mapped("gru", own, tuple(shape[k] for k in kept[0]))
    arguments = params, carry, xs, reset_state, resets
    sharded = place(mesh, (P(*kept[1]), spec, spec, P(*kept[1]), spec), arguments)
    each = lambda implementation: jax.vmap(jax.vmap(with_gradients("gru", implementation), inner), outer)  # noqa: E731
    got, text = compiled(each("triton"), sharded)
    assert_close(got, jax.jit(each("xla"))(*arguments))
    lead = (*spec, None)[:2]
    for x in jax.tree.leaves(got):
        assert x.sharding.spec == P(*lead, *(None,) * (x.ndim - 2))
    assert "all-gather" not in text


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("steps", "cell", "mapped"),
    [
        (1, "gru", "examples"), (1, "lstm-projected", "everything"), (T, "gru", "everything"),
        (T, "lstm-projected", "examples"),
    ],
)  # fmt: skip
def test_vmap_over_a_sharded_axis_allows_arrays_made_inside(steps, cell, mapped, implementation):
    mesh, in_axes = make_mesh(AxisType.Explicit), (MAPPED[mapped][0], 0)
    params, _, xs, *_ = make_mapped(cell, MAPPED[mapped], (len(jax.devices()),))
    _, carry, _, state, _ = make_arguments(cell, (2,))

    def run(implementation, params, x):
        zeros, ones = (
            jax.tree.map(lambda x: jnp.zeros(x.shape), carry),
            jax.tree.map(lambda x: jnp.ones(x.shape), state),
        )
        resets = jnp.zeros((steps, 2), bool).at[steps // 2].set(True)
        return loss(cell, implementation, params, zeros, x[:steps], ones, resets)[1]

    each = lambda implementation: jax.vmap(functools.partial(run, implementation), in_axes)  # noqa: E731
    sharded = place(mesh, [P() if axis is None else P("data") for axis in in_axes], (params, xs))
    want = jax.jit(each("xla"))(params, xs)
    for call in (each(implementation), jax.jit(each(implementation))):
        got = call(*sharded)
        assert_close(got, want)
        assert got.sharding.spec == P("data", None, None, None)


@pytest.mark.parametrize("mapped", ["examples", "everything"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_one_step_of_xla_on_a_gpu_allows_arrays_made_inside(monkeypatch, cell, mapped):
    """XLA joins both products of a step there; the inputs are mapped, and the state is not."""
    monkeypatch.setattr(scan.jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    mesh, in_axes = make_mesh(AxisType.Explicit), (MAPPED[mapped][0], 0)
    params, _, xs, *_ = make_mapped(cell, MAPPED[mapped], (len(jax.devices()),))
    _, carry, *_ = make_arguments(cell, (2,))

    def run(params, x):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape), carry)
        options = {"precision": "highest", "implementation": "xla"}
        return (jaxrnn.gru if cell == "gru" else jaxrnn.lstm)(params, zeros, x[:1], **options)[1]

    each = jax.jit(jax.vmap(run, in_axes))
    sharded = place(mesh, [P() if axis is None else P("data") for axis in in_axes], (params, xs))
    got, want = each(*sharded), each(params, xs)
    jax.clear_caches()
    assert_close(got, want)
    assert got.sharding.spec == P("data", None, None, None)


@IMPLEMENTATIONS
def test_one_direction_may_have_a_carry_made_inside(implementation):
    """The arguments of both directions are stacked: `vmap` maps one carry over a sharded axis, and not the other."""
    mesh, count = make_mesh(AxisType.Explicit), len(jax.devices())
    params, _, xs, *_ = make_mapped("gru", (None, None, 0, None, None), (count,))
    _, h, *_ = make_arguments("gru", (2,))
    given = jnp.stack([h] * count)

    def run(implementation, params, h, x):
        both = recurrent.run_bidirectional(
            CELLS["gru"],
            (params, params),
            (h, jnp.zeros_like(h)),
            x,
            precision="highest",
            implementation=implementation,
        )
        return [ys for _, (ys,) in both]

    each = lambda implementation: jax.vmap(functools.partial(run, implementation), (None, 0, 0))  # noqa: E731
    want = jax.jit(each("xla"))(params, given, xs)
    got = jax.jit(each(implementation))(*place(mesh, (P(), P("data"), P("data")), (params, given, xs)))
    assert_close(got, want)


def test_vmap_of_both_directions_over_a_sharded_axis_of_an_explicit_mesh():
    mesh = make_mesh(AxisType.Explicit)
    params, carry, xs, _, resets = make_mapped("gru", MAPPED["examples"], (len(jax.devices()),))

    def both(implementation, params, carry, xs, resets):
        other = jax.tree.map(lambda x: 0.5 - x, params)
        pair = calls.run_bidirectional(
            "gru", (params, other), (carry, -carry), xs, resets=(resets, resets[::-1]), precision="highest",
            implementation=implementation,
        )  # fmt: skip
        return jnp.sum(jnp.sin(pair[0][1]) * pair[1][1]), pair

    def each(implementation):
        run = jax.value_and_grad(functools.partial(both, implementation), range(3), has_aux=True)
        return jax.vmap(run, (None, 0, 0, 0))

    arguments = params, carry, xs, resets
    got, text = compiled(each("triton"), place(mesh, (P(), P("data"), P("data"), P("data")), arguments))
    assert_close(got, jax.jit(each("xla"))(*arguments))
    for x in jax.tree.leaves(got):
        assert x.sharding.spec == P("data", *(None,) * (x.ndim - 1))
    assert "all-gather" not in text


@pytest.mark.parametrize("mapped", ["everything", "examples"])
def test_vmap_over_a_replicated_axis_of_an_explicit_mesh_keeps_batches_sharded(mapped):
    mesh = make_mesh(AxisType.Explicit)
    in_axes = MAPPED[mapped]
    arguments = make_mapped("gru", in_axes, (3,), batch=(B,))
    sharded = place(mesh, (P(), P(None, "data"), P(None, None, "data"), P(), P(None, None, "data")), arguments)
    each = lambda implementation: jax.vmap(with_gradients("gru", implementation), in_axes)  # noqa: E731
    got, text = compiled(each("triton"), sharded)
    assert_close(got, jax.jit(each("xla"))(*arguments))
    ((_, ys), (_, d_carry, d_xs, _)) = got
    assert ys.sharding.spec == d_xs.sharding.spec == P(None, None, "data", None)
    assert d_carry.sharding.spec == P(None, "data", None)
    assert "all-gather" not in text


@pytest.mark.parametrize("gradient", [False, True])
def test_vmap_over_a_sharded_axis_rejects_a_sharded_batch(gradient):
    """Checks that on an explicit mesh the mapped axis or a batch axis may be sharded, but not both."""
    mesh = make_mesh(AxisType.Explicit, ("data", "agents"))
    arguments = make_mapped("gru", MAPPED["examples"], (mesh.shape["data"],), batch=(B,))
    state, sequence = P("data", "agents"), P("data", None, "agents")
    sharded = place(mesh, (P(), state, sequence, P(), sequence), arguments)
    run = with_gradients("gru", "triton") if gradient else functools.partial(loss, "gru", "triton")
    with pytest.raises(NotImplementedError, match=r'under vmap.*one jax\.shard_map over both.*implementation="xla"'):
        jax.jit(jax.vmap(run, MAPPED["examples"]))(*sharded)


def test_triton_rejects_time_sharded_inputs_of_an_explicit_mesh():
    params, carry, xs, *_ = make_arguments("gru")
    xs = jax.device_put(xs.repeat(8, axis=0), NamedSharding(make_mesh(AxisType.Explicit), P("data")))
    with pytest.raises(NotImplementedError, match=r"needs time and features unsharded.*jax\.reshard"):
        jaxrnn.gru(params, carry, xs, implementation="triton")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("cell", "options"), [("gru", {}), ("lstm", {"time_major": False}), ("gru", {"remat": True})],
    ids=["gru", "lstm-batch-major", "gru-remat"],
)  # fmt: skip
def test_auto_mesh_keeps_batches_sharded(monkeypatch, cell, options):
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 1)  # `remat` runs in several chunks
    monkeypatch.setattr(chunks, "_CHUNK_STEPS", 2)
    params, carry, xs, reset_state, resets = make_arguments(cell)
    sequence = P(None, "data")
    if not options.get("time_major", True):
        xs, resets, sequence = xs.swapaxes(0, 1), resets.swapaxes(0, 1), P("data")
    arguments = params, carry, xs, reset_state, resets
    want = jax.jit(with_gradients(cell, "xla", **options))(*arguments)
    mesh = make_mesh(AxisType.Auto)
    arguments = place(mesh, (P(), P("data"), sequence, P(), sequence), arguments)
    got, text = compiled(with_gradients(cell, "triton", **options), arguments)
    assert_close(got, want)
    ((_, ys), (d_params, d_carry, d_xs, _)) = got
    for x in (ys, d_xs, *jax.tree.leaves(d_carry)):
        assert not x.sharding.is_fully_replicated and x.sharding.is_equivalent_to(
            NamedSharding(mesh, sequence if x.ndim == 3 else P("data")), x.ndim
        )
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(d_params))
    assert "all-gather" not in text and re.search(r" all-reduce(-start)?\(", text)


def test_auto_mesh_keeps_batches_sharded_without_jit():
    arguments = make_arguments("gru")
    mesh = make_mesh(AxisType.Auto)
    sharded = place(mesh, (P(), P("data"), P(None, "data"), P(), P(None, "data")), arguments)
    _, ys = loss("gru", "triton", *sharded)
    assert ys.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "data")), 3)
    assert_close(ys, loss("gru", "xla", *arguments)[1])


def test_auto_mesh_shards_seeds_and_batches():
    """Checks that the weights of a seed are on the devices that have the seed."""
    mesh = make_mesh(AxisType.Auto, ("seeds", "data"))
    seeds = mesh.shape["seeds"]
    arguments = jax.tree.map(lambda *x: jnp.stack(x), *(make_arguments("gru", (4,), seed) for seed in range(seeds)))
    want = jax.jit(jax.vmap(with_gradients("gru", "xla")))(*arguments)
    sequence = P("seeds", None, "data")
    sharded = place(mesh, (P("seeds"), P("seeds", "data"), sequence, P("seeds"), sequence), arguments)
    got, text = compiled(jax.vmap(with_gradients("gru", "triton")), sharded)
    assert_close(got, want)
    ((_, ys), (d_params, *_)) = got
    assert ys.sharding.is_equivalent_to(NamedSharding(mesh, sequence), 4)
    for x in jax.tree.leaves(d_params):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("seeds")), x.ndim)
    assert "all-gather" not in text


def test_auto_mesh_drops_casts_of_residuals(platform):
    """Uses few sequences per seed, and many in all: residuals are traced in float32, but are float16 on each device."""
    seeds = 20 * len(jax.devices()) if platform == "gpu" else 2
    *arguments, _ = calls.arguments("gru", (16,), steps=2, hidden=48, lead=(seeds,))
    call = jax.vmap(calls.with_gradients(calls.runner("gru", "triton", precision=None)))
    sequence = P(None, None, "data")
    sharded = place(make_mesh(AxisType.Auto), (P(), P(None, "data"), sequence, sequence), arguments)
    got, text = compiled(call, (*sharded, None))
    calls.assert_close(got, jax.vmap(calls.reference("gru"))(*arguments, None), 5e-3)
    assert re.search(r"f16\[\d+,2,\d+,192\]", text) and not re.search(r"= f16\[\S* convert\(", text)


def test_auto_mesh_runs_both_directions():
    """Checks that devices do not shard the two models of a launch: each would run its model as the first, forward."""
    params, carry, xs, _, resets = make_arguments("gru")
    run = functools.partial(calls.run_bidirectional, "gru", precision="highest")

    def both(implementation, params, carry, xs, resets):
        other = jax.tree.map(lambda x: 0.5 - x, params)
        pair = run((params, other), (carry, -carry), xs, resets=(resets, resets[::-1]), implementation=implementation)
        return jnp.sum(jnp.sin(pair[0][1]) * pair[1][1]), pair

    def call(implementation):
        return jax.value_and_grad(functools.partial(both, implementation), range(3), has_aux=True)

    mesh = make_mesh(AxisType.Auto)
    arguments = params, carry, xs, resets
    sharded = place(mesh, (P(), P("data"), P(None, "data"), P(None, "data")), arguments)
    got, text = compiled(call("triton"), sharded)
    assert_close(got, jax.jit(call("xla"))(*arguments))
    assert "all-gather" not in text

    mesh = make_mesh(AxisType.Auto, ("data", "directions"))
    draw = lambda *shape: jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)  # noqa: E731
    arrays = {"w_hh_t": draw(2, 3 * H, H), "b_hn": draw(2, H), "xp": draw(2, T, B, 3 * H), "h0": draw(2, B, H)}
    outputs = [_bridge.Output("hs", jnp.float32, H), _bridge.Output("h_last", jnp.float32, H, stepped=False)]
    launch = jax.jit(
        lambda arrays: _bridge.launch(
            "gru", "fwd", arrays, outputs, reset_state="zeros", reverse="bidirectional", precision="tf32x3"
        )
    )
    want = launch(arrays)
    assert_close(launch(jax.device_put(arrays, NamedSharding(mesh, P("directions")))), want)


def test_auto_mesh_runs_one_function_on_replicated_and_sharded_batches():
    """Checks a launch that is lowered once, and whose shards have two shapes."""
    params, carry, xs, _, resets = make_arguments("gru")
    mesh = make_mesh(AxisType.Auto)
    sharded = place(mesh, (P(), P("data"), P(None, "data"), P(None, "data")), (params, carry, xs, resets))

    def twice(implementation, params, carry, xs, resets):
        run = jax.jit(functools.partial(jaxrnn.gru, precision="highest", implementation=implementation))
        whole = functools.partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, P()))
        _, ys = run(params, carry, xs, resets=resets)
        _, others = run(params, whole(2 * carry), whole(2 * xs), resets=whole(resets))
        return ys, whole(others)

    got = jax.jit(functools.partial(twice, "triton"))(*sharded)
    assert_close(got, jax.jit(functools.partial(twice, "xla"))(*sharded))
    assert [x.sharding.is_fully_replicated for x in got] == [False, True]


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_launches_and_collectives_in_one_loop_neither_hang_nor_mix(platform, cell):
    """Makes each device alternate many times between launches and waiting for the others, even if one lags behind."""
    params, carry, xs, _, resets = make_arguments(cell)
    turns, steps = (2000, T) if platform == "gpu" else (5, 2)
    xs, resets = xs[:steps], resets[:steps]
    state, sequence = P("data"), P(None, "data")

    def many(implementation, params, carry, xs, resets):
        run = jaxrnn.gru if cell == "gru" else jaxrnn.lstm

        def loss(params, carry):
            last, ys = run(params, carry, xs, resets=resets, precision="highest", implementation=implementation)
            return jnp.mean(ys**2), last

        def update(state, _):
            params, carry = state
            grads, last = jax.grad(loss, has_aux=True)(params, carry)
            params = jax.tree.map(lambda x, dx: x - 0.1 * jax.lax.pmean(dx, "data"), params, grads)
            mean = jax.lax.pmean(jax.tree.map(jnp.tanh, last), "data")
            return (params, jax.tree.map(lambda x, m: 0.5 * (x + m), last, mean)), None

        # `check_vma=False` accepts results of collectives as replicated, and does not sum gradients over devices
        return jax.lax.scan(update, (params, carry), None, length=turns)[0]

    def on_all(implementation):
        inside = functools.partial(many, implementation)
        specs = P(), state, sequence, sequence
        return jax.jit(
            jax.shard_map(
                inside, mesh=make_mesh(AxisType.Auto), in_specs=specs, out_specs=(P(), state), check_vma=False
            )
        )

    run = on_all("triton")
    got, again = run(params, carry, xs, resets), run(params, carry, xs, resets)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((got, again)))
    assert_close(got, on_all("xla")(params, carry, xs, resets))


# Slicing leaves shards of unequal sizes: XLA pads the last shard with arbitrary values.


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_gradients_of_norms_ignore_padding_of_shards(norm):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    (xs,) = place(make_mesh(AxisType.Auto), [P("data")], [draw(2 * B, 3, 16)])

    def loss(implementation, weight, bias, xs):
        ys = getattr(jaxrnn, norm)(jnp.exp(xs)[:-1], weight, bias, implementation=implementation)
        return jnp.mean((ys - xs[1:]) ** 2)

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, name), (0, 1, 2)))(draw(16) * 0 + 1.3, draw(16) * 0, xs)
        for name in ("triton", "xla")
    )
    assert_close(got, want)


@pytest.mark.parametrize("left", [2 * B, 2 * B - 1, 2 * B - 2])
@pytest.mark.parametrize("reset_state", ["zeros", "fixed", "stepped"])
@pytest.mark.parametrize("order", [1, 2])
def test_gradients_of_weights_ignore_padding_of_shards(monkeypatch, platform, left, reset_state, order):
    from torch_bridge import weight_grads

    monkeypatch.setattr(weight_grads, "is_profitable", lambda problem, device: True)
    if platform == "cpu":
        monkeypatch.setattr(weight_grads, "Launch", weight_sums.Launch)
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)  # noqa: E731
    D, H = 64, 64
    params = jaxrnn.GRUParams(draw(D, 3 * H), draw(H, 3 * H), draw(3 * H), draw(H))
    resets = jnp.asarray(rng.random((T, left)) < 0.3)
    (xs,) = place(make_mesh(AxisType.Auto), [P(None, "data")], [draw(T, 2 * B, D)])
    new = {"zeros": None, "fixed": draw(left, H), "stepped": draw(T, left, H)}[reset_state]

    def loss(implementation, params, xs):
        options = {"resets": resets, "reset_state": new, "precision": "default", "implementation": implementation}
        run = functools.partial(jaxrnn.gru, **options)
        return jnp.mean(run(params, jnp.zeros((left, H)), jnp.exp(xs)[:, :left])[1] ** 2)

    def derivative(implementation, params, xs):
        gradient = jax.grad(functools.partial(loss, implementation))
        return gradient(params, xs) if order == 1 else jax.jvp(gradient, (params, xs), (params, jnp.cos(xs)))[1]

    got, want = (jax.jit(functools.partial(derivative, name))(params, xs) for name in ("triton", "xla"))
    for each, other in zip(got, want, strict=True):
        assert jnp.linalg.norm(each - other) <= 5e-3 * jnp.linalg.norm(other)
