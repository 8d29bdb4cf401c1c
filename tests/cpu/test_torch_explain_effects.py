"""`torch_bridge.explain` calls a function and leaves tensors, modules and random number generators as they were."""

import functools

import pytest
from torch_calls import torch

import torch_bridge
from torch_bridge import nn

pytestmark = pytest.mark.torch

T, B, D, H = 5, 2, 3, 4


@pytest.fixture
def rnn():
    torch.manual_seed(0)
    return nn.GRU(D, H)


@pytest.fixture
def xs():
    return torch.linspace(-1, 1, T * B * D).view(T, B, D)


def has_values(x):
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def snapshot(module):
    """Returns names, values and gradients of all parameters and buffers."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    assert tensors and all(has_values(x) for _, x in tensors)
    return [(name, x.detach().clone(), None if x.grad is None else x.grad.clone()) for name, x in tensors]


def assert_unchanged(module, before):
    after = snapshot(module)
    assert [name for name, _, _ in after] == [name for name, _, _ in before]
    for (_, x, dx), (_, y, dy) in zip(after, before, strict=True):
        assert torch.equal(x, y) and (dx is None) == (dy is None) and (dx is None or torch.equal(dx, dy))


# Gradients


CLEARS = {
    "none": lambda rnn: torch.optim.SGD(rnn.parameters(), 0.1).zero_grad(),
    "zeros": lambda rnn: rnn.zero_grad(set_to_none=False),
    "scale": lambda rnn: rnn.weight_hh_l0.grad.mul_(0.5).add_(1),
    "clip": lambda rnn: torch.nn.utils.clip_grad_norm_(rnn.parameters(), 1e-3),
}


@pytest.mark.parametrize("change", CLEARS)
def test_gradients_that_the_function_clears_changes_or_makes_stay(rnn, xs, change):
    """One parameter has no gradient before. The function computes all of them, and `explain` adds no second pass."""
    for i, x in enumerate([*rnn.parameters()][1:]):
        x.grad = torch.full_like(x, i + 1)
    before, objects = snapshot(rnn), [x.grad for x in rnn.parameters()]

    def step(xs):
        CLEARS[change](rnn)
        ys, _ = rnn(xs)
        ys.sum().backward()
        return ys, [x.grad.norm() for x in rnn.parameters()]

    explanation = torch_bridge.explain(step, xs, device="h100")
    assert [(one.direction, one.times) for one in explanation.launches] == [("forward", 1), ("backward", 1)]
    assert_unchanged(rnn, before)
    assert all(x.grad is y for x, y in zip(rnn.parameters(), objects, strict=True))


def total(rnn, xs):
    return rnn(xs)[0].sum()


BACKWARD = {
    "by explain": lambda rnn, xs: total(rnn, xs),
    "method": lambda rnn, xs: total(rnn, xs).backward(),
    "function": lambda rnn, xs: torch.autograd.backward(total(rnn, xs)),
    "functions": lambda rnn, xs: torch.autograd.backward([total(rnn, xs)]),
    "grad": lambda rnn, xs: torch.autograd.grad(total(rnn, xs), [xs, *rnn.parameters()]),
}


@pytest.mark.parametrize("kind", BACKWARD)
def test_a_graph_of_the_caller_can_still_be_differentiated(rnn, kind):
    """The arguments are results of the caller, whose graph a backward pass would free, and whose leaves get no grad."""
    w = torch.arange(1.0, D + 1, requires_grad=True)
    xs = (torch.ones(T, B, D) * w).exp()
    xs.retain_grad()
    explanation = torch_bridge.explain(functools.partial(BACKWARD[kind], rnn), xs, device="h100")
    assert [one.direction for one in explanation.launches] == ["forward", "backward"]
    assert w.grad is None and xs.grad is None
    xs.sum().backward()
    torch.testing.assert_close(w.grad, T * B * w.detach().exp())
    assert has_values(w.grad) and has_values(xs.grad)


# Values


CHANGES = {
    "add": lambda x: x.add_(1),
    "add itself": lambda x: x.add_(x),
    "copy": lambda x: x.copy_(x * 2),
    "item": lambda x: x.__setitem__(0, 7),
    "view": lambda x: x.view(-1)[:2].mul_(3),
    "out": lambda x: torch.add(x, 1, out=x),
    "list": lambda x: torch._foreach_mul_([x, x], 3),
    "data": lambda x: x.data.mul_(3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
@pytest.mark.parametrize("change", CHANGES)
def test_values_stay_where_the_function_writes_in_place(change, dtype):
    x = torch.arange(1, 7).view(2, 3).to(dtype)
    before, version = x.clone(), x._version
    twin = x.clone()
    CHANGES[change](twin)
    assert not torch.equal(twin, before)  # a call does change it
    torch_bridge.explain(lambda x: CHANGES[change](x), x)
    torch_bridge.explain(lambda: CHANGES[change](x))
    assert torch.equal(x, before) and x._version == version and has_values(x)


def test_buffers_of_modules_stay(xs):
    norm = torch.nn.BatchNorm1d(D)
    norm(torch.randn(7, D))
    model = torch.nn.ModuleDict({"norm": norm, "rnn": nn.GRU(D, H)})
    before = snapshot(model)
    assert norm.num_batches_tracked == 1

    def run(xs):
        return model["rnn"](norm(xs.flatten(0, 1)).view(xs.shape))[0]

    for arguments in ((run, xs), (lambda _, xs: run(xs), model, xs)):
        assert torch_bridge.explain(*arguments, device="h100").calls[0].name == "gru"
        assert_unchanged(model, before)


def test_a_state_that_the_function_writes_to_does_not_join_its_graph(rnn, xs):
    state, states = torch.zeros(1, B, H), torch.zeros(3, 1, B, H)

    def step(xs):
        ys, last = rnn(xs)
        state.copy_(last)
        states[1] = last
        return ys

    torch_bridge.explain(step, xs)
    for x in (state, states):
        assert not x.requires_grad and x.grad_fn is None and x._version == 0 and not x.any() and has_values(x)
    step(xs)
    assert state.requires_grad and states.requires_grad and state.any()  # as a call makes them


def test_requires_grad_stays(rnn, xs):
    def step(xs):
        rnn.requires_grad_(False)
        xs.requires_grad = True
        return rnn(xs)[0]

    explanation = torch_bridge.explain(step, xs, device="h100")
    assert [one.direction for one in explanation.launches] == ["forward", "backward"]
    assert not xs.requires_grad and all(x.requires_grad for x in rnn.parameters())


def test_lengths_changed_in_place_have_their_new_values_in_the_explanation_only(rnn):
    lengths, xs = torch.tensor([3, 9]), torch.ones(10, B, D)
    for clamp in (
        lambda lengths: (lengths.clamp_(max=4), int(lengths.max()))[1],
        lambda lengths: (lengths[1:].clamp_(max=4), int(lengths.max()))[1],
        lambda lengths: lengths.clone().clamp_(max=4).tolist()[1],
    ):
        explanation = torch_bridge.explain(lambda lengths, clamp=clamp: rnn(xs[: clamp(lengths)]), lengths)
        assert explanation.calls[0].arguments == "xs float32[4,2,3], 4 units"
        assert lengths.tolist() == [3, 9]

    def write_what_has_no_value(lengths):
        lengths.copy_(xs.sum((1, 2))[:2])
        return rnn(xs[: int(lengths.max())])

    with pytest.raises(Exception) as raised:
        torch_bridge.explain(write_what_has_no_value, lengths)
    assert any("code that reads values, such as item()" in note for note in raised.value.__notes__)
    assert lengths.tolist() == [3, 9]


# Modules


class Stateful(torch.nn.Module):
    """Keeps its state between calls, as an attribute and as a buffer, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.rnn, self.h, self.count = nn.GRU(D, H), None, 0
        self.register_buffer("last", torch.zeros(B, H))

    def forward(self, xs):
        ys, self.h = self.rnn(xs, self.h)
        self.last, self.other, self.count = ys[-1], (ys[0], 3), self.count + 1
        return ys


@pytest.mark.parametrize("how", ["module", "argument", "method"])
def test_attributes_of_modules_among_the_arguments_stay(xs, how):
    module = Stateful()
    before, last = snapshot(module), module.last
    arguments = {
        "module": (module, xs),
        "argument": (lambda modules, xs: modules["agent"](xs), {"agent": module}, xs),
        "method": (module.forward, xs),
    }[how]
    assert torch_bridge.explain(*arguments, device="h100").calls[0].name == "gru"
    assert module.h is None and module.last is last and module.count == 0 and not hasattr(module, "other")
    assert_unchanged(module, before)
    module(xs)
    assert has_values(module.h) and has_values(module.last)


def test_modules_that_the_function_calls_keep_no_tensor_without_values(xs):
    module = Stateful()
    before = snapshot(module)
    torch_bridge.explain(lambda xs: module(xs), xs)
    assert module.h is None and not hasattr(module, "other")
    assert_unchanged(module, before)
    module(xs)
    state = module.h
    torch_bridge.explain(lambda xs: module(xs), xs)
    assert module.h is state and has_values(module.last) and len(module.other) == 2 and has_values(module.other[0])


def test_parameters_replaced_for_a_call_are_not_those_that_stay(rnn, xs):
    params = [{name: torch.zeros_like(x) for name, x in rnn.named_parameters()} for _ in range(2)]
    stacked = {name: torch.stack([one[name] for one in params]) for name in params[0]}
    before, objects = snapshot(rnn), [*rnn.parameters()]

    def run(params):
        return torch.func.functional_call(rnn, params, (xs,))[0]

    assert torch_bridge.explain(torch.vmap(run), stacked, device="h100").launches[0].problem.models == 2
    gradient = torch.func.grad(lambda params: run(params).sum())
    launches = torch_bridge.explain(gradient, params[0], device="h100").launches
    assert [one.direction for one in launches] == ["forward", "backward"]
    assert all(x is y for x, y in zip(rnn.parameters(), objects, strict=True))
    assert_unchanged(rnn, before)


def test_modules_are_as_before_when_the_function_raises(xs):
    module = Stateful()
    before = snapshot(module)

    def fail(module, xs):
        module(xs).sum().backward()
        raise KeyError("after the backward pass")

    with pytest.raises(KeyError, match="after the backward pass"):
        torch_bridge.explain(fail, module, xs)
    assert module.h is None and module.count == 0
    assert_unchanged(module, before)


# Random numbers


DRAWS = {
    "dropout": lambda lengths: torch.nn.functional.dropout(torch.ones(3)),
    "like integers": lambda lengths: torch.randint_like(lengths, 5),
    "integers in place": lambda lengths: lengths.random_(5),
    "normal": lambda lengths: torch.randn(3),
    "seed": lambda lengths: torch.manual_seed(3),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_random_number_generators_keep_their_state(kind):
    lengths, before = torch.tensor([3, 9]), torch.get_rng_state()
    DRAWS[kind](lengths.clone())
    assert not torch.equal(torch.get_rng_state(), before)  # a call does advance it
    torch.set_rng_state(before)
    torch_bridge.explain(DRAWS[kind], lengths)
    assert torch.equal(torch.get_rng_state(), before)
    assert lengths.tolist() == [3, 9]


# Functions that `explain` rejects, because it could not undo their changes


def cannot_undo():
    lazy, leaf = torch.nn.LazyLinear(H), torch.ones(B, H, requires_grad=True)
    result, view = leaf.exp(), torch.zeros(2, B, H)[0]
    plain = torch.ones(B, H)
    return {
        "data": (plain, lambda: setattr(plain, "data", plain * 2), "sets `data`"),
        "lazy": (leaf, lambda: lazy(torch.ones(2, 3)), "initializes a lazy module"),
        "result": (result, lambda: result.mul_(2), "changes a view or a result"),
        "slice of a result": (result, lambda: result[0].mul_(2), "changes a view or a result"),
        "view": (view, lambda: view.copy_(leaf * 2), "changes a view or a result"),
        "detached": (result, lambda: result.detach_(), "detaches a result"),
    }


@pytest.mark.parametrize("kind", cannot_undo())
def test_changes_that_cannot_be_undone_raise_before_they_are_made(kind):
    x, change, message = cannot_undo()[kind]
    before, grad_fn, version, storage = x.detach().clone(), x.grad_fn, x._version, x.data_ptr()
    with pytest.raises(NotImplementedError, match=f"explain cannot call a function that .*{message}.* undo"):
        torch_bridge.explain(change)
    assert torch.equal(x, before) and x.grad_fn is grad_fn and (x._version, x.data_ptr()) == (version, storage)
    change()  # works by itself


def test_results_of_the_caller_may_be_changed_without_gradients():
    """`exp` saves its result, and its gradient needs that at its first version."""
    leaf = torch.ones(3, requires_grad=True)
    result = leaf.exp()

    @torch.no_grad()
    def double():
        result.mul_(2)

    torch_bridge.explain(double)
    result.sum().backward()
    assert torch.equal(leaf.grad, leaf.detach().exp())
