"""JAX and Triton compile and export kernels where PyTorch is not installed, and a second process compiles nothing."""

import subprocess
import sys

import child
import pytest

pytestmark = pytest.mark.compile_only


# Compiles a training step for an A100: everything up to the call of XLA, which needs the GPU.
PROGRAM = """
import sys, time
sys.modules["torch"] = None
import jax, jax.numpy as jnp
from jax.export import DisabledSafetyCheck
from pytest import MonkeyPatch
import jaxrnn
from pretended import pretend_gpus
from torch_bridge.tiling import PROFILES

patch = MonkeyPatch()
pretend_gpus(patch, PROFILES["a100"])
assert jaxrnn.launch_method().name == "native"
zeros = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
params = jaxrnn.GRUParams(zeros(16, 384), zeros(128, 384), zeros(384), zeros(128))
carry, xs = zeros(8, 128), zeros(32, 8, 16)

def loss(params, carry, xs):
    carry, ys = jaxrnn.gru(params, carry, xs, implementation="triton")
    return jnp.sum(jaxrnn.rms_norm(ys, implementation="triton"))

checks = [DisabledSafetyCheck.custom_call("jaxrnn_launch_v1"), DisabledSafetyCheck.platform()]
exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=("cuda",), disabled_checks=checks)(params, carry, xs)
print(exported.mlir_module().count("custom_call @jaxrnn_launch_v1"), sys.modules["torch"], len(exported.serialize()))
"""


def test_kernels_are_compiled_and_exported_without_torch(tmp_path):
    environment = child.environment(
        TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path), JAX_PLATFORMS="cpu", JAXRNN_LAUNCH=""
    )
    printed, binaries = [], []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
        binaries.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")})
    assert printed[0] == printed[1] and printed[0].split()[:2] == ["4", "None"]
    assert len(binaries[0]) == 4 and binaries[0] == binaries[1]
