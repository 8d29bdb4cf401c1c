"""Names of compiled kernels, as profilers such as Nsight Systems and Perfetto show them.

A kernel would have the name of its Python function, which many cells and families share. The name is an argument of
`triton.jit` and no part of the code: the compiled instructions are the same under every name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import triton


class Specialization(NamedTuple):
    """The compile-time arguments of a kernel, as Triton passes them to the functions of this module."""

    constants: Mapping[str, Any]
    signature: Mapping[str, str]


def of_loop(family: str, direction: str) -> Callable[[Any], str]:
    """Returns the function that names a time loop, such as "gru_fwd_resident" or, of a tangent, "gru_tangent_resident".

    The cell's name is that of the file of `torch_bridge.kernels.cells` whose function is the argument `STEP` or
    `GRAD_STEP`.
    """

    def name(specialization: Any) -> str:
        constants = specialization.constants
        step = constants.get("STEP") or constants.get("GRAD_STEP")
        what = "tangent" if constants.get("RESIDUALS", step) is None else direction
        return f"{step.fn.__module__.rpartition('.')[2]}_{what}_{family}"

    return name


def of_norm(what: str) -> Callable[[Any], str]:
    """Returns the function that names a kernel of a norm, such as "rms_norm_fwd" or "layer_norm_bwd"."""
    return lambda specialization: f"{'layer' if specialization.constants['CENTERED'] else 'rms'}_norm_{what}"


def name_of(function: Any, constants: Mapping[str, Any]) -> str:
    """Returns the name of a compiled kernel, given the values of its compile-time arguments."""
    if isinstance(function, triton.runtime.JITFunction):
        name: str = function.repr(Specialization(constants, {}))
        return name.rpartition(".")[2]  # Triton drops the module from the name of a function
    named = function.kwargs.get("repr")  # in the interpreter, which has no names
    return named(Specialization(constants, {})) if named else function.__name__
