"""The path from a recurrence's arguments to the kernels and back, with gradients.

`run` runs a recurrence on each device, in one direction or both, `layout` converts arguments to the kernels' form, and
`recurrence` is the `jax.custom_vjp` on that form. `chunks` is for `remat`, `mesh` for explicit meshes, and
`projected_state` for states with a projection.
"""

from jaxrnn.kernel_vjp.mesh import reshard_call
from jaxrnn.kernel_vjp.run import run_kernels
from jaxrnn.kernel_vjp.spec import kernel_precision

__all__ = ["kernel_precision", "reshard_call", "run_kernels"]
