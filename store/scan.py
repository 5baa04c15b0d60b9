"""All rows of one table in hash order, as they stand at the newest commit.

The rows of a table lie in runs, one for each live range of each segment, and each run is in hash order. A few runs
are merged as they are read; many short ones, which no memory could merge without reading their pieces again and
again, are sorted (``Spill``).
"""

from __future__ import annotations

import tempfile
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.errors import CorruptStoreError, StoreError
from tiercache.store.hashing import hash_keys
from tiercache.store.spill import Spill, part_rows
from tiercache.store.table import find_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.segment import Segment
    from tiercache.store.spill import Rows
    from tiercache.store.store import Store
    from tiercache.store.table import Group, Table

    Chunk = tuple[NDArray[np.int64], tuple[NDArray[np.float32], ...]]
    """Keys (n,), and each field (n, width)."""

SCAN_BYTES = 256 << 20
CHUNK_BYTES = 4 << 20
_KEY_SHARE = 4


def live_rows(store: Store, table_name: str) -> int:
    """Return how many rows a table has at the newest commit; reads nothing. Raises ValueError for no table."""
    return sum(run.left for run in _runs(store, *find_table(store.groups, table_name, store.label)))


def scan(
    store: Store,
    table_name: str,
    *,
    chunk_rows: int | None = None,
    memory_bytes: int = SCAN_BYTES,
    scratch: Path | None = None,
) -> Iterator[Chunk]:
    """Yield all rows of a table at the newest commit in hash order: keys (n,), and each field (n, width).

    Chunks have at most ``chunk_rows`` rows (about 4 MiB where not said). Beside the caller's chunk at most
    ``memory_bytes`` are taken, or what four pieces and the keys of a block take. Every live piece is read once and
    its keys about once (at most a quarter of the rows' bytes more). Where a table lies in too many runs to merge
    them in that memory, its rows are written to temporary files in ``scratch`` (beside the store where not said)
    and read again, once for each factor of 256 by which they exceed it. A piece is read whole: where ranges are
    shorter than pieces, rows of the group's other tables are read with them. No commit may be made meanwhile.

    Raises ValueError for no table and without a commit, StoreFullError, CorruptStoreError, and StoreError for a commit.
    """
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}: it must be at least 1")
    group, table = find_table(store.groups, table_name, store.label)
    if store.commit is None:
        raise ValueError(f"{store.label} has no commit yet: publish one first")
    rows = chunk_rows or chunk_rows_of(table)
    chunks = _chunks(store, group, table, rows, memory_bytes, scratch)
    return _checked(store, store.commit, table, chunks)


def chunk_rows_of(table: Table) -> int:
    """Return the rows of ``table`` that take about ``CHUNK_BYTES``."""
    return max(1, CHUNK_BYTES // (table.row_bytes + 8))


def _checked(store: Store, commit: Commit, table: Table, chunks: Iterator[Rows]) -> Iterator[Chunk]:
    """Cut rows into fields, and raise for a key with two live rows and for a commit made meanwhile."""
    cuts = list(accumulate(field.width for field in table.fields))[:-1]
    last: int | None = None
    for keys, rows in chunks:
        if store.commit is not commit:
            raise StoreError(
                f"{store.label} made a commit while table {table.name!r} was scanned: scan it from a store that was "
                "opened with mode='r', which stays at its commit"
            )
        hashes = hash_keys(keys, table.table_id)
        if np.any(hashes[1:] <= hashes[:-1]) or (last is not None and int(hashes[0]) <= last):
            raise CorruptStoreError(
                f"a key of table {table.name!r} of {store.label} has two live rows: restore the store from a copy"
            )
        last = int(hashes[-1])
        yield keys, tuple(np.ascontiguousarray(part) for part in np.split(rows, cuts, axis=1))


def _chunks(
    store: Store, group: Group, table: Table, chunk_rows: int, memory_bytes: int, scratch: Path | None
) -> Iterator[Rows]:
    """Merge or sort the runs, whichever reads less."""
    runs = _runs(store, group, table)
    if sum(run.left for run in runs) > part_rows(table, memory_bytes) and _can_merge(runs, table, memory_bytes):
        yield from _merge(runs, table, chunk_rows, memory_bytes)
        return
    if scratch is None:
        scratch = Path(tempfile.gettempdir()) if store.path is None else store.path.parent
    with Spill(table, scratch, memory_bytes, store.counters) as spill:
        keys_of = _LastKeys(store)
        step = max(1, part_rows(table, memory_bytes) // 4)
        for run in _joined(runs, keys_of):
            while run.left:
                spill.add(*run.read(step))
        yield from spill.sorted(chunk_rows)


def _can_merge(runs: Sequence[_Run], table: Table, memory_bytes: int) -> bool:
    """Whether every run can have pieces and keys in memory, and blocks of keys are read about once."""
    held = sum(run.piece_bytes + 8 * min(run.left, run.block_rows) for run in runs)
    key_bytes = sum(run.key_bytes for run in runs)
    useful = sum(run.left for run in runs) * (table.row_bytes + 8)
    return held <= memory_bytes // 4 and key_bytes <= useful // _KEY_SHARE + 8 * sum(run.left for run in runs)


def _merge(runs: Sequence[_Run], table: Table, chunk_rows: int, memory_bytes: int) -> Iterator[Rows]:
    """Merge runs: each holds a share of the memory, by its rows, and what lies below the least end goes out."""
    total, most = sum(run.left for run in runs), part_rows(table, memory_bytes)
    held = [_Held(run, table, max(1, most * run.left // total)) for run in runs]
    while held:
        for one in held:
            one.fill()
        ends = [one.hashes[-1] for one in held if one.run.left]
        bound = min(ends) if ends else None
        parts = [one.take(bound) for one in held]
        held = [one for one in held if one.run.left or one.hashes.size]
        hashes, keys, rows = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        del parts
        order = np.argsort(hashes)
        for low in range(0, order.size, chunk_rows):
            chunk = order[low : low + chunk_rows]
            yield keys[chunk], rows[chunk]


class _Run:
    """Rows [low, high) of a segment stream, all of one table, read from the front."""

    def __init__(self, store: Store, segment: Segment, group: Group, low: int, high: int) -> None:
        self.segment, self.low, self.high = segment, low, high
        self.keys_of: Callable[[Segment, int, int], NDArray[np.int64]] = store.read_keys
        self._store, self._group, self._stream = store, group, segment.streams[group.index]
        self._keys: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    @property
    def left(self) -> int:
        """Rows that were not read yet."""
        return self.high - self.low

    @property
    def block_rows(self) -> int:
        """Rows of a block of the stream."""
        return self._stream.block_rows

    @property
    def piece_bytes(self) -> int:
        """The most bytes of a piece."""
        return min(self._stream.piece_rows, self.block_rows) * self._stream.row_bytes

    @property
    def key_bytes(self) -> int:
        """Bytes of the blocks of keys that it touches."""
        first, last = self.low // self.block_rows, (self.high - 1) // self.block_rows
        return 8 * int(self._stream.block_first_row_B[last + 1] - self._stream.block_first_row_B[first])

    def read(self, rows: int) -> Rows:
        """Read the next ``rows`` rows, rounded up to whole pieces."""
        stream, width = self._stream, self._stream.row_bytes // 4
        first = int(np.searchsorted(stream.piece_first_row_P, self.low, side="right")) - 1
        last = int(np.searchsorted(stream.piece_first_row_P, min(self.high, self.low + rows)))
        start, end = int(stream.piece_first_row_P[first]), min(self.high, int(stream.piece_first_row_P[last]))
        data = np.empty(int(stream.piece_offset_P[last] - stream.piece_offset_P[first]), dtype=np.uint8)
        self._store.read(self.segment, self._group.index, first, last, data)
        values = data.view(np.float32)
        out = np.empty((int(stream.piece_first_row_P[last]) - start, width), dtype=np.float32)
        for low, count in zip(
            (stream.piece_first_row_P[first:last] - start).tolist(),
            stream.piece_rows_P[first:last].tolist(),
            strict=True,
        ):
            at, column = low * width, 0
            for field in self._group.fields:
                part = values[at : at + count * field.width].reshape(count, field.width)
                out[low : low + count, column : column + field.width] = part
                at, column = at + count * field.width, column + field.width
        keys = self._next_keys(end - self.low)
        out = out[self.low - start : end - start]
        self.low = end
        return keys, out

    def _next_keys(self, count: int) -> NDArray[np.int64]:
        parts, row, needed = [], self.low, count
        while needed:
            if not self._keys.size:
                block = row // self.block_rows
                start = int(self._stream.block_first_row_B[block])
                self._keys = self.keys_of(self.segment, self._group.index, block)[
                    row - start : self.high - start
                ].copy()
            parts.append(self._keys[:needed])
            self._keys = self._keys[needed:]
            row, needed = row + parts[-1].size, needed - parts[-1].size
        return np.concatenate(parts)


class _Held:
    """The rows of a run that are in memory, of about ``share`` rows at most."""

    def __init__(self, run: _Run, table: Table, share: int) -> None:
        self.run, self._table, self._share = run, table, share
        self.hashes: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self._keys: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._rows: NDArray[np.float32] = np.empty((0, table.row_bytes // 4), dtype=np.float32)

    def fill(self) -> None:
        """Read on where half of the share is free."""
        if not self.run.left or self.hashes.size > self._share // 2:
            return
        keys, rows = self.run.read(self._share - self.hashes.size)
        fresh = hash_keys(keys, self._table.table_id)
        hashes = np.concatenate([self.hashes, fresh])
        if np.any(hashes[1:] <= hashes[:-1]):
            raise CorruptStoreError(
                f"segment {self.run.segment.id} has keys of table {self._table.name!r} that are not in hash order: "
                "restore the store from a copy"
            )
        self.hashes = hashes
        self._keys, self._rows = np.concatenate([self._keys, keys]), np.concatenate([self._rows, rows])

    def take(self, bound: np.uint64 | None) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.float32]]:
        """Give away the rows with hashes up to ``bound``; None: all."""
        at = self.hashes.size if bound is None else int(np.searchsorted(self.hashes, bound, side="right"))
        taken = self.hashes[:at], self._keys[:at], self._rows[:at]
        self.hashes, self._keys, self._rows = self.hashes[at:], self._keys[at:], self._rows[at:]
        return taken


class _LastKeys:
    """Reads blocks of keys and remembers the last one: neighbouring runs share it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: tuple[tuple[int, int, int], NDArray[np.int64]] | None = None

    def __call__(self, segment: Segment, group: int, block: int) -> NDArray[np.int64]:
        """Return what ``Store.read_keys`` does."""
        wanted = segment.id, group, block
        if self._last is None or self._last[0] != wanted:
            self._last = wanted, self._store.read_keys(segment, group, block)
        return self._last[1]


def _runs(store: Store, group: Group, table: Table) -> list[_Run]:
    """Return the runs of a table at the newest commit, by segment and place."""
    place, runs = group.place(table.name), []
    named = set() if store.commit is None else set(store.commit.segment_ids)
    for segment in store.segments:
        if segment.id not in named:
            continue
        stream, live = segment.streams[group.index], store.first_range(segment, group.index)
        for ranges, first in zip(stream.ranges[live:], stream.range_first_row_R[live:].tolist(), strict=False):
            if ranges.table_rows[place]:
                low = first + sum(ranges.table_rows[:place])
                runs.append(_Run(store, segment, group, low, low + ranges.table_rows[place]))
    return runs


def _joined(runs: Sequence[_Run], keys_of: Callable[[Segment, int, int], NDArray[np.int64]]) -> list[_Run]:
    """Join runs that lie side by side; their order does not matter any more."""
    joined: list[_Run] = []
    for run in runs:
        run.keys_of = keys_of
        if joined and joined[-1].segment is run.segment and joined[-1].high == run.low:
            joined[-1].high = run.high
        else:
            joined.append(run)
    return joined
