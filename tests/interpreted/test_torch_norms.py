"""Tests RMSNorm and LayerNorm of `torch_bridge` on the CPU, in Triton's interpreter, and, at the end, on a GPU."""

import dataclasses
import functools
import itertools
import math

import pytest
from torch_calls import capture, every_device, moved, torch, with_gradients

from torch_bridge import functional, nn, norm_ops

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised when Inductor is imported

FUNCTIONS = {"rms": functional.rms_norm, "layer": functional.layer_norm}
PEERS = {"rms": (torch.nn.RMSNorm, nn.RMSNorm), "layer": (torch.nn.LayerNorm, nn.LayerNorm)}
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EPS = 1e-5
KINDS = tuple(FUNCTIONS)
every_kind = pytest.mark.parametrize("kind", KINDS)


@dataclasses.dataclass(frozen=True)
class Case:
    kind: str
    shape: tuple = (5, 12)
    dtype: str = "f32"
    weight: str = "f32"  # dtype of the weight; empty if there is none
    bias: str = ""
    residual: str = ""

    def __str__(self):
        parts = {"weight": self.weight, "bias": self.bias, "residual": self.residual}
        shape = "x".join(map(str, self.shape))
        return "-".join([self.kind, shape, self.dtype, *(f"{name}_{dtype}" for name, dtype in parts.items() if dtype)])


def make_inputs(case, device="cpu", seed=0):
    """Returns leaves and cotangents by name, rounded to their dtypes."""
    generator = torch.Generator().manual_seed(seed)
    columns, inputs = case.shape[-1:], {}
    for name, shape, dtype in (
        ("x", case.shape, case.dtype), ("weight", columns, case.weight), ("bias", columns, case.bias),
        ("residual", case.shape, case.residual), ("ct_y", case.shape, case.dtype),
        ("ct_total", case.shape, case.residual),
    ):  # fmt: skip
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        drawn = 1 + drawn / 4 if name == "weight" else drawn + 0.5 if name == "x" else drawn
        if dtype:
            if name == "ct_total":
                dtype = max(dtype, case.dtype, key=["f16", "bf16", "f32", "f64"].index)
            inputs[name] = drawn.to(DTYPES[dtype]).to(device)
    return inputs


def run(kind, inputs, function):
    """Returns outputs and gradients by name, in float64 on the CPU. `function` has the signature of a norm of ours."""
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if not name.startswith("ct_")}
    y = function(leaves["x"], leaves.get("weight"), leaves.get("bias"), residual=leaves.get("residual"), eps=EPS)
    outputs = dict(zip(("y", "total"), y if isinstance(y, tuple) else (y,), strict=False))
    cotangents = [inputs[f"ct_{name}"].to(x.dtype) for name, x in outputs.items()]
    gradients = torch.autograd.grad(list(outputs.values()), list(leaves.values()), cotangents)
    assert all(d.dtype == x.dtype for d, x in zip(gradients, leaves.values(), strict=True))
    results = outputs | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach().double().cpu() for name, x in results.items()}


def pytorchs(kind):
    """Returns PyTorch's norm as a function with the signature of ours."""

    def function(x, weight, bias, *, residual, eps):
        total = x if residual is None else x + residual
        columns = x.shape[-1:]
        given = [y for y in (total, weight, bias) if y is not None]
        wide = max((y.dtype for y in given), key=lambda dtype: dtype.itemsize)  # PyTorch's norms need one dtype
        normalized = total.to(wide)
        weight, bias = (None if y is None else y.to(wide) for y in (weight, bias))
        if kind == "layer":
            y = torch.nn.functional.layer_norm(normalized, columns, weight, bias, eps)
        else:
            y = torch.nn.functional.rms_norm(normalized, columns, weight, eps)
            y = y if bias is None else y + bias
        y = y.to(x.dtype)
        return y if residual is None else (y, total)

    return function


def by_hand(kind, inputs):
    """Computes the results of `run` by formula in float64, from the total rounded to its dtype in memory."""
    x = inputs["x"] if "residual" not in inputs else inputs["x"] + inputs["residual"]
    total, dy, n = x.double(), inputs["ct_y"].double(), x.shape[-1]
    mean = total.sum(-1, keepdim=True) / n if kind == "layer" else 0
    rstd = 1 / ((total - mean).square().sum(-1, keepdim=True) / n + EPS).sqrt()
    normalized = (total - mean) * rstd
    weight = inputs["weight"].double() if "weight" in inputs else 1
    scaled = dy * weight
    dx = scaled - normalized * (scaled * normalized).sum(-1, keepdim=True) / n
    if kind == "layer":
        dx = dx - scaled.sum(-1, keepdim=True) / n
    dx = dx * rstd + (inputs["ct_total"].double() if "residual" in inputs else 0)
    bias = inputs["bias"].double() if "bias" in inputs else 0
    results = {"y": normalized * weight + bias, "dx": dx}
    if "weight" in inputs:
        results["dweight"] = (dy * normalized).reshape(-1, n).sum(0)
    if "bias" in inputs:
        results["dbias"] = dy.reshape(-1, n).sum(0)
    if "residual" in inputs:
        results |= {"total": total, "dresidual": dx}
    return Truth({name: x.cpu() for name, x in results.items()}, float((scaled * rstd).norm()))


class Truth(dict):
    """Arrays by name, and the norm of the terms that cancel in gradients of rows."""

    def __init__(self, arrays, size):
        super().__init__(arrays)
        self.size = size

    def error(self, arrays, name):
        scale = max(float(self[name].norm()), self.size if name in ("dx", "dresidual") else 1e-30)
        return float((arrays[name] - self[name]).norm()) / scale


ROUNDING = {"f64": 2.0**-53, "f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}


def check(case, got, own, want):
    """Checks that errors are at most twice PyTorch's own, plus the last bits of the dtype of each array."""
    assert got.keys() == want.keys() == own.keys()
    dtypes = {"weight": case.weight, "bias": case.bias, "residual": case.residual, "total": case.residual}
    for name in want:
        dtype = dtypes.get(name.removeprefix("d"), case.dtype)
        if name in ("total", "dresidual"):
            dtype = max(dtype, case.dtype, key=["f16", "bf16", "f32", "f64"].index) if name == "total" else dtype
        bound = 2 * want.error(own, name) + 2 * ROUNDING[dtype] + 4 * 2.0**-24 * (case.dtype != "f64")
        assert got[name].isfinite().all(), name
        assert want.error(got, name) <= bound, (name, want.error(got, name), bound)


def variations(kind, **fixed):
    """Returns cases with every combination of weight, bias and residual."""
    base = Case(kind, **fixed)
    found = []
    for weight, bias, residual in itertools.product((True, False), repeat=3):
        given = {"weight": weight, "bias": bias, "residual": residual}
        found.append(dataclasses.replace(base, **{name: base.dtype if on else "" for name, on in given.items()}))
    return found


def cases():
    found = []
    for kind in KINDS:
        found += variations(kind)
        found += variations(kind, dtype="f64")
        for dtype in ("bf16", "f16"):
            found += [
                Case(kind, (4, 3, 40), dtype, weight=dtype, bias="f32", residual=dtype),
                Case(kind, (4, 3, 40), dtype, weight="f32", residual="f32"),
            ]
        found += [Case(kind, shape) for shape in ((7,), (3, 1), (2, 3, 4, 5), (1, 1000))]
    return found


def implementation_of(kind, implementation):
    def function(*args, **kwargs):
        return FUNCTIONS[kind](*args, implementation=implementation, **kwargs)

    return function


@pytest.mark.quick("case.kind")
@pytest.mark.parametrize("implementation", [None, "torch"])
@pytest.mark.parametrize("case", cases(), ids=str)
def test_pytorch_operations_match_the_formula(case, implementation):
    inputs = make_inputs(case)
    got = run(case.kind, inputs, implementation_of(case.kind, implementation))
    want = by_hand(case.kind, inputs)
    check(case, got, want, want)


def interpreted_cases():
    found = []
    for kind in KINDS:
        found += variations(kind, shape=(3, 20))
        found += [
            Case(kind, shape, bias="f32", residual="f32") for shape in ((1, 1), (5, 7), (2, 300), (70, 8), (3, 20_000))
        ]
        found += [
            Case(kind, (3, 40), "f16", weight="f32", bias="f16", residual="f32"),
            # the interpreter truncates to bfloat16, so a sum with a residual would differ
            Case(kind, (3, 40), "bf16", weight="f32", bias="bf16"),
        ]
    return found


@pytest.mark.quick("case.kind")
@pytest.mark.interpret
@pytest.mark.parametrize("case", interpreted_cases(), ids=str)
def test_kernels_match_the_formula(case):
    inputs = make_inputs(case)
    got = run(case.kind, inputs, implementation_of(case.kind, "triton"))
    want = by_hand(case.kind, inputs)
    check(case, got, want, want)


@pytest.mark.interpret
@every_kind
def test_kernels_use_the_weights_of_each_model(kind):
    xs, weights = torch.randn(3, 2, 4, 20), torch.randn(3, 20)
    xs, weights = xs.requires_grad_(), weights.requires_grad_()
    function = implementation_of(kind, "triton")
    got = torch.vmap(function)(xs, weights)
    want = torch.stack([FUNCTIONS[kind](x, w) for x, w in zip(xs, weights, strict=True)])
    close(got, want)
    ct = torch.randn_like(got)
    close(torch.autograd.grad(got, (xs, weights), ct), torch.autograd.grad(want, (xs, weights), ct))


@pytest.mark.interpret
@pytest.mark.parametrize("columns", [40, 40_000])  # rows in one chunk, and in several
@every_kind
def test_elements_whose_squares_overflow_become_zeros(kind, columns):
    x = torch.randn(3, columns) * 1e25
    x[1] += 1e27
    for implementation in ("triton", "torch"):
        close(FUNCTIONS[kind](x, implementation=implementation), torch.zeros_like(x), 0)


@pytest.mark.interpret
def test_triton_rejects_float64():
    x = torch.randn(2, 5, dtype=torch.float64)
    for kind, args in itertools.product(KINDS, ((x,), (x.float(), x[0]), (x.float(), None, x[0]))):
        with pytest.raises(NotImplementedError, match=r"takes float32, bfloat16 and float16, not torch\.float64"):
            FUNCTIONS[kind](*args, implementation="triton")


def close(got, want, tolerance=1e-5):
    if isinstance(got, torch.Tensor):
        got, want = (got,), (want,)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def arguments(of=torch.float32, models=2, rows=3, columns=5, **changes):
    """Returns arguments of the forward operators."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=of).requires_grad_()

    tensors = {"x": normal(models, rows, columns), "weight": normal(models, columns), "bias": normal(models, columns)}
    tensors |= {"residual": normal(models, rows, columns)}
    options = {"epsilon": EPS, "dtype": of, "save": True, "implementation": None}
    return tuple((tensors | options | changes).values())


OPS = {"rms": norm_ops.rms_norm_op, "layer": norm_ops.layer_norm_op}
BACKWARD_OPS = {"rms": norm_ops.rms_norm_backward_op, "layer": norm_ops.layer_norm_backward_op}


@pytest.mark.parametrize(
    "changes", [{}, {"weight": None, "bias": None}, {"residual": None}, {"save": False}, {"dtype": torch.float16}],
    ids=str,
)  # fmt: skip
@every_device
@every_kind
def test_opcheck_of_forward_operators(kind, device, changes):
    torch.library.opcheck(OPS[kind], moved(arguments(**changes), device))


@pytest.mark.parametrize("dweight_dtype", [torch.float32, torch.float16, None])
@pytest.mark.parametrize("dbias_dtype", [torch.float32, None])
@every_device
@every_kind
def test_opcheck_of_backward_operators(kind, device, dweight_dtype, dbias_dtype):
    given = moved(arguments(), device)
    x, weight, *_ = (y.detach() for y in given[:4])
    _, total, mean, rstd = OPS[kind](*given)
    mean = mean if kind == "layer" else None
    given = (torch.randn_like(x), total.detach(), torch.randn_like(x), weight, mean, rstd)
    torch.library.opcheck(BACKWARD_OPS[kind], (*given, dweight_dtype, dbias_dtype))


@pytest.mark.parametrize("dtype", [True, torch.int32], ids=str)
@every_kind
def test_gradients_of_weights_need_a_floating_point_dtype(kind, dtype):
    """Checks a bool too, which PyTorch accepts as a dtype."""
    given = arguments()
    x, weight, *_ = (y.detach() for y in given[:4])
    _, total, mean, rstd = OPS[kind](*given)
    given = (torch.randn_like(x), total.detach(), None, weight, mean if kind == "layer" else None, rstd)
    for dtypes, name in (((dtype, None), "dweight_dtype"), ((None, dtype), "dbias_dtype")):
        with pytest.raises(ValueError, match=f"{name} must be a floating-point dtype, or None for no such gradient"):
            BACKWARD_OPS[kind](*given, *dtypes)


@every_kind
def test_results_are_contiguous_for_all_strides(kind):
    """Checks this against the fake outputs, whose strides compilers rely on."""
    x, weight, bias, residual = (y.detach().transpose(0, -1).contiguous().transpose(0, -1) for y in arguments()[:4])
    torch.library.opcheck(OPS[kind], (x, weight, bias, residual, EPS, torch.float32, True))
    *_, mean, rstd = OPS[kind](x, weight, bias, residual, EPS, torch.float32, True)
    dy = torch.randn_like(x)
    assert not any(y.is_contiguous() for y in (x, weight, residual, dy))
    mean = mean if kind == "layer" else None
    torch.library.opcheck(BACKWARD_OPS[kind], (dy, x, residual, weight, mean, rstd, weight.dtype, bias.dtype))


@every_kind
def test_gradient_recomputes_statistics_that_were_not_saved(kind):
    found = []
    for save in (True, False):
        args = arguments(save=save)
        y, total, _, rstd = OPS[kind](*args)
        assert rstd.shape == ((2, 3) if save else (0,))
        found.append(torch.autograd.grad((y.sin() + total.cos()).sum(), args[:4]))
    close(found[0], found[1], 0)


@every_kind
def test_statistics_are_saved_only_for_gradients(kind, monkeypatch):
    saves, original = [], norm_ops.op_common.call
    monkeypatch.setattr(norm_ops.op_common, "call", lambda op, *args: saves.append(args[6]) or original(op, *args))
    x = torch.randn(2, 5)
    FUNCTIONS[kind](x)
    FUNCTIONS[kind](x.requires_grad_())
    with torch.no_grad():
        FUNCTIONS[kind](x)
    torch.func.grad(lambda x: FUNCTIONS[kind](x).sum())(x.detach())
    assert saves[:4] == [False, True, False, True]


@every_kind
def test_unused_outputs_and_inputs_need_no_gradient(kind):
    """Checks a loss of one output only, and inputs some of which need no gradient."""
    for part, chosen in itertools.product((0, 1), ((0,), (0, 3), (3,), (1, 2))):
        found = []
        for implementation in (None, "torch"):
            args = [x[0].detach() for x in arguments()[:4]]
            x, weight, bias, residual = (y.requires_grad_(i in chosen) for i, y in enumerate(args))
            outputs = FUNCTIONS[kind](x, weight, bias, residual=residual, implementation=implementation)
            if part == 1 and chosen == (1, 2):
                continue
            loss = (outputs[part] * torch.arange(15.0).reshape(3, 5)).sum()
            found.append(torch.autograd.grad(loss, [args[i] for i in chosen]))
        if found:
            close(*found)


PLAIN = {"rms": torch.nn.functional.rms_norm, "layer": torch.nn.functional.layer_norm}


@pytest.mark.parametrize("shape", [5, (5,), [3, 5], torch.Size([2, 3, 5])], ids=str)
@every_kind
def test_functions_take_a_normalized_shape_as_pytorch_does(kind, shape):
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    x, weight, bias = torch.randn(4, 2, 3, 5), torch.randn(sizes), torch.randn(sizes)
    plain, ours = PLAIN[kind], FUNCTIONS[kind]
    given = (weight, 1e-3) if kind == "rms" else (weight, bias, 1e-3)
    for count in range(len(given) + 1):
        want = plain(x, sizes, *given[:count])
        close(ours(x, shape, *given[:count]), want)
    close(ours(x, shape, weight=weight, eps=1e-3), plain(x, sizes, weight, eps=1e-3))
    close(ours(x, normalized_shape=shape, weight=weight), plain(x, sizes, weight))
    y, total = ours(x, shape, weight, residual=x)
    close(total, 2 * x)
    close(y, plain(2 * x, sizes, weight))
    if len(sizes) == 1:  # the form without a normalized shape
        close(ours(x, weight, bias), plain(x, sizes, weight) + bias if kind == "rms" else plain(x, sizes, weight, bias))
        close(ours(x, weight=weight), plain(x, sizes, weight))


@every_kind
def test_bad_arguments_of_functions_raise(kind):
    run, x, weight = FUNCTIONS[kind], torch.zeros(2, 3, 5), torch.ones(5)
    for shape in (4, (2, 5), (), (1, 2, 3, 5)):
        with pytest.raises(ValueError, match=r"x must be \[\*batch, \*normalized_shape\] with .*, got \(2, 3, 5\)"):
            run(x, shape, weight)
    with pytest.raises(ValueError, match=r"weight must be \(3, 5\) for x \(2, 3, 5\), got \(5,\)"):
        run(x, (3, 5), weight)
    with pytest.raises(ValueError, match="weight must be a tensor, got float"):
        run(x, 5, 1.0)
    with pytest.raises(ValueError, match="weight must be a tensor, got float"):
        run(x, 1.0)
    with pytest.raises(TypeError, match="_norm got several values for weight"):
        run(x, (5,), weight, weight=weight)
    with pytest.raises(TypeError, match="_norm has no argument elementwise_affine"):
        run(x, (5,), weight, elementwise_affine=True)
    with pytest.raises(TypeError, match="_norm takes weight, bias by position"):
        run(x, weight, weight, weight)


@pytest.mark.parametrize("implementation", [None, "torch"])
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("rank", [4, 5])
@every_kind
def test_modules_keep_the_memory_format_that_torch_nn_keeps(kind, rank, axes, implementation):
    shape = (2, 3, 4, 5, 6)[:rank]
    x = torch.randn(shape).to(memory_format=torch.channels_last if rank == 4 else torch.channels_last_3d)
    plain, ours = (make(shape[-axes:]) for make in PEERS[kind])
    ours.implementation = implementation
    for requires_grad in (False, True):
        x = x.detach().requires_grad_(requires_grad)
        want, got = plain(x), ours(x)
        close(got, want)
        if kind == "rms" or implementation is None:
            assert got.stride() == want.stride()
        y, total = ours(x, x)
        close(total, 2 * x)
        assert total.stride() == x.stride() and y.stride() == got.stride()
    got.sum().backward()
    assert x.grad.stride() == x.stride()
    batched = torch.vmap(ours)(torch.stack([x, x]))
    close(batched, torch.stack([want, want]))


@every_kind
def test_a_wrong_implementation_is_told_when_a_module_is_made(kind):
    for name in ("loop", "Triton", "", 1):
        with pytest.raises(ValueError, match='implementation must be "triton", "torch" or None'):
            PEERS[kind][1](5, implementation=name)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # raised by PyTorch's own forward mode
@every_kind
def test_derivatives_of_any_order_and_forward_mode(kind):
    x, weight, bias, residual = (y[0] for y in arguments(torch.float64)[:4])
    plain, args = implementation_of(kind, "torch"), (x, weight, bias, residual)
    for run in (FUNCTIONS[kind], plain):
        assert torch.autograd.gradcheck(lambda x, w, b, r, run=run: run(x, w, b, residual=r), args)
        assert torch.autograd.gradgradcheck(lambda x, w, b, r, run=run: run(x, w, b, residual=r), args)
        assert torch.autograd.gradgradcheck(lambda x, w, run=run: run(x, w), args[:2])
        _, tangent = torch.func.jvp(run, (x.detach(),), (x.detach(),))
        close((plain(1.000001 * x) - plain(x)) * 1e6, tangent)
    cubed = [
        torch.func.jacrev(torch.func.jacrev(lambda x, f=f: f(x).pow(3).sum()))(x.detach())
        for f in (FUNCTIONS[kind], plain)
    ]
    close(*cubed)


class Watching(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@every_kind
def test_dispatch_mode_sees_the_operators(kind):
    """Checks a call under a dispatch mode, since a plain call bypasses the dispatcher."""
    x = torch.randn(3, 5).requires_grad_()
    want = torch.autograd.grad(FUNCTIONS[kind](x).sin().sum(), x)
    with Watching() as watching:
        got = torch.autograd.grad(FUNCTIONS[kind](x).sin().sum(), x)
    names = [name for name in watching.seen if name.startswith("torch_bridge")]
    assert names == [f"torch_bridge.{kind}_norm.default", f"torch_bridge.{kind}_norm_backward.default"]
    close(got, want, 0)


@every_kind
def test_gradients_match_finite_differences(kind):
    args = tuple(y[0] for y in arguments(torch.float64)[:4])
    assert torch.autograd.gradcheck(lambda x, w, b, r: FUNCTIONS[kind](x, w, b, residual=r), args)


AXES = {  # mapped axes of x, weight, bias and residual
    "all": (0, 0, 0, 0), "weights": (None, 0, 0, None), "rows": (0, None, None, 1), "one": (1, None, None, None),
    "bias": (None, None, 0, None),
}  # fmt: skip


@pytest.mark.parametrize("transform", ["grad of vmap", "vmap of grad", "backward through vmap", "vmap of vmap"])
@pytest.mark.parametrize("axes", AXES)
@every_kind
def test_vmap_equals_a_loop_in_one_call(kind, axes, transform, monkeypatch):
    """Checks that the new axis adds models if weights are batched, and rows if they are shared."""
    in_dims, size, N = AXES[axes], 2, 5
    torch.manual_seed(0)
    shapes = ((3, N), (N,), (N,), (3, N))
    args = [
        torch.randn(shape) if axis is None else torch.randn(size, *shape).movedim(0, axis)
        for shape, axis in zip(shapes, in_dims, strict=True)
    ]

    def one(x, weight, bias, residual):
        y, total = FUNCTIONS[kind](x, weight, bias, residual=residual)
        return (y * torch.linspace(-1, 1, 15).reshape(3, N)).sum() + total.cos().sum()

    def pick(args, i):
        return [x if axis is None else x.select(axis, i) for axis, x in zip(in_dims, args, strict=True)]

    leaves = [x.clone().requires_grad_() for x in args]
    want = torch.autograd.grad(sum(one(*pick(leaves, i)) for i in range(size)), leaves)
    calls, original = [], norm_ops.normalize
    monkeypatch.setattr(norm_ops, "normalize", lambda *a, **k: calls.append(a[0].shape) or original(*a, **k))
    if transform == "backward through vmap":
        leaves = [x.clone().requires_grad_() for x in args]
        found = torch.autograd.grad(torch.vmap(one, in_dims)(*leaves).sum(), leaves)
    elif transform == "grad of vmap":
        found = torch.func.grad(lambda *a: torch.vmap(one, in_dims)(*a).sum(), (0, 1, 2, 3))(*args)
    elif transform == "vmap of grad":
        found = torch.vmap(torch.func.grad(one, (0, 1, 2, 3)), in_dims)(*args)
        found = [x.sum(0) if a is None else x.movedim(0, a) for a, x in zip(in_dims, found, strict=True)]
    else:
        twice = [None if a is None else 0 for a in in_dims]
        doubled = [x if a is None else torch.stack([x, x]) for a, x in zip(in_dims, args, strict=True)]
        inner = torch.vmap(one, in_dims)
        found = torch.func.grad(
            lambda *a: torch.vmap(inner, tuple(twice))(*a).sum() / 2, (0, 1, 2, 3)
        )(*doubled)  # fmt: skip
        found = [x if a is None else x.sum(0) for a, x in zip(in_dims, found, strict=True)]
    assert len(calls) == 1
    models = {"all": True, "weights": True, "bias": True}.get(axes, False)
    batch = size * (2 if transform == "vmap of vmap" else 1)
    assert calls[0] == ((batch, 3, N) if models else (1, batch * 3, N))
    close(found, want)


@every_kind
def test_vmap_over_an_empty_axis_gives_empty_results(kind):
    x, weight = torch.zeros(0, 3, 5), torch.ones(0, 5)
    for w, axis in ((weight, 0), (torch.ones(5), None)):
        in_dims = (axis, 0)
        y, total = torch.vmap(lambda w, x: FUNCTIONS[kind](x, w, residual=x), in_dims)(w, x)
        assert y.shape == total.shape == x.shape
        dw = torch.vmap(torch.func.grad(lambda w, x: FUNCTIONS[kind](x, w).sum()), in_dims)(w, x)
        assert dw.shape == weight.shape


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("implementation", [None, "torch"])
@every_kind
def test_gradients_of_leaves_accumulate_separately(kind, implementation, compiled):
    torch._dynamo.reset()
    run = functools.partial(FUNCTIONS[kind], implementation=implementation)
    run = torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run
    x, residual = (torch.randn(6, 8).requires_grad_() for _ in range(2))
    weight = torch.randn(6, 8)
    (run(x, residual=residual)[0] * weight).sum().backward()
    once = x.grad.clone()
    (run(x, residual=residual)[0] * weight).sum().backward()
    torch.testing.assert_close([x.grad, residual.grad], [2 * once] * 2)


@pytest.mark.interpret
@every_kind
def test_lazily_negated_view_gives_the_same_results(kind):
    x = torch.randn(4, 8, dtype=torch.complex64).conj().imag
    assert x.is_neg()
    close(FUNCTIONS[kind](x, implementation="triton"), FUNCTIONS[kind](x, implementation="torch"))


@every_kind
def test_meta_tensors_have_shapes(kind):
    assert FUNCTIONS[kind](torch.empty(4, 8, device="meta")).shape == (4, 8)


MODULES = [
    ("rms", (12,), {}), ("rms", ([3, 4],), {}), ("rms", (12,), {"elementwise_affine": False}), ("rms", (12, 1e-3), {}),
    ("layer", (12,), {}), ("layer", ([3, 4],), {}), ("layer", (12,), {"elementwise_affine": False}),
    ("layer", (12,), {"bias": False}), ("layer", ((3, 4), 1e-3), {"bias": False}),
]  # fmt: skip


@pytest.mark.quick("kind")
@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
@pytest.mark.parametrize(("kind", "args", "options"), MODULES, ids=str)
def test_modules_match_pytorch(kind, args, options, dtype):
    torch.manual_seed(0)
    plain, ours = (make(*args, **options, dtype=DTYPES[dtype]) for make in PEERS[kind])
    assert isinstance(ours, PEERS[kind][0]) and repr(ours) == repr(plain)
    assert [*ours.state_dict()] == [*plain.state_dict()]
    for x, y in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    with torch.no_grad():
        for x in plain.parameters():
            x.normal_()
    ours.load_state_dict(plain.state_dict())
    shape = (2, 5, 3, 4) if len(plain.normalized_shape) == 2 else (2, 5, 12)
    x, residual = (torch.randn(shape, dtype=DTYPES[dtype]).requires_grad_() for _ in range(2))
    bound = {"f64": 1e-13, "f32": 1e-5, "bf16": 2.0**-6}[dtype]
    ct = torch.randn_like(x)
    found, want = (torch.autograd.grad(m(x), [x, *m.parameters()], ct) for m in (ours, plain))
    close(ours(x), plain(x), bound)
    close(found, want, bound)
    y, total = ours(x, residual)
    torch.testing.assert_close(total, x + residual, rtol=0, atol=0)
    close(y, plain(x + residual), bound)
    close(torch.autograd.grad(y, [x, residual], ct), [torch.autograd.grad(plain(x + residual), x, ct)[0]] * 2, bound)


@every_kind
def test_modules_take_a_device_and_an_implementation(kind):
    made = PEERS[kind][1](12, implementation="torch", device="meta")
    assert made.implementation == "torch" and made.weight.is_meta
    with pytest.raises(ValueError, match='implementation must be "triton", "torch" or None'):
        PEERS[kind][1](12, implementation="cudnn")(torch.zeros(3, 12))


def test_default_epsilon_is_that_of_the_accumulation_dtype():
    """Uses rows so small that epsilon determines the result."""
    for dtype, eps in (("f64", 2.0**-52), ("f32", 2.0**-23), ("bf16", 2.0**-23), ("f16", 2.0**-23)):
        x = torch.full((1, 8), 2.0**-12, dtype=DTYPES[dtype])
        wanted = 2.0**-12 / math.sqrt(2.0**-24 + eps)
        for y in (functional.rms_norm(x), nn.RMSNorm(8, dtype=DTYPES[dtype])(x)):
            close(y.double(), torch.full((1, 8), wanted, dtype=torch.float64), 4 * ROUNDING[dtype])
    x, none = torch.full((1, 8), 2.0**-30), torch.zeros(1, 8, dtype=torch.float64)  # the dtype of the sum counts
    close(functional.rms_norm(x, residual=none)[0], torch.full((1, 8), 2.0**-30 / math.sqrt(2.0**-60 + 2.0**-52)))


@every_kind
def test_autocast_on_the_cpu_does_not_change_the_dtype(kind):
    plain, ours = (make(12) for make in PEERS[kind])
    for given, cast in itertools.product((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        x = torch.randn(3, 12, dtype=given)
        with torch.autocast("cpu", cast):
            assert ours(x).dtype == plain.to(given)(x).dtype == given


@pytest.fixture(autouse=True)
def forget_compilations():
    torch._dynamo.reset()


@every_kind
def test_compiled_call_is_one_graph_for_any_number_of_rows(kind):
    module = PEERS[kind][1](12)

    def call(x, residual):
        y, total = module(x, residual)
        return module(y.sin()) + total

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (5, 9, 3):
        x, residual = (torch.randn(2, rows, 12).requires_grad_() for _ in range(2))
        leaves, ct = [x, residual, *module.parameters()], torch.randn(2, rows, 12)
        with torch.compiler.set_stance("default" if rows == 5 else "fail_on_recompile"):
            got = compiled(x, residual)
        want = call(x, residual)
        close(got, want)
        close(torch.autograd.grad(got, leaves, ct), torch.autograd.grad(want, leaves, ct))
    with torch.no_grad():
        close(compiled(x, residual), call(x, residual))


@every_kind
def test_fake_outputs_have_the_shapes_and_dtypes_of_real_ones(kind):
    for changes in ({}, {"residual": None}, {"dtype": torch.float64}):
        args = arguments(torch.float16, **changes)
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = OPS[kind](*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
        assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in OPS[kind](*args)]


@every_kind
def test_zero_rows_give_empty_outputs_and_zero_gradients(kind):
    for shape in ((0, 5), (3, 0, 5)):
        x, residual = torch.randn(shape).requires_grad_(), torch.randn(shape).requires_grad_()
        weight, bias = torch.ones(5).requires_grad_(), torch.ones(5).requires_grad_()
        y, total = FUNCTIONS[kind](x, weight, bias, residual=residual)
        assert y.shape == total.shape == shape
        (y.sum() + total.sum()).backward()
        assert x.grad.shape == shape and not weight.grad.any() and not bias.grad.any()


WRONG = [
    ({"x": torch.zeros(())}, r"x must be \[\.\.\., N\] and floating point, got \(\)"),
    ({"x": torch.zeros(3, 5, dtype=torch.int32)}, r"and floating point, got \(3, 5\) of torch.int32"),
    ({"weight": torch.zeros(6)}, r"weight must be \(5,\) for x \(3, 5\), got \(6,\)"),
    ({"weight": torch.zeros(5, dtype=torch.int32)}, "weight must be floating point, got torch.int32"),
    ({"bias": torch.zeros(1)}, r"bias must be \(5,\)"),
    ({"residual": torch.zeros(5)}, r"residual must be \(3, 5\)"),
    ({"weight": torch.zeros(5, device="meta")}, "weight is on meta and x is on cpu"),
    ({"eps": torch.tensor(1e-5)}, "eps of (rms|layer)_norm must be a number, got Tensor"),
    ({"eps": True}, "eps of (rms|layer)_norm must be a number, got bool"),
    ({"eps": "1e-5"}, "eps of (rms|layer)_norm must be a number, got str"),
    ({"eps": -1e-5}, "eps must be finite and not negative, got -1e-05"),
    ({"eps": float("inf")}, "eps must be finite and not negative, got inf"),
    ({"implementation": "cudnn"}, 'implementation must be "triton", "torch" or None, got \'cudnn\''),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(w[0])[:32] + w[1][:16] for w in WRONG])
@every_kind
def test_bad_arguments_raise(kind, changes, message):
    with pytest.raises(ValueError, match=message):
        FUNCTIONS[kind](**({"x": torch.zeros(3, 5)} | changes))


def test_layer_norm_rejects_an_epsilon_of_none():
    with pytest.raises(ValueError, match="eps of layer_norm must be a number, got NoneType"):
        functional.layer_norm(torch.zeros(3, 5), eps=None)


@every_kind
def test_modules_and_operators_check_shapes(kind):
    module = PEERS[kind][1]((3, 4))
    with pytest.raises(ValueError, match=r"x must be \[\*batch, \*normalized_shape\] with \(3, 4\), got \(3, 5\)"):
        module(torch.zeros(3, 5))
    with pytest.raises(ValueError, match=r"the residual must be \(2, 3, 4\), the shape of x, got \(3, 4\)"):
        module(torch.zeros(2, 3, 4), torch.zeros(3, 4))
    for wrong in ([0.0], None, torch.zeros(3, 4).numpy()):
        with pytest.raises(ValueError, match=r"x must be a tensor, got (list|None|ndarray)"):
            module(wrong)
    with pytest.raises(ValueError, match=r"residual must be a tensor, got list: pass torch.as_tensor of it"):
        module(torch.zeros(3, 4), [0.0])
    args = arguments()
    for i, wrong in ((0, args[0][0]), (1, args[1][:1]), (3, args[3][:, 1:])):
        with pytest.raises(ValueError, match="must be"):
            OPS[kind](*args[:i], wrong, *args[i + 1 :])


# On a GPU.

gpu = pytest.mark.gpu
DEVICE = "cuda"
WIDTHS = (1, 7, 64, 100, 512, 1000, 2048, 5000, 8192, 16384, 32768, 50257)


def gpu_cases():
    """Returns each width in each dtype, once with weight, bias and residual, and once with some of these, in turn."""
    parts = itertools.cycle([(True, False, False), (False, False, False), (True, True, True), (True, False, True)])
    found = []
    for kind, columns, dtype in itertools.product(KINDS, WIDTHS, ("f32", "bf16", "f16")):
        full = Case(kind, (37, columns), dtype, weight=dtype, bias=dtype, residual=dtype)
        weight, bias, residual = next(parts)
        changes = {"weight": "f32" * weight, "bias": dtype * bias, "residual": "f32" * residual}
        found += [full, dataclasses.replace(full, shape=(3, 50, columns), **changes)]
    return found


@gpu
@pytest.mark.parametrize("case", gpu_cases(), ids=str)
def test_kernels_are_as_accurate_as_pytorchs_own(case):
    inputs = make_inputs(case, DEVICE)
    got, again = (run(case.kind, inputs, implementation_of(case.kind, name)) for name in ("triton", None))
    check(case, got, run(case.kind, inputs, pytorchs(case.kind)), by_hand(case.kind, inputs))
    for name in got:  # and two runs give the same bits
        torch.testing.assert_close(got[name], again[name], rtol=0, atol=0)


@gpu
@pytest.mark.parametrize("columns", [64, 512, 4096])
@every_kind
def test_sums_over_many_rows_are_as_accurate_as_pytorchs_own(kind, columns):
    case = Case(kind, (70_001 if columns == 64 else 9001, columns), "bf16", weight="bf16", bias="bf16")
    inputs = make_inputs(case, DEVICE)
    got, again = (run(kind, inputs, implementation_of(kind, "triton")) for _ in range(2))
    check(case, got, run(kind, inputs, pytorchs(kind)), by_hand(kind, inputs))
    for name in got:
        torch.testing.assert_close(got[name], again[name], rtol=0, atol=0)


def module_and_inputs(kind, dtype=torch.float32, device=DEVICE, columns=100):
    torch.manual_seed(0)
    module = PEERS[kind][1](columns).to(device, dtype)
    with torch.no_grad():
        for x in module.parameters():
            x.normal_()
    return module, *(torch.randn(6, 7, columns).to(device, dtype).requires_grad_() for _ in range(2))


def assert_bits(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_kind
def test_unaligned_and_strided_arrays_give_the_same_bits(kind, dtype):
    """Checks arrays that are not aligned to 16 bytes, which kernels read at a time, or not contiguous."""
    module, x, residual = module_and_inputs(kind, dtype)

    def shifted(x):
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape).copy_(x)
        assert moved.is_contiguous() and moved.data_ptr() % 16
        return moved

    def strided(x):
        wide = torch.empty((*x.shape, 2), dtype=x.dtype, device=DEVICE)[..., 0].copy_(x)
        assert not wide.is_contiguous()
        return wide

    weights = [None if y is None else y.detach() for y in (module.weight, getattr(module, "bias", None))]
    eps = EPS
    results = []
    for place in (torch.clone, shifted, strided):
        leaves = [place(y.detach()).requires_grad_() for y in (x, residual, *(w for w in weights if w is not None))]

        def call(x, residual, *weights):
            return FUNCTIONS[kind](x, *weights, residual=residual, eps=eps, implementation="triton")

        results.append(with_gradients(call, leaves, *leaves))
    assert_bits(results[1], results[0])
    assert_bits(results[2], results[0])
    y = FUNCTIONS[kind](x.transpose(0, 1), *weights, eps=eps, implementation="triton")
    assert_bits([y.transpose(0, 1)], [FUNCTIONS[kind](x, *weights, eps=eps, implementation="triton")])


@gpu
@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@every_kind
def test_compiled_modules_equal_eager_ones(kind, mode):
    module, x, residual = module_and_inputs(kind)
    leaves = [x, residual, *module.parameters()]
    want = with_gradients(module, leaves, x, residual)
    compiled = torch.compile(module, fullgraph=True, mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        got = [y.clone() for y in with_gradients(compiled, leaves, x, residual)]
        assert_bits(got, want)


@gpu
@every_kind
def test_cuda_graph_of_both_passes_replays_the_same_bits(kind):
    module, x, residual = module_and_inputs(kind)
    leaves = [x, residual, *module.parameters()]

    def step():
        return with_gradients(module, leaves, x, residual)

    graph, captured = capture(step)
    for _ in range(3):
        with torch.no_grad():
            x.normal_()
            residual.normal_()
        want = step()
        for y in captured:
            y.fill_(torch.nan)
        graph.replay()
        assert_bits(captured, want)


@gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_capture_of_a_kernel_that_is_not_loaded_raises():
    x = torch.randn(29, 43, device=DEVICE)
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="a kernel is not loaded yet, and none can be loaded during CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        functional.rms_norm(x)


@gpu
@every_kind
def test_launch_uses_the_current_stream(kind):
    """Launches while the inputs are still being written, and reuses their memory at once."""
    module, x, residual = module_and_inputs(kind)
    with torch.no_grad():
        want = module(x, residual)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = torch.full_like(x, torch.nan)
            for _ in range(5):
                torch.cuda._sleep(20_000_000)
                late.copy_(x)
                got = module(late.clone(), residual)
                late.fill_(torch.nan)
                torch.full_like(x, torch.nan)
        stream.synchronize()
    assert_bits(got, want)


@gpu
@pytest.mark.several_gpus
@every_kind
def test_inputs_on_a_second_gpu_run_there(kind):
    torch.cuda.set_device(0)  # the device that JAX used last is still current
    results = []
    for device in ("cuda:0", "cuda:1"):
        module, x, residual = module_and_inputs(kind, device=device)
        results.append(with_gradients(module, [x, residual, *module.parameters()], x, residual))
        assert {y.device for y in results[-1]} == {torch.device(device)} and torch.cuda.current_device() == 0
    assert_bits([y.cpu() for y in results[1]], [y.cpu() for y in results[0]])


@gpu
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@every_kind
def test_autocast_matches_pytorch(kind):
    for given, cast in itertools.product((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)):
        plain, ours = (make(64).to(DEVICE) for make in PEERS[kind])
        x = torch.randn(16, 64, device=DEVICE, dtype=given).requires_grad_()
        found = []
        for module in (plain, ours):
            with torch.autocast(DEVICE, cast):
                y = module(x)
            found.append((y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])))
        assert [y.dtype for y in found[1]] == [y.dtype for y in found[0]]
        assert kind == "rms" or found[1][0].dtype == torch.float32
        close([y.float() for y in found[1]], [y.float() for y in found[0]], 1e-4 if given == torch.float32 else 2.0**-6)


@gpu
@every_kind
def test_an_ensemble_under_vmap_is_one_launch(kind, monkeypatch):
    from torch_bridge import norms

    modules = [PEERS[kind][1](100).to(DEVICE) for _ in range(3)]
    x = torch.randn(6, 7, 100, device=DEVICE)
    params, buffers = torch.func.stack_module_state(modules)
    launches, original = [], norms.Launch.__call__
    monkeypatch.setattr(norms.Launch, "__call__", lambda *args: launches.append(args) or original(*args))
    got = torch.vmap(lambda *state: torch.func.functional_call(modules[0], state, (x,)))(params, buffers)
    assert_bits(got, torch.stack([module(x) for module in modules]))
    del launches[1:]
    got.square().sum().backward()
    assert [one[0].problem.models for one in launches] == [3, 3]
    for i, module in enumerate(modules):
        (want,) = torch.autograd.grad(module(x).square().sum(), module.weight)
        close(params["weight"].grad[i], want, 1e-4)


@gpu
def test_float64_runs_without_kernels():
    for kind in KINDS:
        case = Case(kind, dtype="f64", weight="f64", residual="f64")
        inputs = make_inputs(case, DEVICE)
        want = by_hand(kind, inputs)
        check(case, run(kind, inputs, implementation_of(kind, None)), want, want)
