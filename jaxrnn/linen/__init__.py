"""Flax linen modules that run the functions of `jaxrnn`, with the attributes, parameters and initial values of Flax.

| instead of                                                     | import                                     |
| -------------------------------------------------------------- | ------------------------------------------ |
| `ScannedRNN` of purejaxrl, JaxMARL, Craftax_Baselines, Kinetix | `ScannedRNN`                               |
| `ScannedRNN` of Stoix, Mava                                    | `ScannedRNN`                               |
| `ScannedRNN` of JaxMARL's Q-learning and of purejaxql          | `HiddenFirstScannedRNN as ScannedRNN`      |
| `nn.RNN`                                                       | `RNN`                                      |
| `ResetRNN` of jaxued                                           | `ResetRNN`                                 |
| `nn.GRUCell`, `nn.LSTMCell`, `nn.OptimizedLSTMCell`            | `GRUCell`, `LSTMCell`, `OptimizedLSTMCell` |
| `nn.MGUCell`, `nn.SimpleCell`                                  | `MGUCell`, `SimpleCell`                    |
| `nn.RMSNorm`, `nn.LayerNorm`                                   | `RMSNorm`, `LayerNorm`                     |

`GRU`, `LSTM`, `MGU`, `SimpleRNN` and `NormGRU` are stacks of layers. Flax has no cell like `NormGRUCell`, the GRU of
DreamerV3.

All modules follow one convention for resets: `resets[t]` is nonzero if step t is the first of an episode. It is the
done flag that step t - 1 returned, which is stored with the observation of step t. The done flag of step t belongs to
`resets[t + 1]`.
"""

import jaxrnn._require_flax  # noqa: F401
from jaxrnn.linen.cells import GRUCell, LSTMCell, MGUCell, NormGRUCell, OptimizedLSTMCell, SimpleCell
from jaxrnn.linen.norms import LayerNorm, RMSNorm
from jaxrnn.linen.rnn import RNN, ResetRNN
from jaxrnn.linen.scanned import HiddenFirstScannedRNN, ScannedRNN
from jaxrnn.linen.stack import GRU, LSTM, MGU, NormGRU, SimpleRNN

__all__ = [
    "GRU",
    "LSTM",
    "MGU",
    "RNN",
    "GRUCell",
    "HiddenFirstScannedRNN",
    "LSTMCell",
    "LayerNorm",
    "MGUCell",
    "NormGRU",
    "NormGRUCell",
    "OptimizedLSTMCell",
    "RMSNorm",
    "ResetRNN",
    "ScannedRNN",
    "SimpleCell",
    "SimpleRNN",
]
