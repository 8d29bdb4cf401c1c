"""The LSTM: its cells, its stack and its entry."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax import Array
from typing_extensions import Unpack

from jaxrnn import modules
from jaxrnn.cells import LSTMParams
from jaxrnn.checks import check_size
from jaxrnn.modules import ReturnsCarry
from jaxrnn.nnx.fused_cell import DENSE, CellEntry, FusedCell, LayerWeights
from jaxrnn.nnx.stack import FusedStack, StackOptions


class LSTMCell(FusedCell[tuple[Array, Array]], nnx.LSTMCell):
    """`flax.nnx.LSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Args:
      in_features: D.
      hidden_features: H.
      gate_fn: as in `GRUCell`.
      activation_fn: as in `GRUCell`.
      kernel_init: as in `GRUCell`.
      recurrent_kernel_init: as in `GRUCell`.
      bias_init: as in `GRUCell`.
      dtype: as in `GRUCell`.
      param_dtype: as in `GRUCell`.
      carry_init: as in `GRUCell`.
      promote_dtype: as in `GRUCell`.
      keep_rngs: as in `GRUCell`.
      precision: as in `GRUCell`.
      implementation: as in `GRUCell`.
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
      >>> from jaxrnn.nnx import LSTMCell
      >>> cell, x = LSTMCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> c, h = cell.initialize_carry(x.shape, rngs=nnx.Rngs(0))
      >>> (c, h), y = cell((c, h), x)
      >>> c.shape, h.shape, y.shape
      ((2, 4), (2, 4), (2, 4))
    """


class OptimizedLSTMCell(FusedCell[tuple[Array, Array]], nnx.OptimizedLSTMCell):
    """`flax.nnx.OptimizedLSTMCell` computed by `jaxrnn.lstm`, with the same parameters, initial values and results.

    The carry is `(c, h)`.

    Args:
      in_features: D.
      hidden_features: H.
      gate_fn: as in `GRUCell`.
      activation_fn: as in `GRUCell`.
      kernel_init: as in `GRUCell`.
      recurrent_kernel_init: as in `GRUCell`.
      bias_init: as in `GRUCell`.
      dtype: as in `GRUCell`.
      param_dtype: as in `GRUCell`.
      carry_init: as in `GRUCell`.
      promote_dtype: as in `GRUCell`.
      keep_rngs: as in `GRUCell`.
      precision: as in `GRUCell`.
      implementation: as in `GRUCell`.
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
      >>> from jaxrnn.nnx import OptimizedLSTMCell
      >>> cell, x = OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> c, h = cell.initialize_carry(x.shape, rngs=nnx.Rngs(0))
      >>> (c, h), y = cell((c, h), x)
      >>> c.shape, h.shape, y.shape
      ((2, 4), (2, 4), (2, 4))
    """


class ProjectedLSTMCell(OptimizedLSTMCell):
    """The cell of an `LSTM` with a projection: `proj` maps H units to P, and `dense_h` takes the P units."""

    def __init__(self, in_features: int, hidden_features: int, *, proj_size: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(in_features, hidden_features, rngs=rngs, **options)
        dtypes: Any = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
        inits: Any = {"kernel_init": options["recurrent_kernel_init"], "bias_init": options["bias_init"]}
        self.dense_h = nnx.Linear(proj_size, 4 * hidden_features, **inits, **dtypes)
        self.proj = nnx.Linear(hidden_features, proj_size, use_bias=False, kernel_init=options["kernel_init"], **dtypes)


def pack(cell: nnx.LSTMCell | nnx.OptimizedLSTMCell, weights: LayerWeights) -> LSTMParams:
    """Returns the parameters for `jaxrnn.lstm`."""
    w_hr: Any = cell.proj.kernel[...] if isinstance(cell, ProjectedLSTMCell) else None
    return LSTMParams(weights.w_ih, weights.w_hh, weights.bias(), w_hr)


class LSTM(FusedStack[ReturnsCarry]):
    """A stack of LSTMs like `torch.nn.LSTM`: `GRU` with the cell `OptimizedLSTMCell` and carries `(c, h)`.

    Args:
      in_features: D.
      hidden_features: H.
      proj_size: P, the width to which `layers[k].proj` projects hidden states, and so outputs; c stays H wide. None
        means no projection. The weight is `params.w_hr` in `jaxrnn.lstm`. It excludes `num_blocks` > 1.
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
      ValueError: as in `GRU`, or both `proj_size` and `num_blocks` > 1 are given.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import LSTM
      >>> rnn = LSTM(3, 4, num_layers=2, return_carry=True, rngs=nnx.Rngs(0))
      >>> carry, ys = rnn(jnp.ones((2, 5, 3)), resets=jnp.zeros((2, 5)))
      >>> (c, h), second = carry  # a pair for each layer
      >>> ys.shape, c.shape, h.shape
      ((2, 5, 4), (2, 4), (2, 4))
    """

    _cell = OptimizedLSTMCell

    @modules.passes_options_to(FusedStack.__init__)
    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        proj_size: int | None = None,
        return_carry: ReturnsCarry = False,  # type: ignore[assignment]
        rngs: nnx.Rngs,
        **options: Unpack[StackOptions],
    ) -> None:
        if proj_size is not None:
            check_size(f"{type(self).__name__}: proj_size", proj_size)
        modules.check_blocks_without_projection(self._caller(), options.get("num_blocks", 1), proj_size)
        self.proj_size = proj_size
        # mypy takes each type of return_carry by itself
        super().__init__(in_features, hidden_features, return_carry=return_carry, rngs=rngs, **options)  # type: ignore[arg-type]

    def _widths(self) -> dict[str, int]:
        """Returns the widths of c and h by name."""
        return {"c": self.hidden_features, "h": self.hidden_features if self.proj_size is None else self.proj_size}

    def _make_cell(self, *args: Any, **options: Any) -> FusedCell[Any]:
        """Creates one cell, with a projection if `proj_size` is set."""
        if self.proj_size is None:
            return self._cell(*args, **options)
        return ProjectedLSTMCell(*args, proj_size=self.proj_size, **options)


GATES = ["ii", "if_", "ig", "io"], ["hi", "hf", "hg", "ho"]
ENTRY = CellEntry(
    replaced=(nnx.LSTMCell, nnx.OptimizedLSTMCell),
    layers={
        **dict.fromkeys((nnx.LSTMCell, LSTMCell), GATES),
        **dict.fromkeys((nnx.OptimizedLSTMCell, OptimizedLSTMCell, ProjectedLSTMCell), DENSE),
    },
    other_params=("proj",),
    recurrence=lambda cell: "lstm",
    pack=pack,
    reason_to_scan=modules.reason_to_scan_gates,
)
