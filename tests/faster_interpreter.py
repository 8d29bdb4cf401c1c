"""Makes Triton's interpreter faster, for the tests: it does the same once that it would do at every operation.

Types and their properties take more of the time of an interpreted kernel than its arithmetic does.
"""

import types
from typing import Any

from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def install() -> None:
    """Replaces functions of Triton, in this process."""
    _patch_modules_once()
    _find_dtypes_once()
    _make_types_once()
    _leave_equal_shapes()
    _find_types_of_results_once()
    _leave_out_unread_checks()


def _patch_modules_once() -> None:
    """Patches Triton's language once per module of kernels, not once per call, and never takes it back."""
    patch, keep = interpreter._patch_lang, types.SimpleNamespace(restore=lambda: None)
    patched = set()

    def patch_once(function: types.FunctionType) -> types.SimpleNamespace:
        if function.__globals__["__name__"] not in patched:
            patch(function)
            patched.add(function.__globals__["__name__"])
        return keep

    interpreter._patch_lang = patch_once


def _find_dtypes_once() -> None:
    """Finds the NumPy dtype of each type of Triton once."""
    find, found = interpreter._get_np_dtype, {}

    def find_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = find_once


def _make_types_once() -> None:
    """Lets equal types of blocks share their attributes, and values of a type its shape, size and dtype."""
    make_type, made = core.block_type.__init__, {}
    make_value = core.tensor.__init__

    def share_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(length, "value", length) for length in shape)
        if key not in made:
            make_type(self, element_ty, shape)
            made[key] = self.__dict__
        self.__dict__ = made[key]

    def share_value(self: Any, handle: Any, type: Any) -> None:
        if not hasattr(type, "of_values"):
            make_value(self, handle, type)
            type.of_values = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = type.of_values

    core.block_type.__init__ = share_type
    core.tensor.__init__ = share_value


def _leave_equal_shapes() -> None:
    """Leaves operands of equal shapes as they are, of which broadcasting would make types and views."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self: TritonSemantic, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_others


def _find_types_of_results_once() -> None:
    """Finds once to which types two operands of given types are converted, and lets NumPy broadcast their values.

    An operand then has the type of the result, and values of its own shape. That is enough for all operations of two
    operands, which NumPy computes. Operands that change their scalar type are converted by Triton each time.
    """
    convert, found = TritonSemantic.binary_op_type_checking_impl, {}

    def kind(operand: Any) -> Any:
        return operand.type.name if type(operand) is core.tensor else (type(operand), operand)

    def plan(before: Any, after: Any) -> Any:
        """Returns the converted constant, the type for a tensor that is only broadcast, or None."""
        if type(before) is not core.tensor:
            return after
        return after.type if before.type.scalar == after.type.scalar else None

    def apply(plan: Any, operand: Any) -> Any:
        return plan if type(plan) is core.tensor else core.tensor(operand.handle, plan)

    def convert_once(self: TritonSemantic, lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        key = kind(lhs), kind(rhs), args, *kwargs.items()
        plans = found.get(key)
        if plans is None:
            operands = convert(self, lhs, rhs, *args, **kwargs)
            found[key] = plan(lhs, operands[0]), plan(rhs, operands[1])
            return operands
        if plans[0] is None or plans[1] is None:
            return convert(self, lhs, rhs, *args, **kwargs)
        return apply(plans[0], lhs), apply(plans[1], rhs)

    TritonSemantic.binary_op_type_checking_impl = convert_once


def _leave_out_unread_checks() -> None:
    """Leaves out the checks of overflows, unless Triton runs in its mode for debugging: nothing reads their results."""
    check = TritonSemantic.binary_op_sanitize_overflow_impl

    def check_if_read(self: TritonSemantic, *args: Any) -> None:
        if self.builder.options.debug:
            check(self, *args)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_if_read
