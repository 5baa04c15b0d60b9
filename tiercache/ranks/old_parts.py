"""The rows of parts that were made for other ranks or another sharding, as one rank of the new ones wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.ranks.sharding_plan import HASHES, Slice, hash_bounds
from tiercache.store import CorruptStoreError, hash_keys
from tiercache.store.run import LastKeys
from tiercache.store.scan import SCAN_BYTES, live_rows, scan_segments
from tiercache.store.table import find_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.ranks.sharding_plan import ShardingPlan
    from tiercache.store import Segment, Store, Table
    from tiercache.store.scan import Chunk

__all__ = ["OldParts"]


class OldParts:
    """Parts of a sharded store that stand at one cursor, open for reading, each at the commit that belongs there."""

    def __init__(self, tables: Sequence[Table], sharding: ShardingPlan, parts: Sequence[Store]) -> None:
        """``tables`` are whole ones; ``parts`` have one store for each rank of ``sharding``."""
        self.sharding, self.parts = sharding, tuple(parts)
        self._tables = {table.name: table for table in tables}

    def rows(
        self, part: Table, hashes: tuple[int, int], scratch: Path | None = None, memory_bytes: int = SCAN_BYTES
    ) -> Iterator[Chunk]:
        """Yield the rows of a table of a new part, in hash order: keys (n,), and each field (n, width), float32.

        ``part``: the table as the new part has it, with all columns or some; what a row has once goes to each slice.
        hashes: from and below which hash of a key. Only parts, pieces and columns with such rows are read, and keys.
        ``scratch`` and ``memory_bytes`` as for ``Store.scan``. Raises StoreFullError and CorruptStoreError.
        """
        table_sharding, whole = self.sharding.tables[part.name], self._tables[part.name]
        wanted = Slice(0, part.first_column, part.first_column + part.dim)
        if table_sharding.by_hash:
            bounds = hash_bounds(self.sharding.num_ranks)
            for rank, store in enumerate(self.parts):
                low, high = max(hashes[0], bounds[rank]), min(hashes[1], bounds[rank + 1])
                if low < high:
                    inside = (low, high) != bounds[rank : rank + 2]
                    for keys, fields in _scan(store, part, (low, high) if inside else None, scratch, memory_bytes):
                        yield keys, _columns(whole, [(Slice(rank, 0, whole.dim), fields)], wanted)
            return
        slices = [one for one in table_sharding.slices if one.first < wanted.last and wanted.first < one.last]
        of_all = None if hashes == (0, HASHES) else hashes
        scans = [_scan(self.parts[one.rank], part, of_all, scratch, memory_bytes // len(slices)) for one in slices]
        for keys, pieces in _in_step(scans, f"table {part.name!r}"):
            yield keys, _columns(whole, list(zip(slices, pieces, strict=True)), wanted)

    def most_rows(self, table: str, hashes: tuple[int, int]) -> int:
        """Return how many rows of a table have hashes in a range, from the sizes of parts: reads nothing.

        As hashes are uniform, four standard deviations more than expected where a part has others too.
        """
        table_sharding, bounds = self.sharding.tables[table], hash_bounds(self.sharding.num_ranks)
        if table_sharding.slices:
            held = [(live_rows(self.parts[table_sharding.slices[0].rank], table), (0, HASHES))]
        else:
            held = [(live_rows(part, table), bounds[i : i + 2]) for i, part in enumerate(self.parts)]  # type: ignore[misc]
        total = variance = 0.0
        for rows, (first, last) in held:
            share = max(0, min(hashes[1], last) - max(hashes[0], first)) / (last - first)
            total, variance = total + rows * share, variance + rows * share * (1 - share)
        return min(sum(rows for rows, _ in held), int(np.ceil(total + 4 * variance**0.5)))


def _scan(
    store: Store, table: Table, hashes: tuple[int, int] | None, scratch: Path | None, memory_bytes: int
) -> Iterator[Chunk]:
    choice = None if hashes is None else _InRange(store, table, hashes)
    with store.pinned() as snapshot:
        yield from scan_segments(
            store, snapshot, snapshot.committed, table.name,
            choice=choice, alone=False, memory_bytes=memory_bytes, scratch=scratch,
        )  # fmt: skip


class _InRange:
    """Chooses the rows of one table whose keys have hashes in a range."""

    def __init__(self, store: Store, table: Table, hashes: tuple[int, int]) -> None:
        self._keys, self._table_id = LastKeys(store), table.table_id
        self._first, self._last = np.uint64(hashes[0]), np.uint64(hashes[1] - 1)

    def __call__(self, segment: Segment, group: int, low: int, high: int) -> NDArray[np.bool_]:
        """Return which of the rows [low, high) of a layout are wanted."""
        layout, chosen = segment.layouts[group], np.empty(high - low, dtype=np.bool_)
        for block in range(low // layout.block_rows, -(-high // layout.block_rows)):
            start, end = layout.rows_of_block(block)
            first, last = max(low, start), min(high, end)
            keys = self._keys(segment, group, block)[first - start : last - start]
            hashes = hash_keys(keys, self._table_id)
            chosen[first - low : last - low] = (hashes >= self._first) & (hashes <= self._last)
        return chosen


def _in_step(
    scans: Sequence[Iterator[Chunk]], what: str
) -> Iterator[tuple[NDArray[np.int64], list[tuple[NDArray[np.float32], ...]]]]:
    """Yield keys, and the fields that each of several scans of the same keys has of them."""
    held = [next(scan, None) for scan in scans]
    while any(one is not None for one in held):
        there = [one for one in held if one is not None]
        rows = min(keys.size for keys, _ in there)
        first = there[0][0][:rows]
        if len(there) < len(held) or any(not np.array_equal(keys[:rows], first) for keys, _ in there):
            raise CorruptStoreError(
                f"the slices of {what} have different keys: restore all parts from copies of one moment"
            )
        yield first, [tuple(values[:rows] for values in fields) for _, fields in there]
        held = [
            (keys[rows:], tuple(values[rows:] for values in fields)) if keys.size > rows else next(scan, None)
            for (keys, fields), scan in zip(there, scans, strict=True)
        ]


def _columns(
    table: Table, pieces: Sequence[tuple[Slice, tuple[NDArray[np.float32], ...]]], wanted: Slice
) -> tuple[NDArray[np.float32], ...]:
    """Return the wanted columns of every field of a whole table, from slices that have them all."""
    out = []
    for i, field in enumerate(table.fields):
        parts = [fields[i][:, max(0, wanted.first - one.first) : wanted.last - one.first] for one, fields in pieces]
        once = field.width != table.dim
        out.append(pieces[0][1][i] if once else parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))
    return tuple(np.ascontiguousarray(values) for values in out)


def learning_rates(old: Store, rates: Sequence[float], new: Store) -> list[float]:
    """Return the rate of each group of ``new`` from those of the groups of ``old``, which has the same tables by name.

    Raises ValueError where tables of one new group had several rates.
    """
    found = []
    for group in new.groups:
        of_tables = {rates[find_table(old.groups, table.name, old.label)[0].index] for table in group.tables}
        if len(of_tables) > 1:
            names = ", ".join(repr(table.name) for table in group.tables)
            raise ValueError(
                f"tables {names} of {new.label} share a group, and so a learning rate, and had "
                f"{' and '.join(map(str, sorted(of_tables)))}: set one rate for them before, or place them apart"
            )
        found.append(of_tables.pop())
    return found
