"""Runs code on fake tensors, and undoes its effects on tensors, modules and random number generators.

A fake tensor has a shape, a dtype and a device, but no values. A real tensor has values, as those of the caller do.
`_Mode` makes the results of operators fake, and records the state of every real tensor that an operator uses.
`_Functions` handles what does not reach a dispatch mode, and `_Modules` records and restores modules. `tracing` uses
all three.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from torch_bridge import recording


class _TensorState(NamedTuple):
    """The state of a real tensor, except for its values, which traced code cannot change."""

    tensor: Tensor
    requires_grad: bool
    grad_fn: Any
    grad: Tensor | None
    version: int | None

    def restore(self) -> None:
        x = self.tensor
        if x.grad_fn is not self.grad_fn:  # `x` was a leaf: `_Mode._check_can_be_undone` rejects the other cases
            x.detach_()
        if x.requires_grad != self.requires_grad:
            x.requires_grad_(self.requires_grad)
        if _has_grad(x) and x.grad is not self.grad:
            x.grad = self.grad
        if self.version is not None and x._version != self.version:
            # the values are the same, so a graph that saved them stays valid
            torch._C._autograd._unsafe_set_version_counter((x,), (self.version,))


def _has_grad(x: Tensor) -> bool:
    """Whether `x.grad` can be read; reading it warns for other tensors."""
    return x.is_leaf or x.retains_grad


class _Mode(FakeTensorMode):
    """Makes the results of operators fake, except for results computed from integers on the CPU alone.

    Integers on the CPU, such as lengths, keep their values because sizes may depend on them. They include booleans.

    No operator writes to memory of the caller. Memory of integers is copied before the first write. Other real tensors
    that are written to are replaced by fake ones.

    Attributes:
      torch_bridge_listener: what `recording.listener` returns in this mode.
      states: the state of every real tensor when it was first used, by `id`.
      fakes: the fake tensors that replace real ones, by the `id` of the real one.
      storages: for a storage of integers, by `_cdata`: the storage itself, which is thus kept alive, and the one that
        operators use instead, which is a copy or the storage itself.
      valueless: the storages of integers that were written from fake tensors and so have unknown values, by `_cdata`.
    """

    def __init__(self, listener: recording.Listener) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.torch_bridge_listener = listener
        self.states: dict[int, _TensorState] = {}
        self.fakes: dict[int, Tensor] = {}
        self.storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.valueless: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # higher-order operators have no schema
            return super().__torch_dispatch__(func, types, args, kwargs)
        tensors = _tensors_in(args, kwargs)
        for x in tensors:
            self.record(x)
            if x._base is not None:
                self.record(x._base)
        written = _written(func, args, kwargs)
        if written and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            for x in written:
                if x.is_floating_point() or x.is_complex():
                    self._check_can_be_undone(x)
        real = [x for x in tensors if not isinstance(x, FakeTensor)]
        on_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if on_cpu and real and len(real) == len(tensors) and all(map(self._keeps_values, tensors)):
            return self._run_with_values(func, args, kwargs, written)
        if torch.Tag.inplace_view not in func.tags:
            self._mark_valueless(written)
            written_to = {id(x) for x in written}
            # FakeTensorMode converts the other real tensors itself; its conversion of a non-leaf would warn
            args, kwargs = self._replace([x for x in real if id(x) in written_to or not x.is_leaf], (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def record(self, x: Tensor) -> None:
        """Records the state of a real tensor, and of the leaves of its graph, on first use."""
        if isinstance(x, FakeTensor) or id(x) in self.states:
            return
        version = None if x.is_inference() else x._version
        grad = x.grad if _has_grad(x) else None
        self.states[id(x)] = _TensorState(x, x.requires_grad, x.grad_fn, grad, version)
        if x.grad_fn is not None:
            for leaf in leaves_of([x]):
                self.record(leaf)

    def _check_can_be_undone(self, x: Tensor) -> None:
        """Raises NotImplementedError if autograd would record an in-place change of `x` in a graph of the caller."""
        base = x if x._base is None else x._base
        if isinstance(base, FakeTensor):
            return
        if base.grad_fn is not None or (base is not x and not isinstance(x, FakeTensor)):
            raise _cannot_undo("changes a view or a result from outside of the function in place, with gradients")

    def _keeps_values(self, x: Tensor) -> bool:
        """Whether a tensor has integers on the CPU whose values are known."""
        if x.device.type != "cpu" or x.is_floating_point() or x.is_complex() or x.layout != torch.strided:
            return False
        return x.untyped_storage()._cdata not in self.valueless

    def _run_with_values(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Any:
        """Runs an operator on integers; memory of the caller is replaced by copies if it is or was written to."""
        for x in written:
            self._copy_storage(x)
        of_arguments = {x.untyped_storage()._cdata for x in _tensors_in(args, kwargs)}
        args, kwargs = pytree.tree_map_only(Tensor, self._with_copied_storage, (args, kwargs))
        results = func(*args, **kwargs)
        of_arguments |= {x.untyped_storage()._cdata for x in _tensors_in(args, kwargs)}
        for x in _tensors_in(results):
            if x.layout == torch.strided and (new := x.untyped_storage())._cdata not in of_arguments:
                self.storages[new._cdata] = new, new  # needs no copy, because no tensor of the caller shares it
        return results

    def _copy_storage(self, x: Tensor) -> None:
        """Makes operators use a copy of the storage of `x` from now on, unless they already do."""
        storage = x.untyped_storage()
        if storage._cdata not in self.storages:
            copy = storage.clone()
            self.storages[storage._cdata] = storage, copy
            self.storages[copy._cdata] = copy, copy

    def _with_copied_storage(self, x: Tensor) -> Tensor:
        """Returns `x`, or the same view of the copy of its storage if there is one."""
        storage = x.untyped_storage()
        _, copy = self.storages.get(storage._cdata, (storage, storage))
        return x if copy is storage else x.new_empty(0).set_(copy, x.storage_offset(), x.size(), x.stride())

    def _mark_valueless(self, written: list[Tensor]) -> None:
        """Records that integers are written from fake tensors."""
        for x in written:
            if not isinstance(x, FakeTensor) and self._keeps_values(x):
                storage = x.untyped_storage()
                self.valueless[storage._cdata] = storage

    def _replace(self, tensors: list[Tensor], arguments: Any) -> Any:
        """Returns `arguments` with these real tensors replaced by fake ones, the same one for each use of a tensor."""
        if not tensors:
            return arguments
        for x in tensors:
            if id(x) not in self.fakes:
                self.fakes[id(x)] = self.from_tensor(x.detach())
        replaced = {id(x) for x in tensors}
        return pytree.tree_map_only(Tensor, lambda x: self.fakes[id(x)] if id(x) in replaced else x, arguments)

    def restore(self) -> None:
        """Restores the real tensors."""
        for state in self.states.values():
            state.restore()


class _Functions(TorchFunctionMode):
    """Handles what does not reach `_Mode`: attributes of tensors that traced code sets, and backward passes."""

    def __init__(self, mode: _Mode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        x = args[0] if args and isinstance(args[0], Tensor) else None
        if x is not None and _has_values(x):
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                raise _cannot_undo("sets `data` of a tensor, or initializes a lazy module")
            if not torch.nn.parameter.is_lazy(x):
                self.mode.record(x)
            if func in (Tensor.detach_, torch.detach_) and x.grad_fn is not None:
                raise _cannot_undo("detaches a result from outside of the function in place")
        if "retain_graph" in kwargs:  # a backward pass, which may go through a graph that the caller still needs
            kwargs["retain_graph"] = True
        return func(*args, **kwargs)


def _has_values(x: Tensor) -> bool:
    """Whether `x` is a real tensor, and no wrapper that a transformation of `torch.func` made."""
    return not isinstance(x, FakeTensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)


def _cannot_undo(what: str) -> NotImplementedError:
    """Returns the error for a function that makes a change that cannot be undone."""
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


# A dictionary of a module, such as its parameters, and the items that it had when it was recorded.
_Table = tuple[dict[str, Any], dict[str, Any]]


class _Modules:
    """Records attributes, parameters and buffers of modules, and restores them.

    Attributes:
      given: the modules that are known before the traced code runs. All of their attributes are restored.
      called: other modules, recorded when they are first called. At that time their parameters may be replaced for the
        duration of the call, as `torch.func.functional_call` does, so the recorded items may not be the original ones.
        Only items that hold a fake tensor in the end are restored.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.given = {id(module): (module, _tables_of(module)) for module in modules}
        self.called: dict[int, tuple[torch.nn.Module, list[_Table]]] = {}

    def record_called(self, module: torch.nn.Module) -> None:
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


def _tables_of(module: torch.nn.Module) -> list[_Table]:
    return [(table, dict(table)) for table in (vars(module), module._parameters, module._buffers, module._modules)]


def _all_have_values(x: Any) -> bool:
    return all(map(_has_values, _tensors_in(x)))


def modules_of(arguments: Any) -> list[torch.nn.Module]:
    """Returns the modules in a pytree, and their submodules."""
    found = [x for x in pytree.tree_leaves(arguments) if isinstance(x, torch.nn.Module)]
    return [module for one in found for module in one.modules()]


@contextlib.contextmanager
def tracing(listener: recording.Listener, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Makes operators return fake tensors, and sends choices and launches to a listener, inside a `with` statement.

    On exit, tensors, random number generators and `modules` are restored, and of other modules that were called those
    items that are fake tensors.
    """

    def reject_optimizer(*_: Any) -> None:
        if recording.listener() is listener:
            raise NotImplementedError(
                "torch_bridge.explain cannot call an optimizer, which would keep tensors without values: explain a "
                "function that ends with backward()"
            )

    def record_module(module: torch.nn.Module, _: Any) -> None:
        if recording.listener() is listener:
            recorded.record_called(module)

    mode, recorded = _Mode(listener), _Modules(modules)
    has_gpu_generators = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
    generators = torch.random.fork_rng(range(torch.cuda.device_count()) if has_gpu_generators else [])
    recording.count_listener(1)
    hooks = register_optimizer_step_pre_hook(reject_optimizer), register_module_forward_pre_hook(record_module)
    try:
        with generators, _compiled_code_runs_eagerly(), mode, _Functions(mode):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        recording.count_listener(-1)
        recorded.restore()
        mode.restore()


@contextlib.contextmanager
def _compiled_code_runs_eagerly() -> Iterator[None]:
    """Runs compiled code as if it were not compiled: it can neither be traced nor run on fake tensors.

    A compiled module warns of global hooks, of which `tracing` registers one; that warning is ignored.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet
        yield
        return
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        yield


def leaves_of(outputs: list[Tensor]) -> list[Tensor]:
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
