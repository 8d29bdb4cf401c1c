"""Exports programs with kernels, and runs them in fresh processes in which PyTorch and Triton cannot be imported."""

import subprocess
import sys

import calls
import child
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_modules import load
from jax.export import DisabledSafetyCheck

import jaxrnn
from jaxrnn._bridge.native.target import TARGET
from jaxrnn.linen import ScannedRNN

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


def policy():
    """Returns a policy that runs eight steps, and its arguments."""
    rnn = ScannedRNN(implementation="triton")
    carry = ScannedRNN.initialize_carry(16, 128)
    inputs = jax.random.normal(jax.random.key(0), (8, 16, 128)), jax.random.bernoulli(jax.random.key(1), 0.1, (8, 16))
    params = rnn.init(jax.random.key(2), carry, inputs)
    return rnn.apply, (params, carry, inputs)


def loss_with_gradient():
    """Returns a loss of an LSTM whose programs wait for one another, with its gradient."""
    *arguments, _ = calls.arguments("lstm", (8,), steps=16, hidden=512)
    return calls.with_gradients(calls.runner("lstm", "triton", precision=None)), (*arguments, None)


def training_step():
    """Returns an update of a recurrent PPO agent, rollout included, and its state."""
    ppo, training = load("recurrent_ppo"), load("training")
    config = ppo.Config(implementation="triton", num_envs=16, rollout_steps=16, total_steps=512)
    init, run = training.make_train(ppo.make_ppo, config)
    return run, (init(jnp.arange(1)),)


PROGRAMS = {"policy": policy, "loss with gradient": loss_with_gradient, "training step": training_step}


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def flat(function, arguments):
    """Returns the function from arrays to arrays, random keys as their data, and the arrays of the arguments."""
    leaves, tree = jax.tree.flatten(arguments)
    data = [jax.random.key_data(x) if is_key(x) else jnp.asarray(x) for x in leaves]

    def run(*arrays):
        given = [jax.random.wrap_key_data(x) if is_key(was) else x for x, was in zip(arrays, leaves, strict=True)]
        results = jax.tree.leaves(function(*jax.tree.unflatten(tree, given)))
        return [jax.random.key_data(x) if is_key(x) else x for x in results]

    return run, data


RUN = """
import sys
sys.modules.update(dict.fromkeys(("torch", "triton")))
import jax, numpy as np, pathlib
import jaxrnn
jaxrnn.register_native_launch()
given = np.load("given.npz")
program = jax.export.deserialize(pathlib.Path("program").read_bytes())
results = program.call(*(given[f"arr_{k}"] for k in range(len(given))))
np.savez("results.npz", *map(np.asarray, results))
assert sys.modules["torch"] is None and sys.modules["triton"] is None
"""


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_exported_program_gives_the_same_bits_without_torch_and_triton(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRNN_LAUNCH", "native")
    assert jaxrnn.launch_method().name == "native"
    run, arrays = flat(*PROGRAMS[name]())
    arrays = [np.asarray(x) for x in arrays]
    exported = jax.export.export(jax.jit(run), disabled_checks=[DisabledSafetyCheck.custom_call(TARGET)])(*arrays)
    assert exported.platforms == ("cuda",) and f"custom_call @{TARGET}" in exported.mlir_module()
    want = [np.asarray(x) for x in jax.jit(run)(*arrays)]

    (tmp_path / "program").write_bytes(exported.serialize())
    np.savez(tmp_path / "given.npz", *arrays)
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=child.environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    results = np.load(tmp_path / "results.npz")
    got = [results[f"arr_{k}"] for k in range(len(want))]
    assert len(want) == len(results) > 1
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_damaged_kernel_of_an_exported_program_raises(monkeypatch):
    monkeypatch.setenv("JAXRNN_LAUNCH", "native")
    norm = jax.jit(lambda x: jaxrnn.rms_norm(x, implementation="triton"))
    x = jnp.ones((8, 256))
    data = bytes(jax.export.export(norm, disabled_checks=[DisabledSafetyCheck.custom_call(TARGET)])(x).serialize())
    at = data.index(b"\x7fELF") + 100
    damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    np.testing.assert_array_equal(jax.export.deserialize(bytearray(data)).call(x), norm(x))
    with pytest.raises(jax.errors.JaxRuntimeError, match="is damaged, because its digest is not its key"):
        jax.block_until_ready(jax.export.deserialize(bytearray(damaged)).call(x))


CACHED = """
import sys
{before}
import jax, calls
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name))
*arguments, _ = calls.arguments("gru", (8,), steps=16, hidden={hidden})
program = jax.jit(calls.with_gradients(calls.runner("gru", "triton", precision=None)))
seen.clear()
program(*arguments, None)
print([name.rpartition("/")[2] for name in seen if "compilation_cache/cache_" in name])
"""


def test_a_second_process_compiles_nothing(tmp_path):
    caches = child.environment(
        JAXRNN_LAUNCH="native", TRITON_CACHE_DIR=str(tmp_path / "triton"),
        JAX_COMPILATION_CACHE_DIR=str(tmp_path / "jax"), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )  # fmt: skip

    def run(hidden, before=""):
        program = CACHED.format(hidden=hidden, before=before)
        done = subprocess.run([sys.executable, "-c", program], env=caches, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().split("\n")[-1]

    without_triton = "import triton; triton.compile = None"
    assert "cache_misses" in run(128)
    assert run(128, without_triton) == "['cache_hits']"
    assert "cache_hits" not in run(120)  # another kernel
