"""Rows that no pass dumped, as the blocks of a segment: from outside, or put in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from tiercache.store.row_codec import pack
from tiercache.store.segment_layout import SegmentLayout, compressed_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tiercache.store.segment_layout import Range
    from tiercache.store.segment_writer import Block, MovedBlock
    from tiercache.store.table import Group

    Int64s = NDArray[np.int64]
    Floats = NDArray[np.float32]

Layout = Callable[["Group", Iterable["Range"]], SegmentLayout]
"""How ranges of a group's rows are cut into pages and blocks."""
_PAGE_BYTES, _BLOCK_BYTES = 40 << 10, 4 << 20


def base_layout(group: Group, ranges: Iterable[Range]) -> SegmentLayout:
    """Return the layout of rows that no pass waits for: pages of 40 KiB, blocks of 4 MiB."""
    page_rows = max(1, _PAGE_BYTES // group.row_bytes)
    block_bytes = max(_BLOCK_BYTES, page_rows * group.row_bytes)
    if group.compression is not None:
        block_bytes -= block_bytes % (group.row_bytes * compressed_rows(group.row_bytes, page_rows))
    return SegmentLayout.of(
        row_bytes=group.row_bytes, page_rows=page_rows, block_bytes=block_bytes, ranges=tuple(ranges)
    )


def blocks_of(
    group: Group, layout: SegmentLayout, chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]
) -> Iterator[Block]:
    """Yield the blocks of a layout from its rows (n, W), every field of a row side by side, and their keys, in order.

    Rows are words. All blocks stand in the same two arrays.
    """
    for block, packed, keys, _ in _blocks_of(group, layout, chunks, layout.row_bytes // 4):
        yield group.index, block, packed, keys


def moved_blocks_of(
    group: Group, layout: SegmentLayout, chunks: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]]
) -> Iterator[MovedBlock]:
    """Do what ``blocks_of`` does with rows (n, W + 1): the last word of each is its last change."""
    for block, packed, keys, rows in _blocks_of(group, layout, chunks, layout.row_bytes // 4 + 1):
        yield group.index, block, packed, keys, rows[:, -1].view(np.uint32)


def _blocks_of(
    group: Group, layout: SegmentLayout, chunks: Iterable[tuple[Int64s, Floats]], words: int
) -> Iterator[tuple[int, NDArray[np.uint8], Int64s, Floats]]:
    """Yield block, rows as they are stored, keys, and rows (n, ``words``)."""
    rows = np.empty((min(layout.block_rows, layout.rows), words), dtype=np.float32)
    keys, packed = np.empty(rows.shape[0], np.int64), np.empty(rows.shape[0] * layout.row_bytes, np.uint8)
    block = filled = 0
    for some_keys, some_rows in chunks:
        taken = 0
        while taken < some_keys.size:
            count = min(some_keys.size - taken, keys.size - filled)
            keys[filled : filled + count] = some_keys[taken : taken + count]
            rows[filled : filled + count] = some_rows[taken : taken + count]
            filled, taken = filled + count, taken + count
            first, last = layout.rows_of_block(block)
            if filled == last - first:
                page, last_page = layout.pages_of_block(block)
                pages = pack(group, layout.page_sizes(page, last_page).tolist(), rows[:filled], packed)
                yield block, pages, keys[:filled], rows[:filled]
                block, filled = block + 1, 0
