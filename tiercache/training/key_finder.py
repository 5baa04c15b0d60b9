"""Finds raw keys in the key set of the pass being trained: by an index where the device budget leaves room for one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch

from tiercache.kernels.key_index import KeyIndex, KeySet, capacity_for
from tiercache.kernels.uses import search_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.passes.keybatch import FeatureKeys
    from tiercache.passes.passset import Pass
    from tiercache.store.table import Table

PLACE_BYTES, TABLE_BYTES = 16, 8  # of the index: for a key 20 to 40 with the places left free
_SHARED_KEYS = 1 << 15  # fewer are found before other threads have begun


class KeyFinder:
    """Local ids of raw keys; on the training thread.

    The index is built at the first batch of a visit. Without room for it keys are searched in the mapped key set, which
    takes no memory: keys stand in hash order, so a search is an interpolation. It takes 4 to 9 times as long.
    """

    def __init__(self, tables: Sequence[Table], room_bytes: int | None) -> None:
        """room_bytes: what an index may take; None: anything."""
        self._tables, self._room_bytes = tuple(tables), room_bytes
        self._place = {table.name: t for t, table in enumerate(self._tables)}
        self._index: KeyIndex | None = None
        self._indexed: Pass | None = None

    @property
    def index_bytes(self) -> int:
        """Bytes that the index takes; 0 before the first batch, and where it has no room."""
        return 0 if self._index is None else self._index.nbytes

    def find(
        self, source: Pass, features: dict[str, FeatureKeys], table_of: dict[str, str]
    ) -> dict[str, NDArray[np.int32]]:
        """Return the local id of every key by feature, -1 where the pass does not have it."""
        tables = np.array([self._place[table_of[name]] for name in features], np.int64)
        starts = np.zeros(tables.size + 1, np.int64)
        np.cumsum([feature.keys.size for feature in features.values()], out=starts[1:])
        keys = np.concatenate([feature.keys for feature in features.values()])
        found = np.empty(keys.size, np.int32)
        index = self._index_of(source)
        if index is not None:
            index.find(keys, starts, tables, found)
        else:
            self._search(source, keys, starts, tables, found)
        return {name: found[starts[f] : starts[f + 1]] for f, name in enumerate(features)}

    def _index_of(self, source: Pass) -> KeyIndex | None:
        """Return an index of the pass; None where it takes more than there is room for."""
        if self._indexed is source:
            return self._index
        rows = sum(source.rows(table.name) for table in self._tables)
        capacity = capacity_for(rows)
        num_bytes = PLACE_BYTES * capacity + TABLE_BYTES * len(self._tables)
        if self._room_bytes is not None and num_bytes > self._room_bytes:
            self._index = self._indexed = None
            return None
        if self._index is None or capacity > self._index.capacity:
            self._index = None  # the old one goes before the new one comes
            self._index = KeyIndex(rows, np.array([table.table_id for table in self._tables], np.uint64))
        self._index.build([KeySet(t, source.keys(table.name), 0) for t, table in enumerate(self._tables)])
        self._indexed = source
        return self._index

    def _search(
        self,
        source: Pass,
        keys: NDArray[np.int64],
        starts: NDArray[np.int64],
        tables: NDArray[np.int64],
        found: NDArray[np.int32],
    ) -> None:
        threads = torch.get_num_threads() if keys.size >= _SHARED_KEYS else 1
        step = max(1, -(-keys.size // threads))
        mapped = [source.keys(self._tables[t].name) for t in tables]
        parts = [
            (f, slice(low, min(low + step, int(starts[f + 1]))))
            for f in range(tables.size)
            for low in range(int(starts[f]), int(starts[f + 1]), step)
        ]

        def search(part: tuple[int, slice]) -> None:
            f, span = part
            places = np.empty(span.stop - span.start, np.int64)
            search_keys(mapped[f], self._tables[tables[f]].table_id, keys[span], places)
            found[span] = places

        if threads == 1:
            for part in parts:
                search(part)
            return
        with ThreadPoolExecutor(threads, thread_name_prefix="tiercache-search") as pool:
            list(pool.map(search, parts))
