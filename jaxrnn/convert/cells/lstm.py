"""The weights of the LSTM, here and in other frameworks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxrnn.cells import CELLS
from jaxrnn.convert.layout import Layout

if TYPE_CHECKING:
    from typing import TypeAlias

    import equinox
    import torch
    from flax import nnx

    import torch_bridge.nn
    from jaxrnn.cells import LSTMParams

    # The types that the overloads of `jaxrnn.convert` name, by framework.
    Params: TypeAlias = LSTMParams
    TorchModule: TypeAlias = torch.nn.LSTM | torch.nn.LSTMCell | torch_bridge.nn.LSTM
    NNXCell: TypeAlias = nnx.LSTMCell | nnx.OptimizedLSTMCell
    EquinoxCell: TypeAlias = equinox.nn.LSTMCell

LSTM = Layout(
    cell=CELLS["lstm"],
    title="LSTM",
    gates=("i", "f", "g", "o"),
    linen="an LSTMCell or OptimizedLSTMCell",
    biased_operand="h",
    nnx=("LSTMCell", "OptimizedLSTMCell"),
    keras=("i", "f", "g", "o"),
    haiku="LSTM",
)
