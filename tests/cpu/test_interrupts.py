"""Tests the counts of `interrupts`, in processes that stand for those of `tests/gpu/test_stress_processes.py`.

Also tests that Ctrl-C leaves the imports of the first call whole.
"""

import subprocess
import sys
from pathlib import Path

import child
import pytest

PROGRAM = """
import gc, sys, time
import interrupts

def in_a_callback():
    gc.callbacks.append(lambda phase, _: time.sleep(1) if phase == "start" else None)
    gc.collect()
    gc.callbacks.clear()

def swallowed():
    try:
        time.sleep(1)
    except KeyboardInterrupt:
        pass

runs = {"stopped": lambda: time.sleep(5), "late": lambda: None, "dropped": in_a_callback, "swallowed": swallowed}
sent = interrupts.Interrupts()
for name in sys.argv[1:]:
    sent.send(runs[name], 0.3)
sent.say()
"""


def run(*names):
    """Returns the process that interrupted the functions with these names."""
    tests = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *names], cwd=tests, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("names", "dropped"), [(["stopped", "late"], 0), (["dropped", "stopped"], 1)])
def test_dropped_interrupts_are_counted(names, dropped):
    done = run(*names)
    assert done.stdout == f"stopped 2 times, {dropped} at the second interrupt\n", done.stderr


def test_an_interrupt_that_the_program_swallows_is_a_failure():
    done = run("swallowed")
    assert done.returncode == 1 and "AssertionError: ([], 1)" in done.stderr


IMPORTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

def call():
    if sys.argv[2] == "jax":
        import jax.numpy as jnp, jaxrnn
        params = jaxrnn.GRUParams(jnp.ones((2, 12)), jnp.ones((4, 12)), jnp.ones(12), jnp.ones(4))
        return jaxrnn.gru(params, jnp.ones((3, 4)), jnp.ones((5, 3, 2)), implementation="triton")[1]
    import torch, torch_bridge.nn
    return torch_bridge.nn.GRU(2, 4, implementation="triton")(torch.ones(5, 3, 2))[0]

signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[2] == "jax":
    import jaxrnn
else:
    import torch_bridge.nn
sys.meta_path.insert(0, Finder())
try:
    call()
except KeyboardInterrupt:
    print("interrupted")
assert len(call()) == 5
print("called")
"""


@pytest.mark.interpret
@pytest.mark.torch
@pytest.mark.parametrize("front", ["jax", "torch"])
@pytest.mark.parametrize(
    "module",
    [
        "triton.language.core", "triton.runtime.cache", "torch_bridge.compiler", "torch_bridge.recurrences",
        "torch_bridge.kernels.loops.streamed",
    ],
)  # fmt: skip
def test_ctrl_c_during_the_imports_of_the_first_call_leaves_the_next_ones_whole(module, front):
    environment = child.environment(TRITON_INTERPRET="1")
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, module, front], env=environment, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.stdout.split() == ["interrupted", "called"], done.stderr
