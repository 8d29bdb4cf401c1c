"""The base class of the cells that can be fused, and the entry of a cell in the list `jaxrnn.linen.cells`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype
from flax.typing import Initializer, PRNGKey
from jax import Array
from jax.typing import ArrayLike

from jaxrnn import modules
from jaxrnn.checks import Caller, Implementation
from jaxrnn.choice import must_scan
from jaxrnn.modules import Carry, CarryT


@dataclass(frozen=True)
class CellEntry:
    """The entry of a cell in the list `jaxrnn.linen.cells`.

    Attributes:
      replacements: by class of Flax, the class that replaces it.
      cell_types: by name in `ScannedRNN.cell_type`, the class that the name selects. All classes are listed.
      reason_to_scan: maps a cell of one of these classes to the reason why it cannot be fused, or to None.
    """

    replacements: Mapping[type[nn.RNNCellBase], type[FusedCell[Any]]]
    cell_types: Mapping[str, type[FusedCell[Any]]]
    reason_to_scan: Callable[[Any], str | None]


def block_initializer(init: Initializer, num_blocks: int) -> Initializer:
    """Returns an initializer of a block-diagonal kernel `[N, H / N, F / N]`, which is called with the shape `(H, F)`.

    If `init` returns a box, such as that of `nn.with_partitioning`, its names are those of the three axes.
    """

    def initialize(key: Array, shape: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda *x: jnp.stack(x), *modules.initialize_blocks(init, num_blocks, key, shape, dtype))

    return initialize


class FusedCell(nn.RNNCellBase, Generic[CarryT]):
    """The base class that precedes Flax's class among the bases of each cell and replaces its computation.

    A subclass defines `recurrence` and `packed_params(input_features, hidden)`, which returns the parameters for the
    function of `jaxrnn`, creating missing ones.
    """

    precision: jax.lax.PrecisionLike = None
    implementation: Implementation = None
    num_blocks: int = 1

    def __call__(self, carry: CarryT, inputs: ArrayLike) -> tuple[CarryT, Array]:
        """Computes one step, as a sequence of length one.

        Args:
          carry: `[*batch, H]`, or `(c, h)` of that shape for an LSTM. H is the width of the carry, as in Flax.
          inputs: `[*batch, D]`; the batch axes of inputs and carry are broadcast.

        Returns:
          `(carry, output [*batch, H])`, in the dtype to which the computation dtype and the carry's dtype promote.

        Raises:
          ValueError: shapes or dtypes disagree, or `num_blocks` does not divide H.
          NotImplementedError: the named implementation cannot run this cell, or Flax's cell, which has no blocks, would
            have to run it.
        """
        from jaxrnn.linen import cells  # the files of the cells import this one

        caller = modules.caller_of(self, xs="inputs")
        reason = cells.reason_to_scan(self, (carry, inputs))
        modules.check_blocks_are_fused(caller, self.num_blocks, reason)
        modules.check_structure(self.recurrence, carry, caller)
        if must_scan(reason, self.precision, self.implementation, "nn.scan", caller):
            return super().__call__(carry, inputs)
        modules.check_dtypes(self)
        modules.check_step(caller, self.recurrence, carry, inputs)
        dtype = jnp.result_type(inputs, self.param_dtype) if self.dtype is None else self.dtype
        carry = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, dtype)), carry)
        carry, inputs = modules.broadcast_batch_axes(carry, inputs, caller)
        options: Any = {"precision": self.precision, "implementation": self.implementation}
        carry, ys, _ = self.run(carry, inputs[None], caller=caller, **options)
        return carry, ys[0]

    @nn.nowrap
    def initialize_carry(self, rng: PRNGKey, input_shape: tuple[int, ...]) -> Carry:
        """Returns the carry of a new sequence, as Flax's cell does.

        Args:
          rng: the key for `carry_init`.
          input_shape: the shape of the inputs of one step, `[*batch, D]`.

        Returns:
          `[*batch, H]` or, for an LSTM, `(c, h)` of two such arrays, of the dtype `param_dtype`.

        Raises:
          ValueError: `features` is not a positive integer, or `input_shape` is no shape.
        """
        modules.check_sizes(self, "features")
        modules.check_input_shape(self, input_shape, "rng, input_shape")
        return super().initialize_carry(rng, input_shape)

    @property
    def recurrence(self) -> modules.Recurrence:
        """The recurrence of `jaxrnn` that computes the cell: its name, such as "gru", or a cell with its constants."""
        raise NotImplementedError

    @nn.nowrap
    def layer_param(self, layer: str, name: str, init: Initializer, shape: tuple[int, ...]) -> Array:
        """Returns a parameter under the name of a layer of Flax's cell, such as `ir/kernel`; creates it if missing.

        It has the shape that `init` returns for `shape`: this shape, or that of the blocks of a `block_initializer`. It
        is created in the scope of the layer, without a module, so that `tabulate` and interceptors see the cell alone.
        """
        scope: Any = self.scope
        return scope.push(layer, reuse=True).param(name, init, shape, self.param_dtype)

    @nn.nowrap
    def gate_params(
        self, layer: str, input_features: int, hidden: int, use_bias: bool, bias_init: Initializer | None = None
    ) -> tuple[Array, Array | None]:
        """Returns kernel and bias of one gate, under Flax's name for its product with x (`i*`) or h (`h*`).

        The kernel is `[input_features, hidden]`, or, for a product with h in N > 1 blocks, `[N, H / N, H / N]`. The
        initializer of the bias is by default the attribute `bias_init`.

        Raises:
          ValueError: the given parameters are those of another cell or have other widths, or `num_blocks` does not
            divide H.
        """
        modules.check_num_blocks(modules.caller_of(self), self.num_blocks, hidden)
        self.check_given(layer, input_features, hidden)
        kernel_init = self.kernel_init if layer.startswith("i") else self.recurrent_kernel_init
        if self.num_blocks > 1 and not layer.startswith("i"):
            kernel_init = block_initializer(kernel_init, self.num_blocks)
        kernel = self.layer_param(layer, "kernel", kernel_init, (input_features, hidden))
        if not use_bias:
            return kernel, None
        return kernel, self.layer_param(layer, "bias", self.bias_init if bias_init is None else bias_init, (hidden,))

    @nn.nowrap
    def check_given(self, name: str, input_features: int, hidden: int) -> None:
        """Raises ValueError if parameters of a gate are missing and not created, or have wrong widths.

        Only the widths of kernels of inputs ("i*") are checked here; Flax checks the others.
        """
        kind, path = type(self).__name__, "/".join(self.path) or "the top level"
        if not self.has_variable("params", name):
            if self.is_mutable_collection("params"):
                return  # they are created
            given = ", ".join(self.variables.get("params", {})) or "none"
            raise ValueError(
                f"{kind}: the parameters at {path} must have {name}, got {given}; pass the variables that init of this "
                'module returned, {"params": ...}'
            )
        kernel = nn.meta.unbox(self.get_variable("params", name).get("kernel"))
        shape: tuple[int, ...] = getattr(kernel, "shape", ())  # Flax's error names a kernel that is missing
        if not name.startswith("i") or shape == (input_features, hidden) or len(shape) != 2:
            return
        if shape[0] != input_features:
            raise ValueError(
                f"{kind}: inputs must be {shape[0]} wide, as those that the parameters at {path} were made for, got "
                f"{input_features}; pass inputs of that width, or call init with these"
            )
        raise ValueError(
            f"{kind}: the carry must be {shape[1]} wide, as that which the parameters at {path} were made for, got "
            f"{hidden}; pass a carry of that width and set features={shape[1]} if the module has features, or call "
            "init with this carry"
        )

    @nn.nowrap
    def run(self, carry: Carry, xs: Array, *, caller: Caller, **options: Any) -> tuple[Carry, Array, Carry | None]:
        """Calls `modules.run` with the parameters of this cell."""
        modules.check_dtypes(self)
        modules.check_carry(self.recurrence, carry, caller)
        h = jax.tree.leaves(carry)[-1]
        params = self.packed_params(xs.shape[-1], h.shape[-1])
        dtype = canonicalize_dtype(xs, h, *params, dtype=self.dtype)
        params, xs = modules.cast(params, dtype), jnp.asarray(xs, dtype)
        return modules.run(self.recurrence, params, carry, xs, caller=caller, **options)
