"""Compares `RMSNorm` and `LayerNorm` of linen and NNX with Flax's, and tests norms between the layers of stacks."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxrnn
from jaxrnn import linen
from jaxrnn import nnx as fused_nnx

N, T, B, D, H = 6, 5, 3, 4, 6
OURS = {"rms": (linen.RMSNorm, fused_nnx.RMSNorm), "layer": (linen.LayerNorm, fused_nnx.LayerNorm)}
FLAX = {"rms": (nn.RMSNorm, nnx.RMSNorm), "layer": (nn.LayerNorm, nnx.LayerNorm)}
KERNELS = [
    pytest.param("triton", marks=pytest.mark.interpret, id="triton-interpreted"),
    pytest.param("triton", marks=pytest.mark.gpu, id="triton-gpu"),
]
every_implementation = pytest.mark.parametrize("implementation", [None, *KERNELS])
every_kind = pytest.mark.parametrize("kind", OURS)
OPTIONS = [
    {},
    {"epsilon": 1e-2},
    {"use_scale": False},
    {"use_bias": False},
    {"use_bias": False, "use_scale": False},
    {"dtype": jnp.float16},
    {"param_dtype": jnp.float16},
    {"dtype": jnp.float16, "param_dtype": jnp.float16},
    {"dtype": jnp.float32},
    {"use_fast_variance": False},
    {"scale_init": nn.initializers.normal(2.0), "bias_init": nn.initializers.normal(3.0)},
]
INPUTS = {"f32": jnp.float32, "f16": jnp.float16, "int": jnp.int32}
# Other inputs than float32 only with options that name a dtype or none, and the kernels only with options that differ
# in which arrays and dtypes there are.
CASES = [
    pytest.param(options, name, None, id=f"{'-'.join(options) or 'default'}-{name}")
    for options in OPTIONS
    for name in INPUTS
    if name == "f32" or all("dtype" in option for option in options)
]
CASES += [
    pytest.param(options, name, "triton", marks=mark, id=f"{'-'.join(options) or 'default'}-{name}-{mark.name}")
    for options in ({}, {"use_bias": False, "use_scale": False}, {"dtype": jnp.float16}, {"param_dtype": jnp.float16})
    for name in ("f32", "f16")
    for mark in (pytest.mark.interpret, pytest.mark.gpu)
]
every_case = pytest.mark.parametrize(("options", "inputs", "implementation"), CASES)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=shape) + 1, dtype)


def of_kind(kind, options):
    """Returns those of `options` that the kind has: an RMSNorm has no bias."""
    return {name: x for name, x in options.items() if kind == "layer" or "bias" not in name}


def random_like(tree, seed=5):
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([normal(seed + i, *x.shape, dtype=x.dtype) for i, x in enumerate(leaves)])


def assert_alike(got, want, tol=None):
    """Asserts equal structure, shapes and dtypes, and values that agree up to the rounding of their dtype."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        bound = (tol or 2e-5) if y.dtype == jnp.float32 else 4e-3
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), rtol=bound, atol=bound)


@pytest.mark.quick("kind", "implementation")
@every_case
@every_kind
def test_linen_modules_equal_those_of_flax(kind, options, inputs, implementation):
    """Parameters and initial values are the same to the bit; outputs, their dtypes and gradients agree."""
    options = of_kind(kind, options)
    ours, theirs = OURS[kind][0](**options, implementation=implementation), FLAX[kind][0](**options)
    x = normal(0, 2, 3, N, dtype=INPUTS[inputs])
    got, want = ours.init(jax.random.key(1), x), theirs.init(jax.random.key(1), x)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    variables = random_like(want)
    assert_alike(ours.apply(variables, x), theirs.apply(variables, x))

    def gradients(module):
        allow_int = inputs == "int"
        loss = lambda variables, x: jnp.sum(jnp.sin(module.apply(variables, x).astype(jnp.float32)))  # noqa: E731
        grads = jax.grad(loss, (0,) if allow_int else (0, 1))(variables, x)
        return jax.tree.map(lambda g: g / 8, grads)

    assert_alike(gradients(ours), gradients(theirs), tol=1e-4)


@pytest.mark.quick("kind", "implementation")
@every_case
@every_kind
def test_nnx_modules_equal_those_of_flax(kind, options, inputs, implementation):
    options = of_kind(kind, options)
    ours = OURS[kind][1](N, **options, implementation=implementation, rngs=nnx.Rngs(0))
    theirs = FLAX[kind][1](N, **options, rngs=nnx.Rngs(0))
    x = normal(0, 2, 3, N, dtype=INPUTS[inputs])
    got, want = (nnx.to_pure_dict(nnx.state(module, nnx.Param)) for module in (ours, theirs))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    for module in (ours, theirs):  # a checkpoint of one loads in the other
        state = nnx.state(module, nnx.Param)
        nnx.replace_by_pure_dict(state, random_like(want))
        nnx.update(module, state)
    assert_alike(ours(x), theirs(x))

    def gradients(module):
        grads = nnx.grad(lambda module: jnp.sum(jnp.sin(module(x).astype(jnp.float32))))(module)
        return jax.tree.map(lambda g: g / 8, nnx.to_pure_dict(grads))

    assert_alike(gradients(ours), gradients(theirs), tol=1e-4)


@every_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16], ids=["f32", "f16"])
@every_kind
def test_a_residual_is_added_first(kind, dtype, implementation):
    x, residual = normal(0, 2, N, dtype=dtype), normal(1, 2, N, dtype=dtype)
    bound = OURS[kind][0](implementation=implementation).bind({"params": random_like({"scale": x[0], "bias": x[0]})})
    module = OURS[kind][1](N, implementation=implementation, rngs=nnx.Rngs(0))
    for norm in (bound, module):
        y, total = norm(x, residual=residual)
        np.testing.assert_array_equal(total, x + residual)
        assert_alike(y, norm(total))


@every_kind
def test_integer_inputs_accept_an_integer_residual(kind):
    x = jnp.arange(2 * N).reshape(2, N) % 7
    for norm in (OURS[kind][0]().bind(OURS[kind][0]().init(jax.random.key(0), x)), OURS[kind][1](N, rngs=nnx.Rngs(0))):
        y, total = norm(x, residual=x)
        np.testing.assert_array_equal(total, 2 * x)
        assert_alike(y, norm(2 * x))


def test_nnx_uses_a_given_promote_dtype():
    def promote(arrays, dtype=None):
        return tuple(None if x is None else x.astype(jnp.float16) for x in arrays)

    x = normal(0, 2, N)
    ours = fused_nnx.LayerNorm(N, promote_dtype=promote, rngs=nnx.Rngs(0))(x)
    assert ours.dtype == jnp.float16
    assert_alike(ours, nnx.LayerNorm(N, promote_dtype=promote, rngs=nnx.Rngs(0))(x))


MASK = np.array([[[True], [False], [True]], [[True], [True], [True]]])  # broadcasts to [2, 3, N]
OF_FLAX = [
    {"reduction_axes": (0, 1)},
    {"reduction_axes": (-2, -1)},
    {"reduction_axes": (0, 1), "use_fast_variance": False},
    {"reduction_axes": (0, 1), "dtype": jnp.float16},
    {"axis_name": "batch"},
    {"mask": np.arange(2 * 3 * N).reshape(2, 3, N) % 3 > 0},
    {"mask": MASK, "reduction_axes": (-2, -1), "param_dtype": jnp.float16},
]
OF_LINEN = [
    {"feature_axes": 0},
    {"feature_axes": (1, 2)},
    {"feature_axes": (-1, 0), "reduction_axes": (1,)},
    {"feature_axes": ()},
    {"mask": MASK, "reduction_axes": (1, 2), "feature_axes": (0, 1), "scale_init": nn.initializers.normal(2.0)},
    {"force_float32_reductions": False},
    {"force_float32_reductions": False, "param_dtype": jnp.float16},
]


def over_batch(options, run):
    """Returns `run`, under a `vmap` over the axis that the options name."""
    return jax.vmap(run, in_axes=(None, 0, None), axis_name="batch") if "axis_name" in options else run


def each_with_one_of_the_inputs(options):
    """Parametrizes by options, with which Flax's own code runs, and by the inputs in turn."""
    cases = [pytest.param(x, [*INPUTS][i % 3], id="-".join([*x, [*INPUTS][i % 3]])) for i, x in enumerate(options)]
    return pytest.mark.parametrize(("options", "inputs"), cases)


@each_with_one_of_the_inputs(OF_FLAX + OF_LINEN)
@every_kind
def test_linen_modules_have_the_other_options_of_flax(kind, options, inputs):
    options = of_kind(kind, options)
    mask = options.pop("mask", None)
    x = normal(0, 2, 3, N, dtype=INPUTS[inputs])
    ours, theirs = OURS[kind][0](**options), FLAX[kind][0](**options)
    got, want = (
        over_batch(options, lambda _, x, mask, m=module: m.init(jax.random.key(1), x, mask=mask))(None, x, mask)
        for module in (ours, theirs)
    )
    assert_alike(got, want, tol=1e-30)
    variables = random_like(jax.tree.map(lambda leaf: leaf[0], want) if "axis_name" in options else want)

    def outputs_and_gradients(module):
        apply = over_batch(options, lambda variables, x, mask: module.apply(variables, x, mask=mask))
        loss = lambda variables: jnp.sum(jnp.sin(apply(variables, x, mask).astype(jnp.float32))) / 8  # noqa: E731
        return apply(variables, x, mask), jax.jit(jax.grad(loss))(variables)

    got, want = outputs_and_gradients(ours), outputs_and_gradients(theirs)
    assert_alike(got, want, tol=1e-6)


@each_with_one_of_the_inputs(OF_FLAX)
@every_kind
def test_nnx_modules_have_the_other_options_of_flax(kind, options, inputs):
    options = of_kind(kind, options)
    mask = options.pop("mask", None)
    x = normal(0, 2, 3, N, dtype=INPUTS[inputs])
    results = []
    for make in (OURS[kind][1], FLAX[kind][1]):
        module = make(N, **options, rngs=nnx.Rngs(0))
        state = nnx.state(module, nnx.Param)
        nnx.replace_by_pure_dict(state, random_like(nnx.to_pure_dict(state)))
        nnx.update(module, state)

        def apply(module, options=options):
            run = over_batch(options, lambda module, x, mask: module(x, mask=mask))
            return run(module, x, mask)

        grads = nnx.grad(lambda module, apply=apply: jnp.sum(jnp.sin(apply(module).astype(jnp.float32))) / 8)(module)
        results.append((apply(module), nnx.to_pure_dict(grads)))
    assert_alike(*results, tol=1e-6)


@every_kind
def test_a_feature_axis_of_nnx_has_num_features(kind):
    x, options = normal(0, N, 2, 3), {"feature_axes": 0, "reduction_axes": (1, 2)}
    want = FLAX[kind][1](N, **options, rngs=nnx.Rngs(0))(x)
    assert_alike(OURS[kind][1](N, **options, rngs=nnx.Rngs(0))(x), want, tol=1e-6)


@pytest.mark.parametrize("inputs", INPUTS)
@every_kind
def test_a_residual_is_added_before_a_norm_of_flax_too(kind, inputs):
    x, residual = (normal(seed, 2, 3, N, dtype=INPUTS[inputs]) for seed in (0, 1))
    options = {"reduction_axes": (1, 2)}
    of_linen, theirs = (
        makes[kind][0](**options).bind({"params": random_like({"scale": x[0, 0], "bias": x[0, 0]})})
        for makes in (OURS, FLAX)
    )
    of_nnx = OURS[kind][1](N, **options, rngs=nnx.Rngs(0))
    for norm, flax_norm in ((of_linen, theirs), (of_nnx, FLAX[kind][1](N, **options, rngs=nnx.Rngs(0)))):
        y, total = norm(x, residual=residual, mask=MASK)
        want = (x + residual).astype(jnp.float32 if inputs == "int" else x.dtype)
        np.testing.assert_array_equal(total, want)
        assert total.dtype == want.dtype
        assert_alike(y, flax_norm(want, mask=MASK), tol=1e-6)
        with pytest.raises(ValueError, match="residual must have the shape and dtype of x"):
            norm(x, residual=residual[0], mask=MASK)


def test_a_norm_of_flax_counts_as_one_call():
    """Intermediate results are captured once, although Flax's own norm runs inside of ours."""
    module, x = linen.LayerNorm(reduction_axes=(0, 1)), normal(0, 2, N)
    y, captured = module.apply(module.init(jax.random.key(0), x), x, capture_intermediates=True, mutable=True)
    (captured_y,) = captured["intermediates"]["__call__"]
    np.testing.assert_array_equal(captured_y, y)


def test_norms_may_be_put_in_the_place_of_those_of_flax(monkeypatch):
    x, mask = normal(0, 2, N), jnp.arange(N) > 1
    module = nn.LayerNorm()
    want = module.init_with_output(jax.random.key(0), x, mask=mask)
    monkeypatch.setattr(nn, "LayerNorm", linen.LayerNorm)
    assert_alike(nn.LayerNorm().init_with_output(jax.random.key(0), x, mask=mask), want)


@pytest.mark.parametrize(
    "options", [*OF_FLAX, *OF_LINEN, {"axis_index_groups": [[0]]}], ids=lambda options: "-".join(map(str, options))
)
@every_kind
def test_the_kernels_do_not_have_these_options(kind, options):
    options = of_kind(kind, options)
    x, mask = normal(0, 2, 3, N), options.pop("mask", None)
    text = r"the Triton implementation normalizes .*this norm has (a mask|\w+=).*implementation=None or \"xla\""
    with pytest.raises(NotImplementedError, match=text):
        OURS[kind][0](**options, implementation="triton").init(jax.random.key(0), x, mask=mask)
    if "force_float32_reductions" not in options:
        with pytest.raises(NotImplementedError, match=text):
            OURS[kind][1](N, **options, implementation="triton", rngs=nnx.Rngs(0))(x, mask=mask)


@every_kind
def test_scalars_and_unknown_implementations_are_rejected(kind):
    x = normal(0, 2, N)
    of_linen = OURS[kind][0](implementation="cuda").bind({"params": {"scale": x[0], "bias": x[0]}})
    for norm in (of_linen, OURS[kind][1](N, implementation="cuda", rngs=nnx.Rngs(0))):
        for mask in (None, x > 0):
            with pytest.raises(ValueError, match="implementation must be"):
                norm(x, mask=mask)
        with pytest.raises(ValueError, match=r"x must be \[\*rows, N\], got a scalar"):
            norm(x[0, 0])


@every_kind
def test_the_last_axis_may_be_given_by_its_index(kind):
    x = normal(0, 2, 3, N)
    for axes in (2, (2,), [-1]):
        options = {"reduction_axes": axes, "feature_axes": axes}
        got = OURS[kind][0](**options).init_with_output(jax.random.key(0), x)[0]
        assert_alike(got, OURS[kind][0]().init_with_output(jax.random.key(0), x)[0])


# --- stacks ----------------------------------------------------------------------------------------------------------


def normalize(kind, params, xs):
    return getattr(jaxrnn, f"{kind}_norm")(xs, params["scale"], params.get("bias"))


@pytest.mark.parametrize(
    ("kind", "cell", "bidirectional"),
    [("rms", "GRU", True), ("rms", "LSTM", False), ("layer", "GRU", False), ("layer", "LSTM", True)],
)
def test_a_linen_stack_normalizes_between_its_layers(kind, cell, bidirectional):
    """The stack equals three stacks of one layer, with norms between them."""
    make = functools.partial(getattr(linen, cell), H, bidirectional=bidirectional)
    stack, xs = make(num_layers=3, norm=kind), normal(0, B, T, D)
    resets = normal(1, B, T) > 3
    variables = random_like(stack.init(jax.random.key(0), xs))
    params = variables["params"]
    assert {name for name in params if name.startswith("norm")} == {"norm_0", "norm_1"}
    assert params["norm_0"].keys() == ({"scale"} if kind == "rms" else {"scale", "bias"})
    assert params["norm_1"]["scale"].shape == (H * (1 + bidirectional),)

    def by_hand(params, xs):
        for k in range(3):
            xs = normalize(kind, params[f"norm_{k - 1}"], xs) if k else xs
            layer = {name.replace(f"layers_{k}", "layers_0"): x for name, x in params.items() if f"layers_{k}" in name}
            xs = make(num_layers=1, norm=kind).apply({"params": layer}, xs, resets=resets)
        return xs

    def outputs_and_gradients(run):
        loss = lambda params, xs: (jnp.sum(jnp.sin(run(params, xs))), run(params, xs))  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, xs)

    got = outputs_and_gradients(lambda params, xs: stack.apply({"params": params}, xs, resets=resets))
    assert_alike(got, outputs_and_gradients(by_hand), tol=1e-4)


@pytest.mark.parametrize("cell", ["GRU", "LSTM"])
@every_kind
def test_an_nnx_stack_normalizes_between_its_layers(kind, cell):
    make = functools.partial(getattr(fused_nnx, cell), rngs=nnx.Rngs(0))
    stack, xs = make(D, H, num_layers=2, norm=kind, bidirectional=True), normal(0, B, T, D)
    assert len(stack.norms) == 1 and type(stack.norms[0]) is OURS[kind][1]
    stack.norms[0].scale[...] = normal(1, 2 * H)
    layers = [make(D, H, bidirectional=True), make(2 * H, H, bidirectional=True)]
    for k, layer in enumerate(layers):
        layer.layers[0], layer.layers_reverse[0] = stack.layers[k], stack.layers_reverse[k]
    assert_alike(stack(xs), layers[1](stack.norms[0](layers[0](xs))))
    grads = nnx.grad(lambda stack: jnp.sum(jnp.sin(stack(xs))))(stack)
    assert jnp.any(nnx.to_pure_dict(grads)["norms"][0]["scale"] != 0)


def test_a_norm_does_not_change_the_other_parameters_of_a_stack():
    xs = normal(0, B, T, D)
    params = linen.GRU(H, num_layers=2).init(jax.random.key(0), xs)["params"]
    assert params.keys() == {"layers_0", "layers_1"}
    normed = linen.GRU(H, num_layers=2, norm="layer").init(jax.random.key(0), xs)["params"]
    assert_alike({name: normed[name] for name in params}, params)
    assert "norms" not in nnx.to_pure_dict(nnx.state(fused_nnx.GRU(D, H, rngs=nnx.Rngs(0))))
    states = [
        nnx.to_pure_dict(nnx.state(fused_nnx.GRU(D, H, num_layers=2, norm=norm, rngs=nnx.Rngs(0)), nnx.Param))
        for norm in (None, "layer")
    ]
    assert_alike(states[1]["layers"], states[0]["layers"])


def test_a_norm_precedes_dropout_and_uses_the_options_of_the_stack():
    xs = normal(0, B, T, D)
    stack = linen.GRU(
        H, num_layers=2, norm="rms", dropout_rate=0.5, deterministic=False, param_dtype=jnp.float16,
        recurrent_kernel_init=nn.initializers.lecun_normal(),
    )  # fmt: skip
    variables = stack.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, xs)
    assert variables["params"]["norm_0"]["scale"].dtype == jnp.float16
    of_both = lambda module, _: isinstance(module, (nn.Dropout, linen.RMSNorm))  # noqa: E731
    _, captured = stack.apply(
        variables, xs, rngs={"dropout": jax.random.key(2)}, capture_intermediates=of_both, mutable=["intermediates"]
    )
    (normed,), (dropped,) = (captured["intermediates"][x]["__call__"] for x in ("norm_0", "Dropout_0"))
    np.testing.assert_allclose(dropped, jnp.where(dropped != 0, 2 * normed, 0), rtol=1e-6)


@pytest.mark.interpret
def test_the_norms_of_a_stack_use_its_implementation():
    xs = normal(0, B, T, D)

    def launches(stack):
        variables = stack.init(jax.random.key(0), xs)
        return str(jax.make_jaxpr(lambda xs: stack.apply(variables, xs))(xs)).count("kind=norm")

    assert launches(linen.GRU(H, num_layers=3, norm="rms", implementation="triton")) == 2
    assert launches(linen.GRU(H, num_layers=3, norm="rms", implementation="xla")) == 0


def test_a_stack_accepts_any_norm():
    xs = normal(0, B, T, D)
    make = functools.partial(nn.LayerNorm, epsilon=0.1, use_bias=False)
    stack = linen.GRU(H, num_layers=2, norm=make)
    variables = stack.init(jax.random.key(0), xs)
    assert variables["params"]["norm_0"].keys() == {"scale"}
    ours = linen.GRU(H, num_layers=2, norm=functools.partial(linen.LayerNorm, epsilon=0.1, use_bias=False))
    assert_alike(ours.apply(variables, xs), stack.apply(variables, xs))
    assert type(fused_nnx.GRU(D, H, num_layers=2, norm=nnx.LayerNorm, rngs=nnx.Rngs(0)).norms[0]) is nnx.LayerNorm


@pytest.mark.parametrize("norm", ["batch", True, 3])
def test_an_unknown_norm_is_rejected(norm):
    text = 'norm must be "rms", "layer", None, or a class or function that makes a module, got '
    with pytest.raises(ValueError, match=text):
        linen.GRU(H, norm=norm).init(jax.random.key(0), normal(0, B, T, D))
    with pytest.raises(ValueError, match=text):
        fused_nnx.GRU(D, H, norm=norm, rngs=nnx.Rngs(0))


def test_a_module_instance_as_norm_is_rejected():
    text = "norm must make a module for each layer, got a module; pass its class or a function"
    with pytest.raises(ValueError, match=text):
        linen.GRU(H, num_layers=2, norm=nn.LayerNorm()).init(jax.random.key(0), normal(0, B, T, D))
    with pytest.raises(ValueError, match=text):
        fused_nnx.GRU(D, H, num_layers=2, norm=nnx.LayerNorm(H, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
