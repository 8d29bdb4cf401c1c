"""The GRU whose gates see a norm of inputs and state: its cell, its stack and its entry."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from flax.typing import Dtype, Initializer, PRNGKey
from jax import Array

from jaxrnn import modules
from jaxrnn.cells import NormGRUParams, norm_gru_cell
from jaxrnn.checks import check_norm_and_constants
from jaxrnn.linen.fused_cell import CellEntry, FusedCell
from jaxrnn.linen.stack import FusedStack
from jaxrnn.modules import ReturnsCarry


class PlainNormGRUCell(nn.RNNCellBase):
    """The attributes of `NormGRUCell` that Flax's cells have too."""

    features: int
    norm: Literal["rms", "layer"] = "rms"
    epsilon: float = 1e-4
    update_bias: float = -1.0
    kernel_init: Initializer = nn.initializers.lecun_normal()
    recurrent_kernel_init: Initializer = nn.initializers.orthogonal()
    bias_init: Initializer = nn.initializers.zeros
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    carry_init: Initializer = nn.initializers.zeros

    @nn.nowrap
    def initialize_carry(self, rng: PRNGKey, input_shape: tuple[int, ...]) -> Array:
        """Returns the carry of a new sequence, as Flax's cells do."""
        carry: Array = self.carry_init(rng, (*input_shape[:-1], self.features), self.param_dtype)
        return carry

    @property
    def num_feature_axes(self) -> int:
        """The number of axes of an input that are no batch axes."""
        return 1


class NormGRUCell(FusedCell[Array], PlainNormGRUCell):
    """The GRU of DreamerV3, whose gates see a norm of inputs and state, computed by `jaxrnn.norm_gru`.

    Flax has no such cell. Gates are ordered r, n, u. The layers `ir`, `in` and `iu` have a kernel `[D, H]` and a bias
    `[H]`; `hr`, `hn` and `hu` have a kernel `[H, H]`. `norm_i` has the scale of the norm for the inputs, `[D]`, and
    `norm_h` that for the state, `[H]`; with `norm="layer"`, each also has a bias, the shift of the norm.

    Attributes:
      features: H, the width of the carry that `initialize_carry` returns.
      norm: "rms" (RMSNorm) or "layer" (LayerNorm).
      epsilon: what is added to the variance.
      update_bias: what is added to the update gate before its activation.
      kernel_init: the initializer of the input weights of each gate.
      recurrent_kernel_init: the initializer of the recurrent weights of each gate.
      bias_init: the initializer of the biases of the gates.
      dtype: the dtype of the matmul operands; the carry keeps its own dtype. None uses the dtype to which inputs, carry
        and parameters promote.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      carry_init: the initializer of the carry.
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; None chooses one that can run the input.
      num_blocks: must be 1, because the norm sees all units; ValueError is raised otherwise.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import NormGRUCell
      >>> cell, x = NormGRUCell(features=4, norm="layer"), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), carry, x)
      >>> carry, y = cell.apply(variables, carry, x)
      >>> y.shape
      (2, 4)
      >>> jax.tree.map(jnp.shape, variables["params"]["norm_h"])
      {'bias': (4,), 'scale': (4,)}
    """

    @property
    def recurrence(self) -> modules.Recurrence:
        """The cell of `jaxrnn` with the norm and the constants of this one."""
        check_norm_and_constants(modules.caller_of(self), self.norm, self.epsilon, self.update_bias)
        return norm_gru_cell(self.norm, self.epsilon, self.update_bias)

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int) -> NormGRUParams:
        """Returns the parameters for `jaxrnn.norm_gru`, creating missing ones."""
        modules.check_blocks_without_norm(modules.caller_of(self), self.num_blocks)
        inputs = [self.gate_params(f"i{gate}", input_features, hidden, use_bias=True) for gate in "rnu"]
        recurrent = [self.gate_params(f"h{gate}", hidden, hidden, use_bias=False) for gate in "rnu"]
        kernels, biases = zip(*inputs, strict=True)
        scale_i, shift_i = self._norm_params("norm_i", input_features)
        scale_h, shift_h = self._norm_params("norm_h", hidden)
        return NormGRUParams(
            w_ih=jnp.concatenate(kernels, axis=-1),
            w_hh=jnp.concatenate([kernel for kernel, _ in recurrent], axis=-1),
            b=jnp.concatenate(biases, axis=-1),
            scale_i=scale_i,
            scale_h=scale_h,
            shift_i=shift_i,
            shift_h=shift_h,
        )

    @nn.nowrap
    def _norm_params(self, name: str, features: int) -> tuple[Array, Array | None]:
        """Returns scale and bias of the norm for the inputs or for the state. Raises ValueError for another norm's."""
        self.check_given(name, features, features)
        wanted = ["scale", "bias"] if self.norm == "layer" else ["scale"]
        given = sorted(self.get_variable("params", name), reverse=True) if self.has_variable("params", name) else wanted
        if given != wanted:
            raise ValueError(
                f"{modules.caller_of(self)('norm')} must be that of the given parameters, whose {name} has "
                f'{", ".join(given)}, got "{self.norm}"; "rms" has a scale, and "layer" has a scale and a bias'
            )
        scale = self.layer_param(name, "scale", nn.initializers.ones, (features,))
        if self.norm == "rms":
            return scale, None
        return scale, self.layer_param(name, "bias", nn.initializers.zeros, (features,))


class NormGRU(FusedStack[ReturnsCarry]):
    """A stack of GRUs whose gates see a norm of inputs and state: `GRU` with the cell `NormGRUCell`.

    The norm inside the cells is `cell_norm`; `norm`, as in `GRU`, is between layers.

    Attributes:
      features: H.
      num_layers: as in `GRU`.
      dropout_rate: as in `GRU`.
      bidirectional: as in `GRU`.
      time_major: as in `GRU`.
      return_carry: as in `GRU`.
      reverse: as in `GRU`.
      keep_order: as in `GRU`.
      deterministic: as in `GRU`.
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
      cell_norm: `norm` of the cells, "rms" or "layer".
      epsilon: as in `NormGRUCell`.
      update_bias: as in `NormGRUCell`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import NormGRU
      >>> rnn, xs, resets = NormGRU(4, num_layers=2, cell_norm="layer"), jnp.ones((2, 5, 3)), jnp.zeros((2, 5))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> rnn.apply(variables, xs, resets=resets).shape
      (2, 5, 4)
    """

    cell_norm: Literal["rms", "layer"] = dataclasses.field(default="rms", kw_only=True)
    epsilon: float = dataclasses.field(default=1e-4, kw_only=True)
    update_bias: float = dataclasses.field(default=-1.0, kw_only=True)

    _cell = NormGRUCell

    @nn.nowrap
    def check(self, reverse: bool) -> None:
        """Raises ValueError unless the attributes describe a valid stack."""
        super().check(reverse)
        check_norm_and_constants(
            modules.caller_of(self, norm="cell_norm"), self.cell_norm, self.epsilon, self.update_bias
        )
        modules.check_blocks_without_norm(self.caller(), self.num_blocks)

    @nn.nowrap
    def cell_options(self) -> dict[str, Any]:
        """Returns the attributes of every cell."""
        own = {"norm": self.cell_norm, "epsilon": self.epsilon, "update_bias": self.update_bias}
        return super().cell_options() | own


ENTRY = CellEntry(replacements={}, cell_types={"norm_gru": NormGRUCell}, reason_to_scan=lambda cell: None)
