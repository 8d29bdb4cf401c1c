"""Tests the MGU, the simple RNN and the normed GRU of `torch_bridge` against loops over their equations, in autograd.

The loops are in float64. `test_torch_nn.py` compares the modules with those of `torch.nn`, and `test_torch_ops.py`
tests the operators.
"""

import functools
import itertools

import oracle
import pytest
from torch_calls import torch

from torch_bridge import functional, nn

FUNCTIONS = {"mgu": functional.mgu, "tanh": functools.partial(functional.rnn, nonlinearity="tanh"),
             "relu": functools.partial(functional.rnn, nonlinearity="relu"), "rms": functional.norm_gru,
             "layer": functools.partial(functional.norm_gru, norm="layer")}  # fmt: skip
MODULES = {"mgu": nn.MGU, "tanh": functools.partial(nn.RNN, nonlinearity="tanh"),
           "relu": functools.partial(nn.RNN, nonlinearity="relu"), "rms": nn.NormGRU,
           "layer": functools.partial(nn.NormGRU, norm="layer")}  # fmt: skip
GATES = {"mgu": 2, "tanh": 1, "relu": 1, "rms": 3, "layer": 3}
NORMED = ("rms", "layer")
every_cell = pytest.mark.parametrize("cell", FUNCTIONS)
NAMES = ("xs", "h0", "w_ih", "w_hh", "b_ih", "b_hh", "reset_state")


def make_arrays(cell, T, B, D, H, reset_state="h", batch_first=False, seed=0):
    """Returns float32 arguments by name, with resets, and cotangents of both outputs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    outer, wide = (B, T) if batch_first else (T, B), GATES[cell] * H
    shape = {None: None, "h": (H,), "bh": (B, H), "tbh": (*outer, H)}[reset_state]
    arrays = {"xs": normal(*outer, D), "h0": normal(B, H)}
    arrays |= {"w_ih": normal(wide, D) / D**0.5, "w_hh": normal(wide, H) / H**0.5}
    arrays |= {"b_ih": normal(wide) / 2, "b_hh": normal(wide) / 2}
    if cell in NORMED:
        arrays |= {"scale_i": normal(D), "scale_h": normal(H)}
        arrays |= {"shift_i": normal(D), "shift_h": normal(H)} if cell == "layer" else {}
    arrays["reset_state"] = None if shape is None else normal(*shape)
    resets = torch.rand(outer, generator=generator) < 0.3
    return arrays, resets, (normal(*outer, H), normal(B, H))


def normed_step(cell, x, h, w_ih, w_hh, bias, scale_i, scale_h, shift_i=0.0, shift_h=0.0):
    """Returns the hidden state after a step of a GRU whose gates see a norm."""
    both, inputs = torch.cat((x, h), -1), x.shape[-1]
    both = both if cell == "rms" else both - both.mean(-1, keepdim=True)
    both = both / (both.square().mean(-1, keepdim=True) + 1e-4).sqrt()
    y_i, y_h = both[:, :inputs] * scale_i + shift_i, both[:, inputs:] * scale_h + shift_h
    a_r, a_n, a_u = (y_i @ w_ih.T + y_h @ w_hh.T + bias).chunk(3, -1)
    u = torch.sigmoid(a_u - 1)
    return u * torch.tanh(torch.sigmoid(a_r) * a_n) + (1 - u) * h


def step(cell, x, hidden, h):
    """Returns the hidden state after a step, given the products with the inputs and with `h`, with their biases."""
    if cell != "mgu":
        return {"tanh": torch.tanh, "relu": torch.relu}[cell](x + hidden)
    (x_f, x_n), (h_f, h_n) = x.chunk(2, -1), hidden.chunk(2, -1)
    f = torch.sigmoid(x_f + h_f)
    return (1 - f) * torch.tanh(x_n + f * h_n) + f * h


def looped(cell, xs, h0, w_ih, w_hh, b_ih, b_hh, *, resets, reset_state, reverse, batch_first, **of_norm):
    """Computes the function of a cell step by step."""
    if batch_first:
        xs, resets = xs.transpose(0, 1), resets.T
        reset_state = reset_state.transpose(0, 1) if reset_state is not None and reset_state.ndim == 3 else reset_state
    h, ys, steps = h0, {}, range(len(xs))
    for t in reversed(steps) if reverse else steps:
        new = torch.zeros_like(h) if reset_state is None else reset_state[t] if reset_state.ndim == 3 else reset_state
        h = torch.where(resets[t][:, None], new, h)
        if cell in NORMED:
            h = ys[t] = normed_step(cell, xs[t], h, w_ih, w_hh, b_ih + b_hh, **of_norm)
        else:
            h = ys[t] = step(cell, xs[t] @ w_ih.T + b_ih, h @ w_hh.T + b_hh, h)
    return torch.stack([ys[t] for t in steps], 1 if batch_first else 0), h


def with_gradients(function, given, cotangents, dtype, device="cpu"):
    """Returns outputs and gradients by name, in float64 NumPy, of a call with arrays of a dtype."""
    leaves = {name: x.to(device, dtype).requires_grad_() for name, x in given[0].items() if x is not None}
    arrays = dict.fromkeys(NAMES) | leaves
    reset_state = arrays.pop("reset_state")
    of_norm = {name: arrays.pop(name) for name in [*arrays] if name not in NAMES}
    outputs = function(*arrays.values(), resets=given[1].to(device), reset_state=reset_state, **of_norm)
    found = torch.autograd.grad(
        outputs, list(leaves.values()), [x.to(device, y.dtype) for x, y in zip(cotangents, outputs, strict=True)]
    )
    results = dict(zip(("ys", "h_n"), outputs, strict=True)) | {
        f"d{name}": x for name, x in zip(leaves, found, strict=True)
    }
    return {name: x.detach().double().cpu().numpy() for name, x in results.items()}


def assert_close(got, want, bound):
    errors = {name: oracle.error(x, want[name]) for name, x in got.items()}
    assert not {name: e for name, e in errors.items() if not e <= (bound(name) if callable(bound) else bound)}


FORMS = [
    *itertools.product((None, "h", "bh", "tbh"), (False, True), (False,)),
    ("h", False, True), ("bh", True, True), ("tbh", True, True),
]  # fmt: skip


@pytest.mark.parametrize("implementation", [None, "torch"])
@pytest.mark.parametrize(("reset_state", "reverse", "batch_first"), FORMS, ids=str)
@every_cell
def test_resets_and_reset_states_match_a_loop(cell, reset_state, reverse, batch_first, implementation):
    *given, cotangents = make_arrays(cell, 6, 4, 3, 7, reset_state, batch_first)
    options = {"reverse": reverse, "batch_first": batch_first}
    want = with_gradients(functools.partial(looped, cell, **options), given, cotangents, torch.float64)
    function = functools.partial(FUNCTIONS[cell], implementation=implementation, **options)
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        assert_close(with_gradients(function, given, cotangents, dtype), want, bound)


INTERPRETED = [
    # T, B, H, reset state, precision, dtype, reverse, batch first
    (3, 5, 12, "tbh", "tf32x3", torch.float32, False, False), (3, 2, 12, None, "tf32x3", torch.float32, True, True),
    (3, 2, 70, "bh", "tf32x3", torch.float32, False, False), (2, 19, 70, "tbh", "tf32x3", torch.float32, True, False),
    (3, 2, 36, "h", "tf32", torch.float32, False, False), (2, 3, 136, "h", "tf32", torch.float32, False, True),
    (3, 3, 17, "h", "tf32", torch.float16, True, False), (2, 3, 70, "tbh", "tf32", torch.float16, False, False),
    (1, 1, 1, "h", "tf32x3", torch.float32, False, False),
]  # fmt: skip


@pytest.mark.quick("cell")
@pytest.mark.interpret
@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: "-".join(map(str, case)))
@every_cell
def test_kernels_match_a_loop(cell, case):
    T, B, H, reset_state, precision, dtype, reverse, batch_first = case
    *given, cotangents = make_arrays(cell, T, B, 4, H, reset_state, batch_first)
    given[0] = {name: x if x is None else x.to(dtype) for name, x in given[0].items()}
    options = {"reverse": reverse, "batch_first": batch_first}
    want = with_gradients(functools.partial(looped, cell, **options), given, cotangents, torch.float64)
    options |= {"precision": precision, "implementation": "triton"}
    got = with_gradients(functools.partial(FUNCTIONS[cell], **options), given, cotangents, dtype)
    # where a tanh saturates, 1 - h^2 is small, and the rounding error of h is not
    assert_close(got, want, 2.0**-9 if dtype == torch.float16 else 2e-3 if precision == "tf32" else 2e-6)


@pytest.mark.interpret
@every_cell
def test_two_directions_and_several_models_take_the_kernels(cell):
    """Checks `torch.vmap` over weights of a module with two directions, whose directions are models too."""
    modules = [MODULES[cell](3, 12, bidirectional=True) for _ in range(2)]
    xs, resets = torch.randn(4, 3, 3), torch.rand(4, 3) < 0.3
    params, buffers = torch.func.stack_module_state(modules)
    results = []
    for implementation in ("triton", "torch"):
        modules[0].implementation = implementation

        def run(params, buffers):
            return torch.func.functional_call(modules[0], (params, buffers), (xs,), {"resets": resets})[0]

        ys = torch.vmap(run)(params, buffers)
        results.append([ys, *torch.autograd.grad(ys.square().sum(), list(params.values()))])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", [None, "torch", pytest.param("triton", marks=pytest.mark.interpret)])
@every_cell
def test_nan_stays_until_a_reset(cell, implementation):
    """Checks that a ReLU returns NaN for NaN, as that of PyTorch does, and that no NaN crosses a reset."""
    arrays, _, _ = make_arrays(cell, 4, 2, 3, 12)
    arrays["xs"][0, 0] = torch.nan
    resets = torch.tensor([[0, 0], [0, 0], [1, 0], [0, 0]])
    reset_state = arrays.pop("reset_state")
    of_norm = {name: arrays.pop(name) for name in [*arrays] if name not in NAMES}
    ys, h_n = FUNCTIONS[cell](
        *arrays.values(), **of_norm, resets=resets, reset_state=reset_state, implementation=implementation
    )
    assert ys[:2, 0].isnan().all()
    assert ys[2:].isfinite().all() and ys[:, 1].isfinite().all() and h_n.isfinite().all()


def test_unknown_nonlinearity_raises():
    arrays, _, _ = make_arrays("tanh", 2, 2, 3, 4)
    with pytest.raises(ValueError, match=r"Unknown nonlinearity 'gelu'\. Select from 'tanh' or 'relu'"):
        functional.rnn(*list(arrays.values())[:4], nonlinearity="gelu")


ON_GPUS = [
    # H, B, precision, dtype, reset state: for each kind of kernel
    *((H, B, precision, torch.float32, state) for (H, B), precision, state in itertools.product(
        ((24, 3), (64, 64), (100, 5), (128, 300), (300, 16), (1000, 3)), ("tf32", "tf32x3"), (None, "h"))),
    *((H, 64, "tf32", dtype, None) for H, dtype in itertools.product(
        (24, 64, 128, 300), (torch.bfloat16, torch.float16))),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPUS, ids=lambda case: "-".join(map(str, case)))
@every_cell
def test_kernels_are_as_accurate_as_pytorchs_operations(cell, case):
    H, B, precision, dtype, reset_state = case
    *given, cotangents = make_arrays(cell, 13, B, 8, H, reset_state)
    given[0] = {name: x if x is None else x.to(dtype) for name, x in given[0].items()}
    options = {"reverse": False, "batch_first": False}
    want = with_gradients(functools.partial(looped, cell, **options), given, cotangents, torch.float64)
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    got, again, own = (
        with_gradients(
            functools.partial(FUNCTIONS[cell], precision=precision, implementation=name),
            given, cotangents, dtype, "cuda",
        )
        for name in ("triton", "triton", "torch")
    )  # fmt: skip
    floor = 2.0**-10 if precision == "tf32" else 2.0**-20

    def bound(name):
        # a rounding error that changes the sign of a gate changes the gradient of a ReLU from 0 to 1
        jumps = cell == "relu" and name.startswith("d")
        return max(2 * oracle.error(own[name], want[name]), 2.0**-5 if jumps else floor)

    assert_close(got, want, bound)
    assert all((got[name] == again[name]).all() for name in got)
