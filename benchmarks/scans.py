"""Programs that are timed per iteration of a jitted scan: the step of a rollout, and launches against no launch."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxrnn
from benchmarks import oracle
from benchmarks.providers import ScannedRNN, to_flax
from jaxrnn import _bridge
from jaxrnn._bridge.launch_kind import LaunchKind, Output
from jaxrnn._bridge.primitive import bind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.cases import Case

    Arrays = dict[str, jax.Array]
    Program = tuple[Callable[..., Any], tuple[Any, ...]]  # a function to jit, and its arguments


def trivial(x: jax.Array) -> jax.Array:
    """Computes one small fused op that XLA cannot merge with its neighbors."""
    return jax.lax.optimization_barrier(jnp.tanh(1.01 * x))


# The step of a rollout, which maps the carry and `[B, H]` to the next carry and `[B, H]`.

NO_RECURRENCE = "three trivial ops"


def acting(case: Case, arrays: Arrays) -> dict[str, Program]:
    """Returns scans over `case.T` single steps with results `ys [T, B, H]`.

    All of them are the recurrence, except the last one, which runs three trivial ops per step.
    """
    weights = {name: arrays[name] for name in case.weights}
    inputs = (arrays["xs"], arrays["resets"])
    cell = ScannedRNN(nn.GRUCell)

    def ours(implementation: str | None, weights: Any, h: Any, x: jax.Array, reset: jax.Array) -> Any:
        fixed = {"h0": h, "resets": reset[None]}
        ys = oracle.forward(case.cell, {**weights, "xs": x[None]}, fixed, implementation=implementation)
        return ys[0], ys[0]

    def flax(variables: Any, h: Any, x: jax.Array, reset: jax.Array) -> Any:
        applied: Any = cell.apply(variables, h, (x[None], reset[None]))
        h, ys = applied
        return h, ys[0]

    def fused_ops(_: Any, h: Any, x: jax.Array, reset: jax.Array) -> Any:
        h = trivial(trivial(trivial(jnp.where(reset[:, None], 0.0, h) + x)))
        return h, h

    def scan(step: Callable[..., Any], weights: Any, h: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jax.lax.scan(lambda h, xs: step(weights, h, *xs), h, inputs)[1]

    steps: dict[str, tuple[Callable[..., Any], Any]] = {
        "jaxrnn": (functools.partial(ours, None), weights),
        "jaxrnn-triton": (functools.partial(ours, "triton"), weights),
        "flax": (flax, to_flax(case, weights)),
        NO_RECURRENCE: (fused_ops, weights),
    }
    return {
        name: (functools.partial(scan, step), (weights, arrays["h0"], inputs))
        for name, (step, weights) in steps.items()
    }


# A launch in a scan.

DISPATCH_ITERATIONS, DISPATCH_BATCH, DISPATCH_HIDDEN = 1000, 16, 64
FIVE, SIXTH = "five trivial ops", "and a sixth"
ONE, NATIVE, OURS, NORM, ONE_STEP, TWO_STEPS = (
    "one trivial op", "a native Triton call", "our launch of the same", "rms_norm", "our GRU loop, T=1",
    "our GRU loop, T=2",
)  # fmt: skip


def dispatch() -> dict[str, Program]:
    """Returns scans over five trivial ops: alone, or with one more op, a native Triton call or one of our launches.

    XLA captures the body of a loop in a CUDA graph if it has five ops or more. One of our launches runs the same kernel
    as the native call; the difference of the two is the overhead of a launch.
    """

    def after_five(body: Callable[[Arrays, jax.Array], jax.Array], fixed: Arrays, h: jax.Array) -> jax.Array:
        for _unused in range(5):
            h = trivial(h)
        return body(fixed, h)

    names = {name: SIXTH if name == ONE else f"and {name}" for name in BODIES}
    bodies = {names[name]: functools.partial(after_five, body) for name, body in BODIES.items()}
    return _dispatched({FIVE: functools.partial(after_five, lambda fixed, h: h), **bodies})


def dispatch_alone() -> dict[str, Program]:
    """Returns scans over one trivial op, one native Triton call or one of our launches, which XLA does not capture."""
    return _dispatched(BODIES)


def _dispatched(bodies: Mapping[str, Callable[[Arrays, jax.Array], jax.Array]]) -> dict[str, Program]:
    B, H = DISPATCH_BATCH, DISPATCH_HIDDEN
    keys = jax.random.split(jax.random.key(0), 4)
    h = 0.5 * jax.random.normal(keys[0], (B, H))
    fixed = {
        "w_hh_t": jax.random.normal(keys[1], (1, 3 * H, H)) * H**-0.5,
        "b_hn": jax.random.normal(keys[2], (1, H)),
        "xp": jax.random.normal(keys[3], (1, 2, B, 3 * H)),
    }

    def scan(body: Callable[[Arrays, jax.Array], jax.Array], fixed: Arrays, h: jax.Array) -> jax.Array:
        return _repeated(functools.partial(body, fixed), h)

    return {name: (functools.partial(scan, body), (fixed, h)) for name, body in bodies.items()}


def _repeated(body: Callable[[jax.Array], jax.Array], h: jax.Array) -> jax.Array:
    """Runs a body, which maps a carry to the next, once per iteration of a scan; returns the last carry."""
    return jax.lax.scan(lambda h, _: (body(h), None), h, length=DISPATCH_ITERATIONS)[0]


SUM, SUM_OURS = "a sum over two GPUs", "our launch and a sum over two GPUs"


def dispatch_on_two_devices() -> dict[str, Program]:
    """Returns scans on two devices, over one op or launch on each: alone, or with a sum over the devices after it.

    The devices wait for each other only in the sum.
    """
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    h = 0.5 * jax.random.normal(jax.random.key(0), (2, DISPATCH_BATCH, DISPATCH_HIDDEN))
    h = jax.device_put(h, NamedSharding(mesh, PartitionSpec("devices")))

    def scan(body: Callable[[jax.Array], jax.Array], h: jax.Array) -> jax.Array:
        part = PartitionSpec("devices")
        loop = functools.partial(_repeated, body)
        return jax.shard_map(loop, mesh=mesh, in_specs=part, out_specs=part, check_vma=False)(h)

    bodies: dict[str, Callable[[jax.Array], jax.Array]] = {
        ONE: trivial,
        NATIVE: native_call,
        OURS: our_call,
        SUM: lambda h: jax.lax.pmean(trivial(h), "devices"),
        SUM_OURS: lambda h: jax.lax.pmean(our_call(h), "devices"),
    }
    return {name: (functools.partial(scan, body), (h,)) for name, body in bodies.items()}


def bare_launch(steps: int, fixed: Arrays, h: jax.Array) -> jax.Array:
    """Launches our forward kernel of a GRU without the work that XLA does around it; `h` is `[B, H]`."""
    f32, H = jnp.dtype(jnp.float32), h.shape[-1]
    outputs = [_bridge.Output("hs", f32, H), _bridge.Output("h_last", f32, H, stepped=False)]
    arrays: dict[str, jax.Array | None] = {**fixed, "xp": fixed["xp"][:, :steps], "h0": h[None]}
    results = _bridge.launch(
        "gru", "fwd", arrays, outputs, reset_state="zeros", reverse=False, precision="tf32"
    )  # fmt: skip
    return results["h_last"][0]


def native_call(h: jax.Array) -> jax.Array:
    """Calls a Triton kernel that jaxlib launches itself and that does almost nothing."""
    from jax.experimental import pallas
    from jax.experimental.pallas import triton

    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = 0.99 * x_ref[...]

    call = pallas.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype), compiler_params=triton.CompilerParams(num_warps=4)
    )
    return call(h)


class ScaleProblem(NamedTuple):
    """A launch of `ScaleKind` scales an array of `size` elements."""

    size: int


class ScaleKind(LaunchKind):
    """The launch of a kernel that does almost nothing: it scales `x` to `y`."""

    name = "scale"

    def shape_of(self, output: Any, arrays: Any) -> tuple[int, ...]:
        shape: tuple[int, ...] = arrays["x"].shape
        return shape

    def describe(self) -> tuple[str, Literal["fwd"]]:
        return "scale", "fwd"

    def choose(self, arrays: Any, device: Any) -> Any:
        from benchmarks.trivial_kernel import scale_kernel
        from torch_bridge.launch import Launch

        size = math.prod(arrays["x"].shape)

        class ScaleLaunch(Launch):
            problem = tiling = ScaleProblem(size)

        launch = ScaleLaunch(device)
        launch.add(scale_kernel, 1, 4, dict.fromkeys(("x", "y"), str(arrays["x"].dtype)), {"SIZE": size}, {})
        return launch


def our_call(h: jax.Array) -> jax.Array:
    """Launches the kernel of `ScaleKind` like every launch of ours, on a GPU or in Triton's interpreter."""
    return bind(ScaleKind(outputs=(Output("y", h.dtype),)), {"x": h})["y"]


# The bodies of the loops on one device, by the name of the row. A body takes the fixed arrays and the carry `[B, H]`,
# and returns the next carry.
BODIES: dict[str, Callable[[Arrays, jax.Array], jax.Array]] = {
    ONE: lambda fixed, h: trivial(h),
    NATIVE: lambda fixed, h: native_call(h),
    OURS: lambda fixed, h: our_call(h),
    NORM: lambda fixed, h: jaxrnn.rms_norm(h, implementation="triton"),
    ONE_STEP: functools.partial(bare_launch, 1),
    TWO_STEPS: functools.partial(bare_launch, 2),
}
