"""The launch by host callbacks, which XLA calls with its buffers and stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.experimental.buffer_callback import buffer_callback

if TYPE_CHECKING:
    from jax import Array


class Callback:
    """A host callback that maps XLA's buffers to the names of arrays and launches on XLA's stream."""

    def __init__(self, launch: Any, names: Sequence[str]):
        """Takes the launch, and the names of its results and then of its operands."""
        self.launch = launch
        self.names = names

    def __call__(self, ctx: Any, out: Sequence[Any], *arrays: Any) -> None:
        from torch_bridge import dlpack

        views = [dlpack.view(buffer) for buffer in (*out, *arrays)]
        self.launch(ctx.stream, views[0].device_id, {n: v.address for n, v in zip(self.names, views, strict=True)})


class InterpretedCallback(Callback):
    """A `Callback` that runs the launch on the CPU, in Triton's interpreter."""

    def __call__(self, ctx: Any, out: Sequence[Any], *arrays: Any) -> None:
        import torch.utils.dlpack

        tensors = [torch.utils.dlpack.from_dlpack(buffer) for buffer in (*out, *arrays)]
        self.launch.interpret(dict(zip(self.names, tensors, strict=True)))


class CallbackMethod:
    """Launches by a host callback. `jaxrnn._bridge.native.NativeMethod` has the same interface.

    Attributes:
      captured: whether XLA may capture launches in its CUDA graphs.
      uses_host_callbacks: whether lowering a launch registers a host callback.
    """

    uses_host_callbacks = True

    def __init__(self, callback: type[Callback], captured: bool):
        self._callback = callback
        self.captured = captured

    def begin(self, launch: Any, ordinals: Sequence[int]) -> None:
        """Starts to compile the kernels of a launch, and to load them onto the first device, in the background."""
        launch.begin_loading(ordinals[0])

    def call(
        self, launch: Any, ordinals: Sequence[int], arrays: Mapping[str, Array],
        results: Mapping[str, jax.ShapeDtypeStruct], aliases: Mapping[int, int],
    ) -> Sequence[Array]:  # fmt: skip
        """Launches on `arrays`; returns the results in their order.

        Compiles the kernels and loads them onto all devices: the callback has time only to launch.
        """
        for ordinal in ordinals:
            launch.load(ordinal)
        written: Sequence[Array] = buffer_callback(
            self._callback(launch, (*results, *arrays)), [*results.values()], input_output_aliases=dict(aliases),
            command_buffer_compatible=self.captured,
        )(*arrays.values())  # fmt: skip
        return written


CUDA = CallbackMethod(Callback, captured=True)
INTERPRETED = CallbackMethod(InterpretedCallback, captured=False)
