"""Block-diagonal recurrent weights of modules: their checks and their initial values. `jaxrnn.blocks` runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from jaxrnn.checks import check_size, shown

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike

    from jaxrnn.checks import Caller


def check_num_blocks(caller: Caller, num_blocks: Any, hidden: int) -> None:
    """Raises ValueError unless `num_blocks` is a positive integer that divides the width of the carry."""
    check_size(caller("num_blocks"), num_blocks)
    if hidden % num_blocks:
        raise ValueError(
            f"{caller('num_blocks')} must divide the width of the carry, {hidden}, got {num_blocks}; pass a divisor of "
            f"{hidden}"
        )


def check_blocks_without_projection(caller: Caller, num_blocks: int, proj_size: int | None) -> None:
    """Raises ValueError if an LSTM has both blocks and a projection, which mixes the states of all blocks."""
    if num_blocks != 1 and proj_size is not None:
        raise ValueError(
            f"{caller('num_blocks')} must be 1 with a projection, which mixes the states of all blocks, got "
            f"{shown(num_blocks)}; pass proj_size=None or num_blocks=1"
        )


def check_blocks_without_norm(caller: Caller, num_blocks: int) -> None:
    """Raises ValueError if a cell whose norm sees all units has blocks."""
    if num_blocks != 1:
        raise ValueError(
            f"{caller('num_blocks')} must be 1 for a cell whose norm sees all units, got {shown(num_blocks)}; pass "
            "num_blocks=1, or use a cell without a norm, such as GRUCell"
        )


def check_blocks_are_fused(caller: Caller, num_blocks: int, reason: str | None) -> None:
    """Raises NotImplementedError if a cell with blocks has to run under Flax's scan for `reason`."""
    if num_blocks != 1 and reason is not None:
        raise NotImplementedError(
            f"{caller.name}: num_blocks={shown(num_blocks)} cannot run {reason}, because Flax's cells have no blocks; "
            "pass num_blocks=1"
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
