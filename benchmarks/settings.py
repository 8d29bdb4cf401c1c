"""Options of a run."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.providers import Provider


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long to measure, and what.

    Attributes:
      seconds: measured, about, of each provider in each case.
      rounds: how often each takes its turn.
      first_call_limit: seconds that a provider whose first call may take minutes is given for it.
      only: names of providers to measure; empty for all.
      skip: names not to measure.
      rows: parts of the names of cases to measure; empty for all.
      profile: GPU that kernels are chosen and compiled for, a key of `torch_bridge.tiling.PROFILES`; empty for the GPU
        at hand.
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
        """Those of `providers` to measure."""
        return [provider for provider in providers if self.wants(provider.name)]

    def wants_case(self, label: str) -> bool:
        """Whether to measure the case of this name."""
        return not self.rows or any(part.lower() in label.lower() for part in self.rows)
