"""Block-diagonal recurrent weights of modules: their checks and their initial values. `jaxrnn.blocks` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike


def check_num_blocks(num_blocks: Any, hidden: int) -> None:
    """Raises ValueError unless `num_blocks` is a positive integer that divides the width of the carry."""
    if isinstance(num_blocks, bool) or not isinstance(num_blocks, int) or num_blocks < 1:
        raise ValueError(f"num_blocks must be an integer of at least 1, got {num_blocks!r}")
    if hidden % num_blocks:
        raise ValueError(f"num_blocks must divide the width of the carry, {hidden}, got {num_blocks}")


def check_blocks_without_projection(num_blocks: int, proj_size: int | None) -> None:
    """Raises ValueError if an LSTM has both blocks and a projection, which mixes the states of all blocks."""
    if num_blocks != 1 and proj_size is not None:
        raise ValueError(f"num_blocks={num_blocks} excludes a projection: pass proj_size=None or num_blocks=1")


def check_blocks_are_fused(num_blocks: int, reason: str | None) -> None:
    """Raises NotImplementedError if a cell with blocks has to run under Flax's scan for `reason`."""
    if num_blocks != 1 and reason is not None:
        raise NotImplementedError(
            f"num_blocks={num_blocks} cannot run {reason}: Flax's cells have no blocks. Pass num_blocks=1"
        )


def initialize_blocks(
    init: Callable[..., Any], num_blocks: int, key: Array, shape: tuple[int, int], dtype: DTypeLike
) -> list[Any]:
    """Returns the blocks of a block-diagonal kernel, each the result of `init` with a key of its own.

    Args:
      init: the initializer, called as for a kernel that is one block.
      num_blocks: N.
      key: the key.
      shape: the shape of the whole kernel, `(H, F)`; a block is `[H / N, F / N]`.
      dtype: the dtype of the kernel.
    """
    rows, columns = (size // num_blocks for size in shape)
    return [init(one, (rows, columns), dtype) for one in jax.random.split(key, num_blocks)]
