"""Tests modules on DTensors, in two processes: each computes its shard, and the whole is what one process computes."""

import contextlib
import copy
import itertools
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta

import pytest
from child import environment

torch = pytest.importorskip("torch")
# Not by way of `torch_calls`: every process that a test starts imports this file, and JAX takes seconds.
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from torch_bridge import functional, nn  # noqa: E402

PROCESSES = 2
T, D, H = 5, 3, 4
# of the constructor, with a batch that divides into equal parts, into others, and into one and none
LAYOUTS = (
    ({}, 2 * PROCESSES), ({"batch_first": True}, PROCESSES + 1), ({"num_layers": 2, "bidirectional": True}, 1)
)  # fmt: skip
KINDS = {
    "GRU": nn.GRU, "LSTM": nn.LSTM, "MGU": nn.MGU, "RNN": nn.RNN, "NormGRU": nn.NormGRU,
    "GRU of blocks": lambda *args, **kwargs: nn.GRU(*args, num_blocks=2, **kwargs),
    "LSTM with a projection": lambda *args, **kwargs: nn.LSTM(*args, proj_size=2, **kwargs),
}  # fmt: skip
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def processes():
    """Starts the processes once: importing PyTorch takes more time than what the tests compute."""
    with contextlib.ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        yield [stack.enter_context(ProcessPoolExecutor(1, context)) for _ in range(PROCESSES)]


@pytest.fixture
def start(processes, tmp_path):
    """Returns a function that runs `function(mesh, *args)` in every process."""

    def start(function, *args):
        store = f"file://{tmp_path / 'store'}"
        for done in as_completed(
            [process.submit(run, rank, function, store, args) for rank, process in enumerate(processes)]
        ):
            done.result()

    return start


def run(rank, function, store, args):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    # Where one process fails, the other waits for it until the timeout.
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES, init_method=store, timeout=timedelta(minutes=3))
    try:
        function(dist.init_device_mesh("cpu", (PROCESSES,)), *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def check(mesh, module, arguments, placements):
    """Compares a module on DTensors with the module on tensors: results, and gradients of arguments and parameters."""
    sharded = distribute_module(copy.deepcopy(module), mesh)
    plain = [x.clone().requires_grad_() if x.is_floating_point() else x for x in arguments]
    split = [distribute_tensor(x.detach(), mesh, [p]) for x, p in zip(plain, placements, strict=True)]
    split = [x.requires_grad_() if x.is_floating_point() else x for x in split]
    name = f"{module}, {[tuple(x.shape) for x in arguments]}, {placements}"
    got, want = (tree_leaves(x) for x in (sharded(*split), module(*plain)))
    for results in (got, want):
        sum((x * x.detach().cos()).sum() for x in results).backward()
    got += [x.grad for x in (*split, *sharded.parameters()) if x.requires_grad]
    want += [x.grad for x in (*plain, *module.parameters()) if x.requires_grad]
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.full_tensor(), y, rtol=1e-10, atol=1e-12, msg=lambda text: f"{name}: {text}")
    module.zero_grad()
    return got


class WithResets(torch.nn.Module):
    """Runs a recurrent module on tensors only. Both states of an LSTM are the same."""

    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, xs, resets=None, reset_state=None, hx=None):
        if isinstance(self.rnn, nn.LSTM):
            hx, reset_state = (None if x is None else (x, x) for x in (hx, reset_state))
        return self.rnn(xs, hx, resets=resets, reset_state=reset_state)


def check_recurrent_module(mesh, kind):
    for options, B in LAYOUTS:
        module = WithResets(KINDS[kind](D, H, **options))
        outer, batch = ((B, T), 0) if module.rnn.batch_first else ((T, B), 1)
        count = module.rnn.num_layers * (2 if module.rnn.bidirectional else 1)
        xs, resets = torch.randn(*outer, D), torch.rand(outer) < 0.3
        local = Shard(batch)
        got = check(mesh, module, (xs, resets), (local, local))
        assert got[0].placements == (local,) and got[1].placements == (Shard(1),)
        if module.rnn.proj_size:
            continue
        state = torch.randn(count, B, H)
        for new, placement in (
            (torch.randn(count, H), Replicate()),
            (torch.randn(count, B, H), Shard(1)),
            (torch.randn(count, *outer, H), Shard(1 + batch)),
        ):
            check(mesh, module, (xs, resets, new, state), (local, local, placement, Shard(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_module_runs_each_process_own_sequences(kind, start):
    start(check_recurrent_module, kind)


def check_other_placements(mesh):
    module, xs, resets = WithResets(nn.GRU(D, H, bidirectional=True)), torch.randn(T, 4, D), torch.rand(T, 4) < 0.3
    for of_inputs, of_resets in itertools.product((Replicate(), Shard(0), Shard(2)), (Replicate(), Shard(0), Shard(1))):
        got = check(mesh, module, (xs, resets), (of_inputs, of_resets))
        assert got[0].placements == (Replicate(),)
    check(mesh, module, (xs[:1], resets[:1]), (Shard(1), Shard(1)))  # a single step
    check(mesh, nn.GRU(D, H), (torch.randn(T, D),), (Replicate(),))  # a single sequence


def check_norms(mesh):
    shape = 2 * PROCESSES, PROCESSES + 1, 4, 2
    for kind, axes in itertools.product((nn.LayerNorm, nn.RMSNorm), (1, 2)):
        module, x = kind(shape[-axes:]), torch.randn(shape)
        for of_x, of_residual in itertools.product((Replicate(), *map(Shard, range(4))), (Replicate(), Shard(1))):
            rows = of_x if isinstance(of_x, Shard) and of_x.dim < 4 - axes else Replicate()
            got = check(mesh, module, (x,), (of_x,))
            assert got[0].placements == (rows,)
            got = check(mesh, module, (x, torch.randn(shape)), (of_x, of_residual))
            assert got[0].placements == got[1].placements == (rows,)


def check_two_dimensional_mesh(mesh):
    mesh = dist.init_device_mesh("cpu", (PROCESSES, 1), mesh_dim_names=("data", "sequence"))
    norm, rnn = (distribute_module(module, mesh) for module in (nn.RMSNorm(D), nn.GRU(D, H)))
    xs = distribute_tensor(torch.randn(T, 4, D), mesh, [Shard(1), Shard(0)])
    y = norm(xs)
    assert y.placements == (Shard(1), Shard(0))
    ys, _ = rnn(y)
    assert ys.placements == (Shard(1), Replicate())
    (ys.square()).sum().backward()
    plain_norm, plain_rnn = nn.RMSNorm(D), nn.GRU(D, H)
    for plain, module in ((plain_norm, norm), (plain_rnn, rnn)):
        plain.load_state_dict({name: x.full_tensor() for name, x in module.state_dict().items()})
    want, _ = plain_rnn(plain_norm(xs.full_tensor()))
    want.square().sum().backward()
    torch.testing.assert_close(ys.full_tensor(), want)
    for module, plain in ((norm, plain_norm), (rnn, plain_rnn)):
        for x, y in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), y.grad)


@pytest.mark.parametrize("function", [check_other_placements, check_norms, check_two_dimensional_mesh])
def test_other_placements(function, start):
    start(function)


def check_sequence_parallel(mesh):
    # `torch.nn.LayerNorm` says what the gradients look like
    xs = torch.randn(2, 3, D)
    for kind in ("LayerNorm", "RMSNorm"):
        found = []
        for module in (getattr(torch.nn, kind)(D), getattr(nn, kind)(D)):
            model = parallelize_module(
                torch.nn.Sequential(module), mesh, {"0": SequenceParallel(use_local_output=True)}
            )
            model(xs).square().sum().backward()
            assert module.weight.grad.placements == (Partial(),)
            found.append([x.grad.full_tensor() for x in module.parameters()])
        torch.testing.assert_close(*found)


def check_fully_sharded_data_parallel(mesh):
    model, xs, resets = WithResets(nn.LSTM(D, H)), torch.randn(T, 4, D), torch.rand(T, 4) < 0.3
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=mesh)
    mine = slice(2 * mesh.get_local_rank(), 2 * mesh.get_local_rank() + 2)
    model(xs, resets)[0].square().sum().backward()
    sharded(xs[:, mine], resets[:, mine])[0].square().sum().backward()
    for x, y in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(x.grad.full_tensor() * PROCESSES, y.grad)


def check_compiled(mesh):
    module = distribute_module(WithResets(nn.GRU(D, H, bidirectional=True)), mesh)
    xs = distribute_tensor(torch.randn(T, 4, D), mesh, [Shard(1)])
    resets = distribute_tensor(torch.rand(T, 4) < 0.3, mesh, [Shard(1)])

    def loss(xs, resets):
        return module(xs, resets)[0].square().sum()

    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        value = function(xs, resets)
        gradients = torch.autograd.grad(value, [*module.parameters()])
        results.append([x.full_tensor() for x in (value, *gradients)])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("function", [check_sequence_parallel, check_fully_sharded_data_parallel, check_compiled])
def test_programs_of_pytorch_that_shard(function, start):
    start(function)


def check_errors(mesh):
    rnn, norm = nn.GRU(D, H), nn.RMSNorm(D)
    sharded, sharded_norm = (distribute_module(copy.deepcopy(module), mesh) for module in (rnn, norm))
    x = torch.randn(T, 4, D)
    xs, resets = distribute_tensor(x, mesh, [Shard(1)]), torch.zeros(T, 4)
    for call, name in (
        (lambda: rnn(xs), "the weights"),
        (lambda: sharded(x), "the inputs"),
        (lambda: sharded(xs, resets=resets), "resets"),
        (lambda: sharded(xs, torch.zeros(1, 4, H)), "the initial state"),
        (lambda: norm(xs), "the weight"),
        (lambda: sharded_norm(x), "the inputs"),
        (lambda: sharded_norm(xs, x), "the residual"),
        (lambda: functional.rms_norm(x, residual=xs), "the inputs"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be a DTensor.*distribute_tensor.*to_local"):
            call()
    packed = torch.nn.utils.rnn.PackedSequence(xs[0], torch.tensor([4]))
    hidden = distribute_tensor(torch.zeros(T, 4, 1, H), mesh, [Shard(1)])
    for call in (lambda: sharded(packed), lambda: nn.run_trajectories(sharded, xs, xs[..., :1], hidden)):
        with pytest.raises(NotImplementedError, match=r"DTensor.*to_local"):
            call()


def test_plain_tensors_do_not_import_dtensors():
    code = "import sys, torch; from torch_bridge import nn; nn.GRU(3, 4)(nn.RMSNorm(3)(torch.randn(5, 2, 3)))"
    code += "; assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300, env=environment())


def test_errors_name_the_remedy(start):
    start(check_errors)
