"""Which implementation of `torch_bridge` runs is visible: `explain`, the warning and the log."""

import functools
import logging
import warnings

import pytest
from pretended import pretend_gpus
from torch_calls import torch

pytestmark = pytest.mark.torch

T, B, D, H = 12, 4, 8, 16


def nn():
    from torch_bridge import nn

    return nn


def explain(*args, **kwargs):
    import torch_bridge

    return torch_bridge.explain(*args, **kwargs)


@pytest.fixture
def h200(monkeypatch):
    """Makes this process see an H200, with tensors that say that they are on it."""
    from torch_bridge import tiling

    pretend_gpus(monkeypatch, tiling.PROFILES["h200"])


@pytest.fixture
def tf32():
    torch.set_float32_matmul_precision("high")


@pytest.fixture
def compiled(monkeypatch):
    """Makes kernels those of a process without Triton's interpreter, whose reasons this process may have cached."""
    from torch_bridge import availability, compiler
    from torch_bridge.rnn_ops import implementation

    monkeypatch.setattr(compiler, "interpreting", lambda: False)
    uncached = implementation._unsupported.__wrapped__
    monkeypatch.setattr(implementation, "_unsupported", availability.cached_reason(uncached))


# explain


def test_explain_says_what_tensors_on_the_cpu_run_and_what_triton_needs(compiled):
    explanation = explain(nn().GRU(D, H), torch.ones(T, B, D), resets=torch.zeros(T, B))
    assert explanation.implementation == "torch" and explanation.launches == () and explanation.device is None
    assert explanation.reason == "the tensors are on cpu, not on an NVIDIA GPU"
    assert explanation.unavailable.startswith("needs an NVIDIA GPU, and the tensors are on cpu: move them")
    assert str(explanation).splitlines() == [
        "gru(xs float32[12,4,8], 16 units) runs torch: the tensors are on cpu, not on an NVIDIA GPU",
        f'  "triton" {explanation.unavailable}',
    ]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("device", "hidden", "precision", "loop", "products"),
    [
        ("a100", 32, None, "fma", "float32"),
        ("h100", 128, "tf32", "resident", "tf32"),
        ("rtx4090", 512, "tf32x3", "streamed", "tf32x3"),
        ("h200", 512, "tf32", "split_registers", "tf32"),
        ("h200", 1024, "tf32", "rows", "tf32"),
        ("b200", 512, "tf32", "split_registers", "tf32"),
    ],
)
def test_explain_names_the_kernels_of_a_gpu_that_is_not_there(device, hidden, precision, loop, products):
    from torch_bridge import tiling

    rnn = nn().GRU(D, hidden, precision=precision)
    explanation = explain(rnn, torch.ones(128, 64, D), resets=torch.zeros(128, 64), device=device)
    assert (explanation.implementation, explanation.unavailable) == ("triton", None)
    assert explanation.reason == "the kernels can run here"
    assert explanation.device == tiling.PROFILES[device].name
    assert [launch.direction for launch in explanation.launches] == ["forward", "backward"]
    for launch, short in zip(explanation.launches, ("fwd", "bwd"), strict=True):
        if (loop, short) == ("rows", "bwd") and tiling.support.triton_version() > (3, 7):
            loop = "streamed"  # the backward kernel of "rows" spills with these versions
        assert (launch.loop, launch.precision, launch.kernels) == (loop, products, (f"gru_{short}_{loop}",))
        assert launch.problem.hidden == hidden and launch.problem.sequences == 64 and launch.times == 1
        assert launch.tiling == tiling.heuristic(launch.problem, tiling.PROFILES[device])
        text = f"gru {launch.direction}: {loop} loop, gru_{short}_{loop} ({launch.programs[0]} program"
        assert text in str(explanation) and f"; {products} products, block_h " in str(explanation)


def test_explain_follows_the_precision_of_pytorch(tf32):
    rnn, xs = nn().GRU(D, 128), torch.ones(128, 64, D)
    assert {one.precision for one in explain(rnn, xs, device="h100").launches} == {"tf32"}
    torch.set_float32_matmul_precision("highest")
    assert {one.precision for one in explain(rnn, xs, device="h100").launches} == {"float32"}
    launches = explain(rnn.bfloat16(), xs.bfloat16(), device="h100").launches
    assert {one.precision for one in launches} == {"bfloat16"}


CELLS = {"GRU": "gru", "LSTM": "lstm", "MGU": "mgu", "RNN": "simple_tanh", "NormGRU": "rms_norm_gru"}


@pytest.mark.parametrize("module", CELLS)
def test_explain_lists_every_layer_and_direction_of_every_module(module):
    rnn = getattr(nn(), module)(D, H, num_layers=2, bidirectional=True)
    explanation = explain(rnn, torch.ones(T, B, D), device="h100")
    name = CELLS[module]
    assert [(call.name, call.arguments) for call in explanation.calls] == [
        (name, "xs float32[12,4,8], 16 units, both directions"),
        (name, "xs float32[12,4,32], 16 units, both directions"),
    ]
    for call in explanation.calls:
        assert [launch.direction for launch in call.launches] == ["forward", "backward"]
        assert all(launch.problem.models == 2 and launch.computes == name for launch in call.launches)


def test_explain_describes_blocks():
    explanation = explain(nn().LSTM(D, H, num_blocks=4), torch.ones(T, B, D), device="h100")
    (call,) = explanation.calls
    assert call.arguments == "xs float32[12,4,8], 16 units in 4 blocks"
    assert [(one.problem.models, one.problem.hidden) for one in call.launches] == [(4, 4)] * 2


def test_explain_lists_norms_and_functions():
    from torch_bridge import functional

    norm = nn().LayerNorm(H)

    def model(xs, w_ih, w_hh):
        hs, _ = functional.gru(xs, None, w_ih, w_hh)
        return norm(hs, torch.ones(T, B, H))

    weights = torch.ones(3 * H, D, requires_grad=True), torch.ones(3 * H, H, requires_grad=True)
    explanation = explain(model, torch.ones(T, B, D), *weights, device="a100")
    assert [call.name for call in explanation.calls] == ["gru", "layer_norm"]
    assert [one.direction for one in explanation.calls[1].launches] == ["forward", "backward"]
    assert explanation.calls[1].launches[0].kernels == ("layer_norm_fwd",)
    with pytest.raises(ValueError, match="2 recurrences and norms, not one: use `calls`"):
        _ = explanation.reason
    assert "no recurrence or norm" in str(explain(torch.sin, torch.ones(3)))


def test_gradients_are_explained_if_requested():
    rnn, xs = nn().GRU(D, H), torch.ones(T, B, D)
    directions = {
        gradients: [one.direction for one in explain(rnn, xs, device="h100", gradients=gradients).launches]
        for gradients in (None, True, False)
    }
    assert directions == {None: ["forward", "backward"], True: ["forward", "backward"], False: ["forward"]}
    with torch.no_grad():
        assert [one.direction for one in explain(rnn, xs, device="h100").launches] == ["forward"]
        with pytest.raises(ValueError, match="gradients=True needs a result that requires a gradient"):
            explain(rnn, xs, device="h100", gradients=True)


def test_gradient_that_the_function_computes_is_explained_once_and_leaves_no_trace():
    """The function runs its own backward pass, and reads the gradients of parameters that had some before."""
    head, rnn = torch.nn.Linear(H, 1), nn().GRU(D, H)
    for x in head.parameters():
        x.grad = torch.full_like(x, 3)

    def step(xs):
        head(rnn(xs)[0]).sum().backward()
        return torch.nn.utils.clip_grad_norm_([*rnn.parameters(), *head.parameters()], 1.0)

    before = [x.detach().clone() for x in rnn.parameters()]
    explanation = explain(step, torch.ones(T, B, D), device="h100")
    assert [one.direction for one in explanation.launches] == ["forward", "backward"]
    assert all(x.grad is None for x in rnn.parameters())
    assert all(torch.equal(x.grad, torch.full_like(x, 3)) for x in head.parameters())
    assert all(map(torch.equal, before, rnn.parameters()))
    head(rnn(torch.ones(T, B, D))[0]).sum().backward()  # the module works as before


def test_optimizers_are_not_explained():
    rnn = nn().GRU(D, H)
    optimizer = torch.optim.Adam(rnn.parameters())

    def step(xs):
        rnn(xs)[0].sum().backward()
        optimizer.step()

    with pytest.raises(NotImplementedError, match="explain a function that ends with backward"):
        explain(step, torch.ones(T, B, D))
    assert not optimizer.state and all(x.grad is None for x in rnn.parameters())
    step(torch.ones(T, B, D))
    assert optimizer.state


def test_explain_finds_the_gradients_of_every_kind_of_result():
    rnn = nn().GRU(D, H)

    def model(xs):
        return {"features": [rnn(xs)[0]], "count": 3, "lengths": torch.ones(3, dtype=torch.int64)}

    assert [one.direction for one in explain(model, torch.ones(T, B, D), device="h100").launches][1:] == ["backward"]


@pytest.mark.parametrize("wrong", ["a1", "H10", "", 100])
def test_explain_rejects_an_unknown_gpu(wrong):
    with pytest.raises(ValueError, match=f"device must be None or one of a10, .*got {wrong!r}"):
        explain(nn().GRU(D, H), torch.ones(T, B, D), device=wrong)


def test_explain_says_that_no_kernel_runs_on_a_gpu_before_ampere():
    explanation = explain(nn().GRU(D, H), torch.ones(T, B, D), device="t4")
    assert explanation.implementation == "torch" and explanation.launches == ()
    assert explanation.unavailable.startswith("needs compute capability 8.0 (Ampere) or newer, Tesla T4 has 7.5: ")
    assert explanation.unavailable in explanation.reason
    with pytest.raises(NotImplementedError, match=r"Tesla V100 has 7\.0"):
        explain(nn().GRU(D, H, implementation="triton"), torch.ones(T, B, D), device="v100")


def test_explain_needs_a_function():
    with pytest.raises(ValueError, match="function must be callable, got Tensor: pass a function and its arguments"):
        explain(torch.ones(2))


@pytest.mark.parametrize(
    ("name", "known"), [("RTX 4090", "rtx4090"), ("A6000", "rtxa6000"), ("RTX-6000 Ada", "rtx6000ada")]
)
def test_explain_knows_the_spellings_of_a_gpu(name, known):
    from torch_bridge import tiling

    assert explain(nn().GRU(D, H), torch.ones(T, B, D), device=name).device == tiling.GPUS[known].name


def test_a_single_step_runs_the_cell_of_pytorch():
    rnn, xs = nn().LSTM(D, H), torch.ones(1, B, D)
    explanation = explain(rnn, xs, device="h100")
    assert explanation.implementation == "torch" and explanation.unavailable is None
    assert "a single step runs PyTorch's own cell" in explanation.reason
    named = nn().LSTM(D, H, implementation="triton")
    explanation = explain(named, xs, device="h100")
    assert (explanation.implementation, explanation.reason) == ("triton", 'implementation="triton" was passed')


def test_names_that_are_passed_are_the_reason():
    xs = torch.ones(T, B, D)
    explanation = explain(nn().GRU(D, H, implementation="torch"), xs, device="h100")
    assert (explanation.implementation, explanation.reason) == ("torch", 'implementation="torch" was passed')
    assert explanation.unavailable is None and explanation.launches == ()


def test_dtypes_without_kernels_are_the_reason(h200):
    rnn, xs = nn().GRU(D, H).double(), torch.ones(T, B, D).double()
    explanation = explain(rnn, xs, device="h200")
    assert explanation.implementation == "torch"
    assert explanation.reason.startswith("the Triton implementation takes float32, bfloat16 and float16, not torch.fl")
    assert str(explanation).count("takes float32") == 1
    with pytest.raises(NotImplementedError, match="takes float32, bfloat16 and float16"):
        explain(nn().GRU(D, H, implementation="triton").double(), xs, device="h200")


def test_empty_batches_launch_nothing():
    explanation = explain(nn().GRU(D, H), torch.ones(T, 0, D), device="h200")
    assert (explanation.implementation, explanation.reason) == ("torch", "there is nothing to compute")
    assert explanation.launches == ()


def test_packed_sequences_are_explained():
    from torch.nn.utils.rnn import pack_sequence

    sequences = [torch.ones(5, D), torch.ones(7, D), torch.ones(3, D)]
    packed = pack_sequence(sequences, enforce_sorted=False)
    explanation = explain(nn().LSTM(D, H, bidirectional=True), packed, device="h100")
    assert explanation.calls[0].arguments == "xs float32[7,3,8], 16 units, both directions"
    assert [one.direction for one in explanation.launches] == ["forward", "backward"]


def test_stacked_agents_are_models_of_one_launch():
    agents = [nn().GRU(D, H) for _ in range(5)]
    params, buffers = torch.func.stack_module_state(agents)

    def run(params, buffers, xs):
        return torch.func.functional_call(agents[0], (params, buffers), (xs,))[0]

    explanation = explain(torch.vmap(run, (0, 0, None)), params, buffers, torch.ones(T, B, D), device="h100")
    assert [one.problem.models for one in explanation.launches] == [5, 5]

    def loss(params, xs):
        return torch.func.functional_call(agents[0], params, (xs,))[0].sum()

    gradient = torch.func.grad(loss)
    launches = explain(gradient, dict(agents[0].named_parameters()), torch.ones(T, B, D), device="h100").launches
    assert [one.direction for one in launches] == ["forward", "backward"]


def test_functions_that_are_compiled_are_explained_as_they_are():
    rnn = nn().GRU(D, H)
    compiled = torch.compile(lambda xs: rnn(xs)[0].sum(), backend="eager", fullgraph=True)
    expected = explain(rnn, torch.ones(T, B, D), device="h100").launches
    assert explain(compiled, torch.ones(T, B, D), device="h100").launches == expected
    compiled(torch.ones(T, B, D)).backward()


def test_modules_that_are_compiled_are_explained_without_a_warning():
    """PyTorch warns of global hooks when a compiled module is called; `explain` registers one."""
    rnn, xs = nn().GRU(D, H), torch.ones(T, B, D)
    expected = explain(rnn, xs, device="h100").launches
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(rnn, backend="eager")
        assert explain(compiled, xs, device="h100").launches == expected
    assert [str(one.message) for one in caught] == []


def test_reentrant_checkpoints_are_explained_in_a_function_that_ends_with_backward():
    rnn, linear, xs = nn().GRU(D, H), torch.nn.Linear(D, D), torch.ones(T, B, D)

    def run(xs):
        return torch.utils.checkpoint.checkpoint(lambda xs: rnn(xs)[0], linear(xs), use_reentrant=True)

    with pytest.raises(RuntimeError, match="use_reentrant=True") as caught:
        explain(run, xs, device="h100")
    assert "end the function with backward(), or pass gradients=False" in caught.value.__notes__[0]
    directions = [one.direction for one in explain(lambda: run(xs).sum().backward(), device="h100").launches]
    assert directions.count("backward") == 1
    assert "backward" not in [one.direction for one in explain(run, xs, device="h100", gradients=False).launches]


def test_operators_that_are_called_directly_are_explained():
    def call(xp, w_hh, b_hn, h0):
        return torch.ops.torch_bridge.gru(xp, w_hh, b_hn, h0, None, None, "forward", "tf32", False, "triton")

    arrays = torch.ones(1, T, B, 3 * H), torch.ones(1, 3 * H, H), torch.ones(1, H), torch.ones(1, B, H)
    explanation = explain(call, *arrays, device="h100")
    (made,) = explanation.calls
    assert made.name == "torch.ops.torch_bridge.gru" and made.reason == "the operator was called directly"
    assert [one.loop for one in made.launches] == ["fma"]


def test_code_that_reads_values_raises_with_a_note():
    rnn = nn().GRU(D, H)
    with pytest.raises(Exception) as raised:
        explain(lambda xs: rnn(xs)[0].sum().item(), torch.ones(T, B, D))
    assert any("code that reads values, such as item()" in note for note in raised.value.__notes__)


def test_lengths_on_the_cpu_keep_their_values():
    rnn = nn().GRU(D, H)
    explanation = explain(lambda xs, n: rnn(xs[: int(n.max())]), torch.ones(T, B, D), torch.tensor([3, 7]))
    assert explanation.calls[0].arguments == "xs float32[7,4,8], 16 units"


def test_integers_that_move_to_another_device_are_fake_there():
    """On a GPU, `explain` allocates no memory."""
    from torch._subclasses.fake_tensor import FakeTensor

    moved = []

    def run(xs, resets):
        moved.append(resets.to("meta"))
        return nn().GRU(D, H)(xs, resets=resets)

    explain(run, torch.ones(T, B, D), torch.zeros(T, B, dtype=torch.bool))
    assert len(moved) == 1 and moved[0].device.type == "meta" and isinstance(moved[0], FakeTensor)


def test_modules_without_memory_are_explained():
    with torch.device("meta"):
        rnn, xs = nn().GRU(D, 4096), torch.empty(256, 512, D)
    assert explain(rnn, xs, device="h200").launches[0].problem.hidden == 4096


@pytest.mark.interpret
def test_explain_makes_the_choices_of_the_call(monkeypatch):
    """A call launches what `explain` says. A checkpoint runs the forward pass twice, and the two agree there too."""
    from torch_bridge import op_common

    made = []

    def load(make, problem, ordinal):
        made.append(problem)
        return original(make, problem, ordinal)

    from torch_bridge.rnn_ops import kernels

    original = op_common.load
    monkeypatch.setattr(op_common, "load", load)
    kernels._launch.cache_clear()
    rnn = nn().LSTM(D, 6, implementation="triton", bidirectional=True)
    call = functools.partial(rnn, torch.ones(3, 2, D), resets=torch.zeros(3, 2))
    explanation = explain(call)
    assert explanation.device == "Triton's interpreter" and not made
    call()[0].sum().backward()
    assert [launch.problem for launch in explanation.launches] == made


# The warning


@pytest.fixture
def warn_again(monkeypatch):
    from torch_bridge import recording

    monkeypatch.setattr(recording, "_warned", [])


def break_triton(monkeypatch):
    from torch_bridge import availability

    monkeypatch.setattr(availability, "triton_fails", lambda: "needs triton, which is not installed")


def break_driver(monkeypatch):
    from torch_bridge import gpu

    monkeypatch.setattr(gpu, "driver_fails", lambda: "RuntimeError: no C compiler")


def make_older(monkeypatch):
    from torch_bridge import tiling

    pretend_gpus(monkeypatch, tiling.Device(75, 68, name="NVIDIA GeForce RTX 2080 Ti"))


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (break_triton, "needs triton, which is not installed"),
        (break_driver, r"cannot load kernels here \(RuntimeError: no C compiler\): fix that"),
        (make_older, r"needs compute capability 8.0 \(Ampere\) or newer, NVIDIA GeForce RTX 2080 Ti has 7.5"),
    ],
)
def test_kernels_that_cannot_run_on_the_gpu_warn_once_with_the_remedy(cause, remedy, h200, warn_again, monkeypatch):
    import torch_bridge
    from torch_bridge import availability, norm_ops
    from torch_bridge.rnn_ops import implementation

    cause(monkeypatch)
    for room in (implementation, norm_ops):  # whose caches would remember the reason
        monkeypatch.setattr(room, "_unsupported", availability.cached_reason(room._unsupported.__wrapped__))
    w_hh, x = FakeOnGPU(3 * H, H), FakeOnGPU(1, 5, H)
    with pytest.warns(torch_bridge.ImplementationWarning, match=remedy) as warned:
        assert not implementation.should_launch_kernels(None, w_hh)
        assert not norm_ops.should_launch_kernels(None, x)
        assert not implementation.should_launch_kernels(None, w_hh)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert "torch_bridge runs PyTorch operations on it instead of its kernels" in str(warned[0].message)
    with pytest.raises(NotImplementedError, match=f"the Triton implementation {remedy}"):
        implementation.should_launch_kernels("triton", w_hh)
    assert not implementation.should_launch_kernels("loop", w_hh)


class FakeOnGPU:
    """Device, dtype and shape of a tensor on a GPU."""

    def __init__(self, *shape, dtype=torch.float32):
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cuda:0")


def test_inputs_without_kernels_do_not_warn(h200, warn_again):
    from torch_bridge.rnn_ops import implementation

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not implementation.should_launch_kernels(None, FakeOnGPU(3 * H, H, dtype=torch.float64))
        assert implementation.should_launch_kernels(None, FakeOnGPU(3 * H, H))


def test_both_packages_warn_with_one_category():
    import jaxrnn
    import torch_bridge

    assert jaxrnn.ImplementationWarning is torch_bridge.ImplementationWarning
    assert jaxrnn.Explanation is torch_bridge.Explanation


# The log


@pytest.fixture
def messages(caplog):
    from torch_bridge import recording

    recording._log_once.cache_clear()
    caplog.set_level(logging.DEBUG, "torch_bridge")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "torch_bridge"]


def test_the_log_says_every_choice_once(messages):
    rnn = nn().GRU(D, H, implementation="torch")
    for _ in range(2):
        rnn(torch.ones(T, B, D))
    assert messages() == ['gru(xs float32[12,4,8], 16 units) runs torch: implementation="torch" was passed']
    nn().RMSNorm(H)(torch.ones(B, H))
    assert messages()[1].startswith("rms_norm(x float32[4,16]) runs torch: the tensors are on cpu")


@pytest.mark.interpret
def test_the_log_says_every_launch_once(messages):
    from torch_bridge.rnn_ops import kernels

    kernels._launch.cache_clear()
    rnn = nn().GRU(D, 6, implementation="triton")
    for _ in range(2):
        rnn(torch.ones(3, 2, D))[0].sum().backward()
    chosen, forward, backward = messages()
    assert chosen.endswith('runs triton: implementation="triton" was passed')
    assert forward.startswith("gru forward: streamed loop, gru_fwd_streamed (")
    assert backward.startswith("gru backward: streamed loop, gru_bwd_streamed (")


def test_compiled_calls_run_with_the_log(messages):
    rnn = nn().GRU(D, H)
    compiled = torch.compile(lambda xs: rnn(xs)[0].sum(), backend="eager", fullgraph=True)
    compiled(torch.ones(T, B, D)).backward()
    assert messages() == []  # the log has the choices of calls that are not compiled
