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
import zlib
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental.buffer_callback import buffer_callback

import jaxrnn
from benchmarks import cases, harness, oracle, precompile, timing
from benchmarks.providers import Provider, Ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from benchmarks.cases import Direction, NormCase
    from benchmarks.results import Row
    from benchmarks.settings import Settings

    Progress = Callable[[str], None]
    Tensors = dict[str, torch.Tensor]
    Programs = Mapping[tuple[str, NormCase], concurrent.futures.Future[Any]]

EPSILON = 1e-6
# The largest ||got - want|| / ||want|| with which a provider is still timed, over the rows and columns that are
# compared.
TOLERANCE = {"bf16": 2e-2, "f32": 1e-4}
COMPARED_ROWS, COMPARED_COLUMNS = 256, 64
# The GPU that everything runs on if there are several. All code names it explicitly, because JAX, when it starts, makes
# the last GPU the current one, for PyTorch too.
ORDINAL = 0


# Arrays and correct results.


def make_arrays(case: NormCase, place: str) -> Tensors:
    """Returns `x` and `dy` `[rows, columns]` and the parameters `[columns]`, seeded by a hash of the shape."""
    import torch

    dtype = getattr(torch, cases.DTYPES[case.dtype])
    generator = torch.Generator(place).manual_seed(zlib.crc32(f"{case.rows}x{case.columns}".encode()))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=place, dtype=dtype)

    arrays = {name: normal(case.columns) for name in case.parameters}
    return arrays | {"x": normal(case.rows, case.columns), "dy": normal(case.rows, case.columns)}


class Truth:
    """Float64 results: `y` and `dx` of some rows, `dweight` and `dbias` of some columns."""

    def __init__(self, case: NormCase, arrays: Tensors) -> None:
        import torch

        self.case = case
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

    def errors(self, provider: Provider, results: Tensors, names: Sequence[str] | None = None) -> oracle.Errors:
        """Returns by name the errors of results, as `oracle.errors` does."""
        import torch

        errors = {}
        for name in names or results:
            at, want = self._rows if name in ("y", "dx") else self._columns, self._want[name]
            difference = results[name][at].double() - want
            rms = float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(want))
            errors[name] = rms, float(difference.abs().max() / want.abs().max())
        return errors

    def tolerance(self, provider: Provider) -> float:
        """Returns the largest error with which a provider is still timed."""
        return TOLERANCE[self.case.dtype]


# Providers.


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of the providers of a norm.

    Attributes:
      arrays: what `make_arrays` returns.
      stopwatch: what a call starts before the timed part and stops after it.
      programs: the compiled programs of JAX, by provider and case.
    """

    arrays: Tensors
    stopwatch: timing.Stopwatch
    programs: Programs


def torch_call(case: NormCase, inputs: Inputs, run: Callable[[], Sequence[torch.Tensor]]) -> Ready:
    """Returns a timed call of `run`, whose results have the order of `NormCase.results`."""

    def timed() -> Sequence[torch.Tensor]:
        inputs.stopwatch.begin()
        results = run()
        inputs.stopwatch.end()
        return results

    return Ready(timed, lambda results: dict(zip(case.results, results, strict=True)))


def torch_pass(norm: Callable[..., Any], case: NormCase, inputs: Inputs) -> Ready:
    """Builds the forward pass, which stores residuals as in training, or the backward pass."""
    import torch

    leaves = [inputs.arrays[name].detach().requires_grad_() for name in ("x", *case.parameters)]
    if case.direction == "fwd":
        return torch_call(case, inputs, lambda: [norm(*leaves).detach()])
    y, dy = norm(*leaves), inputs.arrays["dy"]
    return torch_call(case, inputs, lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))


def pytorchs(case: NormCase) -> Callable[..., Any]:
    """Returns PyTorch's norm."""
    import torch

    shape = (case.columns,)
    if case.kind == "rms":
        return lambda x, weight: torch.nn.functional.rms_norm(x, shape, weight, EPSILON)
    return lambda x, weight, bias: torch.nn.functional.layer_norm(x, shape, weight, bias, EPSILON)


def build_ours(case: NormCase, inputs: Inputs) -> Ready:
    """Builds the norm of `torch_bridge`."""
    from torch_bridge import functional

    norm = functional.rms_norm if case.kind == "rms" else functional.layer_norm
    implementation: Any = "triton" if inputs.arrays["x"].is_cuda else None
    return torch_pass(functools.partial(norm, eps=EPSILON, implementation=implementation), case, inputs)


def build_eager(case: NormCase, inputs: Inputs) -> Ready:
    """Builds the norm of PyTorch's own kernels."""
    return torch_pass(pytorchs(case), case, inputs)


_compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}


def build_compiled(case: NormCase, inputs: Inputs) -> Ready:
    """Builds PyTorch's norm with `torch.compile`, which compiles once for any number of rows at an agent's shapes."""
    import torch
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False  # the backward pass runs more than once
    any_rows = (case.rows, case.columns) in cases.RECURRENT_NORMS
    key = (case.kind, case.dtype, case.columns, None if any_rows else case.rows)
    if key not in _compiled:
        torch._dynamo.reset()  # PyTorch limits how often it compiles a function
        _compiled.clear()
        _compiled[key] = torch.compile(pytorchs(case), fullgraph=True, dynamic=None if any_rows else False)

    def norm(x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        if any_rows:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        return _compiled[key](x, *parameters)

    return torch_pass(norm, case, inputs)


def build_copy(case: NormCase, inputs: Inputs) -> Ready:
    """Builds a copy that reads and writes as many bytes in all."""
    import torch

    place = inputs.arrays["x"].device
    source, target = (torch.empty(case.bytes // 2, dtype=torch.uint8, device=place) for _ in range(2))
    source.zero_()
    return torch_call(case, inputs, lambda: [target.copy_(source)])


def formula(case: NormCase) -> Callable[..., jax.Array]:
    """Returns the norm by its formula, in float32."""

    def norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        wide = x.astype(jnp.float32)
        if case.kind == "layer":
            wide = wide - wide.mean(-1, keepdims=True)
        y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + EPSILON) * weight
        return (y if bias is None else y + bias).astype(x.dtype)

    return norm


def through_jaxrnn(case: NormCase) -> Callable[..., jax.Array]:
    """Returns the norm of `jaxrnn`, which launches the kernels inside jit."""
    norm = getattr(jaxrnn, f"{case.kind}_norm")
    return functools.partial(norm, epsilon=EPSILON, implementation="triton")


def program(case: NormCase, norm: Callable[..., Any], stopwatch: timing.Stopwatch) -> Callable[..., Any]:
    """Returns a function to jit that starts the stopwatch before the timed part and stops it after that part.

    Its events are recorded on the stream that the program runs on.
    """

    def begin(x: jax.Array, *after: jax.Array) -> jax.Array:
        place = jax.ShapeDtypeStruct(x.shape, x.dtype)
        call = buffer_callback(lambda ctx, out, *_: stopwatch.begin(ctx), [place], input_output_aliases={0: 0})
        return call(x, *after)[0]

    def end(*results: jax.Array) -> jax.Array:
        place = jax.ShapeDtypeStruct((1,), jnp.int32)
        return buffer_callback(lambda ctx, out, *_: stopwatch.end(ctx), [place])(*results)[0]

    def forward(x: jax.Array, dy: jax.Array, *parameters: jax.Array) -> Any:
        y = norm(begin(x), *parameters)
        return [y], end(y)

    def backward(x: jax.Array, dy: jax.Array, *parameters: jax.Array) -> Any:
        y, pull = jax.vjp(norm, x, *parameters)
        gradients = pull(begin(dy, y))
        return gradients, end(*gradients)

    return forward if case.direction == "fwd" else backward


# The functions that programs of JAX differentiate, by provider.
FUNCTIONS: dict[str, Callable[[NormCase], Callable[..., jax.Array]]] = {"jaxrnn": through_jaxrnn, "xla": formula}


def lower_program(name: str, case: NormCase, stopwatch: timing.Stopwatch) -> Any:
    """Traces a provider's program, from shapes alone."""
    dtype = cases.NUMPY_DTYPES[case.dtype]
    place = jax.sharding.SingleDeviceSharding(jax.devices()[ORDINAL])
    rows = jax.ShapeDtypeStruct((case.rows, case.columns), dtype, sharding=place)
    parameters = [jax.ShapeDtypeStruct((case.columns,), dtype, sharding=place) for _ in case.parameters]
    return jax.jit(program(case, FUNCTIONS[name](case), stopwatch)).lower(rows, rows, *parameters)


def jax_call(name: str, case: NormCase, inputs: Inputs) -> Ready:
    """Builds a call of a provider's compiled program."""
    import torch

    compiled = inputs.programs[name, case].result()
    with torch.cuda.device_of(inputs.arrays["x"]):  # PyTorch exports only tensors of its current device
        operands = [jax.dlpack.from_dlpack(inputs.arrays[name]) for name in ("x", "dy", *case.parameters)]

    def run() -> Any:
        results, token = compiled(*operands)
        token.block_until_ready()
        return results

    def canonical(results: Any) -> Tensors:
        return {x: torch.utils.dlpack.from_dlpack(y) for x, y in zip(case.results, results, strict=True)}

    return Ready(run, canonical)


OURS, COPY = "torch_bridge", "copy"
ALL = (
    Provider(OURS, build_ours),
    Provider("jaxrnn", functools.partial(jax_call, "jaxrnn")),
    Provider("torch-compile", build_compiled),
    Provider("torch", build_eager),
    Provider("xla", functools.partial(jax_call, "xla")),
    Provider(COPY, build_copy),
)  # fmt: skip


# Compilation before timing.


def problems(case: NormCase) -> list[Any]:
    """Returns the problems that `torch_bridge` launches for a case."""
    from torch_bridge.norms import Problem

    dtype = cases.DTYPES[case.dtype]
    saved = {"rstd": "float32"} | ({"mean": "float32"} if case.kind == "layer" else {})
    rows = {"x": dtype, "weight": dtype}
    forward = rows | {"y": dtype} | saved | ({"bias": dtype} if case.kind == "layer" else {})
    backward = rows | {"dy": dtype, "dx": dtype} | saved | {f"d{name}": dtype for name in case.parameters}
    dtypes = {"fwd": tuple(forward.items()), "bwd": tuple(backward.items())}
    directions: tuple[Direction, ...] = ("fwd",) if case.direction == "fwd" else ("fwd", "bwd")
    return [Problem(case.kind, d, 1, case.rows, case.columns, EPSILON, dtypes[d]) for d in directions]


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
    inputs: Inputs,
    truth: Truth,
    settings: Settings,
    progress: Progress = lambda _: None,
) -> list[Row]:
    """Returns a row for every provider, in order."""
    rows: dict[str, Row] = {}
    clocks: dict[str, timing.Clock] = {}
    for provider in providers:
        name = provider.name
        try:
            ready = provider.build(case, inputs)
            assert isinstance(ready, Ready)
        except Exception as error:  # a provider that fails becomes a row, and the run goes on
            rows[name] = provider.row(case).failed(error)
            continue
        rows[name] = provider.row(case) if name == COPY else oracle.check(provider, ready, truth)
        if rows[name].status == "measured":
            clocks[name] = timing.stopwatch_clock(ready.run, inputs.stopwatch)
    settings = dataclasses.replace(settings, rounds=4 * settings.rounds)
    harness.time_rows(rows, clocks, settings, progress, scale=1e6)
    copied = rows[COPY].value if COPY in rows else None
    return [as_share(case, row, copied) for row in rows.values()]


def as_share(case: NormCase, row: Row, copied: float | None) -> Row:
    """Returns a row of microseconds as one of the share of a copy's bandwidth; the copy takes `copied` microseconds."""
    target = case.target if row.provider in (OURS, "jaxrnn") else None
    row = dataclasses.replace(row, ours=OURS, unit="of copy", target=target, us=row.value)
    if row.us is None or row.low is None or row.high is None:
        return row
    if copied is None:
        reason = f"{row.us:.4g} us, but no copy to compare with"
        return dataclasses.replace(row, status="failed", reason=reason, value=None, low=None, high=None)
    note = f"{row.us:.4g} us, {case.bytes / row.us / 1e6:.3g} TB/s"
    return dataclasses.replace(row, value=copied / row.us, low=copied / row.high, high=copied / row.low, note=note)


def norm(settings: Settings, progress: Progress, chosen: Sequence[NormCase] = cases.NORMS) -> Iterator[Row]:
    """Yields the share of a copy's bandwidth that each provider reaches. Without a GPU, the host's time is measured."""
    chosen = [case for case in chosen if settings.wants_case(str(case))]
    if not chosen:
        return
    if importlib.util.find_spec("torch") is None:
        raise SystemExit("the suite norm needs PyTorch, whose copy it compares with: pip install '.[torch]'")
    import torch

    # always measure the copy, because every figure is a share of its bandwidth
    providers = [provider for provider in ALL if settings.wants(provider.name) or provider.name == COPY]
    names = [provider.name for provider in providers]
    on_gpu = torch.cuda.is_available()
    place = f"cuda:{ORDINAL}" if on_gpu else "cpu"
    stopwatch = timing.DeviceStopwatch(ORDINAL) if on_gpu else timing.HostStopwatch()
    progress("compile")
    if on_gpu and {OURS, "jaxrnn"} & {*names}:
        compile_kernels(chosen)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = {
            (name, case): harness.compile_in(pool, functools.partial(lower_program, name, case, stopwatch))
            for name in names
            for case in chosen
            if name in FUNCTIONS
        }
    before: NormCase | None = None
    for case in chosen:
        shape = dataclasses.replace(case, direction="fwd")
        if shape != before:
            arrays: Tensors = {}
            arrays = make_arrays(case, place)
            truth, before = Truth(case, arrays), shape
        progress(str(case))
        yield from time_case(case, providers, Inputs(arrays, stopwatch, programs), truth, settings, progress)
        if on_gpu:
            torch.cuda.empty_cache()
