"""A mean of the inputs costs a GRU with LayerNorm no accuracy, although centered weights replace its subtraction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxrnn

T, B, H = 5, 4, 16
interpreted, gpu, pytorch = pytest.mark.interpret, pytest.mark.gpu, pytest.mark.torch


def make(D, mean):
    """Returns weights, biases, inputs and cotangent in float64; `mean` "relu" stands for the outputs of a ReLU."""
    rng = np.random.default_rng(0)
    w_ih, w_hh = (rng.normal(size=(rows, 3 * H)) / np.sqrt(D + H) for rows in (D, H))
    x = rng.normal(size=(T, B, D))
    return (
        w_ih,
        w_hh,
        rng.normal(size=3 * H),
        np.maximum(x, 0) if mean == "relu" else x + mean,
        rng.normal(size=(T, B, H)),
    )


def in_jax(arrays, implementation):
    """Returns the outputs and all gradients of `jaxrnn.norm_gru` for `(w_ih, w_hh, b, xs, cotangent)`, in float64."""
    *weights, xs, cotangent = arrays
    params = jaxrnn.NormGRUParams(*weights)
    carry = jnp.zeros((B, H), jnp.promote_types(xs.dtype, jnp.float32))

    def run(params, xs):
        return jaxrnn.norm_gru(params, carry, xs, norm="layer", implementation=implementation)[1]

    ys, vjp = jax.vjp(run, params, xs)
    dparams, dxs = vjp(jnp.asarray(cotangent, ys.dtype))
    return [np.asarray(x, np.float64) for x in (ys, dparams.w_ih, dparams.w_hh, dparams.b, dxs)]


def in_torch(arrays, implementation):
    """Returns the same results of `torch_bridge.functional.norm_gru`."""
    import torch

    from torch_bridge import functional

    *given, cotangent = arrays
    w_ih, w_hh, b, xs = (x.detach().clone().requires_grad_() for x in given)
    h0 = xs.new_zeros((B, H), dtype=torch.promote_types(xs.dtype, torch.float32))
    ys, _ = functional.norm_gru(xs, h0, w_ih.mT, w_hh.mT, b, norm="layer", implementation=implementation)
    ys.backward(cotangent.to(ys.dtype))
    return [x.detach().double().cpu().numpy() for x in (ys, w_ih.grad, w_hh.grad, b.grad, xs.grad)]


def assert_accurate(got, want, eps):
    for name, x, y in zip(("ys", "dw_ih", "dw_hh", "db", "dxs"), got, want, strict=True):
        error = np.linalg.norm(x - y) / np.linalg.norm(y)
        assert error <= eps, (name, error, eps)


@pytest.mark.parametrize("mean", [0, 1, 10, 100, "relu"])
@pytest.mark.parametrize("D", [16, 256])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("xla", "bfloat16"),
        ("xla", "float16"),
        pytest.param("triton", "float16", marks=interpreted),
        pytest.param("triton", "bfloat16", marks=gpu),
    ],
)
def test_a_mean_of_the_inputs_costs_no_accuracy(implementation, dtype, D, mean):
    w_ih, w_hh, b, xs, cotangent = make(D, mean)
    with jax.enable_x64(True):
        rounded = [jnp.asarray(x, dtype) for x in (w_ih, w_hh, b, xs)]
        want = in_jax([*(x.astype(jnp.float64) for x in rounded), cotangent], "xla")
        got = in_jax([*rounded, cotangent], implementation)
    assert_accurate(got, want, float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("mean", [0, 1, 10, 100, "relu"])
@pytest.mark.parametrize("D", [16, 256])
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        pytest.param("torch", "bfloat16", marks=pytorch),
        pytest.param("triton", "float16", marks=interpreted),
        pytest.param("triton", "bfloat16", marks=gpu),
    ],
)
def test_a_mean_of_the_inputs_costs_no_accuracy_in_pytorch(implementation, dtype, D, mean):
    import torch

    device = "cuda" if torch.cuda.is_available() and implementation == "triton" else "cpu"
    *given, cotangent = (torch.as_tensor(x) for x in make(D, mean))
    rounded = [x.to(getattr(torch, dtype)) for x in given]
    want = in_torch([*(x.double() for x in rounded), cotangent], "torch")
    got = in_torch([x.to(device) for x in (*rounded, cotangent)], implementation)
    assert_accurate(got, want, torch.finfo(getattr(torch, dtype)).eps)


@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=interpreted)])
def test_without_inputs_the_norm_sees_the_state_alone(implementation):
    _, w_hh, b, _, _ = make(0, 0)
    params = jaxrnn.NormGRUParams(jnp.zeros((0, 3 * H)), jnp.asarray(w_hh, jnp.float32), jnp.asarray(b, jnp.float32))
    carry = jnp.asarray(np.random.default_rng(1).normal(size=(B, H)), jnp.float32)
    options = {"norm": "layer", "implementation": implementation, "precision": "highest"}
    got, _ = jaxrnn.norm_gru(params, carry, jnp.zeros((1, B, 0)), **options)
    h = np.asarray(carry, np.float64)
    y = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-4)
    a_r, a_n, a_u = np.split(y @ w_hh + b, 3, axis=-1)
    u = 1 / (1 + np.exp(1 - a_u))
    np.testing.assert_allclose(got, u * np.tanh(a_n / (1 + np.exp(-a_r))) + (1 - u) * h, rtol=1e-5, atol=1e-5)


@pytest.mark.torch
def test_without_inputs_the_norm_sees_the_state_alone_in_pytorch():
    import torch

    from torch_bridge import functional

    _, w_hh, b, _, _ = make(0, 0)
    h0 = np.random.default_rng(1).normal(size=(B, H))
    given = (torch.as_tensor(x.astype(np.float32)) for x in (np.zeros((1, B, 0)), h0, np.zeros((3 * H, 0)), w_hh.T, b))
    _, h_n = functional.norm_gru(*given, norm="layer")
    params = jaxrnn.NormGRUParams(*(jnp.asarray(x, jnp.float32) for x in (np.zeros((0, 3 * H)), w_hh, b)))
    want, _ = jaxrnn.norm_gru(params, jnp.asarray(h0, jnp.float32), jnp.zeros((1, B, 0)), norm="layer")
    np.testing.assert_allclose(h_n.numpy(), want, rtol=1e-5, atol=1e-5)
