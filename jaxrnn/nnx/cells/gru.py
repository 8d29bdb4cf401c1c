"""The GRU: its cell, its stack and its entry."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxrnn import modules
from jaxrnn.cells import GRUParams
from jaxrnn.modules import ReturnsCarry
from jaxrnn.nnx.fused_cell import DENSE, CellEntry, FusedCell, LayerWeights
from jaxrnn.nnx.stack import FusedStack


class GRUCell(FusedCell[Array], nnx.GRUCell):
    """`flax.nnx.GRUCell` computed by `jaxrnn.gru`, with the same parameters, initial values and results.

    Flax's cell has no recurrent bias of n, unlike `linen.GRUCell`, and this cell has none while Flax's has none. If the
    bias exists, as `hn_bias` ([flax#5595](https://github.com/google/flax/pull/5595)) or in `dense_h`, it is used.

    Args:
      in_features: D, the width of the inputs.
      hidden_features: H, the width of the carry.
      gate_fn: the activation of the gates. With a function other than sigmoid, or an `activation_fn` other than tanh,
        Flax's own cell runs, and in an `RNN` it runs under `nnx.scan`.
      activation_fn: the activation of the candidate state; in an LSTM, also that of the cell state.
      kernel_init: the initializer of the input weights.
      recurrent_kernel_init: the initializer of the recurrent weights.
      bias_init: the initializer of the biases.
      dtype: the dtype of the matmul operands. None uses the dtype to which inputs, carry and parameters promote. The
        carry keeps its own dtype, so it may be float32 with `dtype=jnp.bfloat16`.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      carry_init: the initializer of the carry, by default zeros.
      promote_dtype: the function that converts inputs and parameters to one dtype. With a function other than the
        default, Flax's own cell runs.
      keep_rngs: whether the cell keeps `rngs` for `initialize_carry`.
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; "triton" raises NotImplementedError with another `gate_fn` or `activation_fn`.
      num_blocks: N, the number of blocks (heads) of the recurrent weights. The H / N consecutive units of a block read
        the states of their own block alone, and all inputs. With N > 1, the kernel of `dense_h` is
        `[N, H / N, gates * H / N]` (in an `LSTMCell`, those of `hi`, `hf`, `hg` and `ho` are `[N, H / N, H / N]`), and
        `recurrent_kernel_init` initializes each block like a matrix. A call of `dense_h` itself is then not the product
        with all units. N must divide H. NotImplementedError is raised with another `gate_fn` or `activation_fn`.
      rngs: the random number generators of the parameters.
      kernel_metadata: metadata of the input weights, such as their sharding.
      recurrent_kernel_metadata: metadata of the recurrent weights.
      bias_metadata: metadata of the biases.

    Raises:
      ValueError: an argument has an invalid value, or `num_blocks` does not divide H.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import GRUCell
      >>> cell, x = GRUCell(3, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(x.shape, rngs=nnx.Rngs(0))
      >>> carry, y = cell(carry, x)
      >>> y.shape
      (2, 4)
      >>> of_flax = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))  # the same parameters
      >>> bool((cell.dense_i.kernel[...] == of_flax.dense_i.kernel[...]).all())
      True
    """


def pack(cell: nnx.GRUCell, weights: LayerWeights) -> GRUParams:
    """Returns the parameters for `jaxrnn.gru`. Recurrent biases of r and z, if any, are added to the input biases."""
    w_ih, w_hh, b_i, b_h = weights
    b_i = jnp.zeros(w_ih.shape[-1:], w_ih.dtype) if b_i is None else b_i
    hn_bias = getattr(cell, "hn_bias", None)
    b_hn = jnp.zeros(cell.hidden_features, b_i.dtype) if hn_bias is None else hn_bias[...]
    if b_h is None:
        return GRUParams(w_ih, w_hh, b_i, b_hn)
    of_rz, of_n = jnp.split(b_h, [2 * cell.hidden_features])
    return GRUParams(w_ih, w_hh, b_i.at[: of_rz.size].add(of_rz), b_hn + of_n)


class GRU(FusedStack[ReturnsCarry]):
    """A stack of GRUs like `torch.nn.GRU`, with layers, directions, dropout between layers, and episode resets.

    `layers[k]` is the `GRUCell` of layer k, and `layers_reverse[k]` is the `GRUCell` of its backward direction. The
    outputs concatenate the directions: forward, then backward.

    Args:
      in_features: D, the width of the inputs.
      hidden_features: H, the width of every layer and direction.
      num_layers: the number of layers; each runs over the outputs of the previous layer.
      dropout_rate: the rate of the dropout on the outputs of every layer but the last. Each step has its own mask.
        With one layer it has no effect, and a warning says so.
      bidirectional: whether each layer also runs from the last step to the first, with separate weights.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`. Neither layout is transposed.
      return_carry: whether to return `(carry, outputs)` instead of `outputs`.
      reverse: whether to run all layers from the last step to the first. Outputs are in the order computed, last step
        first.
      keep_order: whether to return the outputs in the order of the inputs when `reverse` is set.
      learned_carry: whether sequences and, by default, episodes start from learned parameters of width H, which
        `carry_init` initializes. They are `carries[k].h`, and also `carries[k].c` for an LSTM; those of the backward
        direction are in `carries_reverse[k]`.
      dtype: the dtype of the matmul operands; the carry keeps its own dtype. None uses the dtype to which inputs, carry
        and parameters promote.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      kernel_init: the initializer of the input weights.
      recurrent_kernel_init: the initializer of the recurrent weights.
      bias_init: the initializer of the biases.
      carry_init: the initializer of the carry that sequences and episodes start from.
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; None chooses one that can run the input.
      remat: as in `jaxrnn.gru`.
      norm: the norm of the outputs of every layer but the last. It normalizes both directions together, before dropout.
        "rms" and "layer" create an `RMSNorm` or a `LayerNorm` at `norms[k]`, where k is the layer whose outputs it
        normalizes. A class or a function creates another module when called as `norm(width, rngs=rngs)`. None means no
        norm.
      num_blocks: the number of blocks (heads) of the recurrent weights of every layer and direction, as in `GRUCell`.
      rngs: the random number generators of the parameters and of dropout.

    Raises:
      ValueError: an argument has an invalid value, or both `bidirectional` and `reverse` are set.

    Examples:
      Two layers, and a second chunk of the sequences, which goes on from the carry of the first:

      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxrnn.nnx import GRU
      >>> rnn = GRU(3, 4, num_layers=2, time_major=True, return_carry=True, rngs=nnx.Rngs(0))
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2))
      >>> carry, ys = rnn(xs, resets=resets)
      >>> carry, ys = rnn(xs, initial_carry=carry, resets=resets)
      >>> ys.shape, [h.shape for h in carry]
      ((5, 2, 4), [(2, 4), (2, 4)])
    """

    _cell = GRUCell


ENTRY = CellEntry(
    replaced=(nnx.GRUCell,),
    layers={nnx.GRUCell: DENSE, GRUCell: DENSE},
    other_params=("hn_bias",),
    recurrence=lambda cell: "gru",
    pack=pack,
    reason_to_scan=modules.reason_to_scan_gates,
)
