"""A model of the keys of an unread dataset: Zipf's law, and passes that are all alike.

A sample draws keys independently, key k of n with the chance q_k = k^-s / (1^-s + ... + n^-s). A pass that draws m keys
has key k with the chance p_k = 1 - exp(-m q_k). In a cycle of P passes the next pass that has it comes after d passes
with the chance p_k (1 - p_k)^(d - 1) for d < P, and else is the same pass in the next epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_SINGLE_RANKS = 256
"""The most frequent keys, each of which is a separate bin."""
_BINS = 2000
_CHUNK = 256
"""Distances that are computed at a time."""
_STEPS = 50
"""Halvings of an interval."""
_MOST_KEYS = 1e18
_ALIKE = 1e-3
"""Numbers of rows that differ by less count as equal."""


@dataclass(frozen=True)
class KeyModel:
    """The keys of one table."""

    num_keys: float
    """Keys that may be drawn."""
    exponent: float
    """The exponent of Zipf's law; 0: all keys are equally frequent."""

    @classmethod
    def of(cls, rows: int, draws: float, exponent: float) -> KeyModel | None:
        """Return the model in which ``draws`` have ``rows`` distinct keys; None if no number of keys does."""
        fewest, most = cls(rows, exponent), cls.most_rows(draws, exponent)
        if fewest.rows(draws) >= rows * (1 - _ALIKE):
            return fewest
        if most < rows * (1 - _ALIKE):
            return None
        return cls(root(lambda keys: cls(keys, exponent).rows(draws) - rows, rows, _MOST_KEYS), exponent)

    @classmethod
    def most_rows(cls, draws: float, exponent: float) -> float:
        """Return the number of distinct keys in ``draws`` if the keys are unlimited."""
        return cls(_MOST_KEYS, exponent).rows(draws)

    @cached_property
    def _bins(self) -> tuple[Floats, Floats]:
        """Numbers of keys with about the same chance, and that chance, as float64 (bins,)."""
        ends = np.geomspace(_SINGLE_RANKS, max(_SINGLE_RANKS, self.num_keys), _BINS)
        ends = np.unique(np.concatenate([np.arange(1, _SINGLE_RANKS), ends]))
        ends = ends[ends <= max(1, self.num_keys)]
        counts = np.diff(ends, prepend=0)
        low, high, power = ends - counts + 0.5, ends + 0.5, 1 - self.exponent
        weights = np.log(high / low) if abs(power) < 1e-9 else (high**power - low**power) / power
        weights = np.where(counts == 1, ends**-self.exponent, weights)
        return counts, weights / counts / weights.sum()

    def rows(self, draws: float) -> float:
        """Return the expected number of distinct keys among ``draws``."""
        counts, chances = self._bins
        return float(counts @ -np.expm1(-draws * chances))

    def rows_at(self, draws: float, num_passes: int) -> Floats:
        """Return the expected rows of a pass by next use, (num_passes,): entry d - 1 is of the d-th next pass."""
        counts, chances = self._bins
        present = -np.expm1(-draws * chances)
        absent = np.exp(-draws * chances)
        found = np.empty(num_passes)
        repeated = counts * present**2
        powers = absent[:, None] ** np.arange(min(_CHUNK, num_passes))
        for low in range(0, num_passes, _CHUNK):
            found[low : low + _CHUNK] = (repeated @ powers)[: num_passes - low]
            repeated = repeated * absent**_CHUNK
        found[-1] = counts * present @ absent ** (num_passes - 1)
        return found


def root(excess: Callable[[float], float], low: float, high: float) -> float:
    """Return a number in [low, high] at which an increasing function passes 0, from below."""
    for _ in range(_STEPS):
        middle = math.sqrt(low * high) if low > 0 else (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return low


def whole_rows(expected: Floats) -> NDArray[np.int64]:
    """Round numbers of rows to whole ones whose sums from the first on are the rounded sums."""
    ends = np.concatenate([[0], np.rint(np.cumsum(expected))]).astype(np.int64)
    rounded: NDArray[np.int64] = ends[1:] - ends[:-1]
    return rounded
