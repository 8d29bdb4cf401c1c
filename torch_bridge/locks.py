"""The locks of both packages. A forked child has none of its parent's threads, so what they held is free there."""

from __future__ import annotations

import os
import threading
from typing import Any


class Lock:
    """A reentrant lock. In a forked child it is free, unless the thread that forked holds it."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        _locks.append(self)

    def acquire(self) -> None:
        """Waits until no other thread holds the lock, and takes it."""
        self._lock.acquire()

    def release(self) -> None:
        """Releases the lock, which this thread holds."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def renew(self) -> None:
        """Replaces the lock if another thread holds it, all of which are gone in a child."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()


class Semaphore(Lock):
    """A semaphore, which in a forked child has its first value."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self._value = value
        self.renew()

    def renew(self) -> None:
        """Replaces the semaphore."""
        self._lock = threading.Semaphore(self._value)


_locks: list[Lock] = []


def _renew() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
