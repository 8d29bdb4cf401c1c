"""Tests the stacks of `jaxrnn.linen` against those of torch.nn and Flax, and against separate episodes."""

from __future__ import annotations

import functools
import itertools
import warnings

import cases
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_cells import LINEN
from trees import assert_close, normal, random_tree

import jaxrnn
from jaxrnn import linen, recurrent

T, B, D, H = 7, 3, 5, 6
CELL_OF = {"GRU": "GRUCell", "LSTM": "OptimizedLSTMCell", "MGU": "MGUCell", "SimpleRNN": "SimpleCell",
           "NormGRU": "NormGRUCell"}  # fmt: skip
STACKS = list(CELL_OF)


def make(cell, **options):
    """Makes a time-major stack that returns its carry, random variables for the stack, and a random carry."""
    stack = getattr(linen, cell)(H, **({"time_major": True, "return_carry": True} | options))
    xs = jnp.zeros((T, B, D))
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    shapes = jax.eval_shape(functools.partial(stack.init, time_major=True), rngs, xs)
    plain = stack.clone(learned_carry=False)
    return stack, random_tree(0, shapes), random_tree(1, plain.initialize_carry(jax.random.key(0), (B, D)))


def outputs_and_gradients(function, *args):
    """Returns the gradients of a sum over the outputs of `function` with respect to `args`, and the outputs."""

    @jax.jit
    def compute(args):
        def loss(args):
            outputs = function(*args)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs)), outputs

        return jax.grad(loss, has_aux=True)(args)

    return compute(args)


# --- against torch.nn ------------------------------------------------------------------------------------------------


def as_torch(cell, params):
    """Returns parameters of a stack, or their gradients, by the names and in the layout of torch.nn."""
    tensors = {}
    for name, tree in params.items():
        suffix = name.removeprefix("layers_")
        suffix = f"_l{suffix}" if suffix.isdigit() else f"_l{suffix.removesuffix('_reverse')}_reverse"
        gates = {"GRU": "rzn", "LSTM": "ifgo", "SimpleRNN": [""]}[cell]
        zeros = np.zeros(tree[f"h{gates[0]}"]["kernel"].shape[-1], np.float32)
        for side in "ih":
            dense = [tree[side + gate] for gate in gates]
            long = "ih" if side == "i" else "hh"
            tensors[f"weight_{long}{suffix}"] = np.concatenate([np.asarray(x["kernel"]).T for x in dense])
            tensors[f"bias_{long}{suffix}"] = np.concatenate([np.asarray(x.get("bias", zeros)) for x in dense])
        if "proj" in tree:
            tensors[f"weight_hr{suffix}"] = np.asarray(tree["proj"]["kernel"]).T
    return tensors


def torch_carry(cell, carry):
    """Returns the carry of a stack in the layout of torch.nn: `[layers * directions, B, H]`, hidden state first."""
    leaves = jax.tree.leaves(carry)
    if cell == "LSTM":
        return [np.stack(leaves[1::2]), np.stack(leaves[::2])]
    return [np.stack(leaves)]


@pytest.mark.parametrize(
    ("options", "torch_options"),
    [
        pytest.param({"num_layers": 3}, {"num_layers": 3}, id="3_layers"),
        pytest.param({"bidirectional": True}, {"bidirectional": True}, id="bidirectional"),
        pytest.param(
            {"num_layers": 2, "bidirectional": True, "time_major": False},
            {"num_layers": 2, "bidirectional": True, "batch_first": True},
            id="2_layers-bidirectional-batch_major",
        ),
        pytest.param(
            {"num_layers": 2, "dropout_rate": 1.0, "deterministic": False},
            {"num_layers": 2, "dropout": 1.0},
            id="dropout",
        ),
    ],
)
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "SimpleRNN"])
@pytest.mark.torch
def test_stacks_match_torch(cell, options, torch_options):
    hold_against_torch(cell, options, torch_options)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_projections_match_torch():
    options = {"num_layers": 2, "bidirectional": True, "proj_size": 4}
    hold_against_torch("LSTM", options, options)


@pytest.mark.torch
def test_simple_rnns_with_relu_match_torch():
    options = {"num_layers": 2, "bidirectional": True}
    hold_against_torch("SimpleRNN", options | {"activation_fn": nn.relu}, options | {"nonlinearity": "relu"})


def hold_against_torch(cell, options, torch_options):
    import torch

    stack, variables, carry = make(cell, **options)
    xs = normal(2, (T, B, D) if stack.time_major else (B, T, D))

    def call(variables, xs, carry):
        return stack.apply(variables, xs, initial_carry=carry, rngs={"dropout": jax.random.key(0)})

    (d_variables, d_xs, d_carry), (last, ys) = outputs_and_gradients(call, variables, xs, carry)

    theirs = getattr(torch.nn, cell.removeprefix("Simple"))(D, H, **torch_options)
    theirs.load_state_dict({name: torch.tensor(x) for name, x in as_torch(cell, variables["params"]).items()})
    t_xs = torch.tensor(np.asarray(xs), requires_grad=True)
    t_carry = [torch.tensor(x, requires_grad=True) for x in torch_carry(cell, carry)]
    t_ys, t_last = theirs(t_xs, tuple(t_carry) if cell == "LSTM" else t_carry[0])
    t_last = list(t_last) if cell == "LSTM" else [t_last]
    sum(torch.sin(x).sum() for x in (t_ys, *t_last)).backward()

    def compare(got, want, name):
        np.testing.assert_allclose(np.asarray(got), want.detach().numpy(), rtol=1e-5, atol=1e-5, err_msg=name)

    compare(ys, t_ys, "ys")
    compare(d_xs, t_xs.grad, "dxs")
    for got, want in zip(torch_carry(cell, last), t_last, strict=True):
        compare(got, want, "carry")
    for got, want in zip(torch_carry(cell, d_carry), t_carry, strict=True):
        compare(got, want.grad, "dcarry")
    hidden_biases = 0
    for name, got in as_torch(cell, d_variables["params"]).items():
        want = getattr(theirs, name).grad
        if name.startswith("bias_hh") and cell == "GRU":  # the stack has no b_hr and b_hz
            got, want = got[2 * H :], want[2 * H :]
            hidden_biases += 1
        if name.startswith({"LSTM": "bias_ih", "SimpleRNN": "bias_hh"}.get(cell, "no bias")):
            continue  # the stack has one bias, torch.nn two
        compare(got, want, f"d{name}")
    assert hidden_biases == (len(jax.tree.leaves(carry)) if cell == "GRU" else 0)


def test_dropout_is_between_layers_and_drawn_per_step():
    stack, variables, carry = make("GRU", num_layers=3, dropout_rate=0.5, deterministic=False)
    stack = stack.clone(deterministic=None)
    xs, key = normal(2, (T, B, D)), jax.random.key(1)

    def call(deterministic):
        of_dropout = lambda module, _: isinstance(module, nn.Dropout)  # noqa: E731
        options = {"deterministic": deterministic, "rngs": {"dropout": key}, "capture_intermediates": of_dropout}
        (_, ys), captured = stack.apply(variables, xs, initial_carry=carry, mutable=["intermediates"], **options)
        return ys, [x["__call__"][0] for _, x in sorted(captured["intermediates"].items())]

    ys, dropped = call(False)
    _, kept = call(True)
    assert len(dropped) == len(kept) == 2
    mask = dropped[0] != 0
    np.testing.assert_allclose(dropped[0], jnp.where(mask, 2 * kept[0], 0), rtol=1e-6)
    assert 0.3 < mask.mean() < 0.7 and jnp.any(mask[0] != mask[1])
    assert jnp.any(mask != (dropped[1] != 0))
    assert jnp.all(ys != 0)
    with pytest.raises(ValueError, match="deterministic"):
        stack.apply(variables, xs)


# --- against Flax ----------------------------------------------------------------------------------------------------


@pytest.mark.quick("cell")
@pytest.mark.parametrize("lengths", [None, [7, 1, 4]], ids=["whole", "lengths"])
@pytest.mark.parametrize("cell", STACKS)
def test_bidirectional_layer_matches_flax(cell, lengths):
    stack, variables, carry = make(cell, bidirectional=True)
    xs, lengths = normal(2, (T, B, D)), None if lengths is None else jnp.array(lengths)
    cells = getattr(LINEN, CELL_OF[cell])
    theirs = nn.Bidirectional(nn.RNN(cells(H)), nn.RNN(cells(H)), time_major=True, return_carry=True)
    valid = jnp.ones((T, B, 1)) if lengths is None else (jnp.arange(T)[:, None] < lengths)[..., None]

    def call(params, xs, carry):
        last, ys = stack.apply({"params": params}, xs, initial_carry=carry, seq_lengths=lengths)
        return last, ys * valid

    def flax_call(params, xs, carry):
        forward, backward = ({"cell": params[name]} for name in ("layers_0", "layers_0_reverse"))
        params = {"forward_rnn": forward, "backward_rnn": backward}
        last, ys = theirs.apply({"params": params}, xs, initial_carry=carry[0], seq_lengths=lengths)
        return (last,), ys * valid

    args = variables["params"], xs, carry
    assert_close(outputs_and_gradients(call, *args), outputs_and_gradients(flax_call, *args), tol=1e-5)


@pytest.mark.parametrize(
    ("cell", "options"), cases.deal(itertools.product((False, True), (None, [7, 0, 4])), STACKS, ("GRU",)), ids=str
)
def test_reversed_layer_matches_reversed_rnn(cell, options):
    keep_order, lengths = options
    stack, variables, carry = make(cell, reverse=True, keep_order=keep_order)
    xs, resets = normal(2, (T, B, D)), normal(3, (T, B)) > 0.7
    lengths = None if lengths is None else jnp.array(lengths)
    cells = getattr(linen, CELL_OF[cell])
    rnn = linen.RNN(cells(H), time_major=True, return_carry=True, reverse=True, keep_order=keep_order)
    options = {"seq_lengths": lengths, "resets": resets}
    last, ys = stack.apply(variables, xs, initial_carry=carry, **options)
    params = {"params": {"cell": variables["params"]["layers_0"]}}
    want_last, want_ys = rnn.apply(params, xs, initial_carry=carry[0], **options)
    valid = jnp.ones((T, B), bool) if lengths is None else jnp.arange(T)[:, None] < lengths
    assert_close((last[0], ys[valid]), (want_last, want_ys[valid]))


@pytest.mark.parametrize(
    "options",
    [{}, {"reverse": True}, {"reverse": True, "keep_order": True}, {"bidirectional": True}],
    ids=["forward", "reverse", "keep_order", "bidirectional"],
)
def test_traced_lengths_are_clipped(options):
    stack, variables, carry = make("GRU", num_layers=2, **options)
    xs, resets = normal(2, (T, B, D)), normal(3, (T, B)) > 0.7
    call = jax.jit(lambda lengths: stack.apply(variables, xs, initial_carry=carry, seq_lengths=lengths, resets=resets))
    got = call(jnp.array([-1, T + 2, 3]))
    assert_close(got, call(jnp.array([0, T, 3])), tol=0)
    assert_close(jax.tree.map(lambda x: x[0], got[0]), jax.tree.map(lambda x: x[0], carry), tol=0)


@pytest.mark.parametrize("cell", STACKS)
def test_layers_have_the_parameters_of_flax_cells(cell):
    flax_cell = getattr(LINEN, CELL_OF[cell])
    inits = {name: nn.initializers.normal(i + 1.0) for i, name in enumerate(("kernel_init", "recurrent_kernel_init"))}

    class Stacked(nn.Module):
        @nn.compact
        def __call__(self, xs):
            for name in ("layers_0", "layers_1"):
                xs = flax_cell(H, name=name, **inits)(carry[0], xs)[1]

    stack, _, carry = make(cell, num_layers=2, **inits)
    got, want = (
        module.init(jax.random.key(3), xs)
        for module, xs in ((stack, jnp.zeros((T, B, D))), (Stacked(), jnp.zeros((B, D))))
    )
    assert_close(got, want, tol=0)
    assert_close(stack.initialize_carry(jax.random.key(0), (B, D)), jax.tree.map(jnp.zeros_like, carry), tol=0)


def test_an_mgu_has_an_initializer_for_each_kind_of_bias():
    stack = linen.MGU(H, bias_init=nn.initializers.constant(2.0), forget_bias_init=nn.initializers.constant(3.0))
    params = stack.init(jax.random.key(0), jnp.zeros((B, T, D)))["params"]["layers_0"]
    assert {name: tree["bias"][0].item() for name, tree in params.items() if "bias" in tree} == {
        "if": 3,
        "in": 2,
        "hn": 2,
    }


# --- episodes --------------------------------------------------------------------------------------------------------

RESETS = np.zeros((T, B), bool)
RESETS[[3, 0, 5, 6], [0, 1, 1, 1]] = True
LENGTHS = np.array([7, 6, 2])


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True}, {"reverse": True, "seq_lengths": np.full(B, T - 2)}])
def test_resets_of_64_bits_do_not_warn(dtype, options):
    bidirectional = options.get("bidirectional", False)
    options = {name: x for name, x in options.items() if name != "bidirectional"}
    stack, variables, carry = make("GRU", bidirectional=bidirectional)
    xs, resets = normal(2, (T, B, D)), np.arange(T * B).reshape(T, B) % 3 == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = stack.apply(variables, xs, initial_carry=carry, resets=resets.astype(dtype), **options)
    assert_close(got, stack.apply(variables, xs, initial_carry=carry, resets=resets, **options), tol=0)


def episodes_apart(stack, variables, xs, carry, reset_carry, lengths):
    """Computes one call with `RESETS` by a call per episode; returns the last carry, and outputs padded with zeros.

    `reset_carry(direction, t, b)` is the state with which `direction` begins an episode of sequence b at step t.
    """
    carries, outputs = [], []
    for b in range(B):
        length = T if lengths is None else int(lengths[b])
        starts = [0, *(t for t in range(1, length) if RESETS[t, b])]
        row = jax.tree.map(lambda x, b=b: x[b], carry)
        ys, ends = [], []
        for first, end in zip(starts, [*starts[1:], length], strict=True):
            forward = row[0][0] if first == 0 and not RESETS[0, b] else reset_carry(0, first, b)
            backward = row[0][1] if end == length else reset_carry(1, end - 1, b)
            (last,), y = stack.apply(variables, xs[first:end, b], initial_carry=((forward, backward),))
            ys.append(y)
            ends.append(last)
        carries.append(((ends[-1][0], ends[0][1]),))
        outputs.append(jnp.pad(jnp.concatenate(ys), ((0, T - length), (0, 0))))
    return jax.tree.map(lambda *x: jnp.stack(x), *carries), jnp.stack(outputs, axis=1)


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        *cases.deal([(None, None), ("tbh", None), ("h", LENGTHS), ("tbh", LENGTHS)], STACKS, ("GRU", "LSTM")),
        ("LSTM-proj", ("h", LENGTHS)),
        ("LSTM-proj", ("tbh", None)),
    ],
    ids=lambda x: x if isinstance(x, str) else f"{x[0]}-{'whole' if x[1] is None else 'lengths'}",
)
def test_both_directions_match_separate_episodes(cell, options):
    state, lengths = options
    cell, *proj = cell.split("-")
    stack, variables, carry = make(cell, bidirectional=True, **({"proj_size": 4} if proj else {}))
    axes = {None: (), "h": (), "tbh": (T, B)}[state]
    reset_carry = random_tree(4, jax.tree.map(lambda x: jnp.zeros((*axes, x.shape[-1])), carry))
    xs = normal(2, (T, B, D))
    valid = jnp.ones((T, B, 1)) if lengths is None else (jnp.arange(T)[:, None] < lengths)[..., None]

    def whole(variables, xs, carry, reset_carry):
        new = None if state is None else reset_carry
        last, ys = stack.apply(variables, xs, initial_carry=carry, resets=RESETS, reset_carry=new, seq_lengths=lengths)
        return last, ys * valid

    def apart(variables, xs, carry, reset_carry):
        def new(direction, t, b):
            if state is None:
                return jax.tree.map(jnp.zeros_like, reset_carry[0][direction])
            return jax.tree.map(lambda x: x[t, b] if state == "tbh" else x, reset_carry[0][direction])

        return episodes_apart(stack, variables, xs, carry, new, lengths)

    args = variables, xs, carry, reset_carry
    assert_close(outputs_and_gradients(whole, *args), outputs_and_gradients(apart, *args), tol=1e-5)


@pytest.mark.parametrize("cell", STACKS)
def test_layers_do_not_mix_episodes(cell):
    """Checks a bidirectional stack of two layers, where an episode's first outputs depend on its last inputs."""
    stack, variables, _ = make(cell, num_layers=2, bidirectional=True, return_carry=False)
    xs, resets = normal(2, (T, B, D)), jnp.zeros((T, B)).at[3].set(2.0)
    whole = stack.apply(variables, xs, resets=resets)
    apart = [stack.apply(variables, part) for part in (xs[:3], xs[3:])]
    assert_close(whole, jnp.concatenate(apart))
    poisoned = stack.apply(variables, xs.at[3:].set(jnp.nan), resets=resets)
    np.testing.assert_array_equal(poisoned[:3], whole[:3])


@pytest.mark.parametrize("cell", STACKS)
def test_directions_may_have_carries_of_two_dtypes(cell):
    stack, variables, ((forward, backward),) = make(cell, bidirectional=True)
    xs, backward = normal(2, (T, B, D)), jax.tree.map(lambda x: x.astype(jnp.bfloat16), backward)
    ((last, last_backward),), _ = stack.apply(variables, xs, initial_carry=((forward, backward),), resets=RESETS)
    assert {x.dtype for x in jax.tree.leaves(last)} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in jax.tree.leaves(last_backward)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("cell", STACKS)
def test_carry_may_be_numpy_arrays(cell):
    stack, variables, carry = make(cell, bidirectional=True)
    xs, carry = normal(2, (T, B, D)), jax.tree.map(lambda x: np.asarray(x, np.float64), carry)
    want = stack.apply(variables, xs, initial_carry=jax.tree.map(jnp.asarray, carry), seq_lengths=LENGTHS)
    assert_close(stack.apply(variables, xs, initial_carry=carry, seq_lengths=LENGTHS), want)


@pytest.mark.parametrize("cell", STACKS)
def test_padding_has_no_effect(cell):
    stack, variables, carry = make(cell, num_layers=2, bidirectional=True)
    xs, lengths = normal(2, (T, B, D)), jnp.array([7, 0, 4])
    padded = jnp.where((jnp.arange(T)[:, None] < lengths)[..., None], xs, jnp.nan)
    last, ys = stack.apply(variables, padded, initial_carry=carry, seq_lengths=lengths)
    for b, length in enumerate([7, 0, 4]):
        row = jax.tree.map(lambda x, b=b: x[b], carry)
        want_last, want_ys = stack.apply(variables, xs[:length, b], initial_carry=row)
        assert_close((jax.tree.map(lambda x, b=b: x[b], last), ys[:length, b]), (want_last, want_ys))


@pytest.mark.parametrize(
    ("cell", "options"), cases.deal([{}, {"reverse": True}, {"bidirectional": True}], STACKS, ("GRU", "LSTM")), ids=str
)
def test_padding_of_any_value_reaches_no_gradient(cell, options):
    """Padding may also be so large that products with it overflow."""
    stack, variables, carry = make(cell, num_layers=2, **options)
    xs, lengths = normal(2, (T, B, D)), jnp.array([7, 0, 4])
    valid, empty = (jnp.arange(T)[:, None] < lengths)[..., None], (lengths == 0)[:, None]
    resets, starts = normal(3, (T, B)) > 0.7, jax.tree.map(lambda x: jnp.stack([x] * T), carry)

    def call(variables, xs, carry, starts, resets):
        options = {"seq_lengths": lengths, "resets": resets, "reset_carry": starts}
        last, ys = stack.apply(variables, xs, initial_carry=carry, **options)
        return jax.tree.map(lambda x: jnp.where(empty, 0.0, x), last), jnp.where(valid, ys, 0.0)

    def padded(value):
        at = lambda mask: lambda x: jnp.where(mask, value, x)  # noqa: E731
        of_carry, of_starts = jax.tree.map(at(empty), carry), jax.tree.map(at(~valid), starts)
        return at(~valid)(xs), of_carry, of_starts, jnp.where(valid[..., 0], resets, value)

    results = [outputs_and_gradients(call, variables, *padded(value)) for value in (0.0, jnp.nan, 3e38)]
    assert_close(results[1], results[0], tol=0)
    assert_close(results[2], results[0], tol=0)


@pytest.mark.parametrize("time_major", [True, False], ids=["time_major", "batch_major"])
def test_extra_batch_axes_equal_one_flattened_axis(time_major):
    stack, variables, _ = make("LSTM", num_layers=2, bidirectional=True, time_major=time_major)
    shape = (T, 2, 3) if time_major else (2, 3, T)
    flat = (T, 6) if time_major else (6, T)
    xs, resets, lengths = normal(2, (*shape, D)), normal(3, shape) > 0.7, jnp.array([[7, 0, 4], [1, 5, 6]])
    carry = random_tree(1, stack.initialize_carry(jax.random.key(0), (2, 3, D)))
    last, ys = stack.apply(variables, xs, initial_carry=carry, resets=resets, seq_lengths=lengths)
    want_last, want_ys = stack.apply(
        variables,
        xs.reshape(*flat, D),
        initial_carry=jax.tree.map(lambda x: x.reshape(6, H), carry),
        resets=resets.reshape(flat),
        seq_lengths=lengths.reshape(6),
    )
    assert_close((last, ys), (jax.tree.map(lambda x: x.reshape(2, 3, H), want_last), want_ys.reshape(*shape, 2 * H)))


# --- what sequences and episodes start from --------------------------------------------------------------------------


@pytest.mark.parametrize("cell", STACKS)
def test_a_learned_carry_starts_sequences_and_episodes(cell):
    stack, variables, _ = make(cell, bidirectional=True, learned_carry=True)
    plain, params = stack.clone(learned_carry=False), dict(variables["params"])
    names, states = ["layers_0", "layers_0_reverse"], "ch" if cell == "LSTM" else "h"
    learned = tuple(tuple(params.pop(f"{name}_carry_{state}") for state in states) for name in names)
    learned = (learned if cell == "LSTM" else tuple(x for (x,) in learned),)
    assert sorted(params) == names
    xs = normal(2, (T, B, D))
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (B, H)), learned)
    want = plain.apply({"params": params}, xs, initial_carry=carry, resets=RESETS, reset_carry=learned)
    assert_close(stack.apply(variables, xs, resets=RESETS), want, tol=0)
    assert_close(stack.apply(variables, jax.random.key(0), (B, D), method="initialize_carry"), carry, tol=0)
    grads = jax.grad(lambda variables: jnp.sum(stack.apply(variables, xs)[1] ** 2))(variables)["params"]
    assert all(jnp.all(grads[name] != 0) for name in grads if "carry" in name)
    # a given carry takes precedence over the learned one
    given = jax.tree.map(lambda x: x + 1, carry)
    want = plain.apply({"params": params}, xs, initial_carry=given, resets=RESETS, reset_carry=given)
    assert_close(stack.apply(variables, xs, initial_carry=given, resets=RESETS, reset_carry=given), want, tol=0)
    with pytest.raises(ValueError, match='method="initialize_carry"'):
        stack.initialize_carry(jax.random.key(0), (B, D))


@pytest.mark.parametrize("dtypes", [(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)], ids=str)
def test_directions_may_have_reset_carries_of_two_dtypes(dtypes):
    stack, variables, _ = make("GRU", bidirectional=True)
    xs, new = normal(2, (T, B, D)), [jnp.full((H,), 0.5 + k, dtype) for k, dtype in enumerate(dtypes)]
    got = stack.apply(variables, xs, resets=RESETS, reset_carry=(tuple(new),))
    want = stack.apply(variables, xs, resets=RESETS, reset_carry=(tuple(x.astype(jnp.float32) for x in new),))
    assert_close(got, want, tol=0)


def test_a_random_carry_has_a_key_for_each_layer():
    stack, variables, _ = make("LSTM", num_layers=2, carry_init=nn.initializers.normal(1.0))
    xs, key = normal(2, (T, B, D)), jax.random.key(4)
    carry = stack.initialize_carry(key, (B, D))
    assert len({float(x[0, 0]) for x in jax.tree.leaves(carry)}) == 4
    want = stack.apply(variables, xs, initial_carry=carry, resets=RESETS, reset_carry=carry)
    assert_close(stack.apply(variables, xs, init_key=key, resets=RESETS), want, tol=0)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function_name", "shape", "expected"),
    [("run", {"reverse": True}, {"reverse": True}), ("run_bidirectional", {"bidirectional": True}, {})],
)
def test_options_reach_the_function(function_name, shape, expected, monkeypatch):
    seen = []

    def function(*args, **options):
        seen.append({name: options[name] for name in names if name in options})
        return real(*args, **(options | {"implementation": None}))

    names = "precision", "implementation", "remat", "reverse"
    real = getattr(recurrent, function_name)
    monkeypatch.setattr(recurrent, function_name, function)
    options = {"precision": jax.lax.Precision.HIGHEST, "implementation": "triton", "remat": True}
    stack, variables, _ = make("GRU", **shape, **options)
    seen.clear()
    stack.apply(variables, normal(2, (T, B, D)))
    assert seen == [options | expected]


def test_bfloat16_multiplies_in_bfloat16_and_carries_float32():
    stack, variables, carry = make("GRU", num_layers=2, dtype=jnp.bfloat16)
    xs = normal(2, (T, B, D))
    text = str(jax.make_jaxpr(functools.partial(stack.apply, mutable=False))(variables, xs, initial_carry=carry))
    assert f"bf16[{T},{B},{D}]" in text and f"bf16[{T},{B},{H}]" in text
    last, ys = stack.apply(variables, xs, initial_carry=carry)
    assert {x.dtype for x in jax.tree.leaves((last, ys))} == {jnp.dtype(jnp.float32)}
    assert jnp.any(ys != ys.astype(jnp.bfloat16))


LENGTHS = np.array([1, T, 2])
BAD = [
    ("GRU", {"num_layers": 0}, {}, "num_layers must be at least 1, got 0"),
    ("GRU", {"dropout_rate": 1.5}, {}, "dropout_rate must be between 0 and 1, got 1.5"),
    ("GRU", {"dropout_rate": -0.1}, {}, "dropout_rate must be between 0 and 1"),
    ("LSTM", {"proj_size": 0}, {}, "proj_size must be at least 1, got 0"),
    (
        "LSTM",
        {"proj_size": 4},
        {"initial_carry": ((jnp.zeros((B, H)),) * 2,)},
        r"a pair \(c \[..., 6\], h \[..., 4\]\)",
    ),
    ("GRU", {"bidirectional": True, "reverse": True}, {}, "reverse must be False for a bidirectional stack"),
    ("GRU", {"implementation": "cuda"}, {}, "implementation must be"),
    ("GRU", {}, {"reset_carry": (jnp.zeros(H),)}, "reset_carry is given but resets is None"),
    ("GRU", {}, {"resets": jnp.zeros((B, T))}, r"resets must be \[T, \*batch\] = \(7, 3\)"),
    ("GRU", {}, {"seq_lengths": jnp.array([1, 2])}, r"seq_lengths must be \[\*batch\] = \(3,\)"),
    ("GRU", {}, {"initial_carry": jnp.zeros((B, H))}, r"of this stack must be a tuple .* 1 layers: an array"),
    ("GRU", {"num_layers": 2}, {"initial_carry": (jnp.zeros((B, H)),)}, "each of 2 layers: an array"),
    ("GRU", {}, {"initial_carry": (jnp.zeros((B, 2 * H)),)}, r"an array \[..., 6\]; got an array \(3, 12\)"),
    ("GRU", {}, {"initial_carry": (jnp.zeros((2, H)),)}, "carry must be"),
    ("GRU", {}, {"initial_carry": (None,)}, "each of 1 layers: an array"),
    ("GRU", {"bidirectional": True}, {"initial_carry": (jnp.zeros((B, H)),)}, r"a pair \(forward, backward\), each an"),
    ("LSTM", {}, {"initial_carry": (jnp.zeros((B, H)),)}, r"a pair \(c \[..., 6\], h \[..., 6\]\)"),
    (
        "LSTM",
        {"bidirectional": True},
        {"resets": RESETS, "reset_carry": ((jnp.zeros(H),) * 2,)},
        r"reset_carry .* a pair \(forward, backward\), each a pair \(c",
    ),
    ("LSTM", {}, {"resets": RESETS, "reset_carry": ((jnp.zeros((T, H)),) * 2,)}, r"must be \[H\] = \(6,\)"),
    ("GRU", {"reverse": True}, {"resets": RESETS[:, 0], "seq_lengths": LENGTHS}, r"resets must be .*, got \(7,\)"),
    ("GRU", {"reverse": True}, {"resets": RESETS[:1], "seq_lengths": LENGTHS}, r"resets must be .*, got \(1, 3\)"),
    ("GRU", {"bidirectional": True}, {"resets": RESETS[:, :1], "seq_lengths": LENGTHS}, r"got \(7, 1\)"),
    ("GRU", {"bidirectional": True}, {"resets": RESETS.tolist()}, "resets must be an array, got a list of 7"),
    ("GRU", {"bidirectional": True}, {"resets": jax.random.split(jax.random.key(0), (T, B))}, "an array of numbers"),
    (
        "GRU",
        {"reverse": True},
        {"resets": RESETS, "reset_carry": (jnp.zeros((1, H)),), "seq_lengths": LENGTHS},
        r"reset_carry must be \[H\] = \(6,\), .* got \(1, 6\)",
    ),
    ("GRU", {"reverse": True}, {"seq_lengths": [1, 2, 3]}, "seq_lengths must be an array, got a list of 3"),
]


@pytest.mark.parametrize(("cell", "options", "call", "message"), BAD, ids=[x[-1][:30] for x in BAD])
def test_bad_arguments_raise(cell, options, call, message):
    stack = getattr(linen, cell)(H, time_major=True, **options)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(stack.init, **call), jax.random.key(0), jnp.zeros((T, B, D)))


def test_a_stack_of_simple_rnns_rejects_other_activations():
    with pytest.raises(NotImplementedError, match="activation_fn is neither tanh nor relu; use one RNN per layer"):
        linen.SimpleRNN(H, activation_fn=nn.elu).init(jax.random.key(0), jnp.zeros((B, T, D)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_hr": jnp.zeros((H, 3))}, r"params.w_hr must be \(6, 4\)"),
        ({"w_hh": jnp.zeros((H, 4 * H))}, r"params.w_hh must be \(4, 24\)"),
        ({"w_hr": None}, r"carry must be \(c, h\), both \[\*batch, H\]"),
        ({"c": jnp.zeros((B + 1, H))}, r"carry must be \(c, h\), \[\*batch, H\] and \[\*batch, P\]"),
        ({"reset_c": jnp.zeros(4)}, r"reset_state\[0\] must be \[H\] = \(6,\)"),
        ({"reset_h": jnp.zeros(H)}, r"reset_state\[1\] must be \[H\] = \(4,\)"),
        ({"implementation": "cuda"}, "implementation must be"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_shapes_of_a_projection_raise(changes, message):
    arrays = {"w_ih": (D, 4 * H), "w_hh": (4, 4 * H), "b": (4 * H,), "w_hr": (H, 4)}
    arrays |= {"c": (B, H), "h": (B, 4), "reset_c": (H,), "reset_h": (4,), "xs": (T, B, D)}
    x = {name: jnp.zeros(shape) for name, shape in arrays.items()} | {"implementation": None} | changes
    params = jaxrnn.LSTMParams(x["w_ih"], x["w_hh"], x["b"], x["w_hr"])
    with pytest.raises(ValueError, match=message):
        jaxrnn.lstm(
            params,
            (x["c"], x["h"]),
            x["xs"],
            resets=jnp.zeros((T, B)),
            reset_state=(x["reset_c"], x["reset_h"]),
            implementation=x["implementation"],
        )


@pytest.mark.quick("cell")
@pytest.mark.interpret
@pytest.mark.parametrize(
    ("cell", "proj"), [*((cell, {}) for cell in STACKS), ("LSTM", {"proj_size": 4})], ids=[*STACKS, "LSTM-projected"]
)
def test_triton_matches_xla(cell, proj):
    xs, resets, lengths = normal(2, (3, B, D)), jnp.zeros((3, B)).at[1, 0].set(1), jnp.array([3, 2, 1])
    valid = (jnp.arange(3)[:, None] < lengths)[..., None]
    results = []
    for name in ("triton", "xla"):
        stack, variables, carry = make(cell, bidirectional=True, implementation=name, precision="highest", **proj)

        def call(variables, xs, carry, stack=stack):
            last, ys = stack.apply(variables, xs, initial_carry=carry, resets=resets, seq_lengths=lengths)
            return last, ys * valid

        results.append(outputs_and_gradients(call, variables, xs, carry))
        traced = str(jax.make_jaxpr(functools.partial(outputs_and_gradients, call))(variables, xs, carry))
        expected = int(name == "triton")  # one launch runs both directions
        assert [traced.count(f"direction={direction}") for direction in ("fwd", "bwd")] == [expected, expected]
    assert_close(*results, tol=2e-5)
