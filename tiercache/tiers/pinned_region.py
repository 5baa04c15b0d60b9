"""A region of host memory: whole pages at fixed addresses, which can be given back or moved to another region."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

import numpy as np

from tiercache.planning.budget import PAGE_BYTES, paged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tiercache.backends.base import Backend

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
