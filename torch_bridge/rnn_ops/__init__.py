"""Time loops with episode resets, and their gradients, as PyTorch operators.

Each cell of the cell table has two operators, named after it: `torch_bridge::gru` and its gradient
`torch_bridge::gru_backward`, for example. They run the time loop only, on the canonical arrays of the kernels.
Sequences are `[G, T, B, W]`, where each of the G groups holds B sequences, time first. States are `[G, B, H]`. Weights
are `[S, ...]`, where each of the S models owns G / S consecutive groups. Time-major input is one group, batch-major
input is one group per sequence, two directions are two models, and `torch.vmap` adds models or groups. None of these
costs a transpose or a second launch. Input projections and the gradients of all weights are PyTorch's own matmuls, so
compilers can fuse the operations around the loop.

A call passes through `operators.forward`; `op_common.call`, which bypasses the dispatcher where nothing observes it;
the function of the operator, in `operators._define`; and `kernels.forward` or `torch_loop.forward`. A gradient begins
in `gradients` of `operators._define`, and calls the operator of the gradient the same way.

The operators are `torch.library.custom_op`s, which are opaque to compilers, and not `triton_op`s. With `wrap_triton`,
Inductor emits a kernel's source again under `@triton.jit`, which does not compile the kernels written in Gluon.
Inductor's launches are never cooperative, so programs that wait for one another could deadlock.
"""

from torch_bridge.rnn_ops.implementation import Precision, kernel_precision, should_launch_kernels, unsupported
from torch_bridge.rnn_ops.operators import OPERATORS, forward

__all__ = ["OPERATORS", "Precision", "forward", "kernel_precision", "should_launch_kernels", "unsupported"]
