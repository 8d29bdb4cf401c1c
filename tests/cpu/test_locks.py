"""Tests that a forked child waits for no lock of a thread of its parent."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What has a lock that a thread may hold while another one forks; `cached_property` has one until Python 3.12.
HOLDERS = {
    "threading": {"Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier", "Timer"},
    "_thread": {"allocate_lock", "allocate", "RLock", "LockType"},
    "functools": {"cached_property"},
    "queue": {"Queue", "LifoQueue", "PriorityQueue", "SimpleQueue"},
    "concurrent.futures": {"ThreadPoolExecutor", "ProcessPoolExecutor"},
    "multiprocessing": {"Lock", "RLock", "Condition", "Semaphore", "Event", "Queue", "Pool", "Manager"},
}


def holders_in(source):
    """Returns the names in a program that are those of `HOLDERS`, whatever the program calls them."""
    tree = ast.parse(source)
    names = {}  # of modules, and of what is imported from them
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    listed = {f"{module}.{name}" for module, members in HOLDERS.items() for name in members}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used.add(names.get(node.id, ""))
        elif isinstance(node, ast.Attribute):
            module = ast.unparse(node.value)
            used.add(f"{names.get(module, module)}.{node.attr}")
    return used & listed


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nx = threading.Lock()", "import threading as t\nx = t.Condition()",
        "from threading import RLock as R\nx = R()", "import functools\n@functools.cached_property\ndef f(): pass",
        "from functools import cached_property\n@cached_property\ndef f(): pass", "import queue\nx = [queue.Queue]",
        "import concurrent.futures\nx = concurrent.futures.ThreadPoolExecutor()",
        "from concurrent import futures\nx = futures.ThreadPoolExecutor()",
    ],
)  # fmt: skip
def test_holders_are_found_by_any_name(source):
    assert len(holders_in(source)) == 1


def test_all_locks_are_those_of_one_module():
    paths = [path for package in ("jaxrnn", "torch_bridge") for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)): holders_in(path.read_text()) for path in paths}
    assert {path for path, names in found.items() if names} == {"torch_bridge/locks.py"}


def run(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# Forks while a thread holds what `hold` takes; the child runs `use`, and is killed if it waits.
FORKS = """
import os, signal, sys, threading
from torch_bridge.locks import Lock, Semaphore
{setup}
held, release = threading.Event(), threading.Event()
def in_thread():
    {hold}
    held.set()
    release.wait()
threading.Thread(target=in_thread).start()
held.wait()
pid = os.fork()
if not pid:
    signal.alarm(20)
    {use}
    os.write(1, b"child\\n")
    os._exit(0)
status = os.waitpid(pid, 0)[1]
release.set()
sys.exit(status)
"""


@pytest.mark.parametrize("kind", ["Lock()", "Semaphore(2)"])
def test_a_lock_that_a_thread_holds_is_free_in_a_child(kind):
    both = "lock.acquire(); lock.acquire()"
    assert run(FORKS.format(setup=f"lock = {kind}", hold=both, use=both)) == ["child"]


def test_a_lock_of_the_thread_that_forks_stays_its_own():
    use = """
    waits = threading.Thread(target=lambda: lock.__enter__(), daemon=True)
    waits.start()
    waits.join(0.2)
    assert waits.is_alive()
    lock.release()
    waits.join()
"""
    assert run(FORKS.format(setup="lock = Lock(); lock.acquire()", hold="pass", use=use.strip())) == ["child"]
