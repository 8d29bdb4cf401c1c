"""GRU. Gates are ordered r, z, n; the last one is separate: r multiplies its hidden product.

Let h_n = W_hn h + b_hn, and let dh be the gradient of a step's output. For each step, the backward pass needs four
local gradients, which are the gradients of the gates before their activations, and of h_n, divided by dh:
  dr / dh = (1 - z) (1 - n^2) h_n r (1 - r)    dz / dh = (h - n) z (1 - z)
  dn / dh = (1 - z) (1 - n^2)                  dh_n / dh = (1 - z) (1 - n^2) r
It also needs z, the factor by which dh is passed on to h. The forward pass saves these residuals, not the gates. In
float16 the local gradients keep their relative accuracy where a gate saturates. The backward pass does not read h
again, and a step of it is five multiplications and a matmul. z multiplies dh at every step, so its rounding errors
would add up; z therefore stays in float32.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.cells.activations import sigmoid, tanh


@triton.jit
def step(gates, x_last, states, ACCURACY: tl.constexpr):
    a_r, a_z, h_n = gates
    h = states[0]
    r = sigmoid(a_r, ACCURACY)
    z = sigmoid(a_z, ACCURACY)
    n = tanh(x_last + r * h_n, ACCURACY)
    return (n + z * (h - n),), (h_n, r, z, n)


@triton.jit
def residuals(activations, states):
    h_n, r, z, n = activations
    f_n = (1.0 - z) * (1.0 - n * n)
    return (f_n * h_n * r * (1.0 - r), (states[0] - n) * z * (1.0 - z), f_n, f_n * r), (z,)


@triton.jit
def tangent_step(products, x, states, local_grads, factors):
    p_r, p_z, p_hn = products
    f_r, f_z, _, f_hn = local_grads
    return (x[0] + f_r * p_r + f_z * p_z + f_hn * p_hn + factors[0] * states[0],)


@triton.jit
def grad_step(dstates, local_grads, factors):
    dh = dstates[0]
    f_r, f_z, f_n, f_hn = local_grads
    return (dh * f_r, dh * f_z, dh * f_n, dh * f_hn), (dh * factors[0],)
