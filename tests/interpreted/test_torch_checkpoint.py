"""`torch.utils.checkpoint` around modules and operators of `torch_bridge`: gradients are those without it."""

import functools

import pytest
from torch_calls import torch

import torch_bridge
from torch_bridge import nn

T, B, D, H = 4, 3, 5, 6
MODULES = {
    "GRU": nn.GRU,
    "LSTM": nn.LSTM,
    "LSTM-projected": functools.partial(nn.LSTM, proj_size=4),
    "MGU": nn.MGU,
    "RNN": nn.RNN,
    "RNN-relu": functools.partial(nn.RNN, nonlinearity="relu"),
    "NormGRU": nn.NormGRU,
    "NormGRU-layer": functools.partial(nn.NormGRU, norm="layer"),
    "GRU-blocks": functools.partial(nn.GRU, num_blocks=2),
    "GRU-stack": functools.partial(nn.GRU, num_layers=2, bidirectional=True, dropout=0.5),
}
every_module = pytest.mark.parametrize("name", MODULES)
every_implementation = pytest.mark.parametrize(
    "implementation", [None, "torch", pytest.param("triton", marks=pytest.mark.interpret)]
)
checkpoint = torch.utils.checkpoint.checkpoint
without_reentry = functools.partial(checkpoint, use_reentrant=False)


def gradients(rnn, wrap, steps=T):
    """Returns the outputs and every gradient of a module, which `wrap(module, *arguments)` calls."""
    torch.manual_seed(1)
    xs, resets = torch.randn(steps, B, D, requires_grad=True), torch.zeros(steps, B)
    resets[-1, 1] = 1
    layers = rnn.num_layers * (2 if rnn.bidirectional else 1)
    h0, c0 = (torch.randn(layers, B, width, requires_grad=True) for width in (rnn.proj_size or H, H))
    state = (h0, c0) if rnn.mode == "LSTM" else h0
    call = functools.partial(rnn, hx=state, resets=resets)
    ys, states = wrap(call, xs)
    outputs = [ys, *(states if isinstance(states, tuple) else (states,))]
    total = sum((x * torch.arange(1, x.numel() + 1).view(x.shape)).sum() for x in outputs)
    leaves = [xs, h0, *([c0] if rnn.mode == "LSTM" else []), *rnn.parameters()]
    found = torch.autograd.grad(total, leaves)
    assert all(x.abs().max() > 0 for x in found)
    return [*outputs, *found]


@pytest.mark.quick
@every_implementation
@every_module
def test_gradients_with_a_checkpoint_are_those_without(name, implementation):
    torch.manual_seed(0)
    rnn = MODULES[name](D, H, implementation=implementation)
    plain = gradients(rnn, lambda call, *arguments: call(*arguments))
    for x, y in zip(gradients(rnn, without_reentry), plain, strict=True):
        assert torch.equal(x, y)


@every_module
def test_gradients_of_a_single_step_with_a_checkpoint_are_those_without(name):
    rnn = MODULES[name](D, H)
    plain = gradients(rnn, lambda call, *arguments: call(*arguments), steps=1)
    for x, y in zip(gradients(rnn, without_reentry, steps=1), plain, strict=True):
        assert torch.equal(x, y)


@every_implementation
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_checkpoints_of_norms_after_recurrences_nest(norm, implementation):
    rnn, norm = nn.GRU(D, H, implementation=implementation), norm(H, implementation=implementation)
    model = torch.nn.ModuleList([rnn, norm])

    def run(wrap):
        xs = torch.linspace(-1, 1, T * B * D).view(T, B, D).requires_grad_()
        ys = wrap(lambda xs: wrap(norm, wrap(rnn, xs)[0]), xs)
        return torch.autograd.grad((ys * ys.detach().cos()).sum(), [xs, *model.parameters()])

    for x, y in zip(run(without_reentry), run(lambda call, *arguments: call(*arguments)), strict=True):
        assert torch.equal(x, y) and y.abs().max() > 0


@every_implementation
@every_module
def test_backward_unpacks_each_saved_tensor_once(name, implementation):
    """Hooks such as `torch.autograd.graph.save_on_cpu` move each saved tensor once."""
    rnn = MODULES[name](D, H, implementation=implementation)
    packed, unpacked = [], []

    def pack(x):
        packed.append(x)
        return len(packed) - 1

    def unpack(i):
        unpacked.append(i)
        return packed[i]

    def wrap(call, *arguments):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return call(*arguments)

    gradients(rnn, wrap)
    assert packed and len(unpacked) == len(set(unpacked))


@every_implementation
@pytest.mark.parametrize("keep", [True, False])
def test_selective_checkpoints_see_the_operators(keep, implementation):
    seen = []

    def policy(_, op, *args, **kwargs):
        seen.append(op)
        is_ours = op is torch.ops.torch_bridge.gru.default
        policies = torch.utils.checkpoint.CheckpointPolicy
        return policies.MUST_SAVE if is_ours and keep else policies.PREFER_RECOMPUTE

    contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy)
    rnn = nn.GRU(D, H, implementation=implementation)
    plain = gradients(rnn, lambda call, *arguments: call(*arguments))
    for x, y in zip(gradients(rnn, functools.partial(without_reentry, context_fn=contexts)), plain, strict=True):
        torch.testing.assert_close(x, y)
    assert (torch.ops.torch_bridge.gru.default in seen) == (implementation != "torch")


@every_module
def test_explain_lists_what_a_checkpoint_runs_again(name):
    """The second forward pass is a call of its own, and the backward pass belongs to the first one."""
    rnn, xs = MODULES[name](D, H), torch.ones(T, B, D)
    plain = torch_bridge.explain(rnn, xs, device="h100").calls
    both = torch_bridge.explain(functools.partial(without_reentry, rnn), xs, device="h100").calls
    assert both[: len(plain)] == plain
    assert [call.arguments for call in both[len(plain) :]] == [call.arguments for call in plain]
    assert {one.direction for call in both[len(plain) :] for one in call.launches} == {"forward"}
    assert [one.direction for one in plain[0].launches] == ["forward", "backward"]


def test_explain_lists_what_a_checkpoint_of_a_norm_runs_again():
    norm, x = nn.LayerNorm(H), torch.ones(B, H)
    plain, again = torch_bridge.explain(functools.partial(without_reentry, norm), x, device="h100").calls
    assert [one.direction for one in plain.launches] == ["forward", "backward"]
    assert [one.direction for one in again.launches] == ["forward"]


@every_module
def test_a_checkpoint_leaves_explain_without_gradients_as_it_is(name):
    rnn, xs = MODULES[name](D, H), torch.ones(T, B, D)
    with torch.no_grad():
        plain = torch_bridge.explain(rnn, xs, device="h100")
        assert torch_bridge.explain(functools.partial(without_reentry, rnn), xs, device="h100") == plain
    assert {one.direction for one in plain.launches} == {"forward"}
