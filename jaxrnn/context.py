"""What a program is traced under: the implementation that `None` means, and whether `jaxrnn.explain` listens.

Both are part of the keys of JAX's caches, so that a program that was traced under one value is traced anew under
another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from jaxrnn.checks import Caller, Implementation, check_implementation

if TYPE_CHECKING:
    from torch_bridge.tiling import Device


@dataclasses.dataclass(eq=False)
class Listener:
    """Collects the choices of one trace; compared by identity, so that nothing traced earlier is reused.

    Attributes:
      device: the GPU that kernels are chosen for instead of the actual one, or None.
      choices: the choices in the order in which they were made.
    """

    device: Device | None = None
    choices: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Context:
    implementation: Implementation = None
    listener: Listener | None = None


_DEFAULT = _Context()
_contexts = jax.make_user_context(_DEFAULT)


def _current() -> _Context:
    context: _Context = _contexts.value
    return context


class _DefaultImplementation(contextlib.ContextDecorator):
    """Sets the default implementation, as a context manager or decorator that can be entered several times."""

    def __init__(self, implementation: Implementation) -> None:
        self._implementation = implementation
        self._entered = threading.local()  # a thread leaves the contexts that it entered itself

    def __enter__(self) -> None:
        context = _contexts(dataclasses.replace(_current(), implementation=self._implementation))
        context.__enter__()
        self._entered.contexts = [*getattr(self._entered, "contexts", ()), context]

    def __exit__(self, *error: Any) -> None:
        self._entered.contexts.pop().__exit__(*error)


def default_implementation(implementation: Implementation) -> _DefaultImplementation:
    """Returns a context manager inside which `implementation=None` means another implementation.

    Inside of `default_implementation("triton")`, training raises instead of running without the kernels.

    A name that is passed to a function or a module takes precedence. Contexts nest: the innermost one holds, and
    `default_implementation(None)` restores the automatic choice. The context manager is also a decorator, and can be
    entered several times. It holds for the thread that enters it, while programs are traced: a function that `jax.jit`
    has compiled outside of the context is traced and compiled again inside.

    Args:
      implementation: "triton", "xla" or None, as in `jaxrnn.gru`. With "triton", every call must run the kernels, also
        calls of a single step and norms of small arrays, for which None chooses XLA.

    Returns:
      The context manager.

    Raises:
      ValueError: no implementation has that name.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> with jaxrnn.default_implementation("xla"):
      ...     explanation = jaxrnn.explain(jaxrnn.rms_norm, jnp.ones((2, 8)))
      >>> explanation.implementation, explanation.reason
      ('xla', 'jaxrnn.default_implementation("xla") holds')
    """
    check_implementation(implementation, Caller("default_implementation"))
    return _DefaultImplementation(implementation)


def default() -> Implementation:
    """Returns the implementation that None means here; None if the fastest is chosen."""
    return _current().implementation


def listener() -> Listener | None:
    """Returns the listener of `jaxrnn.explain` that this trace belongs to, if any."""
    return _current().listener


@contextlib.contextmanager
def listening(device: Device | None) -> Iterator[Listener]:
    """Returns a context manager that yields a new listener, to which everything traced inside belongs."""
    result = Listener(device)
    with _contexts(dataclasses.replace(_current(), listener=result)):
        yield result


def other_device() -> Device | None:
    """Returns the GPU that `jaxrnn.explain` chooses kernels for instead of the actual one, or None."""
    found = listener()
    return None if found is None else found.device
