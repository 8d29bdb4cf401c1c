"""Tests programs of `torch.export` and `torch.compile`: the sizes that they are general in, and what a saved one needs.

All sizes of an example are equal, so that a program that looks one up, or compares it with another, is not general.
"""

import functools
import itertools
import subprocess
import sys
import types

import pytest
from child import environment
from torch_calls import torch

from torch_bridge import functional, nn

N = 4  # the size of every axis of an example, except for those of gates and of layers
CELLS = {  # module, function, number of gates
    "GRU": (nn.GRU, functional.gru, 3), "LSTM": (nn.LSTM, functional.lstm, 4), "MGU": (nn.MGU, functional.mgu, 2),
    "RNN": (nn.RNN, functional.rnn, 1), "NormGRU": (nn.NormGRU, functional.norm_gru, 3),
    "LayerNormGRU": (
        functools.partial(nn.NormGRU, norm="layer"), functools.partial(functional.norm_gru, norm="layer"), 3
    ),
}  # fmt: skip
NORMS = {"RMSNorm": (nn.RMSNorm, functional.rms_norm), "LayerNorm": (nn.LayerNorm, functional.layer_norm)}
# Arrays are described by a letter for each axis: t time, b batch, a second batch axis, s layers and directions,
# p projected width, w width, d inputs.
LAYOUTS = {"time-first": "tb", "batch-first": "bt", "one-sequence": "t", "two-batch-axes": "tba"}
RESET_STATES = ("zeros", "learned", "each", "stepped")
DYNAMIC = {letter: torch.export.Dim(name, min=2, max=64) for letter, name in (("t", "steps"), ("b", "batch"))}


@pytest.fixture(autouse=True)
def forget_compilations():
    """Resets the compiler, whose assumptions about shapes would otherwise carry over from one test to another."""
    torch._dynamo.reset()


class Program(torch.nn.Module):
    """Calls a function, with the parameters of a module if it is one."""

    def __init__(self, function, module=None):
        super().__init__()
        self.function, self.module = function, module

    def forward(self, *args):
        return self.function(*args)


def axes_of(cell, kind, layout, reset_state):
    """Returns the axes of `(xs, states, resets, reset states)`; a tuple for two states, None without reset states."""
    outer, stack = LAYOUTS[layout], "s" if kind == "module" else ""
    batch = outer.replace("t", "")
    new = {"learned": "", "each": batch, "stepped": outer}.get(reset_state)
    states = stack + batch + "p", stack + batch + "w"
    new = None if new is None else (stack + new + "p", stack + new + "w")
    if cell != "LSTM":
        states, new = states[1], new and new[1]
    return outer + "d", states, outer, new


def example(cell, kind, layout, reset_state, **options):
    """Returns a program, its dynamic shapes, and a function that makes arguments of a length and a batch."""
    make_module, function, gates = CELLS[cell]
    options["batch_first"] = layout == "batch-first"
    projected = options.get("proj_size") or N
    if kind == "module":
        run = module = make_module(N, N, **options)
        layers = module.num_layers * (2 if module.bidirectional else 1)
    else:
        module, layers, blocks = None, 0, options.pop("num_blocks", 1)
        w_hh = (gates * N, projected) if blocks == 1 else (blocks, gates * N // blocks, N // blocks)
        weights = [torch.randn(shape) for shape in ((gates * N, N), w_hh, (gates * N,), (gates * N,))]
        weights += [torch.randn(options.pop("proj_size"), N)] if "proj_size" in options else []

        def run(xs, state, **resets):
            return function(xs, state, *weights, **resets, **options)

    def call(xs, state, resets, new):
        return run(xs, state, resets=resets, reset_state=new)

    axes = axes_of(cell, kind, layout, reset_state)

    def arguments(steps, batch):
        sizes = {"t": steps, "b": batch, "a": N, "s": layers, "p": projected, "w": N, "d": N}
        xs, states, resets, new = torch.utils._pytree.tree_map(
            lambda array: None if array is None else torch.randn([sizes[axis] for axis in array]).requires_grad_(), axes
        )
        return xs, states, resets.detach() > 0.4, new

    shapes = torch.utils._pytree.tree_map(
        lambda array: array and {i: DYNAMIC[axis] for i, axis in enumerate(array) if axis in DYNAMIC}, axes
    )
    return Program(call, module), shapes, arguments


def assert_general(program, shapes, args, other, strict):
    """Exports a program, and compares its results for arguments of other sizes."""
    exported = torch.export.export(program, args, dynamic_shapes=(shapes,), strict=strict).module()
    torch.testing.assert_close(exported(*other), program(*other))


FORMS = [
    ("GRU", kind, layout, reset_state, {})
    for kind, layout, reset_state in itertools.product(("module", "function"), LAYOUTS, RESET_STATES)
    if (layout, reset_state) != ("one-sequence", "each") and (kind, layout) != ("module", "two-batch-axes")
]
FORMS += [
    (cell, *form, {})
    for cell in CELLS
    for form in (("module", "time-first", "each"), ("function", "batch-first", "stepped"))
    if cell != "GRU"  # the other cells share its code, and differ in their gates, states and norm
]
FORMS += [
    ("GRU", "module", "time-first", "each", {"bidirectional": True}),
    ("GRU", "module", "batch-first", "learned", {"num_layers": 2}),
    ("LSTM", "module", "batch-first", "stepped", {"bidirectional": True, "proj_size": 2}),
    ("GRU", "module", "one-sequence", "learned", {"bidirectional": True}),
    ("MGU", "module", "time-first", "learned", {"num_blocks": 2}),
    ("GRU", "function", "batch-first", "each", {"num_blocks": 2, "reverse": True}),
    ("LSTM", "function", "time-first", "stepped", {"proj_size": 2, "reverse": True}),
]
# Those that are also compiled, and exported in the other mode, in which another tracer runs the same code.
FEW = [
    ("GRU", "module", "time-first", "zeros", {}),
    ("GRU", "module", "one-sequence", "stepped", {}),
    ("GRU", "function", "batch-first", "each", {"num_blocks": 2, "reverse": True}),
    ("GRU", "module", "batch-first", "learned", {"num_layers": 2}),
    ("LSTM", "module", "batch-first", "stepped", {"bidirectional": True, "proj_size": 2}),
    ("LayerNormGRU", "module", "time-first", "each", {}),
]
of_form = functools.partial(
    pytest.mark.parametrize, ("cell", "kind", "layout", "reset_state", "options"),
    ids=lambda x: x if isinstance(x, str) else str(x or ""),
)  # fmt: skip
either_mode = pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])


@pytest.mark.quick
@of_form(FORMS)
def test_an_exported_recurrence_is_general_in_length_and_batch(cell, kind, layout, reset_state, options):
    program, shapes, arguments = example(cell, kind, layout, reset_state, **options)
    assert_general(program, shapes, arguments(N, N), arguments(N + 3, N + 1), strict=True)


@of_form([*FEW, *(form for form in FORMS if form[1:3] == ("function", "two-batch-axes"))])
def test_an_export_that_is_not_strict_is_general_in_length_and_batch(cell, kind, layout, reset_state, options):
    program, shapes, arguments = example(cell, kind, layout, reset_state, **options)
    assert_general(program, shapes, arguments(N, N), arguments(N + 3, N + 1), strict=False)


ALL_SIZES = {letter: torch.export.Dim(letter, min=2, max=64) for letter in "tbdh"}


@pytest.mark.parametrize("setting", ["ieee", "tf32"])
@pytest.mark.parametrize(
    ("cell", "reset_state", "strict"),
    [("GRU", "bh", True), ("LSTM", "h", False), ("RNN", "tbh", True), ("LayerNormGRU", "bh", False)],
)
def test_an_exported_function_of_weights_is_general_in_every_size(cell, reset_state, strict, setting):
    """`setting` is PyTorch's precision of float32 matmuls on GPUs."""
    torch.backends.cuda.matmul.fp32_precision = setting
    _, function, gates = CELLS[cell]

    def run(xs, states, w_ih, w_hh, bias, resets, new):
        pair = isinstance(new, tuple)
        return function(xs, states if pair else states[0], w_ih, w_hh, bias, resets=resets, reset_state=new)

    def arguments(t, b, d, h):
        sizes = {"t": t, "b": b, "h": h}
        states = (torch.randn(b, h),) * (2 if cell == "LSTM" else 1)
        new = torch.randn([sizes[axis] for axis in reset_state])
        weights = torch.randn(gates * h, d), torch.randn(gates * h, h), torch.randn(gates * h)
        return torch.randn(t, b, d), states, *weights, torch.rand(t, b) < 0.4, (new, new) if cell == "LSTM" else new

    t, b, d, h = ALL_SIZES.values()
    rows = gates * h if gates > 1 else h
    new = {i: ALL_SIZES[axis] for i, axis in enumerate(reset_state)}
    shapes = (
        {0: t, 1: b, 2: d}, ({0: b, 1: h},) * (2 if cell == "LSTM" else 1), {0: rows, 1: d}, {0: rows, 1: h}, {0: rows},
        {0: t, 1: b}, (new, new) if cell == "LSTM" else new,
    )  # fmt: skip
    assert_general(Program(run), shapes, arguments(N, N, N, N), arguments(N + 3, N + 1, N + 2, N + 5), strict)


@pytest.mark.parametrize(("cell", "bidirectional", "strict"), [("GRU", True, False), ("LSTM", False, True)])
def test_exported_trajectories_are_general_in_length_and_batch(cell, bidirectional, strict):
    module = CELLS[cell][0](N, N, batch_first=True, bidirectional=bidirectional)
    count = 2 if cell == "LSTM" else 1

    def arguments(steps, batch):
        states = [torch.randn(batch, steps, 2 if bidirectional else 1, N) for _ in range(count)]
        return torch.randn(batch, steps, N), torch.rand(batch, steps, 1) < 0.4, *states

    program = Program(lambda *args: nn.run_trajectories(module, *args), module)
    axes = {0: DYNAMIC["b"], 1: DYNAMIC["t"]}
    assert_general(program, (axes,) * (2 + count), arguments(N, N), arguments(N + 3, N + 1), strict)


@either_mode
@pytest.mark.parametrize("norm", NORMS)
def test_an_exported_norm_is_general_in_every_size(norm, strict):
    make, function = NORMS[norm]
    t, b, d, _ = ALL_SIZES.values()

    def arrays(*sizes):
        return torch.randn(sizes), torch.randn(sizes)

    weights = {0: d}, {0: d}
    assert_general(
        Program(lambda x, residual, weight, bias: function(x, weight, bias, residual=residual)),
        ({0: t, 1: b, 2: d}, {0: t, 1: b, 2: d}, *weights), (*arrays(N, N, N), *arrays(N)),
        (*arrays(N + 3, N + 1, N + 2), *arrays(N + 2)), strict,
    )  # fmt: skip
    for shape in ((N,), (N, N)):  # a tensor of four axes, in both memory formats, one row of one or two axes
        module = make(shape)
        axes = {0: t} if len(shape) == 2 else {0: t, 1: b, 2: d}
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x, y = arrays(N, N, N, N)[0], arrays(N + 3, *((N, N) if len(shape) == 2 else (N + 1, N + 2)), N)[0]
            x, y = (z.contiguous(memory_format=memory_format) for z in (x, y))
            assert_general(Program(module, module), (axes,), (x,), (y,), strict)


def counted(function, **options):
    """Returns a compiled function, and the list of the graphs that were compiled for it."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    return torch.compile(function, backend=backend, **options), graphs


def compilations(function, calls):
    """Returns how often `torch.compile` compiles a function for these calls, each forward and backward."""
    compiled, graphs = counted(function, fullgraph=True)
    for args in calls:
        results = [torch.utils._pytree.tree_leaves(run(*args)) for run in (compiled, function)]
        torch.testing.assert_close(*results)
        inputs = [x for x in torch.utils._pytree.tree_leaves(args) if x is not None and x.requires_grad]
        gradients = [torch.autograd.grad(sum(x.sum() for x in outputs), inputs) for outputs in results]
        torch.testing.assert_close(*gradients)
    return len(graphs)


# A first call is compiled for its sizes, and another one for every axis that changes after it.
LENGTHS, LENGTHS_AND_BATCHES = ((4, 4), (5, 4), (6, 4), (7, 4)), ((4, 4), (5, 4), (6, 5), (7, 6), (8, 7))


@of_form(FEW)
def test_a_recurrence_is_compiled_once_for_all_lengths_and_batches(cell, kind, layout, reset_state, options):
    program, _, arguments = example(cell, kind, layout, reset_state, **options)
    if layout == "one-sequence":
        assert compilations(program.function, [arguments(*sizes) for sizes in LENGTHS]) == 2
    else:
        assert compilations(program.function, [arguments(*sizes) for sizes in LENGTHS_AND_BATCHES]) == 3


def test_packed_inputs_with_a_reset_state_are_compiled_once_for_all_lengths():
    module, counts = nn.GRU(N, N, bidirectional=True), []
    compiled, graphs = counted(module)
    with torch.no_grad():
        for steps in range(4, 9):
            lengths, new = [steps, steps - 1, 2], torch.randn(2, N)
            packed = torch.nn.utils.rnn.pack_padded_sequence(torch.randn(steps, 3, N), lengths)
            options = {"resets": packed._replace(data=torch.rand(sum(lengths)) < 0.3), "reset_state": new}
            torch.testing.assert_close(compiled(packed, **options)[0].data, module(packed, **options)[0].data)
            counts.append(len(graphs))
    assert 0 < counts[1] == counts[-1]


def test_trajectories_are_compiled_once_for_all_lengths_and_batches():
    module = nn.LSTM(N, N, batch_first=True)

    def arguments(steps, batch):
        states = [torch.randn(batch, steps, 1, N).requires_grad_() for _ in range(2)]
        return torch.randn(batch, steps, N).requires_grad_(), torch.rand(batch, steps, 1) < 0.4, *states

    def run(*args):
        return nn.run_trajectories(module, *args)

    assert compilations(run, [arguments(*sizes) for sizes in LENGTHS_AND_BATCHES]) == 3


@pytest.mark.parametrize("over", ["weights", "inputs"])
def test_vmap_is_compiled_once_for_all_lengths_and_batches(over):
    w_ih, w_hh = torch.randn(2, 3 * N, N), torch.randn(2, 3 * N, N)

    def run(xs, resets):
        def gru(xs, resets, w_ih, w_hh):
            return functional.gru(xs, None, w_ih, w_hh, resets=resets, batch_first=True)[0]

        if over == "weights":
            return torch.vmap(gru, (None, None, 0, 0))(xs, resets, w_ih, w_hh)
        return torch.vmap(gru, (0, 0, None, None))(xs, resets, w_ih[0], w_hh[0])

    outer = () if over == "weights" else (N,)
    calls = [
        (torch.randn(*outer, batch, steps, N).requires_grad_(), torch.rand(*outer, batch, steps) < 0.3)
        for steps, batch in LENGTHS_AND_BATCHES
    ]
    assert compilations(run, calls) == 3


@pytest.mark.parametrize(
    ("cell", "implementation"),
    [
        ("GRU", None), ("LayerNorm", None),
        *(pytest.param(cell, "triton", marks=pytest.mark.interpret) for cell in ("LayerNormGRU", "RMSNorm")),
    ],
)  # fmt: skip
def test_functions_of_weights_are_compiled_once_for_all_widths(cell, implementation):
    def run(*args):
        if cell in NORMS:
            return NORMS[cell][1](*args, implementation=implementation)
        return CELLS[cell][1](args[0], None, *args[1:], implementation=implementation)

    def arguments(width):
        weights = [torch.ones(width)] if cell in NORMS else [torch.randn(3 * width, N), torch.randn(3 * width, width)]
        xs = torch.randn(3, width) if cell in NORMS else torch.randn(3, 2, N)
        return [x.requires_grad_() for x in (xs, *weights)]

    assert compilations(run, [arguments(width) for width in (4, 5, 6, 7)]) == 2


# A program is loaded, as it was saved, in a process that imports this package alone, before or after PyTorch.
ORDERS = ("torch, torch_bridge", "torch_bridge, torch")


class Agent(torch.nn.Module):
    """A norm, and a layer with a learned state at the start of an episode."""

    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.RMSNorm(N), nn.GRU(N, N)
        self.start = torch.nn.Parameter(torch.randn(1, N))

    def forward(self, xs, resets):
        return self.rnn(self.norm(xs), resets=resets, reset_state=self.start)[0]


def exported_agent():
    """Returns an agent, its program for any length and batch, and arguments of another length and batch."""
    axes, agent = {0: DYNAMIC["t"], 1: DYNAMIC["b"]}, Agent()
    args = torch.randn(N, N, N), torch.rand(N, N) < 0.3
    program = torch.export.export(agent, args, dynamic_shapes=(axes, axes))
    return agent, program, (torch.randn(N + 2, N + 1, N), torch.rand(N + 2, N + 1) < 0.3)


@pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.* is deprecated:FutureWarning", "ignore:.torch.jit:DeprecationWarning"
)  # raised by Inductor
def test_saved_programs_need_no_import_but_that_of_the_package(tmp_path, monkeypatch):
    """Checks an exported program and a package that is compiled ahead of time."""
    from torch._inductor.lowering import lowerings

    monkeypatch.setenv("CI", "true")  # with which Inductor raises for operators that it has decompositions of, and
    for op in [op for op in lowerings if str(op).startswith("torch_bridge.")]:  # no lowerings
        monkeypatch.delitem(lowerings, op)
    with torch.no_grad():
        agent, program, args = exported_agent()
        torch.export.save(program, tmp_path / "agent.pt2")
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "compiled.pt2"))
        torch.save(args, tmp_path / "args.pt")
        load = "torch._inductor.aoti_load_package('compiled.pt2'), torch.export.load('agent.pt2').module()"
        for order in ORDERS:
            code = f"import {order}\ntorch.save([f(*torch.load('args.pt')) for f in ({load})], 'results.pt')"
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            torch.testing.assert_close(torch.load(tmp_path / "results.pt"), [agent(*args)] * 2)


@pytest.mark.parametrize("implementation", [None, pytest.param("triton", marks=pytest.mark.interpret)])
@pytest.mark.parametrize("cell", ["GRU", "LSTM", "NormGRU", "LayerNormGRU"])
def test_a_training_graph_with_the_forward_operator_decomposed_has_its_residuals(cell, implementation):
    """The backward operator, which has no decomposition, reads them."""
    torch.manual_seed(0)
    module = CELLS[cell][0](3, N, implementation=implementation)
    xs, resets = torch.randn(5, 2, 3), torch.rand(5, 2) < 0.3
    params = dict(module.named_parameters())

    def gradients(params, xs, resets):
        params = {name: x.detach().requires_grad_() for name, x in params.items()}
        ys = torch.func.functional_call(module, params, (xs,), {"resets": resets})[0]
        return torch.autograd.grad(ys.square().sum(), list(params.values()))

    want = gradients(params, xs, resets)
    name = {"NormGRU": "rms_norm_gru", "LayerNormGRU": "layer_norm_gru"}.get(cell, cell.lower())
    op, backward_op = (getattr(torch.ops.torch_bridge, f"{name}{end}").default for end in ("", "_backward"))
    table = torch._decomp.get_decompositions([op])
    graph = torch.fx.experimental.proxy_tensor.make_fx(gradients, table, tracing_mode="fake")(params, xs, resets)
    targets = [node.target for node in graph.graph.nodes]
    assert op not in targets and backward_op in targets
    torch.testing.assert_close(graph(params, xs, resets), want, rtol=1e-4, atol=1e-5)


def test_inductor_without_the_private_names_is_left_to_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.lowering", types.SimpleNamespace(lowerings={}))
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(1, 2, 3))
        y, *_ = torch.ops.torch_bridge.rms_norm(fake, None, None, None, 1e-6, torch.float32, False)
    assert y.shape == (1, 2, 3)
