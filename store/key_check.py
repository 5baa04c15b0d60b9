"""Whether keys stand as they must: what checksums cannot see."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.errors import CorruptStoreError
from tiercache.store.hash_parts import HashParts
from tiercache.store.hashing import hash_keys
from tiercache.store.read_ahead import read_ahead

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import ThreadPoolExecutor

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.store import Store
    from tiercache.store.table import Group

READERS = 2
"""Threads that read blocks of keys: the disk has one to read while another is checked."""
SLICE_ROWS = 1 << 25
"""The most keys that are held at once: 12 bytes each with their runs, some 20 while they are sorted, 28 where several
commits are kept. 5 GB of rows of 260 bytes have fewer: with them in a file, ``verify`` took a quarter longer."""


class KeyCheck:
    """Whether the live keys of a group stand in hash order, at each of several commits once but for stale rows."""

    def __init__(self, stores: Sequence[Store], group: Group, readers: ThreadPoolExecutor) -> None:
        """``stores`` are one store, each opened at one commit."""
        self._store, self._group, self._readers = stores[0], group, readers
        self._settled = [() if store.commit is None else store.commit.settled for store in stores]
        self._commits = [-1 if store.commit is None else store.commit.id for store in stores]
        self._problems: dict[str, dict[int, None]] = {}
        self._segments = {segment.id: segment for store in stores for segment in store.segments}
        self._live = [{s.id: store.first_range(s, group.index) for s in store.segments} for store in stores]
        """For each store, by segment: its first live range."""

    def run(self) -> dict[str, list[int]]:
        """Read all keys once; returns what is wrong, with the commits it is in. Each thing that is wrong is a sentence.

        More than ``SLICE_ROWS`` keys of all commits go through a temporary file of 12 bytes for each. Raises
        StoreFullError where there is no room for it.
        """
        num_tables = len(self._group.tables)
        rows = sum(
            rows.rows
            for id_, segment in self._segments.items()
            for rows in segment.streams[self._group.index].ranges[min(self._first_ranges(id_)) :]
        )
        runs: list[tuple[int, int]] = []
        """Segment and number of each run, in the order in which they come."""
        twice = np.zeros((len(self._live), num_tables), dtype=np.int64)
        with HashParts(self._store.path, rows, SLICE_ROWS) as parts:
            for segment, run, hashes in self._sweep():
                if not runs or runs[-1] != (segment.id, run):
                    runs.append((segment.id, run))
                parts.add(len(runs) - 1, hashes)
            table_N = np.array([run % num_tables for _, run in runs], dtype=np.int64)
            live_CN = np.array(
                [[id_ in live and run // num_tables >= live[id_] for id_, run in runs] for live in self._live],
                dtype=bool,
            )
            for hashes, numbers in parts.parts():
                for i in range(num_tables):
                    mine = slice(None) if num_tables == 1 else table_N[numbers] == i
                    of_table, runs_of = hashes[mine], numbers[mine]
                    # All keys are live where one commit is kept: most stores then need no copy of them.
                    alone = len(live_CN) == 1 and bool(live_CN.all())
                    twice[:, i] += [_twice(of_table if alone else of_table[live_N[runs_of]]) for live_N in live_CN]
        for place, table in enumerate(self._group.tables):
            name = f"table {table.name!r} of {self._store.label}"
            for commit, settled, count in zip(self._commits, self._settled, twice[:, place].tolist(), strict=True):
                stated = sum(one.stale_rows[self._group.index][place] for one in settled)
                if count > stated:
                    sentence = f"{count - stated} keys of {name} have two live rows: restore the store from a copy"
                elif count < stated:
                    sentence = (
                        f"{name} has {count} stale rows and its commit says {stated}: restore the store from a copy"
                    )
                else:
                    continue
                self._note(sentence, [commit])
        return {sentence: list(commits) for sentence, commits in self._problems.items()}

    def _first_ranges(self, segment_id: int) -> list[int]:
        """Return the first live range of a segment at each commit that has it."""
        return [live[segment_id] for live in self._live if segment_id in live]

    def _sweep(self) -> Iterator[tuple[Segment, int, NDArray[np.uint64]]]:
        """Yield (segment, number of the run, hashes) of all keys that are live at a commit, each block read once.

        Notes what is out of order.
        """
        for segment in self._segments.values():
            last_run, last_hash = -1, np.uint64(0)
            for run, hashes in self._runs(segment):
                table = self._group.tables[run % len(self._group.tables)]
                if np.any(hashes[1:] <= hashes[:-1]) or (run == last_run and hashes[0] <= last_hash):
                    self._note(
                        f"segment {segment.id} of {self._store.label} has keys of table {table.name!r} that are not in "
                        "hash order: restore the store from a copy",
                        self._commits_of(segment, run // len(self._group.tables)),
                    )
                last_run, last_hash = run, hashes[-1]
                yield segment, run, hashes

    def _runs(self, segment: Segment) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield the keys of each table of each live range, cut where blocks end: (number of the run, hashes)."""
        stream, num_tables = segment.streams[self._group.index], len(self._group.tables)
        counts = np.array([rows.table_rows for rows in stream.ranges], dtype=np.int64).reshape(-1)
        bounds = np.append(0, np.cumsum(counts))
        first = int(bounds[min(self._first_ranges(segment.id)) * num_tables])
        if first == stream.rows:
            return  # all is dead, and freed, while other groups keep the segment
        blocks = [(segment, block) for block in range(first // stream.block_rows, stream.num_blocks)]
        for (_, block), keys in read_ahead(self._readers, self._keys, blocks, most=2 * READERS):
            start, end = (int(row) for row in stream.block_first_row_B[block : block + 2])
            if isinstance(keys, str):
                last = int(np.searchsorted(bounds, end - 1, side="right") - 1) // num_tables
                self._note(keys, self._commits_of(segment, last))
                continue
            base, start = start, max(start, first)
            run = int(np.searchsorted(bounds, start, side="right")) - 1
            while start < end:
                until = min(end, int(bounds[run + 1]))
                if start < until:
                    table = self._group.tables[run % num_tables]
                    yield run, hash_keys(keys[start - base : until - base], table.table_id)
                start, run = until, run + 1

    def _commits_of(self, segment: Segment, index: int) -> list[int]:
        """Return the commits at which range ``index`` of a segment is live."""
        return [
            commit
            for commit, live in zip(self._commits, self._live, strict=True)
            if segment.id in live and live[segment.id] <= index
        ]

    def _keys(self, segment: Segment, block: int) -> NDArray[np.int64] | str:
        """Return the keys of a block, or what is wrong with it."""
        try:
            return self._store.read_keys(segment, self._group.index, block)
        except CorruptStoreError as error:
            return str(error)

    def _note(self, sentence: str, commits: Sequence[int]) -> None:
        self._problems.setdefault(sentence, {}).update(dict.fromkeys(commits))


def _twice(hashes: NDArray[np.uint64]) -> int:
    """Return how many hashes are there again; sorts them."""
    hashes.sort(kind="stable")  # a merge of runs, which ranges are: a third of the time of a sort of anything
    return int(np.count_nonzero(hashes[1:] == hashes[:-1]))
