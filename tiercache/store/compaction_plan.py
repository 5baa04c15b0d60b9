"""The plan of a rewrite: segments that stay where they are, and rows of the others that move."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import numpy as np

from tiercache.store import external_sort
from tiercache.store.bits import HASHES, hash_keys
from tiercache.store.external_sort import (
    HASH_BYTES,
    SLICES,
    ExternalSorter,
    SortedCursor,
    below,
    file_bytes,
    flush_largest,
    hash_slices,
    hashed,
    merged,
)
from tiercache.store.files import ScratchFile, paged
from tiercache.store.live_keys import KEY_THREADS, live_keys
from tiercache.store.reading import BlockReader, read_ahead
from tiercache.store.scan import runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.snapshot import Snapshot
    from tiercache.store.table import Group


MOST_RETAINED = 256
"""Maximum number of retained segments: a scan holds a page of each of their ranges, a lookup reads keys of each."""
COMPACTION_BYTES = 128 << 20
NUMBER_BYTES = 8
"""Bytes of the number that is sorted along with a key or a row."""
_WHAT = "finding the rows that a schedule uses"


class FirstUses(Protocol):
    """The first use of each key in a schedule."""

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
    """Sorts all live rows by their role in a schedule: reads their keys and ``uses``, but no rows.

    A segment is retained if rows that are neither used nor stale have at least half of its live bytes, so that it never
    takes more than twice its needed bytes; of more than ``MOST_RETAINED`` such segments those with the most; never
    one that a commit inside a pass wrote. Everything else moves: the used rows of retained segments, and of the others
    all rows that are not stale. So unused rows that move have fewer bytes than the used and stale rows of their
    segments, unless there are too many segments.

    Takes ``COMPACTION_BYTES`` and a slice of ``uses``. Temporary files: see ``key_scratch_bytes``; keys that fit the
    memory need none but the marks.
    """

    def __init__(
        self, reader: BlockReader, snapshot: Snapshot, uses: FirstUses, progress: Callable[[str, int], None],
        files: ExitStack,
    ) -> None:  # fmt: skip
        """``files`` closes its temporary files. Raises StoreFullError."""
        self._reader, self._snapshot, self._uses, self._progress = reader, snapshot, uses, progress
        self._groups = [_GroupRows(reader, snapshot, group, files) for group in snapshot.groups]
        self.retained: dict[int, NDArray[np.int64]] = {}
        """The segments that stay in place, by id, each with the number of stale ones among its live rows of each table
        (T,), in the order of groups; set by ``sort``.

        They are older than all others that the commit names. A row of theirs is stale where a newer segment has its key
        too. Rows become stale only at the commit that begins a schedule: no pass of it dumps a key whose row it left
        here."""

    def sort(self, *, overlay: bool = False) -> None:
        """Read all keys and decide. ``overlay``: appended rows hide older ones, and no segment moves."""
        for rows in self._groups:
            rows.is_rewritten = not overlay
            rows.sort(self._uses, self._progress)
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
            for rows in self._groups:
                may_S &= ~rows.forgotten_S
            worth = np.nonzero((2 * needed_S >= live_S) & (needed_S > 0) & may_S)[0]
            kept = np.sort(worth[np.argsort(-needed_S[worth], kind="stable")[:MOST_RETAINED]])
        stale_ST = np.concatenate([rows.live_ST - rows.needed_ST for rows in self._groups], axis=1)
        self.retained = {segments[i].id: stale_ST[i] for i in kept.tolist()}

    def idle_rows(self, group: int, place: int) -> int:
        """Return how many rows of a table move although the schedule does not use them."""
        kept_S = np.isin([segment.id for segment in self._snapshot.segments], [*self.retained])
        return int(self._groups[group].needed_ST[~kept_S, place].sum())

    def moves(self, segment: Segment, group: int, low: int, high: int) -> NDArray[np.bool_]:
        """Return which of the live rows [low, high) of a layout move: (high - low,)."""
        rows = self._groups[group]
        start = rows.first_number(segment)
        marks = rows.marks.read(start + low, start + high)
        moved: NDArray[np.bool_] = marks == USED if segment.id in self.retained else marks != STALE
        return moved


class _GroupRows:
    """The live rows of one group, each with a mark. Shapes: S segments, T tables of the group.

    A live row has a number: rows count on from segment to segment, so that of two rows of a key that with the
    greater number is newer.
    """

    def __init__(self, reader: BlockReader, snapshot: Snapshot, group: Group, files: ExitStack) -> None:
        self.group, self._reader, self._snapshot = group, reader, snapshot
        counts, self._dead = [], {}
        for segment in snapshot.segments:
            layout, first = segment.layouts[group.index], snapshot.first_range(segment, group.index)
            counts.append([layout.rows_of_table(place, first) for place in range(len(group.tables))])
            self._dead[segment.id] = layout.first_row_R.item(first)
        self.live_ST = np.array(counts, dtype=np.int64).reshape(len(counts), len(group.tables))
        """(S, T): live rows."""
        self.needed_ST = np.zeros_like(self.live_ST)
        """(S, T): those that are neither used nor stale."""
        self._tombstone_S = np.array([segment.tombstone for segment in snapshot.segments], dtype=np.bool_)
        self.is_rewritten = False
        """True if rows of forgotten keys are stale, and tombstones go; else these stay as rows would."""
        self.forgotten_S = self._tombstone_S.copy()
        """(S,): segments that may not stay: with rows of forgotten keys; after ``sort``."""
        self._starts_S = np.append(0, np.cumsum(self.live_ST.sum(axis=1)))
        """(S + 1,): the number of each segment's first live row."""
        self._index = {segment.id: i for i, segment in enumerate(snapshot.segments)}
        self.marks = RowMarks(int(self._starts_S[-1]), files.enter_context(ScratchFile(reader.scratch, _WHAT)))

    def sort(self, uses: FirstUses, progress: Callable[[str, int], None]) -> None:
        """Mark every row."""
        with ThreadPoolExecutor(KEY_THREADS) as readers:
            for places, count in _sweeps(self.live_ST.sum(axis=0).tolist()):
                self._sort_sweep(places, count, uses, progress, readers)
        self.marks.flush()

    def _sort_sweep(
        self, places: range, count: int, uses: FirstUses, progress: Callable[[str, int], None],
        readers: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        """Mark the rows of tables, one ``count``-th of all hashes at a time."""
        schedules: dict[int, SortedCursor] = {}
        for hashes in hash_slices(count) if count > 1 else [None]:
            with ExitStack() as stack:
                sorters = {place: stack.enter_context(self._sorter(place)) for place in places}
                codes = stack.enter_context(self._sorter())
                for segment, place, keys, rows in self._keys(places, hashes, readers):
                    table_id = self.group.tables[place].table_id
                    sorters[place].add(hash_keys(keys, table_id), self.first_number(segment) + rows)
                    flush_largest(sorters.values())
                    progress("sort", keys.size)
                for place, sorter in sorters.items():
                    if (schedule := schedules.get(place)) is None:
                        table = self.group.tables[place]
                        schedule = SortedCursor(hashed(table, uses.slices(table.name)), np.int64, np.int64)
                    if hashes is not None:
                        schedules[place] = schedule
                        schedule = SortedCursor(below(schedule, hashes[1]), np.int64, np.int64)
                    self._join(place, SortedCursor(sorter.sorted(), np.int64), schedule, codes)
                    sorter.close()
                for (found,) in codes.sorted():
                    self.marks.set(found >> self._code_shift)

    def _keys(
        self, places: range, hashes: tuple[int, int] | None, readers: ThreadPoolExecutor
    ) -> Iterator[tuple[Segment, int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield (segment, index of the table, keys, rows) of live rows, each table's by segment and row.

        Tables are read together, since a key page may hold keys of several; with ``hashes`` there is only one.
        """
        group, reader, snapshot = self.group, self._reader, self._snapshot
        if hashes is None:
            every = dict.fromkeys(places, None)
            yield from live_keys(reader, snapshot, snapshot.segments, group, every, readers, after=-1)
            return
        runs = runs_of(reader, snapshot, snapshot.segments, group, group.tables[places[0]], hashes=hashes)
        parts = ((run.segment, group.index, low, high) for run in runs for _, low, high in run.blocks())
        for (segment, _, low, high), keys in read_ahead(readers, reader.keys_between, parts, most=2 * KEY_THREADS):
            yield segment, places[0], keys, np.arange(low, high)

    def _join(self, place: int, stored: SortedCursor, schedule: SortedCursor, codes: ExternalSorter) -> None:
        """Compute the marks of one table's rows. ``stored`` yields row numbers by hash, then by age."""
        for (hashes, numbers), (used_hashes, _, _) in merged(stored, schedule):
            if not hashes.size:
                continue
            newest = np.append(hashes[1:] != hashes[:-1], True)
            if self.is_rewritten and np.any(self._tombstone_S):
                newest = self._without_forgotten(newest, numbers)
            used = np.isin(hashes, used_hashes)
            for mark, rows in ((STALE, numbers[~newest]), (USED, numbers[newest & used])):
                codes.add(mark_codes(rows, mark) << self._code_shift)
            idle = np.searchsorted(self._starts_S, numbers[newest & ~used], side="right") - 1
            self.needed_ST[:, place] += np.bincount(idle, minlength=self.needed_ST.shape[0])

    def _without_forgotten(self, newest: NDArray[np.bool_], numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which rows are the newest of keys that were not forgotten; note the segments of forgotten keys."""
        segments = np.searchsorted(self._starts_S, numbers, side="right") - 1
        key = np.append(0, np.cumsum(newest[:-1]))
        once = np.bincount(key, self._tombstone_S[segments])[key] > 0
        newest = newest & ~self._tombstone_S[segments]
        self.forgotten_S[segments[once & ~newest]] = True
        return newest

    def _sorter(self, place: int | None = None) -> ExternalSorter:
        """Return a sorter of the row numbers of one table's keys or, for None, of all marks."""
        reader = self._reader
        if place is None:
            return ExternalSorter([], reader.scratch, _WHAT, COMPACTION_BYTES // 4, reader.counters)
        what, copies = f"sorting the keys of table {self.group.tables[place].name!r}", max(2, self._starts_S.size - 1)
        return ExternalSorter(["<i8"], reader.scratch, what, COMPACTION_BYTES * 3 // 4, reader.counters, copies=copies)

    @property
    def _code_shift(self) -> np.uint64:
        """The left shift that moves a row's code to the highest bits, which the sorter uses first."""
        return np.uint64(HASHES.bit_length() - 1 - int(2 * self._starts_S[-1]).bit_length())

    def first_number(self, segment: Segment) -> int:
        """Return the offset from a row of a layout to the number of a live row."""
        return int(self._starts_S[self._index[segment.id]]) - self._dead[segment.id]


def _sweeps(rows_T: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Yield neighboring tables that are sorted together, and in how many slices: several for a large table alone."""
    most, first, total = _sweep_rows(sum(rows_T)), 0, 0
    for place, rows in enumerate([*rows_T, most]):
        total += rows
        if total > most or place == len(rows_T):
            if first < place:
                yield range(first, place), 1
            first, total = place, rows
        if rows > most:
            yield range(place, place + 1), -(-rows // most)
            first, total = place + 1, 0


def _sweep_rows(rows: int) -> int:
    """Return how many of a group's live rows are sorted in one sweep."""
    return max(external_sort.LEAST_SLICE_BYTES // (2 * HASH_BYTES + NUMBER_BYTES), -(-rows // SLICES))


def key_scratch_bytes(rows: Sequence[int]) -> tuple[int, int]:
    """Return the peak bytes of temporary files while ``rows`` live rows of each group are marked, and the marks' bytes.

    The marks, a quarter of a byte a row, stay while rows are moved. The peak adds the keys of one sweep with a number
    each, 16 bytes, and its marks in the order of keys, 8 bytes: for at most a 24th of a group, or 44 million rows if
    that is more.
    """
    marks = sum(paged(-(-one // ROWS_PER_BYTE)) for one in rows)
    most = [min(one, _sweep_rows(one)) for one in rows]
    keys = max((file_bytes(one, NUMBER_BYTES, COMPACTION_BYTES // 2) for one in most), default=0)
    codes = max((file_bytes(one, 0, COMPACTION_BYTES // 4) for one in most), default=0)
    return marks + paged(keys) + paged(codes), marks


IDLE, STALE, USED = 0, 1, 2
"""Row states: IDLE (current, not in the schedule), STALE (superseded), USED (current, in the schedule)."""
ROWS_PER_BYTE = 4
_WINDOW_ROWS = 4 << 20
_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


class RowMarks:
    """Marks of rows 0 .. ``rows`` - 1, IDLE at first, in a file of a quarter of a byte a row; takes 4 MiB."""

    def __init__(self, rows: int, file: ScratchFile) -> None:
        """Raises StoreFullError."""
        self._rows, self._file = rows, file
        file.extend(-(-rows // ROWS_PER_BYTE))
        self._window, self._marks = -1, np.empty(0, np.uint8)

    def set(self, codes: NDArray[np.uint64]) -> None:
        """Mark rows, given as ``mark_codes`` makes them, (n,) in ascending order. Raises StoreFullError."""
        rows, marks = (codes >> np.uint64(1)).astype(np.int64), (codes & np.uint64(1)).astype(np.uint8) + STALE
        done = 0
        while done < rows.size:
            window = int(rows[done]) // _WINDOW_ROWS
            end = done + int(rows[done:].searchsorted((window + 1) * _WINDOW_ROWS))
            if window != self._window:
                self.flush()
                first = window * _WINDOW_ROWS
                self._window, self._marks = window, self.read(first, min(first + _WINDOW_ROWS, self._rows))
            self._marks[rows[done:end] - window * _WINDOW_ROWS] = marks[done:end]
            done = end

    def flush(self) -> None:
        """Write the last window; ``read`` sees it from now on. Raises StoreFullError."""
        if self._window >= 0:
            marks = np.zeros(-(-self._marks.size // ROWS_PER_BYTE) * ROWS_PER_BYTE, np.uint8)
            marks[: self._marks.size] = self._marks
            packed = np.bitwise_or.reduce(marks.reshape(-1, ROWS_PER_BYTE) << _SHIFTS, axis=1)
            self._file.write(packed, self._window * _WINDOW_ROWS // ROWS_PER_BYTE)
        self._window, self._marks = -1, np.empty(0, np.uint8)

    def read(self, low: int, high: int) -> NDArray[np.uint8]:
        """Return the marks of the rows [low, high), as of the last ``flush``: (high - low,)."""
        begin = low // ROWS_PER_BYTE
        packed = np.empty(-(-high // ROWS_PER_BYTE) - begin, np.uint8)
        self._file.read(packed, begin)
        marks = ((packed[:, None] >> _SHIFTS) & np.uint8(3)).reshape(-1)
        return marks[low - begin * ROWS_PER_BYTE : high - begin * ROWS_PER_BYTE]


def mark_codes(rows: NDArray[np.int64], mark: int) -> NDArray[np.uint64]:
    """Return the codes of rows (n,) that are all STALE or all USED, for ``RowMarks.set``; codes sort by row."""
    codes: NDArray[np.uint64] = (rows.astype(np.uint64) << np.uint64(1)) | np.uint64(mark - STALE)
    return codes
