"""The cells of Flax, and those that only `jaxrnn` has, as Flax would define them: in its layers and without kernels."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx


class Package:
    """The classes of a package of Flax, and the cells that it lacks."""

    def __init__(self, package, **cells):
        self.package, self.cells = package, cells

    def __getattr__(self, name):
        return self.cells[name] if name in self.cells else getattr(self.package, name)


def normalize(norm, epsilon, x, h):
    """Returns the parts of the normalized `[x, h]`, without scales and shifts; batch axes are broadcast."""
    width = x.shape[-1] + h.shape[-1]
    mean = (x.sum(-1, keepdims=True) + h.sum(-1, keepdims=True)) / width if norm == "layer" else 0.0
    x, h = x - mean, h - mean
    variance = ((x**2).sum(-1, keepdims=True) + (h**2).sum(-1, keepdims=True)) / width
    return x * jax.lax.rsqrt(variance + epsilon), h * jax.lax.rsqrt(variance + epsilon)


def step(a_r, a_n, a_u, update_bias, h):
    """Returns the state after a step, given the gates before their activations."""
    u = jax.nn.sigmoid(a_u + update_bias)
    return u * jnp.tanh(jax.nn.sigmoid(a_r) * a_n) + (1 - u) * h


class LinenScale(nn.Module):
    """Scale and, for LayerNorm, bias of a norm."""

    norm: str
    param_dtype: Any

    @nn.compact
    def __call__(self, x):
        x = x * self.param("scale", nn.initializers.ones, x.shape[-1:], self.param_dtype)
        return (
            x + self.param("bias", nn.initializers.zeros, x.shape[-1:], self.param_dtype) if self.norm == "layer" else x
        )


class LinenNormGRUCell(nn.RNNCellBase):
    """`jaxrnn.linen.NormGRUCell`."""

    features: int
    norm: str = "rms"
    epsilon: float = 1e-4
    update_bias: float = -1.0
    kernel_init: Any = nn.initializers.lecun_normal()
    recurrent_kernel_init: Any = nn.initializers.orthogonal()
    bias_init: Any = nn.initializers.zeros
    dtype: Any = None
    param_dtype: Any = jnp.float32
    carry_init: Any = nn.initializers.zeros

    @nn.compact
    def __call__(self, carry, inputs):
        y_i, y_h = normalize(self.norm, self.epsilon, inputs, carry)
        y_i = LinenScale(self.norm, self.param_dtype, name="norm_i")(y_i)
        y_h = LinenScale(self.norm, self.param_dtype, name="norm_h")(y_h)
        dense = functools.partial(nn.Dense, carry.shape[-1], dtype=self.dtype, param_dtype=self.param_dtype)
        of_x = functools.partial(dense, kernel_init=self.kernel_init, bias_init=self.bias_init)
        of_h = functools.partial(dense, kernel_init=self.recurrent_kernel_init, use_bias=False)
        gates = [of_x(name=f"i{gate}")(y_i) + of_h(name=f"h{gate}")(y_h) for gate in "rnu"]
        h = step(*gates, self.update_bias, carry)
        return h, h

    @nn.nowrap
    def initialize_carry(self, rng, input_shape):
        return self.carry_init(rng, (*input_shape[:-1], self.features), self.param_dtype)

    @property
    def num_feature_axes(self):
        return 1


class NNXScale(nnx.Module):
    """Scale and, for LayerNorm, bias of a norm."""

    def __init__(self, norm, width, param_dtype):
        self.scale = nnx.Param(jnp.ones(width, param_dtype))
        self.bias = nnx.Param(jnp.zeros(width, param_dtype)) if norm == "layer" else nnx.data(None)

    def __call__(self, x):
        x = x * self.scale[...]
        return x if self.bias is None else x + self.bias[...]


class NNXNormGRUCell(nnx.RNNCellBase):
    """`jaxrnn.nnx.NormGRUCell`."""

    def __init__(
        self,
        in_features,
        hidden_features,
        *,
        norm="rms",
        epsilon=1e-4,
        update_bias=-1.0,
        kernel_init=nnx.initializers.lecun_normal(),  # noqa: B008
        recurrent_kernel_init=nnx.initializers.orthogonal(),  # noqa: B008
        bias_init=nnx.initializers.zeros,
        dtype=None,
        param_dtype=jnp.float32,
        rngs,
    ):
        self.hidden_features, self.param_dtype = hidden_features, param_dtype
        self.norm, self.epsilon, self.update_bias = norm, epsilon, update_bias
        dense = functools.partial(nnx.Linear, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        wide = 3 * hidden_features
        self.dense_i = dense(in_features, wide, kernel_init=kernel_init, bias_init=bias_init)
        self.dense_h = dense(hidden_features, wide, kernel_init=recurrent_kernel_init, use_bias=False)
        self.norm_i, self.norm_h = (
            NNXScale(norm, in_features, param_dtype),
            NNXScale(norm, hidden_features, param_dtype),
        )

    def __call__(self, carry, inputs):
        y_i, y_h = normalize(self.norm, self.epsilon, inputs, carry)
        gates = jnp.split(self.dense_i(self.norm_i(y_i)) + self.dense_h(self.norm_h(y_h)), 3, -1)
        h = step(*gates, self.update_bias, carry)
        return h, h

    def initialize_carry(self, input_shape, rngs=None, carry_init=None):
        return jnp.zeros((*input_shape[:-1], self.hidden_features), self.param_dtype)

    @property
    def num_feature_axes(self):
        return 1


LinenNormGRUCell.__name__ = "NormGRUCell"  # Flax names parameters after the class
LINEN = Package(nn, NormGRUCell=LinenNormGRUCell)
NNX = Package(nnx, NormGRUCell=NNXNormGRUCell)
