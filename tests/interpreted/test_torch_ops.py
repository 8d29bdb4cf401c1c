"""Tests the operators of `torch_bridge` without a GPU: against float64, in autograd, `torch.func` and compilers."""

import dataclasses
import functools

import cases
import numpy as np
import oracle
import pytest
from cases import Case
from torch_calls import CELLS, MGU, every_device, moved, run, torch

from torch_bridge import cells, functional, rnn_ops, torch_loop
from torch_bridge.rnn_ops import kernels

T, B, H, D, S = 4, 3, 5, 2, 3
WITH_ORACLE = (*CELLS, "mgu", "rms_norm_gru", "layer_norm_gru")  # `rnn` runs the others; test_torch_rnn.py tests it
FUNCTIONS = {"gru": functional.gru, "lstm": functional.lstm, "mgu": functional.mgu, "simple_tanh": functional.rnn,
             "simple_relu": functools.partial(functional.rnn, nonlinearity="relu"),
             "rms_norm_gru": functional.norm_gru,
             "layer_norm_gru": functools.partial(functional.norm_gru, norm="layer")}  # fmt: skip
MODULES = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM, "mgu": MGU, "simple_tanh": torch.nn.RNN,
           "simple_relu": functools.partial(torch.nn.RNN, nonlinearity="relu")}  # fmt: skip
every_operator = pytest.mark.parametrize("cell", FUNCTIONS)
every_cell_with_a_single_step = pytest.mark.parametrize("cell", MODULES)


def variations(cell):
    base = Case(cell, T=5, B=3, H=6, D=4, precision="highest", cells=cell == "lstm")
    changes = (
        {}, {"resets": "none"}, {"resets": "all", "reset_state": "h"}, {"reset_state": "bh", "reverse": True},
        {"reset_state": "tbh", "time_major": False, "reset_dtype": "float32"}, {"T": 1, "B": 1, "H": 1, "D": 1},
        {"models": 2, "reset_state": "h", "reverse": True, "time_major": False}, {"cells": False},
    )  # fmt: skip
    if cells.CELLS[cell].norm:  # gradients of a norm of two elements are zero but for rounding errors
        changes = [change | {"D": 5} if change.get("D") == 1 else change for change in changes]
    return [dataclasses.replace(base, **change) for change in changes]


CASES = list(dict.fromkeys(case for cell in WITH_ORACLE for case in variations(cell)))


@pytest.mark.quick("case.cell")
@pytest.mark.parametrize("implementation", [None, "torch"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_loops_match_the_oracle(case, implementation):
    for dtype, bound in (("f64", 1e-14), ("f32", 1e-6)):
        typed = dataclasses.replace(case, dtype=dtype, carry_dtype=dtype)
        inputs = cases.make_inputs(case)
        got = run(typed, inputs, implementation)
        cases.compare(got, cases.run_oracle(case, inputs), lambda _, bound=bound: bound)


@pytest.mark.parametrize("dtypes", [("bf16", "f32"), ("bf16", "bf16"), ("f16", "f16")], ids="-".join)
@pytest.mark.parametrize("cell", WITH_ORACLE)
def test_narrow_operands_keep_a_wide_state(cell, dtypes):
    case = Case(cell, T=64, B=3, H=6, D=4, dtype=dtypes[0], carry_dtype=dtypes[1], reset_state="h")
    # the terms of a scale's gradient cancel, so its error in one draw is mostly chance
    draws = [cases.make_inputs(case, k) for k in range(8 if cells.CELLS[cell].norm else 1)]
    rounding = {"f32": 2.0**-24, "bf16": 2.0**-8, "f16": 2.0**-11}
    got = cases.stack([run(case, inputs) for inputs in draws])
    want = cases.stack([cases.run_oracle(case, inputs) for inputs in draws])
    cases.compare(got, want, lambda _: 2 * rounding[dtypes[0]])


INTERPRETED = [
    case
    for cell in WITH_ORACLE
    for case in (
        Case(cell, T=3, B=5, H=12, D=4, precision="highest", reset_state="tbh", cells=cell == "lstm"),
        Case(cell, T=3, B=2, H=12, D=4, precision="highest", resets="none", reverse=True, time_major=False),
        Case(cell, T=2, B=2, H=70, D=4, precision="highest", reset_state="bh", reset_dtype="float32"),
        Case(cell, T=2, B=2, H=36, D=4, reset_state="h"),
        Case(cell, T=2, B=3, H=12, D=4, precision="highest", models=2, reset_state="h", cells=cell == "lstm"),
        Case(cell, T=2, B=2, H=12, D=4, dtype="f16", carry_dtype="f16"),
    )
]


@pytest.mark.quick("case.cell")
@pytest.mark.interpret
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_kernels_match_the_oracle(case):
    inputs = cases.make_inputs(case)
    bound = 2e-3 if (case.dtype, case.precision) == ("f32", "default") else {"f32": 1e-6, "f16": 2.0**-9}[case.dtype]
    cases.compare(run(case, inputs, "triton"), cases.run_oracle(case, inputs), lambda _: bound)


def test_weights_are_rounded_to_tf32():
    w = torch.tensor([1.0, 1 + 2**-11, 1 + 2**-11 - 2**-20, -(1 + 3 * 2**-11), 3e38, torch.inf, -torch.inf, 2**-140])
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001]).to(torch.int32).view(torch.float32)
    got = kernels.weights_for_tensor_cores(torch.cat([w, nans]), "tf32")
    torch.testing.assert_close(got[:4], torch.tensor([1.0, 1 + 2**-10, 1.0, -(1 + 2**-9)]), rtol=0, atol=0)
    assert abs(got[4] / 3e38 - 1) < 2**-11
    assert got[5] == torch.inf and got[6] == -torch.inf and got[7] == 0
    assert (got.view(torch.int32) & -0x2000).view(torch.float32)[8:].isnan().all()  # tensor cores read NaN too
    precise = kernels.weights_for_tensor_cores(torch.cat([w, nans]), "tf32x3")
    torch.testing.assert_close(precise[:8], w, rtol=0, atol=0)
    assert (precise.view(torch.int32) & -0x2000).view(torch.float32)[8:].isnan().all()


def arguments(cell, dtype=torch.float32, seed=0, **changes):
    """Returns arguments of the forward operator, with several models and groups, and with every option."""
    generator = torch.Generator().manual_seed(seed)
    G, spec = 2 * S, cell_of(cell)
    count = len(spec.states)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    resets = torch.rand(G, T, B, generator=generator) < 0.4
    options = {"order": "forward", "precision": "tf32x3", "norm_width": D + H, "cells": True, "save": True} | changes
    if count == 1:
        options.pop("cells")
    if not spec.norm:
        options.pop("norm_width")
    biases = [normal(S, H)] if spec.last_gate_separate else [normal(S, spec.gates * H) for _ in spec.norm_weights]
    # a part of a variance is positive
    statistics = [normal(G, T, B).detach().square().add(0.1).requires_grad_() for _ in spec.norm_inputs]
    weights = normal(G, T, B, spec.gates * H), normal(S, spec.gates * H, H), *biases, *statistics
    reset_state = (G, B, H) if count == 1 else (G, T, B, H)
    return (*weights, *(normal(G, B, H) for _ in range(count)), resets, *(normal(*reset_state) for _ in range(count)),
            *options.values())  # fmt: skip


def backward_arguments(cell, device="cpu", **changes):
    spec, forward = cell_of(cell), moved(arguments(cell, **changes), device)
    results = dict(zip(spec.forward_outputs, op_of(cell)(*forward), strict=True))
    count, saved = len(spec.states), [results[name] for name in spec.saved]
    gradients = [torch.randn_like(results["hs"]), *[None] * (count - 1)]
    gradients += [torch.randn(2 * S, B, H, device=device)] if count == 1 else [None] * count
    (resets,) = (x for x in forward if isinstance(x, torch.Tensor) and x.dtype == torch.bool)
    order = next(x for x in forward if isinstance(x, str))
    tensors = [x.detach() for x in (forward[1], results["hs"], *saved)]
    return (*tensors, resets, *gradients, order, "tf32x3", *([D + H] if spec.norm else []), True)


def cell_of(cell):
    return cells.CELLS[cell]


def op_of(cell):
    return rnn_ops.OPERATORS[cell].forward


# The operators of all cells have one factory: the two differ in the number of states.
deal = functools.partial(cases.deal, cells=FUNCTIONS, whole=("gru", "lstm"))
ORDERS = ("forward", "reverse", "bidirectional")


@pytest.mark.quick
@every_device
@pytest.mark.parametrize(("cell", "order"), deal(ORDERS))
def test_opcheck(cell, device, order):
    torch.library.opcheck(op_of(cell), moved(arguments(cell, order=order), device))
    torch.library.opcheck(rnn_ops.OPERATORS[cell].backward, backward_arguments(cell, device, order=order))


@every_operator
def test_opcheck_of_groups_of_one_sequence(cell):
    """Checks the groups of batch-major input: results of the loop must have the strides of the fake outputs."""
    spec, (xp, w_hh, *others) = cell_of(cell), arguments(cell)
    biases, sequences = int(spec.last_gate_separate) + len(spec.norm_weights), len(spec.norm_inputs)
    count, before = len(spec.states), biases + sequences
    one = [x[:1].detach().requires_grad_() for x in (w_hh, *others[:biases])]
    one += [x[:, :, :1].detach().requires_grad_() for x in others[biases:before]]
    states = [x[:, :1].detach().requires_grad_() for x in others[before : before + count]]
    options = [x for x in others if not isinstance(x, torch.Tensor)]
    empty = [None] * (1 + count)
    torch.library.opcheck(op_of(cell), (xp[:, :, :1].detach().requires_grad_(), *one, *states, *empty, *options))


@every_operator
def test_bad_orders_and_precisions_raise(cell):
    for changes in ({"order": "backward"}, {"precision": "high"}):
        with pytest.raises(ValueError, match="order must be one of forward, reverse, bidirectional; precision must be"):
            op_of(cell)(*arguments(cell, **changes))


@every_device
@pytest.mark.parametrize("cell", ["gru", "lstm", "layer_norm_gru"])  # with one state, two, and statistics of a norm
def test_opcheck_without_residuals(cell, device):
    torch.library.opcheck(op_of(cell), moved(arguments(cell, save=False), device))


def close(got, want, bound=1e-5):
    for x, y in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(want), strict=True):
        assert oracle.error(x.detach().numpy(), y.detach().numpy()) <= bound


@pytest.mark.parametrize(("cell", "order"), deal(ORDERS))
def test_directions_and_models_match_separate_calls(cell, order):
    """Calls each model separately, in its direction with its groups; also checks residuals that are recomputed."""
    names, args = cell_of(cell).forward_outputs, arguments(cell, order=order)
    tensors = sum(isinstance(x, torch.Tensor) for x in args)
    outputs = [name for name in names if name[1:] in ("s", "_last")]

    def gradients(args, saved=True):
        results = dict(zip(names, op_of(cell)(*args[:-1], saved), strict=True))
        leaves = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
        cotangents = [results[name].detach().cos() for name in outputs]
        found = torch.autograd.grad([results[name] for name in outputs], leaves, cotangents)
        return [results[name] for name in outputs], found

    want = gradients(args)
    close(gradients(args, saved=False), want)
    parts = []
    for s in range(S):
        one = [x[s : s + 1] if x.shape[0] == S else x[2 * s : 2 * s + 2] for x in args[:tensors]]
        one = [x.detach().requires_grad_(x.is_floating_point()) for x in one]
        way = order if order != "bidirectional" else ("forward", "reverse")[s % 2]
        parts.append(gradients((*one, way, *args[tensors + 1 :])))
    outputs_, gradients_ = zip(*parts, strict=True)
    close([torch.cat(x) for x in zip(*outputs_, strict=True)], want[0])
    close([torch.cat(x) for x in zip(*gradients_, strict=True)], want[1])


def weights(cell, hidden=H, dtype=torch.float32, lead=(), seed=0):
    """Returns `(xs, states, weights, resets, reset states)` for the function of a cell."""
    generator = torch.Generator().manual_seed(seed)
    wide, states = cell_of(cell).gates * hidden, len(cell_of(cell).states)

    def normal(*shape):
        return 0.5 * torch.randn(*lead, *shape, generator=generator, dtype=dtype)

    resets = torch.rand(*lead, T, B, generator=generator) < 0.4
    given = (normal(wide, D), normal(wide, hidden), normal(wide), normal(wide))
    return (
        normal(T, B, D), tuple(normal(B, hidden) for _ in range(states)), given, resets,
        tuple(normal(hidden) for _ in range(states)),
    )  # fmt: skip


def call(cell, xs, states, weights, resets, reset_states, **options):
    if cell != "lstm":
        return FUNCTIONS[cell](xs, *states, *weights, resets=resets, reset_state=reset_states[0], **options)
    (ys, cs), last = functional.lstm(
        xs, states, *weights, resets=resets, reset_state=reset_states, return_cells=True, **options
    )
    return ys, cs, *last


def loss(cell, *args, **options):
    outputs = call(cell, *args, **options)
    return sum((x * x.detach().cos()).sum() for x in outputs)


def leaves(args):
    found = [x for x in torch.utils._pytree.tree_leaves(args) if x.is_floating_point()]
    return [x.requires_grad_() for x in found]


@every_operator
def test_gradients_match_finite_differences(cell):
    xs, states, given, resets, new = weights(cell, dtype=torch.float64)

    def function(xs, *rest):
        n = len(states)
        return call(cell, xs, rest[:n], rest[n : n + 4], resets, rest[n + 4 :])

    assert torch.autograd.gradcheck(function, leaves((xs, states, given, new)), fast_mode=True)


@pytest.mark.parametrize("implementation", [None, pytest.param("triton", marks=pytest.mark.interpret)])
@pytest.mark.parametrize(("cell", "order"), deal(ORDERS[:2]))
def test_gradients_of_batched_cotangents_match_a_loop(cell, order, implementation):
    """Checks `is_grads_batched`, which uses another vmap than `torch.vmap`."""
    xs, states, given, resets, new = weights(cell)
    inputs = leaves((xs, states, given, new))
    options = {"reverse": order == "reverse", "implementation": implementation}
    y = call(cell, xs, states, given, resets, new, **options)[0].sum((0, 1))
    together = torch.autograd.grad(y, inputs, torch.eye(H), is_grads_batched=True, retain_graph=True)
    for i, one in enumerate(torch.eye(H)):
        apart = torch.autograd.grad(y, inputs, one, retain_graph=True)
        for x, want in zip(together, apart, strict=True):
            torch.testing.assert_close(x[i], want, rtol=1e-5, atol=1e-6)


def higher_derivatives(cell, args, **options):
    """Returns the gradients of a loss, of the sum of their squares, and of the sum of the squares of those."""
    inputs, found, value = leaves(args), [], loss(cell, *args, **options)
    for order in range(3):
        some = torch.autograd.grad(value, inputs, create_graph=order < 2, allow_unused=True, materialize_grads=True)
        value = sum(x.square().sum() for x in some)
        found += some
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("cell", "order"), deal(ORDERS[:2]))
def test_derivatives_of_any_order_match_those_of_implementation_torch(cell, order, dtype):
    args = weights(cell, dtype=torch.float64)
    want = higher_derivatives(cell, args, implementation="torch", reverse=order == "reverse")
    args = torch.utils._pytree.tree_map(lambda x: x.detach().to(dtype) if x.is_floating_point() else x, args)
    got = higher_derivatives(cell, args, reverse=order == "reverse")
    assert got[-1].dtype == dtype
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    for x, y in zip(got, want, strict=True):
        error = (x.double() - y).abs().max()
        assert error <= tolerance * y.abs().max() + tolerance


@every_operator
def test_second_derivatives_under_torch_func_match_those_of_implementation_torch(cell):
    xs, *rest = weights(cell, dtype=torch.float64)

    def function(implementation):
        def value(xs):
            return call(cell, xs, *rest, implementation=implementation)[0].pow(3).sum()

        def of_gradient(xs):
            return torch.func.grad(value)(xs).square().sum()

        batched = torch.vmap(torch.func.grad(of_gradient))(torch.stack([xs, 2 * xs]))
        vectorized = torch.autograd.functional.hessian(value, xs, vectorize=True)
        return batched, torch.func.jacrev(torch.func.jacrev(value))(xs), vectorized

    for x, y in zip(function(None), function("torch"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


AXES = {  # mapped axes of xs, states, weights, resets and reset states
    "all": (0, 0, 0, 0, 0), "weights": (None, None, 0, None, None), "shared": (0, 0, None, 0, 0),
    "inputs": (1, None, None, None, None), "states": (None, 1, None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("transform", ["grad of vmap", "vmap of grad", "backward through vmap", "vmap of vmap"])
@pytest.mark.parametrize(("cell", "axes"), deal(AXES))
def test_vmap_equals_a_loop_in_one_call(cell, axes, transform, monkeypatch):
    """Checks that the time loop is called once: the new axis adds models if weights are batched, else groups."""
    in_dims, size = AXES[axes], 2
    args = []
    for axis, wide, x in zip(in_dims, weights(cell, lead=(size,)), weights(cell), strict=True):
        mapped = torch.utils._pytree.tree_map(lambda x, axis=axis: x.movedim(0, axis), wide) if axis is not None else x
        args.append(mapped)
    argnums = (0, 1, 2, 4)

    def one(*args):
        return loss(cell, *args)

    def pick(args, i):
        return [
            x if axis is None else torch.utils._pytree.tree_map(lambda y, axis=axis: y.select(axis, i), x)
            for axis, x in zip(in_dims, args, strict=True)
        ]

    def looped(*args):
        return sum(one(*pick(args, i)) for i in range(size))

    plain = [torch.utils._pytree.tree_map(torch.clone, x) for x in args]
    inputs = leaves((plain[0], plain[1], plain[2], plain[4]))
    wanted = torch.autograd.grad(looped(*plain), inputs)
    calls = []
    original = torch_loop.forward
    monkeypatch.setattr(torch_loop, "forward", lambda call: calls.append(call.cell.name) or original(call))
    if transform == "backward through vmap":
        inputs = leaves((args[0], args[1], args[2], args[4]))
        found = torch.autograd.grad(torch.vmap(one, in_dims)(*args).sum(), inputs)
    elif transform == "grad of vmap":
        found = torch.func.grad(lambda *a: torch.vmap(one, in_dims)(*a).sum(), argnums)(*args)
    elif transform == "vmap of grad":
        found = torch.vmap(torch.func.grad(one, argnums), in_dims)(*args)
        found = [  # one gradient per example: sums those of shared arguments, moves the axis of the others back
            torch.utils._pytree.tree_map(lambda x, a=axis: x.sum(0) if a is None else x.movedim(0, a), part)
            for axis, part in zip((in_dims[i] for i in argnums), found, strict=True)
        ]
    else:
        twice = [None if a is None else 0 for a in in_dims]
        doubled = [
            x if a is None else torch.utils._pytree.tree_map(lambda x: torch.stack([x, x]), x)
            for a, x in zip(in_dims, args, strict=True)
        ]
        inner = torch.vmap(one, in_dims)
        found = torch.func.grad(lambda *a: torch.vmap(inner, tuple(twice))(*a).sum() / 2, argnums)(*doubled)
        found = [
            part if a is None else torch.utils._pytree.tree_map(lambda x: x.sum(0), part)
            for a, part in zip((in_dims[i] for i in argnums), found, strict=True)
        ]
    assert calls == [cell]
    close(found, wanted)


@pytest.mark.quick("cell")
@every_operator
def test_nan_and_gradients_do_not_cross_a_reset(cell):
    xs, states, given, resets, new = weights(cell)
    resets[:] = False
    resets[2] = True
    inputs = leaves((xs, states, given, new))
    clean = call(cell, xs, states, given, resets, new)
    found = torch.autograd.grad(clean[0][2:].sum(), inputs)
    assert all(not x.any() for x in (found[0][:2], *found[1 : 1 + len(states)]))
    assert found[0][2:].any()
    with torch.no_grad():
        states[0][:] = torch.nan
        got = call(cell, xs, states, given, resets, new)
    assert got[0][:2].isnan().all()
    torch.testing.assert_close(got[0][2:], clean[0][2:].detach(), rtol=0, atol=0)


@every_operator
def test_unused_outputs_and_inputs_need_no_gradient(cell):
    """Checks losses of one output each, and inputs some of which need no gradient."""
    args = weights(cell)
    inputs = leaves((args[0], args[2]))
    for part in range(len(call(cell, *args))):
        found = torch.autograd.grad(call(cell, *args)[part].sum(), inputs)
        want = torch.autograd.grad(call(cell, *args, implementation="torch")[part].sum(), inputs)
        close(found, want)


@every_operator
def test_flops_are_counted_in_both_passes(cell):
    from torch.utils.flop_counter import FlopCounterMode

    args, gates = weights(cell), cell_of(cell).gates
    leaves(args)
    with FlopCounterMode(display=False) as counter:
        loss(cell, *args).backward()
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    loop, projection = 2 * T * B * gates * H * H, 2 * T * B * gates * H * D
    assert counts[f"torch_bridge.{cell}"] == counts[f"torch_bridge.{cell}_backward"] == loop
    assert sum(counts.values()) == 3 * loop + 3 * projection


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cell", MODULES)
def test_autocast_matches_torch_nn(cell, dtype):
    xs, _, given, *_ = weights(cell)
    module = MODULES[cell](D, H)
    module.load_state_dict(dict(zip(module.state_dict(), given, strict=True)))
    inputs = leaves((xs, given))
    with torch.autocast("cpu", dtype):
        with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):  # whose LSTM not every CPU has
            want, _ = module(xs)
        ys, _ = FUNCTIONS[cell](xs, None, *given)
    assert ys.dtype == (dtype if cell == "lstm" else want.dtype)  # without that library, an LSTM returns float32
    close(ys.float(), want.float(), 2.0**-7)
    assert [x.dtype for x in torch.autograd.grad(ys.sum(), inputs)] == [torch.float32] * 5


@pytest.fixture(autouse=True)
def forget_compilations():
    """Resets the compiler, whose assumptions about shapes would otherwise carry over from one test to another."""
    torch._dynamo.reset()


def counting(graphs):
    def backend(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    return backend


@pytest.mark.quick
@pytest.mark.parametrize(
    "cell", ["gru", "lstm", "layer_norm_gru"]
)  # with one state, two, and a float among the options
def test_compiled_call_is_one_graph_for_any_length_and_batch(cell):
    graphs = []
    compiled = torch.compile(lambda *args: loss(cell, *args), backend=counting(graphs), fullgraph=True, dynamic=True)
    for steps, batch in ((7, B), (11, B), (5, 6), (9, 2)):
        args = weights(cell)
        states = tuple(torch.randn(batch, H) for _ in args[1])
        args = (torch.randn(steps, batch, D), states, args[2], torch.rand(steps, batch) < 0.4, args[4])
        inputs = leaves(args)
        got, want = compiled(*args), loss(cell, *args)
        close(got, want)
        close(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs))
    # the compiler empties the first graph of a function with a float, such as an epsilon, and begins again
    assert len([graph for graph in graphs if graph.graph.nodes]) == 1
    with torch.no_grad():
        close(compiled(*args), loss(cell, *args))


def set_precision(way, wanted):
    settings = torch.backends.cuda.matmul
    if way == "allow_tf32":
        settings.allow_tf32 = wanted == "tf32"
    elif way == "fp32_precision":
        settings.fp32_precision = wanted
    else:
        torch.set_float32_matmul_precision("high" if wanted == "tf32" else "highest")


@pytest.mark.parametrize(
    ("cell", "way"), deal(["fp32_precision", "allow_tf32", "set_float32_matmul_precision"], whole=("gru",))
)
def test_precision_follows_torch_in_compiled_code_too(cell, way):
    def operands(*args):
        return call(cell, *args)[0]

    graphs = []
    compiled = torch.compile(operands, backend=counting(graphs), fullgraph=True)
    args = weights(cell, hidden=40)
    for setting, wanted in (("ieee", "tf32x3"), ("tf32", "tf32")):
        set_precision(way, setting)
        compiled(*args)
        (found,) = (n.args for n in graphs[-1].graph.nodes if str(n.target) == f"torch_bridge.{cell}.default")
        assert [x for x in found if str(x).startswith("tf32")] == [wanted]
        assert rnn_ops.kernel_precision(None, 40) == wanted
        assert rnn_ops.kernel_precision(None, 32) == "tf32x3"
        assert [rnn_ops.kernel_precision(name, 32) for name in ("tf32", "tf32x3")] == ["tf32", "tf32x3"]
    set_precision(way, "ieee")
    assert len(graphs) == 2


@every_operator
def test_an_exported_program_runs_on_other_lengths_and_batches(cell, tmp_path):
    program, other = exported(cell)
    torch.export.save(program, tmp_path / "model.pt2")
    close(torch.export.load(tmp_path / "model.pt2").module()(*other), call(cell, *other), 0)


def exported(cell):
    """Returns a program for any length and batch, and arguments of another length and batch than it was made with."""

    class Model(torch.nn.Module):
        def forward(self, xs, states, weights, resets, reset_states):
            return call(cell, xs, states, weights, resets, reset_states)

    args, (steps, batch) = weights(cell), (torch.export.Dim(name, min=2, max=64) for name in ("steps", "batch"))
    none = torch.utils._pytree.tree_map(lambda _: None, args)
    shapes = ({0: steps, 1: batch}, tuple({0: batch} for _ in args[1]), none[2], {0: steps, 1: batch}, none[4])
    states = tuple(torch.randn(6, H) for _ in args[1])
    other = (torch.randn(9, 6, D), states, args[2], torch.rand(9, 6) < 0.4, args[4])
    return torch.export.export(Model(), args, dynamic_shapes=shapes), other


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:.torch.jit:DeprecationWarning"
)  # raised by Inductor
def test_a_package_compiled_ahead_of_time_runs_on_other_lengths_and_batches(tmp_path):
    cell = "lstm"  # test_torch_export.py compiles a GRU
    with torch.no_grad():
        program, other = exported(cell)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        close(torch._inductor.aoti_load_package(path)(*other), call(cell, *other))


@every_operator
def test_fake_outputs_have_the_shapes_and_dtypes_of_real_ones(cell):
    args = weights(cell)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(cell, *torch.utils._pytree.tree_map(mode.from_tensor, args))
    assert [(x.shape, x.dtype) for x in fake] == [(x.shape, x.dtype) for x in call(cell, *args)]


WRONG = [
    ({"xs": torch.zeros(4)}, ValueError, r"xs must be \[T, \*batch, D\] and floating point, got \(4,\)"),
    ({"xs": torch.zeros(T, B, D, dtype=torch.int32)}, ValueError, "and floating point, got .* of torch.int32"),
    ({"xs": torch.zeros(0, B, D), "resets": None, "new": None}, ValueError, "at least one step"),
    ({"xs": torch.zeros(T, B, D + 1)}, ValueError, r"w_ih must be \(\d+, 3\) for inputs \(4, 3, 3\)"),
    (
        {"xs": torch.zeros(T, B, D).half()},
        ValueError,
        "w_ih must have the dtype of xs, torch.float16, got torch.float32",
    ),
    ({"w_hh": torch.zeros(3, 3)}, ValueError, r"w_hh must be \(\d+, 5\)"),
    ({"h0": torch.zeros(B, H + 1)}, ValueError, r"h0 must be \[\*batch, width\] = \(3, 5\), got \(3, 6\)"),
    ({"h0": torch.zeros(B, H, dtype=torch.float64)}, ValueError, "h0 must be torch.float32, like xs, or float32"),
    (
        {"resets": torch.zeros(B, T)},
        ValueError,
        r"resets must be \(4, 3\) for xs \(4, 3, 2\), got \(3, 4\): pass resets.mT",
    ),
    ({"resets": torch.zeros(T, B, 1)}, ValueError, r"got \(4, 3, 1\): pass resets.squeeze\(-1\)"),
    ({"resets": None}, ValueError, "reset_state is given but resets is None"),
    ({"new": torch.zeros(2, H)}, ValueError, r"^reset_state must be \(5,\), \(3, 5\) or \(4, 3, 5\)"),
    ({"implementation": "cudnn"}, ValueError, 'implementation must be "triton", "torch" or None, got \'cudnn\''),
    ({"precision": "ieee"}, ValueError, 'precision must be "tf32", "tf32x3" or None'),
    ({"precision": "TF32"}, ValueError, r"""got 'TF32'; did you mean "tf32"\?"""),
    ({"precision": "highest"}, ValueError, r"""got 'highest'; did you mean "tf32x3"\?"""),
    ({"precision": "ieee", "implementation": "torch"}, ValueError, 'precision must be "tf32", "tf32x3" or None'),
    ({"xs": None}, ValueError, "xs must be a tensor, got None"),
    ({"h0": [0.0] * H}, ValueError, "h0 must be a tensor, got list"),
    ({"h0": np.zeros((B, H))}, ValueError, "h0 must be a tensor, got ndarray: pass torch.from_numpy of it"),
    ({"w_hh": None}, ValueError, "w_hh must be a tensor, got None"),
    ({"h0": torch.zeros(B, H, device="meta")}, ValueError, "h0 is on meta and w_hh is on cpu: move one of them"),
    (
        {"resets": torch.zeros(T, B, device="meta")},
        ValueError,
        "resets is on meta and w_hh is on cpu: move one of them",
    ),
]


@pytest.mark.parametrize(("cell", "wrong"), deal(WRONG), ids=lambda x: x if isinstance(x, str) else x[2][:20])
def test_bad_arguments_raise(cell, wrong):
    changes, kind, message = wrong
    xs, states, given, resets, new = weights(cell)
    names = {"xs": xs, "h0": states[0], "w_hh": given[1], "resets": resets, "new": new[0]} | changes
    given = (given[0], names.pop("w_hh"), *given[2:])
    state, reset_state = names.pop("h0"), names.pop("new")
    if cell == "lstm":
        message = message.replace("^reset_state", "^h of reset_state")
        state = (state, states[1])
        reset_state = None if reset_state is None else (reset_state, new[1])
    with pytest.raises(kind, match=message):
        FUNCTIONS[cell](names.pop("xs"), state, *given, reset_state=reset_state, **names)


@every_operator
def test_weights_in_the_layout_of_jax_raise(cell):
    xs, states, given, *_ = weights(cell)
    state = states if cell == "lstm" else states[0]
    with pytest.raises(ValueError, match=rf"w_ih must be \[\d \* H, D\] .* D = {D}, got .*: pass w_ih.mT and w_hh.mT"):
        FUNCTIONS[cell](xs, state, given[0].mT, given[1].mT, *given[2:])
    if not cell.startswith("simple"):  # their matrix is square
        with pytest.raises(ValueError, match=r"w_hh must be .*: pass w_hh.mT"):
            FUNCTIONS[cell](xs, state, given[0], given[1].mT, *given[2:])
    with pytest.raises(ValueError, match=r"w_ih must be \[\d \* H, D\]"):
        FUNCTIONS[cell](xs, state, given[0][:0], *given[1:])


@every_operator
def test_resets_by_position_raise(cell):
    xs, states, given, resets, *_ = weights(cell)
    state = states if cell == "lstm" else states[0]
    with pytest.raises(ValueError, match=r"b_ih must be .*: pass resets by its name"):
        FUNCTIONS[cell](xs, state, *given[:2], resets)


def test_state_of_an_lstm_must_be_a_pair():
    xs, states, given, *_ = weights("lstm")
    with pytest.raises(ValueError, match=r"state of an LSTM is a pair \(h, c\), got Tensor"):
        functional.lstm(xs, states[0], *given)


@pytest.mark.interpret
def test_triton_rejects_dtypes_that_it_cannot_run():
    xs, states, given, *_ = weights("gru", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"takes float32, bfloat16 and float16, not torch\.float64"):
        functional.gru(xs, *states, *given, implementation="triton")
    xs, states, given, *_ = weights("gru", dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="computes bfloat16 products wrongly in Triton's interpreter"):
        functional.gru(xs, *states, *given, implementation="triton")


@every_device
@every_operator
def test_operators_reject_arrays_on_two_devices(cell, device):
    """Checks real and fake calls: a kernel would read an address of another device."""
    args, other = moved(arguments(cell), device), "meta" if device == "cpu" else "cpu"
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor):
            mixed = (*args[:i], x.detach().to(other), *args[i + 1 :])
            with pytest.raises(ValueError, match=r"is on .* and w_hh is on .*: move one of them"):
                op_of(cell)(*mixed)
            with torch._subclasses.FakeTensorMode() as mode:
                mixed = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in mixed]
                with pytest.raises(ValueError, match=r"is on .* and w_hh is on .*: move one of them"):
                    op_of(cell)(*mixed)


@pytest.mark.quick("cell", "implementation")
@pytest.mark.parametrize("implementation", [None, "torch", pytest.param("triton", marks=pytest.mark.interpret)])
@every_operator
def test_resets_may_be_of_any_dtype(cell, implementation):
    xs, states, given, resets, new = weights(cell)
    want = call(cell, xs, states, given, resets, new, implementation=implementation)
    for name in RESET_DTYPES:
        typed = resets.to(torch.float32).to(getattr(torch, name))
        got = call(cell, xs, states, given, typed, new, implementation=implementation)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, msg=name)


@every_operator
def test_operators_reject_wrong_shapes(cell):
    args = list(arguments(cell))
    resets = next(i for i, x in enumerate(args) if x.dtype == torch.bool)
    state = resets - 1
    wrongs = (0, args[0][:, :, :, 1:]), (1, args[1][:, 1:]), (state, args[state][1:]), (resets, args[resets][:, 1:])
    for i, wrong in wrongs:
        with pytest.raises(ValueError, match="must be"):
            op_of(cell)(*args[:i], wrong, *args[i + 1 :])


@every_operator
def test_operators_reject_no_steps(cell):
    args = list(arguments(cell))
    xp, resets = args[0], next(i for i, x in enumerate(args) if x.dtype == torch.bool)
    args[0], args[resets] = xp[:, :0], args[resets][:, :0]
    with pytest.raises(ValueError, match="a recurrence needs at least one step, and xp has none"):
        op_of(cell)(*args)


def test_operators_reject_one_of_two_reset_states():
    args = list(arguments("lstm"))
    args[6] = None
    with pytest.raises(ValueError, match="reset_h and reset_c must be given together"):
        op_of("lstm")(*args)


RESET_DTYPES = (
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
)  # fmt: skip


@every_operator
def test_empty_batch_gives_empty_outputs(cell):
    xs, _, given, *_ = weights(cell)
    ys, last = FUNCTIONS[cell](xs[:, :0].requires_grad_(), None, *given)
    assert ys.shape == (T, 0, H)
    assert all(x.shape == (0, H) for x in torch.utils._pytree.tree_leaves(last))
    ys.sum().backward()


@every_operator
def test_extra_or_no_batch_axes_match_one_batch_axis(cell):
    args = weights(cell)
    want = call(cell, *args)
    twice = torch.utils._pytree.tree_map(lambda x: x.unsqueeze(-2).expand(*x.shape[:-1], 2, x.shape[-1]), args[:2])
    got = call(cell, *twice, args[2], args[3].unsqueeze(-1).expand(-1, -1, 2), args[4])
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x[..., 1, :], y, rtol=1e-6, atol=1e-6)
    one = call(cell, args[0][:, 1], tuple(x[1] for x in args[1]), args[2], args[3][:, 1], args[4])
    close(one[0], want[0][:, 1])


@pytest.mark.parametrize("batch_first", [False, True])
def test_sequences_reach_the_operator_without_a_copy(batch_first, monkeypatch):
    seen = {}
    original = rnn_ops.forward
    monkeypatch.setattr(rnn_ops, "forward", lambda call, *rest: seen.update(call=call) or original(call, *rest))
    xs, states, given, resets, _ = weights("gru")
    new = torch.randn(T, B, H)
    if batch_first:
        xs, resets, new = (x.transpose(0, 1).contiguous() for x in (xs, resets, new))
    functional.gru(xs, *states, *given, resets=resets, reset_state=new, batch_first=batch_first)
    call, (h0,), (got_new,) = seen["call"], seen["call"].states, seen["call"].reset_states
    for got, of in ((call.w_hh, given[1]), (h0, states[0]), (call.resets, resets), (got_new, new)):
        assert got.data_ptr() == of.data_ptr() and got.is_contiguous()
    outer = (B, T, 1) if batch_first else (1, T, B)
    assert call.xp.is_contiguous() and call.xp.shape[:3] == call.resets.shape == outer


@pytest.mark.parametrize("state", [None, "h", "bh", "tbh"])
@pytest.mark.parametrize("batch_first", [False, True])
@every_cell_with_a_single_step
def test_single_eager_step_runs_pytorchs_cell(cell, batch_first, state):
    """Checks that an actor's call runs no operator of ours, and has the results of the loop in PyTorch operations.

    PyTorch has no cell of an MGU, which runs two linear layers instead.
    """
    torch.manual_seed(0)
    H, gates, count = 5, cell_of(cell).gates, len(cell_of(cell).states)
    outer = (4, 2, 1) if batch_first else (1, 4, 2)
    draw = lambda *shape: torch.randn(shape).requires_grad_()  # noqa: E731
    xs, resets = draw(*outer, 3), torch.rand(outer) < 0.5
    weights = [draw(gates * H, 3), draw(gates * H, H), draw(gates * H), draw(gates * H)]
    carry = tuple(draw(4, 2, H) for _ in range(count))
    shape = {None: (), "h": (H,), "bh": (4, 2, H), "tbh": (*outer, H)}[state]
    reset_state = tuple(draw(*shape) for _ in range(count)) if shape else None
    leaves = [xs, *weights, *carry, *(reset_state or ())]

    def run(implementation):
        one = (lambda x: x) if cell == "lstm" else (lambda x: x and x[0])
        results = FUNCTIONS[cell](
            xs, one(carry), *weights, resets=resets, reset_state=one(reset_state), batch_first=batch_first,
            implementation=implementation, **({"return_cells": True} if cell == "lstm" else {}),
        )  # fmt: skip
        results = torch.utils._pytree.tree_leaves(results)
        return [*results, *torch.autograd.grad(sum(x.sin().sum() for x in results), leaves)]

    with torch.profiler.profile(acc_events=True) as profile:  # PyTorch 2.11 warns without `acc_events`
        got = run(None)
    names = {event.name for event in profile.events()}
    assert not [name for name in names if "torch_bridge" in name or "bmm" in name]  # the loop's products are batched
    assert cell == "mgu" or any(f"{cell.replace('simple', 'rnn')}_cell" in name for name in names)
    for x, y in zip(got, run("torch"), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
