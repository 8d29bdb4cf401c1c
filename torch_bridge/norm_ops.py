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


class ForwardCall(NamedTuple):
    """A call of a forward operator, whose arguments are the fields after `kind`.

    Attributes:
      kind: "rms" or "layer".
      x: `[S, R, N]`.
      weight: `[S, N]` or None.
      bias: `[S, N]` or None.
      residual: `[S, R, N]`, which is added to `x`, or None.
      epsilon: added to the mean square, or to the variance.
      dtype: dtype of `y`.
      save: whether to return the statistics. `forward` decides that.
      implementation: "triton", "torch", or None for the kernels where they can run, else PyTorch operations.
    """

    kind: Kind
    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    epsilon: float
    dtype: torch.dtype
    save: bool = False
    implementation: str | None = None

    @property
    def arrays(self) -> dict[str, Tensor | None]:
        """The arrays that the kernel reads, by name."""
        return {"x": self.x, "residual": self.residual, "weight": self.weight, "bias": self.bias}

    @property
    def outputs(self) -> op_common.Outputs:
        """The outputs of the operator."""
        x, residual = self.x, self.residual
        total = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        wide = op_common.accumulation_dtype(total)
        return {
            "y": (x.shape, self.dtype),
            "total": ((0,) if residual is None else x.shape, total),
            "mean": (x.shape[:2] if self.save and self.kind == "layer" else (0,), wide),
            "rstd": (x.shape[:2] if self.save else (0,), wide),
        }


class BackwardCall(NamedTuple):
    """A call of a backward operator, whose arguments are the fields after `kind`.

    Attributes:
      kind: "rms" or "layer".
      dy: the gradient of `y`.
      x: the input of the norm, `Normalized.total`.
      dtotal: the gradient of `total` from elsewhere, which is added; or None.
      weight: `[S, N]` or None.
      mean: `Normalized.mean`.
      rstd: `Normalized.rstd`.
      dweight_dtype: dtype of the gradient of the weight, or None for no such gradient.
      dbias_dtype: dtype of the gradient of the bias, or None for no such gradient.
      implementation: see `ForwardCall`.
    """

    kind: Kind
    dy: Tensor
    x: Tensor
    dtotal: Tensor | None
    weight: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    dweight_dtype: torch.dtype | None
    dbias_dtype: torch.dtype | None
    implementation: str | None = None

    @property
    def arrays(self) -> dict[str, Tensor | None]:
        """The arrays that the kernel reads, by name."""
        arrays = {"dy": self.dy, "x": self.x, "dtotal": self.dtotal, "weight": self.weight}
        return arrays | {"mean": self.mean, "rstd": self.rstd}

    @property
    def outputs(self) -> op_common.Outputs:
        """The outputs of the operator."""
        shape, sums = (self.x.shape[0], self.x.shape[2]), {"dweight": self.dweight_dtype, "dbias": self.dbias_dtype}
        return {"dx": (self.x.shape, self.x.dtype)} | {
            name: ((0,), torch.float32) if dtype is None else (shape, dtype) for name, dtype in sums.items()
        }


def _launches(call: ForwardCall | BackwardCall) -> bool:
    """Returns whether an operator launches a kernel for a call; raises the errors of `should_launch_kernels`."""
    in_float64 = isinstance(call, ForwardCall) and call.dtype == torch.float64
    launches = should_launch_kernels(call.implementation, call.x, *call.arrays.values())
    return launches and not in_float64 and call.x.numel() > 0


def _check(call: ForwardCall | BackwardCall) -> None:
    """Raises ValueError unless the arrays of a call have the shapes that kernels read and are on one device."""
    x, arrays = call.x, call.arrays
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


def _compute(call: ForwardCall) -> tuple[Tensor, ...]:
    """Computes what the forward operator does."""
    found = normalize(
        call.x, call.weight, call.bias, call.residual, kind=call.kind, epsilon=call.epsilon, dtype=call.dtype
    )._asdict()  # fmt: skip
    # Outputs are contiguous like a kernel's, whatever the strides of x: compilers rely on the strides of the fake.
    return tuple(
        op_common.empty_output(call.x, dtype) if shape == (0,) else found[name].contiguous()
        for name, (shape, dtype) in call.outputs.items()
    )


def _compute_gradients(call: BackwardCall) -> tuple[Tensor, ...]:
    """Computes what the backward operator does."""
    wide = call.rstd.dtype
    dy, normalized, rstd = call.dy.to(wide), call.x.to(wide), call.rstd.unsqueeze(-1)
    normalized = (normalized if call.mean is None else normalized - call.mean.unsqueeze(-1)) * rstd
    scaled = dy if call.weight is None else dy * _over_rows(call.weight, dy)
    dx = scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)
    if call.kind == "layer":
        dx = dx - scaled.mean(-1, keepdim=True)
    dx = dx * rstd
    if call.dtotal is not None:
        dx = dx + call.dtotal.to(wide)
    dweight, dbias = (
        op_common.empty_output(call.x, torch.float32) if dtype is None else rows.sum(1).to(dtype).contiguous()
        for rows, dtype in ((dy * normalized, call.dweight_dtype), (dy, call.dbias_dtype))
    )
    return dx.to(call.x.dtype).contiguous(), dweight, dbias


def _reference_gradients(
    kind: Kind, epsilon: float, dtypes: Sequence[torch.dtype | None], *arrays: Any
) -> tuple[Tensor, ...]:  # fmt: skip
    """Computes what the backward operator does, with the statistics as a function of `x`."""
    call = BackwardCall(kind, *arrays, *dtypes)
    found = normalize(call.x, None, None, None, kind=kind, epsilon=epsilon, dtype=call.x.dtype)
    return _compute_gradients(call._replace(mean=found.mean, rstd=found.rstd))


# Launches.


@functools.lru_cache(maxsize=4096)
def _launch(fields: tuple[Any, ...], ordinal: int | None) -> Any:
    """Returns the launch of `norms.Problem(*fields)`, compiled and loaded onto a device, or for the interpreter."""
    from torch_bridge import norms

    problem = norms.Problem(*fields)
    launch = op_common.load(norms.Launch, problem, ordinal)
    recording.log_launch(f"{problem.kind}_norm", problem.direction, launch)
    return launch


def _run(call: ForwardCall | BackwardCall) -> tuple[Tensor, ...]:
    """Launches the kernel of a call on the current stream and returns its outputs.

    The kernel does not write those that are not requested. With a listener, `_run` tells the launch instead, and the
    outputs have no values.
    """
    listener, device, outputs = recording.listener(), call.x.device, call.outputs
    tensors = {
        name: op_common.as_kernel_input(y) if listener is None else y
        for name, y in call.arrays.items()
        if y is not None
    }  # fmt: skip
    results = {name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in outputs.items()}
    tensors |= {name: y for name, y in results.items() if outputs[name][0] != (0,)}
    direction, epsilon = ("fwd", call.epsilon) if isinstance(call, ForwardCall) else ("bwd", 0.0)
    dtypes = tuple((name, op_common.dtype_name(y.dtype)) for name, y in tensors.items())
    fields: tuple[Any, ...] = call.kind, direction, *map(int, call.x.shape), epsilon, dtypes
    if listener is not None:
        from torch_bridge import norms

        facts = availability.device_facts(listener.profile, device)
        listener.launched(f"{call.kind}_norm", direction, norms.Launch(norms.Problem(*fields), facts), facts)
    else:
        ordinal = op_common.launch_ordinal(device)
        op_common.run(_launch(fields, ordinal), tensors, ordinal)
    return tuple(results.values())


# Operators.


def _fake(call: ForwardCall | BackwardCall) -> tuple[Tensor, ...]:
    """Returns the outputs of a call without values.

    With a listener (`torch_bridge.explain`), it also tells what the operator would launch.
    """
    if recording.listener() is not None and _launches(call):
        return _run(call)
    return op_common.fake(call.outputs, call.x)


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


_FORWARD = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float epsilon, ScalarType dtype, bool save, "
    "str? implementation=None) -> (Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor dy, Tensor x, Tensor? dtotal, Tensor? weight, Tensor? mean, Tensor rstd, ScalarType? dweight_dtype, "
    "ScalarType? dbias_dtype, str? implementation=None) -> (Tensor, Tensor, Tensor)"
)


def _define(kind: Kind) -> tuple[Any, Any]:
    """Registers the forward and backward operators of a kind of norm and returns them."""
    name = f"torch_bridge::{kind}_norm"

    @op_common.define(name, _FORWARD)
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        call = ForwardCall(kind, *arguments)
        _check(call)
        return _run(call) if _launches(call) else _compute(call)

    def forward_decomposed(*arguments: Any) -> tuple[Tensor, ...]:
        return _compute(ForwardCall(kind, *arguments))

    def forward_fake(*arguments: Any) -> tuple[Tensor, ...]:
        return _fake(ForwardCall(kind, *arguments))

    @op_common.define(f"{name}_backward", _BACKWARD)
    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        call = BackwardCall(kind, *arguments)
        _check(call)
        for name, dtype in (("dweight_dtype", call.dweight_dtype), ("dbias_dtype", call.dbias_dtype)):
            if dtype is not None and not dtype.is_floating_point:  # PyTorch accepts a bool as a dtype
                raise ValueError(f"{name} must be a floating-point dtype, or None for no such gradient, got {dtype}")
        return _run(call) if _launches(call) else _compute_gradients(call)

    def backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
        return _fake(BackwardCall(kind, *arguments))

    forward_op = getattr(torch.ops.torch_bridge, f"{kind}_norm").default
    backward_op = getattr(torch.ops.torch_bridge, f"{kind}_norm_backward").default

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        arrays, ctx.options, ctx.call = inputs[:4], inputs[4:], recording.current()
        x, weight, _, residual = arrays
        _, total, mean, rstd = output
        ctx.dtypes = [None if y is None else y.dtype for y in arrays]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd, *([total] if residual is None else []))
        ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)

    def gradients(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        recording.resume(ctx.call)  # after the read, in which a checkpoint runs the forward pass again
        epsilon, dtype, saves, implementation = ctx.options
        of_x, of_weight, of_bias, of_residual = ctx.dtypes
        dtotal = dtotal if of_residual is not None else None  # without a residual, `total` is an empty output
        needs = ctx.needs_input_grad
        dweight = dbias = None
        if dy is None:
            if dtotal is None:
                return (None,) * 8
            dx = dtotal
        else:
            if not saves:  # computes the statistics now, which do not depend on weight and bias
                _, _, mean, rstd = op_common.call(
                    forward_op, x, None, None, None, epsilon, dtype, True, implementation
                )  # fmt: skip
            arrays = dy, x, dtotal, weight, mean if kind == "layer" else None, rstd
            dtypes = of_weight if needs[1] else None, of_bias if needs[2] else None

            def compute(*arrays: Tensor | None) -> tuple[Tensor, ...]:
                found: tuple[Tensor, ...] = op_common.call(backward_op, *arrays, *dtypes, implementation)
                return found

            reference = functools.partial(_reference_gradients, kind, epsilon, dtypes)
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


def forward(call: ForwardCall) -> tuple[Tensor, Tensor]:
    """Calls the operator of a kind. It saves residuals for the backward pass if a gradient may be requested.

    Returns:
      `(y, x + residual)`. Without a residual the second is an empty tensor.
    """
    op = rms_norm_op if call.kind == "rms" else layer_norm_op
    arrays = call.x, call.weight, call.bias, call.residual
    save = op_common.wants_gradients([y for y in arrays if y is not None])
    y, total, _, _ = op_common.call(op, *arrays, call.epsilon, call.dtype, save, call.implementation)
    return y, total
