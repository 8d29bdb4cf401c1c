"""The weights of the simple cell, here and in other frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxrnn.cells import CELLS
from jaxrnn.convert.layout import Layout

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch
    from flax import nnx

    import torch_bridge.nn
    from jaxrnn.cells import SimpleParams

    # The types that the overloads of `jaxrnn.convert` name, by framework.
    Params: TypeAlias = SimpleParams
    TorchModule: TypeAlias = torch.nn.RNN | torch.nn.RNNCell | torch_bridge.nn.RNN
    NNXCell: TypeAlias = nnx.SimpleCell

SIMPLE = Layout(
    cell=CELLS["simple_tanh"],
    title="simple cell",
    gates=("",),
    linen="a SimpleCell",
    activations=("tanh", "relu"),
    nnx=("SimpleCell",),
    keras=("",),
    haiku="VanillaRNN",
    missing={
        "equinox": "equinox.nn has no simple cell. Make SimpleParams a field of an equinox.Module, and call "
        "jaxrnn.simple_rnn"
    },
)
