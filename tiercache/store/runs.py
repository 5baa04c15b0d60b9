"""Sorted runs: the rows of one table in one range of a segment, in hash order, and the merge of such sources."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.reading import Pages
from tiercache.store.row_codec import unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import DTypeLike, NDArray

    from tiercache.store.table import Table

    Columns = tuple[NDArray[Any], ...]
    from tiercache.store.table import Group

    Uint32s = NDArray[np.uint32]
    from collections.abc import Callable, Mapping, Sequence

    from tiercache.store.layout import SegmentLayout
    from tiercache.store.reading import BlockReader
    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot

    Rows = tuple[NDArray[np.int64], NDArray[np.float32]]
    """Keys (n,) and rows (n, W): every field of a row side by side, as words."""
    RowFilter = Callable[[Segment, int, int, int], NDArray[np.bool_]]
    """Of a segment and a group, which of the rows [low, high) are wanted: (high - low,)."""


FORGOTTEN = (1 << 32) - 1
"""The last change of a key without a row, for who merges runs: above that of every row."""
HASHES = 1 << 64
"""All hashes are below it."""


class SortedCursor:
    """A place in a source, of which the next rows are in memory."""

    def __init__(self, parts: Iterable[Columns], *columns: DTypeLike, least: int = 0) -> None:
        """``columns`` are the dtypes of the columns beside the hashes. ``fill`` reads where ``least`` rows are left."""
        self.ended = False
        """Whether all rows that are left are in memory."""
        self._parts, self._least = iter(parts), least
        self._rows: Columns = tuple(np.empty(0, np.dtype(column)) for column in (np.uint64, *columns))

    @property
    def end(self) -> int:
        """The last hash in memory."""
        return int(self._rows[0][-1])

    def fill(self) -> bool:
        """Read on where few rows are left in memory; returns whether there are any."""
        while not self.ended and self._rows[0].size <= self._least:
            part = next(self._parts, None)
            if part is None:
                self.ended = True
            elif self._rows[0].size:
                self._rows = tuple(np.concatenate(pair) for pair in zip(self._rows, part, strict=True))
            else:
                self._rows = part
        return bool(self._rows[0].size)

    def take(self, bound: int) -> Columns:
        """Return the rows with hashes up to ``bound``, which are then gone."""
        at = int(np.searchsorted(self._rows[0], np.uint64(bound), side="right"))
        taken = tuple(column[:at] for column in self._rows)
        self._rows = tuple(column[at:] for column in self._rows)
        return taken


def merged(*cursors: SortedCursor) -> Iterator[tuple[Columns, ...]]:
    """Yield what all cursors have up to the same hash, bound after bound, until all rows are gone.

    All rows with the same hash come together, but for those of one source that it cuts into two parts.
    """
    while filled := [cursor for cursor in cursors if cursor.fill()]:
        ends = [cursor.end for cursor in filled if not cursor.ended]
        bound = min(ends) if ends else max(cursor.end for cursor in filled)
        yield tuple(cursor.take(bound) for cursor in cursors)


def below(cursor: SortedCursor, bound: int) -> Iterator[Columns]:
    """Yield the next rows of a cursor as long as their hashes are below ``bound``."""
    while cursor.fill() and (rows := cursor.take(min(cursor.end, bound - 1)))[0].size:
        yield rows


def hashed(table: Table, parts: Iterable[Columns]) -> Iterator[Columns]:
    """Yield parts of keys and other columns of a table, with the hashes of the keys before them."""
    return ((hash_keys(part[0], table.table_id), *part) for part in parts)


def rising(hashes: NDArray[np.uint64], after: int | None = None) -> bool:
    """Return whether each hash is greater than the one before it, and the first than ``after``."""
    return not np.any(hashes[1:] <= hashes[:-1]) and (after is None or not hashes.size or int(hashes[0]) > after)


def whole_keys(parts: Iterable[Columns]) -> Iterator[Columns]:
    """Yield the same rows, cut so that those with equal values in the first column, side by side, come together."""
    pending: Columns | None = None
    for part in parts:
        rows = part if pending is None else tuple(np.concatenate(pair) for pair in zip(pending, part, strict=True))
        differs = rows[0] != rows[0][-1]
        last = rows[0].size - int(np.argmax(differs[::-1])) if np.any(differs) else 0
        pending = tuple(column[last:].copy() for column in rows)
        if last:
            yield tuple(column[:last] for column in rows)
    if pending is not None:
        yield pending


_CHOICE_ROWS = 1 << 20
"""Rows that are chosen from at once."""


class SortedRun:
    """Rows [low, high) of a layout, all of one table, read from the front.

    With ``choice`` only the rows that it says are read, and of the pages only those with such a row. With
    ``changed`` the last word of each row is its last change.
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
        self.remaining = high - low if choice is None else self._count_chosen(choice)
        """Rows that were not read yet."""

    @property
    def words(self) -> int:
        """Words of a row, its last change included."""
        return self._group.row_bytes // 4 + (self.changed is not None)

    @property
    def block_rows(self) -> int:
        """Rows of a block of the layout."""
        return self._layout.block_rows

    @property
    def page_bytes(self) -> int:
        """The most bytes of a page."""
        return min(self._layout.page_rows, self.block_rows) * self._layout.row_bytes

    @property
    def key_bytes(self) -> int:
        """Bytes of the blocks of keys that it touches."""
        first, last = self.low // self.block_rows, (self.high - 1) // self.block_rows
        return 8 * (self._layout.rows_of_block(last)[1] - self._layout.rows_of_block(first)[0])

    def join(self, after: SortedRun) -> None:
        """Take up the rows of the run that lies right behind this one."""
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
        """Read on, so many rows at a time, until as many chosen ones came."""
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
        """Return how many rows are chosen."""
        lows = range(self.low, self.high, _CHOICE_ROWS)
        parts = (choice(self.segment, self._group.index, low, min(self.high, low + _CHOICE_ROWS)) for low in lows)
        return sum(int(np.count_nonzero(part)) for part in parts)

    def _pass_over(self, row: int) -> None:
        """Go on from a row further on."""
        self._keys = self._keys[row - self.low :]
        self.low = row

    def _next_keys(self, count: int) -> NDArray[np.int64]:
        parts, row, needed = [], self.low, count
        while needed:
            if not self._keys.size:
                block = row // self.block_rows
                start = self._layout.rows_of_block(block)[0]
                self._keys = self.keys_of(self.segment, self._group.index, block)[
                    row - start : self.high - start
                ].copy()
            parts.append(self._keys[:needed])
            self._keys = self._keys[needed:]
            row, needed = row + parts[-1].size, needed - parts[-1].size
        return np.concatenate(parts)


class LastKeys:
    """Reads blocks of keys and remembers the last one: neighboring runs share it."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader
        self._last: tuple[tuple[int, int, int], NDArray[np.int64]] | None = None

    def __call__(self, segment: Segment, group: int, block: int) -> NDArray[np.int64]:
        """Return what ``BlockReader.keys`` does."""
        block_key = segment.id, group, block
        if self._last is None or self._last[0] != block_key:
            self._last = block_key, self._reader.keys(segment, group, block)
        return self._last[1]


def runs_of(
    reader: BlockReader,
    snapshot: Snapshot,
    segments: Iterable[Segment],
    group: Group,
    table: Table,
    choice: RowFilter | None = None,
    changed: Callable[[], VersionReader] | None = None,
    hashes: tuple[int, int] | None = None,
) -> list[SortedRun]:
    """Return the runs of a table in live ranges of ``segments``, which are of ``snapshot``, by segment and place.

    ``changed`` makes for each what remembers one block: they may be read by turns. ``hashes``: only the rows whose
    hash is at least the first and below the second; reads at most two key pages of each run to find them.
    """
    place, runs = group.place(table.name), []
    for segment in segments:
        layout, live = segment.layouts[group.index], snapshot.first_range(segment, group.index)
        for whole in zip(*(bounds.tolist() for bounds in layout.runs_of_table(place, live)), strict=True):
            low, high = whole if hashes is None else _rows_within(reader, segment, group, table, whole, hashes)
            if low < high:
                last = None if changed is None else changed()
                runs.append(SortedRun(reader, segment, group, low, high, choice, last))
    return [run for run in runs if run.remaining]


def _rows_within(
    reader: BlockReader, segment: Segment, group: Group, table: Table, run: tuple[int, int], hashes: tuple[int, int]
) -> tuple[int, int]:
    """Return which rows of a run of a table, (first, last + 1), have hashes in a range."""
    layout, (low, high), found = segment.layouts[group.index], run, []
    first, last = layout.key_pages_of_rows(np.array([low, high - 1])).tolist()
    begins = segment.first_hashes[group.index][first + 1 : last + 1]
    for bound in hashes:
        if not 0 < bound < HASHES:
            found.append(low if bound <= 0 else high)
            continue
        page = first + int(begins.searchsorted(np.uint64(bound)))  # its row is in here, or the first of the next one
        start, end = (int(rows[0]) for rows in layout.rows_of_key_pages(np.array([page])))
        block, in_block = divmod(page, layout.key_pages)
        keys = reader.keys(segment, group.index, block, in_block, in_block + 1)
        begin = max(low, start)
        in_page = hash_keys(keys[begin - start : min(high, end) - start], table.table_id)
        found.append(begin + int(in_page.searchsorted(np.uint64(bound))))
    return found[0], found[1]


def hash_slices(count: int, low: int = 0, high: int = HASHES) -> list[tuple[int, int]]:
    """Cut the hashes [low, high) into ``count`` neighboring ranges of about the same size."""
    bounds = [low + i * (high - low) // count for i in range(count + 1)]
    return list(pairwise(bounds))


def join_runs(runs: Sequence[SortedRun], keys_of: Callable[[Segment, int, int], NDArray[np.int64]]) -> list[SortedRun]:
    """Join runs that lie side by side: all of a segment stay before those of a newer one. They are read in order."""
    found: list[SortedRun] = []
    for run in runs:
        run.keys_of, run.changed = keys_of, runs[0].changed
        if found and found[-1].segment is run.segment and found[-1].high == run.low:
            found[-1].join(run)
        else:
            found.append(run)
    return found


class VersionReader:
    """Says which commit last changed rows of layouts; remembers the last block that it read.

    ``firsts`` has for each segment the first commit that named it. Raises CorruptBlockError.
    """

    def __init__(self, reader: BlockReader, firsts: Mapping[int, int]) -> None:
        self._reader, self._firsts = reader, firsts
        self._last: tuple[tuple[int, int, int], Uint32s] | None = None

    def __call__(self, segment: Segment, group: int, low: int, high: int) -> Uint32s:
        """Return the last changes of rows [low, high): (high - low,)."""
        found = np.empty(high - low, np.uint32)
        for block, begin, end in _blocks(segment.layouts[group], low, high):
            oldest, newest = self.bounds(segment, group, block)
            start = block * segment.layouts[group].block_rows
            found[begin - low : end - low] = (
                oldest if oldest == newest else self._block(segment, group, block)[begin - start : end - start]
            )
        return found

    def after(self, since: int) -> RowFilter:
        """Return what says which rows changed after commit ``since``; reads only blocks with some that did not."""

        def chosen(segment: Segment, group: int, low: int, high: int) -> NDArray[np.bool_]:
            found = np.empty(high - low, np.bool_)
            for block, begin, end in _blocks(segment.layouts[group], low, high):
                oldest, newest = self.bounds(segment, group, block)
                found[begin - low : end - low] = (
                    self(segment, group, begin, end) > since if oldest <= since < newest else newest > since
                )
            return found

        return chosen

    def bounds(self, segment: Segment, group: int, block: int) -> tuple[int, int]:
        """Return the least and the greatest last change in a block; reads nothing."""
        if not segment.changed:
            return self._firsts[segment.id], self._firsts[segment.id]
        changed = segment.changed[group]
        return int(changed.oldest_B[block]), int(changed.newest_B[block])

    def _block(self, segment: Segment, group: int, block: int) -> Uint32s:
        block_key = segment.id, group, block
        if self._last is None or self._last[0] != block_key:
            self._last = block_key, self._reader.changed(segment, group, block)
        return self._last[1]


def _blocks(layout: SegmentLayout, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks that rows [low, high) touch, and which of these rows each has."""
    while low < high:
        block = low // layout.block_rows
        end = min(high, (block + 1) * layout.block_rows)
        yield block, low, end
        low = end
