"""The host tier: dumps as blocks in memory, from which later passes load and the writer writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.planning.host_plan import PageRange
    from tiercache.rows.pinned import PinnedArena, PinnedRegion
    from tiercache.store.layout import SegmentLayout


class HostTier:
    """Blocks of earlier dumps, by (pass, group).

    Used by one thread at a time: by the reader after a load, then by the writer when it allocates the next dump, and by
    the training thread after ``PassSwitcher.drain`` or while both are idle. The writer also reads blocks at any time.
    """

    def __init__(self, memory: PinnedArena) -> None:
        self.memory = memory
        self._blocks: dict[tuple[int, int], dict[int, PinnedRegion]] = {}
        """Dumps by number, without freed ones."""
        self._layouts: dict[tuple[int, int], SegmentLayout] = {}

    def enter(self, pass_index: int, group: int, layout: SegmentLayout) -> list[PinnedRegion]:
        """Allocate a dump and return its blocks, to be filled."""
        blocks: dict[int, PinnedRegion] = {}
        if layout.num_blocks:
            self._blocks[pass_index, group], self._layouts[pass_index, group] = blocks, layout
        for block in range(layout.num_blocks):  # if an allocation fails, `clear` frees the earlier ones
            blocks[block] = self.memory.take(layout.bytes_of_block(block))
        return list(blocks.values())

    def keep(self, retained: Mapping[tuple[int, int], PageRange], *, not_before: int) -> None:
        """Free everything but ``retained`` of the dumps before pass ``not_before``."""
        for key in [key for key in self._blocks if key[0] < not_before]:
            if key in retained:
                self._shrink(key, retained[key])
            else:
                self._drop(key)

    def clear(self) -> None:
        """Free everything."""
        for key in list(self._blocks):
            self._drop(key)

    def layout(self, pass_index: int, group: int) -> SegmentLayout:
        """Return the layout of a dump."""
        return self._layouts[pass_index, group]

    def runs(self, pass_index: int, group: int, cached: PageRange) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
        """Yield runs of ``cached`` pages block by block: the first page, the end, and their bytes."""
        layout, blocks = self._layouts[pass_index, group], self._blocks[pass_index, group]
        page = cached.first
        while page < cached.last:
            block = layout.block_of_page(page)
            last, base = min(cached.last, layout.pages_of_block(block)[1]), layout.byte_of_block(block)
            yield page, last, blocks[block].data[layout.byte_of_page(page) - base : layout.byte_of_page(last) - base]
            page = last

    def page(self, pass_index: int, group: int, page: int) -> NDArray[np.uint8] | None:
        """Return the bytes of one page, None if it is not cached."""
        layout = self._layouts.get((pass_index, group))
        if layout is None:
            return None
        block = layout.block_of_page(page)
        region = self._blocks[pass_index, group].get(block)
        if region is None:
            return None
        base = layout.byte_of_block(block)
        low, high = layout.byte_of_page(page) - base, layout.byte_of_page(page + 1) - base
        return region.data[low:high] if region.holds(low, high) else None

    def _drop(self, key: tuple[int, int]) -> None:
        for region in self._blocks.pop(key).values():
            self.memory.give_back(region)
        del self._layouts[key]

    def _shrink(self, key: tuple[int, int], cached: PageRange) -> None:
        layout, blocks = self._layouts[key], self._blocks[key]
        low, high = layout.byte_of_page(cached.first), layout.byte_of_page(cached.last)
        for block, region in list(blocks.items()):
            base = layout.byte_of_block(block)
            end = base + region.data.size
            if end <= low or base >= high:
                self.memory.give_back(blocks.pop(block))
            elif low > base or high < end:
                self.memory.shrink(region, max(0, low - base), min(region.data.size, high - base))
