"""The rows that the host caches: the farthest next use is evicted first, decided from sizes alone.

Farthest-next-use is Belady's MIN (L. A. Belady, 1966); with capacities that change over time it stays optimal
because a row's stay in memory is an interval of passes.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush, heapreplace
from typing import TYPE_CHECKING, NamedTuple

from tiercache.planning.budgets import PAGE_BYTES, paged

if TYPE_CHECKING:
    from tiercache.store.layout import SegmentLayout


class PageRange(NamedTuple):
    """Pages ``[first, last)`` of one layout."""

    first: int
    last: int


def cached_bytes(layout: SegmentLayout, pages: PageRange, grain: int = PAGE_BYTES) -> int:
    """Return the maximum bytes of memory that pages take: whole memory pages, one more at both ends and at the end of
    each block, as they may begin inside one; or ``grain`` for each block.
    """
    if pages.first >= pages.last:
        return 0
    low, high = layout.row_of_page(pages.first), layout.row_of_page(pages.last)
    blocks = layout.block_of_page(pages.last - 1) - low // layout.block_rows
    return (paged((high - low) * layout.row_bytes) if grain == PAGE_BYTES else 0) + grain * (1 + blocks)


class HostCache:
    """Rows in host memory besides dump and staging: for each pass dumped and group, a range of pages by next use.

    Every range enters and leaves once, in the logarithm of the number of segments. ``grain``: see `cached_bytes`.
    """

    def __init__(self, grain: int = PAGE_BYTES) -> None:
        self._grain = grain
        self.pages: dict[tuple[int, int], PageRange] = {}
        """The pages cached, of segments that have any, by (pass dumped, group)."""
        self._layouts: dict[tuple[int, int], SegmentLayout] = {}
        self._bytes: dict[tuple[int, int], int] = {}
        self._total = 0
        self._soonest: list[tuple[int, int, int]] = []
        """A heap: the next use of each segment's first range, not later than its first cached page's."""
        self._farthest: list[tuple[int, int, int]] = []
        """A heap of negated numbers: the next use of a segment's last range, not sooner than its last cached page's."""

    def enter(self, pass_index: int, group: int, layout: SegmentLayout) -> None:
        """Add a whole dump."""
        if layout.num_pages:
            self._layouts[pass_index, group] = layout
            self._set((pass_index, group), PageRange(0, layout.num_pages))
            heappush(self._soonest, (layout.next_use_R.item(0), pass_index, group))
            heappush(self._farthest, (-layout.next_use_R.item(-1), -pass_index, -group))

    def find(self, pass_index: int, group: int) -> PageRange:
        """Return the pages of a layout that are cached; an empty range if none is."""
        return self.pages.get((pass_index, group), PageRange(0, 0))

    def keep(self, *, after: int, capacity: int) -> int:
        """Evict rows whose next use is not after pass ``after``, then the farthest, down to ``capacity`` bytes.

        Returns the bytes cached, in whole pages of memory. Of equal next uses the last dumped is evicted first.
        """
        while self._soonest and self._soonest[0][0] <= after:
            _, *key = heappop(self._soonest)
            self._evict_used((key[0], key[1]), after)
        while self._total > capacity:
            self._evict_farthest(capacity)
        return self._total

    def _evict_used(self, key: tuple[int, int], after: int) -> None:
        if key in self.pages:
            layout = self._layouts[key]
            index = int(layout.next_use_R.searchsorted(after, side="right"))
            self._set(key, PageRange(layout.first_page_R.item(index), self.pages[key].last))
            if key in self.pages:
                heappush(self._soonest, (layout.next_use_R.item(index), *key))

    def _evict_farthest(self, capacity: int) -> None:
        """Evict pages from the end of the range with the farthest next use: as few as it takes, or all of it."""
        next_use, pass_index, group = self._farthest[0]
        key = -pass_index, -group
        if key not in self.pages:
            heappop(self._farthest)
            return
        layout, pages = self._layouts[key], self.pages[key]
        index = layout.range_of_page(pages.last - 1)
        if layout.next_use_R.item(index) < -next_use:  # its end was evicted, and others may be farther now
            heapreplace(self._farthest, (-layout.next_use_R.item(index), pass_index, group))
            return
        low = max(pages.first, layout.first_page_R.item(index))
        last = _fitting_end(layout, pages, low, capacity - self._total + self._bytes[key], self._grain)
        self._set(key, PageRange(pages.first, last))

    def _set(self, key: tuple[int, int], pages: PageRange) -> None:
        num_bytes = cached_bytes(self._layouts[key], pages, self._grain)
        self._total += num_bytes - self._bytes.get(key, 0)
        if num_bytes:
            self.pages[key], self._bytes[key] = pages, num_bytes
        else:
            del self._layouts[key]
            self.pages.pop(key, None)
            self._bytes.pop(key, None)


def _fitting_end(layout: SegmentLayout, pages: PageRange, low: int, num_bytes: int, grain: int = PAGE_BYTES) -> int:
    """Return the largest end from ``low`` on with which the range takes at most ``num_bytes``; ``low`` if none does."""
    return low + bisect_right(
        range(low + 1, pages.last + 1), num_bytes,
        key=lambda last: cached_bytes(layout, PageRange(pages.first, last), grain),
    )  # fmt: skip
