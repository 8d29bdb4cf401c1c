"""The weights of the MGU, here and in other frameworks."""

from jaxrnn.cells import CELLS
from jaxrnn.convert.layout import Layout

MGU = Layout(
    cell=CELLS["mgu"],
    title="MGU",
    gates=("f", "n"),
    linen="an MGUCell",
    required_bias=(
        "hn",
        "the layer hn has no bias, so this is an MGUCell with reset_gate=False, which computes tanh(x_n + W_hn h), but "
        "jaxrnn.mgu computes tanh(x_n + f * (W_hn h + b_hn)). Weights cannot be converted: train a new MGUCell with "
        "reset_gate=True, or run this one in jaxrnn.linen.RNN",
    ),
    missing={
        "nnx": "Flax's NNX has no MGUCell. Convert to linen's with to_linen, or hold the arrays in nnx.Param and call "
        "jaxrnn.mgu",
        "equinox": "equinox.nn has no MGU. Make MGUParams a field of an equinox.Module, and call jaxrnn.mgu",
        "haiku": "Haiku has no MGU. Call jaxrnn.mgu inside hk.transform, with parameters from hk.get_parameter",
        "keras": "Keras has no MGU. Run the weights in JAX with jaxrnn.mgu, or train a GRU, which both have",
    },
)
