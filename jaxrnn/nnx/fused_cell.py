"""The cells that can be fused: their base class, their entries in the list `jaxrnn.nnx.cells`, and their parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
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
from jaxrnn.checks import Caller, Implementation, check_size
from jaxrnn.choice import must_scan
from jaxrnn.modules import Carry, CarryT

# The names of the layers that multiply x, and of those that multiply h.
Layers = tuple[list[str], list[str]]
DENSE: Layers = ["dense_i"], ["dense_h"]


class LayerWeights(NamedTuple):
    """The weights of a cell's layers, with the gates of several layers concatenated; None for layers without a bias."""

    w_ih: Array
    w_hh: Array
    b_ih: Array | None
    b_hh: Array | None

    def bias(self) -> Array:
        """Returns the sum of both biases."""
        present = [b for b in (self.b_ih, self.b_hh) if b is not None]
        return functools.reduce(jnp.add, present) if present else jnp.zeros(self.w_ih.shape[-1:], self.w_ih.dtype)


@dataclass(frozen=True)
class CellEntry:
    """The entry of a cell in the list `jaxrnn.nnx.cells`.

    Attributes:
      replaced: the classes of Flax that have a replacement of the same name.
      layers: by class, of Flax and of this package, the layers of the cell.
      other_params: the parameters that a cell may have besides those of these layers, by attribute.
      recurrence: maps a cell to the recurrence of `jaxrnn` that computes it: its name, such as "gru", or the cell with
        its constants.
      pack: maps a cell and the weights of its layers to the parameters for that recurrence.
      reason_to_scan: maps a cell to the reason why it cannot be fused, or to None.
    """

    replaced: tuple[type[nnx.RNNCellBase], ...]
    layers: Mapping[type[nnx.RNNCellBase], Layers]
    other_params: tuple[str, ...]
    recurrence: Callable[[Any], modules.Recurrence]
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


def block_initializer(init: Initializer, num_blocks: int) -> Initializer:
    """Returns an initializer of a block-diagonal kernel `[N, H / N, F / N]`, which is called with the shape `(H, F)`.

    If `init` returns metadata, as that of `nnx.with_partitioning` does, they are those of the whole kernel.
    """

    def initialize(key: Array, shape: Any, dtype: Any) -> Any:
        blocks = modules.initialize_blocks(init, num_blocks, key, shape, dtype)
        if not isinstance(blocks[0], nnx.VariableMetadata):
            return jnp.stack(blocks)
        return dataclasses.replace(blocks[0], raw_value=jnp.stack([one.raw_value for one in blocks]))

    return initialize


class FusedCell(nnx.RNNCellBase, Generic[CarryT]):
    """The base class that precedes Flax's class among the bases of each cell and replaces its computation.

    With N > 1 blocks, the layers that multiply h have a kernel `[N, H / N, F / N]` instead of `[H, F]`. They only hold
    the weights: a call of such a layer is not the block-diagonal product.
    """

    dtype: Dtype | None
    param_dtype: Dtype

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
        **options: Unpack[GatedCellOptions],
    ) -> None:
        caller = modules.caller_of(self)
        check_size(caller("in_features"), in_features)
        check_size(caller("hidden_features"), hidden_features)
        if "rngs" in options:
            modules.check_rngs(caller, options["rngs"])
        modules.check_num_blocks(caller, num_blocks, hidden_features)
        given: Any = options
        if num_blocks > 1:
            init = given.get("recurrent_kernel_init")
            if init is None:
                init = inspect.signature(super().__init__).parameters["recurrent_kernel_init"].default
            given["recurrent_kernel_init"] = block_initializer(init, num_blocks)
        super().__init__(in_features, hidden_features, **given)  # type: ignore[call-arg]
        self.precision = precision
        self.implementation = implementation
        self.num_blocks = num_blocks

    def __call__(self, carry: CarryT, inputs: ArrayLike) -> tuple[CarryT, Array]:
        """Computes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM.
          inputs: `[*batch, D]`; the batch axes of inputs and carry are broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the dtype to which the computation dtype and the carry's dtype promote.

        Raises:
          ValueError: shapes or dtypes disagree.
          NotImplementedError: the named implementation cannot run this cell, or Flax's cell, which has no blocks, would
            have to run it.
        """
        caller = modules.caller_of(self, xs="inputs")
        reason = reason_to_scan(self, (carry, inputs))
        modules.check_blocks_are_fused(caller, self.num_blocks, reason)
        modules.check_structure(entry_of(self).recurrence(self), carry, caller)
        if must_scan(reason, self.precision, self.implementation, "nnx.scan", caller):
            return super().__call__(carry, inputs)  # type: ignore[arg-type]  # Flax declares JAX arrays
        modules.check_dtypes(self)
        modules.check_step(caller, entry_of(self).recurrence(self), carry, inputs)
        dtype = jnp.result_type(inputs, self.param_dtype) if self.dtype is None else self.dtype
        carry = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), carry)
        carry, inputs = modules.broadcast_batch_axes(carry, inputs, caller)
        options: Any = {"precision": self.precision, "implementation": self.implementation}
        carry, ys, _ = run_fused(self, carry, inputs[None], caller=caller, **options)
        return carry, ys[0]

    def initialize_carry(self, input_shape: tuple[int, ...], *args: Any, **options: Any) -> Carry:
        """Returns the carry of a new sequence, as Flax's cell does.

        Args:
          input_shape: the shape of the inputs of one step, `[*batch, D]`.
          args: Flax's other arguments, such as the random number generator of `carry_init`.
          options: the same by name.

        Returns:
          `[*batch, H]` or, for an LSTM, `(c, h)` of two such arrays, of the dtype `param_dtype`.

        Raises:
          ValueError: `input_shape` is no shape.
        """
        modules.check_input_shape(self, input_shape, "input_shape, rngs")
        return super().initialize_carry(input_shape, *args, **options)


def entry_of(cell: Any) -> CellEntry:
    """Returns the entry of a cell's class or, for a subclass, of its base."""
    from jaxrnn.nnx import cells  # the files of the cells import this one

    return next(cells.ENTRY_OF[cls] for cls in type(cell).__mro__ if cls in cells.ENTRY_OF)


def packed_params(cell: Any) -> Any:
    """Returns the parameters of a cell that can be fused, as the function of `jaxrnn` takes them."""

    def kernels_of(names: list[str]) -> Array:
        return jnp.concatenate([getattr(cell, name).kernel[...] for name in names], axis=-1)

    def biases_of(names: list[str]) -> Array | None:
        layers = [getattr(cell, name) for name in names]
        if all(layer.bias is None for layer in layers):
            return None
        kernels = [layer.kernel[...] for layer in layers]
        zeros = [jnp.zeros(kernel.shape[-1:], kernel.dtype) for kernel in kernels]
        pairs = zip(layers, zeros, strict=True)
        return jnp.concatenate([zero if layer.bias is None else layer.bias[...] for layer, zero in pairs], axis=-1)

    entry = entry_of(cell)
    of_x, of_h = entry.layers[type(cell)]
    return entry.pack(cell, LayerWeights(kernels_of(of_x), kernels_of(of_h), biases_of(of_x), biases_of(of_h)))


def run_fused(
    cell: Any, carry: Carry, xs: Array, *, caller: Caller, **options: Any
) -> tuple[Carry, Array, Carry | None]:
    """Calls `modules.run` with the parameters of a cell that can be fused, after checking the carry's structure."""
    recurrence, params = entry_of(cell).recurrence(cell), packed_params(cell)
    modules.check_carry(recurrence, carry, caller)
    check_widths(recurrence, params, carry, xs, caller)
    dtype = dtypes.canonicalize_dtype(xs, jax.tree.leaves(carry)[-1], *params, dtype=cell.dtype)
    return modules.run(recurrence, modules.cast(params, dtype), carry, jnp.asarray(xs, dtype), caller=caller, **options)


def check_widths(recurrence: modules.Recurrence, params: Any, carry: Carry, xs: Array, caller: Caller) -> None:
    """Raises ValueError unless inputs and carry have the widths for which a cell was made."""
    modules.check_width(caller("xs"), "in_features", params.w_ih.shape[0], xs.shape[-1])
    h = jax.tree.leaves(carry)[-1]
    if getattr(params, "w_hr", None) is None and h.ndim:
        hidden = math.prod(params.w_hh.shape[:-1])  # [H, gates * H], or blocks [N, H / N, gates * H / N]
        modules.check_width(caller("carry"), "hidden_features", hidden, h.shape[-1])


def starts_from_zeros(cell: Any) -> bool:
    """Whether `cell.initialize_carry` is known to return zeros."""
    from jaxrnn.nnx import cells  # the files of the cells import this one

    return modules.starts_from_zeros(cell, [None, jax.nn.initializers.zeros], cells.ENTRY_OF)


def reason_to_scan(cell: Any, arrays: Any = None) -> str | None:
    """Returns why `cell` has to run under `nnx.scan` on carry and inputs `arrays`, or None if it can be fused."""
    from jaxrnn.nnx import cells  # the files of the cells import this one

    if type(cell) not in cells.ENTRY_OF:
        return modules.reason_to_scan_unlisted(cell, cells.REPLACED)
    entry = entry_of(cell)
    reason = modules.reason_to_scan_options(cell, cells.REPLACED, _defaults, arrays) or entry.reason_to_scan(cell)
    if reason is not None:
        return reason
    if getattr(cell, "promote_dtype", dtypes.promote_dtype) is not dtypes.promote_dtype:
        return "a cell with its own promote_dtype"
    layers = [name for names in entry.layers[type(cell)] for name in names]
    for name in layers:
        if (difference := _difference_to_linear(getattr(cell, name), cell.dtype)) is not None:
            return f"a cell whose {name} is not a plain nnx.Linear of the cell's dtype: {difference}"
    if unknown := sorted(nnx.state(cell, nnx.Param).keys() - {*layers, *entry.other_params}):
        return f"a cell with the parameter {unknown[0]}, which jaxrnn does not support"
    return None


@functools.cache
def _defaults(cls: Any) -> dict[str, Any]:
    """Returns the options of a class that have a default, with it."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def _difference_to_linear(layer: Any, dtype: Dtype | None) -> str | None:
    """Returns what may make a layer compute something else than `nnx.Linear` does with this dtype, or None."""
    if type(layer) is not nnx.Linear:
        return f"it is a {type(layer).__name__}"
    if layer.dtype != dtype and (None in (layer.dtype, dtype) or jnp.dtype(layer.dtype) != jnp.dtype(dtype)):
        return "dtype"
    if layer.use_bias != (layer.bias is not None):
        return "use_bias"
    of_flax = _defaults(nnx.Linear)
    for name, value in vars(layer).items():
        if name in ("kernel", "bias", "in_features", "out_features", "use_bias", "dtype", "param_dtype"):
            continue
        if not name.startswith("_") and (name not in of_flax or value is not of_flax[name]):
            return name
    return None
