"""Wrong calls of `gru` and `lstm` raise errors that say what was expected, what was given and what to do."""

import functools
import os
import re
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from pretended import pretend_gpus

import jaxrnn

T, B, H, D = 4, 3, 5, 2


def gru_call(**changes):
    f32 = jnp.float32
    params = {"w_ih": (D, 3 * H), "w_hh": (H, 3 * H), "b_ih": (3 * H,), "b_hn": (H,)}
    call = {
        "params": jaxrnn.GRUParams(**{name: jnp.zeros(shape, f32) for name, shape in params.items()}),
        "carry": jnp.zeros((B, H)),
        "xs": jnp.zeros((T, B, D)),
    }
    return call | changes


def lstm_call(**changes):
    params = {"w_ih": (D, 4 * H), "w_hh": (H, 4 * H), "b": (4 * H,)}
    call = {
        "params": jaxrnn.LSTMParams(**{name: jnp.zeros(shape) for name, shape in params.items()}),
        "carry": (jnp.zeros((B, H)), jnp.zeros((B, H))),
        "xs": jnp.zeros((T, B, D)),
    }
    return call | changes


CALLS = {"gru": (jaxrnn.gru, gru_call), "lstm": (jaxrnn.lstm, lstm_call)}
RESETS, ZEROS = jnp.zeros((T, B), bool), jnp.zeros


def replaced(cell, **weights):
    return CALLS[cell][1]()["params"]._replace(**weights)


# (wrong arguments, error text); `WRONG` adds the cell
BOTH = [
    ({"xs": ZEROS((D,))}, "xs must be [T, *batch, D], got (2,)"),
    ({"xs": ZEROS((D,)), "time_major": False}, "xs must be [*batch, T, D], got (2,)"),
    ({"xs": ZEROS((T, B, D), jnp.int32)}, "xs must be floating point, got int32; convert it first"),
    ({"xs": ZEROS((T, B + 1, D))}, "batch axes (4,) as in xs [T, *batch, D] = (4, 4, 2), got (3, 5)"),
    ({"xs": ZEROS((T, B, 1, D))}, "batch axes (3, 1) as in xs [T, *batch, D] = (4, 3, 1, 2), got (3, 5)"),
    ({"time_major": False}, "batch axes (4,) as in xs [*batch, T, D] = (4, 3, 2), got (3, 5)"),
    ({"resets": ZEROS((B, T))}, "resets must be [T, *batch] = (4, 3) as in xs (4, 3, 2), got (3, 4)"),
    ({"resets": ZEROS((T,))}, "resets must be [T, *batch] = (4, 3) as in xs (4, 3, 2), got (4,)"),
    ({"resets": ZEROS((T, B, 1))}, "resets must be [T, *batch] = (4, 3) as in xs (4, 3, 2), got (4, 3, 1)"),
    ({"implementation": "cuda"}, 'implementation must be "triton", "xla" or None, got \'cuda\''),
    ({"implementation": True}, 'implementation must be "triton", "xla" or None, got True'),
]
WRONG = [(cell, *wrong) for cell in ("gru", "lstm") for wrong in BOTH] + [
    (
        "gru",
        {"params": replaced("lstm")},
        "gru: params must be GRUParams(w_ih, w_hh, b_ih, b_hn), got LSTMParams",
    ),
    ("gru", {"params": replaced("gru")._asdict()}, "; use GRUParams(**params)"),
    ("gru", {"params": tuple(replaced("gru"))}, "got a tuple of 4; use GRUParams(*params)"),
    ("gru", {"params": replaced("gru", w_ih=ZEROS((3 * H, D)))}, "params.w_ih must be (2, 15)"),
    ("gru", {"params": replaced("gru", w_hh=ZEROS((H, 4 * H)))}, "params.w_hh must be (5, 15)"),
    ("gru", {"params": replaced("gru", b_ih=ZEROS((H,)))}, "params.b_ih must be (15,)"),
    ("gru", {"params": replaced("gru", b_hn=ZEROS((3 * H,)))}, "params.b_hn must be (5,)"),
    ("gru", {"params": replaced("gru", b_hn=ZEROS((H,), int))}, "params.b_hn must be floating point, got int32"),
    ("gru", {"xs": ZEROS((T, B, D + 1))}, "params.w_ih must be (3, 15) for xs of width 3 and a carry of width 5"),
    (
        "gru",
        {"carry": ZEROS((B, H + 1))},
        "carry must have the width 5 of params.w_hh (5, 15), got 6; make it",
    ),
    (
        "gru",
        {"params": replaced("gru", w_hh=ZEROS((H + 1, 3 * H)))},
        "; make the weights for these widths, or pass",
    ),
    ("gru", {"xs": ZEROS((T, 2))}, "xs has as many axes as carry, and needs a time axis besides: add what is missing"),
    ("gru", {"resets": ZEROS((T + 1, B))}, "; pass an entry for every step of every sequence"),
    (
        "gru",
        {"reset_state": ZEROS((H + 1,)), "resets": ZEROS((T, B))},
        "; pass one state for all, or one for each",
    ),
    ("gru", {"carry": (ZEROS((B, H)),) * 2}, "carry must be one array for a GRU, [*batch, H], got a tuple of 2"),
    ("gru", {"carry": ZEROS(())}, "carry must be [*batch, H], got a scalar"),
    ("gru", {"carry": ZEROS((H,))}, "carry must be [*batch, H] with batch axes (3,)"),
    ("gru", {"carry": ZEROS((B, H), jnp.int32)}, "carry must be floating point, got int32; convert it first"),
    (
        "gru",
        {"reset_state": ZEROS(H)},
        "gru: reset_state is given but resets is None; pass resets, or leave it out",
    ),
    (
        "gru",
        {"resets": RESETS, "reset_state": ZEROS(H + 1)},
        "reset_state must be [H] = (5,), [*batch, H] = (3, 5) or [T, *batch, H] = (4, 3, 5), got (6,)",
    ),
    ("gru", {"resets": RESETS, "reset_state": ZEROS((T, H))}, "reset_state must be [H] = (5,)"),
    ("gru", {"resets": RESETS, "reset_state": ZEROS(H, bool)}, "reset_state must be floating point, got bool"),
    (
        "gru",
        {"xs": ZEROS((B, T, D)), "time_major": False, "resets": RESETS.T, "reset_state": ZEROS((T, B, H))},
        "or [*batch, T, H] = (3, 4, 5), got (4, 3, 5)",
    ),
    (
        "gru",
        {"xs": ZEROS((B, T, D)), "time_major": False, "resets": RESETS},
        "resets must be [*batch, T] = (3, 4) as in xs (3, 4, 2), got (4, 3)",
    ),
    ("lstm", {"params": replaced("gru")}, "lstm: params must be LSTMParams(w_ih, w_hh, b, w_hr), got GRUParams"),
    ("lstm", {"params": replaced("lstm", w_ih=ZEROS((4 * H, D)))}, "params.w_ih must be (2, 20)"),
    ("lstm", {"params": replaced("lstm", w_hh=ZEROS((H, 3 * H)))}, "params.w_hh must be (5, 20)"),
    ("lstm", {"params": replaced("lstm", b=ZEROS((3 * H,)))}, "params.b must be (20,)"),
    ("lstm", {"carry": ZEROS((B, H))}, "carry must be a pair (c, h) for an LSTM, two arrays [*batch, H], got an array"),
    (
        "lstm",
        {"carry": (ZEROS((B, H)),) * 3},
        "got a tuple of 3; pass both, for a new episode the zeros that initialize_carry of a module returns",
    ),
    ("lstm", {"carry": (ZEROS((B, H + 1)), ZEROS((B, H)))}, "both [*batch, H]; got c (3, 6) and h (3, 5)"),
    ("lstm", {"carry": (ZEROS((B, H + 1)),) * 2}, "carry must have the width 5 of params.w_hh (5, 20), got 6; make it"),
    ("lstm", {"carry": (ZEROS((B, H), int), ZEROS((B, H)))}, "carry[0] must be floating point, got int32"),
    ("lstm", {"carry": (ZEROS((B, H)), ZEROS((B, H), int))}, "carry[1] must be floating point, got int32"),
    ("lstm", {"carry": (ZEROS(()), ZEROS(()))}, "carry[1] must be [*batch, H], got a scalar"),
    ("lstm", {"reset_state": (ZEROS(H), ZEROS(H))}, "reset_state[0] is given but resets is None"),
    ("lstm", {"resets": RESETS, "reset_state": ZEROS(H)}, "reset_state must be a pair (c, h) for an LSTM"),
    ("lstm", {"resets": RESETS, "reset_state": (ZEROS(H), ZEROS(1))}, "reset_state[1] must be [H] = (5,)"),
    ("lstm", {"resets": RESETS, "reset_state": (ZEROS(H, int), ZEROS(H))}, "reset_state[0] must be floating point"),
]


@pytest.mark.quick("cell")
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("cell", "wrong", "text"), WRONG, ids=[f"{cell}-{'-'.join(wrong)}-{i}" for i, (cell, wrong, _) in enumerate(WRONG)]
)
def test_wrong_call_raises_a_precise_error(cell, wrong, text, jitted):
    function, make = CALLS[cell]
    call = make(**wrong)
    static = {name: call.pop(name) for name in ("implementation", "time_major") if name in call}

    def run(call):
        return function(call.pop("params"), call.pop("carry"), call.pop("xs"), **call, **static)

    with pytest.raises(ValueError, match=re.escape(text)):
        (jax.jit(run) if jitted else run)(call)


@pytest.mark.quick
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_base_call_of_the_wrong_calls_succeeds(cell):
    function, make = CALLS[cell]
    assert function(**make(resets=RESETS))[1].shape == (T, B, H)


PROGRAM = """
import sys
for name in {blocked}:
    sys.modules[name] = None
import jax, jax.numpy as jnp, jaxrnn

def zeros(*shape):
    return jnp.zeros(shape)

def gru(implementation):
    params = jaxrnn.GRUParams(zeros(2, 9), zeros(3, 9), zeros(9), zeros(3))
    return lambda: jaxrnn.gru(params, zeros(1, 3), zeros(4, 1, 2), implementation=implementation)

def lstm(implementation):
    params = jaxrnn.LSTMParams(zeros(2, 12), zeros(3, 12), zeros(12))
    return lambda: jaxrnn.lstm(params, (zeros(1, 3),) * 2, zeros(4, 1, 2), implementation=implementation)

for call in (gru, lstm):
    for wrap in (lambda f: f, jax.jit):
        assert wrap(call(None))()[1].shape == (4, 1, 3)
        try:
            wrap(call("triton"))()
        except NotImplementedError as error:
            print(error)
        else:
            sys.exit("ran")
"""


@pytest.mark.parametrize(
    ("blocked", "texts"),
    [
        pytest.param((), ["NVIDIA GPU"], marks=pytest.mark.torch, id="no-gpu"),
        pytest.param(("torch",), ["NVIDIA GPU"], marks=pytest.mark.torch, id="no-torch"),
        pytest.param(("triton",), ["needs triton", "pip install"], marks=pytest.mark.torch, id="no-triton"),
        pytest.param(
            ("triton.experimental",), ["needs Triton 3.6", "pip install"], marks=pytest.mark.torch, id="old-triton"
        ),
        pytest.param(("torch", "triton"), ["needs triton", "pip install"], id="neither"),
    ],
)
def test_unavailable_triton_raises_and_names_the_remedy(blocked, texts):
    """The error is raised eagerly and under `jit`; `implementation=None` still runs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    program = textwrap.dedent(PROGRAM).format(blocked=list(blocked))
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    errors = result.stdout.splitlines()
    assert len(errors) == 4
    for error in errors:
        for text in ["Triton implementation", 'implementation="xla"', *texts]:
            assert text in error


@pytest.mark.interpret
def test_triton_rejects_float64():
    with jax.enable_x64(True):
        call = gru_call(xs=jnp.zeros((T, B, D), jnp.float64))
        with pytest.raises(NotImplementedError, match=r'takes float32, bfloat16 and float16, not float64.*"xla"'):
            jaxrnn.gru(**call, implementation="triton")
        assert jaxrnn.gru(**call)[1].shape == (T, B, H)


@pytest.mark.interpret
def test_triton_rejects_a_dot_algorithm_as_precision():
    with pytest.raises(NotImplementedError, match=r'no kernel for precision.*BF16.*implementation="xla"'):
        jaxrnn.gru(**gru_call(), implementation="triton", precision="BF16_BF16_F32")


@pytest.mark.interpret
def test_triton_rejects_a_hidden_width_beyond_the_limit_of_the_device():
    H = 10_000
    params = jaxrnn.GRUParams(*(jax.ShapeDtypeStruct(x, jnp.float32) for x in ((D, 3 * H), (H, 3 * H), (3 * H,), (H,))))
    carry, xs = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((B, H), (T, B, D)))
    call = jax.jit(functools.partial(jaxrnn.gru, implementation="triton"))
    with pytest.raises(NotImplementedError, match=r'hidden width of 10000 is more than.*implementation="xla"'):
        call.lower(params, carry, xs)


@pytest.mark.interpret
@pytest.mark.parametrize("name", ["params", "carry", "xs"])
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_triton_rejects_bfloat16_in_the_interpreter(cell, name):
    """The call is rejected if any argument is bfloat16; `implementation=None` still runs."""
    function, make = CALLS[cell]
    call = make()
    call[name] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), call[name])
    text = "computes bfloat16 products wrongly in Triton's interpreter: use float32 or float16"
    with pytest.raises(NotImplementedError, match=f'the Triton implementation {text}.*implementation="xla"'):
        function(**call, implementation="triton")
    assert function(**call)[1].shape == (T, B, H)


NO_ARRAYS = [
    ({"xs": None}, "xs must be an array, got None"),
    ({"xs": [[0.0]]}, "xs must be an array, got a list of 1"),
    (
        {"carry": None},
        "carry must be one array for a GRU, [*batch, H], got None; pass zeros for a new episode, as "
        "initialize_carry of a module returns",
    ),
    ({"carry": {"h": 0}}, "carry must be one array for a GRU, [*batch, H], got a dict with h"),
    ({"params": replaced("gru", b_hn=None)}, "params.b_hn must be an array, got None"),
    ({"resets": [[0] * B] * T}, "resets must be an array, got a list of 4"),
    ({"reverse": "odd"}, "reverse must be True or False, got 'odd'"),
    ({"remat": 2}, "remat must be True or False, got 2"),
]


@pytest.mark.parametrize(("wrong", "text"), NO_ARRAYS, ids=range(len(NO_ARRAYS)))
def test_arguments_that_must_be_arrays_or_bools_are_checked(wrong, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        jaxrnn.gru(**gru_call(**wrong))


def test_key_resets_traced_flags_and_lists_are_rejected():
    keys = jax.random.split(jax.random.key(0), (T, B))
    with pytest.raises(ValueError, match="resets must be an array of numbers, got dtype key"):
        jaxrnn.gru(**gru_call(resets=keys))
    with pytest.raises(ValueError, match="reverse must be known when the program is traced"):
        jax.jit(jaxrnn.gru)(**gru_call(), reverse=True)
    with pytest.raises(ValueError, match="rms_norm: x must be an array, got a list of 2"):
        jaxrnn.rms_norm([1.0, 2.0])


def test_gru_rejects_a_pair_as_reset_state():
    call = gru_call()
    state = (call["carry"], call["carry"])
    resets = jnp.zeros(call["xs"].shape[:-1], bool)
    with pytest.raises(ValueError, match=r"reset_state must be one array for a GRU, .* got a tuple of 2"):
        jaxrnn.gru(**call, resets=resets, reset_state=state)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("capability", "text"), [(75, r"compute capability 8\.0 \(Ampere\) or newer, this GPU has 7\.5"), (80, None)]
)
def test_triton_rejects_gpus_before_ampere(monkeypatch, capability, text):
    from jaxrnn import _bridge
    from torch_bridge.tiling import Device

    pretend_gpus(monkeypatch, *[Device(capability, 40, 65_536)] * 2)
    reason = _bridge.unsupported([jnp.float32], 64)
    assert reason is None if text is None else re.search(text + '.*implementation="xla"', reason)


@pytest.mark.torch
def test_triton_rejects_gpus_of_different_kinds(monkeypatch):
    from jaxrnn import _bridge
    from torch_bridge.tiling import Device

    pretend_gpus(monkeypatch, Device(90, 132, name="H200"), Device(80, 108, name="A100"))
    text = r"of one kind, got A100 \(108 SMs\), H200 \(132 .*CUDA_VISIBLE_DEVICES.*implementation=\"xla\""
    assert re.search(text, _bridge.unsupported([jnp.float32], 64))


@pytest.mark.torch
def test_gpus_of_one_kind_may_run_different_numbers_of_clusters_at_once(monkeypatch):
    """All processes of a program compile the same one, so it has no clusters if there are several."""
    from jaxrnn import _bridge
    from jaxrnn._bridge import availability
    from torch_bridge.tiling import Device

    pretend_gpus(monkeypatch, Device(clusters=(0, 132, 66, 38, 31)), Device(clusters=(0, 132, 66, 39, 30)))
    assert _bridge.unsupported([jnp.float32], 64) is None
    assert availability.chosen_device().clusters == (0, 132, 66, 38, 30)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert availability.chosen_device().clusters == ()


@pytest.mark.torch
def test_triton_rejects_a_torch_built_without_cuda(monkeypatch):
    import torch

    from jaxrnn import _bridge
    from torch_bridge.tiling import Device

    pretend_gpus(monkeypatch, Device())
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert re.search('needs a torch built for CUDA.*implementation="xla"', _bridge.unsupported([jnp.float32], 64))


@pytest.mark.torch
def test_failing_triton_driver_warns_once_and_xla_runs(monkeypatch):
    import triton

    from jaxrnn import _bridge, choice
    from torch_bridge import gpu
    from torch_bridge.tiling import Device

    class Driver:
        @property
        def active(self):
            raise RuntimeError("Failed to find C compiler")

    pretend_gpus(monkeypatch, Device())
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    monkeypatch.setattr(gpu, "driver_fails", gpu.DriverCheck())
    monkeypatch.setattr(triton.runtime, "driver", Driver())
    monkeypatch.setattr(choice, "_warn_once", functools.cache(choice._warn_once.__wrapped__))
    text = "RuntimeError: Failed to find C compiler"
    assert re.search(text + '.*implementation="xla"', _bridge.unsupported([jnp.float32], 64))
    with pytest.warns(jaxrnn.ImplementationWarning, match=text):
        assert jaxrnn.gru(**gru_call())[1].shape == (T, B, H)
    assert jaxrnn.gru(**gru_call())[1].shape == (T, B, H)
    with pytest.raises(NotImplementedError, match=text):
        jaxrnn.gru(**gru_call(), implementation="triton")


@pytest.mark.interpret
def test_triton_rejects_interpreted_kernels_on_a_gpu(monkeypatch):
    from jaxrnn import _bridge

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "unset it, set JAX_PLATFORMS=cpu" in _bridge.unsupported([jnp.float32], 64)
