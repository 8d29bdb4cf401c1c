"""Runs the cases of `cases.py` by `torch_bridge.functional`, and defines helpers that tests of PyTorch share."""

import cases
import numpy as np
import pytest
from cases import Case

torch = pytest.importorskip("torch")
from torch_bridge import cells, functional  # noqa: E402  # needs torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
CELLS = ("gru", "lstm")
every_cell = pytest.mark.parametrize("cell", CELLS)
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class MGU(torch.nn.GRU):
    """An MGU by `torch.nn`: a GRU whose gates r and z have the same weights. Its parameters have rows f, n."""

    def __init__(self, *args, **kwargs):
        seed = torch.get_rng_state()
        super().__init__(*args, **kwargs)
        for name, w in [*self.named_parameters()]:
            setattr(self, name, torch.nn.Parameter(w.detach()[: 2 * self.hidden_size].clone()))
        self.grus = [torch.nn.GRU(*args, **kwargs)]  # in a list, so that it is no submodule
        torch.set_rng_state(seed)
        self.reset_parameters()

    def forward(self, input, hx=None):
        tied = {name: torch.cat((w[: self.hidden_size], w)) for name, w in self.named_parameters()}
        return torch.func.functional_call(self.grus[0].train(self.training), tied, (input, hx))


def moved(arguments, device):
    """Returns `arguments` with their tensors detached and moved to a device; each keeps its `requires_grad`."""

    def move(x):
        return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    return tuple(map(move, arguments))


def flat(tree):
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def with_gradients(function, leaves, *args, **kwargs):
    """Returns the tensors among the results of a function, and the gradients of a fixed sum of them to `leaves`."""
    outputs = flat(function(*args, **kwargs))
    cotangents = [torch.linspace(-1, 1, x.numel(), device=x.device, dtype=x.dtype).reshape(x.shape) for x in outputs]
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, cotangents))]


def capture(step):
    """Returns a CUDA graph of a function, which it calls once before, and the results that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # threads of JAX may call CUDA meanwhile
        return graph, step()


def replay(graph, results):
    """Replays a CUDA graph, before which its `results` are NaN, and returns these."""
    for x in results:
        x.fill_(torch.nan)
    graph.replay()
    return results


def arrays(tensors):
    """Returns tensors as arrays of NumPy."""
    return [x.cpu().numpy() for x in tensors]


def tensor(x, dtype, device="cpu"):
    return torch.tensor(np.asarray(x, np.float64 if dtype == torch.float64 else np.float32), dtype=dtype, device=device)


def run(case: Case, inputs, implementation=None, device="cpu", call=lambda function: function):
    """Returns outputs and every gradient of `case`, with the names and layouts of `cases.run`.

    `call` may transform the function, which takes a tensor for each input and returns a tuple.
    """
    operand, carry = DTYPES[case.dtype], DTYPES[case.carry_dtype]
    given, fixed = {}, {}
    for name, x in inputs.items():
        if name == "resets":
            fixed[name] = None if x is None else torch.tensor(x, device=device)
        elif name.startswith("ct_"):
            fixed[name] = tensor(x, carry, device)
        elif x is not None:
            given[name] = tensor(x, carry if name in cases.CARRY[case.cell] else operand, device).requires_grad_()
    names = list(given)

    def forward(resets, *tensors):
        return _forward(case, implementation, resets, **dict(zip(names, tensors, strict=True)))

    function = call(torch.vmap(forward, in_dims=(None if fixed["resets"] is None else 0, *(0 for _ in names)))
                    if case.models else forward)  # fmt: skip
    outputs = dict(zip(outputs_of(case), function(fixed["resets"], *given.values()), strict=True))
    cotangents = [fixed[f"ct_{name}"] for name in outputs]
    gradients = torch.autograd.grad(list(outputs.values()), list(given.values()), cotangents)
    results = outputs | {f"d{name}": x for name, x in zip(names, gradients, strict=True)}
    return {name: x.detach().double().cpu().numpy() for name, x in results.items()}


def outputs_of(case):
    return ("ys", "carry") if case.cell != "lstm" else (*cases.sequences(case), "carry_c", "carry_h")


def _forward(case, implementation, resets, *, xs, w_ih, w_hh, **rest):
    options = {
        "resets": resets, "reverse": case.reverse, "batch_first": not case.time_major, "implementation": implementation,
        "precision": {"default": "tf32", "highest": "tf32x3", "high": "tf32x3", None: None}[case.precision],
    }  # fmt: skip
    if cells.CELLS[case.cell].norm:
        of_norm = {name: x for name, x in rest.items() if name.startswith(("scale", "shift"))}
        return functional.norm_gru(
            xs, rest["carry"], w_ih.mT, w_hh.mT, rest["b"], norm=cells.CELLS[case.cell].norm,
            reset_state=rest.get("reset_state"), **of_norm, **options,
        )  # fmt: skip
    if case.cell != "lstm":
        function, gates = getattr(functional, case.cell), cells.CELLS[case.cell].gates
        b_hh = torch.nn.functional.pad(rest["b_hn"], ((gates - 1) * case.H, 0)) if "b_hn" in rest else None
        b_ih = rest["b_ih"] if "b_ih" in rest else rest["b"]
        return function(xs, rest["carry"], w_ih.mT, w_hh.mT, b_ih, b_hh, reset_state=rest.get("reset_state"), **options)
    state = (rest["reset_h"], rest["reset_c"]) if "reset_h" in rest else None
    ys, (h, c) = functional.lstm(
        xs, (rest["carry_h"], rest["carry_c"]), w_ih.mT, w_hh.mT, rest["b"], reset_state=state,
        return_cells=case.cells, **options,
    )  # fmt: skip
    return (*ys, c, h) if case.cells else (ys, c, h)
