"""Host memory for rows: page-granular regions whose sum is held under a budget."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple

from tiercache.planning.budget import PAGE_BYTES, paged
from tiercache.tiers.pinned_region import PinnedRegion

if TYPE_CHECKING:
    from tiercache.backends.base import Backend

_MOVED_PAGES = 32
"""The fewest that are moved: to give back fewer and have them zeroed elsewhere takes no longer."""
_MOST_RUNS = 2048
"""Runs of pages that a budget may be divided into, as each may be four maps of the 65,530 that Linux allows a process.

Of a budget above 32 GiB no region has as long a run, and none is moved: such a budget holds so many regions that few
of them are held in part.
"""


class _Spare(NamedTuple):
    """Pages [first, last) of a region that nobody holds, in one map of the system."""

    region: PinnedRegion
    first: int
    last: int

    def pages(self) -> int:
        """Return how many they are."""
        return self.last - self.first


class PinnedArena:
    """Hands out regions of at most ``region_bytes``; the bytes resident never exceed ``budget``. Thread-safe.

    Regions that come back are kept with their pages and handed out again, and longer runs of pages that a region gives
    back are moved to where pages are wanted: fresh ones cost as much as filling them. Where the budget is short, the
    pages of kept regions go first.
    """

    def __init__(self, budget: int, region_bytes: int, backend: Backend) -> None:
        self.budget, self.region_bytes, self._backend = budget, paged(region_bytes), backend
        self.resident_bytes = 0
        self.peak_bytes = 0
        self._free: list[PinnedRegion] = []
        self._empty: list[PinnedRegion] = []
        self._spares: list[_Spare] = []
        """The shortest first: taken is the shortest that is long enough, so that few are cut."""
        self._fewest = max(_MOVED_PAGES, budget // PAGE_BYTES // _MOST_RUNS)
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> PinnedRegion:
        """Return a region of ``num_bytes`` with undefined content."""
        assert num_bytes <= self.region_bytes, f"a region of {num_bytes} bytes is above {self.region_bytes}"
        with self._lock:
            region = self._pop(num_bytes)
            if not region.is_open_to(num_bytes):
                self._open(region, paged(num_bytes) // PAGE_BYTES)
            region.hand_out(num_bytes)
        return region

    def _pop(self, num_bytes: int) -> PinnedRegion:
        """Return a free region, one whose pages stay as they are where there is one: others are pinned anew."""
        for i in range(len(self._free) - 1, -1, -1):
            if self._free[i].is_open_to(num_bytes):
                return self._free.pop(i)
        if self._free:
            return self._free.pop()
        return self._empty.pop() if self._empty else PinnedRegion(self.region_bytes, self._backend)

    def _open(self, region: PinnedRegion, pages: int) -> None:
        """Have a region hold its first pages: its own, those of others, and fresh ones, in this order."""
        mine = [(region.first_page, region.last_page)]
        mine += [(spare.first, spare.last) for spare in self._spares if spare.region is region]
        self._spares = [spare for spare in self._spares if spare.region is not region]
        region.hold(0, 0)
        for first, last in mine:
            self._keep_spare(region, max(first, pages), last)
        end = 0
        for first, last in sorted(mine):
            self._fill(region, end, min(first, pages))
            end = max(end, min(last, pages))
        self._fill(region, end, pages)
        region.hold(0, pages)

    def _fill(self, region: PinnedRegion, first: int, last: int) -> None:
        """Bring pages to places that have none."""
        while first < last:
            missing = last - first
            if self._spares and missing >= self._fewest:
                enough = bisect_left(self._spares, missing, key=_Spare.pages)
                source, low, high = self._spares.pop(min(enough, len(self._spares) - 1))
                count = min(high - low, missing)
                if region.bring(first, first + count, source, low):
                    self._keep_spare(source, low + count, high)
                    first += count
                else:
                    self._release(source, low, high)
                continue
            if self.resident_bytes + missing * PAGE_BYTES > self.budget:
                if self._spares:
                    self._release(*self._spares.pop(0))
                    continue
                if self._free:
                    spare = self._free.pop()
                    self._spare(spare, 0, 0)
                    self._empty.append(spare)
                    continue
            self.resident_bytes += missing * PAGE_BYTES
            assert self.resident_bytes <= self.budget, (
                f"planned host memory exceeded: {self.resident_bytes} of {self.budget} bytes"
            )
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
            region.populate(first, last)
            first = last

    def _spare(self, region: PinnedRegion, first: int, last: int) -> None:
        """Let a region hold pages [first, last) of what it holds, and no others."""
        low, high = region.first_page, region.last_page
        try:
            region.hold(first, last)
        finally:
            if first == last:
                self._keep_spare(region, low, high)
            else:
                self._keep_spare(region, low, first)
                self._keep_spare(region, last, high)

    def _keep_spare(self, region: PinnedRegion, first: int, last: int) -> None:
        """Keep pages that nobody holds to be moved; few at one place go back to the system."""
        for low, high in region.runs(first, last):
            if high - low < self._fewest:
                self._release(region, low, high)
            else:
                insort(self._spares, _Spare(region, low, high), key=_Spare.pages)

    def _release(self, region: PinnedRegion, first: int, last: int) -> None:
        region.release(first, last)
        self.resident_bytes -= (last - first) * PAGE_BYTES

    def give_back(self, region: PinnedRegion) -> None:
        """Take a region back; nobody may use its data any more."""
        with self._lock:
            region.data = region.data[:0]
            self._free.append(region)

    def shrink(self, region: PinnedRegion, low: int, high: int) -> None:
        """Give back what lies outside bytes [low, high) of a region."""
        with self._lock:
            first = min(max(region.first_page, low // PAGE_BYTES), region.last_page)
            self._spare(region, first, max(first, min(region.last_page, -(-high // PAGE_BYTES))))

    def close(self) -> None:
        """Let all regions that came back go; nobody may take a region any more."""
        with self._lock:
            for region in (*self._free, *self._empty):
                region.unpin()
                self.resident_bytes -= region.resident_bytes
            self.resident_bytes -= sum((spare.last - spare.first) * PAGE_BYTES for spare in self._spares)
            self._spares.clear()
            self._free.clear()
            self._empty.clear()
