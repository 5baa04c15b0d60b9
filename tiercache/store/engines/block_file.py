"""Blobs in one file, each in runs of pages: read and written past the page cache where the system allows it.

On two cores the copies count: through the page cache a gigabyte takes 0.25 to 3.7 seconds of processor to write
(the kernel's large pages) and 0.35 to read, past it 0.05 and 0.1. The measurements stand in docs/design.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.engines.extents import ExtentAllocator, Extents, joined
from tiercache.store.engines.write_queue import WriteQueue
from tiercache.store.files import (
    FULL,
    PAGE_BYTES,
    ROOM_FOR_RECORDS,
    check_room,
    open_file,
    paged,
    punch_hole,
    read_cached,
    read_direct,
    unwritable,
    writing,
)
from tiercache.store.store_errors import BlockReadError, CorruptStoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tiercache.store.engines.extents import Run


_DIRECT_BYTES = 64 << 10
"""Shorter parts, and those that do not begin at a page of memory, are gathered; shorter ranges are read as usual."""
_MOST_GROWTH = 64 << 20
_READ_BYTES = 1 << 30
"""One read of Linux returns less than 2 GiB."""


class BlockFile:
    """The file and what of it is free. All that writes, and ``space``, is for one thread at a time."""

    def __init__(
        self, path: Path, *, readonly: bool, store_budget: int | None, is_read: Callable[[], bool] = bool
    ) -> None:
        """Open it, or make it; ``store_budget`` bounds it (None: the file system does). Raises OSError.

        ``is_read`` tells whether it is being read, which writes leave room for.
        """
        self.path, self._store_budget = path, store_budget
        self.space = ExtentAllocator()
        """Nothing is free until the owner says what is."""
        self._handle = open_file(path, os.O_RDONLY if readonly else os.O_RDWR | os.O_CREAT)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)  # ranges are read whole, and nothing beside them
        self._sparse = not readonly and self.taken_bytes < self.size
        """True if free runs may have holes, which take disk space again when they are written."""
        self._direct = self._second = self._open_direct(readonly=readonly)
        self._queue = WriteQueue(self._write, is_read)
        self.flush = self._queue.flush
        """Return when all that was put is written. Raises StoreFullError and StoreError."""
        self._ends = threading.local()

    def close(self) -> None:
        """Close the file."""
        self._queue.close()
        os.close(self._handle)
        if self._second is not None:
            os.close(self._second)
        self._handle, self._direct, self._second = -1, None, None  # else another file's number, later

    @property
    def size(self) -> int:
        """Bytes of the file now."""
        return os.fstat(self._handle).st_size

    @property
    def taken_bytes(self) -> int:
        """Bytes that the file system keeps for the file."""
        return os.fstat(self._handle).st_blocks * 512

    def occupy(self, low: NDArray[np.int64], size: NDArray[np.int64]) -> None:
        """Make all free but these runs, which may lie beyond the end of a file that was cut short.

        Raises CorruptStoreError where they overlap.
        """
        order = np.argsort(low)
        low, high = low[order], (low + size)[order]
        if np.any(low[1:] < high[:-1]):
            raise CorruptStoreError(f"blobs overlap in {self.path}: restore the store from a copy")
        end = max(self.size // PAGE_BYTES * PAGE_BYTES, int(high[-1]) if high.size else 0)
        begin, stop = np.append(0, high), np.append(low, end)
        free = begin < stop
        self.space = ExtentAllocator(end, begin[free].tolist(), stop[free].tolist())

    def read(self, extents: Extents, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with bytes of a blob. Raises BlockReadError.

        A long range goes past the page cache where ``out`` lies in its page as the bytes lie in their own.
        """
        if offset + out.size > extents.size:
            raise BlockReadError(f"ends at byte {extents.size:,} of {offset + out.size:,}")
        if offset < extents.dropped and out.size:
            raise BlockReadError(f"lacks its first {extents.dropped:,} bytes")
        for low, count in extents.pieces(offset, out.size):
            for at in range(0, count, _READ_BYTES):
                self._read(low + at, out[at : min(count, at + _READ_BYTES)])
            out = out[count:]

    def _read(self, offset: int, out: NDArray[np.uint8]) -> None:
        direct = self._direct_for(offset, out) if out.size >= _DIRECT_BYTES else None
        done = 0 if direct is None else self._read_direct(direct, offset, out)
        try:
            done = read_cached(self._handle, out.data, offset, done)
        except OSError as error:
            raise BlockReadError(f"cannot be read ({error})") from error
        if done < out.size:
            raise BlockReadError(f"is cut short, as {self.path.name} ends at byte {self.size:,}")

    def take(self, sizes: Sequence[int]) -> list[Extents]:
        """Take room for blobs of so many bytes, for all of them or none. Raises StoreFullError and StoreError."""
        if self.space.end > self.size:
            raise CorruptStoreError(
                f"{self.path} ends at byte {self.size:,}, before the end of blobs that it has: restore the store from "
                "a copy"
            )
        runs, found = self._take(sum(map(paged, sizes))), list[Extents]()
        room, start = Extents(1 << 62, 0, tuple(runs)), 0
        for size in sizes:
            found.append(Extents(size, 0, tuple(room.pieces(start, paged(size)))))
            start += paged(size)
        return found

    def _take(self, num_bytes: int) -> list[Run]:
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
        return joined(runs)

    def write(self, extents: Extents, offset: int, data: NDArray[np.uint8], *, stable: bool) -> None:
        """Write bytes from a page of a blob on, zeros to the end of their last page; in the file after ``flush``.

        Takes what it needs of ``data`` before it returns; of ``stable`` data, which does not change, before ``flush``.
        Raises StoreFullError and StoreError.
        """
        direct = data.size >= _DIRECT_BYTES and _address(data) % PAGE_BYTES == 0
        for low, count in extents.pieces(offset, data.size):
            whole = count - count % PAGE_BYTES if direct else 0
            if whole:
                self._queue.put(data[:whole].data, low)
            self._queue.copy(data[whole:count].data, low + whole)
            data = data[count:]
        if direct and not stable:
            self.flush()

    def sync(self) -> None:
        """Return when all that was put and flushed is durable. Raises StoreError."""
        with writing(self.path):
            os.fdatasync(self._handle)

    def give(self, runs: Iterable[Run]) -> None:
        """Free runs; what lies beyond the end of the file is no room."""
        for low, count in runs:
            self.space.give(low, count)
        if self.space.end > self.size:
            self.space.cut_tail()
            self.space.grow(max(0, self.size // PAGE_BYTES * PAGE_BYTES - self.space.end))

    def discard(self, extents: Iterable[Extents]) -> None:
        """Free blobs that were put in vain, with what is queued; what is free at the end leaves the file."""
        try:
            self._queue.discard()
        finally:
            self.give(run for blob in extents for run in blob.runs)
            self.trim()

    def trim(self) -> None:
        """Give what is free at the end back to the file system. Raises StoreError."""
        self.space.cut_tail()
        if self.space.end < self.size:
            with writing(self.path):
                os.ftruncate(self._handle, self.space.end)

    def shrink(self) -> None:
        """Give all that is free back: the end leaves the file, the rest becomes holes where there can be some.

        Nothing that is free may be needed after a crash. Raises StoreError.
        """
        self.trim()
        with writing(self.path):
            for low, high in self.space.runs:
                if not punch_hole(self._handle, low, high - low):
                    return
                self._sparse = True

    # -- inside ------------------------------------------------------------------------------------------

    def _open_direct(self, *, readonly: bool) -> int | None:
        """Open the file a second time, past the page cache; None where system or file system cannot."""
        try:
            return os.open(self.path, os.O_CLOEXEC | os.O_DIRECT | (os.O_RDONLY if readonly else os.O_RDWR))
        except (OSError, AttributeError):
            return None

    def _direct_for(self, offset: int, out: NDArray[np.uint8]) -> int | None:
        """Return what to read from past the page cache, or None."""
        return self._direct if (_address(out) - offset) % PAGE_BYTES == 0 else None

    def _read_direct(self, handle: int, offset: int, out: NDArray[np.uint8]) -> int:
        """Read whole pages, those at both ends beside ``out``; returns how many bytes of ``out`` are there."""
        head = -offset % PAGE_BYTES
        inner = (out.size - head) // PAGE_BYTES * PAGE_BYTES
        if not hasattr(self._ends, "view"):
            self._ends.view = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
        ends: memoryview = self._ends.view
        views = [ends[:PAGE_BYTES]] if head else []
        views.append(out[head : head + inner].data)
        tail = out.size - head - inner
        if tail:
            views.append(ends[PAGE_BYTES:])
        try:
            count = read_direct(handle, views, offset + head - (PAGE_BYTES if head else 0))
        except OSError as error:
            raise BlockReadError(f"cannot be read ({error})") from error
        count -= PAGE_BYTES - head if head else 0
        if head and count > 0:
            out[:head] = np.frombuffer(ends, np.uint8)[PAGE_BYTES - head : PAGE_BYTES]
        if tail and count > head + inner:
            out[head + inner :] = np.frombuffer(ends, np.uint8)[PAGE_BYTES : PAGE_BYTES + tail]
        return max(0, min(count, out.size))

    def _fill_holes(self, runs: Sequence[Run], num_bytes: int) -> None:
        """Have room for runs that may be holes: a full disk must show before it is written to."""
        lacking = self.size - self.taken_bytes
        if lacking <= 0:
            self._sparse = False
            return
        with writing(self.path, num_bytes, kept_bytes=ROOM_FOR_RECORDS):
            check_room(self.path, min(sum(count for _, count in runs), lacking) + ROOM_FOR_RECORDS)
            for low, count in runs:
                os.posix_fallocate(self._handle, low, count)

    def _grow(self, run_bytes: int, num_bytes: int) -> None:
        """Have a run of so many bytes at the end, for a put of ``num_bytes``; more at once where the file is large."""
        least = run_bytes - self.space.tail_bytes
        most = None if self._store_budget is None else self._store_budget // PAGE_BYTES * PAGE_BYTES - self.space.end
        if most is not None and most < least:
            raise StoreFullError(
                needed_bytes=num_bytes,
                limit=f"{self.path} may hold {self._store_budget:,}",
                advice="raise store_budget",
            )
        ample = max(least, min(self.space.end // 32 // PAGE_BYTES * PAGE_BYTES, _MOST_GROWTH, most or _MOST_GROWTH))
        for growth in (ample, least):
            try:
                check_room(self.path, growth + ROOM_FOR_RECORDS)  # those are written after the blocks
                os.posix_fallocate(self._handle, self.space.end, growth)
            except OSError as error:
                os.ftruncate(self._handle, self.space.end)
                if error.errno not in FULL or growth == least:
                    raise unwritable(self.path, error, num_bytes, kept_bytes=ROOM_FOR_RECORDS) from error
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
                self._direct = None  # the file system took the flag and cannot do it
                return 0
            if count < PAGE_BYTES:
                raise OSError(errno.EIO, "it took less than a page")
        return count // PAGE_BYTES * PAGE_BYTES


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])  # a third of what array.ctypes takes
