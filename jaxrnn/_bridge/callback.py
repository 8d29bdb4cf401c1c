"""The host callbacks that XLA calls with its buffers to launch a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Callback:
    """A host callback that maps XLA's buffers to the names of arrays and launches on XLA's stream."""

    def __init__(self, launch: Any, inputs: Sequence[str], outputs: Sequence[str]):
        self.launch = launch
        self.names = (*outputs, *inputs)

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
