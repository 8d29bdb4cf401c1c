"""The bridge to the Triton kernels. No other module of jaxrnn calls them.

Every launch binds one primitive (`primitive`), whose parameter `kind` says what is launched: `recurrence`, `norm`,
`projection` or `weight_grads` (the base class is in `launch_kind`). `vmap` adds groups, rows or models to a launch, but
never a launch. `tracing` and `lowering` have the rules of the primitive, and `partitioning` those for a mesh of `Auto`
axes. Once bound, a launch passes through `lowering._lower`; `LaunchKind.bind_shard`, which binds the second primitive
on the shard of a device; `lowering._lower_shard`; and the function from `lowering.shard_function`.

Launches reach a GPU by one of two methods, and `method` chooses: `callback` has the functions that XLA calls with its
own buffers and stream, and `native` a handler in C. XLA captures the calls of both in its CUDA graphs. `availability`
says whether the kernels can run here. `derivatives` makes functions that launch differentiable. `launch_record`
describes launches for `jaxrnn.explain` and the log.
"""

from jaxrnn._bridge import lowering as lowering
from jaxrnn._bridge import tracing as tracing
from jaxrnn._bridge.availability import (
    chosen_device,
    has_nvidia_gpu,
    is_preferred,
    on_gpu,
    profile,
    symbolic_size,
    unsupported,
    unsupported_norm,
    unusable,
)
from jaxrnn._bridge.derivatives import Differentiable
from jaxrnn._bridge.launch_kind import Output
from jaxrnn._bridge.launch_record import find_launches
from jaxrnn._bridge.method import LaunchMethod, launch_method
from jaxrnn._bridge.native import register as register_native_launch
from jaxrnn._bridge.norm import launch_norm
from jaxrnn._bridge.projection import launch_projection, may_launch_projection
from jaxrnn._bridge.recurrence import launch, may_have_float32_residuals
from jaxrnn._bridge.scan_launch import unpack_words
from jaxrnn._bridge.weight_grads import (
    is_features_first_profitable,
    is_weight_grads_launch_profitable,
    launch_weight_grads,
)

__all__ = [
    "Differentiable",
    "LaunchMethod",
    "Output",
    "chosen_device",
    "find_launches",
    "has_nvidia_gpu",
    "is_features_first_profitable",
    "is_preferred",
    "is_weight_grads_launch_profitable",
    "launch",
    "launch_method",
    "launch_norm",
    "launch_projection",
    "launch_weight_grads",
    "may_have_float32_residuals",
    "may_launch_projection",
    "on_gpu",
    "profile",
    "register_native_launch",
    "symbolic_size",
    "unpack_words",
    "unsupported",
    "unsupported_norm",
    "unusable",
]
