"""The one place where JAX reaches the Triton kernels: a primitive for a launch, its vmap rule, and its lowering.

`launch` binds one primitive for every cell and direction. Its arrays are canonical: weights `[S, ...]`, all others
`[G, ...]` with G a multiple of S. Others bind primitives of their own: `launch_norm` for norms and `launch_projection`
for input projections, of weights `[S, ...]` and rows `[S, *rows, N]`, and `launch_weight_grads` for the gradients of
weights, of what they are sums of, `[S, G, T, B, ...]`. Batching adds groups, rows or models, never a launch. Lowering
compiles the kernel and registers a callback that XLA calls with its own buffers and stream; XLA captures that call in
its CUDA graphs. On a mesh that JAX manages a launch is lowered to a `custom_partitioning`, and each device's part when
XLA has shared it out.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrnn import cells, scan_launch, sharding

if TYPE_CHECKING:
    from jax import Array

    from torch_bridge.config import Reverse as Reverse
    from torch_bridge.config import Sizes

WEIGHTS = ("w_hh", "w_hh_t", "b_hn")
# Of what works on rows, arrays that rows share, and such as have one number for a row.
ROW_WEIGHTS, ROW_STATISTICS = ("weight", "bias", "w_ih_t"), ("mean", "rstd")
# What is a sum over rows, or over steps and sequences: it has an axis of models and no other such.
WEIGHT_GRADS = ("dweight", "dbias", "sums")
# The axes that devices may share out; time and features stay whole.
SHARDABLE = ("models", "groups", "batch")


class Output(NamedTuple):
    """An array that a launch writes: `[G, T, B, width]`, or `[G, B, width]` if not `stepped`.

    It lies where the input called `over` did, of the same shape and dtype: XLA copies that one if it is needed later.
    """

    name: str
    stepped: bool
    width: int
    dtype: Any
    over: str | None = None


class NamedOutput(NamedTuple):
    """An array that a launch writes, whose shape follows from its name."""

    name: str
    dtype: Any
    over: None = None


def unsupported(dtypes: Sequence[Any], hidden: int) -> str | None:
    """Why the Triton implementation cannot run here on these dtypes and this width, and what to do; None if it can."""
    return _unsupported(dtypes, functools.partial(_too_wide, hidden), multiplies=True)


def unsupported_norm(dtypes: Sequence[Any], columns: int) -> str | None:
    """As `unsupported`, of a norm over so many columns."""
    return _unsupported(dtypes, functools.partial(_too_many_columns, columns), multiplies=False)


def _unsupported(dtypes: Sequence[Any], too_wide: Callable[[Any], str | None], multiplies: bool) -> str | None:
    missing = [name for name in ("torch", "triton") if _spec_missing(name)]
    if missing:
        return (
            f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "pip install '.[torch]' in a checkout of jaxrnn, or pass implementation=\"xla\""
        )
    if bad := [str(dtype) for dtype in dtypes if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16)]:
        return f'takes float32, bfloat16 and float16, not {bad[0]}: convert, or pass implementation="xla"'
    if reason := _import_fails():
        return f"{reason}: pip install '.[torch]' in a checkout of jaxrnn, or pass implementation=\"xla\""
    from torch_bridge import config, launch

    if launch.interpreting():
        if jax.default_backend() != "cpu":
            return (
                "runs in Triton's interpreter here, because of TRITON_INTERPRET=1, and that takes arrays on the CPU "
                'alone: unset it, set JAX_PLATFORMS=cpu, or pass implementation="xla"'
            )
        if multiplies and jnp.bfloat16 in dtypes:
            return (
                "computes bfloat16 products wrongly in Triton's interpreter: use float32 or float16 there, or pass "
                'implementation="xla"'
            )
        return too_wide(config.Device())
    if jax.default_backend() != "gpu":
        return (
            f'needs an NVIDIA GPU, but JAX computes on "{jax.default_backend()}" here: pass implementation="xla" (or '
            "set TRITON_INTERPRET=1 before the first import to run the kernels in Triton's interpreter)"
        )
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return (
            f"needs a torch built for CUDA, but torch {torch.__version__} finds no CUDA device: install the build of "
            'torch for your driver, or pass implementation="xla"'
        )
    if reason := launch.driver_fails():
        return f'cannot load kernels here ({reason}); mend that, or pass implementation="xla"'
    device, *others = {launch.device(d.local_hardware_id) for d in jax.local_devices(backend="gpu")}
    if others:
        names = ", ".join(sorted(f"{d.name} ({d.multiprocessors} multiprocessors)" for d in (device, *others)))
        return (
            f"needs all GPUs of a process to be of one kind, got {names}: leave those out that you do not use, by "
            'CUDA_VISIBLE_DEVICES, or pass implementation="xla"'
        )
    if device.capability < 80:
        return (
            f"needs compute capability 8.0 (Ampere) or newer, this GPU has {device.capability / 10}: "
            'pass implementation="xla"'
        )
    return too_wide(device)


def _too_wide(hidden: int, device: Any) -> str | None:
    from torch_bridge.config import widest

    if hidden <= widest(device):
        return None
    return (
        f"is limited by the device: a hidden width of {hidden} is more than its {device.multiprocessors} "
        f'multiprocessors can share ({widest(device)}); pass implementation="xla"'
    )


def _too_many_columns(columns: int, _: Any) -> str | None:
    from torch_bridge.norms import WIDEST

    return None if columns <= WIDEST else f'takes up to {WIDEST} columns, got {columns}: pass implementation="xla"'


@functools.cache
def _import_fails() -> str | None:
    """Why the kernels cannot be imported, where torch and triton are installed; None if they can. Warns on a GPU."""
    try:
        from torch_bridge import launch  # noqa: F401
    except (ImportError, AttributeError) as error:
        reason = f"needs Triton 3.6 and torch 2.10 or newer, and what is installed has not what it needs ({error})"
        if jax.default_backend() == "gpu":
            warnings.warn(f"The Triton implementation of jaxrnn {reason}", RuntimeWarning, stacklevel=2)
        return reason
    return None


@functools.cache
def _spec_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


def preferred(steps: int) -> bool:
    """Whether the Triton implementation, where it can run, is the fastest: on a GPU (the interpreter never is).

    One step alone XLA does faster: 8.6 us an iteration of a scan against 16.2 us (H200, B=64, H=128).
    """
    return isinstance(steps, int) and steps > 1 and on_gpu()  # it is not, under `jax.export` with symbolic dimensions


def on_gpu() -> bool:
    """Whether JAX computes on a GPU unless told otherwise."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # a device, a platform, or None
    return (getattr(default, "platform", default) or jax.default_backend()) in ("gpu", "cuda")


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


# A launch; and what a device computes of it where XLA partitions the program: the same, lowered as the part that it is.
launch_p, launch_shard_p = _primitive("jaxrnn_launch"), _primitive("jaxrnn_launch_part")
norm_p, norm_part_p = _primitive("jaxrnn_norm"), _primitive("jaxrnn_norm_part")
projection_p, projection_part_p = _primitive("jaxrnn_projection"), _primitive("jaxrnn_projection_part")
weight_grads_p, weight_grads_part_p = _primitive("jaxrnn_weight_grads"), _primitive("jaxrnn_weight_grads_part")


@functools.cache
def _mesh_marker() -> Any:
    """A jaxpr that, found among a primitive's parameters, makes JAX tell its lowering rule the devices and the mesh."""
    identity = custom_partitioning(lambda x: x)
    identity.def_partition(lambda mesh, x, y: (mesh, lambda x: x, y.sharding, (x.sharding,)), sharding_rule="->")
    return jax.make_jaxpr(lambda x: identity(x))(0.0)


def launch(
    cell: str,
    direction: str,
    arrays: dict[str, Array | None],
    outputs: Sequence[Output],
    *,
    reset_state: str,
    reverse: Reverse,
    precision: str,
    may_scan: bool = False,
) -> dict[str, Array]:
    """Launches one kernel: takes its arrays by name (None ones are left out) and returns its outputs by name.

    With `reverse` "bidirectional" the innermost `jax.vmap` maps weights too, over two directions: forward and reverse.
    With `may_scan`, `scan_launch` computes the outputs where that is faster.
    """
    return _bind(
        launch_p, arrays, outputs, cell=cell, direction=direction, reset_state=reset_state, reverse=reverse,
        precision=precision, may_scan=may_scan,
    )  # fmt: skip


def launch_norm(
    kind: str, direction: str, arrays: dict[str, Array | None], outputs: Sequence[NamedOutput], *, epsilon: float
) -> dict[str, Array]:
    """Launches the kernel of a norm, "rms" or "layer": as `launch`, of the arrays that `torch_bridge.norms` names.

    Weights and their gradients are `[S, N]`, statistics `[S, *rows]`, all others `[S, *rows, N]`.
    """
    return _bind(norm_p, arrays, outputs, kind=kind, direction=direction, epsilon=epsilon)


def launch_projection(x: Array, w_ih: Array, bias: Array, dtype: Any) -> Array:
    """Launches an input projection, `x @ w_ih + bias`: x `[*rows, D]`, w_ih `[D, W]` of its dtype, bias `[W]` float32.

    Products of float32 are of TF32, to which `w_ih` must be rounded, and D is then up to 128. Returns `[*rows, W]`,
    float32 or float16: `dtype`.
    """
    arrays: dict[str, Array | None] = {"x": x[None], "w_ih_t": w_ih.T[None], "bias": bias[None]}
    return _bind(projection_p, arrays, [NamedOutput("xp", jnp.dtype(dtype))])["xp"][0]


def is_projection_profitable(rows: Any, inputs: int, gates: int, dtype: Any) -> bool:
    """Whether `launch_projection` works here for so many rows, and is faster than XLA's product and sum.

    Not for a number that is not known yet, of a symbolic shape.
    """
    from torch_bridge import input_projections

    if not isinstance(rows, int):
        return False
    problem = input_projections.Problem(1, rows, inputs, gates, (("x", str(jnp.dtype(dtype))),))
    return input_projections.is_profitable(problem, _device())


def launch_weight_grads(arrays: dict[str, Array | None], *, reverse: bool) -> dict[str, Array]:
    """Launches what adds up the gradients of all weights: as `launch`, of the arrays of `torch_bridge.weight_grads`.

    Returns them in float32, by the names of `torch_bridge.weight_grads.Layout`, for each of S models.
    """
    from torch_bridge.weight_grads import Layout

    output = NamedOutput("sums", jnp.dtype(jnp.float32))
    sums = _bind(weight_grads_p, arrays, [output], reverse=reverse)["sums"]
    inputs, hidden, gates = (arrays[name].shape[-1] for name in ("x", "hs", "dxp"))  # type: ignore[union-attr]
    separate = arrays.get("dhn") is not None
    at = Layout.of(inputs, hidden, gates, separate)
    shapes = {"w_ih": (inputs, gates), "w_hh": (hidden, gates), "bias": (gates,)}
    shapes |= {"b_hn": (hidden,)} if separate else {}
    ends = (*at[1:], at.end)
    return {
        name: sums[:, start:end].reshape(-1, *shapes[name])
        for name, start, end in zip(at._fields, at, ends, strict=True)
        if name in shapes
    }


def is_weight_grads_launch_profitable(
    shape: tuple[int, ...], hidden: int, gates: int, dtype: Any, separate: bool
) -> bool:
    """Whether `launch_weight_grads` works here, and is faster than XLA's products and sums.

    Of inputs `[G, T, B, D]` and gradients `[G, T, B, gates]`; `separate`: and "dhn".
    """
    from torch_bridge import weight_grads

    names = ("x", "hs", "h0", "dxp", *(("dhn",) if separate else ()))
    dtypes = tuple((name, str(jnp.dtype(dtype))) for name in names)
    groups, steps, batch, inputs = shape
    problem = weight_grads.Problem(1, groups, steps, batch, inputs, hidden, gates, dtypes)
    return weight_grads.is_profitable(problem, _device())


def may_have_float32_residuals(hidden: int, sequences: Any, reset_state: Any) -> bool:
    """Whether a forward kernel may multiply float32 as it is where TF32 would do: then what it saves is no coarser.

    Whether it does is known when it is lowered, since `vmap` adds sequences; for others, launches narrow what is
    declared float32. Not of a number of sequences that is not known yet, of a symbolic shape.
    """
    from torch_bridge import config

    return isinstance(sequences, int) and config.may_have_float32_residuals(hidden, sequences, reset_state, _device())


def is_features_first_profitable(rows: int, gates: int) -> bool:
    """Whether a product of TF32 that sums over so many rows is faster with `layouts.features_first` of an operand.

    Of the gradients of weights in passes on an H200: GRU 512,32,1024 2.31 ms for 2.80, 128,64,512 0.762 for 0.818,
    32,128,256 0.603 for 0.605, LSTM 1024,128,256 2.57 for 2.64; of 384 gates, GRU 2048,256,128 3.35 for 3.31.
    """
    device = _device()
    return device.has_wgmma and rows >= 4096 and gates >= 768


def round_to_tf32(w: Array) -> Array:
    """Rounds float32 to the 10 bits of mantissa that TF32 has: tensor cores would truncate to them, a bias."""
    rounded = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=10)
    return jnp.where(jnp.isnan(w), w + w, rounded)  # a NaN of low bits alone would be truncated to infinity


def _bind(
    primitive: Primitive, arrays: dict[str, Array | None], outputs: Sequence[Output | NamedOutput], **params: Any
) -> dict[str, Array]:
    present = {name: x for name, x in arrays.items() if x is not None}
    results = primitive.bind(
        *present.values(), inputs=tuple(present), outputs=tuple(outputs), mesh_marker=_mesh_marker(), **params
    )
    # what a primitive without a rule for it returns varies over no axis
    return dict(zip((output.name for output in outputs), sharding.unify_varying_axes(results, present), strict=True))


def _sizes(inputs: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> Sizes:
    from torch_bridge import config

    by_name = dict(zip(inputs, shapes, strict=True))
    weights, sequence, state = ("w_hh_t", "xp", "h0") if "xp" in by_name else ("w_hh", "dhs", "dh_last")
    groups, steps, batch = by_name[sequence][:3]
    return config.Sizes(by_name[weights][0], groups, steps, batch, by_name[state][-1])


def _result_types(sizes: Sizes, outputs: Sequence[Output]) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(
            (sizes.groups, *((sizes.steps,) if output.stepped else ()), sizes.batch, output.width), output.dtype
        )
        for output in outputs
    ]


def _batch(arrays: Sequence[Array], axes: Sequence[int | None], **params: Any) -> tuple[list[Array], list[int]]:
    """vmap: batched weights become models, shared weights leave the new axis to the groups. Still one launch.

    Either way the models there were stay side by side, so that of two directions each keeps the parity of its index.
    """
    inputs = params["inputs"]
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    new_models = any(name in WEIGHTS and axis is not None for name, axis in zip(inputs, axes, strict=True))
    shapes = [
        x.shape if axis is None else x.shape[:axis] + x.shape[axis + 1 :] for x, axis in zip(arrays, axes, strict=True)
    ]
    models, groups = _sizes(inputs, shapes)[:2]
    per_model = groups // max(models, 1)

    def merge(name: str, x: Array, axis: int | None) -> Array:
        if name in WEIGHTS and not new_models:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        shape = (size * x.shape[1], *x.shape[2:])
        if not new_models:  # models stay the slowest axis: [size, models, ...] -> [models, size, ...]
            x = x.reshape(size, models, per_model, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(shape)

    def split(x: Array) -> Array:
        if not new_models:
            x = x.reshape(models, size, per_model, *x.shape[1:]).swapaxes(0, 1)
            return x.reshape(size, groups, *x.shape[3:])
        return x.reshape(size, groups, *x.shape[1:])

    merged = [merge(name, x, axis) for name, x, axis in zip(inputs, arrays, axes, strict=True)]
    results = [split(x) for x in launch_p.bind(*merged, **params)]
    return results, [0] * len(results)


def _batch_rows(
    primitive: Primitive, arrays: Sequence[Array], axes: Sequence[int | None], **params: Any
) -> tuple[list[Array], list[int]]:
    """vmap: the new axis joins the rows; where weights are batched, or their gradients sum over rows, the models."""
    names = (*params["inputs"], *(output.name for output in params["outputs"]))
    batched = {name for name, axis in zip(params["inputs"], axes, strict=True) if axis is not None}
    new_models = bool(batched & {*ROW_WEIGHTS} or {*names} & {*WEIGHT_GRADS})
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)

    def merge(name: str, x: Array, axis: int | None) -> Array:
        if name in ROW_WEIGHTS and not new_models:
            return x
        at = 0 if new_models else 1  # after the models
        if axis is None:
            x = jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))
        else:
            x = jnp.moveaxis(x, axis, at)
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) if new_models else x

    results = primitive.bind(*map(merge, params["inputs"], arrays, axes), **params)
    if new_models:
        # behind the new axis, if that comes first
        models = next(x.shape[0 if axis is None or axis else 1] for x, axis in zip(arrays, axes, strict=True))
        results = [x.reshape(size, models, *x.shape[1:]) for x in results]
    return results, [0 if new_models else 1] * len(results)


def _refuse_to_differentiate(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        'the Triton kernels have no forward-mode and no second derivative: pass implementation="xla"'
    )


# What the tangent of an argument goes through: reverse mode transposes it and never computes it, forward mode computes
# it before `custom_vjp` gets to raise a TypeError that does not name the way.
tangent_p = Primitive("jaxrnn_tangent")
tangent_p.def_abstract_eval(lambda tangent: tangent)
tangent_p.def_impl(_refuse_to_differentiate)
batching.primitive_batchers[tangent_p] = lambda tangents, axes: (tangent_p.bind(*tangents), *axes)
mlir.register_lowering(tangent_p, _refuse_to_differentiate)
ad.deflinear2(tangent_p, lambda cotangent, _: [cotangent])


@jax.custom_jvp
def _transposable(x: Array) -> Array:
    return x


@_transposable.defjvp
def _transposable_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return primals[0], tangent_p.bind(tangents[0])


def reverse_mode_only(tree: Any) -> Any:
    """`tree`; the forward-mode derivative of its floating-point arrays raises NotImplementedError."""

    def mark(x: Array) -> Array:
        differentiable = isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
        return _transposable(x) if differentiable else x

    return jax.tree.map(mark, tree)


def _problem(arrays: Sequence[Any], sizes: Sizes, params: dict[str, Any]) -> Any:
    from torch_bridge.config import Problem

    return Problem(
        params["cell"], params["direction"], *sizes, dtypes=_dtypes(arrays, params),
        reset_state=params["reset_state"], reverse=params["reverse"], precision=params["precision"],
    )  # fmt: skip


def _dtypes(arrays: Sequence[Any], params: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    dtypes = [(name, str(x.dtype)) for name, x in zip(params["inputs"], arrays, strict=True)]
    dtypes += [(output.name, str(jnp.dtype(output.dtype))) for output in params["outputs"]]
    return tuple(dtypes)


class _Callback:
    """What XLA calls: names the buffers it hands over and launches on its stream."""

    def __init__(self, launch: Any, inputs: Sequence[str], outputs: Sequence[str]):
        self.launch = launch
        self.names = (*outputs, *inputs)

    def __call__(self, ctx: Any, out: Sequence[Any], *arrays: Any) -> None:
        from torch_bridge import dlpack

        views = [dlpack.view(buffer) for buffer in (*out, *arrays)]
        self.launch(ctx.stream, views[0].device_id, {n: v.address for n, v in zip(self.names, views, strict=True)})


class _InterpretedCallback(_Callback):
    """The same on the CPU, in Triton's interpreter."""

    def __call__(self, ctx: Any, out: Sequence[Any], *arrays: Any) -> None:
        import torch.utils.dlpack

        tensors = [torch.utils.dlpack.from_dlpack(buffer) for buffer in (*out, *arrays)]
        self.launch.interpret(dict(zip(self.names, tensors, strict=True)))


class _LaunchKind:
    """What the launches of one kind of kernels have of their own; the rest of this module is the same for all."""

    launch_p: Primitive
    shard_p: Primitive
    batch: Callable[..., tuple[list[Array], list[int]]]

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        """What a launch on arrays of these shapes writes."""
        raise NotImplementedError

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        """The launch of a part, of `torch_bridge`: nothing is compiled yet."""
        raise NotImplementedError

    def scans(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> bool:
        """Whether `scan` computes the outputs of a launch in its place: permitted, and faster by the estimates."""
        return False

    def scan(self, arrays: Sequence[Array], params: dict[str, Any]) -> list[Array]:
        """Returns the outputs of a launch, computed by XLA."""
        raise NotImplementedError

    def operands(self, launch: Any, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Returns the arrays as a launch multiplies them."""
        return arrays

    def array_dtypes(self, launch: Any) -> dict[str, str]:
        """The dtypes that a launch has arrays in, by name, where these may not be the program's."""
        return {}

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        """Returns the name of each axis of an array of this rank, as `split_model_axis` returns it."""
        raise NotImplementedError

    def is_shardable(self, axis: str) -> bool:
        """Whether devices may share out the axis of this name."""
        return axis in SHARDABLE

    def split_model_axis(self, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Operands of `launch_p` with every axis that may be shared out by itself."""
        return arrays

    def merge_model_axis(self, results: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Results of `bind_shard`, as those of `launch_p`."""
        return results

    def merged_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which `shard_p` takes an array of `launch_p`, where one device computes all of it."""
        return shape

    def bind_shard(
        self, slot: _PartitionedCallback | None, arrays: Sequence[Array], params: dict[str, Any]
    ) -> Sequence[Array]:
        """Binds `shard_p` on what `split_model_axis` returns, or a device's part of it."""
        results: Sequence[Array] = self.shard_p.bind(*arrays, slot=slot, **params)
        return results


def _axes_of_sequences(name: str, rank: int) -> tuple[str, ...]:
    """`[S, G, T, B, width]`, resets without a width, states without steps."""
    if name == "reset":
        return ("models", "groups", "steps", "batch")
    return ("models", "groups", *(("steps",) if rank == 5 else ()), "batch", f"{name}_width")


class _RecurrenceKind(_LaunchKind):
    """Of `launch`. Where axes are apart, groups are apart from their models, `[S, G / S, ...]`."""

    launch_p, shard_p, batch = launch_p, launch_shard_p, staticmethod(_batch)

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        return _result_types(_sizes(params["inputs"], shapes), params["outputs"])

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        from torch_bridge.config import with_residual_dtypes
        from torch_bridge.launch import Launch

        problem = _problem(arrays, _sizes(params["inputs"], [x.shape for x in arrays]), params)
        return Launch(with_residual_dtypes(problem, device), device)

    def scans(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> bool:
        from torch_bridge.config import prefers_scan

        if not params["may_scan"]:
            return False
        return prefers_scan(_problem(arrays, _sizes(params["inputs"], [x.shape for x in arrays]), params), device)

    def scan(self, arrays: Sequence[Array], params: dict[str, Any]) -> list[Array]:
        results = scan_launch.run(
            cells.BY_NAME[params["cell"]], params["direction"], dict(zip(params["inputs"], arrays, strict=True)),
            {output.name: output.dtype for output in params["outputs"]}, reset_state=params["reset_state"],
            reverse=params["reverse"], precision=params["precision"],
        )  # fmt: skip
        return [results[output.name] for output in params["outputs"]]

    def operands(self, launch: Any, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        if launch.config.variant != "plain" or params["precision"] != "tf32":
            return arrays  # kernels in Gluon round what they load
        return [
            round_to_tf32(x) if name in ("w_hh", "w_hh_t") and x.dtype == jnp.float32 else x
            for name, x in zip(params["inputs"], arrays, strict=True)
        ]

    def array_dtypes(self, launch: Any) -> dict[str, str]:
        return dict(launch.problem.dtypes)

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name in WEIGHTS:
            return ("models", *(f"{name}_{k}" for k in range(1, rank)))
        return _axes_of_sequences(name, rank)

    def split_model_axis(self, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        models = _sizes(params["inputs"], [x.shape for x in arrays]).models
        return [
            x if name in WEIGHTS else x.reshape(models, x.shape[0] // models, *x.shape[1:])
            for name, x in zip(params["inputs"], arrays, strict=True)
        ]

    def merge_model_axis(self, results: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        return [x.reshape(-1, *x.shape[2:]) for x in results]

    def bind_shard(
        self, slot: _PartitionedCallback | None, arrays: Sequence[Array], params: dict[str, Any]
    ) -> Sequence[Array]:
        merged = [
            x if name in WEIGHTS else x.reshape(-1, *x.shape[2:])
            for name, x in zip(params["inputs"], arrays, strict=True)
        ]
        models = _sizes(params["inputs"], [x.shape for x in merged]).models
        results = launch_shard_p.bind(*merged, slot=slot, **params)
        return [x.reshape(models, -1, *x.shape[1:]) for x in results]


class _RowLaunchKind(_LaunchKind):
    """Of what works on rows by themselves, `[S, *rows, N]`. A part has rows as one axis, `[S, R, N]`."""

    def is_shardable(self, axis: str) -> bool:
        return axis not in ("columns", "gates")

    def merged_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name in ROW_WEIGHTS:
            return shape
        columns = () if name in ROW_STATISTICS else shape[-1:]
        return (shape[0], math.prod(shape[1 : len(shape) - len(columns)]), *columns)

    def bind_shard(
        self, slot: _PartitionedCallback | None, arrays: Sequence[Array], params: dict[str, Any]
    ) -> Sequence[Array]:
        types = self.types([x.shape for x in arrays], params)
        flat = [x.reshape(self.merged_shape(name, x.shape)) for name, x in zip(params["inputs"], arrays, strict=True)]
        results = self.shard_p.bind(*flat, slot=slot, **params)
        return [x.reshape(like.shape) for x, like in zip(results, types, strict=True)]


class _NormKind(_RowLaunchKind):
    """Of `launch_norm`."""

    launch_p, shard_p, batch = norm_p, norm_part_p, staticmethod(functools.partial(_batch_rows, norm_p))

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        like = dict(zip(params["inputs"], shapes, strict=True))["x"]  # [S, *rows, N]
        return [
            jax.ShapeDtypeStruct(
                (like[0], like[-1]) if output.name in WEIGHT_GRADS
                else like[:-1] if output.name in ROW_STATISTICS
                else like,
                output.dtype,
            )
            for output in params["outputs"]
        ]  # fmt: skip

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        from torch_bridge.norms import Launch, Problem

        models, rows, columns = dict(zip(params["inputs"], arrays, strict=True))["x"].shape
        problem = Problem(
            params["kind"], params["direction"], models, rows, columns, params["epsilon"], _dtypes(arrays, params)
        )
        return Launch(problem, device)

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name in ROW_WEIGHTS + WEIGHT_GRADS:
            return ("models", "columns")
        last = () if name in ROW_STATISTICS else ("columns",)
        return ("models", *(f"rows_{k}" for k in range(1, rank - len(last))), *last)


class _ProjectionKind(_RowLaunchKind):
    """Of `launch_projection`."""

    launch_p, shard_p, batch = (
        projection_p,
        projection_part_p,
        staticmethod(functools.partial(_batch_rows, projection_p)),
    )

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        by_name = dict(zip(params["inputs"], shapes, strict=True))
        shape = (*by_name["x"][:-1], by_name["bias"][-1])
        return [jax.ShapeDtypeStruct(shape, output.dtype) for output in params["outputs"]]

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        from torch_bridge.input_projections import Launch, Problem

        by_name = dict(zip(params["inputs"], arrays, strict=True))
        (models, rows, inputs), gates = by_name["x"].shape, by_name["bias"].shape[-1]
        return Launch(Problem(models, rows, inputs, gates, _dtypes(arrays, params)), device)

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        if name == "w_ih_t":
            return ("models", "gates", "columns")
        if name == "bias":
            return ("models", "gates")
        return ("models", *(f"rows_{k}" for k in range(1, rank - 1)), "columns" if name == "x" else "gates")


class _WeightGradsKind(_LaunchKind):
    """Of `launch_weight_grads`. What devices add up over sequences that they share out is added up over devices."""

    launch_p, shard_p = weight_grads_p, weight_grads_part_p
    batch = staticmethod(functools.partial(_batch_rows, weight_grads_p))

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        from torch_bridge.weight_grads import Layout

        by_name = dict(zip(params["inputs"], shapes, strict=True))
        inputs, hidden, gates = (by_name[name][-1] for name in ("x", "hs", "dxp"))
        length = Layout.of(inputs, hidden, gates, "dhn" in by_name).end
        return [jax.ShapeDtypeStruct((by_name["x"][0], length), output.dtype) for output in params["outputs"]]

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        from torch_bridge.weight_grads import Launch, Problem

        by_name = dict(zip(params["inputs"], arrays, strict=True))
        hidden, gates = (by_name[name].shape[-1] for name in ("hs", "dxp"))
        models, groups, steps, batch, inputs = by_name["x"].shape
        dtypes = _dtypes(arrays, params)
        problem = Problem(models, groups, steps, batch, inputs, hidden, gates, dtypes, params["reverse"])
        return Launch(problem, device)

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        return ("models", "length") if name == "sums" else _axes_of_sequences(name, rank)


# What a launch takes from slices of a scan's inputs, or leaves in its outputs, is an array of its own up to this size.
# XLA would fuse the slices into the launch, and leave that out of its CUDA graphs: 8 to 25 us an iteration (H200).
_UNFUSED_SLICE_BYTES = 2**22


def _prevent_slice_fusion(arrays: Sequence[Any]) -> list[Any]:
    """`arrays`, the small ones behind a barrier that no slice is fused through: XLA copies instead."""
    small = [k for k, x in enumerate(arrays) if math.prod(x.shape) * x.dtype.itemsize <= _UNFUSED_SLICE_BYTES]
    results = list(arrays)
    for k, x in zip(small, jax.lax.optimization_barrier([arrays[k] for k in small]), strict=True):
        results[k] = x
    return results


def _call(
    kernels: _LaunchKind, device: Callable[[], tuple[Any, Sequence[int]]], callback: type[_Callback], captured: bool
) -> Callable[..., list[Array]]:
    """What computes a part: compiled for all devices here, when it is traced; launched by what XLA calls."""

    def call(*arrays: Array, **params: Any) -> list[Array]:
        results = kernels.types([x.shape for x in arrays], params)
        kind, ordinals = device()
        if kernels.scans(arrays, params, kind):
            return kernels.scan(arrays, params)
        launch = kernels.launch(arrays, params, kind)
        for ordinal in ordinals:  # at call time there is only time to launch
            launch.load(ordinal)
        # outside of the barriers: of casts that one launch adds and its gradient's undoes, XLA drops both
        array_dtypes = kernels.array_dtypes(launch)
        arrays = tuple(
            x.astype(array_dtypes.get(name, x.dtype)) for name, x in zip(params["inputs"], arrays, strict=True)
        )
        arrays = tuple(kernels.operands(launch, arrays, params))
        results = [
            jax.ShapeDtypeStruct(x.shape, jnp.dtype(array_dtypes.get(output.name, x.dtype)))
            for output, x in zip(params["outputs"], results, strict=True)
        ]
        if captured:
            arrays = (*_prevent_slice_fusion(arrays),)
        inputs, outputs = list(params["inputs"]), [output.name for output in params["outputs"]]
        aliases = {inputs.index(output.over): k for k, output in enumerate(params["outputs"]) if output.over}
        for name, length, dtype, zeroed in launch.workspaces:
            if zeroed:  # an input, aliased so that XLA knows it is written
                arrays = (*arrays, jnp.zeros((length,), dtype))
                inputs.append(name)
                aliases[len(arrays) - 1] = len(results)
            results.append(jax.ShapeDtypeStruct((length,), dtype))
            outputs.append(name)
        function = buffer_callback(
            callback(launch, inputs, outputs), results, input_output_aliases=aliases,
            command_buffer_compatible=captured,
        )  # fmt: skip
        written = list(function(*arrays)[: len(params["outputs"])])
        written = _prevent_slice_fusion(written) if captured else written
        return [x.astype(output.dtype) for output, x in zip(params["outputs"], written, strict=True)]

    return call


def _cuda_device() -> tuple[Any, Sequence[int]]:
    """The device that a kernel is chosen for, and all that it is loaded onto."""
    from torch_bridge.launch import device

    ordinals = [d.local_hardware_id for d in jax.local_devices(backend="gpu")]
    return device(ordinals[0]), ordinals


def _device() -> Any:
    """The device that a kernel is chosen for where launches are traced."""
    from torch_bridge.launch import interpreting

    return (_cpu_device if interpreting() else _cuda_device)()[0]


def _cpu_device() -> tuple[Any, Sequence[int]]:
    from torch_bridge.config import Device
    from torch_bridge.launch import interpreting

    if not interpreting():
        raise NotImplementedError(
            'the Triton kernels were asked for on CPU devices: pass implementation="xla" for what runs there'
        )
    return Device(interpreted=True), ()


class _PartitionedCallback:
    """The host callback of a launch in a program that XLA partitions: calls what a part of it was lowered to.

    XLA knows callbacks by their index in the program. It counts them before it compiles, and parts are lowered when it
    does: so the slot is there first. A launch in a function that is called twice may have parts of two shapes.
    """

    index: int

    def __init__(self) -> None:
        self.parts: dict[tuple[tuple[int, ...], ...], Callable[..., Any]] = {}

    def __call__(self, ctx: Any, *buffers: Any) -> Any:
        if len(self.parts) == 1:
            (part,) = self.parts.values()
        else:
            inputs = len(next(iter(self.parts)))
            part = self.parts[tuple(tuple(x.shape) for x in buffers[:inputs])]
        return part(ctx, *buffers)


def _lower_part(
    call: Callable[..., list[Array]], ctx: Any, *operands: Any, slot: _PartitionedCallback | None, **params: Any
) -> Any:
    """Lowers a launch for one device; into `slot` if the program around it is lowered already."""
    lower = mlir.lower_fun(call, multiple_results=True)
    if slot is None:
        return lower(ctx, *operands, **params)
    callbacks = ctx.module_context.host_callbacks  # of this part alone; the index is one of the whole program
    while len(callbacks) < slot.index:
        ctx.module_context.add_host_callback(None)
    results = lower(ctx, *operands, **params)
    if len(callbacks) > slot.index:  # none where there is nothing to launch
        slot.parts[tuple(aval.shape for aval in ctx.avals_in)] = callbacks[slot.index]
    return results


def _lower(kernels: _LaunchKind, ctx: Any, *operands: Any, mesh_marker: Any, **params: Any) -> Any:
    """Lowers a launch: on a mesh that JAX manages as what XLA partitions over all axes that may be shared out."""
    del mesh_marker
    mesh = getattr(ctx.module_context.axis_context, "abstract_mesh", None)  # none inside `shard_map` and `pmap`
    managed = mesh is not None and mesh.size > 1 and all(kind == AxisType.Auto for kind in mesh.axis_types)
    if any(0 in aval.shape for aval in ctx.avals_out):  # vmap over an axis of length zero
        zeros = lambda *_: [jnp.zeros(aval.shape, aval.dtype) for aval in ctx.avals_out]  # noqa: E731
        return mlir.lower_fun(zeros, multiple_results=True)(ctx, *operands)
    if not managed or not getattr(jax.config, "jax_use_shardy_partitioner", True):
        function = functools.partial(_on_one_device, kernels, params)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
    slot = _PartitionedCallback()
    slot.index = len(ctx.module_context.host_callbacks)
    ctx.module_context.add_host_callback(slot)
    return mlir.lower_fun(_partitioned(kernels, slot, params), multiple_results=True)(ctx, *operands)


def _on_one_device(kernels: _LaunchKind, params: dict[str, Any], *arrays: Array) -> Sequence[Array]:
    """What `launch_p` computes, by one launch of all of it."""
    return kernels.merge_model_axis(kernels.bind_shard(None, kernels.split_model_axis(arrays, params), params), params)


def _partitioned(kernels: _LaunchKind, slot: _PartitionedCallback, params: dict[str, Any]) -> Callable[..., Any]:
    """A launch of which XLA may share out to devices what is independent, each axis of that by itself."""
    inputs = params["inputs"]
    names = (*inputs, *(output.name for output in params["outputs"]))
    # sums over devices are added up in float32
    wide = tuple(
        output._replace(dtype=jnp.dtype(jnp.float32)) if output.name in WEIGHT_GRADS else output
        for output in params["outputs"]
    )

    def axes_of(operands: Any, results: Any) -> list[tuple[str, ...]]:
        return [kernels.axes_of(name, len(x.shape)) for name, x in zip(names, (*operands, *results), strict=True)]

    def rule(_: Any, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
        axes = axes_of(operands, results)
        arrays = [" ".join(each) for each in axes]
        in_order = dict.fromkeys(axis for each in axes for axis in each)
        whole = tuple(axis for axis in in_order if not kernels.is_shardable(axis))
        text = f"{', '.join(arrays[: len(inputs)])} -> {', '.join(arrays[len(inputs) :])}"
        return text, {"need_replication_factors": whole}

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        axes = axes_of(operands, results)
        given = [
            {axis: at for axis, at in zip(each, x.sharding.spec, strict=False) if kernels.is_shardable(axis)}
            for each, x in zip(axes, (*operands, *results), strict=True)
        ]
        # they agree, but for what is whole
        shared = max(given, key=lambda each: _num_shards(mesh, *each.values()))
        if params.get("reverse") == "bidirectional" and operands[0].shape[0] % (
            2 * _num_shards(mesh, shared.get("models"))
        ):
            shared["models"] = None  # a model runs in reverse if its index is odd: on a device too
        lengths = {
            axis: length
            for each, x in zip(axes, (*operands, *results), strict=True)
            for axis, length in zip(each, x.shape, strict=True)
        }
        for axis in shared:
            added_up = any(axis not in each for each in axes[len(inputs) :])
            if added_up and lengths[axis] % _num_shards(mesh, shared[axis]):
                shared[axis] = None  # XLA fills up the last part with anything, and a sum would count that
        shardings = [NamedSharding(mesh, PartitionSpec(*map(shared.get, each))) for each in axes]
        # what is a sum over axes that are shared out
        sums = [_mesh_axes(*(at for axis, at in shared.items() if axis not in each)) for each in axes[len(inputs) :]]
        return (
            mesh,
            functools.partial(local, slot, sums),
            tuple(shardings[len(inputs) :]),
            tuple(shardings[: len(inputs)]),
        )

    def local(slot: _PartitionedCallback | None, sums: list[list[str]] | None, *arrays: Array) -> tuple[Array, ...]:
        results = kernels.bind_shard(slot, arrays, params | {"outputs": wide})
        if sums is not None:
            results = [jax.lax.psum(x, tuple(over)) if over else x for x, over in zip(results, sums, strict=True)]
        return tuple(x.astype(output.dtype) for x, output in zip(results, params["outputs"], strict=True))

    on_devices = custom_partitioning(functools.partial(local, None, None))
    on_devices.def_partition(partition, sharding_rule=rule, decode_shardings=True)

    def call(*arrays: Array) -> Sequence[Array]:
        return kernels.merge_model_axis(on_devices(*kernels.split_model_axis(arrays, params)), params)

    return call


def _mesh_axes(*axes: Any) -> list[str]:
    """The axes of a mesh that these axes of an array are cut over."""
    return [name for axis in axes if axis is not None for name in (axis if isinstance(axis, tuple) else (axis,))]


def _num_shards(mesh: Any, *axes: Any) -> int:
    """How many parts these axes of an array are cut into."""
    return math.prod(mesh.shape[name] for name in _mesh_axes(*axes))


def _compile_in_background(kernels: _LaunchKind, avals: Sequence[Any], params: dict[str, Any]) -> None:
    """Begins to compile a launch that is traced, so that all of a program are compiled side by side.

    In vain where that is not what is lowered: of shapes alone, of bodies that JAX traces again for `vmap` or gradients,
    and of parts on a mesh that it manages, if they are tiled in another way.
    """
    from torch_bridge.launch import interpreting

    if interpreting() or not on_gpu() or not all(isinstance(n, int) and n for aval in avals for n in aval.shape):
        return
    arrays = [
        jax.ShapeDtypeStruct(kernels.merged_shape(name, aval.shape), aval.dtype)
        for name, aval in zip(params["inputs"], avals, strict=True)
    ]
    device, ordinals = _cuda_device()
    if not kernels.scans(arrays, params, device):
        kernels.launch(arrays, params, device).begin_loading(ordinals[0])


@functools.lru_cache(maxsize=1024)
def _jitted(primitive: Primitive, **params: Any) -> Callable[..., list[Array]]:
    return jax.jit(functools.partial(primitive.bind, **params))


def _register(kernels: _LaunchKind) -> None:
    """The rules of the two primitives of `kernels`."""

    def abstract(*avals: Any, slot: Any = None, mesh_marker: Any = None, **params: Any) -> list[jax.core.ShapedArray]:
        mesh = avals[0].sharding.mesh
        return [
            jax.core.ShapedArray(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*(None,) * len(x.shape))))
            for x in kernels.types([aval.shape for aval in avals], params)
        ]

    def traced(*avals: Any, **params: Any) -> list[jax.core.ShapedArray]:
        _compile_in_background(kernels, avals, params)
        return abstract(*avals, **params)

    def run(*arrays: Array, **params: Any) -> list[Array]:
        with jax.disable_jit(False):  # a launch is compiled: to take it apart would end here again
            return _jitted(kernels.launch_p, **params)(*arrays)

    kernels.launch_p.def_abstract_eval(traced)
    kernels.shard_p.def_abstract_eval(abstract)
    kernels.launch_p.def_impl(run)
    batching.primitive_batchers[kernels.launch_p] = kernels.batch
    ad.primitive_jvps[kernels.launch_p] = _refuse_to_differentiate
    mlir.register_lowering(kernels.launch_p, functools.partial(_lower, kernels))
    for platform, call in (
        ("cuda", _call(kernels, _cuda_device, _Callback, True)),
        ("cpu", _call(kernels, _cpu_device, _InterpretedCallback, False)),
    ):
        mlir.register_lowering(kernels.shard_p, functools.partial(_lower_part, call), platform=platform)


_register(_RecurrenceKind())
_register(_NormKind())
_register(_ProjectionKind())
_register(_WeightGradsKind())
