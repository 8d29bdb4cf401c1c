"""Tests `torch_bridge.nn` against `torch.nn`: whole sequences without resets, separate episodes with resets."""

import collections
import copy
import functools
import itertools
import pickle

import cases
import pytest
from torch_calls import MGU, torch

from torch_bridge import functional, nn

T, B, D, H = 5, 4, 3, 6
PLAIN = {"GRU": torch.nn.GRU, "LSTM": torch.nn.LSTM, "MGU": MGU, "RNN": torch.nn.RNN,
         "RNN_RELU": functools.partial(torch.nn.RNN, nonlinearity="relu")}  # fmt: skip
OURS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "MGU": nn.MGU, "RNN": nn.RNN,
        "RNN_RELU": functools.partial(nn.RNN, nonlinearity="relu"), "NormGRU": nn.NormGRU,
        "LayerNormGRU": functools.partial(nn.NormGRU, norm="layer")}  # fmt: skip
FUNCTIONS = {"GRU": functional.gru, "LSTM": functional.lstm, "MGU": functional.mgu, "RNN": functional.rnn,
             "RNN_RELU": functools.partial(functional.rnn, nonlinearity="relu"), "NormGRU": functional.norm_gru,
             "LayerNormGRU": functools.partial(functional.norm_gru, norm="layer")}  # fmt: skip
GATES = {"GRU": 3, "LSTM": 4, "MGU": 2, "RNN": 1, "RNN_RELU": 1, "NormGRU": 3, "LayerNormGRU": 3}
every_kind_of_torch_nn = pytest.mark.parametrize("kind", PLAIN)
every_kind = pytest.mark.parametrize("kind", OURS)
every_kind_of_torchrl = pytest.mark.parametrize("kind", ["GRU", "LSTM"])
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")


def pair(kind, **options):
    """Returns a module of `torch.nn`, and ours with the same weights."""
    torch.manual_seed(0)
    plain = PLAIN[kind](D, H, dtype=torch.float64, **options)
    ours = OURS[kind](D, H, dtype=torch.float64, **options)
    assert str(ours) == str(plain)
    assert ours.load_state_dict(plain.state_dict(), strict=True) == torch.nn.modules.module._IncompatibleKeys([], [])
    return plain, ours


def states(module, *batch):
    count = module.num_layers * (2 if module.bidirectional else 1)
    h = torch.randn(count, *batch, module.proj_size or H, dtype=torch.float64).requires_grad_()
    return h if module.mode != "LSTM" else (h, torch.randn(count, *batch, H, dtype=torch.float64).requires_grad_())


def flat(results):
    found = torch.utils._pytree.tree_leaves(results)
    return [x.data if isinstance(x, torch.nn.utils.rnn.PackedSequence) else x for x in found if x is not None]


def with_gradients(results, leaves):
    outputs = [x for x in flat(results) if x.is_floating_point()]
    total = sum((x * x.detach().cos()).sum() for x in outputs)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    return [*outputs, *gradients]


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


STACKS = [
    {}, {"batch_first": True}, {"bidirectional": True}, {"num_layers": 2, "bias": False},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"num_layers": 2, "bidirectional": True, "bias": False, "dropout": 0.5},
]  # fmt: skip
PROJECTED = [{"proj_size": 2}, {"proj_size": 2, "num_layers": 2, "bidirectional": True, "batch_first": True}]
ALL = [(kind, options) for kind in PLAIN for options in STACKS] + [("LSTM", options) for options in PROJECTED]
every_stack = pytest.mark.parametrize(("kind", "options"), ALL, ids=str)
LENGTHS = {"packed": ([5, 3, 3, 1], True), "packed-unsorted": ([3, 5, 1, 4], False)}


@pytest.mark.quick("kind")
@pytest.mark.parametrize("form", ["batch", "unbatched", *LENGTHS])
@every_stack
def test_modules_without_resets_match_torch_nn(kind, options, form):
    plain, ours = (module.eval() for module in pair(kind, **options))
    batch_first = plain.batch_first
    for given in (True, False):
        shape = (T,) if form == "unbatched" else (B, T) if batch_first else (T, B)
        xs = torch.randn(*shape, D, dtype=torch.float64).requires_grad_()
        hx = states(plain, *(() if form == "unbatched" else (B,))) if given else None
        results = []
        for module in (plain, ours):
            inputs = xs
            if form in LENGTHS:
                lengths, ordered = LENGTHS[form]
                inputs = torch.nn.utils.rnn.pack_padded_sequence(xs, lengths, batch_first, enforce_sorted=ordered)
            outputs = module(inputs, hx)
            leaves = [xs, *module.parameters(), *flat(hx)]
            results.append(with_gradients(outputs, leaves))
            if form in LENGTHS:
                results[-1] += [x for x in outputs[0][1:] if x is not None]
        assert_same(results[1], results[0])


def episodes(plain, xs, hx, resets, reset_state):
    """Runs each episode of one sequence `[T, D]` by itself through `torch.nn`; returns outputs and last states.

    `reset_state` has, for each state, the reset state of every step, `[layers * directions, T, width]`.
    """
    firsts = [0, *(t for t in range(1, len(xs)) if resets[t])]
    ends = [*firsts[1:], len(xs)]
    outputs, last = [], [list(x) for x in hx]
    for first, end in zip(firsts, ends, strict=True):
        start = []
        for old, new in zip(hx, reset_state, strict=True):
            rows = []
            for i in range(len(old)):
                if plain.bidirectional and i % 2:
                    rows.append(old[i] if end == len(xs) else new[i, end - 1])
                else:
                    rows.append(new[i, first] if resets[first] else old[i])
            start.append(torch.stack(rows))
        ys, state = plain(xs[first:end], start[0] if len(start) == 1 else tuple(start))
        outputs.append(ys)
        for k, x in enumerate(flat(state)):
            for i in range(len(x)):
                if (first == 0) if plain.bidirectional and i % 2 else (end == len(xs)):
                    last[k][i] = x[i]
    return torch.cat(outputs), [torch.stack(x) for x in last]


SHAPES = (None, "learned", "each", "stepped")  # shapes of reset states; packed inputs do not support one per step


@pytest.mark.quick("kind")
@pytest.mark.parametrize(
    ("form", "shape"),
    [*itertools.product(("batch", "unbatched"), SHAPES), *itertools.product(("packed-unsorted",), SHAPES[:3])],
)
@every_stack
def test_episodes_with_resets_match_torch_nn(kind, options, shape, form):
    plain, ours = (module.eval() for module in pair(kind, **options))
    torch.manual_seed(1)
    batch, time = B if form != "unbatched" else 1, 5
    xs, hx = torch.randn(time, batch, D, dtype=torch.float64).requires_grad_(), states(plain, batch)
    resets = torch.rand(time, batch) < 0.4
    resets[:2, 0] = torch.tensor([True, False])
    lengths = LENGTHS[form][0] if form in LENGTHS else [time] * batch
    new, full = [], []
    for x in flat(hx):
        count, width = x.shape[0], x.shape[-1]
        sizes = {
            None: (),
            "learned": (count, width),
            "each": (count, batch, width),
            "stepped": (count, time, batch, width),
        }
        value = torch.randn(sizes[shape], dtype=torch.float64).requires_grad_() if shape else torch.zeros(count, width)
        new.append(value)
        full.append(value.double()[(slice(None), *(None,) * (4 - value.ndim))] if value.ndim == 2 else
                    value if value.ndim == 4 else value[:, None])  # fmt: skip
    full = [x.expand(x.shape[0], time, batch, x.shape[-1]) for x in full]
    leaves = [xs, *flat(hx), *(new if shape else [])]

    parts = [
        episodes(plain, xs[: lengths[b], b], [x[:, b] for x in flat(hx)], resets[:, b], [x[:, :, b] for x in full])
        for b in range(batch)
    ]
    want = with_gradients(
        (
            torch.nn.utils.rnn.pad_sequence([ys for ys, _ in parts]),
            [torch.stack(x, 1) for x in zip(*(last for _, last in parts), strict=True)],
        ),
        [*leaves, *plain.parameters()],
    )

    inputs, given, state = xs, resets, hx
    new = [x.transpose(1, 2) if shape == "stepped" and ours.batch_first else x for x in new]
    if form == "unbatched":
        inputs, given = xs[:, 0], resets[:, 0]
        state = hx[:, 0] if kind != "LSTM" else tuple(x[:, 0] for x in hx)
        new = [x.squeeze(-2 if shape == "each" or not ours.batch_first else 1) if x.ndim > 2 else x for x in new]
    elif form in LENGTHS:
        inputs, given = (
            torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False) for x in (xs, resets)
        )
    elif ours.batch_first:
        inputs, given = xs.transpose(0, 1), resets.T
    options = {"resets": given} | ({"reset_state": new[0] if kind != "LSTM" else tuple(new)} if shape else {})
    ys, last = ours(inputs, state, **options)
    if form == "unbatched":
        ys, last = ys[:, None], [x[:, None] for x in flat(last)]
    elif form in LENGTHS:
        ys, _ = torch.nn.utils.rnn.pad_packed_sequence(ys)
    elif ours.batch_first:
        ys = ys.transpose(0, 1)
    assert_same(with_gradients((ys, flat(last)), [*leaves, *ours.parameters()]), want)


@pytest.mark.parametrize("steps", [1, 3])
@every_stack
def test_outputs_share_no_memory(kind, options, steps):
    """Checks that an in-place change of one output changes no other, as with `torch.nn`."""
    _, ours = pair(kind, **options)
    with torch.no_grad():
        shape = (B, steps, D) if options.get("batch_first") else (steps, B, D)
        results = flat(ours(torch.randn(shape, dtype=torch.float64)))
    places = [x.untyped_storage().data_ptr() for x in results]
    assert len(set(places)) == len(places)


def test_states_of_a_named_tuple_are_in_the_order_of_pytorch():
    module, xs = nn.LSTM(D, H, dtype=torch.float64), torch.randn(T, B, D, dtype=torch.float64)
    h, c = states(module, B)
    named = collections.namedtuple("Named", ("hidden", "cell"))(h, c)
    assert_same(flat(module(xs, named)), flat(module(xs, (h, c))))
    for fields in (("cell", "hidden"), ("first", "second")):
        with pytest.raises(ValueError, match=rf"\({', '.join(fields)}\)"):
            module(xs, collections.namedtuple("Named", fields)(h, c))
        with pytest.raises(ValueError, match=rf"^reset_state .*\({', '.join(fields)}\)"):
            module(xs, resets=torch.ones(T, B), reset_state=collections.namedtuple("Named", fields)(h, c))


@every_kind_of_torch_nn
@pytest.mark.parametrize("steps", [1, 3])
def test_outputs_of_functions_share_no_memory(kind, steps):
    module = pair(kind)[0]
    run = FUNCTIONS[kind]
    results = flat(run(torch.randn(steps, B, D, dtype=torch.float64), None, *module.all_weights[0]))
    places = [x.untyped_storage().data_ptr() for x in results]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("steps", [1, 3])
@every_stack
def test_last_states_can_be_changed_in_place(kind, options, steps):
    _, ours = pair(kind, **options)
    shape = (B, steps, D) if options.get("batch_first") else (steps, B, D)
    ys, last = ours(torch.randn(shape, dtype=torch.float64))
    want = [2 * x.detach() for x in flat(last)]
    for x in flat(last):
        x.mul_(2)
    assert_same([x.detach() for x in flat(last)], want)
    (ys.sum() + sum(x.sum() for x in flat(last))).backward()


@every_kind_of_torch_nn
@pytest.mark.parametrize("steps", [1, 3])
def test_last_states_of_functions_can_be_changed_in_place(kind, steps):
    module = pair(kind)[0]
    run = FUNCTIONS[kind]
    ys, last = run(torch.randn(steps, B, D, dtype=torch.float64), None, *module.all_weights[0])
    for x in flat(last):
        x.mul_(2)
    (ys.sum() + sum(x.sum() for x in flat(last))).backward()


@every_kind
@pytest.mark.parametrize("steps", [1, 3])
def test_inputs_may_have_no_features(kind, steps):
    run, gates = FUNCTIONS[kind], GATES[kind]
    ys, _ = run(
        torch.zeros(steps, B, 0), None, torch.zeros(gates * H, 0), torch.ones(gates * H, H), torch.ones(gates * H)
    )
    assert ys.shape == (steps, B, H) and ys.all()


@every_kind_of_torch_nn
def test_dropout_is_between_layers_in_training_only(kind):
    plain, ours = pair(kind, num_layers=2, dropout=0.5)
    xs = torch.randn(T, B, D, dtype=torch.float64)
    results = []
    for module in (plain, ours):
        torch.manual_seed(3)
        results.append(flat(module(xs)))
    assert_same(results[1], results[0])
    ours.eval()
    assert_same(flat(ours(xs)), flat(plain.eval()(xs)))
    with pytest.warns(UserWarning, match="non-zero dropout expects num_layers greater than 1"):
        OURS[kind](D, H, dropout=0.5)


@every_kind_of_torch_nn
def test_initial_values_match_torch_nn_and_copies_compute_the_same(kind):
    modules = []
    for table in (PLAIN, OURS):
        torch.manual_seed(5)
        modules.append(table[kind](D, H, 2, bidirectional=True))
    assert [name for name, _ in modules[0].named_parameters()] == [name for name, _ in modules[1].named_parameters()]
    assert_same(list(modules[1].parameters()), list(modules[0].parameters()))
    xs = torch.randn(T, B, D)
    for other in (copy.deepcopy(modules[1]), pickle.loads(pickle.dumps(modules[1]))):
        assert_same(flat(other(xs)), flat(modules[1](xs)))
    assert {x.dtype for x in flat(modules[1].double()(xs.double()))} == {torch.float64}


@pytest.mark.quick("kind")
@every_kind
def test_ensemble_under_vmap_matches_its_modules(kind):
    modules = [OURS[kind](D, H, 2, bidirectional=True) for _ in range(3)]
    xs, resets = torch.randn(T, B, D), torch.rand(T, B) < 0.3
    params, buffers = torch.func.stack_module_state(modules)

    def run(params, buffers):
        return torch.func.functional_call(modules[0], (params, buffers), (xs,), {"resets": resets})[0]

    got = torch.vmap(run)(params, buffers)
    torch.testing.assert_close(got, torch.stack([module(xs, resets=resets)[0] for module in modules]))
    got.square().sum().backward()
    for module in modules:
        module(xs, resets=resets)[0].square().sum().backward()
    want = torch.stack([module.weight_hh_l1_reverse.grad for module in modules])
    torch.testing.assert_close(params["weight_hh_l1_reverse"].grad, want)


@pytest.mark.parametrize(
    ("kind", "options"),
    cases.deal(
        [{"bidirectional": True}, {"batch_first": True}, {"batch_first": True, "bidirectional": True}],
        OURS, ("GRU", "LSTM"),
    ),
    ids=str,
)  # fmt: skip
def test_a_compiled_module_is_one_graph(kind, options):
    torch._dynamo.reset()
    options = options | {"proj_size": 2} if kind == "LSTM" and "bidirectional" in options else options
    module = OURS[kind](D, H, 2, **options)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    outer = (B, T) if "batch_first" in options else (T, B)
    xs, resets = torch.randn(*outer, D).requires_grad_(), torch.rand(outer) < 0.3
    hx = [x.float().detach() for x in flat(states(module, B))]
    args = (xs, hx[0] if kind != "LSTM" else tuple(hx))
    got, want = compiled(*args, resets=resets), module(*args, resets=resets)
    leaves = [xs, *module.parameters()]
    torch.testing.assert_close(with_gradients(got, leaves), with_gradients(want, leaves))


@every_kind
def test_a_compiled_ensemble_is_one_graph(kind):
    torch._dynamo.reset()
    modules = [OURS[kind](D, H) for _ in range(3)]
    xs, resets = torch.randn(T, B, D), torch.rand(T, B) < 0.3
    params, buffers = torch.func.stack_module_state(modules)

    def ensemble(params, buffers):
        def run(params, buffers):
            return torch.func.functional_call(modules[0], (params, buffers), (xs,), {"resets": resets})[0]

        return torch.vmap(run)(params, buffers)

    compiled = torch.compile(ensemble, fullgraph=True, backend="aot_eager")
    leaves = list(params.values())
    got, want = (with_gradients(function(params, buffers), leaves) for function in (compiled, ensemble))
    torch.testing.assert_close(got, want)


WRONG = [  # inputs and states that torch.nn refuses
    ((2,), None), ((T, B, D, 1), None), ((T, B, D + 1), None), ((0, B, D), None), ((T, B, D), (B, H)),
    ((T, B, D), (1, B + 1, H)), ((T, B, D), (2, B, H)), ((T, D), (1, 1, H)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "state"), WRONG, ids=str)
@every_kind_of_torch_nn
def test_errors_match_torch_nn(kind, shape, state):
    errors = []
    for module in pair(kind):
        hx = None if state is None else torch.zeros(state, dtype=torch.float64)
        with pytest.raises((ValueError, RuntimeError)) as error:
            module(torch.zeros(shape, dtype=torch.float64), hx if kind != "LSTM" or hx is None else (hx, hx))
        errors.append((error.type, str(error.value).replace("MGU", "GRU")))  # a GRU computes what `PLAIN["MGU"]` does
    assert errors[1] == errors[0]


@every_kind
def test_bad_states_raise(kind):
    module, xs, h = OURS[kind](D, H), torch.zeros(T, B, D), torch.zeros(1, B, H)
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.float64):
        hx = h.to(dtype)
        with pytest.raises(ValueError, match=f"hx must be torch.float32, like the input, or float32, got {dtype}"):
            module(xs, hx if kind != "LSTM" else (h, hx))
    if kind == "LSTM":
        for hx in (h, (h, h, h)):
            with pytest.raises(ValueError, match=r"hx of an LSTM is a pair \(h, c\)"):
                module(xs, hx)
        with pytest.raises(ValueError, match="hx must be a tensor, got None"):
            module(xs, (h, None))
    else:
        for hx in ((h,), [h]):
            with pytest.raises(
                ValueError, match=r"hx of [A-Za-z_]+ must be one tensor, got .*: only an LSTM has a pair"
            ):
                module(xs, hx)
    numpy = h.numpy()
    with pytest.raises(ValueError, match=r"hx must be a tensor, got ndarray: pass torch.from_numpy of it"):
        module(xs, numpy if kind != "LSTM" else (numpy, numpy))
    for wrong, text in ((None, "None"), (xs.numpy(), "ndarray: pass torch.from_numpy of it")):
        with pytest.raises(ValueError, match=f"input must be a tensor, got {text}"):
            module(wrong)


@every_kind
def test_states_under_autocast_are_valid_inputs(kind):
    module, xs = OURS[kind](D, H), torch.randn(T, B, D)
    with torch.autocast("cpu", torch.bfloat16):
        ys, hx = module(xs)
        again, _ = module(xs, hx)
        state = flat(hx)[0]
        direct, _ = FUNCTIONS[kind](xs, state[0], *module._flat_weights) if kind != "LSTM" else (again, None)
    assert again.dtype == direct.dtype == ys.dtype


def test_states_replaced_by_resets_leave_no_nan_in_gradients_of_a_projection():
    module, nan = nn.LSTM(D, H, proj_size=2), float("nan")
    xs, resets = torch.randn(T, B, D), torch.zeros(T, B)
    resets[0] = 1
    states = torch.full((1, B, 2), nan), torch.full((1, B, H), nan)
    each, stepped = torch.zeros(1, B, 2), torch.full((1, T, B, 2), nan)
    each[:, 2], stepped[:, 0] = nan, 0
    for hx, given, reset_state in (
        (states, resets, None), (states, resets, (stepped, None)), (None, resets * (torch.arange(B) != 2), (each, None))
    ):  # fmt: skip
        module.zero_grad()
        module(xs, hx, resets=given, reset_state=reset_state)[0].sum().backward()
        assert not [name for name, p in module.named_parameters() if p.grad.isnan().any()]


@pytest.mark.parametrize("options", STACKS[:5], ids=str)
@every_kind_of_torch_nn
def test_empty_batch_has_the_shapes_of_torch_nn(kind, options):
    plain, ours = pair(kind, **options)
    xs = torch.zeros((0, T, D) if options.get("batch_first") else (T, 0, D), dtype=torch.float64)
    assert [x.shape for x in flat(ours(xs))] == [x.shape for x in flat(plain(xs))]


@every_kind
def test_meta_tensors_have_shapes(kind):
    results = OURS[kind](D, H, 2, device="meta")(torch.empty(T, B, D, device="meta"))
    assert [x.shape for x in flat(results)] == [x.shape for x in flat(OURS[kind](D, H, 2)(torch.zeros(T, B, D)))]


STACK = {"num_layers": 2, "bidirectional": True}
CHANGES = {  # of a parameter, with the message
    "float16": (torch.Tensor.half, "{} must have the dtype of the input, torch.float32, got torch.float16: convert"),
    "float64": (torch.Tensor.double, "{} must have the dtype of the input, torch.float32, got torch.float64: convert"),
    "complex": (lambda w: w + 0j, "{} must have the dtype of the input, torch.float32, got torch.complex64: convert"),
    "short": (lambda w: w[1:], r"{} must be \(.*\), got \(.*\)"),
    "deep": (lambda w: w[None], r"{} must be \(.*\), got \(1, .*\)"),
    "meta": (lambda w: w.to("meta"), "{} is on meta and the input is on cpu: move one of them"),
}
every_change = pytest.mark.parametrize("change", CHANGES)


def assert_each_change_raises(module, change, call):
    """Checks that a call of a module raises an error that names the parameter, whichever is changed."""
    wrong, message = CHANGES[change]
    names = [name for name, _ in module.named_parameters()]
    assert len(names) > 8
    for name in names:
        expected = message.format(name)
        if name == "weight_ih_l0" and change in ("float16", "float64"):
            expected += r"|input dtype \(torch.float32\) does not match weight dtype"  # of torch.nn
        if name == "weight_ih_l0" and change == "complex":
            expected += "|parameters must be floating point, got torch.complex64"
        with pytest.raises(ValueError, match=expected):
            call({name: wrong(module.get_parameter(name))})


@pytest.mark.parametrize("form", ["batch", "step", "unbatched", "packed"])
@every_change
@every_kind
def test_a_parameter_that_does_not_fit_raises(kind, change, form):
    options = {"proj_size": 2} if kind == "LSTM" else {}
    implementation = "torch" if form == "unbatched" else None
    module = OURS[kind](D, H, implementation=implementation, **STACK, **options)
    xs = torch.randn((*{"unbatched": (T,), "step": (1, B)}.get(form, (T, B)), D))
    if form == "packed":
        xs = torch.nn.utils.rnn.pack_padded_sequence(xs, [5, 3, 3, 1])
    assert_each_change_raises(module, change, lambda changed: torch.func.functional_call(module, changed, (xs,)))


@every_change
@pytest.mark.parametrize("table", [OURS, PLAIN], ids=["torch_bridge", "torch"])
@every_kind_of_torchrl
def test_a_parameter_that_does_not_fit_raises_in_trajectories(kind, table, change):
    module = table[kind](D, H, batch_first=True, **STACK)
    hidden = [torch.zeros(B, T, 4, H)] * (2 if kind == "LSTM" else 1)

    class Trajectories(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = module

        def forward(self):
            return nn.run_trajectories(self.rnn, torch.randn(B, T, D), torch.zeros(B, T), *hidden)

    def call(changed):
        return torch.func.functional_call(Trajectories(), {f"rnn.{name}": w for name, w in changed.items()}, ())

    assert_each_change_raises(module, change, call)


@pytest.mark.parametrize("implementation", [None, "torch"])
@pytest.mark.parametrize("steps", [1, T])
@every_kind
def test_arguments_on_another_device_raise(kind, steps, implementation):
    xs, resets, pair = torch.zeros(steps, B, D), torch.zeros(steps, B), kind == "LSTM"
    module, other = OURS[kind](D, H, implementation=implementation), torch.zeros(1, B, H, device="meta")
    weights = [torch.zeros_like(w) for w in module.all_weights[0]]
    run = functools.partial(FUNCTIONS[kind], implementation=implementation)
    of = "h of reset_state" if pair else "reset_state"
    for name, call in {
        "hx": lambda: module(xs, (other, other) if pair else other),
        "resets": lambda: module(xs, resets=resets.to("meta")),
        of: lambda: module(xs, resets=resets, reset_state=(other, None) if pair else other),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} is on meta and the input is on cpu: move one of them"):
            call()
    for name, call in {
        "w_ih": lambda: run(xs, None, weights[0].to("meta"), *weights[1:]),
        "h0": lambda: run(xs, (other[0], None) if pair else other[0], *weights),
        "resets": lambda: run(xs, None, *weights, resets=resets.to("meta")),
        of: lambda: run(xs, None, *weights, resets=resets, reset_state=(other[0], None) if pair else other[0]),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} is on meta and (xs|w_hh) is on cpu: move one of them"):
            call()


def test_scales_on_another_device_raise():
    arrays = torch.zeros(T, B, D), None, torch.zeros(3 * H, D), torch.zeros(3 * H, H)
    with pytest.raises(ValueError, match="scale_i is on meta and xs is on cpu: move one of them"):
        functional.norm_gru(*arrays, scale_i=torch.zeros(D, device="meta"))


@every_kind_of_torchrl
def test_trajectories_on_another_device_raise(kind):
    module, xs, is_init, given = trajectories(kind, False)
    with pytest.raises(ValueError, match="is_init is on meta and input is on cpu: move one of them"):
        nn.run_trajectories(module, xs, is_init.to("meta"), *given)
    with pytest.raises(ValueError, match="hidden is on meta and input is on cpu: move one of them"):
        nn.run_trajectories(module, xs, is_init, given[0].to("meta"), *given[1:])


@every_kind
def test_packed_arguments_on_another_device_raise(kind):
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(T, B, D), [5, 3, 3, 1])
    with pytest.raises(ValueError, match="resets is on meta and the input is on cpu: move one of them"):
        OURS[kind](D, H)(packed, resets=packed._replace(data=torch.zeros(12, device="meta")))
    for wrong, options in ((packed._replace(data=[0.0]), {}), (packed, {"resets": packed._replace(data=[0.0])})):
        with pytest.raises(ValueError, match=r"(input|resets) must be a tensor, got list"):
            OURS[kind](D, H)(wrong, **options)


@every_kind
def test_what_autocast_does_not_convert_raises(kind):
    module, xs, weights = OURS[kind](D, H), torch.randn(T, B, D), []
    weights = [w.detach() for w in module.all_weights[0]]
    h = torch.zeros(1, B, H)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.int32, torch.bool, torch.complex64):
            with pytest.raises(ValueError, match=f"input must be floating point, got {dtype}"):
                module(xs.to(dtype))
            with pytest.raises(ValueError, match=f"hx must be torch.float32, like the input, or float32, got {dtype}"):
                module(xs, (h, h.to(dtype)) if kind == "LSTM" else h.to(dtype))
            with pytest.raises(ValueError, match=f"w_hh must have the dtype of xs, torch.float32, got {dtype}"):
                FUNCTIONS[kind](xs, None, weights[0], weights[1].to(dtype), *weights[2:])
        with pytest.raises(ValueError, match=r"w_hh must have the dtype of xs, torch.float32, got torch.float64"):
            FUNCTIONS[kind](xs, None, weights[0], weights[1].double(), *weights[2:])
        with pytest.raises(ValueError, match=r"weight_ih_l0 must have the dtype of the input, torch.float64"):
            module(xs.double())
        with pytest.raises(ValueError, match=r"weight_ih_l0 must have the dtype of the input, torch.float32"):
            OURS[kind](D, H).double()(xs)


@every_kind
def test_autocast_takes_parameters_of_several_dtypes(kind):
    module, xs = OURS[kind](D, H, **STACK), torch.randn(T, B, D)
    mixed = {name: p.half() if name.endswith("l0") else p.bfloat16() for name, p in module.named_parameters()}
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.func.functional_call(module, mixed, (xs,))[0]
        torch.testing.assert_close(got, module(xs)[0], rtol=0, atol=0.05)


@every_kind
def test_states_in_float32_beside_half_inputs_pass_through_every_layer(kind):
    module, xs = OURS[kind](D, H, **STACK).bfloat16(), torch.randn(T, B, D).bfloat16()
    h = torch.zeros(4, B, H)
    got, last = module(xs, (h, h) if kind == "LSTM" else h)
    assert {x.dtype for x in flat((got, last))} == {torch.float32}
    want = module.float()(xs.float(), (h, h) if kind == "LSTM" else h)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=0.05)


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.*:FutureWarning")
@pytest.mark.parametrize("old", [False, True], ids=["parametrization", "hook"])
@every_kind
def test_weight_norm_of_any_weight_changes_no_result(kind, old):
    normalize = torch.nn.utils.weight_norm if old else torch.nn.utils.parametrizations.weight_norm
    module, xs = OURS[kind](D, H, **STACK), torch.randn(T, B, D)
    want, names = module(xs)[0], [name for name, _ in module.named_parameters() if name.startswith("weight")]
    assert len(names) == 8
    for name in names:
        normalize(module, name)
    torch.testing.assert_close(module(xs)[0], want)
    module(xs)[0].sum().backward()
    assert module.double()(xs.double())[0].dtype == torch.float64


@every_kind_of_torchrl
def test_trajectories_run_modules_of_torch_nn_under_autocast(kind):
    module, ours = (table[kind](D, H, batch_first=True, **STACK) for table in (PLAIN, OURS))
    ours.load_state_dict(module.state_dict())
    xs, is_init = torch.randn(B, T, D), torch.rand(B, T) < 0.3
    hidden = [torch.randn(B, T, 4, H)] * (2 if kind == "LSTM" else 1)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = (nn.run_trajectories(rnn, xs, is_init, *hidden) for rnn in (module, ours))
    torch.testing.assert_close(got, want)


@every_kind
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning")
def test_complex_parameters_raise(kind):
    module = OURS[kind](D, H).to(torch.complex64)
    with pytest.raises(ValueError, match=r"parameters must be floating point, got torch.complex64: convert them"):
        module(torch.zeros(T, B, D, dtype=torch.complex64))


@every_kind
def test_functional_call_takes_parameters_of_another_dtype(kind):
    module, xs = OURS[kind](D, H), torch.randn(T, B, D)
    narrow = {name: p.bfloat16() for name, p in module.named_parameters()}
    assert torch.func.functional_call(module, narrow, (xs.bfloat16(),))[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"dtype \(torch.float32\) does not match weight dtype \(torch.bfloat16\)"):
        torch.func.functional_call(module, narrow, (xs,))
    assert module(xs)[0].dtype == torch.float32


@pytest.mark.quick("kind")
@every_kind
def test_bad_options_raise(kind):
    with pytest.raises(ValueError, match='precision must be "tf32", "tf32x3" or None'):
        OURS[kind](D, H, precision="high")
    with pytest.raises(ValueError, match='implementation must be "triton", "torch" or None'):
        OURS[kind](D, H, implementation="loop")


@every_kind
def test_errors_for_wrong_arguments_name_the_class(kind):
    rnn = OURS[kind](D, H)
    with pytest.raises(TypeError, match=rf"^{type(rnn).__name__}\.forward\(\) got an unexpected keyword argument 'k'"):
        rnn(torch.ones(T, B, D), k=0)


@pytest.mark.parametrize(
    ("args", "options"),
    [((D, H, 2, "relu", False), {}), ((D, H), {"nonlinearity": "tanh"}), ((D, H, 1, "cube"), {}),
     ((D, H), {"nonlinearity": "TANH"}), ((D, H), {"nonlinearity": ["tanh"]}), ((D, H), {"proj_size": 2}),
     ((D, 0), {})],
    ids=str,
)  # fmt: skip
def test_constructor_of_an_rnn_is_that_of_torch_nn(args, options):
    found = []
    for make in (torch.nn.RNN, nn.RNN):
        torch.manual_seed(7)
        try:
            module = make(*args, **options)
            names = ("mode", "nonlinearity", "num_layers", "bias", "proj_size")
            found.append([*(getattr(module, name) for name in names), str(module), *module.parameters()])
        except ValueError as error:
            found.append([str(error)])
    assert len(found[0]) == len(found[1])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_constructor_of_an_mgu_is_that_of_a_gru_with_two_gates():
    torch.manual_seed(0)
    options = {"num_layers": 2, "bias": False, "bidirectional": True, "dtype": torch.float64}
    for module in (nn.MGU(9, 25, **options), nn.MGU(9, 25, 2, False, False, 0.0, True, dtype=torch.float64)):
        for name, w in nn.GRU(9, 25, **options).named_parameters():
            got = module.get_parameter(name)
            assert got.shape == (50, *w.shape[1:]) and got.dtype == torch.float64 and got.is_leaf
            assert 0.19 < got.abs().max() <= 0.2 and abs(got.mean()) < 0.02
        assert module.mode == "MGU" and len(module.state_dict()) == len([*module.parameters()]) == 8
    with pytest.raises(ValueError, match="proj_size argument is only supported for LSTM, not MGU"):
        nn.MGU(D, H, proj_size=2)


@every_kind_of_torch_nn
def test_inputs_of_another_dtype_raise(kind):
    said = set()
    for module in pair(kind):
        with pytest.raises(ValueError) as error:
            module(torch.zeros(T, B, D))
        said.add(str(error.value))
    (message,) = said  # PyTorch's own message, which was different in 2.10
    now = "RNN input dtype (torch.float32) does not match weight dtype"
    assert now in message or message == "input must have the type torch.float64, got type torch.float32"


BAD_RESETS = [
    (
        {"resets": torch.zeros(B, T)},
        r"resets must be \(5, 4\), the time and batch axes of the input, got \(4, 5\): pass resets.mT",
    ),
    ({"new": torch.zeros(1, H)}, "reset_state is given but resets is None"),
    (
        {"resets": torch.zeros(T, B), "new": torch.zeros(B, H)},
        r"^reset_state must be \(1, 6\), \(1, 4, 6\) or \(1, 5, 4, 6\), got \(4, 6\)",
    ),
    ({"resets": [0] * T}, "resets must be a tensor, got list: pass torch.as_tensor of it"),
    ({"resets": torch.zeros(T + 1, B)}, r"got \(6, 4\): pass an entry for every step of every sequence"),
    (
        {"resets": torch.zeros(T, B), "new": (torch.zeros(1, H),)},
        r"^reset_state must be a tensor, got tuple: pass one tensor",
    ),
    ({"resets": torch.zeros(T, B), "new": torch.zeros(1, H).int()}, "must be floating point, got torch.int32"),
]


@pytest.mark.parametrize(("given", "message"), BAD_RESETS, ids=range(len(BAD_RESETS)))
@every_kind
def test_bad_resets_raise(kind, given, message):
    given = dict(given)
    if "new" in given:
        new = given.pop("new")
        given["reset_state"] = new if kind != "LSTM" else (new, None)
    message = message.replace("^reset_state", "^h of reset_state") if kind == "LSTM" else message
    with pytest.raises(ValueError, match=message):
        OURS[kind](D, H)(torch.zeros(T, B, D), **given)


@every_kind
def test_construction_draws_what_reset_parameters_draws(kind):
    module = OURS[kind](D, H, 2, bidirectional=True)
    for seed in range(2):
        torch.manual_seed(seed)
        made = OURS[kind](D, H, 2, bidirectional=True)
        after = torch.rand(3)
        torch.manual_seed(seed)
        module.reset_parameters()
        assert torch.equal(torch.rand(3), after)
        assert all(torch.equal(x, y) for x, y in zip(made.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("form", ["batch", "unbatched", "packed"])
@every_stack
def test_gradients_of_modules_are_contiguous(kind, options, form):
    _, ours = pair(kind, **options)
    shape = (T,) if form == "unbatched" else (B, T) if ours.batch_first else (T, B)
    xs = torch.randn(*shape, D, dtype=torch.float64).requires_grad_()
    hx = states(ours, *(() if form == "unbatched" else (B,)))
    inputs = xs
    if form == "packed":
        inputs = torch.nn.utils.rnn.pack_padded_sequence(xs, [5, 3, 3, 1], ours.batch_first)
    outputs = flat(ours(inputs, hx))
    leaves = [
        *flat(hx),
        *ours.parameters(),
        *([xs] if form != "packed" else []),
    ]  # PyTorch's gradient of packing is not
    gradients = torch.autograd.grad(sum(x.square().sum() for x in outputs if x.is_floating_point()), leaves)
    assert not [x.shape for x in gradients if not x.is_contiguous()]


@every_kind
def test_packed_lengths_beyond_the_padded_length_raise(kind):
    lengths = [T + 2, T, 1]
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(T, 3, D), lengths)  # PyTorch does not check them
    with pytest.raises(ValueError, match="lengths of the input add up to 13 steps, and its data has 11: no length may"):
        OURS[kind](D, H)(packed)
    good = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(T, 3, D), [T, T, 1])
    with pytest.raises(ValueError, match="lengths of resets add up to 11 steps, and its data has 10"):
        OURS[kind](D, H)(good, resets=good._replace(data=torch.zeros(10)))


def test_bad_resets_of_one_sequence_raise():
    module, xs = nn.GRU(D, H), torch.zeros(T, D)
    with pytest.raises(ValueError, match=r"resets must be \(5,\), .*, got \(5, 4\)"):
        module(xs, resets=torch.zeros(T, B))
    with pytest.raises(ValueError, match=r"must be \(1, 6\) or \(1, 5, 6\), got \(1, 3\)"):
        module(xs, resets=torch.zeros(T), reset_state=torch.zeros(1, 3))


def test_packed_inputs_need_packed_resets():
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(T, B, D), [5, 3, 3, 1])
    other = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(T, B), [5, 3, 2, 1])
    for resets in (torch.zeros(T, B), other):
        with pytest.raises(ValueError, match="resets of a PackedSequence must be a PackedSequence of the same lengths"):
            nn.GRU(D, H)(packed, resets=resets)


def test_resets_packed_in_another_order_raise():
    """The sort of `enforce_sorted=False` is unstable, and lengths in another order may have the same batch sizes."""
    pack = torch.nn.utils.rnn.pack_padded_sequence
    for lengths, others in (([3] * 17, [3] * 17), ([2, 4], [4, 2])):
        xs, resets = torch.zeros(4, len(lengths), D), torch.zeros(4, len(lengths))
        packed = pack(xs, lengths, enforce_sorted=lengths[0] == 3)
        with pytest.raises(ValueError, match=r"in the same order: pass input._replace\(data=...\)"):
            nn.GRU(D, H)(packed, resets=pack(resets, others, enforce_sorted=False))
        again = pack(resets, lengths, enforce_sorted=lengths[0] == 3)  # the same order in other tensors
        assert nn.GRU(D, H)(packed, resets=again)[0].data.shape == (sum(lengths), H)


@every_kind
def test_resets_that_require_a_gradient_get_none(kind):
    resets, xs = torch.zeros(T, B, requires_grad=True), torch.randn(T, B, D, requires_grad=True)
    OURS[kind](D, H)(xs, resets=resets)[0].sum().backward()
    assert resets.grad is None and xs.grad is not None


def test_packed_inputs_reject_a_reset_state_per_step():
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(T, B, D), [5, 3, 3, 1])
    resets = packed._replace(data=torch.zeros(12))
    with pytest.raises(NotImplementedError, match="use pad_packed_sequence"):
        nn.GRU(D, H)(packed, resets=resets, reset_state=torch.zeros(1, T, B, H))


def trajectories(kind, bidirectional):
    module = OURS[kind](D, H, 2, batch_first=True, bidirectional=bidirectional)
    count = 4 if bidirectional else 2
    is_init = torch.rand(B, 7, 1) < 0.3
    is_init[0, 1:] = False
    xs = torch.randn(B, 7, D).requires_grad_()
    given = [torch.randn(B, 7, count, H).requires_grad_() for _ in range(1 if kind == "GRU" else 2)]
    return module, xs, is_init, given


@pytest.mark.quick("kind")
@pytest.mark.parametrize("bidirectional", [False, True])
@every_kind_of_torchrl
def test_trajectories_match_separate_episodes(kind, bidirectional):
    module, xs, is_init, given = trajectories(kind, bidirectional)
    ys, *ends = nn.run_trajectories(module, xs, is_init, *given)
    for b in range(B):
        firsts = [0, *(t for t in range(1, 7) if is_init[b, t, 0])]
        for first, end in zip(firsts, [*firsts[1:], 7], strict=True):
            start = [x[b, first] for x in given]
            want, last = module(xs[b, first:end], start[0] if kind == "GRU" else tuple(start))
            torch.testing.assert_close(ys[b, first:end], want)
            for x, y in zip(ends, flat(last), strict=True):
                torch.testing.assert_close(x[b, end - 1], y)
                assert not x[b, first : end - 1].any()


@pytest.mark.parametrize("bidirectional", [False, True])
@every_kind_of_torchrl
def test_trajectories_match_torchrl(kind, bidirectional):
    from tensordict import TensorDict
    from torchrl import modules

    module, xs, is_init, given = trajectories(kind, bidirectional)
    keys = ["hidden"] if kind == "GRU" else ["hidden", "cell"]
    theirs = {"GRU": modules.GRUModule, "LSTM": modules.LSTMModule}[kind](
        **{kind.lower(): PLAIN[kind](D, H, 2, batch_first=True, bidirectional=bidirectional)},
        in_keys=["xs", *keys], out_keys=["ys", *(f"next_{key}" for key in keys)], recurrent_backend="pad",
    )  # fmt: skip
    getattr(theirs, kind.lower()).load_state_dict(module.state_dict())
    data = TensorDict({"xs": xs, "is_init": is_init, **dict(zip(keys, given, strict=True))}, [B, 7])
    with modules.set_recurrent_mode(True):
        out = theirs(data)
    want = [out["ys"], *(out[f"next_{key}"] for key in keys)]
    got = nn.run_trajectories(module, xs, is_init, *given)
    torch.testing.assert_close(list(got), want)
    leaves = [xs, *given]
    torch.testing.assert_close(with_gradients(got, leaves), with_gradients(want, leaves))


def test_bad_trajectories_raise():
    module, xs, is_init, given = trajectories("GRU", False)
    with pytest.raises(ValueError, match="a GRU takes hidden, got 2 states"):
        nn.run_trajectories(module, xs, is_init, *given, *given)
    for wrong in (None, module.weight_ih_l0, nn.RNN(D, H)):
        with pytest.raises(ValueError, match=r"rnn must be a GRU or an LSTM of torch_bridge.nn or torch.nn, got"):
            nn.run_trajectories(wrong, xs, is_init, *given)
    for index, name in enumerate(("input", "is_init", "hidden")):
        arguments = [xs, is_init, *given]
        arguments[index] = [0.0]
        with pytest.raises(ValueError, match=f"{name} must be a tensor, got list"):
            nn.run_trajectories(module, *arguments)
    with pytest.raises(ValueError, match=r"is_init \[B, T\], got \(4, 7, 3\) and \(4, 6\)"):
        nn.run_trajectories(module, xs, is_init[:, 1:], *given)
    with pytest.raises(ValueError, match=r"hidden must be torch.float32, like input, or float32, got torch.float64"):
        nn.run_trajectories(module, xs, is_init, given[0].double())
    with pytest.raises(
        ValueError, match=r"hidden states must be \[B, T, layers, H\] = \(4, 7, 2, 6\), got \(4, 7, 1, 6\)"
    ):
        nn.run_trajectories(module, xs, is_init, given[0][:, :, :1])
    with pytest.raises(RuntimeError, match="Expected 3, got 2"):
        nn.run_trajectories(module, xs[..., :2], is_init, *given)
    with pytest.raises(ValueError, match="needs at least one step"):
        nn.run_trajectories(module, xs[:, :0], is_init[:, :0], given[0][:, :0])
    with pytest.raises(ValueError, match=r"rnn must be a GRU or an LSTM of torch_bridge.nn or torch.nn, got RNN$"):
        nn.run_trajectories(torch.nn.RNN(D, H), xs, is_init, *given)


@pytest.mark.quick("norm")
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_a_normed_gru_runs_its_function_in_every_layer_and_direction(norm):
    options = {"epsilon": 0.3, "update_bias": 0.5}
    rnn = nn.NormGRU(D, H, 2, bidirectional=True, norm=norm, dtype=torch.float64, **options)
    assert str(rnn) == f"NormGRU({D}, {H}, num_layers=2, bidirectional=True, norm={norm})"
    names = [name for name, _ in rnn.named_parameters() if name.startswith(("scale", "shift"))]
    assert {name: rnn.get_parameter(name).shape for name in names} == {
        f"{kind}_{side}_l{layer}{end}": (H if side == "h" else D if layer == 0 else 2 * H,)
        for kind, side, layer, end in itertools.product(
            ("scale", "shift") if norm == "layer" else ("scale",), "ih", (0, 1), ("", "_reverse")
        )
    }
    assert all((rnn.get_parameter(name) == (1 if name.startswith("scale") else 0)).all() for name in names)
    torch.manual_seed(0)
    for x in rnn.parameters():
        torch.nn.init.normal_(x)
    xs, lengths = torch.randn(T, B, D, dtype=torch.float64), [5, 3, 3, 1]
    packed, last = rnn(torch.nn.utils.rnn.pack_padded_sequence(xs, lengths))
    for b, (length, got) in enumerate(zip(lengths, torch.nn.utils.rnn.unpack_sequence(packed), strict=True)):
        ys, ends = xs[:length, b], []
        for layer in range(2):
            outputs = []
            for end in ("", "_reverse"):
                weights = [
                    getattr(rnn, f"{name}_l{layer}{end}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
                ]
                of_norm = {name: getattr(rnn, f"{name}_l{layer}{end}") for name in {name[:7] for name in names}}
                out, h_n = functional.norm_gru(ys, None, *weights, **of_norm, norm=norm, reverse=end != "", **options)
                outputs.append(out)
                ends.append(h_n)
            ys = torch.cat(outputs, -1)
        assert_same(got, ys)
        assert_same(last[:, b], torch.stack(ends))


def test_a_normed_gru_says_what_it_cannot_do():
    with pytest.raises(ValueError, match="num_blocks must be 1, because the norm of a NormGRU sees all units, got 2"):
        nn.NormGRU(D, H, num_blocks=2)
    with pytest.raises(ValueError, match="proj_size argument is only supported for LSTM, not NormGRU"):
        nn.NormGRU(D, H, proj_size=2)
    for options, message in (
        ({"epsilon": "a"}, "epsilon must be a number, got str"),
        ({"epsilon": -1.0}, "epsilon must be finite and not negative, got -1.0"),
        ({"update_bias": None}, "update_bias must be a number, got NoneType"),
        ({"update_bias": float("nan")}, "update_bias must be finite, got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            nn.NormGRU(D, H, **options)
    for make in (
        functools.partial(nn.NormGRU, D, H),
        lambda norm: functional.norm_gru(*[torch.zeros(1)] * 4, norm=norm),
    ):
        for norm in ("batch", ["rms"]):
            with pytest.raises(ValueError, match=r'norm must be "rms" or "layer", got '):
                make(norm=norm)
    arrays = torch.zeros(T, B, D), None, torch.zeros(3 * H, D), torch.zeros(3 * H, H)
    with pytest.raises(ValueError, match=r'shift_i must be None with norm="rms", which has no shifts'):
        functional.norm_gru(*arrays, shift_i=torch.zeros(D))
    with pytest.raises(ValueError, match=r"scale_h must be \(6,\), got \(3,\)"):
        functional.norm_gru(*arrays, scale_h=torch.zeros(D))
    with pytest.raises(ValueError, match=r"scale_h must have the dtype of xs, torch.float32, got torch.float64"):
        functional.norm_gru(*arrays, scale_h=torch.zeros(H, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"w_hh must be \(18, 6\), not blocks \(2, 9, 3\): the norm sees all units"):
        functional.norm_gru(*arrays[:3], torch.zeros(2, 9, 3))
