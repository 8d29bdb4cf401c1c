"""Registers the handler with XLA."""

from __future__ import annotations

import jax

from jaxrnn._bridge.native import build
from jaxrnn._bridge.native.build import TARGET as TARGET
from jaxrnn._bridge.native.build import NativeLaunchError
from torch_bridge.locks import Lock

_registering, _registered = Lock(), False


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
            stages = dict.fromkeys(("instantiate", "initialize", "execute"), handler)
            try:
                jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA")
            except Exception as error:
                raise NativeLaunchError(
                    f"XLA does not take the handler of the native launch ({error}): install jaxlib and its CUDA plugin "
                    "in the same version"
                ) from error
            _registered = True
