"""The bare disk: the reads and writes of one epoch replayed with plain pread and pwrite.

One reader and one writer, as in training, each at full speed without waiting for the other. The bytes and ranges of
every read and the blocks of every write come from the plan. As in the store, whole pages are read and written past the
page cache, and adjacent blocks in one request. A commit ends like the store's: fdatasync of the blocks, then a page of
records, fdatasync, and one page to a write-through handle. The store's own work (checksums, copies, offsets) is left
out.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy as np

from benchmarks.machine import drop_cache
from tiercache.planning.budgets import PAGE_BYTES, paged
from tiercache.planning.pass_plan import PassPlan
from tiercache.store.layout import SegmentLayout

KEY_BYTES = 8
REQUEST_BYTES = 32 << 20


class Span(NamedTuple):
    """Bytes of a file."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Replay:
    """The disk operations of an epoch."""

    reads: list[Span]
    commits: list[list[Span]]
    """Written blocks, by commit."""
    file_bytes: int

    @property
    def bytes_read(self) -> int:
        """Bytes of all reads."""
        return sum(span.size for span in self.reads)

    @property
    def bytes_written(self) -> int:
        """Bytes of all blocks: rows, keys and dense state."""
        return sum(span.size for spans in self.commits for span in spans)

    @classmethod
    def of(cls, plans: Sequence[PassPlan], *, num_passes: int, state_bytes: int) -> Replay:
        """Lay out the dumps of an epoch in one file, with a slot per pass; ``plans`` are the plans of one epoch."""
        slot = max(slot_bytes(plan.dumps) for plan in plans) + paged(state_bytes)
        reads, commits = [], []
        for plan in plans:
            for load in plan.loads:
                layout = plans[load.pass_index % num_passes].dumps[load.group]
                at = load.pass_index % num_passes * slot + slot_bytes(
                    plans[load.pass_index % num_passes].dumps[: load.group]
                )
                reads += reads_of(layout, at, load.store.first, load.store.last)
            at = plan.pass_index % num_passes * slot
            commits.append([*blocks_of(plan.dumps, at), Span(at + slot_bytes(plan.dumps), state_bytes)])
        return cls(reads, commits, slot * num_passes)


def _block_sizes(layout: SegmentLayout) -> list[tuple[int, int]]:
    """Return the bytes of each block's rows and of its keys."""
    rows = (layout.bytes_of_block(block) for block in range(layout.num_blocks))
    return [(num_bytes, num_bytes // layout.row_bytes * KEY_BYTES) for num_bytes in rows]


def slot_bytes(layouts: Sequence[SegmentLayout]) -> int:
    """Return the bytes of a dump in the file."""
    return sum(paged(size) for layout in layouts for sizes in _block_sizes(layout) for size in sizes)


def reads_of(layout: SegmentLayout, at: int, low: int, high: int) -> list[Span]:
    """Cut pages [low, high) at the ends of blocks; the first block begins at ``at`` and is followed by its keys."""
    begins = np.cumsum([0] + [sum(map(paged, sizes)) for sizes in _block_sizes(layout)])
    spans = []
    while low < high:
        block = layout.block_of_page(low)
        last = min(high, layout.pages_of_block(block)[1])
        first = layout.byte_of_page(low)
        inside = first - layout.byte_of_block(block)
        spans.append(Span(at + int(begins[block]) + inside, layout.byte_of_page(last) - first))
        low = last
    return spans


def blocks_of(layouts: Sequence[SegmentLayout], at: int) -> list[Span]:
    """Return the blocks of a dump, each followed by its keys."""
    spans = []
    for size in (size for layout in layouts for sizes in _block_sizes(layout) for size in sizes):
        spans.append(Span(at, size))
        at += paged(size)
    return spans


class BareDisk:
    """Two files on the store's file system, one for reading and one for writing."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """Write both files with the given number of bytes, in whole pages."""
        self._paths = folder / "raw.read", folder / "raw.write", folder / "raw.records"
        self._data = memoryview(mmap.mmap(-1, 8 << 20))
        self._data[:] = np.random.default_rng(1).bytes(len(self._data))
        for path in self._paths[:2]:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
            done = 0
            while done < num_bytes:
                done += os.pwrite(handle, self._data[: min(len(self._data), num_bytes - done)], done)
            os.fsync(handle)
            os.close(handle)

    def __enter__(self) -> BareDisk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in self._paths:
            path.unlink()

    def seconds(
        self, reads: Sequence[Span] = (), commits: Sequence[list[Span]] = (), *, memory: memoryview | None = None
    ) -> float:
        """Return the seconds of reads and commits at the same time, starting with an empty page cache.

        Reads go to consecutive places of ``memory`` and wrap around at its end; writes come from it in the same way.
        Without ``memory``, there is room for one read. Writes overwrite the contents of the file.
        """
        for path in self._paths[:2]:
            drop_cache(path)
        start = threading.Barrier(3, timeout=60)  # a thread that cannot open its file never arrives
        with ThreadPoolExecutor(2) as threads:
            work = [
                threads.submit(self._read, reads, start, memory),
                threads.submit(self._write, commits, start, memory),
            ]
            start.wait()
            begun = time.perf_counter()
            for one in work:
                one.result()
            return time.perf_counter() - begun

    def _read(self, spans: Sequence[Span], start: threading.Barrier, memory: memoryview | None) -> None:
        most = max((span.size for span in spans), default=0) + 2 * PAGE_BYTES
        room = memoryview(mmap.mmap(-1, most)) if memory is None else memory
        handle = os.open(self._paths[0], os.O_RDONLY | os.O_DIRECT)
        start.wait()
        at = 0
        for span in spans:
            first = span.offset // PAGE_BYTES * PAGE_BYTES
            done, size = 0, paged(span.offset + span.size) - first
            at = at if at + size <= len(room) else 0
            while done < size:
                count = os.preadv(handle, [room[at + done : at + size]], first + done)
                if count == 0:
                    raise ValueError(f"{self._paths[0]} ends before byte {first + size:,}, which is to be read")
                done += count
            at += size
        os.close(handle)

    def _write(self, commits: Sequence[list[Span]], start: threading.Barrier, memory: memoryview | None) -> None:
        data = self._data if memory is None else memory
        blocks = os.open(self._paths[1], os.O_WRONLY | os.O_DIRECT)
        records = os.open(self._paths[2], os.O_WRONLY | os.O_CREAT)
        through = os.open(self._paths[2], os.O_WRONLY | os.O_DSYNC)
        start.wait()
        for spans in commits:
            done, size = 0, sum(paged(span.size) for span in spans)  # the spans are adjacent
            while done < size:
                parts = min(size - done, REQUEST_BYTES)
                views = _around(data, done, parts)
                done += os.pwritev(blocks, views, spans[0].offset + done)
            os.fdatasync(blocks)
            os.pwrite(records, self._data[:PAGE_BYTES], PAGE_BYTES)
            os.fdatasync(records)
            os.pwrite(through, self._data[:PAGE_BYTES], 0)
        for handle in (blocks, records, through):
            os.close(handle)


def _around(memory: memoryview, at: int, size: int) -> list[memoryview]:
    """Return ``size`` bytes from byte ``at``, wrapping around at the end of the memory."""
    views: list[memoryview] = []
    while size:
        views.append(memory[at % len(memory) :][:size])
        at, size = at + len(views[-1]), size - len(views[-1])
    return views
