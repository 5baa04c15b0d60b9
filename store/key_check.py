"""Whether keys stand as they must: what checksums cannot see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.errors import CorruptStoreError
from tiercache.store.hash_parts import HashParts
from tiercache.store.hashing import hash_keys
from tiercache.store.key_tally import KeyTally
from tiercache.store.read_ahead import read_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.store import Store
    from tiercache.store.table import Group

READERS = 8
"""Threads that read blocks of keys, which wait for the disk behind blocks of rows: with more of them all keys are there
early, and sorted while rows are still read: by hand, in turns, 0.75 of the seconds on LMDB, 0.85 on Zarr."""
SLICE_ROWS = 1 << 25
"""The most keys that are held at once: 12 bytes each with their runs, some 20 while they are sorted, 28 where several
commits are kept, 20 more where rows are stale. 5 GB of rows of 260 bytes have fewer: with them in a file, ``verify``
took a quarter longer."""

_MOST_CHANGED = (1 << 32) - 1
"""What a record may say beyond it is no commit."""

Hashes = tuple["Segment", int, "NDArray[np.uint64]", "NDArray[np.uint32] | int"]
"""Segment, number of the run, hashes (n,), and their last changes (n,) or the one of all."""


class KeyCheck:
    """Whether the live keys of a group stand in hash order, and at each of several commits as ``KeyTally`` says.

    Last changes are read with the keys; they take part only where rows are stale.
    """

    def __init__(self, stores: Sequence[Store], group: Group, readers: ThreadPoolExecutor) -> None:
        """``stores`` are one store, each opened at one commit."""
        self._store, self._group, self._readers = stores[0], group, readers
        self._commits = [-1 if store.commit is None else store.commit.id for store in stores]
        self._problems: dict[str, dict[int, None]] = {}
        segments = {segment.id: segment for store in stores for segment in store.segments}
        self._segments = {id_: segments[id_] for id_ in sorted(segments)}
        self._firsts = {id_: first for store in stores if store.commit for id_, first in store.commit.named.items()}
        self._unread = set[int]()
        """Commits that need keys which could not be read."""
        self._tally = KeyTally(stores, group, list(self._segments))
        self._live = [{s.id: store.first_range(s, group.index) for s in store.segments} for store in stores]
        """For each store, by segment: its first live range."""

    def run(self) -> dict[str, list[int]]:
        """Read all keys once; returns what is wrong, with the commits it is in. Each thing that is wrong is a sentence.

        More than ``SLICE_ROWS`` keys of all commits go through a temporary file of 12 bytes for each, of 16 where rows
        are stale. Raises StoreFullError where there is no room for it.
        """
        num_tables, noted = len(self._group.tables), self._tally.has_stale
        rows = sum(
            rows.rows
            for id_, segment in self._segments.items()
            for rows in segment.streams[self._group.index].ranges[min(self._first_ranges(id_)) :]
        )
        runs: list[tuple[int, int]] = []
        """Segment and number of each run, in the order in which they come."""
        with HashParts(self._store.path, rows, SLICE_ROWS, np.uint64 if noted else np.uint32) as parts:
            for segment, run, hashes, changed in self._sweep():
                if not runs or runs[-1] != (segment.id, run):
                    runs.append((segment.id, run))
                number = len(runs) - 1
                parts.add(_note(number, changed) if noted else number, hashes)
            live_CN = np.array(
                [[id_ in live and run // num_tables >= live[id_] for id_, run in runs] for live in self._live],
                dtype=bool,
            )
            self._tally.begin(
                np.array([run % num_tables for _, run in runs], np.int64), [id_ for id_, _ in runs], live_CN
            )
            for hashes, notes in parts.parts():
                self._tally.add(hashes, *_noted(notes))
        for sentence, commit in self._tally.problems(self._unread):
            self._note(sentence, [commit])
        return {sentence: list(commits) for sentence, commits in self._problems.items()}

    def _first_ranges(self, segment_id: int) -> list[int]:
        """Return the first live range of a segment at each commit that has it."""
        return [live[segment_id] for live in self._live if segment_id in live]

    def _sweep(self) -> Iterator[Hashes]:
        """Yield the hashes of all keys that are live at a commit, each block read once.

        Notes what is out of order.
        """
        for segment in self._segments.values():
            last_run, last_hash = -1, np.uint64(0)
            for run, hashes, changed in self._runs(segment):
                table = self._group.tables[run % len(self._group.tables)]
                if np.any(hashes[1:] <= hashes[:-1]) or (run == last_run and hashes[0] <= last_hash):
                    self._note(
                        f"segment {segment.id} of {self._store.label} has keys of table {table.name!r} that are not in "
                        "hash order: restore the store from a copy",
                        self._commits_of(segment, run // len(self._group.tables)),
                    )
                last_run, last_hash = run, hashes[-1]
                yield segment, run, hashes, changed

    def _runs(self, segment: Segment) -> Iterator[tuple[int, NDArray[np.uint64], NDArray[np.uint32] | int]]:
        """Yield the keys of each table of each live range, cut where blocks end: run, hashes and last changes."""
        stream, num_tables = segment.streams[self._group.index], len(self._group.tables)
        counts = np.array([rows.table_rows for rows in stream.ranges], dtype=np.int64).reshape(-1)
        bounds = np.append(0, np.cumsum(counts))
        first = int(bounds[min(self._first_ranges(segment.id)) * num_tables])
        if first == stream.rows:
            return  # all is dead, and freed, while other groups keep the segment
        blocks = [(segment, block) for block in range(first // stream.block_rows, stream.num_blocks)]
        for (_, block), (keys, changed, problems) in read_ahead(self._readers, self._read, blocks, most=READERS):
            start, end = (int(row) for row in stream.block_first_row_B[block : block + 2])
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

    def _read(
        self, segment: Segment, block: int
    ) -> tuple[NDArray[np.int64] | None, NDArray[np.uint32] | int, list[str]]:
        """Return keys and last changes of a block, and what is wrong with either."""
        group, problems = self._group.index, list[str]()
        keys: NDArray[np.int64] | None = None
        changed: NDArray[np.uint32] | int = min(self._firsts.get(segment.id, 0), _MOST_CHANGED)
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


def _note(run: int, changed: NDArray[np.uint32] | int) -> NDArray[np.uint64]:
    """Return the note of keys of a run and their last changes."""
    return np.asarray(changed, np.uint64) | np.uint64(run << 32)


def _noted(notes: NDArray[Any]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return runs (n,) and last changes (n,), or none (0,) where notes are runs alone."""
    if notes.dtype == np.uint32:
        return notes, notes[:0]
    return (notes >> np.uint64(32)).astype(np.uint32), notes.astype(np.uint32)
