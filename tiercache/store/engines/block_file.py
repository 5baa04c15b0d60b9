"""Blobs in one file, each in runs of pages, read and written past the page cache if the system allows it.

On two cores the copies matter: through the page cache a gigabyte takes 0.25 to 3.7 seconds of processor to write (the
kernel's large pages) and 0.35 to read, past it 0.05 and 0.1. The measurements are in docs/design.
"""

from __future__ import annotations

import errno
import os
import threading
from bisect import bisect_left, bisect_right
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

from tiercache.store.direct_io import DEPTH, ReadQueue, WriteQueue, address_of, read_nothing_ahead
from tiercache.store.files import (
    DIRECT_BYTES,
    FULL,
    PAGE_BYTES,
    ROOM_FOR_RECORDS,
    check_room,
    open_direct,
    open_file,
    paged,
    punch_hole,
    read_cached,
    writing,
)
from tiercache.store.store_errors import BlockReadError, StoreError, StoreFullError, damaged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.store.direct_io import Range

Run = tuple[int, int]
"""The first byte of a run of whole pages, and its bytes."""
_SPLIT_BYTES = 1 << 20
"""A run this long may hold a part of any larger blob; smaller blobs split over shorter runs."""
_MOST_GROWTH = 64 << 20
_READ_BYTES = 1 << 30
"""One read of Linux returns less than 2 GiB."""


class ExtentAllocator:
    """Free runs of [0, ``end``), not adjacent, in order.

    Space is taken from the run after the last one taken, else from the first one that is large enough: blobs written
    together are adjacent, and blobs freed together leave a hole that fits others of their size.
    """

    def __init__(self, taken: Iterable[Run] = (), end: int = 0) -> None:
        """Make all of [0, ``end``) free but ``taken``, which may exceed it. Raises ValueError if they overlap."""
        self.end = 0
        """The end of the space, in bytes."""
        self.runs = list[tuple[int, int]]()
        """Start and end of each run."""
        self._next = -1
        for low, num_bytes in sorted(taken):
            if low < self.end:
                raise ValueError(f"runs overlap at byte {low:,}")
            self.grow(low - self.end)
            self.end += num_bytes
        self.grow(max(0, end - self.end))

    @property
    def tail_bytes(self) -> int:
        """Bytes of the run that touches the end."""
        low, high = self.runs[-1] if self.runs else (0, -1)
        return high - low if high == self.end else 0

    def grow(self, num_bytes: int) -> None:
        """Move the end; the added bytes are free."""
        self.end += num_bytes
        self.give(self.end - num_bytes, num_bytes)

    def cut_tail(self) -> None:
        """Move the end to the start of the run that touches it."""
        if self.tail_bytes:
            self.end, _ = self.runs.pop()

    def take(self, num_bytes: int) -> list[Run]:
        """Take bytes in one run, else in several that are not short for this size; fewer if less is free."""
        i = bisect_left(self.runs, (self._next,))
        if i == len(self.runs) or self.runs[i][0] != self._next or self.runs[i][1] - self._next < num_bytes:
            i = next((i for i, (low, high) in enumerate(self.runs) if high - low >= num_bytes), -1)
        if i >= 0:
            return [self._take(i, num_bytes)] if num_bytes else []
        found, least, i = list[Run](), min(_SPLIT_BYTES, paged(num_bytes // 8)), 0
        while num_bytes and i < len(self.runs):
            low, high = self.runs[i]
            if (size := min(num_bytes, high - low)) < min(least, num_bytes):
                i += 1
                continue
            found.append(self._take(i, size))
            num_bytes -= size
        return found

    def _take(self, i: int, num_bytes: int) -> Run:
        low, high = self.runs[i]
        self._next = low + num_bytes
        self.runs[i : i + 1] = [(self._next, high)] if self._next < high else []
        return low, num_bytes

    def give(self, low: int, num_bytes: int) -> None:
        """Free bytes that were taken."""
        if not num_bytes:
            return
        high, i = low + num_bytes, bisect_left(self.runs, (low,))
        assert i == 0 or self.runs[i - 1][1] <= low, f"bytes {low} to {high} are free already"
        assert i == len(self.runs) or high <= self.runs[i][0], f"bytes {low} to {high} are free already"
        if i < len(self.runs) and self.runs[i][0] == high:
            high = self.runs.pop(i)[1]
        if i and self.runs[i - 1][1] == low:
            i -= 1
            low = self.runs.pop(i)[0]
        self.runs.insert(i, (low, high))


class Extents:
    """The runs of the file that hold a blob. Immutable."""

    __slots__ = ("_starts", "dropped", "runs", "size")

    def __init__(self, size: int, dropped: int, runs: tuple[Run, ...]) -> None:
        """``runs`` have its bytes from ``dropped`` on, and zeros to the end of the last page."""
        self.size, self.dropped, self.runs = size, dropped, runs
        self._starts = [*accumulate((count for _, count in runs), initial=dropped)]

    def pieces(self, offset: int, num_bytes: int) -> Iterator[Run]:
        """Yield the runs of the file with these bytes of the blob, none of which may be dropped."""
        i = bisect_right(self._starts, offset) - 1
        while num_bytes:
            low, inside = self.runs[i][0], offset - self._starts[i]
            count = min(num_bytes, self.runs[i][1] - inside)
            yield low + inside, count
            offset, num_bytes, i = offset + count, num_bytes - count, i + 1

    def drop(self, upto: int) -> tuple[Extents, list[Run]]:
        """Return the blob without the whole pages that end before a byte, and these pages' runs."""
        dropped = self.size if upto >= self.size else upto - upto % PAGE_BYTES
        num_bytes = min(paged(dropped), self._starts[-1]) - self.dropped
        if num_bytes <= 0:
            return self, []
        rest = self.pieces(self.dropped + num_bytes, self._starts[-1] - self.dropped - num_bytes)
        return Extents(self.size, dropped, tuple(rest)), [*self.pieces(self.dropped, num_bytes)]

    def whole_bytes(self, file_bytes: int) -> int:
        """Return its size, or the number of its first bytes in a file of ``file_bytes``."""
        for start, (low, count) in zip(self._starts, self.runs, strict=False):
            if low + min(count, self.size - start) > file_bytes:
                return start + max(0, file_bytes - low)
        return self.size


class BlockFile:
    """The file and its free space. Writing methods and ``space`` are for one thread at a time."""

    def __init__(self, path: Path, *, readonly: bool, store_budget: int | None, create: bool = True) -> None:
        """Open it, or ``create`` it; ``store_budget`` bounds it (None: the file system does). Raises OSError."""
        self.path, self._store_budget = path, store_budget
        self.space = ExtentAllocator()
        """Nothing is free until the owner calls ``occupy``."""
        access = os.O_RDONLY if readonly else os.O_RDWR
        self._handle = open_file(path, access | (os.O_CREAT if create and not readonly else 0))
        read_nothing_ahead(self._handle)  # ranges are read whole
        self._sparse = not readonly and self.taken_bytes < self.size
        """True if free runs may have holes, which take disk space again when they are written."""
        self._direct: int | None = None
        """The file, open past the page cache; None if the system or the file system cannot."""
        with suppress(OSError):
            self._direct = open_direct(path, access)
        self._handles = [self._handle] if self._direct is None else [self._handle, self._direct]
        self._dirty = self._unsynced = False
        """True if something was written since the last sync; if a sync failed, after which success proves nothing."""
        self._reads, self._count = 0, threading.Lock()
        self._queue = WriteQueue(self._write, lambda: self._reads > 0)
        self.flush = self._queue.flush
        """Return when all data that was put is written. Raises StoreFullError and StoreError."""
        self._queues = threading.local()
        """The ReadQueue of each thread."""

    def close(self) -> None:
        """Close the file."""
        self._queue.close()
        while self._handles:
            os.close(self._handles.pop())
        self._handle, self._direct = -1, None  # the numbers may be reused for other files

    @property
    def size(self) -> int:
        """The current size of the file."""
        return os.fstat(self._handle).st_size

    @property
    def taken_bytes(self) -> int:
        """Bytes that the file system allocates to the file."""
        return os.fstat(self._handle).st_blocks * 512

    def occupy(self, runs: Iterable[Run]) -> None:
        """Make everything free but these runs, which may exceed the file. Raises CorruptStoreError if they overlap."""
        try:
            self.space = ExtentAllocator(runs, self.size // PAGE_BYTES * PAGE_BYTES)
        except ValueError as error:
            raise damaged(f"blobs overlap in {self.path}") from error

    def read(self, ranges: Sequence[tuple[Extents, int, NDArray[np.uint8]]]) -> None:
        """Fill memory with the bytes of each blob from an offset on. Raises BlockReadError.

        Long ranges bypass the page cache, many at a time, where memory has the same offset in its page as the bytes
        have in theirs.
        """
        short: list[Range] = []
        long: list[Range] = []
        for extents, offset, out in ranges:
            if offset + out.size > extents.size:
                raise BlockReadError(f"ends at byte {extents.size:,} of {offset + out.size:,}")
            if offset < extents.dropped and out.size:
                raise BlockReadError(f"lacks its first {extents.dropped:,} bytes")
            rest = out
            for low, count in extents.pieces(offset, out.size):
                for at in range(0, count, _READ_BYTES):
                    part = rest[at : min(count, at + _READ_BYTES)]
                    is_long = part.size >= DIRECT_BYTES and (address_of(part) - low - at) % PAGE_BYTES == 0
                    (long if is_long and self._direct is not None else short).append((low + at, part))
                rest = rest[count:]
        with self._count:
            self._reads += 1
        try:
            self._read(short, [0] * len(short))
            for first in range(0, len(long), DEPTH):
                self._read_direct(long[first : first + DEPTH])
        except OSError as error:
            raise BlockReadError(f"cannot be read ({error})") from error
        finally:
            with self._count:
                self._reads -= 1

    def _read(self, ranges: Sequence[Range], done: Sequence[int]) -> None:
        """Read the rest of ranges through the page cache."""
        for (offset, out), num_bytes in zip(ranges, done, strict=True):
            if num_bytes < out.size and read_cached(self._handle, out.data, offset, num_bytes) < out.size:
                raise BlockReadError(f"is truncated: {self.path.name} ends at byte {self.size:,}")

    def _read_direct(self, ranges: Sequence[Range]) -> None:
        if not hasattr(self._queues, "reads"):
            self._queues.reads = ReadQueue()
        direct = self._direct
        self._read(ranges, [0] * len(ranges) if direct is None else self._queues.reads.read(direct, ranges))

    def take(self, sizes: Sequence[int]) -> list[Extents]:
        """Allocate space for blobs of ``sizes``, for all of them or none. Raises StoreFullError and StoreError."""
        if self.space.end > self.size:
            raise damaged(f"{self.path} ends at byte {self.size:,}, before the end of its blobs")
        self._dirty = True
        num_bytes = sum(map(paged, sizes))
        runs = self.space.take(num_bytes)
        lacking = num_bytes - sum(count for _, count in runs)
        try:
            if self._sparse:
                self._fill_holes(runs, num_bytes)
            if lacking:
                self._grow(lacking, num_bytes)
                runs += self.space.take(lacking)
        except BaseException:
            self.give(runs)
            raise
        room, start, found = Extents(num_bytes, 0, tuple(_joined(runs))), 0, list[Extents]()
        for size in sizes:
            found.append(Extents(size, 0, tuple(room.pieces(start, paged(size)))))
            start += paged(size)
        return found

    def write(self, extents: Extents, offset: int, data: NDArray[np.uint8], *, stable: bool) -> None:
        """Write bytes from a page of a blob on, zeros to the end of their last page; in the file after ``flush``.

        Copies ``data`` before it returns, or, if it is ``stable`` and does not change, before ``flush``.
        Raises StoreFullError and StoreError.
        """
        direct = data.size >= DIRECT_BYTES and address_of(data) % PAGE_BYTES == 0  # other parts are gathered
        for low, count in extents.pieces(offset, data.size):
            whole = count - count % PAGE_BYTES if direct else 0
            if whole:
                self._queue.put(data[:whole].data, low)
            self._queue.copy(data[whole:count].data, low + whole)
            data = data[count:]
        if direct and not stable:
            self.flush()

    def sync(self) -> None:
        """Return when all data that was put and flushed is durable. Raises StoreError, and again after a failure."""
        if self._unsynced:
            raise StoreError(f"{self.path} could not be synced: fix that and open the store again")
        if self._dirty:
            self._unsynced = True
            with writing(self.path):
                os.fdatasync(self._handle)
            self._unsynced = self._dirty = False

    def give(self, runs: Iterable[Run]) -> None:
        """Free runs, without bytes beyond the end of the file."""
        for low, count in runs:
            self.space.give(low, count)
        if self.space.end > self.size:
            self.space.cut_tail()
            self.space.grow(max(0, self.size // PAGE_BYTES * PAGE_BYTES - self.space.end))

    def discard(self, extents: Iterable[Extents]) -> None:
        """Free blobs whose put failed, with queued data; free space at the end is cut off."""
        try:
            self._queue.discard()
        finally:
            self.give(run for blob in extents for run in blob.runs)
            self.trim()

    def trim(self) -> None:
        """Cut off the free space at the end of the file. Raises StoreError."""
        self.space.cut_tail()
        if self.space.end < self.size:
            with writing(self.path):
                os.ftruncate(self._handle, self.space.end)

    def shrink(self) -> None:
        """Cut off the free end and punch holes into the rest, which no crash may need. Raises StoreError."""
        self.trim()
        with writing(self.path):
            for low, high in self.space.runs:
                if not punch_hole(self._handle, low, high - low):
                    return
                self._sparse = True

    def _fill_holes(self, runs: Sequence[Run], num_bytes: int) -> None:
        """Allocate runs that may be holes, so that a full disk shows before they are written."""
        lacking = self.size - self.taken_bytes
        if lacking <= 0:
            self._sparse = False
            return
        with writing(self.path, num_bytes, kept_bytes=ROOM_FOR_RECORDS):
            check_room(self.path, min(sum(count for _, count in runs), lacking) + ROOM_FOR_RECORDS)
            for low, count in runs:
                os.posix_fallocate(self._handle, low, count)

    def _grow(self, run_bytes: int, num_bytes: int) -> None:
        """Extend the file by ``run_bytes`` for a put of ``num_bytes``; by more if the file is large."""
        least = run_bytes - self.space.tail_bytes
        most = None if self._store_budget is None else self._store_budget // PAGE_BYTES * PAGE_BYTES - self.space.end
        if most is not None and most < least:
            limit = f"{self.path} may hold {self._store_budget:,}"
            raise StoreFullError(needed_bytes=num_bytes, limit=limit, advice="raise store_budget")
        ample = max(least, min(self.space.end // 32 // PAGE_BYTES * PAGE_BYTES, _MOST_GROWTH, most or _MOST_GROWTH))
        with writing(self.path, num_bytes, kept_bytes=ROOM_FOR_RECORDS):
            for growth in (ample, least):
                try:
                    check_room(self.path, growth + ROOM_FOR_RECORDS)  # records are written after the blocks
                    os.posix_fallocate(self._handle, self.space.end, growth)
                except OSError as error:
                    os.ftruncate(self._handle, self.space.end)
                    if error.errno not in FULL or growth == least:
                        raise
                else:
                    self.space.grow(growth)
                    return

    def _write(self, views: list[memoryview], offset: int) -> int:
        """Write whole pages at a page; returns how many bytes of them were written. Several threads may be here."""
        direct = self._direct
        with writing(self.path, sum(map(len, views))):
            try:
                count = os.pwritev(self._handle if direct is None else direct, views, offset)
            except OSError as error:
                if direct is None or error.errno != errno.EINVAL:
                    raise
                self._direct = None  # the file system accepted the flag but cannot do it
                return 0
            if count < PAGE_BYTES:
                raise OSError(errno.EIO, "it wrote less than a page")
        return count // PAGE_BYTES * PAGE_BYTES


def _joined(runs: Iterable[Run]) -> list[Run]:
    found = list[Run]()
    for low, count in runs:
        if found and sum(found[-1]) == low:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((low, count))
    return found
