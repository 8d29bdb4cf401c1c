"""Which implementation runs is visible: `explain`, the warning, the log, the default, and the names in profiles."""

import functools
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pretended import pretend_gpus

import jaxrnn
import jaxrnn.linen
import jaxrnn.nnx
from jaxrnn import _bridge, choice, context
from jaxrnn._bridge import method
from jaxrnn._bridge.native import NativeLaunchError

T, B, D, H = 12, 4, 8, 16
F32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def gru_params(inputs=D, hidden=H, make=F32):
    return jaxrnn.GRUParams(*map(make, ((inputs, 3 * hidden), (hidden, 3 * hidden), (3 * hidden,), (hidden,))))


def lstm_params(inputs=D, hidden=H, make=F32):
    return jaxrnn.LSTMParams(*map(make, ((inputs, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,))))


def gru_arrays(inputs=D, make=F32):
    return gru_params(inputs, make=make), make((B, H)), make((T, B, inputs))


def explain_gru(steps=T, batch=B, inputs=D, hidden=H, **options):
    resets = jax.ShapeDtypeStruct((steps, batch), bool)
    arguments = gru_params(inputs, hidden), F32((batch, hidden)), F32((steps, batch, inputs))
    return jaxrnn.explain(jaxrnn.gru, *arguments, resets=resets, **options)


def run_gru(steps=T, **options):
    return jaxrnn.gru(gru_params(make=jnp.ones), jnp.ones((B, H)), jnp.ones((steps, B, D)), **options)


def outputs_of_gru(params, carry, xs):
    return jaxrnn.gru(params, carry, xs)[1]


@pytest.fixture(autouse=True)
def on_the_cpu(request):
    """Makes JAX compute on the CPU where there is a GPU, except in tests that pretend to have one."""
    with jax.default_device(None if "h200" in request.fixturenames else jax.devices("cpu")[0]):
        yield


@pytest.fixture
def h200(monkeypatch):
    """Makes this process see an H200."""
    from torch_bridge import gpu, tiling

    pretend_gpus(monkeypatch, tiling.PROFILES["h200"])
    monkeypatch.setattr(gpu, "can_capture_early_launches", lambda: True)


# explain


@pytest.mark.quick
def test_without_a_gpu_explain_says_that_xla_runs():
    explanation = explain_gru()
    assert explanation.implementation == "xla" and explanation.launches == () and explanation.device is None
    text = "gru(xs float32[12,4,8], 16 units) runs xla: JAX does not compute on a GPU here"
    assert str(explanation).splitlines()[0] == text


PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))
import jax.numpy as jnp, jaxrnn
params = jaxrnn.GRUParams(jnp.ones((2, 9)), jnp.ones((3, 9)), jnp.ones(9), jnp.ones(3))
explanation = jaxrnn.explain(jaxrnn.gru, params, jnp.ones((1, 3)), jnp.ones((4, 1, 2)))
print(explanation)
assert explanation.unavailable in str(explanation)
try:
    print(jaxrnn.explain(jaxrnn.gru, params, jnp.ones((1, 3)), jnp.ones((4, 1, 2)), device="a100"))
except NotImplementedError as error:
    print(error)
"""


def explained_without(monkeypatch, *packages):
    """Returns the lines that `PROGRAM` prints where packages are missing."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    done = subprocess.run([sys.executable, "-c", PROGRAM, *packages], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_missing_packages_are_explained(monkeypatch):
    here, missing, another, *_ = explained_without(monkeypatch, "torch", "triton")
    assert here == "gru(xs float32[4,1,2], 3 units) runs xla: JAX does not compute on a GPU here"
    text = "needs triton, which is not installed: pip install"
    assert text in missing and "to choose kernels for NVIDIA A100" in another and text in another


@pytest.mark.torch
def test_kernels_of_another_gpu_are_explained_without_torch(monkeypatch):
    _, missing, *another = explained_without(monkeypatch, "torch")
    assert 'needs an NVIDIA GPU, but JAX computes on "cpu" here' in missing
    assert another[0] == "on NVIDIA A100:" and "runs triton" in another[1]


@pytest.mark.quick
@pytest.mark.torch
@pytest.mark.parametrize(
    ("device", "hidden", "forward", "backward"),
    [
        ("a100", 32, "fma", "fma"),
        ("h100", 128, "resident", "resident"),
        ("rtx4090", 512, "split_registers", "split_registers"),
        ("h200", 1024, "rows", "rows"),
        ("a100", 1024, "split_registers", "streamed"),
        ("a100", 1536, "scan", "scan"),
    ],
)
def test_explain_names_the_kernels_of_a_gpu_that_is_not_there(device, hidden, forward, backward):
    explanation = explain_gru(128, 64, 128, hidden, device=device)
    assert explanation.implementation == "triton" and explanation.unavailable is None
    loops = {launch.direction: launch.loop for launch in explanation.launches if launch.computes == "gru"}
    assert loops == {"forward": forward, "backward": backward}
    assert ("runs lax.scan in place of every kernel: " in str(explanation)) == (forward == backward == "scan")
    for launch in explanation.launches:
        if launch.computes != "gru":
            continue
        name = f"gru_{'fwd' if launch.direction == 'forward' else 'bwd'}_{launch.loop}"
        assert (launch.problem.hidden, launch.problem.sequences, launch.times) == (hidden, 64, 1)
        if launch.loop == "scan":
            kernels, how = (), "lax.scan, estimated to be faster than the kernel"
        else:
            kernels, how = (name,), f"{launch.loop} loop, {name} ({launch.programs[0]} program"
        assert launch.kernels == kernels and f"gru {launch.direction}: {how}" in str(explanation)
        assert getattr(launch.tiling, "loop", "scan") == launch.loop


@pytest.mark.torch
def test_explain_lists_all_launches_of_a_call():
    launches = explain_gru(128, 64, 128, 128, device="h100").launches
    assert [launch.computes for launch in launches] == ["input projection", "gru", "gru", "weight gradients"]
    assert launches[-1].kernels == ("weight_grads_kernel", "sum_kernel")
    forward = explain_gru(128, 64, 128, 128, device="h100", gradients=False).launches
    assert [launch.direction for launch in forward] == ["forward", "forward"]
    recomputed = explain_gru(128, 64, 128, 128, device="a100", remat=True).launches
    assert [(launch.computes, launch.direction) for launch in recomputed[:3]] == [
        ("gru", "forward"), ("gru", "forward"), ("gru", "backward"),
    ]  # fmt: skip
    large = explain_gru(256, 2048, 128, 128, device="h100", remat=True).launches  # in eight chunks
    assert [launch.times for launch in large if launch.computes == "gru"] == [8, 8, 8]


@pytest.mark.torch
def test_explain_makes_the_choices_of_the_program(h200, monkeypatch):
    """Tracing begins to compile what a launch runs, so what `explain` found must be what was begun."""
    from torch_bridge import compiler
    from torch_bridge.kernels import loop_kernel

    begun = []
    monkeypatch.setattr(compiler, "begin_loading", lambda ordinal, compile, key, capability: begun.append(key))
    arrays = lstm_params(40, 200), (F32((100, 200)),) * 2, F32((128, 100, 40))

    def loss(params, carry, xs):
        return jaxrnn.lstm(params, carry, xs)[1].sum()

    explanation = jaxrnn.explain(loss, *arrays)
    assert explanation.implementation == "triton" and explanation.device == "NVIDIA H200"
    assert not begun, "explain compiles nothing"
    jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays)
    kernels = [(key[0].function, dict(key[1])) for key in begun]
    assert len(kernels) == sum(len(launch.kernels) for launch in explanation.launches) == 3
    loops = [launch for launch in explanation.launches if launch.computes == "lstm"]
    for launch, direction in zip(loops, ("fwd", "bwd"), strict=True):
        kernel = loop_kernel(launch.loop, direction)
        (constants,) = [constants for function, constants in kernels if function is kernel]
        assert (constants["H"], constants["BLOCK_B"]) == (200, launch.tiling.block_b)


@pytest.mark.torch
def test_explain_counts_what_vmap_adds():
    """`vmap` over weights adds models to a launch, and over inputs it adds sequences."""

    def stacked(tree):
        return jax.tree.map(lambda x: F32((3, *x.shape)), tree)

    arrays = gru_arrays()
    seeds = jaxrnn.explain(jax.vmap(outputs_of_gru), *stacked(arrays), device="h100")
    assert {(x.problem.models, x.problem.sequences) for x in seeds.launches} == {(3, B)}
    more = jaxrnn.explain(jax.vmap(outputs_of_gru, (None, None, 0)), *arrays[:2], stacked(arrays[2]), device="h100")
    assert {(x.problem.models, x.problem.sequences) for x in more.launches} == {(1, 3 * B)}


@pytest.mark.torch
def test_explain_reports_a_training_step_as_it_is():
    """The step differentiates by itself, in a scan, and calls one jitted function twice."""
    layer = jax.jit(outputs_of_gru)

    def step(params, carry, xs):
        def loss(params):
            return layer(params, carry, layer(params, carry, xs)).sum()

        def update(params, _):
            return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params)), None

        return jax.lax.scan(update, params, length=5)[0]

    arrays = gru_arrays(H)
    explanation = jaxrnn.explain(step, *arrays, device="a100")
    assert explanation.implementation == "triton"
    assert [(x.direction, x.times) for x in explanation.launches] == [("forward", 10), ("backward", 10)]
    assert ", 10 times;" in str(explanation)
    derivative = jaxrnn.explain(step, *arrays, device="a100", gradients=True)  # of gradients
    assert {x.direction for x in derivative.launches} == {"forward", "backward", "tangent"}


@pytest.mark.torch
def test_an_error_of_the_traced_gradient_says_how_to_explain_without():
    def run(params, carry, xs):
        return jax.pure_callback(lambda x: x, F32((T, B, H)), outputs_of_gru(params, carry, xs))

    with pytest.raises(ValueError, match="Pure callbacks do not support JVP") as info:
        jaxrnn.explain(run, *gru_arrays(), device="a100")
    assert any("gradients=False" in note for note in info.value.__notes__)


TANGENTS = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp-of-jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jvp-of-grad": lambda f, x: jax.jvp(jax.grad(f), (x,), (x,)),
    "jvp-of-scan": lambda f, x: jax.jvp(
        lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=2)[0], (x,), (x,)
    ),
}


TANGENT_KERNELS = {"gru": "gru_tangent_fma", "lstm": "lstm_tangent_fma"}


@pytest.mark.torch
@pytest.mark.parametrize(("cell", "remat"), [("gru", False), ("gru", True), ("lstm", False)])
@pytest.mark.parametrize("name", TANGENTS)
def test_explain_says_what_computes_a_derivative(name, cell, remat):
    def differentiate(params, carry, xs):
        run = getattr(jaxrnn, cell)
        return TANGENTS[name](lambda xs: run(params, carry, xs, remat=remat)[1].sum(), xs)

    arrays = gru_arrays()
    if cell == "lstm":
        params = jaxrnn.LSTMParams(F32((D, 4 * H)), F32((H, 4 * H)), F32((4 * H,)))
        arrays = params, (arrays[1], arrays[1]), arrays[2]
    explanation = jaxrnn.explain(differentiate, *arrays, device="a100")
    kernels = {launch.direction: launch.kernels for launch in explanation.launches}
    assert explanation.implementation == "triton"
    assert kernels.pop("tangent") == (() if remat else (TANGENT_KERNELS[cell],)) and all(kernels.values())
    assert [*kernels] == ["forward", *["backward"] * ("grad" in name)]
    by_xla = f"{cell} tangent: XLA, because no kernel computes this derivative"
    assert (by_xla in str(explanation)) == remat
    assert jaxrnn.explain(differentiate, *arrays).implementation == "xla"  # on the CPU


@pytest.mark.torch
def test_explain_says_what_xla_computes_of_a_derivative_of_a_norm():
    run = lambda x: jax.jvp(jax.grad(lambda x: jaxrnn.rms_norm(x, implementation="triton").sum()), (x,), (x,))  # noqa: E731
    launches = jaxrnn.explain(run, F32((T, H)), device="a100").launches
    assert {(x.computes, x.direction) for x in launches} == {
        ("rms_norm", "forward"), ("rms_norm", "backward"), ("rms_norm", "tangent"),
    }  # fmt: skip


@pytest.mark.torch
def test_launches_in_a_while_loop_have_no_number_of_times():
    def run(params, carry, xs):
        return jax.lax.while_loop(lambda ys: ys.sum() < 3, lambda ys: outputs_of_gru(params, carry, ys), xs)

    arrays = gru_arrays(H)
    for gradients in (None, False):  # with None the forward pass, because the function has no gradient
        (launch,) = jaxrnn.explain(run, *arrays, device="a100", gradients=gradients).launches
        assert launch.times is None and "in a while_loop" in str(launch)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jaxrnn.explain(run, *arrays, device="a100", gradients=True)


@pytest.mark.torch
def test_explain_lists_the_recurrences_and_norms_of_a_flax_module():
    model = jaxrnn.linen.GRU(H, num_layers=2, bidirectional=True, norm="rms")
    xs = F32((B, T, D))
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct(xs.shape, xs.dtype))
    explanation = jaxrnn.explain(model.apply, variables, xs, device="h100")
    assert [(x.name, x.implementation) for x in explanation.calls] == [
        ("gru", "triton"), ("rms_norm", "xla"), ("gru", "triton"),
    ]  # fmt: skip
    assert "both directions" in explanation.calls[0].arguments
    assert [len(x.launches) for x in explanation.calls] == [2, 0, 2]
    assert explanation.calls[1].reason == "XLA is faster for fewer than 4194304 elements"
    with pytest.raises(ValueError, match="3 recurrences and norms, not one"):
        _ = explanation.implementation


@pytest.mark.torch
def test_explain_lists_a_module_of_nnx():
    model = jaxrnn.nnx.LSTM(D, H, rngs=nnx.Rngs(0))
    explanation = jaxrnn.explain(model, F32((B, T, D)), device="rtx3090")
    assert {x.kernels[0] for x in explanation.launches} == {"lstm_fwd_fma", "lstm_bwd_fma"}


def test_modules_of_nnx_that_change_their_state_are_arguments():
    """An RNN takes a key from its `rngs` for the carry; a stack takes one for dropout."""
    xs = jnp.ones((3, 4, 2))
    rnn = jaxrnn.nnx.RNN(jaxrnn.nnx.GRUCell(2, 5, rngs=nnx.Rngs(0)))
    stack = jaxrnn.nnx.GRU(2, 5, num_layers=2, dropout_rate=0.1, rngs=nnx.Rngs(0))
    for module, recurrences in ((rnn, 1), (stack, 2)):
        with pytest.raises(flax.errors.TraceContextError) as caught:
            jaxrnn.explain(module, xs)
        assert "jaxrnn.explain(lambda module, xs: module(xs), module, xs)" in caught.value.__notes__[0]
        assert len(jaxrnn.explain(lambda module, xs: module(xs), module, xs).calls) == recurrences


def test_a_cell_of_flax_without_a_kernel_is_explained_and_rejected_by_default_triton():
    model, xs = jaxrnn.linen.RNN(nn.GRUCell(H, activation_fn=nn.relu)), jnp.ones((B, T, D))
    variables = jax.eval_shape(model.init, jax.random.key(0), xs)
    explanation = jaxrnn.explain(model.apply, variables, xs)
    assert explanation.implementation == "xla" and "nn.scan runs it" in str(explanation)
    cause = "cannot run a cell whose gate_fn is not sigmoid or whose activation_fn is not tanh"
    assert explanation.unavailable == cause
    text = rf'jaxrnn\.default_implementation\("triton"\) {cause}; pass implementation="xla", which'
    with jaxrnn.default_implementation("triton"), pytest.raises(NotImplementedError, match=text):
        jax.eval_shape(model.apply, variables, xs)


@pytest.mark.torch
def test_norms_that_flax_runs_are_explained(h200):
    norm, x = jaxrnn.linen.RMSNorm(), jnp.ones((4, 8))
    variables = norm.init(jax.random.key(0), x)
    explanation = jaxrnn.explain(lambda v, x: norm.apply(v, x, mask=x > 0), variables, x)
    (call,) = explanation.calls
    assert (call.name, call.arguments, call.implementation) == ("norm", "a mask", "xla")
    assert call.reason == "Flax's own norm runs it" and call.unavailable == "cannot run a norm with a mask"


@pytest.mark.torch
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_explain_shows_a_norm(norm):
    function = {"rms": jaxrnn.rms_norm, "layer": jaxrnn.layer_norm}[norm]
    explanation = jaxrnn.explain(function, F32((4096, 2048)), F32((2048,)), device="a100")
    assert [x.kernels[0] for x in explanation.launches] == [f"{norm}_norm_fwd", f"{norm}_norm_bwd"]
    assert [x.loop for x in explanation.launches] == [None, None]
    small = jaxrnn.explain(function, F32((4, 2048)), device="a100")
    assert small.implementation == "xla" and small.unavailable is None


@pytest.mark.torch
def test_explain_gives_the_reason_of_every_choice():
    assert explain_gru(1, device="a100").reason == "XLA is faster for a single step"
    assert explain_gru(device="a100", implementation="xla").reason == 'implementation="xla" was passed'
    assert explain_gru(device="a100", implementation="triton").reason == 'implementation="triton" was passed'
    assert explain_gru(batch=0, device="a100").reason == "there is nothing to compute"
    with jaxrnn.default_implementation("xla"):
        assert explain_gru(device="a100").reason == 'jaxrnn.default_implementation("xla") holds'
    wide = explain_gru(hidden=10_000, device="a100")
    assert wide.implementation == "xla" and "hidden width of 10000 is more than its 108" in wide.unavailable
    assert wide.unavailable in wide.reason
    precise = explain_gru(device="a100", precision="BF16_BF16_F32")
    assert "no kernel for precision" in precise.unavailable
    older = explain_gru(device="t4")  # before Ampere
    assert older.implementation == "xla" and older.launches == () and older.unavailable in older.reason
    assert older.unavailable.startswith("needs compute capability 8.0 (Ampere) or newer, Tesla T4 has 7.5: ")
    with pytest.raises(NotImplementedError, match=r"Tesla V100 has 7\.0"):
        explain_gru(device="v100", implementation="triton")


@pytest.mark.torch
def test_explaining_another_gpu_leaves_no_trace_in_later_calls():
    """Programs traced for the other GPU must not be found in JAX's caches."""
    run, arrays = jax.jit(functools.partial(jaxrnn.gru)), gru_arrays(make=jnp.ones)
    for _ in range(2):  # before the function is called for the first time, and after
        assert jaxrnn.explain(run, *arrays, device="a100").implementation == "triton"
        program = str(jax.make_jaxpr(run)(*arrays))
        assert "jaxrnn_launch" not in program and "jaxrnn_choice" not in program
        assert run(*arrays)[1].shape == (T, B, H)
        assert jaxrnn.explain(run, *arrays).implementation == "xla"


def test_explain_needs_a_function_and_a_known_gpu():
    with pytest.raises(ValueError, match=r"function must be callable, got an array .*; pass it and its arguments"):
        jaxrnn.explain(jnp.ones(2))
    with pytest.raises(ValueError, match=r"one of a10, a100, .*got 'a1000'"):
        explain_gru(device="a1000")


def test_the_table_of_gpus_lists_all_of_them():
    from torch_bridge import tiling

    text = (Path(__file__).parents[2] / "docs/choice.md").read_text()
    table = text[text.index("| | `device` |") : text.index("`there` is:")]
    names = re.findall('"(.+?)"', table)
    assert sorted(tiling.profile(name).name for name in names) == sorted(gpu.name for gpu in tiling.GPUS.values())


def test_explain_of_a_function_without_recurrences():
    explanation = jaxrnn.explain(jnp.sin, F32((2,)))
    assert explanation.calls == () and "no recurrence or norm" in str(explanation)


@pytest.mark.interpret
def test_explain_sees_the_interpreter():
    explanation = explain_gru(implementation="triton")
    assert explanation.device == "Triton's interpreter"
    assert [x.loop for x in explanation.launches] == ["streamed", "streamed"]


# the warning


@pytest.fixture
def warn_again(monkeypatch):
    """Makes this process warn once more."""
    monkeypatch.setattr(choice, "_warn_once", functools.cache(choice._warn_once.__wrapped__))


def hide(monkeypatch, package):
    monkeypatch.setattr(_bridge.availability, "_spec_missing", lambda name: name == package)


def no_torch(monkeypatch):
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    hide(monkeypatch, "torch")


def no_compiler(monkeypatch):
    def register():
        raise NativeLaunchError("the native launch needs a C compiler: install one")

    monkeypatch.setattr(method, "register", register)
    monkeypatch.setattr(method, "_choose", functools.cache(method._choose.__wrapped__))


def no_driver(monkeypatch):
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


CAUSES = {
    "no triton": (
        lambda patch: hide(patch, "triton"),
        r"needs triton, which is not installed: pip install",
    ),
    "no compiler for native": (
        lambda patch: (no_compiler(patch), patch.setenv("JAXRNN_LAUNCH", "native")),
        r"needs a C compiler: install one; or set JAXRNN_LAUNCH to callback",
    ),
    "no compiler and no torch": (
        lambda patch: (no_compiler(patch), hide(patch, "torch")),
        r"needs torch, which is not installed, because .* callback \(.* needs a C compiler:",
    ),
    "no driver": (no_driver, r"finds no CUDA device: install the torch build that matches your driver"),
}


@pytest.mark.torch
@pytest.mark.parametrize("cause", CAUSES)
def test_kernels_that_cannot_run_on_the_gpu_warn_once_with_the_remedy(cause, h200, warn_again, monkeypatch):
    pretend, remedy = CAUSES[cause]
    pretend(monkeypatch)
    with pytest.warns(jaxrnn.ImplementationWarning, match=remedy) as caught:
        for _ in range(2):
            run_gru()
            jax.jit(run_gru)()
            jaxrnn.rms_norm(jnp.ones((2**11, 2**11)))
    assert len(caught) == 1
    assert 'implementation="xla"' in str(caught[0].message) and caught[0].filename == __file__


@pytest.mark.torch
def test_without_a_compiler_launches_are_callbacks(h200, warn_again, monkeypatch):
    no_compiler(monkeypatch)
    assert jaxrnn.launch_method() == (
        "callback", "the native launch cannot be used here: the native launch needs a C compiler: install one",
    )  # fmt: skip
    assert _bridge.unusable() is None


@pytest.mark.torch
def test_no_warning_where_the_user_chose_or_the_input_or_the_vendor_decides(h200, warn_again, monkeypatch):
    """Only the cause that no kernel can run on an NVIDIA GPU, whatever its input, is worth a warning."""
    run_gru(precision="BF16_BF16_F32")  # the kernels do not take this input
    no_torch(monkeypatch)
    run_gru(implementation="xla")
    run_gru(steps=1)
    jaxrnn.rms_norm(jnp.ones((4, 8)))
    with jaxrnn.default_implementation("xla"):
        run_gru()
    with jax.default_device("cpu"):
        run_gru()
    with pytest.raises(NotImplementedError, match="needs torch"):
        run_gru(implementation="triton")
    client = jax.local_devices(backend="gpu")[0].client
    monkeypatch.setattr(client, "platform_version", "PJRT C API\nrocm 60300")
    run_gru()


# the log


def test_every_choice_is_logged_for_debugging_and_described_only_then(caplog, monkeypatch):
    with caplog.at_level(logging.DEBUG, logger="jaxrnn"):
        run_gru()
        jaxrnn.rms_norm(jnp.ones((4, 8)), implementation="xla")
    assert {record.levelname for record in caplog.records} == {"DEBUG"}
    assert [record.getMessage() for record in caplog.records if record.name == "jaxrnn"] == [
        "gru(xs float32[12,4,8], 16 units) runs xla: JAX does not compute on a GPU here",
        'rms_norm(x float32[4,8]) runs xla: implementation="xla" was passed',
    ]
    monkeypatch.setattr("jaxrnn.recurrent.describe_arrays", lambda **_: pytest.fail("described"))
    run_gru()


@pytest.mark.interpret
def test_launches_are_logged_with_loop_and_tiling(caplog):
    with caplog.at_level(logging.DEBUG, logger="jaxrnn"):
        jax.jit(functools.partial(jaxrnn.gru, implementation="triton")).lower(*gru_arrays(D + 1))
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0].endswith('runs triton: implementation="triton" was passed')
    assert re.fullmatch(
        r"gru forward: streamed loop, gru_fwd_streamed \(1 program\); tf32x3 products, block_h 16, .*", messages[1]
    )


# the default


def launches(function, *arrays):
    return str(jax.make_jaxpr(function)(*arrays)).count("jaxrnn_launch")


def test_default_implementation_rejects_other_names():
    with pytest.raises(ValueError, match='must be "triton", "xla" or None, got \'cuda\''):
        jaxrnn.default_implementation("cuda")


def test_default_implementation_can_be_entered_again_and_decorates():
    in_xla, found = jaxrnn.default_implementation("xla"), []
    for _ in range(2):
        with in_xla, jaxrnn.default_implementation(None), in_xla:
            found.append(context.default())
    assert found == ["xla", "xla"] and in_xla(context.default)() == "xla" and context.default() is None


def test_threads_leave_a_shared_default_implementation_in_any_order():
    in_xla, entered, left, found = jaxrnn.default_implementation("xla"), threading.Barrier(2), threading.Event(), []

    def first():
        with in_xla:
            entered.wait()
        found.append(context.default())
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    with in_xla:
        entered.wait()
        left.wait()
        assert context.default() == "xla"
    thread.join()
    assert found == [None] and context.default() is None


@pytest.mark.torch
def test_default_triton_raises_where_the_kernels_cannot_run(monkeypatch):
    no_torch(monkeypatch)
    with jaxrnn.default_implementation("triton"):
        for call in (run_gru, functools.partial(run_gru, 1), lambda: jaxrnn.rms_norm(jnp.ones((4, 8)))):
            with pytest.raises(NotImplementedError, match="the Triton implementation needs torch"):
                call()
        assert run_gru(implementation="xla")[1].shape == (T, B, H)
        with jaxrnn.default_implementation(None):
            assert run_gru()[1].shape == (T, B, H)
    assert run_gru()[1].shape == (T, B, H)


@pytest.mark.interpret
def test_default_is_a_part_of_what_jit_compares():
    """One jitted function, and functions that are jitted inside of it, follow the default of each call."""
    run = jax.jit(lambda: jax.jit(run_gru)()[1])
    assert launches(run) == 0
    with jaxrnn.default_implementation("triton"):
        assert launches(run) == 1
        with jaxrnn.default_implementation("xla"):
            assert launches(run) == 0
        assert jnp.allclose(run(), run_gru(implementation="triton")[1])
        assert launches(jax.jit(functools.partial(run_gru, implementation="xla"))) == 0
        assert launches(functools.partial(run_gru, 1)) == 1  # for which None means XLA, as for a small norm
        assert launches(lambda: jaxrnn.rms_norm(jnp.ones((4, 8)))) == 1
    assert launches(run) == 0


# names in profiles


@pytest.mark.torch
def test_operations_in_a_program_for_a_gpu_have_the_names_of_their_kernels(h200, monkeypatch):
    from torch_bridge import compiler

    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    monkeypatch.setattr(compiler, "begin_loading", lambda *_: None)
    monkeypatch.setattr(compiler, "ensure_loaded", lambda *_: None)

    def loss(params, carry, xs):
        return jaxrnn.gru(params, carry, xs)[1].sum()

    traced = jax.jit(jax.grad(loss)).trace(gru_params(128, 128), F32((64, 128)), F32((128, 64, 128)))
    text = traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    for name in ("projection_kernel", "gru_fwd_resident", "gru_bwd_resident", "weight_grads_kernel"):
        assert f"/{name}/" in text


def test_operations_of_a_recurrence_in_xla_have_its_name():
    run = jax.jit(functools.partial(jaxrnn.gru, implementation="xla"))
    assert "gru_xla" in run.lower(*gru_arrays()).as_text(debug_info=True)
