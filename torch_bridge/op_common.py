"""Code shared by all operators: launches, autocast, registration, autograd and `torch.func`."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from torch_bridge import availability, recording, tiling

# Shape and dtype of each output of an operator, by name; the shape is `(0,)` if the output is not requested.
Outputs = dict[str, tuple[Any, torch.dtype]]

# Launches.


def launch_ordinal(device: torch.device) -> int | None:
    """Returns the index of a CUDA device, or None for the CPU, where kernels are interpreted."""
    return availability.ordinal(device) if device.type == "cuda" else None


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as the kernels use it, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which states, gates and statistics are computed and saved for arrays of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_autocasting(device: str) -> bool:
    """Whether autocast is on for devices of this type. It never is for meta tensors, which have no autocast."""
    # torch.compile cannot trace a query whether a device type has autocast
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast_off(device: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which autocast is off for devices of this type."""
    return torch.autocast(device, enabled=False) if is_autocasting(device) else contextlib.nullcontext()


def as_kernel_input(x: Tensor) -> Tensor:
    """Returns `x` as the kernels read it: contiguous, aligned to 16 bytes, and without a lazy negation (`is_neg`)."""
    x = x.resolve_neg().contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def load(make: Callable[[Any, tiling.Device], Any], problem: Any, ordinal: int | None) -> Any:
    """Returns the launch of a problem, compiled and loaded onto a device; if `ordinal` is None, for the interpreter.

    Args:
      make: a class of launches, such as `torch_bridge.recurrences.Launch`. It is called with the problem and a
        `tiling.Device`, and chooses the kernel and its tiling.
      problem: the problem that the class takes.
      ordinal: the index of a CUDA device, or None.

    Raises:
      RuntimeError: the current stream is being captured in a CUDA graph, and a kernel is not loaded yet.
    """
    from torch_bridge import gpu

    if ordinal is None:
        return make(problem, tiling.Device(interpreted=True))
    launch = make(problem, gpu.device(ordinal))
    # the kernels may be loaded already: by a launch of another shape, or of this shape if a cache has dropped it since
    if torch.cuda.is_current_stream_capturing() and not launch.is_loaded(ordinal):
        raise RuntimeError(
            "a kernel is not loaded yet, and none can be loaded during CUDA graph capture: before the capture, call "
            f"the captured code once with tensors of the same shapes and dtypes ({problem})"
        )
    launch.load(ordinal)
    return launch


def run(launch: Any, tensors: Mapping[str, Tensor], ordinal: int | None) -> None:
    """Allocates the workspaces of a launch and runs it on the current stream of a device.

    Args:
      launch: what `load` returned. Its `workspaces` are `(name, length, dtype, whether it must be zeroed)`, and a call
        `launch(stream, ordinal, addresses)` enqueues the kernels.
      tensors: the inputs and outputs by name, as `as_kernel_input` returns them.
      ordinal: the index of the CUDA device for which the launch was loaded, or None for the interpreter.
    """
    tensors = dict(tensors)
    device = next(iter(tensors.values())).device
    for name, length, dtype, zeroed in launch.workspaces:
        allocate = torch.zeros if zeroed else torch.empty
        tensors[name] = allocate(length, dtype=getattr(torch, dtype), device=device)
    if ordinal is None:
        launch.interpret(tensors)
        return
    addresses = {name: x.data_ptr() for name, x in tensors.items()}
    stream = torch.cuda.current_stream(ordinal).cuda_stream
    if ordinal == torch.cuda.current_device():
        launch(stream, ordinal, addresses)
    else:
        with torch.cuda.device(ordinal):
            launch(stream, ordinal, addresses)


# Functions that become operators.


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with autocast disabled for the device type of its first argument."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = args[0].device.type
        if not is_autocasting(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run


def check_devices(name: str, x: Tensor, arrays: Mapping[str, Tensor | None]) -> None:
    """Raises ValueError unless all arrays are on the device of `x`: a kernel reads their addresses unchecked."""
    device = x.device
    for other, y in arrays.items():
        if y is not None and y.device != device:
            raise ValueError(f"{other} is on {y.device} and {name} is on {device}: move one of them")


def define(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator that makes a function an operator of this name, and disables autocast in it.

    The function's signature is the operator's, unless a schema is given.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        function = without_autocast(function)
        definition: Any = torch.library.custom_op(name, _without_tangents(function), mutates_args=(), schema=schema)
        definition.function = function  # for `call`, which runs it to bypass the dispatcher
        return definition

    return decorate


def _without_tangents(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, which raises in forward mode: PyTorch drops the tangents of an operator that has no rule."""

    @functools.wraps(function)
    def checked(*args: Any) -> Any:
        return _no_forward_mode() if in_forward_mode() else function(*args)

    return checked


def empty_output(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an empty tensor, which stands for an output that is not requested."""
    return like.new_empty((0,), dtype=dtype)


def fake(outputs: Outputs, like: Tensor) -> tuple[Tensor, ...]:
    """Returns the outputs of an operator's fake implementation."""
    return tuple(like.new_empty(shape, dtype=dtype) for shape, dtype in outputs.values())


# Autograd and torch.func.


def no_setup(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    """Saves nothing, for an operator that has no gradient."""
    ctx.set_materialize_grads(False)


def _no_forward_mode(*_: Any) -> Any:
    raise NotImplementedError(
        "the operators of torch_bridge have no forward-mode derivative: call a function of torch_bridge.functional, or "
        'pass implementation="torch", which has one'
    )


class _DifferentiableByReference(torch.autograd.Function):
    """Computes `function(*args)`; its gradient is the VJP of `reference(*args)`. See `differentiable`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., Any], _: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        _, ctx.reference, *args = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        args, reference, needs = ctx.saved_tensors, ctx.reference, ctx.needs_input_grad[2:]
        needed = [i for i, need in enumerate(needs) if need]  # indices in `args`

        def results_with_grads(*values: Tensor) -> tuple[Tensor, ...]:
            """Returns the results that have gradients, given the values of the `needed` arguments."""
            given = dict(zip(needed, values, strict=True))
            results = reference(*[given.get(i, x) for i, x in enumerate(args)])
            return tuple(x for x, d in zip(results, grads, strict=True) if d is not None)

        dargs: dict[int, Tensor] = {}
        if any(d is not None for d in grads):
            vjp: Any = torch.func.vjp(results_with_grads, *[args[i] for i in needed])[1]
            dargs = dict(zip(needed, vjp(tuple(d for d in grads if d is not None)), strict=True))
        return None, None, *(dargs.get(i) for i in range(len(args)))

    jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]


# The reason that `explain` gives for a call in forward mode.
FORWARD_MODE = "in forward mode, PyTorch operations compute results and tangents"


def in_forward_mode() -> bool:
    """Returns whether forward mode, such as `torch.func.jvp`, is active, so that tensors may have tangents.

    PyTorch does not tell which tensors have them: a transformation of `torch.func` hides the tangents of an outer one.
    """
    return forward_ad._current_level >= 0


# torch.compile guards the dual level by itself, and would guard on the value that the level has while it traces.
in_forward_mode._dynamo_marked_constant = True  # type: ignore[attr-defined]


def differentiable(
    function: Callable[..., tuple[Tensor, ...]], reference: Callable[..., tuple[Tensor, ...]], *args: Tensor | None
) -> tuple[Tensor, ...]:
    """Returns `function(*args)` with the derivatives of `reference(*args)`, of any order.

    `reference` must compute the same results in operations that `torch.func` can differentiate. It runs only if a
    derivative is requested, and in forward mode.
    """
    if in_forward_mode():
        return reference(*args)
    if not torch.is_grad_enabled():
        return function(*args)
    results: tuple[Tensor, ...] = _DifferentiableByReference.apply(function, reference, *args)
    return results


def no_second_order(*_: Any) -> Any:
    """Raises NotImplementedError; registered as the gradient of operators that compute gradients."""
    raise NotImplementedError(
        'the gradients of the kernels of torch_bridge have no derivatives: pass implementation="torch", which has them'
    )


def _is_wrapped(x: Tensor) -> bool:
    """Whether a transformation of `torch.func` has wrapped a tensor."""
    return torch.func.debug_unwrap(x, recurse=False) is not x


def unwrapped_levels(x: Tensor) -> list[Tensor]:
    """Returns `x` and, under transformations of `torch.func`, the tensors inside: `x` is wrapped once by each."""
    found = [x]
    while (inner := torch.func.debug_unwrap(found[-1], recurse=False)) is not found[-1]:
        found.append(inner)
    return found


class _Registered(NamedTuple):
    """The functions that `call` runs in place of an operator.

    The classes take the arguments of the operator, and then those that only `setup` reads.

    Attributes:
      transformed: calls the operator and defines its gradient; for `torch.func`, which ignores `register_autograd`.
      function: computes the operator without the dispatcher.
      eager: computes the operator without the dispatcher, and defines its gradient.
    """

    transformed: type[torch.autograd.Function]
    function: Callable[..., Any]
    eager: type[torch.autograd.Function]


_REGISTERED: dict[Any, _Registered] = {}


def register(
    definition: Any, op: Any, fake: Callable[..., Any], gradients: Callable[..., Any], setup: Callable[..., None],
    vmap: Callable[..., Any], decomposed: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Registers an operator made by `define`: its fake, gradient and vmap rule, and the functions that `call` runs.

    Args:
      definition: the operator as `define` returned it.
      op: the same operator as an attribute of `torch.ops`, the form in which `call` takes it.
      fake: returns empty outputs of the right shapes and dtypes, for compilers.
      gradients: `backward` of a `torch.autograd.Function`, for all outputs and arguments.
      setup: `setup_context` of a `torch.autograd.Function`, which saves what `gradients` reads.
      vmap: the rule of `torch.vmap`.
      decomposed: computes the operator in PyTorch operations, for `torch.onnx.export` and others that decompose it.
    """
    if decomposed is not None:
        _register_decomposition(op, fake, decomposed)
        fake = _lowered_as_an_operator(op, fake)
    definition.register_fake(_without_tangents(fake))
    definition.register_autograd(gradients, setup_context=setup)
    definition.register_vmap(vmap)
    function, count = definition.function, len(op._schema.arguments)
    transformed, eager = _transformed(op, count, setup, gradients), _eager(function, count, setup, gradients)
    _REGISTERED[op] = _Registered(transformed, function, eager)


def _register_decomposition(op: Any, fake: Callable[..., Any], decomposed: Callable[..., Any]) -> None:
    """Registers a decomposition in PyTorch's table of all, for `torch.onnx.export` and those who name the operator.

    Other parts of PyTorch read that table, too, and may run the decomposition in place of the operator: it returns
    all that the operator returns.

    `fake` is registered as the operator's shape function: without one, PyTorch would run `decomposed` to find the
    shapes of results where sizes are symbolic.
    """
    torch._decomp.register_decomposition(op, type="meta")(fake)
    torch._decomp.register_decomposition(op)(decomposed)


def _lowered_as_an_operator(op: Any, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fake`, which first tells Inductor, if it is in use, to call the operator as it is.

    Inductor does so by itself, but where the variable CI is set it raises for an operator of that table that it has no
    lowering for: it takes the operator for one of PyTorch's own. It lowers only what it has traced, through `fake`.
    """

    def traced(*args: Any) -> Any:
        inductor = sys.modules.get("torch._inductor.lowering")
        with contextlib.suppress(AttributeError):  # these names are private: Inductor without them is on its own
            if inductor is not None and op not in inductor.lowerings:
                tag = torch._library.utils.get_layout_constraint_tag(op, with_default=True)
                inductor.make_fallback(op, layout_constraint=inductor.tag_to_layout_constraint(tag), warn=False)
        return fake(*args)

    return traced


def _transformed(
    op: Any, count: int, setup: Callable[..., None], gradients: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """Returns the class for `_Registered.transformed` of an operator of `count` arguments."""

    class Transformed(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return op(*args[:count])

        setup_context = staticmethod(setup)
        backward = staticmethod(gradients)
        jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]

    return Transformed


def _eager(
    function: Callable[..., Any], count: int, setup: Callable[..., None], gradients: Callable[..., Any]
) -> type[torch.autograd.Function]:
    """Returns the class for `_Registered.eager` of an operator of `count` arguments."""

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:  # setup_context has more host overhead
            output = function(*args[:count])
            setup(ctx, args, output)
            return output

        backward = staticmethod(gradients)
        jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]

    return Eager


_PLAIN = (Tensor, torch.nn.Parameter)
# Legacy vmap is used by `torch.autograd.grad(is_grads_batched=True)` and
# `torch.autograd.functional.jacobian(vectorize=True)`.
_is_legacy_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def call(op: Any, *args: Any, for_setup: tuple[Any, ...] = ()) -> Any:
    """Calls an operator; under a transformation of `torch.func`, calls its `_Registered.transformed`.

    Where the dispatcher is bypassed, the operator's `setup` gets `for_setup` after the arguments.
    An eager call on plain tensors that no compiler, mode or transformation observes bypasses the dispatcher, because
    dispatch takes longer on the host than a short kernel takes on the device.
    """
    if torch.compiler.is_compiling():
        return op(*args)
    tensors = [x for x in args if isinstance(x, Tensor)]
    registered = _REGISTERED[op]
    if any(map(_is_wrapped, tensors)):
        return registered.transformed.apply(*args, *for_setup)
    if _is_observed_by_dispatch(tensors):
        return op(*args)
    # `eager` also runs in forward mode, where it raises NotImplementedError
    if in_forward_mode() or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return registered.eager.apply(*args, *for_setup)
    return registered.function(*args)


def _is_observed_by_dispatch(tensors: list[Tensor]) -> bool:
    """Whether a dispatch mode, a tracer or a tensor subclass has to see the operators called on these tensors.

    This does not check for compilers, forward mode and `torch.func`, which `call` handles separately.
    """
    if is_in_torch_dispatch_mode() or torch._C._get_tracing_state() is not None:
        return True
    return any(type(x) not in _PLAIN or x.is_meta or _is_legacy_batched(x) for x in tensors)


def is_unobserved(tensors: list[Tensor]) -> bool:
    """Whether nothing but reverse-mode autograd observes operations on these tensors.

    Possible observers are compilers, forward mode, transformations of `torch.func`, and those of
    `_is_observed_by_dispatch`.
    """
    if torch.compiler.is_compiling() or in_forward_mode() or any(map(_is_wrapped, tensors)):
        return False
    # a listener is a dispatch mode, but `torch_bridge.explain` reports what a call without that mode would run
    return recording.listener() is not None or not _is_observed_by_dispatch(tensors)


def wants_gradients(tensors: list[Tensor]) -> bool:
    """Whether a gradient of any of these tensors may be requested, by autograd or by a transformation."""
    if not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return any(x.requires_grad for x in tensors)
    return any(inner.requires_grad for x in tensors for inner in unwrapped_levels(x))
