"""Tests the launch that computes gradients of weights: its error is at most twice that of XLA's products and sums."""

import dataclasses
import functools

import calls
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxrnn
from jaxrnn import _bridge
from jaxrnn.kernel_vjp import chunks

pytestmark = pytest.mark.gpu


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem with arrays `[S, G, T, B, ...]`."""

    cell: str = "gru"
    dtype: str = "float32"
    S: int = 1
    G: int = 1
    T: int = 9
    B: int = 33
    D: int = 128
    H: int = 128
    resets: str | None = "bool"
    reverse: bool = False
    reset_state: str = "zeros"

    def __str__(self):
        sizes = ",".join(str(n) for n in (self.S, self.G, self.T, self.B, self.D, self.H))
        return f"{self.cell}-{self.dtype}-{sizes}-{self.resets}{'-reverse' * self.reverse}-{self.reset_state}"


CASES = [
    Case(cell, dtype, **options)
    for cell in ("gru", "lstm", "rms_norm_gru", "layer_norm_gru")
    for dtype in ("float32", "bfloat16", "float16")
    for options in (
        {},
        {"T": 64, "B": 64, "reverse": True},
        {"S": 3, "G": 5, "T": 17, "B": 3, "resets": "float32"},
        {"G": 40, "T": 100, "B": 1, "resets": None},  # batch-major
        {"G": 7, "T": 31, "B": 1, "reverse": True, "resets": "int32"},
        {"D": 64, "H": 192, "T": 40},
        {"D": 200, "H": 64, "S": 2},
        {"D": 256, "H": 256, "T": 128, "B": 64},
        {"T": 64, "B": 64, "reset_state": "fixed"},
        {"S": 3, "G": 5, "T": 17, "B": 3, "reset_state": "fixed", "reverse": True},
        {"S": 2, "T": 70, "B": 31, "reset_state": "stepped"},
        {"T": 1, "B": 4100},
        {"T": 4100, "B": 1},
        {"T": 1, "B": 1},
        {"S": 200, "T": 5, "B": 8},  # has more models than a GPU runs at once
    )
]


def make_arrays(case):
    rng = np.random.default_rng(0)
    lead, gates = (case.S, case.G, case.T, case.B), 4 if case.cell == "lstm" else 3
    shapes = {
        "x": (*lead, case.D), "hs": (*lead, case.H), "h0": (case.S, case.G, case.B, case.H),
        "dxp": (*lead, gates * case.H),
    }  # fmt: skip
    if case.cell == "gru":
        shapes["dhn"] = (*lead, case.H)
    if case.reset_state != "zeros":
        shapes["reset_h"] = shapes["h0" if case.reset_state == "fixed" else "hs"]
    arrays = {name: jnp.asarray(rng.normal(size=shape), case.dtype) for name, shape in shapes.items()}
    if "norm" in case.cell:
        arrays["scale"] = jnp.asarray(rng.uniform(0.5, 2.0, size=(*lead, 1)), jnp.float32)
    if case.cell == "layer_norm_gru":
        arrays["x_mean"] = jnp.asarray(rng.normal(size=(*lead, 1)), jnp.float32)
    if case.resets is not None:
        arrays["reset"] = jnp.asarray(rng.random(lead) < 0.1, case.resets)
    return arrays


def previous(case, hs, h0, reset, reset_h):
    """Returns the states before each step."""
    first = h0[:, :, None]
    parts = (hs[:, :, 1:], first) if case.reverse else (first, hs[:, :, :-1])
    before = np.concatenate(parts, axis=2)
    new = 0 if reset_h is None else reset_h[:, :, None] if case.reset_state == "fixed" else reset_h
    return before if reset is None else np.where((reset != 0)[..., None], new, before)


def grads(case, arrays, einsum):
    """Computes the gradients with `einsum`: `np.einsum` for float64, or `xla_einsum` for the dtype of the case."""
    names = ("hs", "h0", "reset", "reset_h")
    h = previous(case, *(None if x is None else np.asarray(x) for x in map(arrays.get, names)))
    x, dxp = arrays["x"], arrays["dxp"]
    hidden_grads = dxp
    if "dhn" in arrays:
        hidden_grads = np.concatenate([np.asarray(dxp)[..., : -case.H], np.asarray(arrays["dhn"])], axis=-1)
    ones = np.ones((*x.shape[:-1], 1), np.asarray(x).dtype)
    found = {
        "w_ih": einsum("sgtbx,sgtby->sxy", x, dxp),
        "w_hh": einsum("sgtbx,sgtby->sxy", h, hidden_grads),
        "bias": einsum("sgtbx,sgtby->sy", ones, dxp / arrays["scale"] if "scale" in arrays else dxp),
    }
    if "x_mean" in arrays:
        found["w_hh"] -= einsum("sgtbx,sgtby->sy", ones, arrays["x_mean"] * dxp)[:, None]
    if "dhn" in arrays:
        found["b_hn"] = einsum("sgtbx,sgtby->sy", ones, arrays["dhn"])
    return found


def xla_einsum(subscripts, x, y):
    if subscripts.endswith("sy"):
        return jnp.sum(y, axis=(1, 2, 3), dtype=jnp.float32)
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_match_float64(case):
    arrays = make_arrays(case)
    run = jax.jit(functools.partial(_bridge.launch_weight_grads, reverse=case.reverse))
    got, again = run(arrays), run(arrays)
    want = grads(case, {name: np.asarray(x, np.float64) for name, x in arrays.items()}, np.einsum)
    xla = grads(case, arrays, xla_einsum)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape and got[name].dtype == jnp.float32
        size = np.linalg.norm(want[name])
        error, allowed = (np.linalg.norm(np.asarray(x[name], np.float64) - want[name]) / size for x in (got, xla))
        # XLA may multiply small arrays in full float32; sums of many elements have rounding errors of float32
        floor = 4e-4 if case.dtype == "float32" and name.startswith("w_") else 2e-6
        assert error <= max(2 * allowed, floor), (name, error, allowed)
        np.testing.assert_array_equal(got[name], again[name], err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_and_infinity_propagate_to_gradients(dtype):
    """Checks NaN and infinity in each operand, and that they do not propagate from a state before a reset."""
    case = Case(dtype=dtype, T=64, B=64)
    arrays = {name: np.array(x, np.float32) for name, x in make_arrays(case).items()}
    clean = {**arrays, "reset": np.zeros_like(arrays["reset"])}
    clean["reset"][0, 0, 5, 7] = 1

    def run(**changes):
        given = {k: jnp.asarray(x, bool if k == "reset" else dtype) for k, x in (clean | changes).items()}
        return {k: np.asarray(x) for k, x in _bridge.launch_weight_grads(given, reverse=False).items()}

    for bits in (0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0x7F800000, 0xFF800000):  # NaNs and infinities of arithmetic
        number = np.array(bits, np.uint32).view(np.float32)
        x = clean["x"].copy()
        x[0, 0, 3, 4, 5] = number
        got = run(x=x)
        assert not np.isfinite(got["w_ih"][0, 5]).any() and np.isfinite(np.delete(got["w_ih"], 5, axis=1)).all()
        assert np.isfinite(got["w_hh"]).all()
        dxp = clean["dxp"].copy()
        dxp[0, 0, 3, 4, 6] = number
        got = run(dxp=dxp)
        assert not np.isfinite(got["w_ih"][0, :, 6]).any() and not np.isfinite(got["bias"][0, 6])
        dhn = clean["dhn"].copy()
        dhn[0, 0, 3, 4, 6] = number
        got = run(dhn=dhn)
        assert not np.isfinite(got["w_hh"][0, :, -case.H + 6]).any() and not np.isfinite(got["b_hn"][0, 6])
        assert np.isfinite(got["w_ih"]).all()
        h0 = clean["h0"].copy()
        h0[0, 0, 4, 5] = number
        assert not np.isfinite(run(h0=h0)["w_hh"][0, 5]).any()
        hs = clean["hs"].copy()
        hs[0, 0, 4, 7] = number  # the reset at step 5 discards this state
        assert all(np.isfinite(x).all() for x in run(hs=hs).values())


def make_layer(cell, dtype, T=256, B=256, D=128, H=128, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, dtype)  # noqa: E731
    if cell == "gru":
        params, carry = jaxrnn.GRUParams(draw(D, 3 * H), draw(H, 3 * H), draw(1, 3 * H)[0], draw(1, H)[0]), draw(B, H)
    elif cell == "norm_gru":
        params, carry = jaxrnn.NormGRUParams(draw(D, 3 * H), draw(H, 3 * H), draw(1, 3 * H)[0]), draw(B, H)
    else:
        params, carry = jaxrnn.LSTMParams(draw(D, 4 * H), draw(H, 4 * H), draw(1, 4 * H)[0]), (draw(B, H), draw(B, H))
    return params, carry, draw(T, B, D), jnp.asarray(rng.random((T, B)) < 0.05)


def loss(cell, implementation, params, carry, xs, resets, **options):
    run = {"gru": jaxrnn.gru, "lstm": jaxrnn.lstm, "norm_gru": functools.partial(jaxrnn.norm_gru, norm="layer")}[cell]
    _, ys = run(params, carry, xs, resets=resets, implementation=implementation, **options)
    return jnp.sum(jnp.sin(ys.astype(jnp.promote_types(ys.dtype, jnp.float32))))


@pytest.fixture(autouse=True)
def launch_wherever_supported(monkeypatch):
    """Makes every device use the launch, also one on which XLA is faster."""
    from torch_bridge import weight_grads

    monkeypatch.setattr(weight_grads, "is_profitable", weight_grads.supports)


def is_used(function, *arguments):
    return "kind=weight_grads" in str(jax.make_jaxpr(function)(*arguments))


def check(make_grad, arguments):
    """Checks that the launch computes the gradients of weights, with at most twice XLA's error."""
    found = {}
    for implementation in ("triton", "xla"):
        grad = make_grad(implementation)
        assert is_used(grad, *arguments) == (implementation == "triton")
        found[implementation] = jax.device_get(jax.jit(grad)(*arguments))
    widen = lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    with jax.enable_x64(True):
        want = jax.device_get(jax.jit(make_grad("xla"))(*jax.tree.map(widen, arguments)))
    for name, got, xla, exact in zip(want._fields, found["triton"], found["xla"], want, strict=True):
        if exact is not None:
            error, allowed = (np.linalg.norm(np.asarray(x, np.float64) - exact) for x in (got, xla))
            assert error <= 2 * allowed + 1e-6 * np.linalg.norm(exact), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cell", ["gru", "lstm", "norm_gru"])
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"time_major": False}], ids=str)
@pytest.mark.parametrize("reset_state", [None, "[H]", "[B, H]", "[T, B, H]"])
def test_layers_use_the_launch(cell, dtype, options, reset_state):
    """Checks the gradients of a layer for each way to call it: forward, reverse and batch-major."""
    params, carry, xs, resets = make_layer(cell, dtype)
    if reset_state:
        (steps, batch), hidden = resets.shape, 128
        shape = {"[H]": (hidden,), "[B, H]": (batch, hidden), "[T, B, H]": (steps, batch, hidden)}[reset_state]
        new = jnp.asarray(np.random.default_rng(5).normal(size=shape), dtype)
        if len(shape) == 3 and not options.get("time_major", True):
            new = new.swapaxes(0, 1)
        options = options | {"reset_state": (new, new) if cell == "lstm" else new}
    if not options.get("time_major", True):
        xs, resets = xs.swapaxes(0, 1), resets.T

    def make_grad(implementation):
        return jax.grad(functools.partial(loss, cell, implementation, **options))

    check(make_grad, (params, carry, xs, resets))


@pytest.mark.parametrize("cell", ["gru", "lstm", "norm_gru"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("reset_state", [None, (128,), (256, 256, 128)], ids=str)
def test_every_chunk_of_remat_uses_the_launch(cell, reverse, reset_state, monkeypatch):
    options = {"remat": True, "reverse": reverse}
    if reset_state:
        new = jnp.asarray(np.random.default_rng(5).normal(size=reset_state), jnp.float32)
        options["reset_state"] = (new, new) if cell == "lstm" else new
    monkeypatch.setattr(chunks, "_CHUNK_BYTES", 0)
    monkeypatch.setattr(chunks, "_CHUNK_STEPS", 64)

    def make_grad(implementation):
        return jax.grad(functools.partial(loss, cell, implementation, **options))

    check(make_grad, make_layer(cell, "float32"))


@pytest.mark.parametrize("shared", [(), (0,), (2, 3)], ids=["nothing shared", "weights shared", "inputs shared"])
@pytest.mark.parametrize("cell", ["gru", "lstm", "norm_gru"])
def test_vmap_uses_the_launch(cell, shared):
    models = [make_layer(cell, "float32", T=128, seed=seed) for seed in range(3)]
    axes = tuple(None if i in shared else 0 for i in range(4))
    stacked = [
        models[0][i] if i in shared else jax.tree.map(lambda *x: jnp.stack(x), *(m[i] for m in models))
        for i in range(4)
    ]

    def make_grad(implementation):
        return jax.vmap(jax.grad(functools.partial(loss, cell, implementation)), axes)

    check(make_grad, stacked)


@pytest.mark.parametrize(
    "options",
    [{"precision": "highest"}, {"precision": "high"}],
    ids=str,
)
def test_precise_products_use_xla(options):
    layer = make_layer("gru", "float32")
    assert is_used(jax.grad(functools.partial(loss, "gru", "triton")), *layer)
    assert not is_used(jax.grad(functools.partial(loss, "gru", "triton", **options)), *layer)


def test_both_directions_in_one_launch_use_xla():
    params, carry, xs, resets = make_layer("gru", "float32")

    def both(params):
        run = functools.partial(calls.run_bidirectional, "gru", implementation="triton")
        (_, forward), (_, backward) = run((params, params), (carry, carry), xs, resets=(resets, resets))
        return jnp.sum(forward + backward)

    assert not is_used(jax.grad(both), params)


def test_lstm_projection_uses_the_launch():
    params, (c, h), xs, resets = make_layer("lstm", "float32")
    w_hr = jnp.asarray(np.random.default_rng(1).normal(size=(128, 64)) / 128**0.5, jnp.float32)
    params = params._replace(w_hh=params.w_hh[:64], w_hr=w_hr)
    check(
        lambda implementation: jax.grad(functools.partial(loss, "lstm", implementation)),
        (params, (c, h[:, :64]), xs, resets),
    )


@pytest.mark.several_gpus
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_two_devices_add_up_their_sums(cell, axis_type):
    """Checks that each device sums over its own sequences, and that the sums are added up over devices."""
    params, carry, xs, resets = make_layer(cell, "float32", B=512, T=128)
    grad = jax.jit(jax.grad(functools.partial(loss, cell, "triton")))
    want = grad(params, carry, xs, resets)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
        arguments = (
            jax.tree.map(put, params), jax.tree.map(lambda x: put(x, "data"), carry), put(xs, None, "data"),
            put(resets, None, "data"),
        )  # fmt: skip
        text = grad.lower(*arguments).compile().as_text()
        got = grad(*arguments)
    assert "all-gather" not in text and "all-reduce" in text
    for name, x, y in zip(want._fields, jax.device_get(got), want, strict=True):
        if y is not None:  # the products are the same, but are added up in another order
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3 * np.abs(y).max(), err_msg=name)
