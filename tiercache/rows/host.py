"""The host tier: dumps as blocks in memory, from which later passes load and the writer writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.planning.host_plan import PageRange
    from tiercache.rows.pinned import PinnedArena, PinnedRegion
    from tiercache.store.layout import SegmentLayout


class PageRun(NamedTuple):
    """Pages [low, high) of a layout, adjacent in host memory; ``first``: the index of their first row as they move."""

    first: int
    layout: SegmentLayout
    low: int
    high: int
    data: NDArray[np.uint8]

    @property
    def end(self) -> int:
        """One past the index of their last row."""
        return self.first + self.layout.row_of_page(self.high) - self.layout.row_of_page(self.low)


class HostTier:
    """Blocks of earlier dumps, by (pass, group).

    Used by one thread at a time: by the reader after a load, then by the writer when it allocates the next dump, and by
    the training thread after ``PassSwitcher.drain`` or while both are idle. The writer also reads blocks at any time.
    """

    def __init__(self, memory: PinnedArena) -> None:
        self.memory = memory
        self._dumps: dict[tuple[int, int], tuple[SegmentLayout, dict[int, PinnedRegion]]] = {}
        """The layout of each dump, and its blocks by number, without freed ones."""

    def enter(self, pass_index: int, group: int, layout: SegmentLayout) -> list[PinnedRegion]:
        """Allocate a dump and return its blocks, to be filled."""
        blocks: dict[int, PinnedRegion] = {}
        if layout.num_blocks:
            self._dumps[pass_index, group] = layout, blocks
        for block in range(layout.num_blocks):  # if an allocation fails, `clear` frees the earlier ones
            blocks[block] = self.memory.take(layout.bytes_of_block(block))
        return list(blocks.values())

    def keep(self, retained: Mapping[tuple[int, int], PageRange], *, not_before: int) -> None:
        """Free everything but ``retained`` of the dumps before pass ``not_before``."""
        for key in [key for key in self._dumps if key[0] < not_before]:
            if key in retained:
                self._shrink(key, retained[key])
            else:
                self._drop(key)

    def clear(self) -> None:
        """Free everything."""
        for key in list(self._dumps):
            self._drop(key)

    def runs(self, pass_index: int, group: int, cached: PageRange, first: int) -> Iterator[PageRun]:
        """Yield runs of ``cached`` pages block by block; ``first``: the index of their first row as they move."""
        layout, blocks = self._dumps[pass_index, group]
        page = cached.first
        while page < cached.last:
            block = layout.block_of_page(page)
            last, base = min(cached.last, layout.pages_of_block(block)[1]), layout.byte_of_block(block)
            data = blocks[block].data[layout.byte_of_page(page) - base : layout.byte_of_page(last) - base]
            run = PageRun(first, layout, page, last, data)
            yield run
            page, first = last, run.end

    def page(self, pass_index: int, group: int, page: int) -> NDArray[np.uint8] | None:
        """Return the bytes of one page, None if it is not cached."""
        if (pass_index, group) not in self._dumps:
            return None
        layout, blocks = self._dumps[pass_index, group]
        block = layout.block_of_page(page)
        if (region := blocks.get(block)) is None:
            return None
        base = layout.byte_of_block(block)
        low, high = layout.byte_of_page(page) - base, layout.byte_of_page(page + 1) - base
        return region.data[low:high] if region.holds(low, high) else None

    def _drop(self, key: tuple[int, int]) -> None:
        for region in self._dumps.pop(key)[1].values():
            self.memory.give_back(region)

    def _shrink(self, key: tuple[int, int], cached: PageRange) -> None:
        layout, blocks = self._dumps[key]
        low, high = layout.byte_of_page(cached.first), layout.byte_of_page(cached.last)
        for block, region in list(blocks.items()):
            base = layout.byte_of_block(block)
            end = base + region.data.size
            if end <= low or base >= high:
                self.memory.give_back(blocks.pop(block))
            elif low > base or high < end:
                self.memory.shrink(region, max(0, low - base), min(region.data.size, high - base))
