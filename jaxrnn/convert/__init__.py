"""Conversion of the parameters of jaxrnn from and to the weights of other frameworks.

| framework                           | cells                  | into jaxrnn    | out of it                            |
| ----------------------------------- | ---------------------- | -------------- | ------------------------------------ |
| PyTorch: a module, cell, state dict | GRU, LSTM, MGU, simple | `from_torch`   | `to_torch`: NumPy arrays by name     |
| Flax linen: parameters of a cell    | GRU, LSTM, MGU, simple | `from_linen`   | `to_linen`: the tree of a cell       |
| Flax NNX: a cell or its state       | GRU, LSTM, simple      | `from_nnx`     | `to_nnx`: a tree for `nnx.update`    |
| Equinox: a cell                     | GRU, LSTM              | `from_equinox` | `to_equinox`: arrays by attribute    |
| Haiku: parameters of a core         | LSTM, simple           | `from_haiku`   | `to_haiku`: the same                 |
| Keras: a layer, cell or its weights | GRU, LSTM, simple      | `from_keras`   | `to_keras`: a list for `set_weights` |

All of these compute the same as `jaxrnn.gru`, `lstm`, `mgu` and `simple_rnn`, with gates in another order, matrices
transposed and biases in other places. Weights are moved and not changed, except that biases which the framework always
adds are added here, and that Haiku's constant for the forget gate moves into the bias. Dtypes are kept. A cell that
computes something else raises ValueError with the reason.

Blocks of recurrent weights are converted from and to modules of this project with `num_blocks`. Cells that have no
blocks get a matrix that is zero outside of the blocks.

`SimpleParams` do not contain the activation: pass that of the framework's module to `jaxrnn.simple_rnn`, "tanh" or
"relu".

None of the frameworks is imported: their arrays are converted, and their modules are read by attribute. JAX arrays may
be traced, so that a program that trains a Flax cell can convert its weights inside `jit` and `grad`, and stacked
weights inside `vmap`.
"""

from jaxrnn.convert.equinox import from_equinox, to_equinox
from jaxrnn.convert.haiku import from_haiku, to_haiku
from jaxrnn.convert.keras import from_keras, to_keras
from jaxrnn.convert.linen import from_linen, to_linen
from jaxrnn.convert.nnx import from_nnx, to_nnx
from jaxrnn.convert.torch import from_torch, to_torch

__all__ = [
    "from_equinox",
    "from_haiku",
    "from_keras",
    "from_linen",
    "from_nnx",
    "from_torch",
    "to_equinox",
    "to_haiku",
    "to_keras",
    "to_linen",
    "to_nnx",
    "to_torch",
]
