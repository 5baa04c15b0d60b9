"""HeldKeys: the keys of one table that is whole in memory, and which of them were trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.data.raw_batch import OOV_KEY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class HeldKeys:
    """Finds keys by value. It sorts once, and marks what a pass trains once."""

    def __init__(self, keys: NDArray[np.int64], first: int, slots_P: Sequence[NDArray[np.int32]]) -> None:
        """slots_P: by pass, the slots of the keys that it trains; the first key's is ``first``."""
        self._keys, self._first, self._slots_P = keys, first, slots_P
        self._order = np.argsort(keys)
        self._shared = np.nonzero(keys == OOV_KEY)[0]
        self._trained = np.zeros(keys.size, dtype=bool)
        self._marked: set[int] = set()

    def find(self, keys: NDArray[np.int64], trained: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the place of each key, and whether it was trained in one of the sub-datasets ``trained``; else it has
        none.

        Where the table was trained with an out-of-vocabulary row, keys that have none stand there.
        """
        if not self._keys.size:
            return np.zeros(keys.size, np.int64), np.zeros(keys.size, dtype=bool)
        self._mark(set(trained))
        at = self._order[np.minimum(np.searchsorted(self._keys, keys, sorter=self._order), self._keys.size - 1)]
        found = (self._keys[at] == keys) & self._trained[at]
        if self._shared.size:
            return np.where(found, at, self._shared[0]), np.ones(keys.size, dtype=bool)
        return at, found

    def _mark(self, trained: set[int]) -> None:
        if not trained >= self._marked:  # asked by who asked for rows before the last passes
            self._trained[:], self._marked = False, set()
        for p in trained - self._marked:
            self._trained[self._slots_P[p] - self._first] = True
        self._marked = trained
