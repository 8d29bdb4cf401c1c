"""Conversion between the arrays of a layer and the canonical ones of `torch_bridge.rnn_ops`, without copies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bridge.functional.direction import Direction


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Stacks tensors as `torch.stack` does, but a single tensor without a copy."""
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def _unstack(x: Tensor) -> Sequence[Tensor]:
    """Unbinds axis 0. A single part is squeezed instead: autograd forbids in-place changes to results of `unbind`."""
    return (x.squeeze(0),) if x.shape[0] == 1 else x.unbind(0)


class Layout:
    """The layout of a layer's arrays, which are lists of tensors by direction, and the canonical layout."""

    def __init__(self, xs: Tensor, directions: int, batch_first: bool):
        self.time = xs.ndim - 2 if batch_first else 0
        self.outer = tuple(xs.shape[:-1])
        self.batch = self.outer[: self.time] + self.outer[self.time + 1 :]
        steps, sequences = xs.shape[self.time], math.prod(self.batch)
        self.directions = directions
        # groups, steps, sequences per group
        self.sizes = (directions * sequences, steps, 1) if batch_first else (directions, steps, sequences)

    def sequence(self, x: Tensor) -> Tensor:
        """Reshapes `[directions, *outer, ...]` to `[G, T, B, ...]`."""
        return x.reshape(*self.sizes, *x.shape[1 + len(self.outer) :])

    def state(self, x: Tensor) -> Tensor:
        """Reshapes `[directions, *batch, H]` to `[G, B, H]`."""
        return x.reshape(self.sizes[0], self.sizes[2], x.shape[-1])

    def sequences(self, x: Tensor) -> Sequence[Tensor]:
        """Inverts `sequence` and splits the result by direction."""
        return _unstack(x.reshape(self.directions, *self.outer, x.shape[-1]))

    def states(self, x: Tensor) -> Sequence[Tensor]:
        """Inverts `state` and splits the result by direction."""
        return _unstack(x.reshape(self.directions, *self.batch, x.shape[-1]))

    def is_stepped(self, x: Tensor) -> bool:
        """Whether a reset state has a value for every step."""
        return x.ndim == len(self.outer) + 1

    def expand(self, x: Tensor, stepped: bool) -> Tensor:
        """Broadcasts a reset state over the sequences, and over the steps if `stepped`."""
        if not stepped:
            return x.expand(*self.batch, x.shape[-1])
        if not self.is_stepped(x):
            x = x.expand(*self.batch, x.shape[-1]).unsqueeze(self.time)
        return x.expand(*self.outer, x.shape[-1])

    def initial_states(self, given: Sequence[Tensor | None], default: torch.dtype, xs: Tensor, hidden: int) -> Tensor:
        """Returns a state of all directions before the first step, `[G, B, H]`."""
        dtype = next((x.dtype for x in given if x is not None), default)
        zeros = xs.new_zeros((*self.batch, hidden), dtype=dtype) if any(x is None for x in given) else xs
        return self.state(stack([zeros if x is None else x for x in given]))

    def resets(self, given: Sequence[Tensor | None], xs: Tensor) -> Tensor | None:
        """Returns the resets of all directions, `[G, T, B]`, or None if no direction has any."""
        if all(x is None for x in given):
            return None
        if len(given) == 1:
            return self.sequence(stack([x for x in given if x is not None]))
        never = xs.new_zeros(self.outer, dtype=torch.bool)
        return self.sequence(stack([never if x is None else x != 0 for x in given]))

    def reset_states(self, layer: Sequence[Direction], states: Sequence[Tensor]) -> list[Tensor] | list[None]:
        """Returns the reset states of all directions: for each state `[G, B, H]`, `[G, T, B, H]`, or None."""
        given = [x for one in layer for x in one.reset_states if x is not None]
        if not given:
            return [None] * len(states)
        stepped = any(self.is_stepped(x) for x in given)
        found = []
        for k, state in enumerate(states):
            parts = [one.reset_states[k] for one in layer]
            zeros = state.new_zeros(state.shape[-1:])
            each = stack([self.expand(zeros if x is None else x.to(state.dtype), stepped) for x in parts])
            found.append(self.sequence(each) if stepped else self.state(each))
        return found
