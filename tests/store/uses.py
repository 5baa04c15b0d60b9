"""First uses of made-up schedules: what a store is rewritten for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.store import hash_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tiercache.store import Store


class Uses:
    """First uses from a dict of (table, key), a few keys at a time."""

    def __init__(self, store: Store, uses: dict[tuple[str, int], int], slice_keys: int) -> None:
        self._store, self._uses, self._slice_keys = store, uses, slice_keys

    def counts(self, table_name: str) -> Mapping[int, int]:
        """Return how many keys have each use."""
        mine = [use for (name, _), use in self._uses.items() if name == table_name]
        return {use: mine.count(use) for use in mine}

    def slices(self, table_name: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield keys in hash order."""
        table = next(table for table in self._store.tables if table.name == table_name)
        keys = np.array([key for name, key in self._uses if name == table_name], np.int64)
        keys = keys[np.argsort(hash_keys(keys, table.table_id))]
        for first in range(0, keys.size, self._slice_keys):
            part = keys[first : first + self._slice_keys]
            yield part, np.array([self._uses[table_name, key] for key in part.tolist()], np.int64)
