"""Skewed ids: rank k of V is drawn with probability proportional to k ** -exponent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

EXPONENT = 1.05


class Zipf:
    """Draws ids below ``num_ids``, the same for the same seed."""

    def __init__(self, num_ids: int, *, exponent: float = EXPONENT, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._below = np.cumsum(np.arange(1, num_ids + 1, dtype=np.float64) ** -exponent)
        self._below /= self._below[-1]
        self.num_ids = num_ids

    def permutation(self) -> NDArray[np.int64]:
        """Return an order of the ids in which popularity means nothing."""
        return self._rng.permutation(self.num_ids)

    def ranks(self, count: int) -> NDArray[np.int64]:
        """Return ``count`` ranks, the most popular 0."""
        drawn = np.searchsorted(self._below, self._rng.random(count), side="right")
        return np.minimum(drawn, self.num_ids - 1)
