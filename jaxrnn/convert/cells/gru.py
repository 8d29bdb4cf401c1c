"""The weights of the GRU, here and in other frameworks."""

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
    from jaxrnn.cells import GRUParams

    # The types that the overloads of `jaxrnn.convert` name, by framework.
    Params: TypeAlias = GRUParams
    TorchModule: TypeAlias = torch.nn.GRU | torch.nn.GRUCell | torch_bridge.nn.GRU
    NNXCell: TypeAlias = nnx.GRUCell
    EquinoxCell: TypeAlias = equinox.nn.GRUCell

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
