"""When each key of a pass set is used first: what a store is put in order by before a schedule begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.kernels.bits import hash_keys
from tiercache.kernels.uses import hash_range_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.planning.next_use import Uses
    from tiercache.planning.positions import Positions
    from tiercache.planning.schedule import Schedule

    Int64s = NDArray[np.int64]

KEYS_PER_SLICE = 1 << 20


class FirstUses:
    """First visits of the first epoch, by key: what ``Store.rewrite`` asks for."""

    def __init__(
        self,
        schedule: Schedule,
        positions: Positions,
        keys_of: Callable[[int, int], Int64s],
        uses: Uses,
        *,
        keys_per_slice: int = KEYS_PER_SLICE,
    ) -> None:
        """``uses`` are those of epoch 0; ``keys_of(pass, table)`` gives keys in hash order."""
        self._passes = schedule.order(0).tolist()
        self._positions, self._keys_of, self._uses = positions, keys_of, uses
        self._keys_per_slice = keys_per_slice
        self._tables = {table.name: i for i, table in enumerate(positions.tables)}

    def counts(self, table_name: str) -> Mapping[int, int]:
        """Return how many keys of a table each visit uses first."""
        table = self._tables[table_name]
        visits = range(len(self._passes))
        counts = {visit: int(np.count_nonzero(self._first(visit, table))) for visit in visits}
        return {visit: count for visit, count in counts.items() if count}

    def slices(self, table_name: str) -> Iterator[tuple[Int64s, Int64s]]:
        """Yield keys (n,) in hash order and their first visits (n,), one hash range at a time."""
        table = self._tables[table_name]
        table_id = self._positions.tables[table].table_id
        keys_V = [self._keys_of(p, table) for p in self._passes]
        first_V = [self._first(visit, table) for visit in range(len(self._passes))]
        slices = max(1, -(-sum(keys.size for keys in keys_V) // self._keys_per_slice))
        begins = [0] * len(keys_V)
        for i in range(1, slices + 1):
            ends = [hash_range_bound(keys, table_id, (i << 64) // slices) for keys in keys_V]
            keys_parts, use_parts = [], []
            for visit, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                mine = np.asarray(keys_V[visit][begin:end])[first_V[visit][begin:end]]
                keys_parts.append(mine)
                use_parts.append(np.full(mine.size, visit, dtype=np.int64))
            begins = ends
            keys = np.concatenate(keys_parts)
            order = np.argsort(hash_keys(keys, table_id))
            yield keys[order], np.concatenate(use_parts)[order]

    def _first(self, visit: int, table: int) -> NDArray[np.bool_]:
        """Return which keys of a table ``visit`` is the first to use: those whose last use was before visit 0."""
        p = self._passes[visit]
        span = slice(self._positions.start(p, table), self._positions.start(p, table + 1))
        first: NDArray[np.bool_] = self._uses.prev_gap[p][span] > visit
        return first
