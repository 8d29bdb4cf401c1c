"""Defines the JAX primitives that launch the Triton kernels, with their vmap rules and their lowerings.

No other module of jaxrnn calls the kernels. `launch` binds one primitive for all cells and directions. Its arrays are
canonical: weights are `[S, ...]`, all others are `[G, ...]` with G a multiple of S. The other launches have primitives
of their own. `launch_norm` and `launch_projection` take weights `[S, ...]` and rows `[S, *rows, N]`.
`launch_weight_grads` takes the arrays whose products it sums, `[S, G, T, B, ...]`. `vmap` adds groups, rows or models,
but never a launch.

Lowering compiles the kernel and registers a callback, which XLA calls with its own buffers and stream. XLA captures
that call in its CUDA graphs. On a mesh of `Auto` axes, a launch is lowered to a `custom_partitioning`, and each
device's shard is lowered after XLA has partitioned the program.
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
# Arrays of row-wise launches: those that all rows share, and those that have one element per row.
ROW_WEIGHTS, ROW_STATISTICS = ("weight", "bias", "w_ih_t"), ("mean", "rstd")
# Outputs that are sums over rows, or over steps and sequences: their only leading axis is that of the models.
WEIGHT_GRADS = ("dweight", "dbias", "sums")
# Axes that may be sharded; time and feature axes are never sharded.
SHARDABLE = ("models", "groups", "batch")


class Output(NamedTuple):
    """An array that a launch writes: `[G, T, B, width]`, or `[G, B, width]` if not `stepped`.

    With `over`, the array is written into the buffer of the input of that name, which has the same shape and dtype. XLA
    copies that input first if it is needed later.
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
    """Returns why the kernels cannot run here with these dtypes and this width, and a remedy; None if they can."""
    return _unsupported(dtypes, functools.partial(_too_wide, hidden), multiplies=True)


def unsupported_norm(dtypes: Sequence[Any], columns: int) -> str | None:
    """Returns what `unsupported` returns, but for a norm over `columns` columns."""
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
                "runs in Triton's interpreter here, because TRITON_INTERPRET=1 is set, but the interpreter only "
                'supports arrays on the CPU: unset it, set JAX_PLATFORMS=cpu, or pass implementation="xla"'
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
            f"needs a torch built for CUDA, but torch {torch.__version__} finds no CUDA device: install the torch "
            'build that matches your driver, or pass implementation="xla"'
        )
    if reason := launch.driver_fails():
        return f'cannot load kernels on this machine ({reason}): fix the cause, or pass implementation="xla"'
    device, *others = {launch.device(d.local_hardware_id) for d in jax.local_devices(backend="gpu")}
    if others:
        names = ", ".join(sorted(f"{d.name} ({d.multiprocessors} multiprocessors)" for d in (device, *others)))
        return (
            f"needs all GPUs of a process to be of one kind, got {names}: hide all but one kind with "
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
        f'SMs can share (at most {widest(device)}); pass implementation="xla"'
    )


def _too_many_columns(columns: int, _: Any) -> str | None:
    from torch_bridge.norms import WIDEST

    return None if columns <= WIDEST else f'takes up to {WIDEST} columns, got {columns}: pass implementation="xla"'


@functools.cache
def _import_fails() -> str | None:
    """Returns why importing the kernels fails although torch and triton are installed, or None; warns on a GPU."""
    try:
        from torch_bridge import launch  # noqa: F401
    except (ImportError, AttributeError) as error:
        reason = f"needs Triton 3.6 and torch 2.10 or newer, but with the installed versions its import fails ({error})"
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
    """Whether the Triton implementation is the fastest where it can run: on a GPU, for more than one step.

    XLA runs a single step faster: a scan iteration takes 8.6 us instead of 16.2 us (H200, B=64, H=128). The interpreter
    is never the fastest.
    """
    return isinstance(steps, int) and steps > 1 and on_gpu()  # `jax.export` may make `steps` symbolic


def on_gpu() -> bool:
    """Whether JAX computes on a GPU by default."""
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # a device, a platform, or None
    return (getattr(default, "platform", default) or jax.default_backend()) in ("gpu", "cuda")


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


# Each pair is a launch and the primitive that it is lowered to, which launches one device's shard. A launch on a single
# device has one shard.
launch_p, launch_shard_p = _primitive("jaxrnn_launch"), _primitive("jaxrnn_launch_part")
norm_p, norm_part_p = _primitive("jaxrnn_norm"), _primitive("jaxrnn_norm_part")
projection_p, projection_part_p = _primitive("jaxrnn_projection"), _primitive("jaxrnn_projection_part")
weight_grads_p, weight_grads_part_p = _primitive("jaxrnn_weight_grads"), _primitive("jaxrnn_weight_grads_part")


@functools.cache
def _mesh_marker() -> Any:
    """Returns a jaxpr that, as a parameter of a primitive, makes JAX pass devices and mesh to its lowering rule."""
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
    """Launches one kernel: takes its arrays by name (without those that are None) and returns its outputs by name.

    With `reverse` "bidirectional", the innermost `jax.vmap` must map over two directions, forward and reverse, and must
    map the weights too. With `may_scan`, `scan_launch` computes the outputs instead where that is faster.
    """
    return _bind(
        launch_p, arrays, outputs, cell=cell, direction=direction, reset_state=reset_state, reverse=reverse,
        precision=precision, may_scan=may_scan,
    )  # fmt: skip


def launch_norm(
    kind: str, direction: str, arrays: dict[str, Array | None], outputs: Sequence[NamedOutput], *, epsilon: float
) -> dict[str, Array]:
    """Launches the kernel of a norm, `kind` "rms" or "layer", as `launch` does. `torch_bridge.norms` names its arrays.

    Weights and their gradients are `[S, N]`, statistics are `[S, *rows]`, and all others are `[S, *rows, N]`.
    """
    return _bind(norm_p, arrays, outputs, kind=kind, direction=direction, epsilon=epsilon)


def launch_projection(x: Array, w_ih: Array, bias: Array, dtype: Any) -> Array:
    """Launches an input projection: returns `x @ w_ih + bias`, `[*rows, W]`, in `dtype`, float32 or float16.

    x is `[*rows, D]`, w_ih is `[D, W]` in the dtype of x, and bias is `[W]` in float32. Products of float32 run in
    TF32: `w_ih` must already be rounded to it, and D is then at most 128.
    """
    arrays: dict[str, Array | None] = {"x": x[None], "w_ih_t": w_ih.T[None], "bias": bias[None]}
    return _bind(projection_p, arrays, [NamedOutput("xp", jnp.dtype(dtype))])["xp"][0]


def is_projection_profitable(rows: Any, inputs: int, gates: int, dtype: Any) -> bool:
    """Whether `launch_projection` supports `rows` rows here and is faster than XLA's product and sum.

    It is never profitable for a symbolic number of rows.
    """
    from torch_bridge import input_projections

    if not isinstance(rows, int):
        return False
    problem = input_projections.Problem(1, rows, inputs, gates, (("x", str(jnp.dtype(dtype))),))
    return input_projections.is_profitable(problem, _device())


def launch_weight_grads(arrays: dict[str, Array | None], *, reverse: bool) -> dict[str, Array]:
    """Launches the kernel that sums up the gradients of all weights of S models, as `launch` does.

    `torch_bridge.weight_grads` names its arrays. Returns the gradients, `[S, ...]` in float32, by the field names of
    `torch_bridge.weight_grads.Layout`.
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
    """Whether `launch_weight_grads` supports this problem here and is faster than XLA's products and sums.

    `shape` is that of the inputs, `[G, T, B, D]`; the gate gradients are `[G, T, B, gates]`. With `separate`, the array
    "dhn" takes part too.
    """
    from torch_bridge import weight_grads

    names = ("x", "hs", "h0", "dxp", *(("dhn",) if separate else ()))
    dtypes = tuple((name, str(jnp.dtype(dtype))) for name in names)
    groups, steps, batch, inputs = shape
    problem = weight_grads.Problem(1, groups, steps, batch, inputs, hidden, gates, dtypes)
    return weight_grads.is_profitable(problem, _device())


def may_have_float32_residuals(hidden: int, sequences: Any, reset_state: Any) -> bool:
    """Whether the forward kernel may multiply in full float32 where TF32 is allowed, so that its residuals are float32.

    The kernel is chosen when the launch is lowered, because `vmap` adds sequences. If another kernel is chosen, the
    launch stores `local_grads` and `dc_dh` in float16, although they are declared float32. The answer is no for a
    symbolic number of sequences.
    """
    from torch_bridge import config

    return isinstance(sequences, int) and config.may_have_float32_residuals(hidden, sequences, reset_state, _device())


def is_features_first_profitable(rows: int, gates: int) -> bool:
    """Whether a TF32 product that sums over `rows` rows is faster with `layouts.features_first` on an operand.

    On an H200, a pass whose weight gradients use `features_first` takes 2.31 ms instead of 2.80 ms (GRU 512,32,1024),
    0.762 ms instead of 0.818 ms (GRU 128,64,512), 0.603 ms instead of 0.605 ms (GRU 32,128,256) and 2.57 ms instead of
    2.64 ms (LSTM 1024,128,256). With 384 gate columns the pass is slower: 3.35 ms instead of 3.31 ms (GRU
    2048,256,128).
    """
    device = _device()
    return device.has_wgmma and rows >= 4096 and gates >= 768


def round_to_tf32(w: Array) -> Array:
    """Rounds float32 to TF32's 10 bits of mantissa: tensor cores would truncate, which biases the result."""
    rounded = jax.lax.reduce_precision(w, exponent_bits=8, mantissa_bits=10)
    return jnp.where(jnp.isnan(w), w + w, rounded)  # truncation would turn a NaN with only low bits set into infinity


def _bind(
    primitive: Primitive, arrays: dict[str, Array | None], outputs: Sequence[Output | NamedOutput], **params: Any
) -> dict[str, Array]:
    present = {name: x for name, x in arrays.items() if x is not None}
    results = primitive.bind(
        *present.values(), inputs=tuple(present), outputs=tuple(outputs), mesh_marker=_mesh_marker(), **params
    )
    # inside `shard_map`, the results of a primitive without a rule for varying axes vary over none
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
    """Batches a launch, which stays one launch: with batched weights the new axis joins the models, else the groups.

    The existing models stay adjacent either way, so that the models of two directions keep the parity of their indices.
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
    """Batches a row-wise launch: the new axis joins the rows, or the models if weights are batched or differentiated.

    Gradients of weights are sums over the rows of a model, so every example becomes a model of its own.
    """
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
        # an array mapped over axis 0 has its models at axis 1
        models = next(x.shape[0 if axis is None or axis else 1] for x, axis in zip(arrays, axes, strict=True))
        results = [x.reshape(size, models, *x.shape[1:]) for x in results]
    return results, [0 if new_models else 1] * len(results)


def _refuse_to_differentiate(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        'the Triton kernels have no forward-mode and no second derivative: pass implementation="xla"'
    )


# The tangents of arguments pass through this primitive. Reverse mode transposes it and never evaluates it. Forward mode
# evaluates it, and so raises before `custom_vjp` can raise a TypeError that names no remedy.
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
    """Returns `tree` with floating-point arrays whose forward-mode derivative raises NotImplementedError."""

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
    """A host callback that maps XLA's buffers to the names of arrays and launches on XLA's stream."""

    def __init__(self, launch: Any, inputs: Sequence[str], outputs: Sequence[str]):
        self.launch = launch
        self.names = (*outputs, *inputs)

    def __call__(self, ctx: Any, out: Sequence[Any], *arrays: Any) -> None:
        from torch_bridge import dlpack

        views = [dlpack.view(buffer) for buffer in (*out, *arrays)]
        self.launch(ctx.stream, views[0].device_id, {n: v.address for n, v in zip(self.names, views, strict=True)})


class _InterpretedCallback(_Callback):
    """A `_Callback` that runs the launch on the CPU, in Triton's interpreter."""

    def __call__(self, ctx: Any, out: Sequence[Any], *arrays: Any) -> None:
        import torch.utils.dlpack

        tensors = [torch.utils.dlpack.from_dlpack(buffer) for buffer in (*out, *arrays)]
        self.launch.interpret(dict(zip(self.names, tensors, strict=True)))


class _LaunchKind:
    """The base class of the kinds of launches: it declares all that differs between them in this module."""

    launch_p: Primitive
    shard_p: Primitive
    batch: Callable[..., tuple[list[Array], list[int]]]

    def types(self, shapes: Sequence[tuple[int, ...]], params: dict[str, Any]) -> list[jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes that a launch on arrays of these shapes writes."""
        raise NotImplementedError

    def launch(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> Any:
        """Returns the `torch_bridge` launch of a shard, without compiling it."""
        raise NotImplementedError

    def scans(self, arrays: Sequence[Any], params: dict[str, Any], device: Any) -> bool:
        """Whether `scan` should replace a launch: if that is permitted and estimated to be faster."""
        return False

    def scan(self, arrays: Sequence[Array], params: dict[str, Any]) -> list[Array]:
        """Computes the outputs of a launch with XLA."""
        raise NotImplementedError

    def operands(self, launch: Any, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Returns the arrays, rounded where the kernel of a launch expects rounded operands."""
        return arrays

    def array_dtypes(self, launch: Any) -> dict[str, str]:
        """Returns the dtypes of a launch's arrays by name, where they may differ from those of the program."""
        return {}

    def axes_of(self, name: str, rank: int) -> tuple[str, ...]:
        """Returns the names of the axes of an array that has this rank after `split_model_axis`."""
        raise NotImplementedError

    def is_shardable(self, axis: str) -> bool:
        """Whether the axis of this name may be sharded."""
        return axis in SHARDABLE

    def split_model_axis(self, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Returns the operands of `launch_p`, reshaped so that each shardable axis is an axis of its own."""
        return arrays

    def merge_model_axis(self, results: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        """Returns the results of `bind_shard`, reshaped to those of `launch_p`."""
        return results

    def merged_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in which `shard_p` takes an unsharded array of `launch_p`."""
        return shape

    def bind_shard(
        self, slot: _PartitionedCallback | None, arrays: Sequence[Array], params: dict[str, Any]
    ) -> Sequence[Array]:
        """Binds `shard_p` on the arrays that `split_model_axis` returns, or on a device's shards of them."""
        results: Sequence[Array] = self.shard_p.bind(*arrays, slot=slot, **params)
        return results


def _axes_of_sequences(name: str, rank: int) -> tuple[str, ...]:
    """Returns the axis names of `[S, G, T, B, width]`; resets have no width axis, and states have no step axis."""
    if name == "reset":
        return ("models", "groups", "steps", "batch")
    return ("models", "groups", *(("steps",) if rank == 5 else ()), "batch", f"{name}_width")


class _RecurrenceKind(_LaunchKind):
    """The kind of `launch`. `split_model_axis` splits the groups by model, `[S, G / S, ...]`."""

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
            cells.CELLS[params["cell"]], params["direction"], dict(zip(params["inputs"], arrays, strict=True)),
            {output.name: output.dtype for output in params["outputs"]}, reset_state=params["reset_state"],
            reverse=params["reverse"], precision=params["precision"],
        )  # fmt: skip
        return [results[output.name] for output in params["outputs"]]

    def operands(self, launch: Any, arrays: Sequence[Array], params: dict[str, Any]) -> Sequence[Array]:
        if launch.config.variant != "plain" or params["precision"] != "tf32":
            return arrays  # the kernels in Gluon round what they load
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
    """The kinds that treat each row of `[S, *rows, N]` separately. A shard's rows become one axis, `[S, R, N]`."""

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
    """The kind of `launch_norm`."""

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
    """The kind of `launch_projection`."""

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
    """The kind of `launch_weight_grads`. If sequences are sharded, the sums of all devices are added up."""

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


# Up to this size, a barrier separates the operands and results of a launch from slices of a scan's inputs and outputs.
# XLA would fuse these slices with the launch, and would not capture the fusion in its CUDA graphs, which costs 8 to 25
# us per iteration (H200).
_UNFUSED_SLICE_BYTES = 2**22


def _prevent_slice_fusion(arrays: Sequence[Any]) -> list[Any]:
    """Returns `arrays`, the small ones behind a barrier: XLA copies slices instead of fusing them through it."""
    small = [k for k, x in enumerate(arrays) if math.prod(x.shape) * x.dtype.itemsize <= _UNFUSED_SLICE_BYTES]
    results = list(arrays)
    for k, x in zip(small, jax.lax.optimization_barrier([arrays[k] for k in small]), strict=True):
        results[k] = x
    return results


def _call(
    kernels: _LaunchKind, device: Callable[[], tuple[Any, Sequence[int]]], callback: type[_Callback], captured: bool
) -> Callable[..., list[Array]]:
    """Returns the function that computes a shard. Tracing it compiles the kernel for all local devices.

    The compiled function calls `callback`, which launches the kernel.
    """

    def call(*arrays: Array, **params: Any) -> list[Array]:
        results = kernels.types([x.shape for x in arrays], params)
        kind, ordinals = device()
        if kernels.scans(arrays, params, kind):
            return kernels.scan(arrays, params)
        launch = kernels.launch(arrays, params, kind)
        for ordinal in ordinals:  # while tracing: the callback has time only to launch
            launch.load(ordinal)
        # outside of the barriers, where XLA drops a cast of a launch together with its inverse in the gradient's launch
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
            if zeroed:  # an input that is aliased to an output, so that XLA knows that the kernel writes to it
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
    """Returns the device that kernels are chosen for, and the ordinals of all devices that they are loaded onto."""
    from torch_bridge.launch import device

    ordinals = [d.local_hardware_id for d in jax.local_devices(backend="gpu")]
    return device(ordinals[0]), ordinals


def _device() -> Any:
    """Returns the device that kernels are chosen for when launches are traced."""
    from torch_bridge.launch import interpreting

    return (_cpu_device if interpreting() else _cuda_device)()[0]


def _cpu_device() -> tuple[Any, Sequence[int]]:
    from torch_bridge.config import Device
    from torch_bridge.launch import interpreting

    if not interpreting():
        raise NotImplementedError(
            'the Triton kernels need a GPU, but this call is compiled for the CPU: pass implementation="xla"'
        )
    return Device(interpreted=True), ()


class _PartitionedCallback:
    """The host callback of a launch in a program that XLA partitions: it calls the callback of the launch's shard.

    XLA identifies callbacks by their index in the program. The callbacks are counted before XLA compiles the program,
    but shards are lowered while it compiles, so this slot is registered first. A launch in a function that is called
    twice may have shards of two shapes.
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
    """Lowers the launch of a shard; registers its callback in `slot` if the surrounding program is already lowered."""
    lower = mlir.lower_fun(call, multiple_results=True)
    if slot is None:
        return lower(ctx, *operands, **params)
    callbacks = ctx.module_context.host_callbacks  # has this shard's; `slot.index` counts the program's
    while len(callbacks) < slot.index:
        ctx.module_context.add_host_callback(None)
    results = lower(ctx, *operands, **params)
    if len(callbacks) > slot.index:  # false if the shard launches nothing
        slot.parts[tuple(aval.shape for aval in ctx.avals_in)] = callbacks[slot.index]
    return results


def _lower(kernels: _LaunchKind, ctx: Any, *operands: Any, mesh_marker: Any, **params: Any) -> Any:
    """Lowers a launch: on a mesh of `Auto` axes to a `custom_partitioning` that XLA may shard, else for one device."""
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
    """Computes the results of `launch_p` by one launch on one device."""
    return kernels.merge_model_axis(kernels.bind_shard(None, kernels.split_model_axis(arrays, params), params), params)


def _partitioned(kernels: _LaunchKind, slot: _PartitionedCallback, params: dict[str, Any]) -> Callable[..., Any]:
    """Returns a launch as a `custom_partitioning`: XLA may shard each of its independent axes separately."""
    inputs = params["inputs"]
    names = (*inputs, *(output.name for output in params["outputs"]))
    # devices add up their sums in float32
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
        # the shardings agree, except that some arrays may be replicated
        shared = max(given, key=lambda each: _num_shards(mesh, *each.values()))
        if params.get("reverse") == "bidirectional" and operands[0].shape[0] % (
            2 * _num_shards(mesh, shared.get("models"))
        ):
            shared["models"] = None  # the parity of a model's index on its device decides its direction
        lengths = {
            axis: length
            for each, x in zip(axes, (*operands, *results), strict=True)
            for axis, length in zip(each, x.shape, strict=True)
        }
        for axis in shared:
            added_up = any(axis not in each for each in axes[len(inputs) :])
            if added_up and lengths[axis] % _num_shards(mesh, shared[axis]):
                shared[axis] = None  # XLA pads the last shard with arbitrary values, which a sum would include
        shardings = [NamedSharding(mesh, PartitionSpec(*map(shared.get, each))) for each in axes]
        # the mesh axes over which each result must be summed
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
    """Returns the mesh axes that these entries of a `PartitionSpec` name."""
    return [name for axis in axes if axis is not None for name in (axis if isinstance(axis, tuple) else (axis,))]


def _num_shards(mesh: Any, *axes: Any) -> int:
    """Returns the number of shards that these entries of a `PartitionSpec` make."""
    return math.prod(mesh.shape[name] for name in _mesh_axes(*axes))


def _compile_in_background(kernels: _LaunchKind, avals: Sequence[Any], params: dict[str, Any]) -> None:
    """Starts to compile a launch when it is traced, so that all kernels of a program compile in parallel.

    The work is wasted if this launch is not lowered: if JAX only evaluates shapes, if it traces a body again for `vmap`
    or gradients, or if shards on a mesh of `Auto` axes have another tiling.
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
    """Registers the rules of both primitives of `kernels`."""

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
        with jax.disable_jit(False):  # under `disable_jit`, bind would call this function again
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
