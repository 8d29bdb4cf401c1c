"""The GRU whose gates see a norm of inputs and state: its cell, its stack and its entry."""

from __future__ import annotations

from typing import Any, Literal, Required, TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer
from jax import Array
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.cells import NormGRUParams, norm_gru_cell
from jaxrnn.checks import Implementation, check_norm_and_constants
from jaxrnn.modules import ReturnsCarry
from jaxrnn.nnx.fused_cell import DENSE, CellEntry, FusedCell, LayerWeights, reason_to_scan
from jaxrnn.nnx.stack import KERNEL_INIT, RECURRENT_KERNEL_INIT, FusedStack, StackOptions


class NormGRUCellOptions(TypedDict, total=False):
    """The arguments of the constructor that Flax's cells have too."""

    kernel_init: Initializer
    recurrent_kernel_init: Initializer
    bias_init: Initializer
    dtype: Dtype | None
    param_dtype: Dtype
    rngs: Required[nnx.Rngs]


class NormParams(nnx.Module):
    """The parameters of the norm of the inputs or of the state, with the names that Flax's norms give them."""

    def __init__(self, features: int, has_bias: bool, param_dtype: Dtype) -> None:
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype)) if has_bias else nnx.data(None)


class PlainNormGRUCell(nnx.RNNCellBase):
    """The constructor and the carry of `NormGRUCell`, in the form that Flax's cells have."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        norm: Literal["rms", "layer"],
        epsilon: float,
        update_bias: float,
        kernel_init: Initializer = KERNEL_INIT,
        recurrent_kernel_init: Initializer = RECURRENT_KERNEL_INIT,
        bias_init: Initializer = jax.nn.initializers.zeros,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.norm = norm
        self.epsilon = epsilon
        self.update_bias = update_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        wide = 3 * hidden_features
        self.dense_i = nnx.Linear(in_features, wide, kernel_init=kernel_init, bias_init=bias_init, **options)
        self.dense_h = nnx.Linear(hidden_features, wide, use_bias=False, kernel_init=recurrent_kernel_init, **options)
        self.norm_i = NormParams(in_features, norm == "layer", param_dtype)
        self.norm_h = NormParams(hidden_features, norm == "layer", param_dtype)

    def __call__(self, carry: Array, inputs: Array) -> tuple[Array, Array]:
        """Raises NotImplementedError: this would run a cell that `jaxrnn` cannot run, but Flax has no such cell."""
        raise NotImplementedError(
            f"{type(self).__name__}: jaxrnn cannot run {reason_to_scan(self)}, and Flax has no such cell; keep the "
            "layers and parameters that the constructor makes"
        )

    def initialize_carry(
        self, input_shape: tuple[int, ...], rngs: Any = None, carry_init: Initializer | None = None
    ) -> Array:
        """Returns the carry of a new sequence: zeros, or what `carry_init` returns for a key of `rngs`."""
        shape = (*input_shape[:-1], self.hidden_features)
        if carry_init is None:
            return jnp.zeros(shape, self.param_dtype)
        key = rngs.carry() if isinstance(rngs, nnx.Rngs) else rngs()
        carry: Array = carry_init(key, shape, self.param_dtype)
        return carry

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of an input that are no batch axes."""
        return 1


class NormGRUCell(FusedCell[Array], PlainNormGRUCell):
    """The GRU of DreamerV3, whose gates see a norm of inputs and state, computed by `jaxrnn.norm_gru`.

    Flax has no such cell. Gates are ordered r, n, u. The kernel of `dense_i` is `[D, 3H]`, its bias `[3H]`, and the
    kernel of `dense_h` `[H, 3H]`. `norm_i` has the scale of the norm for the inputs, `[D]`, and `norm_h` that for the
    state, `[H]`; with `norm="layer"`, each also has a bias, the shift of the norm.

    Args:
      in_features: D.
      hidden_features: H.
      norm: "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance.
      update_bias: what is added to the update gate before its activation.
      kernel_init: the initializer of the input weights.
      recurrent_kernel_init: the initializer of the recurrent weights.
      bias_init: the initializer of the biases of the gates.
      dtype: the dtype of the matmul operands; the carry keeps its own dtype. None uses the dtype to which inputs, carry
        and parameters promote.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; None chooses one that can run the input.
      num_blocks: must be 1, because the norm sees all units.
      rngs: the random number generators of the parameters.

    Raises:
      ValueError: an argument has an invalid value.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import NormGRUCell
      >>> cell, x = NormGRUCell(3, 4, norm="layer", rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(x.shape)
      >>> carry, y = cell(carry, x)
      >>> y.shape
      (2, 4)
      >>> cell.norm_h.scale.shape, cell.norm_h.bias.shape
      ((4,), (4,))
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        norm: Literal["rms", "layer"] = "rms",
        epsilon: float = 1e-4,
        update_bias: float = -1.0,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
        **options: Unpack[NormGRUCellOptions],
    ) -> None:
        caller = modules.caller_of(self)
        check_norm_and_constants(caller, norm, epsilon, update_bias)
        modules.check_blocks_without_norm(caller, num_blocks)
        own = {"norm": norm, "epsilon": epsilon, "update_bias": update_bias}
        given: Any = {**options, **own}  # other options than those of cells with gates
        super().__init__(in_features, hidden_features, precision=precision, implementation=implementation, **given)


class NormGRU(FusedStack[ReturnsCarry]):
    """A stack of GRUs whose gates see a norm of inputs and state: `GRU` with the cell `NormGRUCell`.

    The norm inside the cells is `cell_norm`; `norm`, as in `GRU`, is between layers.

    Args:
      in_features: D.
      hidden_features: H.
      cell_norm: `norm` of the cells, "rms" or "layer".
      epsilon: as in `NormGRUCell`.
      update_bias: as in `NormGRUCell`.
      num_layers: as in `GRU`.
      dropout_rate: as in `GRU`.
      bidirectional: as in `GRU`.
      time_major: as in `GRU`.
      return_carry: as in `GRU`.
      reverse: as in `GRU`.
      keep_order: as in `GRU`.
      learned_carry: as in `GRU`.
      dtype: as in `GRU`.
      param_dtype: as in `GRU`.
      kernel_init: as in `GRU`.
      recurrent_kernel_init: as in `GRU`.
      bias_init: as in `GRU`.
      carry_init: as in `GRU`.
      precision: as in `GRU`.
      implementation: as in `GRU`.
      remat: as in `GRU`.
      norm: as in `GRU`.
      num_blocks: must be 1, as in `NormGRUCell`.
      rngs: as in `GRU`.

    Raises:
      ValueError: as in `GRU`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import NormGRU
      >>> rnn = NormGRU(3, 4, num_layers=2, cell_norm="layer", rngs=nnx.Rngs(0))
      >>> rnn(jnp.ones((2, 5, 3)), resets=jnp.zeros((2, 5))).shape
      (2, 5, 4)
    """

    _cell = NormGRUCell

    @modules.passes_options_to(FusedStack.__init__)
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        cell_norm: Literal["rms", "layer"] = "rms",
        epsilon: float = 1e-4,
        update_bias: float = -1.0,
        return_carry: ReturnsCarry = False,  # type: ignore[assignment]
        rngs: nnx.Rngs,
        **options: Unpack[StackOptions],
    ) -> None:
        check_norm_and_constants(modules.caller_of(self, norm="cell_norm"), cell_norm, epsilon, update_bias)
        modules.check_blocks_without_norm(self._caller(), options.get("num_blocks", 1))
        self.cell_norm = cell_norm
        self.epsilon = epsilon
        self.update_bias = update_bias
        # mypy takes each type of return_carry by itself
        super().__init__(in_features, hidden_features, return_carry=return_carry, rngs=rngs, **options)  # type: ignore[arg-type]

    def _make_cell(self, *args: Any, **options: Any) -> FusedCell[Any]:
        """Creates one cell."""
        options |= {"norm": self.cell_norm, "epsilon": self.epsilon, "update_bias": self.update_bias}
        return self._cell(*args, **options)


def pack(cell: NormGRUCell, weights: LayerWeights) -> NormGRUParams:
    """Returns the parameters for `jaxrnn.norm_gru`."""

    def values(norm: Any) -> tuple[Any, Any]:
        return norm.scale[...], None if norm.bias is None else norm.bias[...]

    (scale_i, shift_i), (scale_h, shift_h) = values(cell.norm_i), values(cell.norm_h)
    return NormGRUParams(weights.w_ih, weights.w_hh, weights.bias(), scale_i, scale_h, shift_i, shift_h)


ENTRY = CellEntry(
    replaced=(),
    layers={NormGRUCell: DENSE},
    other_params=("norm_i", "norm_h"),
    recurrence=lambda cell: norm_gru_cell(cell.norm, cell.epsilon, cell.update_bias),
    pack=pack,
    reason_to_scan=lambda cell: None,
)
