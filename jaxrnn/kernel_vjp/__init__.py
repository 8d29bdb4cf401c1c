"""The path from a recurrence's arguments to the kernels and back, with gradients.

A call passes through `run.run_kernels`, which runs it on each device, in one direction or both; `layout.run_canonical`,
which converts arguments to the kernels' form; `recurrence.recurrence`, a `_bridge.derivatives.Differentiable`, whose
primitives call its passes on that form, `_forward` and `_backward`; `chunks.in_chunks`, which runs a pass for all steps
at once or, with `remat`, for a part of them at a time; and `launch.launch_pass`, which calls `_bridge.launch`. `mesh`
is for explicit meshes, `projected_state` for states with a projection, and `tangents` and, without kernels, `in_scan`
for derivatives beyond the first gradient.
"""

from jaxrnn.kernel_vjp.mesh import reshard_call
from jaxrnn.kernel_vjp.run import run_kernels
from jaxrnn.kernel_vjp.spec import kernel_precision

__all__ = ["kernel_precision", "reshard_call", "run_kernels"]
