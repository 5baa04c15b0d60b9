"""Rewrite of a store's live rows in a new order: streaming reads, sequential temporary files, streaming writes.

So a store follows a new schedule (keys by first use; unused ones last, or in place) or is ready for serving (all by
hash). Rows are read in the order (table, hash). If no pass uses any, that is the new order, and they are written as
they are read. Otherwise one slice of them at a time is sorted, in temporary files that have one slice, and becomes a
segment. Rows of up to ``LEAST_SLICE_BYTES`` are one slice.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.compaction_plan import NUMBER_BYTES, CompactionPlan, FirstUses
from tiercache.store.external_sort import (
    HASH_BYTES,
    ExternalSorter,
    SortedCursor,
    file_bytes,
    flush_largest,
    hash_slices,
    hashed,
    merged,
    part_rows,
    slice_bytes,
)
from tiercache.store.files import check_room, paged, room_for
from tiercache.store.layout import CHANGED_BYTES, KEY_BYTES, NEVER, Range, SegmentLayout
from tiercache.store.row_codec import initial_rows, moved_blocks_of, row_words
from tiercache.store.scan import scan_segments
from tiercache.store.segment import Layout, base_layouts
from tiercache.store.store_errors import StoreError, damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.store.reading import BlockReader
    from tiercache.store.row_codec import MovedBlock
    from tiercache.store.scan import RowFilter
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Group, Table

    Int64s = NDArray[np.int64]
    Floats = NDArray[np.float32]
    Progress = Callable[[str, int], None]
    RowChunks = Iterator[tuple[Int64s, Floats]]
    """Keys (n,) in hash order, and rows (n, W + 1): the words of all fields, and the last change."""


REWRITE_BYTES = 256 << 20
_WHAT = "a new order of the store's rows, with temporary files of at most an eighth of their bytes or 2.5 GiB,"


class Rewrite:
    """The rows of a store, and those that a schedule starts with, in the order (first use, table, hash).

    With ``retain_segments`` unused rows stay in place, as ``CompactionPlan`` decides. Stored rows keep their last
    change; for the others it is the new commit. ``stored`` yields rows of a table from elsewhere, for a store without a
    commit; None: its own. ``most_rows``: by table, the maximum rows that ``stored`` yields, if known.

    Memory: ``REWRITE_BYTES`` and a slice of ``uses``. Unlinked temporary files in the store's folder: none for rows
    that fit the memory; otherwise ``row_scratch_bytes``, at most an eighth of the bytes of the rows, their keys and
    last changes, or 2.5 GiB if that is more (twice as much on a file system that cannot free parts of files).
    """

    def __init__(
        self,
        reader: BlockReader,
        snapshot: Snapshot,
        uses: FirstUses,
        first_rows: Callable[[Table, Int64s], Sequence[Floats]] | None,
        progress: Progress,
        files: ExitStack,
        *,
        layout: Layout,
        retain_segments: bool,
        stored: Callable[[Table], RowChunks] | None = None,
        most_rows: Mapping[str, int] | None = None,
    ) -> None:
        """``files`` closes its temporary files."""
        self._reader, self._snapshot, self._uses, self._progress = reader, snapshot, uses, progress
        self._files = files
        self._retain_segments, self._layout = retain_segments, layout
        self._stored, self._most_rows = stored, most_rows
        self._first_rows = first_rows or initial_rows
        self._moves: RowFilter | None = None
        self._orders = [RowOrder(group, uses) for group in snapshot.next_groups]
        self.retained: dict[int, Int64s] = {}
        """The segments that stay; valid when ``segments`` has yielded one."""

    def segments(self) -> Iterator[NewSegment]:
        """Yield the new segments, at least one; together they are in the order (table, hash).

        Raises StoreFullError (before any row is read, if possible) and CorruptStoreError.
        """
        idle: dict[str, int] | None = None
        if self._retain_segments:
            compaction = CompactionPlan(self._reader, self._snapshot, self._uses, self._progress, self._files)
            compaction.sort()
            self.retained, self._moves = compaction.retained, compaction.moves
            idle_rows = compaction.idle_rows
            idle = {table.name: idle_rows(order.group.index, place) for order, place, table in self._tables()}
        least = [self._least_rows(order, idle) for order in self._orders]
        slice_size = slice_bytes(sum(rows * order.entry_bytes for rows, order in zip(least, self._orders, strict=True)))
        if self._stored is None and idle is None and not any(order.used for order in self._orders):
            yield self._in_hash_order(slice_size)
            return
        self._check_room(least)
        most = {table.name: self._most_rows_of(order, place, idle) for order, place, table in self._tables()}
        rows = [slice_size // order.entry_bytes + 1 for order in self._orders]
        if self._stored is None or self._most_rows is not None:
            totals = (sum(most[table.name] for table in order.group.tables) for order in self._orders)
            rows = [min(pair) for pair in zip(rows, totals, strict=True)]
        part = self._slice(rows, slice_size)
        for order, place, table in self._tables():
            group = order.group.index
            for keys, words, uses in self._merged(table, most[table.name] * order.entry_bytes, slice_size):
                self._progress("read", keys.size)
                done = 0
                while done < keys.size:
                    if not (room := part.room(group)):
                        yield part.segment(self._layout, self._progress)
                        part.close()
                        part = self._slice(rows, slice_size)
                        room = max(1, part.room(group))
                    end = min(keys.size, done + room)
                    part.put(group, place, keys[done:end], words[done:end], uses[done:end])
                    done = end
            order.check(place)
        yield part.segment(self._layout, self._progress)

    def _tables(self) -> Iterator[tuple[RowOrder, int, Table]]:
        return ((order, place, table) for order in self._orders for place, table in enumerate(order.group.tables))

    def _slice(self, rows: Sequence[int], num_bytes: int) -> Slice:
        made = Slice(self._orders, rows, num_bytes, self._reader)
        self._files.callback(made.close)
        return made

    def _in_hash_order(self, slice_size: int) -> NewSegment:
        """Return the one segment of all stored rows, each table in hash order, written as they are read."""
        groups = [order.group for order in self._orders]
        layouts = base_layouts(groups, lambda table: self._snapshot.live_rows(table.name), self._layout)
        moved = [_have_several_changes(self._snapshot, group) for group in groups]

        def blocks() -> Iterator[MovedBlock]:
            for order, layout in zip(self._orders, layouts, strict=True):
                for block in moved_blocks_of(order.group, layout, self._chunks(order, layout, slice_size)):
                    self._progress("write", block[3].size)
                    yield block

        return NewSegment(layouts, moved, blocks())

    def _chunks(self, order: RowOrder, layout: SegmentLayout, slice_size: int) -> RowChunks:
        """Yield the live rows of all tables of a group. Raises CorruptStoreError if their number is wrong."""
        remaining = layout.rows
        for table in order.group.tables:
            rows = self._stored_rows(table)
            for keys, words in self._moved(table, rows * order.entry_bytes, slice_size):
                self._progress("read", keys.size)
                remaining -= keys.size
                yield keys, words
        if remaining:
            raise damaged(
                f"group {order.group.index} of {self._reader.label} has {layout.rows - remaining:,} rows, but its "
                f"commit says {layout.rows:,}"
            )

    def _check_room(self, least: Sequence[int]) -> None:
        """Raise StoreFullError if the least rows of each group already need more room than there is."""
        total = usage = 0.0
        for rows, order in zip(least, self._orders, strict=True):
            total += rows * (order.entry_bytes + NUMBER_BYTES)
            usage += rows / part_rows(order.entry_bytes, REWRITE_BYTES // 2)
        num_bytes = 0 if usage <= 1 else min(int(total), slice_bytes(int(total)))
        with room_for(num_bytes, self._reader.scratch, _WHAT, at_least=True):
            check_room(self._reader.scratch, num_bytes)

    def _least_rows(self, order: RowOrder, idle: Mapping[str, int] | None) -> int:
        """Return the minimum rows of a group that are written; exact if ``idle`` has the numbers of unused rows."""
        tables = order.group.tables
        if idle is not None:
            return order.used + sum(idle[table.name] for table in tables)
        if self._stored is None:  # some of the used rows are stored; their number is unknown
            return max(order.used, sum(self._snapshot.live_rows(table.name) for table in tables))
        return max(order.used, sum((self._most_rows or {}).get(table.name, 0) for table in tables))

    def _most_rows_of(self, order: RowOrder, place: int, idle: Mapping[str, int] | None) -> int:
        """Return the maximum rows of a table that are written."""
        table, used = order.group.tables[place], int(order.counts_RT[:, place].sum())
        if idle is not None:
            return used + idle[table.name]
        if self._stored is None:
            return used + self._stored_rows(table)
        return used + (0 if self._most_rows is None else self._most_rows[table.name])

    def _stored_rows(self, table: Table) -> int:
        group = self._snapshot.find(table.name, self._reader.label).group
        return 0 if group is None else self._snapshot.rows_in(self._snapshot.segments, group, table)

    def _moved(self, table: Table, num_bytes: int, slice_size: int) -> RowChunks:
        """Yield the store's rows that move, at most ``num_bytes``, in hash order, sorted a slice at a time."""
        for hashes in hash_slices(-(-num_bytes // slice_size)) if num_bytes > slice_size else [None]:
            chunks = scan_segments(
                self._reader, self._snapshot, self._snapshot.segments, table.name, hashes=hashes,
                choice=self._moves, memory_bytes=REWRITE_BYTES // 2, as_words=True, changed=True,
            )  # fmt: skip
            for keys, fields in chunks:
                yield keys, np.concatenate(fields, axis=1)

    def _merged(self, table: Table, num_bytes: int, slice_size: int) -> Iterator[tuple[Int64s, Floats, Int64s]]:
        """Yield keys, rows (words, then last change) and first uses of all written rows, in hash order."""
        id_ = 0 if self._snapshot.commit is None else self._snapshot.commit.id + 1
        rows_of_store = self._stored(table) if self._stored is not None else self._moved(table, num_bytes, slice_size)
        stored = SortedCursor(hashed(table, rows_of_store), np.int64, (np.float32, (table.row_bytes // 4 + 1,)))
        used = SortedCursor(hashed(table, self._uses.slices(table.name)), np.int64, np.int64)
        for (hashes, *kept), (used_hashes, used_keys, first_uses) in merged(stored, used):
            keys, rows = kept
            uses, absent = np.full(keys.size, NEVER, dtype=np.int64), np.ones(used_keys.size, dtype=bool)
            if keys.size and used_keys.size:
                at = np.minimum(np.searchsorted(used_hashes, hashes), used_hashes.size - 1)
                hit = used_hashes[at] == hashes
                uses[hit], absent[at[hit]] = first_uses[at[hit]], False
            if np.any(absent):
                new = row_words(table.fields, self._first_rows(table, used_keys[absent]), changed=id_)
                order = np.argsort(np.concatenate([hashes, used_hashes[absent]]))
                keys = np.concatenate([keys, used_keys[absent]])[order]
                rows, uses = np.concatenate([rows, new])[order], np.concatenate([uses, first_uses[absent]])[order]
            if keys.size:
                yield keys, rows, uses


def _have_several_changes(snapshot: Snapshot, group: Group) -> bool:
    """Return True if live rows of a group may have several last changes; reads nothing."""
    if snapshot.commit is not None and snapshot.commit.stored:
        return True  # its tables are in other groups
    firsts = {} if snapshot.commit is None else snapshot.commit.named
    bounds = []
    for segment in snapshot.segments:
        layout = segment.layouts[group.index]
        first = layout.first_row_R.item(snapshot.first_range(segment, group.index))
        changed, block = segment.meta[group.index].changed, first // layout.block_rows
        if first < layout.rows and changed is not None:
            bounds += [int(changed.oldest_B[block:].min()), int(changed.newest_B[block:].max())]
        elif first < layout.rows:
            bounds.append(firsts[segment.id])
    return len(set(bounds)) > 1


def row_scratch_bytes(tables: Iterable[tuple[int, int, int]]) -> int:
    """Return the maximum bytes of temporary files while rows are reordered.

    ``tables`` yields the group, the rows and the bytes of an entry (row, key and last change) of each table. Rows that
    fit the memory take none. Otherwise a slice is sorted by hash, if it has too many ranges to merge, then by place: a
    file shrinks while it is read, so both take about as much as one. A slice is a 24th of all entries, or
    ``LEAST_SLICE_BYTES`` if that is more.
    """
    tables = list(tables)
    total = sum(rows * entry for _, rows, entry in tables)
    most, memory = slice_bytes(total), REWRITE_BYTES // 2
    groups: Counter[tuple[int, int]] = Counter()
    for group, rows, entry in tables:
        groups[group, entry] += rows
    by_hash = max((file_bytes(min(rows, most // one), one - HASH_BYTES, memory) for _, rows, one in tables), default=0)
    share = memory // max(1, 2 * len(groups))
    by_place = sum(paged(file_bytes(min(rows, most // one), one, share)) for (_, one), rows in groups.items())
    return paged(by_hash) + by_place


def entry_bytes(one: Group | Table) -> int:
    """Return the bytes of a row of a group or a table, its key and its last change."""
    return KEY_BYTES + one.row_bytes + CHANGED_BYTES


class NewSegment(NamedTuple):
    """A segment to append. Its blocks can be drawn once, before the next segment is requested."""

    layouts: tuple[SegmentLayout, ...]
    """By group."""
    moved: list[bool]
    """By group: True if last changes are stored, because rows may have several."""
    blocks: Iterator[MovedBlock]
    """Blocks of all groups, in order; all use the same two arrays."""


class RowOrder:
    """The first uses of one group's keys. Shapes: R passes that use some key first, T tables of the group."""

    def __init__(self, group: Group, uses: FirstUses) -> None:
        self.group = group
        counts = [Counter(uses.counts(table.name)) for table in group.tables]
        self.uses_R = np.array(sorted({use for of_table in counts for use in of_table}), dtype=np.int64)
        """(R,): the passes, ascending."""
        found = [[of_table[use] for of_table in counts] for use in self.uses_R.tolist()]
        self.counts_RT = np.array(found, dtype=np.int64).reshape(self.uses_R.size, len(counts))
        """(R, T): how many keys of a table each pass uses first."""
        self._arrived_RT = np.zeros_like(self.counts_RT)
        self.entry_bytes = entry_bytes(group)

    @property
    def used(self) -> int:
        """The number of keys, of all tables, that the passes use."""
        return int(self.counts_RT.sum())

    def index_of(self, place: int, uses: Int64s) -> Int64s:
        """Return the index of each row's first use, R for NEVER, and count rows. Raises StoreError for other uses."""
        index = self.uses_R.searchsorted(uses)
        is_used = np.append(self.uses_R, NEVER)[index] == uses
        if not np.all(is_used):
            raise self._other(place, int(uses[int(np.argmin(is_used))]), 0)
        self._arrived_RT[:, place] += np.bincount(index, minlength=self.uses_R.size + 1)[:-1]
        return index

    def check(self, place: int) -> None:
        """Raise StoreError if other rows of a table arrived than were counted; call it when all have arrived."""
        wrong = np.nonzero(self._arrived_RT[:, place] != self.counts_RT[:, place])[0]
        if wrong.size:
            raise self._other(place, int(self.uses_R[wrong[0]]), int(self.counts_RT[wrong[0], place]))

    def _other(self, place: int, use: int, count: int) -> StoreError:
        return StoreError(
            f"pass {use} was said to use {count:,} keys of table {self.group.tables[place].name!r} first, and others "
            "came: the key sets changed in the meantime"
        )


class Slice:
    """Rows of all groups that become one segment."""

    def __init__(self, orders: Sequence[RowOrder], rows: Sequence[int], num_bytes: int, reader: BlockReader) -> None:
        """Take at most ``rows`` rows of each group, and ``num_bytes`` bytes of entries in all."""
        self._remaining = num_bytes
        self._files = ExitStack()
        self._groups: list[_GroupSlice] = []
        for order, most in zip(orders, rows, strict=True):
            payload: list[DTypeLike] = ["<i8", ("<f4", (order.entry_bytes - KEY_BYTES) // 4)]
            sorter = ExternalSorter(payload, reader.scratch, _WHAT, REWRITE_BYTES // 2, reader.counters)
            self._groups.append(_GroupSlice(order, max(1, most), self._files.enter_context(sorter)))

    def close(self) -> None:
        """Forget all rows."""
        self._files.close()

    def room(self, group: int) -> int:
        """Return how many more rows of a group it takes."""
        one = self._groups[group]
        return min(max(0, self._remaining) // one.order.entry_bytes, one.most - one.rows)

    def put(self, group: int, place: int, keys: Int64s, rows: Floats, uses: Int64s) -> None:
        """Add rows (n, W + 1) of one table, at most ``room``; their last word is their last change.

        Rows must arrive in the order (table, hash). Raises StoreFullError, and StoreError if first uses differ from the
        counted ones.
        """
        one = self._groups[group]
        one.put(place, keys, rows, uses)
        flush_largest([group.sorter for group in self._groups])
        self._remaining -= keys.size * one.order.entry_bytes

    def segment(self, layout: Layout, progress: Callable[[str, int], None]) -> NewSegment:
        """Return the segment of all its rows."""
        layouts = tuple(layout(one.order.group, one.ranges()) for one in self._groups)

        def blocks() -> Iterator[MovedBlock]:
            for one, of_group in zip(self._groups, layouts, strict=True):
                chunks = ((keys, rows) for _, keys, rows in one.sorter.sorted(of_group.block_rows))
                for block in moved_blocks_of(one.order.group, of_group, chunks):
                    progress("write", block[3].size)
                    yield block
                one.sorter.close()

        return NewSegment(layouts, [one.oldest < one.newest for one in self._groups], blocks())


class _GroupSlice:
    """The rows of one group in a slice. Shapes: R first uses and NEVER after them."""

    def __init__(self, order: RowOrder, most: int, sorter: ExternalSorter) -> None:
        self.order, self.most, self.sorter = order, most, sorter
        self.rows = 0
        self.oldest, self.newest = (1 << 32) - 1, 0
        """The smallest and the largest last change."""
        width_R = np.append(np.minimum(order.counts_RT.sum(axis=1), most), most)
        self._start_R = np.cumsum(width_R) - width_R
        """The least place number for each first use: places need not be dense, only far enough apart."""
        self._width_R = width_R
        self._shift = np.uint64(64 - int(width_R.sum()).bit_length())
        """The left shift that moves place numbers to the highest bits, which the sorter uses first."""
        self._counts_RT = np.zeros((width_R.size, len(order.group.tables)), np.int64)

    def put(self, place: int, keys: Int64s, rows: Floats, uses: Int64s) -> None:
        """Add rows of one table."""
        changed = rows[:, -1].view(np.uint32)
        self.oldest, self.newest = min(self.oldest, int(changed.min())), max(self.newest, int(changed.max()))
        index = self.order.index_of(place, uses)
        by_use = np.argsort(index, kind="stable")
        counts_R = np.bincount(index, minlength=self._start_R.size)
        begin_R = self._start_R + self._counts_RT.sum(axis=1)
        self._counts_RT[:, place] += counts_R
        if np.any(self._counts_RT.sum(axis=1) > self._width_R):
            self.order.check(place)
        first_R = np.cumsum(counts_R) - counts_R
        numbers = np.empty(index.size, np.uint64)
        numbers[by_use] = (begin_R - first_R)[index[by_use]] + np.arange(index.size)
        self.sorter.add(numbers << self._shift, keys, rows)
        self.rows += keys.size

    def ranges(self) -> list[Range]:
        """Return the ranges of all rows."""
        uses = np.append(self.order.uses_R, NEVER).tolist()
        counts = zip(uses, self._counts_RT.tolist(), strict=True)
        return [Range(next_use=use, table_rows=tuple(rows)) for use, rows in counts if any(rows)]
