"""`torch_bridge.explain`: which implementation a function would run, and why, without running it."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_bridge import availability, choice, tiling
from torch_bridge.records import CallExplanation, Explanation, merge_launches


def explain(
    function: Callable[..., Any], *args: Any, device: str | None = None, gradients: bool | None = None, **kwargs: Any
) -> Explanation:
    """Says which implementation every recurrence and norm of a function would run, and why.

    The function is called with tensors that have shapes, dtypes and devices, but no values. No kernel is compiled or
    run, and no memory is allocated on a GPU. Tensors keep their values, `grad` and graph, although the function writes
    to them. A module that is the function or an argument keeps its attributes, parameters and buffers. Another module
    that is called keeps those to which the function assigns a tensor. PyTorch's random number generators keep their
    state. A compiled function or module is called as if it were not compiled.

    All other effects of the function remain. Hooks are called. A list, or an attribute of an object that is no module,
    may hold a tensor without values afterwards.

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
        missing, or the function makes a change that cannot be undone: it calls an optimizer, which would keep tensors
        without values, sets `data` of a tensor, initialises a lazy module, or changes in place, with gradients, a view
        or a result of the caller.

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
    with _tracing(listener, _modules_of((function, getattr(function, "__self__", None), args, kwargs))):
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
            # the graph may begin in one of the caller, which the caller still needs
            torch.autograd.grad(
                outputs, leaves, [torch.ones_like(x) for x in outputs], retain_graph=True, allow_unused=True
            )
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
    if reason := availability.unavailable(found, torch.device("cpu")):
        raise NotImplementedError(f"to choose kernels for {found.name}, the Triton implementation {reason}")
    return found


class _TensorState(NamedTuple):
    """What a trace may change of a tensor that has values, beside the values."""

    tensor: Tensor
    requires_grad: bool
    grad_fn: Any
    grad: Tensor | None
    version: int | None

    def restore(self) -> None:
        x = self.tensor
        if x.grad_fn is not self.grad_fn:  # only of a leaf, see `_Mode._check_undoable`
            x.detach_()
        if x.requires_grad != self.requires_grad:
            x.requires_grad_(self.requires_grad)
        if _has_grad(x) and x.grad is not self.grad:
            x.grad = self.grad
        if self.version is not None and x._version != self.version:
            # the values are the same, so a graph that saved them stays valid
            torch._C._autograd._unsafe_set_version_counter((x,), (self.version,))


def _has_grad(x: Tensor) -> bool:
    return x.is_leaf or x.retains_grad  # `grad` of others warns


class _Mode(FakeTensorMode):
    """Gives all tensors no values, except integers on the CPU, such as lengths, which sizes may depend on.

    No operation writes to a tensor that has values: integers are copied before the first write, and other tensors are
    replaced by tensors without values.

    Attributes:
      torch_bridge_listener: what `choice.listener` returns in this mode.
      states: the state of every tensor that has values when it was first used, by `id`.
      stand_ins: the tensors without values that replace those written to, and results of the caller, by `id`.
      storages: the memory of integers by its address: first that of a tensor, then that which operations use instead.
      valueless: the memory of integers that were written from tensors without values, by its address.
    """

    def __init__(self, listener: choice.Listener) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.torch_bridge_listener = listener
        self.states: dict[int, _TensorState] = {}
        self.stand_ins: dict[int, Tensor] = {}
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.valueless: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # an operator that calls functions has no schema
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors = _tensors_in(args, kwargs)
        for x in tensors:
            self.remember(x)
            if x._base is not None:
                self.remember(x._base)
        written = _written(func, args, kwargs)
        if written and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            for x in written:
                if x.is_floating_point() or x.is_complex():
                    self._check_undoable(x)
        actual = [x for x in tensors if not isinstance(x, FakeTensor)]
        if actual and len(actual) == len(tensors) and all(map(self._keeps_values, tensors)):
            return self._run_with_values(func, args, kwargs, written)
        if torch.Tag.inplace_view not in func.tags:
            self._mark_valueless(written)
            written_to = {id(x) for x in written}
            # the conversion of a result of the caller would warn
            args, kwargs = self._replace([x for x in actual if id(x) in written_to or not x.is_leaf], (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def remember(self, x: Tensor) -> None:
        """Records the state of a tensor that has values, and of the leaves of its graph, on first use."""
        if isinstance(x, FakeTensor) or id(x) in self.states:
            return
        version = None if x.is_inference() else x._version
        grad = x.grad if _has_grad(x) else None
        self.states[id(x)] = _TensorState(x, x.requires_grad, x.grad_fn, grad, version)
        if x.grad_fn is not None:
            for leaf in _leaves_of([x]):
                self.remember(leaf)

    def _check_undoable(self, x: Tensor) -> None:
        """Raises NotImplementedError if autograd will record a change of `x` in a graph of the caller."""
        base = x if x._base is None else x._base
        if isinstance(base, FakeTensor):
            return
        if base.grad_fn is not None or (base is not x and not isinstance(x, FakeTensor)):
            raise _undoable("changes a view or a result from outside of the function in place, with gradients")

    def _keeps_values(self, x: Tensor) -> bool:
        if x.device.type != "cpu" or x.is_floating_point() or x.is_complex() or x.layout != torch.strided:
            return False
        return x.untyped_storage()._cdata not in self.valueless

    def _run_with_values(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        for x in written:
            self._copy_storage(x)
        given = {x.untyped_storage()._cdata for x in _tensors_in(args, kwargs)}
        args, kwargs = pytree.tree_map_only(Tensor, self._with_copied_storage, (args, kwargs))
        results = func(*args, **kwargs)
        used = given | {x.untyped_storage()._cdata for x in _tensors_in(args, kwargs)}
        for x in _tensors_in(results):
            if x.layout == torch.strided and (new := x.untyped_storage())._cdata not in used:
                self.storages[new._cdata] = new, new  # no tensor of the caller shares this memory
        return results

    def _copy_storage(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in self.storages:
            copy = storage.clone()
            self.storages[storage._cdata] = storage, copy
            self.storages[copy._cdata] = copy, copy

    def _with_copied_storage(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        _, copy = self.storages.get(storage._cdata, (storage, storage))
        return x if copy is storage else x.new_empty(0).set_(copy, x.storage_offset(), x.size(), x.stride())

    def _mark_valueless(self, written: list[Tensor]) -> None:
        for x in written:
            if not isinstance(x, FakeTensor) and self._keeps_values(x):
                storage = x.untyped_storage()
                self.valueless[storage._cdata] = storage

    def _replace(self, tensors: list[Tensor], arguments: Any) -> Any:
        """Replaces tensors that have values by tensors without."""
        if not tensors:
            return arguments
        for x in tensors:
            if id(x) not in self.stand_ins:
                self.stand_ins[id(x)] = self.from_tensor(x.detach())
        replaced = {id(x) for x in tensors}
        return pytree.tree_map_only(Tensor, lambda x: self.stand_ins[id(x)] if id(x) in replaced else x, arguments)

    def restore(self) -> None:
        """Restores the tensors that have values."""
        for state in self.states.values():
            state.restore()


class _Functions(TorchFunctionMode):
    """Sees what does not reach `_Mode`: attributes of tensors that the function sets, and backward passes."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is not None and _has_values(x):
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                raise _undoable("sets `data` of a tensor, or initialises a lazy module")
            if not torch.nn.parameter.is_lazy(x):
                self.mode.remember(x)
            if func in (Tensor.detach_, torch.detach_) and x.grad_fn is not None:
                raise _undoable("detaches a result from outside of the function in place")
        if "retain_graph" in kwargs:  # of a backward pass, whose graph may begin in one of the caller
            kwargs["retain_graph"] = True
        return func(*args, **kwargs)


def _has_values(x: Tensor) -> bool:
    return not isinstance(x, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _undoable(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"torch_bridge.explain cannot call a function that {what}, because it could not undo that: explain a part of it"
    )


def _tensors_in(*arguments: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(arguments) if isinstance(x, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    writes = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return _tensors_in([given.get(name) for name in writes])


class _Modules:
    """Modules, whose attributes, parameters and buffers `restore` restores.

    Attributes:
      given: the modules that are known before the function is called, which are restored as a whole.
      called: other modules, when they are first called. Their parameters may be replaced meanwhile, as
        `torch.func.functional_call` does, so only what holds a tensor without values in the end is restored.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.given = {id(module): (module, _tables_of(module)) for module in modules}
        self.called: dict[int, tuple[torch.nn.Module, list[_Table]]] = {}

    def remember_called(self, module: torch.nn.Module) -> None:
        if id(module) not in self.given and id(module) not in self.called:
            self.called[id(module)] = module, _tables_of(module)

    def restore(self) -> None:
        for _, tables in self.given.values():
            for table, before in tables:
                if list(table) != list(before) or any(table[name] is not x for name, x in before.items()):
                    table.clear()
                    table.update(before)
        for _, tables in self.called.values():
            for table, before in tables:
                for name, x in [*table.items()]:
                    if x is before.get(name) or _all_have_values(x):
                        continue
                    if name not in before:
                        del table[name]
                    elif _all_have_values(before[name]):
                        table[name] = before[name]


# A dictionary of a module, and its items before the trace.
_Table = tuple[dict[str, Any], dict[str, Any]]


def _tables_of(module: torch.nn.Module) -> list[_Table]:
    return [(table, dict(table)) for table in (vars(module), module._parameters, module._buffers, module._modules)]


def _all_have_values(x: Any) -> bool:
    return all(map(_has_values, _tensors_in(x)))


def _modules_of(arguments: Any) -> list[torch.nn.Module]:
    found = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.nn.Module)]
    return [module for one in found for module in one.modules()]


@contextlib.contextmanager
def _tracing(listener: choice.Listener, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Returns a context manager in which tensors have no values, and calls and launches go to a listener.

    Afterwards, tensors, random number generators, `modules` and the modules called are as before.
    """

    def reject_optimizer(*_: Any) -> None:
        if choice.listener() is listener:
            raise NotImplementedError(
                "torch_bridge.explain cannot call an optimizer, which would keep tensors without values: explain a "
                "function that ends with backward()"
            )

    def remember_module(module: torch.nn.Module, _: Any) -> None:
        if choice.listener() is listener:
            known.remember_called(module)

    mode, known = _Mode(listener), _Modules(modules)
    on_gpu = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    generators = torch.random.fork_rng(range(torch.cuda.device_count()) if on_gpu else [])
    choice.count_listener(1)
    hooks = register_optimizer_step_pre_hook(reject_optimizer), register_module_forward_pre_hook(remember_module)
    # compiled code could neither be traced nor run; a process without compiled code need not import the compiler
    compiles = "torch._dynamo" in sys.modules
    try:
        with (
            generators,
            torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext(),
            mode,
            _Functions(mode),
        ):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        choice.count_listener(-1)
        known.restore()
        mode.restore()


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
