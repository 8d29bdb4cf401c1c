"""Rules that the JAX front and the PyTorch front share: of numerics, and of the order of an LSTM's states.

Imports neither torch nor triton.
"""

from __future__ import annotations

import re
from typing import Any, Literal

Precision = Literal["tf32", "tf32x3"]

# Dtypes of the operands that the kernels multiply.
OPERAND_DTYPES = ("float32", "bfloat16", "float16")
# Dtypes of resets that the kernels read; resets of other dtypes are compared with zero first.
RESET_DTYPES = frozenset(
    ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32")
)
# The lowest compute capability, times ten, that the kernels run on.
LOWEST_CAPABILITY = 80
# Up to this hidden size TF32 saves no time, since the products do not bound a step. XLA too multiplies small batches of
# this width in full float32, so TF32 would be far less accurate than XLA. The same holds for gradients of weights of so
# few inputs and units.
FULL_PRECISION_WIDTH = 32


def before_ampere(capability: int, gpu: str) -> str | None:
    """Returns why the kernels do not run on a GPU of this capability times ten, or None; callers append a remedy."""
    if capability >= LOWEST_CAPABILITY:
        return None
    return f"needs compute capability 8.0 (Ampere) or newer, {gpu or 'this GPU'} has {capability / 10}"


def kernel_precision(allows_tf32: bool, hidden: int) -> Precision:
    """Returns the precision of float32 products in a kernel: "tf32", or "tf32x3" for the accuracy of float32."""
    return "tf32" if allows_tf32 and hidden > FULL_PRECISION_WIDTH else "tf32x3"


def residual_fits_float16(name: str, operand_dtype: str, precision: str) -> bool:
    """Whether float16 rounds a residual no worse than the kernel's products, in TF32 or bfloat16, round their operands.

    `carry_gate` is always float32: it multiplies the gradient at every step, so rounding errors would add up over time.
    """
    reduced = operand_dtype == "bfloat16" or (operand_dtype == "float32" and precision == "tf32")
    return reduced and name != "carry_gate"


_WORDS_OF_STATE = {
    "h": frozenset(("h", "hidden", "hn", "hs", "ht", "hx")),
    "c": frozenset(("c", "cell", "cn", "cs", "ct", "cx", "memory")),
}


def fields_by_state(pair: Any) -> dict[str, str]:
    """Returns the fields of a named tuple by the state, "h" or "c", that they name, or by themselves if they name none.

    Returns no fields for a plain tuple.
    """

    def state_of(field: str) -> str:
        words = {*re.split(r"[_\d]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", field).lower())}
        states = [state for state, known in _WORDS_OF_STATE.items() if words & known]
        return states[0] if len(states) == 1 else field

    return {state_of(field): field for field in getattr(pair, "_fields", ())}


def wrong_order(pair: Any, order: tuple[str, str]) -> str | None:
    """Returns how to pass a pair of states whose fields do not name them in this order, or None.

    A plain tuple has no fields, and is taken in this order.
    """
    fields = fields_by_state(pair)
    if not fields or tuple(fields) == order:
        return None
    if not fields.keys() >= {*order}:
        return f"pass a plain tuple ({', '.join(order)})"
    return f"pass {' and '.join(fields[state] for state in order)} in a plain tuple, in this order"
