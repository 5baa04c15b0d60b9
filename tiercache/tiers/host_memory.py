"""Host memory for rows: page-granular regions whose sum is held under a budget."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np

from tiercache.planning.budget import PAGE_BYTES, paged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tiercache.processors.processor import Mover


_DONTNEED = 4
_POPULATE_WRITE = 23
"""Linux 5.14: all pages at once, for less than half of what they cost one fault after another."""
_madvise = ctypes.CDLL(None, use_errno=True).madvise  # of mmap, madvise holds the GIL while the system works
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class HostRegion:
    """Anonymous memory of whole pages, parts of which can be given back.

    ``data`` is the uint8 array handed out: the first bytes of the map. What was given back reads as zeros. Pages that
    are held are locked for the device; while some are given back, the others are not.
    """

    __slots__ = ("_address", "_bytes", "_locked", "_mover", "_pid", "data", "first_page", "last_page")

    def __init__(self, capacity: int, mover: Mover) -> None:
        self._mover, self._locked, self._pid = mover, -1, os.getpid()
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self._address = self._bytes.ctypes.data
        self.data = self._bytes[:0]
        self.first_page = self.last_page = 0

    def __del__(self) -> None:
        """Unlock what nobody closed: the device would take other pages at this address for these.

        A process that was forked off has a copy of what is not its own.
        """
        if not sys.is_finalizing() and self._pid == os.getpid():
            self.unlock()

    @property
    def resident_bytes(self) -> int:
        """Bytes not given back."""
        return (self.last_page - self.first_page) * PAGE_BYTES

    def is_open_to(self, num_bytes: int) -> bool:
        """Whether exactly the pages of the first ``num_bytes`` bytes are held."""
        return (self.first_page, self.last_page) == (0, paged(num_bytes) // PAGE_BYTES)

    def open(self, num_bytes: int) -> None:
        """Hold the pages of the first ``num_bytes`` bytes, and those only."""
        pages = paged(num_bytes) // PAGE_BYTES
        first, last = min(self.first_page, pages), min(self.last_page, pages)
        if not self.is_open_to(num_bytes):
            self.unlock()
        self._advise(_DONTNEED, pages, self.last_page)
        self._advise(_POPULATE_WRITE, 0, first)
        self._advise(_POPULATE_WRITE, last, pages)
        self.first_page, self.last_page = 0, pages
        self.data = self._bytes[:num_bytes]
        self._lock()

    def shrink(self, low: int, high: int) -> None:
        """Give back the pages outside bytes [low, high)."""
        first = min(max(self.first_page, low // PAGE_BYTES), self.last_page)
        last = max(first, min(self.last_page, -(-high // PAGE_BYTES)))
        if (self.first_page, self.last_page) != (first, last):
            self.unlock()
        self._advise(_DONTNEED, self.first_page, first)
        self._advise(_DONTNEED, last, self.last_page)
        self.first_page, self.last_page = first, last
        self._lock()

    def _lock(self) -> None:
        if self._locked < 0 and self.first_page < self.last_page:
            address = self._address + self.first_page * PAGE_BYTES
            self._mover.lock(address, self.resident_bytes)
            self._locked = address

    def unlock(self) -> None:
        """Take the pages from the device."""
        if self._locked >= 0:
            self._mover.unlock(self._locked)
            self._locked = -1

    def _advise(self, advice: int, first: int, last: int) -> None:
        """Have the system give or take back pages, without the GIL; to give them may be refused: that is slower."""
        if first < last:
            failed = _madvise(self._address + first * PAGE_BYTES, (last - first) * PAGE_BYTES, advice)
            if failed and advice == _DONTNEED:
                raise OSError(ctypes.get_errno(), "pages of host memory cannot be given back")

    def holds(self, low: int, high: int) -> bool:
        """Whether none of bytes [low, high) was given back."""
        return self.first_page * PAGE_BYTES <= low and high <= self.last_page * PAGE_BYTES


class HostMemory:
    """Hands out regions of at most ``region_bytes``; the bytes resident never exceed ``budget``. Thread-safe.

    Regions that come back are kept with their pages and handed out again: fresh pages cost as much as filling
    them. Where the budget is short, the pages of kept ones go first.
    """

    def __init__(self, budget: int, region_bytes: int, mover: Mover) -> None:
        self.budget, self.region_bytes, self._mover = budget, paged(region_bytes), mover
        self.resident_bytes = 0
        self.peak_bytes = 0
        self._free: list[HostRegion] = []
        self._empty: list[HostRegion] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> HostRegion:
        """Return a region of ``num_bytes`` with undefined content."""
        assert num_bytes <= self.region_bytes, f"a region of {num_bytes} bytes is above {self.region_bytes}"
        with self._lock:
            region = self._pop(num_bytes)
            self.resident_bytes += paged(num_bytes) - region.resident_bytes
            while self.resident_bytes > self.budget and self._free:
                spare = self._free.pop()
                self.resident_bytes -= spare.resident_bytes
                spare.shrink(0, 0)
                self._empty.append(spare)
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
            assert self.resident_bytes <= self.budget, (
                f"planned host memory exceeded: {self.resident_bytes} of {self.budget} bytes"
            )
            region.open(num_bytes)
        return region

    def _pop(self, num_bytes: int) -> HostRegion:
        """Return a free region, one whose pages stay as they are where there is one: others are locked anew."""
        for i in range(len(self._free) - 1, -1, -1):
            if self._free[i].is_open_to(num_bytes):
                return self._free.pop(i)
        if self._free:
            return self._free.pop()
        return self._empty.pop() if self._empty else HostRegion(self.region_bytes, self._mover)

    def give_back(self, region: HostRegion) -> None:
        """Take a region back; nobody may use its data any more."""
        with self._lock:
            region.data = region.data[:0]
            self._free.append(region)

    def shrink(self, region: HostRegion, low: int, high: int) -> None:
        """Give back what lies outside bytes [low, high) of a region."""
        with self._lock:
            before = region.resident_bytes
            region.shrink(low, high)
            self.resident_bytes -= before - region.resident_bytes

    def close(self) -> None:
        """Let all regions that came back go; nobody may take a region any more."""
        with self._lock:
            for region in (*self._free, *self._empty):
                region.unlock()
                self.resident_bytes -= region.resident_bytes
            self._free.clear()
            self._empty.clear()
