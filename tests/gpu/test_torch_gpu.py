"""Tests `torch_bridge` on a GPU.

The tests compare its errors against float64 with PyTorch's own, and cover compilers, CUDA graphs, streams and devices.
"""

import contextlib
import dataclasses
import gc
import itertools

import cases
import numpy as np
import oracle
import pytest
from cases import Case
from torch_calls import CELLS, capture, every_cell, flat, replay, run, torch, with_gradients

from torch_bridge import functional, nn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # raised by Inductor
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # Inductor recommends TF32
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),  # raised by torch.export
]
DEVICE = "cuda"
TF32 = 2.0**-10  # twice the rounding error of an operand


@contextlib.contextmanager
def tf32(allowed):
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def gpu_cases():
    """Returns cases for every kind of kernel that a tiling names, with every option, once or twice for each cell."""
    found = []
    for cell in CELLS:
        base = Case(cell, T=13, B=16, H=64, precision=None)
        for hidden, batch in ((24, 3), (64, 16), (100, 5), (128, 64), (256, 64), (512, 16), (1000, 3)):
            found.append(dataclasses.replace(base, H=hidden, B=batch))
        found += [dataclasses.replace(base, **changes) for changes in (
            {"precision": "highest", "reset_state": "h", "cells": cell == "lstm"},
            {"precision": "highest", "H": 256, "resets": "none", "reverse": True},
            {"H": 128, "reset_state": "bh", "time_major": False, "reset_dtype": "float32"},
            {"H": 256, "reset_state": "tbh", "reverse": True, "resets": "all"},
            {"H": 128, "models": 3, "reset_state": "h", "cells": cell == "lstm"},
            {"H": 128, "dtype": "bf16", "carry_dtype": "bf16"},
            {"H": 256, "dtype": "bf16", "reset_state": "h", "time_major": False},
            {"H": 64, "dtype": "f16", "carry_dtype": "f16", "resets": "none"},
            {"H": 64, "T": 1, "reset_state": "bh"},
        )]  # fmt: skip
    return found


@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_outputs_and_gradients_are_as_accurate_as_pytorchs_own(case):
    """Compares with the error of the same loop in PyTorch's operations, with the same settings."""
    inputs = [cases.make_inputs(case, draw) for draw in range(cases.draws(case))]
    want = cases.stack([cases.run_oracle(case, x) for x in inputs])
    with tf32(case.precision is None):
        got, again, chosen, chosen_again, own = (
            cases.stack([run(case, x, implementation, DEVICE) for x in inputs])
            for implementation in ("triton", "triton", None, None, "torch")
        )
    for results in (got, chosen):
        if (case.dtype, case.precision) == ("f32", None):  # needs a floor: cuBLAS may leave small products in float32
            cases.compare(results, want, lambda name: max(2 * oracle.error(own[name], want[name]), TF32))
        else:
            cases.check(case, results, own, want)
    same = [(got, again), (chosen, chosen_again)]
    if case.T > 1:  # for one step, PyTorch's own cell is the default
        same.append((got, chosen))
    for one, other in same:
        for name in got:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_float64_runs_without_kernels():
    for cell in CELLS:
        case = Case(cell, T=5, B=3, H=40, dtype="f64", carry_dtype="f64", reset_state="h", precision="highest")
        inputs = cases.make_inputs(dataclasses.replace(case, dtype="f32", carry_dtype="f32"))
        cases.compare(run(case, inputs, None, DEVICE), cases.run_oracle(case, inputs), lambda _: 1e-13)
        with pytest.raises(NotImplementedError, match="takes float32, bfloat16 and float16"):
            run(case, inputs, "triton", DEVICE)


KINDS = {"GRU": (torch.nn.GRU, nn.GRU), "LSTM": (torch.nn.LSTM, nn.LSTM), "RNN": (torch.nn.RNN, nn.RNN)}
MODULES = [
    ("GRU", {}), ("LSTM", {}), ("GRU", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    ("LSTM", {"num_layers": 2, "bidirectional": True}), ("LSTM", {"proj_size": 24, "batch_first": True}),
    ("RNN", {}), ("RNN", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "options"), MODULES, ids=str)
def test_modules_are_as_accurate_as_cudnn(kind, options, packed):
    torch.manual_seed(0)
    T, B, D, H = 19, 12, 20, 72
    wide = KINDS[kind][0](D, H, **options, dtype=torch.float64)
    xs = torch.randn(*((B, T) if wide.batch_first else (T, B)), D, dtype=torch.float64)
    lengths = torch.randint(1, T + 1, (B,))

    def outputs(module, device, dtype):
        module = module.to(device, dtype)
        leaf = xs.to(device, dtype).requires_grad_()

        def call():
            if not packed:
                return module(leaf)
            inputs = torch.nn.utils.rnn.pack_padded_sequence(leaf, lengths, wide.batch_first, enforce_sorted=False)
            ys, last = module(inputs)
            return ys.data, last

        found = with_gradients(call, [leaf, *module.parameters()])
        return [x.double().cpu().numpy() for x in found]

    state = {name: x.float() for name, x in wide.state_dict().items()}
    want = outputs(wide, "cpu", torch.float64)
    results = []
    with tf32(False):
        for make in KINDS[kind]:
            module = make(D, H, **options)
            module.load_state_dict(state)
            results.append(outputs(module, DEVICE, torch.float32))
    names = [str(i) for i in range(len(want))]
    own, got, want = ({n: x for n, x in zip(names, r, strict=True)} for r in (*results, want))
    cases.check(Case("gru", T, B, H, precision="highest"), got, own, want)


def arguments(cell, T=16, B=8, H=64, D=12, device=DEVICE, seed=0, dtype=torch.float32):
    """Returns `(module, xs, states, resets)`."""
    torch.manual_seed(seed)
    module = (nn.GRU if cell == "gru" else nn.LSTM)(D, H, num_layers=2, bidirectional=True)
    module = module.to(device, dtype)
    states = [torch.randn(4, B, H, device=device, dtype=dtype) for _ in range(1 if cell == "gru" else 2)]
    xs = torch.randn(T, B, D, device=device, dtype=dtype).requires_grad_()
    return module, xs, states[0] if cell == "gru" else tuple(states), torch.rand(T, B, device=device) < 0.2


def assert_bits(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


# PyTorch's own first capture is empty.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "dynamic"])
@every_cell
def test_compiled_modules_match_eager_ones(cell, mode):
    torch._dynamo.reset()
    module, xs, hx, resets = arguments(cell)
    options = {"dynamic": True} if mode == "dynamic" else {"mode": mode}
    compiled = torch.compile(module, fullgraph=True, **options)
    leaves = [*module.parameters()]
    want = with_gradients(module, [xs, *leaves], xs, hx, resets=resets)
    found = []
    for _ in range(4):  # with CUDA graphs, the first call runs, the second records, the others replay
        torch.compiler.cudagraph_mark_step_begin()
        found.append([x.clone() for x in with_gradients(compiled, [xs, *leaves], xs, hx, resets=resets)])
        torch.testing.assert_close(found[-1], want, rtol=1e-4, atol=1e-4)
    assert_bits(found[3], found[2])
    if mode == "dynamic":
        xs, resets = torch.randn(23, 8, 12, device=DEVICE).requires_grad_(), torch.rand(23, 8, device=DEVICE) < 0.2
        want = with_gradients(module, [xs, *leaves], xs, hx, resets=resets)
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(
                with_gradients(compiled, [xs, *leaves], xs, hx, resets=resets), want, rtol=1e-4, atol=1e-4
            )


class Exported(torch.nn.Module):
    def __init__(self, rnn):
        super().__init__()
        self.rnn = rnn

    def forward(self, xs, resets):
        return self.rnn(xs, resets=resets)


def test_exported_modules_match_eager_ones():
    module, xs, _, resets = arguments("gru")
    steps = torch.export.Dim("steps", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(Exported(module), (xs.detach(), resets), dynamic_shapes=({0: steps}, {0: steps}))
        xs, resets = torch.randn(33, 8, 12, device=DEVICE), torch.rand(33, 8, device=DEVICE) < 0.2
        want = flat(module(xs, resets=resets))
        torch.testing.assert_close(flat(program.module()(xs, resets)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("H", [64, 512])  # independent programs, and programs that wait for one another
@every_cell
def test_cuda_graph_of_both_passes_replays_the_same_bits(cell, H):
    module, xs, hx, resets = arguments(cell, H=H)
    leaves = [xs, *module.parameters()]

    def step():
        return with_gradients(module, leaves, xs, hx, resets=resets)

    graph, captured = capture(step)
    for seed in range(3):
        _, other, other_hx, other_resets = arguments(cell, H=H, seed=seed)
        with torch.no_grad():
            xs.copy_(other)
            resets.copy_(other_resets)
            for x, y in zip(flat(hx), flat(other_hx), strict=True):
                x.copy_(y)
        want = step()
        assert_bits(replay(graph, captured), want)


def test_capture_of_a_kernel_that_is_not_loaded_raises():
    weights = [torch.randn(3 * 37, 5, device=DEVICE), torch.randn(3 * 37, 37, device=DEVICE)]
    xs = torch.randn(29, 3, 5, device=DEVICE)
    with torch.no_grad():
        torch.nn.functional.linear(xs, weights[0])
        torch.cuda.synchronize()
        with (
            pytest.raises(RuntimeError, match="a kernel is not loaded yet, and none can be loaded during CUDA graph"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            functional.gru(xs, None, *weights)
        functional.gru(xs, None, *weights)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            functional.gru(xs, None, *weights)


@every_cell
def test_launch_uses_the_current_stream(cell):
    """Launches while the inputs are still being written, and reuses their memory at once."""
    module, xs, hx, resets = arguments(cell)
    with torch.no_grad():
        want = flat(module(xs, hx, resets=resets))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = torch.full_like(xs, torch.nan)
            for _ in range(5):
                torch.cuda._sleep(20_000_000)
                late.copy_(xs)
                got = flat(module(late.clone(), hx, resets=resets))
                late.fill_(torch.nan)
                torch.full_like(xs, torch.nan)
        stream.synchronize()
    assert_bits(got, want)


@pytest.mark.several_gpus
@every_cell
def test_inputs_on_a_second_gpu_run_there(cell):
    gc.collect()  # where JAX frees an array, its device becomes the current one
    torch.cuda.set_device(0)  # the device that JAX used last is still current
    results = []
    for device in ("cuda:0", "cuda:1"):
        module, xs, hx, resets = arguments(cell, device="cpu")
        module, xs, resets = module.to(device), xs.detach().to(device).requires_grad_(), resets.to(device)
        hx = torch.utils._pytree.tree_map(lambda x, device=device: x.to(device), hx)
        assert torch.cuda.current_device() == 0
        results.append(with_gradients(module, [xs, *module.parameters()], xs, hx, resets=resets))
        assert {x.device for x in results[-1]} == {torch.device(device)}
    assert_bits([x.cpu() for x in results[1]], [x.cpu() for x in results[0]])


@every_cell
def test_unaligned_arrays_give_the_same_bits(cell):
    """Checks arrays that are not aligned to 16 bytes, which kernels read at a time."""
    T, B, D, H = 9, 3, 8, 64
    gates, states = (3, 1) if cell == "gru" else (4, 2)

    def shifted(x):
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x)
        assert moved.is_contiguous() and moved.data_ptr() % 16
        return moved

    torch.manual_seed(0)
    xs, w_ih = torch.randn(T, B, D, device=DEVICE), torch.randn(gates * H, D, device=DEVICE)
    w_hh, resets = torch.randn(gates * H, H, device=DEVICE) / 8, torch.rand(T, B, device=DEVICE) < 0.3
    hx, new = (tuple(torch.randn(B, H, device=DEVICE) for _ in range(states)) for _ in range(2))
    results = []
    for place in (shifted, torch.clone):
        state, reset_state = (tuple(map(place, x)) for x in (hx, new))
        if cell == "gru":
            state, reset_state = state[0], reset_state[0]
        weights = (w_ih, place(w_hh))
        results.append(flat(getattr(functional, cell)(
            xs, state, *weights, resets=place(resets), reset_state=reset_state, implementation="triton"
        )))  # fmt: skip
    assert_bits(*results)


@every_cell
def test_autocast_matches_torch_nn(cell):
    torch.manual_seed(0)
    plain, ours = (kind(12, 64).to(DEVICE) for kind in KINDS[cell.upper()])
    ours.load_state_dict(plain.state_dict())
    xs = torch.randn(16, 8, 12, device=DEVICE).requires_grad_()
    for dtype in (torch.float16, torch.bfloat16):
        results = []
        for module in (plain, ours):
            with torch.autocast(DEVICE, dtype):
                results.append(with_gradients(module, [xs, *module.parameters()], xs))
        # cuDNN's modules compute in float16 under any autocast
        assert [x.dtype for x in results[1]] == [dtype if x.dtype == torch.float16 else x.dtype for x in results[0]]
        scale = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
        for x, y in zip(results[1], results[0], strict=True):
            assert (x - y).norm() <= 8 * scale * y.norm()


@every_cell
def test_an_ensemble_under_vmap_is_one_launch(cell, monkeypatch):
    from torch_bridge import recurrences

    modules = [(nn.GRU if cell == "gru" else nn.LSTM)(12, 64).to(DEVICE) for _ in range(3)]
    xs, resets = torch.randn(16, 8, 12, device=DEVICE), torch.rand(16, 8, device=DEVICE) < 0.2
    params, buffers = torch.func.stack_module_state(modules)

    def run(params, buffers):
        return torch.func.functional_call(modules[0], (params, buffers), (xs,), {"resets": resets})[0]

    want = torch.stack([module(xs, resets=resets)[0] for module in modules])
    launches, original = [], recurrences.Launch.__call__
    monkeypatch.setattr(recurrences.Launch, "__call__", lambda *args: launches.append(args) or original(*args))
    got = torch.vmap(run)(params, buffers)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    got.square().sum().backward()
    assert [one[0].problem.models for one in launches] == [3, 3]
    for name in ("weight_hh_l0", "weight_ih_l0"):
        want = torch.stack([
            torch.autograd.grad(module(xs, resets=resets)[0].square().sum(), getattr(module, name))[0]
            for module in modules
        ])  # fmt: skip
        torch.testing.assert_close(params[name].grad, want, rtol=1e-4, atol=1e-4)


def test_two_runs_give_the_same_bits():
    for cell, (H, dtype) in itertools.product(
        CELLS, ((64, torch.float32), (300, torch.float32), (300, torch.bfloat16))
    ):
        module, xs, hx, resets = arguments(cell, H=H, dtype=dtype)
        both = [with_gradients(module, [xs, *module.parameters()], xs, hx, resets=resets) for _ in range(2)]
        assert_bits(*both)
