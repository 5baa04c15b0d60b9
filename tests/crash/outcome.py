"""Results of many deaths: counts, problems, and the states of the stores."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MOST_PROBLEMS = 5  # further problems add no information
KINDS = LOST, FAILING, SILENT = "lost", "failing", "silent"
"""A durable commit is gone, or one exists that never began; the store fails to open, verify or resume;
rows have wrong bits without an error.
"""


class EnoughError(Exception):
    """The number of problems at which to stop was reached."""


@dataclass(kw_only=True, slots=True)
class Found:
    """The findings of a check of a folder."""

    stands: Any = None  # the newest commit; None if the store does not open
    wrong: list[tuple[str, str]] = field(default_factory=list)  # kinds and messages
    counts: Counter[str] = field(default_factory=Counter)  # further counts of the workload


@dataclass(kw_only=True, slots=True)
class Outcome:
    """Combined results of deaths."""

    counts: Counter[str] = field(default_factory=Counter)
    """Kills ("kills"), kills of resumed processes ("second_kills"), deaths by kind, and further counts of the
    workload.
    """
    wrong: Counter[str] = field(default_factory=Counter)  # folders by kind of problem
    stood: Counter[Any] = field(default_factory=Counter)  # folders by state after a death
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)  # a message for each problem

    def add(self, other: "Outcome") -> None:
        self.counts.update(other.counts)
        self.wrong.update(other.wrong)
        self.stood.update(other.stood)
        self.problems += other.problems
