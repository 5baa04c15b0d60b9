"""Live rows of a store in a new order, as one segment: one streaming read, one sort on disk, one streaming write.

So a store follows a new schedule (its keys by first use, the others never, or where they are) or serves (all by hash).
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.compaction_plan import CompactionPlan
from tiercache.store.files import ScratchFile, check_room, room_for
from tiercache.store.initial_rows import initial_rows
from tiercache.store.layout import CHANGED_BYTES, NEVER, Range
from tiercache.store.row_codec import moved_blocks_of, row_words
from tiercache.store.runs import SortedCursor, hashed, merged
from tiercache.store.scan import scan_segments
from tiercache.store.store_errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

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
_WHAT = "a new order of the store's rows"


class Rewrite:
    """The rows of a store, and those that a schedule starts with, in the order (first use, table, hash).

    With ``retain_segments`` rows that the schedule does not use stay where they are, as ``CompactionPlan`` decides. The
    others lie in temporary files without a name in the store's folder meanwhile: as many bytes as they, their keys and
    last changes take. Memory: ``REWRITE_BYTES`` and a slice of ``uses``. Rows that were stored keep their last change;
    that of the others is the commit that this becomes. ``stored`` gives the rows of a table that come from elsewhere,
    for a store without a commit; None: its own.
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
    ) -> None:
        self._reader, self._snapshot, self._uses, self._progress = reader, snapshot, uses, progress
        self._retain_segments = retain_segments
        self._stored = stored
        self._first_rows = first_rows or initial_rows
        self._groups = [_Sorted(group, uses, layout, reader.scratch) for group in reader.groups]
        self.retained: tuple[RetainedSegment, ...] = ()
        """The segments that stay; known after ``read``."""

    def __enter__(self) -> Rewrite:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._groups:
            group.close()

    def read(self) -> tuple[SegmentLayout, ...]:
        """Read rows into their order, make those that are missing, and return the layout of the new segment.

        Raises StoreFullError, before a row is read where it is known by then.
        """
        with ExitStack() as stack:
            moves: RowFilter | None = None
            compaction: CompactionPlan | None = None
            if self._retain_segments:
                compaction = stack.enter_context(
                    CompactionPlan(self._reader, self._snapshot, self._uses, self._progress)
                )
                compaction.sort()
                self.retained, moves = compaction.retained, compaction.moves
            self._check_room(compaction)
            for ordered in self._groups:
                for place, table in enumerate(ordered.group.tables):
                    for keys, rows, uses in self._merged(table, moves):
                        ordered.put(place, keys, rows, uses)
                        self._progress("read", keys.size)
        return tuple(ordered.layout() for ordered in self._groups)

    def moved(self) -> list[bool]:
        """Return of which groups the last changes are to be stored: those that have several. Known after ``read``."""
        return [ordered.oldest < ordered.newest for ordered in self._groups]

    def blocks(self, layouts: Sequence[SegmentLayout]) -> Iterator[MovedBlock]:
        """Yield the blocks of the new segment, rows and keys of all in the same two arrays."""
        for ordered, layout in zip(self._groups, layouts, strict=True):
            for block in moved_blocks_of(ordered.group, layout, ordered.chunks(layout.block_rows)):
                self._progress("write", block[3].size)
                yield block

    def _check_room(self, compaction: CompactionPlan | None) -> None:
        """Raise StoreFullError where there is less room than temporary files will take, as far as that is known."""
        exact = compaction is not None or (self._stored is None and not any(group.used for group in self._groups))
        num_bytes = 0
        for ordered in self._groups:
            rows = ordered.used
            if compaction is not None:
                rows += compaction.idle_rows(ordered.group.index)
            elif self._stored is None:  # of the rows that are used some are stored, nobody knows which
                rows = max(rows, sum(self._snapshot.live_rows(ordered.group, table) for table in ordered.group.tables))
            num_bytes += rows * ordered.entry_bytes
        with room_for(num_bytes, self._reader.scratch, _WHAT, at_least=not exact):
            check_room(self._reader.scratch, num_bytes)

    def _moved(self, table: Table, moves: RowFilter | None) -> RowChunks:
        """Yield the store's own rows that move."""
        chunks = scan_segments(
            self._reader, self._snapshot, self._snapshot.segments, table.name,
            choice=moves, memory_bytes=REWRITE_BYTES, as_words=True, changed=True,
        )  # fmt: skip
        return ((keys, np.concatenate(fields, axis=1)) for keys, fields in chunks)

    def _merged(self, table: Table, moves: RowFilter | None) -> Iterator[tuple[Int64s, Floats, Int64s]]:
        """Yield keys, rows and first uses of all rows that are stored and move, or wanted, in hash order.

        Rows are words, and last their last change.
        """
        id_ = 0 if self._snapshot.commit is None else self._snapshot.commit.id + 1
        rows_of_store = self._moved(table, moves) if self._stored is None else self._stored(table)
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


class _Sorted:
    """The rows of one group, each written where it belongs in the order (first use, table, arrival)."""

    def __init__(self, group: Group, uses: FirstUses, layout: Layout, scratch: Path) -> None:
        self.group, self._layout = group, layout
        counts = [Counter(uses.counts(table.name)) for table in group.tables]
        self._uses = sorted({use for of_table in counts for use in of_table})
        self._counts = {(use, i): counts[i][use] for use in self._uses for i in range(len(counts))}
        self._next, row = {}, 0
        for place, count in self._counts.items():
            self._next[place] = row
            row += count
        self.used = row
        """How many rows are used first at some pass."""
        self._never = [0] * len(counts)
        self._row_bytes = group.row_bytes + CHANGED_BYTES
        self.entry_bytes = 8 + self._row_bytes
        """What the files take for a row."""
        self.oldest, self.newest = (1 << 32) - 1, 0
        """The least and the greatest last change."""
        self._keys, self._rows = (ScratchFile(scratch, _WHAT) for _ in range(2))

    def close(self) -> None:
        """Give up the files."""
        self._keys.close()
        self._rows.close()

    def put(self, place: int, keys: Int64s, rows: Floats, uses: Int64s) -> None:
        """Write rows of one table; its NEVER rows must come after those of the tables before. Raises StoreFullError.

        Rows are (n, W + 1) words, the last of them their last change.
        """
        changed = rows[:, -1].view(np.uint32)
        self.oldest, self.newest = min(self.oldest, int(changed.min())), max(self.newest, int(changed.max()))
        order = np.argsort(uses, kind="stable")
        ends = np.append(np.nonzero(np.diff(uses[order]))[0] + 1, order.size).tolist()
        begin = 0
        for end in ends:
            rows_of_store, use = order[begin:end], int(uses[order[begin]])
            if use == NEVER:
                row = self.used + sum(self._never)
                self._never[place] += end - begin
            else:
                row = self._next[use, place]
                self._next[use, place] += end - begin
            self._keys.write(keys[rows_of_store], 8 * row)
            self._rows.write(rows[rows_of_store], self._row_bytes * row)
            begin = end

    def layout(self) -> SegmentLayout:
        """Return the layout of all rows. Raises StoreError where others came than were counted."""
        row = 0
        for place, count in self._counts.items():
            row += count
            if self._next[place] != row:
                name = self.group.tables[place[1]].name
                raise StoreError(
                    f"pass {place[0]} was said to use {count:,} keys of table {name!r} first, and others came: "
                    "the key sets changed meanwhile"
                )
        tables = range(len(self.group.tables))
        ranges = [Range(next_use=use, table_rows=tuple(self._counts[use, i] for i in tables)) for use in self._uses]
        if any(self._never):
            ranges.append(Range(next_use=NEVER, table_rows=tuple(self._never)))
        return self._layout(self.group, ranges)

    def chunks(self, chunk_rows: int) -> Iterator[tuple[Int64s, Floats]]:
        """Yield all rows in order, so many at a time."""
        total = self.used + sum(self._never)
        for row in range(0, total, chunk_rows):
            count = min(chunk_rows, total - row)
            keys = np.empty(count, dtype=np.int64)
            rows = np.empty((count, self._row_bytes // 4), dtype=np.float32)
            self._keys.read(keys, 8 * row)
            self._rows.read(rows, self._row_bytes * row)
            yield keys, rows
