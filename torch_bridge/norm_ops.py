"""RMSNorm and LayerNorm, after adding a residual connection, and their gradients, as PyTorch operators.

The operators are `torch_bridge::rms_norm` and `torch_bridge::layer_norm`, and their gradients `rms_norm_backward` and
`layer_norm_backward`. Rows are `[S, R, N]`: each of S models has R rows and its own weights and biases `[S, N]`.
`torch.vmap` over weights adds models; over inputs alone it adds rows. Statistics are computed and saved in float32, or
in float64 if the rows are float64. The operators of both kinds take the same arguments, so one function defines them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torch_bridge import availability, op_common, recording, tiling

Kind = Literal["rms", "layer"]


_unsupported = availability.cached_reason(availability.unavailable)


def unsupported(tensors: Sequence[Tensor], profile: tiling.Device | None = None) -> str | None:
    """Returns why the kernels cannot run on these tensors, of which the first has the rows, or None if they can."""
    if reason := _unsupported(profile, tensors[0].device, *dict.fromkeys(x.dtype for x in tensors)):
        return reason
    from torch_bridge import norms

    # compared and not a key of the cache: a compiler would specialize on it
    if (columns := tensors[0].shape[-1]) > norms.WIDEST:
        return f"takes at most {norms.WIDEST} columns, got {columns}: leave implementation out"
    return None


def should_launch_kernels(implementation: str | None, *tensors: Tensor | None) -> bool:
    """Returns whether an operator launches a kernel; if not, it runs PyTorch operations.

    Raises:
      ValueError: the implementation is unknown.
      NotImplementedError: `implementation` is "triton" and the kernels cannot run.
    """
    if implementation not in (None, "triton", "torch"):
        raise ValueError(f'implementation must be "triton", "torch" or None, got {implementation!r}')
    given = [x for x in tensors if x is not None]
    return availability.should_launch_kernels(
        implementation, given[0].device, functools.partial(unsupported, given)
    )  # fmt: skip


def _check(x: Tensor, **arrays: Tensor | None) -> None:
    """Raises ValueError unless the arrays of an operator have the shapes that kernels read and are on one device."""
    if x.ndim != 3:
        raise ValueError(f"the rows must be [S, R, N], got {tuple(x.shape)}")
    shapes: dict[str, tuple[int, ...]] = {"weight": (x.shape[0], x.shape[2]), "bias": (x.shape[0], x.shape[2])}
    shapes |= {"mean": tuple(x.shape[:2]), "rstd": tuple(x.shape[:2])}
    for name, y in arrays.items():
        if y is not None and tuple(y.shape) != (shape := shapes.get(name, tuple(x.shape))):
            raise ValueError(f"{name} must be {shape}, got {tuple(y.shape)}")
    op_common.check_devices("x", x, arrays)


# PyTorch operations.


class Normalized(NamedTuple):
    """The results of a norm: `y [..., N]`, its input `total [..., N]`, `mean [...]` (LayerNorm only), `rstd [...]`."""

    y: Tensor
    total: Tensor
    mean: Tensor | None
    rstd: Tensor


def _over_rows(x: Tensor, like: Tensor) -> Tensor:
    """Returns a weight or bias in a shape that broadcasts over the rows of `like`, in the dtype of `like`.

    A weight `[S, N]` becomes `[S, 1, N]`, for rows `[S, R, N]`; a weight `[N]` fits rows `[..., N]` as it is.
    """
    return x.to(like.dtype) if x.ndim == 1 else x.to(like.dtype).unsqueeze(-2)


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, *, kind: Kind, epsilon: float,
    dtype: torch.dtype,
) -> Normalized:  # fmt: skip
    """Computes a norm in PyTorch operations that autograd differentiates.

    Args:
      x: `[S, R, N]`, or `[..., N]` with a weight and a bias `[N]`.
      weight: `[S, N]`, `[N]`, or None.
      bias: `[S, N]`, `[N]`, or None.
      residual: added to `x`, in the shape of `x`; or None.
      kind: "rms" or "layer".
      epsilon: added to the mean square, or to the variance.
      dtype: dtype of `y`.
    """
    total = x if residual is None else x + residual
    wide = total.to(op_common.accumulation_dtype(total.dtype))
    mean = wide.mean(-1) if kind == "layer" else None
    centered = wide if mean is None else wide - mean.unsqueeze(-1)
    rstd = (centered.square().mean(-1) + epsilon).rsqrt()
    y = centered * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * _over_rows(weight, y)
    if bias is not None:
        y = y + _over_rows(bias, y)
    return Normalized(y.to(dtype), total, mean, rstd)


def _row_gradients(
    kind: Kind, dy: Tensor, x: Tensor, dtotal: Tensor | None, weight: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of `x`, and each row's contribution to the gradients of weight and bias.

    Args:
      kind: "rms" or "layer".
      dy: the gradient of `y`.
      x: the input of the norm, `Normalized.total`.
      dtotal: the gradient of `total` from elsewhere, which is added; or None.
      weight: the weight or None.
      mean: `Normalized.mean`.
      rstd: `Normalized.rstd`.
    """
    wide = rstd.dtype
    dy, normalized, rstd = dy.to(wide), x.to(wide), rstd.unsqueeze(-1)
    normalized = (normalized if mean is None else normalized - mean.unsqueeze(-1)) * rstd
    scaled = dy if weight is None else dy * _over_rows(weight, dy)
    dx = scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)
    if kind == "layer":
        dx = dx - scaled.mean(-1, keepdim=True)
    dx = dx * rstd
    if dtotal is not None:
        dx = dx + dtotal.to(wide)
    return dx.to(x.dtype), dy * normalized, dy


def _sum_rows(
    x: Tensor, per_row: Sequence[Tensor], dtypes: Sequence[torch.dtype | None]
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of weight and bias from each row's contributions; an empty tensor where a dtype is None."""
    dweight, dbias = (
        op_common.empty_output(x, torch.float32) if dtype is None else rows.sum(1).to(dtype).contiguous()
        for rows, dtype in zip(per_row, dtypes, strict=True)
    )
    return dweight, dbias


def _reference_gradients(
    kind: Kind, epsilon: float, dtypes: Sequence[torch.dtype | None], dy: Tensor, x: Tensor, dtotal: Tensor | None,
    weight: Tensor | None, *_: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Computes what the backward operator does, with the statistics as a function of `x`."""
    found = normalize(x, None, None, None, kind=kind, epsilon=epsilon, dtype=x.dtype)
    dx, *per_row = _row_gradients(kind, dy, x, dtotal, weight, found.mean, found.rstd)
    return dx, *_sum_rows(x, per_row, dtypes)


# Launches.


@functools.lru_cache(maxsize=4096)
def _launch(
    kind: Kind, direction: Any, models: int, rows: int, columns: int, epsilon: float,
    dtypes: tuple[tuple[str, str], ...], ordinal: int | None,
) -> Any:  # fmt: skip
    """Returns the launch of a problem, compiled and loaded; `dtypes` are those of the arrays by name."""
    from torch_bridge import norms

    problem = norms.Problem(kind, direction, models, rows, columns, epsilon, dtypes)
    made = op_common.load(norms.Launch, problem, ordinal)
    recording.log_launch(f"{kind}_norm", direction, made)
    return made


def _tell_launch(
    listener: recording.Listener, kind: Kind, direction: Any, epsilon: float, arrays: dict[str, Tensor | None],
    outputs: dict[str, tuple[Any, torch.dtype]],
) -> None:  # fmt: skip
    """Tells a listener what `_run` would launch, if anything."""
    from torch_bridge import norms

    x: Any = arrays["x"]
    if x.numel() == 0 or any(dtype == torch.float64 for _, dtype in outputs.values()):
        return
    given = {name: x.dtype for name, x in arrays.items() if x is not None}
    given |= {name: dtype for name, (shape, dtype) in outputs.items() if shape != (0,)}
    dtypes = tuple((name, op_common.dtype_name(dtype)) for name, dtype in given.items())
    device = availability.device_facts(listener.profile, x.device)
    models, rows, columns = map(int, x.shape)
    problem = norms.Problem(kind, direction, models, rows, columns, epsilon, dtypes)
    listener.launched(f"{kind}_norm", direction, norms.Launch(problem, device), device)


def _run(
    kind: Kind, direction: str, epsilon: float, arrays: dict[str, Tensor | None],
    returned: dict[str, tuple[Any, torch.dtype]],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launches a kernel on the current stream of the tensors' device.

    Returns the outputs in the order of `returned`, which has shape and dtype of each. One with the shape `(0,)` is not
    requested: the kernel does not write it.
    """
    tensors = {name: op_common.as_kernel_input(x) for name, x in arrays.items() if x is not None}
    x = tensors["x"]
    results = {
        name: torch.empty(shape, dtype=dtype, device=x.device) for name, (shape, dtype) in returned.items()
    }  # fmt: skip
    tensors |= {name: y for name, y in results.items() if returned[name][0] != (0,)}
    dtypes = tuple((name, op_common.dtype_name(y.dtype)) for name, y in tensors.items())
    ordinal = op_common.launch_ordinal(x.device)
    op_common.run(_launch(kind, direction, *map(int, x.shape), epsilon, dtypes, ordinal), tensors, ordinal)
    return tuple(results.values())


# Operators.


def _forward_outputs(
    kind: Kind, x: Tensor, residual: Tensor | None, dtype: torch.dtype, save: bool
) -> dict[str, tuple[Any, torch.dtype]]:
    """Returns shape and dtype of each output of the forward operator, by name; `(0,)` if it is not requested."""
    total = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    wide = op_common.accumulation_dtype(total)
    return {
        "y": (x.shape, dtype),
        "total": ((0,) if residual is None else x.shape, total),
        "mean": (x.shape[:2] if save and kind == "layer" else (0,), wide),
        "rstd": (x.shape[:2] if save else (0,), wide),
    }


def _backward_outputs(
    x: Tensor, dweight_dtype: torch.dtype | None, dbias_dtype: torch.dtype | None
) -> dict[str, tuple[Any, torch.dtype]]:
    """Returns shape and dtype of each output of the backward operator. Sums whose dtype is None are not requested."""
    shape = (x.shape[0], x.shape[2])
    sums = {"dweight": dweight_dtype, "dbias": dbias_dtype}
    return {"dx": (x.shape, x.dtype)} | {
        name: ((0,), torch.float32) if dtype is None else (shape, dtype) for name, dtype in sums.items()
    }


def _vmap(op: Any, per_model: tuple[str, ...], asked: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Returns the `torch.vmap` rule of `op`: a new axis adds models if weights are batched, rows if they are shared.

    It also adds models if an argument in `asked` requests a gradient of weights, since each example has its own
    gradient.

    Args:
      op: the operator. Its argument `x` has the rows, `[S, R, N]`.
      per_model: the arguments with an element for each model, the weights; all others have one for each row.
      asked: the arguments that request a gradient of weights if they are not None.
    """
    names = [argument.name for argument in op._schema.arguments]

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size, given = info.batch_size, list(zip(names, args, in_dims, strict=False))
        new_models = any((name in per_model and dim is not None) or (name in asked and x) for name, x, dim in given)

        def merge(name: str, x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor) or (name in per_model and not new_models):
                return x
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1) if new_models else x.transpose(0, 1).flatten(1, 2)

        def split(x: Tensor) -> Tensor:
            if new_models:
                return x.unflatten(0, (size, models))
            return x.unflatten(1, (size, rows)).transpose(0, 1)

        x, dim = args[names.index("x")], in_dims[names.index("x")]
        models, rows = [length for i, length in enumerate(x.shape) if i != dim][:2]
        results = op(*(merge(*each) for each in given))
        empty = [x.ndim == 1 for x in results]  # outputs that are not requested
        out = tuple(x if e else split(x) for x, e in zip(results, empty, strict=True))
        return out, tuple(None if e else 0 for e in empty)

    return rule


def _define(kind: Kind) -> tuple[Any, Any]:
    """Registers the forward and backward operators of a kind of norm and returns them."""
    name = f"torch_bridge::{kind}_norm"

    @op_common.define(name)
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, epsilon: float,
        dtype: torch.dtype, save: bool, implementation: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        _check(x, weight=weight, bias=bias, residual=residual)
        returned = _forward_outputs(kind, x, residual, dtype, save)
        kernels = should_launch_kernels(implementation, x, weight, bias, residual)
        if kernels and dtype != torch.float64 and x.numel() > 0:
            arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
            return _run(kind, "fwd", epsilon, arrays, returned)  # type: ignore[return-value]
        return compute(returned, x, weight, bias, residual, epsilon, dtype)  # type: ignore[return-value]

    def compute(
        returned: dict[str, tuple[Any, torch.dtype]], x: Tensor, weight: Tensor | None, bias: Tensor | None,
        residual: Tensor | None, epsilon: float, dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        found = normalize(x, weight, bias, residual, kind=kind, epsilon=epsilon, dtype=dtype)._asdict()
        # Outputs are contiguous like a kernel's, whatever the strides of x: compilers rely on the strides of the fake.
        return tuple(
            op_common.empty_output(x, wanted) if shape == (0,) else found[key].contiguous()
            for key, (shape, wanted) in returned.items()
        )

    def forward_decomposed(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, epsilon: float,
        dtype: torch.dtype, save: bool, *_: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        returned = _forward_outputs(kind, x, residual, dtype, save)
        return compute(returned, x, weight, bias, residual, epsilon, dtype)

    def forward_fake(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, epsilon: float,
        dtype: torch.dtype, save: bool, implementation: str | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        returned = _forward_outputs(kind, x, residual, dtype, save)
        listener = recording.listener()
        if listener is not None and should_launch_kernels(implementation, x, weight, bias, residual):
            arrays = {"x": x, "residual": residual, "weight": weight, "bias": bias}
            _tell_launch(listener, kind, "fwd", epsilon, arrays, returned)
        return op_common.fake(returned, x)

    @op_common.define(f"{name}_backward")
    def backward(
        dy: Tensor, x: Tensor, dtotal: Tensor | None, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
        dweight_dtype: torch.dtype | None, dbias_dtype: torch.dtype | None, implementation: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        _check(x, dy=dy, dtotal=dtotal, weight=weight, mean=mean, rstd=rstd)
        for name, dtype in (("dweight_dtype", dweight_dtype), ("dbias_dtype", dbias_dtype)):
            if dtype is not None and not dtype.is_floating_point:  # PyTorch accepts a bool as a dtype
                raise ValueError(f"{name} must be a floating-point dtype, or None for no such gradient, got {dtype}")
        returned = _backward_outputs(x, dweight_dtype, dbias_dtype)
        if should_launch_kernels(implementation, x, dy, dtotal, weight, rstd) and x.numel() > 0:
            arrays = {"dy": dy, "x": x, "dtotal": dtotal, "weight": weight, "mean": mean, "rstd": rstd}
            return _run(kind, "bwd", 0.0, arrays, returned)  # type: ignore[return-value]
        dx, *per_row = _row_gradients(kind, dy, x, dtotal, weight, mean, rstd)
        return dx.contiguous(), *_sum_rows(x, per_row, (dweight_dtype, dbias_dtype))

    def backward_fake(
        dy: Tensor, x: Tensor, dtotal: Tensor | None, weight: Tensor | None, mean: Tensor | None, rstd: Tensor,
        dweight_dtype: torch.dtype | None, dbias_dtype: torch.dtype | None, implementation: str | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        returned = _backward_outputs(x, dweight_dtype, dbias_dtype)
        listener = recording.listener()
        if listener is not None and should_launch_kernels(implementation, x, dy, dtotal, weight, rstd):
            arrays = {"dy": dy, "x": x, "dtotal": dtotal, "weight": weight, "mean": mean, "rstd": rstd}
            _tell_launch(listener, kind, "bwd", 0.0, arrays, returned)
        return op_common.fake(returned, x)

    forward_op = getattr(torch.ops.torch_bridge, f"{kind}_norm").default
    backward_op = getattr(torch.ops.torch_bridge, f"{kind}_norm_backward").default

    def setup(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        x, weight, bias, residual, ctx.epsilon, ctx.dtype, ctx.saves, ctx.implementation = inputs
        ctx.call = recording.current()
        _, total, mean, rstd = output
        ctx.dtypes = [None if y is None else y.dtype for y in (x, weight, bias, residual)]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd, *([total] if residual is None else []))
        ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)

    def gradients(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        recording.resume(ctx.call)  # after the read, in which a checkpoint runs the forward pass again
        of_x, of_weight, of_bias, of_residual = ctx.dtypes
        dtotal = dtotal if of_residual is not None else None  # without a residual, `total` is an empty output
        needs = ctx.needs_input_grad
        dweight = dbias = None
        if dy is None:
            if dtotal is None:
                return (None,) * 8
            dx = dtotal
        else:
            if not ctx.saves:  # computes the statistics now, which do not depend on weight and bias
                _, _, mean, rstd = op_common.call(
                    forward_op, x, None, None, None, ctx.epsilon, ctx.dtype, True, ctx.implementation
                )
            wanted = of_weight if needs[1] else None, of_bias if needs[2] else None
            arrays = dy, x, dtotal, weight, mean if kind == "layer" else None, rstd
            kernels = should_launch_kernels(ctx.implementation, x, dy, dtotal, weight, rstd)

            def compute(*arrays: Tensor | None, implementation: str | None = ctx.implementation) -> tuple[Tensor, ...]:
                found: tuple[Tensor, ...] = op_common.call(backward_op, *arrays, *wanted, implementation)
                return found

            if kernels:
                dx, dweight, dbias = compute(*arrays)
            else:
                reference = functools.partial(_reference_gradients, kind, ctx.epsilon, wanted)
                dx, dweight, dbias = op_common.differentiable(compute, reference, *arrays)
            dweight, dbias = dweight if needs[1] else None, dbias if needs[2] else None
        dresidual = dx.to(of_residual) if needs[3] else None
        return dx.to(of_x) if needs[0] else None, dweight, dbias, dresidual, None, None, None, None

    op_common.register(
        forward, forward_op, forward_fake, gradients, setup, _vmap(forward_op, ("weight", "bias")), forward_decomposed
    )
    op_common.register(
        backward, backward_op, backward_fake, op_common.no_second_order, op_common.no_setup,
        _vmap(backward_op, ("weight",), ("dweight_dtype", "dbias_dtype")),
    )  # fmt: skip
    return forward_op, backward_op


rms_norm_op, rms_norm_backward_op = _define("rms")
layer_norm_op, layer_norm_backward_op = _define("layer")


def forward(
    kind: Kind, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, epsilon: float,
    dtype: torch.dtype, implementation: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Calls the operator of a kind. It saves residuals for the backward pass if a gradient may be requested.

    Args:
      kind: "rms" or "layer".
      x: `[S, R, N]`.
      weight: `[S, N]` or None.
      bias: `[S, N]` or None.
      residual: `[S, R, N]` or None.
      epsilon: added to the mean square, or to the variance.
      dtype: dtype of `y`.
      implementation: "triton", "torch", or None for the kernels where they can run, else PyTorch operations.

    Returns:
      `(y, x + residual)`. Without a residual the second is an empty tensor.
    """
    op = rms_norm_op if kind == "rms" else layer_norm_op
    save = op_common.wants_gradients([y for y in (x, weight, bias, residual) if y is not None])
    y, total, _, _ = op_common.call(op, x, weight, bias, residual, epsilon, dtype, save, implementation)
    return y, total
