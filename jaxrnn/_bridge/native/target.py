"""Registers the handler with XLA."""

from __future__ import annotations

import threading

import jax

from jaxrnn._bridge.native import build

# XLA's name of the handler. The version changes if the meaning of its attributes does, so that programs that were
# exported earlier either keep their meaning or fail.
TARGET = "jaxrnn_launch_v1"


_registering, _registered = threading.Lock(), False


def register() -> None:
    """Builds the handler if that is still to be done, and registers it with XLA for CUDA devices.

    A program that `jax.export` has exported with native launches needs this call before it is compiled, and neither
    PyTorch nor Triton.

    Raises:
      RuntimeError: the handler cannot be built; the message says why, and what to do.

    Examples:
      A process that runs an exported program registers the handler first:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jax import export
      >>> import jaxrnn
      >>> exported = export.export(jax.jit(jaxrnn.rms_norm))(jnp.ones((2, 8)))
      >>> blob = exported.serialize()
      >>> jaxrnn.register_native_launch()  # in the process that loads `blob`
      >>> export.deserialize(blob).call(jnp.ones((2, 8))).shape
      (2, 8)
    """
    global _registered
    with _registering:
        if not _registered:
            handler = jax.ffi.pycapsule(getattr(build.load(), TARGET))
            # XLA calls the first before each run of a program, outside of captures: it loads the kernels
            jax.ffi.register_ffi_target(TARGET, {"initialize": handler, "execute": handler}, platform="CUDA")
            _registered = True
