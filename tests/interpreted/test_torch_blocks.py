"""Block-diagonal recurrent weights in PyTorch give the results of the dense matrix with zeros outside its blocks."""

import pytest
from torch_calls import torch

from torch_bridge import functional, nn
from torch_bridge.nn import run_trajectories

T, B, D, H, N = 4, 3, 5, 12, 3
GATES = {"gru": 3, "lstm": 4, "mgu": 2, "rnn": 1}
MODULES = {"gru": nn.GRU, "lstm": nn.LSTM, "mgu": nn.MGU, "rnn": nn.RNN}
every_cell = pytest.mark.parametrize("cell", GATES)
every_implementation = pytest.mark.parametrize(
    "implementation", [None, "torch", pytest.param("triton", marks=pytest.mark.interpret)]
)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def dense(blocks):
    """Returns the matrix `[gates * H, H]` of blocks `[N, gates * H / N, H / N]`."""
    size = blocks.shape[-1]
    return torch.cat([torch.block_diag(*(one.reshape(-1, size, size)[gate] for one in blocks))
                      for gate in range(blocks.shape[1] // size)])  # fmt: skip


def arguments(cell, batch_first=False, stepped=False, bias=True):
    """Returns the tensors of a call, with resets that need no gradient."""
    generator = torch.Generator().manual_seed(0)
    wide, outer = GATES[cell] * H, (B, T) if batch_first else (T, B)

    def normal(*shape):
        return torch.randn(shape, generator=generator).div_(2).requires_grad_()

    states = 2 if cell == "lstm" else 1
    tensors = {"xs": normal(*outer, D), "w_ih": normal(wide, D), "w_hh": normal(N, wide // N, H // N)}
    tensors |= {"b_ih": normal(wide), "b_hh": normal(wide)} if bias else {}
    tensors |= {f"h0_{k}": normal(B, H) for k in range(states)}
    tensors |= {f"new_{k}": normal(*((*outer, H) if stepped else (H,))) for k in range(states)}
    return tensors, torch.rand(outer, generator=generator) < 0.3


def call(cell, tensors, resets, *, matrix=False, **options):
    """Calls the function of a cell with tensors by name; returns the outputs as a flat tuple."""
    x, one = dict(tensors), lambda pair: pair if cell == "lstm" else pair[0]
    states = [tuple(y for name, y in x.items() if name.startswith(kind)) for kind in ("h0", "new")]
    weights = x["w_ih"], dense(x["w_hh"]) if matrix else x["w_hh"], x.get("b_ih"), x.get("b_hh")
    options |= {"resets": resets, "reset_state": one(states[1]), "precision": "tf32x3"}
    ys, last = getattr(functional, cell)(x["xs"], one(states[0]), *weights, **options)
    return (ys, *(last if cell == "lstm" else (last,)))


def with_gradients(run, tensors):
    outputs = run(tensors)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [*tensors.values()], weights)]


OPTIONS = {
    "forward": {},
    "reverse-stepped": {"reverse": True, "stepped": True},
    "batch-first": {"batch_first": True, "stepped": True},
    "no-bias": {"bias": False},
}


@every_implementation
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@every_cell
def test_blocks_equal_a_matrix_with_zeros(cell, options, implementation):
    given = {name: options[name] for name in ("batch_first", "stepped", "bias") if name in options}
    tensors, resets = arguments(cell, **given)
    options = {name: options[name] for name in ("reverse", "batch_first") if name in options}
    got = with_gradients(lambda x: call(cell, x, resets, implementation=implementation, **options), tensors)
    want = with_gradients(lambda x: call(cell, x, resets, matrix=True, implementation="torch", **options), tensors)
    torch.testing.assert_close(got, want, **CLOSE)


def parameters(cell, module, seed=2):
    """Returns random parameters of a module with blocks, and the same with matrices."""
    generator = torch.Generator().manual_seed(seed)
    given = {name: torch.randn(w.shape, generator=generator).div_(2).requires_grad_()
             for name, w in module.named_parameters()}  # fmt: skip
    return given, lambda: {name: dense(w) if name.startswith("weight_hh") else w for name, w in given.items()}


@pytest.mark.quick("implementation")
@every_implementation
@every_cell
def test_modules_equal_those_with_a_matrix(cell, implementation):
    """Checks two layers of two directions, with resets."""
    options, (tensors, resets) = {"num_layers": 2, "bidirectional": True}, arguments(cell)
    blocked = MODULES[cell](D, H, num_blocks=N, precision="tf32x3", implementation=implementation, **options)
    matrix = MODULES[cell](D, H, implementation="torch", **options)
    params, matrices = parameters(cell, blocked)
    results = []
    for module, weights in ((blocked, params), (matrix, matrices())):
        ys, last = torch.func.functional_call(module, weights, (tensors["xs"],), {"resets": resets})
        outputs = [ys, *(last if cell == "lstm" else (last,))]
        loss = sum(y.sin().sum() for y in outputs)
        results.append([*outputs, *torch.autograd.grad(loss, [tensors["xs"], *params.values()])])
    torch.testing.assert_close(*results, **CLOSE)


@every_cell
def test_a_single_step_without_gradients(cell):
    """Checks the call that runs PyTorch's own cell for a matrix; that cell has no blocks."""
    module = MODULES[cell](D, H, num_blocks=N)
    matrix = MODULES[cell](D, H)
    matrix.load_state_dict({name: dense(w) if name.startswith("weight_hh") else w
                            for name, w in module.state_dict().items()})  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(module(torch.ones(1, B, D)), matrix(torch.ones(1, B, D)), **CLOSE)


@every_implementation
@every_cell
def test_several_models_under_vmap(cell, implementation):
    modules = [MODULES[cell](D, H, num_blocks=N, bidirectional=True, implementation=implementation) for _ in range(2)]
    params, buffers = torch.func.stack_module_state(modules)
    xs, resets = torch.randn(T, B, D), torch.rand(T, B) < 0.3

    def run(params, buffers):
        return torch.func.functional_call(modules[0], (params, buffers), (xs,), {"resets": resets})[0]

    got = torch.vmap(run)(params, buffers)
    torch.testing.assert_close(got, torch.stack([module(xs, resets=resets)[0] for module in modules]), **CLOSE)


def test_all_blocks_and_directions_run_in_one_launch(monkeypatch):
    from torch_bridge.rnn_ops import operators

    calls, call_op = [], operators.op_common.call

    def count(op, *args, **options):
        calls.append(op.name())
        return call_op(op, *args, **options)

    monkeypatch.setattr(operators.op_common, "call", count)
    nn.GRU(D, H, num_blocks=N, bidirectional=True)(torch.ones(T, B, D))[0].sum().backward()
    assert calls == ["torch_bridge::gru", "torch_bridge::gru_backward"]


@every_cell
def test_packed_and_unbatched_inputs(cell):
    xs = [torch.randn(n, D) for n in (4, 2, 3)]
    blocked, matrix = MODULES[cell](D, H, num_blocks=N, bidirectional=True), MODULES[cell](D, H, bidirectional=True)
    params, matrices = parameters(cell, blocked)
    blocked.load_state_dict(params)
    matrix.load_state_dict(matrices())
    packed = torch.nn.utils.rnn.pack_sequence(xs, enforce_sorted=False)
    torch.testing.assert_close(blocked(packed)[0].data, matrix(packed)[0].data, **CLOSE)
    torch.testing.assert_close(blocked(xs[0]), matrix(xs[0]), **CLOSE)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_trajectories(cell):
    blocked, matrix = MODULES[cell](D, H, num_blocks=N, batch_first=True), MODULES[cell](D, H, batch_first=True)
    params, matrices = parameters(cell, blocked)
    blocked.load_state_dict(params)
    matrix.load_state_dict(matrices())
    states = [torch.randn(B, T, 1, H) for _ in range(2 if cell == "lstm" else 1)]
    xs, is_init = torch.randn(B, T, D), torch.rand(B, T) < 0.3
    torch.testing.assert_close(*(run_trajectories(rnn, xs, is_init, *states) for rnn in (blocked, matrix)), **CLOSE)


@every_cell
def test_parameters_of_a_module(cell):
    """Checks shapes, the range of initial values, a new draw, and that one block is a matrix as before."""
    torch.manual_seed(0)
    rnn, gates = MODULES[cell](D, H, num_layers=2, num_blocks=N), GATES[cell]
    torch.manual_seed(0)
    plain = MODULES[cell](D, H, num_layers=2)
    torch.manual_seed(0)
    one = MODULES[cell](D, H, num_layers=2, num_blocks=1)
    for name, w in plain.state_dict().items():
        assert torch.equal(one.state_dict()[name], w)
        shape = (N, gates * H // N, H // N) if name.startswith("weight_hh") else tuple(w.shape)
        assert tuple(rnn.state_dict()[name].shape) == shape
        bound = (N / H) ** 0.5 if name.startswith("weight_hh") else H**-0.5
        assert 0.8 * bound < rnn.state_dict()[name].abs().max() <= bound
    before = rnn.weight_hh_l1.detach().clone()
    rnn.reset_parameters()
    assert not torch.equal(before, rnn.weight_hh_l1)
    assert 0.8 * (N / H) ** 0.5 < rnn.weight_hh_l1.abs().max() <= (N / H) ** 0.5
    assert "num_blocks=3" in repr(rnn)
    assert "num_blocks" not in repr(one)


def test_a_copy_keeps_the_blocks(tmp_path):
    rnn, xs = nn.GRU(D, H, num_blocks=N), torch.ones(T, B, D)
    torch.save(rnn, tmp_path / "rnn.pt")
    loaded = torch.load(tmp_path / "rnn.pt", weights_only=False)
    torch.testing.assert_close(loaded(xs), rnn(xs))
    assert loaded.num_blocks == N
    torch.testing.assert_close(rnn.double()(xs.double())[0].float(), loaded(xs)[0], **CLOSE)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_blocks": 5}, "must divide hidden_size, 12, got 5"), ({"num_blocks": 0}, "at least 1, got 0"),
     ({"num_blocks": 2.0}, "an integer of at least 1, got 2.0")],
)  # fmt: skip
@every_cell
def test_wrong_numbers_of_blocks_raise(cell, options, message):
    with pytest.raises(ValueError, match=message):
        MODULES[cell](D, H, **options)


@pytest.mark.parametrize(
    ("shape", "message"),
    [((5, 7, 2), "5 blocks, which do not divide H = 12"), ((0, 12, 4), "0 blocks"),
     ((3, 12, 3), r"w_hh must be \(3, 12, 4\)"), ((3, 4, 12), r"w_hh must be \(3, 12, 4\)")],
)  # fmt: skip
def test_wrong_blocks_raise(shape, message):
    with pytest.raises(ValueError, match=message):
        functional.gru(torch.ones(T, B, D), None, torch.ones(3 * H, D), torch.ones(shape))


def test_blocks_exclude_a_projection():
    with pytest.raises(ValueError, match="num_blocks=3 excludes a projection"):
        nn.LSTM(D, H, num_blocks=3, proj_size=4)
    with pytest.raises(ValueError, match="block-diagonal, which a projection w_hr excludes"):
        functional.lstm(torch.ones(T, B, D), None, torch.ones(4 * H, D), torch.ones(3, 16, 4), w_hr=torch.ones(4, H))


def test_a_state_dict_with_matrices_is_rejected():
    with pytest.raises(RuntimeError, match="size mismatch for weight_hh_l0"):
        nn.GRU(D, H, num_blocks=N).load_state_dict(torch.nn.GRU(D, H).state_dict())


def test_compiled_modules():
    rnn, xs = nn.GRU(D, H, num_blocks=N, bidirectional=True), torch.randn(T, B, D)
    compiled = torch.compile(rnn, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(xs), rnn(xs), **CLOSE)


def test_autocast_on_the_cpu():
    rnn, xs = nn.GRU(D, H, num_blocks=N), torch.randn(T, B, D)
    with torch.autocast("cpu", torch.bfloat16):
        ys, _ = rnn(xs)
        assert ys.dtype == nn.GRU(D, H)(xs)[0].dtype
    torch.testing.assert_close(ys.float(), rnn(xs)[0], rtol=0.05, atol=0.05)
