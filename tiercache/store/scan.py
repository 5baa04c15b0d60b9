"""All rows of one table in hash order, at the newest commit.

The rows of a table form runs, one for each live range of each segment, and each run is in hash order. A few runs are
merged as they are read; many short ones, which no memory could merge without reading their pages again and again, are
sorted (``ExternalSorter``). If retained segments leave several rows of a key, the newest is yielded: runs are in the
order of segments, and sorting keeps the order of equal keys.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import HASHES, hash_keys, keys_of
from tiercache.store.external_sort import ExternalSorter, SortedCursor, merged, part_rows, rising, whole_keys
from tiercache.store.layout import CHANGED_BYTES, KEY_BYTES
from tiercache.store.reading import BlockReader, Pages
from tiercache.store.row_codec import StoredTable, from_words, unpack
from tiercache.store.store_errors import damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Group, Table

    Chunk = tuple[NDArray[np.int64], tuple[NDArray[np.float32], ...]]
    """Keys (n,), and each field (n, width)."""
    Columns = tuple[NDArray[Any], ...]
    Uint32s = NDArray[np.uint32]
    Rows = tuple[NDArray[np.int64], NDArray[np.float32]]
    """Keys (n,) and rows (n, W): the words of all fields."""
    RowFilter = Callable[[Segment, int, int, int], NDArray[np.bool_]]
    """Returns a mask of the rows [low, high) of a segment and a group: (high - low,)."""


SCAN_BYTES = 256 << 20
SCAN_CHUNK_BYTES = 4 << 20
_KEY_FRACTION = 4


def scan_segments(
    reader: BlockReader,
    snapshot: Snapshot,
    segments: Sequence[Segment],
    table_name: str,
    *,
    choice: RowFilter | None = None,
    alone: bool = True,
    hashes: tuple[int, int] | None = None,
    chunk_rows: int | None = None,
    memory_bytes: int = SCAN_BYTES,
    scratch: Path | None = None,
    as_words: bool = False,
    changed: bool = False,
) -> Iterator[Chunk]:
    """Yield all rows of a table in segments of a snapshot in hash order: keys (n,), and each field (n, width).

    Chunks have at most ``chunk_rows`` rows (by default about 4 MiB). In addition to the caller's chunk at most
    ``memory_bytes`` are taken, or the size of four pages and the keys of a block. Every live page is read once and its
    keys about once (at most a quarter of the rows' bytes more). If a table has too many runs to merge in that memory,
    its rows are written to an unlinked temporary file in ``scratch`` (by default the store's folder, or the system's if
    that cannot be written to) and read again, once for each factor of 256 by which they exceed it. A page is read
    whole: if ranges are shorter than pages, rows of the group's other tables are read with them.

    No segment may be left out that has a newer row of a key than the given ones. ``choice`` selects rows of a layout;
    pages without one are not read. If it may select several of a key, not ``alone``, the newest of all must be one of
    them, and is yielded. ``as_words``: fields are yielded as stored, (n, words); then with ``changed`` the last one,
    (n, 1), has the last changes. ``hashes``: only rows whose hash is at least the first and below the second; pages at
    either end of a run are then read for the rows on both sides.

    Raises ValueError for an unknown table and without a commit, StoreFullError and CorruptStoreError.
    """
    table, group, _ = stored = check_scan(reader, snapshot, table_name, chunk_rows)
    if group is None:
        return iter(())
    forgotten = any(segment.tombstone for segment in segments)
    runs = runs_of(reader, snapshot, segments, group, table, choice, changed or forgotten, hashes)
    chunks = _chunks(reader, runs, table, chunk_rows or chunk_rows_of(table), memory_bytes, scratch)
    label = f"table {table.name!r} of {reader.label}"
    stale = 0 if choice is not None and alone else snapshot.stale_rows(segments, group, table)
    if stale or forgotten:
        chunks = _newest(chunks, stale, label, all_rows=choice is None and hashes is None)
    if forgotten:
        chunks = _with_rows(chunks, changed=changed)
    return _checked(table, label, as_words, ((keys, stored.rows(keys, rows)) for keys, rows in chunks))


def check_scan(reader: BlockReader, snapshot: Snapshot, name: str, chunk_rows: int | None) -> StoredTable:
    """Return the table to scan. Raises ValueError if it cannot be scanned."""
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}: it must be at least 1")
    found = snapshot.find(name, reader.label)
    if snapshot.commit is None:
        raise ValueError(f"{reader.label} has no commit yet: publish one first")
    return found


def chunk_rows_of(table: Table) -> int:
    """Return the rows of ``table`` that take about ``SCAN_CHUNK_BYTES``."""
    return max(1, SCAN_CHUNK_BYTES // output_row_bytes(table))


def output_row_bytes(table: Table) -> int:
    """Return the bytes of a returned row: its key, and its numbers in float32 whatever their dtype."""
    return 8 + 4 * sum(field.width for field in table.fields)


def _newest(chunks: Iterator[Rows], stale: int, label: str, *, all_rows: bool) -> Iterator[Rows]:
    """Yield the last row of each key. Raises CorruptStoreError for more ``stale`` others, or fewer if ``all_rows``."""
    remaining = stale
    for keys, rows in whole_keys(chunks):
        last = np.append(keys[1:] != keys[:-1], True)
        remaining -= last.size - int(np.count_nonzero(last))
        if remaining < 0:
            raise damaged(f"a key of {label} has two live rows")
        yield keys[last], rows[last]
    if remaining and all_rows:
        raise damaged(f"{label} has {remaining} fewer stale rows of {stale} than its commit says")


def _with_rows(chunks: Iterator[Rows], *, changed: bool) -> Iterator[Rows]:
    """Yield the keys that were not forgotten; with their last changes if ``changed``."""
    for keys, rows in chunks:
        have = rows[:, -1].view(np.uint32) != FORGOTTEN
        if np.any(have):
            yield keys[have], rows[have] if changed else rows[have, :-1]


def _checked(table: Table, label: str, as_words: bool, chunks: Iterator[Rows]) -> Iterator[Chunk]:
    """Cut rows into fields, and raise for a key with two live rows."""
    cuts = list(accumulate(field.words for field in table.fields))
    last: int | None = None
    for keys, rows in chunks:
        hashes = hash_keys(keys, table.table_id)
        if not rising(hashes, last):
            raise damaged(f"a key of {label} has two live rows")
        last = int(hashes[-1])
        ends = cuts if rows.shape[1] > cuts[-1] else cuts[:-1]
        fields = tuple(np.ascontiguousarray(part) for part in np.split(rows, ends, axis=1))
        yield keys, fields if as_words else from_words(table.fields, fields)


def _chunks(
    reader: BlockReader,
    runs: Sequence[SortedRun],
    table: Table,
    chunk_rows: int,
    memory_bytes: int,
    scratch: Path | None,
) -> Iterator[Rows]:
    """Merge or sort the runs, whichever reads fewer bytes."""
    row_bytes = 4 * runs[0].words if runs else table.row_bytes
    most = part_rows(row_bytes, memory_bytes)
    if sum(run.remaining for run in runs) > most and _can_merge(runs, table, memory_bytes):
        yield from _merge(runs, table, chunk_rows, most)
        return
    copies = len({run.segment.id for run in runs})
    folder = scratch or reader.scratch
    with ExternalSorter(
        [("<f4", (row_bytes // 4,))], folder, f"sorting the rows of table {table.name!r} in {folder}", memory_bytes,
        reader.counters, copies=copies, total_rows=sum(run.remaining for run in runs),
    ) as sorter:  # fmt: skip
        step = max(1, most // 4)
        for run in join_runs(runs, lru_cache(maxsize=1)(reader.keys)):  # neighboring runs share a block
            while run.remaining:
                keys, rows = run.read(step)
                sorter.add(hash_keys(keys, table.table_id), rows)
        yield from ((keys_of(hashes, table.table_id), rows) for hashes, rows in sorter.sorted(chunk_rows))


def _can_merge(runs: Sequence[SortedRun], table: Table, memory_bytes: int) -> bool:
    """Return True if the pages and keys of all runs fit in memory and blocks of keys are read about once."""
    key_row_bytes = KEY_BYTES if runs[0].changed is None else KEY_BYTES + CHANGED_BYTES
    buffered_bytes = sum(run.page_bytes + key_row_bytes * min(run.remaining, run.block_rows) for run in runs)
    rows, key_bytes = sum(run.remaining for run in runs), sum(run.key_bytes for run in runs)
    useful = rows * (table.row_bytes + 8)
    return buffered_bytes <= memory_bytes // 4 and key_bytes <= useful // _KEY_FRACTION + 8 * rows


def _merge(runs: Sequence[SortedRun], table: Table, chunk_rows: int, most: int) -> Iterator[Rows]:
    """Merge runs: each holds a share of ``most`` rows, in proportion to its size, and reads more when half is free."""
    total = sum(run.remaining for run in runs)
    halves = [max(1, most * run.remaining // total) // 2 for run in runs]
    cursors = [
        SortedCursor(_parts(run, table, max(1, half)), np.int64, (np.float32, (run.words,)), least=half)
        for run, half in zip(runs, halves, strict=True)
    ]
    for parts in merged(*cursors):
        hashes, keys, rows = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        del parts
        order = np.argsort(hashes, kind="stable")
        for low in range(0, order.size, chunk_rows):
            chunk = order[low : low + chunk_rows]
            yield keys[chunk], rows[chunk]


def _parts(run: SortedRun, table: Table, part_rows: int) -> Iterator[tuple[NDArray[Any], ...]]:
    """Yield hashes, keys and rows of a run, about ``part_rows`` at a time. Raises CorruptStoreError if out of order."""
    last: int | None = None
    while run.remaining:
        keys, rows = run.read(part_rows)
        hashes = hash_keys(keys, table.table_id)
        if not rising(hashes, last):
            raise damaged(f"segment {run.segment.id} has keys of table {table.name!r} that are not in hash order")
        last = int(hashes[-1])
        yield hashes, keys, rows


FORGOTTEN = (1 << 32) - 1
"""The last change of a key without a row, for merging runs: greater than any row's."""
_CHOICE_ROWS = 1 << 20
"""Rows per call of ``choice``."""


class SortedRun:
    """Rows [low, high) of a layout, all of one table, read from the front.

    With ``choice`` only the selected rows are read, and only pages with such a row. With ``changed`` the last word of
    each row is its last change.
    """

    def __init__(
        self,
        reader: BlockReader,
        segment: Segment,
        group: Group,
        low: int,
        high: int,
        choice: RowFilter | None = None,
        changed: VersionReader | None = None,
    ) -> None:
        self.segment, self.low, self.high = segment, low, high
        self.keys_of: Callable[[Segment, int, int], NDArray[np.int64]] = reader.keys
        self._reader, self._group, self._layout = reader, group, segment.layouts[group.index]
        self._keys: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._choice, self.changed = choice, changed
        self.block_rows, self.words = self._layout.block_rows, group.row_bytes // 4 + (changed is not None)
        """Rows of a block of the layout, and words of a row, its last change included."""
        self.remaining = high - low if choice is None else self._count_chosen(choice)
        """Rows that were not read yet."""

    def blocks(self, most: int | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield the blocks of its rows, and its rows in each, at most ``most`` at a time."""
        return self._layout.blocks_between(self.low, self.high, most)

    @property
    def page_bytes(self) -> int:
        """Maximum bytes of a page."""
        return min(self._layout.page_rows, self.block_rows) * self._layout.row_bytes

    @property
    def key_bytes(self) -> int:
        """Bytes of its blocks of keys."""
        first, last = self.low // self.block_rows, (self.high - 1) // self.block_rows
        return 8 * (self._layout.rows_of_block(last)[1] - self._layout.rows_of_block(first)[0])

    def join(self, after: SortedRun) -> None:
        """Append the rows of the run that directly follows this one."""
        self.high, self.remaining = after.high, self.remaining + after.remaining

    def read(self, rows: int) -> Rows:
        """Read the next ``rows`` rows, rounded up to whole pages."""
        keys, values = self._read(rows) if self._choice is None else self._read_chosen(self._choice, rows)
        self.remaining -= keys.size
        return keys, values

    def _read(self, rows: int) -> Rows:
        layout = self._layout
        first = layout.page_of_row(self.low)
        last = layout.page_of_row(min(self.high, self.low + rows) - 1) + 1
        start, end = layout.row_of_page(first), min(self.high, layout.row_of_page(last))
        out = np.zeros((layout.row_of_page(last) - start, self.words), dtype=np.float32)
        if not self.segment.tombstone:
            data = np.empty(layout.byte_of_page(last) - layout.byte_of_page(first), dtype=np.uint8)
            self._reader.load([Pages(self.segment, self._group.index, first, last, data)])
            unpack(self._group, layout.page_sizes(first, last).tolist(), data, out)
        keys = self._next_keys(end - self.low)
        out = out[self.low - start : end - start]
        if self.changed is not None:
            out[:, -1] = self.changed(self.segment, self._group.index, self.low, end).view(np.float32)
            if self.segment.tombstone:
                out[:, -1].view(np.uint32)[:] = FORGOTTEN
        self.low = end
        return keys, out

    def _read_chosen(self, choice: RowFilter, rows: int) -> Rows:
        """Read ``rows`` rows at a time until that many selected ones were read."""
        layout = self._layout
        parts: list[Rows] = []
        taken = 0
        while taken < min(rows, self.remaining):
            begin, end = self.low, min(self.high, self.low + min(rows - taken, _CHOICE_ROWS))
            end = min(self.high, layout.row_of_page(layout.page_of_row(end - 1) + 1))
            chosen = choice(self.segment, self._group.index, begin, end)
            pages = np.unique(layout.pages_of_rows(begin + np.nonzero(chosen)[0]))
            for near in np.split(pages, np.nonzero(np.diff(pages) > 1)[0] + 1) if pages.size else []:
                low = max(begin, layout.row_of_page(int(near[0])))
                high = min(end, layout.row_of_page(int(near[-1]) + 1))
                self._pass_over(low)
                keys, values = self._read(high - low)
                selected = chosen[low - begin : high - begin]
                parts.append((keys[selected], values[selected]))
                taken += parts[-1][0].size
            self._pass_over(end)
        return np.concatenate([keys for keys, _ in parts]), np.concatenate([values for _, values in parts])

    def _count_chosen(self, choice: RowFilter) -> int:
        lows = range(self.low, self.high, _CHOICE_ROWS)
        parts = (choice(self.segment, self._group.index, low, min(self.high, low + _CHOICE_ROWS)) for low in lows)
        return sum(int(np.count_nonzero(part)) for part in parts)

    def _pass_over(self, row: int) -> None:
        self._keys = self._keys[row - self.low :]
        self.low = row

    def _next_keys(self, count: int) -> NDArray[np.int64]:
        parts, row, needed = [], self.low, count
        while needed:
            if not self._keys.size:
                block = row // self.block_rows
                start = self._layout.rows_of_block(block)[0]
                keys = self.keys_of(self.segment, self._group.index, block)
                self._keys = keys[row - start : self.high - start].copy()
            parts.append(self._keys[:needed])
            self._keys = self._keys[needed:]
            row, needed = row + parts[-1].size, needed - parts[-1].size
        return np.concatenate(parts)


def runs_of(
    reader: BlockReader,
    snapshot: Snapshot,
    segments: Iterable[Segment],
    group: Group,
    table: Table,
    choice: RowFilter | None = None,
    changed: bool = False,
    hashes: tuple[int, int] | None = None,
) -> list[SortedRun]:
    """Return the runs of a table in live ranges of ``segments``, which are in ``snapshot``, by segment and row.

    ``changed``: with last changes, and a one-block cache each, as they may be read by turns. ``hashes``: only the rows
    whose hash is at least the first and below the second; reads at most two key pages of each run to find them.
    """
    place, firsts, runs = group.place(table.name), {} if snapshot.commit is None else snapshot.commit.named, []
    for segment in segments:
        layout, live = segment.layouts[group.index], snapshot.first_range(segment, group.index)
        for whole in zip(*(bounds.tolist() for bounds in layout.runs_of_table(place, live)), strict=True):
            low, high = whole if hashes is None else _rows_within(reader, segment, group, table, whole, hashes)
            if low < high:
                last = VersionReader(reader, firsts) if changed else None
                runs.append(SortedRun(reader, segment, group, low, high, choice, last))
    return [run for run in runs if run.remaining]


def _rows_within(
    reader: BlockReader, segment: Segment, group: Group, table: Table, run: tuple[int, int], hashes: tuple[int, int]
) -> tuple[int, int]:
    """Return the rows of a run of a table, (first, last + 1), with hashes in a range."""
    layout, (low, high), found = segment.layouts[group.index], run, []
    first, last = layout.key_pages_of_rows(np.array([low, high - 1])).tolist()
    begins = segment.meta[group.index].first_hashes[first + 1 : last + 1]
    for bound in hashes:
        if not 0 < bound < HASHES:
            found.append(low if bound <= 0 else high)
            continue
        page = first + int(begins.searchsorted(np.uint64(bound)))  # its row is here, or the first of the next page
        start, end = (int(rows[0]) for rows in layout.rows_of_key_pages(np.array([page])))
        begin = max(low, start)
        keys = reader.keys_between(segment, group.index, begin, min(high, end))
        in_page = hash_keys(keys, table.table_id)
        found.append(begin + int(in_page.searchsorted(np.uint64(bound))))
    return found[0], found[1]


def join_runs(runs: Sequence[SortedRun], keys_of: Callable[[Segment, int, int], NDArray[np.int64]]) -> list[SortedRun]:
    """Join adjacent runs; a segment's runs stay before those in newer segments. Read them in order."""
    found: list[SortedRun] = []
    for run in runs:
        run.keys_of, run.changed = keys_of, runs[0].changed
        if found and found[-1].segment is run.segment and found[-1].high == run.low:
            found[-1].join(run)
        else:
            found.append(run)
    return found


class VersionReader:
    """Returns last changes of rows; caches the last block. ``firsts``: the first commit that named each segment."""

    def __init__(self, reader: BlockReader, firsts: Mapping[int, int]) -> None:
        self._block, self._firsts = lru_cache(maxsize=1)(reader.changed), firsts

    def __call__(self, segment: Segment, group: int, low: int, high: int) -> Uint32s:
        """Return the last changes of rows [low, high): (high - low,)."""
        found = np.empty(high - low, np.uint32)
        for block, begin, end in segment.layouts[group].blocks_between(low, high):
            oldest, newest = self.bounds(segment, group, block)
            start = block * segment.layouts[group].block_rows
            found[begin - low : end - low] = (
                oldest if oldest == newest else self._block(segment, group, block)[begin - start : end - start]
            )
        return found

    def after(self, since: int) -> RowFilter:
        """Return a filter for rows that changed after commit ``since``; reads only blocks with some that did not."""

        def chosen(segment: Segment, group: int, low: int, high: int) -> NDArray[np.bool_]:
            found = np.empty(high - low, np.bool_)
            for block, begin, end in segment.layouts[group].blocks_between(low, high):
                oldest, newest = self.bounds(segment, group, block)
                found[begin - low : end - low] = (
                    self(segment, group, begin, end) > since if oldest <= since < newest else newest > since
                )
            return found

        return chosen

    def bounds(self, segment: Segment, group: int, block: int) -> tuple[int, int]:
        """Return the least and the greatest last change in a block; reads nothing."""
        if (changed := segment.meta[group].changed) is None:
            return self._firsts[segment.id], self._firsts[segment.id]
        return int(changed.oldest_B[block]), int(changed.newest_B[block])
