"""Tests parts of PyTorch, and TorchRL, that look at the class of a module or at its parameters by name."""

import pytest
from torch_calls import torch

from torch_bridge import nn

T, B, D, H = 5, 4, 3, 6
KINDS = {"GRU": nn.GRU, "LSTM": nn.LSTM, "MGU": nn.MGU, "RNN": nn.RNN, "NormGRU": nn.NormGRU}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_kind_of_torch_nn = pytest.mark.parametrize("kind", ["GRU", "LSTM"])
pytestmark = [
    # raised by `torch.ao.quantization`
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.* are deprecated:UserWarning"),
]


def pair(kind, **options):
    """Returns a module of `torch.nn`, and ours with the same weights."""
    plain, ours = getattr(torch.nn, kind)(D, H, **options), KINDS[kind](D, H, **options)
    ours.load_state_dict(plain.state_dict())
    return plain, ours


@every_kind
def test_dynamic_quantization_raises(kind):
    model = torch.nn.Sequential(KINDS[kind](D, H))
    with pytest.raises(NotImplementedError, match=rf"cannot quantize a {kind}.*torch\.nn\.GRU.*qconfig = None"):
        torch.ao.quantization.quantize_dynamic(model, {KINDS[kind]})
    model[0].qconfig = None
    assert type(torch.ao.quantization.quantize_dynamic(model, {KINDS[kind]})[0]) is KINDS[kind]


@every_kind
def test_static_quantization_raises(kind):
    model = torch.nn.Sequential(torch.nn.Linear(D, D), KINDS[kind](D, H)).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig()
    with pytest.raises(NotImplementedError, match="qconfig = None"):
        torch.ao.quantization.prepare(model)
    model[1].qconfig = None
    torch.ao.quantization.prepare(model)(torch.randn(T, B, D))


@every_kind_of_torch_nn
def test_the_state_dict_can_be_quantized(kind):
    plain, ours = pair(kind)
    plain.load_state_dict(ours.state_dict())
    (quantized,) = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(plain))
    xs = torch.randn(T, B, D)
    torch.testing.assert_close(quantized(xs)[0], ours(xs)[0], rtol=0.1, atol=0.05)


@every_kind_of_torch_nn
def test_a_module_of_torchrl_runs_rollouts_and_refuses_to_train(kind):
    torchrl, tensordict = pytest.importorskip("torchrl.modules"), pytest.importorskip("tensordict")
    states = ["hidden", "cell"][: 1 if kind == "GRU" else 2]
    results = []
    for rnn in pair(kind, batch_first=True):
        module = getattr(torchrl, f"{kind}Module")(
            **{kind.lower(): rnn}, in_keys=["obs", *states], out_keys=["ys", *(("next", s) for s in states)]
        )
        torch.manual_seed(0)
        data = {"obs": torch.randn(B, T, D), "is_init": torch.rand(B, T, 1) < 0.3}
        data["is_init"][:, 1] = True
        data |= {s: torch.randn(B, T, 1, H) for s in states}
        data = tensordict.TensorDict(data, [B, T])
        results.append(module(data[:, 0].clone())["ys"])
    torch.testing.assert_close(*results)
    with torchrl.set_recurrent_mode(True), pytest.raises(TypeError, match="mask"):
        module(data)


def test_per_sample_gradients_of_expanded_weights_raise_and_those_of_torch_func_do_not():
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    rnn, xs = nn.GRU(D, H, batch_first=True), torch.randn(B, T, D)
    with pytest.raises(RuntimeError, match="Expanded Weights"):
        call_for_per_sample_grads(rnn)(xs)

    def loss(params, x):
        return torch.func.functional_call(rnn, params, (x,))[0].square().sum()

    gradients = torch.vmap(torch.func.grad(loss), (None, 0))(dict(rnn.named_parameters()), xs)
    for i, x in enumerate(xs):
        rnn.zero_grad()
        rnn(x)[0].square().sum().backward()
        torch.testing.assert_close({name: g[i] for name, g in gradients.items()},
                                   {name: w.grad for name, w in rnn.named_parameters()})  # fmt: skip


def test_symbolic_tracing_names_the_remedy_which_works():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, (nn.GRU, nn.RMSNorm)) or super().is_leaf_module(module, name)

    model, xs = torch.nn.Sequential(nn.RMSNorm(D), nn.GRU(D, H)), torch.randn(T, B, D)
    with pytest.raises(ValueError, match="is_leaf_module"):
        torch.fx.symbolic_trace(model[1:])
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    torch.testing.assert_close(traced(xs), model(xs))


@every_kind_of_torch_nn
@pytest.mark.parametrize("change", ["weight_norm", "prune"])
def test_parameters_may_be_functions_of_others(kind, change):
    from torch.nn.utils import parametrizations, prune

    xs, results = torch.randn(T, B, D), []
    for rnn in pair(kind):
        if change == "weight_norm":
            parametrizations.weight_norm(rnn, "weight_hh_l0")
        else:
            prune.l1_unstructured(rnn, "weight_hh_l0", 0.5)
        with torch.no_grad():
            for w in rnn.parameters():
                w.mul_(1.5)
        ys, _ = rnn(xs)
        ys.square().sum().backward()
        results.append([ys.detach(), *(w.grad for w in rnn.parameters())])
    torch.testing.assert_close(*results)
