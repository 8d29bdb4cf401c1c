"""Flax NNX modules that run the functions of `jaxrnn`, with the arguments, parameters and initial values of Flax.

| instead of                                             | import                                     |
| ------------------------------------------------------ | ------------------------------------------ |
| `nnx.RNN`                                              | `RNN`                                      |
| `nnx.GRUCell`, `nnx.LSTMCell`, `nnx.OptimizedLSTMCell` | `GRUCell`, `LSTMCell`, `OptimizedLSTMCell` |
| `nnx.SimpleCell`                                       | `SimpleCell`                               |
| `nnx.RMSNorm`, `nnx.LayerNorm`                         | `RMSNorm`, `LayerNorm`                     |

`nnx.Bidirectional` accepts an `RNN` of this module. `GRU`, `LSTM`, `SimpleRNN` and `NormGRU` are stacks of
layers. Flax has no cell like `NormGRUCell`, the GRU of DreamerV3.

All modules follow one convention for resets: `resets[t]` is nonzero if step t is the first of an episode. It is the
done flag that step t - 1 returned, which is stored with the observation of step t. The done flag of step t belongs to
`resets[t + 1]`.
"""

import jaxrnn._require_flax  # noqa: F401
from jaxrnn.nnx.cells import GRUCell, LSTMCell, NormGRUCell, OptimizedLSTMCell, SimpleCell
from jaxrnn.nnx.norms import LayerNorm, RMSNorm
from jaxrnn.nnx.rnn import RNN
from jaxrnn.nnx.stack import GRU, LSTM, NormGRU, SimpleRNN

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "GRUCell",
    "LSTMCell",
    "LayerNorm",
    "NormGRU",
    "NormGRUCell",
    "OptimizedLSTMCell",
    "RMSNorm",
    "SimpleCell",
    "SimpleRNN",
]
