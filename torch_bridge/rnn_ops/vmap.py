"""The `torch.vmap` rule of the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def vmap_rule(op: Any, groups: str) -> Callable[..., Any]:
    """Returns the `torch.vmap` rule of `op`: a new axis adds models if weights are batched, groups if they are shared.

    Both take one launch. The original models stay adjacent, so each of two directions keeps the parity of its index.
    `groups` is the name of an argument whose leading axis is the groups.
    """
    names = [argument.name for argument in op._schema.arguments]
    weights = ("w_hh", "b_hn", "bias", "w_sum")

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        size = info.batch_size

        def count(name: str) -> Any:
            x, dim = args[names.index(name)], in_dims[names.index(name)]
            return x.shape[0 if dim is None or dim > 0 else 1]  # may be symbolic

        S, G = count("w_hh"), count(groups)
        new_models = any(n in weights and dim is not None for n, dim in zip(names, in_dims, strict=False))

        def merge(name: str, x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor) or (name in weights and not new_models):
                return x
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            if name not in weights and not new_models:  # models stay the slowest axis: [size, S, ...] -> [S, size, ...]
                x = x.unflatten(1, (S, G // S)).transpose(0, 1).flatten(0, 1)
            return x.flatten(0, 1)

        def split(x: Tensor) -> Tensor:
            if new_models:
                return x.unflatten(0, (size, G))
            return x.unflatten(0, (S, size, G // S)).transpose(0, 1).flatten(1, 2)

        results = op(*(merge(*each) for each in zip(names, args, in_dims, strict=False)))
        empty = [x.ndim == 1 for x in results]  # outputs that are not requested
        out = tuple(x if e else split(x) for x, e in zip(results, empty, strict=True))
        return out, tuple(None if e else 0 for e in empty)

    return rule
