"""Layers and norms of DTensors, each device on its own shard.

Sequences of a batch are independent, and so are rows of a norm. Inputs that are sharded over such axes stay where they
are, and no results are communicated. Every other placement is first gathered, as operators of DTensors do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_distributed(arrays: Iterable[Tensor | None]) -> bool:
    """Whether any of the arrays is a DTensor. There is none before `torch.distributed.tensor` is imported."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in arrays)


def check_local(what: str, x: Tensor) -> None:
    """Raises NotImplementedError if an array is a DTensor, for `what` takes none."""
    if is_distributed([x]):
        raise NotImplementedError(f"{what} cannot be a DTensor: pass local tensors and parameters, by to_local")


class Shards:
    """The shards of arrays that belong to inputs, each along its own axes.

    Attributes:
      mesh: the device mesh of the inputs.
      sizes: the global sizes of the axes of the inputs that may be sharded.
      sharded: for each dimension of the mesh, the index in `sizes` of the axis that it shards, or None.
    """

    def __init__(self, xs: Tensor, axes: Sequence[int]) -> None:
        from torch.distributed.tensor import DTensor, Shard

        if not isinstance(xs, DTensor):
            raise _mixed("the inputs")
        self.mesh, self.sizes = xs.device_mesh, [xs.shape[axis] for axis in axes]
        at = {axis: i for i, axis in enumerate(axes)}
        self.sharded = [at.get(p.dim % xs.ndim) if type(p) is Shard else None for p in xs.placements]

    def local(self, name: str, x: Tensor | None, axes: Sequence[int] = ()) -> Any:
        """Returns the shard of an array on this device.

        Args:
          name: the array in messages.
          x: an array, or None, which is returned.
          axes: its axes that correspond to those of the inputs, in the same order; none if all shards need all of it.
        """
        from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

        if x is None:
            return None
        if not isinstance(x, DTensor):
            raise _mixed(name)
        placements: list[Placement] = [Shard(axes[i]) if axes and i is not None else Replicate() for i in self.sharded]
        # of what all shards read, each has a part of the gradient
        pairs = zip(self.sharded, placements, strict=True)
        gradients = [Partial() if i is not None and not axes else placement for i, placement in pairs]
        if x.device_mesh != self.mesh or x.placements != tuple(placements):
            x = x.redistribute(self.mesh, placements)
        return x.to_local(grad_placements=gradients)

    def join(self, x: Tensor, axes: Sequence[int]) -> Tensor:
        """Returns the DTensor of which `x` is the shard on this device; its `axes` are those of `local`."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        shape = list(x.shape)
        for axis, size in zip(axes, self.sizes, strict=True):
            shape[axis] = size
        return DTensor.from_local(
            x.contiguous(), self.mesh, [Replicate() if i is None else Shard(axes[i]) for i in self.sharded],
            shape=torch.Size(shape), stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip


def _mixed(name: str) -> ValueError:
    """Returns the error for an array that is no DTensor beside others that are."""
    return ValueError(
        f"{name} must be a DTensor, as other arrays are: distribute all of them, by distribute_tensor or "
        "distribute_module of torch.distributed.tensor, or pass local tensors, by to_local"
    )
