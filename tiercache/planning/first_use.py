"""When each key of a dataset is used first: what a store is put in order by before a schedule is entered."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.cpu.hashing import hash_keys
from tiercache.planning.next_use import KEYS_PER_RANGE, key_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.planning.positions import Positions
    from tiercache.planning.schedule import Schedule

    Int64s = NDArray[np.int64]


class FirstUses:
    """First passes from ``start`` on, by key: what ``Store.rewrite`` asks for.

    Every key of the dataset has one by the end of the epoch after: each epoch trains every sub-dataset.
    """

    def __init__(
        self,
        schedule: Schedule,
        positions: Positions,
        keys_of: Callable[[int, int], Int64s],
        *,
        start: int = 0,
        keys_per_slice: int = KEYS_PER_RANGE,
    ) -> None:
        """``keys_of(pass, table)``: keys in hash order."""
        whole = 0 if schedule.repeats else -start % schedule.num_passes
        passes = range(start, start + whole + schedule.num_passes)
        self._passes = [(pass_index, schedule.sub_dataset_of(pass_index)) for pass_index in reversed(passes)]
        self._positions, self._keys_of, self._keys_per_slice = positions, keys_of, keys_per_slice
        self._tables = {table.name: i for i, table in enumerate(positions.tables)}

    def counts(self, table_name: str) -> Mapping[int, int]:
        """Return how many keys of a table each pass uses first."""
        counts = Counter[int]()
        for _, first_K in self._unordered(table_name):
            passes, keys = np.unique(first_K, return_counts=True)
            counts.update(dict(zip(passes.tolist(), keys.tolist(), strict=True)))
        return counts

    def slices(self, table_name: str) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield keys (n,) in hash order and their first passes (n,), one hash range at a time."""
        table_id = self._positions.tables[self._tables[table_name]].table_id
        for keys_K, first_K in self._unordered(table_name):
            order = np.argsort(hash_keys(keys_K, table_id))
            yield keys_K[order], first_K[order]

    def _unordered(self, table_name: str) -> Iterator[tuple[Int64s, Int64s]]:
        tables = [self._tables[table_name]]
        for some in key_ranges(self._positions, self._keys_of, keys_per_range=self._keys_per_slice, tables=tables):
            first_K = np.empty(some.keys.size, dtype=np.int64)
            for pass_index, p in self._passes:  # the last one first
                first_K[some.numbers[some.starts[p] : some.starts[p + 1]]] = pass_index
            yield some.keys, first_K


def count_keys(
    positions: Positions, keys_of: Callable[[int, int], Int64s], *, keys_per_slice: int = KEYS_PER_RANGE
) -> dict[str, int]:
    """Return how many different keys of each table there are in all passes, by the table's name: reads each once.

    ``keys_of(pass, table)`` gives keys in hash order.
    """
    counts = {table.name: 0 for table in positions.tables}
    for some in key_ranges(positions, keys_of, keys_per_range=keys_per_slice):
        counts[positions.tables[some.table].name] += some.keys.size
    return counts
