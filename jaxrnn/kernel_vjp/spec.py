"""The static options of a recurrence by the kernels, and what follows from them: precision, dtypes of residuals."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxrnn import _bridge
from jaxrnn.call import RecurrenceSpec
from torch_bridge import rules

if TYPE_CHECKING:
    from jax import Array


def kernel_precision(precision: Any, hidden: int) -> rules.Precision | None:
    """Returns Triton's name for the precision of a kernel's float32 products, or None if there is no such kernel."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if isinstance(precision, tuple):
        return kernel_precision(precision[0], hidden) if len(set(precision)) == 1 else None
    try:
        is_default = precision is None or jax.lax.Precision(precision) == jax.lax.Precision.DEFAULT
    except ValueError:
        return None
    return rules.kernel_precision(is_default, hidden)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSpec(RecurrenceSpec):
    """The static options of a recurrence in canonical form.

    Attributes:
      hidden: the units of a state.
      operand_dtype: the dtype in which matrices are multiplied.
      reset_state: "zeros", "fixed" or "stepped".
      kernel_precision: Triton's name for the precision of a kernel's float32 products.
    """

    hidden: int
    operand_dtype: Any
    reset_state: str
    kernel_precision: str

    @property
    def uses_tf32(self) -> bool:
        """Whether products round their float32 operands to TF32."""
        return self.operand_dtype == jnp.float32 and self.kernel_precision == "tf32"


def residual_fits_float16(name: str, spec: KernelSpec) -> bool:
    """Whether float16 holds a residual of this name without loss of accuracy."""
    return rules.residual_fits_float16(name, str(jnp.dtype(spec.operand_dtype)), spec.kernel_precision)


def _residual_dtype(name: str, spec: KernelSpec, sequences: Any) -> Any:
    """Returns the dtype of a residual in the traced program: float32 also where the launch may still choose float16."""
    if not residual_fits_float16(name, spec):
        return jnp.dtype(jnp.float32)
    up_to_launch = spec.uses_tf32 and _bridge.may_have_float32_residuals(spec.hidden, sequences)
    return jnp.dtype(jnp.float32 if up_to_launch else jnp.float16)


# Bytes of input projections, of one model and at the traced shapes, from which saving memory is worth the time. On an
# H200, in-place residuals reduce the memory of GRU 2048,256,128, whose projections take 0.8 GB, from 2.69 GB to 1.91 GB
# and take 0.6 % longer; at 4,128,128 they take 3 % longer.
_IN_PLACE_BYTES = 2**29


# If the hidden width is a multiple of this, all blocks of units are full. At other widths some kernels run out of
# registers with Triton 3.9.
_IN_PLACE_UNITS = 64


def has_residuals_in_place(spec: KernelSpec, rows: int) -> bool:
    """Whether the residuals overwrite the input projections, and the gate gradients overwrite the residuals.

    All three then have the same size, and two arrays fewer of that size are held. The projections, of `rows` rows, must
    be large for this. With `remat`, `rows` counts those of all chunks, because saving memory is what `remat` is for.
    """
    hidden = spec.hidden
    large = 4 * rows * spec.cell.gates * hidden >= _IN_PLACE_BYTES and hidden % _IN_PLACE_UNITS == 0
    return spec.cell.packed_residuals is not None and spec.uses_tf32 and large


def residual_outputs(spec: KernelSpec, xs: Array, in_place: bool) -> list[_bridge.Output]:
    """Returns the outputs of the forward launch that hold the residuals of every step of `xs`."""
    if in_place and spec.cell.packed_residuals:
        name, width = spec.cell.packed_residuals
        return [_bridge.Output(name, jnp.dtype(jnp.float32), width * spec.hidden, over="xp")]
    return [
        _bridge.Output(name, _residual_dtype(name, spec, xs.shape[0] * xs.shape[2]), width * spec.hidden)
        for name, width in spec.cell.residuals
    ]
