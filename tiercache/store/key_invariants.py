"""The invariants of keys, which no checksum covers: their order and their counts."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.bits import hash_keys
from tiercache.store.external_sort import ExternalSorter, flush_largest, rising
from tiercache.store.reading import BlockReader, read_ahead
from tiercache.store.store_errors import ADVICE, CorruptStoreError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import DTypeLike, NDArray

    from tiercache.store.commit import Commit
    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Group

    UInt64s = NDArray[np.uint64]
    UInt32s = NDArray[np.uint32]
    from concurrent.futures import ThreadPoolExecutor

    LastChanges = NDArray[np.uint32] | int
    """The last changes of rows (n,), or one for all."""


class KeyCounts:
    """Counts the violations in the keys of one group. Shapes: C commits, T tables, S segments, N ranges of all.

    At each commit a key has one live row. A commit with retained segments may also have stale rows of the key: each in
    an older segment than the next, which is retained; in each segment as many as the commit says; and none that changed
    after the next. A key of a commit is in all later ones too, unless a rollback gave it up.
    """

    def __init__(self, label: str, snapshots: Sequence[Snapshot], group: Group, segments: Sequence[Segment]) -> None:
        """``snapshots`` are the commits of one store, the oldest first; ``segments`` all their segments, by id."""
        self._group, self._label, self._ids = group, label, [segment.id for segment in segments]
        self._commits = [snapshot.id for snapshot in snapshots]
        commits = [snapshot.commit for snapshot in snapshots]
        self._before = [_before(commits[: c + 1]) for c in range(len(commits))]
        counts = np.array([segment.layouts[group.index].num_ranges for segment in segments], np.int64)
        self.first_range_S = np.cumsum(counts) - counts
        """(S,): the first range of each segment, in the numbering of all ranges."""
        self._segment_N = np.repeat(np.arange(counts.size), counts)
        self._live_CN = np.zeros((len(snapshots), self._segment_N.size), np.bool_)
        shape = len(snapshots), len(group.tables), len(segments)
        self._stated_CTS, self._found_CTS = np.zeros((2, *shape), np.int64)
        self._twice_CT, self._aged_CT, self._lost_CT = np.zeros((3, *shape[:2]), np.int64)
        place = {id_: i for i, id_ in enumerate(self._ids)}
        for c, snapshot in enumerate(snapshots):
            for segment in snapshot.segments:
                first, i = int(self.first_range_S[place[segment.id]]), place[segment.id]
                self._live_CN[c, first + snapshot.first_range(segment, group.index) : first + int(counts[i])] = True
                for i, table in enumerate(group.tables):
                    stale = snapshot.stale_rows([segment], group, table)
                    self._stated_CTS[c, i, place[segment.id]] = stale

    def payload(self, table: int) -> list[DTypeLike]:
        """Return the dtypes that ``add`` needs in addition to a table's hashes: ranges, or also last changes, or none.

        If one commit is kept and each key has at most one live row, it needs neither: most stores are like that.
        """
        if self._stated_CTS[:, table].any():
            return [np.uint32, np.uint32]
        return [np.uint32] if len(self._commits) > 1 else []

    def add(self, table: int, hashes: UInt64s, ranges: UInt32s | None = None, changed: UInt32s | None = None) -> None:
        """Count rows of a table in hash order; rows of one hash by segment, all in one call.

        They are live at one commit or more. ``ranges`` number their ranges among those in all segments, ``changed`` are
        their last changes: as ``payload`` says.
        """
        for c, live_N in enumerate(self._live_CN):
            live = None if ranges is None or len(self._commits) == 1 else live_N[ranges]
            selected = hashes if live is None else hashes[live]
            again = np.nonzero(selected[1:] == selected[:-1])[0]
            if self._stated_CTS[c, table].any() and ranges is not None and changed is not None:
                of_rows = (ranges, changed) if live is None else (ranges[live], changed[live])
                self._add_stale(c, table, again, *of_rows)
            else:
                self._twice_CT[c, table] += again.size
            before = self._before[c]
            if before is not None and ranges is not None:
                # Hashes with live rows in the same ranges lost none.
                gone_N = self._live_CN[before] & ~live_N
                if gone_N.any():
                    self._lost_CT[c, table] += _missing(hashes[gone_N[ranges]], selected)

    def problems(self, unread: Collection[int]) -> Iterator[tuple[str, int]]:
        """Yield each problem and its commit, but none that unread data of that commit may explain."""
        over_CT = np.maximum(self._found_CTS - self._stated_CTS, 0).sum(axis=2) + self._twice_CT
        for i, table in enumerate(self._group.tables):
            name = f"table {table.name!r} of {self._label}"
            for c, commit in enumerate(self._commits):
                if over := int(over_CT[c, i]):
                    yield f"{over} keys of {name} have two live rows: {ADVICE}", commit
                if commit in unread:
                    continue
                if lacking := np.nonzero(self._found_CTS[c, i] < self._stated_CTS[c, i])[0].tolist():
                    found, stated = (int(n[c, i, lacking].sum()) for n in (self._found_CTS, self._stated_CTS))
                    where = f"in segments {', '.join(str(self._ids[s]) for s in lacking)}"
                    yield f"{name} has {found} stale rows, but its commit says {stated}, {where}: {ADVICE}", commit
                if aged := int(self._aged_CT[c, i]):
                    yield f"{aged} keys of {name} have a row that changed after a newer one: {ADVICE}", commit
                if lost := int(self._lost_CT[c, i]):
                    before = self._before[c]
                    assert before is not None, "only of those is a key lost"
                    had = f"{lost} keys of {name} have no row, but had one at commit {self._commits[before]}"
                    yield f"{had}: roll the store back to that, or restore it from a copy", commit

    def _add_stale(self, c: int, table: int, again: NDArray[Any], ranges: UInt32s, changed: UInt32s) -> None:
        """Count, by segment, the rows made stale by the next row of the same hash."""
        in_segments = self._segment_N[ranges[again]]
        same = in_segments == self._segment_N[ranges[again + 1]]
        self._twice_CT[c, table] += np.count_nonzero(same)
        self._found_CTS[c, table] += np.bincount(in_segments[~same], minlength=len(self._ids))
        self._aged_CT[c, table] += np.count_nonzero(changed[again] > changed[again + 1])


def _before(commits: Sequence[Commit | None]) -> int | None:
    """Return the index of the newest commit before the last that was not dropped; None if keys were forgotten since."""
    *older, last = commits
    for c in reversed(range(len(older))):
        one = older[c]
        if last is not None and one is not None and not any(a <= one.id <= b for a, b in last.abandoned):
            return None if one.id < last.forgot else c
    return None


def _missing(hashes: UInt64s, among: UInt64s) -> int:
    """Return the number of distinct hashes missing from ``among``; both are sorted."""
    if among.size:
        at = np.minimum(np.searchsorted(among, hashes), among.size - 1)
        hashes = hashes[among[at] != hashes]
    return 0 if not hashes.size else 1 + int(np.count_nonzero(hashes[1:] != hashes[:-1]))


KEY_CHECK_THREADS = 8
"""Threads that read blocks of keys. They share the disk with blocks of rows; with more threads all keys arrive early
and are sorted while rows are still read: measured by hand, in turns, 0.75 of the seconds on LMDB, 0.85 on Zarr."""
SORT_BYTES = 128 << 20
"""Memory of the sort of hashes."""
AHEAD_BYTES = 32 << 20
"""Memory of the blocks of keys that wait for the sort; a larger block waits alone."""
VERIFY_BYTES = 256 << 20
"""Approximate memory limit of ``verify`` in addition to its interpreter, for any store: ``SORT_BYTES``,
``AHEAD_BYTES``, and for each of the four threads that read rows a block, 4 MiB by default, and as much to decompress
it: 128 + 32 + 4 * 8 = 192 MiB. 64 MiB are left for hashes of a block and the allocator. The records of the commits,
which every open store has in memory, are extra: some bytes for each range and page."""
MOST_COPIES = 1 << 16
"""Rows of one key that are counted if the memory of the sort holds fewer. A commit has one in each segment."""

_MOST_CHANGED = (1 << 32) - 1
"""Larger values in a record are invalid."""


class KeyInvariantChecker:
    """Checks that the live keys of a group are in hash order, and satisfy ``KeyCounts`` at each commit.

    Last changes are read with the keys; they are used only for stale rows.
    """

    def __init__(
        self, reader: BlockReader, snapshots: Sequence[Snapshot], group: Group, readers: ThreadPoolExecutor
    ) -> None:
        """``snapshots`` are commits of one store, held by the caller."""
        self._reader, self._group, self._readers = reader, group, readers
        self._commits = [snapshot.id for snapshot in snapshots]
        self._problems: dict[str, dict[int, None]] = {}
        segments = {segment.id: segment for snapshot in snapshots for segment in snapshot.segments}
        self._segments = [segments[id_] for id_ in sorted(segments)]
        self._firsts = {id_: first for one in snapshots if one.commit for id_, first in one.commit.named.items()}
        self._unread = set[int]()
        """Commits that need keys which could not be read."""
        self._counts = KeyCounts(reader.label, snapshots, group, self._segments)
        self._live = [{s.id: one.first_range(s, group.index) for s in one.segments} for one in snapshots]
        """For each commit, by segment: its first live range."""

    def run(self) -> dict[str, list[int]]:
        """Read all keys once; returns a message for each problem, with its commits.

        Keys that exceed the memory of the sort go through temporary files: 8 bytes for each key if one commit is kept,
        12 if several are, 16 if rows are stale. Raises StoreFullError if there is not enough room.
        """
        what = "the check of the keys of a store"
        with ExitStack() as stack:
            sorters = [
                stack.enter_context(
                    ExternalSorter(
                        self._counts.payload(table), self._reader.scratch, what, SORT_BYTES,
                        self._reader.counters, copies=MOST_COPIES, total_rows=rows,
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
        counts = np.zeros(len(self._group.tables), np.int64)
        for segment in self._segments:
            layout, first = segment.layouts[self._group.index], min(self._first_ranges(segment.id))
            counts += [layout.rows_of_table(place, first) for place in range(counts.size)]
        return [int(count) for count in counts]

    def _first_ranges(self, segment_id: int) -> list[int]:
        return [live[segment_id] for live in self._live if segment_id in live]

    def _sweep(self) -> Iterator[tuple[int, int, UInt64s, LastChanges]]:
        """Yield the hashes of all keys that are live at a commit, each block read once, with their last changes.

        The index of their table and the number of their range among all segments' ranges come first. Notes keys that
        are out of order.
        """
        for segment, first in zip(self._segments, self._counts.first_range_S.tolist(), strict=True):
            last_run, last_hash = -1, 0
            for run, hashes, changed in self._runs(segment):
                index, place = divmod(run, len(self._group.tables))
                if not rising(hashes, last_hash if run == last_run else None):
                    self._note(
                        f"segment {segment.id} of {self._reader.label} has keys of table "
                        f"{self._group.tables[place].name!r} that are not in hash order: {ADVICE}",
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
        most = max(0, min(KEY_CHECK_THREADS, AHEAD_BYTES // (12 * layout.block_rows) - 1))
        for (_, block), (keys, changed, problems) in read_ahead(self._readers, self._read, blocks, most=most):
            start, end = layout.rows_of_block(block)
            for problem in problems:
                last = int(np.searchsorted(bounds, end - 1, side="right") - 1) // num_tables
                self._note(problem, self._commits_of(segment, last))
                self._unread.update(self._commits_of(segment, last))
            if keys is None:
                continue
            begin = int(np.searchsorted(bounds, max(start, first), side="right")) - 1
            for run in range(begin, int(np.searchsorted(bounds, end))):
                low, high = max(start, first, int(bounds[run])), min(end, int(bounds[run + 1]))
                if low < high:
                    selected = slice(low - start, high - start)
                    last_changes = changed if isinstance(changed, int) else changed[selected]
                    yield run, hash_keys(keys[selected], self._group.tables[run % num_tables].table_id), last_changes

    def _commits_of(self, segment: Segment, index: int) -> list[int]:
        return [
            commit
            for commit, live in zip(self._commits, self._live, strict=True)
            if segment.id in live and live[segment.id] <= index
        ]

    def _read(self, segment: Segment, block: int) -> tuple[NDArray[np.int64] | None, LastChanges, list[str]]:
        group, problems = self._group.index, list[str]()
        keys: NDArray[np.int64] | None = None
        changed: LastChanges = min(self._firsts.get(segment.id, 0), _MOST_CHANGED)
        try:
            keys = self._reader.keys(segment, group, block)
        except CorruptStoreError as error:
            problems.append(str(error))
        if (stored := segment.meta[group].changed) is not None:
            changed = int(stored.newest_B[block])
        if stored is not None and stored.stored:
            try:
                changed = self._reader.changed(segment, group, block)
            except CorruptStoreError as error:
                problems.append(str(error))
        return keys, changed, problems

    def _note(self, sentence: str, commits: Sequence[int]) -> None:
        self._problems.setdefault(sentence, {}).update(dict.fromkeys(commits))
