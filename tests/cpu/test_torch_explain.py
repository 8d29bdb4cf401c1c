"""Which implementation of `torch_bridge` runs is visible: `explain`, the warning and the log."""

import functools
import logging

import pytest
from pretended import pretend_gpus
from torch_calls import torch

import jaxrnn
import torch_bridge
from torch_bridge import availability, compiler, functional, gpu, nn, norm_ops, op_common, recording, tiling
from torch_bridge.rnn_ops import implementation, kernels

pytestmark = pytest.mark.torch

T, B, D, H = 12, 4, 8, 16
XS = torch.ones(T, B, D)
explain = functools.partial(torch_bridge.explain, device="h100")


def directions(*arguments, **options):
    return [launch.direction for launch in explain(*arguments, **options).launches]


@pytest.fixture
def h200(monkeypatch):
    """Makes this process see an H200, with tensors that say that they are on it."""
    pretend_gpus(monkeypatch, tiling.PROFILES["h200"])


def forget_reasons(monkeypatch):
    """Empties the caches of reasons, which depend on what the test pretends."""
    for module in (implementation, norm_ops):
        monkeypatch.setattr(module, "_unsupported", availability.cached_reason(module._unsupported.__wrapped__))


# explain


def test_explain_says_what_tensors_on_the_cpu_run_and_what_triton_needs(monkeypatch):
    monkeypatch.setattr(compiler, "interpreting", lambda: False)
    forget_reasons(monkeypatch)
    explanation = torch_bridge.explain(nn.GRU(D, H), XS, resets=torch.zeros(T, B))
    assert explanation.launches == () and explanation.device is None
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
    explanation = explain(nn.GRU(D, hidden, precision=precision), torch.ones(128, 64, D), device=device)
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


def test_explain_tells_how_many_pieces_a_sequence_may_have_and_what_is_a_cluster():
    rnn, xs = nn.GRU(D, 256, precision="tf32"), torch.ones(1024, 8, D)
    for device, resets, pieces, cluster in (
        ("h200", None, 1, 4), ("h200", torch.zeros(1024, 8), 30, 4), ("a100", torch.zeros(1024, 8), 27, 1)
    ):  # fmt: skip
        explanation = explain(rnn, xs, resets=resets, device=device)
        assert [launch.tiling.pieces for launch in explanation.launches] == [pieces] * 2
        assert str(explanation).count(f", pieces {pieces}, cluster {cluster}") == 2


def test_explain_follows_the_precision_of_pytorch():
    rnn, xs, found = nn.GRU(D, 128), torch.ones(128, 64, D), []
    for precision in ("high", "highest"):
        torch.set_float32_matmul_precision(precision)
        found.append({launch.precision for launch in explain(rnn, xs).launches})
    found.append({launch.precision for launch in explain(rnn.bfloat16(), xs.bfloat16()).launches})
    assert found == [{"tf32"}, {"float32"}, {"bfloat16"}]


CELLS = {"GRU": "gru", "LSTM": "lstm", "MGU": "mgu", "RNN": "simple_tanh", "NormGRU": "rms_norm_gru"}


@pytest.mark.parametrize("module", CELLS)
def test_explain_lists_every_layer_and_direction_of_every_module(module):
    rnn = getattr(nn, module)(D, H, num_layers=2, bidirectional=True)
    explanation = explain(rnn, XS)
    name = CELLS[module]
    assert [(call.name, call.arguments) for call in explanation.calls] == [
        (name, "xs float32[12,4,8], 16 units, both directions"),
        (name, "xs float32[12,4,32], 16 units, both directions"),
    ]
    for call in explanation.calls:
        assert [launch.direction for launch in call.launches] == ["forward", "backward"]
        assert all(launch.problem.models == 2 and launch.computes == name for launch in call.launches)


def test_explain_describes_blocks():
    explanation = explain(nn.LSTM(D, H, num_blocks=4), XS)
    (call,) = explanation.calls
    assert call.arguments == "xs float32[12,4,8], 16 units in 4 blocks"
    assert [(one.problem.models, one.problem.hidden) for one in call.launches] == [(4, 4)] * 2


def test_explain_lists_norms_and_functions():
    norm = nn.LayerNorm(H)

    def model(xs, w_ih, w_hh):
        hs, _ = functional.gru(xs, None, w_ih, w_hh)
        return norm(hs, torch.ones(T, B, H))

    weights = torch.ones(3 * H, D, requires_grad=True), torch.ones(3 * H, H, requires_grad=True)
    explanation = explain(model, XS, *weights)
    assert [call.name for call in explanation.calls] == ["gru", "layer_norm"]
    assert [launch.direction for launch in explanation.calls[1].launches] == ["forward", "backward"]
    assert explanation.calls[1].launches[0].kernels == ("layer_norm_fwd",)
    with pytest.raises(ValueError, match="2 recurrences and norms, not one: use `calls`"):
        _ = explanation.reason
    assert "no recurrence or norm" in str(explain(torch.sin, torch.ones(3)))


def test_gradients_are_explained_if_requested():
    rnn = nn.GRU(D, H)
    found = {gradients: directions(rnn, XS, gradients=gradients) for gradients in (None, True, False)}
    assert found == {None: ["forward", "backward"], True: ["forward", "backward"], False: ["forward"]}
    several = {"features": [], "count": 3, "lengths": torch.ones(3, dtype=torch.int64)}
    assert directions(lambda xs: several | {"features": [rnn(xs)[0]]}, XS) == ["forward", "backward"]
    with torch.no_grad():
        assert directions(rnn, XS) == ["forward"]
        with pytest.raises(ValueError, match="gradients=True needs a result that requires a gradient"):
            explain(rnn, XS, gradients=True)


def test_optimizers_are_not_explained():
    rnn = nn.GRU(D, H)
    optimizer = torch.optim.Adam(rnn.parameters())

    def step(xs):
        rnn(xs)[0].sum().backward()
        optimizer.step()

    with pytest.raises(NotImplementedError, match="explain a function that ends with backward"):
        explain(step, XS)
    assert not optimizer.state and all(x.grad is None for x in rnn.parameters())
    step(XS)  # works by itself


@pytest.mark.parametrize("wrong", ["a1", "", 100])
def test_explain_rejects_an_unknown_gpu(wrong):
    with pytest.raises(ValueError, match=f"device must be None or one of a10, .*got {wrong!r}"):
        explain(nn.GRU(D, H), XS, device=wrong)


@pytest.mark.parametrize(
    ("name", "known"), [("RTX 4090", "rtx4090"), ("A6000", "rtxa6000"), ("RTX-6000 Ada", "rtx6000ada")]
)
def test_explain_knows_the_spellings_of_a_gpu(name, known):
    assert explain(nn.GRU(D, H), XS, device=name).device == tiling.GPUS[known].name


def test_explain_needs_a_function():
    with pytest.raises(ValueError, match="function must be callable, got Tensor: pass a function and its arguments"):
        explain(torch.ones(2))


FORCED = {
    "torch": (XS, 'implementation="torch" was passed'),
    "empty": (XS[:, :0], "there is nothing to compute"),
    "step": (XS[:1], "a single step runs PyTorch's own cell"),
    "float64": (XS.double(), "the Triton implementation takes float32, bfloat16 and float16, not torch.float64"),
    "t4": (XS, "the Triton implementation needs compute capability 8.0 (Ampere) or newer, Tesla T4 has 7.5: "),
}


@pytest.mark.parametrize("case", FORCED)
def test_explain_gives_the_reason_of_every_choice(case, h200):
    xs, reason = FORCED[case]
    rnn = nn.LSTM(D, H, implementation="torch" if case == "torch" else None).to(xs.dtype)
    explanation = explain(rnn, xs, device="t4" if case == "t4" else "h200")
    assert explanation.implementation == "torch" and explanation.launches == ()
    assert reason in explanation.reason
    if case in ("float64", "t4"):
        assert explanation.unavailable in explanation.reason and str(explanation).count(explanation.unavailable) == 1
    else:
        assert explanation.unavailable is None


def test_triton_runs_what_it_is_requested_for_or_says_why_not():
    rnn = nn.LSTM(D, H, implementation="triton")
    explanation = explain(rnn, XS[:1])
    assert (explanation.implementation, explanation.reason) == ("triton", 'implementation="triton" was passed')
    with pytest.raises(NotImplementedError, match=r"Tesla V100 has 7\.0"):
        explain(rnn, XS, device="v100")
    with pytest.raises(NotImplementedError, match="takes float32, bfloat16 and float16"):
        explain(rnn.double(), XS.double())


def test_packed_sequences_are_explained():
    sequences = [torch.ones(steps, D) for steps in (5, 7, 3)]
    packed = torch.nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
    explanation = explain(nn.LSTM(D, H, bidirectional=True), packed)
    assert explanation.calls[0].arguments == "xs float32[7,3,8], 16 units, both directions"
    assert [launch.direction for launch in explanation.launches] == ["forward", "backward"]


def test_what_is_compiled_is_explained_as_it_is_without_a_warning():
    """PyTorch warns of global hooks when a compiled module is called; `explain` registers one."""
    rnn = nn.GRU(D, H)
    function = torch.compile(lambda xs: rnn(xs)[0].sum(), backend="eager", fullgraph=True)
    expected = explain(rnn, XS).launches
    for compiled in (function, torch.compile(rnn, backend="eager")):
        assert explain(compiled, XS).launches == expected
    function(XS).backward()


def test_reentrant_checkpoints_are_explained_in_a_function_that_ends_with_backward():
    rnn, linear = nn.GRU(D, H), torch.nn.Linear(D, D)

    def run(xs):
        return torch.utils.checkpoint.checkpoint(lambda xs: rnn(xs)[0], linear(xs), use_reentrant=True)

    with pytest.raises(RuntimeError, match="use_reentrant=True") as caught:
        explain(run, XS)
    assert "end the function with backward(), or pass gradients=False" in caught.value.__notes__[0]
    assert directions(lambda: run(XS).sum().backward()).count("backward") == 1
    assert "backward" not in directions(run, XS, gradients=False)


def test_operators_that_are_called_directly_are_explained():
    def call(xp, w_hh, b_hn, h0):
        return torch.ops.torch_bridge.gru(xp, w_hh, b_hn, h0, None, None, "forward", "tf32", False, "triton")

    arrays = torch.ones(1, T, B, 3 * H), torch.ones(1, 3 * H, H), torch.ones(1, H), torch.ones(1, B, H)
    (made,) = explain(call, *arrays).calls
    assert made.name == "torch.ops.torch_bridge.gru" and made.reason == "the operator was called directly"
    assert [launch.loop for launch in made.launches] == ["fma"]


def test_integers_that_move_to_another_device_are_fake_there():
    """On a GPU, `explain` allocates no memory."""
    moved = []

    def run(xs, resets):
        moved.append(resets.to("meta"))
        return nn.GRU(D, H)(xs, resets=resets)

    explain(run, XS, torch.zeros(T, B, dtype=torch.bool))
    assert [(x.device.type, type(x)) for x in moved] == [("meta", torch._subclasses.FakeTensor)]


def test_modules_without_memory_are_explained():
    with torch.device("meta"):
        rnn, xs = nn.GRU(D, 4096), torch.empty(256, 512, D)
    assert explain(rnn, xs, device="h200").launches[0].problem.hidden == 4096


@pytest.mark.interpret
def test_explain_makes_the_choices_of_the_call(monkeypatch):
    """A call launches what `explain` says."""
    made, original = [], op_common.load

    def load(make, problem, ordinal):
        made.append(problem)
        return original(make, problem, ordinal)

    monkeypatch.setattr(op_common, "load", load)
    kernels._launch.cache_clear()
    rnn = nn.LSTM(D, 6, implementation="triton", bidirectional=True)
    call = functools.partial(rnn, torch.ones(3, 2, D), resets=torch.zeros(3, 2))
    explanation = torch_bridge.explain(call)
    assert explanation.device == "Triton's interpreter" and not made
    call()[0].sum().backward()
    assert [launch.problem for launch in explanation.launches] == made


# The warning


@pytest.fixture
def warn_again(monkeypatch):
    monkeypatch.setattr(recording, "_warned", [])


def break_triton(monkeypatch):
    monkeypatch.setattr(availability, "triton_fails", lambda: "needs triton, which is not installed")


def break_driver(monkeypatch):
    monkeypatch.setattr(gpu, "driver_fails", lambda: "RuntimeError: no C compiler")


def make_older(monkeypatch):
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
    cause(monkeypatch)
    forget_reasons(monkeypatch)
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
    assert not implementation.should_launch_kernels(None, FakeOnGPU(3 * H, H, dtype=torch.float64))
    assert implementation.should_launch_kernels(None, FakeOnGPU(3 * H, H))


def test_both_packages_warn_with_one_category():
    assert jaxrnn.ImplementationWarning is torch_bridge.ImplementationWarning
    assert jaxrnn.Explanation is torch_bridge.Explanation


# The log


@pytest.fixture
def messages(caplog):
    recording._log_once.cache_clear()
    caplog.set_level(logging.DEBUG, "torch_bridge")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "torch_bridge"]


def test_the_log_says_every_choice_once_but_not_those_of_explain(messages):
    rnn = nn.GRU(D, H, implementation="torch")
    torch_bridge.explain(rnn, XS)
    assert messages() == []
    for _ in range(2):
        rnn(XS)
    assert messages() == ['gru(xs float32[12,4,8], 16 units) runs torch: implementation="torch" was passed']
    nn.RMSNorm(H)(torch.ones(B, H))
    assert messages()[1].startswith("rms_norm(x float32[4,16]) runs torch: the tensors are on cpu")


@pytest.mark.interpret
def test_the_log_says_every_launch_once(messages):
    kernels._launch.cache_clear()
    rnn = nn.GRU(D, 6, implementation="triton")
    for _ in range(2):
        rnn(torch.ones(3, 2, D))[0].sum().backward()
    chosen, forward, backward = messages()
    assert chosen.endswith('runs triton: implementation="triton" was passed')
    assert forward.startswith("gru forward: streamed loop, gru_fwd_streamed (")
    assert backward.startswith("gru backward: streamed loop, gru_bwd_streamed (")


def test_compiled_calls_run_with_the_log(messages):
    rnn = nn.GRU(D, H)
    compiled = torch.compile(lambda xs: rnn(xs)[0].sum(), backend="eager", fullgraph=True)
    compiled(XS).backward()
    assert messages() == []  # the log has the choices of calls that are not compiled
