"""The base class of the cells that can be fused, and the entry of a cell in the list `jaxrnn.linen.cells`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from flax.typing import Dtype, Initializer
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import modules
from jaxrnn.checks import Implementation, must_scan
from jaxrnn.modules import Carry, CarryT


@dataclass(frozen=True)
class CellEntry:
    """The entry of a cell in the list `jaxrnn.linen.cells`.

    Attributes:
      replacements: by class of Flax, the class that replaces it.
      cell_types: by name in `ScannedRNN.cell_type`, the class that the name selects.
      reason_to_scan: maps a cell of one of these classes to the reason why it cannot be fused, or to None.
    """

    replacements: Mapping[type[nn.RNNCellBase], type[FusedCell[Any]]]
    cell_types: Mapping[str, type[FusedCell[Any]]]
    reason_to_scan: Callable[[Any], str | None]


class DenseParams(nn.Module):
    """The parameters of an `nn.Dense`, without the matrix product."""

    features: int
    use_bias: bool
    kernel_init: Initializer
    bias_init: Initializer
    param_dtype: Dtype

    @nn.compact
    def __call__(self, input_features: int) -> tuple[Array, Array | None]:
        """Returns `(kernel [input_features, features], bias [features] or None)`."""
        kernel = self.param("kernel", self.kernel_init, (input_features, self.features), self.param_dtype)
        if not self.use_bias:
            return kernel, None
        return kernel, self.param("bias", self.bias_init, (self.features,), self.param_dtype)


class FusedCell(nn.RNNCellBase, Generic[CarryT]):
    """The base class that precedes Flax's class among the bases of each cell and replaces its computation.

    A subclass defines `recurrence` and `packed_params(input_features, hidden)`, which returns the parameters for the
    function of `jaxrnn`, creating missing ones.
    """

    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None

    def __call__(self, carry: CarryT, inputs: ArrayLike) -> tuple[CarryT, Array]:
        """Computes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM. H is the width of the carry, as in Flax.
          inputs: `[*batch, D]`; the batch axes of inputs and carry are broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the dtype to which the computation dtype and the carry's dtype promote.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell.
        """
        from jaxrnn.linen import cells  # the files of the cells import this one

        if must_scan(cells.reason_to_scan(self), self.precision, self.implementation, "nn.scan"):
            return super().__call__(carry, inputs)
        dtype = jnp.result_type(inputs, self.param_dtype) if self.dtype is None else self.dtype
        carry = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), carry)
        carry, inputs = modules.broadcast_batch_axes(carry, inputs)
        options = {"precision": self.precision, "implementation": self.implementation}
        carry, ys, _ = self.run(carry, inputs[None], **options)
        return carry, ys[0]

    @property
    def recurrence(self) -> str:
        """The name of the recurrence of `jaxrnn` that computes the cell, such as "gru"."""
        raise NotImplementedError

    def gate_params(
        self, name: str, input_features: int, hidden: int, use_bias: bool, bias_init: Initializer | None = None
    ) -> tuple[Array, Array | None]:
        """Returns kernel and bias of one gate, under Flax's name for its product with x (`i*`) or h (`h*`).

        The initializer of the bias is by default the attribute `bias_init`.
        """
        return DenseParams(
            features=hidden,
            use_bias=use_bias,
            kernel_init=self.kernel_init if name.startswith("i") else self.recurrent_kernel_init,
            bias_init=self.bias_init if bias_init is None else bias_init,
            param_dtype=self.param_dtype,
            name=name,
        )(input_features)

    def run(self, carry: Carry, xs: Array, **options: Any) -> tuple[Carry, Array, Carry | None]:
        """Calls `modules.run` with the parameters of this cell."""
        modules.check_carry(self.recurrence, carry)
        h = jax.tree.leaves(carry)[-1]
        params = self.packed_params(xs.shape[-1], h.shape[-1])
        dtype = canonicalize_dtype(xs, h, *params, dtype=self.dtype)
        return modules.run(self.recurrence, modules.cast(params, dtype), carry, jnp.asarray(xs, dtype), **options)
