"""`jaxrnn.explain`: which implementation a program would run, and why, without running it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrnn import _bridge, context
from jaxrnn.checks import describe
from jaxrnn.choice import MARK, Choice
from torch_bridge.records import CallExplanation, LaunchRecord, merge_launches
from torch_bridge.records import Explanation as Explanation

if TYPE_CHECKING:
    from torch_bridge.tiling import Device


# JAX raises an error with this text for the gradient of a function with a `jax.lax.while_loop`.
_NO_GRADIENT = "Reverse-mode differentiation does not work for lax.while_loop"


def explain(
    function: Callable[..., Any], *args: Any, device: str | None = None, gradients: bool | None = None, **kwargs: Any
) -> Explanation:
    """Says which implementation every recurrence and norm of a function would run, and why.

    The function is traced, and neither compiled nor run. The choices are those that the call itself makes: for the
    implementation when it is traced, for the tiling when it is compiled. On a mesh that JAX manages (`AxisType.Auto`),
    the launches are those on the whole arrays: JAX shards them later. With `remat=True`, the backward pass has a second
    forward launch, which recomputes the residuals.

    Args:
      function: any function that JAX can trace: `jaxrnn.gru`, `apply` of a Flax module, a loss or a training step.
        A module of NNX that changes its state when it is called, by dropout or a carry from `rngs`, must be an
        argument: `explain(lambda module, xs: module(xs), module, xs)`.
      *args: its arguments; arrays may be replaced by `jax.ShapeDtypeStruct`. Arguments that are no arrays, such as
        flags and strings, are passed unchanged.
      device: None explains this process. The name of a GPU, such as "a100" or "rtx4090", explains that GPU, which need
        not be present. It needs Triton and no GPU. The error for an unknown name lists all names.
      gradients: whether to trace the gradient of the function to its floating-point arguments, with the launches of a
        training step. With None it is traced unless the function itself computes derivatives with kernels, or cannot be
        differentiated because of a `jax.lax.while_loop`.
      **kwargs: its keyword arguments.

    Returns:
      The choice and the launches of every recurrence and norm.

    Raises:
      ValueError: `function` is not callable, or there is no GPU with the name `device`.
      NotImplementedError: "triton" was requested for a call that it cannot run, or `device` was given, but Triton is
        missing.

    Examples:
      The forward and the backward pass of a module, on an H100 that need not be here:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxrnn
      >>> from jaxrnn import linen
      >>> model, xs = linen.GRU(16, time_major=True), jnp.ones((12, 4, 8))
      >>> variables = model.init(jax.random.key(0), xs)
      >>> explanation = jaxrnn.explain(model.apply, variables, xs, device="h100")
      >>> print(explanation)  # doctest: +ELLIPSIS
      on NVIDIA H100...:
      gru(xs float32[12,4,8], 16 units) runs triton: ...
        gru forward: ...
      >>> explanation.implementation, [launch.direction for launch in explanation.launches]
      ('triton', ['forward', 'backward'])
    """
    if not callable(function):
        raise ValueError(f"explain: function must be callable, got {describe(function)}; pass it and its arguments")
    profile = None if device is None else _bridge.profile(device)
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [x for x in leaves if _is_array(x)]

    def call(arrays: list[Any]) -> Any:
        traced = iter(arrays)
        args, kwargs = jax.tree.unflatten(tree, [next(traced) if _is_array(x) else x for x in leaves])
        try:
            return function(*args, **kwargs)
        except Exception as error:
            flax_errors = sys.modules.get("flax.errors")
            if flax_errors is not None and isinstance(error, flax_errors.TraceContextError):
                error.add_note(
                    "jaxrnn.explain traces the function: a module of NNX that changes its state when it is called, by "
                    "dropout or a carry from rngs, must be an argument: "
                    "jaxrnn.explain(lambda module, xs: module(xs), module, xs)"
                )
            raise

    if not gradients:
        result = _trace(lambda arrays: _arrays_of(call(arrays)), arrays, profile)
        launches = result.launches
        if gradients is not None or not launches or any(launch.direction != "forward" for launch in launches):
            return result

    def differentiate(arrays: list[Any]) -> Any:
        floats = [x for x in arrays if _is_floating(x)]

        def outputs(floats: list[Any]) -> list[Any]:
            traced = iter(floats)
            results = call([next(traced) if _is_floating(x) else x for x in arrays])
            return [x for x in _arrays_of(results) if _is_floating(x)]

        results, pull = jax.vjp(outputs, floats)
        return results, pull([jnp.zeros_like(x) for x in results])

    try:
        return _trace(differentiate, arrays, profile)
    except Exception as error:
        if gradients is None and _NO_GRADIENT in str(error):
            return result
        error.add_note("jaxrnn.explain traced the gradient of the function; gradients=False explains it without.")
        raise


def _trace(function: Callable[..., Any], arrays: list[Any], profile: Device | None) -> Explanation:
    with context.listening(profile) as listener:
        jaxpr = jax.make_jaxpr(function)(arrays)
        choices: list[Choice] = listener.choices
        device = _bridge.chosen_device() if any(choice.implementation == "triton" for choice in choices) else None
        launches: dict[str, list[LaunchRecord]] = {}
        for name, record in _bridge.find_launches(jaxpr.jaxpr, device, prefix=MARK):
            launches.setdefault(name, []).extend([] if record is None else [record])
    marked = [(choice, f"{MARK}{choice.index}") for choice in choices if choice.marked]
    calls = [_explain_call(choice, launches[name]) for choice, name in marked if name in launches]
    calls += dict.fromkeys(_explain_call(choice, []) for choice in choices if not choice.marked)
    return Explanation(None if device is None else device.name or "Triton's interpreter", tuple(calls))


def _explain_call(choice: Choice, records: list[LaunchRecord]) -> CallExplanation:
    return CallExplanation(
        choice.name, choice.arguments, choice.implementation, choice.reason, choice.unavailable,
        merge_launches(records),
    )  # fmt: skip


def _is_array(x: Any) -> bool:
    # a scalar of NumPy is an argument like a number of Python: it may have to be static
    return hasattr(x, "shape") and hasattr(x, "dtype") and not isinstance(x, np.generic)


def _is_floating(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _arrays_of(results: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(results) if _is_array(x)]
