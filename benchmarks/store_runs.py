"""One engine's store in the benchmark: dumps and loads as the tiers do them, and the bare disk beside it."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.machine import drop_cache, files_below, middle, process_bytes_read
from tiercache.kernels.cpu.checksum import crc32c, has_crc32c
from tiercache.kernels.cpu.field_io import read_fields
from tiercache.kernels.cpu.file_io import has_reads, read_checked
from tiercache.planning.budget import ALIGNED_BYTES, PAGE_BYTES, paged
from tiercache.store import Cursor, Store
from tiercache.store.reading import Pages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from benchmarks.store_case import Case, Dump
    from tiercache.store import Segment


def drop_store(path: Path) -> None:
    """Let go of what the page cache holds of any file of a store."""
    for file in files_below(path):
        with contextlib.suppress(FileNotFoundError):
            drop_cache(file)


def warm_checksums() -> None:
    """Compile the checksum, and the reads with it, before anything is timed."""
    if has_crc32c():
        crc32c([(np.zeros(64, np.uint8), np.array([0, 32, 64]))])
    if has_reads():
        part = (np.zeros(64, np.uint8), np.array([0, 64]))
        read_checked([(-1, False, 0)], [part])
        read_fields([(False, [("", 64, 0, 64)])], [part])


def publish(store: Store, pass_index: int) -> None:
    """Commit before ``pass_index``."""
    store.publish(Cursor(pass_index, 0), state=b"", schedule_digest="", settings={}, environment={})


class HostPages:
    """Memory that the disk reads into and writes from, the same for the store and the bare disk.

    Its pages are there before anything is timed, and huge: what a disk moves past the page cache depends on how its
    memory lies, by a factor of two on a virtual machine.
    """

    def __init__(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, max(PAGE_BYTES, paged(num_bytes)), mmap.MAP_PRIVATE)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(memory)
        self.data = np.frombuffer(memory, np.uint8)
        self.data[::PAGE_BYTES] = 1

    @classmethod
    def of_noise(cls, num_bytes: int) -> HostPages:
        """Return memory of random bytes."""
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
        if has_crc32c():
            self.store.checksums = crc32c
        self.store.write_within(case.budget.transaction)
        if has_reads():
            self.store.read_with(read_checked, read_fields)
        self.bytes_read = self.bytes_useful = 0

    def dump(self, dump: Dump, source: HostPages) -> float:
        """Append and commit the dump of a pass; returns the seconds until it is durable."""
        begun = time.perf_counter()
        self.append(dump, source)
        publish(self.store, dump.pass_index + 1)
        seconds = time.perf_counter() - begun
        self._rest()
        return seconds

    def _rest(self) -> None:
        """Return when nothing dead is being deleted any more: that goes on after a commit."""
        count = -1
        while self.engine == "zarr" and count != (count := sum(len(names) for _, _, names in os.walk(self.path))):
            time.sleep(0.02)

    def append(self, dump: Dump, source: HostPages) -> None:
        """Append the dump of a pass, each of its blocks from a page of ``source`` on."""
        layout, room = dump.layout, paged(dump.layout.block_bytes)
        blocks = (
            (0, block, source.data[block * room :][: (high - low) * layout.row_bytes], dump.keys[low:high])
            for block, (low, high) in enumerate(map(layout.rows_of_block, range(layout.num_blocks)))
        )
        self.store.append(dump.pass_index, [layout], blocks, stable=True)

    def load(self, pass_index: int, room: HostPages) -> float:
        """Bring the rows with next use ``pass_index`` into ``room``, cold, and check them; returns the seconds."""
        pages = [  # what a plan knows before a load begins
            (segment, *layout.pages_of_range(index))
            for segment in self.store.segments
            for layout in segment.layouts
            for index, rows in enumerate(layout.ranges)
            if rows.next_use == pass_index
        ]
        drop_store(self.path)
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
    """Return memory for one load: two pages more for each run."""
    return HostPages(case.pass_bytes + 2 * PAGE_BYTES * (2 * ranges + case.pass_bytes // case.budget.block + 4))


def source_for(case: Case) -> HostPages:
    """Return memory for one dump: each block in pages of its own."""
    return HostPages.of_noise(paged(case.budget.block) * (case.pass_bytes // case.budget.block + 2))


class Seconds:
    """Of one thing done in turns by the bare disk and by an engine."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []

    def turn(self, raw: Callable[[], float], ours: Callable[[], float]) -> None:
        """Do it once each, every second time in the opposite order.

        Each begins when the disk has done what the one before left to it.
        """
        found = {}
        for way in (raw, ours) if len(self._taken) % 2 == 0 else (ours, raw):
            os.sync()
            found[way] = way()
        self._taken.append((found[raw], found[ours]))

    def figures(self, engine: str, what: str, suffix: str = "") -> dict[str, float]:
        """Return medians of both, and the bare disk's seconds over the engine's turn by turn."""
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
    """Lay pages out as staging does: large runs begin in their page of memory as they do in that of the file."""
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
