"""`torch_bridge.explain`: which implementation a function would run, and why, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from torch_bridge import choice, op_common, tiling
from torch_bridge.records import CallExplanation, Explanation, merge_launches


def explain(
    function: Callable[..., Any], *args: Any, device: str | None = None, gradients: bool | None = None, **kwargs: Any
) -> Explanation:
    """Says which implementation every recurrence and norm of a function would run, and why.

    The function is called with tensors that have shapes, dtypes and devices, but no values. No kernel is compiled or
    run, no memory is allocated on a GPU, and `grad` of the parameters stays as it is. A compiled function or module is
    called as if it were not compiled.

    Args:
      function: a module, a function, or a training step up to `backward()`.
      *args: its arguments.
      device: None for the devices of the tensors, or the name of a GPU, for which the kernels are then chosen although
        the tensors are elsewhere: "a100", "rtx3090", "rtx4090", "h100", "h200", "b200", "b300" or "rtx5090". It takes
        Triton, and no GPU.
      gradients: whether to add the backward pass of the results, with the launches of a training step. With None it is
        added unless the function itself runs one, if a result requires a gradient.
      **kwargs: its keyword arguments.

    Returns:
      The choice and the launches of every recurrence and norm.

    Raises:
      ValueError: there is no GPU with the name `device`, or `gradients` is True and no result requires a gradient.
      NotImplementedError: "triton" was requested for a call that it cannot run, `device` was given, but Triton is
        missing, or the function calls an optimizer, which would keep tensors without values.

    Example:
      >>> import torch, torch_bridge
      >>> rnn = torch_bridge.nn.GRU(8, 16)
      >>> explanation = torch_bridge.explain(rnn, torch.ones(12, 4, 8))
      >>> explanation.calls[0].arguments
      'xs float32[12,4,8], 16 units'
      >>> [launch.loop for launch in torch_bridge.explain(rnn, torch.ones(12, 4, 8), device="h100").launches]
      ['fma', 'fma']
    """
    listener = choice.Listener(None if device is None else _profile(device))
    with _tracing(listener):
        try:
            results = function(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError):
                error.add_note(
                    "torch_bridge.explain called the function with tensors that have no values: code that reads "
                    "values, such as item() or a condition, cannot be explained."
                )
            raise
        has_backward = any(one.direction == "backward" for call in listener.calls for one in call.launches)
        outputs = [x for x in _tensors_of(results) if x.requires_grad]
        if gradients and not outputs:
            raise ValueError("gradients=True needs a result that requires a gradient, and none does")
        if outputs and (gradients or (gradients is None and not has_backward)):
            leaves = _leaves_of(outputs)
            torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)
    calls = [
        CallExplanation(
            one.name, one.arguments, one.implementation, one.reason, one.unavailable, merge_launches(one.launches)
        )
        for one in listener.calls
    ]
    found = listener.device
    return Explanation(None if found is None else found.name or "Triton's interpreter", tuple(calls))


def _profile(name: str) -> tiling.Device:
    found = tiling.profile(name)
    if reason := op_common.unavailable(found, torch.device("cpu")):
        raise NotImplementedError(f"to choose kernels for {found.name}, the Triton implementation {reason}")
    return found


class _Mode(FakeTensorMode):
    """Gives all tensors no values, except integers on the CPU, such as lengths, which sizes may depend on.

    Attributes:
      torch_bridge_listener: what `choice.listener` returns in this mode.
      grads: every leaf that required a gradient, and its `grad` when it was first used.
    """

    def __init__(self, listener: choice.Listener) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.torch_bridge_listener = listener
        self.grads: dict[int, tuple[Tensor, Tensor | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        actual = [x for x in tensors if not isinstance(x, FakeTensor)]
        for x in actual:
            if x.requires_grad and x.is_leaf:
                self.grads.setdefault(id(x), (x, x.grad))
        if actual and len(actual) == len(tensors) and not func._schema.is_mutable and all(map(_keeps_values, tensors)):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def restore_grads(self) -> None:
        for x, grad in self.grads.values():
            if isinstance(x.grad, FakeTensor):
                x.grad = grad


def _keeps_values(x: Tensor) -> bool:
    return x.device.type == "cpu" and not x.is_floating_point() and not x.is_complex()


@contextlib.contextmanager
def _tracing(listener: choice.Listener) -> Iterator[None]:
    """Returns a context manager in which tensors have no values, and calls and launches go to a listener."""

    def reject_optimizer(*_: Any) -> None:
        if choice.listener() is listener:
            raise NotImplementedError(
                "torch_bridge.explain cannot call an optimizer, which would keep tensors without values: explain a "
                "function that ends with backward()"
            )

    mode = _Mode(listener)
    choice.count_listener(1)
    hook = register_optimizer_step_pre_hook(reject_optimizer)
    # compiled code could neither be traced nor run; a process without compiled code need not import the compiler
    compiles = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext(), mode:
            yield
    finally:
        hook.remove()
        choice.count_listener(-1)
        mode.restore_grads()


def _tensors_of(results: Any) -> Iterator[Tensor]:
    if isinstance(results, Tensor):
        yield results
    elif isinstance(results, Mapping):
        yield from _tensors_of(list(results.values()))
    elif isinstance(results, (tuple, list)):
        for one in results:
            yield from _tensors_of(one)
    elif dataclasses.is_dataclass(results):
        yield from _tensors_of([getattr(results, field.name) for field in dataclasses.fields(results)])


def _leaves_of(outputs: list[Tensor]) -> list[Tensor]:
    """Returns the tensors to which `backward()` of the outputs would accumulate gradients."""
    leaves: dict[int, Tensor] = {id(x): x for x in outputs if x.is_leaf}
    pending = [x.grad_fn for x in outputs]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves[id(leaf)] = leaf
        pending += [following for following, _ in node.next_functions]
    return list(leaves.values())
