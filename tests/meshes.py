"""Makes meshes of all devices, and shards arrays over them."""

import jax
from jax.sharding import NamedSharding


def make_mesh(axis_type, axes=("data",), last=2):
    """Returns a mesh of all devices; if it has two axes, the last one has `last` devices."""
    count = len(jax.devices())
    shape = {1: (count,), 2: (count // last, last)}[len(axes)]
    return jax.make_mesh(shape, axes, axis_types=(axis_type,) * len(axes))


def place(mesh, specs, arguments):
    """Returns the arguments, each sharded over a mesh by its spec."""
    return [
        jax.tree.map(lambda x, spec=spec: jax.device_put(x, NamedSharding(mesh, spec)), x)
        for x, spec in zip(arguments, specs, strict=True)
    ]
