"""Whole tables of a store of several ranks: what each rank has of them, joined."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.changes import changes
from tiercache.store.files import local_path
from tiercache.store.lookup import check_keys, missing_keys
from tiercache.store.scan import SCAN_BYTES, scan_segments
from tiercache.store.shards.sharding import HASHES, Slice, TableSharding, hash_bounds
from tiercache.store.store_errors import CorruptStoreError, KeyMissingError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.lookup import Fields
    from tiercache.store.reading import BlockReader
    from tiercache.store.scan import Chunk
    from tiercache.store.shards.sharding import ShardingPlan
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Table


class RankRows(Protocol):
    """The rows of one rank at a commit, as a ``Store`` reads them."""

    reader: BlockReader

    def pinned(self) -> AbstractContextManager[Snapshot]:
        """Return a context in which what the snapshot needs is kept."""

    def live_rows(self, table_name: str) -> int:
        """Return how many rows a table has."""

    def changed_rows(self, table_name: str, *, since: int) -> int:
        """Return how many rows of a table changed after a commit."""

    def changes(self, table_name: str, *, since: int) -> Iterator[tuple[NDArray[np.int64], Fields]]:
        """Yield the rows of a table that changed after a commit."""

    def lookup(
        self, table_name: str, keys: NDArray[np.int64], *, missing: str = ...,
        progress: Callable[[str, int, int], None] | None = ...,
    ) -> Fields:  # fmt: skip
        """Return the rows of any keys."""


class JoinedRanks:
    """Reads whole tables. A key of a table by row or in one piece is on one rank; column slices are put side by side.

    What belongs to a whole row and is kept with each slice of columns is that of the first slice.
    """

    def __init__(self, label: str, tables: Sequence[Table], sharding: ShardingPlan, ranks: Sequence[RankRows]) -> None:
        """``tables``: whole ones. ``ranks``: all at one commit."""
        self.label, self.sharding, self.ranks = label, sharding, tuple(ranks)
        self._tables = {table.name: table for table in tables}

    def live_rows(self, table_name: str) -> int:
        """Return how many rows a table has; reads nothing. Raises ValueError for an unknown table."""
        return sum(self.ranks[rank].live_rows(table_name) for rank in self._counting(table_name))

    def most_rows(self, table_name: str, hashes: tuple[int, int]) -> int:
        """Return how many rows of a table have hashes in a range, by what ranks have of it: reads nothing.

        As hashes are uniform, four standard deviations more than expected where a rank has others too.
        """
        bounds = hash_bounds(len(self.ranks))
        by_hash = not self._sharding_of(table_name).slices
        total = variance = 0.0
        for rank in self._counting(table_name):
            first, last = (bounds[rank], bounds[rank + 1]) if by_hash else (0, HASHES)
            rows, share = self.ranks[rank].live_rows(table_name), max(0, min(hashes[1], last) - max(hashes[0], first))
            share_of_all = share / (last - first)
            total, variance = total + rows * share_of_all, variance + rows * share_of_all * (1 - share_of_all)
        return min(self.live_rows(table_name), int(np.ceil(total + 4 * variance**0.5)))

    def scan(
        self,
        table_name: str,
        *,
        chunk_rows: int | None = None,
        memory_bytes: int = SCAN_BYTES,
        scratch: Path | None = None,
    ) -> Iterator[Chunk]:
        """Yield all rows of a table in hash order: keys (n,), and each field (n, width), as ``Store.scan`` does."""
        table = self._table(table_name)
        scratch = None if scratch is None else local_path(scratch, "a folder for temporary files")
        return self.rows(table, chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch)

    def rows(
        self,
        table: Table,
        hashes: tuple[int, int] = (0, HASHES),
        *,
        chunk_rows: int | None = None,
        memory_bytes: int = SCAN_BYTES,
        scratch: Path | None = None,
    ) -> Iterator[Chunk]:
        """Yield the rows of a table in hash order, with all columns or, as a rank of another sharding has it, some.

        hashes: from and below which hash of a key. Only ranks, ranges and columns with such rows are read, and keys;
        what a row has once goes to each slice. Else, and what is raised, as ``scan``.
        """
        sharding, whole = self._sharding_of(table.name), self._table(table.name)
        requested = Slice(0, table.first_column, table.first_column + table.dim)
        scan = partial(_scan, table=table, chunk_rows=chunk_rows, scratch=scratch)
        if sharding.by_hash:
            bounds = hash_bounds(len(self.ranks))
            for rank, one in enumerate(self.ranks):  # ranks own rising ranges of hashes
                low, high = max(hashes[0], bounds[rank]), min(hashes[1], bounds[rank + 1])
                if low < high:
                    inside = None if (low, high) == bounds[rank : rank + 2] else (low, high)
                    for keys, fields in scan(one, hashes=inside, memory_bytes=memory_bytes):
                        yield keys, _columns(whole, [(Slice(rank, 0, whole.dim), fields)], requested)
            return
        slices = [one for one in sharding.slices if one.first < requested.last and requested.first < one.last]
        inside = None if hashes == (0, HASHES) else hashes
        share = memory_bytes // len(slices)
        scans = [scan(self.ranks[one.rank], hashes=inside, memory_bytes=share) for one in slices]
        for keys, found in self._side_by_side(table.name, scans):
            yield keys, _columns(whole, list(zip(slices, found, strict=True)), requested)

    def lookup(
        self,
        table_name: str,
        keys: NDArray[np.int64],
        *,
        missing: str = "error",
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Fields:
        """Return the rows of any ``keys`` (n,), repeated or not, in any order: field name to (n, width).

        As ``Store.lookup``; ``progress`` counts anew for each rank.
        """
        sharding, table = self._sharding_of(table_name), self._table(table_name)
        keys = check_keys(keys)
        bounds = np.array(hash_bounds(len(self.ranks))[1:-1], dtype=np.uint64)
        owners = np.searchsorted(bounds, hash_keys(keys, table.table_id), side="right")
        slices = sharding.slices or [Slice(rank, 0, table.dim) for rank in np.unique(owners).tolist() or [0]]
        out = {field.name: np.zeros((keys.size, field.width), dtype=np.float32) for field in table.fields}
        gone: list[NDArray[np.int64]] = []
        for one in reversed(slices):  # what a row has once is that of the first
            selected = slice(None) if sharding.slices else np.nonzero(owners == one.rank)[0]
            try:
                found = self.ranks[one.rank].lookup(table_name, keys[selected], missing=missing, progress=progress)
            except KeyMissingError as error:
                gone.append(error.keys)
                continue
            for field in table.fields:
                columns = slice(one.first, one.last) if field.width == table.dim else slice(None)
                out[field.name][selected, columns] = found[field.name]
        if gone:
            raise missing_keys(table, np.unique(np.concatenate(gone)), np.unique(keys).size, self.label)
        return out

    def changes(self, table_name: str, *, since: int) -> Iterator[tuple[NDArray[np.int64], Fields]]:
        """Yield (keys, fields) of the whole rows of a table that changed after commit ``since``, as ``Store.changes``.

        Those of column slices come in hash order, with the memory and the temporary files of ``scan``.
        """
        sharding, table = self._sharding_of(table_name), self._table(table_name)
        if len(sharding.slices) < 2:
            for rank in self._counting(table_name):
                yield from self.ranks[rank].changes(table_name, since=since)
            return
        # Slices change in the same steps. To look the keys of each chunk up would read all keys for each of them.
        share = SCAN_BYTES // len(sharding.slices)
        scans = [_changes(self.ranks[one.rank], table_name, since, share) for one in sharding.slices]
        names = [field.name for field in table.fields]
        for keys, pieces in self._side_by_side(table_name, scans):
            values = _columns(table, list(zip(sharding.slices, pieces, strict=True)), Slice(0, 0, table.dim))
            yield keys, dict(zip(names, values, strict=True))

    def changed_rows(self, table_name: str, *, since: int) -> int:
        """Return how many rows of a table ``changes`` yields; reads none of them. Raises what it raises."""
        return sum(self.ranks[rank].changed_rows(table_name, since=since) for rank in self._counting(table_name))

    # -- inside ------------------------------------------------------------------------------------------

    def _counting(self, table_name: str) -> Sequence[int]:
        """Return the ranks that have every row of a table once."""
        slices = self._sharding_of(table_name).slices
        return [slices[0].rank] if slices else range(len(self.ranks))

    def _side_by_side(
        self, table_name: str, scans: Sequence[Iterator[Chunk]]
    ) -> Iterator[tuple[NDArray[np.int64], list[tuple[NDArray[np.float32], ...]]]]:
        """Yield keys, and the fields that each of the scans, of slices with the same keys, has of them."""
        held = [next(scan, None) for scan in scans]
        while any(one is not None for one in held):
            chunks = [one for one in held if one is not None]
            rows = min(keys.size for keys, _ in chunks)
            first = chunks[0][0][:rows]
            if len(chunks) < len(held) or any(not np.array_equal(keys[:rows], first) for keys, _ in chunks):
                raise CorruptStoreError(
                    f"the slices of table {table_name!r} of {self.label} have different keys: restore the store from a "
                    "copy"
                )
            yield first, [tuple(values[:rows] for values in fields) for _, fields in chunks]
            held = [
                (keys[rows:], tuple(values[rows:] for values in fields)) if keys.size > rows else next(scan, None)
                for (keys, fields), scan in zip(chunks, scans, strict=True)
            ]

    def _sharding_of(self, table_name: str) -> TableSharding:
        return self.sharding.tables[self._table(table_name).name]

    def _table(self, table_name: str) -> Table:
        """Return a whole table. Raises ValueError if there is none of that name."""
        if (table := self._tables.get(table_name)) is not None:
            return table
        raise ValueError(f"{self.label} has no table {table_name!r}: it has {', '.join(map(repr, self._tables))}")


def _scan(
    rank: RankRows, table: Table, hashes: tuple[int, int] | None, *, chunk_rows: int | None, memory_bytes: int,
    scratch: Path | None,
) -> Iterator[Chunk]:  # fmt: skip
    with rank.pinned() as snapshot:
        yield from scan_segments(
            rank.reader, snapshot, snapshot.committed, table.name,
            hashes=hashes, chunk_rows=chunk_rows, memory_bytes=memory_bytes, scratch=scratch,
        )  # fmt: skip


def _changes(rank: RankRows, table_name: str, since: int, memory_bytes: int) -> Iterator[Chunk]:
    with rank.pinned() as snapshot:
        found = changes(rank.reader, snapshot, table_name, since, in_order=True, memory_bytes=memory_bytes)
        for keys, fields in found:
            yield keys, tuple(fields.values())


def _columns(
    table: Table, slices: Sequence[tuple[Slice, tuple[NDArray[np.float32], ...]]], requested: Slice
) -> tuple[NDArray[np.float32], ...]:
    """Return the wanted columns of every field of a whole table, from slices that have them all."""
    out = []
    for i, field in enumerate(table.fields):
        found = [
            fields[i][:, max(0, requested.first - one.first) : requested.last - one.first] for one, fields in slices
        ]
        once = field.width != table.dim
        out.append(slices[0][1][i] if once else found[0] if len(found) == 1 else np.concatenate(found, axis=1))
    return tuple(np.ascontiguousarray(values) for values in out)
