"""GRU whose gates see a norm of `[x, h]`, as in DreamerV3. Gates are ordered r, n, u; none is separate.

r = s(a_r), n = tanh(r a_n), u = s(a_u), h' = u n + (1 - u) h. The loop computes the norm and its gradient. Let dh be
the gradient of a step's output. For each step, the backward pass needs three local gradients, which are the gradients
of the gates before their activations, divided by dh:
  dr / dh = u (1 - n^2) a_n r (1 - r)    dn / dh = u (1 - n^2) r    du / dh = (n - h) u (1 - u)
It also needs 1 - u, the factor by which dh is passed on to h, which stays in float32 as z does in the GRU.
"""

import triton
import triton.language as tl

from torch_bridge.kernels.cells.activations import sigmoid, tanh


@triton.jit
def step(gates, x_last, states, ACCURACY: tl.constexpr):
    a_r, a_n, a_u = gates
    h = states[0]
    r = sigmoid(a_r, ACCURACY)
    n = tanh(r * a_n, ACCURACY)
    u = sigmoid(a_u, ACCURACY)
    return (h + u * (n - h),), (a_n, r, n, u)


@triton.jit
def residuals(activations, states):
    a_n, r, n, u = activations
    f = u * (1.0 - n * n)
    return (f * a_n * r * (1.0 - r), f * r, (n - states[0]) * u * (1.0 - u)), (1.0 - u,)


@triton.jit
def grad_step(dstates, local_grads, factors):
    dh = dstates[0]
    f_r, f_n, f_u = local_grads
    return (dh * f_r, dh * f_n, dh * f_u), (dh * factors[0],)
