"""Pinned host memory: regions of whole pages at fixed addresses, and an arena that moves pages among them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import threading
import time
from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiercache.planning.budgets import PAGE_BYTES, paged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tiercache.rows.backends.base import Backend


_PAUSE_SECONDS = 0.001
_NORMAL = 0
_DONTNEED = 4
_POPULATE_WRITE = 23
"""Linux 5.14: all pages at once, in less than half the time of one fault each."""
_MOVE = 1 | 2 | 4
"""MREMAP_MAYMOVE, FIXED and, since Linux 5.7, DONTUNMAP: the source stays mapped, without pages."""
_system = ctypes.CDLL(None, use_errno=True)
_madvise = _system.madvise  # mmap's own madvise holds the GIL during the system call
_madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mremap = getattr(_system, "mremap", None)
if _mremap is not None:
    _mremap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    _mremap.restype = ctypes.c_void_p
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def moves_pages() -> bool:
    """Return True if the system can move pages from one map to another and keep both maps."""
    if _mremap is None:
        return False
    maps = [mmap.mmap(-1, PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(2)]
    maps[0][0] = 1
    source, target = (np.frombuffer(memory, dtype=np.uint8).ctypes.data for memory in maps)
    moved = _mremap(source, PAGE_BYTES, PAGE_BYTES, _MOVE, target) != _FAILED
    return moved and (maps[0][0], maps[1][0]) == (0, 1)


class PinnedRegion:
    """Anonymous memory of whole pages, of which one range is in use.

    ``data`` is the uint8 array for users: the first bytes of the map. Bytes outside of the range are undefined.
    """

    __slots__ = ("_address", "_backend", "_bytes", "_cuts", "_is_pinned", "_pid", "data", "first_page", "last_page")

    def __init__(self, capacity: int, backend: Backend) -> None:
        self._backend, self._is_pinned, self._pid = backend, False, os.getpid()
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, dtype=np.uint8)
        self._address = self._bytes.ctypes.data
        self._cuts: list[int] = []
        """Pages at which another map of the system may begin, sorted: pages of one map can be moved at once."""
        self.data = self._bytes[:0]
        self.first_page = self.last_page = 0

    def __del__(self) -> None:
        """Unpin pages if the region was not closed: the device would mistake later pages at this address for them.

        Does nothing in a fork of the process, whose copy is not pinned.
        """
        if not sys.is_finalizing() and self._pid == os.getpid():
            self.unpin()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages in use."""
        return (self.last_page - self.first_page) * PAGE_BYTES

    def is_open_to(self, pages: int) -> bool:
        """Return True if exactly the first ``pages`` pages are in use."""
        return (self.first_page, self.last_page) == (0, pages)

    def holds(self, low: int, high: int) -> bool:
        """Return True if all of bytes [low, high) are in use."""
        return self.first_page * PAGE_BYTES <= low and high <= self.last_page * PAGE_BYTES

    def hold(self, first: int, last: int) -> None:
        """Use exactly pages [first, last), which are present; the caller handles the others."""
        self.first_page, self.last_page = first, last

    def hand_out(self, num_bytes: int) -> None:
        """Set ``data`` to the first bytes."""
        self.data = self._bytes[:num_bytes]

    def pin(self) -> None:
        """Use all pages, and pin them for the device."""
        self.hold(0, self._bytes.size // PAGE_BYTES)
        self.populate(self.first_page, self.last_page)
        self._backend.pin(self._address, self._bytes.size)
        self._is_pinned = True

    def unpin(self) -> None:
        """Unpin all pages, if they are pinned. Waits until the device is idle."""
        if self._is_pinned:
            self._backend.unpin(self._address)
            self._is_pinned = False

    # -- unused pages of regions that are not pinned -----------------------------------------------------------

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield [first, last) in parts that the system can move."""
        for cut in self._cuts[bisect_right(self._cuts, first) : bisect_left(self._cuts, last)]:
            yield first, cut
            first = cut
        if first < last:
            yield first, last

    def release(self, first: int, last: int) -> None:
        """Return pages to the system."""
        if first < last and self._advise(_DONTNEED, first, last):
            raise OSError(ctypes.get_errno(), "pages of host memory cannot be returned")

    def populate(self, first: int, last: int) -> None:
        """Allocate pages at once; if the system refuses, it allocates each on first use."""
        if first < last:
            self._advise(_POPULATE_WRITE, first, last)

    def move_in(self, first: int, last: int, source: PinnedRegion, source_first: int) -> bool:
        """Move pages, a run of ``source``, to [first, last) with their content; return False if the system cannot.

        This takes a hundredth of the time of returning them and having others zeroed.
        """
        if _mremap is None or not moves_pages():
            return False
        num_bytes, to = (last - first) * PAGE_BYTES, self._address + first * PAGE_BYTES
        self._cuts[bisect_left(self._cuts, first) : bisect_right(self._cuts, last)] = [first, last]
        if _mremap(source._address + source_first * PAGE_BYTES, num_bytes, num_bytes, _MOVE, to) != _FAILED:
            return True
        if self._advise(_NORMAL, first, last):  # the system had unmapped them before it refused
            raise OSError(
                ctypes.get_errno(), "pages of host memory are lost, because the system allows no more maps or memory"
            )
        return False

    def _advise(self, advice: int, first: int, last: int) -> int:
        """Call madvise, without the GIL; return its status."""
        return int(_madvise(self._address + first * PAGE_BYTES, (last - first) * PAGE_BYTES, advice))


_MOVED_PAGES = 32
"""The smallest run that is moved: for a smaller one, returning it and zeroing others takes no longer."""
_MOST_RUNS = 2048
"""Maximum runs of pages in a budget: each may take four of the 65,530 maps that Linux allows a process.

In a budget above 32 GiB no region has such a long run, and none is moved: few of its many regions are partly in use.
"""


class _FreeRun(NamedTuple):
    """Unused pages [first, last) of a region, in one map of the system."""

    region: PinnedRegion
    first: int
    last: int

    def pages(self) -> int:
        """Return the number of pages."""
        return self.last - self.first


class PinnedArena:
    """Allocates regions of at most ``region_bytes``; resident bytes never exceed ``budget``. Thread-safe.

    Freed regions are kept with their pages and reused. Long runs of freed pages are moved to regions that need pages,
    because fresh ones cost as much as filling them. If the budget is short, pages of kept regions are released first.

    If ``pinned``, each region is pinned once, as a whole, until ``close``: none gives pages to others, and none is
    returned to the system.
    """

    def __init__(self, budget: int, region_bytes: int, backend: Backend, *, pinned: bool = False) -> None:
        self.budget, self.region_bytes, self._backend = budget, paged(region_bytes), backend
        self._is_pinned = pinned
        self.resident_bytes = 0
        self.peak_bytes = 0
        self.wanted_bytes = 0
        """Resident bytes up to which `pin_ahead` allocates."""
        self._free: list[PinnedRegion] = []
        self._empty: list[PinnedRegion] = []
        self._free_runs: list[_FreeRun] = []
        """Sorted by length: the shortest that suffices is used, so that few are cut."""
        self._least_pages = max(_MOVED_PAGES, budget // PAGE_BYTES // _MOST_RUNS)
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> PinnedRegion:
        """Return a region of ``num_bytes`` with undefined content."""
        assert num_bytes <= self.region_bytes, f"a region of {num_bytes} bytes is above {self.region_bytes}"
        pages = paged(num_bytes) // PAGE_BYTES
        with self._lock:
            if self._is_pinned:
                region = self._free.pop() if self._free else self._pinned_region()
            elif not (region := self._pop(pages)).is_open_to(pages):
                self._open(region, pages)
            region.hand_out(num_bytes)
        return region

    def pin_ahead(self) -> None:
        """Allocate and pin regions for `take`, up to ``wanted_bytes``, on a thread that may be slow.

        Raises the error of the backend if it cannot pin; `take` then tries again.
        """
        while True:
            with self._lock:
                if self.resident_bytes + self.region_bytes > min(self.wanted_bytes, self.budget):
                    return
                self._free.insert(0, self._pinned_region())
            time.sleep(_PAUSE_SECONDS)  # lets waiting threads take the lock, which this thread would take again at once

    def _pinned_region(self) -> PinnedRegion:
        region = PinnedRegion(self.region_bytes, self._backend)
        region.pin()
        self._add_resident(self.region_bytes)
        return region

    def _pop(self, pages: int) -> PinnedRegion:
        """Return a free region, if possible one with exactly the pages needed."""
        for i in range(len(self._free) - 1, -1, -1):
            if self._free[i].is_open_to(pages):
                return self._free.pop(i)
        if self._free:
            return self._free.pop()
        return self._empty.pop() if self._empty else PinnedRegion(self.region_bytes, self._backend)

    def _open(self, region: PinnedRegion, pages: int) -> None:
        """Let a region use its first pages: its own, then pages of others, then fresh ones."""
        own = [(region.first_page, region.last_page)]
        own += [(run.first, run.last) for run in self._free_runs if run.region is region]
        self._free_runs = [run for run in self._free_runs if run.region is not region]
        region.hold(0, 0)
        for first, last in own:
            self._add_free(region, max(first, pages), last)
        end = 0
        for first, last in sorted(own):
            self._fill(region, end, min(first, pages))
            end = max(end, min(last, pages))
        self._fill(region, end, pages)
        region.hold(0, pages)

    def _fill(self, region: PinnedRegion, first: int, last: int) -> None:
        """Fill a range that has no pages."""
        while first < last:
            missing = last - first
            if self._free_runs and missing >= self._least_pages:
                enough = bisect_left(self._free_runs, missing, key=_FreeRun.pages)
                source, low, high = self._free_runs.pop(min(enough, len(self._free_runs) - 1))
                count = min(high - low, missing)
                if region.move_in(first, first + count, source, low):
                    self._add_free(source, low + count, high)
                    first += count
                else:
                    self._release(source, low, high)
                continue
            if self.resident_bytes + missing * PAGE_BYTES > self.budget:
                if self._free_runs:
                    self._release(*self._free_runs.pop(0))
                    continue
                if self._free:
                    free = self._free.pop()
                    self._release_others(free, 0, 0)
                    self._empty.append(free)
                    continue
            self._add_resident(missing * PAGE_BYTES)
            region.populate(first, last)
            first = last

    def _add_resident(self, num_bytes: int) -> None:
        self.resident_bytes += num_bytes
        assert self.resident_bytes <= self.budget, (
            f"planned host memory exceeded: {self.resident_bytes} of {self.budget} bytes"
        )
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def _release_others(self, region: PinnedRegion, first: int, last: int) -> None:
        """Let a region use only pages [first, last) of those in use."""
        low, high = region.first_page, region.last_page
        region.hold(first, last)
        if first == last:
            self._add_free(region, low, high)
        else:
            self._add_free(region, low, first)
            self._add_free(region, last, high)

    def _add_free(self, region: PinnedRegion, first: int, last: int) -> None:
        """Keep pages for other regions; short runs are returned to the system."""
        for low, high in region.runs(first, last):
            if high - low < self._least_pages:
                self._release(region, low, high)
            else:
                insort(self._free_runs, _FreeRun(region, low, high), key=_FreeRun.pages)

    def _release(self, region: PinnedRegion, first: int, last: int) -> None:
        region.release(first, last)
        self.resident_bytes -= (last - first) * PAGE_BYTES

    def give_back(self, region: PinnedRegion) -> None:
        """Free a region; its data must not be used afterwards."""
        with self._lock:
            region.data = region.data[:0]
            self._free.append(region)

    def shrink(self, region: PinnedRegion, low: int, high: int) -> None:
        """Free the pages of a region outside bytes [low, high), unless it is pinned."""
        with self._lock:
            if not self._is_pinned:
                first = min(max(region.first_page, low // PAGE_BYTES), region.last_page)
                self._release_others(region, first, max(first, min(region.last_page, -(-high // PAGE_BYTES))))

    def close(self) -> None:
        """Release all freed regions; no region may be taken afterwards."""
        with self._lock:
            for region in (*self._free, *self._empty):
                region.unpin()
                self.resident_bytes -= region.resident_bytes
            self.resident_bytes -= sum(run.pages() * PAGE_BYTES for run in self._free_runs)
            for freed in (self._free_runs, self._free, self._empty):
                freed.clear()
