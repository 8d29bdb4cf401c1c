"""Conversion between the arrays of a layer and the canonical ones of `torch_bridge.rnn_ops`, without copies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_bridge.functional.call import Call


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Stacks tensors as `torch.stack` does, but a single tensor without a copy."""
    return parts[0][None] if len(parts) == 1 else torch.stack(list(parts))


def _unstack(x: Tensor) -> Sequence[Tensor]:
    """Unbinds axis 0. A single part is squeezed instead: autograd forbids in-place changes to results of `unbind`."""
    return (x.squeeze(0),) if x.shape[0] == 1 else x.unbind(0)


class Layout:
    """The layout of a layer's arrays, which are lists of tensors by direction, and the canonical layout.

    Each block of block-diagonal recurrent weights is a model of its own, with H / N units for N blocks. The models are
    ordered by block, then by direction, so that the index of the direction is the parity of the model's.
    """

    def __init__(self, call: Call):
        xs, w_hh, batch_first = call.xs, call.directions[0].w_hh, call.batch_first
        self.time = xs.ndim - 2 if batch_first else 0
        self.outer = tuple(xs.shape[:-1])
        self.batch = self.outer[: self.time] + self.outer[self.time + 1 :]
        steps, sequences = xs.shape[self.time], math.prod(self.batch)
        self.directions, self.blocks = len(call.directions), w_hh.shape[0] if w_hh.ndim == 3 else 1
        self.models = self.directions * self.blocks
        # groups, steps, sequences per group
        self.sizes = (self.models * sequences, steps, 1) if batch_first else (self.models, steps, sequences)

    def by_model(self, x: Tensor, gates: int = 1) -> Tensor:
        """Splits the units of `[directions, ..., gates * H]` by block: `[models, ..., gates * H / N]`."""
        if self.blocks == 1:
            return x
        by_block = x.unflatten(-1, (gates, self.blocks, -1)).movedim(-2, 0)
        return by_block.flatten(-2).flatten(0, 1)

    def _by_direction(self, x: Tensor) -> Sequence[Tensor]:
        """Inverts `by_model` for an array without gates, and splits the result by direction."""
        if self.blocks > 1:
            x = x.unflatten(0, (self.blocks, self.directions)).movedim(0, -2).flatten(-2)
        return _unstack(x)

    def weights(self, given: Sequence[Tensor]) -> Tensor:
        """Returns the recurrent weights of each direction, `[gates * H, H]` or blocks, as those of all models."""
        if given[0].ndim == 2:
            return stack(given)
        return given[0] if len(given) == 1 else torch.stack(list(given), 1).flatten(0, 1)

    def sequence(self, x: Tensor) -> Tensor:
        """Reshapes `[models, *outer, ...]` to `[G, T, B, ...]`."""
        return x.reshape(*self.sizes, *x.shape[1 + len(self.outer) :])

    def state(self, x: Tensor) -> Tensor:
        """Reshapes `[models, *batch, width]` to `[G, B, width]`."""
        return x.reshape(self.sizes[0], self.sizes[2], x.shape[-1])

    def sequences(self, x: Tensor) -> Sequence[Tensor]:
        """Returns `[G, T, B, width]` as `[*outer, H]` for each direction."""
        return self._by_direction(x.reshape(self.models, *self.outer, x.shape[-1]))

    def states(self, x: Tensor) -> Sequence[Tensor]:
        """Returns `[G, B, width]` as `[*batch, H]` for each direction."""
        return self._by_direction(x.reshape(self.models, *self.batch, x.shape[-1]))

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
        """Returns a state of all models before the first step, `[G, B, width]`."""
        dtype = next((x.dtype for x in given if x is not None), default)
        zeros = xs.new_zeros((*self.batch, hidden), dtype=dtype) if any(x is None for x in given) else xs
        return self.state(self.by_model(stack([zeros if x is None else x for x in given])))

    def resets(self, given: Sequence[Tensor | None], xs: Tensor) -> Tensor | None:
        """Returns the resets of all models, `[G, T, B]`, or None if no direction has any."""
        if all(x is None for x in given):
            return None
        if len(given) == 1:
            by_direction = stack([x for x in given if x is not None])
        else:
            never = xs.new_zeros(self.outer, dtype=torch.bool)
            by_direction = stack([never if x is None else x != 0 for x in given])
        if self.blocks > 1:
            by_direction = by_direction.expand(self.blocks, *by_direction.shape).flatten(0, 1)
        return self.sequence(by_direction)

    def reset_states(self, call: Call, states: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Returns the reset states of all models: for each state `[G, B, width]`, `[G, T, B, width]`, or None."""
        given = [x for one in call.directions for x in one.reset_states if x is not None]
        if not given:
            return (None,) * len(states)
        stepped = any(self.is_stepped(x) for x in given)
        found = []
        for k, state in enumerate(states):
            parts = [one.reset_states[k] for one in call.directions]
            zeros = state.new_zeros(self.blocks * state.shape[-1])
            each = stack([self.expand(zeros if x is None else x.to(state.dtype), stepped) for x in parts])
            each = self.by_model(each)
            found.append(self.sequence(each) if stepped else self.state(each))
        return tuple(found)
