"""Simple cell with a ReLU: h' = max(a, 0), where `a` is the only gate before its activation.

The backward pass needs one local gradient, dh' / da, which is 1 where h' > 0 and else 0. No state is passed on but
through the gate.
"""

import triton
import triton.language as tl


@triton.jit
def step(gates, x_last, states, ACCURACY: tl.constexpr):
    h = tl.maximum(gates[0], 0.0, propagate_nan=tl.PropagateNan.ALL)
    return (h,), (h,)


@triton.jit
def residuals(activations, states):
    return (tl.where(activations[0] > 0.0, 1.0, 0.0),), ()


@triton.jit
def tangent_step(products, x, states, local_grads, factors):
    return (x[0] + local_grads[0] * products[0],)


@triton.jit
def grad_step(dstates, local_grads, factors):
    return (dstates[0] * local_grads[0],), ()
