"""A region of host memory: whole pages at fixed addresses, which can be given back or moved to another region."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.planning.budgets import PAGE_BYTES, paged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tiercache.rows.backends.base import Backend


_NORMAL = 0
_DONTNEED = 4
_POPULATE_WRITE = 23
"""Linux 5.14: all pages at once, for less than half of what they cost one fault after another."""
_MOVE = 1 | 2 | 4
"""MREMAP_MAYMOVE, FIXED and, since Linux 5.7, DONTUNMAP: what the pages leave stays mapped, without pages."""
_system = ctypes.CDLL(None, use_errno=True)
_madvise = _system.madvise  # of mmap, madvise holds the GIL while the system works
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mremap = getattr(_system, "mremap", None)
if _mremap is not None:
    _mremap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    _mremap.restype = ctypes.c_void_p
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def moves_pages() -> bool:
    """Try whether the system moves pages from one map to another and leaves both."""
    if _mremap is None:
        return False
    maps = [mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
    maps[0][0] = 1
    source, target = (np.frombuffer(memory, dtype=np.uint8).ctypes.data for memory in maps)
    moved = _mremap(source, PAGE_BYTES, PAGE_BYTES, _MOVE, target) != _FAILED
    return moved and (maps[0][0], maps[1][0]) == (0, 1)


class PinnedRegion:
    """Anonymous memory of whole pages, of which some stretch is held.

    ``data`` is the uint8 array handed out: the first bytes of the map. What is not held has undefined content. Pages
    that are held are pinned for the device, and those only: none is while the stretch that is held changes.
    """

    __slots__ = ("_address", "_backend", "_bytes", "_cuts", "_pid", "_pinned", "data", "first_page", "last_page")

    def __init__(self, capacity: int, backend: Backend) -> None:
        self._backend, self._pinned, self._pid = backend, -1, os.getpid()
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self._address = self._bytes.ctypes.data
        self._cuts: list[int] = []
        """Pages where the system may see another map begin, rising: it moves the pages of one at a time."""
        self.data = self._bytes[:0]
        self.first_page = self.last_page = 0

    def __del__(self) -> None:
        """Unpin what nobody closed: the device would take other pages at this address for these.

        A process that was forked off has a copy of what is not its own.
        """
        if not sys.is_finalizing() and self._pid == os.getpid():
            self.unpin()

    @property
    def resident_bytes(self) -> int:
        """Bytes that are held."""
        return (self.last_page - self.first_page) * PAGE_BYTES

    def is_open_to(self, num_bytes: int) -> bool:
        """Whether exactly the pages of the first ``num_bytes`` bytes are held."""
        return (self.first_page, self.last_page) == (0, paged(num_bytes) // PAGE_BYTES)

    def holds(self, low: int, high: int) -> bool:
        """Whether all of bytes [low, high) are held."""
        return self.first_page * PAGE_BYTES <= low and high <= self.last_page * PAGE_BYTES

    def hold(self, first: int, last: int) -> None:
        """Hold pages [first, last), which are here, and no others: what becomes of these is for the caller."""
        if (self.first_page, self.last_page) != (first, last):
            self.unpin()
            self.first_page, self.last_page = first, last
        if self._pinned < 0 and first < last:
            address = self._address + first * PAGE_BYTES
            self._backend.pin(address, self.resident_bytes)
            self._pinned = address

    def hand_out(self, num_bytes: int) -> None:
        """Make the first bytes ``data``."""
        self.data = self._bytes[:num_bytes]

    def unpin(self) -> None:
        """Take the pages from the device."""
        if self._pinned >= 0:
            self._backend.unpin(self._pinned)
            self._pinned = -1

    # -- pages nobody holds, none of them pinned ---------------------------------------------------------------

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield [first, last) in parts that the system can move."""
        for cut in self._cuts[bisect_right(self._cuts, first) : bisect_left(self._cuts, last)]:
            yield first, cut
            first = cut
        if first < last:
            yield first, last

    def release(self, first: int, last: int) -> None:
        """Give pages back to the system."""
        if first < last and self._advise(_DONTNEED, first, last):
            raise OSError(ctypes.get_errno(), "pages of host memory cannot be given back")

    def populate(self, first: int, last: int) -> None:
        """Take pages from the system at once; where that is refused they come one by one as they are used."""
        if first < last:
            self._advise(_POPULATE_WRITE, first, last)

    def bring(self, first: int, last: int, source: PinnedRegion, source_first: int) -> bool:
        """Move pages, a run of ``source``, to [first, last) with all they have; False where the system cannot.

        For a hundredth of what it costs to give them back and to have others zeroed.
        """
        if _mremap is None or not moves_pages():
            return False
        num_bytes, to = (last - first) * PAGE_BYTES, self._address + first * PAGE_BYTES
        self._cuts[bisect_left(self._cuts, first) : bisect_right(self._cuts, last)] = [first, last]
        if _mremap(source._address + source_first * PAGE_BYTES, num_bytes, num_bytes, _MOVE, to) != _FAILED:
            return True
        if self._advise(_NORMAL, first, last):  # the system had unmapped them before it refused
            raise OSError(
                ctypes.get_errno(), "pages of host memory are lost, as the system allows no more maps or memory"
            )
        return False

    def _advise(self, advice: int, first: int, last: int) -> int:
        """Call madvise, without the GIL; return its status."""
        return int(_madvise(self._address + first * PAGE_BYTES, (last - first) * PAGE_BYTES, advice))


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
