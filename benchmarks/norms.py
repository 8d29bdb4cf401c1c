"""Measures RMSNorm and LayerNorm, forward and backward, against a device copy that moves as many bytes.

When a repetition begins, the L2 cache holds nothing of the arrays and the host is far ahead of the device. CUDA events
time the repetition on the stream that it runs on; a program in JAX records them in callbacks inside the program, before
and after the timed part.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import statistics
import time
import zlib
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

import jaxrnn
from benchmarks import precompile, timing
from benchmarks.results import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from benchmarks.settings import Settings

    Progress = Callable[[str], None]
    Tensors = dict[str, torch.Tensor]

Kind = Literal["rms", "layer"]
Direction = Literal["fwd", "bwd"]

EPSILON = 1e-6
NAMES: dict[Kind, str] = {"rms": "RMSNorm", "layer": "LayerNorm"}
SIZES = {"bf16": 2, "f32": 4}
# The largest ||got - want|| / ||want|| with which a provider is still timed, over the rows and columns that are
# compared.
TOLERANCE = {"bf16": 2e-2, "f32": 1e-4}
COMPARED_ROWS, COMPARED_COLUMNS = 256, 64


@dataclasses.dataclass(frozen=True)
class NormCase:
    """One shape of a norm, forward or backward.

    Attributes:
      kind: "rms", with a weight, or "layer", with a weight and a bias.
      direction: forward (y), or backward (gradients of x, weight and bias).
      dtype: the dtype of all arrays, "bf16" or "f32".
      rows: the number of rows.
      columns: the length of a row.
    """

    kind: Kind
    direction: Direction
    dtype: str
    rows: int
    columns: int

    def __str__(self) -> str:
        """Returns a label such as `RMSNorm fwd bf16 8192x8192`."""
        return f"{NAMES[self.kind]} {self.direction} {self.dtype} {self.rows}x{self.columns}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters."""
        return ("weight",) if self.kind == "rms" else ("weight", "bias")

    @property
    def bytes(self) -> int:
        """The bytes that the norm must move: those of x and y, or of x, dy and dx."""
        return (2 if self.direction == "fwd" else 3) * self.rows * self.columns * SIZES[self.dtype]

    @property
    def target(self) -> float | None:
        """The share of a copy's bandwidth that the kernels should reach on an H200; None without a target."""
        if self.dtype != "bf16" or (self.rows, self.columns) not in WIDE:
            return None
        return 0.92 if self.direction == "fwd" and self.columns >= 2048 else 0.85


WIDE = ((8192, 8192), (16384, 4096), (32768, 2048), (32768, 512), (32768, 8192), (32768, 32768))
# Shapes of an agent: T * B rows of H columns.
RECURRENT = tuple((rows, columns) for columns in (64, 128, 256, 512, 1024) for rows in (8192, 524288))


def cases() -> list[NormCase]:
    """Returns all cases; both directions of a shape are adjacent, and so are shapes that share compiled code."""
    kinds: tuple[Kind, ...] = ("rms", "layer")
    directions: tuple[Direction, ...] = ("fwd", "bwd")
    return [
        NormCase(kind, direction, dtype, rows, columns)
        for dtype in SIZES
        for kind in kinds
        for rows, columns in (*WIDE, *RECURRENT)
        for direction in directions
    ]


# The GPU that everything runs on if there are several. All code names it explicitly, because JAX, when it starts, makes
# the last GPU the current one, for PyTorch too.
ORDINAL = 0


# Clocks.


class DeviceClock:
    """A clock of CUDA events on the stream of one call.

    Before the call, the stream clears L2 and waits, which gives the host time to enqueue the call.
    """

    # Cycles that the device waits for the host. PyTorch's autograd takes up to half a millisecond to enqueue a backward
    # pass. XLA takes almost no time, because the callbacks are inside its program.
    _AHEAD, _AHEAD_INSIDE = 3_000_000, 300_000
    method = "CUDA events around each call, L2 cleared before"

    def __init__(self) -> None:
        import torch

        cache = torch.cuda.get_device_properties(ORDINAL).L2_cache_size
        self._buffer = torch.empty(cache, device=f"cuda:{ORDINAL}")  # four times as large as the cache
        self._sum = torch.empty((), device=f"cuda:{ORDINAL}")
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def _stream(self, context: Any) -> torch.cuda.Stream:
        import torch

        if context is None:
            return torch.cuda.current_stream(ORDINAL)
        return torch.cuda.ExternalStream(context.stream, ORDINAL)

    def begin(self, context: Any = None) -> None:
        """Clears L2 and starts the clock on the stream of a callback's `context`; None means PyTorch's current one."""
        import torch

        stream = self._stream(context)
        with torch.cuda.stream(stream):
            self._buffer.zero_()
            torch.sum(self._buffer, 0, out=self._sum)  # the lines left in the cache need no writing back
            torch.cuda._sleep(self._AHEAD if context is None else self._AHEAD_INSIDE)
            self._events[0].record(stream)

    def end(self, context: Any = None) -> None:
        """Stops the clock."""
        self._events[1].record(self._stream(context))

    def seconds(self) -> float:
        """Returns the seconds between `begin` and `end`."""
        import torch

        torch.cuda.synchronize(ORDINAL)
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class HostClock:
    """A clock of host time, for machines without a GPU."""

    method = "the host's time"

    def __init__(self) -> None:
        self._times = [0.0, 0.0]

    def begin(self, context: Any = None) -> None:
        """Starts the clock."""
        self._times[0] = time.perf_counter()

    def end(self, context: Any = None) -> None:
        """Stops the clock."""
        self._times[1] = time.perf_counter()

    def seconds(self) -> float:
        """Returns the seconds between `begin` and `end`."""
        return self._times[1] - self._times[0]


Clock = DeviceClock | HostClock


# Arrays and correct results.


def make_arrays(case: NormCase, place: str) -> Tensors:
    """Returns `x` and `dy` `[rows, columns]` and the parameters `[columns]`, seeded by a hash of the shape."""
    import torch

    dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[case.dtype]
    generator = torch.Generator(place).manual_seed(zlib.crc32(f"{case.rows}x{case.columns}".encode()))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=place, dtype=dtype)

    arrays = {name: normal(case.columns) for name in case.parameters}
    return arrays | {"x": normal(case.rows, case.columns), "dy": normal(case.rows, case.columns)}


class Truth:
    """Float64 results: `y` and `dx` of some rows, `dweight` and `dbias` of some columns."""

    def __init__(self, case: NormCase, arrays: Tensors) -> None:
        import torch

        x, dy = arrays["x"], arrays["dy"]
        self._rows = torch.linspace(0, case.rows - 1, min(COMPARED_ROWS, case.rows), device=x.device).long()
        self._columns = torch.linspace(0, case.columns - 1, min(COMPARED_COLUMNS, case.columns)).long().to(x.device)
        means, rstds = [], []
        for part in x.split(max(2**26 // case.columns, 1)):
            variance, mean = torch.var_mean(part.double(), -1, correction=0)
            if case.kind == "rms":
                variance, mean = variance + mean.square(), torch.zeros_like(mean)
            means.append(mean)
            rstds.append((variance + EPSILON).rsqrt())
        mean, rstd = torch.cat(means)[:, None], torch.cat(rstds)[:, None]
        at = self._rows
        normalized, d = (x[at].double() - mean[at]) * rstd[at], dy[at].double()
        y = normalized * arrays["weight"].double()
        scaled = d * arrays["weight"].double()
        dx = scaled - normalized * (scaled * normalized).mean(-1, keepdim=True)
        if case.kind == "layer":
            y, dx = y + arrays["bias"].double(), dx - scaled.mean(-1, keepdim=True)
        few, d = x[:, self._columns].double(), dy[:, self._columns].double()
        self._want = {"y": y, "dx": dx * rstd[at], "dweight": (d * (few - mean) * rstd).sum(0), "dbias": d.sum(0)}

    def error(self, case: NormCase, results: Sequence[torch.Tensor]) -> tuple[float, str]:
        """Returns the largest relative error of the results, NaN if any error is, and the name of that result."""
        import torch

        names = ("y",) if case.direction == "fwd" else ("dx", *(f"d{name}" for name in case.parameters))
        errors = []
        for name, x in zip(names, results, strict=True):
            got, want = x[self._rows if name in ("y", "dx") else self._columns].double(), self._want[name]
            errors.append((float(torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)), name))
        return max(errors, key=lambda each: float("inf") if each[0] != each[0] else each[0])


# Providers. `_call` turns a provider, a case, arrays and a clock into a call whose results are in the order of `Truth`.


@dataclasses.dataclass(frozen=True)
class Provider:
    """One way to compute a case: PyTorch's providers have `build`, and those of JAX have `function`."""

    name: str
    build: Callable[[NormCase, Tensors], Callable[[], Any]] | None = None
    function: Callable[[NormCase], Callable[..., Any]] | None = None


def torch_pass(norm: Callable[..., Any], case: NormCase, arrays: Tensors) -> Callable[[], Any]:
    """Returns a call of the forward pass, which stores residuals as in training, or of the backward pass."""
    import torch

    leaves = [arrays[name].detach().requires_grad_() for name in ("x", *case.parameters)]
    if case.direction == "fwd":
        return lambda: [norm(*leaves).detach()]
    y = norm(*leaves)
    return lambda: torch.autograd.grad(y, leaves, arrays["dy"], retain_graph=True)


def pytorchs(case: NormCase) -> Callable[..., Any]:
    """Returns PyTorch's norm."""
    import torch

    shape = (case.columns,)
    if case.kind == "rms":
        return lambda x, weight: torch.nn.functional.rms_norm(x, shape, weight, EPSILON)
    return lambda x, weight, bias: torch.nn.functional.layer_norm(x, shape, weight, bias, EPSILON)


def build_ours(case: NormCase, arrays: Tensors) -> Callable[[], Any]:
    """Builds the norm of `torch_bridge`."""
    from torch_bridge import functional

    norm = functional.rms_norm if case.kind == "rms" else functional.layer_norm
    implementation: Any = "triton" if arrays["x"].is_cuda else None
    return torch_pass(functools.partial(norm, eps=EPSILON, implementation=implementation), case, arrays)


def build_eager(case: NormCase, arrays: Tensors) -> Callable[[], Any]:
    """Builds the norm of PyTorch's own kernels."""
    return torch_pass(pytorchs(case), case, arrays)


_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def build_compiled(case: NormCase, arrays: Tensors) -> Callable[[], Any]:
    """Builds PyTorch's norm with `torch.compile`, which compiles once for any number of rows at an agent's shapes."""
    import torch
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # the backward pass runs more than once
    any_rows = (case.rows, case.columns) in RECURRENT
    key = (case.kind, case.dtype, case.columns, None if any_rows else case.rows)
    if key not in _compiled:
        torch._dynamo.reset()  # PyTorch limits how often it compiles a function
        _compiled.clear()
        _compiled[key] = torch.compile(pytorchs(case), fullgraph=True, dynamic=None if any_rows else False)

    def norm(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        if any_rows:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return _compiled[key](x, *parameters)

    return torch_pass(norm, case, arrays)


def build_copy(case: NormCase, arrays: Tensors) -> Callable[[], Any]:
    """Builds a copy that reads and writes as many bytes in all."""
    import torch

    source, target = (torch.empty(case.bytes // 2, dtype=torch.uint8, device=arrays["x"].device) for _ in range(2))
    source.zero_()
    return lambda: target.copy_(source)


def formula(kind: Kind) -> Callable[..., jax.Array]:
    """Returns the norm by its formula, in float32."""

    def norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        wide = x.astype(jnp.float32)
        if kind == "layer":
            wide = wide - wide.mean(-1, keepdims=True)
        y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON) * weight
        return (y if bias is None else y + bias).astype(x.dtype)

    return norm


def through_jaxrnn(case: NormCase) -> Callable[..., jax.Array]:
    """Returns the norm of `jaxrnn`, which launches the kernels inside jit."""
    norm = getattr(jaxrnn, f"{case.kind}_norm")
    return functools.partial(norm, epsilon=EPSILON, implementation="triton")


OURS, COPY = "torch_bridge", "copy"
ALL = (
    Provider(OURS, build=build_ours),
    Provider("jaxrnn", function=through_jaxrnn),
    Provider("torch-compile", build=build_compiled),
    Provider("torch", build=build_eager),
    Provider("xla", function=lambda case: formula(case.kind)),
    Provider(COPY, build=build_copy),
)  # fmt: skip


def program(case: NormCase, norm: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    """Returns a function to jit that starts the clock before the timed part and stops it after that part.

    The clock records its events on the stream that the program runs on.
    """

    def begin(x: jax.Array, *after: jax.Array) -> jax.Array:
        place = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return buffer_callback(lambda ctx, out, *_: clock.begin(ctx), [place], input_output_aliases={0: 0})(x, *after)[
            0
        ]

    def end(*results: jax.Array) -> jax.Array:
        place = jax.ShapeDtypeStruct((1,), jnp.int32)
        return buffer_callback(lambda ctx, out, *_: clock.end(ctx), [place])(*results)[0]

    def forward(x: jax.Array, dy: jax.Array, *parameters: jax.Array) -> Any:
        y = norm(begin(x), *parameters)
        return [y], end(y)

    def backward(x: jax.Array, dy: jax.Array, *parameters: jax.Array) -> Any:
        y, pull = jax.vjp(norm, x, *parameters)
        gradients = pull(begin(dy, y))
        return gradients, end(*gradients)

    return forward if case.direction == "fwd" else backward


def compile_program(case: NormCase, provider: Provider, clock: Clock) -> Any:
    """Compiles a provider's program with XLA, from shapes alone."""
    assert provider.function is not None
    dtype = {"bf16": jnp.bfloat16, "f32": jnp.float32}[case.dtype]
    place = jax.sharding.SingleDeviceSharding(jax.devices()[ORDINAL])
    rows = jax.ShapeDtypeStruct((case.rows, case.columns), dtype, sharding=place)
    parameters = [jax.ShapeDtypeStruct((case.columns,), dtype, sharding=place) for _ in case.parameters]
    return jax.jit(program(case, provider.function(case), clock)).lower(rows, rows, *parameters).compile()


# Compilation before timing.


def problems(case: NormCase) -> list[Any]:
    """Returns the problems that `torch_bridge` launches for a case."""
    from torch_bridge.norms import Problem

    dtype = {"bf16": "bfloat16", "f32": "float32"}[case.dtype]
    saved = {"rstd": "float32"} | ({"mean": "float32"} if case.kind == "layer" else {})
    rows = {"x": dtype, "weight": dtype}
    forward = rows | {"y": dtype} | saved | ({"bias": dtype} if case.kind == "layer" else {})
    backward = rows | {"dy": dtype, "dx": dtype} | saved | {f"d{name}": dtype for name in case.parameters}
    given = {"fwd": tuple(forward.items()), "bwd": tuple(backward.items())}
    directions: tuple[Direction, ...] = ("fwd",) if case.direction == "fwd" else ("fwd", "bwd")
    return [Problem(case.kind, d, 1, case.rows, case.columns, EPSILON, given[d]) for d in directions]


def compile_kernels(chosen: Iterable[NormCase]) -> None:
    """Compiles the kernels of the cases into Triton's cache on disk, in parallel."""
    from torch_bridge import gpu
    from torch_bridge.norms import Launch

    device = gpu.device(ORDINAL)
    wanted = {(p.kind, p.direction, p.columns, p.dtypes): p for case in chosen for p in problems(case)}
    precompile.compile_kernels(Launch, [(problem, device) for problem in wanted.values()])


# Measuring.


def time_case(
    case: NormCase,
    providers: Sequence[Provider],
    arrays: Tensors,
    truth: Truth,
    programs: dict[Any, Any],
    clock: Clock,
    repetitions: int,
    progress: Progress = lambda _: None,
) -> list[Row]:
    """Returns a row for every provider, in order. `programs` has compiled programs, or the errors of compiling them."""
    rows: dict[str, Row] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for provider in providers:
        target = case.target if provider.name in (OURS, "jaxrnn") else None
        row = Row(str(case), provider.name, ours=OURS, unit="of copy", target=target)
        try:
            call = _call(case, provider, arrays, programs, clock)
            error, of = (0.0, "") if provider.name == COPY else truth.error(case, _tensors(call()))
        except Exception as problem:  # a provider that fails becomes a row, and the run goes on
            rows[provider.name] = row.failed(problem)
            continue
        row = dataclasses.replace(row, error=None if provider.name == COPY else error, error_of=of)
        if not error <= TOLERANCE[case.dtype]:
            reason = f"not timed: {of} is off by {error:.2g}, more than {TOLERANCE[case.dtype]:g}"
            row = dataclasses.replace(row, status="wrong", reason=reason)
        else:
            calls[provider.name] = call
        rows[provider.name] = row
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-1, repetitions):  # the first turn is not counted
        for name, call in calls.items():
            call()
            elapsed = clock.seconds()
            if turn >= 0:
                seconds[name].append(elapsed)
        progress(str(case))
    copied = statistics.median(seconds[COPY]) if COPY in seconds else None
    for name in calls:
        spread = timing.Spread.of(seconds[name], repetitions)
        us = 1e6 * spread.median
        row = dataclasses.replace(rows[name], us=us, calls=repetitions, method=clock.method)
        if copied is None:
            rows[name] = dataclasses.replace(row, status="failed", reason=f"{us:.4g} us, but no copy to compare with")
        else:
            speeds = {"value": copied / spread.median, "low": copied / spread.high, "high": copied / spread.low}
            note = f"{us:.4g} us, {case.bytes / spread.median / 1e12:.3g} TB/s"
            rows[name] = dataclasses.replace(row, **speeds, note=note)  # type: ignore[arg-type]
    return list(rows.values())


def _call(
    case: NormCase, provider: Provider, arrays: Tensors, programs: dict[Any, Any], clock: Clock
) -> Callable[[], Any]:
    """Returns a function that makes one timed call."""
    import torch

    if provider.build is None:
        compiled = programs[provider.name, case]
        if isinstance(compiled, Exception):
            raise compiled
        with torch.cuda.device_of(arrays["x"]):  # PyTorch exports only tensors of its current device
            given = [jax.dlpack.from_dlpack(arrays[name]) for name in ("x", "dy", *case.parameters)]

        def call() -> Any:
            results, token = compiled(*given)
            token.block_until_ready()
            return results

        return call
    run = provider.build(case, arrays)

    def timed() -> Any:
        clock.begin()
        results = run()
        clock.end()
        return results

    return timed


def _tensors(results: Any) -> list[torch.Tensor]:
    import torch

    return [x if isinstance(x, torch.Tensor) else torch.utils.dlpack.from_dlpack(x) for x in results]


def norm(settings: Settings, progress: Progress, chosen: Sequence[NormCase] | None = None) -> Iterator[Row]:
    """Yields the share of a copy's bandwidth that each provider reaches. Without a GPU, the host's time is measured."""
    chosen = [case for case in (cases() if chosen is None else chosen) if settings.wants_case(str(case))]
    if not chosen:
        return
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("the suite norm needs PyTorch, whose copy it compares with: pip install '.[torch]'")
    import torch

    # always measure the copy, because every figure is a share of its bandwidth
    providers = [provider for provider in ALL if settings.wants(provider.name) or provider.name == COPY]
    on_gpu = torch.cuda.is_available()
    place = f"cuda:{ORDINAL}" if on_gpu else "cpu"
    clock: Clock = DeviceClock() if on_gpu else HostClock()
    progress("compile")
    if on_gpu and any(provider.name in (OURS, "jaxrnn") for provider in providers):
        compile_kernels(chosen)
    programs: dict[Any, Any] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = {
            (provider.name, case): pool.submit(compile_program, case, provider, clock)
            for provider in providers
            for case in chosen
            if provider.function is not None
        }
    for key, future in futures.items():
        programs[key] = future.exception() or future.result()
    before: NormCase | None = None
    for case in chosen:
        shape = dataclasses.replace(case, direction="fwd")
        if shape != before:
            arrays: Tensors = {}
            arrays = make_arrays(case, place)
            truth, before = Truth(case, arrays), shape
        yield from time_case(case, providers, arrays, truth, programs, clock, 4 * settings.rounds, progress)
        if on_gpu:
            torch.cuda.empty_cache()
