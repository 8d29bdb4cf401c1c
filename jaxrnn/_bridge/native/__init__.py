"""The native launch: a handler in C that launches kernels from their binaries, which are part of the program.

XLA calls the handler without Python, and captures it in its CUDA graphs. A program with native launches can be exported
with `jax.export` and needs neither PyTorch nor Triton to run.
"""

from jaxrnn._bridge.native.build import NativeLaunchError
from jaxrnn._bridge.native.call import NativeMethod
from jaxrnn._bridge.native.target import TARGET, register

__all__ = ["TARGET", "NativeLaunchError", "NativeMethod", "register"]
