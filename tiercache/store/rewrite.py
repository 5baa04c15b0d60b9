"""Rewrite of a store's live rows in a new order: streaming reads, sequential temporary files, streaming writes.

So a store follows a new schedule (keys by first use; the others last, or where they are) or serves (all by hash). Rows
are read in the order (table, hash). If no pass uses any, that is the new order, and they are written as they are read.
Else a slice of them at a time is sorted, in temporary files that have one slice, and becomes a segment of its own. Rows
of up to ``LEAST_SLICE_BYTES`` are one slice.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.compaction_plan import CompactionPlan
from tiercache.store.external_sort import HASH_BYTES, file_bytes, part_rows, slice_bytes
from tiercache.store.files import check_room, paged, room_for
from tiercache.store.initial_rows import initial_rows
from tiercache.store.layout import NEVER, Range
from tiercache.store.row_codec import moved_blocks_of, row_words
from tiercache.store.row_order import NUMBER_BYTES, NewSegment, RowOrder, Slice
from tiercache.store.runs import SortedCursor, hash_slices, hashed, merged
from tiercache.store.scan import scan_segments
from tiercache.store.store_errors import CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.compaction_plan import FirstUses
    from tiercache.store.layout import SegmentLayout
    from tiercache.store.reading import BlockReader
    from tiercache.store.row_codec import MovedBlock
    from tiercache.store.runs import RowFilter
    from tiercache.store.segment import Layout, RetainedSegment
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Group, Table

    Int64s = NDArray[np.int64]
    Floats = NDArray[np.float32]
    Progress = Callable[[str, int], None]
    RowChunks = Iterator[tuple[Int64s, Floats]]
    """Keys (n,) in hash order, and rows (n, W + 1): every field as words side by side, and the last change."""

REWRITE_BYTES = 256 << 20
_WHAT = "a new order of the store's rows, with temporary files of at most an eighth of their bytes or 2.5 GiB,"


class Rewrite:
    """The rows of a store, and those that a schedule starts with, in the order (first use, table, hash).

    With ``retain_segments`` rows that the schedule does not use stay where they are, as ``CompactionPlan`` decides.
    Rows that were stored keep their last change; the last change of the others is the commit that this becomes.
    ``stored`` yields the rows of a table that come from elsewhere, for a store without a commit; None: its own.
    ``most_rows``: by table, the most rows that ``stored`` yields, if known.

    Memory: ``REWRITE_BYTES`` and a slice of ``uses``. Temporary files without a name in the store's folder: none for
    rows that fit the memory; else what ``row_scratch_bytes`` says, at most an eighth of the bytes of the rows, their
    keys and last changes, or 2.5 GiB if that is more (twice as much on a file system that cannot free parts of files).
    """

    def __init__(
        self,
        reader: BlockReader,
        snapshot: Snapshot,
        uses: FirstUses,
        first_rows: Callable[[Table, Int64s], Sequence[Floats]] | None,
        progress: Progress,
        *,
        layout: Layout,
        retain_segments: bool,
        stored: Callable[[Table], RowChunks] | None = None,
        most_rows: Mapping[str, int] | None = None,
    ) -> None:
        self._reader, self._snapshot, self._uses, self._progress = reader, snapshot, uses, progress
        self._retain_segments, self._layout = retain_segments, layout
        self._stored, self._most_rows = stored, most_rows
        self._first_rows = first_rows or initial_rows
        self._files = ExitStack()
        self._moves: RowFilter | None = None
        self._orders = [RowOrder(group, uses) for group in snapshot.next_groups]
        self.retained: tuple[RetainedSegment, ...] = ()
        """The segments that stay; known when ``segments`` has yielded one."""

    def __enter__(self) -> Rewrite:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def segments(self) -> Iterator[NewSegment]:
        """Yield the new segments, at least one: one after the other they are in the order (table, hash).

        Raises StoreFullError, before a row is read if it is known by then, and CorruptStoreError.
        """
        idle: dict[str, int] | None = None
        if self._retain_segments:
            compaction = CompactionPlan(self._reader, self._snapshot, self._uses, self._progress)
            self._files.enter_context(compaction).sort()
            self.retained, self._moves = compaction.retained, compaction.moves
            idle = {
                table.name: compaction.idle_rows(order.group.index, place) for order, place, table in self._tables()
            }
        self._check_room(idle)
        most = {table.name: self._most_rows_of(order, place, idle) for order, place, table in self._tables()}
        slice_size = slice_bytes(sum(self._least_rows(order, idle) * order.entry_bytes for order in self._orders))
        if self._stored is None and idle is None and not any(order.used for order in self._orders):
            yield self._in_hash_order(slice_size)
            return
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
        """Yield every table, with the order of its group and its place there."""
        return ((order, place, table) for order in self._orders for place, table in enumerate(order.group.tables))

    def _slice(self, rows: Sequence[int], num_bytes: int) -> Slice:
        scratch, counters = self._reader.scratch, self._reader.counters
        return self._files.enter_context(
            Slice(self._orders, rows, num_bytes, scratch, _WHAT, REWRITE_BYTES // 2, counters)
        )

    def _in_hash_order(self, slice_size: int) -> NewSegment:
        """Return the one segment of all rows that are stored, each table in hash order, written as they are read."""
        layouts, moved = [], []
        for group in (order.group for order in self._orders):
            rows = tuple(self._snapshot.live_rows(table.name) for table in group.tables)
            layouts.append(self._layout(group, [Range(next_use=NEVER, table_rows=rows)] if any(rows) else []))
            moved.append(_have_several_changes(self._snapshot, group))

        def blocks() -> Iterator[MovedBlock]:
            for order, layout in zip(self._orders, layouts, strict=True):
                for block in moved_blocks_of(order.group, layout, self._chunks(order, layout, slice_size)):
                    self._progress("write", block[3].size)
                    yield block

        return NewSegment(tuple(layouts), moved, blocks())

    def _chunks(self, order: RowOrder, layout: SegmentLayout, slice_size: int) -> RowChunks:
        """Yield the live rows of all tables of a group. Raises CorruptStoreError for others than the commit says."""
        remaining = layout.rows
        for table in order.group.tables:
            rows = self._stored_rows(table)
            for keys, words in self._moved(table, rows * order.entry_bytes, slice_size):
                self._progress("read", keys.size)
                remaining -= keys.size
                yield keys, words
        if remaining:
            raise CorruptStoreError(
                f"group {order.group.index} of {self._reader.label} has {layout.rows - remaining:,} rows, but its "
                f"commit says {layout.rows:,}: restore the store from a copy"
            )

    def _check_room(self, idle: Mapping[str, int] | None) -> None:
        """Raise StoreFullError if there is less room than temporary files will take, as far as that is known."""
        total = usage = 0.0
        streamed = self._stored is None and idle is None and not any(order.used for order in self._orders)
        for order in [] if streamed else self._orders:
            rows = self._least_rows(order, idle)
            total += rows * (order.entry_bytes + NUMBER_BYTES)
            usage += rows / part_rows(order.entry_bytes, REWRITE_BYTES // 2)
        num_bytes = 0 if usage <= 1 else min(int(total), slice_bytes(int(total)))
        with room_for(num_bytes, self._reader.scratch, _WHAT, at_least=True):
            check_room(self._reader.scratch, num_bytes)

    def _least_rows(self, order: RowOrder, idle: Mapping[str, int] | None) -> int:
        """Return the least rows of a group that are written; all of them, if ``idle`` says how many are not used."""
        tables = order.group.tables
        if idle is not None:
            return order.used + sum(idle[table.name] for table in tables)
        if self._stored is None:  # of the rows that are used some are stored, nobody knows which
            return max(order.used, sum(self._snapshot.live_rows(table.name) for table in tables))
        return max(order.used, sum((self._most_rows or {}).get(table.name, 0) for table in tables))

    def _most_rows_of(self, order: RowOrder, place: int, idle: Mapping[str, int] | None) -> int:
        """Return the most rows of a table that are written."""
        table, used = order.group.tables[place], int(order.counts_RT[:, place].sum())
        if idle is not None:
            return used + idle[table.name]
        if self._stored is None:
            return used + self._stored_rows(table)
        return used + (0 if self._most_rows is None else self._most_rows[table.name])

    def _stored_rows(self, table: Table) -> int:
        """Return how many rows of a table segments have, the stale ones included."""
        group = self._snapshot.find(table.name, self._reader.label).group
        return 0 if group is None else self._snapshot.rows_in(self._snapshot.segments, group, table)

    def _moved(self, table: Table, num_bytes: int, slice_size: int) -> RowChunks:
        """Yield the store's own rows that move, at most ``num_bytes``, in hash order, sorted a slice at a time."""
        for hashes in hash_slices(-(-num_bytes // slice_size)) if num_bytes > slice_size else [None]:
            chunks = scan_segments(
                self._reader, self._snapshot, self._snapshot.segments, table.name, hashes=hashes,
                choice=self._moves, memory_bytes=REWRITE_BYTES // 2, as_words=True, changed=True,
            )  # fmt: skip
            for keys, fields in chunks:
                yield keys, np.concatenate(fields, axis=1)

    def _merged(self, table: Table, num_bytes: int, slice_size: int) -> Iterator[tuple[Int64s, Floats, Int64s]]:
        """Yield keys, rows and first uses of all rows that are stored and move, or wanted, in hash order.

        Rows are words, and last their last change.
        """
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
    """Return whether live rows of a group may have several last changes; reads nothing."""
    if snapshot.commit is not None and snapshot.commit.stored:
        return True  # its tables are in other groups
    firsts = {} if snapshot.commit is None else snapshot.commit.named
    bounds = []
    for segment in snapshot.segments:
        layout = segment.layouts[group.index]
        first = layout.first_row_R.item(snapshot.first_range(segment, group.index))
        if first < layout.rows and segment.changed:
            changed, block = segment.changed[group.index], first // layout.block_rows
            bounds += [int(changed.oldest_B[block:].min()), int(changed.newest_B[block:].max())]
        elif first < layout.rows:
            bounds.append(firsts[segment.id])
    return len(set(bounds)) > 1


def row_scratch_bytes(tables: Iterable[tuple[int, int, int]]) -> int:
    """Return the most bytes of temporary files while rows are put in a new order.

    ``tables`` yields the group, the rows and the bytes of an entry (row, key and last change) of each table. Rows that
    fit the memory take none. Of others a slice is sorted by hash, if its ranges are too many to merge, then by place: a
    file shrinks while it is read, so both have about as much as one. A slice is a 24th of all entries, or
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
