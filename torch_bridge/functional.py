"""`gru` and `lstm` with episode resets, `rms_norm` and `layer_norm`: functions of weights in the layout of `torch.nn`.

They convert their arguments to the canonical form of `torch_bridge.rnn_ops` and `norm_ops`, without copies, and call
the operators there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.torch_version import TorchVersion

from torch_bridge import loops, norm_ops, op_common, rnn_ops
from torch_bridge.cells import GRU, LSTM, CellSpec
from torch_bridge.rnn_ops import Precision

Implementation = Literal["triton", "torch"] | None

# Whether PyTorch's own norm returns float32 under autocast on a GPU. On the CPU neither norm does.
_AUTOCAST: dict[norm_ops.Kind, bool] = {"layer": True, "rms": TorchVersion(torch.__version__) >= "2.12"}


def gru(
    xs: Tensor,
    h0: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reset_state: Tensor | None = None,
    reverse: bool = False,
    batch_first: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> tuple[Tensor, Tensor]:
    """Runs a GRU over time, starting afresh wherever `resets` is nonzero.

    With s the logistic function and gates ordered r, z, n, as in `torch.nn.GRU`:

        h = reset_state if resets[t] else h
        r = s(W_ir x + b_ir + W_hr h + b_hr),  z = s(W_iz x + b_iz + W_hz h + b_hz)
        n = tanh(W_in x + b_in + r * (W_hn h + b_hn))
        h' = (1 - z) * n + z * h

    Args:
      xs: inputs `[T, *batch, D]`, or `[*batch, T, D]` if `batch_first`, in the dtype of the weights.
      h0: hidden state before the first step, `[*batch, H]`, in the dtype of `xs` or in float32; None for zeros.
      w_ih: `[3H, D]`.
      w_hh: `[3H, H]`.
      b_ih: `[3H]` or None.
      b_hh: `[3H]` or None.
      resets: `[T, *batch]` (`[*batch, T]`), any dtype; nonzero at the first step of an episode, that is, the *previous*
        step's done. That step sees `reset_state`, not the carry, and no gradient crosses it.
      reset_state: the state at the start of an episode: None (zeros), `[H]` (a learned state), `[*batch, H]`, or a
        value for every step, `[T, *batch, H]` (`[*batch, T, H]`). It is differentiable.
      reverse: run from the last step to the first; outputs stay in the order of the inputs.
      batch_first: the layout of every array with a time axis. Neither layout is copied into the other.
      precision: precision of float32 products in the time loop on a GPU: "tf32"; "tf32x3", which has the accuracy of
        float32 (three TF32 products instead of one, or float32 products if H is small); or None: "tf32" if
        `torch.backends.cuda.matmul` allows it and H is above 32, else "tf32x3". All other products are PyTorch's own
        and follow its settings.
      implementation: "triton" (the kernels, which need an NVIDIA GPU and float32, bfloat16 or float16); "torch"
        (PyTorch operations that autograd differentiates, slowly, to any order and in any mode); or None: the kernels
        where they can run, elsewhere the loop in PyTorch operations, as one operator. With None, an eager call of a
        single step in float32 or float64 runs PyTorch's own cell, which has less host overhead. If you name an
        implementation that cannot run the input, a `NotImplementedError` says why.

    Returns:
      `(ys, h_n)`: the hidden states of all steps in the layout of `xs`, and the last one, both in the dtype of `h0`.
      Between steps the hidden state is float32, or float64 if `xs` is.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: the named implementation cannot run this input, or a derivative that the operators do not
        have (second-order or forward-mode) is requested; `implementation="torch"` has it.
    """
    one = Direction(w_ih, w_hh, b_ih, b_hh, None, (h0,), resets, (reset_state,))
    _check(GRU, xs, one, batch_first)
    (out,) = run_layer(
        GRU, xs, [one], reverse=reverse, batch_first=batch_first, precision=precision,
        implementation=implementation,
    )  # fmt: skip
    return out.hs, out.last[0]


def lstm(
    xs: Tensor,
    state: tuple[Tensor, Tensor] | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    w_hr: Tensor | None = None,
    *,
    resets: Tensor | None = None,
    reset_state: tuple[Tensor | None, Tensor | None] | None = None,
    reverse: bool = False,
    batch_first: bool = False,
    return_cells: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> tuple[Any, tuple[Tensor, Tensor]]:
    """Runs an LSTM over time, starting afresh wherever `resets` is nonzero.

    With s the logistic function and gates ordered i, f, g, o, as in `torch.nn.LSTM`:

        h, c = reset_state if resets[t] else h, c
        i, f, o = s(W_i x + b_i + W_h h + b_h),  g = tanh(W_ig x + b_ig + W_hg h + b_hg)
        c' = f * c + i * g,  h' = o * tanh(c')

    With `w_hr` the hidden state is projected to P units, `h' = W_hr (o * tanh(c'))` (Sak et al. 2014), and h is P wide
    instead of H. The loop then carries m = o * tanh(c') and multiplies it by W_hh W_hr. It differs from a loop that
    carries h only by the rounding of that product.

    Args:
      xs: see `gru`.
      state: `(h0, c0)`, each `[*batch, H]`, in PyTorch's order; None for zeros.
      w_ih: `[4H, D]`.
      w_hh: `[4H, H]`, or `[4H, P]`.
      b_ih: `[4H]` or None.
      b_hh: `[4H]` or None.
      w_hr: `[P, H]` or None.
      resets: see `gru`.
      reset_state: None (zeros) or `(h, c)`, each like `reset_state` of `gru`.
      reverse: see `gru`.
      batch_first: see `gru`.
      return_cells: also return the cell states of all steps.
      precision: see `gru`.
      implementation: see `gru`.

    Returns:
      `(ys, (h_n, c_n))`, or `((ys, cs), (h_n, c_n))` if `return_cells`.

    Raises:
      ValueError: shapes or dtypes disagree.
      NotImplementedError: see `gru`.
    """
    states, reset_states = split_state_pair("state", state), split_state_pair("reset_state", reset_state)
    one = Direction(w_ih, w_hh, b_ih, b_hh, w_hr, states, resets, reset_states)
    _check(LSTM, xs, one, batch_first)
    (out,) = run_layer(
        LSTM, xs, [one], reverse=reverse, batch_first=batch_first, cells=return_cells, precision=precision,
        implementation=implementation,
    )  # fmt: skip
    return (out.hs, out.cs) if return_cells else out.hs, (out.last[0], out.last[1])


def split_state_pair(name: str, given: Any) -> tuple[Any, Any]:
    """Returns an LSTM's argument as `(h, c)`, both None if the argument is None."""
    if given is None:
        return None, None
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"{name} of an LSTM is a pair (h, c), got {type(given).__name__}")
    return given[0], given[1]


def check_implementation(name: Any) -> None:
    """Raises ValueError unless an implementation has this name."""
    if name not in (None, "triton", "torch"):
        raise ValueError(f'implementation must be "triton", "torch" or None, got {name!r}')


def check_tensor(name: str, given: Any, *, optional: bool = True) -> None:
    """Raises ValueError unless `given` is a tensor, or None if it is `optional`."""
    if not isinstance(given, Tensor) and not (optional and given is None):
        raise ValueError(f"{name} must be a tensor, got {type(given).__name__}")


def check_state_dtype(name: str, state: Tensor, inputs: str, xs: Tensor, weight: Tensor) -> None:
    """Raises ValueError unless a state has the dtype of the inputs or weights, or float32. Autocast accepts any."""
    if state.dtype not in (xs.dtype, torch.float32, weight.dtype) and not op_common.is_autocasting(xs.device.type):
        raise ValueError(f"{name} must be {xs.dtype}, like {inputs}, or float32, got {state.dtype}: convert it")


def check_reset_state(state: str, given: Any) -> None:
    """Raises ValueError unless a reset state is a floating-point tensor or None."""
    check_tensor(f"the reset state of {state}", given)
    if given is not None and not given.is_floating_point():
        raise ValueError(f"the reset state of {state} must be floating point, got {given.dtype}: convert it")


class Direction(NamedTuple):
    """The weights, initial states and resets of one direction of a layer.

    Attributes:
      w_ih: `[gates * H, D]`.
      w_hh: `[gates * H, H]`; `[4H, P]` with a projection.
      b_ih: `[gates * H]` or None.
      b_hh: `[gates * H]` or None.
      w_hr: `[P, H]`, the projection of an LSTM, or None.
      states: `(h0,)` or `(h0, c0)`, each `[*batch, width]` or None for zeros.
      resets: `[T, *batch]` (`[*batch, T]`) or None.
      reset_states: for each state None (zeros), `[width]`, `[*batch, width]`, or a value for every step.
    """

    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None
    b_hh: Tensor | None
    w_hr: Tensor | None
    states: tuple[Tensor | None, ...]
    resets: Tensor | None
    reset_states: tuple[Tensor | None, ...]


class DirectionResult(NamedTuple):
    """The results of one direction of a layer.

    Attributes:
      hs: the hidden states of all steps, `[T, *batch, width]` (`[*batch, T, width]`).
      cs: the cell states of all steps, or None if they were not requested.
      last: the last of each state, `[*batch, width]`.
    """

    hs: Tensor
    cs: Tensor | None
    last: tuple[Tensor, ...]


def _check(cell: CellSpec, xs: Tensor, one: Direction, batch_first: bool) -> None:
    """Raises ValueError unless shapes and dtypes agree."""
    layout = "[*batch, T, D]" if batch_first else "[T, *batch, D]"
    check_tensor("xs", xs, optional=False)
    for name in ("w_ih", "w_hh", "b_ih", "b_hh", "w_hr"):
        check_tensor(name, getattr(one, name), optional=name not in ("w_ih", "w_hh"))
    for s, x in zip(cell.states, one.states, strict=True):
        check_tensor(f"{s}0", x)
    if xs.ndim < 2 or not xs.is_floating_point():
        raise ValueError(f"xs must be {layout} and floating point, got {tuple(xs.shape)} of {xs.dtype}")
    if one.w_ih.ndim != 2 or one.w_ih.shape[0] < cell.gates:
        raise ValueError(f"w_ih must be [{cell.gates} * H, D] with H >= 1, got {tuple(one.w_ih.shape)}")
    time = xs.ndim - 2 if batch_first else 0
    batch, steps = (*xs.shape[:time], *xs.shape[time + 1 : -1]), tuple(xs.shape[:-1])
    wide = one.w_ih.shape[0]
    hidden = wide // cell.gates
    width = hidden if one.w_hr is None else one.w_hr.shape[0]
    shapes = {"w_ih": (cell.gates * hidden, xs.shape[-1]), "w_hh": (wide, width), "b_ih": (wide,), "b_hh": (wide,)}
    for name, shape in (shapes | {"w_hr": (width, hidden)}).items():
        w = getattr(one, name)
        if w is None:
            continue
        if tuple(w.shape) != shape:
            raise ValueError(f"{name} must be {shape} for inputs {tuple(xs.shape)} {layout}, got {tuple(w.shape)}")
        if w.dtype != xs.dtype and not op_common.is_autocasting(xs.device.type):
            raise ValueError(f"{name} must have the dtype of xs, {xs.dtype}, got {w.dtype}: convert one of them")
    check_tensor("resets", one.resets)
    if one.resets is not None and tuple(one.resets.shape) != steps:
        raise ValueError(f"resets must be {steps} for xs {tuple(xs.shape)}, got {tuple(one.resets.shape)}")
    for s, w, x, state in zip(cell.states, (width, hidden), one.states, one.reset_states, strict=False):
        if x is not None and tuple(x.shape) != (*batch, w):
            raise ValueError(f"{s}0 must be [*batch, width] = {(*batch, w)}, got {tuple(x.shape)}")
        if x is not None:
            check_state_dtype(f"{s}0", x, "xs", xs, one.w_hh)
        check_reset_state(s, state)
        if state is None:
            continue
        if one.resets is None:
            raise ValueError("reset_state is given but resets is None: pass resets, or leave reset_state out")
        if all(tuple(state.shape) != shape for shape in ((w,), (*batch, w), (*steps, w))):
            raise ValueError(
                f"the reset state of {s} must be {(w,)}, {(*batch, w)} or {(*steps, w)}, got {tuple(state.shape)}"
            )


def _bias(cell: CellSpec, one: Direction) -> Tensor | None:
    """Returns the sum of the biases to add to the input projection: all but the recurrent bias of a GRU's n gate."""
    if one.b_hh is None:
        return one.b_ih
    b_hh = one.b_hh
    if cell is GRU:
        hidden = b_hh.shape[0] // 3
        b_hh = pad(b_hh[: 2 * hidden], (0, hidden))
    return b_hh if one.b_ih is None else one.b_ih + b_hh


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, tuple):
        return tuple(_cast(each, dtype) for each in x)
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x


def _autocast(
    cell: CellSpec, xs: Tensor, layer: Sequence[Direction]
) -> tuple[Tensor, Sequence[Direction], torch.dtype]:
    """Casts operands and states as `torch.nn` does under autocast. The states of a GRU on the CPU keep their dtype.

    Returns the inputs, the layer, and the dtype for states that are not given.
    """
    device = xs.device.type
    if not op_common.is_autocasting(device) or xs.dtype == torch.float64:
        return xs, layer, xs.dtype
    dtype, default = torch.get_autocast_dtype(device), xs.dtype
    names = ["w_ih", "w_hh", "b_ih", "b_hh", "w_hr"]
    if cell is not GRU or device != "cpu":
        names, default = [*names, "states", "reset_states"], dtype
    layer = [one._replace(**{name: _cast(getattr(one, name), dtype) for name in names}) for one in layer]
    return xs.to(dtype), layer, default


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Stacks tensors as `torch.stack` does, but a single tensor without a copy."""
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def _unstack(x: Tensor) -> Sequence[Tensor]:
    """Unbinds axis 0. A single part is squeezed instead: autograd forbids in-place changes to results of `unbind`."""
    return (x.squeeze(0),) if x.shape[0] == 1 else x.unbind(0)


def _start_projected(xp: Tensor, one: Direction, reverse: bool, time: int) -> Tensor:
    """Returns input projections for which a loop over m from m = 0 computes what a loop over h from h0 computes.

    There may be no m whose projection is a given h. But h contributes only W_hh h to the first step, which can be added
    to the input projection of that step. The same holds for reset states.
    """
    h0, reset_h, starts = one.states[0], one.reset_states[0], None if one.resets is None else one.resets != 0
    # A NaN in a state that no step sees would reach the gradient of the weights, so such states are zeroed first.
    if h0 is not None:
        at = xp.shape[time] - 1 if reverse else 0
        if starts is not None:
            h0 = h0.masked_fill(starts.select(time, at)[..., None], 0)
        first = linear(h0.to(one.w_hh.dtype), one.w_hh)
        xp = torch.select_scatter(xp, xp.select(time, at) + first, time, at)
    if starts is not None and reset_h is not None:
        seen = starts if reset_h.ndim == xp.ndim else starts.any(time) if reset_h.ndim > 1 else starts.any()
        first = linear(reset_h.masked_fill(~seen[..., None], 0).to(one.w_hh.dtype), one.w_hh)
        if 1 < first.ndim < xp.ndim:
            first = first.unsqueeze(time)
        xp = xp + first.expand_as(xp).masked_fill(~starts[..., None], 0)
    return xp


def _project(
    cell: CellSpec, xs: Tensor, layer: Sequence[Direction], reverse: bool, time: int
) -> tuple[Tensor, Sequence[Direction]]:
    """Returns the input projections `[directions, *xs.shape[:-1], gates * H]`, and the layer without a projection."""
    if layer[0].w_hr is not None:
        parts, plain = [], []
        for one, backward in zip(layer, (reverse, True), strict=False):
            assert one.w_hr is not None
            xp = linear(xs, one.w_ih, _bias(cell, one))
            parts.append(_start_projected(xp, one, backward, time))
            states, reset_states = (None, *one.states[1:]), (None, *one.reset_states[1:])
            plain.append(one._replace(w_hh=one.w_hh @ one.w_hr, states=states, reset_states=reset_states))
        return stack(parts), plain
    biases = [_bias(cell, one) for one in layer]
    if len(layer) == 1:
        return linear(xs, layer[0].w_ih, biases[0])[None], layer
    rows, w = math.prod(xs.shape[:-1]), torch.stack([one.w_ih for one in layer]).mT
    x = xs.reshape(1, rows, xs.shape[-1]).expand(len(layer), rows, xs.shape[-1])
    given = [b for b in biases if b is not None]
    xp = torch.baddbmm(torch.stack(given)[:, None], x, w) if given else torch.bmm(x, w)
    return xp.reshape(len(layer), *xs.shape[:-1], xp.shape[-1]), layer


class _Layout:
    """Conversion between the layout of a layer, a list of tensors by direction, and the canonical one of `rnn_ops`."""

    def __init__(self, xs: Tensor, directions: int, batch_first: bool):
        self.time = xs.ndim - 2 if batch_first else 0
        self.outer = tuple(xs.shape[:-1])
        self.batch = self.outer[: self.time] + self.outer[self.time + 1 :]
        steps, sequences = xs.shape[self.time], math.prod(self.batch)
        self.directions = directions
        # groups, steps, sequences per group
        self.sizes = (directions * sequences, steps, 1) if batch_first else (directions, steps, sequences)

    def sequence(self, x: Tensor) -> Tensor:
        """Reshapes `[directions, *outer, ...]` to `[G, T, B, ...]`."""
        return x.reshape(*self.sizes, *x.shape[1 + len(self.outer) :])

    def state(self, x: Tensor) -> Tensor:
        """Reshapes `[directions, *batch, H]` to `[G, B, H]`."""
        return x.reshape(self.sizes[0], self.sizes[2], x.shape[-1])

    def sequences(self, x: Tensor) -> Sequence[Tensor]:
        """Inverts `sequence` and splits the result by direction."""
        return _unstack(x.reshape(self.directions, *self.outer, x.shape[-1]))

    def states(self, x: Tensor) -> Sequence[Tensor]:
        """Inverts `state` and splits the result by direction."""
        return _unstack(x.reshape(self.directions, *self.batch, x.shape[-1]))

    def stepped(self, x: Tensor) -> bool:
        """Whether a reset state has a value for every step."""
        return x.ndim == len(self.outer) + 1

    def expand(self, x: Tensor, stepped: bool) -> Tensor:
        """Broadcasts a reset state over the sequences, and over the steps if `stepped`."""
        if not stepped:
            return x.expand(*self.batch, x.shape[-1])
        if not self.stepped(x):
            x = x.expand(*self.batch, x.shape[-1]).unsqueeze(self.time)
        return x.expand(*self.outer, x.shape[-1])


def _states(layout: _Layout, given: Sequence[Tensor | None], default: torch.dtype, xs: Tensor, hidden: int) -> Tensor:
    """Returns the initial states of all directions, `[G, B, H]`."""
    dtype = next((x.dtype for x in given if x is not None), default)
    zeros = xs.new_zeros((*layout.batch, hidden), dtype=dtype) if any(x is None for x in given) else xs
    return layout.state(stack([zeros if x is None else x for x in given]))


def _resets(layout: _Layout, given: Sequence[Tensor | None], xs: Tensor) -> Tensor | None:
    """Returns the resets of all directions, `[G, T, B]`, or None if no direction has any."""
    if all(x is None for x in given):
        return None
    if len(given) == 1:
        return layout.sequence(stack([x for x in given if x is not None]))
    never = xs.new_zeros(layout.outer, dtype=torch.bool)
    return layout.sequence(stack([never if x is None else x != 0 for x in given]))


def _reset_states(layout: _Layout, layer: Sequence[Direction], states: Sequence[Tensor]) -> list[Tensor] | list[None]:
    """Returns the reset states of all directions: for each state `[G, B, H]`, `[G, T, B, H]`, or None."""
    given = [x for one in layer for x in one.reset_states if x is not None]
    if not given:
        return [None] * len(states)
    stepped = any(layout.stepped(x) for x in given)
    found = []
    for k, state in enumerate(states):
        parts = [one.reset_states[k] for one in layer]
        zeros = state.new_zeros(state.shape[-1:])
        each = stack([layout.expand(zeros if x is None else x.to(state.dtype), stepped) for x in parts])
        found.append(layout.sequence(each) if stepped else layout.state(each))
    return found


def _plain(cell: CellSpec, arguments: Sequence[Any], order: str, states: Sequence[Tensor]) -> dict[str, Tensor]:
    """Runs the loop in PyTorch operations that autograd differentiates, and returns its results by name."""
    loop, count = op_common.without_autocast(loops.forward), len(states)
    xp, w_hh, *others = arguments
    b_hn = others.pop(0) if cell.last_gate_separate else None
    results = loop(
        xp,
        w_hh,
        b_hn,
        others[:count],
        others[count],
        others[count + 1 :],
        cell=cell,
        order=order,
        cells=True,
        save=False,
    )
    dtypes = {s: x.dtype for s, x in zip(cell.states, states, strict=True)}
    return {name: x.to(dtypes[name[0]]) for name, x in results.items() if x is not None}


def _can_run_single_step(xs: Tensor, layer: Sequence[Direction]) -> bool:
    """Whether PyTorch's own cell can compute the step, in less than half the host time of a launch."""
    one = layer[0]
    alone = len(layer) == 1 and one.w_hr is None and (one.b_ih is None) == (one.b_hh is None)
    if not alone or xs.dtype not in (torch.float32, torch.float64) or op_common.is_autocasting(xs.device.type):
        return False
    given = [xs, one.w_ih, one.w_hh, one.b_ih, one.b_hh, *one.states, *one.reset_states]
    tensors = [x for x in given if x is not None]
    if any(x.dtype != xs.dtype for x in tensors):
        return False
    return op_common.is_unobserved(tensors if one.resets is None else [*tensors, one.resets])


def _run_single_step(cell: CellSpec, xs: Tensor, one: Direction, layout: _Layout) -> DirectionResult:
    """Runs a layer of one direction for one step, with PyTorch's own cell."""
    hidden, sequences = one.w_hh.shape[-1], math.prod(layout.batch)
    states = []
    starts = one.resets
    if starts is not None:
        starts = (starts if starts.dtype == torch.bool else starts != 0).reshape(sequences, 1)
    for state, reset_state in zip(one.states, one.reset_states, strict=True):
        h = xs.new_zeros(*layout.batch, hidden) if state is None else state
        h = h.reshape(sequences, hidden)
        if starts is not None and reset_state is None:
            h = h.masked_fill(starts, 0)
        elif starts is not None and reset_state is not None:
            new = layout.expand(reset_state, stepped=layout.stepped(reset_state))
            h = torch.where(starts, new.reshape(sequences, hidden), h)
        states.append(h)
    x, weights = xs.reshape(sequences, xs.shape[-1]), (one.w_ih, one.w_hh, one.b_ih, one.b_hh)
    found: Sequence[Tensor] = (
        (torch.gru_cell(x, states[0], *weights),) if cell is GRU else torch.lstm_cell(x, states, *weights)
    )
    hs, *cs = (h.reshape(*layout.outer, hidden) for h in found)
    # The last states are copies, so that an in-place change to them does not change `hs` or `cs`, nor the reverse.
    return DirectionResult(hs, cs[0] if cs else None, tuple(h.clone().reshape(*layout.batch, hidden) for h in found))


def run_layer(
    cell: CellSpec,
    xs: Tensor,
    layer: Sequence[Direction],
    *,
    reverse: bool = False,
    batch_first: bool = False,
    cells: bool = False,
    precision: Precision = None,
    implementation: Implementation = None,
) -> list[DirectionResult]:
    """Runs a layer of one direction, or of two, forward and reverse, in one launch. Expects valid shapes and dtypes.

    Args:
      cell: an entry of the cell table.
      xs: see `gru`; shared by the directions.
      layer: one direction, or two with the same shapes.
      reverse: whether a single direction runs from the last step to the first.
      batch_first: see `gru`.
      cells: whether to return the cell states of all steps.
      precision: see `gru`.
      implementation: see `gru`.

    Raises:
      ValueError: there are no steps, or the implementation or precision is unknown.
      NotImplementedError: see `gru`.
    """
    check_implementation(implementation)
    layout = _Layout(xs, len(layer), batch_first)
    if layout.sizes[1] == 0:
        raise ValueError(f"a recurrence needs at least one step, and xs {tuple(xs.shape)} has none")
    if layout.sizes[1] == 1 and implementation is None and precision is None and _can_run_single_step(xs, layer):
        return [_run_single_step(cell, xs, layer[0], layout)]
    xs, layer, default = _autocast(cell, xs, layer)
    given = layer
    xp, layer = _project(cell, xs, layer, reverse, layout.time)
    hidden = layer[0].w_hh.shape[-1]

    states = [_states(layout, [one.states[k] for one in layer], default, xs, hidden) for k in range(len(cell.states))]
    reset_states = _reset_states(layout, layer, states)
    resets = _resets(layout, [one.resets for one in layer], xs)
    biases: list[Tensor] = []
    if cell is GRU:
        biases = [stack([xs.new_zeros(hidden) if one.b_hh is None else one.b_hh[2 * hidden :] for one in layer])]
    arguments = (layout.sequence(xp), stack([one.w_hh for one in layer]), *biases, *states, resets, *reset_states)

    order = "bidirectional" if len(layer) == 2 else "reverse" if reverse else "forward"
    precise = rnn_ops.kernel_precision(precision, hidden)
    if implementation == "torch":
        results = _plain(cell, arguments, order, states)
    else:
        results = rnn_ops.forward(cell, arguments, order, precise, cells, implementation)

    hs = layout.sequences(results["hs"])
    cs = layout.sequences(results["cs"]) if cells and cell is LSTM else [None] * len(layer)
    last = zip(*(layout.states(results[f"{s}_last"]) for s in cell.states), strict=True)
    return [_direction_result(*each, default) for each in zip(given, hs, cs, last, strict=True)]


def _direction_result(
    one: Direction, hs: Tensor, cs: Tensor | None, last: tuple[Tensor, ...], default: torch.dtype
) -> DirectionResult:
    """Returns the result of a direction, after applying the output projection that `_project` left out of the loop."""
    if one.w_hr is None:
        return DirectionResult(hs, cs, last)
    dtype = default if one.states[0] is None else one.states[0].dtype
    hs, h_n = (linear(m.to(one.w_hr.dtype), one.w_hr).to(dtype) for m in (hs, last[0]))
    return DirectionResult(hs, cs, (h_n, *last[1:]))


# Norms.


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float | None = None,
    implementation: Implementation = None,
) -> Any:
    """Divides each row by its root mean square (Zhang and Sennrich, 2019), after adding a residual connection.

        total = x + residual
        y = total / sqrt(mean(total^2) + eps) * weight + bias

    The norm is computed in float32, or in float64 if `total` is float64.

    Args:
      x: `[..., N]`, floating point.
      weight: `[N]` in any floating-point dtype, or None for ones.
      bias: `[N]` in any floating-point dtype, or None for zeros.
      residual: in the shape of `x`, or None.
      eps: added to the mean square; None for the machine epsilon of the dtype that the norm is computed in, as in
        `torch.nn.functional.rms_norm`.
      implementation: "triton" (the kernels, which need an NVIDIA GPU and float32, bfloat16 or float16); "torch"
        (PyTorch operations that autograd differentiates to any order and in any mode); or None: the kernels where they
        can run, elsewhere PyTorch operations, as one operator. If you name an implementation that cannot run the input,
        a `NotImplementedError` says why.

    Returns:
      `y` in the shape and dtype of `x`. Under autocast on a GPU, `y` is float32 from PyTorch 2.12 on, like the result
      of `torch.nn.functional.rms_norm`. With a residual, `(y, total)`: `total` has the dtype of `x + residual`, and the
      norm is computed from that rounded sum.

    Raises:
      ValueError: shapes or devices disagree, a dtype is not floating point, `eps` is not a number, is negative or is
        infinite, or the implementation is unknown.
      NotImplementedError: the named implementation cannot run this input, or a derivative that the operators do not
        have (second-order or forward-mode) is requested; `implementation="torch"` has it.
    """
    return _norm("rms", x, weight, bias, residual, eps, implementation)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    implementation: Implementation = None,
) -> Any:
    """Normalizes each row to mean 0 and variance 1 (Ba, Kiros and Hinton, 2016), after adding a residual connection.

        total = x + residual
        y = (total - mean(total)) / sqrt(var(total) + eps) * weight + bias,  var(t) = mean((t - mean(t))^2)

    The norm is computed in float32, or in float64 if `total` is float64.

    Args:
      x: see `rms_norm`.
      weight: see `rms_norm`.
      bias: see `rms_norm`.
      residual: see `rms_norm`.
      eps: added to the variance.
      implementation: see `rms_norm`.

    Returns:
      `y` or `(y, total)`, see `rms_norm`. Under autocast on a GPU, `y` is float32.

    Raises:
      ValueError: see `rms_norm`.
      NotImplementedError: see `rms_norm`.
    """
    return _norm("layer", x, weight, bias, residual, eps, implementation)


def _norm(
    kind: norm_ops.Kind, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None,
    eps: float | None, implementation: Implementation,
) -> Any:  # fmt: skip
    if x.ndim < 1 or not x.is_floating_point():
        raise ValueError(f"x must be [..., N] and floating point, got {tuple(x.shape)} of {x.dtype}")
    check_implementation(implementation)
    shapes = (("weight", weight, x.shape[-1:]), ("bias", bias, x.shape[-1:]), ("residual", residual, x.shape))
    for name, y, shape in shapes:
        if y is not None and y.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)} for x {tuple(x.shape)}, got {tuple(y.shape)}")
        if y is not None and not y.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {y.dtype}: convert it")
    op_common.check_devices("x", x, {name: y for name, y, _ in shapes})
    if not (eps is None and kind == "rms") and (isinstance(eps, bool) or not isinstance(eps, (int, float))):
        raise ValueError(f"eps of {kind}_norm must be a number, got {type(eps).__name__}: kernels take it as a scalar")
    if eps is not None and not 0 <= eps < math.inf:
        raise ValueError(f"eps must be finite and not negative, got {eps}")
    device, dtype = x.device.type, x.dtype
    if device != "cpu" and _AUTOCAST[kind] and dtype != torch.float64 and op_common.is_autocasting(device):
        dtype = torch.float32
    if eps is None:
        total_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        eps = torch.finfo(op_common.accumulation_dtype(total_dtype)).eps
    if implementation == "torch":
        normalize = op_common.without_autocast(norm_ops.normalize)
        results = normalize(x, weight, bias, residual, kind=kind, epsilon=eps, dtype=dtype)
        return results.y if residual is None else (results.y, results.total)

    def rows(y: Tensor) -> Tensor:
        return y.reshape(1, math.prod(y.shape[:-1]), y.shape[-1])

    if residual is not None and residual.is_leaf and residual.requires_grad:
        residual = residual.mul(1)  # x receives the same tensor as gradient; two leaves must not share .grad
    w, b = (None if y is None else y[None] for y in (weight, bias))
    sums = None if residual is None else rows(residual)
    y, total = norm_ops.forward(kind, rows(x), w, b, sums, eps, dtype, implementation)
    return y.reshape(x.shape) if residual is None else (y.reshape(x.shape), total.reshape(x.shape))
