"""Tests that the modules of other frameworks agree with the functions of `jaxrnn` on weights converted either way."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jaxrnn
from jaxrnn import GRUParams, LSTMParams, MGUParams, SimpleParams, convert
from jaxrnn.cells import CELLS

T, B, D, H = 6, 3, 4, 5
KINDS = {"gru": GRUParams, "lstm": LSTMParams, "mgu": MGUParams, "simple": SimpleParams}
FUNCTIONS = {"gru": jaxrnn.gru, "lstm": jaxrnn.lstm, "mgu": jaxrnn.mgu, "simple": jaxrnn.simple_rnn}


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def torch():
    import torch

    return torch


@pytest.fixture(scope="module")
def equinox():
    import equinox

    return equinox


@pytest.fixture(scope="module")
def haiku():
    import haiku

    return haiku


@pytest.fixture(scope="module")
def keras(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "jax")
        patch.setenv("KERAS_HOME", str(tmp_path_factory.mktemp("keras")))
        import keras
    assert keras.backend.backend() == "jax"
    return keras


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def make_params(cell, D=D, H=H, dtype=jnp.float32):
    shapes = CELLS["simple_tanh" if cell == "simple" else cell].shapes(D, H)
    return KINDS[cell](**{name: jnp.asarray(0.5 * draw(i, *shapes[name]), dtype) for i, name in enumerate(shapes)})


def randomized(tree, seed=7):
    """Returns the tree with random float32 values in all arrays, biases too."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(jnp.asarray(0.5 * draw(seed + i, *x.shape)) for i, x in enumerate(leaves))


XS = draw(100, T, B, D)


def run(params, xs=XS, **options):
    """Returns the outputs `[T, B, H]`; the initial states are zeros."""
    zeros = jnp.zeros((xs.shape[1], params.w_hh.shape[0]), params.w_hh.dtype)
    (cell,) = (cell for cell, kind in KINDS.items() if type(params) is kind)
    carry = (zeros, zeros) if cell == "lstm" else zeros
    return FUNCTIONS[cell](params, carry, jnp.asarray(xs), implementation="xla", **options)[1]


def agree(got, want, atol=2e-6):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == want.shape
    assert np.abs(want).max() > 0.1, "outputs near zero prove nothing"
    np.testing.assert_allclose(got, want, rtol=0, atol=atol * max(1, np.abs(want).max()))  # relu has no upper bound


def same_bits(got, want):
    assert type(got) is type(want)
    assert jax.tree.structure(got) == jax.tree.structure(want)  # includes whether an LSTM has a projection
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# PyTorch

TORCH = {"gru": "GRU", "lstm": "LSTM", "simple": "RNN"}


def torch_module(torch, cell, *args, **options):
    torch.manual_seed(0)
    return getattr(torch.nn, TORCH[cell])(*args, **options)


def torch_outputs(torch, module, xs=XS):
    with torch.no_grad():
        return module(torch.from_numpy(xs))[0].numpy()


def load_torch(torch, module, arrays):
    module.load_state_dict({name: torch.from_numpy(x) for name, x in arrays.items()})
    return module


@pytest.mark.quick("cell")
@pytest.mark.torch
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("cell", TORCH)
def test_from_torch(torch, cell, bias):
    module = torch_module(torch, cell, D, H, bias=bias)
    params = convert.from_torch(module)
    assert type(params) is KINDS[cell]
    agree(run(params), torch_outputs(torch, module))
    same_bits(convert.from_torch(module.state_dict()), params)
    arrays = {name: x.numpy() for name, x in module.state_dict().items()}
    same_bits(convert.from_torch(arrays), params)
    assert bias or not np.any(params[-1])


@pytest.mark.quick("cell")
@pytest.mark.torch
@pytest.mark.parametrize("cell", TORCH)
def test_to_torch(torch, cell):
    params = make_params(cell)
    module = load_torch(torch, torch_module(torch, cell, D, H), convert.to_torch(params))
    agree(torch_outputs(torch, module), run(params))
    same_bits(convert.from_torch(module), params)


@pytest.mark.torch
@pytest.mark.parametrize("cell", TORCH)
def test_torch_layers_and_directions_convert_separately(torch, cell):
    module = torch_module(torch, cell, D, H, num_layers=2, bidirectional=True)
    packed, xs = {}, XS
    for layer in (0, 1):
        both = [convert.from_torch(module, layer=layer, reverse=reverse) for reverse in (False, True)]
        xs = jnp.concatenate([run(params, xs, reverse=i == 1) for i, params in enumerate(both)], axis=-1)
        for reverse, params in zip((False, True), both, strict=True):
            packed |= convert.to_torch(params, layer=layer, reverse=reverse)
    want = torch_outputs(torch, module)
    agree(xs, want)
    other = load_torch(torch, torch_module(torch, cell, D, H, num_layers=2, bidirectional=True), packed)
    agree(torch_outputs(torch, other), want)


@pytest.mark.torch
@pytest.mark.parametrize("cell", TORCH)
def test_torch_cells(torch, cell):
    torch.manual_seed(1)
    module = getattr(torch.nn, f"{TORCH[cell]}Cell")(D, H)

    def step():
        with torch.no_grad():
            h = module(torch.from_numpy(XS[0]))
            return (h[0] if cell == "lstm" else h).numpy()

    agree(run(convert.from_torch(module), XS[:1])[0], step())
    params = make_params(cell)
    load_torch(torch, module, convert.to_torch(params, layer=None))
    agree(step(), run(params, XS[:1])[0])
    same_bits(convert.from_torch(module), params)


@pytest.mark.torch
def test_torch_rnn_with_relu(torch):
    module = torch_module(torch, "simple", D, H, nonlinearity="relu")
    agree(run(convert.from_torch(module), activation=module.nonlinearity), torch_outputs(torch, module))


@pytest.mark.torch
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_mgu_of_torch_bridge(torch, bias, blocks):
    from torch_bridge.nn import MGU

    torch.manual_seed(0)
    options = {"num_layers": 2, "bidirectional": True, "num_blocks": blocks}
    module, xs, arrays = MGU(D, 6, bias=bias, **options), jnp.asarray(XS), {}
    for layer in range(2):
        both = [convert.from_torch(module, layer=layer, reverse=reverse, into=MGUParams) for reverse in (False, True)]
        assert both[0].w_hh.shape == ((6, 12) if blocks == 1 else (2, 3, 6))
        runs = [
            jaxrnn.mgu(one, jnp.zeros((B, 6)), xs, reverse=reverse, implementation="xla")[1]
            for reverse, one in enumerate(both)
        ]
        xs = jnp.concatenate(runs, axis=-1)
        for reverse, one in enumerate(both):
            arrays |= convert.to_torch(one, layer=layer, reverse=bool(reverse))
    want = torch_outputs(torch, module)
    agree(xs, want)
    other = load_torch(torch, MGU(D, 6, **options), arrays)
    agree(torch_outputs(torch, other), want)
    same_bits(convert.from_torch(other.state_dict(), layer=1, reverse=True), both[1])


@pytest.mark.torch
def test_torch_prefix_selects_a_submodule(torch):
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(H, 2), "rnn": torch.nn.GRU(D, H)})
    want = convert.from_torch(model["rnn"])
    same_bits(convert.from_torch(model.state_dict(), prefix="rnn."), want)
    same_bits(convert.from_torch(convert.to_torch(want, prefix="a.b."), prefix="a.b."), want)
    with pytest.raises(ValueError, match=r"head\.weight.*prefix='rnn\.'"):
        convert.from_torch(model)


@pytest.mark.torch
@pytest.mark.parametrize("cell", TORCH)
def test_torch_bfloat16_keeps_its_bits(torch, cell):
    module = torch_module(torch, cell, D, H, dtype=torch.bfloat16)
    params = convert.from_torch(module)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    w_ih = module.weight_ih_l0.detach().view(torch.int16).numpy()
    np.testing.assert_array_equal(np.asarray(params.w_ih).view(np.int16).T, w_ih)
    arrays = convert.to_torch(params)
    np.testing.assert_array_equal(arrays["weight_ih_l0"].view(np.int16), w_ih)
    other = torch_module(torch, cell, D, H, dtype=torch.bfloat16)
    load_torch(torch, other, {name: x.astype("float32") for name, x in arrays.items()})
    same_bits(convert.from_torch(other), params)


@pytest.mark.torch
def test_torch_float64_is_kept_or_refused(torch):
    module = torch.nn.GRU(D, H, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"weight_ih_l0 is float64.*jax_enable_x64"):
        convert.from_torch(module)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        params = convert.from_torch(module)
        assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float64)}
        arrays = convert.to_torch(params)
    np.testing.assert_array_equal(arrays["weight_hh_l0"], module.weight_hh_l0.detach().numpy())


@pytest.mark.torch
def test_torch_and_jax_share_no_memory(torch):
    module = torch.nn.LSTM(D, 64)
    params = convert.from_torch(module)
    before = jax.tree.map(np.array, params)
    arrays = convert.to_torch(params)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(7.0)
    for x in arrays.values():
        x[...] = 9.0
    same_bits(jax.tree.map(np.asarray, params), before)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_torch_projection(torch):
    module = torch_module(torch, "lstm", D, H, proj_size=2)
    params = convert.from_torch(module)
    assert params.w_hr.shape == (H, 2)
    carry = jnp.zeros((XS.shape[1], H)), jnp.zeros((XS.shape[1], 2))
    _, ys = jaxrnn.lstm(params, carry, XS, precision="highest")
    agree(ys, torch_outputs(torch, module))
    back, state = convert.to_torch(params), module.state_dict()
    assert back.keys() == state.keys()
    np.testing.assert_array_equal(back["weight_hr_l0"], state["weight_hr_l0"].numpy())
    np.testing.assert_array_equal(back["weight_hh_l0"], state["weight_hh_l0"].numpy())
    with pytest.raises(ValueError, match=r"weight_hh_l0 must be"):
        convert.from_torch(state | {"weight_hh_l0": torch.zeros(4 * H, H)})
    with pytest.raises(ValueError, match=r"params.w_hr must be a matrix, got \(5,\)"):
        convert.to_torch(params._replace(w_hr=jnp.zeros(5)))
    for other in (convert.to_linen, convert.to_equinox, convert.to_keras, convert.to_haiku):
        with pytest.raises(ValueError, match=r"cannot convert a projection, params.w_hr"):
            other(params)


@pytest.mark.torch
def test_torch_rejects_what_it_cannot_convert(torch):
    both, deep = torch.nn.GRU(D, H, bidirectional=True), torch.nn.LSTM(D, H, num_layers=3)
    with pytest.raises(ValueError, match=r"bidirectional.*reverse=False or True"):
        convert.from_torch(both)
    with pytest.raises(ValueError, match=r"3 layers.*layer=0 to layer=2"):
        convert.from_torch(deep)
    with pytest.raises(ValueError, match=r"no weights for layer=3"):
        convert.from_torch(deep, layer=3)
    with pytest.raises(ValueError, match=r"no weights for layer=None, reverse=True"):
        convert.from_torch(torch.nn.GRU(D, H), reverse=True)
    with pytest.raises(
        ValueError, match=r"weight_hh must be \[3H, H\] \(GRU\).* or \[H, H\] \(simple cell\), got \(25, 5\)"
    ):
        convert.from_torch({"weight_ih": torch.zeros(5 * H, D), "weight_hh": torch.zeros(5 * H, H)})
    with pytest.raises(ValueError, match=r"source must have weight_ih_l0.*got weight, bias; pass a torch"):
        convert.from_torch(torch.nn.Linear(D, H))
    with pytest.raises(ValueError, match=r"source must be a module or its state dict, got a list of 2"):
        convert.from_torch([1, 2])
    state = torch.nn.GRU(D, H).state_dict()
    with pytest.raises(ValueError, match=r"no bias_hh_l0"):
        convert.from_torch({name: x for name, x in state.items() if name != "bias_hh_l0"})
    with pytest.raises(ValueError, match=r"bias_ih_l0 must be \(15,\).*got \(16,\)"):
        convert.from_torch(state | {"bias_ih_l0": torch.zeros(16)})
    with pytest.raises(ValueError, match=r"weight_ih_l0 must be \(15, 4\).*got \(20, 4\)"):
        convert.from_torch(state | {"weight_ih_l0": torch.zeros(20, 4)})
    with pytest.raises(ValueError, match=r"weight_ih_l0 must be floating point, got int8"):
        convert.from_torch(state | {"weight_ih_l0": torch.zeros(15, 4, dtype=torch.int8)})
    with pytest.raises(ValueError, match=r"have no direction"):
        convert.to_torch(make_params("gru"), layer=None, reverse=True)


# Flax

LINEN = {
    "GRUCell": "gru",
    "LSTMCell": "lstm",
    "OptimizedLSTMCell": "lstm",
    "MGUCell": "mgu",
    "SimpleCell": "simple",
}


@pytest.mark.quick("name")
@pytest.mark.parametrize("name", LINEN)
def test_linen(name):
    rnn = linen.RNN(getattr(linen, name)(H), time_major=True)
    variables = randomized(rnn.init(jax.random.key(0), XS))
    params = convert.from_linen(variables["params"]["cell"])
    agree(run(params), rnn.apply(variables, XS))
    same_bits(convert.from_linen({"params": variables["params"]["cell"]}), params)
    same_bits(convert.from_linen({"params": variables["params"]["cell"], "intermediates": {}}), params)

    params = make_params(LINEN[name])
    tree = convert.to_linen(params)
    assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, variables["params"]["cell"])
    agree(rnn.apply({"params": {"cell": tree}}, XS), run(params))
    same_bits(convert.from_linen(tree), params)


def test_linen_under_jit_grad_and_vmap():
    trees = jax.tree.map(lambda *x: jnp.stack(x), *(convert.to_linen(make_params("gru")) for _ in range(2)))
    trees = randomized(trees)

    def loss(params):
        return jnp.sum(run(params) ** 2)

    rnn = linen.RNN(linen.GRUCell(H), time_major=True)
    got = jax.jit(jax.vmap(jax.grad(lambda tree: loss(convert.from_linen(tree)))))(trees)
    want = jax.vmap(jax.grad(lambda tree: jnp.sum(rnn.apply({"params": {"cell": tree}}, XS) ** 2)))(trees)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def test_linen_accepts_boxed_parameters_and_rejects_other_cells():
    tree = convert.to_linen(make_params("gru"))
    boxed = jax.tree.map(lambda x: linen.Partitioned(x, names=(None,) * x.ndim), tree)
    same_bits(convert.from_linen(boxed), convert.from_linen(tree))

    cell = linen.ConvLSTMCell(H, kernel_size=(3,))
    images = jnp.ones((B, 8, D))
    variables = cell.init(jax.random.key(0), cell.initialize_carry(jax.random.key(1), images.shape), images)
    with pytest.raises(
        ValueError, match=r"from_linen: tree must be the parameters of a GRUCell.* or of a SimpleCell \(i, h\), got"
    ):
        convert.from_linen(variables)
    with pytest.raises(ValueError, match=r"got cell; pass its part \['cell'\]$"):
        convert.from_linen({"params": {"cell": tree}})
    with pytest.raises(ValueError, match=r"hz\.kernel must be \(5, 5\).*got \(4, 5\)"):
        convert.from_linen(tree | {"hz": tree["iz"]})
    with pytest.raises(ValueError, match=r"in must have a kernel and may have a bias, got kernel, scale"):
        convert.from_linen(tree | {"in": {"kernel": tree["in"]["kernel"], "scale": 1}})
    with pytest.raises(ValueError, match=r"in has no kernel, only bias"):
        convert.from_linen(tree | {"in": {"bias": tree["in"]["bias"]}})


def test_linen_simple_cell_with_relu():
    rnn = linen.RNN(linen.SimpleCell(H, activation_fn=linen.relu), time_major=True)
    variables = randomized(rnn.init(jax.random.key(0), XS))
    agree(run(convert.from_linen(variables["params"]["cell"]), activation="relu"), rnn.apply(variables, XS))


def test_linen_mgu_without_reset_gate_is_another_formula():
    cell = linen.MGUCell(H, reset_gate=False)
    variables = cell.init(jax.random.key(0), jnp.zeros((B, H)), XS[0])
    with pytest.raises(
        ValueError, match=r"hn has no bias, so this is an MGUCell with reset_gate=False.*cannot be conv"
    ):
        convert.from_linen(variables)


def nnx_outputs(cell):
    zeros = jnp.zeros((B, H))
    carry, ys = zeros if isinstance(cell, (nnx.GRUCell, nnx.SimpleCell)) else (zeros, zeros), []
    for x in XS:
        carry, y = cell(carry, jnp.asarray(x))
        ys.append(y)
    return jnp.stack(ys)


class GRUCellWithBias(nnx.GRUCell):
    """Flax's cell as flax#5595 proposes it, with b_hn as a separate parameter."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.hn_bias = nnx.Param(jnp.zeros(self.hidden_features))

    def __call__(self, carry, inputs):
        x_r, x_z, x_n = jnp.split(self.dense_i(inputs), 3, axis=-1)
        h_r, h_z, h_n = jnp.split(self.dense_h(carry), 3, axis=-1)
        r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
        n = jnp.tanh(x_n + r * (h_n + self.hn_bias[...]))
        h = (1 - z) * n + z * carry
        return h, h


NNX = {
    nnx.GRUCell: "gru",
    GRUCellWithBias: "gru",
    nnx.LSTMCell: "lstm",
    nnx.OptimizedLSTMCell: "lstm",
    nnx.SimpleCell: "simple",
}


@pytest.mark.quick("make")
@pytest.mark.parametrize("make", NNX, ids=lambda make: make.__name__)
def test_nnx(make):
    cell = make(D, H, rngs=nnx.Rngs(0))
    nnx.update(cell, randomized(nnx.state(cell)))
    params = convert.from_nnx(cell)
    agree(run(params), nnx_outputs(cell))
    same_bits(convert.from_nnx(nnx.state(cell)), params)
    same_bits(convert.from_nnx(nnx.to_pure_dict(nnx.state(cell))), params)

    params = make_params(NNX[make])
    if make is nnx.GRUCell:
        for given in (cell, nnx.state(cell), "GRUCell"):
            with pytest.raises(ValueError, match=r"b_hn is not zero.*Linen's GRUCell can"):
                convert.to_nnx(params, given)
        with pytest.raises(ValueError, match=r"inside jit"):
            jax.jit(lambda params: convert.to_nnx(params, "GRUCell"))(params)
        params = params._replace(b_hn=jnp.zeros(H))
        assert jax.tree.all(
            jax.tree.map(jnp.array_equal, convert.to_nnx(params, cell), convert.to_nnx(params, "GRUCell"))
        )
    nnx.update(cell, convert.to_nnx(params, nnx.state(cell)))
    agree(nnx_outputs(cell), run(params))
    same_bits(convert.from_nnx(cell), params)
    if make in (nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.SimpleCell):
        tree = convert.to_nnx(params, make.__name__)
        assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(cell)))


@pytest.mark.parametrize("make", [nnx.GRUCell, nnx.SimpleCell], ids=lambda make: make.__name__)
def test_nnx_supports_a_bias_of_the_recurrent_layer(make):
    cell = make(D, H, rngs=nnx.Rngs(0))
    cell.dense_h = nnx.Linear(H, cell.dense_h.out_features, rngs=nnx.Rngs(1))
    nnx.update(cell, randomized(nnx.state(cell)))
    agree(run(convert.from_nnx(cell)), nnx_outputs(cell))
    params = make_params(NNX[make])
    nnx.update(cell, convert.to_nnx(params, cell))
    agree(nnx_outputs(cell), run(params))


def test_nnx_simple_cell_with_relu():
    cell = nnx.SimpleCell(D, H, activation_fn=nnx.relu, rngs=nnx.Rngs(0))
    nnx.update(cell, randomized(nnx.state(cell)))
    params = convert.from_nnx(cell)
    agree(run(params, activation="relu"), nnx_outputs(cell))
    same_bits(convert.from_nnx(convert.to_nnx(params, cell)), params)


@pytest.mark.parametrize(
    ("cell", "layer"), [("GRUCell", "dense_h"), ("OptimizedLSTMCell", "dense_i"), ("LSTMCell", "hg")]
)
def test_a_layer_of_nnx_with_its_own_product_is_another_formula(cell, layer):
    cell = getattr(nnx, cell)(D, H, rngs=nnx.Rngs(0))
    params = convert.from_nnx(cell)
    getattr(cell, layer).dot_general = lambda *args, **options: 0.5 * jax.lax.dot_general(*args, **options)
    with pytest.raises(ValueError, match=f"from_nnx: {layer} of the {type(cell).__name__} has its own dot_general"):
        convert.from_nnx(cell)
    with pytest.raises(ValueError, match=f"to_nnx: {layer} of the {type(cell).__name__} has its own dot_general"):
        convert.to_nnx(params, cell)


def test_nnx_residual_is_another_formula():
    cell = nnx.SimpleCell(D, H, residual=True, rngs=nnx.Rngs(0))
    nnx.update(cell, randomized(nnx.state(cell)))
    want = nnx_outputs(cell)
    with pytest.raises(ValueError, match=r"from_nnx: the SimpleCell has residual=True, .* add the identity matrix"):
        convert.from_nnx(cell)
    with pytest.raises(ValueError, match=r"to_nnx: the SimpleCell has residual=True"):
        convert.to_nnx(make_params("simple"), cell)
    cell.residual = False
    cell.dense_h.kernel[...] += jnp.eye(H)
    agree(run(convert.from_nnx(cell)), want)


def test_nnx_rejects_what_it_cannot_convert():
    rngs = nnx.Rngs(0)
    with pytest.raises(ValueError, match=r"gate_fn is 'hard_sigmoid', but jaxrnn's cells use sigmoid"):
        convert.from_nnx(nnx.GRUCell(D, H, gate_fn=jax.nn.hard_sigmoid, rngs=rngs))
    with pytest.raises(ValueError, match=r"activation_fn is 'relu', but jaxrnn's cells use tanh"):
        convert.from_nnx(nnx.OptimizedLSTMCell(D, H, activation_fn=jax.nn.relu, rngs=rngs))
    same = nnx.GRUCell(D, H, gate_fn=lambda x: 0.5 + 0.5 * jnp.tanh(0.5 * x), rngs=rngs)
    assert isinstance(convert.from_nnx(same), GRUParams)
    for activation in (jax.nn.sigmoid, jax.nn.relu6, jax.nn.leaky_relu):
        simple = nnx.SimpleCell(D, H, activation_fn=activation, rngs=rngs)
        with pytest.raises(ValueError, match=rf"{activation.__name__}', but jaxrnn's cells use tanh or relu"):
            convert.from_nnx(simple)
        with pytest.raises(ValueError, match=rf"{activation.__name__}', but jaxrnn's cells use tanh or relu"):
            convert.to_nnx(make_params("simple"), simple)
    with pytest.raises(ValueError, match=r"dense_h\.kernel must be \[H, 3H\] \(GRU\).*got \(5, 10\)"):
        convert.from_nnx({"dense_i": {"kernel": jnp.zeros((D, 2 * H))}, "dense_h": {"kernel": jnp.zeros((H, 2 * H))}})
    with pytest.raises(ValueError, match=r"got a RNN with"):
        convert.from_nnx(nnx.RNN(nnx.GRUCell(D, H, rngs=rngs), rngs=rngs))
    cell = nnx.GRUCell(D, H, rngs=rngs)
    with pytest.raises(ValueError, match=r"dense_h\.kernel is \(5, 15\) there, \(5, 20\) here"):
        convert.to_nnx(make_params("lstm"), cell)
    with pytest.raises(ValueError, match=r"dense_i\.kernel is \(4, 15\) there, \(7, 15\) here"):
        convert.to_nnx(make_params("gru", D=7)._replace(b_hn=jnp.zeros(H)), cell)
    with pytest.raises(ValueError, match=r"LSTMParams are for LSTMCell or OptimizedLSTMCell, got 'GRUCell'"):
        convert.to_nnx(make_params("lstm"), "GRUCell")
    with pytest.raises(ValueError, match=r"GRUParams are for GRUCell, got a LSTMCell with"):
        convert.to_nnx(make_params("gru"), nnx.LSTMCell(D, H, rngs=rngs))


# Equinox


def equinox_outputs(cell, hidden):
    def one(xs):
        zeros = jnp.zeros(hidden)
        carry, ys = zeros if hasattr(cell, "bias_n") else (zeros, zeros), []
        for x in xs:
            carry = cell(x, carry)
            ys.append(carry if hasattr(cell, "bias_n") else carry[0])
        return jnp.stack(ys)

    return jax.vmap(one, in_axes=1, out_axes=1)(jnp.asarray(XS))


@pytest.mark.quick("cell")
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize(("cell", "name"), [("gru", "GRUCell"), ("lstm", "LSTMCell")])
def test_equinox(equinox, cell, name, use_bias):
    module = getattr(equinox.nn, name)(D, H, use_bias=use_bias, key=jax.random.key(0))
    params = convert.from_equinox(module)
    assert type(params) is KINDS[cell]
    agree(run(params), equinox_outputs(module, H))
    if use_bias:
        params = make_params(cell)
        arrays = convert.to_equinox(params)
        same_bits(convert.from_equinox(arrays), params)
        module = equinox.tree_at(lambda m: [getattr(m, name) for name in arrays], module, list(arrays.values()))
        agree(equinox_outputs(module, H), run(params))
        same_bits(convert.from_equinox(module), params)


def test_equinox_rejects_what_it_cannot_convert(equinox):
    with pytest.raises(ValueError, match=r"from_equinox: no weight_ih, weight_hh in a Linear"):
        convert.from_equinox(equinox.nn.Linear(D, H, key=jax.random.key(0)))
    arrays = convert.to_equinox(make_params("gru"))
    with pytest.raises(ValueError, match=r"bias_n must be \(5,\).*got \(4,\)"):
        convert.from_equinox(arrays | {"bias_n": jnp.zeros(4)})
    with pytest.raises(ValueError, match=r"such a cell has no bias_n"):
        convert.from_equinox(convert.to_equinox(make_params("lstm")) | {"bias_n": jnp.zeros(H)})


# Haiku


def haiku_unrolled(haiku, make):
    def forward(xs):
        core = make(H)
        return haiku.static_unroll(core, xs, core.initial_state(xs.shape[1]))[0]

    return haiku.without_apply_rng(haiku.transform(forward))


@pytest.mark.quick
def test_haiku(haiku):
    net = haiku_unrolled(haiku, haiku.LSTM)
    weights = randomized(net.init(jax.random.key(0), XS))
    params = convert.from_haiku(weights)
    agree(run(params), net.apply(weights, XS))
    same_bits(convert.from_haiku(weights["lstm/linear"]), params)

    params = make_params("lstm")
    weights = {"lstm/linear": convert.to_haiku(params)}
    agree(net.apply(weights, XS), run(params))
    back = convert.from_haiku(weights)
    same_bits(back._replace(b=params.b), params)
    np.testing.assert_allclose(back.b, params.b, rtol=0, atol=2e-7)  # 1 is subtracted and added again, which rounds


@pytest.mark.parametrize("double_bias", [True, False])
def test_haiku_vanilla_rnn(haiku, double_bias):
    net = haiku_unrolled(haiku, functools.partial(haiku.VanillaRNN, double_bias=double_bias))
    weights = randomized(net.init(jax.random.key(0), XS))
    params = convert.from_haiku(weights)
    agree(run(params, activation="relu"), net.apply(weights, XS))
    same_bits(convert.from_haiku(dict(reversed(weights.items()))), params)

    params = make_params("simple")
    layers = convert.to_haiku(params)
    agree(net.apply({f"vanilla_rnn/{name}": x for name, x in layers.items()}, XS), run(params, activation="relu"))
    same_bits(convert.from_haiku(layers), params)


def test_haiku_rejects_what_it_cannot_convert(haiku):
    with pytest.raises(ValueError, match=r"hk.GRU applies the reset gate before the matrix product"):
        convert.from_haiku(haiku_unrolled(haiku, haiku.GRU).init(jax.random.key(0), XS))
    with pytest.raises(ValueError, match=r"hk.GRU applies the reset gate before the matrix product"):
        convert.to_haiku(make_params("gru"))
    weights = convert.to_haiku(make_params("lstm"))
    with pytest.raises(ValueError, match=r"w and b.*got one/linear, two/linear"):
        convert.from_haiku({"one/linear": weights, "two/linear": weights})
    with pytest.raises(ValueError, match=r"w of an hk.LSTM is \[D \+ H, 4H\], got \(9, 18\)"):
        convert.from_haiku(weights | {"w": jnp.zeros((9, 18))})
    with pytest.raises(ValueError, match=r"b must be \(20,\).*got \(5,\)"):
        convert.from_haiku(weights | {"b": jnp.zeros(5)})
    layers = convert.to_haiku(make_params("simple"))
    with pytest.raises(ValueError, match=r"linear_1\.w must be \[H, H\] \(simple cell\), got \(4, 5\)"):
        convert.from_haiku(layers | {"linear_1": layers["linear"]})
    with pytest.raises(ValueError, match=r"no linear_1\.w in linear\.w, linear\.b, linear_1\.b"):
        convert.from_haiku(layers | {"linear_1": {"b": jnp.zeros(H)}})
    with pytest.raises(ValueError, match=r"got a/linear, b/linear_1"):
        convert.from_haiku({"a/linear": layers["linear"], "b/linear_1": layers["linear_1"]})


# Keras

KERAS = {"gru": "GRU", "lstm": "LSTM", "simple": "SimpleRNN"}


def keras_layer(keras, cell, **options):
    layer = getattr(keras.layers, KERAS[cell])(H, return_sequences=True, **options)
    layer.build((None, T, D))
    for i, variable in enumerate(layer.trainable_variables):
        variable.assign(0.5 * draw(20 + i, *variable.shape))
    return layer


def keras_outputs(layer):
    return np.asarray(layer(np.ascontiguousarray(XS.swapaxes(0, 1)))).swapaxes(0, 1)


def keras_weights(layer):
    """Returns what `layer.get_weights()` would; that call causes a NumPy warning, which pytest turns into an error."""
    return [np.asarray(variable.value) for variable in layer.weights if "seed" not in variable.path]


@pytest.mark.quick("cell")
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("cell", KERAS)
def test_keras(keras, cell, use_bias):
    layer = keras_layer(keras, cell, use_bias=use_bias)
    params = convert.from_keras(layer)
    assert type(params) is KINDS[cell]
    agree(run(params), keras_outputs(layer))
    same_bits(convert.from_keras(layer.cell), params)
    if use_bias:
        same_bits(convert.from_keras(keras_weights(layer)), params)
        params = make_params(cell)
        layer.set_weights(convert.to_keras(params))
        agree(keras_outputs(layer), run(params))
        same_bits(convert.from_keras(layer), params)


def test_keras_simple_rnn_with_relu(keras):
    layer = keras_layer(keras, "simple", activation="relu")
    agree(run(convert.from_keras(layer), activation="relu"), keras_outputs(layer))


def test_keras_rejects_what_it_cannot_convert(keras):
    before = keras_layer(keras, "gru", reset_after=False)
    for source in (
        before,
        before.cell,
        keras_weights(before),
        keras_layer(keras, "gru", reset_after=False, use_bias=False),
    ):
        with pytest.raises(ValueError, match=r"reset_after=False applies the reset gate before the matrix product"):
            convert.from_keras(source)
    with pytest.raises(ValueError, match=r"do not tell whether reset_after is True"):
        convert.from_keras(keras_weights(keras_layer(keras, "gru", use_bias=False)))
    with pytest.raises(ValueError, match=r"activation is 'relu', but jaxrnn's cells use tanh"):
        convert.from_keras(keras_layer(keras, "gru", activation="relu"))
    with pytest.raises(ValueError, match=r"recurrent_activation is 'hard_sigmoid', but jaxrnn's cells use sigmoid"):
        convert.from_keras(keras_layer(keras, "lstm", recurrent_activation="hard_sigmoid"))
    with pytest.raises(ValueError, match=r"forward_layer or its backward_layer"):
        convert.from_keras(keras.layers.Bidirectional(keras.layers.LSTM(H)))
    with pytest.raises(ValueError, match=r"several cells"):
        convert.from_keras(keras.layers.RNN([keras.layers.GRUCell(H), keras.layers.GRUCell(H)]))
    with pytest.raises(ValueError, match=r"the GRU has no weights yet"):
        convert.from_keras(keras.layers.GRU(H))
    for activation in ("sigmoid", "relu6", "linear"):
        with pytest.raises(ValueError, match=rf"activation is '{activation}', but jaxrnn's cells use tanh or relu"):
            convert.from_keras(keras_layer(keras, "simple", activation=activation))
    with pytest.raises(ValueError, match=r"recurrent_kernel must be \[H, 3H\] \(GRU\).*got \(5, 10\)"):
        convert.from_keras([np.zeros((D, 2 * H), np.float32), np.zeros((H, 2 * H), np.float32)])
    with pytest.raises(ValueError, match=r"no kernel, recurrent_kernel in a Dropout"):
        convert.from_keras(keras.layers.Dropout(0.5))
    with pytest.raises(ValueError, match=r"got 6 arrays; convert layers one by one"):
        convert.from_keras(2 * convert.to_keras(make_params("gru")))
    with pytest.raises(ValueError, match=r"bias must be \(2, 15\).*got \(3, 15\)"):
        convert.from_keras([*convert.to_keras(make_params("gru"))[:2], np.zeros((3, 15), np.float32)])


# All of them


def aligned(x):
    """Returns a copy of `x` at an aligned address, where JAX may use NumPy's memory without a copy."""
    memory = np.empty(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def test_source_arrays_may_be_overwritten_after_a_conversion():
    arrays = [aligned(x) for x in convert.to_keras(make_params("lstm"))]
    params = convert.from_keras(arrays)
    for x in arrays:
        x[...] = 7
    same_bits(params, make_params("lstm"))


@pytest.mark.torch
def test_snippet_of_the_documentation_runs(torch):
    page = Path(__file__).resolve().parents[2] / "docs" / "convert.md"
    first, *others = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (of_dreamer,) = (one for one in others if "def from_dreamer" in one)
    names = {}
    exec(compile(first, page.name, "exec"), names)
    agree(names["ys"], torch_outputs(torch, names["module"], np.ones((16, 4, 8), np.float32)))

    exec(compile(of_dreamer, page.name, "exec"), names)
    (B, D, H), rng = (names[name] for name in "BDH"), np.random.default_rng(0)
    kernel, bias, scale, shift, h, x = (
        rng.normal(size=shape).astype(np.float32) for shape in ((H + D, 3 * H), 3 * H, H + D, H + D, (B, H), (1, B, D))
    )
    both = np.concatenate([h, x[0]], -1)  # the order of DreamerV3
    for norm, shifts in (("rms", ()), ("layer", (shift,))):
        centered = both - both.mean(-1, keepdims=True) if norm == "layer" else both
        normal = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-4)
        a_r, a_n, a_u = np.split((normal * scale + sum(shifts)) @ kernel + bias, 3, -1)
        u = jax.nn.sigmoid(a_u - 1)
        want = u * np.tanh(jax.nn.sigmoid(a_r) * a_n) + (1 - u) * h
        params = names["from_dreamer"](kernel, bias, scale, *shifts)
        agree(jaxrnn.norm_gru(params, h, x, norm=norm)[1][0], want)


TO = {
    "torch": convert.to_torch,
    "linen": convert.to_linen,
    "nnx": functools.partial(convert.to_nnx, cell="GRUCell"),
    "equinox": convert.to_equinox,
    "haiku": convert.to_haiku,
    "keras": convert.to_keras,
}


@pytest.mark.parametrize("name", TO)
def test_conversion_of_invalid_parameters_raises(name):
    params = make_params("gru")
    with pytest.raises(
        ValueError,
        match=f"to_{name}: params must be GRUParams, LSTMParams, MGUParams or SimpleParams, got a tuple",
    ):
        TO[name](tuple(params))
    with pytest.raises(ValueError, match=r"params.w_ih must be \(4, 15\).*got \(4, 14\)"):
        TO[name](params._replace(w_ih=jnp.zeros((D, 14))))
    with pytest.raises(ValueError, match=r"params.w_hh of GRUParams must be \[H, 3H\], got \(5, 20\)"):
        TO[name](params._replace(w_hh=jnp.zeros((H, 20))))


# The cells that a framework does not have, and the part of the error that says what to do.
MISSING = {
    ("nnx", "mgu"): r"NNX has no MGUCell\. .*to_linen.*jaxrnn\.mgu",
    ("equinox", "mgu"): r"equinox\.nn has no MGU\. .*jaxrnn\.mgu",
    ("equinox", "simple"): r"equinox\.nn has no simple cell\. .*jaxrnn\.simple_rnn",
    ("haiku", "mgu"): r"Haiku has no MGU\. .*jaxrnn\.mgu",
    ("keras", "mgu"): r"Keras has no MGU\. .*jaxrnn\.mgu",
}


@pytest.mark.parametrize(("name", "cell"), MISSING)
def test_missing_cells_raise(name, cell):
    with pytest.raises(ValueError, match=f"to_{name}: .*{MISSING[name, cell]}"):
        TO[name](make_params(cell))


ROUND_TRIPS = {
    "torch": lambda params: convert.from_torch(convert.to_torch(params)),
    "linen": lambda params: convert.from_linen(convert.to_linen(params)),
    "equinox": lambda params: convert.from_equinox(convert.to_equinox(params)),
    "keras": lambda params: convert.from_keras(convert.to_keras(params)),
}
NNX_CLASSES = {"gru": ("GRUCell",), "lstm": ("LSTMCell", "OptimizedLSTMCell"), "simple": ("SimpleCell",)}


@pytest.mark.quick("name")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("name", "cell"), [(name, cell) for name in ROUND_TRIPS for cell in KINDS if (name, cell) not in MISSING]
)
def test_round_trips_keep_bits_and_dtypes(name, cell, dtype):
    params = make_params(cell, dtype=dtype)
    same_bits(ROUND_TRIPS[name](params), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cell", NNX_CLASSES)
def test_round_trips_to_nnx_keep_bits_and_dtypes(cell, dtype):
    params = make_params(cell, dtype=dtype)
    if cell == "gru":
        params = params._replace(b_hn=jnp.zeros(H, dtype))
    for name in NNX_CLASSES[cell]:
        same_bits(convert.from_nnx(convert.to_nnx(params, name)), params)


def test_round_trips_to_haiku_keep_bits():
    for dtype in ("float32", "bfloat16", "float16"):
        params = make_params("simple", dtype=dtype)
        same_bits(convert.from_haiku(convert.to_haiku(params)), params)


# Blocks of recurrent weights

N, WIDE = 2, 6


def make_blocks(cell, dtype=jnp.float32):
    """Returns weights of six units in two blocks."""
    params = make_params(cell, H=WIDE, dtype=dtype)
    gates = params.w_hh.shape[1] // WIDE
    return params._replace(w_hh=jnp.asarray(0.5 * draw(50, N, WIDE // N, gates * WIDE // N), dtype))


def run_wide(params, **options):
    zeros = jnp.zeros((B, WIDE), params.w_hh.dtype)
    (cell,) = (cell for cell, kind in KINDS.items() if type(params) is kind)
    carry = (zeros, zeros) if cell == "lstm" else zeros
    return FUNCTIONS[cell](params, carry, jnp.asarray(XS), implementation="xla", **options)[1]


def without_blocks(params):
    """Returns the same weights as matrices, in plain loops."""
    size = WIDE // N
    gates = params.w_hh.shape[-1] // size
    dense = np.zeros((WIDE, gates * WIDE), np.float32)
    for block in range(N):
        for gate in range(gates):
            rows, columns = slice(block * size, (block + 1) * size), gate * WIDE + block * size
            dense[rows, columns : columns + size] = params.w_hh[block, :, gate * size : (gate + 1) * size]
    return params._replace(w_hh=jnp.asarray(dense))


@pytest.mark.parametrize("cell", KINDS)
def test_matrix_with_zeros_computes_what_blocks_compute(cell):
    agree(run_wide(without_blocks(make_blocks(cell))), run_wide(make_blocks(cell)))


@pytest.mark.torch
@pytest.mark.parametrize("cell", TORCH)
def test_torch_blocks(torch, cell):
    from torch_bridge import nn

    params = make_blocks(cell)
    module = load_torch(torch, getattr(nn, TORCH[cell])(D, WIDE, num_blocks=N), convert.to_torch(params))
    agree(torch_outputs(torch, module), run_wide(params))
    same_bits(convert.from_torch(module), params)
    plain = load_torch(torch, torch_module(torch, cell, D, WIDE), convert.to_torch(params, dense=True))
    agree(torch_outputs(torch, plain), run_wide(params))
    same_bits(convert.from_torch(plain), without_blocks(params))


LINEN_BLOCKS = {"gru": "GRUCell", "lstm": "LSTMCell", "mgu": "MGUCell", "simple": "SimpleCell"}


@pytest.mark.parametrize("cell", LINEN_BLOCKS)
def test_linen_blocks(cell):
    import jaxrnn.linen

    params = make_blocks(cell)
    ours = jaxrnn.linen.RNN(getattr(jaxrnn.linen, LINEN_BLOCKS[cell])(WIDE, num_blocks=N), time_major=True)
    plain = linen.RNN(getattr(linen, LINEN_BLOCKS[cell])(WIDE), time_major=True)
    for module, tree in ((ours, convert.to_linen(params)), (plain, convert.to_linen(params, dense=True))):
        shapes = jax.eval_shape(module.init, jax.random.key(0), XS)["params"]["cell"]
        assert jax.tree.map(jnp.shape, tree) == jax.tree.map(lambda x: x.shape, shapes)
        agree(module.apply({"params": {"cell": tree}}, XS), run_wide(params))
    same_bits(convert.from_linen(convert.to_linen(params)), params)
    same_bits(convert.from_linen(convert.to_linen(params, dense=True)), without_blocks(params))
    same_bits(jax.jit(lambda x: convert.from_linen(convert.to_linen(x, dense=True)))(params), without_blocks(params))


NNX_BLOCKS = [(cell, name) for cell, names in NNX_CLASSES.items() for name in names]


@pytest.mark.parametrize(("cell", "name"), NNX_BLOCKS)
def test_nnx_blocks(cell, name):
    import jaxrnn.nnx

    params = make_blocks(cell)
    if cell == "gru":
        params = params._replace(b_hn=jnp.zeros(WIDE))
    ours = getattr(jaxrnn.nnx, name)(D, WIDE, num_blocks=N, rngs=nnx.Rngs(0))
    plain = getattr(nnx, name)(D, WIDE, rngs=nnx.Rngs(0))
    for module in (ours, plain):
        nnx.update(module, convert.to_nnx(params, module))
        agree(
            nnx.RNN(module, time_major=True)(jnp.asarray(XS)) if module is plain else run_nnx(module), run_wide(params)
        )
    same_bits(convert.from_nnx(ours), params)
    same_bits(convert.from_nnx(nnx.state(ours)), params)
    same_bits(convert.from_nnx(plain), without_blocks(params))
    same_bits(convert.from_nnx(convert.to_nnx(params, name)), without_blocks(params))
    with pytest.raises(ValueError, match=r"the shapes of the cell \(there\) and of params \(here\) differ"):
        convert.to_nnx(make_params(cell, H=WIDE)._replace(**({"b_hn": jnp.zeros(WIDE)} if cell == "gru" else {})), ours)


def run_nnx(cell):
    import jaxrnn.nnx

    return jaxrnn.nnx.RNN(cell, time_major=True)(jnp.asarray(XS))


@pytest.mark.torch
def test_each_module_of_torch_bridge_has_a_conversion_or_is_refused(torch):
    """Row counts alone would take a new cell for one that has as many gates."""
    from torch_bridge import nn as ours

    converted = {ours.GRU: GRUParams, ours.LSTM: LSTMParams, ours.MGU: MGUParams, ours.RNN: SimpleParams}
    for module, params in converted.items():
        assert type(convert.from_torch(module(D, H))) is params
    recurrent = {x for x in vars(ours).values() if isinstance(x, type) and issubclass(x, torch.nn.RNNBase)}
    assert recurrent - converted.keys() == {ours.NormGRU}  # the next test says that it is refused


@pytest.mark.torch
def test_weights_of_a_normed_gru_are_not_taken_for_those_of_a_gru(torch):
    from torch_bridge.nn import NormGRU

    for norm in ("rms", "layer"):
        module = NormGRU(D, H, norm=norm)
        for source in (module, module.state_dict()):
            with pytest.raises(ValueError, match=r"from_torch: .* no functions for cells with a norm"):
                convert.from_torch(source)
        cell = jaxrnn.nnx.NormGRUCell(D, H, norm=norm, rngs=nnx.Rngs(0))
        for source in (cell, nnx.state(cell)):
            with pytest.raises(ValueError, match=r"from_nnx: .* no functions for cells with a norm"):
                convert.from_nnx(source)
        params = convert.from_nnx(jaxrnn.nnx.GRUCell(D, H, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=r"to_nnx: .* no functions for cells with a norm"):
            convert.to_nnx(params, cell)


def test_frameworks_without_blocks_get_a_matrix_with_zeros():
    gru, lstm, simple = (make_blocks(cell) for cell in ("gru", "lstm", "simple"))
    for params in (gru, lstm):
        same_bits(convert.from_equinox(convert.to_equinox(params)), without_blocks(params))
    for params in (gru, lstm, simple):
        same_bits(convert.from_keras(convert.to_keras(params)), without_blocks(params))
    same_bits(convert.from_haiku(convert.to_haiku(simple)), without_blocks(simple))
    agree(run_wide(convert.from_haiku(convert.to_haiku(lstm))), run_wide(lstm))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cell", KINDS)
def test_blocks_keep_bits_and_dtypes(cell, dtype):
    params = make_blocks(cell, dtype)
    same_bits(convert.from_linen(convert.to_linen(params)), params)
    if cell in TORCH:
        same_bits(convert.from_torch(convert.to_torch(params)), params)


def test_blocks_of_wrong_shapes_raise():
    params = make_blocks("gru")
    with pytest.raises(ValueError, match=r"params.w_hh of GRUParams must be \[N, H / N, 3H / N\], got \(2, 3, 8\)"):
        convert.to_linen(params._replace(w_hh=jnp.zeros((2, 3, 8))))
    with pytest.raises(ValueError, match=r"params.w_ih must be \(4, 27\).*got \(4, 18\)"):
        convert.to_linen(params._replace(w_hh=jnp.zeros((3, 3, 9))))
    with pytest.raises(ValueError, match="must be"):
        convert.to_linen(params._replace(w_hh=jnp.zeros((0, 3, 9))))
    lstm = make_blocks("lstm")._replace(w_hr=jnp.zeros((WIDE, 2)))
    with pytest.raises(ValueError, match=r"must be a matrix with a projection, params.w_hr, got \(2, 3, 12\)"):
        convert.to_torch(lstm)
    tree = convert.to_linen(params)
    tree["hz"]["kernel"] = jnp.zeros((2, 3, 4))
    with pytest.raises(ValueError, match=r"hz.kernel must be \(2, 3, 3\)"):
        convert.from_linen(tree)
    arrays = convert.to_torch(params) | {"weight_hh_l0": np.zeros((2, 9, 4), np.float32)}
    with pytest.raises(ValueError, match="weight_hh_l0 must be"):
        convert.from_torch(arrays)


FROM = {
    "linen": (convert.from_linen, convert.to_linen),
    "torch": (convert.from_torch, convert.to_torch),
    "equinox": (convert.from_equinox, convert.to_equinox),
    "keras": (convert.from_keras, convert.to_keras),
    "haiku": (convert.from_haiku, convert.to_haiku),
    "nnx": (convert.from_nnx, lambda params: convert.to_nnx(params, "OptimizedLSTMCell")),
}


@pytest.mark.quick("name")
@pytest.mark.parametrize("name", FROM)
def test_class_of_the_result_may_be_requested(name):
    read, write = FROM[name]
    params = make_params("lstm")
    assert type(read(write(params), into=LSTMParams)) is LSTMParams
    with pytest.raises(
        ValueError, match=f"from_{name}: into must be LSTMParams, the class of these weights, got GRUPa"
    ):
        read(write(params), into=GRUParams)
    with pytest.raises(
        ValueError, match=f"from_{name}: into must be GRUParams, LSTMParams, MGUParams or SimpleParams,"
    ):
        read(write(params), into="lstm")


def test_class_of_the_unfused_cell_and_of_the_vanilla_rnn_may_be_requested():
    unfused = convert.to_nnx(make_params("lstm"), "LSTMCell")
    with pytest.raises(ValueError, match="from_nnx: into must be LSTMParams"):
        convert.from_nnx(unfused, into=SimpleParams)
    with pytest.raises(ValueError, match="from_haiku: into must be SimpleParams"):
        convert.from_haiku(convert.to_haiku(make_params("simple")), into=LSTMParams)
