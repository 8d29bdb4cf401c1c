"""MGU. Gates are ordered f, n; the last one is separate: f multiplies its hidden product.

Let h_n = W_hn h + b_hn, and let dh be the gradient of a step's output. For each step, the backward pass needs three
local gradients, which are the gradients of the gates before their activations, and of h_n, divided by dh:
  df / dh = (h - n + (1 - f) (1 - n^2) h_n) f (1 - f)
  dn / dh = (1 - f) (1 - n^2)                  dh_n / dh = (1 - f) (1 - n^2) f
It also needs f, the factor by which dh is passed on to h, which stays in float32 as z does in the GRU.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.cells.activations import sigmoid, tanh


@triton.jit
def step(gates, x_last, states, ACCURACY: tl.constexpr):
    a_f, h_n = gates
    h = states[0]
    f = sigmoid(a_f, ACCURACY)
    n = tanh(x_last + f * h_n, ACCURACY)
    return (n + f * (h - n),), (h_n, f, n)


@triton.jit
def residuals(activations, states):
    h_n, f, n = activations
    f_n = (1.0 - f) * (1.0 - n * n)
    return ((states[0] - n + f_n * h_n) * f * (1.0 - f), f_n, f_n * f), (f,)


@triton.jit
def tangent_step(products, x, states, local_grads, factors):
    p_f, p_hn = products
    f_f, _, f_hn = local_grads
    return (x[0] + f_f * p_f + f_hn * p_hn + factors[0] * states[0],)


@triton.jit
def grad_step(dstates, local_grads, factors):
    dh = dstates[0]
    f_f, f_n, f_hn = local_grads
    return (dh * f_f, dh * f_n, dh * f_hn), (dh * factors[0],)
