"""Dumps and loads of the store's benchmark: passes with real keys, one engine's store, and the turns of both."""

from __future__ import annotations

import mmap
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.disk_raw import Span, blocks_of, reads_of, slot_bytes
from benchmarks.machine import drop_cache, middle, process_bytes_read
from tiercache.planning.budgets import ALIGNED_BYTES, PAGE_BYTES, HostBudget, paged
from tiercache.rows.store_kernels import COMPUTE
from tiercache.store import Cursor, Range, RowWiseAdagrad, Segment, SegmentLayout, Store, Table, Zeros, hash_keys
from tiercache.store.reading import Pages

PASSES = 24
SEGMENTS = 400
RAW_SLOTS = 4
"""Dumps in the bare disk's file: spans that are adjacent in a load are apart in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The amount of measurement."""

    pass_bytes: int
    """Bytes of the rows of one pass."""
    turns: int
    """Measured passes of the cycle."""
    verifications: int
    """Verifications of the whole store, each in a separate process."""
    wide_passes: int
    """Passes that are loaded from 400 segments."""
    heap_bytes: int
    """Bytes of the dump whose memory is measured."""
    lookup_pass_bytes: int
    """Bytes of the rows of one pass in the store for lookups."""
    one_key_rows: int
    """Rows of the table in which one key is looked up."""
    commit_blocks: int
    """Blocks of each of the dumps whose commits are measured."""
    row_sizes: tuple[int, ...] = ()
    """Row sizes besides 260 bytes, in passes of ``row_size_pass_bytes``."""
    row_size_pass_bytes: int = 64 << 20


FULL = Size(
    pass_bytes=400 << 20, turns=11, verifications=3, wide_passes=11, heap_bytes=2 * 10**9, lookup_pass_bytes=64 << 20,
    one_key_rows=50_000_000, commit_blocks=5000, row_sizes=(32, 1540),
)  # fmt: skip
QUICK = Size(
    pass_bytes=40 << 20, turns=3, verifications=1, wide_passes=2, heap_bytes=5 * 10**8, lookup_pass_bytes=8 << 20,
    one_key_rows=1_000_000, commit_blocks=1000,
)  # fmt: skip
TINY = Size(
    pass_bytes=1 << 20, turns=1, verifications=1, wide_passes=1, heap_bytes=20 * 10**6, lookup_pass_bytes=1 << 20,
    one_key_rows=20_000, commit_blocks=48, row_sizes=(32,), row_size_pass_bytes=1 << 20,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows of one size in passes of one size, cut as the planner cuts them for a host budget of four passes."""

    table: Table
    rows: int
    """Rows of a pass."""
    budget: HostBudget

    @classmethod
    def of(cls, row_bytes: int, pass_bytes: int) -> Case:
        """Return the case of a vector and the row-wise Adagrad state in ``row_bytes``."""
        rule = RowWiseAdagrad(learning_rate=0.05)
        table = Table(name="items", dim=row_bytes // 4 - 1, optimizer=rule, initializer=Zeros())
        rows = max(SEGMENTS, pass_bytes // row_bytes)
        budget = HostBudget.plan(
            4 * rows * row_bytes, evaluation=0, largest_row=row_bytes, largest_pass=rows * row_bytes
        )
        return cls(table=table, rows=rows, budget=budget)

    @property
    def row_bytes(self) -> int:
        return self.table.row_bytes

    def layout(self, rows_by_use: Sequence[tuple[int, int]]) -> SegmentLayout:
        """Return the layout of a dump with the given number of rows for each next use."""
        return SegmentLayout.of(
            row_bytes=self.row_bytes,
            page_rows=max(1, self.budget.page // self.row_bytes),
            block_bytes=self.budget.block,
            ranges=tuple(Range(next_use=use, table_rows=(rows,)) for use, rows in rows_by_use),
        )

    @property
    def pass_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """The dump of one pass."""

    pass_index: int
    layout: SegmentLayout
    keys: NDArray[np.int64]
    """(rows,), in the order of the layout."""

    @classmethod
    def of(cls, case: Case, pass_index: int, keys_by_use: Sequence[tuple[int, NDArray[np.int64]]]) -> Dump:
        """Arrange rows by next use, then hash."""
        ordered = [keys[np.argsort(hash_keys(keys, case.table.table_id))] for _, keys in keys_by_use]
        layout = case.layout([(use, keys.size) for use, keys in keys_by_use])
        return cls(pass_index=pass_index, layout=layout, keys=np.concatenate(ordered))

    def writes(self) -> list[Span]:
        """Return its blocks on the bare disk."""
        return blocks_of([self.layout], self.pass_index % RAW_SLOTS * slot_bytes([self.layout]))

    def reads(self, next_use: int, at: int | None = None) -> list[Span]:
        """Return its rows with a next use on the bare disk, with the dump at byte ``at`` or in its slot."""
        begin = self.pass_index % RAW_SLOTS * slot_bytes([self.layout]) if at is None else at
        return [
            span
            for index, rows in enumerate(self.layout.ranges)
            if rows.next_use == next_use
            for span in reads_of(self.layout, begin, *self.layout.pages_of_range(index))
        ]


class Cycle:
    """Passes whose rows are needed again 1 to ``PASSES`` passes later, equally many for each distance.

    From pass ``PASSES`` on, a pass loads its rows from that many segments and no key is new.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.pass_index = 0
        self._waiting: dict[int, list[NDArray[np.int64]]] = {}
        self._num_keys = 0
        self._rng = np.random.default_rng(4)

    def next(self) -> Dump:
        """Return the next pass's dump."""
        known = self._waiting.pop(self.pass_index, [])
        fresh = self.case.rows - sum(keys.size for keys in known)
        new = np.arange(self._num_keys, self._num_keys + fresh, dtype=np.int64)
        self._num_keys += fresh
        parts = np.array_split(self._rng.permutation(np.concatenate([*known, new])), PASSES)
        by_use = [(self.pass_index + distance, keys) for distance, keys in enumerate(parts, 1)]
        for use, keys in by_use:
            self._waiting.setdefault(use, []).append(keys)
        dump = Dump.of(self.case, self.pass_index, by_use)
        self.pass_index += 1
        return dump

    def keys(self) -> NDArray[np.int64]:
        """Return all keys so far; each has one live row."""
        return np.arange(self._num_keys, dtype=np.int64)


def wide(case: Case, passes: int) -> Iterator[Dump]:
    """Yield ``SEGMENTS`` dumps, each with a part of the rows that each of the ``passes`` after them needs."""
    part, first = case.rows // SEGMENTS, 0
    for pass_index in range(SEGMENTS):
        by_use = []
        for use in range(SEGMENTS, SEGMENTS + passes):
            by_use.append((use, np.arange(first, first + part, dtype=np.int64)))
            first += part
        yield Dump.of(case, pass_index, by_use)


def warm_kernels() -> None:
    """Compile the kernels of stores before timing."""
    COMPUTE.checksums([(np.zeros(64, np.uint8), np.array([0, 32, 64]))])
    COMPUTE.hashes(np.zeros(4, np.int64), np.zeros(1, np.uint64), np.array([4]))
    COMPUTE.map_entries(np.zeros(4, np.uint32), np.array([0, 4]), 0, 8, 8, 2)


def publish(store: Store, pass_index: int) -> None:
    """Commit before ``pass_index``."""
    store.publish(Cursor(pass_index, 0), state=b"", schedule_digest="", settings={}, environment={})


def append(
    store: Store, pass_index: int, layout: SegmentLayout, keys: NDArray[np.int64], data: NDArray[np.uint8], *,
    room: int = 0, stable: bool = False,
) -> None:  # fmt: skip
    """Append a dump, with block i from byte ``i * room`` of ``data``; by default all blocks are the same bytes."""
    bounds = map(layout.rows_of_block, range(layout.num_blocks))
    blocks = (
        (0, block, data[block * room :][: (high - low) * layout.row_bytes], keys[low:high])
        for block, (low, high) in enumerate(bounds)
    )
    store.append(pass_index, [layout], blocks, stable=stable)


def opened_bytes(path: Path) -> int:
    """Return the memory of an open store."""
    tracemalloc.start()
    try:
        with Store.open(path, mode="r"):
            return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


class HostPages:
    """Memory for disk reads and writes, the same for the store and the bare disk.

    Its pages are allocated before timing, and huge: direct I/O depends on the layout of its
    memory, by a factor of two on a virtual machine.
    """

    def __init__(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, max(PAGE_BYTES, paged(num_bytes)), mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)
        self.data = np.frombuffer(memory, np.uint8)
        self.data[::PAGE_BYTES] = 1

    @classmethod
    def of_noise(cls, num_bytes: int) -> HostPages:
        """Return memory with random bytes."""
        pages, noise = cls(num_bytes), np.random.default_rng(2).integers(0, 256, 8 << 20, dtype=np.uint8)
        for low in range(0, pages.data.size, noise.size):
            part = pages.data[low : low + noise.size]
            part[:] = noise[: part.size]
        return pages


class StoreRun:
    """A fresh store on one engine."""

    def __init__(self, engine: str, case: Case, path: Path) -> None:
        self.engine, self.case, self.path = engine, case, path
        shutil.rmtree(path, ignore_errors=True)
        self.store = Store.open(path, tables=[case.table], engine=engine)
        self.store.reader.compute = COMPUTE
        self.store.write_within(case.budget.transaction)
        self.bytes_read = self.bytes_useful = 0

    def dump(self, dump: Dump, source: HostPages) -> float:
        """Append and commit the dump of a pass; return the seconds until it is durable."""
        begun = time.perf_counter()
        self.append(dump, source)
        publish(self.store, dump.pass_index + 1)
        seconds = time.perf_counter() - begun
        self._rest()
        return seconds

    def _rest(self) -> None:
        """Wait until all dead data is deleted, which continues after a commit."""
        count = -1
        while self.engine == "zarr" and count != (count := sum(len(names) for _, _, names in os.walk(self.path))):
            time.sleep(0.02)

    def append(self, dump: Dump, source: HostPages) -> None:
        """Append the dump of a pass, each of its blocks from a page boundary of ``source``."""
        room = paged(dump.layout.block_bytes)
        append(self.store, dump.pass_index, dump.layout, dump.keys, source.data, room=room, stable=True)

    def load(self, pass_index: int, room: HostPages) -> float:
        """Load the rows with next use ``pass_index`` into ``room``, cold, and check them; return the seconds."""
        pages = [  # known to a plan before a load begins
            (segment, *layout.pages_of_range(index))
            for segment in self.store.segments
            for layout in segment.layouts
            for index, rows in enumerate(layout.ranges)
            if rows.next_use == pass_index
        ]
        drop_cache(self.path)
        useful, read = self.store.counters.row_bytes_read, process_bytes_read()
        begun = time.perf_counter()
        wanted: list[Pages] = []
        at = 0
        for segment, low, high in pages:
            at = _want(segment, low, high, room.data, at, wanted)
        self.store.load(wanted)
        seconds = time.perf_counter() - begun
        self.bytes_read += process_bytes_read() - read
        self.bytes_useful += self.store.counters.row_bytes_read - useful
        return seconds


def room_for(case: Case, ranges: int) -> HostPages:
    """Return memory for one load: two more pages for each run."""
    return HostPages(case.pass_bytes + 2 * PAGE_BYTES * (2 * ranges + case.pass_bytes // case.budget.block + 4))


def source_for(case: Case) -> HostPages:
    """Return memory for one dump, with each block in separate pages."""
    return HostPages.of_noise(paged(case.budget.block) * (case.pass_bytes // case.budget.block + 2))


class Seconds:
    """Seconds of one operation, alternating between the bare disk and an engine."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def turn(self, raw: Callable[[], float], ours: Callable[[], float]) -> None:
        """Run the operation once each, in alternating order.

        Each run begins when the disk has finished the previous one.
        """
        found = {}
        for way in (raw, ours) if len(self._taken) % 2 == 0 else (ours, raw):
            os.sync()
            found[way] = way()
        self._taken.append((found[raw], found[ours]))

    def figures(self, engine: str, what: str, suffix: str = "") -> dict[str, float]:
        """Return medians of both, and the median of the bare disk's seconds over the engine's."""
        raw, ours = zip(*self._taken, strict=True)
        ratios = [bare / seconds for bare, seconds in self._taken]
        return {
            f"{engine}_{what}_seconds{suffix}": middle(ours),
            f"{engine}_raw_{what}_seconds{suffix}": middle(raw),
            f"{engine}_{what}_ratio{suffix}": middle(ratios),
            f"{engine}_{what}_ratio_least{suffix}": min(ratios),
            f"{engine}_{what}_ratio_most{suffix}": max(ratios),
        }


def _want(segment: Segment, low: int, high: int, room: NDArray[np.uint8], at: int, wanted: list[Pages]) -> int:
    """Arrange pages as staging does: large runs have the same offset in their memory page as in the file's page."""
    layout = segment.layouts[0]
    while low < high:
        last = high
        if layout.block_bytes >= ALIGNED_BYTES:
            block = layout.block_of_page(low)
            last = min(high, layout.pages_of_block(block)[1])
            if layout.byte_of_page(last) - layout.byte_of_page(low) >= ALIGNED_BYTES:
                inside = layout.byte_of_page(low) - layout.byte_of_block(block)
                at += (inside - at) % PAGE_BYTES
        size = layout.byte_of_page(last) - layout.byte_of_page(low)
        wanted.append(Pages(segment, 0, low, last, room[at : at + size]))
        at, low = at + size, last
    return at
