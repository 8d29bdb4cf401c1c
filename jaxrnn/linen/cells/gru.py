"""The GRU: its cell, its stack and its entry."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxrnn import modules
from jaxrnn.cells import GRUParams
from jaxrnn.linen.fused_cell import CellEntry, FusedCell
from jaxrnn.linen.stack import FusedStack
from jaxrnn.modules import ReturnsCarry


class GRUCell(FusedCell[Array], nn.GRUCell):
    """`flax.linen.GRUCell` computed by `jaxrnn.gru`, with the same parameters, initial values and results.

    `RNN` and `ScannedRNN` run the cell over time in one call. A call of the cell itself computes one step.

    Attributes:
      features: H, the width of the carry that `initialize_carry` returns.
      gate_fn: the activation of the gates. With a function other than sigmoid, or an `activation_fn` other than tanh,
        Flax's own cell runs, and in an `RNN` it runs under `nn.scan`.
      activation_fn: the activation of the candidate state; in an LSTM, also that of the cell state.
      kernel_init: the initializer of the input weights of each gate.
      recurrent_kernel_init: the initializer of the recurrent weights of each gate.
      bias_init: the initializer of the biases.
      dtype: the dtype of the matmul operands. None uses the dtype to which inputs, carry and parameters promote. The
        carry keeps its own dtype, so it may be float32 with `dtype=jnp.bfloat16`.
      param_dtype: the dtype of the parameters and of the carry that `initialize_carry` returns.
      carry_init: the initializer of the carry.
      precision: the precision of the matmuls, as in `jaxrnn.gru`.
      implementation: as in `jaxrnn.gru`; "triton" raises NotImplementedError with another `gate_fn` or `activation_fn`.
      num_blocks: N, the number of blocks (heads) of the recurrent weights. The H / N consecutive units of a block read
        the states of their own block alone, and all inputs. With N > 1, the kernel of each layer `h*` is
        `[N, H / N, H / N]`, and `recurrent_kernel_init` initializes each block like a matrix. N must divide H.
        NotImplementedError is raised with another `gate_fn` or `activation_fn`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxrnn.linen import GRUCell
      >>> cell, x = GRUCell(features=4), jnp.ones((2, 3))
      >>> carry = cell.initialize_carry(jax.random.key(0), x.shape)
      >>> variables = cell.init(jax.random.key(0), carry, x)
      >>> carry, y = cell.apply(variables, carry, x)
      >>> y.shape
      (2, 4)
      >>> of_flax = nn.GRUCell(features=4).init(jax.random.key(0), carry, x)  # the same parameters
      >>> jax.tree.map(jnp.shape, variables) == jax.tree.map(jnp.shape, of_flax)
      True
    """

    @property
    def recurrence(self) -> str:
        """The name of the recurrence of `jaxrnn` that computes the cell."""
        return "gru"

    @nn.nowrap
    def packed_params(self, input_features: int, hidden: int) -> GRUParams:
        """Returns the parameters for `jaxrnn.gru`, creating missing ones. The cell has no biases b_hr and b_hz."""
        inputs = [self.gate_params(f"i{gate}", input_features, hidden, use_bias=True) for gate in "rzn"]
        recurrent = [self.gate_params(f"h{gate}", hidden, hidden, use_bias=gate == "n") for gate in "rzn"]
        kernels, biases = zip(*inputs, strict=True)
        recurrent_kernels, (_, _, b_hn) = zip(*recurrent, strict=True)
        return GRUParams(
            w_ih=jnp.concatenate(kernels, axis=-1),
            w_hh=jnp.concatenate(recurrent_kernels, axis=-1),
            b_ih=jnp.concatenate(biases, axis=-1),
            b_hn=b_hn,
        )


class GRU(FusedStack[ReturnsCarry]):
    """A stack of GRUs like `torch.nn.GRU`, with layers, directions, dropout between layers, and episode resets.

    Layer k has the parameters of a `GRUCell` at `layers_{k}`; those of its backward direction are at
    `layers_{k}_reverse`. The outputs concatenate the directions: forward, then backward.

    Attributes:
      features: H, the width of every layer and direction.
      num_layers: the number of layers; each runs over the outputs of the previous layer.
      dropout_rate: the rate of the dropout on the outputs of every layer but the last. Each step has its own mask.
        With one layer it has no effect, and a warning says so.
      bidirectional: whether each layer also runs from the last step to the first, with separate weights.
      time_major: whether inputs are `[T, *batch, D]` or, by default, `[*batch, T, D]`. Neither layout is transposed.
      return_carry: whether to return `(carry, outputs)` instead of `outputs`.
      reverse: whether to run all layers from the last step to the first. Outputs are in the order computed, last step
        first.
      keep_order: whether to return the outputs in the order of the inputs when `reverse` is set.
      deterministic: whether to disable dropout. With a nonzero `dropout_rate`, set it either here or in the call.
      learned_carry: whether sequences and, by default, episodes start from learned parameters of width H, which
        `carry_init` initializes. They are `layers_{k}_carry_h`, and also `layers_{k}_carry_c` for an LSTM; those of the
        backward direction are `layers_{k}_reverse_carry_h` and `layers_{k}_reverse_carry_c`.
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
        "rms" and "layer" create an `RMSNorm` or a `LayerNorm` with its parameters at `norm_{k}`, where k is the layer
        whose outputs it normalizes. A class or a function creates another module when called as `norm(name=name)`. None
        means no norm.
      num_blocks: the number of blocks (heads) of the recurrent weights of every layer and direction, as in `GRUCell`.

    Examples:
      Two layers, and a second chunk of the sequences, which goes on from the carry of the first:

      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxrnn.linen import GRU
      >>> rnn = GRU(4, num_layers=2, time_major=True, return_carry=True)
      >>> xs, resets = jnp.ones((5, 2, 3)), jnp.zeros((5, 2))
      >>> variables = rnn.init(jax.random.key(0), xs)
      >>> carry, ys = rnn.apply(variables, xs, resets=resets)
      >>> carry, ys = rnn.apply(variables, xs, initial_carry=carry, resets=resets)
      >>> ys.shape, [h.shape for h in carry]
      ((5, 2, 4), [(2, 4), (2, 4)])
    """

    _cell = GRUCell


ENTRY = CellEntry(
    replacements={nn.GRUCell: GRUCell},
    cell_types={"gru": GRUCell},
    reason_to_scan=modules.reason_to_scan_gates,
)
