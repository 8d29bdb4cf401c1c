"""The providers that are measured. A provider turns a case and its inputs into one forward and backward pass.

A pass is the input projection, the recurrence, and the gradients of inputs, weights and biases for a given cotangent of
the outputs. Work that a real program would do around the pass, such as laying weights out for cuDNN or sorting episodes
for packing, is done beforehand and not timed: every provider is measured at its best.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cases, oracle
from benchmarks.results import Row
from jaxrnn import cells, linen
from jaxrnn.cells import base, norm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from benchmarks.cases import Case, Dtype, NormCase, Precision
    from benchmarks.results import Status

    Arrays = dict[str, jax.Array]
    Tensors = dict[str, Any]


class Inputs:
    """The inputs of a case as arrays of either framework, made once and shared by all providers."""

    def __init__(self, numbers: dict[str, NDArray[Any]]) -> None:
        self.numpy = numbers
        self._jax: dict[tuple[Dtype, bool], Arrays] = {}
        self._torch: dict[tuple[Dtype, bool], Tensors] = {}

    def jax(self, dtype: Dtype, resets: bool) -> Arrays:
        """Returns the inputs as JAX arrays on the default device, with the case's resets or with none."""
        if (dtype, True) not in self._jax:
            to = cases.NUMPY_DTYPES[dtype]
            rounded = {name: x if x.dtype == bool else x.astype(to, copy=False) for name, x in self.numpy.items()}
            arrays = jax.device_put(rounded)
            self._jax[dtype, True] = arrays
            self._jax[dtype, False] = arrays | {"resets": jnp.zeros_like(arrays["resets"])}
        return self._jax[dtype, resets]

    def torch(self, dtype: Dtype, resets: bool) -> Tensors:
        """Returns the inputs as tensors on the GPU, or on the CPU if there is no GPU; resets as in `jax`."""
        import torch

        if (dtype, True) not in self._torch:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            to = getattr(torch, cases.DTYPES[dtype])
            tensors = {
                name: torch.from_numpy(x).to(device) if x.dtype == bool else torch.from_numpy(x).to(device).to(to)
                for name, x in self.numpy.items()
            }
            self._torch[dtype, True] = tensors
            self._torch[dtype, False] = tensors | {"resets": torch.zeros_like(tensors["resets"])}
        return self._torch[dtype, resets]


@dataclasses.dataclass(frozen=True)
class JaxPass:
    """A pass of a JAX provider.

    Attributes:
      jitted: the jitted pass.
      args: its arguments, on the device.
      canonical: converts its result to the names and the layout of the oracle.
    """

    jitted: Any
    args: tuple[Any, ...]
    canonical: Callable[[Any], Arrays]


@dataclasses.dataclass(frozen=True)
class Ready:
    """A pass that is ready to run: one of PyTorch, or one of JAX that is compiled.

    Attributes:
      run: enqueues the pass and returns its result.
      canonical: converts that result to the names and the layout of the oracle.
      forward: enqueues the forward pass alone and returns its outputs, in the layout of the provider; of PyTorch.
      own_graphs: whether it replays CUDA graphs of its own, from the third call on; of PyTorch.
      compiled: XLA's compiled program; of JAX.
      loop: traces a number of passes as one program and returns the function that compiles it; of JAX.
    """

    run: Callable[[], Any]
    canonical: Callable[[Any], Any]
    forward: Callable[[], Any] | None = None
    own_graphs: bool = False
    compiled: Any = None
    loop: Callable[[int], Callable[[], Callable[[], Any]]] | None = None


@dataclasses.dataclass(frozen=True)
class Provider:
    """One way to compute a pass of a recurrence or of a norm; all but `name` and `build` is of recurrences.

    Attributes:
      name: the name in tables.
      build: returns the pass of a case, given its inputs: `Inputs` or, of a norm, `norms.Inputs`.
      cells: the cells that it supports.
      dtype: the dtype of its inputs.
      precision: the precision of its matrix products, which `oracle.tolerance` takes.
      resets: whether it supports resets; if not, it is checked and timed without them.
      reset_states: whether its pass takes the states that episodes start from.
      vmap: whether it can run many models at once.
      derivatives: whether it is measured with derivatives beyond the first gradient. Those of suite `derivatives` that
        are not raise for these.
      needs: the modules that it imports.
      bounded: whether its first call may take minutes, and is therefore first tried in a process that can be stopped.
    """

    name: str
    build: Callable[[Any, Any], JaxPass | Ready]
    cells: tuple[str, ...] = cases.MEASURED
    dtype: Dtype = "f32"
    precision: Precision = "tf32"
    resets: bool = True
    reset_states: bool = False
    vmap: bool = True
    derivatives: bool = False
    needs: tuple[str, ...] = ()
    bounded: bool = False

    @property
    def ours(self) -> str:
        """The provider of this project that it is compared with."""
        return "jaxrnn-bf16" if self.precision == "bf16" else "jaxrnn"

    def row(self, case: Case | NormCase) -> Row:
        """Returns its row of a case, without a figure."""
        return Row(str(case), self.name, ours=self.ours)

    def excluded(self, case: Case) -> tuple[Status, str] | None:
        """Returns the status and the reason of its row if it cannot run a case here, or None if it can."""
        if reason := self.unavailable():
            return "unavailable", reason
        if reason := self.unsupported(case):
            return "unsupported", reason
        return None

    def unavailable(self) -> str | None:
        """Returns why it cannot run here, or None if it can."""
        missing = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{', '.join(missing)} not installed" if missing else None

    def unsupported(self, case: Case) -> str | None:
        """Returns why it cannot run a case, or None if it can."""
        if case.cell not in self.cells:
            return f"has no {case.cell.upper()}"
        if case.models and not self.vmap:
            return "has no vmap"
        if case.reset_state and not self.reset_states:
            return "is measured with episodes that start from zeros"
        if case.derivative and not self.derivatives:
            return "raises for derivatives beyond the first gradient"
        return None


def _weights(case: Case, arrays: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the weights, and the states that episodes start from, which have gradients as well.

    With the prefix "along_", it returns the direction of a derivative.
    """
    return {name: arrays[prefix + name] for name in (*case.weights, *cases.reset_states(case))}


# JAX.


def jax_pass(
    case: Case,
    forward: Callable[[Any, Any, Any], jax.Array],
    arrays: Arrays,
    convert: Callable[[Arrays], Any] = lambda weights: weights,
    canonical: Callable[[Any], Arrays] = oracle.of_gradients,
) -> JaxPass:
    """Returns the pass of `forward(weights, xs, fixed) -> ys`, or a derivative of it (`cases.Case.derivative`).

    All arguments are of `arrays`, and `fixed` has no gradients. `convert` lays the weights out, and `canonical` names
    their gradients.
    """

    def run(weights: tuple[Any, Any], xs: tuple[jax.Array, Any], fixed: Any, ct_ys: jax.Array) -> Any:
        arguments, along = zip(weights, xs, strict=True)
        return oracle.differentiate(
            case.derivative, lambda weights, xs: forward(weights, xs, fixed), arguments, along, ct_ys
        )

    def named(result: Any) -> Arrays:
        outputs, gradients = result
        return outputs | ({"dxs": gradients[1], **canonical(gradients[0])} if gradients else {})

    along = convert(_weights(case, arrays, "along_")) if case.derivative else None
    fixed = {name: arrays[name] for name in ("h0", "c0", "resets", "lengths") if name in arrays}
    return JaxPass(
        jax.jit(jax.vmap(run) if case.models else run),
        ((convert(_weights(case, arrays)), along), (arrays["xs"], arrays.get("along_xs")), fixed, arrays["ct_ys"]),
        named,
    )


def jaxrnn_pass(case: Case, inputs: Inputs, *, dtype: Dtype = "f32", **options: Any) -> JaxPass:
    """Builds this project's pass.

    In bfloat16, all inputs and outputs are bfloat16; the state is float32 between steps.
    """

    def forward(weights: Arrays, xs: jax.Array, fixed: Arrays) -> jax.Array:
        return oracle.forward(case.cell, {**weights, "xs": xs}, fixed, **options)

    return jax_pass(case, forward, inputs.jax(dtype, True))


class FlaxCell(NamedTuple):
    """A cell of Flax, or one in its form.

    Attributes:
      linen: its class, or None if only this project has the cell; of the two LSTMs, the faster one.
      ours: this project's class.
      gates: the name of each gate, which has kernels of its own.
      bias: the kernels that have biases: those of the inputs ("i") or those of the hidden state ("h").
    """

    linen: Callable[..., nn.RNNCellBase] | None
    ours: Callable[..., nn.RNNCellBase]
    gates: tuple[str, ...]
    bias: str


FLAX: dict[str, FlaxCell] = {
    "gru": FlaxCell(nn.GRUCell, linen.GRUCell, ("r", "z", "n"), "i"),
    "lstm": FlaxCell(nn.OptimizedLSTMCell, linen.OptimizedLSTMCell, ("i", "f", "g", "o"), "h"),
    "mgu": FlaxCell(nn.MGUCell, linen.MGUCell, ("f", "n"), "i"),
    "simple_tanh": FlaxCell(nn.SimpleCell, linen.SimpleCell, ("",), "i"),
    "simple_relu": FlaxCell(
        functools.partial(nn.SimpleCell, activation_fn=nn.relu),
        functools.partial(linen.SimpleCell, activation_fn=nn.relu),
        ("",),
        "i",
    ),
    "rms_norm_gru": FlaxCell(None, linen.NormGRUCell, ("r", "n", "u"), "i"),
    "layer_norm_gru": FlaxCell(None, functools.partial(linen.NormGRUCell, norm="layer"), ("r", "n", "u"), "i"),
}


class ScannedRNN(nn.Module):
    """The recurrence of JAX code bases: Flax's cell in `nn.scan`, with the state replaced at resets."""

    cell: Callable[..., nn.RNNCellBase]

    @functools.partial(nn.scan, variable_broadcast="params", in_axes=0, out_axes=0, split_rngs={"params": False})
    @nn.compact
    def __call__(self, carry: Any, x: tuple[jax.Array, jax.Array]) -> Any:
        ins, resets = x
        hidden = ins.shape[-1]
        start = self.cell(features=hidden, parent=None).initialize_carry(jax.random.key(0), ins.shape)
        carry = jax.tree.map(lambda start, old: jnp.where(resets[:, None], start, old), start, carry)
        return self.cell(features=hidden, name="cell")(carry, ins)


def _norm_parameters(case: Case) -> dict[str, tuple[str, str]]:
    """Returns by weight of a norm its name in the norms of Flax, and its operand, i or h."""
    names = [name.split("_") for name in case.weights if name.startswith(("scale", "shift"))]
    return {f"{kind}_{operand}": ("bias" if kind == "shift" else kind, operand) for kind, operand in names}


def to_flax(case: Case, weights: Mapping[str, Any]) -> Any:
    """Returns the weights as the parameters of Flax's cell."""
    flax, bias = FLAX[case.cell], cells.CELLS[case.cell].bias
    split = {name: jnp.split(weights[name], len(flax.gates), axis=-1) for name in ("w_ih", "w_hh", bias)}
    params: dict[str, Any] = {}
    for k, gate in enumerate(flax.gates):
        params["i" + gate], params["h" + gate] = {"kernel": split["w_ih"][k]}, {"kernel": split["w_hh"][k]}
        params[flax.bias + gate]["bias"] = split[bias][k]
    if "b_hn" in weights:
        params["hn"]["bias"] = weights["b_hn"]
    for name, (kind, operand) in _norm_parameters(case).items():
        params.setdefault(f"norm_{operand}", {})[kind] = weights[name]
    return {"params": {"cell": params}}


def from_flax(case: Case, variables: Any) -> Arrays:
    """Returns the gradients of Flax's parameters by the names of the oracle."""
    params, flax = variables["params"]["cell"], FLAX[case.cell]

    def join(side: str, leaf: str) -> jax.Array:
        return jnp.concatenate([params[side + gate][leaf] for gate in flax.gates], axis=-1)

    gradients = {"dw_ih": join("i", "kernel"), "dw_hh": join("h", "kernel")}
    gradients["d" + cells.CELLS[case.cell].bias] = join(flax.bias, "bias")
    of_norm = _norm_parameters(case).items()
    gradients |= {f"d{name}": params[f"norm_{operand}"][kind] for name, (kind, operand) in of_norm}
    return gradients | ({"db_hn": params["hn"]["bias"]} if "b_hn" in case.weights else {})


def with_flax_params(case: Case, inputs: Inputs, apply: Callable[[Any, Any, jax.Array, jax.Array], Any]) -> JaxPass:
    """Returns the pass of a module with the parameters of Flax's cell: `apply(variables, carry, xs, resets) -> ys`."""

    def forward(variables: Any, xs: jax.Array, fixed: Arrays) -> Any:
        return apply(variables, oracle.initial_carry(fixed), xs, fixed["resets"])

    layouts = functools.partial(to_flax, case), functools.partial(from_flax, case)
    return jax_pass(case, forward, inputs.jax("f32", True), *layouts)


def flax_pass(case: Case, inputs: Inputs) -> JaxPass:
    """Builds the pass of Flax's cell under `nn.scan`."""
    cell = FLAX[case.cell].linen
    assert cell is not None, case  # `Provider.cells` lacks such a cell
    rnn = ScannedRNN(cell)
    return with_flax_params(case, inputs, lambda variables, carry, *ins: rnn.apply(variables, carry, ins)[1])


def linen_pass(case: Case, inputs: Inputs, **options: Any) -> JaxPass:
    """Builds the pass of this project's `RNN`, which concatenates the parameters of Flax's cell for the kernels."""
    rnn = linen.RNN(FLAX[case.cell].ours(case.H), time_major=True, **options)
    return with_flax_params(
        case, inputs, lambda variables, carry, xs, resets: rnn.apply(variables, xs, initial_carry=carry, resets=resets)
    )


def hoisted_scan(cell: cells.Cell, weights: Arrays, xs: jax.Array, fixed: Arrays) -> jax.Array:
    """Runs a scan as an expert writes it: the input projection before the loop, and eight steps per iteration."""
    hidden, statistics = fixed["h0"].shape[-1], {}
    weights = dict(weights)
    starts: list[Any] = [weights.pop(f"reset_{s}", 0.0) for s in cell.states]
    starts_by_step = [x for x in starts if jnp.ndim(x) == 3]  # all or none
    if cell.norm:  # its scales and shifts are folded into the weights, and the bias is added after the norm
        assert cell.prepare is not None
        weights = cell.prepare(cell, cell.params(**weights))._asdict()
        statistics = norm.input_statistics(cell, xs, hidden)
    xp = xs @ weights["w_ih"] + (0.0 if cell.norm else weights[cell.bias])

    def step(states: tuple[jax.Array, ...], inputs: tuple[jax.Array, jax.Array, list[jax.Array], Arrays]) -> Any:
        xp, reset, starts_of_step, statistics = inputs
        fresh = starts_of_step or starts
        states = tuple(jnp.where(reset[:, None], start, x) for start, x in zip(fresh, states, strict=True))
        gates, x_last = base.add_gates(cell, xp, states[0] @ weights["w_hh"], weights.get("b_hn"))
        if cell.norm:
            scale, _ = norm.scale_and_mean(states[0], statistics, xs.shape[-1] + hidden)
            _, gates = norm.normalize(gates, scale, weights[cell.bias])
        states, _ = cell.step(gates, x_last, states)
        return states, states[0]

    initial = tuple(fixed[f"{s}0"] for s in cell.states)
    return jax.lax.scan(step, initial, (xp, fixed["resets"], starts_by_step, statistics), unroll=8)[1]


def hoisted_scan_pass(case: Case, inputs: Inputs) -> JaxPass:
    """Builds the pass of `hoisted_scan`."""
    return jax_pass(case, functools.partial(hoisted_scan, cells.CELLS[case.cell]), inputs.jax("f32", True))


def jax_cudnn_pass(case: Case, inputs: Inputs) -> JaxPass:
    """Builds the pass of cuDNN's LSTM in JAX, which takes the batch axis first and all weights in one array."""
    from jax.experimental import rnn

    arrays, H = inputs.jax("f32", False), case.H

    def flatten(weights: Arrays) -> jax.Array:
        b = weights["b"]
        return jnp.concatenate([weights["w_ih"].T.ravel(), weights["w_hh"].T.ravel(), b, jnp.zeros_like(b)])

    def forward(flat: jax.Array, xs: jax.Array, fixed: Arrays) -> jax.Array:
        h0, c0, lengths = fixed["h0"], fixed["c0"], fixed["lengths"]
        return rnn.lstm(xs, h0[None], c0[None], flat, lengths, H, H, 1, 0.0, False)[0]

    def canonical(result: Any) -> Arrays:
        outputs, (gradient, dxs) = result
        w_ih, w_hh, b_ih, _ = jnp.split(gradient, np.cumsum([4 * H * H, 4 * H * H, 4 * H]))
        gradients = {"dw_ih": w_ih.reshape(4 * H, H).T, "dw_hh": w_hh.reshape(4 * H, H).T, "db": b_ih}
        return {"ys": outputs["ys"].swapaxes(0, 1), "dxs": dxs.swapaxes(0, 1), **gradients}

    batch_first = {name: jnp.swapaxes(arrays[name], 0, 1).copy() for name in ("xs", "ct_ys")}
    lengths = jnp.full(case.B, case.T, jnp.int32)
    built = jax_pass(case, forward, arrays | batch_first | {"lengths": lengths}, flatten)
    return dataclasses.replace(built, canonical=canonical)


# PyTorch.


def configure_torch() -> None:
    """Enables TF32 for PyTorch, which is the default of JAX."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True


def torch_weights(case: Case, tensors: Tensors) -> Tensors:
    """Returns PyTorch's weights `[3H, D]` and biases `[3H]` (4H for an LSTM), as leaves of the gradient."""
    import torch

    if case.cell == "gru":
        b_hn = tensors["b_hn"]
        b_ih, b_hh = tensors["b_ih"], torch.cat([torch.zeros_like(b_hn), torch.zeros_like(b_hn), b_hn])
    else:
        b_ih, b_hh = tensors["b"], torch.zeros_like(tensors["b"])
    weights = {"w_ih": tensors["w_ih"].T, "w_hh": tensors["w_hh"].T, "b_ih": b_ih, "b_hh": b_hh}
    return {name: w.contiguous().clone().requires_grad_() for name, w in weights.items()}


def from_torch(case: Case, ys: Any, dxs: Any, gradients: Any, *, batch_first: bool = False) -> Tensors:
    """Converts a result of PyTorch to the names of the oracle; `gradients` are those of `torch_weights`."""
    dw_ih, dw_hh, db_ih, db_hh = gradients
    if batch_first:
        ys, dxs = ys.transpose(0, 1), dxs.transpose(0, 1)
    biases = {"db_ih": db_ih, "db_hn": db_hh[2 * case.H :]} if case.cell == "gru" else {"db": db_ih}
    return {"ys": ys.detach(), "dxs": dxs, "dw_ih": dw_ih.T, "dw_hh": dw_hh.T, **biases}


def torch_module(case: Case, tensors: Tensors, kind: Any = None) -> Any:
    """Returns `torch.nn.GRU` or `LSTM`, or a `kind` with the same parameter names, with the weights of the case."""
    import torch

    configure_torch()
    xs, weights = tensors["xs"], torch_weights(case, tensors)
    kind = getattr(torch.nn, case.cell.upper()) if kind is None else kind
    rnn = kind(case.H, case.H, device=xs.device, dtype=xs.dtype)
    with torch.no_grad():
        for name, parameter in rnn.named_parameters():
            parameter.copy_(weights[name.replace("weight_", "w_").replace("bias_", "b_").removesuffix("_l0")])
    return rnn


def autograd_pass(
    case: Case, forward: Callable[[], Any], xs: Any, parameters: Sequence[Any], ct_ys: Any, *,
    batch_first: bool = False, own_graphs: bool = False,
) -> Ready:  # fmt: skip
    """Returns the pass of `forward() -> ys`, whose leaves are `xs` and `parameters`, ordered as in `torch_weights`."""
    import torch

    def run() -> Any:
        ys = forward()
        return ys, *torch.autograd.grad(ys, [xs, *parameters], ct_ys)

    def canonical(result: Any) -> Tensors:
        return from_torch(case, result[0], result[1], result[2:], batch_first=batch_first)

    return Ready(run, canonical, forward, own_graphs)


def torch_state(case: Case, tensors: Tensors) -> Any:
    """Returns the initial state of a module with one layer."""
    return (tensors["h0"][None], tensors["c0"][None]) if case.cell == "lstm" else tensors["h0"][None]


def torch_bridge_pass(
    case: Case, inputs: Inputs, *, compiler: Mapping[str, Any] | None = None, own_graphs: bool = False
) -> Ready:
    """Builds the pass of this project's modules for PyTorch, which get no resets in a case without resets.

    `compiler` has the options of `torch.compile`; None means eager.
    """
    import torch

    from torch_bridge import nn as ours

    tensors = inputs.torch("f32", True)
    rnn = torch_module(case, tensors, getattr(ours, case.cell.upper()))
    xs = tensors["xs"].detach().requires_grad_()
    state, resets = torch_state(case, tensors), tensors["resets"] if case.reset_rate else None
    call = rnn
    if compiler is not None:
        torch.compiler.reset()  # else, shapes compiled before would make those of this case dynamic
        call = torch.compile(rnn, fullgraph=True, **compiler)

    def forward() -> Any:
        if own_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        return call(xs, state, resets=resets)[0]

    return autograd_pass(case, forward, xs, list(rnn.parameters()), tensors["ct_ys"], own_graphs=own_graphs)


def torch_pass(case: Case, inputs: Inputs, *, dtype: Dtype = "f32") -> Ready:
    """Builds cuDNN's pass in `torch.nn`, without resets, because its fastest kernels take only such input."""
    tensors = inputs.torch(dtype, False)
    rnn, xs, state = torch_module(case, tensors), tensors["xs"].detach().requires_grad_(), torch_state(case, tensors)
    return autograd_pass(case, lambda: rnn(xs, state)[0], xs, list(rnn.parameters()), tensors["ct_ys"])


def torch_cell_pass(case: Case, inputs: Inputs) -> Ready:
    """Builds the pass of `torch.nn.GRUCell` or `LSTMCell` in a Python loop; resets mask the state, as in actors."""
    import torch

    tensors = inputs.torch("f32", True)
    cell = torch_module(case, tensors, getattr(torch.nn, f"{case.cell.upper()}Cell"))
    xs, resets = tensors["xs"].detach().requires_grad_(), tensors["resets"][..., None] if case.reset_rate else None

    def masked(state: Any, t: int) -> Any:
        return state if resets is None else state.masked_fill(resets[t], 0.0)

    def forward() -> Any:
        ys, h, c = [], tensors["h0"], tensors.get("c0")
        for t in range(case.T):
            if c is None:
                h = cell(xs[t], masked(h, t))
            else:
                h, c = cell(xs[t], (masked(h, t), masked(c, t)))
            ys.append(h)
        return torch.stack(ys) if case.T > 1 else h[None]

    return autograd_pass(case, forward, xs, list(cell.parameters()), tensors["ct_ys"])


def episodes(resets: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Cuts sequences into episodes, longest first.

    Args:
      resets: `[T, B]`, true at the first step of an episode.

    Returns:
      `(sequence, start, length, first)`, each `[E]`: the sequence of an episode, its first step, its number of steps,
      and whether it continues from the carry.
    """
    T = resets.shape[0]
    starts = resets.copy()
    starts[0] = True
    sequence, start = np.nonzero(starts.T)
    end = np.append(start[1:], 0)
    end[np.append(sequence[1:] != sequence[:-1], True)] = T
    order = np.argsort(start - end, kind="stable")
    sequence, start, length = sequence[order], start[order], (end - start)[order]
    return sequence, start, length, (start == 0) & ~resets[0, sequence]


def torch_packed_pass(case: Case, inputs: Inputs, *, dtype: Dtype = "f32") -> Ready:
    """Builds cuDNN's pass in `torch.nn` with resets, where episodes are a packed batch.

    Gathering and scattering are timed, sorting is not.
    """
    import torch
    from torch.nn.utils.rnn import PackedSequence

    tensors, T, B, H = inputs.torch(dtype, True), case.T, case.B, case.H
    rnn, xs = torch_module(case, tensors), tensors["xs"].detach().requires_grad_()
    sequence, start, length, first = episodes(inputs.numpy["resets"])
    batch_sizes = (length[None, :] > np.arange(length[0])[:, None]).sum(1)
    index = np.concatenate([(start[:n] + t) * B + sequence[:n] for t, n in enumerate(batch_sizes)])
    gather = torch.from_numpy(index).to(xs.device)
    scatter = torch.from_numpy(np.argsort(index)).to(xs.device)
    sizes = torch.from_numpy(batch_sizes)
    goes_on = torch.from_numpy(first).to(xs.device)[None, :, None]
    picked = torch.from_numpy(sequence).to(xs.device)
    states = [
        torch.where(goes_on, tensors[name][picked][None], torch.zeros((), dtype=xs.dtype, device=xs.device))
        for name in cases.initial_states(case)
    ]
    state = tuple(states) if case.cell == "lstm" else states[0]

    def forward() -> Any:
        data = xs.reshape(T * B, H).index_select(0, gather)
        packed, _ = rnn(PackedSequence(data, sizes), state)
        return packed.data.index_select(0, scatter).reshape(T, B, H)

    return autograd_pass(case, forward, xs, list(rnn.parameters()), tensors["ct_ys"])


def torchrl_pass(case: Case, inputs: Inputs, *, bf16: bool = False) -> Ready:
    """Builds the pass of TorchRL's Triton kernels, which take the batch axis first.

    They take a reset value for every step; that of the first step is the carry.
    """
    import torch

    kernels = importlib.import_module("torchrl.modules.tensordict_module._rnn_triton")
    configure_torch()
    tensors = inputs.torch("f32", True)
    weights = torch_weights(case, tensors)
    xs, ct_ys, resets = (tensors[name].transpose(0, 1).contiguous() for name in ("xs", "ct_ys", "resets"))
    xs.requires_grad_()
    states = []
    for name in cases.initial_states(case):
        start = torch.zeros(case.B, case.T, case.H, device=xs.device)
        start[:, 0] = torch.where(resets[:, :1], 0.0, tensors[name])
        states.append(start)
    function = kernels.gru_triton if case.cell == "gru" else kernels.lstm_triton
    compute = torch.bfloat16 if bf16 else torch.float32

    def forward() -> Any:
        return function(xs, *states, *weights.values(), resets, compute, input_precision="tf32")[0]

    return autograd_pass(case, forward, xs, list(weights.values()), ct_ys, batch_first=True)


def flashrnn_pass(case: Case, inputs: Inputs) -> Ready:
    """Builds the pass of FlashRNN's fused CUDA kernels (for a GRU, its alternating kernels), with one head.

    PyTorch computes the input projection.
    """
    import torch

    flashrnn = importlib.import_module("flashrnn").flashrnn
    configure_torch()
    tensors, H = inputs.torch("f32", False), case.H
    xs, ct_ys = (tensors[name].transpose(0, 1).contiguous() for name in ("xs", "ct_ys"))
    xs.requires_grad_()
    weights = torch_weights(case, tensors)
    w_ih, w_hh, b_ih, b_hh = weights.values()
    states = torch.stack([tensors[name] for name in cases.initial_states(case)])[:, :, None, None]

    def gates(w: Any) -> Any:  # [GH, ...] -> [G, 1, H, ...]; a GRU's recurrent product starts with n
        w = w.reshape(cells.CELLS[case.cell].gates, 1, H, *w.shape[1:])
        return torch.cat([w[2:], w[:2]]) if case.cell == "gru" else w

    def forward() -> Any:
        if case.cell == "gru":  # biases: of n (recurrent), r, z, n (input)
            xp = torch.nn.functional.linear(xs, w_ih)
            b_r_z = (b_ih + b_hh)[: 2 * H].reshape(2, 1, H)
            b = torch.cat([b_hh[2 * H :].reshape(1, 1, H), b_r_z, b_ih[2 * H :].reshape(1, 1, H)])
        else:
            xp, b = torch.nn.functional.linear(xs, w_ih), (b_ih + b_hh).reshape(4, 1, H)
        xp = xp.reshape(case.B, case.T, -1, 1, H)
        hs, _ = flashrnn(
            xp, gates(w_hh), b, states, function=case.cell, dtype="float32",
            backend="cuda_fused" if case.cell == "lstm" else "cuda",
        )  # fmt: skip
        return hs[0, :, :, 0]

    return autograd_pass(case, forward, xs, list(weights.values()), ct_ys, batch_first=True)


EVERY_CELL = tuple(cells.CELLS)
ALL = (
    Provider(
        "jaxrnn", functools.partial(jaxrnn_pass, implementation="triton"), cells=EVERY_CELL, reset_states=True,
        derivatives=True, needs=("torch", "triton"),
    ),
    Provider(
        "jaxrnn-remat", functools.partial(jaxrnn_pass, implementation="triton", remat=True), cells=EVERY_CELL,
        reset_states=True, needs=("torch", "triton"),
    ),
    Provider(
        "jaxrnn-bf16", functools.partial(jaxrnn_pass, implementation="triton", dtype="bf16"), cells=EVERY_CELL,
        reset_states=True, dtype="bf16", precision="bf16", needs=("torch", "triton"),
    ),
    Provider(
        "jaxrnn-default", functools.partial(jaxrnn_pass, implementation=None), cells=EVERY_CELL, reset_states=True,
    ),
    Provider(
        "jaxrnn-default-bf16", functools.partial(jaxrnn_pass, implementation=None, dtype="bf16"), cells=EVERY_CELL,
        reset_states=True, dtype="bf16", precision="bf16",
    ),
    Provider(
        "jaxrnn-linen", functools.partial(linen_pass, implementation="triton"), cells=EVERY_CELL,
        needs=("torch", "triton"),
    ),
    Provider(
        "jaxrnn-xla", functools.partial(jaxrnn_pass, implementation="xla"), cells=EVERY_CELL, reset_states=True,
        derivatives=True,
    ),
    Provider(
        "flax", flax_pass, cells=tuple(name for name, cell in FLAX.items() if cell.linen is not None),
        derivatives=True,
    ),
    Provider("hoisted-scan", hoisted_scan_pass, cells=EVERY_CELL, reset_states=True, derivatives=True),
    Provider("jax-cudnn-lstm", jax_cudnn_pass, cells=("lstm",), resets=False, vmap=False),
    Provider("torch_bridge", torch_bridge_pass, vmap=False, needs=("torch", "triton")),
    Provider(
        "torch_bridge-compiled", functools.partial(torch_bridge_pass, compiler={}), vmap=False,
        needs=("torch", "triton"),
    ),
    Provider(
        "torch_bridge-cudagraphs",
        functools.partial(torch_bridge_pass, compiler={"mode": "reduce-overhead"}, own_graphs=True), vmap=False,
        needs=("torch", "triton"),
    ),
    Provider("torch-cudnn", torch_pass, resets=False, vmap=False, needs=("torch",)),
    Provider(
        "torch-cudnn-bf16", functools.partial(torch_pass, dtype="bf16"), dtype="bf16", precision="bf16", resets=False,
        vmap=False, needs=("torch",),
    ),
    Provider("torch-cudnn-packed", torch_packed_pass, vmap=False, needs=("torch",)),
    Provider(
        "torch-cudnn-packed-bf16", functools.partial(torch_packed_pass, dtype="bf16"), dtype="bf16", precision="bf16",
        vmap=False, needs=("torch",),
    ),
    Provider("torch-cell", torch_cell_pass, vmap=False, needs=("torch",)),
    Provider("torchrl", torchrl_pass, vmap=False, needs=("torch", "triton", "torchrl"), bounded=True),
    Provider(
        "torchrl-bf16", functools.partial(torchrl_pass, bf16=True), precision="bf16", vmap=False,
        needs=("torch", "triton", "torchrl"), bounded=True,
    ),
    Provider("flashrnn", flashrnn_pass, resets=False, vmap=False, needs=("torch", "flashrnn"), bounded=True),
)  # fmt: skip

PROVIDERS = {provider.name: provider for provider in ALL}
