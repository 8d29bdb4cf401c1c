"""Compares the linen modules with Flax's own, and with the classes that agents define, on the same parameters."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
import re
import typing

import cases
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trees
from agents import ActorCritic, agents_rnn
from flax import nnx, serialization
from plain_cells import LINEN
from trees import assert_close, assert_identical, normal, some_resets

import jaxrnn
import jaxrnn.nnx
from jaxrnn import linen, recurrent
from jaxrnn.linen.rnn import SCAN_OPTIONS, reason_to_scan

T, B, D, H = 7, 4, 5, 6
CELLS = ["GRUCell", "LSTMCell", "OptimizedLSTMCell", "MGUCell", "SimpleCell", "NormGRUCell"]
WITH_GATE_FN = [cell for cell in CELLS if cell != "NormGRUCell"]


def some_carry(cell, batch=(B,), seed=5):
    return trees.some_carry(cell, batch, H, seed)


class OwnCell(nn.GRUCell):
    """A cell of the user's, which no class of `jaxrnn` replaces."""


def random_variables(module, *args, **kwargs):
    """Returns random variables with the shapes of `module.init`: zero biases would hide a misplaced bias."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(functools.partial(module.init, **kwargs), jax.random.key(0), *args)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 2, x.dtype), shapes)


def run(module, variables, *args, **kwargs):
    """Runs `module.apply` under `jax.jit`; keyword arguments that are bools are static."""
    arrays = {name: x for name, x in kwargs.items() if not isinstance(x, bool)}
    static = {name: x for name, x in kwargs.items() if isinstance(x, bool)}
    return jax.jit(functools.partial(module.apply, **static))(variables, *args, **arrays)


def outputs_and_gradients(module, variables, *args, **kwargs):
    """Returns the gradients of a scalar of the outputs to the variables and to all of `args`, and the outputs."""

    @jax.jit
    def compute(variables, args):
        def loss(variables, args):
            outputs = module.apply(variables, *args, **kwargs)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs)), outputs

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, args)

    return compute(variables, args)


# --- the class that agents carry -------------------------------------------------------------------------------------


CELL_TYPES = {"LSTMCell": "lstm", "OptimizedLSTMCell": "optimized_lstm", "MGUCell": "mgu", "SimpleCell": "simple",
              "NormGRUCell": "norm_gru"}  # fmt: skip


def replacement(cell, hidden_first):
    """Returns the class that a user imports instead of a GRU, or defines instead of another cell."""
    imported = linen.HiddenFirstScannedRNN if hidden_first else linen.ScannedRNN
    if cell == "GRUCell":
        return imported

    class ScannedRNN(imported):
        cell_type: str = CELL_TYPES[cell]

    return ScannedRNN


AGENTS = [
    pytest.param(cell, hidden_first, id=f"{cell}-{'hidden_first' if hidden_first else 'batch_first'}")
    for cell, hidden_first in itertools.product(CELLS, [False, True])
]


def agents(cell, hidden_first, batch=(B,)):
    """Yields `(network, initial carry)` with the agents' own class and then with its replacement."""
    for rnn in (agents_rnn(cell, hidden_first), replacement(cell, hidden_first)):
        sizes = (H, *batch) if hidden_first else (batch if len(batch) > 1 else batch[0], H)
        yield ActorCritic(rnn), rnn.initialize_carry(*sizes)


@pytest.mark.quick("cell")
@pytest.mark.parametrize(("cell", "hidden_first"), AGENTS)
def test_changing_the_import_changes_no_initial_value(cell, hidden_first):
    x = jnp.zeros((1, B, 3)), jnp.zeros((1, B))  # resets are float32 here, bool later
    (want, want_carry), (got, got_carry) = (
        (network.init(jax.random.key(7), carry, x), carry) for network, carry in agents(cell, hidden_first)
    )
    name = f"{cell}_{0 if hidden_first else 1}"
    assert list(got["params"]["ScannedRNN_0"]) == [name]
    assert_identical(got, want)
    assert_close(got_carry, want_carry, tol=0)


@pytest.mark.quick("cell")
@pytest.mark.parametrize(("steps", "batch"), [(1, (B,)), (T, (2, 3))], ids=["T1-B4", "T7-B2-A3"])
@pytest.mark.parametrize(("cell", "hidden_first"), AGENTS[::2])
def test_agents_with_the_replacement_compute_the_same(cell, hidden_first, steps, batch):
    (flax_agent, _), (agent, _) = agents(cell, hidden_first, batch)
    x = normal(1, (steps, *batch, 3)), some_resets((steps, *batch)).astype(jnp.float32)
    carry = some_carry(cell, batch)
    variables = random_variables(flax_agent, carry, x)
    want = outputs_and_gradients(flax_agent, variables, carry, x)
    assert_close(outputs_and_gradients(agent, variables, carry, x), want, tol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize(("cell", "hidden_first"), AGENTS)
def test_a_checkpoint_of_the_agents_loads(cell, hidden_first):
    (flax_agent, carry), (agent, _) = agents(cell, hidden_first)
    x = normal(1, (T, B, 3)), some_resets((T, B))
    trained = random_variables(flax_agent, carry, x)
    ours = jax.tree.map(jnp.zeros_like, random_variables(agent, carry, x))
    restored = serialization.from_bytes(ours, serialization.to_bytes(trained))
    assert_close(run(agent, restored, carry, x), run(flax_agent, trained, carry, x))


def test_vmap_over_seeds_equals_a_loop_over_seeds():
    rnn, carry, x = linen.ScannedRNN(), some_carry("GRUCell"), (normal(1, (T, B, D)), some_resets((T, B)))

    def train_step(key):
        variables = rnn.init(key, carry, x)
        grads = jax.grad(lambda v: jnp.sum(rnn.apply(v, carry, x)[1] ** 2))(variables)
        return rnn.apply(jax.tree.map(lambda v, g: v - 0.1 * g, variables, grads), carry, x)

    keys = jax.random.split(jax.random.key(0), 3)
    want = jax.tree.map(lambda *ys: jnp.stack(ys), *map(jax.jit(train_step), keys))
    assert_close(jax.jit(jax.vmap(train_step))(keys), want, tol=1e-5)


def test_a_rollout_of_single_steps_equals_one_sequence():
    rnn, carry = linen.ScannedRNN(), some_carry("GRUCell")
    xs, resets = normal(1, (T, B, D)), some_resets((T, B))
    variables = random_variables(rnn, carry, (xs, resets))

    def env_step(carry, x):
        carry, y = rnn.apply(variables, carry, jax.tree.map(lambda leaf: leaf[None], x))
        return carry, y[0]

    assert_close(jax.lax.scan(env_step, carry, (xs, resets)), run(rnn, variables, carry, (xs, resets)))


def test_resets_are_the_previous_dones():
    """The step with the reset does not depend on the steps before it, and the reset does not change those steps."""
    rnn, carry = linen.ScannedRNN(), some_carry("GRUCell")
    xs, resets = normal(1, (T, B, D)), jnp.zeros((T, B)).at[3].set(1)
    variables = random_variables(rnn, carry, (xs, resets))
    _, ys = run(rnn, variables, carry, (xs, resets))
    _, before = run(rnn, variables, carry, (xs[:3], resets[:3]))
    _, after = run(rnn, variables, rnn.initialize_carry(B, H), (xs[3:], jnp.zeros((T - 3, B))))
    assert_close(ys, jnp.concatenate([before, after]))


@pytest.mark.parametrize(
    ("make", "args", "shape"),
    [
        pytest.param(lambda: linen.ScannedRNN, (B, H), (B, H), id="class"),
        pytest.param(lambda: linen.ScannedRNN, ((2, 3), H), (2, 3, H), id="class-two_batch_axes"),
        pytest.param(lambda: linen.ScannedRNN(), (B, H), (B, H), id="instance"),
        pytest.param(lambda: linen.ScannedRNN(H, "gru"), (B,), (B, H), id="instance-that_knows_the_width"),
        pytest.param(lambda: linen.ScannedRNN(H, "optimised_lstm"), (B,), [(B, H)] * 2, id="instance-lstm"),
        pytest.param(lambda: replacement("LSTMCell", False), (B, H), [(B, H)] * 2, id="subclass-lstm"),
        pytest.param(lambda: linen.HiddenFirstScannedRNN, (H, 2, 3), (2, 3, H), id="hidden_first"),
        pytest.param(lambda: replacement("OptimizedLSTMCell", True), (H, B), [(B, H)] * 2, id="hidden_first-lstm"),
    ],
)
def test_initialize_carry(make, args, shape):
    carry = make().initialize_carry(*args)
    leaves = [carry] if isinstance(shape, tuple) else list(carry)
    assert [leaf.shape for leaf in leaves] == ([shape] if isinstance(shape, tuple) else shape)
    assert all(leaf.dtype == jnp.float32 and not leaf.any() for leaf in leaves)


@pytest.mark.parametrize("base", [linen.ScannedRNN, linen.HiddenFirstScannedRNN])
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("cell_type", "lstm", "`cell_type: Any = 'lstm'`"), ("implementation", "xla", "`implementation: Any = 'xla'`"),
        ("cell_name", "GRUCell_0", "`cell_name: str | None = 'GRUCell_0'`"), ("num_blocks", 2, "`num_blocks: int = 2`"),
        ("hidden_state_dim", 7, "`hidden_state_dim: int | None = 7`"),
        ("param_dtype", jnp.bfloat16, "`param_dtype: Any = "),
    ],
)  # fmt: skip
def test_attributes_of_a_subclass_without_a_type_raise(base, name, value, line):
    """A dataclass ignores them: the subclass would run another cell than the one it names."""
    with pytest.raises(TypeError, match=re.escape(line)):
        type("ScannedRNN", (base,), {name: value})


def test_names_and_cells_of_scanned_rnn_are_selectable():
    x = jnp.zeros((T, B, D)), jnp.zeros((T, B))
    for rnn, name in [
        (linen.ScannedRNN(cell_name="GRUCell_0"), "GRUCell_0"),
        (linen.ScannedRNN(cell_type=nn.GRUCell), "GRUCell_1"),
        (linen.ScannedRNN(H, "simple"), "SimpleCell_1"),
    ]:
        assert list(random_variables(rnn, jnp.zeros((B, H)), x)["params"]) == [name]


@pytest.mark.parametrize("cell", [nn.GRUCell, linen.GRUCell, nn.OptimizedLSTMCell, OwnCell])
def test_a_partial_of_a_cell_class_sets_its_other_options(cell):
    constants = nn.initializers.constant(0.5), nn.initializers.constant(-0.5)
    make = functools.partial(cell, kernel_init=constants[0], recurrent_kernel_init=constants[1])
    scanned, alone = linen.ScannedRNN(cell_type=make), linen.RNN(make(H), time_major=True, return_carry=True)
    xs, resets = normal(1, (T, B, D)), some_resets((T, B))
    carry = scanned.initialize_carry(B, H)
    (got, params), (want, of_cell) = (
        scanned.init_with_output(jax.random.key(0), carry, (xs, resets)),
        alone.init_with_output(jax.random.key(0), xs, resets=resets),
    )
    assert_identical(params["params"], {f"{cell.__name__}_1": of_cell["params"]["cell"]})
    assert_close(got, want)


@pytest.mark.parametrize("dummy", ["none", "without_parent", "after_the_cell"])
def test_cell_name_can_be_that_of_the_first_cell(dummy):
    """A dummy cell takes the name `GRUCell_0` only if it is created before the other, in the scope of the module."""

    class ScannedRNN(nn.Module):
        @functools.partial(nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False})
        @nn.compact
        def __call__(self, carry, x):
            ins, resets = x
            if dummy == "after_the_cell":
                cell = nn.GRUCell(features=H)
                fresh = nn.GRUCell(features=H).initialize_carry(jax.random.key(0), carry.shape)
                return cell(jnp.where(resets[:, None], fresh, carry), ins)
            fresh = jnp.zeros_like(carry)
            if dummy == "without_parent":
                fresh = nn.GRUCell(features=H, parent=None).initialize_carry(jax.random.key(0), carry.shape)
            return nn.GRUCell(features=H)(jnp.where(resets[:, None], fresh, carry), ins)

    class Replacement(linen.ScannedRNN):
        cell_name: str | None = "GRUCell_0"

    Replacement.__name__ = "ScannedRNN"
    carry, x = normal(0, (B, H)), (normal(1, (T, B, D)), some_resets((T, B)))
    variables, ours = (rnn().init(jax.random.key(3), carry, x) for rnn in (ScannedRNN, Replacement))
    assert_identical(ours, variables)
    assert_close(Replacement().apply(variables, carry, x), ScannedRNN().apply(variables, carry, x), tol=1e-5)
    line = r'got GRUCell_0; to load them, set `cell_name: str \| None = "GRUCell_0"` in a subclass'
    with pytest.raises(ValueError, match=f"must be under GRUCell_1, {line}"):
        linen.ScannedRNN().apply(variables, carry, x)


class Elman(nn.RNNCellBase):
    """A cell of the user's with few options."""

    features: int

    @nn.compact
    def __call__(self, h, x):
        h = nn.tanh(nn.Dense(self.features)(x) + nn.Dense(self.features, use_bias=False)(h))
        return h, h

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], self.features))

    @property
    def num_feature_axes(self):
        return 1


def test_scanned_rnn_gives_a_cell_the_options_that_it_has():
    class Scanned(linen.ScannedRNN):
        cell_type: typing.Any = Elman

    x = normal(1, (T, B, D)), some_resets((T, B))
    carry = Scanned.initialize_carry(B, H)
    assert carry.shape == (B, H)
    variables = random_variables(Scanned(), carry, x)
    of_cell = {"params": {"cell": variables["params"]["Elman_1"]}}
    want = run(linen.RNN(Elman(H), time_major=True), of_cell, x[0], resets=x[1])
    assert_close(run(Scanned(), variables, carry, x)[1], want)
    message = r"with the options features, dtype, got .*Elman, which lacks dtype and has features;"
    with pytest.raises(ValueError, match=message):
        Scanned(dtype=jnp.bfloat16).init(jax.random.key(0), carry, x)
    with pytest.raises(ValueError, match="which lacks param_dtype"):
        Scanned(param_dtype=jnp.bfloat16).initialize_carry(B, H)


class NoWidth(nn.RNNCellBase):
    """A cell without the option `features`."""

    size: int = 4


def test_scanned_rnn_needs_a_cell_with_a_width():
    scanned = linen.ScannedRNN(cell_type=NoWidth)
    with pytest.raises(ValueError, match="NoWidth, which lacks features and has size; add what is missing"):
        scanned.initialize_carry(B, H)
    with pytest.raises(ValueError, match="which lacks features"):
        scanned.init(jax.random.key(0), jnp.zeros((B, H)), (normal(1, (T, B, D)), some_resets((T, B))))


def test_parameters_of_another_cell_are_rejected():
    x = jnp.zeros((T, B, D)), jnp.zeros((T, B))
    lstm = linen.ScannedRNN(cell_type="optimized_lstm")
    variables = lstm.init(jax.random.key(0), linen.ScannedRNN(cell_type="lstm").initialize_carry(B, H), x)
    with pytest.raises(ValueError, match=r"must be under GRUCell_1, got OptimizedLSTMCell_1; .* set cell_type"):
        linen.ScannedRNN().apply(variables, jnp.zeros((B, H)), x)


@pytest.mark.parametrize(
    ("rnn", "carry", "x", "message"),
    [
        pytest.param(
            linen.ScannedRNN(),
            jnp.zeros((B, H)),
            jnp.zeros((T, B, D)),
            r"x must be the pair \(ins, resets\)",
            id="no_resets",
        ),
        pytest.param(
            linen.ScannedRNN(),
            jnp.zeros((B, H)),
            (jnp.zeros((T, B, D)), jnp.zeros((B, T))),
            r"resets must be \[T, \*batch\] = \(7, 4\)",
            id="resets_batch_major",
        ),
        pytest.param(
            linen.ScannedRNN(),
            jnp.zeros((B + 1, H)),
            (jnp.zeros((T, B, D)), jnp.zeros((T, B))),
            "carry must be .* got \\(5, 6\\)",
            id="carry_of_another_batch",
        ),
        pytest.param(
            linen.ScannedRNN(2 * H),
            jnp.zeros((B, H)),
            (jnp.zeros((T, B, D)), jnp.zeros((T, B))),
            "must be hidden_state_dim = 12",
            id="carry_of_another_width",
        ),
        pytest.param(
            linen.ScannedRNN(),
            (jnp.zeros((B, H)),) * 2,
            (jnp.zeros((T, B, D)), jnp.zeros((T, B))),
            "carry must be one array for a GRU",
            id="pair_for_gru",
        ),
        pytest.param(
            linen.ScannedRNN(cell_type="lstm"),
            jnp.zeros((B, H)),
            (jnp.zeros((T, B, D)), jnp.zeros((T, B))),
            r"carry must be a pair \(c, h\) for an LSTM",
            id="array_for_lstm",
        ),
        pytest.param(
            linen.ScannedRNN(cell_type="rnn"),
            jnp.zeros((B, H)),
            (jnp.zeros((T, B, D)), jnp.zeros((T, B))),
            "cell_type must be a cell class of linen, a functools.partial of one, or one of gru, lstm",
            id="unknown_cell_type",
        ),
        pytest.param(
            linen.ScannedRNN(implementation="cuda"),
            jnp.zeros((B, H)),
            (jnp.zeros((T, B, D)), jnp.zeros((T, B))),
            "implementation must be",
            id="unknown_implementation",
        ),
        pytest.param(
            linen.ScannedRNN(cell_type=OwnCell),
            jnp.zeros((B, H)),
            (jnp.zeros((T, B, D)), jnp.zeros((B, T))),
            r"resets must be \[T, \*batch\] = \(7, 4\) as in ins",
            id="resets_batch_major-any_cell",
        ),
    ],
)
def test_scanned_rnn_rejects_wrong_arguments(rnn, carry, x, message):
    with pytest.raises(ValueError, match=message):
        random_variables(rnn, carry, x)


def test_initialize_carry_without_a_width_raises():
    with pytest.raises(ValueError, match="or set hidden_state_dim"):
        linen.ScannedRNN.initialize_carry(B)


# --- cells -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"param_dtype": jnp.bfloat16}, {"dtype": jnp.bfloat16}], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_cells_have_flax_parameters(cell, options):
    fields = (field.name for field in dataclasses.fields(getattr(LINEN, cell)))
    inits = [name for name in fields if name.endswith("_init") and name != "carry_init"]
    options = options | {name: nn.initializers.normal(i + 1.0) for i, name in enumerate(inits)}
    want, got = getattr(LINEN, cell)(H, **options), getattr(linen, cell)(H, **options)
    assert isinstance(got, getattr(nn, cell, nn.RNNCellBase))
    assert got.num_feature_axes == 1
    carry = want.initialize_carry(jax.random.key(0), (B, D))
    assert_close(got.initialize_carry(jax.random.key(0), (B, D)), carry, tol=0)
    x = jnp.zeros((B, D))
    assert_identical(got.init(jax.random.key(3), carry, x), want.init(jax.random.key(3), carry, x))


@pytest.mark.quick("cell")
@pytest.mark.parametrize("batch", [(), (2, 3)], ids=["no_batch", "two_batch_axes"])
@pytest.mark.parametrize(
    ("cell", "gates"), [*((cell, "standard") for cell in CELLS), *((cell, "custom") for cell in WITH_GATE_FN)]
)
def test_one_step_equals_flax_step(cell, batch, gates):
    options = {} if gates == "standard" else {"gate_fn": nn.hard_sigmoid, "activation_fn": nn.relu}
    if cell == "SimpleCell":
        options.pop("gate_fn", None)
    want, got = getattr(LINEN, cell)(H, **options), getattr(linen, cell)(H, **options)
    carry, x = some_carry(cell, batch), normal(1, (*batch, D))
    variables = random_variables(want, carry, x)
    assert jax.tree.structure(random_variables(got, carry, x)) == jax.tree.structure(variables)
    assert_close(run(got, variables, carry, x), run(want, variables, carry, x))


@pytest.mark.parametrize("carry_dtype", [jnp.float32, jnp.bfloat16], ids=["carry=f32", "carry=bf16"])
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16], ids=["none", "f32", "bf16"])
@pytest.mark.parametrize("cell", ["GRUCell", "LSTMCell", "MGUCell"])
def test_a_step_has_the_dtypes_of_flax(cell, dtype, carry_dtype):
    want, got = getattr(LINEN, cell)(H, dtype=dtype), getattr(linen, cell)(H, dtype=dtype)
    carry = jax.tree.map(lambda x: x.astype(carry_dtype), some_carry(cell))
    x = normal(1, (B, D))
    variables = random_variables(want, carry, x)
    tol = 2e-2 if jnp.bfloat16 in (dtype, carry_dtype) else 2e-6
    assert_close(run(got, variables, carry, x), run(want, variables, carry, x), tol=tol)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_normed_gru_passes_its_options_on(norm):
    options = {"norm": norm, "epsilon": 0.3, "update_bias": 0.5}
    xs, call = rnn_inputs(True), {"initial_carry": some_carry("NormGRUCell")}
    want, got = (
        kind(of.NormGRUCell(H, **options), time_major=True, return_carry=True)
        for kind, of in ((nn.RNN, LINEN), (linen.RNN, linen))
    )
    assert_identical(got.init(jax.random.key(3), xs), want.init(jax.random.key(3), xs))
    variables = random_variables(want, xs)
    results = outputs_and_gradients(got, variables, xs, **call)
    assert_close(results, outputs_and_gradients(want, variables, xs, **call), tol=1e-5)
    stack = linen.NormGRU(
        H, cell_norm=norm, epsilon=0.3, update_bias=0.5, time_major=True, return_carry=True, num_layers=1
    )
    params = {"params": {"layers_0": variables["params"]["cell"]}}
    last, ys = stack.apply(params, xs, initial_carry=(call["initial_carry"],))
    assert_close((last[0], ys), results[1])
    other = got.clone(cell=got.cell.clone(norm="rms" if norm == "layer" else "layer"))
    with pytest.raises(
        ValueError, match=r"NormGRUCell: norm must be that of the given parameters, whose norm_i has sca"
    ):
        other.apply(variables, xs)


def test_a_normed_gru_says_what_it_cannot_do():
    xs = rnn_inputs(True)
    for module in (linen.NormGRU(H, num_blocks=2), linen.RNN(linen.NormGRUCell(H, num_blocks=2))):
        with pytest.raises(
            ValueError, match=r"NormGRU\w*: num_blocks must be 1 for a cell whose norm sees all units, got 2"
        ):
            module.init(jax.random.key(0), xs)
    for module in (linen.NormGRU(H, cell_norm="batch"), linen.RNN(linen.NormGRUCell(H, norm="batch"))):
        with pytest.raises(ValueError, match=r'NormGRU\w*: (cell_)?norm must be "rms" or "layer", got \'batch\''):
            module.init(jax.random.key(0), xs)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_a_simple_cell_has_two_activations_that_can_be_fused(activation):
    """A `jax.custom_jvp` is copied by `copy.deepcopy`, like a jitted function."""
    cell = nn.SimpleCell(H, activation_fn=getattr(nn, activation))
    xs, want = rnn_inputs(False), nn.RNN(cell)
    variables = random_variables(want, xs)
    for rnn in (linen.RNN(cell), linen.RNN(copy.deepcopy(cell))):
        assert reason_to_scan(rnn.cell, SCAN_OPTIONS) is None
        assert_close(outputs_and_gradients(rnn, variables, xs), outputs_and_gradients(want, variables, xs), tol=1e-5)


@pytest.mark.parametrize("cell", CELLS)
def test_bfloat16_multiplies_in_bfloat16_and_carries_float32(cell):
    rnn = linen.RNN(getattr(linen, cell)(H, dtype=jnp.bfloat16), time_major=True, return_carry=True)
    xs, carry = normal(1, (T, B, D)), some_carry(cell)
    variables = random_variables(rnn, xs)
    text = str(jax.make_jaxpr(functools.partial(rnn.apply, mutable=False))(variables, xs, initial_carry=carry))
    carry, ys = run(rnn, variables, xs, initial_carry=carry)
    assert {leaf.dtype for leaf in jax.tree.leaves((carry, ys))} == {jnp.dtype(jnp.float32)}
    assert jnp.any(ys != ys.astype(jnp.bfloat16))
    assert f"bf16[{T},{B},{D}]" in text  # the dtype in which the inputs are multiplied


def test_packed_params_are_those_of_jaxrnn_gru():
    cell, x, h = linen.GRUCell(H), normal(1, (T, B, D)), some_carry("GRUCell")
    variables = random_variables(cell, h, x[0])
    params = cell.apply(variables, D, H, method="packed_params")
    assert_close(jaxrnn.gru(params, h, x)[1][0], run(nn.GRUCell(H), variables, h, x[0])[1])


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_can_be_shared_between_steps_and_sequences(cell):
    class Shared(nn.Module):
        @nn.compact
        def __call__(self, carry, xs):
            shared = getattr(linen, cell)(H)
            carry, first = shared(carry, xs[0])
            return first, linen.RNN(shared, time_major=True)(xs[1:], initial_carry=carry)

    carry, xs = some_carry(cell), normal(1, (T, B, D))
    variables = random_variables(Shared(), carry, xs)
    assert list(variables["params"]) == [f"{cell}_0"]
    first, rest = run(Shared(), variables, carry, xs)
    whole = nn.RNN(getattr(LINEN, cell)(H), time_major=True)
    params = {"params": {"cell": variables["params"][f"{cell}_0"]}}
    assert_close(jnp.concatenate([first[None], rest]), run(whole, params, xs, initial_carry=carry))


# --- RNN -------------------------------------------------------------------------------------------------------------


def rnn_inputs(time_major, batch=(B,)):
    return normal(1, (T, *batch, D) if time_major else (*batch, T, D))


@pytest.mark.quick("cell")
@pytest.mark.parametrize(
    ("cell", "lengths"),
    [("GRUCell", None), ("GRUCell", [7, 1, 3, 5]), ("LSTMCell", [7, 1, 3, 5])],
    ids=["gru", "gru-lengths", "lstm-lengths"],
)
@pytest.mark.parametrize(
    "options",
    [
        {"time_major": time_major, "reverse": reverse, "keep_order": keep_order}
        for time_major in (False, True)
        for reverse, keep_order in ((False, False), (True, False), (True, True))
    ],
    ids=lambda options: "-".join(name for name, on in options.items() if on) or "default",
)
def test_rnn_equals_flax_rnn(cell, options, lengths):
    xs, carry = rnn_inputs(options["time_major"]), some_carry(cell)
    call = {"seq_lengths": None if lengths is None else jnp.array(lengths), "initial_carry": carry}
    flax_rnn = nn.RNN(getattr(LINEN, cell)(H), return_carry=True, **options)
    variables = random_variables(flax_rnn, xs)
    want = run(flax_rnn, variables, xs, **call)
    ours = linen.RNN(getattr(linen, cell)(H), return_carry=True, **options)
    assert_close(run(ours, variables, xs, **call), want)
    with_flax_cell = linen.RNN(getattr(LINEN, cell)(H))  # and with the options passed at the call
    assert_close(run(with_flax_cell, variables, xs, return_carry=True, **options, **call), want)


@pytest.mark.parametrize("source", [linen, LINEN], ids=["our_cell", "flax_cell"])
@pytest.mark.parametrize("cell", CELLS)
def test_rnn_has_flax_parameters(cell, source):
    xs = rnn_inputs(False)
    options = {"recurrent_kernel_init": nn.initializers.normal(1.0)}
    want = nn.RNN(getattr(LINEN, cell)(H, **options)).init(jax.random.key(3), xs)
    assert list(want["params"]) == ["cell"]
    assert_identical(linen.RNN(getattr(source, cell)(H, **options)).init(jax.random.key(3), xs), want)


def test_rnn_without_a_carry_starts_from_the_carry_of_the_cell():
    options = {"carry_init": nn.initializers.normal(1.0)}
    xs, key = rnn_inputs(False), jax.random.key(4)
    ours, flax_rnn = linen.RNN(linen.GRUCell(H, **options)), nn.RNN(nn.GRUCell(H, **options))
    variables = random_variables(flax_rnn, xs)
    want = run(flax_rnn, variables, xs, init_key=key)
    assert_close(run(ours, variables, xs, init_key=key), want)
    # an episode starts from the carry of the cell too, not from zeros
    resets = jnp.ones((B, T)).at[:, 1:].set(0)
    assert_close(run(ours, variables, xs, initial_carry=jnp.ones((B, H)), resets=resets, init_key=key), want)


RANDOM = nn.initializers.normal(1.0)


@pytest.mark.parametrize("resets", [None, jnp.zeros((B, T))], ids=["no_resets", "resets"])
@pytest.mark.parametrize(
    ("cell", "how"),
    cases.deal(["fused", "flax_cell", "scanned", "stack", "bidirectional"], CELLS, ("GRUCell", "OptimizedLSTMCell")),
)
def test_the_key_of_the_carry_is_used_once(cell, how, resets):
    if how in ("stack", "bidirectional"):
        of_cell = {"GRUCell": "GRU", "LSTMCell": "LSTM", "OptimizedLSTMCell": "LSTM", "MGUCell": "MGU",
                   "SimpleCell": "SimpleRNN", "NormGRUCell": "NormGRU"}  # fmt: skip
        rnn = getattr(linen, of_cell[cell])(H, carry_init=RANDOM, num_layers=2, bidirectional=how == "bidirectional")
    else:
        make = getattr(linen if how == "fused" else LINEN, cell)
        other = {} if how != "scanned" or cell not in WITH_GATE_FN else {"activation_fn": lambda x: nn.tanh(x)}
        rnn = linen.RNN(make(H, carry_init=RANDOM, **other))
    xs, key = rnn_inputs(False), jax.random.key(0)
    variables = jax.eval_shape(rnn.init, key, xs)
    with jax.debug_key_reuse(True):
        jax.make_jaxpr(lambda v, k: rnn.apply(v, xs, init_key=k, resets=resets))(variables, key)
        jax.make_jaxpr(lambda k: rnn.init(jax.random.key(1), xs, init_key=k, resets=resets))(key)


class OnesCell(nn.GRUCell):
    """A cell that starts from ones, although its `carry_init` is that of its base."""

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.ones((*input_shape[:-1], self.features))


def test_only_a_carry_that_is_used_is_drawn():
    """The carry of a new sequence is computed if a sequence or an episode starts from it, and once."""
    draws = []

    def carry_init(key, shape, dtype=jnp.float32):
        draws.append(shape)
        return jnp.ones(shape, dtype)

    xs, resets, h = rnn_inputs(True), jnp.zeros((T, B)), jnp.zeros((B, H))
    rnn = linen.RNN(linen.GRUCell(H, carry_init=carry_init), time_major=True)
    stack = linen.GRU(H, carry_init=carry_init, time_major=True)
    reset_rnn = linen.ResetRNN(linen.GRUCell(H, carry_init=carry_init))
    for module, args, carry in ((rnn, (xs,), h), (stack, (xs,), (h,)), (reset_rnn, ((xs, resets),), h)):
        with_resets = {} if module is reset_rnn else {"resets": resets}
        variables = random_variables(module, *args)
        for given, count in [
            ({}, 1), (with_resets, 1), ({"initial_carry": carry, **with_resets}, 1),
            ({"initial_carry": carry, "reset_carry": carry, **with_resets}, 0),
        ]:  # fmt: skip
            draws.clear()
            module.apply(variables, *args, **given)
            assert len(draws) == count, (module, given)
        if module is not reset_rnn:
            draws.clear()
            module.apply(variables, *args, initial_carry=carry)
            assert not draws


def test_episodes_start_from_what_the_class_of_the_cell_says():
    xs, starts = rnn_inputs(True), jnp.zeros((T, B)).at[3].set(1)
    rnn = linen.RNN(OnesCell(H), time_major=True)
    variables = random_variables(rnn, xs)
    _, tail = run(rnn, variables, xs[3:], return_carry=True)
    zeros = jnp.zeros((B, H))
    assert_close(run(rnn, variables, xs, initial_carry=zeros, resets=starts)[3:], tail)
    scanned = linen.ScannedRNN(cell_type=OnesCell, cell_name="cell")
    assert_close(run(scanned, variables, zeros, (xs, starts))[1][3:], tail)


class CountingCell(nn.RNNCellBase):
    """A cell whose carry has more than states: a count, a random key, and what becomes a number of Python."""

    num_feature_axes = 1

    @nn.compact
    def __call__(self, carry, x):
        h, count, key, _ = carry
        h = nn.tanh(nn.Dense(H)(jnp.concatenate([h, x], -1)) + count)
        return (h, count + 1, key, 0.0), h

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return jnp.zeros((*input_shape[:-1], H)), jnp.float32(0), jax.random.key(0), jnp.float32(1)


@pytest.mark.parametrize("lengths", [None, (2, T, 0, 3)], ids=str)
def test_a_carry_may_have_more_than_states(lengths):
    xs, lengths = rnn_inputs(False), lengths and jnp.array(lengths)
    flax, ours = (module.RNN(CountingCell()) for module in (nn, linen))
    variables = random_variables(flax, xs)
    assert_close(run(ours, variables, xs, seq_lengths=lengths), run(flax, variables, xs, seq_lengths=lengths))


@pytest.mark.parametrize("lengths", [None, (2, T, 0, 3)], ids=str)
@pytest.mark.parametrize("module", [linen.RNN(linen.GRUCell(H)), linen.GRU(H)], ids=["RNN", "GRU"])
def test_a_carry_of_another_batch_is_named(module, lengths):
    xs, lengths = rnn_inputs(False), lengths and jnp.array(lengths)
    variables = random_variables(module, xs)
    for batch in (1, B - 1):
        h = jnp.zeros((batch, H))
        carry = (h,) if isinstance(module, linen.GRU) else h
        with pytest.raises(ValueError, match=rf"initial_carry.* must be .*\[\*batch, H\].*\({batch}, {H}\)"):
            module.apply(variables, xs, initial_carry=carry, seq_lengths=lengths)


class OnesStack(linen.GRU):
    def initialize_carry(self, rng, input_shape):
        return jax.tree.map(jnp.ones_like, super().initialize_carry(rng, input_shape))


def test_episodes_of_a_stack_start_from_what_its_class_says():
    xs, starts = rnn_inputs(True), jnp.zeros((T, B)).at[3].set(1)
    stack = OnesStack(H, time_major=True)
    variables = random_variables(stack, xs)
    carry = (jnp.zeros((B, H)),)
    assert_close(run(stack, variables, xs, initial_carry=carry, resets=starts)[3:], run(stack, variables, xs[3:]))


class Pair(typing.NamedTuple):
    """The states of an LSTM in the order of Haiku, which is not that of Flax."""

    hidden: jax.Array
    cell: jax.Array


class FlaxPair(typing.NamedTuple):
    """The states of an LSTM in the order of Flax."""

    cell_state: jax.Array
    hidden_state: jax.Array


class Unnamed(typing.NamedTuple):
    """A pair whose fields name no state."""

    first: jax.Array
    second: jax.Array


def calls_with_a_pair(pair):
    """Yields calls that take the states of an LSTM as a carry or a reset carry."""
    xs, resets, zeros = rnn_inputs(True), jnp.zeros((T, B)), (jnp.zeros((B, H)),) * 2
    cell, step = linen.LSTMCell(H), linen.LSTMCell(H, gate_fn=nn.hard_sigmoid)
    rnn, stack = linen.RNN(cell, time_major=True), linen.LSTM(H, num_layers=2, time_major=True)
    scanned = replacement("LSTMCell", False)()
    params = jaxrnn.LSTMParams(jnp.zeros((D, 4 * H)), jnp.zeros((H, 4 * H)), jnp.zeros(4 * H))
    for module, args in ((cell, (zeros, xs[0])), (step, (zeros, xs[0])), (rnn, (xs,)), (stack, (xs,))):
        variables = module.init(jax.random.key(0), *args)
        if module in (cell, step):
            yield functools.partial(module.apply, variables, pair, xs[0])
            continue
        carry = (pair, pair) if module is stack else pair
        yield functools.partial(module.apply, variables, xs, initial_carry=carry)
        yield functools.partial(module.apply, variables, xs, resets=resets, reset_carry=carry)
    yield functools.partial(scanned.init, jax.random.key(0), pair, (xs, resets))
    yield functools.partial(jaxrnn.lstm, params, pair, xs)
    yield functools.partial(jaxrnn.lstm, params, zeros, xs, resets=resets, reset_state=pair)
    both = jaxrnn.nnx.RNN(jaxrnn.nnx.LSTMCell(D, H, rngs=nnx.Rngs(0)), time_major=True)
    yield functools.partial(both, xs, initial_carry=pair)
    yield functools.partial(jaxrnn.nnx.LSTMCell(D, H, gate_fn=nnx.elu, rngs=nnx.Rngs(0)), pair, xs[0])


def test_states_of_a_named_tuple_are_in_the_order_of_its_fields():
    h, c = normal(1, (B, H)), normal(2, (B, H))
    want = [call() for call in calls_with_a_pair((c, h))]
    for call, result in zip(calls_with_a_pair(FlaxPair(c, h)), want, strict=True):
        assert_close(jax.tree.leaves(call()), jax.tree.leaves(result), tol=0)
    for kind, remedy in ((Pair, "pass cell and hidden in a plain tuple"), (Unnamed, "pass a plain tuple")):
        for call in calls_with_a_pair(kind(h, c)):
            with pytest.raises(ValueError, match=rf"\(c, h\), got {kind.__name__}\(.*\); {remedy}"):
                call()


def test_a_stack_takes_no_named_states_of_all_layers():
    """PyTorch has them in this form; of two layers, they would be taken for two pairs."""
    h = jnp.zeros((B, H))
    with pytest.raises(ValueError, match="must be a tuple with one entry for each of 2 layers"):
        linen.LSTM(H, num_layers=2).init(jax.random.key(0), rnn_inputs(False), initial_carry=Pair((h, h), (h, h)))


@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"reverse": True, "keep_order": True}], ids=str)
@pytest.mark.parametrize("cell", ["GRUCell", "LSTMCell", "scanned"])
def test_padding_may_be_nan(cell, options):
    """Loss and gradients are those of zeros in the padding, also where the carry and the resets of padding are NaN."""
    kind = linen.GRUCell(H, gate_fn=nn.hard_sigmoid) if cell == "scanned" else getattr(linen, cell)(H)
    rnn = linen.RNN(kind, return_carry=True, **options)
    lengths = jnp.array([2, T, 0, 3])
    valid, empty = jnp.arange(T) < lengths[:, None], lengths[:, None] == 0
    xs, carry, starts = rnn_inputs(False), some_carry(cell), reset_carries(cell, (B, T, H))
    variables = random_variables(rnn, xs)

    def loss(variables, xs, carry, starts, resets):
        options = {"seq_lengths": lengths, "resets": resets, "reset_carry": starts}
        last, ys = rnn.apply(variables, xs, initial_carry=carry, **options)
        of_ys = jnp.sum(jnp.where(valid[..., None], ys, 0.0) ** 2)
        return of_ys + sum(jnp.sum(jnp.where(empty, 0.0, x) ** 2) for x in jax.tree.leaves(last))

    def padded(value):
        at = lambda mask: lambda x: jnp.where(mask, value, x)  # noqa: E731
        resets = jnp.where(valid, some_resets((B, T)), value)
        of_carry, of_starts = jax.tree.map(at(empty), carry), jax.tree.map(at(~valid[..., None]), starts)
        return at(~valid[..., None])(xs), of_carry, of_starts, resets

    both = jax.jit(jax.value_and_grad(loss, range(4)))
    want = both(variables, *padded(0.0))
    for value in (jnp.nan, jnp.inf):
        assert_close(both(variables, *padded(value)), want, tol=0)
    last, _ = rnn.apply(variables, padded(jnp.nan)[0], initial_carry=padded(jnp.nan)[1], seq_lengths=lengths)
    assert all(jnp.isnan(x[2]).all() for x in jax.tree.leaves(last))  # an empty sequence keeps its carry


@pytest.mark.parametrize("cell", CELLS)
def test_a_sequence_of_length_zero_keeps_its_carry(cell):
    xs, carry = rnn_inputs(False), some_carry(cell)
    rnn = linen.RNN(getattr(linen, cell)(H), return_carry=True)
    variables = random_variables(rnn, xs)
    for inputs in (xs, xs[:, :0]):
        got, _ = run(rnn, variables, inputs, initial_carry=carry, seq_lengths=jnp.zeros(B, int))
        assert_close(got, carry, tol=0)


def test_a_reset_carry_of_each_step_may_have_no_step():
    inputs, starts = (jnp.ones((0, B, D)), jnp.zeros((0, B))), jnp.ones((0, B, H))
    module = linen.ResetRNN(linen.GRUCell(H))
    (carry, ys), _ = module.init_with_output(jax.random.key(0), inputs, reset_carry=starts)
    assert ys.shape == (0, B, H)
    np.testing.assert_array_equal(carry, jnp.zeros((B, H)))


@pytest.mark.parametrize("cell", CELLS)
def test_lengths_beyond_the_end_mean_all_steps(cell):
    xs, lengths = rnn_inputs(False), jnp.array([2, T + 3, T, 0])
    ours, flax_rnn = (
        kind(getattr(of, cell)(H), return_carry=True) for kind, of in ((linen.RNN, linen), (nn.RNN, LINEN))
    )
    variables = random_variables(flax_rnn, xs)
    call = {"initial_carry": some_carry(cell), "seq_lengths": lengths}
    (got, _), (want, _) = (run(rnn, variables, xs, **call) for rnn in (ours, flax_rnn))
    kept = lambda carry: jax.tree.map(lambda x: x[:3], carry)  # noqa: E731  # for length 0 Flax takes a step
    assert_close(kept(got), kept(want))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int32, jnp.uint32], ids=["int8", "int32", "uint32"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("cell", ["fused", "scanned"])
def test_traced_lengths_are_clipped(cell, reverse, dtype):
    steps = 130  # more than an int8 can represent
    cells = {"fused": linen.GRUCell(H), "scanned": linen.GRUCell(H, gate_fn=nn.hard_sigmoid)}
    xs, rnn = normal(0, (B, steps, D)), linen.RNN(cells[cell], return_carry=True, reverse=reverse, keep_order=True)
    variables, carry = random_variables(rnn, xs), some_carry("GRUCell")
    call = jax.jit(lambda lengths: rnn.apply(variables, xs, initial_carry=carry, seq_lengths=lengths))
    low = 0 if dtype == jnp.uint32 else -3
    high = jnp.iinfo(dtype).max if jnp.iinfo(dtype).max > steps else 100
    got = call(jnp.array([low, 2, high, 0], dtype))
    assert_close(got, call(jnp.array([0, 2, min(high, steps), 0])), tol=0)
    assert_close(jax.tree.map(lambda x: x[0], got[0]), jax.tree.map(lambda x: x[0], carry), tol=0)


@pytest.mark.interpret
@pytest.mark.parametrize("cell", CELLS)
def test_a_deep_copy_is_fused_too(cell):
    xs = rnn_inputs(False)
    for rnn in (linen.RNN(getattr(linen, cell)(H), implementation="triton"), linen.GRU(H, implementation="triton")):
        variables = random_variables(rnn, xs)
        assert_close(run(copy.deepcopy(rnn), variables, xs), run(rnn, variables, xs), tol=0)
    other = linen.RNN(linen.GRUCell(H, gate_fn=nn.hard_sigmoid), implementation="triton")
    with pytest.raises(NotImplementedError, match="gate_fn is not sigmoid"):
        random_variables(copy.deepcopy(other), xs)


def straight_through(x):
    """Computes the sigmoid of `x`; its gradient passes cotangents through unchanged."""
    return nn.sigmoid(x)


straight_through = jax.custom_vjp(straight_through)
straight_through.defvjp(lambda x: (nn.sigmoid(x), None), lambda _, cotangent: (cotangent,))


@pytest.mark.parametrize(
    "gate",
    [straight_through, lambda x: jnp.where(jnp.abs(x - 0.03) < 0.02, 0.9, nn.sigmoid(x))],
    ids=["another_gradient", "other_values_between_those_of_a_grid"],
)
def test_a_jitted_activation_is_not_mistaken_for_sigmoid(gate):
    cell, xs = nn.GRUCell(H, gate_fn=jax.jit(gate)), rnn_inputs(False)
    theirs, ours = nn.RNN(cell), linen.RNN(cell)
    variables = random_variables(theirs, xs)
    want, got = (
        jax.value_and_grad(lambda variables, rnn=rnn: jnp.sum(jnp.sin(rnn.apply(variables, xs))))(variables)
        for rnn in (theirs, ours)
    )
    assert_close(got, want)
    with pytest.raises(NotImplementedError, match="gate_fn is not sigmoid"):
        random_variables(linen.RNN(cell, implementation="triton"), xs)


def test_an_activation_may_need_an_axis():
    xs = rnn_inputs(False)
    for activation in (lambda x: nn.softmax(x, axis=-1), lambda x: x - x.mean(-1, keepdims=True)):
        cell = nn.GRUCell(H, activation_fn=jax.jit(activation))
        variables = random_variables(nn.RNN(cell), xs)
        assert_close(linen.RNN(cell).apply(variables, xs), nn.RNN(cell).apply(variables, xs))


@pytest.mark.parametrize("options", [{}, {"activation_fn": nn.relu}], ids=["fused", "scanned"])
@pytest.mark.parametrize("stepped", [False, True])
def test_one_array_of_the_reset_carry_may_be_none_in_reverse_with_lengths(stepped, options):
    """None in place of an array means zeros."""
    xs, resets, lengths = rnn_inputs(False), jnp.zeros((B, T), bool).at[:, 2].set(True), np.array([T, 1, 3, 5])
    rnn, given = linen.RNN(nn.LSTMCell(H, **options), reverse=True), normal(4, (B, T, H) if stepped else (B, H))
    variables = random_variables(rnn, xs)
    call = {"resets": resets, "seq_lengths": lengths}
    want = rnn.apply(variables, xs, reset_carry=(jnp.zeros_like(given), given), **call)
    assert_close(rnn.apply(variables, xs, reset_carry=(None, given), **call), want, tol=0)
    if stepped:
        with pytest.raises(ValueError, match="reset_carry must be"):
            rnn.apply(variables, xs, reset_carry=(None, given[:1]), **call)


@pytest.mark.parametrize("options", [{}, {"activation_fn": nn.relu}], ids=["fused", "scanned"])
def test_one_array_of_the_reset_carry_of_a_reset_rnn_may_be_none(options):
    xs, resets, given = rnn_inputs(True), jnp.zeros((T, B), bool).at[2].set(True), normal(4, (B, H))
    rnn = linen.ResetRNN(nn.OptimizedLSTMCell(H, **options))
    variables = rnn.init(jax.random.key(0), (xs, resets))
    want = rnn.apply(variables, (xs, resets), reset_carry=(jnp.zeros_like(given), given))
    assert_close(rnn.apply(variables, (xs, resets), reset_carry=(None, given)), want, tol=0)


@pytest.mark.parametrize("cell", [nn.GRUCell(H), nn.LSTMCell(H)], ids=["gru", "lstm"])
def test_a_scalar_carry_raises(cell):
    rnn, xs = linen.RNN(cell), normal(0, (T, D))
    carry = jax.tree.map(lambda _: jnp.zeros(()), cell.initialize_carry(jax.random.key(0), (D,)))
    with pytest.raises(ValueError, match=r"initial_carry.* must be \[\*batch, H\], got a scalar"):
        rnn.apply(random_variables(rnn, xs), xs, initial_carry=carry)


def test_the_length_of_one_sequence_may_be_an_int():
    xs, rnn = normal(0, (T, D)), linen.RNN(nn.GRUCell(H), reverse=True, return_carry=True)
    variables = random_variables(rnn, xs)
    assert_close(rnn.apply(variables, xs, seq_lengths=3), rnn.apply(variables, xs, seq_lengths=np.array(3)), tol=0)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=["f16", "bf16"])
def test_16_bit_modules_run_under_strict_dtype_promotion(dtype):
    """As in Flax's cells, the state is float32 between steps, and no given array is promoted implicitly."""
    xs, resets = rnn_inputs(True).astype(dtype), jnp.zeros((T, B), bool).at[2].set(True)
    for module in (linen.RNN(linen.GRUCell(H, dtype=dtype), time_major=True),
                   linen.RNN(linen.LSTMCell(H, dtype=dtype), time_major=True),
                   linen.GRU(H, dtype=dtype, time_major=True, bidirectional=True)):  # fmt: skip
        call = {"resets": resets, "seq_lengths": jnp.array([1, 2, T, 3], jnp.int16)}
        variables = jax.tree.map(lambda x: x.astype(dtype), random_variables(module, xs, **call))
        want = module.apply(variables, xs, **call)
        with jax.numpy_dtype_promotion("strict"):
            assert_close(module.apply(variables, xs, **call), want, tol=0)


@pytest.mark.parametrize("steps", [1, T])
def test_a_program_with_a_symbolic_batch_can_be_exported(steps):
    module, xs = linen.ScannedRNN(), normal(0, (steps, B, H))
    resets, carry = jnp.zeros((steps, B), bool), linen.ScannedRNN.initialize_carry(B, H)
    variables = random_variables(module, carry, (xs, resets))
    (batch,) = jax.export.symbolic_shape("batch")
    of_any = [jax.ShapeDtypeStruct((*x.shape[:-2], batch, x.shape[-1]), x.dtype) for x in (carry, xs)]
    of_any.append(jax.ShapeDtypeStruct((steps, batch), bool))
    call = jax.jit(lambda carry, xs, resets: module.apply(variables, carry, (xs, resets)))
    assert_close(jax.export.export(call)(*of_any).call(carry, xs, resets), call(carry, xs, resets))


@pytest.mark.parametrize(("setting", "value"), [("numpy_rank_promotion", "raise"), ("numpy_dtype_promotion", "strict")])
def test_modules_run_under_strict_promotion(setting, value):
    xs, resets = rnn_inputs(True), jnp.zeros((T, B), bool).at[2].set(True)
    stack = {"num_layers": 2, "time_major": True, "return_carry": True, "learned_carry": True}
    modules_ = [
        *(linen.RNN(getattr(linen, cell)(H), time_major=True, return_carry=True) for cell in CELLS),
        linen.GRU(H, norm="layer", bidirectional=True, **stack), linen.LSTM(H, norm="rms", proj_size=2, **stack),
    ]  # fmt: skip
    for module in modules_:
        call = {"resets": resets, "seq_lengths": jnp.array([1, 2, T, 3])}
        variables = random_variables(module, xs, **call)
        want = module.apply(variables, xs, **call)
        with getattr(jax, setting)(value):
            assert_close(module.apply(variables, xs, **call), want)
    with getattr(jax, setting)(value):
        for norm in (linen.RMSNorm(), linen.LayerNorm()):
            norm.init_with_output(jax.random.key(0), xs)


def reset_carries(cell, shape):
    """Returns a random reset carry whose arrays have the given shape."""
    one = [normal(20 + i, shape) for i in range(2)]
    return tuple(one) if "LSTM" in cell else one[0]


@pytest.mark.parametrize(
    ("state", "reverse", "lengths"),
    [("none", False, None), ("h", True, None), ("bh", False, [7, 1, 3, 5]), ("tbh", True, [7, 1, 3, 5])],
    ids=["zeros", "h-reverse", "bh-lengths", "tbh-reverse-lengths"],
)
@pytest.mark.parametrize("cell", ["GRUCell", "LSTMCell", "MGUCell", "SimpleCell", "NormGRUCell"])
def test_fused_and_scanned_cells_agree_on_resets(cell, reverse, state, lengths):
    """A custom `activation_fn` that equals tanh makes the same cell run under `nn.scan`."""
    xs, resets = rnn_inputs(False), some_resets((B, T))
    shape = {"none": None, "h": (H,), "bh": (B, H), "tbh": (B, T, H)}[state]
    carry, reset_carry = some_carry(cell), None if shape is None else reset_carries(cell, shape)

    class Call(nn.Module):
        rnn: nn.Module

        def __call__(self, xs, carry, reset_carry):
            options = {"seq_lengths": None if lengths is None else jnp.array(lengths), "reverse": reverse}
            return self.rnn(xs, initial_carry=carry, reset_carry=reset_carry, resets=resets, **options)

    fused = Call(linen.RNN(getattr(linen, cell)(H), return_carry=True))
    if cell not in WITH_GATE_FN:  # it has no `activation_fn`, but the cell in Flax's layers has its parameters
        other = LINEN.NormGRUCell(H)
    else:
        other = getattr(linen, cell)(H, activation_fn=lambda x: nn.tanh(x))
    scanned = Call(linen.RNN(other, return_carry=True))
    variables = random_variables(fused, xs, carry, reset_carry)
    want = outputs_and_gradients(scanned, variables, xs, carry, reset_carry)
    assert_close(outputs_and_gradients(fused, variables, xs, carry, reset_carry), want, tol=1e-5)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.SimpleCell, nn.MGUCell, OwnCell])
def test_resets_cut_a_sequence_for_every_cell(cell):
    xs = normal(1, (T, B, D))
    rnn = linen.RNN(cell(H), time_major=True, return_carry=True)
    variables = random_variables(rnn, xs)
    carry, ys = run(rnn, variables, xs, resets=jnp.zeros((T, B), int).at[3].set(2))
    _, head = run(rnn, variables, xs[:3])
    want_carry, tail = run(rnn, variables, xs[3:])
    assert_close((carry, ys), (want_carry, jnp.concatenate([head, tail])))


@pytest.mark.parametrize("cell", ["GRUCell", "LSTMCell"])
def test_bidirectional_equals_flax_bidirectional(cell):
    xs, lengths = rnn_inputs(False), jnp.array([7, 1, 3, 5])
    want = nn.Bidirectional(*(nn.RNN(getattr(LINEN, cell)(H)) for _ in range(2)))
    got = nn.Bidirectional(*(linen.RNN(getattr(linen, cell)(H)) for _ in range(2)))
    variables = random_variables(want, xs)
    assert jax.tree.structure(random_variables(got, xs)) == jax.tree.structure(variables)
    call = {"seq_lengths": lengths, "return_carry": True}
    assert_close(run(got, variables, xs, **call), run(want, variables, xs, **call))


def test_rnn_runs_cells_with_variables_per_step_as_flax_does():
    xs = rnn_inputs(False)
    options = {"variable_axes": {"params": 0}, "variable_broadcast": False, "split_rngs": {"params": True}}
    want, got = (rnn(nn.GRUCell(H), **options) for rnn in (nn.RNN, linen.RNN))
    variables = random_variables(want, xs)
    assert variables["params"]["cell"]["ir"]["kernel"].shape == (T, D, H)
    assert_identical(random_variables(got, xs), variables)
    assert_close(run(got, variables, xs), run(want, variables, xs))


@pytest.mark.parametrize(
    ("cell", "options"),
    [("MGUCell", {"reset_gate": False}), ("SimpleCell", {"residual": True}), ("SimpleCell", {"activation_fn": nn.elu})],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else x,
)
def test_cells_with_other_formulas_run_as_flax_runs_them(cell, options):
    xs, carry = normal(1, (T, B, D)), some_carry(cell)
    want, ours, with_flax_cell = (
        rnn(getattr(source, cell)(H, **options), time_major=True, return_carry=True)
        for rnn, source in ((nn.RNN, nn), (linen.RNN, linen), (linen.RNN, nn))
    )
    assert_identical(ours.init(jax.random.key(3), xs), want.init(jax.random.key(3), xs))
    variables = random_variables(want, xs)
    for got in (ours, with_flax_cell):
        assert_close(run(got, variables, xs, initial_carry=carry), run(want, variables, xs, initial_carry=carry))
    params = {"params": variables["params"]["cell"]}
    assert_close(ours.cell.apply(params, carry, xs[0]), want.cell.apply(params, carry, xs[0]))


@pytest.mark.parametrize("cell", WITH_GATE_FN)
def test_complex_numbers_run_as_in_flax(cell):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) + 1j * rng.normal(size=shape), jnp.complex64)  # noqa: E731
    ours, flax_cell, xs = getattr(linen, cell)(H), getattr(nn, cell)(H), draw(T, B, D)
    carry = jax.tree.map(lambda x: draw(*x.shape), some_carry(cell))
    variables = random_variables(flax_cell, some_carry(cell), xs[0].real)
    for start in (carry, some_carry(cell)):
        assert_close(ours.apply(variables, start, xs[0]), flax_cell.apply(variables, start, xs[0]), tol=0)
    of_rnn, call = (
        {"params": {"cell": variables["params"]}},
        {"initial_carry": carry, "seq_lengths": jnp.arange(1, B + 1)},
    )
    got, want = (
        run(rnn(of, time_major=True, return_carry=True), of_rnn, xs, **call)
        for rnn, of in ((linen.RNN, ours), (nn.RNN, flax_cell))
    )
    assert_close((got[0], got[1]), (want[0], want[1]), tol=0)
    with pytest.raises(ValueError, match="inputs must be real, got complex64"):
        linen.RNN(ours).init(jax.random.key(0), xs)
    with pytest.raises(NotImplementedError, match="cannot run complex numbers"):
        linen.RNN(ours, implementation="triton").init(jax.random.key(0), xs, initial_carry=carry)


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_norms_of_complex_numbers_are_those_of_flax(norm):
    x = normal(1, (B, H)) + 1j * normal(2, (B, H))
    ours, flax_norm = getattr(linen, norm)(), getattr(nn, norm)()
    variables = flax_norm.init(jax.random.key(0), x)
    assert_close(ours.apply(variables, x), flax_norm.apply(variables, x), tol=0)
    ours, flax_norm = (getattr(source, norm)(H, rngs=nnx.Rngs(0)) for source in (jaxrnn.nnx, nnx))
    assert_close(ours(x), flax_norm(x), tol=0)


def test_a_scanned_cell_keeps_the_dtype_of_its_carry():
    """As a fused one does; Flax's SimpleCell returns its carry in `dtype`, which its scan refuses."""
    cells = [linen.SimpleCell(H, dtype=jnp.bfloat16, activation_fn=f) for f in (nn.tanh, lambda x: nn.tanh(x))]
    xs, carry = rnn_inputs(False), some_carry("SimpleCell")
    variables = random_variables(linen.RNN(cells[0]), xs)
    fused, scanned = (
        run(linen.RNN(cell, return_carry=True), variables, xs, initial_carry=carry) for cell in cells
    )  # fmt: skip
    assert fused[0].dtype == scanned[0].dtype == jnp.float32
    assert_close(scanned[0], fused[0], tol=0.05)


def test_tabulate_shows_the_modules_that_the_user_made():
    class Agent(nn.Module):
        @nn.compact
        def __call__(self, xs):
            return linen.GRU(H, norm="rms", num_layers=2)(linen.RNN(linen.LSTMCell(H), name="rnn")(xs))

    for depth in (None, 1):
        console = {"width": 200, "no_color": True, "force_terminal": False}
        table = Agent().tabulate(jax.random.key(0), rnn_inputs(False), depth=depth, console_kwargs=console)
        rows = [line.split("│")[1:3] for line in table.splitlines() if line.count("│") == 6]
        shown = {path.strip(): module.strip() for path, module in rows if module.strip()}
        wanted = {"": "Agent", "rnn": "RNN", "GRU_0": "GRU", "GRU_0/norm_0": "RMSNorm"}
        assert shown == {path: module for path, module in wanted.items() if depth is None or "/" not in path}
        assert "kernel: float32[5,6]" in table or depth is not None


def test_convolutional_cells_run_with_resets():
    xs = normal(1, (B, T, 4, 4, 2))
    want, got = (rnn(nn.ConvLSTMCell(3, kernel_size=(3, 3))) for rnn in (nn.RNN, linen.RNN))
    variables = random_variables(want, xs)
    ys = run(got, variables, xs, resets=jnp.zeros((B, T)).at[:, 4].set(1))
    assert_close(ys[:, :4], run(want, variables, xs[:, :4]))
    assert_close(ys[:, 4:], run(want, variables, xs[:, 4:]))


@pytest.mark.parametrize("lift", ["remat", "jit", "vmap"])
def test_rnn_runs_under_lifted_transforms(lift):
    xs = rnn_inputs(False)
    make = {
        "remat": lambda cls: nn.remat(cls),
        "jit": lambda cls: nn.jit(cls),
        "vmap": lambda cls: nn.vmap(cls, variable_axes={"params": None}, split_rngs={"params": False}),
    }[lift]
    want, got = make(nn.RNN)(nn.GRUCell(H)), make(linen.RNN)(linen.GRUCell(H))
    variables = random_variables(want, xs)
    assert_identical(random_variables(got, xs), variables)
    assert_close(outputs_and_gradients(got, variables, xs), outputs_and_gradients(want, variables, xs), tol=1e-5)


# --- options ---------------------------------------------------------------------------------------------------------


def modules_with(**options):
    """Returns, by name, each module that has `precision` and `implementation`, and a function that applies it."""
    zeros = jnp.zeros((B, H))
    resets = jnp.zeros((T, B))
    return {
        "cell": (linen.GRUCell(H, **options), lambda m, v, xs: m.apply(v, zeros, xs[0])),
        "rnn": (linen.RNN(linen.GRUCell(H), time_major=True, **options), lambda m, v, xs: m.apply(v, xs)),
        "rnn-of_cell": (linen.RNN(linen.GRUCell(H, **options), time_major=True), lambda m, v, xs: m.apply(v, xs)),
        "scanned": (linen.ScannedRNN(**options), lambda m, v, xs: m.apply(v, zeros, (xs, resets))),
    }


def variables_of(name):
    params = random_variables(nn.GRUCell(H), jnp.zeros((B, H)), jnp.zeros((B, D)))["params"]
    path = {"cell": None, "scanned": "GRUCell_1"}.get(name, "cell")
    return {"params": params if path is None else {path: params}}


@pytest.mark.parametrize("name", ["cell", "rnn", "rnn-of_cell", "scanned"])
def test_precision_reaches_every_matmul(name):
    xs = normal(1, (T, B, D))
    module, apply = modules_with(precision=jax.lax.Precision.HIGHEST, implementation="xla")[name]
    text = str(jax.make_jaxpr(lambda v: apply(module, v, xs))(variables_of(name)))
    assert text.count("dot_general[") == 2
    assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 2


@pytest.mark.parametrize("name", ["cell", "rnn", "rnn-of_cell", "scanned"])
def test_implementation_reaches_the_function(name, monkeypatch):
    seen = []
    real = recurrent.run
    monkeypatch.setattr(
        recurrent, "run", lambda *args, implementation, **kw: seen.append(implementation) or real(*args, **kw)
    )
    module, apply = modules_with(implementation="triton")[name]
    apply(module, variables_of(name), normal(1, (T, B, D)))
    assert seen == ["triton"]


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        pytest.param(linen.RNN(linen.GRUCell(H, gate_fn=nn.relu)), "gate_fn is not sigmoid", id="gate_fn"),
        pytest.param(linen.RNN(nn.LSTMCell(H, activation_fn=nn.relu)), "activation_fn is not tanh", id="activation_fn"),
        pytest.param(
            linen.RNN(nn.SimpleCell(H, activation_fn=nn.elu)), "neither tanh nor relu", id="simple_activation"
        ),
        pytest.param(linen.RNN(nn.SimpleCell(H, residual=True)), "a SimpleCell with residual=True", id="residual"),
        pytest.param(linen.RNN(OwnCell(H)), "a OwnCell .only GRUCell, .* and SimpleCell of jaxrnn", id="another_cell"),
        pytest.param(linen.RNN(nn.MGUCell(H, reset_gate=False)), "an MGUCell with reset_gate=False", id="reset_gate"),
        pytest.param(linen.RNN(nn.GRUCell(H), variable_carry="batch_stats"), "an RNN with non-default", id="variables"),
    ],
)
def test_triton_says_why_a_module_cannot_be_fused(module, reason):
    xs = rnn_inputs(False)
    assert jax.eval_shape(module.init_with_output, jax.random.key(0), xs)[0].shape == (B, T, H)
    with pytest.raises(NotImplementedError, match=reason):
        random_variables(module.clone(implementation="triton"), xs)
    with pytest.raises(NotImplementedError, match="default_matmul_precision"):
        random_variables(module.clone(precision="highest"), xs)


def test_triton_rejects_a_single_step_of_a_custom_cell():
    cell = linen.GRUCell(H, activation_fn=nn.relu, implementation="triton")
    with pytest.raises(NotImplementedError, match="activation_fn is not tanh"):
        random_variables(cell, jnp.zeros((B, H)), jnp.zeros((B, D)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"resets": jnp.zeros((T, B))}, r"resets must be \[\*batch, T\] = \(4, 7\)"),
        ({"reset_carry": jnp.zeros((H,))}, "reset_carry is given but resets is None"),
        ({"resets": jnp.zeros((B, T)), "reset_carry": jnp.zeros((B, T))}, r"must be \[H\] = \(6,\)"),
        ({"seq_lengths": jnp.array([1, 2])}, r"seq_lengths must be \[\*batch\] = \(4,\)"),
        ({"seq_lengths": jnp.ones(B)}, "seq_lengths must be integers, got float32"),
        ({"initial_carry": jnp.zeros((B,))}, "carry must be"),
        (
            {"reverse": True, "resets": jnp.zeros((1, T)), "seq_lengths": jnp.ones(B, int)},
            r"resets must be .* got \(1, 7\)",
        ),
        (
            {
                "reverse": True,
                "resets": jnp.zeros((B, T)),
                "reset_carry": jnp.zeros((1, T, H)),
                "seq_lengths": jnp.ones(B, int),
            },
            r"reset_carry must be \[\*batch, T, H\] with batch and time \(4, 7\) as in inputs, got \(1, 7, 6\)",
        ),
    ],
    ids=[
        "resets_time_major",
        "reset_carry_without_resets",
        "reset_carry_shape",
        "seq_lengths_shape",
        "seq_lengths_dtype",
        "carry_shape",
        "resets_of_one_sequence_in_reverse",
        "reset_carry_of_one_sequence_in_reverse",
    ],
)
def test_rnn_rejects_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        random_variables(linen.RNN(linen.GRUCell(H)), rnn_inputs(False), **call)


@pytest.mark.torch
@pytest.mark.parametrize("cell", ["GRUCell", "OptimizedLSTMCell"])
def test_triton_runs_the_agent_as_xla_does(cell):
    carry, x = some_carry(cell), (normal(1, (3, B, D)), some_resets((3, B)).astype(jnp.float32))
    triton, xla = (
        linen.ScannedRNN(cell_type=getattr(linen, cell), implementation=name, precision="highest")
        for name in ("triton", "xla")
    )
    variables = random_variables(xla, carry, x)
    want = outputs_and_gradients(xla, variables, carry, x)
    assert_close(outputs_and_gradients(triton, variables, carry, x), want, tol=2e-5)


@pytest.mark.parametrize(("state", "inputs"), [((), (2,)), ((1,), (3, 2)), ((2,), ()), ((3, 1), (2,))], ids=str)
@pytest.mark.parametrize("cell", CELLS)
def test_a_cell_broadcasts_its_carry_and_inputs(cell, state, inputs):
    h, c, x = normal(0, (*state, H)), normal(1, (*state, H)), normal(2, (*inputs, D))
    carry = (c, h) if "LSTM" in cell else h
    ours, flax_cell = getattr(linen, cell)(H), getattr(LINEN, cell)(H)
    variables = random_variables(flax_cell, carry, x)
    assert_close(ours.apply(variables, carry, x), flax_cell.apply(variables, carry, x))
    with pytest.raises(ValueError, match="carry must have batch axes that can be broadcast with those of inputs"):
        ours.apply(variables, jax.tree.map(lambda x: jnp.ones((5, H)), carry), jnp.ones((4, D)))


@pytest.mark.parametrize("package", [linen, jaxrnn.nnx], ids=["linen", "nnx"])
def test_classes_can_be_pickled_and_are_found_in_the_package(package):
    """Pickles name the module of a class; those written when the package was one module name the package."""
    for name in package.__all__:
        cls = getattr(package, name)
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert pickle.loads(f"c{package.__name__}\n{name}\n.".encode()) is cls
    rnn = linen.HiddenFirstScannedRNN(H, cell_type="lstm")
    assert pickle.loads(pickle.dumps(rnn)) == rnn


def test_annotations_can_be_read_at_run_time():
    """Tools that build modules from a configuration read these annotations."""
    for module in (linen.ScannedRNN, linen.GRUCell, linen.LSTM, linen.LayerNorm, linen.RNN.__call__):
        assert typing.get_type_hints(module)
    for function in (jaxrnn.gru, jaxrnn.lstm, jaxrnn.rms_norm, jaxrnn.GRUParams, jaxrnn.LSTMParams):
        assert typing.get_type_hints(function)
