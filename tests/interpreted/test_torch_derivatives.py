"""Tests derivatives beyond the first gradient of `torch_bridge`, with kernels and without, against float64.

The reference is `implementation="torch"`, whose operations autograd differentiates.
"""

import functools
import os

import pytest
from torch_calls import torch

from torch_bridge import functional, nn

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # raised by `torch.func.jvp`

T, B, D, H = 4, 2, 3, 5
FORMS = {  # cell, options
    "gru": ("gru", {}), "reverse": ("gru", {"reverse": True}), "batch-first": ("gru", {"batch_first": True}),
    "lstm": ("lstm", {}), "projected": ("lstm", {"w_hr": True}), "mgu": ("mgu", {}), "tanh": ("rnn", {}),
    "rms": ("norm_gru", {}), "layer": ("norm_gru", {"norm": "layer"}),
}  # fmt: skip
GATES = {"gru": 3, "lstm": 4, "mgu": 2, "rnn": 1, "norm_gru": 3}
every_form = pytest.mark.parametrize("form", FORMS)
with_kernels = [
    pytest.param("triton", marks=getattr(pytest.mark, name), id=f"triton-{name}") for name in ("interpret", "gpu")
]
every_implementation = pytest.mark.parametrize("implementation", [None, *with_kernels])
kernels_only = pytest.mark.parametrize("implementation", with_kernels)


def device_of(implementation):
    return "cuda" if implementation == "triton" and os.environ["TRITON_INTERPRET"] == "0" else "cpu"


def arrays(form, dtype=torch.float64):
    """Returns inputs, states, weights, biases and reset states."""
    cell, options = FORMS[form]
    generator, wide = torch.Generator().manual_seed(0), GATES[cell] * H
    states = [H] if cell != "lstm" else [2 if "w_hr" in options else H, H]
    outer = (B, T) if "batch_first" in options else (T, B)
    shapes = [(*outer, D), *((B, n) for n in states), (wide, D), (wide, states[0]), (wide,), (wide,)]
    shapes += [(*outer, n) for n in states] + ([(2, H)] if "w_hr" in options else [])
    return [(0.5 * torch.randn(s, generator=generator, dtype=torch.float64)).to(dtype) for s in shapes]


def run(form, implementation, xs, *given):
    """Returns a number that depends on every result, with resets and reset states."""
    cell, options = FORMS[form]
    options, count = dict(options), 2 if cell == "lstm" else 1
    states, weights, reset = given[:count], given[count : count + 4], given[count + 4 : 2 * count + 4]
    if options.pop("w_hr", False):
        options["w_hr"] = given[-1]
    resets = torch.tensor([[0, 0], [0, 1], [1, 0], [0, 0]], device=xs.device)
    state, reset = (states, reset) if count == 2 else (states[0], reset[0])
    function = functools.partial(getattr(functional, cell), precision="tf32x3", implementation=implementation)
    resets = resets.T if "batch_first" in options else resets
    results = function(xs, state, *weights, resets=resets, reset_state=reset, **options)
    return sum(x.pow(3).sum() + x.sum() for x in torch.utils._pytree.tree_leaves(results))


def norm(kind, implementation, x, weight, bias, residual):
    function = functional.rms_norm if kind == "rms" else functional.layer_norm
    y, total = function(x, weight, bias, residual=residual, implementation=implementation)
    return y.pow(3).sum() + total.pow(3).sum()


def make(name, implementation):
    """Returns a function of several arrays with a number as its result, and the arrays in float64."""
    function, generator = functools.partial(run, name, implementation), torch.Generator().manual_seed(0)
    if name in FORMS:
        given = arrays(name)
    else:
        function = functools.partial(norm, name.removesuffix("-norm"), implementation)
        given = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((4, H), (H,), (H,), (4, H))]
    return function, [x.to(device_of(implementation)) for x in given]


def assert_derivatives_match(name, implementation, derivative):
    """Checks `derivative(function, arrays)`: errors are at most twice those of PyTorch's operations in float32.

    Where no kernel runs, the function is also run in float64, and matches to its rounding.
    """
    function, given = make(name, implementation)
    plain, narrow = make(name, "torch")[0], [x.float() for x in given]
    want, own, got = derivative(plain, given), derivative(plain, narrow), derivative(function, narrow)
    for x, y, z in zip(got, own, want, strict=True):
        size = z.abs().max() + 1e-30
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 1e-6 * size and z.abs().max() > 0
    if implementation is None:
        torch.testing.assert_close(derivative(function, given), want, rtol=1e-9, atol=1e-9)


def double_backward(function, given):
    """Returns the gradients of a number, and those of the sum of their squares."""
    leaves = [x.detach().requires_grad_() for x in given]
    first = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
    return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]


def third(function, given):
    leaves = [x.detach().requires_grad_() for x in given[:2]]
    (first,) = torch.autograd.grad(function(*leaves, *given[2:]), leaves[:1], create_graph=True)
    (second,) = torch.autograd.grad(first.pow(2).sum(), leaves[1], create_graph=True)
    return torch.autograd.grad(second.pow(2).sum(), leaves)


def of_first(transform):
    """Returns a derivative by the first array alone."""
    return lambda function, given: torch.utils._pytree.tree_leaves(
        transform(lambda x: function(x, *given[1:]), given[0].detach())
    )


def jvp(function, given):
    return torch.func.jvp(function, tuple(given), tuple(x.cos() for x in given))


def dual_levels(function, given):
    """Returns tangents of a gradient: those of its arrays, and those of its cotangent."""
    xs = given[0].detach().requires_grad_()
    value = function(xs, *given[1:])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual
        found = [torch.autograd.grad(value, xs, dual(torch.ones_like(value), 2 * torch.ones_like(value)))[0]]
        again = dual(xs, xs.detach().cos())
        found.append(torch.autograd.grad(function(again, *given[1:]), xs)[0])
        return [torch.autograd.forward_ad.unpack_dual(x).tangent.detach() for x in found]


def inside_torch_func(x_to_number, x):
    """Returns the gradient of a gradient that `torch.autograd` computes inside `torch.func.grad`."""

    def value(x):
        return torch.autograd.grad(x_to_number(x), x, create_graph=True)[0].square().sum()

    return torch.func.grad(value)(x)


DERIVATIVES = {
    "double backward": double_backward, "third": third, "jvp": jvp, "dual levels": dual_levels,
    "jacfwd": of_first(lambda f, x: torch.func.jacfwd(f)(x)),
    "hessian": of_first(lambda f, x: torch.func.hessian(f)(x)),
    "reverse over forward": of_first(lambda f, x: torch.func.jacrev(torch.func.jacfwd(f))(x)),
    "grad of grad": of_first(lambda f, x: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())(x)),
    "vmap": of_first(lambda f, x: torch.vmap(torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum()))(
        torch.stack((x, -x)))),
    "vectorized": of_first(lambda f, x: torch.autograd.functional.hessian(f, x, vectorize=True)),
    "inside torch.func": of_first(inside_torch_func),
}  # fmt: skip


@pytest.mark.quick
@every_implementation
@pytest.mark.parametrize("name", [*FORMS, "rms-norm", "layer-norm"])
def test_double_backward(name, implementation):
    assert_derivatives_match(name, implementation, double_backward)


@every_implementation
@pytest.mark.parametrize("name", ["gru", "lstm", "layer", "layer-norm"])
@pytest.mark.parametrize("derivative", [name for name in DERIVATIVES if name != "double backward"])
def test_derivatives(derivative, name, implementation):
    assert_derivatives_match(name, implementation, DERIVATIVES[derivative])


@pytest.mark.parametrize("name", ["gru", "lstm", "rms"])
def test_second_derivatives_match_finite_differences(name):
    function, given = make(name, None)
    leaves = [x.requires_grad_() for x in given]
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)


@every_implementation
@pytest.mark.parametrize("options", [{"bidirectional": True, "num_layers": 2}, {"num_blocks": 2}], ids=str)
def test_modules_also_under_checkpoint(options, implementation):
    """Checks two directions, which are models of one launch, a stack, and blocks, each with a recomputed forward."""
    torch.manual_seed(0)
    device = device_of(implementation)
    module, xs = nn.GRU(D, 4, **options, precision="tf32x3", device=device), torch.randn(T, B, D, device=device)
    xs.requires_grad_()

    def second(implementation, call):
        module.implementation = implementation
        leaves = [xs, *module.parameters()]
        first = torch.autograd.grad(call(module, xs)[0].pow(3).sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)

    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    want = second("torch", lambda module, xs: module(xs))
    for call in (lambda module, xs: module(xs), checkpoint):
        torch.testing.assert_close(second(implementation, call), want, rtol=1e-4, atol=1e-5)


@kernels_only
def test_kernels_save_no_input_projections(implementation):
    """Checks that a second derivative costs the first no memory: `[T, B, 3H]` is saved for none."""
    xs, h0, *weights, _ = (x.float().to(device_of(implementation)).requires_grad_() for x in arrays("gru"))
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(x.shape) or x, lambda x: x):
        functional.gru(xs, h0, *weights, implementation=implementation)
    assert shapes and not any(shape[-1] == 3 * H and shape.numel() >= T * B * 3 * H for shape in shapes)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["gru", "rms-norm"])
def test_compiled_forward_mode(name, backend):
    torch.compiler.reset()
    function, (x, *others) = make(name, None)

    def tangent(x):
        return torch.func.jvp(lambda x: function(x, *others), (x,), (x.cos(),))[1]

    torch.testing.assert_close(torch.compile(tangent, backend=backend)(x), tangent(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_operators_called_directly_raise_in_forward_mode(compiled):
    """Checks that no tangent is dropped, as PyTorch drops those of operators without a rule."""
    shapes = (1, T, B, 3 * H), (1, 3 * H, H), (1, H), (1, B, H)
    xp, *others = map(torch.randn, shapes)

    def tangent(xp):
        operator = functools.partial(torch.ops.torch_bridge.gru, resets=None, reset_h=None, order="forward")
        results = torch.func.jvp(lambda xp: operator(xp, *others, precision="tf32", save=False)[0], (xp,), (xp,))
        return results[1]

    torch.compiler.reset()
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative: call a function of torch_bridge\.func"):
        (torch.compile(tangent, backend="aot_eager") if compiled else tangent)(xp)


@kernels_only
def test_backward_operators_called_directly_have_no_derivative(implementation):
    shapes = (1, T, B, 3 * H), (1, 3 * H, H), (1, H), (1, B, H)
    xp, w_hh, b_hn, h0 = (torch.randn(s, device=device_of(implementation), requires_grad=True) for s in shapes)
    operators, options = torch.ops.torch_bridge, ("forward", "tf32x3", True, implementation)
    hs, _, *residuals = operators.gru(xp, w_hh, b_hn, h0, None, None, *options)
    dxp = operators.gru_backward(w_hh, hs, *residuals, None, hs.detach(), None, *options)[0]
    with pytest.raises(NotImplementedError, match='pass implementation="torch"'):
        torch.autograd.grad(dxp.sum(), xp)


@every_implementation
def test_natural_gradient_of_a_recurrent_policy(implementation):
    """Solves F x = g for TRPO by conjugate gradients, where F is the Hessian of the KL divergence to the policy itself.

    A product F v is a second backward pass. By definition of F, x minimizes x F x / 2 - g x.
    """
    torch.manual_seed(0)
    gru, head = nn.GRU(D, H, precision="tf32x3", implementation=implementation), torch.nn.Linear(H, 3)
    drawn = torch.randn(T, B, D), torch.randn(T, B), torch.randint(3, (T, B)), torch.rand(T, B) < 0.3
    gru, head, observations, advantages, actions, resets = (
        x.to(device_of(implementation)) for x in (gru, head, *drawn)
    )
    parameters = [*gru.parameters(), *head.parameters()]

    def log_probabilities():
        return head(gru(observations, resets=resets)[0]).log_softmax(-1)

    def flat_gradient(value, **options):
        return torch.cat([x.flatten() for x in torch.autograd.grad(value, parameters, **options)])

    old = log_probabilities().detach()
    chosen = log_probabilities().gather(-1, actions[..., None])[..., 0]
    gradient = flat_gradient((advantages * chosen).mean())
    divergence = (old.exp() * (old - log_probabilities())).sum(-1).mean()
    slope = flat_gradient(divergence, create_graph=True)

    def fisher(v):
        return flat_gradient(slope @ v, retain_graph=True) + 1e-2 * v

    x, residual = torch.zeros_like(gradient), gradient.clone()
    direction, size = residual, residual @ residual
    for _ in range(30):
        product = fisher(direction)
        step = size / (direction @ product)
        x, residual = x + step * direction, residual - step * product
        size, before = residual @ residual, size
        direction = residual + size / before * direction
    assert (fisher(x) - gradient).norm() <= 1e-3 * gradient.norm()
    # the same products from the gradient of log-probabilities: F is the mean of their outer products
    gru.implementation = "torch"
    jacobian = torch.stack([flat_gradient(y, retain_graph=True) for y in log_probabilities().flatten()])
    want = (jacobian * (old.exp().flatten() / (T * B))[:, None]).T @ (jacobian @ x) + 1e-2 * x
    torch.testing.assert_close(fisher(x), want, rtol=1e-3, atol=1e-5)
