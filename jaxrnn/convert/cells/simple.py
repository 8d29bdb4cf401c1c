"""The weights of the simple cell, here and in other frameworks."""

from jaxrnn.cells import CELLS
from jaxrnn.convert.layout import Layout

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
