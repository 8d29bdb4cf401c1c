"""Every error message that `docs/troubleshooting.md` quotes is raised by a call of a user, and has a test here."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from pretended import pretend_gpus

import jaxrnn
from jaxrnn.linen import ScannedRNN

pytestmark = pytest.mark.torch

T, B, D, H = 4, 2, 3, 8
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md").read_text()


def gru(dtype=jnp.float32, hidden=H):
    """Runs a GRU by the kernels, or traces it if it is wide, as the first snippet of the page does."""
    shapes = (D, 3 * hidden), (hidden, 3 * hidden), (3 * hidden,), (hidden,)
    params = jaxrnn.GRUParams(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    carry, xs = jax.ShapeDtypeStruct((B, hidden), dtype), jax.ShapeDtypeStruct((T, B, D), dtype)
    return jax.eval_shape(lambda *arguments: jaxrnn.gru(*arguments, implementation="triton"), params, carry, xs)


def without_package(monkeypatch, missing):
    from jaxrnn._bridge import availability

    monkeypatch.setattr(availability, "_spec_missing", lambda name: name == missing)


def device(*arguments, **options):
    from torch_bridge.tiling import Device

    return Device(*arguments, **options)


def no_triton(monkeypatch):
    without_package(monkeypatch, "triton")
    gru()


def older_triton(monkeypatch):
    """Imports the kernels with a Triton that has no Gluon."""
    import torch_bridge
    from jaxrnn._bridge import availability

    monkeypatch.delattr(torch_bridge, "gpu", raising=False)  # `from torch_bridge import gpu` finds it first
    monkeypatch.setitem(sys.modules, "torch_bridge.gpu", None)
    availability._import_fails.cache_clear()
    try:
        gru()
    finally:
        availability._import_fails.cache_clear()


def callback_without_torch(monkeypatch):
    pretend_gpus(monkeypatch, device())
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    without_package(monkeypatch, "torch")
    gru()


def no_gpu(monkeypatch):
    from torch_bridge import compiler

    monkeypatch.setattr(compiler, "interpreting", lambda: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    gru()


def torch_without_cuda(monkeypatch):
    import torch

    pretend_gpus(monkeypatch, device())
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    monkeypatch.setattr(torch.version, "cuda", None)
    gru()


def no_driver(monkeypatch):
    from torch_bridge import gpu

    pretend_gpus(monkeypatch, device())
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    monkeypatch.setattr(gpu, "driver_fails", lambda: "RuntimeError: Failed to find C compiler")
    gru()


def two_kinds(monkeypatch):
    pretend_gpus(monkeypatch, device(90, 132, name="H200"), device(80, 108, name="A100"))
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    gru()


def older(monkeypatch):
    pretend_gpus(monkeypatch, device(75, 68))
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    gru()


def double_precision(monkeypatch):
    with jax.enable_x64(True):
        gru(jnp.float64)


def wide(monkeypatch):
    pretend_gpus(monkeypatch, device(90, 132))
    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    gru(hidden=64 * 132 + 1)


class LSTM(ScannedRNN):
    cell_type: str = "lstm"


def another_checkpoint(monkeypatch):
    ins = jnp.ones((T, B, H)), jnp.zeros((T, B))
    params = ScannedRNN().init(jax.random.key(0), ScannedRNN.initialize_carry(B, H), ins)
    LSTM().apply(params, LSTM.initialize_carry(B, H), ins)


REFUSED = {
    "needs triton, which is not installed": no_triton,
    "needs Triton 3.6 or newer, but with the installed version its import fails": older_triton,
    "needs torch, which is not installed, because kernels are launched by a callback": callback_without_torch,
    'needs an NVIDIA GPU, but JAX computes on "cpu"': no_gpu,
    "needs a torch built for CUDA": torch_without_cuda,
    "cannot load kernels on this machine": no_driver,
    "needs all GPUs of a process to be of one kind": two_kinds,
    "needs compute capability 8.0": older,
    "takes float32, bfloat16 and float16": double_precision,
    "a hidden width of ... is more than its ... SMs can share": wide,
}
QUOTED = {
    "the given parameters must be under ...": (another_checkpoint, ValueError),
}


def test_every_message_of_the_page_has_a_test():
    (rows,) = re.findall(r"^\| the error says \|.*\n\| --- .*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert [line.split("|")[1].strip() for line in rows.splitlines()] == [*REFUSED]
    assert re.findall(r'^\*\*"(.+?)"\.?\*\*', PAGE, re.MULTILINE) == [*QUOTED]


def pattern(text):
    return re.escape(text).replace(re.escape("..."), ".*")


@pytest.mark.parametrize("text", REFUSED)
def test_the_kernels_refuse_with_the_message(text, monkeypatch):
    with pytest.raises(NotImplementedError, match=f"^gru: the Triton implementation .*{pattern(text)}"):
        REFUSED[text](monkeypatch)


@pytest.mark.parametrize("text", QUOTED)
def test_a_quoted_message_is_raised(text, monkeypatch):
    wrong_call, error = QUOTED[text]
    with pytest.raises(error, match=pattern(text)):
        wrong_call(monkeypatch)


@pytest.mark.quick
@pytest.mark.interpret
def test_the_calls_succeed_where_nothing_is_wrong():
    assert gru()[1].shape == (T, B, H)
