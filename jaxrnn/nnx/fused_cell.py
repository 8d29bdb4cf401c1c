"""The cells that can be fused: their base class, their entries in the list `jaxrnn.nnx.cells`, and their parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Required, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PromoteDtypeFn
from jax import Array
from jax.typing import ArrayLike
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.checks import Implementation, must_scan
from jaxrnn.modules import Carry, CarryT

# The names of the layers that multiply x, and of those that multiply h.
Layers = tuple[list[str], list[str]]
DENSE: Layers = ["dense_i"], ["dense_h"]


class LayerWeights(NamedTuple):
    """The weights of a cell's layers, with the gates of several layers concatenated; None for layers without a bias."""

    w_ih: Array
    w_hh: Array
    b_ih: Any
    b_hh: Any


@dataclass(frozen=True)
class CellEntry:
    """The entry of a cell in the list `jaxrnn.nnx.cells`.

    Attributes:
      replaced: the classes of Flax that have a replacement of the same name.
      layers: by class, of Flax and of this package, the layers of the cell.
      other_params: the parameters that a cell may have besides those of these layers, by attribute.
      recurrence: maps a cell to the name of the recurrence of `jaxrnn` that computes it, such as "gru".
      pack: maps a cell and the weights of its layers to the parameters for that recurrence.
      reason_to_scan: maps a cell to the reason why it cannot be fused, or to None.
    """

    replaced: tuple[type[nnx.RNNCellBase], ...]
    layers: Mapping[type[nnx.RNNCellBase], Layers]
    other_params: tuple[str, ...]
    recurrence: Callable[[Any], str]
    pack: Callable[[Any, LayerWeights], Any]
    reason_to_scan: Callable[[Any], str | None]


class CellOptions(TypedDict, total=False):
    """The arguments of Flax's constructors that all cells have; their defaults are Flax's."""

    activation_fn: Callable[..., Any]
    kernel_init: Initializer
    recurrent_kernel_init: Initializer
    bias_init: Initializer
    dtype: Dtype | None
    param_dtype: Dtype
    carry_init: Initializer | None
    promote_dtype: PromoteDtypeFn
    keep_rngs: bool
    rngs: Required[nnx.Rngs]
    kernel_metadata: Mapping[str, Any]
    recurrent_kernel_metadata: Mapping[str, Any]
    bias_metadata: Mapping[str, Any]


class GatedCellOptions(CellOptions, total=False):
    """The arguments of Flax's constructors of cells with gates."""

    gate_fn: Callable[..., Any]


class FusedCell(nnx.RNNCellBase, Generic[CarryT]):
    """The base class that precedes Flax's class among the bases of each cell and replaces its computation."""

    dtype: Dtype | None
    param_dtype: Dtype

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
        **options: Unpack[GatedCellOptions],
    ) -> None:
        given: Any = options
        super().__init__(in_features, hidden_features, **given)  # type: ignore[call-arg]
        self.precision = precision
        self.implementation = implementation

    def __call__(self, carry: CarryT, inputs: ArrayLike) -> tuple[CarryT, Array]:
        """Computes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM.
          inputs: `[*batch, D]`; the batch axes of inputs and carry are broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the dtype to which the computation dtype and the carry's dtype promote.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell.
        """
        if must_scan(reason_to_scan(self), self.precision, self.implementation, "nnx.scan"):
            return super().__call__(carry, inputs)  # type: ignore[arg-type]  # Flax declares JAX arrays
        dtype = jnp.result_type(inputs, self.param_dtype) if self.dtype is None else self.dtype
        carry = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), carry)
        carry, inputs = modules.broadcast_batch_axes(carry, inputs)
        options = {"precision": self.precision, "implementation": self.implementation}
        carry, ys, _ = run_fused(self, carry, inputs[None], **options)
        return carry, ys[0]


def entry_of(cell: Any) -> CellEntry:
    """Returns the entry of a cell that can be fused."""
    from jaxrnn.nnx import cells  # the files of the cells import this one

    return cells.ENTRY_OF[type(cell)]


def packed_params(cell: Any) -> Any:
    """Returns the parameters of a cell that can be fused, as the function of `jaxrnn` takes them."""

    def joined(layers: list[str], name: str) -> Any:
        parts = [getattr(getattr(cell, layer), name) for layer in layers]
        return None if parts[0] is None else jnp.concatenate([part[...] for part in parts], axis=-1)

    entry = entry_of(cell)
    of_x, of_h = entry.layers[type(cell)]
    weights = joined(of_x, "kernel"), joined(of_h, "kernel"), joined(of_x, "bias"), joined(of_h, "bias")
    return entry.pack(cell, LayerWeights(*weights))


def run_fused(cell: Any, carry: Carry, xs: Array, **options: Any) -> tuple[Carry, Array, Carry | None]:
    """Calls `modules.run` with the parameters of a cell that can be fused, after checking the carry's structure."""
    recurrence, params = entry_of(cell).recurrence(cell), packed_params(cell)
    modules.check_carry(recurrence, carry)
    dtype = dtypes.canonicalize_dtype(xs, jax.tree.leaves(carry)[-1], *params, dtype=cell.dtype)
    return modules.run(recurrence, modules.cast(params, dtype), carry, jnp.asarray(xs, dtype), **options)


def reason_to_scan(cell: Any) -> str | None:
    """Returns why `cell` has to run under `nnx.scan`, or None if it can be fused."""
    from jaxrnn.nnx import cells  # the files of the cells import this one

    if type(cell) not in cells.ENTRY_OF:
        return modules.reason_to_scan_unlisted(cell, cells.REPLACED)
    entry = entry_of(cell)
    if (reason := entry.reason_to_scan(cell)) is not None:
        return reason
    if getattr(cell, "promote_dtype", dtypes.promote_dtype) is not dtypes.promote_dtype:
        return "a cell with its own promote_dtype"
    layers = [name for names in entry.layers[type(cell)] for name in names]
    for name in layers:
        layer = getattr(cell, name)
        if type(layer) is not nnx.Linear or layer.dot_general is not jax.lax.dot_general:
            return f"a cell whose {name} is not a plain nnx.Linear"
    if unknown := sorted(nnx.state(cell, nnx.Param).keys() - {*layers, *entry.other_params}):
        return f"a cell with the parameter {unknown[0]}, which jaxrnn does not support"
    return None
