"""Host memory for rows: page-granular regions whose sum is held under a budget."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING

import numpy as np

from tiercache.planning.budget import PAGE_BYTES, paged

if TYPE_CHECKING:
    from numpy.typing import NDArray


class HostRegion:
    """Anonymous memory of whole pages, parts of which can be given back.

    ``data`` is the uint8 array handed out: the first bytes of the map. What was given back reads as zeros.
    """

    __slots__ = ("data", "first_page", "last_page", "map")

    def __init__(self, capacity: int) -> None:
        self.map = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.data: NDArray[np.uint8] = np.frombuffer(self.map, dtype=np.uint8)[:0]
        self.first_page = self.last_page = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes not given back."""
        return (self.last_page - self.first_page) * PAGE_BYTES

    def open(self, num_bytes: int) -> None:
        """Hold the pages of the first ``num_bytes`` bytes, and those only."""
        pages = paged(num_bytes) // PAGE_BYTES
        if self.last_page > pages:
            self.map.madvise(mmap.MADV_DONTNEED, pages * PAGE_BYTES, (self.last_page - pages) * PAGE_BYTES)
        self.first_page, self.last_page = 0, pages
        self.data = np.frombuffer(self.map, dtype=np.uint8)[:num_bytes]

    def shrink(self, low: int, high: int) -> None:
        """Give back the pages outside bytes [low, high)."""
        first = min(max(self.first_page, low // PAGE_BYTES), self.last_page)
        last = max(first, min(self.last_page, -(-high // PAGE_BYTES)))
        for a, b in ((self.first_page, first), (last, self.last_page)):
            if a < b:
                self.map.madvise(mmap.MADV_DONTNEED, a * PAGE_BYTES, (b - a) * PAGE_BYTES)
        self.first_page, self.last_page = first, last

    def holds(self, low: int, high: int) -> bool:
        """Whether none of bytes [low, high) was given back."""
        return self.first_page * PAGE_BYTES <= low and high <= self.last_page * PAGE_BYTES


class HostMemory:
    """Hands out regions of at most ``region_bytes``; the bytes resident never exceed ``budget``. Thread-safe.

    Regions that come back are kept with their pages and handed out again: fresh pages cost as much as filling
    them. Where the budget is short, the kept ones go first.
    """

    def __init__(self, budget: int, region_bytes: int) -> None:
        self.budget, self.region_bytes = budget, paged(region_bytes)
        self.resident_bytes = 0
        self.peak_bytes = 0
        self._free: list[HostRegion] = []
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> HostRegion:
        """Return a region of ``num_bytes`` with undefined content."""
        assert num_bytes <= self.region_bytes, f"a region of {num_bytes} bytes is above {self.region_bytes}"
        with self._lock:
            region = self._free.pop() if self._free else HostRegion(self.region_bytes)
            self.resident_bytes += paged(num_bytes) - region.resident_bytes
            while self.resident_bytes > self.budget and self._free:
                self.resident_bytes -= self._free.pop().resident_bytes
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
            assert self.resident_bytes <= self.budget, (
                f"planned host memory exceeded: {self.resident_bytes} of {self.budget} bytes"
            )
            region.open(num_bytes)
        return region

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
