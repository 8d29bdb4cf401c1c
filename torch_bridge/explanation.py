"""`torch_bridge.explain` reports which implementation a function would run, and why, without running a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_bridge import availability, recording, tiling
from torch_bridge.records import CallExplanation, Explanation, merge_launches
from torch_bridge.tracing import leaves_of, modules_of, tracing


def explain(
    function: Callable[..., Any], *args: Any, device: str | None = None, gradients: bool | None = None, **kwargs: Any
) -> Explanation:
    """Says which implementation every recurrence and norm of a function would run, and why.

    The function is called with tensors that have shapes, dtypes and devices, but no values. No kernel is compiled or
    run, and no memory is allocated on a GPU. Tensors keep their values, `grad` and graph, even if the function writes
    to them. A module that is the function or an argument keeps its attributes, parameters and buffers. Another module
    that is called keeps those to which the function assigns a tensor. PyTorch's random number generators keep their
    state. A compiled function or module is called as if it were not compiled.

    All other effects of the function remain. Hooks are called. A list, or an attribute of an object that is no module,
    may hold a tensor without values afterwards.

    Args:
      function: a module, a function, or a training step up to `backward()`.
      *args: its arguments.
      device: None for the devices of the tensors, or the name of a GPU, such as "a100" or "rtx4090", for which the
        kernels are then chosen although the tensors are elsewhere. This needs Triton, but no GPU. The error for an
        unknown name lists all names.
      gradients: whether to add the backward pass of the results, with the launches of a training step. None adds it if
        a result requires a gradient and the function itself launches no backward kernel.
      **kwargs: its keyword arguments.

    Returns:
      The choice and the launches of every recurrence and norm.

    Raises:
      ValueError: `function` is not callable, there is no GPU with the name `device`, or `gradients` is True and no
        result requires a gradient.
      NotImplementedError: "triton" was requested for a call that it cannot run, `device` was given, but Triton is
        missing, or the function makes a change that cannot be undone: it calls an optimizer, which would keep tensors
        without values, sets `data` of a tensor, initializes a lazy module, or changes in place, with gradients, a view
        or a result of the caller.

    Examples:
      >>> import torch, torch_bridge
      >>> rnn = torch_bridge.nn.GRU(8, 16)
      >>> explanation = torch_bridge.explain(rnn, torch.ones(12, 4, 8))
      >>> explanation.calls[0].arguments
      'xs float32[12,4,8], 16 units'
      >>> [launch.loop for launch in torch_bridge.explain(rnn, torch.ones(12, 4, 8), device="h100").launches]
      ['fma', 'fma']
    """
    if not callable(function):
        raise ValueError(f"function must be callable, got {type(function).__name__}: pass a function and its arguments")
    listener = recording.Listener(None if device is None else _profile(device))
    with tracing(listener, modules_of((function, getattr(function, "__self__", None), args, kwargs))):
        try:
            results = function(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError):
                error.add_note(
                    "torch_bridge.explain called the function with tensors that have no values: code that reads "
                    "values, such as item() or a condition, cannot be explained."
                )
            raise
        has_backward = any(launch.direction == "backward" for call in listener.calls for launch in call.launches)
        outputs = [x for x in _tensors_of(results) if x.requires_grad]
        if gradients and not outputs:
            raise ValueError("gradients=True needs a result that requires a gradient, and none does")
        if outputs and (gradients or (gradients is None and not has_backward)):
            leaves = leaves_of(outputs)
            # retain_graph: the results may depend on a graph that the caller made, and still needs
            try:
                torch.autograd.grad(
                    outputs, leaves, [torch.ones_like(x) for x in outputs], retain_graph=True, allow_unused=True
                )
            except RuntimeError as error:
                error.add_note(
                    "torch_bridge.explain computed the gradients of the results by torch.autograd.grad: end the "
                    "function with backward(), or pass gradients=False to explain it without them."
                )
                raise
    calls = [
        CallExplanation(
            call.name, call.arguments, call.implementation, call.reason, call.unavailable, merge_launches(call.launches)
        )
        for call in listener.calls
    ]
    gpu = listener.device
    return Explanation(None if gpu is None else gpu.name or "Triton's interpreter", tuple(calls))


def _profile(name: str) -> tiling.Device:
    """Returns the GPU of this name; raises NotImplementedError if kernels cannot be chosen here, without Triton."""
    found = tiling.profile(name)
    if reason := availability.triton_fails():
        raise NotImplementedError(f"to choose kernels for {found.name}, the Triton implementation {reason}")
    return found


def _tensors_of(results: Any) -> Iterator[Tensor]:
    """Yields the tensors in the results of a function, also those in dataclasses, which are no pytrees."""
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, Mapping):
        yield from _tensors_of(list(results.values()))
    elif isinstance(results, (tuple, list)):
        for one in results:
            yield from _tensors_of(one)
    elif dataclasses.is_dataclass(results) and not isinstance(results, type):
        yield from _tensors_of([getattr(results, field.name) for field in dataclasses.fields(results)])
