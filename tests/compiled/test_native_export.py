"""Tests programs with native launches that are compiled and exported for a GPU, on a machine without one.

A fresh process, without PyTorch and Triton, then runs the exported program on the CPU: XLA calls the handler with its
buffers, and a driver records the launches. No kernel runs.
"""

import functools
import re

import calls
import jax
import jax.numpy as jnp
import native_handler
import numpy as np
import pytest
from cases import Case
from pretended import pretend_gpus
from programs import recurrence, seeds

import jaxrnn
from benchmarks.problems import make_problem
from jaxrnn._bridge.native import TARGET, call
from jaxrnn.kernel_vjp import spec
from torch_bridge.tiling import Device

pytestmark = pytest.mark.compile_only

A100, H100 = Device(80, 108, 166_912), Device(90, 132, 232_448)


@pytest.fixture
def native(monkeypatch, tmp_path):
    """Chooses the native launch; returns the binaries that programs are given, in the order of their launches."""
    monkeypatch.setenv("JAXRNN_LAUNCH", "native")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    from torch_bridge import gpu, kernel_cache

    monkeypatch.setattr(gpu, "can_capture_early_launches", lambda: True)
    monkeypatch.setattr(kernel_cache, "load_or_compile", lambda compile, _: compile())  # kernels with their PTX
    given, original = [], call.attributes

    def attributes(binaries, names):
        given.append((binaries, names))
        return original(binaries, names)

    monkeypatch.setattr(call, "attributes", attributes)
    return given


def norm(shape, implementation="triton"):
    def loss(arrays):
        return jnp.sum(jnp.sin(jaxrnn.rms_norm(arrays["x"], arrays["weight"], implementation=implementation)))

    return jax.grad(loss), {"x": jax.random.normal(jax.random.key(0), shape), "weight": jnp.ones(shape[-1:])}


# The program, the GPU it is compiled for, and the number of kernels in each of its launches.
PROGRAMS = {
    "gru-a100": (recurrence, Case("gru", T=4, B=3, H=48, D=5), A100, [1, 1]),
    "gru-a100-in-place": (recurrence, Case("gru", T=4, B=3, H=64, D=5, precision="default"), A100, [1, 1]),
    "lstm-a100-cooperative": (recurrence, Case("lstm", T=3, B=2, H=512, D=5), A100, [1, 1]),
    "gru-h100-split": (recurrence, Case("gru", T=3, B=64, H=512, D=8), H100, [1, 1]),
    "gru-h100-weight-grads": (recurrence, Case("gru", T=128, B=64, H=128, D=128), H100, [1, 1, 1, 2]),
    "seeds-a100": (seeds, Case("gru", T=2, B=4, H=48, D=5), A100, [1, 1]),
    "norm-h100": (norm, (2, 3, 256), H100, [1, 2]),
}


def layer_norm(shape, implementation="triton"):
    def loss(arrays):
        arrays, x = dict(arrays), arrays["x"]
        del arrays["x"]
        y, total = jaxrnn.layer_norm(x, **arrays, implementation=implementation)
        return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.sin(total))

    keys = dict(zip(("x", "residual", "weight", "bias"), jax.random.split(jax.random.key(0), 4), strict=True))
    shapes = {"weight": shape[-1:], "bias": shape[-1:]}
    return jax.value_and_grad(loss), {name: jax.random.normal(k, shapes.get(name, shape)) for name, k in keys.items()}


def derivative(case, implementation="triton"):
    """Returns the function that computes the derivative of outputs and gradients along the arrays, and the arrays."""
    function, arrays = recurrence(case, implementation)

    def along(x):
        return x if jnp.issubdtype(x.dtype, jnp.floating) else np.zeros(x.shape, jax.dtypes.float0)

    return (lambda arrays: jax.jvp(function, (arrays,), (jax.tree.map(along, arrays),))[1]), arrays


OF_TWO_PLATFORMS = {name: program[:3] for name, program in PROGRAMS.items() if "norm" not in name} | {
    "gru-h100-reverse-weight-grads": (recurrence, Case("gru", T=128, B=64, H=128, D=128, reverse=True), H100),
    "mgu-a100": (recurrence, Case("mgu", T=4, B=3, H=48, D=5, reset_state="tbh"), A100),
    "rms-norm-gru-a100": (recurrence, Case("rms_norm_gru", T=4, B=3, H=24, D=5), A100),
    "gru-a100-derivative": (derivative, Case("gru", T=4, B=3, H=48, D=5), A100),
    "lstm-a100-derivative": (derivative, Case("lstm", T=4, B=3, H=48, D=5), A100),
    "rms-norm": (norm, (2, 3, 256), A100),
    "layer-norm": (layer_norm, (4, 256), A100),
}


@pytest.mark.parametrize("name", OF_TWO_PLATFORMS)
def test_an_exported_program_of_two_platforms_runs_on_the_cpu(name, native, monkeypatch):
    """It has the binaries of the kernels for the GPU, and operations of XLA for the CPU."""
    make, of, device = OF_TWO_PLATFORMS[name]
    with monkeypatch.context() as pretended:
        pretend_gpus(pretended, device)
        function, arrays = make(of)
        checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
        program = jax.export.export(jax.jit(function), platforms=("cuda", "cpu"), disabled_checks=checks)(arrays)
        assert len(native) > 0 and f"custom_call @{TARGET}" in program.mlir_module()
    got = jax.export.deserialize(program.serialize()).call(arrays)
    calls.assert_close(got, jax.jit(make(of, "xla")[0])(arrays), 2.0**-10)


def parameter_sizes(binary, ptx):
    """Returns the sizes in bytes of a kernel's parameters, from its PTX."""
    entry = ptx[ptx.index(f".entry {binary.name}(") :]
    sizes = {"u64": "8", "u32": "4", "f32": "4", "s32": "4", "b32": "4", "b64": "8"}
    return "".join(sizes[kind] for kind in re.findall(r"\.param \.(\w+)", entry[: entry.index(")\n")]))


@pytest.mark.quick
@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exported_program_launches_its_kernels_without_torch_and_triton(name, native, monkeypatch, tmp_path):
    from torch_bridge.launch import Binary

    make, of, device, counts = PROGRAMS[name]
    pretend_gpus(monkeypatch, device)
    if "in-place" in name:
        monkeypatch.setattr(spec, "_IN_PLACE_BYTES", 0)
    ptx, original = {}, Binary.of.__func__

    def remember(cls, kernel, compiled, capability):
        binary = original(cls, kernel, compiled, capability)
        ptx[binary.cubin] = compiled.asm["ptx"]
        return binary

    monkeypatch.setattr(Binary, "of", classmethod(remember))
    function, arrays = make(of)
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET), jax.export.DisabledSafetyCheck.platform()]
    exported = jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=checks)(arrays)
    binaries = [binary for each, _ in native for binary in each]
    assert [len(each) for each, _ in native] == counts
    assert all(binary.capability == device.capability and binary.cubin[:4] == b"\x7fELF" for binary in binaries)

    text = exported.mlir_module()
    assert set(re.findall(r"custom_call @(\w+)", text)) == {TARGET}
    for binary in binaries:
        escaped = "".join(
            chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:02X}" for byte in binary.cubin[:200]
        )
        assert escaped.replace("\\5C", "\\\\") in text
    # a workspace of zeros is an operand whose memory is also that of a result; so are residuals in place
    zeroed = sum(len(names) - len(set(names)) for _, names in native)
    assert zeroed == (2 if "H512" in str(of) else 0)
    assert text.count("#stablehlo.output_operand_alias<") == zeroed + (2 if "in-place" in name else 0)

    path = tmp_path / "program"
    path.write_bytes(exported.serialize())
    names = {binary.name: parameter_sizes(binary, ptx[binary.cubin]) for binary in binaries}
    shapes = {key: (x.shape, str(x.dtype)) for key, x in arrays.items()}
    done = native_handler.run(
        f"""
program = jax.export.deserialize(bytearray(open({str(path)!r}, "rb").read()))
assert set(program.platforms) == {{"cuda"}} and {TARGET!r} in program.mlir_module()
arrays = {{name: jnp.ones(shape, dtype) for name, (shape, dtype) in {shapes!r}.items()}}
jax.block_until_ready(jax.jit(program.call)(arrays))
""",
        parameters=";".join(f"{kernel}:{sizes}" for kernel, sizes in names.items()),
        FAKE_CUDA_DEVICE=f"{device.capability},{device.multiprocessors},{device.shared_memory},12040,1",
    )
    launches = done.named("cuLaunchKernelEx")
    assert len(launches) == len(binaries)
    assert len(done.named("cuModuleLoadData")) == len({binary.cubin for binary in binaries})
    assert sorted(described(launch, names) for launch in launches) == sorted(map(expected, binaries))


def described(text, sizes):
    """Returns what the driver recorded about a launch, without the addresses of arrays.

    `sizes` are those of `parameter_sizes` by kernel. An address is a number of eight bytes, and not a small one.
    """
    name, _, rest = text.partition(" ")
    found = dict(field.split("=") for field in rest.split())
    values = [int(x, 16) for x in found["parameters"].split(",")]
    is_address = [size == "8" and x >= 2**20 for size, x in zip(sizes[name], values, strict=True)]
    assert all(x % 16 == 0 for x, address in zip(values, is_address, strict=True) if address)
    return name, found["grid"], found["block"], found["shared"], found["attributes"], tuple(
        "array" if address else x for x, address in zip(values, is_address, strict=True)
    )  # fmt: skip


def expected(binary):
    """Returns what the driver should record about a launch."""
    attributes = ["6:1"] * binary.early + ["2:1"] * binary.cooperative
    values = ["array" if kind == "array" else call._encode(kind, value, ())[1] for kind, value in binary.parameters]
    return (
        binary.name, f"{binary.grid},1,1", f"{binary.threads},1,1", str(binary.shared_memory), ",".join(attributes),
        tuple(values),
    )  # fmt: skip


@pytest.mark.parametrize("axes", ["Auto", "Explicit", "shard_map"])
def test_each_device_of_a_mesh_launches_its_shard(axes, tmp_path):
    """Over a mesh of `Auto` axes, XLA partitions the launch."""
    sizes = "88884488"
    done = native_handler.run(
        f"axes = {axes!r}"
        + """
import functools
import pytest
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from pretended import pretend_gpus
import jaxrnn
from jaxrnn._bridge import lowering
from jaxrnn._bridge.native import NativeMethod
from jaxrnn._bridge.primitive import launch_shard_p
from torch_bridge.tiling import Device

device, method = Device(80, 108, 166_912), NativeMethod()
devices = jax.devices()
assert len(devices) == 2
pretend_gpus(pytest.MonkeyPatch(), device)
lowering._METHODS["cpu"] = lambda: method
shard = lowering.shard_function(lambda: (device, ()), lambda: method)
mlir.register_lowering(launch_shard_p, functools.partial(lowering._lower_shard, shard), platform="cpu")
axis_type = AxisType.Explicit if axes == "Explicit" else AxisType.Auto
mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,), devices=devices)
x = jax.device_put(jnp.ones((4, 3, 256)), NamedSharding(mesh, P("data")))
norm = functools.partial(jaxrnn.rms_norm, implementation="triton")
if axes == "shard_map":
    norm = jax.shard_map(norm, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
y = jax.block_until_ready(jax.jit(norm)(x, jnp.ones(256)))
assert y.sharding.shard_shape(y.shape) == (2, 3, 256), y.sharding
""",
        blocked=(),
        parameters=f"rms_norm_fwd:{sizes}",
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        XDG_CACHE_HOME=str(tmp_path),
        TRITON_INTERPRET="0",
    )
    rows = [described(text, {"rms_norm_fwd": sizes})[-1][3] for text in done.named("cuLaunchKernelEx")]
    assert rows == [6, 6]  # of 12


def test_kernels_are_compiled_from_the_trace_on_and_loaded_by_the_handler_alone(native, monkeypatch):
    from torch_bridge import compiler

    events, begin, ensure = [], compiler.begin_loading, compiler.ensure_loaded

    def record(kind, function, *what):
        events.append((kind, what))
        return function(*what)

    monkeypatch.setattr(compiler, "begin_loading", functools.partial(record, "begin", begin))
    monkeypatch.setattr(compiler, "ensure_loaded", functools.partial(record, "ensure", ensure))
    pretend_gpus(monkeypatch, A100)
    function, arrays = recurrence(Case("gru", T=2, B=4, H=48))
    traced = jax.jit(function).trace(arrays)
    assert {kind for kind, _ in events} == {"begin"}
    begun = {what for _, what in events}
    traced.lower(lowering_platforms=("cuda",))
    assert {what for kind, what in events if kind == "ensure"} == begun and len(begun) == 2
    assert {ordinal for ordinal, *_ in begun} == {None}


def make_launch(name):
    from torch_bridge import input_projections, norms, recurrences, weight_grads

    if name == "loop-a100":
        return recurrences.Launch(make_problem("gru", "fwd", "tf32", 64, 8), A100)
    if name == "loop-h100-rows":
        return recurrences.Launch(make_problem("gru", "bwd", "bf16", 512, 64), H100)
    if name == "weight-grads-h100":
        arrays = tuple((name, "float32") for name in ("x", "hs", "h0", "dxp", "dhn"))
        return weight_grads.Launch(weight_grads.Problem(1, 1, 64, 64, 128, 128, 384, arrays), H100)
    if name == "projection-h100":
        arrays = (("x", "bfloat16"), ("w_ih_t", "bfloat16"), ("bias", "float32"), ("xp", "float16"))
        return input_projections.Launch(input_projections.Problem(1, 8192, 64, 384, arrays), H100)
    assert name == "norm-h100"
    arrays = tuple((name, "float32") for name in ("dy", "x", "weight", "rstd", "dx", "dweight"))
    return norms.Launch(norms.Problem("rms", "bwd", 1, 512, 256, 1e-6, arrays), H100)


# The number of kernels of each launch.
LAUNCHES = {"loop-a100": 1, "loop-h100-rows": 1, "weight-grads-h100": 2, "projection-h100": 1, "norm-h100": 2}


@pytest.mark.parametrize("name", LAUNCHES)
def test_binaries_have_the_parameters_and_the_block_size_of_their_ptx(name):
    launch, count = make_launch(name), LAUNCHES[name]
    binaries, compiled = launch.binaries(), launch.compile()
    assert len(binaries) == count
    for binary, kernel, one in zip(binaries, launch.kernels, compiled, strict=True):
        ptx = one.asm["ptx"]
        sizes = {"array": "8", "null": "8", "i64": "8", "i32": "4", "fp32": "4"}
        assert "".join(sizes[kind] for kind, _ in binary.parameters) == parameter_sizes(binary, ptx)
        assert f".reqntid {binary.threads}\n" in ptx
        assert binary.early == ("griddepcontrol.wait" in ptx)
        given = {name: value for kind, name in binary.parameters for value in [kind] if kind == "array"}
        assert list(given) == [name for name, _ in kernel.dtypes]
        assert binary.grid == kernel.grid and binary.shared_memory == one.metadata.shared


def test_a_kernel_that_needs_scratch_memory_raises(monkeypatch):
    from torch_bridge.launch import Binary

    launch = make_launch("loop-a100")
    (compiled,) = launch.compile()
    metadata = compiled.metadata._replace(global_scratch_size=128)
    monkeypatch.setattr(compiled, "metadata", metadata)
    with pytest.raises(NotImplementedError, match=r"needs scratch memory .* launch through the callback"):
        Binary.of(launch.kernels[0], compiled, 80)


def test_a_program_with_callbacks_cannot_be_exported(native, monkeypatch):
    """The default, which the native launch is the alternative to."""
    from torch_bridge import compiler

    monkeypatch.setenv("JAXRNN_LAUNCH", "callback")
    monkeypatch.setattr(compiler, "load_kernel", lambda compiled, _: compiled)
    pretend_gpus(monkeypatch, A100)
    function, arrays = recurrence(Case("gru", T=2, B=2, H=24, D=3))
    checks = [jax.export.DisabledSafetyCheck.custom_call(TARGET)]
    with pytest.raises(NotImplementedError, match="host_callbacks"):
        jax.export.export(jax.jit(function), platforms=("cuda",), disabled_checks=checks)(arrays)
    assert not native
