"""GRU and LSTM time loops with episode resets, and their gradients, as PyTorch operators.

The operators are `torch_bridge::gru` and `torch_bridge::lstm`, and their gradients `torch_bridge::gru_backward` and
`torch_bridge::lstm_backward`. They run the time loop only, on the canonical arrays of the kernels. Sequences are
`[G, T, B, W]`, where each of the G groups holds B sequences, time first. States are `[G, B, H]`. Weights are
`[S, ...]`, where each of the S models owns G / S consecutive groups. Time-major input is one group, batch-major input
is one group per sequence, two directions are two models, and `torch.vmap` adds models or groups. None of these costs a
transpose or a second launch. Input projections and the gradients of all weights are PyTorch's own matmuls, so compilers
can fuse the operations around the loop.

The operators are `torch.library.custom_op`s, which are opaque to compilers, and not `triton_op`s. With `wrap_triton`,
Inductor emits a kernel's source again under `@triton.jit`, which does not compile the kernels written in Gluon.
Inductor's launches are never cooperative, so programs that wait for one another could deadlock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from torch_bridge import loops, op_common, rules, tiling
from torch_bridge.cells import GRU, LSTM, CellSpec

if TYPE_CHECKING:
    from torch_bridge.recurrences import Launch

# None follows `torch.backends.cuda.matmul`.
Precision = rules.Precision | None

_REVERSE: dict[str, tiling.Reverse] = {"forward": False, "reverse": True, "bidirectional": "bidirectional"}
_PRECISIONS: tuple[str, ...] = get_args(rules.Precision)


@functools.cache
def _unsupported(device: torch.device, dtype: torch.dtype, hidden: int) -> str | None:
    """Returns why the kernels cannot run on a device with weights of this dtype and width, or None if they can."""
    facts = op_common.device_facts(device, dtype)
    if isinstance(facts, str):
        return facts
    if facts.interpreted and dtype == torch.bfloat16:
        return "compute bfloat16 products wrongly in Triton's interpreter: use float32 or float16 there"
    if hidden > tiling.max_hidden(facts):
        return (
            f"are limited by the device: a hidden width of {hidden} is more than its {facts.multiprocessors} SMs can "
            f"share ({tiling.max_hidden(facts)}); leave implementation out"
        )
    return None


def _should_launch_kernels(implementation: str | None, w_hh: Tensor) -> bool:
    """Returns whether an operator launches a kernel; if not, it runs the loop in PyTorch operations.

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: `implementation` is "triton" and the kernels cannot run.
    """
    if implementation not in (None, "triton", "loop"):
        raise ValueError(f'implementation of an operator must be "triton", "loop" or None, got {implementation!r}')
    if implementation == "loop" or (implementation is None and w_hh.device.type != "cuda"):
        return False
    hidden = w_hh.shape[-1]
    reason = _unsupported(w_hh.device, w_hh.dtype, int(hidden))
    if reason is not None and implementation == "triton":
        raise NotImplementedError(f"the Triton kernels {reason}")
    return reason is None


def _matmul_precision() -> str:
    """Returns PyTorch's setting for float32 products on a GPU: "tf32", or the name of another precision."""
    return str(torch.backends.cuda.matmul.fp32_precision)


# Sets the attribute that torch.compiler.assume_constant_result sets, without importing the compiler, which takes a
# second. torch.compile recompiles when PyTorch's setting changes.
_matmul_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def kernel_precision(precision: Precision, hidden: int) -> str:
    """Returns the precision of float32 products in a kernel, by Triton's name.

    None follows `torch.backends.cuda.matmul`: "tf32" if that setting allows it and H is above 32, else "tf32x3".

    Raises:
      ValueError: the precision is unknown.
    """
    if precision is None:
        return rules.kernel_precision(_matmul_precision() == "tf32", hidden)
    if precision not in _PRECISIONS:
        raise ValueError(
            f'precision must be "tf32", "tf32x3" or None (to follow torch.backends.cuda.matmul), got {precision!r}'
        )
    return precision


def _sizes(sequence: Tensor, w_hh: Tensor) -> tiling.Sizes:
    groups, steps, batch = sequence.shape[:3]
    return tiling.Sizes(w_hh.shape[0], groups, steps, batch, w_hh.shape[-1])


def _check(
    sizes: tiling.Sizes,
    gates: int,
    sequences: dict[str, Tensor | None],
    states: dict[str, Tensor | None],
    weights: dict[str, Tensor],
    order: str,
    precision: str,
) -> None:
    """Raises ValueError unless the arrays of an operator have the shapes that kernels read. Arrays may be empty.

    It also raises if the arrays are on different devices, or if the order or the precision is unknown.
    """
    models, groups, steps, batch, hidden = sizes
    op_common.check_devices("w_hh", weights["w_hh"], sequences | states | weights)
    if order not in _REVERSE or precision not in _PRECISIONS:
        raise ValueError(
            f"order must be one of {', '.join(_REVERSE)}; precision must be one of {', '.join(_PRECISIONS)}; got "
            f"{order!r} and {precision!r}"
        )
    if models < 1 or groups % models:
        raise ValueError(f"the number of groups, {groups}, must be a multiple of the number of models, {models}")
    widths = {"xp": gates * hidden, "local_grads": 4 * hidden}
    for name, x in sequences.items():
        shape: tuple[int, ...] = (groups, steps, batch, widths.get(name, hidden))
        if x is not None and tuple(x.shape) != (shape[:3] if name == "resets" else shape):
            raise ValueError(f"{name} must be {shape[:3] if name == 'resets' else shape}, got {tuple(x.shape)}")
    for name, x in states.items():
        if x is not None and tuple(x.shape) != (groups, batch, hidden):
            raise ValueError(f"{name} must be {(groups, batch, hidden)}, got {tuple(x.shape)}")
    for name, x in weights.items():
        wanted = (models, gates * hidden, hidden) if name == "w_hh" else (models, hidden)
        if tuple(x.shape) != wanted:
            raise ValueError(f"{name} must be {wanted}, got {tuple(x.shape)}")


@functools.lru_cache(maxsize=4096)
def _launch(
    cell: str, direction: tiling.Direction, sizes: tiling.Sizes, dtypes: tuple[tuple[str, str], ...],
    reset_state: Any, order: str, precision: Any, ordinal: int | None,
) -> Launch:  # fmt: skip
    """Returns the launch of a problem, compiled and loaded onto a device; if `ordinal` is None, for the interpreter."""
    from torch_bridge.recurrences import Launch

    problem = tiling.Problem(
        cell, direction, *sizes, dtypes=dtypes, reset_state=reset_state, reverse=_REVERSE[order], precision=precision
    )
    return op_common.load(Launch, problem, ordinal)


def _run(
    cell: CellSpec, direction: tiling.Direction, sizes: tiling.Sizes, arrays: dict[str, Tensor | None],
    outputs: dict[str, tuple[tuple[int, ...], torch.dtype]], order: str, precision: str, reset_state: str = "zeros",
) -> dict[str, Tensor]:  # fmt: skip
    """Launches a kernel on the current stream of the tensors' device and returns its outputs by name."""
    tensors = {name: op_common.as_kernel_input(x) for name, x in arrays.items() if x is not None}
    place = next(iter(tensors.values())).device
    results = {name: torch.empty(shape, dtype=dtype, device=place) for name, (shape, dtype) in outputs.items()}
    tensors |= results
    dtypes = tuple((name, op_common.dtype_name(x.dtype)) for name, x in tensors.items())
    ordinal = op_common.launch_ordinal(place)
    launch: Any = _launch(cell.name, direction, sizes, dtypes, reset_state, order, precision, ordinal)
    if launch.config.loop == "streamed":  # Gluon kernels round weights on load, if at all
        weights = "w_hh_t" if direction == "fwd" else "w_hh"
        tensors[weights] = _round_to_tf32(tensors[weights], precision)
    op_common.run(launch, tensors, ordinal)
    return results


def _round_to_tf32(w: Tensor, precision: str) -> Tensor:
    """Returns weights for the streamed loop, rounded to TF32: tensor cores truncate them, which would add a bias."""
    if w.dtype != torch.float32 or precision != "tf32":
        return w
    rounded = (w.contiguous().view(torch.int32) + 0x1000).bitwise_and_(-0x2000).view(torch.float32)
    return torch.where(w == w, rounded, torch.nan)  # rounding changes some NaNs to numbers


def _state_dtype(x: Tensor, w_hh: Tensor) -> torch.dtype:
    """Returns the dtype in which kernels read and write a state: bfloat16 if it and the weights are, else float32."""
    return torch.bfloat16 if x.dtype == w_hh.dtype == torch.bfloat16 else torch.float32


def _residual_dtype(name: str, kernels: bool, precision: str, w_hh: Tensor) -> torch.dtype:
    if not kernels:
        return op_common.accumulation_dtype(w_hh.dtype)
    fits_float16 = rules.residual_fits_float16(name, op_common.dtype_name(w_hh.dtype), precision)
    return torch.float16 if fits_float16 else torch.float32


def _forward_outputs(
    cell: CellSpec, xp: Tensor, w_hh: Tensor, states: Sequence[Tensor], cells: bool, save: bool, kernels: bool,
    precision: str,
) -> dict[str, tuple[Any, torch.dtype]]:  # fmt: skip
    """Returns shape and dtype of each output of the forward operator, by name; `(0,)` if it is not requested."""
    groups, steps, batch = xp.shape[:3]
    hidden = states[0].shape[-1]
    outputs: dict[str, tuple[Any, torch.dtype]] = {}
    for s, x in zip(cell.states, states, strict=True):
        asked = s == "h" or cells
        outputs[f"{s}s"] = ((groups, steps, batch, hidden) if asked else (0,), x.dtype)
    for s, x in zip(cell.states, states, strict=True):
        outputs[f"{s}_last"] = ((groups, batch, hidden), x.dtype)
    for name, width in cell.residuals:
        shape = (groups, steps, batch, width * hidden) if save else (0,)
        outputs[name] = (shape, _residual_dtype(name, kernels, precision, w_hh))
    return outputs


def _forward_kernel(
    cell: CellSpec, sizes: tiling.Sizes, xp: Tensor, w_hh: Tensor, states: Sequence[Tensor], resets: Tensor | None,
    reset_states: Sequence[Tensor | None], order: str, precision: str, returned: dict[str, tuple[Any, torch.dtype]],
    **biases: Tensor,
) -> Any:  # fmt: skip
    dtypes = {s: _state_dtype(x, w_hh) for s, x in zip(cell.states, states, strict=True)}
    arrays: dict[str, Tensor | None] = {"w_hh_t": w_hh}
    arrays |= {name: b.float() for name, b in biases.items()}
    arrays["xp"] = xp.float()
    arrays |= {f"{s}0": x.to(dtypes[s]) for s, x in zip(cell.states, states, strict=True)}
    arrays["reset"] = resets
    kind = "zeros"
    for s, x in zip(cell.states, reset_states, strict=True):
        if x is not None and resets is not None:
            arrays[f"reset_{s}"], kind = x.to(dtypes[s]), "stepped" if x.ndim == 4 else "fixed"
    outputs = {}
    for name, (shape, dtype) in returned.items():
        if name.endswith("_last"):
            outputs[name] = (shape, torch.float32)
        elif shape != (0,):
            outputs[name] = (shape, dtypes[name[0]] if name in ("hs", "cs") else dtype)
    results = _run(cell, "fwd", sizes, arrays, outputs, order, precision, kind)
    return tuple(
        results[name].to(dtype) if name in results else op_common.empty_output(xp, dtype)
        for name, (_, dtype) in returned.items()
    )


def _readable_resets(resets: Tensor | None) -> Tensor | None:
    return resets if resets is None or op_common.dtype_name(resets.dtype) in rules.RESET_DTYPES else resets != 0


def _as_outputs(results: Any, returned: dict[str, tuple[Any, torch.dtype]], like: Tensor) -> Any:
    """Returns the results of a loop in the order and dtypes of an operator's outputs."""
    found = results._asdict()

    def given(name: str, shape: Any, dtype: torch.dtype) -> Tensor:
        if shape == (0,):
            return op_common.empty_output(like, dtype)
        x = found[name].to(dtype).contiguous()  # the fake outputs are contiguous
        return x.clone() if x._is_view() else x  # autograd forbids in-place changes to a view made in here

    return tuple(given(name, *output) for name, output in returned.items())


def _backward_outputs(
    cell: CellSpec, w_hh: Tensor, carry_gate: Tensor, reset_gradients: bool, resets: Tensor | None
) -> dict[str, tuple[Any, torch.dtype]]:
    """Returns shape and dtype of each output of the backward operator, by name; `(0,)` if it is not requested."""
    groups, steps, batch, hidden = carry_gate.shape
    wide = op_common.accumulation_dtype(w_hh.dtype)
    outputs: dict[str, tuple[Any, torch.dtype]] = {"dxp": ((groups, steps, batch, cell.gates * hidden), w_hh.dtype)}
    if cell is GRU:
        outputs["dhn"] = ((groups, steps, batch, hidden), w_hh.dtype)
    outputs |= {f"d{s}0": ((groups, batch, hidden), wide) for s in cell.states}
    stepped = (groups, steps, batch, hidden) if reset_gradients and resets is not None else (0,)
    return outputs | {f"dreset_{s}": (stepped, wide) for s in cell.states}


def _zeros(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def _backward_kernel(
    cell: CellSpec, sizes: tiling.Sizes, w_hh: Tensor, saved: dict[str, Tensor], resets: Tensor | None,
    dsequences: Sequence[Tensor | None], dlast: Sequence[Tensor | None], order: str, precision: str,
    returned: dict[str, tuple[Any, torch.dtype]],
) -> Any:  # fmt: skip
    _, groups, steps, batch, hidden = sizes
    arrays: dict[str, Tensor | None] = {"w_hh": w_hh.mT, **saved, "reset": resets}
    for s, d in zip(cell.states, dsequences, strict=True):
        if d is not None:
            arrays[f"d{s}s"] = d.to(_state_dtype(d, w_hh))
        elif s == "h":
            arrays["dhs"] = _zeros(w_hh, groups, steps, batch, hidden)
    for s, d in zip(cell.states, dlast, strict=True):
        arrays[f"d{s}_last"] = _zeros(w_hh, groups, batch, hidden) if d is None else d.float()
    outputs = {name: output for name, output in returned.items() if output[0] != (0,)}
    results = _run(cell, "bwd", sizes, arrays, outputs, order, precision)
    return tuple(
        results[name] if name in results else op_common.empty_output(w_hh, dtype)
        for name, (_, dtype) in returned.items()
    )


def _vmap(op: Any, groups: str) -> Callable[..., Any]:
    """Returns the `torch.vmap` rule of `op`: a new axis adds models if weights are batched, groups if they are shared.

    Both take one launch. The original models stay adjacent, so each of two directions keeps the parity of its index.
    `groups` is the name of an argument whose leading axis is the groups.
    """
    names = [argument.name for argument in op._schema.arguments]
    weights = ("w_hh", "b_hn")

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size

        def count(name: str) -> int:
            x, dim = args[names.index(name)], in_dims[names.index(name)]
            return int(x.shape[0 if dim is None or dim > 0 else 1])

        S, G = count("w_hh"), count(groups)
        new_models = any(n in weights and dim is not None for n, dim in zip(names, in_dims, strict=False))

        def merge(name: str, x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor) or (name in weights and not new_models):
                return x
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            if name not in weights and not new_models:  # models stay the slowest axis: [size, S, ...] -> [S, size, ...]
                x = x.unflatten(1, (S, G // S)).transpose(0, 1).flatten(0, 1)
            return x.flatten(0, 1)

        def split(x: Tensor) -> Tensor:
            if new_models:
                return x.unflatten(0, (size, G))
            return x.unflatten(0, (S, size, G // S)).transpose(0, 1).flatten(1, 2)

        results = op(*(merge(*each) for each in zip(names, args, in_dims, strict=False)))
        empty = [x.shape == (0,) for x in results]
        out = tuple(x if e else split(x) for x, e in zip(results, empty, strict=True))
        return out, tuple(None if e else 0 for e in empty)

    return rule


def _shift_one_step(history: Tensor, first: Tensor, reverse: bool) -> Tensor:
    """Returns the states before each step, `[..., T, B, H]`: `first` at the loop's first step, else from `history`."""
    first = first.unsqueeze(-3)
    parts = (history[..., 1:, :, :], first) if reverse else (first, history[..., :-1, :, :])
    return torch.cat(parts, -3)


def _with_resets(previous: Tensor, resets: Tensor | None, reset_h: Tensor | None) -> Tensor:
    """Returns the states that steps read, `[G, T, B, H]`: `previous`, or the reset state where an episode starts."""
    if resets is None:
        return previous
    start = (resets != 0)[..., None]
    if reset_h is None:
        return previous.masked_fill(start, 0)
    state = reset_h if reset_h.ndim == 4 else reset_h.unsqueeze(1)
    return torch.where(start, state.to(previous.dtype), previous)


def _states_read(
    hs: Tensor, h0: Tensor, resets: Tensor | None, reset_h: Tensor | None, order: str, models: int, dtype: torch.dtype
) -> list[tuple[slice, Tensor]]:
    """Returns the hidden states that steps read, as pairs of a slice of steps and the states `[G, steps, B, H]`.

    Where time is the slowest axis in memory, the first step is a part of its own. The other states then need not be
    copied to be concatenated with it.
    """
    hs, h0, groups, steps = hs.to(dtype), h0.to(dtype), *hs.shape[:2]
    if order == "bidirectional":
        pairs = zip(hs.unflatten(0, (models, -1)), h0.unflatten(0, (models, -1)), strict=True)
        whole = torch.cat([_shift_one_step(*pair, reverse=s % 2 == 1) for s, pair in enumerate(pairs)])
        parts = [(slice(0, steps), whole)]
    elif groups > models or steps == 1:
        parts = [(slice(0, steps), _shift_one_step(hs, h0, order == "reverse"))]
    elif order == "reverse":
        parts = [(slice(0, steps - 1), hs[:, 1:]), (slice(steps - 1, steps), h0[:, None])]
    else:
        parts = [(slice(1, steps), hs[:, :-1]), (slice(0, 1), h0[:, None])]

    def of(steps: slice, x: Tensor | None) -> Tensor | None:
        return x if x is None or (x is reset_h and x.ndim == 3) else x[:, steps]

    return [(part, _with_resets(x, of(part, resets), of(part, reset_h))) for part, x in parts]


def _sum_products(x: Tensor, seen: list[tuple[slice, Tensor]], models: int) -> Tensor:
    """Returns `[S, X, H]`: each model's product of `x` and `seen`, summed over its groups, the steps and the batch."""
    products = []
    for steps, y in seen:
        part = x if len(seen) == 1 else x[:, steps]
        if models == 1:
            products.append((part.reshape(-1, x.shape[-1]).mT @ y.reshape(-1, y.shape[-1]))[None])
        else:
            products.append(part.reshape(models, -1, x.shape[-1]).mT @ y.reshape(models, -1, y.shape[-1]))
    return products[0] if len(products) == 1 else products[0] + products[1]


def _reset_state_gradient(x: Tensor, like: Tensor) -> Tensor:
    """Returns the gradient of a reset state `like`, given the gradient of every step's reset state."""
    return (x if like.ndim == 4 else x.sum(1)).to(like.dtype)


def _forward_flops(xp: Any, w_hh: Any, *_: Any, **__: Any) -> int:
    """Returns the FLOPs of the products of every state with a model's recurrent weights, given shapes."""
    groups, steps, batch = xp[:3]
    return int(2 * groups * steps * batch * w_hh[-1] * w_hh[-2])


def _backward_flops(w_hh: Any, hs: Any, *_: Any, **__: Any) -> int:
    return _forward_flops(hs, w_hh)


def _register(
    name: str, definition: Any, fake: Callable[..., Any], gradients: Callable[..., Any], setup: Callable[..., None],
    backward: Any, backward_fake: Callable[..., Any],
) -> tuple[Any, Any]:  # fmt: skip
    """Registers the forward and backward operators of a cell and returns both."""
    op, backward_op = (getattr(torch.ops.torch_bridge, x).default for x in (name, f"{name}_backward"))
    op_common.register(definition, op, fake, gradients, setup, _vmap(op, "xp"))
    # The backward operators take `hs` but do not read it. Autograd treats the residuals, which are marked
    # non-differentiable, as constants, although they depend on the inputs. `hs` connects the backward operators to
    # those inputs, so a second derivative reaches the backward operators, which raise.
    op_common.register(
        backward,
        backward_op,
        backward_fake,
        op_common.no_second_order,
        op_common.no_setup,
        _vmap(backward_op, "carry_gate"),
    )
    register_flop_formula(op.overloadpacket)(_forward_flops)
    register_flop_formula(backward_op.overloadpacket)(_backward_flops)
    return op, backward_op


@op_common.define("torch_bridge::gru")
def _gru_op(
    xp: Tensor, w_hh: Tensor, b_hn: Tensor, h0: Tensor, resets: Tensor | None, reset_h: Tensor | None, order: str,
    precision: str, save: bool, implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes, kernels = _sizes(xp, w_hh), _should_launch_kernels(implementation, w_hh)
    stepped = reset_h if reset_h is not None and reset_h.ndim == 4 else None
    fixed = reset_h if stepped is None else None
    _check(
        sizes, 3, {"xp": xp, "resets": resets, "reset_h": stepped}, {"h0": h0, "reset_h": fixed},
        {"w_hh": w_hh, "b_hn": b_hn}, order, precision,
    )  # fmt: skip
    returned = _forward_outputs(GRU, xp, w_hh, (h0,), True, save, kernels, precision)
    resets = _readable_resets(resets)
    if not kernels or xp.numel() == 0:
        return _as_outputs(loops.gru(xp, w_hh, b_hn, h0, resets, reset_h, order, save), returned, xp)
    return _forward_kernel(
        GRU, sizes, xp, w_hh, (h0,), resets, (reset_h,), order, precision, returned, b_hn=b_hn
    )  # fmt: skip


def _gru_fake(
    xp: Tensor, w_hh: Tensor, b_hn: Tensor, h0: Tensor, resets: Tensor | None, reset_h: Tensor | None, order: str,
    precision: str, save: bool, implementation: str | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    op_common.check_devices("w_hh", w_hh, {"xp": xp, "b_hn": b_hn, "h0": h0, "resets": resets, "reset_h": reset_h})
    kernels = _should_launch_kernels(implementation, w_hh)
    return op_common.fake(_forward_outputs(GRU, xp, w_hh, (h0,), True, save, kernels, precision), xp)


@op_common.define("torch_bridge::gru_backward")
def _gru_backward_op(
    w_hh: Tensor, hs: Tensor, local_grads: Tensor, carry_gate: Tensor, resets: Tensor | None, dhs: Tensor | None,
    dh_last: Tensor | None, order: str, precision: str, reset_gradients: bool, implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes, kernels = _sizes(carry_gate, w_hh), _should_launch_kernels(implementation, w_hh)
    _check(
        sizes, 3, {"local_grads": local_grads, "carry_gate": carry_gate, "resets": resets, "dhs": dhs},
        {"dh_last": dh_last}, {"w_hh": w_hh}, order, precision,
    )  # fmt: skip
    returned, resets = _backward_outputs(GRU, w_hh, carry_gate, reset_gradients, resets), _readable_resets(resets)
    if kernels and carry_gate.numel() > 0:
        saved = {"local_grads": local_grads, "carry_gate": carry_gate}
        return _backward_kernel(
            GRU, sizes, w_hh, saved, resets, (dhs,), (dh_last,), order, precision, returned
        )  # fmt: skip
    dhs = torch.zeros_like(carry_gate) if dhs is None else dhs
    dh_last = torch.zeros_like(carry_gate[:, 0]) if dh_last is None else dh_last
    results = loops.gru_backward(w_hh, local_grads, carry_gate, resets, dhs, dh_last, order, reset_gradients)
    return _as_outputs(results, returned, carry_gate)


def _gru_backward_fake(
    w_hh: Tensor, hs: Tensor, local_grads: Tensor, carry_gate: Tensor, resets: Tensor | None, dhs: Tensor | None,
    dh_last: Tensor | None, order: str, precision: str, reset_gradients: bool, implementation: str | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return op_common.fake(_backward_outputs(GRU, w_hh, carry_gate, reset_gradients, resets), carry_gate)


def _gru_setup(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    xp, w_hh, b_hn, h0, resets, reset_h, order, precision, ctx.saves, ctx.implementation = inputs
    ctx.options = order, precision
    hs, _, local_grads, carry_gate = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(local_grads, carry_gate)
    again = (None, None) if ctx.saves else (xp, b_hn)
    ctx.save_for_backward(w_hh, h0, resets, reset_h, hs, local_grads, carry_gate, *again)


def _gru_gradients(ctx: Any, dhs: Tensor | None, dh_last: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dhs is None and dh_last is None:
        return (None,) * 10
    w_hh, h0, resets, reset_h, hs, local_grads, carry_gate, xp, b_hn = ctx.saved_tensors
    order, precision = ctx.options
    if not ctx.saves:
        hs, _, local_grads, carry_gate = op_common.call(  # recomputes the residuals
            gru_op, xp, w_hh, b_hn, h0, resets, reset_h, order, precision, True, ctx.implementation
        )  # fmt: skip
    needs = ctx.needs_input_grad
    dxp, dhn, dh0, dreset_h = op_common.call(
        gru_backward_op,
        w_hh,
        hs,
        local_grads,
        carry_gate,
        resets,
        dhs,
        dh_last,
        order,
        precision,
        needs[5],
        ctx.implementation,
    )
    dw_hh = db_hn = None
    if needs[1]:
        models, hidden = w_hh.shape[0], w_hh.shape[-1]
        seen = _states_read(hs, h0, resets, reset_h, order, models, w_hh.dtype)
        parts = _sum_products(dxp[..., : 2 * hidden], seen, models), _sum_products(dhn, seen, models)
        dw_hh = torch.cat(parts, 1)
    if needs[2]:
        db_hn = dhn.reshape(w_hh.shape[0], -1, dhn.shape[-1]).sum(1)
    dreset = _reset_state_gradient(dreset_h, reset_h) if needs[5] and resets is not None else None
    return dxp, dw_hh, db_hn, dh0.to(h0.dtype), None, dreset, None, None, None, None


gru_op, gru_backward_op = _register(
    "gru", _gru_op, _gru_fake, _gru_gradients, _gru_setup, _gru_backward_op, _gru_backward_fake
)


@op_common.define("torch_bridge::lstm")
def _lstm_op(
    xp: Tensor, w_hh: Tensor, h0: Tensor, c0: Tensor, resets: Tensor | None, reset_h: Tensor | None,
    reset_c: Tensor | None, order: str, precision: str, cells: bool, save: bool, implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes, kernels = _sizes(xp, w_hh), _should_launch_kernels(implementation, w_hh)
    stepped = reset_h is not None and reset_h.ndim == 4
    if (reset_h is None) != (reset_c is None):
        raise ValueError("reset_h and reset_c must be given together: pass zeros for the missing one")
    reset_states: dict[str, Tensor | None] = {"reset_h": reset_h, "reset_c": reset_c}
    _check(
        sizes, 4, {"xp": xp, "resets": resets, **(reset_states if stepped else {})},
        {"h0": h0, "c0": c0, **({} if stepped else reset_states)}, {"w_hh": w_hh}, order, precision,
    )  # fmt: skip
    returned = _forward_outputs(LSTM, xp, w_hh, (h0, c0), cells, save, kernels, precision)
    resets = _readable_resets(resets)
    if not kernels or xp.numel() == 0:
        return _as_outputs(loops.lstm(xp, w_hh, h0, c0, resets, reset_h, reset_c, order, save), returned, xp)
    return _forward_kernel(
        LSTM, sizes, xp, w_hh, (h0, c0), resets, (reset_h, reset_c), order, precision, returned
    )  # fmt: skip


def _lstm_fake(
    xp: Tensor, w_hh: Tensor, h0: Tensor, c0: Tensor, resets: Tensor | None, reset_h: Tensor | None,
    reset_c: Tensor | None, order: str, precision: str, cells: bool, save: bool, implementation: str | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    arrays = {"xp": xp, "h0": h0, "c0": c0, "resets": resets, "reset_h": reset_h, "reset_c": reset_c}
    op_common.check_devices("w_hh", w_hh, arrays)
    kernels = _should_launch_kernels(implementation, w_hh)
    return op_common.fake(_forward_outputs(LSTM, xp, w_hh, (h0, c0), cells, save, kernels, precision), xp)


@op_common.define("torch_bridge::lstm_backward")
def _lstm_backward_op(
    w_hh: Tensor, hs: Tensor, local_grads: Tensor, dc_dh: Tensor, carry_gate: Tensor, resets: Tensor | None,
    dhs: Tensor | None, dcs: Tensor | None, dh_last: Tensor | None, dc_last: Tensor | None, order: str, precision: str,
    reset_gradients: bool, implementation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes, kernels = _sizes(carry_gate, w_hh), _should_launch_kernels(implementation, w_hh)
    saved = {"local_grads": local_grads, "dc_dh": dc_dh, "carry_gate": carry_gate}
    _check(
        sizes, 4, {**saved, "resets": resets, "dhs": dhs, "dcs": dcs}, {"dh_last": dh_last, "dc_last": dc_last},
        {"w_hh": w_hh}, order, precision,
    )  # fmt: skip
    returned, resets = _backward_outputs(LSTM, w_hh, carry_gate, reset_gradients, resets), _readable_resets(resets)
    if kernels and carry_gate.numel() > 0:
        return _backward_kernel(
            LSTM, sizes, w_hh, saved, resets, (dhs, dcs), (dh_last, dc_last), order, precision, returned
        )  # fmt: skip
    dhs = torch.zeros_like(carry_gate) if dhs is None else dhs
    dh_last, dc_last = (torch.zeros_like(carry_gate[:, 0]) if d is None else d for d in (dh_last, dc_last))
    results = loops.lstm_backward(
        w_hh, local_grads, dc_dh, carry_gate, resets, dhs, dcs, dh_last, dc_last, order, reset_gradients
    )
    return _as_outputs(results, returned, carry_gate)


def _lstm_backward_fake(
    w_hh: Tensor, hs: Tensor, local_grads: Tensor, dc_dh: Tensor, carry_gate: Tensor, resets: Tensor | None,
    dhs: Tensor | None, dcs: Tensor | None, dh_last: Tensor | None, dc_last: Tensor | None, order: str, precision: str,
    reset_gradients: bool, implementation: str | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return op_common.fake(_backward_outputs(LSTM, w_hh, carry_gate, reset_gradients, resets), carry_gate)


def _lstm_setup(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    xp, w_hh, h0, c0, resets, reset_h, reset_c, order, precision, cells, ctx.saves, ctx.implementation = inputs
    ctx.options = order, precision, cells
    hs, _, _, _, local_grads, dc_dh, carry_gate = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(local_grads, dc_dh, carry_gate)
    again = None if ctx.saves else xp
    ctx.save_for_backward(w_hh, h0, c0, resets, reset_h, reset_c, hs, local_grads, dc_dh, carry_gate, again)


def _lstm_gradients(
    ctx: Any, dhs: Tensor | None, dcs: Tensor | None, dh_last: Tensor | None, dc_last: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    order, precision, cells = ctx.options
    dcs = dcs if cells else None
    if all(d is None for d in (dhs, dcs, dh_last, dc_last)):
        return (None,) * 12
    w_hh, h0, c0, resets, reset_h, reset_c, hs, local_grads, dc_dh, carry_gate, xp = ctx.saved_tensors
    if not ctx.saves:
        hs, *_, local_grads, dc_dh, carry_gate = op_common.call(
            lstm_op, xp, w_hh, h0, c0, resets, reset_h, reset_c, order, precision, False, True, ctx.implementation
        )
    needs = ctx.needs_input_grad
    reset_gradients = resets is not None and (needs[5] or needs[6])
    dxp, dh0, dc0, dreset_h, dreset_c = op_common.call(
        lstm_backward_op, w_hh, hs, local_grads, dc_dh, carry_gate, resets, dhs, dcs, dh_last, dc_last, order,
        precision, reset_gradients, ctx.implementation,
    )  # fmt: skip
    dw_hh = None
    if needs[1]:
        models = w_hh.shape[0]
        dw_hh = _sum_products(dxp, _states_read(hs, h0, resets, reset_h, order, models, w_hh.dtype), models)
    dresets = (
        _reset_state_gradient(d, x) if reset_gradients and need else None
        for d, x, need in ((dreset_h, reset_h, needs[5]), (dreset_c, reset_c, needs[6]))
    )
    return dxp, dw_hh, dh0.to(h0.dtype), dc0.to(c0.dtype), None, *dresets, None, None, None, None, None


lstm_op, lstm_backward_op = _register(
    "lstm", _lstm_op, _lstm_fake, _lstm_gradients, _lstm_setup, _lstm_backward_op, _lstm_backward_fake
)


def forward(
    cell: CellSpec,
    arguments: Sequence[Tensor | None],
    order: str,
    precision: str,
    cells: bool,
    implementation: str | None,
) -> dict[str, Tensor]:
    """Calls the operator of a cell. It saves residuals for the backward pass if a gradient may be requested.

    Args:
      cell: an entry of the cell table.
      arguments: the tensor arguments of the operator.
      order: the direction through time, see `torch_bridge.loops`.
      precision: precision of float32 products, by Triton's name.
      cells: whether to return an LSTM's cell states of all steps.
      implementation: "triton", "loop", or None for the kernels where they can run, else the loop.

    Returns:
      The outputs of the operator, by name.
    """
    op = gru_op if cell is GRU else lstm_op
    options = (order, precision) if cell is GRU else (order, precision, cells)
    save = op_common.wants_gradients([x for x in arguments if x is not None])
    results = op_common.call(op, *arguments, *options, save, implementation)
    return dict(zip(cell.forward_outputs, results, strict=True))
