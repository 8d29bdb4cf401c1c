"""Runs launches of time loops in the PTX emulator (`ptx`), and computes their results in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from ptx import Kernel

from benchmarks.problems import outputs_of
from torch_bridge import torch_loop
from torch_bridge.calls import BackwardCall, ForwardCall, Norm
from torch_bridge.cells import CELLS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from torch_bridge.recurrences import Launch
    from torch_bridge.tiling import Problem


def kernels_of(launch: Launch) -> list[Kernel]:
    """Compiles a launch, and returns its kernels."""
    compiled = launch.compile()
    return [Kernel(c.asm["ptx"], c.metadata.name, c.metadata.shared, c.metadata.num_warps) for c in compiled]


def run(launch: Launch, arrays: Mapping[str, Tensor], kernels: Sequence[Kernel], *, seed: int | None = None) -> None:
    """Runs the kernels of a launch in place on arrays by name, as `problems.make_arrays` makes them.

    Args:
      launch: what to run.
      arrays: on the CPU. Workspaces are added: zeros where the launch needs them, else NaN.
      kernels: those of `launch`, or changed ones.
      seed: of the order of warps and programs; see `ptx.Kernel.launch`.

    Raises:
      PTXError: the kernels do something invalid; see `ptx`.
    """
    tensors = dict(arrays)
    for name, length, dtype, zeroed in launch.workspaces:
        tensors[name] = torch.zeros(length, dtype=getattr(torch, dtype))
        if not zeroed:
            tensors[name].view(torch.uint8).fill_(0xFF)
    for call, kernel in zip(launch.kernels, kernels, strict=True):
        constants, scalars = dict(call.constants), dict(call.scalars)
        names = [name for name in call.function.arg_names if name not in constants]
        values = {
            name: scalars[name] if name in scalars else tensors[name.removesuffix("_ptr")].view(torch.uint8).numpy()
            for name in names
        }
        kernel.launch(call.grid, values, cluster=call.cluster, seed=seed)


def unpack_words(x: Tensor) -> dict[str, Tensor]:
    """Returns the residuals that `torch_bridge.kernels.common.pack_words` packs into `[..., 3H]`, by name.

    These are `local_grads` in float16, `[..., 4H]`, and `carry_gate` in float32, `[..., H]`.
    """
    first, second, third = x.view(torch.int16).unflatten(-1, (3, -1, 2)).unbind(-3)
    halves = [word.view(torch.float16)[..., half] for word, half in ((first, 1), (second, 1), (third, 1), (first, 0))]
    carry_gate = torch.stack((second[..., 0], third[..., 0]), -1).view(torch.float32)
    return {"local_grads": torch.stack(halves, -1).flatten(-2), "carry_gate": carry_gate.squeeze(-1)}


def expected(problem: Problem, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the outputs of a problem in float64, by name.

    `torch_bridge.torch_loop` computes them; other tests compare it with `oracle`. If the kernel packs residuals into
    words (`problem.has_packed_residuals`), they are those that `unpack_words` returns.
    """
    cell = CELLS[problem.cell]
    words = unpack_words(arrays["local_grads"]) if problem.has_packed_residuals and problem.direction == "bwd" else {}
    float64 = {name: x.double() for name, x in {**arrays, **words}.items() if x.is_floating_point()}
    order = {False: "forward", True: "reverse", "bidirectional": "bidirectional"}[problem.reverse]
    written = outputs_of(problem)
    if problem.tangent:
        return _tangent(problem, float64, arrays["reset"])
    if problem.direction == "fwd":
        norm = None
        if cell.norm:
            of_norm = {name: float64[name] for name in (*cell.norm_weights, *cell.norm_inputs)}
            norm = Norm(problem.norm_width, **of_norm)
        states = tuple(float64[f"{s}0"] for s in cell.states)
        reset_states = tuple(float64.get(f"reset_{s}") for s in cell.states)
        call = ForwardCall(
            cell, float64["xp"], float64["w_hh_t"], float64.get("b_hn"), states, arrays["reset"], reset_states, norm,
            order, problem.precision, returned=cell.states, save=True,
        )  # fmt: skip
        results = torch_loop.forward(call)
    else:
        residuals = {name: float64[name] for name in cell.saved}
        dsequences = tuple(float64.get(f"d{s}s") for s in cell.states)
        dlast = tuple(float64[f"d{s}_last"] for s in cell.states)
        call = BackwardCall(
            cell, float64["w_hh"].mT, float64["dhs"], residuals, arrays["reset"], dsequences, dlast, order,
            problem.precision, problem.norm_width, reset_gradients=True,
        )  # fmt: skip
        results = torch_loop.backward(call)
        if "total_dh" in written:
            results |= _totals(problem, float64, arrays["reset"], results)
    if problem.has_packed_residuals and problem.direction == "fwd":
        written.append("carry_gate")
    return {name: results[name] for name in written}


def _steps(problem: Problem) -> Iterator[tuple[int, int, list[int]]]:
    """Yields each group with its model, and its steps in the order of the forward pass."""
    for group in range(problem.groups):
        model = group * problem.models // problem.groups
        reverse = model % 2 == 1 if problem.reverse == "bidirectional" else problem.reverse
        yield group, model, sorted(range(problem.steps), reverse=bool(reverse))


def _totals(
    problem: Problem, arrays: Mapping[str, Tensor], resets: Tensor, results: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the gradients of the states of each step, given the other results of a backward launch without a norm."""
    cell, hidden = CELLS[problem.cell], problem.hidden
    products = results["dxp"]
    if cell.last_gate_separate:
        products = torch.cat([products[..., : (cell.gates - 1) * hidden], results["dhn"]], -1)
    totals = {s: torch.empty_like(arrays["dhs"]) for s in cell.states}
    for group, model, order in _steps(problem):
        after = {s: arrays[f"d{s}_last"][group] for s in cell.states}
        for t in reversed(order):
            for s, d in after.items():
                totals[s][group, t] = d + arrays[f"d{s}s"][group, t] if f"d{s}s" in arrays else d
            last = totals[cell.states[-1]][group, t]
            if len(cell.states) > 1:
                last = last + totals["h"][group, t] * arrays["dc_dh"][group, t]
            before = {"h": products[group, t] @ arrays["w_hh"][model].mT}
            if "carry_gate" in arrays:
                carried = last * arrays["carry_gate"][group, t]
                before[cell.states[-1]] = before.get(cell.states[-1], 0.0) + carried
            after = {s: torch.where(resets[group, t, :, None], 0.0, d) for s, d in before.items()}
    return {f"total_d{s}": x for s, x in totals.items()}


def _tangent(problem: Problem, arrays: Mapping[str, Tensor], resets: Tensor) -> dict[str, Tensor]:
    """Returns the outputs of the tangent of a forward launch, of a cell without a norm."""
    cell = CELLS[problem.cell]
    local_grads = arrays["local_grads"].unflatten(-1, (problem.hidden, -1)).unbind(-1)
    by_gate = local_grads[: cell.gates]
    if cell.last_gate_separate:
        by_gate = *by_gate[:-1], local_grads[cell.gates]
    results = {f"{s}s": torch.empty_like(arrays["local_grads"][..., : problem.hidden]) for s in cell.states}
    results |= {f"{s}_last": arrays[f"{s}0"] for s in cell.states}
    for group, model, order in _steps(problem):
        states = [arrays[f"{s}0"][group] for s in cell.states]
        for t in order:
            states = [torch.where(resets[group, t, :, None], 0.0, x) for x in states]
            products = (states[0] @ arrays["w_hh_t"][model].mT).chunk(cell.gates, -1)
            terms = [f[group, t] * p for f, p in zip(by_gate, products, strict=True)]
            if "carry_gate" in arrays:
                terms.append(arrays["carry_gate"][group, t] * states[-1])
            if len(cell.states) > 1:  # the last gate changes h alone
                of_output = terms.pop(cell.gates - 1)
                changes = [of_output + arrays["dc_dh"][group, t] * sum(terms), sum(terms)]
            else:
                changes = [sum(terms)]
            added = arrays["xp"][group, t].chunk(len(changes), -1)
            states = [x + change for x, change in zip(added, changes, strict=True)]
            for s, x in zip(cell.states, states, strict=True):
                results[f"{s}s"][group, t] = x
        for s, x in zip(cell.states, states, strict=True):
            results[f"{s}_last"][group] = x
    return results
