"""The host tier: dumps as blocks in memory, from which later passes load and the writer writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tiercache.planning.host_plan import CachedRows
    from tiercache.rows.pinned import PinnedArena, PinnedRegion
    from tiercache.store.layout import SegmentLayout


class Run(NamedTuple):
    """Pages [first, last) of a layout, together in memory."""

    first: int
    last: int
    data: NDArray[np.uint8]


class HostTier:
    """Blocks of earlier dumps, by (pass, group).

    Used by one thread at a time: by the reader behind a load, by the writer when it makes room behind that, and by the
    training thread behind ``PassSwitcher.drain`` or when both rest. The writer also reads blocks at any time.
    """

    def __init__(self, memory: PinnedArena) -> None:
        self.memory = memory
        self._blocks: dict[tuple[int, int], dict[int, PinnedRegion]] = {}
        """By number, without those that were freed."""
        self._layouts: dict[tuple[int, int], SegmentLayout] = {}

    def enter(self, pass_index: int, group: int, layout: SegmentLayout) -> list[PinnedRegion]:
        """Make room for a dump and return its blocks, to be filled."""
        blocks = [self.memory.take(layout.bytes_of_block(block)) for block in range(layout.num_blocks)]
        if blocks:
            self._blocks[pass_index, group] = dict(enumerate(blocks))
            self._layouts[pass_index, group] = layout
        return blocks

    def keep(self, retained: Mapping[tuple[int, int], CachedRows], *, not_before: int) -> None:
        """Free all that ``retained`` does not name of the dumps before pass ``not_before``."""
        for key in [key for key in self._blocks if key[0] < not_before]:
            held = retained.get(key)
            if held is None:
                self._drop(key)
            else:
                self._shrink(key, held)

    def clear(self) -> None:
        """Free everything."""
        for key in list(self._blocks):
            self._drop(key)

    def layout(self, pass_index: int, group: int) -> SegmentLayout:
        """Return how the blocks of a dump are laid out."""
        return self._layouts[pass_index, group]

    def runs(self, pass_index: int, group: int, held: CachedRows) -> Iterator[Run]:
        """Yield the pages of ``held``, block after block."""
        key = pass_index, group
        layout = self._layouts[key]
        page = held.first
        while page < held.last:
            block = layout.block_of_page(page)
            last = min(held.last, layout.pages_of_block(block)[1])
            base = layout.byte_of_block(block)
            data = self._blocks[key][block].data
            yield Run(
                page,
                last,
                data[layout.byte_of_page(page) - base : layout.byte_of_page(last) - base],
            )
            page = last

    def page(self, pass_index: int, group: int, page: int) -> NDArray[np.uint8] | None:
        """Return the bytes of one page, or None where they are not here."""
        blocks = self._blocks.get((pass_index, group))
        if blocks is None:
            return None
        layout = self._layouts[pass_index, group]
        block = layout.block_of_page(page)
        region = blocks.get(block)
        if region is None:
            return None
        base = layout.byte_of_block(block)
        low, high = layout.byte_of_page(page) - base, layout.byte_of_page(page + 1) - base
        return region.data[low:high] if region.holds(low, high) else None

    def _drop(self, key: tuple[int, int]) -> None:
        for region in self._blocks.pop(key).values():
            self.memory.give_back(region)
        del self._layouts[key]

    def _shrink(self, key: tuple[int, int], held: CachedRows) -> None:
        layout, blocks = self._layouts[key], self._blocks[key]
        low, high = layout.byte_of_page(held.first), layout.byte_of_page(held.last)
        for block, region in list(blocks.items()):
            base = layout.byte_of_block(block)
            end = base + region.data.size
            if end <= low or base >= high:
                self.memory.give_back(blocks.pop(block))
            elif low > base or high < end:
                self.memory.shrink(region, max(0, low - base), min(region.data.size, high - base))
