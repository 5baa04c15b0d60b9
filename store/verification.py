"""The process that ``verify`` starts: reads everything, and writes JSON lines to its standard output."""

from __future__ import annotations

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.store.errors import CorruptStoreError, StoreError
from tiercache.store.hashing import hash_keys
from tiercache.store.huge_pages import huge_pages
from tiercache.store.life import Life
from tiercache.store.read_ahead import read_ahead
from tiercache.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tiercache.store.segment import Segment
    from tiercache.store.stream import Stream
    from tiercache.store.table import Group

SLICE_ROWS = 1 << 24
"""The most hashes that are held at once: 8 bytes each, twice that while they are sorted."""
READERS = 2
"""Threads that read blocks of rows, and as many of keys: the disk has one to read while another is checked."""
_MOST_PROBLEMS = 100


class Verification:
    """One reading of all that a store holds.

    Rows are read by threads of their own; keys, meanwhile, by others. Memory: a block for each reader of rows, a few
    blocks of keys, and the hashes of ``SLICE_ROWS`` keys.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.problems: list[str] = []
        self.counts = {"segments": 0, "blocks": 0, "pieces": 0, "rows": 0, "bytes": 0}
        self._life = None if store.commit is None else Life.of(store.commit, store.segments)
        self._room = threading.local()
        self._blocks = [
            (segment, group, block)
            for segment in store.segments
            for group, stream in enumerate(segment.streams)
            for block in range(self._first_block(segment, group), stream.num_blocks)
        ]
        self.total = sum(int(segment.streams[group].block_bytes_B[block]) for segment, group, block in self._blocks)

    def run(self) -> dict[str, Any]:
        """Check everything and return the report."""
        begun = time.perf_counter()
        self.counts["segments"] = len(self.store.segments)
        with ThreadPoolExecutor(1) as beside, ThreadPoolExecutor(READERS) as readers:
            keys = [beside.submit(KeyCheck(self.store, group, readers).run) for group in self.store.groups]
            self._check_rows()
            for found in keys:
                self._report(*found.result())
        if self.store.commit is not None:
            self._report(*_problem(self.store.state))
        commit = self.store.commit
        return {
            **self.counts,
            "commit": None if commit is None else commit.id,
            "seconds": time.perf_counter() - begun,
            "problems": self.problems[:_MOST_PROBLEMS],
        }

    def _first_block(self, segment: Segment, group: int) -> int:
        assert self._life is not None, "a store has segments from its first commit on"
        return self._life.first_block(segment, group)

    def _check_rows(self) -> None:
        """Read every block, a few ahead of the one that is counted."""
        with ThreadPoolExecutor(READERS) as readers:
            for (segment, group, block), problems in read_ahead(readers, self._read, self._blocks, most=2 * READERS):
                self._report(*problems)
                self._count(segment.streams[group], block)

    def _read(self, segment: Segment, group: int, block: int) -> list[str]:
        """Read a block into the page-aligned memory of this thread, which goes past the page cache."""
        stream = segment.streams[group]
        size = int(stream.block_bytes_B[block])
        if getattr(self._room, "size", 0) < size:
            self._room.size, self._room.data = size, huge_pages(size)
        low, high = int(stream.block_piece_B[block]), int(stream.block_piece_B[block + 1])
        return _problem(self.store.read, segment, group, low, high, self._room.data[:size])

    def _count(self, stream: Stream, block: int) -> None:
        size = int(stream.block_bytes_B[block])
        self.counts["blocks"] += 1
        self.counts["pieces"] += int(stream.block_piece_B[block + 1] - stream.block_piece_B[block])
        self.counts["rows"] += size // stream.row_bytes
        self.counts["bytes"] += size
        _say(kind="progress", done=self.counts["bytes"], total=self.total)

    def _report(self, *sentences: str) -> None:
        self.problems += [sentence for sentence in sentences if sentence not in self.problems]


class KeyCheck:
    """Whether the live keys of a group stand in hash order, each of them once but for those of stale rows."""

    def __init__(self, store: Store, group: Group, readers: ThreadPoolExecutor) -> None:
        self._store, self._group, self._readers = store, group, readers
        self._problems: dict[str, None] = {}
        self._settled = () if store.commit is None else store.commit.settled
        self._live = {segment.id: store.first_range(segment, group.index) for segment in store.segments}

    def run(self) -> list[str]:
        """Read all keys once for each ``SLICE_ROWS`` of them; returns a sentence for each thing that is wrong."""
        rows = sum(
            rows.rows
            for segment in self._store.segments
            for rows in segment.streams[self._group.index].ranges[self._live[segment.id] :]
        )
        slices, known = -(-rows // SLICE_ROWS), dict[int, int]()
        for i in range(slices):
            low, high = np.uint64((i << 64) // slices), np.uint64(((i + 1) << 64) // slices - 1)
            found: list[list[NDArray[np.uint64]]] = [[] for _ in self._group.tables]
            for place, hashes in self._sweep(check_order=i == 0):
                found[place].append(hashes[(hashes >= low) & (hashes <= high)] if slices > 1 else hashes)
            for place, parts in enumerate(found):
                twice = _twice(parts)
                known[place] = known.get(place, 0) + twice
        for place, twice in known.items():
            stale = sum(one.stale_rows[self._group.index][place] for one in self._settled)
            name = f"table {self._group.tables[place].name!r} of {self._store.label}"
            if twice > stale:
                self._note(f"{twice - stale} keys of {name} have two live rows: restore the store from a copy")
            elif twice < stale:
                self._note(f"{name} has {twice} stale rows and its commit says {stale}: restore the store from a copy")
        return list(self._problems)

    def _sweep(self, *, check_order: bool) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield (place of the table, hashes) of all live keys, each block read once; notes what is out of order."""
        for segment in self._store.segments:
            last_run, last_hash = -1, np.uint64(0)
            for run, hashes in self._runs(segment):
                place = run % len(self._group.tables)
                if check_order and (np.any(hashes[1:] <= hashes[:-1]) or (run == last_run and hashes[0] <= last_hash)):
                    self._note(
                        f"segment {segment.id} of {self._store.label} has keys of table "
                        f"{self._group.tables[place].name!r} that are not in hash order: "
                        "restore the store from a copy"
                    )
                last_run, last_hash = run, hashes[-1]
                yield place, hashes

    def _runs(self, segment: Segment) -> Iterator[tuple[int, NDArray[np.uint64]]]:
        """Yield the keys of each table of each live range, cut where blocks end: (number of the run, hashes)."""
        stream, num_tables = segment.streams[self._group.index], len(self._group.tables)
        counts = np.array([rows.table_rows for rows in stream.ranges], dtype=np.int64).reshape(-1)
        bounds = np.append(0, np.cumsum(counts))
        first = int(bounds[self._live[segment.id] * num_tables])
        if first == stream.rows:
            return  # all is dead, and freed, while other groups keep the segment
        blocks = [(segment, block) for block in range(first // stream.block_rows, stream.num_blocks)]
        for (_, block), keys in read_ahead(self._readers, self._keys, blocks, most=2 * READERS):
            if isinstance(keys, str):
                self._note(keys)
                continue
            start, end = (int(row) for row in stream.block_first_row_B[block : block + 2])
            base, start = start, max(start, first)
            run = int(np.searchsorted(bounds, start, side="right")) - 1
            while start < end:
                until = min(end, int(bounds[run + 1]))
                if start < until:
                    table = self._group.tables[run % num_tables]
                    yield run, hash_keys(keys[start - base : until - base], table.table_id)
                start, run = until, run + 1

    def _keys(self, segment: Segment, block: int) -> NDArray[np.int64] | str:
        """Return the keys of a block, or what is wrong with it."""
        try:
            return self._store.read_keys(segment, self._group.index, block)
        except CorruptStoreError as error:
            return str(error)

    def _note(self, sentence: str) -> None:
        self._problems[sentence] = None


def _twice(parts: list[NDArray[np.uint64]]) -> int:
    """Return how many hashes are there again; empties ``parts``."""
    if not parts:
        return 0
    hashes = np.concatenate(parts)
    parts.clear()
    hashes.sort(kind="stable")  # a merge of runs, which ranges are: a third of the time of a sort of anything
    return int(np.count_nonzero(hashes[1:] == hashes[:-1]))


def _problem(call: Callable[..., object], *arguments: object) -> list[str]:
    """Return what is corrupt as ``call`` says it: a sentence, or none."""
    try:
        call(*arguments)
    except CorruptStoreError as error:
        return [str(error)]
    return []


def _say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(path: str) -> None:
    """Verify the store at ``path``."""
    try:
        with Store.open(path, mode="r") as store:
            _say(kind="report", report=Verification(store).run())
    except CorruptStoreError as error:
        _say(kind="report", report={"problems": [str(error)]})
    except StoreError as error:
        _say(kind="error", type=type(error).__name__, text=str(error))


if __name__ == "__main__":
    main(sys.argv[1])
