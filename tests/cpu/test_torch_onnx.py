"""Tests that `torch.onnx.export` writes the operators, and that ONNX Runtime then computes what the modules compute."""

import pytest
from torch_calls import torch

from torch_bridge import functional, nn, torch_loop

T, B, D, H = 6, 3, 3, 4
STACK = {"num_layers": 2, "bidirectional": True}
CASES = [(kind, {}) for kind in (nn.GRU, nn.LSTM, nn.MGU, nn.RNN, nn.NormGRU)]
CASES += [(kind, STACK | {"batch_first": True}) for kind, _ in CASES]
CASES += [
    (nn.GRU, {"num_blocks": 2, "batch_first": True}),
    (nn.LSTM, {"proj_size": 2}),
    (nn.NormGRU, {"norm": "layer", "batch_first": True}),
]
every_case = pytest.mark.parametrize(
    "kind, options", CASES, ids=[" ".join((kind.__name__, *options)) for kind, options in CASES]
)
ANY = torch.export.Dim.DYNAMIC
pytestmark = [
    # raised by the exporter
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


def exported(module, args, **options):
    return torch.onnx.export(module.eval(), args, dynamo=True, verbose=False, **options)


def check(program, module, args):
    with torch.no_grad():
        want = torch.utils._pytree.tree_leaves(module(*args))
    torch.testing.assert_close(list(program(*args)), want, rtol=1e-5, atol=1e-6)


def operators(program):
    return [node.op_type for node in program.model.graph.all_nodes()]


class WithResets(torch.nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, xs, resets, reset_state=None):
        return self.rnn(xs, resets=resets, reset_state=reset_state)


def arguments(steps, batch, batch_first=False):
    outer = (batch, steps) if batch_first else (steps, batch)
    return torch.randn(*outer, D), torch.rand(outer) < 0.3


@every_case
def test_one_program_runs_every_length_and_batch(kind, options):
    torch.manual_seed(0)
    module, axes = WithResets(kind(D, H, **options)), {0: ANY, 1: ANY}
    program = exported(module, arguments(T, B, module.rnn.batch_first), dynamic_shapes=(axes, axes))
    assert operators(program).count("Scan") == module.rnn.num_layers
    for steps, batch in ((T, B), (1, B), (2 * T, 1)):
        check(program, module, arguments(steps, batch, module.rnn.batch_first))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_learned_reset_state(kind):
    module, (xs, resets) = WithResets(kind(D, H, **STACK)), arguments(T, B)
    learned = torch.randn(4, H)
    args = xs, resets, (learned, learned + 1) if kind is nn.LSTM else learned
    program = exported(module, args)
    check(program, module, args)


def test_functions_in_reverse_and_with_every_cell_state():
    w_ih, w_hh = torch.randn(4 * H, D), torch.randn(4 * H, H)

    class Functions(torch.nn.Module):
        def forward(self, xs, resets):
            gru = functional.gru(xs, None, w_ih[H:], w_hh[H:], resets=resets, reverse=True)
            return gru, functional.lstm(xs, None, w_ih, w_hh, resets=resets.long(), return_cells=True)

    program = exported(Functions(), arguments(T, B))
    check(program, Functions(), arguments(T, B))


def test_a_policy_step_is_a_program_without_a_loop():
    module, args = nn.GRU(D, H, num_layers=2), (torch.randn(1, B, D), torch.randn(2, B, H))
    program = exported(module, args)
    assert "Scan" not in operators(program) and "Tanh" in operators(program)
    check(program, module, args)


def test_a_program_of_torch_export_and_no_value_for_the_gradient():
    module, args = WithResets(nn.LSTM(D, H)), arguments(T, B)
    program = torch.onnx.export(torch.export.export(module, args), dynamo=True, verbose=False)
    check(program, module, args)
    (loop,) = (node for node in program.model.graph.all_nodes() if node.op_type == "Scan")
    assert len(loop.outputs) == 3  # the last states and the hidden states, although the parameters require gradients


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_norms(kind):
    module, rows = kind((B, D)), {0: ANY}
    torch.nn.init.normal_(module.weight)
    for args in ((torch.randn(T, B, D),), (torch.randn(T, B, D), torch.randn(T, B, D))):
        program = exported(module, args, dynamic_shapes=(rows,) * len(args))
        for more in ((1, B, D), (2 * T, B, D)):
            check(program, module, tuple(torch.randn(more) for _ in args))


def test_shapes_of_symbolic_size_do_not_run_the_loop(monkeypatch):
    def never(*_, **__):
        raise AssertionError("the loop ran to find shapes")

    monkeypatch.setattr(torch_loop, "forward", never)
    axes = {0: ANY, 1: ANY}
    program = torch.export.export(WithResets(nn.GRU(D, H)), arguments(T, B), dynamic_shapes=(axes, axes))
    assert torch.ops.torch_bridge.gru.default in [node.target for node in program.run_decompositions().graph.nodes]
