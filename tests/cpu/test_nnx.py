"""Compares the NNX modules with Flax's own, and the stacks with those of linen, on the same parameters."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import warnings

import cases
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from flax import nnx
from plain_cells import NNX
from trees import assert_close, normal, some_resets

import jaxrnn
import jaxrnn.nnx as fused
from jaxrnn import linen, recurrent
from jaxrnn.nnx.cells import packed_params, reason_to_scan

T, B, D, H = 7, 4, 5, 6
CELLS = ["GRUCell", "LSTMCell", "OptimizedLSTMCell", "SimpleCell", "NormGRUCell"]
WITH_GATE_FN = [cell for cell in CELLS if cell != "NormGRUCell"]


def some_carry(cell, batch=(B,)):
    return trees.some_carry(cell, batch, H)


def randomized(module, seed=0):
    """Gives `module` random parameters and returns it: zero biases would hide a misplaced bias."""
    rng = np.random.default_rng(seed)
    state = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype), state))
    return module


class OwnCell(nnx.GRUCell):
    """A cell of the user's, which no class of `jaxrnn` replaces."""


def make(source, cell, **options):
    kind = OwnCell if cell == "OwnCell" else getattr(source, cell)
    return randomized(kind(D, H, rngs=nnx.Rngs(0), **options))


def tanh(x):
    """Computes tanh; as a custom `activation_fn` it makes the same cell run under `nnx.scan`."""
    return jnp.tanh(x)


def flat(module):
    """Returns the values of all variables of a module, by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(module)))
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def assert_identical(got, want):
    got, want = flat(got), flat(want)
    assert got.keys() == want.keys()
    for path, x in want.items():
        assert (got[path].shape, got[path].dtype) == (x.shape, x.dtype), path
        assert bool(jnp.all(got[path] == x)), path


def outputs_and_gradients(module, *args, **kwargs):
    """Returns the gradients of a scalar of the outputs to the parameters and to `args`, and the outputs."""

    @nnx.jit
    def compute(module, args):
        def loss(module, args):
            outputs = module(*args, **kwargs)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs)), outputs

        return nnx.grad(loss, argnums=(0, 1), has_aux=True)(module, args)

    (d_module, d_args), outputs = compute(module, args)
    return nnx.to_pure_dict(d_module), d_args, outputs


# --- cells -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"param_dtype": jnp.bfloat16}, {"dtype": jnp.bfloat16}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_cells_have_flax_parameters(cell, options):
    inits = ("kernel_init", "recurrent_kernel_init", "bias_init")
    options = options | {name: nnx.initializers.normal(i + 1.0) for i, name in enumerate(inits)}
    rngs = [nnx.Rngs(params=3, carry=4) for _ in range(2)]
    want, got = (getattr(m, cell)(D, H, rngs=r, **options) for m, r in zip((NNX, fused), rngs, strict=True))
    assert isinstance(got, getattr(nnx, cell, nnx.RNNCellBase))
    assert got.num_feature_axes == 1
    assert_identical(got, want)
    carry = want.initialize_carry((B, D), rngs[0])
    assert_close(got.initialize_carry((B, D), rngs[1]), carry, tol=0)
    assert rngs[0].params() == rngs[1].params()  # values that are drawn next are the same too


@pytest.mark.quick("cell")
@pytest.mark.parametrize("cell", CELLS)
def test_cells_have_flax_initial_values(cell):
    assert_identical(*(getattr(m, cell)(D, H, rngs=nnx.Rngs(3)) for m in (fused, NNX)))
    assert_identical(*(m.RNN(getattr(m, cell)(D, H, rngs=nnx.Rngs(3)), rngs=nnx.Rngs(1)) for m in (fused, NNX)))


@pytest.mark.quick("cell")
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=["no_batch", "two_batch_axes"])
@pytest.mark.parametrize(
    ("cell", "gates"), [*((cell, "standard") for cell in CELLS), *((cell, "custom") for cell in WITH_GATE_FN)]
)
def test_one_step_equals_flax_step(cell, batch, gates):
    options = {} if gates == "standard" else {"gate_fn": nnx.hard_sigmoid, "activation_fn": nnx.relu}
    if cell == "SimpleCell":
        options.pop("gate_fn", None)
    carry, x = some_carry(cell, batch), normal(1, (*batch, D))
    assert_close(make(fused, cell, **options)(carry, x), make(NNX, cell, **options)(carry, x))


@pytest.mark.parametrize("carry_dtype", [jnp.float32, jnp.bfloat16], ids=["carry=f32", "carry=bf16"])
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16], ids=["none", "f32", "bf16"])
@pytest.mark.parametrize("cell", CELLS[::2])
def test_a_step_has_the_dtypes_of_flax(cell, dtype, carry_dtype):
    carry, x = jax.tree.map(lambda x: x.astype(carry_dtype), some_carry(cell)), normal(1, (B, D))
    tol = 2e-2 if jnp.bfloat16 in (dtype, carry_dtype) else 2e-6
    assert_close(make(fused, cell, dtype=dtype)(carry, x), make(NNX, cell, dtype=dtype)(carry, x), tol=tol)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_normed_gru_passes_its_options_on(norm):
    options = {"norm": norm, "epsilon": 0.3, "update_bias": 0.5}
    xs, call = normal(1, (T, B, D)), {"initial_carry": some_carry("NormGRUCell")}
    want, got = (
        outputs_and_gradients(
            of.RNN(make(of, "NormGRUCell", **options), time_major=True, return_carry=True), xs, **call
        )
        for of in (NNX, fused)
    )
    assert_close(got, want, tol=1e-5)
    options["cell_norm"] = options.pop("norm")
    stack = make(fused, "NormGRU", time_major=True, return_carry=True, **options)
    cell = make(fused, "NormGRUCell", norm=norm)
    nnx.update(stack.layers[0], nnx.state(cell, nnx.Param))
    last, ys = stack(xs, initial_carry=(call["initial_carry"],))
    assert_close((last[0], ys), got[2])


def test_a_normed_gru_says_what_it_cannot_do():
    cell = make(fused, "NormGRUCell")
    cell.gain = nnx.Param(jnp.ones(H))
    for implementation in (None, "triton"):
        with pytest.raises(
            NotImplementedError, match="cannot run a cell with the parameter gain, which jaxrnn does not"
        ):
            fused.RNN(cell, implementation=implementation)(normal(1, (B, T, D)))
    for kind, norm in ((fused.NormGRU, "cell_norm"), (fused.NormGRUCell, "norm")):
        with pytest.raises(
            ValueError, match=f"{kind.__name__}: num_blocks must be 1 for a cell whose norm sees all uni"
        ):
            kind(D, H, num_blocks=2, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match=f'{kind.__name__}: {norm} must be "rms" or "layer", got \'batch\''):
            kind(D, H, rngs=nnx.Rngs(0), **{norm: "batch"})


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("source", [fused, nnx], ids=["our_cell", "flax_cell"])
def test_a_simple_cell_has_two_activations_that_can_be_fused(source, activation):
    xs, options = normal(1, (B, T, D)), {"activation_fn": getattr(nnx, activation)}
    want = outputs_and_gradients(nnx.RNN(make(nnx, "SimpleCell", **options)), xs)
    cell = make(source, "SimpleCell", **options)
    for rnn in (fused.RNN(cell), fused.RNN(copy.deepcopy(cell))):
        assert reason_to_scan(rnn.cell) is None
        assert_close(outputs_and_gradients(rnn, xs), want, tol=1e-5)


def test_a_simple_cell_with_a_recurrent_bias_uses_it():
    cells = [make(m, "SimpleCell") for m in (nnx, fused)]
    for cell in cells:
        cell.dense_h = randomized(nnx.Linear(H, H, rngs=nnx.Rngs(0)))
    want, got = (nnx.RNN(cells[0]), fused.RNN(cells[1]))
    assert_close(got(normal(1, (B, T, D))), want(normal(1, (B, T, D))))


def test_a_stack_of_simple_rnns_has_one_activation():
    xs, relu = normal(1, (B, T, D)), make(fused, "SimpleRNN", num_layers=2, activation_fn=nnx.relu)
    want = xs
    for cell in relu.layers:
        assert cell.activation_fn is nnx.relu
        want = nnx.RNN(cell)(want)
    assert_close(relu(xs), want)
    with pytest.raises(NotImplementedError, match="neither tanh nor relu; use one RNN per layer"):
        make(fused, "SimpleRNN", activation_fn=nnx.elu)(xs)


def test_a_gru_with_recurrent_biases_uses_them():
    """A later Flax may have these biases, in `dense_h`."""
    cell, carry, xs = make(fused, "GRUCell"), some_carry("GRUCell"), normal(1, (T, B, D))
    before = packed_params(cell)
    cell.dense_h = nnx.Linear(H, 3 * H, rngs=nnx.Rngs(0))
    cell.dense_h.kernel[...] = before.w_hh
    cell.dense_h.bias[...] = normal(7, (3 * H,))
    want = make(nnx, "GRUCell")
    want.dense_h = cell.dense_h
    assert_close(
        fused.RNN(cell, time_major=True)(xs, initial_carry=carry),
        nnx.RNN(want, time_major=True)(xs, initial_carry=carry),
    )


def test_a_gru_with_a_recurrent_bias_of_n_uses_it(monkeypatch):
    """flax#5595 proposes this bias for a later Flax: its `__init__` draws the bias, and so does ours."""
    before = nnx.GRUCell.__init__

    def init(self, in_features, hidden_features, *, bias_init, rngs, **options):
        before(self, in_features, hidden_features, bias_init=bias_init, rngs=rngs, **options)
        self.hn_bias = nnx.Param(bias_init(rngs.params(), (hidden_features,)))

    monkeypatch.setattr(nnx.GRUCell, "__init__", init)
    options = {"bias_init": nnx.initializers.normal(), "rngs": nnx.Rngs(3)}
    cell, carry, xs = fused.GRUCell(D, H, **options), some_carry("GRUCell"), normal(1, (T, B, D))
    params = packed_params(cell)
    np.testing.assert_array_equal(params.b_hn, cell.hn_bias[...])
    assert params.b_hn.any()
    assert_close(fused.RNN(cell, time_major=True)(xs, initial_carry=carry), jaxrnn.gru(params, carry, xs)[1])
    without = jaxrnn.gru(params._replace(b_hn=jnp.zeros(H)), carry, xs)[1]
    cell.hn_bias = None
    assert_close(fused.RNN(cell, time_major=True)(xs, initial_carry=carry), without)


@pytest.mark.parametrize("cell", WITH_GATE_FN)
def test_a_cell_with_an_unknown_parameter_runs_as_flax_runs_it(cell):
    """With `implementation="triton"` the cell raises instead."""
    ours, carry, xs = make(fused, cell), some_carry(cell), normal(1, (T, B, D))
    want = nnx.RNN(make(NNX, cell), time_major=True)(xs, initial_carry=carry)
    ours.scale = nnx.Param(jnp.ones(H))
    assert_close(fused.RNN(ours, time_major=True)(xs, initial_carry=carry), want)
    with pytest.raises(NotImplementedError, match="cannot run a cell with the parameter scale, which jaxrnn does not"):
        fused.RNN(ours, time_major=True, implementation="triton")(xs, initial_carry=carry)


# --- RNN -------------------------------------------------------------------------------------------------------------


@pytest.mark.quick("cell")
@pytest.mark.parametrize(
    ("cell", "options"),
    cases.deal(
        ["default", "time_major-lengths", "time_major-reverse-lengths", "reverse-keep_order-lengths",
         "reverse-keep_order"], CELLS, whole=("GRUCell", "OptimizedLSTMCell"),
    ),
)  # fmt: skip
def test_rnn_equals_flax_rnn(cell, options):
    lengths = [7, 1, 3, 5] if "lengths" in options else None
    options = {name: name in options for name in ("time_major", "reverse", "keep_order")}
    xs = normal(1, (T, B, D) if options["time_major"] else (B, T, D))
    call = {"initial_carry": some_carry(cell)}
    call |= {} if lengths is None else {"seq_lengths": jnp.array(lengths)}
    want = outputs_and_gradients(nnx.RNN(make(NNX, cell), return_carry=True, **options), xs, **call)
    ours = fused.RNN(make(fused, cell), return_carry=True, **options)
    assert_close(outputs_and_gradients(ours, xs, **call), want, tol=1e-5)
    with_flax_cell = fused.RNN(make(NNX, cell))  # and with the options passed at the call
    assert_close(with_flax_cell(xs, return_carry=True, **options, **call), want[2])


@pytest.mark.parametrize(
    "options",
    [{}, {"reverse": True}, {"reverse": True, "keep_order": True}],
    ids=["forward", "reverse", "keep_order"],
)
@pytest.mark.parametrize("kind", ["RNN", "GRU"])
def test_traced_lengths_are_clipped(kind, options):
    options = {"return_carry": True, **options}
    rnn = fused.RNN(make(fused, "GRUCell"), **options) if kind == "RNN" else make(fused, "GRU", **options)
    xs, carry = normal(1, (B, T, D)), some_carry("GRUCell")
    carry = carry if kind == "RNN" else (carry,)
    call = nnx.jit(lambda rnn, lengths: rnn(xs, initial_carry=carry, seq_lengths=lengths))
    got = call(rnn, jnp.array([-1, T + 2, 3, 0]))
    assert_close(got, call(rnn, jnp.array([0, T, 3, 0])), tol=0)
    assert_close(jax.tree.map(lambda x: x[0], got[0]), jax.tree.map(lambda x: x[0], carry), tol=0)


def half(args, **_):
    """Halves the operands of a layer, as a fake quantization changes them."""
    return tuple(None if x is None else 0.5 * x for x in args)


def half_product(x, w, dimensions, **options):
    return 0.5 * jax.lax.dot_general(x, w, dimensions, **options)


EDITS = {
    "promote_dtype": half, "dtype": jnp.bfloat16, "preferred_element_type": jnp.bfloat16, "dot_general": half_product,
    "precision": jax.lax.Precision.HIGHEST, "use_bias": None, "bias": None, "a_later_option": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("cell", "edit"), cases.deal(itertools.product(EDITS, ("i", "h")), WITH_GATE_FN, ("GRUCell",)), ids=str
)
def test_a_layer_with_other_settings_computes_what_it_does_in_flax(cell, edit):
    name, side = edit
    cells = [make(source, cell) for source in (nnx, fused)]
    layers = [f"{'if_' if side == 'i' else 'hg'}" if cell == "LSTMCell" else f"dense_{side}"] * 2
    for one, layer in zip(cells, layers, strict=True):
        dense = getattr(one, layer)
        if name in ("use_bias", "bias"):  # the layer has a bias if it had none, and the reverse
            has_bias = dense.bias is None
            dense = randomized(nnx.Linear(*dense.kernel.shape, use_bias=has_bias, rngs=nnx.Rngs(0)))
            setattr(one, layer, dense)
        else:
            setattr(dense, name, EDITS[name])
    xs, carry = normal(1, (B, T, D)), some_carry(cell)
    if name not in ("use_bias", "bias"):
        assert f"{layers[0]} is not a plain nnx.Linear of the cell's dtype: {name}" in reason_to_scan(cells[1])
        with pytest.raises(NotImplementedError, match=name):
            fused.RNN(cells[1], implementation="triton")(xs)
    plain, ours = nnx.RNN(cells[0], return_carry=True), fused.RNN(cells[1], return_carry=True)
    assert_close(ours(xs, initial_carry=carry), plain(xs, initial_carry=carry))
    assert_close(cells[1](carry, xs[:, 0]), cells[0](carry, xs[:, 0]))


def test_a_stack_with_an_edited_layer_raises():
    stack = fused.GRU(D, H, rngs=nnx.Rngs(0))
    stack.layers[0].dense_h.dot_general = half_product
    with pytest.raises(NotImplementedError, match=r"a stack cannot run .* dense_h .*: dot_general; use one RNN"):
        stack(normal(1, (B, T, D)))


@pytest.mark.parametrize("module", [linen, fused], ids=["linen", "nnx"])
def test_an_option_that_flax_adds_later_is_not_ignored(module, monkeypatch):
    """`reset_gate` and the like change the formula; an option that is not known may do so, too."""
    from jaxrnn.modules import reasons

    cell = linen.GRUCell(H, bias_init=nnx.initializers.ones) if module is linen else make(fused, "GRUCell")
    reason = linen.cells.reason_to_scan if module is linen else reason_to_scan
    name = "bias_init" if module is linen else "carry_init"
    if module is fused:
        cell.carry_init = nnx.initializers.ones
    assert reason(cell) is None
    monkeypatch.setattr(reasons, "_OPTIONS", reasons._OPTIONS - {name})
    assert reason(cell) == f"a cell with the option {name}, which jaxrnn does not know"


@pytest.mark.parametrize("cell", [*WITH_GATE_FN, "MGUCell"])
def test_every_option_of_the_cells_of_this_flax_is_known(cell):
    from jaxrnn.modules.reasons import _OPTIONS

    of_linen = {field.name for field in dataclasses.fields(getattr(nn, cell))}
    assert of_linen and of_linen <= _OPTIONS
    if hasattr(nnx, cell):
        made = {name for name in vars(getattr(nnx, cell)(D, H, rngs=nnx.Rngs(0))) if not name.startswith("_")}
        layers = {name for name in made if name.startswith(("dense_", "i", "h"))} - {"in_features", "hidden_features"}
        assert layers and made - layers - {"rngs"} <= _OPTIONS


def test_norms_with_their_own_promote_dtype_run_as_in_flax():
    x, residual = normal(1, (B, H)), normal(2, (B, H))
    ours, flax_norm = (source.LayerNorm(H, promote_dtype=half, rngs=nnx.Rngs(0)) for source in (fused, nnx))
    y, total = ours(x, residual=residual)
    assert_close((ours(x), y, total), (flax_norm(x), flax_norm(x + residual), x + residual), tol=0)
    ours.implementation = "triton"
    with pytest.raises(NotImplementedError, match="its own promote_dtype"):
        ours(x)


class OnesCell(nnx.GRUCell):
    """A cell that starts from ones."""

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.ones((*input_shape[:-1], self.hidden_features))


def test_episodes_start_from_what_the_class_of_the_cell_says():
    cell, xs = OnesCell(D, H, rngs=nnx.Rngs(0)), normal(1, (B, T, D))
    rnn, resets = fused.RNN(cell), jnp.zeros((B, T)).at[:, 3].set(1)
    assert_close(rnn(xs, initial_carry=jnp.zeros((B, H)), resets=resets)[:, 3:], rnn(xs[:, 3:]))


class OnesStack(fused.GRU):
    def initialize_carry(self, input_shape, rngs=None):
        return jax.tree.map(jnp.ones_like, super().initialize_carry(input_shape, rngs))


def test_episodes_of_a_stack_start_from_what_its_class_says():
    stack, xs = OnesStack(D, H, rngs=nnx.Rngs(0)), normal(1, (B, T, D))
    resets, carry = jnp.zeros((B, T)).at[:, 3].set(1), (jnp.zeros((B, H)),)
    assert_close(stack(xs, initial_carry=carry, resets=resets)[:, 3:], stack(xs[:, 3:]))


def test_only_a_carry_that_is_used_is_drawn():
    draws = []

    def carry_init(key, shape, dtype=jnp.float32):
        draws.append(shape)
        return jnp.ones(shape, dtype)

    xs, resets, h = normal(1, (B, T, D)), jnp.zeros((B, T)), jnp.zeros((B, H))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Flax prefers `initialize_carry(carry_init=)`
        rnn = fused.RNN(make(fused, "GRUCell", carry_init=carry_init))
    stack = make(fused, "GRU", carry_init=carry_init)
    for module, carry, options in ((rnn, h, {}), (stack, (h,), {"rngs": nnx.Rngs(0)})):
        for call, count in [
            ({}, 1), ({"resets": resets}, 1), ({"initial_carry": carry}, 0),
            ({"initial_carry": carry, "resets": resets}, 1),
            ({"initial_carry": carry, "resets": resets, "reset_carry": carry}, 0),
        ]:  # fmt: skip
            draws.clear()
            module(xs, **call, **options)
            assert len(draws) == count, call


@pytest.mark.parametrize("kind", ["GRUCell", "scanned", "GRU", "LSTM"])
def test_padding_may_be_nan(kind):
    lengths = jnp.array([2, T, 0, 3])
    valid = jnp.arange(T) < lengths[:, None]
    if kind in ("GRU", "LSTM"):
        rnn = make(fused, kind, num_layers=2, bidirectional=True)
    else:
        options = {"gate_fn": nnx.hard_sigmoid} if kind == "scanned" else {}
        rnn = fused.RNN(make(fused, "GRUCell", **options))

    def loss(rnn, xs):
        return jnp.sum(jnp.where(valid[..., None], rnn(xs, seq_lengths=lengths), 0.0) ** 2)

    results = []
    for value in (0.0, jnp.nan):
        xs = jnp.where(valid[..., None], normal(1, (B, T, D)), value)
        results.append(nnx.to_pure_dict(nnx.grad(loss)(rnn, xs)))
    assert_close(*results, tol=0)


class NoisyCell(nnx.Module):
    """A cell that draws random numbers and counts its steps."""

    num_feature_axes = 1

    def __init__(self, rngs):
        self.cell = make(nnx, "GRUCell")
        self.dropout = nnx.Dropout(0.5, rngs=rngs, rng_collection="recurrent_dropout")
        self.steps = nnx.Variable(jnp.zeros(()))

    def __call__(self, carry, x):
        self.steps[...] += 1
        carry, y = self.cell(self.dropout(carry), x)
        return carry, y

    def initialize_carry(self, input_shape, rngs=None):
        return self.cell.initialize_carry(input_shape, rngs)


@pytest.mark.parametrize("broadcast_rngs", [None, "recurrent_dropout"])
def test_other_cells_run_as_flax_runs_them(broadcast_rngs):
    xs = normal(1, (B, T, D))
    want, got = (
        rnn(NoisyCell(nnx.Rngs(recurrent_dropout=0)), broadcast_rngs=broadcast_rngs) for rnn in (nnx.RNN, fused.RNN)
    )
    for _ in range(2):
        assert_close(got(xs), want(xs))
    assert got.cell.steps[...] == 2 * T
    assert_identical(got, want)


@pytest.mark.parametrize("cell", ["GRUCell", "SimpleCell", "NormGRUCell", "OwnCell"])
def test_resets_cut_a_sequence_for_every_cell(cell):
    xs = normal(1, (T, B, D))
    rnn = fused.RNN(make(NNX, cell), time_major=True, return_carry=True)
    carry, ys = rnn(xs, resets=jnp.zeros((T, B), int).at[3].set(2))
    _, head = rnn(xs[:3])
    want_carry, tail = rnn(xs[3:])
    assert_close((carry, ys), (want_carry, jnp.concatenate([head, tail])))


@pytest.mark.parametrize(
    ("state", "reverse", "lengths"),
    [("none", False, None), ("h", True, None), ("bh", False, [7, 0, 3, 5]), ("tbh", True, [7, 0, 3, 5])],
    ids=["zeros", "h-reverse", "bh-lengths", "tbh-reverse-lengths"],
)
@pytest.mark.parametrize("cell", ["GRUCell", "OptimizedLSTMCell", "SimpleCell", "NormGRUCell"])
def test_fused_and_scanned_cells_agree_on_resets(cell, reverse, state, lengths):
    xs, resets, carry = normal(1, (B, T, D)), some_resets((B, T)), some_carry(cell)
    shape = {"none": None, "h": (H,), "bh": (B, H), "tbh": (B, T, H)}[state]
    new = None if shape is None else normal(20, shape)
    new = (normal(21, shape), new) if "LSTM" in cell and shape is not None else new

    class Call(nnx.Module):
        def __init__(self, cell):
            self.rnn = fused.RNN(cell, return_carry=True, reverse=reverse)

        def __call__(self, xs, carry, new):
            lens = None if lengths is None else jnp.array(lengths)
            return self.rnn(xs, initial_carry=carry, resets=resets, reset_carry=new, seq_lengths=lens)

    if cell not in WITH_GATE_FN:  # it has no `activation_fn`, but the cell in Flax's layers has its parameters
        scanned, ours = (Call(make(source, cell)) for source in (NNX, fused))
    else:
        scanned, ours = (Call(make(fused, cell, **options)) for options in ({"activation_fn": tanh}, {}))
    want = outputs_and_gradients(scanned, xs, carry, new)
    assert_close(outputs_and_gradients(ours, xs, carry, new), want, tol=1e-5)


@pytest.mark.parametrize("lengths", [None, [7, 1, 3, 5]], ids=["whole", "lengths"])
@pytest.mark.parametrize("cell", CELLS[::2])
def test_bidirectional_equals_flax_bidirectional(cell, lengths):
    xs, lengths = normal(1, (B, T, D)), None if lengths is None else jnp.array(lengths)
    results = []
    for source in (fused, NNX):
        rnns = [source.RNN(randomized(make(source, cell), seed)) for seed in (1, 2)]
        results.append(nnx.Bidirectional(*rnns, return_carry=True)(xs, seq_lengths=lengths))
    assert_close(*results)


def test_a_random_carry_equals_that_of_flax_and_starts_episodes():
    with warnings.catch_warnings():
        # Flax warns that `initialize_carry` should be given `carry_init` instead, which an RNN does not do
        warnings.simplefilter("ignore")
        want, got = (
            m.RNN(make(m, "GRUCell", carry_init=nnx.initializers.normal(1.0)), rngs=nnx.Rngs(3)) for m in (nnx, fused)
        )
    xs = normal(1, (B, T, D))
    first = want(xs)
    assert_close(got(xs), first)
    resets = jnp.ones((B, T)).at[:, 1:].set(0)
    rngs = lambda: nnx.Rngs(carry=8)  # noqa: E731
    ys = got(xs, initial_carry=jnp.ones((B, H)), resets=resets, rngs=rngs())
    assert_close(ys, want(xs, rngs=rngs()))
    assert jnp.any(ys != first)


def test_replaced_layers_are_used():
    xs = normal(1, (B, T, D))
    cells = [make(m, "GRUCell") for m in (nnx, fused)]
    for cell in cells:
        cell.dense_i = nnx.LoRALinear(D, 3 * H, lora_rank=2, rngs=nnx.Rngs(0))
        cell.dense_i.lora.lora_b[...] = normal(3, (2, 3 * H))
    want, got = nnx.RNN(cells[0]), fused.RNN(cells[1])
    assert_close(got(xs), want(xs))
    with pytest.raises(NotImplementedError, match="whose dense_i is not a plain"):
        fused.RNN(cells[1], implementation="triton")(xs)
    stack = fused.GRU(D, H, rngs=nnx.Rngs(0))
    stack.layers[0].dense_i = cells[1].dense_i
    with pytest.raises(NotImplementedError, match="one RNN per layer"):
        stack(xs)


def test_nnx_vmap_over_seeds_equals_a_loop_over_seeds():
    xs, resets = normal(1, (B, T, D)), some_resets((B, T))

    def train_step(key):
        rnn = fused.RNN(fused.GRUCell(D, H, rngs=nnx.Rngs(key)))
        grads = nnx.grad(lambda rnn: jnp.sum(rnn(xs, resets=resets) ** 2))(rnn)
        nnx.update(rnn, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(rnn, nnx.Param), grads))
        return rnn(xs, resets=resets)

    keys = jax.random.split(jax.random.key(0), 3)
    want = jnp.stack([train_step(key) for key in keys])
    assert_close(nnx.jit(nnx.vmap(train_step))(keys), want, tol=1e-5)


# --- stacks ----------------------------------------------------------------------------------------------------------


def as_linen(cell, params, gates):
    """Returns the parameters of an NNX cell in the form of a linen cell."""
    tree = {}
    for side, name in (("i", "dense_i"), ("h", "dense_h")):
        for k, gate in enumerate(gates):
            tree[side + gate] = {x: jnp.split(value, len(gates), axis=-1)[k] for x, value in params[name].items()}
    if "proj" in params:
        tree["proj"] = params["proj"]
    tree |= {name: params[name] for name in ("norm_i", "norm_h") if name in params}
    if cell == "GRU":
        tree["hn"]["bias"] = jnp.zeros_like(tree["in"]["bias"])
    return tree


@pytest.mark.quick("cell")
@pytest.mark.parametrize("lengths", [None, [7, 0, 3, 5]], ids=["whole", "lengths"])
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "LSTM-proj", "SimpleRNN", "NormGRU"])
def test_stacks_equal_those_of_linen(cell, lengths):
    """Other tests compare the linen stacks with torch.nn, and with separate runs of their episodes."""
    options = {"num_layers": 2, "bidirectional": True, "learned_carry": True, "return_carry": True}
    cell, *proj = cell.split("-")
    options |= {"proj_size": 3} if proj else {}
    gates = {"GRU": "rzn", "LSTM": "ifgo", "SimpleRNN": [""], "NormGRU": "rnu"}[cell]
    stack, want = make(fused, cell, **options), getattr(linen, cell)(H, **options)
    xs, call = normal(1, (B, T, D)), {"resets": some_resets((B, T))}
    call |= {"seq_lengths": None if lengths is None else jnp.array(lengths)}

    def run_linen(tree, xs):
        params = {}
        for k in range(2):
            for suffix in ("", "_reverse"):
                layer = f"layers_{k}{suffix}"
                params[layer] = as_linen(cell, tree[f"layers{suffix}"][k], gates)
                params |= {f"{layer}_carry_{s}": x for s, x in tree[f"carries{suffix}"][k].items()}
        return want.apply({"params": params}, xs, **call)

    @jax.jit
    def compute(tree, xs):
        def loss(tree, xs):
            outputs = run_linen(tree, xs)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs)), outputs

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(tree, xs)

    (d_tree, d_xs), outputs = compute(nnx.to_pure_dict(nnx.state(stack, nnx.Param)), xs)
    assert_close(outputs_and_gradients(stack, xs, **call), (d_tree, (d_xs,), outputs), tol=1e-5)


@pytest.mark.parametrize("cell", ["GRU", "LSTM", "SimpleRNN", "NormGRU"])
def test_a_stack_can_be_tabulated(cell):
    """`nnx.tabulate` calls every public method of a module under `nnx.jit`, so each must return arrays."""
    stack = getattr(jaxrnn.nnx, cell)(D, H, num_layers=2, bidirectional=True, learned_carry=True, rngs=nnx.Rngs(0))
    assert cell in nnx.tabulate(stack, jnp.ones((B, T, D)))


def test_layers_have_the_initial_values_of_flax_cells():
    rngs = nnx.Rngs(3)
    want = [nnx.GRUCell(D, H, rngs=rngs), nnx.GRUCell(D, H, rngs=rngs), nnx.GRUCell(2 * H, H, rngs=rngs)]
    stack = fused.GRU(D, H, num_layers=2, bidirectional=True, rngs=nnx.Rngs(3))
    for got, cell in zip((stack.layers[0], stack.layers_reverse[0], stack.layers[1]), want, strict=True):
        assert_identical(got, cell)
    assert_close(stack.initialize_carry((B, D)), ((jnp.zeros((B, H)),) * 2,) * 2, tol=0)


def test_dropout_follows_train_and_eval():
    stack = make(fused, "LSTM", num_layers=2, dropout_rate=0.5)
    xs = normal(1, (B, T, D))
    plain = make(fused, "LSTM", num_layers=2)
    run = nnx.jit(lambda stack, xs: stack(xs))
    first, second = run(stack, xs), run(stack, xs)
    assert jnp.any(first != second)
    stack.eval()
    assert_close(run(stack, xs), plain(xs))
    stack.train()
    assert_close(stack(xs, deterministic=True), plain(xs))
    rngs = lambda: nnx.Rngs(dropout=5)  # noqa: E731
    assert_close(stack(xs, rngs=rngs()), stack(xs, rngs=rngs()), tol=0)
    nothing = make(fused, "LSTM", num_layers=2, dropout_rate=1.0)
    nothing.layers[0].dense_i.kernel[...] = normal(8, (D, 4 * H))  # all outputs of the first layer are dropped
    assert_close(nothing(xs), make(fused, "LSTM", num_layers=2, dropout_rate=1.0)(xs), tol=0)


def test_a_stack_starts_from_a_random_carry():
    stack = make(fused, "LSTM", num_layers=2, carry_init=nnx.initializers.normal(1.0))
    xs, resets = normal(1, (B, T, D)), some_resets((B, T))
    carry = stack.initialize_carry((B, D), nnx.Rngs(carry=2))
    assert len({float(x[0, 0]) for x in jax.tree.leaves(carry)}) == 4
    want = stack(xs, initial_carry=carry, resets=resets, reset_carry=carry)
    assert_close(stack(xs, resets=resets, rngs=nnx.Rngs(carry=2)), want, tol=0)
    with pytest.raises(ValueError, match="needs rngs"):
        stack(xs)


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"num_layers": 0}, {}, "num_layers must be at least 1, got 0"),
        ({"dropout_rate": 1.5}, {}, "dropout_rate must be between 0 and 1"),
        ({"bidirectional": True}, {"reverse": True}, "reverse must be False for a bidirectional stack"),
        ({"implementation": "cuda"}, {}, "implementation must be"),
        ({}, {"reset_carry": (jnp.zeros(H),)}, "reset_carry is given but resets is None"),
        ({}, {"initial_carry": jnp.zeros((B, H))}, "initial_carry of this stack must be a tuple"),
        ({}, {"seq_lengths": jnp.array([1, 2])}, r"seq_lengths must be \[\*batch\] = \(4,\)"),
    ],
    ids=["num_layers", "dropout_rate", "reverse", "implementation", "reset_carry", "initial_carry", "seq_lengths"],
)
def test_stacks_reject_wrong_arguments(options, call, message):
    with pytest.raises(ValueError, match=message):
        make(fused, "GRU", **options)(normal(1, (B, T, D)), **call)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cell", "rnn", "rnn-of_cell", "stack"])
def test_options_reach_the_function(name, monkeypatch):
    seen = []

    def function(*args, **options):
        seen.append({name: options[name] for name in ("precision", "implementation")})
        return real(*args, **(options | {"implementation": None}))

    real = recurrent.run
    monkeypatch.setattr(recurrent, "run", function)
    options = {"precision": jax.lax.Precision.HIGHEST, "implementation": "triton"}
    xs, carry = normal(1, (B, T, D)), jnp.zeros((B, H))
    if name == "cell":
        make(fused, "GRUCell", **options)(carry, xs[:, 0])
    elif name == "stack":
        make(fused, "GRU", **options)(xs)
    elif name == "rnn":
        fused.RNN(make(nnx, "GRUCell"), **options)(xs)
    else:
        fused.RNN(make(fused, "GRUCell", **options))(xs)
    assert seen == [options]


@pytest.mark.parametrize(
    ("cell", "options", "reason"),
    [
        ("GRUCell", {"gate_fn": nnx.relu}, "gate_fn is not sigmoid"),
        ("LSTMCell", {"activation_fn": nnx.relu}, "activation_fn is not tanh"),
        ("SimpleCell", {"activation_fn": nnx.elu}, "activation_fn is neither tanh nor relu"),
        ("SimpleCell", {"residual": True}, "a SimpleCell with residual=True"),
        ("OwnCell", {}, "a OwnCell .only GRUCell, .* and SimpleCell of jaxrnn"),
    ],
)
def test_triton_says_why_a_cell_cannot_be_fused(cell, options, reason):
    xs, rnn = normal(1, (B, T, D)), functools.partial(fused.RNN, make(NNX, cell, **options))
    assert rnn()(xs).shape == (B, T, H)
    with pytest.raises(NotImplementedError, match=reason):
        rnn(implementation="triton")(xs)
    with pytest.raises(NotImplementedError, match="default_matmul_precision"):
        rnn(precision="highest")(xs)


def test_rnn_with_non_default_state_axes_runs_under_scan():
    xs = normal(1, (B, T, D))
    axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
    rnn = functools.partial(fused.RNN, make(fused, "GRUCell"), state_axes=axes)
    assert_close(rnn()(xs), fused.RNN(make(fused, "GRUCell"))(xs))
    with pytest.raises(NotImplementedError, match="an RNN with non-default state_axes"):
        rnn(implementation="triton")(xs)


@pytest.mark.parametrize(
    ("cell", "call", "message"),
    [
        ("GRUCell", {"resets": jnp.zeros((T, B))}, r"resets must be \[\*batch, T\] = \(4, 7\)"),
        ("OwnCell", {"resets": jnp.zeros((T, B))}, r"resets must be \[\*batch, T\] = \(4, 7\)"),
        ("GRUCell", {"reset_carry": jnp.zeros((H,))}, "reset_carry is given but resets is None"),
        ("GRUCell", {"seq_lengths": jnp.array([1, 2])}, r"seq_lengths must be \[\*batch\] = \(4,\)"),
        ("GRUCell", {"initial_carry": (jnp.zeros((B, H)),) * 2}, "initial_carry must be one array for a GRU"),
        ("LSTMCell", {"initial_carry": jnp.zeros((B, H))}, r"initial_carry must be a pair \(c, h\) for an LSTM"),
    ],
    ids=["resets", "resets-any_cell", "reset_carry", "seq_lengths", "pair_for_gru", "array_for_lstm"],
)
def test_rnn_rejects_wrong_arguments(cell, call, message):
    with pytest.raises(ValueError, match=message):
        fused.RNN(make(NNX, cell))(normal(1, (B, T, D)), **call)


@pytest.mark.quick
@pytest.mark.interpret
@pytest.mark.parametrize("cell", CELLS[::2])
def test_triton_runs_an_rnn_as_xla_does(cell):
    xs, call = normal(1, (B, 3, D)), {"resets": some_resets((B, 3)), "initial_carry": some_carry(cell)}
    triton, xla = (
        outputs_and_gradients(fused.RNN(make(fused, cell), implementation=name, precision="highest"), xs, **call)
        for name in ("triton", "xla")
    )
    assert_close(triton, xla, tol=2e-5)
