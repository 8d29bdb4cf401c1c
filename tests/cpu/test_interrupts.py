"""Tests the counts of `interrupts`, in processes that stand for those of `tests/gpu/test_stress_processes.py`."""

import subprocess
import sys
from pathlib import Path

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
