"""Which rows the host keeps: farthest next use out first, decided from sizes alone.

Farthest-next-use is Belady's MIN (L. A. Belady, 1966); with capacities that change over time it stays optimal
because a row's stay in memory is an interval of passes.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, NamedTuple

from tiercache.planning.budgets import PAGE_BYTES, paged

if TYPE_CHECKING:
    from tiercache.store.layout import SegmentLayout


class CachedRows(NamedTuple):
    """Pages ``[first, last)`` of one layout that the host holds."""

    first: int
    last: int


def cached_bytes(layout: SegmentLayout, held: CachedRows) -> int:
    """Return the pages of memory that hold pages of a layout, at most.

    One page more at either end, as the run may begin and end inside one, and one more where a block ends.
    """
    if held.first >= held.last:
        return 0
    low, high = layout.row_of_page(held.first), layout.row_of_page(held.last)
    blocks = layout.block_of_page(held.last - 1) - low // layout.block_rows
    return paged((high - low) * layout.row_bytes) + PAGE_BYTES * (1 + blocks)


class HostContent:
    """What the host holds beside dump and staging: for (pass dumped, group) a run of pages in next-use order.

    Every range enters and leaves once, in the logarithm of the number of segments.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[int, int], CachedRows] = {}
        """The pages held, of segments that have any."""
        self._ranges: dict[tuple[int, int], SegmentLayout] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._total = 0
        self._soonest: list[tuple[int, int, int]] = []
        """A heap: for each segment the next use of its first range, not later than that of its first page held."""
        self._farthest: list[tuple[int, int, int]] = []
        """A heap of negated numbers: the next use of its last range, not sooner than that of its last page held."""

    def enter(self, pass_index: int, group: int, ranges: SegmentLayout) -> None:
        """Take in a whole dump."""
        if ranges.num_pages:
            self._ranges[pass_index, group] = ranges
            self._hold((pass_index, group), CachedRows(0, ranges.num_pages))
            heappush(self._soonest, (ranges.next_use_R.item(0), pass_index, group))
            heappush(self._farthest, (-ranges.next_use_R.item(-1), -pass_index, -group))

    def find(self, pass_index: int, group: int) -> CachedRows:
        """Return the pages held of a layout; an empty run where none is."""
        return self.held.get((pass_index, group), CachedRows(0, 0))

    def keep(self, *, after: int, capacity: int) -> int:
        """Drop rows whose next use is not after pass ``after``, then the farthest, to at most ``capacity`` bytes.

        Returns the bytes held, in whole pages. Equal next uses go by dump order, the oldest kept first.
        """
        while self._soonest and self._soonest[0][0] <= after:
            _, *key = heappop(self._soonest)
            self._drop_used((key[0], key[1]), after)
        while self._total > capacity:
            self._drop_farthest(capacity)
        return self._total

    def _drop_used(self, key: tuple[int, int], after: int) -> None:
        if key in self.held:
            ranges = self._ranges[key]
            index = int(ranges.next_use_R.searchsorted(after, side="right"))
            self._hold(key, CachedRows(ranges.first_page_R.item(index), self.held[key].last))
            if key in self.held:
                heappush(self._soonest, (ranges.next_use_R.item(index), *key))

    def _drop_farthest(self, capacity: int) -> None:
        """Drop pages from the end of the range with the farthest next use: as few as it takes, or all of it."""
        next_use, pass_index, group = self._farthest[0]
        key = -pass_index, -group
        if key not in self.held:
            heappop(self._farthest)
            return
        ranges, held = self._ranges[key], self.held[key]
        index = ranges.range_of_page(held.last - 1)
        if ranges.next_use_R.item(index) < -next_use:  # its end was dropped, and others may be farther now
            heapreplace(self._farthest, (-ranges.next_use_R.item(index), pass_index, group))
            return
        low = max(held.first, ranges.first_page_R.item(index))
        self._hold(key, CachedRows(held.first, _fit(ranges, held, low, capacity - self._total + self._bytes[key])))

    def _hold(self, key: tuple[int, int], held: CachedRows) -> None:
        num_bytes = cached_bytes(self._ranges[key], held)
        self._total += num_bytes - self._bytes.get(key, 0)
        if num_bytes:
            self.held[key], self._bytes[key] = held, num_bytes
        else:
            del self._ranges[key]
            self.held.pop(key, None)
            self._bytes.pop(key, None)


def _fit(ranges: SegmentLayout, held: CachedRows, low: int, room: int) -> int:
    """Return the largest ``last`` in [low, held.last] for which [held.first, last) takes at most ``room`` bytes.

    That is ``low`` where none does.
    """
    high = held.last
    while low < high:
        middle = (low + high + 1) // 2
        if cached_bytes(ranges, CachedRows(held.first, middle)) <= room:
            low = middle
        else:
            high = middle - 1
    return low
