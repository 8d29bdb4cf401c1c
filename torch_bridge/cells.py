"""The table of cells: what the kernels and both fronts need to know of each one. Imports neither torch nor triton.

`jaxrnn.cells` adds a cell's arithmetic in JAX, `torch_bridge.steps` that in PyTorch, and `torch_bridge.kernels` that in
Triton.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True)
class CellSpec:
    """One entry of the table.

    Attributes:
      name: of the cell; operators and kernels have it in their names.
      gates: width of the input projection as a multiple of H.
      states: the carry, with the hidden state first.
      residuals: what the forward kernel stores at every step for the backward kernel: `(name, width / H)`. The width of
        "local_grads" is their number, or 4 for three: one for each gate, for a last gate that is separate, for a norm.
      packed_residuals: the array of 32-bit words that replaces the residuals where the forward kernel may overwrite
        `xp`: `(name, width / H)`, as wide as `xp`, with one of the names in `residuals`. None if the cell has none.
      last_gate_separate: whether the last gate takes its input projection and its hidden product separately, instead of
        their sum. The bias `b_hn` is then added to that hidden product.
      tilings: the cell whose tilings and measured costs the kernels of this one use: itself, or one that has at least
        as many gates and states.
      loops: the families of time loops that run the cell; `torch_bridge.tiling` chooses among them.
      norm: the norm of `[x, h]` that the gates see: "rms", "layer", or "" for none. The gates are then sums of the
        scaled products and a bias, and the last local gradient is that of the norm.
    """

    name: str
    gates: int
    states: tuple[str, ...]
    residuals: tuple[tuple[str, int], ...]
    packed_residuals: tuple[str, int] | None
    last_gate_separate: bool
    tilings: str
    loops: tuple[str, ...]
    norm: str

    def __post_init__(self) -> None:
        """Raises ValueError if "local_grads" has another width, which only derivatives of higher order would show."""
        count = self.gates + self.last_gate_separate + bool(self.norm)
        width, given = 4 if count == 3 else count, dict(self.residuals)["local_grads"]
        if given != width:
            raise ValueError(
                f'{self.name}: residuals must have ("local_grads", {width}), got {given}: there are {count}'
            )

    def has_packed_residuals(self, names: Container[str]) -> bool:
        """Returns whether a launch has `packed_residuals`, which pack `carry_gate` into `local_grads`.

        `names` are the outputs of a forward launch, or the inputs of a backward one.
        """
        return "carry_gate" in dict(self.residuals) and "local_grads" in names and "carry_gate" not in names

    @property
    def has_tangent_loop(self) -> bool:
        """Says whether kernels compute tangents (`jax.jvp`) and Hessian-vector products of the cell."""
        return not self.norm

    @property
    def hidden_grads(self) -> tuple[str, ...]:
        """Further outputs `[G, T, B, H]` of the backward kernel: the gradient of the last gate's hidden product."""
        return ("dhn",) if self.last_gate_separate else ()

    @property
    def norm_weights(self) -> tuple[str, ...]:
        """The arrays `[S, gates * H]` that the norm needs: the bias, and sums of `w_hh`, `[H, gates * H]`, over H."""
        return {"": (), "rms": ("bias",), "layer": ("bias", "w_sum")}[self.norm]

    @property
    def norm_inputs(self) -> tuple[str, ...]:
        """The arrays `[G, T, B]` that the norm needs of the inputs, by name: a part of variance + epsilon, the mean."""
        return {"": (), "rms": ("x_norm",), "layer": ("x_norm", "x_mean")}[self.norm]

    @property
    def saved(self) -> tuple[str, ...]:
        """The names of the arrays that the forward kernel saves: residuals and, `[G, T, B]`, the scale of a norm."""
        return (*dict(self.residuals), *(("scale",) if self.norm else ()))

    @property
    def forward_outputs(self) -> tuple[str, ...]:
        """The outputs of the forward kernel by name: states of every step, last states, what it saves."""
        steps, last = (f"{s}s" for s in self.states), (f"{s}_last" for s in self.states)
        return (*steps, *last, *self.saved)


GRU = CellSpec(
    name="gru",
    gates=3,
    states=("h",),
    residuals=(("local_grads", 4), ("carry_gate", 1)),
    packed_residuals=("local_grads", 3),
    last_gate_separate=True,
    tilings="gru",
    loops=("streamed", "resident", "fma", "split", "split_registers", "rows"),
    norm="",
)
LSTM = CellSpec(
    name="lstm",
    gates=4,
    states=("h", "c"),
    residuals=(("local_grads", 4), ("dc_dh", 1), ("carry_gate", 1)),
    packed_residuals=None,
    last_gate_separate=False,
    tilings="lstm",
    loops=("streamed", "resident", "fma", "split", "split_registers", "rows"),
    norm="",
)
MGU = CellSpec(
    name="mgu",
    gates=2,
    states=("h",),
    residuals=(("local_grads", 4), ("carry_gate", 1)),
    packed_residuals=None,
    last_gate_separate=True,
    tilings="gru",
    loops=("streamed", "resident", "fma", "split_registers"),
    norm="",
)
SIMPLE_TANH = CellSpec(
    name="simple_tanh",
    gates=1,
    states=("h",),
    residuals=(("local_grads", 1),),
    packed_residuals=None,
    last_gate_separate=False,
    tilings="gru",
    loops=("streamed", "resident", "fma", "split_registers"),
    norm="",
)
SIMPLE_RELU = CellSpec(
    name="simple_relu",
    gates=1,
    states=("h",),
    residuals=(("local_grads", 1),),
    packed_residuals=None,
    last_gate_separate=False,
    tilings="gru",
    loops=("streamed", "fma"),  # the others scale hidden states by a bound, and these have none
    norm="",
)
RMS_NORM_GRU = CellSpec(
    name="rms_norm_gru",
    gates=3,
    states=("h",),
    residuals=(("local_grads", 4), ("norm_state", 1), ("carry_gate", 1)),
    packed_residuals=None,
    last_gate_separate=False,
    tilings="gru",
    loops=("streamed", "resident", "fma", "split_registers"),
    norm="rms",
)
LAYER_NORM_GRU = dataclasses.replace(RMS_NORM_GRU, name="layer_norm_gru", norm="layer")
CELLS = {cell.name: cell for cell in (GRU, LSTM, MGU, SIMPLE_TANH, SIMPLE_RELU, RMS_NORM_GRU, LAYER_NORM_GRU)}
