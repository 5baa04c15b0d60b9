"""The invariants of keys, which no checksum covers: their order, and what ``KeyCounts`` counts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.errors import CorruptStoreError
from tiercache.store.external_sort import ExternalSorter, flush_largest
from tiercache.store.hashing import hash_keys
from tiercache.store.key_counts import KeyCounts
from tiercache.store.merge import rising
from tiercache.store.read_ahead import read_ahead
from tiercache.store.scratch_file import scratch_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.store import Store
    from tiercache.store.table import Group

    UInt64s = NDArray[np.uint64]
    LastChanges = NDArray[np.uint32] | int
    """Those of rows (n,), or the one of all."""

READERS = 8
"""Threads that read blocks of keys, which wait for the disk behind blocks of rows: with more of them all keys are there
early, and sorted while rows are still read: by hand, in turns, 0.75 of the seconds on LMDB, 0.85 on Zarr."""
SORT_BYTES = 128 << 20
"""Memory of the sort of hashes."""
AHEAD_BYTES = 32 << 20
"""Memory of the blocks of keys that wait for it; one block that is larger waits alone."""
VERIFY_BYTES = 256 << 20
"""About the most that ``verify`` takes beside its interpreter, whatever is stored: ``SORT_BYTES``, ``AHEAD_BYTES``, and
for each of the four threads that read rows a block, of 4 MiB where nothing else is chosen, and as much to decompress
it: 128 + 32 + 4 * 8 = 192 MiB. 64 MiB are left for hashes of a block and what the allocator keeps. The records of the
commits, which every opened store has in memory, come to it: some bytes for each range and page."""
MOST_COPIES = 1 << 16
"""Rows of one key that are counted, where the memory of the sort holds fewer. A commit has one in each segment."""

_MOST_CHANGED = (1 << 32) - 1
"""What a record may say beyond it is no commit."""


class KeyInvariantChecker:
    """Whether the live keys of a group stand in hash order, and at each of several commits as ``KeyCounts`` says.

    Last changes are read with the keys; they take part only where rows are stale.
    """

    def __init__(self, stores: Sequence[Store], group: Group, readers: ThreadPoolExecutor) -> None:
        """``stores`` are one store, each opened at one commit."""
        self._store, self._group, self._readers = stores[0], group, readers
        self._commits = [-1 if store.commit is None else store.commit.id for store in stores]
        self._problems: dict[str, dict[int, None]] = {}
        segments = {segment.id: segment for store in stores for segment in store.segments}
        self._segments = [segments[id_] for id_ in sorted(segments)]
        self._firsts = {id_: first for store in stores if store.commit for id_, first in store.commit.named.items()}
        self._unread = set[int]()
        """Commits that need keys which could not be read."""
        self._counts = KeyCounts(stores, group, self._segments)
        self._live = [{s.id: store.first_range(s, group.index) for s in store.segments} for store in stores]
        """For each store, by segment: its first live range."""

    def run(self) -> dict[str, list[int]]:
        """Read all keys once; returns what is wrong, with the commits it is in. Each thing that is wrong is a sentence.

        Keys that exceed the memory of the sort go through temporary files: 8 bytes for each key where one commit is
        kept, 12 where several are, 16 where rows are stale. Raises StoreFullError where there is no room for them.
        """
        folder = scratch_of(self._store)
        with ExitStack() as stack:
            sorters = [
                stack.enter_context(
                    ExternalSorter(
                        self._counts.payload(table), folder, "the check of the keys of a store", SORT_BYTES,
                        self._store.counters, copies=MOST_COPIES, total_rows=rows,
                    )
                )
                for table, rows in enumerate(self._table_rows())
            ]  # fmt: skip
            for table, number, hashes, changed in self._sweep():
                sorters[table].add(hashes, *(number, changed)[: len(self._counts.payload(table))])
                flush_largest(sorters)
            for table, sorter in enumerate(sorters):
                for columns in sorter.sorted():
                    self._counts.add(table, *columns)
                sorter.close()
        for sentence, commit in self._counts.problems(self._unread):
            self._note(sentence, [commit])
        return {sentence: list(commits) for sentence, commits in self._problems.items()}

    def _table_rows(self) -> list[int]:
        """Return how many rows of each table are live at a commit."""
        counts = np.zeros(len(self._group.tables), np.int64)
        for segment in self._segments:
            layout, first = segment.layouts[self._group.index], min(self._first_ranges(segment.id))
            counts += [layout.rows_of_table(place, first) for place in range(counts.size)]
        return [int(count) for count in counts]

    def _first_ranges(self, segment_id: int) -> list[int]:
        """Return the first live range of a segment at each commit that has it."""
        return [live[segment_id] for live in self._live if segment_id in live]

    def _sweep(self) -> Iterator[tuple[int, int, UInt64s, LastChanges]]:
        """Yield the hashes of all keys that are live at a commit, each block read once, with their last changes.

        Before them come the place of their table and the number of their range among those of all segments. Notes what
        is out of order.
        """
        for segment, first in zip(self._segments, self._counts.first_range_S.tolist(), strict=True):
            last_run, last_hash = -1, 0
            for run, hashes, changed in self._runs(segment):
                index, place = divmod(run, len(self._group.tables))
                if not rising(hashes, last_hash if run == last_run else None):
                    self._note(
                        f"segment {segment.id} of {self._store.label} has keys of table "
                        f"{self._group.tables[place].name!r} that are not in hash order: restore the store from a copy",
                        self._commits_of(segment, index),
                    )
                last_run, last_hash = run, int(hashes[-1])
                yield place, first + index, hashes, changed

    def _runs(self, segment: Segment) -> Iterator[tuple[int, UInt64s, LastChanges]]:
        """Yield the keys of each table of each live range, cut where blocks end: run, hashes and last changes."""
        layout, num_tables = segment.layouts[self._group.index], len(self._group.tables)
        counts = layout.table_rows_RT.reshape(-1)
        bounds = np.append(0, np.cumsum(counts))
        first = int(bounds[min(self._first_ranges(segment.id)) * num_tables])
        if first == layout.rows:
            return  # all is dead, and freed, while other groups keep the segment
        blocks = [(segment, block) for block in range(first // layout.block_rows, layout.num_blocks)]
        most = max(0, min(READERS, AHEAD_BYTES // (12 * layout.block_rows) - 1))
        for (_, block), (keys, changed, problems) in read_ahead(self._readers, self._read, blocks, most=most):
            start, end = layout.rows_of_block(block)
            for problem in problems:
                last = int(np.searchsorted(bounds, end - 1, side="right") - 1) // num_tables
                self._note(problem, self._commits_of(segment, last))
                self._unread.update(self._commits_of(segment, last))
            if keys is None:
                continue
            base, start = start, max(start, first)
            run = int(np.searchsorted(bounds, start, side="right")) - 1
            while start < end:
                until = min(end, int(bounds[run + 1]))
                if start < until:
                    table = self._group.tables[run % num_tables]
                    mine = slice(start - base, until - base)
                    last_changes = changed if isinstance(changed, int) else changed[mine]
                    yield run, hash_keys(keys[mine], table.table_id), last_changes
                start, run = until, run + 1

    def _commits_of(self, segment: Segment, index: int) -> list[int]:
        """Return the commits at which range ``index`` of a segment is live."""
        return [
            commit
            for commit, live in zip(self._commits, self._live, strict=True)
            if segment.id in live and live[segment.id] <= index
        ]

    def _read(self, segment: Segment, block: int) -> tuple[NDArray[np.int64] | None, LastChanges, list[str]]:
        """Return keys and last changes of a block, and what is wrong with either."""
        group, problems = self._group.index, list[str]()
        keys: NDArray[np.int64] | None = None
        changed: LastChanges = min(self._firsts.get(segment.id, 0), _MOST_CHANGED)
        try:
            keys = self._store.read_keys(segment, group, block)
        except CorruptStoreError as error:
            problems.append(str(error))
        if segment.changed:
            changed = int(segment.changed[group].newest_B[block])
        if segment.changed and segment.changed[group].stored:
            try:
                changed = self._store.read_changed(segment, group, block)
            except CorruptStoreError as error:
                problems.append(str(error))
        return keys, changed, problems

    def _note(self, sentence: str, commits: Sequence[int]) -> None:
        self._problems.setdefault(sentence, {}).update(dict.fromkeys(commits))
