"""Makes problems of `torch_bridge.tiling` and the arrays of their launches, and runs the launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_bridge.cells import CELLS
from torch_bridge.tiling import Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from torch_bridge.tiling import Device, Direction, KernelConfig, Precision, ResetState

# The dtype of the operands and the precision of the products, by the name of the combination.
KINDS: dict[str, tuple[str, Precision]] = {
    "tf32": ("float32", "tf32"),
    "tf32x3": ("float32", "tf32x3"),
    "bf16": ("bfloat16", "tf32"),
}
RESET_RATE = 0.05
# The number of inputs of a cell with a norm.
INPUTS = 24


def make_problem(
    cell: str,
    direction: Direction,
    kind: str,
    hidden: int,
    batch: int,
    *,
    steps: int = 64,
    reset_state: ResetState = "zeros",
    in_place: bool = False,
    halves: bool = True,
    tangent: bool = False,
    totals: bool = False,
    gate_dtype: str = "",
) -> Problem:
    """Returns a problem with every array that a kernel can take together with a reset state: the worst case.

    With the reset state "zeros", the problem has only common arrays (`Problem.has_only_common_arrays`): no per-step
    cell states, and no gradients of these, either. With `in_place`, the residuals of a GRU in TF32 overwrite its input
    projections. Without `halves`, the residuals are float32 in TF32 too, as JAX may declare them: see
    `torch_bridge.tiling.with_residual_dtypes`. With `tangent`, a forward launch runs the tangent of the pass. With
    `totals`, a backward launch also writes the gradients of all states. It writes those of the gates in `gate_dtype`,
    by default the dtype of the operands.
    """
    operand, precision = KINDS[kind]
    spec = CELLS[cell]
    states = spec.states
    saved = "float16" if precision == "tf32" and halves else "float32"
    if in_place:
        backward = {"local_grads": "float32"}
    else:
        backward = {name: "float32" if name == "carry_gate" else saved for name, _ in spec.residuals}
    names = {"w_hh_t" if direction == "fwd" else "w_hh": operand, "reset": "bool"}
    if direction == "fwd":
        names |= {f"reset_{s}": "float32" for s in states if reset_state != "zeros"}
        biased = spec.last_gate_separate and not tangent
        names |= {"xp": "float32"} | backward | ({"b_hn": "float32"} if biased else {})
        names |= dict.fromkeys(norm_arrays(spec.norm), "float32")
        names |= {f"{s}{suffix}": "float32" for s in states for suffix in ("0", "s", "_last")}
        if reset_state == "zeros" and not tangent:
            names.pop("cs", None)
    else:
        names |= backward | dict.fromkeys(("dxp", *spec.hidden_grads), gate_dtype or operand)
        names |= {"scale": "float32", "dnorm": "float32"} if spec.norm else {}
        names |= {f"d{s}{suffix}": "float32" for s in states for suffix in ("s", "_last", "0")}
        names |= {f"dreset_{s}": "float32" for s in states if reset_state != "zeros"}
        names |= {f"total_d{s}": "float32" for s in states if totals}
        if reset_state == "zeros":
            names.pop("dcs", None)
    norm_width = hidden + INPUTS if spec.norm else 0
    return Problem(
        cell, direction, 1, 1, steps, batch, hidden, tuple(names.items()), reset_state, False, precision, norm_width,
        tangent,
    )  # fmt: skip


def norm_arrays(norm: str) -> tuple[str, ...]:
    """Returns the further arrays of a forward launch of a cell with a norm."""
    rms = ("bias", "x_norm", "scale")
    return {"": (), "rms": rms, "layer": (*rms, "w_sum", "x_mean")}[norm]


def _in_words(problem: Problem, name: str) -> bool:
    """Returns whether an array has the packed format of `torch_bridge.kernels.common.pack_words`."""
    return name == "local_grads" and problem.has_packed_residuals


def shape_of(problem: Problem, name: str) -> tuple[int, ...]:
    """Returns the shape of an array: weights `[S, ...]`, sequences `[G, T, B, width]`, states `[G, B, H]`."""
    hidden, wide = problem.hidden, CELLS[problem.cell].gates * problem.hidden
    weights = {"w_hh_t": (wide, hidden), "w_hh": (hidden, wide), "b_hn": (hidden,), "bias": (wide,), "w_sum": (wide,)}
    if name in weights:
        return problem.models, *weights[name]
    if name in ("reset", "x_norm", "x_mean", "scale", "dnorm"):
        return problem.groups, problem.steps, problem.batch
    fixed = name in ("reset_h", "reset_c") and problem.reset_state == "fixed"
    if fixed or name.endswith(("0", "_last")):
        return problem.groups, problem.batch, hidden
    saved = wide if problem.has_packed_residuals else dict(CELLS[problem.cell].residuals)["local_grads"] * hidden
    added = len(CELLS[problem.cell].states) * hidden if problem.tangent else wide
    width = {"xp": added, "dxp": wide, "local_grads": saved}.get(name, hidden)
    return problem.groups, problem.steps, problem.batch, width


def outputs_of(problem: Problem) -> list[str]:
    """Returns the names of the arrays that the kernel writes."""
    if problem.direction == "fwd":
        written = {"hs", "cs", "h_last", "c_last"}
        if not problem.tangent:
            written |= {"local_grads", "dc_dh", "carry_gate", "norm_state", "scale"}
    else:
        written = {"dxp", "dhn", "dnorm", "dh0", "dc0", "dreset_h", "dreset_c", "total_dh", "total_dc"}
    return [name for name, _ in problem.dtypes if name in written]


def make_arrays(problem: Problem, place: torch.device | str = "cuda", seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns the arrays of a problem by name: random inputs that cause no overflow, and outputs filled with NaN."""
    import torch

    generator = torch.Generator(place).manual_seed(seed)
    outputs, arrays = outputs_of(problem), {}
    for name, dtype in problem.dtypes:
        shape = shape_of(problem, name)
        if name in outputs:
            x = torch.full(shape, float("nan"), dtype=getattr(torch, dtype), device=place)
        elif name == "reset":
            x = torch.rand(shape, generator=generator, device=place) < RESET_RATE
        elif _in_words(problem, name):
            x = _words(torch.rand((*shape[:-1], 5, problem.hidden), generator=generator, device=place))
        elif name in ("x_norm", "scale"):
            x = torch.rand(shape, generator=generator, device=place) + 0.5
        elif name in ("local_grads", "dc_dh", "carry_gate"):
            x = torch.rand(shape, generator=generator, device=place)
            x = x if name == "carry_gate" else (x - 0.5) / 2
        else:
            x = torch.randn(shape, generator=generator, device=place)
            x *= problem.hidden**-0.5 if name in ("w_hh", "w_hh_t") else 0.5
            if name in ("w_hh", "w_hh_t") and (dtype, problem.precision) == ("float32", "tf32"):
                x = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)  # callers round to TF32
        arrays[name] = x.to(getattr(torch, dtype))
    return arrays


def _words(x: torch.Tensor) -> torch.Tensor:
    """Packs `[..., 5, H]`, from 0 to 1, into a GRU's `[..., 3H]`, like `torch_bridge.kernels.common.pack_words`."""
    import torch

    d, a, b, c = ((x[..., :4, :] - 0.5) / 2).half().view(torch.int16).int().unbind(-2)
    carry_gate = x[..., 4, :].contiguous().view(torch.int32)
    words = [(low & 0xFFFF) | (high << 16) for low, high in ((d, a), (carry_gate, b), (carry_gate >> 16, c))]
    return torch.cat(words, -1).view(torch.float32)


class Run:
    """A launch of a problem with a tiling on given arrays: compiled on a GPU, in Triton's interpreter on the CPU."""

    def __init__(
        self, problem: Problem, device: Device, config: KernelConfig, arrays: Mapping[str, torch.Tensor]
    ) -> None:
        """Allocates the workspaces and, on a GPU, compiles and loads the kernel."""
        import torch

        from torch_bridge.recurrences import Launch

        self.launch = Launch(problem, device, config)
        place = next(iter(arrays.values())).device
        self._ordinal = place.index
        self._tensors, self._zeroed = dict(arrays), []
        for name, length, dtype, zeroed in self.launch.workspaces:
            self._tensors[name] = torch.zeros(length, dtype=getattr(torch, dtype), device=place)
            if zeroed:
                self._zeroed.append(self._tensors[name])
        self._addresses = {name: x.data_ptr() for name, x in self._tensors.items()}
        self._interpreted = place.type == "cpu"
        if not self._interpreted:
            self.launch.load(self._ordinal)

    def __call__(self) -> None:
        """Zeroes the workspaces that must contain zeros, as XLA does, and launches on PyTorch's current stream."""
        for x in self._zeroed:
            x.zero_()
        if self._interpreted:
            self.launch.interpret(self._tensors)
        else:
            import torch

            self.launch(torch.cuda.current_stream().cuda_stream, self._ordinal, self._addresses)
