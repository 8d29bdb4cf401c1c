"""The weights of the LSTM, here and in other frameworks."""

from jaxrnn.cells import CELLS
from jaxrnn.convert.layout import Layout

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
