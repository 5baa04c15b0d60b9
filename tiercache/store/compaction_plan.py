"""The plan of a rewrite: segments that stay where they are, and rows of the others that move."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.external_sort import ExternalSorter, flush_largest
from tiercache.store.files import ScratchFile
from tiercache.store.live_keys import KEY_THREADS, live_keys
from tiercache.store.runs import SortedCursor, hashed, merged
from tiercache.store.segment import RetainedSegment

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.reading import BlockReader
    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Group, Table

MOST_RETAINED = 256
"""The most segments that are left: a scan holds a page of each of their ranges, a lookup reads keys of each."""
COMPACTION_BYTES = 128 << 20
NUMBER_BYTES = 8
"""Of what stands beside a key while keys are sorted: the number of its row."""
_IDLE, _STALE, _USED = 0, 1, 2
"""What a row is to the schedule: the newest of a key that it does not use, not the newest, or the newest of one that
it does."""


class FirstUses(Protocol):
    """When the keys of a schedule are used first."""

    def counts(self, table_name: str) -> Mapping[int, int]:
        """Return how many keys of a table have each first use."""

    def slices(self, table_name: str) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield keys (n,) in hash order, each once, and their first uses (n,), a bounded number at a time."""


class NoUses:
    """No key is used: all rows in hash order."""

    def counts(self, _table_name: str) -> Mapping[int, int]:
        """Return none."""
        return {}

    def slices(self, _table_name: str) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Yield none."""
        return iter(())


class CompactionPlan:
    """Sorts all live rows by what a schedule does with them: from their keys and its first uses, no row is read.

    A segment is retained where rows that are neither used nor stale have at least half of its live bytes, so that it
    never takes more than twice what is needed of it; of more than ``MOST_RETAINED`` such segments those with the most;
    never one that a commit inside a pass wrote.
    Everything else moves: the used rows of retained segments, and of the others all rows that are not stale. So what
    moves unused has fewer bytes than what is used or stale beside it, unless segments are too many.

    Takes ``COMPACTION_BYTES`` and a slice of ``uses``. Temporary files: a byte for each live row, mapped into memory;
    and where keys exceed the memory, 16 bytes for each of a group's, which are sorted there.
    """

    def __init__(
        self, reader: BlockReader, snapshot: Snapshot, uses: FirstUses, progress: Callable[[str, int], None]
    ) -> None:
        self._reader, self._snapshot, self._uses, self._progress = reader, snapshot, uses, progress
        self._files = ExitStack()
        try:
            self._groups = [_GroupRows(snapshot, group, reader.scratch, self._files) for group in reader.groups]
        except BaseException:
            self._files.close()
            raise
        self.retained: tuple[RetainedSegment, ...] = ()
        """What is left where it is, by segment id; known after ``sort``."""
        self._retained_ids = frozenset[int]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rows in self._groups:
            rows.forget()
        self._files.close()

    def sort(self, *, overlay: bool = False) -> None:
        """Read all keys and decide. Raises StoreFullError and CorruptStoreError.

        ``overlay``: what was appended since the newest commit hides rows of before, and no segment moves.
        """
        for rows in self._groups:
            rows.sort(self._reader, self._snapshot, self._uses, self._progress)
        segments = self._snapshot.segments
        needed_S, live_S = (np.zeros(len(segments), dtype=np.int64) for _ in range(2))
        for rows in self._groups:
            needed_S += rows.group.row_bytes * rows.needed_ST.sum(axis=1)
            live_S += rows.group.row_bytes * rows.live_ST.sum(axis=1)
        if overlay:
            committed = {segment.id for segment in self._snapshot.committed}
            may_S = np.array([segment.id in committed for segment in segments], dtype=np.bool_)
            kept = np.nonzero((needed_S > 0) & may_S)[0]
        else:
            may_S = np.array([not s.within or s.pass_index < 0 for s in segments], dtype=np.bool_)
            worth = np.nonzero((2 * needed_S >= live_S) & (needed_S > 0) & may_S)[0]
            kept = np.sort(worth[np.argsort(-needed_S[worth], kind="stable")[:MOST_RETAINED]])
        self.retained = tuple(
            RetainedSegment(
                segment_id=segments[i].id,
                stale_rows=tuple(tuple((rows.live_ST[i] - rows.needed_ST[i]).tolist()) for rows in self._groups),
            )
            for i in kept.tolist()
        )
        self._retained_ids = frozenset(one.segment_id for one in self.retained)

    def idle_rows(self, group: int) -> int:
        """Return how many rows of a group move although the schedule does not use them."""
        return self._groups[group].idle_rows(but=self._retained_ids)

    def moves(self, segment: Segment, group: int, low: int, high: int) -> NDArray[np.bool_]:
        """Return which of the live rows [low, high) of a layout move: (high - low,)."""
        marks = self._groups[group].marks_of(segment, low, high)
        moved: NDArray[np.bool_] = marks == _USED if segment.id in self._retained_ids else marks != _STALE
        return moved


class _GroupRows:
    """The live rows of one group, each with a mark. Shapes: S segments, T tables of the group.

    A live row has a number: rows count on from segment to segment, so that of two rows of a key that with the
    greater number is newer.
    """

    def __init__(self, snapshot: Snapshot, group: Group, scratch: Path, files: ExitStack) -> None:
        self.group = group
        counts, self._dead = [], {}
        for segment in snapshot.segments:
            layout, first = segment.layouts[group.index], snapshot.first_range(segment, group.index)
            counts.append([layout.rows_of_table(place, first) for place in range(len(group.tables))])
            self._dead[segment.id] = layout.first_row_R.item(first)
        self.live_ST = np.array(counts, dtype=np.int64).reshape(len(counts), len(group.tables))
        """(S, T): live rows."""
        self.needed_ST = np.zeros_like(self.live_ST)
        """(S, T): those that are neither used nor stale."""
        self._starts_S = np.append(0, np.cumsum(self.live_ST.sum(axis=1)))
        """(S + 1,): the number of each segment's first live row."""
        self._index = {segment.id: i for i, segment in enumerate(snapshot.segments)}
        size = max(1, int(self._starts_S[-1]))
        file = files.enter_context(ScratchFile(scratch, "sorting out the rows that a schedule uses"))
        self._marks: NDArray[np.uint8] = file.map(size)

    def forget(self) -> None:
        """Give up the marks."""
        self._marks = np.empty(0, dtype=np.uint8)

    def marks_of(self, segment: Segment, low: int, high: int) -> NDArray[np.uint8]:
        """Return the marks of live rows [low, high) of a layout."""
        start = int(self._starts_S[self._index[segment.id]]) - self._dead[segment.id]
        return self._marks[start + low : start + high]

    def idle_rows(self, *, but: Collection[int]) -> int:
        """Return how many rows in all segments but those of these ids are neither used nor stale; after ``sort``."""
        return sum(int(self.needed_ST[i].sum()) for id_, i in self._index.items() if id_ not in but)

    def sort(
        self, reader: BlockReader, snapshot: Snapshot, uses: FirstUses, progress: Callable[[str, int], None]
    ) -> None:
        """Mark every row."""
        with ExitStack() as stack:
            sorters = [
                stack.enter_context(
                    ExternalSorter(
                        ["<i8"], reader.scratch, f"sorting the keys of table {table.name!r}", COMPACTION_BYTES,
                        reader.counters, copies=max(2, len(snapshot.segments)), total_rows=total,
                    )
                )
                for table, total in zip(self.group.tables, self.live_ST.sum(axis=0).tolist(), strict=True)
            ]  # fmt: skip
            readers = stack.enter_context(ThreadPoolExecutor(KEY_THREADS))
            every = dict.fromkeys(range(len(sorters)), None)
            for segment, place, keys, rows in live_keys(
                reader, snapshot, snapshot.segments, self.group, every, readers, after=-1
            ):
                start = int(self._starts_S[self._index[segment.id]]) - self._dead[segment.id]
                sorters[place].add(hash_keys(keys, self.group.tables[place].table_id), start + rows)
                flush_largest(sorters)
                progress("sort", keys.size)
            for place, (table, sorter) in enumerate(zip(self.group.tables, sorters, strict=True)):
                self._mark(place, table, SortedCursor(sorter.sorted(), np.int64), uses)
                sorter.close()

    def _mark(self, place: int, table: Table, stored: SortedCursor, uses: FirstUses) -> None:
        """Mark the rows of one table: ``stored`` has their numbers by hash, those of a key in the order of age."""
        schedule = SortedCursor(hashed(table, uses.slices(table.name)), np.int64, np.int64)
        for (hashes, numbers), (used_hashes, _, _) in merged(stored, schedule):
            if not hashes.size:
                continue
            newest = np.append(hashes[1:] != hashes[:-1], True)
            used = np.isin(hashes, used_hashes)
            self._marks[numbers[~newest]] = _STALE
            self._marks[numbers[newest & used]] = _USED
            idle = np.searchsorted(self._starts_S, numbers[newest & ~used], side="right") - 1
            self.needed_ST[:, place] += np.bincount(idle, minlength=self.needed_ST.shape[0])
