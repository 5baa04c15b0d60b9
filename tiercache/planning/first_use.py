"""When each key of a dataset is used first: what a store is put in order by before a schedule is entered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.kernels.cpu.next_use import hash_range_bound
from tiercache.planning.next_use import key_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.planning.next_use import Uses
    from tiercache.planning.positions import Positions
    from tiercache.planning.schedule import Schedule

    Int64s = NDArray[np.int64]

KEYS_PER_SLICE = 1 << 20


class FirstUses:
    """First passes from ``start`` on, by key: what ``Store.rewrite`` asks for.

    Every key of the dataset has one by the end of the epoch after: each epoch trains every sub-dataset.
    """

    def __init__(
        self,
        schedule: Schedule,
        positions: Positions,
        keys_of: Callable[[int, int], Int64s],
        uses_of: Callable[[int], Uses],
        *,
        start: int = 0,
        keys_per_slice: int = KEYS_PER_SLICE,
    ) -> None:
        """``uses_of(epoch)`` gives the uses of an epoch; ``keys_of(pass, table)`` keys in hash order."""
        epoch = schedule.epoch_of(start)
        epochs = 1 if start == epoch * schedule.num_passes else 2
        end = start + schedule.num_passes if schedule.repeats else (epoch + epochs) * schedule.num_passes
        self._start, self._passes = start, range(start, end)
        self._sub_datasets = [schedule.sub_dataset_of(pass_index) for pass_index in self._passes]
        uses_E = [uses_of(epoch + i) for i in range(epochs)]
        self._prev_gap = [
            uses_E[schedule.epoch_of(pass_index) - epoch].prev_gap[p]
            for pass_index, p in zip(self._passes, self._sub_datasets, strict=True)
        ]
        self._positions, self._keys_of = positions, keys_of
        self._keys_per_slice = keys_per_slice
        self._tables = {table.name: i for i, table in enumerate(positions.tables)}

    def counts(self, table_name: str) -> Mapping[int, int]:
        """Return how many keys of a table each pass uses first."""
        table = self._tables[table_name]
        counts = {}
        for place, pass_index in enumerate(self._passes):
            keys = self._positions.start(self._sub_datasets[place], table + 1) - self._positions.start(
                self._sub_datasets[place], table
            )
            counts[pass_index] = sum(
                int(np.count_nonzero(self._first(place, table, low, min(keys, low + self._keys_per_slice))))
                for low in range(0, keys, self._keys_per_slice)
            )
        return {pass_index: count for pass_index, count in counts.items() if count}

    def slices(self, table_name: str) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield keys (n,) in hash order and their first passes (n,), one hash range at a time."""
        table = self._tables[table_name]
        table_id = self._positions.tables[table].table_id
        keys_V = [self._keys_of(p, table) for p in self._sub_datasets]
        slices = max(1, -(-sum(keys.size for keys in keys_V) // self._keys_per_slice))
        begins = [0] * len(keys_V)
        for i in range(1, slices + 1):
            ends = [hash_range_bound(keys, table_id, (i << 64) // slices) for keys in keys_V]
            keys_parts, use_parts = [], []
            for place, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                mine = np.asarray(keys_V[place][begin:end])[self._first(place, table, begin, end)]
                keys_parts.append(mine)
                use_parts.append(np.full(mine.size, self._passes[place], dtype=np.int64))
            begins = ends
            keys = np.concatenate(keys_parts)
            order = np.argsort(hash_keys(keys, table_id))
            yield keys[order], np.concatenate(use_parts)[order]

    def _first(self, place: int, table: int, low: int, high: int) -> NDArray[np.bool_]:
        """Return which of keys [low, high) of a table a pass uses first: their last use was before the start."""
        start = self._positions.start(self._sub_datasets[place], table)
        first: NDArray[np.bool_] = self._prev_gap[place][start + low : start + high] > self._passes[place] - self._start
        return first


def count_keys(
    positions: Positions, keys_of: Callable[[int, int], Int64s], *, keys_per_slice: int = KEYS_PER_SLICE
) -> dict[str, int]:
    """Return how many different keys of each table there are in all passes, by the table's name: reads each once.

    ``keys_of(pass, table)`` gives keys in hash order.
    """
    counts = {table.name: 0 for table in positions.tables}
    for some in key_ranges(positions, keys_of, keys_per_range=keys_per_slice):
        counts[positions.tables[some.table].name] += some.num_keys
    return counts
