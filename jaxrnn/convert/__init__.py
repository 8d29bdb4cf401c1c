"""Conversion of `GRUParams` and `LSTMParams` from and to the GRU and LSTM weights of other frameworks.

| framework                             | into jaxrnn      | out of it                               |
| ------------------------------------- | ---------------- | --------------------------------------- |
| PyTorch: modules, cells, state dicts  | `from_torch`     | `to_torch`: NumPy arrays by name        |
| Flax linen: parameters of a cell      | `from_linen`     | `to_linen`: the tree of a cell          |
| Flax NNX: a cell or its state         | `from_nnx`       | `to_nnx`: a tree for `nnx.update`       |
| Equinox: a cell                       | `from_equinox`   | `to_equinox`: arrays by attribute       |
| Haiku: parameters of `hk.LSTM`        | `from_haiku`     | `to_haiku`: the same                    |
| Keras: a layer, a cell or its weights | `from_keras`     | `to_keras`: a list for `set_weights`    |

All of these compute the same as `jaxrnn.gru` and `jaxrnn.lstm`, with gates in another order, matrices transposed and
biases in other places. Weights are moved and not changed, except that biases which the framework always adds are added
here, and that Haiku's constant for the forget gate moves into the bias. Dtypes are kept. A cell that computes something
else raises ValueError with the reason.

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
