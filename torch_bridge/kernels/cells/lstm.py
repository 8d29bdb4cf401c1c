"""LSTM. Gates are ordered i, f, g, o.

Let dh and dc be the gradients of a step's hidden and cell state, c the cell state before the step and c' the one after
it. For each step, the backward pass needs the gradients of the gates before their activations, divided by dc or dh:
  di / dc = g i (1 - i)    df / dc = c f (1 - f)    dg / dc = i (1 - g^2)    do / dh = tanh(c') o (1 - o)
It also needs dc / dh = o (1 - tanh(c')^2), and f, the factor by which dc is passed on to c. The forward pass saves
these residuals, not the gates, for the reasons given in `torch_bridge.kernels.cells.gru`.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.cells.activations import sigmoid, tanh


@triton.jit
def step(gates, x_last, states, ACCURACY: tl.constexpr):
    a_i, a_f, a_g, a_o = gates
    i = sigmoid(a_i, ACCURACY)
    f = sigmoid(a_f, ACCURACY)
    o = sigmoid(a_o, ACCURACY)
    g = tanh(a_g, ACCURACY)
    # one product is rounded: f c in loops with "fast", i g in the others, where an explicit `fma` costs registers
    if ACCURACY == "fast":
        c = tl.fma(i, g, f * states[1])
    else:
        c = i * g + f * states[1]
    tanh_c = tanh(c, ACCURACY)
    return (o * tanh_c, c), (i, f, g, o, tanh_c)


@triton.jit
def residuals(activations, states):
    i, f, g, o, tanh_c = activations
    f_i, f_f = g * i * (1.0 - i), states[1] * f * (1.0 - f)
    f_g, f_o = i * (1.0 - g * g), tanh_c * o * (1.0 - o)
    return (f_i, f_f, f_g, f_o), (o * (1.0 - tanh_c * tanh_c), f)


@triton.jit
def tangent_step(products, x, states, local_grads, factors):
    p_i, p_f, p_g, p_o = products
    f_i, f_f, f_g, f_o = local_grads
    c = f_i * p_i + f_f * p_f + f_g * p_g + factors[1] * states[1]
    return (x[0] + f_o * p_o + factors[0] * c, x[1] + c)


@triton.jit
def grad_step(dstates, local_grads, factors):
    dh, dc = dstates
    f_i, f_f, f_g, f_o = local_grads
    return (dc * f_i, dc * f_f, dc * f_g, dh * f_o), (dc * factors[1],)
