"""Defines the options of a run."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.providers import Provider


@dataclasses.dataclass(frozen=True)
class Settings:
    """The options of a run: how long to measure, and what.

    Attributes:
      seconds: the approximate time to measure each provider in each case.
      rounds: the number of rounds, in each of which every provider is timed.
      first_call_limit: the time limit, in seconds, of a first call that may take minutes.
      only: the names of providers to measure; empty for all.
      skip: the names of providers not to measure.
      rows: parts of the names of cases to measure; empty for all.
      profile: the GPU that kernels are chosen and compiled for, a key of `torch_bridge.tiling.PROFILES`; empty for the
        GPU at hand.
    """

    seconds: float = 0.3
    rounds: int = 5
    first_call_limit: float = 60.0
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    profile: str = ""

    def __post_init__(self) -> None:
        for name in ("seconds", "first_call_limit"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if self.rounds < 1:
            raise ValueError(f"rounds must be at least 1, got {self.rounds}")

    def wants(self, provider: str) -> bool:
        """Whether to measure the provider of this name."""
        return (not self.only or provider in self.only) and provider not in self.skip

    def chosen(self, providers: Sequence[Provider]) -> list[Provider]:
        """Returns the providers to measure."""
        return [provider for provider in providers if self.wants(provider.name)]

    def wants_case(self, label: str) -> bool:
        """Whether to measure the case of this name."""
        return not self.rows or any(part.lower() in label.lower() for part in self.rows)
