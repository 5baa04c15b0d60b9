"""Which commit last changed each row: its *last change*, which a row that is put in another order keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from tiercache.store.layout import SegmentLayout
    from tiercache.store.runs import RowFilter
    from tiercache.store.segment import Segment
    from tiercache.store.store import Store

    Uint32s = NDArray[np.uint32]

CHANGED_BYTES = 4
"""Of a row's last change."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Changed:
    """The last changes of the rows of one layout, which a rewrite wrote. Shapes: B blocks of it.

    What a pass dumped or a fill took has none: all its rows last changed with the first commit that named it.
    """

    oldest_B: Uint32s
    """(B,): the least last change in each block."""
    newest_B: Uint32s
    """(B,): the greatest."""
    checksums_B: Uint32s
    """(B,): CRC32C of the last changes of each block; (0,) where those of the whole layout are one number, and none is
    stored."""

    @classmethod
    def to_come(cls, layout: SegmentLayout, *, stored: bool) -> Changed:
        """Return what is still to be filled in."""
        oldest, newest, sums = (np.zeros(n, np.uint32) for n in [layout.num_blocks] * 2 + [layout.num_blocks * stored])
        return cls(oldest_B=oldest, newest_B=newest, checksums_B=sums)

    @property
    def stored(self) -> bool:
        """Whether there is a block of last changes beside each of rows."""
        return self.checksums_B.size > 0

    def check(self, layout: SegmentLayout) -> None:
        """Raise ValueError where it is not of ``layout``, or contradicts itself."""
        blocks = layout.num_blocks
        if not self.oldest_B.size == self.newest_B.size == blocks or self.checksums_B.size not in {0, blocks}:
            raise ValueError(
                f"{self.oldest_B.size}, {self.newest_B.size} and {self.checksums_B.size} numbers say which commits "
                f"changed the rows of {blocks} blocks"
            )
        if np.any(self.oldest_B > self.newest_B):
            raise ValueError("rows of a block were last changed later than the last of them")
        if blocks and not self.stored and self.oldest_B.min() < self.newest_B.max():
            raise ValueError("several commits changed rows, and nothing says which row was changed by which")


class VersionReader:
    """Says which commit last changed rows of layouts; remembers the last block that it read.

    ``firsts`` has for each segment the first commit that named it. Raises CorruptBlockError.
    """

    def __init__(self, store: Store, firsts: Mapping[int, int]) -> None:
        self._store, self._firsts = store, firsts
        self._last: tuple[tuple[int, int, int], Uint32s] | None = None

    def __call__(self, segment: Segment, group: int, low: int, high: int) -> Uint32s:
        """Return the last changes of rows [low, high): (high - low,)."""
        found = np.empty(high - low, np.uint32)
        for block, begin, end in _blocks(segment.layouts[group], low, high):
            oldest, newest = self.bounds(segment, group, block)
            start = block * segment.layouts[group].block_rows
            found[begin - low : end - low] = (
                oldest if oldest == newest else self._block(segment, group, block)[begin - start : end - start]
            )
        return found

    def after(self, since: int) -> RowFilter:
        """Return what says which rows changed after commit ``since``; reads only blocks with some that did not."""

        def chosen(segment: Segment, group: int, low: int, high: int) -> NDArray[np.bool_]:
            found = np.empty(high - low, np.bool_)
            for block, begin, end in _blocks(segment.layouts[group], low, high):
                oldest, newest = self.bounds(segment, group, block)
                found[begin - low : end - low] = (
                    self(segment, group, begin, end) > since if oldest <= since < newest else newest > since
                )
            return found

        return chosen

    def bounds(self, segment: Segment, group: int, block: int) -> tuple[int, int]:
        """Return the least and the greatest last change in a block; reads nothing."""
        if not segment.changed:
            return self._firsts[segment.id], self._firsts[segment.id]
        changed = segment.changed[group]
        return int(changed.oldest_B[block]), int(changed.newest_B[block])

    def _block(self, segment: Segment, group: int, block: int) -> Uint32s:
        wanted = segment.id, group, block
        if self._last is None or self._last[0] != wanted:
            self._last = wanted, self._store.read_changed(segment, group, block)
        return self._last[1]


def _blocks(layout: SegmentLayout, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks that rows [low, high) touch, and which of these rows each has."""
    while low < high:
        block = low // layout.block_rows
        end = min(high, (block + 1) * layout.block_rows)
        yield block, low, end
        low = end
