"""The simple RNN (Elman): its cell, its stack and its entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.cells import SimpleParams
from jaxrnn.checks import Implementation
from jaxrnn.modules import ReturnsCarry
from jaxrnn.nnx.fused_cell import DENSE, CellEntry, CellOptions, FusedCell, LayerWeights
from jaxrnn.nnx.stack import FusedStack, StackOptions


class SimpleCellOptions(CellOptions, total=False):
    """The arguments of Flax's constructor."""

    residual: bool


class SimpleCell(FusedCell[Array], nnx.SimpleCell):
    """`flax.nnx.SimpleCell` computed by `jaxrnn.simple_rnn`, with the same parameters, initial values and results.

    Args:
      in_features: D.
      hidden_features: H.
      activation_fn: tanh or relu. With another function, Flax's own cell runs, and in an `RNN` it runs under
        `nnx.scan`.
      kernel_init: as in `GRUCell`.
      recurrent_kernel_init: as in `GRUCell`.
      bias_init: as in `GRUCell`.
      dtype: the dtype of the matmul operands, by default float32 as in Flax. The carry keeps its own dtype, whereas
        Flax's cell casts it to `dtype`.
      param_dtype: as in `GRUCell`.
      carry_init: as in `GRUCell`.
      residual: if True, which is another formula, Flax's own cell runs, and in an `RNN` it runs under `nnx.scan`.
      promote_dtype: as in `GRUCell`.
      keep_rngs: as in `GRUCell`.
      precision: as in `GRUCell`.
      implementation: as in `jaxrnn.simple_rnn`; "triton" raises NotImplementedError for a cell that Flax runs.
      num_blocks: as in `GRUCell`.
      rngs: as in `GRUCell`.
      kernel_metadata: as in `GRUCell`.
      recurrent_kernel_metadata: as in `GRUCell`.
      bias_metadata: as in `GRUCell`.

    Raises:
      ValueError: as in `GRUCell`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import SimpleCell
      >>> cell, x = SimpleCell(3, 4, activation_fn=nnx.relu, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(x.shape, rngs=nnx.Rngs(0))
      >>> carry, y = cell(carry, x)
      >>> y.shape
      (2, 4)
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        precision: jax.lax.PrecisionLike = None,
        implementation: Implementation = None,
        num_blocks: int = 1,
        **options: Unpack[SimpleCellOptions],
    ) -> None:
        given: Any = options  # other options than those of cells with gates
        super().__init__(
            in_features,
            hidden_features,
            precision=precision,
            implementation=implementation,
            num_blocks=num_blocks,
            **given,
        )


class SimpleRNN(FusedStack[ReturnsCarry]):
    """A stack of simple RNNs like `torch.nn.RNN`: `GRU` with the cell `SimpleCell`.

    Args:
      in_features: D.
      hidden_features: H.
      activation_fn: tanh or relu; another function raises NotImplementedError in the call.
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
      num_blocks: as in `GRU`.
      rngs: as in `GRU`.

    Raises:
      ValueError: as in `GRU`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import SimpleRNN
      >>> rnn = SimpleRNN(3, 4, activation_fn=nnx.relu, rngs=nnx.Rngs(0))
      >>> rnn(jnp.ones((2, 5, 3)), resets=jnp.zeros((2, 5))).shape
      (2, 5, 4)
    """

    _cell = SimpleCell

    @modules.passes_options_to(FusedStack.__init__)
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        activation_fn: Callable[[Array], Array] = nnx.tanh,
        return_carry: ReturnsCarry = False,  # type: ignore[assignment]
        rngs: nnx.Rngs,
        **options: Unpack[StackOptions],
    ) -> None:
        modules.check_function(self._caller(), "activation_fn", activation_fn)
        self.activation_fn = activation_fn
        # mypy takes each type of return_carry by itself
        super().__init__(in_features, hidden_features, return_carry=return_carry, rngs=rngs, **options)  # type: ignore[arg-type]

    def _make_cell(self, *args: Any, **options: Any) -> FusedCell[Any]:
        """Creates one cell."""
        return self._cell(*args, activation_fn=self.activation_fn, **options)


def recurrence(cell: nnx.SimpleCell) -> str:
    """Returns the name of the recurrence of `jaxrnn` that computes a cell."""
    return "simple_relu" if modules.is_relu(cell.activation_fn) else "simple_tanh"


def pack(cell: nnx.SimpleCell, weights: LayerWeights) -> SimpleParams:
    """Returns the parameters for `jaxrnn.simple_rnn`."""
    return SimpleParams(w_ih=weights.w_ih, w_hh=weights.w_hh, b=weights.bias())


def reason_to_scan(cell: nnx.SimpleCell) -> str | None:
    """Returns why a cell cannot be fused, or None."""
    if not modules.is_tanh(cell.activation_fn) and not modules.is_relu(cell.activation_fn):
        return "a cell whose activation_fn is neither tanh nor relu"
    return "a SimpleCell with residual=True" if cell.residual else None


ENTRY = CellEntry(
    replaced=(nnx.SimpleCell,),
    layers={nnx.SimpleCell: DENSE, SimpleCell: DENSE},
    other_params=(),
    recurrence=recurrence,
    pack=pack,
    reason_to_scan=reason_to_scan,
)
