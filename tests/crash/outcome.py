"""What so many deaths came to: counts, what was wrong, and where the stores stood."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MOST_PROBLEMS = 5
"""More say nothing new."""
KINDS = LOST, FAILING, SILENT = "lost", "failing", "silent"
"""A commit that was durable is gone, or one that never began is there; the store does not open, or verify, or go on;
rows have other bits and nothing says so."""


class EnoughError(Exception):
    """So much is wrong that looking further is idle."""


@dataclass(kw_only=True, slots=True)
class Found:
    """What a look at a folder found."""

    stands: Any = None
    """Where the store stands; None where it does not open."""
    wrong: list[tuple[str, str]] = field(default_factory=list)
    """Kinds and sentences."""
    counts: Counter[str] = field(default_factory=Counter)
    """What the workload counts beside."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What so many deaths came to."""

    counts: Counter[str] = field(default_factory=Counter)
    """Kills ("kills"), those of processes that went on after one ("second_kills"), deaths by kind, and what a workload
    counts."""
    wrong: Counter[str] = field(default_factory=Counter)
    """Folders by what was wrong with them."""
    stood: Counter[Any] = field(default_factory=Counter)
    """Folders by where they stood after a death."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """A sentence for each thing that went wrong."""

    def add(self, other: Outcome) -> None:
        """Add what another came to."""
        self.counts.update(other.counts)
        self.wrong.update(other.wrong)
        self.stood.update(other.stood)
        self.problems += other.problems
