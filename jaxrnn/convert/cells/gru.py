"""The weights of the GRU, here and in other frameworks."""

from jaxrnn.cells import CELLS
from jaxrnn.convert.layout import Layout

GRU = Layout(
    cell=CELLS["gru"],
    title="GRU",
    gates=("r", "z", "n"),
    linen="a GRUCell",
    nnx=("GRUCell",),
    keras=("z", "r", "n"),
    missing={
        "haiku": "hk.GRU applies the reset gate before the matrix product and cannot compute this GRU. Call jaxrnn.gru "
        "inside hk.transform, with parameters from hk.get_parameter"
    },
)
