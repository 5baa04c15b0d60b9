"""Blocks in one file, each from a page on: read and written past the page cache where the system allows it.

On two cores the copies count: through the page cache a gigabyte takes 0.25 to 3.7 seconds of processor to write
(the kernel's large pages) and 0.35 to read, past it 0.05 and 0.1. The measurements stand in docs/design.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.store.engines.engine import ReadSource
from tiercache.store.engines.write_queue import WriteQueue
from tiercache.store.files import (
    FULL,
    PAGE_BYTES,
    ROOM_FOR_RECORDS,
    check_room,
    full_disk,
    open_file,
    paged,
    punch_hole,
    read_cached,
    read_direct,
)
from tiercache.store.store_errors import BlockReadError, StoreError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray


class ExtentAllocator:
    """Free runs of [0, ``end``), apart from each other and in order.

    Room comes from the run that goes on where the last room ended, else from the first one that is large enough:
    what is written together stands together, and what is freed together is a hole that its like fits into again.
    """

    def __init__(self) -> None:
        self.end = 0
        """Where the space ends."""
        self._low: list[int] = []
        self._high: list[int] = []
        self._next = -1

    @property
    def free_bytes(self) -> int:
        """Bytes of all runs."""
        return sum(self._high) - sum(self._low)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Beginning and end of each run."""
        return list(zip(self._low, self._high, strict=True))

    @property
    def tail_bytes(self) -> int:
        """Bytes of the run that touches the end."""
        return self._high[-1] - self._low[-1] if self._high and self._high[-1] == self.end else 0

    def grow(self, num_bytes: int) -> None:
        """Move the end; what is new is free."""
        if self._high and self._high[-1] == self.end:
            self._high[-1] += num_bytes
        else:
            self._low.append(self.end)
            self._high.append(self.end + num_bytes)
        self.end += num_bytes

    def cut_tail(self) -> None:
        """Move the end to where the run that touches it begins."""
        if self.tail_bytes:
            self.end = self._low.pop()
            self._high.pop()

    def take(self, num_bytes: int) -> int | None:
        """Return where so many bytes are free, which then are not; None where no run is large enough."""
        i = bisect_left(self._low, self._next)
        if i == len(self._low) or self._low[i] != self._next or self._high[i] - self._next < num_bytes:
            i = next((i for i, low in enumerate(self._low) if self._high[i] - low >= num_bytes), -1)
        if i < 0:
            return None
        low = self._low[i]
        self._next = self._low[i] = low + num_bytes
        if self._low[i] == self._high[i]:
            del self._low[i], self._high[i]
        return low

    def use(self, low: int, num_bytes: int) -> None:
        """Take exactly these bytes, which are free."""
        high = low + num_bytes
        i = bisect_right(self._low, low) - 1
        assert i >= 0, f"bytes {low} to {high} are not free"
        assert high <= self._high[i], f"bytes {low} to {high} are not free"
        left, right = (self._low[i], low), (high, self._high[i])
        del self._low[i], self._high[i]
        for a, b in (right, left):
            if a < b:
                self._low.insert(i, a)
                self._high.insert(i, b)

    def give(self, low: int, num_bytes: int) -> None:
        """Free bytes that were taken."""
        high = low + num_bytes
        if low == high:
            return
        i = bisect_left(self._low, low)
        assert i == 0 or self._high[i - 1] <= low, f"bytes {low} to {high} are free already"
        assert i == len(self._low) or high <= self._low[i], f"bytes {low} to {high} are free already"
        if i < len(self._low) and self._low[i] == high:
            self._low[i] = low
        else:
            self._low.insert(i, low)
            self._high.insert(i, high)
        if i > 0 and self._high[i - 1] == low:
            self._high[i - 1] = self._high[i]
            del self._low[i], self._high[i]


_DIRECT_BYTES = 64 << 10
"""Smaller blocks, and those that do not begin at a page of memory, are gathered; smaller ranges are read as usual."""
_MOST_GROWTH = 64 << 20


class Extent(NamedTuple):
    """Where a block stands in the file."""

    offset: int
    size: int

    @property
    def pages(self) -> int:
        """Bytes of its pages."""
        return paged(self.size)


class BlockFile:
    """The file and what of it is free. ``put``, ``flush``, ``sync`` and ``space`` are for one thread at a time."""

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
        """Whether what is free may have holes, which take room again when they are written."""
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

    def occupy(self, places: Iterable[Extent]) -> None:
        """Make all free but ``places``, which lie apart from each other; what is free at the end leaves the file."""
        self.space = ExtentAllocator()
        held = [place for place in places if place.size]
        ends = [place.offset + place.pages for place in held]
        self.space.grow(max([Extent(0, self.size).pages, *ends]))
        for place in held:
            self.space.use(place.offset, place.pages)
        self.trim()

    def source(self, place: Extent | None, offset: int, out: NDArray[np.uint8]) -> ReadSource | None:
        """Say where the bytes lie that ``read`` would fill ``out`` with; None where the block has no such bytes."""
        if place is None or offset + out.size > place.size:
            return None
        direct = self._direct_for(place.offset + offset, out) if out.size >= _DIRECT_BYTES else None
        handle = self._handle if direct is None else direct
        return ReadSource(handle, in_pages=direct is not None, offset=place.offset + offset)

    def read(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Fill ``out`` with the bytes from ``offset`` on. Raises BlockReadError.

        A large range goes past the page cache where ``out`` lies in its page as ``offset`` lies in its own.
        """
        direct = self._direct_for(offset, out) if out.size >= _DIRECT_BYTES else None
        done = 0 if direct is None else self._read_direct(direct, offset, out)
        try:
            done = read_cached(self._handle, out.data, offset, done)
        except OSError as error:
            raise BlockReadError(f"cannot be read ({error})") from error
        if done < out.size:
            raise BlockReadError(f"is cut short, as {self.path.name} ends at byte {self.size:,}")

    def put(self, data: NDArray[Any], *, stable: bool) -> Extent:
        """Write a block where there is room and return its place; it is in the file after ``flush``.

        Takes what it needs of ``data`` before it returns; of ``stable`` data, which does not change, before ``flush``.
        Raises StoreFullError and StoreError.
        """
        source, direct, pages = data.reshape(-1).view(np.uint8), 0, paged(data.nbytes)
        offset = self.space.take(pages) if pages else 0
        if offset is None:
            self._grow(pages)
            offset = self.space.take(pages)
            assert offset is not None, "the file grew by too little"
        elif self._sparse and pages:
            self._fill_hole(offset, pages)
        place = Extent(offset, data.nbytes)
        try:
            if source.size >= _DIRECT_BYTES and source.__array_interface__["data"][0] % PAGE_BYTES == 0:
                direct = source.size // PAGE_BYTES * PAGE_BYTES
                self._queue.put(source[:direct].data, place.offset)
                if not stable:
                    self.flush()
            self._queue.copy(source[direct:].data, place.offset + direct)
        except BaseException:
            self.give([place])
            raise
        return place

    def sync(self) -> None:
        """Return when all that was put and flushed is durable. Raises StoreError."""
        try:
            os.fdatasync(self._handle)
        except OSError as error:
            raise self._failed(error) from error

    def give(self, places: Iterable[Extent]) -> None:
        """Free places."""
        for place in places:
            self.space.give(place.offset, place.pages)

    def discard(self, places: Iterable[Extent]) -> None:
        """Free places that were put in vain, with what is queued; what is free at the end leaves the file."""
        try:
            self._queue.discard()
        finally:
            self.give(places)
            self.trim()

    def trim(self) -> None:
        """Give what is free at the end back to the file system."""
        self.space.cut_tail()
        os.ftruncate(self._handle, self.space.end)

    def shrink(self) -> None:
        """Give all that is free back: the end leaves the file, the rest becomes holes where there can be some.

        Nothing that is free may be needed after a crash. Raises StoreError.
        """
        try:
            self.trim()
            for low, high in self.space.runs:
                if not punch_hole(self._handle, low, high - low):
                    return
                self._sparse = True
        except OSError as error:
            raise self._failed(error) from error

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

    def _fill_hole(self, offset: int, num_bytes: int) -> None:
        """Have room for bytes that may be a hole, or free them again: a full disk must show before records follow."""
        lacking = self.size - self.taken_bytes
        if lacking <= 0:
            self._sparse = False
            return
        try:
            check_room(self.path, min(num_bytes, lacking) + ROOM_FOR_RECORDS)
            os.posix_fallocate(self._handle, offset, num_bytes)
        except OSError as error:
            self.space.give(offset, num_bytes)
            if error.errno in FULL:
                raise full_disk(self.path, error, num_bytes, kept_bytes=ROOM_FOR_RECORDS) from error
            raise self._failed(error) from error

    def _grow(self, num_bytes: int) -> None:
        """Add at least so many bytes to the run at the end; more at once where the file is large."""
        least = num_bytes - self.space.tail_bytes
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
                if error.errno not in FULL:
                    raise self._failed(error) from error
                if growth == least:
                    raise full_disk(self.path, error, num_bytes, kept_bytes=ROOM_FOR_RECORDS) from error
            else:
                self.space.grow(growth)
                return

    def _failed(self, error: OSError) -> StoreError:
        return StoreError(f"{self.path} cannot be written ({error}): mend that and open the store again")

    def _write(self, views: list[memoryview], offset: int) -> int:
        """Write whole pages at a page; returns how many bytes of them were written. Several threads may be here."""
        direct = self._direct
        try:
            count = os.pwritev(self._handle if direct is None else direct, views, offset)
        except OSError as error:
            if error.errno in FULL:
                raise full_disk(self.path, error, sum(map(len, views))) from error
            if direct is None or error.errno != errno.EINVAL:
                raise self._failed(error) from error
            self._direct = None  # the file system took the flag and cannot do it
            return 0
        if count < PAGE_BYTES:
            raise self._failed(OSError(errno.EIO, "it took less than a page"))
        return count // PAGE_BYTES * PAGE_BYTES


def _address(array: NDArray[np.uint8]) -> int:
    return int(array.__array_interface__["data"][0])  # a third of what array.ctypes takes
