"""Simple cell, the one of Elman (1990), with a tanh: h' = tanh(a), where `a` is the only gate before its activation.

The backward pass needs one local gradient, dh' / da = 1 - h'^2. No state is passed on but through the gate.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.cells.activations import tanh


@triton.jit
def step(gates, x_last, states, ACCURACY: tl.constexpr):
    h = tanh(gates[0], ACCURACY)
    return (h,), (h,)


@triton.jit
def residuals(activations, states):
    h = activations[0]
    return (1.0 - h * h,), ()


@triton.jit
def tangent_step(products, x, states, local_grads, factors):
    return (x[0] + local_grads[0] * products[0],)


@triton.jit
def grad_step(dstates, local_grads, factors):
    return (dstates[0] * local_grads[0],), ()
