"""Finds raw keys in the key set of the pass being trained: by an index where the device budget leaves room for one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tiercache.kernels.cpu.key_index import KeySet
from tiercache.kernels.cpu.key_sweeps import search_keys
from tiercache.rows.backends.raw_key_indexes import HostFound
from tiercache.values.ids import FoundIds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tiercache.data.dataset import PassDataset
    from tiercache.data.raw_batch import FeatureKeys
    from tiercache.data.sub_dataset import SubDataset
    from tiercache.rows.backends.base import Backend, KeyIndex
    from tiercache.store.table import Table
    from tiercache.values.ids import Found

_SHARED_KEYS = 1 << 15  # fewer are found before other threads have begun


class IndexPlan(NamedTuple):
    """The index of the raw keys of a pass, as it is planned."""

    num_keys: int
    """Keys of the largest pass, of all tables."""
    num_bytes: int
    """Bytes on the device; 0 if no index is built."""

    @classmethod
    def of(cls, data: PassDataset, backend: Backend, room: int | None = None) -> IndexPlan:
        """Plan an index for the passes of a dataset. room: bytes of the device's budget that are left for it."""
        num_keys = max(sum(one.rows(table.name) for table in data.tables) for one in data.passes)
        num_bytes = backend.index_bytes(num_keys, len(data.tables))
        return cls(num_keys, num_bytes if room is None or num_bytes <= room else 0)


class KeyFinder:
    """Local ids of raw keys; on the training thread.

    The backend's index has room for the largest pass and is built at the first batch of each pass. If it does not fit
    the budget, keys are searched on the CPU in the mapped key set, which takes no memory: keys are in hash order, so a
    search is an interpolation. It takes 4 to 9 times as long as the CPU's index.
    """

    def __init__(self, tables: Sequence[Table], backend: Backend, plan: IndexPlan) -> None:
        self._tables, self._backend, self._plan = tuple(tables), backend, plan
        self._place = {table.name: t for t, table in enumerate(self._tables)}
        self._index: KeyIndex | None = None
        self._seen: SubDataset | None = None

    @property
    def index_bytes(self) -> int:
        """Bytes that the index takes; 0 before the first batch, and where it is not planned."""
        return 0 if self._index is None else self._index.num_bytes

    def close(self) -> None:
        """Let go of the index; the next key that is looked for would make another."""
        self._index = self._seen = None

    def find(
        self, source: SubDataset, features: dict[str, FeatureKeys], table_of: dict[str, str]
    ) -> tuple[Found, dict[str, FoundIds]]:
        """Return the local id of every key, of all features one behind the other and by feature."""
        tables = np.array([self._place[table_of[name]] for name in features], np.int64)
        starts = np.zeros(tables.size + 1, np.int64)
        np.cumsum([feature.keys.size for feature in features.values()], out=starts[1:])
        keys = [feature.keys for feature in features.values()]
        index = self._index_of(source)
        found = self._search(source, keys, starts, tables) if index is None else index.find(keys, starts, tables)
        cuts = starts.tolist()
        return found, {
            name: FoundIds(found, first, last, feature.offsets, feature.weights)
            for (name, feature), first, last in zip(features.items(), cuts[:-1], cuts[1:], strict=True)
        }

    def _index_of(self, source: SubDataset) -> KeyIndex | None:
        """Return an index of the pass; None where none is planned, or the device has no room."""
        if self._seen is source or not self._plan.num_bytes:
            return self._index
        self._seen = None
        if self._index is None:
            table_ids = np.array([table.table_id for table in self._tables], np.uint64)
            self._index = self._backend.key_index(self._plan.num_keys, table_ids)
        if self._index is not None:
            self._index.build([KeySet(t, source.keys(table.name), 0) for t, table in enumerate(self._tables)])
        self._seen = source
        return self._index

    def _search(
        self,
        source: SubDataset,
        keys: Sequence[NDArray[np.int64]],
        starts: NDArray[np.int64],
        tables: NDArray[np.int64],
    ) -> Found:
        found = np.empty(int(starts[-1]), np.int32)
        threads = torch.get_num_threads() if found.size >= _SHARED_KEYS else 1
        step = max(1, -(-found.size // threads))
        mapped = [source.keys(self._tables[t].name) for t in tables]
        parts = [
            (f, low, min(low + step, mine.size)) for f, mine in enumerate(keys) for low in range(0, mine.size, step)
        ]

        def search(part: tuple[int, int, int]) -> None:
            f, low, high = part
            places = np.empty(high - low, np.int64)
            search_keys(mapped[f], self._tables[tables[f]].table_id, keys[f][low:high], places)
            found[starts[f] + low : starts[f] + high] = places

        if threads == 1:
            for part in parts:
                search(part)
        else:
            with ThreadPoolExecutor(threads, thread_name_prefix="tiercache-search") as pool:
                list(pool.map(search, parts))
        return HostFound(found, self._backend.to_device(found))
