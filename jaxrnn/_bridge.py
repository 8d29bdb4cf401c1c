"""The one place where JAX reaches the Triton kernels: a primitive for a launch, its vmap rule, and its lowering.

`launch` binds one primitive for every cell and direction. Its arrays are canonical: weights `[S, ...]`, all others
`[G, ...]` with G a multiple of S. Batching adds groups or models, never a launch. Lowering compiles the kernel and
registers a callback that XLA calls with its own buffers and stream; XLA captures that call in its CUDA graphs. On a
mesh that JAX manages a launch is lowered to a `custom_partitioning`, and each device's part when XLA has shared it out.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from jax import Array

    from torch_bridge.config import Reverse as Reverse

WEIGHTS = ("w_hh", "w_hh_t", "b_hn")
# The axes that devices may share out; time and features stay whole.
SHARED_OUT = ("models", "groups", "batch")


class Output(NamedTuple):
    """An array that a launch writes: `[G, T, B, width]`, or `[G, B, width]` if not `stepped`."""

    name: str
    stepped: bool
    width: int
    dtype: Any


def unsupported(dtypes: Sequence[Any], hidden: int) -> str | None:
    """Why the Triton implementation cannot run here on these dtypes and this width, and what to do; None if it can."""
    missing = [name for name in ("torch", "triton") if _spec_missing(name)]
    if missing:
        return (
            f"needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            'pip install "jaxrnn[torch]", or pass implementation="xla"'
        )
    if bad := [str(dtype) for dtype in dtypes if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16)]:
        return f'takes float32, bfloat16 and float16, not {bad[0]}: convert, or pass implementation="xla"'
    from torch_bridge import config, launch

    if launch.interpreting():
        if jax.default_backend() != "cpu":
            return (
                "runs in Triton's interpreter here, because of TRITON_INTERPRET=1, and that takes arrays on the CPU "
                'alone: unset it, set JAX_PLATFORMS=cpu, or pass implementation="xla"'
            )
        if jnp.bfloat16 in dtypes:
            return (
                "computes bfloat16 products wrongly in Triton's interpreter: use float32 or float16 there, or pass "
                'implementation="xla"'
            )
        return _too_wide(hidden, config.Device())
    if jax.default_backend() != "gpu":
        return (
            f'needs an NVIDIA GPU, but JAX computes on "{jax.default_backend()}" here: pass implementation="xla" (or '
            "set TRITON_INTERPRET=1 before the first import to run the kernels in Triton's interpreter)"
        )
    import torch

    if not torch.cuda.is_available():
        return (
            f"needs a torch built for CUDA, but torch {torch.__version__} finds no CUDA device: install the build of "
            'torch for your driver, or pass implementation="xla"'
        )
    device = launch.device(jax.local_devices(backend="gpu")[0].local_hardware_id)
    if device.capability < 80:
        return (
            f"needs compute capability 8.0 (Ampere) or newer, this GPU has {device.capability / 10}: "
            'pass implementation="xla"'
        )
    return _too_wide(hidden, device)


def _too_wide(hidden: int, device: Any) -> str | None:
    from torch_bridge.config import widest

    if hidden <= widest(device):
        return None
    return (
        f"is limited by the device: a hidden width of {hidden} is more than its {device.multiprocessors} "
        f'multiprocessors can share ({widest(device)}); pass implementation="xla"'
    )


@functools.cache
def _spec_missing(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


def preferred(steps: int) -> bool:
    """Whether the Triton implementation, where it can run, is the fastest: on a GPU (the interpreter never is).

    One step alone XLA does faster: 13.7 us an iteration of a scan against 19.9 us (H200, B=64, H=128).
    """
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # a device, a platform, or None
    return steps > 1 and (getattr(default, "platform", default) or jax.default_backend()) in ("gpu", "cuda")


def _varying_axes(x: Any) -> frozenset[str]:
    """Axes of a mesh that `x` varies over inside `shard_map`; none elsewhere."""
    aval = jax.typeof(x)
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma  # renamed in JAX 0.10


def vary_alike(tree: Any, *others: Any) -> Any:
    """`tree`, each array varying over all axes that one of it or of `others` does: see `jax.lax.pcast`."""
    axes = frozenset().union(*(_varying_axes(x) for x in jax.tree.leaves((tree, *others))))

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - _varying_axes(x)))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # type: ignore[attr-defined]  # before JAX 0.9

    return jax.tree.map(vary, tree)


launch_p = Primitive("jaxrnn_launch")
launch_p.multiple_results = True
# What a device computes of it where XLA partitions the program: the same, lowered as the part that it is.
part_p = Primitive("jaxrnn_launch_part")
part_p.multiple_results = True


@functools.cache
def _asks_for_devices() -> Any:
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
) -> dict[str, Array]:
    """Launches one kernel: takes its arrays by name (None ones are left out) and returns its outputs by name.

    With `reverse` "odd" the innermost `jax.vmap` around it must be of two, over weights too: forward and in reverse.
    """
    present = {name: x for name, x in arrays.items() if x is not None}
    results = launch_p.bind(
        *present.values(),
        cell=cell, direction=direction, inputs=tuple(present), outputs=tuple(outputs),
        reset_state=reset_state, reverse=reverse, precision=precision,
        of_devices=_asks_for_devices(),
    )  # fmt: skip
    # what a primitive without a rule for it returns varies over no axis
    return dict(zip((output.name for output in outputs), vary_alike(results, present), strict=True))


class _Sizes(NamedTuple):
    models: int
    groups: int
    steps: int
    batch: int
    hidden: int


def _sizes(inputs: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> _Sizes:
    by_name = dict(zip(inputs, shapes, strict=True))
    weights, sequence, state = ("w_hh_t", "xp", "h0") if "xp" in by_name else ("w_hh", "dhs", "dh_last")
    groups, steps, batch = by_name[sequence][:3]
    return _Sizes(by_name[weights][0], groups, steps, batch, by_name[state][-1])


def _result_types(sizes: _Sizes, outputs: Sequence[Output]) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(
            (sizes.groups, *((sizes.steps,) if output.stepped else ()), sizes.batch, output.width), output.dtype
        )
        for output in outputs
    ]


@launch_p.def_abstract_eval
def _abstract(*avals: Any, inputs: Any, outputs: Any, **_: Any) -> list[jax.core.ShapedArray]:
    types = _result_types(_sizes(inputs, [aval.shape for aval in avals]), outputs)
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in types]


part_p.def_abstract_eval(_abstract)


@functools.lru_cache(maxsize=1024)
def _jitted(**params: Any) -> Callable[..., list[Array]]:
    return jax.jit(functools.partial(launch_p.bind, **params))


@launch_p.def_impl
def _impl(*arrays: Array, **params: Any) -> list[Array]:
    with jax.disable_jit(False):  # a launch is compiled: to take it apart would end here again
        return _jitted(**params)(*arrays)


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

    def merge(name: str, x: Array, axis: int | None) -> Array:
        if name in WEIGHTS and not new_models:
            return x
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        shape = (size * x.shape[1], *x.shape[2:])
        if not new_models:  # models stay the slowest axis: [size, models, ...] -> [models, size, ...]
            x = x.reshape(size, models, groups // models, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(shape)

    def split(x: Array) -> Array:
        if not new_models:
            x = x.reshape(models, size, groups // models, *x.shape[1:]).swapaxes(0, 1)
            return x.reshape(size, groups, *x.shape[3:])
        return x.reshape(size, groups, *x.shape[1:])

    merged = [merge(name, x, axis) for name, x, axis in zip(inputs, arrays, axes, strict=True)]
    results = [split(x) for x in launch_p.bind(*merged, **params)]
    return results, [0] * len(results)


batching.primitive_batchers[launch_p] = _batch


def _refuse_to_differentiate(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        'the Triton kernels have no forward-mode and no second derivative: pass implementation="xla"'
    )


ad.primitive_jvps[launch_p] = _refuse_to_differentiate

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


def _problem(arrays: Sequence[Any], sizes: _Sizes, params: dict[str, Any]) -> Any:
    from torch_bridge.config import Problem

    dtypes = [(name, str(x.dtype)) for name, x in zip(params["inputs"], arrays, strict=True)]
    dtypes += [(output.name, str(jnp.dtype(output.dtype))) for output in params["outputs"]]
    return Problem(
        params["cell"], params["direction"], *sizes, dtypes=tuple(dtypes),
        reset_state=params["reset_state"], reverse=params["reverse"], precision=params["precision"],
    )  # fmt: skip


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


def _call(make_launch: Callable[[Any], Any], callback: type[_Callback], captured: bool) -> Callable[..., list[Array]]:
    def call(*arrays: Array, **params: Any) -> list[Array]:
        sizes = _sizes(params["inputs"], [x.shape for x in arrays])
        results = _result_types(sizes, params["outputs"])
        if sizes.groups == 0:  # vmap over an axis of length zero
            return [jnp.zeros(x.shape, x.dtype) for x in results]
        launch = make_launch(_problem(arrays, sizes, params))
        inputs, outputs = list(params["inputs"]), [output.name for output in params["outputs"]]
        aliases = {}
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
        return function(*arrays)[: len(params["outputs"])]

    return call


def _cuda_launch(problem: Any) -> Any:
    """Compiles for every local GPU now: at call time there is only time to launch."""
    from torch_bridge.launch import Launch, device

    ordinals = [d.local_hardware_id for d in jax.local_devices(backend="gpu")]
    launch = Launch(problem, device(ordinals[0]))
    for ordinal in ordinals:
        launch.load(ordinal)
    return launch


def _cpu_launch(problem: Any) -> Any:
    from torch_bridge.config import Device
    from torch_bridge.launch import Launch, interpreting

    if not interpreting():
        raise NotImplementedError(
            'the Triton kernels were asked for on CPU devices: pass implementation="xla" for what runs there'
        )
    return Launch(problem, Device(interpreted=True))


class _Slot:
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


def _lower_part(call: Callable[..., list[Array]], ctx: Any, *operands: Any, slot: _Slot | None, **params: Any) -> Any:
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


def _lower(ctx: Any, *operands: Any, of_devices: Any, **params: Any) -> Any:
    """Lowers a launch: on a mesh that JAX manages as what XLA partitions over models, groups and batch."""
    del of_devices
    sizes = _sizes(params["inputs"], [aval.shape for aval in ctx.avals_in])
    mesh = getattr(ctx.module_context.axis_context, "abstract_mesh", None)  # none inside `shard_map` and `pmap`
    managed = mesh is not None and mesh.size > 1 and all(kind == AxisType.Auto for kind in mesh.axis_types)
    if not managed or sizes.groups == 0 or not getattr(jax.config, "jax_use_shardy_partitioner", True):
        function: Callable[..., Any] = functools.partial(part_p.bind, slot=None, **params)
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)
    slot = _Slot()
    slot.index = len(ctx.module_context.host_callbacks)
    ctx.module_context.add_host_callback(slot)
    return mlir.lower_fun(_partitioned(slot, sizes.models, params), multiple_results=True)(ctx, *operands)


def _partitioned(slot: _Slot, models: int, params: dict[str, Any]) -> Callable[..., Any]:
    """A launch whose models, groups and sequences XLA may share out to devices.

    In it groups are apart from their models, `[S, G / S, ...]`: one may be shared out and the other whole.
    """
    inputs = params["inputs"]
    names = (*inputs, *(output.name for output in params["outputs"]))

    def axes_of(name: str, rank: int) -> tuple[str, ...]:
        """The name of each axis: of those that devices share out, and of one that all need whole."""
        if name in WEIGHTS:
            return ("models", *(f"{name}_{k}" for k in range(1, rank)))
        if name == "reset":
            return ("models", "groups", "steps", "batch")
        return ("models", "groups", *(("steps",) if rank == 5 else ()), "batch", f"{name}_width")

    def rule(_: Any, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
        axes = [axes_of(name, len(x.shape)) for name, x in zip(names, (*operands, *results), strict=True)]
        arrays = [" ".join(each) for each in axes]
        in_order = dict.fromkeys(axis for each in axes for axis in each)
        whole = tuple(axis for axis in in_order if axis not in SHARED_OUT)
        text = f"{', '.join(arrays[: len(inputs)])} -> {', '.join(arrays[len(inputs) :])}"
        return text, {"need_replication_factors": whole}

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        axes = [axes_of(name, len(x.shape)) for name, x in zip(names, (*operands, *results), strict=True)]
        given = [
            dict(zip(each, x.sharding.spec, strict=False)) for each, x in zip(axes, (*operands, *results), strict=True)
        ]
        # they agree, but for what is whole
        shared = max(
            ({axis: each.get(axis) for axis in SHARED_OUT} for each in given),
            key=lambda each: _parts(mesh, *each.values()),
        )
        if params["reverse"] == "odd" and models % (2 * _parts(mesh, shared["models"])):
            shared["models"] = None  # a model runs in reverse if its index is odd: on a device too
        shardings = [NamedSharding(mesh, PartitionSpec(*map(shared.get, each))) for each in axes]
        return mesh, functools.partial(local, slot), tuple(shardings[len(inputs) :]), tuple(shardings[: len(inputs)])

    def local(slot: _Slot | None, *arrays: Array) -> tuple[Array, ...]:
        merged = [x if name in WEIGHTS else x.reshape(-1, *x.shape[2:]) for name, x in zip(inputs, arrays, strict=True)]
        here = _sizes(inputs, [x.shape for x in merged]).models
        results = part_p.bind(*merged, slot=slot, **params)
        return tuple(x.reshape(here, -1, *x.shape[1:]) for x in results)

    on_devices = custom_partitioning(functools.partial(local, None))
    on_devices.def_partition(partition, sharding_rule=rule, decode_shardings=True)

    def call(*arrays: Array) -> list[Array]:
        apart = [
            x if name in WEIGHTS else x.reshape(models, -1, *x.shape[1:])
            for name, x in zip(inputs, arrays, strict=True)
        ]
        return [x.reshape(-1, *x.shape[2:]) for x in on_devices(*apart)]

    return call


def _parts(mesh: Any, *axes: Any) -> int:
    """How many parts these axes of an array are cut into."""
    names = [name for axis in axes if axis is not None for name in (axis if isinstance(axis, tuple) else (axis,))]
    return math.prod(mesh.shape[name] for name in names)


mlir.register_lowering(launch_p, _lower)
for _platform, _function in (
    ("cuda", _call(_cuda_launch, _Callback, True)), ("cpu", _call(_cpu_launch, _InterpretedCallback, False))
):  # fmt: skip
    mlir.register_lowering(part_p, functools.partial(_lower_part, _function), platform=_platform)
